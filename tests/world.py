"""The world of the scheduler's tests: it carries out instructions in any legal order, and checks all that must hold.

A hand-written fake: no torch, no threads, no clock. It notes what is under way, and a test says which of it comes
through next, or fails; `walk` draws that at random. (In `hydra_engine.planning.world` time decides, and nothing fails.)
"""

import random
from collections import Counter

from hydra_engine.schedule.events import (
    BatchReady,
    CaptureWanted,
    Computed,
    DataEnded,
    DataFailed,
    DeviceAdded,
    DeviceRemoved,
    DeviceReturned,
    DeviceWanted,
    DidNotFit,
    Failed,
    Fitted,
    HomesMoved,
    MoveWanted,
    Release,
    ShardUpdated,
    Spread,
    SpreadsKnown,
    StepCommitted,
    StopRequested,
    Stored,
    TaskAdded,
    TaskStopped,
    TaskUnits,
    UnitLost,
    Update,
)
from hydra_engine.schedule.policies import POLICIES, resolve_policy
from hydra_engine.schedule.scheduler import Scheduler
from hydra_engine.schedule.state import MOST_AHEAD
from hydra_engine.schedule.units import Unit, evaluation_chain, training_chain

TRAIN, EVALUATE = True, False
INSTANT = ("read", "store", "fit", "commit", "update", "move")  # what comes through but what devices compute


class FakePart:
    """Some micro-batches of a task's step: a chain of units of its own."""

    def __init__(self, task, index=0):
        self.task = task
        self.index = index
        self.position = 0
        self.unit = None  # on a device
        self.storing = []  # on their way to DRAM, in order, with whether they failed
        self.near = None  # the device that computed them, where all are whole
        self.broken = False  # a unit failed on its way to DRAM: whatever went on from it fails as well
        self.num_whole = 0  # units that are through, and none before them was lost or failed
        self.lost = None  # position of the first unit that is run again, once what went on from it is through

    @property
    def at_rest(self):
        return self.unit is None and not self.storing

    @property
    def num_stored(self):
        through = self.position - (self.unit is not None) - len(self.storing)
        return through if self.lost is None else min(through, self.lost)

    def is_stored(self, unit):
        """A unit is in DRAM."""
        if self.lost is None and not self.broken and self.task.chain:
            self.num_whole = self.task.chain.index((unit.kind, unit.shard)) + 1
        self.go_back()

    def go_back(self):
        if self.lost is not None and self.at_rest:
            self.position, self.lost, self.near = self.lost, None, None
            self.task.has_gone_back = True

    def next_unit(self):
        """The unit that may be loaded, and whether it may be run: on any device, or on which."""
        task = self.task
        if task.over or self.lost is not None or self.position >= len(task.chain):
            return None, None
        if not task.fresh(task.chain[self.position][1]):
            return None, None
        unit = Unit(task.name, *task.chain[self.position], task.step, self.index)
        spread, before = task.spread, task.parts[self.index - 1]
        if self.index > 0:
            num_first = 0  # units of the part before that are in DRAM before this one's turn comes
            if not spread.in_sums and unit.kind in ("fb", "b"):
                num_first = self.position - MOST_AHEAD
            if task.chain[self.position] in spread.ordered:
                num_first = self.position + 1
            if before.num_stored < num_first:
                return unit, None
        where = None if self.unit is not None else self.near if self.storing else "any"
        only = task.homes.get(unit.shard)
        if only is not None:
            where = only if where in ("any", only) else None
        return unit, where


class FakeTask:
    """What the world knows of a task, from the instructions it got and the events it sent."""

    def __init__(self, added, batches, num_micro_batches=1):
        self.added = added
        self.batches = list(batches)  # to be read: TRAIN or EVALUATE each, or an exception
        self.num_micro_batches = num_micro_batches  # of each training batch
        self.chain = ()
        self.parts = [FakePart(self)]
        self.spread = Spread()  # of the step in progress, as it was when that began
        self.step = -1
        self.training = True
        self.ready = None  # the batch that was read and is not begun
        self.is_new = False  # it has new shapes
        self.reading = False
        self.ended = False
        self.committing = False
        self.misfit = None  # the unit in which a device ran out of memory, until the task is fitted
        self.fitting = False
        self.updating = []  # shards, in the order of their instructions
        self.released = set()  # shards of the step in progress that were updated before its commit
        self.is_capture_wanted = False
        self.homes = {}  # by shard: the device that it is at home on
        self.leaving, self.coming, self.moving = set(), set(), set()  # shards
        self.has_gone_back = False  # in this step
        self.in_last_step = False  # stopped in a step that may have updated shards: it is committed first
        self.over = False  # failed or stopped
        self.finished = False
        self.num_read = Counter()  # by TRAIN or EVALUATE
        self.num_begun = Counter()
        self.num_committed = Counter()

    @property
    def name(self):
        return self.added.task

    @property
    def storing(self):
        """Of the first part."""
        return self.parts[0].storing[0][0]

    @property
    def unit(self):
        """Of the first part."""
        return self.parts[0].unit

    @property
    def at_rest(self):
        return all(part.at_rest for part in self.parts)

    @property
    def is_releasing(self):
        """Shards are updated before the commit of the step in progress, and some may have been."""
        has_begun = any(kind in ("fb", "b") for part in self.parts for kind, _ in self.chain[: part.position])
        return self.added.early_release and self.training and has_begun

    @property
    def is_settled(self):
        """Nothing commits, releases or updates, and no home moves."""
        return not (self.committing or self.updating or self.is_releasing or self.leaving or self.moving)

    @property
    def with_gradients(self):
        """Shards that are to be updated whose gradients are in DRAM, of every part."""
        num_whole = min(part.num_whole for part in self.parts)
        shards = {shard for kind, shard in self.chain[:num_whole] if kind in ("fb", "b")}
        return shards & set(self.added.units.updates) if self.training else set()

    def end(self, *, whole=False):
        """Begin nothing more; whole: where shards may have been updated in this step, after its commit."""
        if whole and self.is_releasing and not self.over:
            self.in_last_step = True
        else:
            self.over = True

    def begin(self, num_parts=1):
        self.chain = self.added.units.training if self.training else self.added.units.evaluation
        self.parts = [FakePart(self, k) for k in range(num_parts)]
        self.spread = self.added.units.spreads[num_parts - 1]
        self.released = set()

    def fresh(self, shard):
        return shard not in self.leaving | self.moving and not set(self.updating) & set(self.added.units.needs[shard])

    @property
    def unit_ahead(self):
        """The first unit of the next batch, where its shard may be loaded before the commit of this one is through."""
        if self.ready is None or self.is_new or self.misfit is not None or self.fitting:
            return None
        if self.over or self.in_last_step or any(part.lost is not None for part in self.parts):
            return None
        if not self.chain or any(part.position < len(self.chain) for part in self.parts):
            return None
        step, training = self.ready
        kind, shard = (self.added.units.training if training else self.added.units.evaluation)[0]
        if not self.fresh(shard) or (self.training and self.added.units.needs[shard]):
            return None
        return Unit(self.name, kind, shard, step)


class World:
    """Feeds a scheduler, carries out what it says, and checks it."""

    def __init__(
        self, policy="sharded-lrtf", *, num_devices=0, double_buffer=True, min_devices=1, quotas=None, **options
    ):
        """`quotas`, by name: of the groups in which tasks stand."""
        self.scheduler = Scheduler(
            resolve_policy(policy),
            double_buffer=double_buffer,
            min_devices=min_devices,
            has_groups=quotas is not None,
            **options,
        )
        self.has_groups = quotas is not None
        self.quotas = {None: 0, **(quotas or {})}
        self.double_buffer = double_buffer
        self.min_devices = min_devices
        self.tasks = {}
        self.running = {}  # by device
        self.claims = {}
        self.leaving = set()  # devices that were removed, and not released
        self.wanted = {}  # by device that somebody else wants: whether it has it
        self.is_stored_at_once = lambda: False
        self.comes_with_others = lambda: False  # events that come at one time: dispatched together
        self.may_lose = False  # units whose device has failed
        self.choose = min  # of the devices that a home may come to
        self.story = []  # events and instructions, for a failing test to show
        for device in range(num_devices):
            self.add_device(device)

    # -- events

    def add_task(self, added, batches, num_micro_batches=1):
        if added.group is not None:
            added = added._replace(quota=self.quotas[added.group])
        self.tasks[added.task] = FakeTask(added, batches, num_micro_batches)
        return self.send(added)

    def begin_task(self, name, num_shards, num_steps=1, **options):
        """Add a task that trains so many steps, and read its first batch; the task."""
        task = self.add_training(name, num_shards, num_steps, **options)
        self.read(task)
        return task

    def add_training(self, name, num_shards, num_steps=1, *, num_micro_batches=1, **options):
        """Add a task that trains so many steps; the task."""
        added = task_added(name, num_shards, num_steps=num_steps, **options)
        self.add_task(added, [TRAIN] * num_steps, num_micro_batches)
        return self.tasks[name]

    def add_device(self, device):
        self.running[device] = self.claims[device] = None
        return self.send(DeviceAdded(device))

    @property
    def num_in(self):
        """Devices that may be used, by whomever."""
        return len(self.running) - len(self.leaving)

    @property
    def is_paused(self):
        return self.num_in < self.min_devices

    def remove_device(self, device):
        self.leaving.add(device)
        for part in (part for task in self.tasks.values() for part in task.parts):
            part.near = None if part.near == device else part.near
        self.end_without_devices()
        out = self.send(DeviceRemoved(device))
        for task in self.tasks.values():
            if shards := [shard for shard, at in task.homes.items() if at == device]:
                out += self.want_move(task, shards, leaves=True)
        return out

    def end_without_devices(self):
        """After a stop and the last device, steps that would have been committed end as they are."""
        for task in self.tasks.values():
            task.over |= task.in_last_step and self.min_devices == self.num_in == 0

    def know_spreads(self, task, spreads):
        """All that is known of a task's spreads from now on."""
        task.added = task.added._replace(units=task.added.units._replace(spreads=tuple(spreads)))
        out = self.send(SpreadsKnown(task.name, tuple(spreads)))
        known = self.scheduler._tasks[task.name]
        assert known.spread == task.spread or not known.chain, "a step in progress stays as it began"
        if self.has_groups:
            num_wanted = Counter()
            for each in self.tasks.values():
                num_wanted[each.added.group] += 0 if each.finished else self.most_devices(each)
            assert {name: group.num_wanted for name, group in self.scheduler._groups.items()} == num_wanted
            assert self.scheduler._num_wanted == sum(num_wanted.values())
        return out

    def most_devices(self, task):
        """Devices that a step of the task may be spread over: of those that are in, there is one for each task."""
        if self.has_groups:
            num_spreads = len(task.added.units.spreads)
            return num_spreads if task.added.max_devices is None else min(task.added.max_devices, num_spreads)
        num_unfinished = sum(not each.finished for each in self.tasks.values())
        return max(1, min(len(task.added.units.spreads), self.num_in - num_unfinished + 1))

    def want_device(self, device):
        """Somebody else wants a device for a while."""
        self.wanted[device] = False
        return self.send(DeviceWanted(device))

    def return_device(self, device):
        del self.wanted[device]
        return self.send(DeviceReturned(device))

    def read(self, task, *, has_to_fit=False):
        """The reader is through with what was asked for."""
        task.reading = False
        what = task.batches.pop(0) if task.batches else None
        if isinstance(what, Exception):
            task.ended = True
            return self.send(DataFailed(task.name, what, "its loader"))
        if what is None:
            task.ended = True
            return self.send(DataEnded(task.name))
        task.ready, task.is_new = (task.num_read[what], what), has_to_fit
        task.num_read[what] += 1
        return self.send(BatchReady(task.name, *task.ready, has_to_fit, task.num_micro_batches))

    def part(self, unit):
        return self.tasks[unit.task].parts[unit.part]

    def claims_of(self, task):
        return [claim for claim in self.claims.values() if claim is not None and claim.task == task.name]

    def compute(self, device, seconds=1.0, *, failed=False):
        unit, self.running[device] = self.running[device], None
        part = self.part(unit)
        failed = failed or part.broken
        stored = not failed and not part.storing and self.is_stored_at_once()
        part.unit, part.near = None, None if failed or stored or device in self.leaving else device
        if stored:
            part.is_stored(unit)
        else:
            part.storing.append((unit, failed))
        return self.send(Computed(device, unit, seconds, failed, stored))

    def store(self, task, error=None, part=0):
        """What the task's unit left is in DRAM, or the unit failed."""
        part = task.parts[part]
        unit, has_failed = part.storing.pop(0)
        assert error is not None or not has_failed
        if error is not None or not part.storing:
            part.near = None
        if error is not None:
            task.over = part.broken = True
            return self.send(Failed(task.name, error, "a layer", unit))
        part.is_stored(unit)
        return self.send(Stored(unit))

    def run(self, task, device=0):
        """The task's unit is computed, and what it left is in DRAM; what is said to the latter."""
        self.compute(device)
        return self.store(task)

    def lose(self, task, part=0):
        """The device of the task's unit has failed under it."""
        part = task.parts[part]
        unit, _ = part.storing.pop(0)
        part.near = None
        if task.chain:  # else the whole step begins again
            position = task.chain.index((unit.kind, unit.shard))
            part.lost = position if part.lost is None else min(position, part.lost)
            part.go_back()
        return self.send(UnitLost(unit))

    def misfit(self, task, part=0):
        """A device ran out of memory in the task's unit."""
        part = task.parts[part]
        unit, has_failed = part.storing.pop(0)
        assert has_failed
        assert not part.storing, "nothing goes on from what failed"
        task.misfit = task.misfit or unit
        task.chain, task.has_gone_back = (), True
        for each in task.parts:
            each.position = 0
        return self.send(DidNotFit(unit))

    def fit(self, task, error=None, num_shards=None):
        """The batch in hand fits, cut in so many shards, and is begun; one that was read before has to fit, too."""
        task.fitting, task.is_new = False, True
        if error is not None:
            task.over = True
            return self.send(Failed(task.name, error, "its fit", commit=True))
        if num_shards is not None:
            other, spreads = task_added(task.name, num_shards).units, task.added.units.spreads
            unit_s = task.added.units.unit_s
            task.added = task.added._replace(units=other._replace(unit_s=unit_s, spreads=spreads))
            if task.homes:  # the shards are others, and in DRAM
                task.homes = {}
                self.send(HomesMoved(task.name, (), {}))
        if not task.over:
            task.begin()
        units = task.added.units
        return self.send(Fitted(task.name, units._replace(unit_s=dict(units.unit_s))))

    def commit(self, task, error=None):
        task.committing = False
        if error is not None:
            task.over = True
            return self.send(Failed(task.name, error, "its commit", commit=True))
        task.num_committed[task.training] += 1
        task.chain, task.released = (), set()
        task.over |= task.in_last_step
        updates_now = task.training and not task.added.early_release
        if updates_now:
            task.updating = list(task.added.units.updates)
        expected = [Update(task.name, shard) for shard in task.updating] if updates_now else []
        out = self.send(StepCommitted(task.name, task.training))
        assert [each for each in out if isinstance(each, Update)] == expected, "all updates begin, lowest shard first"
        return out

    def update(self, task, shard, error=None):
        """A shard's optimizer step is through; where it failed, its turn is over all the same."""
        if error is not None:
            task.over = True
            self.send(Failed(task.name, error, f"its optimizer, on shard {shard}"))
        task.updating.remove(shard)
        return self.send(ShardUpdated(task.name, shard))

    def want_move(self, task, shards, *, leaves=False):
        """Homes of a task are to move."""
        if not task.finished:
            (task.leaving if leaves else task.coming).update(shards)  # those that are moving, once they have
        return self.send(MoveWanted(task.name, tuple(shards), leaves))

    def moved(self, task, homes):
        """The homes that are moving are somewhere else: all that the task has now, by shard."""
        assert task.moving, "it was said"
        shards, task.moving, task.homes = tuple(sorted(task.moving)), set(), homes
        return self.send(HomesMoved(task.name, shards, dict(homes)))

    def want_capture(self, task):
        """The task is to be saved."""
        task.is_capture_wanted = True
        return self.send(CaptureWanted(task.name))

    def stop_task(self, task, *, is_paused=False):
        """One task ends; where its commit was under way, without it."""
        uncommitted, task.committing = task.committing, False
        task.end(whole=is_paused and not uncommitted)
        return self.send(TaskStopped(task.name, uncommitted, is_paused and not uncommitted))

    def stop(self):
        self.min_devices = 0
        for task in self.tasks.values():
            task.end(whole=True)
        self.end_without_devices()
        return self.send(StopRequested())

    def send(self, event):
        self.story.append(event)
        out = self.scheduler.take(event)
        self.carry_out(out, event)
        return out if self.comes_with_others() else [*out, *self.dispatch()]

    def dispatch(self):
        """Of what comes at one time all is known."""
        out = self.scheduler.dispatch()
        self.carry_out(out, None)
        self.validate()
        return out

    def carry_out(self, out, event):
        for instruction in out:
            self.story.append(instruction)
            getattr(self, f"_{type(instruction).__name__.lower()}")(instruction, event)

    # -- instructions

    def _lend(self, instruction, _):
        [device] = instruction
        assert self.wanted[device] is False, "a device is lent once, to who wants it"
        assert self.running[device] is None, "its unit is through"
        assert self.claims[device] is None, "nothing is on its way there"
        self.wanted[device] = True

    def _release(self, instruction, _):
        [device] = instruction
        assert device in self.leaving, "a device is released once, after it was removed"
        assert device not in self.wanted, "nobody has it"
        assert self.running.pop(device) is None, "its unit is through"
        assert self.claims.pop(device) is None, "nothing is on its way there"
        self.leaving.remove(device)

    def check_that_something_may_begin(self, device):
        assert not self.is_paused, "nothing begins while there are too few devices"
        assert device not in self.wanted, "nothing more begins on a device that is wanted"
        assert device not in self.leaving, "nothing more begins on a device that was removed"

    def _load(self, instruction, _):
        device, unit = instruction
        self.check_that_something_may_begin(device)
        assert self.claims[device] is None, "a device holds at most one claim"
        assert unit not in self.claims.values(), "a unit is claimed once"
        task, part = self.tasks[unit.task], self.part(unit)
        if unit != task.unit_ahead:
            assert unit == part.next_unit()[0], "nothing is loaded before its shard's update, nor out of turn"
        else:
            here = [each for each in task.parts if each.near == device or each.unit == self.running[device] is not None]
            assert here, "the next batch's first shard is loaded where this one's last unit is"
        assert task.homes.get(unit.shard) in (None, device), "a shard at home is used there alone"
        self.claims[device] = unit

    def _drop(self, instruction, _):
        device, unit = instruction
        assert self.claims[device] == unit, "what is dropped was loaded, and not run"
        self.claims[device] = None

    def _run(self, instruction, _):
        device, unit = instruction
        part = self.part(unit)
        self.check_that_something_may_begin(device)
        assert self.claims[device] == unit, "what is run was loaded"
        assert self.running[device] is None, "a device runs one unit"
        found, where = part.next_unit()
        assert found == unit, "units run in the order of the chain"
        assert where in ("any", device), "a unit runs once its input is in DRAM, or where it was made"
        if self.has_groups:
            counts = self.counts()
            mine = self.rank(self.tasks[unit.task], counts)
            waiting = [(self.rank(task, counts), task.name) for task in self.runnable(device)]
            assert mine <= min(waiting)[0], f"{unit} of rank {mine} begins before {min(waiting)}"
        self.claims[device] = None
        self.running[device] = part.unit = unit
        part.position += 1

    def _read(self, instruction, _):
        task = self.tasks[instruction.task]
        assert not task.reading, "one read at a time"
        assert task.ready is None, "one batch is read ahead at most"
        assert not task.ended
        assert not task.over
        most = self.most_devices(task) if task.added.adapts else 1
        assert 1 <= instruction.num_devices <= most, "a task that adapts is told how many devices its step may have"
        if not task.added.reads_ahead:  # layers draw: the read begins where the batch's forward left the stream
            for part in task.parts:
                assert {kind for kind, _ in task.chain[part.position :]} <= {"b"}
                assert part.unit is None or part.unit.kind == "b", "the forward is through"
        task.reading = True

    def _begin(self, instruction, _):
        task = self.tasks[instruction.task]
        assert not task.over
        assert not task.in_last_step
        assert task.ready is not None
        assert not task.chain, "the batch before it is committed"
        (task.step, task.training), task.ready, task.has_gone_back = task.ready, None, False
        assert instruction.step == task.step
        most = min(task.num_micro_batches, len(task.added.units.spreads)) if task.training else 1
        assert min(most, task.added.min_devices) <= instruction.num_parts <= min(most, self.most_devices(task))
        assert self.num_in == 0 or self.num_in >= task.added.min_devices, "below its minimum a task begins no step"
        task.begin(instruction.num_parts)
        assert instruction.in_sums == task.spread.in_sums
        task.num_begun[task.training] += 1

    def _fit(self, instruction, _):
        task = self.tasks[instruction.task]
        assert not task.over
        assert not task.fitting
        assert not task.chain, "the batch before it is committed, or the step starts again"
        assert task.at_rest
        assert not task.updating, "shards are numbered anew: no update of the old ones is under way"
        assert not task.moving, "and no move"
        assert not self.claims_of(task), "nothing of the old shards is claimed"
        assert instruction.unit == task.misfit
        if instruction.unit is None:
            assert task.ready is not None
            (task.step, task.training), task.ready = task.ready, None
            task.num_begun[task.training] += 1
        task.misfit, task.fitting = None, True

    def _commit(self, instruction, _):
        task = self.tasks[instruction.task]
        assert instruction.training == task.training
        assert task.chain
        assert all(part.num_stored == len(task.chain) for part in task.parts), "every unit of the batch is stored"
        assert task.at_rest
        assert not task.committing
        assert not task.over
        task.committing = True

    def _update(self, instruction, event):
        task = self.tasks[instruction.task]
        if task.added.early_release:
            assert not task.over
            assert instruction.shard in task.with_gradients - task.released, "whole, and once in a step"
            task.released.add(instruction.shard)
            task.updating.append(instruction.shard)
        else:
            assert event == StepCommitted(instruction.task, True), "updates begin at the commit, and only there"
            assert instruction.shard in task.updating

    def _move(self, instruction, _):
        task, shards = self.tasks[instruction.task], set(instruction.shards)
        assert shards, "something moves"
        assert not shards & task.moving, "a home that moves is not moved again meanwhile"
        assert shards <= task.leaving | task.coming, "nobody else's moves"
        in_use = {
            unit.shard for part in task.parts for unit in [part.unit, *(each for each, _ in part.storing)] if unit
        }
        assert not shards & in_use, "no unit uses it"
        assert not shards & set(task.updating), "no update"
        assert not task.committing, "no commit"
        assert not task.fitting, "no fit, which numbers shards anew"
        task.leaving, task.coming, task.moving = task.leaving - shards, task.coming - shards, task.moving | shards

    def _discard(self, instruction, _):
        task = self.tasks[instruction.task]
        assert task.over, "gradients that nobody wants"
        assert instruction.shard not in task.released

    def _capture(self, instruction, _):
        task = self.tasks[instruction.task]
        assert task.is_settled, "all of its state is of one step"
        task.is_capture_wanted = False

    def _finish(self, instruction, _):
        task = self.tasks[instruction.task]
        assert not task.finished, "a task finishes once"
        assert task.at_rest
        assert not task.committing
        assert not task.fitting
        assert not task.updating
        assert not task.leaving | task.moving, "its homes are where they stay"
        assert task.over or (task.ended and not task.chain and task.ready is None)
        assert not self.claims_of(task), "nothing of the task is on a device when it gives its weights back"
        assert instruction.is_settled == task.is_settled
        task.finished = True

    # -- groups

    def counts(self):
        """Units that run, by group."""
        found = Counter()
        for unit in self.running.values():
            if unit is not None:
                found[self.tasks[unit.task].added.group] += 1
        return found

    def rank(self, task, counts):
        """Rules of docs/elastic.md: the lowest goes first."""
        number, quota = counts[task.added.group], self.quotas[task.added.group]
        return number / quota if number < quota else 1.0

    def runnable(self, device):
        """Tasks with a unit that could run on a device now."""
        parts = ((task, *part.next_unit()) for task in self.tasks.values() for part in task.parts)
        return [task for task, unit, where in parts if unit is not None and where in ("any", device)]

    # -- what always holds

    def validate(self):
        for claim in filter(None, self.claims.values()):
            task = self.tasks[claim.task]
            assert not task.over, "a failed task claims nothing"
            assert claim.shard not in task.leaving | task.moving, "nothing is loaded of what moves"
        on_devices = [unit for unit in self.running.values() if unit is not None]
        waiting = [part.next_unit() for task in self.tasks.values() for part in task.parts]
        runnable = {unit: where for unit, where in waiting if where is not None}
        unclaimed = [unit for unit, _ in waiting if unit is not None and unit not in self.claims.values()]
        chains = {(unit.task, unit.part) for unit in on_devices}
        assert len(chains) == len(on_devices), "the units of a task, or of a part, run one after the other"
        assert not set(on_devices) & set(self.claims.values())
        for device, unit in self.running.items():
            if device in self.wanted:
                assert self.wanted[device] == (unit is None), "a device is lent as soon as its unit is through"
                continue
            if device in self.leaving:
                assert unit is not None, "a device is released as soon as its unit is through"
                assert self.claims[device] is None
                continue
            if self.is_paused:
                continue
            if unit is None:
                assert not {"any", device} & set(runnable.values()), f"{runnable} wait beside the idle device {device}"
            if self.claims[device] is None:
                is_mine = [each for each in unclaimed if self.tasks[each.task].homes.get(each.shard) in (None, device)]
                is_idle = is_mine and (self.double_buffer or unit is None)
                assert not is_idle, f"device {device} loads nothing"
            else:
                assert self.double_buffer or unit is None, "without double buffering nothing is loaded beside a unit"
        for task in self.tasks.values():
            is_left = task.is_capture_wanted and task.is_settled and not task.over
            # A step that might have released, and goes back, is captured with its commit.
            assert not is_left or task.has_gone_back, "what is to be saved is, as soon as it can be"
            if task.added.early_release and not task.over:
                assert task.with_gradients == task.released, "a shard is updated as soon as its gradients are whole"
        assert self.scheduler.finished == all(task.finished for task in self.tasks.values())
        dispatch = self.scheduler._dispatch
        for queue in (dispatch._ready, dispatch._claimed, dispatch._loadable):
            of_groups = [(group,) for group in queue._of] if self.has_groups else [()]
            for part in (part for group in of_groups for part in queue.first(10**6, *group)):
                assert part.key == dispatch._key(part), "who waits is ordered by what is known now"

    def homes_after(self, task):
        """Homes once those that move have moved: those that were on a device are in DRAM, others on any that is in."""
        stay = {shard: device for shard, device in task.homes.items() if shard not in task.moving}
        found = [device for device in self.running if device not in self.leaving]
        come = {shard: self.choose(found) for shard in task.moving if shard not in task.homes and found}
        return {**stay, **come}

    def under_way(self):
        """Everything that can come through next, as (what, call)."""
        for device, has_it in list(self.wanted.items()):
            if has_it or self.may_lose:
                yield "return" if has_it else "give up", lambda device=device: self.return_device(device)
        for device, unit in self.running.items():
            if unit is not None:
                yield "compute", lambda device=device: self.compute(device)
                yield "fail", lambda device=device: self.compute(device, failed=True)
        for task in self.tasks.values():
            if task.moving:
                yield "move", lambda task=task: self.moved(task, self.homes_after(task))
            if task.reading:
                yield "read", lambda task=task: self.read(task)
            for k, part in enumerate(task.parts):
                if part.storing and part.storing[0][1]:
                    yield "break", lambda task=task, k=k: self.store(task, RuntimeError("unit"), k)
                    if not (part.broken or (task.added.early_release and part.storing[0][0].kind == "b")):
                        yield "misfit", lambda task=task, k=k: self.misfit(task, k)
                elif part.storing:
                    yield "store", lambda error=None, task=task, k=k: self.store(task, error, k)
                if part.storing and self.may_lose and not part.broken:
                    yield "lose" if part.storing[0][1] else "lose late", lambda task=task, k=k: self.lose(task, k)
            if task.reading:
                yield "read anew", lambda task=task: self.read(task, has_to_fit=True)
            if task.fitting:
                yield "fit", lambda error=None, task=task: self.fit(task, error, random.Random(task.step).randint(1, 5))
            if task.committing:
                yield "commit", lambda error=None, task=task: self.commit(task, error)
            for shard in task.updating:
                yield "update", lambda error=None, task=task, shard=shard: self.update(task, shard, error)

    def settle(self):
        """All comes through but what devices compute."""
        while found := next((happens for what, happens in self.under_way() if what in INSTANT), None):
            found()

    def settle_and_compute(self):
        """All comes through but what devices compute, and one unit of that."""
        self.settle()
        for device in [device for device, unit in self.running.items() if unit is not None][:1]:
            self.compute(device)

    def run_to_the_end(self):
        while not self.scheduler.finished:
            num_so_far = len(self.story)
            self.settle_and_compute()
            assert self.scheduler.finished or len(self.story) > num_so_far, "nothing is under way: the run hangs"


def task_added(name, num_shards=3, *, seconds=1.0, num_steps=1, **options):
    """A task whose units all take as long."""
    lowest = options.pop("lowest_backward", 0)
    training, evaluation = training_chain(num_shards, lowest), evaluation_chain(num_shards)
    needs = options.pop("needs", tuple((shard,) if shard >= lowest else () for shard in range(num_shards)))
    updates = options.pop("updates", tuple(range(lowest, num_shards)))
    spreads = options.pop("spreads", (Spread(),))
    unit_s = options.pop("unit_s", dict.fromkeys(training, seconds))
    units = TaskUnits(training, evaluation, needs, updates, unit_s, spreads)
    return TaskAdded(name, units, **({"num_steps": num_steps, "reads_ahead": True} | options))


# -- random walks


def random_task(rng, name, early_share=0.0):
    """1 to 5 shards, some frozen, some with tied weights; a few steps, now and then an evaluation."""
    num_shards = rng.randint(1, 5)
    lowest = rng.randrange(num_shards) if rng.random() < 0.3 else 0
    chain = training_chain(num_shards, lowest)
    updates = [shard for shard in range(lowest, num_shards) if shard == lowest or rng.random() < 0.8]
    # What a shard holds: its own parameters, and maybe tied ones that a lower shard owns.
    needs = [{shard} & set(updates) for shard in range(num_shards)]
    for shard in range(lowest + 1, num_shards):
        if rng.random() < 0.2:
            needs[shard].add(rng.choice([each for each in updates if each <= shard]))
    num_steps = rng.randint(1, 4)
    batches = []
    for _ in range(num_steps):
        batches += [TRAIN] * rng.randint(1, 2) + [EVALUATE] * rng.choice([0, 0, 1, 2])
    added = task_added(
        name,
        num_shards,
        lowest_backward=lowest,
        seconds=rng.choice([0.0, 0.5, 2.0]),
        needs=tuple(tuple(sorted(each)) for each in needs),
        updates=tuple(updates),
        num_steps=rng.choice([None, batches.count(TRAIN)]),
        reads_ahead=rng.random() < 0.5,
        early_release=(early_release := early_share > 0 and rng.random() < early_share),
        adapts=rng.random() < 0.5,
        spreads=random_spreads(rng, chain, 1 if early_release else 4),
    )
    return added, batches


def random_spreads(rng, chain, most):
    """Over 1, 2, ... devices."""
    return tuple(random_spread(rng, k, chain) for k in range(rng.randint(1, most)))


def random_spread(rng, k, chain):
    """Over k + 1 devices, faster or slower than on one."""
    ordered = frozenset(node for node in chain if rng.random() < 0.3)
    return Spread(1.0 + k * rng.uniform(-0.1, 1.0) if k else 1.0, ordered, rng.random() < 0.5)


def random_quotas(rng, num_devices):
    """Quotas that the devices are enough for, when all are in."""
    quotas, num_left = {}, num_devices
    for group in "abc"[: rng.randint(1, 3)]:
        devices = rng.randint(0, num_left)
        num_left -= devices
        quotas[group] = devices
    return quotas


def in_any_group(rng, added, quotas):
    """The task in one of the groups, or in none."""
    least = rng.choice([1, 1, rng.randint(1, MOST_DEVICES)])
    return added._replace(
        group=rng.choice([None, *quotas]),
        min_devices=least,
        max_devices=rng.choice([None, least, least + 1]),
        priority=rng.choice([0, 0, 1]),
    )


MOST_DEVICES = 4


# More than seven parameters: each is another kind of what may happen.
def walk(seed, *, failures=False, stops=False, misfits=False, changes=False, groups=False, homes=False, policy=None):
    """A random run to its end; returns the world. Fails where the scheduler breaks a rule, or hangs.

    changes: of devices, which come, go and fail at any time, the last one too; with them some tasks release early, and
    other spreads are known of the others at any time, also of more devices or fewer. groups: tasks stand in groups.
    homes: of shards, of tasks on one device, come and go at any time.
    """
    rng = random.Random(seed)
    any_policy = rng.choice(sorted(POLICIES))
    min_devices = rng.randint(1, 3) if changes and not groups else 1
    quotas = random_quotas(rng, MOST_DEVICES) if groups else None
    world = World(
        policy or any_policy,
        double_buffer=rng.random() < 0.7,
        min_devices=min_devices,
        quotas=quotas,
    )
    arrivals = [("device", device) for device in range(rng.randint(min_devices, MOST_DEVICES))]
    arrivals += [("task", f"task-{k}") for k in range(rng.randint(1, 6))]
    if rng.random() < 0.5:
        rng.shuffle(arrivals)
    num_at_once = rng.choice([1, len(arrivals)])  # the others come while the first are at work
    failure_share = rng.choice([0.01, 0.05]) if failures else 0.0
    stop_share = rng.choice([0.005, 0.05]) if stops else 0.0
    misfit_share = rng.choice([0.05, 0.5]) if misfits else 0.0
    change_share, loss_share, early_share = (
        (rng.choice([0.02, 0.2, 0.5]), rng.choice([0.0, 0.05, 0.3]), rng.choice([0.0, 0.5])) if changes else (0, 0, 0)
    )
    capture_share, lend_share = 0.05, rng.choice([0.0, 0.0, 0.1])
    share_at_once = rng.choice([0.0, 0.5, 1.0])
    world.is_stored_at_once = lambda: rng.random() < share_at_once
    if changes:
        world.may_lose = True
        share_with_others = rng.choice([0.0, 0.5])
        world.comes_with_others = lambda: rng.random() < share_with_others

    world.choose = rng.choice
    move_share = rng.choice([0.02, 0.2]) if homes else 0.0

    def move(task):
        away = [shard for shard in task.added.units.updates if shard not in task.homes]
        shards, leaves = (list(task.homes), True) if rng.random() < 0.5 else (away, False)
        if shards:
            world.want_move(task, rng.sample(shards, rng.randint(1, len(shards))), leaves=leaves)

    def add_any_device():
        world.add_device(rng.choice([index for index in range(MOST_DEVICES) if index not in world.running]))

    def change():
        """Any change of the devices, or of what is known of a task on more or fewer of them."""
        others = [device for device in world.running if device not in world.leaving]
        tasks = [each for each in world.tasks.values() if not (each.finished or each.added.early_release)]
        if tasks and not homes and rng.random() < 0.3:
            task = rng.choice(tasks)
            world.know_spreads(task, random_spreads(rng, task.added.units.training, MOST_DEVICES))
        elif others and rng.random() < 0.5:
            world.remove_device(rng.choice(others))
        elif len(world.running) < MOST_DEVICES:
            add_any_device()

    try:
        while arrivals or not world.scheduler.finished:
            if arrivals and (num_at_once > 0 or rng.random() < 0.1 or not any(world.under_way())):
                num_at_once -= 1
                what, which = arrivals.pop(0)
                if what == "task":
                    added, batches = random_task(rng, which, early_share)
                    if rng.random() < failure_share * 5:
                        batches[rng.randrange(len(batches))] = RuntimeError("loader")
                        del batches[batches.index(next(b for b in batches if isinstance(b, Exception))) + 1 :]
                    added = in_any_group(rng, added, quotas) if groups else added
                    if homes:  # a step that is spread has none, nor has one that updates before its commit
                        units = added.units._replace(spreads=(Spread(),))
                        added = added._replace(units=units, early_release=False)
                    world.add_task(added, batches, rng.choice([1, 1, 2, 6]))
                elif which not in world.running:
                    world.add_device(which)
                continue
            if rng.random() < stop_share:
                world.stop()
                continue
            if changes and world.tasks and rng.random() < stop_share:
                world.stop_task(rng.choice(list(world.tasks.values())), is_paused=rng.random() < 0.5)
                continue
            if changes and rng.random() < change_share:
                change()
                continue
            if world.tasks and rng.random() < move_share:
                move(rng.choice([*world.tasks.values()]))
                continue
            others = [device for device in world.running if device not in world.wanted]
            if others and rng.random() < lend_share:
                world.want_device(rng.choice(others))
                continue
            if world.tasks and rng.random() < capture_share:
                world.want_capture(rng.choice(list(world.tasks.values())))
                continue
            choices = list(world.under_way())
            if not choices and (world.dispatch() or world.scheduler.finished):
                continue
            if not choices and (world.is_paused or world.num_in < (MOST_DEVICES if groups else 1)):
                add_any_device()
                continue
            assert choices, "nothing is under way and tasks are unfinished: the run hangs"
            what, happens = rng.choice(choices)
            if what == "fail" and rng.random() >= max(failure_share, misfit_share, loss_share):
                continue
            if what == "read anew" and rng.random() >= misfit_share:
                continue
            if what == "break" and (misfits or changes) and not failures and len(choices) > 1:
                continue  # it shall not fail, but be cut finer, or be run again
            if what == "misfit" and not misfits:
                continue
            if what == "lose late" and rng.random() >= loss_share:
                continue
            if what in ("store", "commit", "update", "fit") and rng.random() < failure_share:
                happens(RuntimeError(what))
            else:
                happens()
        world.dispatch()
        # What was asked of a reader may still come in.
        for what, happens in list(world.under_way()):
            assert what in ("read", "read anew", "return"), "when all is finished nothing is under way but a read"
            if what in ("read", "return"):
                assert all(isinstance(each, Release) for each in happens())
    except AssertionError as error:
        tail = "\n".join(map(str, world.story[-12:]))
        raise AssertionError(f"seed {seed}: {error}\nthe last events and instructions:\n{tail}") from error
    return world


def assert_trained(world, *, whole=False):
    """What goes on has trained all that was read; a task whose loader failed, what was before. whole: all goes on."""
    assert all(task.over or task.num_committed == task.num_begun == task.num_read for task in world.tasks.values())
    assert not (whole and any(task.over or task.batches for task in world.tasks.values()))


def words(instructions):
    """Instructions as in the drawings: "load f0", "run f0", "drop f0", "read", "begin 0", "commit", "update 1"."""
    out = []
    for each in instructions:
        unit = getattr(each, "unit", None)
        number = f"{unit.kind}{unit.shard}" if unit else getattr(each, "step", getattr(each, "shard", ""))
        out.append(f"{type(each).__name__.lower()} {number}".strip())
    return ", ".join(out)
