"""Devices at work in a run: opens them, carries out Load, Drop, Run, Release and Move, and closes them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from hydra_engine.devices import COMPUTE, LOAD, SLABS, STORE, DevicePool, DeviceSpec, OpenDevice
from hydra_engine.errors import DeviceFailed, ShardDoesNotFit
from hydra_engine.host import TaskState, Wanted, share_out
from hydra_engine.planning import PlannedTask, Room, arena_bytes
from hydra_engine.progress import AtWork, DeviceProgress
from hydra_engine.run.running_task import Common, Life, RunningTask
from hydra_engine.schedule import (
    DeviceAdded,
    DeviceRemoved,
    Drop,
    Failed,
    HomesMoved,
    Load,
    Move,
    MoveWanted,
    Release,
    Run,
    StopRequested,
    TaskStopped,
    Unit,
)
from hydra_engine.tasks import DeviceReport
from hydra_engine.texts import warn
from hydra_engine.trace import UPDATE, Timing, Trace
from hydra_engine.worker import Delay, Worker
from partitioners import format_bytes

_DELAYED = {None: AtWork.COMPUTES, Delay.MEMORY: AtWork.MEMORY, Delay.WEIGHTS: AtWork.WEIGHTS}


class RunOver(Exception):
    """Nobody trains any more, and devices are closed."""


class Workers:
    """The department of devices. They come in any thread, and each one that leaves has a thread that waits for it."""

    def __init__(
        self,
        common: Common,
        pool: DevicePool,
        planned_for: Sequence[DeviceSpec],
        *,
        trains: bool,
    ) -> None:
        """`planned_for`: devices that the run begins with."""
        self._common = common
        self.pool = pool
        first = {id(spec) for spec in planned_for}
        self.specs = {k: spec for k, spec in pool.specs.items() if id(spec) in first}  # of those that are in, by number
        if not self.specs and not trains:
            raise RuntimeError("devices: none of those that were planned for is in, limit: at least 1; call it again")
        self.first_specs = list(planned_for)
        self.min_devices = pool.limits.min_devices if trains else 1
        self._may_wait = trains  # for devices that may come
        self._open: dict[int, Worker] = {}  # until they are closed
        self._past: dict[int, DeviceReport] = {}  # of those that were here before
        self._admitted: dict[str, TaskState] = {}
        self._changing = threading.Lock()  # of the three above
        self._is_over = False
        self._leaving: dict[int, threading.Thread] = {}
        self._timers: dict[int, threading.Timer] = {}
        self.homes = HomeMoves(common, self)

    def instructions(self) -> dict[type, Callable[..., None]]:
        return {
            Load: self._load,
            Drop: self._drop,
            Run: self._run,
            Release: self._release,
            Move: self.homes.move,
        }

    @property
    def all(self) -> list[Worker]:
        """Those that are open, also while they leave. From any thread."""
        return list(self._open.values())

    @property
    def room(self) -> Room:
        """The room on devices, with the memory of the smallest that is in; where none is, of the first ones."""
        return Room(self.can_hold, min(spec.memory_bytes for spec in list(self.specs.values()) or self.first_specs))

    def spreading(self) -> list[DeviceSpec]:
        """Return the devices that a step may be spread over."""
        return list(self.specs.values()) or self.first_specs[:1]

    def open(self, planned: Sequence[PlannedTask]) -> None:
        """Open all devices of the run's beginning, with arenas for these tasks."""
        for index, spec in self.specs.items():
            self._open[index] = self._opened(index, spec, planned)
            self._common.due.append(DeviceAdded(index))
        if len(self.specs) < self.min_devices:
            self._tell_waiting()

    def _opened(self, index: int, spec: DeviceSpec, planned: Sequence[PlannedTask]) -> Worker:
        common, num_threads = self._common, self._common.host.intra_op_threads
        arena = None
        if spec.has_arena:  # where no task is here yet, tasks that come are cut for what there is
            arena = arena_bytes(planned, spec.memory_bytes) if planned else spec.memory_bytes // 2
        device = spec.open(index, common.trace, num_threads, arena)

        moves = self.homes  # not this one, which would hold itself

        def give_way(homes: Sequence[tuple[str, int]]) -> None:
            common.later(partial(moves.give_way, homes))

        # No method of the run's, which would then be freed, with every arena, only by the garbage collector.
        return Worker(index, device, common.trace, common.events.leave, common.events.help, give_way)

    # -- devices come and go

    def add(self, index: int, spec: DeviceSpec, planned: Sequence[PlannedTask]) -> None:
        """Open one more device, for the tasks that train, and let it in; in the caller's thread, which may wait.

        Raises RunOver where the run is over, and what opening it or copying layers raises.
        """
        worker = self._opened(index, spec, planned)
        with self._changing:
            is_over = self._is_over
            if not is_over:
                self._open[index] = worker
            states = list(self._admitted.values())
        try:
            if is_over:
                raise RunOver
            for state in states:
                worker.admit(state)
                with self._changing:  # it may have ended meanwhile, and one of its name may go on
                    now = self._admitted.get(state.name)
                if now is None:
                    worker.dismiss(state.name)
                elif now is not state:
                    worker.admit(now)
        except BaseException:
            with self._changing:
                self._open.pop(index, None)
            worker.close()
            raise
        self._common.later(partial(self._let_in, index, spec))

    def _let_in(self, index: int, spec: DeviceSpec) -> None:
        self.specs[index] = spec
        self._common.due.append(DeviceAdded(index))
        self.homes.share_out(anew=True)

    def remove(self, index: int, grace_s: float | None) -> None:
        """Let a device go: at once, or its unit is given up after `grace_s` seconds. From any thread."""
        self._common.later(partial(self._remove, index, grace_s))

    def _remove(self, index: int, grace_s: float | None) -> None:
        was_in = self.specs.pop(index, None) is not None
        worker = self._open.get(index)  # None: it could not be opened, which ends the run
        if grace_s is not None and worker is not None:
            if (before := self._timers.pop(index, None)) is not None:
                before.cancel()
            timer = self._timers[index] = threading.Timer(grace_s, worker.abandon)
            timer.daemon = True
            timer.start()
        if not was_in:  # it leaves already, and has so long from now on
            return
        self._common.due.append(DeviceRemoved(index))
        self.homes.leave(index)
        if len(self.specs) == self.min_devices - 1 and not self._common.is_interrupted:
            self._tell_waiting()
        for name, task in self._common.tasks.items():
            least = task.planned.task.min_devices
            if task.life is Life.TRAINING and len(self.specs) == least - 1 and least > self.min_devices:
                text = f"task {name!r} begins no step: {len(self.specs)} devices are in, limit: its min_devices={least}"
                warn(f"hydra_engine: {text}; add_device() adds one")

    def _tell_waiting(self) -> None:
        text = f"{len(self.specs)} devices are in, limit: min_devices={self.min_devices}; no unit begins until"
        warn(f"hydra_engine: {text} add_device() adds one")

    def failed(self, index: int, error: DeviceFailed) -> None:
        """Take out a device that has failed; end the run where that is one too many, or nothing may come instead."""
        if index in self.specs:  # else it was counted with its first unit that failed
            name = self.pool.fail(index)
            self._common.messages.append(f"{name} was taken out: {error}")
            self.homes.lose(error)
            self._remove(index, None)
        goes_on = self.pool.may_go_on and (self._may_wait or self.specs)
        if not goes_on and self._common.lost is None:
            most = self.pool.limits.max_failures
            remedy = f"go on without it: train_models(resume=True), where tasks are saved; limit: max_failures={most}"
            self._common.lost = DeviceFailed(error.device, error.reason, remedy)
            self._common.due.append(StopRequested())

    def _release(self, instruction: Release) -> None:
        worker = self._open[instruction.device]
        thread = threading.Thread(target=self._retire, args=(worker,), name=f"{worker.device.name}-leaves", daemon=True)
        self._leaving[worker.index] = thread
        thread.start()

    def _retire(self, worker: Worker) -> None:
        """Close a device that was released, once what is on its way from it is in DRAM."""
        index = worker.index
        try:
            worker.homes.wait_until_empty()
            worker.retire()
        finally:
            if (timer := self._timers.pop(index, None)) is not None:
                timer.cancel()
            with self._changing:
                self._past[index] = _reported(worker, self._common.trace, self._past.get(index))
                self._open.pop(index, None)
            self._leaving.pop(index, None)
            self.pool.left(index)

    def close(self) -> None:
        """Close all devices."""
        with self._changing:
            self._is_over = True
        for timer in list(self._timers.values()):
            timer.cancel()
        for thread in list(self._leaving.values()):
            thread.join()
        for worker in self.all:
            worker.close()

    # -- tasks

    def admit(self, state: TaskState) -> None:
        """Have every device copy a task's layers, those that are yet to come too. User code, in the task's thread."""
        with self._changing:
            self._admitted[state.name] = state
            workers = self.all
        for worker in workers:
            worker.admit(state)

    def refresh(self, state: TaskState) -> None:
        """Have every device copy a task's layers anew, which a callback has changed, and which nothing runs."""
        for worker in self.all:
            worker.admit(state)

    def dismiss(self, state: TaskState) -> None:
        """Forget a task, once nothing of it is on its way: a claim that was revoked may still be loading."""
        with self._changing:
            if self._admitted.get(state.name) is state:
                del self._admitted[state.name]
        for worker in self.all:
            worker.settle(state.name)
            worker.dismiss(state.name)

    def device_for(self, memory_bytes: int) -> int | None:
        """Return the smallest device that is in and has so much memory, if there is one."""
        found = [(spec.memory_bytes, index) for index, spec in self.specs.items() if spec.memory_bytes >= memory_bytes]
        return min(found)[1] if found else None

    @contextmanager
    def vacated(self, index: int) -> Iterator[OpenDevice]:
        """Have a device that was lent, with nothing on it and a trace of its own, in another thread."""
        worker = self._open[index]
        worker.vacate()
        device, trace = worker.device, worker.device.trace
        device.trace_in(Trace())
        try:
            yield device
        finally:
            device.trace_in(trace)

    def can_hold(self, work_bytes: int, slab_bytes: int) -> bool:
        """Return True if each has these bytes for a unit, and for its shard's parameters."""
        return all(worker.device.ledger.can_hold(work_bytes, slab_bytes) for worker in self.all)

    def check_room(self, planned: PlannedTask) -> None:
        """Refuse a task for which the devices, whose arenas were made for others, have no room."""
        if not self.can_hold(planned.work_bytes, planned.largest_slab_bytes):
            raise ShardDoesNotFit(
                f"add_task: {planned.name!r} needs {format_bytes(planned.largest_slab_bytes)} for a shard's parameters "
                f"and {format_bytes(planned.work_bytes)} beside them; the devices' arenas were made for the tasks that "
                f"train; cut it smaller, or add it before train_models()"
            )

    def is_resident(self, device: int, task: str, shard: int) -> bool:
        """Return True if a device holds most of a shard."""
        return self._open[device].holds(self._common.tasks[task].state, shard)

    # -- figures

    def progress(self, at_device: Callable[[int], tuple[Unit | None, Unit | None]]) -> list[DeviceProgress]:
        """Return how each that is open stands; `at_device`: tells the units that one runs and claims."""
        trace, found = self._common.trace, []
        for worker in sorted(self.all, key=lambda each: each.index):
            device, (running, claimed) = worker.device, at_device(worker.index)
            doing = AtWork.IDLE
            if running is not None:
                doing = _DELAYED[worker.delay(running)]
            elif worker.index in self._leaving:
                doing = AtWork.LEAVES
            elif claimed is not None:
                doing = AtWork.LOADS
            found.append(
                DeviceProgress(
                    name=device.name,
                    doing=doing,
                    unit=running or claimed,
                    used_bytes=device.ledger.used_bytes,
                    memory_bytes=device.ledger.memory_bytes,
                    loaded_bytes=trace.bytes_moved(device.name, LOAD),
                    stored_bytes=trace.bytes_moved(device.name, STORE),
                    busy_s=trace.busy_s(device.name, COMPUTE),
                )
            )
        return found

    def reports(self) -> list[DeviceReport]:
        """Report the work of each so far; from any thread."""
        with self._changing:
            trace, past = self._common.trace, self._past
            now = {**past, **{k: _reported(worker, trace, past.get(k)) for k, worker in self._open.items()}}
        return [now[index] for index in sorted(now)]

    def update(self, index: int, label: str, job: Callable[[], None]) -> None:
        """Update a shard that is at home on a device."""
        self._open[index].update(label, job)

    def worker(self, index: int) -> Worker | None:
        """Return a device that is open, also while it leaves."""
        return self._open.get(index)

    def _load(self, instruction: Load) -> None:
        unit = instruction.unit
        self._open[instruction.device].load(unit, self._common.tasks[unit.task].state)

    def _drop(self, instruction: Drop) -> None:
        self._open[instruction.device].drop(instruction.unit)

    def _run(self, instruction: Run) -> None:
        self._common.tasks[instruction.unit.task].state.progress.begin(instruction.unit)
        self._open[instruction.device].run(instruction.unit)


def _reported(worker: Worker, trace: Trace, before: DeviceReport | None) -> DeviceReport:
    """Report the work of a device, with what it did when it was in before."""
    device, timing = worker.device, worker.timing
    peak_bytes, homed_bytes = device.ledger.peak_bytes, worker.homes.peak_bytes
    if before is not None:
        peak_bytes, homed_bytes = max(before.peak_bytes, peak_bytes), max(before.homed_bytes, homed_bytes)
        timing = Timing((before.launch_s or 0.0) + timing.launch_s, (before.device_s or 0.0) + timing.device_s)
    return DeviceReport(
        name=device.name,
        busy_s=trace.busy_s(device.name, COMPUTE) + trace.busy_s(device.name, UPDATE),
        loaded_bytes=trace.bytes_moved(device.name, LOAD),
        stored_bytes=trace.bytes_moved(device.name, STORE),
        peak_bytes=peak_bytes,
        memory_bytes=device.ledger.memory_bytes,
        launch_s=timing.launch_s if timing.device_s else None,
        device_s=timing.device_s or None,
        homed_bytes=homed_bytes,
    )


def home_lost(task: RunningTask, device: str) -> Failed:
    """Return why a task fails whose weights are gone with a device."""
    reason = f"it had weights of {task.name}, of which no step is saved to go back to"
    remedy = "save steps (checkpoint_dir, checkpoint_every), or set homes='host', which loses none"
    return Failed(task.name, DeviceFailed(device, reason, remedy), "the home of its weights")


# A shard whose home has left a device gets another one after so many seconds at the earliest.
LEAST_STAY_S = 60.0
# That deadline.
SHARE_OUT = ("homes", None)


class HomeMoves:
    """The department of homes: which shard of which task has its home on which device.

    Homes are shared out anew as tasks begin and end, and as devices come and go. What moves, moves once the scheduler
    has said that nothing uses it; callbacks may have the model then.
    """

    def __init__(self, common: Common, workers: Workers) -> None:
        self._common = common
        self._workers: Workers = weakref.proxy(workers)  # which holds this one
        self._left_s: dict[tuple[str, int], float] = {}  # by task and shard, when a home has left a device

    def begin(self, task: RunningTask) -> None:
        """Give homes to a task that begins, if it asks for some."""
        homes = task.state.homes
        homes.secure, homes.close_all = task.secure_dram, partial(self._close_all, task)
        homes.has_start = task.planned.saved is None and task.planned.reader.keeps_positions
        self._left_s = {key: at_s for key, at_s in self._left_s.items() if key[0] != task.name}  # of one before it
        self._common.later(self.share_out)  # once the scheduler knows it

    def share_out(self, *, anew: bool = False) -> None:
        """Share devices' memory out among the shards of all tasks, and have moved what is elsewhere.

        anew: there is more of it than when some had to leave for want of room.
        """
        tasks = [each for each in self._common.tasks.values() if each.life is Life.TRAINING and each.optimizer]
        for task in tasks if anew else ():
            task.state.homes.most = None
        if not any(task.state.homes.num_layers or task.state.homes.of for task in tasks):
            return
        wanted = [self._wanted(task) for task in tasks]
        work = max(each.work_bytes for each in wanted)
        memory = {}
        for index in self._workers.specs:
            if (worker := self._workers.worker(index)) is not None:
                ledger = worker.device.ledger
                memory[index] = ledger.limit_bytes(SLABS) + work * ledger.is_split
        found = share_out(wanted, memory)
        for task in tasks:
            self._ask(task, found[task.name])

    def _wanted(self, task: RunningTask) -> Wanted:
        state, optimizer = task.state, task.optimizer
        assert optimizer is not None
        shards = state.shards_for_homes()[: state.homes.most]
        return Wanted.of(state, task.name, shards, [optimizer.home_bytes(each, state.pool) for each in shards])

    def _ask(self, task: RunningTask, wanted: dict[int, int]) -> None:
        """Have homes of a task move to where they are wanted."""
        homes, now_s = task.state.homes, self._common.trace.now_s()
        there = homes.devices
        recent = {
            index for index in wanted if now_s < self._left_s.get((task.name, index), -LEAST_STAY_S) + LEAST_STAY_S
        }
        targets: dict[int, int | None] = dict.fromkeys(there)
        targets |= {index: device for index, device in wanted.items() if index in there or index not in recent}
        targets |= dict.fromkeys(homes.gives_way & there.keys())
        homes.targets = {index: device for index, device in targets.items() if there.get(index) != device}
        leaving = tuple(index for index in homes.targets if index in there)
        coming = tuple(index for index in homes.targets if index not in there)
        if leaving:
            self._common.due.append(MoveWanted(task.name, leaving, leaves=True))
        if coming:
            self._common.due.append(MoveWanted(task.name, coming))
        if not recent <= there.keys():
            self._common.await_(SHARE_OUT, LEAST_STAY_S)

    def leave(self, device: int) -> None:
        """A device is to leave: so do its homes first, to another one where there is room."""
        self.share_out()
        for task in self._common.tasks.values():
            shards = tuple(index for index, at in task.state.homes.devices.items() if at == device)
            for index in shards:
                task.state.homes.targets.setdefault(index, None)
            if shards and task.life is Life.TRAINING:
                self._common.due.append(MoveWanted(task.name, shards, leaves=True))

    def moved(self, event: HomesMoved) -> HomesMoved:
        """Let a home leave again whose device was removed while it came there."""
        for index, device in event.homes.items():
            if device not in self._workers.specs and self._workers.worker(device) is not None:
                self._common.tasks[event.task].state.homes.targets[index] = None
                self._common.due.append(MoveWanted(event.task, (index,), leaves=True))
        return event

    def strike(self, device: str) -> list[tuple[RunningTask, int]]:
        """Give up the homes on a device that is lost; return the tasks that train, with the number of theirs."""
        found = []
        for task in self._common.tasks.values():
            homes = list(task.state.homes.of.values())
            number = sum(home.opened.name == device for home in homes)
            if number and task.life is Life.TRAINING:
                task.state.homes.lost_on = device
                for home in homes:  # what those elsewhere have is not of the step that it goes to
                    home.is_lost = True
                found.append((task, number))
        return found

    def lose(self, error: DeviceFailed) -> None:
        """A device has failed: tasks with homes there go back to where they were saved, or fail."""
        for task, number in self.strike(error.device):
            if task.end.goes_back:
                continue
            if task.end.ending is None:
                task.end.undo(f"{error.device} failed, where {number} of its shards were at home")
            else:  # what it was to end with is gone
                task.end.fail(home_lost(task, error.device), commits=False)
            self._common.due.append(TaskStopped(task.name))

    def give_way(self, homes: Sequence[tuple[str, int]]) -> None:
        """Let homes leave a device for good, since a unit needs their room."""
        for name, index in homes:
            task = self._common.tasks.get(name)
            if task is not None and task.life is Life.TRAINING:
                task.state.homes.targets[index] = None
                task.state.homes.gives_way.add(index)
                task.state.homes.most = sum(shard.index < index for shard in task.state.shards_for_homes())
                self._common.due.append(MoveWanted(name, (index,), leaves=True))

    def give_all(self, device: int | None) -> bool:
        """Let all homes leave a device on which a unit ran out of memory; False: there are none."""
        worker = None if device is None else self._workers.worker(device)
        return worker is not None and worker.homes.give_all()

    def move(self, instruction: Move) -> None:
        """Move homes whose shards nothing uses."""
        task = self._common.tasks[instruction.task]
        self._common.pool.submit(self._moved, task, instruction.shards)

    def _moved(self, task: RunningTask, shards: Sequence[int]) -> None:
        homes = task.state.homes
        try:
            with homes.lock:
                for index in shards:
                    if index not in homes.targets:  # which it has found already
                        continue
                    device = homes.targets.pop(index)
                    if index in homes.of:
                        self._left_s[task.name, index] = self._common.trace.now_s()
                        self._close(task, index)
                    worker = self._workers.worker(device) if device in self._workers.specs else None
                    if worker is not None and task.optimizer is not None:
                        worker.homes.open(task.state, task.state.cut.shards[index], task.optimizer)
        except BaseException as error:
            self._common.events.put(Failed(task.name, error, "the move of its homes"))
        self._common.events.put(HomesMoved(task.name, tuple(shards), homes.devices))

    def _close(self, task: RunningTask, index: int) -> None:
        homes = task.state.homes
        home = homes.of[index]
        task.secure_dram(home.gradients)
        homes.gives_way.discard(index)
        worker = self._workers.worker(home.device)
        assert worker is not None
        if not (home.is_lost or home.is_shown):
            homes.has_start = False
        worker.homes.close(task.state, home)

    def _close_all(self, task: RunningTask) -> None:
        """Make DRAM the home of all, where nothing of a task is under way. In any thread that may wait."""
        homes = task.state.homes
        with homes.lock:
            homes.targets = {}
            shards = tuple(homes.of)
            for index in shards:
                self._close(task, index)
        if shards:
            self._common.events.put(HomesMoved(task.name, shards, {}))
            self._common.later(partial(self.share_out, anew=True))  # their room may be others'
