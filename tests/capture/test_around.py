"""What lies around the calls of a forward: hooks on the model, on what autograd saves, and on nodes of its graph."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hydra_engine import Model, ModelTask
from tests import exact
from tests.capture.test_unrecorded import Inner, Inside, Three, assert_exact, batches

# The check of a forward's code: in `make test` are the tests that carry `net`.
pytestmark = pytest.mark.rest


class Saves(Three):
    def inner(self, h):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x):
            return h * h.sigmoid()


class SavesAround(Three):
    """Has hooks around a part that is checkpointed, which puts its own inside of them."""

    def inner(self, h):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x):
            return torch.utils.checkpoint.checkpoint(torch.sigmoid, h, use_reentrant=False)


class Node(Three):
    def inner(self, h):
        h = h * 2
        if h.grad_fn is not None:
            h.grad_fn.register_prehook(lambda gradients: tuple(2 * each for each in gradients))
        return h


@pytest.mark.net
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (Saves, "runs under saved_tensors_hooks"),
        (SavesAround, "runs under saved_tensors_hooks"),
        (Node, "takes the grad_fn of a tensor"),
    ],
)
def test_hooks_in_the_graph_are_refused_with_their_line(make, named):
    with pytest.raises(ValueError, match=rf"test_around.py:\d+: .*{named}"):
        Model(make(), example=torch.ones(2, 6))


class SavesInside(Inner):
    def forward(self, h):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x):
            return self.linear(h) * h.sigmoid()


class NodeInside(Inner):
    def forward(self, h):
        h = self.linear(h)
        if h.grad_fn is not None:
            h.grad_fn.register_prehook(lambda gradients: tuple(2 * each for each in gradients))
        return h * h


@pytest.mark.parametrize("part", [SavesInside, NodeInside])
def test_hooks_in_the_graph_of_a_module_of_its_own_are_exact(part):
    assert_exact(type(part.__name__, (Inside,), {"part": part}))


HOOKS = (
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
    "register_forward_hook",
    "register_forward_pre_hook",
)


@pytest.mark.parametrize("register", [pytest.param(HOOKS[0], marks=pytest.mark.net), *HOOKS[1:]])
@pytest.mark.parametrize("kind", [Three, lambda: nn.Sequential(nn.Linear(6, 3))])
@pytest.mark.parametrize("when", ["before", "after", "on the Model"])
def test_hooks_on_the_whole_model_are_refused_whenever_they_are_registered(register, kind, when):
    def generate(module):
        if when == "before":
            getattr(module, register)(lambda *_: None)
        model = Model(module)
        task = ModelTask(model, F.mse_loss, batches(), 1e-3, name="t")
        if when != "before":
            getattr(model if when == "on the Model" else module, register)(lambda *_: None)
        exact.orchestrator([task]).generate()

    module = kind()
    with pytest.raises(ValueError, match="has hooks of its own"):
        generate(module)
