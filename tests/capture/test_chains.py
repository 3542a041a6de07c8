"""Modules that hold nothing but children, and do something between their calls."""

import contextlib
import functools
import re

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


class InPlace(Chain):
    def between(self, h):
        return self.b(F.relu_(h))


class NoGrad(Chain):
    def between(self, h):
        with torch.no_grad():
            return self.b(h)


class Sizes(Chain):
    def between(self, h):
        return self.b(h) if h.shape[0] > 1 else self.b(self.b(h))


class Length(Chain):
    def between(self, h):
        return self.b(h) if len(h) > 3 else h


class Asserts(Chain):
    def between(self, h):
        assert isinstance(h, torch.Tensor)
        assert h.dim() == 2
        return self.b(h)


class Swallows(Chain):
    """Catches what its operations raise."""

    def between(self, h):
        with contextlib.suppress(Exception):
            h = h * 2
        return self.b(h)


class Evaluates(Chain):
    def between(self, h):
        return self.b(h) if self.training else self.b(h) + 1


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, batch):
        return {**batch, "x": self.linear(batch["x"])}


class Flagged(Chain):
    """Decides by a plain value of the batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Takes(), Takes(), nn.Sequential(Last())

    def forward(self, batch):
        found = self.a(batch)
        return self.c(self.b(found) if found["deep"] else found)


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, batch):
        return self.linear(batch["x"])


@pytest.mark.parametrize("make", [InPlace, NoGrad, Sizes, Length, Asserts, Swallows])
def test_what_a_forward_does_between_its_children_is_trained(make):
    assert assert_exact(make)


@pytest.mark.net
def test_a_forward_that_differs_in_eval_is_validated_as_it_is():
    assert_exact(Evaluates, validation=batches())


@pytest.mark.net
def test_a_forward_that_runs_its_children_in_order_has_a_layer_for_each():
    assert assert_exact(Chain, validation=batches()) == ["0", "1", "2"]


@pytest.mark.net
def test_a_plain_value_of_a_batch_decides():
    data = [(({"x": x, "deep": len(x) > 3},), y) for x, y in batches()]
    plain, module = Flagged(), Flagged()
    expected = reference.train(Called(plain), F.mse_loss, data, seed=7, lr=0.1)
    _, report = train(module, data)
    assert report.losses == expected.losses, report.error
    exact.assert_same_state(zoo.state(module), zoo.state(plain))


class Called(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, inputs):
        return self.module(*inputs)


class Autocast(Chain):
    def between(self, h):
        with torch.autocast("cpu", torch.bfloat16):
            h = self.b(h)
        return h.float()


class Hooked(Chain):
    def between(self, h):
        if h.requires_grad:
            h.register_hook(lambda gradient: 2 * gradient)
        return self.b(h)


class Saves(Chain):
    def between(self, h):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x):
            return self.b(h)


class Counts(Chain):
    calls = 0

    def between(self, h):
        self.calls += 1
        return self.b(h) if self.calls < 4 else h


CALLS = [0]


class CountsOutside(Chain):
    def between(self, h):
        CALLS[0] += 1
        return self.b(h) if CALLS[0] % 8 < 4 else h


class Clamps(Chain):
    def between(self, h):
        for parameter in self.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        return self.b(h)


class Looks(Chain):
    """Decides by what it computes."""

    def between(self, h):
        return self.b(h) if h.sum() > -1e9 else h


@pytest.mark.net
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (Counts, "changes calls with each call"),
        (CountsOutside, r"changes between.CALLS\[0\] with each call"),
        (Clamps, "changes parameter a.weight"),
    ],
)
def test_what_cannot_be_recorded_and_is_no_layer_either_is_refused(make, named):
    with pytest.raises(ValueError, match=named):
        train(make())


@pytest.mark.net
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (Autocast, r"test_chains.py:\d+: h = self.b\(h\) runs with autocast set otherwise"),
        (Hooked, "registers a hook on a tensor"),
        (Saves, "runs under saved_tensors_hooks"),
        (Looks, r"test_chains.py:\d+: return self.b\(h\) if h.sum\(\) > -1e9 else h asks for the value"),
    ],
)
def test_what_cannot_be_recorded_is_one_layer_and_the_report_says_why(make, named):
    assert assert_exact(make) == [make.__name__]
    task, _ = train(make())
    assert re.search(f"is one layer, .*cannot be cut: .*{named}", task.model.one_layer_because)


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
