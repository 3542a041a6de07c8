"""Hooks that users register on parameters: called on the host, after the backward, and watched."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hydra_engine.data import DrawsRefused, identical
from hydra_engine.host.layout import ModelLayout, Slot
from hydra_engine.host.pool import HostPool
from hydra_engine.host.staging import StepStaging
from partitioners.boundary import extent_bytes

_GRADIENT = vars(torch._C.TensorBase)["grad"].__get__  # a getter, of which a mode is told


def has_hooks(layout: ModelLayout) -> bool:
    """Return True if the user has registered hooks on parameters."""
    return any(any(_hooks(slot.parameter)) for slot in layout.trainable_slots())


def _hooks(parameter: nn.Parameter) -> tuple[list[Any], list[Any]]:
    """Hooks on its gradient, and those that are called once that is in place."""
    after = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return list((parameter._backward_hooks or {}).values()), list((after or {}).values())


def check_no_hooks(name: str, layout: ModelLayout) -> None:
    """Refuse hooks on parameters where devices step the optimizer."""
    if has_hooks(layout):
        raise ValueError(
            f"{name}: hooks are registered on parameters, which act on the host; remove them, or set "
            f"optimizer_device='host'"
        )


@torch.no_grad()  # as in a backward
def call_hooks(
    slots: Iterable[Slot],
    staging: StepStaging,
    pool: HostPool,
    finished: Callable[[Slot], Tensor],
    secure: Callable[[None], None],
) -> dict[int, Tensor]:
    """Let hooks act on the finished gradients of these parameters; gives what they left of them, by slot.

    secure: called, with None for all parameters, before a hook, which may step what it likes.
    """
    hooked: dict[int, Tensor] = {}
    drawing: dict[int, torch.Generator] = {}  # that hooks of other parameters draw from
    places: _UserPlaces | None = None
    for slot in slots:
        parameter = slot.parameter
        hooks, after = _hooks(parameter)
        if not (hooks or after) or not staging.has_gradient.get(slot.index):
            continue
        secure(None)
        gradient = hooked[slot.index] = finished(slot)
        places = places or _UserPlaces(pool.layout, staging, pool)
        with _HookWatch(slot, places, is_early=bool(pool.early_release)) as watch, _HookGradientReads(slot, places):
            for hook in hooks:
                changed = hook(gradient)
                if changed is not None and changed is not gradient:
                    gradient.copy_(changed)
            for hook in after:
                parameter.grad = gradient
                watch.may_step = True
                hook(parameter)
                if parameter.grad is None:  # it was taken, for an optimizer of the hook's own
                    staging.has_gradient[slot.index] = False
                elif parameter.grad is not gradient:
                    gradient.copy_(parameter.grad)
                parameter.grad = None
                pool.bring_back([slot])
                pool.renew([slot])  # the hook may have stepped an optimizer of its own
        if watch.own.keys() & drawing.keys():  # a backward calls hooks in another order
            raise RuntimeError(
                f"hooks on parameter {slot.name} and another one draw from the same torch.Generator, in an order "
                f"that is not that of a backward; give each parameter's hook a generator of its own"
            )
        drawing |= watch.own
    return hooked


class _UserPlaces:
    """Addresses of the user's parameters and buffers, for hooks that are called in the place of a backward."""

    def __init__(self, layout: ModelLayout, staging: StepStaging, pool: HostPool) -> None:
        registered, num = layout.registered, len(layout.slots)
        self.parameters = {id(slot.parameter): registered[k].name for k, slot in enumerate(layout.slots)}
        self._numbers = {registered[num + k].name: k for k in range(len(layout.buffers))}
        self._user, self._now, self._staged = layout.buffers, pool.buffers or layout.buffers, staging.buffers
        tensors = [*(slot.parameter for slot in layout.slots), *layout.buffers]
        found = zip(tensors, registered, strict=True)
        self._names = {tensor.data_ptr(): (tensor.data_ptr() + extent_bytes(tensor), e.name) for tensor, e in found}
        self._starts = sorted(self._names)

    def name_of(self, tensor: Tensor) -> str:
        """Name of the parameter or buffer that a tensor lies in; "": none."""
        k = bisect_right(self._starts, address := tensor.data_ptr() if tensor.numel() else 0)
        end, name = self._names[self._starts[k - 1]] if k else (0, "")
        return name if address < end else ""

    def is_behind(self, name: str) -> bool:
        """Return True for a buffer that forwards have changed since the user's modules had it."""
        k = self._numbers.get(name)
        return k is not None and (k in self._staged or not identical(self._user[k], self._now[k]))


class _HookWatch(DrawsRefused):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Raises RuntimeError where a hook on a parameter goes beyond its gradient to what is elsewhere meanwhile.

    In the plain loop hooks are called in the middle of the backward; here they are after it, on the host.
    """

    def __init__(self, slot: Slot, places: _UserPlaces, *, is_early: bool) -> None:
        super().__init__(f"a hook on parameter {slot.name}")
        self._own, self._places, self._is_early = f"parameter {slot.name}", places, is_early
        self.may_step = False  # the parameter itself

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, arguments = kwargs or {}, func._schema.arguments
        given = {**{argument.name: value for argument, value in zip(arguments, args, strict=False)}, **kwargs}
        for argument in arguments:  # those of `out=` by names of their own, such as values and indices
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            self._check(given.get(argument.name), is_written=is_written)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _check(self, value: Any, *, is_written: bool) -> None:
        for tensor in pytree.tree_leaves(value):
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                continue
            name = self._places.name_of(tensor)
            if not name or (name == self._own and (self.may_step or not is_written)):
                continue
            if is_written:
                raise RuntimeError(
                    f"{self._who} writes to {name}, limit: its gradient, and what is outside of the model, since "
                    f"devices have copies; write to a buffer in the forward"
                )
            if self._places.is_behind(name):
                raise RuntimeError(
                    f"{self._who} reads {name}, which forwards change, limit: what is the same in all steps, since the "
                    f"model's own is brought up to date after training; keep what the hook needs in a tensor of its own"
                )
            if self._is_early and name.startswith("parameter"):
                raise RuntimeError(
                    f"{self._who} reads {name}, limit: its own with early_release, since others may have this step's "
                    f"update; leave early_release out"
                )


class _HookGradientReads(TorchFunctionMode):
    """Raises RuntimeError where a hook asks for the gradient of another parameter than its own."""

    def __init__(self, slot: Slot, places: _UserPlaces) -> None:
        super().__init__()
        self._slot, self._places = slot, places

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == _GRADIENT and args[0] is not self._slot.parameter and id(args[0]) in self._places.parameters:
            raise RuntimeError(
                f"a hook on parameter {self._slot.name} reads the .grad of {self._places.parameters[id(args[0])]}, "
                f"limit: its own; let the optimizer do what needs several gradients (optimizer_scope='task')"
            )
        return func(*args, **(kwargs or {}))
