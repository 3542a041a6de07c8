"""Devices that come, go and fail while three tasks train: every bit must be as on one device that stays.

    python -m tests.device_changes                    # 500 changes in one run, and 50 runs in which a device fails
    python -m tests.device_changes --changes 10000 --failures 0
    python -m tests.device_changes --changes 0 --failures 200 --seed 50
    python -m tests.device_changes --homes device     # all shards are at home on devices, where there is room

Steps of one task are spread over the devices that are in, graphs are kept where there is room, checkpoints are saved.
A task's callback adds and removes devices, one to four of which are in. No step and no unit is computed again, and
after a removal at most one more unit begins on the device. Where a device fails, what it had in hand is computed again
on another, once; so is a step whose sums were on their way. One failure more than are allowed ends the run, which is
resumed. With homes, tasks whose homes a device had go back to what was saved of them.
"""

import argparse
import contextlib
import faulthandler
import io
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from unittest import mock

import torch
from torch import nn

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.errors import DeviceFailed
from hydra_engine.tasks.report import AGAIN
from partitioners import Presharded
from tests import reference
from tests.scenarios import Failing

HANG_S = 60
NUM_FEATURES, NUM_CLASSES, BATCH_SIZE = 12, 3, 8
MOST_DEVICES = 4
BOUNDARIES = ([3, 6, 8], [2, 5, 8], [4, 8])
OPTIMIZERS = (
    {"optimizer": torch.optim.Adam, "lr": 0.01, "accumulation_steps": 4},
    {"optimizer": partial(torch.optim.SGD, momentum=0.9), "lr": 0.05, "accumulation_steps": 2, "max_grad_norm": 0.5},
    {"optimizer": partial(torch.optim.AdamW, weight_decay=0.1), "lr": 0.01},
)


def model(seed):
    torch.manual_seed(seed)
    layers = [nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.Dropout(0.2), nn.BatchNorm1d(NUM_FEATURES), nn.Tanh()]
    more = [nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.Dropout(0.1), nn.ReLU(), nn.Linear(NUM_FEATURES, NUM_CLASSES)]
    return nn.Sequential(*layers, *more)


def batches(num_steps):
    generator = torch.Generator().manual_seed(num_steps)
    return [
        (
            torch.randn(BATCH_SIZE, NUM_FEATURES, generator=generator),
            torch.randint(NUM_CLASSES, (BATCH_SIZE,), generator=generator),
        )
        for _ in range(num_steps)
    ]


def tasks_of(num_steps, callbacks=(), homes="host"):
    return [
        ModelTask(
            model(seed),
            nn.CrossEntropyLoss(),
            batches(num_steps),
            name=f"task-{seed}",
            seed=seed,
            partitioner=Presharded(BOUNDARIES[seed]),
            callbacks=list(callbacks),
            homes=homes,
            **options,
        )
        for seed, options in enumerate(OPTIMIZERS)
    ]


def check_bits(tasks, report):
    """Losses and weights are those of plain PyTorch."""
    for seed, (task, options) in enumerate(zip(tasks, OPTIMIZERS, strict=True)):
        alone, found = model(seed), report.tasks[task.name]
        result = reference.train(alone, nn.CrossEntropyLoss(), task.dataloader, seed=seed, **options)
        assert found.status == "finished", found.error
        assert found.losses == result.losses, f"{task.name}: other losses"
        ours, theirs = task.model.state_dict(), alone.state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), f"{task.name}: other weights"


class Changes(Callback):
    """Adds and removes devices at random, from the threads of several tasks' callbacks."""

    def __init__(self, rng, num_per_step, graces=(None,)):
        self.rng, self.num_per_step, self.graces = rng, num_per_step, graces
        self.orchestra = None
        self.num_changes = 0
        self.removed = {}  # by device, when it was removed, until it comes back
        self.gone = []  # (device, from, to)
        self._lock = threading.Lock()

    def __deepcopy__(self, memo):
        return self

    @property
    def now_s(self):
        return self.orchestra._running._common.trace.now_s()

    def on_step(self, *_):
        with self._lock:
            for _ in range(self.num_per_step):
                self.change()

    def change(self):
        orchestra, rng = self.orchestra, self.rng
        places = orchestra.devices
        here = [name for name, place in places.items() if place == "in"]
        away = [name for name, place in places.items() if place != "in"]
        if len(here) > 1 and (len(here) == MOST_DEVICES or rng.random() < 0.5):
            name = rng.choice(here)
            orchestra.remove_device(name, grace_s=rng.choice(self.graces))
            self.removed[name] = self.now_s
        elif len(places) < MOST_DEVICES:
            orchestra.add_device(EmulatedDevice("1MiB", chaos=rng.choice([None, 1])))
        else:
            name, before_s = rng.choice(away), self.now_s
            orchestra.add_device(name)
            self.gone.append((name, self.removed.pop(name), before_s))
        self.num_changes += 1


def run_changes(num_changes, seed, *, graces=(None,), homes="host"):
    """One run with about so many changes, and all that must hold after it. Returns a line of text."""
    rng = random.Random(seed)
    num_per_step = 3
    num_steps = -(-num_changes // (num_per_step * len(OPTIMIZERS)))
    changes = Changes(rng, num_per_step, graces)
    tasks, threads = tasks_of(num_steps, [changes], homes), set(threading.enumerate())
    start_s = time.perf_counter()
    most_s = HANG_S + num_changes  # a second for each, on the slowest machine
    with tempfile.TemporaryDirectory() as directory, watched(most_s), mock.patch("hydra_engine.trace.MAX_SPANS", 10**7):
        orchestra = ModelOrchestrator(
            tasks, devices=[EmulatedDevice("1MiB")], checkpoint_dir=directory, checkpoint_every=max(2, num_steps // 5)
        )
        changes.orchestra, orchestra.verbose = orchestra, 0
        report = orchestra.train_models()
        resumed = ModelOrchestrator(tasks_of(num_steps), devices=[EmulatedDevice("1MiB")], checkpoint_dir=directory)
        resumed.verbose = 0
        assert [each.losses for each in resumed.train_models(resume=True).tasks.values()] == [
            each.losses for each in report.tasks.values()
        ]
    check_bits(tasks, report)
    assert changes.num_changes >= num_changes
    assert "leaving" not in orchestra.devices.values()
    left = [thread.name for thread in threading.enumerate() if thread not in threads]
    assert not left, f"threads are left: {left}"
    assert all(device.peak_bytes <= device.memory_bytes for device in report.devices)
    assert not [span for span in report.spans if span.lane == AGAIN], "a step was begun again"
    units = [span for span in report.spans if span.lane == "compute"]
    twice = [label for label, number in Counter(span.label for span in units).items() if number > 1]
    if graces == (None,):
        assert not twice, f"computed twice: {twice}"
    late = Counter()
    for k, (device, from_s, to_s) in enumerate(changes.gone):
        late[k] = sum(span.device == device and from_s < span.start_s < to_s for span in units)
    assert max(late.values(), default=0) <= 1, "a device that was removed went on"
    spread = sum("+" in span.label for span in units)
    return (
        f"seed {seed}: {changes.num_changes} changes in {time.perf_counter() - start_s:.0f} s, {len(units)} units, "
        f"{spread} of them parts of spread steps, {len(twice)} computed again, steps begun again: 0, units begun after "
        f"a removal: {sum(late.values())} in {len(changes.gone)}; bits as on one device"
    )


class Fuse:
    """Burns at these copies, counted over the devices that share it."""

    def __init__(self, at):
        self._left, self._count, self._lock = set(at), 0, threading.Lock()
        self.num_burnt = 0

    def burns(self):
        with self._lock:
            self._count += 1
            if self._count in self._left:
                self.num_burnt += 1
                return True
            return False


NUM_COPIES = 500  # of a run of `failure`, roughly


def step_of(label):
    """The task and the step of a unit's label, such as `task-0.f1@2+1`."""
    return label.partition(".")[0], label.partition("@")[2].partition("+")[0]


def run_failure(seed):
    """One run of three devices of which one fails; returns a line of text."""
    rng, num_steps = random.Random(seed), 6
    fuse = Fuse([rng.randrange(NUM_COPIES)])
    tasks = tasks_of(num_steps)
    orchestra = ModelOrchestrator(tasks, devices=[Failing(fuse.burns) for _ in range(3)], max_failures=1)
    orchestra.verbose = 0
    with watched():
        report = orchestra.train_models()
    check_bits(tasks, report)
    units = Counter(span.label for span in report.spans if span.lane == "compute")
    again = [label for label, number in units.items() if number > 1]
    steps = [span.label for span in report.spans if span.lane == AGAIN]
    assert max(units.values()) <= 2, f"seed {seed}: computed more than twice: {units.most_common(3)}"
    if steps:  # the sums of a part that follows another were on their way: the step begins again, whole
        assert ["+" in label for label in steps] == [True], f"seed {seed}: {steps}"
        assert {step_of(label) for label in again} == {step_of(steps[0])}, f"seed {seed}: {again}"
    else:
        assert len(again) <= 1, f"seed {seed}: computed again: {again}"
    assert len(report.messages) == fuse.num_burnt == list(orchestra.devices.values()).count("out"), report.messages
    return f"seed {seed}: {fuse.num_burnt} failures, {len(again)} units computed again, steps begun again: {len(steps)}"


def run_lost(seed, homes="device"):
    """One run of three devices of which one fails, where tasks have their homes; returns a line of text."""
    rng, num_steps = random.Random(seed), 6
    fuse = Fuse([rng.randrange(NUM_COPIES // 2)])
    tasks = tasks_of(num_steps, homes=homes)
    with tempfile.TemporaryDirectory() as directory, watched():
        orchestra = ModelOrchestrator(
            tasks,
            devices=[Failing(fuse.burns) for _ in range(3)],
            max_failures=1,
            checkpoint_dir=directory,
            checkpoint_every=1,
        )
        orchestra.verbose = 0
        report = orchestra.train_models()
    back = [text for text in report.messages if "went back" in text]
    for task in tasks:
        found = report.tasks[task.name]
        if found.status == "failed":  # before it was saved for the first time
            assert "no step is saved" in found.error, found.error
    if all(report.tasks[task.name].status == "finished" for task in tasks):
        check_bits(tasks, report)
    failed = [task.name for task in tasks if report.tasks[task.name].status != "finished"]
    return f"seed {seed}: {fuse.num_burnt} failures, {len(back)} tasks went back, {len(failed)} failed"


def run_too_many(seed):
    """One failure more than is allowed ends the run, and a resume has its bits."""
    rng, num_steps = random.Random(seed), 6
    fuse = Fuse(rng.sample(range(NUM_COPIES // 2), 2))
    tasks = tasks_of(num_steps)
    with tempfile.TemporaryDirectory() as directory, watched():
        orchestra = ModelOrchestrator(
            tasks, devices=[Failing(fuse.burns) for _ in range(3)], max_failures=1, checkpoint_dir=directory
        )
        orchestra.verbose = 0
        has_failed = False
        try:
            orchestra.train_models()
        except DeviceFailed:
            has_failed = True
        assert has_failed == (fuse.num_burnt == 2), orchestra.report.messages
        assert orchestra.report is not None
        again = tasks_of(num_steps)
        resumed = ModelOrchestrator(again, devices=[EmulatedDevice("1MiB")], checkpoint_dir=directory)
        resumed.verbose = 0
        check_bits(again, resumed.train_models(resume=True))
    return f"seed {seed}: the run has {'ended' if has_failed else 'not ended'}, and a resume has its bits"


@contextlib.contextmanager
def watched(most_s=HANG_S):
    """End the process with every thread's stack where the body hangs."""
    faulthandler.dump_traceback_later(most_s, exit=True, file=sys.__stderr__)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def main(args=None):
    parser = argparse.ArgumentParser(prog="python -m tests.device_changes", description=__doc__.splitlines()[0])
    parser.add_argument("--changes", type=int, default=500, help="in one run, and as many with a time of grace")
    parser.add_argument("--failures", type=int, default=50, help="runs in which a device fails")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--homes", default="host", choices=("host", "device"))
    parsed = parser.parse_args(args)
    if parsed.changes:
        for graces in ((None,), (None, 0, 0.001)):
            print(f"graces {graces},", run_changes(parsed.changes, parsed.seed, graces=graces, homes=parsed.homes))
    again = Counter()
    for seed in range(parsed.seed, parsed.seed + parsed.failures):
        if parsed.homes != "host":
            again[run_lost(seed, parsed.homes).partition(": ")[2]] += 1
            continue
        again[run_failure(seed).rpartition(": ")[2]] += 1
        again[run_too_many(seed).partition(": ")[2]] += 1
    for text, number in sorted(again.items()):
        print(f"{number} runs: {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
