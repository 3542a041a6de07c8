"""Indices that the loader gives, checked in DRAM: on a device, one out of range would take the whole process down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from partitioners.boundary import Boundary


def direct_limit(layer: nn.Module) -> int | None:
    """Return the number that indices into a layer must stay below, where its class tells it."""
    return layer.num_embeddings if isinstance(layer, nn.Embedding) else None


class IndexLimit:
    """The number that indices into a layer must stay below, as its first run shows: embeddings get them unchanged."""

    def __init__(self, layer: nn.Module) -> None:
        self.found = direct_limit(layer)
        self._layer = layer
        self._entered: set[int] = set()  # storages of integers
        self._is_seen = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run the body, which runs the layer."""
        inside = [module for module in self._layer.modules() if isinstance(module, nn.Embedding)]
        if self._is_seen or not inside or inside == [self._layer]:
            yield
            return
        self._is_seen = True
        handles = [self._layer.register_forward_pre_hook(self._enters)]
        handles += [module.register_forward_pre_hook(self._looks_up) for module in inside]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enters(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        self._entered = {each.untyped_storage().data_ptr() for each in tensors if not each.is_floating_point()}

    def _looks_up(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(module, nn.Embedding)
        indices = arguments[0] if arguments else None
        if isinstance(indices, Tensor) and indices.untyped_storage().data_ptr() in self._entered:
            self.found = min(module.num_embeddings, self.found or module.num_embeddings)


def check_indices(value: Boundary, limit: int, layer: str) -> None:
    """Raise IndexError where a batch gives a layer indices that it cannot look up."""
    tensors = [tensor for tensor in value.tensors if not tensor.is_floating_point() and tensor.numel()]
    if len(tensors) != 1 or tensors[0].is_complex() or not tensors[0].dtype.is_signed:
        return  # which of them is looked up, it cannot tell
    least, most = (int(each) for each in tensors[0].aminmax())
    if least < 0 or most >= limit:
        wrong = least if least < 0 else most
        raise IndexError(
            f"layer {layer} is to look up index {wrong}, limit: 0 to {limit - 1}; give the embedding more rows, or "
            f"mend the loader"
        )
