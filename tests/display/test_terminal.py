"""Rows at the foot of a terminal, as an emulator shows them, with what others print above them."""

import io
import os
import re
import signal
import sys
import threading
import time
from contextlib import contextmanager, redirect_stdout, suppress
from itertools import pairwise
from unittest import mock

import pyte
import pytest

from hydra_engine.display import terminal as terminal_module
from hydra_engine.display.terminal import Terminal, can_redraw
from tests.screens import Child, Emulator, command

pytestmark = pytest.mark.rest


class Stream(io.StringIO):
    """A terminal's stream that goes to an emulator."""

    encoding = "utf-8"

    def __init__(self, columns=30, lines=10):
        super().__init__()
        self.emulator = Emulator(columns, lines)

    def write(self, text):
        self.emulator.feed(text.replace("\n", "\r\n"))  # as a terminal's driver does
        return len(text)

    def isatty(self):
        return True


@contextmanager
def opened():
    """A stream in the place of `sys.stdout`, and the display in its terminal; a picture follows each print."""
    stream = Stream()
    with redirect_stdout(stream), mock.patch.object(terminal_module, "PRINTS_S", -1.0):
        terminal = Terminal(stream)
        terminal.open()
        try:
            yield stream, terminal
        finally:
            terminal.close()


@pytest.mark.net
def test_rows_are_written_over():
    with opened() as (stream, shown):
        for k in range(20):
            shown.show([f"row {j} at {k}" for j in range(1 + k % 5)])
        assert stream.emulator.rows == ["", *(f"row {j} at 19" for j in range(5))]
        shown.show(["less"])
        assert stream.emulator.rows == ["", "less"]


@pytest.mark.net
def test_prints_appear_above_and_stay():
    with opened() as (stream, shown):
        for k in range(12):
            shown.show([f"row {j} at {k}" for j in range(4)])
            print(f"first {k}\n  second", k)
        printed = [line for k in range(12) for line in (f"first {k}", f"  second {k}")]
        assert stream.emulator.rows == [*printed, "", *(f"row {j} at 11" for j in range(4))]


def test_many_prints_are_not_followed_by_a_picture_each(monkeypatch):
    with opened() as (stream, shown):
        monkeypatch.setattr(terminal_module, "PRINTS_S", 1e9)
        shown.show(["row"])
        for k in range(3):
            print(k)
        assert stream.emulator.rows == ["0", "1", "2"]
        shown.show(["row"])
        assert stream.emulator.rows == ["0", "1", "2", "", "row"]


@pytest.mark.net
def test_a_line_that_was_begun_appears_with_the_next_picture_and_goes_on():
    with opened() as (stream, shown):
        shown.show(["row"])
        print("working ...", end="")
        assert stream.emulator.rows == ["", "row"]
        shown.show(["row"])
        assert stream.emulator.rows == ["working ...", "row"]
        print(" done")
        assert stream.emulator.rows == ["working ... done", "", "row"]
        for k in range(3):  # a bar of progress
            print(f"\r{k} of 3", end="", flush=True)
            shown.show(["row"])
        assert stream.emulator.rows == ["working ... done", "2 of 3", "row"]


@pytest.mark.net
def test_lines_of_two_threads_do_not_mix():
    with opened() as (stream, shown):
        shown.show(["row"])
        print("begun ", end="")
        thread = threading.Thread(target=print, args=("whole",))
        thread.start()
        thread.join()
        print("and ended")
        assert stream.emulator.rows == ["whole", "begun and ended", "", "row"]


@pytest.mark.net
def test_what_passes_python_by_is_shown_too():
    with opened() as (stream, shown):
        shown.show(["row 0", "row 1"])
        stream.write("^C")  # as the terminal itself echoes it, and a signal's handler goes on
        stream.write("a message\n")
        shown.show(["row 0", "row 1"])
        assert stream.emulator.rows == ["^Ca message", "", "row 0", "row 1"]
        stream.write("\n")  # a key
        shown.show(["row"])
        assert stream.emulator.rows == ["^Ca message", "", "", "row"]


@pytest.mark.parametrize(("columns", "lines"), [(12, 10), (60, 4), (5, 3), (100, 40)])
def test_another_size_leaves_nothing_behind(columns, lines):
    with opened() as (stream, shown):
        stream.emulator.screen.resize(10, 30)
        print("above")
        shown.show(["row 0 of three", "row 1 of three", "row 2 of three"])
        stream.emulator.screen.resize(lines, columns)
        rows = [f"row {k} of three"[: columns - 1].rstrip() for k in range(min(2, lines - 1))]
        shown.show(rows)
        assert stream.emulator.rows[-len(rows) :] == rows
        assert sum("row" in row for row in stream.emulator.rows) == len(rows)


def test_a_row_that_is_wider_than_was_thought_takes_one_row():
    with opened() as (stream, shown):
        for _ in range(3):
            shown.show(["x" * 40, "next"])
        assert stream.emulator.rows == ["", "x" * 30, "next"]


@pytest.mark.net
def test_the_end_leaves_all_rows_the_cursor_below_and_streams_as_they_were():
    with opened() as (stream, shown):
        above = sys.stdout
        assert above is not stream
        print("begun", end="")
        shown.show(["row"])
        shown.finish([f"row {k}" for k in range(20)])  # more than there is room for
        shown.close()
        assert sys.stdout is stream
        print("after")
        above.write("by one who kept it\n")
        assert stream.emulator.rows == ["begun", *(f"row {k}" for k in range(20)), "after", "by one who kept it"]
        assert pyte.modes.DECAWM in stream.emulator.screen.mode


@pytest.mark.net
def test_a_forked_process_prints_as_ever():
    with opened() as (stream, shown):
        shown.show(["row"])
        shown._lock = mock.NonCallableMock()  # it may be held for ever there
        with mock.patch.object(os, "getpid", return_value=-1):
            sys.stdout.write("x")
            sys.stdout.flush()
        shown._lock = threading.RLock()
        assert stream.emulator.rows == ["x", "row"]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_that_is_forked_while_the_terminal_is_stopped_prints_once_it_goes_on():
    reader, writer = os.openpty()
    with os.fdopen(writer, "w", encoding="utf-8", buffering=1) as stream:
        shown = Terminal(stream)
        thread = threading.Thread(target=shown.show, args=(["x" * 1000] * 500,), daemon=True)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()  # in its write: nobody reads
        child = os.fork()
        if child == 0:
            try:
                print("printed by the child", file=stream, flush=True)
            finally:
                os._exit(0)
        taken = b""
        deadline_s = time.monotonic() + 20
        os.set_blocking(reader, False)
        while time.monotonic() < deadline_s and (b"by the child" not in taken or thread.is_alive()):
            with suppress(BlockingIOError):
                taken += os.read(reader, 65536)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert b"printed by the child" in taken
        assert taken.count(b"x") == 500_000
    os.close(reader)


def test_a_sign_that_the_terminal_lacks_raises_where_it_is_printed():
    reader, writer = os.openpty()
    with os.fdopen(writer, "w", encoding="ascii", buffering=1) as stream:
        shown = Terminal(stream)
        with pytest.raises(UnicodeEncodeError):
            shown.print(stream, "学")
        shown.print(stream, "a")
        shown.show(["row"])
        assert b"a" in os.read(reader, 1000)
    os.close(reader)


@pytest.mark.net
def test_one_display_at_a_time_has_the_terminal(monkeypatch):
    with opened() as (stream, _):
        monkeypatch.setenv("TERM", "xterm")
        assert can_redraw(stream)
        assert not can_redraw(sys.stdout)
        monkeypatch.setenv("TERM", "dumb")
        assert not can_redraw(stream)
        assert not can_redraw(io.StringIO())


# -- whole runs, in processes of their own


@pytest.mark.parametrize(("num_tasks", "columns"), [(2, 80), (6, 80), (30, 80), (2, 160), (6, 160), (30, 160)])
def test_a_run_leaves_no_row_behind(num_tasks, columns):
    child = Child(command(num_tasks, 60 if num_tasks < 30 else 6, prints=True), columns)
    screens = []
    while child.read(0.02):
        if child.is_quiet:  # else it may be in the middle of a picture
            screens.append(child.emulator.rows)
    assert child.finish() == 0, child.emulator.rows
    rows = child.emulator.rows
    head = next(k for k, row in enumerate(rows) if re.match(r"\d:\d\d ", row))
    told = f" {num_tasks} tasks: {num_tasks} finished"
    assert rows[head].endswith(told)
    # What was printed is whole, in pairs of lines, and followed by the last picture alone.
    printed = [row for row in rows[:head] if row]
    assert len(printed) == 4 * num_tasks
    assert all(": epoch " in a and b.startswith("  its loss is ") for a, b in list(pairwise(printed))[::2])
    shown = rows[head + 2 : head + 2 + num_tasks]
    assert all(row.split()[0].endswith(f"-{k}") and row.endswith("finished") for k, row in enumerate(shown))
    assert len(rows) == head + 2 + num_tasks + 3
    # While it trained: each screen has one picture, and all of it.
    live = [rows for rows in screens if any(" tasks: " in row for row in rows)]
    assert len(live) > 3
    for rows in live:
        assert sum(" tasks: " in row for row in rows) == 1
        assert sum(row.startswith("device ") for row in rows) == 1
        assert sum(row.startswith("emulated:") for row in rows) == 2


def test_a_terminal_without_line_signs_shows_others():
    child = Child(command(2, 30), 80, PYTHONIOENCODING="ascii")
    assert child.finish() == 0, child.emulator.rows
    assert any(row.startswith("bert-large-0 ####") for row in child.emulator.rows)
