"""State of a scheduler: how far tasks and the parts of their steps are, what devices have, and who is next.

Nothing is searched through: queues of tasks are ordered by key, those of devices by number. Where there are more
devices than tasks, an exact dynamic program shares them out, for the last task to end soonest.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from heapq import heapify, heappop, heappush
from itertools import accumulate, count
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from hydra_engine.schedule.events import BatchReady, Spread, TaskAdded, TaskUnits
from hydra_engine.schedule.groups import Group
from hydra_engine.schedule.units import BACKWARD, FORWARD, FUSED, Unit


def allocate(
    remaining_s: Sequence[float],
    speedups: Sequence[Sequence[float]],
    num_devices: int,
) -> list[int]:
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
    return _cheapest([[each if each <= last_s else math.inf for each in of_task] for of_task in seconds], num_free)


def _cheapest(costs: Sequence[Sequence[float]], num_free: int) -> list[int]:
    """Numbers of devices of the least sum of costs, with so many devices beside one for each task.

    costs: by task, of 1, 2, ... devices.
    """
    # least[k]: costs of the tasks from this one on, with k devices beside one for each; the last task first.
    least, choices = np.zeros(num_free + 1), []
    for of_task in reversed(costs):
        sums = np.full((len(of_task), num_free + 1), np.inf)
        for more, each in enumerate(of_task):
            if each < math.inf:
                sums[more, more:] = least[: num_free + 1 - more] + each
        least = sums.min(axis=0)
        choices.append(sums.argmin(axis=0))  # of equals the fewest devices
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


T = TypeVar("T", bound=Hashable)

Entry: TypeAlias = "tuple[Any, int, T]"

# Entries that were taken back stay in the heap until they come up, or until there are this many more than members. Few,
# since every device has a heap, and Python's garbage collector looks at all that is in it.
MAX_STALE = 8


class ReadyQueue(Generic[T]):
    """Members by key, the lowest first and among equals the first to be put; O(log n) for each change.

    Memory is that of the members now in it, however many came and went.
    """

    def __init__(self) -> None:
        self._heap: list[Entry[T]] = []
        self._entries: dict[T, Entry[T]] = {}
        self._serial = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, member: T) -> bool:
        return member in self._entries

    def put(self, member: T, key: Any) -> None:
        """Add a member, or give it another key."""
        self._put((key, next(self._serial), member))

    def _put(self, entry: Entry[T]) -> None:
        self._entries[entry[2]] = entry
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + MAX_STALE:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def discard(self, member: T) -> None:
        self._entries.pop(member, None)
        if not self._entries:
            self._heap.clear()  # also of keys that could not be compared

    def first(self, num: int) -> list[T]:
        """So many members with the lowest keys, in their order; O(num log num)."""
        self.best()
        found: list[T] = []
        frontier = [(self._heap[0], 0)] if self._heap else []  # of the heap, from its root down
        while frontier and len(found) < num:
            entry, k = heappop(frontier)
            if self._entries.get(entry[2]) is entry:
                found.append(entry[2])
            for child in (2 * k + 1, 2 * k + 2):
                if child < len(self._heap):
                    heappush(frontier, (self._heap[child], child))
        return found

    def best(self) -> T | None:
        """The member with the lowest key."""
        while self._heap:
            entry = self._heap[0]
            if self._entries.get(entry[2]) is entry:
                return entry[2]
            heappop(self._heap)
        return None


class PartQueue(ReadyQueue["Part"]):
    """All parts, and those that each device has begun. The home of a part must not change while it is in here."""

    def __init__(self) -> None:
        super().__init__()
        self._at: dict[ScheduledDevice | None, ReadyQueue[Part]] = {}

    def put(self, part: Part, key: Any) -> None:
        if part.home is not None and not part.home.is_in_use:
            part.home = None
        entry = (key, next(self._serial), part)  # one for both queues
        self._put(entry)
        at = self._at.get(part.home)
        if at is None:
            at = self._at[part.home] = ReadyQueue()
        at._put(entry)

    def discard(self, part: Part) -> None:
        super().discard(part)
        self._at[part.home].discard(part)

    def forget(self, device: ScheduledDevice) -> None:
        """Take from a device what it has begun: any other may go on with it."""
        parts = self._at.pop(device, ReadyQueue())
        for part in parts.first(len(parts)):
            part.home = None
            self._at.setdefault(None, ReadyQueue())._put(self._entries[part])

    def best_on(self, device: ScheduledDevice) -> Part | None:
        """The best one that the device has begun, else that none has, else of all: of the highest priority, though."""
        best = self.best()
        if best is None or best.home is device:
            return best
        for home in (device, None):
            part = self._at[home].best() if home in self._at else None
            if part is not None and part.key[0] == best.key[0]:
                return part
        return best


class GroupedQueue:
    """Parts of tasks in groups: those of the group of the lowest rank first, among them by key. As a `PartQueue`."""

    def __init__(self) -> None:
        self._of: dict[Group, PartQueue] = {}
        self._groups: ReadyQueue[Group] = ReadyQueue()  # that have a part here
        self._changed: dict[Group, None] = {}  # since `_groups` was up to date

    def __len__(self) -> int:
        return 0 if self.first_group() is None else 1

    def put(self, part: Part, key: Any) -> None:
        self._of.setdefault(part.group, PartQueue()).put(part, key)
        self._changed[part.group] = None

    def discard(self, part: Part) -> None:
        self._of[part.group].discard(part)
        self._changed[part.group] = None

    def forget(self, device: ScheduledDevice) -> None:
        for queue in self._of.values():
            queue.forget(device)

    def change(self, group: Group) -> None:
        """Take in that a rank has changed."""
        if group in self._of:
            self._changed[group] = None

    def first_group(self) -> Group | None:
        """The one of the lowest rank, among equals that of the lowest key."""
        while self._changed:
            group = next(iter(self._changed))
            best = self._of[group].best()
            if best is None:
                self._groups.discard(group)
            else:
                self._groups.put(group, (group.rank, best.key))
            del self._changed[group]
        return self._groups.best()

    def first(self, num: int, group: Group | None = None) -> list[Part]:
        """So many parts of a group, of the first one if none is named."""
        group = group or self.first_group()
        return self._of[group].first(num) if group in self._of else []

    def best(self) -> Part | None:
        """The part that goes first."""
        group = self.first_group()
        return None if group is None else self._of[group].best()

    def best_on(self, device: ScheduledDevice, group: Group | None = None) -> Part | None:
        """The part of a group, of the first one if none is named, that goes first on a device."""
        group = group or self.first_group()
        return self._of[group].best_on(device) if group in self._of else None


# Weight of the newest measurement in a unit's running time, which counts as at most so many times the estimate, and
# at least as much less: one disturbed run moves it by little, a lasting change is followed all the same.
NEWEST, MOST_TIMES = 0.3, 2.0


# Where each part's gradients go down by themselves, those that come before their turn wait in DRAM: a part's backward
# is at most so many units ahead of that of the part before it.
MOST_AHEAD = 2


class Phase(IntEnum):
    """Stations of a task on the way to its end. It only goes forward."""

    OPEN = 0  # batches come
    ALL_READ = 1  # no more come: it ends after those that were read
    LAST_STEP = 2  # stopped in a step that has updated shards already: it ends once that is committed
    OVER = 3  # failed or stopped: nothing of it begins, and what is under way comes through
    FINISHED = 4  # nothing of it is under way: `Finish` was said

    def __init__(self, number: int) -> None:
        self.is_over = number >= 3  # nothing of it begins any more


class OnHost(Enum):
    """Work of the host on the batch in progress; meanwhile none of its units runs."""

    NOTHING = auto()
    FIT = auto()  # `Fit` was said
    COMMIT = auto()  # `Commit` was said


class Activity(Enum):
    """What happens to a task, or what it waits for."""

    COMPUTES = auto()  # a device has a unit of it
    LOADS = auto()  # its next unit's weights are on their way to a device that is idle
    STORES = auto()  # what its last unit has left is on its way to DRAM
    DEVICE = auto()  # a unit could begin on a device
    BATCH = auto()  # the next one is not read
    UPDATES = auto()  # of weights that its next unit needs
    FIT = auto()  # `Fit` was said
    COMMIT = auto()  # `Commit` was said
    END = auto()  # nothing of it begins any more


@dataclass(eq=False)
class Part:
    """Some micro-batches of the batch in progress, all of them unless it is spread over several devices."""

    task: ScheduledTask
    index: int = 0
    share: float = 1.0  # of the batch
    position: int = 0  # of the first unit that was not begun
    computing: ScheduledDevice | None = None  # has the unit before `position`
    storing: int = 0  # units before `position` that are on their way to DRAM
    lost: int | None = None  # position of a unit whose device has failed, where it goes back once nothing is under way
    near: ScheduledDevice | None = None  # which computed them, where the part can go on meanwhile
    home: ScheduledDevice | None = None  # which computed its last unit, of this batch or of the one before
    num_passed: int = 0  # by units that came after it and had their shards on the device
    ready_order: int = 0
    offer: Unit | None = None  # load-ready
    key: Any = None  # of the offer
    claim: ScheduledDevice | None = None  # who has claimed the offer
    queue: PartQueue | GroupedQueue | ScheduledDevice | None = None  # which the part is in, or pinned to

    @property
    def group(self) -> Group:
        """Return the task's, in a run that has groups."""
        assert self.task.group is not None
        return self.task.group

    @property
    def rank(self) -> float:
        """Return that of a unit of the task which would begin now; without groups all have one."""
        return 0.0 if self.task.group is None else self.task.group.rank

    @property
    def under_way(self) -> bool:
        """True if a unit is on a device, or on its way to DRAM."""
        return self.computing is not None or self.storing > 0

    @property
    def num_stored(self) -> int:
        """Units of its chain that are through."""
        through = self.position - (self.computing is not None) - self.storing
        return through if self.lost is None else min(through, self.lost)

    @property
    def in_turn(self) -> bool:
        """True if the offered unit waits for no other part's, and no commit."""
        task = self.task
        if self.index == 0:
            return self is not task.ahead
        before, node, spread = task.parts[self.index - 1], task.chain[self.position], task.spread
        if node in spread.ordered:
            return before.num_stored > self.position
        return spread.in_sums or node[0] == FORWARD or before.num_stored + MOST_AHEAD >= self.position

    def next_unit(self) -> Unit | None:
        """The unit that could be loaded now; the one that is offered, if it is still the same."""
        task, offer = self.task, self.offer
        chain, batch = (task.chain_ahead, task.next_batch) if self is task.ahead else (task.chain, task.batch)
        if self.position >= len(chain) or task.phase.is_over or self.lost is not None or batch is None:
            return None
        kind, shard = chain[self.position]
        if not task.is_fresh(shard):
            return None
        if offer is None or offer[1:4] != (kind, shard, batch.step):
            return Unit(task.added.task, kind, shard, batch.step, self.index)
        return offer

    @property
    def only(self) -> int | None:
        """The number of the device that the offered unit's shard has its home on, if it has one."""
        homes = self.task.homes
        return homes.get(self.offer.shard) if homes and self.offer is not None else None

    def may_run_on(self, device: ScheduledDevice) -> bool:
        return self.only in (None, device.index)

    def leave(self, device: ScheduledDevice | None) -> None:
        """Its unit is on its way to DRAM, from a device where the part can go on; None: it cannot."""
        self.storing += 1
        if device is not None:
            device.near[self] = None
        elif self.near is not None:
            self.near.near.pop(self, None)
        self.near = device

    def arrive(self) -> None:
        """A unit is in DRAM, or has failed."""
        self.storing -= 1
        if self.near is not None and self.storing == 0:
            self.near.near.pop(self, None)
            self.near = None

    def lose(self, node: tuple[str, int]) -> None:
        """Its device has failed under a unit: go back to it, once what was begun after it is through or has failed."""
        at = self.task.chain.index(node)
        self.lost = at if self.lost is None else min(at, self.lost)

    def go_back(self) -> None:
        """Go back to a unit that was lost, where nothing is under way."""
        if self.lost is not None and not self.under_way:
            self.position, self.lost = self.lost, None


_NO_BATCH = BatchReady("", 0, training=True)
_ALONE = Spread()


# More than 15 attributes: any of them may be read at any event, and none changes with another.
@dataclass(eq=False)
class ScheduledTask:
    """A task as far as decisions need it."""

    added: TaskAdded
    units: TaskUnits
    order: int
    group: Group | None = None  # where there are groups
    phase: Phase = Phase.OPEN
    on_host: OnHost = OnHost.NOTHING
    chain: tuple[tuple[str, int], ...] = ()  # of the batch in progress; empty between batches
    parts: list[Part] = field(default_factory=list)  # of the batch in progress, and of the last one between batches
    ahead: Part = field(init=False)  # the first part of the next batch: its first shard may be loaded already, no more
    batch: BatchReady = _NO_BATCH  # in progress, or the last one
    misfit: Unit | None = None  # where a device ran out of memory: the step waits to be fitted
    stale: set[int] = field(default_factory=set)  # shards whose update is not through
    homes: dict[int, int] = field(default_factory=dict)  # by shard: the device that its weights stay on, and its units
    leaving: set[int] = field(default_factory=set)  # shards whose homes are to leave a device
    coming: set[int] = field(default_factory=set)  # shards that are to get one
    moving: set[int] = field(default_factory=set)  # shards for which `Move` was said
    has_read: bool = False  # the batch after this one was asked for
    next_batch: BatchReady | None = None
    num_steps_done: int = 0
    unit_s: dict[tuple[str, int], float] = field(default_factory=dict)  # estimates
    spread: Spread = _ALONE  # of the batch in progress, as it was known when that began
    step_s: float = 0.0  # of a training batch
    left_s: list[float] = field(default_factory=list)  # of the chain, from each position on
    counted_s: float = 0.0  # of what is left, in the scheduler's sum
    num_wanted: int = 0  # devices that its steps may be spread over, in its group's sum
    used_s: float = 0.0
    served_order: int = 0
    num_passes: int = 0  # through its shards, with the one in progress and those before it came

    def __post_init__(self) -> None:
        self.ahead = Part(self)

    @property
    def under_way(self) -> bool:
        """True if a unit of any part is on a device, or on its way to DRAM."""
        return any(part.under_way for part in self.parts)

    @property
    def chain_ahead(self) -> tuple[tuple[str, int], ...]:
        """Return the next batch's chain, if its first shard may be loaded before it is begun; else an empty one.

        That is from the begin of the last unit of the batch in progress to its commit. After a training batch only if
        nothing trains the shard: else its weights are others after the commit, and so is their key on a device.
        """
        batch, num_units = self.next_batch, len(self.chain)
        if batch is None or batch.has_to_fit or not num_units or self.phase is Phase.LAST_STEP:
            return ()
        if any(part.position < num_units or part.lost is not None for part in self.parts):
            return ()
        chain = self.units.training if batch.training else self.units.evaluation
        changes = self.batch.training and chain and self.units.needs[chain[0][1]]
        return () if changes else chain

    @property
    def is_releasing(self) -> bool:
        """True if shards are updated before the step in progress is committed, and some may have been."""
        return (
            self.added.early_release
            and self.batch.training
            and any(kind in (FUSED, BACKWARD) for part in self.parts for kind, _ in self.chain[: part.position])
        )

    @property
    def is_settled(self) -> bool:
        """True if all of its state is of one step: nothing commits, releases or updates."""
        is_moving = self.leaving or self.moving
        return not (self.stale or is_moving or self.is_releasing) and self.on_host is not OnHost.COMMIT

    @property
    def speedups(self) -> list[float]:
        """By number of devices that its steps may be spread over."""
        return [spread.speedup for spread in self.units.spreads[: self.added.max_devices]]

    @property
    def activity(self) -> Activity:
        """Return what happens to it now; of parts, the first that does the most."""
        parts = self.parts
        if any(part.computing is not None for part in parts):
            return Activity.COMPUTES
        if self.phase.is_over:
            return Activity.END
        if self.on_host is not OnHost.NOTHING:
            return Activity.FIT if self.on_host is OnHost.FIT else Activity.COMMIT
        if any(part.claim is not None and part.claim.running is None for part in parts):
            return Activity.LOADS
        if self.chain and any(part.offer is not None and not part.under_way for part in parts):
            return Activity.DEVICE
        if any(part.storing for part in parts):
            return Activity.STORES
        if self.stale:
            return Activity.UPDATES
        if not self.chain and self.next_batch is None and self.misfit is None:
            return Activity.BATCH
        return Activity.DEVICE

    def num_stored(self) -> int:
        """Units of the chain that are through in every part."""
        if len(self.parts) == 1:
            return self.parts[0].num_stored
        return min(part.num_stored for part in self.parts)

    def is_fresh(self, shard: int) -> bool:
        if shard in self.leaving or shard in self.moving:
            return False
        return not self.stale or self.stale.isdisjoint(self.units.needs[shard])

    def take_movable(self) -> tuple[int, ...]:
        """Take the shards whose homes may move now, since no unit, commit or update uses them."""
        if self.on_host is not OnHost.NOTHING or not (self.leaving or self.coming):
            return ()
        if not self.chain and self.under_way:  # of a step that is to begin again
            return ()
        running = [part for part in self.parts if part.under_way]
        at_work = {shard for part in running for _, shard in self.chain[part.num_stored : part.position]}
        begun = {shard for part in self.parts for _, shard in self.chain[: part.position]}
        found = (self.leaving - at_work) | (self.coming - begun)
        found -= self.stale | self.moving
        self.leaving, self.coming, self.moving = self.leaving - found, self.coming - found, self.moving | found
        return tuple(sorted(found))

    def estimate(self) -> None:
        """Add up a new chain's times, as they are estimated now."""
        self.left_s = list(accumulate((self.unit_s.get(n, 0.0) for n in reversed(self.chain)), initial=0.0))[::-1]
        in_training = self.batch.training and bool(self.chain)
        self.step_s = self.left_s[0] if in_training else sum(self.unit_s.get(n, 0.0) for n in self.units.training)

    def remaining_s(self) -> float:
        """Paper, Algorithm 2: what is left of this batch, and a step's time for each one to come."""
        num_steps = self.added.num_steps
        if num_steps is None:  # the loader does not say: as many again as so far
            num_steps = 2 * self.num_steps_done + 2
        to_come = max(0, num_steps - self.num_steps_done - (1 if self.chain and self.batch.training else 0))
        if not self.chain:
            left_s = 0.0
        elif len(self.parts) == 1:
            left_s = self.left_s[self.parts[0].position]
        else:
            left_s = sum(part.share * self.left_s[part.position] for part in self.parts)
        return to_come * self.step_s + left_s

    def passes(self) -> float:
        """Return how many passes through its shards it has made, as a fraction of the one in progress, too."""
        if not self.chain:
            done = 0.0
        elif len(self.parts) == 1:
            done = float(self.parts[0].position)
        else:
            done = sum(part.share * part.position for part in self.parts)
        return self.num_passes + done / max(1, len(self.chain))

    def measured(self, node: tuple[str, int], seconds: float) -> None:
        """Take a measurement of a unit into its estimate."""
        estimate = self.unit_s.get(node, 0.0)
        if estimate > 0:
            seconds = min(max(seconds, estimate / MOST_TIMES), estimate * MOST_TIMES)
            seconds = (1 - NEWEST) * estimate + NEWEST * seconds
        self.unit_s[node] = seconds


class Use(Enum):
    """Users of a device."""

    UNITS = auto()  # of the tasks
    WANTED = auto()  # somebody else, once its unit is through
    LENT = auto()  # somebody else
    NOBODY = auto()  # it was removed, and no unit is on it any more


@dataclass(eq=False)
class ScheduledDevice:
    """A device as far as decisions need it."""

    index: int
    use: Use = Use.UNITS
    leaves: bool = False  # it was removed: nothing more begins on it
    is_in_use: bool = True  # units of tasks may begin on it
    running: Unit | None = None
    part: Part | None = None  # whose unit is running
    charged_s: float = 0.0  # to its task, for that unit
    claim: Part | None = None  # whose offer is claimed
    near: dict[Part, None] = field(default_factory=dict)  # whose last unit it computed, on its way to DRAM
    pinned: dict[Part, None] = field(default_factory=dict)  # whose offered unit may run here alone

    def discard(self, part: Part) -> None:
        """Pin a part no more: it leaves, as it does a queue."""
        self.pinned.pop(part, None)
