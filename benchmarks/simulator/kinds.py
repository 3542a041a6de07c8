"""Tasks of byte-level GPTs by kind, runs of them, and what a kind takes: measured for a simulation."""

import sys
import threading
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch.nn import functional as F

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask, TaskCost
from hydra_engine.schedule.units import Unit
from partitioners import Presharded

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import gpt, token_batches

MEMORY_BYTES = 2**30
MEASURED_STEPS = 8
WARM_STEPS = 3  # in which memory is touched for the first time


def loss(logits, target):
    return F.cross_entropy(logits, target.flatten())


@dataclass(frozen=True)
class Kind:
    """A task: its GPT's width, its shards, its batch."""

    width: int
    boundaries: tuple[int, ...]
    batch_size: int
    accumulation_steps: int = 1

    def task(self, name, num_steps, **options):
        # Targets by sample, so that a batch can be split.
        batches = token_batches(num_steps, self.batch_size, 128)
        batches = [(tokens, target.view_as(tokens)) for tokens, target in batches]
        return ModelTask(
            gpt(width=self.width),
            loss,
            batches,
            1e-3,
            name=name,
            optimizer=torch.optim.AdamW,
            partitioner=Presharded(list(self.boundaries)),
            accumulation_steps=self.accumulation_steps,
            seed=0,
            **options,
        )


def change(orchestra, at):
    """Let a device go, or come back."""
    name = list(orchestra.devices)[at.device]
    if at.is_in:
        orchestra.add_device(name)
    else:
        orchestra.remove_device(name)


def trained(tasks, num_devices, bandwidth, policy="sharded-lrtf", changes=(), *, memory=MEMORY_BYTES, **options):
    """The report of a run, planning aside, and the plan."""
    torch.set_num_threads(1)
    devices = [EmulatedDevice(memory, bandwidth=bandwidth) for _ in range(num_devices)]
    orchestra = ModelOrchestrator(tasks, devices=devices, policy=policy, **options)
    orchestra.verbose = 0
    for at in changes:
        if at.at_s == 0:
            change(orchestra, at)
    plan = orchestra.generate()
    timers = [threading.Timer(at.at_s, partial(change, orchestra, at)) for at in changes if at.at_s > 0]
    for timer in timers:
        timer.start()
    report = orchestra.train_models()
    assert not any(timer.is_alive() for timer in timers), "the run is over before its last change"
    report.raise_failures()
    return report, plan


def measured(kind, bandwidth):
    """What a task takes: its bytes, and the seconds of units and of the host in a few steps of it alone."""
    task = kind.task("task", MEASURED_STEPS)
    crossing = bytes_of(task, kind.boundaries)
    report, plan = trained([task], 1, bandwidth)
    graph_bytes = plan.tasks["task"].graph_bytes
    seconds = defaultdict(list)  # by lane, and what of it
    for span in report.spans:
        if span.lane == "compute":
            unit = Unit.parse(span.label)
            if unit.step >= WARM_STEPS:
                seconds[unit.kind, unit.shard].append(span.end_s - span.start_s)
        elif span.lane == "update":
            seconds["update", int(span.label.rpartition(".")[2])].append(span.end_s - span.start_s)
        elif span.lane == "commit":
            seconds["commit"].append(span.end_s - span.start_s)
    num_shards = len(kind.boundaries)
    chain = TaskCost(name="", unit_s=[0.0] * (2 * num_shards - 1)).chain
    unit_s = {unit: median(seconds[unit]) for unit in chain}
    for kind_of_unit, shard in chain:
        if kind_of_unit == "b" and graph_bytes[shard]:  # measured without the forward that it otherwise repeats
            unit_s["b", shard] += unit_s["f", shard]
    device_spans = [span for span in report.spans if span.lane in ("load", "compute", "store")]
    return crossing | {
        "unit_s": list(unit_s.values()),
        "graph_bytes": graph_bytes,
        "setup_s": min(span.start_s for span in device_spans),
        "end_s": report.makespan_s - max(span.end_s for span in report.spans),
        "update_s": [median(seconds["update", shard]) for shard in range(num_shards)],
        "commit_s": median(seconds["commit"]),
    }


def bytes_of(task, boundaries):
    """What crosses the link: each shard's parameters and gradients, and what enters it."""
    value, _ = next(iter(task.dataloader))
    layers = list(task.model)
    shards = [layers[first:end] for first, end in pairwise((0, *boundaries))]
    load_bytes, boundary_bytes = [], []
    for shard in shards:
        load_bytes.append(sum(parameter.nbytes for layer in shard for parameter in layer.parameters()))
        boundary_bytes.append(value.nbytes)
        with torch.no_grad():
            for layer in shard:
                value = layer(value)
    return {"load_bytes": load_bytes, "gradient_bytes": load_bytes, "boundary_bytes": boundary_bytes}
