"""A task at a step boundary, for a checkpoint that is written while the task goes on.

    thread that decides        Snapshot(...)     between the last update of a step and the next commit
    optimizer pool             capture()         copies Python values, and notes tensors where they lie
    who changes a tensor       secure(slots)     first copies tensors that are not written yet
    thread that writes         parts ... done()

So a tensor is copied only if it changes before it is written.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from hydra_engine.checkpoints.nested import flatten, losses_to_state
from hydra_engine.checkpoints.tensors import MovingTensor, Tensors
from hydra_engine.data import TaskPosition
from hydra_engine.host import BestWeights, Slot, TaskOptimizer, TaskState
from hydra_engine.system import dram
from hydra_engine.tasks import BatchChooser, Best, StepChoice, TaskReport

# A task's parts.
WEIGHTS = "weights"
BEST = "best"  # those of the best step, of parameters by name
FROZEN = "frozen"  # weights that do not change
STATE = "state"
OPTIMIZER = "optimizer"

# The share of available DRAM that copies leave alone. If the rest is not enough, updates wait for the disk.
FREE_SHARE = 0.1
LOOK_S = 0.01  # between two looks for room, of an update that waits for the disk


class LastCommit(NamedTuple):
    """The task after the last step that was committed."""

    position: TaskPosition
    buffers: list[Tensor]


class _BestStep(NamedTuple):
    """The best so far, with the weights, by slot, and buffers of its step, if there is one."""

    best: Best
    weights: dict[int, Tensor]
    buffers: list[Tensor]


class TaskToSave(Protocol):
    """A `PlannedTask` of planning/planned.py, as far as a snapshot asks it."""

    state: TaskState
    report: TaskReport

    @property
    def chooser(self) -> BatchChooser | None: ...


class Snapshot:
    """One task at one step. `secure` is for any thread, all else for one thread after the other.

    over: None, or how the task ended: "finished", "failed", "stopped", "lost". error: the one that `capture` raised.
    parts: a checkpoint's tensors of the task, until `done`. frozen_version: grows as callbacks write to frozen weights.
    """

    def __init__(
        self,
        task: TaskToSave,
        optimizer: TaskOptimizer,
        commit: LastCommit,
        count: Callable[..., None],
        *,
        over: str | None = None,
        best: BestWeights | None = None,
        called: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """`count`: told what saving costs those who train. called: returns what callbacks keep."""
        report = task.report
        self.steps = report.steps
        self.over = over
        self.loss = report.losses[-1] if report.losses and math.isfinite(report.losses[-1]) else None
        self.error: BaseException | None = None
        self.parts: dict[str, Tensors] = {}
        self.frozen_version = task.state.pool.frozen_version
        self._task, self._optimizer, self._commit = task, optimizer, commit
        self._num_validations = len(report.validation_steps)
        self._best: _BestStep | None = None
        if best is not None:
            weights = {} if best.best.step is None else best.tensors()
            self._best = _BestStep(best.best, weights, list(best.buffers))
        self._called = called
        self._captured = threading.Event()
        self._by_slot: dict[int, list[MovingTensor]] = {}
        self._count = count

    @property
    def name(self) -> str:
        """The task's name."""
        return self._task.report.name

    def capture(self) -> None:
        """Note all that is to be saved. Nothing of the task may change before this returns."""
        with self._task.state.homes.lock:
            try:
                self._task.state.homes.save()
                self.parts[WEIGHTS], frozen, of_loss = self._weights()
                if frozen:
                    self.parts[FROZEN] = frozen
                if self._best is not None and self._best.best.step is not None:
                    slots = self._task.state.layout.slots
                    self.parts[BEST] = {slots[k].name: self._moving(k, each) for k, each in self._best.weights.items()}
                state = flatten(
                    self._rest({name: slot.parameter.data for name, slot in of_loss.items()}),
                    f"task {self.name!r}: state",
                )
                places = {slot.parameter.data_ptr(): slot.index for slot in of_loss.values()}
                self.parts[STATE] = {
                    name: self._moving(places[each.data_ptr()], each) if each.data_ptr() in places else each
                    for name, each in state.items()
                }
                self.parts[OPTIMIZER] = self._updated()
            except BaseException as error:
                self.error = error
                self.done()
            finally:
                self._captured.set()

    @property
    def is_captured(self) -> bool:
        """True once `secure` need not wait for `capture`."""
        return self._captured.is_set()

    def secure(self, slots: Iterable[int] | None = None) -> None:
        """Wait until these parameters, their averages and optimizer states may change; None: all that are trained."""
        start_s = time.perf_counter()
        self._captured.wait()
        if slots is None:
            slots = [slot for slot in self._by_slot if self._task.state.layout.slots[slot].trainable]
        moving = [each for slot in slots for each in self._by_slot.get(slot, ())]
        copied_bytes = self._copy(moving)
        self._count(copied_bytes=copied_bytes, held_s=time.perf_counter() - start_s)

    def _copy(self, moving: list[MovingTensor]) -> int:
        pause = threading.Event()
        while left := [each for each in moving if not each.is_done]:
            with suppress(MemoryError, RuntimeError):  # less DRAM than the system said: the writer makes room
                if _has_room(sum(each.nbytes for each in left)):
                    return sum(each.secure() for each in left)
            pause.wait(LOOK_S)
        return 0

    def done(self) -> None:
        """Let go of all tensors: they are written, or nobody will write them."""
        self.parts = {}
        for each in chain.from_iterable(self._by_slot.values()):
            each.done()

    def _moving(self, slot: int, tensor: Tensor) -> MovingTensor:
        state = self._task.state
        master, place = state.pool.masters.get(slot), state.layout.slots[slot].parameter
        is_split = master is not None and tensor.data_ptr() == place.data_ptr()
        moving = MovingTensor(tensor, master.load if is_split and master is not None else None)
        self._by_slot.setdefault(slot, []).append(moving)
        return moving

    def _weights(self) -> tuple[dict[str, Tensor | MovingTensor], dict[str, Tensor | MovingTensor], dict[str, Slot]]:
        """Return tensors by name: those of the state dict that are trained, those that are not, and a loss's."""
        layout = self._task.state.layout
        weights: dict[str, Tensor | MovingTensor] = {}
        frozen: dict[str, Tensor | MovingTensor] = {}
        of_loss: dict[str, Slot] = {}
        for name, slot, is_of_loss in layout.named_slots():
            if is_of_loss and not slot.trainable:
                of_loss[name] = slot
            else:  # callbacks write to frozen ones, too
                (weights if slot.trainable else frozen)[name] = self._moving(slot.index, slot.parameter.data)
        weights |= {name: self._commit.buffers[number] for name, number in layout.persistent_buffers().items()}
        return weights, frozen, of_loss

    def _rest(self, loss_parameters: dict[str, Tensor]) -> dict[str, Any]:
        report, state, chooser = self._task.report, self._task.state, self._task.chooser
        num, adaptive = self._num_validations, None
        if chooser is not None:  # the choices so far, and what the next ones follow from
            choices = StepChoice.to_columns(report.adaptive[: self.steps])
            adaptive = {"choices": choices, "measured": chooser.state_dict()}
        return {
            "steps": self.steps,
            "over": self.over,
            "error": report.error if self.over is not None else None,
            "stop_reason": report.stop_reason if self.over is not None else None,
            "seed": report.seed,
            "accumulation_steps": state.cut.num_micro_batches,
            "max_devices": state.max_devices,
            "position": self._commit.position.to_state(),
            "schedule": self._optimizer.schedule(),
            "buffers": self._commit.buffers,  # by number; also those that no state dict has, and the loss's
            "loss_parameters": loss_parameters,
            "losses": losses_to_state(report.losses[: self.steps]),
            "validation_losses": losses_to_state(report.validation_losses[:num]),
            "validation_steps": report.validation_steps[:num],
            "validation_metrics": {
                name: losses_to_state(values[:num]) for name, values in list(report.validation_metrics.items())
            },
            "loss_scales": losses_to_state(report.loss_scales[: self.steps]),
            "skipped_steps": [step for step in list(report.skipped_steps) if step < self.steps],
            "best": None if self._best is None else {**vars(self._best.best), "buffers": self._best.buffers},
            "stopped_early": report.stopped_early and self.over is not None,
            "adaptive": adaptive,
            "called": None if self._called is None else self._called(),
            "revisions": [dict(vars(each)) for each in list(report.revisions)],
            "retries": [dict(vars(each)) for each in list(report.retries)],
        }

    def _updated(self) -> Tensors:
        """Return all that updates change beside weights."""
        slots: dict[int, int | None] = {}
        for slot, each in self._optimizer.moving_tensors():
            if each.numel():
                # States of several parameters may share one storage, which then belongs to none of them.
                memory = each.untyped_storage().data_ptr()
                slots[memory] = slot if slots.get(memory, slot) == slot else None
        found: dict[str, Tensor | MovingTensor] = {}
        for name, each in flatten(self._optimizer.state(), f"task {self.name!r}: optimizer").items():
            owner = slots.get(each.untyped_storage().data_ptr())
            # A tensor that belongs to no parameter may change at any update.
            found[name] = each.clone() if owner is None else self._moving(owner, each)
        return found


def _has_room(num_bytes: int) -> bool:
    return num_bytes <= (1 - FREE_SHARE) * dram.available_dram_bytes()
