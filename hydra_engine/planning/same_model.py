"""Checks that a module's own `forward` computes what its layers do."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hydra_engine.capture import called_with, carried, saved_hooks, settings, state_of
from hydra_engine.data import (
    RandomState,
    Redirected,
    Stream,
    TaskGenerator,
    capture,
    copy_of,
    identical,
    installed,
    seeded,
)
from hydra_engine.host import LayerFault, ModelLayout, Structure
from hydra_engine.tasks import Model
from partitioners.profile import noted

T = TypeVar("T")
CPU = torch.device("cpu")
# Of the random state that a model's forward and its layers are compared from.
SEED = 9973
REMEDY = "; give the model as an nn.Sequential of its layers"
UNDER_NO_GRAD = (
    "in eval() under torch.no_grad(), as evaluations run; a forward or a loss that differentiates there does so under "
    "torch.enable_grad()"
)


class _Trail:
    """The layers that ran so far, and what the last one returned; a plain nn.Sequential is its layers one by one.

    The own forward never gets hold of a value: it hands on an object that stands for it, and refuses to be looked at.
    """

    def __init__(self, structure: Structure, layout: ModelLayout, value: Any, *, with_graphs: bool) -> None:
        self.names: list[str] = []
        self._with_graphs = with_graphs
        self._slots = {id(place): slot for place, slot in zip(structure.parameters, layout.slots, strict=True)}
        self._value = value
        self.token = _Token(self)
        self.position = 0
        self.is_in_layer = False
        self.raised: Exception | None = None  # the first; the forward may have caught it
        self._around: dict[str, Any] = {}

    def stub(self, name: str, layer: nn.Module) -> nn.Module:
        """Return a module that stands for a layer. Layers run in the order in which this is called."""
        if _is_plain_sequence(layer):  # a forward may run it, or iterate over it, and the one is the other
            named = [(key, each) for key, each in layer._modules.items() if each is not None]
            return nn.Sequential(OrderedDict((key, self.stub(f"{name}.{key}", each)) for key, each in named))
        self.names.append(f"{name} ({type(layer).__name__})")
        # Not the layer itself: what looks for modules finds none.
        return _Stub(self.names[-1], partial(self.step, len(self.names) - 1, layer), self)

    def refused(self, what: str) -> LayerFault:
        """Return what to raise, and note it: `except Exception` in the model's code would hide it."""
        fault = _refusal(what)
        self.raised = self.raised or fault
        return fault

    def run(self, source: nn.Module) -> Any:
        """Run the own forward. Raises what a child raises, and LayerFault where it does more than to call them."""
        try:
            with _Watch(self):
                self._look_around()
                out = source(self.token)
                self._check_around("after its children")
        except Exception as error:
            if self.raised is None:
                raise _refusal(f"uses more than its children's calls ({type(error).__name__}: {error})") from error
        if self.raised is not None:
            raise self.raised
        return out

    def step(self, position: int, layer: nn.Module, token: Any) -> Any:
        name = self.names[position]
        if position != self.position:
            expected = self.names[self.position] if self.position < len(self.names) else "the end"
            raise self.refused(f"runs {name} where {expected} comes next in order")
        if token is not self.token:
            raise self.refused(f"changes the value that enters {name}")
        self.is_in_layer = True
        try:
            self._check_around(f"before {name}")
            with torch.set_grad_enabled(self._with_graphs):
                self._value = pytree.tree_map_only(Tensor, _without_graph, self._run(layer))
            self._look_around()
        except Exception as error:
            self.raised = self.raised or error
            raise
        finally:
            self.is_in_layer = False
        self.position += 1
        self.token = _Token(self)
        return self.token

    def _run(self, layer: nn.Module) -> Any:
        """Run a layer on copies of its weights, one layer's at a time: it may write to them."""
        places = [(place, self._slots[id(place)]) for place in layer.parameters() if id(place) in self._slots]
        for place, slot in places:
            place.data = copy_of(slot.parameter.data.to(place.device))
        try:
            return layer(self._value)
        finally:
            for place, slot in places:
                place.data = torch.empty(0, dtype=slot.dtype, device=place.device)

    def _look_around(self) -> None:
        was, self.is_in_layer = self.is_in_layer, True
        self._around = _surroundings()
        self.is_in_layer = was

    def _check_around(self, where: str) -> None:
        """Raise LayerFault if the own forward has changed what layers find, since the last one ran."""
        before = self._around
        self._look_around()
        changed = next((name for name, value in self._around.items() if value != before[name]), None)
        if changed is not None:
            raise self.refused(f"changes {changed} {where}")


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def _without_graph(tensor: Tensor) -> Tensor:
    """Return a tensor for the next layer, which may differentiate with respect to it, or work in place on it."""
    return tensor.detach().requires_grad_().clone() if tensor.requires_grad else tensor


def _surroundings() -> dict[str, Any]:
    """Return what a layer finds beside its input: a forward's own code may set it around a child, or draw."""
    state = capture()
    return {
        **settings(torch.device("cpu")),
        "autocast of any device": torch._C._is_any_autocast_enabled(),
        "the hooks of saved tensors": saved_hooks(),
        "the mode of gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "the modes of functions": torch._C._len_torch_function_stack(),
        "torch's random numbers": state.torch.numpy().tobytes(),
        "the random numbers of `random`": state.python,
        "the random numbers of `numpy.random`": (state.numpy[1].tobytes(), state.numpy[2:]),
    }


class _Watch(TorchFunctionMode):
    """Refuses functions of torch's that the own forward calls."""

    def __init__(self, trail: _Trail) -> None:
        super().__init__()
        self._trail = trail

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._trail.is_in_layer:
            return func(*args, **(kwargs or {}))
        raise self._trail.refused(f"calls {getattr(func, '__name__', func)} itself")


class _Stub(nn.Module):
    """Stands for a child while the module's own forward runs."""

    def __init__(self, name: str, run: Callable[[Any], Any], trail: _Trail) -> None:
        super().__init__()
        self._own_name, self._run, self._trail = name, run, trail

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            number = len(args) + len(kwargs)
            raise self._trail.refused(f"calls {self._own_name} with {number} arguments instead of one")
        return self._run(args[0])

    def __getattr__(self, name: str) -> Any:
        raise self._trail.refused(f"takes {name} of {self._own_name} instead of calling it")

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to be looked into: parameters() and modules() of the model come here."""
        raise self._trail.refused(f"looks into {self._own_name} instead of calling it")

    def train(self, mode: bool = True) -> Any:
        raise self._trail.refused(f"sets the mode of {self._own_name}")

    def __iter__(self) -> Any:
        raise self._trail.refused(f"runs over the children of {self._own_name} instead of calling it")

    def __len__(self) -> int:
        raise self._trail.refused(f"asks for the number of children of {self._own_name}")

    def __getitem__(self, key: Any) -> Any:
        raise self._trail.refused(f"takes child {key!r} of {self._own_name} instead of calling it")

    def __bool__(self) -> bool:
        return True


class _Token:
    """Stands for a value while the module's own forward runs, which may hand it on and nothing else."""

    def __init__(self, trail: _Trail) -> None:
        object.__setattr__(self, "trail", trail)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Have functions of torch's pass through modes, where `_Watch` is."""
        return NotImplemented


def _looks(name: str) -> Callable[..., Any]:
    def refuse(token: _Token, *args: Any) -> Any:
        what = args[0] if name == "__getattribute__" else name
        raise object.__getattribute__(token, "trail").refused(f"looks at a value between its children ({what})")

    return refuse


# Operators are looked up in the class, past __getattribute__.
_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or"
_OTHERS = """
    getattribute setattr delattr repr str format hash bool len iter next reversed contains getitem setitem delitem call
    enter exit eq ne lt le gt ge neg pos abs invert int float complex index round array
"""
for _each in (*_OTHERS.split(), *(f"{side}{each}" for side in ("", "r", "i") for each in _BINARY.split())):
    setattr(_Token, f"__{_each}__", _looks(f"__{_each}__"))


def _is_plain_sequence(layer: nn.Module) -> bool:
    """Return True if a layer is no more than its children in order, also to who calls them one by one."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    own = ("forward", "__call__", "__iter__", "__len__", "__getitem__")
    plain = all(getattr(type(layer), name) is getattr(nn.Sequential, name, None) for name in own)
    return plain and "forward" not in vars(layer) and not any(hooks)


def check_own_forward(
    model: Model, layout: ModelLayout, inputs: Any, *, training: bool = True, device: torch.device = CPU
) -> None:
    """Run the source module's forward with a stub for each child, on a sample; in eval() unless for `training`.

    device: where the layers run; on meta nothing is computed.

    Raises LayerFault where it does more than to run each child once, in order, on what the child before returned: where
    it looks at a value, calls a function of torch's, sets a mode around a child, draws, or leaves something behind.
    """
    _with_graphs_if_needed(partial(_check_own_forward, model, layout, inputs, training, device), training=training)


def _with_graphs_if_needed(run: Callable[[bool], T], *, training: bool) -> T:
    """Run forwards without autograd's graphs, or with them where a layer differentiates in its forward.

    run: of whether graphs are made. Outside of training there are none, as in a plain evaluation.
    """
    try:
        return run(False)
    except LayerFault:
        raise
    except Exception as error:
        if training:
            return run(True)
        _note_no_grad(error)
        raise


def _note_no_grad(error: Exception) -> None:
    """Add the remedy to an error of what differentiates where there are no graphs."""
    if "does not require grad" in str(error):
        noted(error, UNDER_NO_GRAD)


def _check_own_forward(
    model: Model, layout: ModelLayout, inputs: Any, training: bool, device: torch.device, with_graphs: bool
) -> None:
    source: nn.Module = model.__dict__["source"]
    while isinstance(source, Model):
        source = source.__dict__["source"]
    structure = Structure(layout, device, casts=False)
    structure.bind({}, {index: copy_of(buffer.to(device)) for index, buffer in enumerate(layout.buffers)})
    children, attributes, flag = dict(source._modules), dict(vars(source)), source.training
    held = _containers(vars(module).values() for module in source.modules())  # hooks of children may add to them
    try:
        if not training:
            source.training = False
            for layer in structure.layers:
                layer.eval()
        with torch.set_grad_enabled(training), installed(Stream(capture())):
            # Copies: a layer may work in place on its input, or have it require gradients.
            own = pytree.tree_map_only(
                Tensor, lambda each: (copy_of(each) if _is_plain(each) else each).to(device), inputs
            )
            trail = _Trail(structure, layout, own, with_graphs=with_graphs)
            for name, layer in zip(model._modules, structure.layers, strict=False):  # not the loss
                source._modules[name] = trail.stub(name, layer)
            beside = set(map(id, (*children.values(), *source._modules.values())))
            before = state_of(source, beside)
            out = trail.run(source)
            after = state_of(source, beside)
    finally:
        source._modules.update(children)
        vars(source).clear()
        vars(source).update(attributes)  # a count of its calls, say
        _restore(held)
        source.training = flag
    if trail.position < len(trail.names):
        raise _refusal(f"does not run {trail.names[trail.position]}")
    if out is not trail.token:
        last = trail.names[-1] if trail.names else "its last layer"
        raise _refusal(f"changes the value that {last} returned")
    if before != after:
        changed = next(each for each in (*after, *before) if before.get(each) != after.get(each))
        raise _refusal(f"changes {changed}")


def check_converted(
    model: Model, inputs: Any, *, training: bool = True, loss: Callable[[Any], Any] | None = None
) -> set[str]:
    """Run a converted module's own forward and its layers on a sample, from one random state, and compare their bits.

    Both run on the model's own weights, of which no copy is made; buffers, attributes and modes are put back. A model
    on meta has no bits. loss: of what the forward returns; it may read what the forward has left in the model. Returns
    which process-wide generators were drawn from meanwhile, by another thread or, beside torch's, the forward. Raises
    LayerFault with the first output that differs, or if the layers draw other random numbers.
    """
    source = model.source
    if any(each.device.type == "meta" for each in (*source.parameters(), *source.buffers())):
        return set()
    mode = "training" if training else "evaluation"
    # Not the state of now, in which a forward that seeds the generators may have left them as it was recorded.
    state = RandomState(seeded(SEED), random.Random(SEED).getstate(), np.random.RandomState(SEED).get_state())

    def run(forward: Callable[..., Any], with_graph: bool) -> tuple[list[Any], RandomState]:
        args, kwargs = called_with(pytree.tree_map_only(Tensor, copy_of, inputs))
        with (
            _put_back([source, *model._modules.values()]) as attributes,
            torch.set_grad_enabled(with_graph),
            installed(Stream(state)),
            Redirected(own_draws := TaskGenerator(state.torch)),  # another thread may draw, too
        ):
            found = forward(args, kwargs)
            results = [*pytree.tree_leaves(found), *(() if loss is None else pytree.tree_leaves(loss(found)))]
            drawn = capture()._replace(torch=own_draws.state)
            if (
                loss is not None
                and forward is own
                and (read := _read_of(source, attributes, partial(loss, found), state))
            ):
                raise LayerFault(
                    f"loss_fn reads what the model's own forward leaves in an attribute, {' and '.join(read)}, and "
                    f"layers leave it in copies of the model: return that too, and let loss_fn take it from the output"
                )
            return results, drawn

    def own(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source.train(training if not training else source.training)
        return carried(source(*args, **kwargs))

    def layers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = kwargs or (args if isinstance(inputs, tuple) else args[0])
        for layer in model:
            if not training:
                layer.eval()
            value = layer(value)
        return value

    (expected, drawn), (found, redrawn) = _with_graphs_if_needed(
        lambda with_graph: (run(own, with_graph), run(layers, with_graph)), training=training
    )
    if not torch.equal(drawn.torch, redrawn.torch):
        raise LayerFault(
            f"the layers that the model's own forward was made into draw other random numbers than the forward "
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
    return drawn.moved_outside_torch(state)


def _containers(values: Iterable[Iterable[Any]]) -> list[tuple[Any, Any]]:
    """Return the lists, dicts and sets among values, each with a copy of what is in it."""
    return [(each, copy.copy(each)) for among in values for each in among if isinstance(each, (dict, list, set))]


def _restore(held: Iterable[tuple[Any, Any]]) -> None:
    for value, entries in held:
        value.clear()
        (value.extend if isinstance(value, list) else value.update)(entries)


def _read_of(
    source: nn.Module,
    attributes: Sequence[tuple[nn.Module, Mapping[str, Any]]],
    loss: Callable[[], Any],
    state: RandomState,
) -> list[str]:
    """Return which attributes that a forward has just set decide a loss: it is another one, or fails, without them.

    attributes: of the modules before the forward.
    """
    names = {id(module): path for path, module in source.named_modules()}
    changed = [
        (module, name, before)
        for module, before in attributes
        for name, value in vars(module).items()
        if id(module) in names and name != "training" and value is not before.get(name, _Token)
    ]

    def told(without: Sequence[tuple[nn.Module, str, Mapping[str, Any]]]) -> str | None:
        now = [(module, name, vars(module)[name]) for module, name, _ in without]
        try:
            for module, name, before in without:
                vars(module).pop(name)
                vars(module).update({name: before[name]} if name in before else {})
            with torch.no_grad(), installed(Stream(state)), Redirected(TaskGenerator(state.torch)):
                return repr(pytree.tree_map_only(Tensor, Tensor.tolist, loss()))
        except Exception:
            return None
        finally:
            for module, name, value in now:
                vars(module)[name] = value

    # One that differs from call to call anyway tells nothing.
    if not changed or (expected := told([])) == told(changed) or told([]) != expected:
        return []
    read = [each for each in changed if told([each]) != expected]
    found = [f"{name} of {names[id(each)] or 'the model'} ({type(each).__name__})" for each, name, _ in read or changed]
    return list(dict.fromkeys(found))  # layers hold some of the modules, too


@contextmanager
def _put_back(roots: Iterable[Any]) -> Iterator[list[tuple[nn.Module, dict[str, Any]]]]:
    """Put back buffers, attributes and modes of modules, and what their containers hold. Gives the attributes."""
    modules = [module for root in roots if isinstance(root, nn.Module) for module in root.modules()]
    attributes = [(module, dict(vars(module))) for module in modules]
    # Hooks, buffers, records: a forward that is the model's first may add some.
    held = _containers(named.values() for _, named in attributes)
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers(recurse=False)]
    try:
        yield attributes
    finally:
        for module, before in attributes:
            vars(module).clear()
            vars(module).update(before)
        _restore(held)
        with torch.no_grad():
            for buffer, content in buffers:
                buffer.copy_(content)


def plain_error(
    model: nn.Module, loss_fns: Sequence[Callable[..., Any]], inputs: Any, target: Any, *, training: bool
) -> Exception | None:
    """Return what a plain step raises on a batch, or None; nothing of it is left.

    loss_fns: of what the model returns and the target; `training`: the first one's gradients are computed as well.
    """
    parameters = list(model.parameters())
    before = [(each.grad, each.detach().clone()) for each in parameters]
    stream = Stream(RandomState(seeded(SEED), random.Random(SEED).getstate(), np.random.RandomState(SEED).get_state()))
    try:
        with _put_back([model, *loss_fns]), torch.set_grad_enabled(training), installed(stream):
            if not training:
                model.eval()
            inputs, target = pytree.tree_map_only(Tensor, copy_of, (inputs, target))
            output = model(inputs)
            found = [loss_fn(output, target) for loss_fn in loss_fns]
            if training:
                torch.autograd.grad(found[0], [each for each in parameters if each.requires_grad], allow_unused=True)
    except Exception as error:
        error.__traceback__ = None  # which would keep the graph
        if not training:
            _note_no_grad(error)
        return error
    finally:
        with torch.no_grad():
            for parameter, (gradient, content) in zip(parameters, before, strict=True):
                parameter.grad = gradient
                if not identical(parameter.detach(), content):
                    parameter.copy_(content)
    return None


def _difference(a: Any, b: Any) -> str:
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape:
        return f"by up to {(a.double() - b.double()).abs().max().item():.3g}"
    return f"{getattr(a, 'shape', a)} and {getattr(b, 'shape', b)}"


def _refusal(what: str) -> LayerFault:
    return LayerFault(
        f"the model's own forward {what}; the engine runs children one after the other, each on what the one before "
        f"returned: put such operations into layers of their own and pass Model the list of layers"
    )
