"""``hydra-engine devices``: the devices of a run that is at work, listed, added and removed."""

from __future__ import annotations

import argparse

from hydra_engine.cli.command import Mistake, mistakes, seconds
from hydra_engine.control import ask
from hydra_engine.devices import EmulatedDevice, resolve_devices
from hydra_engine.system import dram
from partitioners import format_bytes


def run(options: argparse.Namespace) -> None:
    """Send the order to the run, and print a line for each device that it is about."""
    what, name = options.order, options.name
    if options.run is None:
        if what != "list":
            raise Mistake(f"RUN: None with {what}, limit: the checkpoint_dir of a run that is at work; name it")
        _list_machine()
        return
    if (name is None) != (what == "list"):
        raise Mistake(f"NAME: {name!r} with {what}, limit: list takes none, add and remove take one; `--help`")
    if options.grace is not None and what != "remove":
        raise Mistake(f"--grace: {options.grace!r} with {what}, limit: with remove; leave it out")
    order = {"do": what, "name": name, "grace_s": None if options.grace is None else seconds(options.grace, "--grace")}
    with mistakes(OSError, ValueError):
        answer = ask(options.run, {key: value for key, value in order.items() if value is not None})
    places = answer["devices"]
    shown = places if name is None else {answer["name"]: places.get(answer["name"], "out")}
    for device, place in shown.items():
        print(f"{device}: {place}")


def _list_machine() -> None:
    """Print a line for each device that a run takes by itself."""
    specs = resolve_devices(None, max(1, dram.available_dram_bytes() // 2))
    for index, spec in enumerate(specs):
        print(f"{spec.name_at(index)}: {format_bytes(spec.memory_bytes)}")
    if any(isinstance(spec, EmulatedDevice) for spec in specs):
        print("this process sees no GPU: a run takes one emulated device of half the free DRAM")
