"""What a device keeps although no unit needs it now: given up when there is no room, what is needed last first.

That is the order which moves least bytes (Belady 1966, for pieces of one size). Everything here is a copy of what is in
DRAM, so giving it up moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from hydra_engine.ledger import SLABS, WORK, Ledger

NextUse = Callable[[], float]


def _nothing() -> None:
    """Frees what needs nothing but that nobody holds it."""


@dataclass(eq=False, kw_only=True)
class _Resident:
    value: Any
    num_bytes: int
    kind: str  # of its bytes
    users: dict[str, NextUse]  # by task
    dispose: Callable[[], None] = _nothing
    num_pins: int = 0

    def next_use_s(self) -> float:
        return min((next_use_s() for next_use_s in self.users.values()), default=math.inf)


class Residents:
    """Values on one device by key, with bytes that the ledger has granted and may have back unless they are pinned.

    Everything happens under the ledger's lock, so that nothing is given up between being found and being pinned.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._found: dict[Hashable, _Resident] = {}
        ledger.reclaim = self._give_up

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._found

    def add(
        self,
        key: Hashable,
        value: Any,
        num_bytes: int,
        user: str,
        next_use_s: NextUse,
        dispose: Callable[[], None],
    ) -> None:
        """Take in a slab, pinned once, with bytes that are granted already.

        next_use_s: how far away the user's next use is, as of when it is asked. dispose: frees it.
        """
        with self._ledger.lock:
            assert key not in self._found, key
            self._found[key] = _Resident(
                value=value, num_bytes=num_bytes, kind=SLABS, users={user: next_use_s}, dispose=dispose, num_pins=1
            )

    def pin(self, key: Hashable, user: str, next_use_s: NextUse) -> Any | None:
        """The value, not to be given up until it is unpinned; None if it is not there."""
        with self._ledger.lock:
            resident = self._found.get(key)
            if resident is None:
                return None
            resident.users[user] = next_use_s
            resident.num_pins += 1
            return resident.value

    def unpin(self, key: Hashable, *, is_whole: bool = True) -> None:
        """The other end of `add` and `pin`; what is not whole, or that nobody will need, goes with its last pin."""
        with self._ledger.lock:
            resident = self._found[key]
            resident.num_pins -= 1
            if resident.num_pins == 0 and (not is_whole or resident.next_use_s() == math.inf):
                self._drop(key)

    def keep(
        self,
        key: Hashable,
        value: Any,
        num_bytes: int,
        user: str,
        next_use_s: NextUse,
        dispose: Callable[[], None] = _nothing,
    ) -> bool:
        """Take in a value with bytes that are granted already, and from now on its own; False: nobody will need it."""
        with self._ledger.lock:
            if key in self._found or next_use_s() == math.inf:
                return False
            self._found[key] = _Resident(
                value=value, num_bytes=num_bytes, kind=WORK, users={user: next_use_s}, dispose=dispose
            )
            return True

    def offer(self, key: Hashable, value: Any, num_bytes: int, user: str, next_use_s: NextUse) -> bool:
        """Take in a value if there is room, or less to be lost by making it."""
        with self._ledger.lock:
            own_s = next_use_s()
            if key in self._found or own_s == math.inf or self._ledger.has_waiting:
                return False
            missing = num_bytes - self._ledger.free_bytes()
            if missing > 0:
                later = [
                    r.num_bytes for _, r in self._by_next_use() if r.next_use_s() > own_s and self._serves(r, WORK)
                ]
                if sum(later) < missing:
                    return False
            if not self._ledger.take(num_bytes):
                return False
            self._found[key] = _Resident(value=value, num_bytes=num_bytes, kind=WORK, users={user: next_use_s})
            return True

    def take(self, key: Hashable) -> Any | None:
        """Take a value out and give its bytes back: whoever takes it was granted as many before, for its input."""
        with self._ledger.lock:
            if key not in self._found:
                return None
            value = self._found[key].value
            self._drop(key)
            return value

    def sweep(self, user: str) -> None:
        """Give up what a task had left and nobody will need: of a step that is over, say, which went on elsewhere."""
        with self._ledger.lock:
            for key, resident in list(self._found.items()):
                is_over = user in resident.users and resident.num_pins == 0 and resident.next_use_s() == math.inf
                if is_over and key in self._found:
                    self._drop(key)

    def forget(self, user: str | None = None) -> None:
        """Give up what is there for a task alone, or everything. Nothing of it is pinned but by what goes with it."""
        with self._ledger.lock:
            for key, resident in list(self._found.items()):
                if user is None:
                    resident.users.clear()
                elif resident.users.pop(user, None) is None:
                    continue
                if not resident.users and resident.num_pins == 0:
                    self._drop(key)

    def give_up_slab(self) -> bool:
        """Give up the slab that is needed last, whose place in an arena is wanted; False: all are pinned."""
        with self._ledger.lock:
            while free := self._by_next_use():
                slab = next((key for key, resident in free if resident.kind == SLABS), None)
                if slab is not None:
                    self._drop(slab)
                    return True
                # Graphs of a shard refer to its slab, which is free without them.
                holder = next((key for key, resident in free if resident.dispose is not _nothing), None)
                if holder is None:
                    return False
                self._drop(holder)
            return False

    def _drop(self, key: Hashable) -> None:
        resident = self._found.pop(key)
        resident.dispose()
        resident.value = None  # nobody here holds it when its bytes are given back
        self._ledger.release(resident.num_bytes, kind=resident.kind)

    def _serves(self, resident: _Resident, kind: str) -> bool:
        """Whether giving it up makes room for that kind."""
        return resident.kind == kind or not self._ledger.is_split

    def _by_next_use(self) -> list[tuple[Hashable, _Resident]]:
        """What is not pinned, the last to be needed first."""
        free = [item for item in self._found.items() if item[1].num_pins == 0]
        return sorted(free, key=lambda item: item[1].next_use_s(), reverse=True)

    def _give_up(self, num_bytes: int, kind: str) -> None:
        """Until so many bytes of a kind are free, or nothing is left that would make room for it."""
        while self._ledger.free_bytes(kind) < num_bytes:
            free = [item for item in self._by_next_use() if self._serves(item[1], kind)]
            if not free and kind == SLABS and self.give_up_slab():
                continue
            if not free:
                return
            for key, _ in free:  # one may pin others, which are free then, or gone with it
                if self._ledger.free_bytes(kind) < num_bytes and key in self._found:
                    self._drop(key)
