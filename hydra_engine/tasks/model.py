"""A model as a sequence of layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn


class Model(nn.Sequential):
    """An `nn.Sequential` that shares the layers of `x`.

    `x` is an `nn.Sequential`, a list of layers, or a module whose children run in order, each on what the one before
    returned. `generate()` runs such a module once to see that its own `forward` is no more than that.
    """

    def __init__(self, x: nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module]) -> None:
        super().__init__()
        # Not named_children(), which leaves out the second place of a module that runs twice.
        if isinstance(x, nn.Module):
            layers = [(name, layer) for name, layer in x._modules.items() if layer is not None]
        elif isinstance(x, Mapping):  # what slicing an nn.Sequential passes
            layers = list(x.items())
        else:
            layers = [(str(k), layer) for k, layer in enumerate(x)]
        for name, layer in layers:
            if not isinstance(layer, nn.Module):
                raise TypeError(f"layer {name} of the model is a {type(layer).__name__}, not an nn.Module")
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
        if source._forward_hooks or source._forward_pre_hooks or source._backward_hooks:
            raise ValueError(
                f"the model ({type(x).__name__}) has hooks of its own, which running its layers would not call; "
                f"register them on its layers"
            )
        if not layers:
            raise ValueError(f"the model ({type(x).__name__}) has no layers; give it at least one")
        self._modules.update(layers)
        # Kept out of _modules: it must not appear in state_dict() or children().
        object.__setattr__(self, "source", x if isinstance(x, nn.Module) else None)

    @property
    def has_own_forward(self) -> bool:
        """True if the model came from a module whose `forward` is not `nn.Sequential`'s."""
        source: nn.Module | None = self.__dict__["source"]
        if isinstance(source, Model):
            return source.has_own_forward
        return source is not None and type(source).forward is not nn.Sequential.forward


def _can_be_called(layer: nn.Module) -> bool:
    if type(layer).__call__ is not nn.Module.__call__:
        return True
    return getattr(layer.forward, "__func__", layer.forward) is not nn.Module.forward
