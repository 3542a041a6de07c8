"""The engine and what it is compared with. Each runs in a process of its own and tells of one row after the other."""

import time

import torch
from bounds import busy_share, commit_times, exposed_share, rounds_s
from ceilings import layer_seconds, linear_parameters, machine
from models import ADAMW, LR, NARROW, batches, loss_fn, make_model, narrowed, num_steps
from peers import PEERS
from peers.rows import run_peer
from row import filled, measured

from hydra_engine import CudaDevice, EmulatedDevice, ModelOrchestrator, ModelTask


def run_group(scale, group, emit):
    """Measure a group's rows in this process; `emit` takes each as a dict."""
    device = torch.device("cpu" if scale.is_emulated else "cuda:0")
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.set_device(device)
    CONTESTANTS[group.method](scale, group, device, emit)


def measure_machine(scale, group, device, emit):
    """The environment and its ceilings."""
    with measured(emit, device, group.rows()[0]) as row:
        row.update(machine(scale, device))


# The engine


def engine(scale, group, device, emit, num_tasks=1):
    """Models streamed under a cap; the first row's process goes on with the same weights."""
    models = [make_model(scale, group.size, "cpu") for _ in range(num_tasks)]
    for key in group.rows():
        with measured(emit, device, key) as row:
            train_streamed(scale, group, key[3], models, row)


def interleaved(scale, group, device, emit):
    """Two equal models on one device."""
    engine(scale, group, device, emit, num_tasks=2)


def train_streamed(scale, group, tokens, models, row):
    """One row of the engine."""
    total = scale.num_warm + num_steps(scale, tokens)
    early = len(models) == 1 if group.release == "auto" else group.release == "early"
    tasks = [
        ModelTask(
            model,
            loss_fn,
            batches(scale, total, tokens),
            LR,
            name=f"model-{k}",
            optimizer=ADAMW,
            precision="bfloat16",
            accumulation_steps=tokens // scale.micro_tokens,
            early_release=early,
            partitioner=group.partitioner,
            seed=k,
        )
        for k, model in enumerate(models)
    ]
    spec = EmulatedDevice(group.memory, scale.bandwidth) if scale.is_emulated else CudaDevice(0, memory=group.memory)
    orchestra = ModelOrchestrator(tasks, devices=[spec])
    orchestra.verbose = 0
    start_s = time.perf_counter()
    plan = orchestra.generate().tasks["model-0"]
    row["plan_s"] = time.perf_counter() - start_s
    row.update(
        num_parameters=sum(parameter.numel() for parameter in models[0].parameters()),
        num_tasks=len(models),
        early_release=early,
        partitioner=group.partitioner,
        boundaries=plan.boundaries,
        graph_bytes=plan.graph_bytes,
        micro_batches=plan.accumulation_steps,
        dram_plan_bytes=plan.dram_bytes * len(models),
        boundary_bytes=tokens * scale.sizes[group.size].width * NARROW.itemsize,
    )
    report = orchestra.train_models()
    report.raise_failures()
    commits, [used] = commit_times(report.spans), report.devices
    window = (commits[scale.num_warm * len(models) - 1], commits[-1])
    row.update(
        first_commit_s=commits[0],
        exposed_share=exposed_share(report.spans, *window),
        busy_share=busy_share(report.spans, *window),
        loaded_bytes=used.loaded_bytes / total,  # of a round: a step of each
        stored_bytes=used.stored_bytes / total,
        device_ledger_peak_bytes=used.peak_bytes,
        revisions=[str(revision) for task in report.tasks.values() for revision in task.revisions],
        last_loss=report.tasks["model-0"].losses[-1],
    )
    filled(row, rounds_s(commits, len(models), scale.num_warm), tokens * len(models))


# What it is compared with


def resident(scale, group, device, emit):
    """The kernels alone, and then plain PyTorch with everything on the device and no cap."""
    if group.kernels:
        with measured(emit, device, group.rows()[0]) as row:
            model = narrowed(make_model(scale, group.size, device))
            [(inputs, target)] = batches(scale, 1, scale.micro_tokens)
            layers = layer_seconds(model, inputs.to(device), target.to(device), loss_fn, device)
            row.update(layers=[vars(layer) for layer in layers], linear_parameters=linear_parameters(model))
            del model
    run_peer(scale, group, device, emit)


CONTESTANTS = {
    "machine": measure_machine,
    "engine": engine,
    "interleaved": interleaved,
    **dict.fromkeys(PEERS, run_peer),
    "resident": resident,
}
