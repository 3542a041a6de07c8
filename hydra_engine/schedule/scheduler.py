"""Decides, never acts: `handle(event) -> [instruction]`. No torch, no threads, no clock.

A task works through its batches; a batch is a chain of units, then a commit, then one update per shard:

    Read -> BatchReady -> Begin -> f0 ... fb(n-1) ... b0 -> Commit -> StepCommitted -> Update 0, 1, ... -> ShardUpdated
                                   each: Load, Run, Computed, Stored

Where a batch has new shapes, Fit -> Fitted stands for Begin; and a unit that does not fit, DidNotFit -> Fit -> Fitted,
starts the step again, on a finer partition. So does one that raised and is tried again, on the same.

A unit is load-ready when its shard's weights are up to date. It is run-ready when its input is in DRAM as well, or on
its way there: then on the device that computed the unit before it, and on no other until that is stored; gradients of
several units may be on their way down while the device goes on. A device runs
one unit and holds at most one claim: the next unit, whose shard it loads meanwhile. Claims bind nobody: an idle device
takes the best run-ready unit, claimed elsewhere or not, so no run-ready unit ever waits beside an idle device.

Where there are fewer tasks than devices, a step is spread over several: its micro-batches are cut into parts, each of
which goes through the chain for itself, and the step is committed when all are through. Units that are `ordered`, since
one part's begins with what the part before it has left, run one after the other all the same.

A part offers one unit at most, so a decision is the least key of three queues of parts: run-ready and unclaimed,
run-ready and claimed, load-ready and unclaimed. An event changes the places of one task's parts in them, whatever the
number of tasks and devices; how many parts a task's steps have is solved anew when tasks come or end, or devices do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

from hydra_engine.schedule.events import (
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
from hydra_engine.schedule.policies import NOT_YET, Candidate, Policy
from hydra_engine.schedule.state import Part, ReadyQueue, ScheduledDevice, ScheduledTask, allocate
from hydra_engine.schedule.units import BACKWARD, FUSED, Unit, part_ranges

# A unit whose shard is on the device goes before the best one, of so many after it, and so many times in a row.
MOST_LOOKED_AT, MOST_PASSED = 32, 8


class Scheduler:
    """The state of a run as far as decisions need it; touched by one thread only."""

    def __init__(
        self,
        policy: Policy,
        *,
        double_buffer: bool = True,
        is_resident: Callable[[int, str, int], bool] = lambda *_: False,
    ) -> None:
        """`is_resident`: whether a device holds what it takes to run units of a (device, task, shard)."""
        self._policy = policy
        self._is_resident = is_resident if getattr(policy, "prefers_resident", False) else None
        self._policy_is_longest_first = getattr(policy, "longest_first", False)
        self._double_buffer = double_buffer
        self._tasks: dict[str, ScheduledTask] = {}
        self._devices: dict[int, ScheduledDevice] = {}
        self._out: list[Instruction] = []
        self._num_unfinished = 0
        self._numbers: dict[ScheduledTask, int] | None = {}  # devices by task; None: to be solved anew
        self._ready_count = 0
        self._served_count = 0
        self._remaining_s = 0.0  # of all tasks, as far as they were counted
        self._share_s = 0.0  # compute time per weight that whoever was served last has had: where newcomers begin
        self._ready: ReadyQueue[Part] = ReadyQueue()  # run-ready, unclaimed
        self._claimed: ReadyQueue[Part] = ReadyQueue()  # run-ready, claimed
        self._loadable: ReadyQueue[Part] = ReadyQueue()  # not run-ready, or on one device only; unclaimed
        self._idle: list[int] = []  # heaps, with devices that are no more among them
        self._wanting: list[int] = []
        self._touched: dict[ScheduledDevice, None] = {}  # to be looked at for what only they could take
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
        return self._num_unfinished == 0

    def handle(self, event: Event) -> list[Instruction]:
        """Take an event in; what to do about it, in order."""
        self._handlers[type(event)](event)
        self._dispatch()
        # A policy may have raised in either: what was said before it did is said with the next event.
        out, self._out = self._out, []
        return out

    def take(self, event: Event) -> list[Instruction]:
        """The first half of `handle`, for events that come at one time: nothing is given to devices yet."""
        self._handlers[type(event)](event)
        out, self._out = self._out, []
        return out

    def dispatch(self) -> list[Instruction]:
        """The second half: give to devices what they can have now."""
        self._dispatch()
        out, self._out = self._out, []
        return out

    # -- events

    def _task_added(self, event: TaskAdded) -> None:
        task = ScheduledTask(event, order=len(self._tasks), unit_s=dict(event.unit_s))
        task.used_s = self._share_s * event.weight
        task.estimate()
        self._tasks[event.task] = task
        self._num_unfinished += 1
        self._numbers = None
        task.parts = [Part(task)]
        self._refresh_all(task)  # it counts from now on
        self._read(task)

    def _device_added(self, event: DeviceAdded) -> None:
        device = self._devices[event.device] = ScheduledDevice(event.device)
        self._numbers = None
        self._free(device)

    def _batch_ready(self, event: BatchReady) -> None:
        task = self._tasks[event.task]
        task.next_batch = event
        self._advance(task)

    def _data_ended(self, event: DataEnded | DataFailed) -> None:
        task = self._tasks[event.task]
        task.ended = True
        self._advance(task)

    def _part(self, unit: Unit) -> Part:
        return self._tasks[unit.task].parts[unit.part]

    def _computed(self, event: Computed) -> None:
        part, node = self._part(event.unit), (event.unit.kind, event.unit.shard)
        task = part.task
        device = self._devices[event.device]
        device.running = device.part = None
        part.computing = None
        task.used_s += event.seconds - part.charged_s
        task.measured(node, event.seconds / part.share)
        if event.stored:
            assert part.storing == 0, event.unit
            self._is_stored(part, node)
        else:
            part.storing += 1
            part.near = None if event.failed else device
            if event.failed:
                device.near.pop(part, None)
            else:
                device.near[part] = None
        self._free(device)
        self._refresh(part)

    def _through(self, part: Part) -> None:
        """A unit of the part is in DRAM, or has failed."""
        part.storing -= 1
        if part.near is not None and part.storing == 0:
            part.near.near.pop(part, None)
            part.near = None

    def _stored(self, event: Stored) -> None:
        part = self._part(event.unit)
        assert part.storing, event.unit
        self._through(part)
        self._is_stored(part, (event.unit.kind, event.unit.shard))
        self._refresh(part)  # and those that waited for this

    def _is_stored(self, part: Part, node: tuple[str, int]) -> None:
        task, through = part.task, part.num_stored
        if task.chain and task.chain[through - 1] == node and task.num_stored() == through:
            self._stored_whole(task, node)
        self._commit(task)
        self._advance(task)

    def _stored_whole(self, task: ScheduledTask, node: tuple[str, int]) -> None:
        """Every part of a unit is in DRAM."""
        kind, shard = node
        has_gradients = kind in (FUSED, BACKWARD) and shard in task.added.updates
        if task.added.early_release and has_gradients and not task.over:
            task.stale.add(shard)
            self._out.append(Update(task.added.task, shard))
        ends_forward = kind == FUSED or (not task.training and node == task.chain[-1])
        if ends_forward and not (task.over or task.added.reads_last):
            self._read(task)

    def _commit(self, task: ScheduledTask) -> None:
        """Commit a step whose units are all through, and the updates that were released early."""
        num_units = len(task.chain)
        is_through = num_units > 0 and task.parts[0].position == num_units and task.num_stored() == num_units
        if is_through and not (task.over or task.committing or (task.training and task.stale)):
            task.committing = True
            self._out.append(Commit(task.added.task, task.training))

    def _read(self, task: ScheduledTask) -> None:
        """Ask for the next batch, once."""
        if not task.has_read:
            task.has_read = True
            self._out.append(Read(task.added.task))

    def _did_not_fit(self, event: DidNotFit) -> None:
        part = self._part(event.unit)
        task = part.task
        self._through(part)
        task.chain = ()
        if not task.over:
            task.misfit = task.misfit or event.unit
        self._revoke(task)
        self._advance(task)

    def _fitted(self, event: Fitted) -> None:
        task = self._tasks[event.task]
        task.fitting = False
        task.added = task.added._replace(
            training=event.training,
            evaluation=event.evaluation,
            needs=event.needs,
            updates=event.updates,
            spreads=event.spreads,
        )
        self._numbers = None
        task.unit_s = dict(event.unit_s)
        if task.next_batch is not None and not event.is_retried:  # read before this
            task.next_batch = task.next_batch._replace(new_shapes=True)
        if task.over:
            self._advance(task)
        else:
            self._begin_chain(task, 1)  # of which nothing is known on a device yet

    def _step_committed(self, event: StepCommitted) -> None:
        task = self._tasks[event.task]
        task.committing = False
        task.chain = ()
        if event.training:
            task.num_steps_done += 1
            if not task.added.early_release:
                task.stale = set(task.added.updates)
                self._out.extend(Update(event.task, shard) for shard in task.added.updates)
        if task.ends_at_commit:
            self._end(task)
        else:
            self._advance(task)

    def _shard_updated(self, event: ShardUpdated) -> None:
        task = self._tasks[event.task]
        task.stale.discard(event.shard)
        self._commit(task)
        self._advance(task)
        for part in task.parts:
            if part.offer is None:
                self._refresh(part)

    def _failed(self, event: Failed) -> None:
        task = self._tasks[event.task]
        if event.unit is not None:
            self._through(self._part(event.unit))
        if event.commit:
            task.committing = task.fitting = False
        self._end(task)

    def _task_stopped(self, event: TaskStopped) -> None:
        task = self._tasks[event.task]
        task.committing = task.committing and not event.uncommitted
        self._end(task)

    def _stop_requested(self, _: StopRequested) -> None:
        for task in self._tasks.values():
            if task.is_releasing and not task.over:
                task.ends_at_commit = True
            else:
                self._end(task)

    def _end(self, task: ScheduledTask) -> None:
        """Begin nothing more of a task, and revoke what is claimed of it."""
        task.over = True
        task.misfit = None
        self._revoke(task)
        self._advance(task)

    def _revoke(self, task: ScheduledTask) -> None:
        for part in task.parts:
            if part.claim is not None:
                self._let_go(part.claim)
        self._refresh_all(task)

    def _advance(self, task: ScheduledTask) -> None:
        """Begin the next batch, or finish, where nothing is in the way."""
        if task.finished or task.committing or task.fitting or task.under_way or (task.chain and not task.over):
            return
        if task.over or (task.ended and task.next_batch is None and task.misfit is None):
            if not task.stale:
                task.finished = True
                self._refresh_all(task)  # nothing is left of it
                self._num_unfinished -= 1
                self._numbers = None
                self._out.append(Finish(task.added.task))
            return
        batch = None
        has_to_fit = task.misfit is not None or (task.next_batch is not None and task.next_batch.new_shapes)
        # Shards may be numbered anew: no update of the old ones may be under way.
        if has_to_fit and task.stale:
            return
        if task.misfit is None:
            if task.next_batch is None:
                if task.added.reads_last and not task.stale:
                    self._read(task)
                return
            batch, task.next_batch = task.next_batch, None
            task.step, task.training, task.has_read = batch.step, batch.training, False
        if has_to_fit:
            task.fitting = True
            self._out.append(Fit(task.added.task, task.misfit))
            task.misfit = None
        else:
            assert batch is not None
            num_parts = min(batch.num_micro_batches, self._num_devices_for(task)) if task.training else 1
            self._out.append(Begin(task.added.task, task.step, num_parts))
            self._begin_chain(task, num_parts, batch.num_micro_batches)

    def _num_devices_for(self, task: ScheduledTask) -> int:
        """Devices that the task's steps are spread over, as long as tasks and devices are the same ones."""
        if self._num_unfinished >= len(self._devices):
            return 1
        if self._numbers is None:
            tasks = [each for each in self._tasks.values() if not each.finished]
            remaining_s = [each.counted_s for each in tasks]
            speedups = [[spread.speedup for spread in each.added.spreads] for each in tasks]
            numbers = allocate(remaining_s, speedups, len(self._devices))
            self._numbers = dict(zip(tasks, numbers, strict=True))
        return self._numbers[task]

    def _begin_chain(self, task: ScheduledTask, num_parts: int, num_micro_batches: int = 1) -> None:
        for part in task.parts:
            assert part.queue is None, part
        task.chain = task.added.training if task.training else task.added.evaluation
        sizes = [end - first for first, end in part_ranges(num_micro_batches, num_parts)]
        task.parts = [Part(task, k, size / num_micro_batches) for k, size in enumerate(sizes)]
        for before, after in pairwise(task.parts):
            before.after, after.before = after, before
        task.estimate()
        self._refresh_all(task)
        if task.added.reads_ahead and not task.added.reads_last:
            self._read(task)

    # -- what tasks offer

    def _refresh_all(self, task: ScheduledTask) -> None:
        self._count(task)
        for part in task.parts:
            self._put_in_place(part)

    def _refresh(self, part: Part) -> None:
        """Put what a part offers where it belongs, after anything about it has changed.

        What a policy sees is of the task, so that its other parts belong elsewhere then, too.
        """
        self._count(part.task)
        for each in part.task.parts if len(part.task.parts) > 1 else (part,):
            self._put_in_place(each)

    def _count(self, task: ScheduledTask) -> None:
        remaining_s = 0.0 if task.over or task.finished else task.remaining_s()
        self._remaining_s += remaining_s - task.counted_s
        task.counted_s = remaining_s

    def _put_in_place(self, part: Part) -> None:
        if part.queue is not None:
            part.queue.discard(part)
            part.queue = None
        before, part.offer = part.offer, part.next_unit()
        if part.offer is None:
            return
        if part.offer != before:
            part.ready_order = NOT_YET
        in_turn = part.in_turn
        is_ready = in_turn and not part.under_way
        if in_turn and part.computing is None and part.ready_order == NOT_YET:  # be it on one device only
            self._ready_count += 1
            part.ready_order = self._ready_count
        part.key = self._key(part)
        if part.claim is not None:
            if is_ready:
                self._put(self._claimed, part)
            self._touched[part.claim] = None
        else:
            self._put(self._ready if is_ready else self._loadable, part)
        only = part.computing or part.near
        if only is not None:
            self._touched[only] = None

    def _put(self, queue: ReadyQueue[Part], part: Part) -> None:
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
        )
        return (-added.priority, self._policy.key(candidate), task.order, part.index)

    # -- units to devices

    def _dispatch(self) -> None:
        touched, self._touched = self._touched, {}
        for device in touched:
            if device.running is None:
                self._run_own(device)
        while self._ready or self._claimed:
            idle = self._lowest(self._idle)
            if idle is None:
                break
            self._run_best(idle)
        for device in (*touched, *self._touched):
            self._claim_best(device, self._own_offers(device))
        while self._ready or self._loadable:
            wanting = self._lowest(self._wanting)
            if wanting is None:
                break
            self._claim_best(wanting, ())
        self._touched = {}

    def _is_wanting(self, device: ScheduledDevice) -> bool:
        return device.claim is None and (device.running is None or self._double_buffer)

    def _free(self, device: ScheduledDevice) -> None:
        """Enter a device where devices are looked for, after it lost its unit or its claim."""
        if device.running is None and not device.in_idle:
            device.in_idle = True
            heappush(self._idle, device.index)
        if self._is_wanting(device) and not device.in_wanting:
            device.in_wanting = True
            heappush(self._wanting, device.index)
        self._touched[device] = None

    def _lowest(self, heap: list[int]) -> ScheduledDevice | None:
        """The first device that is idle, or that wants a claim."""
        while heap:
            device = self._devices[heap[0]]
            if device.running is None if heap is self._idle else self._is_wanting(device):
                return device
            heappop(heap)
            if heap is self._idle:
                device.in_idle = False
            else:
                device.in_wanting = False
        return None

    def _own_offers(self, device: ScheduledDevice) -> Iterable[Part]:
        """Parts whose unit before the offered one is on the device, or on its way from it to DRAM."""
        if device.part is not None:
            yield device.part
        yield from device.near

    def _run_own(self, device: ScheduledDevice) -> None:
        """Run on an idle device its claim, which costs nothing more, or what only it can run, if that goes first.

        A claim has to stand back for a task on the critical path, which any wait would make longer.
        """
        claim = device.claim
        if claim is not None and claim.in_turn and (not claim.under_way or claim.near is device):
            urgent = self._ready.best() if self._policy_is_longest_first else None
            is_urgent = urgent is not None and urgent.key < claim.key and self._is_critical(urgent.task)
            self._run(device, urgent if urgent is not None and is_urgent else claim)
            return
        near = [part for part in device.near if part.offer is not None and part.in_turn]
        if not near:
            return
        best = min(near, key=lambda part: (part.claim is not None, part.key))
        other = self._best(self._ready, device)
        # What is on its way to DRAM keeps the device waiting, which only the critical path is worth.
        is_urgent = self._policy_is_longest_first and self._is_critical(best.task)
        self._run(device, best if other is None or (is_urgent and best.key < other.key) else other)

    def _is_critical(self, task: ScheduledTask) -> bool:
        """Whether the task alone takes as long as all tasks on all devices: nothing then hides its waiting."""
        return task.counted_s * len(self._devices) >= self._remaining_s

    def _run_best(self, device: ScheduledDevice) -> None:
        part = self._best(self._ready, device) or self._best(self._claimed, device)
        assert part is not None
        self._run(device, part)

    def _best(self, queue: ReadyQueue[Part], device: ScheduledDevice) -> Part | None:
        """Who goes first in a queue, on this device."""
        best = queue.best()
        if best is None or self._is_resident is None or best.num_passed >= MOST_PASSED:
            return best
        return self._first(queue.first(MOST_LOOKED_AT), device)

    def _first(self, parts: Sequence[Part], device: ScheduledDevice) -> Part:
        """Who goes first of some parts, on this device."""
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
        free = [part for part in own if part.offer is not None and part.claim is None and part.in_turn]
        ready = self._best(self._ready, device)
        if ready is not None:
            free.append(ready)
        part = self._first(free, device) if free else self._best(self._loadable, device)
        if part is not None:
            part.claim, device.claim = device, part
            assert part.offer is not None
            self._out.append(Load(device.index, part.offer))
            self._refresh(part)

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
        if self._is_resident is not None:
            first = self._ready.best()
            if first is not None and first is not part:
                first.num_passed += 1
            part.num_passed = 0
        part.computing = device
        part.position += 1
        part.charged_s = part.share * task.unit_s.get((unit.kind, unit.shard), 0.0)
        task.used_s += part.charged_s
        self._share_s = max(self._share_s, task.used_s / task.added.weight)
        self._served_count += 1
        task.served_order = self._served_count
        self._out.append(Run(device.index, unit))
        self._refresh(part)
        self._free(device)

    def _drop(self, device: ScheduledDevice) -> None:
        self._refresh(self._let_go(device))

    def _let_go(self, device: ScheduledDevice) -> Part:
        """Take a device's claim from it; whose it was has to be put in place."""
        part = device.claim
        assert part is not None
        assert part.offer is not None
        self._out.append(Drop(device.index, part.offer))
        device.claim = part.claim = None
        self._free(device)
        return part
