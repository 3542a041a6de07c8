"""A copy of a model that has its modules and all of its Python, and no memory for its weights."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from types import CellType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from partitioners.precision import compute_norms_in_float32, kept_parameters
from partitioners.reach import PLAIN, reach
from partitioners.replicas import Replicas

_A_CACHE = lru_cache(len)
_CACHE = type(_A_CACHE)  # no public name
_NOT_OF_MODELS = ("torch", "hydra_engine", "partitioners")


class Shadow:
    """A replica of a model on meta, whose modules call a recorder, where there is one."""

    def __init__(self, model: nn.Module, narrow: torch.dtype | None = None) -> None:
        """`narrow`: what its parameters are cast to for devices. Raises TypeError for a model of torch.jit."""
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise TypeError(
                    f"{path or 'the model'} is a TorchScript module ({module.original_name}), limit: modules whose "
                    f"calls Python makes; give the module that was scripted or traced, with its weights"
                )
        memo: dict[int, Any] = {}
        self.originals = {id(each): name for name, each in (*model.named_parameters(), *model.named_buffers())}
        kept = kept_parameters(model) if narrow is not None else set()
        for parameter in model.parameters():
            stand_in = on_meta(parameter)
            if narrow is not None and id(parameter) not in kept:
                stand_in = stand_in.to(narrow)
            memo[id(parameter)] = nn.Parameter(stand_in, parameter.requires_grad)
        for buffer in model.buffers():
            memo.setdefault(id(buffer), on_meta(buffer))
        self._sources = {id(memo[id(each)]): each for each in (*model.parameters(), *model.buffers())}
        for _, value, _ in list(reach(("", model), copied_only=True)):  # forwards may write to these
            if isinstance(value, Tensor):  # what they have left in attributes may be in a graph
                memo.setdefault(id(value), value.clone() if value.is_leaf else on_meta(value))
            elif isinstance(value, np.ndarray):
                memo[id(value)] = value.copy()
        self._replicas = Replicas([model], memo)
        (self.model,) = self._replicas.roots
        if narrow is not None:
            compute_norms_in_float32(self.model, narrow)
        # Runs a module of this copy, which `call` does: of (module, call, args, kwargs).
        self.recorder: Callable[[nn.Module, Any, tuple[Any, ...], dict[str, Any]], Any] | None = None
        self._paths = dict(self.model.named_modules())
        # Lists, dicts and sets of the model that hooks close over.
        closed = (
            cell.cell_contents
            for module in self._paths.values()
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
            for cell in getattr(hook, "__closure__", None) or ()
            if cell != CellType()
        )
        self._records = {id(each) for each in closed if isinstance(each, (list, dict, set))}
        classes: dict[type, type] = {}
        for module in self._paths.values():
            own = type(module)
            if own not in classes:
                classes[own] = self._class(own)
            module.__class__ = classes[own]
        self._before = {path: _tensors(module) for path, module in self._paths.items()}

    def _class(self, own: type) -> type:
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            call = partial(own.__call__, module)
            recorder = self.recorder
            return call(*args, **kwargs) if recorder is None else recorder(module, call, args, kwargs)

        names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "is_shadow": True, "__call__": called}
        return type(own.__name__, (own,), names)

    def set_modes(self, flags: Mapping[str, bool]) -> None:
        """Put each module in training or evaluation mode, by path."""
        for path, flag in flags.items():
            self._paths[path].training = flag

    def rebound(self) -> list[str]:
        """Return the paths of modules of which a forward has replaced a parameter or a buffer."""
        now = {path: _tensors(module) for path, module in self._paths.items()}
        return [path for path in now if not _are_same(now[path], self._before[path])]

    def left(self, runs_as_it_is: Callable[[str], bool], *, has_kinds: bool = False) -> dict[str, str]:
        """Return what is in the modules' attributes, and what their closures and globals hold, by path.

        Of a tensor on meta no more than that it is there. runs_as_it_is: leave out a module, by path. has_kinds: of
        what is neither plain nor a tensor, tell its class.
        """
        ends = {id(self)}  # which the calls of its modules hold, and with it the model's own weights, which train
        ends |= {id(module) for path, module in self._paths.items() if path and runs_as_it_is(path)}
        ends |= {id(tensor) for each in self._paths.values() for tensor in _tensors(each).values()}
        return {
            where: told
            for where, told in state_of(self.model, ends).items()
            if (has_kinds or not isinstance(told, _Kind)) and where.rpartition(".")[2] != "training"
        }

    def is_record(self, where: str) -> bool:
        """Return True for a path into a list, dict or set of a module that hooks close over, which may keep records."""
        owner = self.owner(where)
        name = where[len(owner) :].lstrip(".").partition("[")[0]
        return id(vars(self._paths[owner]).get(name)) in self._records

    def owner(self, where: str) -> str:
        """Return the path of the module that a path to an attribute of it leads through."""
        inside = (path for path in self._paths if where.startswith(f"{path}."))
        return max(inside, key=len, default="")

    @property
    def has_weights(self) -> bool:
        """True if the model that this is a copy of has values, and not on meta: all of them."""
        own = (*self.model.parameters(), *self.model.buffers())
        pairs = [(each, self._sources.get(id(each), each)) for each in own]
        return all(not source.is_meta and source.shape == each.shape for each, source in pairs)

    @contextmanager
    def with_zeros(self, module: nn.Module) -> Iterator[None]:
        """Give a module of this copy weights with values, all 0, while the body runs."""
        with _holding(module, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype)):
            yield

    @contextmanager
    def with_weights(self, module: nn.Module) -> Iterator[None]:
        """Give all modules the model's weights while the body runs; `module` may write to its own, which are copies."""
        own = set(map(id, module.parameters()))

        def value(tensor: Tensor) -> Tensor:
            made = self._sources[id(tensor)].detach().to("cpu", tensor.dtype)
            return made if isinstance(tensor, nn.Parameter) and id(tensor) not in own else made.clone()

        with _holding(self.model, value):
            yield

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Keep what the body leaves in lists, dicts and sets that closures and globals share with the model."""
        shared = [each.value for each in reach(("", self.model), plain=True) if not each.is_copied]
        before = [(each, copy.copy(each)) for each in shared if type(each) in (list, dict, set)]
        try:
            yield
        finally:
            for each, contents in before:
                if not _are_same(each, contents):
                    each.clear()
                    (each.extend if isinstance(each, list) else each.update)(contents)


class _Kind(str):
    """Tells of a value no more than of which class it is, or which code a function runs."""

    __slots__ = ()


def is_opaque(told: str) -> bool:
    """Return True if that is all that is told of a value: it is no plain one."""
    return isinstance(told, _Kind) or told.startswith(("a tensor", "an array"))


def state_of(model: nn.Module, besides: Collection[int]) -> dict[str, str]:
    """Return what is in the attributes of modules, and in what their closures and globals hold, by path.

    Tensors are told by their bytes; those on meta by no more than that they are there. besides: ids of objects to leave
    out. Equal for a copy of the model.
    """
    found: dict[str, str] = {}
    for where, value, _ in reach(("", model), plain=True, code=True, besides=besides):
        if isinstance(value, Tensor):
            found[where] = "a tensor" if value.is_meta else f"a tensor {bytes_of(value)}"
        elif isinstance(value, np.ndarray):
            found[where] = f"an array {hash(value.tobytes())}"
        elif isinstance(value, PLAIN):
            if where.rpartition(".")[2] != "keys()":
                found[where] = repr(value)
        else:
            code = getattr(value, "__code__", getattr(value, "__qualname__", type(value)))  # a built-in has a name
            found[where] = _Kind(code if isinstance(code, str) else id(code))
    return found


def bytes_of(tensor: Tensor) -> str:
    """Return what tells a tensor from others: its bytes, where it has some."""
    try:
        own = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError):  # sparse, or of a class of its own
        return f"{id(tensor)} {tensor._version}"
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {hash(own.tobytes())}"


class Caches:
    """Caches of functions (`functools.lru_cache`) that there are by now.

    What recordings leave in them may lie on meta: the model's own forward would take it from there, for batches that
    have values. To find them takes a look at each object of the process, so it is done once for several recordings.
    """

    def __init__(self) -> None:
        # Objects refer to their class, if Python tells the collector so: half of the time of a look at each object.
        found = gc.get_referrers(_CACHE)
        if not any(each is _A_CACHE for each in found):
            found = gc.get_objects()
        self._found = [
            each
            for each in found
            if type(each) is _CACHE and str(each.__module__).partition(".")[0] not in _NOT_OF_MODELS
        ]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Empty those that the body fills."""
        misses = [each.cache_info().misses for each in self._found]
        try:
            yield
        finally:
            for each, before in zip(self._found, misses, strict=True):
                if each.cache_info().misses != before:
                    each.cache_clear()


def _tensors(module: nn.Module) -> dict[str, Tensor | None]:
    return {**module._parameters, **module._buffers}


def _are_same(a: Any, b: Any) -> bool:
    """Return True if two lists, sets or dicts hold the same objects."""
    xs, ys = ([*each, *each.values()] if isinstance(each, dict) else list(each) for each in (a, b))
    return len(xs) == len(ys) and all(x is y for x, y in zip(xs, ys, strict=True))


@contextmanager
def _holding(module: nn.Module, value: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Put other tensors in place of a module's parameters and buffers while the body runs."""
    holders: list[dict[str, Any]] = [held for each in module.modules() for held in (each._parameters, each._buffers)]
    before = [(holder, name, tensor) for holder in holders for name, tensor in holder.items() if tensor is not None]
    try:
        for holder, name, tensor in before:
            made = value(tensor)
            holder[name] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        yield
    finally:
        for holder, name, tensor in before:
            holder[name] = tensor


def on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
