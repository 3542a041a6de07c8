"""Copies of layers to measure, with values or as fake tensors, and copies of what a loss function remembers."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from partitioners.boundary import Boundary
from partitioners.precision import DTYPES, cast, compute_norms_in_float32, kept_parameters
from partitioners.reach import reach
from partitioners.replicas import Replicas


class Copies:
    """Copies of a model's layers. None is kept here: copies of all layers would pile up.

    Tensors are copies too, so a layer that writes to its parameters does not write to the user's.
    """

    is_deep = False  # with copies of what functions hold

    def __init__(
        self, precision: str = "float32", device: torch.device | None = None, model: Iterable[nn.Module] = ()
    ) -> None:
        """`model`: the user's layers. A loss may refer to them, and gets no copies of them."""
        self.dtype = DTYPES[precision]
        self._device = device
        self._model = list(model)
        self._held = {id(each) for root in self._model for each in (*root.parameters(), *root.buffers())}

    def layer(self, part: Any) -> Any:
        """A copy of a layer or loss module."""
        narrow = self.dtype is not torch.float32
        kept = kept_parameters(part) if narrow else set()
        memo: dict[int, Any] = {}
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
                    made: Tensor = nn.Parameter(self._parameter(tensor, dtype), tensor.requires_grad)
                elif tensor.requires_grad:
                    continue
                else:
                    made = self._tensor(tensor)
                vars(made).update(vars(tensor))  # what a user has set on it
                memo[id(tensor)] = made
        for _, value, is_copied in reach(("", part)):
            is_own = is_copied or id(value) in self._held  # a hook may close over what another layer has
            if is_own and isinstance(value, Tensor) and value.layout == torch.strided and id(value) not in memo:
                memo[id(value)] = self._tensor(value)
        (copied,) = Replicas([part], memo, is_deep=self.is_deep).roots
        if narrow:
            compute_norms_in_float32(copied, self.dtype)
        return copied

    def loss(self, part: Any) -> Any:
        """A copy of the loss, which computes in float32 whatever the precision."""
        if not callable(part):
            return part
        is_layer = isinstance(part, nn.Module) and self.dtype is torch.float32
        copied = self.layer(part) if is_layer else copy_of_function(part, self._model)
        return copied if self.dtype is torch.float32 else _Float32Loss(copied)

    def inputs(self, value: Any) -> Any:
        """Return the value that enters the first layer."""
        value = pytree.tree_map_only(Tensor, self._tensor, value)
        return value if self.dtype is torch.float32 else cast(value, self.dtype)

    def target(self, value: Any) -> Any:
        """Return the target, which enters the loss beside the output."""
        return pytree.tree_map_only(Tensor, self._tensor, value)

    def like(self, value: Boundary) -> Boundary:
        """Return a boundary in tensors of these copies."""
        return value.around(list(map(self._tensor, value.tensors)))

    def _parameter(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.detach().to(device=self._device, dtype=dtype, copy=True)

    def _tensor(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone().to(device=self._device).requires_grad_(tensor.requires_grad)


class FakeCopies(Copies):
    """Copies of fake tensors: operations cost no memory and no arithmetic. The originals may lie on meta.

    Every tensor is a fake CPU tensor, so that the CPU's kernels are chosen, with their bytes: fake CUDA tensors abort
    a build of torch without CUDA as soon as autograd meets them.
    """

    is_deep = True  # or a fake tensor would stay in a closure, which layers with values then read

    def __init__(self, precision: str = "float32", model: Iterable[nn.Module] = ()) -> None:
        super().__init__(precision, model=model)
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


def copy_of_function(function: Any, modules: Iterable[nn.Module] = ()) -> Any:
    """Copy a function, so that the original does not see what the copy keeps from call to call: a loss or a metric.

    Copied are objects, bound methods, partials and closures, whatever they hold; and numbers, lists, dicts and sets in
    globals that a function names. Not copied are `modules`, what is in them, and the parameters of any module.
    """
    own = {id(each) for root in modules for each in (*root.modules(), *root.parameters(), *root.buffers())}
    stand_ins: dict[int, Any] = {}
    for _, value, _ in reach(("", function), besides=own):
        if isinstance(value, (np.ndarray, bytearray, array, count)):
            stand_ins[id(value)] = copy.copy(value)
        elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.is_leaf:
            stand_ins[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
    return Replicas([function], stand_ins, besides=own, is_deep=True).roots[0]
