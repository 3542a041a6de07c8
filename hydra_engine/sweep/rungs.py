"""Synchronous successive halving, whose trials wait at a rung on disk and not in DRAM.

https://arxiv.org/abs/1502.07943 (Jamieson and Talwalkar). Who goes on is decided once a rung is full, from what the
study has: a sweep that was killed at any moment decides the same again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# User attribute of a trial: the rung that it trains for, and whether it waits there. Missing: it trains for rung 0.
RUNG = "hydra_engine_rung"


@dataclass(frozen=True, kw_only=True)
class Rungs:
    """Rungs after `min_resource` validations, and `reduction_factor` times as many for each further rung.

    Of n trials at a rung, the best `n // reduction_factor` go on, but at least one; the others are pruned.
    """

    min_resource: int = 1
    reduction_factor: int = 3

    def __post_init__(self) -> None:
        for field, least in (("min_resource", 1), ("reduction_factor", 2)):
            number = getattr(self, field)
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"{field}: {number!r} is a {type(number).__name__}; give an int")
            if number < least:
                raise ValueError(f"{field}: {number}, limit: at least {least}")

    def num_validations(self, rung: int) -> int:
        """Return the number of validations after which a trial is at a rung."""
        return int(self.min_resource * self.reduction_factor**rung)

    def decide(self, trials: Sequence[Any], *, is_complete: bool, maximize: bool) -> tuple[list[int], list[int]]:
        """Return the numbers of trials that go on from the lowest rung that is not empty, and of those to be pruned.

        None while a trial is still to come there. trials: of the sweep, as the study has them. is_complete: no more are
        to be asked for.
        """
        running = [each for each in trials if each.state.name == "RUNNING"]
        if not is_complete or not running:
            return [], []
        rung = min(rung_of(each) for each in running)
        here = [each for each in running if rung_of(each) == rung]
        if not all(waits(each) for each in here):
            return [], []
        step = self.num_validations(rung) - 1
        # Beside those that wait, trials that this very decision was about, before the process was killed.
        decided = [each for each in trials if rung_of(each) > rung or (each.state.name == "PRUNED" and waits(each))]
        ranked = sorted(
            (each for each in (*here, *decided) if step in each.intermediate_values and rung_of(each) >= rung),
            key=lambda each: (_badness(each.intermediate_values[step], maximize), each.number),
        )
        best = [each.number for each in ranked[: max(1, len(ranked) // self.reduction_factor)]]
        numbers = [each.number for each in here]
        return [number for number in best if number in numbers], [number for number in numbers if number not in best]


def mark(rung: int, *, waits: bool) -> dict[str, Any]:
    """Return the value of the attribute `RUNG`."""
    return {"rung": rung, "waits": waits}


def rung_of(trial: Any) -> int:
    """Return the rung that a trial trains for, or waits at."""
    return int(trial.user_attrs.get(RUNG, {"rung": 0})["rung"])


def waits(trial: Any) -> bool:
    """Return True if a trial is saved at its rung."""
    return bool(trial.user_attrs.get(RUNG, {"waits": False})["waits"])


def _badness(value: float, maximize: bool) -> tuple[bool, float]:
    return value != value, -value if maximize else value
