"""The scheduler in drawn schedules: what it says to each event, and what a policy is shown."""

from collections import Counter

import pytest

from hydra_engine import TaskCost, simulate
from hydra_engine.schedule.dispatch import MOST_PASSED
from hydra_engine.schedule.events import (
    BatchReady,
    Begin,
    CaptureWanted,
    Commit,
    Computed,
    DataEnded,
    DeviceAdded,
    DeviceReturned,
    DeviceWanted,
    Discard,
    Drop,
    Failed,
    Finish,
    Fitted,
    Lend,
    Load,
    Read,
    Release,
    Run,
    ShardUpdated,
    Spread,
    StepCommitted,
    StopRequested,
    Stored,
    Update,
)
from hydra_engine.schedule.policies import resolve_policy
from hydra_engine.schedule.scheduler import Scheduler
from hydra_engine.schedule.units import BACKWARD, FORWARD, Unit, training_chain
from tests.world import EVALUATE, TRAIN, World, task_added, words


def test_a_device_that_is_not_here_is_neither_lent_nor_taken_back():
    """It could not be opened, which ends the run; whoever waits for it is told so."""
    scheduler = Scheduler(resolve_policy("sharded-lrtf"))
    for event in (DeviceAdded(0), DeviceWanted(1), DeviceReturned(1)):
        assert scheduler.handle(event) == []


def simulated(policy, *tasks, double_buffer=False, **options):
    """The units that one device computes, in the simulator's world, where all else takes next to nothing."""
    scheduler = Scheduler(resolve_policy(policy), double_buffer=double_buffer, **options)
    found = simulate(tasks, 1, record=True, scheduler=scheduler)
    return [str(placed.unit) for placed in found.schedule]


def cost(name, num_shards, num_steps=1, *, seconds=1.0, **options):
    """A task whose units all take as long; while one is committed, another one computes."""
    unit_s = [seconds] * (2 * num_shards - 1)
    return TaskCost(name=name, unit_s=unit_s, num_steps=num_steps, commit_s=1e-3, **options)


class TestInStep:
    """Tasks of two shards on one device: a step is f0, fb1, b0."""

    def test_tasks_pass_through_their_shards_side_by_side(self):
        tasks = [cost(name, 2, 2, seconds=seconds) for name, seconds in (("a", 1.0), ("b", 5.0), ("c", 0.1))]
        step = [f"{task}.{unit}@{{}}" for unit in ("f0", "fb1", "b0") for task in "abc"]
        assert simulated("in-step", *tasks) == [unit.format(k) for k in range(2) for unit in step]

    def order(self, world, num):
        """The units that the device computes."""
        found = []
        for _ in range(num):
            unit = world.running[0]
            found.append(str(unit))
            task = world.tasks[unit.task]
            world.run(task)
            if unit.kind == BACKWARD:
                world.read(task)
                world.commit(task)
                for shard in range(2):
                    world.update(task, shard)
        return found

    def test_one_that_comes_late_catches_up_with_the_pass_that_the_others_are_in(self):
        world = World("in-step", num_devices=1, double_buffer=False)
        world.begin_task("a", 2, 9)
        assert self.order(world, 7)[-2:] == ["a.b0@1", "a.f0@2"]
        world.begin_task("b", 2, 9)  # while a.fb1@2 runs
        # What one has computed is on its way to DRAM while the other computes.
        assert self.order(world, 4) == ["a.fb1@2", "b.f0@0", "a.b0@2", "b.fb1@0"]
        assert self.order(world, 5) == ["a.f0@3", "b.b0@0", "a.fb1@3", "b.f0@1", "a.b0@3"]


class TestLocality:
    """The device holds shard 0 of every task whose name ends with "x"."""

    def order(self, *tasks, policy="locality"):
        """The tasks that it computes."""
        units = simulated(policy, *tasks, is_resident=lambda _, task, shard: task[-1] == "x")
        return [unit.partition(".")[0] for unit in units]

    def tasks(self, *names, num_steps=9):
        """The first is the longest."""
        return [cost(name, 1, num_steps, seconds=float(len(names) - k)) for k, name in enumerate(names)]

    def test_what_is_on_the_device_goes_first_the_longest_first(self):
        assert self.order(*self.tasks("a", "bx", "cx"))[:4] == ["bx", "cx", "bx", "cx"]

    def test_the_longest_waits_for_a_few_at_most(self):
        order = self.order(*self.tasks("a", "bx", "cx", num_steps=20))[:20]
        assert order.index("a") == MOST_PASSED
        assert order.count("a") == 2

    def test_priority_goes_before_what_is_on_the_device(self):
        assert self.order(*self.tasks("bx"), cost("urgent", 1, priority=1))[:2] == ["urgent", "bx"]

    def test_elsewhere_it_is_sharded_lrtf(self):
        tasks = self.tasks("a", "b")
        assert self.order(*tasks) == self.order(*tasks, policy="sharded-lrtf")


# One task in three shards on one device, two steps. Each line: what comes through, and what the scheduler says to it.
# The claim of fb2 cannot be made before f1 runs; f1 runs as soon as f0 is computed, since its input is on this device
# or on its way; at the commit all updates are released, lowest first, and shard 0 is loaded for the next step as soon
# as its own update is through.
ONE_TASK_THREE_SHARDS = """
    device           |
    task             | read
    batch 0          | begin 0, read, load f0, run f0, load f1
    f0 computed      | run f1, load fb2
    f0 stored        |
    f1 computed      | run fb2, load b1
    f1 stored        |
    batch 1          |
    fb2 computed     | run b1, load b0
    fb2 stored       |
    b1 computed      | run b0
    b1 stored        |
    b0 computed      |
    b0 stored        | commit
    committed        | update 0, update 1, update 2, begin 1, read
    shard 0 updated  | load f0, run f0
    end of data      |
    shard 1 updated  | load f1
    f0 computed      | run f1
    f0 stored        |
    shard 2 updated  | capture, load fb2
    f1 computed      | run fb2, load b1
    f1 stored        |
    fb2 computed     | run b1, load b0
    fb2 stored       |
    b1 computed      | run b0
    b1 stored        |
    b0 computed      |
    b0 stored        | commit
    committed        | update 0, update 1, update 2
    shard 0 updated  |
    shard 1 updated  |
    shard 2 updated  | capture, finish
"""


def test_one_task_in_three_shards_is_the_drawing():
    world = World()
    for line in ONE_TASK_THREE_SHARDS.strip().splitlines():
        what, _, expected = (part.strip() for part in line.partition("|"))
        task = world.tasks.get("task")
        match what.split():
            case ["device"]:
                out = world.add_device(0)
            case ["task"]:
                out = world.add_task(task_added("task", 3, num_steps=2), [TRAIN, TRAIN])
            case ["batch", _] | ["end", "of", "data"]:
                out = world.read(task)
            case [unit, "computed"]:
                assert world.running[0] == Unit.parse(f"task.{unit}@{task.step}")
                out = world.compute(0)
            case [unit, "stored"]:
                assert task.storing == Unit.parse(f"task.{unit}@{task.step}")
                out = world.store(task)
            case ["committed"]:
                out = world.commit(task)
            case ["shard", shard, "updated"]:
                out = world.update(task, int(shard))
        assert words(out) == expected, what
    assert world.scheduler.finished


def one_task(num_shards, *batches, num_micro_batches=1, **options):
    """A world of one device, and its only task."""
    world = World(num_devices=1)
    world.add_task(task_added("task", num_shards, **options), batches, num_micro_batches)
    return world, world.tasks["task"]


def test_without_double_buffering_a_shard_is_loaded_when_it_runs():
    world = World(num_devices=1, double_buffer=False)
    task = world.add_training("task", 2)
    assert words(world.read(task)) == "begin 0, read, load f0, run f0"
    assert words(world.compute(0)) == "load fb1, run fb1"
    assert words(world.store(task)) == ""
    assert words(world.compute(0)) == "load b0, run b0"
    assert words(world.store(task)) == ""


def test_task_that_draws_reads_on_when_its_forward_is_through():
    world, task = one_task(2, TRAIN, EVALUATE, num_steps=2, reads_ahead=False)
    assert words(world.read(task)) == "begin 0, load f0, run f0, load fb1"
    assert words(world.compute(0)) == "run fb1, load b0"
    world.store(task)
    assert words(world.compute(0)) == "run b0"
    assert words(world.store(task)) == "read"
    world.read(task)
    world.run(task)
    assert words(world.commit(task)) == "update 0, update 1, begin 0"
    assert words(world.update(task, 0)) == "load e0, run e0"
    assert words(world.update(task, 1)) == "capture, load e1"
    assert words(world.compute(0)) == "run e1"
    world.store(task)
    assert words(world.run(task)) == "read, commit"
    assert words(world.commit(task)) == "capture"
    assert words(world.read(task)) == "finish"


def test_load_waits_for_the_update_of_a_tied_weights_owner():
    needs = ((0,), (0, 1))  # shard 1 holds a weight that shard 0 owns
    world, task = one_task(2, TRAIN, TRAIN, num_steps=2, needs=needs)
    world.read(task)
    for _ in range(3):
        world.run(task)
    world.read(task)
    world.commit(task)
    assert words(world.update(task, 1)) == ""
    assert words(world.update(task, 0)) == "capture, load f0, run f0, load fb1"


def ahead(lowest_backward, batches, **options):
    """A world in which a task of two shards has begun the last unit of its first batch, and read the next one."""
    world, task = one_task(2, *batches, lowest_backward=lowest_backward, **options)
    world.read(task)
    while task.parts[0].position < len(task.chain):
        world.run(task)
    return world, task


@pytest.mark.parametrize("options", [{}, {"early_release": True}])
def test_a_shard_that_nothing_trains_is_loaded_before_the_commit_and_run_after_it(options):
    #           compute   f0   fb1           f0
    #           load           f0 of the next
    #           host               commit
    world, task = ahead(1, [TRAIN, TRAIN], **options)
    assert words(world.read(task)) == "load f0"
    assert "run" not in words(world.compute(0))
    assert "commit" in words(world.store(task))
    assert "run f0" in words(world.commit(task))
    assert world.running[0] == Unit("task", FORWARD, 0, 1)
    world.validate()


def test_no_other_device_loads_ahead():
    world, task = ahead(1, [TRAIN, TRAIN])
    world.add_device(1)
    assert words(world.read(task)) == "load f0"
    assert world.claims == {0: Unit("task", FORWARD, 0, 1), 1: None}


def test_a_shard_that_is_trained_is_not_loaded_before_its_update():
    world, task = ahead(0, [TRAIN, TRAIN])
    assert words(world.read(task)) == ""
    assert words(world.run(task)) == "commit"
    assert words(world.commit(task)) == "update 0, update 1, begin 1, read"
    assert words(world.update(task, 0)) == "load f0, run f0"


def test_a_batch_that_is_evaluated_changes_no_weights_so_the_next_is_loaded_beside_it():
    world, task = ahead(0, [EVALUATE, TRAIN])
    assert words(world.read(task)) == "load f0"
    world.run(task)
    assert words(world.commit(task)) == "capture, begin 0, read, run f0, load fb1"


@pytest.mark.parametrize("happens", ["misfit", "lose", "fail", "stop"])
def test_what_was_loaded_ahead_is_dropped_where_the_step_is_not_committed(happens):
    world, task = ahead(1, [TRAIN, TRAIN])
    world.read(task)
    world.compute(0, failed=happens != "stop")
    call = {
        "misfit": lambda: world.misfit(task),
        "lose": lambda: world.lose(task),
        "fail": lambda: world.store(task, RuntimeError("unit")),
        "stop": lambda: world.stop_task(task),
    }[happens]
    assert words(call()).startswith("drop f0")


def two_tasks(policy, **options):
    """A world with tasks "a" and "b" of two shards, both read, before their first device."""
    world = World(policy)
    for name, seconds in options.items():
        world.begin_task(name, 2, seconds=seconds)
    return world


@pytest.mark.parametrize("policy", ["fair-share", "fifo", "round-robin", "sharded-lrtf"])
def test_two_equal_tasks_alternate_on_one_device(policy):
    order = simulated(policy, cost("a", 2), cost("b", 2), double_buffer=True)
    assert order == ["a.f0@0", "b.f0@0", "a.fb1@0", "b.fb1@0", "a.b0@0", "b.b0@0"]


def test_what_runs_was_loaded_while_the_unit_before_it_computed():
    #           compute   a.f0   b.f0   a.fb1  b.fb1  a.b0   b.b0
    #           load             b.f0   a.fb1  b.fb1  a.b0   b.b0
    world = two_tasks("fifo", a=1.0, b=1.0)
    world.add_device(0)
    loaded = world.running[0]
    while any(world.running.values()):
        unit = world.running[0]
        assert unit == loaded
        loaded = world.claims[0]
        world.run(world.tasks[unit.task])


def test_device_computes_another_task_while_one_is_updated():
    world = World("fifo")
    a, b = world.begin_task("a", 1, 2), world.begin_task("b", 2)
    world.add_device(0)
    world.run(a)
    world.read(a)
    assert words(world.commit(a)) == "update 0, begin 1, read"
    for kind, shard in (("f", 0), ("fb", 1), ("b", 0)):  # the optimizer of a is at work all the time
        assert world.running[0] == Unit("b", kind, shard, 0)
        world.run(b)
    assert words(world.update(a, 0)) == "capture, load fb0, run fb0"


def test_sharded_lrtf_runs_the_longest_task_first_and_fifo_the_first_to_be_ready():
    for policy, first, second in (("sharded-lrtf", "long", "long"), ("fifo", "short", "long")):
        world = two_tasks(policy, short=1.0, long=3.0)
        world.add_device(0)
        assert world.running[0].task == first
        assert world.claims[0].task == second


class Spy:
    """Keeps what it was shown last."""

    def key(self, candidate):
        self.remaining_s = candidate.remaining_s
        return 0


def spied_task(num_steps):
    """A world of one device and one task whose units take 1, 2 and 4 s, and the spy that chooses."""
    spy = Spy()
    world = World(spy, num_devices=1, double_buffer=False)
    unit_s = {("f", 0): 1.0, ("fb", 1): 2.0, ("b", 0): 4.0}
    world.add_task(task_added("task", 2, num_steps=num_steps, unit_s=unit_s), [TRAIN, TRAIN, EVALUATE])
    world.read(world.tasks["task"])
    return world, world.tasks["task"], spy


def run_step(world, task, *seconds):
    """Its first units take these seconds, the others what was estimated."""
    seconds = list(seconds)
    while not task.committing:
        estimated_s = task.added.units.unit_s.get((world.running[0].kind, world.running[0].shard), 0.0)
        world.compute(0, seconds.pop(0) if seconds else estimated_s)
        world.store(task)
    world.read(task)
    world.commit(task)
    for shard in list(task.updating):
        world.update(task, shard)


def test_remaining_time_is_that_of_the_units_left_and_of_the_steps_to_come():
    world, task, spy = spied_task(num_steps=3)
    assert spy.remaining_s == (2 + 4) + 2 * 7  # f0 runs, and fb1 is what could be loaded
    world.compute(0, 1.0)
    assert spy.remaining_s == 4 + 2 * 7
    world.store(task)
    run_step(world, task)
    assert spy.remaining_s == (2 + 4) + 1 * 7


def test_remaining_time_during_an_evaluation_counts_the_steps_after_it():
    world, task, spy = spied_task(num_steps=3)
    run_step(world, task)
    run_step(world, task)
    assert world.running[0] == Unit("task", "e", 0, 0)
    world.compute(0, 0.0)
    assert spy.remaining_s == 0 + 1 * 7  # nobody knows yet how long an evaluation takes


def test_loader_that_does_not_say_has_as_many_steps_again_as_so_far():
    world, task, spy = spied_task(num_steps=None)
    assert spy.remaining_s == 6 + 1 * 7
    run_step(world, task)
    assert spy.remaining_s == 6 + 2 * 7


def test_remaining_time_follows_what_was_measured():
    world, task, spy = spied_task(num_steps=3)
    run_step(world, task, 101.0)  # the first unit is disturbed: 1 s so far
    learned_s = 0.7 * 1.0 + 0.3 * 2.0  # it counts as twice the estimate, no more
    assert spy.remaining_s == pytest.approx((2 + 4) + 1 * (learned_s + 2 + 4))


def test_unit_waits_from_the_update_that_made_it_ready():
    # c computes; meanwhile a begins its second step, b's next unit gets its input, and only then a's shard is updated.
    world = World("fifo", double_buffer=False)
    a, b, c = (world.begin_task(name, 2 if name == "b" else 1, 2) for name in "abc")
    world.add_device(0)
    world.compute(0)
    world.compute(0)
    assert world.running[0] == c.unit
    world.store(a)
    world.read(a)
    assert words(world.commit(a)) == "update 0, begin 1, read"
    world.store(b)
    world.update(a, 0)
    world.compute(0)
    assert world.running[0] == b.unit


def test_idle_device_steals_a_claim():
    # Device 0 runs a.f0 and has loaded b.f0. Device 1 comes, and would idle: it takes b.f0 over.
    world = two_tasks("fifo", a=1.0, b=1.0)
    world.add_device(0)
    assert world.claims[0] == Unit("b", "f", 0, 0)
    out = world.add_device(1)
    stolen = Unit("b", "f", 0, 0)
    assert out[:3] == [Drop(0, stolen), Load(1, stolen), Run(1, stolen)]
    assert world.running == {0: Unit("a", "f", 0, 0), 1: stolen}


def test_claim_that_is_loaded_stays_where_it_is_loaded():
    # Device 1 has loaded b.f0 and is idle when it becomes ready, as device 0 is; a.f0 is on neither.
    world = World("fifo", num_devices=2)
    a, b = world.add_training("a", 1), world.add_training("b", 2)
    world.read(b)
    world.read(a)
    assert world.running == {0: Unit("b", "f", 0, 0), 1: Unit("a", "fb", 0, 0)}
    claim = Unit("b", "fb", 1, 0)
    [holder] = [device for device, unit in world.claims.items() if unit == claim]
    world.compute(1 - holder)
    assert world.compute(holder)[0] == Run(holder, claim)


def test_claims_of_a_failed_task_are_dropped():
    world, task = one_task(3, TRAIN)
    world.read(task)
    assert world.compute(0, failed=True) == []
    assert world.claims[0] == Unit("task", "f", 1, 0)
    out = world.store(task, RuntimeError("a layer"))
    assert out == [Drop(0, Unit("task", "f", 1, 0)), Finish("task")]


def test_task_ends_once_what_went_on_from_a_failed_unit_is_through():
    # f0 is computed and f1 begun on the same device; then f0 fails on its way to DRAM.
    world, task = one_task(3, TRAIN)
    world.read(task)
    assert words(world.compute(0)) == "run f1, load fb2"
    assert words(world.store(task, RuntimeError("full"))) == "drop fb2"
    assert world.compute(0) == []  # fails, for want of its input
    assert words(world.store(task, RuntimeError("full"))) == "finish"


def test_unit_runs_only_where_its_input_was_made_until_that_is_stored():
    world = two_tasks("fifo", a=1.0)
    world.add_device(0)
    world.add_device(1)
    world.begin_task("b", 1)
    assert world.running == {0: Unit("a", "f", 0, 0), 1: Unit("b", "fb", 0, 0)}
    world.compute(1)
    assert world.running[1] is None
    c = world.add_training("c", 1)
    assert words(world.compute(0)) == "run fb1, load b0"  # on device 0, and device 1 stays idle
    world.read(c)
    assert world.running == {0: Unit("a", "fb", 1, 0), 1: Unit("c", "fb", 0, 0)}


class TestDevicesThatComeAndGo:
    def world(self, num_devices=1, num_shards=3, *, min_devices=1, **options):
        """One task, whose first step has begun."""
        world = World(num_devices=num_devices, min_devices=min_devices)
        return world, world.begin_task("task", num_shards, 2, **options)

    def test_a_device_that_is_removed_ends_its_unit_and_another_goes_on(self):
        #     device 0   |f0    |                the shard that it has loaded meanwhile is dropped
        #     device 1          |f1    |         once f0 is in DRAM
        world, task = self.world(2)
        assert words(world.remove_device(0)) == "drop f1, load f1"
        assert world.claims == {0: None, 1: Unit("task", "f", 1, 0)}
        assert world.compute(0) == [Release(0)]
        assert world.store(task) == [Run(1, Unit("task", "f", 1, 0)), Load(1, Unit("task", "fb", 2, 0))]

    def test_an_idle_device_is_released_at_once_and_comes_back_under_its_number(self):
        world, task = self.world(2)
        assert world.remove_device(1) == [Release(1)]
        for event in (DeviceWanted(1), DeviceReturned(1)):
            assert world.scheduler.handle(event) == []  # nobody gets a device that is not there
        assert world.remove_device(0) == [Drop(0, Unit("task", "f", 1, 0))]
        world.compute(0)
        # What f0 has left was on the device that is gone: it is waited for.
        assert world.add_device(0) == [Load(0, Unit("task", "f", 1, 0))]
        assert words(world.store(task)) == "run f1, load fb2"

    def test_a_device_that_is_lent_is_released_when_it_is_returned(self):
        world, _ = self.world(2)
        assert world.want_device(1) == [Lend(1)]
        assert world.remove_device(1) == []
        assert world.want_device(0) == [Drop(0, Unit("task", "f", 1, 0))]
        assert world.remove_device(0) == []
        assert world.compute(0) == [Lend(0)]
        assert world.return_device(1) == [Release(1)]
        assert world.return_device(0) == [Release(0)]

    def test_below_the_minimum_nothing_begins_and_what_runs_comes_through(self):
        world, task = self.world(2, min_devices=2)
        assert words(world.remove_device(1)) == "release"
        assert words(world.compute(0)) == words(world.store(task)) == ""
        assert world.claims == {0: Unit("task", "f", 1, 0)}
        assert words(world.add_device(3)) == "run f1, load fb2"

    def test_a_lost_unit_is_run_again_elsewhere_and_nothing_before_it(self):
        world, task = self.world(2)
        world.run(task)
        assert world.running == {0: Unit("task", "f", 1, 0), 1: None}
        world.remove_device(0)
        assert world.compute(0, failed=True) == [Release(0)]
        assert words(world.lose(task)) == "drop fb2, load f1, run f1, load fb2"
        assert world.running == {1: Unit("task", "f", 1, 0)}

    @pytest.mark.parametrize("comes_through", [False, True])
    @pytest.mark.parametrize("at_once", [False, True])
    def test_what_was_begun_from_a_lost_unit_is_waited_for_and_run_again_too(self, comes_through, at_once):
        """f0 is lost on its way to DRAM while f1 computes: f1 fails, or is stored, and f0 is run again."""
        world, task = self.world(2)
        world.compute(0)
        assert words(world.lose(task)) == "drop fb2"
        world.is_stored_at_once = lambda: at_once
        said = words(world.compute(0, failed=not comes_through))
        if not comes_through:
            said = words(world.lose(task))
        elif not at_once:
            said = words(world.store(task))
        assert said == "load f0, run f0, load f1"

    def test_the_last_unit_does_not_count_when_the_first_is_to_be_run_again(self):
        """f0 is lost while fb1, the last of the chain, computes: both are run again before anything is updated."""
        world, task = self.world(lowest_backward=1, num_shards=2, early_release=True, reads_ahead=False)
        world.compute(0)
        assert words(world.lose(task)) == ""
        assert words(world.run(task)) == "load f0, run f0, load fb1"
        world.run(task)
        assert words(world.run(task)) == "update 1, read, commit"

    def test_a_unit_is_lost_in_a_step_that_another_part_has_to_begin_again(self):
        world = World(num_devices=2)
        task = world.begin_task("task", 2, spreads=(Spread(), Spread(2.0)), num_micro_batches=2)
        world.compute(0, failed=True)
        world.compute(1, failed=True)
        assert words(world.lose(task, 0)) == "drop fb1, drop fb1, load f0, run f0, load fb1, load fb1"
        assert words(world.misfit(task, 1)) == "drop fb1, drop fb1"
        world.compute(0, failed=True)
        assert words(world.lose(task, 0)) == "fit f0"
        assert words(world.fit(task)) == "load f0, run f0, load fb1"

    def test_a_task_that_is_over_ends_once_its_lost_unit_is_reported(self):
        world, task = self.world()
        world.compute(0, failed=True)
        assert words(world.stop_task(task)) == "drop f1"
        assert words(world.lose(task)) == "finish"

    @pytest.mark.parametrize("removed_first", [False, True])
    def test_a_stop_without_devices_leaves_a_step_undone_that_has_updated_shards(self, removed_first):
        world, task = self.world(early_release=True)
        for _ in range(3):
            said = words(world.run(task))
        assert said == "update 2"
        if removed_first:
            world.remove_device(0)
            said = words(world.stop())
        else:
            world.stop()
            said = words(world.remove_device(0))
        assert said == ("" if removed_first else "drop b0")
        assert world.compute(0) == [Release(0)]
        assert words(world.store(task)) == "discard 1"
        assert world.update(task, 2) == [Finish("task", is_settled=False)]

    def test_a_stop_below_the_minimum_ends_such_a_step_on_the_devices_there_are(self):
        world, task = self.world(2, early_release=True, min_devices=2)
        for _ in range(3):
            world.run(task)
        world.remove_device(1)
        assert words(world.run(task)) == "update 1"
        assert words(world.stop()) == "run b0"
        assert words(world.run(task)) == "update 0, commit"
        assert words(world.commit(task)) == ""
        for shard in (2, 1, 0):
            said = words(world.update(task, shard))
        assert said == "capture, finish"

    def test_steps_are_spread_over_devices_that_come_once_it_is_known_how(self):
        world, task = one_task(1, *[TRAIN] * 5, num_micro_batches=4, num_steps=5)
        num_parts = [next(each.num_parts for each in world.read(task) if isinstance(each, Begin))]

        def step():
            world.read(task)
            for device in [device for device, unit in world.running.items() if unit is not None]:
                world.compute(device)
            for part in range(len(task.parts)):
                world.store(task, part=part)
            num_parts.extend(each.num_parts for each in world.commit(task) if isinstance(each, Begin))
            world.update(task, 0)

        world.add_device(1)
        step()
        world.know_spreads(task, [Spread(), Spread(2.0), Spread(3.0)])
        world.add_device(2)
        step()
        world.remove_device(1)
        step()
        world.remove_device(0)
        step()
        assert num_parts == [1, 1, 3, 2, 1]


class TestSpreadsThatChange:
    """Tasks of one shard, a unit a step, of eight micro-batches each, on four devices."""

    def world(self, num_tasks=1):
        world = World(num_devices=4)
        for k in range(num_tasks):
            world.add_training(str(k), 1, 9, spreads=self.spreads(4), adapts=True, num_micro_batches=8)
        return world

    def spreads(self, most, *, in_sums=True, ordered=()):
        return [Spread(float(k + 1), frozenset(ordered), in_sums) for k in range(most)]

    def step(self, world, task):
        """Go through the task's step in progress; what was said."""
        said = []
        for device in [device for device, unit in world.running.items() if unit and unit.task == task.name]:
            said += world.compute(device)
        for part in task.parts:
            while part.storing:
                said += world.store(task, part=part.index)
        return said

    def next_step(self, world, task):
        """Commit a step that is through; in how many parts the next one begins, and what its `Read` tells."""
        if task.reading:
            world.read(task)
        said = [*world.commit(task), *world.update(task, 0)]
        [begin] = [each for each in said if isinstance(each, Begin)]
        return begin, [each.num_devices for each in said if isinstance(each, Read)]

    def test_fewer_spreads_than_the_step_in_progress_has_parts(self):
        world = self.world()
        task = world.tasks["0"]
        world.read(task)
        assert len(task.parts) == 4
        world.know_spreads(task, self.spreads(2, in_sums=False, ordered=[("fb", 0)]))
        assert len([unit for unit in world.running.values() if unit]) == 4
        assert Commit("0", TRAIN) in self.step(world, task)
        begin, told = self.next_step(world, task)
        assert begin == Begin("0", 1, 2, in_sums=False)
        assert told == [2]
        assert len([unit for unit in world.running.values() if unit]) == 1  # its parts run one after the other

    def test_units_that_are_ordered_from_now_on_go_side_by_side_in_the_step_in_progress(self):
        world = World(num_devices=1)
        task = world.add_training("0", 2, spreads=self.spreads(2), num_micro_batches=2)
        world.add_device(1)
        world.read(task)
        assert [str(unit) for unit in world.running.values()] == ["0.f0@0", "0.f0@0+1"]
        world.know_spreads(task, self.spreads(2, ordered=[("fb", 1)]))
        assert Run(1, Unit("0", "fb", 1, 0, 1)) in world.compute(1)  # before the first part's

    def test_spreads_that_come_again_and_again(self):
        world = self.world()
        task = world.tasks["0"]
        world.read(task)
        found = []
        for most in (1, 3, 2, 4, 4, 1, 2):
            world.know_spreads(task, self.spreads(4))
            world.know_spreads(task, self.spreads(most))
            self.step(world, task)
            begin, told = self.next_step(world, task)
            found.append((begin.num_parts, *told))
        assert found == [(most, most) for most in (1, 3, 2, 4, 4, 1, 2)]

    def test_a_read_tells_how_many_devices_there_are_for_the_task_that_adapts(self):
        world = self.world(num_tasks=3)
        # As they come: one has all devices, two have half of them each, of three one has what two leave.
        assert [each for each in world.story if isinstance(each, Read)] == [Read("0", 4), Read("1", 2), Read("2", 2)]
        told = [each for name in "012" for each in world.read(world.tasks[name]) if isinstance(each, (Begin, Read))]
        begun = [Begin("0", 0, 1), Begin("1", 0, 1), Begin("2", 0, 2)]
        assert told == [said for begin in begun for said in (begin, Read(begin.task, begin.num_parts))]

    def test_a_read_tells_1_of_a_task_that_does_not_adapt_or_where_no_device_is_in(self):
        world = World()
        assert world.add_task(task_added("a", 1, spreads=self.spreads(4), adapts=True), [TRAIN]) == [Read("a", 1)]
        for device in range(3):
            world.add_device(device)
        assert world.add_task(task_added("b", 1, spreads=self.spreads(4)), [TRAIN]) == [Read("b", 1)]
        assert world.add_task(task_added("c", 1, adapts=True), [TRAIN]) == [Read("c", 1)]

    def test_a_step_of_fewer_micro_batches_than_devices_has_as_many_parts(self):
        world = self.world()
        task = world.tasks["0"]
        task.num_micro_batches = 3
        assert Begin("0", 0, 3) in world.read(task)
        task.num_micro_batches = 4
        self.step(world, task)
        assert self.next_step(world, task) == (Begin("0", 1, 4), [4])

    def test_devices_are_shared_out_for_the_last_task_to_end_soonest(self):
        """Task a is short and spreads well; b is long, and gains little."""
        world = World()
        known = {"a": self.spreads(3), "b": [Spread(1.0 + 0.1 * k) for k in range(3)]}
        for name, num_steps in (("a", 1), ("b", 9)):
            world.add_training(name, 1, num_steps, spreads=known[name], adapts=True, num_micro_batches=8)
        for device in range(4):
            world.add_device(device)
        begun = [each for name in "ab" for each in world.read(world.tasks[name]) if isinstance(each, Begin)]
        assert {each.task: each.num_parts for each in begun} == {"a": 1, "b": 3}


def test_fair_share_gives_time_by_weight():
    tasks = [cost("a", 1, 200, seconds=1.0, weight=3.0), cost("b", 1, 200, seconds=3.0)]
    # What ran last is not ready before it is committed; with two tasks alone they would alternate.
    order = simulated("fair-share", *tasks)[:80]
    had = Counter(unit[0] for unit in order)
    assert had["a"] / had["b"] == pytest.approx(1.0, rel=0.1)  # equal numbers of units: the seconds are 1 to 3


def test_newcomer_gets_nothing_for_the_time_before():
    world = World("fair-share", num_devices=1)
    a = world.add_training("a", 1, 50)
    for _ in range(20):
        world.read(a)
        world.run(a)
        world.commit(a)
        world.update(a, 0)
    others = [world.add_training(name, 3, 50) for name in "bc"]
    for task in (a, *others):
        world.read(task)
    order = []
    for _ in range(6):
        order.append(world.running[0].task)
        world.run(world.tasks[order[-1]])
    assert order.count("b") <= 3
    assert order.count("c") <= 3


def test_stop_finishes_what_is_committed():
    world, task = one_task(1, TRAIN, TRAIN, num_steps=2)
    world.read(task)
    world.run(task)
    assert world.stop() == []  # the commit is under way
    assert words(world.commit(task)) == "update 0"
    assert not world.scheduler.finished
    assert words(world.update(task, 0)) == "capture, finish"
    assert world.read(task) == []


def test_task_that_is_to_be_saved_is_captured_at_once_or_after_its_commit_and_updates():
    world, task = one_task(1, TRAIN, TRAIN, num_steps=2)
    assert words(world.want_capture(task)) == "capture"
    world.read(task)
    world.compute(0)
    assert words(world.want_capture(task)) == "capture"  # a unit changes nothing of the task's state
    world.store(task)
    assert words(world.want_capture(task)) == ""
    assert words(world.commit(task)) == "update 0"
    assert words(world.update(task, 0)) == "capture"


def releases_early(num_shards):
    """A scheduler of one device and a task that releases early, whose first batch is ready."""
    scheduler = Scheduler(resolve_policy("fifo"))
    scheduler.handle(DeviceAdded(0))
    scheduler.handle(task_added("task", num_shards, num_steps=2, early_release=True))
    scheduler.handle(BatchReady("task", 0, TRAIN))
    return scheduler


def through(scheduler, unit):
    """A unit is computed, and what it left is in DRAM; what is said to the latter."""
    scheduler.handle(Computed(0, unit, 1.0))
    return scheduler.handle(Stored(unit))


def test_gradients_of_a_task_that_is_over_are_discarded_so_that_no_unit_waits_for_their_room():
    scheduler = releases_early(3)
    units = [Unit("task", *node, 0) for node in training_chain(3, 0)]
    for unit in units[:2]:
        through(scheduler, unit)
    assert Update("task", 2) in through(scheduler, units[2])
    scheduler.handle(Computed(0, units[3], 1.0))
    scheduler.handle(Failed("task", RuntimeError("its update"), "its optimizer"))
    assert scheduler.handle(Stored(units[3])) == [Discard("task", 1)]
    assert through(scheduler, units[4]) == [Discard("task", 0)]
    assert words(scheduler.handle(ShardUpdated("task", 2))) == "finish"


def test_no_update_that_was_released_early_is_a_barrier():
    """The commit and the next step's units go on beside updates of other shards, each after its own shard's."""
    scheduler = releases_early(2)
    for node in training_chain(2, 0):
        said = through(scheduler, Unit("task", *node, 0))
    assert words(said) == "update 0, commit"
    assert sorted(said, key=lambda instruction: instruction.host_order) == said[::-1], "the commit goes first"
    scheduler.handle(BatchReady("task", 1, TRAIN))
    assert words(scheduler.handle(ShardUpdated("task", 0))) == ""
    assert "load f0, run f0" in words(scheduler.handle(StepCommitted("task", TRAIN)))
    assert "fb1" not in words(through(scheduler, Unit("task", "f", 0, 1)))
    assert "load fb1, run fb1" in words(scheduler.handle(ShardUpdated("task", 1)))


def test_task_that_releases_early_is_settled_from_its_commit_to_its_next_backward():
    scheduler = releases_early(2)

    def wanted():
        return words(scheduler.handle(CaptureWanted("task"))) == "capture"

    assert wanted()
    for k, (kind, shard) in enumerate((("f", 0), ("fb", 1), ("b", 0))):
        unit = Unit("task", kind, shard, 0)
        scheduler.handle(Computed(0, unit, 1.0))
        assert not wanted()  # the next one is run at once, and may be a backward
        said = words(scheduler.handle(Stored(unit)))
        assert ("update" in said) == (k > 0)
        assert ("commit" in said) == (k == 2)  # updates go on beside it
    assert words(scheduler.handle(ShardUpdated("task", 1))) == ""
    assert not wanted()
    assert words(scheduler.handle(StepCommitted("task", TRAIN))) == ""
    assert not wanted()
    assert words(scheduler.handle(ShardUpdated("task", 0))) == "capture"
    assert wanted()
    scheduler.handle(BatchReady("task", 1, TRAIN))
    scheduler.handle(Computed(0, Unit("task", "f", 0, 1), 1.0))
    assert scheduler.handle(StopRequested()) == []  # it ends once the step is committed
    scheduler.handle(Stored(Unit("task", "f", 0, 1)))
    scheduler.handle(Computed(0, Unit("task", "fb", 1, 1), 1.0, failed=True))
    failed = Failed("task", RuntimeError("a layer"), "a layer", Unit("task", "fb", 1, 1))
    assert scheduler.handle(failed)[-1] == Finish("task", is_settled=False)


def test_data_that_fails_ends_the_task_after_what_was_read():
    world, task = one_task(1, TRAIN, RuntimeError("loader"), num_steps=2)
    world.read(task)
    assert world.read(task) == []
    assert words(world.run(task)) == "commit"
    world.commit(task)
    assert words(world.update(task, 0)) == "capture, finish"


def test_nothing_that_was_said_is_lost_when_a_policy_raises():
    """Updates of a commit must come, or the task would never end."""

    policy = raises_at(0)
    world = World(policy, num_devices=1, double_buffer=False)
    task = world.add_training("task", 2, 2, lowest_backward=1)  # shard 0 is frozen: it waits for no update
    world.read(task)
    while not task.committing:
        world.run(task)
    world.read(task)
    policy.left = 1
    with pytest.raises(ZeroDivisionError):
        world.scheduler.handle(StepCommitted("task", True))
    said = world.scheduler.handle(StopRequested())
    assert Update("task", 1) in said


@pytest.mark.parametrize(
    ("num_devices", "options"),
    [
        (1, {}),
        (1, {"double_buffer": False}),
        (2, {}),
        (2, {"double_buffer": False}),
        pytest.param(2, {"has_groups": True}, id="in groups"),
    ],
)
def test_a_policy_that_raises_once_leaves_every_device_where_it_is_found(num_devices, options):
    """After so many calls; the run then ends as after a signal, and each device has one unit at a time."""
    for num_calls in range(1, 60):
        tasks = [task_added(name, 5, num_steps=3, early_release=True) for name in "ab"]
        if options.get("has_groups"):
            tasks = [task_added(name, 5, num_steps=3, group=name[0], quota=1) for name in ("a0", "a1", "b0")]
        scheduler = Scheduler(raises_at(num_calls), **options)
        events = [*(DeviceAdded(index) for index in range(num_devices)), *tasks]
        running, num_read = {}, Counter()
        for _ in range(400):
            if not events and running:
                unit = running.pop(device := min(running))
                events += [Computed(device, unit, 1.0), Stored(unit)]
            if not events:
                break
            try:
                said = scheduler.handle(events.pop(0))
            except ZeroDivisionError:
                said = scheduler.handle(StopRequested())
            for each in said:
                match each:
                    case Run(device, unit):
                        assert device not in running, f"{num_calls} calls"
                        running[device] = unit
                    case Read(task):
                        step, num_read[task] = num_read[task], num_read[task] + 1
                        events.append(BatchReady(task, step, TRAIN) if step < 3 else DataEnded(task))
                    case Update(task, shard):
                        events.append(ShardUpdated(task, shard))
                    case Commit(task, training):
                        events.append(StepCommitted(task, training))
        assert scheduler.finished, f"{num_calls} calls"


def raises_at(num_calls):
    """A policy that raises, once, when it is asked for the so-many-th time."""

    class Raises(Spy):
        left = num_calls

        def key(self, candidate):
            self.left -= 1
            if self.left == 0:
                raise ZeroDivisionError
            return super().key(candidate)

    return Raises()


def test_a_pass_in_step_counts_where_its_batch_has_to_be_fitted():
    scheduler = Scheduler(resolve_policy("in-step"))
    for event in (DeviceAdded(0), task_added("task", 1, num_steps=2), BatchReady("task", 0, TRAIN, True)):
        scheduler.handle(event)
    assert scheduler._tasks["task"].num_passes == 1
    scheduler.handle(Fitted("task", task_added("task", 1).units))
    assert scheduler._tasks["task"].num_passes == 1
