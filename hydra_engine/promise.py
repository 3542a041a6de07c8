"""A result that one thread makes and another waits for, once: what is needed of a future, at a tenth of its price."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class Promise(Generic[T]):
    """Kept or broken once, by one thread; any other may wait for it."""

    __slots__ = ("_error", "_lock", "_value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._value: T | None = None
        self._error: BaseException | None = None

    def keep(self, value: T) -> None:
        """Give the result."""
        self._value = value
        self._lock.release()

    def give_up(self, error: BaseException) -> None:
        """Say why there is no result."""
        self._error = error
        self._lock.release()

    @property
    def is_done(self) -> bool:
        """Whether nobody has to wait any more."""
        return not self._lock.locked()

    def is_kept(self) -> bool:
        """Wait, and tell whether there is a result."""
        with self._lock:
            return self._error is None

    def result(self) -> T:
        """Wait for the result; raises why there is none."""
        with self._lock:
            pass
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # T may be None
