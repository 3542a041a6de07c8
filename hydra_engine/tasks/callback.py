"""Callbacks: the user's code that a task calls as it trains."""

from __future__ import annotations

from collections.abc import Iterable

from hydra_engine.tasks.report import TaskReport


class Callback:
    """Called as a task trains, in a thread of the task's own, one call at a time; override what you need.

    A call sees the report and the model's weights and buffers as they were at its step: the task's next commit waits
    for it, while devices compute on. With `early_release` or `optimizer_device="device"` the weights may be in the
    middle of the next step's updates. Callbacks of other tasks go on meanwhile: one may wait for another task, or call
    `add_task` and `stop_task`. A call that does not return in the task's `callback_timeout_s` fails the task. After
    Ctrl-C or SIGTERM it has 10 s; then the run ends without it.

    Look at the model, and leave it as it is: devices compute with copies of its layers, and have begun the next step.
    A call that changes an attribute (a dropout's p), a `training` flag, `requires_grad`, hooks, submodules, parameters
    or buffers, or writes to them (through `.data` too, and where it puts the values back), fails the task by name;
    `on_task_end` may do what it likes. A rate that a call sets in the `param_groups` of the optimizer that the task's
    factory made last holds from the next step on; but with `early_release` or `optimizer_device="device"`, that step's
    updates may have begun.

    In the plain loop a draw would move the task's stream; here it does not. What a call draws from torch, as making a
    model does, comes from a generator that the task's callbacks have to themselves, seeded from the task's seed. Draw
    nothing from `random` and `numpy.random`: where the task's loader or layers draw from them, it fails the task by
    name. Give a callback a `random.Random`, a `numpy.random.Generator` of its own.

    Raise `StopTask` to end the task with what it has committed; anything else that is raised, SystemExit and
    KeyboardInterrupt too, fails the task.
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


def begin_epochs(callbacks: Iterable[Callback]) -> bool:
    """Return True if one of them has something to do before an epoch begins."""
    own = Callback.on_epoch_begin
    return any(getattr(each.on_epoch_begin, "__func__", None) is not own for each in callbacks)
