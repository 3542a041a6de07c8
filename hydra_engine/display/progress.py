"""Live progress in the terminal: one row that is written over, or now and then a line where there is no terminal."""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections.abc import Iterable
from typing import NamedTuple, TextIO

# Seconds between two lines.
TERMINAL_S = 0.2
LOG_S = 5.0

DOTS = "..."  # where a line is cut: what every terminal can show


class TaskProgress(NamedTuple):
    """The progress of one task."""

    name: str
    steps: int
    num_steps: int | None
    loss: float | None
    batch: str = ""  # of a task whose batches adapt


class ProgressLine:
    """Prints the progress of every task, no more often than is pleasant to read."""

    def __init__(self, verbose: int, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self.is_on = verbose > 0
        self._live = self.is_on and self._stream.isatty()
        self._next_s = 0.0

    def show(self, tasks: Iterable[TaskProgress], now_s: float) -> None:
        """Print if it is time."""
        if not self.is_on or now_s < self._next_s:
            return
        self._next_s = now_s + (TERMINAL_S if self._live else LOG_S)
        self._write(tasks, now_s)

    def close(self, tasks: Iterable[TaskProgress], now_s: float) -> None:
        """Print where every task ended, and leave the line."""
        if self.is_on:
            self._write(tasks, now_s)
        if self._live:
            self._stream.write("\n")

    def _write(self, tasks: Iterable[TaskProgress], now_s: float) -> None:
        line = f"{now_s:6.1f} s  " + " | ".join(map(_describe, tasks))
        self._stream.write(f"\r\x1b[2K{cut(line, self._columns() - 1)}" if self._live else f"{line}\n")
        self._stream.flush()

    def _columns(self) -> int:
        """Return the terminal's columns as they are now: it may be resized at any time."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):  # no terminal of the system's
            columns = 0
        return columns or shutil.get_terminal_size().columns


def cut(line: str, columns: int) -> str:
    """Cut a line to so many columns of a terminal: a longer one would take a second row, which nothing writes over.

    Most signs of East Asian scripts take two columns, accents that follow their letter none; what does not print is
    shown as a question mark.
    """
    line = "".join(sign if sign.isprintable() else "?" for sign in line)
    if sum(map(_width, line)) <= columns:
        return line
    kept, left = "", columns - len(DOTS)
    for sign in line:
        left -= _width(sign)
        if left < 0:
            break
        kept += sign
    return (kept + DOTS)[: max(0, columns)]


def _width(sign: str) -> int:
    if unicodedata.combining(sign):
        return 0
    return 2 if unicodedata.east_asian_width(sign) in "WF" else 1


def _describe(task: TaskProgress) -> str:
    of = "" if task.num_steps is None else f"/{task.num_steps}"
    loss = "" if task.loss is None else f" {task.loss:.3f}"
    batch = f" {task.batch}" if task.batch else ""
    return f"{task.name} {task.steps}{of}{loss}{batch}"
