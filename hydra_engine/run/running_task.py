"""A task in its run: what is under way of it, and what has come of it; and what a run's departments share."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, NamedTuple, TypeAlias

import torch

from hydra_engine.checkpoints import LastCommit, Snapshot
from hydra_engine.data import Batch, RandomState, copied
from hydra_engine.errors import DeviceFailed, DeviceLost, LoaderTimeout, PauseTask, StopTask
from hydra_engine.host import BestWeights, StepParts, StepRecord, TaskOptimizer, TaskState
from hydra_engine.planning import PlannedTask
from hydra_engine.progress import Doing, RunLoggers, TaskProgress
from hydra_engine.run.ending import TaskEnd, readable
from hydra_engine.run.notifier import Lending, Notifier, UsersModel
from hydra_engine.run.signals import Deadlines, Inbox
from hydra_engine.schedule import (
    EVALUATE,
    FORWARD,
    EpochAhead,
    EvaluationOver,
    Event,
    Failed,
    TaskStopped,
    TaskUnits,
    Unit,
)
from hydra_engine.system import HostThreads
from hydra_engine.tasks import (
    AGAIN,
    TRAINING_LOSS,
    VALIDATION_LOSS,
    Best,
    Evaluation,
    EvaluationMeans,
    LaneSeconds,
    Purpose,
    Retry,
    Revision,
    StepReport,
    TaskReport,
    TaskStart,
    ValidationReport,
    plain_attributes,
)
from hydra_engine.trace import Trace
from partitioners.precision import cast

# Who is waited for: "loader", "callbacks" or "save", and of which task.
Waited: TypeAlias = tuple[str, PlannedTask | None]

# Trying again helps with none of these: the device is gone, the user has decided, the iterator is still in use.
FINAL = (DeviceLost, StopTask, PauseTask, LoaderTimeout)


class Retries:
    """Counts a task's retries in one run, and reports each. From any thread: shards are updated side by side."""

    def __init__(self, most: int, report: TaskReport) -> None:
        self.most = most
        self._num_before = len(report.retries)  # of a run that is resumed
        self._report = report
        self._lock = threading.Lock()

    def allow(self, error: BaseException, where: str, step: int) -> bool:
        """Return True if this error may be tried again; then count and report the retry."""
        if not isinstance(error, Exception) or isinstance(error, FINAL):
            return False
        with self._lock:
            if len(self._report.retries) - self._num_before >= self.most:
                return False
            first_line = (str(readable(error)).strip() or "no message").splitlines()[0]
            text = f"{type(error).__name__}: {first_line}"
            self._report.retries.append(Retry(step=step, where=where, error=text))
            return True


class Life(Enum):
    """Stations of a task in its run."""

    SETTING_UP = auto()  # its reader's thread takes its memory and calls its user's factories
    WAITING = auto()  # it is set up, and others that it begins with are not
    TRAINING = auto()  # the scheduler knows it
    ENDING = auto()  # nothing of it is under way: it is concluded, saved and given back
    ENDED = auto()  # its callbacks were told its end


class Asked(Enum):
    """Stations of the next batch."""

    NOTHING = auto()  # none is asked for, or it is there
    LATER = auto()  # it is asked for once the step in progress is committed, and its callbacks have returned
    READING = auto()  # the reader is at it


@dataclass(eq=False)
class Feed:
    """The batches that a task has yet to compute, first of all the next one."""

    num_steps: int | None = None  # of the whole task, where its loader has a length
    asked: Asked = Asked.NOTHING
    read_from: RandomState | None = None  # where the layers had left the stream, for the batch that was asked for last
    num_devices: int = 1  # that the next step is spread over, as things stood when its batch was asked for
    ahead: EpochAhead | EvaluationOver | None = None  # the reader reads on once callbacks have returned
    next_batch: Batch | None = None  # read, not begun
    is_out: bool = True  # the reader sets the task up, or has a request that it has not answered
    then: Callable[[], None] | None = None  # to be called once it has

    def answered(self) -> None:
        """The reader is at rest, or was left behind."""
        self.is_out = False
        job, self.then = self.then, None
        if job is not None:
            job()


class Again(NamedTuple):
    """A step is to begin again."""

    error: Exception  # why
    fits: bool  # it is tried again as it is; False: memory ran short


@dataclass(eq=False)
class StepInProgress:
    """The batch that was begun last: a training step, or an evaluation's."""

    batch: Batch
    is_new_shape: bool = False  # the first of its shape: a device may still run out in its backward
    is_spread: bool = False  # over several devices
    is_committed: bool = False
    layers_moved_reader: bool = False  # the next batch is read from where this one's layers left the random stream
    again: Again | None = None


class Figures:
    """Figures of steps and of evaluated batches, outputs of predicted ones, and the epochs that are over."""

    def __init__(self, planned: PlannedTask, notifier: Notifier, loggers: RunLoggers) -> None:
        self._planned, self._report, self._notifier, self._loggers = planned, planned.report, notifier, loggers
        self._lap_began_s = 0.0  # the last commit, or where training began, by time.perf_counter()
        self._evaluated_epoch = 0
        self._means: EvaluationMeans | None = None  # of the evaluation in progress
        self._ended_epoch = -1  # the last one that was told to be over
        self.evaluation: Evaluation | None = None  # the last that is through
        self.best: BestWeights | None = None  # with keep_best
        self.outputs: list[Any] = []  # of the batch that was predicted last; the caller takes it

    def begin(self) -> None:
        """The task begins to train, or goes on."""
        report, saved = self._report, self._planned.saved
        self._lap_began_s = time.perf_counter()
        self._loggers.begin(
            TaskStart(
                task=report.name,
                seed=report.seed,
                hparams=dict(report.hparams),
                steps=report.steps,
                validated_at=report.validation_steps[-1] if report.validation_steps else None,
                is_new=saved is None or saved.is_fork,
            )
        )

    def _lap_s(self) -> float:
        """Return the seconds since the last commit, and begin anew."""
        began_s, self._lap_began_s = self._lap_began_s, time.perf_counter()
        return max(self._lap_began_s - began_s, 1e-9)

    def end_step(self, batch: Batch, loss: float, learning_rates: tuple[float, ...], grad_norm: float | None) -> None:
        """Report the values of a training step that was committed."""
        self._report.last_step = StepReport(
            task=self._report.name,
            step=self._report.steps,
            epoch=batch.epoch,
            loss=loss,
            learning_rates=learning_rates,
            grad_norm=grad_norm,
            num_samples=batch.num_samples,
            samples_per_s=batch.num_samples / self._lap_s(),
            time_s=time.time(),
        )

    def log_step(self) -> None:
        """Tell the loggers the step that was committed last."""
        assert self._report.last_step is not None
        self._loggers.step(self._report.last_step)

    def commit(self, batch: Batch) -> None:
        """Take the batch in progress over, into its evaluation's means or for the caller."""
        self._lap_s()  # no time of the next step
        if self._planned.task.purpose is Purpose.PREDICT:
            self._commit_prediction()
            return
        staging = self._planned.state.staging
        if self._means is None:
            self._means = EvaluationMeans(sums_losses=self._planned.task.loss_reduction == "sum")
        self._evaluated_epoch = batch.epoch
        self._means.add(staging.losses[0], batch.weight, staging.metrics[0], batch.num_samples)

    def revise(self, reason: str) -> None:
        """Report that the task goes on otherwise than planned."""
        step, cut = self._report.steps, self._planned.state.cut
        number, boundaries = cut.num_micro_batches, list(cut.boundaries)
        found = Revision(step=step, boundaries=boundaries, accumulation_steps=number, reason=reason)
        self._report.revisions.append(found)

    def end_evaluation(self) -> None:
        """Report the figures of the evaluation in progress, if there is one; nothing was committed after it."""
        if self._means is None:
            return
        self.evaluation = found = self._means.result()
        self._means = None
        self._report.validation_losses.append(found.loss)
        self._report.validation_steps.append(self._report.steps)
        for name, value in found.metrics.items():
            self._report.validation_metrics.setdefault(name, []).append(value)
        self._report.last_validation = ValidationReport(
            task=self._report.name,
            step=self._report.steps,
            epoch=self._evaluated_epoch,
            loss=found.loss,
            metrics=found.metrics,
            time_s=time.time(),
        )
        self._loggers.validation(self._report.last_validation)
        if self.best is not None and (by := self.best.best.by) != TRAINING_LOSS:
            value = found.loss if by == VALIDATION_LOSS else found.metrics[by]
            self._judge(self.best, self.best.best.after(value, self._report.steps))
        self._notifier.validation()

    def end_training_epoch(self) -> None:
        """Judge the training loss of an epoch whose steps are in all weights, and which is over."""
        if self.best is not None:
            self._judge(self.best, self.best.best.after_epoch(self._report.losses, self._report.skipped_steps))

    def _judge(self, weights: BestWeights, best: Best) -> None:
        weights.judge(best)
        self._report.best_step, self._report.best_value = best.step, best.value

    def _commit_prediction(self) -> None:
        """Keep what left the last shard for the caller: in memory of its own, in float32 as a loss would take it."""
        state = self._planned.state
        output = state.staging.take(len(state.cut.shards), 0)
        is_wide = state.layout.narrow is None
        self.outputs.append(output.build(output.tensors if is_wide else cast(output.tensors, torch.float32)))

    def end_epoch(self, batch: Batch) -> None:
        """Tell, once, that a batch's epoch is over, its validation too."""
        if batch.epoch > self._ended_epoch:
            self.end_evaluation()
            self._ended_epoch = batch.epoch
            self._notifier.epoch(batch.epoch)


# -- step times, of adaptive tasks

# Others that work for a smaller share of an interval than this do not count.
ALONE = 0.02
# A step counts for at least this share of its own work, also if others' work hides all of it.
LEAST_CHARGE = 0.1


class Work(NamedTuple):
    """Seconds that lanes have worked."""

    compute_s: float = 0.0
    load_s: float = 0.0
    store_s: float = 0.0

    def __sub__(self, other: Work) -> Work:
        return Work(self.compute_s - other.compute_s, self.load_s - other.load_s, self.store_s - other.store_s)

    @property
    def longest_s(self) -> float:
        """Seconds of the lane that takes longest, while the others work as well."""
        return max(self)

    @property
    def link_s(self) -> float:
        """Seconds in which the link is busy, in the direction that takes longer."""
        return max(self.load_s, self.store_s)


def charged_s(own: Work, of_all: Work, elapsed_s: float) -> float:
    """Return the seconds that a step costs.

    A task alone is charged what elapsed. Beside others, it is charged by how much longer it makes a round of the steps
    of all: their loads cross one link, their stores too, and their units are computed one after the other, all of that
    at the same time.

        compute   |##own##|####others####|
        load      |#own#|########others########|       costs what `own` adds to the longer one
    """
    others = of_all - own
    if others.longest_s <= ALONE * elapsed_s:
        return elapsed_s
    return max(of_all.longest_s - others.longest_s, LEAST_CHARGE * own.longest_s)


class StepClock:
    """Times the steps of one task, by whoever begins and commits them: one after the other."""

    def __init__(self, trace: Trace, task: str, up_bytes_per_s: float, down_bytes_per_s: float) -> None:
        self._trace, self._task = trace, task
        self._up_bytes_per_s, self._down_bytes_per_s = up_bytes_per_s, down_bytes_per_s
        self._began = self._now()

    def begin(self) -> None:
        """A step begins, or begins again. What it has waited for until then is no work: callbacks, a loader, a fit."""
        self._began = self._now()

    def end(self, *, num_devices: int = 1) -> LaneSeconds:
        """Return the seconds of the step, of one of its devices; `num_devices`: that it was spread over."""
        (then_s, own_then, all_then), (now_s, own_now, all_now) = self._began, self._now()
        own, of_all, elapsed_s = own_now - own_then, all_now - all_then, now_s - then_s
        step_s = charged_s(own, of_all, elapsed_s)
        step_s = step_s if step_s == elapsed_s else step_s / num_devices
        return LaneSeconds(step_s, own.compute_s / num_devices, own.link_s / num_devices)

    def _now(self) -> tuple[float, Work, Work]:
        return self._trace.now_s(), self._work(self._task), self._work(None)

    def _work(self, task: str | None) -> Work:
        # By the link's rate: lanes that share it wait for one another, which no lane can tell from its own copies.
        computed_s, loaded_bytes, stored_bytes = self._trace.work(task)
        return Work(computed_s, loaded_bytes / self._up_bytes_per_s, stored_bytes / self._down_bytes_per_s)


# More than 15 attributes: it joins what others own of a task in its run, and the rest changes at events of its own.
@dataclass(eq=False)
class RunningTask:
    """Touched by the thread that decides, or by the one job of the task's that commits, fits or ends it."""

    planned: PlannedTask
    notifier: Notifier
    end: TaskEnd
    retries: Retries
    figures: Figures
    life: Life = Life.SETTING_UP
    optimizer: TaskOptimizer | None = None
    feed: Feed = field(default_factory=Feed)
    step: StepInProgress | None = None  # replaced as the next batch begins
    may_spread: bool = True  # steps over several devices; False once a part of one did not fit
    record: StepRecord | None = None  # of the last training step
    last_commit: LastCommit | None = None  # where positions are kept
    snapshot: Snapshot | None = None  # the last that was taken; done with once it is written
    save_waits: bool = False  # for its callbacks; until then nothing of the task is committed
    is_updated: bool = True  # the last step that was committed is in all weights
    committed_s: float | None = None  # when that was, where callbacks wait for its updates
    updates_s: float = 0.0  # that they have waited
    epoch: int = 0  # that its training has reached; of a task whose best is kept by its training loss
    epoch_is_over: bool = False  # the one before that, which waits for `is_updated`
    # A heap of its commit and updates that wait for a thread of the host; from any thread.
    host_jobs: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    is_torn: bool = False  # part of its state is of another step than the rest, since a commit is not through
    misses_update: bool = False  # as part of it is for good, since an update has raised
    clock: StepClock | None = None  # of an adaptive task

    @property
    def name(self) -> str:
        """The task's name."""
        return self.planned.name

    @property
    def report(self) -> TaskReport:
        """The report for its user: written, and of all in it only the number of steps is read to decide anything."""
        return self.planned.report

    @property
    def state(self) -> TaskState:
        """Its units' state."""
        return self.planned.state

    @property
    def is_whole(self) -> bool:
        """True if all of its state is of one step, once that is settled."""
        return not (self.is_torn or self.misses_update)

    @property
    def is_ending(self) -> bool:
        """True if nothing of it is under way any more."""
        return self.life in (Life.ENDING, Life.ENDED)

    @property
    def is_quiet(self) -> bool:
        """True if it has ended, and no thread has anything of it in hand."""
        return self.life is Life.ENDED and not self.feed.is_out and not self.notifier.is_left

    @property
    def batch(self) -> Batch:
        """The batch in progress."""
        assert self.step is not None
        return self.step.batch

    def lend(self, refresh: Callable[[TaskState], None]) -> None:
        """Let callbacks have the model, and note where they leave the task; `refresh`: as of UsersModel."""
        model = UsersModel(self.state, self.secure, refresh) if self.notifier.reads_model else None
        self.notifier.lending = Lending(model, self._note_called)

    def called(self) -> dict[str, Any]:
        """Return what callbacks keep, and have changed of modules, for a checkpoint. They are not called meanwhile."""
        calls, saved = self.planned.calls, self.planned.saved
        now, before = plain_attributes(*calls.roots), calls.attributes
        model = self.notifier.lending.model
        is_changed = model is not None and model.is_changed
        return {
            "callbacks": [[type(each).__qualname__, copied(each.state_dict())] for each in self.planned.task.callbacks],
            "attributes": [[*key, each] for key, each in now.items() if key not in before or before[key] != each],
            "is_changed": is_changed or (saved is not None and saved.is_changed),
        }

    def _note_called(self) -> None:
        """The last commit is as the calls of its step have left it."""
        if self.last_commit is not None:
            position = self.last_commit.position.with_random(self.planned.reader.stream.state)
            self.last_commit = LastCommit(position, list(self.state.pool.buffers))

    def secure(self, slots: Iterable[int] | None = None) -> None:
        """Wait until a checkpoint that is being written can do without these parameters as they are; None: all."""
        at_home = self.state.pool.homes  # whose places in DRAM are no update's; copies of the best are
        if self.snapshot is not None and (slots is None or self.figures.best is not None):
            self.snapshot.secure(slots)
        elif self.snapshot is not None and slots is not None:
            self.snapshot.secure([each for each in slots if each not in at_home])
        if self.figures.best is not None:  # whose copies the snapshot may be saving
            self.figures.best.secure(slots)

    def secure_dram(self, slots: Iterable[int]) -> None:
        """Wait until a checkpoint can do without what DRAM has of parameters that are at home on a device.

        Under the lock of homes: one that was not captured yet has noted nothing.
        """
        if self.snapshot is not None and self.snapshot.is_captured:
            self.snapshot.secure(slots)

    def close_homes(self) -> None:
        """Make DRAM the home of all its weights; where that raises, it fails, and some of its weights are older."""
        try:
            self.state.homes.close_all()
        except BaseException as error:
            self.is_torn = True
            self.end.fail(Failed(self.name, error, "its homes on devices"))

    def note_commit(self) -> None:
        """The batch in progress is committed: the next begins where its layers have left the random stream."""
        batch = self.batch
        if batch.position is not None:
            random = self.state.end_of_forward() if self.draws_from_main else batch.main
            self.last_commit = LastCommit(batch.position.with_random(random), list(self.state.pool.buffers))

    @property
    def draws_from_main(self) -> bool:
        """Whether layers draw from the task's main stream in this batch: micro-batches have streams of their own."""
        return not (self.state.is_split and self.batch.training)

    @property
    def loss(self) -> float:
        """Loss of the step in progress, over all its micro-batches, once its units are through."""
        losses = self.state.staging.losses
        parts = [losses[m] for m in range(self.state.staging.num_micro_batches)]
        return sum(parts) if self.state.is_split else parts[0]

    @property
    def updates(self) -> tuple[int, ...]:
        """The shards that have an update of their own; none where the whole task is stepped at its commit."""
        if self.state.task.optimizer_scope == "task":
            return ()
        return tuple(shard.index for shard in self.state.cut.shards if shard.owned)

    @property
    def units(self) -> TaskUnits:
        """Its units as it is cut now."""
        state = self.state
        return TaskUnits(
            training=state.cut.chains[True],
            evaluation=state.cut.chains[False],
            needs=tuple(shard.needs for shard in state.cut.shards),
            updates=self.updates,
            unit_s=self.planned.unit_s,
            spreads=self.planned.spreads,
        )

    def progress(self, doing: Callable[[str], Doing]) -> TaskProgress:
        """Return how it stands; `doing`: tells of one that trains."""
        ending = self.end.ending
        if self.life in (Life.SETTING_UP, Life.WAITING):
            now = Doing.SETTING_UP
        elif self.life is Life.ENDED:  # without an ending, the run has ended before it
            now = Doing.STOPPED if ending is None else Doing(ending.kind.value)
        elif self.life is Life.ENDING:
            now = Doing.ENDING
        else:
            now = doing(self.name)
            if now is Doing.BATCH and not self.notifier.is_told:
                now = Doing.CALLBACKS
        if now is Doing.COMPUTING and self.step is not None and not self.batch.training:
            now = Doing.VALIDATING
        # Of a task that adapts, how many steps it takes depends on what is chosen.
        return progress_of(self.report, now, None if self.planned.task.adapts else self.feed.num_steps)

    def leave(self, trace: Trace) -> None:
        """It was paused and has ended, and another goes on in its place: there its step in progress begins again."""
        self.notifier.close()  # which has nothing more to tell
        if self.step is not None and not self.step.is_committed:
            unit = Unit(self.name, FORWARD if self.batch.training else EVALUATE, 0, self.batch.step)
            trace.add("host", AGAIN, str(unit), trace.now_s())

    def take(self, *, is_new_shape: bool = False, is_spread: bool = False) -> None:
        """Make the batch that was read the one in progress."""
        following = self.feed.next_batch
        assert following is not None
        self.step = StepInProgress(following, is_new_shape=is_new_shape, is_spread=is_spread)
        self.feed.next_batch = None

    def conclude_before(self, following: Batch) -> None:
        """Conclude what ends with the batch that was committed last, since this one follows it."""
        before = None if self.step is None else self.step.batch
        if before is not None and not before.training and following.evaluation != before.evaluation:
            self.figures.end_evaluation()
        if before is not None and following.epoch > before.epoch:
            self.figures.end_epoch(before)
        self.reach_epoch(following.epoch)

    def reach_epoch(self, epoch: int) -> None:
        """All steps of the epochs before this one are committed."""
        keeps = self.planned.task.keep_best
        if keeps is not None and keeps.by == TRAINING_LOSS and epoch > self.epoch:
            self.epoch, self.epoch_is_over = epoch, True
            self.judge_epoch()

    def judge_epoch(self) -> None:
        """Judge the training loss of an epoch that is over, once its last step is in all weights."""
        if self.epoch_is_over and self.is_updated and self.is_whole:
            self.epoch_is_over = False
            self.figures.end_training_epoch()

    def end_epoch(self) -> None:
        """Tell, once, that the epoch of the last batch is over, its validation too."""
        if self.step is not None:
            self.figures.end_epoch(self.step.batch)

    def stage(self, num_parts: int = 1, *, in_sums: bool = True) -> None:
        """Set the batch in progress before its first unit, spread over so many devices."""
        batch = self.batch
        if self.planned.chooser is not None and batch.choice is not None:
            assert self.optimizer is not None
            assert self.step is not None
            choice = self.planned.chooser.factored(batch.choice)
            self.step.batch = batch = replace(batch, choice=choice)
            self.optimizer.factors = choice.factors
        if self.clock is not None:
            self.clock.begin()
        staging, pool = self.state.staging, self.state.pool
        self.state.progress.begin_parts(num_parts, batch.training)
        weights = [w for _, _, w in batch.micro_batches]
        staging.begin(batch.boundaries, weights, batch.start, batch.signature)
        if num_parts > 1:
            slots = self.state.layout.slots
            staging.parts = StepParts(
                staging.num_micro_batches,
                num_parts,
                in_sums=in_sums,
                is_narrow=self.state.layout.narrow is not None,
                place=lambda index: pool.gradients.of(slots[index]),
                has_gradient=staging.has_gradient,
            )


def progress_of(report: TaskReport, doing: Doing, num_steps: int | None = None) -> TaskProgress:
    """Return how a task stands, by its report."""
    return TaskProgress(
        report.name,
        doing,
        report.steps,
        num_steps,
        report.losses[-1] if report.losses else None,
        report.validation_losses[-1] if report.validation_losses else None,
        report.adaptive[-1].short if report.adaptive else "",
    )


class Job(NamedTuple):
    """Something that another thread leaves to the one that decides."""

    run: Callable[[], None]


class Common:
    """Touched by the thread that decides; `events`, `trace`, `pool` and `later` by any."""

    def __init__(self, host: HostThreads, loggers: RunLoggers) -> None:
        self.host = host
        self.loggers = loggers
        self.events: Inbox[Any] = Inbox()
        self.deadlines: Deadlines[Waited] = Deadlines()
        self.due: deque[Event] = deque()  # to be decided upon before the event in hand is
        self.trace = Trace()
        self.tasks: dict[str, RunningTask] = {}
        self.forgotten: dict[str, TaskReport] = {}  # of tasks that were here
        intra_op = (host.optimizer_intra_op_threads,)
        self.pool = ThreadPoolExecutor(host.optimizer_threads, "hydra-optimizer", torch.set_num_threads, intra_op)
        self.opening = threading.Lock()  # tasks take their memory, and give it back, one at a time
        self.is_interrupted = False  # nothing new begins
        self.lost: DeviceLost | DeviceFailed | None = None  # the first, for which the run ends
        self.messages: list[str] = []  # for the run's report
        self.go_back: Callable[[RunningTask], None] = lambda _: None  # lets a task go on from where it was saved

    def later(self, job: Callable[[], None]) -> None:
        """Leave a job to the thread that decides."""
        self.events.put(Job(job))

    def await_(self, waited: Waited, seconds: float) -> None:
        """Look after somebody in so many seconds."""
        self.deadlines.set(waited, seconds)
        self.events.deadline_s = self.deadlines.next_s

    def take_due(self) -> list[Waited]:
        """Who is waited for no more, since the time is up."""
        due = self.deadlines.take_due()
        self.events.deadline_s = self.deadlines.next_s
        return due

    def end_early(self, task: RunningTask) -> None:
        """End a task as finished where nothing has become better for as long as its user waits."""
        best, keeps = task.figures.best, task.planned.task.keep_best
        if best is None or keeps is None or keeps.patience is None or best.best.num_worse < keeps.patience:
            return
        if task.end.ending is None and task.life is Life.TRAINING:
            task.end.finish(early_because=f"{keeps.by} was no better for {keeps.patience} times (patience)")
            self.due.append(TaskStopped(task.name))

    def when_told(self, task: RunningTask, job: Callable[[], None]) -> None:
        """Run a job in the thread that decides, once the task's callbacks have returned; at once if they have."""
        if task.notifier.is_told:
            job()
        else:
            task.notifier.when_told(lambda: self.later(job))
