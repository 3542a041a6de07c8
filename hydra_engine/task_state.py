"""One task during one run: its layout, its pool, the step in progress, and what is known of its units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from hydra_engine.memory import HostPool, StepStaging
from hydra_engine.randomness import RandomState
from hydra_engine.schedule import evaluation_chain, training_chain
from hydra_engine.shard import ModelLayout, Shard
from hydra_engine.task import ModelTask


class UnitBytes(NamedTuple):
    """What a unit takes beside its slab."""

    work: int  # peak of what it creates: activations, gradients, outputs
    input: int  # of one micro-batch, the largest
    output: int  # of one micro-batch, the largest

    def total(self, num_micro_batches: int) -> int:
        """Inputs stream one micro-batch ahead, outputs are stored one behind."""
        several = num_micro_batches > 1
        return self.work + (1 + several) * self.input + several * self.output


def layout_of(task: ModelTask) -> ModelLayout:
    """Where the task's parameters and buffers lie."""
    names, layers = zip(*task.model._modules.items(), strict=True)
    return ModelLayout(layers, names, task.loss_fn if isinstance(task.loss_fn, nn.Module) else None)


class TaskState:
    """Joins what devices, optimizer and reader need of a task. Its staging is written by one unit at a time."""

    def __init__(self, task: ModelTask, name: str, layout: ModelLayout) -> None:
        self.task = task
        self.name = name
        self.layout = layout
        self.pool = HostPool(layout)
        self.staging = StepStaging()
        self.boundaries: list[int] = []
        self.shards: list[Shard] = []
        self.locked: set[int] = set()  # shards that draw from process-wide generators
        self.keep_saved: set[int] = set()  # shards that differentiate inside their forward
        self.changed_buffers: set[int] = set()  # by the step that was rehearsed
        self.draws = False  # a layer draws from the task's main stream, so reads must not run ahead of it
        self.accumulation_steps = 1
        self._unit_bytes: dict[tuple[Any, ...], UnitBytes] = {}

    def close(self) -> None:
        """Give the model back to its user, and let go of the step in progress."""
        self.pool.close()
        self.staging = StepStaging()

    def cut(self, boundaries: Sequence[int]) -> None:
        """Set the partition."""
        self.boundaries = list(boundaries)
        self.shards = self.layout.shards(boundaries)
        self._unit_bytes = {}

    @property
    def lowest_backward(self) -> int:
        """The lowest shard that holds a trainable parameter."""
        slots = self.layout.slots
        return min(shard.index for shard in self.shards if any(slots[index].trainable for index in shard.slots))

    @property
    def chains(self) -> dict[bool, tuple[tuple[str, int], ...]]:
        """(kind, shard) of a batch's units, in order, by whether it trains."""
        num = len(self.shards)
        return {True: training_chain(num, self.lowest_backward), False: evaluation_chain(num)}

    def is_last(self, shard: Shard) -> bool:
        return shard.index == len(self.shards) - 1

    def unit_bytes(self, kind: str, shard: Shard, signature: tuple[Any, ...]) -> UnitBytes | None:
        """What a unit takes beside its slab for a step of this signature; None before it was metered once."""
        return self._unit_bytes.get((kind, shard.index, signature))

    def learn_unit_bytes(self, kind: str, shard: Shard, signature: tuple[Any, ...], measured: UnitBytes) -> None:
        """Remember what a metered run took."""
        key = (kind, shard.index, signature)
        known = self._unit_bytes.get(key, measured)
        self._unit_bytes[key] = UnitBytes(*map(max, known, measured))

    def shard_bytes(self, shard: Shard) -> int:
        """Device bytes a shard needs to run: its slab, and the largest unit seen so far."""
        units = [u.total(self.accumulation_steps) for (_, j, _), u in self._unit_bytes.items() if j == shard.index]
        return shard.slab_bytes + shard.buffer_bytes + max(units, default=0)

    def end_of_forward(self) -> RandomState:
        """Where the layers left the random stream in the step in progress."""
        last = self.staging.num_micro_batches - 1
        return self.staging.random[len(self.shards), last]

    def check_buffers(self) -> None:
        """Refuse a buffer that layers of two shards change, where micro-batches would reach it in another order."""
        changed = self.staging.buffers.keys()
        holders = Counter(index for shard in self.shards for index in shard.buffers if index in changed)
        if self.accumulation_steps > 1 and max(holders.values(), default=0) > 1:
            raise ValueError(
                f"{self.name}: layers of several shards share a buffer that their forward changes, and with "
                f"accumulation_steps {self.accumulation_steps} they would change it in another order than the plain "
                f"loop; set accumulation_steps=1, give each layer its own module, or put them into one shard"
            )

    def check_draws(self) -> None:
        """Refuse draws that several micro-batches would take in another order than the plain loop."""
        if self.accumulation_steps > 1:
            for m, start in enumerate(self.staging.start):
                if not self.staging.random[len(self.shards), m].same_outside_torch(start):
                    raise ValueError(
                        f"{self.name}: a layer draws from `random` or `numpy.random` with accumulation_steps "
                        f"{self.accumulation_steps}; draw from torch, whose stream each micro-batch has its own of, or "
                        f"set accumulation_steps=1"
                    )
