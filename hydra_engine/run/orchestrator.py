"""The orchestrator: what a user holds. Validates, plans, trains, evaluates, reports."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hydra_engine.capture import saved_hooks
from hydra_engine.checkpoints import CheckpointStore, load_newest
from hydra_engine.control import steered
from hydra_engine.data import drawing_as_usual
from hydra_engine.devices import (
    DevicePool,
    DeviceSpec,
    FreeGpus,
    GpuWatcher,
    PoolLimits,
    Quotas,
    active_autocast,
    resolve_device,
    resolve_devices,
)
from hydra_engine.errors import DeviceLost
from hydra_engine.planning import DramLimit, PlannedTask, check_nothing_shared, check_sharing
from hydra_engine.progress import Observer, RunLoggers, usual_observer
from hydra_engine.run.loop import EngineRun, RunServices
from hydra_engine.run.signals import Signals
from hydra_engine.run.task_list import Site, Station, TaskList, one_line, task_of
from hydra_engine.run.workers import RunOver
from hydra_engine.schedule import Policy, resolve_policy
from hydra_engine.system import dram as host_dram
from hydra_engine.system import host_threads, return_free_memory
from hydra_engine.system import process as restart
from hydra_engine.tasks import (
    FAILED,
    Evaluation,
    EvaluationTask,
    Logger,
    ModelTask,
    Plan,
    Report,
    TaskReport,
    checked_loggers,
)
from hydra_engine.texts import say, warn
from partitioners import Partitioner, parse_bytes
from partitioners.plain_numbers import plain
from partitioners.reach import Opaque

# BSD's EX_TEMPFAIL: whoever starts processes may start this one again.
EXIT_LOST = 75


class _Devices:
    """The devices of an orchestrator, as they come and go: in its pool, and in the run under way."""

    def __init__(self, devices: Any, limits: PoolLimits) -> None:
        """`devices`: as the orchestrator was given them. limits: checked, but for how many they are."""
        self.watcher = GpuWatcher.asked(devices, limits.max_devices)
        wanted = devices if self.watcher is None else self.watcher.take()
        specs = resolve_devices(wanted)
        limits = PoolLimits.checked(*limits, len(specs))
        self.pool = DevicePool(specs, limits)
        self.most = limits.max_devices or len(specs)  # that batches are split for
        self.changing = threading.Lock()

    @property
    def present(self) -> list[DeviceSpec]:
        """Those that are in; at least one."""
        devices = list(self.pool.specs.values())
        if not devices:
            raise RuntimeError("devices: none is in, limit: at least 1 to plan on; add_device() one")
        return devices

    def of_the_kind(self, spec: DeviceSpec) -> DeviceSpec:
        """Refuse a device of another kind than those that tasks were made for."""
        kind, given = self.pool.first.torch_device.type, spec.torch_device.type
        if given != kind:
            raise ValueError(
                f"add_device: {spec!r} computes on {given}, limit: devices of one kind, here {kind}, whose units take "
                f"other bytes"
            )
        return spec


def _let_in(run: EngineRun, spec: DeviceSpec, index: int, planned: Sequence[PlannedTask]) -> None:
    """Open a device for a run, in which these tasks train."""
    for each in planned:
        # Where slabs have an arena, memory is kept for the largest unit of all.
        work_bytes = max(other.work_bytes for other in planned) if spec.has_arena else each.work_bytes
        least = work_bytes + each.largest_slab_bytes
        if least > spec.memory_bytes:
            raise ValueError(
                f"add_device: {spec!r} has {spec.memory_bytes} bytes, limit: {least} for the largest shard of "
                f"{each.name}, which trains, and what units work with; add a device as large as the others"
            )
    spec.check_free()
    with suppress(RunOver), drawing_as_usual():  # then the next run has it
        run.workers.add(index, spec, planned)


class _Settings(NamedTuple):
    """Settings of an orchestrator that last."""

    double_buffer: bool
    homes: str
    limit: DramLimit
    store: CheckpointStore
    loggers: list[Logger]  # but for those that a run had to leave behind


# Past 300 lines: half of them say what its methods promise.
class ModelOrchestrator(Opaque):
    """Trains several tasks together on the devices of this machine, and evaluates models there.

    Args:
        tasks: `ModelTask`s of different names, sharing no trainable parameter. They may all come later, by `add_task`.
        devices: a list of devices; None: every CUDA device, or else one emulated device of half the free DRAM. "auto"
            or `hydra_engine.FreeGpus(...)`: the GPUs that are free, at any time.
        policy: one of `hydra_engine.schedule.POLICIES` ("sharded-lrtf", "fifo", "round-robin", "random",
            "shortest-remaining", "fair-share", "in-step", "locality"), or an object with `key` (see `Policy` there).
        double_buffer: load the next unit's shard while one computes.
        checkpoint_dir: where `train_models` saves, made if it is not there: hydra_engine/checkpoints/checkpoint.md says
            what is in it. One run at a time writes to a directory. None: nothing is saved, unless a device is lost.
        checkpoint_every: "10min", "30s", "2h" and the like, or a number of steps: after so many of any task, all that
            train are saved, each at the end of its step in progress; while they train on, in the background. A save
            that falls due while another is written begins after it. Tasks are saved at their ends as well.
        keep: so many checkpoints stay of all tasks that trained, and the newest one, where a task has ended since.
        min_devices: where fewer are in, a run stands still until one is added.
        max_devices: that may be in at the same time; None: any number.
        quotas: devices of each `ModelTask(group=)`, as ints: {"a": 2, "b": 2}. A group
            has them whenever it asks, and borrows what others leave idle (docs/elastic.md). None: no groups.
        max_failures: of devices in one run, that it survives; with one more it ends, saved, with `DeviceFailed`.
        dram: the most DRAM that all tasks take together for weights, gradients, optimizer states and steps, as planned,
            in bytes or as text ("64GiB"). A task that was trained counts with its weights until they are freed. None:
            what the machine has.
        homes: where layers are at home of tasks that leave it open (`ModelTask(homes="auto")`). "auto": where steps are
            predicted to take least time (docs/homes.md). "host": in DRAM.
        loggers: `hydra_engine.Logger`s, such as `CsvLogger("logs")`, that `train_models` gives the values of
            all tasks. Training waits for none of them (docs/logging.md).

    Attributes:
        policy: of the next run; as in the constructor.
        verbose: 0 silent, 1 plan and progress: on a terminal or in a notebook, with rich, the live display; else lines
            (docs/progress.md).
        observer: a `hydra_engine.Observer` that is shown each run of `train_models`, instead of these.
        tracebacks: print those of tasks that failed while others finished; False: one line for each.
        buffer: bytes that partitioning keeps free for the next shard: None for as much as the shard itself, or an int,
            or a string ("512MiB").
        optimizer_threads: of the host, that commit and update; None: as many as leave a core to each device and one to
            the loaders, 1 to 4. Each computes with as many intra-op threads as the caller.
        plan: the last plan. report: the last report, also after an interrupt.
    """

    # More than seven parameters: it is public, and all but the first are settings that are named one by one.
    def __init__(
        self,
        tasks: Sequence[ModelTask],
        *,
        devices: Sequence[DeviceSpec | str] | FreeGpus | str | None = None,
        policy: str | Policy = "sharded-lrtf",
        double_buffer: bool = True,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: str | int = "10min",
        keep: int = 3,
        min_devices: int = 1,
        max_devices: int | None = None,
        max_failures: int = 0,
        quotas: Mapping[str, int] | None = None,
        dram: int | str | None = None,
        homes: str = "auto",
        loggers: Sequence[Logger] = (),
    ) -> None:
        if homes not in ("auto", "host"):
            raise ValueError(f"homes: {homes!r}, known: 'auto', 'host'")
        self._settings = settings = _Settings(
            loggers=checked_loggers(loggers),
            homes=homes,
            limit=DramLimit(None if dram is None else parse_bytes(dram, "dram")),
            store=CheckpointStore(checkpoint_dir, checkpoint_every, keep),
            double_buffer=bool(double_buffer),
        )
        # Checked before any GPU is taken.
        self._devices = _Devices(devices, PoolLimits.checked(min_devices, max_devices, max_failures, 0))
        devices_in, most = self._devices.present, self._devices.most
        self._tasks = TaskList(tasks, devices_in, settings.store, settings.limit, max_devices=most)
        self._quotas = Quotas(quotas, tasks, lambda: max(most, len(self._devices.pool.specs)), self._not_over)
        self._busy = threading.Lock()
        self._printed = ""  # the last plan that was
        self._running: EngineRun | None = None
        resolve_policy(policy)  # raises for what is none
        self.policy: str | Policy = policy
        self.verbose = 1
        self.observer: Observer | None = None
        self.tracebacks = True
        self.buffer: int | str | None = None
        self.optimizer_threads: int | None = None
        self.plan: Plan | None = None
        self.report: Report | None = None

    def _not_over(self) -> list[ModelTask]:
        """Return the tasks that count on devices, now or once they go on."""
        tasks, found = self._tasks, self._tasks.at(Station.WAITING, Station.JOINING)
        found += [each for each in tasks.at(Station.TRAINING) if not each.has_left]
        return [each.task for each in (*found, *(each for each in tasks.all if each.is_paused))]

    def generate(self) -> Plan:
        """Profile, partition, rehearse one step of each task on a device, and check that everything fits.

        Reads each task's first batch, which training then goes on with. Changes no weight, buffer or generator. Raises
        ShardDoesNotFit, HostOutOfMemory, or what a layer, loss or loader raised.
        """
        with self._at_work("generate") as site, self._tasks.changing:
            site = replace(site, devices=self._devices.present)  # those that come from now on are planned for anew
            waiting = self._tasks.at(Station.WAITING)
            return self._plan_all(site, waiting) if waiting or self.plan is None else self.plan

    def train_models(self, *, resume: bool = False) -> Report:
        """Train every task that was not trained yet to its end, and return what became of them.

        A task that raises is reported as failed, and the others finish; when all failed, the first failure is raised.
        After Ctrl-C or SIGTERM, what computes is finished, everything is cleaned up and saved, `report` is set, and
        KeyboardInterrupt goes on, or SystemExit(143). A second one ends the process at once, with exit code 130 or 143;
        but a second Ctrl-C in an interactive session is an exception. Handlers of your own are left alone.

        resume: go on from the newest whole checkpoint in `checkpoint_dir`, with the bits of a run that was never
        interrupted; from the beginning where nothing is saved yet. Tasks are known by their names, and are made as they
        were then: model, optimizer, loader. One that is not in the checkpoint begins anew. Partition, number of
        devices, budgets and policy may be others; more `epochs` go on with a task that had finished. A task that has
        failed is tried again from its last step that was saved; one that was stopped, or has struck a device, is not
        trained. So it is in a second call, after an interrupt in a notebook, say. Without it, a directory that holds
        another run's checkpoints is refused, unless `hydra-engine resume` has started this process: then it is True
        for that directory.

        Raises CheckpointError where no checkpoint is whole, or the directory is in use, refused or cannot be written
        to; ValueError where a model or loader is another than was saved. A task whose optimizer, schedule or loss scale
        is another fails. A save that fails ends nothing, and is told in `report.messages`.
        """
        with self._at_work("train_models") as site, Signals() as signals:
            return self._train(site, signals, resume)

    def add_task(self, task: ModelTask, *, quota: int | None = None) -> str:
        """Add a task; while `train_models` is at work, it is planned at once and joins in. Returns its name.

        From any thread, a callback's too; another task's bits are as without it. A task of the structure of one that
        was planned adopts its plan; any other is rehearsed. On a GPU the tasks that train do without the device
        meanwhile; an emulated device is rehearsed on beside them, by another one of the same budget. Where training
        has ended before the plan is made, the task waits for the next `train_models()`.

        In a run that was resumed, it goes on as it was saved, if a task of its name was. Under the name of a task that
        was paused it goes on from there: make it as that one was made, with a new model or with that one's.

        While training it must hold no parameter that another task trains: those are moving. Frozen ones may be shared.
        The model of a task that is over is free from its `on_task_end` on: another task may train it on from there.

        quota: of its group, where it is the first task of one that has none yet; as in the constructor's `quotas`.

        Raises what the constructor raises of a task, and what `generate()` raises.
        """
        _refuse_autocast("add_task")
        if not isinstance(task, ModelTask):
            raise TypeError(f"tasks: {one_line(task)} is a {type(task).__name__}, not a ModelTask; make one of it")
        with self._quotas.coming(task, quota), drawing_as_usual():  # its loader is read, maybe by a callback
            with self._tasks.changed_by("add_task") as tasks:
                planned, run = tasks.made(task), self._running
                at = (Station.WAITING,) if run is None else (Station.JOINING, Station.TRAINING)
                beside = tasks.beside(planned, *at)
                check_sharing([*beside, planned])
                if run is None:
                    self.plan = None  # it would lack the new one
                    tasks.put(planned, Station.WAITING)
                    return planned.name
                beside = [each for each in beside if not each.has_left]
                check_nothing_shared(planned, beside)
                again = tasks.put_back(planned, while_training=True)
                tasks.put(again or planned, Station.OVER if again is None else Station.JOINING)
            if again is not None:
                self._join(run, again, [*beside, again])
            return planned.name

    def _add_again(self, planned: PlannedTask) -> tuple[TaskReport, Station]:
        """Add a task that goes back to where it was saved; return its report there, and its station."""
        planned.task.name = planned.name
        self.add_task(planned.task)
        found = self._tasks.named(planned.name, "add_task")
        return found.report, self._tasks.station(found)

    def resume_task(self, name: str, directory: str | os.PathLike[str]) -> None:
        """Let the task of this name go on from another run's directory, with the bits of one that stayed there.

        Call it before `add_task`, or, for a task of the constructor, before `train_models`. What `checkpoint_dir` has
        of the task is not used. Where that directory has nothing of it, the task begins anew. The other run may go on
        saving, without this task. Raises CheckpointError as a resume does, and ValueError for a task that has begun.
        """
        found = load_newest(directory)
        with self._tasks.changed_by("resume_task") as tasks:
            tasks.check_begins(name, "resume_task", or_paused=True)
            if found is not None:
                self._settings.store.elsewhere[name] = found

    def _join(self, run: EngineRun, planned: PlannedTask, beside: Sequence[PlannedTask]) -> None:
        """Plan a task and let it join a run; nobody waits meanwhile, since its loader and layers may take long."""
        tasks, devices = self._tasks, list(self._devices.pool.specs.values()) or run.site.devices
        site = replace(run.site, devices=devices, buffer=self.buffer)
        joining, plan = run.joining, None
        try:
            with joining.planning(planned), suppress(RunOver):
                plan = site.plan_one(planned, beside, joining.borrowed, run.workers.can_hold, run.steps_left)
                run.workers.check_room(planned)
        except BaseException:
            tasks.remove(planned)
            raise
        with tasks.changing:
            is_wanted = tasks.station(planned) is Station.JOINING  # it was not stopped meanwhile
            if is_wanted:
                if plan is None:  # the run was over first: the next one plans it
                    self.plan = None
                else:
                    self.plan = site.plan_of([*(self.plan.tasks.values() if self.plan is not None else ()), plan])
                has_joined = plan is not None and joining.add(planned)
                tasks.put(planned, Station.TRAINING if has_joined else Station.WAITING)
        if not is_wanted:
            tasks.drop(planned)
        elif planned.pause_wanted:
            self.pause_task(planned.name)

    def stop_task(self, name: str) -> None:
        """End a task at its last committed step; the others train on. One that waits for training is not begun.

        From any thread, a callback's too; returns at once. The report says "stopped". Nothing happens to a task that is
        over. Raises ValueError for an unknown name.
        """
        self._end_task(name, pauses=False)

    def pause_task(self, name: str) -> None:
        """End a task at a commit, and save it as one that goes on; the others train on. The report says "paused".

        From any thread, a callback's too; returns at once. Its callbacks are told all its steps, and then, once it is
        saved and its memory given back, `on_task_pause` instead of `on_task_end`. From then on, `add_task` under its
        name goes on with it, in this run or a later one, with the bits of a task that was never paused; so does a
        resume in another process. Where it cannot be saved, it fails with `CheckpointError`, and the model keeps the
        weights of its last commit. Nothing happens to a task that is over. A callback pauses its own task at the step
        that it sees by `raise PauseTask`.

        Raises ValueError for an unknown name, and without a `checkpoint_dir`.
        """
        self._end_task(name, pauses=True)

    def _end_task(self, name: str, *, pauses: bool) -> None:
        with self._tasks.changed_by("pause_task" if pauses else "stop_task") as tasks:
            station = tasks.end(name, pauses=pauses)
            if station is Station.WAITING:
                self.plan = None  # it would have the task still
            elif station is not Station.JOINING and self._running is not None:
                self._running.end(name, pauses=pauses)

    def fork_task(self, name: str, new_name: str) -> None:
        """Let the task that is added as `new_name` begin where the task `name`, which is at rest, was saved.

        `name`: a task that was paused, or that is over, here or in the checkpoint that is resumed. To be called before
        the task `new_name` is added, or before it begins to train. From any thread, a callback's too. While others
        train it returns once that is on disk, in a manifest that names the files of `name` twice; else that is done
        first of all in the next `train_models()`. So a run that is killed goes on with the fork, whatever has become of
        `name` since. Once something was saved under `new_name` itself, that is what goes on.

        The fork has of `name`: weights, buffers, averages, best weights, the optimizer's state of each parameter, the
        loss scale, the place in the loader and its epoch, and the report so far. It has of its own: its seed, and from
        here on the random stream that `torch.manual_seed(seed)` gives; all options of the optimizer (learning rate,
        weight decay); and its schedule, which is stepped anew as often as that of `name` was.

        Raises ValueError for a task that trains or is not saved, a fork that has begun, and without a `checkpoint_dir`;
        CheckpointError where the disk does not take it. A model or an optimizer of another kind is refused as the fork
        is added, or fails.
        """
        with self._tasks.changed_by("fork_task") as tasks:
            tasks.fork(name, new_name)

    def forget_task(self, name: str) -> TaskReport:
        """Let go of a task that is over: of its model, loader and optimizer, so that their DRAM is free.

        Returns its report.

        From any thread, from the task's own `on_task_end` or `on_task_pause` on; returns at once. While others train,
        the task is let go as soon as its callbacks and its loader have returned. Its report stays in the run's, without
        `ema_state`. A model that you hold keeps its weights. One that was paused is on disk: `add_task` under its name
        goes on with it. So is the name free of one that was not begun.

        Raises ValueError for an unknown name, RuntimeError for a task that trains or waits to.
        """
        with self._tasks.changed_by("forget_task") as tasks:
            report, is_in_run = tasks.forget(name)
            if is_in_run and self._running is not None:
                self._running.forget(name)
            if self.plan is not None:
                plans = {each: plan for each, plan in self.plan.tasks.items() if each != name}
                self.plan = replace(self.plan, tasks=plans)
            return report

    @property
    def devices(self) -> dict[str, str]:
        """Each device that was ever in, by name: "in", "leaving" (what it has is on its way to DRAM) or "out"."""
        return {name: place.value for name, place in self._devices.pool.places.items()}

    def add_device(self, device: DeviceSpec | str) -> str:
        """Let a device in, or back in: the next unit may run on it. Returns its name, such as "cuda:1" or "emulated:2".

        From any thread, a callback's too, while `train_models` is at work or not; waits until the device is open. No
        step is begun again, and no bit of a result is another. `device`: as in the constructor, or the name of one that
        was removed. Steps are spread anew over the devices there are, as far as tasks have micro-batches.

        Raises ValueError for one that is in already, another kind of device, more than `max_devices`, and one too small
        for the tasks that train; RuntimeError where it cannot be opened.
        """
        devices, pool, run = self._devices, self._devices.pool, self._running
        if run is not None and any(worker.device.is_here for worker in run.workers.all):
            raise RuntimeError(
                "add_device: called by a layer or a loss while it trains, limit: callbacks and other threads, since "
                "the device copies all layers; call it from on_step"
            )
        while True:
            with devices.changing:
                with self._tasks.changed_by("add_device") as tasks:  # or a run might begin in between, with the device
                    known = pool.known(device) if isinstance(device, str) else None
                    spec = devices.of_the_kind(resolve_device(device) if known is None else known)
                    before, run = pool.places, self._running
                    name, index = pool.add(spec, None if known is None else str(device))
                    beside = tasks.at(Station.TRAINING, Station.JOINING)
                    self._plan_anew()
                try:
                    if index is not None and run is not None:
                        _let_in(run, spec, index, [each for each in beside if each.state.cut.shards])
                except BaseException:
                    pool.take_back(name, is_new=name not in before)
                    raise
            if index is not None:
                return name
            pool.wait_until_out(name)  # and others may come and go meanwhile

    def remove_device(self, name: str, grace_s: float | None = None) -> None:
        """Let a device go: the unit that it computes is finished, and no other begins there. Returns at once.

        From any thread, a callback's too, while `train_models` is at work or not. No step is begun again, and no bit of
        a result is another. `grace_s`: so many seconds later a unit that still computes there is given up, and computed
        again on another device; its lane ends whenever it ends. Below `min_devices` nothing begins until a device is
        added.

        Raises ValueError for a name that is not in.
        """
        grace_s = plain(grace_s)
        is_number = isinstance(grace_s, (int, float)) and not isinstance(grace_s, bool)
        if grace_s is not None and not (is_number and 0 <= grace_s <= threading.TIMEOUT_MAX):
            most = f"at least 0, at most {threading.TIMEOUT_MAX:g}"
            raise ValueError(f"grace_s: {grace_s!r}, limit: seconds, {most}; None waits for the unit")
        with self._devices.changing, self._tasks.changed_by("remove_device"):
            run = self._running
            index = self._devices.pool.remove(name, at_once=run is None)
            self._plan_anew()
            if run is not None:
                run.workers.remove(index, grace_s)

    def _plan_anew(self) -> None:
        """Devices are others: what waits is planned for them."""
        if self._tasks.at(Station.WAITING):
            self.plan = None

    @property
    def dram_left_bytes(self) -> int:
        """DRAM that one more task can take: what the machine has, and `dram` leaves beside the tasks that are here."""
        return int(min(host_dram.available_dram_bytes(), self._settings.limit.left_bytes))

    def evaluate(
        self,
        task: ModelTask | str,
        loader: Iterable[Any],
        *,
        metrics: Mapping[str, Callable[[Any, Any], float | Tensor]] | None = None,
    ) -> Evaluation:
        """A task's loss and metrics on a loader, through shards, without gradients, in eval().

        Before training or after it, also for a model that could not train on the devices. Figures and weighting are
        those of a validation, and so are the bits: of the plain loop, after `torch.manual_seed(task.seed)`. It is
        planned for the loader's first batch, which is computed once more for that; prints nothing.

        Changes nothing: weights, gradients, buffers, training flags and the process-wide generators are afterwards as
        they were, and training has the bits that it would have had. Only the weights' memory is another: they move into
        the engine's, and back into ordinary storage.

        Args:
            task: a task of this orchestrator or its name, or any other `ModelTask`.
            loader: batches as the task's own loader gives them; read once.
            metrics: name -> function (output, target) -> number; default: the task's.

        Raises what a layer, the loss, a metric or the loader raised; ValueError for an empty loader, ShardDoesNotFit.
        """
        with self._at_work("evaluate") as site, Signals() as signals, torch.inference_mode(False):
            known, name = task_of(self._tasks, task, "evaluate")
            apart = EvaluationTask.of(known, loader, metrics)
            planned = site.plan_apart(self._tasks.apart(apart, name, "evaluate"))
            with self._run([planned], site, signals) as run:
                run.train().raise_failures()
            for doubt in planned.doubts:
                warnings.warn(doubt, stacklevel=2)
            return run.evaluation(name)

    def predict(
        self,
        model: ModelTask | str | nn.Module | Iterable[nn.Module],
        loader: Iterable[Any],
        *,
        unpack: Callable[[Any], Any] | None = None,
        partitioner: Partitioner | str | None = None,
        precision: str | None = None,
        seed: int | None = None,
    ) -> Generator[Any, None, None]:
        """The outputs of a model, batch by batch, through shards, without gradients, in eval(): a generator.

        In float32 the bits of `model.eval()(inputs)` under `torch.no_grad()`, on the CPU; also of a model that could
        not train on the devices, or has nothing to train. Planned at once, for the loader's first batch, which is
        computed once more for that; the model is borrowed from the first output asked for to the last one. One device
        computes at a time. While you hold an output nothing is computed: the next batch is read, and no more. Close the
        generator, or drop it, to end it early. Prints nothing.

        Args:
            model: a `Model`, or anything `Model` takes; or a `ModelTask`, or the name of one of this orchestrator's,
                whose batches, inputs and target, are then taken apart as the task does. Left as `evaluate` leaves it;
                what its layers write to buffers is seen by later batches and then dropped.
            loader: batches of inputs, each what the first layer takes as its one argument; read once.
            unpack: batch -> inputs, for a loader that gives more than these.
            partitioner: as a task's.
            precision: as a task's, by default "float32"; in a narrow one, outputs are given in float32.
            seed: of the random stream that the loader and layers draw from, by default 0.

        Of a task, these are its own where they are not given.

        Raises at once what can be seen at once, or in planning; from the generator, what a layer or the loader raised,
        ShardDoesNotFit where a batch is too large for a layer alone.
        """
        with self._at_work("predict") as site, Signals(), torch.inference_mode(False):
            known = task_of(self._tasks, model, "predict")[0] if isinstance(model, (ModelTask, str)) else model
            task = EvaluationTask.predicting(
                known, loader, unpack=unpack, partitioner=partitioner, precision=precision, seed=seed
            )
            name = "predict" if task.name is None else task.name
            planned = site.plan_apart(self._tasks.apart(task, name, "predict"))
        return self._predictions(planned)

    def _predictions(self, planned: PlannedTask) -> Generator[Any, None, None]:
        if planned.reader.is_empty:
            return
        signals, num_told = Signals(), 0
        with self._alone("predict"), self._run([planned], self._site(), signals) as run:
            outputs = run.outputs()
            try:
                while True:
                    with signals, torch.inference_mode(False):  # not while the caller has the word
                        found = list(islice(outputs, 1))
                    if not found:
                        break
                    for doubt in planned.doubts[num_told:]:
                        num_told += 1
                        warnings.warn(doubt, stacklevel=2)
                    yield found.pop()
            finally:
                with signals, torch.inference_mode(False):
                    outputs.close()
            run.report().raise_failures()
            for doubt in planned.doubts[num_told:]:
                warnings.warn(doubt, stacklevel=2)

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """Refuse a second call while one is under way, and an active autocast."""
        _refuse_autocast(what)
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(f"{what}: this orchestrator is working already; wait for its call to return")
        try:
            yield
        finally:
            self._busy.release()
            return_free_memory()  # as much as the weights, where an optimizer has made its states itself

    def _site(self) -> Site:
        """Check the settings of the host's threads."""
        settings, devices = self._settings, self._devices.present
        host = host_threads(
            intra_op_threads=torch.get_num_threads(),
            num_devices=len(devices),
            optimizer_threads=self.optimizer_threads,
            computes_here=any(device.torch_device.type == "cpu" for device in devices),
        )
        return Site(devices, settings.double_buffer, self.buffer, host, settings.limit, settings.homes)

    @contextmanager
    def _at_work(self, what: str) -> Iterator[Site]:
        """Be the only call under way."""
        with self._alone(what), drawing_as_usual():
            _refuse_modes(what)
            yield self._site()

    def _plan_all(self, site: Site, waiting: list[PlannedTask]) -> Plan:
        with self._tasks.planning():
            plan = self.plan = site.plan_all(waiting)
            if self.verbose and self._printed != (printed := str(plan)):  # a resume plans anew what generate() printed
                self._printed = printed
                say(printed)
            return plan

    @contextmanager
    def _run(
        self, planned: Sequence[PlannedTask], site: Site, signals: Signals, *, trains: bool = False
    ) -> Iterator[EngineRun]:
        """A run of these tasks, which signals do not cut off; then the number of intra-op threads is the caller's."""
        services = RunServices(RunLoggers(self._settings.loggers if trains else ()))
        if trains:
            services = services._replace(
                quotas=self._quotas,
                observer=self.observer or (usual_observer() if self.verbose else None),
                saver=self._settings.store.saver(self._about),
                rescue=partial(self._settings.store.rescue, self._about),
            )
        pool, policy = self._devices.pool, resolve_policy(self.policy)
        pool.begin()
        with signals.deferred():
            try:
                yield EngineRun(planned, site, pool, policy, signals, services)
            finally:
                services.loggers.close()  # where the run was never begun
                left = {id(each) for each in services.loggers.left_behind}
                kept = self._settings.loggers
                kept[:] = [each for each in kept if id(each) not in left]
                torch.set_num_threads(site.host.intra_op_threads)

    def _train(self, site: Site, signals: Signals, resume: bool) -> Report:
        tasks = self._tasks
        with ExitStack() as stack:
            run, messages = None, []
            with tasks.changing:
                _check_tasks_left(tasks, resume=resume, may_save=self._settings.store.may_save)
                site = replace(site, devices=self._devices.present)  # those that come from now on are let into the run
                stack.enter_context(self._settings.store)
                found = self._settings.store.open(resume=resume)
                if resume:
                    tasks.begin_again(found)
                with signals.deferred():  # a model is put back whole
                    if found is not None or self._settings.store.has_going_on:
                        self.plan = None
                        messages = tasks.go_on(found)
                signals.raise_first()  # not after planning, which may take as long again
                waiting = tasks.at(Station.WAITING)
                if waiting and self.plan is None:
                    self._plan_all(site, waiting)
                if waiting:
                    run = self._running = stack.enter_context(self._run(waiting, site, signals, trains=True))
                    run.joining.add_again = self._add_again
                tasks.save_plans()
                while waiting:  # from now on, those in the run are held by it alone
                    tasks.put(waiting.pop(0), Station.TRAINING)
            try:
                if run is not None:
                    with self._steered(messages):
                        run.train()
            except DeviceLost as lost:
                assert run is not None
                _end_process(run, lost, self._settings.store.remedy())
            finally:
                with tasks.changing:
                    tasks.save_plans()  # of tasks that have joined
                    self._running = None
                    self._devices.pool.all_left()  # one that was removed since is in nobody's hands
                    trained = tasks.at(Station.TRAINING)
                    left_over = [] if run is None else run.joining.left_over
                    for each in trained:
                        tasks.put(each, Station.WAITING if each in left_over else Station.OVER)
                if run is not None:
                    report = run.report()
                else:
                    saved = self._settings.store.nothing_saved
                    report = Report(makespan_s=0.0, tasks={}, devices=[], host=site.host, checkpoints=saved)
                messages += [text for each in trained for text in (*each.reader.messages, *each.doubts)]
                messages += report.messages
                # With a process's first optimizer torch imports its compiler, and keeps the frames of who made it.
                run = None
                messages += tasks.unclaimed(found, messages)
                self.report = tasks.joined(report, list(dict.fromkeys(messages)))
        failed = [task for task in self.report.tasks.values() if task.status == FAILED]
        if len(failed) == len(self.report.tasks):
            self.report.raise_failures()
        for task in failed:
            line = f"hydra_engine: {task.name} failed: {type(task.exception).__name__}: {task.exception}"
            warn(str(task.error) if self.tracebacks else " ".join(line.split()))
        return self.report

    @contextmanager
    def _steered(self, messages: list[str]) -> Iterator[None]:
        """Let devices come and go from outside: by the run's socket, and as GPUs become free."""
        with ExitStack() as stack:
            if self._settings.store.directory is not None:
                stack.enter_context(steered(self, self._settings.store.directory, messages))
            if self._devices.watcher is not None:
                stack.enter_context(self._devices.watcher.watching(self, messages))
            stack.callback(self._devices.pool.all_left)  # first of all: an order may wait until a device has left
            yield

    def _about(self) -> dict[str, Any]:
        """Return the run's figures for a checkpoint."""
        plan, run = self.plan, self._running
        return {
            "command": restart.command(),
            "plan": None if plan is None else plan.figures(),
            "report": None if run is None else run.figures(),
        }


def _check_tasks_left(tasks: TaskList, *, resume: bool, may_save: bool) -> None:
    """Refuse to train where no task waits, and a resume of tasks whose optimizers' states are gone."""
    cut_off = ", ".join(f"{each.name} ended at step {each.report.steps}" for each in tasks.cut_off)
    if cut_off and resume and not may_save:
        raise ValueError(
            f"resume: {cut_off}, and no checkpoint_dir has its optimizer's state; make a new task of its model, which "
            f"has the weights of that step, and give ModelOrchestrator a checkpoint_dir"
        )
    if not tasks.at(Station.WAITING) and not (cut_off and resume):
        if not tasks.all:
            raise RuntimeError("train_models: there is no task; add_task() one")
        what = cut_off or "these tasks are trained already"
        remedy = "go on with train_models(resume=True)" if cut_off and may_save else "make new tasks to train further"
        raise RuntimeError(f"train_models: {what}; {remedy}")


def _end_process(run: EngineRun, lost: DeviceLost, remedy: str) -> NoReturn:
    """Exit: in this process, nothing can be done on the device any more.

    What tasks have committed is saved; a resume goes on without the struck task, whose data would strike again.
    """
    for task in run.report().tasks.values():
        if task.status == FAILED:
            warn(str(task.error))
    warn(f"hydra_engine: {lost}")
    warn(f"hydra_engine: {remedy}")
    raise SystemExit(EXIT_LOST) from lost


def _refuse_autocast(what: str) -> None:
    kind = active_autocast()
    if kind is not None:
        raise RuntimeError(
            f"{what}: autocast is active for {kind}, and would not reach the threads that compute; leave it, and set "
            f"precision= on the task"
        )


def _refuse_modes(what: str) -> None:
    """Refuse what watches or changes operations of this thread alone, which computes nothing."""
    hooks = ["torch.autograd.graph.saved_tensors_hooks"] if saved_hooks() else []
    # torch has no public function for these two. `with torch.device("cpu")` changes nothing.
    functions: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes = [*functions, *_get_current_dispatch_mode_stack()]
    modes = [mode for mode in modes if getattr(mode, "device", None) != torch.device("cpu")]
    for found in (*hooks, *(type(mode).__name__ for mode in modes)):
        raise RuntimeError(
            f"{what}: {found} is active, and would not reach the threads that compute; leave it, and use it in a "
            f"layer's forward"
        )
