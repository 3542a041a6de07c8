"""Shards at home on devices: a step by device memory, what a step and a unit cost, a second device, callbacks.

All on the CPU; see README.md.

python benchmarks/homes/main.py                   # every experiment; exit code 1 where a limit is missed
python benchmarks/homes/main.py memory callback   # some of them
python benchmarks/homes/main.py --write           # also put the tables into README.md
"""

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple
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
NUM_LAYERS = 10
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)  # of the state, beside what units work with
LINK = "200MB"  # a second, each way: all weights take about as long as a step's arithmetic
NUM_STEPS, NUM_RUNS = 8, 7
MOST_SLOWER = 1.03  # a point than the best before it
MOST_OF_PLAIN = 1.05  # the last point
LEAST_SHORTER = 1.9  # four tasks on two devices whose times are waits
MOST_FOR_CALLBACK = 1.02


class Size(NamedTuple):
    """Sizes of a model of linear layers, whose batches are small beside what crosses between its layers."""

    width: int
    batch: int
    outer: int = 64  # of inputs and targets

    def model(self):
        torch.manual_seed(0)
        widths = [self.outer, *[self.width] * (NUM_LAYERS - 1), self.outer]
        return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))

    def data(self, num_steps):
        generator = torch.Generator().manual_seed(1)
        return [tuple(torch.randn(2, self.batch, self.outer, generator=generator)) for _ in range(num_steps)]

    @property
    def state_bytes(self):
        """Bytes of weights, gradients and two moments in float32."""
        return 16 * sum(parameter.numel() for parameter in self.model().parameters())

    @property
    def work_bytes(self):
        """Bytes of the largest unit on one layer, and of two slabs."""
        return 4 * (4 * self.width**2 + 8 * self.batch * self.width)


LARGE, SMALL, TINY = Size(1024, 512), Size(512, 256), Size(16, 4)


def task_of(size=LARGE, num_steps=NUM_STEPS, **options):
    options = {"name": "task", "optimizer": torch.optim.AdamW, **options}
    options.setdefault("partitioner", Presharded(range(1, NUM_LAYERS + 1)))
    return ModelTask(size.model(), nn.MSELoss(), size.data(num_steps), 1e-3, seed=0, **options)


class Ends(Callback):
    """Notes when each step is over; it reads no weight."""

    reads_model = False

    def __init__(self):
        self.at_s = []

    def on_step(self, report):
        self.at_s.append(time.perf_counter())


def step_s(task, devices):
    """Median seconds of a step after the second, and how the task was cut."""
    ends = Ends()
    task.callbacks = (*task.callbacks, ends)
    orchestra = ModelOrchestrator([task], devices=devices)
    orchestra.verbose = 0
    plan = orchestra.generate().tasks[task.name]
    orchestra.train_models().raise_failures()
    return median(b - a for a, b in pairwise(ends.at_s[1:])), (len(plan.boundaries), sum(plan.homed_layers.values()))


def plain(size=LARGE, num_steps=NUM_STEPS):
    """Train in the plain loop. Return the moments at which steps were over."""
    layers, at_s = size.model(), []
    optimizer = torch.optim.AdamW(layers.parameters(), 1e-3)
    for inputs, target in size.data(num_steps):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.mse_loss(layers(inputs), target).backward()
        optimizer.step()
        at_s.append(time.perf_counter())
    return at_s


def plain_step_s(size=LARGE, num_steps=NUM_STEPS):
    return median(b - a for a, b in pairwise(plain(size, num_steps)[1:]))


def memory():
    """One model, and devices whose memory is a share of its state."""
    times, cuts = {share: [] for share in SHARES}, {share: Counter() for share in SHARES}
    of_plain = []
    for _ in range(NUM_RUNS):
        of_plain.append(plain_step_s())
        for share in SHARES:
            device = EmulatedDevice(int(share * LARGE.state_bytes) + LARGE.work_bytes, bandwidth=LINK)
            seconds, cut = step_s(task_of(partitioner=None), [device])  # cut and homes are chosen together
            times[share].append(seconds)
            cuts[share][cut] += 1
    plain_s, best, rows, good = median(of_plain), float("inf"), [], True
    for share, found in times.items():
        now, [((num_shards, num_homed), _)] = median(found), cuts[share].most_common(1)
        is_good = now <= MOST_SLOWER * best and (share < SHARES[-1] or now <= MOST_OF_PLAIN * plain_s)
        good &= is_good
        figures = [f"{share:.0%}", num_shards, num_homed, f"{1e3 * now:.0f} ms", f"{now / plain_s:.2f}"]
        rows.append([*figures, "" if is_good else "missed"])
        FIGURES.add(f"memory {share:.0%} of the state: a step, of plain", now / plain_s, better="less")
        best = min(best, now)
    rows.append(["plain PyTorch", "", "", f"{1e3 * plain_s:.0f} ms", "1.00", ""])
    return table(["memory", "shards", "layers at home", "a step", "of plain", ""], rows), good


def fixed():
    """What a step and a unit cost where there is next to nothing to compute, with all layers at home."""
    num_steps, device = 200, EmulatedDevice("16MiB", bandwidth="40GB")
    cuts = {"one shard": [NUM_LAYERS], "a shard for each layer": range(1, NUM_LAYERS + 1)}
    times = {name: [] for name in ("plain PyTorch", *cuts)}
    for _ in range(NUM_RUNS):
        times["plain PyTorch"].append(plain_step_s(TINY, num_steps))
        for name, ends in cuts.items():
            task = task_of(TINY, num_steps, homes="device", partitioner=Presharded(ends))
            times[name].append(step_s(task, [device])[0])
    plain_s, one_s, each_s = map(median, times.values())
    num_units = {name: 2 * len(ends) - 1 for name, ends in cuts.items()}
    unit_s = (each_s - one_s) / (num_units["a shard for each layer"] - 1)
    FIGURES.add("a step of one unit, beside plain, ms", 1e3 * (one_s - plain_s), better="less")
    FIGURES.add("a unit more, ms", 1e3 * unit_s, better="less")
    rows = [[name, num_units.get(name, ""), f"{1e3 * median(found):.2f} ms"] for name, found in times.items()]
    rows.append(["one shard, beside plain PyTorch", "", f"{1e3 * (one_s - plain_s):.2f} ms"])
    rows.append(["each unit more", "", f"{1e3 * unit_s:.2f} ms"])
    return table(["", "units", "a step"], rows), True


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
NUM_REAL_STEPS, TWO_PROCESSES = 20, "two processes of plain PyTorch"
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


def train_two(barrier):
    """Train two models in the plain loop, one after the other, with one thread. Return begin and end."""
    torch.set_num_threads(1)
    plain(TINY, 2)  # which imports what a first step needs
    barrier.wait()
    begin_s = time.time()
    for _ in range(NUM_TASKS // 2):
        plain(SMALL, NUM_REAL_STEPS)
    return begin_s, time.time()


def real_makespan_s(num_devices):
    tasks = [task_of(SMALL, NUM_REAL_STEPS, homes="device", partitioner=None, name=str(k)) for k in range(NUM_TASKS)]
    devices = [EmulatedDevice(3 * NUM_TASKS // num_devices * SMALL.state_bytes // 2) for _ in range(num_devices)]
    orchestra = ModelOrchestrator(tasks, devices=devices)
    orchestra.verbose = 0
    orchestra.generate()
    report = orchestra.train_models()
    report.raise_failures()
    return report.makespan_s


def two_processes_s():
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager, ProcessPoolExecutor(2, spawn) as pool:
        barrier = manager.Barrier(2)
        times = [each.result() for each in [pool.submit(train_two, barrier) for _ in range(2)]]
    return max(end_s for _, end_s in times) - min(begin_s for begin_s, _ in times)


def real():
    """Four models whose arithmetic is real, with one thread for each device, beside two processes of plain PyTorch."""
    threads, times = torch.get_num_threads(), {name: [] for name in ("one device", "two devices", TWO_PROCESSES)}
    try:
        torch.set_num_threads(1)
        for _ in range(3):
            for number, name in enumerate(times, 1):
                times[name].append(two_processes_s() if name == TWO_PROCESSES else real_makespan_s(number))
    finally:
        torch.set_num_threads(threads)
    plain_s = median(times[TWO_PROCESSES])
    for name, found in times.items():
        FIGURES.add(f"four models, {name}: of two plain processes", median(found) / plain_s, better="less")
    rows = [[name, f"{median(found):.2f} s", f"{median(found) / plain_s:.2f}"] for name, found in times.items()]
    return table(["", "four models", "of two plain processes"], rows), True


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
            task = task_of(SMALL, 2 * NUM_STEPS, homes="device", callbacks=callbacks)
            found.append(step_s(task, [EmulatedDevice(2 * SMALL.state_bytes, bandwidth=LINK)])[0])
    without, with_it = (median(found) for found in times.values())
    FIGURES.add("a callback: a step, of one without", with_it / without, better="less", limit=MOST_FOR_CALLBACK)
    rows = [[name, f"{1e3 * median(found):.1f} ms", f"{median(found) / without:.3f}"] for name, found in times.items()]
    return table(["callback", "a step", "of without"], rows), with_it <= MOST_FOR_CALLBACK * without


EXPERIMENTS = {each.__name__: each for each in (memory, fixed, devices, real, callback)}


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
