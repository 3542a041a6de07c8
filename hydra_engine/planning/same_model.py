"""Checks that the layers made of a module's own `forward` compute what it does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hydra_engine.capture import Segment, called_with, carried
from hydra_engine.data import RandomState, Redirected, Stream, TaskGenerator, copy_of, identical, installed, seeded
from hydra_engine.host import LayerFault
from hydra_engine.tasks import Model
from hydra_engine.worker import Attributes
from partitioners.profile import noted

# Of the random state that a model's forward and its layers are compared from.
SEED = 9973
UNDER_NO_GRAD = (
    "in eval() under torch.no_grad(), as evaluations run; a forward or a loss that differentiates there does so under "
    "torch.enable_grad()"
)


def _note_no_grad(error: Exception) -> None:
    """Add the remedy to an error of what differentiates where there are no graphs."""
    if "does not require grad" in str(error):
        noted(error, UNDER_NO_GRAD)


def check_converted(model: Model, inputs: Any, num_samples: int, *, training: bool = True) -> None:
    """Run a module's own forward and the layers made of it on two samples, from one random state, and compare bits.

    This checks the recording. Both run on the model's own weights; buffers, attributes and modes are put back. A model
    on meta has no bits. inputs: of a batch of `num_samples`, all of which run where two alone do not. Raises LayerFault
    with the first output that differs, or if the layers draw other random numbers.
    """
    source = model.source
    if any(each.device.type == "meta" for each in (*source.parameters(), *source.buffers())):
        return
    mode = "training" if training else "evaluation"

    modules = [each for root in (source, *model) for each in root.modules()]

    def own(given: Any) -> Any:
        args, kwargs = called_with(given)
        return carried(source(*args, **kwargs))

    def layers(given: Any) -> Any:
        for layer in model:
            given = layer(given)
        return given

    def run(given: Any, forward: Callable[[Any], Any], seed: int = SEED) -> tuple[list[Any], Tensor]:
        given = pytree.tree_map_only(Tensor, copy_of, given)
        state = random_state(seed)
        with (
            _put_back([source, *model._modules.values()]),
            torch.set_grad_enabled(training),
            installed(Stream(state)),
            # Another thread may draw, too. What the forward seeds is what it draws from.
            Redirected(draws := TaskGenerator(state.torch)),
        ):
            for each in modules if not training else ():
                each.training = False  # not by its eval(), which may write to its weights
                if isinstance(each, Segment):
                    each.mode = False
            found = pytree.tree_map_only(Tensor, Tensor.detach, pytree.tree_leaves(forward(given)))
            return found, draws.state

    def both(given: Any) -> list[tuple[list[Any], Tensor]]:
        run(given, layers, seed=0)  # is recorded, which may draw
        return [run(given, forward) for forward in (own, layers)]

    def some(leaf: Tensor) -> Tensor:
        return leaf[:2] if leaf.dim() and _is_plain(leaf) and len(leaf) == num_samples else leaf

    try:
        found = both(pytree.tree_map_only(Tensor, some, inputs))
    except Exception:  # tensors of a batch that do not go by samples, say
        try:
            found = both(inputs)
        except Exception as error:
            if not training:
                _note_no_grad(error)
            raise
    (expected, drawn), (given, redrawn) = found
    if not torch.equal(drawn, redrawn):
        raise LayerFault(
            f"the layers that the model's own forward was made into draw other random numbers than the forward "
            f"itself ({mode} mode); let it draw with torch's functions from torch's generator, and not seed that"
        )
    for k, (a, b) in enumerate(zip_longest(expected, given)):
        if not (identical(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b):
            raise LayerFault(
                f"the layers that the model's own forward was made into give another output {k} than the forward "
                f"itself ({mode} mode, {_difference(a, b)}): it does what its recorded calls do not show; give the "
                f"model as an nn.Sequential of its layers"
            )


def random_state(seed: int = SEED) -> RandomState:
    """Return the states of all process-wide generators after a seed."""
    return RandomState(seeded(seed), random.Random(seed).getstate(), np.random.RandomState(seed).get_state())


@contextmanager
def _put_back(roots: Iterable[Any]) -> Iterator[None]:
    """Put back buffers, attributes and modes of modules, and what their containers hold."""
    modules = [root for root in roots if isinstance(root, nn.Module)]
    attributes = [Attributes(module, "") for module in modules]
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    try:
        yield
    finally:
        for each in attributes:
            each.put_back()
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
    try:
        with _put_back([model, *loss_fns]), torch.set_grad_enabled(training), installed(Stream(random_state())):
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


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def _difference(a: Any, b: Any) -> str:
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape:
        return f"by up to {(a.double() - b.double()).abs().max().item():.3g}"
    return f"{getattr(a, 'shape', a)} and {getattr(b, 'shape', b)}"
