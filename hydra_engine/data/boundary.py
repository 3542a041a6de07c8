"""Values that cross from one shard to the next: nested containers of tensors, taken apart and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from partitioners.boundary import check_fit


class _Slot(NamedTuple):
    """Stands in a tree where tensor `number` goes: one tensor appearing twice has two slots, one number."""

    number: int


# The CPU's kernels choose by where operands lie modulo so many bytes, and so do the bits: copies keep it. torch's own
# allocator starts storages at multiples of it; views, and what lies in a mapped file, begin elsewhere.
ALIGNMENT_BYTES = 64
# How a value is made up: by tensor its dtype, number of dimensions and how they lie in memory; where tensors appear.
Form: TypeAlias = "tuple[tuple[Any, ...], ...]"


class Sizes(NamedTuple):
    """The sizes of a value, which decide the memory that a unit takes on it."""

    form: Form
    sizes: tuple[int, ...]  # every dimension of its tensors
    numbers: tuple[int, ...]  # whole numbers that are no less than 0
    values: tuple[Any, ...]  # other plain values; of what has no hash, its type


# Of a lone tensor, which most values are: taken apart and put together without walking a tree.
_LEAF = pytree.tree_structure(0)
_LONE = (_Slot(0),)


class Boundary(NamedTuple):
    """A value taken apart: its unique tensors, and how to build it again around other tensors."""

    tensors: tuple[Tensor, ...]
    requires_grad: tuple[bool, ...]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    shares_memory: bool  # two of its tensors lie in one storage, which their copies do not

    @classmethod
    def of(cls, value: Any, where: str) -> Boundary:
        """Take `value` apart; `where` names its origin in errors.

        Raises UnfitTensor for tensors that are more than strided memory, which a copy would not be.
        """
        if type(value) is Tensor and value.layout == torch.strided and not (value.is_nested or value.is_quantized):
            return cls((value,), (value.requires_grad,), _LONE, _LEAF, False)
        flat, spec = pytree.tree_flatten(value)
        numbers: dict[int, int] = {}
        tensors: list[Tensor] = []
        leaves: list[Any] = []
        for leaf in flat:
            if not isinstance(leaf, Tensor):
                leaves.append(leaf)
                continue
            check_fit(where, leaf)
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(tensors)
                tensors.append(leaf)
            leaves.append(_Slot(numbers[id(leaf)]))
        places = [t.untyped_storage().data_ptr() for t in tensors if t.numel()]  # what is empty lies nowhere
        shares_memory = len(set(places)) < len(places)
        return cls(tuple(tensors), tuple(t.requires_grad for t in tensors), tuple(leaves), spec, shares_memory)

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The value around these tensors; its containers are new each time, so a layer may change them."""
        if self.spec is _LEAF and tensors:
            return tensors[0]
        leaves = [tensors[leaf.number] if isinstance(leaf, _Slot) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def around(self, tensors: Sequence[Tensor]) -> Boundary:
        """The same value with its tensors elsewhere."""
        return Boundary(tuple(tensors), *self[1:])

    @property
    def num_bytes(self) -> int:
        """Bytes its tensors take once copied."""
        return sum(extent_bytes(tensor) for tensor in self.tensors)

    @property
    def signature(self) -> Sizes:
        """What decides how much memory a unit takes on this value."""
        form = tuple((t.dtype, t.dim(), _order(t)) for t in self.tensors)
        sizes = tuple(size for t in self.tensors for size in t.shape)
        if self.spec is _LEAF and self.tensors:
            return Sizes((form,), sizes, (), ())
        slots = tuple(leaf.number for leaf in self.leaves if isinstance(leaf, _Slot))
        numbers = tuple(leaf for leaf in self.leaves if _is_number(leaf))
        values = tuple(_value(leaf) for leaf in self.leaves if not (isinstance(leaf, _Slot) or _is_number(leaf)))
        return Sizes((form, slots, (len(numbers),)), sizes, numbers, values)

    def with_numbers(self, numbers: Sequence[int]) -> Boundary:
        """The same value with other whole numbers, in the order of its signature."""
        others = iter(numbers)
        return self._replace(leaves=tuple(next(others) if _is_number(leaf) else leaf for leaf in self.leaves))


def _is_number(leaf: Any) -> bool:
    """Return True for a number that a tensor may be cut by."""
    return type(leaf) is int and leaf >= 0


def _value(leaf: Any) -> Any:
    try:
        hash(leaf)
    except TypeError:
        return type(leaf)
    return leaf


def _order(tensor: Tensor) -> tuple[int, ...] | None:
    """Order of a tensor's dimensions in memory; its strides if gaps lie between. None: one after the other."""
    shape, stride = tensor.shape, tensor.stride()
    if tensor.is_contiguous() and 1 not in shape:
        return None
    order = tuple(sorted(range(len(shape)), key=lambda k: -stride[k]))
    step = 1
    for k in reversed(order):
        if stride[k] != step:
            return stride
        step *= max(1, shape[k])
    return None if order == tuple(range(len(shape))) else (-1, *order)


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
    if tensor.is_conj() or tensor.is_neg():
        return with_bits_of(tensor, place_for(memory_of(tensor), device, start))
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
    if tensor.is_conj() or tensor.is_neg():
        tensor = memory_of(tensor)
    if tensor.is_contiguous():
        return tensor.detach() if tensor.requires_grad else tensor
    return tensor.detach().as_strided((extent(tensor.shape, tensor.stride()),), (1,))


def memory_of(tensor: Tensor) -> Tensor:
    """Its numbers as they lie in memory, without its graph.

    A tensor may say with a bit that it is the conjugate, or the negative, of these. Kernels of products read the bit,
    and give other bits than for the numbers written out: so it travels as a bit.
    """
    tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def with_bits_of(tensor: Tensor, memory: Tensor) -> Tensor:
    """Let fresh `memory` be read as `tensor` is. In place, not as a view: see `place_for`."""
    if tensor.is_conj():
        torch._C._set_conj(memory, True)
    if tensor.is_neg():
        torch._C._set_neg(memory, True)
    return memory


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if the memory of both is read alike."""
    return a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg()


def identical(a: Tensor, b: Tensor) -> bool:
    """Whether both are the same bytes read alike: NaN is the same as NaN, and 0.0 another number than -0.0."""
    same_kind = a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype and same_bits(a, b)
    return same_kind and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    """As bytes; a view where no gaps lie between the elements, which may hold anything."""
    is_dense = extent(tensor.shape, tensor.stride()) == tensor.numel()
    memory = flat(tensor) if is_dense else memory_of(tensor).contiguous()
    return memory.reshape(-1).view(torch.uint8).cpu()


def copy_of(tensor: Tensor, start: int | None = None) -> Tensor:
    """A copy in storage of its own, with the very same strides and residue; `start`: with this residue."""
    place = place_for(tensor, start=start)
    flat(place).copy_(flat(tensor))
    return place


def copy_of_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy of an array, with the very same strides and residue, since torch may take it as a tensor."""
    if array.dtype.hasobject or not array.size or type(array) is not np.ndarray:
        return array.copy()
    first, end = np.lib.array_utils.byte_bounds(array)
    memory = np.empty(end - first + ALIGNMENT_BYTES, np.uint8)
    start = (first - memory.ctypes.data) % ALIGNMENT_BYTES
    place: np.ndarray[Any, Any] = np.ndarray(
        array.shape, array.dtype, memory[start:].data, array.__array_interface__["data"][0] - first, array.strides
    )
    place[...] = array
    return place
