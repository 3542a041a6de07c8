"""A lock that can be taken away from a thread that does not come back with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice


class TakenAway(RuntimeError):
    """The lock was taken away from this thread while it was at work: it was left behind, and nobody waits for it."""


class Hold:
    """One thread's turn. `settle` runs what must happen within it: never after its end, nor while another ends it."""

    def __init__(self, mutex: threading.Lock) -> None:
        self.thread = threading.get_ident()
        self.put_back: list[Callable[[], None]] = []  # of what it has replaced; called by whoever takes the lock away
        self.is_over = False
        self._mutex = mutex

    def settle(self, job: Callable[[], None]) -> None:
        """Run `job`, short and of ours, unless the lock was taken away; then raises TakenAway."""
        with self._mutex:
            if self.is_over:
                raise TakenAway(f"thread {threading.current_thread().name!r} came back too late, and was left behind")
            job()


class RevocableLock:
    """`with lock.held() as hold`: reentrant, for any thread; `take_from(thread)`: from a thread that hangs inside.

    A lock of the interpreter's that any thread may release; on top of it, who holds it. Under `_mutex`, which is held
    for moments only, a turn ends: by its own thread, or by the one that takes it away, never by both.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mutex = threading.Lock()
        self._hold: Hold | None = None

    @property
    def is_free(self) -> bool:
        """Whether nobody holds it now."""
        return not self._lock.locked()

    @contextmanager
    def held(self) -> Iterator[Hold]:
        """Hold it for the body. A thread that holds it already goes on with the hold that it has."""
        outer = self._hold
        if outer is not None and outer.thread == threading.get_ident():
            yield outer
            return
        taken: list[bool] = []
        hold = Hold(self._mutex)
        try:
            # In one call of C: an exception out of a signal handler finds it taken and noted, or neither.
            taken.extend(islice(iter(self._lock.acquire, None), 1))
            self._hold = hold
            yield hold
        finally:
            with self._mutex:
                if taken and not hold.is_over:
                    self._end(hold)

    def take_from(self, thread: int | None) -> bool:
        """Take it away from the thread of this identifier, and put back what that has replaced; False: not its holder.

        That thread may still be at work, and what it does outside of `settle` cannot be prevented.
        """
        with self._mutex:
            hold = self._hold
            if hold is None or hold.is_over or hold.thread != thread:
                return False
            while hold.put_back:
                hold.put_back.pop()()
            self._end(hold)
            return True

    def _end(self, hold: Hold) -> None:
        hold.is_over = True
        self._hold = None
        self._lock.release()
