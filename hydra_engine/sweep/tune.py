"""A trainable for Ray Tune: each of its trials is a task of the engine, in a process of Ray's.

A step of the trainable is a validation. At the first step of training after it the task is paused: it is saved, its
memory is given back, and the next step of the trainable goes on with its bits, in this process or in another.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hydra_engine import Callback, DeviceSpec, ModelOrchestrator, ModelTask, PauseTask, TaskReport, stream_seed
from hydra_engine.sweep.cluster import load_ray
from hydra_engine.sweep.objective import LOSS, Objective

_NAME = "trial"


class _Pause(Callback):
    """Pauses a task at the first step after a validation: only then is it known that there is one."""

    reads_model = False

    def __init__(self) -> None:
        self._is_due = False

    def on_validation(self, report: TaskReport) -> None:
        self._is_due = True

    def on_step(self, report: TaskReport) -> None:
        if self._is_due:
            self._is_due = False
            raise PauseTask


def trainable(
    build_task: Callable[[dict[str, Any]], ModelTask],
    *,
    devices: Sequence[DeviceSpec | str] | None = None,
    seed: int = 0,
) -> Any:
    """Return a `ray.tune.Trainable` for `tune.Tuner`, whose trials may be larger than a GPU.

        tune.Tuner(tune.with_resources(trainable(build_task), {"cpu": 2, "gpu": 1}), param_space=..., tune_config=...)

    Each validation is a result: "validation_loss", the task's metrics and "steps". Schedulers of Tune stop and pause
    trials; where Tune saves one, it goes on with its bits. A setting that a scheduler changes in a trial that goes on
    (population-based training) does not reach its optimizer, which is restored as it was saved.

    Args:
        build_task: (config) -> ModelTask with `validation=` and without `name=`. It is called with torch's random
            stream seeded by `seed`, so a trial's results depend on its config alone; on it depends what is restored.
        devices: as of `ModelOrchestrator`, of each trial: those that Ray gives it.
        seed: of the random stream.

    Raises ImportError without Ray Tune.
    """
    load_ray()
    try:
        from ray import tune
    except ImportError as error:
        raise ImportError(f"trainable: ray.tune lacks {error.name}; `pip install 'ray[tune]'`") from error

    class EngineTrainable(tune.Trainable):  # type: ignore[misc]  # Ray is not there for mypy
        def setup(self, config: dict[str, Any]) -> None:
            self._folder = Path(tempfile.mkdtemp(prefix="hydra-trial-"))

        def step(self) -> dict[str, Any]:
            torch.manual_seed(stream_seed(seed, 0, 0))
            task = build_task(self.config)
            Objective((LOSS,)).check(task, _NAME)
            task.name, task.callbacks = _NAME, (*task.callbacks, _Pause())
            orchestra = ModelOrchestrator([task], devices=devices, checkpoint_dir=self._folder, keep=1)
            orchestra.verbose = 0
            report = orchestra.train_models(resume=True).tasks[_NAME]
            return {
                LOSS: report.validation_losses[-1] if report.validation_losses else math.nan,
                **{name: values[-1] for name, values in report.validation_metrics.items()},
                "steps": report.steps,
                "done": report.status != "paused",
            }

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            shutil.copytree(self._folder, checkpoint_dir, dirs_exist_ok=True)

        def load_checkpoint(self, checkpoint: str) -> None:
            shutil.rmtree(self._folder)
            shutil.copytree(checkpoint, self._folder)

        def cleanup(self) -> None:
            shutil.rmtree(self._folder, ignore_errors=True)

    return EngineTrainable
