"""The Python state of a copy of layers: attributes of its modules, and the containers and objects in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import is_
from types import MethodType
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from partitioners.reach import CONTAINERS, IN_MODULES
from partitioners.replicas import is_plain_object

Contents: TypeAlias = "dict[Any, Any] | list[Any]"

# Every module's own. Where empty, only these are looked into again: a forward may register hooks.
OWN = frozenset(vars(nn.Module()))
PLAIN = (bool, int, float, str, type(None))
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class _Node(NamedTuple):
    """A container whose contents are put back: the attributes of a module or an object, a dict, a list, a set."""

    container: Any
    layer: str  # full name of the module that it belongs to
    attribute: str  # of the module, through which it is reached; "": the module's attributes themselves
    is_own: bool  # one of the module's dicts of parameters, buffers, children: nothing may come or go


class Changed(NamedTuple):
    """An attribute that is not as it was."""

    layer: str
    attribute: str
    value: str = ""  # that it has now, where that is an integer, a string or None: others are of one batch
    is_own: bool = False  # a parameter, buffer or child has come, gone, or is another


class Attributes:
    """Python state reachable from a layer's modules, as it was when this was made.

    A look at what has changed costs about a microsecond per module; only what has is worked on.
    """

    def __init__(self, layer: nn.Module, name: str) -> None:
        self._nodes: list[_Node] = []
        self._known: set[int] = set()
        self._walk(layer, name, "")
        # Views are live: both are walked in C, side by side.
        self._views: list[Any] = [_values(node.container) for node in self._nodes]
        self._sizes = list(map(len, self._views))  # or what moves from one to the next would not show
        self._flat = tuple(chain.from_iterable(self._views))
        self._saved = [_contents(node.container) for node in self._nodes]

    def _walk(self, value: Any, layer: str, attribute: str) -> None:
        todo = [(value, layer, attribute)]
        while todo:
            value, layer, attribute = todo.pop()
            if isinstance(value, Tensor) or id(value) in self._known:
                continue
            if isinstance(value, nn.Module):
                self._known.add(id(value))
                todo.extend(self._of_module(value, layer))
            elif isinstance(value, CONTAINERS):
                self._add(value, layer, attribute)
                inside = value.values() if isinstance(value, dict) else value
                todo.extend((each, layer, attribute) for each in inside)
            elif isinstance(value, tuple):
                todo.extend((each, layer, attribute) for each in value)
            elif isinstance(value, MethodType):  # of a hook
                todo.append((value.__self__, layer, attribute))
            elif is_plain_object(value):
                self._add(vars(value), layer, attribute)
                todo.extend((each, layer, attribute) for each in vars(value).values())
                self._known.add(id(value))

    def _of_module(self, module: nn.Module, name: str) -> Iterator[tuple[Any, str, str]]:
        own = vars(module)
        self._add(own, name, "")
        for key in IN_MODULES:
            self._add(own[key], name, key, is_own=True)
        for key, child in module._modules.items():
            yield child, f"{name}.{key}", ""
        for key, value in own.items():
            if key not in IN_MODULES and not isinstance(value, PLAIN) and (key not in OWN or value or key in HOOKS):
                yield value, name, key

    def _add(self, container: Any, layer: str, attribute: str, *, is_own: bool = False) -> None:
        self._known.add(id(container))
        self._nodes.append(_Node(container, layer, attribute, is_own))

    def is_changed(self) -> bool:
        """Return True if anything is not as it was: by identity, so that an equal object may count as changed."""
        same_size = list(map(len, self._views)) == self._sizes
        return not (same_size and all(map(is_, chain.from_iterable(self._views), self._flat)))

    def changed(self) -> list[Changed]:
        """Return what has changed, by the attribute of a module."""
        if not self.is_changed():
            return []
        found: dict[Changed, None] = {}
        for node, saved in zip(self._nodes, self._saved, strict=True):
            now = _contents(node.container)
            if _is_same(now, saved):
                continue
            if node.attribute and not node.is_own:
                found[Changed(node.layer, node.attribute)] = None
            elif isinstance(saved, dict) and isinstance(now, dict):
                for key in {**saved, **now}:
                    if key not in saved or key not in now or not _equal(now[key], saved[key]):
                        value = repr(now[key]) if isinstance(now.get(key, 0.0), (int, str, type(None))) else ""
                        found[Changed(node.layer, str(key), value, node.is_own)] = None
        return list(found)

    def put_back(self) -> None:
        if self.is_changed():
            self.install(self._saved)

    def capture(self) -> list[Contents] | None:
        """Contents as they are now, for `install`; None where they are as they were."""
        return [_contents(node.container) for node in self._nodes] if self.is_changed() else None

    def install(self, captured: Sequence[Contents]) -> None:
        for node, contents in zip(self._nodes, captured, strict=True):
            container = node.container
            if not _is_same(_contents(container), contents):
                container.clear()
                container.update(contents) if isinstance(container, (dict, set)) else container.extend(contents)


def _values(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _contents(container: Any) -> Contents:
    return dict(container) if isinstance(container, dict) else list(container)


def _is_same(now: Contents, saved: Contents) -> bool:
    """Return True if the same objects are at the same places."""
    if len(now) != len(saved) or not all(map(is_, _values(now), _values(saved))):
        return False
    return not isinstance(now, dict) or not isinstance(saved, dict) or all(map(is_, now, saved))


def _equal(now: Any, saved: Any) -> bool:
    """Return True if a value is the same object, or an equal number or string."""
    if now is saved:
        return True
    return type(now) is type(saved) and isinstance(now, PLAIN) and now == saved
