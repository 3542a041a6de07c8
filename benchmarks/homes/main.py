"""Shards at home on devices: a step's time by device memory, a second device, callbacks. All on the CPU; see README.md.

python benchmarks/homes/main.py                   # every experiment; exit code 1 where a limit is missed
python benchmarks/homes/main.py memory callback   # some of them
python benchmarks/homes/main.py --write           # also put the tables into README.md
"""

import argparse
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from torch import nn

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.host import TaskOptimizer
from partitioners import Presharded

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]
from figures import Figures, add_arguments, put, table  # noqa: E402

FIGURES = Figures("homes")
WIDTH, NUM_LAYERS, BATCH = 512, 10, 256
STATE_BYTES = 16 * NUM_LAYERS * (WIDTH * WIDTH + WIDTH)  # weights, gradients and two moments in float32
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)  # of the state, beside what units work with
WORK_BYTES = 2**23  # of units, and two slabs
LINK = "400MB"  # a second, each way
NUM_STEPS, NUM_RUNS = 8, 7
MOST_SLOWER = 1.03  # a point than the best before it
MOST_OF_PLAIN = 1.05  # the last point
LEAST_SHORTER = 1.9  # four tasks on two devices whose times are waits
MOST_FOR_CALLBACK = 1.02


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))


def data(num_steps):
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, BATCH, WIDTH, generator=generator)) for _ in range(num_steps)]


def task_of(num_steps=NUM_STEPS, layers=None, **options):
    options = {"optimizer": torch.optim.AdamW, "partitioner": Presharded(range(1, NUM_LAYERS + 1)), **options}
    return ModelTask(layers or model(), nn.MSELoss(), data(num_steps), 1e-3, seed=0, **options)


class Ends(Callback):
    """Notes when each step is over; it reads no weight."""

    reads_model = False

    def __init__(self):
        self.at_s = []

    def on_step(self, report):
        self.at_s.append(time.perf_counter())


def step_s(task, devices):
    """Median seconds of a step after the second."""
    ends = Ends()
    task.callbacks = (*task.callbacks, ends)
    orchestra = ModelOrchestrator([task], devices=devices)
    orchestra.verbose = 0
    orchestra.train_models().raise_failures()
    return median(b - a for a, b in pairwise(ends.at_s[1:]))


def plain_step_s():
    layers, ends = model(), []
    optimizer = torch.optim.AdamW(layers.parameters(), 1e-3)
    for inputs, target in data(NUM_STEPS):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.mse_loss(layers(inputs), target).backward()
        optimizer.step()
        ends.append(time.perf_counter())
    return median(b - a for a, b in pairwise(ends[1:]))


def memory():
    """One model, and devices whose memory is a share of its state."""
    times = {share: [] for share in SHARES}
    plain = []
    for _ in range(NUM_RUNS):
        plain.append(plain_step_s())
        for share in SHARES:
            device = EmulatedDevice(int(share * STATE_BYTES) + WORK_BYTES, bandwidth=LINK)
            times[share].append(step_s(task_of(partitioner=None), [device]))  # cut and homes are chosen together
    plain_s, best, rows, good = median(plain), float("inf"), [], True
    for share, found in times.items():
        now = median(found)
        is_good = now <= MOST_SLOWER * best and (share < SHARES[-1] or now <= MOST_OF_PLAIN * plain_s)
        good &= is_good
        rows.append([f"{share:.0%}", f"{1e3 * now:.1f} ms", f"{now / plain_s:.2f}", "" if is_good else "missed"])
        FIGURES.add(f"memory {share:.0%} of the state: a step, of plain", now / plain_s, better="less")
        best = min(best, now)
    rows.append(["plain PyTorch", f"{1e3 * plain_s:.1f} ms", "1.00", ""])
    return table(["memory", "a step", "of plain", ""], rows), good


class Waits(nn.Module):
    """Takes so long forward and backward, and computes next to nothing."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        time.sleep(self.seconds)
        return Back.apply(self.linear(x), 2 * self.seconds)


class Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


UNIT_WAIT_S, HOST_WAIT_S, NUM_SHARDS, NUM_TASKS = 0.005, 0.03, 4, 4
update = TaskOptimizer.update


def slow_update(optimizer, shard, pool, record):
    """An update that takes longer on the host than a shard's units, and next to nothing on a device."""
    if not pool.homes:
        time.sleep(HOST_WAIT_S)
    update(optimizer, shard, pool, record)


def waiting_makespan_s(homes, num_devices):
    tasks = []
    for k in range(NUM_TASKS):
        torch.manual_seed(k)
        layers = nn.Sequential(*(Waits(UNIT_WAIT_S) for _ in range(NUM_SHARDS)))
        batches = [tuple(torch.randn(2, 4, 64)) for _ in range(12)]
        ends = Presharded(range(1, NUM_SHARDS + 1))
        tasks.append(ModelTask(layers, nn.MSELoss(), batches, 1e-3, seed=k, homes=homes, partitioner=ends))
    devices = [EmulatedDevice("16MiB", bandwidth=LINK) for _ in range(num_devices)]
    orchestra = ModelOrchestrator(tasks, devices=devices)
    orchestra.verbose = 0
    orchestra.generate()
    with mock.patch.object(TaskOptimizer, "update", slow_update):
        report = orchestra.train_models()
    report.raise_failures()
    return report.makespan_s


def devices():
    """Four models on one and two devices; computing, the link and the host's updates are waits."""
    rows, good = [], True
    for homes in ("host", "device"):
        one, two = (median(waiting_makespan_s(homes, number) for _ in range(3)) for number in (1, 2))
        is_good = homes == "host" or one / two >= LEAST_SHORTER
        good &= is_good
        FIGURES.add(f"homes {homes}: times shorter on two devices", one / two, better="more")
        rows.append([homes, f"{one:.2f} s", f"{two:.2f} s", f"{one / two:.2f}", "" if is_good else "missed"])
    return table(["homes", "one device", "two devices", "times shorter", ""], rows), good


class Nothing(Callback):
    """Reads nothing of the model, and does not say so."""

    def on_step(self, report):
        pass


def callback():
    """A callback that reads nothing, of a task that is all at home."""
    times = {name: [] for name in ("without", "with")}
    for _ in range(NUM_RUNS):
        for name, found in times.items():
            callbacks = (Nothing(),) if name == "with" else ()
            task = task_of(2 * NUM_STEPS, homes="device", callbacks=callbacks)
            found.append(step_s(task, [EmulatedDevice(2 * STATE_BYTES, bandwidth=LINK)]))
    without, with_it = (median(found) for found in times.values())
    FIGURES.add("a callback: a step, of one without", with_it / without, better="less", limit=MOST_FOR_CALLBACK)
    rows = [[name, f"{1e3 * median(found):.1f} ms", f"{median(found) / without:.3f}"] for name, found in times.items()]
    return table(["callback", "a step", "of without"], rows), with_it <= MOST_FOR_CALLBACK * without


EXPERIMENTS = {"memory": memory, "devices": devices, "callback": callback}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiments", nargs="*", choices=[*EXPERIMENTS, []], help="default: all")
    add_arguments(parser, writes=True)
    args = parser.parse_args()
    missed = []
    for name in args.experiments or EXPERIMENTS:
        text, is_good = EXPERIMENTS[name]()
        print(f"{name}:\n{text}", flush=True)
        missed += [] if is_good else [name]
        if args.write:
            put(HERE / "README.md", name, text)
    FIGURES.save(args.json)
    print(f"missed: {', '.join(missed)}" if missed else "all limits hold")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
