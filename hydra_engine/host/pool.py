"""DRAM: the pool that owns a task's weights and gradients, and the one that an evaluation borrows."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from hydra_engine.data import copy_of, flat, place_in_dram
from hydra_engine.host.blocked import new_private
from hydra_engine.host.frozen import FrozenBlocks
from hydra_engine.host.layout import ModelLayout, Shard, SlabPiece, Slot
from hydra_engine.host.split import SplitMaster, SplitWeight, discard_values, row_of
from hydra_engine.system import Freed, HostMemory, is_alone, keep_small_pages, num_users, return_free_memory
from hydra_engine.tasks import Best

# Shards whose gradients are in DRAM with early release: one is updated while the next one's arrive.
NUM_LOANS = 2


# Pools that are closed and keep their memory, pages and all, until they are opened again.
_KEPT: WeakSet[HostPool] = WeakSet()
_KEEPING = threading.RLock()


class Gradients:
    """Owns the DRAM of one step's gradients.

    Each has its place for the whole step. With `early_release=True` two shards have room at a time, from arrival until
    their update is through.
    """

    def __init__(self, layout: ModelLayout, early_release: bool | str) -> None:
        self.early_release = early_release  # as `ModelTask`'s
        self.places: list[Tensor | None] = []  # by slot
        self._layout = layout
        self.storages: list[torch.UntypedStorage] = []  # the only one, or those that are lent
        self._free: SimpleQueue[torch.UntypedStorage] = SimpleQueue()  # of those
        self._lent: dict[int, torch.UntypedStorage] = {}  # by shard
        self._host = HostMemory()

    @property
    def is_lent(self) -> bool:
        return self.early_release is True

    def num_bytes(self, shards: Sequence[Shard]) -> int:
        """DRAM that they take when a model is cut into these shards."""
        return sum(self._sizes(shards))

    def _sizes(self, shards: Sequence[Shard]) -> list[int]:
        if not self.is_lent:
            return [self._layout.link_bytes[True]]
        slots, aligned = self._layout.slots, self._layout.aligned
        sizes = [sum(aligned(slots[index].link_bytes) for index in shard.owned) for shard in shards]
        return [max(sizes)] * min(NUM_LOANS, len(sizes)) if sizes else []

    def open(self, shards: Sequence[Shard], host: HostMemory) -> None:
        """Make room, in memory of `host`, or in what is kept of the same sizes."""
        self._host, sizes = host, self._sizes(shards)
        if [storage.nbytes() for storage in self.storages] != sizes:
            self.storages = [host.new(num_bytes) for num_bytes in sizes]
        self.places, self._lent, self._free = [None] * len(self._layout.slots), {}, SimpleQueue()
        if not self.is_lent:
            for slot in self._layout.trainable_slots():
                self.places[slot.index] = self.place(slot)
        else:
            for storage in self.storages:
                self._free.put(storage)

    def close(self) -> None:
        for storage in self.storages:
            self._host.let_go(storage)
        self.storages, self.places, self._lent, self._free = [], [], {}, SimpleQueue()

    def place(self, slot: Slot) -> Tensor:
        """Where a gradient belongs in DRAM, if each has its place for the whole step."""
        return slot.gradient_view(self.storages[0], slot.link_offset)

    def lend(self, shard: Shard) -> None:
        """Make room for a shard's gradients: with early release, once an update before has given its own back."""
        if not self.is_lent or not shard.owned or shard.index in self._lent:
            return
        loan = self._lent[shard.index] = self._free.get()
        offset = 0
        for index in shard.owned:
            slot = self._layout.slots[index]
            self.places[index] = slot.gradient_view(loan, offset)
            offset += self._layout.aligned(slot.link_bytes)

    def take_back(self, shard: Shard) -> None:
        """Take back the room of a shard whose update is through."""
        if shard.index in self._lent:
            for index in shard.owned:
                self.places[index] = None
            self._free.put(self._lent.pop(shard.index))

    def of(self, slot: Slot) -> Tensor:
        gradient = self.places[slot.index]
        assert gradient is not None
        return gradient


class AtHome(Protocol):
    """A `Home` of host/home.py, as far as a pool asks it."""

    def read(self, slot: Slot, into: Tensor | None = None) -> Tensor: ...
    def load_weights(self, slots: Iterable[Slot]) -> None: ...


class HostPool:
    """Owns the weights, gradients and buffers of one task while it trains.

    One byte buffer holds the trainable parameters in layer order, so that any shard is one range of it; frozen
    parameters lie in blocks that other tasks may share. In a narrow precision devices are sent another buffer, of casts
    of the parameters, which every update renews. `open` moves the user's parameters in, `close` gives them ordinary
    storage again. The user's Parameter objects stay the same throughout: optimizers and closures keep theirs.

    From planning to training memory is kept, since to write to fresh pages takes longer than a step computes: after
    `close(keeps=True)` trainable parameters stay where they are, for their user to change or replace. The next `open`
    goes on there; `let_go` gives them ordinary storage, as does another pool that takes one of them over.

    splits: trainable float32 parameters that devices get in bfloat16 are not in DRAM beside their casts; a remainder
    is (`host/split.py`). Such a parameter has its values while it is `shown`, and zeros otherwise. Set before `open`.
    """

    _weights: torch.UntypedStorage
    _link: torch.UntypedStorage  # what devices are sent

    def __init__(
        self, layout: ModelLayout, *, early_release: bool | str = False, frozen: FrozenBlocks | None = None
    ) -> None:
        """early_release: as `ModelTask`'s."""
        self.layout = layout
        self._frozen = FrozenBlocks() if frozen is None else frozen
        self.gradients = Gradients(layout, early_release)
        self.is_open = False
        self.splits = False
        self.masters: dict[int, SplitMaster] = {}  # by slot, of those that are split
        self.homes: dict[int, AtHome] = {}  # by slot, of those whose home is a device; DRAM may have old values of them
        self.buffers: list[Tensor] = []  # committed values; replaced, never written to

    @property
    def early_release(self) -> bool | str:
        """Tell whether a shard is updated as soon as its backward is stored, and not after the commit; as the task."""
        return self.gradients.early_release

    @property
    def num_bytes(self) -> int:
        """DRAM it holds: weights, casts, gradients; of frozen ones those that it brought."""
        own = (self._weights, self._rests, self._link, *self.gradients.storages, *self._brought)
        hidden = sum(self.layout.slots[index].num_bytes for index in self.masters)
        return sum(each.nbytes() for each in {id(each): each for each in own}.values()) - hidden

    def is_split(self, slot: Slot) -> bool:
        """Return True for a trainable parameter of which halves are in DRAM, once the pool is open."""
        return self.splits and (slot.dtype, slot.link_dtype) == (torch.float32, torch.bfloat16)

    def _split_slots(self) -> list[Slot]:
        return [slot for slot in self.layout.trainable_slots() if self.is_split(slot)]

    @property
    def split_bytes(self) -> tuple[int, int]:
        """DRAM that masters would take which are split, and that which their remainders take."""
        slots = self._split_slots()
        return sum(slot.num_bytes for slot in slots), sum(self.layout.aligned(slot.link_bytes) for slot in slots)

    def open(self, shards: Sequence[Shard] = (), host: HostMemory | None = None) -> None:
        """Take the parameters over, one at a time: extra DRAM is that of one parameter. `host`: where they then lie."""
        assert not self.is_open
        host = HostMemory() if host is None else host
        with _KEEPING:
            mine = {id(slot.parameter) for slot in self.layout.slots}
            for each in kept_pools():
                is_fit = type(host) is HostMemory and not self._split_slots()
                others = () if each is self and is_fit else (slot.parameter for slot in each.layout.slots)
                if not mine.isdisjoint(map(id, others)):
                    each.let_go()
            is_kept = self in _KEPT
            _KEPT.discard(self)
        self._host = host
        self._masters_host = host if self.layout.narrow is None else HostMemory()  # beside casts, they cross no link
        if is_kept:
            self._masters_host.take_again(self._weights)
        else:
            self._weights = self._masters_host.new(self.layout.num_bytes[True])
            self._link = self._weights if self.layout.narrow is None else host.new(self.layout.link_bytes[True])
        self.gradients.open(shards, host)
        self._rests = HostMemory().new(self.split_bytes[1])
        # After all that may find no room: from here on others may use what this task brought.
        self._blocks, self._brought = self._frozen.acquire(self.layout, host)  # by slot
        freed = Freed()
        self.masters = self._new_masters()
        for slot in self.layout.trainable_slots():
            view = slot.view(self._weights, slot.offset)
            if slot.index in self.masters:
                self.masters[slot.index].split.store(row_of(slot.parameter))
            elif not _is_at(slot.parameter, view):
                view.copy_(slot.parameter.data)
            slot.parameter.data, slot.parameter.grad = view, None
            freed.add(slot.num_bytes)
        return_free_memory()
        self.renew(self.layout.trainable_slots())
        self.buffers = [copy_of(buffer, 0) for buffer in self.layout.buffers]
        self.is_open = True

    def _new_masters(self) -> dict[int, SplitMaster]:
        """Places for the parameters that are split, whose halves have yet to be stored."""
        found: dict[int, SplitMaster] = {}
        start, slots = 0, self._split_slots()
        if slots:
            keep_small_pages(self._weights)  # a large one would stay where a neighbour has values
        for slot in slots:
            narrow = row_of(self.narrow(slot))
            rest = torch.empty(0, dtype=torch.int16).set_(self._rests, start // 2, (len(narrow),), (1,))
            place = slot.view(self._weights, slot.offset)
            found[slot.index] = SplitMaster(slot.parameter, place, SplitWeight(narrow, rest))
            start += self.layout.aligned(slot.link_bytes)
        return found

    @contextmanager
    def shown(self, slots: Iterable[Slot]) -> Iterator[None]:
        """Let parameters have their values in the body, which may write to them."""
        found = [self.masters[slot.index] for slot in slots if slot.index in self.masters]
        for each in found:
            each.show()
        try:
            yield
        finally:
            for each in found:
                each.keep()
                each.hide()

    @staticmethod
    def parameter(slot: Slot) -> nn.Parameter:
        """What the optimizer steps."""
        return slot.parameter

    def read(self, slot: Slot, into: Tensor | None = None) -> Tensor:
        """Return a parameter's values, in `into` if that is given; else where they lie, if they do."""
        if slot.index in self.homes:
            return self.homes[slot.index].read(slot, into)
        master = self.masters.get(slot.index)
        if master is not None:
            return master.load(torch.empty_like(slot.parameter.data) if into is None else into)
        return slot.parameter.data if into is None else into.copy_(slot.parameter.data)

    def close(self, *, keeps: bool = False) -> None:
        """Give every parameter and buffer back to the user's model, at its last committed value.

        keeps: pages that training would write to again stay; not locked ones, nor those of weights that are split.
        """
        if not self.is_open:
            self.let_go()
            return
        self.is_open = False
        for slot in self.layout.trainable_slots():
            slot.parameter.grad = None
        if keeps and not self.masters and type(self._host) is HostMemory:
            self._masters_host.let_go(self._weights)
            with _KEEPING:
                _KEPT.add(self)
        else:
            self._give_back(self.layout.trainable_slots())
        self._frozen.release(self._blocks.values())
        self.layout.put_buffers(self.buffers)
        self.buffers = []  # some lie in memory of a device's, which goes with the run
        self.masters = {}
        del self._rests, self._blocks, self._brought

    def let_go(self) -> None:
        """Give back what is kept. From any thread."""
        with _KEEPING:
            if self in _KEPT:
                _KEPT.discard(self)
                slots = self.layout.trainable_slots()
                self._give_back([s for s in slots if _is_at(s.parameter, s.view(self._weights, s.offset))])

    @property
    def kept_bytes(self) -> int:
        """DRAM that training takes beside the weights and has already, since it is kept."""
        if self not in _KEPT:
            return 0
        own = (self._link, *self.gradients.storages)
        return sum(storage.nbytes() for storage in own if storage is not self._weights)

    def _give_back(self, slots: Sequence[Slot]) -> None:
        """Give these parameters ordinary storage, and give up the pool's."""
        self._masters_host.let_go(self._weights)
        self._host.let_go(self._link)
        self.gradients.close()
        alone = is_alone(self._weights, [slot.parameter for slot in slots])
        for slot in slots:
            master = self.masters.get(slot.index)
            if master is None:
                slot.parameter.data = copy_of(slot.parameter.data)
            else:
                if not alone:  # somebody has tensors of this memory, as of a plain model's
                    master.show()
                slot.parameter.data = master.load(place_in_dram(slot.parameter.data))
                discard_values(master.split.rest)
                self._host.discard(self._link, slot.link_offset, slot.link_bytes)
            if alone:  # or all weights would be there twice
                self._masters_host.discard(self._weights, slot.offset, slot.num_bytes)
        del self._weights, self._link

    def bring_back(self, slots: Iterable[Slot]) -> None:
        """Take over weights that user code has put elsewhere, as `p.data = p.data - step` does."""
        for slot in (slot for slot in slots if slot.index not in self.masters):
            data = slot.parameter.data
            place = slot.view(self._weights, slot.offset)
            if not _is_at(data, place):
                place.copy_(data)
                slot.parameter.data = place

    def checksum(self, index: int) -> int | None:
        """Tell a frozen weight that another task has too from what it was; None: none has it."""
        block = self._blocks.get(index)
        if block is None or block.num_users == sum(each is block for each in self._blocks.values()):
            return None
        return zlib.crc32(flat(block.weight).reshape(-1).view(torch.uint8).numpy().data)

    @property
    def frozen_version(self) -> int:
        """Grows as callbacks write to frozen weights."""
        return sum(block.version for block in self._blocks.values())

    def renew(self, slots: Iterable[Slot]) -> None:
        """Cast parameters anew for the devices, after an update; those that are split are by what stored them."""
        if self.layout.narrow is not None:
            for slot in (slot for slot in slots if slot.index not in self.masters):
                self.narrow(slot).copy_(slot.parameter.data)

    def narrow(self, slot: Slot) -> Tensor:
        """The tensor that devices are sent of a parameter."""
        if slot.trainable:
            return slot.link_view(self._link, slot.link_offset)
        return self._blocks[slot.index].cast(slot)

    def sources(self, piece: SlabPiece) -> list[tuple[int, Tensor]]:
        """Runs of bytes that make up a shard's piece, as few as there are: (start within it, bytes)."""
        if piece.trainable:
            return [(0, _bytes(self._link, piece.source, piece.num_bytes))]
        found: list[tuple[int, torch.UntypedStorage, int, int]] = []  # (start, storage, first, end)
        for slot in self.layout.slots:
            start = slot.link_offset - piece.source
            if slot.trainable or not 0 <= start < piece.num_bytes:
                continue
            link, begin = self._blocks[slot.index].links[slot.link_dtype]
            end = begin + slot.link_bytes
            before, storage, first, _ = found[-1] if found else (0, None, 0, 0)
            if storage is link and begin - first == start - before:
                found[-1] = (before, link, first, end)
            else:
                found.append((start, link, begin, end))
        return [(start, _bytes(storage, first, end - first)) for start, storage, first, end in found]

    def frozen_key(self, shard: Shard) -> Hashable:
        """Key that shards share, in any task, whose slabs have the same frozen parameters at the same places."""
        frozen = ((self._blocks.get(index), offset) for index, offset in shard.offsets.items())
        found = [(block.serial, block.version, offset - shard.own_bytes) for block, offset in frozen if block]
        return (self.layout.narrow, *found)

    def owned(self, shard: Shard) -> list[Slot]:
        """The trainable parameters that a shard's update steps."""
        return [self.layout.slots[index] for index in shard.owned]


class LentWeights:
    """A pool's weights while their user has them between two steps, from when this is made until `take_over`."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._versions = [slot.parameter._version for slot in pool.layout.slots]
        self._num_users = num_users(pool._weights)  # tensors in the memory of trainable ones, and the like

    @property
    def are_written_to(self) -> bool:
        """True if a function of torch's has written to one since."""
        return self._versions != [slot.parameter._version for slot in self._pool.layout.slots]

    def take_over(self, touched: Mapping[int, int | None]) -> None:
        """Take over weights as their user has left them between two steps.

        touched: slots that may have been written to, where writes are followed, with their checksums before.
        Raises ValueError where a frozen weight was written to that another task has, too, and where a parameter was
        given other memory while a tensor of its own was kept: that would have the values of the parameter.
        """
        pool, data, renewed = self._pool, self._moved(), []
        changed: list[Slot] = []  # of what is at home on a device
        for slot, version in zip(pool.layout.slots, self._versions, strict=True):
            block, parameter = pool._blocks.get(slot.index), slot.parameter
            storage, start = (pool._weights, slot.offset) if block is None else (block.storage, block.offset)
            is_moved = slot.index in data
            is_written = parameter._version != version
            if slot.index in pool.homes and (is_moved or is_written or slot.index in touched):
                changed.append(slot)
            if slot.index in pool.masters:
                continue
            if is_moved:
                place, value = slot.view(storage, start), data[slot.index]
                whole = flat if value.stride() == slot.stride else torch.Tensor.detach  # an expanded one takes no other
                whole(place).copy_(whole(value))
                parameter.data = place
            if block is None and (is_moved or is_written or slot.index in touched):
                renewed.append(slot)
            elif block is not None and (is_moved or is_written or slot.index in touched):
                checksum = pool.checksum(slot.index)
                if checksum is not None and (is_moved or is_written or touched[slot.index] not in (None, checksum)):
                    raise ValueError(
                        f"wrote to parameter {slot.name!r}, which is frozen and another task's, too; give this task a "
                        f"copy of its own (copy.deepcopy)"
                    )
                if checksum is None:
                    block.cast_anew()
        pool.renew(renewed)
        for slot in changed:
            pool.homes[slot.index].load_weights([slot])

    def _moved(self) -> dict[int, Tensor]:
        """Values of the parameters, by slot, that lie elsewhere now; a copy of what another one's place has."""
        moved: dict[int, Tensor] = {}
        pool, weights, names = self._pool, self._pool._weights, []
        first, end = weights.data_ptr(), weights.data_ptr() + weights.nbytes()
        for slot in pool.layout.slots:
            block, parameter = pool._blocks.get(slot.index), slot.parameter
            place = first + slot.offset if block is None else block.storage.data_ptr() + block.offset
            if parameter.data_ptr() != place or parameter.stride() != slot.stride:
                is_here = first <= parameter.data_ptr() < end
                moved[slot.index] = parameter.data.clone() if is_here else parameter.data
                if block is None and not is_here and slot.index not in pool.masters:
                    names.append(slot.name)
        if names and num_users(weights) > self._num_users - len(names):
            raise ValueError(
                f"gave parameter {names[0]!r} other memory, by .data, and kept a tensor that lies in its own; keep a "
                f"clone(), and write to the parameter in place (copy_)"
            )
        return moved


class BorrowedPool(HostPool):
    """Weights are never written to; what layers write to their buffers is seen by later batches, and dropped."""

    def open(self, shards: Sequence[Shard] = (), host: HostMemory | None = None) -> None:
        self._gradients_of_user = [slot.parameter.grad for slot in self.layout.slots]
        super().open(shards, host)

    def close(self, *, keeps: bool = False) -> None:
        if not self.is_open:
            return
        self.buffers = list(self.layout.buffers)
        super().close()
        for slot, gradient in zip(self.layout.slots, self._gradients_of_user, strict=True):
            slot.parameter.grad = gradient
        del self._gradients_of_user


class BestWeights:
    """A task's weights and buffers as they were at its best step, in DRAM of their own.

        judge(best)      a value came; if it is the best, so are the weights of now: noted, nothing is copied
        secure(slots)    these are about to change: copied, if they still are the best
        put_back()       the pool has the best again

    So a shard is copied once for each better value, by the thread that is about to update it.
    """

    def __init__(self, pool: HostPool, best: Best) -> None:
        self.best = best
        self.buffers: list[Tensor] = []
        self._pool = pool
        self._slots = {slot.index: slot for slot in pool.layout.trainable_slots()}
        places = new_private(slot.parameter.data for slot in self._slots.values())
        self._copies = dict(zip(self._slots, places, strict=True))
        self._unchanged: set[int] = set()  # slots whose parameters are still those of the best step
        self._lock = threading.Lock()

    @staticmethod
    def num_bytes(layout: ModelLayout) -> int:
        return layout.num_bytes[True] + sum(buffer.nbytes for buffer in layout.buffers)

    def judge(self, best: Best) -> None:
        """Take over the best value, and mark the weights of now where that is theirs. While nothing updates them."""
        is_new = best.step != self.best.step
        self.best = best
        if is_new:
            with self._lock:
                self._unchanged = set(self._slots)
                self.buffers = list(self._pool.buffers)  # which are replaced, never written to

    def secure(self, slots: Iterable[int] | None = None) -> None:
        """Copy these parameters, None: all, if they still are as at the best step. From any thread."""
        with self._lock:
            found = self._unchanged if slots is None else self._unchanged.intersection(slots)
            for index in sorted(found):
                self._pool.read(self._slots[index], into=self._copies[index])
            self._unchanged = self._unchanged.difference(found)

    def tensors(self) -> dict[int, Tensor]:
        """Return the weights by slot, where they lie now: they move with an update, and not before `secure`."""
        data = {index: slot.parameter.data for index, slot in self._slots.items()}
        return {index: data[index] if index in self._unchanged else each for index, each in self._copies.items()}

    def restore(self, best: Best, weights: Mapping[str, Tensor], buffers: Sequence[Tensor]) -> None:
        """Go on from what was saved, whose tensors are taken over."""
        self.best = best
        if best.step is not None:
            self._copies = {index: weights[slot.name] for index, slot in self._slots.items()}
            self.buffers = list(buffers)

    def put_back(self) -> None:
        """Make the pool's weights and buffers the best ones, if there are such. Nothing computes any more."""
        if self.best.step is None:
            return
        for index, slot in self._slots.items():
            if index not in self._unchanged:
                with self._pool.shown([slot]):
                    slot.parameter.data.copy_(self._copies[index])
        self._pool.buffers = list(self.buffers)


def _bytes(storage: torch.UntypedStorage, start: int, num_bytes: int) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, start, (num_bytes,), (1,))


def kept_pools() -> list[HostPool]:
    """Pools that are closed and keep their memory, of all orchestrators. From any thread."""
    with _KEEPING:
        return list(_KEPT)


def _is_at(tensor: Tensor, place: Tensor) -> bool:
    return tensor.data_ptr() == place.data_ptr() and tensor.stride() == place.stride()
