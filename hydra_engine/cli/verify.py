"""``hydra-engine verify``: the tasks of a user's function, compared with plain PyTorch."""

from __future__ import annotations

import argparse

from hydra_engine.cli.command import Failure, mistakes
from hydra_engine.cli.sample import tasks_of
from hydra_engine.texts import say
from hydra_engine.verify import verify


def run(options: argparse.Namespace) -> None:
    """Print how the tasks of a user's function compare with plain PyTorch; raises Failure if a bit differs."""
    with mistakes(TypeError, ValueError):
        found = verify(
            lambda: tasks_of(options.function),
            steps=options.steps,
            memory=options.memory,
            devices=options.devices,
            micro_batches=options.micro_batches,
        )
    say(str(found))
    if not found.is_same:
        differing = [name for name, task in found.tasks.items() if not task.is_same]
        raise Failure(f"{', '.join(differing)}: not as plain PyTorch; the lines above say where, and what is likely")
