"""A unit on its way through a device: the slabs that it shares with others, what it starts from and leaves."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hydra_engine.data import NO_BATCH, Boundary, RandomState
from hydra_engine.devices import Promise, Slab
from hydra_engine.host import DeviceStep, Region, TaskState, UnitBytes
from hydra_engine.schedule import BACKWARD, FUSED, Unit
from hydra_engine.worker.graphs import Graph, Saved


@dataclass(kw_only=True)
class MicroInput:
    """What one micro-batch of a unit starts from, on the device."""

    value: Boundary
    random: RandomState  # before the shard's forward
    target: Boundary | None = None  # last shard
    weight: float | None = None  # of this micro-batch's loss; None: the plain loss
    loss_scale: float | None = None  # the loss is multiplied by it before its backward
    gradients: Sequence[Tensor | None] = ()  # of the shard's output, for a backward
    tied: dict[int, Tensor] = field(default_factory=dict)  # slot -> gradient from the shards above
    skips: dict[str, Boundary] = field(default_factory=dict)  # values that skip layers and are gotten here
    skip_gradients: dict[str, Sequence[Tensor | None]] = field(default_factory=dict)  # from the shards above

    def tensors(self) -> list[Tensor]:
        """All of them."""
        target = self.target.tensors if self.target else ()
        skips = [tensor for value in self.skips.values() for tensor in value.tensors]
        gradients = [*self.gradients, *itertools.chain(*self.skip_gradients.values())]
        return [*self.value.tensors, *target, *self.tied.values(), *skips, *(t for t in gradients if t is not None)]

    @property
    def num_bytes(self) -> int:
        """Bytes it takes on the device."""
        return storage_bytes(self.tensors())


@dataclass(kw_only=True)
class MicroOutput:
    """What one micro-batch of a unit leaves, on the device."""

    random: RandomState  # after the shard's forward
    value: Boundary | None = None  # forward: what enters the next shard
    gradients: list[Tensor | None] | None = None  # backward: of what entered this shard
    tied: dict[int, Tensor | None] = field(default_factory=dict)  # borrowed slot -> gradient so far
    skips: dict[str, Boundary] = field(default_factory=dict)  # forward: values for shards further up
    skip_gradients: dict[str, list[Tensor | None]] = field(default_factory=dict)  # backward: of those gotten here
    pieces: dict[int, Tensor | None] = field(default_factory=dict)  # by owned slot: of this micro-batch alone
    # Read by whoever stores them: the lane that computes must not wait for the device.
    loss: float | Tensor | None = None
    metrics: dict[str, float | Tensor] = field(default_factory=dict)  # of an evaluation
    is_held: bool = False  # what stays on the device holds memory of `value`, too

    @property
    def num_bytes(self) -> int:
        """Bytes that stay on the device until they are stored."""
        skips = [tensor for value in self.skips.values() for tensor in value.tensors]
        gradients = [*(self.gradients or ()), *itertools.chain(*self.skip_gradients.values()), *self.tied.values()]
        gradients += self.pieces.values()
        return storage_bytes([*(self.value.tensors if self.value else ()), *skips, *gradients])


@dataclass(kw_only=True)
class UnitOutput:
    """What a unit leaves once all its micro-batches are through, on the device."""

    gradients: dict[int, Tensor | None]  # by owned slot; None: it received none
    buffers: dict[int, Tensor]
    stepped: Any = None  # what a step of the optimizer on the device left

    @property
    def num_bytes(self) -> int:
        """Bytes that stay on the device until they are stored."""
        return storage_bytes([*self.gradients.values(), *self.buffers.values()])


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind these tensors, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


class GivenUp(RuntimeError):
    """A unit that was on its way when its run closed."""


class Loading:
    """A slab that is being filled, or was: for every unit that needs it."""

    def __init__(self, load: Callable[[], Slab], *, late: bool) -> None:
        self.slab: Promise[Slab] = Promise()
        self.is_late = late  # so small that it is loaded when the first unit runs, by the lane that computes
        self._load = load

    @property
    def is_whole(self) -> bool:
        return self.slab.is_done and self.slab.is_kept()

    def settle(self) -> bool:
        """Wait for its load, if that was begun, and tell whether it is whole."""
        return self.is_whole if self.is_late else self.slab.is_kept()

    def load(self) -> None:
        """Fill it. Of no unit's errors: others may need it."""
        try:
            self.slab.keep(self._load())
        except BaseException as error:
            self.slab.give_up(error)


class Left:
    """How far what a unit leaves is on its way to DRAM."""

    def __init__(self) -> None:
        self.passed: Promise[None] = Promise()  # all that the next unit starts from
        self.stored: Promise[None] = Promise()  # gradients of parameters, too


class Work:
    """One unit on its way through a device."""

    def __init__(self, unit: Unit, state: TaskState) -> None:
        self.unit = unit
        self.label = str(unit)
        self.state = state
        self.shard = state.shards[unit.shard]
        self.stepper = state.stepper if unit.kind in (FUSED, BACKWARD) else None
        self.buffer_bytes = self.shard.buffer_bytes
        self.beside_bytes = self.buffer_bytes  # granted with what it works with
        self.beside_bytes += 0 if self.stepper is None else state.step_bytes(self.shard)
        parts = state.staging.parts
        self.first, self.end = state.staging.range_of(unit.part)  # of the step's micro-batches
        self.goes_on = parts is not None and parts.in_sums and unit.part > 0 and unit.kind in (FUSED, BACKWARD)
        self.in_pieces = parts is not None and not parts.in_sums and unit.part > 0
        self.beside_bytes += state.sum_bytes(self.shard) if self.goes_on else 0
        self.regions = state.regions(self.shard)
        self.slabs: dict[Region, Loading] = {}  # pinned
        self.slab_granted = False
        self.admitted = False  # its jobs are in the lanes, and the last of them ends it
        self.error: BaseException | None = None  # the first
        self.where = ""
        # From here on known when it runs.
        self.after: Left | None = None  # by the unit before it, where that is still on its way to DRAM
        self.left = Left()
        self.at_work: Promise[None] = Promise()  # kept once its slabs are let go
        self.signature = NO_BATCH
        self.known: UnitBytes | None = None
        self.is_metered = False
        self.held_bytes = 0  # granted beside its slabs
        self.views: dict[int, Tensor] = {}  # parameters in the slabs
        self.buffers: dict[int, Tensor] = {}  # come with the first input
        self.so_far: dict[int, Tensor] = {}  # gradients of the parts before; come with the first input
        self.step: DeviceStep | None = None  # comes with the first input, where the device steps the optimizer
        self.first_input: MicroInput | None = None  # brought by the lane that computes
        self.inputs: dict[int, Promise[MicroInput]] = {}  # the others on their way, by micro-batch
        self.saved: Saved | None = None  # counts or keeps what a forward saves
        self.graph_bytes = 0  # granted for that
        self.graph_key: Hashable = None  # of the graphs that a backward goes on from, pinned
        self.graphs: Sequence[Graph] = ()
        self.entered: list[tuple[Tensor, int]] = []  # of the micro-batch in progress, with versions
        self.stores: list[Promise[None]] = []
        self.output: UnitOutput | None = None
        self.last_output: MicroOutput | None = None  # goes with what the unit itself leaves
        self.input_bytes = 0
        self.output_bytes = 0

    @property
    def num_micro_batches(self) -> int:
        return self.end - self.first

    @property
    def wanted_bytes(self) -> int | None:
        """What it takes beside its slabs; None: not known yet."""
        return self.beside_bytes + self.known.total(self.num_micro_batches) if self.known else None

    def count_buffers(self, num_bytes: int) -> None:
        """Take its buffers' bytes to be so many."""
        self.beside_bytes += num_bytes - self.buffer_bytes
        self.buffer_bytes = num_bytes

    def fail(self, error: BaseException, where: str = "") -> None:
        forget_frames(error)
        if self.error is None:
            self.error, self.where = error, where

    def forget(self) -> None:
        """It has failed, and its error may refer to it for as long as somebody reads that: nothing on a device does."""
        self.saved, self.graphs, self.step, self.first_input, self.inputs, self.stores = None, (), None, None, {}, []
        self.views, self.buffers, self.so_far, self.entered = {}, {}, {}, []


def forget_frames(error: BaseException) -> None:
    """Let go of what the functions that an error came through had in their hands: a unit's activations.

    Its text stays as it is. Functions that are still at work are left alone.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
