"""Costs of layers, budgets of devices, and the bytes that shards need, one by one and in tables."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from partitioners.plain_numbers import make_plain, plain

_UNITS = {"b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)
_EXAMPLES = "write whole bytes (4096) or a number with a unit: '512 KiB', '64MiB', '16GiB', '1.5GB' (10^9)"


def parse_bytes(value: int | str, field: str) -> int:
    """Return the bytes named by an int or by a string such as ``"64MiB"``; drop a fraction of a byte.

    Raises ValueError, naming ``field``, for anything but a positive size.
    """
    value = plain(value)
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    unit = match[2].lower() if match else ""
    if isinstance(value, int) and not isinstance(value, bool):
        num_bytes = value
    # "16G" and "512k" are refused rather than guessed: half the tools that take them mean 1000, the others 1024.
    elif match is None or (unit and unit not in _UNITS) or (unit in ("", "b") and "." in match[1]):
        raise ValueError(f"{field}: {value!r} is not a size; {_EXAMPLES}")
    else:
        # Through a fraction: 1.1 * 10**15 in floating point is already a few bytes off.
        num_bytes = int(Fraction(match[1]) * _UNITS.get(unit, 1))
    if num_bytes <= 0:
        raise ValueError(f"{field}: {value!r} is {num_bytes} bytes, a size is at least 1 byte; {_EXAMPLES}")
    return num_bytes


def format_bytes(n: int, *, rounds_up: bool = False) -> str:
    """Return ``n`` bytes as text: ``"1.5 GiB"``, ``"64 MiB"``, ``"0 B"``. Rounded to one decimal, or up to one."""
    size, units = float(abs(n)), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while round(size, 1) >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    size = math.ceil(size * 10) / 10 if rounds_up else size
    return f"{'-' if n < 0 else ''}{size:.1f}".removesuffix(".0") + f" {units[0]}"


# Where a slab starts each tensor on the CPU: kernels choose by alignment, and another kernel gives other bits.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Costs of one layer for one micro-batch. The last layer includes the loss function, and its output is the loss."""

    # More than 15 attributes: one row of measurements; partitioners, planners and tables read whichever they need.

    index: int
    name: str  # in the model, and its class: "2 (Linear)"
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
    runs_backward: bool = False  # its forward, or the loss, adds to gradients by a backward of its own
    timed: bool = True  # seconds were measured; False: counted operations and bytes against stated rates

    def __post_init__(self) -> None:
        make_plain(self)
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
        make_plain(self)
        _check_count("Budget.memory_bytes", self.memory_bytes, at_least=1)
        _check_count("Budget.num_micro_batches", self.num_micro_batches, at_least=1)
        if self.buffer_bytes is not None:
            _check_count("Budget.buffer_bytes", self.buffer_bytes, at_least=0)
        for field in ("link_bytes_per_s", "update_bytes_per_s"):
            if not getattr(self, field) > 0:
                raise ValueError(f"Budget.{field}: {getattr(self, field)!r}, limit: above 0; leave it out for no limit")
        if not (math.isfinite(self.unit_s) and self.unit_s >= 0):
            raise ValueError(f"Budget.unit_s: {self.unit_s!r}, limit: finite and >= 0; pass seconds")

    def with_micro_batches(self, number: int) -> Budget:
        """Return this budget for a step of `number` micro-batches."""
        return replace(self, num_micro_batches=number)


class Partitioner(Protocol):
    """Cuts a task's layers into shards.

    A partitioner keeps its settings only, so one object may serve several tasks. A partition is written as cumulative
    end indices: ``[3, 6, 8]`` is the shards ``[0, 3) [3, 6) [6, 8)`` of eight layers.

    One that also has a method ``candidates(costs, budget)``, which returns several partitions, leaves the choice to the
    engine, for a task that trains: it takes the one with the least predicted time. So does `Fastest`. Its budget has
    the device's measured rates, and so has that of one with the attribute ``weighs_times = True``.
    """

    def partition(self, costs: Sequence[LayerCost], budget: Budget) -> list[int]:
        """Return end indices of shards that each fit ``budget``; every layer is in exactly one shard, in order.

        Raises LayerTooLarge when a layer does not fit even alone, ValueError when ``costs`` cannot be cut this way.
        """

    def revise(self, boundaries: Sequence[int], shard: int, costs: Sequence[LayerCost] = ()) -> list[int] | None:
        """Return a finer partition after a run measured that ``shard`` does not fit; None when there is none.

        ``costs`` may be left out; a partitioner that balances bytes then counts layers instead.
        """


class LayerTooLarge(ValueError):
    """A single layer needs more memory than the device has."""

    def __init__(self, message: str, *, layer: str = "", needed_bytes: int = 0, available_bytes: int = 0) -> None:
        super().__init__(message)
        self.layer = layer
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes

    @classmethod
    def of(cls, cost: LayerCost, needed_bytes: int, available_bytes: int) -> LayerTooLarge:
        """Return the error for a layer that does not fit a device alone."""
        return cls(
            f"{cost.name} needs {format_bytes(needed_bytes)} ({needed_bytes} bytes) alone on a "
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
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{field}: {value!r}, limit: a whole number >= {at_least}; pass such an int")


def _check_shard(costs: Sequence[LayerCost], first: int, last: int) -> None:
    if not 0 <= first < last <= len(costs):
        raise ValueError(
            f"shard: [{first}, {last}), limit: 0 <= first < last <= {len(costs)} layers; name at least one layer"
        )


Bytes: TypeAlias = "npt.NDArray[np.int64]"
Flags: TypeAlias = "npt.NDArray[np.bool_]"

_NEVER = np.iinfo(np.int64).max // 4  # entries below the diagonal: no shard


@dataclass(frozen=True, kw_only=True)
class ShardTable:
    """By (first, last): bytes of the shard ``[first, last)``, as the functions of the same names give one by one.

    Each table is square and has one row and column more than there are layers, so that ``last`` is an index. Entries
    with ``first >= last`` are a number of bytes that no device has.
    """

    slab: Bytes
    forward: Bytes  # slab and forward unit
    full: Bytes  # slab and the unit that runs backward too

    @classmethod
    def of(cls, costs: Sequence[LayerCost], num_micro_batches: int) -> ShardTable:
        """Fill the tables, in O(layers^2) array operations: a thousand layers take a few tens of milliseconds."""
        num = len(costs)
        if num == 0:
            raise ValueError("costs: no layers, limit: at least 1; profile a model first")
        ends = _prefix([slab_bytes(costs, k, k + 1) for k in range(num)])
        slab = _table(num)
        work, forward = _table(num), _table(num)
        inputs, outputs, peaks, targets, forwards = (
            np.array([getattr(cost, f"{name}_bytes") or 0 for cost in costs], dtype=np.int64)
            for name in ("input", "output", "peak", "target", "forward_peak")
        )
        saved, grads = _prefix([cost.saved_bytes for cost in costs]), _prefix([cost.grad_bytes for cost in costs])
        held = np.array([kept_output_bytes(cost) for cost in costs], dtype=np.int64)
        held[-1] += outputs[-1]
        # What layer k holds while it runs backward, but for what depends on where the shard begins and ends.
        inner = saved[:-1] + peaks + outputs - grads[1:]
        last_own = saved[:-1] + peaks
        for first in range(num):
            slab[first, first + 1 :] = ends[first + 1 :] - ends[first]
            most = last_own[first:].copy()
            below = np.maximum.accumulate(inner[first:-1]) + grads[first + 2 :] + held[first + 1 :]
            most[1:] = np.maximum(most[1:], below)
            work[first, first + 1 :] = most - saved[first]
            passing = forwards[first:].copy()
            passing[1:] += outputs[first:-1]
            forward[first, first + 1 :] = np.maximum.accumulate(passing)
        leaving = outputs.copy()
        leaving[-1] = 0
        enters = inputs[:, None] + (leaving + targets)[None, :]
        unit = work[:-1, 1:] + min(num_micro_batches, 2) * enters
        several = num_micro_batches > 1
        if several:
            added = _prefix([accumulated_bytes(cost) for cost in costs])
            unit += added[None, 1:] - added[:-1, None] + np.maximum(inputs[:, None], leaving[None, :])
        for k, cost in enumerate(costs):
            if cost.shared_bytes and cost.shares_with:
                highest, deepest = max(cost.shares_with), min(cost.shares_with)
                unit[: k + 1, k:highest] += (1 + min(num_micro_batches, 2)) * cost.shared_bytes
                unit[deepest + 1 : k + 1, k:] += several * cost.shared_bytes
        skipping = _skipping(costs, several)
        unit += skipping[True][:-1, 1:]
        light = (
            forward[:-1, 1:] + skipping[False][:-1, 1:] + (1 + several) * inputs[:, None] + several * outputs[None, :]
        )
        unknown = _prefix([int(cost.forward_peak_bytes is None) for cost in costs])
        is_unknown = unknown[None, 1:] - unknown[:-1, None] > 0
        light = np.where(is_unknown, unit, light)
        trainable = next((k for k, cost in enumerate(costs) if cost.grad_bytes), num)
        # Shards that end at or before it run forward only; the last one takes the target in as well.
        forward_only = np.where(is_unknown, unit, light + min(num_micro_batches, 2) * targets[None, :])
        unit[:, :trainable] = forward_only[:, :trainable]
        return cls(slab=slab, forward=_with_slabs(slab, light), full=_with_slabs(slab, unit))

    def fits(self, memory_bytes: int) -> Flags:
        """Flags of the shards that a device can run."""
        return np.triu(self.full <= memory_bytes, k=1)


def fewest_shards(fits: Flags) -> list[int] | None:
    """Return the partition with the fewest shards if all shards ``[first, last)`` have to fit; None when there is none.

    Of several, it is the one whose shards are longest from the front.
    """
    num = len(fits) - 1
    # From the back: how many shards layers [first, num) take, and where the first of them ends.
    count, end = [num + 1] * num + [0], [0] * num
    for first in range(num - 1, -1, -1):
        for last in map(int, np.flatnonzero(fits[first])):
            if count[last] + 1 <= count[first]:
                count[first], end[first] = count[last] + 1, last
    boundaries = [0]
    while boundaries[-1] < num:
        if count[boundaries[-1]] > num:
            return None
        boundaries.append(end[boundaries[-1]])
    return boundaries[1:]


def too_large(costs: Sequence[LayerCost], table: ShardTable, memory_bytes: int) -> LayerTooLarge | None:
    """Return the error that says why no partition fits, or None when one does.

    It names the layer at which the furthest of all partitions ends: no shard that begins with it fits.
    """
    fits = table.fits(memory_bytes)
    reached = np.zeros(len(costs) + 1, dtype=bool)
    reached[0] = True
    for first in range(len(costs)):
        if reached[first]:
            reached |= fits[first]
    if reached[-1]:
        return None
    first = int(np.flatnonzero(reached)[-1])
    return LayerTooLarge.of(costs[first], int(table.full[first].min()), memory_bytes)


def _skipping(costs: Sequence[LayerCost], several: bool) -> dict[bool, Bytes]:
    """`skipping_bytes` of every shard, by whether it runs backward."""
    num = len(costs)
    found = {backward: np.zeros((num + 1, num + 1), dtype=np.int64) for backward in (True, False)}
    for skip in skips_of(costs):
        top, num_bytes = skip.gets[-1], skip.num_bytes
        leaving = (slice(0, skip.put + 1), slice(skip.put + 1, top + 1))
        for table in found.values():
            table[leaving] += (1 + several) * num_bytes
        for first in range(skip.put + 1, top + 1):
            lowest = next(k for k in skip.gets if k >= first)
            found[False][first, lowest + 1 :] += (1 + several) * num_bytes
            found[True][first, lowest + 1 :] += 2 * (1 + several) * num_bytes
            found[True][first, lowest + 1 : top + 1] += (1 + several) * num_bytes
    return found


def _prefix(values: Sequence[int] | Bytes) -> Bytes:
    """Sums of the first 0, 1, ... values."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.asarray(values, dtype=np.int64))])


def _with_slabs(slab: Bytes, beside: Bytes) -> Bytes:
    """The table of shards whose bytes beside the slab are given, without its first column and its last row."""
    table = np.full_like(slab, _NEVER)
    upper = np.triu_indices(len(beside))
    table[:-1, 1:][upper] = (slab[:-1, 1:] + beside)[upper]
    return table


def _table(num: int) -> Bytes:
    return np.full((num + 1, num + 1), _NEVER, dtype=np.int64)
