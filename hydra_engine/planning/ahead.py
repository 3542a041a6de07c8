"""What training a model would take on a device that need not be here: pure arithmetic over its layers' costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hydra_engine.host import ModelLayout
from hydra_engine.planning.costs import TaskCost
from hydra_engine.planning.cuts import cut_cost
from hydra_engine.tasks import batch_size
from partitioners import (
    GPU,
    Budget,
    LayerCost,
    Optimal,
    Partitioner,
    Rates,
    StepTime,
    predict_step,
    profile,
    shard_bytes,
    slab_bytes,
)
from partitioners.profile import named_layers

MASTER_BYTES = 4  # of the float32 weight that the host optimizer steps


class Sample(NamedTuple):
    """A model and a batch of it; everything may lie on the meta device."""

    model: nn.Module | list[nn.Module]
    inputs: Any
    target: Any
    loss_fn: Callable[[Any, Any], Tensor]


# Bytes of state per parameter, in float32, of optimizers on the host.
OPTIMIZERS = {"adamw": 8, "sgd": 0, "sgd-momentum": 4}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is stated of the machine, and how the task is trained on it."""

    memory_bytes: int  # of one device
    reserve_bytes: int  # of these, kept for context and libraries
    device: str  # a kind that `partitioners.profile` takes
    precision: str
    rates: Rates
    link_bytes_per_s: float  # of each device, each way
    dram_bytes_per_s: float
    optimizer: str  # a key of OPTIMIZERS
    num_devices: int = 1

    @property
    def is_gpu(self) -> bool:
        return self.device == GPU

    @property
    def update_traffic_bytes(self) -> int:
        """Bytes of DRAM that the optimizer moves per parameter: weight and state read and written, gradient read.

        As many in a narrow precision: a gradient of 2 bytes is read, and the copy of 2 that is streamed next written.
        """
        return 3 * MASTER_BYTES + 2 * OPTIMIZERS[self.optimizer]

    def budget(self, num_micro_batches: int = 1) -> Budget:
        """One device and its share of the host, as partitioners take them."""
        return Budget(
            memory_bytes=self.memory_bytes - self.reserve_bytes,
            num_micro_batches=num_micro_batches,
            link_bytes_per_s=self.link_bytes_per_s,
            # A Budget counts the bytes of float32 gradients.
            update_bytes_per_s=self.dram_bytes_per_s * MASTER_BYTES / self.update_traffic_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Dram:
    """Bytes of one task in DRAM; a parameter that several layers hold counts once."""

    num_parameters: int
    weight_bytes: int  # in a narrow precision the masters and the copies that are streamed
    gradient_bytes: int
    state_bytes: int  # of the optimizer
    buffer_bytes: int
    boundary_bytes: int  # of one step: what enters the shards, and the gradients of it

    @property
    def total_bytes(self) -> int:
        return self.parameter_bytes + self.buffer_bytes + self.boundary_bytes

    @property
    def parameter_bytes(self) -> int:
        """Weights, gradients and state."""
        return self.weight_bytes + self.gradient_bytes + self.state_bytes


@dataclass(frozen=True, kw_only=True)
class ShardEstimate:
    """Layers ``[first, last)`` in one step; backward without the forward that it repeats."""

    first: int
    last: int
    slab_bytes: int
    needed_bytes: int
    forward_s: float
    backward_s: float


class Limit(NamedTuple):
    """Steps per second that one resource allows all tasks together."""

    resource: str
    steps_per_s: float


@dataclass(frozen=True, kw_only=True)
class AheadPlan:
    """How a task would be cut and what its step would take."""

    machine: Machine
    costs: list[LayerCost]  # for one micro-batch
    shards: list[ShardEstimate]
    num_samples: int
    num_tokens: int | None  # of a batch of integers in two dimensions: token ids
    num_micro_batches: int
    dram: Dram
    step: StepTime

    def task_cost(self, name: str, num_steps: int) -> TaskCost:
        """Return what the task takes in a simulation of so many steps."""
        budget, ends = self.machine.budget(self.num_micro_batches), [shard.last for shard in self.shards]
        return cut_cost(name, self.costs, ends, budget, None, num_steps)

    def limits(self) -> list[Limit]:
        """What bounds the devices together, with at least as many such tasks; the tightest first.

        A task's step is on one device at a time, so devices and links count as often as they are there, the host once.
        """
        num, step = self.machine.num_devices, self.step
        seconds = {"devices": step.compute_s / num, "links": step.link_s / num, "host optimizer": step.update_s}
        limits = [Limit(name, 1 / each if each else math.inf) for name, each in seconds.items()]
        return sorted(limits, key=lambda limit: limit.steps_per_s)


def plan_ahead(
    sample: Sample,
    machine: Machine,
    partitioner: Partitioner,
    *,
    num_samples: int | None = None,
    num_micro_batches: int | None = 1,
) -> AheadPlan:
    """The plan of one task; no seconds are measured.

    num_samples: of the batch; None: as many as the sample has.
    num_micro_batches: None: the power of two with the least predicted step, which only `Optimal` can choose.
    """
    model, inputs, target, loss_fn = sample
    own = batch_size(inputs)
    num_samples = own if num_samples is None else num_samples
    if num_micro_batches is not None and num_micro_batches > num_samples:
        raise ValueError(
            f"micro-batches: {num_micro_batches}, limit: the batch's {num_samples} samples; ask for fewer, or make the "
            f"batch larger"
        )
    if num_samples != own and not any(isinstance(x, Tensor) and x.dim() for x in pytree.tree_leaves(inputs)):
        raise ValueError(
            f"batch: {num_samples}, limit: the inputs hold a tensor whose dim 0 is the batch; let the sample hold one, "
            f"or leave the batch as it is"
        )

    @cache
    def costs_of(number: int) -> list[LayerCost]:
        # The largest micro-batch: it decides what fits.
        size = -(-num_samples // number)
        return profile(
            model,
            resized(inputs, own, size),
            resized(target, own, size),
            loss_fn,
            device=machine.device,
            precision=machine.precision,
            rates=machine.rates,
            time_layers=False,
        )

    if num_micro_batches is not None:
        boundaries = partitioner.partition(costs_of(num_micro_batches), machine.budget(num_micro_batches))
    elif isinstance(partitioner, Optimal):
        powers = (2**k for k in range(num_samples.bit_length()))
        num_micro_batches, boundaries = partitioner.choose(costs_of, powers, machine.budget())
    else:
        raise ValueError(
            f"micro-batches: 'auto', limit: Optimal alone chooses them, not {partitioner!r}; pass a number"
        )
    costs = costs_of(num_micro_batches)
    shards = [
        ShardEstimate(
            first=first,
            last=last,
            slab_bytes=slab_bytes(costs, first, last),
            needed_bytes=shard_bytes(costs, first, last, num_micro_batches),
            forward_s=num_micro_batches * sum(cost.forward_s for cost in costs[first:last]),
            backward_s=num_micro_batches * sum(cost.backward_s for cost in costs[first:last]),
        )
        for first, last in pairwise([0, *boundaries])
    ]
    entering = [costs[shard.first].input_bytes for shard in shards]
    # Nothing runs backward below the batch itself.
    boundary_bytes = num_micro_batches * (sum(entering) + sum(entering[1:]) + costs[-1].target_bytes)
    return AheadPlan(
        machine=machine,
        costs=costs,
        shards=shards,
        num_samples=num_samples,
        num_tokens=_num_tokens(resized(inputs, own, num_samples)),
        num_micro_batches=num_micro_batches,
        dram=_dram(sample, machine, boundary_bytes),
        step=predict_step(costs, boundaries, machine.budget(num_micro_batches)),
    )


def resized(value: Any, size: int, wanted: int) -> Any:
    """The value with every tensor whose dim 0 is `size` replaced by one without values whose dim 0 is `wanted`."""

    def of(leaf: Tensor) -> Tensor:
        if leaf.dim() == 0 or leaf.shape[0] != size or size == wanted:
            return leaf
        return torch.empty((wanted, *leaf.shape[1:]), dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)

    return pytree.tree_map_only(Tensor, of, value)


def _dram(sample: Sample, machine: Machine, boundary_bytes: int) -> Dram:
    names, layers = zip(*named_layers(sample.model), strict=True)
    loss = sample.loss_fn if isinstance(sample.loss_fn, nn.Module) else None
    layout = ModelLayout(layers, names, loss, machine.precision)
    trained = layout.trainable_slots()
    masters = [slot.num_bytes for slot in trained if slot.link_dtype != slot.dtype]
    return Dram(
        num_parameters=sum(slot.parameter.numel() for slot in layout.slots),
        weight_bytes=sum(masters) + sum(slot.link_bytes for slot in layout.slots),
        gradient_bytes=sum(slot.link_bytes for slot in trained),
        state_bytes=OPTIMIZERS[machine.optimizer] * sum(slot.parameter.numel() for slot in trained),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in layout.buffers),
        boundary_bytes=boundary_bytes,
    )


def _num_tokens(inputs: Any) -> int | None:
    first = next((leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)), None)
    if first is None or first.dim() != 2 or first.is_floating_point():
        return None
    return first.numel()
