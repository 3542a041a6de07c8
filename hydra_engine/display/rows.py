"""A run as rich's tables: one row for each task and each device, as many as there is room for."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hydra_engine import AtWork, Doing, RunProgress, TaskProgress
from hydra_engine.texts import clock, number, plural, printable, rate
from partitioners import format_bytes

NARROW, WIDE = 75, 100  # below and from so many columns on, there is less room and more
LEAST_NAME = 8  # columns
STATE = max(len(doing.value) for doing in Doing)
STYLES = {Doing.FAILED: "red", Doing.FINISHED: "blue", Doing.STOPPED: "magenta", Doing.PAUSED: "magenta"}


class Rows(JupyterMixin):  # type: ignore[misc]
    """How a run stands, in at most `lines` rows; None: in as many as there are."""

    def __init__(self, run: RunProgress, lines: int | None = None) -> None:
        self.run = run
        self.lines = 3 * (len(run.tasks) + len(run.devices)) + 9 if lines is None else lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        run, lines = self.run, self.lines
        num_devices = min(len(run.devices), max(2, lines // 3))
        # Beside their rows: the run's own, two heads, and what is said of those that have none.
        room = lines - 3 - num_devices - (num_devices < len(run.devices))
        chosen = {task.name for task in run.first(room if len(run.tasks) <= room else room - 1)}
        parts = [_line(self._told(), "bold"), self._tasks(options.max_width, chosen)]
        if others := [task for task in run.tasks if task.name not in chosen]:
            parts.append(_line(f"and {len(others)} more: {run.counts(others)}", "dim"))
        parts.append(self._devices(options.max_width, num_devices))
        if rest := run.devices[num_devices:]:
            at_work = sum(device.unit is not None for device in rest)
            parts.append(_line(f"and {len(rest)} more: {at_work} at work", "dim"))
        yield from parts

    def _told(self) -> str:
        tasks = self.run.tasks
        left = [task.left_s for task in tasks if task.left_s is not None]
        unknown = any(not task.doing.is_over and task.left_s is None for task in tasks)
        text = f"{clock(self.run.now_s)}  {plural(len(tasks), 'task')}: {self.run.counts(tasks)}"
        return text + (f"  {'at least' if unknown else 'about'} {clock(max(left))} left" if left else "")

    def _tasks(self, columns: int, chosen: set[str]) -> Table:
        table = _table(columns)
        table.add_column("task", no_wrap=True, max_width=max(LEAST_NAME, columns // 4), style="bold")
        if columns >= NARROW:
            table.add_column("", ratio=1, no_wrap=True)
        if columns >= WIDE:
            table.add_column("steps", justify="right", no_wrap=True)
        table.add_column("%", justify="right", no_wrap=True, min_width=4)
        table.add_column("loss", justify="right", no_wrap=True, min_width=8, style="cyan")
        if columns >= NARROW:
            table.add_column("val", justify="right", no_wrap=True, min_width=8, style="cyan")
            table.add_column("rate", justify="right", no_wrap=True, min_width=8)
            table.add_column("left", justify="right", no_wrap=True, min_width=6)
        table.add_column("state", no_wrap=True, min_width=STATE)
        if columns >= WIDE and any(task.batch for task in self.run.tasks):
            table.add_column("", no_wrap=True, style="dim")
        for task in self.run.tasks:
            if task.name in chosen:
                table.add_row(*_cells(task, columns)[: len(table.columns)])
        return table

    def _devices(self, columns: int, number: int) -> Table:
        table = _table(columns)
        table.add_column("device", no_wrap=True, style="bold")
        table.add_column("runs", ratio=1, no_wrap=True)
        widths = {"memory": 0, "load": 10, "store": 10, "busy": 4} if columns >= NARROW else {"memory": 0}
        for name, width in widths.items():
            table.add_column(name, justify="right", no_wrap=True, min_width=width)
        for device in self.run.devices[:number]:
            share = device.used_bytes / max(1, device.memory_bytes)
            used = format_bytes(device.used_bytes) if columns >= WIDE else f"{share:.0%}"
            waits = "" if device.doing is AtWork.COMPUTES else f"{device.doing.value}: "
            cells = [
                _line(device.name),
                _line(f"{waits}{device.unit}" if device.unit else device.doing.value, "yellow" if waits else "green"),
                _line(f"{used} of {format_bytes(device.memory_bytes)}", "yellow" if share > 0.95 else ""),
                *(_line(f"{format_bytes(int(each))}/s") for each in (device.loaded_per_s, device.stored_per_s)),
                _line(f"{device.busy_share:.0%}"),
            ]
            table.add_row(*cells[: len(table.columns)])
        return table


def _cells(task: TaskProgress, columns: int) -> Sequence[Text | ProgressBar]:
    style = STYLES.get(task.doing, "green" if task.doing.computes else "yellow")
    steps = str(task.steps) if task.num_steps is None else f"{task.steps}/{task.num_steps}"
    # Where nobody knows how many there are, the steps so far.
    done = f"{100 * task.steps // task.num_steps}%" if task.num_steps else str(task.steps)
    bar = ProgressBar(task.num_steps or 1, task.steps if task.num_steps else 0, complete_style=style)
    bar.finished_style = style
    found = {"name": _line(task.name), "bar": bar, "steps": _line(steps), "%": _line(done)}
    found |= {"loss": _line(number(task.loss)), "val": _line(number(task.validation))}
    found |= {"rate": _line(rate(task.steps_per_s)), "left": _line(clock(task.left_s))}
    found |= {"state": _line(task.doing.value, style), "batch": _line(task.batch)}
    leaves_out = {"bar", "steps", "val", "rate", "left"} if columns < NARROW else {"steps"} if columns < WIDE else set()
    return [cell for name, cell in found.items() if name not in leaves_out]


def _table(columns: int) -> Table:
    gap = 2 if columns >= WIDE else 1
    return Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, expand=True, header_style="dim")


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")
