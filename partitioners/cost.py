"""What a layer costs, what a device offers, and how many bytes a shard of layers needs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

from partitioners.sizes import format_bytes

# Where a slab starts each tensor on the CPU: kernels choose by alignment, and another kernel gives other bits.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer's costs for one micro-batch; the last layer's include the loss function, and its output is the loss."""

    index: int
    name: str
    param_bytes: int  # of all it holds; one shared with another layer counts in both (each shard loads its own)
    grad_bytes: int  # of its trainable parameters
    buffer_bytes: int
    input_bytes: int  # of the boundary that enters it; storage reached through several tensors counts once
    output_bytes: int
    saved_bytes: int  # created by its forward in grad mode and alive afterwards: saved tensors and output
    peak_bytes: int  # most alive at once of what its forward and backward create, so without incoming gradient
    forward_s: float
    backward_s: float
    draws_random: bool  # its forward ran a seeded operation of torch's CPU generator
    draws_globally: bool  # it drew from `random`, `numpy.random` or in backward: needs process-wide generators
    changes_input: bool  # it worked in place on an input tensor
    changes_buffers: bool
    shares_with: tuple[int, ...]  # indices of other layers that hold one of its parameters
    target_bytes: int = 0  # last layer only
    padding_bytes: int = 0  # what starting each parameter and buffer at a 64-byte boundary adds to a slab
    forward_peak_bytes: int | None = None  # most alive at once of what a forward creates that saves nothing
    held_bytes: int = 0  # storage behind its output, where that is more than output_bytes
    shared_bytes: int = 0  # of its trainable parameters that other layers hold too
    accumulated_bytes: int | None = None  # of its gradients added up over micro-batches; None: grad_bytes
    puts: tuple[tuple[str, int], ...] = ()  # what it leaves for layers further up (`Skips`): names and bytes
    gets: tuple[str, ...] = ()  # what it takes of that
    forward_flops: int = 0
    backward_flops: int = 0
    timed: bool = True  # seconds were measured; False: counted operations and bytes against stated rates

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("accumulated_bytes", "forward_peak_bytes") and value is None:
                continue
            if field.name == "index" or field.name.endswith(("_bytes", "_flops")):
                _check_count(f"LayerCost.{field.name}", value, at_least=0)
            elif field.name.endswith("_s") and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"LayerCost.{field.name}: {value!r}, limit: finite and >= 0; pass seconds")
        if self.index in self.shares_with:
            raise ValueError(f"LayerCost.shares_with: {self.shares_with} names the layer itself; list the others only")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What one device offers a task. The rates matter to `Optimal` and to predicted times only."""

    memory_bytes: int
    buffer_bytes: int | None = None  # kept free for the next shard's slab; None: as much as the shard's own slab
    double_buffer: bool = True
    num_micro_batches: int = 1
    link_bytes_per_s: float = math.inf  # between DRAM and device, each direction on its own
    update_bytes_per_s: float = math.inf  # bytes of trainable parameters that the host optimizer steps in a second
    unit_s: float = 0.0  # fixed cost of each unit

    def __post_init__(self) -> None:
        _check_count("Budget.memory_bytes", self.memory_bytes, at_least=1)
        _check_count("Budget.num_micro_batches", self.num_micro_batches, at_least=1)
        if self.buffer_bytes is not None:
            _check_count("Budget.buffer_bytes", self.buffer_bytes, at_least=0)
        for field in ("link_bytes_per_s", "update_bytes_per_s"):
            if not getattr(self, field) > 0:
                raise ValueError(f"Budget.{field}: {getattr(self, field)!r}, limit: above 0; leave it out for no limit")
        if not (math.isfinite(self.unit_s) and self.unit_s >= 0):
            raise ValueError(f"Budget.unit_s: {self.unit_s!r}, limit: finite and >= 0; pass seconds")

    def with_micro_batches(self, number: int) -> "Budget":
        """The same for a step of so many micro-batches."""
        return replace(self, num_micro_batches=number)


class Partitioner(Protocol):
    """Cuts a task's layers into shards.

    A partitioner keeps its settings only, so one object may serve several tasks. A partition is written as cumulative
    end indices: ``[3, 6, 8]`` is the shards ``[0, 3) [3, 6) [6, 8)`` of eight layers.
    """

    def partition(self, costs: Sequence[LayerCost], budget: Budget) -> list[int]:
        """End indices of shards that each fit ``budget``; every layer is in exactly one, in order.

        Raises LayerTooLarge when a layer does not fit even alone, ValueError when ``costs`` cannot be cut so.
        """

    def revise(self, boundaries: Sequence[int], shard: int, costs: Sequence[LayerCost] = ()) -> list[int] | None:
        """A finer partition after a run measured that ``shard`` does not fit; None when there is none.

        ``costs`` may be left out; a partitioner that balances bytes then counts layers instead.
        """


class ChangesParameters(ValueError):
    """A layer changed one of its parameters while it ran."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"parameter {name}: changed while the layer ran, limit: only the optimizer changes parameters; compute the "
            f"changed one anew in each forward (torch.nn.utils.parametrize), keep what forward changes in a buffer, "
            f"and leave out options such as max_norm"
        )


class LayerTooLarge(ValueError):
    """A single layer needs more memory than the device has."""

    def __init__(self, message: str, *, layer: str = "", needed_bytes: int = 0, available_bytes: int = 0) -> None:
        super().__init__(message)
        self.layer = layer
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes

    @classmethod
    def of(cls, cost: LayerCost, needed_bytes: int, available_bytes: int) -> "LayerTooLarge":
        """The error for a layer that does not fit a device alone."""
        return cls(
            f"layer {cost.index} ({cost.name}): needs {format_bytes(needed_bytes)} ({needed_bytes} bytes) alone on a "
            f"device, available: {format_bytes(available_bytes)} ({available_bytes} bytes); give the device more "
            f"memory, make micro-batches smaller (raise accumulation_steps), or split the layer into several",
            layer=cost.name,
            needed_bytes=needed_bytes,
            available_bytes=available_bytes,
        )


def slab_bytes(costs: Sequence[LayerCost], first: int, last: int) -> int:
    """Bytes of the slab that holds the parameters and buffers of layers ``[first, last)``.

    A parameter that two layers of the shard share is counted twice: an upper bound that needs no identities.
    """
    _check_shard(costs, first, last)
    return sum(_aligned(cost.param_bytes + cost.buffer_bytes + cost.padding_bytes) for cost in costs[first:last])


def unit_bytes(costs: Sequence[LayerCost], first: int, last: int, num_micro_batches: int = 1) -> int:
    """Most bytes beside the slab while layers ``[first, last)`` run forward and backward over the micro-batches.

    Where neither these layers nor any below hold a trainable parameter, they run forward only, and take less; the last
    shard, too, with the target beside. Else, with n micro-batches, the sum of

    - work: the worst moment of one micro-batch (``_work_bytes``);
    - n > 1: every gradient of the shard, accumulated over the micro-batches before this one;
    - min(n, 2) times what enters: input, incoming gradient of the shard's output (none for the last shard, which
      ends in the loss), target. The next micro-batch's is loaded while this one computes;
    - n > 1: one thing that leaves, output or input gradient of the micro-batch before, still being stored;
    - parameters that a shard above holds too: their gradient from there enters and is added to; n > 1: what goes to a
      shard below is being stored;
    - values that skip layers (`skipping_bytes`).
    """
    _check_shard(costs, first, last)
    _check_count("num_micro_batches", num_micro_batches, at_least=1)
    shard = costs[first:last]
    if not any(cost.grad_bytes for cost in costs[:last]) and _knows_forward(shard):
        target_bytes = min(num_micro_batches, 2) * shard[-1].target_bytes
        return forward_unit_bytes(costs, first, last, num_micro_batches) + target_bytes
    input_bytes = shard[0].input_bytes
    output_bytes = shard[-1].output_bytes if last < len(costs) else 0
    total = _work_bytes(shard, last == len(costs)) + min(num_micro_batches, 2) * (
        input_bytes + output_bytes + shard[-1].target_bytes
    )
    if num_micro_batches > 1:
        total += sum(accumulated_bytes(cost) for cost in shard) + max(input_bytes, output_bytes)
    for cost in shard:
        handed_down = (1 + min(num_micro_batches, 2)) * any(other >= last for other in cost.shares_with)
        total += (handed_down + (num_micro_batches > 1) * any(k < first for k in cost.shares_with)) * cost.shared_bytes
    return total + skipping_bytes(costs, first, last, num_micro_batches, backward=True)


def forward_unit_bytes(costs: Sequence[LayerCost], first: int, last: int, num_micro_batches: int = 1) -> int:
    """Most bytes beside the slab while layers ``[first, last)`` run a forward of which nothing is saved.

    A layer's input stays until its output is there. With several micro-batches, the next input is loaded and the
    output before is stored meanwhile. Where no forward was measured alone, as much as the unit that runs backward too.
    """
    _check_shard(costs, first, last)
    _check_count("num_micro_batches", num_micro_batches, at_least=1)
    shard = costs[first:last]
    if not _knows_forward(shard):
        return unit_bytes(costs, first, last, num_micro_batches)
    entering = [0, *(cost.output_bytes for cost in shard[:-1])]
    work = max((cost.forward_peak_bytes or 0) + num_bytes for cost, num_bytes in zip(shard, entering, strict=True))
    several = num_micro_batches > 1
    skipping = skipping_bytes(costs, first, last, num_micro_batches, backward=False)
    return work + (1 + several) * shard[0].input_bytes + several * shard[-1].output_bytes + skipping


@dataclass(frozen=True)
class Skip:
    """A value that skips layers: put by one, gotten by others."""

    name: str
    num_bytes: int
    put: int  # index of the layer
    gets: tuple[int, ...]  # indices, rising


def skips_of(costs: Sequence[LayerCost]) -> list[Skip]:
    """What skips layers of a model; a value that nobody gets is left out."""
    found = []
    for k, cost in enumerate(costs):
        for name, num_bytes in cost.puts:
            gets = tuple(j for j in range(k + 1, len(costs)) if name in costs[j].gets)
            if gets:
                found.append(Skip(name, num_bytes, k, gets))
    return found


def skipping_bytes(costs: Sequence[LayerCost], first: int, last: int, num_micro_batches: int, *, backward: bool) -> int:
    """Bytes of a unit for values that enter or leave the shard past other layers, and for their gradients.

    A value that enters is there once, one more on its way; in a backward so is the gradient of those above that get it
    too, and the shard's own leaves. Of a value that leaves, a forward holds the value and a backward its gradient.
    """
    several = num_micro_batches > 1
    total = 0
    for skip in skips_of(costs):
        is_above = skip.gets[-1] >= last
        if skip.put < first and any(first <= k < last for k in skip.gets):
            ways = (1 + several) * (1 + is_above) + 1 + several if backward else 1 + several
            total += ways * skip.num_bytes
        elif first <= skip.put < last and is_above:
            total += (1 + several) * skip.num_bytes
    return total


def _knows_forward(shard: Sequence[LayerCost]) -> bool:
    return all(cost.forward_peak_bytes is not None for cost in shard)


def kept_output_bytes(cost: LayerCost) -> int:
    """Bytes that a layer's output keeps alive: a view keeps all of what it views."""
    return max(cost.held_bytes, cost.output_bytes)


def accumulated_bytes(cost: LayerCost) -> int:
    """Bytes of a layer's gradients while they add up over micro-batches."""
    return cost.grad_bytes if cost.accumulated_bytes is None else cost.accumulated_bytes


def shard_bytes(costs: Sequence[LayerCost], first: int, last: int, num_micro_batches: int = 1) -> int:
    """Bytes a device needs for layers ``[first, last)``: slab and unit, without room for the next slab."""
    return slab_bytes(costs, first, last) + unit_bytes(costs, first, last, num_micro_batches)


def _work_bytes(shard: Sequence[LayerCost], ends_in_loss: bool) -> int:
    """Most bytes one micro-batch creates and holds at once, over the layers k whose forward or backward runs.

    While layer k runs backward, alive are

        layers      0 .. k-1            k                  k+1 .. last
        hold        what they saved     its own peak       their gradients

    and, unless k is the last layer, what k's peak leaves out: the gradient of its output, which layer k+1 made, and
    what the caller of backward holds until it returns: the shard's output, and the loss's gradient if it is one (the
    gradient of another output is among what enters).
    """
    held = kept_output_bytes(shard[-1]) + (shard[-1].output_bytes if ends_in_loss else 0)
    saved, grads, most = 0, sum(cost.grad_bytes for cost in shard), 0
    for k, cost in enumerate(shard):
        grads -= cost.grad_bytes
        passing = cost.output_bytes + held if k < len(shard) - 1 else 0
        most = max(most, saved + cost.peak_bytes + passing + grads)
        saved += cost.saved_bytes
    return most


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _check_count(field: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{field}: {value!r}, limit: a whole number >= {at_least}; pass such an int")


def _check_shard(costs: Sequence[LayerCost], first: int, last: int) -> None:
    if not 0 <= first < last <= len(costs):
        raise ValueError(
            f"shard: [{first}, {last}), limit: 0 <= first < last <= {len(costs)} layers; name at least one layer"
        )
