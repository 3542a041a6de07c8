"""What a callback has changed of a model's modules: devices have copies of them, which are then made anew."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from operator import attrgetter, eq
from types import FunctionType
from typing import Any

import numpy as np
from torch import Tensor, nn

from partitioners.reach import CONTAINERS, IN_MODULES, reach
from partitioners.replicas import slots_of

_REMEDY = "end the task there (raise StopTask) and go on with a new ModelTask of the changed model"
_NUMBERS = (bool, int, float, str, type(None))
_REQUIRES_GRAD, _VERSION = attrgetter("requires_grad"), attrgetter("_version")
_WITHOUT_ATTRIBUTES = (*CONTAINERS, OrderedDict)


class ModelWatch:
    """Compares a model's modules with what they were: attributes, modes, hooks, `requires_grad`, and what they hold.

    So it does with the containers and objects that attributes lead to, however deep, each once. A comparison of two
    dicts or lists is one of the interpreter's, so that a call that changes nothing costs little.
    """

    def __init__(self, *roots: object, is_recorded: bool = False) -> None:
        """`roots`: modules, and objects that are none; a module's name is that within the first that holds it.

        is_recorded: the forward was recorded, with the values that its code has found in classes, closures and globals.
        """
        self._roots, self._is_recorded = roots, is_recorded
        self._named: dict[nn.Module, str] = {}
        for root in roots:
            for name, module in root.named_modules() if isinstance(root, nn.Module) else ():
                self._named.setdefault(module, name)
        self.parameters = {
            id(each): (".".join(filter(None, (name, attribute))), each)
            for module, name in self._named.items()
            for attribute, each in module._parameters.items()
            if each is not None
        }
        self._shapes = [(each.shape, each.dtype) for _, each in self.parameters.values()]
        self._holds = self._held()
        self._note()

    def _note(self) -> None:
        self._types = list(map(type, self._named))
        own = {id(each) for module in self._named for kind in IN_MODULES for each in vars(module)[kind].values()}
        found: list[Any] = []  # containers, and the attributes of objects
        reads: dict[tuple[int, str], partial[Any]] = {}  # what gives other values: in slots, globals and cells
        self._tensors: list[Tensor] = []
        roots = [("", root) for root in self._roots]
        for _, value, _ in reach(*roots, copied_only=not self._is_recorded, plain=self._is_recorded):
            if isinstance(value, _NUMBERS):
                continue
            if isinstance(value, CONTAINERS):
                found.append(value)
                if type(value) in _WITHOUT_ATTRIBUTES:
                    continue
            if isinstance(value, Tensor) and id(value) not in own:
                self._tensors.append(value)
            if isinstance(attributes := getattr(value, "__dict__", None), dict):
                found.append(attributes)
            if isinstance(value, nn.Module):
                found += [each for each in vars(value).values() if isinstance(each, dict)]
            elif isinstance(value, FunctionType) and self._is_recorded:
                space = value.__globals__
                named = [name for name in value.__code__.co_names if name in space]
                reads |= {(id(space), name): partial(space.get, name) for name in named}
                for cell in value.__closure__ or ():
                    reads[id(cell), ""] = partial(getattr, cell, "cell_contents", None)
            else:
                reads |= {(id(value), name): partial(getattr, value, name, None) for name in slots_of(value)}
        self._now = [each for each in found if each]
        self._then = list(map(_copied, self._now))
        # Hooks and the like: most are empty, and looked at all together.
        self._empty = [each for each in found if not each]
        self._reads = list(reads.values())
        self._was_read = [read() for read in self._reads]
        self._flags = self._trained()
        self._versions = list(map(_VERSION, self._tensors))

    def _trained(self) -> list[bool]:
        return [_REQUIRES_GRAD(each) for _, each in self.parameters.values()]

    def _held(self) -> list[tuple[nn.Module, dict[str, dict[str, Any]]]]:
        """What each module has of modules, parameters and buffers, by kind and name."""
        return [(module, {kind: dict(vars(module)[kind]) for kind in IN_MODULES}) for module in self._named]

    def take_buffers(self) -> None:
        """Take buffers that are not a call's, since a forward bound them, for what modules had before it."""
        for module, held in self._holds:
            now, before = vars(module)["_buffers"], held["_buffers"]
            if any(now.get(name) is not each for name, each in before.items()):
                held["_buffers"] = dict(now)
                self._then[next(k for k, each in enumerate(self._now) if each is now)] = dict(now)

    def has_changed(self) -> bool:
        """Return True, once, if anything is not as it was. Raises ValueError for what cannot be taken, by name."""
        try:
            is_same = all(map(eq, self._now, self._then)) and not any(self._empty)
            is_same = is_same and self._was_read == [read() for read in self._reads]
        except Exception:  # a tensor took another one's place, and the two do not compare
            is_same = False
        is_same = is_same and self._types == list(map(type, self._named)) and self._flags == self._trained()
        is_same = is_same and self._versions == list(map(_VERSION, self._tensors))
        if is_same:
            self._check_shapes()
            return False
        self._check()
        self._note()
        return True

    def _check_shapes(self) -> None:
        """Refuse a parameter of another shape or type: its place is as large as the one that it had."""
        for (name, each), (shape, dtype) in zip(self.parameters.values(), self._shapes, strict=True):
            if each.shape != shape or each.dtype != dtype:
                raise ValueError(
                    f"gave parameter {name!r} the shape {tuple(each.shape)} and type {each.dtype}, expected "
                    f"{tuple(shape)} and {dtype}; {_REMEDY}"
                )

    def _check(self) -> None:
        self._check_shapes()
        for module, held in self._holds:
            name = self._named[module]
            where = f"{name} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
            for kind, before in held.items():
                now = vars(module)[kind]
                names = dict.fromkeys([*before, *now])
                other = next(
                    (n for n in names if n not in before or n not in now or not _is_kept(before[n], now[n])), None
                )
                if other is not None:
                    raise ValueError(f"replaced, added or removed {other!r} of the {kind[1:]} of {where}; {_REMEDY}")


def plain_attributes(*roots: object) -> dict[tuple[int, str, str], Any]:
    """Return numbers and modes of modules, and `requires_grad` of their parameters: by root, module and attribute."""
    found: dict[tuple[int, str, str], Any] = {}
    for k, root in enumerate(roots):
        for name, module in root.named_modules() if isinstance(root, nn.Module) else ():
            own = vars(module).items()
            values = {n: each for n, each in own if type(each) in _NUMBERS or isinstance(each, (np.number, np.bool_))}
            values |= {n: each.requires_grad for n, each in module._parameters.items() if each is not None}
            found |= {(k, name, attribute): value for attribute, value in values.items()}
    return found


def restore_attributes(changes: Iterable[tuple[int, str, str, Any]], *roots: object) -> None:
    """Set what of `plain_attributes` was changed, in modules that were made anew; what they have not, is left out."""
    modules = [dict(root.named_modules()) if isinstance(root, nn.Module) else {} for root in roots]
    for k, name, attribute, value in changes:
        module = modules[k].get(name)
        if module is not None and isinstance(parameter := module._parameters.get(attribute), nn.Parameter):
            parameter.requires_grad_(value)
        elif module is not None:
            module.__dict__[attribute] = value


def _is_kept(before: Any, now: Any) -> bool:
    """Return True for the same module or parameter, and for a buffer of the same shape."""
    if before is now or not isinstance(before, Tensor) or isinstance(before, nn.Parameter):
        return before is now
    return isinstance(now, Tensor) and (now.shape, now.dtype) == (before.shape, before.dtype)


def _copied(container: Any) -> Any:
    """A copy of a container's own contents: a class of the user's may look them up otherwise."""
    if isinstance(container, dict):
        return dict(dict.items(container))
    kind: Any = next(each for each in CONTAINERS if isinstance(container, each))
    return kind.copy(container)
