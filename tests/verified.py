"""`python -m tests.verified [NAME ...]`: what becomes of each program of tests/guard_cases.py.

    python -m tests.verified                              # all of them, and totals
    python -m tests.verified --jobs 2 counter T:lbfgs     # these; a recipe's name may go without its "R:"

Each is trained for 51 steps by the plain loop of tests/reference.py and by the engine in four ways, and is shown to
`hydra_engine.verify`, each time in a process of its own. Then it is
  exact    losses, weights and buffers are those of the plain loop in every way, and verify says the same;
  refused  the engine says what is wrong and what to do instead, and is exact in the ways in which it says nothing;
  error    so, but what is raised is an ordinary exception;
  named    results differ in some way, or verify says that they can;
  unseen   results differ in some way, and verify calls them the same: a rule of docs/contract.md has to forbid it.
"""

import argparse
import gc
import math
import multiprocessing
import os
import pickle
import random
import select
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from contextlib import nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import hydra_engine
import partitioners
from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.verify import verify
from hydra_engine.verify.compare import DevicesChange, EachLayer
from hydra_engine.verify.record import digest
from tests import reference, zoo
from tests.guard_cases import CASES, LIKELY, PROGRAMS
from tests.promises.test_spread import spread
from tests.recipes import RECIPES, batches

SEED, LR, STEPS, MEMORY = 5, 1e-2, 51, "4MiB"
HANG_S = 120
OWN = ("layers", "model", "loss_fn", "loader", "expect", "spread")
OF_THE_ENGINE = ("optimizer_scope", "early_release", "max_retries")  # plain PyTorch has none of these
OURS = tuple(str(Path(package.__file__).parent) for package in (hydra_engine, partitioners))

# One shard on one device; a shard for each layer on two; so, on devices that change with each step; so, each step in
# two micro-batches that are spread over both.
WHOLE, CUT, ALTERNATING, SPREAD = WAYS = ("W1", "C2", "A1", "S2")
CLASSES = ("exact", "refused", "error", "named", "unseen")


class Trained(NamedTuple):
    """What a training has left; `kind`: "trained", "refused", "error", "hung" or "crashed"."""

    kind: str
    text: str = ""
    losses: tuple = ()
    state: tuple = ()


class OneShard(EachLayer):
    """Cuts nowhere."""

    def partition(self, costs, budget):
        return [len(costs)]


def made(name):
    """A program's parts, made anew: model, loss, loader, and options of a task."""
    _seed(1)
    built = (PROGRAMS.get(name) or PROGRAMS[f"R:{name}"])()
    options = {key: value for key, value in built.items() if key not in OWN}
    model = built["model"] if "model" in built else nn.Sequential(*built["layers"])
    return model, built.get("loss_fn") or F.cross_entropy, built.get("loader") or batches(), options


def task_of(name):
    """The task of a program, made anew."""
    model, loss_fn, loader, options = made(name)
    return ModelTask(model, loss_fn, loader, LR, seed=SEED, name=name, **options)


def verified(name, **options):
    """The verification of a recipe's task, and what its own tests expect: "exact", "refused" or "doubted"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return verify(lambda: task_of(name), **options).tasks[name], RECIPES[name]().get("expect")


# -- In processes of their own


def said_by_verify(name, num_parts):
    """What verify says, in a line; "" where all of its runs are the same."""
    warnings.simplefilter("ignore")
    refused = []

    def make():
        try:
            return task_of(name)
        except ValueError as error:
            refused.append(error)
            raise

    try:
        found = verify(make, micro_batches=num_parts).tasks[name]
    except ValueError as error:
        if error not in refused:  # but of verify itself
            raise
        return _first_line(error)
    return found.error or "; ".join(dict.fromkeys(each.text for each in found.differences.values() if each))


def plainly(name, num_parts):
    """Train in plain PyTorch; num_parts: micro-batches of a step, None: as the program says."""
    warnings.simplefilter("ignore")
    model, loss_fn, loader, options = made(name)
    options = {key: value for key, value in options.items() if key not in OF_THE_ENGINE}
    options |= {"accumulation_steps": num_parts} if num_parts else {}
    _seed(SEED)
    try:
        found = reference.train(model, loss_fn, loader, seed=SEED, lr=LR, epochs=_epochs(loader), **options)
    except Exception as error:
        return Trained("error", _first_line(error))
    return _trained(model, found)


def by_engine(name, way, num_parts):
    """Train by the engine in one of the ways."""
    warnings.simplefilter("ignore")
    model, loss_fn, loader, options = made(name)
    options |= {"accumulation_steps": num_parts} if num_parts else {}
    orchestra = None
    _seed(SEED)
    try:
        task = ModelTask(model, loss_fn, loader, LR, _epochs(loader), seed=SEED, name=name, **options)
        task.partitioner = OneShard() if way == WHOLE else EachLayer()
        if way == ALTERNATING:
            task.callbacks += (DevicesChange(lambda: orchestra, MEMORY),)
        devices = [EmulatedDevice(MEMORY) for _ in range(1 if way == WHOLE else 2)]
        orchestra = ModelOrchestrator([task], devices=devices)
        orchestra.verbose = 0
        with spread(2, in_sums=False) if way == SPREAD else nullcontext():
            report = orchestra.train_models()
        report.raise_failures()
    except Exception as error:
        return Trained("refused" if _is_ours(error) else "error", _first_line(error))
    return _trained(model, report.tasks[name], " ".join(map(str, report.messages)))


def _seed(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _epochs(loader):
    return math.ceil(STEPS / len(loader))


def _trained(model, found, text=""):
    state = {name: digest(tensor) for name, tensor in zoo.state(model).items()}
    return Trained("trained", text, (*map(float, found.losses), *map(float, found.validation_losses)), state)


def _is_ours(error):
    """Whether the engine itself raised it: its errors say what to do instead."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename.startswith(OURS) and "raise " in (last.line or "")


def _first_line(error):
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


# -- One case, and all


class Row(NamedTuple):
    name: str
    kind: str  # one of CLASSES
    ways: dict  # what became of each
    text: str  # of the error, of verify, or of the report's messages


def row_of(name):
    """Try a program in every way; a way is "=", "refused", "error", or where it differs first."""
    num_parts = None if "accumulation_steps" in made(name)[3] else 2
    plain = _apart(plainly, name, None)
    plain_in_parts = _apart(plainly, name, num_parts) if num_parts else plain
    ways, texts = {}, []
    for way in WAYS:
        if way != ALTERNATING or ways[CUT] != "refused":  # planned alike
            found = _apart(by_engine, name, way, num_parts if way == SPREAD else None)
        ways[way] = _against(plain_in_parts if way == SPREAD else plain, found)
        texts.append(found.text)
    said = _apart(said_by_verify, name, None)
    if not said and num_parts and ways[SPREAD].startswith("differs"):
        said = _apart(said_by_verify, name, num_parts)
    kind = kind_of(ways.values(), said)
    text = said if kind == "named" else next(filter(None, texts), "")
    return Row(name, kind, ways, " ".join(text.split()))


def kind_of(ways, said):
    """One of CLASSES, by what became of each way and what verify says; "hung" or "crashed" if anything did."""
    lost = [kind for kind in ("hung", "crashed") if kind in ways or (isinstance(said, Trained) and said.kind == kind)]
    raised = [kind for kind in ("refused", "error") if kind in ways]
    differs = any(way.startswith("differs") for way in ways)
    if lost:
        return lost[0]
    if raised and not differs:
        return raised[0]
    return "named" if said else "unseen" if differs else "exact"


def _apart(function, *args):
    """Call a function in a fork, where what it changes is gone afterwards; whatever becomes of it, this goes on."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            with open(writer, "wb") as file:
                pickle.dump(function(*args), file)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        is_late = not select.select([file], [], [], HANG_S)[0]
        if is_late:
            os.kill(child, signal.SIGKILL)
        found = file.read()
    os.waitpid(child, 0)
    return pickle.loads(found) if found else Trained("hung" if is_late else "crashed")


def _against(plain, found):
    if found.kind != "trained":
        return found.kind
    if plain.kind != "trained":
        return "differs: plain PyTorch fails"
    pairs = zip_longest(plain.losses, found.losses)
    step = next((k for k, (a, b) in enumerate(pairs, 1) if a != b and not (a != a and b != b)), None)
    return f"differs at {step}" if step else "=" if plain.state == found.state else "differs at the end"


def table(rows):
    """Totals of each class, by how likely people write such a program."""
    found = Counter((row.kind, CASES[row.name].likely) for row in rows)
    kinds = [*CLASSES, *{row.kind: 0 for row in rows if row.kind not in CLASSES}]
    lines = [f"{'':9}" + "".join(f"{likely:>8}" for likely in (*LIKELY, "all"))]
    for kind in (*kinds, "all"):
        counts = [sum(found[each, likely] for each in (kinds if kind == "all" else [kind])) for likely in LIKELY]
        lines.append(f"{kind:9}" + "".join(f"{num:8}" for num in (*counts, sum(counts))))
    return "\n".join(lines)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tests.verified", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="programs at a time")
    args = parser.parse_args(argv)
    names = [name if name in CASES else f"R:{name}" for name in args.names] or list(CASES)
    began_s, rows = time.perf_counter(), []
    torch.set_num_threads(1)
    by_engine("T:exact_plain", CUT, None)  # what is imported and made at its first use is then in all forks
    gc.freeze()
    with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
        for row in pool.imap(row_of, names):
            rows.append(row)
            ways = " ".join(f"{way} {became}" for way, became in row.ways.items())
            print(f"{row.name} | {CASES[row.name].likely} | {row.kind} | {ways} | {row.text[:160]}", flush=True)
    for was, text in {"refused": "refused or doubted", "exact": "trained exactly"}.items():
        chosen = [row for row in rows if CASES[row.name].was == was]
        print(f"\n{len(chosen)} that an older engine {text}\n{table(chosen)}")
    unseen = [row for row in rows if row.kind == "unseen"]
    print(f"\n{len(unseen)} unseen")
    for row in unseen:
        case = CASES[row.name]
        told = "; its report says so" if row.text else ""
        print(f"  {row.name} ({case.likely}, rule {case.rule}): {case.family}{told}")
    print(f"\n{len(rows)} programs, {time.perf_counter() - began_s:.0f} s")
    bad = [
        row for row in rows if row.kind in ("hung", "crashed") or (row.kind == "unseen" and CASES[row.name].rule == "-")
    ]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
