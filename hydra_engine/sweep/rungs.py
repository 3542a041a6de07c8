"""Synchronous successive halving, whose trials wait at a rung on disk and not in DRAM.

https://arxiv.org/abs/1502.07943 (Jamieson and Talwalkar). Who goes on is decided once a rung is full, from what the
study has: a sweep that was killed at any moment decides the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from partitioners.plain_numbers import make_plain, whole_number

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
        make_plain(self)
        whole_number("min_resource", self.min_resource)
        whole_number("reduction_factor", self.reduction_factor, 2)

    def num_validations(self, rung: int) -> int:
        """Return the number of validations after which a trial is at a rung."""
        return int(self.min_resource * self.reduction_factor**rung)

    def decide(self, trials: Sequence[Any], *, is_complete: bool, maximize: bool, seed: int) -> Decision:
        """Decide who goes on from the lowest rung that is not empty, and who is pruned; nothing is drawn here."""
        found = full_rung(trials, self.num_validations, is_complete=is_complete, maximize=maximize)
        if found is None:
            return Decision()
        best = [each.number for each, _ in found.ranked[: max(1, len(found.ranked) // self.reduction_factor)]]
        goes_on = [number for number in best if number in found.here]
        return Decision(goes_on, [number for number in found.here if number not in best])


class Birth(NamedTuple):
    """A trial that begins at a rung with values, and with user attributes."""

    rung: int
    params: dict[str, Any]
    distributions: dict[str, Any]
    user_attrs: dict[str, Any]


class Decision(NamedTuple):
    """Numbers of trials that go on from a rung, and of those to be pruned, and trials that begin there."""

    goes_on: Sequence[int] = ()
    ends: Sequence[int] = ()
    births: Sequence[Birth] = ()


class FullRung(NamedTuple):
    """A rung that all trials have come to which are not over."""

    rung: int
    here: list[int]  # numbers of trials that wait there
    ranked: list[tuple[Any, float]]  # trials and their values there, the best first


def full_rung(
    trials: Sequence[Any], num_validations: Callable[[int], int], *, is_complete: bool, maximize: bool
) -> FullRung | None:
    """Return the lowest rung that is not empty; None while a trial is still to come there.

    trials: of the sweep, as the study has them. is_complete: no more are to be asked for.
    """
    running = [each for each in trials if each.state.name == "RUNNING"]
    if not is_complete or not running:
        return None
    rung = min(rung_of(each) for each in running)
    here = [each for each in running if rung_of(each) == rung]
    if not all(waits(each) for each in here):
        return None
    step = num_validations(rung) - 1
    # Beside those that wait, trials that this very decision was about, before the process was killed.
    decided = [each for each in trials if rung_of(each) > rung or (each.state.name == "PRUNED" and waits(each))]
    ranked = [
        (each, each.intermediate_values[step])
        for each in (*here, *decided)
        if step in each.intermediate_values and rung_of(each) >= rung
    ]
    ranked.sort(key=lambda each: (*_rank(each[1], maximize=maximize), each[0].number))
    return FullRung(rung, [each.number for each in here], ranked)


def _rank(value: float, *, maximize: bool) -> tuple[bool, float]:
    """Return a key for sorting: the best first, and what is no number last. NaN itself would stand anywhere."""
    is_number = value == value
    return not is_number, (-value if maximize else value) if is_number else 0.0


def mark(rung: int, *, waits: bool) -> dict[str, Any]:
    """Return the value of the attribute `RUNG`."""
    return {"rung": rung, "waits": waits}


def rung_of(trial: Any) -> int:
    """Return the rung that a trial trains for, or waits at."""
    return int(trial.user_attrs.get(RUNG, {"rung": 0})["rung"])


def waits(trial: Any) -> bool:
    """Return True if a trial is saved at its rung."""
    return bool(trial.user_attrs.get(RUNG, {"waits": False})["waits"])
