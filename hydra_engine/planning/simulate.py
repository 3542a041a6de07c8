"""Predicts a run: discrete events through the very scheduler that decides in a real one.

    simulate([TaskCost(name="a", unit_s=(0.1, 0.2, 0.3), num_steps=50)], devices=8).makespan_s

What a device, its links and the host take time for is modelled as the engine does it:

    Load     the shard's parameters, over the link to the device, one copy after the other
    Run      what the unit starts from, once the unit before it has sent that to DRAM, over the same link and before any
             shard that is on its way there; then its seconds
    Computed -> its output, then its gradients, over the link to DRAM -> Stored
    Commit, Update                      a pool of threads of the host
    Update of a shard at home           the device, between two units; nothing of the shard crosses the link
    Move     the state of each home, over the link of the device that it comes to, or leaves
    all that computes, where asked      shares the host's cores evenly
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, pairwise

from hydra_engine.planning.costs import DeviceChange, DeviceCost, HostCost, TaskCost, in_order
from hydra_engine.planning.world import Simulation, World
from hydra_engine.schedule import BACKWARD, FUSED, Policy, Scheduler, Spread, part_ranges, resolve_policy
from partitioners.plain_numbers import plain

# A prediction's steps: in the first nothing is loaded ahead.
PREDICTED_STEPS = 3
# A speedup that nobody chooses.
NEVER = 1e-9
# Tasks whose spreads are remembered: a search simulates the same ones again and again.
MOST_KNOWN = 1024
# Gradients are sent down one by one, and wait in DRAM, where that takes less than this share of the time.
WORTH_DRAM = 0.95


# More than seven parameters: it is public, and seven of them are settings that are named one by one.
def simulate(
    tasks: Sequence[TaskCost],
    devices: int | Sequence[DeviceCost] = 1,
    policy: str | Policy = "sharded-lrtf",
    *,
    host: HostCost | None = None,
    changes: Sequence[DeviceChange] = (),
    double_buffer: bool = True,
    record: bool = False,
    scheduler: Scheduler | None = None,
    seed: int = 0,
) -> Simulation:
    """Simulate training tasks to their end.

    Takes memory for tasks, devices and what is under way, and with `record` for every unit.

    Args:
        tasks: at least one, of different names.
        devices: a number of equal devices whose links take no time, or what each device takes.
        policy: as `ModelOrchestrator`'s.
        host: what the host has; default: one optimizer thread, and cores enough.
        changes: of the devices, in any order; at one time in their own. All devices are in at first: one that comes
            later goes at 0 s.
        double_buffer: load the next unit's shard while one computes.
        record: keep the schedule.
        scheduler: who decides, in place of a `Scheduler` of that policy: one that measures itself, say.
        seed: of what is drawn, where devices' seconds vary.

    Raises ValueError for what cannot be simulated.
    """
    costs = _devices(devices)
    if not tasks:
        raise ValueError("tasks: empty list; give at least one TaskCost")
    if not costs:
        raise ValueError(f"devices: {devices!r}; give at least one")
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"tasks: {names.count(twice)} are named {twice!r}; give each a name of its own")
    if scheduler is None:
        scheduler = Scheduler(resolve_policy(policy), double_buffer=double_buffer)
    host = host or HostCost()
    changes = in_order(changes, len(costs))
    _check_fit(tasks, costs)
    spreads = [
        _known_spreads(alike(task), tuple(costs), host=host) if may_spread(task, len(costs)) else (Spread(),)
        for task in tasks
    ]
    world = World(tasks, spreads, costs, host, changes=changes, record=record, seed=plain(seed))
    world.run(scheduler)
    return world.result(bound_s(tasks, costs, changes))


def may_spread(task: TaskCost, num_devices: int) -> bool:
    """Return True if a task's steps may be spread; with early release shards are updated before a step is through.

    Units of a shard at home run on one device.
    """
    return min(task.num_micro_batches, num_devices) > 1 and not (task.early_release or task.homes)


def num_spread_units(task: TaskCost, num_devices: int) -> int:
    """Count the units that `predict_spreads` simulates at most."""
    number = min(task.num_micro_batches, num_devices) if may_spread(task, num_devices) else 0
    return PREDICTED_STEPS * len(task.unit_s) * max(0, 2 * number - 1)


def alike(task: TaskCost) -> TaskCost:
    """Return the cost of a step of a task, by which tasks are compared."""
    return replace(task, name="", num_steps=1, priority=0, weight=1.0)


def _check_fit(tasks: Sequence[TaskCost], devices: Sequence[DeviceCost]) -> None:
    """Refuse shards that no schedule could bring onto a device."""
    smallest = min((device.memory_bytes for device in devices if device.memory_bytes is not None), default=math.inf)
    for task in tasks if smallest < math.inf else ():
        for j in range(task.num_shards):
            needed = task.of_shard("load_bytes", j) + task.of_shard("work_bytes", j)
            if needed > smallest:
                raise ValueError(
                    f"shard {j} of {task.name} takes {needed:.0f} bytes with its work, memory_bytes of a device: "
                    f"{smallest:.0f}; give it more, or cut the task into smaller shards"
                )


def _devices(given: int | Sequence[DeviceCost]) -> list[DeviceCost]:
    given = plain(given)
    return [DeviceCost()] * given if isinstance(given, int) else list(given)


def bound_s(
    tasks: Sequence[TaskCost], devices: int | Sequence[DeviceCost], changes: Sequence[DeviceChange] = ()
) -> float:
    """Seconds that no schedule is faster than: max(max T, sum T / devices) where devices are equal and all stay.

    T is all of a task's units, with what of its commits and updates they wait for; where devices have memory to keep
    graphs in, no forward that can be kept is run again. A task's units run one after the other; where a step may be
    spread over several devices, those of the part with most micro-batches. In general, k tasks cannot be through before
    the k fastest devices could compute them (Horvath, Lam and Sethi 1977).

    Where devices come and go, the fastest of those that are in are added up over time. A device that goes counts for
    the longest unit more, which it may have begun.
    """
    costs = _devices(devices)
    if not costs:
        raise ValueError(f"devices: {devices!r}; give at least one")
    teams = _teams(costs, in_order(changes, len(costs)), max(max(task.unit_s) for task in tasks))
    most_at_once = max(len(team) for _, team in teams)
    if most_at_once == 0:
        return math.inf
    keeps = any(cost.memory_bytes is not None for _, team in teams for cost in team)
    units_s = {task.name: task.num_steps * (task.least_step_s if keeps else task.step_s) for task in tasks}
    bounds = [_through_s(sum(units_s.values()), len(costs), teams)]
    work_s, most = 0.0, 0
    for task in sorted(tasks, key=lambda task: units_s[task.name], reverse=True):
        work_s, most = work_s + units_s[task.name], most + task.num_micro_batches
        bounds.append(_through_s(work_s, most, teams))
    fastest = max(team[0].speed for _, team in teams if team)
    for task in tasks:
        lowest, number = task.lowest_backward, task.num_micro_batches
        most_parts = min(number, most_at_once) if may_spread(task, most_at_once) else 1
        share = max(end - first for first, end in part_ranges(number, most_parts)) / number
        bounds.append(_through_s(share * units_s[task.name], 1, teams))
        waits_s = task.commit_s * task.num_steps
        if not task.early_release:  # else the lowest shard's update goes on beside the commit
            update_s = task.of_shard("update_s", 0)
            if task.homes:
                update_s = min(update_s, task.of_shard("home_update_s", 0) / fastest)
            waits_s += (task.num_steps - 1) * update_s if lowest == 0 else 0.0
        bounds.append(share * units_s[task.name] / fastest + waits_s + task.setup_s + task.end_s)
    return max(bounds)


def _teams(
    devices: Sequence[DeviceCost], changes: Sequence[DeviceChange], longest_s: float
) -> list[tuple[float, list[DeviceCost]]]:
    """Return the devices that may compute, the fastest first, from each time on at which they change.

    One that is to go may compute its unit to the end. It counts for the longest one more, unless it came just then.
    """
    since_s = [0.0] * len(devices)
    comings = [(0.0, index, 1) for index in range(len(devices))]
    for at_s, index, is_in in changes:
        if is_in:
            since_s[index] = at_s
            comings.append((at_s, index, 1))
        else:
            more_s = longest_s / devices[index].speed if since_s[index] < at_s else 0.0
            comings.append((at_s + more_s, index, -1))
    numbers, teams = [0] * len(devices), []
    for at_s, together in groupby(sorted(comings), key=lambda coming: coming[0]):
        for _, index, number in together:
            numbers[index] += number
        team = [device for device, number in zip(devices, numbers, strict=True) if number > 0]
        teams.append((at_s, sorted(team, key=lambda device: device.speed, reverse=True)))
    return teams


def _through_s(work_s: float, most: int, teams: Sequence[tuple[float, list[DeviceCost]]]) -> float:
    """When so much work can be through, on so many devices at a time at most."""
    for (begin_s, team), (end_s, _) in pairwise((*teams, (math.inf, []))):
        speed = sum(device.speed for device in team[:most])
        if speed > 0:
            if begin_s + work_s / speed <= end_s:
                return begin_s + work_s / speed
            work_s -= speed * (end_s - begin_s)
    return math.inf


def predict_spreads(
    task: TaskCost, devices: Sequence[DeviceCost], *, host: HostCost | None = None
) -> tuple[Spread, ...]:
    """How a task's steps are best spread over 1, 2, ... of these devices: as many as it has micro-batches at most.

    For each number the task is simulated alone, twice. Its parts either add their gradients to those of the part
    before, which are sent up to the device: then one part's backward through a shard waits for the other's. Or they
    send each micro-batch's gradients down by themselves, and the host adds.
    """
    num_devices = min(task.num_micro_batches, len(devices))
    if not may_spread(task, num_devices):
        return (Spread(),)
    alone = replace(task, num_steps=PREDICTED_STEPS, first_step_times=1.0)
    devices = [replace(device, variation=0.0) for device in devices[:num_devices]]
    backward = frozenset(node for node in task.chain if node[0] in (FUSED, BACKWARD))
    spreads = [Spread()]
    one_s = _alone_s(alone, [*spreads], devices[:1], host)
    for number in range(2, num_devices + 1):
        most = -(-task.num_micro_batches // number)  # of its parts
        if most == -(-task.num_micro_batches // (number - 1)):
            spreads.append(spreads[-1])  # as long as with one device less
            continue
        in_sums, in_pieces = Spread(1.0, task.ordered | backward, True), Spread(1.0, task.ordered, False)
        slower = [Spread(NEVER)] * (number - 1)
        sums_s, pieces_s = (_alone_s(alone, [*slower, each], devices[:number], host) for each in (in_sums, in_pieces))
        # Pieces wait in DRAM for their turn.
        is_quicker = pieces_s < WORTH_DRAM * sums_s and not task.adds_on_devices
        best, best_s = (in_pieces, pieces_s) if is_quicker else (in_sums, sums_s)
        spreads.append(best._replace(speedup=one_s / best_s if best_s > 0 else 1.0))
    return tuple(spreads)


_known_spreads = lru_cache(MOST_KNOWN)(predict_spreads)


def _alone_s(task: TaskCost, spreads: Sequence[Spread], devices: Sequence[DeviceCost], host: HostCost | None) -> float:
    """Seconds that a task takes, spread as in the last of these."""
    world = World([task], [tuple(spreads)], devices, host or HostCost(), record=False)
    world.run(Scheduler(resolve_policy("sharded-lrtf")))
    return world.time.now_s
