"""Figures of a task's units: seconds, and bytes on a device, as metered or at most, by the sizes of the batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from hydra_engine.data import Signature
from hydra_engine.host.layout import Shard
from hydra_engine.schedule import EVALUATE
from hydra_engine.trace import Timing
from partitioners import LayerCost

# A unit is metered at so many signatures, each at its first sight. Of those after them, one that is no larger than a
# known one is granted what that takes: names and numbers that differ in every batch are not metered for ever. One that
# is larger is granted what layers cost, counted at sizes rounded up, once a run at such sizes took no more than that.
NUM_METERED = 8
# The first to be seen are forgotten.
MOST_KNOWN = 64

Costs: TypeAlias = "Sequence[LayerCost]"
Count: TypeAlias = "Callable[[Costs, int, int, int], int]"  # of layers [first, last), in so many micro-batches


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
        # Batches that fit, by whether they train; with costs of their layers where all shards fit by these, too.
        # Replaced, never changed: the deciding thread reads it.
        self._batches: dict[tuple[bool, Signature], Costs | None] = {}
        self._units: dict[tuple[str, int, tuple[Any, ...]], dict[Signature, UnitBytes]] = {}  # by kind, shard, role
        self._proven: set[tuple[str, int, tuple[Any, ...], Signature]] = set()  # units, and sizes counted well
        self._is_monotone = True  # no unit was seen to take more at smaller sizes
        self._compared: list[tuple[bool, Any]] = []  # forms of batches, for which that was counted
        self._has_costs = True  # layers can be counted; else whole numbers are values like others

    def forget_units(self) -> None:
        """Forget what was metered: shards are others now, or the number of micro-batches."""
        self._units, self._proven = {}, set()

    def forget_batches(self) -> None:
        self._batches = {}

    def cannot_count(self) -> None:
        """Remember that fake tensors do not tell what layers cost."""
        self._has_costs = False

    def note_fitting(self, training: bool, signature: Signature, costs: Costs | None = None) -> None:
        """Remember that a batch fits; costs: of its layers, where every shard fits by these."""
        found = dict(self._batches)
        if len(found) >= MOST_KNOWN:
            _, oldest = first = next(iter(found))
            del found[first]
            self._proven = {each for each in self._proven if each[-1] != oldest}
        self._batches = found | {(training, signature.of_batch): costs}

    def fits(self, training: bool, signature: Signature) -> bool:
        """Return True if a batch is no larger, in any dimension, than one of its kind that was seen to fit."""
        batch, known = signature.of_batch, self._batches
        if (training, batch) in known:
            return True
        return any(kind == training and self._no_larger(batch, other) for kind, other in known)

    def wider(self, training: bool, signature: Signature) -> tuple[Signature, Signature | None] | None:
        """Sizes to count layers at for this batch and for others a little larger; None: it is like none before.

        The first time for batches of a form, with sizes that are a little smaller than those: layers are to take no
        more there.
        """
        batch = signature.of_batch
        for kind, other in reversed(self._batches):
            if kind == training and other.forms == batch.forms and self._has_costs:
                sizes = batch.wider(other)
                is_first, self._compared = (training, batch.forms) not in self._compared, self._compared[-MOST_KNOWN:]
                if is_first and sizes != batch:
                    self._compared.append((training, batch.forms))
                return sizes, sizes.narrower(other) if is_first else None
        return None

    def distrust_sizes(self) -> None:
        """Remember that units may take more at smaller sizes."""
        self._is_monotone = False

    def get(self, kind: str, shard: Shard, signature: Signature, count: Count | None) -> UnitBytes | None:
        """Bytes that a unit takes, or at most takes; None: it has to be metered.

        count: its bytes by the costs of its layers; None: it takes more than these.
        """
        table = self._table(kind, shard, signature)
        found = table.get(signature)
        if found is None and len(table) >= NUM_METERED and self._is_monotone:
            found = self._at_most(kind, shard, signature, count)
        return found

    def learn(self, kind: str, shard: Shard, signature: Signature, measured: UnitBytes, count: Count | None) -> None:
        """Remember what a metered run took; the others as in `get`."""
        table = self._table(kind, shard, signature)
        known = table.get(signature)
        if known is None:
            self._check(kind, shard, signature, measured, count)
            if len(table) >= MOST_KNOWN:
                del table[next(iter(table))]
            known = measured
        table[signature] = UnitBytes(*map(max, known, measured))

    def items(self) -> Iterator[tuple[tuple[str, int, Signature], UnitBytes]]:
        """By kind, index of the shard and signature, what was metered."""
        for (kind, shard, _), table in list(self._units.items()):
            for signature, found in list(table.items()):
                yield (kind, shard, signature), found

    def _table(self, kind: str, shard: Shard, signature: Signature) -> dict[Signature, UnitBytes]:
        return self._units.setdefault((kind, shard.index, signature.role), {})

    def _check(self, kind: str, shard: Shard, signature: Signature, measured: UnitBytes, count: Count | None) -> None:
        """See whether sizes decide: with the same plain values, smaller ones take no more, none more than counted."""
        number = signature.num_micro_batches
        limits = [found.total(number) for found in self._above(kind, shard, signature)]
        counted = self._counted(kind, shard, signature, count)
        if counted is not None:
            limits.append(counted[0])
            self._proven.add((kind, shard.index, signature.role, counted[1]))
        if limits and measured.total(number) > min(limits):
            self.distrust_sizes()

    def _above(self, kind: str, shard: Shard, signature: Signature) -> list[UnitBytes]:
        """Bytes that the unit took with the same plain values, at sizes that are no smaller."""
        table = list(self._table(kind, shard, signature).items())
        alike = [(other, found) for other, found in table if self._same_values(signature, other)]
        return [found for other, found in alike if self._no_larger(signature, other)]

    def _at_most(self, kind: str, shard: Shard, signature: Signature, count: Count | None) -> UnitBytes | None:
        above, number = self._above(kind, shard, signature), signature.num_micro_batches
        if above:
            return min(above, key=lambda found: found.total(number))
        table = list(self._table(kind, shard, signature).items())
        most = UnitBytes(*map(max, *(found for _, found in table)))
        if any(self._no_larger(signature, other) for other, _ in table):  # with values that were not seen yet
            return most
        counted = self._counted(kind, shard, signature, count)
        if counted is None or (kind, shard.index, signature.role, counted[1]) not in self._proven:
            return None
        is_new = not any(self._same_values(signature, other) for other, _ in table)
        return UnitBytes(max(counted[0], most.total(number)) if is_new else counted[0], 0, 0)

    def _counted(
        self, kind: str, shard: Shard, signature: Signature, count: Count | None
    ) -> tuple[int, Signature] | None:
        """The least by the costs of layers at sizes that are no smaller, all in all, and these sizes."""
        found = [
            (count(costs, shard.first, shard.last, other.num_micro_batches), other)
            for (training, other), costs in self._batches.items()
            if count is not None
            and costs is not None
            and training == (kind != EVALUATE)
            and self._no_larger(signature.of_batch, other)
        ]
        return min(found, default=None, key=itemgetter(0))

    def saved_bytes(self, shard: Shard, signature: Signature) -> int | None:
        """The most that autograd saves in a forward, by the costs of layers."""
        for (training, other), costs in self._batches.items():
            if costs is not None and training and self._no_larger(signature.of_batch, other):
                layers = costs[shard.first : shard.last]
                return other.num_micro_batches * (layers[0].input_bytes + sum(cost.saved_bytes for cost in layers))
        return None

    def _same_values(self, signature: Signature, other: Signature) -> bool:
        number = signature.num_micro_batches
        same_numbers = self._has_costs or signature.numbers == other.numbers[:number]
        return same_numbers and signature.values == other.values[:number]

    def _no_larger(self, signature: Signature, other: Signature) -> bool:
        return signature.no_larger(other, numbers=self._has_costs)


class Measured:
    """Keeps what was measured of a task: of its units, of its shards' graphs, and of batches that fit."""

    def __init__(self) -> None:
        self.unit_s: dict[tuple[str, int], float] = {}  # by (kind, shard)
        self.timings: dict[tuple[str, int], Timing] = {}  # likewise, of the last one, where launching is not computing
        self.known = KnownUnits()
        self.evaluated_parts: dict[Hashable, int] = {}  # of evaluation batches too large for a layer alone
        # Bytes that a forward's graphs take beside the slab, by (shard, signature).
        self.graph_bytes: dict[tuple[int, Signature], int] = {}
        self.uncounted: set[int] = set()  # shards whose graphs hold more than can be counted
        self.repeating: set[tuple[int, int]] = set()  # layers [first, last) whose forward repeats in a backward
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
        above = [n for (j, other), n in known if j == shard.index and signature.no_larger(other)]
        return min(above) if above else self.known.saved_bytes(shard, signature)

    def learn_graph_bytes(self, shard: Shard, signature: Signature, num_bytes: int) -> None:
        """Remember what autograd saved in a forward."""
        known = self.graph_bytes_of(shard, signature)
        if known is None or num_bytes > known:
            own = [key for key in list(self.graph_bytes) if key[0] == shard.index]
            if len(own) >= MOST_KNOWN:
                del self.graph_bytes[own[0]]
            self.graph_bytes[shard.index, signature] = num_bytes
