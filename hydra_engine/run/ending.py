"""A task's end: one fact with one home, set by whoever ends the task, in any thread."""

from __future__ import annotations

import threading
import traceback
from dataclasses import dataclass, replace
from enum import Enum

from hydra_engine.errors import PauseTask, StopTask
from hydra_engine.schedule import DataFailed, Failed
from hydra_engine.system import DRAM_REMEDY, is_out_of_dram
from hydra_engine.tasks import FAILED, FINISHED, PAUSED, STOPPED, TaskReport
from partitioners.profile import names, noted

INTERRUPTED = "the run was interrupted"  # as the reason why a task has stopped


def readable(error: BaseException) -> BaseException:
    """Return an error, or one that stands for it where its own `__str__` raises, which must end no other task."""
    try:
        str(error)
    except Exception:
        text = f"{type(error).__qualname__}, which cannot say more: its __str__ raises"
        return RuntimeError(text).with_traceback(error.__traceback__)
    return error


class EndKind(Enum):
    """Kinds of ends, as a report names them."""

    FINISHED = FINISHED  # it was trained on all its batches, or as long as it became better (`patience`)
    STOPPED = STOPPED  # its user has ended it, or nonfinite="stop"
    PAUSED = PAUSED  # as stopped, and it is to be saved as a task that goes on
    FAILED = FAILED  # something raised


@dataclass(frozen=True)
class Ending:
    """A task's end, and its reason."""

    kind: EndKind
    error: BaseException | None = None  # the first that was raised
    text: str | None = None  # what the report says of an error
    reason: str | None = None  # why it ended before its last batch, where nothing failed
    commits: bool = True  # what was read and computed before; False: it ends at once, with what is committed


class TaskEnd:
    """The end of a task, as far as it is known. A failure outweighs all else, and of failures the first one stays."""

    def __init__(self, *, releases_early: bool = False) -> None:
        """`releases_early`: the step in progress may have updated shards, and has to be committed."""
        self._lock = threading.Lock()
        self._releases_early = releases_early
        self.ending: Ending | None = None  # None: it goes on, or the run has ended before it
        self.goes_back = False  # it ends, and begins again where it was saved last

    @property
    def has_failed(self) -> bool:
        """True if something of the task has raised."""
        return self.ending is not None and self.ending.kind is EndKind.FAILED

    @property
    def is_paused(self) -> bool:
        """True if the task is to go on some other time."""
        return self.ending is not None and self.ending.kind is EndKind.PAUSED

    @property
    def is_early(self) -> bool:
        """True if the task is finished before its last batch."""
        return self.ending is not None and self.ending.kind is EndKind.FINISHED and not self.ending.commits

    @property
    def is_stopped(self) -> bool:
        """True if nothing more of the task is to be committed."""
        return self.ending is not None and not self.ending.commits

    def finish(self, *, early_because: str | None = None) -> None:
        """The task was trained on all its batches; early_because: or ends before, since it becomes no better."""
        self._add(Ending(EndKind.FINISHED, reason=early_because, commits=early_because is None))

    def stop(self, reason: str, text: str | None = None) -> None:
        """End the task at its last commit; text: that the report has as its error."""
        self._add(Ending(EndKind.STOPPED, text=text, reason=reason, commits=False))

    def pause(self, reason: str, *, at_once: bool) -> None:
        """End the task at a commit, to go on some other time; at_once: at its last one, where that is possible."""
        self._add(Ending(EndKind.PAUSED, reason=reason, commits=self._releases_early or not at_once))

    def order(self, *, pauses: bool) -> None:
        """Pause or stop the task, as its user has asked by `pause_task` or `stop_task`."""
        if pauses:
            self.pause("pause_task() was called", at_once=False)
        else:
            self.stop("stop_task() was called")

    def undo(self, reason: str) -> None:
        """End the task without what it has done since it was saved last, from where it then goes on."""
        self.goes_back = True
        self._add(Ending(EndKind.PAUSED, reason=reason, commits=False))

    def stay(self) -> None:
        """The run is interrupted, and the task does not go back: a resume does."""
        self.goes_back, self.ending = False, None

    def obey(self, order: StopTask | PauseTask, where: str) -> None:
        """A callback has ended the task at its last commit, PauseTask: to go on some other time."""
        reason = f"{where} raised {type(order).__name__}" + (f": {order}" if str(order) else "")
        if isinstance(order, PauseTask):
            self.pause(reason, at_once=True)
        else:
            self.stop(reason)

    def fail(self, event: Failed | DataFailed, *, commits: bool = True) -> None:
        """Something of the task has raised; commits: what was computed before is committed."""
        self.goes_back = False
        unit = str(event.unit or "") if isinstance(event, Failed) else ""
        where = " in " + ", ".join(filter(None, (unit, event.where)))
        error = readable(event.error)
        text = "".join(traceback.format_exception(error))
        remedy = f"{DRAM_REMEDY}\n" if is_out_of_dram(error) else ""
        if not names(error, event.task):  # user code's, which `train_models` or `raise_failures` may raise alone
            noted(error, f"{event.task} failed{where}")
        self._add(Ending(EndKind.FAILED, error, f"{event.task} failed{where}\n{text}{remedy}", commits=commits))

    def write(self, report: TaskReport) -> None:
        """Say in the report how the task has ended, or that the run has ended before it."""
        if self.ending is not None:
            report.status, report.exception = self.ending.kind.value, self.ending.error
            report.error = self.ending.text
            report.stopped_early = self.is_early
            report.stop_reason = self.ending.reason
        else:
            report.stop_reason = INTERRUPTED

    def _add(self, new: Ending) -> None:
        with self._lock:
            old = self.ending
            if old is not None:
                is_first_failure = new.kind is EndKind.FAILED and old.kind is not EndKind.FAILED
                new = replace(new if is_first_failure else old, commits=old.commits and new.commits)
            self.ending = new
