"""Copies layers around placeholders of their parameters and buffers, and proves that the copy holds nothing else.

    in the layers                                      in the copy
    a parameter, a buffer                              its placeholder, wherever an attribute leads to it
    another tensor over the memory of one              a `Stale` tensor, which nobody can compute with
    a tensor with the graph of an earlier forward      the same: the weight of an old weight_norm, which its hook sets
    other tensors, attributes of all kinds             a copy
    what a hook of a module closes over                its copy, where the layers have it by an attribute, too
    what other closures hold                           the original: the rehearsal sees operations that take it

Whatever keeps this from being so is a `LayerFault`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from hydra_engine.data import ALIGNMENT_BYTES, TaskGenerator, residue, seeded
from partitioners.boundary import extent_bytes
from partitioners.reach import follow_hooks, reach

_COMPARED = (bool, int, float, str, bytes)
_IGNORES = (
    "what copies it or what it holds (__deepcopy__, __reduce__, __getstate__) leaves something out or ignores the "
    "memo: copy every attribute with copy.deepcopy(value, memo), or delete that method"
)
_FROM_BEFORE = (
    "was made by an earlier forward, limit: what this forward made or what has no graph: make it in forward each time, "
    "or keep a detached clone"
)


class LayerFault(ValueError):
    """A layer cannot be copied so that the copy computes what the layer would; the message has no task's name yet."""


class Stale(Tensor):
    """Stands in a copy for a tensor that is out of date there. Its layer may set another; computing with it raises."""

    what: str

    @classmethod
    def of(cls, what: str) -> Stale:
        """`what`: the message for who computes with it."""
        stale = torch.empty(0).as_subclass(cls)
        stale.what = what
        return stale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = next((held.value for held in reach(("", [args, kwargs])) if isinstance(held.value, Stale)), None)
        raise LayerFault(vars(held)["what"] if held is not None else "a layer computes with what is out of date")

    def __deepcopy__(self, memo: dict[int, Any]) -> Stale:
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped there
        return f"Stale({vars(self)['what']!r})"


class Registered(NamedTuple):
    """A parameter or buffer of the layers."""

    name: str  # "parameter 0.weight"
    tensor: Tensor
    changes: bool  # in training


class StalePlace(NamedTuple):
    """An attribute that is out of date until a forward sets it."""

    module: nn.Module
    attribute: str
    stale: Stale


class Layers:
    """The layers of a task, with a loss that is one of them, and what a copy of them must not compute with.

    Made before the weights are moved: from then on, views of them are not to be told from other tensors.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        names: Sequence[str],
        registered: Sequence[Registered],
        shown: Callable[[str], str] = str,
    ) -> None:
        """Raises LayerFault for what no copy can have."""
        # A layer may have the loss's name.
        self._named = {name if name not in names[:k] else f"{name}'": layers[k] for k, name in enumerate(names)}
        self.registered, self._shown = registered, shown
        memory = _Memory(registered)
        memory.check_apart()
        known = {id(each.tensor) for each in registered} | {id(part) for layer in layers for part in layer.modules()}
        self._stale: list[tuple[Tensor, str]] = []  # with the message for who computes with it
        for path, value, is_copied in reach(*self._named.items()):
            if isinstance(value, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
                raise LayerFault(
                    f"{self._layer(path)}: {self._at(path)} is compiled by torch.jit, limit: plain Python; a copy of "
                    f"it is not bound to the weights that the engine trains, and which kernels it runs depends on how "
                    f"often it has run: give the module from before torch.jit.script or trace, and script it "
                    f"after training"
                )
            if isinstance(value, (WeakKeyDictionary, WeakSet)) and not known.isdisjoint(map(id, value)):
                raise LayerFault(
                    f"{self._layer(path)}: {self._at(path)} holds layers or parameters by weak references, which a "
                    f"copy's go on referring to those of the model; use a dict or a set"
                )
            if isinstance(value, dict) and not known.isdisjoint(each for each in value if type(each) is int):
                raise LayerFault(
                    f"{self._layer(path)}: {self._at(path)} is keyed by the ids of layers or parameters, which those "
                    f"of a copy have not, limit: names, or these themselves; key it by those"
                )
            if not isinstance(value, (Tensor, np.ndarray)) or id(value) in known:
                continue
            name = memory.shared_with(value)
            if name and (isinstance(value, np.ndarray) or not is_copied):
                raise LayerFault(f"{self._layer(path)}: {self._at(path)} {_shares_with(name)}")
            if isinstance(value, Tensor) and is_copied and (name or not value.is_leaf):
                self._stale.append((value, self._why_stale(path, _shares_with(name) if name else _FROM_BEFORE)))

    def copy(self, places: Sequence[Tensor]) -> tuple[list[nn.Module], list[StalePlace]]:
        """Copy the layers around these places of the registered tensors, and list what is stale.

        One copy for all: what layers share, they go on sharing. Raises LayerFault.
        """
        memo: dict[Any, Any] = {id(r.tensor): place for r, place in zip(self.registered, places, strict=True)}
        # Nothing of the originals goes away meanwhile, so no id in the memo is taken over by another object.
        memo.update({id(value): Stale.of(what) for value, what in self._stale})
        held = reach(*self._named.items(), copied_only=True)
        tensors = [(path, value) for path, value, _ in held if isinstance(value, Tensor)]
        for path, value in tensors:  # also what a hook, which closes over more than the layers, has left since
            if not value.is_leaf:
                memo.setdefault(id(value), Stale.of(self._why_stale(path, _FROM_BEFORE)))
        # By which torch's deepcopy knows what it has copied.
        memo["torch"] = _storages([value for _, value in tensors], memo)
        copies = self._deepcopy(memo)
        for layer in copies.values():
            follow_hooks(layer, memo)
        for each, place in zip(self.registered, places, strict=True):
            vars(place).update(copy.deepcopy(vars(each.tensor), memo))  # what a user has set on a parameter
        self._check_bound(copies, memo)
        memory, placed = _Memory(self.registered), set(map(id, places))
        begins = {path: residue(value) for path, value in tensors}
        for path, value, _ in reach(*copies.items(), copied_only=True):
            if isinstance(value, Stale) or id(value) in placed:
                continue
            if name := memory.shared_with(value):
                raise LayerFault(
                    f"{self._layer(path)}: the {self._at(path)} of its copy is still {name} itself; {_IGNORES}"
                )
            if isinstance(value, Tensor) and residue(value) != begins.get(path, residue(value)):
                raise LayerFault(
                    f"{self._layer(path)}: the {self._at(path)} of its copy begins at an address of {residue(value)} "
                    f"modulo 64, limit: {begins[path]}, as in the layer, since bits depend on it; {_IGNORES}"
                )
        modules = [module for layer in copies.values() for module in layer.modules()]
        attributes = [(module, *each) for module in modules for each in vars(module).items()]
        return list(copies.values()), [StalePlace(*each) for each in attributes if isinstance(each[2], Stale)]

    def _deepcopy(self, memo: dict[Any, Any]) -> dict[str, nn.Module]:
        known = dict(memo)
        try:
            with TaskGenerator(seeded(0)):  # a layer may copy itself by making a new one, which draws its weights
                return copy.deepcopy(self._named, memo)
        except Exception as error:
            cause, where = error, next(iter(self._named))
            for path, value, _ in reach(*self._named.items(), copied_only=True):
                try:
                    copy.deepcopy(value, dict(known))
                except Exception as found:
                    cause, where = found, path
                    if not isinstance(value, nn.Module):
                        break
            raise LayerFault(
                f"{self._layer(where)}: {self._at(where)} cannot be copied for a device: {type(cause).__name__}: "
                f"{cause}; make it in forward, keep it outside the layer, or give its class a __deepcopy__"
            ) from error

    def _check_bound(self, copies: Mapping[str, nn.Module], memo: Mapping[Any, Any]) -> None:
        """Check that the copies are built as the layers, around the places."""
        for layer, root in self._named.items():
            copied = dict(copies[layer].named_modules(prefix=layer, remove_duplicate=False))
            for path, module in root.named_modules(prefix=layer, remove_duplicate=False):
                other, copies_itself = copied.get(path), _copies_itself(module)
                if other is None or (copies_itself and type(other) is not type(module)):
                    raise LayerFault(f"{self._layer(path)}: its copy has no {self._at(path)}; {_IGNORES}")
                for kind in ("_parameters", "_buffers"):
                    theirs = getattr(other, kind)
                    for name, tensor in getattr(module, kind).items():
                        if tensor is not None and theirs.get(name) is not memo[id(tensor)]:
                            raise LayerFault(
                                f"{self._layer(path)}: the {self._at(path)}.{name} of its copy is another one, so that "
                                f"nothing would train it; {_IGNORES}"
                            )
                for name, value in vars(module).items() if copies_itself else ():
                    found = vars(other).get(name)
                    if isinstance(value, _COMPARED) and (type(value), value) != (type(found), found):
                        raise LayerFault(
                            f"{self._layer(path)}: the {self._at(path)}.{name} of its copy is {found!r}, instead of "
                            f"{value!r}; {_IGNORES}"
                        )

    def _why_stale(self, path: str, why: str) -> str:
        return f"{self._layer(path)}: forward computes with {self._at(path)}, but that {why}"

    def _at(self, path: str) -> str:
        """Return a path as the user knows it, for a message that names its layer."""
        return self._shown(path).partition(" (")[0]

    def _layer(self, path: str) -> str:
        name = max((n for n in self._named if path == n or path.startswith((f"{n}.", f"{n}["))), key=len)
        return self._shown(name)


def _shares_with(name: str) -> str:
    return (
        f"shares the memory of {name}, limit: memory of its own; training moves that elsewhere, so it would not show "
        f"what changes: make it from {name} in forward, or keep a clone"
    )


def _copies_itself(module: nn.Module) -> bool:
    """Return True if a class that is not torch's own says how its objects are copied."""
    for name in ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"):
        definer = next((kind for kind in type(module).__mro__ if name in vars(kind)), None)
        if definer is None and getattr(module, name, None) is not None:  # of what it wraps, by __getattr__
            return True
        if definer is not None and definer.__module__.partition(".")[0] not in ("torch", "builtins"):
            return True
    return False


def _storages(tensors: Iterable[Tensor], memo: Mapping[Any, Any]) -> dict[int, torch.UntypedStorage]:
    """Copy the storages that begin beside a multiple of 64, as an array of numpy does, to the same address modulo 64.

    Those of tensors in `memo` are not looked at.
    """
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if id(tensor) in memo or tensor.layout != torch.strided:
            continue
        storage = tensor.untyped_storage()
        start = storage.data_ptr() % ALIGNMENT_BYTES if storage.device.type == "cpu" else 0
        if start and storage._cdata not in found:
            place = torch.UntypedStorage(start + storage.nbytes())[start:]  # type: ignore[no-untyped-call]
            found[storage._cdata] = place.copy_(storage)
    return found


class _Memory:
    """Memory of the tensors that change in training."""

    def __init__(self, registered: Sequence[Registered]) -> None:
        self._places = [(array, each) for each in registered if (array := _array(each.tensor)) is not None]
        spans = np.array([_span(array) for array, _ in self._places], dtype=np.int64).reshape(-1, 2)
        self._starts, self._ends = spans[:, 0], spans[:, 1]

    def check_apart(self) -> None:
        """Check that what changes shares no memory with another."""
        sharing = ((each, other) for array, each in self._places for other in self._sharing(array))
        for each, other in sharing:
            if other is not each and (each.changes or other.changes):
                raise LayerFault(
                    f"{each.name} and {other.name} share memory, limit: memory of its own for each; what is written to "
                    f"one would not show in the other: register a clone, or make it from the other in forward"
                )

    def shared_with(self, value: Any) -> str | None:
        """Return the name of the one that a tensor or an array shares memory with."""
        array = _array(value) if isinstance(value, Tensor) else value if isinstance(value, np.ndarray) else None
        return None if array is None else next((each.name for each in self._sharing(array)), None)

    def _sharing(self, array: np.ndarray[Any, Any]) -> Iterator[Registered]:
        start, end = _span(array)
        for k in np.nonzero((self._starts < end) & (start < self._ends))[0].tolist():
            place, each = self._places[k]
            if _shares(array, place):
                yield each


def kept_by(tensor: Tensor, *roots: tuple[str, object]) -> str | None:
    """Return the path to what shares memory with a tensor, in what these objects hold; None: nothing does."""
    memory = _Memory([Registered("", tensor, True)])
    return next((path for path, value, _ in reach(*roots) if memory.shared_with(value) is not None), None)


def _array(tensor: Tensor) -> np.ndarray[Any, Any] | None:
    """The memory of a tensor as NumPy takes it, which reads none of it; None where it has none here."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or nn.parameter.is_lazy(tensor):
        return None
    if not extent_bytes(tensor) or not tensor.data_ptr():
        return None
    size = tensor.element_size()
    interface = {
        "version": 3,
        "typestr": f"|V{size}",
        "data": (tensor.data_ptr(), True),
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * size for stride in tensor.stride()),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _span(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Addresses of its first byte and of the one after its last."""
    steps = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    address = array.__array_interface__["data"][0]
    return address + sum(min(0, step) for step in steps), address + sum(max(0, s) for s in steps) + array.itemsize


def _shares(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    try:
        return np.shares_memory(a, b, max_work=1_000_000)  # type: ignore[arg-type]  # any int
    except np.exceptions.TooHardError:
        return True
