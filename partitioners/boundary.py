"""Values that cross from one layer to the next: a tensor, or nested tuples, lists and dicts of tensors and more."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree

from partitioners.fingerprint import fingerprint


class UnfitTensor(TypeError):
    """A tensor cannot be carried from layer to layer, because it is more than strided memory."""


def check_fit(where: str, tensor: torch.Tensor) -> None:
    """Raise UnfitTensor for a tensor that is sparse, nested, quantized or of a class of its own."""
    kind = unusual_kind(tensor)
    if kind is not None:
        raise UnfitTensor(
            f"{where} is a {kind}, limit: plain strided tensors, which are copied from layer to layer; give what it "
            f"consists of as plain tensors, and put it together in the layer that uses it"
        )


def unusual_kind(tensor: torch.Tensor) -> str | None:
    """A name for a tensor that is more than strided memory; None for a plain one."""
    if tensor.is_nested:
        return "nested tensor"
    if tensor.layout != torch.strided:
        return f"tensor of layout {tensor.layout}"
    if tensor.is_quantized:
        return "quantized tensor"
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) or isinstance(tensor, FakeTensor)
    return None if plain else f"tensor of class {type(tensor).__name__}"


class Boundary:
    """A value, its tensors and how to build it from them again; a tensor that appears twice is one.

    ``views`` tells of each tensor whether its producer made it as a view; None asks the tensors themselves.
    """

    def __init__(self, value: Any, views: Sequence[bool] | None = None) -> None:
        self._leaves, self._spec = _pytree.tree_flatten(value)
        for leaf in self._leaves:
            if isinstance(leaf, torch.Tensor):
                check_fit("a layer's input or output", leaf)
            elif any(isinstance(held, torch.Tensor) for held in getattr(leaf, "__dict__", {}).values()):
                raise UnfitTensor(
                    f"a layer's input or output holds a {type(leaf).__name__} with tensors inside, which nobody would "
                    f"carry from layer to layer; pass tuples, lists and dicts of tensors"
                )
        self.tensors = list({id(leaf): leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)}.values())
        self.views = [tensor._is_view() for tensor in self.tensors] if views is None else views

    @property
    def num_bytes(self) -> int:
        """Bytes between first and last element of each tensor: strides are kept, so gaps travel too."""
        return sum(_extent_bytes(tensor) for tensor in self.tensors)

    @property
    def storage_bytes(self) -> int:
        """Bytes of the storages that its tensors keep alive, each storage once."""
        storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in self.tensors)}
        return sum(storage.nbytes() for storage in storages.values())

    @property
    def signature(self) -> Any:
        """Hashable; equal for values of the same structure, shapes, strides and types."""
        return fingerprint(self._leaves), str(self._spec), tuple(self.views)

    def detached(self) -> "Boundary":
        """The same values without the graph that made them, requiring grad where they did."""
        return self._replaced([tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self.tensors])

    def copied(self) -> "Boundary":
        """Fresh tensors for one run of a layer, which may work in place on them.

        Autograd forbids that on a leaf that requires grad, so those are made by a function of this boundary's tensors,
        which receive the gradients. Views stay views: working in place on one (on a Linear's output, given a batch of
        sequences) makes backward copy the whole gradient twice.
        """
        differentiable = [tensor for tensor in self.tensors if tensor.requires_grad]
        for tensor in differentiable:
            tensor.grad = None  # the run before this one
        entered = iter(_Enter.apply(*differentiable) if differentiable else ())  # type: ignore[no-untyped-call]
        copies = [next(entered) if tensor.requires_grad else tensor.detach().clone() for tensor in self.tensors]
        return self._replaced(
            [copy.view_as(copy) if view else copy for copy, view in zip(copies, self.views, strict=True)]
        )

    def value(self) -> Any:
        return _pytree.tree_unflatten(self._leaves, self._spec)

    def _replaced(self, tensors: Sequence[torch.Tensor]) -> "Boundary":
        others = {id(old): new for old, new in zip(self.tensors, tensors, strict=True)}
        return Boundary(
            _pytree.tree_unflatten([others.get(id(leaf), leaf) for leaf in self._leaves], self._spec), self.views
        )


class _Enter(torch.autograd.Function):
    """Copies tensors in, and passes their gradients out."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # zeros for an unused input would be counted as the layer's
        return tuple(tensor.detach().clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return grads


def _extent_bytes(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
