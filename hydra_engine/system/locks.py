"""Two locks: one on a folder that ends with its process, and one between threads that can be taken away."""

from __future__ import annotations

import fcntl
import math
import os
import platform
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from hydra_engine.errors import CheckpointError

T = TypeVar("T")

# Turns apart and turns beside wait for each other no longer than this. Then they go on together, and note that.
PATIENCE_S = 2.0
# A turn apart waits no longer than this for a turn beside that calls the user, which may itself wait for anything.
CALL_PATIENCE_S = 0.1


class TakenAway(RuntimeError):
    """The lock was taken away from this thread while it was at work, and nobody waits for the thread any more."""


class Beside:
    """One thread's turn beside others."""

    def __init__(self, had_company: bool, *, is_call: bool = False) -> None:
        self.is_call = is_call
        self.thread = threading.get_ident()
        self.had_company = had_company  # another turn beside overlapped with it
        self.is_in_doubt = False  # a turn apart overlapped with it, and changed what it guards
        self.is_passed = False  # nobody waits for its end any more


class Hold:
    """One thread's turn. `settle` runs what must happen within it: never after its end, nor while another ends it."""

    def __init__(self, mutex: threading.Lock, *, apart: bool) -> None:
        self.thread = threading.get_ident()
        self.put_back: list[Callable[[], None]] = []  # undo its changes; called by whoever takes the lock away
        self.is_over = False
        self.is_apart = apart
        self.number = math.inf  # its place among all turns: those beside that came before it go first
        self.has_begun = False  # if apart: it has waited for them
        self.is_passed = False  # turns beside wait for its end no more
        self.met: list[Beside] = []  # turns that overlapped with it
        self.outside: Any = None  # the first value that it replaced, if it says so
        self._mutex = mutex

    def settle(self, job: Callable[[], None]) -> None:
        """Run `job`, which is short and ours; raises TakenAway instead if the lock was taken away."""
        with self._mutex:
            if self.is_over:
                raise TakenAway(f"thread {threading.current_thread().name!r} came back too late, and was left behind")
            job()


class RevocableLock:
    """A reentrant lock for any thread: `with lock.held() as hold`. `take_from(thread)` ends a hold that hangs.

    It is a lock of the interpreter's, which any thread may release, and a note of who holds it. A turn ends under
    `_mutex`, which is held for moments only: by its own thread, or by the one that takes it away, never by both.

    `with lock.beside() as turn` is for many threads at a time, in turns with those that hold the lock apart. Neither
    kind waits for the other for longer than `PATIENCE_S`, so that a thread that hangs inside stops nobody.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._hold: Hold | None = None
        self._beside: list[Beside] = []
        self._waiting: list[int] = []  # numbers of turns beside that have not begun
        self._number = 0  # the last turn's

    @property
    def is_free(self) -> bool:
        return not self._lock.locked()

    @contextmanager
    def held(self, *, apart: bool = False) -> Iterator[Hold]:
        """Hold it for the body; `apart`: keep out those who work beside, too. A thread that has a hold keeps it."""
        outer = self._hold
        if outer is not None and outer.thread == threading.get_ident():
            assert outer.is_apart or not apart
            yield outer
            return
        taken: list[bool] = []
        hold = Hold(self._mutex, apart=apart)
        try:
            # In one call of C: an exception out of a signal handler finds it taken and noted, or neither.
            taken.extend(islice(iter(self._lock.acquire, None), 1))
            self._hold = hold
            if apart:
                self._part(hold)
            yield hold
        finally:
            with self._mutex:
                if taken and not hold.is_over:
                    self._end(hold)

    def _part(self, hold: Hold) -> None:
        with self._changed:
            hold.number = self._number = self._number + 1
            self._changed.wait_for(lambda: self._is_alone(hold), CALL_PATIENCE_S)
            for each in self._others():
                each.is_passed |= each.is_call
            self._changed.wait_for(lambda: self._is_alone(hold), PATIENCE_S)
            hold.has_begun = True
            hold.met.extend(self._others())
            for each in hold.met:
                each.is_passed = True

    def _is_alone(self, hold: Hold) -> bool:
        return all(each.is_passed for each in self._others()) and all(each > hold.number for each in self._waiting)

    def _others(self) -> list[Beside]:
        return [each for each in self._beside if each.thread != threading.get_ident()]

    @contextmanager
    def beside(self, *, is_call: bool = False) -> Iterator[Beside]:
        """Take a turn beside others, once nobody holds the lock apart; is_call: of a callback, which may take long."""
        turn: list[Beside] = []
        try:
            with self._changed:
                self._wait_beside()
                turn.append(Beside(bool(self._beside), is_call=is_call))
                for each in self._beside:
                    each.had_company = True
                self._beside += turn
                if self._hold is not None and self._hold.is_apart and self._hold.has_begun:
                    self._hold.is_passed = True
                    self._hold.met += turn
            yield turn[0]
        finally:
            with self._changed:
                self._beside = [each for each in self._beside if each not in turn]
                self._changed.notify_all()

    def _wait_beside(self) -> None:
        number = self._number = self._number + 1
        self._waiting.append(number)
        try:
            self._changed.wait_for(lambda: self._may_begin(number), PATIENCE_S)
        finally:
            self._waiting.remove(number)

    def _may_begin(self, number: int) -> bool:
        hold = self._hold
        is_first = hold is not None and not hold.has_begun and number < hold.number
        return hold is None or not hold.is_apart or hold.is_passed or is_first

    def look(self, job: Callable[[Hold | None], T]) -> T:
        """Run `job`, which is short and ours, with the present hold, which cannot begin or end a change meanwhile."""
        with self._mutex:
            return job(self._hold)

    def take_from(self, thread: int | None) -> bool:
        """Take the lock from this thread, which may still be at work, and undo its changes; False: not its holder."""
        with self._changed:
            self._beside = [each for each in self._beside if each.thread != thread]
            self._changed.notify_all()
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
        self._changed.notify_all()


class FolderLock:
    """A lock on a folder, held until `release` or the end of the process, however that ends.

    Raises CheckpointError at once, naming the holder, if another process holds it. This is flock itself: filelock keeps
    it in a forked child before 3.30, and from then on refuses forks of two threads at once, as loaders' workers begin
    (4.2.11 on Python 3.12: 258 of 400 in four threads).
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)
            # A forked child (a loader's worker) would have the lock too, and keep it after its parent was killed.
            os.register_at_fork(after_in_child=partial(_release_inherited, weakref.ref(self)))
        except BlockingIOError as error:
            holder = os.pread(self._descriptor, 1000, 0).decode(errors="replace") or "another process"
            self.release()
            raise CheckpointError(
                f"{path.parent} is in use by {holder}, and one run at a time writes there; end that one, or give this "
                f"one a directory of its own"
            ) from error
        except BaseException:
            self.release()
            raise

    @property
    def is_held(self) -> bool:
        """True until `release`; never in a forked child."""
        return self._descriptor >= 0

    def release(self) -> None:
        """Let others have it; may be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _release_inherited(reference: weakref.ref[FolderLock]) -> None:
    lock = reference()
    if lock is not None:
        lock.release()
