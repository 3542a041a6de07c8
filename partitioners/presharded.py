"""A partition that the user writes down."""

from collections.abc import Sequence
from itertools import pairwise

from partitioners.cost import Budget, LayerCost


class Presharded:
    """Shards that end where the user says: ``Presharded([3, 6, 8])`` is ``[0, 3) [3, 6) [6, 8)``.

    The last end is the number of layers. Nothing is checked against a device's memory, and nothing is revised.
    """

    def __init__(self, boundaries: Sequence[int]) -> None:
        rule = "limit: whole numbers that rise from at least 1; pass cumulative end indices such as [3, 6, 8]"
        ends = list(boundaries)
        if not ends or any(isinstance(end, bool) or not isinstance(end, int) for end in ends):
            raise ValueError(f"boundaries: {boundaries!r}, {rule}")
        if ends[0] < 1 or any(later <= end for end, later in pairwise(ends)):
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

    def revise(self, boundaries: Sequence[int], shard: int, costs: Sequence[LayerCost] = ()) -> None:
        """Return None: the user has fixed the partition."""
        return
