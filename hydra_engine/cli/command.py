"""The command line: ``hydra-engine VERB ...``, one verb for each thing that people do.

A verb's module is imported once the line has been understood: torch takes seconds, and `--help` needs none of it.
"""

from __future__ import annotations

import argparse
import io
import math
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import NamedTuple, NoReturn, TypeAlias

from hydra_engine._version import __version__

# As `hydra_engine.cli.plan` knows them.
DEVICES = ("gpu", "cpu")
PRECISIONS = ("float32", "bfloat16", "float16")
OPTIMIZERS = ("adamw", "sgd", "sgd-momentum")
ORDERS = ("list", "add", "remove")
SHELLS = ("bash", "zsh", "tcsh")

# Exit codes, as docs/command-line.md lists them; LOST is that of a lost device (`hydra_engine.run`).
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


def count(text: str, field: str) -> int:
    """Return the number that an option gives."""
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise Mistake(f"{field}: {text!r}, limit: a whole number >= 1; pass such a number")
    return int(text)


def seconds(text: str, field: str) -> float:
    """Return the seconds that an option gives."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found <= TIMEOUT_MAX:
        raise Mistake(f"{field}: {text!r}, limit: seconds, 0 to {TIMEOUT_MAX:g}; pass for example 30")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb and return the exit code: 0 done, 1 failed, 2 refused, 130 after Ctrl-C, 143 after SIGTERM.

    All but 0 come with one line on stderr. With `--debug` the exception goes on instead, with its traceback.
    """
    line = list(sys.argv[1:] if arguments is None else arguments)
    own, command = _parted(line)
    options = parser().parse_args(own)
    options.argv = command
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a sign that a terminal lacks is no failure
    try:
        verb = _VERBS[options.command]
        getattr(import_module(f"hydra_engine.cli.{verb.module or options.command}"), verb.function)(options)
    except (Mistake, Failure) as error:
        if options.debug:
            raise
        _say(options, str(error))
        return REFUSED if isinstance(error, Mistake) else FAILED
    except KeyboardInterrupt:
        if options.debug:
            raise
        _say(options, f"ended by Ctrl-C; {_again(options, line)}")
        return INTERRUPTED
    except SystemExit as ended:
        if ended.code == TERMINATED:
            _say(options, f"ended by SIGTERM; {_again(options, line)}")
        if ended.code in (TERMINATED, LOST):
            raise
        if options.debug:
            traceback.print_exc()
        _say(options, f"SystemExit: {ended.code}: the code that it called has ended it; let it return, or raise")
        return FAILED
    except Exception as error:
        if options.debug:
            raise
        _say(options, f"{type(error).__name__}: {error}; the same command with --debug shows the traceback")
        return FAILED
    return DONE


def _say(options: argparse.Namespace, text: str) -> None:
    print(f"hydra-engine {options.command}: {' '.join(text.split())}", file=sys.stderr)


def _again(options: argparse.Namespace, line: Sequence[str]) -> str:
    """Return text that names the command which goes on with what was interrupted, or begins it again."""
    again = f"`{shlex.join(('hydra-engine', *line))}`"
    directory = getattr(options, "checkpoint_dir", None)
    if directory is None:
        keeps = "; with --checkpoint-dir it could go on" if options.command in ("sweep", "train") else ""
        return f"begin again with {again}{keeps}"
    if options.command == "train" and any(Path(directory).glob("checkpoint-*.json")):
        return f"go on with `{shlex.join(('hydra-engine', 'resume', directory))}`"
    return f"go on with {again}"


def _parted(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """Return what `resume` takes itself, and the command that stands behind a "--"; None without one."""
    verb = next((each for each in arguments if not each.startswith("-")), None)
    if verb != "resume" or "--" not in arguments:
        return arguments, None
    end = arguments.index("--")
    return arguments[:end], arguments[end + 1 :]


class _Help(argparse.HelpFormatter):
    """Keeps the lines of examples, and wraps all other text."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return text
        return super()._fill_text(text, width, indent)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"{self.prog}: {message}; `{self.prog} --help` lists what it takes\n")


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
    description = "Trains many PyTorch models together, each larger than the device."
    found = _Parser(prog="hydra-engine", description=description, epilog=_OVERVIEW, formatter_class=_Help)
    found.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    found.add_argument("--debug", action="store_true", help="show an error's traceback")
    commands = found.add_subparsers(dest="command", required=True, metavar="VERB")
    for name, verb in _VERBS.items():
        epilog = "examples:\n" + "".join(f"  {each}\n" for each in verb.examples)
        added = commands.add_parser(
            name, help=verb.text, description=verb.description, epilog=epilog, formatter_class=_Help
        )
        if name == "resume":
            added.usage = f"{added.prog} [-h] DIR [-- COMMAND...]"
        added.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show an error's traceback")
        verb.fill(added.add_argument)
    return found


_Add: TypeAlias = "Callable[..., object]"  # a parser's add_argument


class _Verb(NamedTuple):
    """One verb, as it is told of."""

    fill: Callable[[_Add], None]  # adds its arguments
    text: str  # its line in the list of verbs
    description: str
    examples: tuple[str, ...]
    module: str = ""  # of hydra_engine.cli; "": of the verb's name
    function: str = "run"


def _add_demo(add: _Add) -> None:
    add("--full", action="store_true", help="120 steps of each model in place of 20: minutes")
    add("--steps", metavar="N", help="of each model, in 2 whole epochs")
    add("--devices", nargs="+", metavar="NAME|SIZE", help="GPUs by name, or sizes of emulated ones (12MiB 12MiB)")
    add("--memory", metavar="SIZE", help="of each GPU (all that it has free)")
    add("--text", metavar="FILE", help="to learn (the source of Python's standard library)")
    add("--seed", type=int, default=0, metavar="N", help="of the models and the order of batches (0)")


def _add_train(add: _Add) -> None:
    add("function", metavar="PACKAGE.MODULE:FUNCTION", help="returns a ModelTask, or a list of them")
    add("--devices", nargs="+", metavar="NAME|SIZE", help="GPUs by name, or sizes of emulated devices (every GPU)")
    add("--dram", metavar="SIZE", help="the most that all models take together (what the machine has)")
    add("--policy", default="sharded-lrtf", metavar="NAME", help="of the schedule (sharded-lrtf)")
    add("--checkpoint-dir", metavar="DIR", help="where to save, and to go on from")
    add("--checkpoint-every", default="10min", metavar="TIME|STEPS", help="(10min)")
    add("--report", metavar="FILE", help="where to save the report: `hydra-engine report FILE` reads it")
    add("--dry-run", action="store_true", help="plan, check that everything fits, and end")
    add("--quiet", action="store_true", help="show no plan and no progress")


def _add_verify(add: _Add) -> None:
    add(
        "function",
        metavar="PACKAGE.MODULE:FUNCTION",
        help="returns a ModelTask, or a list of them, made anew each time",
    )
    add("--steps", default="6", metavar="N", help="of each task, rounded up to whole pairs (6)")
    add("--memory", default="auto", metavar="SIZE", help="of each emulated device (half of what DRAM has)")
    add("--devices", default="2", metavar="N", help="emulated, that are in at the same time (2)")
    add("--micro-batches", metavar="N", help="of each step (as the tasks ask for)")


def _add_report(add: _Add) -> None:
    add("file", metavar="FILE", help="a saved report")
    add("--plot", metavar="FILE", help="draw the timeline: .png, .svg or .pdf")
    add("--trace", metavar="FILE", help="write a trace for https://ui.perfetto.dev: .json")


def _add_completion(add: _Add) -> None:
    add("shell", choices=SHELLS, help="whose script to print")


def _add_simulate(add: _Add) -> None:
    add("function", metavar="PACKAGE.MODULE:FUNCTION", help="returns (model, (inputs, target), loss_fn), or TaskCosts")
    add("--copies", default="1", metavar="N", help="tasks of each kind (1)")
    add("--steps", default="100", metavar="N", help="of each task, unless a TaskCost says so (100)")
    add("--devices", nargs="+", default=["1", "2", "4", "8"], metavar="N", help="numbers to compare (1 2 4 8)")
    add("--policy", default="sharded-lrtf", metavar="NAME", help="of the schedule (sharded-lrtf)")
    add("--memory", metavar="SIZE", help="of one device; for a model")
    _add_machine(add)


def _add_devices(add: _Add) -> None:
    add("order", choices=ORDERS, nargs="?", default="list", help="list the devices, add one, or remove one (list)")
    add("run", metavar="RUN", nargs="?", help="the run's checkpoint_dir; without it, list is of this machine")
    add("name", metavar="NAME", nargs="?", help="of a device: as list prints it, or of a GPU that is not in")
    add("--grace", metavar="SECONDS", help="that the unit on a removed device has to finish; then it is run elsewhere")


def _add_plan(add: _Add) -> None:
    add("function", metavar="PACKAGE.MODULE:FUNCTION", help="returns (model, (inputs, target), loss_fn)")
    add("--memory", required=True, metavar="SIZE", help="of one device")
    add("--devices", default="1", metavar="N", help="for several such tasks; one task uses one at a time (1)")
    add("--dram", metavar="SIZE", help="the most that as many such tasks as devices take (any)")
    _add_machine(add)


def _add_machine(add: _Add) -> None:
    """Add what is stated of a device and of how a task is trained there."""
    add("--device", choices=DEVICES, default="gpu", help="whose kernels are assumed (gpu)")
    add("--precision", choices=PRECISIONS, default="float32", help="(float32)")
    add("--batch", metavar="N", help="samples in a batch (the sample's own)")
    add("--micro-batches", default="1", metavar="N|auto", help="per step (1)")
    add("--partitioner", default="optimal", metavar="NAME", help="optimal, pilot or balanced:N (optimal)")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="on the host (adamw)")
    add("--split-weights", action=argparse.BooleanOptionalAction, help="as ModelTask's (where --dram is too small)")
    add("--early-release", nargs="?", const=True, default=False, choices=("all",), help="as ModelTask's (off)")
    add("--reserve", metavar="SIZE", help="device memory for context and libraries (1GiB on gpu, 0 on cpu)")
    add("--flops", metavar="RATE", help="of the device, in practice: 80e12 or 80T")
    add("--memory-bandwidth", metavar="RATE", help="of the device, in practice: 800GB/s")
    add("--link", default="25GB/s", metavar="RATE", help="between DRAM and a device, each way (25GB/s)")
    add("--dram-bandwidth", default="50GB/s", metavar="RATE", help="for the host optimizer (50GB/s)")


def _add_resume(add: _Add) -> None:
    add("directory", metavar="DIR", help="the run's checkpoint_dir")


def _add_sweep(add: _Add) -> None:
    add("function", metavar="PACKAGE.MODULE:FUNCTION", help="takes an Optuna trial, and returns a ModelTask")
    add("--trials", default="12", metavar="N", help="in all (12)")
    add("--timeout", metavar="SECONDS", help="after which no new trial begins (no limit)")
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


_VERBS = {
    "demo": _Verb(
        _add_demo,
        "trains four models on two devices that none of them fits, and checks the bits",
        "Trains four byte-level GPTs together on two small emulated devices, and the training state of each is over 4 "
        "times a device. Then it trains one of them again in plain PyTorch and compares all bits. It says first what "
        "it does and how long that takes. Exit code 1: the bits differ.",
        ("hydra-engine demo", "hydra-engine demo --full", "hydra-engine demo --devices cuda:0 --memory 4GiB"),
    ),
    "plan": _Verb(
        _add_plan,
        "how a model would be cut, and what its step would take, by arithmetic",
        "Prints how a model would be cut into shards, the bytes it takes, and the predicted time of a step. Nothing is "
        "allocated and nothing computed. Sizes: 512MiB, 16GiB, 1.5GB (10^9).",
        (
            "hydra-engine plan my_models:sample --memory 24GiB --precision bfloat16",
            "hydra-engine plan my_models:sample --memory 8GiB --batch 64 --micro-batches auto",
        ),
    ),
    "train": _Verb(
        _add_train,
        "trains the tasks that a function of yours returns",
        "Calls the function, which returns one ModelTask or a list of them, and trains all together. Ctrl-C saves the "
        "last commits in --checkpoint-dir, and the line after it names the command that goes on.",
        (
            "hydra-engine train my_models:tasks --devices cuda:0 cuda:1 --checkpoint-dir runs/a --report a.json",
            "hydra-engine train my_models:tasks --devices 512MiB 512MiB --dry-run",
        ),
    ),
    "verify": _Verb(
        _add_verify,
        "compares tasks of yours with plain PyTorch, bit for bit, in a few steps",
        "Calls the function for each training and trains its tasks for a few steps in float32 on the CPU: in plain "
        "PyTorch, then by the engine in one piece, with a shard for each layer on devices that come and go, and saved "
        "and resumed in the middle. Prints the first step and the first tensors that differ, and the rule of "
        "docs/contract.md that is likely broken. Do so before a long run on GPUs, with a small model of the same kind: "
        "it takes the DRAM of the tasks' models, gradients, states and activations. Exit code 1: something differs.",
        (
            "hydra-engine verify my_models:small_tasks",
            "hydra-engine verify my_models:small_tasks --steps 10 --micro-batches 2 --memory 64MiB",
        ),
        module="train",
        function="verify",
    ),
    "sweep": _Verb(
        _add_sweep,
        "trains the trials of a search space together, and names the best",
        "Calls the function for each trial of an Optuna study, and trains the tasks that it returns together. With "
        "--checkpoint-dir the same command goes on after it was killed.",
        (
            "hydra-engine sweep my_models:build_task --trials 24 --devices cuda:0 --study sqlite:///sweep.db",
            "hydra-engine sweep my_models:build_task --rungs 1:3 --checkpoint-dir sweeps/a",
        ),
    ),
    "resume": _Verb(
        _add_resume,
        "runs the command again that made checkpoints, from the newest one",
        "Says what the newest whole checkpoint in DIR holds, and runs the command again that made it, where it ran "
        "then: its train_models() goes on from there, with the devices and settings of its program as it is now. "
        "Environment variables are those of this shell. The command is read from DIR, so DIR must be from someone you "
        "trust. After -- you may give another one, which runs here.",
        ("hydra-engine resume runs/a", "hydra-engine resume runs/a -- python train.py --more"),
    ),
    "devices": _Verb(
        _add_devices,
        "lists this machine's devices; lists, adds and removes those of a run that is at work",
        "Lists the devices of this machine, or steers a run of yours that is at work, from outside: what leaves "
        "finishes its unit, and no step is redone. list RUN prints the place of each device: in, leaving or out.",
        (
            "hydra-engine devices",
            "hydra-engine devices list runs/a",
            "hydra-engine devices remove runs/a cuda:1 --grace 30",
        ),
    ),
    "report": _Verb(
        _add_report,
        "prints and draws a report that a run saved",
        "Prints what a run's report says, and draws it. Runs save it: `report.save(FILE)`, `train --report`.",
        ("hydra-engine report run.json", "hydra-engine report run.json --plot timeline.png --trace trace.json"),
    ),
    "simulate": _Verb(
        _add_simulate,
        "predicts how long tasks would train on so many devices",
        "Predicts how long tasks would train on 1, 2 or more devices, with a real run's scheduler. The function is "
        "that of `plan`, or returns a TaskCost or a list of them. Nothing is allocated or computed.",
        ("hydra-engine simulate my_models:sample --memory 24GiB --copies 12 --steps 1000 --devices 1 2 4",),
    ),
    "completion": _Verb(
        _add_completion,
        "prints a script that completes verbs and options in a shell",
        "Prints a script that completes verbs and options in a shell. Needs shtab: pip install "
        "'hydra_engine[completion]'.",
        ('eval "$(hydra-engine completion bash)"     # in ~/.bashrc',),
    ),
}
