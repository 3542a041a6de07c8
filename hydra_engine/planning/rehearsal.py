"""Runs one step of a task on a device and commits nothing: what units take, draw and change, and that they repeat.

A step is run twice from the same state, and has to give the same, whatever layers keep beside their buffers:

    as it trains    every unit finds the Python attributes that the user's layers have; draws go to the task's stream
    carrying on     every unit finds what those before have left, as in plain PyTorch; the process-wide generators are
                    the unit's alone, and others again in its backward

Both watch which memory operations read and write. What differs is refused with the layers' names.
"""

from __future__ import annotations

import hashlib
import operator
import random
import sys
import weakref
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, count
from queue import SimpleQueue
from types import FrameType, FunctionType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_engine.data import (
    Batch,
    ClassLimits,
    IndexLimit,
    RandomState,
    Stream,
    TaskGenerator,
    capture,
    copy_in_dram,
    drawn_by_others,
    installed,
    memory_of,
    seeded,
)
from hydra_engine.devices import COMPUTE, DeviceSpec, OpenDevice, Promise
from hydra_engine.errors import DeviceOutOfMemory
from hydra_engine.host import MOST_NAMED, LayerFault, Shard, TaskOptimizer, TaskState, writes
from hydra_engine.planning.trial import frozen
from hydra_engine.schedule import BACKWARD, EVALUATE, FORWARD, FUSED, Computed, Event, Failed, Stored, Unit
from hydra_engine.tasks import Purpose, drop_tracebacks
from hydra_engine.trace import Trace
from hydra_engine.worker import Attributes, Changed, Contents, Executor, MicroInput, Worker
from partitioners.boundary import Boundary, UnfitTensor
from partitioners.copies import copy_of_function
from partitioners.profile import noted
from partitioners.reach import CLASS, CONTAINERS, GLOBALS, PLAIN, reach
from partitioners.replicas import GENERATORS
from partitioners.skips import Frame

# By the attributes that lead there, and whether it is the copy's own: what is there.
PlainState: TypeAlias = "dict[tuple[str, bool], list[str]]"
# Of a batch: (inputs or target, which micro-batch, which tensor).
Part: TypeAlias = "tuple[int, int, int]"
# (of which shard, of what, which number): a digest.
Seen: TypeAlias = "dict[tuple[int, str, int], bytes]"
# Of a device for as long as the body runs, with room for slabs of so many bytes; nobody else uses it meanwhile.
Opened: TypeAlias = "Callable[[int], AbstractContextManager[OpenDevice]]"

# Nobody's process-wide states, for units that must not depend on them. Of any seed.
NOBODYS = RandomState(seeded(19), random.Random(19).getstate(), np.random.RandomState(19).get_state())
LOSS = "loss_fn"
_GRADIENT = vars(torch._C.TensorBase)["grad"].__get__  # a getter, of which a mode is told
_SET_GRADIENT = vars(torch._C.TensorBase)["grad"].__set__
_BACKWARDS = (Tensor.backward, torch.autograd.backward)
BYTES = "bytes "  # before a digest
PASSING = "out of date as soon as its unit is over"
# Attributes that a message names.
REMEDY = (
    "keep what changes from call to call in buffers, draw from torch's own generator instead of one of the layer, and "
    "hand what other layers or the loss need on in the output (or with Skips), and in the target what the loss needs "
    "from step to step"
)
KEEP_IN_BUFFERS = (
    "each device's copy would count or gather for itself: keep it in a buffer (register_buffer), or outside of the "
    "layer, in a list that its forward appends to"
)
KEEP_OUTSIDE = (
    "how often and where it is called is up to the engine: keep it in a buffer of a loss module, gather it in a "
    "callback, or pass it in the target"
)


class TooLarge(Exception):
    """A shard ran out of device memory."""

    def __init__(self, shard: int, needed_bytes: int) -> None:
        super().__init__(shard)
        self.shard = shard
        self.needed_bytes = needed_bytes  # of the device's memory, at least, with what was there already


def own_device(spec: DeviceSpec, num_threads: int, arena_bytes: int) -> AbstractContextManager[OpenDevice]:
    """Open a device for a rehearsal alone, which ends with the context."""
    return closing(spec.for_rehearsal().open(0, Trace(), num_threads, arena_bytes))


def rehearse(state: TaskState, batch: Batch, evaluation: Batch | None, opened: Opened) -> dict[tuple[str, int], float]:
    """Seconds of each unit of a step; in `state`, what they take and which shards need the process-wide generators.

    `evaluation`: a batch to evaluate as well, where the task has a validation loader. opened: the device. Raises
    TooLarge, what a layer or the loss raised, and ValueError for layers that cannot be streamed.
    """
    if state.steps_on_device:  # before anything is open: the factories are user code
        with installed(Stream(capture())):
            state.stepper = TaskOptimizer(state.task, state.layout, commits=False)
    slab_bytes = max(shard.slab_bytes for shard in state.cut.shards)
    with opened(slab_bytes) as device, closing(_Rehearsal(state, device)) as rehearsal:
        checks = _Checks(rehearsal)
        seconds, seen = rehearsal.run(batch)
        checks.check_batch(batch)
        state.observed.changed_buffers = frozenset(state.staging.buffers)
        state.measured.staging_bytes = state.staging.num_bytes
        state.check_buffers()
        state.check_draws()
        drew = not state.end_of_forward().same_as(batch.main)
        checks.check_repeats(batch, seen)
        # In the second run another thread may have seeded the generator, and so hidden it.
        drew |= not state.end_of_forward().same_as(batch.main)
        state.observed.draws = drew and not state.is_split
        state.observed.draws_outside_torch = not state.end_of_forward().same_outside_torch(batch.start[-1])
        state.check_draws()
        if state.task.compile:
            del rehearsal.modes[1:]  # what compiles looks at modes of functions, too
            rehearsal.run(batch)  # its units are known by now: what cannot be compiled is refused here
        if not rehearsal.repeats_bits:
            # The first run has loaded kernels, and was metered: it says nothing of the seconds of others.
            seconds, _ = rehearsal.run(batch)
        if evaluation is not None:
            _, seen = rehearsal.run(evaluation)
            checks.check_batch(evaluation)
            checks.check_repeats(evaluation, seen)
            state.observed.draws |= not state.end_of_forward().same_as(evaluation.main)
        state.observed.attributes.tried.update(rehearsal.onlooker.tried())
        return seconds


class _Refused(Exception):
    """A unit did what cannot be streamed; the text goes on from the layer's name."""


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Raises where a layer computes with the original weights, writes to a copy, or takes what another shard made.

    Through closures, originals escape every copy; a copy's weights are read by others, and stored by nobody.
    """

    def __init__(self, state: TaskState, executor: Executor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layout = state.layout
        self.executor = executor  # which knows the layer that runs
        originals = [*(slot.parameter.data for slot in state.layout.slots), *state.layout.buffers]
        self._originals = {_address(tensor) for tensor in originals}
        self._anothers: dict[int, str] = {}  # tensors of other shards, by id, and their names
        self._views: Mapping[int, Tensor] = {}
        self._slabs: set[int] = set()
        self.is_carrying = False
        self.coupled: set[tuple[str, str]] = set()  # layers of which one takes what the other has left
        self._shard = 0
        self._made: dict[int, tuple[int, str, StorageWeakRef]] = {}  # by address: in which shard, by which layer
        self._entered: set[int] = set()  # what a layer takes as its input
        self.classes = ClassLimits({size for slot in state.layout.slots for size in slot.shape})

    def forget(self) -> None:
        """A step begins: what was made before it is everybody's."""
        self._made.clear()

    def begin(self, shard: int, views: Mapping[int, Tensor]) -> None:
        self._shard = shard
        self._anothers = self.executor.structure.unbound()
        self._views, self._slabs = views, {_address(view) for view in views.values()} - {0}

    def enter(self, tensors: Iterable[Tensor]) -> None:
        """The unit may take these."""
        for tensor in tensors:
            self._made.pop(_address(tensor), None)

    def enter_layer(self, tensors: Iterable[Tensor]) -> None:
        """A layer of it runs, on these."""
        self._entered = set(map(_address, tensors))

    def end(self) -> None:
        """What comes now may write to the parameters."""
        self._views, self._slabs = {}, set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        another = next((self._anothers[id(each)] for each in tensors if id(each) in self._anothers), None)
        if another is not None:
            raise _Refused(
                f"computes with {another} of a layer in another shard, limit: what it has registered; assign that "
                f"parameter, or the module that holds it, to an attribute of this layer, not to a list or a dict in "
                f"it: it is then tied, and both shards hold it"
            )
        taken = set(map(_address, tensors))
        for address in taken:
            if address and address in self._originals:
                raise _Refused(
                    "computes with a parameter or buffer of the original model, which a closure or a functional call "
                    "has kept; let a layer use its own attributes, and a loss what the forward returns"
                )
            if address in self._made:
                self._check_made(address)
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            self._check_written(func, schema, args, kwargs)
        result = func(*args, **kwargs)
        if self.is_carrying:
            for tensor in _tensors(result):
                address = _address(tensor)
                if address and address not in taken:
                    reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                    self._made[address] = self._shard, self.executor.current, reference
        return result

    def _check_made(self, address: int) -> None:
        (shard, layer, reference), current = self._made[address], self.executor.current
        if reference.expired():  # type: ignore[no-untyped-call]
            del self._made[address]
        elif shard != self._shard:
            raise _Refused(
                f"takes a tensor that {self.executor.structure.shown(layer)} has left outside its output, which "
                f"crosses no shards; return it, or pass it with Skips"
            )
        elif address not in self._entered and torch._C._current_graph_task_id() == -1 and layer != current:
            self.coupled.add((layer, current))

    def _check_written(self, func: Any, schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if func.overloadpacket is torch.ops.aten.set_:  # elsewhere, with the same values: an LSTM's on a GPU
            return
        for k, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[k] if k < len(args) else kwargs.get(argument.name)
            for tensor in _tensors(value):
                if _address(tensor) in self._slabs and tensor.numel():
                    starts = ((view.data_ptr(), index) for index, view in self._views.items())
                    _, index = max(each for each in starts if each[0] <= tensor.data_ptr())
                    raise _Refused(writes(self._layout.slots[index].name))


class _NoGradients(TorchFunctionMode):
    """Raises where a forward sets a parameter's `.grad`, or reads what that has got from micro-batches before.

    Which these are differs: of a step that is spread, each device has some, and a recomputed forward finds others. So
    do sums of gradients, where a forward or the loss adds to them by a backward of its own: that is noted.
    """

    def __init__(self, state: TaskState, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._state = state
        self._parameters = {id(each) for each in (*parameters, *(slot.parameter for slot in state.layout.slots))}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        is_set = func == _SET_GRADIENT and args[1] is not None
        if (is_set or (func == _GRADIENT and self._state.is_split)) and id(args[0]) in self._parameters:
            user = _package(sys._getframe(1))
            if user not in ("torch", "hydra_engine") and torch._C._current_graph_task_id() == -1:
                if is_set:
                    raise _Refused(
                        "sets the .grad of a parameter, limit: what its backward gives, since a forward may run again; "
                        "add a term to the loss, or use a hook on the parameter"
                    )
                raise _Refused(
                    f"reads the .grad of a parameter, limit: steps in one micro-batch, before which there is none; "
                    f"{self._state.split_by[1]}, or keep what it needs in a buffer"
                )
        if func in _BACKWARDS and not self._state.observed.runs_backward:
            frame = sys._getframe(1)
            while _package(frame) == "torch" and frame.f_back is not None:
                frame = frame.f_back
            self._state.observed.runs_backward = _package(frame) != "hydra_engine"
        return func(*args, **(kwargs or {}))


def _package(frame: FrameType) -> str:
    """Return the package whose code runs there."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(value) if isinstance(each, Tensor) and each.layout == torch.strided]


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # of torch.func, which holds no memory itself
        return 0


class _Onlooker:
    """Looks on while units run: the executor's inspector."""

    def __init__(self, state: TaskState, guard: _Guard) -> None:
        self.in_backward: RandomState | None = None
        self.carries = False
        self.places: set[int] = set()  # storages that parameters lie in, while they are bound
        self.left: dict[int, Sequence[Contents]] = {}  # by layer, what the last unit that changed it left
        self.changed: dict[Changed, None] = {}  # in the order in which they were found
        self._buffers: dict[int, Tensor] = {}  # as they were before a backward
        # What a micro-batch was given: inputs or target, which micro-batch, the value, and what was in it.
        self._given: list[tuple[int, int, Any, list[Any], pytree.TreeSpec]] = []
        self._m = 0
        self._starts = False  # the layer that comes is the first of all
        self._layer = ""  # that runs
        # (inputs or target, micro-batch): containers of the batch that a layer has changed
        self.rearranged: dict[tuple[int, int], str] = {}
        self.written: dict[Part, str] = {}  # what was worked on in place of the batch, and by which layer
        # Copies of the batch that a micro-batch has: of which part, which of what enters a shard, its version, and the
        # layer that was seen to write to it.
        self._batch: list[tuple[Shard, tuple[int, int], int, Tensor, int, str]] = []
        self._state, self._guard = state, guard

    def begins(self, kind: str, shard: Shard, views: Mapping[int, Tensor]) -> None:
        self._guard.begin(shard.index, views)
        self.places |= {_address(view) for view in views.values()}
        if not self.carries:
            last = shard.last if shard.last < self._state.layout.num_layers else len(self._state.layout.layers)
            for k in range(shard.first, last):
                self.left.pop(k, None)

    def is_bound(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.layout == torch.strided and _address(value) in self.places

    def enters(self, shard: Shard, m: int, micro: MicroInput) -> None:
        self._note_batch()
        self._given, self._m, self._starts = [], m, shard.is_first
        self._guard.enter(micro.tensors())
        self._batch = [(shard, *each, each[2]._version, "") for each in micro.of_batch()]

    def enters_layer(self, value: Any, frame: Frame, target: Any = None) -> None:
        self._note_rearranged()
        for n, (shard, part, k, tensor, version, writer) in enumerate(self._batch):
            if not writer and tensor._version != version:
                self._batch[n] = shard, part, k, tensor, version, self._layer
        self._guard.enter_layer(_tensors((value, frame.values, frame.arriving)))
        self._layer = self._guard.executor.current
        if self._starts:
            self._given.append((0, self._m, value, *pytree.tree_flatten(value)))
            self._starts = False
        if target is not None:
            self._given.append((1, self._m, target, *pytree.tree_flatten(target)))
            self._guard.classes.enters(target)

    def _note_batch(self) -> None:
        """Note what a micro-batch's layers and the loss have changed of the batch."""
        self._note_rearranged()
        for shard, (side, number), k, tensor, _, writer in self._batch:
            if self._state.has_changed(shard, self._m, (side, number), k, tensor):
                self.written.setdefault((side, self._m, number), writer or self._layer)
        self._batch = []

    def _note_rearranged(self) -> None:
        """Note containers of the batch that the layer before has changed: those of the copy that it was given."""
        for side, m, value, leaves, spec in self._given:
            now, now_spec = pytree.tree_flatten(value)
            if now_spec != spec or any(a is not b for a, b in zip(now, leaves, strict=True)):
                self.rearranged.setdefault((side, m), self._layer)

    def drew_in_backward(self) -> None:
        if self.is_disturbed():
            return
        raise _Refused(
            "or those beside it draw random numbers in their backward, which the engine runs at another place of the "
            "stream than plain PyTorch; draw in the forward and save what was drawn"
        )

    def begins_backward(self, buffers: Mapping[int, Tensor]) -> None:
        self._buffers = {index: copy_in_dram(buffer) for index, buffer in buffers.items()}

    def ends_backward(self, buffers: Mapping[int, Tensor]) -> set[int]:
        before, self._buffers = self._buffers, {}
        written = {index for index, old in before.items() if index in buffers and not _is_same(old, buffers[index])}
        self._state.observed.written_buffers |= written
        return written

    def ends(self, views: Mapping[int, Tensor], parameters: Sequence[nn.Parameter]) -> None:
        self._guard.end()
        self._note_batch()
        self._given = []
        for index, view in views.items():
            slot, now = self._state.layout.slots[index], parameters[index].data
            is_moved = now.data_ptr() != view.data_ptr() or now.shape != view.shape
            # On the CPU nothing moves them, but a layer that means to write.
            if (is_moved and now.device.type == "cpu") or not _is_same(self._state.pool.narrow(slot), now):
                raise _Refused(writes(slot.name))

    def leaves(self, layer: int, attributes: Attributes) -> None:
        self.changed.update(dict.fromkeys(attributes.changed()))
        left = attributes.capture()
        if left is not None:
            self.left[layer] = left

    def tried(self) -> Iterator[tuple[str, str, str]]:
        """Name attributes that were changed: with the value that one took in all runs, if there is such a one."""
        values: dict[tuple[str, str], set[str]] = defaultdict(set)
        for each in self.changed:
            values[each.layer, each.attribute].add(each.value)
        for (layer, attribute), found in values.items():
            yield layer, attribute, found.pop() if len(found) == 1 else ""

    def is_disturbed(self) -> bool:
        """Return True if another thread draws: what differs between two runs may then be no layer's."""
        found = drawn_by_others()
        self._state.observed.drawn_by_others |= found
        return bool(found)

    def because(self) -> str:
        shown = self._state.layout.shown
        found = list(dict.fromkeys(f"{each.attribute!r} of {shown(each.layer)}" for each in self.changed))
        named = ", ".join(found[:MOST_NAMED]) + (", ..." if len(found) > MOST_NAMED else "")
        return f" (Python attributes that forwards change: {named})" if found else ""


def _is_same(a: Tensor, b: Tensor) -> bool:
    b = b.to(a.device)
    return a.shape == b.shape and (torch.equal(a, b) or _digest([a]) == _digest([b]))


class _Rehearsal:
    """A worker of its own, on which units run one after the other."""

    def __init__(self, state: TaskState, device: OpenDevice) -> None:
        self.state = state
        self._events: SimpleQueue[Event] = SimpleQueue()
        self.repeats_bits = state.place.type == "cpu"
        self.modes: list[AbstractContextManager[Any]] = []  # in which units run
        self._device = device
        self._worker = Worker(0, device, Trace(), self._events.put, lambda: None)
        try:
            state.open()
            # What they remember is the user's.
            model, task = list(state.layout.layers), state.task
            with TaskGenerator(seeded(0)):  # what copies itself may draw
                loss_fn = copy_of_function(task.loss_fn, model)
                metrics = {name: copy_of_function(metric, model) for name, metric in (task.metrics or {}).items()}
            self._worker.admit(state, partial(_within, self.modes), (loss_fn, metrics))
            self.executor = self._worker.executor(state.name)
            for attributes in self.executor.attributes:
                attributes.ignore_hooks()
            self.guard = _Guard(state, weakref.proxy(self.executor))  # which holds it
            self.classes = self.guard.classes
            self.modes += [self.guard, self.classes, _NoGradients(state, self.executor.structure.parameters)]
            self.onlooker = self.executor.inspector = _Onlooker(state, self.guard)
            self._limit = IndexLimit(self.executor.structure.layers[0])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the model back; nothing waits for the cyclic collector, nor for who keeps the error."""
        self._worker.leave()
        self._worker.dismiss_all()
        if self.modes:
            self.guard.end()
            self.guard.forget()
        self.state.close()
        self.state.stepper = None

    def run(self, batch: Batch, *, apart: bool = True) -> tuple[dict[tuple[str, int], float], Seen]:
        """Run a batch's units: seconds of each, and digests of what they left, where two runs can be compared by bits.

        apart: with the process-wide generators nobody's, so that nothing changes the user's.
        """
        state = self.state
        self.onlooker.written, self.onlooker.rearranged = {}, {}
        self.classes.training = batch.training
        tensors = [each for pair in batch.boundaries for value in pair for each in value.tensors]
        self.classes.batch_sizes = {size for each in tensors for size in each.shape}
        weights = [weight for _, _, weight in batch.micro_batches]
        state.staging.begin(batch.boundaries, weights, batch.start, batch.signature, batch.own)
        seconds: dict[tuple[str, int], float] = {}
        seen: Seen = {}
        for kind, shard in state.cut.chains[batch.training]:
            unit = Unit(state.name, kind, shard, batch.step)
            with self._limit.watched() if shard == 0 else nullcontext(), self._nobodys() if apart else nullcontext():
                outcome = self._unit(unit)
                error = outcome.error if isinstance(outcome, Failed) and kind == FORWARD else None
                if isinstance(error, (RuntimeError, TypeError)) and not isinstance(error, DeviceOutOfMemory):
                    # It may come from autograd missing what the forward saved.
                    state.cut = replace(state.cut, keep_saved=state.cut.keep_saved | {shard})
                    outcome = self._unit(unit)
            state.observed.index_limit, state.observed.classes = self._limit.found, self.classes.found
            if isinstance(outcome, Failed):
                self._raise(outcome, unit)
            else:
                seconds[kind, shard] = outcome
            if self.repeats_bits:  # else nobody compares them, and those of a billion gradients take seconds
                seen |= self._digests(kind, state.cut.shards[shard])
            state.pool.gradients.take_back(state.cut.shards[shard])
        state.check_gradients()
        return seconds, seen

    @contextmanager
    def _nobodys(self) -> Iterator[None]:
        """Let the compute lane have process-wide generators of nobody's. Not in a unit, whose seconds count."""
        held = ExitStack()
        self._in_lane(lambda: held.enter_context(installed(Stream(NOBODYS))))
        try:
            yield
        finally:
            self._in_lane(held.close)

    def _in_lane(self, job: Callable[[], Any]) -> None:
        done: Promise[Any] = Promise()

        def work() -> None:
            try:
                done.keep(job())
            except BaseException as error:
                done.give_up(error)

        self._device.submit(COMPUTE, "rehearsal", work)
        done.result()

    def _unit(self, unit: Unit) -> float | Failed:
        self._worker.load(unit, self.state)
        self._worker.run(unit)
        computed = self._events.get()
        assert isinstance(computed, Computed)
        if not computed.stored:
            stored = self._events.get()
            if isinstance(stored, Failed):
                return stored
            assert isinstance(stored, Stored)
        return computed.seconds

    def _digests(self, kind: str, shard: Shard) -> Seen:
        state, staging, j = self.state, self.state.staging, shard.index
        seen: Seen = {}
        for m in range(staging.num_micro_batches):
            if kind != BACKWARD:
                seen[j, "random numbers", m] = _digest_state(staging.random[j + 1, m])
            if kind in (FORWARD, EVALUATE) and m not in staging.losses:
                seen[j, "output", m] = _digest(staging.entering(j + 1, m).tensors)
                for name in shard.leaving:
                    seen[j, f"skip {name!r}", m] = _digest(staging.entering(name, m).tensors)
            if m in staging.losses and state.cut.is_last(shard):
                measured = [staging.losses[m], *staging.metrics.get(m, {}).values()]
                seen[j, "loss" if len(measured) == 1 else "loss or metric", m] = repr(measured).encode()
            if kind in (FUSED, BACKWARD):
                gradients = [staging.gradients_of(j, m)] if j else []
                gradients += [staging.gradients_of((name, j), m) for name in shard.arriving]
                gradients.append([staging.tied.get((index, j, m)) for index in shard.borrowed])
                seen[j, "gradient of its input", m] = _digest(chain.from_iterable(gradients))
        if kind in (FUSED, BACKWARD) and not state.steps_on_device:
            for slot in state.pool.owned(shard):
                given = state.pool.gradients.of(slot) if staging.has_gradient.get(slot.index) else None
                seen[j, f"gradient of {slot.name!r}", 0] = _digest([given])
        for index in shard.buffers:
            if kind != BACKWARD and index in staging.buffers:
                seen[j, "buffer", index] = _digest([staging.buffers[index]])
        return seen

    def _raise(self, failed: Failed, unit: Unit) -> None:
        error, name = failed.error, self.state.name
        if isinstance(error, DeviceOutOfMemory):
            memory_bytes = self._device.ledger.memory_bytes
            raise TooLarge(unit.shard, memory_bytes + max(1, error.needed_bytes - error.free_bytes)) from error
        where = failed.where
        if isinstance(error, UnfitTensor):
            raise UnfitTensor(f"{name}: {error}") from error
        if isinstance(error, _Refused):
            kind = " (in eval() or the forward after it)" if unit.kind == EVALUATE else ""
            raise ValueError(f"{name}: {where} {error}{kind}{self.onlooker.because()}") from error
        if isinstance(error, LayerFault):
            raise error
        if isinstance(error, AttributeError) and isinstance(getattr(error, "obj", None), nn.Module):
            raise ValueError(f"{name}: {where} reads an attribute that is not there: {error}; {REMEDY}") from error
        if self.onlooker.carries:
            raise ValueError(
                f"{name}: run a second time on the same input, {where} gave another result: {type(error).__name__}: "
                f"{error}{self.onlooker.because()}; {REMEDY}"
            ) from error
        raise noted(error, f"in {where} of task {name}, while a step of it was tried")


class _Checks:
    """Refuses layers that would show that devices run copies of them: runs batches again, and compares."""

    def __init__(self, rehearsal: _Rehearsal) -> None:
        self._rehearsal = rehearsal
        self._state, self._executor = rehearsal.state, rehearsal.executor
        self._guard, self._onlooker = rehearsal.guard, rehearsal.onlooker
        layout, loss_fn = self._state.layout, self._state.task.loss_fn
        self._roots = _rooted(layout.names, self._executor.structure.layers, self._executor.loss_fn)
        # Objects that may be one for all copies, as their class has it: what they count is outside of a layer.
        self._shared = {
            id(value)
            for _, value, _ in reach(*_rooted(layout.names, layout.layers, loss_fn))
            if isinstance(getattr(type(value), "__deepcopy__", None), FunctionType)
            and not isinstance(value, (Tensor, nn.Module))
        }
        self._begun = self._plain_state()

    def check_batch(self, batch: Batch) -> None:
        """Refuse layers that work in place on what the loader keeps, and gives again: what they change is a copy."""
        state, written = self._state, self._onlooker.written
        state.observed.works_on_batch |= bool(written or self._onlooker.rearranged)
        loader = state.loader(training=batch.training)
        for (side, m), layer in self._onlooker.rearranged.items():
            given = batch.micro_batches[m][side]
            held = {id(each) for _, each, _ in reach(("", given), copied_only=True) if isinstance(each, CONTAINERS)}
            path = next((path for path, each, _ in reach(("loader", loader)) if id(each) in held), None)
            if path is not None:
                raise ValueError(
                    f"{state.name}: {state.layout.shown(layer)} changes the {('inputs', 'target')[side]} of a batch, "
                    f"a dict or list that {path} keeps, limit: what nobody else sees, since a device has a copy, and "
                    f"plain PyTorch would go on from what is left there; change a copy of it (dict(batch), list(batch))"
                )
        is_listed = state.task.purpose is Purpose.TRAIN and isinstance(state.task.validation, (list, tuple))
        for (side, m, k), layer in written.items():
            where = state.staging.given.seen_by(m, side, k, loader)
            if not where and not batch.training and is_listed:
                where = "the list of validation= keeps"
            if where:
                raise ValueError(
                    f"{state.name}: {state.layout.shown(layer)} works in place on the {('inputs', 'target')[side]} of "
                    f"a batch that {where}, limit: what nobody else sees, since a device has a copy, and plain PyTorch "
                    f"would go on from what is left there; clone it first, or let the loader give a copy"
                )
            state.observed.free_parts.add((batch.training, len(batch.own) > 1, side, k))

    def check_repeats(self, batch: Batch, seen: Seen) -> None:
        """Refuse shards that give something else when they go on from what they have left.

        Locks those whose draws come out otherwise when all process-wide generators are theirs: a layer that seeds or
        saves torch's global generator itself is such a one, since the mode that redirects draws does not see it.
        """
        state, locked = self._state, len(self._state.cut.locked)
        while True:
            with self._carrying(training=batch.training):
                before = self._plain_state()
                _, carried = self._rehearsal.run(batch, apart=False)
                after = self._plain_state()
            different = _differences(seen, carried) if self._rehearsal.repeats_bits else []
            if different and self._onlooker.is_disturbed():
                return
            while different and state.cut.drawing and different[0][0] not in state.cut.locked:
                j = different[0][0]  # one more each time, so this ends
                state.cut = replace(state.cut, locked=state.cut.locked | {j})
                _, seen = self._rehearsal.run(batch)
                different = _differences(seen, carried)
            if len(state.cut.locked) == locked:
                break
            # Only now are what a run has left and what the next one leaves to be compared.
            locked = len(state.cut.locked)
        self._check_settled(before, after)
        if different:
            self._refuse(different[0])
        names = state.layout.names
        state.observed.coupled |= {
            (names.index(a), names.index(b)) for a, b in self._guard.coupled if {a, b} <= {*names}
        }
        if self._rehearsal.repeats_bits and after != self._begun:
            self._check_after_another(batch, carried)

    @contextmanager
    def _carrying(self, *, training: bool, afresh: bool = False) -> Iterator[None]:
        """Units find what those before have left, in this run and the one before; so does the user's model.

        training: rather than in eval(), the user's model too. afresh: units begin with what the user's layers have.
        """
        state, onlooker, executor = self._state, self._onlooker, self._executor
        locked, everyone = state.cut.locked, frozenset(shard.index for shard in state.cut.shards)
        state.cut = replace(state.cut, locked=everyone)
        left = dict(onlooker.left)
        users, copies = self._modules(state.layout.layers), self._modules(executor.structure.layers)
        put_back: list[tuple[dict[str, Any], dict[str, Any]]] = []
        onlooker.carries, onlooker.in_backward = True, NOBODYS
        self._guard.forget()
        self._guard.is_carrying = True
        try:
            for layer, contents in () if afresh else left.items():
                executor.attributes[layer].install(contents)
            if not training:  # as in plain PyTorch, for a loss that looks
                for module in users.values():
                    put_back.append((vars(module), dict(vars(module))))
                    vars(module)["training"] = False
            for name, attribute in dict.fromkeys((each.layer, each.attribute) for each in onlooker.changed):
                # A loss that reads the user's model gets to see what the copies' forwards have left.
                if name in users and attribute in vars(copies[name]):
                    own = vars(users[name])
                    put_back.append((own, dict(own)))
                    own[attribute] = vars(copies[name])[attribute]
            yield
        finally:
            for own, before in reversed(put_back):
                own.clear()
                own.update(before)
            for attributes in executor.attributes:
                attributes.put_back()
            state.cut = replace(state.cut, locked=locked)
            onlooker.carries, onlooker.in_backward = False, None
            self._guard.is_carrying = False

    def _modules(self, layers: Sequence[nn.Module]) -> dict[str, nn.Module]:
        found = {}
        for name, layer in zip(self._state.layout.names, layers, strict=True):
            for path, module in layer.named_modules(remove_duplicate=False):
                found[f"{name}.{path}" if path else name] = module
        return found

    def _plain_state(self) -> PlainState:
        """What the copies hold beside parameters and buffers, which are placeholders here."""
        structure, layout = self._executor.structure, self._state.layout
        besides = {id(each) for each in (*structure.parameters, *structure.buffers, *layout.layers)}
        besides |= self._shared
        copies = {id(each) for _, layer in self._roots if isinstance(layer, nn.Module) for each in layer.modules()}
        copies |= {id(each) for each in structure.parameters}
        found: PlainState = {}
        for path, value, is_copied in reach(*self._roots, plain=True, besides=besides):
            # A closure of the loss has been copied with it.
            is_own = is_copied or (path.startswith(LOSS) and CLASS not in path and GLOBALS not in path)
            if _is_of_one(value, copies, is_own=is_own):
                raise ValueError(
                    f"{self._state.name}: {path} is looked up by a layer's parameter or module or the id() of one, "
                    f"limit: what is the same for all copies of a layer; use a name, or an attribute of the layer"
                )
            if self._onlooker.is_bound(value):
                found[path, is_own] = [PASSING]
            elif (shown := _shown(value)) is not None:
                found.setdefault((path, is_own), []).append(shown)
        return found

    def _check_settled(self, before: PlainState, after: PlainState) -> None:
        """Refuse what a second run of the same input has changed again: it matters now, or at some later step.

        Lists and the like outside of a layer, in a closure or a global, may grow: they are where records are kept.
        """
        names = self._modules(self._executor.structure.layers)
        for key in {**before, **after}:
            (path, is_own), old, new = key, before.get(key), after.get(key)
            may_differ = not is_own and not (old and new and len(old) == len(new))
            if old == new or may_differ or PASSING in (*(old or ()), *(new or ())):
                continue
            a, b = ("nothing" if each is None else ", ".join(each) for each in (old, new))
            has_bits = BYTES in a + b
            if not self._rehearsal.repeats_bits and (has_bits or "." in a + b):
                continue  # kernels there may give other bits
            layer = max((name for name in names if path.startswith(f"{name}.")), key=len, default=LOSS)
            how = "to another value" if has_bits else f"from {a} to {b}"
            attribute = path[len(layer) + 1 :].replace(f"{GLOBALS}.", "").replace(f"{CLASS}.", "")
            raise ValueError(
                f"{self._state.name}: {self._state.layout.shown(layer)}: forward changes its attribute {attribute!r} "
                f"{how} when it runs again on the same input, limit: what is the same after each such run; "
                + (KEEP_OUTSIDE if layer == LOSS else KEEP_IN_BUFFERS)
            )

    def _check_after_another(self, batch: Batch, seen: Seen) -> None:
        """Refuse layers in which something depends on what other batches have left: turned round, larger, longer."""
        state, index_limit = self._state, self._state.observed.index_limit
        others = [_with(batch, change) for change in (_turned_tensor, _larger, _longer)]
        found = None
        while others and found is None:
            keep_saved = state.cut.keep_saved
            with self._carrying(training=batch.training, afresh=True):
                self._guard.is_carrying = False
                for k, other in enumerate(others):
                    try:
                        self._rehearsal.run(other, apart=False)
                    except Exception as error:  # the layers take no such batch: then nothing is told by it
                        drop_tracebacks(error)
                        del others[k]
                        state.cut = replace(state.cut, keep_saved=keep_saved)
                        break
                else:
                    _, found = self._rehearsal.run(batch, apart=False)
        if found is None:
            self._rehearsal.run(batch)  # the step that is looked at from here on is this one's
        state.observed.index_limit = index_limit
        different = [] if found is None else _differences(seen, found)
        if different and not self._onlooker.is_disturbed():
            self._refuse(different[0], " after other batches")

    def _refuse(self, different: tuple[int, str], when: str = "") -> None:
        (j, what), state = different, self._state
        shard = state.cut.shards[j]
        layers = [*map(state.layout.shown, state.layout.names[shard.first : shard.last])]
        if state.cut.is_last(shard) and state.task.purpose is not Purpose.PREDICT:
            layers = [*layers, "loss_fn", *(f"metric {name}" for name in state.task.metrics or {})]
        how = ", in a backward that draws random numbers or depends on earlier calls" if "gradient" in what else ""
        raise ValueError(
            f"{state.name}: run twice on the same input, {', '.join(layers)} gave another {what}{when}{how}"
            f"{self._onlooker.because()}; {REMEDY}"
        )


@contextmanager
def _within(modes: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as held:
        for mode in modes:
            held.enter_context(mode)
        yield


def _rooted(names: Iterable[str], layers: Iterable[nn.Module], loss_fn: Any) -> list[tuple[str, object]]:
    """What runs: layers, and a loss that is none."""
    roots: list[tuple[str, object]] = list(zip(names, layers, strict=True))
    return roots if isinstance(loss_fn, nn.Module) else [*roots, (LOSS, loss_fn)]


def _with(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Another batch, of the same numbers where these differ."""

    def changed(value: Boundary) -> Boundary:
        return value.around([change(tensor.detach()) for tensor in value.tensors])

    return replace(batch, boundaries=[(changed(x), changed(y)) for x, y in batch.boundaries])


def _turned_tensor(tensor: Tensor) -> Tensor:
    """Another order and other values, that are as good: indices within their range, sorted ones sorted."""
    turned = tensor.flip(list(range(tensor.dim())))
    if tensor.is_floating_point() or tensor.is_complex():
        turned = turned * 0.5
    elif tensor.dtype != torch.bool and tensor.numel():
        turned = turned.min() + turned.max() - turned
    return torch.empty_like(tensor).copy_(turned)


def _larger(tensor: Tensor) -> Tensor:
    """Larger values, where any are as good."""
    is_free = tensor.is_floating_point() or tensor.is_complex()
    return torch.empty_like(tensor).copy_(tensor * 8) if is_free else tensor


def _longer(tensor: Tensor) -> Tensor:
    """Sequences of twice the length, where it may be one of sequences."""
    return torch.cat([tensor, tensor], 1) if tensor.dim() > 1 else tensor


def _is_of_one(value: Any, copies: Collection[int], *, is_own: bool) -> bool:
    """Return True for the id of one of these, and for a table of it that other copies have, too."""
    if isinstance(value, int):
        return value in copies
    if is_own or not isinstance(value, (dict, set)):
        return False
    keys = (each() if isinstance(each, weakref.ref) else each for each in list(value))
    return any(id(part) in copies for each in keys for part in (each if isinstance(each, tuple) else [each]))


def _shown(value: Any) -> str | None:
    """What tells the state of a value from others, and is to be compared; None for what holds others, or nothing."""
    if isinstance(value, Tensor):
        return BYTES + (_digest([value]).hex() if value.layout == torch.strided else str(value.layout))
    if isinstance(value, np.ndarray):
        return BYTES + (_hash(value.tobytes()) if value.dtype != object else "")
    if isinstance(value, GENERATORS):
        return BYTES + _hash(repr(frozen(value, {})).encode())
    if isinstance(value, (bytearray, array)):
        return BYTES + _hash(bytes(value))
    if isinstance(value, (*PLAIN, count)):
        return repr(value)
    if isinstance(value, Iterator) and type(value).__module__ == "builtins":
        return f"{operator.length_hint(value)} values"  # that are to come
    return None


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _differences(seen: Seen, again: Seen) -> list[tuple[int, str]]:
    """(shard, what) that differ between two runs, in the order in which they came about: a later one may follow."""
    found = [(j, what) for j, what, m in {**seen, **again} if seen.get((j, what, m)) != again.get((j, what, m))]
    return list(dict.fromkeys(found))


def _digest(tensors: Iterable[Tensor | None]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        if tensor is None:
            digest.update(b"none")
        else:
            digest.update(memory_of(tensor).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _digest_state(state: RandomState) -> bytes:
    """Of torch's part: another thread may draw from `random` and `numpy.random`. What a layer does shows in outputs."""
    return _digest([state.torch])
