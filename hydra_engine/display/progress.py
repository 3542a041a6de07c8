"""The progress of a run as values, what follows from several of them (rates, time left), and lines of a log."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from hydra_engine.pictures import printable
from hydra_engine.schedule import Unit
from hydra_engine.system import LINE
from partitioners import format_bytes

DOTS = "..."  # where a text is cut: what every terminal can show
# Rates are those of the last WINDOW_S seconds, or of the last two steps where these took longer.
WINDOW_S = 30.0
AT_REST_S = 10.0  # who has not computed for so long gives its row to a task that has
MOST_LOGGED = 8  # tasks in a line of a log, but for the last ones
BETWEEN = " | "  # tasks in a line of a log
LEAST_NAME = 8  # columns of a task's name


class Doing(Enum):
    """Things that a task does or waits for, in words for people."""

    SETTING_UP = "setting up"
    COMPUTING = "computing"
    VALIDATING = "validating"
    WEIGHTS = "waits for weights"  # which are on their way to its device
    MEMORY = "waits for memory"  # of its device
    DEVICE = "waits for a device"
    OUTPUTS = "waits for outputs"  # of its last unit, which are on their way to DRAM
    BATCH = "waits for a batch"  # from its loader
    UPDATES = "waits for updates"  # of its weights, by the optimizer
    CALLBACKS = "waits for callbacks"
    FITTING = "being fitted"  # its batch has a new shape, or was too large
    COMMITTING = "committing"
    ENDING = "ending"
    FINISHED = "finished"
    STOPPED = "stopped"
    PAUSED = "paused"
    FAILED = "failed"

    @property
    def computes(self) -> bool:
        """True while a unit of it is computed."""
        return self in (Doing.COMPUTING, Doing.VALIDATING)

    @property
    def is_over(self) -> bool:
        """True if it does nothing more in this run."""
        return self in (Doing.FINISHED, Doing.STOPPED, Doing.PAUSED, Doing.FAILED)


class AtWork(Enum):
    """Things that a device does or waits for, in words for people."""

    COMPUTES = "computes"
    WEIGHTS = "waits for weights"  # of the unit that it is to compute
    MEMORY = "waits for memory"  # for that unit
    LOADS = "loads"  # for the unit that comes next
    IDLE = "idle"
    LEAVES = "leaves"  # once what is on its way from it is in DRAM


class TaskProgress(NamedTuple):
    """One task."""

    name: str
    doing: Doing
    steps: int  # committed
    num_steps: int | None  # None: nobody knows
    loss: float | None = None  # the last one
    validation: float | None = None  # likewise
    batch: str = ""  # of a task whose batches adapt


class DeviceProgress(NamedTuple):
    """One device; bytes and seconds since the run began."""

    name: str
    doing: AtWork
    unit: Unit | None  # that it does this with
    used_bytes: int
    memory_bytes: int
    loaded_bytes: int
    stored_bytes: int
    busy_s: float


class RunProgress(NamedTuple):
    """A run at one moment."""

    now_s: float  # since it began
    tasks: Sequence[TaskProgress]
    devices: Sequence[DeviceProgress]


class _Marks:
    """A growing number at some moments: its rate over the last WINDOW_S."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, number: float) -> None:
        marks = self._marks
        if marks and marks[-1][1] == number:
            return
        marks.append((now_s, number))
        while len(marks) > 2 and marks[1][0] < now_s - WINDOW_S:
            marks.popleft()

    @property
    def changed_s(self) -> float:
        """When it grew last; -inf: never."""
        return self._marks[-1][0] if len(self._marks) > 1 else -math.inf

    def per_s(self, now_s: float) -> float | None:
        """Return its rate; lower than what was seen where it has not grown for longer than it takes. None: unknown."""
        if len(self._marks) < 2:
            return None
        (first_s, first), (last_s, last) = self._marks[0], self._marks[-1]
        if last_s <= first_s or last < first:  # it began again
            return None
        per_s = (last - first) / (last_s - first_s)
        overdue_s = now_s - last_s
        return per_s if overdue_s * per_s <= 1 else (last - first + 1) / (now_s - first_s)


class _Flow:
    """A number of bytes or seconds at some moments: how fast it has grown over the last SHORT_S."""

    SHORT_S = 5.0

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, number: float) -> None:
        marks = self._marks
        if marks and number < marks[-1][1]:
            marks.clear()
        marks.append((now_s, number))
        while len(marks) > 2 and marks[1][0] <= now_s - self.SHORT_S:
            marks.popleft()

    @property
    def per_s(self) -> float:
        (first_s, first), (last_s, last) = self._marks[0], self._marks[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


class History:
    """The past of a run, as far as rates need it; and the tasks that have a row, where not all have one."""

    def __init__(self) -> None:
        self._steps: dict[str, _Marks] = {}
        self._active_s: dict[str, float] = {}
        self._flows: dict[str, tuple[_Flow, _Flow, _Flow]] = {}
        self._shown: list[str] = []
        self._over: dict[str, None] = {}  # in the order of their ends
        self._now_s = 0.0
        self._is_over = False

    def add(self, run: RunProgress) -> None:
        """Take in what is seen now."""
        now_s = self._now_s = run.now_s
        self._is_over = all(task.doing.is_over for task in run.tasks)
        for task in run.tasks:
            marks = self._steps.setdefault(task.name, _Marks())
            marks.add(now_s, task.steps)
            if task.doing.computes or marks.changed_s == now_s:
                self._active_s[task.name] = now_s
            if task.doing.is_over:
                self._over.setdefault(task.name)
            else:
                self._over.pop(task.name, None)
        for device in run.devices:
            flows = self._flows.setdefault(device.name, (_Flow(), _Flow(), _Flow()))
            for flow, number in zip(flows, (device.loaded_bytes, device.stored_bytes, device.busy_s), strict=True):
                flow.add(now_s, number)

    def steps_per_s(self, task: TaskProgress) -> float | None:
        """Return steps per second; None: unknown, or it is over."""
        marks = self._steps.get(task.name)
        return None if marks is None or task.doing.is_over else marks.per_s(self._now_s)

    def left_s(self, task: TaskProgress) -> float | None:
        """Return the seconds that its training steps will take as things stand; None: unknown, or it is over."""
        per_s = self.steps_per_s(task)
        return None if not per_s or task.num_steps is None else max(0, task.num_steps - task.steps) / per_s

    def link(self, device: DeviceProgress) -> tuple[float, float, float]:
        """Return bytes per second that a device loaded, and stored, and the share of time in which it computed.

        Over the last seconds; once all is over, over all of them.
        """
        loaded, stored, busy = (flow.per_s for flow in self._flows[device.name])
        if self._is_over:
            whole_s = max(self._now_s, 1e-9)
            loaded, stored, busy = device.loaded_bytes / whole_s, device.stored_bytes / whole_s, device.busy_s / whole_s
        return loaded, stored, min(1.0, busy)

    def chosen(self, tasks: Sequence[TaskProgress], most: int) -> list[TaskProgress]:
        """Return the tasks that have one of `most` rows, in their order. Who has a row keeps it: see `ranked`."""
        if len(tasks) <= most:
            return list(tasks)
        self._shown = [task.name for task in self.ranked(tasks)[: max(0, most)]]
        return [task for task in tasks if task.name in self._shown]

    def ranked(self, tasks: Sequence[TaskProgress]) -> list[TaskProgress]:
        """Return the tasks, first those that are to have a row.

        Those that compute come first, then those that wait, then those that ended last. Who has a row keeps it as long
        as it computes every few seconds: rows would else change with every unit.
        """
        ends = {name: k for k, name in enumerate(self._over)}
        shown = set(self._shown)

        def rank(task: TaskProgress) -> tuple[int, int]:
            if task.name in ends:
                return 4, -ends[task.name]
            if self._now_s - self._active_s.get(task.name, -math.inf) <= AT_REST_S:
                return (0 if task.name in shown else 1), 0
            return (2 if task.name in shown else 3), 0

        return sorted(tasks, key=rank)


def counted(tasks: Iterable[TaskProgress]) -> str:
    """Say how many of them do what: "2 computing, 3 waiting, 4 finished"."""
    numbers = Counter(
        "computing" if task.doing.computes else task.doing.value if task.doing.is_over else "waiting" for task in tasks
    )
    order = ["computing", "waiting", *(doing.value for doing in Doing if doing.is_over)]
    return ", ".join(f"{numbers[word]} {word}" for word in order if numbers[word])


def log_line(run: RunProgress, history: History) -> str:
    """Return one line of a log, of at most `LINE` columns: as many tasks as fit, and how many others there are."""
    begin, ranked = _time(run), [task.name for task in history.ranked(run.tasks)]
    for most in range(MOST_LOGGED, 0, -1):
        names = set(ranked[:most])
        others = [task for task in run.tasks if task.name not in names]
        count = f"{BETWEEN}and {len(others)} more" if others else ""
        room = LINE - width(begin + count)
        line = begin + BETWEEN.join(_describe(task, history, room) for task in run.tasks if task.name in names) + count
        if width(line) <= LINE:
            break
    history.chosen(run.tasks, most)
    doing = f": {counted(others)}" if others else ""
    return cut(line + doing if width(line + doing) <= LINE else line, LINE)


def last_log_lines(run: RunProgress, history: History) -> list[str]:
    """Return all tasks in lines of a log, of at most `LINE` columns each."""
    lines = [begin := _time(run)]
    for task in run.tasks:
        told = _describe(task, history, LINE - width(begin))
        if lines == [begin]:
            lines = [begin + told]
        elif width(lines[-1] + BETWEEN + told) <= LINE:
            lines[-1] += BETWEEN + told
        else:
            lines.append(" " * width(begin) + told)
    return [cut(line, LINE) for line in lines]


def _time(run: RunProgress) -> str:
    return f"{run.now_s:6.1f} s  "


def _describe(task: TaskProgress, history: History, columns: int) -> str:
    """Return a task's figures, in so many columns if that can be: its name is cut first."""
    of = "" if task.num_steps is None else f"/{task.num_steps}"
    told = [f"{task.steps}{of}"]
    told += [f"loss {number(task.loss)}"] if task.loss is not None else []
    told += [f"validation {number(task.validation)}"] if task.validation is not None else []
    told += [task.batch] if task.batch else []
    per_s, left_s = history.steps_per_s(task), history.left_s(task)
    told += [rate(per_s)] if per_s else []
    told += [f"{duration(left_s)} left"] if left_s is not None else []
    told += [task.doing.value] if task.doing.is_over else []
    figures = " ".join(told)
    return f"{cut(task.name, max(LEAST_NAME, columns - width(figures) - 1))} {figures}"


def number(value: float | None) -> str:
    """A loss, in at most 8 columns."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    text = f"{value:#.4g}".rstrip(".")
    return text if len(text) <= 8 else f"{value:.1e}"


def rate(per_s: float | None) -> str:
    """Steps per second, minute or hour, in at most 8 columns; one of them at least where that can be."""
    if not per_s:
        return "-"
    factor, unit = (1, "s") if per_s >= 1 else (60, "min") if per_s * 60 >= 1 else (3600, "h")
    value = per_s * factor
    return f"{value:.1f}/{unit}" if value < 100 else f"{min(value, 999_999):.0f}/{unit}"


def bytes_rate(per_s: float) -> str:
    """Bytes per second, in at most 10 columns."""
    text = f"{format_bytes(int(per_s))}/s"
    return text if len(text) <= 10 else re.sub(r"\.\d", "", text)


def duration(seconds: float | None) -> str:
    """Seconds as "0:59", "59:59", "23:59h" or "99d", in at most 6 columns."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02}"
    if whole < 86_400:
        return f"{whole // 3600}:{whole % 3600 // 60:02}h"
    return f"{whole / 86_400:.1f}d" if whole < 864_000 else f"{min(whole // 86_400, 9999)}d"


def cut(text: str, columns: int) -> str:
    """Cut a text to so many columns of a terminal: a longer row would go on in the next one.

    Most signs of East Asian scripts take two columns, accents that follow their letter none; what does not print is
    shown as a question mark.
    """
    text = printable(text)
    if width(text) <= columns:
        return text
    kept, left = "", columns - len(DOTS)
    for sign in text:
        left -= _width(sign)
        if left < 0:
            break
        kept += sign
    return (kept + DOTS)[: max(0, columns)]


def width(text: str) -> int:
    """Columns that a text takes."""
    return sum(map(_width, text))


def _width(sign: str) -> int:
    if unicodedata.combining(sign):
        return 0
    return 2 if unicodedata.east_asian_width(sign) in "WF" else 1
