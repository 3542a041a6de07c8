"""Live progress."""

import io
import os
import shutil
import unicodedata

import pytest

from hydra_engine.display.progress import ProgressLine, TaskProgress, cut

TASKS = [TaskProgress("a", 3, 10, 1.25), TaskProgress("b", 0, None, None)]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_silent_when_not_verbose():
    stream = io.StringIO()
    progress = ProgressLine(0, stream)
    progress.show(TASKS, 0.0)
    progress.close(TASKS, 1.0)
    assert stream.getvalue() == ""


def test_log_has_a_line_every_five_seconds_and_one_at_the_end():
    stream = io.StringIO()
    progress = ProgressLine(1, stream)
    for now_s in (0.0, 4.9, 5.0, 9.9):
        progress.show(TASKS, now_s)
    progress.close(TASKS, 9.95)
    tasks = "a 3/10 1.250 | b 0"
    assert stream.getvalue() == f"   0.0 s  {tasks}\n   5.0 s  {tasks}\n   9.9 s  {tasks}\n"


def test_terminal_line_is_written_over():
    stream = Terminal()
    progress = ProgressLine(1, stream)
    progress.show(TASKS, 0.0)
    progress.show(TASKS, 0.1)
    progress.close(TASKS, 2.0)
    line = "a 3/10 1.250 | b 0"
    assert stream.getvalue() == f"\r\x1b[2K   0.0 s  {line}\r\x1b[2K   2.0 s  {line}\n"


def rows_of(text, columns):
    """A terminal's screen, row by row, after this was written to it: a row that is full goes on in the next one."""
    rows, column = [""], 0
    text = text.replace("\x1b[2K", "\0")
    for sign in text:
        if sign == "\r":
            column = 0
        elif sign == "\0":
            rows[-1] = ""
        elif sign == "\n":
            rows.append("")
            column = 0
        else:
            width = 0 if unicodedata.combining(sign) else 1 + (unicodedata.east_asian_width(sign) in "WF")
            if column + width > columns:
                rows.append("")
                column = 0
            rows[-1] += sign
            column += width
    return rows


def resize(monkeypatch, columns):
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_, **__: os.terminal_size((columns, 24)))


MANY = [TaskProgress(f"a-task-of-a-long-name-{k}", 123 * k, 10_000, 1.25) for k in range(6)]
WIDE = [TaskProgress("学习" * k, k, None, 0.5) for k in range(6)]
ACCENTS = [TaskProgress("e\u0301\u0302" * 9, 3, None, 0.5)] * 3


@pytest.mark.parametrize("columns", [80, 20, 5])
@pytest.mark.parametrize("tasks", [MANY, WIDE, ACCENTS, TASKS], ids=["many", "wide", "accents", "few"])
def test_a_terminal_has_one_row_of_it_however_narrow_it_is(monkeypatch, tasks, columns):
    resize(monkeypatch, columns)
    stream = Terminal()
    progress = ProgressLine(1, stream)
    for k in range(20):
        progress.show(tasks, float(k))
    progress.close(tasks, 20.0)
    rows = rows_of(stream.getvalue(), columns)
    assert len(rows) == 2  # with the one that the cursor is in
    assert rows[0].startswith("  20.0"[: columns - 4])


def test_the_width_is_asked_for_at_each_line(monkeypatch):
    stream = Terminal()
    progress = ProgressLine(1, stream)
    lengths = []
    for k, columns in enumerate((80, 20, 50)):
        resize(monkeypatch, columns)
        progress.show(MANY, float(k))
        lengths.append(len(stream.getvalue().rpartition("\x1b[2K")[2]))
    assert lengths == [79, 19, 49]


def test_the_streams_own_terminal_comes_first(monkeypatch):
    controller, terminal = os.openpty()
    with open(terminal, "w", closefd=False) as stream:
        monkeypatch.setenv("COLUMNS", "500")
        monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((30 if fd == terminal else 70, 24)))
        ProgressLine(1, stream).show(MANY, 0.0)
    shown = os.read(controller, 1000).decode()
    os.close(controller)
    os.close(terminal)
    assert len(shown.rpartition("\x1b[2K")[2]) == 29


def test_without_a_terminal_lines_are_whole(monkeypatch):
    resize(monkeypatch, 20)
    stream = io.StringIO()
    ProgressLine(1, stream).show(MANY, 0.0)
    assert all(task.name in stream.getvalue() for task in MANY)


@pytest.mark.parametrize(
    ("line", "columns", "shown"),
    [
        ("abc", 3, "abc"),
        ("abcdef", 5, "ab..."),
        ("学习", 4, "学习"),
        ("学习学习", 7, "学习..."),
        ("学习学习", 6, "学..."),
        ("abc", 0, ""),
        ("abc", 2, ".."),
        ("a\nb\x1b[2J", 20, "a?b?[2J"),
    ],
)
def test_a_line_is_cut_to_columns(line, columns, shown):
    assert cut(line, columns) == shown
