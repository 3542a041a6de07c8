"""Figures of a task's units: seconds, and bytes on a device, as metered or at most, by the sizes of the batch."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

from hydra_engine.data import Signature
from hydra_engine.host.layout import Shard
from hydra_engine.trace import Timing

# A unit is metered at so many signatures, each at its first sight. One after them that is no larger than a known one is
# granted what that takes: of batches whose sizes vary, few are larger than all before.
NUM_METERED = 8
# The first to be seen are forgotten.
MOST_KNOWN = 64


class UnitBytes(NamedTuple):
    """Bytes that a unit takes beside its slab."""

    work: int  # peak of what it creates: activations, gradients, outputs
    input: int  # of one micro-batch, the largest
    output: int  # of one micro-batch, the largest

    def total(self, num_micro_batches: int) -> int:
        """Inputs stream one micro-batch ahead, outputs are stored one behind."""
        several = num_micro_batches > 1
        return self.work + (1 + several) * self.input + several * self.output


class KnownUnits:
    """Bytes of a task's units, and batches that fit. Asked by the deciding thread, told by lanes and by fits."""

    def __init__(self) -> None:
        # Batches that fit, by whether they train. Replaced, never changed: the deciding thread reads it.
        self._batches: tuple[tuple[bool, Signature], ...] = ()
        self._units: dict[tuple[str, int, tuple[Any, ...]], dict[Signature, UnitBytes]] = {}  # by kind, shard, role
        self._is_monotone = True  # no unit was seen to take more at smaller sizes

    def forget_units(self) -> None:
        """Forget what was metered: shards are others now, or the number of micro-batches."""
        self._units = {}

    def forget_batches(self) -> None:
        self._batches = ()

    def note_fitting(self, training: bool, signature: Signature) -> None:
        """Remember that a batch fits."""
        self._batches = (*self._batches[1 - MOST_KNOWN :], (training, signature.of_batch))

    def fits(self, training: bool, signature: Signature) -> bool:
        """Return True if a batch is no larger, in any dimension, than one of its kind that was seen to fit."""
        batch = signature.of_batch
        return any(kind == training and batch.no_larger(other) for kind, other in self._batches)

    def get(self, kind: str, shard: Shard, signature: Signature) -> UnitBytes | None:
        """Bytes that a unit takes, or at most takes; None: it has to be metered."""
        table = dict(self._table(kind, shard, signature))
        if signature in table or len(table) < NUM_METERED or not self._is_monotone:
            return table.get(signature)
        numbers, number = _numbers_are_sizes(table), signature.num_micro_batches
        above = [(other, found) for other, found in table.items() if signature.no_larger(other, numbers=numbers)]
        alike = [found for other, found in above if signature.values == other.values[:number]]
        if alike:
            return min(alike, key=lambda found: found.total(number))
        if above:  # with values, names maybe, that were not seen yet
            return UnitBytes(*map(max, *table.values()))
        return None

    def learn(self, kind: str, shard: Shard, signature: Signature, measured: UnitBytes) -> None:
        """Remember what a metered run took."""
        table = self._table(kind, shard, signature)
        if signature not in table:
            number = signature.num_micro_batches
            for other, found in table.items():
                is_above = signature.values == other.values[:number] and signature.no_larger(other)
                if is_above and measured.total(number) > found.total(number):
                    self._is_monotone = False
            if len(table) >= MOST_KNOWN:
                del table[next(iter(table))]
        table[signature] = UnitBytes(*map(max, table.get(signature, measured), measured))

    def items(self) -> Iterator[tuple[tuple[str, int, Signature], UnitBytes]]:
        """By kind, index of the shard and signature, what was metered."""
        for (kind, shard, _), table in list(self._units.items()):
            for signature, found in list(table.items()):
                yield (kind, shard, signature), found

    def _table(self, kind: str, shard: Shard, signature: Signature) -> dict[Signature, UnitBytes]:
        return self._units.setdefault((kind, shard.index, signature.role), {})


def _numbers_are_sizes(table: Mapping[Signature, UnitBytes]) -> bool:
    """Return False if numbers in batches were seen to decide nothing, as ids do that count up for ever."""
    found: dict[Hashable, tuple[set[Hashable], set[UnitBytes]]] = {}
    for signature, taken in table.items():
        numbers, all_taken = found.setdefault((signature.sizes, signature.values), (set(), set()))
        numbers.add(signature.numbers)
        all_taken.add(taken)
    return all(len(numbers) < 2 or len(taken) > 1 for numbers, taken in found.values())


class Measured:
    """Keeps what was measured of a task: of its units, of its shards' graphs, and of batches that fit."""

    def __init__(self) -> None:
        self.unit_s: dict[tuple[str, int], float] = {}  # by (kind, shard)
        self.timings: dict[tuple[str, int], Timing] = {}  # likewise, of the last one, where launching is not computing
        self.known = KnownUnits()
        # Bytes that a forward's graphs take beside the slab, by (shard, signature).
        self.graph_bytes: dict[tuple[int, Signature], int] = {}
        self.uncounted: set[int] = set()  # shards whose graphs hold more than can be counted
        self.state_bytes: dict[int, int] = {}  # of the optimizer's state, by slot
        self.staging_bytes = 0  # DRAM of the step that was rehearsed

    def copied(self) -> Measured:
        """Return the same figures, apart from what is measured from now on."""
        return copy.deepcopy(self)

    def forget_shards(self) -> None:
        """Forget what goes by shards that are others now."""
        self.known.forget_units()
        self.graph_bytes, self.uncounted = {}, set()

    def graph_bytes_of(self, shard: Shard, signature: Signature) -> int | None:
        """Bytes that a forward's graphs take at most beside the slab; None: they have to be counted."""
        found = self.graph_bytes.get((shard.index, signature))
        if found is not None:
            return found
        known = list(self.graph_bytes.items())
        return min((n for (j, other), n in known if j == shard.index and signature.no_larger(other)), default=None)

    def learn_graph_bytes(self, shard: Shard, signature: Signature, num_bytes: int) -> None:
        """Remember what autograd saved in a forward."""
        known = self.graph_bytes_of(shard, signature)
        if known is None or num_bytes > known:
            own = [key for key in list(self.graph_bytes) if key[0] == shard.index]
            if len(own) >= MOST_KNOWN:
                del self.graph_bytes[own[0]]
            self.graph_bytes[shard.index, signature] = num_bytes
