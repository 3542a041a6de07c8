"""Plans that tasks of the same structure take over from one that was rehearsed.

A rehearsal runs one batch through layers as they are, and training counts on it for all batches and weights that come
later. Another task's batch of the same sizes, and weights of the same places, are as good as those. So a plan is taken
over where everything else is equal: what the layers, the loss and the metrics are, down to the code of functions and
the values that they can reach. What is not known to be equal is rehearsed.

    taken as it is     code of the standard library and of installed packages, but for methods that were replaced
    compared           classes and functions of anybody else, with defaults, closures and the globals that they name;
                       attributes and containers, by value; buffers and other tensors, by their bytes
    no value counts    of parameters: of trainable ones, and of large frozen ones
    never equal        hooks, generators, iterators, locks, objects that are made in C
"""

from __future__ import annotations

import dis
import functools
import hashlib
import os
import sys
import sysconfig
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from hydra_engine.data import memory_of, residue
from hydra_engine.host import Cut, Measured, Observed, TaskState, has_hooks
from hydra_engine.planning.cuts import CutChoice, PredictedCut
from hydra_engine.tasks import Purpose
from partitioners.reach import PLAIN, Held

Signature: TypeAlias = "tuple[Hashable, ...]"

# Structures whose plans are remembered; the first to be seen are forgotten.
MOST_KNOWN = 64
# Values that are looked at. A layer that leads to more leads to the program around it.
MOST_VALUES = 2**18
# Elements of a frozen parameter whose values count: a switch or a scale that a layer may branch on is no larger.
MOST_COMPARED = 2**16

_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "hydra_engine", "partitioners"}
_INSTALLED = tuple(f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("purelib", "platlib"))
_TORCH_MODULE: Any = torch.nn.modules.module
_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, set, frozenset, deque)
# Made in C, and without anything that changes.
_FIXED = (
    types.ClassMethodDescriptorType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    np.ufunc,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch.layout,
    torch.memory_format,
    type(Held.path),
    type(Ellipsis),
    type(NotImplemented),
)
# By kind, the attributes that are all that an object is.
_PARTS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    ((types.GetSetDescriptorType, types.MemberDescriptorType), ("__name__",)),
    (types.BuiltinFunctionType, ("__name__", "__self__")),
    (types.MethodType, ("__self__", "__func__")),
    ((staticmethod, classmethod), ("__func__",)),
    (property, ("fget", "fset", "fdel")),
    (functools.cached_property, ("func",)),
    (functools._lru_cache_wrapper, ("__wrapped__",)),
    (functools.partial, ("func", "args", "keywords", "__dict__")),
    (Enum, ("name", "value")),  # flags together have no name before Python 3.11
)
# A function that names one of these may read what its globals do not tell.
_READS_ANYTHING = frozenset({"globals", "import_module", "__import__", "eval", "exec"})
# Of a class: what says nothing of what its objects do.
_NO_BEHAVIOUR = frozenset(
    """
    __abstractmethods__ __annotate__ __annotate_func__ __annotations__ __annotations_cache__ __dataclass_fields__
    __dataclass_params__ __dict__ __doc__ __firstlineno__ __module__ __orig_bases__ __parameters__ __static_attributes__
    __weakref__ _abc_impl
    """.split()  # noqa: SIM905 -- as a list it is no easier to read
)
_IS_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, or as if
_LEAST_BYTES, _POINTER_BYTES = object.__basicsize__, 8
# Options of a task that its plan depends on, beside layers, loss and metrics.
_OPTIONS = (
    "partitioner",
    "precision",
    "accumulation_steps",
    "max_device_batch",
    "adapts",
    "loss_reduction",
    "split",
    "grad_scaler",
    "optimizer_scope",
    "optimizer_device",
    "early_release",
    "may_veto",
    "compile",
)


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """What a plan has found out of a task's structure."""

    task: str
    cut: Cut
    measured: Measured
    observed: Observed
    steps_on_device: bool
    input_bytes: list[int]
    choice: CutChoice | None  # of the cut
    predicted: PredictedCut | None

    @classmethod
    def of(
        cls, state: TaskState, input_bytes: list[int], choice: CutChoice | None, predicted: PredictedCut | None
    ) -> Rehearsed:
        """Return it, apart from what the task goes on to find out."""
        return cls(
            task=state.name,
            cut=state.cut,
            measured=state.measured.copied(),
            observed=state.observed.copied(),
            steps_on_device=state.steps_on_device,
            input_bytes=list(input_bytes),
            choice=choice,
            predicted=predicted,
        )

    def put_into(self, state: TaskState) -> None:
        """Let a task of the same structure know it."""
        if self.steps_on_device != state.steps_on_device:
            state.step_on_device(is_so=self.steps_on_device)
        measured = self.measured.copied()
        measured.state_bytes = state.measured.state_bytes
        state.adopt(self.cut, measured, self.observed.copied())


class Rehearsals:
    """Remembers what was rehearsed, by the signature of what it was."""

    def __init__(self) -> None:
        self._found: dict[Signature, dict[Hashable, Rehearsed]] = {}

    def get(self, structure: Signature | None, beside: Hashable) -> Rehearsed | None:
        """Return what was found out of a task of this structure; beside: what else its plan depends on."""
        return None if structure is None else self._found.get(structure, {}).get(beside)

    def put(self, structure: Signature | None, beside: Hashable, rehearsed: Rehearsed) -> None:
        """Remember it, unless its layers work in place on a batch: that depends on who keeps the batch."""
        if structure is not None and not rehearsed.observed.works_on_batch:
            self._found.setdefault(structure, {})[beside] = rehearsed
            for oldest in list(self._found)[:-MOST_KNOWN]:
                self._found.pop(oldest, None)


def signature_of(state: TaskState) -> Signature | None:
    """All of a task that its plan depends on, but for the first batches; None: something cannot be compared."""
    task, layout = state.task, state.layout
    if task.purpose is not Purpose.TRAIN or _TORCH_MODULE._has_any_global_hook() or has_hooks(layout):
        return None
    options = {name: getattr(task, name) for name in _OPTIONS}
    if task.optimizer_device != "host":
        options |= {name: getattr(task, name) for name in ("optimizer", "param_groups", "lr", "lr_scheduler")}
    source = task.model.__dict__["source"] if task.model.has_own_forward else None
    walk = _Walk(state)
    try:
        for value in (layout.names, layout.layers, task.loss_fn, task.metrics, source, options):
            walk.add(value)
    except Exception:  # of whatever a layer holds, too: it is rehearsed, and may fail there
        return None
    states = tuple(state.measured.state_bytes.items())
    return (*walk.tokens, task.validation is None, states, *_settings())


class _Unjudged(Exception):
    """A value that cannot be compared."""


class _Is:
    """An object that is equal to itself alone."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Is) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


class _Walk:
    """Writes values down as a row of tokens, equal for equal values that hold each other in the same way."""

    def __init__(self, state: TaskState) -> None:
        self.tokens: list[Hashable] = []
        self._slots = {id(slot.parameter): slot for slot in state.layout.slots}
        self._keeps_residues = state.layout.keeps_residues
        self._seen: dict[Hashable, tuple[int, object]] = {}  # with the values, or another might get an id
        self._own = {slot.parameter.untyped_storage().data_ptr() for slot in state.layout.slots} - {0}
        self._storages: dict[int, int] = {}

    def add(self, value: Any) -> None:
        """Write a value down. Raises _Unjudged."""
        kind: Any = type(value)
        if kind in PLAIN or isinstance(value, np.generic) or kind in (range, slice):
            self.tokens += (kind, repr(value))
            return
        if self._is_again(id(value), value):
            return
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.ModuleType) or kind in _FIXED:
            self.tokens.append(_Is(value))
        elif isinstance(value, types.CodeType):
            self.tokens.append(value)
        elif parts := next((names for kinds, names in _PARTS if isinstance(value, kinds)), None):
            self._add_all(kind, *(getattr(value, name) for name in parts))
        elif kind is weakref.ref and value.__callback__ is None:
            self._add_all(kind, value())
        elif isinstance(value, np.ndarray):
            self._add_array(value)
        else:
            self._add_object(value)

    def _add_all(self, *values: Any) -> None:
        for value in values:
            self.add(value)

    def _is_again(self, key: Hashable, value: object) -> bool:
        """Return True, and refer to the first place, if a value was written down already."""
        if key in self._seen:
            self.tokens += ("again", self._seen[key][0])
            return True
        self._seen[key] = (len(self._seen), value)
        if len(self._seen) > MOST_VALUES:
            raise _Unjudged
        return False

    def _add_object(self, value: Any) -> None:
        """Write down a container, or an object that is no more than its attributes."""
        kind = type(value)
        base = next((each for each in kind.__mro__ if each in _CONTAINERS), object)
        made = kind.__mro__[: kind.__mro__.index(base)]  # the classes in Python
        slots = [key for cls in made for key, slot in vars(cls).items() if isinstance(slot, types.MemberDescriptorType)]
        num_own = (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)  # else kept before the object
        most_bytes = _LEAST_BYTES + _POINTER_BYTES * (num_own + len(slots))
        holds_more = base is object and kind.__basicsize__ > most_bytes
        if holds_more or not all(each.__flags__ & _IS_HEAP_TYPE for each in made):
            raise _Unjudged
        self.add(kind)
        if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
            self._add_contents(value)
        if made:
            try:
                attributes = object.__getattribute__(value, "__dict__")
            except AttributeError:
                attributes = {}
            self._add_items(attributes)
            self._add_items({name: getattr(value, name) for name in slots if hasattr(value, name)})

    def _add_contents(self, value: Any) -> None:
        self.tokens.append(len(value))
        if isinstance(value, dict):
            if isinstance(value, defaultdict):
                self.add(value.default_factory)
            self._add_items(value)
        elif isinstance(value, (set, frozenset)):
            if not all(type(each) in PLAIN for each in value):
                raise _Unjudged
            self.tokens += sorted(f"{type(each).__name__} {each!r}" for each in value)
        else:
            if isinstance(value, deque):
                self.tokens.append(value.maxlen)
            self._add_all(*value)

    def _add_items(self, items: Mapping[Any, Any]) -> None:
        self.tokens.append(len(items))
        for key, each in list(items.items()):
            self.add(key)
            self.add(each)

    def _add_tensor(self, value: Tensor) -> None:
        slot = self._slots.get(id(value))
        is_plain = value.layout == torch.strided and value.is_leaf and not value._backward_hooks
        if not is_plain or type(value) not in (Tensor, nn.Parameter, nn.Buffer):
            raise _Unjudged
        self.tokens += (
            type(value),
            value.shape,
            value.stride(),
            value.dtype,
            value.device,
            value.requires_grad,
            None if slot is None else (slot.index, slot.offset, slot.link_dtype),
            residue(value) if self._keeps_residues and slot is None else 0,
        )
        place = value.untyped_storage().data_ptr()
        if slot is None and place:  # tensors that share memory do so in both
            if place in self._own:
                raise _Unjudged
            self.tokens += (self._storages.setdefault(place, len(self._storages)), value.storage_offset())
        if slot is None or not (slot.trainable or value.numel() > MOST_COMPARED):
            self.tokens.append(_digest(memory_of(value)))
        self._add_items(vars(value))

    def _add_array(self, value: np.ndarray) -> None:
        if type(value) is not np.ndarray or value.dtype.hasobject or value.base is not None:
            raise _Unjudged
        self.tokens += (value.shape, value.strides, value.dtype.str, hashlib.blake2b(value.tobytes()).digest())

    def _add_class(self, kind: type) -> None:
        if _is_library(kind.__module__):
            self.tokens.append(_Is(kind))
            # Somebody may have put another function in its place.
            for each in kind.__mro__ if issubclass(kind, nn.Module) else ():
                if each is kind or not self._is_again(id(each), each):
                    self.tokens += (_Is(own) for own in vars(each).values() if isinstance(own, types.FunctionType))
            return
        self.tokens += (kind.__module__, kind.__qualname__)
        self._add_all(type(kind), kind.__bases__)
        for name, value in list(vars(kind).items()):
            if name not in _NO_BEHAVIOUR:
                self._add_all(name, value)

    def _add_function(self, function: types.FunctionType) -> None:
        # functools.wraps gives a user's function the module of what it wraps, or a library's that of a user's.
        if _is_library(function.__module__) and _is_library(function.__globals__.get("__name__")):
            self.tokens.append(_Is(function))
            return
        codes = [*_codes(function.__code__)]
        names = frozenset(name for code in codes for name in code.co_names)
        calls = (each for code in codes for each in dis.get_instructions(code))
        imported = (each.argval for each in calls if each.opname == "IMPORT_NAME")  # a relative one without its package
        if names & _READS_ANYTHING or not all(map(_is_library, imported)):
            raise _Unjudged  # what it reads is not among the globals that it names
        self._add_all(function.__code__, function.__defaults__, function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # not assigned yet
                self.tokens.append("empty")
        self._add_items(vars(function))
        self._add_named(function.__globals__, names)

    def _add_named(self, scope: dict[str, Any], names: frozenset[str]) -> None:
        """Write down what a function may read by its names: of its globals, and of modules that it reaches there."""
        for name in sorted(names & scope.keys()):
            value = scope[name]
            self._add_all(name, value)
            if isinstance(value, types.ModuleType) and not self._is_again((id(value), names), value):
                self._add_named(vars(value), names)


@functools.cache
def _is_library(module: str | None) -> bool:
    root = (module or "").partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None)
    return root in _LIBRARIES or (file is not None and file.startswith(_INSTALLED))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


def _settings() -> Iterator[Hashable]:
    """What torch and layers may ask for anywhere."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    yield torch.get_default_dtype()
    yield torch.get_deterministic_debug_mode()
    yield torch.get_float32_matmul_precision()
    yield from (getattr(cuda, f"{each}_sdp_enabled")() for each in ("flash", "mem_efficient", "math", "cudnn"))
    yield from (cudnn.enabled, cudnn.benchmark, cudnn.deterministic)
    yield torch.backends.mkldnn.enabled
    yield torch.backends.mha.get_fastpath_enabled()
    yield tuple(sorted(os.environ.items()))


def _digest(tensor: Tensor) -> bytes:
    plain = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(plain.numpy().tobytes(), digest_size=16).digest()
