"""Lines for people, on stdout and stderr: a stream that takes none changes nothing of a run."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TextIO


def say(text: str) -> None:
    """Print to stdout, if it takes that: it may be a closed pipe, on a full disk, of few signs, or not there at all."""
    _print(sys.stdout, text)


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
