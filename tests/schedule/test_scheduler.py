"""The scheduler against a world that does everything in any legal order, and a few drawn schedules.

The world is a hand-written fake: no torch, no threads, no clock. It carries out instructions by noting what is under
way, and picks at random which of it comes through next, or fails. After every event it checks what must always hold.
"""

import heapq
import random
from collections import Counter
from itertools import count

import pytest

from hydra_engine.schedule.dispatch import MOST_PASSED
from hydra_engine.schedule.events import (
    BatchReady,
    Begin,
    Capture,
    CaptureWanted,
    Commit,
    Computed,
    DataEnded,
    DataFailed,
    DeviceAdded,
    DeviceRemoved,
    DeviceReturned,
    DeviceWanted,
    DidNotFit,
    Discard,
    Drop,
    Failed,
    Finish,
    Fit,
    Fitted,
    Lend,
    Load,
    Read,
    Release,
    Run,
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
from hydra_engine.schedule.units import BACKWARD, FORWARD, Unit, evaluation_chain, training_chain

TRAIN, EVALUATE = True, False
INSTANT = ("read", "store", "fit", "commit", "update")  # what comes through but what devices compute


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
        """Nothing commits, releases or updates."""
        return not (self.committing or self.updating or self.is_releasing)

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
        return not set(self.updating) & set(self.added.units.needs[shard])

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

    def __init__(self, policy="sharded-lrtf", *, num_devices=0, double_buffer=True, min_devices=1, fairness=None):
        self.scheduler = Scheduler(
            resolve_policy(policy), double_buffer=double_buffer, min_devices=min_devices, fairness=fairness
        )
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
        self.story = []  # events and instructions, for a failing test to show
        for device in range(num_devices):
            self.add_device(device)

    # -- events

    def add_task(self, added, batches, num_micro_batches=1):
        self.tasks[added.task] = FakeTask(added, batches, num_micro_batches)
        return self.send(added)

    def begin_task(self, name, num_shards, num_steps=1, **options):
        """Add a task that trains so many steps, and read its first batch; the task."""
        self.add_task(task_added(name, num_shards, num_steps=num_steps, **options), [TRAIN] * num_steps)
        self.read(self.tasks[name])
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
        return self.send(DeviceRemoved(device))

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
        return out

    def most_devices(self, task):
        """Devices that a step of the task may be spread over: of those that are in, there is one for each task."""
        num_unfinished = sum(not each.finished for each in self.tasks.values())
        return max(1, min(len(task.added.units.spreads), self.num_in - num_unfinished + 1))

    def want_device(self, device):
        """Somebody else wants a device for a while."""
        self.wanted[device] = False
        return self.send(DeviceWanted(device))

    def return_device(self, device):
        del self.wanted[device]
        return self.send(DeviceReturned(device))

    def read(self, task, *, new_shapes=False):
        """The reader is through with what was asked for."""
        task.reading = False
        what = task.batches.pop(0) if task.batches else None
        if isinstance(what, Exception):
            task.ended = True
            return self.send(DataFailed(task.name, what, "its loader"))
        if what is None:
            task.ended = True
            return self.send(DataEnded(task.name))
        task.ready, task.is_new = (task.num_read[what], what), new_shapes
        task.num_read[what] += 1
        return self.send(BatchReady(task.name, *task.ready, new_shapes, task.num_micro_batches))

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
        most = min(task.num_micro_batches, self.most_devices(task)) if task.training else 1
        assert 1 <= instruction.num_parts <= most, "one for each task"
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
        assert task.over or (task.ended and not task.chain and task.ready is None)
        assert not self.claims_of(task), "nothing of the task is on a device when it gives its weights back"
        assert instruction.is_settled == task.is_settled
        task.finished = True

    # -- what always holds

    def validate(self):
        for claim in self.claims.values():
            assert claim is None or not self.tasks[claim.task].over, "a failed task claims nothing"
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
                assert not unclaimed or not (self.double_buffer or unit is None), f"device {device} loads nothing"
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
            for part in queue.first(10**6):
                assert part.key == dispatch._key(part), "who waits is ordered by what is known now"

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
                yield "read anew", lambda task=task: self.read(task, new_shapes=True)
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


MOST_DEVICES = 4


def walk(seed, *, failures=False, stops=False, misfits=False, changes=False, policy=None):
    """A random run to its end; returns the world. Fails where the scheduler breaks a rule, or hangs.

    changes: of devices, which come, go and fail at any time, the last one too; with them some tasks release early, and
    other spreads are known of the others at any time, also of more devices or fewer.
    """
    rng = random.Random(seed)
    any_policy = rng.choice(sorted(POLICIES))
    min_devices = rng.randint(1, 3) if changes else 1
    world = World(
        policy or any_policy,
        double_buffer=rng.random() < 0.7,
        min_devices=min_devices,
        fairness=rng.choice([None, None, -1, 0, 1]),
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

    def add_any_device():
        world.add_device(rng.choice([index for index in range(MOST_DEVICES) if index not in world.running]))

    def change():
        """Any change of the devices, or of what is known of a task on more or fewer of them."""
        others = [device for device in world.running if device not in world.leaving]
        tasks = [each for each in world.tasks.values() if not (each.finished or each.added.early_release)]
        if tasks and rng.random() < 0.3:
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
            if not choices and (world.is_paused or world.num_in == 0):
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


def test_a_device_that_is_not_here_is_neither_lent_nor_taken_back():
    """It could not be opened, which ends the run; whoever waits for it is told so."""
    scheduler = Scheduler(resolve_policy("sharded-lrtf"))
    for event in (DeviceAdded(0), DeviceWanted(1), DeviceReturned(1)):
        assert scheduler.handle(event) == []


# Random walks: the first of each 50 seeds, and what happens in a walk, by its seed.
WALKS = {
    "with nothing amiss": (range(0, 150, 50), lambda seed: {}),
    "with failures": (range(1000, 1200, 50), lambda seed: {"failures": True}),
    "with stop requests": (range(2000, 2150, 50), lambda seed: {"failures": seed % 2 == 0, "stops": True}),
    "with batches that do not fit": (
        range(3000, 3200, 50),
        lambda seed: {"failures": seed % 3 == 0, "stops": seed % 5 == 0, "misfits": True},
    ),
    "with devices that come, go and fail": (range(4000, 4200, 50), lambda seed: {"changes": True}),
    "with changes of devices and failures of tasks": (
        range(5000, 5300, 50),
        lambda seed: {"failures": seed % 2 == 0, "stops": seed % 3 == 0, "misfits": seed % 5 < 2, "changes": True},
    ),
}


def assert_trained(world):
    """What goes on has trained all that was read; a task whose loader failed, what was read before."""
    assert all(task.over or task.num_committed == task.num_begun == task.num_read for task in world.tasks.values())


@pytest.mark.parametrize(
    ("what_happens", "first_seed"), [(name, first) for name, (firsts, _) in WALKS.items() for first in firsts]
)
def test_walk_ends_and_trains_every_batch_of_every_task_that_goes_on(what_happens, first_seed):
    for seed in range(first_seed, first_seed + 50):
        options = WALKS[what_happens][1](seed)
        world = walk(seed, **options)
        assert_trained(world)
        if not {"failures", "stops"} & options.keys():
            assert not any(task.over or task.batches for task in world.tasks.values())


def test_walks_with_changes_reach_what_they_are_for():
    """Also what is rare: units that go on from a lost one and come through, and steps that a stop leaves undone."""
    seen = Counter()
    for seed in range(5000, 5060):
        story = walk(seed, stops=True, misfits=True, changes=True).story
        seen.update(type(each).__name__ for each in story)
        lost = {each.unit for each in story if isinstance(each, UnitLost)}
        stored = Counter(each.unit for each in story if isinstance(each, Stored))
        stored.update(each.unit for each in story if isinstance(each, Computed) and each.stored)
        seen["twice"] += sum(number > 1 for number in stored.values())
        seen["run again"] += len(lost & set(stored))
        seen["undone"] += any(isinstance(each, Finish) and not each.is_settled for each in story)
        index = Counter(each.device for each in story if isinstance(each, DeviceAdded))
        seen["back again"] += max(index.values()) > 1
        num_known = {}
        for each in story:
            if isinstance(each, (TaskAdded, SpreadsKnown)):
                number = len(each.units.spreads if isinstance(each, TaskAdded) else each.spreads)
                seen["fewer"] += number < num_known.get(each.task, 1)
                seen["more"] += number > num_known.get(each.task, MOST_DEVICES)
                num_known[each.task] = number
        seen["told"] += any(isinstance(each, Read) and each.num_devices > 1 for each in story)
    names = (DeviceRemoved, Release, UnitLost, SpreadsKnown, TaskStopped, Lend, DidNotFit, Capture)
    assert all(seen[name.__name__] > 0 for name in names), seen
    assert all(seen[name] > 0 for name in ("twice", "run again", "undone", "back again", "fewer", "more", "told")), seen


def test_walks_reach_what_they_are_for():
    seen = Counter()
    for seed in range(1000, 1030):
        seen.update(type(each).__name__ for each in walk(seed, failures=True, stops=seed % 2 == 0, misfits=True).story)
    names = (TaskAdded, BatchReady, DataEnded, DataFailed, Computed, Stored, StepCommitted, ShardUpdated, Failed)
    names += (DeviceAdded, StopRequested, Load, Drop, Run, Read, Begin, Commit, Update, Finish)
    names += (DidNotFit, Fit, Fitted, CaptureWanted, Capture)
    assert all(seen[name.__name__] > 0 for name in names), seen


def test_walks_spread_steps():
    begun = [each for seed in range(150, 250) for each in walk(seed).story if isinstance(each, Begin)]
    assert {each.num_parts for each in begun} == {1, 2, 3, 4}


# -- drawn schedules


class TestInStep:
    """Tasks of two shards on one device: a step is f0, fb1, b0."""

    def order(self, world, num):
        """The units that the device computes."""
        found = []
        for _ in range(num):
            unit = world.running[0]
            found.append(str(unit))
            task = world.tasks[unit.task]
            world.run(task)
            if unit.kind == BACKWARD:
                world.read(task)
                world.commit(task)
                for shard in range(2):
                    world.update(task, shard)
        return found

    def test_tasks_pass_through_their_shards_side_by_side(self):
        world = World("in-step", num_devices=1, double_buffer=False)
        for name, seconds in (("a", 1.0), ("b", 5.0), ("c", 0.1)):
            world.begin_task(name, 2, 9, seconds=seconds)
        step = [f"{task}.{unit}@{{}}" for unit in ("f0", "fb1", "b0") for task in "abc"]
        assert self.order(world, 18) == [unit.format(k) for k in range(2) for unit in step]

    def test_one_that_comes_late_catches_up_with_the_pass_that_the_others_are_in(self):
        world = World("in-step", num_devices=1, double_buffer=False)
        world.begin_task("a", 2, 9)
        assert self.order(world, 7)[-2:] == ["a.b0@1", "a.f0@2"]
        world.begin_task("b", 2, 9)  # while a.fb1@2 runs
        # What one has computed is on its way to DRAM while the other computes.
        assert self.order(world, 4) == ["a.fb1@2", "b.f0@0", "a.b0@2", "b.fb1@0"]
        assert self.order(world, 5) == ["a.f0@3", "b.b0@0", "a.fb1@3", "b.f0@1", "a.b0@3"]


class TestLocality:
    """Device 0 holds shard 0 of every task whose name ends with "x"."""

    def world(self, *names, num_steps=9):
        world = World("locality", double_buffer=False)
        world.scheduler = Scheduler(
            resolve_policy("locality"), double_buffer=False, is_resident=lambda _, task, shard: task[-1] == "x"
        )
        for k, name in enumerate(names):
            world.begin_task(name, 1, num_steps, seconds=float(len(names) - k))  # the first is the longest
        return world

    def order(self, world, num):
        """The tasks that device 0 computes."""
        found = []
        world.add_device(0)
        for _ in range(num):
            task = world.tasks[world.running[0].task]
            found.append(task.name)
            world.run(task)
            world.read(task)
            world.commit(task)
            world.update(task, 0)
        return found

    def test_what_is_on_the_device_goes_first_the_longest_first(self):
        # While one is committed, another one computes.
        assert self.order(self.world("a", "bx", "cx"), 4) == ["bx", "cx", "bx", "cx"]

    def test_the_longest_waits_for_a_few_at_most(self):
        order = self.order(self.world("a", "bx", "cx", num_steps=20), 20)
        assert order.index("a") == MOST_PASSED
        assert order.count("a") == 2

    def test_priority_goes_before_what_is_on_the_device(self):
        world = self.world("bx")
        world.begin_task("urgent", 1, priority=1)
        assert self.order(world, 2) == ["urgent", "bx"]

    def test_elsewhere_it_is_sharded_lrtf(self):
        world = World("sharded-lrtf", double_buffer=False)
        for name, seconds in (("a", 2.0), ("b", 1.0)):
            world.begin_task(name, 1, 9, seconds=seconds)
        assert self.order(self.world("a", "b"), 6) == self.order(world, 6)


def words(instructions):
    """Instructions as in the drawings: "load f0", "run f0", "drop f0", "read", "begin 0", "commit", "update 1"."""
    out = []
    for each in instructions:
        unit = getattr(each, "unit", None)
        number = f"{unit.kind}{unit.shard}" if unit else getattr(each, "step", getattr(each, "shard", ""))
        out.append(f"{type(each).__name__.lower()} {number}".strip())
    return ", ".join(out)


# One task in three shards on one device, two steps. Each line: what comes through, and what the scheduler says to it.
# The claim of fb2 cannot be made before f1 runs; f1 runs as soon as f0 is computed, since its input is on this device
# or on its way; at the commit all updates are released, lowest first, and shard 0 is loaded for the next step as soon
# as its own update is through.
ONE_TASK_THREE_SHARDS = """
    device           |
    task             | read
    batch 0          | begin 0, read, load f0, run f0, load f1
    f0 computed      | run f1, load fb2
    f0 stored        |
    f1 computed      | run fb2, load b1
    f1 stored        |
    batch 1          |
    fb2 computed     | run b1, load b0
    fb2 stored       |
    b1 computed      | run b0
    b1 stored        |
    b0 computed      |
    b0 stored        | commit
    committed        | update 0, update 1, update 2, begin 1, read
    shard 0 updated  | load f0, run f0
    end of data      |
    shard 1 updated  | load f1
    f0 computed      | run f1
    f0 stored        |
    shard 2 updated  | capture, load fb2
    f1 computed      | run fb2, load b1
    f1 stored        |
    fb2 computed     | run b1, load b0
    fb2 stored       |
    b1 computed      | run b0
    b1 stored        |
    b0 computed      |
    b0 stored        | commit
    committed        | update 0, update 1, update 2
    shard 0 updated  |
    shard 1 updated  |
    shard 2 updated  | capture, finish
"""


def test_one_task_in_three_shards_is_the_drawing():
    world = World()
    for line in ONE_TASK_THREE_SHARDS.strip().splitlines():
        what, _, expected = (part.strip() for part in line.partition("|"))
        task = world.tasks.get("task")
        match what.split():
            case ["device"]:
                out = world.add_device(0)
            case ["task"]:
                out = world.add_task(task_added("task", 3, num_steps=2), [TRAIN, TRAIN])
            case ["batch", _] | ["end", "of", "data"]:
                out = world.read(task)
            case [unit, "computed"]:
                assert world.running[0] == Unit.parse(f"task.{unit}@{task.step}")
                out = world.compute(0)
            case [unit, "stored"]:
                assert task.storing == Unit.parse(f"task.{unit}@{task.step}")
                out = world.store(task)
            case ["committed"]:
                out = world.commit(task)
            case ["shard", shard, "updated"]:
                out = world.update(task, int(shard))
        assert words(out) == expected, what
    assert world.scheduler.finished


def one_task(num_shards, *batches, num_micro_batches=1, **options):
    """A world of one device, and its only task."""
    world = World(num_devices=1)
    world.add_task(task_added("task", num_shards, **options), batches, num_micro_batches)
    return world, world.tasks["task"]


def test_without_double_buffering_a_shard_is_loaded_when_it_runs():
    world = World(num_devices=1, double_buffer=False)
    world.add_task(task_added("task", 2), [TRAIN])
    task = world.tasks["task"]
    assert words(world.read(task)) == "begin 0, read, load f0, run f0"
    assert words(world.compute(0)) == "load fb1, run fb1"
    assert words(world.store(task)) == ""
    assert words(world.compute(0)) == "load b0, run b0"
    assert words(world.store(task)) == ""


def test_task_that_draws_reads_on_when_its_forward_is_through():
    world, task = one_task(2, TRAIN, EVALUATE, num_steps=2, reads_ahead=False)
    assert words(world.read(task)) == "begin 0, load f0, run f0, load fb1"
    assert words(world.compute(0)) == "run fb1, load b0"
    world.store(task)
    assert words(world.compute(0)) == "run b0"
    assert words(world.store(task)) == "read"
    world.read(task)
    world.run(task)
    assert words(world.commit(task)) == "update 0, update 1, begin 0"
    assert words(world.update(task, 0)) == "load e0, run e0"
    assert words(world.update(task, 1)) == "capture, load e1"
    assert words(world.compute(0)) == "run e1"
    world.store(task)
    assert words(world.run(task)) == "read, commit"
    assert words(world.commit(task)) == "capture"
    assert words(world.read(task)) == "finish"


def test_load_waits_for_the_update_of_a_tied_weights_owner():
    needs = ((0,), (0, 1))  # shard 1 holds a weight that shard 0 owns
    world, task = one_task(2, TRAIN, TRAIN, num_steps=2, needs=needs)
    world.read(task)
    for _ in range(3):
        world.run(task)
    world.read(task)
    world.commit(task)
    assert words(world.update(task, 1)) == ""
    assert words(world.update(task, 0)) == "capture, load f0, run f0, load fb1"


def ahead(lowest_backward, batches, **options):
    """A world in which a task of two shards has begun the last unit of its first batch, and read the next one."""
    world, task = one_task(2, *batches, lowest_backward=lowest_backward, **options)
    world.read(task)
    while task.parts[0].position < len(task.chain):
        world.run(task)
    return world, task


@pytest.mark.parametrize("options", [{}, {"early_release": True}])
def test_a_shard_that_nothing_trains_is_loaded_before_the_commit_and_run_after_it(options):
    #           compute   f0   fb1           f0
    #           load           f0 of the next
    #           host               commit
    world, task = ahead(1, [TRAIN, TRAIN], **options)
    assert words(world.read(task)) == "load f0"
    assert "run" not in words(world.compute(0))
    assert "commit" in words(world.store(task))
    assert "run f0" in words(world.commit(task))
    assert world.running[0] == Unit("task", FORWARD, 0, 1)
    world.validate()


def test_no_other_device_loads_ahead():
    world, task = ahead(1, [TRAIN, TRAIN])
    world.add_device(1)
    assert words(world.read(task)) == "load f0"
    assert world.claims == {0: Unit("task", FORWARD, 0, 1), 1: None}


def test_a_shard_that_is_trained_is_not_loaded_before_its_update():
    world, task = ahead(0, [TRAIN, TRAIN])
    assert words(world.read(task)) == ""
    assert words(world.run(task)) == "commit"
    assert words(world.commit(task)) == "update 0, update 1, begin 1, read"
    assert words(world.update(task, 0)) == "load f0, run f0"


def test_a_batch_that_is_evaluated_changes_no_weights_so_the_next_is_loaded_beside_it():
    world, task = ahead(0, [EVALUATE, TRAIN])
    assert words(world.read(task)) == "load f0"
    world.run(task)
    assert words(world.commit(task)) == "capture, begin 0, read, run f0, load fb1"


@pytest.mark.parametrize("happens", ["misfit", "lose", "fail", "stop"])
def test_what_was_loaded_ahead_is_dropped_where_the_step_is_not_committed(happens):
    world, task = ahead(1, [TRAIN, TRAIN])
    world.read(task)
    world.compute(0, failed=happens != "stop")
    call = {
        "misfit": lambda: world.misfit(task),
        "lose": lambda: world.lose(task),
        "fail": lambda: world.store(task, RuntimeError("unit")),
        "stop": lambda: world.stop_task(task),
    }[happens]
    assert words(call()).startswith("drop f0")


def two_tasks(policy, **options):
    """A world with tasks "a" and "b" of two shards, both read, before their first device."""
    world = World(policy)
    for name, seconds in options.items():
        world.begin_task(name, 2, seconds=seconds)
    return world


@pytest.mark.parametrize("policy", ["fair-share", "fifo", "round-robin", "sharded-lrtf"])
def test_two_equal_tasks_alternate_on_one_device(policy):
    #           compute   a.f0   b.f0   a.fb1  b.fb1  a.b0   b.b0
    #           load             b.f0   a.fb1  b.fb1  a.b0   b.b0      each while the unit before it computes
    world = two_tasks(policy, a=1.0, b=1.0)
    world.add_device(0)
    order, loaded = [], world.running[0]
    while any(world.running.values()):
        unit = world.running[0]
        assert unit == loaded, "what runs was loaded while the unit before it computed"
        order.append(f"{unit.task}.{unit.kind}{unit.shard}")
        loaded = world.claims[0]
        world.run(world.tasks[unit.task])
    assert order == ["a.f0", "b.f0", "a.fb1", "b.fb1", "a.b0", "b.b0"]


def test_device_computes_another_task_while_one_is_updated():
    world = World("fifo")
    a, b = world.begin_task("a", 1, 2), world.begin_task("b", 2)
    world.add_device(0)
    world.run(a)
    world.read(a)
    assert words(world.commit(a)) == "update 0, begin 1, read"
    for kind, shard in (("f", 0), ("fb", 1), ("b", 0)):  # the optimizer of a is at work all the time
        assert world.running[0] == Unit("b", kind, shard, 0)
        world.run(b)
    assert words(world.update(a, 0)) == "capture, load fb0, run fb0"


def test_sharded_lrtf_runs_the_longest_task_first_and_fifo_the_first_to_be_ready():
    for policy, first, second in (("sharded-lrtf", "long", "long"), ("fifo", "short", "long")):
        world = two_tasks(policy, short=1.0, long=3.0)
        world.add_device(0)
        assert world.running[0].task == first
        assert world.claims[0].task == second


class Spy:
    """Keeps what it was shown last."""

    def key(self, candidate):
        self.remaining_s = candidate.remaining_s
        return 0


def spied_task(num_steps):
    """A world of one device and one task whose units take 1, 2 and 4 s, and the spy that chooses."""
    spy = Spy()
    world = World(spy, num_devices=1, double_buffer=False)
    unit_s = {("f", 0): 1.0, ("fb", 1): 2.0, ("b", 0): 4.0}
    world.add_task(task_added("task", 2, num_steps=num_steps, unit_s=unit_s), [TRAIN, TRAIN, EVALUATE])
    world.read(world.tasks["task"])
    return world, world.tasks["task"], spy


def run_step(world, task, *seconds):
    """Its first units take these seconds, the others what was estimated."""
    seconds = list(seconds)
    while not task.committing:
        estimated_s = task.added.units.unit_s.get((world.running[0].kind, world.running[0].shard), 0.0)
        world.compute(0, seconds.pop(0) if seconds else estimated_s)
        world.store(task)
    world.read(task)
    world.commit(task)
    for shard in list(task.updating):
        world.update(task, shard)


def test_remaining_time_is_that_of_the_units_left_and_of_the_steps_to_come():
    world, task, spy = spied_task(num_steps=3)
    assert spy.remaining_s == (2 + 4) + 2 * 7  # f0 runs, and fb1 is what could be loaded
    world.compute(0, 1.0)
    assert spy.remaining_s == 4 + 2 * 7
    world.store(task)
    run_step(world, task)
    assert spy.remaining_s == (2 + 4) + 1 * 7


def test_remaining_time_during_an_evaluation_counts_the_steps_after_it():
    world, task, spy = spied_task(num_steps=3)
    run_step(world, task)
    run_step(world, task)
    assert world.running[0] == Unit("task", "e", 0, 0)
    world.compute(0, 0.0)
    assert spy.remaining_s == 0 + 1 * 7  # nobody knows yet how long an evaluation takes


def test_loader_that_does_not_say_has_as_many_steps_again_as_so_far():
    world, task, spy = spied_task(num_steps=None)
    assert spy.remaining_s == 6 + 1 * 7
    run_step(world, task)
    assert spy.remaining_s == 6 + 2 * 7


def test_remaining_time_follows_what_was_measured():
    world, task, spy = spied_task(num_steps=3)
    run_step(world, task, 101.0)  # the first unit is disturbed: 1 s so far
    learned_s = 0.7 * 1.0 + 0.3 * 2.0  # it counts as twice the estimate, no more
    assert spy.remaining_s == pytest.approx((2 + 4) + 1 * (learned_s + 2 + 4))


def test_unit_waits_from_the_update_that_made_it_ready():
    # c computes; meanwhile a begins its second step, b's next unit gets its input, and only then a's shard is updated.
    world = World("fifo", double_buffer=False)
    a, b, c = (world.begin_task(name, 2 if name == "b" else 1, 2) for name in "abc")
    world.add_device(0)
    world.compute(0)
    world.compute(0)
    assert world.running[0] == c.unit
    world.store(a)
    world.read(a)
    assert words(world.commit(a)) == "update 0, begin 1, read"
    world.store(b)
    world.update(a, 0)
    world.compute(0)
    assert world.running[0] == b.unit


def test_idle_device_steals_a_claim():
    # Device 0 runs a.f0 and has loaded b.f0. Device 1 comes, and would idle: it takes b.f0 over.
    world = two_tasks("fifo", a=1.0, b=1.0)
    world.add_device(0)
    assert world.claims[0] == Unit("b", "f", 0, 0)
    out = world.add_device(1)
    stolen = Unit("b", "f", 0, 0)
    assert out[:3] == [Drop(0, stolen), Load(1, stolen), Run(1, stolen)]
    assert world.running == {0: Unit("a", "f", 0, 0), 1: stolen}


def test_claim_that_is_loaded_stays_where_it_is_loaded():
    # Device 1 has loaded b.f0 and is idle when it becomes ready, as device 0 is; a.f0 is on neither.
    world = World("fifo", num_devices=2)
    world.add_task(task_added("a", 1), [TRAIN])
    world.add_task(task_added("b", 2), [TRAIN])
    world.read(world.tasks["b"])
    world.read(world.tasks["a"])
    assert world.running == {0: Unit("b", "f", 0, 0), 1: Unit("a", "fb", 0, 0)}
    claim = Unit("b", "fb", 1, 0)
    [holder] = [device for device, unit in world.claims.items() if unit == claim]
    world.compute(1 - holder)
    assert world.compute(holder)[0] == Run(holder, claim)


def test_claims_of_a_failed_task_are_dropped():
    world, task = one_task(3, TRAIN)
    world.read(task)
    assert world.compute(0, failed=True) == []
    assert world.claims[0] == Unit("task", "f", 1, 0)
    out = world.store(task, RuntimeError("a layer"))
    assert out == [Drop(0, Unit("task", "f", 1, 0)), Finish("task")]


def test_task_ends_once_what_went_on_from_a_failed_unit_is_through():
    # f0 is computed and f1 begun on the same device; then f0 fails on its way to DRAM.
    world, task = one_task(3, TRAIN)
    world.read(task)
    assert words(world.compute(0)) == "run f1, load fb2"
    assert words(world.store(task, RuntimeError("full"))) == "drop fb2"
    assert world.compute(0) == []  # fails, for want of its input
    assert words(world.store(task, RuntimeError("full"))) == "finish"


def test_unit_runs_only_where_its_input_was_made_until_that_is_stored():
    world = two_tasks("fifo", a=1.0)
    world.add_device(0)
    world.add_device(1)
    world.begin_task("b", 1)
    assert world.running == {0: Unit("a", "f", 0, 0), 1: Unit("b", "fb", 0, 0)}
    world.compute(1)
    assert world.running[1] is None
    world.add_task(task_added("c", 1), [TRAIN])
    assert words(world.compute(0)) == "run fb1, load b0"  # on device 0, and device 1 stays idle
    world.read(world.tasks["c"])
    assert world.running == {0: Unit("a", "fb", 1, 0), 1: Unit("c", "fb", 0, 0)}


class TestDevicesThatComeAndGo:
    def world(self, num_devices=1, num_shards=3, *, min_devices=1, **options):
        """One task, whose first step has begun."""
        world = World(num_devices=num_devices, min_devices=min_devices)
        return world, world.begin_task("task", num_shards, 2, **options)

    def test_a_device_that_is_removed_ends_its_unit_and_another_goes_on(self):
        #     device 0   |f0    |                the shard that it has loaded meanwhile is dropped
        #     device 1          |f1    |         once f0 is in DRAM
        world, task = self.world(2)
        assert words(world.remove_device(0)) == "drop f1, load f1"
        assert world.claims == {0: None, 1: Unit("task", "f", 1, 0)}
        assert world.compute(0) == [Release(0)]
        assert world.store(task) == [Run(1, Unit("task", "f", 1, 0)), Load(1, Unit("task", "fb", 2, 0))]

    def test_an_idle_device_is_released_at_once_and_comes_back_under_its_number(self):
        world, task = self.world(2)
        assert world.remove_device(1) == [Release(1)]
        for event in (DeviceWanted(1), DeviceReturned(1)):
            assert world.scheduler.handle(event) == []  # nobody gets a device that is not there
        assert world.remove_device(0) == [Drop(0, Unit("task", "f", 1, 0))]
        world.compute(0)
        # What f0 has left was on the device that is gone: it is waited for.
        assert world.add_device(0) == [Load(0, Unit("task", "f", 1, 0))]
        assert words(world.store(task)) == "run f1, load fb2"

    def test_a_device_that_is_lent_is_released_when_it_is_returned(self):
        world, _ = self.world(2)
        assert world.want_device(1) == [Lend(1)]
        assert world.remove_device(1) == []
        assert world.want_device(0) == [Drop(0, Unit("task", "f", 1, 0))]
        assert world.remove_device(0) == []
        assert world.compute(0) == [Lend(0)]
        assert world.return_device(1) == [Release(1)]
        assert world.return_device(0) == [Release(0)]

    def test_below_the_minimum_nothing_begins_and_what_runs_comes_through(self):
        world, task = self.world(2, min_devices=2)
        assert words(world.remove_device(1)) == "release"
        assert words(world.compute(0)) == words(world.store(task)) == ""
        assert world.claims == {0: Unit("task", "f", 1, 0)}
        assert words(world.add_device(3)) == "run f1, load fb2"

    def test_a_lost_unit_is_run_again_elsewhere_and_nothing_before_it(self):
        world, task = self.world(2)
        world.run(task)
        assert world.running == {0: Unit("task", "f", 1, 0), 1: None}
        world.remove_device(0)
        assert world.compute(0, failed=True) == [Release(0)]
        assert words(world.lose(task)) == "drop fb2, load f1, run f1, load fb2"
        assert world.running == {1: Unit("task", "f", 1, 0)}

    @pytest.mark.parametrize("comes_through", [False, True])
    @pytest.mark.parametrize("at_once", [False, True])
    def test_what_was_begun_from_a_lost_unit_is_waited_for_and_run_again_too(self, comes_through, at_once):
        """f0 is lost on its way to DRAM while f1 computes: f1 fails, or is stored, and f0 is run again."""
        world, task = self.world(2)
        world.compute(0)
        assert words(world.lose(task)) == "drop fb2"
        world.is_stored_at_once = lambda: at_once
        said = words(world.compute(0, failed=not comes_through))
        if not comes_through:
            said = words(world.lose(task))
        elif not at_once:
            said = words(world.store(task))
        assert said == "load f0, run f0, load f1"

    def test_the_last_unit_does_not_count_when_the_first_is_to_be_run_again(self):
        """f0 is lost while fb1, the last of the chain, computes: both are run again before anything is updated."""
        world, task = self.world(lowest_backward=1, num_shards=2, early_release=True, reads_ahead=False)
        world.compute(0)
        assert words(world.lose(task)) == ""
        assert words(world.run(task)) == "load f0, run f0, load fb1"
        world.run(task)
        assert words(world.run(task)) == "update 1, read, commit"

    def test_a_unit_is_lost_in_a_step_that_another_part_has_to_begin_again(self):
        world = World(num_devices=2)
        world.add_task(task_added("task", 2, spreads=(Spread(), Spread(2.0))), [TRAIN], num_micro_batches=2)
        task = world.tasks["task"]
        world.read(task)
        world.compute(0, failed=True)
        world.compute(1, failed=True)
        assert words(world.lose(task, 0)) == "drop fb1, drop fb1, load f0, run f0, load fb1, load fb1"
        assert words(world.misfit(task, 1)) == "drop fb1, drop fb1"
        world.compute(0, failed=True)
        assert words(world.lose(task, 0)) == "fit f0"
        assert words(world.fit(task)) == "load f0, run f0, load fb1"

    def test_a_task_that_is_over_ends_once_its_lost_unit_is_reported(self):
        world, task = self.world()
        world.compute(0, failed=True)
        assert words(world.stop_task(task)) == "drop f1"
        assert words(world.lose(task)) == "finish"

    @pytest.mark.parametrize("removed_first", [False, True])
    def test_a_stop_without_devices_leaves_a_step_undone_that_has_updated_shards(self, removed_first):
        world, task = self.world(early_release=True)
        for _ in range(3):
            said = words(world.run(task))
        assert said == "update 2"
        if removed_first:
            world.remove_device(0)
            said = words(world.stop())
        else:
            world.stop()
            said = words(world.remove_device(0))
        assert said == ("" if removed_first else "drop b0")
        assert world.compute(0) == [Release(0)]
        assert words(world.store(task)) == "discard 1"
        assert world.update(task, 2) == [Finish("task", is_settled=False)]

    def test_a_stop_below_the_minimum_ends_such_a_step_on_the_devices_there_are(self):
        world, task = self.world(2, early_release=True, min_devices=2)
        for _ in range(3):
            world.run(task)
        world.remove_device(1)
        assert words(world.run(task)) == "update 1"
        assert words(world.stop()) == "run b0"
        assert words(world.run(task)) == "update 0, commit"
        assert words(world.commit(task)) == ""
        for shard in (2, 1, 0):
            said = words(world.update(task, shard))
        assert said == "capture, finish"

    def test_steps_are_spread_over_devices_that_come_once_it_is_known_how(self):
        world, task = one_task(1, *[TRAIN] * 5, num_micro_batches=4, num_steps=5)
        num_parts = [next(each.num_parts for each in world.read(task) if isinstance(each, Begin))]

        def step():
            world.read(task)
            for device in [device for device, unit in world.running.items() if unit is not None]:
                world.compute(device)
            for part in range(len(task.parts)):
                world.store(task, part=part)
            num_parts.extend(each.num_parts for each in world.commit(task) if isinstance(each, Begin))
            world.update(task, 0)

        world.add_device(1)
        step()
        world.know_spreads(task, [Spread(), Spread(2.0), Spread(3.0)])
        world.add_device(2)
        step()
        world.remove_device(1)
        step()
        world.remove_device(0)
        step()
        assert num_parts == [1, 1, 3, 2, 1]


class TestSpreadsThatChange:
    """Tasks of one shard, a unit a step, of eight micro-batches each, on four devices."""

    def world(self, num_tasks=1):
        world = World(num_devices=4)
        for k in range(num_tasks):
            world.add_task(task_added(str(k), 1, num_steps=9, spreads=self.spreads(4), adapts=True), [TRAIN] * 9, 8)
        return world

    def spreads(self, most, *, in_sums=True, ordered=()):
        return [Spread(float(k + 1), frozenset(ordered), in_sums) for k in range(most)]

    def step(self, world, task):
        """Go through the task's step in progress; what was said."""
        said = []
        for device in [device for device, unit in world.running.items() if unit and unit.task == task.name]:
            said += world.compute(device)
        for part in task.parts:
            while part.storing:
                said += world.store(task, part=part.index)
        return said

    def next_step(self, world, task):
        """Commit a step that is through; in how many parts the next one begins, and what its `Read` tells."""
        if task.reading:
            world.read(task)
        said = [*world.commit(task), *world.update(task, 0)]
        [begin] = [each for each in said if isinstance(each, Begin)]
        return begin, [each.num_devices for each in said if isinstance(each, Read)]

    def test_fewer_spreads_than_the_step_in_progress_has_parts(self):
        world = self.world()
        task = world.tasks["0"]
        world.read(task)
        assert len(task.parts) == 4
        world.know_spreads(task, self.spreads(2, in_sums=False, ordered=[("fb", 0)]))
        assert len([unit for unit in world.running.values() if unit]) == 4
        assert Commit("0", TRAIN) in self.step(world, task)
        begin, told = self.next_step(world, task)
        assert begin == Begin("0", 1, 2, in_sums=False)
        assert told == [2]
        assert len([unit for unit in world.running.values() if unit]) == 1  # its parts run one after the other

    def test_units_that_are_ordered_from_now_on_go_side_by_side_in_the_step_in_progress(self):
        world = World(num_devices=1)
        world.add_task(task_added("0", 2, spreads=self.spreads(2)), [TRAIN], 2)
        world.add_device(1)
        task = world.tasks["0"]
        world.read(task)
        assert [str(unit) for unit in world.running.values()] == ["0.f0@0", "0.f0@0+1"]
        world.know_spreads(task, self.spreads(2, ordered=[("fb", 1)]))
        assert Run(1, Unit("0", "fb", 1, 0, 1)) in world.compute(1)  # before the first part's

    def test_spreads_that_come_again_and_again(self):
        world = self.world()
        task = world.tasks["0"]
        world.read(task)
        found = []
        for most in (1, 3, 2, 4, 4, 1, 2):
            world.know_spreads(task, self.spreads(4))
            world.know_spreads(task, self.spreads(most))
            self.step(world, task)
            begin, told = self.next_step(world, task)
            found.append((begin.num_parts, *told))
        assert found == [(most, most) for most in (1, 3, 2, 4, 4, 1, 2)]

    def test_a_read_tells_how_many_devices_there_are_for_the_task_that_adapts(self):
        world = self.world(num_tasks=3)
        # As they come: one has all devices, two have half of them each, of three one has what two leave.
        assert [each for each in world.story if isinstance(each, Read)] == [Read("0", 4), Read("1", 2), Read("2", 2)]
        told = [each for name in "012" for each in world.read(world.tasks[name]) if isinstance(each, (Begin, Read))]
        begun = [Begin("0", 0, 1), Begin("1", 0, 1), Begin("2", 0, 2)]
        assert told == [said for begin in begun for said in (begin, Read(begin.task, begin.num_parts))]

    def test_a_read_tells_1_of_a_task_that_does_not_adapt_or_where_no_device_is_in(self):
        world = World()
        assert world.add_task(task_added("a", 1, spreads=self.spreads(4), adapts=True), [TRAIN]) == [Read("a", 1)]
        for device in range(3):
            world.add_device(device)
        assert world.add_task(task_added("b", 1, spreads=self.spreads(4)), [TRAIN]) == [Read("b", 1)]
        assert world.add_task(task_added("c", 1, adapts=True), [TRAIN]) == [Read("c", 1)]

    def test_a_step_of_fewer_micro_batches_than_devices_has_as_many_parts(self):
        world = self.world()
        task = world.tasks["0"]
        task.num_micro_batches = 3
        assert Begin("0", 0, 3) in world.read(task)
        task.num_micro_batches = 4
        self.step(world, task)
        assert self.next_step(world, task) == (Begin("0", 1, 4), [4])

    @pytest.mark.parametrize(("fairness", "expected"), [(None, {"a": 1, "b": 3}), (1, {"a": 3, "b": 1})])
    def test_fairness_shares_out_devices(self, fairness, expected):
        """Task a is short and spreads well; b is long, and gains little."""
        world = World(fairness=fairness)
        known = {"a": self.spreads(3), "b": [Spread(1.0 + 0.1 * k) for k in range(3)]}
        for name, num_steps in (("a", 1), ("b", 9)):
            added = task_added(name, 1, num_steps=num_steps, spreads=known[name], adapts=True)
            world.add_task(added, [TRAIN] * num_steps, 8)
        for device in range(4):
            world.add_device(device)
        begun = [each for name in "ab" for each in world.read(world.tasks[name]) if isinstance(each, Begin)]
        assert {each.task: each.num_parts for each in begun} == expected

    def test_fairness_that_is_no_number_is_refused(self):
        with pytest.raises(TypeError, match="fairness: 'equal' is a str, not a number"):
            World(fairness="equal")


def test_fair_share_gives_time_by_weight():
    world = World("fair-share", num_devices=1, double_buffer=False)
    for name, weight in (("a", 3.0), ("b", 1.0)):
        world.add_task(task_added(name, 1, weight=weight, num_steps=200), [TRAIN] * 200)
    had = Counter()
    world.settle()
    while sum(had.values()) < 80:
        # What ran last is not ready before it is committed; with two tasks alone they would alternate.
        unit = world.running[0]
        had[unit.task] += 1
        world.compute(0, seconds=1.0 if unit.task == "a" else 3.0)
        world.settle()
    assert had["a"] / had["b"] == pytest.approx(1.0, rel=0.1)  # equal numbers of units: the seconds are 1 to 3


def test_newcomer_gets_nothing_for_the_time_before():
    world = World("fair-share", num_devices=1)
    world.add_task(task_added("a", 1, num_steps=50), [TRAIN] * 50)
    a = world.tasks["a"]
    for _ in range(20):
        world.read(a)
        world.run(a)
        world.commit(a)
        world.update(a, 0)
    world.add_task(task_added("b", 3, num_steps=50), [TRAIN] * 50)
    world.add_task(task_added("c", 3, num_steps=50), [TRAIN] * 50)
    world.read(a)
    world.read(world.tasks["b"])
    world.read(world.tasks["c"])
    order = []
    for _ in range(6):
        order.append(world.running[0].task)
        world.run(world.tasks[order[-1]])
    assert order.count("b") <= 3
    assert order.count("c") <= 3


def test_stop_finishes_what_is_committed():
    world, task = one_task(1, TRAIN, TRAIN, num_steps=2)
    world.read(task)
    world.run(task)
    assert world.stop() == []  # the commit is under way
    assert words(world.commit(task)) == "update 0"
    assert not world.scheduler.finished
    assert words(world.update(task, 0)) == "capture, finish"
    assert world.read(task) == []


def test_task_that_is_to_be_saved_is_captured_at_once_or_after_its_commit_and_updates():
    world, task = one_task(1, TRAIN, TRAIN, num_steps=2)
    assert words(world.want_capture(task)) == "capture"
    world.read(task)
    world.compute(0)
    assert words(world.want_capture(task)) == "capture"  # a unit changes nothing of the task's state
    world.store(task)
    assert words(world.want_capture(task)) == ""
    assert words(world.commit(task)) == "update 0"
    assert words(world.update(task, 0)) == "capture"


def releases_early(num_shards):
    """A scheduler of one device and a task that releases early, whose first batch is ready."""
    scheduler = Scheduler(resolve_policy("fifo"))
    scheduler.handle(DeviceAdded(0))
    scheduler.handle(task_added("task", num_shards, num_steps=2, early_release=True))
    scheduler.handle(BatchReady("task", 0, TRAIN))
    return scheduler


def through(scheduler, unit):
    """A unit is computed, and what it left is in DRAM; what is said to the latter."""
    scheduler.handle(Computed(0, unit, 1.0))
    return scheduler.handle(Stored(unit))


def test_gradients_of_a_task_that_is_over_are_discarded_so_that_no_unit_waits_for_their_room():
    scheduler = releases_early(3)
    units = [Unit("task", *node, 0) for node in training_chain(3, 0)]
    for unit in units[:2]:
        through(scheduler, unit)
    assert Update("task", 2) in through(scheduler, units[2])
    scheduler.handle(Computed(0, units[3], 1.0))
    scheduler.handle(Failed("task", RuntimeError("its update"), "its optimizer"))
    assert scheduler.handle(Stored(units[3])) == [Discard("task", 1)]
    assert through(scheduler, units[4]) == [Discard("task", 0)]
    assert words(scheduler.handle(ShardUpdated("task", 2))) == "finish"


def test_no_update_that_was_released_early_is_a_barrier():
    """The commit and the next step's units go on beside updates of other shards, each after its own shard's."""
    scheduler = releases_early(2)
    for node in training_chain(2, 0):
        said = through(scheduler, Unit("task", *node, 0))
    assert words(said) == "update 0, commit"
    assert sorted(said, key=lambda instruction: instruction.host_order) == said[::-1], "the commit goes first"
    scheduler.handle(BatchReady("task", 1, TRAIN))
    assert words(scheduler.handle(ShardUpdated("task", 0))) == ""
    assert "load f0, run f0" in words(scheduler.handle(StepCommitted("task", TRAIN)))
    assert "fb1" not in words(through(scheduler, Unit("task", "f", 0, 1)))
    assert "load fb1, run fb1" in words(scheduler.handle(ShardUpdated("task", 1)))


def test_task_that_releases_early_is_settled_from_its_commit_to_its_next_backward():
    scheduler = releases_early(2)

    def wanted():
        return words(scheduler.handle(CaptureWanted("task"))) == "capture"

    assert wanted()
    for k, (kind, shard) in enumerate((("f", 0), ("fb", 1), ("b", 0))):
        unit = Unit("task", kind, shard, 0)
        scheduler.handle(Computed(0, unit, 1.0))
        assert not wanted()  # the next one is run at once, and may be a backward
        said = words(scheduler.handle(Stored(unit)))
        assert ("update" in said) == (k > 0)
        assert ("commit" in said) == (k == 2)  # updates go on beside it
    assert words(scheduler.handle(ShardUpdated("task", 1))) == ""
    assert not wanted()
    assert words(scheduler.handle(StepCommitted("task", TRAIN))) == ""
    assert not wanted()
    assert words(scheduler.handle(ShardUpdated("task", 0))) == "capture"
    assert wanted()
    scheduler.handle(BatchReady("task", 1, TRAIN))
    scheduler.handle(Computed(0, Unit("task", "f", 0, 1), 1.0))
    assert scheduler.handle(StopRequested()) == []  # it ends once the step is committed
    scheduler.handle(Stored(Unit("task", "f", 0, 1)))
    scheduler.handle(Computed(0, Unit("task", "fb", 1, 1), 1.0, failed=True))
    failed = Failed("task", RuntimeError("a layer"), "a layer", Unit("task", "fb", 1, 1))
    assert scheduler.handle(failed)[-1] == Finish("task", is_settled=False)


def test_data_that_fails_ends_the_task_after_what_was_read():
    world, task = one_task(1, TRAIN, RuntimeError("loader"), num_steps=2)
    world.read(task)
    assert world.read(task) == []
    assert words(world.run(task)) == "commit"
    world.commit(task)
    assert words(world.update(task, 0)) == "capture, finish"


# -- simulated time


def makespan(tasks, num_devices, policy):
    """Seconds of a run where computing takes the tasks' estimates and everything else no time at all."""
    world = World(policy, num_devices=num_devices)
    for added, num_steps in tasks:
        world.add_task(added, [TRAIN] * num_steps)
    now_s, ties, ends, started = 0.0, count(), [], set()
    world.settle()
    while not world.scheduler.finished:
        for device, unit in world.running.items():
            if unit is not None and unit not in started:
                started.add(unit)
                seconds = world.tasks[unit.task].added.units.unit_s[unit.kind, unit.shard]
                heapq.heappush(ends, (now_s + seconds, next(ties), device, seconds))
        now_s, _, device, seconds = heapq.heappop(ends)
        world.compute(device, seconds)
        world.settle()
    return now_s


def seconds_of(tasks):
    return [sum(added.units.unit_s.values()) * num_steps for added, num_steps in tasks]


def lower_bound(tasks, num_devices):
    """No schedule is faster: neither its longest task nor all work on all devices."""
    task_s = seconds_of(tasks)
    return max(*task_s, sum(task_s) / num_devices)


@pytest.mark.parametrize("policy", ["fair-share", "fifo", "round-robin", "sharded-lrtf"])
@pytest.mark.parametrize(("num_tasks", "num_devices"), [(2, 1), (2, 2), (4, 2), (4, 4), (6, 3), (6, 4), (3, 4)])
def test_makespan_of_equal_tasks_is_close_to_the_best_there_is(policy, num_tasks, num_devices):
    tasks = [(task_added(f"task-{k}", 3, num_steps=4), 4) for k in range(num_tasks)]
    best = lower_bound(tasks, num_devices)
    num_units = 2 if policy in ("fifo", "round-robin") else 1  # the others keep tasks equally long
    assert best <= makespan(tasks, num_devices, policy) <= best + num_units  # a unit takes 1.0


def test_makespan_of_random_tasks_is_within_grahams_bound():
    # An idle device beside no run-ready unit at any time: sum / devices + (1 - 1 / devices) * longest chain, at most.
    rng = random.Random(6)
    for _ in range(40):
        num_devices = rng.randint(1, 4)
        tasks = []
        for k in range(rng.randint(1, 6)):
            num_steps = rng.randint(1, 3)
            added = task_added(f"task-{k}", rng.randint(1, 4), seconds=rng.choice([0.5, 1.0, 4.0]), num_steps=num_steps)
            tasks.append((added, num_steps))
        task_s = seconds_of(tasks)
        seconds = makespan(tasks, num_devices, rng.choice(sorted(POLICIES)))
        assert lower_bound(tasks, num_devices) - 1e-9 <= seconds
        assert seconds <= sum(task_s) / num_devices + (1 - 1 / num_devices) * max(task_s) + 1e-9


def test_nothing_that_was_said_is_lost_when_a_policy_raises():
    """Updates of a commit must come, or the task would never end."""

    class Raises(Spy):
        armed = False

        def key(self, candidate):
            if self.armed:
                raise ZeroDivisionError
            return super().key(candidate)

    policy = Raises()
    world = World(policy, num_devices=1, double_buffer=False)
    added = task_added("task", 2, num_steps=2, lowest_backward=1)  # shard 0 is frozen: it waits for no update
    world.add_task(added, [TRAIN, TRAIN])
    task = world.tasks["task"]
    world.read(task)
    while not task.committing:
        world.run(task)
    world.read(task)
    policy.armed = True
    with pytest.raises(ZeroDivisionError):
        world.scheduler.handle(StepCommitted("task", True))
    said = world.scheduler.handle(StopRequested())
    assert Update("task", 1) in said


def assert_a_policy_may_raise_once(num_calls, tasks, num_devices, **options):
    """After so many calls; the run then ends as after a signal, and each device has one unit at a time."""

    class Raises(Spy):
        left = num_calls

        def key(self, candidate):
            self.left -= 1
            if self.left == 0:
                raise ZeroDivisionError
            return super().key(candidate)

    scheduler = Scheduler(Raises(), **options)
    events = [*(DeviceAdded(index) for index in range(num_devices)), *tasks]
    running, num_read = {}, Counter()
    for _ in range(400):
        if not events and running:
            unit = running.pop(device := min(running))
            events += [Computed(device, unit, 1.0), Stored(unit)]
        if not events:
            break
        try:
            said = scheduler.handle(events.pop(0))
        except ZeroDivisionError:
            said = scheduler.handle(StopRequested())
        for each in said:
            match each:
                case Run(device, unit):
                    assert device not in running
                    running[device] = unit
                case Read(task):
                    step, num_read[task] = num_read[task], num_read[task] + 1
                    events.append(BatchReady(task, step, TRAIN) if step < 3 else DataEnded(task))
                case Update(task, shard):
                    events.append(ShardUpdated(task, shard))
                case Commit(task, training):
                    events.append(StepCommitted(task, training))
    assert scheduler.finished


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("double_buffer", [False, True])
@pytest.mark.parametrize("calls", range(1, 60))
def test_a_policy_that_raises_once_leaves_every_device_where_it_is_found(calls, double_buffer, num_devices):
    tasks = [task_added(name, 5, num_steps=3, early_release=True) for name in "ab"]
    assert_a_policy_may_raise_once(calls, tasks, num_devices, double_buffer=double_buffer)


def test_a_pass_in_step_counts_where_its_batch_has_to_be_fitted():
    scheduler = Scheduler(resolve_policy("in-step"))
    for event in (DeviceAdded(0), task_added("task", 1, num_steps=2), BatchReady("task", 0, TRAIN, True)):
        scheduler.handle(event)
    assert scheduler._tasks["task"].num_passes == 1
    scheduler.handle(Fitted("task", task_added("task", 1).units))
    assert scheduler._tasks["task"].num_passes == 1
