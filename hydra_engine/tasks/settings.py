"""Settings of an optimizer and its schedule as a program makes them, and how they differ from those of a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hydra_engine.tasks.task import ModelTask

SCHEDULE = "lr_scheduler"
# In a schedule's state: they follow from the optimizer's learning rates.
_RATES = {"base_lrs", "_last_lr"}
# In a group: a schedule begins with them.
_BASES = {"lr", "initial_lr"}
_NEVER_SAVED = {"params", "param_names"}


class Difference(NamedTuple):
    """A setting that the program gives otherwise than the checkpoint has it."""

    what: str
    here: str
    saved: str

    def __str__(self) -> str:
        return f"{self.what}: {self.here} in the program, {self.saved} in the checkpoint"


def settings_of(
    task: ModelTask, optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], scheduler: Any
) -> dict[str, Any]:
    """Return the settings as a nested state, which a checkpoint takes.

    groups: options of the optimizer as they were before its schedule was made.
    """
    schedule = None
    if scheduler is not None:
        changed = [
            {name: value for name, value in _options(now).items() if name not in _BASES and value is not was.get(name)}
            for now, was in zip(optimizer.param_groups, groups, strict=True)
        ]
        schedule = {
            "kind": type(scheduler).__name__,
            "interval": task.lr_scheduler_interval,
            "state": _copied(_without_rates(scheduler.state_dict())),
            "groups": _copied(changed),
        }
    return {
        "optimizer": type(optimizer).__qualname__,  # its module is another one where a program is imported
        "groups": [_options(group) for group in groups],
        SCHEDULE: schedule,
        "epochs": task.epochs,
    }


def differences(here: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield what the program gives otherwise than it was saved, in words for people."""
    if here["optimizer"] != saved["optimizer"]:
        yield Difference("optimizer", here["optimizer"], saved["optimizer"])
    mine, theirs = here["groups"], saved["groups"]
    if len(mine) == len(theirs):
        names = dict.fromkeys(name for group in mine for name in group)
        for name in (each for each in names if all(each in group for group in (*mine, *theirs))):
            now, then = [group[name] for group in mine], [group[name] for group in theirs]
            if not _same(now, then):
                yield Difference(name, _shown(now), _shown(then))
    mine, theirs = here[SCHEDULE], saved[SCHEDULE]
    if not _same(mine, theirs):
        both = {} if mine is None or theirs is None else _flat(mine)
        changed = [name for name, value in both.items() if not _same(value, _flat(theirs).get(name, _same))]
        yield Difference(SCHEDULE, _described(mine, changed), _described(theirs, changed))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name not in _NEVER_SAVED
    }


def _without_rates(state: Any) -> Any:
    """Leave out what follows from learning rates; a schedule of schedules has theirs within."""
    if isinstance(state, dict):
        return {name: _without_rates(value) for name, value in state.items() if name not in _RATES}
    return [_without_rates(each) for each in state] if type(state) is list else state


def _copied(state: Any) -> Any:
    """Copy containers and tensors, and nothing else: a schedule may hold another one, with its optimizer."""
    if isinstance(state, Tensor):
        return state.clone()
    if type(state) is dict:
        return {name: _copied(value) for name, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_copied, state))
    return copy.copy(state) if isinstance(state, (dict, set, np.ndarray)) else state


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    try:
        return one is other or bool(one == other) or bool(one != one and other != other)  # NaN
    except Exception:  # of a type of the user's own
        return False


def _flat(schedule: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a schedule was made with, by name."""
    in_groups = {name: value for group in schedule["groups"] for name, value in group.items()}
    return {**in_groups, **schedule["state"], "interval": schedule["interval"]}


def _described(schedule: Mapping[str, Any] | None, names: Sequence[str]) -> str:
    if schedule is None:
        return "none"
    found, told = _flat(schedule), [name for name in names if not name.startswith("_")]
    return f"{schedule['kind']}({', '.join(f'{name}={found[name]!r}' for name in told or names if name in found)})"


def _shown(values: Sequence[Any]) -> str:
    """Show an option by groups, or once where it is the same in all."""
    return repr(values[0]) if all(_same(each, values[0]) for each in values) else ", ".join(map(repr, values))
