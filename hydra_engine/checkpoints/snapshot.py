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
from typing import Any

from torch import Tensor

from hydra_engine.checkpoints.nested import flatten, losses_to_state
from hydra_engine.checkpoints.tensors import MovingTensor, Tensors
from hydra_engine.data import TaskPosition
from hydra_engine.host import BestWeights, Slot, TaskOptimizer, TaskState
from hydra_engine.system import dram
from hydra_engine.tasks import BatchChooser, StepChoice, TaskReport

# A task's parts.
WEIGHTS = "weights"
BEST = "best"  # those of the best step, of parameters by name
FROZEN = "frozen"  # weights that do not change
STATE = "state"
OPTIMIZER = "optimizer"

# The share of available DRAM that copies leave alone. If the rest is not enough, updates wait for the disk.
FREE_SHARE = 0.1
LOOK_S = 0.01  # between two looks for room, of an update that waits for the disk


# More than 15 attributes: whoever owns a part of a task hands it in for the file.
class Snapshot:
    """One task at one step. `secure` is for any thread, all else for one thread after the other.

    over: None, or how the task ended: "finished", "failed", "stopped", "lost". error: the one that `capture` raised.
    parts: a checkpoint's tensors of the task, until `done`. count: told what saving costs those who train.
    """

    # More than seven parameters: its attributes, as above.
    def __init__(
        self,
        state: TaskState,
        optimizer: TaskOptimizer,
        report: TaskReport,
        position: TaskPosition,
        buffers: list[Tensor],
        count: Callable[..., None],
        *,
        over: str | None = None,
        best: BestWeights | None = None,
        chooser: BatchChooser | None = None,
        called: Callable[[], dict[str, Any]] | None = None,
        frozen_version: int = 0,
    ) -> None:
        """`called`: returns what callbacks keep. frozen_version: grows as they write to frozen weights."""
        self.name = report.name
        self.steps = report.steps
        self.over = over
        self.loss = report.losses[-1] if report.losses and math.isfinite(report.losses[-1]) else None
        self.error: BaseException | None = None
        self.parts: dict[str, Tensors] = {}
        self._state, self._optimizer, self._report = state, optimizer, report
        self._position, self._buffers = position, buffers
        self._num_validations = len(report.validation_steps)
        self._best = None if best is None else best.best
        self._best_weights: dict[int, Tensor] = {}
        self._best_buffers: list[Tensor] = []
        if best is not None and best.best.step is not None:
            self._best_weights, self._best_buffers = best.tensors(), list(best.buffers)
        self._chooser = chooser
        self._called = called
        self.frozen_version = frozen_version
        self._captured = threading.Event()
        self._by_slot: dict[int, list[MovingTensor]] = {}
        self._count = count

    def capture(self) -> None:
        """Note all that is to be saved. Nothing of the task may change before this returns."""
        with self._state.homes.lock:
            self._capture()

    @property
    def is_captured(self) -> bool:
        """True once `secure` need not wait for `capture`."""
        return self._captured.is_set()

    def _capture(self) -> None:
        try:
            self._state.homes.save()
            self.parts[WEIGHTS], frozen, of_loss = self._weights()
            if frozen:
                self.parts[FROZEN] = frozen
            if self._best is not None and self._best.step is not None:
                slots = self._state.layout.slots
                self.parts[BEST] = {slots[k].name: self._moving(k, each) for k, each in self._best_weights.items()}
            state = flatten(
                self._rest({name: slot.parameter.data for name, slot in of_loss.items()}), f"task {self.name!r}: state"
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

    def secure(self, slots: Iterable[int] | None = None) -> None:
        """Wait until these parameters, their averages and optimizer states may change; None: all that are trained."""
        start_s = time.perf_counter()
        self._captured.wait()
        if slots is None:
            slots = [slot for slot in self._by_slot if self._state.layout.slots[slot].trainable]
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
        master, place = self._state.pool.masters.get(slot), self._state.layout.slots[slot].parameter
        is_split = master is not None and tensor.data_ptr() == place.data_ptr()
        moving = MovingTensor(tensor, master.load if is_split and master is not None else None)
        self._by_slot.setdefault(slot, []).append(moving)
        return moving

    def _weights(self) -> tuple[dict[str, Tensor | MovingTensor], dict[str, Tensor | MovingTensor], dict[str, Slot]]:
        """Return tensors by name: those of the state dict that are trained, those that are not, and a loss's."""
        layout = self._state.layout
        weights: dict[str, Tensor | MovingTensor] = {}
        frozen: dict[str, Tensor | MovingTensor] = {}
        of_loss: dict[str, Slot] = {}
        for name, slot, is_of_loss in layout.named_slots():
            if is_of_loss and not slot.trainable:
                of_loss[name] = slot
            else:  # callbacks write to frozen ones, too
                (weights if slot.trainable else frozen)[name] = self._moving(slot.index, slot.parameter.data)
        weights |= {name: self._buffers[number] for name, number in layout.persistent_buffers().items()}
        return weights, frozen, of_loss

    def _rest(self, loss_parameters: dict[str, Tensor]) -> dict[str, Any]:
        report, num, adaptive = self._report, self._num_validations, None
        if self._chooser is not None:  # the choices so far, and what the next ones follow from
            choices = StepChoice.to_columns(report.adaptive[: self.steps])
            adaptive = {"choices": choices, "measured": self._chooser.state_dict()}
        return {
            "steps": self.steps,
            "over": self.over,
            "error": report.error if self.over is not None else None,
            "stop_reason": report.stop_reason if self.over is not None else None,
            "seed": report.seed,
            "accumulation_steps": self._state.cut.num_micro_batches,
            "max_devices": self._state.max_devices,
            "position": self._position.to_state(),
            "schedule": self._optimizer.schedule(),
            "buffers": self._buffers,  # by number; also those that no state dict has, and the loss's
            "loss_parameters": loss_parameters,
            "losses": losses_to_state(report.losses[: self.steps]),
            "validation_losses": losses_to_state(report.validation_losses[:num]),
            "validation_steps": report.validation_steps[:num],
            "validation_metrics": {
                name: losses_to_state(values[:num]) for name, values in list(report.validation_metrics.items())
            },
            "loss_scales": losses_to_state(report.loss_scales[: self.steps]),
            "skipped_steps": [step for step in list(report.skipped_steps) if step < self.steps],
            "best": None if self._best is None else {**vars(self._best), "buffers": self._best_buffers},
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
