"""The tasks of an orchestrator: named, planned, put back as they were saved, each as far as it has come."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch

from hydra_engine.checkpoints import Checkpoint, CheckpointStore, SavedTask, never_committed
from hydra_engine.data import Beginning
from hydra_engine.devices import DeviceSpec, EmulatedDevice, OpenDevice
from hydra_engine.errors import CheckpointError, ShardDoesNotFit
from hydra_engine.native import native
from hydra_engine.planning import (
    DramLimit,
    PlannedTask,
    Rehearsals,
    Target,
    TaskContext,
    TaskCost,
    check_apart,
    check_arena,
    check_dram,
    check_shared_buffers,
    check_sharing,
    fits_arena,
    known_steps,
    least_bytes,
    make_plan,
    planned_homes,
    predicted_cost,
    rehearsed_s,
    way_of,
    ways_together,
)
from hydra_engine.run.ending import INTERRUPTED
from hydra_engine.system import HostThreads
from hydra_engine.tasks import FAILED, EvaluationTask, ModelTask, Plan, Purpose, Report, TaskPlan, TaskReport
from partitioners import Budget, format_bytes, parse_bytes
from partitioners.profile import noted

PLANS = "plans"  # the folder of plans, in a directory of checkpoints


class Station(Enum):
    """Stations of a task with its orchestrator."""

    WAITING = auto()  # not begun to train
    JOINING = auto()  # it is planned, while others train, to join them
    TRAINING = auto()  # in the run
    OVER = auto()  # it was trained
    DROPPED = auto()  # it was not begun, and is not to be
    FORGOTTEN = auto()  # it was trained, and its name alone is here


class TaskList:
    """The tasks by name. `changing` is held while it must not change which there are, and at which stations."""

    def __init__(
        self,
        tasks: Sequence[ModelTask],
        devices: Sequence[DeviceSpec],
        store: CheckpointStore,
        limit: DramLimit,
        *,
        max_devices: int,
    ) -> None:
        """`limit`: of DRAM for all of them. `max_devices`: that batches are split for, with `max_device_batch`."""
        self.changing = threading.RLock()
        self._is_planning = False  # all tasks, which the thread that holds `changing` now does
        self._store = store
        self._shared = TaskContext(
            alignment_bytes=max(device.alignment_bytes for device in devices),
            max_devices=max_devices,
            limit=limit,
            rehearsals=Rehearsals(lambda: None if store.directory is None else store.directory / PLANS),
        )
        # A device that is lost takes the process with it, and what was committed is saved.
        self._may_be_lost = not all(isinstance(device, EmulatedDevice) for device in devices)
        self._planned: dict[str, PlannedTask] = {}
        self._stations: dict[str, Station] = {}
        # In whose places others are planned, to go on with them; and at which stations they were.
        self._paused: dict[str, tuple[PlannedTask, Station]] = {}
        self._told: list[str] = []  # about tasks that were paused and have gone on, and those that were forgotten
        self._reports: dict[str, TaskReport] = {}  # of tasks that a resume found to be over, until they are told
        for task, name in _named(tasks):
            self.put(self._made(task, name), Station.WAITING)
        check_sharing(self.all)

    @contextmanager
    def changed_by(self, what: str) -> Iterator[TaskList]:
        """Hold `changing` for a call of an orchestrator's method, which may come from any thread."""
        with self.changing:
            if self._is_planning:
                raise RuntimeError(
                    f"{what}: called by a loader, a layer or a callback's on_epoch_begin, in the thread that plans all "
                    f"tasks; call it before generate(), or once training has begun; StopTask ends a callback's own task"
                )
            yield self

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Plan all tasks in the body, by the thread that holds `changing`."""
        self._is_planning = True
        try:
            yield
        finally:
            self._is_planning = False

    @property
    def all(self) -> list[PlannedTask]:
        """Every task, in the order in which they came."""
        return list(self._planned.values())

    def at(self, *stations: Station) -> list[PlannedTask]:
        """Tasks at one of these stations."""
        return [each for each in self.all if self.station(each) in stations]

    def beside(self, planned: PlannedTask, *stations: Station) -> list[PlannedTask]:
        """Those that one more task comes to, without the one in whose place it comes."""
        return [each for each in self.at(*stations) if each.name != planned.name]

    def station(self, planned: PlannedTask) -> Station:
        """Return a task's station."""
        is_here = self._planned.get(planned.name) is planned
        return self._stations.get(planned.name, Station.DROPPED) if is_here else Station.DROPPED

    def put(self, planned: PlannedTask, station: Station) -> None:
        """Add a task, replace it, or let it come to another station."""
        before = self._planned.get(planned.name)
        if before is not None and before is not planned and before.is_paused:
            self._paused[planned.name] = before, self._stations[planned.name]
        self._planned[planned.name], self._stations[planned.name] = planned, station
        if station in (Station.TRAINING, Station.OVER):
            self._store.elsewhere.pop(planned.name, None)  # from now on what is saved here counts
        if not planned.has_left:
            self._shared.limit.enter(planned)
        if station is not Station.JOINING and (found := self._paused.pop(planned.name, None)) is not None:
            self._told += (*found[0].reader.messages, *found[0].doubts)

    def save_plans(self) -> None:
        """Save plans beside checkpoints, for a resume in another process, but for those that a task failed with."""
        for planned in self.all:
            adopted = planned.decisions.adopted
            if adopted is not None and planned.report.status == FAILED:
                self._shared.rehearsals.forget(adopted)
                planned.decide(adopted=None)
        self._shared.rehearsals.save()

    def drop(self, planned: PlannedTask) -> None:
        """Nobody will train a task."""
        with self.changing:
            if self._planned.get(planned.name) is planned:  # and not one that came after it was removed
                self._stations[planned.name] = Station.DROPPED
        planned.leave()
        planned.reader.close()

    def remove(self, planned: PlannedTask) -> None:
        """Drop a task, and forget it."""
        with self.changing:
            before = self._paused.pop(planned.name, None)
            if before is not None:
                self._planned[planned.name], self._stations[planned.name] = before
            elif self._planned.get(planned.name) is planned:
                del self._planned[planned.name], self._stations[planned.name]
        self.drop(planned)

    def end(self, name: str, *, pauses: bool) -> Station:
        """End or pause a task that is not in the run yet. Return the station at which the call has found it."""
        planned = self.named(name, "pause_task" if pauses else "stop_task")
        if pauses and not self._store.may_save:
            raise ValueError(
                f"pause_task: {name!r}, limit: an orchestrator with a checkpoint_dir, since a task is saved while it "
                f"is paused; give ModelOrchestrator one, or end the task with stop_task"
            )
        station = self.station(planned)
        if station is Station.WAITING:
            self.drop(planned)
            planned.is_paused = pauses
        elif station is Station.JOINING and pauses:
            planned.pause_wanted = True
        elif station is Station.JOINING:
            self.put(planned, Station.DROPPED)  # who plans it finds out
        return station

    def forget(self, name: str) -> tuple[TaskReport, bool]:
        """Refer no more to a task that is over. Return its report, and True if the run is to forget it too.

        Where it was trained, its name stays its own, since reports have it; of one that is paused, it is free.
        """
        planned = self.named(name, "forget_task")
        station = self.station(planned)
        is_in_run = station is Station.TRAINING
        if station in (Station.WAITING, Station.JOINING) or (is_in_run and not planned.has_left):
            does = "trains" if is_in_run else "waits to train"
            raise RuntimeError(
                f"forget_task: {name!r} {does}, limit: a task that is over; end it with stop_task({name!r}), and call "
                f"this in its callbacks' on_task_end, or after train_models()"
            )
        del self._planned[name]
        if planned.is_paused:
            self._store.paused[name] = planned.beginning
        if planned.is_paused or self._stations[name] is Station.DROPPED:
            del self._stations[name]
        else:
            self._stations[name] = Station.FORGOTTEN
        self._told += (*planned.reader.messages, *planned.doubts)
        report = planned.report
        report.lighten()
        return report, is_in_run

    def made(self, task: ModelTask) -> PlannedTask:
        """Check one more task, which is not put here yet. It may have the name of one that was paused."""
        taken = {*self._stations, *self._store.paused}  # which waits for its name, even where it was forgotten
        free = (k for k in itertools.count(len(self._stations)) if f"task-{k}" not in taken)
        [(task, name)] = _named([task], next(free))
        before = self._planned.get(name)
        if name in self._stations and not (before is not None and before.is_paused):
            raise ValueError(
                f"tasks: there is a task named {name!r} already; give each a name of its own. One that was paused is "
                f"added again once its on_task_pause was told"
            )
        if before is not None:
            self._store.paused[name] = before.beginning
        return self._made(task, name, self._store.paused.get(name))

    def _made(self, task: ModelTask, name: str, start: SavedTask | Beginning | None = None) -> PlannedTask:
        has_homes = task.homes not in ("auto", "host")  # it may have to begin again
        keeps_positions = self._store.may_save or self._may_be_lost or task.max_retries > 0 or has_homes
        return PlannedTask(task, name, self._shared, keeps_positions=keeps_positions, start=start)

    def named(self, name: str, what: str, remedy: str = "") -> PlannedTask:
        """Return the task of a name that `what` was called with."""
        if name not in self._planned:
            known = ", ".join(map(repr, self._planned))
            was = ", which was forgotten" if name in self._stations else ""
            raise ValueError(f"{what}: task {one_line(name)}{was}, known: {known}{remedy}")
        return self._planned[name]

    def fork(self, name: str, new_name: str) -> None:
        """Let a task that has not begun yet, or is still to be added, begin as another one is saved."""
        if not self._store.may_save:
            raise ValueError(
                f"fork_task: {name!r}, limit: an orchestrator with a checkpoint_dir, where tasks are saved; give "
                f"ModelOrchestrator one"
            )
        source = self._planned.get(name)
        station = Station.OVER if source is None else self.station(source)
        is_over = station is Station.OVER or (source is not None and station is Station.TRAINING and source.has_left)
        if source is not None and not source.is_paused and not is_over:
            raise ValueError(
                f"fork_task: {name!r} trains, or is to be trained, limit: a task at rest; pause it, and fork it once "
                f"its on_task_pause was told"
            )
        self.check_begins(new_name, "fork_task")
        self._store.fork(name, new_name)

    def check_begins(self, name: str, what: str, *, or_paused: bool = False) -> None:
        """Refuse the name of a task that has begun, for which `what` was called."""
        planned = self._planned.get(name)
        may_be_paused = or_paused and planned is not None and planned.is_paused
        if self._stations.get(name, Station.WAITING) is not Station.WAITING and not may_be_paused:
            raise ValueError(
                f"{what}: {name!r} has begun already, limit: a name that no task has yet, or that of one that waits "
                f"for training; give another"
            )

    def apart(self, task: EvaluationTask, name: str, what: str) -> PlannedTask:
        """Check a task that is not one of those to train; it must not read what they have yet to read."""
        check_apart(what, task.validation, self.at(Station.WAITING))
        return PlannedTask(task, name, TaskContext(alignment_bytes=self._shared.alignment_bytes))

    @property
    def cut_off(self) -> list[PlannedTask]:
        """Tasks that were trained and that a resume goes on with: interrupted ones, and those that have failed."""
        over = self.at(Station.OVER)
        return [each for each in over if each.report.status == FAILED or each.report.stop_reason == INTERRUPTED]

    def begin_again(self, found: Checkpoint | None) -> None:
        """Let tasks that were cut off wait, as in another process, to go on from what was saved of them.

        Raises CheckpointError for one that has moved its weights, where nothing was saved of it.
        """
        cut_off = self.cut_off
        for each in cut_off:
            if found is None or each.name not in found.task_names:  # its first step may have moved weights, or a loader
                raise CheckpointError(
                    f"{each.name}: it ended at step {each.report.steps}, and nothing of it is saved, limit: a "
                    f"checkpoint to go on from; make a new orchestrator, and a new task with a new model"
                )
        for each in cut_off:
            self.put(self._made(each.task, each.name), Station.WAITING)

    def go_on(self, found: Checkpoint | None) -> list[str]:
        """Put back what was saved of the tasks that wait and go on; what there is to say."""
        waiting = self.at(Station.WAITING)
        for each in waiting:
            if not self._store.goes_on(each.name):
                continue
            again = self.put_back(each, while_training=False)
            self.put(again or each, Station.OVER if again is None else Station.WAITING)
        return [] if found is None else [*found.messages, *_matched(found, [each.name for each in waiting])]

    def unclaimed(self, found: Checkpoint | None, told: Sequence[str]) -> list[str]:
        """Say which tasks are saved to go on, and in no run of this program; `told`: what is said already."""
        saved = {} if found is None else found.data["tasks"]
        names = [name for name, each in saved.items() if each["over"] is None and name not in self._stations]
        left = ", ".join(repr(name) for name in names if not any(repr(name) in text for text in told))
        if found is None or not left:
            return []
        return [
            f"{left}: saved in {found.path} to go on, and no task has that name=; callbacks of tasks that were over "
            f"there are told nothing: add the next task after train_models()"
        ]

    def put_back(self, planned: PlannedTask, *, while_training: bool) -> PlannedTask | None:
        """A task as it goes on from what was saved of it, if something was; None where it is over."""
        name, task = planned.name, planned.task
        others = self.beside(planned, Station.JOINING, Station.TRAINING) if while_training else []
        trained = [slot for other in others if not other.has_left for slot in other.layout.slots]
        held = {slot.parameter.data_ptr() for slot in trained} - {0}
        saved = self._store.saved(
            name, lambda found: found.put_weights(task, planned.layout, held), while_training=while_training
        )
        is_new = saved is None and self._store.over(name) is None
        beginning = self._store.paused.get(name)
        if is_new and beginning is None:
            return planned
        planned.leave()
        planned.reader.close()
        if is_new and beginning is not None:  # it was paused before its first step
            task.seed = beginning.seed
            return self._made(task, name, beginning)
        if saved is not None and saved.goes_on(task):
            saved.begin(task)
            return self._made(task, name, saved)
        report = never_committed(task, name) if saved is None else saved.report(task)
        self._reports[name] = planned.report = report
        if saved is not None and task.keep_best is not None:
            saved.put_best_into_model(planned.layout)
        report.ema_state = None if saved is None else saved.ema_state(task, planned.layout)
        return None

    def joined(self, report: Report, messages: Iterable[str]) -> Report:
        """A run's report with those of tasks that were over before, in the order of the tasks."""
        found, self._reports = {**self._reports, **report.tasks}, {}
        tasks = {name: found[name] for name in (*self._stations, *found) if name in found}
        told = () if report.checkpoints is None else report.checkpoints.messages
        before, self._told = self._told, []
        return replace(report, tasks=tasks, messages=(*messages, *before, *told))


@dataclass(frozen=True)
class Site:
    """The devices and the host, as the settings are in one call: plans are made for them."""

    devices: Sequence[DeviceSpec]
    double_buffer: bool
    buffer: int | str | None
    host: HostThreads
    limit: DramLimit
    homes: str = "auto"

    @property
    def _smallest(self) -> DeviceSpec:
        """The device that a plan is made for."""
        return min(self.devices, key=lambda device: device.memory_bytes)

    @property
    def _buffer_bytes(self) -> int | None:
        return None if self.buffer is None else parse_bytes(self.buffer, "buffer")

    def plan_all(self, tasks: list[PlannedTask]) -> Plan:
        """Plan tasks that train together."""
        self._check_free()
        check_dram(tasks)
        self.limit.check(tasks)
        memory_bytes = self._smallest.memory_bytes
        with self._telling_least(tasks):
            plans = [self._plan(each, num_tasks=len(tasks)) for each in tasks]
            self._plan_together(tasks, plans)
            if any(device.has_arena for device in self.devices):
                # What fits alone may leave too little to another's work, since memory does not go from slabs to that.
                for k, each in enumerate(tasks):
                    if not fits_arena(each, tasks, memory_bytes):
                        most = memory_bytes - max(other.work_bytes for other in tasks)
                        plans[k] = self._plan(each, num_tasks=len(tasks), most_slab_bytes=most)
                check_arena(tasks, memory_bytes)
        check_shared_buffers(tasks)
        self.limit.check(tasks)
        homes = planned_homes(tasks, self.devices)
        return self.plan_of([replace(plan, homed_layers=layers) for plan, layers in zip(plans, homes, strict=True)])

    def _plan_together(self, tasks: Sequence[PlannedTask], plans: list[TaskPlan]) -> None:
        """Plan tasks anew that are trained otherwise as it is best for all of them together."""
        ways, own = ways_together(tasks), [way_of(each) for each in tasks]
        if not ways:
            return
        before_s, refused = rehearsed_s(tasks), {}
        for k, way in ways.items():
            try:
                plans[k] = self._plan(tasks[k], num_tasks=len(tasks), together=way)
            except Exception as error:  # it takes more than was counted, or its layers may not be cut or split there
                first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
                refused[k] = f"; another, for all tasks together, was refused: {first_line}"
        # Smaller micro-batches were taken to take seconds in proportion: the rehearsal knows better.
        others = [k for k in ways.keys() - refused.keys() if way_of(tasks[k])[1] != own[k][1]]
        if others and rehearsed_s(tasks) >= before_s:
            found = "; another, for all tasks together, was rehearsed, and is predicted to be no faster"
            refused |= dict.fromkeys(ways.keys() - refused.keys(), found)
        for k, because in refused.items():
            plan = self._plan(tasks[k], num_tasks=len(tasks))
            plans[k] = replace(plan, cut_because=plan.cut_because + because)

    @contextmanager
    def _telling_least(self, tasks: Sequence[PlannedTask]) -> Iterator[None]:
        """Say in one line with which memory all of these tasks fit, where the body finds that one does not."""
        try:
            yield
            return
        except ShardDoesNotFit as error:
            text, notes = str(error), getattr(error, "__notes__", [])
            device, found = self._smallest, []
            for each in tasks:
                with suppress(Exception):  # of its own, and told where that task is planned
                    found.append(least_bytes(each, device))
        if found:
            most = max(found, key=lambda each: each.num_bytes)
            least = most.num_bytes
            if device.has_arena:  # one task's slab lies beside another one's work
                least = max(each.slab_bytes for each in found) + max(each.work_bytes for each in found)
            least += self._buffer_bytes or 0
            if least > device.memory_bytes:
                whose = f"{format_bytes(least, rounds_up=True)} ({least} bytes), for {most.layers} of {most.task}"
                text += f"; the least memory that works for {'all tasks' if len(tasks) > 1 else 'it'} is {whose}"
        refusal = ShardDoesNotFit(text)
        for note in notes:
            noted(refusal, note)
        raise refusal from None  # who raised what before is in the text

    def plan_one(
        self,
        planned: PlannedTask,
        beside: Sequence[PlannedTask],
        borrowed: Callable[[DeviceSpec], AbstractContextManager[OpenDevice]],
        can_hold: Callable[[int, int], bool],
        steps_left: Callable[[str], int | None],
    ) -> TaskPlan:
        """Plan a task while others train, itself being one of `beside`.

        borrowed: a device for a rehearsal, which the others do without meanwhile. can_hold: as the planner's.
        steps_left: of a task that trains, as far as that is known.
        """
        check_dram([planned])
        self.limit.check([planned])
        device = self._smallest
        opened = None if device.has_room_for_planning else lambda _: borrowed(device)
        try:
            others = _left([each for each in beside if each is not planned], steps_left)
            plan = self._plan(planned, num_tasks=len(beside), opened=opened, can_hold=can_hold, beside=others)
        except ShardDoesNotFit as error:
            if opened is not None:
                noted(error, "beside tasks that train, whose arenas stay as they are; add it before train_models()")
            raise
        check_shared_buffers(beside)
        self.limit.check([planned])
        return plan

    def plan_apart(self, planned: PlannedTask) -> PlannedTask:
        """Plan a task that is evaluated or predicts, by itself."""
        try:
            self._check_free()
            if not (planned.task.purpose is Purpose.PREDICT and planned.reader.is_empty):  # then there is nothing to do
                with self._telling_least([planned]):
                    make_plan(planned, self._target(torch.get_num_threads()))
        except BaseException:
            planned.reader.close()
            raise
        return planned

    def plan_of(self, plans: Iterable[TaskPlan]) -> Plan:
        """Return the plans as one."""
        devices = [repr(device) for device in self.devices]
        by_name, because = {plan.name: plan for plan in plans}, native().missing_because
        return Plan(tasks=by_name, devices=devices, host=self.host, no_native_because=because)

    def _plan(self, planned: PlannedTask, **options: Any) -> TaskPlan:
        target = self._target(self.host.intra_op_threads, devices=self.devices, host=self.host, **options)
        return make_plan(planned, target)

    def _target(self, num_threads: int, **options: Any) -> Target:
        device = self._smallest
        budget = Budget(
            memory_bytes=device.memory_bytes, buffer_bytes=self._buffer_bytes, double_buffer=self.double_buffer
        )
        return Target(device=device, budget=budget, num_threads=num_threads, homes=self.homes, **options)

    def _check_free(self) -> None:
        for device in self.devices:
            device.check_free()


def _matched(found: Checkpoint, names: Sequence[str]) -> Iterator[str]:
    """Say what a resume found of these tasks; those that begin anew are named where something of others is there."""
    new = [name for name in names if name not in found.task_names]
    others = [name for name in found.task_names if name not in names]
    if len(new) < len(names):
        yield f"resumed from {found.path}"
    if new and others:
        yield (
            f"{', '.join(map(repr, new))} begin{'s' * (len(new) == 1)} anew, since {found.path} holds only "
            f"{', '.join(map(repr, found.task_names))}; a task goes on under the name= that it was saved with"
        )


def _left(tasks: Sequence[PlannedTask], steps_left: Callable[[str], int | None]) -> list[TaskCost]:
    """Return what these tasks have yet to take; none, where it was not predicted what one of them takes."""
    found = [(predicted_cost(each), steps_left(each.name)) for each in tasks]
    found = [(cost, number) for cost, number in found if number != 0]
    numbers = known_steps([number for _, number in found])
    costs = [replace(cost, num_steps=n) for (cost, _), n in zip(found, numbers, strict=True) if cost is not None]
    return costs if len(costs) == len(found) else []


def task_of(tasks: TaskList, task: ModelTask | str, what: str) -> tuple[ModelTask, str]:
    """Return a task that `what` was called with, and its name among these or else its own."""
    if isinstance(task, ModelTask):
        names = [each.name for each in tasks.all if each.task is task]
        return task, names[0] if names else task.name or what
    return tasks.named(task, what, "; give one of these names, or a ModelTask").task, task


def one_line(value: object) -> str:
    """Return a value for a message: a model's repr is of many lines."""
    return " ".join(repr(value).split())


def _named(tasks: Sequence[ModelTask], num_before: int = 0) -> list[tuple[ModelTask, str]]:
    if not isinstance(tasks, Sequence):
        raise TypeError(f"tasks: {tasks!r} is not a list; give a list of ModelTask")
    named = [(task, getattr(task, "name", None) or f"task-{k}") for k, task in enumerate(tasks, num_before)]
    for task, _ in named:
        if not isinstance(task, ModelTask):
            raise TypeError(f"tasks: {one_line(task)} is a {type(task).__name__}, not a ModelTask; make one of it")
    names = [name for _, name in named]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"tasks: {names.count(name)} tasks are named {name!r}; give each a name of its own")
    return named
