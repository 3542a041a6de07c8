"""The dynamic loss scale of a float16 task: `torch.amp.GradScaler`'s rule, decided by the step's finished gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hydra_engine.tasks import ModelTask


class LossScale:
    """Factor of the loss, with which small gradients survive float16.

    Grows after so many finite steps in a row, shrinks after one that is not: the rule and the defaults of
    https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler, whose own `update` wants its own `step`.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        num_finite: int = 0,
    ) -> None:
        self.scale = scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._num_finite = num_finite

    @classmethod
    def of(cls, task: ModelTask) -> LossScale | None:
        """A task's own: as its `grad_scaler` stands, which is read and never changed."""
        if task.precision != "float16":
            return None
        scaler = task.grad_scaler
        if scaler is None:
            return cls()
        return cls(
            scaler.get_scale(),
            scaler.get_growth_factor(),
            scaler.get_backoff_factor(),
            scaler.get_growth_interval(),
            scaler.state_dict()["_growth_tracker"],
        )

    def state_dict(self) -> dict[str, Any]:
        """State that `torch.amp.GradScaler` can load."""
        return {
            "scale": self.scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._num_finite,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as that one stood."""
        self.scale = state["scale"]
        self._growth_factor = state["growth_factor"]
        self._backoff_factor = state["backoff_factor"]
        self._growth_interval = state["growth_interval"]
        self._num_finite = state["_growth_tracker"]

    def update(self, is_finite: bool) -> None:
        """Take in whether all of a step's gradients were finite."""
        if not is_finite:
            self.scale = _float32(self.scale * self._backoff_factor)
            self._num_finite = 0
            return
        self._num_finite += 1
        if self._num_finite == self._growth_interval:
            grown = _float32(self.scale * self._growth_factor)
            if math.isfinite(grown):
                self.scale = grown
            self._num_finite = 0


def _float32(value: float) -> float:
    """Round to float32, in which torch keeps it."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))
