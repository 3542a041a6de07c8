"""A model as a sequence of layers."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MethodType
from typing import Any, cast

from torch import Tensor, nn

from hydra_engine.capture import Segment, Uncut, called_with, carried, layers_for, layers_of, programs_of
from partitioners.profile import NamesLayers

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# In names of classes whose forward is another one in eval(), with the attribute that may switch that off.
_BY_MODE = {
    "Dropout": "p",
    "DropPath": "drop_prob",
    "StochasticDepth": "p",
    "RReLU": "",
    "BatchNorm": "track_running_stats",
    "InstanceNorm": "track_running_stats",
}


class OneLayer(nn.Module):
    """A module with a forward of its own as one callable of a batch's inputs."""

    def __init__(self, module: nn.Module, *, spreads: bool, is_plain: bool = False) -> None:
        """`spreads`: a tuple gives positional arguments, a dict those by name; is_plain: it returns any object."""
        super().__init__()
        self.module, self.spreads, self.is_plain, self.training = module, spreads, is_plain, module.training

    def forward(self, inputs: Any) -> Any:
        args, kwargs = called_with(inputs) if self.spreads else ((inputs,), {})
        found = self.module(*args, **kwargs)
        return found if self.is_plain else carried(found)


class Model(nn.Sequential, NamesLayers):
    """An `nn.Sequential` that shares the layers of `x`.

    x: an `nn.Sequential`, a list of layers, or any module. A module with a forward of its own becomes layers by itself:
    its forward is run once without computing, and cut between the calls that it makes. That it gives the same bits is
    checked before it trains.

    example: what the module's forward takes, as batches then give it: a tensor, a tuple of positional or a dict of
    keyword arguments. Its values matter only where the forward decides something by them. Without an example, the
    first batch of the task serves.

    whole: names of modules that become no more than one layer each, as in `named_modules()`: of one, say, that uses its
    children in another order for other batches. "" names the module itself.

    The parameters are the module's own, with the names that they have there, also in `state_dict()`. Raises ValueError
    with the line of the forward that stands in the way of making layers, and TypeError for what is no module.
    """

    source: Any  # the module that the layers come from; None where they came as they are
    is_converted: bool  # the layers were made of a forward of the module's own
    is_by_hand: bool  # they hold the module's own modules, and do together what it does
    is_pending: bool  # it has no layers yet
    whole: tuple[str, ...]  # modules that are not cut
    one_layer_because: str  # why all of it is one layer; "": it is not, or was given so

    def __init__(
        self,
        x: nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module],
        example: Any = None,
        *,
        whole: Iterable[str] = (),
    ) -> None:
        super().__init__()
        x = uncompiled(x)
        source = x if isinstance(x, nn.Module) else None
        self._set(source=source, whole=tuple(whole), one_layer_because="")
        self._set(is_converted=False, is_by_hand=False, is_pending=False)
        if isinstance(x, Model) and x.has_names_of_source:
            if self.whole and self.whole != x.whole:
                raise ValueError(
                    f"whole: {list(self.whole)}, expected none for a Model; give the module it was made of"
                )
            x.check_hooks()
            self._modules.update(x._modules)
            names = ("source", "is_converted", "is_by_hand", "is_pending", "one_layer_because", "whole")
            self._set(**{name: getattr(x, name) for name in names})
            return
        self.check_hooks()
        self._check_whole()
        if not isinstance(x, nn.Module) or not _has_own_forward(x):
            self._modules.update(_layers_in(x))
            return
        self._set(is_converted=True, is_pending=True)
        if "" in self.whole:
            self.become_one_layer("")
        elif example is not None:
            self.convert(example)

    @classmethod
    def by_hand(cls, source: nn.Module, layers: Iterable[nn.Module]) -> Model:
        """Return layers that hold a module's own modules and do together what it does: names stay the module's."""
        switch_off_checkpointing(source)
        model = cls(layers)
        model._set(source=source, is_by_hand=True)
        return model

    @property
    def has_names_of_source(self) -> bool:
        """True if parameters are known by the names that they have in the module that the layers come from.

        Not of layers made by hand to which others were added since.
        """
        if not self.is_by_hand:
            return self.is_converted
        known = {id(tensor) for tensor in (*self.source.parameters(), *self.source.buffers())}
        named = (*super().named_parameters(), *super().named_buffers())
        return all(id(tensor) in known for _, tensor in named)

    def convert(self, inputs: Any, *, evaluates: bool = False, may_be_one: bool = False) -> Uncut | None:
        """Make layers of the module's own forward, by an example of its inputs. Raises as the class does.

        evaluates: they are for `eval()` only, so far: what the forward raises in the module's own mode is no matter.
        may_be_one: where the forward cannot be cut, all of it is one layer, and this returns what was in the way.
        """
        self.check_hooks()
        switch_off_checkpointing(self.source)
        self._set(is_converted=True)
        try:
            layers = layers_of(self.source, inputs, evaluates=evaluates, whole=self.whole)
        except Uncut as error:
            if not may_be_one:
                raise error.__cause__ or error from None
            self.become_one_layer(
                f"the model ({type(self.source).__name__}) is one layer, which has to fit a device, since its own "
                f"forward cannot be cut: {error.why}; for more layers, put that part into a module of its own"
            )
            return error
        self._modules.clear()
        self._modules.update((str(k), layer) for k, layer in enumerate(layers))
        self._set(is_pending=False)
        return None

    def _check_whole(self) -> None:
        """Raise ValueError for names in `whole` of what is not a module that a forward of the model's own calls."""
        has_own = self.source is not None and _has_own_forward(self.source)
        known = [name for name, each in self.source.named_modules() if _can_be_called(each)] if has_own else []
        for name in self.whole:
            if name not in known:
                named = f"a module with a forward, as in named_modules() ({', '.join(known[1:7])}, ...)"
                limit = named if has_own else "none where layers are given, which are whole"
                raise ValueError(f"whole: {name!r}, expected {limit}")

    @property
    def as_plain(self) -> nn.Module:
        """All of it as one module, which runs as in a plain loop."""
        found = next(iter(self._modules.values()), None)
        if isinstance(found, OneLayer):
            return OneLayer(self.source, spreads=found.spreads, is_plain=True)
        if self.is_converted:
            return OneLayer(self.source, spreads=True, is_plain=True)
        return self

    def become_one_layer(self, because: str) -> Callable[[], None]:
        """Hold the module that the layers were made of as the only one. Return a function that undoes it."""
        names = ("is_converted", "is_by_hand", "is_pending", "one_layer_because")
        before, flags = dict(self._modules), {name: getattr(self, name) for name in names}

        def undo() -> None:
            self._modules.clear()
            self._modules.update(before)
            self._set(**flags)

        layer = OneLayer(self.source, spreads=self.is_converted)
        self._modules.clear()
        self._modules[type(self.source).__name__] = layer
        self._set(is_converted=False, is_by_hand=True, is_pending=False, one_layer_because=because)
        return undo

    @property
    def is_outdated(self) -> bool:
        """True if layers were made of a forward that may read what was changed since: an attribute, say."""
        programs = programs_of(self._modules.values())
        return self.is_converted and not self.is_pending and not (programs is not None and programs.are_of_now())

    def record_anew(self) -> None:
        """Have the forward recorded again, if what it may read was changed."""
        if (programs := programs_of(self._modules.values())) is not None:
            programs.record_anew()

    @property
    def kept_message(self) -> str:
        """Says that most of the model is one layer, and which line made it so; "": it is not."""
        programs = programs_of(self._modules.values())
        return "" if programs is None else programs.kept_message

    def shown(self, path: str) -> str:
        """Return a layer, a module or an attribute in one, as the user knows it: a module with its class.

        path: the layer's key here, and where in the layer. Names are those of the module that the layers come from. A
        layer that holds several of its modules, and is none of them: "blocks.1 to blocks.3". What is in no layer stays
        as it is.
        """
        key, _, inner = path.partition(".")
        layer: Any = self._modules.get(key)
        if layer is None:  # the loss, a metric
            return path
        if isinstance(layer, OneLayer):
            within = inner.partition(".")[2]
            return _shown(self.source, within) if within else type(self.source).__name__
        if isinstance(layer, Segment):
            return _shown(self.source, inner) if inner else layer.place.name
        if self.source is None or self.source._modules.get(key) is layer:
            return _shown(self, path)
        names = {id(module): name for name, module in self.source.named_modules() if name}
        parts = inner.split(".") if inner else []
        for k, module in reversed([*enumerate(_along(layer, parts))]):
            if id(module) in names:
                return _shown(self.source, ".".join((names[id(module)], *parts[k:])))
        held = [] if inner else [names[id(module)] for module in layer.children() if id(module) in names]
        if len(held) == 1:
            return _shown(self.source, held[0])
        return f"{held[0]} to {held[-1]}" if held else _shown(self, path)

    def check_hooks(self) -> None:
        """Raise ValueError for hooks on the model as a whole, or on the module that it comes from."""
        model: Any = self
        while isinstance(model, nn.Module):
            if any(getattr(model, kind) for kind in _HOOKS):
                raise ValueError(
                    f"the model ({type(model).__name__}) has hooks of its own, which running its layers would not "
                    f"call; register them on its layers"
                )
            model = model.source if isinstance(model, Model) else None

    def forward(self, input: Any) -> Any:
        """Run the layers; those of a module that is not converted yet are made by this input."""
        if self.is_pending:
            self.convert(input)
        return super().forward(input)  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy, or what was saved: of a converted module, which then is converted by its first inputs."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.is_converted and not layers_for(self._modules.values(), self.source):
            self._modules.clear()
            self._set(is_converted=True, is_pending=True)

    def _set(self, **values: Any) -> None:
        # Not as attributes of a module: the source must not appear in state_dict() or children(), and the flags would
        # be compared with those of the copies that devices have.
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def train(self, mode: bool = True) -> Model:
        """Set the mode of all layers, and of the module that they were made of."""
        if self.has_names_of_source:
            self.source.train(mode)
        if self.is_converted:
            self.training = mode
        else:
            super().train(mode)
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by the names and in the order of the module that the layers come from."""
        own = super().named_parameters
        if not self.has_names_of_source:
            return own(prefix, recurse, remove_duplicate)
        return self._held(self.source.named_parameters(prefix, recurse, remove_duplicate), own)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers by the names and in the order of the module that the layers come from."""
        own = super().named_buffers
        if not self.has_names_of_source:
            return own(prefix, recurse, remove_duplicate)
        return self._held(self.source.named_buffers(prefix, recurse, remove_duplicate), own)

    def _held(self, named: Iterator[tuple[str, Any]], own: Callable[[], Iterator[Any]]) -> Iterator[tuple[str, Any]]:
        """Leave out what no layer that was made by hand holds, such as a pooler whose output nobody reads."""
        if self.is_converted:
            return named
        held = {id(tensor) for _, tensor in own()}
        return (each for each in named if id(each[1]) in held)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # overloaded there
        """Return the weights, by their names in the module that the layers come from."""
        own = self.source.state_dict if self.has_names_of_source else super().state_dict
        return own(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Take in weights, by their names in the module that the layers come from."""
        own = self.source.load_state_dict if self.has_names_of_source else super().load_state_dict
        return own(*args, **kwargs)

    @property
    def eval_message(self) -> str:
        """Says that the model, or most of what trains otherwise than it evaluates, is in eval(); "": it is not."""
        root: nn.Module = self if self.source is None else self.source
        # Of a chain nothing runs but its layers, whatever its own flag says.
        flags = [root.training] if self.has_names_of_source else [layer.training for layer in self.children()]
        runs_in_eval = not any(flags)
        modules = [each for each in root.modules() if _depends_on_mode(each)]
        in_eval = [each for each in modules if not each.training]
        if not runs_in_eval and 2 * len(in_eval) <= len(modules):
            return ""
        kinds = ", ".join(sorted({type(each).__name__ for each in in_eval}))
        where = f" (with {kinds} as in evaluation)" if kinds else ""
        what = f"the model ({type(root).__name__}) is"
        if not runs_in_eval:
            what = f"{len(in_eval)} of the model's {len(modules)} modules that depend on it are"
        return (
            f"{what} in eval(), and will train so, as in a plain loop{where}; call model.train() first: "
            f"from_pretrained(), for one, returns a model in eval()"
        )

    def takes(self, argument: str) -> bool:
        """Return True if the module's own forward, which the layers are made of, names an argument so."""
        forward = None if self.is_by_hand else getattr(self.source, "forward", None)
        return forward is not None and argument in inspect.signature(forward).parameters


def _layers_in(x: Any) -> list[tuple[str, nn.Module]]:
    """Return the layers of what has no forward of its own, by name. Raises TypeError and ValueError as `Model` does."""
    # Not named_children(), which leaves out the second place of a module that runs twice.
    if isinstance(x, nn.Module):
        layers = [(name, layer) for name, layer in x._modules.items() if layer is not None]
    elif not isinstance(x, Iterable) or isinstance(x, (str, Tensor)):
        kind = f"the class {x.__name__}" if isinstance(x, type) else f"a value of type {type(x).__name__}"
        raise TypeError(f"model: {kind} is no model; give an nn.Module, or a list of layers in the order they run")
    elif isinstance(x, Mapping):  # what slicing an nn.Sequential passes
        layers = list(x.items())
    else:
        layers = [(str(k), layer) for k, layer in enumerate([*map(uncompiled, x)])]
    for name, layer in layers:
        if not isinstance(layer, nn.Module):
            raise TypeError(
                f"{name} ({type(layer).__name__}) of the model is no nn.Module; put what it does into "
                f"the forward of one"
            )
        if not _can_be_called(layer):
            raise TypeError(
                f"{name} ({type(layer).__name__}) of the model has no forward and cannot be called; "
                f"give Model the list of layers in the order they run"
            )
    holder = x if isinstance(x, nn.Module) else nn.Module()
    for kind, named in (("parameter", holder.named_parameters), ("buffer", holder.named_buffers)):
        for name, _ in named(recurse=False):
            raise ValueError(
                f"{kind} {name!r} belongs to the {type(x).__name__} itself, so no layer would carry it; "
                f"move it into one of its children"
            )
    if not layers:
        raise ValueError(f"the model ({type(x).__name__}) has no layers; give it at least one")
    return layers


def switch_off_checkpointing(module: nn.Module) -> None:
    """Set the flag `gradient_checkpointing`, as models of `transformers` have it, to False, with a warning."""
    checkpointed = [each for each in module.modules() if getattr(each, "gradient_checkpointing", False)]
    for each in checkpointed:
        each.gradient_checkpointing = False  # type: ignore[assignment]
    if checkpointed:
        warnings.warn(
            f"gradient checkpointing of the model ({type(module).__name__}) is switched off: the engine recomputes "
            f"each shard where memory asks for it, and checkpointing would compute it once more",
            stacklevel=4,
        )


def uncompiled(module: Any) -> Any:
    """Return the module that `torch.compile` was given, switched off in its children too, with a warning.

    Dynamo would trace the code that records and measures a module. What is no compiled module is returned unchanged.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # which comes with the first compilation
    if dynamo is None or not isinstance(module, nn.Module):
        return module
    own = module
    while isinstance(own, dynamo.OptimizedModule):
        own = cast(nn.Module, own._orig_mod)
    found = [type(own).__name__] if own is not module else []
    for name, each in own.named_modules():
        is_wrapper = isinstance(each, dynamo.OptimizedModule) and not isinstance(each.dynamo_ctx, dynamo.DisableContext)
        if is_wrapper:  # stays in its place, so that parameters keep their names
            each.dynamo_ctx = dynamo.DisableContext()
            each._initialize()
        # The others: by its own `compile()`, and a compiled function as its forward, or in its class.
        if is_wrapper or each._compiled_call_impl is not None or _uncompile_forward(each):
            each._compiled_call_impl = None
            found.append(name or type(own).__name__)
    if found:
        warnings.warn(
            f"torch.compile of {', '.join(found)} is switched off: the engine runs layer by layer, and compiles "
            f"each where ModelTask has compile=True; give that, and the module itself",
            stacklevel=4,
        )
    return own


def _uncompile_forward(module: nn.Module) -> bool:
    """Give a module the forward that was compiled back; return False if none was."""
    inside: Any = getattr(module.forward, "_torchdynamo_orig_callable", None)
    if inside is None or hasattr(module, "_orig_mod") or getattr(module.forward, "_torchdynamo_disable", False):
        return False
    if vars(module).pop("forward", None) is None:  # its class has it
        inside = MethodType(inside, module)
    if getattr(inside, "__func__", None) is not type(module).forward:
        module.forward = inside
    return True


def _along(module: nn.Module, parts: Iterable[str]) -> Iterator[nn.Module]:
    """Yield a module and those in it that a path leads through."""
    yield module
    for name in parts:
        found = module._modules.get(name)
        if found is None:
            return
        module = found
        yield module


def _shown(root: nn.Module, path: str) -> str:
    """Return the path of a module with its class, any other path as it is."""
    parts = path.split(".")
    *_, last = along = [*_along(root, parts)]
    return f"{path} ({type(last).__name__})" if len(along) > len(parts) else path


def _has_own_forward(module: nn.Module) -> bool:
    return "forward" in vars(module) or type(module).forward not in (nn.Sequential.forward, nn.Module.forward)


def _depends_on_mode(module: nn.Module) -> bool:
    """Return True for dropout, BatchNorm and the like, unless they are made to do the same in both modes."""
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return module.dropout > 0
    name = type(module).__name__
    switch = next((switch for kind, switch in _BY_MODE.items() if kind in name), None)
    return switch is not None and bool(getattr(module, switch, True))


def _can_be_called(layer: nn.Module) -> bool:
    if type(layer).__call__ is not nn.Module.__call__:
        return True
    return getattr(layer.forward, "__func__", layer.forward) is not nn.Module.forward
