"""``hydra-engine train``: the tasks that a user's function returns, trained together."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hydra_engine.cli.command import Failure, Mistake
from hydra_engine.cli.sample import called, here_importable
from hydra_engine.cli.sweep import checkpoint_interval, devices_of
from hydra_engine.errors import CheckpointError, HostOutOfMemory, ShardDoesNotFit
from hydra_engine.run import ModelOrchestrator
from hydra_engine.tasks import FAILED, ModelTask, Report

RULE = "limit: a ModelTask or a list of them; return these"


def run(options: argparse.Namespace) -> None:
    """Train the tasks of a user's function, print the report and save it; raises Failure if a task failed."""
    if options.report is not None:
        _check_writable(Path(options.report))
    devices = None if options.devices is None else devices_of(options.devices, are_here=True)
    with here_importable():
        tasks = _tasks(options.function, called(options.function, "returns a ModelTask or a list of them"))
        try:
            orchestra = ModelOrchestrator(
                tasks,
                devices=devices,
                policy=options.policy,
                checkpoint_dir=options.checkpoint_dir,
                checkpoint_every=checkpoint_interval(options.checkpoint_every),
                dram=options.dram,
            )
        except (TypeError, ValueError) as error:
            raise Mistake(str(error)) from error
        orchestra.verbose = 0 if options.quiet else 1
        orchestra.tracebacks = options.debug
        try:
            if options.dry_run:
                orchestra.generate()
                return
            try:
                report = orchestra.train_models()
            except BaseException:  # what ends the run has a report, too, and is what the user hears of
                if options.report is not None and orchestra.report is not None:
                    with suppress(OSError):
                        orchestra.report.save(options.report)
                raise
        except (CheckpointError, HostOutOfMemory, ShardDoesNotFit) as error:
            raise Mistake(str(error)) from error
    _tell(report, options)


def _check_writable(path: Path) -> None:
    """Refuse a file for the report before the hours that training takes, rather than after them."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise Mistake(f"--report: {str(path)!r} cannot be saved, limit: a file in a folder that is there and yours")


def _tasks(name: str, returned: object) -> list[ModelTask]:
    tasks = [returned] if isinstance(returned, ModelTask) else returned
    if not isinstance(tasks, Sequence) or isinstance(tasks, str):
        raise Mistake(f"{name}: returned a {type(returned).__name__}, {RULE}")
    for each in tasks:
        if not isinstance(each, ModelTask):
            raise Mistake(f"{name}: returned a {type(each).__name__} in its list, {RULE}")
    if not tasks:
        raise Mistake(f"{name}: returned an empty list, limit: at least one ModelTask; return these")
    return list(tasks)


def _tell(report: Report, options: argparse.Namespace) -> None:
    if not options.quiet:
        print(f"\n{report}")
    if options.report is not None:
        try:
            report.save(options.report)
        except OSError as error:
            raise Failure(
                f"--report: cannot be saved: {error}; name a file in a folder that you may write to"
            ) from error
    failed = [name for name, task in report.tasks.items() if task.status == FAILED]
    if failed:
        raise Failure(
            f"{len(failed)} of {len(report.tasks)} tasks failed: {', '.join(failed)}; the others are trained; mend "
            f"what the lines above name"
        )
