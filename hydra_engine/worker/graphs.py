"""Autograd's graph of one shard: where tensors come into it, what it saves, how it is kept, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from hydra_engine.data import copy_of
from hydra_engine.host import NormGroups, Shard, Structure, square_norms
from partitioners.boundary import UnfitTensor, check_fit
from partitioners.skips import Frame


@dataclass(eq=False)
class Arrival:
    """A tensor that arrives from below, and the gradient that leaves it."""

    tensor: Tensor | None
    gradient: Tensor | None = None


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
        if ctx.arrival.gradient is not None:
            raise RuntimeError(
                "differentiates what entered its shard a second time, limit: one backward in a step, since the shards "
                "below run theirs once; return the loss, without calling backward() on the way"
            )
        ctx.arrival.gradient = gradients[0]
        return None, None


# Function.apply looks for wrappers of functorch's first, which what arrives never has: 2.5 of 6 us.
arrive: Callable[[Tensor, Arrival], Tensor] = super(torch.autograd.Function, Arrive).apply


@dataclass(kw_only=True)
class Graph:
    """One micro-batch's forward, as autograd has it, until its backward."""

    arrivals: list[Arrival | None]
    outputs: list[GradientEdge | None]  # where gradients come in; not the tensors, which nobody needs
    frame: Frame


@dataclass(kw_only=True)
class GraphUse:
    """Graphs that a unit makes, or goes on from."""

    saved: SavedTensors | None = None  # a forward: counts or keeps what autograd saves
    granted_bytes: int = 0  # a forward: for graphs to keep
    key: Hashable = None  # a backward: of `graphs`, pinned
    graphs: Sequence[Graph] = ()  # a backward: its forward's


class SavedTensors:
    """Tensors that autograd saves in a unit's forward, beside the slabs: counted, and kept where there is room."""

    def __init__(self, room: int | None = None) -> None:
        """`room`: bytes for graphs to keep; None: they are only counted."""
        self._room = room or 0
        self.graphs: list[Graph] | None = None if room is None else []  # of the micro-batches so far; None: not kept
        self.num_bytes = 0  # that were saved
        self.all_seen = True  # the graphs hold nothing else: no layer keeps tensors for its backward by itself
        self.created_bytes: Callable[[], int] | None = None  # of what operations created and is alive, where metered
        self._created_before = 0
        # By weak references: an address may be another storage's once what it was is dropped.
        self._storages: set[StorageWeakRef] = set()

    def begin(self, slabs: Iterable[Tensor]) -> None:
        """Begin with a unit, whose parameters are these: they are not counted."""
        self._storages = {_reference(tensor) for tensor in slabs}

    def hooks(self) -> AbstractContextManager[Any]:
        """Return the context of one micro-batch's forward."""
        if self.created_bytes is not None:
            self._created_before = self.created_bytes()
        return saved_tensors_hooks(self._pack, lambda packed: packed)

    def weigh(self, tensors: Iterable[Tensor]) -> None:
        """Find out whether the graph of a micro-batch's forward, which gave these tensors, holds more than was packed.

        Only where nothing is kept: what was packed is gone, and the graph holds whatever else was created and is there.
        """
        if self.created_bytes is None or self.graphs is not None:
            return
        given = {_reference(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        self.all_seen &= self.created_bytes() - self._created_before <= sum(given.values())

    def holds(self, tensor: Tensor) -> bool:
        """Return True if a graph that is kept holds a tensor's memory."""
        return self.graphs is not None and _reference(tensor) in self._storages

    def _pack(self, tensor: Tensor) -> Tensor | None:
        if tensor.layout != torch.strided:
            self.all_seen = False  # it has no storage to be counted by
            self.graphs = None
            return None
        reference = _reference(tensor)
        if reference not in self._storages:
            self._storages.add(reference)
            self.num_bytes += tensor.untyped_storage().nbytes()
            if self.num_bytes > self._room:
                self.graphs = None  # more than before: none of it is kept
        # Not itself: an output that is saved would refer to its graph, and that to it.
        return None if self.graphs is None else tensor.detach()


class GradientSums:
    """Adds up a unit's gradients over its micro-batches. Autograd adds wide ones; narrow ones are added in float32.

    With groups, those of each micro-batch are apart from the sums until the next one begins: they are measured.
    """

    def __init__(
        self, structure: Structure, shard: Shard, bound: Iterable[Tensor], groups: NormGroups | None = None
    ) -> None:
        """`bound`: the parameters and buffers of the unit, whose memory others write to once it is through."""
        self._groups = groups
        self._structure = structure
        self._shard = shard
        self._sums: dict[int, Tensor] = {}  # by slot, in float32: a narrow gradient so far; with groups, any
        self._bound = {tensor.untyped_storage().data_ptr() for tensor in bound}

    def go_on_from(self, so_far: Mapping[int, Tensor]) -> None:
        """Begin with gradients that are added to in place."""
        for index, gradient in so_far.items():
            parameter = self._structure.parameters[index]
            if gradient.dtype == parameter.dtype and self._groups is None:
                parameter.grad = gradient
            else:
                self._sums[index] = gradient

    def accumulate(self) -> None:
        """Add the gradients of the last micro-batch to those before it, except where autograd does."""
        for index in self._shard.owned:
            parameter = self._structure.parameters[index]
            if parameter.grad is None or (parameter.grad.dtype == torch.float32 and self._groups is None):
                continue
            if index in self._sums:
                self._sums[index].add_(parameter.grad)
            elif parameter.dtype.itemsize < torch.float32.itemsize:
                self._sums[index] = parameter.grad.float()
            elif (gradient := self._dense(index)) is not None:
                self._sums[index] = gradient
            parameter.grad = None

    def measured(self, gradients: Iterable[tuple[int, Tensor | None]] | None = None) -> Tensor | None:
        """Return squared norms by group, of the last micro-batch or of these; None: nobody wants them."""
        if self._groups is None:
            return None
        if gradients is None:
            gradients = [(index, self._structure.parameters[index].grad) for index in self._shard.owned]
        found: list[list[Tensor]] = [[] for _ in range(self._groups.number)]
        for index, gradient in gradients:
            if gradient is not None and index in self._groups.of:
                found[self._groups.of[index]].append(gradient)
        return torch.stack([square_norms(each).to(self._structure.device, torch.float32) for each in found])

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
        """Return the tensor without its graph, and as a copy if it is in the slab or a buffer; layer: for messages."""
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


def _reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
