"""Rows at the foot of a terminal, written over and over, with what others print above them.

    $ python train.py
    what others printed
    _                        the cursor rests here, in an empty row: whatever is printed by whomever appears in it
    0:42  2 tasks: ...       rows of the display, rewritten from the cursor on
    bert  ━━━━━╌╌╌  61%

So nothing has to be known of where the rows are: after a line of a C library, a key of the user's or another size of
the window, they are written anew below the cursor, and what was there is erased. `sys.stdout` and `sys.stderr` are
replaced while it is open, since prints of several lines would run into the rows; what was printed reaches the stream as
it was.
"""

from __future__ import annotations

import io
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, TextIO

# https://invisible-island.net/xterm/ctlseqs/ctlseqs.html
_INDEX = "\x1bD"  # down one row in the same column; at the foot, scroll
_UP, _DOWN = "\x1b[{}A", "\x1b[B"
_SAVE, _RESTORE = "\x1b7", "\x1b8"  # the cursor
_WRAP_OFF, _WRAP_ON = "\x1b[?7l", "\x1b[?7h"
_ERASE_LINE, _ERASE_BELOW = "\x1b[K", "\x1b[J"  # from the cursor on

PRINTS_S = 0.05  # after a print the rows are written again at once, unless they just were


class Terminal:
    """The rows and the streams of one terminal. From any thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._descriptor = _descriptor(stream)
        self._lock = threading.RLock()  # a signal's handler may print while its thread does
        self._rows: list[str] = []
        self._is_drawn = False
        self._drawn_s = -math.inf  # when, by time.monotonic()
        self._partial: dict[tuple[int, TextIO], str] = {}  # lines that were begun, by thread
        self._process = os.getpid()
        self._replaced: dict[str, _Above] = {}

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows that there are for the display now: a terminal may be resized at any time."""
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):  # no terminal of the system's
            size = os.terminal_size((0, 0))
        given = shutil.get_terminal_size()
        return max(1, (size.columns or given.columns) - 1), max(1, (size.lines or given.lines) - 1)

    def open(self) -> None:
        """From now on let what others print appear above the rows."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and not isinstance(stream, _Above) and _is_same_terminal(stream, self._stream):
                self._replaced[name] = above = _Above(stream, self)
                setattr(sys, name, above)

    def show(self, rows: Sequence[str]) -> None:
        """Write these rows over those before."""
        with self._lock:
            self._rows = list(rows)
            self._let_out()
            self._draw()

    def print(self, stream: TextIO, text: str) -> int:
        """Print what somebody else wrote, above the rows, once it ends a line: prints of two threads do not mix.

        What ends none appears with the next picture, or as it is flushed.
        """
        if not text.endswith("\n") and isinstance(stream, io.TextIOWrapper):
            text.encode(stream.encoding, stream.errors or "strict")  # raises here, and not in the display's thread
        with self._lock:
            key = threading.get_ident(), stream
            self._partial[key] = self._partial.get(key, "") + text
            if text.endswith("\n"):
                self._put(*key)
                if time.monotonic() - self._drawn_s > PRINTS_S:  # else soon: many lines must not become slow
                    self._draw()
            return len(text)

    def flush(self, stream: TextIO) -> None:
        """Print what its thread has begun of a line."""
        with self._lock:
            self._put(threading.get_ident(), stream)
            stream.flush()

    def finish(self, rows: Sequence[str]) -> None:
        """Write the last picture, however long it is, and leave the cursor below it."""
        with self._lock:
            self._let_out()
            body = "".join(f"\r\n{row}{_ERASE_LINE}" for row in rows)
            self._write(f"{_ERASE_BELOW}{_WRAP_OFF}{body}\r\n{_ERASE_BELOW}{_WRAP_ON}")
            self._rows, self._is_drawn = [], False

    def close(self) -> None:
        """Leave the rows where they are, the cursor below them, and the streams as they were."""
        for name, above in self._replaced.items():
            above.is_open = False
            if getattr(sys, name) is above:
                setattr(sys, name, above.stream)
        if self._lock.acquire(timeout=0):  # else somebody is stuck in writing: a terminal that was stopped
            try:
                if self._rows:
                    self.finish(self._rows)
                self._let_out()
            except (OSError, ValueError):  # a terminal that is gone
                self._rows = []
            finally:
                self._lock.release()

    @property
    def is_elsewhere(self) -> bool:
        """True in a process that was forked from the one that opened it: a loader's worker."""
        return os.getpid() != self._process

    def _draw(self) -> None:
        rows, number = self._rows, len(self._rows)
        if not rows:
            return
        # First room for all of them, so that the saved place of the cursor stays right.
        room = f"{_ERASE_LINE}{_INDEX * number}{_UP.format(number)}"
        body = "".join(f"\r{_DOWN}{row}{_ERASE_LINE}" for row in rows)
        self._write(f"{room}{_SAVE}{_WRAP_OFF}{body}{_ERASE_BELOW}{_RESTORE}{_WRAP_ON}")
        self._is_drawn, self._drawn_s = True, time.monotonic()

    def _let_out(self) -> None:
        """Print what was begun of lines: of a progress bar, or a question."""
        for thread, stream in list(self._partial):
            self._put(thread, stream)

    def _put(self, thread: int, stream: TextIO) -> None:
        if text := self._partial.pop((thread, stream), ""):
            if self._is_drawn:
                self._write(_ERASE_BELOW)
                self._is_drawn = False
            stream.write(text)
            stream.flush()

    def _write(self, text: str) -> None:
        """Write rows; past the stream's buffer, whose lock a process that is forked meanwhile would wait for in vain.

        A terminal that is stopped keeps a write for as long as its user likes.
        """
        if self._descriptor is None:
            self._stream.write(text)
            self._stream.flush()
            return
        self._stream.flush()  # what others have begun stands before
        left = memoryview(text.encode(self._stream.encoding, "replace"))
        while left:
            left = left[os.write(self._descriptor, left) :]


class _Above:
    """Stands for `sys.stdout` or `sys.stderr`: what is written appears above a terminal's rows."""

    def __init__(self, stream: TextIO, terminal: Terminal) -> None:
        self.stream = stream
        self.is_open = True
        self._terminal = terminal

    def write(self, text: str) -> int:
        # In a forked process the lock may be held for ever.
        if not self.is_open or self._terminal.is_elsewhere:
            return self.stream.write(text)
        return self._terminal.print(self.stream, text)

    def flush(self) -> None:
        if not self.is_open or self._terminal.is_elsewhere:
            self.stream.flush()
        else:
            self._terminal.flush(self.stream)

    def writelines(self, lines: Sequence[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _descriptor(stream: TextIO) -> int | None:
    """Return the file descriptor of a terminal of the system's; None of any other stream."""
    try:
        descriptor = stream.fileno()
        return descriptor if os.isatty(descriptor) else None
    except (AttributeError, OSError, ValueError):
        return None


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # closed, or no file
        return False


def _is_same_terminal(stream: TextIO, other: TextIO) -> bool:
    if stream is other or not _is_terminal(stream):
        return stream is other
    try:
        return os.fstat(stream.fileno()).st_rdev == os.fstat(other.fileno()).st_rdev
    except (OSError, ValueError):
        return False


def can_redraw(stream: TextIO) -> bool:
    """Return True if rows of a stream can be written over, and nobody else does that."""
    is_taken = isinstance(stream, _Above) and stream.is_open
    return _is_terminal(stream) and not is_taken and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
