"""The live display as rows of coloured text: one row for each task and each device, as many as there is room for."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TextIO, TypeAlias

from hydra_engine.display.progress import (
    LEAST_NAME,
    AtWork,
    DeviceProgress,
    Doing,
    History,
    RunProgress,
    TaskProgress,
    bytes_rate,
    counted,
    cut,
    duration,
    number,
    rate,
    width,
)
from hydra_engine.pictures import plural
from partitioners import format_bytes

Row: TypeAlias = "list[tuple[str, str]]"  # texts, each with its style in rich's words

LEAST_BAR, MOST_BAR = 6, 40  # columns
NARROW, WIDE = 40, 100  # below and from so many columns on, there is less room and more
EXPENDABLE = ("validation", "left", "rate", "loss", "doing", "%")  # columns left out first where there is no room
RIGHT = frozenset({"%", "loss", "validation", "rate", "left", "steps", "memory", "load", "store", "busy"})
_STYLES = {Doing.FAILED: "red", Doing.FINISHED: "blue", Doing.STOPPED: "magenta", Doing.PAUSED: "magenta"}


class Signs(NamedTuple):
    """Signs of a bar, for what is done and for what is not."""

    done: str
    to_come: str


LINES, PLAIN = Signs("━", "╌"), Signs("#", ".")


def rows(run: RunProgress, history: History, columns: int, lines: int, signs: Signs = LINES) -> list[Row]:
    """At most `lines` rows of at most `columns` columns."""
    num_devices = min(len(run.devices), max(2, lines // 3))
    # Beside their rows: the run's own, two heads, and what is said of those that have none.
    for_tasks = lines - 3 - num_devices - (num_devices < len(run.devices))
    tasks = history.chosen(run.tasks, for_tasks if len(run.tasks) <= for_tasks else for_tasks - 1)
    shown = {task.name for task in tasks}
    found = [_run_row(run, history, columns), *_task_rows(tasks, run.tasks, history, columns, signs)]
    if others := [task for task in run.tasks if task.name not in shown]:
        found.append([(cut(f"and {len(others)} more: {counted(others)}", columns), "dim")])
    found += _device_rows(run.devices[:num_devices], history, columns)
    if num_devices < len(run.devices):
        others_busy = sum(device.unit is not None for device in run.devices[num_devices:])
        told = f"and {len(run.devices) - num_devices} more: {others_busy} at work"
        found.append([(cut(told, columns), "dim")])
    found = found[: max(0, lines)]
    return found if columns >= NARROW else [[(cut(row, columns), "")] for row in text(found)]


def _run_row(run: RunProgress, history: History, columns: int) -> Row:
    left = [left_s for task in run.tasks if (left_s := history.left_s(task)) is not None]
    unknown = any(not task.doing.is_over and history.left_s(task) is None for task in run.tasks)
    text = f"{duration(run.now_s)}  {plural(len(run.tasks), 'task')}: {counted(run.tasks)}"
    text += f"  {'at least' if unknown else 'about'} {duration(max(left))} left" if left else ""
    return [(cut(text, columns), "bold")]


def _task_rows(
    shown: Sequence[TaskProgress], tasks: Sequence[TaskProgress], history: History, columns: int, signs: Signs
) -> list[Row]:
    gap = 1 if columns < WIDE else 2
    steps = [f"{task.steps}" if task.num_steps is None else f"{task.steps}/{task.num_steps}" for task in tasks]
    widths = {"steps": max(map(len, [*steps, "steps"]))} if columns >= WIDE else {}
    widths |= {"%": 4, "loss": 8, "validation": 8 if columns < WIDE else 10, "rate": 8, "left": 6}
    widths["doing"] = max(len(doing.value) for doing in Doing)
    for name in EXPENDABLE:
        if columns - sum(each + gap for each in widths.values()) < LEAST_NAME:
            del widths[name]
    free = columns - sum(each + gap for each in widths.values())
    need = max([width(task.name) for task in tasks] + [len("task")])
    has_bar = free >= LEAST_NAME + gap + LEAST_BAR
    name_width = max(0, min(need, free - (gap + LEAST_BAR if has_bar else 0)))
    bar_width = min(MOST_BAR, free - name_width - gap) if has_bar else 0
    order = ["task", *(["bar"] if has_bar else []), *widths]
    widths |= {"task": name_width, "bar": bar_width}
    named = {"doing": "state", "validation": "val" if columns < WIDE else "validation"}
    titles = {name: (named.get(name, name), "dim") for name in order} | {"bar": ("", "")}
    found = [_joined(titles, order, widths, gap)]
    for task in shown:
        done = None if not task.num_steps else min(1.0, task.steps / task.num_steps)
        of = "" if task.num_steps is None else f"/{task.num_steps}"
        style = _STYLES.get(task.doing, "green" if task.doing.computes else "yellow")
        cells = {
            "task": (task.name, "bold"),
            "steps": (f"{task.steps}{of}", ""),
            # Where nobody knows how many there are, the steps so far.
            "%": ((str(task.steps) if task.steps < 10_000 else "-") if done is None else f"{int(100 * done)}%", ""),
            "loss": (number(task.loss), "cyan"),
            "validation": (number(task.validation), "cyan"),
            "rate": (rate(history.steps_per_s(task)), ""),
            "left": (duration(history.left_s(task)), ""),
            "doing": (task.doing.value, style),
        }
        row = _joined(cells | {"bar": ("", "")}, order, widths, gap)
        if has_bar:
            row[2:3] = _bar(done, bar_width, signs, style)
        if task.batch and sum(width(text) for text, _ in row) + gap + width(task.batch) <= columns:
            row.append((" " * gap + task.batch, "dim"))
        found.append(row)
    return found


def _bar(done: float | None, columns: int, signs: Signs, style: str) -> Row:
    filled = int(columns * (done or 0.0))
    return [(signs.done * filled, style), (signs.to_come * (columns - filled), "dim")]


def _device_rows(devices: Sequence[DeviceProgress], history: History, columns: int) -> list[Row]:
    gap = 1 if columns < WIDE else 2
    memory = [_memory(each, is_wide=columns >= WIDE) for each in devices]
    names = max([width(each.name) for each in devices] + [len("device")])
    widths = {"device": min(names, 12), "memory": max([*map(len, memory), len("memory")])}
    widths |= {"load": 10, "store": 10, "busy": 4}
    for name in ("busy", "store", "load", "memory"):
        if columns - sum(each + gap for each in widths.values()) < LEAST_NAME:
            del widths[name]
    order = ["device", "runs", *(name for name in widths if name != "device")]
    widths["runs"] = max(0, min(columns - sum(each + gap for each in widths.values()), 2 * MOST_BAR))
    found = [_joined({name: (name, "dim") for name in order}, order, widths, gap)]
    for device, used in zip(devices, memory, strict=True):
        loaded_per_s, stored_per_s, busy = history.link(device)
        share = device.used_bytes / max(1, device.memory_bytes)
        cells = {
            "device": (device.name, "bold"),
            "runs": (_work(device, widths["runs"]), "green" if device.doing is AtWork.COMPUTES else "yellow"),
            "memory": (used, "yellow" if share > 0.95 else ""),
            "load": (bytes_rate(loaded_per_s), ""),
            "store": (bytes_rate(stored_per_s), ""),
            "busy": (f"{busy:.0%}", ""),
        }
        found.append(_joined(cells, order, widths, gap))
    return found


def _memory(device: DeviceProgress, *, is_wide: bool) -> str:
    used = format_bytes(device.used_bytes) if is_wide else f"{device.used_bytes / max(1, device.memory_bytes):.0%}"
    return f"{used} of {format_bytes(device.memory_bytes)}"


def _work(device: DeviceProgress, columns: int) -> str:
    """Say what a device does; with which unit, if there is room: the name of its task is cut first."""
    if device.unit is None:
        return device.doing.value
    before = "" if device.doing is AtWork.COMPUTES else f"{device.doing.value}: "
    rest = columns - width(f"{before}{device.unit._replace(task='')}")
    if rest < min(LEAST_NAME, width(device.unit.task)) and before:
        return device.doing.value
    return f"{before}{device.unit._replace(task=cut(device.unit.task, rest))}"


def _joined(cells: dict[str, tuple[str, str]], order: Iterable[str], widths: dict[str, int], gap: int) -> Row:
    row: Row = []
    for name in order:
        text, style = cells[name]
        text = cut(text, widths[name])
        blanks = " " * (widths[name] - width(text))
        row.append((blanks + text if name in RIGHT else text + blanks, style))
        row.append((" " * gap, ""))
    return row[:-1]


def text(found: Iterable[Row]) -> list[str]:
    """The same rows without colours."""
    return ["".join(each for each, _ in row).rstrip() for row in found]


class Painter:
    """Colours rows with rich, as far as a stream's terminal shows colours. Raises ImportError without rich."""

    def __init__(self, stream: TextIO) -> None:
        from rich.color import ColorSystem
        from rich.console import Console

        console = Console(file=stream, force_terminal=True, force_jupyter=False, legacy_windows=False)
        self._style = console.get_style
        # Of all systems that rich knows, since these rows need no more.
        self._colours = None if console.no_color or console.color_system is None else ColorSystem.STANDARD

    def ansi(self, row: Row) -> str:
        """A row with the codes for its colours; without any with NO_COLOR, or where TERM says that there are none."""
        colours = self._colours
        if colours is None:
            return "".join(each for each, _ in row).rstrip()
        return "".join(
            self._style(style).render(each, color_system=colours) if style and not each.isspace() else each
            for each, style in row
        )


def as_html(found: Iterable[Row]) -> str:
    """Rows as a piece of HTML."""
    from rich.console import Console
    from rich.text import Text

    console = Console(
        file=io.StringIO(), record=True, force_terminal=True, force_jupyter=False, color_system="truecolor", width=500
    )
    for row in found:
        console.print(Text.assemble(*row), no_wrap=True, overflow="ignore", crop=False)
    style = "white-space:pre; overflow-x:auto; line-height:normal; font-family:Menlo,Consolas,monospace"
    page: str = console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')
    return page
