"""Shallow replicas of modules: objects of the same classes around other parameters and buffers.

    in a module                                          in its replica
    a parameter, a buffer, a child                       its own, wherever an attribute or a hook leads to it
    lists, dicts, sets and plain objects in attributes   copies, without copies of what they hold
    generators of random numbers in attributes           copies
    functions, methods, partials, weak references        the user's, unless they lead to any of these: bound to them
    tensors, arrays, locks, all else                     the user's

So whatever the engine changes or restores in a replica, the user's module doesn't have.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from partitioners.reach import CONTAINERS, GENERATORS, PLAIN, Opaque, Shared

# What they lead to is the user's, unless an attribute leads there as well.
_SHARED = (FunctionType, partial, weakref.ref)
# Types of globals in which a function may count or gather values.
_KEEPERS = (bool, int, float, str, list, dict, set, Tensor)


def is_plain_object(value: Any) -> bool:
    """Return True for an object of Python code's that leaves it to Python how it is made and copied."""
    kind = type(value)
    has_attributes = isinstance(getattr(value, "__dict__", None), dict)
    return kind is SimpleNamespace or (has_attributes and _is_ordinary(kind) and not isinstance(value, (type, Opaque)))


class Replicas(Shared):
    """Replicas of modules, and copies of what these own, each made once: what modules share, their replicas share."""

    def __init__(
        self,
        roots: Iterable[Any],
        stand_ins: Mapping[int, Any],
        besides: Collection[int] = (),
        *,
        is_deep: bool = False,
    ) -> None:
        """`stand_ins`: parameters, buffers and the like of the replicas, by the ids of the originals.

        besides: ids of what stays the user's. is_deep: what functions hold is copied, too, with numbers and containers
        in globals that they name.
        """
        self._is_deep = is_deep
        self._made: dict[int, Any] = dict(stand_ins)  # by id; kept, since weak references may lead there
        self._bound: set[int] = set(stand_ins)  # ids of what has a stand-in, or leads to what has one
        seen: dict[int, Any] = {}  # originals, so that no other object takes over an id
        holders: dict[int, list[int]] = defaultdict(list)
        roots = list(roots)
        todo: deque[tuple[Any, bool]] = deque((root, True) for root in roots)
        shared: deque[tuple[Any, bool]] = deque()  # what only functions and the like lead to: it comes last
        while todo or shared:
            value, is_own = (todo or shared).popleft()
            if id(value) in seen or id(value) in besides or isinstance(value, PLAIN):
                continue
            seen[id(value)] = value
            is_one = isinstance(value, (nn.Module, CellType, *CONTAINERS, *GENERATORS))
            named = self._named(value) if isinstance(value, FunctionType) else {}
            if is_own and (is_one or named or is_plain_object(value) or slots_of(value)):
                self._bound.add(id(value))
            passes_on = is_own and (is_deep or not isinstance(value, _SHARED))
            todo.extend((each, True) for each in named.values())
            if isinstance(value, Tensor) and id(value) not in self._made:
                continue
            for each, is_key in _inside(value):
                holders[id(each)].append(id(value))
                is_own_part = passes_on and not is_key
                (todo if is_own_part else shared).append((each, is_own_part))
        leading = list(self._bound)
        while leading:
            new = set(holders.get(leading.pop(), ())) - self._bound
            self._bound |= new
            leading += new
        modules = [each for each in seen.values() if isinstance(each, nn.Module) and id(each) in self._bound]
        for module in modules:  # all of them first: some lead to each other
            self._made[id(module)] = object.__new__(type(module))
        for module in modules:
            vars(self._made[id(module)]).update(self._parts(vars(module)))
        for key, place in stand_ins.items():
            if isinstance(place, Tensor) and key in seen:  # what a user has set on a parameter
                vars(place).update(self._parts(vars(seen[key])))
        self.roots = list(map(self.of, roots))

    def _named(self, function: FunctionType) -> dict[str, Any]:
        """Return globals that a deep replica of a function has for itself."""
        space = function.__globals__ if self._is_deep else {}
        return {name: space[name] for name in function.__code__.co_names if isinstance(space.get(name), _KEEPERS)}

    def of(self, value: Any) -> Any:
        """Return what stands for a value: the value itself, if it leads to nothing that has a stand-in."""
        made = self._made
        if id(value) in made or id(value) not in self._bound:
            return made.get(id(value), value)
        if isinstance(value, CONTAINERS):
            found: Any = copy.copy(value)
            found.clear()
            made[id(value)] = found
            if isinstance(value, dict):
                found.update([(self.of(key), self.of(each)) for key, each in value.items()])
            elif isinstance(value, set):
                found.update([self.of(each) for each in value])
            else:
                found.extend([self.of(each) for each in value])
        elif isinstance(value, tuple):
            items = [self.of(each) for each in value]
            made[id(value)] = type(value)._make(items) if hasattr(value, "_make") else tuple(items)
        elif isinstance(value, CellType):
            cell = made[id(value)] = CellType()
            if value != CellType():
                cell.cell_contents = self.of(value.cell_contents)
        elif isinstance(value, FunctionType):
            cells = tuple(self.of(cell) for cell in value.__closure__ or ()) or None
            defaults = value.__defaults__ and tuple(self.of(each) for each in value.__defaults__)
            if id(value) not in made:  # a cell may have led back to it
                named = self._named(value)
                space = {**value.__globals__} if named else value.__globals__
                function = made[id(value)] = FunctionType(value.__code__, space, value.__name__, defaults, cells)
                space.update(self._parts(named))
                function.__kwdefaults__ = value.__kwdefaults__ and self._parts(value.__kwdefaults__)
                vars(function).update(self._parts(vars(value)))
        elif isinstance(value, MethodType):
            made[id(value)] = MethodType(self.of(value.__func__), self.of(value.__self__))
        elif isinstance(value, partial):
            args = [self.of(each) for each in value.args]
            bound = made[id(value)] = partial(self.of(value.func), *args, **self._parts(value.keywords))
            vars(bound).update(self._parts(vars(value)))
        elif isinstance(value, weakref.ref):
            made[id(value)] = weakref.ref(self.of(value()))
        elif isinstance(value, GENERATORS):
            made[id(value)] = copy.deepcopy(value)
        else:
            kind: Any = type(value)
            plain = made[id(value)] = kind.__new__(kind)  # bare: its class may say how it is pickled
            for name, each in self._parts(slots_of(value)).items():
                object.__setattr__(plain, name, each)
            if hasattr(plain, "__dict__"):
                vars(plain).update(self._parts(vars(value)))
        return made[id(value)]

    def _parts(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.of(value) for name, value in parts.items()}


def _inside(value: Any) -> Iterator[tuple[Any, bool]]:
    """Yield what an object holds of which a replica may need another; True: as a key, which stays the user's if it can.

    Keys are compared with what other code has.
    """
    if isinstance(value, dict):
        yield from ((key, True) for key in list(value))
    yield from ((each, False) for each in _values(value))


def _values(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple, set, deque)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, CellType):
        return [] if value == CellType() else [value.cell_contents]
    if type(value) is weakref.ref:
        return [value()]
    if isinstance(value, FunctionType):
        defaults = *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
        return [*(value.__closure__ or ()), *defaults, *vars(value).values()]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values(), *vars(value).values()]
    is_open = isinstance(value, (nn.Module, Tensor)) or is_plain_object(value)
    return [*slots_of(value).values(), *(vars(value).values() if is_open else ())]


def slots_of(value: Any) -> dict[str, Any]:
    """Return what an object of Python code's has in slots."""
    kinds = [kind for kind in type(value).__mro__ if "__slots__" in vars(kind)]
    if not kinds or not _is_ordinary(type(value)):
        return {}
    members = (name for kind in kinds for name, each in vars(kind).items() if isinstance(each, MemberDescriptorType))
    return {name: getattr(value, name) for name in members if hasattr(value, name)}


def _is_ordinary(kind: type) -> bool:
    """Return True for a class that leaves it to Python how its objects are made, copied and ended."""
    ordinary = all(getattr(kind, name) is getattr(object, name) for name in ("__new__", "__reduce_ex__", "__reduce__"))
    # The end of a copy would close a file of the original's.
    return ordinary and not (hasattr(kind, "__deepcopy__") or hasattr(kind, "__del__"))
