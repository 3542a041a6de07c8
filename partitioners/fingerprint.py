"""Fingerprints: equal for two layers, or two batches, that cost the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def fingerprint(part: Any) -> Any:
    """Return a hashable value that two layers share only if they hold the same types, shapes and settings.

    An object that is no module, tensor or plain value counts by identity: a layer that holds one equals itself alone.
    """
    seen: dict[int, int] = {}

    def of(value: Any) -> Any:
        if isinstance(value, nn.Module):
            if id(value) in seen:
                return ("again", seen[id(value)])
            seen[id(value)] = len(seen)
            return (type(value), of(vars(value)))
        if isinstance(value, Tensor):
            if id(value) in seen:
                return ("again", seen[id(value)])
            seen[id(value)] = len(seen)
            if nn.parameter.is_lazy(value) or value.layout is not torch.strided:
                return ("object", id(value))
            strides = value.stride()
            return (type(value), value.shape, strides, value.dtype, value.requires_grad, value.is_leaf)
        if isinstance(value, dict):
            return (type(value), tuple((of(k), of(v)) for k, v in value.items()))
        if isinstance(value, (list, tuple)):
            return (type(value), tuple(map(of, value)))
        if isinstance(value, (set, frozenset)):
            return (type(value), frozenset(map(of, value)))
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
            return (type(value), value)
        return ("object", id(value))

    return of(part)
