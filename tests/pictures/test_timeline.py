"""The timeline: rows whose filled area is the time that lanes worked, memory below its budget, losses."""

import math
import re
import struct
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from hydra_engine.pictures import Curve, DeviceBudget, RunFigures, draw_timeline, html_page, html_table, write_png
from hydra_engine.pictures import timeline as timeline_module
from hydra_engine.pictures.picture import Area, Box, Line, Words, colour
from hydra_engine.pictures.timeline import LEFT, RIGHT, ticks
from hydra_engine.trace import MemoryUse, Span
from tests.refused import refused

WIDTH = LEFT + RIGHT + 1000


def figures(spans, *, makespan_s=10.0, devices=("cpu:0",), **options):
    budgets = [DeviceBudget(name, 100, 60) for name in devices]
    return RunFigures(makespan_s=makespan_s, devices=budgets, tasks=["a", "b"], spans=spans, **options)


def boxes_of(picture, what):
    return [each for each in picture.shapes if isinstance(each, Box) and what in each.title]


def filled(boxes, height):
    """The share of a row that boxes fill, of a row of 1000 pixels."""
    return sum(box.width * box.height for box in boxes) / (1000 * height)


def words(picture):
    return [each.text for each in picture.shapes if isinstance(each, Words)]


def test_span_is_a_box_at_its_time_in_its_tasks_colour():
    spans = [Span("cpu:0", "compute", "a.f0@0", 2.0, 4.0), Span("cpu:0", "compute", "b.b0@3", 4.0, 5.0)]
    a, b = boxes_of(draw_timeline(figures(spans), width=WIDTH), "compute on cpu:0")
    assert (a.x, a.width, a.fill) == (LEFT + 200, 200, colour(0, 0.70))
    assert (b.x, b.width, b.fill) == (LEFT + 400, 100, colour(1, 0.45))
    assert a.title == "a.f0@0: compute on cpu:0, 2 to 4 s (2 s)"


def test_spans_narrower_than_a_pixel_share_a_box_by_the_time_of_their_tasks():
    # Within one pixel of 0.01 s: a works 0.003 s, b 0.001 s.
    spans = [
        Span("cpu:0", "compute", "a.f0@0", 1.000, 1.002),
        Span("cpu:0", "compute", "b.f0@0", 1.004, 1.005),
        Span("cpu:0", "compute", "a.f0@1", 1.007, 1.008),
    ]
    a, b = boxes_of(draw_timeline(figures(spans), width=WIDTH), "compute on cpu:0")
    assert a.width == b.width == pytest.approx(0.8)
    assert (a.height, b.height) == (pytest.approx(25 * 3 / 8), pytest.approx(25 / 8))
    assert a.y == pytest.approx(b.y + b.height)
    assert a.title == "a: 3 ms of compute on cpu:0, 3 jobs from 1 to 1.008 s"


@pytest.mark.parametrize("most_boxes", [20_000, 50])
def test_filled_area_is_the_share_of_the_time_at_any_scale(most_boxes, monkeypatch):
    monkeypatch.setattr(timeline_module, "MOST_BOXES", most_boxes)
    spans = [Span("cpu:0", "compute", f"{'ab'[k % 2]}.f0@{k}", k / 100, k / 100 + 0.004) for k in range(1000)]
    picture = draw_timeline(figures(spans), width=WIDTH)
    boxes = boxes_of(picture, "compute on cpu:0")
    assert filled(boxes, 25) == pytest.approx(0.4)
    assert "40%" in words(picture)
    assert len(boxes) <= 2000 if most_boxes == 20_000 else len(boxes) <= 120


def test_jobs_of_a_lane_that_overlap_stand_one_above_the_other():
    spans = [Span("cpu:0", "load", "a.f0@0", 0.0, 4.0), Span("cpu:0", "load", "a.f0@0", 1.0, 2.0)]
    first, second = boxes_of(draw_timeline(figures(spans), width=WIDTH), "load on cpu:0")
    assert second.y == pytest.approx(first.y + first.height)


def test_a_part_of_the_run_is_drawn_and_its_share_told():
    spans = [Span("cpu:0", "compute", "a.f0@0", 0.0, 3.0), Span("cpu:0", "compute", "a.f0@1", 8.0, 9.0)]
    picture = draw_timeline(figures(spans), start_s=2.0, end_s=6.0, width=WIDTH)
    [box] = boxes_of(picture, "compute on cpu:0")
    assert (box.x, box.width) == (LEFT, 250)
    assert "25%" in words(picture)
    assert "2 tasks on 1 device, seconds 2 to 6 of 10" in words(picture)


def test_of_a_run_whose_first_spans_are_gone_the_rest_is_drawn():
    spans = [Span("cpu:0", "compute", "a.f0@0", 5.0, 6.0)]
    assert "2 tasks on 1 device, seconds 6 to 10 of 10" in words(draw_timeline(figures(spans, is_cut=True)))


@pytest.mark.parametrize(
    "window",
    [{"start_s": 10.0}, {"start_s": 3.0, "end_s": 3.0}, {"end_s": 0.0}, {"end_s": math.inf}, {"end_s": math.nan}],
)
def test_empty_window_is_refused(window):
    with refused(says="start_s: end_s"):
        draw_timeline(figures([]), **window)


def test_picture_without_room_is_refused():
    with refused(says="width: 300 400"):
        draw_timeline(figures([]), width=300)


def test_run_of_nothing_is_drawn():
    empty = RunFigures(makespan_s=0.0, devices=[], tasks=[], spans=[])
    assert draw_timeline(empty).svg()


def test_memory_stands_as_high_as_its_share_of_the_budget():
    uses = [MemoryUse("cpu:0", 0.0, 20), MemoryUse("cpu:0", 5.0, 60), MemoryUse("cpu:0", 5.001, 0)]
    picture = draw_timeline(figures([], memory=uses), width=WIDTH)
    [area] = [each for each in picture.shapes if isinstance(each, Area)]
    [peak] = [each for each in picture.shapes if isinstance(each, Line) and each.is_dashed]
    bottom = max(y for _, y in area.points)
    heights = {x: bottom - min(y for other, y in area.points if other == x) for x, _ in area.points}
    assert heights[LEFT] == heights[LEFT + 1] == pytest.approx(40 * 0.2)  # the row is 40 pixels
    assert heights[LEFT + 500] == pytest.approx(40 * 0.6)  # also where it lasted for less than a pixel
    assert bottom - peak.points[0][1] == pytest.approx(40 * 0.6)
    assert heights[LEFT + 1000] == 0
    assert "peak 60 B of 100 B" in words(picture)


def test_memory_that_is_not_known_any_more_is_white():
    picture = draw_timeline(figures([], memory=[MemoryUse("cpu:0", 4.0, 20)], is_memory_cut=True), width=WIDTH)
    [row] = [each for each in picture.shapes if isinstance(each, Box) and each.height == 40]
    assert (row.x, row.width) == (LEFT + 400, 600)


@pytest.mark.parametrize("number", [1, 5, 17, 64])
def test_every_device_has_its_rows_and_names_do_not_overlap(number):
    names = [f"cuda:{k}" for k in range(number)]
    spans = [Span(name, lane, "a.f0@0", 1.0, 2.0) for name in names for lane in ("compute", "load", "store")]
    picture = draw_timeline(figures(spans, devices=names))
    for name in names:
        assert len(boxes_of(picture, f" on {name},")) == 3
    ends = sorted((each.y, each.size) for each in picture.shapes if isinstance(each, Words) and each.anchor == "end")
    assert all(after[0] - before[0] >= before[1] for before, after in pairwise(ends))
    assert picture.height <= 2500


def test_losses_are_lines_that_leave_out_what_is_no_number():
    curves = [
        Curve("a", [1, 2, 3, 4], [4.0, math.nan, 3.0, math.inf]),
        Curve("a", [4], [2.0], is_validation=True),
        Curve("b", [], []),
    ]
    picture = draw_timeline(figures([], curves=curves))
    [line] = [each for each in picture.shapes if isinstance(each, Line) and "loss" in each.title]
    assert line.title == "a: loss 4 -> 3, lowest 3"
    assert len(line.points) == 2
    [dot] = boxes_of(picture, "validation loss")
    assert dot.title == "a: validation loss 2 -> 2, lowest 2"
    assert "Loss, by step; dashed: validation" in words(picture)


def test_losses_far_apart_are_on_a_logarithmic_axis_and_long_curves_keep_their_lowest():
    values = [100.0, *[10.0] * 5000, 0.1, *[10.0] * 5000]
    picture = draw_timeline(figures([], curves=[Curve("a", range(1, len(values) + 1), values)]))
    [line] = [each for each in picture.shapes if isinstance(each, Line) and "loss" in each.title]
    assert len(line.points) <= 400
    places = [y for _, y in line.points]
    assert max(places) - min(places) == pytest.approx(190 - 12)
    assert "Loss, logarithmic, by step; dashed: validation" in words(picture)


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0, 10, list(range(11))),
        (0, 7, list(range(8))),
        (2, 3, [2 + k / 10 for k in range(11)]),
        (0, 1000, None),
        (5, 5, None),
    ],
)
def test_ticks_are_round_numbers(low, high, found):
    marks = ticks(low, high)
    assert 1 <= len(marks) <= 11
    assert found is None or marks == pytest.approx(found)


def test_svg_is_xml_whatever_tasks_are_called():
    name = "<a & 'b'> \x00\ud800 ü$x$"
    spans = [Span("cpu:0", "compute", f"{name}.f0@0", 0.0, 1.0), Span("host", "again", f"{name}.f0@0", 2.0, 2.0)]
    given = RunFigures(makespan_s=3.0, devices=[], tasks=[name], spans=spans, curves=[Curve(name, [1, 2], [1.0, 2.0])])
    root = ET.fromstring(draw_timeline(given).svg())
    titles = [each.text for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "<a & 'b'> ?? ü$x$.f0@0: compute on cpu:0, 0 to 1 s (1 s)" in titles
    assert "a step began again at <a & 'b'> ?? ü$x$.f0@0, 2 s" in titles


@pytest.mark.rest
def test_png_has_the_pictures_shape_at_twice_its_pixels(tmp_path):
    pytest.importorskip("matplotlib")
    uses = [MemoryUse("cpu:0", 0.0, 20), MemoryUse("cpu:0", 5.0, 60)]
    spans = [Span("cpu:0", "compute", "雪 $x.f0@0", 0.0, 10.0)]
    picture = draw_timeline(figures(spans, memory=uses, curves=[Curve("a", [1, 2], [1.0, 2.0])]))
    write_png(picture, tmp_path / "run.png")
    content = (tmp_path / "run.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (2 * picture.width, 2 * picture.height)
    from matplotlib import image

    pixels = image.imread(tmp_path / "run.png")
    [box] = boxes_of(picture, "compute on cpu:0")
    red, green, blue = pixels[int(2 * (box.y + box.height / 2)), int(2 * (box.x + box.width / 3)), :3]
    assert f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}" == box.fill


def test_png_names_the_extra_that_draws_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match=r"hydra_engine\[plot\].*\.svg or \.html"):
        write_png(draw_timeline(figures([])), tmp_path / "run.png")


def test_page_escapes_and_refers_to_nothing():
    page = html_page("<run>", html_table([("a<b", "c"), ("1", "&2")]), html_table([("one",)], has_head=False))
    assert "<title>&lt;run&gt;</title>" in page
    assert "<tr><th>a&lt;b</th><th>c</th></tr>\n<tr><td>1</td><td>&amp;2</td></tr>" in page
    assert "<tr><td>one</td></tr>" in page
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script", page)
