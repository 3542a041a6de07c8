"""A trial while it trains: its task, and the callbacks by which the sweep follows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hydra_engine.errors import PauseTask, StopTask
from hydra_engine.sweep.objective import Objective
from hydra_engine.sweep.study import Trials
from hydra_engine.tasks import Callback, ModelTask, TaskReport


def name_of(trial: Any) -> str:
    """Name of a trial's task, in reports and checkpoints; of a trial, or of its number."""
    return f"trial-{getattr(trial, 'number', trial)}"


class LiveTrial:
    """A trial with a task in DRAM."""

    def __init__(self, trial: Any, task: ModelTask) -> None:
        self.trial = trial
        self.task = task
        self.name = task.name = name_of(trial)
        task.hparams = task.hparams or dict(trial.params)
        self.is_planned = False
        self.is_pruned = False  # and the study was told
        self.is_in_callbacks = False  # of the user's; they have ended the task where it ends there

    def follow(self, trials: Trials, objective: Objective, put: Callable[[LiveTrial, TaskReport | None], None]) -> None:
        """Call `put` at the task's first step, with None, and at its end, with its report; report its validations."""
        first = _First(self, put)
        last = _Last(self, trials, objective, put)
        self.task.callbacks = (first, *self.task.callbacks, last)

    def release(self) -> None:
        """Free the DRAM of the weights that were trained, whoever holds the model, and refer to the task no more."""
        for parameter in self.task.model.parameters():
            parameter.grad = None
            if parameter.requires_grad:  # frozen ones may be another trial's, too
                parameter.data = torch.empty(0, dtype=parameter.dtype)
        del self.task


class _First(Callback):
    """Called before the user's callbacks."""

    def __init__(self, live: LiveTrial, put: Callable[[LiveTrial, TaskReport | None], None]) -> None:
        self._live = live
        self._put = put
        self._has_begun = False

    def on_step(self, report: TaskReport) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._put(self._live, None)
        self._live.is_in_callbacks = True

    def on_validation(self, report: TaskReport) -> None:
        self._live.is_in_callbacks = True

    def on_epoch(self, report: TaskReport, epoch: int) -> None:
        self._live.is_in_callbacks = True


class _Last(Callback):
    """Called after the user's callbacks."""

    def __init__(
        self,
        live: LiveTrial,
        trials: Trials,
        objective: Objective,
        put: Callable[[LiveTrial, TaskReport | None], None],
    ) -> None:
        self._live = live
        self._trials = trials
        self._objective = objective
        self._put = put
        self._reported = trials.reported(live.trial)

    def on_step(self, report: TaskReport) -> None:
        self._live.is_in_callbacks = False

    def on_validation(self, report: TaskReport) -> None:
        self._live.is_in_callbacks = False
        values, step = self._objective.last(report), len(report.validation_losses) - 1
        # After a resume, validations may come again whose report was answered already.
        is_new = self._trials.has_pruning and step not in self._reported
        if values is not None and is_new and self._trials.prunes(self._live.trial, values[0], step):
            self._live.is_pruned = True
            raise StopTask
        if self._trials.is_at_rung(self._live.trial, step + 1):
            raise PauseTask

    def on_epoch(self, report: TaskReport, epoch: int) -> None:
        self._live.is_in_callbacks = False

    def on_task_end(self, report: TaskReport) -> None:
        self._put(self._live, report)

    def on_task_pause(self, report: TaskReport) -> None:
        self._put(self._live, report)
