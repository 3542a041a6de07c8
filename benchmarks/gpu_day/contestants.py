"""The engine and what it is compared with. Each runs in a process of its own and tells of one row after the other."""

import gc
import os
import tempfile
import time
from functools import partial

import torch
from bounds import busy_share, commit_times, exposed_share, rounds_s
from ceilings import layer_seconds, linear_parameters, machine
from models import ADAMW, LR, NARROW, batches, loss_fn, make_model, narrowed, num_steps
from row import filled, in_short, measured, timed_steps
from torch import nn
from torch.utils.checkpoint import checkpoint

from hydra_engine import CudaDevice, EmulatedDevice, ModelOrchestrator, ModelTask
from partitioners import parse_bytes


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


# Everything on the GPU


class Resident:
    """bfloat16 weights, float32 masters and AdamW's moments on one device, stepped layer by layer.

    So that of the widened gradients only one layer's are there at a time.
    """

    def __init__(self, model):
        self.model = model
        self._layers = []
        for layer in model:
            parameters = list(layer.parameters())
            masters = [nn.Parameter(parameter.detach().float().clone()) for parameter in parameters]
            self._layers.append((parameters, masters, ADAMW(masters, lr=LR)))

    def step(self, inputs, target, num_micro_batches):
        for x, y in zip(inputs.chunk(num_micro_batches), target.chunk(num_micro_batches), strict=True):
            (loss_fn(self.model(x).float(), y) / num_micro_batches).backward()
        for parameters, masters, optimizer in self._layers:
            for parameter, master in zip(parameters, masters, strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(parameters, masters, strict=True):
                    parameter.copy_(master)
                    master.grad = None


def resident(scale, group, device, emit):
    """The kernels alone, and then plain PyTorch with everything on the device and no cap."""
    model = narrowed(make_model(scale, group.size, device))
    if group.kernels:
        with measured(emit, device, group.rows()[0]) as row:
            [(inputs, target)] = batches(scale, 1, scale.micro_tokens)
            layers = layer_seconds(model, inputs.to(device), target.to(device), loss_fn, device)
            row.update(layers=[vars(layer) for layer in layers], linear_parameters=linear_parameters(model))
    trained = None
    for tokens in group.tokens:
        with measured(emit, device, ("resident", group.size, "", tokens)) as row:
            trained = trained or Resident(model)
            step = partial(trained.step, num_micro_batches=tokens // scale.micro_tokens)
            data = batches(scale, scale.num_warm + num_steps(scale, tokens), tokens)
            data = [(inputs.to(device), target.to(device)) for inputs, target in data]
            filled(row, timed_steps(step, data, device, scale.num_warm), tokens)
            row["micro_batches"] = tokens // scale.micro_tokens
        model.zero_grad(set_to_none=True)


# FSDP2 with everything offloaded


class Checkpointed(nn.Module):
    """A layer that keeps its input alone and runs again in the backward."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


def sharded(model, device):
    """FSDP2 around every layer, its weights, gradients and optimizer on the CPU; blocks are checkpointed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=NARROW),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    last = len(model) - 1
    layers = [layer if k in (0, last) else Checkpointed(layer) for k, layer in enumerate(model)]
    for k, layer in enumerate(layers):
        fully_shard(layer, reshard_after_forward=k != last, **options)
    return fully_shard(nn.Sequential(*layers), **options)


def fsdp2(scale, group, device, emit):
    """FSDP2 with CPUOffloadPolicy under the same cap, in one process of world size 1."""
    import torch.distributed as dist

    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(parse_bytes(group.memory, "memory") / total, device)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")  # there may be no other network, and nobody to talk to
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            trained = Sharded(scale, group.size, device)
            for key in group.rows():
                with measured(emit, device, key) as row:
                    trained.train(key[3], row)
        finally:
            dist.destroy_process_group()


class Sharded:
    """A model under FSDP2 and its optimizer, in micro-batches as large as fit.

    Each moves all weights up twice and all gradients down, so the largest are the best for it.
    """

    def __init__(self, scale, size, device):
        self._scale, self._size, self._device = scale, size, device
        self._most_tokens = None  # of a micro-batch, once one did not fit
        self._model = None

    def train(self, tokens, row):
        """One row."""
        scale = self._scale
        data = batches(scale, scale.num_warm + num_steps(scale, tokens), tokens)
        micro_tokens = tokens if self._most_tokens is None else min(tokens, self._most_tokens)
        while not self._fits(data[0], tokens // micro_tokens):
            micro_tokens //= 2
            self._most_tokens = micro_tokens
            if micro_tokens < scale.length:
                self._most_tokens = scale.length  # the next row tries again, and says the same
                raise MemoryError(f"not one sequence of {scale.length} tokens fits: {self._refusal}")
        step = partial(self._step, num_micro_batches=tokens // micro_tokens)
        try:
            seconds = timed_steps(step, data, self._device, scale.num_warm)
        except BaseException:
            self._model = self._optimizer = None
            raise
        filled(row, seconds, tokens)
        row.update(micro_batches=tokens // micro_tokens, is_capped=self._device.type == "cuda")

    def _fits(self, batch, num_micro_batches):
        try:
            if self._model is None:
                self._model = sharded(make_model(self._scale, self._size, "cpu"), self._device)
                self._optimizer = ADAMW(self._model.parameters(), lr=LR)
            self._step(*batch, num_micro_batches)
            return True
        except torch.OutOfMemoryError as error:
            self._refusal = in_short(error)
        # What FSDP2 knows of its layers is not defined after an error in the middle of a step.
        self._model = self._optimizer = None
        gc.collect()
        torch.cuda.empty_cache()
        return False

    def _step(self, inputs, target, num_micro_batches):
        for x, y in zip(inputs.chunk(num_micro_batches), target.chunk(num_micro_batches), strict=True):
            loss = loss_fn(self._model(x.to(self._device)).float(), y.to(self._device)) / num_micro_batches
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


CONTESTANTS = {
    "machine": measure_machine,
    "engine": engine,
    "interleaved": interleaved,
    "resident": resident,
    "fsdp2": fsdp2,
}
