"""Threads of a device that work at the same time, the two directions of an emulated link, and results to wait for."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class Promise(Generic[T]):
    """Kept or broken once, by one thread; any other may wait for it."""

    __slots__ = ("_error", "_lock", "_value", "is_done")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.is_done = False  # nobody has to wait any more
        self._value: T | None = None
        self._error: BaseException | None = None

    def keep(self, value: T) -> None:
        self._value = value
        self.is_done = True
        self._lock.release()

    def give_up(self, error: BaseException) -> None:
        self._error = error
        self.is_done = True
        self._lock.release()

    def fulfil(self, work: Callable[[], T]) -> None:
        """Keep it with what `work` returns, or give it up for what that raises."""
        try:
            self.keep(work())
        except BaseException as error:
            self.give_up(error)

    @property
    def has_result(self) -> bool:
        return self.is_done and self._error is None

    def is_kept(self) -> bool:
        """Wait. Return True if there is a result."""
        with self._lock:
            return self._error is None

    def result(self) -> T:
        """Wait for the result. Raises the reason why there is none."""
        with self._lock:
            pass
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # T may be None


LOAD, COMPUTE, STORE = LANES = ("load", "compute", "store")
# What units start from comes through a queue of its own, or it would wait behind the shard of the unit after; in traces
# it is part of the load lane.
INPUT = "input"
QUEUES = (LOAD, INPUT, COMPUTE, STORE)


class Lane:
    """A thread that works off a queue of jobs in order. Jobs handle their own errors."""

    def __init__(self, name: str, num_threads: int, inside: Callable[[], AbstractContextManager[Any]] = nullcontext):
        """Start the thread, which lives inside `inside()`; its jobs' operations have `num_threads` threads."""
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        entered: Promise[None] = Promise()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True, args=(num_threads, inside, entered))
        self._thread.start()
        entered.result()

    @property
    def is_here(self) -> bool:
        """The caller is one of its jobs."""
        return threading.current_thread() is self._thread

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _work(self, num_threads: int, inside: Callable[[], AbstractContextManager[Any]], entered: Promise[Any]) -> None:
        # A new thread inherits the last value that any thread set, and bits depend on it.
        torch.set_num_threads(num_threads)
        with ExitStack() as stack:
            entered.fulfil(lambda: stack.enter_context(inside()))
            if not entered.is_kept():  # whoever began it is told: nobody waits for its jobs
                return
            while (job := self._jobs.get()) is not None:
                try:
                    job()
                except BaseException:  # jobs handle their own; without its thread, whoever waits would for ever
                    traceback.print_exc()
                del job  # or the last job of a queue would keep its unit's tensors alive until the next one comes


def open_lanes(
    name: str, num_threads: int, inside: Callable[[str], AbstractContextManager[Any]] = lambda _: nullcontext()
) -> dict[str, Lane]:
    """Open a device's lanes, by the names of `QUEUES`, each in `inside(its name)`; all, or none where one fails."""
    lanes: dict[str, Lane] = {}
    with ExitStack() as begun:
        for lane in QUEUES:
            lanes[lane] = Lane(f"{name}-{lane}", num_threads, partial(inside, lane))
            begun.callback(lanes[lane].close)
        begun.pop_all()
    return lanes


class EmulatedLink:
    """One direction of an emulated link: one copy at a time; urgent ones, which units start from, stop the others."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._changed = threading.Condition()
        self._is_busy = False
        self._num_urgent = 0

    def spend(self, num_bytes: int, spent_s: float, *, urgent: bool) -> None:
        """Wait as long as the link takes for these bytes, less the seconds spent on them already."""
        left_s = num_bytes / self._bytes_per_s - spent_s
        with self._changed:
            self._num_urgent += urgent
            if urgent:
                self._changed.notify_all()  # whoever is on the link stops
            while left_s > 0:
                self._changed.wait_for(lambda: not self._is_busy and (urgent or not self._num_urgent))
                self._is_busy = True
                end_s = time.perf_counter() + left_s
                while (left_s := end_s - time.perf_counter()) > 0 and (urgent or not self._num_urgent):
                    self._changed.wait(left_s)
                self._is_busy = False
                self._changed.notify_all()
            self._num_urgent -= urgent
            self._changed.notify_all()
