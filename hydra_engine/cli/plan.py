"""``hydra-engine plan``: the shards of a model, their bytes and a step's predicted time, by arithmetic alone."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hydra_engine import AheadPlan, predict_training
from hydra_engine.cli.command import DEVICES, Mistake, mistakes
from hydra_engine.cli.sample import called_for_shapes, planned
from hydra_engine.texts import duration, plural, table
from partitioners import STATED_RATES, Partitioner, format_bytes, make_partitioner, parse_bytes, spanned

_RATE = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([kmgtp]?)(?:flops?(?:/s)?)?\s*", re.ASCII | re.IGNORECASE)

MOST_ROWS = 12  # with more than these, equal shards share one


def run(options: argparse.Namespace) -> None:
    """Print the plan of a user's function."""
    returned = called_for_shapes(options.function, "returns (model, (inputs, target), loss_fn)")
    plan = predicted(options, returned, num_devices=options.devices, dram=options.dram)
    print(*_head(plan, options.function), "", *table(_rows(plan)), "", *_figures(plan), sep="\n")


def predicted(options: argparse.Namespace, sample: Any, *, num_devices: int = 1, dram: str | None = None) -> AheadPlan:
    """Return the plan of what a user's function has returned; raises Mistake."""
    is_sequence = isinstance(sample, (tuple, list))
    if not is_sequence or len(sample) != 3:
        size = f" of {len(sample)}" if is_sequence else ""
        raise Mistake(
            f"{options.function}: returned a {type(sample).__name__}{size}, expected (model, (inputs, target), "
            f"loss_fn); return these three"
        )
    device = DEVICES[options.device]
    rates = STATED_RATES[device, options.precision]
    if options.flops is not None:
        rates = replace(rates, flops_per_s=_flops(options.flops))
    if options.memory_bandwidth is not None:
        rates = replace(rates, memory_bytes_per_s=_bytes_per_s(options.memory_bandwidth, "--memory-bandwidth"))
    with planned(options):
        return predict_training(
            *sample,
            memory=options.memory,
            reserve=options.reserve,
            devices=num_devices,
            device=device,
            precision=options.precision,
            optimizer=options.optimizer,
            batch_size=options.batch,
            accumulation_steps=options.micro_batches,
            partitioner=_partitioner(options.partitioner),
            dram=dram,
            split_weights=options.split_weights,
            early_release=options.early_release,
            rates=rates,
            link_bytes_per_s=_bytes_per_s(options.link, "--link"),
            dram_bytes_per_s=_bytes_per_s(options.dram_bandwidth, "--dram-bandwidth"),
        )


def _bytes_per_s(text: str, field: str) -> int:
    with mistakes(ValueError):
        return parse_bytes(text.strip().removesuffix("/s"), field)


def _flops(text: str) -> float:
    match = _RATE.fullmatch(text)
    value = float(match[1]) * 1000.0 ** " kmgtp".index(match[2].lower() or " ") if match else 0.0
    if not 0 < value < float("inf"):
        raise Mistake(f"--flops: {text!r}, expected operations per second, above 0; write 80e12, 80T or 80TFLOP/s")
    return value


def _partitioner(text: str) -> Partitioner:
    name, colon, number = text.partition(":")
    with mistakes(TypeError, ValueError, before="--", after="; the command takes optimal, pilot and balanced:N"):
        if colon and not (number.isdecimal() and int(number)):
            raise ValueError(f"partitioner: {name} with {number!r} shards, expected a whole number >= 1")
        return make_partitioner(name, **({"num_shards": int(number)} if colon else {}))


def _head(plan: AheadPlan, title: str) -> Iterator[str]:
    """Yield the lines that say what was planned for which device."""
    machine = plan.machine
    reserved = f", {format_bytes(machine.reserve_bytes)} of it reserved" if machine.reserve_bytes else ""
    device = "gpu" if machine.is_gpu else machine.device
    batch = f"batch of {plural(plan.num_samples, 'sample')} in {plural(plan.num_micro_batches, 'micro-batch', 'es')}"
    yield f"{title}: {plural(len(plan.costs), 'layer')}, {plan.dram.num_parameters:,} parameters"
    yield f"{device} of {format_bytes(machine.memory_bytes)}{reserved}; {machine.precision}; {batch}"
    yield "estimates: no such device was measured" if machine.is_gpu else "times are counted, not measured"
    if plan.own_forward is not None:
        yield f"the layers are made of {plan.own_forward}'s own forward"


def _rows(plan: AheadPlan) -> list[tuple[str, ...]]:
    """Return the table of shards; where there are many, equal ones share a row."""
    head = ("shard", "layers", "slab", "needs", "forward", "backward", "equal shards")
    num_columns = len(head) if len(plan.shards) > MOST_ROWS else len(head) - 1
    kinds: dict[Any, list[int]] = {}
    for j, shard in enumerate(plan.shards):
        layers = tuple(replace(cost, index=0, name="", shares_with=()) for cost in plan.costs[shard.first : shard.last])
        # As printed: sums of equal seconds differ in their last bits.
        seconds = (duration(shard.forward_s), duration(shard.backward_s))
        kind = (layers, shard.slab_bytes, shard.needed_bytes, seconds)
        kinds.setdefault(kind if num_columns == len(head) else j, []).append(j)
    rows: list[tuple[str, ...]] = [head]
    for alike in kinds.values():
        shard, is_one = plan.shards[alike[0]], len(alike) == 1
        row = (
            str(alike[0]) if is_one else f"{alike[0]} ... {alike[-1]}",
            spanned([cost.name for cost in plan.costs[shard.first : shard.last]]) + ("" if is_one else " ..."),
            format_bytes(shard.slab_bytes),
            format_bytes(shard.needed_bytes),
            duration(shard.forward_s),
            duration(shard.backward_s),
            str(len(alike)),
        )
        rows.append(row)
    return [row[:num_columns] for row in rows]


def _figures(plan: AheadPlan) -> Iterator[str]:
    """Yield the lines of figures: DRAM, a step, what bounds it, and the rates that were stated."""
    dram, step, machine, homes = plan.dram, plan.step, plan.machine, plan.with_homes
    each = dram.parameter_bytes / dram.num_parameters if dram.num_parameters else 0.0
    yield (
        f"DRAM: {format_bytes(dram.total_bytes)} = {'split ' if dram.has_split_weights else ''}weights "
        f"{format_bytes(dram.weight_bytes)} + gradients {format_bytes(dram.gradient_bytes)} + {machine.optimizer} "
        f"{format_bytes(dram.state_bytes)} ({each:.4g} bytes per parameter) + buffers "
        f"{format_bytes(dram.buffer_bytes)} + boundaries {format_bytes(dram.boundary_bytes)}"
    )
    tokens = "" if plan.num_tokens is None else f", {plan.num_tokens / step.total_s:.4g} tokens/s"
    yield (
        f"step of one task alone: {duration(step.total_s)} = compute {duration(step.compute_s)} + exposed load "
        f"{duration(step.exposed_load_s)} + boundary {duration(step.exposed_boundary_s)} + update "
        f"{duration(step.exposed_update_s)}; {plan.num_samples / step.total_s:.4g} samples/s{tokens}"
    )
    yield (
        f"bound by: {step.bound} (busy in a step: compute {duration(step.compute_s)}, with the forwards that backward "
        f"repeats; link {duration(step.link_s)}; host optimizer {duration(step.update_s)})"
    )
    if machine.early_release:
        yield f"with early_release={machine.early_release!r} a step takes {duration(plan.step_s)} by simulation"
    if homes is not None:
        assert homes.in_dram_s is not None
        yield (
            f"with {homes.homes} of {plural(len(plan.costs), 'layer')} at home on the device, cut into "
            f"{plural(len(homes.boundaries), 'shard')}, a step takes {duration(homes.step_s)} by simulation; with all "
            f"in DRAM, {duration(homes.in_dram_s)} at best"
        )
    if (number := machine.num_devices) > 1:
        limits = plan.limits()
        yield (
            f"{number} devices with {number} such tasks or more (a task's step uses one device at a time): together at "
            f"most {limits[0].steps_per_s:.3g} steps/s, bound by {limits[0].resource} (steps/s: "
            f"{', '.join(f'{limit.resource} {limit.steps_per_s:.3g}' for limit in limits)}); {number} tasks take "
            f"{format_bytes(number * dram.total_bytes)} of DRAM"
        )
    yield (
        f"stated rates: {machine.rates.flops_per_s / 1e12:.4g} TFLOP/s, device memory "
        f"{machine.rates.memory_bytes_per_s / 1e9:.4g} GB/s, link {machine.link_bytes_per_s / 1e9:.4g} GB/s each way, "
        f"DRAM {machine.dram_bytes_per_s / 1e9:.4g} GB/s for {machine.update_traffic_bytes} bytes per parameter"
    )
