"""One run: feeds the scheduler real events and carries out its instructions. Built for the run and thrown away.

Threads: the caller's decides; a device has one per lane; a task has one that reads; a pool commits, updates and
captures; one fits batches, one writes checkpoints; a task that has callbacks has one that calls them. They all speak to
the caller through one queue of events, so everything the scheduler knows is touched by one thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from hydra_engine.checkpoints import LOST, Saver
from hydra_engine.devices import COMPUTE, LOAD, STORE, DeviceSpec, host_memory
from hydra_engine.display import Progress
from hydra_engine.errors import DeviceLost, DeviceOutOfMemory, LoaderTimeout
from hydra_engine.host import BuffersChanged, TaskOptimizer, check_no_hooks
from hydra_engine.planning import Misfit, PlannedTask, Room, arena_bytes, refit, shared_out
from hydra_engine.run.commit import commit, update
from hydra_engine.run.deadlines import Deadlines
from hydra_engine.run.notifier import INTERRUPTED_S, Notifier
from hydra_engine.run.retries import FINAL, Retries
from hydra_engine.run.running_task import RunningTask
from hydra_engine.run.saving import Saving, note_event, note_instruction
from hydra_engine.run.signals import Inbox, Overdue, Signals
from hydra_engine.schedule import (
    BACKWARD,
    BatchReady,
    Begin,
    Commit,
    DataEnded,
    DataFailed,
    DeviceAdded,
    DidNotFit,
    Drop,
    EpochAhead,
    Event,
    Failed,
    Finish,
    Fit,
    Fitted,
    Load,
    Policy,
    Read,
    Run,
    Scheduler,
    ShardUpdated,
    StepCommitted,
    StopRequested,
    TaskAdded,
    TaskStopped,
    Update,
)
from hydra_engine.system import HostThreads, return_free_memory
from hydra_engine.tasks import AGAIN, FINISHED, STOPPED, DeviceReport, Evaluation, Purpose, Report
from hydra_engine.trace import Trace
from hydra_engine.worker import Worker

# Freed memory goes back to the system so often: what is needed again has to be taken again, page by page.
TRIM_INTERVAL_S = 30.0
# Tasks of a run's beginning wait for each other's set-up no longer than this; its deadline is of no task.
FIRST, FIRST_S = "", 1.0


class _Arrived(NamedTuple):
    """A task came while others train."""

    planned: PlannedTask


class _Stop(NamedTuple):
    """Its user ends a task."""

    task: str


class _Planning(NamedTuple):
    """A task that is to join begins or ends to be planned, in some other thread, which reads its loader."""

    planned: PlannedTask
    is_over: bool


class _SetUp(NamedTuple):
    """A task's memory is taken and its user's factories were called, or raised."""

    task: str
    optimizer: TaskOptimizer | None = None
    num_steps: int | None = None
    error: BaseException | None = None


class _Told(NamedTuple):
    """A task's callbacks have returned, for which this had to wait; Read: what is read begins an epoch."""

    instruction: Commit | Finish | Read


class _Saved(NamedTuple):
    """A task's end is saved, and its callbacks have been told all but that."""

    task: str


class _SaverFree(NamedTuple):
    """A checkpoint is written, and another one fell due meanwhile."""


class _Ended(NamedTuple):
    """A task's end was told to its callbacks."""

    task: str


_Own: TypeAlias = "_Arrived | _Planning | _SetUp | _Stop | _Told | _Saved | _SaverFree | _Ended"
# Of the events, those that the scheduler is not told.
_ASIDE = (Overdue, _Told, EpochAhead, _Arrived, _SaverFree, _Saved, _Planning, _SetUp, _Ended)


class EngineRun:
    """Trains, evaluates or predicts planned tasks on devices until all are finished, failed or stopped."""

    def __init__(
        self,
        planned: Sequence[PlannedTask],
        devices: Sequence[DeviceSpec],
        policy: Policy,
        *,
        double_buffer: bool,
        verbose: int,
        host: HostThreads,
        signals: Signals,
        saver: Saver | None = None,
        rescue: Callable[[], Saver] | None = None,
    ) -> None:
        """`saver`: saves tasks while they train, and at their ends. rescue: makes one as a device is lost."""
        self._trace = Trace()
        self._events: Inbox[Event | EpochAhead | _Own] = Inbox()
        self._scheduler = Scheduler(policy, double_buffer=double_buffer, is_resident=self._is_resident)
        self._progress = Progress(verbose)
        self._signals = signals
        self._deadlines = Deadlines()  # of loaders
        self._callback_deadlines = Deadlines()
        self.host = host
        self._num_threads = num_threads = host.intra_op_threads
        self._specs = devices
        self._host_memory = host_memory(devices)
        self._planned = planned
        self._tasks: dict[str, RunningTask] = {}
        self._workers: list[Worker] = []
        self._pool = ThreadPoolExecutor(
            host.optimizer_threads,
            thread_name_prefix="hydra-optimizer",
            initializer=torch.set_num_threads,
            initargs=(host.optimizer_intra_op_threads,),
        )
        # Apart from the pool above: measuring a batch may take seconds, and other tasks' commits must not wait for it.
        self._planner = ThreadPoolExecutor(1, "hydra-planner", torch.set_num_threads, (num_threads,))
        self._opening = threading.Lock()  # tasks take their memory one at a time
        self._num_setting_up = 0  # tasks that are not set up yet
        # Tasks that are, and wait for those that they begin with: so the scheduler knows them in their order, and
        # spreads no step of one over devices that others want. None: no task waits for others any more.
        self._held: list[RunningTask] | None = []
        self._arriving = threading.Lock()
        self._num_arriving = 0  # tasks on their way to `_take_in`
        self._num_ending = 0  # tasks whose end is not told yet: their callbacks may add another one
        self._joining: dict[str, PlannedTask] = {}  # tasks that are planned meanwhile
        self._is_over = False
        self.left_over: list[PlannedTask] = []  # that came too late to be begun
        self._next_trim_s = TRIM_INTERVAL_S
        self._makespan_s = 0.0
        self._interrupted = False
        self._saving = None if saver is None else self._saving_by(saver)
        self._rescue = rescue
        self._lost: DeviceLost | None = None  # the first
        self._actions: dict[type, Callable[..., None]] = {
            Load: lambda i: self._workers[i.device].load(i.unit, self._tasks[i.unit.task].planned.state),
            Drop: lambda i: self._workers[i.device].drop(i.unit),
            Run: self._run,
            Read: self._read,
            Begin: self._begin,
            Fit: self._start_fit,
            Commit: self._start_commit,
            Update: self._start_update,
            Finish: self._start_finish,
        }

    def train(self) -> Report:
        """Run to the end. Also after an interrupt every thread is joined and every model holds its last commit."""
        for _ in self.outputs():
            pass
        return self.report()

    def outputs(self) -> Generator[Any, None, None]:
        """The same, giving what tasks that predict give, batch by batch.

        While the caller holds an output nothing is computed and nothing read, so that its draws from the process-wide
        generators and ours cannot meet. Closed early, it ends as after an interrupt.
        """
        try:
            self._signals.tell(self._events)
            self._open()
            while not self._has_ended():
                predicted = self._work()
                if predicted is not None and self._interrupted:
                    predicted.outputs.clear()
                elif predicted is not None:
                    yield predicted.outputs.pop()  # nobody here keeps it
        except BaseException:
            self._drain()
            raise
        finally:
            self._close()
        if self._lost is not None:
            raise self._lost
        if self._interrupted:
            self._signals.raise_first()

    def evaluation(self, task: str) -> Evaluation:
        """The figures of a task that was evaluated and finished."""
        found = self._tasks[task].evaluation
        assert found is not None
        return found

    def report(self) -> Report:
        """What became of it."""
        devices = [self._device_report(worker) for worker in self._workers]
        tasks = {name: training.report for name, training in self._tasks.items()}
        spans = self._trace.spans()
        return Report(
            makespan_s=self._makespan_s,
            tasks=tasks,
            devices=devices,
            spans=spans,
            host=self.host,
            checkpoints=None if self._saving is None else self._saving.saver.report,
        )

    def figures(self) -> dict[str, Any]:
        """What it has taken so far, as JSON; from any thread."""
        devices = [vars(self._device_report(worker)) for worker in list(self._workers)]
        return {"elapsed_s": self._trace.now_s(), "devices": devices}

    def _device_report(self, worker: Worker) -> DeviceReport:
        name = worker.device.name
        return DeviceReport(
            name=name,
            busy_s=self._trace.busy_s(name, COMPUTE),
            loaded_bytes=self._trace.bytes_moved(name, LOAD),
            stored_bytes=self._trace.bytes_moved(name, STORE),
            peak_bytes=worker.device.ledger.peak_bytes,
            memory_bytes=worker.device.ledger.memory_bytes,
            launch_s=worker.timing.launch_s if worker.timing.device_s else None,
            device_s=worker.timing.device_s or None,
        )

    def _open(self) -> None:
        for index, spec in enumerate(self._specs):
            arena = arena_bytes(self._planned, spec.memory_bytes) if spec.has_arena else None
            device = spec.open(index, self._trace, self._num_threads, arena)
            self._workers.append(Worker(index, device, self._trace, self._events.put))
            self._handle(DeviceAdded(index))
        for planned in self._planned:
            self._take_in(planned)
        self._await(self._deadlines, FIRST, FIRST_S)

    def _take_in(self, planned: PlannedTask) -> None:
        report = planned.report
        if planned.saved is not None and self._saving is not None:
            self._saving.saver.began_at(planned.name, planned.saved.steps)
        notifier = Notifier(
            planned.task.callbacks,
            report,
            self._events.put,
            timeout_s=planned.task.callback_timeout_s,
            num_threads=self._num_threads,
            drawn=planned.callbacks_drew,
            drawn_by_task=lambda: planned.drawn,
        )
        retries = Retries(planned.task.max_retries, report)
        training = RunningTask(planned=planned, report=report, notifier=notifier, retries=retries)
        self._tasks[planned.name] = training
        self._num_setting_up += 1
        planned.reader.start(self._events.put, self._num_threads, partial(self._set_up, training))
        self._await_loader(planned)
        if notifier.timeout_s is not None:
            self._await(self._callback_deadlines, planned.name, notifier.timeout_s)

    def add(self, planned: PlannedTask) -> bool:
        """Train one more task from now on; False where the run is over already. From any thread."""
        with self._arriving:
            if self._is_over:
                return False
            self._num_arriving += 1
            self._events.put(_Arrived(planned))
            return True

    @contextmanager
    def planning(self, planned: PlannedTask) -> Iterator[None]:
        """See that the task's loader, which the body reads, keeps nobody waiting for longer than it may."""
        self._events.put(_Planning(planned, is_over=False))
        try:
            yield
        finally:
            self._events.put(_Planning(planned, is_over=True))

    def stop(self, task: str) -> None:
        """End a task at its last committed step. From any thread."""
        self._events.put(_Stop(task))

    def _has_ended(self) -> bool:
        """Whether all is finished and told, and nothing more can come."""
        if not self._scheduler.finished or self._num_ending or self._num_setting_up:
            return False
        with self._arriving:
            self._is_over = self._num_arriving == 0
            return self._is_over

    def _set_up(self, training: RunningTask) -> _SetUp:
        """In the task's reader's thread: user code may block, and copying weights takes its time."""
        planned = training.planned
        try:
            with self._opening:
                if training.is_set_up:  # it has ended meanwhile
                    return _SetUp(planned.name)
                planned.state.open(self._host_memory)
            with planned.reader.calling():
                return self._call_factories(training)
        except BaseException as error:
            return _SetUp(planned.name, error=error)

    def _call_factories(self, training: RunningTask) -> _SetUp:
        planned = training.planned
        task, state = planned.task, planned.state
        num_batches = _length(task.dataloader)
        num_steps = None if num_batches is None else num_batches * task.epochs
        optimizer = None
        if task.purpose is Purpose.TRAIN:
            optimizer = TaskOptimizer(task, planned.layout)
            if planned.saved is not None:
                planned.saved.put_optimizer(optimizer)
            if state.steps_on_device:
                check_no_hooks(planned.name, planned.layout)  # since the plan was made
        for worker in self._workers:
            worker.admit(state)  # copies layers, which is user code too
        training.watch(optimizer)
        return _SetUp(planned.name, optimizer, num_steps)

    def _was_set_up(self, event: _SetUp) -> None:
        training = self._tasks[event.task]
        if training.is_set_up:
            return
        if event.error is not None:
            training.note_failure(Failed(event.task, event.error, "its set-up"))
            self._end_early(training)
            self._begin_held()
            return
        self._note_set_up(training)
        planned, state = training.planned, training.state
        training.num_steps = event.num_steps
        if planned.saved is not None:
            training.position, training.buffers = planned.saved.position, list(state.pool.buffers)
        if event.optimizer is not None:
            training.optimizer = event.optimizer
            event.optimizer.secure = training.secure
            state.loss_scale = event.optimizer.loss_scale
            if state.steps_on_device:
                state.stepper = event.optimizer
        training.notifier.is_stopped |= planned.is_stopped
        if self._held is None:
            self._begin_task(training)
        else:
            self._held.append(training)
            self._begin_held()

    def _begin_held(self, *, late: bool = False) -> None:
        """Begin the tasks of the run's beginning, once all of them are set up; late: those that are."""
        if self._held is None or (self._num_setting_up and not late):
            return
        held, self._held = self._held, None
        self._deadlines.drop(FIRST)
        for training in self._tasks.values():
            if training in held:
                self._begin_task(training)

    def _begin_task(self, training: RunningTask) -> None:
        self._add(training)
        if training.notifier.is_stopped:  # meanwhile
            self._handle(TaskStopped(training.report.name))

    def _note_set_up(self, training: RunningTask) -> None:
        self._deadlines.drop(training.report.name)
        self._num_setting_up -= 1
        training.is_set_up = True

    def _end_early(self, training: RunningTask) -> None:
        """End a task that the scheduler will never know; its set-up may still be under way."""
        self._note_set_up(training)
        self._start_finish(Finish(training.report.name))

    def _add(self, training: RunningTask) -> None:
        planned, state = training.planned, training.state
        training.is_scheduled = True
        self._handle(
            TaskAdded(
                task=planned.name,
                training=state.chains[True],
                evaluation=state.chains[False],
                needs=tuple(shard.needs for shard in state.shards),
                updates=training.updates,
                unit_s=planned.unit_s,
                num_steps=None if training.num_steps is None else max(0, training.num_steps - training.report.steps),
                reads_ahead=not state.draws,
                early_release=state.pool.early_release,
                priority=planned.task.priority,
                weight=planned.task.weight,
                spreads=planned.spreads,
                reads_last=not planned.task.read_ahead,
            )
        )

    def _work(self) -> RunningTask | None:
        """Handle events to the end, or until a task has predicted a batch and everything is at rest."""
        while not self._has_ended():
            with self._events as event:
                if isinstance(event, StepCommitted) and (task := self._tasks[event.task]).outputs:
                    # Its commit is not handled yet, so that nothing is under way but the next batch's reading.
                    while task.is_reading and not self._interrupted:
                        with self._events as other:
                            self._handle(other)
                    self._events.put(event)
                    return task
                self._handle(event)
            if self._num_setting_up < len(self._tasks):
                set_up = (task.progress for task in self._tasks.values() if task.is_set_up)
                self._progress.show(set_up, self._trace.now_s())
        return None

    def _drain(self) -> None:
        """After an error of our own, a policy's or a terminal's: finish what is committed, begin nothing new."""
        self._handle(StopRequested())
        while not self._has_ended():
            with self._events as event:
                self._handle(event)

    def _handle(self, event: Event | EpochAhead | _Own | Overdue) -> None:
        if isinstance(event, _ASIDE):
            self._handle_aside(event)
            return
        if isinstance(event, _Stop):
            self.left_over = [each for each in self.left_over if each.name != event.task]
            training = self._tasks.get(event.task)
            if training is None or training.is_ending or training.report.exception is not None:
                return  # it is over, of an earlier run, or was never begun
            training.notifier.is_stopped = True
            if not training.is_scheduled:
                return
            event = TaskStopped(event.task)
        if isinstance(event, DataFailed) and self._may_go_again(event):
            self._read_again(event.task)
            return
        event = self._made_fit(event)
        note_event(self._tasks, event)
        if self._saving is not None:
            self._saving.told(event)
        if isinstance(event, (BatchReady, DataEnded, DataFailed)):
            self._tasks[event.task].is_reading = False
            self._deadlines.drop(event.task)
        if isinstance(event, Failed) and isinstance(event.error, DeviceLost) and self._lost is None:
            self._lost = event.error
            if self._saving is None and self._rescue is not None:
                self._save_last_commits(self._rescue)
            self._handle(StopRequested())
        if isinstance(event, (Failed, DataFailed)):
            self._note_failure(event)
        if isinstance(event, StopRequested) and not self._interrupted:
            self._begin_held(late=True)
            self._interrupted = True
            self._hurry_callbacks()
            for training in list(self._tasks.values()):
                if not training.is_set_up:
                    self._end_early(training)
        if isinstance(event, StepCommitted) and self._tasks[event.task].owes_read:
            self._read(Read(event.task))
            self._tasks[event.task].owes_read = False
        if isinstance(event, (StepCommitted, ShardUpdated)):
            self._tell_step(event)
        if isinstance(event, (Failed, TaskStopped)) and not self._tasks[event.task].is_scheduled:
            return  # told by a callback as the task ended, which it never had begun
        for instruction in self._scheduler.handle(event):
            note_instruction(self._tasks, instruction)
            self._actions[type(instruction)](instruction)

    def _handle_aside(self, event: EpochAhead | _Own | Overdue) -> None:
        """What the scheduler is not told."""
        if isinstance(event, Overdue):
            self._leave_late_loaders()
            self._leave_late_callbacks()
        elif isinstance(event, _Told):
            self._told(event.instruction)
        elif isinstance(event, EpochAhead):
            self._deadlines.drop(event.task)
            self._tasks[event.task].epoch_ahead = event.epoch
            self._begin_epoch(self._tasks[event.task])
        elif isinstance(event, _Arrived):
            self._arrived(event.planned)
        elif isinstance(event, _SaverFree):
            if self._saving is not None:
                self._saving.free()
        elif isinstance(event, _Saved):
            self._submit(event.task, "its end", partial(self._end, event.task))
        elif isinstance(event, _Planning):
            self._joining.pop(event.planned.name, None)
            if not event.is_over:
                self._joining[event.planned.name] = event.planned
                self._await_loader(event.planned)
        elif isinstance(event, _SetUp):
            self._was_set_up(event)
        elif isinstance(event, _Ended):
            self._num_ending -= 1
            self._callback_deadlines.drop(event.task)

    def _tell_step(self, event: StepCommitted | ShardUpdated) -> None:
        """Tell a step to the callbacks once its updates are through: they see the weights that it left.

        With early release, updates go on at any time.
        """
        training = self._tasks[event.task]
        if isinstance(event, StepCommitted):
            training.is_committed = True
            if event.training:
                training.notifier.step(is_updated=training.num_updating == 0)
            self._begin_epoch(training)
        elif training.num_updating == 0:
            training.notifier.let_go()

    def _begin_epoch(self, training: RunningTask) -> None:
        """Tell that an epoch begins whose iterator waits for that, once all before it is committed and told."""
        if training.epoch_ahead is None or not (training.batch is None or training.is_committed):
            return
        epoch, training.epoch_ahead = training.epoch_ahead, None
        if not (training.is_ending or self._interrupted):
            training.end_epoch()
            training.notifier.epoch_begin(epoch)
            self._when_told(Read(training.report.name))

    def _saving_by(self, saver: Saver) -> Saving:
        saver.when_free = partial(self._events.put, _SaverFree())
        return Saving(saver, self._tasks, self._pool.submit)

    def _save_last_commits(self, rescue: Callable[[], Saver]) -> None:
        try:
            self._saving = self._saving_by(rescue())
        except Exception as error:  # the run ends all the same
            print(f"hydra_engine: last commits cannot be saved: {error}", file=sys.stderr)

    def _note_failure(self, event: Failed | DataFailed) -> None:
        """Report it; but a task whose device was struck by another one has only been stopped.

        So has one whose loader fails after a signal, which may have ended its worker processes too.
        """
        if self._interrupted and isinstance(event, DataFailed):
            return
        if self._lost is None or not isinstance(event.error, DeviceLost) or event.task == self._lost.task:
            self._tasks[event.task].note_failure(event)

    def _arrived(self, planned: PlannedTask) -> None:
        with self._arriving:
            self._num_arriving -= 1
        if self._interrupted:
            self.left_over.append(planned)
        else:
            self._take_in(planned)

    def _made_fit(self, event: Event) -> Event:
        """What of an event has to do with memory, put as the scheduler needs it."""
        if isinstance(event, BatchReady):
            training = self._tasks[event.task]
            batch = training.next_batch = training.planned.reader.take()
            state = training.state
            split_otherwise = batch.training and batch.accumulation_steps != state.accumulation_steps
            is_known = state.fits_like_another(batch.training, batch.signature)
            number = len(batch.micro_batches) if batch.training else 1
            return event._replace(new_shapes=split_otherwise or not is_known, num_micro_batches=number)
        may_go_again = (DeviceOutOfMemory, BuffersChanged)
        if isinstance(event, Failed) and event.unit is not None and isinstance(event.error, may_go_again):
            training = self._tasks[event.task]
            may_retry = event.unit.kind != BACKWARD or not training.state.pool.early_release
            if training.report.exception is None and may_retry:
                training.to_begin_again = event.error.with_traceback(None)  # whose frames hold the unit's tensors
                training.is_retried = False
                return DidNotFit(event.unit)
        if isinstance(event, Failed) and event.unit is not None and self._may_go_again(event):
            training = self._tasks[event.task]
            if training.to_begin_again is None and isinstance(event.error, Exception):
                training.to_begin_again, training.is_retried = event.error.with_traceback(None), True
            return DidNotFit(event.unit)
        return event

    def _may_go_again(self, event: Failed | DataFailed) -> bool:
        """Whether what raised is tried again. Another part of a step that begins again anyway counts no more."""
        training = self._tasks[event.task]
        if self._interrupted or training.notifier.is_stopped or training.report.exception is not None:
            return False
        unit = event.unit if isinstance(event, Failed) else None
        if unit is not None and training.is_retried:
            return isinstance(event.error, Exception) and not isinstance(event.error, FINAL)
        return training.retries.allow(event.error, str(unit or event.where), training.report.steps)

    def _read_again(self, task: str) -> None:
        """Ask once more for the batch that the loader failed to give."""
        self._tasks[task].planned.reader.restart()
        self._request(self._tasks[task])

    def _request(self, training: RunningTask) -> None:
        training.planned.reader.request(training.read_from)
        self._await_loader(training.planned)

    def _await_loader(self, planned: PlannedTask, seconds: float | None = None) -> None:
        """Look after its loader in so many seconds; None: as long as it may take, if that is limited."""
        seconds = planned.task.loader_timeout_s if seconds is None else seconds
        if seconds is not None:
            self._await(self._deadlines, planned.name, seconds)

    def _await(self, deadlines: Deadlines, task: str, seconds: float) -> None:
        """Look after its loader, or its callbacks, in so many seconds."""
        deadlines.set(task, seconds)
        self._events.deadline_s = min(self._deadlines.next_s, self._callback_deadlines.next_s)

    def _leave_late_loaders(self) -> None:
        for name in self._deadlines.take_due():
            if name in self._joining:
                planned = self._joining[name]
            elif name in self._tasks:
                planned = self._tasks[name].planned
            else:
                if name == FIRST:
                    self._begin_held(late=True)
                continue
            timeout_s = planned.task.loader_timeout_s
            assert timeout_s is not None
            left_s = planned.reader.leave_behind()
            if left_s is not None:  # it was asked only later, after others' loaders
                self._await_loader(planned, left_s)
            elif name in self._tasks:
                self._fail_late(self._tasks[name], timeout_s)
        self._events.deadline_s = min(self._deadlines.next_s, self._callback_deadlines.next_s)

    def _leave_late_callbacks(self) -> None:
        """Look after callbacks: each task's at least once in its time-out, so that calls themselves cost nothing."""
        for name in self._callback_deadlines.take_due():
            left_s = self._tasks[name].notifier.leave_behind()
            if left_s is not None:
                self._await(self._callback_deadlines, name, left_s)
        self._events.deadline_s = min(self._deadlines.next_s, self._callback_deadlines.next_s)

    def _hurry_callbacks(self) -> None:
        """The run is to end, and soon: a callback that blocks must not hold it up."""
        for name, training in self._tasks.items():
            if training.planned.task.callbacks:
                training.notifier.hurry()
                self._await(self._callback_deadlines, name, INTERRUPTED_S)

    def _fail_late(self, training: RunningTask, timeout_s: float) -> None:
        name, thread = training.report.name, training.planned.reader.thread_name
        if not training.is_set_up:
            what = "its loader's length, or its optimizer's or schedule's factory, did not return"
            self._handle(_SetUp(name, error=LoaderTimeout(name, timeout_s, thread, what)))
        elif not training.is_ending:
            self._handle(DataFailed(name, LoaderTimeout(name, timeout_s, thread), "its loader"))

    def _close(self) -> None:
        with self._arriving:
            self._is_over = True
        if self._saving is not None:
            self._saving.saver.give_up()  # or an update might wait for a task that is not to be had
        self._planner.shutdown()
        self._pool.shutdown()
        if self._saving is not None:
            self._saving.saver.close()  # it may be writing from memory that is given back below
        late = {name: training.notifier.close() for name, training in self._tasks.items()}
        while not self._events.is_empty:  # a task's very end may fail after the scheduler is through
            with self._events as event:
                if isinstance(event, (Failed, DataFailed)):
                    self._note_failure(event)
                elif isinstance(event, _Arrived):
                    self.left_over.append(event.planned)
        for worker in self._workers:
            worker.close()
        for name, training in self._tasks.items():
            if not training.planned.reader.close():
                what = "its loader" if training.is_scheduled else "its set-up"
                self._note_left(training, what, training.planned.reader.thread_name)
            if (callback := late[name]) is not None:
                self._note_left(training, f"its callback {callback}", training.notifier.thread_name)
            training.state.close()
        self._makespan_s = self._trace.now_s()
        self._progress.close((task.progress for task in self._tasks.values()), self._makespan_s)
        # They refer back to this run: without them it is freed, with every arena, when its caller lets go of it.
        self._actions.clear()

    def _note_left(self, training: RunningTask, what: str, thread: str) -> None:
        text = f"{training.report.name}: {what} did not return; its thread {thread!r} was left behind\n"
        training.report.error = text + (training.report.error or "")

    def can_hold(self, work_bytes: int, slab_bytes: int) -> bool:
        """Whether its devices have so much memory for a unit and its shard's parameters."""
        return all(worker.device.ledger.can_hold(work_bytes, slab_bytes) for worker in self._workers)

    def _is_resident(self, device: int, task: str, shard: int) -> bool:
        return self._workers[device].holds(self._tasks[task].state, shard)

    # -- instructions

    def _submit(
        self, task: str, where: str, job: Callable[[], Event | None], pool: ThreadPoolExecutor | None = None
    ) -> None:
        def run() -> None:
            try:
                event = job()
            except BaseException as error:
                event = Failed(task, error, where, commit=True)
            if event is not None:
                self._events.put(event)

        (self._pool if pool is None else pool).submit(run)

    def _read(self, instruction: Read) -> None:
        training = self._tasks[instruction.task]
        state = training.state
        # Layers that draw from the main stream decide where the next read begins; those that do not leave it alone.
        main = None
        if training.batch is not None and state.draws and training.draws_from_main:
            if training.is_new_shape and not training.owes_read and training.planned.task.read_ahead:
                training.owes_read = True  # in more micro-batches, its layers would leave the stream alone
                return
            main = state.end_of_forward()
            training.layers_moved_reader = True
        training.is_reading = True
        training.read_from = main
        self._request(training)

    def _run(self, instruction: Run) -> None:
        self._tasks[instruction.unit.task].state.begun(instruction.unit)
        self._workers[instruction.device].run(instruction.unit)

    def _begin(self, instruction: Begin) -> None:
        training = self._tasks[instruction.task]
        training.is_new_shape = False
        training.is_spread = instruction.num_parts > 1
        training.take()
        training.stage(instruction.num_parts)
        for worker in self._workers:
            worker.sweep(instruction.task)

    def _start_commit(self, instruction: Commit) -> None:
        training = self._tasks[instruction.task]
        training.waits_to_commit = not training.notifier.is_told
        if training.waits_to_commit and self._saving is not None:
            self._saving.waits(training)
        self._when_told(instruction)

    def _when_told(self, instruction: Commit | Finish | Read) -> None:
        """Go on with it in this thread, once the task's callbacks have returned."""
        notifier = self._tasks[instruction.task].notifier
        if notifier.is_told:
            self._told(instruction)
        else:
            notifier.when_told(partial(self._events.put, _Told(instruction)))

    def _told(self, instruction: Commit | Finish | Read) -> None:
        training = self._tasks[instruction.task]
        if isinstance(instruction, Read):
            if not (training.is_ending or training.notifier.is_stopped or self._interrupted):
                training.read_from = None  # layers moved the stream before the epoch's end was found
                self._request(training)
            return
        if isinstance(instruction, Finish):
            self._submit(instruction.task, "its end", partial(self._finish, instruction))
            return
        training.waits_to_commit, training.is_committing = False, True
        job = partial(self._timed, "commit", instruction.task, partial(self._commit, instruction))
        self._submit(instruction.task, "its commit", job)

    def _return_memory(self) -> None:
        """Give back what the C library keeps of freed memory, now and then: tens of MB for each thread."""
        now_s = self._trace.now_s()
        if now_s >= self._next_trim_s:
            self._next_trim_s = now_s + TRIM_INTERVAL_S
            return_free_memory()

    def _start_update(self, instruction: Update) -> None:
        label = f"{instruction.task}.{instruction.shard}"
        job = partial(self._timed, "update", label, partial(self._update, instruction))
        self._submit(instruction.task, "its optimizer", job)

    def _timed(self, what: str, label: str, job: Callable[[], Event]) -> Event:
        with self._trace.span("host", what, label):
            return job()

    def _start_fit(self, instruction: Fit) -> None:
        training = self._tasks[instruction.task]
        if instruction.unit is None:
            training.is_new_shape = True
            training.take()
        else:
            for worker in self._workers:
                worker.begin_again(instruction.task)
        self._submit(instruction.task, "its fit", partial(self._fit, instruction), self._planner)

    def _fit(self, instruction: Fit) -> Event:
        training = self._tasks[instruction.task]
        state, batch = training.state, training.batch
        assert batch is not None
        before = (state.boundaries, state.accumulation_steps)
        old, old_s = state.shards, dict(training.planned.unit_s)
        # Of a part of a step no device knows what it takes; where one does not fit, the whole may, as it did before.
        was_part, training.is_spread = training.is_spread and instruction.unit is not None, False
        if instruction.unit is not None:
            self._trace.add("host", AGAIN, str(instruction.unit), self._trace.now_s())
        if was_part and isinstance(training.to_begin_again, DeviceOutOfMemory):
            training.may_spread = False
            training.revise(f"a part of a step did not fit, so none is spread any more: {training.to_begin_again}")
        is_retried = training.is_retried
        if not is_retried:  # else it fits as it is
            misfit = None
            if instruction.unit is not None and not was_part and isinstance(training.to_begin_again, DeviceOutOfMemory):
                misfit = Misfit(instruction.unit.shard, training.to_begin_again)
            training.batch = refit(
                state,
                training.planned.reader,
                batch,
                Room(self.can_hold, min(worker.device.ledger.memory_bytes for worker in self._workers)),
                misfit=misfit,
                may_split=not training.layers_moved_reader,
            )
        is_other = (state.boundaries, state.accumulation_steps) != before
        if is_other:
            state.unit_s = shared_out(old_s, old, state.shards)
            training.revise(
                str(training.to_begin_again) if instruction.unit is not None else "a batch of a larger shape came"
            )
        training.to_begin_again, training.is_retried = None, False
        assert training.batch is not None
        number = len(training.batch.micro_batches) if batch.training else training.planned.num_micro_batches
        if is_other or was_part or number != training.planned.num_micro_batches:
            training.planned.spread_over(self._specs if training.may_spread else self._specs[:1], number)
        training.stage()
        return Fitted(
            task=instruction.task,
            training=state.chains[True],
            evaluation=state.chains[False],
            needs=tuple(shard.needs for shard in state.shards),
            updates=training.updates,
            unit_s=training.planned.unit_s,
            spreads=training.planned.spreads,
            is_retried=is_retried,
        )

    def _commit(self, instruction: Commit) -> Event:
        event = commit(self._tasks[instruction.task], self._events.put, training_step=instruction.training)
        if instruction.training:
            self._return_memory()
        return event

    def _update(self, instruction: Update) -> Event:
        return update(self._tasks[instruction.task], instruction.shard, self._events.put)

    def _start_finish(self, instruction: Finish) -> None:
        training = self._tasks[instruction.task]
        training.is_ending = True
        self._num_ending += 1
        if self._saving is not None:
            self._saving.ends(training)
        # Not before its callbacks were told all: one of them may be planning another task.
        self._when_told(instruction)

    def _finish(self, instruction: Finish) -> None:
        training = self._tasks[instruction.task]
        # The last epoch's end is told while weights are where they were.
        let_go = partial(training.notifier.when_told, partial(self._events.put, _Saved(instruction.task)))
        try:
            self._conclude(training)
        finally:
            if self._saving is None:
                let_go()
            else:
                self._saving.end(training, self._how_it_ended(training), let_go)

    def _conclude(self, training: RunningTask) -> None:
        """Say what became of a task."""
        report, optimizer = training.report, training.optimizer
        if training.notifier.failed is not None:  # its event may not have been handled yet
            training.note_failure(training.notifier.failed)
        if report.status != STOPPED or self._interrupted or training.notifier.is_stopped:
            return
        if optimizer is not None:
            try:
                optimizer.reach_epoch(training.planned.task.epochs)
            except BaseException as error:
                training.is_torn = True
                training.note_failure(Failed(report.name, error, "its lr_scheduler, after the last epoch"))
                return
        report.status = FINISHED
        training.end_evaluation()
        training.end_epoch()

    def _how_it_ended(self, training: RunningTask) -> str | None:
        """As a checkpoint says it; None: it was interrupted, and goes on with a resume."""
        report = training.report
        if self._lost is not None and report.name == self._lost.task:
            return LOST
        return None if report.status == STOPPED and not training.notifier.is_stopped else report.status

    def _end(self, name: str) -> None:
        """Give a task's memory back."""
        training = self._tasks[name]
        try:
            for worker in self._workers:
                worker.settle(name)  # a claim that was revoked may still be loading
                worker.dismiss(name)
            training.notifier.look_away()
            training.planned.doubts += training.notifier.messages
            with self._opening:  # its set-up may be at it
                training.state.close()
            training.planned.leave()
            if training.optimizer is not None:
                training.report.ema_state = training.optimizer.ema_state()
            training.record = training.snapshot = training.optimizer = training.state.stepper = None
            training.notifier.end()
        finally:
            training.notifier.when_told(partial(self._events.put, _Ended(name)))


def _length(loader: object) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # an iterable without a length ends when it ends
        return None
