"""How many devices each of a few tasks gets, where there are more devices than tasks: an exact dynamic program."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence


def allocate(remaining_s: Sequence[float], speedups: Sequence[Sequence[float]], num_devices: int) -> list[int]:
    """The number of devices for each task, at least 1, at most `num_devices` together.

    Of all such numbers those under which the last task is through soonest; among them those under which the tasks take
    least time together; then the fewest devices for the tasks that came first.

    Args:
        remaining_s: by task, seconds that it has left on one device.
        speedups: by task, how many times shorter its steps are on 1, 2, ... devices; it gets no more than these.
        num_devices: at least as many as there are tasks.

    Takes time in proportion to tasks x devices^2. Raises ValueError for fewer devices than tasks, or no speedup given.
    """
    num_tasks = len(remaining_s)
    if num_devices < num_tasks:
        raise ValueError(f"devices: {num_devices} for {num_tasks} tasks; at least one for each")
    if any(not each or not min(each) > 0 for each in speedups):
        raise ValueError(f"speedups: {speedups!r}; give each task one above 0 for each number of devices from 1 on")
    seconds = [[left_s / each for each in faster] for left_s, faster in zip(remaining_s, speedups, strict=True)]
    last_s, _ = _least(seconds, num_devices, max)
    soon_enough = [[each if each <= last_s else math.inf for each in of_task] for of_task in seconds]
    return _least(soon_enough, num_devices, operator.add)[1]


def _least(
    costs: Sequence[Sequence[float]], num_devices: int, joined: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The least cost of all tasks, joined one by one, and the number of devices that each task then has."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # by devices that the tasks so far have
    for task, of_task in enumerate(costs):
        following: dict[int, tuple[float, list[int]]] = {}
        others = len(costs) - task - 1  # need one each
        for taken, (cost, numbers) in best.items():
            for number in range(1, min(len(of_task), num_devices - taken - others) + 1):
                found = (joined(cost, of_task[number - 1]), [*numbers, number])
                if taken + number not in following or found < following[taken + number]:
                    following[taken + number] = found
        best = following
    return min(best.values())
