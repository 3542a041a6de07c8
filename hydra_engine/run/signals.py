"""Events from every thread to the one that decides, deadlines, and the signals that end a run: Ctrl-C and SIGTERM."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Generic, NamedTuple, TypeVar

from hydra_engine.schedule import StopRequested
from hydra_engine.system import is_interactive

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

# The dispositions that we replace. Any other one is the user's own, and theirs to decide; or "ignore", of nohup.
_USUAL: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}

# A signal that comes so soon after the first is that one again: a terminal or `timeout` signals a group of processes,
# and a wrapper in it passes the signal on. Nobody has read by then what the first one said.
ECHO_S = 1.0

_STDERR = 2


class Overdue(NamedTuple):
    """Nothing was told until the deadline."""


class Deadlines(Generic[K]):
    """Deadlines of the answers that are waited for, by name.

    An answer that comes does not move `next_s`: one look too early is cheaper than a search at each.
    """

    def __init__(self) -> None:
        self._by_name: dict[K, float] = {}
        self.next_s = math.inf  # of time.monotonic(): no later than the first of them

    def set(self, name: K, seconds: float) -> None:
        """An answer is waited for, so long from now."""
        self._by_name[name] = time.monotonic() + seconds
        self.next_s = min(self.next_s, self._by_name[name])

    def drop(self, name: K) -> None:
        """It has come."""
        self._by_name.pop(name, None)

    def take_due(self) -> list[K]:
        """Whose time is up; they are waited for no more."""
        now_s = time.monotonic()
        due = [name for name, deadline_s in self._by_name.items() if deadline_s <= now_s]
        for name in due:
            del self._by_name[name]
        self.next_s = min(self._by_name.values(), default=math.inf)
        return due


class Inbox(Generic[T]):
    """Events, handled one at a time by whoever decides: `with inbox as event: ...`. None is lost to Ctrl-C.

    They come in order, but a stop comes before all that wait: SIGTERM to a group of processes ends a loader's workers
    too, and that the loader failed may be told before the signal is.

    One thread waits for events. Another one that has just told something may handle it by itself (`help`), so that
    nobody has to be woken: `turn` is held by whoever handles an event, and only who holds it takes one.
    """

    def __init__(self) -> None:
        self.turn = threading.RLock()  # a run that predicts handles events within one
        self.deadline_s = math.inf  # of time.monotonic(): then, `Overdue` is the next event if there is no other
        self._events: deque[T | StopRequested] = deque()
        self._asleep = threading.Lock()  # released to wake the thread that waits
        self._asleep.acquire()
        self._asleep_until_s = math.inf  # of time.monotonic()
        self._is_stop_put = False  # and not moved ahead of the others
        self._handle: Callable[[T], None] | None = None  # of those who help; None: nobody does
        self._kinds: tuple[type[T], ...] = ()
        self._depth = 0  # of events being handled by the thread that waits for them
        self._is_deferred = False  # an interrupt waits for the end of what is being handled

    def put(self, event: T | StopRequested) -> None:
        """Tell something; from any thread, and from a signal's handler."""
        self.leave(event)
        self._wake()

    def leave(self, event: T | StopRequested) -> None:
        """Tell something without waking anybody: the caller calls `help` soon."""
        self._events.append(event)
        if isinstance(event, StopRequested):
            self._is_stop_put = True

    def let_help(self, handle: Callable[[T], None], kinds: tuple[type[T], ...]) -> None:
        """Let `help` handle events of these kinds, until `end_help`. `handle` does not raise."""
        self._handle, self._kinds = handle, kinds

    def help(self) -> None:
        """Handle events in the calling thread as long as they are of its kinds, unless another thread is at it.

        Whatever is left then is for the thread that waits.
        """
        if self._handle is not None and self.turn.acquire(blocking=False):
            try:
                while self._handle is not None and self._events and not self._is_stop_put:
                    event = self._events[0]
                    if not isinstance(event, self._kinds):
                        break
                    self._events.popleft()
                    self._handle(event)
                    del event  # it may be long until the next
            finally:
                self.turn.release()
        if self._events or self.deadline_s < self._asleep_until_s:
            self._wake()

    def end_help(self) -> None:
        """Leave all events to the thread that waits for them, from now on."""
        with self.turn:
            self._handle = None

    def _wake(self) -> None:
        with suppress(RuntimeError):  # it is awake, or somebody else wakes it
            self._asleep.release()

    @property
    def is_empty(self) -> bool:
        """True if no event is there now."""
        return not self._events

    def __enter__(self) -> T | StopRequested | Overdue:
        """Wait for the next event, or until the deadline, and for one's turn."""
        while True:
            is_in_time = bool(self._events) or self._wait()
            self._depth += 1
            self.turn.acquire()
            if self._is_stop_put:
                self._is_stop_put = False
                taken = [self._events.popleft() for _ in range(len(self._events))]  # others may be told meanwhile
                taken.sort(key=lambda event: not isinstance(event, StopRequested))
                self._events.extendleft(reversed(taken))
            if self._events:
                return self._events.popleft()
            if not is_in_time:
                return Overdue()
            self.__exit__()  # another thread has handled it

    def _wait(self) -> bool:
        """Wait until somebody wakes this thread; False: until the deadline."""
        self._asleep_until_s = self.deadline_s
        if self.deadline_s == math.inf:
            return self._asleep.acquire()
        left_s = min(self.deadline_s - time.monotonic(), threading.TIMEOUT_MAX)
        return self._asleep.acquire(timeout=max(0.0, left_s))

    def __exit__(self, *exc: object) -> None:
        self.turn.release()
        self._depth -= 1
        if self._is_deferred and not self._depth:
            self._is_deferred = False
            raise KeyboardInterrupt

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt, but not before the event in hand is through; from a signal's handler."""
        if not self._depth:
            raise KeyboardInterrupt
        self._is_deferred = True


class Signals:
    """Ctrl-C (SIGINT) and SIGTERM, while the main thread is in `with signals:`.

    The first one is raised, as KeyboardInterrupt or SystemExit(143): at once, but within `deferred()` not before its
    end; a run that works meanwhile (`tell`) is told to stop, since an exception could strike in the middle of a
    decision. Whatever else goes wrong meanwhile, it is raised at the end of the block, if it was not before.

    A second one, `ECHO_S` later or more, ends the process, with exit code 128 + its number; in an interactive session,
    where Ctrl-C is not meant to end it, a second Ctrl-C is a KeyboardInterrupt. Python runs handlers between two
    operations of the main thread: a call into a library that does not return holds up both.

    In other threads than the main one, and where a signal is handled or ignored by the user's wish, nothing changes.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._first_s = 0.0  # by time.monotonic()
        self._deferrals = 0
        self._inbox: Inbox[Any] | None = None
        self._installed: list[signal.Signals] = []
        self._process = os.getpid()

    def __enter__(self) -> Signals:
        self._first, self._process = None, os.getpid()
        if threading.current_thread() is threading.main_thread():
            try:
                for number, usual in _USUAL.items():
                    if signal.getsignal(number) is usual:
                        self._installed.append(number)
                        signal.signal(number, self._handle)
            except BaseException:
                self._put_back()
                raise
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        self._put_back()
        if not isinstance(error, (KeyboardInterrupt, SystemExit)):
            self.raise_first()

    def _put_back(self) -> None:
        while self._installed:
            signal.signal(self._installed[-1], _USUAL[self._installed[-1]])
            self._installed.pop()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer signals to the end of the block; whoever works there sees to an early end."""
        self._deferrals += 1
        try:
            with _children_unheard(lambda: self._first == signal.SIGTERM):
                yield
        finally:
            self._deferrals -= 1

    def tell(self, inbox: Inbox[Any]) -> None:
        """From now on, the first signal is an event, StopRequested; also one that came already."""
        self._inbox = inbox
        if self._first is not None:
            inbox.put(StopRequested())

    def raise_first(self) -> None:
        """Raise the signal that came, if one did."""
        if self._first == signal.SIGTERM:
            raise SystemExit(128 + self._first)
        if self._first is not None:
            raise KeyboardInterrupt  # uncaught, it ends Python as SIGINT does: a shell shows 130

    def _handle(self, number: int, _: object) -> None:
        if os.getpid() != self._process:
            self._handle_in_child(number)
        elif self._first is None:
            self._first, self._first_s = number, time.monotonic()
            if not self._deferrals:
                self.raise_first()
            _say(number, "what computes is finished, and what is to be saved is saved; another signal cuts that off")
            if self._inbox is not None:
                self._inbox.put(StopRequested())
        elif time.monotonic() - self._first_s < ECHO_S:
            pass
        elif number != signal.SIGINT or not is_interactive():
            _say(number, "the second signal, so nothing more is finished or saved")
            os._exit(128 + number)
        elif self._inbox is not None:
            self._inbox.interrupt()
        else:
            raise KeyboardInterrupt

    def _handle_in_child(self, number: int) -> None:
        """A process that was forked meanwhile, a loader's, has our handlers; there, SIGTERM ends it as ever.

        A first Ctrl-C, which a terminal sends to all, it survives: its owner still wants what it works on.
        """
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self._first == number:
            raise KeyboardInterrupt
        self._first = number


@contextmanager
def _children_unheard(for_good: Callable[[], bool]) -> Iterator[None]:
    """DataLoader has the death of a worker process raised in the main thread, whatever that does just then.

    SIGTERM to a group of processes, from `timeout` or torchrun, ends workers too. The thread that reads finds out by
    itself. Also after the block where `for_good` says so then: the process ends, and they may die later than that.
    https://docs.pytorch.org/docs/stable/data.html (torch/utils/data/_utils/signal_handling.py)
    """
    usual = signal.getsignal(signal.SIGCHLD)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        with suppress(RuntimeError):
            usual(number, frame)

    signal.signal(signal.SIGCHLD, handle)
    try:
        yield
    finally:
        is_main = threading.current_thread() is threading.main_thread()  # a generator may be closed by another one
        if is_main and signal.getsignal(signal.SIGCHLD) is handle and not for_good():
            signal.signal(signal.SIGCHLD, usual)


def _say(number: int, text: str) -> None:
    with suppress(OSError):  # not to sys.stderr, in the middle of whose work we may be
        os.write(_STDERR, f"hydra_engine: {signal.Signals(number).name}: {text}\n".encode())
