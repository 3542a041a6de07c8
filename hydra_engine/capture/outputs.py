"""What a model's own forward returns, as layers can give it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from partitioners.reach import PLAIN

# Entries of the outputs of language models.
_CACHES = frozenset(("past_key_values", "cache_params"))


class UsesNotCarried(TypeError):
    """Something reads what layers do not carry."""


class NotCarried:
    """Stands for an object in an output that is neither a tensor nor plain: a cache, say. To use it is an error."""

    __slots__ = ("_text",)

    def __init__(self, where: str, value: object) -> None:
        self._text = (
            f"output{where} of the model's own forward is a {type(value).__name__}, which layers do not carry, limit: "
            f"tensors, numbers, strings, distributions, and tuples, lists, dicts and dataclasses of them; let the "
            f"forward return the tensors in it that are needed"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NotCarried) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return f"<{self._text}>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what copies and tests ask for
            raise AttributeError(name)
        raise UsesNotCarried(self._text)

    def _refuse(self, *_: Any) -> NoReturn:
        raise UsesNotCarried(self._text)

    __getitem__ = __iter__ = __len__ = __call__ = __bool__ = __add__ = __radd__ = __mul__ = __rmul__ = _refuse


def carried(output: Any) -> Any:
    """Return what a forward gave, with `NotCarried` in place of what layers cannot give.

    What only generates text from it is left out of dicts: no loss takes it, and it is large.
    """
    if isinstance(output, dict) and not _CACHES.isdisjoint(output):
        output = type(output)(**{key: value for key, value in output.items() if key not in _CACHES})
    while kinds := {type(each) for each in pytree.tree_leaves(output) if _is_record(each)}:
        for kind in kinds:
            _register(kind)

    def of(path: Any, leaf: Any) -> Any:
        is_plain = isinstance(leaf, PLAIN) and not isinstance(leaf, torch.device)
        return leaf if is_plain or isinstance(leaf, (Tensor, NotCarried)) else NotCarried(pytree.keystr(path), leaf)

    return pytree.tree_map_with_path(of, output)


def _is_record(leaf: Any) -> bool:
    """Return True for an object of a dataclass that is made of its fields alone, and for a distribution of torch's."""
    kind = type(leaf)
    if isinstance(leaf, torch.distributions.Distribution):
        return True
    return (
        dataclasses.is_dataclass(kind)
        and "__slots__" not in vars(kind)
        and vars(leaf).keys() <= {each.name for each in dataclasses.fields(kind)}
        and all(hasattr(leaf, each.name) for each in dataclasses.fields(kind))
    )


def _register(kind: type) -> None:
    """Let pytree look into objects, and make one of its attributes without its own `__init__` and `__post_init__`."""
    fields = [each.name for each in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else None

    def parts(found: Any) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        names = tuple(vars(found)) if fields is None else tuple(fields)
        return [(pytree.GetAttrKey(name), getattr(found, name)) for name in names], names

    def flat(found: Any) -> tuple[list[Any], tuple[str, ...]]:
        values, names = parts(found)
        return [value for _, value in values], names

    def made(values: Iterable[Any], names: tuple[str, ...]) -> Any:
        found: Any = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(found, name, value)
        return found

    pytree.register_pytree_node(kind, flat, made, flatten_with_keys_fn=parts)
