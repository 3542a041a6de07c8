"""Shows how a run goes while it goes: a terminal's rows, a notebook's cell, or lines of a log. It only reads.

    the thread that decides             the display's thread
    look() -> RunProgress    <--------  asks for a look, every quarter of a second
                             -------->  draws what was seen, and writes it: a terminal that is stopped stops nobody

Drawing takes at most a hundredth of a core's time: where it takes longer than expected, it is done less often. Whatever
goes wrong with it ends the display, and nothing else.
"""

from __future__ import annotations

import codecs
import importlib.util
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from hydra_engine.display.progress import History, RunProgress, last_log_lines, log_line
from hydra_engine.display.rows import LINES, PLAIN, Painter, as_html, rows, text
from hydra_engine.display.terminal import Terminal, can_redraw
from hydra_engine.system import warn

# Seconds between two pictures, at least: on a terminal, in a notebook; between two lines of a log, first and later.
TERMINAL_S, NOTEBOOK_S, LOG_S, MOST_LOG_S = 0.25, 1.0, 5.0, 60.0
MOST_SHARE = 0.01  # of a core's time, for drawing
STUCK_S = 2.0  # to wait at the end for a terminal that takes nothing
NOTEBOOK_COLUMNS, NOTEBOOK_LINES = 100, 60

Job = Callable[[], None]


class Screen(ABC):
    """A place where a run is shown."""

    period_s: float  # between two pictures

    def open(self) -> None:  # noqa: B027  most have nothing to do
        """Begin; in the thread that decides, so it must not wait."""

    @abstractmethod
    def show(self, run: RunProgress, history: History) -> None:
        """Show how things stand."""

    def close(self, run: RunProgress, history: History) -> None:
        """Show how all has ended."""
        self.show(run, history)

    def leave(self) -> None:  # noqa: B027
        """Undo what `open` did; whatever has gone wrong, and in any thread."""


class TerminalScreen(Screen):
    """Rows that are written over."""

    period_s = TERMINAL_S

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = Terminal(stream)
        self._encoding = _encoding(stream, "ascii")
        self._signs = LINES if _shown("".join(LINES), self._encoding) == "".join(LINES) else PLAIN
        self._painter: Painter | None = None

    def open(self) -> None:
        self._terminal.open()

    def show(self, run: RunProgress, history: History) -> None:
        self._terminal.show(self._rows(run, history, *self._terminal.size))

    def close(self, run: RunProgress, history: History) -> None:
        self._terminal.finish(self._rows(run, history, self._terminal.size[0], sys.maxsize))  # all tasks

    def _rows(self, run: RunProgress, history: History, columns: int, lines: int) -> list[str]:
        self._painter = self._painter or Painter(self._stream)  # not before: rich takes a while to be imported
        found = rows(run, history, columns, lines, self._signs)
        return [_shown(self._painter.ansi(row), self._encoding) for row in found]

    def leave(self) -> None:
        self._terminal.close()


class NotebookScreen(Screen):
    """The output of the cell that began the run."""

    period_s = NOTEBOOK_S

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, run: RunProgress, history: History) -> None:
        found = rows(run, history, NOTEBOOK_COLUMNS, NOTEBOOK_LINES)
        data = {"text/html": as_html(found), "text/plain": "\n".join(text(found))}
        if self._handle is not None:
            self._handle.update(data, raw=True)
        else:
            from IPython import display

            show: Any = display.display
            self._handle = show(data, raw=True, display_id=True)


class LogScreen(Screen):
    """Lines, where nothing can be written over. They become rarer, to one in a minute."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._encoding = _encoding(stream, "utf-8")
        self.period_s = LOG_S

    def show(self, run: RunProgress, history: History) -> None:
        self.period_s = min(MOST_LOG_S, max(LOG_S, run.now_s / 20))
        self._print(log_line(run, history))

    def close(self, run: RunProgress, history: History) -> None:
        self._print(*last_log_lines(run, history))

    def _print(self, *lines: str) -> None:
        self._stream.write("".join(_shown(line, self._encoding) + "\n" for line in lines))
        self._stream.flush()


def screen_for(stream: TextIO) -> Screen:
    """Return the best screen that there is for a stream: without rich, or where nothing can be redrawn, lines."""
    if importlib.util.find_spec("rich") is None:
        return LogScreen(stream)
    if _in_notebook():
        return NotebookScreen()
    return TerminalScreen(stream) if can_redraw(stream) else LogScreen(stream)


def _in_notebook() -> bool:
    """Return True in a kernel whose frontend shows HTML: Jupyter's, or one like it."""
    found = sys.modules.get("IPython")
    shell = None if found is None else found.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def _encoding(stream: TextIO, otherwise: str) -> str:
    """Name the encoding of a stream; `otherwise`: of one that tells none that is known."""
    try:
        return codecs.lookup(stream.encoding).name
    except (AttributeError, LookupError, TypeError):
        return otherwise


def _shown(line: str, encoding: str) -> str:
    """Replace the characters of a line that a stream of this encoding cannot show."""
    return line.encode(encoding, "replace").decode(encoding)


class LiveDisplay:
    """The display of one run: a thread that draws what `look` tells. Silent with verbose=0."""

    def __init__(
        self, verbose: int, look: Callable[[], RunProgress], ask: Callable[[Job], None], stream: TextIO | None = None
    ) -> None:
        """`look`: tells how the run stands. ask: has a job, such as a look, done by the thread that may look."""
        self._look = look
        self._ask = ask
        stream = sys.stdout if stream is None else stream
        self._screen: Screen | None = None
        self._seen: RunProgress | None = None
        self._seen_s = 0.0  # when, by time.monotonic()
        self._is_new = threading.Event()  # what was seen was not drawn
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            # A process without a console has no stdout.
            self._screen = screen_for(stream) if verbose > 0 and stream is not None else None
        except Exception as error:
            self._give_up(error)

    def open(self) -> None:
        """Begin to show the run."""
        if self._screen is None:
            return
        try:
            self._screen.open()
        except Exception as error:
            self._give_up(error)
            return
        # A daemon: a process that ends must not wait for a terminal.
        self._thread = threading.Thread(target=self._draw, args=(self._screen,), name="hydra-display", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Show how the run has ended, join the thread, and refer to the run no more; in the thread that decides."""
        if self._screen is not None and self._thread is not None:
            self._take()
            self._is_over.set()
            self._thread.join(STUCK_S)
            self._leave()
        self._is_over.set()
        self._screen = self._thread = self._seen = None
        del self._look, self._ask

    def _take(self) -> None:
        """Look, in the thread that decides."""
        if self._is_over.is_set():
            return
        try:
            self._seen, self._seen_s = self._look(), time.monotonic()
        except Exception as error:
            self._give_up(error)
        self._is_new.set()

    def _draw(self, screen: Screen) -> None:
        history = History()
        try:
            while not self._is_over.is_set():
                self._is_new.clear()
                self._ask(self._take)
                # Who decides may be long at something: then the rows stay, and the time goes on.
                self._is_new.wait(screen.period_s)
                begun_s = time.thread_time()
                if self._seen is not None and not self._is_over.is_set():
                    run = self._seen._replace(now_s=self._seen.now_s + time.monotonic() - self._seen_s)
                    history.add(run)
                    screen.show(run, history)
                pause_s = max(screen.period_s, (time.thread_time() - begun_s) / MOST_SHARE)
                self._is_over.wait(pause_s)
            if self._seen is not None:
                history.add(self._seen)
                screen.close(self._seen, history)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Show nothing more."""
        self._is_over.set()
        self._leave()
        warn(f"hydra_engine: the display has ended, and training goes on: {type(error).__name__}: {error}")

    def _leave(self) -> None:
        if self._screen is not None:
            with suppress(Exception):  # the stream is the user's
                self._screen.leave()
