"""A unit on its way through a device, and the slabs that it shares with others."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable, Sequence

from torch import Tensor

from hydra_engine.arena import Slab
from hydra_engine.graphs import Graph, Saved
from hydra_engine.micro_batch import MicroInput, MicroOutput, UnitOutput
from hydra_engine.promise import Promise
from hydra_engine.schedule import BACKWARD, FUSED, Unit
from hydra_engine.signature import NO_BATCH
from hydra_engine.stepping import DeviceStep
from hydra_engine.task_state import Region, TaskState
from hydra_engine.unit_bytes import UnitBytes


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
