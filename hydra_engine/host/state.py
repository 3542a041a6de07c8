"""One task during one run: its layout, its pool, the step in progress, and what is known of its units."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hydra_engine.data import ALIGNMENT_BYTES, RandomState, Signature, direct_limit, identical, residue
from hydra_engine.host.device_step import DeviceStepper
from hydra_engine.host.layout import ModelLayout, Shard
from hydra_engine.host.loss_scale import LossScale
from hydra_engine.host.pool import HostPool, StepStaging
from hydra_engine.host.unit_bytes import MOST_KNOWN, Count, KnownUnits, UnitBytes
from hydra_engine.schedule import BACKWARD, EVALUATE, FORWARD, FUSED, Flow, Unit, evaluation_chain, training_chain
from hydra_engine.system import HostMemory
from hydra_engine.tasks import ModelTask, Purpose
from hydra_engine.trace import Timing
from partitioners import LayerCost, forward_unit_bytes, unit_bytes

# Of the largest value: what adding in another order may change, and a layer that gives something else exceeds.
ORDER_TOLERANCE = 1e-2


class Region(NamedTuple):
    """A slab of a shard, and what its contents go by."""

    key: Hashable
    trainable: bool
    num_bytes: int


def layout_of(task: ModelTask, alignment_bytes: int = ALIGNMENT_BYTES) -> ModelLayout:
    """Lay out the task's parameters and buffers, each in a place at a multiple of `alignment_bytes`."""
    names, layers = zip(*task.model._modules.items(), strict=True)
    loss = task.loss_fn if isinstance(task.loss_fn, nn.Module) else None
    trains = task.purpose is Purpose.TRAIN
    return ModelLayout(layers, names, loss, task.precision, trains=trains, alignment_bytes=alignment_bytes)


class TaskState:
    """Joins what devices, optimizer and reader need of a task.

    Its staging is written by one unit of each part of a step at a time.
    """

    def __init__(self, task: ModelTask, name: str, layout: ModelLayout, pool: HostPool) -> None:
        self.task = task
        self.name = name
        self.layout = layout
        self.pool = pool
        self.staging = StepStaging()
        self.boundaries: list[int] = []
        self.shards: list[Shard] = []
        self.place = torch.device("cpu")  # a device of the kind that it is planned for
        self.locked: set[int] = set()  # shards that draw from process-wide generators
        self.drawing: set[int] = set()  # shards with layers that draw random numbers, or may
        self.keep_saved: set[int] = set()  # shards that differentiate inside their forward
        self.coupled: set[tuple[int, int]] = set()  # layers of which the second takes what the first left on the side
        self.unproven: set[int] = set()  # shards whose forward has not been seen to repeat in a backward
        self.known = KnownUnits()
        self.evaluated_parts: dict[tuple[Any, ...], int] = {}  # of evaluation batches too large for a layer alone
        self.draws_outside_torch = False  # a layer draws from `random` or `numpy.random`
        self.changed_buffers: set[int] = set()  # by the step that was rehearsed
        self.any_may_change = False  # another one was seen to change in a step that was spread
        self.draws = False  # a layer draws from the task's main stream, so reads must not run ahead of it
        self.accumulation_steps = 1
        scale = LossScale.of(task)
        self.loss_scale = None if scale is None else scale.scale  # of the step in progress
        self.steps_on_device = False
        self.stepper: DeviceStepper | None = None  # while steps are taken on devices
        self.index_limit = direct_limit(layout.layers[0])  # of what the first layer looks up; None: nothing
        self.state_bytes: dict[int, int] = {}  # of the optimizer's state, by slot
        self.staging_bytes = 0  # DRAM of the step that was rehearsed
        # Buffers that a layer was seen to give another shape or type. Replaced, never changed: lanes write it.
        self.resized: frozenset[int] = frozenset()
        self.unit_s: dict[tuple[str, int], float] = {}  # by (kind, shard)
        self.timings: dict[tuple[str, int], Timing] = {}  # likewise, of the last one, where launching is not computing
        self.num_commits = 0  # of training steps in this run
        self.keeps_from = 0  # this shard and those above keep what autograd saves in their forward, where there is room
        self.graph_bytes: dict[tuple[int, Signature], int] = {}  # (shard, signature): what that takes beside the slab
        self.unseen: set[int] = set()  # shards whose graphs hold more than can be counted
        self.lowest_backward = 0  # the lowest shard that holds a trainable parameter; where none does, their number
        self.chains: dict[bool, tuple[tuple[str, int], ...]] = {}  # (kind, shard) in order, by whether a batch trains
        self._num_cuts = 0
        self._positions: dict[int, tuple[bool, int]] = {}  # by part: the chain it is on, and its first unit not begun
        self._flows: dict[bool, Flow] = {}

    def begun(self, unit: Unit) -> None:
        """A device has a unit to compute."""
        training = unit.kind != EVALUATE
        self._positions[unit.part] = (training, 1 + self._flow(training).order[unit.kind, unit.shard])

    def begin_parts(self, num_parts: int, training: bool) -> None:
        """A step begins, in so many parts."""
        self._positions = dict.fromkeys(range(num_parts), (training, 0))

    def may_keep_graph(self, shard: Shard) -> bool:
        """Whether a shard's backward can go on from its forward's graph, instead of running the forward again."""
        crosses = shard.borrowed or shard.upper or shard.arriving or shard.leaving
        alone = shard.index not in self.locked and shard.index not in self.keep_saved | self.unseen
        # A backward sees the buffers as its own micro-batch's forward left them.
        alone = alone and not (self.accumulation_steps > 1 and self.changes_buffers(shard))
        return alone and not crosses and self.lowest_backward <= shard.index < len(self.shards) - 1

    def regions(self, shard: Shard) -> list[Region]:
        """The slabs of a shard: of its trainable parameters, and of its frozen ones."""
        sizes = {True: shard.own_bytes, False: shard.slab_bytes - shard.own_bytes}
        return [Region(self._key(shard, kind), kind, num_bytes) for kind, num_bytes in sizes.items() if num_bytes]

    def _key(self, shard: Shard, trainable: bool) -> Hashable:
        if trainable:  # of one version
            return (self.name, self._num_cuts, shard.index, self.num_commits)
        return ("frozen", self.pool.frozen_key(shard))

    def region_next_use_s(self, shard: Shard, region: Region) -> float:
        """Seconds of the task's own units before the next one that needs a region as it is; else infinite."""
        if region.trainable and region.key != self._key(shard, True):
            return math.inf
        return self.next_use_s(shard, beyond_step=not region.trainable)

    def next_use_s(self, shard: Shard, *, beyond_step: bool = False, with_last: bool = False) -> float:
        """Seconds of the task's own units before one of a shard; infinite if there is none.

        beyond_step: not only in the step in progress. with_last: the unit that was begun last counts, too: it may not
        have taken its input yet.
        """
        if shard.index >= len(self.shards) or self.shards[shard.index] is not shard:
            return math.inf  # of an old partition
        found = [math.inf]
        for training, position in self._positions.values():
            flow = self._flow(training)
            found.append(flow.next_use_s(shard.index, max(0, position - with_last), beyond_step=beyond_step))
        return min(found)

    def _flow(self, training: bool) -> Flow:
        if training not in self._flows:
            self._flows[training] = Flow.of(self.chains[training], self.unit_s, len(self.shards))
        return self._flows[training]

    def step_on_device(self) -> None:
        """Let devices step the optimizer, each shard's at the end of its backward unit."""
        self.steps_on_device = self.pool.early_release = True
        self.pool.keeps_gradients = False

    def note_resized(self, buffers: Mapping[int, Tensor]) -> bool:
        """Remember which of these are others in shape or type than planned, and tell whether any is for the first time.

        From then on its shard's units and those of the shards above are metered each time.
        """
        planned = self.layout.buffers
        found = {
            index
            for index, buffer in buffers.items()
            if buffer.shape != planned[index].shape or buffer.dtype != planned[index].dtype
        }
        is_new, self.resized = not found <= self.resized, self.resized | found
        return is_new

    def buffer_bytes(self, shard: Shard) -> int:
        """Bytes of a shard's buffers on a device, as they are now: some grow."""
        if self.resized.isdisjoint(shard.buffers):
            return shard.buffer_bytes
        committed, staged = self.pool.buffers or self.layout.buffers, self.staging.buffers
        both = [(committed[index], staged.get(index, committed[index])) for index in shard.buffers]
        return sum(max(map(self.layout.buffer_bytes, each)) for each in both)

    def _is_sized_by_batch(self, shard: Shard) -> bool:
        """Return True if a batch's sizes decide what a shard's units take: no layer up to there resizes a buffer."""
        return not self.resized or all(self.resized.isdisjoint(s.buffers) for s in self.shards[: shard.index + 1])

    def step_bytes(self, shard: Shard) -> int:
        """Bytes that stepping a shard brings to a device: the optimizer's state, and masters beside narrow weights."""
        if not self.steps_on_device:
            return 0
        slots = self.pool.owned(shard)
        masters = sum(slot.num_bytes for slot in slots if slot.dtype != slot.link_dtype)
        return masters + sum(self.state_bytes.get(slot.index, 0) for slot in slots)

    def sum_bytes(self, shard: Shard) -> int:
        """Bytes of a shard's gradients as they are added up on a device: narrow ones in float32."""
        slots = self.pool.owned(shard)
        return sum(self.layout.aligned(slot.link_bytes * max(1, 4 // slot.link_dtype.itemsize)) for slot in slots)

    def changes_buffers(self, shard: Shard) -> bool:
        """Whether a shard's forward is known to change buffers, or has to be taken to."""
        return bool(shard.buffers) and (self.any_may_change or not self.changed_buffers.isdisjoint(shard.buffers))

    @property
    def ordered(self) -> frozenset[tuple[str, int]]:
        """Units whose parts run one after the other: their forward changes buffers."""
        changed = {shard.index for shard in self.shards if self.changes_buffers(shard)}
        return frozenset((kind, j) for kind, j in self.chains[True] if kind != BACKWARD and j in changed)

    def open(self, host: HostMemory | None = None) -> None:
        """Take the model over from its user, into memory of `host`'s. Raises ValueError where it has moved."""
        moved = self.layout.moved()
        if moved is not None:
            raise ValueError(
                f"{self.name}: parameter {moved.name} begins at an address of {residue(moved.parameter)} modulo 64, "
                f"planned: {moved.residue}, since it was given other memory meanwhile; write into it "
                f"(parameter.data.copy_(...)), or make a new ModelOrchestrator"
            )
        self.pool.open(self.shards, host)

    def close(self) -> None:
        """Give the model back to its user, and let go of the step in progress."""
        self.pool.close()
        self.staging = StepStaging()

    def cut(self, boundaries: Sequence[int]) -> None:
        """Set the partition. A shard that is part of an old one draws and differentiates as that one did."""
        for low, high in self.coupled:
            if any(low < end <= high for end in boundaries):
                names = self.layout.names
                raise ValueError(
                    f"{self.name}: layer {names[high]} takes a tensor that layer {names[low]} has left outside its "
                    f"output, and memory asks for a cut between them, which it would not cross; return it, or pass it "
                    f"with Skips"
                )
        old, locked, keep_saved = self.shards, self.locked, self.keep_saved
        proven = {(s.first, s.last) for s in old[:-1] if s.index not in self.unproven}
        self.boundaries = list(boundaries)
        self.shards = self.layout.shards(boundaries)
        slots, num = self.layout.slots, len(self.shards)
        trained = (shard.index for shard in self.shards if any(slots[index].trainable for index in shard.slots))
        self.lowest_backward = min(trained, default=num)
        self.chains = {True: training_chain(num, self.lowest_backward), False: evaluation_chain(num)}
        self.known.forget_units()
        self._num_cuts += 1
        self.keeps_from, self.graph_bytes, self.unseen = len(self.shards), {}, set()  # until a planner decides
        self._flows, self._positions = {}, {}
        self.locked = _inside(self.shards, old, locked)
        self.drawing = _inside(self.shards, old, self.drawing)
        self.keep_saved = _inside(self.shards, old, keep_saved)
        self.unproven = {s.index for s in self.shards if (s.first, s.last) not in proven}

    def forget_units(self) -> None:
        """Forget what units take: it differs with the number of micro-batches."""
        self.known.forget_units()

    def note_fitting(self, training: bool, signature: Signature, costs: Sequence[LayerCost] | None = None) -> None:
        """Remember that a batch fits; costs: of its layers, where every shard fits by these."""
        self.known.note_fitting(training, signature, costs)

    def fits_like_another(self, training: bool, signature: Signature) -> bool:
        """Whether a batch is no larger, in any dimension, than one of its kind that was seen to fit."""
        return self.known.fits(training, signature)

    def is_last(self, shard: Shard) -> bool:
        return shard.index == len(self.shards) - 1

    def unit_bytes(self, kind: str, shard: Shard, signature: Signature) -> UnitBytes | None:
        """Bytes that a unit takes at most beside its slab in a step of this signature; None: it has to be metered."""
        if not self._is_sized_by_batch(shard):
            return None
        return self.known.get(kind, shard, signature, self._count(kind, shard))

    def learn_unit_bytes(self, kind: str, shard: Shard, signature: Signature, measured: UnitBytes) -> None:
        """Remember what a metered run took."""
        if self._is_sized_by_batch(shard):
            self.known.learn(kind, shard, signature, measured, self._count(kind, shard))

    def _count(self, kind: str, shard: Shard) -> Count | None:
        if self.steps_on_device and kind in (FUSED, BACKWARD):
            return None  # with what the optimizer creates there
        return forward_unit_bytes if kind == FORWARD and shard.index not in self.keep_saved else unit_bytes

    def graph_bytes_of(self, shard: Shard, signature: Signature) -> int | None:
        """Bytes that a forward's graphs take at most beside the slab; None: they have to be counted."""
        found = self.graph_bytes.get((shard.index, signature))
        if found is not None:
            return found
        known = list(self.graph_bytes.items())
        above = [n for (j, other), n in known if j == shard.index and signature.no_larger(other)]
        return min(above) if above else self.known.saved_bytes(shard, signature)

    def learn_graph_bytes(self, shard: Shard, signature: Signature, num_bytes: int) -> None:
        """Remember what autograd saved in a forward."""
        known = self.graph_bytes_of(shard, signature)
        if known is None or num_bytes > known:
            if len(self.graph_bytes) >= MOST_KNOWN * len(self.shards):
                del self.graph_bytes[next(iter(self.graph_bytes))]
            self.graph_bytes[shard.index, signature] = num_bytes

    def shard_bytes(self, shard: Shard) -> int:
        """Device bytes a shard needs to run: its slab, and the largest unit seen so far."""
        return shard.slab_bytes + self.work_bytes(shard)

    def work_bytes(self, shard: Shard) -> int:
        """Of these, what the largest unit seen so far takes beside the slab."""
        units = [u.total(self.accumulation_steps) for (_, j, _), u in self.known.items() if j == shard.index]
        return self.buffer_bytes(shard) + self.step_bytes(shard) + max(units, default=0)

    def end_of_forward(self) -> RandomState:
        """Where the layers left the random stream in the step in progress."""
        last = self.staging.num_micro_batches - 1
        return self.staging.random[len(self.shards), last]

    def check_repeated(self, shard: Shard, m: int, tensors: Sequence[Tensor]) -> None:
        """Refuse layers whose recomputed forward gives another output than the one that was stored."""
        stored = self.staging.entering(shard.index + 1, m).tensors
        if len(stored) != len(tensors) or not all(map(_repeated, stored, tensors)):
            layers = ", ".join(self.layout.names[shard.first : shard.last])
            raise ValueError(
                f"{self.name}: run again on the same input, layers {layers} gave another output, so a backward could "
                f"not repeat their forward; keep what changes from call to call in buffers, and draw from torch's own "
                f"generator instead of one of the layer"
            )
        if m == self.staging.num_micro_batches - 1:
            self.unproven.discard(shard.index)

    def check_buffers(self) -> None:
        """Refuse a buffer that layers of two shards change, where micro-batches would reach it in another order."""
        if self.accumulation_steps > 1 and self.shares_changed_buffer():
            raise ValueError(
                f"{self.name}: layers of several shards share a buffer that their forward changes, and with "
                f"accumulation_steps {self.accumulation_steps} they would change it in another order than the plain "
                f"loop; set accumulation_steps=1, give each layer its own module, or put them into one shard"
            )

    def shares_changed_buffer(self) -> bool:
        """Whether layers of several shards hold one buffer that their forward changes."""
        changed = self.changed_buffers
        holders = Counter(index for shard in self.shards for index in shard.buffers if index in changed)
        return max(holders.values(), default=0) > 1

    def check_draws(self) -> None:
        """Refuse draws that several micro-batches would take in another order than the plain loop."""
        if self.accumulation_steps > 1:
            for m, start in enumerate(self.staging.start):
                if not self.staging.random[len(self.shards), m].same_outside_torch(start):
                    raise ValueError(
                        f"{self.name}: a layer draws from `random` or `numpy.random` with accumulation_steps "
                        f"{self.accumulation_steps}; draw from torch, whose stream each micro-batch has its own of, or "
                        f"set accumulation_steps=1"
                    )


def _inside(shards: Sequence[Shard], old: Sequence[Shard], marked: set[int]) -> set[int]:
    """The shards that hold layers of a marked old shard."""
    layers = {layer for shard in old if shard.index in marked for layer in range(shard.first, shard.last)}
    return {shard.index for shard in shards if not layers.isdisjoint(range(shard.first, shard.last))}


def _repeated(stored: Tensor, again: Tensor) -> bool:
    """Whether two runs of a forward gave the same; a device's kernels may add in another order each time."""
    if identical(stored, again):
        return True
    if again.device.type == "cpu" or stored.shape != again.shape or not again.is_floating_point():
        return False
    again = again.detach().to("cpu", torch.float32)
    wide, scale = stored.to(torch.float32), float(again.abs().max())
    return torch.allclose(wide, again, rtol=ORDER_TOLERANCE, atol=ORDER_TOLERANCE * scale, equal_nan=True)
