"""Makes room when a batch does not fit: finer shards first, more micro-batches where a single layer is too large."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hydra_engine.batches import batch_size
from hydra_engine.errors import ShardDoesNotFit
from hydra_engine.randomness import Stream, TaskGenerator, capture, installed
from hydra_engine.reader import Batch, Reader
from hydra_engine.schedule import BACKWARD, EVALUATE, FORWARD, FUSED, Unit
from hydra_engine.shard import Shard
from hydra_engine.task_state import TaskState
from partitioners import LayerCost, format_bytes, halved, profile_evaluation, profile_shapes, shard_bytes


def refit(
    state: TaskState,
    reader: Reader,
    batch: Batch,
    can_hold: Callable[[int, int], bool],
    *,
    misfit: Unit | None = None,
    error: Exception | None = None,
    may_split: bool = True,
) -> Batch:
    """Cut the task so that this batch fits a device; returns the batch, split as it then has to be.

    `can_hold`: whether devices have room for (bytes beside a slab, bytes of the slab) at the same time. Shapes are
    measured on fake tensors. `misfit`: a unit in which a device ran out of memory, raising `error`. `may_split`:
    whether the number of micro-batches may still change for this batch. That of training batches changes for good: for
    those to come as well. An evaluation batch is split for itself.

    Raises ShardDoesNotFit when one layer is too large for one sample, or the batch cannot be split.
    """
    if batch.training and batch.accumulation_steps != state.accumulation_steps:
        batch = reader.split_again(batch, state.accumulation_steps)
    whole = tuple(each.signature for each in batch.whole)
    if not batch.training and misfit is None and whole in state.evaluated_parts:
        return reader.split_again(batch, state.evaluated_parts[whole])
    costs: Sequence[LayerCost] | None = _measure(state, batch)
    if misfit is not None:
        batch, costs = _make_room(state, reader, batch, costs, misfit.shard, error, may_split)
    while costs is not None:
        needed = {s.index: _needed_bytes(costs, s.first, s.last, batch) - s.slab_bytes for s in state.shards}
        wide = [s for s in state.shards if not can_hold(needed[s.index], s.slab_bytes)]
        # A lone layer's figure is an upper bound, exact for one training micro-batch in almost all layers. A larger
        # number of micro-batches changes bits, so the device itself has to say, unless it would say so too late.
        wide = [s for s in wide if s.last - s.first > 1 or (state.draws and batch.training)]
        if not wide:
            break
        batch, costs = _make_room(state, reader, batch, costs, wide[0].index, None, may_split)
    state.check_buffers()
    state.note_fitting(batch.training, batch.signature)
    if not batch.training and len(batch.micro_batches) > 1:
        state.evaluated_parts[whole] = len(batch.micro_batches)
    return batch


def _make_room(
    state: TaskState,
    reader: Reader,
    batch: Batch,
    costs: Sequence[LayerCost] | None,
    shard: int,
    error: Exception | None,
    may_split: bool,
) -> tuple[Batch, Sequence[LayerCost] | None]:
    finer = halved(state.boundaries, shard, costs or ())
    if finer is not None:
        state.cut(finer)
        return batch, costs
    why_not = _why_not_split(state, batch, may_split)
    if why_not is not None:
        raise ShardDoesNotFit(_message(state, batch, costs, shard, why_not)) from error
    number = min(2 * len(batch.micro_batches), batch.num_samples)
    if batch.training:
        state.accumulation_steps = reader.accumulation_steps = number
        state.forget_units()
    batch = reader.split_again(batch, number)
    return batch, _measure(state, batch)


def _measure(state: TaskState, batch: Batch) -> Sequence[LayerCost] | None:
    """Costs of the largest micro-batch; None where only a run can tell."""
    inputs, target, _ = max(batch.micro_batches, key=lambda micro_batch: batch_size(micro_batch[0]))
    # Other tasks' loaders and layers draw meanwhile. Draws from torch go elsewhere; others need the lock.
    apart = installed(Stream(capture())) if state.locked else TaskGenerator(torch.Generator())
    task = state.task
    with apart:
        try:
            if batch.training:
                return profile_shapes(task.model, inputs, target, task.loss_fn, task.precision, state.place)
            loss_fn = None if task.predicts else task.loss_fn
            return profile_evaluation(task.model, inputs, target, loss_fn, precision=task.precision, may_run=False)
        except Exception:  # the layer's own mistake shows when the step runs
            return None


def _needed_bytes(costs: Sequence[LayerCost], first: int, last: int, batch: Batch) -> int:
    """Bytes of a device for layers `[first, last)` and this batch."""
    return shard_bytes(costs, first, last, len(batch.micro_batches))


def _why_not_split(state: TaskState, batch: Batch, may_split: bool) -> str | None:
    """Why a batch cannot be in more micro-batches, or None when it can."""
    if len(batch.micro_batches) >= batch.num_samples:
        return f"a batch of {batch.num_samples} samples is in {len(batch.micro_batches)} micro-batches already"
    if state.task.predicts:
        return "the outputs of its parts would not be the bits of the whole batch's"
    if not batch.training:
        return None
    if not may_split:
        return (
            "the next batch is read already, from where the layers left the random stream, so this one cannot be split "
            "any more; set accumulation_steps to more than 1 from the start"
        )
    if state.draws_outside_torch:
        return "a layer draws from `random` or `numpy.random`, which micro-batches would do in another order"
    if state.shares_changed_buffer():
        return "layers of several shards share a buffer that changes, which micro-batches would do in another order"
    return None


def _message(state: TaskState, batch: Batch, costs: Sequence[LayerCost] | None, shard: int, why_not: str) -> str:
    first = state.shards[shard].first
    needed = ""
    if costs is not None:
        num_bytes = _needed_bytes(costs, first, first + 1, batch)
        needed = f" needs {format_bytes(num_bytes)} ({num_bytes} bytes) and"
    kind = "training step" if batch.training else "evaluation batch"
    return (
        f"{state.name}: layer {first} ({state.layout.names[first]}){needed} does not fit a device alone at {kind} "
        f"{batch.step}, and {why_not}; use a device with more memory, or smaller batches"
    )


def shared_out(
    unit_s: Mapping[tuple[str, int], float], old: Sequence[Shard], shards: Sequence[Shard]
) -> dict[tuple[str, int], float]:
    """Estimates for the units of finer shards: an old unit's seconds in equal parts for its layers.

    Only the last shard runs forward and backward as one unit; what it takes is what its parts' backward units take.
    """
    found: dict[tuple[str, int], float] = {}
    last = len(shards) - 1
    for shard in shards:
        whole = next(each for each in old if each.first <= shard.first < each.last)
        share = (shard.last - shard.first) / (whole.last - whole.first)
        backward_s = share * unit_s.get((FUSED if whole is old[-1] else BACKWARD, whole.index), 0.0)
        forward_s = share * unit_s.get((FORWARD, whole.index), 0.0) or backward_s / 3
        kinds = {FUSED: backward_s} if shard.index == last else {FORWARD: forward_s, BACKWARD: backward_s}
        found |= {(kind, shard.index): seconds for kind, seconds in kinds.items()}
        found[EVALUATE, shard.index] = share * unit_s.get((EVALUATE, whole.index), 0.0)
    return found
