"""``hydra-engine devices``: the devices of a run that is at work, listed, added and removed."""

from __future__ import annotations

import argparse
from importlib import import_module

from hydra_engine.cli.command import Mistake, mistakes, seconds
from hydra_engine.control import ask


def run(options: argparse.Namespace) -> None:
    """Send the order to the run, and print a line for each device that it is about."""
    what, name = options.order, options.name
    if options.run is None:
        if what != "list":
            raise Mistake(f"RUN: None with {what}, limit: the checkpoint_dir of a run that is at work; name it")
        print(*import_module("hydra_engine.cli.probe").machine_lines(), sep="\n")
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
