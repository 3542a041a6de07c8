"""Gives units to devices: which of those that tasks offer a device runs, and which one's shard it loads meanwhile.

A device runs one unit and holds at most one claim: the next unit, whose shard it loads. Claims bind nobody: an idle
device takes the best run-ready unit, claimed elsewhere or not, so no run-ready unit ever waits beside an idle device.

A unit of a shard whose home is on a device waits for that device alone: it stands in no queue, but with the device.

A part offers one unit at most, so a decision is the least key of three queues of parts: run-ready and unclaimed,
run-ready and claimed, load-ready and unclaimed. An event changes the places of one task's parts in them, whatever the
number of tasks and devices.

Where tasks stand in groups, ranks come first: no unit begins while one of a lower rank could begin on that device, be
it claimed elsewhere. A device claims what goes first once its unit is through, when its group runs one less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hydra_engine.schedule.events import Computed, Drop, Instruction, Lend, Load, Release, Run
from hydra_engine.schedule.groups import Group
from hydra_engine.schedule.policies import NOT_YET, Candidate, Policy
from hydra_engine.schedule.state import GroupedQueue, Part, PartQueue, ReadyQueue, ScheduledDevice, ScheduledTask, Use
from hydra_engine.schedule.units import Unit

# A task that alone takes so much of the time that all tasks take on all devices goes first on every one. With all of it
# instead, long tasks were begun too late: simulated makespans were up to 0.7 % above what no schedule is faster than.
NEARLY = 0.6
# A unit whose shard is on the device goes before the best one, of so many after it, and so many times in a row.
MOST_LOOKED_AT, MOST_PASSED = 32, 8


# Past 300 lines: a device that gets a unit changes claims, queues and counters at once.
# More than 15 attributes: five are its queues and five its counters, which one event may move together.
class Dispatch:
    """Devices, what they run and claim, and the queues of what tasks offer."""

    def __init__(
        self,
        policy: Policy,
        out: list[Instruction],
        *,
        double_buffer: bool,
        is_resident: Callable[[int, str, int], bool],
        min_devices: int,
        has_groups: bool,
    ) -> None:
        """`out`: where instructions are put. is_resident, min_devices, has_groups: as the scheduler's."""
        self._policy = policy
        self._is_resident = is_resident if getattr(policy, "prefers_resident", False) else None
        self._is_longest_first = getattr(policy, "longest_first", False)
        self._double_buffer = double_buffer
        self._out = out
        self.min_devices = min_devices
        self.num_devices = 0  # that may be used
        self._devices: dict[int, ScheduledDevice] = {}  # and those that leave
        self._ready_count = 0
        self._served_count = 0
        self._remaining_s = 0.0  # of all tasks, as far as they were counted
        self._share_s = 0.0  # compute time per weight that whoever was served last has had: where newcomers begin
        self._num_passes = 0  # of the task that has made the most
        self._has_affinity = getattr(policy, "has_affinity", False)
        kind = GroupedQueue if has_groups else PartQueue
        self._ready = kind()  # run-ready, unclaimed
        self._claimed = kind()  # run-ready, claimed
        self._loadable = kind()  # not run-ready, or on one device only; unclaimed
        self._has_groups = has_groups
        self._idle: ReadyQueue[ScheduledDevice] = ReadyQueue()  # by number
        self._wanting: ReadyQueue[ScheduledDevice] = ReadyQueue()  # that may claim a unit
        self._touched: dict[ScheduledDevice, None] = {}  # to be looked at for what only they could take

    def add_device(self, index: int) -> None:
        device = self._devices[index] = ScheduledDevice(index)
        self.num_devices += 1
        self._place(device)
        self._touched.update(dict.fromkeys(self._devices.values()))  # there may have been too few

    def remove_device(self, index: int) -> None:
        """Begin nothing more on a device, and release it once its unit is through, and whoever has it is."""
        if (device := self._devices.get(index)) is None:  # as in `lend`
            return
        self.num_devices -= 1
        device.leaves, device.is_in_use = True, False
        self._empty(device)
        self._place(device)

    def at_device(self, index: int) -> tuple[Unit | None, Unit | None]:
        """Return the unit that a device runs, and the one that it claims."""
        if (device := self._devices.get(index)) is None:
            return None, None
        return device.running, None if device.claim is None else device.claim.offer

    def lend(self, index: int) -> None:
        """Begin nothing more on a device, and lend it once its unit is through."""
        if (device := self._devices.get(index)) is None:  # it could not be opened, which ends the run
            return
        device.use, device.is_in_use = Use.WANTED, False
        self._empty(device)
        self.free(device)

    def take_back(self, index: int) -> None:
        """Use a device again."""
        if (device := self._devices.get(index)) is not None:
            device.use, device.is_in_use = Use.UNITS, not device.leaves
            self.free(device)

    def _empty(self, device: ScheduledDevice) -> None:
        """Let other devices go on with what this one has begun, and drop its claim."""
        for queue in (self._ready, self._claimed, self._loadable):
            queue.forget(device)
        if device.claim is not None:
            self._drop(device)

    def add_task(self, task: ScheduledTask) -> None:
        """Let a task share compute time from now on."""
        task.used_s = self._share_s * task.added.weight
        self.refresh(task)  # it counts from now on

    def begin_pass(self, task: ScheduledTask) -> None:
        """Count one more pass of a task through its shards: the one that the furthest task is in, if it came late."""
        self._num_passes = task.num_passes = max(task.num_passes + 1, self._num_passes)

    def computed(self, event: Computed, part: Part) -> ScheduledDevice:
        """Take a unit from its device, and charge its time; the device has to be touched."""
        task, device = part.task, self._devices[event.device]
        device.running = device.part = part.computing = None
        if task.group is not None:
            self._count(task.group, -1)
        self._place(device)
        task.used_s += event.seconds - device.charged_s
        task.measured((event.unit.kind, event.unit.shard), event.seconds / part.share)
        return device

    def revoke(self, task: ScheduledTask) -> None:
        """Drop all claims of a task."""
        for part in [*task.parts, task.ahead]:
            if part.claim is not None:
                self._let_go(part.claim)
        self.refresh(task)

    # -- what tasks offer

    def refresh(self, task: ScheduledTask) -> None:
        """Put what a task offers where it belongs, after anything about it has changed: a policy sees all of it."""
        remaining_s = 0.0 if task.phase.is_over else task.remaining_s()
        self._remaining_s += remaining_s - task.counted_s
        if task.group is not None:
            task.group.remaining_s += remaining_s - task.counted_s
        task.counted_s = remaining_s
        for part in task.parts:
            self._put_in_place(part)
        if task.parts[0].position == len(task.chain) or task.ahead.offer is not None:
            self._put_in_place(task.ahead)
            devices = (part.computing or part.near for part in task.parts)
            self._touched.update((device, None) for device in devices if device is not None)

    def _put_in_place(self, part: Part) -> None:
        if part.queue is not None:
            part.queue.discard(part)
            part.queue = None
        before, part.offer = part.offer, part.next_unit()
        if part.offer is None:
            return
        if part.offer is not before:
            part.ready_order = NOT_YET
        in_turn = part.in_turn
        is_ready = in_turn and not part.under_way
        if in_turn and part.computing is None and part.ready_order == NOT_YET:  # be it on one device only
            self._ready_count += 1
            part.ready_order = self._ready_count
        part.key = self._key(part)
        if part.only is not None:
            self._pin(part)
        elif part.claim is not None:
            if is_ready:
                self._put(self._claimed, part)
            self._touched[part.claim] = None
        elif part is not part.task.ahead:
            self._put(self._ready if is_ready else self._loadable, part)
        if (only := part.computing or part.near) is not None:
            self._touched[only] = None

    def _pin(self, part: Part) -> None:
        """Leave a part to the one device that it may run on; one that has gone has it moved."""
        device = self._devices.get(-1 if part.only is None else part.only)
        if device is not None:
            self._touched[device] = None
            if part is not part.task.ahead:
                part.queue, device.pinned[part] = device, None

    def _put(self, queue: PartQueue | GroupedQueue, part: Part) -> None:
        part.queue = queue
        queue.put(part, part.key)

    def _key(self, part: Part) -> Any:
        task, added = part.task, part.task.added
        candidate = Candidate(
            added.task,
            task.order,
            task.counted_s,
            part.ready_order,
            task.served_order,
            task.used_s,
            added.weight,
            task.passes(),
        )
        return (-added.priority, self._policy.key(candidate), task.order, part.index)

    # -- units to devices

    def run(self) -> None:
        """Give to devices what they can have now."""
        if self.num_devices < self.min_devices:
            return
        touched, self._touched = self._touched, {}
        for device in touched:
            if device.running is None:
                self._run_own(device)
        while (idle := self._idle.best()) is not None and (self._ready or self._claimed):
            part = self._best(self._ready, idle) or self._best(self._claimed, idle)
            assert part is not None
            self._run(idle, self._before(part) or part)
        for device in {**touched, **self._touched}:
            self._claim_best(device, self._own_offers(device))
        while (wanting := self._wanting.best()) is not None and (self._ready or self._loadable):
            self._claim_best(wanting, ())
        self._touched = {}

    def _is_wanting(self, device: ScheduledDevice) -> bool:
        return device.claim is None and (device.running is None or self._double_buffer) and device.is_in_use

    def free(self, device: ScheduledDevice) -> None:
        """Put a device where it is looked for, after its unit or its claim has changed."""
        self._place(device)
        self.touch(device)

    def touch(self, device: ScheduledDevice) -> None:
        """Look at a device that is in its place for what it can have now."""
        self._touched[device] = None

    def free_all(self) -> None:
        """Put every device where it is looked for."""
        for device in list(self._devices.values()):
            self.free(device)

    def _place(self, device: ScheduledDevice) -> None:
        """Queue a device at once where its unit changes, or let it go: a policy may raise before it is touched."""
        if device.running is None and device.use is Use.WANTED:
            device.use = Use.LENT
            self._out.append(Lend(device.index))
        elif device.running is None and device.use is Use.UNITS and device.leaves:
            device.use = Use.NOBODY
            del self._devices[device.index]
            self._touched.pop(device, None)
            self._out.append(Release(device.index))
        is_idle = device.running is None and device.is_in_use
        for queue, belongs in ((self._idle, is_idle), (self._wanting, self._is_wanting(device))):
            if not belongs:
                queue.discard(device)
            elif device not in queue:
                queue.put(device, device.index)

    def _own_offers(self, device: ScheduledDevice) -> Iterable[Part]:
        """Parts whose unit before the offered one is on the device, or on its way from it to DRAM."""
        return device.near if device.part is None else [device.part, *device.near]

    def _run_own(self, device: ScheduledDevice) -> None:
        """Run on an idle device its claim, which costs nothing more, or what only it can run, if that goes first.

        A claim has to stand back for a task on the critical path, which any wait would make longer.
        """
        if not device.is_in_use:
            return
        claim = device.claim
        is_ready = claim is not None and claim.in_turn and (not claim.under_way or claim.near is device)
        if not is_ready:
            claim = None
        near = self._near(device) if claim is None or self._has_groups else []
        if claim is not None and (not near or claim.rank <= min(part.rank for part in near)):
            urgent = self._ready.best() if self._is_longest_first else None
            best = urgent if urgent is not None and self._is_urgent(urgent, claim) else claim
            self._run(device, self._before(claim) or best)
            return
        if not near:
            return
        best = min(near, key=lambda part: (part.rank, part.claim is not None, part.under_way, part.key))
        other = self._best(self._ready, device)
        if other is not None and other.rank > best.rank:
            other = None
        # What is on its way to DRAM keeps the device waiting, which only the critical path is worth.
        is_urgent = not best.under_way or (self._is_longest_first and self._is_critical(best.task))
        best = best if other is None or (is_urgent and best.key < other.key) else other
        self._run(device, self._before(best) or best)

    def _near(self, device: ScheduledDevice) -> list[Part]:
        """Parts that only this device can run now: what they begin with is on its way to DRAM, or stays here."""
        found = [part for part in device.near if part.offer and part.in_turn and part.may_run_on(device)]
        return found + [part for part in device.pinned if part.in_turn and not part.under_way]

    def _is_urgent(self, part: Part, claim: Part) -> bool:
        return (part.rank, part.key) < (claim.rank, claim.key) and self._is_critical(part.task)

    def _is_critical(self, task: ScheduledTask, nearly: float = 1.0) -> bool:
        """Return True if the task alone takes `nearly` what all take on all devices: nothing then hides its waiting."""
        return task.counted_s * self.num_devices >= nearly * self._remaining_s

    def _best(self, queue: PartQueue | GroupedQueue, device: ScheduledDevice) -> Part | None:
        """Who goes first in a queue, on this device."""
        best = queue.best()
        if best is None:
            return None
        if self._is_resident is None:
            goes_first = self._is_longest_first and self._is_critical(best.task, NEARLY)
            return best if goes_first else queue.best_on(device)
        return best if best.num_passed >= MOST_PASSED else self._first(queue.first(MOST_LOOKED_AT), device)

    def _first(self, parts: Sequence[Part], device: ScheduledDevice) -> Part:
        """Who goes first of some parts, on this device."""
        if len(parts) == 1:
            return parts[0]
        is_resident = self._is_resident
        if is_resident is None:
            return min(parts, key=lambda part: part.key)

        def order(part: Part) -> tuple[Any, ...]:
            assert part.offer is not None
            is_there = is_resident(device.index, part.offer.task, part.offer.shard)
            priority = part.key[0]  # goes before what is on the device
            return priority, part.num_passed < MOST_PASSED, not is_there, part.key

        return min(parts, key=order)

    def _claim_best(self, device: ScheduledDevice, own: Iterable[Part]) -> None:
        """Claim what goes first of what can run at once or next on this device, else what waits for another's."""
        if not self._is_wanting(device):
            return
        free = [part for part in own if part.offer is not None and part.may_run_on(device)]
        free += [part for part in device.pinned if part not in free and not part.under_way]
        free = [part for part in free if part.claim is None and part.in_turn]
        if self._has_groups:
            part = self._next_in_groups(device, free) or next((p for p in device.pinned if p.claim is None), None)
        else:
            if (ready := self._best(self._ready, device)) is not None:
                free.append(ready)
            part = self._first(free, device) if free else self._ahead(own, device) or self._loaded_ahead(device)
        if part is not None:
            part.claim, device.claim = device, part
            self._wanting.discard(device)
            assert part.offer is not None
            self._out.append(Load(device.index, part.offer))
            queue = part.queue
            if queue is not None and queue is not device:  # to which it stays pinned
                queue.discard(part)
                part.queue = None  # its key stays
            if queue is self._ready:
                self._put(self._claimed, part)

    def _loaded_ahead(self, device: ScheduledDevice) -> Part | None:
        """Return who goes first of those that wait for what another device computes."""
        found = [part for part in device.pinned if part.claim is None]
        if (best := self._best(self._loadable, device)) is not None:
            found.append(best)
        return min(found, key=lambda part: part.key, default=None)

    @staticmethod
    def _ahead(own: Iterable[Part], device: ScheduledDevice) -> Part | None:
        """Return the next batch's first part of a task whose last units the device has: there it will begin.

        Another device would take it from this one, which may be idle by then.
        """
        found = (part.task.ahead for part in own)
        offered = (part for part in found if part.offer is not None and part.claim is None)
        return next((part for part in offered if part.may_run_on(device)), None)

    # -- groups

    def _count(self, group: Group, change: int) -> None:
        """A unit of a task of this group begins, or ends: its rank may change."""
        group.num_running += change
        for queue in (self._ready, self._claimed, self._loadable):
            assert isinstance(queue, GroupedQueue)
            queue.change(group)

    def _before(self, part: Part) -> Part | None:
        """Who waits for any device, or is claimed elsewhere, and has a lower rank."""
        if not self._has_groups:
            return None
        found = [each for each in (self._ready.best(), self._claimed.best()) if each is not None]
        best = min(found, key=lambda each: each.rank, default=part)
        return best if best.rank < part.rank else None

    def _next_in_groups(self, device: ScheduledDevice, own: list[Part]) -> Part | None:
        """Who goes first, of what is on the device and of all others, once the unit there is through."""
        running = None if device.part is None else device.part.group

        def rank(part: Part) -> float:
            return running.rank_of(running.num_running - 1) if running is part.group else part.rank

        for queue, parts in ((self._ready, own), (self._loadable, [])):
            assert isinstance(queue, GroupedQueue)
            for group in dict.fromkeys([queue.first_group(), running]):
                if group is not None and self._is_resident is not None:
                    parts = parts + queue.first(MOST_LOOKED_AT, group)
                elif group is not None and (best := queue.best_on(device, group)) is not None:
                    parts = [*parts, best]
            if parts:
                least = min(map(rank, parts))
                return self._first([part for part in parts if rank(part) == least], device)
        return None

    def _run(self, device: ScheduledDevice, part: Part) -> None:
        unit, task = part.offer, part.task
        assert unit is not None
        if part.claim is not device:
            if part.claim is not None:
                self._drop(part.claim)
            if device.claim is not None:
                self._drop(device)
            self._out.append(Load(device.index, unit))
        device.claim = part.claim = None
        device.running, device.part = unit, part
        if part.queue is not None:
            part.queue.discard(part)
            part.queue = None
        part.home = device if self._has_affinity else None
        if task.group is not None:
            self._count(task.group, 1)
        if self._is_resident is not None:
            first = self._ready.best()
            if first is not None and first is not part:
                first.num_passed += 1
            part.num_passed = 0
        self._place(device)
        part.computing = device
        part.position += 1
        device.charged_s = part.share * task.unit_s.get((unit.kind, unit.shard), 0.0)
        task.used_s += device.charged_s
        self._share_s = max(self._share_s, task.used_s / task.added.weight)
        self._served_count += 1
        task.served_order = self._served_count
        self._out.append(Run(device.index, unit))
        self.refresh(part.task)
        self.touch(device)

    def _drop(self, device: ScheduledDevice) -> None:
        self.refresh(self._let_go(device).task)

    def _let_go(self, device: ScheduledDevice) -> Part:
        """Take a device's claim from it; whose it was has to be put in place."""
        part = device.claim
        assert part is not None
        assert part.offer is not None
        self._out.append(Drop(device.index, part.offer))
        device.claim = part.claim = None
        self.free(device)
        return part
