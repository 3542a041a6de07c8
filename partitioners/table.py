"""Tables of the bytes of every possible shard of a model, which partitioners search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from partitioners.cost import (
    LayerCost,
    LayerTooLarge,
    accumulated_bytes,
    kept_output_bytes,
    skips_of,
    slab_bytes,
)

Bytes: TypeAlias = "npt.NDArray[np.int64]"
Flags: TypeAlias = "npt.NDArray[np.bool_]"

_NEVER = np.iinfo(np.int64).max // 4  # entries below the diagonal: no shard


@dataclass(frozen=True, kw_only=True)
class ShardTable:
    """By (first, last): bytes of the shard ``[first, last)``, as the functions of the same names give one by one.

    Each table is square and has one row and column more than there are layers, so that ``last`` is an index. Entries
    with ``first >= last`` are a number of bytes that no device has.
    """

    slab: Bytes
    forward: Bytes  # slab and forward unit
    full: Bytes  # slab and the unit that runs backward too

    @classmethod
    def of(cls, costs: Sequence[LayerCost], num_micro_batches: int) -> ShardTable:
        """Fill the tables, in O(layers^2) array operations: a thousand layers take a few tens of milliseconds."""
        num = len(costs)
        if num == 0:
            raise ValueError("costs: no layers, limit: at least 1; profile a model first")
        ends = _prefix([slab_bytes(costs, k, k + 1) for k in range(num)])
        slab = _table(num)
        work, forward = _table(num), _table(num)
        column = {
            name: np.array([getattr(cost, name) or 0 for cost in costs], dtype=np.int64)
            for name in ("input_bytes", "output_bytes", "saved_bytes", "peak_bytes", "forward_peak_bytes")
        }
        inputs, outputs, peaks = column["input_bytes"], column["output_bytes"], column["peak_bytes"]
        saved, grads = _prefix(column["saved_bytes"]), _prefix([cost.grad_bytes for cost in costs])
        forwards = column["forward_peak_bytes"]
        held = np.array([kept_output_bytes(cost) for cost in costs], dtype=np.int64)
        held[-1] += outputs[-1]
        # What layer k holds while it runs backward, but for what depends on where the shard begins and ends.
        inner = saved[:-1] + peaks + outputs - grads[1:]
        last_own = saved[:-1] + peaks
        for first in range(num):
            slab[first, first + 1 :] = ends[first + 1 :] - ends[first]
            most = last_own[first:].copy()
            below = np.maximum.accumulate(inner[first:-1]) + grads[first + 2 :] + held[first + 1 :]
            most[1:] = np.maximum(most[1:], below)
            work[first, first + 1 :] = most - saved[first]
            passing = forwards[first:].copy()
            passing[1:] += outputs[first:-1]
            forward[first, first + 1 :] = np.maximum.accumulate(passing)
        leaving = outputs.copy()
        leaving[-1] = 0
        targets = np.array([cost.target_bytes for cost in costs], dtype=np.int64)
        upper = np.triu(np.ones((num, num), dtype=bool))  # [first, last - 1]
        enters = inputs[:, None] + (leaving + targets)[None, :]
        unit = work[:-1, 1:] + min(num_micro_batches, 2) * enters
        several = num_micro_batches > 1
        if several:
            added = _prefix([accumulated_bytes(cost) for cost in costs])
            unit += added[None, 1:] - added[:-1, None] + np.maximum(inputs[:, None], leaving[None, :])
        for k, cost in enumerate(costs):
            if cost.shared_bytes and cost.shares_with:
                highest, deepest = max(cost.shares_with), min(cost.shares_with)
                unit[: k + 1, k:highest] += (1 + min(num_micro_batches, 2)) * cost.shared_bytes
                unit[deepest + 1 : k + 1, k:] += several * cost.shared_bytes
        skipping = _skipping(costs, several)
        unit += skipping[True][:-1, 1:]
        light = (
            forward[:-1, 1:] + skipping[False][:-1, 1:] + (1 + several) * inputs[:, None] + several * outputs[None, :]
        )
        unknown = _prefix([int(cost.forward_peak_bytes is None) for cost in costs])
        is_unknown = unknown[None, 1:] - unknown[:-1, None] > 0
        light = np.where(is_unknown, unit, light)
        trainable = next((k for k, cost in enumerate(costs) if cost.grad_bytes), num)
        # Shards that end at or before it run forward only; the last one takes the target in as well.
        forward_only = np.where(is_unknown, unit, light + min(num_micro_batches, 2) * targets[None, :])
        unit[:, :trainable] = forward_only[:, :trainable]
        tables = {"slab": slab, "forward": _table(num), "full": _table(num)}
        tables["forward"][:-1, 1:][upper] = (slab[:-1, 1:] + light)[upper]
        tables["full"][:-1, 1:][upper] = (slab[:-1, 1:] + unit)[upper]
        return cls(**tables)

    def fits(self, memory_bytes: int) -> Flags:
        """Flags of the shards that a device can run."""
        return np.triu(self.full <= memory_bytes, k=1)


def fewest_shards(fits: Flags) -> list[int] | None:
    """Return the partition with the fewest shards if all shards ``[first, last)`` have to fit; None when there is none.

    Of several, it is the one whose shards are longest from the front.
    """
    num = len(fits) - 1
    # From the back: how many shards layers [first, num) take, and where the first of them ends.
    count, end = [num + 1] * num + [0], [0] * num
    for first in range(num - 1, -1, -1):
        for last in map(int, np.flatnonzero(fits[first])):
            if count[last] + 1 <= count[first]:
                count[first], end[first] = count[last] + 1, last
    boundaries = [0]
    while boundaries[-1] < num:
        if count[boundaries[-1]] > num:
            return None
        boundaries.append(end[boundaries[-1]])
    return boundaries[1:]


def too_large(costs: Sequence[LayerCost], table: ShardTable, memory_bytes: int) -> LayerTooLarge | None:
    """Return the error that says why no partition fits, or None when one does.

    It names the layer at which the furthest of all partitions ends: no shard that begins with it fits.
    """
    fits = table.fits(memory_bytes)
    reached = np.zeros(len(costs) + 1, dtype=bool)
    reached[0] = True
    for first in range(len(costs)):
        if reached[first]:
            reached |= fits[first]
    if reached[-1]:
        return None
    first = int(np.flatnonzero(reached)[-1])
    return LayerTooLarge.of(costs[first], int(table.full[first].min()), memory_bytes)


def _skipping(costs: Sequence[LayerCost], several: bool) -> dict[bool, Bytes]:
    """`skipping_bytes` of every shard, by whether it runs backward."""
    num = len(costs)
    found = {backward: np.zeros((num + 1, num + 1), dtype=np.int64) for backward in (True, False)}
    for skip in skips_of(costs):
        top, num_bytes = skip.gets[-1], skip.num_bytes
        leaving = (slice(0, skip.put + 1), slice(skip.put + 1, top + 1))
        for table in found.values():
            table[leaving] += (1 + several) * num_bytes
        for first in range(skip.put + 1, top + 1):
            lowest = next(k for k in skip.gets if k >= first)
            found[False][first, lowest + 1 :] += (1 + several) * num_bytes
            found[True][first, lowest + 1 :] += 2 * (1 + several) * num_bytes
            found[True][first, lowest + 1 : top + 1] += (1 + several) * num_bytes
    return found


def _prefix(values: Sequence[int] | Bytes) -> Bytes:
    """Sums of the first 0, 1, ... values."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.asarray(values, dtype=np.int64))])


def _table(num: int) -> Bytes:
    return np.full((num + 1, num + 1), _NEVER, dtype=np.int64)
