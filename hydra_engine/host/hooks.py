"""Hooks that users register on parameters: called on the host, after the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hydra_engine.host.layout import ModelLayout, Slot
from hydra_engine.host.pool import HostPool
from hydra_engine.host.staging import StepStaging


def has_hooks(layout: ModelLayout) -> bool:
    """Return True if the user has registered hooks on parameters."""
    return any(any(_hooks(slot.parameter)) for slot in layout.trainable_slots())


def _hooks(parameter: nn.Parameter) -> tuple[list[Any], list[Any]]:
    """Hooks on its gradient, and those that are called once that is in place."""
    after = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return list((parameter._backward_hooks or {}).values()), list((after or {}).values())


@torch.no_grad()  # as in a backward
def call_hooks(
    slots: Iterable[Slot],
    staging: StepStaging,
    pool: HostPool,
    finished: Callable[[Slot], Tensor],
    secure: Callable[[None], None],
) -> dict[int, Tensor]:
    """Let hooks act on the finished gradients of these parameters; gives what they left of them, by slot.

    secure: called, with None for all parameters, before a hook, which may step what it likes.
    """
    hooked: dict[int, Tensor] = {}
    for slot in slots:
        parameter = slot.parameter
        hooks, after = _hooks(parameter)
        if not (hooks or after) or not staging.has_gradient.get(slot.index):
            continue
        secure(None)
        gradient = hooked[slot.index] = finished(slot)
        for hook in hooks:
            changed = hook(gradient)
            if changed is not None and changed is not gradient:
                gradient.copy_(changed)
        for hook in after:
            parameter.grad = gradient
            hook(parameter)
            if parameter.grad is None:  # it was taken, for an optimizer of the hook's own
                staging.has_gradient[slot.index] = False
            elif parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
            parameter.grad = None
            pool.bring_back([slot])
            pool.renew([slot])  # the hook may have stepped an optimizer of its own
    return hooked
