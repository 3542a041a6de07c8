"""A copy of a model that has its modules and all of its Python, and no memory for its weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from partitioners.precision import compute_norms_in_float32, kept_parameters
from partitioners.reach import PLAIN


class Recorder(Protocol):
    """Runs the modules of a shadow."""

    def module(self, module: nn.Module, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module, which `call` does."""


class Shadow:
    """A copy of a model on meta, whose modules tell a recorder when they are called."""

    def __init__(self, model: nn.Module, narrow: torch.dtype | None = None) -> None:
        """`narrow`: what its parameters are cast to for devices. Raises TypeError for what cannot be copied."""
        memo: dict[int, Any] = {}
        self.originals = {id(each): name for name, each in (*model.named_parameters(), *model.named_buffers())}
        kept = kept_parameters(model) if narrow is not None else set()
        for parameter in model.parameters():
            stand_in = _on_meta(parameter)
            if narrow is not None and id(parameter) not in kept:
                stand_in = stand_in.to(narrow)
            memo[id(parameter)] = nn.Parameter(stand_in, parameter.requires_grad)
        for buffer in model.buffers():
            memo.setdefault(id(buffer), _on_meta(buffer))
        try:
            self.model = copy.deepcopy(model, memo)
        except Exception as error:
            raise TypeError(
                f"the model ({type(model).__name__}) cannot be copied ({type(error).__name__}: {error}); its layers "
                f"are, for each device: make what hinders in the forward, or keep it outside of the model"
            ) from error
        if narrow is not None:
            compute_norms_in_float32(self.model, narrow)
        self.recorder: Recorder | None = None
        self._paths = dict(self.model.named_modules())
        classes: dict[type, type] = {}
        for module in self._paths.values():
            own = type(module)
            if own not in classes:
                classes[own] = self._class(own)
            module.__class__ = classes[own]
        self._before = {path: _state(module) for path, module in self._paths.items()}

    def _class(self, own: type) -> type:
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            call = partial(own.__call__, module)
            recorder = self.recorder
            return call(*args, **kwargs) if recorder is None else recorder.module(module, call, args, kwargs)

        names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "is_shadow": True, "__call__": called}
        return type(own.__name__, (own,), names)

    def set_modes(self, flags: Mapping[str, bool]) -> None:
        """Put each module in training or evaluation mode, by path."""
        for path, flag in flags.items():
            self._paths[path].training = flag

    def changed(self) -> tuple[str | None, dict[str, Any] | None]:
        """Return the path of a module that a forward has changed, and the state now; None where a tensor is another."""
        now = {path: _state(module) for path, module in self._paths.items()}
        paths = [path for path in now if now[path] != self._before[path]]
        tensors = [path for path in paths if _tensors(now[path]) != _tensors(self._before[path])]
        if tensors:
            return tensors[-1], None
        return (paths[-1], now) if paths else (None, now)

    def put(self, state: Mapping[str, Mapping[Any, Any]]) -> None:
        """Give the modules attributes and tensors."""
        for path, module in self._paths.items():
            for key, value in state[path].items():
                if isinstance(key, str):
                    module.__dict__[key] = value
                else:
                    getattr(module, key[0])[key[1]] = value.tensor


class _Same:
    """A tensor, compared by identity."""

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.tensor is self.tensor

    __hash__ = None  # type: ignore[assignment]


def _state(module: nn.Module) -> dict[Any, Any]:
    """Return what a forward may change of a module: its tensors, and attributes that are plain values."""
    found: dict[Any, Any] = {name: value for name, value in vars(module).items() if isinstance(value, PLAIN)}
    found.pop("training", None)
    for kind in ("_parameters", "_buffers"):
        found.update({(kind, name): _Same(tensor) for name, tensor in getattr(module, kind).items()})
    return found


def _tensors(state: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in state.items() if not isinstance(key, str)}


@contextmanager
def with_zeros(module: nn.Module) -> Iterator[None]:
    """Give a module of a shadow weights with values, all 0, while the body runs."""
    holders: list[dict[str, Any]] = [held for each in module.modules() for held in (each._parameters, each._buffers)]
    before = [(holder, name, tensor) for holder in holders for name, tensor in holder.items()]
    try:
        for holder, name, tensor in before:
            if tensor is not None:
                zeros = torch.zeros(tensor.shape, dtype=tensor.dtype)
                is_parameter = isinstance(tensor, nn.Parameter)
                holder[name] = nn.Parameter(zeros, tensor.requires_grad) if is_parameter else zeros
        yield
    finally:
        for holder, name, tensor in before:
            holder[name] = tensor


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
