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
from tests.schedule.test_scheduler import TRAIN, World, random_task, task_added

NEVER = (9, 0.0)
INSTANT = ("read", "store", "fit", "commit", "update")


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
        assert task.added.max_devices is None or instruction.num_parts <= task.added.max_devices
        assert self.num_in == 0 or self.num_in >= self.least(task), "below its minimum a task begins no step"
        task.begin(instruction.num_parts)
        task.num_begun[task.training] += 1

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

    def settle(self):
        """All comes through but what devices compute."""
        while found := next((happens for what, happens in self.under_way() if what in INSTANT), None):
            found()


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
            if len(world.running) > len(world.wanted) and rng.random() < remove_share:
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


@pytest.mark.parametrize("first_seed", range(0, 200, 50))
def test_walk_in_groups_trains_every_batch_of_every_task(first_seed):
    for seed in range(first_seed, first_seed + 50):
        for task in walk(seed).tasks.values():
            assert not task.batches
            assert task.num_committed == task.num_begun == task.num_read


@pytest.mark.parametrize("first_seed", range(1000, 1200, 50))
def test_walk_in_groups_with_devices_that_come_and_go_trains_every_batch(first_seed):
    for seed in range(first_seed, first_seed + 50):
        for task in walk(seed, removes=True).tasks.values():
            assert not task.batches
            assert task.num_committed == task.num_begun == task.num_read


@pytest.mark.parametrize("first_seed", range(2000, 2150, 50))
def test_walk_in_groups_with_failures_ends_and_spares_the_other_tasks(first_seed):
    for seed in range(first_seed, first_seed + 50):
        for task in walk(seed, removes=seed % 2 == 0, failures=True).tasks.values():
            if not task.over:
                assert task.num_committed == task.num_begun == task.num_read


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_walk_in_groups_keeps_every_rule_under_every_policy(policy):
    for seed in range(3000, 3020):
        walk(seed, removes=True, policy=policy)
