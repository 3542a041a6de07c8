"""How many devices each of a few tasks gets, where there are more devices than tasks: an exact dynamic program."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np


def allocate(remaining_s: Sequence[float], speedups: Sequence[Sequence[float]], num_devices: int) -> list[int]:
    """The number of devices for each task, at least 1, at most `num_devices` together.

    Of all such numbers those under which the last task is through soonest; among them those under which the tasks take
    least time together; then the fewest devices for the tasks that came first.

    Args:
        remaining_s: by task, seconds that it has left on one device.
        speedups: by task, how many times shorter its steps are on 1, 2, ... devices; it gets no more than these.
        num_devices: at least as many as there are tasks.

    Takes time in proportion to the speedups x devices. Raises ValueError for fewer devices than tasks, or no speedup
    given.
    """
    num_tasks = len(remaining_s)
    if num_devices < num_tasks:
        raise ValueError(f"devices: {num_devices} for {num_tasks} tasks; at least one for each")
    if any(not each or not min(each) > 0 for each in speedups):
        raise ValueError(f"speedups: {speedups!r}; give each task one above 0 for each number of devices from 1 on")
    if not num_tasks:
        return []
    num_free = num_devices - num_tasks  # beside one for each
    seconds = [
        [left_s / each for each in faster[: num_free + 1]] for left_s, faster in zip(remaining_s, speedups, strict=True)
    ]
    last_s = _soonest(seconds, num_free)
    # least[k]: seconds of the tasks from this one on, with k devices beside one for each; the last task first.
    least, choices = np.zeros(num_free + 1), []
    for of_task in reversed(seconds):
        costs = np.full((len(of_task), num_free + 1), np.inf)
        for more, each in enumerate(of_task):
            if each <= last_s:
                costs[more, more:] = least[: num_free + 1 - more] + each
        choices.append(costs.argmin(axis=0))  # of equals the fewest devices
        least = costs.min(axis=0)
    numbers = []
    for choice in reversed(choices):
        more = int(choice[num_free])
        numbers.append(1 + more)
        num_free -= more
    return numbers


def _soonest(seconds: Sequence[Sequence[float]], num_free: int) -> float:
    """When the last task can be through, with so many devices beside one for each."""
    times = sorted({each for of_task in seconds for each in of_task})

    def is_enough(last_s: float) -> bool:
        fewest = (next((k for k, each in enumerate(of_task) if each <= last_s), num_free + 1) for of_task in seconds)
        return sum(fewest) <= num_free

    return times[bisect_left(times, True, key=is_enough)]
