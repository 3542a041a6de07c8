"""DRAM: the pool that owns a task's weights and gradients, and the one that an evaluation borrows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import TypeAlias

import torch
from torch import Tensor

from hydra_engine.data import NO_BATCH, Boundary, RandomState, Signature, copy_of, place_in_dram, residue, same_bits
from hydra_engine.host.frozen import FrozenBlocks
from hydra_engine.host.layout import ModelLayout, Shard, SlabPiece, Slot
from hydra_engine.host.staging import StepParts
from hydra_engine.system import Freed, HostMemory, is_alone, return_free_memory

# Shards whose gradients are in DRAM with early release: one is updated while the next one's arrive.
NUM_LOANS = 2
# What enters a shard: its boundary, by the shard's index, or a skip by its name as well.
Enters: TypeAlias = "int | tuple[str, int]"
# DRAM for a copy of a device's tensor.
Place: TypeAlias = "Callable[[Tensor], Tensor]"


class HostPool:
    """Owns the weights, gradients and buffers of one task while it trains.

    One byte buffer holds the trainable parameters in layer order, so that any shard is one range of it, another one the
    gradients of one step; frozen parameters lie in blocks that other tasks may share. In a narrow precision devices are
    sent more buffers, of casts of the parameters, which every update renews. With early release there is room for the
    gradients of two shards only, lent from when they arrive until the update is through. `open` moves the user's
    parameters in, `close` gives them ordinary storage again. The user's Parameter objects stay the same throughout:
    optimizers and closures keep theirs.
    """

    def __init__(self, layout: ModelLayout, *, early_release: bool = False, frozen: FrozenBlocks | None = None) -> None:
        self.layout = layout
        self._frozen = FrozenBlocks() if frozen is None else frozen
        self.early_release = early_release
        self.keeps_gradients = True  # unless devices step the optimizer
        self.is_open = False
        self.buffers: list[Tensor] = []  # committed values; replaced, never written to

    def gradient_bytes(self, shards: Sequence[Shard]) -> int:
        """DRAM for gradients, under a partition."""
        if not self.keeps_gradients:
            return 0
        if not self.early_release:
            return self.layout.link_bytes[True]
        sizes = [self._loan_bytes(shard) for shard in shards]
        return max(sizes, default=0) * min(NUM_LOANS, len(sizes))

    def _loan_bytes(self, shard: Shard) -> int:
        return sum(self.layout.aligned(self.layout.slots[index].link_bytes) for index in shard.owned)

    @property
    def num_bytes(self) -> int:
        """DRAM it holds: weights, casts, gradients; of frozen ones those that it brought."""
        storages = {id(each): each for each in (self._weights, self._link, self._gradients, *self._brought)}
        return sum(each.nbytes() for each in [*storages.values(), *self._loans])

    def open(self, shards: Sequence[Shard] = (), host: HostMemory | None = None) -> None:
        """Take the parameters over, one at a time: extra DRAM is that of one parameter. `host`: where they then lie."""
        assert not self.is_open
        self._host = host = HostMemory() if host is None else host
        num_loans = min(NUM_LOANS, len(shards)) if self.early_release and self.keeps_gradients else 0
        loan_bytes = self.gradient_bytes(shards) // max(num_loans, 1)
        self._loans = [host.new(loan_bytes) for _ in range(num_loans)]
        self._free_loans: SimpleQueue[torch.UntypedStorage] = SimpleQueue()
        for loan in self._loans:
            self._free_loans.put(loan)
        self._lent: dict[int, torch.UntypedStorage] = {}  # by shard
        # Beside casts, masters cross no link unless a device steps the optimizer.
        crosses = self.layout.narrow is None or not self.keeps_gradients
        self._masters_host = host if crosses else HostMemory()
        self._weights = self._masters_host.new(self.layout.num_bytes[True])
        self._gradients = host.new(0 if self.early_release else self.layout.link_bytes[True])
        self._link = self._weights if self.layout.narrow is None else host.new(self.layout.link_bytes[True])
        # After all that may find no room: from here on others may use what this task brought.
        self._blocks, self._brought = self._frozen.acquire(self.layout, host)  # by slot
        freed = Freed()
        for slot in self.layout.trainable_slots():
            view = slot.view(self._weights, slot.offset)
            view.copy_(slot.parameter.data)
            slot.parameter.data = view
            freed.add(slot.num_bytes)
        return_free_memory()
        self.renew(self.layout.trainable_slots())
        self.gradients: list[Tensor | None] = [None] * len(self.layout.slots)
        if not self.early_release:
            for slot in self.layout.trainable_slots():
                self.gradients[slot.index] = self._gradient_place(slot)
        self.buffers = [copy_of(buffer) for buffer in self.layout.buffers]
        self.is_open = True

    def close(self) -> None:
        """Give every parameter and buffer back to the user's model, at its last committed value."""
        if not self.is_open:
            return
        self.is_open = False
        self._masters_host.let_go(self._weights)
        for storage in (self._link, self._gradients, *self._loans):
            self._host.let_go(storage)
        slots = self.layout.trainable_slots()
        alone = is_alone(self._weights, [slot.parameter for slot in slots])
        for slot in slots:
            slot.parameter.grad = None
            slot.parameter.data = copy_of(slot.parameter.data)
            if alone:  # or all weights would be there twice
                self._masters_host.discard(self._weights, slot.offset, slot.num_bytes)
        self._frozen.release(self._blocks.values())
        self.layout.put_buffers(self.buffers)
        del self._weights, self._link, self._gradients, self.gradients, self._loans, self._free_loans, self._lent
        del self._blocks, self._brought

    def lend_gradients(self, shard: Shard) -> None:
        """Make room for a shard's gradients: with early release, once an update before has given its own back."""
        if not self.early_release or not shard.owned or shard.index in self._lent:
            return
        loan = self._lent[shard.index] = self._free_loans.get()
        offset = 0
        for slot in self.owned(shard):
            self.gradients[slot.index] = slot.gradient_view(loan, offset)
            offset += self.layout.aligned(slot.link_bytes)

    def take_gradients_back(self, shard: Shard) -> None:
        """A shard's update is through."""
        if shard.index not in self._lent:
            return
        for slot in self.owned(shard):
            self.gradients[slot.index] = None
        self._free_loans.put(self._lent.pop(shard.index))

    def _gradient_place(self, slot: Slot) -> Tensor:
        """Place of a gradient for good, unless it is lent one. It begins where autograd's own would."""
        return slot.gradient_view(self._gradients, slot.link_offset - slot.link_residue)

    def gradient(self, slot: Slot) -> Tensor:
        """Where a trainable parameter's gradient lies."""
        gradient = self.gradients[slot.index]
        assert gradient is not None
        return gradient

    def place_gradient(self, slot: Slot, gradient: Tensor) -> Tensor:
        """Place for a gradient that arrives. Of one that autograd left as a view it keeps the address modulo 64."""
        place = self.gradient(slot)
        if gradient.device.type == "cpu" and residue(place) != residue(gradient):
            is_lent = self.early_release  # its place is made anew for each step
            place = place_in_dram(gradient) if residue(gradient) or is_lent else self._gradient_place(slot)
            self.gradients[slot.index] = place
        return place

    def bring_back(self, slots: Iterable[Slot]) -> None:
        """Take over weights that user code has put elsewhere, as `p.data = p.data - step` does."""
        for slot in slots:
            data = slot.parameter.data
            place = slot.view(self._weights, slot.offset)
            if data.data_ptr() != place.data_ptr() or data.stride() != place.stride():
                place.copy_(data)
                slot.parameter.data = place
                if self.layout.keeps_residues and slot.link_dtype == slot.dtype and residue(data) != slot.residue:
                    raise ValueError(
                        f"parameter {slot.name} was given other memory in a step, at an address of {residue(data)} "
                        f"modulo 64, limit: {slot.residue}, where it was; write into it (parameter.data.copy_(...))"
                    )

    def renew(self, slots: Iterable[Slot]) -> None:
        """Cast parameters anew for the devices, after an update."""
        if self.layout.narrow is not None:
            for slot in slots:
                self.narrow(slot).copy_(slot.parameter.data)

    def narrow(self, slot: Slot) -> Tensor:
        """What devices are sent of a parameter."""
        if slot.trainable:
            return slot.link_view(self._link, slot.link_offset)
        return self._blocks[slot.index].cast(slot)

    def sources(self, piece: SlabPiece) -> list[tuple[int, Tensor]]:
        """Where the bytes of a shard's piece are: (start within it, bytes), in as few as there are."""
        if piece.trainable:
            return [(0, _bytes(self._link, piece.source, piece.num_bytes))]
        found: list[tuple[int, torch.UntypedStorage, int, int]] = []  # (start, storage, first, end)
        for slot in self.layout.slots:
            start = slot.link_offset - piece.source
            if slot.trainable or not 0 <= start < piece.num_bytes:
                continue
            link, begin = self._blocks[slot.index].links[slot.link_dtype]
            end = begin + slot.link_bytes
            if found:
                before, storage, first, _ = found[-1]
                if storage is link and begin - first == start - before:
                    found[-1] = (before, storage, first, end)
                    continue
            found.append((start, link, begin, end))
        return [(start, _bytes(storage, first, end - first)) for start, storage, first, end in found]

    def frozen_key(self, shard: Shard) -> Hashable:
        """The same for shards whose slabs have the same frozen parameters at the same places, in any task."""
        found: list[tuple[int, ...]] = []
        for index, offset in zip(shard.slots, shard.offsets, strict=True):
            if not self.layout.slots[index].trainable:
                block = self._blocks[index]
                found.append((block.serial, block.version, offset - shard.own_bytes))
        return (self.layout.narrow, *found)

    def owned(self, shard: Shard) -> list[Slot]:
        """The trainable parameters that a shard's update steps."""
        return [self.layout.slots[index] for index in shard.owned]


class StepStaging:
    """Everything a step has produced and not yet committed. Written by store lanes, thrown away or committed whole.

    Keys carry the shard and the micro-batch, and a unit's output overwrites: a unit can be run again at any time
    before the commit, and finds the inputs it had. Boundaries are kept as places, so that the next step's are written
    into the same memory.
    """

    def __init__(self) -> None:
        self.weights: list[float] = []
        self.signature = NO_BATCH  # what decides the memory of every unit of the step
        self.inputs: list[Boundary] = []
        self.targets: list[Boundary] = []
        self._boundaries: dict[tuple[int | str, int], Boundary] = {}  # (shard or skip, m): what enters the shard
        self._gradients: dict[tuple[Enters, int], Sequence[Tensor | None]] = {}  # (what, m): of what enters a shard
        self.start: list[RandomState] = []
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

    @property
    def num_bytes(self) -> int:
        """DRAM that a step in progress takes: the batch, boundaries and their gradients, buffers."""
        values = [*self.inputs, *self.targets, *self._boundaries.values()]
        tensors = [tensor for value in values for tensor in value.tensors]
        tensors += [t for gradients in self._gradients.values() for t in gradients if t is not None]
        tensors += [t for t in (*self.tied.values(), *self.buffers.values()) if t is not None]
        return sum({id(t): t.untyped_storage().nbytes() for t in tensors}.values())

    def begin(
        self,
        boundaries: Sequence[tuple[Boundary, Boundary]],
        weights: Sequence[float],
        start: list[RandomState],
        signature: Signature,
    ) -> None:
        """Start a step on micro-batches (inputs, target), of this signature.

        `start` is the random state each forward begins with.
        """
        self.clear()
        self.serial += 1
        self.inputs = [inputs for inputs, _ in boundaries]
        self.targets = [target for _, target in boundaries]
        self.weights = list(weights)
        self.start = start
        self.signature = signature
        for m, state in enumerate(start):
            self.random[0, m] = state

    @property
    def num_micro_batches(self) -> int:
        return len(self.inputs)

    def entering(self, shard: int | str, m: int) -> Boundary:
        """The boundary that enters a shard, or the value of a skip."""
        return self.inputs[m] if shard == 0 else self._boundaries[shard, m]

    def take(self, shard: int, m: int) -> Boundary:
        """The boundary that enters a shard, or leaves the last; it is the caller's, and no longer kept here."""
        return self._boundaries.pop((shard, m))

    def gradients_of(self, shard: Enters, m: int) -> Sequence[Tensor | None]:
        """The gradients of the tensors that enter a shard."""
        return self._gradients[shard, m]

    def put_boundary(
        self,
        shard: int | str,
        m: int,
        value: Boundary,
        copy: Callable[[Tensor, Tensor], None],
        place_for: Place = place_in_dram,
    ) -> None:
        """Store what enters a shard."""
        old = self._boundaries.get((shard, m))
        places = [
            _place(place, t, place_for)
            for place, t in zip(_or_none(old.tensors if old is not None else None), value.tensors, strict=False)
        ]
        for place, tensor in zip(places, value.tensors, strict=True):
            copy(place, tensor)
        self._boundaries[shard, m] = value.around(places)

    def put_gradients(
        self,
        shard: Enters,
        m: int,
        values: Sequence[Tensor | None],
        copy: Callable[[Tensor, Tensor], None],
        place_for: Place = place_in_dram,
    ) -> None:
        """Store the gradients of what enters a shard; None stays None."""
        stored: list[Tensor | None] = []
        for old, value in zip(_or_none(self._gradients.get((shard, m))), values, strict=False):
            place = None if value is None else _place(old, value, place_for)
            if place is not None and value is not None:
                copy(place, value)
            stored.append(place)
        self._gradients[shard, m] = stored

    def signature_of(self, part: int) -> Signature:
        """What decides the memory of the units of a part of the step."""
        if self.parts is None:
            return self.signature
        first, end = self.parts.ranges[part]
        return self.signature.part(first, end, ("part", part > 0, self.parts.in_sums, end == self.num_micro_batches))

    def range_of(self, part: int) -> tuple[int, int]:
        """The micro-batches [first, end) of a part of the step."""
        return (0, self.num_micro_batches) if self.parts is None else self.parts.ranges[part]

    def buffers_for(self, shard: Shard, part: int, committed: list[Tensor]) -> dict[int, Tensor]:
        """What a shard's forward begins with; the same again in its backward, and when it is run again."""
        key = (shard.index, part)
        if key not in self.buffers_before:
            self.buffers_before[key] = {index: self.buffers.get(index, committed[index]) for index in shard.buffers}
        return self.buffers_before[key]


def _bytes(storage: torch.UntypedStorage, start: int, num_bytes: int) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, start, (num_bytes,), (1,))


def _or_none(places: Sequence[Tensor | None] | None) -> Iterator[Tensor | None]:
    """The old places, then None for ever."""
    return itertools.chain(places or (), itertools.repeat(None))


def _place(old: Tensor | None, new: Tensor, place_for: Place) -> Tensor:
    """Host memory for a copy of `new` with the very same strides and residue: the old place where it fits."""
    if old is None or old.shape != new.shape or old.stride() != new.stride() or old.dtype != new.dtype:
        return place_for(new)
    is_there = new.device.type != "cpu" or residue(old) == residue(new)
    return old if is_there and same_bits(old, new) else place_for(new)


class BorrowedPool(HostPool):
    """Weights are never written to; what layers write to their buffers is seen by later batches, and dropped."""

    def open(self, shards: Sequence[Shard] = (), host: HostMemory | None = None) -> None:
        self._gradients_of_user = [slot.parameter.grad for slot in self.layout.slots]
        super().open(shards, host)

    def close(self) -> None:
        if not self.is_open:
            return
        self.buffers = list(self.layout.buffers)
        super().close()
        for slot, gradient in zip(self.layout.slots, self._gradients_of_user, strict=True):
            slot.parameter.grad = gradient
        del self._gradients_of_user
