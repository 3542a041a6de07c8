"""The host optimizer around the contract: hyperparameters of a step, epochs, failures, and the plan's DRAM."""

import mmap
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from hydra_engine import ModelTask
from partitioners import Presharded
from tests import exact
from tests.host.test_optimizer_contract import OPTIMIZERS, SCHEDULERS, ByShard, gradients_of, trainable


@pytest.mark.parametrize("lr", [1.0, torch.tensor(1.0)])
def test_updates_use_the_hyperparameters_of_their_own_step(lr):
    # Both commits before the first update: the scheduler has moved on, the record has not.
    schedule = partial(lr_scheduler.StepLR, step_size=1, gamma=0.1)
    engine = ByShard(torch.optim.SGD, lr, [5], lr_scheduler=schedule)
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
    options = {"lr_scheduler_interval": "epoch", "lr_scheduler": SCHEDULERS["decay"]}
    engine = ByShard(torch.optim.SGD, 1.0, [5], **options)
    commits = [engine.optimizer.commit(engine.staging, engine.pool, epoch) for epoch in (0, 0, 1, 1, 3)]
    engine.optimizer.reach_epoch(4)
    engine.pool.close()
    assert [each.groups[0]["lr"] for each in commits] == pytest.approx([1.0, 1.0, 0.7, 0.7, 0.7**3])
    assert engine.optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.7**4)


def test_optimizer_that_raises_leaves_no_gradient_on_the_users_parameters():
    class Boom(torch.optim.SGD):
        armed = False

        def step(self, closure=None):
            if self.armed:
                raise RuntimeError("boom")
            return super().step(closure)

    engine = ByShard(Boom, 0.1, [5])
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
    return exact.silent([task]).generate().tasks["task-0"].dram_bytes


NUMBERS = 40 + 4 + 12 + 4 + 1
STEP_COUNTS = 5  # one float32 for each parameter


@pytest.mark.rest
def test_plan_counts_every_byte_of_the_optimizers_state():
    expected = {
        "momentum": 4 * NUMBERS,
        "adam": 4 * (2 * NUMBERS + STEP_COUNTS),
        "adamw": 4 * (2 * NUMBERS + STEP_COUNTS),
        "amsgrad": 4 * (3 * NUMBERS + STEP_COUNTS),
        "adagrad": 4 * (NUMBERS + STEP_COUNTS),
    }
    stateless = planned_bytes(*OPTIMIZERS["sgd"])
    assert {name: planned_bytes(*OPTIMIZERS[name]) - stateless for name in expected} == expected


def test_large_states_of_torchs_optimizers_move_to_private_memory_once(monkeypatch):
    monkeypatch.setattr("hydra_engine.host.optimizer.PLACED_BYTES", 64)
    engine = ByShard(torch.optim.Adam, 0.1, [5])
    plain = [nn.Parameter(parameter.detach().clone()) for parameter in trainable(engine.layers)]
    optimizer = torch.optim.Adam(plain, 0.1)
    places = []
    for _ in range(3):
        gradients = [torch.ones_like(parameter) for parameter in plain]
        engine.step(gradients)
        for parameter, gradient in zip(plain, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        states = [engine.optimizer.optimizer.state[parameter] for parameter in trainable(engine.layers)]
        places.append([state["exp_avg"].data_ptr() for state in states])
        for state, parameter in zip(states, plain, strict=True):
            assert all(torch.equal(state[key], value) for key, value in optimizer.state[parameter].items())
    large = [k for k, parameter in enumerate(plain) if parameter.nbytes >= 64]
    assert large
    assert sys.platform != "linux" or all(places[0][k] % mmap.PAGESIZE == 0 for k in large)
    assert places[0] == places[1] == places[2]
    engine.pool.close()
