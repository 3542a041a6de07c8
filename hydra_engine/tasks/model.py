"""A model as a sequence of layers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from hydra_engine.capture import are_as_recorded, layers_for, layers_of

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Model(nn.Sequential):
    """An `nn.Sequential` that shares the layers of `x`.

    x: an `nn.Sequential`, a list of layers, or any module. A module with a forward of its own becomes layers by itself:
    its forward is run once without computing, and cut between the calls that it makes. That it gives the same bits is
    checked before it trains.

    example: what the module's forward takes, as batches then give it: a tensor, a tuple of positional or a dict of
    keyword arguments. Its values matter only where the forward decides something by them. Without an example, the
    first batch of the task serves; where the module's children run in order, each on what the one before returned,
    these are then its layers.

    The parameters are the module's own, with the names that they have there, also in `state_dict()`. Raises ValueError
    with the line of the forward that stands in the way of making layers, and TypeError for what is no module.
    """

    source: Any  # the module that the layers come from; None where they came as they are
    is_converted: bool  # the layers were made of a forward of the module's own
    is_pending: bool  # it has no layers yet

    def __init__(self, x: nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module], example: Any = None) -> None:
        super().__init__()
        self._set(source=x if isinstance(x, nn.Module) else None, is_converted=False, is_pending=False)
        if isinstance(x, Model) and x.is_converted:
            self._modules.update(x._modules)
            self._set(source=x.source, is_converted=True, is_pending=x.is_pending)
            return
        self.check_hooks()
        if isinstance(x, nn.Module) and _has_own_forward(x):
            if example is not None:
                self.convert(example)
                return
            if not _may_be_chain(x):
                self._set(is_converted=True, is_pending=True)
                return
        # Not named_children(), which leaves out the second place of a module that runs twice.
        if isinstance(x, nn.Module):
            layers = [(name, layer) for name, layer in x._modules.items() if layer is not None]
        elif not isinstance(x, Iterable) or isinstance(x, (str, Tensor)):
            kind = f"the class {x.__name__}" if isinstance(x, type) else f"a value of type {type(x).__name__}"
            raise TypeError(f"model: {kind} is no model; give an nn.Module, or a list of layers in the order they run")
        elif isinstance(x, Mapping):  # what slicing an nn.Sequential passes
            layers = list(x.items())
        else:
            layers = [(str(k), layer) for k, layer in enumerate(x)]
        for name, layer in layers:
            if not isinstance(layer, nn.Module):
                raise TypeError(
                    f"layer {name} of the model is a {type(layer).__name__}, not an nn.Module; "
                    f"put what it does into the forward of one"
                )
            if not _can_be_called(layer):
                raise TypeError(
                    f"layer {name} of the model is a {type(layer).__name__}, which has no forward and cannot be "
                    f"called; give Model the list of layers in the order they run"
                )
        source = x if isinstance(x, nn.Module) else nn.Module()
        for kind, named in (("parameter", source.named_parameters), ("buffer", source.named_buffers)):
            for name, _ in named(recurse=False):
                raise ValueError(
                    f"{kind} {name!r} belongs to the {type(x).__name__} itself, so no layer would carry it; "
                    f"move it into one of its children"
                )
        if not layers:
            raise ValueError(f"the model ({type(x).__name__}) has no layers; give it at least one")
        self._modules.update(layers)

    def convert(self, inputs: Any) -> None:
        """Make layers of the module's own forward; `inputs`: an example of what it takes. Raises as the class does."""
        self.check_hooks()
        switch_off_checkpointing(self.source)
        layers = layers_of(self.source, inputs)
        self._modules.clear()
        self._modules.update((str(k), layer) for k, layer in enumerate(layers))
        self._set(is_converted=True, is_pending=False)

    @property
    def is_outdated(self) -> bool:
        """True if layers were made of a forward that may read what was changed since: an attribute, say."""
        return self.is_converted and not self.is_pending and not are_as_recorded(self._modules.values())

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
        """Set the mode of all layers; of converted ones, by that of the module that they come from."""
        if self.is_converted:
            self.source.train(mode)
            self.training = mode
            return self
        super().train(mode)
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters, of a converted module by the names and in the order that they have there."""
        named = self.source.named_parameters if self.is_converted else super().named_parameters
        return named(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers, of a converted module by the names and in the order that they have there."""
        named = self.source.named_buffers if self.is_converted else super().named_buffers
        return named(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # overloaded there
        """Return the weights; of a converted module, its own state dict."""
        own = self.source.state_dict if self.is_converted else super().state_dict
        return own(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Take in weights; those of a converted module by its own names."""
        own = self.source.load_state_dict if self.is_converted else super().load_state_dict
        return own(*args, **kwargs)

    def takes(self, argument: str) -> bool:
        """Return True if the module's own forward names an argument so."""
        forward = getattr(self.source, "forward", None)
        return forward is not None and argument in inspect.signature(forward).parameters

    @property
    def has_own_forward(self) -> bool:
        """True if the model came from a module whose `forward` is not `nn.Sequential`'s."""
        source: nn.Module | None = self.__dict__["source"]
        if isinstance(source, Model):
            return source.has_own_forward
        return source is not None and not self.is_converted and type(source).forward is not nn.Sequential.forward


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


def _has_own_forward(module: nn.Module) -> bool:
    return "forward" in vars(module) or type(module).forward not in (nn.Sequential.forward, nn.Module.forward)


def _may_be_chain(module: nn.Module) -> bool:
    """Return True if a module holds nothing but children that can be called."""
    children = [child for child in module._modules.values() if child is not None]
    return bool(children) and not (module._parameters or module._buffers) and all(map(_can_be_called, children))


def _can_be_called(layer: nn.Module) -> bool:
    if type(layer).__call__ is not nn.Module.__call__:
        return True
    return getattr(layer.forward, "__func__", layer.forward) is not nn.Module.forward
