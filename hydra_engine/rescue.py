"""Saves what tasks have committed, as the process has to end for a device that is lost."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def save_commits(commits: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write a file `NAME.pt` for each task into a new directory, here or where temporary files go; returns it.

    torch.load(..., weights_only=True) reads a file. What is there after a return is on the disk.
    """
    directory = _new_directory((Path.cwd(), Path(tempfile.gettempdir())))
    for name, commit in commits.items():
        path = directory / f"{_file_name(name)}.pt"
        with path.open("wb") as file:
            torch.save(dict(commit), file)
            file.flush()
            os.fsync(file.fileno())
    return directory


def commit_of(weights: Mapping[str, Tensor], steps: int, losses: list[float], seed: int) -> dict[str, Any]:
    """What is saved of a task: its weights, and how far it was."""
    return {"weights": dict(weights), "steps": steps, "losses": list(losses), "seed": seed}


def _new_directory(parents: Iterable[Path]) -> Path:
    stamp, refused = time.strftime("hydra-rescue-%Y%m%d-%H%M%S"), []
    for parent in parents:
        try:
            return Path(tempfile.mkdtemp(prefix=f"{stamp}-", dir=parent))
        except OSError as error:
            refused.append(str(error))
    raise OSError(f"no directory to save into: {'; '.join(refused)}; make one of them writable")


def _file_name(task: str) -> str:
    """The task's name, where no file system stumbles over it."""
    return "".join(each if each.isalnum() or each in "-_." else "_" for each in task)
