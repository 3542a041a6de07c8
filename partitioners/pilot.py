"""The default partitioner: as few, as large shards as fit, front to back."""

from collections.abc import Sequence

from partitioners.cost import Budget, LayerCost, LayerTooLarge, shard_bytes, slab_bytes


class Pilot:
    """Packs layers front to back while a shard and the next shard's slab fit the device together.

    A layer that fits only without room for another slab gets a shard of its own, whose neighbours load serially.
    """

    def __repr__(self) -> str:
        return "Pilot()"

    def partition(self, costs: Sequence[LayerCost], budget: Budget) -> list[int]:
        """Fewest-shards-first partition; raises LayerTooLarge when a layer does not fit the device even alone."""
        boundaries = []
        first = 0
        while first < len(costs):
            alone_bytes = shard_bytes(costs, first, first + 1, budget.num_micro_batches)
            if alone_bytes > budget.memory_bytes:
                raise LayerTooLarge.of(costs[first], alone_bytes, budget.memory_bytes)
            last = first + 1
            while last < len(costs) and _fits(costs, first, last + 1, budget):
                last += 1
            boundaries.append(last)
            first = last
        return boundaries

    def revise(self, boundaries: Sequence[int], shard: int, costs: Sequence[LayerCost] = ()) -> list[int] | None:
        """Cuts ``shard`` in two where the bytes of its halves differ least (its layers, without ``costs``)."""
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


def _fits(costs: Sequence[LayerCost], first: int, last: int, budget: Budget) -> bool:
    needed_bytes = shard_bytes(costs, first, last, budget.num_micro_batches)
    return needed_bytes + _buffer_bytes(costs, first, last, budget) <= budget.memory_bytes


def _buffer_bytes(costs: Sequence[LayerCost], first: int, last: int, budget: Budget) -> int:
    """Room to keep for the slab that is loaded while this shard computes."""
    if not budget.double_buffer:
        return 0
    return slab_bytes(costs, first, last) if budget.buffer_bytes is None else budget.buffer_bytes
