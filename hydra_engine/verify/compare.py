"""Trains tasks once in plain PyTorch and three times by the engine, and compares the results step by step."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch

from hydra_engine.devices import EmulatedDevice
from hydra_engine.run import ModelOrchestrator
from hydra_engine.tasks import FAILED, Callback, ModelTask, TaskReport
from hydra_engine.texts import table
from hydra_engine.verify.plain import PlainLoop
from hydra_engine.verify.record import BATCHES, FirstBatches, Record, Recorder, digest
from partitioners import Budget, LayerCost
from partitioners.plain_numbers import whole_number

MOST_SHOWN = 4  # names in a line
SEED = 0  # of what the user's function draws, and of the process-wide generators afterwards

WHOLE = "in one piece, on one device"
CUT = "a shard for each layer, on devices that change with each step"
RESUMED = "the same, saved and resumed in the middle"

# What differs first, and what of the contract is then most likely broken.
_RULES = {
    "refused": "the engine does not take this task; the message says what to do",
    "batch": "rule 9: a loader gives the same batches for the same random state, and can be read again",
    "loss": (
        "rule 1, 2 or 6: what a layer or the loss returns depends on more than its inputs, weights, buffers and mode: "
        "on an attribute or a variable that changes from call to call, say, or on what a callback changes meanwhile"
    ),
    "loss, cut": (
        "rule 2 or 4: a layer keeps state in an attribute, which another device's copy of it does not have, or leaves "
        "there what another layer or the loss reads; keep state in buffers, and return what others need"
    ),
    "weights": (
        "rule 3, 7 or 12: the optimizer steps a parameter by more than its own gradient and state (optimizer_scope="
        "'task' says so), a backward draws random numbers, or something else writes to a parameter"
    ),
    "buffers": "rule 2: a buffer is changed elsewhere than in its layer's forward",
    "random": "rule 1 or 12: something draws in a backward, or seeds torch's generator where the engine does not look",
    "flags": "rule 3: something changes modes or requires_grad elsewhere than in a callback",
    "validation": "rule 1: what a layer or the loss returns in eval() depends on more than inputs, weights and buffers",
    "averages": "rule 3: weights are changed elsewhere than by the optimizer",
    "resumed": (
        "a callback, loader or other object has state of its own that no checkpoint holds; give it state_dict() and "
        "load_state_dict(), or make it anew from the report's steps"
    ),
}

# Options that are left out, and why results would differ, or a few steps would not show it.
_BRIEF = "which a few steps do not show"
_OTHERWISE: dict[str, tuple[Any, str]] = {
    "precision": ("float32", "since plain PyTorch makes no such casts"),
    "moments": ("float32", ""),  # the task's plan says that they round
    "split_weights": (None, ""),
    "grad_scaler": (None, ""),
    "keep_best": (None, _BRIEF),
    "max_device_batch": (None, _BRIEF),
    "nonfinite": (None, _BRIEF),
    "compile": (False, "whose results are those of plain PyTorch without rounding"),
}


class Difference(NamedTuple):
    """Where a training first departs from plain PyTorch's."""

    step: int  # training steps that were made; 0: before the first
    what: str  # an attribute of `Step`, or "batch", "validation", "averages", "refused"
    text: str

    @property
    def place(self) -> str:
        return (
            f"{self.what} of step {self.step}" if self.what in ("loss", "batch") else f"{self.what}, step {self.step}"
        )


@dataclass(kw_only=True)
class TaskVerification:
    """What became of one task in each run of the engine.

    Attributes:
        differences: by run; None: there is none.
        num_steps: that plain PyTorch made.
        error: what plain PyTorch raised, so that there was nothing to compare with.
    """

    name: str
    num_steps: int = 0
    num_layers: int = 0
    differences: dict[str, Difference | None] = field(default_factory=dict)
    error: str | None = None

    @property
    def is_same(self) -> bool:
        """True if every run left what plain PyTorch left, bit for bit."""
        return self.error is None and not any(self.differences.values())

    @property
    def likely(self) -> str | None:
        """The rule of the contract that is most likely broken."""
        runs = [run for run in (WHOLE, CUT, RESUMED) if self.differences.get(run)]
        if not runs:
            return None
        first = self.differences[runs[0]]
        assert first is not None
        if runs[0] == RESUMED and first.what != "refused":
            return _RULES["resumed"]
        return _RULES["loss, cut" if (first.what, runs[0]) == ("loss", CUT) else first.what]


@dataclass(kw_only=True)
class Verification:
    """The outcome of `verify`; prints as a table with the first difference of each run."""

    tasks: dict[str, TaskVerification]
    notes: list[str]  # what was compared otherwise than the tasks ask for

    @property
    def is_same(self) -> bool:
        """True if all that was compared is the same, bit for bit."""
        return all(task.is_same for task in self.tasks.values())

    def __str__(self) -> str:
        lines = [*self.notes, *([""] if self.notes else [])]
        for task in self.tasks.values():
            lines.append(f"{task.name}: {task.num_steps} steps of plain PyTorch; {task.num_layers} layers")
            if task.error is not None:
                lines += [f"  plain PyTorch fails: {task.error}", ""]
                continue
            found = {run: "same" if each is None else each.place for run, each in task.differences.items()}
            lines += table([("run", "compared with plain PyTorch"), *found.items()])
            differing = {each.text: None for each in task.differences.values() if each is not None}
            lines += [f"  {text}" for text in differing]
            if task.likely is not None:
                lines.append(f"  likely: {task.likely} (docs/contract.md)")
            lines.append("")
        lines.append("same, bit for bit" if self.is_same else "not the same")
        return "\n".join(lines)


class EachLayer:
    """Cuts a shard for each layer."""

    def partition(self, costs: Sequence[LayerCost], budget: Budget) -> list[int]:
        return list(range(1, len(costs) + 1))

    def revise(self, boundaries: Sequence[int], shard: int, costs: Sequence[LayerCost] = ()) -> None:
        """Return None: there is none that is finer."""


def verify(
    make_tasks: Callable[[], ModelTask | Sequence[ModelTask]],
    *,
    steps: int = 6,
    memory: str | int = "auto",
    devices: int = 2,
    micro_batches: int | None = None,
) -> Verification:
    """Train the tasks of a function in plain PyTorch and by the engine, on the CPU in float32, and compare all bits.

    A few steps of small tasks, before a long run on GPUs: what only a GPU does differently is not seen. Takes the DRAM
    of one side at a time: of the models with gradients, optimizer states and activations. Loaders give two batches and
    are opened again; one batch of validation comes after every two. Callbacks are called on both sides.

    Args:
        make_tasks: called without arguments for each training, so that each has models, loaders, optimizers and
            callbacks of its own. What it draws from torch, `random` and `numpy.random` is seeded.
        steps: of each task, rounded up to whole pairs.
        memory: of each emulated device, such as "64MiB"; "auto": half of what DRAM has.
        devices: that are in at the same time, at least 1.
        micro_batches: of each step; None: as the tasks ask for.

    Raises TypeError or ValueError for arguments, and what `make_tasks` raises. What the engine refuses is a difference.
    """
    for name, number in {"steps": steps, "devices": devices, "micro_batches": micro_batches}.items():
        if number is not None:
            whole_number(name, number)
    EmulatedDevice(memory)  # refuses a wrong size before any work
    trials = _Trials(make_tasks, -(-steps // BATCHES), memory, devices, micro_batches)
    plain = trials.plainly()
    found = {
        name: TaskVerification(name=name, num_steps=len(each.steps), error=each.error) for name, each in plain.items()
    }
    for run in (WHOLE, CUT, RESUMED) if all(each.error is None for each in found.values()) else ():
        records = trials.resumed() if run == RESUMED else trials.by_engine(is_cut=run == CUT)
        for name, record in records.items():
            found[name].differences[run] = difference(plain[name], record)
            found[name].num_layers = max(found[name].num_layers, record.num_layers)
    return Verification(tasks=found, notes=list(trials.notes))


@dataclass
class _Trials:
    """The trainings, each of tasks that the user's function makes for it."""

    make_tasks: Callable[[], ModelTask | Sequence[ModelTask]]
    epochs: int
    memory: str | int
    num_devices: int
    micro_batches: int | None
    notes: dict[str, None] = field(default_factory=dict)

    def plainly(self) -> dict[str, Record]:
        tasks, records = self._tasks(), {}
        for name, task in tasks.items():
            record = records[name] = Record()
            self._prepare(task, record)
            _seed()
            try:
                PlainLoop(task, record).train()
            except Exception as error:
                record.error = _first_line(error)
        return records

    def resumed(self) -> dict[str, Record]:
        """Pause each task in the middle of a pass over its batches, and go on with one that is made anew."""
        middle = BATCHES * (self.epochs // 2) + 1
        with tempfile.TemporaryDirectory() as folder:
            records = self.by_engine(is_cut=True, folder=folder, pause_after=middle)
            if any(record.error is not None for record in records.values()):
                return records
            return self.by_engine(is_cut=True, folder=folder, records=records)

    def by_engine(
        self,
        *,
        is_cut: bool = False,
        folder: str | None = None,
        pause_after: int | None = None,
        records: dict[str, Record] | None = None,
    ) -> dict[str, Record]:
        """Train by the engine; folder: of checkpoints. records: of what was saved there, which goes on."""
        tasks, is_resumed = self._tasks(), records is not None
        records = records or {name: Record() for name in tasks}
        orchestra: ModelOrchestrator | None = None
        for name, task in tasks.items():
            # A resume reads some batches again.
            self._prepare(task, records[name], sees_batches=folder is None, pause_after=pause_after)
            task.partitioner = EachLayer() if is_cut else task.partitioner
        _seed()
        try:
            if is_cut:
                next(iter(tasks.values())).callbacks += (DevicesChange(lambda: orchestra, self.memory),)
            devices = [EmulatedDevice(self.memory) for _ in range(self.num_devices if is_cut else 1)]
            orchestra = ModelOrchestrator(list(tasks.values()), devices=devices, checkpoint_dir=folder)
            orchestra.verbose = 0
            report = orchestra.train_models(resume=is_resumed)
        except Exception as error:
            for record in records.values():
                record.error = _first_line(error)
            return records
        for name, made in report.tasks.items():
            record = records[name]
            record.num_layers = len(tasks[name].model)
            weights = record.steps[-1].weights if record.steps else ()
            averages = made.ema_state or {}
            record.averages = {key: digest(averages[key]) for key in weights if key in averages}
            if made.status == FAILED and made.exception is not None:
                record.error = _first_line(made.exception)
        return records

    def _tasks(self) -> dict[str, ModelTask]:
        """Call the user's function; the tasks by name, as the orchestrator names them."""
        _seed()
        made = self.make_tasks()
        tasks = [made] if isinstance(made, ModelTask) else list(made)
        for k, task in enumerate(tasks):
            if not isinstance(task, ModelTask):
                raise TypeError(f"make_tasks: returned a {type(task).__name__}, limit: a ModelTask or a list of them")
            task.name = task.name or f"task-{k}"
        if len({task.name for task in tasks}) < len(tasks):
            raise ValueError(
                f"make_tasks: two of {[task.name for task in tasks]} have one name, limit: a name for each; rename one"
            )
        return {str(task.name): task for task in tasks}

    def _prepare(
        self, task: ModelTask, record: Record, *, sees_batches: bool = True, pause_after: int | None = None
    ) -> None:
        """Shorten a task and record it; leave out what needs another machine, other times or no bits."""
        if task.adapts:
            raise ValueError(
                f"{task.name}: its batch size adapts to times, limit: a loader whose batches are the same in each "
                f"training; give the task that the loader wraps one of torch's"
            )
        task.dataloader = FirstBatches(task.dataloader, BATCHES, record.batches if sees_batches else None)
        task.epochs, task.validation_interval = self.epochs, "epoch"
        if task.validation is not None:
            task.validation = FirstBatches(task.validation, 1)
        for name, (value, why) in _OTHERWISE.items():
            if why and getattr(task, name) != value:
                self.notes[f"{task.name}: compared with {name}={value!r}, {why}"] = None
            setattr(task, name, value)
        if self.micro_batches is not None or task.accumulation_steps == "auto":
            task.accumulation_steps = self.micro_batches or 1
        task.callbacks += (Recorder(task, record, pause_after),)


class DevicesChange(Callback):
    """Takes away the device that a task has trained on, after each step, and gives it a new one."""

    def __init__(self, orchestra: Callable[[], ModelOrchestrator | None], memory: str | int) -> None:
        self._orchestra, self._memory = orchestra, memory

    def on_step(self, report: TaskReport) -> None:
        orchestra = self._orchestra()
        if orchestra is not None:
            here = next(name for name, place in orchestra.devices.items() if place == "in")
            orchestra.add_device(EmulatedDevice(self._memory))
            orchestra.remove_device(here)


def _seed() -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


def _first_line(error: BaseException) -> str:
    return (f"{type(error).__name__}: {error}".strip().splitlines() or [type(error).__name__])[0]


def difference(plain: Record, other: Record) -> Difference | None:
    """Return where a training first departs from plain PyTorch's, or None."""
    for k, (mine, theirs) in enumerate(zip_longest(plain.steps, other.steps), 1):
        if theirs is None:
            return Difference(k - 1, "refused", other.error or "it ends with the step before")
        if mine is None:
            return Difference(k, "loss", f"step {k} is made, which plain PyTorch does not make")
        if k <= len(other.batches) and plain.batches[k - 1] != other.batches[k - 1]:
            return Difference(k, "batch", f"the loader gave another batch for step {k}")
        if not _is_equal(mine.loss, theirs.loss):
            return Difference(k, "loss", f"the loss of step {k} is {theirs.loss!r}, plain PyTorch's {mine.loss!r}")
        for what in ("weights", "buffers", "flags"):
            if names := _differing(getattr(mine, what), getattr(theirs, what)):
                return Difference(k, what, f"after step {k}: {names}")
        if mine.random != theirs.random:
            return Difference(k, "random", f"after step {k}: torch's random stream stands elsewhere")
        past = k // BATCHES
        pairs = zip(plain.validation_losses[:past], other.validation_losses[:past], strict=False)
        for number, (expected, found) in enumerate(pairs, 1):
            if not _is_equal(expected, found):
                text = f"validation {number}, after step {number * BATCHES}: {found!r}, plain PyTorch's {expected!r}"
                return Difference(number * BATCHES, "validation", text)
    if other.error is not None:
        return Difference(len(other.steps), "refused", other.error)
    if names := _differing(plain.averages, other.averages):
        return Difference(len(plain.steps), "averages", f"ema_decay: {names}")
    return None


def _is_equal(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _differing(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return ", ".join(names[:MOST_SHOWN]) + more
