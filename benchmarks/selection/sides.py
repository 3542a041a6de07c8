"""Everybody who trains a selection: how jobs are shared out to processes, and what each process does with its share.

A side's processes prepare (models, data, plans, a step of a model that is thrown away), wait for one another, and
train. The makespan is that of the process that trains longest. Its clock stands while it plans its next run.
"""

import os
import tempfile
import time
import traceback
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from statistics import mean

import torch
from grid import longest_first
from models import ADAMW, loss_fn, narrowed
from peers.fsdp2 import Sharded
from peers.process_group import open_group
from peers.resident import Resident
from peers.trainer import checkpointed, with_masters

from hydra_engine import ModelOrchestrator, ModelTask, split
from hydra_engine.schedule.units import Unit
from partitioners import parse_bytes

NARROW = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Jobs, and the devices that train them."""

    scale: object
    jobs: list
    memory: int | str


@dataclass(kw_only=True)
class Share:
    """What one process has trained."""

    seconds: float = 0.0
    processor_s: float = 0.0
    losses: dict = field(default_factory=dict)  # by job
    busy_s: float = 0.0
    loaded_bytes: int | None = None  # None: nobody counts them
    stored_bytes: int | None = None
    costs: dict = field(default_factory=dict)  # by job, of an engine that trains it alone

    @contextmanager
    def clock(self):
        """Add what the body takes, of the clock and of processors."""
        start_s, processor_s = time.perf_counter(), time.process_time()
        yield
        self.seconds += time.perf_counter() - start_s
        self.processor_s += time.process_time() - processor_s


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What all processes of a side have trained."""

    shares: list
    num_devices: int

    @property
    def makespan_s(self):
        """Seconds of the process that took longest."""
        return max(share.seconds for share in self.shares)

    @property
    def busy_share(self):
        return sum(share.busy_s for share in self.shares) / self.num_devices / self.makespan_s

    @property
    def processor_s(self):
        return sum(share.processor_s for share in self.shares)

    @property
    def losses(self):
        return {name: losses for share in self.shares for name, losses in share.losses.items()}

    @property
    def costs(self):
        return {name: cost for share in self.shares for name, cost in share.costs.items()}

    def crossed_bytes(self, name):
        """Bytes loaded or stored, or None."""
        found = [getattr(share, name) for share in self.shares]
        return None if None in found else sum(found)


# The engine


def task_of(job, scale):
    return ModelTask(
        job.model(),
        loss_fn,
        job.batches(),
        job.lr,
        name=job.name,
        optimizer=ADAMW,
        precision=scale.precision,
        accumulation_steps=job.num_micro_batches,
        seed=job.seed,
    )


def orchestra_of(jobs, setting, devices):
    """An orchestrator that has planned jobs on devices."""
    orchestra = ModelOrchestrator([task_of(job, setting.scale) for job in jobs], devices=devices)
    orchestra.verbose = 0
    orchestra.generate()
    return orchestra


def trained(orchestra, jobs, share):
    """Train what is planned, and note it."""
    with share.clock():
        report = orchestra.train_models()
    report.raise_failures()
    share.losses.update({job.name: report.tasks[job.name].losses for job in jobs})
    share.busy_s += sum(device.busy_s for device in report.devices)
    share.loaded_bytes = (share.loaded_bytes or 0) + sum(device.loaded_bytes for device in report.devices)
    share.stored_bytes = (share.stored_bytes or 0) + sum(device.stored_bytes for device in report.devices)
    return report


def together(jobs, setting, _rank, _number):
    """All jobs in one run on all devices."""
    orchestra = orchestra_of(jobs, setting, setting.scale.devices(setting.memory))
    yield
    share = Share()
    trained(orchestra, jobs, share)
    yield share


def one_by_one(jobs, setting, rank, _number):
    """A job after the other, each in a run of its own on one device. Between runs the clock stands, for plans."""
    orchestra = orchestra_of(jobs[:1], setting, [setting.scale.devices(setting.memory)[rank]])
    yield
    share = Share()
    for k, job in enumerate(jobs):
        if k > 0:
            orchestra.add_task(task_of(job, setting.scale))
            orchestra.generate()
        report = trained(orchestra, [job], share)
        share.costs[job.name] = costs_of(report.spans)
    yield share


def costs_of(spans):
    """Mean seconds of each unit of a step, and of its commit and its updates, of a task that is alone."""
    seconds = defaultdict(list)
    for span in spans:
        if span.lane == "compute":
            unit = Unit.parse(span.label)
            seconds[unit.kind, unit.shard].append(span.end_s - span.start_s)
        elif span.lane == "update":
            seconds["update", int(span.label.rpartition(".")[2])].append(span.end_s - span.start_s)
        elif span.lane == "commit":
            seconds["commit"].append(span.end_s - span.start_s)
    return {key: mean(each) for key, each in seconds.items()}


# Without the engine


def parts_of(job, inputs, target):
    """Micro-batches of a step: inputs, target, share of the step's mean."""
    return split(inputs, target, job.num_micro_batches)


class Plain:
    """Plain PyTorch in float32 on the CPU: whose bits the engine has."""

    def __init__(self, model, lr):
        self._model, self._optimizer = model, ADAMW(model.parameters(), lr=lr)

    def step_parts(self, parts):
        self._optimizer.zero_grad(set_to_none=True)
        losses = []
        for x, y, weight in parts:
            loss = loss_fn(self._model(x), y) * weight
            loss.backward()
            losses.append(loss.item())
        self._optimizer.step()
        return sum(losses)


def plain_trainer(job, scale, device):
    if scale.is_emulated:
        return Plain(job.model(), job.lr)
    return Resident(*with_masters(job.model()), device, job.lr)


def offloaded_trainer(job, scale, device):
    return Sharded(job.model(), device, job.lr, dtype=torch.float32 if scale.is_emulated else NARROW)


def stepped(jobs, setting, rank, make):
    """A job after the other, by a trainer that `make` makes. On a GPU each is made when the one before is gone."""
    device = device_of(setting.scale, rank)
    scale = setting.scale

    def losses_of(job, trainer):
        return [float(trainer.step_parts(parts_of(job, *batch))) for batch in job.batches()]

    warm = replace(jobs[0], num_steps=1)
    losses_of(warm, make(warm, scale, device))
    trainers = {job.name: make(job, scale, device) for job in jobs} if scale.is_emulated else {}
    yield
    share = Share()
    with share.clock():
        for job in jobs:
            share.losses[job.name] = losses_of(job, trainers.pop(job.name, None) or make(job, scale, device))
    share.busy_s = share.seconds
    yield share


def plain(jobs, setting, rank, _number):
    """A job after the other in plain PyTorch."""
    yield from stepped(jobs, setting, rank, plain_trainer)


def offloaded(jobs, setting, rank, _number):
    """A job after the other under FSDP2 with CPU offload, each on one device: there is nobody to wait for."""
    device = device_of(setting.scale, rank)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(parse_bytes(setting.memory, "memory") / total, device)
    close = open_group(device)
    yield from stepped(jobs, setting, rank, offloaded_trainer)
    close()


def device_of(scale, rank):
    if scale.is_emulated:
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


class Staged:
    """A stage of a pipeline over all processes, its blocks checkpointed, trained with one of torch's schedules."""

    def __init__(self, job, setting, rank, number, kind):
        from torch.distributed import pipelining

        device = device_of(setting.scale, rank)
        model = checkpointed(job.model() if setting.scale.is_emulated else narrowed(job.model()))
        ends = [round(len(model) * k / number) for k in range(number + 1)]
        self._stage = model[ends[rank] : ends[rank + 1]].to(device)
        self._optimizer = ADAMW(self._stage.parameters(), lr=job.lr)
        self._rank, self._is_last, self._device = rank, rank == number - 1, device
        stage = pipelining.PipelineStage(self._stage, rank, number, device)
        # 1F1B refuses fewer micro-batches than stages.
        num_micro_batches = max(job.num_micro_batches, number)
        self._schedule = getattr(pipelining, kind)(stage, num_micro_batches, loss_fn=self._loss)
        self.losses = []

    @staticmethod
    def _loss(output, target):
        return loss_fn(output.float(), target)

    def step(self, inputs, target):
        self._optimizer.zero_grad(set_to_none=True)
        found = []
        inputs = (inputs.to(self._device),) if self._rank == 0 else ()
        options = {"target": target.to(self._device), "losses": found} if self._is_last else {}
        self._schedule.step(*inputs, **options)
        self._optimizer.step()
        if self._is_last:
            self.losses.append(float(sum(each.detach() for each in found) / len(found)))


def pipelined(jobs, setting, rank, number, kind):
    """A job after the other, each over all devices."""
    close = open_group(device_of(setting.scale, rank), rank, number, os.environ["SELECTION_STORE"])
    warm = replace(jobs[0], num_steps=1)
    Staged(warm, setting, rank, number, kind).step(*warm.batches()[0])
    yield
    share = Share()
    for job in jobs:
        staged, batches = Staged(job, setting, rank, number, kind), job.batches()
        with share.clock():
            for batch in batches:
                staged.step(*batch)
        if staged.losses:
            share.losses[job.name] = staged.losses
    share.busy_s = share.seconds
    yield share
    close()


def gpipe(*arguments):
    yield from pipelined(*arguments, "ScheduleGPipe")


def one_f_one_b(*arguments):
    yield from pipelined(*arguments, "Schedule1F1B")


# Sides


@dataclass(frozen=True, kw_only=True)
class Side:
    """One who trains a selection. `all`: every process has all jobs; else each has its share, the longest first."""

    title: str
    train: object  # a generator: prepares up to its first yield, trains up to its second, which is of its Share
    is_per_device: bool = False  # a process for each device, else one for all
    all_jobs: bool = False

    def shares(self, jobs, num_devices):
        number = num_devices if self.is_per_device else 1
        return [jobs] * number if self.all_jobs else longest_first(jobs, number)


SIDES = {
    "ours": Side(title="the engine, all together", train=together),
    "a": Side(title="(a) plain PyTorch, one after another", train=plain),
    "b": Side(title="(b) whole tasks, longest first, our spilling", train=one_by_one, is_per_device=True),
    "c": Side(title="(c) one after another on one device, our spilling", train=one_by_one),
    "gpipe": Side(title="(d) GPipe", train=gpipe, is_per_device=True, all_jobs=True),
    "1f1b": Side(title="(d) 1F1B", train=one_f_one_b, is_per_device=True, all_jobs=True),
    "e": Side(title="(e) FSDP2 with CPU offload, whole tasks", train=offloaded, is_per_device=True),
    "f": Side(title="(f) a process of plain PyTorch for each device", train=plain, is_per_device=True),
}


class Refused(Exception):
    """A side that cannot run here, and why."""


def run(name, setting):
    """Train a setting's jobs by a side, in processes of its own."""
    side, scale = SIDES[name], setting.scale
    if not scale.is_emulated and torch.cuda.device_count() < scale.num_devices:
        raise Refused(f"{scale.name}: {torch.cuda.device_count()} GPUs, it needs {scale.num_devices}")
    if side.all_jobs and scale.num_devices < 2:
        raise Refused(f"{side.title}: a pipeline needs two devices, {scale.name} has {scale.num_devices}")
    shares = [share for share in side.shares(setting.jobs, scale.num_devices) if share]
    context = get_context("spawn")
    barrier = context.Barrier(len(shares))
    ends = []
    with tempfile.TemporaryDirectory() as folder, environment(SELECTION_STORE=f"{folder}/store"):
        for rank, jobs in enumerate(shares):
            own, its = context.Pipe(duplex=False)
            process = context.Process(
                target=child, args=(name, replace(setting, jobs=jobs), rank, len(shares), barrier, its), daemon=True
            )
            process.start()
            its.close()
            ends.append((process, own))
        found = [received(own) for _, own in ends]
        for process, own in ends:
            process.join()
            own.close()
    failed = [each for each in found if isinstance(each, str)]
    if failed:
        raise RuntimeError(f"{side.title} failed:\n" + "\n".join(failed))
    return Outcome(shares=found, num_devices=scale.num_devices)


def received(own):
    """What a process has sent: its share, or the traceback of what it raised."""
    try:
        return own.recv()
    except EOFError:
        return "its process ended without a word"


@contextmanager
def environment(**variables):
    """Set variables of the environment, for processes that the body starts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def child(name, setting, rank, number, barrier, its):
    """One process of a side: sends its Share, or a traceback as text."""
    if setting.scale.is_emulated:
        torch.set_num_threads(1)  # one compute thread for each emulated device
    try:
        training = SIDES[name].train(setting.jobs, setting, rank, number)
        next(training)
        barrier.wait()
        share = next(training)
        next(training, None)  # what it ends with
        its.send(share)
    except BaseException:
        barrier.abort()
        its.send(traceback.format_exc())
        raise
    finally:
        its.close()
