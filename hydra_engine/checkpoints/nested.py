"""Nested state as tensors, one of which is JSON, and back. Nothing in it can name code to be run, as a pickle can."""

from __future__ import annotations

import itertools
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hydra_engine.checkpoints.tensors import plain_text

JSON = "json"  # the tensor with the JSON's bytes
# None, bool, int of 64 bits, float, str and lists are JSON's own. All else is an object of one key, its kind. Of these,
# how values are told by others, which are encoded as well, and read again.
_OTHERS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    **{kind: (list, kind) for kind in (tuple, set, frozenset, torch.Size)},
    int: (hex, lambda text: int(text, 16)),
    complex: (lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    bytes: (bytes.hex, bytes.fromhex),
    torch.dtype: (lambda value: str(value).removeprefix("torch."), lambda name: getattr(torch, name)),
    torch.device: (str, torch.device),
    # In the order of bytes that torch takes, and a copy, which it may write to.
    np.ndarray: (lambda value: torch.from_numpy(value.astype(value.dtype.newbyteorder("="))), Tensor.numpy),
    np.generic: (np.asarray, lambda array: array[()]),
}
_MAPPINGS: dict[type, Callable[[Any], Any]] = {
    dict: dict,
    OrderedDict: OrderedDict,
    Counter: lambda x: Counter(dict(x)),
}
_READ = {kind.__name__: read for kind, read in {**{k: read for k, (_, read) in _OTHERS.items()}, **_MAPPINGS}.items()}
# Each takes up to three levels of JSON, and readers have a limit. A value that contains itself ends here too.
_MAX_DEPTH = 100
_MAX_BITS = 64  # of an int: not every reader of JSON takes longer ones, and Python's own has a limit
_NUMBER_KINDS = "biufc"  # numpy's letters for bool, integers, floats and complex numbers


def flatten(state: Any, where: str = "state") -> dict[str, Tensor]:
    """Return tensors by name that stand for a nested state.

    Takes dicts (also OrderedDict, Counter), lists, tuples, sets; tensors, numpy arrays and numbers; int, float,
    complex, bool, None, str, bytes; torch's dtypes, devices and sizes. Raises TypeError at anything else, subclasses
    included: they would come back as another type. Tensors keep dtype and the order of their strides. A memory at two
    places is one tensor. where: the name of the state in errors.
    """
    flattener = _Flattener(where)
    text = bytearray(json.dumps(flattener.encode(state, ())).encode())
    return {**flattener.tensors, JSON: torch.frombuffer(text, dtype=torch.uint8)}


def unflatten(tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `flatten` was given, of these very tensors."""
    return _decode(json.loads(tensors[JSON].numpy().tobytes()), tensors, {})


class _Flattener:
    def __init__(self, where: str) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._where = where
        self._seen: dict[Any, dict[str, Any]] = {}

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        kind: type = np.generic if isinstance(value, np.generic) else type(value)
        if len(path) > _MAX_DEPTH:
            raise TypeError(
                f"{self._where} is nested {len(path)} levels deep, limit: {_MAX_DEPTH}; make it flatter, and let "
                f"nothing contain itself"
            )
        is_short = kind is int and value.bit_length() < _MAX_BITS
        if value is None or kind in (bool, float, str) or is_short:
            return value
        if kind is list:
            return [self.encode(each, (*path, str(k))) for k, each in enumerate(value)]
        if kind in _MAPPINGS:
            items = value.items()
            return {
                kind.__name__: [[self.encode(k, (*path, "key")), self.encode(v, (*path, str(k)))] for k, v in items]
            }
        place = self._where + "".join(f"[{each!r}]" for each in path)
        if isinstance(value, Tensor):
            _check(place, value)
            return self._tensor(value, path)
        if kind not in _OTHERS or (kind in (np.ndarray, np.generic) and value.dtype.kind not in _NUMBER_KINDS):
            raise TypeError(
                f"{place} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved; give dicts, lists and "
                f"tuples of tensors, numpy arrays, numbers, str, bytes and None"
            )
        try:
            told = _OTHERS[kind][0](value)
        except TypeError as error:
            raise TypeError(f"{place} is a numpy array that torch does not take: {error}") from error
        return {kind.__name__: self.encode(told, path)}

    def _tensor(self, value: Tensor, path: tuple[str, ...]) -> dict[str, Any]:
        memory = (value.data_ptr(), value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg())
        if memory in self._seen:
            return self._seen[memory]
        base = plain_text(".".join(path)).lstrip("_") or "value"  # the format has a name of its own, with underscores
        names = itertools.chain([base], (f"{base}#{k}" for k in itertools.count()))  # keys may have dots, too
        name = next(each for each in names if each != JSON and each not in self.tensors)
        # Written as it lies in memory: nothing is copied, and a channels-last tensor comes back as one.
        order = sorted(range(value.dim()), key=value.stride().__getitem__, reverse=True)
        self.tensors[name] = value.detach().permute(order)
        found = {"tensor": name} if order == sorted(order) else {"tensor": name, "order": order}
        if value.numel():  # one without elements shares no memory
            self._seen[memory] = found
        return found


def _check(where: str, value: Tensor) -> None:
    """Raise TypeError unless it is a plain, dense tensor in DRAM."""
    if value.device.type != "cpu":
        raise TypeError(f"{where} is on {value.device}; checkpoints are written from DRAM, give its .cpu()")
    if type(value) not in (Tensor, torch.nn.Parameter):  # a subclass may have other memory, or another meaning
        raise TypeError(
            f"{where} is a {type(value).__qualname__}; only plain tensors are saved, give what it consists of"
        )
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        kind = "quantized" if value.is_quantized else "nested" if value.is_nested else value.layout
        raise TypeError(f"{where} is {kind}; only dense tensors are saved, give the tensors it consists of")


def _decode(tree: Any, tensors: Mapping[str, Tensor], turned: dict[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_decode(each, tensors, turned) for each in tree]
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:  # one object at all places
        name, order = tree["tensor"], tree.get("order", ())
        return turned.setdefault(
            name, tensors[name].permute([order.index(k) for k in range(len(order))]) if order else tensors[name]
        )
    [(kind, content)] = tree.items()
    return _READ[kind](_decode(content, tensors, turned))


def losses_to_state(losses: list[float]) -> Tensor:
    """One number for each step, as a tensor in float64: a run of days has millions, and JSON needs thrice the room.

    Its `tolist` gives every NaN back with the bits that it had.
    """
    return torch.tensor(losses, dtype=torch.float64)
