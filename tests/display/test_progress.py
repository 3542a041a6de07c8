"""What follows from several looks at a run, in numbers and in lines of a log."""

import math
import re

import pytest

from hydra_engine.display.progress import (
    AtWork,
    DeviceProgress,
    Doing,
    History,
    RunProgress,
    TaskProgress,
    bytes_rate,
    counted,
    cut,
    duration,
    last_log_lines,
    log_line,
    number,
    rate,
    width,
)


def task(name, steps, num_steps=10, doing=Doing.COMPUTING, **figures):
    return TaskProgress(name, doing, steps, num_steps, **figures)


def seen(*looks):
    """The history of looks, each of (seconds, tasks)."""
    history = History()
    for now_s, tasks in looks:
        history.add(RunProgress(now_s, tasks, []))
    return history


def test_rate_and_time_left_are_those_of_the_steps_that_were_seen():
    history = seen((1.0, [task("a", 0)]), (2.0, [task("a", 2)]), (3.0, [task("a", 4)]))
    assert history.steps_per_s(task("a", 4)) == 2.0
    assert history.left_s(task("a", 4)) == 3.0
    assert history.left_s(task("a", 4, None)) is None


def test_a_rate_sinks_while_a_step_is_overdue():
    history = seen((0.0, [task("a", 0)]), (1.0, [task("a", 1)]), (9.0, [task("a", 1)]))
    assert history.steps_per_s(task("a", 1)) == 2 / 9


def test_nothing_is_said_of_one_step_nor_of_a_task_that_is_over_or_began_again():
    assert seen((0.0, [task("a", 1)])).steps_per_s(task("a", 1)) is None
    over = task("a", 2, doing=Doing.PAUSED)
    assert seen((0.0, [task("a", 1)]), (1.0, [over])).left_s(over) is None
    assert seen((0.0, [task("a", 5)]), (1.0, [task("a", 0)])).steps_per_s(task("a", 0)) is None


def test_steps_of_long_ago_do_not_count():
    looks = [(float(k), [task("a", 100 * min(k, 10) + k)]) for k in range(100)]
    assert seen(*looks).steps_per_s(task("a", 1099, 10**6)) == 1.0


def device(loaded, stored, busy_s):
    return DeviceProgress("cpu:0", AtWork.IDLE, None, 0, 100, loaded, stored, busy_s)


def test_links_rates_are_those_of_the_last_seconds_and_at_the_end_of_the_whole_run():
    history = History()
    for k in range(11):
        history.add(RunProgress(float(k), [task("a", k)], [device(100 * k, 50 * k, 0.5 * k)]))
    assert history.link(device(1000, 500, 5.0)) == (100.0, 50.0, 0.5)
    history.add(RunProgress(20.0, [task("a", 10, doing=Doing.FINISHED)], [device(1000, 500, 5.0)]))
    assert history.link(device(1000, 500, 5.0)) == (50.0, 25.0, 0.25)


def names(tasks):
    return "".join(each.name for each in tasks)


def test_who_computes_has_a_row_before_who_waits_and_who_is_over_and_keeps_it():
    history = History()
    doing = {"a": Doing.FINISHED, "b": Doing.DEVICE, "c": Doing.COMPUTING, "d": Doing.FAILED, "e": Doing.COMPUTING}
    tasks = [task(name, 1, doing=each) for name, each in doing.items()]
    history.add(RunProgress(0.0, tasks, []))
    assert [names(history.chosen(tasks, most)) for most in (1, 2, 3, 4, 5)] == ["c", "ce", "bce", "bcde", "abcde"]
    history.chosen(tasks, 2)
    tasks[1:3] = [each._replace(doing=Doing.COMPUTING if each.name == "b" else Doing.DEVICE) for each in tasks[1:3]]
    history.add(RunProgress(5.0, tasks, []))
    assert names(history.chosen(tasks, 2)) == "ce"  # both have computed a moment ago
    history.add(RunProgress(30.0, tasks, []))
    assert names(history.chosen(tasks, 2)) == "be"


def test_a_log_line_has_every_figure_of_a_task_and_counts_those_that_it_leaves_out():
    tasks = [task("a\nb", 4, loss=1.25, validation=2.0, batch="batch 8"), task("c", 3, None, Doing.FAILED)]
    history = seen((0.0, [task("a\nb", 0)]), (2.0, tasks))
    told = "a?b 4/10 loss 1.250 validation 2.000 batch 8 2.0/s 0:03 left"
    assert log_line(RunProgress(2.0, tasks, []), history) == f"   2.0 s  {told} | c 3 failed"
    tasks.append(task("d" * 20, 1, None, Doing.PAUSED))
    assert log_line(RunProgress(2.0, tasks, []), history) == f"   2.0 s  {told} | and 2 more"
    tasks[0], told = task("a\nb", 4, loss=1.25), "a?b 4/10 loss 1.250 2.0/s 0:03 left"
    tasks[2] = task("d" * 60, 1, None, Doing.PAUSED)
    assert log_line(RunProgress(2.0, tasks, []), history) == f"   2.0 s  {told} | and 2 more: 1 paused, 1 failed"


@pytest.mark.parametrize("num_tasks", [0, 1, 2, 9, 70])
@pytest.mark.parametrize("name", ["a", "学習率" * 20], ids=["short", "wide"])
def test_a_line_of_a_log_has_at_most_100_columns_and_the_last_ones_have_all_tasks(num_tasks, name):
    tasks = [task(f"{k}{name}", 4, loss=1.25, validation=2.5, batch="batch 4096") for k in range(num_tasks)]
    run = RunProgress(2.0, tasks, [])
    history = seen((0.0, [each._replace(steps=0) for each in tasks]), (2.0, tasks))
    line, last = log_line(run, history), last_log_lines(run, history)
    assert all(width(each) <= 100 for each in (line, *last))
    assert line.count(" 4/10") + int((re.findall(r"and (\d+) more", line) or [0])[0]) == num_tasks
    assert "".join(last).count(" 4/10") == num_tasks


def test_a_name_that_is_too_long_for_a_line_of_a_log_is_cut_and_the_figures_are_not():
    tasks = [task("n" * 200, 4, loss=1.25)]
    line = log_line(RunProgress(2.0, tasks, []), seen((0.0, [task("n" * 200, 0)]), (2.0, tasks)))
    assert line == f"   2.0 s  {'n' * 55}... 4/10 loss 1.250 2.0/s 0:03 left"
    assert len(line) == 100


def test_who_is_in_the_lines_of_a_log_stays_there_while_it_computes():
    tasks = [task(name, 1, loss=1.25, validation=2.5) for name in "abc"]
    history = seen((0.0, [task(each.name, 0) for each in tasks]), (2.0, tasks))
    assert " a 1/10" in log_line(RunProgress(2.0, tasks, []), history)
    tasks.insert(0, task("new", 1, loss=1.25))
    history.add(RunProgress(4.0, tasks, []))
    assert " a 1/10" in log_line(RunProgress(4.0, tasks, []), history)


def test_tasks_are_counted_by_what_they_do():
    doing = [Doing.BATCH, Doing.FINISHED, Doing.VALIDATING, Doing.COMPUTING, Doing.SETTING_UP, Doing.PAUSED]
    told = "2 computing, 2 waiting, 1 finished, 1 paused"
    assert counted([task("a", 0, doing=each) for each in doing]) == told


@pytest.mark.parametrize(
    ("shown", "value", "text"),
    [
        (number, None, "-"),
        (number, 1.25, "1.250"),
        (number, 123456.0, "1.2e+05"),
        (number, -0.00012345, "-1.2e-04"),
        (number, 1234.0, "1234"),
        (number, math.nan, "nan"),
        (rate, None, "-"),
        (rate, 123.4, "123/s"),
        (rate, 2.0, "2.0/s"),
        (rate, 0.5, "30.0/min"),
        (rate, 0.001, "3.6/h"),
        (duration, None, "-"),
        (duration, 59.6, "1:00"),
        (duration, 3600, "1:00h"),
        (duration, 100_000, "1.2d"),
        (duration, 10_000_000, "115d"),
        (bytes_rate, 0, "0 B/s"),
        (bytes_rate, 23.7 * 2**20, "23.7 MiB/s"),
        (bytes_rate, 123.7 * 2**20, "123 MiB/s"),
    ],
)
def test_numbers_are_short(shown, value, text):
    assert shown(value) == text


def test_numbers_fit_their_columns_whatever_they_are():
    for exponent in range(-12, 13):
        value = 9.8765 * 10.0**exponent
        assert max(len(number(value)), len(number(-value)), len(rate(value))) <= 8, value
        assert len(duration(value)) <= 6, value
        assert len(bytes_rate(value)) <= 10, value


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
