"""Checks that a module's own `forward` computes what its layers do."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hydra_engine.capture import called_with, without_caches
from hydra_engine.data import RandomState, Stream, capture, copy_of, identical, installed, seeded
from hydra_engine.host import LayerFault, ModelLayout, Structure
from hydra_engine.tasks import Model

# Of the random state that a model's forward and its layers are compared from.
SEED = 9973
REMEDY = "; give the model as an nn.Sequential of its layers"


class _Trail:
    """The layers that ran so far, and what the last one returned; a plain nn.Sequential is its layers one by one."""

    def __init__(self, structure: Structure, layout: ModelLayout, value: Any) -> None:
        self.names: list[str] = []
        self._slots = {id(place): slot for place, slot in zip(structure.parameters, layout.slots, strict=True)}
        self.value = value
        self.position = 0

    def stub(self, name: str, layer: nn.Module) -> nn.Module:
        """Return a module that stands for a layer. Layers run in the order in which this is called."""
        if _is_plain_sequence(layer):  # a forward may run it, or iterate over it, and the one is the other
            named = [(key, each) for key, each in layer._modules.items() if each is not None]
            return nn.Sequential(OrderedDict((key, self.stub(f"{name}.{key}", each)) for key, each in named))
        self.names.append(name)
        # Not the layer itself: what looks for modules finds none.
        return _Stub(name, partial(self.step, len(self.names) - 1, layer))

    def step(self, position: int, layer: nn.Module, value: Any) -> Any:
        name = self.names[position]
        if position != self.position:
            expected = self.names[self.position] if self.position < len(self.names) else "the end"
            raise _refusal(f"runs layer {name!r} (index {position}) where {expected!r} comes next in order")
        if not _is_same(value, self.value):
            raise _refusal(f"changes the value that enters layer {name!r} (index {position})")
        self.position += 1
        # On copies of its weights, one layer's at a time: it may write to them.
        places = [(place, self._slots[id(place)]) for place in layer.parameters() if id(place) in self._slots]
        for place, slot in places:
            place.data = copy_of(slot.parameter.data)
        try:
            self.value = layer(value)
        finally:
            for place, slot in places:
                place.data = torch.empty(0, dtype=slot.dtype)
        return self.value


class _Stub(nn.Module):
    """Stands for a child while the module's own forward runs."""

    def __init__(self, name: str, run: Callable[[Any], Any]) -> None:
        super().__init__()
        self._own_name, self._run = name, run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            raise _refusal(f"calls layer {self._own_name!r} with {len(args) + len(kwargs)} arguments instead of one")
        return self._run(args[0])

    def __iter__(self) -> Any:
        raise _refusal(f"runs over the children of layer {self._own_name!r} instead of calling it")

    def __len__(self) -> int:
        raise _refusal(f"asks for the number of children of layer {self._own_name!r}")

    def __getitem__(self, key: Any) -> Any:
        raise _refusal(f"takes child {key!r} of layer {self._own_name!r} instead of calling it")

    def __bool__(self) -> bool:
        return True


def _is_plain_sequence(layer: nn.Module) -> bool:
    """Return True if a layer is no more than its children in order, also to who calls them one by one."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    own = ("forward", "__call__", "__iter__", "__len__", "__getitem__")
    plain = all(getattr(type(layer), name) is getattr(nn.Sequential, name, None) for name in own)
    return plain and "forward" not in vars(layer) and not any(hooks)


def check_own_forward(model: Model, layout: ModelLayout, inputs: Any, *, training: bool = True) -> None:
    """Run the source module's forward with a stub for each child, on a sample; in eval() unless for `training`.

    Raises LayerFault with the layer's name when a child runs out of order or not at all, or when its input is anything
    but the very object that the child before returned.
    """
    source: nn.Module = model.__dict__["source"]
    while isinstance(source, Model):
        source = source.__dict__["source"]
    structure = Structure(layout, torch.device("cpu"), casts=False)
    structure.bind({}, {index: copy_of(buffer) for index, buffer in enumerate(layout.buffers)})
    trail = _Trail(structure, layout, inputs)
    children, attributes, flag = dict(source._modules), dict(vars(source)), source.training
    try:
        if not training:
            source.training = False
            for layer in structure.layers:
                layer.eval()
        for name, layer in zip(model._modules, structure.layers, strict=False):  # not the loss
            source._modules[name] = trail.stub(name, layer)
        with torch.no_grad(), installed(Stream(capture())):
            out = source(inputs)
    except (AttributeError, StopIteration) as error:
        raise _refusal(f"uses more of its children than calling them ({type(error).__name__}: {error})") from error
    finally:
        source._modules.update(children)
        vars(source).clear()
        vars(source).update(attributes)  # a count of its calls, say
        source.training = flag
    if trail.position < len(trail.names):
        raise _refusal(f"does not run layer {trail.names[trail.position]!r} (index {trail.position})")
    if not _is_same(out, trail.value):
        last = f"layer {trail.names[-1]!r} (index {len(trail.names) - 1})" if trail.names else "its last layer"
        raise _refusal(f"changes the value that {last} returned")


def check_converted(
    model: Model, inputs: Any, *, training: bool = True, loss: Callable[[Any], Any] | None = None
) -> None:
    """Run a converted module's own forward and its layers on a sample, from one random state, and compare their bits.

    Both run on the model's own weights, of which no copy is made; buffers, attributes and modes are put back. A model
    on meta has no bits. loss: of what the forward returns; it may read what the forward has left in the model. Raises
    LayerFault with the first output that differs, or if the layers draw other random numbers.
    """
    source = model.source
    if any(each.device.type == "meta" for each in (*source.parameters(), *source.buffers())):
        return
    modules = [*source.modules(), *(module for layer in model._modules.values() if layer for module in layer.modules())]
    attributes = [(module, dict(vars(module))) for module in modules]
    # Hooks, buffers, records: a forward that is the model's first may add some.
    values = (value for _, named in attributes for value in named.values())
    held = [(value, copy.copy(value)) for value in values if isinstance(value, (dict, list, set))]
    buffers = [(buffer, buffer.clone()) for buffer in source.buffers()]
    mode = "training" if training else "evaluation"
    # Not the state of now, in which a forward that seeds the generators may have left them as it was recorded.
    state = RandomState(seeded(SEED), random.Random(SEED).getstate(), np.random.RandomState(SEED).get_state())

    def run(forward: Callable[..., Any]) -> tuple[list[Any], RandomState]:
        args, kwargs = called_with(pytree.tree_map_only(Tensor, copy_of, inputs))
        stream = Stream(state)
        try:
            with torch.no_grad(), installed(stream):
                found = forward(args, kwargs)
                results = pytree.tree_leaves(found)
                return results if loss is None else [*results, *pytree.tree_leaves(loss(found))], capture()
        finally:
            for module, before in attributes:
                vars(module).clear()
                vars(module).update(before)
            for value, entries in held:
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(entries)
            for buffer, before in buffers:
                buffer.copy_(before)

    def own(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source.train(training if not training else source.training)
        return without_caches(source(*args, **kwargs))

    def layers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = kwargs or (args if isinstance(inputs, tuple) else args[0])
        for layer in model:
            if not training:
                layer.eval()
            value = layer(value)
        return value

    (expected, drawn), (found, redrawn) = run(own), run(layers)
    # A forward may be recorded at any time, beside others that draw from those.
    if (outside := drawn.moved_outside_torch(state)) or not drawn.same_as(redrawn):
        raise LayerFault(
            f"the model's own forward draws random numbers from {' and '.join(sorted(outside))} ({mode} mode), limit: "
            f"torch's functions"
            if outside
            else f"the layers that the model's own forward was made into draw other random numbers than the forward "
            f"itself ({mode} mode); let it draw with torch's functions from torch's generator, and not seed that"
        )
    for k, (a, b) in enumerate(zip(expected, found, strict=False)):
        is_same = identical(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        if not is_same:
            is_loss = loss is not None and k == len(expected) - 1
            what = "lead to another loss" if is_loss else f"give another output {k}"
            raise LayerFault(
                f"the layers that the model's own forward was made into {what} than the forward "
                f"itself ({mode} mode, {_difference(a, b)}): it does what its recorded calls do not show"
                + (", such as to leave in an attribute what loss_fn reads; return that too" if is_loss else REMEDY)
            )
    if len(expected) != len(found):
        raise LayerFault(
            f"the layers that the model's own forward was made into give {len(found)} outputs, and the forward itself "
            f"{len(expected)}{REMEDY}"
        )


def _difference(a: Any, b: Any) -> str:
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape:
        return f"by up to {(a.double() - b.double()).abs().max().item():.3g}"
    return f"{getattr(a, 'shape', a)} and {getattr(b, 'shape', b)}"


def _refusal(what: str) -> LayerFault:
    return LayerFault(
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
