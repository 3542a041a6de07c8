"""Checks that a module's own `forward` is its children in order, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hydra_engine.boundary import copy_of
from hydra_engine.randomness import Stream, capture, installed
from hydra_engine.shard import ModelLayout, Structure
from hydra_engine.task import Model


class _Trail:
    """The layers that ran so far, and what the last one returned."""

    def __init__(self, names: list[str], structure: Structure, layout: ModelLayout, value: Any) -> None:
        self.names = names
        self._structure = structure
        self._layout = layout
        self.value = value
        self.position = 0

    def step(self, position: int, value: Any) -> Any:
        name = self.names[position]
        if position != self.position:
            expected = self.names[self.position] if self.position < len(self.names) else "the end"
            raise _refusal(f"runs layer {name!r} (index {position}) where {expected!r} comes next in order")
        if not _is_same(value, self.value):
            raise _refusal(f"changes the value that enters layer {name!r} (index {position})")
        self.position += 1
        # On copies of its weights, one layer's at a time: it may write to them.
        slots = [self._layout.slots[binding.number] for binding in self._layout.parameters[position]]
        self._structure.bind({slot.index: copy_of(slot.parameter.data) for slot in slots}, {})
        try:
            self.value = self._structure.layers[position](value)
        finally:
            for slot in slots:
                self._structure.parameters[slot.index].data = torch.empty(0, dtype=slot.dtype)
        return self.value


class _Stub(nn.Module):
    """Stands for a child while the module's own forward runs."""

    def __init__(self, trail: _Trail, position: int) -> None:
        super().__init__()
        self._trail = trail
        self._position = position

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            name = self._trail.names[self._position]
            raise _refusal(f"calls layer {name!r} with {len(args) + len(kwargs)} arguments instead of one")
        return self._trail.step(self._position, args[0])


def check_own_forward(model: Model, layout: ModelLayout, inputs: Any, *, training: bool = True) -> None:
    """Run the source module's forward with a stub for each child, on a sample; in eval() unless for `training`.

    Raises ValueError with the layer's name when a child runs out of order or not at all, or when its input is anything
    but the very object that the child before returned.
    """
    source: nn.Module = model.__dict__["source"]
    while isinstance(source, Model):
        source = source.__dict__["source"]
    structure = Structure(layout, torch.device("cpu"), casts=False)
    structure.bind({}, {index: copy_of(buffer) for index, buffer in enumerate(layout.buffers)})
    trail = _Trail(list(model._modules), structure, layout, inputs)
    children, attributes, flag = dict(source._modules), dict(vars(source)), source.training
    try:
        if not training:
            source.training = False
            for layer in structure.layers:
                layer.eval()
        for position, name in enumerate(children):
            source._modules[name] = _Stub(trail, position)
        with torch.no_grad(), installed(Stream(capture())):
            out = source(inputs)
    except AttributeError as error:
        raise _refusal(f"uses more of its children than calling them ({error})") from error
    finally:
        source._modules.update(children)
        vars(source).clear()
        vars(source).update(attributes)  # a count of its calls, say
        source.training = flag
    if trail.position < len(trail.names):
        raise _refusal(f"does not run layer {trail.names[trail.position]!r} (index {trail.position})")
    if not _is_same(out, trail.value):
        raise _refusal(f"changes the value that layer {trail.names[-1]!r} (index {len(trail.names) - 1}) returned")


def _refusal(what: str) -> ValueError:
    return ValueError(
        f"the model's own forward {what}; the engine runs children one after the other, each on what the one before "
        f"returned: put such operations into layers of their own and pass Model the list of layers"
    )


def _is_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    xs, x_spec = pytree.tree_flatten(a)
    ys, y_spec = pytree.tree_flatten(b)
    pairs = zip(xs, ys, strict=False)
    return x_spec == y_spec and all(x is y or (not isinstance(x, Tensor) and x == y) for x, y in pairs)
