"""Live progress in the terminal: one line that is written over, or now and then a line where there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple, TextIO

# Seconds between two lines.
TERMINAL_S = 0.2
LOG_S = 5.0


class TaskProgress(NamedTuple):
    """Where a task stands."""

    name: str
    steps: int
    num_steps: int | None
    loss: float | None


class Progress:
    """Prints where every task stands, not oftener than is pleasant to read."""

    def __init__(self, verbose: int, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._on = verbose > 0
        self._live = self._on and self._stream.isatty()
        self._next_s = 0.0

    def show(self, tasks: Iterable[TaskProgress], now_s: float) -> None:
        """Print if it is time."""
        if not self._on or now_s < self._next_s:
            return
        self._next_s = now_s + (TERMINAL_S if self._live else LOG_S)
        self._write(tasks, now_s)

    def close(self, tasks: Iterable[TaskProgress], now_s: float) -> None:
        """Print where every task ended, and leave the line."""
        if self._on:
            self._write(tasks, now_s)
        if self._live:
            self._stream.write("\n")

    def _write(self, tasks: Iterable[TaskProgress], now_s: float) -> None:
        line = f"{now_s:6.1f} s  " + " | ".join(map(_describe, tasks))
        self._stream.write(f"\r\x1b[2K{line}" if self._live else f"{line}\n")
        self._stream.flush()


def _describe(task: TaskProgress) -> str:
    of = "" if task.num_steps is None else f"/{task.num_steps}"
    loss = "" if task.loss is None else f" {task.loss:.3f}"
    return f"{task.name} {task.steps}{of}{loss}"
