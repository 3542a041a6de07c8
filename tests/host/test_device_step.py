"""Optimizers that step on the device, at the end of a shard's backward unit: the same bits as on the host."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import EmulatedDevice, ModelTask
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.refused import refused

SEED, LR = 7, 1e-2
OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "fused": partial(torch.optim.AdamW, fused=True),
    "adafactor": torch.optim.Adafactor,
}


def orchestra_of(tasks, *, memory="8MiB", bandwidth=None):
    devices = [EmulatedDevice(memory, bandwidth, chaos=k, meter_every_unit=True) for k in range(2)]
    return exact.silent(tasks, devices=devices)


@pytest.mark.parametrize(
    ("name", "optimizer", "precision"),
    [
        ("branch", "momentum", "float32"),
        ("branch", "adamw", "bfloat16"),
        ("tied", "adamw", "float32"),
        ("frozen", "fused", "bfloat16"),
        pytest.param("branch", "adafactor", "float32", marks=pytest.mark.rest),
        pytest.param("branch", "adafactor", "bfloat16", marks=pytest.mark.rest),
        pytest.param("gpt", "adamw", "bfloat16", marks=pytest.mark.rest),
    ],
)
def test_steps_on_the_device_give_the_bits_of_the_plain_loop(name, optimizer, precision):
    settings = {
        "optimizer": OPTIMIZERS[optimizer],
        "precision": precision,
        "lr_scheduler": lambda each: torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.7),
    }
    plain, loss_fn, loader = zoo.MODELS[name]()
    expected = reference.train(plain, loss_fn, loader, seed=SEED, lr=LR, **settings)
    network, loss_fn, loader = zoo.MODELS[name]()
    ends = list(range(1, len(network) + 1))
    options = {"partitioner": Presharded(ends), "optimizer_device": "device"} | settings
    orchestra = orchestra_of([ModelTask(network, loss_fn, loader, LR, name="net", seed=SEED, **options)])
    report = orchestra.train_models()
    report.raise_failures()
    assert report.tasks["net"].losses == expected.losses
    exact.assert_same_state(zoo.state(network), zoo.state(plain))
    assert orchestra.plan.tasks["net"].optimizer_device == "device"
    assert orchestra.plan.tasks["net"].dram["gradients"] == 0
    assert all(device.peak_bytes <= device.memory_bytes for device in report.devices)


def test_averages_are_kept_on_the_host():
    task = ModelTask(*zoo.mlp(), LR, seed=1, optimizer_device="device", ema_decay=0.0)
    state = orchestra_of([task]).train_models().tasks["task-0"].ema_state
    assert all(torch.equal(state[key], value) for key, value in task.model.state_dict().items())


def test_states_and_masters_cross_the_link_and_gradients_do_not():
    def moved(where):
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
        batches = [(torch.zeros(1, 16), torch.zeros(1, 16))] * 3
        settings = {"optimizer": partial(torch.optim.SGD, momentum=0.9), "partitioner": Presharded([2])}
        task = ModelTask(network, F.mse_loss, batches, LR, optimizer_device=where, **settings)
        report = orchestra_of([task]).train_models()
        loaded = sum(device.loaded_bytes for device in report.devices)
        return loaded, sum(device.stored_bytes for device in report.devices)

    weights = 2 * 16 * 16 * 4
    host, device = moved("host"), moved("device")
    assert device[0] - host[0] == 2 * weights  # momentum, made by the first of three steps
    assert device[1] - host[1] == 3 * weights  # weights and momentum for gradients


@pytest.mark.parametrize(("bandwidth", "expected"), [(1_000_000, "host"), ("1000GiB", "device")])
def test_auto_takes_the_place_that_is_predicted_to_take_less_time(bandwidth, expected):
    task = ModelTask(*zoo.mlp(), LR, optimizer=torch.optim.AdamW, optimizer_device="auto")
    plan = orchestra_of([task], bandwidth=bandwidth).generate()
    assert plan.tasks["task-0"].optimizer_device == expected


def test_auto_takes_the_host_where_a_step_may_be_vetoed_or_hooks_act_on_it():
    for options, hooked in (({"max_grad_norm": 1.0}, False), ({}, True)):
        network, loss_fn, loader = zoo.MODELS["mlp"]()
        if hooked:
            next(network.parameters()).register_hook(lambda gradient: gradient)
        task = ModelTask(network, loss_fn, loader, LR, optimizer_device="auto", **options)
        plan = orchestra_of([task], bandwidth="1000GiB").generate()
        assert plan.tasks["task-0"].optimizer_device == "host"


def test_a_device_that_would_have_to_wait_or_to_call_hooks_is_refused():
    network, loss_fn, loader = zoo.MODELS["mlp"]()
    with refused(says="optimizer_device device max_grad_norm"):
        ModelTask(network, loss_fn, loader, LR, optimizer_device="device", max_grad_norm=1.0)
    with refused(says="optimizer_device gpu"):
        ModelTask(network, loss_fn, loader, LR, optimizer_device="gpu")
    next(network.parameters()).register_hook(lambda gradient: gradient)
    task = ModelTask(network, loss_fn, loader, LR, optimizer_device="device")
    with refused(says="optimizer_device hooks"):
        orchestra_of([task]).generate()
