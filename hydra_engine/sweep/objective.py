"""The figures that a sweep optimizes, read from a trial's task and report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra_engine import ModelTask, TaskReport

LOSS = "validation_loss"


@dataclass(frozen=True)
class Objective:
    """One figure of a validation, or several, in the order of the study's directions."""

    names: tuple[str, ...]  # of metrics, or `LOSS`

    @classmethod
    def parse(cls, metric: str | Sequence[str] | None) -> Objective:
        """Read `metric` as the user gave it; raises TypeError or ValueError."""
        names = (LOSS,) if metric is None else (metric,) if isinstance(metric, str) else tuple(metric)
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f"metric: {metric!r}, limit: names of metrics; give one name, or a list of names")
        if not names or len(set(names)) < len(names):
            raise ValueError(f"metric: {metric!r}, limit: at least one name, each once; None is the validation loss")
        return cls(names)

    def check(self, task: Any, trial: str) -> None:
        """Raise TypeError or ValueError for what `build_task` returned, if it cannot be trained for these figures."""
        if not isinstance(task, ModelTask):
            raise TypeError(f"build_task: {trial} got a {type(task).__name__}, limit: a ModelTask; return one")
        if task.name is not None:
            raise ValueError(
                f"build_task: {trial} got a task named {task.name!r}, and two trials may not have one name; leave out "
                f"name=, the sweep gives each its own"
            )
        if task.validation is None:
            raise ValueError(
                f"build_task: {trial} got a task without validation=, which {' and '.join(self.names)} is measured on; "
                f"give it a validation loader"
            )
        missing = [name for name in self.names if name != LOSS and name not in task.metrics]
        if missing:
            known = ", ".join(map(repr, [LOSS, *task.metrics]))
            raise ValueError(
                f"metric: {missing[0]!r}, known of {trial}'s task: {known}; add it to metrics= of the task, or name "
                f"one of these"
            )

    def outcome(self, task: ModelTask, report: TaskReport) -> list[float] | None:
        """Return the figures of the weights that a task has left: of its best validation, or of its last."""
        if task.keep_best is None or report.best_step not in report.validation_steps:
            return self.last(report)
        return self._at(report, report.validation_steps.index(report.best_step))

    def last(self, report: TaskReport) -> list[float] | None:
        """Return the figures of the last validation; None if there was none."""
        return self._at(report, -1) if report.validation_losses else None

    def _at(self, report: TaskReport, k: int) -> list[float]:
        return [
            float(report.validation_losses[k] if name == LOSS else report.validation_metrics[name][k])
            for name in self.names
        ]
