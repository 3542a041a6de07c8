"""A trial while it trains: its task, and the callbacks by which the sweep follows it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from hydra_engine.errors import CallbackTimeout, PauseTask, StopTask
from hydra_engine.sweep.objective import Objective
from hydra_engine.sweep.study import Trials
from hydra_engine.tasks import Callback, ModelTask, TaskReport, begin_epochs

Put: TypeAlias = "Callable[[LiveTrial, TaskReport | None], None]"


def name_of(trial: Any) -> str:
    """Name of a trial's task, in reports and checkpoints; of a trial, or of its number."""
    return f"trial-{getattr(trial, 'number', trial)}"


class LiveTrial:
    """A trial with a task in DRAM."""

    def __init__(self, trial: Any, task: ModelTask, trials: Trials, objective: Objective, put: Put) -> None:
        """`put`: called at the task's first step, with None, and at its end, with its report."""
        self.trial = trial
        self.task = task
        self.name = task.name = name_of(trial)
        task.hparams = task.hparams or dict(trial.params)
        # Where no other callback has something to do before an epoch, batches may be read ahead over its beginning.
        first, last = (_FirstOfEpoch, _LastOfEpoch) if begin_epochs(task.callbacks) else (_First, _Last)
        task.callbacks = (first(self, put), *task.callbacks, last(self, put, trials, objective))
        self.is_planned = False
        self.is_pruned = False  # and the study was told
        self.is_in_callbacks = False  # of the user's; they have ended the task where it ends there
        self.report: TaskReport | None = None  # once callbacks were called
        self.ended_s: float | None = None  # when callbacks were told its end or its pause, by time.monotonic()

    @property
    def late(self) -> BaseException | None:
        """The error of callbacks that did not return in time, so that they will never say that the task is over."""
        found = None if self.report is None else self.report.exception
        if isinstance(found, CallbackTimeout):
            return found
        timeout_s, callbacks = self.task.callback_timeout_s, self.task.callbacks
        if self.ended_s is None or timeout_s is None or time.monotonic() < self.ended_s + timeout_s * len(callbacks):
            return None
        return CallbackTimeout(self.name, "on_task_end or on_task_pause", timeout_s, f"{self.name}-callbacks")

    def release(self) -> None:
        """Free the DRAM of the weights that were trained, whoever holds the model, and refer to the task no more."""
        for parameter in self.task.model.parameters():
            parameter.grad = None
            if parameter.requires_grad:  # frozen ones may be another trial's, too
                parameter.data = torch.empty(0, dtype=parameter.dtype)
        del self.task


@dataclass(eq=False)
class _First(Callback):
    """Called before the user's callbacks."""

    live: LiveTrial
    put: Put
    has_begun: bool = False

    def on_step(self, report: TaskReport) -> None:
        if not self.has_begun:
            self.has_begun = True
            self.put(self.live, None)
        self._enter(report)

    def on_validation(self, report: TaskReport) -> None:
        self._enter(report)

    def on_epoch(self, report: TaskReport, epoch: int) -> None:
        self._enter(report)

    def on_task_end(self, report: TaskReport) -> None:
        self.live.ended_s = time.monotonic()

    def on_task_pause(self, report: TaskReport) -> None:
        self.live.ended_s = time.monotonic()

    def _enter(self, report: TaskReport) -> None:
        self.live.report, self.live.is_in_callbacks = report, True


class _FirstOfEpoch(_First):
    def on_epoch_begin(self, report: TaskReport, epoch: int) -> None:
        self._enter(report)


@dataclass(eq=False)
class _Last(Callback):
    """Called after the user's callbacks; reports validations."""

    live: LiveTrial
    put: Put
    trials: Trials
    objective: Objective

    def __post_init__(self) -> None:
        self.reported = self.trials.reported(self.live.trial)

    def on_step(self, report: TaskReport) -> None:
        self.live.is_in_callbacks = False

    def on_validation(self, report: TaskReport) -> None:
        self.live.is_in_callbacks = False
        values, step = self.objective.last(report), len(report.validation_losses) - 1
        # After a resume, validations may come again whose report was answered already.
        is_new = self.trials.has_pruning and step not in self.reported
        if values is not None and is_new and self.trials.prunes(self.live.trial, values[0], step):
            self.live.is_pruned = True
            raise StopTask
        if self.trials.is_at_rung(self.live.trial, step + 1):
            raise PauseTask

    def on_epoch(self, report: TaskReport, epoch: int) -> None:
        self.live.is_in_callbacks = False

    def on_task_end(self, report: TaskReport) -> None:
        self.put(self.live, report)

    def on_task_pause(self, report: TaskReport) -> None:
        self.put(self.live, report)


class _LastOfEpoch(_Last):
    def on_epoch_begin(self, report: TaskReport, epoch: int) -> None:
        self.live.is_in_callbacks = False
