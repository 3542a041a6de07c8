"""Autograd's graph of one shard: where tensors come into it, what it saves, and how it is kept for its backward."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from partitioners.skips import Frame


class Arrival:
    """A tensor that arrives from below, and the gradient that leaves it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.gradient: Tensor | None = None


class Arrive(torch.autograd.Function):
    """Brings a tensor into a graph as a non-leaf, as in plain PyTorch, and catches its gradient as autograd has it.

    A leaf would not do: in-place layers refuse it, and its `.grad` is laid out anew, where the kernels below would get
    other strides than in plain PyTorch.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, arrival: Arrival) -> Tensor:
        ctx.arrival = arrival
        ctx.set_materialize_grads(False)
        # Not kept: tensor -> graph -> arrival -> tensor would live on until the cyclic collector comes by.
        tensor, arrival.tensor = arrival.tensor, None
        assert tensor is not None
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        ctx.arrival.gradient = gradients[0]
        return None, None


@dataclass(kw_only=True)
class Graph:
    """One micro-batch's forward, as autograd has it, until its backward."""

    arrivals: list[Arrival | None]
    outputs: list[GradientEdge | None]  # where gradients come in; not the tensors, which nobody needs
    frame: Frame


class Saved:
    """What autograd saves in a unit's forward, beside the slabs: counted, and kept where asked for."""

    def __init__(self, *, keeps: bool) -> None:
        self.graphs: list[Graph] | None = [] if keeps else None
        self.num_bytes = 0
        # By weak references: an address may be another storage's once what it was is dropped.
        self._storages: set[StorageWeakRef] = set()

    def begin(self, slabs: Iterable[Tensor]) -> None:
        """A unit whose parameters are these runs from here on."""
        self._storages = {_reference(tensor) for tensor in slabs}

    def hooks(self) -> AbstractContextManager[Any]:
        """Around one micro-batch's forward."""
        return saved_tensors_hooks(self._pack, _unpacked)

    def _pack(self, tensor: Tensor) -> Tensor | None:
        reference = _reference(tensor)
        if reference not in self._storages:
            self._storages.add(reference)
            self.num_bytes += tensor.untyped_storage().nbytes()
        # Not itself: an output that is saved would refer to its graph, and that to it.
        return None if self.graphs is None else tensor.detach()


def _reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _unpacked(packed: Any) -> Any:
    return packed
