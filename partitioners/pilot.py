"""The default partitioner: as few shards as fit, filled from front to back."""

from collections.abc import Sequence

from partitioners.cost import Budget, LayerCost, shard_bytes, slab_bytes
from partitioners.table import ShardTable, fewest_shards, too_large


class Pilot:
    """Packs layers front to back while a shard and the next shard's slab fit the device together.

    A layer that fits only without room for another slab gets a shard of its own. Its neighbours then load serially.
    """

    def __repr__(self) -> str:
        return "Pilot()"

    def partition(self, costs: Sequence[LayerCost], budget: Budget) -> list[int]:
        """Return few, large shards. Raises LayerTooLarge when no partition fits the device.

        Packing may end at a layer that does not fit alone, but fits in a larger shard, which keeps its huge output on
        the device. Then it is the partition with the fewest shards that each fit.
        """
        boundaries: list[int] = []
        first = 0
        while first < len(costs):
            if shard_bytes(costs, first, first + 1, budget.num_micro_batches) > budget.memory_bytes:
                return _any_partition(costs, budget)
            last = first + 1
            while last < len(costs) and _fits(costs, first, last + 1, budget):
                last += 1
            boundaries.append(last)
            first = last
        return boundaries

    def revise(self, boundaries: Sequence[int], shard: int, costs: Sequence[LayerCost] = ()) -> list[int] | None:
        """Cut ``shard`` in two where the bytes of its halves differ least (its layers, without ``costs``)."""
        return halved(boundaries, shard, costs)


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


def _any_partition(costs: Sequence[LayerCost], budget: Budget) -> list[int]:
    table = ShardTable.of(costs, budget.num_micro_batches)
    error = too_large(costs, table, budget.memory_bytes)
    if error is not None:
        raise error
    found = fewest_shards(table.fits(budget.memory_bytes))
    assert found is not None
    return found


def _fits(costs: Sequence[LayerCost], first: int, last: int, budget: Budget) -> bool:
    needed_bytes = shard_bytes(costs, first, last, budget.num_micro_batches)
    return needed_bytes + _buffer_bytes(costs, first, last, budget) <= budget.memory_bytes


def _buffer_bytes(costs: Sequence[LayerCost], first: int, last: int, budget: Budget) -> int:
    """Bytes to keep free for the slab that is loaded while this shard computes."""
    if not budget.double_buffer:
        return 0
    return slab_bytes(costs, first, last) if budget.buffer_bytes is None else budget.buffer_bytes
