"""Measures what each layer of a model costs, on copies, one layer at a time."""

import contextlib
import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from partitioners.boundary import Boundary
from partitioners.cost import LayerCost
from partitioners.measure import Work, measure


def profile(
    model: nn.Module | Iterable[nn.Module],
    inputs: Any,
    target: Any,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    *,
    device: torch.device | str | None = None,
    precision: str = "float32",
) -> list[LayerCost]:
    """Runs every layer forward and backward twice and returns its costs; the last layer's include the loss.

    model: an ``nn.Sequential``, a module whose children run in order, or the layers themselves.
    inputs: what the first layer takes as its one argument: a tensor, or a tuple, list or dict of them.
    device, precision: only the CPU (None) and "float32" so far.

    Leaves gradients, buffers, generators, flags and grad mode as they were. Parameters are shared, not copied, so a
    layer that changes its own parameters in forward is refused. An exception in a layer comes out as it is, with
    a note that names the layer.
    """
    _check_place(device, precision)
    layers = _named_layers(model)
    shares = _sharing([layer for _, layer in layers])
    costs: list[LayerCost] = []
    memo: dict[int, Any] = {}  # one for all layers: what they share, their copies share
    with _generators_kept(), torch.enable_grad():
        boundary = Boundary(inputs).detached()
        for index, (name, layer) in enumerate(layers):
            is_last = index == len(layers) - 1
            with _naming(index, name):
                loss = _structure_copy(loss_fn, memo) if is_last else None
                work = Work(_structure_copy(layer, memo), loss, target)
                fields, boundary = measure(work, boundary)
            costs.append(LayerCost(index=index, name=name, shares_with=shares[index], **fields))
    return costs


def _structure_copy(part: Any, memo: dict[int, Any]) -> Any:
    """A deep copy that shares the memory of every parameter and owns its buffers; a plain loss function is itself."""
    if not isinstance(part, nn.Module):
        return part
    for module in part.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if not isinstance(tensor, torch.Tensor) or id(tensor) in memo:
                continue
            if nn.parameter.is_lazy(tensor):
                raise ValueError("parameter: a lazy layer's, without a shape; run one batch through the model first")
            if isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
            elif not tensor.requires_grad or not tensor.is_leaf:
                # Also what is no leaf, which deepcopy refuses: the weight that torch's weight_norm recomputes.
                memo[id(tensor)] = tensor.detach().clone()
    return copy.deepcopy(part, memo)


def _named_layers(model: nn.Module | Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Layers in order, by their key in the model, or by their class where that is a mere number."""
    children: Iterable[tuple[str, Any]]
    # Not named_children(): that leaves out a layer's second place in the model.
    children = model._modules.items() if isinstance(model, nn.Module) else ((str(i), x) for i, x in enumerate(model))
    layers = []
    for key, layer in children:
        if not isinstance(layer, nn.Module):
            raise TypeError(f"model: layer {key} is a {type(layer).__name__}, limit: nn.Module; wrap it in a module")
        layers.append((type(layer).__name__ if key.isdigit() else key, layer))
    if not layers:
        raise ValueError("model: 0 layers, limit: at least 1; pass an nn.Sequential or a list of layers")
    return layers


def _sharing(layers: Sequence[nn.Module]) -> list[tuple[int, ...]]:
    """For each layer, the other layers that hold one of its parameters."""
    held = [{id(parameter) for parameter in layer.parameters()} for layer in layers]
    return [tuple(j for j, theirs in enumerate(held) if j != i and mine & theirs) for i, mine in enumerate(held)]


def _check_place(device: torch.device | str | None, precision: str) -> None:
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(f"device: {str(device)!r}, limit: the CPU so far; leave it out")
    if precision != "float32":
        raise ValueError(f"precision: {precision!r}, limit: 'float32' so far; leave it out")


@contextlib.contextmanager
def _naming(index: int, name: str) -> Iterator[None]:
    """Adds the layer to an exception's text and lets it go on as it is."""
    try:
        yield
    except Exception as error:
        note = f"in layer {index} ({name}), while it was profiled"
        if hasattr(error, "add_note"):
            error.add_note(note)
        elif error.args and isinstance(error.args[0], str):  # Python 3.10
            error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
        raise


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    of_random, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(of_random)
        np.random.set_state(of_numpy)
