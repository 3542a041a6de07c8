"""Makes room when a batch does not fit: finer shards first, then more micro-batches where their number is "auto"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hydra_engine.data import Batch, Reader, Stream, TaskGenerator, capture, installed
from hydra_engine.errors import DeviceOutOfMemory, ShardDoesNotFit
from hydra_engine.host import Shard, TaskState
from hydra_engine.schedule import BACKWARD, EVALUATE, FORWARD, FUSED
from hydra_engine.tasks import Purpose, batch_size
from partitioners import LayerCost, format_bytes, halved, profile_evaluation, profile_shapes, shard_bytes

# The largest micro-batch is looked for until one that does not fit is no more than this many times as large.
NEAR = 1.06
# Where it cannot be counted, a micro-batch is at most so many times as large as the one that was rehearsed.
UNCOUNTED = 8


class Room(NamedTuple):
    """Memory of the devices that a unit may run on."""

    can_hold: Callable[[int, int], bool]  # on each: (bytes beside a slab, bytes of the slab), at the same time
    memory_bytes: int  # of the smallest


class Misfit(NamedTuple):
    """A shard for which a device has no room, and what was raised where it ran out."""

    shard: int
    error: Exception | None = None


def has_to_fit(state: TaskState, batch: Batch, *, is_spread: bool) -> bool:
    """Return True if a batch has to be fitted before it begins. Any other is where a device has run out of memory.

    is_spread: over several devices, of which one that runs out knows of its part alone. With early release, shards are
    updated by then.
    """
    if not batch.training:
        return False
    if batch.accumulation_steps != state.cut.num_micro_batches:
        return True
    may_fail = is_spread or _splits_early(state, batch) or bool(state.pool.early_release)
    return may_fail and not state.measured.known.fits(True, batch.signature)


def _splits_early(state: TaskState, batch: Batch) -> bool:
    """Return True if a batch cannot be split any more once it has begun: the next is read from where it left off."""
    return (
        state.observed.draws
        and batch.training
        and (state.task.accumulation_steps == "auto" or batch.choice is not None)
    )


def refit(
    state: TaskState, reader: Reader, batch: Batch, room: Room, *, misfit: Misfit | None = None, may_split: bool = True
) -> Batch:
    """Cut the task so that this batch fits a device; returns the batch, split as it then has to be.

    `room`: of the devices. `misfit`: the shard of a unit in which a device ran out of memory. The other shards are
    looked at as well, by shapes on fake tensors: what is known to be too large need not run out, too. `may_split`:
    whether the number of micro-batches may still change for this batch. That of training batches changes under "auto"
    alone, and for good: for those to come, too. An evaluation batch is never split.

    Raises ShardDoesNotFit when one layer is too large, and the batch cannot be split, or not any further.
    """
    if batch.training and batch.accumulation_steps != state.cut.num_micro_batches:
        batch = reader.split_again(batch, state.cut.num_micro_batches)
    known = state.measured.known
    if misfit is None and known.fits(batch.training, batch.signature):
        return batch
    costs: Sequence[LayerCost] | None = _measure(state, batch)
    if misfit is not None:
        batch, costs = _make_room(state, reader, batch, costs, room, misfit, may_split)
    while costs is not None:
        wide = _too_wide(state, costs, len(batch.micro_batches), room)
        # A lone layer's figure is an upper bound, exact for one training micro-batch in almost all layers. A larger
        # number of micro-batches changes bits, so the device itself has to say, unless it would say so too late.
        shards = [s for s in wide if s.last - s.first > 1 or _splits_early(state, batch)]
        if not shards:
            break
        batch, costs = _make_room(state, reader, batch, costs, room, Misfit(shards[0].index), may_split)
    state.check_buffers()
    known.note_fitting(batch.training, batch.signature)
    return batch


def _too_wide(state: TaskState, costs: Sequence[LayerCost], num_micro_batches: int, room: Room) -> list[Shard]:
    """The shards for which devices have no room."""

    def needed_bytes(shard: Shard) -> int:
        grown = state.buffer_bytes(shard) - shard.buffer_bytes
        return shard_bytes(costs, shard.first, shard.last, num_micro_batches) - shard.slab_bytes + grown

    return [shard for shard in state.cut.shards if not room.can_hold(needed_bytes(shard), shard.slab_bytes)]


def _make_room(
    state: TaskState,
    reader: Reader,
    batch: Batch,
    costs: Sequence[LayerCost] | None,
    room: Room,
    misfit: Misfit,
    may_split: bool,
) -> tuple[Batch, Sequence[LayerCost] | None]:
    finer = halved(state.cut.boundaries, misfit.shard, costs or ())
    if finer is not None:
        state.cut_at(finer)
        return batch, costs
    why_not = _why_not_split(state, reader, batch, may_split)
    if why_not is not None:
        text, remedy = _message(state, batch, costs, room, misfit, why_not[0]), why_not[1]
        raise ShardDoesNotFit(f"{text}; {remedy}use a device with more memory, or smaller batches") from misfit.error
    if batch.choice is not None:
        batch = reader.in_smaller_pieces(batch)
        return batch, _measure(state, batch)
    number = min(2 * len(batch.micro_batches), batch.num_samples)
    state.split_into(number)
    batch = reader.split_again(batch, number)
    return batch, _measure(state, batch)


def largest_micro_batch(state: TaskState, batch: Batch, room: Room, most: int) -> int:
    """Return the most samples, up to `most`, of a micro-batch that fits the devices as the task is cut.

    Counted on fake tensors, to within a few percent; at least those of the batch, whose step was rehearsed. If layers
    or the loss look at values, only a run can tell: then it may be several times as large, and the device says.
    """
    inputs, target, _ = max(batch.micro_batches, key=lambda micro_batch: batch_size(micro_batch[0]))
    size = fitting = batch_size(inputs)

    def count(num_samples: int) -> Sequence[LayerCost] | None:
        return _count(state, True, *(_of_samples(each, size, num_samples) for each in (inputs, target)))

    def fits(num_samples: int) -> bool:
        costs = count(num_samples)
        return costs is not None and not _too_wide(state, costs, 2, room)

    if count(size) is None:
        return min(most, UNCOUNTED * size)
    too_large = None
    while fitting < most and (too_large is None or too_large > NEAR * fitting):
        tried = min(most, 2 * fitting) if too_large is None else (fitting + too_large) // 2
        if tried == fitting:
            break
        if fits(tried):
            fitting = tried
        else:
            too_large = tried
    return fitting


def _of_samples(value: Any, size: int, num_samples: int) -> Any:
    """Micro-batch of another number of samples, whose tensors nobody fills: they take no memory."""

    def other(leaf: Tensor) -> Tensor:
        is_of_samples = leaf.dim() > 0 and leaf.shape[0] == size
        return leaf.new_empty((num_samples, *leaf.shape[1:])) if is_of_samples else leaf

    return pytree.tree_map_only(Tensor, other, value)


def _measure(state: TaskState, batch: Batch) -> Sequence[LayerCost] | None:
    """Costs of the largest micro-batch; None where only a run can tell."""
    inputs, target, _ = max(batch.micro_batches, key=lambda micro_batch: batch_size(micro_batch[0]))
    return _count(state, batch.training, inputs, target)


def _count(state: TaskState, training: bool, inputs: Any, target: Any) -> Sequence[LayerCost] | None:
    """Costs of the layers for a micro-batch, counted on fake tensors."""
    # Other tasks' loaders and layers draw meanwhile. Draws from torch go elsewhere; others need the lock.
    apart = installed(Stream(capture())) if state.cut.locked else TaskGenerator(torch.Generator())
    task = state.task
    with apart:
        try:
            if training:
                return profile_shapes(task.model, inputs, target, task.loss_fn, task.precision, state.place)
            loss_fn = None if task.purpose is Purpose.PREDICT else task.loss_fn
            return profile_evaluation(task.model, inputs, target, loss_fn, precision=task.precision, may_run=False)
        except Exception:  # the layer's own mistake shows when the step runs
            return None


def _why_not_split(state: TaskState, reader: Reader, batch: Batch, may_split: bool) -> tuple[str, str] | None:
    """Why a batch cannot be in more micro-batches, and a remedy, if there is one; None when it can."""
    if not batch.training:
        return "an evaluation batch is computed whole", ""
    if len(batch.micro_batches) >= batch.num_samples:
        return f"a batch of {batch.num_samples} samples is in {len(batch.micro_batches)} micro-batches already", ""
    if batch.choice is not None:
        assert reader.chooser is not None
        why = reader.chooser.fixed_because(batch.choice.step)
        return None if why is None else (why, "")
    if state.observed.draws_outside_torch:
        return "a layer draws from `random` or `numpy.random`, which micro-batches would do in another order", ""
    if state.shares_changed_buffer():
        why = "layers of several shards share a buffer that changes, which micro-batches would do in another order"
        return why, ""
    number, most = state.task.accumulation_steps, state.task.max_device_batch
    if most is not None:
        return f"max_device_batch={most} is fixed", "lower max_device_batch, "
    if number != "auto":  # with others, results would not be those of the plain loop with this one
        return f"accumulation_steps={number} is fixed", 'set accumulation_steps="auto", '
    if not may_split:
        return (
            "the next batch is read already, from where the layers left the random stream, so this one cannot be split "
            "any more",
            "set accumulation_steps to more than 1 from the start, ",
        )
    return None


def _message(
    state: TaskState, batch: Batch, costs: Sequence[LayerCost] | None, room: Room, misfit: Misfit, why_not: str
) -> str:
    shard, error = state.cut.shards[misfit.shard], misfit.error
    grown = 0 if state.observed.resized.isdisjoint(shard.buffers) else state.buffer_bytes(shard)
    needed = 0
    if costs is not None:
        needed = shard_bytes(costs, shard.first, shard.last, len(batch.micro_batches))
        needed += grown and grown - shard.buffer_bytes
    if isinstance(error, DeviceOutOfMemory):  # beside what was there
        needed = max(needed, room.memory_bytes - error.free_bytes + error.needed_bytes)
    kind = "training step" if batch.training else "evaluation batch"
    return (
        f"{state.name}: {state.layout.shown(state.layout.names[shard.first])}"
        + (f" needs {format_bytes(needed)} ({needed} bytes) and" if needed else "")
        + f" does not fit a device alone at {kind} {batch.step}, and {why_not}; limit: "
        + f"{format_bytes(room.memory_bytes)} ({room.memory_bytes} bytes)"
        + (f", of which buffers that the layer resizes take {format_bytes(grown)}" if grown else "")
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
