"""Loads the libraries and kernels that most models use, so that a device's memory is measured with them in it."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch.nn import functional as F

from partitioners.precision import DTYPES


def load_libraries(device: torch.device) -> None:
    """Use each library, and the kernels that models have most, forwards and backwards, in every precision.

    What the device or the user's settings refuse is left out: a unit that needs it will say so.
    """
    generator = torch.Generator(device).manual_seed(0)  # the default one is the user's
    for dtype in DTYPES.values():
        for use in (_multiply, _convolve, _attend, _embed, _sort, _add):
            with suppress(Exception):
                use(dtype, device, generator)


def _multiply(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    left = torch.rand(64, 64, dtype=dtype, device=device, generator=generator).requires_grad_()
    product = torch.mm(left, left)
    product = F.linear(product, left, left[0])
    product = torch.bmm(product.view(4, 16, 64), left.view(4, 64, 16))
    F.layer_norm(F.gelu(product), (16,)).softmax(-1).sum().backward()  # type: ignore[no-untyped-call]


def _convolve(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    images = torch.rand(2, 8, 16, 16, dtype=dtype, device=device, generator=generator).requires_grad_()
    kernel = torch.rand(8, 8, 3, 3, dtype=dtype, device=device, generator=generator).requires_grad_()
    F.conv2d(images, kernel, padding=1).relu().sum().backward()  # type: ignore[no-untyped-call]


def _attend(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    query = torch.rand(1, 2, 64, 64, dtype=dtype, device=device, generator=generator).requires_grad_()
    F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()  # type: ignore[no-untyped-call]


def _embed(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    table = torch.rand(16, 16, dtype=dtype, device=device, generator=generator).requires_grad_()
    indices = torch.randint(16, (32,), device=device, generator=generator)
    F.cross_entropy(F.embedding(indices, table).float(), indices).backward()  # type: ignore[no-untyped-call]


def _sort(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    values = torch.randn(64, dtype=dtype, device=device, generator=generator)
    values.bernoulli_(0.5, generator=generator).sort()
    values.cumsum(0)


def _add(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    values = [torch.rand(64, dtype=dtype, device=device, generator=generator) for _ in range(2)]
    torch._foreach_norm(values)
    torch._foreach_addcdiv_(values, values, values)
