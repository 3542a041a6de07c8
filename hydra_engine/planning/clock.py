"""Simulated time, and what is shared in it: cores, threads, links."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import TypeAlias

Done: TypeAlias = "Callable[[], None]"


class SimulatedTime:
    """A clock that goes from one end of a job to the next."""

    def __init__(self, cores: float | None) -> None:
        """`cores`: shared by all that computes; None: enough."""
        self.now_s = 0.0
        self._cores = Cores(cores)
        self._timers: list[tuple[float, int, Done]] = []
        self._serial = count()

    def wait(self, seconds: float, done: Done) -> None:
        """Begin a job that takes no core."""
        heappush(self._timers, (self.now_s + seconds, next(self._serial), done))

    def compute(self, seconds: float, done: Done) -> None:
        """Begin a job that takes a core."""
        self._cores.start(self.now_s, seconds, done)

    def go_on(self) -> None:
        """To the end of the job that ends next; what was to be done then is done."""
        timer_s, cores_s = self._timers[0][0] if self._timers else math.inf, self._cores.next_s
        assert min(timer_s, cores_s) < math.inf, "nothing is under way"
        self.now_s = max(self.now_s, min(timer_s, cores_s))
        (heappop(self._timers)[2] if timer_s <= cores_s else self._cores.pop())()


class Cores:
    """Jobs that share cores evenly: with n of them on c cores each goes at min(1, c / n) of its speed.

    In virtual time, which goes at that speed, every job takes its own seconds; so jobs end in the order in which they
    would, and nothing is reckoned anew when one comes or goes.
    """

    def __init__(self, cores: float | None) -> None:
        self._cores = math.inf if cores is None else cores
        self._jobs: list[tuple[float, int, Done]] = []
        self._serial = count()
        self._virtual_s = 0.0
        self._now_s = 0.0

    @property
    def _rate(self) -> float:
        return min(1.0, self._cores / len(self._jobs)) if self._jobs else 1.0

    def _advance(self, now_s: float) -> None:
        self._virtual_s += (now_s - self._now_s) * self._rate
        self._now_s = now_s

    def start(self, now_s: float, seconds: float, done: Done) -> None:
        """Begin a job."""
        self._advance(now_s)
        heappush(self._jobs, (self._virtual_s + seconds, next(self._serial), done))

    @property
    def next_s(self) -> float:
        """When the next job ends, if nothing changes."""
        if not self._jobs:
            return math.inf
        return self._now_s + max(0.0, self._jobs[0][0] - self._virtual_s) / self._rate

    def pop(self) -> Done:
        """The job that ends next."""
        self._advance(self.next_s)
        end_s, _, done = heappop(self._jobs)
        self._virtual_s = end_s  # not what adding up made of it
        return done


class Queue:
    """Jobs that so many servers take in order."""

    def __init__(self, start: Callable[[float, Done], None], num_servers: int = 1) -> None:
        self._start = start  # (seconds, what to call then)
        self._num_free = num_servers
        self._waiting: deque[tuple[float, Done]] = deque()
        self.busy_s = 0.0

    def submit(self, seconds: float, done: Done) -> None:
        """Queue a job."""
        self._waiting.append((seconds, done))
        self._pump()

    def _pump(self) -> None:
        while self._num_free and self._waiting:
            seconds, done = self._waiting.popleft()
            self.busy_s += seconds
            if seconds == 0:  # at once, and without an event of its own
                done()
                continue
            self._num_free -= 1
            self._start(seconds, partial(self._end, done))

    def _end(self, done: Done) -> None:
        self._num_free += 1
        done()
        self._pump()


class Link:
    """Copies in one direction, one at a time: urgent ones first, which others stop for in the middle."""

    def __init__(self, time: SimulatedTime, *, computes: bool) -> None:
        self._time = time
        self._computes = computes  # copies keep a core busy; what has begun is then finished
        self._waiting: tuple[deque[tuple[float, Done]], deque[tuple[float, Done]]] = (deque(), deque())
        self._current: tuple[float, Done, bool] | None = None  # (end, what to call then, whether it stops for others)
        self.busy_s = 0.0

    def submit(self, seconds: float, done: Done, *, urgent: bool = False) -> None:
        """Queue a copy; one without bytes takes no turn."""
        if seconds == 0:
            done()
            return
        self.busy_s += seconds
        if urgent and self._current is not None and self._current[2]:
            end_s, stopped, _ = self._current
            self._waiting[False].appendleft((end_s - self._time.now_s, stopped))
            self._current = None
        self._waiting[urgent].append((seconds, done))
        self._pump()

    def _pump(self) -> None:
        if self._current is None and any(self._waiting):
            urgent = bool(self._waiting[True])
            seconds, done = self._waiting[urgent].popleft()
            current = self._current = (self._time.now_s + seconds, done, not (urgent or self._computes))
            start = self._time.compute if self._computes else self._time.wait
            start(seconds, partial(self._end, current))

    def _end(self, copy: tuple[float, Done, bool]) -> None:
        if self._current is not copy:
            return  # it was stopped since
        self._current = None
        copy[1]()
        self._pump()
