"""Lines of a log about a run, and numbers that are short."""

import math
import re

import pytest

from hydra_engine.progress import Doing, PlainLines, RunProgress, TaskProgress
from hydra_engine.texts import clock, number, rate


def task(name, steps, num_steps=10, doing=Doing.COMPUTING, **figures):
    return TaskProgress(name, doing, steps, num_steps, **figures)


def printed(capsys, show, *tasks):
    show(RunProgress(2.0, tasks, []))
    return capsys.readouterr().out.splitlines()


def test_a_line_has_every_figure_of_a_task_and_counts_those_that_it_leaves_out(capsys):
    full = task("a\nb", 4, loss=1.25, validation=2.0, batch="batch 8", steps_per_s=2.0)
    told = "a?b 4/10 loss 1.250 validation 2.000 batch 8 2.0/s 0:03 left"
    failed, paused = task("c", 3, None, Doing.FAILED), task("d" * 60, 1, None, Doing.PAUSED)
    lines = PlainLines()
    assert printed(capsys, lines.show, full, failed) == [f"   2.0 s  {told} | c 3 failed"]
    assert printed(capsys, lines.show, full, failed, paused) == [f"   2.0 s  {told} | c 3 failed | and 1 more"]
    short = task("a", 4, loss=1.25)
    told = "   2.0 s  a 4/10 loss 1.250 | and 2 more: 1 paused, 1 failed"
    assert printed(capsys, lines.show, short, paused._replace(batch="b" * 70), failed) == [told]


@pytest.mark.parametrize("num_tasks", [0, 1, 2, 9, 70])
@pytest.mark.parametrize("name", ["a", "学習率" * 30], ids=["short", "long"])
def test_a_line_has_at_most_100_characters_and_the_last_ones_have_all_tasks(capsys, num_tasks, name):
    figures = {"loss": 1.25, "validation": 2.5, "batch": "batch 4096", "steps_per_s": 2.0}
    tasks = [task(f"{k}{name}", 4, **figures) for k in range(num_tasks)]
    [line] = printed(capsys, PlainLines().show, *tasks)
    last = printed(capsys, PlainLines().close, *tasks)
    assert all(len(each) <= 100 for each in (line, *last))
    assert line.count(" 4/10") + int((re.findall(r"and (\d+) more", line) or [0])[0]) == num_tasks
    assert "".join(last).count(" 4/10") == num_tasks


def test_lines_become_rarer(capsys):
    lines, periods = PlainLines(), []
    for now_s in (0.0, 100.0, 200.0, 1000.0, 10_000.0):
        lines.show(RunProgress(now_s, [task("a", 1)], []))
        periods.append(lines.period_s)
    assert periods == [5.0, 5.0, 10.0, 50.0, 60.0]


def test_who_computes_comes_before_who_waits_and_who_is_over():
    rest = {"is_active": False}
    tasks = [task("a", 1, doing=Doing.FINISHED), task("b", 1, doing=Doing.DEVICE, **rest), task("c", 1)]
    tasks += [task("d", 1, doing=Doing.FAILED), task("e", 1, doing=Doing.DEVICE)]
    run = RunProgress(2.0, tasks, [])
    assert ["".join(each.name for each in run.first(most)) for most in (-1, 0, 2, 3, 9)] == [
        "",
        "",
        "ce",
        "ceb",
        "cebad",
    ]


def test_tasks_are_counted_by_what_they_do():
    doing = [Doing.BATCH, Doing.FINISHED, Doing.VALIDATING, Doing.COMPUTING, Doing.SETTING_UP, Doing.PAUSED]
    told = "2 computing, 2 waiting, 1 finished, 1 paused"
    assert RunProgress.counts([task("a", 0, doing=each) for each in doing]) == told


@pytest.mark.parametrize(
    ("shown", "value", "text"),
    [
        (number, None, "-"),
        (number, 1.25, "1.250"),
        (number, 123456.0, "1.235e+05"),
        (number, 1234.0, "1234"),
        (number, math.nan, "nan"),
        (rate, None, "-"),
        (rate, 123.4, "123/s"),
        (rate, 2.0, "2.0/s"),
        (rate, 0.5, "30.0/min"),
        (rate, 0.001, "3.6/h"),
        (clock, None, "-"),
        (clock, 59.6, "1:00"),
        (clock, 3600, "1:00h"),
        (clock, 100_000, "1.2d"),
    ],
)
def test_numbers_are_short(shown, value, text):
    assert shown(value) == text
