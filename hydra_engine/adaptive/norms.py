"""Squared norms of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# On a CPU, torch adds up a tensor's squares in few float32 numbers: for 20 million elements the sum is 0.2 % too small.
# Norms of blocks of this many elements keep four to six digits, and take 1.5 times as long. Other devices use blocks by
# themselves.
CPU_BLOCK = 65_536
COMPUTE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


@torch.no_grad()
def square_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the tensors' squared norms, as a float64 tensor without dimensions. It is 0 for no tensors.

    There is one call per device and dtype, and nothing waits for a device. (Only a sparse tensor whose indices repeat
    waits: its duplicates are added first.) Tensors of 16 bits are squared in float32. With tensors on several devices,
    the sum is on that of the first.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        values = _values(tensor)
        of_group = groups.setdefault((values.device, values.dtype), [])
        if values.device.type == "cpu" and values.numel() > CPU_BLOCK and values.is_contiguous():
            of_group.extend(torch.split(values.view(-1), CPU_BLOCK))
        else:
            of_group.append(values)
    if not groups:
        return torch.zeros((), dtype=torch.float64)
    device = next(iter(groups))[0]
    sums = [_sum(each, COMPUTE.get(dtype, dtype)).to(device) for (_, dtype), each in groups.items()]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _values(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor that may differ from 0, each once."""
    if tensor.layout == torch.strided:
        return tensor
    if tensor.layout == torch.sparse_coo:
        return tensor.coalesce().values()
    return tensor.values()


def _sum(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    norms = torch._foreach_norm(tensors, 2, dtype=dtype)
    return torch.stack(list(norms)).double().square().sum()
