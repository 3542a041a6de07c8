"""The protocol of loggers: what one is told of the tasks of a run, and where its files go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hydra_engine.tasks import StepReport, ValidationReport

# Of a file's name, which most file systems limit to 255; with room for an ending and a number. What is longer is cut,
# and ends in this many signs of its digest.
MOST_SIGNS, DIGEST_SIGNS = 200, 16


@dataclass(frozen=True, kw_only=True)
class TaskStart:
    """A task begins to train in a run, or goes on.

    Attributes:
        steps: training steps committed before.
        validated_at: training steps committed before its last validation so far; None: it was never validated.
        is_new: nothing was logged of it: it begins with its first step, or as a fork of another task.
    """

    task: str
    seed: int
    hparams: Mapping[str, Any]
    steps: int
    validated_at: int | None
    is_new: bool

    def has(self, step: int, *, validation: bool) -> bool:
        """Return True if the task goes on after this step, or after the validation there; else it will come again."""
        if validation:
            return self.validated_at is not None and step <= self.validated_at
        return step <= self.steps


class Logger:
    """Takes the values of tasks as they train; derive from it, and override what you need.

    All calls come from one thread of the logger's own, one at a time and in the order of what happened, of all tasks of
    a run; orchestrators that train at the same time need one each. Training waits for none of them. A call that raises
    loses its values; after the third, the logger is dropped for the run. Where `begin_task` raises, that task alone is
    not logged. 10,000 values wait at most, and what comes while so many do is lost. All of that is told on stderr and
    in `report.messages`.

    Draw nothing from `random`, `numpy.random` and torch's default generator: loaders draw from them at the same time.
    """

    def begin_task(self, start: TaskStart) -> None:
        """A task begins to train, or goes on: of what was logged, all that `start.has` denies will come again."""

    def log_step(self, step: StepReport) -> None:
        """A training step was committed."""

    def log_validation(self, validation: ValidationReport) -> None:
        """A validation is over."""

    def end_task(self, task: str, status: str) -> None:
        """A task is "finished", "failed", "stopped" or "paused"; one that is paused may begin again."""

    def close(self) -> None:
        """The run is over: nothing more is told until the next one. It has 10 seconds, with all that still waits."""


def checked_loggers(loggers: Sequence[Logger]) -> list[Logger]:
    """Return the loggers as a list; raise for what is none, and for one that is given twice."""
    if isinstance(loggers, Logger) or not isinstance(loggers, Sequence) or isinstance(loggers, str):
        raise TypeError(f"loggers: {loggers!r} is a {type(loggers).__name__}, not a list; give loggers=[...]")
    for each in loggers:
        if not isinstance(each, Logger):
            raise TypeError(
                f"loggers: {each!r} is a {type(each).__name__}, not a Logger; give an instance of a class "
                f"derived from hydra_engine.loggers.Logger"
            )
    if len({id(each) for each in loggers}) < len(loggers):
        raise ValueError("loggers: one is given twice, limit: once; make one of its own for each place to log to")
    return list(loggers)


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
