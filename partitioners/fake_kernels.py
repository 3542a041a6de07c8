"""Operations whose CPU kernels allocate other memory than torch's fake kernels say; found by comparing the two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

_ATEN = torch.ops.aten
_RNN, _RNN_BACKWARD = _ATEN.mkldnn_rnn_layer.default, _ATEN.mkldnn_rnn_layer_backward.default
# These write a loss per element first, and reduce it into the beginning of that very memory.
_LOSSES = (
    _ATEN.binary_cross_entropy.default,
    _ATEN.mse_loss.default,
    _ATEN.smooth_l1_loss.default,
    _ATEN.soft_margin_loss.default,
)
# Bytes of a recurrent kernel's workspace, by its arguments: a fact of the kernel, for as long as the process lives.
_workspaces: dict[Any, int] = {}


def as_on_cpu(func: Any, args: tuple[Any, ...]) -> Callable[..., Any]:
    """Return the operation; for fake tensors, one whose results have the memory that the CPU's kernel gives them."""
    if func in _CORRECTED and isinstance(args[0], FakeTensor):
        return _CORRECTED[func]
    return func  # type: ignore[no-any-return]


def _rnn(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Add the workspace for backward. Only the kernel knows its size, so it runs once on tensors of these shapes."""
    key = tuple((arg.shape, arg.stride(), arg.dtype) if isinstance(arg, Tensor) else str(arg) for arg in args)
    if key not in _workspaces:
        with _disable_current_modes():
            real = [torch.zeros(arg.shape, dtype=arg.dtype) if isinstance(arg, Tensor) else arg for arg in args]
            _workspaces[key] = _RNN(*real, **kwargs)[3].numel()
    output, hidden, cell, empty = _RNN(*args, **kwargs)
    return output, hidden, cell, empty.new_empty(_workspaces[key])


def _rnn_backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Give the second bias a gradient of its own."""
    found = list(_RNN_BACKWARD(*args, **kwargs))
    found[4] = torch.empty_like(found[3])
    return tuple(found)


def _loss(func: Any) -> Callable[..., Tensor]:
    def run(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = func(input, target, *args, **kwargs)
        if loss.dim() or input.numel() == 1:
            return loss
        shape = torch.broadcast_shapes(input.shape, target.shape)  # type: ignore[no-untyped-call]
        return loss.new_empty(shape).as_strided((), ())

    return run


_CORRECTED: dict[Any, Callable[..., Any]] = {_RNN: _rnn, _RNN_BACKWARD: _rnn_backward} | {f: _loss(f) for f in _LOSSES}
