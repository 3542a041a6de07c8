"""An optimizer is exact, or is refused before any work: what it draws, what it keeps, what it couples."""

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask
from partitioners import Presharded
from tests import reference
from tests.covering import covering

SEED, LR, EPOCHS = 7, 1e-2, 3


def model(dtypes=(torch.float32,)):
    torch.manual_seed(1)
    layers = [nn.Linear(6, 6).to(dtypes[k % len(dtypes)]) for k in range(4)]
    casts = [As(dtypes[k % len(dtypes)]) for k in range(4)]
    both = [each for pair in zip(casts, layers, strict=True) for each in pair]
    return nn.Sequential(*both, nn.Dropout(0.2), As(torch.float32), nn.Linear(6, 3))


class As(nn.Module):
    """A cast as a layer."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


def loader():
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(6, 6, generator=generator), torch.randint(3, (6,), generator=generator)) for _ in range(4)]


def orchestra(tasks, **options):
    made = ModelOrchestrator(tasks, devices=[EmulatedDevice("1MiB")], **options)
    made.verbose = 0
    return made


def task_of(network, optimizer, *, ends=(3, 6, 11), **options):
    shards = Presharded([*ends[:-1], len(network)])
    return ModelTask(
        network,
        F.cross_entropy,
        loader(),
        LR,
        EPOCHS,
        name="a",
        optimizer=optimizer,
        seed=SEED,
        partitioner=shards,
        **options,
    )


def assert_plain(optimizer, *, prepare=lambda network: None, dtypes=(torch.float32,), ends=(3, 6, 11), **options):
    """Train by shards and in plain PyTorch: the same losses and weights, bit for bit."""
    network, plain = model(dtypes), model(dtypes)
    for each in (network, plain):
        prepare(each)
    report = orchestra([task_of(network, optimizer, ends=ends, **options)]).train_models().tasks["a"]
    for name in ("optimizer_scope", "early_release", "max_retries"):
        options.pop(name, None)
    result = reference.train(
        plain, F.cross_entropy, loader(), seed=SEED, lr=LR, epochs=EPOCHS, optimizer=optimizer, **options
    )
    assert report.losses == result.losses
    assert_same_weights(network, plain)


def assert_same_weights(ours, theirs):
    for (name, value), expected in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name


def assert_refused(optimizer, match, **options):
    """Refused by `generate()`, naming the task; weights, and what the user draws next, are as they were."""
    network = model()
    before, states = copy.deepcopy(network), (torch.get_rng_state(), random.getstate())
    made = orchestra([task_of(network, optimizer, **options)])
    with pytest.raises(ValueError, match=f"^a: .*{match}"):
        made.generate()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert_same_weights(network, before)


class Each(torch.optim.Optimizer):
    """Steps each parameter by `change`, which may keep what it likes where it likes."""

    def __init__(self, params, lr, change, **options):
        super().__init__(params, {"lr": lr, **options})
        self.change = change
        self.calls = 0
        self._hidden = 0
        self.table = {"k": [0]}
        self.generator = torch.Generator().manual_seed(3)
        self.python = random.Random(4)
        self.numpy = np.random.default_rng(5)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.change(self, group, parameter)


def each(change, **options):
    return lambda params, lr: Each(params, lr, change, **options)


def plainly(self, group, p):
    p.sub_(p.grad, alpha=group["lr"])


# -- draws

DRAWS = {
    "randn_like": lambda p: torch.randn_like(p),
    "in place": lambda p: torch.empty_like(p).normal_(),
    "dropout": lambda p: F.dropout(p),
    "bernoulli": lambda p: torch.bernoulli(torch.full_like(p, 0.5)),
    "given the default generator": lambda p: torch.randn(p.shape, generator=torch.default_generator),
    "random": lambda p: random.random(),
    "numpy": lambda p: float(np.random.rand()),
}


@pytest.mark.parametrize("optimizer_scope", ["shard", "task"])
@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.rest
def test_an_optimizer_that_draws_is_refused(name, optimizer_scope):
    def sgld(self, group, p):
        p.sub_(p.grad + 0.1 * DRAWS[name](p), alpha=group["lr"])

    assert_refused(each(sgld), "optimizer: .*Each .* random numbers", optimizer_scope=optimizer_scope)


def owned(self, group, p):
    p.sub_(p.grad + 0.1 * torch.randn(p.shape, generator=self.generator), alpha=group["lr"])


def test_draws_from_a_generator_of_its_own_are_exact_for_the_whole_task():
    assert_plain(each(owned), optimizer_scope="task")


@pytest.mark.rest
def test_draws_from_a_generator_of_its_own_are_refused_shard_by_shard():
    assert_refused(each(owned), "generator.*optimizer_scope='task'")


def drawing_from_outside():
    generator = torch.Generator().manual_seed(9)

    def change(self, group, p):
        p.sub_(p.grad + 0.1 * torch.randn(p.shape, generator=generator), alpha=group["lr"])

    return each(change)


@pytest.mark.rest
@pytest.mark.parametrize("scope", ["shard", "task"])
def test_a_generator_outside_is_refused(scope):
    assert_refused(drawing_from_outside(), "random numbers", optimizer_scope=scope)


def noise_on(*names):
    def prepare(network):
        for name in names:
            own = torch.Generator().manual_seed(len(name))
            network.get_parameter(name).register_hook(lambda g, own=own: g + torch.randn(g.shape, generator=own))

    return prepare


@pytest.mark.rest
def test_hooks_with_a_generator_each_are_exact():
    assert_plain(torch.optim.SGD, prepare=noise_on("1.weight", "5.bias"))


# -- what is kept outside of each parameter's state


class Keeping:
    """Steps of `Each` that keep something outside of each parameter's state, or look at other parameters."""

    def count_in_global(self, group, p):
        k = self.state["global"]["k"] = self.state["global"].get("k", 0) + 1
        p.sub_(p.grad, alpha=group["lr"] / k)

    def count_in_group(self, group, p):
        group["k"] = group.get("k", 0) + 1
        p.sub_(p.grad, alpha=group["lr"] / group["k"])

    def count_on_itself(self, group, p):
        self.calls += 1
        p.sub_(p.grad, alpha=group["lr"] / self.calls)

    def count_in_private(self, group, p):
        self._hidden += 1
        p.sub_(p.grad, alpha=group["lr"] / self._hidden)

    def count_in_a_table(self, group, p):
        self.table["k"][0] += 1
        p.sub_(p.grad, alpha=group["lr"] / self.table["k"][0])

    def count_that_matters_late(self, group, p):
        self._hidden += 1
        p.sub_(p.grad, alpha=group["lr"] * (2 if self._hidden > 40 else 1))

    def tensor_in_group(self, group, p):
        group["scale"].mul_(0.99)
        p.sub_(p.grad * group["scale"] * group["lr"])

    def first_of_the_group(self, group, p):
        first = self.state[group["params"][0]]
        if p is group["params"][0]:
            first["step"] = first.get("step", 0) + 1
        p.sub_(p.grad, alpha=group["lr"] / first["step"])

    def python_random(self, group, p):
        p.sub_(p.grad, alpha=group["lr"] * self.python.random())

    def numpy_random(self, group, p):
        p.sub_(p.grad, alpha=group["lr"] * float(self.numpy.random()))

    def by_all_gradients(self, group, p):
        norm = torch.stack([other.grad.norm() for other in group["params"] if other.grad is not None]).norm()
        p.sub_(p.grad, alpha=group["lr"] / max(1.0, norm.item()))

    def by_the_one_before(self, group, p):
        index = next(k for k, other in enumerate(group["params"]) if other is p)
        p.sub_(p.grad + group["params"][index - 1].mean(), alpha=group["lr"])

    def by_order(self, group, p):
        index = next(k for k, other in enumerate(group["params"]) if other is p)
        p.sub_(p.grad, alpha=group["lr"] / (index + 1))


KEEPING = {name: each for name, each in vars(Keeping).items() if callable(each)}


def keeping(name):
    return lambda params, lr: Each(params, lr, KEEPING[name], scale=torch.tensor(1.0))


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.rest
def test_what_shards_would_change_is_refused_shard_by_shard(name):
    assert_refused(keeping(name), "Each .*optimizer_scope='task'")


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.rest
def test_and_is_exact_for_the_whole_task(name, max_grad_norm):
    assert_plain(keeping(name), optimizer_scope="task", max_grad_norm=max_grad_norm)


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, as they are written."""

    def __init__(self, inner, k=5, alpha=0.5):
        self.optimizer, self.k, self.alpha = inner, k, alpha
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        for group in self.param_groups:
            group["counter"] = 0

    def step(self, closure=None):
        self.optimizer.step()
        with torch.no_grad():
            for group in self.param_groups:
                if group["counter"] == 0:
                    for p in group["params"]:
                        slow = self.state[p].setdefault("slow", p.detach().clone())
                        slow.add_(p - slow, alpha=self.alpha)
                        p.copy_(slow)
                group["counter"] = (group["counter"] + 1) % self.k


class Wrapped(Lookahead):
    """As above, without a counter: everything lies in states of parameters, the inner optimizer's its own."""

    def step(self, closure=None):
        self.optimizer.step()


def lookahead(params, lr):
    return Lookahead(torch.optim.AdamW(params, lr=lr))


def wrapped(params, lr):
    return Wrapped(torch.optim.SGD(params, lr=lr))


@pytest.mark.parametrize("optimizer", [lookahead, wrapped])
@pytest.mark.rest
def test_an_optimizer_around_another_is_refused_shard_by_shard_and_exact_for_the_whole_task(optimizer):
    assert_refused(optimizer, "optimizer_scope='task'")
    assert_plain(optimizer, optimizer_scope="task")


class Sam(torch.optim.SGD):
    """Wants a closure, and does not say so in its signature."""

    def step(self, closure=None):
        assert closure is not None, "SAM requires closure"


@pytest.mark.parametrize(
    ("optimizer", "match"),
    [(Sam, "SAM requires closure"), (torch.optim.SparseAdam, "dense gradients"), (torch.optim.LBFGS, "closure")],
)
@pytest.mark.rest
def test_what_cannot_step_from_gradients_is_refused(optimizer, match):
    with pytest.raises(ValueError, match=match):
        orchestra([task_of(model(), optimizer)]).generate()


class Decaying(torch.optim.Optimizer):
    """Decays what received no gradient, too."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])


class Sometimes(nn.Linear):
    """Uses its bias for some batches only."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias if x[0, 0] > 0 else None)


@pytest.mark.rest
@covering(
    options=[{}, {"optimizer_scope": "task"}, {"early_release": True}, {"max_retries": 1}],
    accumulation_steps=[1, 2],
    strength=1,
)
def test_an_optimizer_sees_parameters_without_a_gradient(options, accumulation_steps):
    def prepare(network):
        for k in (1, 3, 5):
            network[k].__class__ = Sometimes

    assert_plain(Decaying, prepare=prepare, accumulation_steps=accumulation_steps, **options)


def hooked(params, lr):
    optimizer = torch.optim.SGD(params, lr=lr)
    optimizer.register_step_post_hook(
        lambda each, *_: [p.data.clamp_(-0.3, 0.3) for p in each.param_groups[0]["params"]]
    )
    return optimizer


@pytest.mark.rest
def test_step_hooks_are_called_once_a_step_or_refused():
    assert_refused(hooked, "SGD has step hooks.*optimizer_scope='task'")
    assert_plain(hooked, optimizer_scope="task")


@pytest.mark.rest
def test_hooks_of_all_optimizers_are_refused_shard_by_shard():
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        assert_refused(torch.optim.SGD, "SGD has step hooks")
    finally:
        handle.remove()


@pytest.mark.rest
def test_an_optimizer_over_the_models_own_parameters_is_tried_too():
    network = model()
    with pytest.raises(ValueError, match=r"^a: optimizer: Each keeps state .*generator"):
        orchestra([task_of(network, lambda _, lr: each(owned)(network.parameters(), lr))]).generate()


def rebinding(self, group, p):
    p.data = p.data - group["lr"] * p.grad


EXACT = {
    "own, which puts weights elsewhere": each(rebinding),
    "a tensor as learning rate": lambda params, lr: torch.optim.Adam(params, lr=torch.tensor(lr)),
    "a tensor as learning rate, foreach": lambda p, lr: torch.optim.AdamW(p, lr=torch.tensor(lr), foreach=False),
    "maximize": lambda params, lr: torch.optim.AdamW(params, lr=lr, maximize=True),
    "own, plain": each(plainly),
    "own, with a tensor of the group that is read": lambda p, lr: Each(p, lr, plainly, scale=torch.tensor(2.0)),
}


@covering(
    name=list(EXACT),
    options=[{}, {"optimizer_scope": "task"}, {"early_release": True}, {"max_retries": 1}],
    schedule=[None, partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=12)],
    strength=1,
)
def test_what_is_exact_both_ways(name, options, schedule):
    if schedule is not None and name.startswith("own"):
        schedule = partial(lr_scheduler.StepLR, step_size=2)
    assert_plain(EXACT[name], lr_scheduler=schedule, **options)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_weights_that_an_optimizer_puts_elsewhere_are_taken_back_after_a_retry_too(precision):
    tries = []

    def change(self, group, p):
        rebinding(self, group, p)
        tries.append(0)
        if len(tries) == 150:
            raise RuntimeError("once")

    assert_plain_narrow(each(change), each(rebinding), precision)
    assert len(tries) > 150


def assert_plain_narrow(optimizer, plainly, precision):
    losses = []
    for factory, options in ((optimizer, {"max_retries": 1}), (plainly, {"optimizer_scope": "task"})):
        network = nn.Sequential(*(layer for layer in model() if not isinstance(layer, As)))
        task = task_of(network, factory, ends=(2, 6), precision=precision, **options)
        report = orchestra([task]).train_models().tasks["a"]
        assert report.status == "finished", report.error
        losses.append((report.losses, [p.detach().clone() for p in network.parameters()]))
    assert losses[0][0] == losses[1][0]
    assert all(map(torch.equal, losses[0][1], losses[1][1]))


# -- clipping

MIXED = {
    "three types": (torch.float32, torch.float64, torch.bfloat16),
    "double first": (torch.float64, torch.float32),
    "narrow and single": (torch.bfloat16, torch.float32, torch.float64),
    "double alone": (torch.float64,),
    "single and bfloat16": (torch.float32, torch.bfloat16),
}


@covering(dtypes=list(MIXED), ends=[(11,), (3, 6, 11), tuple(range(1, 12))], max_grad_norm=[0.05, 0.5, 1e3], strength=1)
def test_gradients_of_several_types_are_clipped_as_torch_does_it(dtypes, ends, max_grad_norm):
    assert_plain(torch.optim.SGD, dtypes=MIXED[dtypes], ends=ends, max_grad_norm=max_grad_norm)
