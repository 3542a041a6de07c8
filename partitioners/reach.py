"""Finds everything that a Python object holds: the tensors of a layer, wherever its attributes keep them."""

from __future__ import annotations

import argparse
import functools
import gc
import logging
import operator
import os
import pickle
import random
import sys
import sysconfig
import weakref
from array import array
from collections import deque
from collections.abc import Collection, Iterator
from hashlib import blake2b
from itertools import count
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from partitioners.skips import Skips

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, np.generic)


class Opaque:
    """What nobody looks into, such as a task: it holds nothing that a layer computes with."""


class Shared(Opaque):
    """What copies of a layer share, and nobody looks into."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


# Classes, modules and loggers lead to the whole program; values of `Skips` are of one forward, its copies have none; a
# handle leads to hooks that their module leads to as well.
_ENDS = (*PLAIN, type, ModuleType, BuiltinFunctionType, CodeType, logging.Logger, Skips, Opaque, RemovableHandle)
_CODE = (type, BuiltinFunctionType)
# Code of others, which keeps its state to itself.
_INSTALLED = tuple(f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("purelib", "platlib", "stdlib"))
_OURS = ("torch", "hydra_engine", "partitioners")
# In the path to a value that an object or closure shares with others: of its class, or of its globals.
CLASS, GLOBALS = "__class__", "__globals__"
CONTAINERS = (dict, list, set, deque)
_ITERATORS: tuple[type, ...] = (
    *(map, filter, zip, enumerate, reversed, GeneratorType),
    *(type(iter([])), type(iter(())), type(iter({})), type(iter(range(0))), type(iter(range(1 << 64)))),
)
# Where code of a user's own may count, beside a function.
_KEEPERS: tuple[type, ...] = (
    *(bytearray, array, SimpleNamespace, argparse.Namespace, weakref.WeakKeyDictionary, weakref.WeakValueDictionary),
)
_COUNTED: tuple[type, ...] = (*PLAIN, *CONTAINERS, *_KEEPERS, *_ITERATORS, torch.Tensor, np.ndarray)
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
BYTES = "bytes "  # before a digest
# By the attributes that lead there: what is there.
PlainState: TypeAlias = "dict[str, list[str]]"
# Dicts of its own that a module looks attributes up in.
IN_MODULES = ("_parameters", "_buffers", "_modules")
# Hooks and the like of any module, most of them empty.
_OF_ALL_MODULES = frozenset(vars(nn.Module())) - {"training"}


class Held(NamedTuple):
    """A value, and the attributes that lead to it."""

    path: str  # "blocks.0.cache[2]"
    value: Any
    is_copied: bool  # a deepcopy copies it; it shares what a closure or a weak reference holds


def reach(
    *roots: tuple[str, object],
    copied_only: bool = False,
    plain: bool = False,
    code: bool = False,
    besides: Collection[int] = (),
) -> Iterator[Held]:
    """Yield the roots, by these names, and everything that they hold, each once, by the shortest path.

    It follows attributes, slots, containers, partial functions, bound methods, closures, defaults and weak references.
    It follows the class of a module, if it is not torch's. Of the globals that a function names it follows tensors, and
    modules and functions beside it.

    copied_only: only values that a deepcopy leads to.
    plain: also numbers and strings, each at every place, as tensors then are; also in globals that a function names,
    and in classes, modules, functions and objects of the user's own that it names.
    code: also classes and built-in functions, of which none leads further, and methods of classes of the user's own.
    besides: ids of objects to leave out.
    """
    seen: dict[int, object] = {}  # with the values, so that no other takes over an id
    ends = tuple(each for each in _ENDS if not (plain and each in PLAIN) and not (code and each in _CODE))
    copied, shared = deque(roots), deque[tuple[str, object]]()
    while copied or shared:
        is_copied = bool(copied)
        where, value = (copied or shared).popleft()
        if id(value) in besides:
            continue
        is_again, seen[id(value)] = id(value) in seen, value
        if plain and isinstance(value, PLAIN):
            yield Held(where, value, is_copied)
            continue
        if is_again and not (plain and isinstance(value, torch.Tensor)):
            continue
        yield Held(where, value, is_copied)
        if is_again or isinstance(value, _CODE):
            continue
        (copied if is_copied else shared).extend(_each(where, _copied_by(value), ends))
        if not copied_only:
            shared.extend(_each(where, _shared_by(value, plain=plain, code=code), ends))


def plain_state(*roots: tuple[str, object], copied_only: bool = False, besides: Collection[int] = ()) -> PlainState:
    """Return the state of everything that these hold, as text that can be compared; arguments as those of `reach`."""
    found: PlainState = {}
    for path, value, _ in reach(*roots, copied_only=copied_only, plain=True, besides=besides):
        if (text := text_of(value)) is not None:
            found.setdefault(path, []).append(text)
    return found


def text_of(value: Any) -> str | None:
    """Return text that tells the state of a value from others; None for what holds other values, or nothing."""
    if isinstance(value, torch.Tensor):
        is_plain = type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # fake tensors have no memory
        if value.layout != torch.strided or value.is_meta or not is_plain:
            return f"{BYTES}{value.dtype} {tuple(value.shape)} {value.layout}"
        memory = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"{BYTES}{value.dtype} {tuple(value.shape)} {_hash(memory.numpy().data)}"
    if isinstance(value, np.ndarray):
        return f"{BYTES}{value.dtype} {value.shape} {_hash(b'' if value.dtype == object else value.tobytes())}"
    if isinstance(value, torch.Generator):
        return text_of(value.get_state())
    if isinstance(value, GENERATORS):
        return BYTES + _hash(pickle.dumps(value))
    if isinstance(value, (bytearray, array)):
        return BYTES + _hash(bytes(value))
    if isinstance(value, (*PLAIN, count)):
        return repr(value)
    if isinstance(value, Iterator) and type(value).__module__ == "builtins":
        return f"{operator.length_hint(value)} values"  # that are to come
    return None


def _hash(data: Any) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _each(where: str, found: Iterator[tuple[str, object]], ends: tuple[type, ...]) -> Iterator[tuple[str, object]]:
    for name, value in found:
        if not isinstance(value, ends):
            yield (where + name).lstrip("."), value


def _copied_by(value: Any) -> Iterator[tuple[str, object]]:
    """Yield the values that a deepcopy goes on to."""
    if isinstance(value, dict):
        for key, each in list(value.items()):  # a loader's thread may add to it meanwhile
            yield f"[{key!r}]" if isinstance(key, PLAIN) else "[...]", each
            yield ".keys()", key
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        ordered = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else list(value)
        yield from ((f"[{k}]", each) for k, each in enumerate(ordered))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, MethodType):
        yield from ((".__self__", value.__self__), ("", value.__func__))
        return
    elif isinstance(value, np.ndarray):
        yield ".base", value.base
    elif isinstance(value, _ITERATORS) or type(value).__module__ == "itertools":
        yield from ((f"[{k}]", each) for k, each in enumerate(gc.get_referents(value)))
    if isinstance(value, FunctionType):
        return
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        attributes = {}
    is_module = isinstance(value, nn.Module)
    for name, each in list(attributes.items()):
        if is_module and name in IN_MODULES and isinstance(each, dict):
            yield from ((f".{key}", held) for key, held in list(each.items()))
        elif not (is_module and name in _OF_ALL_MODULES) or each:
            yield f".{name}", each
    for kind in type(value).__mro__:
        if "__slots__" in vars(kind):
            for name, slot in vars(kind).items():
                if isinstance(slot, MemberDescriptorType) and hasattr(value, name):
                    yield f".{name}", getattr(value, name)


def _is_beside(value: object, function: FunctionType) -> bool:
    """Return True for a class, module, function or object that a function of the user's own shares with others.

    It is of the same package or another one of the user's, or an object of the standard library's that counts, or keeps
    what it is given.
    """
    if isinstance(value, (*_KEEPERS, *_ITERATORS)) or type(value).__module__ == "itertools":
        return True
    if function.__code__.co_filename.startswith(_INSTALLED):
        return False
    kind = value if isinstance(value, (type, FunctionType, ModuleType)) else type(value)
    name = str(kind.__name__ if isinstance(kind, ModuleType) else kind.__module__)
    return name.partition(".")[0] == str(function.__module__).partition(".")[0] or _is_users(name)


@functools.cache
def _is_users(name: str) -> bool:
    """Return True for a module that is not installed, by its name."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return bool(file) and not str(file).startswith(_INSTALLED) and name.partition(".")[0] not in _OURS


def _held_by(value: object, names: Collection[str]) -> Iterator[tuple[str, object]]:
    """Yield an object itself; of a class, or by these names of a module, what its code may count in."""
    if isinstance(value, type):
        for kind in value.__mro__:
            if kind.__module__.partition(".")[0] not in ("torch", "builtins"):
                for name, each in list(vars(kind).items()):
                    held = each.__func__ if isinstance(each, (staticmethod, classmethod)) else each
                    if isinstance(held, (*_COUNTED, FunctionType)) and not name.startswith("__"):
                        yield f".{name}", held
    elif isinstance(value, ModuleType):
        found = ((name, vars(value).get(name)) for name in names if name in vars(value))
        yield from ((f".{name}", each) for name, each in found if isinstance(each, _COUNTED))
    else:
        yield "", value


def _shared_by(value: Any, *, plain: bool, code: bool) -> Iterator[tuple[str, object]]:
    """Yield the values that a copy holds as well."""
    inside = f"{CLASS}." if plain else ""
    if isinstance(value, weakref.ref):
        yield "()", value()
    elif plain and isinstance(value, MethodType) and isinstance(value.__self__, type):  # apply of a Function
        yield from _held_by(value.__self__, ())
    elif isinstance(value, nn.Module) or (code and _is_users(type(value).__module__)):
        for kind in type(value).__mro__:
            if kind.__module__.partition(".")[0] not in ("torch", "builtins"):
                for name, each in list(vars(kind).items()):
                    yield f".{inside}{name}", each.fget if isinstance(each, property) else each
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                each = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            yield f".{name}", each
            if plain and isinstance(each, type) and _is_beside(each, value):
                yield from ((f".{name}{where}", held) for where, held in _held_by(each, ()))
        for name in value.__code__.co_names:
            each = value.__globals__.get(name)
            beside = isinstance(each, FunctionType) and each.__module__ == value.__module__
            if plain and isinstance(each, (*PLAIN, *CONTAINERS)) and name in value.__globals__:
                yield f".{GLOBALS}.{name}", each
            elif plain and not beside and _is_beside(each, value):
                named = value.__code__.co_names
                yield from ((f".{GLOBALS}.{name}{where}", held) for where, held in _held_by(each, named))
            elif beside or isinstance(each, (torch.Tensor, np.ndarray, nn.Module, torch.jit.ScriptFunction)):
                yield f".{name}", each
        yield from ((".__defaults__", each) for each in value.__defaults__ or ())
        yield from ((f".{name}", each) for name, each in (value.__kwdefaults__ or {}).items())
        yield from ((f".{name}", each) for name, each in vars(value).items())
