"""Positions of a task and its loader in their data, and the way to bring another loader to one.

A loader with a `state_dict` of its own, as torchdata's `StatefulDataLoader` has, is left to it. Any other begins its
epoch again, with the random states that the epoch began with, and the batches before the position are read and dropped.
At the end every generator is set to where it stood. Persistent workers that were opened before are ended: new ones
begin as those of a fresh process.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import IOBase
from itertools import islice
from types import FunctionType, MappingProxyType
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter  # what loaders keep has no public class

from hydra_engine.data.generators import contents, held_by, num_workers_of, set_states, states_of
from hydra_engine.data.streams import RandomState, Stream, capture, copied, installed, random_from_state
from hydra_engine.system import begin_workers
from hydra_engine.tasks import GuidedLoader, StepChoice, from_json, to_json

_MISSING = object()
_NUMBERS = (bool, int, float)
_MOST_NUMBERS = 64  # of a list, the first ones
_MOST_SHOWN = 40  # characters of them
_WORKERS = "has persistent workers, which may have drawn random numbers in earlier epochs"
_KEPT = (
    "the loader keeps one iterator over all epochs, whose place in the data is not known, so that this epoch may miss "
    "samples and repeat others; give it a state_dict, or a loader that begins anew at each iter()"
)
_OUT_OF_ORDER = (
    "the loader gives batches as its workers finish them (in_order=False), so that the epoch in progress may miss "
    "samples and repeat others; set in_order=True"
)
_REMEDY = (
    "is not followed, so that batches after a resume may differ from those of an uninterrupted run; make the loader "
    "with a generator of its own, or give it a state_dict"
)


class EpochStart(NamedTuple):
    """States that an epoch's iterator was opened with."""

    random: RandomState
    generators: tuple[Any, ...]  # states of those that the loader holds
    has_workers: bool  # persistent ones of an epoch before
    traits: Mapping[str, Any] = MappingProxyType({})  # of the loader, which a place in it depends on


@dataclass(frozen=True, kw_only=True)
class LoaderPosition:
    """A loader's position in an epoch, and there the task's stream, the loader's generators, its own state dict."""

    num_batches: int  # of the epoch that were read
    start: EpochStart
    random: RandomState
    generators: tuple[Any, ...]
    own: Any = None  # its state dict, if it has one
    keeps_iterator: bool = False  # that gave batches of an epoch before, too
    moved: Mapping[str, Any] = field(default_factory=dict)  # what `numbers_of` had otherwise before the first batch

    def to_state(self) -> dict[str, Any]:
        """Return it as a nested state, which a checkpoint takes."""
        start = {**self.start._asdict(), "random": self.start.random._asdict()}
        return {**vars(self), "start": start, "random": self.random._asdict()}

    @classmethod
    def from_state(cls, saved: Mapping[str, Any]) -> LoaderPosition:
        start = {**saved["start"], "random": random_from_state(saved["start"]["random"])}
        return cls(**{**saved, "start": EpochStart(**start), "random": random_from_state(saved["random"])})


def epoch_start(loader: Any, stream: Stream) -> EpochStart:
    """Return the states that an epoch is about to begin with; to be called before `iter`."""
    return EpochStart(
        random=stream.state,
        generators=states_of(loader),
        has_workers=any(each._iterator is not None for each in _persistent(loader)),
        traits=_traits(loader),
    )


def position_of(
    loader: Any,
    stream: Stream,
    start: EpochStart,
    num_batches: int,
    held: Sequence[Any] = (),
    unread: Mapping[str, Any] | None = None,
) -> LoaderPosition:
    """Return a loader's position, right after a batch was read: a state dict knows no earlier one.

    held: `kept_iterators` as the epoch began. One that is still there gives batches of this epoch, too.
    unread: `numbers_of` before the first batch of all.
    """
    own = None
    if isinstance(loader, GuidedLoader):  # whose states hold nothing that changes
        own = loader.state_dict()
    elif _is_stateful(loader):
        own = copied(loader.state_dict())
    now = kept_iterators(loader) if held and num_batches else []
    return LoaderPosition(
        num_batches=num_batches,
        start=start,
        random=stream.state,
        generators=states_of(loader),
        own=own,
        keeps_iterator=any(each is other for each in held for other in now),
        moved={} if unread is None or own is not None else _moved(unread, numbers_of(loader)),
    )


def restore(
    loader: Any, stream: Stream, position: LoaderPosition, begin: Callable[[], None] = lambda: None
) -> tuple[Iterator[Any], list[str]]:
    """Bring a loader and the task's stream to a position; begin: called before each batch that is read on the way.

    Returns the iterator, and why its batches may be other ones than those of the run that was saved. Raises ValueError
    for a loader of another kind, a shorter one, or a generator that was read before.
    """
    changes = list(_changes(position.start.traits, _traits(loader)))
    held = [each for each in kept_iterators(loader) if _was_read(each)]
    try:
        iterator, doubt = _restored(loader, stream, position, begin)
    except ValueError as error:
        if changes:
            raise ValueError(f"{error} (the loader's {'; '.join(changes)})") from error
        raise
    is_read_on = any(each is other for each in held for other in kept_iterators(loader))
    if position.own is None and (position.keeps_iterator or is_read_on):
        doubt = _KEPT
    elif doubt is not None:
        doubt = _told(doubt)
    elif position.num_batches and position.own is None and _is_out_of_order(loader):
        doubt = _OUT_OF_ORDER
    elif changed := _moved(numbers_of(loader), position.moved):
        name, value = next(iter(changed.items()))
        here, saved = (str(each)[:_MOST_SHOWN] for each in (numbers_of(loader).get(name), value))
        doubt = _told(f"has {name} = {here} here, and had {saved} as it was saved")
    effect = "the program's counts"
    if position.num_batches:
        effect += (
            f", and since the task continues after {position.num_batches} batches of an epoch, that epoch may miss "
            f"samples and repeat others; resume with the loader that was saved, or at the end of an epoch"
        )
    messages = [f"the loader's {each}; {effect}" for each in changes]
    return iterator, [*messages, *([] if doubt is None else [doubt])]


def _restored(
    loader: Any, stream: Stream, position: LoaderPosition, begin: Callable[[], None]
) -> tuple[Iterator[Any], str | None]:
    start = position.start
    _check_unread(loader)
    if (position.own is not None) != _is_stateful(loader):
        kinds = ("had no", "has one") if position.own is None else ("had a", "has none")
        raise ValueError(
            f"the loader that was saved {kinds[0]} state_dict, and this one {kinds[1]}; resume with the loader that "
            f"was saved"
        )
    _end_workers(loader)
    stream.state = start.random
    begins = position.num_batches == 0  # the epoch begins again, and what opening it draws is not drawn yet
    if position.own is not None:
        loader.load_state_dict(position.own)
    if begins or position.own is None:
        set_states(loader, start.generators)
    if position.own is not None or (begins and not start.has_workers):
        with installed(stream), begin_workers(num_workers_of(loader)):
            iterator = iter(loader)
        if not begins:
            stream.state = position.random
        return iterator, None
    if start.has_workers:
        _make_workers(loader, stream, start.generators)
    with installed(stream), begin_workers(num_workers_of(loader)):
        drew_later = _passed(iterator := iter(loader), position, begin)
    doubt = _WORKERS if start.has_workers else None
    if begins:
        return iterator, doubt
    # What drew at every batch may have drawn in between others that are not here, such as the model's layers.
    was_alone = stream.state._replace(device=position.random.device).same_as(position.random)
    stream.state = position.random
    if len(states_of(loader)) != len(position.generators):
        doubt = doubt or "makes random generators while it reads"
    else:
        set_states(loader, position.generators)
    if drew_later and not was_alone and not _draws_its_order_first(loader):
        doubt = "draws from the process-wide generators at every batch, as others do in between"
    return iterator, doubt


def restore_between(loader: Any, stream: Stream, generators: tuple[Any, ...], *, was_open: bool) -> str | None:
    """Bring a loader to where it stood between two readings from its beginning; `was_open`: it was read before.

    Returns why its batches may be other ones than those of the run that was saved. Raises ValueError for a generator
    that was read before.
    """
    _check_unread(loader)
    _end_workers(loader)
    set_states(loader, generators)
    if not (was_open and _persistent(loader)):
        return None
    _make_workers(loader, stream, generators)
    return _told(_WORKERS)


def _told(doubt: str) -> str:
    return f"the loader {doubt}, which {_REMEDY}"


def _check_unread(loader: Any) -> None:
    """Refuse a generator that was read before: it would go on, and batches would be missed."""
    if inspect.isgenerator(loader) and inspect.getgeneratorstate(loader) != inspect.GEN_CREATED:
        raise ValueError(
            "the loader is a generator that was read before, and gives no batch twice; give one that starts anew at "
            "each iter() (a list, a DataLoader, an object whose __iter__ is a generator), or a new generator"
        )


def _traits(loader: Any) -> dict[str, Any]:
    """Return what decides which batches come before a place in a loader, beside random numbers.

    No length of a class of the user's: asking for it may draw, or take long.
    """
    found: dict[str, Any] = {"class": type(loader).__name__}
    inner = next((each for each in (loader, *held_by(loader)) if isinstance(each, DataLoader)), None)
    if isinstance(loader, (list, tuple)):
        found["length"] = len(loader)
    if inner is None:
        return found
    batches = inner.sampler if inner.batch_sampler is None else inner.batch_sampler
    found |= {"batch_size": getattr(batches, "batch_size", inner.batch_size)}
    found |= {"drop_last": getattr(batches, "drop_last", inner.drop_last)}
    samples: Any = getattr(batches, "sampler", batches)
    found["sampler"] = type(samples).__name__
    if isinstance(inner.dataset, IterableDataset):  # each worker reads on its own
        found["num_workers"] = inner.num_workers
    elif type(samples).__module__.startswith("torch."):
        found["samples"] = len(samples)
    plain = (bool, int, str, type(None))  # a checkpoint takes these
    return {name: value if type(value) in plain else repr(value) for name, value in found.items()}


def numbers_of(loader: Any) -> dict[str, Any]:
    """Return the numbers that a loader holds in attributes, and lists of them, such as a sampler's count of epochs."""
    found: dict[str, Any] = {}
    for holder in (loader, *held_by(loader)):
        for name, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
            if type(value) in (list, deque):
                first = list(islice(value, _MOST_NUMBERS))
                value = repr(first) if all(type(each) in _NUMBERS for each in first) else None
            # Torch's loaders note in those with an underscore what they have warned of.
            if type(value) in (*_NUMBERS, str) and not (isinstance(holder, DataLoader) and name.startswith("_")):
                found[f"{type(holder).__name__}.{name}"] = value
    return found


def _moved(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `now` that were otherwise before."""
    return {name: value for name, value in now.items() if name not in before or before[name] != value}


def _changes(saved: Mapping[str, Any], traits: Mapping[str, Any]) -> Iterator[str]:
    """Say what of a loader differs from the one that was saved, with both values."""
    for name in (name for name in traits if name in saved and traits[name] != saved[name]):
        yield f"{name}: {traits[name]!r} in the program, {saved[name]!r} in the checkpoint"


def _is_out_of_order(loader: Any) -> bool:
    both = (each for each in (loader, *held_by(loader)) if isinstance(each, DataLoader))
    return any(each.num_workers > 0 and not getattr(each, "in_order", True) for each in both)


def kept_iterators(loader: Any) -> list[Iterator[Any]]:
    """Return iterators that a loader holds and that cannot begin again, as those of timm's and YOLO's loaders."""
    held = (each for holder in (loader, *held_by(loader)) for each in contents(holder))
    return [each for each in held if _is_used_up(each)]


def _is_used_up(value: Any) -> bool:
    """Return True for an iterator that gives its values once; one of a class of the user's may begin again."""
    if not isinstance(value, Iterator) or isinstance(value, IOBase):
        return False
    own: Any = type(value).__iter__
    return not isinstance(own, FunctionType) or not own.__code__.co_names  # it only returns itself


def _was_read(iterator: Iterator[Any]) -> bool:
    """Return True unless an iterator is known to stand at its beginning."""
    if isinstance(iterator, _BaseDataLoaderIter):
        return bool(iterator._num_yielded)
    return not (inspect.isgenerator(iterator) and inspect.getgeneratorstate(iterator) == inspect.GEN_CREATED)


def _is_stateful(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


# -- persistent workers


def _persistent(loader: Any) -> list[Any]:
    """Torch's loaders with persistent workers: the loader, or those in it."""
    return [each for each in (loader, *held_by(loader)) if isinstance(each, DataLoader) and each.persistent_workers]


def _end_workers(loader: Any) -> None:
    """End those that somebody has opened: `iter` would go on with what they have drawn, and draw no seed for them."""
    kept = kept_iterators(loader)
    for each in _persistent(loader):
        if any(each._iterator is other for other in kept):
            continue  # the only one that this loader will ever read
        iterator, each._iterator = each._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()


def _make_workers(loader: Any, stream: Stream, generators: tuple[Any, ...]) -> None:
    """Make those of an epoch before, for which `iter` then draws no seed. What making them draws is dropped."""
    with installed(Stream(stream.state)), begin_workers(num_workers_of(loader)):
        for each in _persistent(loader):
            iter(each)
    set_states(loader, generators)


# -- reading on


def _passed(iterator: Iterator[Any], position: LoaderPosition, begin: Callable[[], None]) -> bool:
    """Drop what lies before a position. Return True if this draws at every batch, and not only at the first."""
    after_first = None
    for k in range(position.num_batches):
        begin()
        if next(iterator, _MISSING) is _MISSING:
            raise ValueError(
                f"the loader ended after {k} batches, and was saved after {position.num_batches}; resume with the "
                f"data set and the loader that were saved"
            )
        after_first = after_first or capture()
    return after_first is not None and not capture().same_as(after_first)


def _draws_its_order_first(loader: Any) -> bool:
    """Return True if which samples an epoch has, and in which order, is settled with its first batch."""
    own = (DataLoader.__iter__, DataLoader._get_iterator)
    is_plain = isinstance(loader, DataLoader) and (type(loader).__iter__, type(loader)._get_iterator) == own
    if not is_plain or isinstance(loader.dataset, IterableDataset):
        return False
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    samplers = (batches, getattr(batches, "sampler", batches))
    return all(type(each).__module__.startswith("torch.") for each in samplers)


@dataclass(frozen=True, kw_only=True)
class TaskPosition:
    """A task's position in its data, right after a training batch was read or an epoch has begun."""

    num_steps: int  # training batches that were read
    epoch: int
    loader: LoaderPosition
    validation: tuple[Any, ...]  # states of the generators that the validation loader holds
    num_evaluations: int  # that ended
    num_evaluated: int  # batches of all evaluations
    is_evaluated: bool = False  # an evaluation that is due after `num_steps` steps comes before this position
    choice: StepChoice | None = None  # of an adaptive task: that of the last batch

    def with_random(self, random: RandomState) -> TaskPosition:
        """The same position, for a stream that others drew from since."""
        return replace(self, loader=replace(self.loader, random=random))

    def to_state(self) -> dict[str, Any]:
        """Return it as a nested state, which a checkpoint takes."""
        return {**vars(self), "loader": self.loader.to_state(), "choice": to_json(self.choice)}

    @classmethod
    def from_state(cls, saved: Mapping[str, Any]) -> TaskPosition:
        loader, choice = LoaderPosition.from_state(saved["loader"]), from_json(StepChoice | None, saved.get("choice"))
        return cls(**{**saved, "loader": loader, "choice": choice})


class Beginning(NamedTuple):
    """Where a task began. One that was paused before its first commit begins there again, since its loader was read."""

    seed: int
    position: TaskPosition | None  # None: it went on from what was saved of it
