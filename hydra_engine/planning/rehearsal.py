"""Runs one step of a task on a device and commits nothing: what units take, draw and change.

Where layers or the loss have changed what they keep beside buffers, the step runs again from what they have left: what
then changes once more is refused with the layer's name.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from queue import SimpleQueue
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_engine.data import (
    Batch,
    ClassLimits,
    IndexLimit,
    Stream,
    TaskGenerator,
    copy_in_dram,
    identical,
    installed,
    kept_by,
    seeded,
)
from hydra_engine.devices import COMPUTE, DeviceSpec, OpenDevice, Promise
from hydra_engine.errors import DeviceOutOfMemory
from hydra_engine.host import LayerFault, Shard, TaskState, writes
from hydra_engine.planning.same_model import random_state
from hydra_engine.schedule import BACKWARD, FORWARD, Computed, Event, Failed, Stored, Unit
from hydra_engine.tasks import Purpose
from hydra_engine.trace import Trace
from hydra_engine.worker import Attributes, Changed, Contents, MicroInput, Worker
from partitioners.boundary import Boundary, UnfitTensor
from partitioners.copies import copy_of_function
from partitioners.measure import generator_key
from partitioners.profile import noted, spanned
from partitioners.reach import BYTES, CLASS, CONTAINERS, GLOBALS, reach, text_of

# By the attributes that lead there, and whether it is the copy's own: what is there.
OwnedState: TypeAlias = "dict[tuple[str, bool], list[str]]"
# Of a batch: (inputs or target, which micro-batch, which tensor).
Part: TypeAlias = "tuple[int, int, int]"
# Of a device for as long as the body runs, with room for slabs of so many bytes; nobody else uses it meanwhile.
Opened: TypeAlias = "Callable[[int], AbstractContextManager[OpenDevice]]"

# Nobody's process-wide states, for units that must not depend on them. Of any seed.
NOBODYS = random_state(19)
LOSS = "loss_fn"
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
    return closing(spec.for_rehearsal().open(0, Trace(), num_threads, min(arena_bytes, spec.memory_bytes)))


def rehearse(state: TaskState, batch: Batch, evaluation: Batch | None, opened: Opened) -> dict[tuple[str, int], float]:
    """Seconds of each unit of a step; in `state`, what they take and which shards need the process-wide generators.

    `evaluation`: a batch to evaluate as well, where the task has a validation loader. opened: the device. Raises
    TooLarge, what a layer or the loss raised, and ValueError for layers that cannot be streamed.
    """
    widest = max(state.cut.shards, key=lambda shard: shard.slab_bytes)
    with opened(widest.slab_bytes) as device, closing(_Rehearsal(state, device)) as rehearsal:
        if widest.slab_bytes > device.ledger.memory_bytes:
            raise TooLarge(widest.index, widest.slab_bytes)
        checks = _Checks(rehearsal)
        seconds = rehearsal.run(batch)
        checks.check_batch(batch)
        state.observed.changed_buffers = frozenset(state.staging.buffers)
        state.measured.staging_bytes = state.staging.num_bytes
        state.check_buffers()
        state.observed.draws = not state.end_of_forward().same_as(batch.main) and not state.is_split
        state.observed.draws_outside_torch = not state.end_of_forward().same_outside_torch(batch.start[-1])
        checks.check_settled(batch)
        if state.task.compile:
            del rehearsal.modes[1:]  # what compiles looks at modes of functions, too
            rehearsal.run(batch)  # its units are known by now: what cannot be compiled is refused here
        if not rehearsal.repeats_bits:
            # The first run has loaded kernels, and was metered: it says nothing of the seconds of others.
            seconds = rehearsal.run(batch)
        if evaluation is not None:
            rehearsal.run(evaluation)
            checks.check_batch(evaluation)
            state.observed.draws |= not state.end_of_forward().same_as(evaluation.main)
            checks.check_settled(evaluation)
        state.observed.attributes.tried.update(rehearsal.onlooker.tried())
        rehearsal.is_whole = True
        return seconds


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # of torch.func, which holds no memory itself
        return 0


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Raises where a layer writes to its parameters, through `.data` as well, of which versions tell nothing."""

    def __init__(self, state: TaskState) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots = state.layout.slots
        self.views: Mapping[int, Tensor] = {}  # parameters of the unit, by slot

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # `set_` puts them elsewhere, with the same values: an LSTM's on a GPU.
        if self.views and func._schema.is_mutable and func.overloadpacket is not torch.ops.aten.set_:
            for k, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._check(args[k] if k < len(args) else kwargs.get(argument.name))
        return func(*args, **kwargs)

    def _check(self, value: Any) -> None:
        slabs = {_address(view) for view in self.views.values()} - {0}
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided and _address(tensor) in slabs:
                starts = [(view.data_ptr(), index) for index, view in self.views.items()]
                _, index = max((each for each in starts if each[0] <= tensor.data_ptr()), default=starts[0])
                raise LayerFault(f"a layer {writes(self._slots[index].name)}")


class _InUse(NamedTuple):
    """Of the copy of a batch, what a micro-batch of a unit was given."""

    shard: Shard
    m: int
    given: list[tuple[int, Any, list[Any], pytree.TreeSpec]]  # inputs or target, the value, what was in it
    entered: list[tuple[Part, Tensor, Tensor]]  # in the memory of the batch: which part of it, and the same in DRAM


class _Onlooker:
    """Looks on while units run: the executor's inspector."""

    def __init__(self, state: TaskState, classes: ClassLimits, limit: IndexLimit) -> None:
        self.carries = False
        self.places: set[int] = set()  # storages that parameters lie in, while they are bound
        self.left: dict[int, Sequence[Contents]] = {}  # by layer, what the last unit that changed it left
        self.changed: dict[Changed, None] = {}  # in the order in which they were found
        self._buffers: dict[int, Tensor] = {}  # as they were before a backward
        # (inputs or target, micro-batch) of a batch whose containers were changed, and with the tensor that was.
        self.rearranged: set[tuple[int, int]] = set()
        self.written: dict[Part, Shard] = {}  # and by which shard
        self._in_use: _InUse | None = None
        # What the shard below has given of the batch: by the shard's first layer, micro-batch and number of the tensor.
        self._passed: dict[Part, Part] = {}
        self._state, self._classes, self._limit, self.writes = state, classes, limit, _Writes(state)

    def begins(self, shard: Shard, views: Mapping[int, Tensor]) -> None:
        self.places |= {_address(view) for view in views.values()}
        self.writes.views = views
        if not self.carries:
            last = shard.last if shard.last < self._state.layout.num_layers else len(self._state.layout.layers)
            for k in range(shard.first, last):
                self.left.pop(k, None)

    def is_bound(self, value: Any) -> bool:
        if not isinstance(value, Tensor) or type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return False  # fake tensors, which the profile may leave in a list of features, have no memory
        return value.layout == torch.strided and _address(value) in self.places

    def enters(self, shard: Shard, m: int, micro: MicroInput) -> None:
        self._note_batch()
        staging, entered = self._state.staging, []
        for k, (tensor, source) in enumerate(
            zip(micro.value.tensors, staging.entering(shard.index, m).tensors, strict=True)
        ):
            part = (0, m, k) if shard.is_first else self._passed.get((shard.first, m, k))
            if part is not None:
                entered.append((part, tensor, source))
        if micro.target is not None:
            both = zip(micro.target.tensors, staging.given.targets[m].tensors, strict=True)
            entered += [((1, m, k), *pair) for k, pair in enumerate(both)]
        self._in_use = _InUse(shard, m, [], entered)

    def gives(self, shard: Shard, m: int, tensors: Sequence[Tensor]) -> None:
        assert self._in_use is not None
        entered = self._in_use.entered
        within = {_address(tensor): part for part, tensor, _ in entered if tensor.layout == torch.strided}
        for k, tensor in enumerate(tensors):
            if tensor.layout == torch.strided and _address(tensor) in within:
                self._passed[shard.last, m, k] = within[_address(tensor)]

    def gets(self, side: int, value: Any) -> None:
        assert self._in_use is not None
        self._in_use.given.append((side, value, *pytree.tree_flatten(value)))
        (self._classes if side else self._limit).enters(value)

    def _note_batch(self) -> None:
        """Note what a micro-batch's layers and the loss have changed of the copy of the batch that they were given."""
        in_use, self._in_use = self._in_use, None
        if in_use is None:
            return
        for side, value, leaves, spec in in_use.given:
            now, now_spec = pytree.tree_flatten(value)
            if now_spec != spec or any(a is not b for a, b in zip(now, leaves, strict=True)):
                self.rearranged.add((side, in_use.m))
        for part, tensor, source in in_use.entered:
            # No copy where it is in DRAM, which would be metered; `.cpu()` would close gaps between elements.
            if not identical(tensor if tensor.device.type == "cpu" else copy_in_dram(tensor), source):
                self.written[part] = in_use.shard

    def begins_backward(self, buffers: Mapping[int, Tensor]) -> None:
        self._buffers = {index: copy_in_dram(buffer) for index, buffer in buffers.items()}

    def ends_backward(self, buffers: Mapping[int, Tensor]) -> set[int]:
        before, self._buffers = self._buffers, {}
        both = ((index, old, buffers[index]) for index, old in before.items() if index in buffers)
        written = {index for index, old, new in both if not identical(old, copy_in_dram(new))}
        self._state.observed.written_buffers |= written
        return written

    def ends(self) -> None:
        self.writes.views = {}  # what comes now may write to them
        self._limit.enters(None)
        self._note_batch()

    def let_go(self) -> None:
        """Let go of the device's memory and of the batch, which a unit that has raised leaves here."""
        self.writes.views, self._in_use, self._buffers = {}, None, {}

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


class _Seeds:
    """Sees whether a layer seeds torch's generator or puts a state into it, which no mode is told of."""

    def __init__(self) -> None:
        self.are_set = False

    def __enter__(self) -> None:
        self._before = sys.getprofile()
        sys.setprofile(self._note)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _note(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in ("seed", "manual_seed", "set_state"):
            generator = called.__self__
            # Functions of torch's mean the task's generator.
            if frame.f_globals.get("__name__") == "torch.random":
                self.are_set = True
            elif isinstance(generator, torch.Generator):
                self.are_set |= generator_key(generator) == generator_key(torch.default_generator)


class _Rehearsal:
    """A worker of its own, on which units run one after the other."""

    def __init__(self, state: TaskState, device: OpenDevice) -> None:
        self.state = state
        self._events: SimpleQueue[Event] = SimpleQueue()
        self.repeats_bits = state.place.type == "cpu"
        self.modes: list[AbstractContextManager[Any]] = []  # in which units run
        self._gradients: list[Tensor | None] = []
        self.is_whole = False  # nothing was raised, and training may follow
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
            self.classes = ClassLimits({size for slot in state.layout.slots for size in slot.shape})
            self._limit = IndexLimit(self.executor.structure.layers[0])
            self.onlooker = self.executor.inspector = _Onlooker(state, self.classes, self._limit)
            self.modes += [self.onlooker.writes, self.classes, self._limit]
            self._gradients = [slot.parameter.grad for slot in state.layout.slots]  # the user's
            for slot in state.layout.slots:
                slot.parameter.grad = None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the model back; nothing waits for the cyclic collector, nor for who keeps the error."""
        self._worker.leave()
        self._worker.dismiss_all()
        self.state.close(keeps=self.is_whole)
        if self.modes:  # else it was never made
            self.onlooker.let_go()
        for slot, gradient in zip(self.state.layout.slots, self._gradients, strict=False):
            slot.parameter.grad = gradient

    def run(self, batch: Batch) -> dict[tuple[str, int], float]:
        """Run a batch's units, with process-wide generators of nobody's: seconds of each."""
        state = self.state
        self.onlooker.written, self.onlooker.rearranged = {}, set()
        self.classes.training = batch.training
        tensors = [each for pair in batch.boundaries for value in pair for each in value.tensors]
        self.classes.batch_sizes = {size for each in tensors for size in each.shape}
        weights = [weight for _, _, weight in batch.micro_batches]
        state.staging.begin(batch.boundaries, weights, batch.start, batch.signature)
        seconds: dict[tuple[str, int], float] = {}
        for kind, shard in state.cut.chains[batch.training]:
            unit = Unit(state.name, kind, shard, batch.step)
            seeds = _Seeds() if kind != BACKWARD and shard in state.cut.drawing - state.cut.locked else None
            with self._nobodys(seeds):
                outcome = self._unit(unit)
                error = outcome.error if isinstance(outcome, Failed) and kind == FORWARD else None
                if isinstance(error, (RuntimeError, TypeError)) and not isinstance(error, DeviceOutOfMemory):
                    # It may come from autograd missing what the forward saved.
                    state.cut = replace(state.cut, keep_saved=state.cut.keep_saved | {shard})
                    outcome = self._unit(unit)
            state.observed.index_limit, state.observed.classes = self._limit.found, self.classes.found
            if seeds is not None and seeds.are_set:
                state.cut = replace(state.cut, locked=state.cut.locked | {shard})
                outcome = self._unit(unit) if kind == FORWARD else outcome  # whose backward runs it again
            if isinstance(outcome, Failed):
                self._raise(outcome, unit)
            else:
                seconds[kind, shard] = outcome
            state.pool.gradients.take_back(state.cut.shards[shard])
            state.check_gradients(state.cut.shards[shard])
        return seconds

    @contextmanager
    def _nobodys(self, seeds: _Seeds | None) -> Iterator[None]:
        """Let the compute lane have process-wide generators of nobody's. Not in a unit, whose seconds count."""
        held = ExitStack()

        def begin() -> None:
            held.enter_context(installed(Stream(NOBODYS)))
            if seeds is not None:
                held.enter_context(seeds)

        self._in_lane(begin)
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

    def _raise(self, failed: Failed, unit: Unit) -> None:
        error, name = failed.error, self.state.name
        if isinstance(error, DeviceOutOfMemory):
            memory_bytes = self._device.ledger.memory_bytes
            raise TooLarge(unit.shard, memory_bytes + max(1, error.needed_bytes - error.free_bytes)) from error
        where = failed.where
        if isinstance(error, UnfitTensor):
            raise UnfitTensor(f"{name}: {error}") from error
        if isinstance(error, LayerFault):
            raise error
        if isinstance(error, AttributeError) and isinstance(getattr(error, "obj", None), nn.Module):
            raise ValueError(f"{name}: {where} reads an attribute that is not there: {error}; {REMEDY}") from error
        if self.onlooker.carries:
            raise ValueError(
                f"{name}: run a second time on the same input, {where} gave another result: {type(error).__name__}: "
                f"{error}; {REMEDY}"
            ) from error
        raise noted(error, f"in {where} of task {name}, while a step of it was tried")


class _Checks:
    """Refuses layers that would show that devices run copies of them."""

    def __init__(self, rehearsal: _Rehearsal) -> None:
        self._rehearsal = rehearsal
        self._state, self._executor = rehearsal.state, rehearsal.executor
        self._onlooker = rehearsal.onlooker
        # What runs: layers, and a loss that is none.
        layers, loss_fn = self._executor.structure.layers, self._executor.loss_fn
        self._roots: list[tuple[str, object]] = [*zip(self._state.layout.names, layers, strict=True)]
        self._roots += [] if isinstance(loss_fn, nn.Module) else [(LOSS, loss_fn)]
        self._begun = self._plain_state()

    def check_batch(self, batch: Batch) -> None:
        """Refuse work in place on what the loader keeps, and gives again: what is changed on a device is a copy."""
        state, found = self._state, self._onlooker
        state.observed.works_on_batch |= bool(found.written or found.rearranged)
        loader = state.loader(training=batch.training)
        for side, m in sorted(found.rearranged):
            held = {id(e) for _, e, _ in reach(("", batch.micro_batches[m][side]), copied_only=True)}
            path = next((p for p, e, _ in reach(("loader", loader)) if isinstance(e, CONTAINERS) and id(e) in held), "")
            if path:
                raise self._in_place(side, state.cut.shards[-1 if side else 0], f"{path} keeps, a dict or list")
        is_listed = state.task.purpose is Purpose.TRAIN and isinstance(state.task.validation, (list, tuple))
        tensors = [[Boundary.of(each, "a batch").tensors for each in pair[:2]] for pair in batch.micro_batches]
        for side, m, k in sorted(found.written):
            tensor, where = tensors[m][side][k], ""  # which the loader gave
            if tensor.dtype != batch.boundaries[m][side].tensors[k].dtype:
                pass  # a cast of it is written to
            elif sum(kept_by(tensor, ("", each)) is not None for each in chain(*chain(*tensors))) > 1:
                where = "shares memory with another part of the batch"
            elif (kept := kept_by(tensor, ("loader", loader))) is not None:
                where = f"{kept} keeps"
            if where or (not batch.training and is_listed):
                raise self._in_place(side, found.written[side, m, k], where or "the list of validation= keeps")

    def _in_place(self, side: int, shard: Shard, where: str) -> ValueError:
        state = self._state
        names = [*map(state.layout.shown, state.layout.names[shard.first : shard.last]), *([LOSS] if side else ())]
        return ValueError(
            f"{state.name}: {spanned(names)}: work in place on the {('inputs', 'target')[side]} of a batch that "
            f"{where}, limit: what nobody else sees, since a device has a copy, and plain PyTorch would go on from "
            f"what is left there; change a copy of it (clone(), dict(batch)), or let the loader give one"
        )

    def check_settled(self, batch: Batch) -> None:
        """Refuse layers that go on changing what they keep when a batch runs again from what they have left.

        A run that has changed nothing would change nothing again.
        """
        if self._plain_state() == self._begun and not self._onlooker.left:
            return
        onlooker, attributes = self._onlooker, self._executor.attributes
        onlooker.carries = True
        left = dict(onlooker.left)  # held, or what was compared might go
        try:
            for layer, contents in left.items():
                attributes[layer].install(contents)
            before = self._plain_state()
            self._rehearsal.run(batch)
            self._compare(before, self._plain_state())
        finally:
            for each in attributes:
                each.put_back()
            onlooker.carries = False

    def _plain_state(self) -> OwnedState:
        """What the copies hold beside parameters and buffers, which are placeholders here."""
        structure, layout = self._executor.structure, self._state.layout
        besides = {id(each) for each in (*structure.parameters, *structure.buffers, *layout.layers)}
        copies = {id(each) for _, layer in self._roots if isinstance(layer, nn.Module) for each in layer.modules()}
        copies |= {id(each) for each in structure.parameters}
        found: OwnedState = {}
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
            elif (text := text_of(value)) is not None:
                found.setdefault((path, is_own), []).append(text)
        return found

    def _compare(self, before: OwnedState, after: OwnedState) -> None:
        """Refuse what a second run of the same input has changed again: it matters now, or at some later step.

        Lists and the like outside of a layer, in a closure or a global, may grow: they are where records are kept.
        """
        layers = zip(self._state.layout.names, self._executor.structure.layers, strict=True)
        modules = ((name, path) for name, layer in layers for path, _ in layer.named_modules(remove_duplicate=False))
        names = [f"{name}.{path}" if path else name for name, path in modules]
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
            attribute = path[len(layer) + 1 :].replace(f"{GLOBALS}.", "").replace(f"{CLASS}.", "")
            name = f"{layer}.{attribute}"
            if any(name == each or name.startswith((f"{each}.", f"{each}[")) for each in self._state.task.records):
                continue
            how = "to another value" if has_bits else f"from {a} to {b}"
            raise ValueError(
                f"{self._state.name}: {self._state.layout.shown(layer)}: forward changes its attribute {attribute!r} "
                f"{how} when it runs again on the same input, limit: what is the same after each such run; "
                f"{KEEP_OUTSIDE if layer == LOSS else KEEP_IN_BUFFERS}; if it is a record that nothing reads, name it: "
                f"records=({name.partition('[')[0]!r},)"
            )


@contextmanager
def _within(modes: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as held:
        for mode in modes:
            held.enter_context(mode)
        yield


def _is_of_one(value: Any, copies: Collection[int], *, is_own: bool) -> bool:
    """Return True for the id of one of these, and for a table of it that other copies have, too."""
    if isinstance(value, int):
        return value in copies
    if is_own or not isinstance(value, (dict, set)):
        return False
    keys = (each() if isinstance(each, weakref.ref) else each for each in list(value))
    return any(id(part) in copies for each in keys for part in (each if isinstance(each, tuple) else [each]))
