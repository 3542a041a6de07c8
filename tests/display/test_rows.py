"""The rows of the live display: what is in them, and that they fit."""

import io
import itertools
import re

from rich.cells import cell_len
from rich.console import Console

from hydra_engine.display.rows import Rows
from hydra_engine.progress import AtWork, DeviceProgress, Doing, RunProgress, TaskProgress
from hydra_engine.schedule import Unit
from tests.covering import covering


def run(num_tasks, num_devices=2, name="task-{}"):
    """A run in which even tasks compute and odd ones wait; the first has finished, the second has no length."""
    tasks = []
    for k in range(num_tasks):
        doing = Doing.FINISHED if k == 0 else Doing.COMPUTING if k % 2 == 0 else Doing.CALLBACKS
        num_steps, rate = None if k == 1 else 400, 2.0 if doing is Doing.COMPUTING or k == 1 else None
        figures = (1.0 + k, None if k % 3 else 0.5, "", rate, doing is Doing.COMPUTING)
        tasks.append(TaskProgress(name.format(k), doing, 20 * k, num_steps, *figures))
    devices = []
    for k in range(num_devices):
        at_work, unit = AtWork.COMPUTES if k % 2 == 0 else AtWork.WEIGHTS, Unit(name.format(2), "fb", 3, 17)
        moved = (5, 5, 1.0, 12.5 * 2**30, 2.0**20, 0.87)
        devices.append(DeviceProgress(f"cuda:{k}", at_work, unit, k * 2**28, 80 * 2**30, *moved))
    return RunProgress(20.0, tasks, devices)


def shown(columns, lines, *args, **options):
    """The rows as text."""
    console = Console(file=io.StringIO(), width=columns, color_system=None)
    console.print(Rows(run(*args, **options), lines))
    return [row.rstrip() for row in console.file.getvalue().splitlines()]


def test_two_tasks_and_two_devices_in_80_columns():
    found = [re.sub(" +", " ", row) for row in shown(80, 23, 2)]
    assert found == [
        "0:20 2 tasks: 1 waiting, 1 finished",
        "task % loss val rate left state",
        "task-0 0% 1.000 0.5000 - - finished",
        "task-1 20 2.000 - 2.0/s - waits for callbacks",
        "device runs memory load store busy",
        "cuda:0 task-2.fb3@17 0% of 80 GiB 12.5 GiB/s 1 MiB/s 87%",
        "cuda:1 waits for weights: task-2.fb3@17 0% of 80 GiB 12.5 GiB/s 1 MiB/s 87%",
    ]


def test_where_there_is_room_steps_are_shown_and_where_there_is_little_what_matters():
    wide, narrow = shown(160, 23, 5), shown(45, 23, 5)
    assert wide[1].split() == ["task", "steps", "%", "loss", "val", "rate", "left", "state"]
    assert wide[4].split()[2:] == ["40/400", "10%", "3.000", "-", "2.0/s", "3:00", "computing"]
    assert narrow[1].split() == ["task", "%", "loss", "state"]
    assert narrow[4].split() == ["task-2", "10%", "3.000", "computing"]


def test_thirty_tasks_on_24_lines_are_those_that_compute_and_a_row_for_the_rest():
    found = shown(80, 23, 30)
    assert len(found) == 23
    assert found[0] == "0:20  30 tasks: 14 computing, 15 waiting, 1 finished  at least 3:00 left"
    assert found[19] == "and 13 more: 12 waiting, 1 finished"
    assert sum("computing" in row for row in found[1:]) == 14


def test_sixty_four_devices_leave_room_for_tasks():
    found = shown(80, 23, 30, num_devices=64)
    assert len(found) == 23
    assert found[-1] == "and 57 more: 57 at work"
    assert sum("computing" in row or "callbacks" in row for row in found[1:]) == 12
    assert len(shown(80, None, 3, num_devices=64)) == 1 + 4 + 65


@covering(
    name=["task-{}", "a-task-of-a-long-name-{}", "学习" * 9 + "{}", "e\u0301" * 9 + "\n{}", "[red]\x1b[31m{}"],
    columns=[5, 40, 79, 99, 100, 300],
    strength=1,
)
def test_rows_fit_whatever_the_names_and_the_window(name, columns):
    for number, lines in itertools.product((0, 1, 2, 30), (10, 23)):
        found = shown(columns, lines, number, name=name)
        assert len(found) <= lines
        assert all(cell_len(row) <= columns for row in found)
