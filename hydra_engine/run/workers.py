"""Devices at work in a run: opens them, carries out Load, Drop, Run and Release, and closes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from hydra_engine.devices import COMPUTE, LOAD, STORE, DeviceSpec, OpenDevice
from hydra_engine.display import AtWork, DeviceProgress
from hydra_engine.elastic import DevicePool
from hydra_engine.errors import DeviceFailed, ShardDoesNotFit
from hydra_engine.host import TaskState
from hydra_engine.planning import PlannedTask, Room, arena_bytes
from hydra_engine.run.running_task import Common, Life
from hydra_engine.schedule import DeviceAdded, DeviceRemoved, Drop, Load, Release, Run, StopRequested, Unit
from hydra_engine.system import warn
from hydra_engine.tasks import DeviceReport
from hydra_engine.trace import Timing, Trace
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
        pool: DevicePool[DeviceSpec],
        planned_for: Sequence[DeviceSpec],
        decide: Callable[[], None],
        *,
        trains: bool,
    ) -> None:
        """`planned_for`: devices that the run begins with. decide: has decided what a lane has told, in that lane."""
        self._decide = decide
        self._common = common
        self.pool = pool
        first = {id(spec) for spec in planned_for}
        self.specs = {k: spec for k, spec in pool.specs.items() if id(spec) in first}  # of those that are in, by number
        if not self.specs and not trains:
            raise RuntimeError("devices: none of those that were planned for is in, limit: at least 1; call it again")
        self.first_specs = list(planned_for)
        self.min_devices = pool.limits.min_devices if trains else 1
        self._may_wait = trains  # for devices that may come
        self.messages: list[str] = []  # about devices that have failed
        self._open: dict[int, Worker] = {}  # until they are closed
        self._past: dict[int, DeviceReport] = {}  # of those that were here before
        self._admitted: dict[str, TaskState] = {}
        self._changing = threading.Lock()  # of the three above
        self._is_over = False
        self._leaving: dict[int, threading.Thread] = {}
        self._timers: dict[int, threading.Timer] = {}

    def instructions(self) -> dict[type, Callable[..., None]]:
        return {Load: self._load, Drop: self._drop, Run: self._run, Release: self._release}

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
        return Worker(index, device, common.trace, common.events.leave, self._decide)

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
            self.messages.append(f"{name} was taken out: {error}")
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
            worker.retire()
        finally:
            if (timer := self._timers.pop(index, None)) is not None:
                timer.cancel()
            with self._changing:
                self._past[index] = self._report(worker)
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
            now = {**self._past, **{index: self._report(worker) for index, worker in self._open.items()}}
        return [now[index] for index in sorted(now)]

    def _report(self, worker: Worker) -> DeviceReport:
        """Report the work of a device, with what it did when it was in before."""
        trace, device, timing = self._common.trace, worker.device, worker.timing
        peak_bytes = device.ledger.peak_bytes
        if (before := self._past.get(worker.index)) is not None:
            peak_bytes = max(before.peak_bytes, peak_bytes)
            timing = Timing((before.launch_s or 0.0) + timing.launch_s, (before.device_s or 0.0) + timing.device_s)
        return DeviceReport(
            name=device.name,
            busy_s=trace.busy_s(device.name, COMPUTE),
            loaded_bytes=trace.bytes_moved(device.name, LOAD),
            stored_bytes=trace.bytes_moved(device.name, STORE),
            peak_bytes=peak_bytes,
            memory_bytes=device.ledger.memory_bytes,
            launch_s=timing.launch_s if timing.device_s else None,
            device_s=timing.device_s or None,
        )

    def _load(self, instruction: Load) -> None:
        unit = instruction.unit
        self._open[instruction.device].load(unit, self._common.tasks[unit.task].state)

    def _drop(self, instruction: Drop) -> None:
        self._open[instruction.device].drop(instruction.unit)

    def _run(self, instruction: Run) -> None:
        self._common.tasks[instruction.unit.task].state.progress.begin(instruction.unit)
        self._open[instruction.device].run(instruction.unit)
