"""Draws a run: what each lane did and when, the memory in use against its budget under it, and the losses.

    makespan 12.3 s                                    title, tasks and their colours
    cpu:0   |##..####.##|   83%                        by device: compute, load and store, and compute's share of time
    host    |.#...#.....|                              commits and updates
            0    5    10 s
    cpu:0   |__--__--___|   peak 61 MiB of 64 MiB      by device: memory in use, up to its budget
    loss    |\\_          |                              by task: of each step, and of validations

A row shows each span that is wider than a pixel as a box. Shorter ones that are neighbours share a box, whose parts are
as high as their tasks' shares of its time. So the area of a row that is filled is the share of the time in
which the lane worked, at any scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from hydra_engine.pictures.lanes import (
    AGAIN,
    COMPUTE,
    DEVICE_LANES,
    HOST,
    HOST_LANES,
    UPDATE,
    lane_rows,
    ordered_devices,
    share,
    task_of,
    unit_of,
)
from hydra_engine.pictures.picture import FAINT, Area, Box, Line, Picture, Shape, Words, colour, plural
from hydra_engine.schedule import BACKWARD, EVALUATE, FORWARD
from hydra_engine.trace import MemoryUse, Span
from partitioners import format_bytes

LEFT, RIGHT, MARGIN = 132, 168, 14  # pixels, beside and around the plots
LEAST_WIDTH = LEFT + RIGHT + 100
CURVES_HEIGHT = 190
# Of a run with more spans, more of them share a box, so that there are about so many: an HTML file of a few MB.
MOST_BOXES = 20_000
MOST_POINTS = 400  # of one loss curve
LOG_RATIO = 30.0  # losses that differ by more are drawn on a logarithmic axis
NAME_SIGNS = 28  # of a task's name, in the list of colours
LIGHT = {FORWARD: 0.70, BACKWARD: 0.45, EVALUATE: 0.85}  # of units, by kind
MIDDLE = 0.55  # the lightness of all else
UNKNOWN = "#999999"
MEMORY, MARK = "#7a9cc6", "#cc3311"


class DeviceBudget(NamedTuple):
    """The memory of a device: what it had, and the most that was in use."""

    name: str
    memory_bytes: int
    peak_bytes: int


class Curve(NamedTuple):
    """Values of a task, and for each the training steps that were committed before it."""

    task: str
    steps: Sequence[int]
    values: Sequence[float]
    is_validation: bool = False


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """The figures of a run that are drawn."""

    makespan_s: float
    devices: Sequence[DeviceBudget]
    tasks: Sequence[str]
    spans: Sequence[Span]
    memory: Sequence[MemoryUse] = ()
    curves: Sequence[Curve] = ()
    is_cut: bool = False  # the first spans are not there any more
    is_memory_cut: bool = False  # nor is the memory that was in use at first


class _Sizes(NamedTuple):
    """Pixels of rows, by the number of devices: 2 and 64 are to be read alike."""

    compute: float
    lane: float
    gap: float  # between devices
    memory: float
    font: float

    @classmethod
    def of(cls, num_devices: int) -> _Sizes:
        if num_devices <= 4:
            return cls(26, 10, 10, 40, 11)
        return cls(16, 5, 6, 18, 10) if num_devices <= 16 else cls(8, 3, 4, 10, 9)


@dataclass
class _Drawing:
    """A picture that grows downwards, and the window of time that it shows."""

    width: float
    start_s: float
    end_s: float
    hues: Mapping[str, int]  # by task
    shapes: list[Shape] = field(default_factory=list)
    y: float = MARGIN

    @property
    def plot_width(self) -> float:
        return self.width - LEFT - RIGHT

    def x(self, at_s: float) -> float:
        """Return the place of a moment."""
        return LEFT + (at_s - self.start_s) * self.plot_width / (self.end_s - self.start_s)

    def colour(self, task: str, light: float) -> str:
        return colour(self.hues[task], light) if task in self.hues else UNKNOWN


def draw_timeline(
    figures: RunFigures, *, start_s: float | None = None, end_s: float | None = None, width: int = 1200
) -> Picture:
    """Draw a run, or the part of it from `start_s` to `end_s`; width: in pixels.

    Of a run that was so long that its first spans are gone, by itself the part from which they are all there. Raises
    ValueError for a window that is empty, and a width that leaves no room for a row.
    """
    if width < LEAST_WIDTH:
        raise ValueError(f"width: {width} pixels, limit: at least {LEAST_WIDTH}; give more")
    start_s, end_s = _window(figures, start_s, end_s)
    spans = [span for span in figures.spans if span.end_s >= start_s and span.start_s <= end_s]
    devices = ordered_devices([device.name for device in figures.devices], figures.spans)
    names = dict.fromkeys([*figures.tasks, *filter(None, map(task_of, figures.spans))])
    drawing = _Drawing(width, start_s, end_s, {name: k for k, name in enumerate(names)})
    sizes = _Sizes.of(len(devices))
    _draw_head(drawing, figures, list(names), len(devices))
    _draw_rows(drawing, spans, devices, sizes)
    _draw_memory(drawing, figures, sizes)
    _draw_curves(drawing, figures.curves)
    return Picture(width=width, height=math.ceil(drawing.y + MARGIN), shapes=drawing.shapes)


def _window(figures: RunFigures, start_s: float | None, end_s: float | None) -> tuple[float, float]:
    if start_s is None:
        start_s = min((span.end_s for span in figures.spans), default=0.0) if figures.is_cut else 0.0
    if end_s is None:
        last_s = max((span.end_s for span in figures.spans), default=0.0)
        end_s = max(figures.makespan_s, last_s, start_s + 1e-9 if start_s <= 0 else 0.0)
    if not -math.inf < start_s < end_s < math.inf:
        raise ValueError(
            f"start_s: {start_s:g}, limit: below end_s, {end_s:g}, both finite, in seconds from the run's beginning; "
            f"give a part of the {figures.makespan_s:g} s that it took"
        )
    return start_s, end_s


def _draw_head(drawing: _Drawing, figures: RunFigures, names: Sequence[str], num_devices: int) -> None:
    shown = f"{figures.makespan_s:.4g} s"
    if drawing.start_s > 0 or drawing.end_s < figures.makespan_s:
        shown = f"seconds {drawing.start_s:.6g} to {drawing.end_s:.6g} of {figures.makespan_s:.6g}"
    title = f"{plural(len(names), 'task')} on {plural(num_devices, 'device')}, {shown}"
    drawing.shapes.append(Words(MARGIN, drawing.y + 8, title, size=15, is_bold=True))
    rows = "From the top, a device's rows: compute (with its share of the time), load, store. Light: forward, dark: "
    drawing.shapes.append(Words(MARGIN, drawing.y + 28, rows + "backward, palest: evaluation.", size=10))
    drawing.y += 46
    x = float(MARGIN)
    for name in names:
        told = name if len(name) <= NAME_SIGNS else f"{name[: NAME_SIGNS - 3]}..."
        taken = 26 + 6.5 * len(told)
        if x + taken > drawing.width - MARGIN and x > MARGIN:
            x, drawing.y = float(MARGIN), drawing.y + 16
        drawing.shapes.append(Box(x, drawing.y - 5, 10, 10, drawing.colour(name, MIDDLE), name))
        drawing.shapes.append(Words(x + 14, drawing.y, told, size=11))
        x += taken
    drawing.y += 22


def _draw_rows(drawing: _Drawing, spans: Sequence[Span], devices: Sequence[str], sizes: _Sizes) -> None:
    found = lane_rows(span for span in spans if span.lane != AGAIN and span.end_s > span.start_s)
    num_rows = sum(map(len, found.values()))
    least = 1.0 if len(spans) <= MOST_BOXES else max(1.0, drawing.plot_width * num_rows / MOST_BOXES)
    top = drawing.y
    for device in devices:
        computing = [span for lane in (COMPUTE, UPDATE) for row in found.get((device, lane), []) for span in row]
        busy = f"{share(computing, drawing.start_s, drawing.end_s):.0%}"
        heights = [(lane, sizes.compute if lane == COMPUTE else sizes.lane) for lane in DEVICE_LANES]
        _label(drawing, device, busy, sum(height for _, height in heights), sizes.font)
        for lane, height in heights:
            rows = [sorted(computing, key=lambda span: span.start_s)] if lane == COMPUTE and computing else None
            _draw_lane(drawing, found.get((device, lane), []) if rows is None else rows, height, least)
        drawing.y += sizes.gap
    host = [found.get((HOST, lane), []) for lane in HOST_LANES]
    host_heights = [max(5.0, sizes.lane) * max(1, min(len(rows), 4)) for rows in host]
    _label(drawing, "host", "commit, update", sum(host_heights), sizes.font)
    for rows, height in zip(host, host_heights, strict=True):
        _draw_lane(drawing, rows, height, least)
    for span in spans:
        if span.lane == AGAIN:
            x, title = drawing.x(span.start_s), f"a step began again at {span.label}, {span.start_s:.6g} s"
            points = ((x, drawing.y - sum(host_heights)), (x, drawing.y))
            drawing.shapes.append(Line(points, MARK, 1.5, title=title))
    _time_axis(drawing, top)


def _label(drawing: _Drawing, left: str, right: str, height: float, font: float) -> None:
    middle, last_signs = drawing.y + height / 2, left if len(left) <= 18 else f"...{left[-15:]}"
    drawing.shapes.append(Words(LEFT - 8, middle, last_signs, "end", font))
    drawing.shapes.append(Words(drawing.width - RIGHT + 8, middle, right, "start", font))


def _draw_lane(drawing: _Drawing, rows: Sequence[Sequence[Span]], height: float, least: float) -> None:
    """Draw a lane; where its jobs overlapped, in rows one above the other."""
    drawing.shapes.append(Box(LEFT, drawing.y, drawing.plot_width, height - 1, FAINT))
    for k, row in enumerate(rows):
        high = (height - 1) / len(rows)
        for group in _groups(row, drawing, least):
            drawing.shapes.extend(_boxes(drawing, group, drawing.y + k * high, high))
    drawing.y += height


def _groups(row: Iterable[Span], drawing: _Drawing, least: float) -> Iterator[list[Span]]:
    """Give the spans of a row, cut to the window: one that is drawn wide enough alone, others with their neighbours."""
    per_s = drawing.plot_width / (drawing.end_s - drawing.start_s)
    group: list[Span] = []
    for each in row:
        start_s, end_s = max(each.start_s, drawing.start_s), min(each.end_s, drawing.end_s)
        if end_s <= start_s:
            continue
        span = each._replace(start_s=start_s, end_s=end_s)
        is_wide = (end_s - start_s) * per_s >= least
        if group and (is_wide or (end_s - group[0].start_s) * per_s > least):
            yield group
            group = []
        if is_wide:
            yield [span]
        else:
            group.append(span)
    if group:
        yield group


def _boxes(drawing: _Drawing, group: Sequence[Span], top: float, height: float) -> Iterator[Box]:
    """Give a box for each task and kind in a group, as high as its share of the group's time."""
    start_s, end_s = group[0].start_s, group[-1].end_s
    x, width = drawing.x(start_s), drawing.x(end_s) - drawing.x(start_s)
    seconds: dict[tuple[str, float], float] = {}
    for span in group:
        key = (task_of(span), _light(span))
        seconds[key] = seconds.get(key, 0.0) + span.end_s - span.start_s
    first, bottom = group[0], top + height
    when = f"{start_s:.6g} to {end_s:.6g} s"
    for (task, light), taken_s in seconds.items():
        if len(group) == 1:
            title = f"{first.label}: {first.lane} on {first.device}, {when} ({_duration(end_s - start_s)})"
        else:
            title = f"{task}: {_duration(taken_s)} of {first.lane} on {first.device}, {len(group)} jobs from {when}"
        high = height * min(1.0, taken_s / (end_s - start_s))
        bottom -= high
        yield Box(x, bottom, width, high, drawing.colour(task, light), title)


def _light(span: Span) -> float:
    unit = unit_of(span) if span.lane == COMPUTE else None
    return MIDDLE if unit is None else LIGHT.get(unit.kind, MIDDLE)


def _time_axis(drawing: _Drawing, top: float) -> None:
    """Draw the seconds under all rows, with lines up through them."""
    bottom = drawing.y + 4
    for at_s in ticks(drawing.start_s, drawing.end_s):
        x = drawing.x(at_s)
        drawing.shapes.append(Line(((x, top - 4), (x, bottom)), "#bbbbbb", 0.5))
        drawing.shapes.append(Words(x, bottom + 8, f"{at_s:.6g}", "middle", 10))
    drawing.shapes.append(Words(drawing.width - RIGHT + 8, bottom + 8, "s", size=10))
    drawing.y = bottom + 30


def _draw_memory(drawing: _Drawing, figures: RunFigures, sizes: _Sizes) -> None:
    if not figures.devices:
        return
    used: dict[str, list[MemoryUse]] = {}
    for each in figures.memory:
        used.setdefault(each.device, []).append(each)
    text = "Memory in use; a row's height is the budget; dashed: the peak"
    drawing.shapes.append(Words(MARGIN, drawing.y, text, size=12, is_bold=True))
    drawing.y += 14
    top, right = drawing.y, LEFT + drawing.plot_width
    # What is not known any more stays white.
    known_s = figures.memory[0].at_s if figures.is_memory_cut else 0.0
    left = min(right, max(LEFT, drawing.x(known_s)))
    for device in figures.devices:
        peak = f"peak {format_bytes(device.peak_bytes)} of {format_bytes(device.memory_bytes)}"
        _label(drawing, device.name, peak, sizes.memory, sizes.font)
        drawing.shapes.append(Box(left, drawing.y, right - left, sizes.memory, FAINT))
        height = sizes.memory / max(1, device.memory_bytes)
        bottom = drawing.y + sizes.memory
        points = _steps(drawing, used.get(device.name, []), lambda num, at=bottom, per=height: at - num * per)  # type: ignore[misc]
        if points:
            drawing.shapes.append(Area(points, MEMORY, f"{device.name}: {peak}"))
        y = bottom - device.peak_bytes * height
        drawing.shapes.append(Line(((LEFT, y), (right, y)), MARK, 0.8, is_dashed=True, title=f"{device.name}: {peak}"))
        drawing.y += sizes.memory + sizes.gap
    _time_axis(drawing, top)


def _steps(
    drawing: _Drawing, used: Sequence[MemoryUse], y: Callable[[float], float]
) -> tuple[tuple[float, float], ...]:
    """Return the outline of what was in use, by pixel: the most of it in that pixel's time."""
    tops: dict[int, int] = {}  # by pixel: the most that began there
    lasts: dict[int, int] = {}  # by pixel: what was in use at its end
    before = 0
    for each in used:
        if each.at_s < drawing.start_s:
            before = each.used_bytes
        elif each.at_s <= drawing.end_s:
            pixel = int(drawing.x(each.at_s))
            tops[pixel] = max(tops.get(pixel, 0), each.used_bytes)
            lasts[pixel] = each.used_bytes
    if not tops and not before:
        return ()
    right = LEFT + drawing.plot_width
    points = [(float(LEFT), y(0)), (float(LEFT), y(before))]
    for pixel in sorted(tops):
        high = y(max(tops[pixel], before))
        left = max(LEFT, pixel)
        points += [(left, y(before)), (left, high), (min(right, pixel + 1), high)]
        before = lasts[pixel]
        points.append((min(right, pixel + 1), y(before)))
    return (*points, (right, y(before)), (right, y(0)))


def _draw_curves(drawing: _Drawing, curves: Sequence[Curve]) -> None:
    finite = [[(s, v) for s, v in zip(each.steps, each.values, strict=True) if math.isfinite(v)] for each in curves]
    values = [value for points in finite for _, value in points]
    if not values:
        return
    low, high = min(values), max(values)
    is_log = low > 0 and high / low > LOG_RATIO
    scaled: Callable[[float], float] = math.log10 if is_log else float
    bottom_value, top_value = scaled(low), scaled(high)
    if top_value <= bottom_value:
        bottom_value, top_value = bottom_value - 0.5, top_value + 0.5
    last = max(1, *(step for points in finite for step, _ in points))
    text = f"Loss{', logarithmic' if is_log else ''}, by step; dashed: validation"
    drawing.shapes.append(Words(MARGIN, drawing.y, text, size=12, is_bold=True))
    drawing.y += 14
    top, bottom = drawing.y, drawing.y + CURVES_HEIGHT
    drawing.shapes.append(Box(LEFT, top, drawing.plot_width, CURVES_HEIGHT, FAINT))

    def place(step: float, value: float) -> tuple[float, float]:
        up = (scaled(value) - bottom_value) / (top_value - bottom_value)
        return LEFT + step * drawing.plot_width / last, bottom - 6 - up * (CURVES_HEIGHT - 12)

    for value in _log_ticks(low, high) if is_log else ticks(bottom_value, top_value, 6):
        _, y = place(0, value)
        drawing.shapes.append(Line(((LEFT, y), (LEFT + drawing.plot_width, y)), "#cccccc", 0.5))
        drawing.shapes.append(Words(LEFT - 8, y, f"{value:.4g}", "end", 10))
    for step in ticks(0, last):
        if step == int(step):
            drawing.shapes.append(Words(place(step, low)[0], bottom + 10, f"{step:.0f}", "middle", 10))
    for curve, points in zip(curves, finite, strict=True):
        if points:
            kind = "validation loss" if curve.is_validation else "loss"
            lowest = min(value for _, value in points)
            title = f"{curve.task}: {kind} {points[0][1]:.6g} -> {points[-1][1]:.6g}, lowest {lowest:.6g}"
            places = tuple(place(step, value) for step, value in _thinned(points))
            if len(places) == 1:
                [(x, y)] = places
                drawing.shapes.append(Box(x - 2, y - 2, 4, 4, drawing.colour(curve.task, MIDDLE), title))
            else:
                stroke = drawing.colour(curve.task, 0.35 if curve.is_validation else MIDDLE)
                drawing.shapes.append(Line(places, stroke, 1.4, is_dashed=curve.is_validation, title=title))
    drawing.y = bottom + 20


def _thinned(points: Sequence[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    """Give a curve's points; of one with too many the lowest and the highest of each stretch."""
    if len(points) <= MOST_POINTS:
        yield from points
        return
    each = math.ceil(2 * len(points) / MOST_POINTS)
    for k in range(0, len(points), each):
        stretch = points[k : k + each]
        yield from sorted({min(stretch, key=itemgetter(1)), max(stretch, key=itemgetter(1))})


def ticks(low: float, high: float, most: int = 10) -> list[float]:
    """Round numbers from `low` to `high`, at most so many, a 1, 2 or 5 of some decimal place apart."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    apart = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / apart - 1e-9), math.floor(high / apart + 1e-9)
    return [k * apart for k in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    return [k * 10.0**power for power in powers for k in factors if low <= k * 10.0**power <= high]


def _duration(seconds: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
