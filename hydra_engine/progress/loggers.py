"""Threads of loggers: each has one with a bounded queue, so that training waits for none."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from hydra_engine.tasks import Logger, StepReport, TaskStart, ValidationReport
from hydra_engine.texts import warn

MOST_WAITING = 10_000  # calls of a logger; each takes a few hundred bytes
MOST_FAILURES = 3
# What comes in this time is passed on together: a thread that woke for each step would take the interpreter from those
# that decide and compute, 80 us each time.
GATHER_S = 0.1
CLOSE_S = 10.0  # at the end of a run: what sends SIGTERM often kills after 30 s


class _Call(NamedTuple):
    """One call of a logger."""

    method: str
    task: str
    arguments: tuple[Any, ...]
    about: str  # for messages


class LoggerThread:
    """Calls one logger, in a run. A daemon: where a call does not return, it is left behind at the run's end."""

    def __init__(self, logger: Logger, name: str) -> None:
        self.logger = logger
        self.messages: list[str] = []
        self._kind = type(logger).__name__
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._lock = threading.Lock()  # of what is counted below
        self._num_lost = 0  # values that found the queue full
        self._num_failed = 0
        self._not_begun: set[str] = set()  # tasks at whose beginning the logger raised: it is told nothing more of them
        self._is_over = False  # dropped, or left behind: no more calls
        self._hurried = threading.Event()  # what waits is to be passed on at once
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def put(self, call: _Call, *, may_be_lost: bool) -> None:
        """Let the logger be called. From any thread; returns at once."""
        if self._is_over:
            return
        if may_be_lost and self._queue.qsize() >= MOST_WAITING:
            with self._lock:
                self._num_lost += 1
        else:
            self._queue.put(call)

    def end(self) -> None:
        """Let the logger be closed, after all that waits."""
        self._queue.put(None)
        self._hurried.set()

    def hurry(self) -> None:
        """Let the logger be called at once with what waits."""
        self._hurried.set()

    def join(self, deadline_s: float) -> bool:
        """Wait until it is closed, by `time.monotonic()` until then; False: it was left behind."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        is_left = self._thread.is_alive()
        if is_left:
            self._is_over = True
            waiting = max(0, self._queue.qsize() - 1)
            self._tell(
                f"it did not return within {CLOSE_S:g} s of the run's end, and {waiting} calls that waited were not "
                f"made; its thread {self._thread.name!r} was left behind"
            )
        if self._num_lost:
            self._tell(
                f"{self._num_lost} values were lost, limit: {MOST_WAITING} that wait; log to a faster place, or fewer"
            )
        return not is_left

    def _serve(self) -> None:
        while (call := self._next()) is not None and not self._is_over:
            begins = call.method == "begin_task"
            if call.task in self._not_begun and not begins:
                continue
            self._not_begun.discard(call.task)
            try:
                getattr(self.logger, call.method)(*call.arguments)
            except BaseException as error:  # SystemExit, too: it is the logger's, and not the run's
                if begins:
                    self._not_begun.add(call.task)
                    self._tell(f"raised at {call.about}, which is not logged: {_line(error)}")
                else:
                    self._failed(call.about, error)
        try:
            self.logger.close()
        except BaseException as error:
            if not self._is_over:
                self._tell(f"raised as it was closed: {_line(error)}")

    def _next(self) -> _Call | None:
        """Return the next call; once all are made, wait for one, and then for others."""
        try:
            return self._queue.get_nowait()
        except Empty:
            call = self._queue.get()
            self._hurried.wait(GATHER_S)
            self._hurried.clear()  # all that it was set for is in the queue, which is emptied now
            return call

    def _failed(self, about: str, error: BaseException) -> None:
        self._num_failed += 1
        if self._num_failed < MOST_FAILURES:
            self._tell(f"raised at {about}, whose values are not logged: {_line(error)}")
        elif not self._is_over:
            self._is_over = True
            self._tell(f"raised {MOST_FAILURES} times and is dropped for this run, from {about} on: {_line(error)}")

    def _tell(self, text: str) -> None:
        message = f"logger {self._kind}: {text}"
        self.messages.append(message)
        warn(f"hydra_engine: {message}")


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


class RunLoggers:
    """The loggers of one run, told what happens in it as `Logger` is; from any thread, and nobody waits."""

    def __init__(self, loggers: Sequence[Logger] = ()) -> None:
        self._threads = [LoggerThread(each, f"hydra-logger-{k}") for k, each in enumerate(loggers)]
        self._begun: set[str] = set()  # tasks, whose end is to be told
        self.left_behind: list[Logger] = []  # in whose threads a call has not returned

    def begin(self, start: TaskStart) -> None:
        self._begun.add(start.task)
        self._put("begin_task", start.task, (start,), f"the beginning of {start.task}")

    def step(self, step: StepReport) -> None:
        self._put("log_step", step.task, (step,), f"{step.task}, step {step.step}", may_be_lost=True)

    def validation(self, validation: ValidationReport) -> None:
        about = f"{validation.task}, validation after step {validation.step}"
        self._put("log_validation", validation.task, (validation,), about, may_be_lost=True)

    def end(self, task: str, status: str) -> None:
        """A task is over, or paused."""
        if task in self._begun:
            self._begun.remove(task)
            self._put("end_task", task, (task, status), f"the end of {task}")

    def hurry(self) -> None:
        """A checkpoint is being written: what it has should be logged by then, in case the process is killed."""
        for each in self._threads:
            each.hurry()

    def close(self) -> list[str]:
        """Close all loggers side by side, with one deadline; return what went wrong in the run. Once is enough."""
        threads, self._threads = self._threads, []
        deadline_s = time.monotonic() + CLOSE_S
        for each in threads:
            each.end()
        self.left_behind += [each.logger for each in threads if not each.join(deadline_s)]
        return [message for each in threads for message in each.messages]

    def _put(
        self, method: str, task: str, arguments: tuple[Any, ...], about: str, *, may_be_lost: bool = False
    ) -> None:
        for each in self._threads:
            each.put(_Call(method, task, arguments, about), may_be_lost=may_be_lost)
