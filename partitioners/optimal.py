"""The partition with the least predicted step time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from partitioners.cost import Budget, LayerCost, LayerTooLarge
from partitioners.pilot import halved
from partitioners.steptime import StepModel
from partitioners.table import Flags, fewest_shards, too_large


class Optimal:
    """Finds the partition with the least predicted step time (`predict_step`) among all that fit the device.

    A dynamic program over the last two boundaries. The cost of a shard depends on its own layers and on its neighbour,
    whose parameters are loaded meanwhile. O(layers^3) additions, in arrays. It finds a partition whenever there is one.
    """

    def __repr__(self) -> str:
        return "Optimal()"

    def partition(self, costs: Sequence[LayerCost], budget: Budget) -> list[int]:
        """Return cumulative end indices.

        Raises LayerTooLarge, naming the layer where all partitions end, when none fits.
        """
        return self._best(StepModel(costs, budget), costs, budget)

    def choose(
        self, costs_of: Callable[[int], Sequence[LayerCost]], numbers: Iterable[int], budget: Budget
    ) -> tuple[int, list[int]]:
        """Return the number of micro-batches with the shortest predicted step, and its partition.

        costs_of: a function from the number of micro-batches in a step to the layers' costs for one of them. It is
            called for each of `numbers`, in order, until a larger number that fits makes the step no shorter.

        Raises LayerTooLarge when none fits.
        """
        least_s, found, error = np.inf, None, None
        for number in numbers:
            costs, each = costs_of(number), budget.with_micro_batches(number)
            model = StepModel(costs, each)
            try:
                boundaries = self._best(model, costs, each)
            except LayerTooLarge as too:
                error = too
                continue
            seconds = model.predict(boundaries).total_s
            if seconds >= least_s:
                break
            least_s, found = seconds, (number, boundaries)
        if found is None:
            raise error or ValueError("numbers: none, limit: at least one; pass numbers of micro-batches to try")
        return found

    def revise(self, boundaries: Sequence[int], shard: int, costs: Sequence[LayerCost] = ()) -> list[int] | None:
        """Cut ``shard`` in two where the bytes of its halves differ least (its layers, without ``costs``)."""
        return halved(boundaries, shard, costs)

    def _best(self, model: StepModel, costs: Sequence[LayerCost], budget: Budget) -> list[int]:
        error = too_large(costs, model.table, budget.memory_bytes)
        if error is not None:
            raise error
        num, fits = len(costs), _wanted(model, budget)
        # By (first, last): least seconds of layers [0, last) whose last shard is [first, last), and where the shard
        # before it begins.
        least = np.full((num + 1, num + 1), np.inf)
        before = np.full((num + 1, num + 1), -1, dtype=np.int64)
        for last in range(1, num + 1):
            for first in map(int, np.flatnonzero(fits[:last, last])):
                own_s = float(model.shard_s(first, last))
                if first == 0:
                    least[0, last] = own_s + model.start_s(last)
                    continue
                starts = np.flatnonzero(np.isfinite(least[:first, first]))
                if len(starts):
                    seconds = least[starts, first] + model.exposed_loads(starts, first, last)
                    k = int(np.argmin(seconds))
                    least[first, last], before[first, last] = seconds[k] + own_s, starts[k]
        first, last = int(np.argmin(least[:num, num])), num
        boundaries = [num]
        while first > 0:
            boundaries.append(first)
            first, last = int(before[first, last]), first
        return boundaries[::-1]


def _wanted(model: StepModel, budget: Budget) -> Flags:
    """Shards that fit, and leave free the buffer that the user asked for as far as a partition can."""
    fits = model.table.fits(budget.memory_bytes)
    if not budget.buffer_bytes or not budget.double_buffer:
        return fits
    roomy = model.table.fits(budget.memory_bytes - budget.buffer_bytes)
    ones = np.arange(model.num_layers)
    roomy[ones, ones + 1] = fits[ones, ones + 1]
    return roomy if fewest_shards(roomy) is not None else fits
