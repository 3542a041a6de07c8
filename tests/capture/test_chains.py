"""Modules that hold nothing but children, and do something between their calls."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hydra_engine import Model, ModelTask
from tests import exact, reference, zoo
from tests.refused import names

# In `make test` are the tests that carry `net`.
pytestmark = pytest.mark.rest

SHAPES = ((4, 6), (3, 6), (1, 6), (4, 6))


def batches():
    generator = torch.Generator().manual_seed(1)
    draw = functools.partial(torch.randn, generator=generator)
    return [(draw(*shape), draw(shape[0], 3)) for shape in SHAPES]


class Chain(nn.Module):
    """Three children; what a case does besides is in `between`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.c(self.between(self.a(x)))

    def between(self, h):
        return self.b(h)


def train(module, data=None, **options):
    """Train the module, given without an example; return the task and its report."""
    task = ModelTask(Model(module), F.mse_loss, data or batches(), 0.1, name="t", seed=7, **options)
    return task, exact.run([task]).tasks["t"]


def assert_exact(make, data=None, **options):
    """Train as the plain loop does; return the names of the layers."""
    plain, module = make(), make()
    expected = reference.train(plain, F.mse_loss, data or batches(), seed=7, lr=0.1, **options)
    task, report = train(module, data, **options)
    assert report.status == "finished", report.error
    assert (report.losses, report.validation_losses) == (expected.losses, expected.validation_losses)
    exact.assert_same_state(zoo.state(module), zoo.state(plain))
    return list(task.model._modules)


class Evaluates(Chain):
    def between(self, h):
        return self.b(h) if self.training else self.b(h) + 1


@pytest.mark.net
def test_a_forward_that_differs_in_eval_is_validated_as_it_is():
    assert_exact(Evaluates, validation=batches())


@pytest.mark.net
def test_a_forward_that_runs_its_children_in_order_has_a_layer_for_each():
    assert assert_exact(Chain, validation=batches()) == ["0", "1", "2"]


class Raises(nn.Module):
    def forward(self, h):
        raise RuntimeError("a mistake of the layer's own")


@pytest.mark.net
def test_a_mistake_in_a_child_is_told_as_it_is():
    module = Chain()
    module.b = Raises()
    with pytest.raises(RuntimeError, match="a mistake of the layer's own"):
        train(module)


class Force(nn.Module):
    """The gradient of an energy by what enters it."""

    def __init__(self, *, detaches=False):
        super().__init__()
        self.energy, self.detaches = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)), detaches

    def forward(self, h):
        if self.detaches:
            h = h.detach().requires_grad_()
        return torch.autograd.grad(self.energy(h).sum(), h, create_graph=True)[0]


class ForceEvaluated(Force):
    def forward(self, h):
        with torch.enable_grad():
            return super().forward(h if h.requires_grad else h.requires_grad_())


def with_force(force, **options):
    module = Chain()
    module.b = force(**options)
    return module


class Doubled(Chain):
    """No chain: its layers are recorded."""

    def __init__(self):
        super().__init__()
        self.b = Force()

    def forward(self, x):
        return self.c(self.b(F.relu(self.a(x)))) * 2


@pytest.mark.net
@pytest.mark.parametrize(
    "make", [functools.partial(with_force, Force, detaches=True), functools.partial(with_force, Force), Doubled]
)
def test_a_layer_that_differentiates_in_its_forward_trains_exactly(make):
    assert_exact(make)


@pytest.mark.net
def test_it_validates_exactly_where_it_differentiates_under_enable_grad():
    assert_exact(functools.partial(with_force, ForceEvaluated), validation=batches()[:2])


@pytest.mark.net
def test_an_evaluation_without_gradients_is_told_with_its_remedy():
    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        train(with_force(Force, detaches=True), validation=batches()[:1])
    names(caught.value.__notes__[0], says="no_grad enable_grad")
