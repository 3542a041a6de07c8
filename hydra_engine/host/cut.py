"""The cut of a task into shards, and its progress through the units of a step."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hydra_engine.host.layout import ModelLayout, Shard
from hydra_engine.host.measured import Measured
from hydra_engine.schedule import EVALUATE, Flow, Unit, evaluation_chain, training_chain
from partitioners.cost import Skip


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Shards and micro-batches of a task. It is replaced whole: nobody sees half of a new one."""

    serial: int = 0
    boundaries: tuple[int, ...] = ()  # cumulative ends of the shards
    shards: tuple[Shard, ...] = ()
    skips: tuple[Skip, ...] = ()  # values that skip layers
    chains: dict[bool, tuple[tuple[str, int], ...]] = field(default_factory=dict)  # (kind, shard) in order, by training
    num_micro_batches: int = 1  # of a training step
    lowest_backward: int = 0  # the lowest shard with a trainable parameter; the number of shards: there is none
    keeps_from: int = 0  # forwards of this shard and those above keep what autograd saves, where there is room
    locked: frozenset[int] = frozenset()  # shards that draw from process-wide generators
    drawing: frozenset[int] = frozenset()  # shards with layers that draw random numbers, or may
    keep_saved: frozenset[int] = frozenset()  # shards that differentiate inside their forward

    def at(self, layout: ModelLayout, boundaries: Sequence[int], skips: Sequence[Skip]) -> Cut:
        """The next cut, at these boundaries. A shard with a layer of a marked one is marked likewise."""
        shards = tuple(layout.shards(boundaries, skips))
        num = len(shards)
        trained = (shard.index for shard in shards if any(layout.slots[index].trainable for index in shard.slots))
        lowest = min(trained, default=num)
        return Cut(
            serial=self.serial + 1,
            boundaries=tuple(boundaries),
            shards=shards,
            skips=tuple(skips),
            chains={True: training_chain(num, lowest), False: evaluation_chain(num)},
            num_micro_batches=self.num_micro_batches,
            lowest_backward=lowest,
            keeps_from=num,  # until a planner decides
            locked=self._inside(shards, self.locked),
            drawing=self._inside(shards, self.drawing),
            keep_saved=self._inside(shards, self.keep_saved),
        )

    def _inside(self, shards: Sequence[Shard], marked: Collection[int]) -> frozenset[int]:
        """Those of other shards that hold layers of this cut's marked ones."""
        layers = {layer for j in marked for layer in range(self.shards[j].first, self.shards[j].last)}
        return frozenset(shard.index for shard in shards if not layers.isdisjoint(range(shard.first, shard.last)))

    def is_last(self, shard: Shard) -> bool:
        return shard.index == len(self.shards) - 1


class UnitProgress:
    """Tells when a task's shards are needed next, by the units of the step in progress that were begun."""

    def __init__(self, cut: Cut, measured: Measured) -> None:
        self._cut = cut
        self._measured = measured
        self._positions: dict[int, tuple[bool, int]] = {}  # by part: the chain it is on, and its first unit not begun
        self._flows: dict[bool, Flow] = {}

    def begin_parts(self, num_parts: int, training: bool) -> None:
        """Begin a step, in so many parts."""
        self._positions = dict.fromkeys(range(num_parts), (training, 0))

    def begin(self, unit: Unit) -> None:
        """Begin a unit: a device has it to compute."""
        training = unit.kind != EVALUATE
        self._positions[unit.part] = (training, 1 + self._flow(training).order[unit.kind, unit.shard])

    def next_use_s(self, shard: Shard, *, beyond_step: bool = False, with_last: bool = False) -> float:
        """Seconds of the task's own units before one of a shard; infinite if there is none.

        beyond_step: not only in the step in progress. with_last: the unit that was begun last counts, too: it may not
        have taken its input yet.
        """
        shards = self._cut.shards
        if shard.index >= len(shards) or shards[shard.index] is not shard:
            return math.inf  # of an old cut
        found = [math.inf]
        for training, position in self._positions.values():
            flow = self._flow(training)
            found.append(flow.next_use_s(shard.index, max(0, position - with_last), beyond_step=beyond_step))
        return min(found)

    def _flow(self, training: bool) -> Flow:
        if training not in self._flows:
            self._flows[training] = Flow.of(self._cut.chains[training], self._measured.unit_s, len(self._cut.shards))
        return self._flows[training]
