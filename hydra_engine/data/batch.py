"""Batches ready for a step: split into micro-batches, copied, and in the types that cross the link."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hydra_engine.data.draws import UserDraws
from hydra_engine.data.memory import copy_in_dram, copy_of_array
from hydra_engine.data.position import TaskPosition
from hydra_engine.data.signature import Signature
from hydra_engine.data.streams import RandomState, Stream, seeded, stream_seed
from hydra_engine.tasks import MicroBatch, ModelTask, StepChoice, batch_size, split_batch
from partitioners.boundary import Boundary
from partitioners.plain_numbers import plain
from partitioners.precision import DTYPES, cast


class Item(NamedTuple):
    """A batch as the loader gave it, unpacked, and its place in the task."""

    inputs: Any
    target: Any
    step: int = 0
    epoch: int = 0
    training: bool = True
    evaluation: int = 0
    position: TaskPosition | None = None
    choice: StepChoice | None = None  # of an adaptive task, which says the number of micro-batches


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch, ready to be begun."""

    step: int  # counts training batches, and evaluation batches on their own
    epoch: int
    training: bool
    evaluation: int  # evaluations before it; an evaluation batch is part of the next one
    micro_batches: list[MicroBatch]
    boundaries: list[tuple[Boundary, Boundary]]  # the same, taken apart
    read: RandomState  # the task's main stream after the read
    main: RandomState  # the same after the batch was split, which may draw as well
    start: list[RandomState]  # by micro-batch, before its forward
    num_samples: int
    weight: float  # of an evaluation batch among those of its evaluation
    whole: tuple[Boundary, Boundary]  # inputs and target as they were read, to be split anew
    accumulation_steps: int  # micro-batches asked for, of which max_device_batch may have made others
    position: TaskPosition | None = None  # right after it was read, where the reader keeps positions
    choice: StepChoice | None = None  # of an adaptive task

    @cached_property
    def signature(self) -> Signature:
        """The sizes that decide the memory of every unit of its step."""
        return Signature.of(self.boundaries)

    @property
    def item(self) -> Item:
        """The batch as the loader gave it, to be split anew."""
        inputs, target = (each.value() for each in self.whole)
        return Item(inputs, target, self.step, self.epoch, self.training, self.evaluation, self.position, self.choice)


class _Planned(NamedTuple):
    """A batch that was split for a plan; training begins with the same one."""

    inputs: Any
    read: RandomState  # the stream before
    number: int  # micro-batches asked for
    micro_batches: list[MicroBatch]
    main: RandomState  # the stream after


class Splitter:
    """Makes batches of what one task's loader gives."""

    def __init__(self, task: ModelTask, name: str, max_devices: int = 1) -> None:
        """`max_devices`: that a batch is split for, with `max_device_batch`."""
        self._task = task
        self._name = name
        self._max_devices = max_devices
        self._dtype = None if task.precision == "float32" else DTYPES[task.precision]
        self._planned: _Planned | None = None
        self.draws = UserDraws(name, alone=task.loader_alone)  # of split= and loss_reduction=

    def again(self, batch: Batch, item: Item, number: int, *, for_plan: bool) -> Batch:
        """The batch of an item in another number of micro-batches. Raises ValueError where that draws otherwise."""
        stream = Stream(batch.read)
        found = self.split(item, stream, number, for_plan=for_plan)
        moved = not stream.state.same_in_torch(batch.main)  # from which the next batch may be read already
        if moved or (self.draws.drawn and not stream.state.same_outside_torch(batch.main)):
            raise ValueError(
                f"{self._name}: split= draws random numbers, so that a batch cannot be split anew, into "
                f"{number} micro-batches, while it is trained on; set accumulation_steps to that number, "
                f"or draw from a generator that split= makes for itself"
            )
        return found

    def split(self, item: Item, stream: Stream, number: int, *, for_plan: bool) -> Batch:
        """A batch of `number` micro-batches, which may move the stream; for_plan: it will be split anew to train."""
        inputs, target, step, epoch, training, evaluation, position, choice = item
        read, reduction = stream.state, self._task.loss_reduction
        # By its size: a stream for each micro-batch, also where a batch is only one, as after others it may be.
        by_size = training and (self._task.max_device_batch is not None or choice is not None)
        is_split = by_size or number > 1
        micro_batches: list[MicroBatch] = [(inputs, target, 1.0)]
        if is_split:
            micro_batches, stream.state = self._micro_batches(item, read, number, for_plan)
        weight = 0.0 if training else float(batch_size(inputs))
        if callable(reduction) and not training:
            with self.draws.drawing(stream):
                weight = float(reduction(target))
        whole = _own_pair(self._name, inputs, target)
        if training and any(True in each.requires_grad for each in whole):
            raise ValueError(
                f"{self._name}: a batch has a tensor that requires gradients, limit: none, since a device has a copy "
                f"of it, which would get them; detach it, and call requires_grad_() in the first layer if needed"
            )
        pairs = [_own_pair(self._name, x, y) for x, y, _ in micro_batches] if is_split else [whole]
        if not pairs:
            raise ValueError(f"{self._name}: split= returned no micro-batches for a batch of {batch_size(inputs)}")
        if self._dtype is not None:  # inputs as they cross the link; not targets, since the loss computes in float32
            pairs = [(x.around(cast(x.tensors, self._dtype)), y) for x, y in pairs]
        main = stream.state
        start = [main] * len(pairs)
        if is_split and training:
            seeds = [stream_seed(self._task.seed, step, m) for m in range(len(pairs))]
            start = [main._replace(torch=seeded(each), device=each) for each in seeds]
        return Batch(
            step=step,
            epoch=epoch,
            training=training,
            evaluation=evaluation,
            micro_batches=micro_batches,
            boundaries=pairs,
            read=read,
            main=main,
            start=start,
            num_samples=batch_size(inputs),
            weight=weight,
            whole=whole,
            accumulation_steps=number,
            position=position,
            choice=choice if training else None,
        )

    def _micro_batches(
        self, item: Item, read: RandomState, number: int, for_plan: bool
    ) -> tuple[list[MicroBatch], RandomState]:
        """Split a batch on the read's stream; once for a plan and its training, since functions may count calls."""
        most = self._task.max_device_batch
        if item.training and most is not None:
            number = len(split_batch(max(1, batch_size(item.inputs)), most, self._max_devices))
        if item.training and item.choice is not None:
            number = item.choice.micro_batches
        planned, self._planned = self._planned, None
        is_known = planned is not None and planned.inputs is item.inputs and planned.read is read
        if planned is None or not is_known or planned.number != number:
            stream = Stream(read)
            with self.draws.drawing(stream) if self._task.splits_by_user else nullcontext():
                found = [_triple(each) for each in self._task.split(item.inputs, item.target, number)]
            planned = _Planned(item.inputs, read, number, found, stream.state)
        if for_plan:
            self._planned = planned
        return planned.micro_batches, planned.main


def _own_pair(task: str, inputs: Any, target: Any) -> tuple[Boundary, Boundary]:
    """Inputs and target taken apart, with copies of tensors and arrays, whose memory a loader may use again."""
    return _own(Boundary.of(inputs, f"{task}: a batch")), _own(Boundary.of(target, f"{task}: a target"))


def _own(boundary: Boundary) -> Boundary:
    own = boundary.around([copy_in_dram(tensor) for tensor in boundary.tensors])
    leaves = (copy_of_array(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in own.leaves)
    return own._replace(leaves=tuple(leaves))


def _triple(micro_batch: Any) -> MicroBatch:
    if not isinstance(micro_batch, tuple) or len(micro_batch) != 3:
        raise ValueError(f"split= returned {type(micro_batch).__name__}, not a triple (inputs, target, weight)")
    return micro_batch[0], micro_batch[1], plain(micro_batch[2])
