"""Plans and reports: what a user gets before training and after it."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from hydra_engine.errors import SavedError
from hydra_engine.schedule import EVALUATE, Placed, Unit
from hydra_engine.system import HostThreads
from hydra_engine.tasks.chooser import StepChoice
from hydra_engine.tasks.logger import StepReport, ValidationReport
from hydra_engine.tasks.report_file import load, save
from hydra_engine.texts import plural, printable, table
from hydra_engine.trace import MAX_SPANS, MemoryUse, Span
from partitioners import format_bytes
from partitioners.plain_numbers import make_plain, whole_number
from partitioners.profile import noted

# The lane of a span that says that a step began again.
AGAIN = "again"

FINISHED, FAILED, STOPPED, PAUSED = "finished", "failed", "stopped", "paused"
TRAINING_LOSS, VALIDATION_LOSS = "loss", "validation_loss"
MIN, MAX = "min", "max"

# Devices that a report's summary names one by one.
FEW_DEVICES = 4


def is_better(value: float, than: float | None, direction: str) -> bool:
    """Return True for the first number, and for a number that is better; NaN is none."""
    if value != value or than is None:
        return value == value
    return value < than if direction == MIN else value > than


def best_index(values: Sequence[float], direction: str) -> int | None:
    """Return the place of the best number, the first of equal ones; None if there is none."""
    numbers = [k for k, value in enumerate(values) if value == value]
    return min(numbers, key=lambda k: values[k] if direction == MIN else -values[k], default=None)


@dataclass(frozen=True)
class KeepBest:
    """What `ModelTask(keep_best=)` goes by.

    Args:
        by: a figure: "validation_loss", a name in `metrics`, or "loss", the mean of an epoch's training losses.
        direction: "min" or "max", which is better.
        patience: end the task as finished after so many validations (epochs, by "loss") in which nothing was better.
    """

    by: str
    direction: str = MIN
    patience: int | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        if not isinstance(self.by, str):
            raise TypeError(
                f"keep_best: {self.by!r} is not a str; give 'validation_loss', a name in metrics=, or 'loss', or a "
                f"KeepBest of one"
            )
        if self.direction not in (MIN, MAX):
            raise ValueError(f"keep_best: direction {self.direction!r}, known: {MIN!r}, {MAX!r}")
        if self.patience is not None:
            whole_number("keep_best: patience", self.patience)


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best value of a figure, and how many came after it."""

    by: str  # the figure: a metric, or one of the losses above
    direction: str
    step: int | None = None  # training steps committed before it; None: there was no number yet
    value: float | None = None
    num_worse: int = 0  # values since that were not better
    judged_step: int = 0  # that of the last value
    epoch_first: int = 0  # of the training loss: steps committed before the epoch in progress

    def after(self, value: float, step: int) -> Best:
        """Return the best once a figure has this value after so many steps; a validation may come again in a resume."""
        if step <= self.judged_step:
            return self
        if is_better(value, self.value, self.direction):
            return replace(self, step=step, value=value, num_worse=0, judged_step=step)
        return replace(self, num_worse=self.num_worse + 1, judged_step=step)

    def after_epoch(self, losses: Sequence[float], skipped: Collection[int]) -> Best:
        """Return the best once an epoch is over: its value is the mean of the losses of its steps that count."""
        counted = [k for k in range(self.epoch_first, len(losses)) if k not in skipped]
        total = 0.0  # added up one after the other: `sum` rounds otherwise in some versions of Python
        for k in counted:
            total += losses[k]
        found = self.after(total / len(counted) if counted else float("nan"), len(losses))
        return replace(found, epoch_first=len(losses))


# More than 15 attributes: figures of their own, which a caller reads one by one, as those of TaskReport.
@dataclass(frozen=True, kw_only=True, repr=False)
class TaskPlan:
    """The plan of one task."""

    name: str
    boundaries: list[int]  # cumulative end indices of the shards
    shard_bytes: list[int]  # device bytes each shard needs to run: slab and the largest of its units
    dram: dict[str, int]  # bytes of DRAM for weights, casts, gradients, optimizer, best, averages, a step, its parts
    accumulation_steps: int
    step_s: float  # compute of one step, from one metered run of the sample
    speedups: list[float] = field(default_factory=lambda: [1.0])  # predicted, of a step spread over 1, 2, ... devices
    shares_cores: bool = False  # devices are emulated: predicted as if each had the host's cores to itself
    one_device_because: str = ""  # why it is never spread
    graph_bytes: list[int] = field(default_factory=list)  # by shard: that its forward keeps for its backward; 0: none
    launch_share: float | None = None  # of the time that a device works, that launching takes; None: it is the same
    doubled_bytes: int = 0  # of its frozen weights that another task has equal ones of, elsewhere in DRAM
    ceilings: str = ""  # where the link's rates come from; "": the user stated them
    adopted_from: str | None = None  # the task of the same structure whose rehearsal this plan is of; None: its own
    predicted_s: float | None = None  # of a step of each of the device's tasks together, as the cut was chosen by it
    cut_because: str = ""  # what else was predicted of the cut, and of others; "": it was not chosen by predictions
    eval_message: str = ""  # that the model is in eval(); "": it is not
    homed_layers: dict[str, int] = field(default_factory=dict)  # by device: how many have their home there
    no_homes_because: str = ""  # why there are no more; "": it asks for none, or all that it asks for have one

    @property
    def _spread(self) -> str:
        if self.one_device_because:
            return f"a step uses one device at a time: {self.one_device_because}"
        number = max(range(len(self.speedups)), key=lambda k: self.speedups[k]) + 1
        faster = f"{self.speedups[number - 1]:.2g} times faster than on one"
        if self.shares_cores:
            faster += ", had each device cores of its own"
        return f"where tasks are fewer than devices, a step uses up to {number}, then {faster}"

    def _launches(self, num_devices: int) -> str:
        """Say what launching takes of the devices' time: one interpreter launches the kernels of all devices."""
        assert self.launch_share is not None
        binds = f", more than 1/{num_devices}: the interpreter binds, and not the devices; give larger micro-batches"
        text = f"launching takes {self.launch_share:.0%} of the time that a device works"
        return text + (binds if self.launch_share > 1 / num_devices else "")

    @property
    def dram_bytes(self) -> int:
        """Bytes of DRAM that the task takes in all."""
        return sum(self.dram.values())

    def __repr__(self) -> str:
        return f"<TaskPlan {self.name!r}: {plural(len(self.boundaries), 'shard')}, {format_bytes(self.dram_bytes)}>"


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """The plan of all tasks; prints as a table."""

    tasks: dict[str, TaskPlan]
    devices: list[str]
    host: HostThreads | None = None  # threads and cores of a run as things stood when the plan was made
    no_native_because: str = ""  # why no native code makes the host's updates; "": it does, or it is not wanted

    def figures(self) -> dict[str, Any]:
        """Return the plan's figures, for JSON."""
        tasks = {name: {**vars(plan), "dram_bytes": plan.dram_bytes} for name, plan in self.tasks.items()}
        return {"tasks": tasks, "devices": self.devices, "text": str(self)}

    def __repr__(self) -> str:
        return f"<Plan: {plural(len(self.tasks), 'task')} on {plural(len(self.devices), 'device')}>"

    def __str__(self) -> str:
        return "\n".join([self._title, *table(self._rows()), *self._remarks()])

    @property
    def _title(self) -> str:
        return f"plan for {', '.join(self.devices)}"

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [("task", "shards", "layers per shard", "largest shard", "micro-batches", "DRAM")]
        for plan in self.tasks.values():
            sizes = [last - first for first, last in pairwise([0, *plan.boundaries])]
            largest, number = format_bytes(max(plan.shard_bytes)), str(plan.accumulation_steps)
            rows.append((plan.name, str(len(sizes)), _short(sizes), largest, number, format_bytes(plan.dram_bytes)))
        return list(rows)

    def _remarks(self) -> list[str]:
        lines = list(dict.fromkeys(plan.ceilings for plan in self.tasks.values() if plan.ceilings))
        cuts: dict[str, list[str]] = {}
        for plan in self.tasks.values():
            cuts.setdefault(plan.cut_because, []).append(printable(plan.name))
        lines += [f"{', '.join(names)}: {because}" for because, names in cuts.items() if because]
        lines += [f"{printable(plan.name)}: {plan.eval_message}" for plan in self.tasks.values() if plan.eval_message]
        for plan in self.tasks.values():
            homes = [f"{plural(number, 'layer')} at home on {device}" for device, number in plan.homed_layers.items()]
            homes += [plan.no_homes_because] if plan.no_homes_because else []
            lines += [f"{printable(plan.name)}: {'; '.join(homes)}"] if homes else []
        launching = [plan for plan in self.tasks.values() if plan.launch_share is not None]
        lines += [f"{printable(plan.name)}: {plan._launches(len(self.devices))}" for plan in launching]
        if doubling := {plan.name: plan.doubled_bytes for plan in self.tasks.values() if plan.doubled_bytes}:
            lines.append(
                f"{', '.join(doubling)}: {format_bytes(sum(doubling.values()))} of frozen weights are equal to another "
                f"task's, yet lie in DRAM and cross the link by themselves; give these tasks the same layers, or models"
                f" made by hydra_engine.integrations.huggingface.adapters"
            )
        if len(self.devices) > 1:
            alike: dict[str, list[str]] = {}
            for plan in self.tasks.values():
                alike.setdefault(plan._spread, []).append(plan.name)
            lines += [f"{', '.join(names)}: {how}" for how, names in alike.items()]
        if self.no_native_because:
            lines.append(f"host updates take several passes over memory instead of one: {self.no_native_because}")
        return [*lines, *([str(self.host)] if self.host is not None else [])]


@dataclass(frozen=True, kw_only=True)
class Revision:
    """A change of a task's partition, or of its number of micro-batches, while it trained: memory had run short.

    Or, where both are as before, that evaluation batches of some size are computed in parts.
    """

    step: int  # training steps committed before it took effect
    boundaries: list[int]  # cumulative end indices from then on
    accumulation_steps: int  # micro-batches per step from then on
    reason: str

    def __str__(self) -> str:
        number = self.accumulation_steps
        micro_batches = f"{number} micro-batch{'es' if number > 1 else ''}"
        return f"from step {self.step} on {len(self.boundaries)} shards, {micro_batches}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Retry:
    """Something of a task raised, and was tried again."""

    step: int  # whose unit or update it was; of a loader or an evaluation: training steps committed before
    where: str  # the unit, or "its optimizer, shard 2,", or "its loader"
    error: str  # type and first line

    def __str__(self) -> str:
        return f"at step {self.step} {self.where} was tried again: {self.error}"


# More than 15 attributes: figures of their own, which a caller reads one by one, as those of ModelTask.
@dataclass(kw_only=True, repr=False)
class TaskReport:
    """The outcome of one task.

    Attributes:
        skipped_steps: of float16 those whose gradients were not all finite; with nonfinite="skip" those whose loss was
            not finite. Each has its place in `losses`.
        best_step: with `keep_best`, training steps committed before the model's weights had the best value; None: there
            was no number, and they are those of the last step.
        last_step, last_validation: values of those of this run, as loggers are given them; None: there was none yet.
        error: why it failed, with the traceback; or why it stopped, where nonfinite="stop" did that.
        stop_reason: who ended the task before its last batch, where nothing failed, and why: the text of a callback's
            StopTask, a call of stop_task, patience, an interrupt.
    """

    name: str
    seed: int
    status: str = STOPPED  # "finished", "failed", "stopped" or "paused"
    steps: int = 0  # committed
    losses: list[float] = field(default_factory=list)  # one per step
    validation_losses: list[float] = field(default_factory=list)  # one per validation
    validation_steps: list[int] = field(default_factory=list)  # by validation: training steps committed before it
    validation_metrics: dict[str, list[float]] = field(default_factory=dict)  # by name, one per validation
    loss_scales: list[float] = field(default_factory=list)  # float16: one per step
    skipped_steps: list[int] = field(default_factory=list)  # that changed nothing: see above
    adaptive: list[StepChoice] = field(default_factory=list)  # of a task whose batches adapt: one per step
    retries: list[Retry] = field(default_factory=list)  # at most max_retries; after a resume as many again
    revisions: list[Revision] = field(default_factory=list)
    best_step: int | None = None
    best_value: float | None = None
    stopped_early: bool = False  # it is finished, since nothing was better for so long as `patience`
    hparams: dict[str, Any] = field(default_factory=dict)  # the task's, for tables
    last_step: StepReport | None = field(default=None, repr=False)
    last_validation: ValidationReport | None = field(default=None, repr=False)
    ema_state: dict[str, Tensor] | None = None  # for `model.load_state_dict`, where ema_decay was set
    error: str | None = None
    exception: BaseException | None = None
    stop_reason: str | None = None

    @property
    def reason(self) -> str | None:
        """Why it ended before its last batch: the first line of what was raised, and where, or `stop_reason`."""
        if self.exception is None:
            return self.stop_reason
        said, where = _first_line(self.exception), (self.error or "").partition("\n")[0]
        begins = f"{self.name} failed in "
        return f"{said}, in {where.removeprefix(begins)}" if where.startswith(begins) else said

    @property
    def remarks(self) -> list[str]:
        """Lines on what a reader of the figures has to know: an early end, losses that are no numbers, other plans."""
        found = [] if self.reason is None else [f"{self.status} after step {self.steps}: {self.reason}"]
        skipped = set(self.skipped_steps)
        bad = [step for step, loss in enumerate(self.losses) if not (math.isfinite(loss) or step in skipped)]
        if bad:
            found.append(
                f"the loss is infinite or NaN in {len(bad)} of {len(self.losses)} steps, first in step {bad[0]}, and "
                f"was trained on; lower lr, set max_grad_norm, or choose what becomes of such steps with nonfinite="
            )
        if self.skipped_steps:
            number = plural(len(self.skipped_steps), "step")
            found.append(f"{number} changed nothing (skipped_steps), first {min(skipped)}")
        validations = zip(self.validation_steps, self.validation_losses, strict=False)  # a callback may look between
        if missing := [step for step, loss in validations if not math.isfinite(loss)]:
            found.append(f"the validation loss is infinite or NaN {len(missing)} times, first after step {missing[0]}")
        found += map(str, (*self.revisions, *self.retries))
        return [*found, *(f"at the end {choice}" for choice in self.adaptive[-1:])]

    def __repr__(self) -> str:
        loss = f", loss {_ends(self.losses)}" if self.losses else ""
        return f"<TaskReport {self.name!r}: {self.status}, {plural(self.steps, 'step')}{loss}>"

    def lighten(self) -> None:
        """Let go of what holds a model: `ema_state`, and the frames that `exception` came through; `error` has them."""
        self.ema_state = None
        drop_tracebacks(self.exception)

    def values(self, by: str) -> tuple[list[int], list[float]]:
        """Return a figure's values, and for each of them the training steps committed before; none if it has none.

        by: "loss", of each step; "validation_loss", or a name in the task's `metrics`, of each validation.
        """
        if by == TRAINING_LOSS:
            return list(range(1, len(self.losses) + 1)), list(self.losses)
        values = self.validation_losses if by == VALIDATION_LOSS else self.validation_metrics.get(by, [])
        return self.validation_steps[: len(values)], list(values)


def drop_tracebacks(error: BaseException | None) -> None:
    """Let go of the frames that an error came through. They hold what they worked on: a model, often, in a cycle."""
    chain: list[BaseException | None] = [error]
    done: set[int] = {id(None)}
    while chain:
        each = chain.pop()
        if each is not None and id(each) not in done:
            done.add(id(each))
            each.__traceback__ = None
            if isinstance(each, AttributeError):
                each.obj = None
            chain += [each.__cause__, each.__context__]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Figures of a model on a loader."""

    loss: float
    metrics: dict[str, float]  # by name
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """The work of one device."""

    name: str
    busy_s: float  # seconds its compute lane worked
    loaded_bytes: int
    stored_bytes: int
    peak_bytes: int
    memory_bytes: int
    launch_s: float | None = None  # seconds in which the interpreter handed it kernels; None: that is computing
    device_s: float | None = None  # seconds from a unit's first kernel to its last one's end
    homed_bytes: int = 0  # the most that shards which are at home there have taken


@dataclass(frozen=True, kw_only=True)
class CheckpointReport:
    """Checkpoints that a run saved, and their cost."""

    num_saved: int = 0  # checkpoints, those at tasks' ends too
    num_failed: int = 0  # checkpoints that the directory did not take
    num_bytes: int = 0  # that were written; files that are named again do not count
    write_s: float = 0.0  # spent writing, beside all other work
    copied_bytes: int = 0  # that changed before they were written
    held_s: float = 0.0  # for which updates, commits and stores waited for saves, summed over threads
    path: str | None = None  # the last one's manifest
    messages: tuple[str, ...] = ()  # that tell what went wrong; also in Report.messages

    def __str__(self) -> str:
        rate = format_bytes(int(self.num_bytes / self.write_s)) + "/s" if self.write_s else "-"
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return (
            f"checkpoints: {self.num_saved} saved{failed}, {format_bytes(self.num_bytes)} at {rate}, "
            f"{format_bytes(self.copied_bytes)} copied, which held up {self.held_s:.2f} s"
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """The outcome of a run; prints as two tables. `hydra_engine.pictures` draws it.

        print(report.summary())         # a few lines
        report.save("run.json")         # Report.load("run.json") brings it back

    Attributes:
        spans: what each lane did and when, in the order of ends, and the host's commits ("commit", labelled with the
            task) and updates ("update", labelled "task.shard"), and steps that began again ("again", labelled with the
            unit that stopped them); of a long run the last 100,000.
        memory: the bytes in use on each device and since when, in the order of moments; of a long run the last 100,000.

    After a resume, what a task's report lists begins with its first step; all other figures are of this call alone.
    """

    makespan_s: float
    tasks: dict[str, TaskReport]
    devices: list[DeviceReport]
    spans: Sequence[Span] = ()
    memory: Sequence[MemoryUse] = ()
    host: HostThreads | None = None  # the run's threads and cores
    checkpoints: CheckpointReport | None = None  # where a directory was given for them
    messages: Sequence[str] = ()  # what a resume found, batches it is in doubt about, what could not be saved

    @property
    def spans_since_s(self) -> float:
        """Seconds after the run's beginning from which on all spans are known: 0, unless the first ones are gone."""
        return min(span.end_s for span in self.spans) if len(self.spans) >= MAX_SPANS else 0.0

    @property
    def memory_since_s(self) -> float:
        """The same of `memory`."""
        return self.memory[0].at_s if len(self.memory) >= MAX_SPANS else 0.0

    @property
    def schedule(self) -> list[Placed]:
        """Units with their devices and times, for `hydra_engine.pictures` and `hydra_engine.schedule`.

        Of a step that began again, what was computed then.
        """
        indices = {device.name: index for index, device in enumerate(self.devices)}
        steps: dict[tuple[str, bool, int], dict[Unit, Placed]] = {}
        for span in self.spans:
            if span.lane in ("compute", AGAIN):
                unit = Unit.parse(span.label)
                step = (unit.task, unit.kind == EVALUATE, unit.step)
                if span.lane == AGAIN:
                    steps.pop(step, None)
                else:
                    steps.setdefault(step, {})[unit] = Placed(unit, indices[span.device], span.start_s, span.end_s)
        return sorted((placed for units in steps.values() for placed in units.values()), key=lambda each: each.end_s)

    def raise_failures(self) -> None:
        """Raise the first failed task's exception, if any, with a note that names each other one and its reason."""
        failed = [task for task in self.tasks.values() if task.status == FAILED]
        if not failed:
            return
        error = failed[0].exception
        assert error is not None
        others = "".join(f"\n{printable(task.name)}: {task.reason}" for task in failed[1:])
        note = f"{plural(len(failed) - 1, 'other task')} failed, too:{others}"
        if others and note not in "\n".join([str(error), *getattr(error, "__notes__", ())]):  # it may be raised again
            noted(error, note)
        raise error

    def compare(self, by: str = VALIDATION_LOSS, *, best: str = MIN) -> str:
        """A table of the tasks, those with the best value of a figure first; NaN is no value.

        by: "validation_loss", "loss" or a name in `metrics`. best: "min" or "max". Raises ValueError for others.
        """
        if best not in (MIN, MAX):
            raise ValueError(f"best: {best!r}, known: {MIN!r}, {MAX!r}")
        metrics = [name for task in self.tasks.values() for name in task.validation_metrics]
        known = dict.fromkeys([VALIDATION_LOSS, TRAINING_LOSS, *metrics])
        if by not in known:
            raise ValueError(f"by: {by!r}, known: {', '.join(map(repr, known))}; name one of these")
        names = list(dict.fromkeys(name for task in self.tasks.values() for name in task.hparams))
        ranked = []
        for task in self.tasks.values():
            steps, values = task.values(by)
            at = best_index(values, best)
            value = values[at] if at is not None else 0.0
            told = ("-", "-", "-") if at is None else (f"{value:.6g}", str(steps[at]), f"{values[-1]:.6g}")
            hparams = [_short_value(task.hparams[name]) if name in task.hparams else "-" for name in names]
            status = f"{task.status}, early" if task.stopped_early else task.status
            rank = (at is None, value if best == MIN else -value)
            ranked.append((rank, (task.name, *told, status, str(task.steps), *hparams)))
        ranked.sort(key=lambda each: each[0])  # equal ones stay in their order
        head = ("task", f"best {by}", "at step", "last", "status", "steps", *names)
        return "\n".join(table([head, *(row for _, row in ranked)]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a file, as JSON, for `Report.load`. A file that is there is replaced, as a whole.

        Not saved: `ema_state`, which is weights. Of an exception its type and text are, and of `hparams` what JSON has
        (tuples become lists, other objects their text). Raises OSError where the file cannot be written.
        """
        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Return the report that `save` has written to a file.

        A task's `exception` is a `SavedError` with the type's name and the text of the one that was raised, and its
        `ema_state` None. Raises ValueError for a file that holds no report, OSError for one that cannot be read.
        """
        return load(cls, path)

    def summary(self) -> str:
        """A few lines: what became of the tasks, how busy the devices were, and what needs a look."""
        counts = Counter(task.status for task in self.tasks.values())
        statuses = (FINISHED, FAILED, STOPPED, PAUSED)
        ended = ", ".join(f"{counts[status]} {status}" for status in statuses if counts[status])
        where = f"{plural(len(self.tasks), 'task')} on {plural(len(self.devices), 'device')}"
        lines = [f"{where} in {self.makespan_s:.1f} s" + (f": {ended}" if ended else "")]
        if self.devices:
            shares = {device.name: self._busy_share(device) for device in self.devices}
            each = f"{min(shares.values()):.0%} to {max(shares.values()):.0%}"
            if len(shares) <= FEW_DEVICES:
                each = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
            fullest = max(self.devices, key=lambda device: device.peak_bytes / max(1, device.memory_bytes))
            lines += [
                f"computing {sum(shares.values()) / len(shares):.0%} of the time ({each})",
                f"loaded {format_bytes(sum(device.loaded_bytes for device in self.devices))}, stored "
                f"{format_bytes(sum(device.stored_bytes for device in self.devices))}; at most "
                f"{format_bytes(fullest.peak_bytes)} of {format_bytes(fullest.memory_bytes)} in use, on {fullest.name}",
            ]
        for task in self.tasks.values():
            if task.status != FINISHED:
                ended = f"{task.name} {task.status} after {plural(task.steps, 'step')}"
                lines.append(f"{ended}: {task.reason}" if task.reason else ended)
        return "\n".join([*lines, *self.messages])

    def _busy_share(self, device: DeviceReport) -> float:
        return device.busy_s / max(self.makespan_s, 1e-9)

    def __repr__(self) -> str:
        return f"<Report: {self.summary().splitlines()[0]}>"

    def __str__(self) -> str:
        told = self._told()
        tasks, devices = table(self._task_rows()), table(self._device_rows())
        return "\n".join([*tasks, *([""] if told else []), *told, "", *devices, *self._end()])

    def _task_rows(self) -> list[tuple[str, ...]]:
        tasks = self.tasks.values()
        rows = ((t.name, t.status, str(t.steps), _ends(t.losses), _ends(t.validation_losses)) for t in tasks)
        return [("task", "status", "steps", "loss", "validation"), *rows]

    def _device_rows(self) -> list[tuple[str, ...]]:
        columns = [("device", "busy", "loaded", "stored", "peak of budget")]
        for device in self.devices:
            busy = f"{self._busy_share(device):.0%}"
            loaded, stored = format_bytes(device.loaded_bytes), format_bytes(device.stored_bytes)
            peak = f"{format_bytes(device.peak_bytes)} of {format_bytes(device.memory_bytes)}"
            columns.append((device.name, busy, loaded, stored, peak))
        return list(columns)

    def _told(self) -> list[str]:
        """Return what a reader of the figures has to know, task by task, and of the run."""
        return [*(f"{task.name}: {each}" for task in self.tasks.values() for each in task.remarks), *self.messages]

    def _end(self) -> list[str]:
        launches = [
            f"{device.name}: launching took {device.launch_s / device.device_s:.0%} of the time that it worked"
            for device in self.devices
            if device.launch_s is not None and device.device_s
        ]
        end = [str(self.host)] if self.host is not None else []
        end += [str(self.checkpoints)] if self.checkpoints is not None else []
        return [*launches, *end, f"makespan {self.makespan_s:.1f} s"]


def _short(sizes: list[int]) -> str:
    return " ".join(map(str, sizes)) if len(sizes) <= 8 else f"{min(sizes)} to {max(sizes)}"


def _short_value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _ends(values: list[float]) -> str:
    return f"{values[0]:.3f} -> {values[-1]:.3f}" if values else "-"


def _first_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its text."""
    kind = "" if isinstance(error, SavedError) else type(error).__name__
    said = str(error).strip().partition("\n")[0]
    return f"{kind}: {said}" if kind and said else kind or said
