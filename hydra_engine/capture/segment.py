"""The layers that a module with a forward of its own is made of."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hydra_engine.capture.programs import Programs
from hydra_engine.capture.tape import is_leaf
from partitioners.reach import Shared


@dataclass(eq=False)
class _Place(Shared):
    """The place of a layer in its model: equal layers differ in nothing else."""

    programs: Programs
    index: int
    last: int
    name: str  # as `names_of_layers` has it

    def __reduce__(self) -> Any:
        # Code and locks are not saved: the model is recorded anew.
        return _Place, (None, self.index, self.last, self.name)


class Holder(nn.Module):
    """Holds parameters, buffers and modules by the names that they have in the model."""

    def add(self, model: nn.Module, name: str) -> None:
        """Take in what the model has by a name."""
        path, _, last = name.rpartition(".")
        owner, holder = model, self
        for each in path.split(".") if path else ():
            owner = owner._modules[each]  # type: ignore[assignment]
            held = holder._modules.get(each)
            if held is None:
                held = holder._modules[each] = Holder()
                held.training = owner.training
            if not isinstance(held, Holder):
                return  # it is held as a whole
            holder = held
        for kind in ("_modules", "_parameters", "_buffers"):
            if last in getattr(owner, kind):
                getattr(holder, kind)[last] = getattr(owner, kind)[last]
                if kind == "_buffers" and last in owner._non_persistent_buffers_set:
                    holder._non_persistent_buffers_set.add(last)


class Segment(Holder):
    """One of the layers: it runs what the model's forward does between two cuts.

    The first takes the inputs of the model's forward. Each passes on the name of the program that runs and the values
    that the layers after it need; what crosses several layers is the same tensor in all of them. The last returns what
    the model's forward does.
    """

    def __init__(self, programs: Programs, index: int, last: int, text: str) -> None:
        super().__init__()
        self.place = _Place(programs, index, last, programs.cuts.names[index])
        self.text = text  # what runs: of equal layers it is equal
        self.mode: bool | None = None  # as the model's modules are, until train() or eval() of this layer is called
        if index == 0:
            self.training = programs.model.training

    def train(self, mode: bool = True) -> Segment:
        """Set the mode of this layer and of all that it holds."""
        super().train(mode)
        self.mode = mode
        return self

    def forward(self, state: Any) -> Any:
        place = self.place
        if place.index == 0:
            program, values = place.programs.find(state, place.programs.flags(self.mode), place.programs.narrow(self))
        else:
            program, values = place.programs.by_name[state[0]], state[1:]
        here = next((each.device for each in values if isinstance(each, Tensor)), torch.device("cpu"))
        found = program.pieces[place.index].run(self, here, values)
        return program.build(found) if place.index == place.last else (program.name, *found)

    def extra_repr(self) -> str:
        return self.place.name


def layers_of(model: nn.Module, inputs: Any, *, evaluates: bool = False, whole: Collection[str] = ()) -> list[Segment]:
    """Return the layers that a module with a forward of its own is made of, which share its parameters.

    inputs: what its forward takes: a tensor, a tuple of positional or a dict of keyword arguments. Its tensors may lie
    on meta, and so may the model's. evaluates: the layers are for `eval()`, whatever the mode of the model is. whole:
    paths of modules that are not cut. Raises ValueError with the line of the model that stands in the way, TypeError
    for a model of torch.jit.
    """
    programs = Programs(model, whole)
    flags = programs.flags(False if evaluates else None)
    other = programs.flags(not flags[0])
    # Whatever the forward raises in the other mode (a detector without targets), it raises where that is asked for.
    with contextlib.suppress(Exception):
        programs.foresee(inputs, other)
    program, _ = programs.find(inputs, flags)
    with contextlib.suppress(Exception):
        programs.find(inputs, other)
    last = len(program.pieces) - 1
    layers = [Segment(programs, k, last, piece.text) for k, piece in enumerate(program.pieces)]
    for layer, names in zip(layers, programs.cuts.holdings, strict=True):
        for name in sorted(names, key=lambda each: (each.count("."), each)):  # in every process, for plans on disk
            layer.add(model, name)
    for k, name in _unused(model, layers, programs.cuts.holdings):
        layers[k].add(model, name)
        programs.cuts.holdings[k].add(name)
    programs.cuts.is_settled = True
    return layers


def _unused(
    model: nn.Module, layers: Sequence[nn.Module], holdings: Sequence[Collection[str]]
) -> list[tuple[int, str]]:
    """Return the modules, parameters and buffers that no forward has used so far, each with a layer for it.

    It is the last one that has something of the same parent: the heads of several tasks are in one layer, and so are
    branches that batches choose between. So a batch that uses them finds them where it uses those.
    """
    held = {id(each) for layer in layers for each in (*layer.parameters(), *layer.buffers())}
    names = [(name, k) for k, each in enumerate(holdings) for name in each]
    found: list[tuple[int, str]] = []

    def look(path: str, module: nn.Module, place: int) -> None:
        if any(path == name or path.startswith(f"{name}.") for name, _ in names):
            return
        inside = [k for name, k in names if name.startswith(f"{path}.") or not path]
        place = max(inside, default=place)
        tensors = [id(each) for each in (*module.parameters(), *module.buffers())]
        if path and not inside and held.isdisjoint(tensors) and (tensors or is_leaf(module)):
            held.update(tensors)
            found.append((place, path))
            return
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) not in held:
                held.add(id(tensor))
                found.append((place, f"{path}.{name}".lstrip(".")))
        for name, child in module._modules.items():
            if child is not None:
                look(f"{path}.{name}".lstrip("."), child, place)

    look("", model, len(layers) - 1)
    return found


def programs_of(layers: Iterable[nn.Module | None]) -> Programs | None:
    """Return what was recorded of the model that layers are of; None: nothing was."""
    return next((layer.place.programs for layer in layers if isinstance(layer, Segment)), None)


def layers_for(layers: Iterable[nn.Module | None], model: nn.Module) -> bool:
    """Tell copies of a model's layers which copy of the model they are of. What was recorded is theirs as well.

    Returns False where nothing is: for layers that were saved, and for none.
    """
    segments = [layer for layer in layers if isinstance(layer, Segment)]
    if not segments or segments[0].place.programs is None:
        return False
    programs = segments[0].place.programs.of(model)
    for segment in segments:
        segment.place = replace(segment.place, programs=programs)
    return True
