"""An optimizer's saved state, put back bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


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
