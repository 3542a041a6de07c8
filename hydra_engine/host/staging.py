"""A step that is spread over several devices: who has which micro-batches, and their gradients, added in order."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from hydra_engine.schedule import part_ranges

Gradients: TypeAlias = "Mapping[int, Tensor | None]"  # by slot; None: it received none


class BuffersChanged(RuntimeError):
    """A forward changed buffers that it left alone before: its micro-batches have to go one after the other."""


class StepParts:
    """Where the parts of one step meet: ((g0 + g1) + g2) + ..., as one device would have added.

    Either a part goes on from the sum of those before it, which is sent up to its device, and `put`s another. Or it
    sends down the gradients of each micro-batch, to be `add`ed: those that come before their turn wait in DRAM. Both
    are called by the store lanes of several devices.

    Args:
        num_micro_batches: of the step. num_parts: that they are cut into.
        in_sums: the first of the two ways.
        is_narrow: gradients in less than float32 are added in it, and rounded once all are there.
        place: where a slot's gradient belongs in the end. fit: told of the first gradient before that is asked for.
        has_gradient: by slot, set here.
    """

    def __init__(
        self,
        num_micro_batches: int,
        num_parts: int,
        *,
        in_sums: bool,
        is_narrow: bool,
        place: Callable[[int], Tensor],
        has_gradient: dict[int, bool],
        fit: Callable[[int, Tensor], object] = lambda slot, gradient: None,
    ) -> None:
        self.in_sums = in_sums
        self.ranges = part_ranges(num_micro_batches, num_parts)
        self._num_micro_batches = num_micro_batches
        self._is_narrow = is_narrow
        self._place = place
        self._fit = fit
        self._has_gradient = has_gradient
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._slots: dict[int, tuple[int, ...]] = {}  # by shard
        self._num_added: dict[int, int] = {}  # by shard
        self._waiting: dict[int, dict[int, Gradients]] = defaultdict(dict)  # by shard and micro-batch
        self._wide: dict[int, Tensor] = {}  # by slot: narrow gradients so far

    def so_far(self, slots: Iterable[int]) -> dict[int, Tensor]:
        """The sums of the parts before, of those that received a gradient."""
        return {slot: self._sum(slot) for slot in slots if self._has_gradient.get(slot)}

    def put(
        self,
        shard: int,
        end: int,
        gradients: Gradients,
        copy: Callable[[Tensor, Tensor], None],
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep the sums of all micro-batches up to `end`, brought by `copy(target, source)`, there after `finish()`."""
        for slot, gradient in gradients.items():
            self._has_gradient[slot] = gradient is not None
            if gradient is not None:
                self._fit(slot, gradient)
                # The last ones were rounded on the device.
                copy(self._place(slot) if end == self._num_micro_batches else self._sum(slot), gradient)
        finish()
        with self._lock:
            self._slots[shard] = tuple(gradients)
            self._add_waiting(shard, end)

    def add(self, shard: int, m: int, gradients: Gradients) -> None:
        """Add those of micro-batch `m`, which are in DRAM and nobody else's, when it is their turn."""
        with self._lock:
            self._waiting[shard][m] = gradients
            if shard in self._num_added:
                self._add_waiting(shard, self._num_added[shard])

    def _add_waiting(self, shard: int, end: int) -> None:
        waiting = self._waiting[shard]
        while end in waiting:
            for slot, gradient in waiting.pop(end).items():
                if gradient is None:
                    continue
                if self._has_gradient.get(slot):
                    self._sum(slot).add_(gradient)
                else:
                    self._fit(slot, gradient)
                    self._sum(slot).copy_(gradient)
                    self._has_gradient[slot] = True
            end += 1
            if end == self._num_micro_batches:
                for slot in self._slots[shard]:
                    if slot in self._wide:
                        self._place(slot).copy_(self._wide[slot])
        if end == self._num_micro_batches:
            for slot in self._slots[shard]:
                self._wide.pop(slot, None)
        self._num_added[shard] = end

    def _sum(self, slot: int) -> Tensor:
        place = self._place(slot)
        if not self._is_narrow or place.dtype == torch.float32:
            return place
        with self._making:
            if slot not in self._wide:
                self._wide[slot] = torch.empty_like(place, dtype=torch.float32)
            return self._wide[slot]
