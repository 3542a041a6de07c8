"""Feeds a run: lets tasks in, sets them up, reads their batches, and sees that user code answers in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

from torch.optim import Optimizer

from hydra_engine.checkpoints import LastCommit
from hydra_engine.devices import DeviceSpec, OpenDevice, Promise, Quotas, host_memory
from hydra_engine.errors import DeviceLost, LoaderTimeout
from hydra_engine.host import BestWeights, NormGroups, TaskOptimizer
from hydra_engine.planning import PlannedTask, has_to_fit, largest_micro_batch
from hydra_engine.run.ending import TaskEnd
from hydra_engine.run.host_work import HostWork
from hydra_engine.run.notifier import Notifier, Recipients
from hydra_engine.run.running_task import (
    Asked,
    Common,
    Figures,
    Job,
    Life,
    Retries,
    RunningTask,
    StepClock,
    Waited,
)
from hydra_engine.run.saves import Saves
from hydra_engine.run.signals import Overdue
from hydra_engine.run.task_list import Station
from hydra_engine.run.workers import SHARE_OUT, RunOver, Workers
from hydra_engine.schedule import (
    BatchReady,
    Capture,
    DataEnded,
    DataFailed,
    DeviceAdded,
    DeviceReturned,
    DeviceWanted,
    EpochAhead,
    EvaluationOver,
    Failed,
    Finish,
    Lend,
    Read,
    StepCommitted,
    StopRequested,
    TaskAdded,
    TaskStopped,
)
from hydra_engine.tasks import BatchChooser, Best, Purpose, TaskReport
from hydra_engine.texts import warn

# Tasks of a run's beginning wait for each other's set-up no longer than this.
FIRST_S = 1.0
LOADER, CALLBACKS = "loader", "callbacks"
FIRST = ("set-up of all tasks of the run's beginning", None)

T = TypeVar("T", BatchReady, DataEnded, DataFailed)


class Feeds:
    """The department of readers, and of deadlines for user code."""

    def __init__(self, common: Common, saves: Saves) -> None:
        self._common = common
        self._saves = saves
        self.unwanted: list[RunningTask] = []  # to be forgotten, once they are quiet

    def instructions(self) -> dict[type, Callable[..., None]]:
        return {Read: self._asked, Capture: self._captured}

    # -- batches

    def batch_ready(self, event: BatchReady) -> BatchReady:
        """Take a batch from its reader; the scheduler has to know what of it has to do with memory."""
        task = self._common.tasks[event.task]
        batch = task.feed.next_batch = task.planned.reader.take()
        self._look_ahead(task)
        is_spread = task.may_spread and len(task.planned.decisions.spreading.spreads) > 1
        return self.has_answered(event)._replace(
            has_to_fit=has_to_fit(task.state, batch, is_spread=is_spread),
            num_micro_batches=len(batch.micro_batches) if batch.training else 1,
        )

    def has_answered(self, event: T) -> T:
        """A reader has answered."""
        task = self._common.tasks[event.task]
        task.feed.asked = Asked.NOTHING
        self.reader_answered(task.planned)
        task.feed.answered()
        return event

    def reader_answered(self, planned: PlannedTask) -> None:
        """A reader is waited for no more."""
        self._common.deadlines.drop((LOADER, planned))

    def _asked(self, instruction: Read) -> None:
        task = self._common.tasks[instruction.task]
        task.feed.num_devices = instruction.num_devices
        is_under_way = task.step is not None and task.batch.training and not task.step.is_committed
        if task.notifier.waits and is_under_way:
            task.feed.asked = Asked.LATER
        else:
            self._read_once_told(task)

    def _read_once_told(self, task: RunningTask) -> None:
        """Read the next batch, once the task's callbacks have returned: one may have ended the task."""
        task.feed.asked = Asked.READING
        self._common.when_told(task, partial(self._read, task))

    def _read(self, task: RunningTask) -> None:
        feed, step, state = task.feed, task.step, task.state
        if task.notifier.waits and (task.is_ending or task.end.is_stopped or self._common.is_interrupted):
            feed.asked = Asked.NOTHING
            return
        # Layers that draw from the main stream decide where the next read begins; those that do not leave it alone.
        main = None
        if step is not None and self._moves_reader(task) and not (task.notifier.waits and task.batch.training):
            if step.is_new_shape and not step.is_committed and task.planned.task.read_ahead:
                feed.asked = Asked.LATER  # in more micro-batches, its layers would leave the stream alone
                return
            main = state.end_of_forward()
            step.layers_moved_reader = True
        feed.asked, feed.read_from = Asked.READING, main
        self.request(task)

    @staticmethod
    def _moves_reader(task: RunningTask) -> bool:
        return task.state.observed.draws and task.draws_from_main

    def request(self, task: RunningTask) -> None:
        """Ask the loader for the next batch, or once more for one that it has failed to give."""
        task.feed.is_out = True
        task.planned.reader.request(task.feed.read_from, task.feed.num_devices)
        self.await_loader(task.planned)

    # -- steps and epochs

    def step_committed(self, event: StepCommitted) -> StepCommitted:
        """Tell a step to the callbacks, which see the weights that its updates leave; read what waited for it."""
        task = self._common.tasks[event.task]
        assert task.step is not None
        task.step.is_committed = True
        if event.training:
            task.is_updated = not task.updates
            task.figures.log_step()
            if task.notifier.waits and self._moves_reader(task):  # callbacks draw where layers have left the stream
                task.planned.reader.stream.state = task.state.end_of_forward()
            if task.notifier.waits and task.notifier.reads_model and not task.is_updated:
                task.committed_s = self._common.trace.now_s()
            task.notifier.step(is_updated=task.is_updated)
        if task.feed.asked is Asked.LATER and not (event.training and task.notifier.reads_model):
            self._read_once_told(task)
        self._look_ahead(task)
        self._read_on(task)
        return event

    def _captured(self, instruction: Capture) -> None:
        """All updates of a task's last step are through: callbacks may have its model, and then it may be saved."""
        task = self._common.tasks[instruction.task]
        if task.committed_s is not None:
            task.updates_s += self._common.trace.now_s() - task.committed_s
            task.committed_s = None
        self._saves.capture(task)
        if task.feed.asked is Asked.LATER and task.step is not None and task.step.is_committed:
            self._read_once_told(task)

    def _look_ahead(self, task: RunningTask) -> None:
        """Once a batch is committed and the next one is known, it is known what is over with the first.

        Before the scheduler hears of it, so that nothing of the next one begins in a task that ends here.
        """
        following = task.feed.next_batch
        if following is not None and (task.step is None or task.step.is_committed):
            task.conclude_before(following)
            if following.training:  # else a validation of before a resume may be under way again
                self._common.end_early(task)

    def callbacks_ahead(self, event: EpochAhead | EvaluationOver) -> None:
        """The reader waits for callbacks: an epoch is about to begin, or an evaluation is over."""
        task = self._common.tasks[event.task]
        self.reader_answered(task.planned)
        task.feed.answered()
        task.feed.ahead = event
        self._read_on(task)

    def _read_on(self, task: RunningTask) -> None:
        """Call the callbacks that the reader waits for, once all before is committed, and let it read on."""
        ahead = task.feed.ahead
        if ahead is None or not (task.step is None or task.step.is_committed):
            return
        task.feed.ahead = None
        if task.is_ending or self._common.is_interrupted or not self._reach_epoch(task, ahead.epoch):
            return
        if isinstance(ahead, EvaluationOver):
            task.figures.end_evaluation()
        else:
            task.end_epoch()
            task.reach_epoch(ahead.epoch)
            if task.step is not None:
                self._common.end_early(task)
            if task.end.is_early:
                return
            if not task.end.is_paused:
                task.notifier.epoch_begin(ahead.epoch)
        self._common.when_told(task, partial(self._open_epoch, task))

    def _reach_epoch(self, task: RunningTask, epoch: int) -> bool:
        """Move a schedule of interval "epoch", which callbacks come after; False: it has raised."""
        if task.optimizer is None:
            return True
        try:
            task.optimizer.secure(())  # a snapshot may be reading groups and schedule
            task.optimizer.reach_epoch(epoch)
        except BaseException as error:
            self._common.due.append(Failed(task.name, error, f"its lr_scheduler, before epoch {epoch}"))
            return False
        return True

    def _open_epoch(self, task: RunningTask) -> None:
        if not (task.is_ending or task.end.ending is not None or self._common.is_interrupted):
            task.feed.read_from = None  # layers moved the stream before the epoch's end was found
            self.request(task)

    # -- deadlines

    def await_loader(self, planned: PlannedTask) -> None:
        """Look after a loader once it has taken as long as it may, if that is limited."""
        if planned.task.timeout_s is not None:
            self._common.await_((LOADER, planned), planned.task.timeout_s)

    def await_callbacks(self, task: RunningTask) -> None:
        """Look after callbacks: each task's at least once in its time-out, so that calls themselves cost nothing."""
        if task.notifier.timeout_s is not None:
            self._common.await_((CALLBACKS, task.planned), task.notifier.timeout_s)

    def hurry_callbacks(self) -> None:
        """The run is to end, and soon: a callback that blocks must not hold it up."""
        for task in self._common.tasks.values():
            if task.planned.task.callbacks:
                task.notifier.hurry()
                self.await_callbacks(task)

    def overdue(self, due: Sequence[Waited]) -> list[tuple[RunningTask, LoaderTimeout]]:
        """Leave to themselves those whose time is up, and return the tasks whose set-up has not returned."""
        found = []
        for who, planned in due:
            # None: it is planned still, or was paused, and goes on as another one.
            task = next((each for each in self._common.tasks.values() if each.planned is planned), None)
            if planned is not None and who == LOADER:
                error = self._leave_loader(planned, task)
                if error is not None and task is not None:
                    found.append((task, error))
            elif who == CALLBACKS and task is not None and task.life is not Life.ENDED:
                left_s = task.notifier.leave_behind(fails=not self._common.is_interrupted)
                if left_s is not None:
                    self._common.await_((who, planned), left_s)
        return found

    def _leave_loader(self, planned: PlannedTask, task: RunningTask | None) -> LoaderTimeout | None:
        """Leave a loader to itself; the task may be planned still, while others train."""
        name, timeout_s, thread = planned.name, planned.task.timeout_s, planned.reader.thread_name
        assert timeout_s is not None
        left_s = planned.reader.leave_behind()
        if left_s is not None:  # it was asked only later, after others' loaders
            self._common.await_((LOADER, planned), left_s)
        elif task is not None and task.life is Life.SETTING_UP:
            what = "its loader's length, or its optimizer's or schedule's factory, did not return"
            return LoaderTimeout(name, timeout_s, thread, what)
        elif task is not None and task.is_ending:
            task.feed.answered()
        elif task is not None:
            self._common.due.append(DataFailed(name, LoaderTimeout(name, timeout_s, thread), "its loader"))
        return None

    # -- tasks that are over

    def forget_quiet(self) -> None:
        """End the threads of tasks that are wanted no more, and quiet, and keep their reports alone."""
        for task in [each for each in self.unwanted if each.is_quiet]:
            self.unwanted.remove(task)
            for who in (LOADER, CALLBACKS):
                self._common.deadlines.drop((who, task.planned))
            if self._common.tasks.get(task.name) is task:  # else another goes on in its place already
                if task.end.is_paused:
                    task.leave(self._common.trace)
                self._common.pool.submit(self._forgotten, task)  # a loader's iterator, too: its end may take a while

    def _forgotten(self, task: RunningTask) -> None:
        try:
            task.notifier.close()
            if not task.planned.reader.close():
                return  # the run's end says so
        except Exception as error:  # of the iterator, whose batches were all that mattered
            warn(f"hydra_engine: {task.name}: its loader's iterator raised as it was closed: {error}")
        self._common.later(partial(self._let_go, task))

    def _let_go(self, task: RunningTask) -> None:
        if self._common.tasks.get(task.name) is task:  # and none that goes on in its place
            del self._common.tasks[task.name]
            self._common.forgotten[task.name] = task.report


class Arrived(NamedTuple):
    """A task came while others train."""

    planned: PlannedTask


@dataclass(eq=False)
class _Loan:
    """Somebody waits for a device with so much memory; None: there will be none."""

    memory_bytes: int
    device: Promise[int | None]
    is_asked: bool = False


class _Way:
    """The way into a run, from any thread: whoever is on it keeps the run from ending."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_on = 0  # tasks that are to be taken in, and devices that are lent
        self._is_closed = False

    def enter(self, then: Callable[[], None]) -> bool:
        """Go on the way, and do something before anybody else does; False where the run is over already."""
        with self._lock:
            if not self._is_closed:
                self._num_on += 1
                then()
            return not self._is_closed

    def leave(self) -> None:
        with self._lock:
            self._num_on -= 1

    def while_open(self, do: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_closed:
                do()

    def close(self, *, if_free: bool = False) -> bool:
        """Let nobody in any more. `if_free`: only where nobody is on the way. Return True if it is closed."""
        with self._lock:
            self._is_closed = self._num_on == 0 or not if_free
            return self._is_closed


class Loans:
    """Devices that rehearsals have alone for a while, one after the other."""

    def __init__(self, common: Common, workers: Workers, saves: Saves, way: _Way) -> None:
        self._common = common
        self._workers = workers
        self._saves = saves
        self._way = way
        self._borrowing = threading.Lock()  # held by who has a device, or waits for it
        self._changing = threading.Lock()
        self._loan: _Loan | None = None  # that is waited for

    @contextmanager
    def borrowed(self, spec: DeviceSpec) -> Iterator[OpenDevice]:
        """Have a device alone, from the end of its unit on; the tasks go on with others, or wait.

        Raises RunOver where the run has ended, or is interrupted.
        """
        index: int | None = None
        with self._borrowing:
            loan = _Loan(spec.memory_bytes, Promise())
            if not self._way.enter(partial(self._put, loan)):
                raise RunOver
            self._common.later(self.want)
            try:
                index = loan.device.result()
                if index is None:
                    raise RunOver
                with self._workers.vacated(index) as device:
                    yield device
            except DeviceLost as error:
                self._common.later(partial(self._lose, error))  # a rehearsal has struck it
                raise
            finally:
                self._way.leave()
                if index is not None:
                    self._common.events.put(DeviceReturned(index))

    def _lose(self, error: DeviceLost) -> None:
        self._workers.homes.strike(error.device)
        self._saves.device_lost(error)

    def _put(self, loan: _Loan) -> None:
        with self._changing:
            self._loan = loan

    # -- from the thread that decides

    def want(self) -> None:
        """Ask for a device for who waits, once one is in that is large enough; after an interrupt there is none."""
        loan = self._loan
        if loan is None or loan.is_asked:
            return
        if self._common.is_interrupted:
            self.end(None)
        elif (index := self._workers.device_for(loan.memory_bytes)) is not None:
            loan.is_asked = True
            self._common.due.append(DeviceWanted(index))

    def lend(self, instruction: Lend) -> None:
        """Give a device that is free to who waits for one."""
        if self._common.is_interrupted:
            self._common.due.append(DeviceReturned(instruction.device))
        self.end(None if self._common.is_interrupted else instruction.device)

    def end(self, device: int | None) -> None:
        """Tell who waits for a device that it is there, or that there will be none."""
        with self._changing:
            loan, self._loan = self._loan, None
        if loan is not None:
            loan.device.keep(device)

    def close(self) -> None:
        """After an error of our own: who has a device needs nothing of this thread."""
        self.end(None)
        with self._borrowing:
            pass


class Joining:
    """The department of tasks that come."""

    def __init__(
        self, common: Common, workers: Workers, feeds: Feeds, host_work: HostWork, saves: Saves, quotas: Quotas | None
    ) -> None:
        self._common = common
        self._workers = workers
        self._feeds = feeds
        self._host_work = host_work
        self._saves = saves
        self._quotas = quotas
        self._way = _Way()
        self._loans = Loans(common, workers, saves, self._way)
        self.borrowed = self._loans.borrowed
        self._host_memory = host_memory(workers.first_specs)
        # While tasks wait for those that they begin with, the scheduler knows them in their order, and spreads no step
        # of one over devices that others want. None: no task waits for others any more.
        self._begins_by_s: float | None = None
        # Tasks that came, by name, while callbacks of who was paused under it are told that; and what waits with them.
        self._behind: dict[str, tuple[PlannedTask, list[Callable[[], None]]]] = {}
        self.left_over: list[PlannedTask] = []  # that came too late to be begun
        # Adds a task that goes back; returns its report there, and its station.
        self.add_again: Callable[[PlannedTask], tuple[TaskReport, Station]]
        self.wants_end: dict[str, bool] = {}  # tasks that go back, and are to be stopped then; True: paused
        common.go_back = self._go_back

    # -- from any thread

    def add(self, planned: PlannedTask) -> bool:
        """Train one more task from now on; False where the run is over already."""
        return self._way.enter(partial(self._common.events.put, Arrived(planned)))

    @contextmanager
    def planning(self, planned: PlannedTask) -> Iterator[None]:
        """See that the task's loader, which the body reads, keeps nobody waiting for longer than it may."""
        # The rehearsal would wait for the very device that computes the layer, and be part of its autograd graph.
        if any(worker.device.is_here for worker in self._workers.all):
            raise RuntimeError(
                "add_task: called by a layer or a loss while it trains, limit: callbacks and other threads, since a "
                "unit that is computed cannot wait for a rehearsal; call it from on_step"
            )
        self._common.later(partial(self._feeds.await_loader, planned))
        try:
            yield
        finally:
            # Not once it is over, or what nobody reads any more would keep the run.
            self._way.while_open(partial(self._common.later, partial(self._feeds.reader_answered, planned)))

    # -- in a task's reader's thread: user code may block, and copying weights takes its time

    def _set_up(self, task: RunningTask) -> Job:
        """Make a task's optimizer, and find its number of steps; or it has ended meanwhile."""
        try:
            with self._common.opening:
                if task.life is not Life.SETTING_UP:
                    return Job(task.feed.answered)
                task.state.open(self._host_memory)
            with task.planned.reader.calling():
                optimizer, num_steps = self._call_factories(task)
            self._count_room(task)
            return Job(partial(self._was_set_up, task, optimizer, num_steps))
        except BaseException as error:
            return Job(partial(self._set_up_has_raised, task, error))

    def _call_factories(self, task: RunningTask) -> tuple[TaskOptimizer | None, int | None]:
        planned, state = task.planned, task.state
        num_steps = planned.num_steps()
        optimizer = None
        if planned.task.purpose is Purpose.TRAIN:
            with state.pool.shown(planned.layout.trainable_slots()):  # the factory may look at weights
                optimizer = TaskOptimizer(planned.task, planned.layout, has_ieee_roots=state.homes.has_ieee_roots)
            if planned.saved is not None:
                planned.doubts += planned.saved.put_optimizer(optimizer)
            if planned.chooser is not None:
                self._begin_to_choose(task, planned.chooser, optimizer.optimizer)
            if (keeps := planned.task.keep_best) is not None:
                best = Best(by=keeps.by, direction=keeps.direction, epoch_first=planned.report.steps)
                task.figures.best = BestWeights(state.pool, best)
                if planned.saved is not None:
                    planned.saved.put_best(task.figures.best)
        self._workers.admit(state)  # copies layers, which is user code too
        task.lend(self._workers.refresh)
        return optimizer, num_steps

    def _begin_to_choose(self, task: RunningTask, chooser: BatchChooser, optimizer: Optimizer) -> None:
        """Measure gradients by the optimizer's groups, and time steps, for the chooser of batches."""
        planned, state = task.planned, task.state
        try:
            chooser.begin(optimizer, sums_losses=planned.task.loss_reduction == "sum")
        except ValueError as error:
            raise ValueError(f"{task.name}: {error}") from error
        state.norm_groups = NormGroups.of_optimizer(optimizer, state.layout.trainable_slots())
        links = [spec.ceilings() for spec in self._workers.spreading()]
        up, down = min(each.up_bytes_per_s for each in links), min(each.down_bytes_per_s for each in links)
        task.clock = StepClock(self._common.trace, task.name, up, down)

    def _count_room(self, task: RunningTask) -> None:
        """Bound batches that are chosen by what fits the devices and DRAM. No user code, and slow for it."""
        planned, state, chooser = task.planned, task.state, task.planned.chooser
        if chooser is not None:
            sample = planned.reader.sample()
            most = largest_micro_batch(state, sample, self._workers.room, chooser.most)
            chooser.limit(most, planned.most_samples(sample.num_samples))

    # -- from the thread that decides

    def _go_back(self, task: RunningTask) -> None:
        """Let a task that has ended go on from where it was saved, in a thread that may read and plan."""
        if self._way.enter(lambda: None):
            threading.Thread(target=self._added_again, args=(task,), name=f"{task.name}-back", daemon=True).start()

    def _added_again(self, task: RunningTask) -> None:
        says, steps = f"task {task.name!r}: {task.report.stop_reason}; it ", task.report.steps
        try:
            report, station = self.add_again(task.planned)
            self._common.messages.append(f"{says}went back from step {steps} to step {report.steps}")
            if station is not Station.TRAINING:
                _ends_there(task, report)
            if station is Station.DROPPED:
                task.end.order(pauses=False)
                task.end.write(task.report)
                task.notifier.end()
        except Exception as error:
            task.end.fail(Failed(task.name, error, "its way back to where it was saved"))
            task.end.write(task.report)
            task.notifier.end()
            self._common.messages.append(f"{says}could not go back to where it was saved: {error}")
        finally:
            self._way.leave()
            self._common.later(lambda: None)  # the run may be over now

    def instructions(self) -> dict[type, Callable[..., None]]:
        return {Lend: self._loans.lend}

    def device_added(self, event: DeviceAdded) -> DeviceAdded:
        """A device has come, which somebody may wait for, or steps may be spread over."""
        self._common.later(self._loans.want)  # once the scheduler knows it
        for task in self._common.tasks.values():
            self._host_work.widen(task)
        return event

    def begin(self, planned: Sequence[PlannedTask]) -> None:
        """Take in the tasks of the run's beginning."""
        self._begins_by_s = time.monotonic() + FIRST_S
        for each in planned:
            self._take_in(each)
        self._common.await_(FIRST, FIRST_S)

    def close(self) -> None:
        """Let nobody in any more."""
        self._way.close()
        self._loans.close()
        self.left_over += [planned for planned, _ in self._behind.values()]  # after an error of our own

    def has_ended(self) -> bool:
        """Return True if all tasks have ended and none is on its way; then none is let in any more."""
        return all(task.life is Life.ENDED for task in self._common.tasks.values()) and self._way.close(if_free=True)

    def follow(self) -> None:
        """Let in those whose name is free: no task has it, or one that has ended by now."""
        for name, (planned, jobs) in list(self._behind.items()):
            before = self._common.tasks.get(name)
            if self._common.is_interrupted or before is None or before.life is Life.ENDED:
                del self._behind[name]
                self._way.leave()
                if self._common.is_interrupted:
                    self.left_over.append(planned)
                    if before is not None and before.end.goes_back:
                        _ends_there(before, planned.report)
                else:
                    self._take_in(planned)
                for job in jobs:
                    job()

    def arrived(self, event: Arrived) -> None:
        """Take in a task, or leave it over. One that was paused waits until its callbacks have heard of that."""
        self._behind[event.planned.name] = (event.planned, [])
        self.follow()

    def delays(self, name: str, job: Callable[[], None]) -> bool:
        """Return True if a task of this name is on its way; the job is then done once it is here."""
        if name not in self._behind:
            return False
        self._behind[name][1].append(job)
        return True

    def forget(self, name: str) -> None:
        """A task that was left over is not wanted any more."""
        self.left_over = [each for each in self.left_over if each.name != name]

    def overdue(self, _: Overdue) -> None:
        """Go on without those that are late."""
        due = self._common.take_due()
        self._saves.overdue(due)
        if SHARE_OUT in due:
            self._workers.homes.share_out()
        for task, error in self._feeds.overdue(due):
            self._fail(task, error)
        if self._begins_by_s is not None and time.monotonic() >= self._begins_by_s:
            self._begin_waiting(late=True)

    def stop_requested(self, event: StopRequested) -> StopRequested:
        """Begin what is set up, so that it ends as others do, and end what is not."""
        if not self._common.is_interrupted:
            self._begin_waiting(late=True)
            self._common.is_interrupted = True
            self._loans.want()
            self._feeds.hurry_callbacks()
            for task in list(self._common.tasks.values()):
                if task.life is Life.SETTING_UP:
                    self._end_early(task)
                task.feed.answered()  # nobody waits for a loader any more
        return event

    def _take_in(self, planned: PlannedTask) -> None:
        end = TaskEnd(releases_early=bool(planned.state.pool.early_release))
        before = self._common.tasks.get(planned.name)
        if before is not None:
            before.leave(self._common.trace)
        notifier = Notifier(
            Recipients(planned.task.callbacks, planned.report, planned.calls.draws, planned.reader.stream),
            end,
            self._common.events.put,
            timeout_s=planned.task.timeout_s,
            num_threads=self._common.host.intra_op_threads,
        )
        retries = Retries(planned.task.max_retries, planned.report)
        task = RunningTask(planned, notifier, end, retries, Figures(planned, notifier, self._common.loggers))
        task.epoch = 0 if planned.saved is None else planned.saved.position.epoch
        self._common.tasks[planned.name] = task
        self._saves.began(task)
        if (pauses := self.wants_end.pop(planned.name, None)) is not None:
            end.order(pauses=pauses)
        planned.reader.start(self._common.events.put, self._common.host.intra_op_threads, partial(self._set_up, task))
        self._feeds.await_loader(planned)
        self._feeds.await_callbacks(task)

    def _set_up_has_raised(self, task: RunningTask, error: BaseException) -> None:
        task.feed.answered()
        self._fail(task, error)

    def _fail(self, task: RunningTask, error: BaseException) -> None:
        """Its set-up has raised, or is late."""
        if task.life is Life.SETTING_UP:
            task.end.fail(Failed(task.name, error, "its set-up"))
            self._end_early(task)
            self._begin_waiting()

    def _end_early(self, task: RunningTask) -> None:
        """End a task that the scheduler will never know; its set-up may still be under way."""
        self._feeds.reader_answered(task.planned)
        self._host_work.finish(Finish(task.name))

    def _was_set_up(self, task: RunningTask, optimizer: TaskOptimizer | None, num_steps: int | None) -> None:
        task.feed.answered()
        if task.life is not Life.SETTING_UP:
            return
        self._feeds.reader_answered(task.planned)
        task.life = Life.WAITING
        planned, state = task.planned, task.state
        task.feed.num_steps = num_steps
        if planned.saved is not None:
            task.last_commit = LastCommit(planned.saved.position, list(state.pool.buffers))
        if optimizer is not None:
            task.optimizer = optimizer
            optimizer.secure = task.secure
            state.loss_scale = optimizer.loss_scale
        if planned.calls.stop is not None:
            task.end.obey(planned.calls.stop, "a callback's on_epoch_begin")
        self._begin_waiting()

    def _begin_waiting(self, *, late: bool = False) -> None:
        """Begin tasks that are set up: those of the run's beginning once all of them are, or when it is late."""
        tasks = self._common.tasks.values()
        if self._begins_by_s is None or late or all(task.life is not Life.SETTING_UP for task in tasks):
            self._begins_by_s = None
            for task in tasks:
                if task.life is Life.WAITING:
                    self._begin(task)

    def _begin(self, task: RunningTask) -> None:
        task.life = Life.TRAINING
        task.figures.begin()
        self._common.due.append(_added(task, None if self._quotas is None else self._quotas.of(task.planned.task)))
        self._workers.homes.begin(task)
        self._host_work.widen(task)  # over devices that came since it was planned
        if task.end.ending is not None:  # meanwhile
            self._common.events.put(TaskStopped(task.name, is_paused=task.end.is_paused))  # once it is known


def _added(task: RunningTask, quota: int | None) -> TaskAdded:
    """Return what the scheduler has to know of a task that begins."""
    trained, state, num_steps = task.planned.task, task.state, task.feed.num_steps
    return TaskAdded(
        task=task.name,
        units=task.units,
        num_steps=None if num_steps is None else max(0, num_steps - task.report.steps),
        reads_ahead=not state.observed.draws,
        early_release=bool(state.pool.early_release),
        priority=trained.priority,
        weight=trained.weight,
        reads_last=not trained.read_ahead,
        group=trained.group,
        quota=quota,
        min_devices=trained.min_devices,
        max_devices=trained.max_devices,
        adapts=trained.adapts,
    )


def _ends_there(task: RunningTask, report: TaskReport) -> None:
    """Report a task that went back as it is there, by its new report: it is stopped, or waits for the next call."""
    vars(task.report).update({name: copy(each) for name, each in vars(report).items()})
    task.end.stay()
