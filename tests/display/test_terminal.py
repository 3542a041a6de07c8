"""The live display on a terminal, as an emulator shows it, with what others print above it."""

import os
import re
import signal
import sys
import threading
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from itertools import pairwise

import pytest

from hydra_engine.display import NotebookDisplay, TerminalDisplay, live, observer_of
from hydra_engine.progress import Doing, PlainLines, RunProgress, TaskProgress, usual_observer
from tests.screens import Child, Emulator, command, run_notebook


def run(*names, doing=Doing.COMPUTING):
    return RunProgress(2.0, [TaskProgress(name, doing, 3, 10, 1.25) for name in names], [])


class Pair:
    """A terminal: its stream, and an emulator that shows what was written there."""

    def __init__(self, encoding):
        self.reader, writer = os.openpty()
        os.set_blocking(self.reader, False)
        self.stream = os.fdopen(writer, "w", encoding=encoding, buffering=1)
        self.emulator = Emulator(60, 12)

    @property
    def rows(self):
        with suppress(BlockingIOError):
            while data := os.read(self.reader, 65_536):
                self.emulator.feed(data)
        return self.emulator.rows


@contextmanager
def opened(monkeypatch, encoding="utf-8"):
    """A terminal in the place of `sys.stdout`, and the display in it."""
    for name, value in {"TERM": "xterm", "COLUMNS": "60", "LINES": "12"}.items():
        monkeypatch.setenv(name, value)
    pair = Pair(encoding)
    with redirect_stdout(pair.stream), redirect_stderr(pair.stream):
        shown = TerminalDisplay(pair.stream)
        try:
            yield pair, shown
        finally:
            shown.leave()
    pair.stream.close()
    os.close(pair.reader)


def names_of(rows):
    """The names of tasks in the rows of a display, each of which begins with a head."""
    return [row.split()[0] for row in rows if "computing" in row and "tasks:" not in row and "task:" not in row]


def test_rows_are_written_over_and_prints_stay_above(monkeypatch):
    with opened(monkeypatch) as (pair, shown):
        for k in range(8):
            shown.show(run(*(f"task-{j}-{k}" for j in range(1 + k % 4))))
            print(f"first {k} [red]:smile: 'a' {'x' * 70}\n  second", k)
        rows = pair.rows
    first = next(k for k, row in enumerate(rows) if "tasks:" in row)
    whole = [[f"first {k} [red]:smile: 'a' {'x' * 70}"[:60], "x" * 34, f"  second {k}"] for k in range(8)]
    assert [row.strip("x") for row in rows[:first]] == [row.strip("x") for each in whole for row in each]
    assert names_of(rows) == [f"task-{j}-7" for j in range(4)]


def test_the_end_leaves_all_rows_what_was_begun_and_streams_as_they_were(monkeypatch):
    with opened(monkeypatch) as (pair, shown):
        shown.show(run("a"))
        assert sys.stdout is not pair.stream
        assert sys.stderr is not pair.stream
        print("begun", end="")
        shown.close(run(*map(str, range(20))))  # more than there is room for
        assert (sys.stdout, sys.stderr) == (pair.stream, pair.stream)
        print("after")
        rows = pair.rows
    assert rows[0] == "begun"
    assert names_of(rows) == [*map(str, range(20))]
    assert rows[-1] == "after"


def test_a_stderr_that_is_no_terminal_stays_what_it_is(monkeypatch):
    with opened(monkeypatch) as (pair, _), redirect_stderr(sys.__stdin__):
        shown = TerminalDisplay(pair.stream)
        shown.show(run("a"))
        assert sys.stderr is sys.__stdin__
        shown.close(run("a"))


def test_a_terminal_of_few_signs_is_shown_those(monkeypatch):
    with opened(monkeypatch, "ascii") as (pair, shown):
        shown.close(run("学"))
        assert any(row.split()[:2] == ["?", "30%"] for row in pair.rows)


def test_one_display_at_a_time_has_the_terminal(monkeypatch):
    with opened(monkeypatch) as (pair, shown):
        assert isinstance(usual_observer(), TerminalDisplay)
        shown.show(run("a"))
        assert isinstance(usual_observer(), PlainLines)
        monkeypatch.setenv("TERM", "dumb")
        assert observer_of(pair.stream) is None
        shown.close(run("a"))


def test_in_a_kernel_the_cell_is_drawn(monkeypatch):
    pytest.importorskip("IPython")
    monkeypatch.setattr("IPython.get_ipython", lambda: type("Shell", (), {"kernel": None})())
    assert isinstance(usual_observer(), NotebookDisplay)


def test_a_forked_process_has_the_streams_as_they_were(monkeypatch):
    with opened(monkeypatch) as (pair, shown):
        shown.show(run("a"))
        live.put_back()  # as it is called there: locks of rich may be held for ever
        assert (sys.stdout, sys.stderr) == (pair.stream, pair.stream)


@pytest.mark.rest
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_that_is_forked_while_the_terminal_is_stopped_prints_once_it_goes_on(monkeypatch):
    with opened(monkeypatch) as (pair, shown):
        shown.show(run("a"))
        thread = threading.Thread(target=print, args=("x" * 500_000,), daemon=True)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()  # in its write: nobody reads
        child = os.fork()
        if child == 0:
            try:
                print("printed by the child", flush=True)
            finally:
                os._exit(0)
        taken = b""
        deadline_s = time.monotonic() + 20
        while time.monotonic() < deadline_s and (b"by the child" not in taken or thread.is_alive()):
            with suppress(BlockingIOError):
                taken += os.read(pair.reader, 65_536)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert b"printed by the child" in taken
        assert taken.count(b"x") == 500_000


# -- whole runs, in processes of their own


@pytest.mark.rest
@pytest.mark.parametrize(("num_tasks", "columns"), [(6, 160), (30, 80)])
def test_a_run_leaves_no_row_behind(num_tasks, columns):
    child = Child(command(num_tasks, 60 if num_tasks < 30 else 6, prints=True), columns)
    screens = []
    while child.read(0.02):
        if child.is_quiet:  # else it may be in the middle of a picture
            screens.append(child.emulator.rows)
    assert child.finish() == 0, child.emulator.rows
    rows = child.emulator.rows
    head = next(k for k, row in enumerate(rows) if re.match(r"\d:\d\d ", row))
    assert rows[head].endswith(f" {num_tasks} tasks: {num_tasks} finished")
    # What was printed is whole, in pairs of lines, and followed by the last picture alone.
    printed = rows[:head]
    assert len(printed) == 4 * num_tasks
    assert all(": epoch " in a and b.startswith("  its loss is ") for a, b in list(pairwise(printed))[::2])
    shown = rows[head + 2 : head + 2 + num_tasks]
    assert all(row.split()[0].endswith(f"-{k}") and row.endswith("finished") for k, row in enumerate(shown))
    assert len(rows) == head + 2 + num_tasks + 3
    # While it trained: each screen has one picture, and all of it.
    live_rows = [rows for rows in screens if any(" tasks: " in row for row in rows)]
    assert len(live_rows) > 3
    for rows in live_rows:
        assert sum(" tasks: " in row for row in rows) == 1
        assert sum(row.startswith("device ") for row in rows) == 1
        assert sum(row.startswith("emulated:") for row in rows) == 2


@pytest.mark.rest
def test_a_notebooks_cell_is_redrawn():
    outputs = run_notebook()
    [shown] = [each for each in outputs if each.output_type == "display_data"]  # a client keeps one for each display
    text = re.sub("\x1b\\[[0-9;]*m", "", shown.data["text/plain"]).splitlines()
    assert text[0].rstrip().endswith(" 4 tasks: 4 finished")
    assert [row.split()[0] for row in text[2:6]] == ["bert-large-0", "gpt2-1", "t5-small-2", "vit-b16-3"]
    assert "4 tasks: 4 finished" in shown.data["text/html"]
    assert [each for each in outputs if each.output_type == "error"] == []
