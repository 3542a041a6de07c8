"""The command line: ``hydra-engine VERB ...``, one verb for each thing that people do.

A verb is `run(options)` of the module of its name, which is imported once the line has been understood: torch takes
seconds, and `--help` needs none of it.
"""

from __future__ import annotations

import argparse
import difflib
import io
import math
import os
import re
import shlex
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import NoReturn, TypeAlias

from hydra_engine import __version__

# As `predict_training` knows them.
DEVICES = {"gpu": "cuda", "cpu": "cpu"}
PRECISIONS = ("float32", "bfloat16", "float16")
OPTIMIZERS = ("adamw", "sgd", "sgd-momentum")

# Exit codes, as docs/command-line.md lists them; LOST is that of a lost device.
DONE, FAILED, REFUSED, LOST, INTERRUPTED, TERMINATED = 0, 1, 2, 75, 130, 143


class Mistake(Exception):
    """An error that the user can correct, in words of one line."""


class Failure(Exception):
    """A command was begun and did not succeed; the message is one line."""


@contextmanager
def mistakes(*kinds: type[Exception], before: str = "", after: str = "") -> Iterator[None]:
    """Raise Mistake in place of errors of these kinds, with words before and after theirs."""
    try:
        yield
    except kinds as error:
        raise Mistake(f"{before}{error}{after}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb and return the exit code, as docs/command-line.md lists them.

    All but 0 come with one line on stderr, and with `--debug` the traceback before it.
    """
    line = list(sys.argv[1:] if arguments is None else arguments)
    own, command = split_command(line)
    options, unknown = parser().parse_known_args(own)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.argv = command
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a sign that a terminal lacks is no failure
    path = list(sys.path)
    try:
        verb = import_module(f"hydra_engine.cli.{options.command}")
        if hasattr(options, "function"):
            sys.path.insert(0, os.getcwd())  # the user's modules are looked for in the current directory first
        verb.run(options)
        return DONE
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if options.debug:
            traceback.print_exc()
        code, text = _outcome(error, options, line)
        if text:
            print(f"hydra-engine {options.command}: {' '.join(text.split())}", file=sys.stderr)
        return code
    finally:
        sys.path[:] = path


def _outcome(error: BaseException, options: argparse.Namespace, line: Sequence[str]) -> tuple[int, str]:
    """Return the exit code and the line that says why."""
    if isinstance(error, Mistake):
        return REFUSED, str(error)
    if isinstance(error, Failure):
        return FAILED, str(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, f"ended by Ctrl-C; {_again(options, line)}"
    if not isinstance(error, SystemExit):
        return FAILED, f"{type(error).__name__}: {error}; the same command with --debug shows the traceback"
    if error.code == LOST:  # the engine has said so
        return LOST, ""
    if error.code == TERMINATED:
        return TERMINATED, f"ended by SIGTERM; {_again(options, line)}"
    return FAILED, f"SystemExit: {error.code}: the code that it called has ended it; let it return, or raise"


def _again(options: argparse.Namespace, line: Sequence[str]) -> str:
    """Return text that names the command which continues what was interrupted, or begins it again."""
    again = f"`{shlex.join(('hydra-engine', *line))}`"
    directory = getattr(options, "checkpoint_dir", None)
    if directory is None:
        keeps = "; with --checkpoint-dir it could go on" if options.command in ("sweep", "train") else ""
        return f"begin again with {again}{keeps}"
    if options.command == "train" and any(Path(directory).glob("checkpoint-*.json")):
        return f"go on with `{shlex.join(('hydra-engine', 'resume', directory))}`"
    return f"go on with {again}"


def split_command(line: list[str]) -> tuple[list[str], list[str] | None]:
    """Return what `resume` takes itself, and the command that stands behind a "--"; None without one.

    argparse would take a second "--" out of the command.
    """
    verb = next((each for each in line if not each.startswith("-")), None)
    if verb != "resume" or "--" not in line:
        return line, None
    end = line.index("--")
    return line[:end], line[end + 1 :]


# -- the parser


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage, and with the nearest known word."""

    def error(self, message: str) -> NoReturn:
        near: list[str] = []
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(choice[1], re.findall(r"[\w-]+", choice[2]), 1)
        elif option := re.search(r"unrecognized arguments: (?:.* )?(--[\w-]+)", message):
            near = difflib.get_close_matches(option[1], re.findall(r"--[\w-]+", self.format_usage()), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        self.exit(REFUSED, f"{self.prog}: {message}{hint}; `{self.prog} --help` lists what it takes\n")


def count(text: str) -> int:
    """Return a whole number of at least 1; an argparse type."""
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number >= 1")
    return int(text)


def seconds(text: str) -> float:
    """Return a number of seconds; an argparse type."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found <= TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r}, expected seconds, 0 to {TIMEOUT_MAX:g}, for example 30")
    return found


def _steps_or_time(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdecimal() else text


def _count_or_auto(text: str) -> int | str:
    return text if text == "auto" else count(text)


_Verbs: TypeAlias = "argparse._SubParsersAction[_Parser]"
_Add: TypeAlias = "Callable[..., object]"  # a parser's add_argument

_FUNCTION = "PACKAGE.MODULE:FUNCTION"
_OVERVIEW = """\
examples:
  hydra-engine demo                                             four models, two small devices, half a minute
  hydra-engine plan my_models:sample --memory 24GiB             does my model fit, and how fast would it be
  hydra-engine train my_models:tasks --devices cuda:0 --checkpoint-dir runs/a
  hydra-engine resume runs/a

exit codes:
  0 done   1 begun, and failed   2 refused before any work: the line says what to correct
  75 a GPU was lost, the last commits are saved   130 Ctrl-C   143 SIGTERM
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs; builds it without torch."""
    found = _Parser(
        prog="hydra-engine",
        description="Trains many PyTorch models together, each larger than the device.",
        epilog=_OVERVIEW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    found.add_argument("--debug", action="store_true", help="show an error's traceback")
    verbs = found.add_subparsers(dest="command", required=True, metavar="VERB")
    for add_verb in (_demo, _plan, _train, _verify, _sweep, _resume, _devices, _report, _simulate):
        add_verb(verbs)
    return found


def _verb(verbs: _Verbs, name: str, text: str, description: str, *examples: str) -> _Add:
    """Add a verb, and return what adds its arguments."""
    added = verbs.add_parser(
        name,
        help=text,
        description=textwrap.fill(f"{text[0].upper()}{text[1:]}. {description}", 100, break_on_hyphens=False),
        epilog="\n  ".join(["examples:", *(f"hydra-engine {name} {each}".rstrip() for each in examples)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    added.set_defaults(parser=added)
    added.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show an error's traceback")
    return added.add_argument


def _demo(verbs: _Verbs) -> None:
    add = _verb(
        verbs,
        "demo",
        "trains four models on two devices that none of them fits, and checks the bits",
        "They are byte-level GPTs on emulated devices, and the training state of each is over 4 times a device. One is "
        "trained again in plain PyTorch. It says first what it does and how long that takes. Exit code 1: bits differ.",
        *("", "--full", "--devices cuda:0 --memory 4GiB"),
    )
    add("--full", action="store_true", help="120 steps of each model in place of 20: minutes")
    add("--steps", type=count, metavar="N", help="of each model, in 2 whole epochs")
    add("--devices", nargs="+", metavar="NAME|SIZE", help="GPUs by name, or sizes of emulated ones (12MiB 12MiB)")
    add("--memory", metavar="SIZE", help="of each GPU (all that it has free)")
    add("--text", metavar="FILE", help="to learn (the source of Python's standard library)")
    add("--seed", type=int, default=0, metavar="N", help="of the models and the order of batches (0)")


def _plan(verbs: _Verbs) -> None:
    add = _verb(
        verbs,
        "plan",
        "says how a model would be cut, the bytes it takes and the time of its step, by arithmetic",
        "Nothing is allocated and nothing computed. Sizes: 512MiB, 16GiB, 1.5GB (10^9).",
        "my_models:sample --memory 24GiB --precision bfloat16",
        "my_models:sample --memory 8GiB --batch 64 --micro-batches auto",
    )
    add("function", metavar=_FUNCTION, help="returns (model, (inputs, target), loss_fn)")
    add("--memory", required=True, metavar="SIZE", help="of one device")
    add("--devices", type=count, default=1, metavar="N", help="for several such tasks; one task uses one at a time (1)")
    add("--dram", metavar="SIZE", help="the most that as many such tasks as devices take (any)")
    _add_machine(add)


def _add_machine(add: _Add) -> None:
    """Add what is stated of a device and of how a task is trained there."""
    add("--device", choices=DEVICES, default="gpu", help="whose kernels are assumed (gpu)")
    add("--precision", choices=PRECISIONS, default="float32", help="(float32)")
    add("--batch", type=count, metavar="N", help="samples in a batch (the sample's own)")
    add("--micro-batches", type=_count_or_auto, default=1, metavar="N|auto", help="per step (1)")
    add("--partitioner", default="optimal", metavar="NAME", help="optimal, pilot or balanced:N (optimal)")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="on the host (adamw)")
    add("--split-weights", action=argparse.BooleanOptionalAction, help="as ModelTask's (where --dram is too small)")
    add("--early-release", nargs="?", const=True, default=False, choices=("all",), help="as ModelTask's (off)")
    add("--reserve", metavar="SIZE", help="device memory for context and libraries (1GiB on gpu, 0 on cpu)")
    add("--flops", metavar="RATE", help="of the device, in practice: 80e12 or 80T")
    add("--memory-bandwidth", metavar="RATE", help="of the device, in practice: 800GB/s")
    add("--link", default="25GB/s", metavar="RATE", help="between DRAM and a device, each way (25GB/s)")
    add("--dram-bandwidth", default="50GB/s", metavar="RATE", help="for the host optimizer (50GB/s)")


def _add_run(add: _Add, directory: str) -> None:
    """Add what is stated of a run that trains. `directory`: help of --checkpoint-dir."""
    add("--devices", nargs="+", metavar="NAME|SIZE", help="GPUs by name, or sizes of emulated devices (every GPU)")
    add("--dram", metavar="SIZE", help="the most that all models take together (what the machine has)")
    add("--checkpoint-dir", metavar="DIR", help=directory)
    add("--checkpoint-every", type=_steps_or_time, default="10min", metavar="TIME|STEPS", help="(10min)")


def _train(verbs: _Verbs) -> None:
    add = _verb(
        verbs,
        "train",
        "trains the tasks that a function of yours returns",
        "Ctrl-C saves the last commits in --checkpoint-dir, and the line after it names the command that goes on.",
        "my_models:tasks --devices cuda:0 cuda:1 --checkpoint-dir runs/a --report a.json",
        "my_models:tasks --devices 512MiB 512MiB --dry-run",
    )
    add("function", metavar=_FUNCTION, help="returns a ModelTask, or a list of them")
    _add_run(add, "where to save, and to go on from")
    add("--policy", default="sharded-lrtf", metavar="NAME", help="of the schedule (sharded-lrtf)")
    add("--report", metavar="FILE", help="where to save the report: `hydra-engine report FILE` reads it")
    add("--dry-run", action="store_true", help="plan, check that everything fits, and end")
    add("--quiet", action="store_true", help="show no plan and no progress")


def _verify(verbs: _Verbs) -> None:
    add = _verb(
        verbs,
        "verify",
        "compares tasks of yours with plain PyTorch, bit for bit, in a few steps",
        "Trains them in float32 on the CPU: in plain PyTorch, then by the engine in one piece, with a shard for each "
        "layer on devices that come and go, and saved and resumed in the middle. Prints what differs first, and the "
        "rule of docs/contract.md that is likely broken. Do so before a long run on GPUs, with a small model of the "
        "same kind: all that it trains is in DRAM. Exit code 1: something differs.",
        "my_models:small_tasks",
        "my_models:small_tasks --steps 10 --micro-batches 2 --memory 64MiB",
    )
    add("function", metavar=_FUNCTION, help="returns a ModelTask, or a list of them, made anew each time")
    add("--steps", type=count, default=6, metavar="N", help="of each task, rounded up to whole pairs (6)")
    add("--memory", default="auto", metavar="SIZE", help="of each emulated device (half of what DRAM has)")
    add("--devices", type=count, default=2, metavar="N", help="emulated, that are in at the same time (2)")
    add("--micro-batches", type=count, metavar="N", help="of each step (as the tasks ask for)")


def _sweep(verbs: _Verbs) -> None:
    add = _verb(
        verbs,
        "sweep",
        "trains the trials of a search space together, and names the best",
        "They are trials of an Optuna study. With --checkpoint-dir the same command goes on after it was killed.",
        "my_models:build_task --trials 24 --devices cuda:0 --study sqlite:///sweep.db",
        "my_models:build_task --rungs 1:3 --checkpoint-dir sweeps/a",
    )
    add("function", metavar=_FUNCTION, help="takes an Optuna trial, and returns a ModelTask")
    add("--trials", type=count, default=12, metavar="N", help="in all (12)")
    add("--timeout", type=seconds, metavar="SECONDS", help="after which no new trial begins (no limit)")
    add("--parallel", type=count, metavar="N", help="the most models in DRAM at once (two per device)")
    _add_run(add, "folder of the sweep, from which it goes on")
    add("--study", metavar="URL", help="the study's storage: sqlite:///sweep.db (beside the checkpoints, or in memory)")
    add("--metric", nargs="+", metavar="NAME", help="of the last validation (validation_loss)")
    add("--direction", nargs="+", choices=("minimize", "maximize"), help="of each metric (minimize)")
    add("--seed", type=int, default=0, metavar="N", help="of the trials' random streams (0)")
    add("--rungs", metavar="MIN:FACTOR", help="successive halving, after MIN validations and each FACTOR times as many")
    add("--population", nargs="+", metavar="NAME", help="population-based training, which perturbs these values")
    add("--interval", type=count, metavar="N", help="validations between two decisions of a population (1)")
    add("--cluster", metavar="ADDRESS", help="of a Ray cluster, auto or HOST:PORT: train on all of its nodes (here)")


def _resume(verbs: _Verbs) -> None:
    add = _verb(
        verbs,
        "resume",
        "runs the command again that made checkpoints, from the newest whole one",
        "Says first what that holds. The command runs where it ran then, with this shell's environment variables: its "
        "train_models() goes on, with the devices and settings of its program as it is now. The command is read from "
        "DIR, so DIR must be from someone you trust. After -- you may give another one, which runs here.",
        "runs/a",
        "runs/a -- python train.py --more",
    )
    add("directory", metavar="DIR", help="the run's checkpoint_dir")
    verbs.choices["resume"].usage = "hydra-engine resume [-h] DIR [-- COMMAND...]"


def _devices(verbs: _Verbs) -> None:
    add = _verb(
        verbs,
        "devices",
        "lists this machine's devices; lists, adds and removes those of a run that is at work",
        "It works from outside. What leaves finishes its unit, and no step is redone. list RUN prints where each is: "
        "in, leaving or out.",
        *("", "list runs/a", "remove runs/a cuda:1 --grace 30"),
    )
    orders = ("list", "add", "remove")
    add("order", choices=orders, nargs="?", default="list", help="list the devices, add one, or remove one (list)")
    add("run_dir", metavar="RUN", nargs="?", help="the run's checkpoint_dir; without it, list is of this machine")
    add("name", metavar="NAME", nargs="?", help="of a device: as list prints it, or of a GPU that is not in")
    grace = "that the unit on a removed device has to finish; then it is run elsewhere"
    add("--grace", type=seconds, metavar="SECONDS", help=grace)


def _report(verbs: _Verbs) -> None:
    add = _verb(
        verbs,
        "report",
        "prints and draws a report that a run saved",
        "Runs save it: `report.save(FILE)`, `train --report`.",
        "run.json",
        "run.json --plot timeline.png --trace trace.json",
    )
    add("file", metavar="FILE", help="a saved report")
    add("--plot", metavar="FILE", help="draw the timeline: .png, .svg or .pdf")
    add("--trace", metavar="FILE", help="write a trace for https://ui.perfetto.dev: .json")


def _simulate(verbs: _Verbs) -> None:
    add = _verb(
        verbs,
        "simulate",
        "predicts how long tasks would train on so many devices",
        "Nothing is computed: it asks a real run's scheduler. The function is that of `plan`, or returns a TaskCost or "
        "a list of them.",
        "my_models:sample --memory 24GiB --copies 12 --steps 1000 --devices 1 2 4",
    )
    add("function", metavar=_FUNCTION, help="returns (model, (inputs, target), loss_fn), or TaskCosts")
    add("--copies", type=count, default=1, metavar="N", help="tasks of each kind (1)")
    add("--steps", type=count, default=100, metavar="N", help="of each task, unless a TaskCost says so (100)")
    numbers = "numbers to compare (1 2 4 8)"
    add("--devices", type=count, nargs="+", default=[1, 2, 4, 8], metavar="N", help=numbers)
    add("--policy", default="sharded-lrtf", metavar="NAME", help="of the schedule (sharded-lrtf)")
    add("--memory", metavar="SIZE", help="of one device; for a model")
    _add_machine(add)
