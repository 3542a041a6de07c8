"""Values that cross from one shard to the next: nested containers of tensors, taken apart and put together again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class _Slot(NamedTuple):
    """Stands in a tree where tensor `number` goes: one tensor appearing twice has two slots, one number."""

    number: int


# The CPU's kernels choose by where operands lie modulo so many bytes, and so do the bits: copies keep it. torch's own
# allocator starts storages at multiples of it; views, and what lies in a mapped file, begin elsewhere.
ALIGNMENT_BYTES = 64
# Of a lone tensor, which most values are: taken apart and put together without walking a tree.
_LEAF = pytree.tree_structure(0)


@dataclass(frozen=True)
class Boundary:
    """A value taken apart: its unique tensors, and how to build it again around other tensors."""

    tensors: tuple[Tensor, ...]
    requires_grad: tuple[bool, ...]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    shares_memory: bool  # two of its tensors lie in one storage, which their copies do not

    @classmethod
    def of(cls, value: Any, where: str) -> Boundary:
        """Take `value` apart; `where` names its origin in errors."""
        if type(value) is Tensor and value.layout == torch.strided and not (value.is_conj() or value.is_neg()):
            return cls((value,), (value.requires_grad,), (_Slot(0),), _LEAF, False)
        flat, spec = pytree.tree_flatten(value)
        numbers: dict[int, int] = {}
        tensors: list[Tensor] = []
        leaves: list[Any] = []
        for leaf in flat:
            if not isinstance(leaf, Tensor):
                leaves.append(leaf)
                continue
            if leaf.layout != torch.strided:
                raise TypeError(f"{where} is a tensor of layout {leaf.layout}; only strided tensors cross shards")
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(tensors)
                tensors.append(leaf.resolve_conj().resolve_neg())
            leaves.append(_Slot(numbers[id(leaf)]))
        shares_memory = len({t.untyped_storage().data_ptr() for t in tensors}) < len(tensors)
        return cls(tuple(tensors), tuple(t.requires_grad for t in tensors), tuple(leaves), spec, shares_memory)

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The value around these tensors; its containers are new each time, so a layer may change them."""
        if self.spec is _LEAF and tensors:
            return tensors[0]
        leaves = [tensors[leaf.number] if isinstance(leaf, _Slot) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def around(self, tensors: Sequence[Tensor]) -> Boundary:
        """The same value with its tensors elsewhere."""
        return Boundary(tuple(tensors), self.requires_grad, self.leaves, self.spec, self.shares_memory)

    @property
    def num_bytes(self) -> int:
        """Bytes its tensors take once copied."""
        return sum(extent_bytes(tensor) for tensor in self.tensors)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What decides how much memory a unit takes on this value."""
        tensors = tuple((tuple(t.shape), t.stride(), t.dtype) for t in self.tensors)
        return (tensors, tuple(leaf if isinstance(leaf, Hashable) else type(leaf) for leaf in self.leaves))


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one of a strided tensor, gaps included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def extent_bytes(tensor: Tensor) -> int:
    """Bytes from the first to the last element."""
    if tensor.is_contiguous():
        return tensor.nbytes
    return extent(tensor.shape, tensor.stride()) * tensor.element_size()


def residue(tensor: Tensor) -> int:
    """Bytes from a multiple of 64 to its first element, in DRAM; 0 on a device, or of a tensor that is not strided."""
    is_here = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return tensor.data_ptr() % ALIGNMENT_BYTES if is_here else 0


def place_for(tensor: Tensor, device: torch.device | None = None, start: int | None = None) -> Tensor:
    """Uninitialised memory with the very same strides, so that the next kernel takes the very same path.

    `start`: its residue, on the CPU; None: the tensor's.
    """
    device = device if device is not None else tensor.device
    start = 0 if device.type != "cpu" else residue(tensor) if start is None else start
    if not start and tensor.is_contiguous():
        place = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        # Dimensions of size 1 may have any stride, and torch tells channels_last by them.
        if place.stride() == tensor.stride():
            return place
    storage = torch.UntypedStorage(start + extent_bytes(tensor), device=device)  # type: ignore[no-untyped-call]
    if start:
        storage = storage[start:]  # a storage of its own in the same memory, of as many bytes as a copy has elsewhere
    # By `set_`, not as a view: autograd lets nobody work in place on a view that enters a graph.
    return torch.empty(0, dtype=tensor.dtype, device=device).set_(storage, 0, tensor.shape, tensor.stride())


def place_in_dram(tensor: Tensor) -> Tensor:
    """The same in DRAM, wherever the tensor is."""
    return place_for(tensor, torch.device("cpu"))


def copy_in_dram(tensor: Tensor) -> Tensor:
    """A copy in DRAM, in storage of its own, with the very same strides; it is there on return."""
    place = place_in_dram(tensor)
    flat(place).copy_(flat(tensor))
    return place


def flat(tensor: Tensor) -> Tensor:
    """Its memory from the first to the last element, which is what a copy that keeps strides moves."""
    if tensor.is_contiguous():
        return tensor.detach() if tensor.requires_grad else tensor
    return tensor.detach().as_strided((extent(tensor.shape, tensor.stride()),), (1,))


def copy_of(tensor: Tensor, start: int | None = None) -> Tensor:
    """A copy in storage of its own, with the very same strides and residue; `start`: with this residue."""
    place = place_for(tensor, start=start)
    flat(place).copy_(flat(tensor))
    return place
