"""``hydra-engine devices``: the devices of a run that is at work, listed, added and removed; or this machine's."""

from __future__ import annotations

import argparse
from importlib import import_module

import hydra_engine
from hydra_engine.cli.command import Mistake, mistakes
from hydra_engine.control import ask


def run(options: argparse.Namespace) -> None:
    """Send the order to the run, and print a line for each device that it is about."""
    what, name = options.order, options.name
    if options.run_dir is None:
        if what != "list":
            raise Mistake(f"RUN: None with {what}, expected the checkpoint_dir of a run that is at work; name it")
        _list_machine()
        return
    if (name is None) != (what == "list"):
        raise Mistake(f"NAME: {name!r} with {what}, expected none with list, and one with add or remove; see `--help`")
    if options.grace is not None and what != "remove":
        raise Mistake(f"--grace: {options.grace:g} with {what}, expected with remove; leave it out")
    order = {"do": what, "name": name, "grace_s": options.grace}
    with mistakes(OSError, ValueError):
        answer = ask(options.run_dir, {key: value for key, value in order.items() if value is not None})
    places = answer["devices"]
    shown = places if name is None else {answer["name"]: places.get(answer["name"], "out")}
    for device, place in shown.items():
        print(f"{device}: {place}")


def _list_machine() -> None:
    """Print a line for each device that a run takes by itself; imports torch."""
    specs, format_bytes = hydra_engine.resolve_devices(), import_module("partitioners").format_bytes
    for index, spec in enumerate(specs):
        print(f"{spec.name_at(index)}: {format_bytes(spec.memory_bytes)}")
    if any(isinstance(spec, hydra_engine.EmulatedDevice) for spec in specs):
        print("this process sees no GPU: a run takes one emulated device of half the free DRAM")
