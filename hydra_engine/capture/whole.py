"""Runs the modules that a recording keeps whole, to know what they give."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hydra_engine.capture.piece import Piece, found_in
from hydra_engine.capture.shadow import Shadow, on_meta
from hydra_engine.capture.tape import Constant, Tape, Value, replaced

_CPU = torch.device("cpu")
# Elements of a tensor that are kept for batches without values.
_MOST_KEPT = 4096


_APART: list[Callable[[], AbstractContextManager[Any]]] = [partial(torch.random.fork_rng, devices=[])]


def draw_apart_in(context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Let modules that run to be recorded draw within a context: where a task trains, draws would be the task's."""
    _APART[:] = [context]


def apart_from_draws() -> AbstractContextManager[Any]:
    """Return a context whose draws move no stream."""
    return _APART[0]()


class WholeModules:
    """Runs modules on meta or, where they ask for values, on the CPU.

    What the batch alone decides has its values then (lengths, a mask). All else is 0, unless the module cannot run on
    that (a scale of 0): then the calls before it run as well, with the model's weights.
    """

    def __init__(
        self, shadow: Shadow, tensors: Sequence[Tensor] | None, ran_on: dict[str, list[Tensor | None]]
    ) -> None:
        """Make one for the tensors of a batch. None: it has no values, and those of `ran_on` serve.

        ran_on: values that modules ran on, by their path and time in the forward.
        """
        self._shadow, self._tensors, self._ran_on = shadow, tensors, ran_on

    def run(
        self,
        tape: Tape,
        module: nn.Module,
        name: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return what a call of a module of the shadow gives, on meta. `name`: its path, and for which time it runs."""

        def as_made(tensor: Tensor) -> Tensor:
            """Tell what it gives from what it got, which another batch may have it change."""
            if not tensor.is_meta:
                return on_meta(tensor).requires_grad_(tensor.requires_grad)
            return tensor if tape.values.ref(tensor) is None else tensor.view_as(tensor)

        with apart_from_draws():
            try:
                found = call(*args, **kwargs)
            except Exception:  # it asks for values
                found = self._on_values(tape, module, name, call, (args, kwargs))
        return pytree.tree_map_only(Tensor, as_made, found)

    def _on_values(
        self, tape: Tape, module: nn.Module, name: str, call: Callable[..., Any], given: tuple[Any, Any]
    ) -> Any:
        entering = [each for each in pytree.tree_leaves(given) if isinstance(each, Tensor)]
        try:
            with self._shadow.with_zeros(module):
                return self._called(call, given, entering, self._values(tape, entering, name, with_weights=False), name)
        except Exception as error:
            if not self._shadow.has_weights:
                raise self._lacks_values(module, name, error) from error
        with self._shadow.with_weights(module):
            values = self._values(tape, entering, name, with_weights=True)
            try:
                return self._called(call, given, entering, values, name)
            except Exception as error:
                if self._tensors is None:
                    raise self._lacks_values(module, name, error) from error
                raise

    def _called(
        self, call: Callable[..., Any], given: tuple[Any, Any], entering: list[Tensor], values: list[Any], name: str
    ) -> Any:
        by_id = {id(tensor): value for tensor, value in zip(entering, values, strict=True)}

        def stand_in(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return _CPU if isinstance(leaf, torch.device) else leaf
            value = by_id.get(id(leaf))
            made = torch.zeros(leaf.shape, dtype=leaf.dtype) if value is None else value
            return made.requires_grad_() if leaf.requires_grad else made

        args, kwargs = replaced(given, stand_in)
        kept = [None if value is None else value.reshape(-1)[:_MOST_KEPT].clone() for value in values]
        found = call(*args, **kwargs)
        if self._tensors is not None:
            self._ran_on[name] = kept
        return found

    def _values(self, tape: Tape, entering: list[Tensor], name: str, *, with_weights: bool) -> list[Tensor | None]:
        """Return the values of tensors on meta; None where they are not known."""
        if self._tensors is None:
            before = itertools.chain(self._ran_on.get(name, ()), itertools.repeat(None))
            return [_filled(tensor, kept) for tensor, kept in zip(entering, before, strict=False)]
        refs = [tape.described(each) for each in entering]

        def is_known(ref: Any) -> bool:
            if not isinstance(ref, Value):
                return with_weights or isinstance(ref, Constant)
            return with_weights or not any(call.held for call in tape.values.origin(tape.calls, [ref.number]))

        numbers = sorted({ref.number for ref in refs if isinstance(ref, Value) and is_known(ref)})
        calls = tape.values.origin(tape.calls, numbers)
        piece = Piece(calls, range(len(self._tensors)), numbers, tape.values)
        inputs = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors]
        with torch.no_grad():
            known = dict(zip(numbers, piece.run(self._shadow.model, _CPU, inputs), strict=True))
        found: list[Tensor | None] = []
        for ref in refs:
            if not is_known(ref):
                found.append(None)
            elif isinstance(ref, Value):
                found.append(known[ref.number].detach())
            elif isinstance(ref, Constant):
                found.append(tape.values.constants[ref.number].detach().to("cpu", copy=True))
            else:
                found.append(found_in(self._shadow.model, ref.name.split(".")))
        return found

    def _lacks_values(self, module: nn.Module, name: str, error: Exception) -> ValueError:
        lacking = "the batch has no values" if self._tensors is None else "the weights have no values"
        return ValueError(
            f"module {name.partition('#')[0]} of the model ({type(module).__name__}), which is one layer, does not run "
            f"on zeros ({type(error).__name__}: {error}), and {lacking}; give Model(module, example=...) a batch with "
            f"values, and the model weights"
        )


def _filled(tensor: Tensor, kept: Tensor | None) -> Tensor | None:
    """Return values of a tensor's shape, as many of them as there are, again and again."""
    if kept is None or not len(kept):
        return None
    return kept[torch.arange(tensor.numel()) % len(kept)].reshape(tensor.shape)
