"""Groups with quotas: random walks through a world that ranks groups for itself, and stories drawn over time."""

import heapq
import random
from collections import Counter
from itertools import count, groupby

import pytest

from hydra_engine.elastic import Quota
from hydra_engine.schedule.events import Begin, DeviceRemoved, Run, Spread, StopRequested
from hydra_engine.schedule.groups import Group, shared_out
from hydra_engine.schedule.policies import POLICIES, resolve_policy
from hydra_engine.schedule.scheduler import Scheduler
from hydra_engine.schedule.units import Unit
from tests.schedule.test_scheduler import (
    TRAIN,
    World,
    assert_a_policy_may_raise_once,
    assert_trained,
    random_spreads,
    random_task,
    task_added,
)

NEVER = (9, 0.0)
SPREADS = tuple(Spread(float(k + 1), frozenset(), True) for k in range(4))  # twice as fast on two devices, and so on


class QuotaWorld(World):
    """A world whose tasks stand in groups, and whose devices may be removed."""

    def __init__(self, policy="sharded-lrtf", *, double_buffer=True, quotas=None):
        super().__init__(policy, double_buffer=double_buffer)
        self.scheduler = Scheduler(resolve_policy(policy), double_buffer=double_buffer, has_groups=True)
        self.quotas = {None: Quota(0), **(quotas or {})}

    def add(self, added, num_steps, num_micro_batches=1):
        """Add a task of so many steps."""
        return self.add_task(added, [TRAIN] * num_steps, num_micro_batches)

    def add_task(self, added, batches, num_micro_batches=1):
        quota = self.quotas[added.group]
        return super().add_task(added._replace(quota=quota if added.group else None), batches, num_micro_batches)

    def remove_device(self, device):
        self.wanted[device] = False  # nothing more begins there
        return self.send(DeviceRemoved(device))

    def _release(self, instruction, _):
        [device] = instruction
        assert self.running[device] is None
        assert self.claims[device] is None
        del self.running[device], self.claims[device], self.wanted[device]
        for part in (part for task in self.tasks.values() for part in task.parts):
            part.near = None if part.near == device else part.near

    @property
    def num_in(self):
        return len(self.running.keys() - self.wanted.keys())

    def counts(self):
        """Units that run, by group, and by group and preemptible."""
        found = Counter()
        for unit in self.running.values():
            if unit is not None:
                added = self.tasks[unit.task].added
                found[added.group] += 1
                found[added.group, added.preemptible] += 1
        return found

    def rank(self, task, counts):
        """Rules of docs/elastic.md: the lowest goes first."""
        group, quota = task.added.group, self.quotas[task.added.group]
        if quota.maximum is not None and counts[group] >= quota.maximum:
            return NEVER
        if not task.added.preemptible:
            firm = counts[group, False]
            return (0, firm / quota.devices) if firm < quota.devices else NEVER
        if counts[group] < quota.minimum:
            return 1, counts[group] / quota.minimum
        if counts[group] < quota.devices:
            return 2, counts[group] / quota.devices
        return 3, 0.0

    def runnable(self, device):
        """Tasks with a unit that could run on a device now."""
        parts = ((task, *part.next_unit()) for task in self.tasks.values() for part in task.parts)
        return [task for task, unit, where in parts if unit is not None and where in ("any", device)]

    def least(self, task):
        """Devices that are in while a step of the task begins."""
        return max(task.added.min_devices, self.quotas[task.added.group].minimum)

    def _run(self, instruction, event):
        device, unit = instruction
        counts = self.counts()
        mine = self.rank(self.tasks[unit.task], counts)
        assert mine < NEVER, "no more than its maximum, and of those that are not preemptible than its quota"
        waiting = [(self.rank(task, counts), task.name) for task in self.runnable(device)]
        assert mine <= min(waiting)[0], f"{unit} of rank {mine} begins before {min(waiting)}"
        super()._run(instruction, event)

    def _begin(self, instruction, _):
        task = self.tasks[instruction.task]
        assert not task.over
        assert not task.chain
        (task.step, task.training), task.ready = task.ready, None
        assert instruction.step == task.step
        most = min(task.num_micro_batches, len(task.added.units.spreads)) if task.training else 1
        assert min(most, task.added.min_devices) <= instruction.num_parts <= most
        assert instruction.num_parts <= self.most_devices(task)
        assert self.num_in == 0 or self.num_in >= self.least(task), "below its minimum a task begins no step"
        task.begin(instruction.num_parts)
        assert instruction.in_sums == task.spread.in_sums
        task.num_begun[task.training] += 1

    def most_devices(self, task):
        """Devices that a step of the task may be spread over."""
        quota = self.quotas[task.added.group]
        limits = [task.added.max_devices, quota.maximum, None if task.added.preemptible else quota.devices]
        return max(1, min(limit for limit in (*limits, len(task.added.units.spreads)) if limit is not None))

    def know_spreads(self, task, spreads):
        out = super().know_spreads(task, spreads)
        num_wanted = Counter()
        for each in self.tasks.values():
            num_wanted[each.added.group] += 0 if each.finished else self.most_devices(each)
        assert {name: group.num_wanted for name, group in self.scheduler._groups.items()} == num_wanted
        assert self.scheduler._num_wanted == sum(num_wanted.values())
        return out

    def validate(self):
        counts = self.counts()
        ranks = {task.name: self.rank(task, counts) for task in self.tasks.values() if not task.finished}
        if NEVER not in ranks.values():
            super().validate()  # no device is idle while any task could run
        for device, unit in self.running.items():
            if unit is None and device not in self.wanted:
                assert all(ranks[task.name] == NEVER for task in self.runnable(device)), f"device {device} is idle"
        for group, quota in self.quotas.items():
            assert quota.maximum is None or counts[group] <= quota.maximum
            assert counts[group, False] <= quota.devices
        dispatch = self.scheduler._dispatch
        for queue in (dispatch._ready, dispatch._claimed, dispatch._loadable):
            for part in (part for standing in queue._of for part in queue.first(10**6, standing)):
                assert part.key == dispatch._key(part)


# -- random walks


def random_quotas(rng, num_devices):
    """Quotas that the devices are enough for, when all are in."""
    quotas, num_left = {}, num_devices
    for group in "abc"[: rng.randint(1, 3)]:
        devices = rng.randint(0, num_left)
        num_left -= devices
        minimum = rng.choice([0, 0, devices])
        maximum = rng.choice([None, None, max(1, devices), devices + 1])
        quotas[group] = Quota(devices, minimum=minimum, maximum=maximum)
    return quotas


def walk(seed, *, removes=False, failures=False, policy=None):
    """A random run to its end; returns the world. Fails where a rule is broken, or the run hangs."""
    rng = random.Random(seed)
    num_devices = rng.randint(1, 5)
    quotas = random_quotas(rng, num_devices)
    any_policy = rng.choice(sorted(POLICIES))
    world = QuotaWorld(policy or any_policy, double_buffer=rng.random() < 0.7, quotas=quotas)
    out = list(range(num_devices))  # devices that are not in
    tasks = [f"task-{k}" for k in range(rng.randint(1, 7))]
    share_at_once, remove_share = rng.choice([0.0, 0.5, 1.0]), rng.choice([0.02, 0.2]) if removes else 0.0
    world.is_stored_at_once = lambda: rng.random() < share_at_once
    try:
        while tasks or not world.scheduler.finished:
            choices = list(world.under_way())
            if tasks and (not choices or rng.random() < 0.2):
                group = rng.choice([None, *quotas])
                preemptible = group is None or quotas[group].devices == 0 or rng.random() < 0.6
                most = num_devices if preemptible else quotas[group].devices
                most = min(most, world.quotas[group].maximum or most)
                added, batches = random_task(rng, tasks.pop())
                least = rng.choice([1, 1, rng.randint(1, most)])
                added = added._replace(
                    group=group,
                    preemptible=preemptible,
                    min_devices=least,
                    max_devices=rng.choice([None, least, least + 1]),
                    priority=rng.choice([0, 0, 1]),
                )
                world.add_task(added, batches, rng.choice([1, 2, 6]))
                continue
            if out and (not choices or rng.random() < (0.05 if removes else 1.0)):
                world.add_device(out.pop(rng.randrange(len(out))))
                continue
            if not choices:
                assert not out, "nothing is under way, tasks are unfinished, and all devices are in: the run hangs"
            unfinished = [task for task in world.tasks.values() if not task.finished]
            if unfinished and rng.random() < 0.05:
                task = rng.choice(unfinished)
                world.know_spreads(task, random_spreads(rng, task.added.units.training, 4))
            elif len(world.running) > len(world.wanted) and rng.random() < remove_share:
                device = rng.choice(sorted(world.running.keys() - world.wanted.keys()))
                world.remove_device(device)
            else:
                what, happens = rng.choice(choices)
                if what in ("fail", "read anew", "misfit") and rng.random() > 0.02 * failures:
                    continue
                if what in ("store", "commit", "update", "fit") and rng.random() < 0.02 * failures:
                    happens(RuntimeError(what))
                else:
                    happens()
            out = [k for k in range(num_devices) if k not in world.running]
    except AssertionError as error:
        tail = "\n".join(map(str, world.story[-12:]))
        raise AssertionError(f"seed {seed}: {error}\nthe last events and instructions:\n{tail}") from error
    return world


def assert_trained_whole(world):
    assert_trained(world)
    assert not any(task.over or task.batches for task in world.tasks.values())


@pytest.mark.parametrize("first_seed", range(0, 100, 50))
def test_walk_in_groups_trains_every_batch_of_every_task(first_seed):
    for seed in range(first_seed, first_seed + 50):
        assert_trained_whole(walk(seed))


@pytest.mark.parametrize("first_seed", range(1000, 1150, 50))
def test_walk_in_groups_with_devices_that_come_and_go_trains_every_batch(first_seed):
    for seed in range(first_seed, first_seed + 50):
        assert_trained_whole(walk(seed, removes=True))


@pytest.mark.parametrize("first_seed", range(2000, 2100, 50))
def test_walk_in_groups_with_failures_ends_and_spares_the_other_tasks(first_seed):
    for seed in range(first_seed, first_seed + 50):
        assert_trained(walk(seed, removes=seed % 2 == 0, failures=True))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_walk_in_groups_keeps_every_rule_under_every_policy(policy):
    for seed in range(3000, 3010):
        walk(seed, removes=True, policy=policy)


def test_walks_reach_what_they_are_for():
    seen = Counter()
    for seed in range(1000, 1030):
        world = walk(seed, removes=True)
        for each in world.story:
            seen[type(each).__name__] += 1
            if isinstance(each, Run):
                added = world.tasks[each.unit.task].added
                seen["in a group", added.group is not None] += 1
                seen["preemptible", added.preemptible] += 1
                seen["spread", each.unit.part > 0] += 1
        seen["maximum"] += any(quota.maximum is not None for quota in world.quotas.values())
    names = ["DeviceRemoved", "Release", "Drop", "maximum"]
    names += [(what, is_so) for what in ("in a group", "preemptible", "spread") for is_so in (False, True)]
    assert all(seen[name] > 0 for name in names), seen


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
        found = {group: number for group, number in world.counts().items() if not isinstance(group, tuple)}
        counts.append((now_s, found))
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
    world = QuotaWorld(policy, quotas=quotas or {"a": Quota(2), "b": Quota(2)})
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
        world.add(task_added(f"a{k}", 3, num_steps=8, group="a"), 8)  # five units a step

    def b_arrives():
        for k in range(2):
            world.add(task_added(f"b{k}", 3, num_steps=2, group="b"), 2)

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
            world.add(task_added(f"{name}{k}", 3, num_steps=8, group=name), 8)
    played(world)
    seen = Counter(type(each).__name__ for each in world.story)
    assert seen["Run"] == 10 * 8 * 5
    assert seen["Drop"] <= 0.05 * seen["Run"]


@pytest.mark.parametrize("at", [10.2, 11.2, 12.2])
def test_a_step_that_is_spread_takes_its_groups_devices_alone_from_its_next_beginning(at):
    """A task over 4 devices, whose group is owed 2: of four parts two wait, and the next step has two."""
    world = two_groups()
    world.add(task_added("a", 1, num_steps=40, spreads=SPREADS, group="a"), 40, num_micro_batches=4)
    added = task_added("b", 1, num_steps=6, spreads=SPREADS, group="b")
    found = played(world, (at, lambda: world.add(added, 6, num_micro_batches=4)))
    [(start_s, _)] = [(s, each) for s, each in found if each == {"a": 2, "b": 2}][:1]
    assert start_s - at <= 1.0
    parts = {name: [e.num_parts for e in world.story if isinstance(e, Begin) and e.task == name] for name in "ab"}
    assert parts["b"] == [2] * 6
    assert [number for number, _ in groupby(parts["a"])] == [4, 2, 4]
    assert set(num_runs(world).values()) == {1}


def test_without_a_quota_a_group_has_what_is_left_and_priority_decides_beside_borrowers():
    world = QuotaWorld(double_buffer=False, quotas={"a": Quota(1)})
    for name, group, priority in (("x", None, 0), ("y", None, 1), ("a0", "a", 0), ("a1", "a", 2), ("a2", "a", 0)):
        world.add_task(task_added(name, 1, group=group, priority=priority), [TRAIN])
    world.settle()
    for device in range(3):
        world.add_device(device)
    # a1 by the quota, then the highest priority, then the first of all.
    assert [world.running[device].task for device in range(3)] == ["a1", "y", "x"]


def test_where_fewer_devices_are_in_than_quotas_groups_get_them_in_proportion_after_their_minimum():
    for quotas, numbers in (
        ({"a": Quota(2), "b": Quota(4)}, {"a": 1, "b": 2}),
        ({"a": Quota(2, minimum=2), "b": Quota(4)}, {"a": 2, "b": 1}),
        ({"a": Quota(2), "b": Quota(4, minimum=3)}, {"b": 3}),
    ):
        world = two_groups(0, **quotas)
        for group, number in (("a", 3), ("b", 6)):
            for k in range(number):
                world.add(task_added(f"{group}{k}", 1, num_steps=9, group=group), 9)
        for device in range(3):
            world.add_device(device)
        world.settle()
        for device in range(3):  # what began before all were in is through
            world.compute(device)
            world.settle()
        found = world.counts()
        assert {group: found[group] for group in "ab" if found[group]} == numbers


def test_tasks_that_are_not_preemptible_keep_to_the_quota_and_go_first_there():
    world = two_groups(4, a=Quota(2), b=Quota(1))
    for k in range(3):
        world.add(task_added(f"p{k}", 1, num_steps=30, group="a", priority=9), 30)
    for k in range(3):
        world.add(task_added(f"n{k}", 1, num_steps=4, group="a", preemptible=False), 4)
    world.settle()
    firm = []
    while any(not world.tasks[f"n{k}"].finished for k in range(3)):
        firm.append(world.counts()["a", False])
        world.compute(min(device for device, unit in world.running.items() if unit is not None))
        world.settle()
    # Never more than two, and never fewer once they have come to them, as long as two are left.
    assert max(firm) == 2
    assert firm[firm.index(2) :].count(2) >= 8


def test_a_group_at_its_maximum_leaves_devices_idle():
    world = two_groups(4, a=Quota(1, maximum=2))
    for k in range(4):
        world.add(task_added(f"a{k}", 2, num_steps=3, group="a"), 3)
    assert played(world) == [(0.0, {"a": 2}), (18.0, {})]


def test_a_device_is_looked_at_again_once_its_group_is_below_its_maximum():
    """Device 0 has made what a1 goes on from, and is idle, since a2 runs; once that is through, a1 goes on there."""
    world = two_groups(2, a=Quota(0, maximum=1), b=Quota(2))
    for name, num_shards in (("a1", 2), ("b0", 1), ("b1", 1), ("a2", 1)):
        world.add(task_added(name, num_shards, num_steps=1, group=name[0]), 1)
        world.read(world.tasks[name])
    assert world.running == {0: Unit("a1", "f", 0, 0), 1: Unit("b0", "fb", 0, 0)}
    world.compute(0)  # and what it leaves is on its way to DRAM
    assert world.running[0] == Unit("b1", "fb", 0, 0)
    world.compute(1)
    assert world.running[1] == Unit("a2", "fb", 0, 0)
    world.compute(0)
    assert world.running[0] is None
    world.compute(1)
    assert world.running == {0: Unit("a1", "fb", 1, 0), 1: None}


@pytest.mark.parametrize(("options", "quota"), [({"min_devices": 3}, Quota(2)), ({}, Quota(3, minimum=3))])
def test_below_its_minimum_a_task_begins_no_step_and_finishes_the_one_it_is_in(options, quota):
    world = two_groups(3, a=quota)
    world.add(task_added("a", 1, num_steps=4, spreads=SPREADS, group="a", **options), 4, num_micro_batches=4)
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
    world = two_groups(1, a=Quota(1))
    world.add(task_added("a", 1, num_steps=4, min_devices=2), 4)
    world.settle()
    assert world.running == {0: None}
    world.tasks["a"].over = True
    world.send(StopRequested())
    assert world.scheduler.finished


def test_devices_are_shared_out_by_quotas_and_what_is_left_by_what_there_is_to_do():
    def numbers(num_devices, *groups):
        made = {Group(quota, remaining_s): most for quota, remaining_s, most in groups}
        return list(shared_out(made, num_devices).values())

    assert numbers(4, (Quota(2), 1.0, 4), (Quota(2), 9.0, 4)) == [2, 2]
    assert numbers(4, (Quota(2), 1.0, 1), (Quota(2), 9.0, 4)) == [1, 3]
    assert numbers(6, (Quota(1), 1.0, 6), (Quota(1), 9.0, 6)) == [1, 5]
    assert numbers(3, (Quota(2), 9.0, 4), (Quota(4), 9.0, 4)) == [1, 2]
    assert numbers(3, (Quota(2, minimum=2), 9.0, 4), (Quota(4), 9.0, 4)) == [2, 1]
    assert numbers(4, (Quota(0), 9.0, 4), (Quota(2), 1.0, 4)) == [2, 2]
    assert numbers(9, (Quota(2), 1.0, 0), (Quota(2), 1.0, 3)) == [0, 3]


@pytest.mark.parametrize("calls", range(1, 60, 3))
def test_a_policy_that_raises_once_leaves_a_run_in_groups_that_can_end(calls):
    quota = Quota(1, maximum=1)
    tasks = [task_added(name, 5, num_steps=3, group=name[0], quota=quota) for name in ("a0", "a1", "b0")]
    assert_a_policy_may_raise_once(calls, tasks, num_devices=2, has_groups=True)
