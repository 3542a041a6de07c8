"""Saves a run's tasks: begins a round when one is due, and captures each of its tasks once that is settled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from hydra_engine.checkpoints import Saver, Snapshot
from hydra_engine.errors import DeviceLost
from hydra_engine.run.running_task import Common, Life, RunningTask, Waited
from hydra_engine.schedule import CaptureWanted, StepCommitted, StopRequested
from hydra_engine.tasks import CheckpointReport
from hydra_engine.texts import warn

# A round waits so long for a task's callbacks, and goes on without; the task is saved once they have returned.
CALLBACKS_S = 1.0
SAVE = "save"


class SaverFree(NamedTuple):
    """A checkpoint is written, and another one fell due meanwhile."""


class Saves:
    """The department of checkpoints, and of nothing while there is no saver."""

    def __init__(self, common: Common, saver: Saver | None, rescue: Callable[[], Saver] | None) -> None:
        """`rescue`: makes a saver as a device is lost."""
        self._common = common
        self._rescue = rescue
        self._saver: Saver | None = None
        if saver is not None:
            self._use(saver)

    def _use(self, saver: Saver) -> None:
        self._saver = saver
        saver.when_free = partial(self._common.events.put, SaverFree())  # not a method: the two would hold each other

    @property
    def report(self) -> CheckpointReport | None:
        """Checkpoints that were saved; None where none were to be."""
        return None if self._saver is None else self._saver.report

    def began(self, task: RunningTask) -> None:
        """A task that was saved goes on."""
        saved = task.planned.saved
        if saved is not None and self._saver is not None:
            self._saver.began_at(task.name, saved.steps)

    def step_committed(self, event: StepCommitted) -> StepCommitted:
        """Begin a round, if one is due."""
        saver, steps = self._saver, self._common.tasks[event.task].report.steps
        if saver is not None and event.training and saver.is_due(event.task, steps):
            self._begin(saver)
        return event

    def free(self, _: SaverFree) -> None:
        """Begin the round that fell due while another was written, if there is one."""
        if self._saver is not None and self._saver.take_owed():
            self._begin(self._saver)

    def device_lost(self, error: DeviceLost) -> None:
        """End the run, if it is not lost yet. Save the last commits, also of a run that saves nothing else."""
        if self._common.lost is not None:
            return
        self._common.lost = error
        self._common.due.append(StopRequested())
        if self._saver is None and self._rescue is not None:
            try:
                self._use(self._rescue())
            except Exception as failed:  # the run ends all the same
                warn(f"hydra_engine: last commits cannot be saved: {failed}")

    def pass_over(self, task: RunningTask) -> None:
        """The round under way shall not wait for a task."""
        if self._saver is not None and task.name in self._saver.wanted:
            self._saver.give(task.name, None)()

    def end(
        self, task: RunningTask, over: str | None, *, is_settled: bool, then: Callable[[BaseException | None], None]
    ) -> None:
        """Save a task as it has ended; then call, with None or why it could not be saved as it is now. In a pool.

        Where its state is of two steps, or nothing was committed, what is saved of it stays, and only its end is noted.
        """
        if self._saver is None:
            then(None)
            return
        self._common.loggers.hurry()
        try:
            is_whole = is_settled and task.is_whole
            snapshot = self._snapshot(self._saver, task, over) if is_whole else None
            if snapshot is not None:  # it has a commit
                snapshot.capture()
            torn = None if is_whole else RuntimeError("an update has raised, and some weights are of another step")
            self._saver.save_end(task.name, over, snapshot, lambda error: then(torn or error))
        except Exception as error:  # nobody else would end the task
            self._saver.tell(f"task {task.name!r} could not be saved as it has ended: {error}")
            then(error)

    def end_undone(self, task: RunningTask, then: Callable[[bool], None]) -> None:
        """Call, once what was begun is written, with whether the task is saved at some step."""
        saver = self._saver
        if saver is None:
            then(False)
        else:
            saver.save_end(task.name, None, None, lambda _: then(saver.has_steps(task.name)))

    def give_up(self) -> None:
        """Wait for no task any more."""
        if self._saver is not None:
            self._saver.give_up()

    def close(self) -> None:
        """Wait until all is written that was asked for."""
        if self._saver is not None:
            self._saver.close()

    def _begin(self, saver: Saver) -> None:
        found = filter(self._can_be_saved, self._common.tasks.values())
        tasks = [task for task in found if not saver.has(task.name, task.report.steps)]
        if not tasks:
            return
        saver.begin([task.name for task in tasks])
        self._common.due.extend(CaptureWanted(task.name) for task in tasks)

    def capture(self, task: RunningTask) -> None:
        """Save a task whose updates are through, if the round under way waits for it, once callbacks have returned."""
        task.is_updated = True
        if task.epoch_is_over:
            task.judge_epoch()
            self._common.later(partial(self._common.end_early, task))
        task.notifier.let_go()
        self._save_once_told(task)

    def _save_once_told(self, task: RunningTask) -> None:
        """Save a task that is settled with what callbacks leave at its step."""
        # Where calls read no model, the next step may update weights before its commit: the task is settled now.
        if task.notifier.is_told or (task.state.pool.early_release and not task.notifier.reads_model):
            self._save(task)
        elif self._saver is not None and task.name in self._saver.wanted:
            self._common.await_((SAVE, task.planned), CALLBACKS_S)
            if not task.save_waits:
                task.save_waits = True
                self._common.when_told(task, partial(self._save_waiting, task))

    def _save_waiting(self, task: RunningTask) -> None:
        """Callbacks have returned: save a task now, in a round of its own if the one that it was wanted for went on."""
        task.save_waits = False
        self._common.deadlines.drop((SAVE, task.planned))
        saver = self._saver
        if saver is not None and task.name in saver.wanted:
            self._save(task)
        elif saver is not None and not task.is_ending and saver.owe():
            self._begin(saver)

    def overdue(self, due: Sequence[Waited]) -> None:
        """Go on without tasks whose callbacks take too long."""
        for task in self._common.tasks.values():
            if (SAVE, task.planned) in due:
                self.pass_over(task)

    def _save(self, task: RunningTask) -> None:
        """Save a task that is settled, if the round under way waits for it."""
        saver = self._saver
        if saver is None or task.name not in saver.wanted or not self._can_be_saved(task):
            return
        task.snapshot = snapshot = self._snapshot(saver, task, None)
        assert snapshot is not None
        self._common.pool.submit(_captured, snapshot, saver.give(task.name, snapshot))
        self._common.loggers.hurry()

    def _can_be_saved(self, task: RunningTask) -> bool:
        has_state = task.last_commit is not None and task.optimizer is not None
        return has_state and task.life is Life.TRAINING and not (task.end.has_failed or task.end.goes_back)

    def _snapshot(self, saver: Saver, task: RunningTask, over: str | None) -> Snapshot | None:
        found, optimizer = task.last_commit, task.optimizer
        if found is None or optimizer is None:
            return None
        called = task.called if task.planned.task.callbacks else None
        return Snapshot(task.planned, optimizer, found, saver.count, over=over, best=task.figures.best, called=called)


def _captured(snapshot: Snapshot, give: Callable[[], None]) -> None:
    snapshot.capture()
    give()
