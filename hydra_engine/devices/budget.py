"""The bytes of a device: asked for, granted in order, given back. Nobody waits inside a lane for memory.

They are of two kinds: slabs', and what units work with. Where slabs lie in an arena of their own, each kind has its own
limit, since memory does not go from one to the other; elsewhere both have the whole budget as theirs.

A device keeps slabs that no unit needs now and gives them up when there is no room, what is needed last first. That
order moves least bytes (Belady 1966, for pieces of one size). All of it is a copy of what is in DRAM, so giving it up
moves nothing.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from hydra_engine.errors import DeviceOutOfMemory

SLABS, WORK = "slabs", "work"


@dataclass(eq=False, kw_only=True)
class Ticket:
    """A request for bytes: granted once, in its turn, or refused, or cancelled before. Callbacks must not block."""

    # None: all that is free, once nothing else is active. A function is asked when it is the ticket's turn.
    num_bytes: int | Callable[[], int] | None
    granted: Callable[[int], None]
    refused: Callable[[Exception], None]
    activates: bool = False  # from its grant on something runs that will release bytes by itself
    kind: str = WORK

    def wanted(self) -> int | None:
        return self.num_bytes() if callable(self.num_bytes) else self.num_bytes


class Ledger:
    """Bytes of a device in use, never above its budget.

    Requests are granted strictly in order, each as soon as it fits: a unit that is about to run asks before the next
    unit's slab does, so a claim can never starve the unit in front of it. A request at the head that does not fit
    while nothing is active, so that nothing will be released by itself, is refused.
    """

    def __init__(self, device: str, memory_bytes: int, arena_bytes: int | None = None) -> None:
        """`arena_bytes`: of its memory, for slabs and nothing else; None: for whatever asks first."""
        self.device = device
        self.memory_bytes = memory_bytes
        self.is_split = arena_bytes is not None
        self.peak_bytes = 0
        slab_bytes = memory_bytes if arena_bytes is None else arena_bytes
        self._limits = {SLABS: slab_bytes, WORK: memory_bytes - (arena_bytes or 0)}
        self._used = {SLABS: 0, WORK: 0}
        self._num_active = 0
        self._closed = False
        self._is_unsettled = False  # a unit was granted all that is free, and has yet to tell what it uses
        self._is_pumping = False
        self._waiting: deque[Ticket] = deque()
        # Releases what is kept for later until so many bytes of a kind are free, or nothing of it is left.
        self.evict: Callable[[int, str], None] = lambda _, __: None
        # Asked before a request is refused: True where so many bytes, or some of them, are on their way back.
        self.reclaim: Callable[[int], bool] = lambda _: False
        # Told the bytes in use whenever they have changed, under the lock; not while `_is_unsettled`.
        self.noted: Callable[[int], None] = lambda _: None
        # Held by whoever changes anything here, and while callbacks run, in the grants' order; reentrant: they may ask.
        self.lock = threading.RLock()

    @property
    def used_bytes(self) -> int:
        return self._used[SLABS] + self._used[WORK]

    def limit_bytes(self, kind: str = WORK) -> int:
        return self._limits[kind]

    def free_bytes(self, kind: str = WORK) -> int:
        """Return the bytes of a kind that nobody has."""
        used = self._used
        return min(self.memory_bytes - used[SLABS] - used[WORK], self._limits[kind] - used[kind])

    def can_hold(self, work_bytes: int, slab_bytes: int) -> bool:
        """Return True if these bytes of each kind fit at the same time, with nothing else there."""
        fits = work_bytes <= self._limits[WORK] and slab_bytes <= self._limits[SLABS]
        return fits and work_bytes + slab_bytes <= self.memory_bytes

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def request(self, ticket: Ticket) -> None:
        with self.lock:
            if not self._closed:
                self._waiting.append(ticket)
            self._pump()

    def cancel(self, ticket: Ticket) -> bool:
        """Withdraw a request; False when it is no longer waiting."""
        with self.lock:
            if ticket not in self._waiting:
                return False
            self._waiting.remove(ticket)
            self._pump()
            return True

    def close(self) -> None:
        """Forget who waits, and grant nothing more."""
        with self.lock:
            self._waiting.clear()
            self._closed = True

    def activate(self) -> None:
        """Announce a release, so that nobody is refused before it."""
        with self.lock:
            self._num_active += 1

    def release(self, num_bytes: int, *, kind: str = WORK, deactivates: bool = False) -> None:
        """Give bytes back, and at the end of a unit its activity with them."""
        with self.lock:
            self._used[kind] -= num_bytes
            self._num_active -= deactivates
            self._is_unsettled &= not deactivates
            assert self._used[kind] >= 0, self._used
            assert self._num_active >= 0, self._num_active
            if num_bytes or deactivates:
                self._tell()
            if self._waiting:
                self._pump()

    def grow(self, num_bytes: int) -> None:
        """Take more at once, for a unit that turns out larger than known; raises DeviceOutOfMemory."""
        if not self.take(num_bytes):
            raise DeviceOutOfMemory(self.device, num_bytes, self.free_bytes(), self.limit_bytes())

    def take(self, num_bytes: int, kind: str = WORK) -> bool:
        """Take more at once, whoever waits; False where there is no room."""
        with self.lock:
            self._make_room(num_bytes, kind)
            fits = num_bytes <= self.free_bytes(kind)
            if fits:
                self._used[kind] += num_bytes
                self._count()
            self._pump()  # more may have been given up than was taken
            return fits

    def _make_room(self, num_bytes: int, kind: str) -> None:
        """Have what is kept given up, for whoever asks here: nobody else is granted anything of it meanwhile."""
        if num_bytes > self.free_bytes(kind):
            was_pumping, self._is_pumping = self._is_pumping, True
            try:
                self.evict(num_bytes, kind)
            finally:
                self._is_pumping = was_pumping

    def settle(self, held_bytes: int, num_bytes: int) -> None:
        """A unit that was granted everything turned out to need `num_bytes`."""
        with self.lock:
            self._is_unsettled = False
            if num_bytes > held_bytes:
                self.grow(num_bytes - held_bytes)
                return
            self._used[WORK] -= held_bytes - num_bytes
            self._count()
            self._pump()

    def _count(self) -> None:
        """Count what is in use now for the peak, and tell it."""
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self._tell()

    def _tell(self) -> None:
        if not self._is_unsettled:
            self.noted(self.used_bytes)

    def _pump(self) -> None:
        if self._is_pumping or not self._waiting:  # what a callback asks for or gives back is looked at after it
            return
        self._is_pumping = True
        try:
            self._grant()
        finally:
            self._is_pumping = False

    def _grant(self) -> None:
        while self._waiting:
            ticket = self._waiting[0]
            wanted = ticket.wanted()
            free = self.free_bytes(ticket.kind)
            if wanted is None and self._num_active == 0:
                self._make_room(self.limit_bytes(ticket.kind), ticket.kind)
                wanted = free = self.free_bytes(ticket.kind)
            elif wanted is not None and wanted > free:
                wanted = self._made_room(ticket, wanted)
                free = self.free_bytes(ticket.kind)
            if wanted is not None and wanted <= free:
                self._waiting.popleft()
                self._used[ticket.kind] += wanted
                if ticket.num_bytes is None:  # who takes all does not use all: `settle` tells
                    self._is_unsettled = True
                elif wanted:
                    self._count()
                self._num_active += ticket.activates
                ticket.granted(wanted)
            elif self._num_active == 0:
                if wanted is not None and self.reclaim(wanted - free):
                    return
                self._waiting.popleft()
                ticket.refused(DeviceOutOfMemory(self.device, wanted or 0, free, self.limit_bytes(ticket.kind)))
            else:
                return

    def _made_room(self, ticket: Ticket, wanted: int) -> int:
        """Make room for a ticket as far as that goes; what it wants then: more, if what it counted on was given up."""
        free = -1
        while free < self.free_bytes(ticket.kind) < wanted:
            free = self.free_bytes(ticket.kind)
            self._make_room(wanted, ticket.kind)
            wanted = ticket.wanted() or 0
        return wanted


NextUse = Callable[[], float]
Dispose = Callable[[], None]


def _nothing() -> None:
    """Do nothing: values are freed by letting go of them."""


@dataclass(eq=False)
class _Resident:
    value: Any
    num_bytes: int
    kind: str  # of its bytes
    users: dict[str, NextUse]  # by task
    dispose: Dispose = _nothing
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
        self._evict_before, ledger.evict = ledger.evict, self._evict

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._found

    def add(self, key: Hashable, value: Any, num_bytes: int, user: str, next_use_s: NextUse, dispose: Dispose) -> None:
        """Take in a slab, pinned once; next_use_s: how far away the next use is when it is asked; dispose: frees it."""
        with self._ledger.lock:
            assert key not in self._found, key
            self._found[key] = _Resident(value, num_bytes, SLABS, {user: next_use_s}, dispose, num_pins=1)

    def pin(self, key: Hashable, user: str, next_use_s: NextUse) -> Any | None:
        """Return the value, which stays until it is unpinned; None if it is not there."""
        with self._ledger.lock:
            resident = self._found.get(key)
            if resident is None:
                return None
            resident.users[user] = next_use_s
            resident.num_pins += 1
            return resident.value

    def num_pins(self, key: Hashable) -> int:
        """Return how many times `add` and `pin` were called for a value and `unpin` was not."""
        return self._found[key].num_pins

    def unpin(self, key: Hashable, *, is_whole: bool = True) -> None:
        """End what `add` or `pin` began. With its last pin goes a value that is not whole, or that nobody will need."""
        with self._ledger.lock:
            resident = self._found[key]
            resident.num_pins -= 1
            if resident.num_pins == 0 and (not is_whole or resident.next_use_s() == math.inf):
                self._drop(key)

    def keep(
        self, key: Hashable, value: Any, num_bytes: int, user: str, next_use_s: NextUse, dispose: Dispose = _nothing
    ) -> bool:
        """Take in a value with bytes that are granted already, and from now on its own; False: nobody will need it."""
        with self._ledger.lock:
            if key in self._found or next_use_s() == math.inf:
                return False
            self._found[key] = _Resident(value, num_bytes, WORK, {user: next_use_s}, dispose)
            return True

    def offer(self, key: Hashable, value: Any, num_bytes: int, user: str, next_use_s: NextUse) -> bool:
        """Take in a value if there is room, or less to be lost by making it."""
        with self._ledger.lock:
            own_s = next_use_s()
            if key in self._found or own_s == math.inf or self._ledger.has_waiting:
                return False
            missing = num_bytes - self._ledger.free_bytes()
            if missing > 0:
                later = (
                    r.num_bytes for _, r in self._by_next_use() if r.next_use_s() > own_s and self._serves(r, WORK)
                )
                if sum(later) < missing:
                    return False
            if not self._ledger.take(num_bytes):
                return False
            self._found[key] = _Resident(value, num_bytes, WORK, {user: next_use_s})
            return True

    def find(self, key: Hashable) -> Any | None:
        """Return the value, which may be given up at any moment; None if it is not there."""
        resident = self._found.get(key)
        return None if resident is None else resident.value

    def take(self, key: Hashable) -> Any | None:
        """Take a value out and give its bytes back: whoever takes it was granted as many before, for its input."""
        found = self.take_or_pin(key, lambda _: True)
        return None if found is None else found[0]

    def take_or_pin(self, key: Hashable, is_last: Callable[[Any], bool]) -> tuple[Any, bool] | None:
        """Take a value out if whoever asks is the last to need it; else it stays, pinned. Also return which it is."""
        with self._ledger.lock:
            resident = self._found.get(key)
            if resident is None:
                return None
            value, is_out = resident.value, is_last(resident.value)
            if is_out:
                self._drop(key)
            else:
                resident.num_pins += 1
            return value, is_out

    def sweep(self, user: str) -> None:
        """Give up a task's values that nobody will need: of a step that went on elsewhere, say."""
        with self._ledger.lock:
            for key, resident in list(self._found.items()):
                is_over = user in resident.users and resident.num_pins == 0 and resident.next_use_s() == math.inf
                if is_over and key in self._found:
                    self._drop(key)

    def forget(self, user: str | None = None) -> None:
        """Give up the values of a task alone, or all. None of them is pinned but by another of them."""
        with self._ledger.lock:
            for key, resident in list(self._found.items()):
                if user is None:
                    resident.users.clear()
                elif resident.users.pop(user, None) is None:
                    continue
                if not resident.users and resident.num_pins == 0:
                    self._drop(key)

    def vacate(self) -> None:
        """Give up all that nobody pins."""
        with self._ledger.lock:
            while free := self._by_next_use():
                for key, _ in free:  # one may pin others, which are free then, or gone with it
                    if key in self._found:
                        self._drop(key)

    def leave(self) -> None:
        """Give up all; whoever had values on the device before is asked for room again."""
        self.forget()
        self._ledger.evict = self._evict_before

    def evict_slab(self) -> bool:
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
        return resident.kind == kind or not self._ledger.is_split

    def _by_next_use(self) -> list[tuple[Hashable, _Resident]]:
        """Return the values that nobody pins, the last to be needed first."""
        free = [item for item in self._found.items() if item[1].num_pins == 0]
        return sorted(free, key=lambda item: item[1].next_use_s(), reverse=True)

    def _evict(self, num_bytes: int, kind: str) -> None:
        """Give up values until these bytes of a kind are free, or nothing is left that would make room."""
        while self._ledger.free_bytes(kind) < num_bytes:
            free = [item for item in self._by_next_use() if self._serves(item[1], kind)]
            if not free and kind == SLABS and self.evict_slab():
                continue
            if not free:
                return
            for key, _ in free:  # one may pin others, which are free then, or gone with it
                if self._ledger.free_bytes(kind) < num_bytes and key in self._found:
                    self._drop(key)
