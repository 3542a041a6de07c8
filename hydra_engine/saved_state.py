"""A task's optimizer, learning-rate schedule, random stream and losses as values that a checkpoint takes, and back.

`hydra_engine.nested.flatten` takes what comes out of here, bit for bit. The state dicts of torch's own optimizers and
schedulers it takes as they are; what is here is for what would change on the way back, or has no state dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hydra_engine.randomness import RandomState


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Put back what `optimizer.state_dict()` gave; its tensors are taken over, so that DRAM holds them once.

    `load_state_dict` of torch casts state to its parameter's type and rebuilds whatever can be iterated, so that an
    average in float32 beside a bfloat16 weight, or counts, would be rounded. Here each value is put back as it was;
    only groups go through `load_state_dict`. An optimizer that has a `load_state_dict` of its own is trusted with all.

    After the scheduler was made, which sets learning rates. Raises ValueError where groups or parameters differ.
    """
    now, then = (
        [len(group["params"]) for group in groups] for groups in (optimizer.param_groups, saved["param_groups"])
    )
    if now != then:
        raise ValueError(
            f"the optimizer has groups of {now} parameters, and the saved one of {then}; resume with the model and the "
            f"optimizer= that were saved"
        )
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        optimizer.load_state_dict(dict(saved))
        return
    optimizer.load_state_dict({**saved, "state": {}})
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_index = dict(zip(indices, parameters, strict=True))
    for key, state in saved["state"].items():
        parameter = by_index.get(key, key)  # an optimizer may keep something under a name
        _check_shapes(key, parameter, state)
        optimizer.state[parameter] = state


def _check_shapes(key: Any, parameter: Any, state: Any) -> None:
    """Averages have their parameter's shape; a swap of two would be noticed late, or never."""
    names = ("exp_avg", "exp_avg_sq", "momentum_buffer", "max_exp_avg_sq", "square_avg")
    for name, value in state.items() if isinstance(parameter, Tensor) and isinstance(state, Mapping) else ():
        if name in names and isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
            raise ValueError(
                f"parameter {key} has shape {tuple(parameter.shape)}, and its saved {name} {tuple(value.shape)}; "
                f"resume with the model that was saved"
            )


def random_to_state(random: RandomState) -> dict[str, Any]:
    """A random stream's states by name, the way they are."""
    return random._asdict()


def random_from_state(saved: Mapping[str, Any]) -> RandomState:
    """The other way round; raises ValueError where one is missing, or there is one more."""
    if saved.keys() != set(RandomState._fields):
        raise ValueError(
            f"a random stream's states are {list(saved)}, expected {list(RandomState._fields)}; resume with the "
            f"hydra_engine that saved them"
        )
    return RandomState(**saved)


def losses_to_state(losses: list[float]) -> Tensor:
    """One number for each step, as a tensor in float64: a run of days has millions, and JSON needs thrice the room."""
    return torch.tensor(losses, dtype=torch.float64)


def losses_from_state(saved: Tensor) -> list[float]:
    """The other way round, every NaN with the bits it had."""
    return saved.tolist()


def copied(state: Any) -> Any:
    """State that goes on changing, as it is now: its tensors in DRAM of their own, strides kept, one for each object.

    Dicts, lists, tuples, sets and numpy arrays are copied as what they are; all else is kept.
    """
    return _copied(state, {})


def _copied(value: Any, made: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in made:
            made[id(value)] = value.detach().to("cpu", copy=True)
        return made[id(value)]
    if isinstance(value, dict):
        rebuilt = value.copy()  # an OrderedDict stays one, a defaultdict keeps its default
        for key, each in value.items():  # one by one: a Counter's update adds
            rebuilt[key] = _copied(each, made)
        return rebuilt
    if type(value) in (list, tuple):
        return type(value)(_copied(each, made) for each in value)
    return value.copy() if isinstance(value, (np.ndarray, set)) else value
