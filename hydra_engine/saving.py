"""Sees from a run's events when each of its tasks can be captured for a checkpoint, and has that done.

A task is settled, that is all of its state in DRAM is of one step, from the end of a step's last update until the next
commit begins; where shards are released early, from a commit until the next backward unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from hydra_engine.events import Commit, Event, Failed, Instruction, Run, ShardUpdated, StepCommitted, TaskStopped
from hydra_engine.running import RunningTask
from hydra_engine.saver import Saver
from hydra_engine.schedule import BACKWARD, FUSED
from hydra_engine.snapshot import Snapshot


class Saving:
    """Belongs to the thread that decides; `submit` runs a job in a pool, and is no method of the run's.

    Through one, the run would be part of a cycle: its memory, and the user's loaders, would wait for the collector.
    """

    def __init__(
        self, saver: Saver, tasks: Mapping[str, RunningTask], submit: Callable[[Callable[[], None]], object]
    ) -> None:
        self.saver = saver
        self._tasks = tasks
        self._submit = submit

    def told(self, event: Event) -> None:
        """Before the event is acted upon."""
        if isinstance(event, StepCommitted):
            training = self._tasks[event.task]
            training.is_committing = False
            if event.training:
                training.is_releasing = False
                training.num_updating = 0 if training.state.pool.early_release else len(training.updates)
                if self.saver.is_due(event.task, training.report.steps):
                    self._begin()
            self._capture(training)
        elif isinstance(event, ShardUpdated):
            training = self._tasks[event.task]
            training.num_updating = max(0, training.num_updating - 1)
            self._capture(training)
        elif isinstance(event, (Failed, TaskStopped)):
            training = self._tasks[event.task]
            if isinstance(event, TaskStopped) and event.uncommitted:
                training.is_committing = False

    def instructed(self, instruction: Instruction) -> None:
        """Before an instruction is carried out."""
        if isinstance(instruction, Commit):
            self._tasks[instruction.task].is_committing = True
        elif isinstance(instruction, Run) and instruction.unit.kind in (FUSED, BACKWARD):
            training = self._tasks[instruction.unit.task]
            training.is_releasing = training.state.pool.early_release

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
            if over is None and self.saver.has(report.name, report.steps):
                then()
                return
            snapshot = self._snapshot(training, over)
            snapshot.capture()
        self.saver.save_end(report.name, over, snapshot, then)

    def _begin(self) -> None:
        names = [
            name
            for name, training in self._tasks.items()
            if self._can_be_saved(training) and not self.saver.has(name, training.report.steps)
        ]
        self.saver.begin(names)
        for name in names:
            self._capture(self._tasks[name])

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
