"""A trial while it trains: its task, and the callbacks by which the sweep follows it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from hydra_engine import Callback, CallbackTimeout, ModelTask, PauseTask, StopTask, TaskReport
from hydra_engine.sweep.objective import Objective
from hydra_engine.sweep.study import Trials, load_optuna

Put: TypeAlias = "Callable[[LiveTrial, TaskReport | None], None]"

HOOKS = ("on_epoch_begin", "on_step", "on_validation", "on_epoch", "on_task_end", "on_task_pause")


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
        users = [_followed(each, self, trials) for each in task.callbacks]
        task.callbacks = (*users, _Last(self, put, trials, objective))
        self.is_planned = False
        self.is_pruned = False  # and the study was told
        self.is_ended_by_callback = False  # a user's one has raised
        self.report: TaskReport | None = None  # once the user's callbacks were called
        self.ended_s: float | None = None  # when callbacks were told its end or its pause, by time.monotonic()

    @property
    def late(self) -> BaseException | None:
        """The error of callbacks that did not return in time, so that they will never say that the task is over."""
        found = None if self.report is None else self.report.exception
        if isinstance(found, CallbackTimeout):
            return found
        timeout_s, callbacks = self.task.timeout_s, self.task.callbacks
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


def _followed(callback: Callback, live: LiveTrial, trials: Trials) -> Callback:
    """Return a callback that calls the user's, and prunes the trial where that raises `optuna.TrialPruned`."""

    def hook(name: str) -> Callable[..., None]:
        def call(_: Callback, report: TaskReport, *arguments: Any) -> None:
            live.report = report
            if name in ("on_task_end", "on_task_pause") and live.ended_s is None:
                live.ended_s = time.monotonic()
            try:
                getattr(callback, name)(report, *arguments)
            except BaseException as error:
                live.is_ended_by_callback = True
                if not isinstance(error, load_optuna().TrialPruned):
                    raise
                if not live.is_pruned:
                    trials.prune(live.trial)
                live.is_pruned = True
                raise StopTask("it is pruned") from error

        return call

    def is_own(name: str) -> bool:
        return getattr(getattr(callback, name), "__func__", None) is not getattr(Callback, name)

    # Batches may be read ahead where a callback has nothing to do after a step.
    names = [name for name in HOOKS if name.startswith("on_task") or is_own(name)]
    followed: Callback = type(type(callback).__name__, (Callback,), {name: hook(name) for name in names})()
    followed.reads_model = callback.reads_model
    for name in ("state_dict", "load_state_dict"):
        setattr(followed, name, getattr(callback, name))
    return followed


@dataclass(eq=False)
class _Last(Callback):
    """Called after the user's callbacks; reports validations."""

    live: LiveTrial
    put: Put
    trials: Trials
    objective: Objective
    has_begun: bool = False
    reads_model: bool = False

    def __post_init__(self) -> None:
        self.reported = self.trials.reported(self.live.trial)

    def on_step(self, report: TaskReport) -> None:
        if not self.has_begun:
            self.has_begun = True
            self.put(self.live, None)

    def on_validation(self, report: TaskReport) -> None:
        values, step = self.objective.last(report), len(report.validation_losses) - 1
        # After a resume, validations may come again whose report was answered already.
        is_new = self.trials.has_pruning and step not in self.reported
        if values is not None and is_new and self.trials.prunes(self.live.trial, values[0], step):
            self.live.is_pruned = True
            raise StopTask
        if self.trials.is_at_rung(self.live.trial, step + 1):
            raise PauseTask

    def on_task_end(self, report: TaskReport) -> None:
        self.put(self.live, report)

    def on_task_pause(self, report: TaskReport) -> None:
        self.put(self.live, report)
