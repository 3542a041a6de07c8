"""``hydra-engine plan``: the shards of a model, their bytes and a step's predicted time, by arithmetic alone."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from typing import Any

from hydra_engine import AheadPlan, predict_training
from hydra_engine.cli.command import DEVICES, Mistake, mistakes, print_table
from hydra_engine.cli.sample import called, here_importable, planned, without_values
from hydra_engine.texts import duration, plural
from partitioners import STATED_RATES, Partitioner, format_bytes, make_partitioner, parse_bytes, spanned

_RATE = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([kmgtp]?)(?:flops?(?:/s)?)?\s*", re.ASCII | re.IGNORECASE)

MOST_ROWS = 12  # with more than these, equal shards share one


def run(options: argparse.Namespace) -> None:
    """Print the plan of a user's function."""
    with here_importable():
        with without_values(options.function):
            returned = called(options.function, "returns (model, (inputs, target), loss_fn)")
        plan = predicted(options, returned, num_devices=options.devices, dram=options.dram)
    print(*head_lines(plan, title=options.function), "", sep="\n")
    print_table(_rows(plan))
    print("", *figure_lines(plan), sep="\n")


def predicted(options: argparse.Namespace, sample: Any, *, num_devices: int = 1, dram: str | None = None) -> AheadPlan:
    """Return the plan of what a user's function has returned; raises Mistake."""
    if not isinstance(sample, (tuple, list)) or len(sample) != 3:
        size = f" of {len(sample)}" if isinstance(sample, (tuple, list)) else ""
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


def head_lines(plan: AheadPlan, *, title: str) -> list[str]:
    """Return the lines that say what was planned for which device."""
    machine = plan.machine
    reserved = f", {format_bytes(machine.reserve_bytes)} of it reserved" if machine.reserve_bytes else ""
    device = "gpu" if machine.is_gpu else machine.device
    batch = f"batch of {plural(plan.num_samples, 'sample')} in {plural(plan.num_micro_batches, 'micro-batch', 'es')}"
    lines = [
        f"{title}: {plural(len(plan.costs), 'layer')}, {plan.dram.num_parameters:,} parameters",
        f"{device} of {format_bytes(machine.memory_bytes)}{reserved}; {machine.precision}; {batch}",
        "estimates: no such device was measured" if machine.is_gpu else "times are counted, not measured",
    ]
    if plan.own_forward is not None:
        lines.append(f"the layers are made of {plan.own_forward}'s own forward")
    return lines


def figure_lines(plan: AheadPlan) -> list[str]:
    """Return the lines of figures: DRAM, a step, what bounds it, and the rates that were stated."""
    return [_dram_line(plan), *_step_lines(plan), *_limit_lines(plan), _rates_line(plan)]


def _rows(plan: AheadPlan) -> list[tuple[str, ...]]:
    head = ("shard", "layers", "slab", "needs", "forward", "backward")
    if len(plan.shards) <= MOST_ROWS:
        return [head, *(_row(plan, [j]) for j in range(len(plan.shards)))]
    kinds: dict[Any, list[int]] = {}
    for j, shard in enumerate(plan.shards):
        layers = tuple(replace(cost, index=0, name="", shares_with=()) for cost in plan.costs[shard.first : shard.last])
        # As printed: sums of equal seconds differ in their last bits.
        seconds = (duration(shard.forward_s), duration(shard.backward_s))
        kinds.setdefault((layers, shard.slab_bytes, shard.needed_bytes, seconds), []).append(j)
    return [(*head, "equal shards"), *((*_row(plan, alike), str(len(alike))) for alike in kinds.values())]


def _row(plan: AheadPlan, alike: list[int]) -> tuple[str, ...]:
    shard = plan.shards[alike[0]]
    return (
        str(alike[0]) if len(alike) == 1 else f"{alike[0]} ... {alike[-1]}",
        spanned([cost.name for cost in plan.costs[shard.first : shard.last]]) + (" ..." if len(alike) > 1 else ""),
        format_bytes(shard.slab_bytes),
        format_bytes(shard.needed_bytes),
        duration(shard.forward_s),
        duration(shard.backward_s),
    )


def _dram_line(plan: AheadPlan) -> str:
    dram = plan.dram
    each = dram.parameter_bytes / dram.num_parameters if dram.num_parameters else 0.0
    split = "split " if dram.has_split_weights else ""
    return (
        f"DRAM: {format_bytes(dram.total_bytes)} = {split}weights {format_bytes(dram.weight_bytes)} + gradients "
        f"{format_bytes(dram.gradient_bytes)} + {plan.machine.optimizer} {format_bytes(dram.state_bytes)} "
        f"({each:.4g} bytes per parameter) + buffers {format_bytes(dram.buffer_bytes)} + boundaries "
        f"{format_bytes(dram.boundary_bytes)}"
    )


def _step_lines(plan: AheadPlan) -> list[str]:
    step = plan.step
    tokens = "" if plan.num_tokens is None else f", {plan.num_tokens / step.total_s:.4g} tokens/s"
    early = plan.machine.early_release
    homes = plan.with_homes
    simulated = [f"with early_release={early!r} a step takes {duration(plan.step_s)} by simulation"] if early else []
    return [
        f"step of one task alone: {duration(step.total_s)} = compute {duration(step.compute_s)} + exposed load "
        f"{duration(step.exposed_load_s)} + boundary {duration(step.exposed_boundary_s)} + update "
        f"{duration(step.exposed_update_s)}; {plan.num_samples / step.total_s:.4g} samples/s{tokens}",
        f"bound by: {step.bound} (busy in a step: compute {duration(step.compute_s)}, with the forwards that backward "
        f"repeats; link {duration(step.link_s)}; host optimizer {duration(step.update_s)})",
        *simulated,
        *([] if homes is None else [_homes_line(plan)]),
    ]


def _homes_line(plan: AheadPlan) -> str:
    found, num_layers = plan.with_homes, len(plan.costs)
    assert found is not None
    assert found.in_dram_s is not None
    return (
        f"with {found.homes} of {plural(num_layers, 'layer')} at home on the device, cut into "
        f"{plural(len(found.boundaries), 'shard')}, a step takes {duration(found.step_s)} by simulation; with all in "
        f"DRAM, {duration(found.in_dram_s)} at best"
    )


def _limit_lines(plan: AheadPlan) -> list[str]:
    num, limits = plan.machine.num_devices, plan.limits()
    if num == 1:
        return []
    others = ", ".join(f"{limit.resource} {limit.steps_per_s:.3g}" for limit in limits)
    return [
        f"{num} devices with {num} such tasks or more (a task's step uses one device at a time): together at most "
        f"{limits[0].steps_per_s:.3g} steps/s, bound by {limits[0].resource} (steps/s: {others}); {num} tasks take "
        f"{format_bytes(num * plan.dram.total_bytes)} of DRAM"
    ]


def _rates_line(plan: AheadPlan) -> str:
    machine = plan.machine
    return (
        f"stated rates: {machine.rates.flops_per_s / 1e12:.4g} TFLOP/s, device memory "
        f"{machine.rates.memory_bytes_per_s / 1e9:.4g} GB/s, link {machine.link_bytes_per_s / 1e9:.4g} GB/s each way, "
        f"DRAM {machine.dram_bytes_per_s / 1e9:.4g} GB/s for {machine.update_traffic_bytes} bytes per parameter"
    )
