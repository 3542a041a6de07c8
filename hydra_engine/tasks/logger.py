"""Loggers, and the values of steps and of validations that they are given; callbacks find these in the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The values of one committed training step.

    Attributes:
        step: training steps committed, this one included.
        epoch: of the step's batch, from 0.
        loss: over all micro-batches; may be NaN or infinite.
        learning_rates: that the step was made with, one per parameter group; none of an optimizer without "lr".
        grad_norm: norm of all gradients before clipping. None: nothing has computed it, so that it costs nothing here.
            `max_grad_norm` and batches that adapt compute it.
        num_samples: of the step's batch.
        samples_per_s: these, over the seconds since the task's last commit of a training step or evaluation batch.
        time_s: of the commit, in seconds since 1970.
    """

    task: str
    step: int
    epoch: int
    loss: float
    learning_rates: tuple[float, ...]
    grad_norm: float | None
    num_samples: int
    samples_per_s: float
    time_s: float

    def values(self) -> dict[str, float]:
        """Return the values by the names that files have: "loss", "lr", "grad_norm", "samples_per_s".

        "lr_0", "lr_1" and so on where there are several parameter groups; without those that there are not.
        """
        values = {"loss": self.loss}
        if len(self.learning_rates) == 1:
            values["lr"] = self.learning_rates[0]
        else:
            values |= {f"lr_{k}": lr for k, lr in enumerate(self.learning_rates)}
        if self.grad_norm is not None:
            values["grad_norm"] = self.grad_norm
        values["samples_per_s"] = self.samples_per_s
        return values


@dataclass(frozen=True, kw_only=True)
class ValidationReport:
    """The figures of one validation.

    Attributes:
        step: training steps committed before it.
        epoch: in which it was made, from 0.
        metrics: by name.
        time_s: of its end, in seconds since 1970.
    """

    task: str
    step: int
    epoch: int
    loss: float
    metrics: dict[str, float]
    time_s: float

    def values(self) -> dict[str, float]:
        """Return the figures by the names that files have: "validation_loss", and "metrics_NAME" of each metric."""
        return {"validation_loss": self.loss, **{f"metrics_{name}": value for name, value in self.metrics.items()}}


@dataclass(frozen=True, kw_only=True)
class TaskStart:
    """A task begins to train in a run, or goes on.

    Attributes:
        steps: training steps committed before.
        validated_at: training steps committed before its last validation so far; None: it was never validated.
        is_new: nothing was logged of it: it begins with its first step, or as a fork of another task.
    """

    task: str
    seed: int
    hparams: Mapping[str, Any]
    steps: int
    validated_at: int | None
    is_new: bool

    def has(self, step: int, *, validation: bool) -> bool:
        """Return True if the task goes on after this step, or after the validation there; else it will come again."""
        if validation:
            return self.validated_at is not None and step <= self.validated_at
        return step <= self.steps


class Logger:
    """Takes the values of tasks as they train; derive from it, and override what you need.

    All calls come from one thread of the logger's own, one at a time and in the order of what happened, of all tasks of
    a run; orchestrators that train at the same time need one each. Training waits for none of them. A call that raises
    loses its values; after the third, the logger is dropped for the run. Where `begin_task` raises, that task alone is
    not logged. 10,000 values wait at most, and what comes while so many do is lost. All of that is told on stderr and
    in `report.messages`.

    Draw nothing from `random`, `numpy.random` and torch's default generator: loaders draw from them at the same time.
    """

    def begin_task(self, start: TaskStart) -> None:
        """A task begins to train, or goes on: of what was logged, all that `start.has` denies will come again."""

    def log_step(self, step: StepReport) -> None:
        """A training step was committed."""

    def log_validation(self, validation: ValidationReport) -> None:
        """A validation is over."""

    def end_task(self, task: str, status: str) -> None:
        """A task is "finished", "failed", "stopped" or "paused"; one that is paused may begin again."""

    def close(self) -> None:
        """The run is over: nothing more is told until the next one. It has 10 seconds, with all that still waits."""


def checked_loggers(loggers: Sequence[Logger]) -> list[Logger]:
    """Return the loggers as a list; raise for what is none, and for one that is given twice."""
    if isinstance(loggers, Logger) or not isinstance(loggers, Sequence) or isinstance(loggers, str):
        raise TypeError(f"loggers: {loggers!r} is a {type(loggers).__name__}, not a list; give loggers=[...]")
    for each in loggers:
        if not isinstance(each, Logger):
            raise TypeError(
                f"loggers: {each!r} is a {type(each).__name__}, not a Logger; give an instance of a class "
                f"derived from hydra_engine.Logger"
            )
    if len({id(each) for each in loggers}) < len(loggers):
        raise ValueError("loggers: one is given twice, limit: once; make one of its own for each place to log to")
    return list(loggers)
