"""Callbacks: the user's code that a task calls as it trains."""

from __future__ import annotations

from collections.abc import Iterable

from hydra_engine.tasks.report import TaskReport


class Callback:
    """Called as a task trains, in a thread of the task's own, one call at a time; override what you need.

    A call sees the report and the model's weights and buffers as they were at its step: the task's next commit waits
    for it, while devices compute on. One that does not return in the task's `callback_timeout_s` fails the task.

    `report.last_step` and `report.last_validation` have the values that loggers get.

    Copy the model's weights, with `clone()`, in `on_epoch_begin`, where they are those of the last step of the epoch
    before, whatever the task's options; or in any other call, unless `early_release` or `optimizer_device` lets updates
    of the next step begin earlier.

    Look at the model, and leave it as it is: a call that changes an attribute, a `training` flag, `requires_grad`,
    hooks, submodules, parameters or buffers, or writes to them, fails the task by name; `on_task_end` and
    `on_task_pause` may do what they like. Draw nothing from `random` and `numpy.random`. docs/tasks.md says more, and
    why.

    Raise `StopTask` to end the task with what it has committed, or `PauseTask` to go on with it some other time;
    anything else that is raised, SystemExit and KeyboardInterrupt too, fails the task.
    """

    def on_epoch_begin(self, report: TaskReport, epoch: int) -> None:
        """An epoch's iterator is about to be opened: the place for `sampler.set_epoch(epoch)`; epochs count from 0.

        Once for each epoch, and in a resumed run for the one that it goes on with. All calls of the epoch before have
        returned, and the loader is not read meanwhile: tasks that override this read nothing ahead over an epoch's end.
        For the first epoch it is called where the first batch is read: by `generate()`, or by `add_task`, in the thread
        that has called them, where no time-out counts.
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

        Said instead of `on_task_end`. The model holds its weights, in ordinary storage, and may be emptied.
        """


def begin_epochs(callbacks: Iterable[Callback]) -> bool:
    """Return True if one of them has something to do before an epoch begins."""
    return any(getattr(each.on_epoch_begin, "__func__", None) is not Callback.on_epoch_begin for each in callbacks)
