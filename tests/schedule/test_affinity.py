"""Who goes on with a task: the device that has begun it, as long as others have enough to do."""

import pytest

from hydra_engine import DeviceChange, DeviceCost, TaskCost, simulate
from hydra_engine.schedule.policies import ShardedLRTF

GRAPH = 1000  # bytes of a unit's graph
ROOMY = DeviceCost(load_bytes_per_s=1e4, store_bytes_per_s=1e4, memory_bytes=20 * GRAPH)


class Roaming(ShardedLRTF):
    """Sharded-LRTF where any device takes the longest task."""

    has_affinity = False


def task(name, num_steps=5, **options):
    options = {"unit_s": [1.0, 2.0, 2.0], "load_bytes": 100, "boundary_bytes": 10, "update_s": 0.1} | options
    return TaskCost(name=name, num_steps=num_steps, num_shards=2, **options)


def devices_of(found):
    """The devices that ran each task's units, in order and without those that follow themselves."""
    devices = {}
    for placed in sorted(found.schedule, key=lambda placed: placed.start_s):
        of_task = devices.setdefault(placed.unit.task, [])
        if of_task[-1:] != [placed.device]:
            of_task.append(placed.device)
    return devices


@pytest.mark.parametrize("num_tasks", [4, 6, 16])
def test_equal_tasks_stay_on_the_device_that_has_begun_them(num_tasks):
    found = simulate([task(str(k)) for k in range(num_tasks)], [ROOMY] * 2, record=True)
    assert all(len(devices) == 1 for devices in devices_of(found).values())
    assert found.makespan_s < 1.05 * found.bound_s


def test_a_few_tasks_are_begun_at_a_time_the_longest_first():
    """Until few are left, which are near the critical path then."""
    tasks = [task(str(k), num_steps=4 + k) for k in range(20)]
    found = simulate(tasks, [ROOMY] * 2, record=True)
    begins, ends = {}, {}
    for placed in found.schedule:
        begins[placed.unit.task] = min(begins.get(placed.unit.task, placed.start_s), placed.start_s)
        ends[placed.unit.task] = max(ends.get(placed.unit.task, 0.0), placed.end_s)
    order = sorted(begins, key=begins.get)[:12]
    assert all(abs(19 - position - int(name)) <= 2 for position, name in enumerate(order))  # some have about as long
    for name, begin_s in ((name, begins[name]) for name in order):
        in_progress = [each for each in begins if begins[each] < begin_s < ends[each]]
        assert len(in_progress) <= 6, name  # three for each device, with the new one


def test_graphs_that_are_kept_are_there_for_the_backward():
    """Elsewhere a backward would run its forward again, which is a fifth of the time here."""
    tasks = [task(str(k), 4 + k, unit_s=[1.0, 2.0 + k / 8, 2.0], graph_bytes=[GRAPH, 0]) for k in range(12)]
    kept, roaming = (simulate(tasks, [ROOMY] * 2, policy, record=True) for policy in ("sharded-lrtf", Roaming()))
    assert kept.makespan_s < 1.05 * kept.bound_s
    assert roaming.makespan_s > 1.1 * kept.makespan_s


def test_a_device_that_would_be_idle_takes_what_another_has_begun():
    found = simulate([task("long", 20), task("a", 2), task("b", 2), task("c", 20)], [ROOMY] * 2, record=True)
    assert found.makespan_s < 1.1 * found.bound_s
    found = simulate([task(str(k), 6) for k in range(3)], [ROOMY] * 2, record=True)
    assert found.makespan_s < 1.1 * found.bound_s


def test_a_task_on_the_critical_path_goes_before_what_a_device_has_begun():
    tasks = [task("long", 60), *(task(str(k), 4) for k in range(12))]
    found = simulate(tasks, [ROOMY] * 2, record=True)
    roaming = simulate(tasks, [ROOMY] * 2, Roaming())
    assert found.makespan_s < 1.01 * roaming.makespan_s


def test_priority_goes_before_what_a_device_has_begun():
    tasks = [task("a"), task("b"), task("urgent", priority=1, read_s=2.0)]
    found = simulate(tasks, [ROOMY], record=True)
    ends = {placed.unit.task: placed.end_s for placed in found.schedule}
    assert ends["urgent"] < min(ends["a"], ends["b"])


def test_what_a_device_has_begun_is_anybodys_once_it_goes():
    """They have longer to go than those that nobody has begun, so they come before them."""
    tasks = [task(str(k), 20 if k < 4 else 10) for k in range(8)]
    found = simulate(tasks, [ROOMY] * 2, changes=[DeviceChange(20.0, 1, False)], record=True)
    firsts = {}  # on device 0, once it is alone
    for placed in sorted(found.schedule, key=lambda placed: placed.start_s):
        if placed.device == 0 and placed.start_s > 21.0:
            firsts.setdefault(placed.unit.task, placed.start_s)
    begun = {placed.unit.task for placed in found.schedule if placed.start_s < 21.0}
    assert begun == {"0", "1", "2", "3", "4", "5"}
    assert {placed.unit.task for placed in found.schedule if placed.device == 1} == {"1", "3", "5"}
    assert max(firsts["1"], firsts["3"]) < min(firsts["6"], firsts["7"])
