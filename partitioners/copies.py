"""Copies of layers to measure on: with values, whose parameters share the user's memory, or fake, with shapes alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from partitioners.precision import DTYPES, cast, compute_norms_in_float32, kept_parameters
from partitioners.reach import reach


class Copies:
    """Structure copies of a model's layers; what layers share, their copies share.

    Parameters share the originals' memory, buffers and other tensors are copies. On another device, or in another
    precision, parameters are copies too, which nothing here keeps: a model's casts would pile up.
    """

    def __init__(self, precision: str = "float32", device: torch.device | None = None) -> None:
        self.dtype = DTYPES[precision]
        self._device = device
        self._memo: dict[int, Any] = {}

    def layer(self, part: Any) -> Any:
        """A copy of a layer or loss module; a plain loss function is itself."""
        if not isinstance(part, nn.Module):
            return part
        narrow = self.dtype is not torch.float32
        kept = kept_parameters(part) if narrow else set()
        memo: dict[int, Any] = {} if narrow or self._device is not None else self._memo
        for module in part.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
                if not isinstance(tensor, Tensor) or id(tensor) in memo:
                    continue
                if nn.parameter.is_lazy(tensor):
                    raise ValueError(
                        "parameter: a lazy layer's, without a shape; run one batch through the model first"
                    )
                if isinstance(tensor, nn.Parameter):
                    dtype = self.dtype if narrow and id(tensor) not in kept else tensor.dtype
                    memo[id(tensor)] = nn.Parameter(self._parameter(tensor, dtype), tensor.requires_grad)
                    vars(memo[id(tensor)]).update(vars(tensor))  # what a user has set on it
                elif not tensor.requires_grad:
                    memo[id(tensor)] = self._tensor(tensor)
                    vars(memo[id(tensor)]).update(vars(tensor))
        for _, value, _ in reach(("", part), copied_only=True):
            # Made by an earlier forward, which deepcopy refuses: the weight that torch's weight_norm recomputes.
            if isinstance(value, Tensor) and not value.is_leaf and id(value) not in memo:
                memo[id(value)] = self._tensor(value)
        copied = copy.deepcopy(part, memo)
        if narrow:
            compute_norms_in_float32(copied, self.dtype)
        return copied

    def loss(self, part: Any) -> Any:
        """A copy of the loss, which computes in float32 whatever the precision."""
        if self.dtype is torch.float32 or not callable(part):
            return self.layer(part)
        copied = copy.deepcopy(part) if isinstance(part, nn.Module) else part
        return _Float32Loss(copied)

    def inputs(self, value: Any) -> Any:
        """What enters the first layer."""
        value = pytree.tree_map_only(Tensor, self._tensor, value)
        return value if self.dtype is torch.float32 else cast(value, self.dtype)

    def target(self, value: Any) -> Any:
        """What enters the loss beside the output."""
        return pytree.tree_map_only(Tensor, self._tensor, value)

    def _parameter(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.detach().to(device=self._device, dtype=dtype)

    def _tensor(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone().to(device=self._device).requires_grad_(tensor.requires_grad)


class FakeCopies(Copies):
    """Copies on which operations cost no memory and no arithmetic, whatever the size; originals may lie on meta.

    Every tensor is a fake CPU tensor, so that the CPU's kernels are chosen, with their bytes: fake CUDA tensors abort
    a build of torch without CUDA as soon as autograd meets them.
    """

    def __init__(self, precision: str = "float32") -> None:
        super().__init__(precision)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def _parameter(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")

    def _tensor(self, tensor: Tensor) -> Tensor:
        return self._parameter(tensor, tensor.dtype).requires_grad_(tensor.requires_grad)


class _Float32Loss(nn.Module):
    """A loss on an output cast to float32."""

    def __init__(self, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.loss_fn = loss_fn

    def forward(self, output: Any, target: Any) -> Tensor:
        return self.loss_fn(cast(output, torch.float32), target)
