"""Loggers for tests, and what they wrote as rows of (step, values)."""

import csv
import json
import math

from hydra_engine.loggers import CsvLogger, JsonLinesLogger, TensorBoardLogger

DATES = {"task", "epoch", "time", "samples_per_s"}  # of a row, that tell when and not what


class FakeWandb:
    """A module `wandb` as far as a logger uses it: its runs keep what they are given."""

    def __init__(self):
        self.runs = []

    def init(self, **options):
        self.runs.append(FakeRun(options))
        return self.runs[-1]


class FakeRun:
    """A run of Weights & Biases."""

    def __init__(self, options):
        self.options, self.rows, self.exit_code = options, [], None

    def log(self, values, step):
        assert self.exit_code is None
        self.rows.append((step, values))

    def finish(self, exit_code):
        assert self.exit_code is None
        self.exit_code = exit_code


def read_csv(path):
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        (int(row["step"]), {k: float(v) for k, v in row.items() if v != "" and k not in DATES | {"step"}})
        for row in rows
    ]


def read_json_lines(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        (row["step"], {k: math.nan if v is None else v for k, v in row.items() if k not in DATES | {"step"}})
        for row in rows
    ]


def read_events(path):
    """By the package's own reader of directories, which says what TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    found = {}
    for tag in accumulator.Tags()["scalars"]:
        if tag not in DATES:
            for event in accumulator.Scalars(tag):
                is_validation = tag.startswith(("validation_", "metrics_"))
                found.setdefault((event.step, is_validation), []).append((tag, event.value))
    rows = []
    for (step, _), values in sorted(found.items()):
        assert len(values) == len(dict(values)), f"step {step} is there twice: {values}"
        rows.append((step, dict(values)))
    return rows


# By kind: the logger, what it adds to a task's name, and the reader of what is then there.
KINDS = {
    "csv": (CsvLogger, ".csv", read_csv),
    "json lines": (JsonLinesLogger, ".jsonl", read_json_lines),
    "tensorboard": (TensorBoardLogger, "", read_events),
}


def tear(path):
    """Add half a row, as a process leaves it that is killed as it writes."""
    if path.is_dir():
        path = max(path.glob("*tfevents*"))
        torn = path.read_bytes()[-20:-3]
    else:
        torn = path.read_bytes().splitlines()[-1][:-3]
    with path.open("ab") as file:
        file.write(torn)
