"""Squared norms of one step's gradients, which tell the noise in them: of each micro-batch, and of the whole step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hydra_engine.adaptive import StepMeasures, square_norms
from hydra_engine.host.layout import Slot
from hydra_engine.host.staging import WHOLE, StepStaging


class NormGroups(NamedTuple):
    """Groups of parameters whose gradients are measured together: the optimizer's."""

    of: Mapping[int, int]  # by slot
    number: int

    @classmethod
    def single(cls, slots: Sequence[Slot]) -> NormGroups:
        """All in one group, before there is an optimizer."""
        return cls({slot.index: 0 for slot in slots}, 1)

    @classmethod
    def of_optimizer(cls, optimizer: torch.optim.Optimizer, slots: Sequence[Slot]) -> NormGroups:
        """The optimizer's."""
        group_of = {id(p): k for k, group in enumerate(optimizer.param_groups) for p in group["params"]}
        return cls({slot.index: group_of[id(slot.parameter)] for slot in slots}, len(optimizer.param_groups))


def step_measures(
    staging: StepStaging,
    groups: NormGroups,
    owned: Mapping[int, Sequence[Slot]],
    gradient: Callable[[Slot], Tensor],
    sizes: Sequence[int],
    *,
    sums_losses: bool,
    loss_scale: float | None,
) -> StepMeasures:
    """Return the norms of mean gradients, from those of gradients as they add up to the step's.

    owned: slots by shard. gradient: of a slot, once all are in DRAM; asked for where no device had the whole sum.
    sizes: samples by micro-batch. sums_losses: the loss is a sum over samples, else micro-batches weigh as they say.
    """
    scale = 1.0 if loss_scale is None else loss_scale
    total_size = float(sum(sizes))
    weights = staging.given.weights
    # A micro-batch without weight, all of it padding, has no gradient to measure.
    present = [m for m in range(staging.num_micro_batches) if weights[m] > 0]
    counts = [float(sizes[m]) if sums_losses else weights[m] * total_size for m in present]
    divisors = [scale * (count if sums_losses else weights[m]) for m, count in zip(present, counts, strict=True)]
    whole = [0.0] * groups.number
    micro = [[0.0] * groups.number for _ in present]
    for shard, slots in owned.items():
        found = staging.norms.get((shard, WHOLE))
        if found is None:
            found = _on_host(staging, groups, slots, gradient)
        for k, each in enumerate(found):
            whole[k] += each
        for row, m in zip(micro, present, strict=True):
            for k, each in enumerate(staging.norms.get((shard, m), ())):
                row[k] += each
    whole_divisor = scale * (total_size if sums_losses else 1.0)
    return StepMeasures(
        tuple(counts),
        tuple(tuple(each / d**2 for each in row) for row, d in zip(micro, divisors, strict=True)),
        tuple(each / whole_divisor**2 for each in whole),
    )


def _on_host(
    staging: StepStaging, groups: NormGroups, slots: Sequence[Slot], gradient: Callable[[Slot], Tensor]
) -> list[float]:
    """Squared norms of one shard's gradients, which the host has added up from several devices."""
    received: list[list[Tensor]] = [[] for _ in range(groups.number)]
    for slot in slots:
        if staging.has_gradient.get(slot.index):
            received[groups.of[slot.index]].append(gradient(slot))
    return [float(square_norms(each)) for each in received]
