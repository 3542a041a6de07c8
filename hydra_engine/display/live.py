"""Draws a run by rich: on a terminal, whose rows are written over, or in a notebook's cell."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO, cast

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.segment import SegmentLines

from hydra_engine import Observer, RunProgress
from hydra_engine.display.rows import Rows


def observer_of(stream: TextIO) -> Observer | None:
    """Return what draws on a stream, or in the notebook that it goes to; None: nothing can, or somebody draws there."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if hasattr(shell, "kernel"):
        return NotebookDisplay()
    is_taken = isinstance(stream, FileProxy)  # by another display of rich's
    can_redraw = stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    return TerminalDisplay(stream) if can_redraw and not is_taken else None


class TerminalDisplay(Observer):
    """Rows at the foot of a terminal. What others print appears above them."""

    period_s = 0.25

    def __init__(self, stream: TextIO) -> None:
        # Prints stay as they are: no markup, no colours of rich's own, no line broken at a word.
        options: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False, "soft_wrap": True}
        options |= {"force_terminal": True, "force_interactive": True, "force_jupyter": False}
        self._console = _Console(file=cast(TextIO, _Direct(stream)), **options)
        is_same = sys.stderr is not None and sys.stderr.isatty()  # else stderr is a file's, and stays it
        self._live = Live(console=self._console, auto_refresh=False, redirect_stderr=is_same)

    def show(self, run: RunProgress) -> None:
        """Write the rows over those before."""
        self._live.start()
        self._draw(Rows(run, self._console.height - 1), refresh=True)

    def close(self, run: RunProgress) -> None:
        """Leave all rows there, however many they are, and the streams as they were."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, FileProxy):
                stream.flush()  # a line that was begun
        self._live.start()
        self._draw(Rows(run), refresh=False)
        self._live.stop()

    def leave(self) -> None:
        """Put the streams back, though the terminal may be stopped."""
        put_back()

    def _draw(self, rows: Rows, *, refresh: bool) -> None:
        # Drawn once, and not with each line that somebody prints.
        self._live.update(SegmentLines(self._console.render_lines(rows, pad=False), new_lines=True), refresh=refresh)


class NotebookDisplay(Observer):
    """The output of the cell that began the run."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, run: RunProgress) -> None:
        """Draw the cell anew."""
        if self._handle is not None:
            self._handle.update(Rows(run))
        else:
            from IPython import display

            self._handle = display.display(Rows(run), display_id=True)


class _Console(Console):  # type: ignore[misc]
    """Leaves the cursor shown: a process that is killed would leave it hidden."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class _Direct:
    """Writes past a terminal's buffer, whose lock a process that is forked meanwhile would wait for in vain."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        stream.flush()

    def flush(self) -> None:
        pass

    def write(self, text: str) -> int:
        left = memoryview(text.encode(self._stream.encoding, "replace"))
        while left:
            left = left[os.write(self._stream.fileno(), left) :]
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def put_back() -> None:
    """Make `sys.stdout` and `sys.stderr` again what they were."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        setattr(sys, name, getattr(stream, "rich_proxied_file", stream))


# In a forked process, a loader's worker, say, locks of rich may be held for ever.
os.register_at_fork(after_in_child=put_back)
