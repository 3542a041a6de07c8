"""Loggers that write text: a file for each task, a row for each step and each validation."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hydra_engine import Logger, StepReport, TaskStart, ValidationReport

VALIDATION = "validation_loss"  # a row that has one is a validation's
ESCAPED = "backslashreplace"  # a name may come from a file's, which may be no Unicode
# Of a file's name, which most file systems limit to 255; with room for an ending and a number. What is longer is cut,
# and ends in this many signs of its digest.
MOST_SIGNS, DIGEST_SIGNS = 200, 16


class FileLogger(Logger):
    """Writes to a file per task; each value is with the system at once, so that a killed process has it."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._files: dict[str, Any] = {}  # open ones, or what writes to them, by task

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._directory)!r})"

    def end_task(self, task: str, status: str) -> None:
        if task in self._files:
            self._files.pop(task).close()

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


class _TextLogger(FileLogger):
    """Writes rows of values."""

    suffix = ""

    def begin_task(self, start: TaskStart) -> None:
        """Open the task's file: a new one, or where the task goes on, without the rows that will come again."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{file_name(start.task)}{self.suffix}"
        if start.is_new:
            set_aside(path)
        elif path.exists():
            _cut_to_whole_lines(path)
            self._cut(path, start)
        self._files[start.task] = path.open("a", encoding="utf-8", errors=ESCAPED, newline="", buffering=1)

    def log_step(self, step: StepReport) -> None:
        self._write(step, step.values())

    def log_validation(self, validation: ValidationReport) -> None:
        self._write(validation, validation.values())

    def _write(self, of: StepReport | ValidationReport, values: Mapping[str, float]) -> None:
        self._write_row(of.task, {"task": of.task, "step": of.step, "epoch": of.epoch, "time": of.time_s, **values})

    def _write_row(self, task: str, row: dict[str, Any]) -> None:
        raise NotImplementedError

    def _cut(self, path: Path, start: TaskStart) -> None:
        """Remove rows that will come again."""
        raise NotImplementedError


class JsonLinesLogger(_TextLogger):
    """Writes DIRECTORY/TASK.jsonl: a JSON object per line for each step and each validation.

    Each has "task", "step", "epoch" and "time" (seconds since 1970); a step "loss", "lr", "grad_norm" and
    "samples_per_s", a validation "validation_loss" and "metrics_NAME". A number that is not finite is null. Where a
    task begins anew, a file that is there is renamed (TASK.1.jsonl); where it goes on, its file does.
    """

    suffix = ".jsonl"

    def _write_row(self, task: str, row: dict[str, Any]) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._files[task].write(f"{json.dumps(finite)}\n")

    def _cut(self, path: Path, start: TaskStart) -> None:
        num_bytes = 0
        with path.open("r+b") as file:
            for line in file:
                row = json.loads(line)
                if not start.has(row["step"], validation=VALIDATION in row):
                    break
                num_bytes += len(line)
            file.truncate(num_bytes)


class CsvLogger(_TextLogger):
    """Writes DIRECTORY/TASK.csv: a row for each step and each validation.

    Columns: task, step, epoch, time (seconds since 1970); of steps loss, lr, grad_norm and samples_per_s, of
    validations validation_loss and metrics_NAME. What a row has no value of is empty. Where a task begins anew, a file
    that is there is renamed (TASK.1.csv); where it goes on, its file does.
    """

    suffix = ".csv"

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        super().__init__(directory)
        self._columns: dict[str, list[str]] = {}  # of the files that are open, by task

    def begin_task(self, start: TaskStart) -> None:
        self._columns[start.task] = []
        super().begin_task(start)

    def _write_row(self, task: str, row: dict[str, Any]) -> None:
        columns = self._columns[task]
        if missing := [name for name in row if name not in columns]:
            self._add_columns(task, [*columns, *missing])
            columns = self._columns[task]
        csv.writer(self._files[task], lineterminator="\n").writerow([row.get(name, "") for name in columns])

    def _add_columns(self, task: str, columns: list[str]) -> None:
        """Write the file anew with more columns: once as the first row comes, and once as the first validation does."""
        file = self._files[task]
        path = Path(file.name)
        file.flush()
        with path.open(encoding="utf-8", newline="") as old:
            _replace(path, columns, csv.DictReader(old))
        file.close()
        self._files[task] = path.open("a", encoding="utf-8", errors=ESCAPED, newline="", buffering=1)
        self._columns[task] = columns

    def _cut(self, path: Path, start: TaskStart) -> None:
        with path.open(encoding="utf-8", newline="") as old:
            reader = csv.DictReader(old)
            columns = list(reader.fieldnames or ())
            kept = (row for row in reader if start.has(int(row["step"]), validation=bool(row.get(VALIDATION))))
            if columns:
                _replace(path, columns, kept)
        self._columns[start.task] = columns


def _replace(path: Path, columns: list[str], rows: Iterable[Mapping[str, str]]) -> None:
    """Put a file of these rows in a file's place; until it is whole, the old one is there."""
    new = path.with_name(f"{path.name}.new")
    with new.open("w", encoding="utf-8", errors=ESCAPED, newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(new, path)


def _cut_to_whole_lines(path: Path) -> None:
    """Remove a last line that a killed process has not written to its end."""
    with path.open("r+b") as file:
        end, found = file.seek(0, os.SEEK_END), -1
        while end and found < 0:
            start = max(0, end - 4096)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            end = start
        file.truncate(end + found + 1)


def file_name(task: str) -> str:
    """Return a task's name as a file's: without slashes, with no dot in front, and not too long for a file system."""
    name = quote(task, safe=" =+,@()[]", errors="surrogatepass")
    name = f"%2E{name[1:]}" if name.startswith(".") else name
    if len(name) <= MOST_SIGNS:
        return name
    return f"{name[: MOST_SIGNS - DIGEST_SIGNS - 1]}-{sha256(name.encode()).hexdigest()[:DIGEST_SIGNS]}"


def set_aside(path: Path) -> None:
    """Rename what is there: "task-0.csv" to "task-0.1.csv", or the next number that is free."""
    if path.exists():
        number = 1
        while (other := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
            number += 1
        path.rename(other)
