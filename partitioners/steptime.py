"""Predicts the seconds of a step of a partitioned model on one device, and the resource that bounds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from partitioners.cost import Budget, Flags, LayerCost, ShardTable, accumulated_bytes

Seconds: TypeAlias = "npt.NDArray[np.float64]"
Layers: TypeAlias = "int | npt.NDArray[np.int64]"

COMPUTE, LINK, HOST = "compute", "link", "host optimizer"


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step of one task alone on a device, and their parts.

    ``total_s`` is compute and all copies and updates that nothing hides. The totals of the resources say which one
    would bound many such tasks together.
    """

    total_s: float
    compute_s: float  # forward, recomputed forward, backward, fixed costs of the units
    exposed_load_s: float  # of parameters, while the device waits for them
    exposed_boundary_s: float  # of boundaries and gradients
    exposed_update_s: float  # of the host optimizer
    link_s: float  # all copies of the busier direction
    update_s: float  # the whole host optimizer

    @property
    def bound(self) -> str:
        """The resource that is busy for the longest time: "compute", "link" or "host optimizer"."""
        busy = {COMPUTE: self.compute_s, LINK: self.link_s, HOST: self.update_s}
        return max(busy, key=lambda name: busy[name])


class StepModel:
    """The time of every shard, and of every pair of neighbours, of one model on one device.

    A step of one task alone is a chain of units f0 ... f(n-2), fb(n-1), b(n-2) ... b0, as the engine runs it:

    - unit: its micro-batches pass through load, compute and store like a pipeline: the first one's input and the last
      one's output are exposed, and so are the gradients of a backward unit;
    - neighbours: a unit's parameters are loaded while the unit before computes, if both fit the device. The seconds by
      which the load is longer than that unit are exposed. If they do not fit, the whole load is exposed;
    - the first shard's update and load come after the commit and are exposed; the other updates run under the forwards
      of the shards below. A step takes no less than the whole optimizer.
    """

    def __init__(self, costs: Sequence[LayerCost], budget: Budget) -> None:
        self._budget = budget
        self.num_layers = num = len(costs)
        self.table = table = ShardTable.of(costs, budget.num_micro_batches)
        n, link = budget.num_micro_batches, budget.link_bytes_per_s
        self._lowest = next((k for k, c in enumerate(costs) if c.grad_bytes), num)  # below, nothing runs backward
        inputs = np.array([float(c.input_bytes) for c in costs])
        outputs = np.array([float(c.output_bytes) for c in costs])

        self.load = np.where(table.full < 2**60, table.slab, 0) / link
        self.update = between([accumulated_bytes(c) for c in costs]) / budget.update_bytes_per_s
        self._grads = between([c.grad_bytes for c in costs]) / link
        self.forward_s = between([c.forward_s for c in costs])
        self.backward_s = self.forward_s + between([c.backward_s for c in costs])

        enters, leaves, returns = np.zeros((3, num + 1, num + 1))
        enters[:-1, 1:] = inputs[:, None]
        leaves[:-1, 1:] = outputs
        returns[:-1, 1:] = np.where(np.arange(num) > self._lowest, inputs, 0.0)[:, None]  # gradients, from there on
        entry_back = enters + leaves
        entry_back[:-1, num] = inputs + costs[-1].target_bytes  # the last shard ends in the loss
        self._moves = {"f": (enters / link, leaves / link), "b": (entry_back / link, returns / link)}
        self.forward_span = _pipeline(n, self.forward_s, *self._moves["f"])
        self.backward_span = _pipeline(n, self.backward_s, *self._moves["b"]) + self._grads

    def runs_backward(self, last: int) -> bool:
        """Return True if the shard that ends at ``last`` runs backward: it or one below holds a trainable parameter."""
        return last > self._lowest

    def shards_s(self, first: int, lasts: npt.NDArray[np.int64]) -> Seconds:
        """Seconds of the own units of the shards that begin at ``first``: spans and fixed costs."""
        unit_s = self._budget.unit_s
        backward = self.backward_span[first, lasts]
        own = self.forward_span[first, lasts] + unit_s
        own = np.where(lasts > self._lowest, own + backward + unit_s, own)
        return np.asarray(np.where(lasts == self.num_layers, backward + unit_s, own))

    def starts_s(self, lasts: npt.NDArray[np.int64]) -> Seconds:
        """Seconds between a commit and the first forward: update and load of the shards ``[0, last)``."""
        return np.asarray(self.update[0, lasts] + self.load[0, lasts])

    def exposed_loads(self, first: Layers, middle: int, last: Layers) -> Seconds:
        """Seconds that loads of two neighbours ``[first, middle) [middle, last)`` hold the device up, by both."""
        table, memory = self.table, self._budget.memory_bytes
        span = self.forward_span[first, middle]
        fits = table.slab[middle, last] + table.forward[first, middle] <= memory
        up = self._exposed(self.load[middle, last], span, fits)
        if not self.runs_backward(middle):
            return up
        fits = table.slab[first, middle] + table.full[middle, last] <= memory
        return np.asarray(up + self._exposed(self.load[first, middle], self.backward_span[middle, last], fits))

    def _exposed(self, load: Seconds, span: Seconds, fits: Flags) -> Seconds:
        hidden = np.minimum(load, span) if self._budget.double_buffer else np.zeros_like(load)
        return np.asarray(load - np.where(fits, hidden, 0.0))

    def predict(self, boundaries: Sequence[int]) -> StepTime:
        """Predict the step under a partition."""
        shards = list(pairwise([0, *boundaries]))
        budget, unit_s = self._budget, self._budget.unit_s
        compute = moved = up = down = loads = 0.0
        n = budget.num_micro_batches
        units = {"f": (self.forward_span, self.forward_s), "b": (self.backward_span, self.backward_s)}
        for first, last in shards:
            for kind in "b" if last == self.num_layers else "fb" if self.runs_backward(last) else "f":
                spans, seconds = units[kind]
                compute += n * float(seconds[first, last]) + unit_s
                moved += float(spans[first, last]) - n * float(seconds[first, last])
                enters, leaves = self._moves[kind]
                up += n * float(enters[first, last]) + float(self.load[first, last])
                down += n * float(leaves[first, last]) + (float(self._grads[first, last]) if kind == "b" else 0.0)
        for (first, middle), (_, last) in pairwise(shards):
            loads += float(self.exposed_loads(first, middle, last))
        loads += float(self.load[0, shards[0][1]])
        waited, update = float(self.update[0, shards[0][1]]), float(self.update[0, self.num_layers])
        waited = max(waited, update - compute - moved - loads)
        return StepTime(
            total_s=compute + moved + loads + waited,
            compute_s=compute,
            exposed_load_s=loads,
            exposed_boundary_s=moved,
            exposed_update_s=waited,
            link_s=max(up, down),
            update_s=update,
        )


def predict_step(costs: Sequence[LayerCost], boundaries: Sequence[int], budget: Budget) -> StepTime:
    """Seconds of one step of one task alone on a device of this budget, cut at these cumulative end indices."""
    starts = [0, *boundaries]
    if not costs or any(first >= last for first, last in pairwise(starts)) or starts[-1] != len(costs):
        raise ValueError(
            f"boundaries: {list(boundaries)}, limit: cumulative end indices that rise to {len(costs)}; pass a partition"
        )
    return StepModel(costs, budget).predict(boundaries)


def _pipeline(n: int, compute: Seconds, enters: Seconds, leaves: Seconds) -> Seconds:
    """n micro-batches through load, compute and store, each stage at work on one of them."""
    return np.asarray(enters + n * compute + leaves + (n - 1) * (np.maximum(enters, leaves) - compute).clip(min=0))


def between(values: Sequence[float]) -> Seconds:
    """Return the sums of the values of layers ``[first, last)``, by (first, last)."""
    sums: Seconds = np.concatenate([np.zeros(1), np.cumsum(np.asarray(values, dtype=np.float64))])
    return (sums[None, :] - sums[:, None]).clip(min=0)
