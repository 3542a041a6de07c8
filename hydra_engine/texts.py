"""Numbers, tables and lines for people; a stream that takes no lines changes nothing of a run."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

__all__ = ["LINE", "clock", "duration", "number", "plural", "printable", "rate", "say", "table", "warn"]

LINE = 100  # characters of a line of progress, at most: a log's reader may have no more


def say(text: str) -> None:
    """Print to stdout, if it takes that: it may be a closed pipe, on a full disk, of few signs, or not there at all."""
    _print(sys.stdout, text)


def printable(text: str) -> str:
    """Return a text without what XML cannot hold, a font cannot show or a terminal obeys."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def plural(number: int, noun: str, ending: str = "s") -> str:
    """Return "1 task" or "2 tasks"; ending: that of several."""
    return f"{number} {noun}{'' if number == 1 else ending}"


def warn(text: str) -> None:
    """Print to stderr, likewise."""
    _print(sys.stderr, text)


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of text as lines with aligned columns; the first row is the head. What does not print is a question mark."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def duration(seconds: float) -> str:
    """Return seconds in the unit that suits them."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return "0 s"  # also what is left of a difference between equal sums


def number(value: float | None) -> str:
    """A loss, with four digits."""
    return "-" if value is None else f"{value:#.4g}".rstrip(".")


def rate(per_s: float | None) -> str:
    """Steps per second, minute or hour; one of them at least where that can be."""
    if not per_s:
        return "-"
    factor, unit = (1, "s") if per_s >= 1 else (60, "min") if per_s * 60 >= 1 else (3600, "h")
    value = per_s * factor
    return f"{value:.1f}/{unit}" if value < 100 else f"{value:.0f}/{unit}"


def clock(seconds: float | None) -> str:
    """Seconds as "0:59", "59:59", "23:59h" or "99d"."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02}"
    return f"{whole // 3600}:{whole % 3600 // 60:02}h" if whole < 86_400 else f"{whole / 86_400:.1f}d"


def _print(stream: TextIO | None, text: str) -> None:
    if stream is None:
        return
    with suppress(Exception):  # whatever a stream of the user's own raises
        try:
            print(text, file=stream, flush=True)
        except UnicodeEncodeError:
            encoding = stream.encoding
            print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)
