"""What makes a step part of a task's state: its commit, and after it, or before, one update for each shard."""

from __future__ import annotations

from collections.abc import Callable

from hydra_engine.data import Batch
from hydra_engine.errors import NonFiniteLoss
from hydra_engine.host import Shard, StepRecord, TaskOptimizer
from hydra_engine.run.running_task import RunningTask
from hydra_engine.schedule import Event, Failed, ShardUpdated, StepCommitted, TaskStopped
from hydra_engine.tasks import Purpose


def commit(training: RunningTask, put: Callable[[Event], None], *, training_step: bool) -> Event:
    """Take the batch in progress over into the task's state, of which nothing was changed before.

    What the schedule raises is told to `put`: the step before it is committed all the same, with its updates.
    """
    state, batch, report = training.state, training.batch, training.report
    if training.notifier.is_stopped:
        return TaskStopped(report.name, uncommitted=True)
    assert batch is not None
    staging = state.staging
    state.check_draws()
    main_moved = training.draws_from_main and not state.end_of_forward().same_as(batch.main)
    if not state.draws and main_moved:
        raise RuntimeError(
            f"{report.name}: a layer drew random numbers at step {batch.step} and none at the sample, so that a "
            f"batch was read too early for exact results; let it draw at every step, or none"
        )
    if training_step and (loss := training.nonfinite_loss()) is not None:
        return _not_finite(training, batch, loss)
    if training_step:
        assert training.optimizer is not None
        training.is_torn = True  # until it is through
        state.num_commits += 1  # what devices hold of trained shards is of no more use
        try:
            record = training.record = training.optimizer.commit(staging, state.pool, batch.epoch)
        except BaseException as error:
            if training.planned.task.optimizer_scope == "shard":
                raise  # nothing is updated yet
            put(Failed(report.name, error, f"its optimizer: some weights may have the update of step {report.steps}"))
            return TaskStopped(report.name, uncommitted=True)
        state.loss_scale = training.optimizer.loss_scale
        if record.loss_scale is not None:
            report.loss_scales.append(record.loss_scale)
        if record.is_skipped:
            report.skipped_steps.append(report.steps)
        report.losses.append(training.loss)
        report.steps += 1
    elif training.planned.task.purpose is Purpose.PREDICT:
        training.commit_prediction()
    else:
        training.commit_evaluation()
    for index, value in staging.buffers.items():
        state.pool.buffers[index] = value
    if training_step:
        if not state.task.read_ahead:  # whose loader may look at the user's modules
            state.layout.put_buffers(state.pool.buffers)
        training.note_position()
        training.is_torn = False
        _move_schedule(training, put)
    return StepCommitted(report.name, training_step)


def _move_schedule(training: RunningTask, put: Callable[[Event], None]) -> None:
    optimizer, record = training.optimizer, training.record
    assert optimizer is not None
    assert record is not None
    try:
        optimizer.end_step(record)
    except BaseException as error:
        training.is_torn = True  # the schedule is of no step: a resume goes on from what was saved before
        put(Failed(training.report.name, error, f"its lr_scheduler, after step {training.report.steps - 1}"))


def _not_finite(training: RunningTask, batch: Batch, loss: float) -> Event:
    """Do with a step as the task asks for: nothing of it is in the task's state, and nothing gets there."""
    report, nonfinite = training.report, training.planned.task.nonfinite
    error = NonFiniteLoss(report.name, batch.step, loss)
    if nonfinite == "raise":
        raise error
    if nonfinite == "stop":
        training.notifier.is_stopped = True  # its callbacks have been told all that was before
        report.error = f"{report.name} stopped before step {batch.step}, whose loss is {loss}\n"
        return TaskStopped(report.name, uncommitted=True)
    assert training.optimizer is not None
    training.record = training.optimizer.skipped()
    if training.record.loss_scale is not None:
        report.loss_scales.append(training.record.loss_scale)
    report.skipped_steps.append(report.steps)
    report.losses.append(loss)
    report.steps += 1
    training.note_position()
    return StepCommitted(report.name, training=True)


def update(training: RunningTask, index: int, put: Callable[[Event], None]) -> Event:
    """Step the optimizer on a shard; a failure is told to `put` before the shard's turn is over."""
    state = training.state
    shard, optimizer = state.shards[index], training.optimizer
    assert optimizer is not None
    try:
        if state.pool.early_release:
            assert training.batch is not None
            optimizer.release(shard, state.staging, state.pool, training.batch.epoch)
        else:
            assert training.record is not None
            while not _updated(training, optimizer, shard, training.record):
                pass
    except BaseException as error:  # the shard's turn is over all the same: nothing must wait for it
        training.is_torn = True
        step = training.report.steps - (0 if state.pool.early_release else 1)
        behind = f"its optimizer: shard {index} misses the update of step {step}"
        put(Failed(training.report.name, error, behind))
    return ShardUpdated(training.report.name, index)


def _updated(training: RunningTask, optimizer: TaskOptimizer, shard: Shard, record: StepRecord) -> bool:
    """Update a shard; False where that raised and may be tried again, and the shard is as it was."""
    pool = training.state.pool
    before = optimizer.before(shard, pool, record) if training.retries.are_asked_for else None
    try:
        optimizer.update(shard, pool, record)
    except BaseException as error:
        if before is None:
            raise
        before.put_back()
        pool.renew(pool.owned(shard))
        if not training.retries.allow(error, f"its optimizer, shard {shard.index},", training.report.steps - 1):
            raise
        return False
    return True
