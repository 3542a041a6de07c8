"""Stepping shard by shard, in any order, gives the bits of one plain step."""

import copy
import random
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.host.layout import ModelLayout
from hydra_engine.host.optimizer import TaskOptimizer
from hydra_engine.host.pool import HostPool
from hydra_engine.host.staging import StepStaging
from partitioners import Presharded

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, 0.1),
    "momentum": (partial(torch.optim.SGD, momentum=0.9, nesterov=True), 0.1),
    "momentum with decay": (partial(torch.optim.SGD, momentum=0.9, dampening=0.1, weight_decay=0.1), 0.1),
    "adam": (torch.optim.Adam, 0.01),
    "amsgrad": (partial(torch.optim.Adam, amsgrad=True), 0.01),
    "adamw": (partial(torch.optim.AdamW, weight_decay=0.2), 0.01),
    "adam, foreach": (partial(torch.optim.Adam, foreach=True), 0.01),
    "adamw, fused": (partial(torch.optim.AdamW, fused=True), 0.01),
    "adam, a tensor as lr": (lambda params: torch.optim.Adam(params, lr=torch.tensor(0.02)), None),
    "rmsprop": (partial(torch.optim.RMSprop, momentum=0.5), 0.01),
    "adagrad": (torch.optim.Adagrad, 0.05),
    "nadam": (torch.optim.NAdam, 0.01),
    "adafactor": (torch.optim.Adafactor, 0.01),
}

SCHEDULERS = {
    "none": None,
    "decay": partial(lr_scheduler.ExponentialLR, gamma=0.7),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=20),  # moves momentum or betas too
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=5),
}

NUM_STEPS = 6


def build():
    """Tied, frozen and odd-shaped parameters; two copies have the same bits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 4, bias=False), nn.Linear(4, 6)]
    layers[4].weight = layers[0].weight
    layers[2].weight.requires_grad_(False)
    layers[3].weight = nn.Parameter(layers[3].weight.detach().t().contiguous().t())
    return layers


def gradients_of(step, params):
    """The same gradients for both sides, laid out like their parameters; now and then a parameter receives none."""
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.empty_like(p).normal_(0, 3, generator=generator) for p in params]
    return [None if step % 3 == 2 and k % 2 == 1 else gradient for k, gradient in enumerate(drawn)]


def trainable(layers):
    return [parameter for parameter in nn.ModuleList(layers).parameters() if parameter.requires_grad]


class Plain:
    """The plain loop's part after backward()."""

    def __init__(self, optimizer, lr, scheduler, max_grad_norm):
        self.layers = build()
        self.params = trainable(self.layers)
        self.max_grad_norm = max_grad_norm
        self.optimizer = optimizer(self.params) if lr is None else optimizer(self.params, lr=lr)
        self.scheduler = scheduler(self.optimizer) if scheduler else None

    def step(self, gradients):
        for parameter, gradient in zip(self.params, gradients, strict=True):
            parameter.grad = gradient
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.params, self.max_grad_norm)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()


class ByShard:
    """The engine's: gradients in the pool, a record at the commit, then the shards in any order."""

    def __init__(self, optimizer, lr, scheduler, max_grad_norm, ends, seed):
        self.layers = build()
        task = ModelTask(
            self.layers,
            F.cross_entropy,
            [],
            lr,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            max_grad_norm=max_grad_norm,
        )
        self.layout = ModelLayout(self.layers, [str(k) for k in range(len(self.layers))], None)
        self.pool, self.staging = HostPool(self.layout), StepStaging()
        self.pool.open()
        self.optimizer = TaskOptimizer(task, self.layout)
        self.shards = self.layout.shards(ends)
        self.rng = random.Random(seed)

    def step(self, gradients):
        for slot, gradient in zip(self.layout.trainable_slots(), gradients, strict=True):
            self.staging.has_gradient[slot.index] = gradient is not None
            if gradient is not None:
                self.pool.gradients.places[slot.index].copy_(gradient)
        record = self.optimizer.commit(self.staging, self.pool, epoch=0)
        self.optimizer.end_step(record)
        self.staging.clear()  # the next step may have begun before the updates are through
        for shard in self.rng.sample(self.shards, len(self.shards)):
            self.optimizer.update(shard, self.pool, record)


def assert_same_bits(actual, expected):
    for (name, a), (_, b) in zip(
        nn.ModuleList(actual).named_parameters(), nn.ModuleList(expected).named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_shards_in_any_order_give_the_bits_of_one_plain_step(optimizer, max_grad_norm):
    factory, lr = OPTIMIZERS[optimizer]
    for seed, ends in enumerate(([1, 2, 3, 4, 5], [2, 5], [5], [3, 4, 5])):
        plain = Plain(factory, lr, None, max_grad_norm)
        engine = ByShard(factory, lr, None, max_grad_norm, ends, seed)
        for step in range(NUM_STEPS):
            gradients = gradients_of(step, plain.params)
            plain.step([gradient if gradient is None else gradient.clone() for gradient in gradients])
            engine.step(gradients)
            assert_same_bits(engine.layers, plain.layers)
        engine.pool.close()
        assert_same_bits(engine.layers, plain.layers)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw"])
def test_schedules_are_the_plain_ones(optimizer, scheduler):
    factory, lr = OPTIMIZERS[optimizer]
    if scheduler == "one cycle" and optimizer == "sgd":
        factory = partial(torch.optim.SGD, momentum=0.5)
    plain = Plain(factory, lr, SCHEDULERS[scheduler], 0.5)
    engine = ByShard(factory, lr, SCHEDULERS[scheduler], 0.5, [1, 3, 5], seed=1)
    for step in range(NUM_STEPS):
        gradients = gradients_of(step, plain.params)
        plain.step([gradient if gradient is None else gradient.clone() for gradient in gradients])
        engine.step(gradients)
        assert_same_bits(engine.layers, plain.layers)
        assert engine.optimizer.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]
    engine.pool.close()


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_state_is_the_plain_optimizers(optimizer):
    factory, lr = OPTIMIZERS[optimizer]
    plain, engine = Plain(factory, lr, None, None), ByShard(factory, lr, None, None, [1, 3, 5], seed=2)
    for step in range(NUM_STEPS):
        gradients = gradients_of(step, plain.params)
        plain.step([gradient if gradient is None else gradient.clone() for gradient in gradients])
        engine.step(gradients)
    expected, actual = plain.optimizer.state_dict(), engine.optimizer.optimizer.state_dict()
    assert actual["state"].keys() == expected["state"].keys()
    for index, values in expected["state"].items():
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(actual["state"][index][name]), torch.as_tensor(value))
    engine.pool.close()


@pytest.mark.parametrize("lr", [1.0, torch.tensor(1.0)])
def test_updates_use_the_hyperparameters_of_their_own_step(lr):
    # Both commits before the first update: the scheduler has moved on, the record has not.
    schedule = partial(lr_scheduler.StepLR, step_size=1, gamma=0.1)
    engine = ByShard(torch.optim.SGD, lr, schedule, None, [5], seed=0)
    before = [parameter.detach().clone() for parameter in trainable(engine.layers)]
    for slot in engine.layout.trainable_slots():
        engine.staging.has_gradient[slot.index] = True
        engine.pool.gradients.places[slot.index].fill_(1)
    first = engine.optimizer.commit(engine.staging, engine.pool, epoch=0)
    engine.optimizer.end_step(first)
    engine.optimizer.commit(engine.staging, engine.pool, epoch=0)
    engine.optimizer.update(engine.shards[0], engine.pool, first)
    assert all(torch.equal(p, b - 1.0) for p, b in zip(trainable(engine.layers), before, strict=True))
    engine.pool.close()


def test_scheduler_of_interval_epoch_moves_once_for_each_epoch_that_ended():
    task = ModelTask(build(), F.cross_entropy, [], 1.0, lr_scheduler_interval="epoch", lr_scheduler=SCHEDULERS["decay"])
    layout = ModelLayout(list(task.model), list(task.model._modules), None)
    pool, staging = HostPool(layout), StepStaging()
    pool.open()
    optimizer = TaskOptimizer(task, layout)
    seen = [optimizer.commit(staging, pool, epoch).groups[0]["lr"] for epoch in (0, 0, 1, 1, 3)]
    optimizer.reach_epoch(4)
    pool.close()
    assert seen == pytest.approx([1.0, 1.0, 0.7, 0.7, 0.7**3])
    assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.7**4)


def test_parameters_of_other_shards_are_left_alone():
    engine = ByShard(torch.optim.AdamW, 0.1, None, None, [2, 5], seed=0)
    gradients = gradients_of(0, trainable(engine.layers))
    for slot, gradient in zip(engine.layout.trainable_slots(), gradients, strict=True):
        engine.staging.has_gradient[slot.index] = True
        engine.pool.gradients.places[slot.index].copy_(gradient)
    before = copy.deepcopy(nn.ModuleList(engine.layers).state_dict())
    record = engine.optimizer.commit(engine.staging, engine.pool, epoch=0)
    engine.optimizer.update(engine.shards[1], engine.pool, record)
    changed = {
        name for name, t in nn.ModuleList(engine.layers).state_dict().items() if not torch.equal(t, before[name])
    }
    assert changed == {"2.bias", "3.weight", "4.bias"}  # 2.weight is frozen, 4.weight is tied to layer 0
    engine.pool.close()


def test_update_leaves_no_gradient_on_the_users_parameters():
    engine = ByShard(torch.optim.SGD, 0.1, None, None, [5], seed=0)
    engine.step(gradients_of(0, trainable(engine.layers)))
    assert all(parameter.grad is None for parameter in nn.ModuleList(engine.layers).parameters())
    engine.pool.close()


def test_optimizer_that_raises_leaves_no_gradient_on_the_users_parameters():
    class Boom(torch.optim.SGD):
        armed = False

        def step(self, closure=None):
            if self.armed:
                raise RuntimeError("boom")
            return super().step(closure)

    engine = ByShard(Boom, 0.1, None, None, [5], seed=0)
    Boom.armed = True
    with pytest.raises(RuntimeError, match="boom"):
        engine.step(gradients_of(0, trainable(engine.layers)))
    assert all(parameter.grad is None for parameter in nn.ModuleList(engine.layers).parameters())
    engine.pool.close()


# -- DRAM


def planned_bytes(optimizer, lr):
    """The plan's DRAM for layers of 40 + 4 + 12 + 4 + 1 trainable parameters, 5 parameters in all."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return x * self.scale

    layers = [nn.Linear(10, 4), nn.Linear(4, 4).requires_grad_(False), nn.Linear(3, 4), Scale()]
    layers.insert(2, nn.Linear(4, 3).requires_grad_(False))
    batch = (torch.zeros(2, 10), torch.zeros(2).long())
    task = ModelTask(layers, F.cross_entropy, [batch], lr, optimizer=optimizer, partitioner=Presharded([2, 5]))
    orchestra = ModelOrchestrator([task], devices=[EmulatedDevice("1MiB")])
    orchestra.verbose = 0
    return orchestra.generate().tasks["task-0"].dram_bytes


NUMBERS = 40 + 4 + 12 + 4 + 1
STEP_COUNTS = 5  # one float32 for each parameter


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"),
    [
        ("momentum", 4 * NUMBERS),
        ("adam", 4 * (2 * NUMBERS + STEP_COUNTS)),
        ("adamw", 4 * (2 * NUMBERS + STEP_COUNTS)),
        ("amsgrad", 4 * (3 * NUMBERS + STEP_COUNTS)),
        ("adagrad", 4 * (NUMBERS + STEP_COUNTS)),
    ],
)
def test_plan_counts_every_byte_of_the_optimizers_state(optimizer, state_bytes):
    assert planned_bytes(*OPTIMIZERS[optimizer]) - planned_bytes(*OPTIMIZERS["sgd"]) == state_bytes


# -- refusals


def test_optimizer_that_runs_the_model_again_is_refused():
    task = ModelTask(build(), F.cross_entropy, [], 0.1, optimizer=torch.optim.LBFGS)
    layout = ModelLayout(list(task.model), list(task.model._modules), None)
    with pytest.raises(ValueError, match=r"LBFGS .*closure"):
        TaskOptimizer(task, layout)


@pytest.mark.parametrize("result", [None, [], nn.Linear(1, 1)])
def test_factory_that_returns_no_optimizer_is_refused(result):
    task = ModelTask(build(), F.cross_entropy, [], optimizer=lambda params: result)
    layout = ModelLayout(list(task.model), list(task.model._modules), None)
    with pytest.raises(TypeError, match=type(result).__name__):
        TaskOptimizer(task, layout)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_state_dict_loads_into_a_plain_optimizer_which_goes_on_with_the_same_bits(optimizer):
    factory, lr = OPTIMIZERS[optimizer]
    plain = Plain(factory, lr, None, None)
    engine = ByShard(factory, lr, None, None, [2, 5], seed=1)
    for step in range(2):
        engine.step(gradients_of(step, plain.params))
    plain.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.optimizer.state_dict()))
    for own, trained in zip(plain.layers, engine.layers, strict=True):
        own.load_state_dict(trained.state_dict())
    for step in range(2, 4):
        gradients = gradients_of(step, plain.params)
        engine.step(gradients)
        plain.step([gradient if gradient is None else gradient.clone() for gradient in gradients])
    assert_same_bits(engine.layers, plain.layers)
