"""``hydra-engine resume``: what the newest checkpoint of a run holds, and its command once more."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn

from hydra_engine import CheckpointError, load_newest
from hydra_engine.cli.command import Mistake, mistakes
from hydra_engine.texts import table

# Names the directory for the process that is started again, as docs/signals.md has it.
VARIABLE = "HYDRA_ENGINE_RESUME"
_OTHERWISE = "start your program with train_models(resume=True), or give a command: resume DIR -- COMMAND..."


def run(options: argparse.Namespace) -> NoReturn:
    """Print what was saved in a directory, and become the command that saved it, or the one that was given.

    Of the checkpoint's data: "command", how its process was started; "tasks", by name: "steps", "loss" (the last one,
    or None) and "over" (how it ended, or None).
    """
    directory, command = Path(options.directory).absolute(), options.argv
    with mistakes(CheckpointError):
        found = load_newest(directory)
    if found is None:
        raise Mistake(
            f"DIR: nothing is saved in {directory}, expected at least one checkpoint; give the checkpoint_dir of a run"
        )
    data = found.data if isinstance(found.data, dict) else {}
    rows: list[tuple[str, ...]] = [("task", "status", "steps", "last loss")]
    for name, task in data.get("tasks", {}).items():
        loss = "-" if task["loss"] is None else f"{task['loss']:.3f}"
        rows.append((name, task["over"] or "goes on", str(task["steps"]), loss))
    print(found.path, *found.messages, *table(rows), sep="\n")
    if command == []:
        raise Mistake("COMMAND: nothing behind --, expected a program and its arguments; write them there")
    argv, cwd = _stored(directory, data.get("command")) if command is None else (command, os.getcwd())
    print(f"in {cwd}: {shlex.join(argv)}")
    refused = f"{shlex.join(argv)} in {cwd}: cannot be run: "
    with mistakes(OSError, ValueError, before=refused, after=f"; {_OTHERWISE}"):  # the latter of a null character
        os.chdir(cwd)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.execvpe(argv[0], argv, os.environ | {VARIABLE: str(directory)})


def _stored(directory: Path, command: Any) -> tuple[list[str], str]:
    if command is None:
        raise Mistake(
            f"DIR: {directory} holds no command, since its run was started at a prompt, from stdin, or by another "
            f"process; {_OTHERWISE}"
        )
    argv, cwd = (command.get("argv"), command.get("cwd")) if isinstance(command, dict) else (None, None)
    if not (isinstance(argv, list) and argv and all(isinstance(each, str) for each in argv) and isinstance(cwd, str)):
        raise Mistake(f"DIR: {directory} holds {command!r} for a command, expected argv and cwd; {_OTHERWISE}")
    return argv, cwd
