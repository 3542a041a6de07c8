"""A fixed number of shards, with the largest load as small as possible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partitioners.cost import Budget, LayerCost
from partitioners.steptime import Seconds
from partitioners.table import ShardTable, fewest_shards, too_large

LOADS = ("time", "bytes")


class Balanced:
    """Cuts a model into ``num_shards`` shards, of which the largest is as small as possible.

    Args:
        num_shards: at least 1, at most the number of layers.
        by: the load of a shard: "time" (seconds of forward, recomputed forward and backward) or "bytes" (on a device).
    """

    def __init__(self, num_shards: int, *, by: str = "time") -> None:
        if isinstance(num_shards, bool) or not isinstance(num_shards, int) or num_shards < 1:
            raise ValueError(f"num_shards: {num_shards!r}, limit: a whole number >= 1; pass such an int")
        if by not in LOADS:
            raise ValueError(f"by: {by!r}, known: {', '.join(map(repr, LOADS))}")
        self.num_shards = num_shards
        self.by = by

    def __repr__(self) -> str:
        return f"Balanced({self.num_shards}, by={self.by!r})"

    def partition(self, costs: Sequence[LayerCost], budget: Budget) -> list[int]:
        """Cumulative end indices of ``num_shards`` shards that each fit ``budget``.

        Raises LayerTooLarge when no partition fits, ValueError when none with this number of shards fits.
        """
        num = len(costs)
        if self.num_shards > num:
            raise ValueError(f"num_shards: {self.num_shards}, limit: the model's {num} layers; ask for fewer shards")
        table = ShardTable.of(costs, budget.num_micro_batches)
        error = too_large(costs, table, budget.memory_bytes)
        if error is not None:
            raise error
        load = np.where(table.fits(budget.memory_bytes), self._loads(costs, table), np.inf)
        # By last: the least largest load of layers [0, last) in this number of shards, and where the last shard begins.
        least = np.where(np.arange(num + 1) == 0, 0.0, np.inf)
        before = []
        for _ in range(self.num_shards):
            largest = np.maximum(least[:, None], load)
            before.append(largest.argmin(axis=0))
            least = largest.min(axis=0)
        if not np.isfinite(least[num]):
            fewest = fewest_shards(table.fits(budget.memory_bytes))
            assert fewest is not None
            few = self.num_shards < len(fewest)
            raise ValueError(
                f"num_shards: {self.num_shards} shards do not fit {budget.memory_bytes} bytes, limit: "
                + (f"at least {len(fewest)} shards; ask for more" if few else f"{len(fewest)} do; ask for those")
                + ", or give the device more memory"
            )
        boundaries = [num]
        for starts in before[:0:-1]:
            boundaries.append(int(starts[boundaries[-1]]))
        return boundaries[::-1]

    def revise(self, boundaries: Sequence[int], shard: int, costs: Sequence[LayerCost] = ()) -> None:
        """Return None: the user has fixed the number of shards."""
        return

    def _loads(self, costs: Sequence[LayerCost], table: ShardTable) -> Seconds:
        if self.by == "bytes":
            return table.full.astype(np.float64)
        seconds = np.concatenate([[0.0], np.cumsum([2 * c.forward_s + c.backward_s for c in costs])])
        return np.asarray(seconds[None, :] - seconds[:, None])
