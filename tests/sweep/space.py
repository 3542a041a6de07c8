"""A search space for tests, the plain training of its trials, and a sweep that is killed."""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import Callback, EmulatedDevice, ModelTask, stream_seed
from hydra_engine.sweep import Sweep
from tests import reference

STEPS, EPOCHS = 4, 3
DEVICES = ("1MiB",)


def batches(num=STEPS, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(5, 8, generator=generator), torch.randint(3, (5,), generator=generator)) for _ in range(num)]


def accuracy(output, target):
    return (output.argmax(1) == target).double().mean()


def settings(trial):
    """What the task and the plain loop are both made with; the model and the dropout draw."""
    width = trial.suggest_categorical("width", [4, 8])
    return {
        "model": nn.Sequential(nn.Linear(8, width), nn.Dropout(0.2), nn.Tanh(), nn.Linear(width, 3)),
        "lr": trial.suggest_float("lr", 1e-3, 1.0, log=True),
        "optimizer": torch.optim.Adam,
    }


def build(trial, *callbacks, **options):
    mine = settings(trial)
    return ModelTask(
        mine["model"],
        F.cross_entropy,
        batches(),
        mine["lr"],
        EPOCHS,
        optimizer=mine["optimizer"],
        validation=batches(2, seed=4),
        callbacks=callbacks,
        **options,
    )


def sweep_of(build_task=build, **options):
    """A sweep of two trials at a time on one device, which prints nothing."""
    sweep = Sweep(build_task, **{"parallel": 2, "devices": [EmulatedDevice(size) for size in DEVICES], **options})
    sweep.verbose = 0
    return sweep


def plain(trial, *, max_steps=None, sweep_seed=0):
    """The trial alone, in plain PyTorch: its losses, its validation losses, and its model."""
    torch.manual_seed(stream_seed(sweep_seed, trial.number, 0))
    mine = settings(trial)
    model = mine.pop("model")
    seed = int(torch.randint(0, 2**63 - 1, ()).item())  # as ModelTask draws its own
    validation = batches(2, seed=4)
    result = reference.train(
        model, F.cross_entropy, batches(), seed=seed, epochs=EPOCHS, validation=validation, max_steps=max_steps, **mine
    )
    return result, model


class Keep(Callback):
    """Keeps what a trial ended with, by its number."""

    def __init__(self, number, task_model, kept):
        self.number, self.model, self.kept = number, task_model, kept

    def on_task_end(self, report):
        weights = [parameter.detach().clone() for parameter in self.model().parameters()]
        self.kept[self.number] = (list(report.losses), list(report.validation_losses), weights)


def keeping(kept):
    """`build`, with `kept` filled by each trial as it ends."""

    def build_and_keep(trial):
        made = []
        task = build(trial, Keep(trial.number, lambda: made[0], kept))
        made.append(task.model)
        return task

    return build_and_keep


class First(Callback):
    """Notes the first step of each trial that takes one, by its number."""

    def __init__(self, number, steps):
        self.number, self.steps = number, steps

    def on_step(self, report):
        self.steps.setdefault(self.number, report.steps)


class Interrupt(Callback):
    """Interrupts the process, as Ctrl-C does, at a step."""

    def __init__(self, step):
        self.step = step

    def on_step(self, report):
        if report.steps == self.step:
            os.kill(os.getpid(), signal.SIGINT)


class Kill(Callback):
    """Kills the process, as SIGKILL does, at a step of one trial, once."""

    def __init__(self, step, flag):
        self.step, self.flag = step, Path(flag)

    def on_step(self, report):
        if report.steps == self.step and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def study_in(folder):
    """A study on disk, without pruning."""
    import optuna

    return optuna.create_study(
        study_name="own",
        storage=f"sqlite:///{folder / 'own.db'}",
        load_if_exists=True,
        sampler=optuna.samplers.RandomSampler(seed=1),
        pruner=optuna.pruners.NopPruner(),
    )


def main(folder, number, step):
    """A sweep of 6 trials that is killed at a step of one of them; notes each trial that it builds."""
    torch.set_num_threads(1)
    folder = Path(folder)

    def build_or_kill(trial):
        with (folder / "built").open("a") as file:
            print(trial.number, file=file)
        return build(trial, *([Kill(int(step), folder / "killed")] if trial.number == int(number) else []))

    options = {"num_trials": 6, "checkpoint_dir": folder / "sweep", "checkpoint_every": 2}
    sweep_of(build_or_kill, study=study_in(folder), **options).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
