"""Gradients of one unit's parameters, from its first micro-batch to what leaves the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hydra_engine.data import copy_of
from hydra_engine.host import Shard, Structure
from partitioners.boundary import UnfitTensor, check_fit


class GradientSums:
    """Adds up a unit's gradients over its micro-batches. Autograd adds wide ones; narrow ones are added in float32."""

    def __init__(self, structure: Structure, shard: Shard, bound: Iterable[Tensor]) -> None:
        """`bound`: the parameters and buffers of the unit, whose memory others write to once it is through."""
        self._structure = structure
        self._shard = shard
        self._sums: dict[int, Tensor] = {}  # by slot: a narrow gradient so far, in float32
        self._bound = {tensor.untyped_storage().data_ptr() for tensor in bound}

    def go_on_from(self, so_far: Mapping[int, Tensor]) -> None:
        """Begin with gradients that are added to in place."""
        for index, gradient in so_far.items():
            parameter = self._structure.parameters[index]
            if gradient.dtype == parameter.dtype:
                parameter.grad = gradient
            else:
                self._sums[index] = gradient

    def accumulate(self) -> None:
        """Add the narrow gradients of the last micro-batch to those before it."""
        for index in self._shard.owned:
            parameter = self._structure.parameters[index]
            if parameter.grad is None or parameter.grad.dtype == torch.float32:
                continue
            if index in self._sums:
                self._sums[index].add_(parameter.grad)
            else:
                self._sums[index] = parameter.grad.float()
            parameter.grad = None

    def taken(self, slots: Iterable[int]) -> dict[int, Tensor | None]:
        """Take the gradients of these slots; the parameters have none from here on."""
        found = {}
        for index in slots:
            found[index] = self._dense(index)
            self._structure.parameters[index].grad = None
        return found

    def totals(self, *, are_rounded: bool) -> dict[int, Tensor | None]:
        """Return the gradients over all micro-batches as they cross the link: narrow ones `are_rounded` at last."""
        if self._sums:
            self.accumulate()
        totals: dict[int, Tensor | None] = {}
        for index in self._shard.owned:
            total = self._sums.pop(index, None)
            if total is None:
                totals[index] = self._dense(index)
            else:
                totals[index] = total.to(self._structure.parameters[index].dtype) if are_rounded else total
        return totals

    def apart(self, tensor: Tensor, layer: str) -> Tensor:
        """Return the tensor without its graph, and as a copy where it lies in the slab or in a buffer.

        layer: the last one that ran, for messages.
        """
        if tensor.layout != torch.strided:
            check_fit(f"a gradient that leaves a shard, up to {layer},", tensor)
        tensor = tensor.detach()
        return copy_of(tensor) if tensor.untyped_storage().data_ptr() in self._bound else tensor

    def _dense(self, index: int) -> Tensor | None:
        """Return a parameter's gradient, apart from others. Raises UnfitTensor where it is sparse."""
        gradient = self._structure.parameters[index].grad
        if gradient is not None and gradient.layout != torch.strided:
            raise UnfitTensor(
                f"parameter {self._structure.slot_names[index]} received a gradient of layout {gradient.layout}, "
                f"limit: dense gradients; build its layer with sparse=False, or let its backward give a dense one"
            )
        return None if gradient is None else self.apart(gradient, "")
