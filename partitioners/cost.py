"""Costs of layers, budgets of devices, and the bytes that a shard of layers needs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

from partitioners.sizes import format_bytes

# Where a slab starts each tensor on the CPU: kernels choose by alignment, and another kernel gives other bits.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Costs of one layer for one micro-batch. The last layer includes the loss function, and its output is the loss."""

    # One row of measurements, so wide: partitioners, planners and tables read whichever they need.

    index: int
    name: str
    param_bytes: int  # of all its parameters; one shared with another layer counts in both (each shard loads its own)
    grad_bytes: int  # of its trainable parameters
    buffer_bytes: int
    input_bytes: int  # of the boundary that enters it; storage reached through several tensors counts once
    output_bytes: int
    saved_bytes: int  # created by its forward in grad mode and alive afterwards: saved tensors and output
    peak_bytes: int  # most alive at once of tensors that its forward and backward create, so without incoming gradient
    forward_s: float
    backward_s: float
    draws_random: bool  # its forward ran a seeded operation of torch's CPU generator
    draws_globally: bool  # it drew from `random`, `numpy.random` or in backward: needs process-wide generators
    changes_input: bool  # it worked in place on an input tensor
    changes_buffers: bool
    shares_with: tuple[int, ...]  # indices of other layers that hold one of its parameters
    target_bytes: int = 0  # last layer only
    padding_bytes: int = 0  # added to a slab because each parameter and buffer starts at a multiple of 64 bytes
    forward_peak_bytes: int | None = None  # most alive at once of tensors that a forward creates which saves nothing
    held_bytes: int = 0  # storage behind its output, where that is more than output_bytes
    shared_bytes: int = 0  # of its trainable parameters that other layers hold too
    accumulated_bytes: int | None = None  # of its gradients added up over micro-batches; None: grad_bytes
    puts: tuple[tuple[str, int], ...] = ()  # values that it puts for layers further up (`Skips`): names and bytes
    gets: tuple[str, ...] = ()  # names of such values that it gets
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
    """Memory and rates that one device offers a task. Only `Optimal` and predicted times use the rates."""

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
        """Return this budget for a step of `number` micro-batches."""
        return replace(self, num_micro_batches=number)


class Partitioner(Protocol):
    """Cuts a task's layers into shards.

    A partitioner keeps its settings only, so one object may serve several tasks. A partition is written as cumulative
    end indices: ``[3, 6, 8]`` is the shards ``[0, 3) [3, 6) [6, 8)`` of eight layers.
    """

    def partition(self, costs: Sequence[LayerCost], budget: Budget) -> list[int]:
        """Return end indices of shards that each fit ``budget``; every layer is in exactly one shard, in order.

        Raises LayerTooLarge when a layer does not fit even alone, ValueError when ``costs`` cannot be cut this way.
        """

    def revise(self, boundaries: Sequence[int], shard: int, costs: Sequence[LayerCost] = ()) -> list[int] | None:
        """Return a finer partition after a run measured that ``shard`` does not fit; None when there is none.

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
        """Return the error for a layer that does not fit a device alone."""
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

    A parameter that two layers of the shard share is counted twice. This upper bound needs no identities of tensors.
    """
    _check_shard(costs, first, last)
    return sum(_aligned(cost.param_bytes + cost.buffer_bytes + cost.padding_bytes) for cost in costs[first:last])


def unit_bytes(costs: Sequence[LayerCost], first: int, last: int, num_micro_batches: int = 1) -> int:
    """Most bytes beside the slab while layers ``[first, last)`` run forward and backward over the micro-batches.

    If neither these layers nor any below hold a trainable parameter, they run forward only and need less. The last
    shard then needs the target too. Otherwise, with n micro-batches, it is the sum of

    - work: the worst moment of one micro-batch (``_work_bytes``);
    - n > 1: every gradient of the shard, accumulated over the micro-batches before this one;
    - min(n, 2) times the bytes that enter: input, incoming gradient of the shard's output (none for the last shard,
      which ends in the loss), target. Those of the next micro-batch are loaded while this one computes;
    - n > 1: the output or input gradient of the micro-batch before, which is still being stored;
    - parameters that a shard above holds too: their gradient enters from there and is added to. n > 1: the gradient
      that goes to a shard below is being stored;
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
    """Most bytes beside the slab while layers ``[first, last)`` run a forward that saves nothing.

    A layer's input stays until its output is there. With several micro-batches, the next input is loaded and the
    previous output is stored meanwhile. If no forward was measured alone: as much as the unit that runs backward too.
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
    """A value that skips layers: one layer puts it, others get it."""

    name: str
    num_bytes: int
    put: int  # index of the layer
    gets: tuple[int, ...]  # indices, rising


def skips_of(costs: Sequence[LayerCost]) -> list[Skip]:
    """Return the values that skip layers of a model; a value that nobody gets is left out."""
    found = []
    for k, cost in enumerate(costs):
        for name, num_bytes in cost.puts:
            gets = tuple(j for j in range(k + 1, len(costs)) if name in costs[j].gets)
            if gets:
                found.append(Skip(name, num_bytes, k, gets))
    return found


def skipping_bytes(costs: Sequence[LayerCost], first: int, last: int, num_micro_batches: int, *, backward: bool) -> int:
    """Bytes of a unit for values of `Skips` that enter or leave the shard, and for their gradients.

    A value that enters counts twice: one is there, and the next is on its way. In a backward, so does its gradient from
    the shards above that get it too, and the shard's own gradient leaves. Of a value that leaves, a forward holds the
    value, and a backward its gradient.
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
    """Bytes that a device needs for layers ``[first, last)``: slab and unit, without room for the next slab."""
    return slab_bytes(costs, first, last) + unit_bytes(costs, first, last, num_micro_batches)


def _work_bytes(shard: Sequence[LayerCost], ends_in_loss: bool) -> int:
    """Most bytes that one micro-batch creates and holds at once, over the layers k whose forward or backward runs.

    While layer k runs backward, alive are

        layers      0 .. k-1            k                  k+1 .. last
        hold        what they saved     its own peak       their gradients

    Unless k is the last layer, the peak of k leaves out two things that are alive too. One is the gradient of its
    output, which layer k+1 made. The other is held by the caller of backward until it returns: the shard's output, and
    its gradient if it is the loss. (The gradient of another output counts among the bytes that enter.)
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
