"""A logger for TensorBoard: event files, written by the package `tensorboard` without TensorFlow."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hydra_engine import StepReport, TaskStart, ValidationReport
from hydra_engine.loggers.files import FileLogger, file_name, set_aside

# A record of an event file: its bytes, and this much for their number and checksums (the TFRecord format).
FRAME_BYTES = 16
ENDING = ".hydra"  # of our files' names


class TensorBoardLogger(FileLogger):
    """Writes DIRECTORY/TASK/events.out.tfevents...: a run of `tensorboard --logdir DIRECTORY` for each task.

    Tags: "loss", "lr", "grad_norm", "samples_per_s" and "epoch" of steps; "validation_loss" and "metrics_NAME" of
    validations; by training steps committed. Each step is with the system at once. Where a task begins anew, a folder
    that is there is renamed (TASK.1); where it goes on, it has one more file, and the logger's others lose what will
    come again.

    Raises ImportError without the package `tensorboard`.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        _load()
        super().__init__(directory)

    def begin_task(self, start: TaskStart) -> None:
        folder = self._directory / file_name(start.task)
        if start.is_new:
            set_aside(folder)
        elif folder.exists():
            _cut(folder, start)
        folder.mkdir(parents=True, exist_ok=True)
        # By names they stand in the order of their beginnings, in which TensorBoard reads them.
        file = (folder / f"events.out.tfevents.{time.time_ns():020}{ENDING}").open("xb")
        self._files[start.task] = _load().records(file)
        self._write(start.task, wall_time=time.time(), file_version="brain.Event:2")

    def log_step(self, step: StepReport) -> None:
        self._log(step, {**step.values(), "epoch": step.epoch})

    def log_validation(self, validation: ValidationReport) -> None:
        self._log(validation, validation.values())

    def _log(self, of: StepReport | ValidationReport, values: dict[str, float]) -> None:
        summary = _load().summary
        scalars = summary(value=[summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._write(of.task, wall_time=of.time_s, step=of.step, summary=scalars)

    def _write(self, task: str, **event: Any) -> None:
        records = self._files[task]
        records.write(_load().event(**event).SerializeToString())
        records.flush()


def _cut(folder: Path, start: TaskStart) -> None:
    """Remove the events that will come again, and a last one that a killed process has not written to its end."""
    form, is_over = _load(), False
    for path in sorted(folder.glob(f"*{ENDING}")):  # others may be of a SummaryWriter of the user
        num_bytes = 0
        for record in () if is_over else form.loader(str(path)).Load():
            event = form.event.FromString(record)
            tags = [value.tag for value in event.summary.value]
            if tags and not start.has(event.step, validation="validation_loss" in tags):
                is_over = True
                break
            num_bytes += FRAME_BYTES + len(record)
        if num_bytes:
            os.truncate(path, num_bytes)
        else:
            path.unlink()


def _load() -> SimpleNamespace:
    """Return the package's classes: events and summaries, what writes records to a file, what loads those of a path."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise ImportError(
            "TensorBoardLogger: tensorboard is not installed; install it (pip install 'hydra_engine[tensorboard]'), or "
            "log to a CsvLogger"
        ) from error
    return SimpleNamespace(event=Event, summary=Summary, records=RecordWriter, loader=RawEventFileLoader)
