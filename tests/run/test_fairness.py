"""`ModelOrchestrator(fairness=)`: devices are shared out by speedups, and bits stay."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import EmulatedDevice, ModelTask
from hydra_engine.schedule import Spread
from tests import exact


def task(name, num_steps):
    """A task of four micro-batches a step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(num_steps)
        model = nn.Sequential(nn.Linear(8, num_steps), nn.Tanh(), nn.Linear(num_steps, 3))
        batches = [(torch.randn(8, 8), torch.randint(3, (8,))) for _ in range(num_steps)]
    return ModelTask(model, F.cross_entropy, batches, 0.1, name=name, accumulation_steps=4), model


def predicted(cost, devices, *, host=None):
    """The short task gains from every device, the long one little."""
    more = 0.9 if cost.name == "short" else 0.1
    return (Spread(), *[Spread(1.0 + more * k, in_sums=False) for k in (1, 2)])


def trained(fairness):
    """Train a long task and a short one on three devices; parts by task and step, and all parameters."""
    tasks, models = zip(*[task(name, num_steps) for name, num_steps in (("long", 12), ("short", 6))], strict=True)
    devices = [EmulatedDevice("8MiB")] * 3
    with mock.patch("hydra_engine.planning.planner.predict_spreads", predicted):
        report = exact.silent(tasks, devices=devices, fairness=fairness).train_models()
    parts = {}
    for placed in report.schedule:
        parts.setdefault((placed.unit.task, placed.unit.step), set()).add(placed.unit.part)
    parameters = [each.detach().clone() for model in models for each in model.parameters()]
    return {key: len(each) for key, each in parts.items()}, parameters


@pytest.mark.rest
def test_devices_go_by_speedups_and_bits_stay():
    """Both begin together, and the device that is left goes to the one that gains from it."""
    _, expected = trained(None)
    fair, found = trained(1)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert (fair["long", 0], fair["short", 0]) == (1, 2)
