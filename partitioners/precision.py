"""Precisions: which parameters are cast for a device, and which layers compute in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# The last is of BatchNorm and InstanceNorm.
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.modules.batchnorm._NormBase)


def is_norm(module: nn.Module) -> bool:
    """Return True if a module is a normalization: torch's own, or by the name of its class (LlamaRMSNorm)."""
    if isinstance(module, _NORMS):
        return True
    is_one_by_name = type(module).__name__.lower().endswith(("norm", "norm1d", "norm2d", "norm3d"))
    return is_one_by_name and next(module.children(), None) is None  # PreNorm(block) holds a whole block


def kept_parameters(part: nn.Module) -> set[int]:
    """Ids of the parameters that are not cast: those of norms, and those that hold no floating-point numbers."""
    norms = {id(p) for module in part.modules() if is_norm(module) for p in module.parameters()}
    return norms | {id(p) for p in part.parameters() if not p.is_floating_point()}


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return the value with its floating-point tensors in `dtype`."""
    return pytree.tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, value)


def compute_norms_in_float32(part: nn.Module, dtype: torch.dtype) -> None:
    """Let every norm of a copied layer take and return `dtype` and compute in float32."""
    for module in part.modules():
        if is_norm(module):
            module.register_forward_pre_hook(
                lambda _, args, options: (cast(args, torch.float32), cast(options, torch.float32)), with_kwargs=True
            )
            module.register_forward_hook(lambda _, args, output: cast(output, dtype))
