"""Simulated runs: near the bound where swaps are free, by hand where they are not, and the same each time."""

import gc
import heapq
import math
import random
import tracemalloc
from dataclasses import replace

import pytest

import hydra_engine
from hydra_engine.planning.costs import DeviceChange, DeviceCost, HostCost, TaskCost
from hydra_engine.planning.simulate import bound_s, predict_spreads, simulate
from hydra_engine.schedule.graph import validate
from hydra_engine.schedule.policies import POLICIES
from hydra_engine.schedule.units import Unit
from tests.refused import refused


def task(name="a", *unit_s, num_steps=1, **options):
    return TaskCost(name=name, unit_s=unit_s or (1.0, 2.0, 3.0), num_steps=num_steps, **options)


def lpt_s(tasks, num_devices):
    """Makespan of whole tasks on devices, each on the device that is free first, the longest first (Graham 1969)."""
    free_s = [0.0] * num_devices
    for seconds in sorted((each.num_steps * each.step_s for each in tasks), reverse=True):
        heapq.heappush(free_s, heapq.heappop(free_s) + seconds)
    return max(free_s)


def random_tasks(rng, num_tasks):
    return [
        task(
            str(k),
            *(rng.uniform(0.1, 1.0) for _ in range(rng.choice((1, 2, 3, 5, 6, 9)))),
            num_steps=rng.randint(1, 25),
        )
        for k in range(num_tasks)
    ]


def assert_near_the_bound(tasks, num_devices, **options):
    """Within 0.1 % and one unit of what no schedule is faster than."""
    found = simulate(tasks, num_devices, **options)
    unit_s = max(max(each.unit_s) for each in tasks)
    work_s = [each.num_steps * each.step_s for each in tasks]
    assert found.bound_s == pytest.approx(max(*work_s, sum(work_s) / num_devices))
    assert found.bound_s - 1e-6 <= found.makespan_s <= 1.001 * found.bound_s + unit_s
    return found


# By policy: units by which equal tasks end later than the best schedule. The second two keep tasks equally long.
SLACK = {"fifo": 2, "round-robin": 2, "fair-share": 1, "sharded-lrtf": 1}


# Numbers of tasks and devices.
SHAPES = [
    (8, 4),
    (12, 8),
    *(pytest.param(*shape, marks=pytest.mark.rest) for shape in ((8, 8), (12, 4), (64, 4), (64, 8))),
]


class TestBound:
    @pytest.mark.parametrize(("num_tasks", "num_devices"), SHAPES)
    def test_equal_tasks(self, num_tasks, num_devices):
        tasks = [task(str(k), 0.3, 0.4, 0.6, 0.5, 0.5, num_steps=60) for k in range(num_tasks)]
        found = assert_near_the_bound(tasks, num_devices)
        assert found.makespan_s <= lpt_s(tasks, num_devices) + 0.6

    @pytest.mark.rest
    @pytest.mark.parametrize(("num_tasks", "num_devices"), SHAPES)
    def test_unequal_tasks(self, num_tasks, num_devices):
        rng = random.Random(num_tasks * num_devices)
        tasks = [
            task(str(k), *(rng.uniform(0.1, 1.0) for _ in range(5)), num_steps=rng.randint(20, 200))
            for k in range(num_tasks)
        ]
        found = assert_near_the_bound(tasks, num_devices)
        assert found.makespan_s <= lpt_s(tasks, num_devices) + 1.0

    @pytest.mark.rest
    @pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 500), marks=pytest.mark.rest)], ids=str)
    def test_random_tasks(self, seeds):
        for seed in seeds:
            rng = random.Random(seed)
            assert_near_the_bound(random_tasks(rng, rng.randint(1, 12)), rng.choice((1, 2, 3, 4, 8)))

    @pytest.mark.parametrize(("policy", "num_units"), SLACK.items())
    def test_equal_tasks_under_every_policy_that_keeps_them_about_equal(self, policy, num_units):
        for num_tasks, num_devices in ((2, 1), (2, 2), (4, 2), (4, 4), (6, 3), (6, 4), (3, 4)):
            tasks = [task(str(k), *[1.0] * 5, num_steps=4) for k in range(num_tasks)]
            found = simulate(tasks, num_devices, policy)
            assert found.bound_s == max(20.0, 20.0 * num_tasks / num_devices)
            assert found.bound_s <= found.makespan_s <= found.bound_s + num_units

    def test_one_long_task_beside_many_short_ones_never_waits(self):
        tasks = [task("long", 0.5, 0.7, 0.9, num_steps=200), *random_tasks(random.Random(0), 9)]
        found = assert_near_the_bound(tasks, 4)
        assert found.makespan_s == pytest.approx(200 * 2.1, rel=2e-3)

    def test_bound_with_devices_of_several_speeds(self):
        devices = [DeviceCost(speed=2.0), DeviceCost(), DeviceCost(speed=0.5)]
        assert bound_s([task("a", 6.0)], devices) == 3.0
        assert bound_s([task("a", 6.0), task("b", 6.0)], devices) == 4.0
        assert bound_s([task(str(k), 6.0) for k in range(7)], devices) == 12.0

    def test_bound_counts_what_a_task_waits_for_on_the_host(self):
        assert bound_s([task("a", 1.0, num_steps=3, commit_s=0.5, update_s=2.0)], 8) == 3 * 1.0 + 3 * 0.5 + 2 * 2.0

    @pytest.mark.parametrize("policy", sorted(POLICIES))
    def test_no_policy_is_faster_than_the_bound_or_slower_than_grahams(self, policy):
        rng = random.Random(7)
        for _ in range(8):
            num_devices, tasks = rng.randint(1, 5), random_tasks(rng, rng.randint(1, 9))
            found = simulate(tasks, num_devices, policy)
            work_s = [each.num_steps * each.step_s for each in tasks]
            assert found.bound_s - 1e-6 <= found.makespan_s
            assert found.makespan_s <= sum(work_s) / num_devices + (1 - 1 / num_devices) * max(work_s) + 1e-6


class TestByHand:
    def test_call_of_the_readme(self):
        found = hydra_engine.simulate(
            [hydra_engine.TaskCost(name="a", unit_s=(0.1, 0.2, 0.3), num_steps=50)], devices=8, policy="sharded-lrtf"
        )
        assert found.makespan_s == pytest.approx(30.0)
        assert found.bound_s == pytest.approx(30.0)
        assert found.num_units == 150
        assert found.finished_s == {"a": found.makespan_s}

    def test_loads_are_hidden_behind_the_unit_before(self):
        #     load     |f0 1|fb1 2 |      b0 1|
        #     compute       |f0 3   |fb1 3   |b0 3
        device = DeviceCost(load_bytes_per_s=1.0, store_bytes_per_s=1.0)
        found = simulate([task("a", 3.0, 3.0, 3.0, load_bytes=(1, 2))], [device], record=True)
        assert [(str(p.unit), p.start_s, p.end_s) for p in found.schedule] == [
            ("a.f0@0", 1.0, 4.0),
            ("a.fb1@0", 4.0, 7.0),
            ("a.b0@0", 7.0, 10.0),
        ]
        assert found.devices[0].loaded_bytes == 1 + 2 + 1
        assert found.devices[0].busy == pytest.approx({"load": 0.4, "compute": 0.9, "store": 0.0})

    def test_first_step_takes_longer(self):
        found = simulate([task("a", 3.0, 3.0, 3.0, num_steps=3, first_step_times=2.0)], 1)
        assert found.makespan_s == 2 * 9.0 + 9.0 + 9.0
        assert found.bound_s == 3 * 9.0

    @pytest.mark.rest
    def test_units_vary_as_drawn(self):
        device = DeviceCost(variation=0.2)

        def makespan_s(seed):
            return simulate([task("a", 3.0, 3.0, 3.0, num_steps=200)], [device], seed=seed).makespan_s

        assert makespan_s(1) == makespan_s(1)
        assert makespan_s(1) != makespan_s(2)
        # The mean of what is drawn is exp(variation ** 2 / 2) times the median.
        assert makespan_s(1) == pytest.approx(600 * 3.0 * math.exp(0.02), rel=0.03)

    def test_boundary_goes_down_and_comes_up_before_the_next_unit(self):
        device = DeviceCost(load_bytes_per_s=2.0, store_bytes_per_s=1.0)
        found = simulate(
            [task("a", 3.0, 3.0, 3.0, boundary_bytes=(0, 4), gradient_bytes=(1, 1))], [device], record=True
        )
        starts = [placed.start_s for placed in found.schedule]
        down_s, up_s = 4.0, 2.0
        second = 3.0 + down_s + up_s
        third = second + 3.0 + down_s + up_s  # gradients of weights go down behind its back
        assert starts == [0.0, second, third]
        assert found.makespan_s == third + 3.0 + 1.0
        assert found.devices[0].stored_bytes == 4 + (4 + 1) + 1

    def test_another_task_computes_meanwhile(self):
        device = DeviceCost(load_bytes_per_s=1.0, store_bytes_per_s=1.0)
        tasks = [task(name, 3.0, 3.0, 3.0, num_steps=5, load_bytes=2, boundary_bytes=(0, 1)) for name in "ab"]
        alone = simulate(tasks[:1], [device]).makespan_s
        assert simulate(tasks, [device]).makespan_s < 1.6 * alone

    def test_updates_hold_the_next_step_up_by_their_shard_alone(self):
        #  step 0 |f0|fb1|b0|commit .5|u0 1|u1 2  |
        #  step 1                          |f0|...|fb1|b0|
        found = simulate([task("a", 1.0, 1.0, 1.0, num_steps=2, commit_s=0.5, update_s=(1.0, 2.0))], 1, record=True)
        assert [placed.start_s for placed in found.schedule] == [0.0, 1.0, 2.0, 4.5, 6.5, 7.5]

    @pytest.mark.parametrize(
        ("gradient_bytes", "early_release", "starts"),
        [(0, True, [7.5, 8.5]), (1, True, [8.5, 9.5]), (1, "all", [7.5, 8.5])],
    )
    def test_with_early_release_the_commit_and_the_lowest_shard_go_first(self, gradient_bytes, early_release, starts):
        #  step 0  |f0|f1|fb2|b1|b0|          b0's gradients, the third of the step, wait in vain for a place
        #                    |   u2   |commit .5|u0|u1|    where these take one, until 6 s, when u1 has begun;
        #                                                 with room for all they wait for nothing
        #  step 1                                  |f0|f1|...
        cost = {"commit_s": 0.5, "update_s": (1.0, 1.0, 3.0), "gradient_bytes": gradient_bytes}
        alone = task("a", 1.0, 1.0, 1.0, 1.0, 1.0, num_steps=2, early_release=early_release, **cost)
        found = simulate([alone], 1, record=True)
        assert [placed.start_s for placed in found.schedule][:7] == [0.0, 1.0, 2.0, 3.0, 4.0, *starts]

    def test_faster_device_computes_more(self):
        tasks = [task(str(k), 1.0, num_steps=30) for k in range(4)]
        found = simulate(tasks, [DeviceCost(speed=3.0), DeviceCost()])
        fast, slow = (device.num_units for device in found.devices)
        assert fast + slow == 120
        assert 2.5 <= fast / slow <= 3.6
        assert found.makespan_s == pytest.approx(30.0, rel=0.05)

    def test_even_number_of_units_has_no_backward_of_shard_0(self):
        found = simulate([task("a", 1.0, 2.0, 3.0, 4.0)], 1, record=True)
        assert [str(placed.unit) for placed in found.schedule] == ["a.f0@0", "a.f1@0", "a.fb2@0", "a.b1@0"]

    def test_fewer_backward_units_than_that_have_as_many_frozen_shards(self):
        cost = task("a", 1.0, 1.0, 1.0, 1.0, num_shards=3)
        assert [kind + str(shard) for kind, shard in cost.chain] == ["f0", "f1", "fb2", "b1"]
        cost = task("a", 1.0, 1.0, 1.0, num_shards=3)
        assert [kind + str(shard) for kind, shard in cost.chain] == ["f0", "f1", "fb2"]
        assert simulate([cost]).makespan_s == 3.0

    def test_priority_and_weight_are_the_tasks(self):
        tasks = [task(str(k), 1.0, num_steps=20, priority=k) for k in range(3)]
        ends = simulate(tasks, 1).finished_s
        assert ends["2"] < ends["1"] < ends["0"]


THREE_UPDATES = [task(name, 0.0, update_s=1.0) for name in "abc"]
THREE_LONG = [task(name, 1.0, num_steps=10) for name in "abc"]
TWO_UPDATES = [task(name, 1.0, update_s=4.0) for name in "ab"]
SLOW_LINK = DeviceCost(load_bytes_per_s=1.0)
LATE = {"num_steps": 4, "update_s": (0.0, 1.0)}


@pytest.mark.parametrize(
    ("makespan_s", "tasks", "devices", "options"),
    [
        # Without double buffering no load is hidden.
        (3 * 3 + 1 + 2 + 1, [task("a", 3.0, 3.0, 3.0, load_bytes=(1, 2))], [SLOW_LINK], {"double_buffer": False}),
        # Updates that are released early run beside the backwards below.
        (4 * 3 + 1, [task("a", 1.0, 1.0, 1.0, **LATE)], 1, {}),
        (4 * 3, [task("a", 1.0, 1.0, 1.0, early_release=True, **LATE)], 1, {}),
        # Updates that share DRAM are no faster side by side.
        (3, THREE_UPDATES, 1, {"host": HostCost(optimizer_threads=1, shares_dram=True)}),
        (3, THREE_UPDATES, 1, {"host": HostCost(optimizer_threads=3, shares_dram=True)}),
        # Optimizer threads work side by side.
        (1 + 2 * 4, TWO_UPDATES, 2, {}),
        (1 + 4, TWO_UPDATES, 2, {"host": HostCost(optimizer_threads=2)}),
        # Reading goes on beside computing.
        (0.5 + 4 * 1, [task("a", 1.0, num_steps=4, read_s=0.5)], 1, {}),
        (4 * 3 + 1, [task("a", 1.0, num_steps=4, read_s=3.0)], 1, {}),
        # Devices share the host's cores.
        (10, THREE_LONG, 3, {}),
        (15, THREE_LONG, 3, {"host": HostCost(cores=2)}),
        (30, THREE_LONG, 3, {"host": HostCost(cores=1)}),
        # Copies that compute take a core: nothing is hidden on one.
        (
            3 * 2 + 3 * 2,
            [task("a", 2.0, 2.0, 2.0, load_bytes=2)],
            [replace(SLOW_LINK, copies_compute=True)],
            {"host": HostCost(cores=1)},
        ),
        # One micro-batch is one device's.
        (4 * 6, [task(num_steps=4)], 3, {}),
    ],
)
def test_seconds_by_hand(makespan_s, tasks, devices, options):
    assert simulate(tasks, devices, **options).makespan_s == pytest.approx(makespan_s, rel=1e-12)


class TestSpread:
    """A step's micro-batches over several devices."""

    @pytest.mark.parametrize("num_devices", [1, 2, 3, 6, 7])
    def test_one_task_with_six_micro_batches_takes_its_share_of_the_time(self, num_devices):
        found = simulate([task(num_steps=4, num_micro_batches=6)], num_devices, record=True)
        assert found.makespan_s == pytest.approx(4 * 6.0 / min(num_devices, 6))
        assert found.bound_s == pytest.approx(found.makespan_s)
        assert {placed.device for placed in found.schedule} == set(range(min(num_devices, 6)))
        validate(found.schedule, {"a": task().chain})

    def test_parts_that_differ_end_with_the_largest(self):
        found = simulate([task(num_steps=2, num_micro_batches=5)], 3)
        assert found.makespan_s == pytest.approx(2 * 6.0 * 2 / 5)
        assert found.bound_s == pytest.approx(found.makespan_s)

    def test_two_tasks_on_three_devices(self):
        """Two get one and two devices; when the second is through, the first gets all three."""
        tasks = [task(name, num_steps=num, num_micro_batches=6) for name, num in (("a", 30), ("b", 10))]
        found = simulate(tasks, 3, record=True)
        assert found.makespan_s == pytest.approx(found.bound_s, rel=0.05)
        last = max(placed.unit.step for placed in found.schedule)
        assert {placed.unit.part for placed in found.schedule if placed.unit.step == last} == {0, 1, 2}
        validate(found.schedule)

    def test_devices_are_shared_out_by_what_is_left(self):
        tasks = [task(name, num_steps=num, num_micro_batches=6) for name, num in (("a", 30), ("b", 10))]
        found = simulate(tasks, 3, record=True)
        parts = {name: {p.unit.part for p in found.schedule if p.unit[0] == name and p.unit.step == 3} for name in "ab"}
        assert {name: len(each) for name, each in parts.items()} == {"a": 2, "b": 1}

    def test_tail_of_a_sweep_uses_every_device(self):
        tasks = [task(str(k), num_steps=3 if k else 40, num_micro_batches=8) for k in range(9)]
        found = simulate(tasks, 4, record=True)
        assert found.busy_share > 0.95
        assert simulate([task(str(k), num_steps=3 if k else 40) for k in range(9)], 4).busy_share < 0.5

    def test_units_that_are_ordered_are_a_pipeline(self):
        #     device 0   |f0     |fb1    |b0     |
        #     device 1           |f0+1   |fb1+1  |b0+1   |       every unit goes on from what the part before it left
        cost = task("a", 1.0, 1.0, 1.0, num_micro_batches=2, ordered=frozenset({("f", 0), ("fb", 1)}))
        assert simulate([cost], 2).makespan_s == pytest.approx(4 * 0.5)

    def test_sums_wait_for_one_another_and_pieces_move_more(self):
        device = DeviceCost(load_bytes_per_s=1.0, store_bytes_per_s=1.0)
        # In one shard a sum would come when all is done; over a slow link pieces would take longer than computing.
        [_, quick] = predict_spreads(task("a", 9.0, num_micro_batches=2, gradient_bytes=0.1), [device] * 2)
        [_, slow] = predict_spreads(task("a", *[1.0] * 15, num_micro_batches=8, gradient_bytes=1.0), [device] * 2)
        alone = task("a", 9.0, num_micro_batches=2, gradient_bytes=0.1, adds_on_devices=True)
        [_, added] = predict_spreads(alone, [device] * 2)
        assert (quick.in_sums, slow.in_sums, added.in_sums) == (False, True, True)
        assert quick.speedup == pytest.approx(27.3 / (3 * 4.6 + 0.1), rel=0.02)
        assert ("b", 3) in slow.ordered
        assert ("f", 3) not in slow.ordered

    def test_bytes_of_parts(self):
        cost = task("a", num_micro_batches=2, load_bytes=10.0, boundary_bytes=(0.0, 4.0), gradient_bytes=7.0)
        device = DeviceCost(load_bytes_per_s=1e9, store_bytes_per_s=1e9)
        one, two = (simulate([cost], [device] * n) for n in (1, 2))
        assert sum(each.loaded_bytes for each in one.devices) == 3 * 10 + 4 + 4  # shards; up to fb1, gradient up to b0
        assert sum(each.stored_bytes for each in one.devices) == 4 + 4 + 2 * 7
        assert sum(each.loaded_bytes for each in two.devices) == 2 * 30 + 8  # pieces go down alone
        assert sum(each.stored_bytes for each in two.devices) == 4 + 4 + 2 * 2 * 7


class TestMemory:
    """What a device of so many bytes keeps between units: three shards of 10, boundaries of 1."""

    def run(self, memory_bytes, **options):
        settings = {"load_bytes": 10, "boundary_bytes": 1, "gradient_bytes": 10, "num_steps": 2} | options
        cost = task("a", 1.0, 1.0, 3.0, 3.0, 3.0, **settings)
        device = DeviceCost(memory_bytes=memory_bytes, load_bytes_per_s=1e9, store_bytes_per_s=1e9)
        return simulate([cost], [device], double_buffer=False, record=True)

    def test_nothing_stays_without_memory(self):
        assert self.run(None).devices[0].loaded_bytes == 2 * (5 * 10 + 3 + 2 * 2)

    def test_with_room_for_all_each_version_comes_up_once(self):
        assert self.run(100).devices[0].loaded_bytes == 2 * (3 * 10 + 1)  # and the batch

    def test_what_is_needed_last_goes_first(self):
        """Room for two shards: shard 0 goes, with the batch, and they are loaded again for its backward."""
        assert self.run(25).devices[0].loaded_bytes == 2 * (4 * 10 + 2)

    def test_frozen_shards_stay_from_step_to_step(self):
        frozen = TaskCost(name="a", unit_s=(1.0, 1.0, 3.0), num_shards=3, num_steps=5, load_bytes=10)
        found = simulate([frozen], [DeviceCost(memory_bytes=100)])
        assert found.devices[0].loaded_bytes == 2 * 10 + 5 * 10

    def test_kept_graphs_save_their_forwards(self):
        """And what a backward would start its forward from; of what is saved, a shard's copy is part."""
        assert self.run(100).makespan_s == pytest.approx(2 * 11.0)
        assert self.run(100, graph_bytes=(5, 5, 0)).makespan_s == pytest.approx(2 * 9.0)
        assert self.run(100, graph_bytes=(5, 5, 0)).devices[0].loaded_bytes == 2 * (3 * 10 + 1)
        assert self.run(100, graph_bytes=(90, 5, 0)).makespan_s == pytest.approx(2 * 10.0)
        assert self.run(100, graph_bytes=(5, 5, 0)).bound_s == 2 * 9.0
        assert self.run(None, graph_bytes=(5, 5, 0)).bound_s == 2 * 11.0

    @pytest.mark.parametrize(("memory_bytes", "step_s"), [(100, 5.0), (99, 7.0)])
    def test_a_shard_is_loaded_beside_a_unit_if_both_fit(self, memory_bytes, step_s):
        """Two tasks of one shard: 2 s to load it, 5 s to compute; work of 80 beside two slabs of 10."""
        tasks = [task(name, 5.0, num_steps=9, load_bytes=10, work_bytes=80) for name in "ab"]
        found = simulate(tasks, [DeviceCost(memory_bytes=memory_bytes, load_bytes_per_s=5.0)])
        assert found.makespan_s == pytest.approx(18 * step_s + (2 if step_s == 5 else 0))

    @pytest.mark.parametrize(("forward_bytes", "makespan_s"), [(None, 21.0), (79, 19.0)])
    def test_forwards_that_keep_nothing_take_less(self, forward_bytes, makespan_s):
        """Three units of 5 s; a load of 2 s before each, but for the one that goes on beside the forward."""
        cost = task("a", 5.0, 5.0, 5.0, num_steps=1, load_bytes=10, work_bytes=80, forward_bytes=forward_bytes)
        found = simulate([cost], [DeviceCost(memory_bytes=99, load_bytes_per_s=5.0)])
        assert found.makespan_s == pytest.approx(makespan_s)

    def test_gradients_keep_their_bytes_until_they_are_in_dram(self):
        """The next unit's work does not fit beside them: 5 s to compute, 2 s to store."""
        tasks = [task(name, 5.0, num_steps=9, gradient_bytes=10, work_bytes=80) for name in "ab"]
        seconds = [
            simulate(tasks, [DeviceCost(memory_bytes=memory_bytes, store_bytes_per_s=5.0)]).makespan_s
            for memory_bytes in (90, 89)
        ]
        assert seconds == pytest.approx([18 * 5 + 2, 18 * 7])

    def test_parts_keep_graphs_of_their_own_micro_batches(self):
        cost = task("a", 1.0, 1.0, 2.0, num_micro_batches=2, load_bytes=1, graph_bytes=30)
        found = simulate([cost], [DeviceCost(memory_bytes=20)] * 2)
        assert found.makespan_s == pytest.approx(1.5)

    def test_a_shard_that_is_dropped_and_claimed_again_is_not_there_sooner(self):
        slow = task("slow", 1.0, num_steps=1, load_bytes=10, read_s=0.5)
        quick = [task(str(k), 1.0, num_steps=3, priority=1, read_s=0.9) for k in range(2)]
        device = DeviceCost(memory_bytes=100, load_bytes_per_s=1.0)
        found = simulate([slow, *quick], [device], record=True)
        [placed] = [placed for placed in found.schedule if placed.unit.task == "slow"]
        assert placed.start_s >= 10.5

    def test_what_can_never_fit_is_refused(self):
        with refused(ValueError, task="a", says="30 memory_bytes 20"):
            simulate([task("a", 1.0, load_bytes=10, work_bytes=20)], [DeviceCost(memory_bytes=20)])

    def test_a_forward_below_all_that_trains_keeps_nothing(self):
        cost = TaskCost(name="a", unit_s=(1.0, 1.0, 3.0), num_shards=3, num_steps=50, load_bytes=10, graph_bytes=30)
        found = simulate([cost], [DeviceCost(memory_bytes=100)])
        assert found.devices[0].loaded_bytes == 2 * 10 + 50 * 10

    def test_set_up_and_end_are_of_the_makespan(self):
        assert self.run(100, setup_s=2.0, end_s=0.5).makespan_s == pytest.approx(2 * 11.0 + 2.5)


class TestHomes:
    """Two shards of 4 bytes, which take 2 s to load and as long for their gradients; 5 s to update, and 0.5 at home."""

    def cost(self, name="a", **options):
        settings = {"num_steps": 2, "load_bytes": 4, "gradient_bytes": 4, "update_s": 5.0, "work_bytes": 3}
        settings |= {"homes": 2, "home_bytes": 10, "home_update_s": 0.5} | options
        return task(name, 1.0, 1.0, 1.0, **settings)

    def run(self, memory_bytes=100, num_devices=1, tasks=None, changes=(), **options):
        device = DeviceCost(memory_bytes=memory_bytes, load_bytes_per_s=2.0, store_bytes_per_s=2.0)
        tasks = [self.cost(**options)] if tasks is None else tasks
        return simulate(tasks, [device] * num_devices, changes=changes, record=True)

    def starts(self, found):
        return [(str(placed.unit), placed.start_s) for placed in found.schedule]

    def test_all_at_home_load_and_store_nothing_and_the_device_updates(self):
        #  |f0|fb1|b0|u0|u1|f0|fb1|b0|u0|u1|
        found = self.run()
        assert [start_s for _, start_s in self.starts(found)] == [0.0, 1.0, 2.0, 4.0, 5.0, 6.0]
        assert found.makespan_s == 8.0
        assert found.devices[0].busy == {"load": 0.0, "compute": 1.0, "store": 0.0}
        assert (found.devices[0].loaded_bytes, found.devices[0].stored_bytes) == (0, 0)
        assert found.bound_s == 2 * 3.0 + 0.5  # it may not find room, but the lowest shard's update is waited for

    def test_the_lowest_shard_at_home_is_updated_beside_the_other_ones_update(self):
        #  load 1     |   2   |                                        |   2   |
        #  device     |f0 1|  |fb1|b0|  |u0 .5|f0|                             |fb1|b0|
        #  gradients              |  2  |                                          |  2  |
        #  host                         |      u1 5                    |                 |   u1 5   |
        found = self.run(homes=1)
        assert [start_s for _, start_s in self.starts(found)] == [0.0, 2.0, 3.0, 5.5, 12.0, 13.0]
        assert found.makespan_s == 20.0
        assert (found.devices[0].loaded_bytes, found.devices[0].stored_bytes) == (2 * 4, 2 * 4)

    @pytest.mark.parametrize(("memory_bytes", "num_loads"), [(23, 0), (22, 2), (21, 2), (20, 4)])
    def test_homes_leave_room_for_a_unit_and_two_slabs_that_are_loaded(self, memory_bytes, num_loads):
        """Work of 3: both homes of 10 beside it, or one beside two slabs of 4, or none."""
        assert self.run(memory_bytes).devices[0].loaded_bytes == num_loads * 4

    def test_no_unit_gets_the_bytes_of_a_home(self):
        """A graph of 77 has room beside work and one home, not beside both."""
        graph_bytes = (77, 0)
        assert self.run(100, graph_bytes=graph_bytes).makespan_s == 8.0 - 2.0  # no forward runs again
        assert self.run(99, graph_bytes=graph_bytes).makespan_s == 8.0

    def test_what_is_frozen_of_a_shard_at_home_is_loaded_once(self):
        assert self.run(frozen_bytes=(1, 3), num_steps=5).devices[0].loaded_bytes == 4

    def test_shards_without_bytes_of_a_home_have_none(self):
        assert self.run(home_bytes=(0, 10)).devices[0].loaded_bytes == 2 * 4
        assert self.run(home_bytes=0).makespan_s == self.run(homes=0).makespan_s
        assert self.run(None).makespan_s == self.run(None, homes=0).makespan_s

    def test_tasks_take_turns_and_updates_go_between_units(self):
        """Room for three homes: the second task's upper shard has none."""
        tasks = [self.cost(name, num_steps=1) for name in "ab"]
        found = self.run(3 + 2 * 4 + 30, tasks=tasks)
        assert found.devices[0].loaded_bytes == 4
        assert found.devices[0].busy["compute"] * found.makespan_s == pytest.approx(2 * 3.0 + 3 * 0.5)

    def test_each_device_updates_its_own(self):
        tasks = [self.cost(name, num_steps=4) for name in "ab"]
        assert self.run(23, 2, tasks).makespan_s == 4 * 4.0
        assert self.run(23, 2, tasks[:1]).makespan_s == 4 * 4.0

    def test_units_run_where_their_shard_is_at_home(self):
        """A device has room for one home beside a unit; what one shard leaves goes by DRAM."""
        found = self.run(13, 2)
        assert {(placed.unit.shard, placed.device) for placed in found.schedule} == {(0, 0), (1, 1)}
        assert found.makespan_s == 2 * 3.0 + 2 * 0.5  # side by side
        passing = self.run(13, 2, boundary_bytes=(0, 2))  # a second each way, twice a step
        assert passing.makespan_s == found.makespan_s + 2 * 2 * 2

    def test_a_task_with_homes_is_not_spread(self):
        assert self.run(23, 2, num_micro_batches=2).makespan_s == 8.0
        assert self.run(23, 2, num_micro_batches=2).bound_s == 6.5

    def test_homes_come_to_the_room_of_a_task_that_has_ended(self):
        """The longer task, begun first, has both; from the other's third step on, there is room for that one's."""
        tasks = [self.cost("a", home_bytes=11, num_steps=1), self.cost("b", num_steps=9)]
        found = self.run(25, tasks=tasks)
        assert 0 < found.devices[0].loaded_bytes < 9 * 8
        last = [placed for placed in found.schedule if placed.unit.step == 8]
        assert last[-1].end_s - last[0].start_s == 3.0  # nothing is loaded in between

    def test_homes_of_a_device_that_goes_are_in_dram_or_on_another_one(self):
        two = self.run(23, 2, changes=[goes(2.5)], num_steps=3)
        assert two.makespan_s == 3 * 4.0  # homes move with their gradients, and the other device makes the updates
        assert [placed.device for placed in two.schedule] == [0] * 3 + [1] * 6
        assert two.devices[1].loaded_bytes == 0
        back = self.run(23, changes=[goes(3.5), comes(20.0)], num_steps=3)
        assert back.makespan_s == 20.0 + 8.0
        smaller = self.run(23, 2, changes=[goes(3.5)], tasks=[self.cost(num_steps=9), self.cost("b", num_steps=9)])
        assert smaller.devices[1].loaded_bytes > 0

    def test_homes_cross_the_link_as_they_come_and_as_they_leave(self):
        """Three seconds each, one after the other."""
        found = self.run(move_bytes=6)
        assert [start_s for _, start_s in self.starts(found)] == [6.0, 7.0, 8.0, 10.0, 11.0, 12.0]
        assert found.makespan_s == 2 * 3.0 + 8.0 + 2 * 3.0
        assert (found.devices[0].loaded_bytes, found.devices[0].stored_bytes) == (2 * 6, 2 * 6)

    def test_homes_of_a_device_that_goes_cross_two_links(self):
        #  14  15    17.5   20.5    21.5  23.5
        #  |f0@2|                   |fb1@2|   |b0@2|    the first device leaves at 14.5
        #    | down 1 | down 0|                         as soon as nothing uses them
        #             | up 1  | up 0     |
        found = self.run(23, 2, changes=[goes(14.5)], num_steps=3, move_bytes=6)
        gone, other = found.devices
        assert (gone.loaded_bytes, gone.stored_bytes) == (other.loaded_bytes, other.stored_bytes) == (12, 12)
        assert [placed.device for placed in found.schedule] == [0] * 7 + [1] * 2
        assert [start_s for _, start_s in self.starts(found)][-3:] == [14.0, 20.5, 23.5]
        assert found.makespan_s == 24.5 + 2 * 0.5 + 2 * 3.0

    @pytest.mark.parametrize("seed", range(30))
    def test_nothing_waits_for_ever_where_devices_go_while_homes_come_there(self, seed):
        rng, at_s, changes = random.Random(seed), 0.0, []
        for _ in range(4):
            for comes_back in (False, True):
                at_s += rng.uniform(0, 5)
                changes.append(
                    DeviceChange(at_s, rng.randrange(2) if not comes_back else changes[-1].device, comes_back)
                )
        tasks = [self.cost(name, move_bytes=rng.choice((3, 20)), num_steps=rng.randint(1, 9)) for name in "ab"]
        assert len(self.run(rng.choice((20, 23, 25)), 2, tasks, changes).finished_s) == 2

    def test_early_release_has_no_homes(self):
        with refused(ValueError, task="a", says="homes early_release"):
            self.cost(early_release=True)


def goes(at_s, device=0):
    return DeviceChange(at_s, device, False)


def comes(at_s, device=0):
    return DeviceChange(at_s, device, True)


class TestChanges:
    """Devices that come and go; a task of units of 1, 2 and 3 s."""

    def placed(self, changes, devices=1, **options):
        found = simulate([task(**options)], devices, changes=changes, record=True)
        return [(str(each.unit), each.device, each.start_s, each.end_s) for each in found.schedule], found

    def test_a_device_that_goes_ends_its_unit_and_goes_on_when_it_is_back(self):
        schedule, found = self.placed([goes(0.5), comes(4.0)])
        assert schedule == [("a.f0@0", 0, 0.0, 1.0), ("a.fb1@0", 0, 4.0, 6.0), ("a.b0@0", 0, 6.0, 9.0)]
        assert found.devices[0].in_s == 1.0 + 5.0
        assert found.busy_share == 1.0
        assert found.bound_s == 4.0 + 2.5  # before it goes it may have begun a unit of 3 s

    def test_another_device_goes_on(self):
        schedule, found = self.placed([goes(0.5)], 2)
        assert schedule == [("a.f0@0", 0, 0.0, 1.0), ("a.fb1@0", 1, 1.0, 3.0), ("a.b0@0", 1, 3.0, 6.0)]
        assert [device.in_s for device in found.devices] == [1.0, 6.0]

    def test_a_device_that_comes_back_before_its_unit_is_through_stays(self):
        for changes in ([goes(0.2), comes(0.5)], [goes(0.2), comes(0.5), goes(0.6), comes(0.6)]):
            schedule, found = self.placed(changes)
            assert [start_s for _, _, start_s, _ in schedule] == [0.0, 1.0, 3.0]
            assert found.devices[0].in_s == 6.0

    def test_a_device_that_comes_later_is_one_that_goes_at_first(self):
        tasks = [task(name, num_steps=5) for name in "ab"]
        found = simulate(tasks, 2, changes=[comes(30.0, 1), goes(0.0, 1)], record=True)
        assert {placed.device for placed in found.schedule if placed.end_s <= 30.0} == {0}
        assert found.makespan_s == 45.0
        assert found.bound_s == 45.0
        assert found.busy_share == 1.0

    def test_a_step_is_spread_over_the_devices_that_are_in_when_it_begins(self):
        found = simulate([task(num_steps=4, num_micro_batches=2)], 2, changes=[goes(4.0, 1), comes(12.0, 1)])
        #   two devices 3 s, and a step that has begun on two ends on one: 6 s; one 6 s; two 3 s
        assert found.makespan_s == pytest.approx(3.0 + 4.5 + 6.0 + 3.0, abs=1.0)
        assert found.bound_s <= found.makespan_s

    def test_steps_are_spread_only_once_tasks_are_fewer_than_devices(self):
        tasks = [task(str(k), 1.0, 2.0, num_steps=n, num_micro_batches=6) for k, n in enumerate([1, 2, 2, 8])]
        found = simulate(tasks, 3, record=True)
        parts = {step: {each.unit.part for each in found.schedule if each.unit.step == step} for step in range(8)}
        assert parts[0] == {0}
        assert parts[7] == {0, 1, 2}

    def test_what_was_on_a_device_is_gone_when_it_comes_back(self):
        """Shard 0, and shard 1 that was loaded while shard 0 computed."""
        cost = task(num_steps=2, load_bytes=10)
        device = DeviceCost(memory_bytes=100)
        assert simulate([cost], [device]).devices[0].loaded_bytes == 2 * 20
        assert simulate([cost], [device], changes=[goes(0.5), comes(2.0)]).devices[0].loaded_bytes == 2 * 20 + 20

    def test_changes_after_the_end_change_nothing(self):
        tasks = random_tasks(random.Random(1), 3)
        assert simulate(tasks, 2, changes=[goes(1e9, 0), goes(1e9, 1)], record=True) == simulate(tasks, 2, record=True)

    @pytest.mark.parametrize("policy", sorted(POLICIES))
    def test_a_device_that_goes_at_once_is_none(self, policy):
        for seed in range(4):
            rng = random.Random(seed)
            tasks = [
                task(str(k), 0.5, 1.0, rng.uniform(0.5, 2.0), num_steps=3, num_micro_batches=rng.choice((1, 3)))
                for k in range(rng.randint(1, 4))
            ]
            devices = [DeviceCost(memory_bytes=30, load_bytes_per_s=9.0, variation=0.1)] * rng.randint(1, 3)
            one, other = (
                simulate(tasks, devices, policy, record=True),
                simulate(tasks, [*devices, devices[0]], policy, changes=[goes(0, len(devices))], record=True),
            )
            assert other.devices[-1].in_s == other.devices[-1].num_units == 0
            assert (other.makespan_s, other.bound_s, other.schedule) == (one.makespan_s, one.bound_s, one.schedule)
            assert other.busy_share == pytest.approx(one.busy_share)

    @pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 20), marks=pytest.mark.rest)], ids=str)
    @pytest.mark.parametrize("policy", sorted(POLICIES))
    def test_random_changes_never_beat_the_bound_nor_run_a_unit_twice(self, policy, seeds):
        for seed in seeds:
            rng = random.Random(seed)
            options = {"load_bytes": 3, "boundary_bytes": 1, "gradient_bytes": 2, "graph_bytes": 4, "work_bytes": 1}
            tasks = [
                task(
                    str(k),
                    *(rng.choice((0.5, 1.0, 4.0)) for _ in range(rng.choice((1, 3, 5)))),
                    num_steps=rng.randint(1, 4),
                    num_micro_batches=rng.choice((1, 1, 3)),
                    setup_s=rng.choice((0.0, 1.0)),
                    update_s=rng.choice((0.0, 0.2)),
                    **(options if rng.random() < 0.5 else {}),
                )
                for k in range(rng.randint(1, 5))
            ]
            devices = [
                DeviceCost(
                    speed=rng.choice((1.0, 2.0)),
                    load_bytes_per_s=rng.choice((None, 3.0)),
                    store_bytes_per_s=rng.choice((None, 3.0)),
                    memory_bytes=rng.choice((None, 8, 1000)),
                )
                for _ in range(rng.randint(1, 4))
            ]
            changes, is_in, at_s = [], [True] * len(devices), 0.0
            for _ in range(rng.randint(1, 60)):
                at_s += rng.choice((0.0, 0.5, rng.expovariate(1.0)))
                k = rng.randrange(len(devices))
                is_in[k] = not is_in[k]
                changes.append(DeviceChange(at_s, k, is_in[k]))
            changes += [comes(at_s + 1.0, k) for k, here in enumerate(is_in) if not here]
            latest_first = sorted(changes, key=lambda change: -change.at_s)
            found = simulate(tasks, devices, policy, changes=latest_first, record=True)
            assert found == simulate(tasks, devices, policy, changes=changes, record=True)
            assert found.bound_s <= found.makespan_s + 1e-9
            assert 0 <= found.busy_share <= 1 + 1e-9
            validate(found.schedule, {each.name: each.chain for each in tasks})
            whole = [placed for placed in found.schedule if placed.unit.part == 0]
            assert len(whole) == sum(len(each.unit_s) * each.num_steps for each in tasks)
            assert len({placed.unit for placed in found.schedule}) == len(found.schedule)
            for k in range(len(devices)):
                mine = [change for change in changes if change.device == k]
                for gone, back in zip(mine[::2], mine[1::2], strict=True):
                    begun = [p for p in found.schedule if p.device == k and gone.at_s < p.start_s < back.at_s]
                    assert len(begun) <= 1, "the unit that it had, whose shard came late"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_schedule_of_random_tasks_is_valid_and_the_same_each_time(policy):
    rng = random.Random(3)
    for _ in range(8):
        tasks = [
            task(
                str(k),
                *(rng.choice((0.0, 0.5, 2.0)) for _ in range(rng.choice((1, 3, 4, 7)))),
                num_steps=rng.randint(1, 4),
                load_bytes=rng.choice((0, 1, 5)),
                boundary_bytes=rng.choice((0, 1)),
                gradient_bytes=rng.choice((0, 2)),
                update_s=rng.choice((0.0, 0.3)),
                commit_s=rng.choice((0.0, 0.1)),
                read_s=rng.choice((0.0, 0.7)),
                work_bytes=rng.choice((0, 3)),
                graph_bytes=rng.choice((0, 4)),
                num_micro_batches=rng.choice((1, 1, 3)),
                early_release=rng.random() < 0.3,
            )
            for k in range(rng.randint(1, 6))
        ]
        devices = [
            DeviceCost(
                speed=rng.choice((1.0, 2.0)),
                load_bytes_per_s=rng.choice((None, 3.0)),
                memory_bytes=rng.choice((None, 8, 30, 1000)),
            )
            for _ in range(3)
        ]
        host = HostCost(optimizer_threads=rng.randint(1, 2), cores=rng.choice((None, 1.5)))
        double_buffer = rng.random() < 0.7

        def run(tasks=tasks, devices=devices, host=host, double_buffer=double_buffer):
            return simulate(tasks, devices, policy, host=host, double_buffer=double_buffer, record=True)

        found = run()
        assert found == run()
        validate(found.schedule, {each.name: each.chain for each in tasks})
        assert found.num_units == len(found.schedule)
        whole = [placed for placed in found.schedule if placed.unit.part == 0]
        assert len(whole) == sum(len(each.unit_s) * each.num_steps for each in tasks)
        assert found.bound_s <= found.makespan_s + 1e-9
        assert 0 <= found.busy_share <= 1 + 1e-9


@pytest.mark.rest
def test_memory_does_not_grow_with_the_units_run():
    def peak_bytes(num_steps):
        gc.collect()  # or it depends on when the collector comes
        tracemalloc.start()
        simulate([task(str(k), 1.0, 2.0, 3.0, num_steps=num_steps) for k in range(5)], 4)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    peak_bytes(5)
    assert peak_bytes(100) <= 1.2 * peak_bytes(20)


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("empty", lambda: simulate([])),
        ("devices", lambda: simulate([task()], 0)),
        ("2 'a'", lambda: simulate([task(), task()])),
        ("'longest'", lambda: simulate([task()], 1, "longest")),
        ("device 2 1", lambda: simulate([task()], 2, changes=[goes(1.0, 2)])),
        ("device -1", lambda: simulate([task()], 2, changes=[goes(1.0, -1)])),
        ("at_s -1.0", lambda: simulate([task()], 2, changes=[goes(-1.0)])),
        ("at_s 'soon'", lambda: simulate([task()], 2, changes=[goes("soon")])),
        ("3 0 in", lambda: simulate([task()], 2, changes=[comes(3.0)])),
        ("3 0 out", lambda: simulate([task()], 2, changes=[goes(3.0), goes(2.0)])),
        ("changes 3 a", lambda: simulate([task()], 2, changes=[goes(1.5), goes(0, 1)])),
        ("a 0", lambda: task("a", -1.0)),
        ("a nan", lambda: task("a", math.nan)),
        ("num_steps", lambda: task(num_steps=0)),
        ("load_bytes 3 2", lambda: task(load_bytes=(1, 2, 3))),
        ("weight", lambda: task(weight=0.0)),
        ("num_micro_batches", lambda: task(num_micro_batches=0)),
        ("num_micro_batches a 2.5", lambda: task(num_micro_batches=2.5)),
        ("num_micro_batches a '3'", lambda: task(num_micro_batches="3")),
        ("num_steps a 2.5", lambda: task(num_steps=2.5)),
        ("ordered", lambda: task(ordered={("forward", 9)})),
        ("unit_s -0.5", lambda: DeviceCost(unit_s=-0.5)),
        ("unit_s nan", lambda: DeviceCost(unit_s=math.nan)),
        ("variation -0.1", lambda: DeviceCost(variation=-0.1)),
        ("first_step_times a 0.5", lambda: task(first_step_times=0.5)),
        ("speed 'x'", lambda: DeviceCost(speed="x")),
        ("devices", lambda: bound_s([task()], 0)),
        ("num_shards 4 3", lambda: task(num_shards=4)),
        ("num_shards 1 3", lambda: task(num_shards=1)),
        ("unit_s", lambda: TaskCost(name="a", unit_s=())),
        ("speed", lambda: DeviceCost(speed=0.0)),
        ("load_bytes_per_s", lambda: DeviceCost(load_bytes_per_s=-1.0)),
        ("optimizer_threads", lambda: HostCost(optimizer_threads=0)),
        ("cores", lambda: HostCost(cores=0)),
    ],
)
def test_what_cannot_be_simulated_is_refused(words, call):
    with refused((TypeError, ValueError), says=words):
        call()


def test_unit_that_is_drawn_is_the_schedulers():
    [first, *_] = simulate([task()], 1, record=True).schedule
    assert first.unit == Unit("a", "f", 0, 0)
