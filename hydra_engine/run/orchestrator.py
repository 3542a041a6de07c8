"""The orchestrator: what a user holds. Validates, plans, trains, evaluates, reports."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from hydra_engine.checkpoints import Checkpoint, CheckpointStore, SavedTask, Saver, never_committed
from hydra_engine.data import drawing_as_usual
from hydra_engine.devices import DeviceSpec, EmulatedDevice, active_autocast, resolve_devices
from hydra_engine.errors import DeviceLost, ShardDoesNotFit
from hydra_engine.host import FrozenBlocks
from hydra_engine.planning import (
    PlannedTask,
    check_apart,
    check_arena,
    check_dram,
    check_nothing_shared,
    check_shared_buffers,
    check_sharing,
    fits_arena,
)
from hydra_engine.run.loop import EngineRun, RunSettings
from hydra_engine.run.signals import Signals
from hydra_engine.schedule import Policy, resolve_policy
from hydra_engine.system import HostThreads, bound, dram, host_threads
from hydra_engine.system import process as restart
from hydra_engine.tasks import (
    FAILED,
    Evaluation,
    EvaluationTask,
    ModelTask,
    Plan,
    Purpose,
    Report,
    TaskPlan,
    TaskReport,
)
from partitioners import Budget, Partitioner, format_bytes, parse_bytes

# BSD's EX_TEMPFAIL: whoever starts processes may start this one again.
EXIT_LOST = 75


class ModelOrchestrator:
    """Trains several tasks together on the devices of this machine, and evaluates models there.

    Args:
        tasks: at least one `ModelTask`, of different names, sharing no trainable parameter.
        devices: a list of devices; None: every CUDA device, or else one emulated device of half the free DRAM.
        policy: one of `hydra_engine.schedule.POLICIES` ("sharded-lrtf", "fifo", "round-robin", "random",
            "shortest-remaining", "fair-share", "in-step", "locality"), or an object with `key` (see `Policy` there).
        double_buffer: load the next unit's shard while one computes.
        checkpoint_dir: where `train_models` saves, made if it is not there: hydra_engine/checkpoints/checkpoint.md says
            what is in it. One run at a time writes to a directory. None: nothing is saved, unless a device is lost.
        checkpoint_every: "10min", "30s", "2h" and the like, or a number of steps: after so many of any task, all that
            train are saved, each at the end of its step in progress; while they train on, in the background. A save
            that falls due while another is written begins after it. Tasks are saved at their ends as well.
        keep: so many checkpoints stay of all tasks that trained, and the newest one, where a task has ended since.

    Attributes:
        verbose: 0 silent, 1 plan and live progress.
        buffer: bytes that partitioning keeps free for the next shard: None for as much as the shard itself, or an int,
            or a string ("512MiB").
        optimizer_threads: of the host, that commit and update; None: as many as leave a core to each device and one to
            the loaders, 1 to 4. Each computes with as many intra-op threads as the caller.
        numa_node: of the host, to whose cores all threads of the engine are bound while it works, the caller's too;
            None: threads are left to the system.
        plan: the last plan. report: the last report, also after an interrupt.
    """

    def __init__(
        self,
        tasks: Sequence[ModelTask],
        *,
        devices: Sequence[DeviceSpec | str] | None = None,
        policy: str | Policy = "sharded-lrtf",
        double_buffer: bool = True,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: str | int = "10min",
        keep: int = 3,
    ) -> None:
        self._policy = resolve_policy(policy)
        self._store = CheckpointStore(checkpoint_dir, checkpoint_every, keep)
        self._devices = resolve_devices(devices, max(1, dram.available_dram_bytes() // 2))
        self._double_buffer = bool(double_buffer)
        self._frozen = FrozenBlocks()
        self._alignment_bytes = max(device.alignment_bytes for device in self._devices)
        self._planned = [self._as_planned(task, name) for task, name in _named(tasks)]
        check_sharing(self._planned)
        self._pending = list(self._planned)  # not begun to train
        self._busy = threading.Lock()
        self._changing = threading.RLock()  # of which tasks there are, and whether they train
        self._is_planning = False  # all of them, which the thread that holds it now does
        self._running: EngineRun | None = None
        self._over: dict[str, TaskReport] = {}  # of tasks that a resume found to be over, until they are told
        self._training: list[PlannedTask] = []  # in that run
        self._joining: list[PlannedTask] = []  # being planned, to join it
        self.verbose = 1
        self.buffer: int | str | None = None
        self.optimizer_threads: int | None = None
        self.numa_node: int | None = None
        self.plan: Plan | None = None
        self.report: Report | None = None

    def _as_planned(self, task: ModelTask, name: str, saved: SavedTask | None = None) -> PlannedTask:
        # A device that is lost takes the process with it, and what was committed is saved.
        may_be_saved = self._store.may_save or not all(isinstance(device, EmulatedDevice) for device in self._devices)
        return PlannedTask(
            task,
            name,
            self._frozen,
            alignment_bytes=self._alignment_bytes,
            keeps_positions=may_be_saved or task.max_retries > 0,
            saved=saved,
        )

    def generate(self) -> Plan:
        """Profile, partition, rehearse one step of each task on a device, and check that everything fits.

        Reads each task's first batch, which training then goes on with. Changes no weight, buffer or generator. Raises
        ShardDoesNotFit, HostOutOfMemory, or what a layer, loss or loader raised.
        """
        with self._planning_alone("generate"), self._bound() as host, self._changing:
            return self._generate(host) if self._pending or self.plan is None else self.plan

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
        trained. Without it, a directory that holds another run's checkpoints is refused, unless `hydra-engine resume`
        has started this process: then it is True for that directory.

        Raises CheckpointError where no checkpoint is whole, or the directory is in use, refused or cannot be written
        to; ValueError where a model or loader is another than was saved. A task whose optimizer, schedule or loss scale
        is another fails. A save that fails ends nothing, and is told in `report.messages`.
        """
        with self._planning_alone("train_models"), Signals() as signals, self._bound() as host:
            return self._train(host, signals, resume)

    def add_task(self, task: ModelTask) -> str:
        """Add a task; while `train_models` is at work, it is planned at once and joins in. Returns its name.

        From any thread, a callback's too; another task's bits are as without it. What planning takes of a device comes
        on top of what is training there: its rehearsal runs one step on a device of its own, of the same budget. Where
        training has ended before the plan is made, the task waits for the next `train_models()`.

        In a run that was resumed, it goes on as it was saved, if a task of its name was.

        While training it must hold no parameter that another task trains: those are moving. Frozen ones may be shared.

        Raises what the constructor raises of a task, and what `generate()` raises.
        """
        _refuse_autocast("add_task")
        with self._changing:
            self._check_outside("add_task")
            [(task, name)] = _named([task], len(self._planned))
            if name in (each.name for each in self._planned):
                raise ValueError(f"tasks: there is a task named {name!r} already; give each a name of its own")
            planned = self._as_planned(task, name)
            run = self._running
            if run is not None and any(not device.has_room_for_planning for device in self._devices):
                raise RuntimeError(
                    f"add_task: {name!r} while others train: planning runs a step on a device, whose memory they have; "
                    f"add it before train_models(), or train it in another call"
                )
            beside = [*self._training, *self._joining] if run is not None else self._pending
            check_sharing([*beside, planned])
            if run is None:
                self.plan = None  # it would lack the new one
                self._planned.append(planned)
                self._pending.append(planned)
                return name
            check_nothing_shared(planned, beside)
            again = self._put_back(planned, while_training=True)
            self._planned.append(again or planned)
            if again is None:
                return name
            self._joining.append(again)
        self._join(run, again, [*beside, again])
        return name

    def _join(self, run: EngineRun, planned: PlannedTask, beside: Sequence[PlannedTask]) -> None:
        """Plan a task and let it join a run; nobody waits meanwhile, since its loader and layers may take long."""
        try:
            # Bound without helpers: what begins meanwhile may be the run's.
            with drawing_as_usual(), run.planning(planned), bound(run.host.bound_cores, with_helpers=False):
                plan = self._plan_one(beside, planned)
            self._check_arenas(run, planned)
        except BaseException:
            with self._changing:
                self._planned.remove(planned)
            self._drop(planned)
            raise
        with self._changing:
            is_wanted = planned in self._joining  # and not stopped meanwhile
            if is_wanted:
                self._joining.remove(planned)
                plans = [*(self.plan.tasks.values() if self.plan is not None else ()), plan]
                self.plan = self._as_plan(plans, run.host)
                (self._training if run.add(planned) else self._pending).append(planned)
        if not is_wanted:
            self._drop(planned)

    def _check_outside(self, what: str) -> None:
        if self._is_planning:
            raise RuntimeError(
                f"{what}: called by a loader, a layer or a callback's on_epoch_begin, in the thread that plans all "
                f"tasks; call it before generate(), or once training has begun; StopTask ends a callback's own task"
            )

    def _drop(self, planned: PlannedTask) -> None:
        """Nobody will train it."""
        with self._changing:
            if planned in self._joining:
                self._joining.remove(planned)
        planned.leave()
        planned.reader.close()

    def stop_task(self, name: str) -> None:
        """End a task at its last committed step; the others train on. One that waits for training is not begun.

        From any thread, a callback's too; returns at once. The report says "stopped". Nothing happens to a task that is
        over. Raises ValueError for an unknown name.
        """
        with self._changing:
            self._check_outside("stop_task")
            planned = self._named(name, "stop_task")
            if planned in self._pending:
                self._pending.remove(planned)
                planned.leave()
                planned.reader.close()
                self.plan = None
            elif planned in self._joining:
                self._joining.remove(planned)  # who plans it finds out
            elif self._running is not None:
                self._running.stop(name)

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
        the engine's, and back into ordinary storage. A batch too large for one layer alone is computed in parts, as a
        validation's is; `Evaluation.num_parts` says so.

        Args:
            task: a task of this orchestrator or its name, or any other `ModelTask`.
            loader: batches as the task's own loader gives them; read once.
            metrics: name -> function (output, target) -> number; default: the task's.

        Raises what a layer, the loss, a metric or the loader raised; ValueError for an empty loader, ShardDoesNotFit.
        """
        with self._planning_alone("evaluate"), Signals() as signals, torch.inference_mode(False), self._bound() as host:
            known, name = self._found(task)
            planned = self._plan_apart(EvaluationTask.of(known, loader, metrics), name, "evaluate")
            with self._run([planned], host, signals, verbose=0) as run:
                run.train().raise_failures()
            return run.evaluation(name)

    def predict(
        self,
        model: nn.Module | Iterable[nn.Module],
        loader: Iterable[Any],
        *,
        unpack: Callable[[Any], Any] | None = None,
        partitioner: Partitioner | str | None = None,
        precision: str = "float32",
        seed: int = 0,
    ) -> Generator[Any, None, None]:
        """The outputs of a model, batch by batch, through shards, without gradients, in eval(): a generator.

        In float32 the bits of `model.eval()(inputs)` under `torch.no_grad()`, on the CPU; also of a model that could
        not train on the devices, or has nothing to train. Planned at once, for the loader's first batch, which is
        computed once more for that; the model is borrowed from the first output asked for to the last one. One device
        computes at a time. While you hold an output nothing is computed: the next batch is read, and no more. Close the
        generator, or drop it, to end it early. Prints nothing.

        Args:
            model: a `Model`, or anything `Model` takes. Left as `evaluate` leaves it; what its layers write to buffers
                is seen by later batches and then dropped.
            loader: batches of inputs, each what the first layer takes as its one argument; read once.
            unpack: batch -> inputs, for a loader that gives more than these.
            partitioner: as a task's.
            precision: as a task's; in a narrow one, outputs are given in float32.
            seed: of the random stream that the loader and layers draw from.

        Raises at once what can be seen at once, or in planning; from the generator, what a layer or the loader raised,
        and ShardDoesNotFit for a later batch that is too large for one layer alone.
        """
        with self._planning_alone("predict"), Signals(), torch.inference_mode(False), self._bound():
            task = EvaluationTask.predicting(
                model, loader, unpack=unpack, partitioner=partitioner, precision=precision, seed=seed
            )
            planned = self._plan_apart(task, "predict", "predict")
        return self._predictions(planned)

    def _predictions(self, planned: PlannedTask) -> Generator[Any, None, None]:
        if planned.reader.is_empty:
            return
        signals = Signals()
        with self._alone("predict"), self._run([planned], self._host(), signals, verbose=0) as run:
            outputs = run.outputs()
            at_work = partial(bound, run.host.bound_cores, with_helpers=False)  # what begins meanwhile works on
            try:
                while True:
                    with signals, torch.inference_mode(False), at_work():  # not while the caller has the word
                        found = list(islice(outputs, 1))
                    if not found:
                        break
                    yield found.pop()
            finally:
                with signals, torch.inference_mode(False), at_work():
                    outputs.close()
            run.report().raise_failures()

    def _found(self, task: ModelTask | str) -> tuple[ModelTask, str]:
        """A task, and its name here or else its own."""
        if isinstance(task, ModelTask):
            names = [each.name for each in self._planned if each.task is task]
            return task, names[0] if names else task.name or "evaluate"
        return self._named(task, "evaluate", "; give one of these names, or a ModelTask").task, task

    def _named(self, name: str, what: str, remedy: str = "") -> PlannedTask:
        for each in self._planned:
            if each.name == name:
                return each
        known = ", ".join(repr(each.name) for each in self._planned)
        raise ValueError(f"{what}: task {name!r}, known: {known}{remedy}")

    def _plan_apart(self, task: EvaluationTask, name: str, what: str) -> PlannedTask:
        """Plan a task that is not one of those to train; it must not read what they have yet to read."""
        check_apart(what, task.validation, self._pending)
        planned = PlannedTask(task, name, alignment_bytes=self._alignment_bytes)
        try:
            for device in self._devices:
                device.check_free()
            if not (task.purpose is Purpose.PREDICT and planned.reader.is_empty):  # then there is nothing to do
                planned.make_plan(self._smallest, self._budget(), torch.get_num_threads())
        except BaseException:
            planned.reader.close()
            raise
        return planned

    def _alone(self, what: str) -> _Alone:
        return _Alone(self._busy, what)

    @contextmanager
    def _planning_alone(self, what: str) -> Iterator[None]:
        with self._alone(what), drawing_as_usual():
            yield

    @property
    def _smallest(self) -> DeviceSpec:
        """The device that a plan is made for."""
        return min(self._devices, key=lambda device: device.memory_bytes)

    def _budget(self) -> Budget:
        return Budget(
            memory_bytes=self._smallest.memory_bytes,
            buffer_bytes=None if self.buffer is None else parse_bytes(self.buffer, "buffer"),
            double_buffer=self._double_buffer,
        )

    def _host(self) -> HostThreads:
        return host_threads(
            intra_op_threads=torch.get_num_threads(),
            device_nodes=[device.numa_node() for device in self._devices],
            optimizer_threads=self.optimizer_threads,
            numa_node=self.numa_node,
            computes_here=any(device.torch_device.type == "cpu" for device in self._devices),
        )

    @contextmanager
    def _bound(self) -> Iterator[HostThreads]:
        """Check the settings of the host's threads, and keep this one to its NUMA node."""
        host = self._host()
        with bound(host.bound_cores):
            yield host

    def _generate(self, host: HostThreads) -> Plan:
        self._is_planning = True
        try:
            return self._plan_all(host)
        finally:
            self._is_planning = False

    def _plan_all(self, host: HostThreads) -> Plan:
        for device in self._devices:
            device.check_free()
        check_dram(self._pending)
        budget, num_threads = self._budget(), host.intra_op_threads
        pending, smallest, number = self._pending, self._smallest, len(self._pending)
        plans = [each.make_plan(smallest, budget, num_threads, self._devices, number) for each in pending]
        if any(device.has_arena for device in self._devices):
            # What fits alone may leave too little to another one's work, since memory does not go from slabs to that.
            for k, each in enumerate(pending):
                if not fits_arena(each, pending, smallest.memory_bytes):
                    most = smallest.memory_bytes - max(other.work_bytes for other in pending)
                    plans[k] = each.make_plan(smallest, budget, num_threads, self._devices, number, most)
            check_arena(pending, smallest.memory_bytes)
        check_shared_buffers(pending)
        self.plan = self._as_plan(plans, host)
        if self.verbose:
            print(self.plan)
        return self.plan

    def _as_plan(self, plans: Iterable[TaskPlan], host: HostThreads) -> Plan:
        devices = [repr(device) for device in self._devices]
        return Plan(tasks={plan.name: plan for plan in plans}, devices=devices, host=host)

    def _plan_one(self, beside: Sequence[PlannedTask], planned: PlannedTask) -> TaskPlan:
        """Plan a task while others train."""
        check_dram([planned])
        number = 1 + len(beside)
        plan = planned.make_plan(self._smallest, self._budget(), torch.get_num_threads(), self._devices, number)
        check_shared_buffers(beside)
        return plan

    @contextmanager
    def _run(
        self,
        planned: Sequence[PlannedTask],
        host: HostThreads,
        signals: Signals,
        *,
        verbose: int,
        saver: Saver | None = None,
        rescue: Callable[[], Saver] | None = None,
    ) -> Iterator[EngineRun]:
        """A run of these tasks, which signals do not cut off; then the number of intra-op threads is the caller's."""
        with signals.deferred():
            try:
                settings = RunSettings(
                    policy=self._policy, double_buffer=self._double_buffer, verbose=verbose, host=host
                )
                yield EngineRun(planned, self._devices, settings, signals, saver, rescue)
            finally:
                torch.set_num_threads(host.intra_op_threads)

    def _train(self, host: HostThreads, signals: Signals, resume: bool) -> Report:
        with ExitStack() as stack:
            run = None
            with self._changing:
                if not self._pending:
                    raise RuntimeError("train_models: these tasks are trained already; make new tasks to train further")
                stack.enter_context(self._store)
                with signals.deferred():  # a model is put back whole
                    messages = self._go_on(self._store.open(resume=resume))
                if self._pending and self.plan is None:
                    self._generate(host)
                if self._pending:
                    saver, rescue = self._store.saver(self._about), partial(self._store.rescue, self._about)
                    run = self._running = stack.enter_context(
                        self._run(list(self._pending), host, signals, verbose=self.verbose, saver=saver, rescue=rescue)
                    )
                self._training, self._pending = self._pending, []
            try:
                if run is not None:
                    run.train()
            except DeviceLost as lost:
                assert run is not None
                self._end_process(run, lost)
            finally:
                with self._changing:
                    self._running = None
                    self._pending += [] if run is None else run.left_over
                nothing = Report(makespan_s=0.0, tasks={}, devices=[], host=host, checkpoints=self._store.nothing_saved)
                report = nothing if run is None else run.report()
                messages += [text for each in self._training for text in (*each.reader.messages, *each.doubts)]
                self.report = self._joined(report, messages)
        failed = [task for task in self.report.tasks.values() if task.status == FAILED]
        if len(failed) == len(self.report.tasks):
            self.report.raise_failures()
        for task in failed:
            print(task.error, file=sys.stderr)
        return self.report

    def _go_on(self, found: Checkpoint | None) -> list[str]:
        """Put back what was saved of the tasks that wait; what there is to say of it."""
        if found is None:
            return []
        self.plan = None
        for each in list(self._pending):
            again, place = self._put_back(each, while_training=False), self._pending.index(each)
            if again is None:
                del self._pending[place]
            else:
                self._planned[self._planned.index(each)] = self._pending[place] = again
        return [*found.messages, f"resumed from {found.path}"]

    def _put_back(self, planned: PlannedTask, *, while_training: bool) -> PlannedTask | None:
        """A task as it goes on from what was saved of it, if something was; None where it is over."""
        name, task = planned.name, planned.task
        saved = self._store.saved(
            name, lambda found: found.put_weights(task, planned.layout), while_training=while_training
        )
        over = self._store.over(name)
        if saved is None and over is None:
            return planned
        planned.leave()
        planned.reader.close()
        if saved is not None and saved.goes_on(task):
            task.seed = saved.seed
            return self._as_planned(task, name, saved)
        self._over[name] = report = never_committed(task, name) if saved is None else saved.report()
        report.ema_state = None if saved is None else saved.ema_state(task, planned.layout)
        return None

    def _joined(self, report: Report, messages: Sequence[str]) -> Report:
        """A run's report with those of tasks that were over before, in the order of the tasks."""
        found, self._over = {**self._over, **report.tasks}, {}
        tasks = {each.name: found[each.name] for each in self._planned if each.name in found}
        told = () if report.checkpoints is None else report.checkpoints.messages
        return replace(report, tasks=tasks, messages=(*messages, *told))

    def _about(self) -> dict[str, Any]:
        """Return the run's figures for a checkpoint."""
        plan, run = self.plan, self._running
        return {
            "command": restart.command(),
            "plan": None if plan is None else plan.figures(),
            "report": None if run is None else run.figures(),
        }

    def _check_arenas(self, run: EngineRun, planned: PlannedTask) -> None:
        """Refuse a task for which the devices of a run, whose arenas were made for others, have no room."""
        if run.can_hold(planned.work_bytes, planned.largest_slab_bytes):
            return
        raise ShardDoesNotFit(
            f"add_task: {planned.name!r} needs {format_bytes(planned.largest_slab_bytes)} for a shard's parameters and "
            f"{format_bytes(planned.work_bytes)} beside them; the devices' arenas were made for the tasks that train; "
            f"cut it smaller, or add it before train_models()"
        )

    def _end_process(self, run: EngineRun, lost: DeviceLost) -> None:
        """Exit: in this process, nothing can be done on the device any more. Raises SystemExit.

        What tasks have committed is saved; a resume goes on without the struck task, whose data would strike again.
        """
        for task in run.report().tasks.values():
            if task.status == FAILED:
                print(task.error, file=sys.stderr)
        print(f"hydra_engine: {lost}", file=sys.stderr)
        print(f"hydra_engine: {self._store.remedy()}", file=sys.stderr)
        raise SystemExit(EXIT_LOST) from lost


def _refuse_autocast(what: str) -> None:
    kind = active_autocast()
    if kind is not None:
        raise RuntimeError(
            f"{what}: autocast is active for {kind}, and would not reach the threads that compute; leave it, and set "
            f"precision= on the task"
        )


class _Alone:
    """Refuses a second call while one is under way, and an active autocast."""

    def __init__(self, busy: threading.Lock, what: str) -> None:
        self._busy = busy
        self._what = what

    def __enter__(self) -> None:
        _refuse_autocast(self._what)
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(f"{self._what}: this orchestrator is working already; wait for its call to return")

    def __exit__(self, *exc: object) -> None:
        self._busy.release()


def _named(tasks: Sequence[ModelTask], num_before: int = 0) -> list[tuple[ModelTask, str]]:
    if not isinstance(tasks, Sequence):
        raise TypeError(f"tasks: {tasks!r} is not a list; give a list of ModelTask")
    if not tasks:
        raise ValueError("tasks: empty list; give at least one ModelTask")
    named = [(task, getattr(task, "name", None) or f"task-{k}") for k, task in enumerate(tasks, num_before)]
    for task, _ in named:
        if not isinstance(task, ModelTask):
            raise TypeError(f"tasks: {task!r} is a {type(task).__name__}, not a ModelTask")
    names = [name for _, name in named]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"tasks: {names.count(name)} tasks are named {name!r}; give each a name of its own")
    return named
