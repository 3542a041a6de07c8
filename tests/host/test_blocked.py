"""A host update taken in pieces gives the bits of the plain way, for every optimizer of torch and around it.

Without the native kernel (tests/native/test_update.py), which else makes most of these updates.
"""

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hydra_engine.host import blocked
from hydra_engine.host.blocked import part_of, step_narrow
from hydra_engine.native import NarrowUpdate
from hydra_engine.native.library import VARIABLE
from tests.covering import covering
from tests.host.updates import (
    NUM_STEPS,
    SCALED,
    SMALL_CHUNK,
    assert_bits_are_plain,
    assert_same_state,
    gradients_of,
    groups,
    parameters,
    plain_step,
    threads,
)

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


@pytest.fixture(autouse=True)
def without_the_kernel(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")


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


@pytest.mark.parametrize(("name", "options"), list(all_optimizers()))
def test_every_optimizer_of_torch(name, options, pieces):
    factors = SCALED if options else ()
    assert_bits_are_plain(lambda own: getattr(torch.optim, name)(own, lr=0.01, **options), factors=factors)
    has_kernel = name in ("Adam", "AdamW") and "fused" in options
    cut = {p.numel() for p in parameters() if (has_kernel and p.dim() > 0) or p.numel() > SMALL_CHUNK}
    assert set(pieces) == cut - {40 * 30}  # all but the one with gaps


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "RMSprop"])
def test_groups_keep_their_options(name, pieces):
    for how in [{}, {"foreach": True}, *([{"fused": True}] if name in FUSED else [])]:
        assert_bits_are_plain(
            lambda own, how=how: getattr(torch.optim, name)(groups(own), lr=0.01, **how), factors=SCALED
        )
    assert pieces


@covering(strength=1, name=["AdamW", "SGD"], how=[{}, {"foreach": True}, {"fused": True}], ids=str)
def test_blocks_of_real_size(name, how):
    options = {"momentum": 0.9, "nesterov": True} if name == "SGD" else {"amsgrad": True}
    assert_bits_are_plain(
        lambda own: getattr(torch.optim, name)(own, lr=0.01, **how, **options),
        lambda: [nn.Parameter(torch.linspace(-1, 1, n)) for n in (blocked.CHUNK + 12345,)],
        num_steps=2,
    )


@covering(strength=1, how=[{}, {"foreach": True}, {"fused": True}], num_threads=[2, 3], ids=str)
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

    def shard_by_shard(optimizer, updates, factors=()):
        for first in range(3):
            mine = updates[first::3]
            owned = {id(update.parameter) for update in mine}
            restricted = [
                {**group, "params": [p for p in group["params"] if id(p) in owned]} for group in optimizer.param_groups
            ]
            step_narrow(part_of(optimizer, restricted), mine, factors)

    ours, theirs = parameters(), parameters()
    optimizers = [torch.optim.AdamW(groups(own), lr=0.01, fused=True) for own in (ours, theirs)]
    for step in range(NUM_STEPS):
        for optimizer, own, way in zip(optimizers, (ours, theirs), (shard_by_shard, plain_step), strict=True):
            drawn = zip(own, gradients_of(step, own), strict=True)
            way(optimizer, [NarrowUpdate(p, g, None) for p, g in drawn if g is not None])
    assert all(map(torch.equal, ours, theirs))
    assert_same_state(*optimizers)
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
        WHOLE[name], lambda: [p for p in parameters() if p.numel() and (p.dim() == 2 or name != "Muon")], SCALED
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
        step_narrow(optimizer, updates)
        step_narrow(optimizer, updates)
    finally:
        handle.remove()
    assert calls == [where] * 2
    assert not pieces
    step_narrow(optimizer, updates)
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
        step_narrow(optimizers[0], [NarrowUpdate(p, g, None) for p, g in zip(values, gradients, strict=True)])
        plain_step(optimizers[1], [NarrowUpdate(p, g, None) for p, g in zip(theirs, gradients, strict=True)])
    assert all(map(torch.equal, values, theirs))
    assert_same_state(*optimizers)
    assert not pieces


def assert_stepped_whole(pieces, make, values, gradient):
    ours, theirs = nn.Parameter(values), nn.Parameter(values.clone())
    for own, way in ((ours, step_narrow), (theirs, plain_step)):
        optimizer = make([own], lr=0.1)
        for _ in range(3):
            way(optimizer, [NarrowUpdate(own, gradient, None)])
    assert torch.equal(ours, theirs)
    assert not pieces


def test_a_gradient_of_another_layout_or_with_gaps_or_sparse_is_stepped_whole(pieces):
    square = torch.linspace(-1, 1, 900).view(30, 30)
    gaps, same_gaps = (torch.linspace(-1, end, 1000).view(100, 10)[:, :9] for end in (1, 2))
    sparse = torch.sparse_coo_tensor([[3, 80]], torch.ones(2, 10), (90, 10), check_invariants=True)
    assert_stepped_whole(pieces, torch.optim.AdamW, square, (square + 1).t().bfloat16())
    assert_stepped_whole(pieces, torch.optim.SGD, gaps, same_gaps)
    assert_stepped_whole(pieces, torch.optim.SGD, torch.linspace(-1, 1, 900).view(90, 10), sparse)


def test_momentum_may_begin_later(pieces):
    """State that the optimizer makes when it is first wanted."""

    def step_both():
        for optimizer, own, way in zip(optimizers, (ours, theirs), (step_narrow, plain_step), strict=True):
            way(optimizer, [NarrowUpdate(own, torch.linspace(0, 1, 900).bfloat16(), None)])

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


def test_counters_advance_once_a_step(pieces):
    for how in ({}, {"fused": True}, {"foreach": True}):
        parameter = nn.Parameter(torch.linspace(-1, 1, 10 * SMALL_CHUNK))
        optimizer = torch.optim.NAdam([parameter]) if how == {} else torch.optim.Adam([parameter], **how)
        counter = None
        for step in range(1, 5):
            step_narrow(optimizer, [NarrowUpdate(parameter, torch.ones_like(parameter), None)])
            assert optimizer.state[parameter]["step"] == step
            counter = counter if counter is not None else optimizer.state[parameter]["step"]
            assert optimizer.state[parameter]["step"] is counter
    assert len(pieces) == 9


def test_no_gradient_is_left_behind_by_a_failure(pieces):
    values = parameters()
    for make in (torch.optim.AdamW, torch.optim.Adafactor):
        with pytest.raises(TypeError):
            step_narrow(make(values), [NarrowUpdate(p, torch.ones_like(p), None) for p in values], [object()])
        assert all(p.grad is None for p in values)


def test_nothing_to_update():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(3))])
    step_narrow(optimizer, [])
    assert not optimizer.state


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam])
def test_parameters_that_the_optimizer_does_not_have_stay_as_they_are(make):
    mine, other = (nn.Parameter(torch.ones(5)) for _ in range(2))
    narrow = torch.ones(5, dtype=torch.bfloat16)
    optimizer = make([mine], lr=0.1)
    for _ in range(2):  # the first step makes the state
        gradients = torch.ones(2, 5, dtype=torch.bfloat16)
        step_narrow(optimizer, [NarrowUpdate(mine, gradients[0], None), NarrowUpdate(other, gradients[1], narrow)])
    assert (mine < 1).all()
    assert (other == 1).all()
    assert (narrow == 1).all()
