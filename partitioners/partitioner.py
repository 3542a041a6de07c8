"""Partitioners, and their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from partitioners.cost import (
    Budget,
    Flags,
    LayerCost,
    Partitioner,
    ShardTable,
    fewest_shards,
    shard_bytes,
    too_large,
)
from partitioners.plain_numbers import plain
from partitioners.steptime import Seconds, StepModel, between


class _Fixed:
    def revise(self, boundaries: Sequence[int], shard: int, costs: Sequence[LayerCost] = ()) -> None:
        """Return None: the user has fixed it."""


def halved(boundaries: Sequence[int], shard: int, costs: Sequence[LayerCost] = ()) -> list[int] | None:
    """Return the partition with ``shard`` cut in two where the bytes of its halves differ least; None for one layer.

    Without ``costs``, halves are compared by their layers.
    """
    if not 0 <= shard < len(boundaries):
        raise ValueError(f"shard: {shard}, limit: 0 <= shard < {len(boundaries)}; name a shard of the partition")
    first, last = boundaries[shard - 1] if shard else 0, boundaries[shard]
    if last - first == 1:
        return None

    def difference(cut: int) -> int:
        if not costs:
            return abs((cut - first) - (last - cut))
        return abs(shard_bytes(costs, first, cut) - shard_bytes(costs, cut, last))

    return [*boundaries[:shard], min(range(first + 1, last), key=difference), *boundaries[shard:]]


class _Halving:
    revise = staticmethod(halved)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Presharded(_Fixed):
    """Shards that end where the user says: ``Presharded([3, 6, 8])`` is ``[0, 3) [3, 6) [6, 8)``.

    The last end is the number of layers. Nothing is checked against a device's memory, and nothing is revised.
    """

    def __init__(self, boundaries: Sequence[int]) -> None:
        rule = "limit: whole numbers that rise from at least 1; pass cumulative end indices such as [3, 6, 8]"
        ends = [*map(plain, boundaries)]
        is_whole = all(type(end) is int for end in ends)
        if not (ends and is_whole and ends[0] >= 1 and all(end < later for end, later in pairwise(ends))):
            raise ValueError(f"boundaries: {boundaries!r}, {rule}")
        self.boundaries = tuple(ends)

    def __repr__(self) -> str:
        return f"Presharded({list(self.boundaries)})"

    def partition(self, costs: Sequence[LayerCost], budget: Budget) -> list[int]:
        """Return the boundaries as given. Raises ValueError when they do not end at the last layer."""
        if self.boundaries[-1] != len(costs):
            raise ValueError(
                f"boundaries: {list(self.boundaries)} end at layer {self.boundaries[-1]}, limit: the model's "
                f"{len(costs)} layers; make {len(costs)} the last end"
            )
        return list(self.boundaries)


class Pilot(_Halving):
    """Packs layers front to back while a shard and the next shard's slab fit the device together.

    A layer that fits only without room for another slab gets a shard of its own. Its neighbours then load serially.
    """

    def partition(self, costs: Sequence[LayerCost], budget: Budget) -> list[int]:
        """Return few, large shards. Raises LayerTooLarge when no partition fits the device.

        Packing may end at a layer that does not fit alone, but fits in a larger shard, which keeps its huge output on
        the device. Then it is the partition with the fewest shards that each fit.
        """
        table = ShardTable.of(costs, budget.num_micro_batches)
        packed = _beside_buffer(table, budget)
        ends = [0]
        while ends[-1] < len(costs):
            first = ends[-1]
            if table.full[first, first + 1] > budget.memory_bytes:
                found = fewest_shards(_fitting(costs, table, budget))
                assert found is not None
                return found
            last = first + 1
            while last < len(costs) and packed[first, last + 1]:
                last += 1
            ends.append(last)
        return ends[1:]


def _fitting(costs: Sequence[LayerCost], table: ShardTable, budget: Budget) -> Flags:
    """Return flags of the shards that fit. Raises LayerTooLarge where they make no partition."""
    error = too_large(costs, table, budget.memory_bytes)
    if error is not None:
        raise error
    return table.fits(budget.memory_bytes)


def _beside_buffer(table: ShardTable, budget: Budget) -> Flags:
    """Return flags of the shards that leave room for the slab that is loaded while they compute."""
    buffer_bytes = budget.buffer_bytes if budget.double_buffer else 0
    if buffer_bytes is None:  # as much as the shard's own slab
        return table.full + table.slab <= budget.memory_bytes
    return table.fits(budget.memory_bytes - buffer_bytes)


LOADS = ("time", "bytes")


class Balanced(_Fixed):
    """Cuts a model into ``num_shards`` shards, of which the largest is as small as possible.

    Args:
        num_shards: at least 1, at most the number of layers.
        by: the load of a shard: "time" (seconds of forward, recomputed forward and backward) or "bytes" (on a device).
    """

    def __init__(self, num_shards: int, *, by: str = "time") -> None:
        num_shards = plain(num_shards)
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
        fits = _fitting(costs, table, budget)
        loads = table.full.astype(np.float64) if self.by == "bytes" else _seconds(costs)
        boundaries = _BalancedCuts(fits, loads, self.num_shards).ends(self.num_shards, num)
        if boundaries is None:
            fewest = fewest_shards(fits)
            assert fewest is not None
            few = self.num_shards < len(fewest)
            raise ValueError(
                f"num_shards: {self.num_shards} shards do not fit {budget.memory_bytes} bytes, limit: "
                + (f"at least {len(fewest)} shards; ask for more" if few else f"{len(fewest)} do; ask for those")
                + ", or give the device more memory"
            )
        return boundaries


def _seconds(costs: Sequence[LayerCost]) -> Seconds:
    """Seconds of forward, recomputed forward and backward, of every shard."""
    return between([2 * c.forward_s + c.backward_s for c in costs])


class _BalancedCuts:
    """The cuts of the first layers into 1, 2, ... `most` shards whose largest load is least."""

    def __init__(self, fits: Flags, loads: Seconds, most: int) -> None:
        """`fits`, `loads`: of every shard ``[first, last)``."""
        loads = np.where(fits, loads, np.inf)
        # By last: the least largest load of layers [0, last) in so many shards, and where the last shard begins.
        least = np.where(np.arange(len(fits)) == 0, 0.0, np.inf)
        self._least, self._before = [least], [np.zeros(len(fits), dtype=np.int64)]
        for _ in range(most):
            largest = np.maximum(self._least[-1][:, None], loads)
            self._before.append(largest.argmin(axis=0))
            self._least.append(largest.min(axis=0))

    def ends(self, number: int, last: int) -> list[int] | None:
        """Return the ends of so many shards of layers ``[0, last)``; None: no such shards fit."""
        if not np.isfinite(self._least[number][last]):
            return None
        ends = [last]
        for before in self._before[number:1:-1]:
            ends.append(int(before[ends[-1]]))
        return ends[::-1]


class Optimal(_Halving):
    """Finds the partition with the least predicted step time (`predict_step`) among all that fit the device.

    A dynamic program over the last two boundaries. The cost of a shard depends on its own layers and on its neighbour,
    whose parameters are loaded meanwhile. O(layers^3) additions, in arrays. It finds a partition whenever there is one.
    """

    weighs_times = True

    def partition(self, costs: Sequence[LayerCost], budget: Budget) -> list[int]:
        """Return cumulative end indices.

        Raises LayerTooLarge, naming the layer where all partitions end, when none fits.
        """
        model = StepModel(costs, budget)
        num, fits = len(costs), _wanted(costs, model.table, budget)
        # By (first, last): least seconds of layers [0, last) whose last shard is [first, last), and where the shard
        # before it begins.
        least = np.full((num + 1, num + 1), np.inf)
        before = np.full((num + 1, num + 1), -1, dtype=np.int64)
        for first in range(num):
            lasts = first + 1 + np.flatnonzero(fits[first, first + 1 :])
            own_s = model.shards_s(first, lasts)
            if first == 0:
                least[0, lasts] = own_s + model.starts_s(lasts)
                continue
            starts = np.flatnonzero(np.isfinite(least[:first, first]))
            if len(starts) and len(lasts):
                seconds = least[starts, first][:, None] + model.exposed_loads(starts[:, None], first, lasts)
                before[first, lasts] = starts[seconds.argmin(axis=0)]
                least[first, lasts] = seconds.min(axis=0) + own_s
        first, last = int(np.argmin(least[:num, num])), num
        boundaries = [num]
        while first > 0:
            boundaries.append(first)
            first, last = int(before[first, last]), first
        return boundaries[::-1]


class Fastest(_Halving):
    """Finds the cut with the least predicted time among `candidates`.

    The engine predicts each of them in a simulation of the run at hand: its tasks, devices, links and optimizer. Where
    nothing of a run is known, `partition` predicts one task alone on a device.
    """

    weighs_times = True

    def partition(self, costs: Sequence[LayerCost], budget: Budget) -> list[int]:
        """Return the candidate with the least `predict_step`, of equals the one with fewest shards.

        A model with nothing to train is kept whole if it fits: its weights then stay on the device. Raises
        LayerTooLarge when no partition fits the device.
        """
        model = StepModel(costs, budget)
        if not any(cost.grad_bytes for cost in costs) and model.table.full[0, len(costs)] <= budget.memory_bytes:
            return [len(costs)]
        return min(self.candidates(costs, budget), key=lambda ends: model.predict(ends).total_s)

    def candidates(self, costs: Sequence[LayerCost], budget: Budget) -> list[list[int]]:
        """Return cuts worth predicting, each once, those with fewer shards first.

        They are the cut of `Optimal`, that of `Pilot`, and for each number of shards up to `MOST_SHARDS`, or to twice
        the fewest that fit:

        - that of `Balanced`: the units of several tasks, or the copies and updates of one, hide under one another;
        - one whose last shard is as large as the device allows beside the slab of another shard, with the shards below
          balanced. Of the last shard no forward is run again, and it is loaded once per step.

        Raises LayerTooLarge when no partition fits the device.
        """
        table = ShardTable.of(costs, budget.num_micro_batches)
        num, fits = len(costs), _wanted(costs, table, budget)
        fewest = fewest_shards(fits)
        assert fewest is not None
        numbers = _numbers(len(fewest), num)
        cuts = _BalancedCuts(fits, _seconds(costs), numbers[-1])
        found = [Optimal().partition(costs, budget), Pilot().partition(costs, budget)]
        for number in numbers:
            balanced = cuts.ends(number, num)
            if balanced is not None:
                found.append(balanced)
            for first in map(int, np.flatnonzero(fits[:, num])):  # from the largest last shard on
                lower = cuts.ends(number - 1, first) if number > 1 and first > 0 else None
                if lower is None:
                    continue
                slab = max(int(table.slab[start, end]) for start, end in pairwise([0, *lower]))
                if int(table.full[first, num]) + slab <= budget.memory_bytes:
                    found.append([*lower, num])
                    break
        return sorted({tuple(ends): ends for ends in found}.values(), key=lambda ends: (len(ends), ends))


MOST_SHARDS = 16


def _numbers(fewest: int, num_layers: int) -> list[int]:
    """Return numbers of shards to try: all up to `MOST_SHARDS`, and 17 from the fewest to twice as many beyond."""
    most = min(num_layers, max(MOST_SHARDS, 2 * fewest))
    if fewest <= MOST_SHARDS:
        return [*range(fewest, min(most, MOST_SHARDS) + 1), *range(MOST_SHARDS + 2, most + 1, 2)]
    return sorted({fewest + (most - fewest) * k // MOST_SHARDS for k in range(MOST_SHARDS + 1)})


def _wanted(costs: Sequence[LayerCost], table: ShardTable, budget: Budget) -> Flags:
    """Return flags of the shards that fit, and leave free the buffer that the user asked for as far as they can."""
    fits = _fitting(costs, table, budget)
    if not budget.buffer_bytes or not budget.double_buffer:
        return fits
    roomy = table.fits(budget.memory_bytes - budget.buffer_bytes)
    ones = np.arange(len(fits) - 1)
    roomy[ones, ones + 1] = fits[ones, ones + 1]
    return roomy if fewest_shards(roomy) is not None else fits


_KNOWN: dict[str, Callable[..., Partitioner]] = {
    "fastest": Fastest,
    "pilot": Pilot,
    "optimal": Optimal,
    "balanced": Balanced,
    "presharded": Presharded,
}
_EXAMPLES = {"balanced": "Balanced(4)", "presharded": "Presharded([3, 6, 8])"}


def register_partitioner(name: str, factory: Callable[..., Partitioner]) -> None:
    """Make a partitioner known by name; ``factory(**settings)`` returns it. Each name can be registered once."""
    if name in _KNOWN:
        raise ValueError(f"partitioner: {name!r} is taken, by {_KNOWN[name]!r}; choose another name")
    _KNOWN[name] = factory


def make_partitioner(name: str, **settings: Any) -> Partitioner:
    """Return the partitioner of that name: ``make_partitioner("balanced", num_shards=4)``.

    Raises ValueError for an unknown name and for settings that it does not take.
    """
    if name not in _KNOWN:
        raise ValueError(f"partitioner: {name!r}, known: {', '.join(map(repr, sorted(_KNOWN)))}")
    try:
        return _KNOWN[name](**settings)
    except TypeError as error:
        raise ValueError(
            f"partitioner: {name!r} does not take the settings {settings!r} ({error}); pass an object with the right "
            f"ones, such as {_EXAMPLES.get(name, 'Pilot()')}"
        ) from error
