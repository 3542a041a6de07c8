"""What a step of an adaptive task is said to cost: alone, and beside others on one link and one processor."""

import pytest

from hydra_engine.run.running_task import ALONE, LEAST_CHARGE, StepClock, Work, charged_s
from hydra_engine.trace import Trace


def both(own, others):
    return Work(*own), Work(*(a + b for a, b in zip(own, others, strict=True)))


@pytest.mark.parametrize("own", [(0.0, 0.0), (1.0, 0.2), (0.1, 2.0), (5.0, 5.0)])
def test_alone_a_step_costs_what_elapsed(own):
    """Also what its lanes did not work in: commits and loaders are part of it."""
    for others in ((0.0, 0.0), (0.9 * ALONE * 7.0, 0.0), (0.5 * ALONE * 7.0, 0.9 * ALONE * 7.0)):
        assert charged_s(*both(own, others), 7.0) == 7.0


@pytest.mark.parametrize(
    ("own", "others", "elapsed_s", "cost_s"),
    [
        ((0.2, 3.0), (0.1, 2.0), 5.0, 3.0),  # one link: each of two pays for its own loads
        ((0.1, 2.0), (0.2, 3.0), 5.0, 2.0),
        ((3.0, 0.1), (2.0, 0.2), 5.0, 3.0),  # one processor
        ((2.0, 1.0), (1.0, 4.0), 5.0, 1.0),  # its computing is hidden: the link is what it makes longer
        ((1.0, 4.0), (2.0, 1.0), 5.0, 3.0),  # what hid behind others' computing is free
        ((4.0, 0.0), (0.0, 5.0), 5.0, LEAST_CHARGE * 4.0),  # wholly hidden: nothing is for nothing
        ((0.0, 1.0), (5.0, 0.0), 5.0, LEAST_CHARGE * 1.0),
        ((6.0, 0.0), (0.0, 5.0), 6.0, 1.0),
    ],
)
def test_beside_others_it_costs_what_it_makes_longer(own, others, elapsed_s, cost_s):
    assert charged_s(*both(own, others), elapsed_s) == pytest.approx(cost_s)


def test_tasks_that_are_bound_alike_pay_for_all_of_the_time_together():
    works = [Work(0.3, 2.0), Work(0.1, 1.5), Work(0.2, 0.5)]
    of_all = Work(*(sum(column) for column in zip(*works, strict=True)))
    assert sum(charged_s(own, of_all, 4.0) for own in works) == pytest.approx(of_all.load_s)


@pytest.mark.parametrize("own", [(1.0, 3.0), (3.0, 1.0)])
def test_more_of_its_own_work_never_costs_less(own):
    costs = [charged_s(*both((k * own[0], k * own[1]), (2.0, 2.0)), 10.0) for k in range(1, 6)]
    assert costs == sorted(costs)
    assert costs[0] > 0


COMPUTE, LOAD = "compute", "load"
RATE = 1000.0  # of the link, in bytes per second


class Clock:
    """A trace whose time is set."""

    def __init__(self, monkeypatch):
        self.trace, self.time_s = Trace(), 0.0
        monkeypatch.setattr(self.trace, "now_s", lambda: self.time_s)

    def work(self, task, lane, seconds, *, takes=True):
        self.time_s += seconds if takes else 0.0
        if lane == COMPUTE:
            self.trace.count_work(task, computed_s=seconds)
        else:
            self.trace.count_work(task, loaded_bytes=round(RATE * seconds))

    def of(self, task):
        return StepClock(self.trace, task, RATE, RATE)


def test_a_clock_times_from_a_steps_begin(monkeypatch):
    clock = Clock(monkeypatch)
    clock.work("a", COMPUTE, 5.0)  # before the first batch
    steps = clock.of("a")
    steps.begin()
    clock.work("a", LOAD, 1.0)
    clock.work("a", COMPUTE, 2.0)
    clock.time_s += 0.5  # its commit
    assert steps.end() == (3.5, 2.0, 1.0)
    clock.time_s += 60.0  # callbacks
    steps.begin()
    clock.work("a", LOAD, 0.25)
    assert steps.end() == (0.25, 0.0, 0.25)
    steps.begin()
    clock.work("a", COMPUTE, 9.0)
    steps.begin()  # again: memory ran short
    clock.work("a", COMPUTE, 2.0)
    assert steps.end() == (2.0, 2.0, 0.0)


def test_a_clock_takes_no_other_task_for_its_own(monkeypatch):
    """Names that begin alike, and names with dots."""
    clock = Clock(monkeypatch)
    steps = clock.of("a")
    steps.begin()
    clock.work("a", LOAD, 1.0)
    clock.work("a.b", LOAD, 2.0)
    clock.work("ab", LOAD, 4.0)
    step_s, _, link_s = steps.end()
    assert (step_s, link_s) == (1.0, 1.0)


def test_loads_of_two_tasks_on_one_link_are_charged_to_each_its_own(monkeypatch):
    clock = Clock(monkeypatch)
    clocks = {name: clock.of(name) for name in ("a", "b")}
    for each in clocks.values():
        each.begin()
    for name, load_s in (("a", 3.0), ("b", 1.0)):
        clock.work(name, LOAD, load_s)
        clock.work(name, COMPUTE, 0.125, takes=False)
    assert [each.end().step_s for each in clocks.values()] == [3.0, 1.0]


def test_a_step_over_several_devices_is_charged_by_the_device(monkeypatch):
    """Lanes of two devices worked at the same time."""
    clock = Clock(monkeypatch)
    alone = clock.of("a")
    alone.begin()
    clock.work("a", COMPUTE, 2.0, takes=False)
    clock.work("a", LOAD, 1.0, takes=False)
    clock.work("a", COMPUTE, 2.0)
    assert alone.end(num_devices=2) == (2.0, 2.0, 0.5)
    alone.begin()
    clock.work("b", COMPUTE, 1.0, takes=False)
    clock.work("b", COMPUTE, 1.0, takes=False)
    clock.work("a", COMPUTE, 2.0, takes=False)
    clock.work("a", COMPUTE, 2.0)
    assert alone.end(num_devices=2) == (2.0, 2.0, 0.0)
