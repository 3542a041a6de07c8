"""``hydra-engine train``: the tasks of a user's function, trained."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hydra_engine import CheckpointError, HostOutOfMemory, ModelOrchestrator, Report, ShardDoesNotFit
from hydra_engine.cli.command import Failure, Mistake, mistakes
from hydra_engine.cli.sample import devices_of, tasks_of
from hydra_engine.texts import say, warn


def run(options: argparse.Namespace) -> None:
    """Train the tasks of a user's function, print the report and save it; raises Failure if a task failed."""
    if options.report is not None:
        _check_writable(Path(options.report))
    devices = None if options.devices is None else devices_of(options.devices)
    tasks = tasks_of(options.function)
    with mistakes(TypeError, ValueError):
        orchestra = ModelOrchestrator(
            tasks,
            devices=devices,
            policy=options.policy,
            checkpoint_dir=options.checkpoint_dir,
            checkpoint_every=options.checkpoint_every,
            dram=options.dram,
        )
    orchestra.verbose = 0 if options.quiet else 1
    orchestra.tracebacks = options.debug
    with mistakes(CheckpointError, HostOutOfMemory, ShardDoesNotFit):
        if options.dry_run:
            orchestra.generate()
            return
        try:
            report = orchestra.train_models()
        except BaseException as error:  # what ends the run has a report, too, and is what the user hears of
            if orchestra.report is not None:
                for text in _not_saved(orchestra.report, options):
                    warn(f"hydra_engine: {text}")
                _refuse_exits(orchestra.report, error)
            raise
    wrong = _not_saved(report, options)  # first of all: a terminal may take nothing
    if not options.quiet:
        say(f"\n{report}")
    failed = [name for name, task in report.tasks.items() if task.status == "failed"]
    if failed:
        wrong.append(
            f"{len(failed)} of {len(report.tasks)} tasks failed: {', '.join(failed)}; the others are trained; mend "
            f"what the lines above name"
        )
    if wrong:
        raise Failure("; and ".join(wrong))


def _check_writable(path: Path) -> None:
    """Refuse a file for the report before the hours that training takes, rather than after them."""
    is_special = path.exists() and not path.is_file()  # /dev/null, say
    if path.is_dir() or not os.access(path if is_special else path.resolve().parent, os.W_OK):
        raise Mistake(f"--report: {str(path)!r} cannot be saved, expected a file in a folder that is there and yours")


def _not_saved(report: Report, options: argparse.Namespace) -> list[str]:
    """Save the report where that is asked for; return what hinders it."""
    if options.report is None:
        return []
    try:
        report.save(options.report)
    except Exception as error:  # of a run that may have failed, too: neither may hide the other
        return [f"--report: cannot be saved: {error}; name a file in a folder that you may write to"]
    return []


def _refuse_exits(report: Report, error: BaseException) -> None:
    """Raise Failure for a task's failure that would end the process as if nobody had failed: SystemExit(0), say."""
    if isinstance(error, Exception):
        return
    for task in report.tasks.values():
        if task.exception is error:
            raise Failure(f"{task.name} failed: {type(error).__name__}: {error}; mend what raised it") from error
