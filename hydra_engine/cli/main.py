"""The command line: ``hydra-engine plan PACKAGE.MODULE:FUNCTION --memory 16GiB``, ``probe`` and ``resume DIR``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
from torch import nn

from hydra_engine.cli.plan import plan_lines
from hydra_engine.cli.resume import resume
from hydra_engine.cli.sample import Mistake, here_importable, refusal, sample_of
from hydra_engine.devices import Ceilings, DeviceSpec, EmulatedDevice, probe, resolve_devices
from hydra_engine.devices import rates as ceilings
from hydra_engine.planning import OPTIMIZERS, Machine, plan_ahead
from hydra_engine.system import host_threads
from hydra_engine.tasks import table
from partitioners import GPU, STATED_RATES, Partitioner, Rates, format_bytes, make_partitioner, parse_bytes
from partitioners.precision import DTYPES

T = TypeVar("T")

DEVICES = {"gpu": GPU, "cpu": "cpu"}
RESERVES = {"gpu": "1GiB", "cpu": "0"}

# The CPU as a device for `probe`: its memory, and its name there.
EMULATED_BYTES, EMULATED = 2**28, "emulated"

_RATE = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([kmgtp]?)(?:flops?(?:/s)?)?\s*", re.ASCII | re.IGNORECASE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, or 2 after one line on stderr about what the user can correct."""
    own, command = _parted(list(sys.argv[1:] if arguments is None else arguments))
    options = _parser().parse_args(own)
    options.argv = command
    try:
        options.run(options)
    except Mistake as mistake:
        print(f"hydra-engine {options.command}: {' '.join(str(mistake).split())}", file=sys.stderr)
        return 2
    return 0


def _parted(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """What `resume` takes itself, and the command that stands behind a "--"; None without one."""
    if arguments[:1] != ["resume"] or "--" not in arguments:
        return arguments, None
    end = arguments.index("--")
    return arguments[:end], arguments[end + 1 :]


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` lists what it takes\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hydra-engine", description="Trains many PyTorch models, each larger than the device.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_plan(commands.add_parser("plan", help="how a model would be cut, and what its step would take, by arithmetic"))
    _add_probe(commands.add_parser("probe", help="measures and stores how fast this machine's links and devices are"))
    _add_resume(commands.add_parser("resume", help="runs the command again that made checkpoints, from the newest one"))
    return parser


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.description = (
        "Prints how a model would be cut into shards, the bytes it takes, and the predicted time of a step. Nothing is "
        "allocated and nothing computed. Sizes: 512MiB, 16GiB, 1.5GB (10^9)."
    )
    plan.set_defaults(run=_plan)
    add = plan.add_argument
    add("function", metavar="PACKAGE.MODULE:FUNCTION", help="returns (model, (inputs, target), loss_fn)")
    add("--memory", required=True, metavar="SIZE", help="of one device")
    add("--device", choices=list(DEVICES), default="gpu", help="whose kernels are assumed (gpu)")
    add("--devices", default="1", metavar="N", help="for several such tasks; one task uses one at a time (1)")
    add("--precision", choices=list(DTYPES), default="float32", help="(float32)")
    add("--batch", metavar="N", help="samples in a batch (the sample's own)")
    add("--micro-batches", default="1", metavar="N|auto", help="per step (1)")
    add("--partitioner", default="optimal", metavar="NAME", help="optimal, pilot or balanced:N (optimal)")
    add("--optimizer", choices=list(OPTIMIZERS), default="adamw", help="on the host (adamw)")
    add("--reserve", metavar="SIZE", help="device memory for context and libraries (1GiB on gpu, 0 on cpu)")
    add("--flops", metavar="RATE", help="of the device, in practice: 80e12 or 80T")
    add("--memory-bandwidth", metavar="RATE", help="of the device, in practice: 800GB/s")
    add("--link", default="25GB/s", metavar="RATE", help="between DRAM and a device, each way (25GB/s)")
    add("--dram-bandwidth", default="50GB/s", metavar="RATE", help="for the host optimizer (50GB/s)")


def _plan(options: argparse.Namespace) -> None:
    machine = _machine(options)
    num_samples = None if options.batch is None else _count(options.batch, "--batch")
    number = None if options.micro_batches == "auto" else _count(options.micro_batches, "--micro-batches")
    partitioner = _partitioner(options.partitioner)
    with here_importable():
        sample = sample_of(options.function)
        try:
            plan = plan_ahead(*sample, machine, partitioner, num_samples=num_samples, num_micro_batches=number)
        except Exception as error:
            mistake = refusal(error)
            if mistake is None:
                raise
            raise mistake from error
    model = sample.model
    is_own = isinstance(model, nn.Module) and type(model).forward is not nn.Sequential.forward
    print(*plan_lines(plan, title=options.function, own_forward=type(model).__name__ if is_own else None), sep="\n")


def _add_probe(probing: argparse.ArgumentParser) -> None:
    probing.description = (
        "Measures what no training goes beyond on this machine: copies between DRAM and each kind of device, in DRAM, "
        f"and products of matrices. Prints and stores them for plans, in {ceilings.path()} (elsewhere: "
        f"{ceilings.VARIABLE}). Run it while the machine does nothing else."
    )
    probing.set_defaults(run=_probe)
    named = f"as in devices= of a run, or {EMULATED!r} for the CPU (all there are)"
    probing.add_argument("--device", nargs="+", metavar="NAME", help=named)


def _probe(options: argparse.Namespace) -> None:
    specs = _specs(options.device)
    kinds: dict[str, DeviceSpec] = {}
    for spec in specs:
        kinds.setdefault(spec.ceilings_name, spec)
    host = host_threads(
        intra_op_threads=torch.get_num_threads(),
        device_nodes=[spec.numa_node() for spec in specs],
        computes_here=any(spec.torch_device.type == "cpu" for spec in specs),
    )
    num_workers, num_threads = host.optimizer_threads, host.optimizer_intra_op_threads
    _stored(ceilings.load_all)  # whatever is wrong with the file, before any work
    found = [probe(spec, num_workers=num_workers, num_threads=num_threads) for spec in kinds.values()]
    print(*table(_columns(found)), sep="\n")
    print(f"stored in {_stored(partial(ceilings.save, *found))}")


def _stored(access: Callable[[], T]) -> T:
    """Read or write what is stored; what hinders that is the user's to correct."""
    try:
        return access()
    except ValueError as error:
        raise Mistake(str(error)) from error
    except OSError as error:
        raise Mistake(f"ceilings: cannot be stored: {error}; name another place in {ceilings.VARIABLE}") from error


def _specs(names: Sequence[str] | None) -> list[DeviceSpec]:
    emulated = EmulatedDevice(EMULATED_BYTES)
    try:
        devices = None if names is None else [emulated if name == EMULATED else name for name in names]
        return resolve_devices(devices, EMULATED_BYTES)
    except (ValueError, RuntimeError) as error:
        raise Mistake(f"--device: {error}; the command takes {EMULATED!r} for the CPU") from error


def _columns(found: Sequence[Ceilings]) -> list[tuple[str, ...]]:
    """A row for each rate, a column for each kind of device."""

    def row(label: str, rates: Sequence[float | None], scale: float, unit: str) -> tuple[str, ...]:
        return (label, *("-" if rate is None else f"{rate / scale:.4g} {unit}" for rate in rates))

    return [
        ("at most", *(each.name for each in found)),
        row("load", [each.up_bytes_per_s for each in found], 1e9, "GB/s"),
        row("store", [each.down_bytes_per_s for each in found], 1e9, "GB/s"),
        row("load during stores", [each.both_up_bytes_per_s for each in found], 1e9, "GB/s"),
        row("store during loads", [each.both_down_bytes_per_s for each in found], 1e9, "GB/s"),
        row("DRAM read and written", [each.dram_bytes_per_s for each in found], 1e9, "GB/s"),
        *(
            row(f"products in {dtype}", [each.matmul_flops.get(dtype) for each in found], 1e12, "TFLOP/s")
            for dtype in DTYPES
        ),
    ]


def _add_resume(resuming: argparse.ArgumentParser) -> None:
    resuming.usage = f"{resuming.prog} [-h] DIR [-- COMMAND...]"
    resuming.description = (
        "Says what the newest whole checkpoint in DIR holds, and runs the command again that made it, where it ran "
        "then: its train_models() goes on from there, with the devices and settings of its program as it is now. "
        "Environment variables are those of this shell. The command is read from DIR, so DIR must be from someone you "
        "trust. After -- you may give another one, which runs here."
    )
    resuming.set_defaults(run=_resume)
    resuming.add_argument("directory", metavar="DIR", help="the run's checkpoint_dir")


def _resume(options: argparse.Namespace) -> None:
    resume(Path(options.directory).absolute(), options.argv)


def _machine(options: argparse.Namespace) -> Machine:
    memory_bytes = _size(options.memory, "--memory")
    reserve = RESERVES[options.device] if options.reserve is None else options.reserve
    reserve_bytes = 0 if reserve.strip() == "0" else _size(reserve, "--reserve")
    if reserve_bytes >= memory_bytes:
        raise Mistake(
            f"--reserve: {format_bytes(reserve_bytes)}, limit: less than --memory, {format_bytes(memory_bytes)}; raise "
            f"--memory, or reserve less (--reserve 0)"
        )
    kind, precision = DEVICES[options.device], options.precision
    stated = STATED_RATES[kind, precision]
    bandwidth = options.memory_bandwidth
    return Machine(
        memory_bytes=memory_bytes,
        reserve_bytes=reserve_bytes,
        device=kind,
        precision=precision,
        rates=Rates(
            flops_per_s=stated.flops_per_s if options.flops is None else _flops(options.flops),
            memory_bytes_per_s=(
                stated.memory_bytes_per_s if bandwidth is None else _bytes_per_s(bandwidth, "--memory-bandwidth")
            ),
        ),
        link_bytes_per_s=_bytes_per_s(options.link, "--link"),
        dram_bytes_per_s=_bytes_per_s(options.dram_bandwidth, "--dram-bandwidth"),
        optimizer=options.optimizer,
        num_devices=_count(options.devices, "--devices"),
    )


def _size(text: str, field: str) -> int:
    try:
        return parse_bytes(text, field)
    except ValueError as error:
        raise Mistake(str(error)) from error


def _bytes_per_s(text: str, field: str) -> int:
    return _size(text.strip().removesuffix("/s"), field)


def _flops(text: str) -> float:
    match = _RATE.fullmatch(text)
    value = float(match[1]) * 1000.0 ** " kmgtp".index(match[2].lower() or " ") if match else 0.0
    if not 0 < value < float("inf"):
        raise Mistake(f"--flops: {text!r}, limit: operations per second, above 0; write 80e12, 80T or 80TFLOP/s")
    return value


def _count(text: str, field: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise Mistake(f"{field}: {text!r}, limit: a whole number >= 1; pass such a number")
    return int(text)


def _partitioner(text: str) -> Partitioner:
    name, colon, number = text.partition(":")
    settings = {"num_shards": _count(number, f"--partitioner {name}")} if colon else {}
    try:
        return make_partitioner(name, **settings)
    except ValueError as error:
        raise Mistake(f"{error}; the command takes optimal, pilot and balanced:N") from error
