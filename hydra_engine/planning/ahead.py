"""What training a model would take on a device that need not be here: pure arithmetic over its layers' costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hydra_engine.errors import HostOutOfMemory
from hydra_engine.host import NUM_LOANS, ModelLayout
from hydra_engine.planning.costs import DeviceCost, TaskCost
from hydra_engine.planning.cuts import CutChoice, PredictedCut, RunAtHand, cut_cost
from hydra_engine.planning.planned import UNIT_S, UPDATE_SHARE
from hydra_engine.planning.simulate import simulate
from hydra_engine.planning.world import Simulation
from hydra_engine.tasks import Model
from hydra_engine.tasks import batch_size as batch_size_of
from partitioners import (
    GPU,
    STATED_RATES,
    Budget,
    Fastest,
    LayerCost,
    LayerTooLarge,
    Partitioner,
    Rates,
    StepTime,
    format_bytes,
    make_partitioner,
    parse_bytes,
    predict_step,
    profile,
    shard_bytes,
    slab_bytes,
)
from partitioners.precision import DTYPES

MASTER_BYTES = 4  # of the float32 weight that the host optimizer steps


class Sample(NamedTuple):
    """A model and a batch of it; everything may lie on the meta device."""

    model: nn.Module | list[nn.Module]
    inputs: Any
    target: Any
    loss_fn: Callable[[Any, Any], Tensor]


# Bytes of state per parameter, in float32, of optimizers on the host.
OPTIMIZERS = {"adamw": 8, "sgd": 0, "sgd-momentum": 4}
# Of a device, kept for context and libraries.
RESERVED_BYTES = {GPU: 2**30, "cpu": 0}
# Bytes per second of DRAM, for the link of a device and for the host optimizer.
LINK_BYTES_PER_S, DRAM_BYTES_PER_S = 25e9, 50e9
# Steps of a simulation in which nothing is loaded ahead yet, and those after them.
WARM_STEPS, STEADY_STEPS = 2, 4


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
    dram_bytes: int | None = None  # that as many tasks as there are devices may take; None: any number
    split_weights: bool | None = None  # as `ModelTask`'s
    early_release: bool | str = False  # likewise

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise ValueError(f"devices: {self.num_devices}, limit: at least 1")
        if self.split_weights and self.precision != "bfloat16":
            raise ValueError(
                f"split_weights: with precision={self.precision!r} all weights are needed in float32; leave out one"
            )
        if self.early_release not in (False, True, "all"):
            raise ValueError(f"early_release: {self.early_release!r}, known: False, True, 'all'")
        if self.early_release and self.precision == "float16":
            raise ValueError(
                "early_release: with precision='float16' a step waits until all gradients are there; leave out one"
            )

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

    def run_at_hand(self) -> RunAtHand:
        """One task alone on one device, where layers may be at home."""
        device = DeviceCost(
            load_bytes_per_s=self.link_bytes_per_s,
            store_bytes_per_s=self.link_bytes_per_s,
            unit_s=UNIT_S,
            memory_bytes=self.budget().memory_bytes,
        )
        width = MASTER_BYTES if self.precision == "float32" else 2
        masters = 0 if self.precision == "float32" else 2 if self.split_weights else MASTER_BYTES
        rate = UPDATE_SHARE * self.rates.memory_bytes_per_s if self.is_gpu else self.dram_bytes_per_s
        return RunAtHand(
            device=device,
            home_times=2 + (masters + OPTIMIZERS[self.optimizer]) / width,
            home_update_bytes_per_s=rate * MASTER_BYTES / self.update_traffic_bytes,
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
    has_split_weights: bool = False

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
    own_forward: str | None  # class of the module whose own forward was made into the layers; None: they are as given

    def task_cost(self, name: str, num_steps: int) -> TaskCost:
        """Return what the task takes in a simulation of so many steps."""
        budget, ends = self.machine.budget(self.num_micro_batches), [shard.last for shard in self.shards]
        cost = cut_cost(name, self.costs, ends, budget, None, num_steps)
        return replace(cost, early_release=self.machine.early_release)

    def simulate(self, num_tasks: int = 1, num_steps: int = 100) -> Simulation:
        """Simulate so many such tasks on the machine's devices, by the scheduler of a real run, to their end."""
        rate = self.machine.link_bytes_per_s
        device = DeviceCost(load_bytes_per_s=rate, store_bytes_per_s=rate)
        tasks = [self.task_cost(f"task-{k}", num_steps) for k in range(num_tasks)]
        return simulate(tasks, [device] * self.machine.num_devices)

    @property
    def step_s(self) -> float:
        """Simulated seconds of a step of one task alone, in the middle of a run."""
        ends = [self.simulate(num_steps=number).makespan_s for number in (WARM_STEPS, WARM_STEPS + STEADY_STEPS)]
        return (ends[1] - ends[0]) / STEADY_STEPS

    @cached_property
    def with_homes(self) -> PredictedCut | None:
        """How many layers of one task alone gain by being at home on a device, with a cut for that; None: none do."""
        if self.machine.early_release:
            return None
        budget = self.machine.budget(self.num_micro_batches)
        choice = CutChoice(
            costs=self.costs,
            candidates=Fastest().candidates(self.costs, budget),
            budget=budget,
            run=self.machine.run_at_hand(),
        )
        found = choice.with_homes(choice.fastest())
        return found if found.homes else None

    def limits(self) -> list[Limit]:
        """What bounds the devices together, with at least as many such tasks; the tightest first.

        A task's step is on one device at a time, so devices and links count as often as they are there, the host once.
        """
        num, step = self.machine.num_devices, self.step
        seconds = {"devices": step.compute_s / num, "links": step.link_s / num, "host optimizer": step.update_s}
        limits = [Limit(name, 1 / each if each else math.inf) for name, each in seconds.items()]
        return sorted(limits, key=lambda limit: limit.steps_per_s)


# More than seven parameters: it is public, and all but three of them are settings that are named one by one.
def predict_training(
    model: nn.Module | list[nn.Module],
    batch: tuple[Any, Any],
    loss_fn: Callable[[Any, Any], Tensor],
    *,
    memory: int | str,
    reserve: int | str | None = None,
    devices: int = 1,
    device: str = GPU,
    precision: str = "float32",
    optimizer: str = "adamw",
    batch_size: int | None = None,
    accumulation_steps: int | str = 1,
    partitioner: str | Partitioner = "optimal",
    dram: int | str | None = None,
    split_weights: bool | None = None,
    early_release: bool | str = False,
    rates: Rates | None = None,
    link_bytes_per_s: float = LINK_BYTES_PER_S,
    dram_bytes_per_s: float = DRAM_BYTES_PER_S,
) -> AheadPlan:
    """Predict how a model would be cut and what its training would take, by arithmetic: nothing is computed.

    Of the plan, `step_s` is the simulated time of a step, `simulate(num_tasks, num_steps).makespan_s` that of a run,
    and `dram.total_bytes` what one task takes of DRAM. As `hydra-engine plan`.

    Args:
        model: as `ModelTask`'s; it may lie on the meta device, and so may the batch.
        batch: (inputs, target).
        memory: of one device: bytes, or "24GiB".
        reserve: of it, for context and libraries; None: 1 GiB on "cuda".
        devices: number of equal devices.
        device: whose kernels are assumed: "cuda" or "cpu".
        optimizer: on the host: "adamw", "sgd" or "sgd-momentum".
        batch_size: samples of the batch that a task trains with; None: as many as `batch` has.
        dram: that as many such tasks as there are devices may take.
        accumulation_steps, precision, partitioner, split_weights, early_release: as `ModelTask`'s.
        rates: of the device in practice; default: `partitioners.STATED_RATES`.
        link_bytes_per_s: between DRAM and a device, each way. dram_bytes_per_s: for the optimizer.

    Raises HostOutOfMemory where `dram` is too small, LayerTooLarge where `memory` is.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise TypeError(
            f"batch: a {type(batch).__name__}, limit: a pair (inputs, target); give next(iter(loader)), say"
        )
    if isinstance(loss_fn, type) or not callable(loss_fn):
        given = f"{loss_fn.__name__} is a class" if isinstance(loss_fn, type) else f"a {type(loss_fn).__name__}"
        raise TypeError(f"loss_fn: {given}, expected a function (output, target), or an instance of a class")
    for field, value, known in (("device", device, RESERVED_BYTES), ("optimizer", optimizer, OPTIMIZERS)):
        if value not in known:
            raise ValueError(f"{field}: {value!r}, known: {', '.join(map(repr, known))}")
    if precision not in DTYPES:
        raise ValueError(f"precision: {precision!r}, known: {', '.join(map(repr, DTYPES))}")
    memory_bytes, reserve_bytes = parse_bytes(memory, "memory"), RESERVED_BYTES[device]
    if reserve is not None:
        reserve_bytes = 0 if str(reserve).strip() == "0" else parse_bytes(reserve, "reserve")
    if reserve_bytes >= memory_bytes:
        raise ValueError(
            f"reserve: {format_bytes(reserve_bytes)}, expected less than the memory, {format_bytes(memory_bytes)}; "
            f"give more memory, or reserve less (0, say)"
        )
    machine = Machine(
        memory_bytes=memory_bytes,
        reserve_bytes=reserve_bytes,
        device=device,
        precision=precision,
        rates=rates or STATED_RATES[device, precision],
        link_bytes_per_s=link_bytes_per_s,
        dram_bytes_per_s=dram_bytes_per_s,
        optimizer=optimizer,
        num_devices=devices,
        dram_bytes=None if dram is None else parse_bytes(dram, "dram"),
        split_weights=split_weights,
        early_release=early_release,
    )
    cuts = make_partitioner(partitioner) if isinstance(partitioner, str) else partitioner
    number = None if accumulation_steps == "auto" else int(accumulation_steps)
    return plan_ahead(Sample(model, *batch, loss_fn), machine, cuts, num_samples=batch_size, num_micro_batches=number)


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
    num_micro_batches: None: the power of two with the least predicted step.
    """
    _, inputs, target, loss_fn = sample
    model = as_layers(sample.model, inputs)
    own = batch_size_of(inputs)
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

    def predicted_s(number: int) -> float:
        budget = machine.budget(number)
        try:
            ends = partitioner.partition(costs_of(number), budget)
        except LayerTooLarge:
            return math.inf
        return predict_step(costs_of(number), ends, budget).total_s

    if num_micro_batches is None:
        num_micro_batches = min((2**k for k in range(num_samples.bit_length())), key=predicted_s)
    boundaries = partitioner.partition(costs_of(num_micro_batches), machine.budget(num_micro_batches))
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
    layout = ModelLayout(model, loss_fn, machine.precision)
    return AheadPlan(
        machine=machine,
        costs=costs,
        shards=shards,
        num_samples=num_samples,
        num_tokens=_num_tokens(resized(inputs, own, num_samples)),
        num_micro_batches=num_micro_batches,
        dram=_dram_within(layout, machine, boundary_bytes, boundaries),
        own_forward=type(model.source).__name__ if model.is_converted else None,
        step=predict_step(costs, boundaries, machine.budget(num_micro_batches)),
    )


def resized(value: Any, size: int, wanted: int) -> Any:
    """The value with every tensor whose dim 0 is `size` replaced by one without values whose dim 0 is `wanted`."""

    def of(leaf: Tensor) -> Tensor:
        if leaf.dim() == 0 or leaf.shape[0] != size or size == wanted:
            return leaf
        return torch.empty((wanted, *leaf.shape[1:]), dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)

    return pytree.tree_map_only(Tensor, of, value)


def as_layers(model: nn.Module | list[nn.Module], inputs: Any) -> Model:
    """Return the layers of a model as a task makes them."""
    made = Model(model)
    if made.is_pending:
        made.convert(inputs)
    return made


def _dram_within(layout: ModelLayout, machine: Machine, boundary_bytes: int, ends: Sequence[int]) -> Dram:
    """Return a task's bytes, with split weights where it does not fit otherwise. Raises HostOutOfMemory."""
    limit, num = machine.dram_bytes, machine.num_devices
    found = _dram(layout, machine, boundary_bytes, ends)
    if limit is not None and num * found.total_bytes > limit:
        if machine.precision == "bfloat16" and machine.split_weights is None:
            found = _dram(layout, replace(machine, split_weights=True), boundary_bytes, ends)
        if num * found.total_bytes > limit:
            tasks = "the task takes" if num == 1 else f"{num} such tasks, one for each device, take"
            total = num * found.total_bytes
            raise HostOutOfMemory(
                f"dram: {tasks} {format_bytes(total, rounds_up=True)} ({total} bytes), limit: "
                f"dram={format_bytes(limit)} ({limit} bytes); raise dram, choose an optimizer with less state (SGD), "
                f"or save bytes with precision='bfloat16', split_weights and early_release"
            )
    return found


def _dram(layout: ModelLayout, machine: Machine, boundary_bytes: int, ends: Sequence[int]) -> Dram:
    trained = layout.trainable_slots()
    masters = sum(slot.num_bytes for slot in trained if slot.link_dtype != slot.dtype)
    if machine.split_weights:  # beside what devices get, the bits that it lacks
        masters -= sum(slot.link_bytes for slot in trained if slot.link_dtype != slot.dtype)
    gradients = [
        sum(slot.link_bytes for slot in trained if first <= slot.owner < last) for first, last in pairwise([0, *ends])
    ]
    is_lent = machine.early_release is True
    return Dram(
        num_parameters=sum(slot.parameter.numel() for slot in layout.slots),
        weight_bytes=masters + sum(slot.link_bytes for slot in layout.slots),
        gradient_bytes=min(NUM_LOANS, len(ends)) * max(gradients) if is_lent else sum(gradients),
        state_bytes=OPTIMIZERS[machine.optimizer] * sum(slot.parameter.numel() for slot in trained),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in layout.buffers),
        boundary_bytes=boundary_bytes,
        has_split_weights=bool(machine.split_weights),
    )


def _num_tokens(inputs: Any) -> int | None:
    first = next((leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)), None)
    if first is None or first.dim() != 2 or first.is_floating_point():
        return None
    return first.numel()
