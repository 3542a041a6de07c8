"""Calls a task's callbacks: in a thread of the task's own, one call at a time, in the order of what happened."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from hydra_engine.data import GLOBAL_GENERATORS, CallbackDraws
from hydra_engine.errors import CallbackTimeout, PauseTask, StopTask
from hydra_engine.run.ending import TaskEnd
from hydra_engine.schedule import Event, Failed, TaskStopped
from hydra_engine.tasks import Callback, ModelWatch, TaskReport

# After Ctrl-C, SIGTERM or a lost device, no call is waited for any longer: what sends SIGTERM often kills after 30 s.
INTERRUPTED_S = 10.0


class _Call(NamedTuple):
    """One call of each of the task's callbacks."""

    hook: str  # the method's name
    arguments: tuple[Any, ...] = ()
    always: bool = False  # also once the task is stopped


class Notifier:
    """Tells one task's callbacks what happened, until one of them ends the task; the task's end is told all the same.

    The thread is made for the first call. It is a daemon: a callback that does not return in time is left behind in it,
    nothing more is told, and what waited for it goes on. What a callback raises goes to `put` as an event.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        report: TaskReport,
        end: TaskEnd,
        put: Callable[[Event], None],
        *,
        timeout_s: float | None = None,
        num_threads: int = 1,
        draws: CallbackDraws | None = None,
    ) -> None:
        """`timeout_s`: of one call of one callback; None: for ever. `num_threads`: intra-op, of the thread.

        draws: watches the calls' random draws; None: beside a loader and layers that draw nothing.
        """
        self.timeout_s = timeout_s if callbacks else None  # of a call; None also where there is nobody to call
        self._callbacks = callbacks
        self._report = report
        self._end = end
        self._draws = draws or CallbackDraws(report.name, report.seed, set(), set)
        self._put = put
        self._num_threads = num_threads
        self._lock = threading.Lock()  # of all below
        # Calls, and jobs to be run once the calls before them were told.
        self._queue: SimpleQueue[_Call | Callable[[], None] | None] = SimpleQueue()
        self._held: list[_Call | Callable[[], None]] | None = None  # for `let_go`; None: none has to wait
        self._num_untold = 0  # calls, the one in progress too
        self._thread: threading.Thread | None = None
        self._now: tuple[str, float] | None = None  # what is being called, and since when, by time.monotonic()
        self._is_left = False  # the thread, to itself
        self._watch: tuple[ModelWatch, Callable[[], None]] | None = None

    def watch(self, model: ModelWatch, prepare: Callable[[], None]) -> None:
        """From now on, call `prepare` before each call, and fail the task where it changes the model."""
        self._watch = (model, prepare)

    def look_away(self) -> None:
        """The model is its user's again, and its weights' memory is given back."""
        if self._watch is not None:
            self._watch[0].follow(())
            self._watch = None

    def epoch_begin(self, epoch: int) -> None:
        """An epoch's iterator is about to be opened."""
        self._submit(_Call("on_epoch_begin", (epoch,)))

    def step(self, *, is_updated: bool = True) -> None:
        """A step was committed. Where updates go on, it is told at `let_go`, and what happens meanwhile after it."""
        self._submit(_Call("on_step"), holds=not is_updated)

    def validation(self) -> None:
        """A validation is over."""
        self._submit(_Call("on_validation"))

    def epoch(self, epoch: int) -> None:
        """An epoch is over."""
        self._submit(_Call("on_epoch", (epoch,)))

    def end(self, *, is_paused: bool = False) -> None:
        """The task is over; is_paused: for now."""
        self._submit(_Call("on_task_pause" if is_paused else "on_task_end", always=True))

    def let_go(self) -> None:
        """The updates of the last step are through: tell what waited for them."""
        with self._lock:
            held, self._held = self._held or [], None
            for each in held:
                self._enter(each)

    @property
    def messages(self) -> list[str]:
        """Doubts about what callbacks drew."""
        return list(filter(None, [self._draws.message]))

    @property
    def is_told(self) -> bool:
        """True once the callbacks have seen everything so far, or if they never will."""
        with self._lock:
            return self._is_left or not self._num_untold

    @property
    def is_left(self) -> bool:
        """True if a callback did not return, and its thread was left to itself."""
        with self._lock:
            return self._is_left

    def when_told(self, job: Callable[[], None]) -> None:
        """Run `job`, short, once the callbacks have seen everything so far: until then the report stays as it is."""
        with self._lock:
            if not self._is_left and self._num_untold:
                self._enter(job)
                return
        job()

    def hurry(self) -> None:
        """The run is interrupted: from now on a call has no more than `INTERRUPTED_S`."""
        with self._lock:
            self.timeout_s = INTERRUPTED_S
            if self._now is not None:
                self._now = (self._now[0], time.monotonic())

    def leave_behind(self, *, fails: bool = True) -> float | None:
        """Leave the thread to itself if a call is late; else seconds until one could be.

        `fails`: so does the task then. What waits for its callbacks goes on. A lock on the process-wide generators that
        the thread holds, planning another task, is taken away from it.
        """
        with self._lock:
            assert self.timeout_s is not None
            late_s = 0.0 if self._now is None else time.monotonic() - self._now[1]
            if self._now is None or late_s < self.timeout_s:
                return self.timeout_s - late_s
            self._leave()
            failed = None
            if fails:
                error = CallbackTimeout(self._report.name, self._now[0], self.timeout_s, self.thread_name)
                failed = Failed(self._report.name, error, "its callback")
                self._end.fail(failed, commits=False)
            waiting = []
            while not self._queue.empty():
                waiting.append(self._queue.get())
            waiting += self._held or ()
        if failed is not None:
            self._put(failed)
        for each in waiting:
            if each is not None and not isinstance(each, _Call):
                each()
        return None

    def _leave(self) -> None:
        assert self._thread is not None
        self._is_left = True
        GLOBAL_GENERATORS.take_from(self._thread.ident)

    @property
    def thread_name(self) -> str:
        """Name of the thread that calls."""
        return f"{self._report.name}-callbacks"

    def close(self) -> str | None:
        """End the thread; where a callback does not return, its name: the thread is left behind."""
        self._queue.put(None)
        if self._thread is None:
            return None
        self._thread.join(0.0 if self._is_left else INTERRUPTED_S)  # who is late already is not waited for again
        with self._lock:
            if not self._thread.is_alive() or self._now is None:
                return None
            self._leave()
            return self._now[0]

    def _submit(self, call: _Call, *, holds: bool = False) -> None:
        with self._lock:
            if not self._callbacks or self._is_left:
                return
            if holds and self._held is None:
                self._held = []
            self._num_untold += 1
            self._enter(call)

    def _enter(self, each: _Call | Callable[[], None]) -> None:
        if self._held is not None:
            self._held.append(each)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self.thread_name, daemon=True)
            self._thread.start()
        self._queue.put(each)

    def _serve(self) -> None:
        torch.set_num_threads(self._num_threads)
        while (each := self._queue.get()) is not None:
            if not isinstance(each, _Call):
                each()
                continue
            self._tell(each)
            with self._lock:
                if self._is_left:
                    return
                self._num_untold -= 1

    def _tell(self, call: _Call) -> None:
        if self._end.is_stopped and not (self._end.is_early or call.always):
            return  # its user, a callback or a failure has ended the task at once: they are told its end alone
        name, watch = self._report.name, self._watch
        try:
            with self._draws.calling():
                if watch is not None:
                    watch[1]()
                with nullcontext() if watch is None else watch[0].calling():
                    for callback in self._callbacks:
                        if not self._begins(f"{type(callback).__name__}.{call.hook}"):
                            return
                        getattr(callback, call.hook)(self._report, *call.arguments)
                kinds = " or ".join(type(callback).__name__ for callback in self._callbacks)
                who = f"{name}: its callback {kinds}, in {call.hook},"
                if watch is not None and not self._is_left:
                    watch[0].check(who)
        except BaseException as error:  # SystemExit, too: it is this task's, and not the run's
            self._stop(error)
        finally:
            with self._lock:
                self._now = None

    def _begins(self, what: str) -> bool:
        """Note what is called now; False where the thread was left behind."""
        with self._lock:
            self._now = (what, time.monotonic())
            return not self._is_left

    def _stop(self, error: BaseException) -> None:
        """What a callback raises ends the task, unless it came too late for that."""
        name = self._report.name
        event: TaskStopped | Failed
        with self._lock:
            if self._is_left:
                return
            if isinstance(error, (StopTask, PauseTask)):
                event = TaskStopped(name, is_paused=isinstance(error, PauseTask))
                self._end.obey(error, "a callback" if self._now is None else self._now[0])
            else:
                event = Failed(name, error, "its callback")
                self._end.fail(event, commits=False)
        self._put(event)
