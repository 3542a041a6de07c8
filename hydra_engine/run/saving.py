"""Sees from a run's events when each of its tasks can be captured for a checkpoint, and has that done.

A task is settled, that is all of its state in DRAM is of one step, from the end of a step's last update until the next
commit begins; where shards are released early, from a commit until the next backward unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from hydra_engine.checkpoints import Saver, Snapshot
from hydra_engine.run.running_task import RunningTask
from hydra_engine.schedule import BACKWARD, FUSED, Event, Instruction, Run, ShardUpdated, StepCommitted, TaskStopped


def note_event(tasks: Mapping[str, RunningTask], event: Event) -> None:
    """Note what an event changes about which tasks are settled; also while nothing is saved: it may be, any moment."""
    if isinstance(event, StepCommitted):
        training = tasks[event.task]
        training.is_committing = False
        if event.training:
            training.is_releasing = False
            training.num_updating = 0 if training.state.pool.early_release else len(training.updates)
    elif isinstance(event, ShardUpdated):
        training = tasks[event.task]
        training.num_updating = max(0, training.num_updating - 1)
    elif isinstance(event, TaskStopped) and event.uncommitted:
        tasks[event.task].is_committing = False


def note_instruction(tasks: Mapping[str, RunningTask], instruction: Instruction) -> None:
    """The same of an instruction, before it is carried out."""
    if isinstance(instruction, Run) and instruction.unit.kind in (FUSED, BACKWARD):
        training = tasks[instruction.unit.task]
        training.is_releasing = training.state.pool.early_release


class Saving:
    """Belongs to the thread that decides; `submit` runs a job in a pool; it holds no run, which would hold itself."""

    def __init__(
        self, saver: Saver, tasks: Mapping[str, RunningTask], submit: Callable[[Callable[[], None]], object]
    ) -> None:
        self.saver = saver
        self._tasks = tasks
        self._submit = submit

    def told(self, event: Event) -> None:
        """Before the event is acted upon, and after `note_event`."""
        if isinstance(event, StepCommitted):
            training = self._tasks[event.task]
            if event.training and self.saver.is_due(event.task, training.report.steps):
                self._begin()
            self._capture(training)
        elif isinstance(event, ShardUpdated):
            self._capture(self._tasks[event.task])

    def free(self) -> None:
        """A save is written: begin the round that fell due meanwhile, if there is one."""
        if self.saver.take_owed():
            self._begin()

    def ends(self, training: RunningTask) -> None:
        """Nothing of a task is under way any more: a round need not wait for it."""
        if training.report.name in self.saver.wanted:
            self.saver.give(training.report.name, None)()

    def end(self, training: RunningTask, over: str | None, then: Callable[[], None]) -> None:
        """Save a task as it has ended; then call. In a pool.

        Where its state is of two steps, or nothing was committed, what is saved of it stays, and only its end is noted.
        """
        report = training.report
        snapshot = None
        is_whole = not (training.is_torn or training.is_releasing)
        if training.position is not None and training.optimizer is not None and is_whole:
            snapshot = self._snapshot(training, over)
            snapshot.capture()
        self.saver.save_end(report.name, over, snapshot, then)

    def waits(self, training: RunningTask) -> None:
        """A task's commit waits for its callbacks, which may take as long as they like: no round waits with it."""
        if training.is_releasing and training.report.name in self.saver.wanted:
            self.saver.give(training.report.name, None)()

    def _begin(self) -> None:
        names = [
            name
            for name, training in self._tasks.items()
            if self._can_be_saved(training) and not self.saver.has(name, training.report.steps)
        ]
        if not names:
            return
        self.saver.begin(names)
        for name in names:
            self._capture(self._tasks[name])
            if self._tasks[name].waits_to_commit:
                self.waits(self._tasks[name])

    def _capture(self, training: RunningTask) -> None:
        """If it is wanted, and settled."""
        name = training.report.name
        is_settled = not (training.is_committing or training.is_releasing or training.num_updating)
        if name not in self.saver.wanted or not is_settled or not self._can_be_saved(training):
            return
        snapshot = training.snapshot = self._snapshot(training, None)
        self._submit(partial(_captured, snapshot, self.saver.give(name, snapshot)))

    def _can_be_saved(self, training: RunningTask) -> bool:
        is_over = training.is_ending or training.report.exception is not None
        return training.position is not None and training.optimizer is not None and not is_over

    def _snapshot(self, training: RunningTask, over: str | None) -> Snapshot:
        assert training.position is not None
        assert training.optimizer is not None
        return Snapshot(
            training.state,
            training.optimizer,
            training.report,
            training.position,
            training.buffers,
            self.saver.cost,
            over=over,
        )


def _captured(snapshot: Snapshot, give: Callable[[], None]) -> None:
    snapshot.capture()
    give()
