"""The engine, measured; each group of rows in a process of its own."""

import re
import time
from dataclasses import dataclass
from functools import partial

import torch
from bounds import busy_share, commit_times, exposed_share, measured_window, rounds_s
from kernels import layer_seconds
from models import ADAMW, LR, NARROW, batches, loss_fn, make_model, narrowed
from peers import PEERS
from row import filled, measured
from torch.profiler import ProfilerActivity, profile

from hydra_engine import CudaDevice, EmulatedDevice, ModelOrchestrator, ModelTask, pictures
from hydra_engine.system.dram import available_dram_bytes
from hydra_engine.tasks.callback import Callback
from partitioners import Balanced

# What the engine holds in DRAM: float32 weight and two moments, bfloat16 weight and gradient.
BYTES_PER_PARAMETER = 4 + 8 + 2 + 2
DRAM_SHARE = 0.9  # of what is available; boundaries, data and what a process takes are in the rest
MOST_TRACE_BYTES = 10 * 2**20
UNCAPPED = "64MiB"  # of an emulated device


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How the engine trains."""

    is_balanced: bool = False  # into `Scale.num_shards` shards of equal time, and not as the planner likes
    is_compiled: bool = False
    is_many: bool = False  # as many models as `Scale.num_models` and DRAM allow, interleaved
    homes: str = "host"


VARIANTS = {
    "engine": Variant(),
    "engine, balanced": Variant(is_balanced=True),
    "engine, compiled": Variant(is_compiled=True),
    "engine, balanced, compiled": Variant(is_balanced=True, is_compiled=True),
    "homes": Variant(homes="auto"),
}


def engine(scale, group, device, emit, folder, variant):
    """Models streamed under a cap, and each row's timeline; the first row's process goes on with the same weights."""
    num_models = num_that_fit(scale, group.size) if variant.is_many else 1
    models = [make_model(scale, group.size, "cpu") for _ in range(num_models)]
    num_before = 0
    for key in group.rows():
        with measured(emit, device, key) as row:
            row["steps_before"] = num_before  # of rows before this one: losses compare where it is equal
            num_before += scale.num_warm + scale.num_steps
            report = train_streamed(scale, group, key[3], models, variant, row)
            words = re.findall(r"\w+", " ".join(map(str, key)))
            pictures.trace(report, folder / f"spans-{'-'.join(words)}.json")


def num_that_fit(scale, size):
    """Models of which DRAM holds float32 weights and moments, bfloat16 weights and gradients; at least two."""
    model_bytes = BYTES_PER_PARAMETER * sum(each.numel() for each in make_model(scale, size, "meta").parameters())
    found = min(scale.num_models, int(available_dram_bytes() * DRAM_SHARE) // model_bytes)
    if found < 2:
        raise MemoryError(
            f"{model_bytes} bytes of DRAM for each model, {available_dram_bytes()} available of which {DRAM_SHARE:.0%} "
            "are used: two do not fit"
        )
    return found


def make_tasks(scale, tokens, models, variant, data, **options):
    """A task for each model, on the same data; a model alone without homes is updated as its gradients arrive."""
    # None is predicted to gain where a model is as small as there.
    homes = "device" if scale.is_emulated and variant.homes == "auto" else variant.homes
    if variant.is_balanced:
        options["partitioner"] = Balanced(scale.num_shards)
    return [
        ModelTask(
            model,
            loss_fn,
            data,
            LR,
            name=f"model-{k}",
            optimizer=ADAMW,
            precision="bfloat16",
            accumulation_steps=tokens // scale.micro_tokens,
            early_release=len(models) == 1 and homes == "host" and "all",
            homes=homes,
            compile=variant.is_compiled,
            seed=k,
            **options,
        )
        for k, model in enumerate(models)
    ]


def orchestra_of(scale, group, tasks):
    """The tasks on one device under the group's cap, if it has one."""
    if scale.is_emulated:
        spec = EmulatedDevice(group.memory or UNCAPPED, scale.bandwidth)
    else:
        spec = CudaDevice(0, memory=group.memory or None)
    orchestra = ModelOrchestrator(tasks, devices=[spec])
    orchestra.verbose = 0
    return orchestra


def train_streamed(scale, group, tokens, models, variant, row):
    """One row of the engine; its report."""
    total = scale.num_warm + scale.num_steps
    orchestra = orchestra_of(scale, group, make_tasks(scale, tokens, models, variant, batches(scale, total, tokens)))
    start_s = time.perf_counter()
    plan = orchestra.generate().tasks["model-0"]
    row["plan_s"] = time.perf_counter() - start_s
    row.update(
        num_parameters=sum(parameter.numel() for parameter in models[0].parameters()),
        num_tasks=len(models),
        boundaries=plan.boundaries,
        graph_bytes=plan.graph_bytes,
        micro_batches=plan.accumulation_steps,
        dram_plan_bytes=plan.dram_bytes * len(models),
        boundary_bytes=tokens * scale.sizes[group.size].width * NARROW.itemsize,
    )
    report = orchestra.train_models()
    report.raise_failures()
    commits, [used] = commit_times(report.spans), report.devices
    window = measured_window(commits, scale.num_warm)
    row.update(
        losses=report.tasks["model-0"].losses,
        first_commit_s=min(times[0] for times in commits.values()),
        exposed_share=exposed_share(report.spans, *window),
        busy_share=busy_share(report.spans, *window),
        launch_s=used.launch_s,  # of the whole run
        loaded_bytes=used.loaded_bytes / total,  # of a round: a step of each
        stored_bytes=used.stored_bytes / total,
        device_ledger_peak_bytes=used.peak_bytes,
        homed_bytes=used.homed_bytes,
        homed_layers=sum(plan.homed_layers.values()),
        no_homes_because=plan.no_homes_because,
        revisions=[str(revision) for task in report.tasks.values() for revision in task.revisions],
    )
    filled(row, rounds_s(commits, scale.num_warm), tokens * len(models))
    return report


class Profiled(Callback):
    """Profiles two steps, after the warm ones: kernels and copies of the device, operators of all threads."""

    def __init__(self, num_warm, path):
        self._num_warm, self._path, self._profile = num_warm, path, None
        with self._new():  # the profiler wants its first start in the process's main thread
            pass

    def _new(self):
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        return profile(activities=activities, experimental_config=everywhere)

    def on_step(self, report):
        if report.steps == self._num_warm:
            self._profile = self._new()
            self._profile.start()
        elif report.steps == self._num_warm + 2:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._path))


def trace(scale, group, device, emit, folder):
    """A profiler's trace of two steps, in a file beside the rows."""
    path, tokens = folder / "trace.json.gz", group.tokens[0]
    with measured(emit, device, group.rows()[0]) as row:
        data = batches(scale, scale.num_warm + 3, tokens)  # the last step is not profiled: it has no next one beside
        callback = Profiled(scale.num_warm, path)
        tasks = make_tasks(
            scale, tokens, [make_model(scale, group.size, "cpu")], VARIANTS["engine"], data, callbacks=[callback]
        )
        orchestra_of(scale, group, tasks).train_models().raise_failures()
        row["trace_bytes"] = path.stat().st_size
        if row["trace_bytes"] > MOST_TRACE_BYTES:
            path.unlink()
            raise MemoryError(f"a trace of {row['trace_bytes']} bytes, limit: {MOST_TRACE_BYTES}")


def kernels(scale, group, device, emit, _):
    """Each layer's kernels alone, with everything on the device."""
    with measured(emit, device, group.rows()[0]) as row:
        model = narrowed(make_model(scale, group.size, "cpu")).to(device)
        [(inputs, target)] = batches(scale, 1, scale.micro_tokens)
        layers = layer_seconds(model, inputs.to(device), target.to(device), loss_fn, device)
        row.update(layers=[vars(layer) for layer in layers])


# Losses over many steps


def engine_losses(scale, group, device, emit, _):
    """The losses of many steps of the engine."""
    tokens = group.tokens[0]
    with measured(emit, device, group.rows()[0]) as row:
        models = [make_model(scale, group.size, "cpu")]
        tasks = make_tasks(scale, tokens, models, VARIANTS["engine"], batches(scale, scale.num_loss_steps, tokens))
        report = orchestra_of(scale, group, tasks).train_models()
        report.raise_failures()
        row["losses"] = report.tasks["model-0"].losses


def resident_losses(scale, group, device, emit, _):
    """The losses of the same steps with everything on the device and float32 masters."""
    tokens = group.tokens[0]
    with measured(emit, device, group.rows()[0]) as row:
        make = PEERS["resident"].load()
        trainer = make(scale, group.size, device=device, cap_bytes=None, micro_tokens=scale.micro_tokens)
        row["losses"] = [float(trainer.step(*batch)) for batch in batches(scale, scale.num_loss_steps, tokens)]
        trainer.close()


METHODS = {
    **{name: partial(engine, variant=variant) for name, variant in VARIANTS.items()},
    "interleaved": partial(engine, variant=Variant(is_many=True)),
    "trace": trace,
    "kernels": kernels,
    "long run, engine": engine_losses,
    "long run, resident": resident_losses,
}
