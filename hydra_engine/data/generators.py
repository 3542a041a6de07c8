"""The random generators that a loader holds itself, beside the process-wide ones: found, read and put back."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hydra_engine.data.streams import copied

_MAX_DEPTH = 4  # loader, batch sampler, sampler, a sampler inside that
_MAX_ITEMS = 64  # of a container: transforms, not samples
_MAX_FOUND = 1000  # in one object: beyond that it is data
_EMPTY = CellType()  # a variable of a closure that has no value yet
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
OPEN = "_iterator"  # of torch's loaders with persistent workers: there or not, and nothing of it is to be put back


def held_by(loader: Any) -> list[Any]:
    """What a loader, its samplers and its data set hold, down to random generators; in the same order everywhere."""
    seen: dict[int, Any] = {}

    def walk(holder: Any, depth: int) -> None:
        for value in contents(holder):
            if id(value) in seen or isinstance(value, Tensor):
                continue
            if isinstance(value, _KINDS):
                seen[id(value)] = value
            elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType)):
                seen[id(value)] = value
                walk(value, depth - 1)

    walk(loader, _MAX_DEPTH)
    return list(seen.values())


def num_workers_of(loader: Any) -> int:
    """Return how many workers a loader begins, or the loaders that it holds: many a one is wrapped."""
    return sum(getattr(each, "num_workers", 0) for each in (loader, *held_by(loader)) if isinstance(each, DataLoader))


def contents(holder: Any) -> list[Any]:
    """Return what an object holds in attributes, and a function in its closure; small containers are opened."""
    if isinstance(holder, nn.Module):  # whose layers hold none
        return [value for value in vars(holder).values() if not isinstance(value, dict)]
    found = [value for name, value in getattr(holder, "__dict__", {}).items() if name != OPEN]
    if isinstance(holder, FunctionType):
        found += [cell.cell_contents for cell in holder.__closure__ or () if cell != _EMPTY]
    elif isinstance(holder, partial):
        found += [holder.func, *holder.args, *holder.keywords.values()]
    opened: dict[int, Any] = {}
    for value in found:  # which grows
        if len(found) > _MAX_FOUND:
            break
        if type(value) in (list, tuple, dict) and len(value) <= _MAX_ITEMS and id(value) not in opened:
            opened[id(value)] = value
            found += value.values() if isinstance(value, dict) else value
    return found


def generators_of(loader: Any) -> list[Any]:
    """The random generators that a loader, its samplers and its data set hold."""
    return [value for value in held_by(loader) if isinstance(value, _KINDS)]


def states_of(loader: Any) -> tuple[Any, ...]:
    """Return the states of its generators, in an order that is the same in every process."""
    return tuple(map(_state, generators_of(loader)))


def putting_back(loader: Any) -> Callable[[], None]:
    """Return a function that sets the generators that it holds now to where they are now."""
    generators = generators_of(loader)
    return partial(_set_states, generators, tuple(map(_state, generators)))


def set_states(loader: Any, states: tuple[Any, ...]) -> None:
    """Put its generators back; raises ValueError where there are others than were saved."""
    generators = generators_of(loader)
    if len(generators) != len(states):
        raise ValueError(
            f"the loader holds {len(generators)} random generators, and {len(states)} were saved; resume with the "
            f"loader that was saved"
        )
    _set_states(generators, states)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return copied(generator.bit_generator.state)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_states(generators: Sequence[Any], states: Sequence[Any]) -> None:
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        else:
            generator.set_state(state)
