"""Lines for people, on stdout and stderr: a stream that takes none changes nothing of a run."""

from __future__ import annotations

import sys
import textwrap
from contextlib import suppress
from typing import TextIO

LINE = 100  # characters of a line of progress, at most: a log's reader may have no more
LEAST_REST = 10  # characters, with less of which a line ends before the rest


def say(text: str) -> None:
    """Print to stdout, if it takes that: it may be a closed pipe, on a full disk, of few signs, or not there at all."""
    _print(sys.stdout, text)


def say_progress(text: str, rest: str = "") -> None:
    """Print a line of progress; a text that is longer goes on in an indented one, a rest is cut."""
    *lines, last = textwrap.wrap(text, LINE, subsequent_indent="    ") or [""]
    room = LINE - len(last) - len(", ")
    if rest and room >= LEAST_REST:
        last += f", {textwrap.shorten(rest, room, placeholder='...')}"
    say("\n".join([*lines, last]))


def printable(text: str) -> str:
    """Return a text without what XML cannot hold, a font cannot show or a terminal obeys."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def plural(number: int, noun: str, ending: str = "s") -> str:
    """Return "1 task" or "2 tasks"; ending: that of several."""
    return f"{number} {noun}{'' if number == 1 else ending}"


def warn(text: str) -> None:
    """Print to stderr, likewise."""
    _print(sys.stderr, text)


def _print(stream: TextIO | None, text: str) -> None:
    if stream is None:
        return
    with suppress(Exception):  # whatever a stream of the user's own raises
        try:
            print(text, file=stream, flush=True)
        except UnicodeEncodeError:
            encoding = stream.encoding
            print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)
