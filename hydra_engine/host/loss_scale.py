"""The dynamic loss scale of a float16 task: `torch.amp.GradScaler`'s rule, decided by the step's finished gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from hydra_engine.tasks import ModelTask

_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")


class LossScale:
    """Factor of the loss, with which small gradients survive float16.

    Grows after so many finite steps in a row, shrinks after one that is not: the rule and the defaults of
    https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler, whose own `update` wants its own `step`.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Begin as `scaler` stands, which is read and never changed."""
        self._state = (torch.amp.GradScaler("cpu") if scaler is None else scaler).state_dict()

    @classmethod
    def of(cls, task: ModelTask) -> LossScale | None:
        return cls(task.grad_scaler) if task.precision == "float16" else None

    @property
    def scale(self) -> float:
        return float(self._state["scale"])

    def state_dict(self) -> dict[str, Any]:
        """State that `torch.amp.GradScaler` can load."""
        return dict(self._state)

    def restore(self, state: Mapping[str, Any], *, keeps_own: bool = False) -> list[tuple[str, str, str]]:
        """Go on as that one stood, by its settings or, `keeps_own`, by these; returns those that differ, by name."""
        own, self._state = self._state, {name: state[name] for name in self._state}
        changed = [name for name in _SETTINGS if own[name] != state[name]]
        if keeps_own:
            self._state |= {name: own[name] for name in changed}
        return [(name, repr(own[name]), repr(state[name])) for name in changed]

    def update(self, is_finite: bool) -> None:
        """Take in whether all of a step's gradients were finite."""
        state = self._state
        state["_growth_tracker"] = state["_growth_tracker"] + 1 if is_finite else 0
        if not is_finite:
            state["scale"] = _float32(self.scale * state["backoff_factor"])
        elif state["_growth_tracker"] == state["growth_interval"]:
            grown = _float32(self.scale * state["growth_factor"])
            state["scale"] = grown if math.isfinite(grown) else self.scale
            state["_growth_tracker"] = 0


def _float32(value: float) -> float:
    """Round to float32, in which torch keeps it."""
    return float(torch.tensor(value, dtype=torch.float32))
