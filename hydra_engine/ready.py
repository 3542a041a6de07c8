"""Who is next: queues of tasks ordered by key, and of devices ordered by number. Nothing is searched through."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T", bound=Hashable)

Entry: TypeAlias = "tuple[Any, int, T]"

# Entries that were taken back stay in the heap until they come up, or until there are this many more than members.
MAX_STALE = 64


class ReadyQueue(Generic[T]):
    """Members by key, the lowest first and among equals the first to be put; O(log n) for each change.

    Memory is that of the members now in it, however many came and went.
    """

    def __init__(self) -> None:
        self._heap: list[Entry[T]] = []
        self._entries: dict[T, Entry[T]] = {}
        self._serial = count()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, member: T, key: Any) -> None:
        """Add a member, or give it another key."""
        entry = (key, next(self._serial), member)
        self._entries[member] = entry
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + MAX_STALE:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def discard(self, member: T) -> None:
        """Take a member out, if it is in."""
        self._entries.pop(member, None)

    def first(self, num: int) -> list[T]:
        """So many members with the lowest keys, in their order; O(num log num)."""
        self.best()
        found: list[T] = []
        frontier = [(self._heap[0], 0)] if self._heap else []  # of the heap, from its root down
        while frontier and len(found) < num:
            entry, k = heappop(frontier)
            if self._entries.get(entry[2]) is entry:
                found.append(entry[2])
            for child in (2 * k + 1, 2 * k + 2):
                if child < len(self._heap):
                    heappush(frontier, (self._heap[child], child))
        return found

    def best(self) -> T | None:
        """The member with the lowest key."""
        if not self._entries:
            self._heap.clear()  # also of keys that could not be compared
        while self._heap:
            entry = self._heap[0]
            if self._entries.get(entry[2]) is entry:
                return entry[2]
            heappop(self._heap)
        return None
