"""A step in progress: what its units have left in DRAM, who has which part of it, and the norms of its gradients."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hydra_engine.data import NO_BATCH, RandomState, Signature, place_in_dram, residue, same_bits
from hydra_engine.host.layout import Shard, Slot
from hydra_engine.schedule import part_ranges
from hydra_engine.tasks import StepMeasures
from partitioners.boundary import Boundary

Gradients: TypeAlias = "Mapping[int, Tensor | None]"  # by slot; None: it received none
Values: TypeAlias = "Sequence[Tensor | None]"  # tensors that enter a shard, or their gradients; None: it received none
# What enters a shard: its boundary, by the shard's index, or a skip by its name as well.
Enters: TypeAlias = "int | tuple[str, int]"
Place: TypeAlias = "Callable[[Tensor], Tensor]"  # gives DRAM for a copy of a device's tensor
Copy: TypeAlias = "Callable[[Tensor, Tensor], None]"  # target and source

# In the place of a micro-batch: of the whole step.
WHOLE = -1
# On a CPU, torch adds up a tensor's squares in few float32 numbers: for 20 million elements the sum is 0.2 % too small.
# Norms of blocks of this many elements keep four to six digits, and take 1.5 times as long. Other devices use blocks by
# themselves.
CPU_BLOCK = 65_536
COMPUTE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
NONE: Mapping[int, Any] = MappingProxyType({})


class BuffersChanged(RuntimeError):
    """A forward changed buffers that it left alone before: its micro-batches have to go one after the other."""


@dataclass(eq=False, repr=False)
class StepParts:
    """Sums of the gradients of one step's parts: ((g0 + g1) + g2) + ..., as one device would have added.

    Either a part goes on from the sum of those before it, which is sent up to its device, and `put`s another. Or it
    sends down the gradients of each micro-batch, to be `add`ed: those that come before their turn wait in DRAM. Both
    are called by the store lanes of several devices.
    """

    num_micro_batches: int  # of the step
    num_parts: int  # that they are cut into
    _: KW_ONLY
    in_sums: bool  # the first of the two ways
    is_narrow: bool  # gradients in less than float32 are added in it, and rounded once all are there
    place: Callable[[int], Tensor]  # where a slot's gradient belongs in the end
    has_gradient: dict[int, bool]  # by slot, set here

    def __post_init__(self) -> None:
        self.ranges = part_ranges(self.num_micro_batches, self.num_parts)
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._slots: dict[int, tuple[int, ...]] = {}  # by shard
        self._num_added: dict[int, int] = {}  # by shard
        self._waiting: dict[int, dict[int, Gradients]] = defaultdict(dict)  # by shard and micro-batch
        self._wide: dict[int, Tensor] = {}  # by slot: narrow gradients so far

    def so_far(self, slots: Iterable[int]) -> dict[int, Tensor]:
        """The sums of the parts before, of those that received a gradient."""
        return {slot: self._sum(slot) for slot in slots if self.has_gradient.get(slot)}

    def put(
        self, shard: int, end: int, gradients: Gradients, copy: Copy, finish: Callable[[], None] = lambda: None
    ) -> bool:
        """Keep the sums of all micro-batches up to `end`, brought by `copy(target, source)`, there after `finish()`.

        Return False where they are there already: the unit was computed again for what came before it. They stay, since
        gradients of later parts may have been added to them.
        """
        with self._lock:
            if self._num_added.get(shard, -1) >= end:
                return False
        for slot, gradient in gradients.items():
            self.has_gradient[slot] = gradient is not None
            if gradient is not None:
                # The last ones were rounded on the device.
                copy(self.place(slot) if end == self.num_micro_batches else self._sum(slot), gradient)
        finish()
        with self._lock:
            self._slots[shard] = tuple(gradients)
            self._add_waiting(shard, end)
        return True

    def add(self, shard: int, m: int, gradients: Gradients) -> None:
        """Add those of micro-batch `m`, which are in DRAM and nobody else's, when it is their turn."""
        with self._lock:
            self._waiting[shard][m] = gradients
            if shard in self._num_added:
                self._add_waiting(shard, self._num_added[shard])

    def _add_waiting(self, shard: int, end: int) -> None:
        waiting, first = self._waiting[shard], end
        while end in waiting:
            for slot, gradient in waiting.pop(end).items():
                if gradient is None:
                    continue
                if self.has_gradient.get(slot):
                    self._sum(slot).add_(gradient)
                else:
                    self._sum(slot).copy_(gradient)
                    self.has_gradient[slot] = True
            end += 1
        if end == self.num_micro_batches:
            for slot in self._slots[shard]:
                wide = self._wide.pop(slot, None)
                if wide is not None and end > first:  # the last was added here
                    self.place(slot).copy_(wide)
        self._num_added[shard] = end

    def _sum(self, slot: int) -> Tensor:
        place = self.place(slot)
        if not self.is_narrow or place.dtype == torch.float32:
            return place
        with self._making:
            if slot not in self._wide:
                self._wide[slot] = torch.empty_like(place, dtype=torch.float32)
            return self._wide[slot]


class Given(NamedTuple):
    """Micro-batches that a step begins with."""

    inputs: tuple[Boundary, ...] = ()
    targets: tuple[Boundary, ...] = ()
    weights: tuple[float, ...] = ()  # of their losses
    start: tuple[RandomState, ...] = ()  # before each forward
    signature: Signature = NO_BATCH  # which decides the memory of every unit of the step


class StepStaging:
    """Everything a step has produced and not yet committed. Written by store lanes, thrown away or committed whole.

    Keys carry the shard and the micro-batch, and a unit's output overwrites: a unit can be run again at any time
    before the commit, and finds the inputs it had. Boundaries are kept as places, so that the next step's are written
    into the same memory.
    """

    def __init__(self) -> None:
        self.given = Given()
        self._boundaries: dict[tuple[int | str, int], Boundary] = {}  # (shard or skip, m): what enters the shard
        # By the same: which of its tensors lie where they entered a shard further down.
        self._passed: dict[tuple[int | str, int], Collection[int]] = {}
        self._gradients: dict[tuple[Enters, int], Values] = {}  # (what, m): of what enters a shard
        self.serial = 0  # of the step; what is on a device of another one's is of no use
        self.clear()

    def clear(self) -> None:
        """Forget a step, keeping the memory of its boundaries."""
        self.random: dict[tuple[int, int], RandomState] = {}  # (shard, m): before the shard's forward
        self.tied: dict[tuple[int, int, int], Tensor | None] = {}  # (slot, shard that made it, m)
        self.buffers: dict[int, Tensor] = {}  # latest value by buffer
        self.buffers_before: dict[tuple[int, int], dict[int, Tensor]] = {}  # (shard, part): where its forward began
        self.parts: StepParts | None = None  # where the step is spread over several devices
        self.has_gradient: dict[int, bool] = {}  # by slot
        self.losses: dict[int, float] = {}  # by micro-batch
        self.metrics: dict[int, dict[str, float]] = {}  # by micro-batch of an evaluation
        # By slot, of the step's gradients where devices have added these up: the norm as the optimizer takes it, and
        # whether all numbers are finite.
        self.norms: dict[int, tuple[float, bool]] = {}
        # (shard, m, or WHOLE): squared norms of its gradients as they are, by parameter group; of adaptive tasks.
        self.squares: dict[tuple[int, int], list[float]] = {}

    @property
    def num_bytes(self) -> int:
        """DRAM that a step in progress takes: the batch, boundaries and their gradients, buffers."""
        values = [*self.given.inputs, *self.given.targets, *self._boundaries.values()]
        tensors = [tensor for value in values for tensor in value.tensors]
        tensors += [t for gradients in self._gradients.values() for t in gradients if t is not None]
        tensors += [t for t in (*self.tied.values(), *self.buffers.values()) if t is not None]
        return sum({id(t): t.untyped_storage().nbytes() for t in tensors}.values())

    def begin(
        self,
        boundaries: Sequence[tuple[Boundary, Boundary]],
        weights: Sequence[float],
        start: Sequence[RandomState],
        signature: Signature,
    ) -> None:
        """Start a step on micro-batches (inputs, target); the others as in `Given`."""
        self.clear()
        self.serial += 1
        inputs, targets = tuple(inputs for inputs, _ in boundaries), tuple(target for _, target in boundaries)
        self.given = Given(inputs, targets, tuple(weights), tuple(start), signature)
        self.random = {(0, m): state for m, state in enumerate(start)}

    @property
    def num_micro_batches(self) -> int:
        return len(self.given.inputs)

    def entering(self, shard: int | str, m: int) -> Boundary:
        """The boundary that enters a shard, or the value of a skip."""
        return self.given.inputs[m] if shard == 0 else self._boundaries[shard, m]

    def take(self, shard: int, m: int) -> Boundary:
        """The boundary that enters a shard, or leaves the last; it is the caller's, and no longer kept here."""
        self._passed.pop((shard, m), None)
        return self._boundaries.pop((shard, m))

    def gradients_of(self, shard: Enters, m: int) -> Values:
        """The gradients of the tensors that enter a shard."""
        return self._gradients[shard, m]

    def put_boundary(
        self,
        shard: int | str,
        m: int,
        value: Boundary,
        copy: Copy,
        place_for: Place = place_in_dram,
        passed: Mapping[int, int] = NONE,
    ) -> None:
        """Store what enters a shard, or a skip.

        passed: tensors of it that are, bit for bit, those which entered the shard below, by their number there: they
        lie in DRAM already, and are not copied again. Nobody may write to these until the step is over.
        """
        old, before = self._boundaries.get((shard, m)), self._passed.pop((shard, m), ())
        places = [None if k in before else place for k, place in enumerate(old.tensors)] if old else []
        there: dict[int, Tensor] = {}
        if passed and isinstance(shard, int):
            below = self.entering(shard - 1, m).tensors
            there = {k: below[number] for k, number in passed.items()}
            self._passed[shard, m] = there
        stored = _stored(places, value.tensors, copy, place_for, there)
        self._boundaries[shard, m] = value.around([place for place in stored if place is not None])

    def put_gradients(
        self, shard: Enters, m: int, values: Values, copy: Copy, place_for: Place = place_in_dram
    ) -> None:
        """Store the gradients of what enters a shard; None stays None."""
        self._gradients[shard, m] = _stored(self._gradients.get((shard, m), ()), values, copy, place_for)

    def signature_of(self, part: int) -> Signature:
        """Signature that decides the memory of the units of a part of the step."""
        if self.parts is None:
            return self.given.signature
        first, end = self.parts.ranges[part]
        role = "part", part > 0, self.parts.in_sums, end == self.num_micro_batches
        return self.given.signature.part(first, end, role)

    def range_of(self, part: int) -> tuple[int, int]:
        """The micro-batches [first, end) of a part of the step."""
        return (0, self.num_micro_batches) if self.parts is None else self.parts.ranges[part]

    def buffers_for(self, shard: Shard, part: int, committed: list[Tensor]) -> dict[int, Tensor]:
        """Buffers that a shard's forward begins with: the same in its backward, and when it is run again."""
        key = (shard.index, part)
        if key not in self.buffers_before:
            self.buffers_before[key] = {index: self.buffers.get(index, committed[index]) for index in shard.buffers}
        return self.buffers_before[key]


def _stored(
    places: Values, values: Values, copy: Copy, place_for: Place, there: Mapping[int, Tensor] = NONE
) -> list[Tensor | None]:
    """Copy values to DRAM, each to its old place if it fits there; None stays None, and so does what is `there`."""
    stored: list[Tensor | None] = []
    for k, value in enumerate(values):
        place = there.get(k)
        if place is None and value is not None:
            place = _place(places[k] if k < len(places) else None, value, place_for)
            copy(place, value)
        stored.append(place)
    return stored


def _place(old: Tensor | None, new: Tensor, place_for: Place) -> Tensor:
    """Host memory for a copy of `new` with the very same strides and residue: the old place where it fits."""
    if old is None or old.shape != new.shape or old.stride() != new.stride() or old.dtype != new.dtype:
        return place_for(new)
    is_there = new.device.type != "cpu" or residue(old) == residue(new)
    return old if is_there and same_bits(old, new) else place_for(new)


# -- norms of gradients, of tasks whose batches are chosen


@torch.no_grad()
def square_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the tensors' squared norms, as a float64 tensor without dimensions. It is 0 for no tensors.

    There is one call per device and dtype, and nothing waits for a device. (Only a sparse tensor whose indices repeat
    waits: its duplicates are added first.) Tensors of 16 bits are squared in float32. With tensors on several devices,
    the sum is on that of the first.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        values = _values(tensor)
        of_group = groups.setdefault((values.device, values.dtype), [])
        if values.device.type == "cpu" and values.numel() > CPU_BLOCK and values.is_contiguous():
            of_group.extend(torch.split(values.view(-1), CPU_BLOCK))
        else:
            of_group.append(values)
    if not groups:
        return torch.zeros((), dtype=torch.float64)
    device = next(iter(groups))[0]
    sums = [_sum_of_squares(each, COMPUTE.get(dtype, dtype)).to(device) for (_, dtype), each in groups.items()]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _values(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor that may differ from 0, each once."""
    if tensor.layout == torch.strided:
        return tensor
    if tensor.layout == torch.sparse_coo:
        return tensor.coalesce().values()
    return tensor.values()


def _sum_of_squares(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    norms = torch._foreach_norm(tensors, 2, dtype=dtype)
    return torch.stack(list(norms)).double().square().sum()


class NormGroups(NamedTuple):
    """Groups of parameters whose gradients are measured together: the optimizer's."""

    of: Mapping[int, int]  # by slot
    number: int

    @classmethod
    def of_optimizer(cls, optimizer: torch.optim.Optimizer, slots: Sequence[Slot]) -> NormGroups:
        group_of = {id(p): k for k, group in enumerate(optimizer.param_groups) for p in group["params"]}
        stepped = [slot for slot in slots if id(slot.parameter) in group_of]
        return cls({slot.index: group_of[id(slot.parameter)] for slot in stepped}, len(optimizer.param_groups))


def step_measures(
    staging: StepStaging,
    groups: NormGroups,
    owned: Mapping[int, Sequence[Slot]],
    gradient: Callable[[Slot], Tensor],
    size: int,
    *,
    sums_losses: bool,
    loss_scale: float | None,
) -> StepMeasures:
    """Return the norms of mean gradients, from those of gradients as they add up to the step's.

    owned: slots by shard. gradient: of a slot, once all are in DRAM; asked for where no device had the whole sum.
    size: samples of the step. sums_losses: the loss is a sum over samples, of which micro-batches have as many as
    others, or one less; else they weigh as they say.
    """
    scale = 1.0 if loss_scale is None else loss_scale
    weights, number = staging.given.weights, staging.num_micro_batches
    total_size, (even, num_larger) = float(size), divmod(size, staging.num_micro_batches)
    # A micro-batch without weight, all of it padding, has no gradient to measure.
    present = [m for m in range(number) if weights[m] > 0]
    counts = [float(even + (m < num_larger)) if sums_losses else weights[m] * total_size for m in present]
    divisors = [scale * (count if sums_losses else weights[m]) for m, count in zip(present, counts, strict=True)]
    whole = [0.0] * groups.number
    micro = [[0.0] * groups.number for _ in present]
    for shard, slots in owned.items():
        for k, each in enumerate(staging.squares.get((shard, WHOLE)) or _on_host(staging, groups, slots, gradient)):
            whole[k] += each
        for row, m in zip(micro, present, strict=True):
            for k, each in enumerate(staging.squares.get((shard, m), ())):
                row[k] += each
    whole_divisor = scale * (total_size if sums_losses else 1.0)
    return StepMeasures(
        tuple(counts),
        tuple(tuple(each / d**2 for each in row) for row, d in zip(micro, divisors, strict=True)),
        tuple(each / whole_divisor**2 for each in whole),
    )


def _on_host(
    staging: StepStaging, groups: NormGroups, slots: Sequence[Slot], gradient: Callable[[Slot], Tensor]
) -> list[float]:
    """Squared norms of one shard's gradients, which the host has added up from several devices."""
    received: list[list[Tensor]] = [[] for _ in range(groups.number)]
    for slot in slots:
        if staging.has_gradient.get(slot.index) and slot.index in groups.of:
            received[groups.of[slot.index]].append(gradient(slot))
    return [float(square_norms(each)) for each in received]
