"""The host optimizer around the contract: hyperparameters of a step, epochs, failures, and the plan's DRAM."""

import math
import mmap
import sys
from concurrent.futures import Future
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from hydra_engine import ModelTask
from hydra_engine.host.blocked import make_states
from partitioners import Presharded
from tests import exact
from tests.host.test_optimizer_contract import (
    OPTIMIZERS,
    SCHEDULERS,
    ByShard,
    assert_same_bits,
    assert_same_state,
    gradients_of,
    trainable,
)


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


ADAMW = torch.optim.AdamW


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.Adam, {"fused": True, "maximize": True}),
        (ADAMW, {"amsgrad": True, "foreach": False}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    ],
)
def test_states_that_are_made_before_the_first_step_are_those_that_torch_makes_in_it(kind, options):
    special = [0.0, -0.0, 1.0, -1.0, 1e-40, math.inf]
    values = torch.tensor([special, [special[0]] * 6, [special[1]] * 6])
    pair = [[nn.Parameter(values.clone()), nn.Parameter(torch.tensor(-0.0))] for _ in range(2)]
    optimizers = [kind(parameters, 0.1, **options) for parameters in pair]
    make_states(optimizers[0], pair[0], None)
    for _ in range(3):
        for parameters, optimizer in zip(pair, optimizers, strict=True):
            parameters[0].grad = torch.tensor(special).roll(1).expand(3, 6).clone()
            parameters[1].grad = torch.tensor(-0.0)
            optimizer.step()
        for mine, plain in zip(*pair, strict=True):
            states = [optimizer.state[p] for optimizer, p in zip(optimizers, (mine, plain), strict=True)]
            assert [*states[0]] == [*states[1]]
            for a, b in [(mine.data, plain.data), *zip(*(state.values() for state in states), strict=True)]:
                assert (a.dtype, a.stride()) == (b.dtype, b.stride())
                assert a.view(torch.int32).equal(b.view(torch.int32))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
        (torch.optim.SGD, {}),
        (torch.optim.RMSprop, {}),
        (torch.optim.Adam, {"capturable": True}),
        (type("Own", (torch.optim.Adam,), {}), {}),
    ],
)
def test_other_states_are_left_to_the_first_step(kind, options):
    parameter = nn.Parameter(torch.ones(3))
    optimizer = kind([parameter], 0.1, **options)
    make_states(optimizer, [parameter], None)
    assert not optimizer.state


@pytest.mark.parametrize("is_begun", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"), [(ADAMW, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.RMSprop, {})]
)
def test_moments_that_another_thread_makes_ahead_are_those_of_the_first_update(kind, options, is_begun, monkeypatch):
    monkeypatch.setattr("hydra_engine.host.optimizer.AHEAD_BYTES", 0)
    engines = [ByShard(partial(kind, **options), 0.1, [2, 5]) for _ in range(2)]
    ahead, made = engines[0].optimizer, []

    def submit(job):
        future = Future()
        if is_begun:  # else the update comes first
            future.set_running_or_notify_cancel()
            future.set_result(job())
        made.append(future)
        return future

    ahead.make_ahead(engines[0].shards, submit)
    ahead.make_ahead(engines[0].shards, submit)  # of a batch that begins again
    assert len(made) == 2
    assert not ahead.optimizer.state  # which an optimizer has of what received a gradient
    for step in range(3):
        for engine in engines:
            gradients = gradients_of(step, trainable(engine.layers))
            engine.step([None if k == 1 and step < 2 else gradient for k, gradient in enumerate(gradients)])
    assert_same_bits(engines[0].layers, engines[1].layers)
    assert_same_state(engines[0].state, engines[1].state)
    assert all(future.cancelled() != is_begun for future in made)
    if is_begun and kind is not torch.optim.RMSprop:  # which makes its states itself
        places = [
            tensor.data_ptr() for each in made for moments in each.result().values() for tensor in moments.values()
        ]
        states = [value for state in ahead.optimizer.state.values() for value in state.values()]
        taken = {tensor.data_ptr() for tensor in states} & {*places}
        assert len(taken) == len(places) - len(places) // len(trainable(engines[0].layers))  # all but of one parameter
    for engine in engines:
        engine.pool.close()


def test_moments_made_ahead_are_let_go_of_where_no_update_takes_them(monkeypatch):
    monkeypatch.setattr("hydra_engine.host.optimizer.AHEAD_BYTES", 0)
    engine, made = ByShard(ADAMW, 0.1, [2, 5]), []

    def submit(job):
        made.append(Future())
        return made[-1]

    engine.optimizer.make_ahead(engine.shards, submit)
    engine.shards = engine.layout.shards([3, 5])  # the task was cut anew
    for step in range(2):
        engine.step(gradients_of(step, trainable(engine.layers)))
    assert all(future.cancelled() for future in made)
    engine.pool.close()


@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 3}, {"num_batches": 1, "epochs": 1}])
def test_two_tasks_whose_moments_are_made_ahead_end_as_in_the_plain_loop(options, monkeypatch):
    monkeypatch.setattr("hydra_engine.host.optimizer.AHEAD_BYTES", 0)
    pairs = [exact.task_of("gpt", name=name, optimizer="adamw", seed=k, **options) for k, name in enumerate("ab")]
    report = exact.run([task for task, _ in pairs], num_devices=2, chaos=3)
    for k, (task, model) in enumerate(pairs):
        expected = exact.expected("gpt", optimizer="adamw", seed=k, **options)
        exact.assert_as_expected(report, task.name, model, expected)


def test_states_of_a_number_stay_wide_where_those_of_others_are_narrow():
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(2).double())]
    optimizer = torch.optim.Adam(parameters, 0.1)
    make_states(optimizer, parameters, torch.bfloat16)
    kinds = [optimizer.state[parameter]["exp_avg"].dtype for parameter in parameters]
    assert kinds == [torch.bfloat16, torch.float32, torch.float64]


def test_states_are_made_where_a_schedule_has_wrapped_the_step():
    engine = ByShard(torch.optim.Adam, 0.1, [5], lr_scheduler=partial(lr_scheduler.StepLR, step_size=1))
    engine.step([torch.ones_like(parameter) for parameter in trainable(engine.layers)])
    states = [engine.optimizer.optimizer.state[parameter] for parameter in trainable(engine.layers)]
    assert len({state["exp_avg"].untyped_storage().data_ptr() for state in states}) == 1
    engine.pool.close()


@pytest.mark.parametrize(("kind", "name"), [(torch.optim.Adam, "exp_avg"), (torch.optim.RMSprop, "square_avg")])
def test_states_lie_side_by_side_in_memory_of_the_engines_own(kind, name):
    engine = ByShard(kind, 0.1, [5])
    places = []
    for _ in range(3):
        engine.step([torch.ones_like(parameter) for parameter in trainable(engine.layers)])
        states = [engine.optimizer.optimizer.state[parameter] for parameter in trainable(engine.layers)]
        places.append([(state[name].data_ptr(), state[name].untyped_storage().data_ptr()) for state in states])
    assert places[0] == places[1] == places[2]
    assert sys.platform != "linux" or all(storage % mmap.PAGESIZE == 0 for _, storage in places[0])
    assert all(place % 64 == 0 for place, _ in places[0])
    engine.pool.close()
