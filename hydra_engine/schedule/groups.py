"""Groups of tasks that share devices by quotas: whose unit goes first, before any policy is asked.

A group has a rank, that of a unit of it which would begin now: the lowest goes first. Only units that begin or end
change it, so that a unit which runs is never interrupted.

    0 ..    units of tasks that are not preemptible, within the quota; beyond it none of them begins
    1 ..    the group runs on fewer devices than its minimum
    2 ..    ... than its quota
    3       it borrows: here priorities and the policy decide, as they do among all units of one rank
    NEVER   it is at its maximum

Between the whole numbers, the group goes first that has the smallest share of what it may count on. So where fewer
devices are in than all quotas together, groups get them in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from partitioners.plain_numbers import make_plain

BORROWS, NEVER = 3.0, math.inf


@dataclass(frozen=True)
class Quota:
    """Devices of a group of tasks.

    Args:
        devices: that it gets whenever it asks for them. What it does not use, others borrow, and give back at the end
            of the unit that runs there.
        minimum: of these, those that it gets before other groups get theirs, where fewer devices are in than all quotas
            together; with fewer than this in, its tasks wait. At most `devices`.
        maximum: devices that it never uses more of, though others be idle; None: it borrows what is idle.
    """

    devices: int
    minimum: int = 0
    maximum: int | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        for field, value in vars(self).items():
            is_left_out = field == "maximum" and value is None
            if not is_left_out and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"{field}: {value!r}, limit: a whole number of devices, at least 0")
        if self.minimum > self.devices:
            raise ValueError(
                f"minimum: {self.minimum}, limit: at most devices={self.devices}, which are guaranteed; lower it"
            )
        if self.maximum is not None and self.maximum < max(1, self.devices):
            raise ValueError(
                f"maximum: {self.maximum}, limit: at least devices={self.devices}, and at least 1; raise it"
            )


@dataclass(eq=False)
class Standing:
    """Tasks of one group that are served alike: those that are preemptible, or those that are not."""

    group: Group
    num_running: int = 0  # units
    rank: float = NEVER


@dataclass(eq=False)
class Group:
    """Tasks that share a quota; without one they borrow whatever they run on."""

    quota: Quota
    remaining_s: float = 0.0  # of its tasks, on one device
    num_running: int = 0  # units
    num_wanted: int = 0  # devices, by its tasks

    def __post_init__(self) -> None:
        self.preemptible, self.firm = Standing(self), Standing(self)
        self.count(self.preemptible, 0)

    def count(self, standing: Standing, change: int) -> list[Standing]:
        """A unit more, or less, is on a device; return whose rank that changes."""
        self.num_running += change
        standing.num_running += change
        before = self.preemptible.rank, self.firm.rank
        self.preemptible.rank, self.firm.rank = self.ranks(self.num_running, self.firm.num_running)
        return [each for each, rank in zip((self.preemptible, self.firm), before, strict=True) if each.rank != rank]

    def ranks(self, num_running: int, num_firm: int) -> tuple[float, float]:
        """Ranks of its preemptible tasks and of the others, if it ran so many units, and so many of the others."""
        quota = self.quota
        if quota.maximum is not None and num_running >= quota.maximum:
            return NEVER, NEVER
        firm = num_firm / quota.devices if num_firm < quota.devices else NEVER
        if num_running < quota.minimum:
            return 1 + num_running / quota.minimum, firm
        if num_running < quota.devices:
            return 2 + num_running / quota.devices, firm
        return BORROWS, firm

    def ranks_without(self, standing: Standing) -> dict[Standing, float]:
        """Ranks as they will be once a unit that runs is through."""
        preemptible, firm = self.ranks(self.num_running - 1, self.firm.num_running - (standing is self.firm))
        return {self.preemptible: preemptible, self.firm: firm}


def shared_out(most: Mapping[Group, int], num_devices: int) -> dict[Group, int]:
    """Devices of each group, at most so many: one by one to the lowest rank, then to who has most to do on each."""
    numbers = dict.fromkeys(most, 0)

    def entry(group: Group, order: int) -> tuple[float, float, int, Group]:
        number = numbers[group]
        return group.ranks(number, 0)[0], -group.remaining_s / (number + 1), order, group

    heap = [entry(group, order) for order, group in enumerate(most) if most[group] > 0]
    heapify(heap)
    for _ in range(min(num_devices, sum(most.values()))):
        _, _, order, group = heappop(heap)
        numbers[group] += 1
        if numbers[group] < most[group]:
            heappush(heap, entry(group, order))
    return numbers
