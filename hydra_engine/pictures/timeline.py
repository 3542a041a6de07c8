"""Draws a run: what each lane did and when, the memory in use against its budget under it, and the losses.

2 tasks on 1 device, 12.3 s                        title, tasks and their colours
cpu:0   |##..####.##|   83%                        by device: compute, load and store, and compute's share of time
host    |.#...#.....|                              commits and updates
cpu:0   |__--__--___|   peak 61 MiB of 64 MiB      by device: memory in use, up to its budget; dashed: the peak
loss    |\\_          |                              by task: of each step, and of validations
"""

from __future__ import annotations

import colorsys
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydra_engine import Report, Span
from hydra_engine.pictures.lanes import (
    AGAIN,
    COMPUTE,
    HOST,
    HOST_LANES,
    LOAD,
    STORE,
    UPDATE,
    devices_of,
    lane_rows,
    task_of,
    unit_of,
)
from hydra_engine.texts import plural, printable
from partitioners import format_bytes

# Hues go round the circle by the golden angle, so that neighbours in the list never look alike.
GOLDEN_ANGLE = 137.508
LIGHT = {"f": 0.70, "b": 0.45, "e": 0.85}  # of units, by kind
MIDDLE = 0.55  # the lightness of all else
FAINT, MEMORY, MARK, UNKNOWN = "#eeeeee", "#7a9cc6", "#cc3311", "#999999"
LANES = {COMPUTE: (0.04, 0.54), LOAD: (0.60, 0.15), STORE: (0.77, 0.15)}  # of a row: top, height
HOSTS = {lane: (0.04 + 0.45 * k, 0.43) for k, lane in enumerate(HOST_LANES)}
MOST_VECTORS = 10_000  # spans beyond which they are pixels in a vector file, too
LOG_RATIO = 30.0  # losses that differ by more are drawn on a logarithmic axis
NAME_SIGNS = 28  # of a task's name, in the list of colours


def timeline(
    report: Report, path: str | os.PathLike[str], *, start_s: float | None = None, end_s: float | None = None
) -> None:
    """Draw a run to a file: .png, .svg, .pdf, or another that matplotlib (the extra `plot`) knows.

    A row for each device, with its compute, load and store lanes, coloured by task, and the host's commits and updates;
    memory against budget under it; losses. A percentage beside a device is the share of the time shown in which it
    computed. Forwards are light, backwards dark, evaluations palest.

    start_s, end_s: draw the seconds from one to the other alone; None: from the run's beginning, to its end. Of a run
    whose first spans are gone, by itself those from which they are all there.

    Raises ValueError for another ending and an empty window, ImportError without matplotlib.
    """
    figure = drawn(report, start_s, end_s)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a task's name may have signs that the font lacks
        figure.savefig(path, dpi=150)


def drawn(report: Report, start_s: float | None = None, end_s: float | None = None) -> Any:
    """Return the same as a figure of matplotlib's."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "timeline: matplotlib, which draws it, is not installed; install it (pip install 'hydra_engine[plot]'), or "
            "write hydra_engine.pictures.trace, which needs nothing"
        ) from error
    window = _window(report, start_s, end_s)
    devices = devices_of(report)
    names = dict.fromkeys([*report.tasks, *filter(None, map(task_of, report.spans))])
    hues = {name: k for k, name in enumerate(names)}
    row = 0.5 if len(devices) <= 4 else 0.3 if len(devices) <= 16 else 0.16  # inches: 2 devices and 64 read alike
    heights = [row * (len(devices) + 1), row * len(report.devices), 2.2]
    legend_rows = math.ceil(len(names) / 6)
    # Not pyplot: it would keep the figure, and choose a window for it.
    figure = Figure(figsize=(13, sum(heights) + 2.2 + 0.18 * legend_rows), layout="constrained")
    lanes, memory, losses = figure.subplots(3, 1, height_ratios=[max(0.1, each) for each in heights])
    font = min(9.0, 55 * row)
    _draw_lanes(lanes, report, devices, hues, window, font)
    _draw_memory(memory, report, window, font)
    _draw_losses(losses, report, hues)
    figure.suptitle(_title(report, window, len(names), len(devices)), fontsize=12)
    _draw_legend(figure, hues)
    return figure


def _window(report: Report, start_s: float | None, end_s: float | None) -> tuple[float, float]:
    if start_s is None:
        start_s = report.spans_since_s
    if end_s is None:
        last_s = max((span.end_s for span in report.spans), default=0.0)
        end_s = max(report.makespan_s, last_s, start_s + 1e-9 if start_s <= 0 else 0.0)
    if not -math.inf < start_s < end_s < math.inf:
        raise ValueError(
            f"start_s: {start_s:g}, limit: below end_s, {end_s:g}, both finite, in seconds from the run's beginning; "
            f"give a part of the {report.makespan_s:g} s that it took"
        )
    return start_s, end_s


def _title(report: Report, window: tuple[float, float], num_tasks: int, num_devices: int) -> str:
    shown = f"{report.makespan_s:.4g} s"
    if window[0] > 0 or window[1] < report.makespan_s:
        shown = f"seconds {window[0]:.6g} to {window[1]:.6g} of {report.makespan_s:.6g}"
    return f"{plural(num_tasks, 'task')} on {plural(num_devices, 'device')}, {shown}"


def _draw_lanes(
    axes: Any,
    report: Report,
    devices: Sequence[str],
    hues: Mapping[str, int],
    window: tuple[float, float],
    font: float,
) -> None:
    start_s, end_s = window
    spans = [span for span in report.spans if span.end_s > start_s and span.start_s < end_s]
    found = lane_rows(spans)
    shares = []
    for k, device in enumerate(devices):
        computing = [span for lane in (COMPUTE, UPDATE) for row in found.get((device, lane), []) for span in row]
        shares.append(f"{_share(computing, start_s, end_s):.0%}")
        found[device, COMPUTE] = [computing]
        for lane, place in LANES.items():
            _draw_rows(axes, found.get((device, lane), []), k, place, hues, window)
    for lane, place in HOSTS.items():
        _draw_rows(axes, found.get((HOST, lane), []), len(devices), place, hues, window)
    again = [span.start_s for span in spans if span.lane == AGAIN]
    axes.vlines(again, len(devices), len(devices) + 1, colors=MARK, linewidths=1.5)
    _label(axes, [*devices, "host"], [*shares, "commit, update"], window, font)
    kinds = "light: forward, dark: backward, palest: evaluation"
    axes.set_title(f"compute (with its share of the time; {kinds}), load, store", loc="left", fontsize=9)


def _draw_rows(
    axes: Any,
    rows: Sequence[Sequence[Span]],
    k: int,
    place: tuple[float, float],
    hues: Mapping[str, int],
    window: tuple[float, float],
) -> None:
    """Draw a lane of the k-th device; where its jobs overlapped, in rows one under the other."""
    top, height = k + place[0], place[1]
    axes.broken_barh([(window[0], window[1] - window[0])], (top, height), facecolors=FAINT)
    high = height / max(1, len(rows))
    for j, row in enumerate(rows):
        times = [(span.start_s, span.end_s - span.start_s) for span in row]
        colours = [_colour(hues, task_of(span), _light(span)) for span in row]
        is_rasterized = len(row) > MOST_VECTORS
        axes.broken_barh(times, (top + j * high, high), facecolors=colours, linewidth=0, rasterized=is_rasterized)


def _colour(hues: Mapping[str, int], task: str, light: float = MIDDLE) -> Any:
    return colorsys.hls_to_rgb(hues[task] * GOLDEN_ANGLE / 360 % 1, light, 0.6) if task in hues else UNKNOWN


def _light(span: Span) -> float:
    unit = unit_of(span) if span.lane == COMPUTE else None
    return MIDDLE if unit is None else LIGHT.get(unit.kind, MIDDLE)


def _share(spans: Iterable[Span], start_s: float, end_s: float) -> float:
    """Return the share of a window that spans take."""
    return sum(min(span.end_s, end_s) - max(span.start_s, start_s) for span in spans) / (end_s - start_s)


def _label(axes: Any, left: Sequence[str], right: Sequence[str], window: tuple[float, float], font: float) -> None:
    """Set the window, and name rows of height 1 from the top at both sides."""
    middles = [k + 0.5 for k in range(len(left))]
    axes.set(xlim=window, ylim=(max(1, len(left)), 0), xlabel="s")
    axes.set_yticks(middles, [each if len(each) <= 18 else f"...{each[-15:]}" for each in left], fontsize=font)
    for middle, text in zip(middles, right, strict=True):
        axes.text(1.005, middle, text, transform=axes.get_yaxis_transform(), va="center", fontsize=font)
    axes.spines[:].set_visible(False)


def _draw_memory(axes: Any, report: Report, window: tuple[float, float], font: float) -> None:
    known_s = report.memory_since_s  # what is not known any more stays white
    peaks = []
    for k, device in enumerate(report.devices):
        used = [each for each in report.memory if each.device == device.name]
        height, bottom = 0.9 / max(1, device.memory_bytes), k + 0.95
        axes.broken_barh([(known_s, window[1] - known_s)], (k + 0.05, 0.9), facecolors=FAINT)
        times = [*(each.at_s for each in used), window[1]]
        levels = [bottom - each.used_bytes * height for each in used]
        if levels:
            many = len(levels) > MOST_VECTORS
            axes.fill_between(
                times, bottom, [*levels, levels[-1]], step="post", color=MEMORY, linewidth=0, rasterized=many
            )
        axes.hlines(bottom - device.peak_bytes * height, *window, colors=MARK, linewidths=0.8, linestyles="dashed")
        peaks.append(f"peak {format_bytes(device.peak_bytes)} of {format_bytes(device.memory_bytes)}")
    _label(axes, [device.name for device in report.devices], peaks, window, font)
    axes.set_title("memory in use; a row's height is the budget; dashed: the peak", loc="left", fontsize=9)


def _draw_losses(axes: Any, report: Report, hues: Mapping[str, int]) -> None:
    shown = []
    for task in report.tasks.values():
        for by, style in (("loss", "-"), ("validation_loss", "--")):
            points = [(at, value) for at, value in zip(*task.values(by), strict=True) if math.isfinite(value)]
            if points:
                light = MIDDLE if by == "loss" else 0.35
                marker = "." if len(points) == 1 else ""
                axes.plot(*zip(*points, strict=True), style, color=_colour(hues, task.name, light), marker=marker)
                shown += [value for _, value in points]
    if shown and min(shown) > 0 and max(shown) / min(shown) > LOG_RATIO:
        axes.set_yscale("log")
    axes.set(xlabel="step")
    axes.set_title("loss; dashed: validation", loc="left", fontsize=9)


def _draw_legend(figure: Any, hues: Mapping[str, int]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=_colour(hues, name)) for name in hues]
    # A label that begins with an underscore would be left out.
    labels = [f" {printable(name if len(name) <= NAME_SIGNS else name[: NAME_SIGNS - 3] + '...')}" for name in hues]
    legend = figure.legend(patches, labels, loc="outside lower left", ncols=6, fontsize=7, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
