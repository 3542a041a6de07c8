"""One task in one run: what is under way of it, beside what was planned, and what has come of it."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hydra_engine.checkpoints import Snapshot
from hydra_engine.data import Batch, RandomState, TaskPosition
from hydra_engine.display import TaskProgress
from hydra_engine.host import StepParts, StepRecord, TaskOptimizer, TaskState
from hydra_engine.planning import PlannedTask
from hydra_engine.run.notifier import Notifier
from hydra_engine.run.retries import Retries
from hydra_engine.schedule import DataFailed, Failed
from hydra_engine.system import DRAM_REMEDY, is_out_of_dram
from hydra_engine.tasks import FAILED, Evaluation, EvaluationMeans, ModelWatch, Revision, TaskReport, batch_size, joined
from partitioners.precision import cast


@dataclass(eq=False, kw_only=True)
class RunningTask:
    """Touched by the thread that decides, or by the one job of the task's that commits, fits or ends it."""

    planned: PlannedTask
    report: TaskReport
    notifier: Notifier
    retries: Retries
    num_steps: int | None = None
    optimizer: TaskOptimizer | None = None
    is_set_up: bool = False  # or is over already; before, its reader's thread calls the user's factories
    is_scheduled: bool = False  # the scheduler knows it
    is_reading: bool = False
    epoch_ahead: int | None = None  # whose iterator is opened once its callbacks have returned
    ended_epoch: int = -1  # the last one that was told to be over
    is_ending: bool = False  # it is over, and what it leaves is being put in order
    next_batch: Batch | None = None  # read, not begun
    batch: Batch | None = None
    is_committed: bool = False  # that batch
    layers_moved_reader: bool = False  # the next batch is read from where this one's layers left the random stream
    is_new_shape: bool = False  # this batch is the first of its shape: a device may still run out in its backward
    is_spread: bool = False  # the batch in progress, over several devices
    read_from: RandomState | None = None  # where the layers had left the stream, for the batch that was asked for last
    owes_read: bool = False  # the next batch was asked for, and is read once this one is committed
    may_spread: bool = True  # over several devices; False once a part of a step did not fit
    to_begin_again: Exception | None = None  # why the step in progress has to be fitted
    is_retried: bool = False  # the step in progress begins again as it is: it fits
    record: StepRecord | None = None
    means: EvaluationMeans | None = None  # of the evaluation in progress
    evaluation: Evaluation | None = None  # the last that is through
    position: TaskPosition | None = None  # after the last step that was committed, where positions are kept
    buffers: list[Tensor] = field(default_factory=list)  # as that step left them
    shown_buffers: list[Tensor] = field(default_factory=list)  # that the user's model has now
    snapshot: Snapshot | None = None  # the last that was taken; done with once it is written
    waits_to_commit: bool = False  # for its callbacks
    is_committing: bool = False  # from when they have returned to the event
    num_updating: int = 0  # shards whose update of the last step is not through
    is_releasing: bool = False  # shards may be updated before the step is committed
    is_torn: bool = False  # part of its state is of another step than the rest
    evaluated_parts: set[tuple[int, int]] = field(default_factory=set)  # (samples, parts) that were reported
    outputs: list[Any] = field(default_factory=list)  # of the batch that was predicted last; the caller takes it

    @property
    def state(self) -> TaskState:
        """Its units' state."""
        return self.planned.state

    def watch(self, optimizer: TaskOptimizer | None) -> None:
        """From now on see what callbacks do to the model: devices have their copies of it."""
        task, pool = self.planned.task, self.state.pool
        if task.callbacks:
            watch = ModelWatch(task.model, task.model.__dict__["source"], task.loss_fn)
            is_steady = not pool.early_release  # else weights change at any time
            stays = is_steady or self.state.steps_on_device or (optimizer is not None and optimizer.steps_in_place)
            weights = [slot.parameter for slot in self.state.layout.trainable_slots()]
            watch.follow(weights, is_steady=is_steady, stays=stays)
            self.notifier.watch(watch, self.show_buffers)

    def show_buffers(self) -> None:
        """Give the user's model the buffers that the last step left, for its callbacks; its weights are there."""
        values, shown = self.state.pool.buffers, self.shown_buffers
        changed = {k for k, value in enumerate(values) if k >= len(shown) or value is not shown[k]}
        if changed:
            self.state.layout.put_buffers(values, changed)
            self.shown_buffers = list(values)

    def secure(self, slots: Iterable[int] | None = None) -> None:
        """Wait until a checkpoint that is being written can do without these parameters as they are; None: all."""
        if self.snapshot is not None:
            self.snapshot.secure(slots)

    def note_position(self) -> None:
        """The batch in progress is committed: the next begins where its layers have left the random stream."""
        batch = self.batch
        if batch is not None and batch.position is not None:
            random = self.state.end_of_forward() if self.draws_from_main else batch.main
            self.position, self.buffers = batch.position.with_random(random), list(self.state.pool.buffers)

    @property
    def draws_from_main(self) -> bool:
        """Whether layers draw from the task's main stream in this batch: micro-batches have streams of their own."""
        assert self.batch is not None
        return self.state.cut.num_micro_batches == 1 or not self.batch.training

    @property
    def loss(self) -> float:
        """Of the step in progress, once its units are through: of all its micro-batches."""
        losses = self.state.staging.losses
        parts = [losses[m] for m in range(self.state.staging.num_micro_batches)]
        return parts[0] if self.state.cut.num_micro_batches == 1 else sum(parts)

    def nonfinite_loss(self) -> float | None:
        """The step's loss, where that is not finite and the task does not take any."""
        if self.planned.task.nonfinite is None:
            return None
        return None if math.isfinite(loss := self.loss) else loss

    @property
    def updates(self) -> tuple[int, ...]:
        """The shards that have an update of their own; none where the whole task is stepped at its commit."""
        if self.state.task.optimizer_scope == "task":
            return ()
        return tuple(shard.index for shard in self.state.cut.shards if shard.owned)

    @property
    def progress(self) -> TaskProgress:
        """Where it stands."""
        losses = self.report.losses
        return TaskProgress(self.report.name, self.report.steps, self.num_steps, losses[-1] if losses else None)

    def revise(self, reason: str) -> None:
        """Report that the task goes on otherwise than planned."""
        state = self.state
        self.report.revisions.append(
            Revision(
                step=self.report.steps,
                boundaries=list(state.cut.boundaries),
                accumulation_steps=state.cut.num_micro_batches,
                reason=reason,
            )
        )

    def take(self) -> None:
        """Make the batch that was read the one in progress; with it, it is known what the one before it ended."""
        batch, following = self.batch, self.next_batch
        assert following is not None
        if batch is not None and not batch.training and following.evaluation != batch.evaluation:
            self.end_evaluation()
        if batch is not None and following.epoch > batch.epoch:
            self.end_epoch()
        self.batch, self.next_batch, self.is_committed = following, None, False
        self.layers_moved_reader = False

    def end_epoch(self) -> None:
        """Tell, once, that the epoch of the last batch is over, its validation too."""
        if self.batch is not None and self.batch.epoch > self.ended_epoch:
            self.end_evaluation()
            self.ended_epoch = self.batch.epoch
            self.notifier.epoch(self.batch.epoch)

    def stage(self, num_parts: int = 1) -> None:
        """Set the batch in progress before its first unit, spread over so many devices."""
        batch = self.batch
        assert batch is not None
        if self.optimizer is not None:
            self.optimizer.epoch = batch.epoch
        staging, pool = self.state.staging, self.state.pool
        self.state.progress.begin_parts(num_parts, batch.training)
        staging.begin(batch.boundaries, [w for _, _, w in batch.micro_batches], batch.start, batch.signature)
        if num_parts > 1:
            slots = self.state.layout.slots
            staging.parts = StepParts(
                staging.num_micro_batches,
                num_parts,
                in_sums=self.planned.spreads[num_parts - 1].in_sums,
                is_narrow=self.state.layout.narrow is not None,
                place=lambda index: pool.gradients.of(slots[index]),
                fit=lambda index, gradient: pool.gradients.place(slots[index], gradient),
                has_gradient=staging.has_gradient,
            )

    def commit_evaluation(self) -> None:
        """Take the evaluated batch in progress into its evaluation's means."""
        batch, staging = self.batch, self.state.staging
        assert batch is not None
        if self.means is None:
            self.means = EvaluationMeans(sums_losses=self.planned.task.loss_reduction == "sum")
        self._note_parts(batch)
        # In one piece, unless it did not fit so.
        loss = sum(staging.losses[m] * weight for m, weight in enumerate(staging.given.weights))
        metrics = joined([(batch_size(x), staging.metrics[m]) for m, (x, _, _) in enumerate(batch.micro_batches)])
        self.means.add(loss, batch.weight, metrics, batch.num_samples, len(batch.micro_batches))

    def _note_parts(self, batch: Batch) -> None:
        """Report, once for each size, that an evaluation batch was computed in parts.

        Refuse it where the parts drew, or changed buffers, as the whole batch would have done once.
        """
        number, staging = len(batch.micro_batches), self.state.staging
        if number == 1:
            return
        ends = [staging.random[len(self.state.cut.shards), m] for m in range(number)]
        draws = not all(end.same_as(start) for end, start in zip(ends, staging.given.start, strict=True))
        if draws or staging.buffers:
            does = "draws random numbers" if draws else "changes a buffer"
            raise ValueError(
                f"{self.report.name}: evaluation batch {batch.step} of {batch.num_samples} samples is too large for a "
                f"layer alone, and in {number} parts a layer that {does} in eval() gives other figures; give smaller "
                f"batches, or use a device with more memory"
            )
        if (batch.num_samples, number) not in self.evaluated_parts:
            self.evaluated_parts.add((batch.num_samples, number))
            self.revise(
                f"evaluation batches of {batch.num_samples} samples are too large for a layer alone, and are computed "
                f"in {number} parts: figures may differ from those of whole ones, in their last bits or, where a layer "
                f"or the loss does not treat each sample by itself, by more"
            )

    def end_evaluation(self) -> None:
        """Report the figures of the evaluation in progress, if there is one; nothing was committed after it."""
        if self.means is None:
            return
        self.evaluation = found = self.means.result()
        self.means = None
        self.report.validation_losses.append(found.loss)
        self.report.validation_steps.append(self.report.steps)
        for name, value in found.metrics.items():
            self.report.validation_metrics.setdefault(name, []).append(value)
        self.notifier.validation()

    def commit_prediction(self) -> None:
        """Keep what left the last shard for the caller: in memory of its own, in float32 as a loss would take it."""
        output = self.state.staging.take(len(self.state.cut.shards), 0)
        narrow = self.state.layout.narrow
        self.outputs.append(output.build(output.tensors if narrow is None else cast(output.tensors, torch.float32)))

    def note_failure(self, event: Failed | DataFailed) -> None:
        """Report what was raised, unless something was before."""
        if self.report.exception is None:
            unit = str(event.unit or "") if isinstance(event, Failed) else ""
            where = " in " + ", ".join(filter(None, (unit, event.where)))
            text = "".join(traceback.format_exception(event.error))
            self.report.status, self.report.exception = FAILED, event.error
            remedy = f"{DRAM_REMEDY}\n" if is_out_of_dram(event.error) else ""
            self.report.error = f"{event.task} failed{where}\n{text}{remedy}"
