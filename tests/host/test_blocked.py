"""A host update taken in pieces gives the bits of the plain way, for every optimizer of torch and around it."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hydra_engine.host import blocked
from hydra_engine.host.blocked import NarrowUpdate, part_of, step_narrow

SMALL_CHUNK = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # what crosses the link, of one parameter after the other
NUM_STEPS = 4

VARIANTS = {
    "ASGD": [{}, {"weight_decay": 0.1, "t0": 1, "lambd": 0.01}],
    "Adadelta": [{}, {"weight_decay": 0.1}],
    "Adagrad": [{}, {"weight_decay": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}],
    "Adam": [{}, {"weight_decay": 0.1, "amsgrad": True}],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}],
    "Adamax": [{}, {"weight_decay": 0.1}],
    "NAdam": [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{"betas": (0.9, 0.5)}, {"weight_decay": 0.1}],  # rectified from the second step on, and not yet
    "RMSprop": [{}, {"weight_decay": 0.1, "momentum": 0.9, "centered": True}],
    "Rprop": [{}, {"maximize": True}],
    "SGD": [
        {},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.1, "maximize": True},
    ],
}
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")


def all_optimizers():
    for name, variants in VARIANTS.items():
        for options in variants:
            for how in ({}, {"foreach": True}, {"fused": True}) if name in FUSED else ({}, {"foreach": True}):
                described = ", ".join(f"{key}={value}" for key, value in {**options, **how}.items())
                yield pytest.param(name, {**options, **how}, id=f"{name}({described})")


def parameters():
    """Of every shape and layout: one that fits a block, several blocks with a rest, one element, none."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (3 * SMALL_CHUNK + 17,), (), (0,), (33, 29), (1, 300), (7,), (2 * SMALL_CHUNK,), (300, 1)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    values.append(torch.randn(8, 16, 3, 5, generator=generator).contiguous(memory_format=torch.channels_last))
    values.append(torch.randn(31, 40, generator=generator).t())
    values.append(torch.randn(40, 31, generator=generator)[:, :30])  # with gaps
    return [nn.Parameter(value) for value in values]


def gradients_of(step, values):
    """The same for both sides, laid out like their parameters; now and then a parameter receives none."""
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.empty_like(p, dtype=DTYPES[k % 3]).normal_(0, 1, generator=generator) for k, p in enumerate(values)]
    return [None if step % 4 == 2 and k % 5 == 1 else gradient for k, gradient in enumerate(drawn)]


def scale(gradient):
    gradient.mul_(0.37)


def groups(values):
    """Every third parameter with options of its own."""
    mine = [p for k, p in enumerate(values) if k % 3 == 0]
    others = [p for k, p in enumerate(values) if k % 3 != 0]
    return [{"params": others}, {"params": mine, "lr": 0.003, "weight_decay": 0.01}]


def plain_step(optimizer, updates, finish_gradient):
    for update in updates:
        update.parameter.grad = update.gradient.to(update.parameter.dtype)
        if finish_gradient is not None:
            finish_gradient(update.parameter.grad)
    optimizer.step()
    with torch.no_grad():
        for update in updates:
            update.parameter.grad = None
            if update.narrow is not None:
                update.narrow.copy_(update.parameter)


def narrow_copies(values):
    return [None if k % 3 == 2 else p.detach().to(DTYPES[k % 3]) for k, p in enumerate(values)]


def assert_same_state(ours, theirs):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        assert list(ours["state"][index]) == list(state)
        for key, value in state.items():
            mine = ours["state"][index][key]
            assert mine.dtype == value.dtype, (index, key)
            assert mine.stride() == value.stride(), (index, key)
            assert torch.equal(mine, value), (index, key)


def assert_bits_are_plain(make, values=parameters, finish_gradient=None, num_steps=NUM_STEPS):
    """Weights, narrow copies and state after each of some steps on what `values()` makes, twice."""
    ours, theirs = values(), values()
    optimizers = make(ours), make(theirs)
    narrows = narrow_copies(ours), narrow_copies(theirs)
    for step in range(num_steps):
        for optimizer, own, narrow, way in zip(
            optimizers, (ours, theirs), narrows, (step_narrow, plain_step), strict=True
        ):
            gradients = gradients_of(step, own)
            updates = [NarrowUpdate(*each) for each in zip(own, gradients, narrow, strict=True) if each[1] is not None]
            way(optimizer, updates, finish_gradient)
        for k, (mine, plain) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(mine, plain), (step, k)
            assert mine.grad is None
            if narrows[0][k] is not None:
                assert torch.equal(narrows[0][k], narrows[1][k]), (step, k)
                assert torch.equal(narrows[0][k], mine.to(DTYPES[k % 3])), (step, k)
        assert_same_state(*optimizers)


@pytest.fixture
def pieces(monkeypatch):
    """The parameters that are stepped in pieces, by size; blocks are small enough to have many."""
    found = []
    real = blocked._step_in_pieces

    def spy(optimizer, group, update, *arguments):
        found.append(update.parameter.numel())
        real(optimizer, group, update, *arguments)

    monkeypatch.setattr(blocked, "_step_in_pieces", spy)
    monkeypatch.setattr(blocked, "CHUNK", SMALL_CHUNK)
    monkeypatch.setattr(blocked, "KERNEL_CHUNK", SMALL_CHUNK)
    return found


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("name", "options"), list(all_optimizers()))
def test_every_optimizer_of_torch(name, options, pieces):
    finish_gradient = scale if options else None
    assert_bits_are_plain(
        lambda own: getattr(torch.optim, name)(own, lr=0.01, **options), finish_gradient=finish_gradient
    )
    has_kernel = name in ("Adam", "AdamW") and "fused" in options
    cut = {p.numel() for p in parameters() if (has_kernel and p.dim() > 0) or p.numel() > SMALL_CHUNK}
    assert set(pieces) == cut - {40 * 30}  # all but the one with gaps


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "RMSprop"])
def test_groups_keep_their_options(name, pieces):
    for how in [{}, {"foreach": True}, *([{"fused": True}] if name in FUSED else [])]:
        assert_bits_are_plain(
            lambda own, how=how: getattr(torch.optim, name)(groups(own), lr=0.01, **how), finish_gradient=scale
        )
    assert pieces


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_blocks_of_real_size(name, how):
    options = {"momentum": 0.9, "nesterov": True} if name == "SGD" else {"amsgrad": True}
    assert_bits_are_plain(
        lambda own: getattr(torch.optim, name)(own, lr=0.01, **how, **options),
        lambda: [nn.Parameter(torch.linspace(-1, 1, n)) for n in (blocked.CHUNK + 12345,)],
        num_steps=2,
    )


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_several_threads_step_whole_parameters(how, num_threads, pieces):
    with threads(num_threads):
        assert_bits_are_plain(
            lambda own: torch.optim.AdamW(own, lr=0.01, **how),
            lambda: [nn.Parameter(torch.linspace(-1, 1, n)) for n in (3 * 2**15 + 123, 7, 300)],
            num_steps=2,
        )
    assert not pieces


def test_some_parameters_are_updated_while_others_of_their_groups_are_not(pieces):
    """As a shard's update does with the optimizer of its task."""

    def shard_by_shard(optimizer, updates, finish_gradient):
        for first in range(3):
            mine = updates[first::3]
            owned = {id(update.parameter) for update in mine}
            restricted = [
                {**group, "params": [p for p in group["params"] if id(p) in owned]} for group in optimizer.param_groups
            ]
            step_narrow(part_of(optimizer, restricted), mine, finish_gradient)

    ours, theirs = parameters(), parameters()
    optimizers = [torch.optim.AdamW(groups(own), lr=0.01, fused=True) for own in (ours, theirs)]
    for step in range(NUM_STEPS):
        for optimizer, own, way in zip(optimizers, (ours, theirs), (shard_by_shard, plain_step), strict=True):
            drawn = zip(own, gradients_of(step, own), strict=True)
            way(optimizer, [NarrowUpdate(p, g, None) for p, g in drawn if g is not None], None)
    for mine, plain in zip(ours, theirs, strict=True):
        assert torch.equal(mine, plain)
    for mine, plain in zip(ours, theirs, strict=True):
        assert optimizers[0].state[mine].keys() == optimizers[1].state[plain].keys()
        for key, value in optimizers[1].state[plain].items():
            assert torch.equal(optimizers[0].state[mine][key], value), key
    assert pieces


class Mine(torch.optim.AdamW):
    """A user's own, which may do anything."""


class Coupled(torch.optim.Optimizer):
    """Steps each parameter by all gradients together."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = sum(p.grad.abs().sum() for p in own)
        for p in own:
            p.sub_(p.grad / total, alpha=self.param_groups[0]["lr"])


WHOLE = {
    "Adafactor": lambda own: torch.optim.Adafactor(own, lr=0.01),
    "Muon": lambda own: torch.optim.Muon([p for p in own if p.dim() == 2], lr=0.01),
    "a subclass": lambda own: Mine(own, lr=0.01),
    "one that couples": lambda own: Coupled(own, lr=0.01),
    "a tensor as lr": lambda own: torch.optim.AdamW(own, lr=torch.tensor(0.01)),
    "tensors as betas": lambda own: torch.optim.AdamW(own, betas=(torch.tensor(0.9), torch.tensor(0.99))),
    "a tensor as lr, fused": lambda own: torch.optim.AdamW(own, lr=torch.tensor(0.01), fused=True),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_not_known_to_be_elementwise_is_stepped_whole(name, pieces):
    assert_bits_are_plain(
        WHOLE[name],
        lambda: [p for p in parameters() if p.numel() and (p.dim() == 2 or name != "Muon")],
        scale,
    )
    assert not pieces


def scheduled(own):
    optimizer = torch.optim.AdamW(own, lr=0.01)
    optimizer.scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)  # puts a `step` of its own on the instance
    return optimizer


def test_a_step_of_the_instances_own_is_called(pieces):
    assert_bits_are_plain(scheduled)
    assert not pieces


@pytest.mark.parametrize("where", ["pre", "post", "global pre", "global post"])
def test_hooks_are_called_once_a_step(where, pieces):
    values, calls = parameters(), []
    optimizer = torch.optim.AdamW(values, lr=0.01)
    updates = [NarrowUpdate(p, torch.ones_like(p), None) for p in values]
    register = {
        "pre": optimizer.register_step_pre_hook,
        "post": optimizer.register_step_post_hook,
        "global pre": register_optimizer_step_pre_hook,
        "global post": register_optimizer_step_post_hook,
    }[where]
    handle = register(lambda *arguments: calls.append(where))
    try:
        step_narrow(optimizer, updates, None)
        step_narrow(optimizer, updates, None)
    finally:
        handle.remove()
    assert calls == [where] * 2
    assert not pieces
    step_narrow(optimizer, updates, None)
    assert len(calls) == 2
    assert pieces


def test_parameters_that_are_not_float32_are_stepped_whole(pieces):
    generator = torch.Generator().manual_seed(0)
    values = [
        nn.Parameter(torch.randn(700, generator=generator, dtype=torch.float64)),
        nn.Parameter(torch.randn(700, generator=generator, dtype=torch.complex64)),
        nn.Parameter(torch.randn(700, generator=generator).bfloat16()),
    ]
    gradients = [torch.ones_like(p) * 0.5 for p in values]
    theirs = copy.deepcopy(values)
    optimizers = torch.optim.AdamW(values), torch.optim.AdamW(theirs)
    for _ in range(NUM_STEPS):
        step_narrow(optimizers[0], [NarrowUpdate(p, g, None) for p, g in zip(values, gradients, strict=True)], None)
        plain_step(optimizers[1], [NarrowUpdate(p, g, None) for p, g in zip(theirs, gradients, strict=True)], None)
    for mine, plain in zip(values, theirs, strict=True):
        assert torch.equal(mine, plain)
    assert_same_state(*optimizers)
    assert not pieces


def test_a_gradient_of_another_layout_is_stepped_whole(pieces):
    parameter = nn.Parameter(torch.linspace(-1, 1, 900).view(30, 30))
    plain = copy.deepcopy(parameter)
    gradient = torch.linspace(-1, 2, 900).view(30, 30).t().bfloat16()
    optimizers = torch.optim.AdamW([parameter]), torch.optim.AdamW([plain])
    for _ in range(3):
        step_narrow(optimizers[0], [NarrowUpdate(parameter, gradient, None)], None)
        plain_step(optimizers[1], [NarrowUpdate(plain, gradient, None)], None)
    assert torch.equal(parameter, plain)
    assert not pieces


def test_a_parameter_and_a_gradient_with_the_same_gaps_are_stepped_whole(pieces):
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 1000).view(100, 10)[:, :9]) for _ in range(2))
    gradient = torch.linspace(-1, 2, 1000).view(100, 10)[:, :9]
    for own, way in ((ours, step_narrow), (theirs, plain_step)):
        way(torch.optim.SGD([own], lr=0.1), [NarrowUpdate(own, gradient, None)], None)
    assert torch.equal(ours, theirs)
    assert not pieces


def test_a_sparse_gradient_is_stepped_whole(pieces):
    parameter = nn.Parameter(torch.linspace(-1, 1, 900).view(90, 10))
    plain = copy.deepcopy(parameter)
    gradient = torch.sparse_coo_tensor([[3, 80]], torch.ones(2, 10), (90, 10), check_invariants=True)
    optimizers = torch.optim.SGD([parameter], lr=0.1), torch.optim.SGD([plain], lr=0.1)
    for _ in range(2):
        step_narrow(optimizers[0], [NarrowUpdate(parameter, gradient, None)], None)
        plain_step(optimizers[1], [NarrowUpdate(plain, gradient, None)], None)
    assert torch.equal(parameter, plain)
    assert not pieces


def test_momentum_may_begin_later(pieces):
    """State that the optimizer makes when it is first wanted."""

    def step_both():
        for optimizer, own, way in zip(optimizers, (ours, theirs), (step_narrow, plain_step), strict=True):
            way(optimizer, [NarrowUpdate(own, torch.linspace(0, 1, 900).bfloat16(), None)], None)

    ours = nn.Parameter(torch.linspace(-1, 1, 900))
    theirs = copy.deepcopy(ours)
    optimizers = torch.optim.SGD([ours], lr=0.1), torch.optim.SGD([theirs], lr=0.1)
    for momentum in (0, 0.9, 0.9, 0):
        for optimizer in optimizers:
            optimizer.param_groups[0]["momentum"] = momentum
        step_both()
        assert torch.equal(ours, theirs)
        assert_same_state(*optimizers)
    assert len(pieces) == 3


def test_each_element_is_finished_once_in_float32(pieces):
    seen = []
    values = parameters()
    optimizer = torch.optim.AdamW(values, fused=True)
    updates = [NarrowUpdate(p, torch.ones_like(p, dtype=torch.bfloat16), None) for p in values]
    for _ in range(2):
        step_narrow(optimizer, updates, lambda gradient: seen.append((gradient.numel(), gradient.dtype)))
    assert {dtype for _, dtype in seen} == {torch.float32}
    assert sum(count for count, _ in seen) == 2 * sum(p.numel() for p in values)
    assert all(torch.equal(update.gradient, torch.ones_like(update.gradient)) for update in updates)


def test_counters_advance_once_a_step(pieces):
    for how in ({}, {"fused": True}, {"foreach": True}):
        parameter = nn.Parameter(torch.linspace(-1, 1, 10 * SMALL_CHUNK))
        optimizer = torch.optim.NAdam([parameter]) if how == {} else torch.optim.Adam([parameter], **how)
        counter = None
        for step in range(1, 5):
            step_narrow(optimizer, [NarrowUpdate(parameter, torch.ones_like(parameter), None)], None)
            assert optimizer.state[parameter]["step"] == step
            counter = counter if counter is not None else optimizer.state[parameter]["step"]
            assert optimizer.state[parameter]["step"] is counter
    assert len(pieces) == 9


def test_no_gradient_is_left_behind_by_a_failure(pieces):
    def fail(gradient):
        raise RuntimeError("no")

    values = parameters()
    for make in (torch.optim.AdamW, torch.optim.Adafactor):
        with pytest.raises(RuntimeError, match="no"):
            step_narrow(make(values), [NarrowUpdate(p, torch.ones_like(p), None) for p in values], fail)
        assert all(p.grad is None for p in values)


def test_nothing_to_update():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(3))])
    step_narrow(optimizer, [], None)
    assert not optimizer.state
