"""The thread that shows a run to its observer. It only reads.

    the thread that decides             the observer's thread
    look() -> RunProgress    <--------  asks for a look, every quarter of a second, say
                             -------->  shows what was seen: a terminal that is stopped stops nobody

Showing takes at most a hundredth of a core's time: where it takes longer than expected, it is done less often. Whatever
goes wrong with it ends it, and nothing else.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module

from hydra_engine.progress.lines import PlainLines
from hydra_engine.progress.state import DeviceProgress, Observer, RunProgress, TaskProgress
from hydra_engine.texts import warn

DISPLAY = "hydra_engine.display"  # has `observer_of(stream)`; the engine works without it
MOST_SHARE = 0.01  # of a core's time, for showing
STUCK_S = 2.0  # to wait at the end for a terminal that takes nothing
WINDOW_S = 30.0  # steps per second are those of so long, or of the last two steps where these took longer
FLOW_S = 5.0  # bytes per second of a device are those of so long
AT_REST_S = 10.0  # who has not computed for so long is active no more


def usual_observer() -> Observer | None:
    """Return the display where it can be imported, and stdout is a terminal or a notebook; else lines."""
    stream = sys.stdout
    try:
        if stream is not None and (stream.isatty() or "IPython" in sys.modules):
            with suppress(ImportError):
                found: Observer | None = import_module(DISPLAY).observer_of(stream)
                return found or PlainLines()
        return None if stream is None else PlainLines()
    except Exception as error:  # the stream is the user's
        _tell(error)
        return None


class Watch:
    """Shows a run to an observer, in a thread; without one it does nothing."""

    def __init__(
        self, observer: Observer | None, look: Callable[[], RunProgress], ask: Callable[[Callable[[], None]], None]
    ) -> None:
        """`look`: tells how the run stands. ask: has a job, such as a look, done by the thread that may look."""
        self._look = look
        self._ask = ask
        self._observer = observer
        self._seen: RunProgress | None = None
        self._seen_s = 0.0  # when, by time.monotonic()
        self._is_new = threading.Event()  # what was seen was not shown
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Begin to show the run."""
        if self._observer is not None:
            # A daemon: a process that ends must not wait for a terminal.
            self._thread = threading.Thread(
                target=self._show, args=(self._observer,), name="hydra-observer", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Show how the run has ended, join the thread, and refer to the run no more; in the thread that decides."""
        if self._observer is not None and self._thread is not None:
            self._take()
            self._is_over.set()
            self._thread.join(STUCK_S)
            try:
                self._observer.leave()
            except Exception as error:
                _tell(error)
        self._is_over.set()
        self._observer = self._thread = self._seen = None
        del self._look, self._ask

    def _take(self) -> None:
        """Look, in the thread that decides."""
        if self._is_over.is_set():
            return
        try:
            self._seen, self._seen_s = self._look(), time.monotonic()
        except Exception as error:
            self._give_up(error)
        self._is_new.set()

    def _show(self, observer: Observer) -> None:
        rates = _Rates()
        try:
            while not self._is_over.is_set():
                self._is_new.clear()
                self._ask(self._take)
                # Who decides may be long at something: then figures stay, and the time goes on.
                self._is_new.wait(observer.period_s)
                begun_s = time.thread_time()
                if self._seen is not None and not self._is_over.is_set():
                    now_s = self._seen.now_s + time.monotonic() - self._seen_s
                    observer.show(rates.added(self._seen._replace(now_s=now_s)))
                pause_s = max(observer.period_s, (time.thread_time() - begun_s) / MOST_SHARE)
                self._is_over.wait(pause_s)
            if self._seen is not None:
                observer.close(rates.added(self._seen, is_last=True))
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Show nothing more."""
        self._is_over.set()
        if self._observer is not None:
            with suppress(Exception):
                self._observer.leave()
        _tell(error)


def _tell(error: Exception) -> None:
    warn(f"hydra_engine: the display has ended, and training goes on: {type(error).__name__}: {error}")


class _Steps:
    """A task's steps at the moments at which they grew."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()
        self._active_s = -math.inf

    def add(self, now_s: float, task: TaskProgress) -> TaskProgress:
        """Take in how the task stands now, and return that with its rate."""
        marks = self._marks
        if not marks or marks[-1][1] != task.steps:
            self._active_s = now_s if marks else self._active_s
            marks.append((now_s, task.steps))
        while len(marks) > 2 and marks[1][0] < now_s - WINDOW_S:
            marks.popleft()
        if task.doing.computes:
            self._active_s = now_s
        per_s = None if task.doing.is_over else self._per_s(now_s)
        return task._replace(steps_per_s=per_s, is_active=now_s - self._active_s <= AT_REST_S)

    def _per_s(self, now_s: float) -> float | None:
        """Return its rate; lower than what was seen where a step is overdue. None: unknown."""
        (first_s, first), (last_s, last) = self._marks[0], self._marks[-1]
        if last_s <= first_s or last < first:  # there was one step, or it began again
            return None
        per_s = (last - first) / (last_s - first_s)
        return per_s if (now_s - last_s) * per_s <= 1 else (last - first + 1) / (now_s - first_s)


class _Rates:
    """The past of a run, as far as rates need it."""

    def __init__(self) -> None:
        self._steps: dict[str, _Steps] = {}
        self._past: deque[tuple[float, Mapping[str, DeviceProgress]]] = deque()

    def added(self, run: RunProgress, *, is_last: bool = False) -> RunProgress:
        """Take in what is seen now, and return it with rates."""
        now_s, past = run.now_s, self._past
        tasks = [self._steps.setdefault(task.name, _Steps()).add(now_s, task) for task in run.tasks]
        past.append((now_s, {device.name: device for device in run.devices}))
        while len(past) > 2 and past[1][0] <= now_s - FLOW_S:
            past.popleft()
        before_s, before = (0.0, past[0][1]) if is_last else past[0]
        for_s = max(now_s - before_s, 1e-9)

        def with_rates(now: DeviceProgress) -> DeviceProgress:
            then = now._replace(loaded_bytes=0, stored_bytes=0, busy_s=0.0) if is_last else before.get(now.name, now)
            return now._replace(
                loaded_per_s=(now.loaded_bytes - then.loaded_bytes) / for_s,
                stored_per_s=(now.stored_bytes - then.stored_bytes) / for_s,
                busy_share=min(1.0, (now.busy_s - then.busy_s) / for_s),
            )

        return RunProgress(now_s, tasks, [with_rates(device) for device in run.devices])
