"""Who has to have answered by when."""

from __future__ import annotations

import math
import time


class Deadlines:
    """Of the answers that are waited for, by name.

    An answer that comes does not move `next_s`: one look too early is cheaper than a search at each.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, float] = {}
        self.next_s = math.inf  # of time.monotonic(): no later than the first of them

    def set(self, name: str, seconds: float) -> None:
        """An answer is waited for, so long from now."""
        self._by_name[name] = time.monotonic() + seconds
        self.next_s = min(self.next_s, self._by_name[name])

    def drop(self, name: str) -> None:
        """It has come."""
        self._by_name.pop(name, None)

    def take_due(self) -> list[str]:
        """Whose time is up; they are waited for no more."""
        now_s = time.monotonic()
        due = [name for name, deadline_s in self._by_name.items() if deadline_s <= now_s]
        for name in due:
            del self._by_name[name]
        self.next_s = min(self._by_name.values(), default=math.inf)
        return due
