"""What a device keeps although no unit needs it now: given up when there is no room, what is needed last first.

That is the order which moves least bytes (Belady 1966, for pieces of one size). Everything here is a copy of what is in
DRAM, so giving it up moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from hydra_engine.ledger import Ledger


class _Resident(NamedTuple):
    value: Any
    num_bytes: int
    next_use_s: Callable[[], float]
    dispose: Callable[[], None]


class Residents:
    """Values on one device by key, with bytes that the ledger has granted and may have back at any time.

    Everything happens under the ledger's lock, so that nothing is given up between being found and being taken.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._found: dict[Hashable, _Resident] = {}
        ledger.reclaim = self._give_up

    def __contains__(self, key: Hashable) -> bool:
        return key in self._found

    @property
    def num_bytes(self) -> int:
        """Bytes that could be given up."""
        return sum(resident.num_bytes for resident in self._found.values())

    def keep(
        self,
        key: Hashable,
        value: Any,
        num_bytes: int,
        next_use_s: Callable[[], float],
        dispose: Callable[[], None] = lambda: None,
    ) -> bool:
        """Keep a value whose bytes are granted already, and are the residents' from now on; False: nobody will ask.

        next_use_s: how far away its next use is, as of when it is asked. dispose: frees it.
        """
        with self._ledger.lock:
            if key in self._found or next_use_s() == math.inf:
                return False
            self._found[key] = _Resident(value, num_bytes, next_use_s, dispose)
            return True

    def offer(self, key: Hashable, value: Any, num_bytes: int, next_use_s: Callable[[], float]) -> bool:
        """Keep a value if there is room, or less to be lost by making it."""
        with self._ledger.lock:
            own_s = next_use_s()
            if key in self._found or own_s == math.inf or self._ledger.has_waiting:
                return False
            missing = num_bytes - self._ledger.free_bytes
            if missing > 0:
                further = [key for key, each in self._by_next_use() if each.next_use_s() > own_s]
                if sum(self._found[key].num_bytes for key in further) < missing:
                    return False
            if not self._ledger.take(num_bytes):
                return False
            self._found[key] = _Resident(value, num_bytes, next_use_s, lambda: None)
            return True

    def take(self, key: Hashable) -> Any | None:
        """Take a value out; its bytes are the caller's."""
        with self._ledger.lock:
            found = self._found.pop(key, None)
            return None if found is None else found.value

    def take_for_nothing(self, key: Hashable) -> Any | None:
        """Take a value out and give its bytes back: the caller was granted them already."""
        with self._ledger.lock:
            found = self._found.pop(key, None)
            if found is None:
                return None
            self._ledger.release(found.num_bytes)
            return found.value

    def forget(self, owner: Hashable | None = None) -> None:
        """Give up what is kept under keys that begin with `owner`, or everything."""
        with self._ledger.lock:
            keys = [key for key in self._found if owner is None or (isinstance(key, tuple) and key[0] == owner)]
            for key in keys:
                resident = self._found.pop(key)
                resident.dispose()
                self._ledger.release(resident.num_bytes)

    def _by_next_use(self) -> list[tuple[Hashable, _Resident]]:
        """The last to be needed first."""
        return sorted(self._found.items(), key=lambda item: item[1].next_use_s(), reverse=True)

    def _give_up(self, num_bytes: int) -> int:
        given = 0
        for key, resident in self._by_next_use():
            if given >= num_bytes:
                break
            del self._found[key]
            resident.dispose()
            given += resident.num_bytes
        return given
