"""A task in a checkpoint, and putting it back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from hydra_engine.checkpoints.checkpoint import Checkpoint
from hydra_engine.checkpoints.snapshot import BEST, FROZEN, OPTIMIZER, STATE, WEIGHTS
from hydra_engine.data import TaskPosition, copy_of, identical, seeded
from hydra_engine.errors import CheckpointError
from hydra_engine.host import BestWeights, ModelLayout, TaskOptimizer, with_averages
from hydra_engine.tasks import (
    FAILED,
    FINISHED,
    BatchChooser,
    Best,
    Callback,
    ModelTask,
    Retry,
    Revision,
    StepChoice,
    TaskReport,
    is_called,
    restore_attributes,
)

LOST = "lost"  # how a task ended whose unit brought a device down
_REMEDY = "resume with the model and the loss_fn that were saved"


class SavedTask:
    """One task in a checkpoint. Weights and optimizer are read straight into their places, all else at once.

    over: None, or how it ended, maybe noted later. Raises CheckpointError if the checkpoint has changed.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, over: str | None) -> None:
        self._checkpoint = checkpoint
        self._name = name
        self._state: dict[str, Any] = checkpoint.read_nested(name, STATE)
        self._optimizer: dict[str, Any] | None = None
        self._best: dict[str, Tensor] | None = None
        self.over = over
        self.steps: int = self._state["steps"]
        self.seed: int = self._state["seed"]
        self.accumulation_steps: int = self._state["accumulation_steps"]
        self.max_devices: int | None = self._state.get("max_devices")
        self.position = TaskPosition.from_state(self._state["position"])
        self.messages: list[str] = []  # settings of the program that do not count
        # Another task's, in whose state it begins: nothing of its own was saved yet.
        self.is_fork = "fork_of" in checkpoint.data["tasks"].get(name, {})

    def begin(self, task: ModelTask) -> None:
        """Give a task the seed that it had; a fork keeps its own, and draws from its own random stream from now on."""
        if not self.is_fork:
            if task.is_seeded and task.seed != self.seed:
                self.messages.append(
                    f"{self._name}: seed: {task.seed} in the program, {self.seed} in the checkpoint, which counts; "
                    f"to train with another seed, give the task another name="
                )
            task.seed = self.seed
            return
        self.seed = task.seed
        random = self.position.loader.random._replace(torch=seeded(task.seed), device=task.seed)
        self.position = self.position.with_random(random)

    def goes_on(self, task: ModelTask) -> bool:
        """Return True if there is more to train. A failed task is tried again, one that struck a device is not."""
        if self.over == FINISHED:
            best, patience = self._state.get("best"), None if task.keep_best is None else task.keep_best.patience
            has_waited = best is not None and patience is not None and best["num_worse"] >= patience
            return task.epochs > self.position.epoch + 1 and not has_waited
        return self.over in (None, FAILED)

    def put_weights(self, task: ModelTask, layout: ModelLayout, held: Collection[int] = ()) -> None:
        """Put the saved weights and buffers into the user's model, for a new layout; ValueError if it is another.

        held: addresses of frozen weights that tasks which train have, too. They are compared, and not written to.
        """
        self._check_best(task)
        self.check_adapts(task)
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
            if frozen or FROZEN in self._checkpoint.parts(self._name):
                apart = {name: torch.empty_like(each) for name, each in frozen.items() if each.data_ptr() in held}
                self._checkpoint.read_tensors(self._name, FROZEN, into={**frozen, **apart})
                for name, saved in apart.items():
                    if not identical(saved, frozen[name]):
                        raise ValueError(
                            f"its frozen parameter {name}, which a task that trains has, too, has other values than "
                            f"were saved; give it one of its own"
                        )
        except ValueError as error:
            raise ValueError(f"{self._name}: the model is not the one that was saved: {error}") from error
        for name, parameter in other.items():
            parameter.copy_(of_loss[name])
        layout.put_buffers([copy_of(value, 0) for value in buffers])

    def put_optimizer(self, optimizer: TaskOptimizer) -> list[str]:
        """Let a task's optimizer and schedule go on as they stood; returns what the program gives otherwise.

        Raises ValueError if they are of another kind.
        """
        state, self._optimizer = self._optimizer_state(), None
        try:
            found = optimizer.restore(state, self._state["schedule"], is_fork=self.is_fork)
        except ValueError as error:
            raise ValueError(f"{self._name}: {error}") from error
        return [f"{self._name}: {each}" for each in found]

    def read_optimizer(self) -> None:
        """Read optimizer and best weights into DRAM now: the checkpoint may be removed before they are put back."""
        self._optimizer = self._optimizer_state()
        self._best = self._best_weights()

    def _check_best(self, task: ModelTask) -> None:
        best = self._state.get("best")
        if best is None or task.keep_best is None:
            return
        saved, now = (best["by"], best["direction"]), (task.keep_best.by, task.keep_best.direction)
        if saved != now:
            raise ValueError(
                f"{self._name}: keep_best: {now[0]!r} with direction {now[1]!r}, and it was saved with {saved[0]!r} "
                f"and {saved[1]!r}, whose values do not compare; resume with those, or without keep_best"
            )

    def check_adapts(self, task: ModelTask) -> None:
        """Refuse a task whose batches adapt where those that were saved did not, and the other way round."""
        did = self._state.get("adaptive") is not None
        if did != task.adapts:
            kinds = ("did not adapt", "do") if task.adapts else ("adapted", "do not")
            raise ValueError(
                f"{self._name}: its batches {kinds[0]} when it was saved, and {kinds[1]} now; resume with the loader "
                f"that was saved, of which autoscale_batch_size() was {'not ' if task.adapts else ''}called"
            )

    def put_chooser(self, chooser: BatchChooser) -> None:
        """Let a task's choices follow from what was learned before."""
        chooser.load_state_dict(self._state["adaptive"]["measured"])

    @property
    def is_changed(self) -> bool:
        """True if callbacks had changed the model."""
        return bool((self._state.get("called") or {}).get("is_changed"))

    def put_callbacks(self, callbacks: Sequence[Callback], *roots: object) -> None:
        """Let callbacks and what they have changed of modules, `roots`, be as they were saved."""
        called = self._state.get("called")
        if called is None:
            return
        restore_attributes(called["attributes"], *roots)
        saved, kinds = called["callbacks"], [type(each).__qualname__ for each in callbacks]
        if any(state for _, state in saved) and [kind for kind, _ in saved] != kinds:
            raise ValueError(
                f"{self._name}: callbacks: {', '.join(kinds)}, expected {', '.join(kind for kind, _ in saved)}, whose "
                f"state was saved; resume with those, in the same order"
            )
        for callback, (_, state) in zip(callbacks, saved, strict=False):
            if state:
                callback.load_state_dict(state)
        may_change = (each for each in callbacks if each.reads_model)
        forgets = [type(each).__name__ for each in may_change if not is_called([each], "state_dict")]
        if self.is_changed and forgets:
            self.messages.append(
                f"{self._name}: a callback has changed the model, and {', '.join(forgets)} has no state_dict(): the "
                f"weights are those that were saved, and what it keeps itself begins anew"
            )

    def put_best(self, weights: BestWeights) -> None:
        """Let a task go on with its best weights, if some were saved."""
        best = self._state.get("best")
        if best is not None:
            values = {name: value for name, value in best.items() if name != "buffers"}
            weights.restore(Best(**values), self._best_weights(), best["buffers"])
            self._best = None

    def put_best_into_model(self, layout: ModelLayout) -> None:
        """Put the best weights into the model of a task that is over, if some were saved."""
        if weights := self._best_weights():
            for slot in layout.trainable_slots():
                slot.parameter.data.copy_(weights[slot.name])
            layout.put_buffers([copy_of(buffer) for buffer in self._state["best"]["buffers"]])

    def _best_weights(self) -> dict[str, Tensor]:
        if self._best is not None:
            return self._best
        has_best = BEST in self._checkpoint.parts(self._name)
        return self._checkpoint.read_tensors(self._name, BEST) if has_best else {}

    def _optimizer_state(self) -> dict[str, Any]:
        return self._optimizer or dict(self._checkpoint.read_nested(self._name, OPTIMIZER))

    def ema_state(self, task: ModelTask, layout: ModelLayout) -> dict[str, Tensor] | None:
        """Return `TaskReport.ema_state` of a task that has ended."""
        averages = self._optimizer_state()["averages"]
        slots = {slot.name: slot for slot in layout.trainable_slots()}
        by_id = {id(slots[name].parameter): value for name, value in averages.items()}
        return with_averages(task.model, by_id) if averages else None

    def report(self, task: ModelTask, *, goes_on: bool = False) -> TaskReport:
        """Return the task's report as saved. If it goes on: without its end, or a validation that will run again."""
        state, steps = self._state, self.steps
        num = sum(not goes_on or step < steps for step in state["validation_steps"])
        report = TaskReport(name=self._name, seed=self.seed, steps=steps, hparams=dict(task.hparams))
        report.losses = state["losses"].tolist()
        report.validation_losses = state["validation_losses"].tolist()[:num]
        report.validation_steps = list(state["validation_steps"])[:num]
        metrics = state["validation_metrics"].items()
        report.validation_metrics = {name: values.tolist()[:num] for name, values in metrics}
        report.loss_scales = state["loss_scales"].tolist()
        report.skipped_steps = list(state["skipped_steps"])
        best = state.get("best")
        if best is not None and task.keep_best is not None:
            report.best_step, report.best_value = best["step"], best["value"]
        adaptive = state.get("adaptive")
        report.adaptive = [] if adaptive is None else StepChoice.from_columns(adaptive["choices"])
        report.revisions = [Revision(**each) for each in state["revisions"]]
        report.retries = [Retry(**each) for each in state["retries"]]
        if not goes_on and self.over is not None:
            report.status = FAILED if self.over == LOST else self.over
            report.error = state["error"]
            report.stopped_early = state.get("stopped_early", False)
            report.stop_reason = state.get("stop_reason")
            if report.status == FAILED:
                report.error = _struck(self._name, state["error"])
                report.exception = CheckpointError(report.error)
        return report


def never_committed(task: ModelTask, name: str) -> TaskReport:
    """Return the report of a task that struck a device before its first commit."""
    error = _struck(name, None)
    report = TaskReport(name=name, seed=task.seed, status=FAILED, hparams=dict(task.hparams))
    report.error, report.exception = error, CheckpointError(error)
    return report


def _struck(name: str, error: str | None) -> str:
    text = (
        f"{name} had struck a device before, and is not tried again, since its data would do so again; correct the "
        f"data, and give the task another name to train it from the beginning"
    )
    return text if error is None else f"{text}\n{error}"
