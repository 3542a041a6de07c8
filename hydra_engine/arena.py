"""Where slabs lie on a device."""

from __future__ import annotations

import threading
from collections.abc import Callable
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


class Arena:
    """Hands out regions of one storage: of the tightest gap, from the bottom and the top in turn.

    With two slabs alive at a time, one lies at each end and everything between is in one piece, whatever their sizes
    and whichever goes first:

        |AAAA|................|BBBBBB|   free A   |....................|BBBBBB|   take C   |CCCCCCCC|...........|BBBBBB|
    """

    def __init__(self, storage: torch.UntypedStorage, alignment: int) -> None:
        """`storage`: as large as all slabs may be together; `alignment`: of their starts, in bytes."""
        self._storage = storage
        self._alignment = alignment
        self._taken: list[tuple[int, int]] = []
        self._elsewhere_bytes = 0
        self._lock = threading.Lock()

    def take(
        self,
        num_bytes: int,
        make_room: Callable[[], bool] = lambda: False,
        beside: Callable[[int], bool] = lambda _: True,
    ) -> Slab:
        """A free region; the ledger has granted its bytes already.

        make_room: asked where the room that is left is in pieces; gives another slab back, or says that it cannot.
        beside: asked then whether there is so much memory beside the storage, which it takes.
        """
        while (slab := self.find(num_bytes)) is None:
            if make_room():
                continue
            size = self._size(num_bytes)
            if not beside(size):
                raise DeviceOutOfMemory("arena, in one piece,", num_bytes, 0, len(self._storage))
            with self._lock:
                # With three slabs and more the room that is left may be in pieces. It is granted, so it lies elsewhere.
                self._elsewhere_bytes += size
            storage = torch.UntypedStorage(size, device=self._storage.device)  # type: ignore[no-untyped-call]
            return Slab(storage=storage, offset=0, num_bytes=size)
        return slab

    def _size(self, num_bytes: int) -> int:
        return -(-num_bytes // self._alignment) * self._alignment

    def find(self, num_bytes: int) -> Slab | None:
        """A gap that is large enough; None if there is none although so much is free.

        Raises DeviceOutOfMemory where less is free.
        """
        size = self._size(num_bytes)
        with self._lock:
            end = len(self._storage) // self._alignment * self._alignment
            stops = [(0, 0), *sorted(self._taken), (end, end)]
            gaps = [(low, high) for (_, low), (high, _) in pairwise(stops) if high - low >= size]
            gaps.sort(key=lambda gap: gap[1] - gap[0])  # the tightest
            if not gaps:
                taken = self._elsewhere_bytes + sum(high - low for low, high in self._taken)
                if taken + size > end:
                    raise DeviceOutOfMemory("arena", num_bytes, end - taken, end)
                return None
            low, high = gaps[0]
            start = low if low == 0 else high - size
            if size:
                self._taken.append((start, start + size))
            return Slab(storage=self._storage, offset=start, num_bytes=size)

    def holds(self, slab: Slab) -> bool:
        """Whether it lies here, and not elsewhere."""
        return slab.storage is self._storage

    def close(self) -> None:
        """Free the storage; nothing can be taken any more."""
        self._storage = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]

    def give_back(self, slab: Slab) -> None:
        """Free a region."""
        if not slab.num_bytes:
            return
        with self._lock:
            if slab.storage is self._storage:
                self._taken.remove((slab.offset, slab.offset + slab.num_bytes))
            else:
                self._elsewhere_bytes -= slab.num_bytes
