"""What users may hook into a task's training."""

from __future__ import annotations

from hydra_engine.report import TaskReport


class Callback:
    """Called as a task trains, in a thread of its own, one call at a time; override what you need.

    A call sees the report as it was at its step: the task's next commit waits for it, while devices compute on. The
    model's weights may be in the middle of that step's updates until the task's end. Draw nothing from the process-wide
    random generators there, as making a model does: loaders read them at the same time.

    Raise `StopTask` to end the task with what it has committed; anything else that is raised fails the task.
    """

    def on_step(self, report: TaskReport) -> None:
        """A training step was committed; its loss is `report.losses[-1]`."""

    def on_validation(self, report: TaskReport) -> None:
        """A validation is over; its loss is `report.validation_losses[-1]`, and no step was committed after it."""

    def on_epoch(self, report: TaskReport, epoch: int) -> None:
        """An epoch is over, its validation too; epochs count from 0."""

    def on_task_end(self, report: TaskReport) -> None:
        """The task is finished, failed or stopped, and the model holds its weights."""
