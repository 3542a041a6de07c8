"""The timeline: spans at their times in their tasks' colours, memory below its budget, losses."""

import math
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.colors import to_hex

from hydra_engine import DeviceReport, Report, TaskReport
from hydra_engine.pictures import timeline
from hydra_engine.pictures.timeline import FAINT, MEMORY, drawn
from hydra_engine.trace import MemoryUse, Span
from tests.refused import refused

module = sys.modules["hydra_engine.pictures.timeline"]


def report_of(spans=(), *, makespan_s=10.0, devices=("cpu:0",), tasks=("a", "b"), **options):
    reports = [
        DeviceReport(name=name, busy_s=0, loaded_bytes=0, stored_bytes=0, peak_bytes=60, memory_bytes=100)
        for name in devices
    ]
    tasks = {each.name: each for each in (TaskReport(name=t, seed=0) if isinstance(t, str) else t for t in tasks)}
    return Report(makespan_s=makespan_s, tasks=tasks, devices=reports, spans=spans, **options)


def boxes(axes):
    """(from, to, top, height, colour) of every box that is no ground, in the order of beginnings."""
    found = []
    for each in axes.collections:
        colours = each.get_facecolor()
        for k, path in enumerate(each.get_paths()):
            (left, top), (right, bottom) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            colour = to_hex(colours[k % len(colours)]) if len(colours) else ""
            if colour and colour != FAINT:
                found.append((left, right, top, round(bottom - top, 6), colour))
    return sorted(found)


def filled(axes, colour):
    """The outline of the area that has this colour."""
    [area] = [each for each in axes.collections if [*map(to_hex, each.get_facecolor())] == [colour]]
    return area.get_paths()[0].vertices


def words(axes):
    return [each.get_text() for each in axes.texts]


def colour(task, light):
    return to_hex(module._colour({"a": 0, "b": 1}, task, light))


def test_span_is_a_box_at_its_time_in_its_tasks_colour():
    spans = [Span("cpu:0", "compute", "a.f0@0", 2.0, 4.0), Span("cpu:0", "compute", "b.b0@3", 4.0, 5.0)]
    figure = drawn(report_of(spans))
    a, b = boxes(figure.axes[0])
    assert (a[0], a[1], a[4]) == (2.0, 4.0, colour("a", 0.70))
    assert (b[0], b[1], b[4]) == (4.0, 5.0, colour("b", 0.45))
    assert words(figure.axes[0]) == ["30%", "commit, update"]
    assert figure.get_suptitle() == "2 tasks on 1 device, 10 s"


def test_jobs_of_a_lane_that_overlap_stand_one_under_the_other():
    spans = [Span("cpu:0", "load", "a.f0@0", 0.0, 4.0), Span("cpu:0", "load", "a.f0@0", 1.0, 2.0)]
    first, second = boxes(drawn(report_of(spans)).axes[0])
    assert first[3] == second[3]
    assert second[2] == pytest.approx(first[2] + first[3])


def test_a_part_of_the_run_is_drawn_and_its_share_told():
    spans = [Span("cpu:0", "compute", "a.f0@0", 0.0, 3.0), Span("cpu:0", "compute", "a.f0@1", 8.0, 9.0)]
    figure = drawn(report_of(spans), 2.0, 6.0)
    assert figure.axes[0].get_xlim() == (2.0, 6.0)
    assert words(figure.axes[0])[0] == "25%"
    assert figure.get_suptitle() == "2 tasks on 1 device, seconds 2 to 6 of 10"


def test_of_a_run_whose_first_spans_are_gone_the_rest_is_drawn(monkeypatch):
    monkeypatch.setattr("hydra_engine.tasks.report.MAX_SPANS", 1)
    figure = drawn(report_of([Span("cpu:0", "compute", "a.f0@0", 5.0, 6.0)], memory=[MemoryUse("cpu:0", 7.0, 20)]))
    assert figure.get_suptitle() == "2 tasks on 1 device, seconds 6 to 10 of 10"
    assert filled(figure.axes[1], FAINT)[:, 0].min() == 7.0  # of memory, what is not known stays white


@pytest.mark.parametrize("window", [(10.0, None), (3.0, 3.0), (None, 0.0), (None, math.inf), (None, math.nan)])
def test_empty_window_is_refused(window):
    with refused(says="start_s: end_s"):
        drawn(report_of(), *window)


def test_memory_stands_as_high_as_its_share_of_the_budget():
    uses = [MemoryUse("cpu:0", 0.0, 20), MemoryUse("cpu:0", 5.0, 60), MemoryUse("cpu:0", 5.001, 0)]
    axes = drawn(report_of(memory=uses)).axes[1]
    points = filled(axes, MEMORY)
    heights = {x: points[:, 1].max() - points[points[:, 0] == x, 1].min() for x in (0.0, 5.0, 10.0)}
    assert heights == pytest.approx({0.0: 0.9 * 0.2, 5.0: 0.9 * 0.6, 10.0: 0.0})
    assert words(axes) == ["peak 60 B of 100 B"]


@pytest.mark.parametrize("number", [1, 64])
def test_every_device_has_its_rows(number):
    names = [f"cuda:{k}" for k in range(number)]
    spans = [Span(name, lane, "a.f0@0", 1.0, 2.0) for name in names for lane in ("compute", "load", "store")]
    figure = drawn(report_of(spans, devices=names))
    found = boxes(figure.axes[0])
    assert len(found) == 3 * number
    tops = sorted((top, top + height) for _, _, top, height, _ in found)
    assert all(before[1] < after[0] for before, after in pairwise(tops))
    assert [each.get_text() for each in figure.axes[0].get_yticklabels()] == [*names, "host"]


def test_losses_are_lines_that_leave_out_what_is_no_number():
    a = TaskReport(name="a", seed=0, losses=[4.0, math.nan, 3.0, math.inf], validation_losses=[2.0])
    a.validation_steps = [4]
    axes = drawn(report_of(tasks=[a, "b"])).axes[2]
    loss, validation = axes.lines
    assert np.array_equal(loss.get_xydata(), [[1, 4.0], [3, 3.0]])
    assert np.array_equal(validation.get_xydata(), [[4, 2.0]])
    assert (loss.get_linestyle(), validation.get_linestyle(), validation.get_marker()) == ("-", "--", ".")
    assert axes.get_yscale() == "linear"


def test_losses_far_apart_are_on_a_logarithmic_axis():
    axes = drawn(report_of(tasks=[TaskReport(name="a", seed=0, losses=[100.0, 0.1])])).axes[2]
    assert axes.get_yscale() == "log"


def test_a_picture_is_written_whatever_tasks_are_called(tmp_path):
    name = "<a & 'b'> \x00\ud800 ü$x$ 雪"
    spans = [Span("cpu:0", "compute", f"{name}.f0@0", 0.0, 1.0), Span("host", "again", f"{name}.f0@0", 2.0, 2.0)]
    timeline(report_of(spans, tasks=[name, "_b"]), tmp_path / "run.svg")
    ET.parse(tmp_path / "run.svg")
    labels = [each.get_text().strip() for each in drawn(report_of(spans, tasks=[name, "_b"])).legends[0].get_texts()]
    assert labels == ["<a & 'b'> ?? ü$x$ 雪", "_b"]


def test_run_of_nothing_is_drawn(tmp_path):
    timeline(report_of(makespan_s=0.0, devices=(), tasks=()), tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_an_ending_that_is_not_known_is_refused(tmp_path):
    with refused(says="'doc' supported"):
        timeline(report_of(), tmp_path / "run.doc")


def test_without_matplotlib_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with refused(ImportError, says="matplotlib 'hydra_engine[plot]' trace"):
        timeline(report_of(), tmp_path / "run.png")
