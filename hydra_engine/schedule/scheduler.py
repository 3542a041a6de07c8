"""Decides, never acts: `handle(event) -> [instruction]`. No torch, no threads, no clock.

A task works through its batches; a batch is a chain of units, then a commit, then one update per shard:

    Read -> BatchReady -> Begin -> f0 ... fb(n-1) ... b0 -> Commit -> StepCommitted -> Update 0, 1, ... -> ShardUpdated
                                   each: Load, Run, Computed, Stored

Where a batch has new shapes, Fit -> Fitted stands for Begin; and a unit that does not fit, DidNotFit -> Fit -> Fitted,
starts the step again, on a finer partition. So does one that raised and is tried again, on the same.

A unit is load-ready when its shard's weights are up to date. It is run-ready when its input is in DRAM as well, or on
its way there: then on the device that computed the unit before it, and on no other until that is stored; gradients of
several units may be on their way down while the device goes on. Which device takes which unit is for `dispatch`.

Where there are fewer tasks than devices, a step is spread over several: its micro-batches are cut into parts, each of
which goes through the chain for itself, and the step is committed when all are through. Units that are `ordered`, since
one part's begins with what the part before it has left, run one after the other all the same. How many parts a task's
steps have is solved anew when tasks come or end, or devices do, or what is known of a task's spreads changes; a step in
progress stays as it was begun. Where tasks stand in groups, each group's devices are
shared out by themselves. A task that `adapts` is told the number as its next batch is read.

From the begin of a batch's last unit to its commit, the device that has the unit may load the first shard of the next
batch: a unit that is load-ready then is one whose weights the commit leaves as they are. Those are shards that nothing
trains, and all shards while a batch is evaluated. A step that is not committed drops what was loaded for the next one.

With early release, a shard's Update comes once its backward is stored. Nothing waits for all of them: the commit goes
before those that the host has not begun, and the next step's units wait for their own shard's update alone.

Once a commit's updates are through, the task is settled: `Capture`.
"""

from __future__ import annotations

from collections.abc import Callable

from hydra_engine.schedule.dispatch import Dispatch
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
    Event,
    Failed,
    Finish,
    Fit,
    Fitted,
    HomesMoved,
    Instruction,
    Move,
    MoveWanted,
    Read,
    ShardUpdated,
    SpreadsKnown,
    StepCommitted,
    StopRequested,
    Stored,
    TaskAdded,
    TaskStopped,
    UnitLost,
    Update,
)
from hydra_engine.schedule.groups import Group, shared_out
from hydra_engine.schedule.policies import Policy
from hydra_engine.schedule.state import Activity, OnHost, Part, Phase, ScheduledTask, allocate
from hydra_engine.schedule.units import BACKWARD, FUSED, Unit, part_ranges


# Past 300 lines: it has a handler for each event, and they share one state.
class Scheduler:
    """The state of a run as far as decisions need it; touched by one thread only."""

    def __init__(
        self,
        policy: Policy,
        *,
        double_buffer: bool = True,
        is_resident: Callable[[int, str, int], bool] = lambda *_: False,
        min_devices: int = 1,
        has_groups: bool = False,
    ) -> None:
        """Make the scheduler of a run.

        is_resident: whether a device holds what it takes to run units of a (device, task, shard). min_devices: where
        fewer are in, no unit begins. has_groups: tasks stand in groups, each of which brings its quota.
        """
        self._out: list[Instruction] = []
        self._dispatch = Dispatch(
            policy,
            self._out,
            double_buffer=double_buffer,
            is_resident=is_resident,
            min_devices=min_devices,
            has_groups=has_groups,
        )
        self._tasks: dict[str, ScheduledTask] = {}
        self._num_unfinished = 0
        self._numbers: dict[ScheduledTask, int] | None = {}  # devices by task; None: to be solved anew
        self._groups: dict[str | None, Group] | None = {} if has_groups else None
        self._members: dict[Group, dict[ScheduledTask, None]] = {}  # unfinished tasks
        self._num_wanted = 0  # devices, by all tasks
        self._waiting: dict[ScheduledTask, None] = {}  # for more devices
        self._handlers: dict[type, Callable[..., None]] = {
            TaskAdded: self._task_added,
            BatchReady: self._batch_ready,
            DataEnded: self._data_ended,
            DataFailed: self._data_ended,
            Computed: self._computed,
            Stored: self._stored,
            DidNotFit: self._did_not_fit,
            UnitLost: self._unit_lost,
            Fitted: self._fitted,
            StepCommitted: self._step_committed,
            ShardUpdated: self._shard_updated,
            Failed: self._failed,
            SpreadsKnown: self._spreads_known,
            DeviceAdded: self._device_added,
            DeviceRemoved: self._device_removed,
            DeviceWanted: lambda event: self._dispatch.lend(event.device),
            DeviceReturned: lambda event: self._dispatch.take_back(event.device),
            MoveWanted: self._move_wanted,
            HomesMoved: self._homes_moved,
            CaptureWanted: lambda event: self._capture(self._tasks[event.task]),
            TaskStopped: self._task_stopped,
            StopRequested: self._stop_requested,
        }

    @property
    def finished(self) -> bool:
        return self._num_unfinished == 0

    def knows(self, task: str) -> bool:
        return task in self._tasks

    def activity(self, task: str) -> Activity:
        """Return what happens to a task now, for people."""
        return self._tasks[task].activity

    def at_device(self, device: int) -> tuple[Unit | None, Unit | None]:
        """Return the unit that a device runs, and the one that it claims, for people."""
        return self._dispatch.at_device(device)

    def handle(self, event: Event) -> list[Instruction]:
        """Take an event in; what to do about it, in order."""
        self._handlers[type(event)](event)
        return self.dispatch()

    def take(self, event: Event) -> list[Instruction]:
        """The first half of `handle`, for events that come at one time: nothing is given to devices yet."""
        self._handlers[type(event)](event)
        return self._said()

    def dispatch(self) -> list[Instruction]:
        """The second half: give to devices what they can have now."""
        self._dispatch.run()
        return self._said()

    def _said(self) -> list[Instruction]:
        """Instructions since the last time; a policy that raises leaves what was said before it for the next event."""
        out, self._out[:] = self._out[:], []
        return out

    # -- events

    def _task_added(self, event: TaskAdded) -> None:
        task = ScheduledTask(event, event.units, order=len(self._tasks), unit_s=dict(event.units.unit_s))
        if self._groups is not None:
            group = task.group = self._groups.setdefault(event.group, Group(event.quota or 0))
            self._members.setdefault(group, {})[task] = None
        self._want(task, len(task.speedups))
        task.estimate()
        self._tasks[event.task] = task
        self._num_unfinished += 1
        task.parts = [Part(task)]
        self._dispatch.add_task(task)
        self._read(task)

    def _device_added(self, event: DeviceAdded) -> None:
        self._numbers = None
        self._dispatch.add_device(event.device)
        waiting, self._waiting = self._waiting, {}
        for task in waiting:
            self._advance(task)

    def _device_removed(self, event: DeviceRemoved) -> None:
        self._numbers = None
        self._dispatch.remove_device(event.device)
        self._end_undone()

    def _spreads_known(self, event: SpreadsKnown) -> None:
        task = self._tasks[event.task]
        task.units = task.units._replace(spreads=event.spreads)
        self._want(task, len(task.speedups))

    def _batch_ready(self, event: BatchReady) -> None:
        task = self._tasks[event.task]
        task.next_batch = event
        if event.num_left is not None:  # counted from the step that is in progress
            in_progress = bool(task.chain) and task.batch.training
            task.added = task.added._replace(num_steps=task.num_steps_done + in_progress + event.num_left)
        self._advance(task)
        if task.chain_ahead:
            self._dispatch.refresh(task)

    def _data_ended(self, event: DataEnded | DataFailed) -> None:
        task = self._tasks[event.task]
        task.phase = max(task.phase, Phase.ALL_READ)
        self._advance(task)

    def _part(self, unit: Unit) -> Part:
        return self._tasks[unit.task].parts[unit.part]

    def _computed(self, event: Computed) -> None:
        part = self._part(event.unit)
        device = self._dispatch.computed(event, part)
        if event.stored:
            assert part.storing == 0, event.unit
            self._is_stored(part, (event.unit.kind, event.unit.shard))
        else:
            part.leave(None if event.failed else device)
        self._dispatch.touch(device)
        self._dispatch.refresh(part.task)

    def _stored(self, event: Stored) -> None:
        part = self._part(event.unit)
        assert part.storing, event.unit
        part.arrive()
        self._is_stored(part, (event.unit.kind, event.unit.shard))
        self._dispatch.refresh(part.task)  # and those that waited for this

    def _is_stored(self, part: Part, node: tuple[str, int]) -> None:
        if part.lost is not None:
            part.go_back()
        task, through = part.task, part.num_stored
        if through and task.chain and task.chain[through - 1] == node and task.num_stored() == through:
            self._stored_whole(task, node)
        self._commit(task)
        self._advance(task)

    def _stored_whole(self, task: ScheduledTask, node: tuple[str, int]) -> None:
        """Every part of a unit is in DRAM."""
        kind, shard = node
        has_gradients = kind in (FUSED, BACKWARD) and shard in task.units.updates
        if task.added.early_release and has_gradients:
            # Units below may wait for the room that these gradients take.
            if task.phase.is_over:
                self._out.append(Discard(task.added.task, shard))
            else:
                task.stale.add(shard)
                self._out.append(Update(task.added.task, shard))
        ends_forward = kind == FUSED or (not task.batch.training and node == task.chain[-1])
        if ends_forward and not (task.phase.is_over or task.added.reads_last):
            self._read(task)

    def _commit(self, task: ScheduledTask) -> None:
        """Commit a step whose units are all through. Updates that were released early go on beside it and after it."""
        num_units = len(task.chain)
        is_through = num_units > 0 and task.parts[0].position == num_units and task.num_stored() == num_units
        is_through = is_through and not (task.leaving or task.moving)
        if is_through and not (task.phase.is_over or task.on_host is not OnHost.NOTHING):
            task.on_host = OnHost.COMMIT
            self._out.append(Commit(task.added.task, task.batch.training))

    def _read(self, task: ScheduledTask) -> None:
        """Ask for the next batch, once."""
        if not task.has_read:
            task.has_read = True
            number = max(1, self._num_devices_for(task)) if task.added.adapts else 1
            self._out.append(Read(task.added.task, number))

    def _did_not_fit(self, event: DidNotFit) -> None:
        part = self._part(event.unit)
        task = part.task
        part.arrive()
        task.chain = ()
        if not task.phase.is_over:
            task.misfit = task.misfit or event.unit
        self._dispatch.revoke(task)
        self._advance(task)

    def _unit_lost(self, event: UnitLost) -> None:
        part = self._part(event.unit)
        part.arrive()
        self._dispatch.revoke(part.task)
        if part.task.chain:  # else the whole step begins again
            part.lose((event.unit.kind, event.unit.shard))
            part.go_back()
        self._advance(part.task)
        self._dispatch.refresh(part.task)

    def _fitted(self, event: Fitted) -> None:
        task = self._tasks[event.task]
        task.on_host = OnHost.NOTHING
        task.units = event.units
        task.unit_s = dict(event.units.unit_s)
        self._want(task, len(task.speedups))
        if task.next_batch is not None and not event.is_retried:  # read before this
            task.next_batch = task.next_batch._replace(has_to_fit=True)
        if task.phase.is_over:
            self._advance(task)
        else:
            self._begin_chain(task, 1)  # of which nothing is known on a device yet
            self._move(task)

    def _step_committed(self, event: StepCommitted) -> None:
        task = self._tasks[event.task]
        task.on_host = OnHost.NOTHING
        task.chain = ()
        if event.training:
            task.num_steps_done += 1
            if not task.added.early_release:
                task.stale = set(task.units.updates)
                self._out.extend(Update(event.task, shard) for shard in task.units.updates)
        self._capture(task)
        if task.phase is Phase.LAST_STEP:
            self._end(task)
        else:
            self._advance(task)
        if task.ahead.offer is not None:  # the next batch does not begin now
            self._dispatch.revoke(task)

    def _shard_updated(self, event: ShardUpdated) -> None:
        task = self._tasks[event.task]
        task.stale.discard(event.shard)
        self._capture(task)
        self._advance(task)
        if any(part.offer is None for part in task.parts):
            self._dispatch.refresh(task)

    def _capture(self, task: ScheduledTask) -> None:
        if task.is_settled:
            self._out.append(Capture(task.added.task))

    def _move_wanted(self, event: MoveWanted) -> None:
        task = self._tasks[event.task]
        if task.phase is Phase.FINISHED:
            return
        (task.leaving if event.leaves else task.coming).update(event.shards)
        self._advance(task)
        self._dispatch.revoke(task)

    def _homes_moved(self, event: HomesMoved) -> None:
        task = self._tasks[event.task]
        task.moving.difference_update(event.shards)
        task.homes = event.homes
        if task.phase is Phase.FINISHED:
            return
        self._capture(task)
        self._commit(task)
        self._advance(task)
        self._dispatch.revoke(task)  # of units that run elsewhere now

    def _move(self, task: ScheduledTask) -> None:
        """Have homes moved that nothing uses."""
        if shards := task.take_movable():
            self._out.append(Move(task.added.task, shards))
            self._dispatch.revoke(task)

    def _failed(self, event: Failed) -> None:
        task = self._tasks[event.task]
        if event.unit is not None:
            self._part(event.unit).arrive()
        if event.commit:
            task.on_host = OnHost.NOTHING
        self._end(task)

    def _task_stopped(self, event: TaskStopped) -> None:
        task = self._tasks[event.task]
        if event.uncommitted:
            task.on_host = OnHost.NOTHING
        if event.is_paused:
            self._end_whole(task)
        else:
            self._end(task)

    def _stop_requested(self, _: StopRequested) -> None:
        self._dispatch.min_devices = 0
        for task in self._tasks.values():
            self._end_whole(task)
        self._end_undone()
        self._dispatch.free_all()

    def _end_undone(self) -> None:
        """After a stop with no device left, end what is still in a step."""
        if self._dispatch.min_devices == self._dispatch.num_devices == 0:
            for task in self._tasks.values():
                if task.phase is Phase.LAST_STEP:
                    self._end(task)

    def _end_whole(self, task: ScheduledTask) -> None:
        """Begin nothing more of a task, once a step that has updated shards already is committed."""
        if task.is_releasing and not task.phase.is_over:
            task.phase = Phase.LAST_STEP
            if task.ahead.claim is not None:
                self._dispatch.revoke(task)
            else:
                self._dispatch.refresh(task)  # which a policy that has raised may have left out
        else:
            self._end(task)

    def _end(self, task: ScheduledTask) -> None:
        """Begin nothing more of a task, and revoke what is claimed of it."""
        task.phase = max(task.phase, Phase.OVER)
        task.misfit = None
        self._dispatch.revoke(task)
        self._advance(task)

    def _advance(self, task: ScheduledTask) -> None:
        """Begin the next batch, or finish, where nothing is in the way."""
        phase = task.phase
        if phase.is_over:
            task.coming.clear()
        self._move(task)
        if (task.chain and not phase.is_over) or task.on_host is not OnHost.NOTHING:
            return
        if phase is Phase.FINISHED or task.under_way:
            return
        if phase.is_over or (phase is Phase.ALL_READ and task.next_batch is None and task.misfit is None):
            if not (task.stale or task.leaving or task.moving):
                self._finish(task)
            return
        has_to_fit = task.misfit is not None or (task.next_batch is not None and task.next_batch.has_to_fit)
        # Shards may be numbered anew: no update of the old ones may be under way.
        if has_to_fit and (task.stale or task.leaving or task.moving):
            return
        if max(1, self._dispatch.num_devices) < task.added.min_devices and phase is not Phase.LAST_STEP:
            self._waiting[task] = None
            return
        if task.misfit is None:
            if task.next_batch is None:
                if task.added.reads_last and not task.stale:
                    self._read(task)
                return
            task.batch, task.next_batch, task.has_read = task.next_batch, None, False
            self._dispatch.begin_pass(task)
        if has_to_fit:
            task.on_host = OnHost.FIT
            self._out.append(Fit(task.added.task, task.misfit))
            task.misfit = None
        else:
            num_micro_batches = task.batch.num_micro_batches
            num_parts = min(num_micro_batches, self._num_devices_for(task)) if task.batch.training else 1
            in_sums = task.units.spreads[num_parts - 1].in_sums
            self._out.append(Begin(task.added.task, task.batch.step, num_parts, in_sums))
            self._begin_chain(task, num_parts, num_micro_batches)

    def _finish(self, task: ScheduledTask) -> None:
        self._want(task, 0)
        task.phase = Phase.FINISHED
        self._dispatch.refresh(task)  # nothing is left of it
        self._num_unfinished -= 1
        if task.group is not None:
            del self._members[task.group][task]
        self._out.append(Finish(task.added.task, is_settled=not task.is_releasing))

    def _num_devices_for(self, task: ScheduledTask) -> int:
        """Devices that the task's steps are spread over, as long as tasks and devices are the same ones."""
        if self._numbers is None:
            self._numbers = {}
            num_devices = self._dispatch.num_devices
            may_be_spread = self._num_wanted > self._num_unfinished  # else each has one device
            if may_be_spread and self._groups is not None:
                self._share_out_groups(num_devices)
            elif may_be_spread and self._num_unfinished < num_devices:
                tasks = [each for each in self._tasks.values() if each.phase is not Phase.FINISHED]
                self._share_out(tasks, num_devices)
        least = min(task.added.min_devices, len(task.units.spreads))
        return max(least, self._numbers.get(task, 1))

    def _share_out(self, tasks: list[ScheduledTask], num_devices: int) -> None:
        """Give tasks their numbers of devices, of which there are more."""
        remaining_s, speedups = [each.counted_s for each in tasks], [each.speedups for each in tasks]
        numbers = allocate(remaining_s, speedups, num_devices)
        assert self._numbers is not None
        self._numbers.update(zip(tasks, numbers, strict=True))

    def _want(self, task: ScheduledTask, num_devices: int) -> None:
        """Count the devices that a task's steps may be spread over, to be solved anew; it may have finished."""
        self._numbers = None
        if task.phase is not Phase.FINISHED:
            if task.group is not None:
                task.group.num_wanted += num_devices - task.num_wanted
            self._num_wanted += num_devices - task.num_wanted
            task.num_wanted = num_devices

    def _share_out_groups(self, num_devices: int) -> None:
        """Give each group its devices, and those to its tasks; a group of more tasks is not searched through."""
        most = {group: group.num_wanted for group in self._members}
        for group, number in shared_out(most, num_devices).items():
            if 0 < len(self._members[group]) < number:
                self._share_out(list(self._members[group]), number)

    def _begin_chain(self, task: ScheduledTask, num_parts: int, num_micro_batches: int = 1) -> None:
        for part in task.parts:
            assert part.queue is None, part
        task.chain = task.units.training if task.batch.training else task.units.evaluation
        task.spread = task.units.spreads[num_parts - 1]
        # The first part goes on from what was loaded ahead.
        first, task.ahead = task.ahead, Part(task)
        assert first.claim is None or first.next_unit() == first.offer, first
        before, task.parts = task.parts, [first, *(Part(task, k) for k in range(1, num_parts))]
        for part, (begin, end) in zip(task.parts, part_ranges(num_micro_batches, num_parts), strict=True):
            part.share = (end - begin) / num_micro_batches
        for part, old in zip(task.parts, before, strict=False):
            part.home = old.home
        task.estimate()
        self._dispatch.refresh(task)
        if task.added.reads_ahead and not task.added.reads_last:
            self._read(task)
