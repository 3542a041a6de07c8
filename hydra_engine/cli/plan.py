"""``hydra-engine plan``: the shards of a model, their bytes and a step's predicted time, by arithmetic alone."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from typing import Any

from hydra_engine.cli.command import Mistake, count, mistakes
from hydra_engine.cli.sample import called, here_importable, planned, unpacked, without_values
from hydra_engine.planning import AheadPlan, Machine, PredictedCut, ShardEstimate, plan_ahead
from hydra_engine.system import plural
from hydra_engine.tasks import duration, table
from partitioners import GPU, STATED_RATES, Partitioner, format_bytes, make_partitioner, parse_bytes
from partitioners.profile import spanned

DEVICES = {"gpu": GPU, "cpu": "cpu"}
RESERVES = {"gpu": "1GiB", "cpu": "0"}

_RATE = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([kmgtp]?)(?:flops?(?:/s)?)?\s*", re.ASCII | re.IGNORECASE)

MOST_ROWS = 12  # with more than these, equal shards share one


def run(options: argparse.Namespace) -> None:
    """Print the plan of a user's function."""
    machine = machine_of(options, num_devices=count(options.devices, "--devices"))
    num_samples = None if options.batch is None else count(options.batch, "--batch")
    number = None if options.micro_batches == "auto" else count(options.micro_batches, "--micro-batches")
    partitioner = _partitioner(options.partitioner)
    with here_importable():
        with without_values(options.function):
            sample = unpacked(options.function, called(options.function, "returns (model, (inputs, target), loss_fn)"))
        with planned():
            plan = plan_ahead(sample, machine, partitioner, num_samples=num_samples, num_micro_batches=number)
    print(*plan_lines(plan, title=options.function), sep="\n")


def machine_of(options: argparse.Namespace, *, num_devices: int = 1) -> Machine:
    """Return what the options state; raises Mistake."""
    memory_bytes = _size(options.memory, "--memory")
    reserve = RESERVES[options.device] if options.reserve is None else options.reserve
    reserve_bytes = 0 if reserve.strip() == "0" else _size(reserve, "--reserve")
    if reserve_bytes >= memory_bytes:
        raise Mistake(
            f"--reserve: {format_bytes(reserve_bytes)}, limit: less than --memory, {format_bytes(memory_bytes)}; raise "
            f"--memory, or reserve less (--reserve 0)"
        )
    kind, precision = DEVICES[options.device], options.precision
    rates = STATED_RATES[kind, precision]
    if options.flops is not None:
        rates = replace(rates, flops_per_s=_flops(options.flops))
    if options.memory_bandwidth is not None:
        rates = replace(rates, memory_bytes_per_s=_bytes_per_s(options.memory_bandwidth, "--memory-bandwidth"))
    dram = getattr(options, "dram", None)
    with mistakes(ValueError):
        return Machine(
            memory_bytes=memory_bytes,
            reserve_bytes=reserve_bytes,
            device=kind,
            precision=precision,
            rates=rates,
            link_bytes_per_s=_bytes_per_s(options.link, "--link"),
            dram_bytes_per_s=_bytes_per_s(options.dram_bandwidth, "--dram-bandwidth"),
            optimizer=options.optimizer,
            num_devices=num_devices,
            dram_bytes=None if dram is None else _size(dram, "--dram"),
            split_weights=options.split_weights,
            early_release=options.early_release,
        )


def _size(text: str, field: str) -> int:
    with mistakes(ValueError):
        return parse_bytes(text, field)


def _bytes_per_s(text: str, field: str) -> int:
    return _size(text.strip().removesuffix("/s"), field)


def _flops(text: str) -> float:
    match = _RATE.fullmatch(text)
    value = float(match[1]) * 1000.0 ** " kmgtp".index(match[2].lower() or " ") if match else 0.0
    if not 0 < value < float("inf"):
        raise Mistake(f"--flops: {text!r}, limit: operations per second, above 0; write 80e12, 80T or 80TFLOP/s")
    return value


def _partitioner(text: str) -> Partitioner:
    name, colon, number = text.partition(":")
    settings = {"num_shards": count(number, f"--partitioner {name}")} if colon else {}
    with mistakes(ValueError, after="; the command takes optimal, pilot and balanced:N"):
        return make_partitioner(name, **settings)


def plan_lines(plan: AheadPlan, *, title: str) -> list[str]:
    """The plan as lines of text."""
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
    lines += ["", *table(_rows(plan)), ""]
    return [*lines, _dram_line(plan), *_step_lines(plan), *_limit_lines(plan), _rates_line(plan)]


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
        _layers(plan, shard) + (" ..." if len(alike) > 1 else ""),
        format_bytes(shard.slab_bytes),
        format_bytes(shard.needed_bytes),
        duration(shard.forward_s),
        duration(shard.backward_s),
    )


def _layers(plan: AheadPlan, shard: ShardEstimate) -> str:
    return spanned([cost.name for cost in plan.costs[shard.first : shard.last]])


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
        *([] if homes is None else [_homes_line(homes, len(plan.costs))]),
    ]


def _homes_line(found: PredictedCut, num_layers: int) -> str:
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
