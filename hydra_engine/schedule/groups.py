"""Groups of tasks that share devices by quotas: whose unit goes first, before any policy is asked.

A group has a rank, that of a unit of it which would begin now: the lowest goes first. Only units that begin or end
change it, so that a unit which runs is never interrupted. A group that runs on fewer devices than its quota has the
share of it that it runs on, below 1: where fewer devices are in than all quotas together, groups get them in
proportion. Any other borrows: here priorities and the policy decide, as they do among all units of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

BORROWS = 1.0


@dataclass(eq=False)
class Group:
    """Tasks that share a quota of devices; without one they borrow whatever they run on."""

    quota: int = 0
    remaining_s: float = 0.0  # of its tasks, on one device
    num_running: int = 0  # units
    num_wanted: int = 0  # devices, by its tasks

    @property
    def rank(self) -> float:
        return self.rank_of(self.num_running)

    def rank_of(self, num_running: int) -> float:
        """Return its rank if it ran so many units."""
        return num_running / self.quota if num_running < self.quota else BORROWS


def shared_out(most: Mapping[Group, int], num_devices: int) -> dict[Group, int]:
    """Devices of each group, at most so many: one by one to the lowest rank, then to who has most to do on each."""
    numbers = dict.fromkeys(most, 0)

    def entry(group: Group, order: int) -> tuple[float, float, int, Group]:
        number = numbers[group]
        return group.rank_of(number), -group.remaining_s / (number + 1), order, group

    heap = [entry(group, order) for order, group in enumerate(most) if most[group] > 0]
    heapify(heap)
    for _ in range(min(num_devices, sum(most.values()))):
        _, _, order, group = heappop(heap)
        numbers[group] += 1
        if numbers[group] < most[group]:
            heappush(heap, entry(group, order))
    return numbers
