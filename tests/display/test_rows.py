"""The rows of the live display: what is in them, and that they fit."""

import io
import itertools
import re

from hydra_engine.display.progress import AtWork, DeviceProgress, Doing, History, RunProgress, TaskProgress, width
from hydra_engine.display.rows import LINES, PLAIN, Painter, as_html, rows, text
from hydra_engine.schedule import Unit
from tests.covering import covering


def run(now_s, num_tasks, num_devices=2, name="task-{}"):
    """A run in which even tasks compute and odd ones wait; the first has finished, the second has no length."""
    tasks = []
    for k in range(num_tasks):
        doing = Doing.FINISHED if k == 0 else Doing.COMPUTING if k % 2 == 0 else Doing.CALLBACKS
        steps = int(k * now_s) if k < 2 or doing is Doing.COMPUTING else 5
        num_steps = None if k == 1 else 400
        tasks.append(TaskProgress(name.format(k), doing, steps, num_steps, 1.0 + k, None if k % 3 else 0.5))
    devices = []
    for k in range(num_devices):
        at_work = AtWork.COMPUTES if k % 2 == 0 else AtWork.WEIGHTS
        unit = Unit(name.format(2), "fb", 3, 17)
        moved = (int(now_s * 12.5 * 2**30), int(now_s * 2**20))  # bytes loaded, and stored
        devices.append(DeviceProgress(f"cuda:{k}", at_work, unit, k * 2**28, 80 * 2**30, *moved, now_s * 0.87))
    return RunProgress(now_s, tasks, devices)


def shown(num_tasks, columns, lines, signs=LINES, **options):
    history = History()
    for now_s in (0.0, 10.0, 20.0):
        history.add(run(now_s, num_tasks, **options))
    return rows(run(20.0, num_tasks, **options), history, columns, lines, signs)


def test_two_tasks_and_two_devices_in_79_columns():
    assert text(shown(2, 79, 23)) == [
        "0:20  2 tasks: 1 waiting, 1 finished",
        "task                    %     loss      val     rate   left state",
        "task-0 ╌╌╌╌╌╌╌╌╌╌╌╌╌   0%    1.000   0.5000        -      - finished",
        "task-1 ╌╌╌╌╌╌╌╌╌╌╌╌╌   20    2.000        -    1.0/s      - waits for callbacks",
        "device runs                                   memory       load      store busy",
        "cuda:0 task-2.fb3@17                    0% of 80 GiB 12.5 GiB/s    1 MiB/s  87%",
        "cuda:1 waits for weights: task-2.fb3@17 0% of 80 GiB 12.5 GiB/s    1 MiB/s  87%",
    ]


def test_where_there_is_room_steps_and_words_are_whole():
    found = text(shown(5, 159, 23, signs=PLAIN))
    assert re.sub(" +", " ", found[1]) == "task steps % loss validation rate left state"
    assert re.sub("[ .]+", " ", found[4]) == "task-2 #### 40/400 10% 3 000 - 2 0/s 3:00 computing"
    assert "cuda:1  waits for weights: task-2.fb3@17" in found[-1]


def test_thirty_tasks_on_24_lines_are_those_that_compute_and_a_row_for_the_rest():
    found = text(shown(30, 79, 23))
    assert len(found) == 23
    assert found[0] == "0:20  30 tasks: 14 computing, 15 waiting, 1 finished  at least 3:00 left"
    assert found[19] == "and 13 more: 12 waiting, 1 finished"
    assert sum("computing" in row for row in found[1:]) == 14


def test_sixty_four_devices_leave_room_for_tasks():
    found = text(shown(30, 79, 23, num_devices=64))
    assert len(found) == 23
    assert found[-1] == "and 57 more: 57 at work"
    assert sum("computing" in row or "callbacks" in row for row in found[1:]) == 12


@covering(
    name=["task-{}", "a-task-of-a-long-name-{}", "学习" * 9 + "{}", "e\u0301" * 9 + "\n{}"],
    columns=[1, 5, 40, 79, 99, 100, 300],
    strength=1,
)
def test_rows_fit_whatever_the_names_and_the_window(name, columns):
    for number, lines in itertools.product((0, 1, 2, 6, 30), (1, 4, 10, 23)):
        found = shown(number, columns, lines, name=name)
        assert len(found) <= lines
        assert all(width("".join(each for each, _ in row)) <= columns for row in found)


def test_colours_are_those_of_the_terminal(monkeypatch):
    for name in ("NO_COLOR", "COLORTERM", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    row = [("a", "red"), (" ", "bold"), ("b", "")]
    assert Painter(io.StringIO()).ansi(row) == "\x1b[31ma\x1b[0m b"
    monkeypatch.setenv("NO_COLOR", "1")
    assert Painter(io.StringIO()).ansi(row) == "a b"


def test_html_shows_the_same_text():
    found = shown(2, 110, 60, name="<{}>")
    plain = re.sub("</?(pre|span)[^>]*>", "", as_html(found)).replace("&lt;", "<").replace("&gt;", ">")
    assert [row.rstrip() for row in plain.strip("\n").split("\n")] == text(found)
