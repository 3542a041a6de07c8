"""Calls of a task's user code, which may be late: the time that each takes, and the end of waiting for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hydra_engine.data.streams import GLOBAL_GENERATORS


class LeftBehind(RuntimeError):
    """A call came back after its thread was left behind."""


class UserCalls:
    """Times the calls of one task's loader and other user code, which one thread at a time makes.

    A thread whose call is late is left behind: what it was to answer is not heard any more, and others go on. An answer
    and its thread being left behind exclude each other.
    """

    def __init__(self, name: str, timeout_s: float | None) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._mutex = threading.RLock()
        self._caller: int | None = None  # the thread that made the last call
        self._since_s: float | None = None  # when the call in progress began, by time.monotonic(); None: there is none
        self.is_left = False

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time the body, which is a call. Raises LeftBehind where it came back after its thread was."""
        self.begin()
        try:
            yield
        finally:
            self.end()
        if self.is_left:
            raise LeftBehind(f"{self._name}: its loader came back too late, and was left behind")

    def begin(self) -> None:
        """Count the time from now on: this thread makes a call."""
        self._caller, self._since_s = threading.get_ident(), time.monotonic()

    def end(self) -> None:
        """Count no time: no call is in progress."""
        self._since_s = None

    def prepare(self) -> None:
        """Count no time: this thread is about to make a call, and may wait for others before."""
        self._caller, self._since_s = threading.get_ident(), None

    def answer(self, job: Callable[[], None]) -> bool:
        """Run `job`, which hands over what a call gave; return False where its thread was left behind meanwhile."""
        with self._mutex:
            self.end()
            if not self.is_left:
                job()
            return not self.is_left

    def leave_late(self) -> float | None:
        """Leave the thread behind if its call has taken the time limit; else return the seconds until then."""
        assert self._timeout_s is not None
        with self._mutex:
            late_s = 0.0 if self._since_s is None else time.monotonic() - self._since_s
            if late_s < self._timeout_s:
                return self._timeout_s - late_s
            self.leave()
            return None

    def leave(self) -> None:
        """Leave the thread to itself, without its lock on the process-wide generators: others go on."""
        with self._mutex:
            self.is_left = True
            GLOBAL_GENERATORS.take_from(self._caller)
