"""Callbacks: the user's code that a task calls as it trains."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hydra_engine.tasks.report import TaskReport


class Callback:
    """Called as a task trains, in a thread of the task's own, one call at a time; override what you need.

    Between two steps the model is yours, as in a plain loop. A call comes after the step's updates and the schedule,
    and before the next batch is read; nothing of the task is under way. So whatever it does counts from the next step
    on: it may set a learning rate or a dropout's p, clamp, swap or load weights, freeze parameters, switch modes,
    change what the loss reads, and draw random numbers, from the task's own stream. Replacing modules or parameters,
    or giving them another shape, fails the task by name. After a pause, an interrupt or a retry, `on_epoch_begin`,
    `on_validation` and `on_epoch` may come again, with what they have changed before. Other tasks train meanwhile. A
    call that does not return in the task's `timeout_s` fails its task.

    `report.last_step` and `report.last_validation` have the values that loggers get.

    Raise `StopTask` to end the task with what it has committed, or `PauseTask` to go on with it some other time;
    anything else that is raised, SystemExit and KeyboardInterrupt too, fails the task. docs/tasks.md says more.
    """

    # False: no call reads or changes the model, so that calls begin while the step's updates are running. The next step
    # waits for them all the same.
    reads_model = True

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs: saved with each checkpoint of the task, after the calls of its step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, before the task goes on."""

    def on_epoch_begin(self, report: TaskReport, epoch: int) -> None:
        """An epoch's iterator is about to be opened: the place for `sampler.set_epoch(epoch)`; epochs count from 0.

        Once for each epoch, and in a resumed run for the one that it goes on with. All calls of the epoch before have
        returned. For the first epoch it is called where the first batch is read: by `generate()`, or by `add_task`, in
        the thread that has called them, where no time-out counts.
        """

    def on_step(self, report: TaskReport) -> None:
        """A training step was committed; its loss is `report.losses[-1]`."""

    def on_validation(self, report: TaskReport) -> None:
        """A validation is over; its loss is `report.validation_losses[-1]`, and no step was committed after it."""

    def on_epoch(self, report: TaskReport, epoch: int) -> None:
        """An epoch is over, its validation too; epochs count from 0."""

    def on_task_end(self, report: TaskReport) -> None:
        """The task is finished, failed or stopped, and the model holds its weights."""

    def on_task_pause(self, report: TaskReport) -> None:
        """The task is paused: it is saved, and `add_task` may be called with its name from now on.

        Called instead of `on_task_end`. The model holds its weights, in ordinary storage, and may be emptied.
        """


def is_called(callbacks: Iterable[Callback], method: str) -> bool:
    """Return True if one of them overrides a method."""
    default = getattr(Callback, method)
    return any(getattr(getattr(each, method), "__func__", None) is not default for each in callbacks)
