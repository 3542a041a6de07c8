"""Calls a task's callbacks: in a thread of their own, one call at a time, in the order in which things happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from hydra_engine.callbacks import Callback
from hydra_engine.errors import StopTask
from hydra_engine.events import Event, Failed, TaskStopped
from hydra_engine.randomness import GLOBAL_GENERATORS
from hydra_engine.report import TaskReport

Call: TypeAlias = "Callable[[Callback], None]"


class Notifier:
    """Tells one task's callbacks what happened, until one of them ends the task; the task's end is told all the same.

    The thread is the caller's, and one for all tasks. What a callback raises goes to `put` as an event.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        report: TaskReport,
        thread: ThreadPoolExecutor,
        put: Callable[[Event], None],
    ) -> None:
        self._callbacks = callbacks
        self._report = report
        self._thread = thread
        self._put = put
        self._last: Future[None] | None = None  # the last call that was asked for
        self.is_stopped = False  # by a callback: nothing more is to be committed
        self.failed: Failed | None = None  # what a callback raised

    def step(self) -> None:
        """A training step was committed."""
        self._submit(lambda callback: callback.on_step(self._report))

    def validation(self) -> None:
        """A validation is over."""
        self._submit(lambda callback: callback.on_validation(self._report))

    def epoch(self, epoch: int) -> None:
        """An epoch is over."""
        self._submit(lambda callback: callback.on_epoch(self._report, epoch))

    def end(self) -> None:
        """The task is over."""
        self._submit(lambda callback: callback.on_task_end(self._report), always=True)

    def when_told(self, job: Callable[[], None]) -> None:
        """Run `job` once the callbacks have seen everything so far: until then the report stays as it is."""
        if self._last is None:
            job()
        else:
            self._last.add_done_callback(lambda _: job())

    def wait(self) -> None:
        """Wait until the callbacks have seen everything so far."""
        if self._last is not None:
            self._last.result()

    def _submit(self, call: Call, *, always: bool = False) -> None:
        if self._callbacks:
            self._last = self._thread.submit(self._run, call, always)

    def _run(self, call: Call, always: bool) -> None:
        if self.is_stopped and not always:
            return
        try:
            with GLOBAL_GENERATORS.call():  # it may draw, which no loader is to blame for
                for callback in self._callbacks:
                    call(callback)
        except StopTask:
            self.is_stopped = True
            self._put(TaskStopped(self._report.name))
        except BaseException as error:
            self.failed = Failed(self._report.name, error, "its callback")
            self.is_stopped = True
            self._put(self.failed)
