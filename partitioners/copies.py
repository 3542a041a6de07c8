"""Copies of layers to measure, with values or as fake tensors, and copies of what a loss function remembers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from partitioners.boundary import Boundary
from partitioners.precision import DTYPES, cast, compute_norms_in_float32, kept_parameters
from partitioners.reach import reach
from partitioners.replicas import Replicas

# Types of globals in which a function may count or gather values.
KEEPERS = (bool, int, float, str, list, dict, set)


class Copies:
    """Copies of a model's layers. None is kept here: copies of all layers would pile up.

    Tensors are copies too, so a layer that writes to its parameters does not write to the user's.
    """

    def __init__(
        self, precision: str = "float32", device: torch.device | None = None, model: Iterable[nn.Module] = ()
    ) -> None:
        """`model`: the user's layers. A loss may refer to them, and gets no copies of them."""
        self.dtype = DTYPES[precision]
        self._device = device
        self._model = list(model)

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
        for _, value, _ in reach(("", part), copied_only=True):
            if isinstance(value, Tensor) and value.layout == torch.strided and id(value) not in memo:
                memo[id(value)] = self._tensor(value)
        (copied,) = Replicas([part], memo).roots
        if narrow:
            compute_norms_in_float32(copied, self.dtype)
        return copied

    def loss(self, part: Any) -> Any:
        """A copy of the loss, which computes in float32 whatever the precision."""
        if not callable(part):
            return part
        if not isinstance(part, nn.Module):
            copied = copy_of_function(part, self._model)
        else:
            copied = self.layer(part) if self.dtype is torch.float32 else copy.deepcopy(part)
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

    def __init__(self, precision: str = "float32", model: Iterable[nn.Module] = ()) -> None:
        super().__init__(precision, model=model)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def _parameter(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")

    def _tensor(self, tensor: Tensor) -> Tensor:
        return self._parameter(tensor, tensor.dtype).requires_grad_(tensor.requires_grad)


@contextmanager
def fakes_taken_back(layer: nn.Module) -> Iterator[None]:
    """Put back what a copy of a layer, run on fake tensors, has left of them with its user.

    They are in closures, classes and globals, and in the dicts, lists and objects that these lead to.
    """
    held: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = []
    for _, value, is_copied in reach(("", layer), plain=True):
        if isinstance(value, FunctionType):
            space = value.__globals__
            names = [name for name in value.__code__.co_names if isinstance(space.get(name), Tensor)]
            held += [(partial(space.get, name), partial(space.__setitem__, name)) for name in names]
            cells = value.__closure__ or ()
            held += [(partial(getattr, c, "cell_contents", None), partial(setattr, c, "cell_contents")) for c in cells]
        elif isinstance(value, nn.Module):
            for kind in type(value).__mro__:
                names = [name for name, each in vars(kind).items() if isinstance(each, Tensor)]
                held += [(partial(vars(kind).get, name), partial(setattr, kind, name)) for name in names]
        elif not is_copied and isinstance(value, list):
            held.append((partial(list, value), partial(value.__setitem__, slice(None))))
        elif not is_copied and isinstance(space := value if isinstance(value, dict) else _attributes(value), dict):
            held.append((partial(dict, space), partial(_fill, space)))
    before = [get() for get, _ in held]
    try:
        yield
    finally:
        for (get, put), old in zip(held, before, strict=True):
            if any(isinstance(each, FakeTensor) for each in pytree.tree_leaves(get())):
                put(old)


def _attributes(value: Any) -> Any:
    return getattr(value, "__dict__", None)


def _fill(space: dict[Any, Any], contents: dict[Any, Any]) -> None:
    space.clear()
    space.update(contents)


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
    globals that a function names. Not copied are `modules`, what is in them, and the parameters of any module. What
    cannot be copied is shared.
    """
    return _copied(function, {id(module): module for each in modules for module in each.modules()})


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, FunctionType):
        return _copied_function(value, memo)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _copied(value.__self__, memo))
    if type(value) is partial:
        args = [_copied(each, memo) for each in value.args]
        keywords = {key: _copied(each, memo) for key, each in value.keywords.items()}
        return partial(_copied(value.func, memo), *args, **keywords)
    for _, held, _ in reach(("", value), copied_only=True):  # a network that a loss compares features with
        if isinstance(held, nn.Module):
            memo.update((id(parameter), parameter) for parameter in held.parameters())
    # Into a memo of its own, which becomes everybody's only if all went well.
    found = dict(memo)
    try:
        copied = copy.deepcopy(value, found)
    except Exception:  # a lock, a file, a tensor in a graph: it stays what it is
        return value
    memo.setdefault(id(memo), []).append(found.pop(id(found), None))  # what deepcopy keeps alive, for its ids
    memo.update(found)
    return copied


def _copied_function(function: FunctionType, memo: dict[int, Any]) -> Any:
    cells = function.__closure__ or ()
    outside = function.__globals__
    named = [name for name in function.__code__.co_names if isinstance(outside.get(name), KEEPERS)]
    if not (cells or named or function.__defaults__ or function.__kwdefaults__ or vars(function)):
        return function
    inside = {**outside} if named else outside
    copied = FunctionType(function.__code__, inside, function.__name__, None, tuple(CellType() for _ in cells))
    memo[id(function)] = copied  # before what it holds: it may hold itself
    inside.update((name, _copied(outside[name], memo)) for name in named)
    copied.__kwdefaults__ = _copied(function.__kwdefaults__, memo)
    copied.__defaults__ = _copied(function.__defaults__, memo)
    copied.__dict__.update(_copied(dict(vars(function)), memo))
    for cell, original in zip(copied.__closure__ or (), cells, strict=True):
        try:
            held = original.cell_contents
        except ValueError:  # empty as yet
            continue
        cell.cell_contents = _copied(held, memo)
    return copied
