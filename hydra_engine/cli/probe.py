"""``hydra-engine probe``: measures this machine's ceilings, prints them and stores them for plans."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from hydra_engine.cli.command import mistakes
from hydra_engine.devices import Ceilings, DeviceSpec, EmulatedDevice, probe, resolve_devices
from hydra_engine.devices import rates as ceilings
from hydra_engine.system import dram, host_threads
from hydra_engine.tasks import table
from partitioners import format_bytes
from partitioners.precision import DTYPES

EMULATED_BYTES, EMULATED = 2**28, "emulated"  # the CPU as a device: its memory, and its name here


def run(options: argparse.Namespace) -> None:
    """Measure each kind of device once."""
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
    with _stored():  # whatever is wrong with the file, before any work
        ceilings.load_all()
    found = [probe(spec, num_workers=num_workers, num_threads=num_threads) for spec in kinds.values()]
    print(*table(_columns(found)), sep="\n")
    with _stored():
        path = ceilings.save(*found)
    print(f"stored in {path}")


def machine_lines() -> list[str]:
    """Return a line for each device that a run takes by itself."""
    specs = resolve_devices(None, max(1, dram.available_dram_bytes() // 2))
    lines = [f"{spec.name_at(index)}: {format_bytes(spec.memory_bytes)}" for index, spec in enumerate(specs)]
    if any(isinstance(spec, EmulatedDevice) for spec in specs):
        lines.append("this process sees no GPU: a run takes one emulated device of half the free DRAM")
    return lines


@contextmanager
def _stored() -> Iterator[None]:
    """Raise Mistake for what hinders the block from reading or writing what is stored."""
    elsewhere = f"; name another place in {ceilings.VARIABLE}"
    with mistakes(ValueError), mistakes(OSError, before="ceilings: cannot be stored: ", after=elsewhere):
        yield


def _specs(names: Sequence[str] | None) -> list[DeviceSpec]:
    emulated = EmulatedDevice(EMULATED_BYTES)
    with mistakes(ValueError, RuntimeError, before="--device: ", after=f"; the command takes {EMULATED!r} for the CPU"):
        devices = None if names is None else [emulated if name == EMULATED else name for name in names]
        return resolve_devices(devices, EMULATED_BYTES)


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
