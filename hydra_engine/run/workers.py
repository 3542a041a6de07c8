"""Devices at work in a run: opens them, carries out Load, Drop and Run, and closes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hydra_engine.devices import COMPUTE, LOAD, STORE, DeviceSpec, OpenDevice
from hydra_engine.errors import ShardDoesNotFit
from hydra_engine.planning import PlannedTask, arena_bytes
from hydra_engine.run.running_task import Common
from hydra_engine.schedule import DeviceAdded, Drop, Load, Run
from hydra_engine.tasks import DeviceReport
from hydra_engine.trace import Trace
from hydra_engine.worker import Worker
from partitioners import format_bytes


class Workers:
    """The department of devices."""

    def __init__(self, common: Common, specs: Sequence[DeviceSpec]) -> None:
        self._common = common
        self.specs = specs
        self.all: list[Worker] = []  # by device

    def instructions(self) -> dict[type, Callable[..., None]]:
        """Return the method for each instruction that it carries out."""
        return {Load: self._load, Drop: self._drop, Run: self._run}

    def open(self, planned: Sequence[PlannedTask]) -> None:
        """Open all devices, with arenas for these tasks."""
        common, num_threads = self._common, self._common.host.intra_op_threads
        for index, spec in enumerate(self.specs):
            arena = arena_bytes(planned, spec.memory_bytes) if spec.has_arena else None
            device = spec.open(index, common.trace, num_threads, arena)
            self.all.append(Worker(index, device, common.trace, common.events.put))
            common.due.append(DeviceAdded(index))

    def close(self) -> None:
        """Close all devices."""
        for worker in self.all:
            worker.close()

    @contextmanager
    def vacated(self, index: int) -> Iterator[OpenDevice]:
        """Have a device that was lent, with nothing on it and a trace of its own, in another thread."""
        worker = self.all[index]
        worker.vacate()
        device, trace = worker.device, worker.device.trace
        device.trace = Trace()
        try:
            yield device
        finally:
            device.trace = trace

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
        return self.all[device].holds(self._common.tasks[task].state, shard)

    def reports(self) -> list[DeviceReport]:
        """Report the work of each so far; from any thread."""
        trace = self._common.trace
        return [
            DeviceReport(
                name=worker.device.name,
                busy_s=trace.busy_s(worker.device.name, COMPUTE),
                loaded_bytes=trace.bytes_moved(worker.device.name, LOAD),
                stored_bytes=trace.bytes_moved(worker.device.name, STORE),
                peak_bytes=worker.device.ledger.peak_bytes,
                memory_bytes=worker.device.ledger.memory_bytes,
                launch_s=worker.timing.launch_s if worker.timing.device_s else None,
                device_s=worker.timing.device_s or None,
            )
            for worker in list(self.all)
        ]

    def _load(self, instruction: Load) -> None:
        unit = instruction.unit
        self.all[instruction.device].load(unit, self._common.tasks[unit.task].state)

    def _drop(self, instruction: Drop) -> None:
        self.all[instruction.device].drop(instruction.unit)

    def _run(self, instruction: Run) -> None:
        self._common.tasks[instruction.unit.task].state.progress.begin(instruction.unit)
        self.all[instruction.device].run(instruction.unit)
