"""The command line: ``hydra-engine plan PACKAGE.MODULE:FUNCTION --memory 16GiB``, ``probe``, ``resume DIR``, ``sweep``,
``devices``.

A command's module is imported once the line has been understood: torch takes seconds, and `--help` needs none of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

# As `hydra_engine.cli.plan` knows them.
DEVICES = ("gpu", "cpu")
PRECISIONS = ("float32", "bfloat16", "float16")
OPTIMIZERS = ("adamw", "sgd", "sgd-momentum")
ORDERS = ("list", "add", "remove")


class Mistake(Exception):
    """An error that the user can correct, in words of one line."""


def count(text: str, field: str) -> int:
    """Return the number that an option gives."""
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise Mistake(f"{field}: {text!r}, limit: a whole number >= 1; pass such a number")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, or 2 after one line on stderr about what the user can correct."""
    own, command = _parted(list(sys.argv[1:] if arguments is None else arguments))
    options = _parser().parse_args(own)
    options.argv = command
    try:
        import_module(f"hydra_engine.cli.{options.command}").run(options)
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
    _add_sweep(commands.add_parser("sweep", help="trains the trials of a search space together, and names the best"))
    _add_devices(commands.add_parser("devices", help="lists, adds and removes devices of a run that is at work"))
    return parser


def _add_devices(devices: argparse.ArgumentParser) -> None:
    devices.description = (
        "Steers a run of yours that is at work, from outside: what leaves finishes its unit, and no step is redone. "
        "list prints the place of each device: in, leaving or out."
    )
    add = devices.add_argument
    add("order", choices=ORDERS, help="list the devices, add one, or remove one")
    add("run", metavar="RUN", help="the run's checkpoint_dir")
    add("name", metavar="NAME", nargs="?", help="of a device: as list prints it, or of a GPU that is not in")
    add("--grace", metavar="SECONDS", help="that the unit on a removed device has to finish; then it is run elsewhere")


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.description = (
        "Prints how a model would be cut into shards, the bytes it takes, and the predicted time of a step. Nothing is "
        "allocated and nothing computed. Sizes: 512MiB, 16GiB, 1.5GB (10^9)."
    )
    add = plan.add_argument
    add("function", metavar="PACKAGE.MODULE:FUNCTION", help="returns (model, (inputs, target), loss_fn)")
    add("--memory", required=True, metavar="SIZE", help="of one device")
    add("--device", choices=DEVICES, default="gpu", help="whose kernels are assumed (gpu)")
    add("--devices", default="1", metavar="N", help="for several such tasks; one task uses one at a time (1)")
    add("--precision", choices=PRECISIONS, default="float32", help="(float32)")
    add("--batch", metavar="N", help="samples in a batch (the sample's own)")
    add("--micro-batches", default="1", metavar="N|auto", help="per step (1)")
    add("--partitioner", default="optimal", metavar="NAME", help="optimal, pilot or balanced:N (optimal)")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="on the host (adamw)")
    add("--reserve", metavar="SIZE", help="device memory for context and libraries (1GiB on gpu, 0 on cpu)")
    add("--flops", metavar="RATE", help="of the device, in practice: 80e12 or 80T")
    add("--memory-bandwidth", metavar="RATE", help="of the device, in practice: 800GB/s")
    add("--link", default="25GB/s", metavar="RATE", help="between DRAM and a device, each way (25GB/s)")
    add("--dram-bandwidth", default="50GB/s", metavar="RATE", help="for the host optimizer (50GB/s)")


def _add_resume(resuming: argparse.ArgumentParser) -> None:
    resuming.usage = f"{resuming.prog} [-h] DIR [-- COMMAND...]"
    resuming.description = (
        "Says what the newest whole checkpoint in DIR holds, and runs the command again that made it, where it ran "
        "then: its train_models() goes on from there, with the devices and settings of its program as it is now. "
        "Environment variables are those of this shell. The command is read from DIR, so DIR must be from someone you "
        "trust. After -- you may give another one, which runs here."
    )
    resuming.add_argument("directory", metavar="DIR", help="the run's checkpoint_dir")


def _add_probe(probing: argparse.ArgumentParser) -> None:
    probing.description = (
        "Measures what no training goes beyond on this machine: copies between DRAM and each kind of device, in DRAM, "
        "and products of matrices. Prints and stores them for plans, in a file of your own (another one: "
        "HYDRA_ENGINE_CEILINGS). Run it while the machine does nothing else."
    )
    named = "as in devices= of a run, or 'emulated' for the CPU (all there are)"
    probing.add_argument("--device", nargs="+", metavar="NAME", help=named)


def _add_sweep(sweep: argparse.ArgumentParser) -> None:
    sweep.description = (
        "Calls the function for each trial of an Optuna study, and trains the tasks that it returns together. With "
        "--checkpoint-dir the same command goes on after it was killed."
    )
    add = sweep.add_argument
    add("function", metavar="PACKAGE.MODULE:FUNCTION", help="takes an Optuna trial, and returns a ModelTask")
    add("--trials", default="12", metavar="N", help="in all (12)")
    add("--parallel", metavar="N", help="the most models in DRAM at once (two per device)")
    add("--devices", nargs="+", metavar="NAME|SIZE", help="GPUs by name, or sizes of emulated devices (every GPU)")
    add("--dram", metavar="SIZE", help="the most that all models take together (what the machine has)")
    add("--study", metavar="URL", help="the study's storage: sqlite:///sweep.db (beside the checkpoints, or in memory)")
    add("--checkpoint-dir", metavar="DIR", help="folder of the sweep, from which it goes on")
    add("--checkpoint-every", default="10min", metavar="TIME|STEPS", help="(10min)")
    add("--metric", nargs="+", metavar="NAME", help="of the last validation (validation_loss)")
    add("--direction", nargs="+", choices=("minimize", "maximize"), help="of each metric (minimize)")
    add("--seed", type=int, default=0, metavar="N", help="of the trials' random streams (0)")
    add("--rungs", metavar="MIN:FACTOR", help="successive halving, after MIN validations and each FACTOR times as many")
    add("--population", nargs="+", metavar="NAME", help="population-based training, which perturbs these values")
    add("--cluster", metavar="ADDRESS", help="of a Ray cluster, auto or HOST:PORT: train on all of its nodes (here)")
    add("--interval", metavar="N", help="validations between two decisions of a population (1)")
