"""Shards that are at home on a device: where their units run, and when a home may move."""

import pytest

from hydra_engine.schedule.events import Move, Run
from tests.world import World, assert_trained, walk, words


def at_home(world, task, device, shards=(0, 1)):
    """Give shards of a task their homes on a device."""
    assert Move(task.name, tuple(shards)) in world.want_move(task, shards)
    return world.moved(task, dict.fromkeys(shards, device))


@pytest.mark.parametrize("double_buffer", [True, False])
def test_a_unit_of_a_shard_that_is_at_home_runs_there_alone(double_buffer):
    world = World(num_devices=2, double_buffer=double_buffer)
    task, other = world.begin_task("a", 2, num_steps=3), world.begin_task("b", 2, num_steps=3)
    at_home(world, task, 1, (1,))
    world.run_to_the_end()
    assert_trained(world)
    runs = {(each.unit, each.device) for each in world.story if isinstance(each, Run)}
    assert {device for unit, device in runs if (unit.task, unit.shard) == ("a", 1)} == {1}
    assert other.num_committed[True] == 3


def test_what_is_on_its_way_to_dram_is_not_taken_from_a_home_elsewhere():
    """The next unit has to wait until it is there: its home is on the other device."""
    world = World(num_devices=2)
    task = world.begin_task("a", 2)
    at_home(world, task, 1, (1,))
    assert "run" not in words(world.compute(0))
    assert "run fb1" in words(world.store(task))
    assert world.running[1] == task.unit


def test_a_home_moves_once_nothing_uses_its_shard():
    world = World(num_devices=1)
    task = world.begin_task("a", 2, num_steps=2)
    assert "move" not in words(world.want_move(task, (0,))), "its unit runs"
    assert "move" not in words(world.compute(0)), "what that leaves is on its way"
    assert "move" not in words(world.store(task)), "it was in this step"
    world.run(task)
    world.run(task)
    assert "move" not in words(world.commit(task))
    assert words(world.update(task, 1)).find("move") < 0
    assert "move" in words(world.update(task, 0))
    world.moved(task, {0: 0})
    world.run_to_the_end()
    assert_trained(world)


def test_a_home_leaves_between_two_units_of_a_step():
    world = World(num_devices=1)
    task = world.begin_task("a", 2)
    at_home(world, task, 0, (1,))
    world.run(task)
    assert "move" not in words(world.want_move(task, (1,), leaves=True)), "its unit runs"
    world.compute(0)
    assert "move" in words(world.store(task)), "its gradients move with it"
    world.moved(task, {})
    world.run_to_the_end()
    assert_trained(world)


def test_a_home_that_is_to_leave_while_its_task_is_fitted_leaves_after_that():
    """As one does that makes room for a unit that ran out of memory."""
    world = World(num_devices=1)
    task = world.begin_task("a", 2)
    at_home(world, task, 0, (1,))
    world.run(task)
    world.compute(0, failed=True)
    assert "fit fb1" in words(world.misfit(task))
    assert "move" not in words(world.want_move(task, (1,), leaves=True))
    assert "move" in words(world.fit(task))
    world.moved(task, {})
    world.run_to_the_end()
    assert_trained(world)


def test_a_home_that_moves_is_not_moved_again():
    """What is asked for twice, as by a device that fails, and is removed therefore."""
    world = World(num_devices=2)
    task = world.begin_task("a", 2)
    at_home(world, task, 0, (1,))
    for _ in range(2):
        world.want_move(task, (1,), leaves=True)
    assert task.moving == {1}
    assert sum(isinstance(each, Move) for each in world.story) == 2, "there, and away again"


def test_nothing_waits_for_a_device_that_has_gone():
    world = World(num_devices=2)
    task = world.begin_task("a", 2, num_steps=2)
    at_home(world, task, 1, (1,))
    world.run(task)
    world.remove_device(1)
    if not task.moving:
        world.compute(1)
        world.store(task)
    assert task.moving == {1}
    world.moved(task, {})
    world.run_to_the_end()
    assert_trained(world)


@pytest.mark.parametrize(
    "seeds", [range(40), *(pytest.param(range(k, k + 400), marks=pytest.mark.rest) for k in (40,))]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"misfits": True},
        {"failures": True, "changes": True},
        {"stops": True, "misfits": True, "changes": True},
        {"groups": True},
    ],
    ids=lambda options: ", ".join(options) or "calm",
)
def test_homes_come_and_go_at_any_time(seeds, options):
    for seed in seeds:
        assert_trained(walk(seed, homes=True, **options))
