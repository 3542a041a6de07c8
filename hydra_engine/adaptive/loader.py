"""A loader whose batches get their size when they are read, and the loop over its epochs.

torch's DataLoader reads the samples, in chunks that do not depend on the sizes that are asked for; they are collated
here. So workers that read ahead need not know the sizes, and a sample is given once per pass whatever the sizes do.

    sampler's order   a pass, drawn at its beginning and kept
    chunks            of the initial batch size, read ahead by workers; without workers: what is missing, when it is
    batches           of the asked sizes, across chunks, never across passes
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler

from hydra_engine import GuidedLoader, StepChoice
from hydra_engine.adaptive.adaptation import Adaptation, Autoscale
from hydra_engine.adaptive.rules import ScalingRule
from partitioners.plain_numbers import plain, whole_number

_END = object()  # of a pass
_KEYS = ("epoch", "generators", "given", "num_samples", "order", "passes")  # of a saved position


def _of_plain(name: str) -> Any:
    """Return an attribute of torch's loader, to be read."""
    return property(attrgetter(f"plain.{name}"))


class AdaptiveDataLoader(GuidedLoader):
    """A DataLoader whose batches have the size that is asked for when they are read.

    Until somebody asks for other sizes it gives the batches of torch's DataLoader under the same seed. Keyword
    arguments are those of torch's, except `batch_sampler`: batches are made here.

    Every sample of a pass is given once, whatever the sizes do; the last batch of a pass has the rest. A new iteration
    goes on where one that was left stood, also in another loader that loads its state dict. To look at a batch without
    taking it, keep the state dict and load it again.

    Random numbers are drawn when a pass begins, as torch's DataLoader does: first the seed of its workers, then the
    sampler's order. The pass that an iteration begins with begins at `iter()`, any other within `next()`. A pass that
    goes on after `load_state_dict` draws neither.

    Workers hand over samples, not batches, whose sizes they cannot know: collating takes place in this process.

    With an iterable data set and several workers, samples come in the order of torch's round robin over the workers, a
    chunk of `batch_size` samples from each. A batch may have samples of two workers, so that a worker's rest is not a
    short batch, as it is with torch's.
    """

    dataset: Any = _of_plain("dataset")
    batch_size: int = _of_plain("batch_size")  # the initial one, in samples
    sampler: Any = _of_plain("sampler")
    num_workers: int = _of_plain("num_workers")
    collate_fn: Callable[[list[Any]], Any] = _of_plain("collate_fn")
    drop_last: bool = _of_plain("drop_last")
    generator: torch.Generator | None = _of_plain("generator")

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        sampler: Any = None,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> None:
        """Raise ValueError for arguments that torch refuses, a batch sampler, or fewer samples than a batch."""
        if kwargs.pop("batch_sampler", None) is not None:
            raise ValueError(
                "batch_sampler: given, limit: none, since it would fix the sizes of the batches; give sampler= and "
                "batch_size="
            )
        batch_size = whole_number("batch_size", batch_size)
        # Torch's loader of the same data, which keeps no place. It checks the arguments, and fills in the defaults.
        self.plain: DataLoader[Any] = DataLoader(
            dataset, batch_size, shuffle=shuffle, sampler=sampler, num_workers=plain(num_workers), **kwargs
        )
        self._pinning = {name: kwargs.pop(name) for name in list(kwargs) if name.startswith("pin_")}
        self._pass = _Pass(self.plain, batch_size, kwargs)
        length = self._pass.num_samples
        if length is not None and length < batch_size:
            raise ValueError(
                f"batch_size: {batch_size}, limit: {length}, the samples of a pass; lower batch_size, or give more data"
            )
        self.epoch = 0  # iterations that ran to their end
        self.autoscale: Autoscale | None = None
        # Asked how a batch of so many samples is given: in micro-batches of these sizes, in samples. None: whole.
        self.cut: Callable[[int], Iterator[int]] | None = None

    def begin_anew(self) -> None:
        self._pass.resume(None, 0)

    @property
    def steps_per_pass(self) -> float | None:
        """Steps of the initial batch that a pass is worth; None: the data has no length."""
        length = self._pass.num_samples
        return None if length is None else length / self.batch_size  # with drop_last too: larger batches may give all

    @property
    def place(self) -> tuple[int, int, int]:
        """Epochs that are done, passes that are over, and samples of the pass in progress that were given."""
        return self.epoch, self.num_passes, self._pass.given

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pass": copy.copy(self._pass)}  # a copy has a place of its own

    def __len__(self) -> int:
        """Return the batches of a pass at the initial size. Raises TypeError for data without a length."""
        return len(self.plain)

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int, int] | None = None,
        gradient_accumulation: bool = True,
        *,
        scaling_rule: ScalingRule | None = None,
        replay: Sequence[StepChoice] = (),
    ) -> None:
        """Let batches grow to `max_batch_size` samples, in micro-batches of a size within the bounds, both included.

        gradient_accumulation: a step may have several micro-batches for a device, and then has two at least.
        scaling_rule: of the learning rate; default: `AdamScale` for Adam and its variants, else `AdaScale`.
        replay: choices of another run, `TaskReport.adaptive`, which are made again instead of new ones.

        Raises ValueError for limits that the initial size is not within.
        """
        max_batch_size = whole_number("max_batch_size", max_batch_size)
        if not isinstance(gradient_accumulation, bool):
            raise TypeError(f"gradient_accumulation: {gradient_accumulation!r}, limit: True or False; give one of them")
        if max_batch_size < self.batch_size:
            raise ValueError(
                f"max_batch_size: {max_batch_size}, limit: at least {self.batch_size}, the initial batch_size; raise "
                f"max_batch_size, or lower batch_size"
            )
        if local_bsz_bounds is not None:
            local_bsz_bounds = _checked_bounds(local_bsz_bounds, self.batch_size, gradient_accumulation)
        self.autoscale = Autoscale(
            max_batch_size=max_batch_size,
            local_bsz_bounds=local_bsz_bounds,
            gradient_accumulation=gradient_accumulation,
            scaling_rule=checked_rule(scaling_rule),
            replay=_checked_record(replay),
        )

    @property
    def adapts(self) -> bool:
        return self.autoscale is not None

    def chooser(self) -> Adaptation:
        assert self.autoscale is not None
        _check_for_tasks(self, self.autoscale)
        return Adaptation(self.autoscale, self.batch_size, steps_per_epoch=self.steps_per_pass)

    def __iter__(self) -> Iterator[Any]:
        """Iterate as `guide` says; without one, give a pass in batches of the initial size, or the rest of a pass."""
        if self.guide is not None:
            return self.iterate(self.guide)
        self._pass.open(self.opened)
        return self._pinned(self._batches(lambda: self.batch_size, one_pass=True))

    def iterate(self, next_size: Callable[[], int | None]) -> Iterator[Any]:
        """Give batches of the sizes, in samples, that `next_size` returns, one call for each; None ends the epoch.

        A batch is smaller at the end of a pass, where `drop_last` leaves it out if it would be smaller than the initial
        size too. The next batch then begins another pass; an epoch may end within a pass, and the next goes on with it.
        With an iterable data set it is asked once more where a pass turns out to be over.
        """
        self._pass.open(self.opened)
        return self._pinned(self._batches(next_size, one_pass=False))

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch that was given. Its tensors are not copied and do not change."""
        return {
            "epoch": self.epoch,
            "generators": tuple(each.get_state() for each in self._generators()),
            "given": self._pass.given,
            "num_samples": _length(self.dataset),
            "order": None if self._pass.indices is None else self._pass.indices.order,
            "passes": self.num_passes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the samples that were given, at any batch size: without loading them, where they have indices.

        An iterable data set is read from its beginning, and those samples are dropped. Raises ValueError for a position
        in other data.
        """
        self._check_state(state)
        for generator, saved in zip(self._generators(), state["generators"], strict=True):
            generator.set_state(saved)
        self._pass.resume(state["order"], state["given"])
        self.epoch, self.num_passes = state["epoch"], state["passes"]

    # -- reading

    def _batches(self, next_size: Callable[[], int | None], *, one_pass: bool) -> Iterator[Any]:
        while (size := next_size()) is not None:
            size = whole_number("next_size()", size)
            begins = self._pass.given == 0
            samples = self._next_samples(size)
            if samples is _END and one_pass:
                break
            if samples is _END and self._pass.indices is None and not begins:
                continue  # that the pass is over shows only now, and the epoch may be, too
            if samples is _END and (samples := self._next_samples(size)) is _END:
                raise ValueError(
                    f"a whole pass over the data gave no batch, batch_size: {self.batch_size}, drop_last: "
                    f"{self.drop_last}; give data with at least {self.batch_size if self.drop_last else 1} samples"
                )
            yield from self._collated(samples)
        self.epoch += 1

    def _collated(self, samples: list[Any]) -> Iterator[Any]:
        """Give the samples of a batch, in one or as `cut` says. They count as given with the last of them.

        Until then there is no flow, which is past them: an iteration that is left within a batch reads it again.
        """
        flow, self._pass.flow = self._pass.flow, None
        end, self.last_size = 0, len(samples)
        for size in (len(samples),) if self.cut is None else self.cut(len(samples)):
            begin, end = end, end + size
            batch = self.collate_fn(samples[begin:end])
            if end == len(samples):
                self._pass.flow, self._pass.given = flow, self._pass.given + end
            yield batch

    def _next_samples(self, size: int) -> Any:
        """Return the samples of the next batch of the pass in progress, or _END, which closes the pass."""
        self._pass.open(self.opened)
        if self._ends_pass(self._pass.remaining, size):  # a rest that is dropped is not loaded
            return _END
        samples = self._pass.read(size)
        return _END if self._ends_pass(len(samples), size) else samples

    def _ends_pass(self, number: float, size: int) -> bool:
        """Close the pass if it has no batch of the `number` samples that are there, where `size` were asked for."""
        if number >= size or number >= (self.batch_size if self.drop_last else 1):
            return False
        self.begin_anew()
        self.num_passes += 1
        return True

    def _pinned(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return them in page-locked memory, if that was asked for."""
        if not any(self._pinning.values()):
            return batches
        # torch's loader knows how to, and draws a seed, which is not to come from the user's generators.
        own = torch.Generator()
        given = _Given(batches)
        return iter(DataLoader(given, batch_size=None, collate_fn=lambda batch: batch, generator=own, **self._pinning))

    # -- positions

    def _generators(self) -> list[torch.Generator]:
        """The generators that orders are drawn from, the process-wide one aside."""
        found = {id(each): each for each in (self.generator, getattr(self.sampler, "generator", None))}
        return [each for each in found.values() if isinstance(each, torch.Generator)]

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if sorted(state) != list(_KEYS):
            raise ValueError(
                f"state: keys {sorted(state)}, limit: {list(_KEYS)}; load what state_dict() of such a loader returned"
            )
        length = _length(self.dataset)
        if state["num_samples"] != length:
            raise ValueError(
                f"samples of the data set: {length}, limit: {state['num_samples']}, those of the one that was saved; "
                f"load the state with the same data"
            )
        is_indexed, is_iterable = state["order"] is not None, self._pass.indices is None
        if is_indexed if is_iterable else state["given"] > 0 and not is_indexed:
            kinds = ("iterable", "indexed") if is_iterable else ("indexed", "iterable")
            raise ValueError(f"data set: {kinds[0]}, limit: {kinds[1]}, as it was saved; load the state with that one")
        if len(state["generators"]) != len(self._generators()):
            raise ValueError(
                f"generators: {len(self._generators())}, limit: {len(state['generators'])}, those of the loader that "
                f"was saved; give generator= where that one had it"
            )


def remaining_epochs_until(num_epochs: int, loader: AdaptiveDataLoader) -> Iterator[int]:
    """Give the numbers of the epochs that are not done, from the loader's to `num_epochs` - 1.

    An epoch is done when an iteration of the loader ran to its end. One that was left before is given again, and the
    loader then goes on with the rest of it, as after a restart: with nothing, if its state was saved at the last batch,
    so that the code behind the loop runs. Raises RuntimeError if an epoch did not use the loader.

        for epoch in remaining_epochs_until(30, loader):
            for batch in loader:
                ...
    """
    num_epochs = whole_number("num_epochs", num_epochs, 0)
    while loader.epoch < num_epochs:
        before = loader.place
        yield loader.epoch
        if loader.place == before:
            raise RuntimeError(
                f"epoch {loader.epoch} ended without a batch of the loader, limit: at least one, or the epochs would "
                f"never end; iterate the loader in every epoch that remaining_epochs_until gives"
            )


# -- samples


class _Indices(Sampler[list[int]]):
    """The order of a pass, handed out in chunks."""

    def __init__(self, sampler: Any, size: int) -> None:
        self.sampler = sampler
        self.size = size  # of the next chunk
        self.start = 0  # samples before the first chunk
        self.order: Tensor | None = None  # until a pass begins

    def drawn(self) -> Tensor:
        """Return the order of the pass, which is drawn with the first call."""
        if self.order is None:
            self.order = _order_of(self.sampler)
        return self.order

    def __iter__(self) -> Iterator[list[int]]:
        # A generator: torch draws its seed between iter() and the first chunk, before the sampler draws.
        order, start = self.drawn(), self.start
        while start < len(order):
            chunk = order[start : min(start + self.size, len(order))].tolist()
            start += len(chunk)
            yield chunk


class _Pass:
    """The samples of the pass in progress, of which the first ones were given."""

    def __init__(self, plain: DataLoader[Any], batch_size: int, kwargs: dict[str, Any]) -> None:
        """`plain`: torch's loader of the data, like which another one reads lists of samples; kwargs: of both.

        A chunk from workers is one tensor instead.
        """
        self._plain = plain
        self.indices: _Indices | None = None  # None: the data is iterable
        self.flow: Iterator[Any] | None = None  # the next samples
        self.given = 0
        kwargs |= {
            "num_workers": plain.num_workers,
            "collate_fn": _packed if plain.num_workers else _as_list,
            "generator": plain.generator,
        }
        kwargs.pop("drop_last", None)  # of a batch, which may be more or less than a chunk
        if isinstance(plain.dataset, IterableDataset):
            self._chunks = DataLoader(plain.dataset, batch_size if plain.num_workers else 1, **kwargs)
        else:
            self.indices = _Indices(plain.sampler, batch_size)
            self._chunks = DataLoader(plain.dataset, batch_sampler=self.indices, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "flow": None}  # a copy goes on by the samples given

    @property
    def num_samples(self) -> int | None:
        """Samples of a whole pass; None: the data has no length."""
        return _length(self._plain.dataset if self.indices is None else self._plain.sampler)

    @property
    def remaining(self) -> float:
        """Samples that are yet to be given; infinite: it shows where an iterable data set ends."""
        return math.inf if self.indices is None else len(self.indices.drawn()) - self.given

    def resume(self, order: Tensor | None, given: int) -> None:
        """Go on behind the samples that were given of a pass with this order; None and 0: with another pass."""
        self.flow, self.given = None, given
        if self.indices is not None:
            self.indices.order = order

    def open(self, opened: Callable[[DataLoader[Any]], Iterator[Any]]) -> None:
        """Open the samples of the pass, or those of a new one, which draws; `opened`: makes a loader's iterator."""
        if self.flow is not None:
            return
        order = None if self.indices is None else self.indices.order
        if self.indices is not None:
            self.indices.start = self.given
        if self.given or order is not None:
            # The pass drew its seed when it began; that torch draws one here must not move the user's generators.
            self._chunks.generator = (self._plain.generator or torch.default_generator).clone_state()
        try:
            chunks = opened(self._chunks)
        finally:
            self._chunks.generator = self._plain.generator
        if self.indices is not None:
            self.indices.drawn()  # without workers torch would ask for it at the first batch
        self.flow = _samples_of(chunks, self.given if self.indices is None else 0)

    def read(self, size: int) -> list[Any]:
        """Return the next samples: so many, or the rest of them."""
        assert self.flow is not None
        if self.indices is not None and self._plain.num_workers == 0:
            self.indices.size = size
        try:
            return list(islice(self.flow, size))
        except BaseException:
            self.flow = None  # it is past samples that were not given
            raise


def _samples_of(chunks: Iterator[Any], num_dropped: int) -> Iterator[Any]:
    """Give the samples of one pass, without the first ones, which are read only when a sample is asked for."""
    num_read = 0
    for chunk in chunks:
        for sample in _unpacked(chunk) if isinstance(chunk, Tensor) else chunk:
            num_read += 1
            if num_read > num_dropped:
                yield sample
    if num_read < num_dropped:
        raise ValueError(
            f"the data set ended after {num_read} samples, limit: {num_dropped}, which were given before the state was "
            f"saved; load the state with the same data"
        )


class _Given(IterableDataset[Any]):
    """Batches as a data set, for torch's loader."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches


class _Packer(ForkingPickler):
    """Pickles tensors with their data: torch's way needs an open file for each, and a process may have few."""

    def reducer_override(self, value: Any) -> Any:
        is_plain = type(value) is Tensor and value.layout == torch.strided and value.device.type == "cpu"
        if not is_plain or value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg():
            return NotImplemented
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor_of, (data, value.dtype, tuple(value.shape))


def _tensor_of(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(data).view(dtype).reshape(shape)


def _packed(samples: Any) -> Tensor:
    """Return the samples as one tensor of bytes, which crosses processes in one piece of shared memory."""
    buffer = io.BytesIO()
    _Packer(buffer, 5).dump(_as_list(samples))
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def _unpacked(chunk: Tensor) -> list[Any]:
    return cast(list[Any], ForkingPickler.loads(cast(Any, chunk.numpy())))


def _as_list(samples: Any) -> list[Any]:
    if not isinstance(samples, (list, tuple)):
        raise TypeError(
            f"__getitems__ of the data set returned a {type(samples).__name__}, limit: a list of samples, since a "
            f"batch may have samples of several calls; return a list"
        )
    return list(samples)


def _order_of(sampler: Any) -> Tensor:
    indices = list(sampler)
    try:
        order = torch.tensor(indices) if indices else torch.empty(0, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError):
        order = None
    if order is None or order.dim() != 1 or order.is_floating_point() or order.dtype == torch.bool:
        odd = next((each for each in indices if type(plain(each)) is not int), indices[0])
        raise TypeError(f"sampler: gives {odd!r}, limit: an int for each sample; number the samples of the data set")
    return order.to(torch.int64)


# -- arguments


def _length(data: Any) -> int | None:
    """Return the samples of data with a length."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _check_for_tasks(loader: AdaptiveDataLoader, settings: Autoscale) -> None:
    """Raise ValueError for a loader that a loop may have, and no task."""
    if loader.cut is not None:
        raise ValueError(
            "an AdaptiveDataParallel leads it, limit: nobody, since the engine chooses batches; give the task a "
            "loader of its own, or call close() of the other first"
        )
    low, most = (settings.local_bsz_bounds or (1, 0))[0], loader.batch_size // 2
    if low > most:
        raise ValueError(
            f"micro-batches of at least {low} samples, limit: {most}, half of its batch_size, since noise shows in "
            f"how two micro-batches differ; lower the bound, or raise batch_size"
        )


def checked_rule(rule: ScalingRule | None) -> ScalingRule | None:
    """Raise TypeError for what is no rule."""
    if rule is not None and not isinstance(rule, ScalingRule):
        raise TypeError(
            f"scaling_rule: {rule!r} is not a ScalingRule; give AdaScale(), AdamScale(), LinearScale(), SqrtScale() or "
            f"LEGWScale(...)"
        )
    return rule


def _checked_record(choices: Sequence[StepChoice]) -> tuple[StepChoice, ...]:
    if not isinstance(choices, Sequence) or not all(isinstance(each, StepChoice) for each in choices):
        raise TypeError(f"replay: {choices!r} is not a list of StepChoice; give another run's TaskReport.adaptive")
    return tuple(choices)


def _checked_bounds(bounds: Any, batch_size: int, accumulates: bool) -> tuple[int, int]:
    """Return the bounds of a micro-batch, in samples. Raises ValueError where the initial batch is not within them."""
    name = "local_bsz_bounds"
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise TypeError(f"{name}: {bounds!r}, limit: a pair of ints; give (smallest, largest)")
    low, high = (whole_number(f"{name}[{k}]", each) for k, each in enumerate(bounds))
    if low > high:
        raise ValueError(f"{name}: {(low, high)}, limit: the smallest first; give {(high, low)}")
    most = batch_size // 2 if accumulates else batch_size
    if low > most:
        half = " // 2, since a step that accumulates has two micro-batches at least" if accumulates else ""
        raise ValueError(
            f"{name}[0]: {low}, limit: {most}, the initial batch_size{half}; lower it, or raise batch_size"
        )
    if high < batch_size and not accumulates:
        raise ValueError(
            f"{name}[1]: {high}, limit: at least {batch_size}, the initial batch_size; raise it, lower batch_size, or "
            f"set gradient_accumulation=True"
        )
    return low, high
