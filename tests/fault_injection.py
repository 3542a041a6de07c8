"""Random faults: three tasks train, one of them is struck, and everything must be as it should be.

    python -m tests.fault_injection                       # 200 runs; prints a table
    python -m tests.fault_injection --runs 50 --seed 150  # the runs of seeds 150 to 199
    python -m tests.fault_injection --kind store          # of one kind

A run is drawn from its seed: models, partitions, devices, budgets, homes, micro-batches, double buffering, precision,
and what strikes where and how often. The struck task fails at its last committed step, or is tried again and has the
bits of an undisturbed run (`tests/reference.py`); the two others have theirs in any case; no thread, temporary file or
shared memory is left. Half of the runs save checkpoints, and all whose saves are struck, which no task notices; then
the run is resumed without faults, and every task ends with the bits of an undisturbed one. A run that takes longer than
`HANG_S` ends the process with every thread's stack.
"""

import argparse
import contextlib
import errno
import faulthandler
import io
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask, ShardDoesNotFit
from hydra_engine.checkpoints.snapshot import Snapshot
from hydra_engine.host import TaskOptimizer
from hydra_engine.system.files import Disk
from hydra_engine.tasks.report import AGAIN
from hydra_engine.worker.spiller import Spiller
from partitioners import Pilot, Presharded
from tests import exact, reference, zoo
from tests.checkpoints.support import TRIED, assert_nothing_unnamed

HANG_S = 120
NAMES = ("struck", "second", "third")
NUM_FEATURES, NUM_CLASSES, BATCH_SIZE, EPOCHS = 6, 3, 6, 2
OPTIMIZERS = {
    "momentum": (partial(torch.optim.SGD, momentum=0.9), 0.05),
    "adamw": (partial(torch.optim.AdamW, weight_decay=0.1), 0.01),
}
SHM = Path("/dev/shm")


class Struck(Exception):
    """The fault."""


class Strike:
    """Raises at calls `first`, `first + 1`, ... of its kind, `number` times, once it is armed. From any thread."""

    def __init__(self, kind, first, number):
        self.kind, self.first, self.number = kind, first, number
        self.is_armed = False
        self.num_calls = self.num_fired = 0
        self._lock = threading.Lock()

    def __deepcopy__(self, memo):
        return self

    def touch(self, kind):
        """Raise, if it is time."""
        with self._lock:
            if kind != self.kind or not self.is_armed or threading.current_thread().name.startswith("hydra-planner"):
                return
            self.num_calls += 1
            if self.num_calls <= self.first or self.num_fired == self.number:
                return
            self.num_fired += 1
            number = self.num_fired
        raise Struck(f"{kind}, {number} of {self.number}")


class Touching(torch.autograd.Function):
    """Identity whose backward can be struck."""

    @staticmethod
    def forward(ctx, x, strike):
        ctx.strike = strike
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.strike.touch("backward")
        return grad, None


class Layer(nn.Linear):
    """A linear layer that can be struck."""

    def __init__(self, num_inputs, num_outputs, strike):
        super().__init__(num_inputs, num_outputs)
        self.strike = strike

    def forward(self, x):
        self.strike.touch("forward")
        return Touching.apply(super().forward(x), self.strike)


class Loader:
    """Shuffles and draws for every batch, as an augmentation would."""

    def __init__(self, samples, classes, strike):
        self.samples, self.classes, self.strike = samples, classes, strike

    def __len__(self):
        return len(self.samples) // BATCH_SIZE

    def __iter__(self):
        self.strike.touch("loader")
        order = torch.randperm(len(self.samples))
        for indices in order.view(-1, BATCH_SIZE):
            noise = 0.1 * torch.randn(BATCH_SIZE, NUM_FEATURES)
            self.strike.touch("loader")
            yield self.samples[indices] + noise, self.classes[indices]


def struck_optimizer(factory, strike, *, after):
    """An optimizer that can be struck before its step, or when it has changed everything."""

    def make(params, **options):
        optimizer = factory(params, **options)

        class Striking(type(optimizer)):
            def step(self, closure=None):
                if not after:
                    strike.touch("update")
                super().step(closure)
                if after:
                    strike.touch("update")

        optimizer.__class__ = Striking
        return optimizer

    return make


def struck_schedule(optimizer, strike):
    def factor(step):
        if step:
            strike.touch("commit")
        return 0.9**step

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class Job:
    """One task as it is drawn: built anew for the engine and for plain PyTorch."""

    def __init__(self, rng, name, strike):
        self.name, self.strike = name, strike
        self.seed = rng.randrange(2**31)
        self.homes = random.Random(f"{self.seed}: homes").choice(exact.FACTORS["homes"])
        has_homes = self.homes != "no"
        self.num_batches = rng.randint(3, 5)
        self.width = rng.choice([8, 16])
        self.inner = [rng.choice(["linear", "norm", "dropout", "relu", "layer norm"]) for _ in range(rng.randint(1, 5))]
        self.optimizer, self.lr = OPTIMIZERS[rng.choice(sorted(OPTIMIZERS))]
        self.max_grad_norm = rng.choice([None, None, 0.5])
        self.accumulation_steps = rng.choice([1, 1, 2, 3])
        self.precision = rng.choice(["float32", "float32", "float32", "bfloat16"])
        self.has_schedule = rng.random() < 0.5 or has_homes  # which hooks exclude: it is struck instead
        self.validates = rng.random() < 0.3
        num_layers = len(self.inner) + 2
        self.ends = [*sorted(rng.sample(range(1, num_layers), rng.randint(0, num_layers - 1))), num_layers]
        self.max_retries = rng.choice([0, 1, 2, 3])
        self.strikes_after, self.in_hook = rng.random() < 0.5, rng.random() < 0.5 and not has_homes
        self.early_release = self.max_grad_norm is None and not has_homes and random.Random(self.seed).random() < 0.5
        if self.early_release:
            self.max_retries = 0  # which it excludes

    @property
    def num_steps(self):
        return EPOCHS * self.num_batches

    def build(self):
        strike, width = self.strike, self.width
        layers = {
            "linear": lambda: Layer(width, width, strike),
            "norm": lambda: nn.BatchNorm1d(width),
            "dropout": lambda: nn.Dropout(0.2),
            "relu": nn.ReLU,
            "layer norm": lambda: nn.LayerNorm(width),
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            inner = [layers[kind]() for kind in self.inner]
            model = nn.Sequential(Layer(NUM_FEATURES, width, strike), *inner, Layer(width, NUM_CLASSES, strike))
            num_samples = self.num_batches * BATCH_SIZE
            samples, classes = torch.randn(num_samples, NUM_FEATURES), torch.randint(NUM_CLASSES, (num_samples,))
            held_out = [
                (torch.randn(BATCH_SIZE, NUM_FEATURES), torch.randint(NUM_CLASSES, (BATCH_SIZE,))) for _ in range(2)
            ]
        return model, Loader(samples, classes, strike), held_out if self.validates else None

    @property
    def options(self):
        """What both take alike."""
        schedule = partial(struck_schedule, strike=self.strike) if self.has_schedule else None
        return {
            "seed": self.seed,
            "max_grad_norm": self.max_grad_norm,
            "accumulation_steps": self.accumulation_steps,
            "precision": self.precision,
            "lr_scheduler": schedule,
        }

    def task(self, *, presharded):
        """For the engine, and its model."""
        model, loader, validation = self.build()
        if self.in_hook or not self.has_schedule:
            model[0].weight.register_hook(lambda grad: self.strike.touch("commit"))
        optimizer = self.optimizer
        if self.homes == "no":  # else it has to be torch's own, and is struck from outside
            optimizer = struck_optimizer(optimizer, self.strike, after=self.strikes_after)
        task = ModelTask(
            model,
            F.cross_entropy,
            loader,
            self.lr,
            EPOCHS,
            name=self.name,
            optimizer=optimizer,
            homes=exact.homes_of(self.homes, len(model)),
            partitioner=Presharded(self.ends) if presharded else Pilot(),
            validation=validation,
            max_retries=self.max_retries,
            early_release=self.early_release,
            **self.options,
        )
        return task, model

    def expected(self, max_steps=None):
        """Plain PyTorch's result and state; nothing is armed."""
        model, loader, validation = self.build()
        result = reference.train(
            model,
            F.cross_entropy,
            loader,
            lr=self.lr,
            epochs=EPOCHS,
            optimizer=self.optimizer,
            validation=validation,
            max_steps=max_steps,
            **self.options,
        )
        return result, zoo.state(model)


@contextlib.contextmanager
def struck_methods(methods, kind, strike, *, after):
    """Strike methods of the spiller, for the struck task alone, before their work or after it."""

    def striking(original):
        def call(owner, state, *args, **kwargs):
            if state.name != NAMES[0]:
                return original(owner, state, *args, **kwargs)
            if not after:
                strike.touch(kind)
            result = original(owner, state, *args, **kwargs)
            if after:
                strike.touch(kind)
            return result

        return call

    with contextlib.ExitStack() as stack:
        for name in methods:
            stack.enter_context(mock.patch.object(Spiller, name, striking(getattr(Spiller, name))))
        yield


def nothing(strike, rng):
    """Layers, loader, optimizer, hook and schedule are struck from inside."""
    return contextlib.nullcontext()


def loads(strike, rng):
    methods = rng.sample(["load_slab", "load_input", "load_buffers"], rng.randint(1, 3))
    # What was loaded and is then lost must be given back by whoever loads: only before.
    return struck_methods(methods, "load", strike, after=False)


def updates(strike, rng):
    """Those of tasks with homes are struck here, others' from inside."""
    original, after = TaskOptimizer.update, rng.random() < 0.5

    def striking(owner, *arguments):
        kind = "update" if owner._task.name == NAMES[0] and owner._task.homes != "host" else ""
        if not after:
            strike.touch(kind)
        original(owner, *arguments)
        if after:
            strike.touch(kind)

    return mock.patch.object(TaskOptimizer, "update", striking)


def stores(strike, rng):
    methods = rng.sample(["store_micro", "store_buffers", "store_gradients"], rng.randint(1, 3))
    return struck_methods(methods, "store", strike, after=rng.random() < 0.5)


class StruckDisk(Disk):
    """Refuses what it is asked for when it is struck, from the first save on: a directory that cannot be opened is
    refused before any work.
    """

    strike = None
    has_begun = False


def _refusing(name):
    original = getattr(Disk, name)

    def call(self, *arguments):
        self.has_begun |= name == "write" and not arguments[0].name.startswith(TRIED)
        try:
            if self.has_begun:
                self.strike.touch("save")
        except Struck as error:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        return original(self, *arguments)

    return call


for _name in ("write", "sync", "rename", "remove_file"):
    setattr(StruckDisk, _name, _refusing(_name))


def saves(strike, rng):
    """The disk is struck, or a task as it is captured."""
    if rng.random() < 0.7:
        disk = type("Disk", (StruckDisk,), {"strike": strike})
        return mock.patch("hydra_engine.checkpoints.directory.Disk", disk)
    original = Snapshot._rest

    def striking(self, *arguments):
        if self.name == NAMES[0]:
            strike.touch("save")
        return original(self, *arguments)

    return mock.patch.object(Snapshot, "_rest", striking)


# By kind of fault: what has to be patched, and whether the task may be tried again.
INJECTORS = {"load": loads, "forward": nothing, "backward": nothing, "store": stores, "update": updates}
INJECTORS |= {"loader": nothing, "commit": nothing, "save": saves}
NEVER_AGAIN = ("commit",)


class Outcome:
    """Of one run, as a line of text."""

    def __init__(self, seed, kind, strike, report, job):
        found = report.tasks[job.name]
        self.kind, self.status, self.num_fired = kind, found.status, strike.num_fired
        self.was_retried = bool(found.retries)
        self.homed_bytes = sum(device.homed_bytes for device in report.devices)
        self.text = (
            f"seed {seed}: {kind} struck {strike.num_fired} of {strike.number} times, {job.max_retries} retries "
            f"allowed, {len(found.retries)} made: {found.status} at step {found.steps} of {job.num_steps}, "
            f"{job.homes} homes, {self.homed_bytes} bytes of all tasks"
        )

    def __str__(self):
        return self.text


def run(seed, kind=None):
    """One run, and all that must hold after it."""
    rng = random.Random(seed)
    kind = kind or rng.choice(sorted(INJECTORS))
    strike = Strike(kind, first=0, number=rng.choice([1, 1, 1, 2, 3]))
    idle = Strike("none", 0, 0)
    jobs = [Job(rng, name, strike if name == NAMES[0] else idle) for name in NAMES]
    job = jobs[0]
    per_step = {"forward": 3, "backward": 2, "store": 2, "save": 4}.get(kind, 1)
    strike.first = rng.randrange(per_step * job.num_steps)
    memory, num_devices, double_buffer = rng.choice(["8MiB", "96KiB", "24KiB"]), rng.randint(1, 3), rng.random() < 0.7
    chaos = rng.choice([None, rng.randrange(10**6)])
    every = random.Random(f"{seed}: saves").choice([None, None, 1, 2, 3]) or (2 if kind == "save" else None)
    faulthandler.dump_traceback_later(HANG_S, exit=True, file=sys.__stderr__)
    threads, shared = set(threading.enumerate()), shared_memory()
    try:
        with (
            tempfile.TemporaryDirectory() as checkpoints,
            tempfile.TemporaryDirectory() as directory,
            mock.patch.object(tempfile, "tempdir", directory),
        ):
            saving = {"checkpoint_dir": checkpoints, "checkpoint_every": every} if every else {}
            models, orchestra = planned(jobs, memory, num_devices, double_buffer, chaos, saving)
            with INJECTORS[kind](strike, rng):
                strike.is_armed = True
                with contextlib.redirect_stderr(io.StringIO()):
                    report = orchestra.train_models()
                strike.is_armed = False
            own = [name for name in os.listdir(directory) if not name.startswith("torchinductor_")]  # torch's cache
            assert own == [], "temporary files are left"
            if every:
                check_resumed(jobs, checkpoints, kind, strike, report)
        left = [thread.name for thread in threading.enumerate() if thread not in threads]
        assert not left, f"threads are left: {left}"
        assert shared_memory() <= shared, "shared memory is left"
        check(report, jobs, models, strike)
        exact.assert_within_budget(report, num_devices)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return Outcome(seed, kind, strike, report, job)


def check_resumed(jobs, checkpoints, kind, strike, report):
    """What was saved goes on to the end that an undisturbed run has."""
    if kind == "save":
        assert bool(strike.num_fired) == bool(report.checkpoints.messages), report.checkpoints.messages
    else:
        assert report.checkpoints.num_failed == 0, report.checkpoints.messages
    if kind != "save":
        assert_nothing_unnamed(Path(checkpoints))
    tasks, models = zip(*(job.task(presharded=False) for job in jobs), strict=True)
    orchestra = ModelOrchestrator(tasks, devices=[EmulatedDevice("8MiB")], checkpoint_dir=checkpoints)
    orchestra.verbose = 0
    report = orchestra.train_models(resume=True)
    for job, model in zip(jobs, models, strict=True):
        check_undisturbed(report, job, model)
    assert_nothing_unnamed(Path(checkpoints))


def planned(jobs, memory, num_devices, double_buffer, chaos, saving):
    """Models, and an orchestrator with a plan; a budget that is too small is doubled."""
    num_bytes = {"8MiB": 2**23, "96KiB": 96 * 2**10, "24KiB": 24 * 2**10}[memory]
    while True:
        tasks, models = zip(*(job.task(presharded=memory == "8MiB") for job in jobs), strict=True)
        devices = [
            EmulatedDevice(
                memory=num_bytes,
                chaos=None if chaos is None else chaos + k,
                meter_every_unit=True,
                has_arena=chaos is not None and chaos % 2 == 1,
            )
            for k in range(num_devices)
        ]
        orchestra = ModelOrchestrator(tasks, devices=devices, double_buffer=double_buffer, **saving)
        orchestra.verbose = 0
        try:
            orchestra.generate()
        except ShardDoesNotFit:
            num_bytes *= 2
        else:
            return models, orchestra


def check(report, jobs, models, strike):
    """Every task is as it should be."""
    for job, model in zip(jobs[1:], models[1:], strict=True):
        check_undisturbed(report, job, model)
        assert report.tasks[job.name].retries == []
    job, model, found = jobs[0], models[0], report.tasks[NAMES[0]]
    num_retries = len(found.retries)
    assert num_retries <= min(job.max_retries, strike.num_fired)
    # Several parts may be struck in one attempt, or a unit's slab and its input; and who had claimed a slab whose load
    # was struck may let go of the claim.
    may_meet = job.accumulation_steps > 1 or strike.kind == "load"
    may_retry = strike.kind not in NEVER_AGAIN
    if strike.kind == "save":  # which no task notices
        assert num_retries == 0
        check_undisturbed(report, job, model)
        return
    if strike.num_fired == 0 or (may_retry and strike.num_fired <= job.max_retries):
        assert found.status == "finished", found.error
    elif not (may_retry and may_meet):
        assert found.status == "failed", found
    if found.status == "finished":
        assert num_retries == strike.num_fired or may_meet
        check_undisturbed(report, job, model)
    else:
        assert found.status == "failed"
        assert isinstance(found.exception, Struck)
        assert num_retries == (job.max_retries if may_retry else 0)
        expected, state = job.expected(max_steps=found.steps)
        assert found.losses == expected.losses
        # Else a shard misses the update, as its error says, or shards have one of a step that was not committed.
        if strike.kind != "update" and not job.early_release:
            exact.assert_same_state(zoo.state(model), state)
    begun_again = [span for span in report.spans if span.lane == AGAIN]
    of_units = [retry for retry in found.retries if retry.where.startswith(f"{NAMES[0]}.")]
    assert len(begun_again) == len(of_units)
    assert found.revisions == [] or not begun_again


def check_undisturbed(report, job, model):
    found = report.tasks[job.name]
    expected, state = job.expected()
    assert found.status == "finished", found.error
    assert found.losses == expected.losses
    assert found.validation_losses == expected.validation_losses
    exact.assert_same_state(zoo.state(model), state)


def shared_memory():
    """Names of this process's shared memory."""
    return {name for name in os.listdir(SHM) if str(os.getpid()) in name} if SHM.is_dir() else set()


def main(argv=None):
    """Run many, print each that went wrong and a table by kind; 1 if any did."""
    parser = argparse.ArgumentParser(prog="python -m tests.fault_injection", description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200, metavar="N", help="how many (default: 200)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first; the next one's is one more")
    parser.add_argument("--kind", choices=sorted(INJECTORS), help="of all faults; default: drawn")
    parser.add_argument("--verbose", action="store_true", help="a line for each run")
    args = parser.parse_args(argv)
    begin_s, table, failed, num_homed = time.perf_counter(), Counter(), [], 0
    for seed in range(args.seed, args.seed + args.runs):
        try:
            outcome = run(seed, args.kind)
        except Exception:
            failed.append(seed)
            print(f"FAILED: seed {seed}\n{traceback.format_exc()}", flush=True)
            continue
        if args.verbose:
            print(outcome, flush=True)
        what = "not struck" if not outcome.num_fired else outcome.status + " after retries" * outcome.was_retried
        table[outcome.kind, what] += 1
        num_homed += outcome.homed_bytes > 0
    for (kind, what), number in sorted(table.items()):
        print(f"{kind:10} {what:24} {number:4}")
    elapsed_s = time.perf_counter() - begin_s
    print(f"{args.runs} runs, {num_homed} with homes, {len(failed)} failures {failed}, {elapsed_s:.0f} s", flush=True)
    return 1 if failed or not args.runs else 0


if __name__ == "__main__":
    sys.exit(main())
