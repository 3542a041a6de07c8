"""A shard as it was before its optimizer stepped it, so that a step that raises half-way leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hydra_engine.saved_state import copied
from hydra_engine.shard import Slot


class BeforeUpdate:
    """Copies of a shard's weights, gradients, averages and optimizer state: as many bytes again, until it is let go of.

    Gradients too: clipping scales them in place, and so do some optimizers.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        slots: Sequence[Slot],
        gradients: Iterable[Tensor],
        averages: Iterable[Tensor],
    ) -> None:
        """`slots`: that the update may step."""
        self._optimizer = optimizer
        self._places = [(slot.parameter, slot.parameter.data) for slot in slots]
        tensors = [*(place for _, place in self._places), *gradients, *averages]
        self._tensors = [(tensor, tensor.clone()) for tensor in tensors]
        self._states = [(slot.parameter, _kept(optimizer.state.get(slot.parameter))) for slot in slots]

    @torch.no_grad()
    def put_back(self) -> None:
        """Make everything as it was: in the same memory, which others may refer to."""
        for parameter, place in self._places:
            parameter.data = place  # which an optimizer may have put elsewhere
        for tensor, before in self._tensors:
            tensor.copy_(before)
        for parameter, state in self._states:
            if state is None:
                self._optimizer.state.pop(parameter, None)
            else:
                self._optimizer.state[parameter] = {name: _as_it_was(*each) for name, each in state.items()}


def _kept(state: Mapping[str, Any] | None) -> dict[str, tuple[Any, Any]] | None:
    """Each value of a parameter's state, with a copy of it."""
    return None if state is None else {name: (value, copied(value)) for name, value in state.items()}


def _as_it_was(value: Any, before: Any) -> Any:
    if isinstance(value, Tensor) and value.shape == before.shape and value.dtype == before.dtype:
        value.copy_(before)
        return value
    return before
