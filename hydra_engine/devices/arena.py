"""Memory for slabs on a device, and for what units leave in DRAM."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hydra_engine.errors import DeviceOutOfMemory


@dataclass(frozen=True, kw_only=True)
class Slab:
    """A region of a device's arena."""

    storage: torch.UntypedStorage
    offset: int
    num_bytes: int

    def bytes(self, start: int, num_bytes: int) -> Tensor:
        """Its bytes from `start` on, sharing no version counter with any other view."""
        flat = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return flat.set_(self.storage, self.offset + start, (num_bytes,), (1,))


class ArenaInPieces(DeviceOutOfMemory):
    """As many bytes of an arena are free as were asked for, but not side by side."""


class Arena:
    """Hands out regions of one storage: of the tightest gap, from the bottom and the top in turn.

    What stays for long goes to the very bottom, and that ends for all others where it ends.

    With two slabs alive at a time, one lies at each end and everything between is in one piece, whatever their sizes
    and whichever goes first:

        |AAAA|................|BBBBBB|   free A   |....................|BBBBBB|   take C   |CCCCCCCC|...........|BBBBBB|
    """

    def __init__(self, storage: torch.UntypedStorage, alignment: int) -> None:
        """`storage`: as large as all slabs may be together; `alignment`: of their starts, in bytes."""
        self._storage = storage
        self._alignment = alignment
        self._taken: list[tuple[int, int]] = []
        self._lasting: list[tuple[int, int]] = []  # of these
        self._elsewhere_bytes = 0
        self._lock = threading.Lock()

    def take(
        self,
        num_bytes: int,
        make_room: Callable[[], bool] = lambda: False,
        beside: Callable[[int], bool] = lambda _: True,
        *,
        lasts: bool = False,
    ) -> Slab:
        """A free region, whose bytes are granted.

        make_room: gives another slab back where room is in pieces, or cannot. beside: then takes memory elsewhere.
        lasts: it stays for long. Raises ArenaInPieces where neither can.
        """
        while (slab := self.find(num_bytes, lasts=lasts)) is None:
            if make_room():
                continue
            if (slab := self.find(num_bytes, lasts=lasts)) is not None:  # given back meanwhile
                break
            size = self._size(num_bytes)
            if not beside(size):
                with self._lock:
                    free = max(high - low for low, high in self._gaps())
                raise ArenaInPieces("arena, in one piece,", num_bytes, free, len(self._storage))
            with self._lock:
                # With three slabs and more the room that is left may be in pieces. It is granted, so it lies elsewhere.
                self._elsewhere_bytes += size
            storage = torch.UntypedStorage(size, device=self._storage.device)  # type: ignore[no-untyped-call]
            return Slab(storage=storage, offset=0, num_bytes=size)
        return slab

    def _size(self, num_bytes: int) -> int:
        return -(-num_bytes // self._alignment) * self._alignment

    def find(self, num_bytes: int, *, lasts: bool = False) -> Slab | None:
        """A gap that is large enough; None if free room is in pieces. Raises DeviceOutOfMemory where less is free."""
        size = self._size(num_bytes)
        with self._lock:
            gaps = [(low, high) for low, high in self._gaps() if high - low >= size]
            bottom = max((high for _, high in self._lasting), default=0)
            gaps.sort(key=lambda gap: gap[0] if lasts else gap[1] - gap[0])  # the lowest, or the tightest
            if not gaps:
                taken = self._elsewhere_bytes + sum(high - low for low, high in self._taken)
                if taken + size > self._end:
                    raise DeviceOutOfMemory("arena", num_bytes, self._end - taken, self._end)
                return None
            low, high = gaps[0]
            start = low if lasts or low in (0, bottom) else high - size
            if size:
                self._taken.append((start, start + size))
                self._lasting += [self._taken[-1]] * lasts
            return Slab(storage=self._storage, offset=start, num_bytes=size)

    @property
    def _end(self) -> int:
        return len(self._storage) // self._alignment * self._alignment

    def _gaps(self) -> list[tuple[int, int]]:
        """Return where free pieces begin and end, from the bottom; empty ones, too."""
        stops = [(0, 0), *sorted(self._taken), (self._end, self._end)]
        return [(low, high) for (_, low), (high, _) in pairwise(stops)]

    def holds(self, slab: Slab) -> bool:
        """Return False for a slab that has memory of its own."""
        return slab.storage is self._storage

    def close(self) -> None:
        """Free the storage; nothing can be taken any more."""
        self._storage = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]

    def give_back(self, slab: Slab) -> int:
        """Free a region. Return its bytes where it lies elsewhere, else 0."""
        with self._lock:
            if not self.holds(slab):
                self._elsewhere_bytes -= slab.num_bytes
                return slab.num_bytes
            if slab.num_bytes:
                place = (slab.offset, slab.offset + slab.num_bytes)
                self._taken.remove(place)
                if place in self._lasting:
                    self._lasting.remove(place)
            return 0


class HostRegions:
    """DRAM for what units leave: cut from few regions that are made once, and used again as soon as it is free.

    As page-locked memory has to be, which is slow to make. Torch has such memory, too, but frees it by asking the
    device, in a destructor: once the device is lost, that ends the process at once.
    """

    def __init__(self, new_storage: Callable[[int], torch.UntypedStorage], region_bytes: int, alignment: int) -> None:
        """`new_storage`: makes a region of so many bytes. The first one is made here, of `region_bytes`."""
        self._new_storage = new_storage
        self._region_bytes = region_bytes
        self._alignment = alignment
        self._lock = threading.Lock()
        self._freed: deque[tuple[Arena, Slab]] = deque()  # by whoever dropped one, in any thread at any moment
        self._regions = [Arena(new_storage(region_bytes), alignment)]

    def take(self, num_bytes: int) -> torch.UntypedStorage:
        """A storage of its own, whose memory is free for others once nobody holds it."""
        if num_bytes == 0:
            return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
        with self._lock:
            while self._freed:
                region, slab = self._freed.popleft()
                region.give_back(slab)
            region, slab = self._find(num_bytes)
        there = (ctypes.c_char * num_bytes).from_address(slab.storage.data_ptr() + slab.offset)
        storage = torch.frombuffer(there, dtype=torch.uint8).untyped_storage()
        # It holds the region until then, also once this is closed.
        weakref.finalize(storage, _give_back, weakref.ref(self), region, slab).atexit = False
        return storage

    def _find(self, num_bytes: int) -> tuple[Arena, Slab]:
        for region in self._regions:
            with suppress(DeviceOutOfMemory):
                slab = region.find(num_bytes)
                if slab is not None:
                    return region, slab
        size = -(-num_bytes // self._alignment) * self._alignment
        times = max(1, self._region_bytes // size)  # as many of this size as go into one
        region = Arena(self._new_storage(size * times), self._alignment)
        self._regions.append(region)
        return region, region.take(num_bytes)

    def close(self) -> None:
        """Free the regions that nobody has a place in; the others with their last place."""
        with self._lock:
            self._regions = []
            self._freed.clear()


def _give_back(regions: weakref.ref[HostRegions], region: Arena, slab: Slab) -> None:
    """Note that nobody holds a place any more."""
    there = regions()
    if there is not None and there._regions:
        there._freed.append((region, slab))
