"""Memory of tensors: places with the same strides and alignment, copies that keep every bit, and comparisons."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partitioners.boundary import extent, extent_bytes
from partitioners.reach import reach

# The CPU's kernels, and so the bits, depend on operands' addresses modulo these bytes: copies keep it. torch's
# allocator starts storages at multiples of it; views, and what lies in a mapped file, begin elsewhere.
ALIGNMENT_BYTES = 64
# With more work than this to find out, two arrays are taken to share memory.
_MOST_WORK: Any = 1_000_000  # any int, which NumPy's annotation does not say


def residue(tensor: Tensor) -> int:
    """Bytes from a multiple of 64 to a tensor's first element in DRAM; 0 on a device, or if it is not strided."""
    return tensor.data_ptr() % ALIGNMENT_BYTES if tensor.is_cpu and tensor.layout == torch.strided else 0


def place_for(tensor: Tensor, device: torch.device | None = None, start: int | None = None) -> Tensor:
    """Uninitialised memory of the same strides and residue (or `start`), so that kernels take the same path."""
    if tensor.is_conj() or tensor.is_neg():
        return with_bits_of(tensor, place_for(memory_of(tensor), device, start))
    device = device if device is not None else tensor.device
    start = 0 if device.type != "cpu" else residue(tensor) if start is None else start
    if not start:
        if tensor.is_contiguous():  # the same strides, given without taking them apart
            return torch.empty_like(tensor, device=device, requires_grad=False)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    # A storage of its own in the same memory, of as many bytes as a copy has elsewhere.
    storage = torch.UntypedStorage(start + extent_bytes(tensor), device=device)[start:]  # type: ignore[no-untyped-call]
    # By `set_`, not as a view: autograd lets nobody work in place on a view that enters a graph.
    return torch.empty(0, dtype=tensor.dtype, device=device).set_(storage, 0, tensor.shape, tensor.stride())


def place_in_dram(tensor: Tensor) -> Tensor:
    """Uninitialised memory with the same strides in DRAM, wherever the tensor is."""
    return place_for(tensor, torch.device("cpu"))


def copy_in_dram(tensor: Tensor) -> Tensor:
    """A copy in DRAM, in storage of its own, with the very same strides; it is there on return."""
    return copy_of(tensor, device=torch.device("cpu"))


def flat(tensor: Tensor) -> Tensor:
    """The tensor's memory from its first to its last element: a copy that keeps strides moves all of it."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = memory_of(tensor)
    if tensor.is_contiguous():
        return tensor.detach() if tensor.requires_grad else tensor
    return tensor.detach().as_strided((extent(tensor.shape, tensor.stride()),), (1,))


def memory_of(tensor: Tensor) -> Tensor:
    """The tensor's numbers as they lie in memory, without its graph.

    A bit may say that it is the conjugate or negative of these; kernels read it, so it travels as a bit.
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
    """Return True if both are the same bytes read alike: NaN equals NaN, and 0.0 does not equal -0.0."""
    same_kind = a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype and same_bits(a, b)
    return same_kind and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    """Return its elements as bytes: a view of them, unless gaps lie between them, which may hold anything."""
    is_dense = extent(tensor.shape, tensor.stride()) == tensor.numel()
    memory = flat(tensor) if is_dense else memory_of(tensor).contiguous()
    return memory.reshape(-1).view(torch.uint8).cpu()


def copy_of(tensor: Tensor, start: int | None = None, device: torch.device | None = None) -> Tensor:
    """A copy in storage of its own, with the very same strides and residue; `start`: with this residue."""
    place = place_for(tensor, device, start)
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


def kept_by(tensor: Tensor, *roots: tuple[str, object]) -> str | None:
    """Return the path to what shares memory with a tensor, in what these objects hold; None: nothing does."""
    own = _array(tensor)
    if own is None:
        return None
    arrays = ((path, _array(value)) for path, value, _ in reach(*roots))
    shared = (path for path, other in arrays if other is not None and np.may_share_memory(own, other, _MOST_WORK))
    return next(shared, None)


def _array(value: Any) -> np.ndarray[Any, Any] | None:
    """Return the memory of an array, or of a tensor as NumPy takes it, which reads none of it; None: it has none."""
    if not isinstance(value, Tensor):
        return value if isinstance(value, np.ndarray) else None
    if value.layout != torch.strided or value.device.type != "cpu" or not value.numel() or not value.data_ptr():
        return None
    size = value.element_size()
    interface = {
        "version": 3,
        "typestr": f"|V{size}",
        "data": (value.data_ptr(), True),
        "shape": tuple(value.shape),
        "strides": tuple(stride * size for stride in value.stride()),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
