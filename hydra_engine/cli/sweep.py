"""``hydra-engine sweep``: the trials of a user's function, trained together, and the best of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hydra_engine import CheckpointError
from hydra_engine.cli.command import Mistake, mistakes
from hydra_engine.cli.sample import devices_of, function_of
from hydra_engine.sweep import Population, Rungs, StudyMismatch, Sweep
from hydra_engine.texts import table


def run(options: argparse.Namespace) -> None:
    """Run the sweep, and print the best trial, or with several objectives those that none beats in all."""
    if options.interval is not None and options.population is None:
        raise Mistake(f"--interval: {options.interval}, expected with --population; name the values to perturb")
    build_task, population = function_of(options.function), options.population
    is_here = options.cluster is None  # else the devices are those of each node
    with mistakes(ImportError, ValueError):
        sweep = Sweep(
            build_task,
            study=options.study,
            num_trials=options.trials,
            timeout=options.timeout,
            parallel=options.parallel,
            devices=None if options.devices is None else devices_of(options.devices, are_here=is_here),
            dram=options.dram,
            checkpoint_dir=options.checkpoint_dir,
            checkpoint_every=options.checkpoint_every,
            metric=_one_or_all(options.metric),
            direction=_one_or_all(options.direction),
            seed=options.seed,
            rungs=None if options.rungs is None else _rungs(options.rungs),
            population=population and Population(settings=population, interval=options.interval or 1),
            cluster=options.cluster,
        )
    with mistakes(ConnectionError, CheckpointError, StudyMismatch):  # what a trial raised keeps its traceback
        study = sweep.run()
    rows = [("best trial", "values", "parameters")]
    is_one = len(study.directions) == 1 and any(trial.state.name == "COMPLETE" for trial in study.trials)
    for trial in [study.best_trial] if is_one else study.best_trials:
        values = ", ".join(f"{value:.6g}" for value in trial.values)
        rows.append((str(trial.number), values, ", ".join(f"{key}={value}" for key, value in trial.params.items())))
    print("", *table(rows), sep="\n")


def _rungs(text: str) -> Rungs:
    least, colon, factor = text.partition(":")
    if not (colon and least.isdecimal() and factor.isdecimal()):
        raise Mistake(f"--rungs: {text!r}, expected MIN:FACTOR; pass for example 1:3")
    return Rungs(min_resource=int(least), reduction_factor=int(factor))


def _one_or_all(names: Sequence[str] | None) -> str | Sequence[str] | None:
    return names[0] if names is not None and len(names) == 1 else names
