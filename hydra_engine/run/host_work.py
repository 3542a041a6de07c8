"""Work of the host: begins and fits batches, commits steps, updates shards, ends tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush

import torch

from hydra_engine.checkpoints import LOST
from hydra_engine.devices import DeviceSpec
from hydra_engine.errors import CheckpointError, DeviceOutOfMemory, NonFiniteLoss
from hydra_engine.host import Released, Shard, StepRecord, TaskOptimizer, TaskState, step_measures
from hydra_engine.planning import Misfit, Spreading, refit, shared_out
from hydra_engine.run.ending import EndKind
from hydra_engine.run.running_task import Common, Life, RunningTask
from hydra_engine.run.saves import Saves
from hydra_engine.run.workers import Workers, home_lost
from hydra_engine.schedule import (
    Begin,
    Commit,
    Discard,
    Event,
    Failed,
    Finish,
    Fit,
    Fitted,
    ShardUpdated,
    SpreadsKnown,
    StepCommitted,
    TaskStopped,
    Unit,
    Update,
)
from hydra_engine.system import return_free_memory
from hydra_engine.tasks import AGAIN, Purpose, StepChoice, StepMeasures
from hydra_engine.texts import warn

# Of a lone task's time may go by in waiting for updates before a message says so.
MOST_WAITED = 0.05
LEAST_WAITED_S = 1.0  # in all, to be worth a message
# Freed memory goes back to the system so often: what is needed again has to be taken again, page by page.
TRIM_INTERVAL_S = 30.0


class HostWork:
    """The department of the host's threads: one pool commits, updates and ends, one thread fits batches."""

    def __init__(self, common: Common, workers: Workers, saves: Saves) -> None:
        self._common = common
        self._workers = workers
        self._saves = saves
        # Apart from the pool: measuring a batch may take seconds, and other tasks' commits must not wait for it.
        self._planner = ThreadPoolExecutor(1, "hydra-planner", torch.set_num_threads, (common.host.intra_op_threads,))
        # Apart from both: what it makes is waited for by the updates of the pool.
        self._ahead = ThreadPoolExecutor(1, "hydra-states", torch.set_num_threads, (common.host.intra_op_threads,))
        self._next_trim_s = 0.0

    def instructions(self) -> dict[type, Callable[..., None]]:
        return {
            Begin: self._begin,
            Fit: self._fit,
            Commit: self._commit,
            Update: self._update,
            Discard: self._discard,
            Finish: self.finish,
        }

    def close(self) -> None:
        """End the threads, once all is done that was begun."""
        self._planner.shutdown()
        self._ahead.shutdown(cancel_futures=True)
        self._common.pool.shutdown()

    def _submit(self, task: RunningTask, where: str, job: Callable[[], Event | None]) -> None:
        self._common.pool.submit(_telling, task, where, job, self._common.events.put)

    def _submit_in_order(
        self, task: RunningTask, instruction: Commit | Update, where: str, job: Callable[[], Event]
    ) -> None:
        """Submit a task's commit or update. Tasks take turns; of a task's jobs the first in their own order is done."""
        told: Callable[[], None] = partial(_telling, task, where, job, self._common.events.put)
        heappush(task.host_jobs, (instruction.host_order, told))
        self._common.pool.submit(lambda: heappop(task.host_jobs)[1]())

    def _timed(self, what: str, label: str, job: Callable[[], Event]) -> Event:
        with self._common.trace.span("host", what, label):
            return job()

    # -- a batch begins

    def _begin(self, instruction: Begin) -> None:
        task = self._common.tasks[instruction.task]
        task.take(is_spread=instruction.num_parts > 1)
        task.stage(instruction.num_parts, in_sums=instruction.in_sums)
        if task.optimizer is not None:
            shards = [each for each in task.state.cut.shards if each.index not in task.state.homes.of]
            in_order = reversed(shards) if task.state.pool.early_release else shards
            task.optimizer.make_ahead(in_order, self._ahead.submit)
        for worker in self._workers.all:
            worker.sweep(instruction.task)

    def _fit(self, instruction: Fit) -> None:
        task = self._common.tasks[instruction.task]
        if instruction.unit is None:
            task.take(is_new_shape=True)
        else:
            for worker in self._workers.all:
                worker.begin_again(instruction.task)
        fitted = partial(self._fitted, task, instruction.unit)
        self._planner.submit(_telling, task, "its fit", fitted, self._common.events.put)

    def _fitted(self, task: RunningTask, unit: Unit | None) -> Event:
        """Fit the batch in hand; `unit`: in which it was stopped, and has to begin again."""
        state, planned, step = task.state, task.planned, task.step
        assert step is not None
        old, old_s = state.cut, dict(planned.unit_s)
        # Of a part of a step no device knows what it takes; where one does not fit, the whole may, as it did before.
        was_part, step.is_spread = step.is_spread and unit is not None, False
        if unit is not None:
            self._common.trace.add("host", AGAIN, str(unit), self._common.trace.now_s())
        again, step.again = step.again, None
        error = None if again is None else again.error
        is_short = isinstance(error, DeviceOutOfMemory)
        if was_part and is_short:
            task.may_spread = False
            task.figures.revise(f"a part of a step did not fit, so none is spread any more: {error}")
        is_retried = again is not None and again.fits
        if not is_retried:
            step.batch = refit(
                state,
                planned.reader,
                step.batch,
                self._workers.room,
                misfit=Misfit(unit.shard, error) if unit is not None and not was_part and is_short else None,
                may_split=not step.layers_moved_reader,
            )
        is_other = (state.cut.boundaries, state.cut.num_micro_batches) != (old.boundaries, old.num_micro_batches)
        if is_other:
            state.measured.unit_s = shared_out(old_s, old.shards, state.cut.shards)
            task.figures.revise(str(error) if unit is not None else "a batch of a larger shape came")
        number = len(step.batch.micro_batches) if step.batch.training else planned.decisions.num_micro_batches
        is_new_number = planned.chooser is None and number != planned.decisions.num_micro_batches
        if is_other or was_part or is_new_number:
            specs = self._workers.spreading()
            planned.spread_over(specs if task.may_spread else specs[:1], number)
        task.stage()
        return Fitted(task=task.name, units=task.units, is_retried=is_retried)

    def widen(self, task: RunningTask) -> None:
        """Predict how a task's steps are spread over devices that have come, where it trains and has not been."""
        specs = self._workers.spreading()
        if task.life is Life.TRAINING and task.may_spread and task.planned.can_be_wider(len(specs)):
            self._planner.submit(self._widened, task, specs)

    def _widened(self, task: RunningTask, specs: Sequence[DeviceSpec]) -> None:
        serial = task.state.cut.serial
        try:
            spreading = task.planned.wider(specs)
        except Exception as error:  # it is trained on as many as before
            warn(f"hydra_engine: {task.name}: no wider spread is predicted: {error}")
            return
        self._common.later(partial(self._is_wider, task, spreading, serial))

    def _is_wider(self, task: RunningTask, spreading: Spreading, serial: int) -> None:
        may_spread = task.life is Life.TRAINING and task.may_spread and task.state.cut.serial == serial
        known = task.planned.decisions.spreading.spreads
        if may_spread and len(spreading.spreads) > len(known):
            spreads = (*known, *spreading.spreads[len(known) :])
            task.planned.decide(spreading=spreading._replace(spreads=spreads))
            self._common.due.append(SpreadsKnown(task.name, task.planned.spreads))

    # -- a step is committed

    def _commit(self, instruction: Commit) -> None:
        task = self._common.tasks[instruction.task]
        job = partial(self._committed, task, instruction)
        self._submit_in_order(task, instruction, "its commit", partial(self._timed, "commit", task.name, job))

    def _committed(self, task: RunningTask, instruction: Commit) -> Event:
        event = commit(task, self._common.events.put, training_step=instruction.training)
        now_s = self._common.trace.now_s()
        # Give back what the C library keeps of freed memory: tens of MB for each thread, mostly of the first steps.
        if instruction.training and now_s >= self._next_trim_s:
            self._next_trim_s = now_s + min(max(now_s, 0.1), TRIM_INTERVAL_S)
            return_free_memory()
        return event

    def _update(self, instruction: Update) -> None:
        task = self._common.tasks[instruction.task]
        released = None
        if task.state.pool.early_release:
            assert task.optimizer is not None
            released = Released(copy(task.state.staging), task.batch.epoch, task.optimizer.num_steps)
        job = partial(update, task, instruction.shard, released, self._common.events.put)
        label = f"{instruction.task}.{instruction.shard}"
        home = task.state.homes.of.get(instruction.shard)
        if home is not None:
            # A lane decides by itself on what it has told, so that nobody has to be woken.
            told = partial(_telling, task, "its optimizer", job, self._common.events.leave)
            self._workers.update(home.device, label, told)
            return
        task.state.homes.has_start = False
        self._submit_in_order(task, instruction, "its optimizer", partial(self._timed, "update", label, job))

    def _discard(self, instruction: Discard) -> None:
        state = self._common.tasks[instruction.task].state
        state.pool.gradients.take_back(state.cut.shards[instruction.shard])

    # -- a task ends

    def finish(self, instruction: Finish) -> None:
        """Conclude a task, save it as it has ended, give its memory back, and tell its end."""
        task = self._common.tasks[instruction.task]
        task.life = Life.ENDING
        self._saves.pass_over(task)
        # Not before its callbacks were told all: one of them may be planning another task.
        finished = partial(self._finished, task, is_settled=instruction.is_settled)
        self._common.when_told(task, partial(self._submit, task, "its end", finished))

    def _finished(self, task: RunningTask, *, is_settled: bool) -> None:
        # The last epoch's end is told while weights are where they were, and saved with what its calls leave.
        save = partial(self._submit, task, "its end", partial(self._save_end, task, is_settled=is_settled))
        task.close_homes()
        try:
            self._conclude(task)
        finally:
            task.notifier.when_told(partial(self._common.later, save))

    def _save_end(self, task: RunningTask, *, is_settled: bool) -> None:
        let_go = partial(self._common.later, partial(self._begin_end, task))

        def saved(error: BaseException | None) -> None:
            failed = _not_paused(task.name, error, is_saver=self._saves.report is not None)
            if task.end.is_paused and failed is not None:
                task.end.fail(Failed(task.name, failed, "its pause"))
            let_go()

        task.end.write(task.report)  # callbacks may have failed since
        if task.end.goes_back:

            def undone(is_saved: bool) -> None:
                if is_saved:
                    task.state.homes.has_start = False
                elif not task.state.homes.has_start:
                    task.end.goes_back = False
                    task.end.fail(home_lost(task, task.state.homes.lost_on))
                let_go()

            self._saves.end_undone(task, undone)
            return
        self._saves.end(task, self._how_it_ended(task), is_settled=is_settled, then=saved)

    def _conclude(self, task: RunningTask) -> None:
        """Find out what became of a task, and say so."""
        if task.end.ending is None and not self._common.is_interrupted:
            try:
                if task.optimizer is not None:
                    task.optimizer.secure(())  # a snapshot may be reading groups and schedule
                    task.optimizer.reach_epoch(task.planned.task.epochs)
                task.end.finish()
            except BaseException as error:
                task.is_torn = True
                task.end.fail(Failed(task.name, error, "its lr_scheduler, after the last epoch"))
        task.end.write(task.report)
        ending = task.end.ending
        if ending is not None and ending.kind is EndKind.FINISHED and not task.end.is_early:
            task.figures.end_evaluation()
            task.end_epoch()
            task.reach_epoch(task.planned.task.epochs)

    def _how_it_ended(self, task: RunningTask) -> str | None:
        """As a checkpoint says it; None: it was interrupted, and goes on with a resume."""
        lost = self._common.lost
        if lost is not None and task.name == lost.task:
            return LOST
        return None if task.end.ending is None or task.end.is_paused else task.end.ending.kind.value

    def _begin_end(self, task: RunningTask) -> None:
        """Submit a task's end. Who goes on with one that is paused may read through the same loader: not beside it."""
        end = partial(self._submit, task, "its end", partial(self._end, task))
        if task.end.is_paused and task.feed.is_out and not self._common.is_interrupted:
            task.feed.then = end
        else:
            end()

    def _end(self, task: RunningTask) -> None:
        """Give a task's memory back."""
        if task.end.goes_back and self._common.is_interrupted:
            if task.state.homes.has_start:  # nothing of it is saved for a resume
                task.end.fail(home_lost(task, task.state.homes.lost_on))
            else:
                task.end.stay()
        is_paused = task.end.is_paused
        try:
            try:
                self._workers.dismiss(task.state)
                task.state.homes.end()
                task.notifier.end_lending()
                doubts = task.state.observed.attributes.doubts(task.state.layout.shown)
                is_alone = len(self._common.tasks) == 1 and not self._common.forgotten
                share = task.updates_s / self._common.trace.now_s() if task.updates_s >= LEAST_WAITED_S else 0.0
                doubts = [
                    *doubts,
                    *_of_validation(task),
                    *_of_draws(task),
                    *(_of_updates(task, share) if is_alone else ()),
                ]
                task.planned.doubts += filter(None, [task.planned.calls.draws.message])
                task.planned.doubts += (f"{task.name}: {doubt}" for doubt in doubts)
                with self._common.opening:  # its set-up may be at it
                    if task.figures.best is not None and not task.end.is_paused:  # which goes on from its last step
                        task.figures.best.put_back()
                    task.state.close()
                if task.optimizer is not None and not is_paused:  # else they are on disk
                    task.report.ema_state = task.optimizer.ema_state()
                if task.optimizer is not None:
                    task.optimizer.drop_ahead()
                task.record = task.snapshot = task.optimizer = task.figures.best = None
                task.end.write(task.report)  # callbacks may have failed since
                self._common.loggers.end(task.name, task.report.status)
                if is_paused:
                    task.planned.is_paused = self._common.is_interrupted or task.planned.reader.close()
            finally:  # an iterator may raise as it is closed
                task.planned.leave()
            if not task.end.goes_back:
                task.notifier.end(is_paused=is_paused)
        finally:
            task.notifier.when_told(partial(self._common.later, partial(self._told, task)))

    def _told(self, task: RunningTask) -> None:
        task.life = Life.ENDED
        if task.end.goes_back and not self._common.is_interrupted:
            self._common.go_back(task)


# -- in a pool


def _telling(task: RunningTask, where: str, job: Callable[[], Event | None], put: Callable[[Event], None]) -> None:
    try:
        event = job()
    except BaseException as error:
        event = Failed(task.name, error, where, commit=True)
    if event is not None:
        put(event)


def commit(task: RunningTask, put: Callable[[Event], None], *, training_step: bool) -> Event:
    """Take the batch in progress over into the task's state, of which nothing was changed before.

    What the schedule raises is told to `put`: the step before it is committed all the same, with its updates.
    """
    state, report = task.state, task.report
    if task.end.is_stopped:
        return TaskStopped(report.name, uncommitted=True)
    batch, staging = task.batch, state.staging
    state.check_gradients()
    main_moved = task.draws_from_main and not state.end_of_forward().same_in_torch(batch.main)
    if not state.observed.draws and main_moved:
        raise RuntimeError(
            f"{report.name}: a layer drew random numbers at step {batch.step} and none at the sample, so that a "
            f"batch was read too early for exact results; let it draw at every step, or none"
        )
    if not training_step:
        task.figures.commit(batch)
        _take_buffers(state)
        return StepCommitted(report.name, training=False)
    nonfinite, optimizer = task.planned.task.nonfinite, task.optimizer
    measures = _measures(task)  # before an optimizer of scope "task" clips the gradients
    if nonfinite is not None and not math.isfinite(task.loss):
        return _not_finite(task, nonfinite)
    assert optimizer is not None
    task.is_torn = True  # until it is through
    state.num_commits += 1  # what devices hold of trained shards is of no more use
    try:
        record = task.record = optimizer.commit(staging, state.pool, batch.epoch)
    except BaseException as error:
        if task.planned.task.optimizer_scope == "shard":
            raise  # nothing is updated yet
        put(Failed(report.name, error, f"its optimizer: some weights may have the update of step {report.steps}"))
        return TaskStopped(report.name, uncommitted=True)
    state.loss_scale = optimizer.loss_scale
    if staging.buffers or task.planned.task.callbacks:  # which keep what they have seen
        state.homes.has_start = False
    _report_step(task, record, _learned(task, None if record.is_skipped else measures, put), measures)
    _take_buffers(state)
    if not state.task.read_ahead:  # whose loader may look at the user's modules
        state.layout.put_buffers(state.pool.buffers)
    task.note_commit()
    task.is_torn = False
    try:
        optimizer.end_step(record)
    except BaseException as error:
        task.is_torn = True  # the schedule is of no step: a resume goes on from what was saved before
        put(Failed(report.name, error, f"its lr_scheduler, after step {report.steps - 1}"))
    return StepCommitted(report.name, training=True)


def _not_paused(name: str, error: BaseException | None, *, is_saver: bool) -> Exception | None:
    """Return the error of a task that was to be paused, and could not be saved."""
    if not is_saver:
        return ValueError(
            f"{name}: a callback raised PauseTask, limit: an orchestrator with a checkpoint_dir, since a task is saved "
            f"while it is paused; give ModelOrchestrator one, or end the task with StopTask"
        )
    if error is None:
        return None
    failed = CheckpointError(f"{name} cannot be paused, and its model keeps its weights: it is not saved: {error}")
    failed.__cause__ = error
    return failed


def _take_buffers(state: TaskState) -> None:
    for index, value in state.staging.buffers.items():
        state.pool.buffers[index] = value


def _report_step(
    task: RunningTask, record: StepRecord, choice: StepChoice | None, measures: StepMeasures | None = None
) -> None:
    report = task.report
    if record.loss_scale is not None:
        report.loss_scales.append(record.loss_scale)
    if record.is_skipped:
        report.skipped_steps.append(report.steps)
    report.losses.append(task.loss)
    if choice is not None:
        report.adaptive.append(choice)
    report.steps += 1
    assert task.optimizer is not None
    norm = None if record.total_norm is None else float(record.total_norm)
    if norm is None and measures is not None and task.planned.task.loss_reduction != "sum":
        norm = math.sqrt(sum(measures.total))
    task.figures.end_step(task.batch, task.loss, task.optimizer.learning_rates(record), norm)


def _measures(task: RunningTask) -> StepMeasures | None:
    """Norms of the step's gradients, of an adaptive task."""
    state, batch = task.state, task.batch
    if state.norm_groups is None or batch.choice is None:
        return None
    return step_measures(
        state.staging,
        state.norm_groups,
        {shard.index: state.pool.owned(shard) for shard in state.cut.shards if shard.owned},
        state.pool.gradients.of,
        batch.choice.batch_size,
        sums_losses=state.task.loss_reduction == "sum",
        loss_scale=state.loss_scale,
    )


def _learned(task: RunningTask, measures: StepMeasures | None, put: Callable[[Event], None]) -> StepChoice | None:
    """Take a committed step into what the next choices follow from, and tell how devices would speed it up now.

    Return the step's own choice with its seconds, of an adaptive task.
    """
    chooser, choice, planned, clock = task.planned.chooser, task.batch.choice, task.planned, task.clock
    if chooser is None or choice is None or clock is None:
        return None
    parts = task.state.staging.parts
    num_devices = 1 if parts is None else len(parts.ranges)
    seconds = clock.end(num_devices=num_devices)
    most = len(planned.decisions.spreading.spreads)
    if chooser.learn(choice, seconds, num_devices, measures) and most > 1:
        speedups = chooser.speedups(most)
        if speedups != planned.decisions.speedups:
            planned.decide(speedups=speedups)
            put(SpreadsKnown(task.name, planned.spreads))
    return replace(choice, seconds=seconds)


def _not_finite(task: RunningTask, nonfinite: str) -> Event:
    """Do with a step as the task asks for: nothing of it is in the task's state, and nothing gets there."""
    name, number, loss = task.name, task.batch.step, task.loss
    if nonfinite == "raise":
        raise NonFiniteLoss(name, number, loss)
    if nonfinite == "stop":
        # Its callbacks have been told all that was before.
        task.end.stop(
            f"the loss of step {number} is {loss} (nonfinite='stop')",
            f"{name} stopped before step {number}, whose loss is {loss}\n",
        )
        return TaskStopped(name, uncommitted=True)
    assert task.optimizer is not None
    task.record = task.optimizer.skipped()
    _report_step(task, task.record, task.batch.choice)
    task.note_commit()
    return StepCommitted(name, training=True)


def update(task: RunningTask, index: int, released: Released | None, put: Callable[[Event], None]) -> Event:
    """Step the optimizer on a shard; a failure is told to `put` before the shard's turn is over.

    released: its step, with early release; else that is the last one that was committed.
    """
    state = task.state
    shard, optimizer = state.cut.shards[index], task.optimizer
    assert optimizer is not None
    try:
        if released is not None:
            optimizer.release(shard, released, state.pool)
        else:
            assert task.record is not None
            while not _updated(task, optimizer, shard, task.record):
                pass
        if (home := state.homes.of.get(index)) is not None:
            home.drop_gradients()  # not sooner: an update that is tried again needs them
    except BaseException as error:  # the shard's turn is over all the same: nothing must wait for it
        task.misses_update = True
        if (home := state.homes.of.get(index)) is not None:
            error = home.opened.explained(error)
        step = task.report.steps - 1 if released is None else released.num_steps
        behind = f"its optimizer: shard {index} misses the update of step {step}"
        put(Failed(task.report.name, error, behind))
    return ShardUpdated(task.report.name, index)


def _updated(task: RunningTask, optimizer: TaskOptimizer, shard: Shard, record: StepRecord) -> bool:
    """Update a shard; False where that raised and may be tried again, and the shard is as it was."""
    pool = task.state.pool
    before = optimizer.before(shard, pool, record) if task.retries.most else None
    try:
        optimizer.update(shard, pool, record)
    except BaseException as error:
        if before is None:
            raise
        before.put_back()
        (task.state.homes.of.get(shard.index) or pool).renew(pool.owned(shard))
        if not task.retries.allow(error, f"its optimizer, shard {shard.index},", task.report.steps - 1):
            raise
        return False
    return True


def _of_updates(task: RunningTask, share: float) -> list[str]:
    """Say what waiting for updates has cost a task that was alone, as a share of the run's time."""
    if share <= MOST_WAITED:
        return []
    kinds = " and ".join(type(each).__name__ for each in task.planned.task.callbacks if each.reads_model)
    return [
        f"its next batches waited for updates in {share:.0%} of its time, before {kinds} had the model; one that "
        f"does not read or change it may say so: reads_model = False"
    ]


def _of_draws(task: RunningTask) -> list[str]:
    """Say that micro-batches would draw in another order than the plain loop, if it was no other thread that drew."""
    if not (task.state.is_split and task.state.observed.draws_outside_torch):
        return []
    return [
        f"a layer, or another thread while it ran, drew from `random` or `numpy.random`, which micro-batches do in "
        f"another order than a plain loop; let layers draw from torch, or {task.state.split_by[1]}"
    ]


def _of_validation(task: RunningTask) -> list[str]:
    """Say that a task is through before its first validation was due: nothing was judged by one."""
    trained, report = task.planned.task, task.report
    is_due = trained.purpose is Purpose.TRAIN and trained.validation is not None and not report.validation_losses
    if not is_due or task.end.ending is None or task.end.ending.kind is not EndKind.FINISHED:
        return []
    judged = "" if trained.keep_best is None else f", and keep_best={trained.keep_best.by!r} had nothing to choose by"
    return [
        f"no validation took place, since validation_interval is {trained.validation_interval} and the task had "
        f"{report.steps} steps{judged}; give a smaller interval, or 'epoch'"
    ]
