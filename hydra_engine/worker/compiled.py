"""Layers through `torch.compile`: one graph for all layers that are built alike, in any task and on any device.

What a graph is made for, and when a layer runs without one:

    first call of a form      uncompiled, to see whether it draws (the first run of a unit is metered as well)
    metered unit              uncompiled: what compiled code allocates, no dispatch mode sees
    second call of a form     traced and compiled, while no other compiled layer runs in the process
    calls after it            compiled

A layer's form is all that a graph may depend on: classes and plain attributes of its modules, and the shapes, strides
and types of its parameters and of its input. Weights enter a graph as its inputs, so that they may lie elsewhere at
each call. Dynamo guards what the form leaves out.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from hydra_engine.data import GLOBAL_GENERATORS, TaskGenerator
from hydra_engine.host import Structure
from hydra_engine.worker.attributes import PLAIN
from partitioners import MemoryMeter
from partitioners.skips import Skips

Backend: TypeAlias = "str | Callable[..., Any]"

BACKEND: Backend = "inductor"
# Forms of one layer that are compiled, as many as torch's own limit for one function: a loader whose every batch has
# another length would compile for ever.
MAX_FORMS = 8


class Turns:
    """Any number of compiled calls at a time, or one compilation.

    While it traces, torch refuses the compiled calls of other threads ("using FX to symbolically trace").
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_calls = 0
        self._is_compiling = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Beside others of its kind."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_compiling)
            self._num_calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    @contextmanager
    def compilation(self) -> Iterator[None]:
        """Alone. No call begins before it is over, so that calls which overlap cannot keep it waiting."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_compiling)
            self._is_compiling = True
            self._changed.wait_for(lambda: not self._num_calls)
        try:
            yield
        finally:
            with self._changed:
                self._is_compiling = False
                self._changed.notify_all()


# Of the process, as what it guards is torch's.
_TURNS = Turns()


def _call(layer: nn.Module, value: Any) -> Any:
    return layer(value)


class Form:
    """A way to build and call a layer: its compiled function, or the reason why it has none."""

    def __init__(self, backend: Backend) -> None:
        # Code of its own, since torch counts and searches graphs by the code that they were made from.
        own = FunctionType(_call.__code__.replace(co_name="compiled_layer"), _call.__globals__)
        self.function: Callable[[nn.Module, Any], Any] = torch.compile(
            own, fullgraph=True, dynamic=False, backend=backend
        )
        self.was_run = False  # uncompiled, so that it is known whether it draws
        self.obstacle = ""  # why it runs uncompiled
        self.is_told = False


@cache
def _form(key: Hashable, backend: Backend) -> Form:
    """Kept for the process's lifetime, as torch keeps graphs; for all tasks and devices."""
    return Form(backend)


class CompiledLayers:
    """Runs the layers of one device's copy of a task."""

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._begun: list[set[Form]] = [set() for _ in structure.layers]
        self._is_left_out = [any(map(_is_left_out, layer.modules())) for layer in structure.layers]

    def run(self, index: int, value: Any) -> Any:
        """The layer's output. Raises ValueError where it cannot be compiled, and what the layer raises."""
        layer = self._structure.layers[index]
        if self._is_left_out[index]:
            return layer(value)
        form = _form(_key(layer, value), BACKEND)
        modes = _get_current_dispatch_mode_stack()
        if form.obstacle or not form.was_run or any(isinstance(mode, MemoryMeter) for mode in modes):
            drawn = next((mode for mode in reversed(modes) if isinstance(mode, TaskGenerator)), None)
            return self._run_uncompiled(index, form, value, drawn)
        begun = self._begun[index]
        if form not in begun and len(begun) == MAX_FORMS:
            self._tell(index, form, f"it was called in {MAX_FORMS} other ways before, which is the limit")
            return layer(value)
        # Under a dispatch mode torch compiles nothing. The graph draws nothing that a mode would have to redirect.
        with _disable_current_modes():
            if form in begun:
                with _TURNS.call():
                    return form.function(layer, value)
            # Equal layers may still differ in what Dynamo guards: each one's first call may compile. Tracing takes the
            # process-wide generators' states and puts them back, which a loader's reads must not see.
            with GLOBAL_GENERATORS.turn(), _TURNS.compilation():
                found = self._first_call(index, form, value)
        return layer(value) if form.obstacle else found

    def _first_call(self, index: int, form: Form, value: Any) -> Any:
        try:
            # The backward's graph too: later, it would be compiled beside other threads' calls.
            with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
                found = form.function(self._structure.layers[index], value)
        except torch._dynamo.exc.FailOnRecompileLimitHit:  # loaded by then; importing it takes as long as all of torch
            form.obstacle = "torch's limit of graphs for one function is reached: equal layers differ in what they use"
            self._tell(index, form, form.obstacle)
            return None
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the form has run uncompiled before, so it is the compilation's
            raise ValueError(
                f"compile: {self._shown(index)} cannot be compiled as one graph: {str(error).strip()}\n"
                f"Decorate the layer's forward with torch.compiler.disable to leave it out, or leave out compile=True"
            ) from error
        self._begun[index].add(form)
        return found

    def _run_uncompiled(self, index: int, form: Form, value: Any, drawn: TaskGenerator | None) -> Any:
        """Run a layer as it is; drawn: sees whether it draws; None: it is known that it does not."""
        if drawn is None:
            form.was_run = True
            return self._structure.layers[index](value)
        before, drawn.drew_elsewhere = drawn.state, False
        found = self._structure.layers[index](value)
        after = drawn.state
        with _disable_current_modes():
            if drawn.drew_elsewhere or (after is not before and not torch.equal(before, after)):
                form.obstacle = form.obstacle or "it draws random numbers, which compiled code has no generator for"
                self._tell(index, form, form.obstacle)
        form.was_run = True
        return found

    def _tell(self, index: int, form: Form, why: str) -> None:
        if not form.is_told:
            form.is_told = True
            warnings.warn(f"compile: {self._shown(index)} runs uncompiled: {why}", stacklevel=2)

    def _shown(self, index: int) -> str:
        return self._structure.shown(self._structure.names[index])


def _is_left_out(module: nn.Module) -> bool:
    """Return True if its user keeps it out, or if it reads what no graph has as an input."""
    disabled = getattr(module.forward, "_torchdynamo_disable", False)
    return bool(disabled) or any(isinstance(each, Skips) for each in vars(module).values())


def _key(layer: nn.Module, value: Any) -> Hashable:
    """Return all that a graph of the layer on this input depends on."""
    modules = tuple(
        (path, type(module), *((name, each) for name, each in vars(module).items() if _is_plain(each)))
        for path, module in layer.named_modules(remove_duplicate=False)
    )
    tensors = tuple(map(_described, (*layer.parameters(), *layer.buffers())))
    leaves, spec = pytree.tree_flatten(value)
    inputs = tuple(_described(leaf) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
    return modules, tensors, str(spec), inputs


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and all(type(each) in PLAIN for each in value))


def _described(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type, tensor.requires_grad
