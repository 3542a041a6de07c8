"""One task during one run: its layout, pool and cut, the step in progress, and what is known of its units."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hydra_engine.data import (
    ALIGNMENT_BYTES,
    Classes,
    RandomState,
    Signature,
    TargetPlace,
    direct_limit,
)
from hydra_engine.host.home import TaskHomes, home_bytes
from hydra_engine.host.layout import LayerFault, ModelLayout, Shard
from hydra_engine.host.loss_scale import LossScale
from hydra_engine.host.measured import Measured, UnitBytes
from hydra_engine.host.pool import HostPool
from hydra_engine.host.staging import NormGroups, StepStaging
from hydra_engine.schedule import BACKWARD, EVALUATE, Flow, Unit, evaluation_chain, training_chain
from hydra_engine.system import HostMemory
from hydra_engine.tasks import ModelTask, Purpose
from partitioners.cost import Skip

MOST_NAMED = 4  # attributes in a message


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Shards and micro-batches of a task. It is replaced whole: nobody sees half of a new one."""

    serial: int = 0
    boundaries: tuple[int, ...] = ()  # cumulative ends of the shards
    shards: tuple[Shard, ...] = ()
    skips: tuple[Skip, ...] = ()  # values that skip layers
    chains: dict[bool, tuple[tuple[str, int], ...]] = field(default_factory=dict)  # (kind, shard) in order, by training
    num_micro_batches: int = 1  # of a training step
    lowest_backward: int = 0  # the lowest shard with a trainable parameter; the number of shards: there is none
    keeps_from: int = 0  # forwards of this shard and those above keep what autograd saves, where there is room
    locked: frozenset[int] = frozenset()  # shards that draw from process-wide generators
    drawing: frozenset[int] = frozenset()  # shards with layers that draw random numbers, or may
    keep_saved: frozenset[int] = frozenset()  # shards that differentiate inside their forward

    def at(self, layout: ModelLayout, boundaries: Sequence[int], skips: Sequence[Skip]) -> Cut:
        """The next cut, at these boundaries. A shard with a layer of a marked one is marked likewise."""
        shards = tuple(layout.shards(boundaries, skips))
        num = len(shards)
        trained = (shard.index for shard in shards if any(layout.slots[index].trainable for index in shard.slots))
        lowest = min(trained, default=num)
        return Cut(
            serial=self.serial + 1,
            boundaries=tuple(boundaries),
            shards=shards,
            skips=tuple(skips),
            chains={True: training_chain(num, lowest), False: evaluation_chain(num)},
            num_micro_batches=self.num_micro_batches,
            lowest_backward=lowest,
            keeps_from=num,  # until a planner decides
            locked=self._inside(shards, self.locked),
            drawing=self._inside(shards, self.drawing),
            keep_saved=self._inside(shards, self.keep_saved),
        )

    def _inside(self, shards: Sequence[Shard], marked: Collection[int]) -> frozenset[int]:
        """Those of other shards that hold layers of this cut's marked ones."""
        layers = {layer for j in marked for layer in range(self.shards[j].first, self.shards[j].last)}
        return frozenset(shard.index for shard in shards if not layers.isdisjoint(range(shard.first, shard.last)))

    def is_last(self, shard: Shard) -> bool:
        return shard.index == len(self.shards) - 1


class UnitProgress:
    """Tells when a task's shards are needed next, by the units of the step in progress that were begun."""

    def __init__(self, cut: Cut, measured: Measured) -> None:
        self._cut = cut
        self._measured = measured
        self._positions: dict[int, tuple[bool, int]] = {}  # by part: the chain it is on, and its first unit not begun
        self._flows: dict[bool, Flow] = {}

    def begin_parts(self, num_parts: int, training: bool) -> None:
        """Begin a step, in so many parts."""
        self._positions = dict.fromkeys(range(num_parts), (training, 0))

    def begin(self, unit: Unit) -> None:
        """Begin a unit: a device has it to compute."""
        training = unit.kind != EVALUATE
        self._positions[unit.part] = (training, 1 + self._flow(training).order[unit.kind, unit.shard])

    def next_use_s(self, shard: Shard, *, beyond_step: bool = False, with_last: bool = False) -> float:
        """Seconds of the task's own units before one of a shard; infinite if there is none.

        beyond_step: not only in the step in progress. with_last: the unit that was begun last counts, too: it may not
        have taken its input yet.
        """
        shards = self._cut.shards
        if shard.index >= len(shards) or shards[shard.index] is not shard:
            return math.inf  # of an old cut
        found = [math.inf]
        for training, position in self._positions.values():
            flow = self._flow(training)
            found.append(flow.next_use_s(shard.index, max(0, position - with_last), beyond_step=beyond_step))
        return min(found)

    def _flow(self, training: bool) -> Flow:
        if training not in self._flows:
            self._flows[training] = Flow.of(self._cut.chains[training], self._measured.unit_s, len(self._cut.shards))
        return self._flows[training]


class Region(NamedTuple):
    """A slab of a shard, and the key of its contents."""

    key: Hashable
    trainable: bool
    num_bytes: int


class Wanted(NamedTuple):
    """What a task asks for as devices' memory is shared out: its shards that may have homes, lowest first."""

    task: str
    shards: tuple[int, ...]
    home_bytes: tuple[int, ...]  # of these
    slab_bytes: tuple[int, ...]  # of all shards, as units load them
    frozen_bytes: tuple[int, ...]  # of these, what a shard at home still loads
    work_bytes: int  # of its largest unit
    device: int | None = None  # that has homes of it already

    @classmethod
    def of(cls, state: TaskState, task: str, shards: Sequence[Shard], home_bytes: Sequence[int]) -> Wanted:
        """Make that of a task; `shards`: those that are to have homes, which take `home_bytes`."""
        return cls(
            task=task,
            shards=tuple(shard.index for shard in shards),
            home_bytes=tuple(home_bytes),
            slab_bytes=tuple(shard.slab_bytes for shard in state.cut.shards),
            frozen_bytes=tuple(shard.slab_bytes - shard.own_bytes for shard in state.cut.shards),
            work_bytes=max(map(state.work_bytes, state.cut.shards)),
            device=next(iter(state.homes.devices.values()), None),
        )


def layout_of(task: ModelTask, alignment_bytes: int = ALIGNMENT_BYTES, trained: Collection[int] = ()) -> ModelLayout:
    """Lay out the task's parameters and buffers, each in a place at a multiple of `alignment_bytes`.

    trained: ids of parameters that train at some time, also while a callback has frozen them.
    """
    return ModelLayout(
        task.model,
        task.loss_fn,
        task.precision,
        trains=task.purpose is Purpose.TRAIN,
        alignment_bytes=alignment_bytes,
        trained=trained,
    )


@dataclass(eq=False)
class AttributeChanges:
    """Python attributes that a task's forwards change. Devices put them back after each unit, plain PyTorch never."""

    # Seen on trial, without another result: by owner, name and value, "" for any.
    tried: set[tuple[str, str, str]] = field(default_factory=set)
    untried: dict[tuple[str, str], None] = field(default_factory=dict)  # seen later, by layer and name; lanes add to it

    def note(self, layer: str, attribute: str, value: str) -> None:
        if (layer, attribute, value) not in self.tried and (layer, attribute, "") not in self.tried:
            self.untried[layer, attribute] = None

    def doubts(self, shown: Callable[[str], str]) -> list[str]:
        """Say what may matter, for the report; `shown`: as `ModelLayout`'s."""
        if not self.untried:
            return []
        found = [f"{attribute!r} of {shown(layer)}" for layer, attribute in self.untried]
        named = ", ".join(found[:MOST_NAMED]) + (", ..." if len(found) > MOST_NAMED else "")
        return [
            f"{named} changed in a forward as on no batch that was tried: each device went on from what was before, "
            f"and plain PyTorch goes on from what is left; if that is no cache, results differ: keep it in a buffer"
        ]


@dataclass(kw_only=True)
class Observed:
    """Behaviour of a task's layers, as it was seen in the rehearsal and in the run."""

    draws: bool = False  # one draws from the task's main stream, so reads must not run ahead of it
    draws_outside_torch: bool = False  # one draws from `random` or `numpy.random`
    changed_buffers: frozenset[int] = frozenset()  # by the step that was rehearsed
    written_buffers: set[int] = field(default_factory=set)  # by backwards, on trial
    any_may_change: bool = False  # another buffer was seen to change in a step that was spread
    # Buffers that a layer was seen to give another shape or type. Replaced, never changed: lanes write it.
    resized: frozenset[int] = frozenset()
    runs_backward: bool = False  # a forward or the loss adds to gradients by a backward of its own
    index_limit: int | None  # of what the first layer looks up; None: nothing
    # Of targets' tensors that the loss compares with classes, by what tells them apart; see `ClassLimits`.
    classes: dict[TargetPlace, Classes] = field(default_factory=dict)
    works_on_batch: bool = False  # on trial, one changed the batch that it was given, a copy, in place
    attributes: AttributeChanges = field(default_factory=AttributeChanges)

    def copied(self) -> Observed:
        """Return the same, apart from what is observed from now on."""
        attributes = AttributeChanges(set(self.attributes.tried))
        return replace(self, written_buffers=set(self.written_buffers), attributes=attributes)


class TaskState:
    """Joins what devices, optimizer and reader need of a task: its weights, its step, its cut, and what is known of it.

    Its staging is written by one unit of each part of a step at a time. Its cut is replaced by the thread that plans,
    while no unit of the task is at work.
    """

    def __init__(self, task: ModelTask, name: str, layout: ModelLayout, pool: HostPool, max_devices: int = 1) -> None:
        self.task = task
        self.name = name
        # That its batches are split for; None: their sizes do not decide.
        self.max_devices = None if task.max_device_batch is None else max_devices
        self.layout = layout
        self.pool = pool
        self.staging = StepStaging()
        self.cut = Cut()
        self.measured = Measured()
        self.observed = Observed(index_limit=direct_limit(layout.layers[0]))
        self.progress = UnitProgress(self.cut, self.measured)
        self.place = torch.device("cpu")  # a device of the kind that it is planned for
        scale = LossScale.of(task)
        self.loss_scale = None if scale is None else scale.scale  # of the step in progress
        self.num_commits = 0  # of training steps in this run
        self.homes = TaskHomes()
        # Of an adaptive task: groups of parameters whose gradients are measured. One, before there is an optimizer.
        self.norm_groups = NormGroups({slot.index: 0 for slot in layout.trainable_slots()}, 1) if task.adapts else None

    @property
    def norm(self) -> Callable[[int, Tensor], Tensor] | None:
        """The norm of a slot's gradient in the step in progress, as the optimizer takes that.

        None: nothing clips gradients, or has to know whether they are finite.
        """
        slots, scale = self.layout.slots, self.loss_scale
        if self.task.max_grad_norm is None and scale is None:
            return None
        return lambda slot, gradient: slots[slot].norm(gradient, scale)

    def loader(self, *, training: bool) -> Any:
        """The loader whose batches come again; None: they are read once."""
        if self.task.purpose is not Purpose.TRAIN:
            return None
        return self.task.dataloader if training else self.task.validation

    def may_keep_graph(self, shard: Shard) -> bool:
        """Return True if a shard's backward can go on from its forward's graph, and need not run the forward again."""
        j, cut = shard.index, self.cut
        if j in cut.locked or j in cut.keep_saved or j in self.measured.uncounted:
            return False
        if shard.borrowed or shard.upper or shard.arriving or shard.leaving:
            return False
        # A backward sees the buffers as its own micro-batch's forward left them.
        is_changed = self.is_split and self.changes_buffers(shard)
        return not is_changed and cut.lowest_backward <= j < len(cut.shards) - 1

    def regions(self, shard: Shard) -> list[Region]:
        """The slabs of a shard: of its trainable parameters, and of its frozen ones."""
        sizes = ((True, shard.own_bytes), (False, shard.slab_bytes - shard.own_bytes))
        return [Region(self._key(shard, kind), kind, num_bytes) for kind, num_bytes in sizes if num_bytes]

    def _key(self, shard: Shard, trainable: bool) -> Hashable:
        if trainable and shard.index in self.homes.of:
            return (self.name, self.cut.serial, shard.index, "home")
        if trainable:  # of one version
            return (self.name, self.cut.serial, shard.index, self.num_commits)
        return ("frozen", self.pool.frozen_key(shard))

    def region_next_use_s(self, shard: Shard, region: Region) -> float:
        """Seconds of the task's own units before the next one that needs a region as it is; else infinite."""
        if region.trainable and region.key != self._key(shard, True):
            return math.inf
        return self.progress.next_use_s(shard, beyond_step=not region.trainable)

    def note_resized(self, buffers: Mapping[int, Tensor]) -> bool:
        """Remember which of these are others in shape or type than planned, and tell whether any is for the first time.

        From then on its shard's units and those of the shards above are metered each time.
        """
        both = [(index, buffer, self.layout.buffers[index]) for index, buffer in buffers.items()]
        found = {index for index, now, then in both if now.shape != then.shape or now.dtype != then.dtype}
        is_new, self.observed.resized = not found <= self.observed.resized, self.observed.resized | found
        return is_new

    def buffer_bytes(self, shard: Shard) -> int:
        """Bytes of a shard's buffers on a device, as they are now: some grow."""
        if self.observed.resized.isdisjoint(shard.buffers):
            return shard.buffer_bytes
        committed, staged = self.pool.buffers or self.layout.buffers, self.staging.buffers
        both = [(committed[index], staged.get(index, committed[index])) for index in shard.buffers]
        return sum(max(map(self.layout.buffer_bytes, each)) for each in both)

    def _is_sized_by_batch(self, shard: Shard) -> bool:
        """Return True if a batch's sizes decide what a shard's units take: no layer up to there resizes a buffer."""
        resized = self.observed.resized
        return not resized or all(resized.isdisjoint(each.buffers) for each in self.cut.shards[: shard.index + 1])

    def sum_bytes(self, shard: Shard) -> int:
        """Bytes of a shard's gradients as they are added up on a device: narrow ones in float32."""
        slots = self.pool.owned(shard)
        return sum(self.layout.aligned(slot.link_bytes * max(1, 4 // slot.link_dtype.itemsize)) for slot in slots)

    def changes_buffers(self, shard: Shard) -> bool:
        """Return True if a shard's forward changes buffers, as far as is known."""
        return bool(shard.buffers) and (
            self.observed.any_may_change or not self.observed.changed_buffers.isdisjoint(shard.buffers)
        )

    @property
    def ordered(self) -> frozenset[tuple[str, int]]:
        """Units whose parts run one after the other: their forward changes buffers."""
        changed = {shard.index for shard in self.cut.shards if self.changes_buffers(shard)}
        return frozenset((kind, j) for kind, j in self.cut.chains[True] if kind != BACKWARD and j in changed)

    def open(self, host: HostMemory | None = None) -> None:
        """Take the model over from its user, into memory of `host`'s."""
        self.pool.open(self.cut.shards, host)

    def close(self, *, keeps: bool = False) -> None:
        """Give the model back to its user, and let go of the step in progress. keeps: as `HostPool.close`'s."""
        self.pool.close(keeps=keeps)
        self.staging = StepStaging()

    def home_bytes(self, shard: Shard) -> int:
        """Bytes of a device that a shard's home takes, by the states that the optimizer was seen to keep."""
        return home_bytes(shard, self.pool, lambda slot: [self.measured.state_bytes.get(slot.index, 0)])

    def shards_for_homes(self) -> list[Shard]:
        """Shards of the lowest layers that may have a home: they train, and no other shard has a weight of theirs."""
        num_layers = self.homes.num_layers
        lent = {index for shard in self.cut.shards for index in shard.borrowed}
        found = [shard for shard in self.cut.shards if shard.last <= num_layers and shard.owned and not shard.borrowed]
        return [shard for shard in found if lent.isdisjoint(shard.owned)]

    def cut_at(self, boundaries: Sequence[int], skips: Sequence[Skip] | None = None) -> None:
        """Cut the task anew; `skips`: values that skip layers, if it is not known yet.

        A shard that is part of an old one draws and differentiates as that one did. Homes are in DRAM again.
        """
        self.homes.close_all()
        self.cut = self.cut.at(self.layout, boundaries, self.cut.skips if skips is None else skips)
        self.measured.forget_shards()
        self.progress = UnitProgress(self.cut, self.measured)

    def adopt(self, cut: Cut, measured: Measured, observed: Observed) -> None:
        """Be cut as another task of the same structure, and know what is known of that."""
        self.cut, self.measured, self.observed = cut, measured, observed
        self.progress = UnitProgress(cut, measured)

    @property
    def is_split(self) -> bool:
        """True if a training batch is, or may be, more than one micro-batch: each has a random stream of its own."""
        return self.task.max_device_batch is not None or self.task.adapts or self.cut.num_micro_batches > 1

    @property
    def split_by(self) -> tuple[str, str]:
        """The option that splits batches, as it is set, and how to do without it: for errors."""
        most = self.task.max_device_batch
        if most is not None:
            return f"max_device_batch {most}", "leave max_device_batch out"
        if self.task.adapts:
            return "batches that adapt", "leave autoscale_batch_size out"
        return f"accumulation_steps {self.cut.num_micro_batches}", "set accumulation_steps=1"

    def split_into(self, num_micro_batches: int) -> None:
        """Set the number of micro-batches of a step, with which differs what units take."""
        self.cut = replace(self.cut, num_micro_batches=num_micro_batches)
        self.measured.known.forget_units()

    def unit_bytes(self, kind: str, shard: Shard, signature: Signature) -> UnitBytes | None:
        """Bytes that a unit takes at most beside its slab in a step of this signature; None: it has to be metered."""
        if not self._is_sized_by_batch(shard):
            return None
        return self.measured.known.get(kind, shard, signature)

    def learn_unit_bytes(self, kind: str, shard: Shard, signature: Signature, measured: UnitBytes) -> None:
        if self._is_sized_by_batch(shard):
            self.measured.known.learn(kind, shard, signature, measured)

    def shard_bytes(self, shard: Shard) -> int:
        """Device bytes a shard needs to run: its slab, and the largest unit seen so far."""
        return shard.slab_bytes + self.work_bytes(shard)

    def work_bytes(self, shard: Shard) -> int:
        """Bytes that the largest unit of a shard seen so far takes beside the slab."""
        known, number = self.measured.known.items(), self.cut.num_micro_batches
        units = [unit.total(number) for (_, j, _), unit in known if j == shard.index]
        return self.buffer_bytes(shard) + max(units, default=0)

    def end_of_forward(self) -> RandomState:
        """Random state that the last layer has left in the step in progress."""
        return self.staging.random[len(self.cut.shards), self.staging.num_micro_batches - 1]

    def check_buffers(self) -> None:
        """Refuse a buffer that layers of two shards change, where micro-batches would reach it in another order."""
        if self.is_split and self.shares_changed_buffer():
            option, remedy = self.split_by
            raise ValueError(
                f"{self.name}: layers of several shards share a buffer that their forward changes, and with {option} "
                f"they would change it in another order than the plain loop; {remedy}, give each layer its own module, "
                f"or put them into one shard"
            )

    def check_backward_buffers(self, written: Collection[int]) -> None:
        """Refuse buffers that a backward writes to, where the plain loop's forwards would find them in between."""
        for index in written:
            holders = [shard for shard in self.cut.shards if index in shard.buffers]
            if not self.is_split and len(holders) == 1:
                continue
            name = self.layout.registered[len(self.layout.slots) + index].name
            raise LayerFault(
                f"{name} is changed in a backward (by a hook, or a checkpoint that runs a forward "
                f"again), limit: steps of one micro-batch, and a buffer of one shard, since all forwards of a step run "
                f"before its backwards; {self.split_by[1]}, or change it in the forward"
            )

    def shares_changed_buffer(self) -> bool:
        """Return True if layers of several shards hold one buffer that their forward changes."""
        changed = self.observed.changed_buffers
        holders = Counter(index for shard in self.cut.shards for index in shard.buffers if index in changed)
        return max(holders.values(), default=0) > 1

    def check_gradients(self, shard: Shard | None = None) -> None:
        """Refuse a step, or unit, whose backward has reached the user's own parameters, past the replicas' attributes.

        With early_release updates give them gradients while the step runs.
        """
        layers = [] if shard is None else [*map(self.layout.shown, self.layout.names[shard.first : shard.last])]
        slots = [] if self.pool.early_release else self.layout.slots
        name = next((slot.name for slot in slots if slot.trainable and slot.parameter.grad is not None), None)
        if name is not None:
            raise LayerFault(
                f"{self.name}: parameter {name} of the model itself received a gradient in "
                f"{', '.join(layers) or 'a step'}, expected none: "
                f"layers compute with replicas, so a global, an object that copies itself, or the loss leads there; "
                f"let layers use their attributes, hooks the module that they get, and the loss what forward returns"
            )


def share_out(wanted: Sequence[Wanted], memory: Mapping[int, int]) -> dict[str, dict[int, int]]:
    """Return, by task, which shards have a home on which device.

    Tasks take turns, the lowest shard of each first. A task's homes are on one device, where they are or that with most
    room, and on another where that is full. Every device keeps room for the largest unit of all, and for two slabs of
    what has no home.

    memory: bytes of each device, by its number.
    """
    all_shards: dict[str, dict[int, int]] = {each.task: {} for each in wanted}
    if not wanted:
        return all_shards
    work = max(each.work_bytes for each in wanted)
    largest = {
        True: max(max(each.frozen_bytes) for each in wanted),
        False: max(max(each.slab_bytes) for each in wanted),
    }
    for is_all, slab in largest.items():  # where all have homes, no slab of a trained shard is loaded
        found = _shared_out(wanted, {device: num_bytes - work - 2 * slab for device, num_bytes in memory.items()})
        others = ((each, j) for each in wanted for j in range(len(each.slab_bytes)) if j not in found[each.task])
        if not is_all or all(each.slab_bytes[j] == each.frozen_bytes[j] for each, j in others):
            return found
    raise AssertionError


def _shared_out(wanted: Sequence[Wanted], room: dict[int, int]) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {each.task: {} for each in wanted}
    left, device_of = dict(room), {}
    for each in sorted(wanted, key=lambda each: -sum(each.home_bytes)):  # the largest first; of equals in their order
        most = max(left, key=lambda device: left[device], default=-1)
        device_of[each.task] = each.device if each.device is not None and each.device in left else most
        if left:
            left[device_of[each.task]] -= sum(each.home_bytes)
    turns = [(k, each) for k in range(max(len(each.shards) for each in wanted)) for each in wanted]
    full: set[str] = set()
    for k, each in turns:
        if k >= len(each.shards) or each.task in full:
            continue
        own, num_bytes = device_of[each.task], each.home_bytes[k]
        if room.get(own, -1) < num_bytes:
            own = device_of[each.task] = max(room, key=lambda device: room[device], default=-1)
        if room.get(own, -1) < num_bytes:
            full.add(each.task)
            continue
        room[own] -= num_bytes
        found[each.task][each.shards[k]] = own
    return found
