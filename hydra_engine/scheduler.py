"""Decides, never acts: `handle(event) -> [instruction]`. No torch, no threads, no clock.

A task works through its batches; a batch is a chain of units, then a commit, then one update per shard:

    Read -> BatchReady -> Begin -> f0 ... fb(n-1) ... b0 -> Commit -> StepCommitted -> Update 0, 1, ... -> ShardUpdated
                                   each: Load, Run, Computed, Stored

Where a batch has new shapes, Fit -> Fitted stands for Begin; and a unit that does not fit, DidNotFit -> Fit -> Fitted,
starts the step again, on a finer partition.

A unit is load-ready when its shard's weights are up to date, run-ready when its input is in DRAM as well. A device runs
one unit and holds at most one claim: the next unit, whose shard it loads meanwhile. Claims bind nobody: an idle device
takes the best run-ready unit, claimed elsewhere or not, so no run-ready unit ever waits beside an idle device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hydra_engine.events import (
    BatchReady,
    Begin,
    Commit,
    Computed,
    DataEnded,
    DataFailed,
    DeviceAdded,
    DidNotFit,
    Drop,
    Event,
    Failed,
    Finish,
    Fit,
    Fitted,
    Instruction,
    Load,
    Read,
    Run,
    ShardUpdated,
    StepCommitted,
    StopRequested,
    Stored,
    TaskAdded,
    TaskStopped,
    Update,
)
from hydra_engine.policies import Candidate, Policy
from hydra_engine.schedule import BACKWARD, EVALUATE, FUSED, Unit

# Weight of the newest measurement in a unit's running time.
NEWEST = 0.3


@dataclass(eq=False)
class _Task:
    added: TaskAdded
    order: int
    chain: tuple[tuple[str, int], ...] = ()  # of the batch in progress; empty between batches
    position: int = 0
    step: int = 0
    training: bool = True
    running: bool = False  # unit `position` is on a device, or on its way to DRAM
    committing: bool = False
    fitting: bool = False
    misfit: Unit | None = None  # where a device ran out of memory: the step waits to be fitted
    has_read: bool = False  # the batch after this one was asked for
    stale: set[int] = field(default_factory=set)  # shards whose update is not through
    next_batch: BatchReady | None = None
    ended: bool = False  # no more batches
    over: bool = False  # failed or stopped: begins nothing more
    finished: bool = False
    num_steps_done: int = 0
    ready_order: int = 0
    unit_s: dict[tuple[str, int], float] = field(default_factory=dict)
    step_s: float = 0.0

    def unit(self, ahead: int = 0) -> Unit | None:
        """The unit to run next, or the one after it."""
        if self.position + ahead >= len(self.chain):
            return None
        kind, shard = self.chain[self.position + ahead]
        return Unit(self.added.task, kind, shard, self.step)

    def up_to_date(self, unit: Unit) -> bool:
        return self.stale.isdisjoint(self.added.needs[unit.shard])

    def run_ready(self) -> Unit | None:
        """The unit that could be computed now."""
        unit = None if self.running or self.over else self.unit()
        return unit if unit is not None and self.up_to_date(unit) else None

    def load_ready(self) -> Unit | None:
        """The unit that could be loaded now, to be computed once the one before it is stored."""
        unit = None if self.over else self.unit(ahead=int(self.running))
        return unit if unit is not None and self.up_to_date(unit) else None

    def remaining_s(self) -> float:
        """Paper, Algorithm 2: what is left of this batch, and a step's time for each one to come."""
        num_steps = self.added.num_steps
        if num_steps is None:  # the loader does not say: as many again as so far
            num_steps = 2 * self.num_steps_done + 2
        to_come = max(0, num_steps - self.num_steps_done - (1 if self.chain and self.training else 0))
        return to_come * self.step_s + sum(self.unit_s.get(node, 0.0) for node in self.chain[self.position :])


@dataclass(eq=False)
class _Device:
    running: Unit | None = None
    claim: Unit | None = None


class Scheduler:
    """The state of a run as far as decisions need it; touched by one thread only."""

    def __init__(self, policy: Policy, *, double_buffer: bool = True) -> None:
        self._policy = policy
        self._double_buffer = double_buffer
        self._tasks: dict[str, _Task] = {}
        self._devices: dict[int, _Device] = {}
        self._out: list[Instruction] = []
        self._ready_count = 0
        self._handlers: dict[type, Callable[..., None]] = {
            TaskAdded: self._task_added,
            BatchReady: self._batch_ready,
            DataEnded: self._data_ended,
            DataFailed: self._data_ended,
            Computed: self._computed,
            Stored: self._stored,
            DidNotFit: self._did_not_fit,
            Fitted: self._fitted,
            StepCommitted: self._step_committed,
            ShardUpdated: self._shard_updated,
            Failed: self._failed,
            DeviceAdded: self._device_added,
            TaskStopped: self._task_stopped,
            StopRequested: self._stop_requested,
        }

    @property
    def finished(self) -> bool:
        """Whether every task is finished."""
        return all(task.finished for task in self._tasks.values())

    def handle(self, event: Event) -> list[Instruction]:
        """Take an event in; what to do about it, in order."""
        self._handlers[type(event)](event)
        self._dispatch()
        out, self._out = self._out, []
        return out

    # -- events

    def _task_added(self, event: TaskAdded) -> None:
        task = _Task(event, order=len(self._tasks), unit_s=dict(event.unit_s))
        task.step_s = sum(task.unit_s.get(node, 0.0) for node in event.training)
        self._tasks[event.task] = task
        self._out.append(Read(event.task))

    def _device_added(self, event: DeviceAdded) -> None:
        self._devices[event.device] = _Device()

    def _batch_ready(self, event: BatchReady) -> None:
        task = self._tasks[event.task]
        task.next_batch = event
        self._advance(task)

    def _data_ended(self, event: DataEnded | DataFailed) -> None:
        task = self._tasks[event.task]
        task.ended = True
        self._advance(task)

    def _computed(self, event: Computed) -> None:
        self._devices[event.device].running = None
        task, node = self._tasks[event.unit.task], (event.unit.kind, event.unit.shard)
        task.unit_s[node] = (1 - NEWEST) * task.unit_s.get(node, event.seconds) + NEWEST * event.seconds
        task.step_s = sum(task.unit_s.get(each, 0.0) for each in task.added.training)

    def _stored(self, event: Stored) -> None:
        task = self._tasks[event.unit.task]
        assert task.unit() == event.unit, (task.unit(), event.unit)
        task.running = False
        task.position += 1
        self._mark_ready(task)
        has_gradients = event.unit.kind in (FUSED, BACKWARD) and event.unit.shard in task.added.updates
        if task.added.early_release and has_gradients and not task.over:
            task.stale.add(event.unit.shard)
            self._out.append(Update(event.unit.task, event.unit.shard))
        through = event.unit.kind == FUSED or (event.unit.kind == EVALUATE and task.position == len(task.chain))
        if through and not task.over:
            self._read(task)
        self._commit(task)
        self._advance(task)

    def _commit(self, task: _Task) -> None:
        """Commit a step whose units are all through, and the updates that were released early."""
        is_through = bool(task.chain) and task.position == len(task.chain)
        if is_through and not (task.over or task.committing or (task.training and task.stale)):
            task.committing = True
            self._out.append(Commit(task.added.task, task.training))

    def _read(self, task: _Task) -> None:
        """Ask for the next batch, once."""
        if not task.has_read:
            task.has_read = True
            self._out.append(Read(task.added.task))

    def _did_not_fit(self, event: DidNotFit) -> None:
        task = self._tasks[event.unit.task]
        task.running = False
        task.chain = ()
        task.misfit = event.unit
        self._revoke(task)
        self._advance(task)

    def _fitted(self, event: Fitted) -> None:
        task = self._tasks[event.task]
        task.fitting = False
        task.added = task.added._replace(
            training=event.training, evaluation=event.evaluation, needs=event.needs, updates=event.updates
        )
        task.unit_s = dict(event.unit_s)
        task.step_s = sum(task.unit_s.get(node, 0.0) for node in event.training)
        if task.next_batch is not None:  # read before this
            task.next_batch = task.next_batch._replace(new_shapes=True)
        if task.over:
            self._advance(task)
        else:
            self._begin_chain(task)

    def _step_committed(self, event: StepCommitted) -> None:
        task = self._tasks[event.task]
        task.committing = False
        task.chain = ()
        if event.training:
            task.num_steps_done += 1
            if not task.added.early_release:
                task.stale = set(task.added.updates)
                self._out.extend(Update(event.task, shard) for shard in task.added.updates)
        self._advance(task)

    def _shard_updated(self, event: ShardUpdated) -> None:
        task = self._tasks[event.task]
        task.stale.discard(event.shard)
        self._commit(task)
        self._mark_ready(task)
        self._advance(task)

    def _failed(self, event: Failed) -> None:
        task = self._tasks[event.task]
        task.running = task.running and event.unit is None
        if event.commit:
            task.committing = task.fitting = False
        self._end(task)

    def _task_stopped(self, event: TaskStopped) -> None:
        task = self._tasks[event.task]
        task.committing = task.committing and not event.uncommitted
        self._end(task)

    def _stop_requested(self, _: StopRequested) -> None:
        for task in self._tasks.values():
            self._end(task)

    def _end(self, task: _Task) -> None:
        """Begin nothing more of a task, and revoke what is claimed of it."""
        task.over = True
        task.misfit = None
        self._revoke(task)
        self._advance(task)

    def _revoke(self, task: _Task) -> None:
        for index, device in self._devices.items():
            if device.claim is not None and device.claim.task == task.added.task:
                self._drop(index, device)

    def _advance(self, task: _Task) -> None:
        """Begin the next batch, or finish, where nothing is in the way."""
        if task.finished or task.committing or task.fitting or task.running or (task.chain and not task.over):
            return
        if task.over or (task.ended and task.next_batch is None and task.misfit is None):
            if not task.stale:
                task.finished = True
                self._out.append(Finish(task.added.task))
            return
        has_to_fit = task.misfit is not None or (task.next_batch is not None and task.next_batch.new_shapes)
        # Shards may be numbered anew: no update of the old ones may be under way.
        if has_to_fit and task.stale:
            return
        if task.misfit is None:
            if task.next_batch is None:
                return
            batch, task.next_batch = task.next_batch, None
            task.step, task.training, task.has_read = batch.step, batch.training, False
        if has_to_fit:
            task.fitting = True
            self._out.append(Fit(task.added.task, task.misfit))
            task.misfit = None
        else:
            self._out.append(Begin(task.added.task, task.step))
            self._begin_chain(task)

    def _begin_chain(self, task: _Task) -> None:
        task.position = 0
        task.chain = task.added.training if task.training else task.added.evaluation
        self._mark_ready(task)
        if task.added.reads_ahead:
            self._read(task)

    def _mark_ready(self, task: _Task) -> None:
        self._ready_count += 1
        task.ready_order = self._ready_count

    # -- units to devices

    def _dispatch(self) -> None:
        idle = [(index, device) for index, device in self._devices.items() if device.running is None]
        for index, device in idle:  # a claim that is loaded costs nothing more: nobody takes it away
            if device.claim is not None and self._tasks[device.claim.task].run_ready() == device.claim:
                self._run(index, device, device.claim)
        for index, device in idle:
            if device.running is None:
                self._run_best(index, device)
        for index, device in self._devices.items():
            if device.claim is None and (device.running is None or self._double_buffer):
                self._claim_best(index, device)

    def _run_best(self, index: int, device: _Device) -> None:
        claimed = {other.claim for other in self._devices.values()}
        ready = {unit: task for task in self._tasks.values() if (unit := task.run_ready()) is not None}
        unit = self._choose({u: t for u, t in ready.items() if u not in claimed}) or self._choose(ready)
        if unit is None:
            return
        for holder, other in self._devices.items():
            if other.claim == unit or other is device:
                self._drop(holder, other)
        self._run(index, device, unit)

    def _claim_best(self, index: int, device: _Device) -> None:
        claimed = {other.claim for other in self._devices.values()}

        def free(units: Iterator[tuple[Unit | None, _Task]]) -> dict[Unit, _Task]:
            return {unit: task for unit, task in units if unit is not None and unit not in claimed}

        # What can run at once goes before what still waits for its input.
        unit = self._choose(free((task.run_ready(), task) for task in self._tasks.values())) or self._choose(
            free((task.load_ready(), task) for task in self._tasks.values())
        )
        if unit is not None:
            device.claim = unit
            self._out.append(Load(index, unit))

    def _choose(self, units: dict[Unit, _Task]) -> Unit | None:
        if not units:
            return None
        candidates = {
            Candidate(task.added.task, task.order, task.remaining_s(), task.ready_order): unit
            for unit, task in units.items()
        }
        return candidates[self._policy.choose(list(candidates))]

    def _run(self, index: int, device: _Device, unit: Unit) -> None:
        if device.claim != unit:
            self._out.append(Load(index, unit))
        device.claim, device.running = None, unit
        self._tasks[unit.task].running = True
        self._out.append(Run(index, unit))

    def _drop(self, index: int, device: _Device) -> None:
        if device.claim is not None:
            self._out.append(Drop(index, device.claim))
            device.claim = None
