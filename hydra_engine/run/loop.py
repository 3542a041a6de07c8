"""One run: feeds the scheduler real events and carries out its instructions. Built for the run and thrown away.

    threads                     events               departments                  instructions

    a reader per task    ---->  +---------+          joining    arrivals, set-up      Lend
    lanes of devices     ---->  |         |          feeds      readers, deadlines       Read
    optimizer pool       ---->  |  Inbox  | -> loop  recovery   failures                          <- Scheduler
    planner              ---->  |         |          workers    devices                  Load Drop Run Release
    callbacks per task   ---->  |         |          host_work  pools                    Begin Fit Commit Update Finish
    saver, signals       ---->  +---------+          saves      checkpoints              Capture

The loop runs in the caller's thread: it takes an event from the inbox, lets the departments that it is for hear it,
then the scheduler, and gives each instruction to the department that carries it out. What a department wants the
scheduler to know first it puts into `Common.due`. So all state of departments, and everything the scheduler knows, is
touched by one thread at a time: the one that has the turn. Of units that are through, a lane decides by itself, at the
end of its job and where nobody else has the turn: what it would wait for otherwise is to wake the caller's thread and
to be woken by it. Beside the threads drawn above, one shows the run to its observer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple

from hydra_engine.checkpoints import Saver
from hydra_engine.devices import DevicePool, Quotas
from hydra_engine.planning import PlannedTask
from hydra_engine.progress import AtWork, Doing, Observer, RunLoggers, RunProgress, Watch
from hydra_engine.run.feeds import Arrived, Feeds, Joining
from hydra_engine.run.host_work import HostWork
from hydra_engine.run.recovery import Recovery
from hydra_engine.run.running_task import Asked, Common, Job, RunningTask, progress_of
from hydra_engine.run.saves import SaverFree, Saves
from hydra_engine.run.signals import Overdue, Signals
from hydra_engine.run.task_list import Site
from hydra_engine.run.workers import Workers
from hydra_engine.schedule import (
    Activity,
    BatchReady,
    Computed,
    DataEnded,
    DataFailed,
    DeviceAdded,
    EpochAhead,
    EvaluationOver,
    Failed,
    HomesMoved,
    Policy,
    Scheduler,
    ShardUpdated,
    SpreadsKnown,
    StepCommitted,
    StopRequested,
    Stored,
    TaskStopped,
)
from hydra_engine.tasks import Evaluation, Report


class RunServices(NamedTuple):
    """Services of a run, beside its devices. Where no task trains it has `loggers` alone, and none in them."""

    loggers: RunLoggers
    quotas: Quotas | None = None
    observer: Observer | None = None
    saver: Saver | None = None
    rescue: Callable[[], Saver] | None = None  # makes a saver as a device is lost


class EngineRun:
    """Trains, evaluates or predicts planned tasks on devices until all are finished, failed or stopped."""

    def __init__(
        self,
        planned: Sequence[PlannedTask],
        site: Site,
        pool: DevicePool,
        policy: Policy,
        signals: Signals,
        services: RunServices,
    ) -> None:
        quotas = services.quotas
        self._planned = list(planned)  # until they are begun
        self._signals = signals
        self._makespan_s = 0.0
        self.site = site
        self._common = common = Common(site.host, services.loggers)
        self._watch = Watch(services.observer, self._look, common.later)
        self.workers = Workers(common, pool, site.devices, trains=quotas is not None)
        self._saves = Saves(common, services.saver, services.rescue)
        self._host_work = HostWork(common, self.workers, self._saves)
        self._feeds = Feeds(common, self._saves)
        self.joining = Joining(common, self.workers, self._feeds, self._host_work, self._saves, quotas)
        self._recovery = Recovery(common, self.workers, self._feeds, self._saves)
        self._scheduler = Scheduler(
            policy,
            double_buffer=site.double_buffer,
            is_resident=self.workers.is_resident,
            min_devices=self.workers.min_devices,
            has_groups=quotas is not None and quotas.are_given,
        )
        # Who hears an event before the scheduler does. What returns None, it keeps from the scheduler.
        self._hears: dict[type, tuple[Callable[[Any], Any], ...]] = {
            Job: (lambda job: job.run(),),
            Overdue: (self.joining.overdue,),
            Arrived: (self.joining.arrived,),
            StopRequested: (self.joining.stop_requested,),
            EpochAhead: (self._feeds.callbacks_ahead,),
            EvaluationOver: (self._feeds.callbacks_ahead,),
            BatchReady: (self._feeds.batch_ready,),
            DataEnded: (self._feeds.has_answered,),
            DataFailed: (self._recovery.data_failed,),
            Failed: (self._recovery.failed, self._if_known),
            TaskStopped: (self._if_known,),
            SpreadsKnown: (self._if_known,),
            DeviceAdded: (self.joining.device_added,),
            HomesMoved: (self.workers.homes.moved,),
            StepCommitted: (self._saves.step_committed, self._feeds.step_committed),
            SaverFree: (self._saves.free,),
        }
        # The method for each instruction, of the department that carries it out.
        self._actions: dict[type, Callable[..., None]] = {
            **self.workers.instructions(),
            **self.joining.instructions(),
            **self._host_work.instructions(),
            **self._feeds.instructions(),
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
            self._signals.tell(self._common.events)
            self._watch.open()
            self.workers.open(self._planned)
            self._common.events.let_help(self._handle_here, THROUGH)
            with self._common.events.turn:
                self._decide_due()
                self.joining.begin(self._planned)
                self._planned.clear()
            while not self._has_ended():
                predicted = self._work()
                if predicted is not None and self._common.is_interrupted:
                    predicted.figures.outputs.clear()
                elif predicted is not None:
                    yield predicted.figures.outputs.pop()  # nobody here keeps it
        except BaseException:
            self._drain()
            raise
        finally:
            self._close()
        if self._common.lost is not None:
            raise self._common.lost
        if self._common.is_interrupted:
            self._signals.raise_first()

    def evaluation(self, task: str) -> Evaluation:
        """The figures of a task that was evaluated and finished."""
        found = self._common.tasks[task].figures.evaluation
        assert found is not None
        return found

    def report(self) -> Report:
        """Report the run."""
        return Report(
            makespan_s=self._makespan_s,
            tasks={**self._common.forgotten, **{name: task.report for name, task in self._common.tasks.items()}},
            devices=self.workers.reports(),
            spans=self._common.trace.spans(),
            memory=self._common.trace.memory(),
            host=self.site.host,
            checkpoints=self._saves.report,
            messages=tuple(self._common.messages),
        )

    def figures(self) -> dict[str, Any]:
        """Return seconds and bytes so far, as JSON; from any thread."""
        devices = [vars(report) for report in self.workers.reports()]
        return {"elapsed_s": self._common.trace.now_s(), "devices": devices}

    def steps_left(self, task: str) -> int | None:
        """Return the steps that a task has yet to take; None: its loader does not say. From any thread."""
        found = self._common.tasks.get(task)
        if found is None or found.feed.num_steps is None:
            return None
        return 0 if found.is_ending else max(0, found.feed.num_steps - found.report.steps)

    def end(self, task: str, *, pauses: bool) -> None:
        """End a task at its last commit; pauses: as one that goes on some other time. From any thread."""
        self._common.later(partial(self._end, task, pauses=pauses))

    def _end(self, name: str, *, pauses: bool) -> None:
        if self.joining.delays(name, partial(self._end, name, pauses=pauses)):
            return
        if not pauses:
            self.joining.forget(name)
        task = self._common.tasks.get(name)
        # Else it is over, of an earlier run, or was never begun.
        if task is not None and task.end.goes_back:
            self.joining.wants_end[name] = pauses
        elif task is not None and not task.is_ending and task.end.ending is None:
            task.end.order(pauses=pauses)
            self._common.due.append(TaskStopped(name, is_paused=pauses))

    def forget(self, task: str) -> None:
        """Keep the report of a task that is over, and nothing else; as soon as no thread works for it. From any thread.

        Where its loader or a callback does not return, it is kept until the run's end.
        """
        self._common.later(lambda: self._feeds.unwanted.append(self._common.tasks[task]))

    def _has_ended(self) -> bool:
        """Return True if all tasks have ended and nothing more can come."""
        with self._common.events.turn:
            self.joining.follow()
            return self._scheduler.finished and self.joining.has_ended()

    def _handle_here(self, event: Any) -> None:
        """Handle an event in a lane; what goes wrong is for the thread that waits for events."""
        try:
            self._handle(event)
        except BaseException as error:
            self._common.later(partial(_raise, error))

    def _work(self) -> RunningTask | None:
        """Handle events to the end, or until a task has predicted a batch and everything is at rest."""
        tasks = self._common.tasks
        while not self._has_ended():
            with self._common.events as event:
                if isinstance(event, StepCommitted) and tasks[event.task].figures.outputs:
                    # Its commit is not handled yet, so that nothing is under way but the next batch's reading.
                    task = tasks[event.task]
                    while task.feed.asked is Asked.READING and not self._common.is_interrupted:
                        with self._common.events as other:
                            self._handle(other)
                    self._common.events.put(event)
                    return task
                self._handle(event)
            del event  # a job refers to its task, and the next event may be long in coming
        return None

    def _look(self) -> RunProgress:
        """Return how the run stands, for people."""
        devices = self.workers.progress(self._scheduler.at_device)
        delays = {each.unit.task: _DELAYED[each.doing] for each in devices if each.unit and each.doing in _DELAYED}

        def doing(task: str) -> Doing:
            activity = self._scheduler.activity(task)
            return delays.get(task, Doing.COMPUTING) if activity is Activity.COMPUTES else _DOING[activity]

        over = [progress_of(report, Doing(report.status)) for report in self._common.forgotten.values()]
        tasks = [task.progress(doing) for task in self._common.tasks.values()]
        return RunProgress(self._common.trace.now_s(), [*over, *tasks], devices)

    def _drain(self) -> None:
        """After an error of our own, a policy's or a terminal's: finish what is committed, begin nothing new."""
        with self._common.events.turn:
            self._handle(StopRequested())
        while not self._has_ended():
            with self._common.events as event:
                self._handle(event)

    def _handle(self, event: Any) -> None:
        """Let departments hear an event, then the scheduler; carry out what it says."""
        for hear in self._hears.get(type(event), ()):
            event = hear(event)
            if event is None:
                break
        if self._common.due:
            self._decide_due()
        if event is not None:
            for instruction in self._scheduler.handle(event):
                self._actions[type(instruction)](instruction)
        if self._feeds.unwanted:
            self._feeds.forget_quiet()

    def _decide_due(self) -> None:
        while self._common.due:
            self._handle(self._common.due.popleft())

    def _if_known(self, event: Any) -> Any:
        """Keep from the scheduler what a callback tells of a task that it does not know: its end came before."""
        has_task = isinstance(event, (Failed, TaskStopped, SpreadsKnown))
        return event if not has_task or self._scheduler.knows(event.task) else None

    def _close(self) -> None:
        self._common.events.end_help()
        self.joining.close()
        self._saves.give_up()  # or an update might wait for a task that is not to be had
        self._host_work.close()
        self._saves.close()  # it may be writing from memory that is given back below
        tasks = self._common.tasks
        late = {name: task.notifier.close() for name, task in tasks.items()}
        while not self._common.events.is_empty:  # a task's very end may fail after the scheduler is through
            with self._common.events as event:
                if isinstance(event, (Failed, DataFailed)):
                    self._recovery.note(event)
                elif isinstance(event, Arrived):
                    self.joining.left_over.append(event.planned)
        for task in tasks.values():  # after an error of our own; else there are none
            task.close_homes()
        self.workers.close()
        for name, task in tasks.items():
            task.end.write(task.report)
            if not task.planned.reader.close():
                what = "its loader" if self._scheduler.knows(name) else "its set-up"
                _note_left(task, what, task.planned.reader.thread_name)
            if (callback := late[name]) is not None:
                _note_left(task, f"its callback {callback}", task.notifier.thread_name)
            task.state.close()
        self._makespan_s = self._common.trace.now_s()
        self._watch.close()
        self._common.messages += self._common.loggers.close()
        # They refer back to this run: without them it is freed, with every arena, when its caller lets go of it.
        self._common.go_back = lambda _: None
        self._hears.clear()
        self._actions.clear()


# What lanes tell of units and updates. It is for the scheduler alone: no department hears it.
THROUGH = (Computed, Stored, ShardUpdated)


def _raise(error: BaseException) -> None:
    raise error


# The scheduler's and the devices' words, in those for people.
_DOING = {
    Activity.LOADS: Doing.WEIGHTS,
    Activity.STORES: Doing.OUTPUTS,
    Activity.DEVICE: Doing.DEVICE,
    Activity.BATCH: Doing.BATCH,
    Activity.UPDATES: Doing.UPDATES,
    Activity.FIT: Doing.FITTING,
    Activity.COMMIT: Doing.COMMITTING,
    Activity.END: Doing.ENDING,
}
_DELAYED = {AtWork.WEIGHTS: Doing.WEIGHTS, AtWork.MEMORY: Doing.MEMORY}


def _note_left(task: RunningTask, what: str, thread: str) -> None:
    text = f"{task.name}: {what} did not return; its thread {thread!r} was left behind\n"
    task.report.error = text + (task.report.error or "")
