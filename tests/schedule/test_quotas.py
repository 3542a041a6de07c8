"""Groups with quotas, in stories drawn over time; `tests/schedule/test_walks.py` has the random walks."""

import heapq
from collections import Counter
from itertools import count, groupby

import pytest

from hydra_engine.schedule.events import Begin, Run, Spread, StopRequested
from hydra_engine.schedule.groups import Group, shared_out
from hydra_engine.schedule.policies import POLICIES
from tests.world import TRAIN, World

SPREADS = tuple(Spread(float(k + 1), frozenset(), True) for k in range(4))  # twice as fast on two devices, and so on


# -- stories


def played(world, *arrivals):
    """Devices by group over time, where a unit computes for a second, and everything else takes no time at all.

    arrivals: (seconds, call), in order.
    """
    arrivals, ends, ties, started, now_s, counts = list(arrivals), [], count(), set(), 0.0, []
    while arrivals or not world.scheduler.finished:
        world.settle()
        for device, unit in world.running.items():
            if unit is not None and unit not in started:
                started.add(unit)
                heapq.heappush(ends, (now_s + 1.0, next(ties), device))
        counts.append((now_s, dict(world.counts())))
        if arrivals and (not ends or arrivals[0][0] <= ends[0][0]):
            now_s, call = arrivals.pop(0)
            call()
        elif ends:
            now_s, _, device = heapq.heappop(ends)
            world.compute(device)
    # What comes at one time is one change.
    last = [list(each)[-1] for _, each in groupby(counts, key=lambda each: each[0])]
    return [(s, each) for k, (s, each) in enumerate(last) if k == 0 or each != last[k - 1][1]]


def two_groups(num_devices=4, policy="sharded-lrtf", **quotas):
    world = World(policy, quotas=quotas or {"a": 2, "b": 2})
    for device in range(num_devices):
        world.add_device(device)
    return world


def num_runs(world):
    """How often each unit was begun."""
    return Counter(each.unit for each in world.story if isinstance(each, Run))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_group_borrows_what_is_idle_and_gives_it_back_within_a_unit(policy):
    """Four devices, two groups of two: A runs on 4; B arrives at 2.5 s, and at 3.0 s has 2; B ends, and A has 4."""
    world = two_groups(policy=policy)
    for k in range(4):
        world.add_training(f"a{k}", 3, 8, group="a")  # five units a step

    def b_arrives():
        for k in range(2):
            world.add_training(f"b{k}", 3, 2, group="b")

    found = played(world, (2.5, b_arrives))
    assert found == [(0.0, {"a": 4}), (3.0, {"a": 2, "b": 2}), (13.0, {"a": 4}), *found[3:]]
    total = 4 * 8 * 5 + 2 * 2 * 5  # no device was idle before the last units
    assert all(sum(each.values()) == 4 or s >= total / 4 - 8 for s, each in found)
    assert set(num_runs(world).values()) == {1}, "nothing is done twice"
    assert len(num_runs(world)) == total


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_device_loads_ahead_for_the_group_that_it_will_serve(policy):
    """Else most claims would be dropped, where groups that both have more tasks than devices keep to their quotas."""
    world = two_groups(policy=policy)
    for name, number in (("a", 6), ("b", 4)):
        for k in range(number):
            world.add_training(f"{name}{k}", 3, 8, group=name)
    played(world)
    seen = Counter(type(each).__name__ for each in world.story)
    assert seen["Run"] == 10 * 8 * 5
    assert seen["Drop"] <= 0.05 * seen["Run"]


@pytest.mark.parametrize("at", [10.2, 11.2, 12.2])
def test_a_step_that_is_spread_takes_its_groups_devices_alone_from_its_next_beginning(at):
    """A task over 4 devices, whose group is owed 2: of four parts two wait, and the next step has two."""
    world = two_groups()
    world.add_training("a", 1, 40, spreads=SPREADS, group="a", num_micro_batches=4)
    options = {"spreads": SPREADS, "num_micro_batches": 4}
    found = played(world, (at, lambda: world.add_training("b", 1, 6, group="b", **options)))
    [(start_s, _)] = [(s, each) for s, each in found if each == {"a": 2, "b": 2}][:1]
    assert start_s - at <= 1.0
    parts = {name: [e.num_parts for e in world.story if isinstance(e, Begin) and e.task == name] for name in "ab"}
    assert parts["b"] == [2] * 6
    assert [number for number, _ in groupby(parts["a"])] == [4, 2, 4]
    assert set(num_runs(world).values()) == {1}


def test_without_a_quota_a_group_has_what_is_left_and_priority_decides_beside_borrowers():
    world = World(double_buffer=False, quotas={"a": 1})
    for name, group, priority in (("x", None, 0), ("y", None, 1), ("a0", "a", 0), ("a1", "a", 2), ("a2", "a", 0)):
        world.add_training(name, 1, group=group, priority=priority)
    world.settle()
    for device in range(3):
        world.add_device(device)
    # a1 by the quota, then the highest priority, then the first of all.
    assert [world.running[device].task for device in range(3)] == ["a1", "y", "x"]


def test_where_fewer_devices_are_in_than_quotas_groups_get_them_in_proportion():
    world = two_groups(0, a=2, b=4)
    for group, number in (("a", 3), ("b", 6)):
        for k in range(number):
            world.add_training(f"{group}{k}", 1, 9, group=group)
    for device in range(3):
        world.add_device(device)
    world.settle()
    for device in range(3):  # what began before all were in is through
        world.compute(device)
        world.settle()
    assert world.counts() == {"a": 1, "b": 2}


def test_below_its_minimum_a_task_begins_no_step_and_finishes_the_one_it_is_in():
    world = two_groups(3, a=2)
    world.add_training("a", 1, 4, spreads=SPREADS, group="a", min_devices=3, num_micro_batches=4)
    task = world.tasks["a"]
    world.settle()
    assert [unit.part for unit in world.running.values()] == [0, 1, 2]
    world.remove_device(1)
    for _ in range(3):
        world.compute(min(device for device, unit in world.running.items() if unit is not None))
        world.settle()
    assert task.num_committed[TRAIN] == task.num_begun[TRAIN] == 1
    assert list(world.running.values()) == [None, None]
    world.add_device(3)
    assert task.num_begun[TRAIN] == 2


def test_a_task_that_waits_for_devices_can_be_stopped():
    world = two_groups(1, a=1)
    world.add_training("a", 1, 4, min_devices=2)
    world.settle()
    assert world.running == {0: None}
    world.tasks["a"].over = True
    world.send(StopRequested())
    assert world.scheduler.finished


def test_devices_are_shared_out_by_quotas_and_what_is_left_by_what_there_is_to_do():
    def numbers(num_devices, *groups):
        made = {Group(quota, remaining_s): most for quota, remaining_s, most in groups}
        return list(shared_out(made, num_devices).values())

    assert numbers(4, (2, 1.0, 4), (2, 9.0, 4)) == [2, 2]
    assert numbers(4, (2, 1.0, 1), (2, 9.0, 4)) == [1, 3]
    assert numbers(6, (1, 1.0, 6), (1, 9.0, 6)) == [1, 5]
    assert numbers(3, (2, 9.0, 4), (4, 9.0, 4)) == [1, 2]
    assert numbers(4, (0, 9.0, 4), (2, 1.0, 4)) == [2, 2]
    assert numbers(9, (2, 1.0, 0), (2, 1.0, 3)) == [0, 3]
