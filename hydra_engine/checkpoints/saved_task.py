"""A task as a checkpoint has it, and put back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hydra_engine.checkpoints.checkpoint import Checkpoint
from hydra_engine.checkpoints.nested import losses_from_state
from hydra_engine.checkpoints.snapshot import FROZEN, OPTIMIZER, STATE, WEIGHTS
from hydra_engine.data import TaskPosition, copy_of, residue
from hydra_engine.errors import CheckpointError
from hydra_engine.host import ModelLayout, TaskOptimizer, with_averages
from hydra_engine.tasks import FAILED, FINISHED, ModelTask, Retry, Revision, TaskReport

LOST = "lost"  # it struck a device
_REMEDY = "resume with the model and the loss_fn that were saved"


class SavedTask:
    """One task in a checkpoint: read at once but for weights and optimizer, which are read where they belong.

    over: how it had ended, which may have been noted after it was saved: None,
    "finished", "failed", "stopped" or "lost". Raises CheckpointError where the checkpoint has changed.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, over: str | None) -> None:
        self._checkpoint = checkpoint
        self._name = name
        self._state: dict[str, Any] = checkpoint.read_nested(name, STATE)
        self._optimizer: dict[str, Any] | None = None
        self.over = over
        self.steps: int = self._state["steps"]
        self.seed: int = self._state["seed"]
        self.accumulation_steps: int = self._state["accumulation_steps"]
        self.position = TaskPosition.from_state(self._state["position"])

    def goes_on(self, task: ModelTask) -> bool:
        """Whether there is more to train: one that has failed is tried again, one that struck a device is not."""
        if self.over == FINISHED:
            return task.epochs > self.position.epoch + 1
        return self.over in (None, FAILED)

    def put_weights(self, task: ModelTask, layout: ModelLayout) -> None:
        """Give the user's model the weights and buffers of then, for a layout that is made anew.

        Raises ValueError where it is another model.
        """
        trainable: dict[str, Tensor] = {}
        frozen: dict[str, Tensor] = {}
        other: dict[str, Tensor] = {}  # a loss's
        for name, slot, is_of_loss in layout.named_slots():
            (trainable if slot.trainable else other if is_of_loss else frozen)[name] = slot.parameter.data
        buffers, of_loss = self._state["buffers"], self._state["loss_parameters"]
        try:
            if len(buffers) != len(layout.buffers):
                raise ValueError(f"it has {len(layout.buffers)} buffers, and was saved with {len(buffers)}; {_REMEDY}")
            if {name: each.shape for name, each in other.items()} != {n: each.shape for n, each in of_loss.items()}:
                raise ValueError(f"its loss holds other parameters; {_REMEDY}")
            own = {name: torch.empty_like(buffers[number]) for name, number in layout.persistent_buffers().items()}
            self._checkpoint.read_tensors(self._name, WEIGHTS, into={**trainable, **own})
            if frozen or FROZEN in self._checkpoint.files(self._name):
                self._checkpoint.read_tensors(self._name, FROZEN, into=frozen)
        except ValueError as error:
            raise ValueError(f"{self._name}: the model is not the one that was saved: {error}") from error
        for name, parameter in other.items():
            parameter.copy_(of_loss[name])
        # Earlier checkpoints tell nothing of addresses: then they are those of the model that goes on.
        starts = self._state.get("buffer_residues") or [residue(buffer) for buffer in layout.buffers]
        layout.put_buffers([copy_of(value, start) for value, start in zip(buffers, starts, strict=True)])
        weights = self._state.get("weight_residues", {})
        for slot in layout.trainable_slots():
            start = weights.get(slot.name, residue(slot.parameter))
            if start != residue(slot.parameter):
                slot.parameter.data = copy_of(slot.parameter.data, start)

    def put_optimizer(self, optimizer: TaskOptimizer) -> None:
        """Let a task's optimizer and schedule go on as they stood. Raises ValueError where they are of another kind."""
        state, self._optimizer = self._optimizer or self._read_optimizer(), None
        optimizer.restore(state, self._state["schedule"])

    def read_optimizer(self) -> None:
        """Have it in DRAM from now on: the checkpoint may be removed before it is put back."""
        self._optimizer = self._read_optimizer()

    def _read_optimizer(self) -> dict[str, Any]:
        state: dict[str, Any] = self._checkpoint.read_nested(self._name, OPTIMIZER)
        return state

    def ema_state(self, task: ModelTask, layout: ModelLayout) -> dict[str, Tensor] | None:
        """As `TaskReport.ema_state` of a task that is over."""
        averages = (self._optimizer or self._read_optimizer())["averages"]
        slots = {slot.name: slot for slot in layout.trainable_slots()}
        by_id = {id(slots[name].parameter): value for name, value in averages.items()}
        return with_averages(task.model, by_id) if averages else None

    def report(self, *, goes_on: bool = False) -> TaskReport:
        """What had become of it; where it goes on, without a validation that will run again, and what ended it."""
        state, steps = self._state, self.steps
        num = sum(not goes_on or step < steps for step in state["validation_steps"])
        report = TaskReport(name=self._name, seed=self.seed, steps=steps)
        report.losses = losses_from_state(state["losses"])
        report.validation_losses = losses_from_state(state["validation_losses"])[:num]
        report.validation_steps = list(state["validation_steps"])[:num]
        report.validation_metrics = {
            name: losses_from_state(values)[:num] for name, values in state["validation_metrics"].items()
        }
        report.loss_scales = losses_from_state(state["loss_scales"])
        report.skipped_steps = list(state["skipped_steps"])
        report.revisions = [Revision(**each) for each in state["revisions"]]
        report.retries = [Retry(**each) for each in state["retries"]]
        if not goes_on and self.over is not None:
            report.status = FAILED if self.over == LOST else self.over
            report.error = state["error"]
            if report.status == FAILED:
                report.error = _struck(self._name, state["error"])
                report.exception = CheckpointError(report.error)
        return report


def never_committed(task: ModelTask, name: str) -> TaskReport:
    """The report of a task that had struck a device before its first commit."""
    error = _struck(name, None)
    return TaskReport(name=name, seed=task.seed, status=FAILED, error=error, exception=CheckpointError(error))


def _struck(name: str, error: str | None) -> str:
    text = (
        f"{name} had struck a device before, and is not tried again, since its data would do so again; correct the "
        f"data, and give the task another name to train it from the beginning"
    )
    return text if error is None else f"{text}\n{error}"
