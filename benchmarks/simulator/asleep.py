"""The schedule alone, on a machine that may be busy: layers that sleep, on devices that come and go.

python benchmarks/simulator/asleep.py [--seconds 0.2]     # exit code 1 beyond 10 %

Backwards sleep, and forwards take no time: a unit's seconds are known beforehand, and take no core. What is compared is
who computes what, and when: the makespan that `simulate(changes=)` predicts, and that of a run whose devices a thread
adds and removes.
"""

import argparse
import sys
import threading
import time

import torch
from torch import nn

from hydra_engine import DeviceChange, DeviceCost, EmulatedDevice, ModelOrchestrator, ModelTask, TaskCost, simulate
from partitioners import Presharded

LIMIT = 0.10
MEMORY_BYTES = 2**20
NUM_SHARDS = 3
HANDOFF_S = 300e-6  # of a unit: threads that wake one another (benchmarks/overhead)
STEPS = {"a": 12, "b": 20, "c": 6}
# By the backwards that one device computes until then.
CHANGES = {
    "all stay": (),
    "one goes": ((30.5, 1, False),),
    "one comes later": ((0, 1, False), (40.5, 1, True)),
    "each goes and comes": ((10.5, 1, False), (30.5, 1, True), (40.5, 0, False), (60.5, 0, True)),
    "none for a while": ((10.5, 0, False), (20.5, 1, False), (35.5, 0, True), (50.5, 1, True)),
}


class Sleep(torch.autograd.Function):
    """Takes its seconds in the backward pass."""

    @staticmethod
    def forward(ctx, value, seconds):
        ctx.seconds = seconds
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Slow(nn.Module):
    """A linear layer that takes its seconds in the backward pass."""

    def __init__(self, seconds):
        super().__init__()
        self.linear, self.seconds = nn.Linear(4, 4), seconds

    def forward(self, value):
        return Sleep.apply(self.linear(value), self.seconds)


def task(name, num_steps, seconds):
    torch.manual_seed(0)
    layers = [Slow(seconds) for _ in range(NUM_SHARDS)]
    batches = [(torch.ones(4, 4), torch.ones(4, 4))] * num_steps
    return ModelTask(nn.Sequential(*layers), nn.MSELoss(), batches, partitioner=Presharded([1, 2, 3]), name=name)


def run(changes, seconds):
    """The report of a run."""
    devices = [EmulatedDevice(MEMORY_BYTES) for _ in range(2)]
    orchestra = ModelOrchestrator([task(name, num, seconds) for name, num in STEPS.items()], devices=devices)
    orchestra.verbose = 0
    names = list(orchestra.devices)

    def change(at):
        (orchestra.add_device if at.is_in else orchestra.remove_device)(names[at.device])

    for at in changes:
        if at.at_s == 0:
            change(at)
    orchestra.generate()
    timers = [threading.Timer(at.at_s, change, [at]) for at in changes if at.at_s > 0]
    for timer in timers:
        timer.start()
    report = orchestra.train_models()
    assert not any(timer.is_alive() for timer in timers), "the run is over before its last change"
    report.raise_failures()
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a layer's backward")
    seconds = parser.parse_args().seconds
    worst = 0.0
    for name, changes in CHANGES.items():
        changes = [DeviceChange(at * seconds, device, is_in) for at, device, is_in in changes]
        report = run(changes, seconds)
        costs = [
            TaskCost(name=each, unit_s=[0, 0, seconds, seconds, seconds], num_steps=num_steps)
            for each, num_steps in STEPS.items()
        ]
        found = simulate(costs, [DeviceCost(unit_s=HANDOFF_S)] * 2, changes=changes)
        error = found.makespan_s / report.makespan_s - 1
        worst = max(worst, abs(error))
        print(
            f"{name:28} predicted {found.makespan_s:6.2f} s  run {report.makespan_s:6.2f} s  {error:+6.1%}  "
            f"bound {found.bound_s:6.2f} s",
            flush=True,
        )
    sys.exit(0 if worst <= LIMIT else 1)


if __name__ == "__main__":
    main()
