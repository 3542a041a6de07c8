"""The contract of policies, and what the scheduler does under any: those that ship, and one of a user's own."""

import itertools
import random

import pytest

from hydra_engine.schedule.events import TaskStopped
from hydra_engine.schedule.policies import NOT_YET, POLICIES, Candidate, resolve_policy
from tests.covering import covering
from tests.world import TRAIN, World, assert_trained, random_task, walk


class LeastServedFirst:
    """A user's own, as docs/schedules.md has it."""

    def key(self, candidate):
        return candidate.used_s, candidate.remaining_s


CASES = {**POLICIES, "a user's own": LeastServedFirst}
# They serve the longest or the shortest task first, or one that has drawn well; all others promise each task its turns.
WITHOUT_TURNS = {"locality", "random", "sharded-lrtf", "shortest-remaining"}

EVERY = [pytest.param(CASES[name](), id=name) for name in sorted(CASES)]
every_policy = pytest.mark.parametrize("policy", EVERY)


def candidates_of(rng, count):
    """Candidates as the scheduler makes them: tasks and orders are unique, times and waiting need not be."""
    return [
        Candidate(
            task=f"task-{k}",
            order=k,
            remaining_s=rng.choice([0.0, 1.0, 2.5]),
            ready_order=rng.choice([1, 2, 3, NOT_YET]),
            served_order=rng.randrange(4),
            used_s=rng.choice([0.0, 0.5, 7.0]),
            weight=rng.choice([0.5, 1.0, 3.0]),
            passes=rng.choice([0.0, 1.25, 2.0]),
        )
        for k in rng.sample(range(10), count)
    ]


# -- the key


@every_policy
def test_keys_can_be_put_in_order(policy):
    rng = random.Random(1)
    for _ in range(50):
        keys = [policy.key(candidate) for candidate in candidates_of(rng, 4)]
        for order in itertools.permutations(keys):
            assert sorted(order) == sorted(keys)


@every_policy
def test_key_depends_on_the_candidate_alone(policy):
    candidates = candidates_of(random.Random(4), 8)
    before = random.getstate()
    keys = [policy.key(candidate) for candidate in candidates]
    assert [policy.key(candidate) for candidate in reversed(candidates)] == keys[::-1]
    assert [type(policy)().key(candidate) for candidate in candidates] == keys
    assert random.getstate() == before, "random numbers of the process are left alone"


def test_each_is_known_by_its_name_alone():
    assert [type(resolve_policy(name)) for name in POLICIES] == list(POLICIES.values())
    assert len(set(POLICIES.values())) == len(POLICIES)


# -- the run: `World` checks after each event that what runs and loads was offered, and that no device idles beside it


@every_policy
def test_every_rule_holds_in_runs_that_fail_stop_and_are_fitted_anew(policy):
    for seed in range(5000, 5004):
        assert_trained(walk(seed, failures=True, stops=seed % 4 == 0, misfits=seed % 2 == 0, policy=policy))


@every_policy
def test_the_same_events_give_the_same_schedule_also_with_an_object_that_has_served_before(policy):
    story = walk(6001, policy=policy).story
    assert walk(6001, policy=policy).story == story
    assert walk(6001, policy=type(policy)()).story == story


@every_policy
def test_without_tasks_there_is_nothing_to_say(policy):
    world = World(policy)
    assert world.add_device(0) == world.add_device(1) == []
    assert world.scheduler.finished


@every_policy
def test_one_task_leaves_nothing_to_choose(policy):
    def story(policy, double_buffer):
        world = World(policy, num_devices=1, double_buffer=double_buffer)
        world.add_training("task", 3, 3)
        world.run_to_the_end()
        return world.story

    for double_buffer in (True, False):
        assert story(policy, double_buffer) == story("fifo", double_buffer)


@every_policy
def test_many_tasks_that_come_at_once_are_all_trained(policy):
    rng = random.Random(7)
    world = World(policy, num_devices=3)
    for k in range(12):
        world.add_task(*random_task(rng, f"task-{k}"), rng.choice([1, 2, 6]))
    while not world.scheduler.finished:
        rng.choice([happens for what, happens in world.under_way() if what not in ("fail", "read anew")])()
    assert all(task.num_committed == task.num_begun == task.num_read for task in world.tasks.values())


@every_policy
def test_a_task_may_come_and_go_while_others_train(policy):
    """It comes while they are at work, is stopped in the middle of a step, and comes again, under its name."""
    world = World(policy, num_devices=1)
    for name in "ab":
        world.add_training(name, 2, 20)
    for num_steps in (20, 2):
        for _ in range(5):
            world.settle_and_compute()
        if "guest" in world.tasks:
            world.tasks["guest"].over = True
            world.send(TaskStopped("guest"))
            world.settle()
            assert world.tasks["guest"].finished
            num_before = world.tasks["guest"].num_committed[TRAIN]
            assert num_before < 20
        world.add_training("guest", 2, num_steps, priority=1)
    world.run_to_the_end()
    assert {name: task.num_committed[TRAIN] for name, task in world.tasks.items()} == {"a": 20, "b": 20, "guest": 2}


@every_policy
def test_units_of_higher_priority_go_first(policy):
    world = World(policy)
    for name, priority in (("a", 0), ("b", 7), ("c", -1)):
        world.begin_task(name, 1, priority=priority)
    world.add_device(0)
    assert (world.running[0].task, world.claims[0].task) == ("b", "a")
    world.run(world.tasks["b"])
    assert (world.running[0].task, world.claims[0].task) == ("a", "c")


@covering(name=sorted(CASES.keys() - WITHOUT_TURNS), double_buffer=[True, False], strength=1)
def test_no_task_waits_for_more_than_a_few_turns_of_the_others(name, double_buffer):
    world = World(CASES[name](), double_buffer=double_buffer)
    seconds = {"a": 0.5, "b": 1.0, "c": 2.0, "d": 1.0}
    for task, unit_s in seconds.items():
        world.add_training(task, 1 + len(world.tasks), 400, seconds=unit_s)
    world.add_device(0)
    order = []
    while len(order) < 400:
        world.settle()
        order.append(world.running[0].task)
        world.compute(0, seconds[order[-1]])
    for first in range(400 - 40):
        assert set(order[first : first + 40]) == set(seconds)


@pytest.mark.parametrize("name", sorted(WITHOUT_TURNS))
def test_the_others_serve_every_task_in_the_end(name):
    world = World(name)
    for task, num_steps in (("short", 1), ("long", 50)):
        world.add_training(task, 2, num_steps)
    world.add_device(0)
    world.run_to_the_end()
    assert {task.name: task.num_committed[TRAIN] for task in world.tasks.values()} == {"short": 1, "long": 50}


@pytest.mark.parametrize("num_events", [1000, pytest.param(10_000, marks=pytest.mark.rest)])
@every_policy
def test_a_long_run_keeps_every_rule(policy, num_events):
    """`World.validate` looks at all of it after each event."""
    rng = random.Random(type(policy).__name__)
    world = World(policy, num_devices=4)
    num_tasks, num_wanted = 0, 7
    for _ in range(num_events):
        num_unfinished = sum(not task.finished for task in world.tasks.values())
        num_wanted = {0: 7, 7: 0}.get(num_unfinished, num_wanted)  # fewer than devices at times
        if num_unfinished < num_wanted:
            for name in [name for name, task in world.tasks.items() if task.finished and not task.reading]:
                del world.tasks[name]
            added, batches = random_task(rng, f"task-{num_tasks}")
            added = added._replace(priority=rng.choice([0, 0, 1]), weight=rng.choice([0.5, 1.0, 4.0]))
            world.add_task(added, batches, rng.choice([1, 2, 6]))
            num_tasks += 1
        what, happens = rng.choice(list(world.under_way()))
        while what in ("fail", "read anew", "break", "misfit") and rng.random() < 0.9:
            what, happens = rng.choice(list(world.under_way()))
        if what in ("store", "commit", "update", "fit") and rng.random() < 0.002:
            happens(RuntimeError(what))
        else:
            happens()
        del world.story[:-20]
    assert num_tasks > num_events / 200
    counted_s = sum(task.counted_s for task in world.scheduler._tasks.values())
    assert world.scheduler._dispatch._remaining_s == pytest.approx(counted_s)  # what is critical is told by it
