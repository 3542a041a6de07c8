"""Nested state as JSON and tensors, and back, bit for bit. Nothing in it can name code to be run, as a pickle can."""

from __future__ import annotations

import base64
import itertools
import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hydra_engine.checkpoints.tensors import MovingTensor, Tensors, check_tensor

# None, bool, int, str, finite floats and lists are JSON's own. All else is an object of one key, its kind.
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size}
_MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_KINDS = {kind: name for name, kind in (_SEQUENCES | _MAPPINGS).items()}
# Kinds that are text: how they are written, and read. A NaN has bits of its own.
_TEXTS: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    int: (hex, lambda text: int(text, 16)),
    float: (lambda value: struct.pack(">d", value).hex(), lambda text: struct.unpack(">d", bytes.fromhex(text))[0]),
    complex: (
        lambda value: struct.pack(">dd", value.real, value.imag).hex(),
        lambda text: complex(*struct.unpack(">dd", bytes.fromhex(text))),
    ),
    bytes: (lambda value: base64.b64encode(value).decode(), base64.b64decode),
    torch.dtype: (lambda value: str(value).removeprefix("torch."), lambda text: getattr(torch, text)),
    torch.device: (str, torch.device),
}
_READ = {kind.__name__: read for kind, (_, read) in _TEXTS.items()}
# Each takes up to three levels of JSON, and readers have a limit. A value that contains itself ends here too.
_MAX_DEPTH = 100
_MAX_BITS = 64  # of an int: not every JSON reader takes longer ones
_NUMBER_KINDS = "biufc"  # numpy's letters for bool, integers, floats and complex numbers


def nested_files(stem: str, state: Any, where: str = "state") -> dict[str, bytes | Tensors]:
    """Return a nested state as two files of a checkpoint, by name: the JSON text and the tensors of `flatten`."""
    tree, tensors = flatten(state, where)
    return {f"{stem}.safetensors": tensors, f"{stem}.json": json.dumps(tree, allow_nan=False).encode()}


def flatten(state: Any, where: str = "state") -> tuple[Any, dict[str, torch.Tensor | MovingTensor]]:
    """Return JSON data that stands for a nested state, and its tensors by name.

    Takes dicts (also OrderedDict, Counter), lists, tuples, sets; tensors, numpy arrays and numbers; int, float,
    complex, bool, None, str, bytes; torch's dtypes, devices and sizes. Raises TypeError at anything else, subclasses
    included: they would come back as another type. Tensors keep dtype and the order of their strides. A memory at two
    places is one tensor. A moving tensor comes back as a tensor. where: the name of the state in errors.
    """
    flattener = _Flattener(where)
    return flattener.encode(state, ()), flattener.tensors


def unflatten(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    return _Unflattener(tensors).decode(tree)


class _Flattener:
    def __init__(self, where: str) -> None:
        self.tensors: dict[str, torch.Tensor | MovingTensor] = {}
        self._where = where
        self._seen: dict[Any, dict[str, Any]] = {}

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if len(path) > _MAX_DEPTH:
            raise TypeError(
                f"{self._where} is nested {len(path)} levels deep, limit: {_MAX_DEPTH}; make it flatter, and let "
                f"nothing contain itself"
            )
        is_short = kind is int and value.bit_length() < _MAX_BITS
        if value is None or kind in (bool, str) or is_short or (kind is float and math.isfinite(value)):
            return value
        if kind in _TEXTS:
            return {kind.__name__: _TEXTS[kind][0](value)}
        if kind is list:
            return self._each(value, path)
        if kind in _SEQUENCES.values():
            return {_KINDS[kind]: self._each(value, path)}
        if kind in _MAPPINGS.values():
            items = [
                [self.encode(key, (*path, "key")), self.encode(each, (*path, str(key)))] for key, each in value.items()
            ]
            return {_KINDS[kind]: items}
        if isinstance(value, MovingTensor):
            return self._moving(value, path)
        if isinstance(value, torch.Tensor):
            check_tensor(self._place(path), value)
            return self._tensor(value, path)
        if kind is np.ndarray and value.dtype.kind in _NUMBER_KINDS:
            native = value.astype(value.dtype.newbyteorder("="))  # a copy, which torch may write to
            try:
                return {"array": self._tensor(torch.from_numpy(native), path)}
            except TypeError as error:
                raise TypeError(f"{self._place(path)} is a numpy array that torch does not take: {error}") from error
        if isinstance(value, np.generic) and value.dtype.kind in _NUMBER_KINDS:
            return {"number": [value.dtype.str, value.tobytes().hex()]}
        raise TypeError(
            f"{self._place(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved; give dicts, lists "
            f"and tuples of tensors, numpy arrays, numbers, str, bytes and None"
        )

    def _each(self, values: Any, path: tuple[str, ...]) -> list[Any]:
        return [self.encode(each, (*path, str(k))) for k, each in enumerate(values)]

    def _place(self, path: tuple[str, ...]) -> str:
        return self._where + "".join(f"[{each!r}]" for each in path)

    def _tensor(self, value: torch.Tensor, path: tuple[str, ...]) -> dict[str, Any]:
        memory = (value.data_ptr(), value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg())
        if memory in self._seen:
            return self._seen[memory]
        name = self._new_name(path)
        # Written as it lies in memory: nothing is copied, and a channels-last tensor comes back as one.
        order = _order(value.stride())
        self.tensors[name] = value.detach().permute(order)
        found = {"tensor": name} if order == sorted(order) else {"tensor": name, "order": order}
        if value.numel():  # one without elements shares no memory
            self._seen[memory] = found
        return found

    def _moving(self, value: MovingTensor, path: tuple[str, ...]) -> dict[str, Any]:
        if value not in self._seen:
            name, order = self._new_name(path), _order(value.strides)
            self.tensors[name] = value
            # Written in the order of its dimensions; the order in its memory is only noted.
            self._seen[value] = {"tensor": name} if order == sorted(order) else {"tensor": name, "memory_order": order}
        return self._seen[value]

    def _new_name(self, path: tuple[str, ...]) -> str:
        base = ".".join(path).lstrip("_") or "value"  # the format has a name of its own, with underscores
        others = (f"{base}#{k}" for k in itertools.count())  # keys may have dots: "a.b" and "a", "b"
        return next(name for name in itertools.chain([base], others) if name not in self.tensors)


def _order(strides: tuple[int, ...]) -> list[int]:
    """Return the dimensions, the one of the largest stride first."""
    return sorted(range(len(strides)), key=strides.__getitem__, reverse=True)


def _turned_back(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    return tensor.permute([order.index(k) for k in range(len(order))])


class _Unflattener:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._turned: dict[str, torch.Tensor] = {}

    def decode(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.decode(each) for each in tree]
        if not isinstance(tree, dict):
            return tree
        [(kind, content), *_] = tree.items()
        if kind == "tensor":
            return self._tensor(content, tree)
        if kind in _READ:
            return _READ[kind](content)
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self.decode(each) for each in content)
        if kind in _MAPPINGS:
            return _MAPPINGS[kind]({self.decode(key): self.decode(value) for key, value in content})
        if kind == "array":
            return self.decode(content).numpy()
        assert kind == "number", kind
        dtype, digits = content
        return np.frombuffer(bytes.fromhex(digits), dtype)[0]

    def _tensor(self, name: str, tree: Mapping[str, Any]) -> torch.Tensor:
        if name not in self._turned:
            tensor = self._tensors[name]
            if "order" in tree:
                tensor = _turned_back(tensor, tree["order"])
            elif "memory_order" in tree:
                order = tree["memory_order"]
                tensor = _turned_back(tensor.permute(order).contiguous(), order)
            self._turned[name] = tensor
        return self._turned[name]


def losses_to_state(losses: list[float]) -> Tensor:
    """One number for each step, as a tensor in float64: a run of days has millions, and JSON needs thrice the room.

    Its `tolist` gives every NaN back with the bits that it had.
    """
    return torch.tensor(losses, dtype=torch.float64)
