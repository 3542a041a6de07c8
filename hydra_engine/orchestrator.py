"""The orchestrator: what a user holds. Validates, plans, trains, reports."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import torch

from hydra_engine import memory
from hydra_engine.device import EmulatedDevice, active_autocast, resolve_devices
from hydra_engine.planner import PlannedTask, check_dram
from hydra_engine.policies import Policy, resolve_policy
from hydra_engine.report import FAILED, Plan, Report
from hydra_engine.run import TrainingRun
from hydra_engine.task import ModelTask
from partitioners import Budget, parse_bytes


class ModelOrchestrator:
    """Trains several tasks together on the devices of this machine.

    Args:
        tasks: at least one `ModelTask`, of different names, sharing no trainable parameter.
        devices: a list of devices; None: every CUDA device, or else one emulated device of half the free DRAM.
        policy: "sharded-lrtf", "fifo", or an object with `choose` (see `hydra_engine.policies.Policy`).
        double_buffer: load the next unit's shard while one computes.

    Attributes:
        verbose: 0 silent, 1 plan and live progress.
        buffer: bytes that partitioning keeps free for the next shard: None for as much as the shard itself, or an int,
            or a string ("512MiB").
        plan: the last plan. report: the last report, also after an interrupt.
    """

    def __init__(
        self,
        tasks: Sequence[ModelTask],
        *,
        devices: Sequence[EmulatedDevice | str] | None = None,
        policy: str | Policy = "sharded-lrtf",
        double_buffer: bool = True,
    ) -> None:
        self._policy = resolve_policy(policy)
        self._devices = resolve_devices(devices, max(1, memory.available_dram_bytes() // 2))
        self._double_buffer = bool(double_buffer)
        self._planned = [PlannedTask(task, name) for task, name in _named(tasks)]
        _check_sharing(self._planned)
        self._busy = threading.Lock()
        self._trained = False
        self.verbose = 1
        self.buffer: int | str | None = None
        self.plan: Plan | None = None
        self.report: Report | None = None

    def generate(self) -> Plan:
        """Profile, partition, rehearse one step of each task on a device, and check that everything fits.

        Reads each task's first batch, which training then goes on with. Changes no weight, buffer or generator. Raises
        ShardDoesNotFit, HostOutOfMemory, or what a layer, loss or loader raised.
        """
        with self._alone("generate"):
            return self._generate()

    def train_models(self) -> Report:
        """Train every task to its end, and return what became of them.

        A task that raises is reported as failed, and the others finish; when all failed, the first failure is raised.
        After Ctrl-C, everything is cleaned up, `report` is set, and KeyboardInterrupt goes on.
        """
        with self._alone("train_models"):
            if self._trained:
                raise RuntimeError("train_models: these tasks are trained already; make new tasks to train further")
            if self.plan is None:
                self._generate()
            self._trained = True
            return self._train()

    def _alone(self, what: str) -> _Alone:
        return _Alone(self._busy, what)

    def _generate(self) -> Plan:
        check_dram(self._planned)
        smallest = min(self._devices, key=lambda device: device.memory_bytes)
        budget = Budget(
            memory_bytes=smallest.memory_bytes,
            buffer_bytes=None if self.buffer is None else parse_bytes(self.buffer, "buffer"),
            double_buffer=self._double_buffer,
        )
        num_threads = torch.get_num_threads()
        plans = [each.make_plan(smallest, budget, num_threads) for each in self._planned]
        _check_shared_buffers(self._planned)
        self.plan = Plan(tasks={plan.name: plan for plan in plans}, devices=[repr(device) for device in self._devices])
        if self.verbose:
            print(self.plan)
        return self.plan

    def _train(self) -> Report:
        num_threads = torch.get_num_threads()
        run = TrainingRun(
            self._planned,
            self._devices,
            self._policy,
            double_buffer=self._double_buffer,
            verbose=self.verbose,
            num_threads=num_threads,
        )
        try:
            self.report = run.train()
        finally:
            self.report = run.report()
            torch.set_num_threads(num_threads)
        failed = [task for task in self.report.tasks.values() if task.status == FAILED]
        if len(failed) == len(self.report.tasks):
            self.report.raise_failures()
        for task in failed:
            print(task.error, file=sys.stderr)
        return self.report


class _Alone:
    """Refuses a second call while one is under way, and an active autocast."""

    def __init__(self, busy: threading.Lock, what: str) -> None:
        self._busy = busy
        self._what = what

    def __enter__(self) -> None:
        kind = active_autocast()
        if kind is not None:
            raise RuntimeError(
                f"{self._what}: autocast is active for {kind}, and would not reach the threads that compute; "
                f"leave it, and set precision= on the task"
            )
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(f"{self._what}: this orchestrator is working already; wait for its call to return")

    def __exit__(self, *exc: object) -> None:
        self._busy.release()


def _named(tasks: Sequence[ModelTask]) -> list[tuple[ModelTask, str]]:
    if not isinstance(tasks, Sequence):
        raise TypeError(f"tasks: {tasks!r} is not a list; give a list of ModelTask")
    if not tasks:
        raise ValueError("tasks: empty list; give at least one ModelTask")
    named = [(task, getattr(task, "name", None) or f"task-{k}") for k, task in enumerate(tasks)]
    for task, _ in named:
        if not isinstance(task, ModelTask):
            raise TypeError(f"tasks: {task!r} is a {type(task).__name__}, not a ModelTask")
    names = [name for _, name in named]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"tasks: {names.count(name)} tasks are named {name!r}; give each a name of its own")
    return named


def _check_sharing(planned: Sequence[PlannedTask]) -> None:
    trained: dict[int, str] = {}
    loaders: dict[int, str] = {}
    generators: dict[int, str] = {}
    for each in planned:
        for slot in each.layout.trainable_slots():
            other = trained.setdefault(slot.parameter.data_ptr() or id(slot.parameter), each.name)
            if other != each.name:
                raise ValueError(
                    f"tasks {other} and {each.name} share the trainable parameter {slot.name}; freeze it in both, or "
                    f"give each task its own copy"
                )
        loader = each.task.dataloader
        found = [getattr(holder, "generator", None) for holder in (loader, getattr(loader, "sampler", None))]
        owners = [generators.setdefault(id(generator), each.name) for generator in found if generator is not None]
        if getattr(loader, "persistent_workers", False):
            owners.append(loaders.setdefault(id(loader), each.name))
        for other in owners:
            if other != each.name:
                raise ValueError(
                    f"tasks {other} and {each.name} read through one generator, or one loader with persistent workers, "
                    f"so each would change what the other reads; give each task a loader of its own"
                )


def _check_shared_buffers(planned: Sequence[PlannedTask]) -> None:
    holders: dict[int, list[PlannedTask]] = {}
    for each in planned:
        for buffer in each.layout.buffers:
            holders.setdefault(id(buffer), []).append(each)
    for each in planned:
        for index in each.state.changed_buffers:
            other = next((o for o in holders[id(each.layout.buffers[index])] if o is not each), None)
            if other is not None:
                raise ValueError(
                    f"tasks {each.name} and {other.name} share a module whose buffers change in training (BatchNorm, "
                    f"say), so their results would depend on one another; give each task its own, or put it in eval()"
                )
