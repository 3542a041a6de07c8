"""The command that started this process, so that `hydra-engine resume` can start it again."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from hydra_engine._started_in import STARTED_IN

# The directory of checkpoints to go on from, for the process that is started again.
VARIABLE = "HYDRA_ENGINE_RESUME"


def is_interactive() -> bool:
    """Return True if a person types at a Python prompt (IPython's and Jupyter's too), or will after the script."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def command() -> dict[str, Any] | None:
    """Return the command of this process as JSON: {"argv": with the interpreter's full path, "cwd": its directory}.

    None if it cannot be run again: at a prompt or in a notebook, from a script on stdin, in a process that
    `multiprocessing` has begun. Environment variables are not part of it.
    """
    is_from_stdin = sys.argv[:1] in ([], [""], ["-"])
    is_child = multiprocessing.parent_process() is not None
    if is_interactive() or is_from_stdin or is_child or not sys.executable or STARTED_IN is None:
        return None
    return {"argv": [sys.executable, *sys.orig_argv[1:]], "cwd": STARTED_IN}


def directory_asked_for() -> Path | None:
    """Return the directory to go on from, if `hydra-engine resume` started this process; else None."""
    value = os.environ.get(VARIABLE)
    return Path(value).absolute() if value else None


def forget() -> None:
    """Forget the directory to go on from, so that others in this process begin anew."""
    os.environ.pop(VARIABLE, None)
