"""What the units of a micro-batch start from and leave, on a device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hydra_engine.boundary import Boundary
from hydra_engine.randomness import RandomState


@dataclass(kw_only=True)
class MicroInput:
    """What one micro-batch of a unit starts from, on the device."""

    value: Boundary
    random: RandomState  # before the shard's forward
    target: Boundary | None = None  # last shard
    weight: float | None = None  # of this micro-batch's loss; None: the plain loss
    loss_scale: float | None = None  # the loss is multiplied by it before its backward
    gradients: Sequence[Tensor | None] = ()  # of the shard's output, for a backward
    tied: dict[int, Tensor] = field(default_factory=dict)  # slot -> gradient from the shards above
    skips: dict[str, Boundary] = field(default_factory=dict)  # values that skip layers and are gotten here
    skip_gradients: dict[str, Sequence[Tensor | None]] = field(default_factory=dict)  # from the shards above

    def tensors(self) -> list[Tensor]:
        """All of them."""
        target = self.target.tensors if self.target else ()
        skips = [tensor for value in self.skips.values() for tensor in value.tensors]
        gradients = [*self.gradients, *itertools.chain(*self.skip_gradients.values())]
        return [*self.value.tensors, *target, *self.tied.values(), *skips, *(t for t in gradients if t is not None)]

    @property
    def num_bytes(self) -> int:
        """Bytes it takes on the device."""
        return storage_bytes(self.tensors())


@dataclass(kw_only=True)
class MicroOutput:
    """What one micro-batch of a unit leaves, on the device."""

    random: RandomState  # after the shard's forward
    value: Boundary | None = None  # forward: what enters the next shard
    gradients: list[Tensor | None] | None = None  # backward: of what entered this shard
    tied: dict[int, Tensor | None] = field(default_factory=dict)  # borrowed slot -> gradient so far
    skips: dict[str, Boundary] = field(default_factory=dict)  # forward: values for shards further up
    skip_gradients: dict[str, list[Tensor | None]] = field(default_factory=dict)  # backward: of those gotten here
    pieces: dict[int, Tensor | None] = field(default_factory=dict)  # by owned slot: of this micro-batch alone
    # Read by whoever stores them: the lane that computes must not wait for the device.
    loss: float | Tensor | None = None
    metrics: dict[str, float | Tensor] = field(default_factory=dict)  # of an evaluation
    is_held: bool = False  # what stays on the device holds memory of `value`, too

    @property
    def num_bytes(self) -> int:
        """Bytes that stay on the device until they are stored."""
        skips = [tensor for value in self.skips.values() for tensor in value.tensors]
        gradients = [*(self.gradients or ()), *itertools.chain(*self.skip_gradients.values()), *self.tied.values()]
        gradients += self.pieces.values()
        return storage_bytes([*(self.value.tensors if self.value else ()), *skips, *gradients])


@dataclass(kw_only=True)
class UnitOutput:
    """What a unit leaves once all its micro-batches are through, on the device."""

    gradients: dict[int, Tensor | None]  # by owned slot; None: it received none
    buffers: dict[int, Tensor]
    stepped: Any = None  # what a step of the optimizer on the device left

    @property
    def num_bytes(self) -> int:
        """Bytes that stay on the device until they are stored."""
        return storage_bytes([*self.gradients.values(), *self.buffers.values()])


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind these tensors, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())
