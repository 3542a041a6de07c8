"""Kernels of a GPU that is not here, as far as they decide which tensors a layer saves for backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class GpuKernels(TorchFunctionMode):
    """Makes layers on the CPU save the tensors that they would save on a GPU.

    - Attention: flash kernels, which keep query, key, value, output and a logarithm per row, and redraw dropout in
      backward; the CPU's own fall back to a full matrix of weights as soon as there is dropout.
    - Dropout: a mask of booleans instead of one of the input's type.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            kwargs.pop("dropout_p", None)
            return func(*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:], **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0:
        return input
    output: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return input.copy_(output) if inplace else output
