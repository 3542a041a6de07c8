"""A small training that saves as it goes, all that it leaves, and whether two of them left the same bits.

    python -m tests.durable FOLDER                                # train, or go on, and write FOLDER/results.pt
    python -m tests.durable FOLDER --kill-at conv:7 --kill-at conv:20    # kill itself once at each of these steps

The second is what `torchrun` is given. `tests/durability.py` kills the first from outside.
"""

import argparse
import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.checkpoints.checkpoint import load_newest
from hydra_engine.checkpoints.nested import JSON, unflatten
from partitioners import Presharded
from tests import exact, zoo

EPOCHS = 3  # of 10 steps each
CHECKPOINT_EVERY = 3  # steps
KEEP = 2
CHECKPOINTS, RESULTS = "checkpoints", "results.pt"

# What a task's report tells that must not depend on where its run was cut.
TOLD = (
    *("seed", "status", "steps", "losses", "validation_losses", "validation_steps", "validation_metrics"),
    *("loss_scales", "skipped_steps", "ema_state", "best_step", "best_value", "stopped_early"),
)
# Where the saved state names how the task ran and not what came of it: other settings may change that.
OF_THE_PLAN = frozenset({"boundaries", "revisions", "retries"})


class Settings(NamedTuple):
    """What may be another at each start."""

    num_devices: int = 1
    memory: str = "8MiB"
    partition: str = "three"  # shards, as `exact.ends` names them; "pilot": by the default partitioner
    policy: str = "sharded-lrtf"
    double_buffer: bool = True
    homes: str = "no"  # as `exact.homes_of` names them, of the tasks that may have some

    @classmethod
    def drawn(cls, rng):
        """Any."""
        partition = rng.choice(("one", "three", "each", "pilot"))
        little = "128KiB" if partition == "pilot" else "256KiB"  # a partition that is given is not cut smaller
        return cls(
            num_devices=rng.choice((1, 2, 3)),
            memory=rng.choice((little, "8MiB")),
            partition=partition,
            policy=rng.choice(("sharded-lrtf", "fifo", "round-robin", "fair-share")),
            double_buffer=rng.choice((True, False)),
            homes=rng.choice(exact.FACTORS["homes"]),
        )


def step_schedule(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=10 * EPOCHS)


def epoch_schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)


class Stream(IterableDataset):
    """Tokens that are drawn as they are read, from all three generators of the process."""

    def __iter__(self):
        for _ in range(40):
            first = int(torch.randint(zoo.VOCABULARY, ())) + random.randrange(5) + np.random.randint(5)
            tokens = (torch.arange(zoo.CONTEXT + 1) * 7 + first) % zoo.VOCABULARY
            yield tokens[:-1], tokens[1:]


class Noisy(Dataset):
    """Samples with noise that is drawn anew at each reading."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        inputs, target = self.dataset[index]
        return inputs + 0.1 * torch.randn(inputs.shape), target


def averaged_and_clipped():
    """bfloat16, a clipped norm, a moving average, and an iterable data set."""
    model, loss_fn, _ = zoo.gpt()
    options = {"precision": "bfloat16", "max_grad_norm": 0.5, "ema_decay": 0.9, "optimizer": torch.optim.Adam}
    validation = DataLoader(zoo.gpt()[2].dataset, batch_size=4)  # a larger one might have to be cut, and round anew
    return model, loss_fn, DataLoader(Stream(), batch_size=4), 1e-2, {**options, "validation": validation}


def scaled():
    """A loss scale that grows and shrinks, BatchNorm, momentum, and a sampler with a generator of its own."""
    model, loss_fn, loader = zoo.cnn()
    own = torch.Generator().manual_seed(11)
    loader = DataLoader(Noisy(loader.dataset), batch_size=6, shuffle=True, generator=own)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=4)
    options = {"optimizer": partial(torch.optim.SGD, momentum=0.9), "precision": "float16", "grad_scaler": scaler}
    schedule = {"lr_scheduler": epoch_schedule, "lr_scheduler_interval": "epoch"}
    return model, loss_fn, loader, 0.05, {**options, **schedule, "validation": zoo.cnn()[2]}


def drawing():
    """Layers that draw, micro-batches, a schedule by steps, and validation in the middle of an epoch."""
    model, loss_fn, loader = zoo.dropout()
    options = {"optimizer": torch.optim.AdamW, "lr_scheduler": step_schedule, "accumulation_steps": 2}
    validation = DataLoader(loader.dataset, batch_size=5)
    options |= {"validation": validation, "validation_interval": 7, "keep_best": "validation_loss"}
    return model, loss_fn, loader, 0.01, options


def released():
    """Shards are updated in the middle of a step, in which a save may fall; some layers are frozen."""
    model, loss_fn, loader = zoo.frozen()
    return model, loss_fn, loader, 0.01, {"optimizer": torch.optim.AdamW, "early_release": True}


BUILDERS = {"gpt": averaged_and_clipped, "conv": scaled, "drawing": drawing, "released": released}


class Begun(Callback):
    """Notes how many steps were there before the first one of this process."""

    def __init__(self):
        self.steps = {}

    def on_step(self, report):
        self.steps.setdefault(report.name, report.steps - 1)


class KillsItself(Callback):
    """Ends the process as nothing can notice or prevent, once at each step of a list, over all its lives."""

    def __init__(self, folder, steps):
        self.folder, self.steps = folder, steps

    def on_step(self, report):
        marker = self.folder / f"killed-{report.name}-{report.steps}"
        if report.steps in self.steps and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder, settings=None, *, names=tuple(BUILDERS), kill_at=None):
    """Train, or go on where the last one was cut off, to the end; leaves `results.pt`.

    names: of the tasks. kill_at: task -> steps.
    """
    folder, settings, kill_at = Path(folder), settings or Settings(), kill_at or {}
    torch.set_num_threads(1)
    random.seed(1)  # the two that a task's seed leaves as they are
    np.random.seed(1)
    begun, models, tasks = Begun(), {}, []
    for seed, name in enumerate(names):
        model, loss_fn, loader, lr, options = BUILDERS[name]()
        if settings.partition != "pilot":
            options["partitioner"] = Presharded(exact.ends(settings.partition, len(model)))
        options["homes"] = exact.homes_of(settings.homes, len(model))
        callbacks = [begun, KillsItself(folder, kill_at.get(name, ()))]
        tasks.append(
            ModelTask(model, loss_fn, loader, lr, EPOCHS, name=name, seed=seed, callbacks=callbacks, **options)
        )
        models[name] = model
    devices = [EmulatedDevice(settings.memory) for _ in range(settings.num_devices)]
    orchestra = ModelOrchestrator(
        tasks,
        devices=devices,
        policy=settings.policy,
        double_buffer=settings.double_buffer,
        checkpoint_dir=folder / CHECKPOINTS,
        checkpoint_every=CHECKPOINT_EVERY,
        keep=KEEP,
    )
    orchestra.verbose = 0
    report = orchestra.train_models(resume=True)
    report.raise_failures()
    saving = {name: getattr(report.checkpoints, name) for name in ("num_saved", "num_failed", "copied_bytes")}
    left = {"leaves": left_by(models, report, folder / CHECKPOINTS), "begun": begun.steps, "saving": saving}
    left["homed_bytes"] = sum(device.homed_bytes for device in report.devices)
    torch.save(left, folder / f"{RESULTS}.new")
    os.replace(folder / f"{RESULTS}.new", folder / RESULTS)


def left_by(models, report, directory):
    """Everything there is at the end, by its place: the models, the report, and what was saved last."""
    newest = load_newest(directory)
    assert newest is not None, f"nothing was saved in {directory}"
    assert not newest.messages, newest.messages
    found = {}
    for name, model in models.items():
        told = {field: getattr(report.tasks[name], field) for field in TOLD}
        whole = {"model": model.state_dict(), "report": told, "saved": saved_of(newest, name)}
        found |= leaves(whole, name)
    return found


def saved_of(checkpoint, name):
    """All that a checkpoint holds of a task, by part."""
    parts = {part: checkpoint.read_tensors(name, part) for part in sorted(checkpoint.parts(name))}
    return {part: unflatten(found) if JSON in found else found for part, found in parts.items()}


def leaves(value, path):
    """Nested values by their path; each a tensor or, of all else, a text that tells it exactly."""
    if isinstance(value, torch.Tensor):
        return {path: value.detach()}
    if isinstance(value, np.ndarray):
        return {path: torch.from_numpy(value.astype(value.dtype, copy=True))}
    if isinstance(value, (list, tuple)) and value:
        if all(type(each) is float for each in value):
            return {path: torch.tensor(value, dtype=torch.float64)}  # a NaN has bits, too
        if not all(type(each) is int for each in value):
            value = dict(enumerate(value))
    if isinstance(value, dict) and value:
        found = {}
        for key, each in value.items():
            if key not in OF_THE_PLAN:
                found |= leaves(each, f"{path}.{key}")
        return found
    return {path: repr(value)}


def load_results(folder):
    """What `train` left."""
    return torch.load(Path(folder) / RESULTS, weights_only=True)


def differences(actual, expected):
    """Where two runs did not leave the same bits, or one of them left nothing."""
    places = [*expected, *(place for place in actual if place not in expected)]
    return [place for place in places if not _same(actual.get(place), expected.get(place))]


def _same(a, b):
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return type(a) is type(b) and a == b
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tests.durable", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=BUILDERS, default=list(BUILDERS))
    parser.add_argument("--kill-at", action="append", default=[], metavar="TASK:STEP", help="once; may be repeated")
    arguments = parser.parse_args(argv)
    kill_at = {}
    for task, _, step in (each.partition(":") for each in arguments.kill_at):
        kill_at.setdefault(task, []).append(int(step))
    train(arguments.folder, names=arguments.tasks, kill_at=kill_at)


if __name__ == "__main__":
    main()
