"""A logger for Weights & Biases, offline unless it is asked for more."""

from __future__ import annotations

import os
import uuid
from types import ModuleType
from typing import Any

from hydra_engine import Logger, StepReport, TaskStart, ValidationReport


class WandbLogger(Logger):
    """Logs each task as a run of Weights & Biases, under DIRECTORY/wandb; `wandb sync` uploads it later.

    A run has the task's name, is in a group of that name, and has `hparams`, "seed" and "steps_before" as its config.
    Offline runs cannot be resumed: a task that goes on is one more run of its group, and begins with its next step.

    Args:
        project: of Weights & Biases.
        directory: that runs are written to; made if it is not there.
        options: for `wandb.init`, such as group="sweep", tags=["a"] or mode="online".

    Raises ImportError without the package `wandb`.
    """

    def __init__(self, project: str, directory: str | os.PathLike[str] = ".", **options: Any) -> None:
        _load()
        self._project = project
        self._directory = os.fspath(directory)
        self._options = options
        self._runs: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"WandbLogger({self._project!r}, {self._directory!r})"

    def begin_task(self, start: TaskStart) -> None:
        os.makedirs(self._directory, exist_ok=True)  # or wandb takes a temporary one
        options = {
            "project": self._project,
            "dir": self._directory,
            "mode": "offline",
            "name": start.task,
            "group": start.task,
            "id": uuid.uuid4().hex,  # drawn from the system: no generator of a loader's moves
            "config": {**start.hparams, "seed": start.seed, "steps_before": start.steps},
            "reinit": "create_new",  # tasks train side by side
            "settings": {"console": "off", "silent": True},  # the terminal belongs to the progress
        }
        self._runs[start.task] = _load().init(**{**options, **self._options})

    def log_step(self, step: StepReport) -> None:
        self._runs[step.task].log({**step.values(), "epoch": step.epoch}, step=step.step)

    def log_validation(self, validation: ValidationReport) -> None:
        self._runs[validation.task].log(validation.values(), step=validation.step)

    def end_task(self, task: str, status: str) -> None:
        if task in self._runs:
            self._runs.pop(task).finish(exit_code=int(status == "failed"))

    def close(self) -> None:
        while self._runs:
            self._runs.popitem()[1].finish(exit_code=1)


def _load() -> ModuleType:
    try:
        import wandb
    except ImportError as error:
        raise ImportError(
            "WandbLogger: wandb is not installed; install it (pip install 'hydra_engine[wandb]'), or log to a CsvLogger"
        ) from error
    return wandb  # type: ignore[no-any-return]
