"""``hydra-engine sweep``: the trials of a user's function, trained together, and the best of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from hydra_engine.cli.command import Mistake, count, mistakes, seconds
from hydra_engine.cli.sample import function_of, here_importable
from hydra_engine.devices import DeviceSpec, EmulatedDevice, resolve_devices
from hydra_engine.errors import CheckpointError
from hydra_engine.sweep import Population, Rungs, StudyMismatch, Sweep
from hydra_engine.system import dram
from hydra_engine.tasks import table


def run(options: argparse.Namespace) -> None:
    """Run the sweep, and print the best trial of each objective."""
    if options.interval is not None and options.population is None:
        raise Mistake(f"--interval: {options.interval!r}, limit: with --population; name the values to perturb")
    devices = None if options.devices is None else devices_of(options.devices, are_here=options.cluster is None)
    with here_importable():
        build_task = function_of(options.function)
        with mistakes(ImportError, ValueError):
            sweep = Sweep(
                build_task,
                study=options.study,
                num_trials=count(options.trials, "--trials"),
                timeout=None if options.timeout is None else seconds(options.timeout, "--timeout"),
                parallel=None if options.parallel is None else count(options.parallel, "--parallel"),
                devices=devices,
                dram=options.dram,
                checkpoint_dir=options.checkpoint_dir,
                checkpoint_every=checkpoint_interval(options.checkpoint_every),
                metric=_one_or_all(options.metric),
                direction=_one_or_all(options.direction),
                seed=options.seed,
                rungs=None if options.rungs is None else _rungs(options.rungs),
                population=None
                if options.population is None
                else Population(settings=options.population, interval=count(options.interval or "1", "--interval")),
                cluster=options.cluster,
            )
        with mistakes(ConnectionError, CheckpointError, StudyMismatch):  # what a trial raised keeps its traceback
            study = sweep.run()
    print("", *table(_rows(study)), sep="\n")


def _rungs(text: str) -> Rungs:
    least, colon, factor = text.partition(":")
    if not colon:
        raise Mistake(f"--rungs: {text!r}, limit: MIN:FACTOR; pass for example 1:3")
    return Rungs(min_resource=count(least, "--rungs"), reduction_factor=count(factor, "--rungs"))


def checkpoint_interval(text: str) -> str | int:
    """Return what --checkpoint-every gives: a number of steps, or a time as text."""
    return int(text) if text.isascii() and text.isdecimal() else text


def _one_or_all(names: Sequence[str] | None) -> str | Sequence[str] | None:
    return names[0] if names is not None and len(names) == 1 else names


def devices_of(names: Sequence[str], *, are_here: bool) -> Sequence[DeviceSpec | str]:
    """Return the devices that --devices names; are_here: of this machine, and not of a cluster. Raises Mistake."""
    hint = "; a size such as 512MiB is an emulated device"
    with mistakes(ValueError, RuntimeError, before="--devices: ", after=hint):
        # A size is an emulated device's, and a GPU's name has no digit in front.
        specs: list[DeviceSpec | str] = [EmulatedDevice(name) if name[:1].isdigit() else name for name in names]
        return resolve_devices(specs, max(1, dram.available_dram_bytes() // 2)) if are_here else specs


def _rows(study: Any) -> list[tuple[str, ...]]:
    """The best trial, or with several objectives those that none beats in all."""
    rows: list[tuple[str, ...]] = [("best trial", "values", "parameters")]
    is_one = len(study.directions) == 1 and any(trial.state.name == "COMPLETE" for trial in study.trials)
    for trial in [study.best_trial] if is_one else study.best_trials:
        values = ", ".join(f"{value:.6g}" for value in trial.values)
        rows.append((str(trial.number), values, ", ".join(f"{key}={value}" for key, value in trial.params.items())))
    return rows
