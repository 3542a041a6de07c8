"""Events from every thread to the one that decides, and Ctrl-C as one of them."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Generic, NamedTuple, TypeVar

from hydra_engine.events import StopRequested

T = TypeVar("T")


class Overdue(NamedTuple):
    """Nothing was told until the deadline."""


class Inbox(Generic[T]):
    """What the deciding thread is told, one event at a time: `with inbox as event: ...`. None is lost to Ctrl-C."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[T | StopRequested] = SimpleQueue()
        self._taken: deque[T | StopRequested | Overdue] = deque()
        self.deadline_s = math.inf  # of time.monotonic(): then, `Overdue` is the next event if there is no other
        self._depth = 0  # of events being handled
        self._is_deferred = False  # a second Ctrl-C waits for the end of what is being handled

    def put(self, event: T | StopRequested) -> None:
        """Tell something; from any thread."""
        self._queue.put(event)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is there now."""
        return not self._taken and self._queue.empty()

    def __enter__(self) -> T | StopRequested | Overdue:
        """Wait for the next event, or until the deadline."""
        if not self._taken:
            self._wait()
        self._depth += 1
        return self._taken.popleft()

    def _wait(self) -> None:
        left_s = min(self.deadline_s - time.monotonic(), threading.TIMEOUT_MAX)
        get = partial(self._queue.get, True, None if self.deadline_s == math.inf else max(0.0, left_s))
        try:
            # In one call of C: an exception out of a signal handler strikes before it or after it.
            self._taken.extend(islice(iter(get, None), 1))
        except Empty:
            self._taken.append(Overdue())

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        if self._is_deferred and not self._depth:
            self._is_deferred = False
            raise KeyboardInterrupt

    @contextmanager
    def interrupts(self) -> Iterator[None]:
        """Turn Ctrl-C into an event: an exception could strike anywhere, also in the middle of a decision.

        A second one is the exception that it always is, as soon as the event in hand is through.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        usual = signal.getsignal(signal.SIGINT)
        if usual is not signal.default_int_handler:  # the user's own; it is theirs to decide
            yield
            return

        def second(*_: object) -> None:
            if not self._depth:
                raise KeyboardInterrupt
            self._is_deferred = True

        def first(*_: object) -> None:
            signal.signal(signal.SIGINT, second)
            self.put(StopRequested())

        signal.signal(signal.SIGINT, first)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, usual)
