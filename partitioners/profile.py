"""Measures the costs of a model's layers, one at a time: on copies with values, or on fake tensors."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from partitioners.boundary import Boundary, UnfitTensor, fingerprint
from partitioners.copies import Copies, FakeCopies
from partitioners.cost import LayerCost
from partitioners.measure import STATED_RATES, Rates, Work, count, count_evaluation, timed
from partitioners.precision import DTYPES


class GpuKernels(TorchFunctionMode):
    """Makes layers on the CPU save the tensors that they would save on a GPU.

    - Attention: flash kernels, which keep query, key, value, output and a logarithm per row, and redraw dropout in
      backward; the CPU's own fall back to a full matrix of weights as soon as there is dropout.
    - Dropout: a mask of booleans instead of one of the input's type.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            kwargs.pop("dropout_p", None)
            return func(*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:], **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0:
        return input
    output: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return input.copy_(output) if inplace else output


# More than seven parameters: it is public, and four of them are settings that are named one by one.
def profile(
    model: nn.Module | Iterable[nn.Module],
    inputs: Any,
    target: Any,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    *,
    device: torch.device | str | None = None,
    precision: str = "float32",
    rates: Rates | None = None,
    time_layers: bool = True,
) -> list[LayerCost]:
    """Return the costs of every layer, forward and backward; those of the last layer include the loss.

    model: an ``nn.Sequential``, a module whose children run in order, or the layers themselves. It may lie on the meta
        device: then nothing is computed, and a model of any size is profiled in the memory of its structure.
    inputs: the one argument of the first layer: a tensor, or a tuple, list or dict of tensors.
    device: None or "cpu": bytes are those of the CPU's kernels. "cuda": estimates, with the kernels of a GPU in mind
        (flash attention, masks of booleans).
    precision: "float32", "bfloat16" or "float16": parameters are cast, norms and the loss compute in float32.
    rates: stated rates, which give the seconds of a layer that cannot be timed; default `STATED_RATES`.
    time_layers: run each kind of layer twice for its seconds, if it has values and the device is here.

    A `MemoryMeter` counts bytes, on fake tensors: this uses no memory and computes nothing, and layers of equal
    structure are counted once. Fake tensors do not show what depends on values. A layer that needs values is run
    metered, with the same result to the byte, or refused if it has none. Of layers that call the same operations on the
    same shapes, the first is timed.

    Leaves parameters, gradients, buffers, generators, flags, grad mode and the loss's own state as they were: a layer
    is copied while it is measured. An exception in a layer comes out as it is, with a note that names the layer.
    """
    place = _place(device)
    if precision not in DTYPES:
        raise ValueError(f"precision: {precision!r}, known: {', '.join(map(repr, DTYPES))}")
    layers = named_layers(model)
    can_run = _can_run(place, [layers, loss_fn, inputs, target])
    profiler = _Profiler(place, precision, layers, loss_fn, rates)
    with _generators_kept(), torch.enable_grad():
        if time_layers or not can_run:
            return profiler.costs(inputs, target, runs=can_run)
        try:
            return profiler.costs(inputs, target, runs=False)
        except DependsOnValues:
            return profiler.costs(inputs, target, runs=True)


def profile_shapes(
    model: nn.Module | Iterable[nn.Module],
    inputs: Any,
    target: Any,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    precision: str = "float32",
    device: torch.device | str | None = None,
) -> list[LayerCost]:
    """Return what `profile` counts on fake tensors, and no more: for use while other threads compute and draw.

    device: whose kernels, as `profile` has it.

    Leaves the process-wide generators alone, also where a layer draws from `random` or `numpy`. Raises DependsOnValues.
    """
    profiler = _Profiler(_place(device), precision, named_layers(model), loss_fn)
    with torch.enable_grad():
        return profiler.costs(inputs, target, runs=False)


def profile_evaluation(
    model: nn.Module | Iterable[nn.Module],
    inputs: Any,
    target: Any = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    *,
    precision: str = "float32",
    may_run: bool = True,
) -> list[LayerCost]:
    """Return the costs of every layer in an evaluation: a forward in eval() under no_grad, which saves nothing.

    There are no gradients, whatever requires them, and the last shard too has the bytes of a forward. Without a
    ``loss_fn``, the last layer's output leaves. Bytes are counted on fake tensors, seconds are estimates.

    may_run: run layers metered, on copies, if fake tensors cannot count them. Without it, DependsOnValues or the
        layer's own exception comes out. The process-wide generators are then left alone: for use while other threads
        draw.
    """
    profiler = _Profiler(torch.device("cpu"), precision, named_layers(model), loss_fn, evaluates=True)
    if not may_run:
        return profiler.costs(inputs, target, runs=False)
    with _generators_kept():
        try:
            return profiler.costs(inputs, target, runs=False)
        except Exception:  # whatever fake tensors cannot do; the layer's own mistake is made again
            return profiler.costs(inputs, target, runs=True)


class _Quiet(logging.Filter, threading.local):
    """Keeps the log of fake tensors from printing tracebacks of errors that are reported anyway, thread by thread."""

    is_on = False

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.is_on

    def __enter__(self) -> None:
        self.is_on = True

    def __exit__(self, *_: object) -> None:
        self.is_on = False


_QUIET = _Quiet()
logging.getLogger("torch._subclasses.fake_tensor").addFilter(_QUIET)


class DependsOnValues(ValueError):
    """A layer depends on values, which fake tensors do not have."""


class _Batch:
    """A batch on its way through the layers, in fake tensors or in real ones."""

    def __init__(self, copies: Copies, inputs: Any) -> None:
        self.copies = copies
        self.value = Boundary.of_layer(copies.inputs(inputs)).detached()  # that enters the next layer
        self.skips: dict[str, Boundary] = {}  # what layers have put so far

    def go_on(self, output: Boundary, leaving: Mapping[str, Boundary]) -> None:
        """A layer is through: this leaves it."""
        self.value = output
        self.skips |= {name: boundary.detached() for name, boundary in leaving.items()}


class _Kind(NamedTuple):
    """What layers have in common that take the same time: operations, and the shapes of all that comes and goes."""

    calls: tuple[Any, ...]
    enters: Any
    leaves: Any
    skips: tuple[Any, ...]

    @classmethod
    def of(cls, work: Work, batch: _Batch, output: Boundary) -> _Kind:
        skips = (*work.frame.gotten, *((name, each.fingerprint) for name, each in work.leaving.items()))
        return cls(work.calls, batch.value.fingerprint, output.fingerprint, skips)


class _Profiler:
    """Takes a batch through the layers, in fake tensors and, if it can, in real ones."""

    def __init__(
        self,
        place: torch.device,
        precision: str,
        layers: Sequence[tuple[str, nn.Module]],
        loss_fn: Any,
        rates: Rates | None = None,
        *,
        evaluates: bool = False,
    ) -> None:
        self._place, self._rates = place, rates or STATED_RATES[place.type, precision]
        self._layers, self._loss_fn = layers, loss_fn
        self._evaluates = evaluates
        self._last: Work | None = None  # of the layer at hand
        self._count_work = count_evaluation if evaluates else count
        model = [layer for _, layer in layers]
        self._fakes = FakeCopies(precision, model)
        self._reals = Copies(precision, place if place.type != "cpu" else None, model)

    def costs(self, inputs: Any, target: Any, *, runs: bool) -> list[LayerCost]:
        """Take a batch through all layers; `runs`: real tensors go along."""
        model = [layer for _, layer in self._layers]
        shares, shared_bytes = _sharing(model), [0] * len(model) if self._evaluates else _shared_bytes(model)
        self._target = target
        with self._fakes.mode:
            self._fake = _Batch(self._fakes, inputs)
        self._real = _Batch(self._reals, inputs) if runs else None
        self._counted: dict[Any, tuple[dict[str, Any], _Kind, Boundary, dict[str, Boundary]]] = {}
        self._timed: dict[_Kind, tuple[dict[str, Any], Boundary, dict[str, Boundary]]] = {}
        costs = []
        for index, (name, layer) in enumerate(self._layers):
            loss_fn = self._loss_fn if index == len(model) - 1 else None
            self._last, where = None, name
            try:
                fields = self._layer(layer, loss_fn)
            except UnfitTensor as error:
                raise UnfitTensor(f"{where}: {error}") from error
            except Exception as error:
                blamed = (True, False) if self._last is None else self._last.blamed
                named = itertools.compress((where, "loss_fn"), blamed)
                noted(error, f"in {' or '.join(named)}, while it was profiled")
                raise
            # A copy: layers of equal structure were counted once, and lie at other addresses.
            fields = fields | {"shares_with": shares[index], "shared_bytes": shared_bytes[index]}
            costs.append(LayerCost(index=index, name=name, **fields))
        return costs

    def _layer(self, layer: nn.Module, loss_fn: Any) -> dict[str, Any]:
        """Return the costs of the next layer, with the loss if it is the last."""
        if self._real is None:
            return self._count(layer, loss_fn)[0]
        found, work = None, None
        if not self._evaluates:
            with contextlib.suppress(Exception):  # whatever fake tensors cannot do; the layer's own mistake shows below
                found = self._count(layer, loss_fn)
        if found is None:
            work = self._work(self._real, layer, loss_fn)
            fields, output = self._count_work(work, self._real.value, self._rates)
            found = fields, _Kind.of(work, self._real, output)
            if self._evaluates:
                self._real.go_on(output, work.leaving)
                return fields
            self._fake.go_on(self._fakes.like(output), {k: self._fakes.like(each) for k, each in work.leaving.items()})
        fields, kind = found
        if kind not in self._timed:
            work = work or self._work(self._real, layer, loss_fn)
            seconds, output = timed(work, self._real.value, self._synchronize)
            self._timed[kind] = seconds, output, work.leaving
        seconds, output, leaving = self._timed[kind]
        self._real.go_on(output, leaving)
        return (
            fields | seconds | {name: fields[name] or seconds[name] for name in ("draws_globally", "changes_buffers")}
        )

    def _count(self, layer: nn.Module, loss_fn: Any) -> tuple[dict[str, Any], _Kind]:
        """Count the next layer on fake tensors."""
        arriving = tuple((name, boundary.fingerprint) for name, boundary in self._fake.skips.items())
        key = (fingerprint(layer), fingerprint(loss_fn), self._fake.value.fingerprint, arriving)
        if key not in self._counted:
            kernels = nullcontext() if self._place.type == "cpu" else GpuKernels()
            # Fake tensors bring their mode along. It is not entered: what a layer makes from nothing and keeps for the
            # next call, in a cache of masks or positions, has to be real.
            with kernels, _QUIET:
                try:
                    work = self._work(self._fake, layer, loss_fn)
                    fields, output = self._count_work(work, self._fake.value, self._rates)
                except (DataDependentOutputException, DynamicOutputShapeException) as error:
                    raise DependsOnValues(
                        f"what the layer does depends on values ({error}), limit: layers without values are profiled "
                        f"by their shapes; materialise the model on the device that it is profiled for"
                    ) from error
            leaving = {name: each.detached() for name, each in work.leaving.items()}
            self._counted[key] = fields, _Kind.of(work, self._fake, output), output, leaving
        fields, kind, output, leaving = self._counted[key]
        self._fake.go_on(output, leaving)
        return fields, kind

    def _work(self, batch: _Batch, layer: nn.Module, loss_fn: Any) -> Work:
        copies = batch.copies
        target = None if loss_fn is None else copies.target(self._target)
        self._last = Work(copies.layer(layer), copies.loss(loss_fn), target, batch.skips)
        return self._last

    def _synchronize(self) -> None:
        if self._place.type != "cpu":
            torch.accelerator.synchronize(self._place)


class NamesLayers:
    """A model that says itself how its user knows its layers."""

    def shown(self, key: str) -> str:
        """Return the name of a layer."""
        raise NotImplementedError


def named_layers(model: nn.Module | Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the layers in order, each with its name in the model and its class: "2 (Linear)"."""
    layers = []
    # Not named_children(): that leaves out a layer's second place in the model.
    children = model._modules if isinstance(model, nn.Module) else {str(i): layer for i, layer in enumerate(model)}
    for key, layer in children.items():
        if not isinstance(layer, nn.Module):
            raise TypeError(f"model: {key} ({type(layer).__name__}) is no nn.Module; wrap it in one")
        name = model.shown(key) if isinstance(model, NamesLayers) else f"{key} ({type(layer).__name__})"
        layers.append((name, layer))
    if not layers:
        raise ValueError("model: 0 layers, limit: at least 1; pass an nn.Sequential or a list of layers")
    return layers


def spanned(names: Sequence[str]) -> str:
    """Return the names of layers that follow each other as one: the first to the last."""
    if len(names) == 1:
        return names[0]
    return f"{names[0].partition(' to ')[0]} to {names[-1].rpartition(' to ')[2]}"


def _sharing(layers: Sequence[nn.Module]) -> list[tuple[int, ...]]:
    """Return, for each layer, the other layers that hold one of its parameters."""
    held = [{id(parameter) for parameter in layer.parameters()} for layer in layers]
    return [tuple(j for j, theirs in enumerate(held) if j != i and mine & theirs) for i, mine in enumerate(held)]


def _shared_bytes(layers: Sequence[nn.Module]) -> list[int]:
    """Return, for each layer, bytes of its trainable parameters that other layers hold too."""
    trainable = [{id(p): p for p in layer.parameters() if p.requires_grad} for layer in layers]
    holders = Counter(key for held in trainable for key in held)
    return [sum(p.numel() * p.element_size() for key, p in held.items() if holders[key] > 1) for held in trainable]


def _place(device: torch.device | str | None) -> torch.device:
    place = torch.device("cpu" if device is None else device)
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"device: {str(device)!r}, known: 'cpu' and 'cuda'; leave it out for the CPU")
    return place


def _can_run(place: torch.device, parts: Any) -> bool:
    """Return True if the device is here and everything has values."""
    if place.type != "cpu":
        here = torch.accelerator.current_accelerator(check_available=True)
        if here is None or here.type != place.type:
            return False
    leaves = pytree.tree_leaves(parts)
    modules = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    tensors += [t for module in modules for t in (*module.parameters(), *module.buffers())]
    return not any(tensor.is_meta for tensor in tensors)


def noted(error: BaseException, note: str) -> BaseException:
    """Add a note to an exception's text."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
    return error


def names(error: BaseException, task: str) -> bool:
    """Return True if an exception, or a note of it, names a task."""
    name, text = re.escape(task), "\n".join([str(error), *getattr(error, "__notes__", ())])
    return re.search(rf"^{name}(:| failed)|\btasks? '?{name}\b", text, re.MULTILINE) is not None


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    of_random, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(of_random)
        np.random.set_state(of_numpy)
