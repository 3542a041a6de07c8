"""A picture as data: shapes in pixels, from the left and the top, in the order in which they are painted.

The same shapes become SVG, by text alone, and PNG, by matplotlib: what a test finds in one is in the other.
"""

from __future__ import annotations

import colorsys
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from typing import Any, NamedTuple

# Hues go round the circle by the golden angle, so that neighbours in the list never look alike.
GOLDEN_ANGLE = 137.508
SATURATION = 0.6
INK, FAINT, PAPER = "#333333", "#eeeeee", "#ffffff"
# PNG has this many pixels for one of a picture's, along each side: text is sharp on a screen of high resolution.
PNG_SCALE = 2
_INCH = 100  # pixels; any number would do
_POINTS = 72  # of an inch


class Box(NamedTuple):
    """A filled rectangle; `title` is its hover text, where the file has such."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    title: str = ""


class Line(NamedTuple):
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    stroke: str
    width: float = 1.0
    is_dashed: bool = False
    title: str = ""


class Area(NamedTuple):
    """A filled polygon."""

    points: tuple[tuple[float, float], ...]
    fill: str
    title: str = ""


class Words(NamedTuple):
    """A line of text, centred on `y`; anchor: "start", "middle" or "end" is at `x`; size in pixels."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    size: float = 11.0
    is_bold: bool = False


Shape = Box | Line | Area | Words


@dataclass(kw_only=True)
class Picture:
    """Shapes on a white ground."""

    width: float
    height: float
    shapes: list[Shape] = field(default_factory=list)

    def svg(self) -> str:
        """Return it as one `<svg>` element that refers to nothing else."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" font-family="sans-serif" fill="{INK}">'
        )
        ground = f'<rect width="100%" height="100%" fill="{PAPER}"/>'
        return "\n".join([head, ground, *map(_element, self.shapes), "</svg>"]) + "\n"


def colour(index: int, light: float) -> str:
    """Return the colour of the task of this index; light: 0 is black, 1 is white."""
    rgb = colorsys.hls_to_rgb(index * GOLDEN_ANGLE / 360 % 1, light, SATURATION)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def printable(text: str) -> str:
    """Return a text without what XML cannot hold, or a font cannot show."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def plural(number: int, noun: str, ending: str = "s") -> str:
    """Return "1 task" or "2 tasks"; ending: that of several."""
    return f"{number} {noun}{'' if number == 1 else ending}"


def _element(shape: Shape) -> str:
    if isinstance(shape, Words):
        bold = ' font-weight="bold"' if shape.is_bold else ""
        where = f'x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size:g}" text-anchor="{shape.anchor}"'
        return f'<text {where} dominant-baseline="central"{bold}>{escape(printable(shape.text), quote=False)}</text>'
    title = f"<title>{escape(printable(shape.title), quote=False)}</title>" if shape.title else ""
    if isinstance(shape, Box):
        # Four decimals: the smallest boxes of a long run are narrower than a hundredth of a pixel.
        size = f'width="{shape.width:.4f}" height="{shape.height:.4f}"'
        return f'<rect x="{shape.x:.4f}" y="{shape.y:.4f}" {size} fill="{shape.fill}">{title}</rect>'
    points = " ".join(f"{x:.2f},{y:.2f}" for x, y in shape.points)
    if isinstance(shape, Area):
        return f'<polygon points="{points}" fill="{shape.fill}">{title}</polygon>'
    dashes = ' stroke-dasharray="4 3"' if shape.is_dashed else ""
    stroke = f'fill="none" stroke="{shape.stroke}" stroke-width="{shape.width:g}"{dashes}'
    return f'<polyline points="{points}" {stroke}>{title}</polyline>'


def write_png(picture: Picture, path: str | os.PathLike[str]) -> None:
    """Write a picture as PNG. Raises ImportError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Report.plot: a PNG is drawn by matplotlib, which is not installed; install it (pip install "
            "'hydra_engine[plot]'), or write .svg or .html, which need nothing"
        ) from error
    # Not pyplot: it would keep the figure, and choose a window for it.
    figure = Figure(figsize=(picture.width / _INCH, picture.height / _INCH), dpi=_INCH * PNG_SCALE)
    axes: Any = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    for order, artist in enumerate(_artists(picture, axes)):
        artist.set_zorder(order)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a task's name may have signs that the font lacks
        FigureCanvasAgg(figure).print_png(os.fspath(path))


def _artists(picture: Picture, axes: Any) -> Iterator[Any]:
    """Add the shapes to matplotlib's axes, all boxes in a row as one artist."""
    from matplotlib.collections import PolyCollection

    for kind, run in groupby(picture.shapes, type):
        shapes: list[Any] = list(run)
        if kind in (Box, Area):
            outlines = [_corners(each) if kind is Box else each.points for each in shapes]
            fills = [each.fill for each in shapes]
            yield axes.add_collection(PolyCollection(outlines, facecolors=fills, linewidths=0), autolim=False)
        for each in shapes if kind is Line else ():
            x, y = zip(*each.points, strict=True)
            style = (0, (4, 3)) if each.is_dashed else "solid"
            width = each.width * _POINTS / _INCH
            yield axes.plot(x, y, color=each.stroke, linewidth=width, linestyle=style, scalex=False, scaley=False)[0]
        for each in shapes if kind is Words else ():
            yield axes.text(
                each.x,
                each.y,
                printable(each.text),
                fontsize=each.size * _POINTS / _INCH,
                horizontalalignment={"start": "left", "middle": "center", "end": "right"}[each.anchor],
                verticalalignment="center_baseline",
                fontweight="bold" if each.is_bold else "normal",
                color=INK,
                parse_math=False,
            )


def _corners(box: Box) -> list[tuple[float, float]]:
    right, bottom = box.x + box.width, box.y + box.height
    return [(box.x, box.y), (right, box.y), (right, bottom), (box.x, bottom)]
