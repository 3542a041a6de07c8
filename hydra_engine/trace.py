"""Spans and counters of one run. No other module measures its time."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import starmap
from typing import NamedTuple

# The memory of a run of days must not grow: totals are kept for ever, of single spans only the last MAX_SPANS.
MAX_SPANS = 100_000


class Span(NamedTuple):
    """One job of one lane, with its times in seconds since the trace began."""

    device: str
    lane: str
    label: str
    start_s: float
    end_s: float


class MemoryUse(NamedTuple):
    """The bytes in use on a device, from a moment on: seconds since the trace began."""

    device: str
    at_s: float
    used_bytes: int


# The lane of spans of updates, on the host and on a device.
UPDATE = "update"


class Timing(NamedTuple):
    """Seconds that one unit took."""

    launch_s: float  # in which the interpreter launched the unit's kernels
    device_s: float  # in which the device computed them


class Trace:
    """Collects spans and byte counters from every thread of a run."""

    def __init__(self) -> None:
        self._origin_s = time.perf_counter()
        self._lock = threading.Lock()
        # Plain tuples, which whoever asks gets as spans: most are never asked for.
        self._spans: deque[tuple[str, str, str, float, float]] = deque(maxlen=MAX_SPANS)
        self._memory: deque[tuple[str, float, int]] = deque(maxlen=MAX_SPANS)
        self._busy_s: dict[tuple[str, str], float] = defaultdict(float)
        self._bytes: dict[tuple[str, str], int] = defaultdict(int)
        self._work: dict[str | None, tuple[float, int, int]] = defaultdict(lambda: (0.0, 0, 0))  # by task, None for all

    def now_s(self) -> float:
        return time.perf_counter() - self._origin_s

    @contextmanager
    def span(self, device: str, lane: str, label: str) -> Iterator[None]:
        """Record the body as one span, also when it raises."""
        start_s = self.now_s()
        try:
            yield
        finally:
            self.add(device, lane, label, start_s)

    def add(self, device: str, lane: str, label: str, start_s: float) -> None:
        """Record a span from `start_s` to now."""
        end_s = time.perf_counter() - self._origin_s
        with self._lock:
            self._spans.append((device, lane, label, start_s, end_s))
            self._busy_s[device, lane] += end_s - start_s

    def count_bytes(self, device: str, lane: str, num_bytes: int) -> None:
        with self._lock:
            self._bytes[device, lane] += num_bytes

    def note_memory(self, device: str, used_bytes: int) -> None:
        """Record the bytes that are in use on a device from now on."""
        self._memory.append((device, time.perf_counter() - self._origin_s, used_bytes))  # atomic

    def busy_s(self, device: str, lane: str) -> float:
        with self._lock:
            return self._busy_s[device, lane]

    def count_work(self, task: str, *, computed_s: float = 0.0, loaded_bytes: int = 0, stored_bytes: int = 0) -> None:
        """Count what devices do for a task."""
        with self._lock:
            for each in (task, None):
                before_s, loaded, stored = self._work[each]
                self._work[each] = before_s + computed_s, loaded + loaded_bytes, stored + stored_bytes

    def work(self, task: str | None) -> tuple[float, int, int]:
        """Return seconds that devices have computed for a task, bytes that they loaded, and stored; None: for all."""
        with self._lock:
            return self._work[task]

    def bytes_moved(self, device: str, lane: str) -> int:
        with self._lock:
            return self._bytes[device, lane]

    def spans(self) -> list[Span]:
        """Return the last spans, in the order of their ends."""
        with self._lock:
            return list(starmap(Span, self._spans))

    def memory(self) -> list[MemoryUse]:
        """Return the last changes of the memory in use, in the order of their moments."""
        return list(starmap(MemoryUse, self._memory.copy()))
