"""What a recording cannot show is refused by name, or runs as a module of its own, before any work."""

import copy
import functools
import random
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hydra_engine import Callback, Model, ModelTask
from hydra_engine.capture.shadow import Caches, Shadow
from tests import exact, reference, zoo
from tests.any_model import harness

# The check of what a recording does not show: in `make test` are the tests that carry `net`.
pytestmark = pytest.mark.rest

SHAPES = ((4, 6), (3, 6), (1, 6), (4, 6))


class Three(nn.Module):
    """Three layers; what a case adds is made in `more`."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.more()

    def more(self):
        pass

    def forward(self, x):
        return self.c(self.b(self.inner(self.a(x))))

    def inner(self, h):
        return h


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(*shape, generator=generator), torch.randn(shape[0], 3)) for shape in SHAPES]


def train(module, loss_fn=F.mse_loss, **options):
    """Train the module as layers."""
    model = Model(module, example=batches()[0][0])
    task = ModelTask(model, loss_fn, batches(), 1e-3, name="t", optimizer=torch.optim.AdamW, seed=7, **options)
    exact.run([task]).raise_failures()


def assert_exact(make, data=None):
    """As layers it trains to the bits of its own forward."""
    torch.manual_seed(3)
    data = data or batches()
    case = harness.Case(make.__name__, make, lambda: data, lambda: data[:2], F.mse_loss)
    harness.check(case, harness.one_shard)
    harness.check(case, harness.each_layer)


class InDict(Three):
    def more(self):
        self.state = {"calls": 0}

    def inner(self, h):
        self.state["calls"] += 1
        return h * self.state["calls"]


class InList(Three):
    def more(self):
        self.seen = []

    def inner(self, h):
        self.seen.append(1)
        return h * len(self.seen)


class Late(Three):
    """What it counts matters only once there were many calls."""

    def more(self):
        self.calls = 0

    def inner(self, h):
        self.calls += 1
        return h * 2 if self.calls > 9 else h


CALLS = [0]


class InGlobal(Three):
    def inner(self, h):
        CALLS[0] += 1
        return h * 2 if CALLS[0] > 9 else h


class Annealed(Three):
    def more(self):
        self.heat = torch.tensor(1.0)

    def inner(self, h):
        self.heat *= 0.9
        return h / self.heat


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, h):
        return self.linear(h) + 1


class Outer(Three):
    def more(self):
        self.inside = Inner()

    def inner(self, h):
        return self.inside(h)


@pytest.mark.net
def test_a_list_that_a_hook_appends_to_gets_what_layers_compute_alone():
    features = []
    module = Outer()
    module.inside.register_forward_hook(lambda module, args, output: features.append(output))
    model = Model(module, example=torch.ones(2, 6))
    assert not features
    model(torch.ones(2, 6))
    assert [each.device.type for each in features] == ["cpu"]


class Memory(Three):
    def more(self):
        self.memory = torch.zeros(4, 6)

    def inner(self, h):
        out = h + self.memory.sum(0)
        self.memory[: len(h)] = h.detach()
        return out


class Rebinds(Three):
    def more(self):
        self.register_buffer("mean", torch.zeros(6))

    def inner(self, h):
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


class Generated(Three):
    def more(self):
        self.generator = torch.Generator().manual_seed(3)

    def inner(self, h):
        return h + torch.randn(h.shape, generator=self.generator)


class Autocast(Three):
    def inner(self, h):
        with torch.autocast("cpu", torch.bfloat16):
            return self.b(h).float()


class Kernels(Three):
    def inner(self, h):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return F.scaled_dot_product_attention(h[None], h[None], h[None])[0]


class Doubles(Three):
    def inner(self, h):
        torch.set_default_dtype(torch.float64)
        try:
            return h + torch.rand(6).float()
        finally:
            torch.set_default_dtype(torch.float32)


class Normalizes(Three):
    def inner(self, h):
        with torch.no_grad():
            self.b.weight.div_(self.b.weight.norm())
        return h


class MovesTeacher(Three):
    """Of a frozen copy, whose mean goes with the weights."""

    def more(self):
        self.teacher = nn.Linear(6, 6).requires_grad_(False)

    def inner(self, h):
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.b.parameters(), strict=True):
                own.mul_(0.9).add_(other, alpha=0.1)
        return h + self.teacher(h)


class Clamps(Three):
    def inner(self, h):
        self.b.weight.data.clamp_(-0.1, 0.1)
        return h


@pytest.mark.net
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (InDict, r"InDict.forward changes state\['calls'\], which its next call depends on"),
        (InList, r"InList.forward changes seen\[0\], which its next call"),
        (Late, "Late.forward changes calls with each call"),
        (InGlobal, r"InGlobal.forward changes inner.CALLS\[0\] with each call"),
        (Annealed, "Annealed.forward changes heat with each call"),
        (Normalizes, ".*changes parameter b.weight"),
        (MovesTeacher, ".*changes parameter teacher.weight"),
        (Clamps, ".*changes parameter b.weight"),
        (Memory, ".*writes to a tensor that is no buffer"),
        (Rebinds, ".*replaces a parameter or a buffer"),
        (Generated, ".*draws from a generator of its own"),
        (Autocast, ".*runs with autocast set otherwise"),
        (Kernels, ".*runs with the kernels of attention set otherwise"),
        (Doubles, ".*runs with the default dtype set otherwise"),
    ],
)
def test_what_counts_its_calls_and_what_calls_do_not_show_is_refused_with_its_line(make, named):
    with pytest.raises(ValueError, match=rf"test_unrecorded.py:\d+: {named}"):
        Model(make(), example=torch.ones(2, 6))


@pytest.mark.net
@pytest.mark.parametrize("kind", [torch.jit.script, lambda layer: torch.jit.trace(layer, torch.ones(2, 6))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused_by_name(kind):
    module = Three()
    module.b = kind(module.b)
    with pytest.raises(TypeError, match=r"b is a TorchScript module \(Linear\).*give the module that was scripted"):
        Model(module, example=torch.ones(2, 6))


class Catches(Three):
    """Hides from its caller that something could not be known, and goes the way of small numbers."""

    def inner(self, h):
        try:
            if h.abs().max() > 1e3:
                h = h * 0
        except Exception:
            pass
        return h


@pytest.mark.net
def test_what_the_forward_catches_is_refused_all_the_same():
    with pytest.raises(ValueError, match=r"test_unrecorded.py:\d+: if h.abs\(\).max\(\) > 1e3: .*asks for the value"):
        Model(Catches(), example=torch.ones(2, 6))


@functools.lru_cache
def positions(count):
    return torch.arange(count) / count


class Cached(Three):
    """Keeps tensors that depend on nothing for the next call, of the plain loop too."""

    def inner(self, h):
        return h + positions(h.shape[1])


def test_caches_of_functions_hold_nothing_that_was_recorded():
    assert_exact(Cached)
    positions.cache_clear()
    Model(Cached(), example=torch.ones(2, 6))
    assert not positions(6).is_meta


def test_a_recording_while_weights_are_updated_sees_none_of_them():
    model = Three()
    shadow = Shadow(model)
    before = shadow.left(lambda path: True)
    with torch.no_grad():
        model.a.weight.add_(1)
    assert shadow.left(lambda path: True) == before


class CachedAndLeaves(Cached):
    """Leaves something besides, so that each form of batches is recorded several times, with those before it."""

    def inner(self, h):
        self.last = len(h)
        return super().inner(h)


def test_caches_of_functions_are_empty_for_each_run_of_a_recording_and_looked_for_once(monkeypatch):
    positions(6)
    assert_exact(CachedAndLeaves)
    positions.cache_clear()
    looks, runs = [], []
    monkeypatch.setattr(Caches, "__init__", lambda self, init=Caches.__init__: looks.append(init(self)))
    monkeypatch.setattr(Caches, "apart", lambda self, apart=Caches.apart: runs.append(self) or apart(self))
    model = Model(CachedAndLeaves(), example=torch.ones(2, 6))
    before = len(looks), len(runs)
    model(torch.ones(3, 6))
    assert len(looks) - before[0] == 1 < len(runs) - before[1]
    assert not positions(6).is_meta


class Aligned(Three):
    """Has a loss of sequences in its forward, which torch does not run on meta."""

    def more(self):
        self.reduction = "mean"

    def forward(self, x):
        log_probs = F.log_softmax(self.c(self.b(self.a(x))), -1)[:, None]
        lengths = torch.full((1,), len(x)), torch.ones(1, dtype=torch.long)
        return F.ctc_loss(log_probs, torch.ones(1, 1, dtype=torch.long), *lengths, 0, self.reduction)


@pytest.mark.net
@pytest.mark.parametrize(("reduction", "shape"), [("mean", ()), ("sum", ()), ("none", (1,))])
def test_ctc_loss_in_the_forward(reduction, shape):
    torch.manual_seed(0)
    module, inputs = Aligned(), torch.randn(4, 6)
    module.reduction = reduction
    found = Model(module, example=inputs)(inputs)
    assert found.shape == shape
    assert torch.equal(found, module(inputs))


class CatchesInside(Inner):
    def forward(self, h):
        try:
            if h.abs().max() > 1:
                h = h * 0.5
        except Exception:
            pass
        return self.linear(h)


class Inside(Three):
    """A part that is refused in the model's own forward, as a module of its own."""

    part: type

    def more(self):
        self.inside = self.part()

    def inner(self, h):
        return self.inside(h)


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, h):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


class Narrow(Inner):
    def forward(self, h):
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(h).float()


@pytest.mark.parametrize("part", [Mean, Narrow, CatchesInside])
def test_a_module_of_its_own_is_one_layer(part):
    assert_exact(type(f"Inside{part.__name__}", (Inside,), {"part": part}))


class Functional(Three):
    def inner(self, h):
        doubled = {name: 2 * each for name, each in self.b.named_parameters()}
        return torch.func.functional_call(self.b, doubled, (h,))


class DrawsMore(Three):
    """Draws what nothing is made of; the draws after it are others."""

    def inner(self, h):
        h = F.dropout(h, 0.2, self.training)
        torch.empty(3).geometric_(0.5)
        F.rrelu(h, training=self.training)
        F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=0.3 if self.training else 0.0)
        return h


@pytest.mark.parametrize("make", [Functional, DrawsMore])
def test_weights_of_a_functional_call_and_unused_draws(make):
    assert_exact(make)


class NumPy(Three):
    def inner(self, h):
        return h + torch.from_numpy(np.random.rand(6).astype(np.float32))


class Seeds(Three):
    def inner(self, h):
        torch.manual_seed(5)
        return h + torch.randn(h.shape)


class Forks(Three):
    def inner(self, h):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return h + torch.randn(h.shape)


def as_one_layer(make, data, named, loss_fn=F.mse_loss, *, is_chain=False):
    """It trains exactly as one layer, and the report says what kept it from being cut."""
    torch.manual_seed(3)
    plain = make()
    module = copy.deepcopy(plain)
    seed_others()
    expected = reference.train(harness.Called(plain), loss_fn, copy.deepcopy(data), seed=7, lr=0.1)
    example = None if is_chain else copy.deepcopy(data[0][0])
    task = ModelTask(Model(module, example=example), loss_fn, data, 0.1, name="t", seed=7)
    seed_others()
    report = exact.run([task])
    assert report.tasks["t"].losses == expected.losses
    exact.assert_same_state(zoo.state(module), zoo.state(plain))
    assert list(task.model._modules) == [make.__name__]
    [message] = report.messages
    assert re.search(named, message), message


def seed_others():
    random.seed(7)
    np.random.seed(7)


@pytest.mark.net
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (NumPy, "give another output"),
        (Seeds, "other random numbers than the forward itself"),
        (Forks, "other random numbers than the forward itself"),
    ],
)
def test_draws_past_the_recorded_calls_keep_the_model_one_layer(make, named):
    as_one_layer(make, batches(), named)


class AsksArray(nn.Module):
    """Multiplies by an element of the batch, for which it asks NumPy."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.b(self.a(x)) * float(x.numpy()[len(x) // 2, 0])


def test_arrays_that_differ_where_numpy_prints_nothing_have_forwards_of_their_own():
    data = [(torch.ones(600, 6), torch.zeros(600, 3)) for _ in range(3)]
    for k, (x, _) in enumerate(data):
        x[300, 0] += k
    assert_exact(AsksArray, data)


class WritesInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x, scale):
        h = self.a(x) + scale
        scale.mul_(2)  # nothing that it returns is made of it
        return self.b(h)


@pytest.mark.net
def test_a_batch_that_is_written_to_is_refused_though_nothing_reads_it():
    data = [((x, torch.ones(len(x), 1)), y) for x, y in batches()]
    task = ModelTask(Model(WritesInput(), example=data[0][0]), F.mse_loss, data, 1e-3, name="t")
    with pytest.raises(ValueError, match="work in place on the inputs of a batch"):
        exact.run([task])


def refused(make, data, named, error=ValueError):
    def run():
        task = ModelTask(Model(make(), example=data[0][0]), F.mse_loss, data, 1e-3, name="t")
        exact.run([task]).raise_failures()

    with pytest.raises(error, match=named):
        run()


class Sparse(Three):
    def forward(self, x, matrix):
        return super().forward(x) * float(matrix.sum())


class Graph:
    """Tells of itself how large it is."""

    def __init__(self, values):
        self.values = values

    def sum(self):
        return self.values.sum()

    def __repr__(self):
        return f"Graph({len(self.values)})"


@pytest.mark.parametrize("holds", [lambda graph: graph, lambda graph: np.array([graph], dtype=object)])
def test_objects_of_which_repr_does_not_tell_what_differs_are_refused(holds):
    data = [((x, holds(Graph(torch.full((3,), float(k))))), y) for k, (x, y) in enumerate(batches())]
    refused(Sparse, data, "hold a tests.capture.test_unrecorded.Graph, limit: tensors, arrays, .*; pass its", TypeError)


def test_matrices_of_scipy_are_refused():
    sparse = pytest.importorskip("scipy.sparse")
    data = [((x, sparse.eye_array(500) * (k + 1.0)), y) for k, (x, y) in enumerate(batches())]
    refused(Sparse, data, "hold a scipy.sparse.*, limit: tensors", TypeError)


class Unpads(nn.Module):
    """Takes the rows out that begin with a negative number."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, h):
        return self.linear(h[h[:, 0] >= 0])


class UnpadsAndCounts(Unpads):
    def forward(self, h):
        rows = h[h[:, 0] >= 0]
        return self.linear(h), len(rows)


class Unpadded(Three):
    def more(self):
        self.unpad = Unpads()

    def forward(self, x):
        return self.c(self.b(self.unpad(self.a(x))))


class Sums(Unpadded):
    def forward(self, x):
        return super().forward(x).sum(0)


class DividesBySize(Unpadded):
    def forward(self, x):
        h = self.unpad(self.a(x))
        return self.c(self.b(h)).sum(0) / h.shape[0]


class DividesByLength(Unpadded):
    def forward(self, x):
        h = self.b(self.unpad(self.a(x)))
        return self.c(h).sum(0) / (len(h) + 1)


class AddsRows(Unpadded):
    def forward(self, x):
        return sum(row for row in self.c(self.unpad(self.a(x))))


class Counted(Unpadded):
    def more(self):
        self.unpad = UnpadsAndCounts()

    def forward(self, x):
        h, count = self.unpad(self.a(x))
        return self.c(self.b(h)) / (count + 1)


def padded(target=(3,)):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 6, generator=generator), torch.randn(*target, generator=generator)) for _ in range(4)]


def test_sizes_that_nobody_asks_for_may_depend_on_values():
    assert_exact(Sums, padded())


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (DividesBySize, r"its module unpad gives \(test_unrecorded.py:\d+: .* h.shape\[0\]\), which depends"),
        (DividesByLength, r"its module unpad gives \(test_unrecorded.py:\d+: .*len\(h\)"),
        (AddsRows, r"its module unpad gives \(test_unrecorded.py:\d+: return sum"),
    ],
)
def test_sizes_that_depend_on_values_are_compared_with_those_that_were_recorded(make, named):
    as_one_layer(make, padded(), named)


def test_numbers_that_a_module_gives_are_compared_with_those_that_were_recorded():
    as_one_layer(Counted, padded((5, 3)), r"its module unpad gives \(test_unrecorded.py:\d+: .*\), which depends")


class Unchanged(DividesBySize):
    """Rows are as in the batch."""

    def more(self):
        super().more()
        nn.init.eye_(self.a.weight)
        nn.init.zeros_(self.a.bias)


def test_they_are_compared_for_later_batches_too():
    data = padded()
    data[0][0][:, 0] = 1  # no row is taken out
    refused(Unchanged, data, r"its module unpad gives \(test_unrecorded.py:\d+: .* h.shape\[0\]\), which depends")


class Scaled(Three):
    def more(self):
        self.scale, self.options, self.table = 1.0, {"shift": 0.0}, torch.zeros(6)
        self.act = nn.Identity()

    def inner(self, h):
        return self.act(h) * self.scale + self.options["shift"] + self.table


def set_scale(module):
    module.scale = 3.0


def set_option(module):
    module.options["shift"] = 1.0


def set_table(module):
    module.table.numpy()[:] = 0.5


def set_module(module):
    module.act = nn.ReLU()


def set_frozen(module):
    module.b.weight.requires_grad_(False)


def set_hook(module):
    module.inside.register_forward_hook(lambda module, args, output: 2 * output)


class Hooked(Scaled):
    def more(self):
        super().more()
        self.inside = Inner()

    def inner(self, h):
        return super().inner(self.inside(h))


@pytest.mark.parametrize("change", [set_scale, set_option, set_table, set_module, set_frozen, set_hook])
@pytest.mark.parametrize("trains_before", [False, True])
def test_a_module_that_is_changed_after_it_was_recorded_is_recorded_again(change, trains_before):
    torch.manual_seed(3)
    module, data = Hooked(), batches()
    plain, model = copy.deepcopy(module), Model(module, example=data[0][0])

    def train_both():
        expected = reference.train(plain, F.mse_loss, data, seed=7, lr=0.1)
        report = exact.run([ModelTask(model, F.mse_loss, data, 0.1, name="t", seed=7)]).tasks["t"]
        assert report.losses == expected.losses
        exact.assert_same_state(zoo.state(module), zoo.state(plain))

    if trains_before:
        train_both()
    for each in (module, plain):
        change(each)
    train_both()


class Penalized(Three):
    """Returns what a loss differentiates its output by: the input, and a value on the way."""

    def forward(self, x):
        x = x.requires_grad_()
        h = self.a(x)
        return x, h, self.c(torch.tanh(self.b(torch.tanh(h))))


def penalty(by, output, target):
    [gradient] = torch.autograd.grad(output[2].square().sum(), output[by], create_graph=True)
    return F.mse_loss(output[2], target) + (gradient.norm(dim=1) - 1).square().mean()


class TwoInputs(Penalized):
    def forward(self, x, scale):
        return super().forward(x * scale)


def with_scales():
    return [((x, torch.full((len(x), 1), 0.5)), y) for x, y in batches()]


class Forces(Three):
    """The model itself differentiates its energy."""

    def forward(self, x):
        x = x.clone().requires_grad_()
        energy = super().forward(x).square().sum()
        [force] = torch.autograd.grad(energy, x, create_graph=True)
        return self.c(force)


@pytest.mark.net
def test_a_model_that_differentiates_itself_is_one_layer():
    torch.manual_seed(3)
    plain, data = Forces(), batches()
    module = copy.deepcopy(plain)
    expected = reference.train(plain, F.mse_loss, data, seed=7, lr=0.1)
    report = exact.run([ModelTask(module, F.mse_loss, data, 0.1, name="t", seed=7)])
    assert report.tasks["t"].losses == expected.losses
    assert "torch.autograd.grad" in report.messages[0]


class Entering(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x):
        x = x.requires_grad_()
        return x, torch.tanh(self.a(x))


class Returning(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.Linear(6, 3)

    def forward(self, both):
        return *both, self.b(both[1])


class PenalizedChain(nn.Module):
    """Its children are its layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Entering(), Returning()

    def forward(self, x):
        return self.b(self.a(x))


@pytest.mark.net
@pytest.mark.parametrize(
    ("make", "data", "by"),
    [
        (Penalized, batches(), 0),
        (Penalized, batches(), 1),
        (TwoInputs, with_scales(), 0),
    ],
)
def test_a_loss_that_differentiates_across_layers_keeps_the_model_one_layer(make, data, by):
    as_one_layer(make, data, "not .* used in the graph", functools.partial(penalty, by))


@pytest.mark.net
def test_so_does_one_that_differentiates_across_the_children_of_a_chain():
    loss_fn = functools.partial(penalty, 0)
    as_one_layer(PenalizedChain, batches(), "not .* used in the graph", loss_fn, is_chain=True)


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).float()

    @staticmethod
    def backward(ctx, gradient):
        [v] = ctx.saved_tensors
        return gradient / (1 + 10 * v.abs()) ** 2


class Neuron(nn.Module):
    """Keeps its potential from one time step of a forward to the next."""

    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.tensor(0.9))
        self.reset()

    def reset(self):
        self.v = 0.0

    def forward(self, h):
        self.v = self.v * self.decay + h
        return self.fire(self.v - 0.1)

    def fire(self, v):
        return Spike.apply(v)


class Spiking(Three):
    neuron = Neuron

    def more(self):
        self.n = self.neuron()

    def forward(self, x):
        self.n.reset()
        return sum(self.c(self.n(self.b(self.a(x)))) for _ in range(3))


class Remembering(Neuron):
    """In a list, and without a function of its own; it goes by a value, and so is kept whole."""

    def reset(self):
        self.seen = []

    def forward(self, h):
        if h.sum() > 1e9:
            return h
        self.seen.append(torch.tanh(h + (self.seen[-1] * self.decay if self.seen else 0)))
        return self.seen[-1]


class Recalling(Spiking):
    neuron = Remembering


class SpikingTwice(Spiking):
    """Two populations of neurons, which the forward resets by hand."""

    def more(self):
        super().more()
        self.m = Neuron()

    def forward(self, x):
        self.n.v = self.m.v = torch.zeros(len(x), 6)
        return sum(self.c(self.m(self.b(self.n(self.a(x))))) for _ in range(2))


@pytest.mark.net
@pytest.mark.parametrize("make", [Spiking, Recalling, SpikingTwice])
def test_what_a_module_keeps_within_a_forward_keeps_the_model_one_layer(make):
    as_one_layer(make, batches(), "saved tensor|graph a second time|is not there|attribute")


class Taught(Three):
    """A mean teacher that is updated first and read last."""

    def more(self):
        self.teacher = nn.Sequential(copy.deepcopy(self.a), copy.deepcopy(self.c)).requires_grad_(False)
        self.keep()

    def keep(self):
        pass

    def update(self):
        with torch.no_grad():
            for own, other in zip(self.weights(), (*self.a.parameters(), *self.c.parameters()), strict=True):
                own.mul_(0.9).add_(other, alpha=0.1)

    def weights(self):
        return self.teacher.parameters()

    def forward(self, x):
        self.update()
        output = super().forward(x)
        with torch.no_grad():
            taught = self.teacher(x)
        return output - 0.1 * taught


class TaughtBetween(Taught):
    def forward(self, x):
        output = Three.forward(self, x)
        with torch.no_grad():
            taught = self.teacher(x)
        return output - 0.1 * taught


class TaughtInBuffers(Taught):
    """As the message has it."""

    def keep(self):
        for module in self.teacher.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                delattr(module, name)
                module.register_buffer(name, weight.data)

    def weights(self):
        return self.teacher.buffers()


class Updates(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.a, self.c, self.teacher = module.a, module.c, module.teacher

    def forward(self, x):
        TaughtInBuffers.update(self)
        return x, self.a(x)

    weights = TaughtInBuffers.weights


class Reads(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.c, self.teacher = module.c, module.teacher

    def forward(self, both):
        with torch.no_grad():
            taught = self.teacher(both[0])
        return self.c(both[1]) - 0.1 * taught


def in_layers():
    """By hand: the first updates, the last reads."""
    module = TaughtInBuffers()
    return nn.Sequential(Updates(module), Reads(module))


@pytest.mark.net
def test_a_mean_teacher_in_parameters_is_refused_with_a_remedy():
    for make in (Taught, lambda: nn.Sequential(Taught())):
        task = ModelTask(make(), F.mse_loss, batches(), 0.1, name="t")
        with pytest.raises(ValueError, match=r"parameter .*teacher.0.weight.* in a buffer .*mean teacher"):
            exact.run([task])


@pytest.mark.net
@pytest.mark.parametrize("make", [TaughtInBuffers, in_layers])
def test_a_mean_teacher_in_buffers_that_is_updated_first_and_read_last_is_exact(make):
    assert_exact(make)


class Updating(Callback):
    def __init__(self, module):
        self.module = module

    def on_step(self, report):
        self.module.update()


@pytest.mark.net
def test_a_mean_teacher_that_a_callback_updates_is_exact():
    torch.manual_seed(3)
    module, data = TaughtBetween(), batches()
    plain = copy.deepcopy(module)
    task = ModelTask(module, F.mse_loss, data, 0.1, name="t", callbacks=[Updating(module)])
    report = exact.run([task])
    found = reference.train(plain, F.mse_loss, data, seed=report.tasks["t"].seed, lr=0.1, on_step=plain.update)
    assert report.tasks["t"].losses == found.losses
    exact.assert_same_state(zoo.state(module), zoo.state(plain))
