"""A task's own generator gives the draws of torch.manual_seed, and the process-wide ones are left alone."""

import random
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_engine import stream_seed
from hydra_engine.data.draws import _KEY, Redirected, register_draws
from hydra_engine.data.streams import (
    GLOBAL_GENERATORS,
    RandomState,
    Stream,
    TaskGenerator,
    capture,
    install,
    installed,
    seeded,
)

PATIENCE_S = 30


def lstm_with_dropout():
    lstm = nn.LSTM(3, 4, num_layers=3, dropout=0.5)
    with torch.no_grad():
        for parameter in lstm.parameters():
            parameter.fill_(0.1)
    return lstm(torch.ones(2, 2, 3))[0]


def attention_with_dropout():
    q = torch.ones(2, 2, 5, 4, requires_grad=True)
    return F.scaled_dot_product_attention(q, q * 2, q * 3, dropout_p=0.4)


# Everything that draws from torch's CPU generator, as far as we know.
DRAWS = {
    "rand": lambda: torch.rand(3),
    "rand into a tensor": lambda: torch.rand(3, out=torch.empty(3)),
    "rand of doubles": lambda: torch.rand(3, dtype=torch.float64),
    "rand_like": lambda: torch.rand_like(torch.empty(2, 3)),
    "randn": lambda: torch.randn(3),
    "randn, many": lambda: torch.randn(100),
    "randn_like": lambda: torch.randn_like(torch.empty(17)),
    "complex randn": lambda: torch.randn(3, dtype=torch.complex64),
    "randint": lambda: torch.randint(100, (5,)),
    "randint from a low": lambda: torch.randint(-5, 100, (5,)),
    "randint_like": lambda: torch.randint_like(torch.empty(4), 50),
    "randint_like from a low": lambda: torch.randint_like(torch.empty(4), 10, 50),
    "randperm": lambda: torch.randperm(20),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.4)),
    "bernoulli of a number": lambda: torch.bernoulli(torch.empty(9), 0.4),
    "bernoulli_": lambda: torch.empty(9).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda: torch.empty(9).bernoulli_(torch.full((9,), 0.6)),
    "multinomial": lambda: torch.multinomial(torch.tensor([1.0, 2.0, 3.0]), 2),
    "multinomial with replacement": lambda: torch.multinomial(torch.tensor([1.0, 2.0, 3.0]), 7, replacement=True),
    "normal": lambda: torch.normal(1.0, 2.0, (4,)),
    "normal of tensors": lambda: torch.normal(torch.zeros(4), torch.ones(4)),
    "normal of a tensor and a number": lambda: torch.normal(torch.zeros(4), 2.0),
    "normal of a number and a tensor": lambda: torch.normal(0.0, torch.ones(4)),
    "poisson": lambda: torch.poisson(torch.full((5,), 4.0)),
    "binomial": lambda: torch.binomial(torch.full((5,), 9.0), torch.full((5,), 0.5)),
    "uniform_": lambda: torch.empty(5).uniform_(-1, 1),
    "normal_": lambda: torch.empty(5).normal_(),
    "exponential_": lambda: torch.empty(5).exponential_(),
    "cauchy_": lambda: torch.empty(5).cauchy_(),
    "log_normal_": lambda: torch.empty(5).log_normal_(),
    "geometric_": lambda: torch.empty(5).geometric_(0.5),
    "random_": lambda: torch.empty(5).random_(),
    "random_ to": lambda: torch.empty(5).random_(10),
    "random_ from": lambda: torch.empty(5).random_(3, 10),
    "dropout": lambda: F.dropout(torch.ones(20), 0.3),
    "dropout in place": lambda: F.dropout(torch.ones(20), 0.3, inplace=True),
    "dropout in a graph": lambda: F.dropout(torch.ones(20, requires_grad=True), 0.3),
    "alpha_dropout": lambda: F.alpha_dropout(torch.ones(20), 0.3, training=True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(torch.ones(4, 5, 2), 0.3, training=True),
    "dropout1d": lambda: F.dropout1d(torch.ones(4, 5, 2), 0.3),
    "dropout2d": lambda: F.dropout2d(torch.ones(4, 5, 2, 2), 0.3),
    "dropout3d": lambda: F.dropout3d(torch.ones(4, 5, 2, 2, 2), 0.3),
    "native_dropout": lambda: torch.native_dropout(torch.ones(20), 0.3, True)[0],
    "rrelu": lambda: F.rrelu(-torch.ones(9), training=True),
    "rrelu in place": lambda: F.rrelu(-torch.ones(9), training=True, inplace=True),
    "rrelu in a graph": lambda: F.rrelu(-torch.ones(9, requires_grad=True), training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(torch.zeros(7)),
    "fractional_max_pool2d": lambda: F.fractional_max_pool2d(torch.rand(1, 2, 9, 9), 2, output_size=4),
    "attention with dropout": attention_with_dropout,
    "lstm with dropout": lstm_with_dropout,
    "transformer layer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3)(torch.ones(3, 2, 4)),
    "a layer's initialisation": lambda: nn.Linear(3, 4).weight,
    "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(9)),
    "orthogonal_": lambda: nn.init.orthogonal_(torch.empty(3, 3)),
    "kaiming_normal_": lambda: nn.init.kaiming_normal_(torch.empty(3, 3)),
    "normal distribution": lambda: torch.distributions.Normal(0.0, 1.0).sample((3,)),
    "gamma distribution": lambda: torch.distributions.Gamma(torch.ones(3), torch.ones(3)).sample(),
    "dirichlet distribution": lambda: torch.distributions.Dirichlet(torch.ones(3)).rsample(),
    "beta distribution": lambda: torch.distributions.Beta(torch.ones(3), torch.ones(3)).rsample(),
    "categorical distribution": lambda: torch.distributions.Categorical(torch.ones(5)).sample((9,)),
    "svd_lowrank": lambda: torch.svd_lowrank(torch.eye(6), 2)[1],
    "under no_grad": torch.no_grad()(lambda: torch.rand(3) + F.dropout(torch.ones(3))),
    "several in a row": lambda: torch.randn(3) + torch.rand(3) + torch.randperm(3) + F.dropout(torch.ones(3)),
}


def own(seed):
    return torch.Generator().manual_seed(seed)


def by_key(start):
    return Redirected(TaskGenerator(start))


# What sends draws to a task's generator: a mode of all operations, or of those alone that may draw.
REDIRECTIONS = {"mode": TaskGenerator, "key": by_key}


@pytest.fixture(params=REDIRECTIONS.values(), ids=REDIRECTIONS)
def redirected(request):
    return request.param


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_redirected_draws_are_those_of_manual_seed_and_leave_the_global_generator_alone(draw):
    torch.manual_seed(7)
    expected, end = [draw(), draw()], torch.get_rng_state()
    torch.manual_seed(99)
    before = torch.get_rng_state()
    for name, redirection in REDIRECTIONS.items():
        generator = own(7)
        with redirection(generator):
            assert all(map(torch.equal, [draw(), draw()], expected)), name
        assert torch.equal(generator.get_state(), end), f"{name}: the stream goes on from the same place"

        start = own(7).get_state()
        with redirection(start) as drawn:
            assert drawn.state is start, "nothing was drawn"
            assert all(map(torch.equal, [draw(), draw()], expected)), name
        assert torch.equal(drawn.state, end), f"{name}: the stream goes on from the same place"
        assert torch.equal(start, own(7).get_state()), f"{name}: what it began with is not written to"
        assert torch.equal(torch.get_rng_state(), before), name


def with_own(generator):
    """Draws that were given a generator, by keyword or by place."""
    return [
        torch.rand(3, generator=generator),
        torch.randperm(9, generator=generator),
        torch.bernoulli(torch.full((9,), 0.5), generator=generator),
        torch.empty(3).normal_(generator=generator),
        torch.multinomial(torch.ones(4), 2, generator=generator),
        torch.poisson(torch.full((5,), 4.0), generator=generator),
        torch.binomial(torch.full((5,), 9.0), torch.full((5,), 0.5), generator=generator),
    ]


def test_what_was_given_a_generator_or_does_not_draw_leaves_the_tasks_alone(redirected):
    expected, task, q = with_own(own(3)), own(7), torch.ones(1, 1, 3, 2)
    with redirected(task):
        assert all(map(torch.equal, with_own(own(3)), expected))
        F.scaled_dot_product_attention(q, q, q)
        F.dropout(torch.ones(3), training=False)
        torch.ones(2) @ torch.ones(2)
    assert torch.equal(task.get_state(), own(7).get_state())


def test_op_that_raises_leaves_the_global_generator_alone(redirected):
    before = torch.get_rng_state()
    with redirected(own(7)), pytest.raises(RuntimeError):
        torch.native_dropout(torch.ones(3), 2.0, True)
    assert torch.equal(torch.get_rng_state(), before)


def test_gradients_are_those_of_the_same_draws(redirected):
    def gradient():
        x = torch.ones(50, requires_grad=True)
        (F.dropout(x, 0.5) * torch.arange(50.0)).sum().backward()
        return x.grad

    torch.manual_seed(7)
    expected = gradient()
    with redirected(own(7)):
        assert torch.equal(gradient(), expected)


def in_threads(num_threads, job):
    """Run job(k) in threads that start together; their results by k."""
    start, results = threading.Barrier(num_threads), {}

    def run(k):
        start.wait(PATIENCE_S)
        results[k] = job(k)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(num_threads)]
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # as many changes of thread as there can be
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    finally:
        sys.setswitchinterval(usual_s)
    assert len(results) == num_threads
    return results


MIXED = ("randn", "native_dropout", "dropout", "native_dropout", "randperm", "attention with dropout")


def test_threads_that_draw_at_once_do_not_disturb_one_another(redirected):
    def draw():
        return [DRAWS[name]() for _ in range(20) for name in MIXED]

    def job(k):
        with redirected(own(k)):
            return draw()

    expected = {}
    for k in range(4):
        torch.manual_seed(k)
        expected[k] = draw()
    torch.manual_seed(99)
    before = torch.get_rng_state()
    results = in_threads(4, job)
    assert all(torch.equal(a, b) for k in range(4) for a, b in zip(results[k], expected[k], strict=True))
    assert torch.equal(torch.get_rng_state(), before)


class Pauses(TorchDispatchMode):
    """Holds a draw up from within, as an outer mode: it sees what the task's generator passes on."""

    def __init__(self, inside, go_on):
        super().__init__()
        self.inside, self.go_on = inside, go_on

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.inside.set()
            assert self.go_on.wait(PATIENCE_S)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("draw", "locks"), [("native_dropout", True), ("randn", False)])
def test_only_an_op_that_takes_no_generator_locks_the_global_one(draw, locks, redirected):
    inside, go_on = threading.Event(), threading.Event()

    def job():
        with Pauses(inside, go_on), redirected(own(7)):
            DRAWS[draw]()

    thread = threading.Thread(target=job)
    thread.start()
    assert inside.wait(PATIENCE_S)
    free = GLOBAL_GENERATORS.is_free
    go_on.set()
    thread.join(PATIENCE_S)
    assert free != locks


@pytest.fixture
def library():
    """Operations that draw in a way which torch does not see: from the global generator, in a kernel of their own."""
    with torch.library._scoped_library("hydra_draws", "DEF") as made:
        made.define("noisy(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
        made.impl("noisy", lambda x: x + torch.rand(3, generator=torch.default_generator), "CPU")
        yield torch.ops.hydra_draws.noisy


def test_op_of_a_library_of_its_own(library, redirected):
    torch.manual_seed(7)
    expected = library(torch.ones(3))
    register_draws()
    before = torch.get_rng_state()
    with redirected(own(7)):
        assert torch.equal(library(torch.ones(3)), expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_of_torch_uses_the_key_that_draws_are_redirected_by():
    """It is private, for torch's own tests: another version may do without it, or use it."""
    register_draws()
    kernels = torch._C._dispatch_get_registrations_for_dispatch_key(_KEY)
    assert "aten::bernoulli_.float" in kernels, f"torch {torch.__version__} redirects no draws"
    for kernel in kernels:
        packet, _, overload = kernel.replace("::", ".").partition(".")[2].partition(".")
        op = getattr(getattr(getattr(torch.ops, kernel.partition("::")[0]), packet), overload or "default")
        assert torch.Tag.nondeterministic_seeded in op.tags, f"torch {torch.__version__} has a kernel of {kernel} there"


def test_what_does_not_draw_passes_no_mode():
    seen = []

    class Sees(TaskGenerator):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_dispatch__(func, types, args, kwargs)

    with Redirected(Sees(own(7))):
        torch.rand(2) @ torch.ones(2)
    assert seen == [torch.ops.aten.rand.default]


def everything():
    """Draws of all three generators."""
    return torch.rand(2).tolist(), random.random(), np.random.rand(2).tolist()


def state_of(seed):
    return RandomState(seeded(seed), random.Random(seed).getstate(), np.random.RandomState(seed).get_state())


def draws_of(seed):
    with torch.random.fork_rng(devices=[]):
        outside = capture()
        install(state_of(seed))
        draws = [everything(), everything()]
        install(outside)
    return draws


def draws_in_turns(seed):
    """Like `draws_of`, of a stream that is installed twice."""
    stream, draws = Stream(state_of(seed)), []
    for _ in range(2):
        with installed(stream):
            draws.append(everything())
    return draws


class TestInstalled:
    def test_process_wide_generators_are_left_alone_by_what_raises(self):
        def draws_and_raises():
            everything()
            raise ValueError("boom")

        before, stream = capture(), Stream(state_of(5))
        with pytest.raises(ValueError, match="boom"), installed(stream):
            draws_and_raises()
        assert capture().same_as(before)
        with installed(stream):
            assert everything() == draws_of(5)[1], "what was drawn before is drawn"

    def test_draws_are_the_streams_and_it_goes_on_in_many_threads(self):
        before = capture()
        assert draws_in_turns(5) == draws_of(5)
        assert in_threads(4, draws_in_turns) == {k: draws_of(k) for k in range(4)}
        assert capture().same_as(before)

    def test_tasks_generator_inside_is_not_the_installed_one(self):
        generator, stream = own(7), Stream(state_of(5))
        with installed(stream), TaskGenerator(generator):
            torch.rand(1)
        assert stream.state.same_as(state_of(5))


class TestRandomState:
    @pytest.mark.parametrize(
        ("draw", "differs", "outside_torch"),
        [
            (lambda: torch.ones(3).sum(), False, False),
            (lambda: torch.rand(1), True, False),
            (random.random, True, True),
            (np.random.rand, True, True),
            (lambda: np.random.standard_normal(), True, True),
        ],
        ids=["no draw", "torch", "random", "numpy", "half of a pair of numpy"],
    )
    def test_any_draw_makes_a_difference_and_no_draw_none(self, draw, differs, outside_torch):
        stream = Stream(state_of(5))
        with installed(stream):
            draw()
        assert stream.state.same_as(state_of(5)) != differs
        assert stream.state.same_outside_torch(state_of(5)) != outside_torch

    def test_half_of_a_pair_of_normal_draws_makes_a_difference(self):
        # numpy.random makes normal draws in pairs, and keeps the second one beside its generator's state.
        stream, states = Stream(state_of(5)), []
        for _ in range(2):
            with installed(stream):
                np.random.standard_normal()
            states.append(stream.state)
        assert not states[0].same_as(states[1])

    def test_seeded_is_the_state_of_manual_seed(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(123)
            assert torch.equal(seeded(123), torch.get_rng_state())


# Results of recorded runs depend on these: they may never change.
GOLDEN_SEEDS = {
    (0, 0, 0): 9044811311333822937,
    (0, 0, 1): 322563471726601473,
    (0, 1, 0): 5859785910394853115,
    (1, 0, 0): 3110334633933071607,
    (2**63 - 1, 10**6, 7): 6948500698619940989,
}


class TestStreamSeed:
    def test_is_the_golden_number(self):
        assert {key: stream_seed(*key) for key in GOLDEN_SEEDS} == GOLDEN_SEEDS

    def test_is_a_seed_that_torch_takes_and_differs_between_seeds_steps_and_micro_batches(self):
        keys = [(seed, step, m) for seed in (0, 1, 11, 111) for step in range(30) for m in range(12)]
        seeds = {stream_seed(*key) for key in keys}
        assert len(seeds) == len(keys)
        assert all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in seeds)
        torch.Generator().manual_seed(max(seeds))


def test_one_thread_at_a_time_asks_for_torchs_state(monkeypatch):
    """In torch two of them may wait for each other for ever, where a garbage collection lets go of the interpreter."""
    real, inside = torch.default_generator, []
    other = threading.Thread(target=capture)

    def get_state():
        inside.append(threading.current_thread())
        if len(inside) == 1:
            other.start()
            other.join(0.1)
            assert inside == [threading.current_thread()]
        return real.get_state()

    monkeypatch.setattr(torch, "default_generator", SimpleNamespace(get_state=get_state))
    capture()
    other.join()
    assert len(inside) == 2
