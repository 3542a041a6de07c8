"""Say which figures moved beyond the spread that is stored, and keep the table of README.md. See README.md.

python benchmarks/regressions.py build/bench                     # of all files of figures in a folder; exit code 1
python benchmarks/regressions.py build/bench --only scaling      # of some benchmarks
python benchmarks/regressions.py build/bench --store             # they are what is expected from now on
python benchmarks/regressions.py --write                         # the table of README.md, from what is stored

`make bench` writes the files, and calls this last. A figure is worse or better where its median lies outside the range
that was measured before. The exit code is 1 if one is worse, beyond its limit, or missing. To store a spread of figures
that a run has once, put the files of several runs into the folder.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent))
import figures

HERE = Path(__file__).resolve().parent
EXPECTED = HERE / "expected.json"
# What a simulation computes may be rounded otherwise elsewhere, though it has no spread.
SAME = 1e-3

NOT_STORED = "not stored from a quiet machine yet"

# Of each benchmark: the question that it answers, the figures for the reader as (stored name, format), and the command.
ROWS = {
    "selection": (
        "Is training many models together faster than what people do today?",
        [
            ("12 models of one size: shorter than (c), times", "{:.2f} times shorter than one after another"),
            ("12 models of one size: shorter than (b), times", "{:.2f} than whole models on each, spilled"),
            ("three equal models: shorter than (b), times", "three: {:.2f} than that"),
            (
                "4 equal models, devices that hold one each: over the slower process of (f), times",
                "resident: {:.2f} times plain PyTorch's time, a process for each device",
            ),
        ],
        "selection/main.py",
    ),
    "scaling": (
        "How far does it scale, in devices, tasks and model size?",
        [
            ("64 tasks, 8 devices, simulated: share of the bound", "64 tasks on 8 devices: {:.1%} of the bound"),
            ("2,000 tasks, 1,000 devices, simulated: share of the bound", "2,000 on 1,000: {:.1%}"),
            ("one task of 6 micro-batches, 3 devices, simulated: times shorter", "one task on 3: {:.2f} times shorter"),
            ("4 tasks, measured: times shorter on 2 devices", "4 on two real cores: {:.2f} times shorter"),
        ],
        "scaling/main.py",
    ),
    "ablation": (
        "What does each technique bring?",
        [
            ("4 models, one H200 stated: times shorter than spilling alone", "all: {:.2f} times shorter than spilling"),
            ("4 models, one H200 stated: times longer without SHARP", "{:.2f} times longer without SHARP"),
            (
                "4 models, one H200 stated: times longer without overlapped optimizer",
                "{:.2f} without the overlapped optimizer",
            ),
        ],
        "ablation/main.py",
    ),
    "overhead": (
        "What does the engine cost beside the plain loop?",
        [
            ("one shard, 1024 tokens", "{:.2f} times the plain step in one shard"),
            ("four shards, 1024 tokens", "{:.2f} in four"),
            ("fixed cost per unit, us", "{:.0f} us per unit"),
        ],
        "overhead/main.py",
    ),
    "predictions": (
        "Are step times and memory predicted well?",
        [("step times, off by", "step times off by {:.1%}, median of budgets")],
        "predictions/main.py",
    ),
    "host_optimizer": (
        "How fast is the update on the host?",
        [("1 thread: times faster than plain", "{:.2f} times torch's fused AdamW in 16 bits, one thread")],
        "host_optimizer/main.py",
    ),
    "dram": (
        "What does an update cost that takes less DRAM?",
        [("split: times the whole weights' time", "{:.2f} times the whole weights' time with split ones")],
        "dram/main.py",
    ),
    "scheduler": (
        "How good are schedules, and what does a decision cost?",
        [
            ("makespan over the bound, worst of 12", "{:.3f} times the bound, worst of 12 settings"),
            ("makespan over the best there is, mean", "{:.3f} times the best there is, with swaps"),
            ("us per decision, 10,000 tasks", "{:.0f} us per decision"),
        ],
        "scheduler/main.py",
    ),
    "simulator": (
        "Are makespans predicted well, and how near is a GPU's bound?",
        [
            ("off by, worst workload", "off by {:.0%} at most"),
            ("share of the bound, 4 models, 8,192 tokens", "4 models: {:.0%} of the bound with stated rates"),
        ],
        "simulator/main.py",
    ),
    "imports": (
        "How long does a user wait before any work?",
        [("what a program takes, times import torch", "{:.2f} times `import torch`")],
        "imports/main.py",
    ),
    "sweep": ("Are sweeps exact, durable and quick beside others?", [], "sweep/main.py"),
    "elasticity": (
        "What is lost when devices come, go and fail?",
        [
            ("leave, pool: steps redone", "{:g} steps redone"),
            ("leave, pool: outage, s", "{:.3f} s without a commit when a device leaves"),
        ],
        "elasticity/main.py",
    ),
    "adaptive": (
        "What do adaptive batches predict, cost and bring?",
        [
            ("steps not measured before: off by, worst", "steps off by {:.0%} at most"),
            ("digits: fixed / adaptive", "digits {:.2f} times faster to a loss"),
        ],
        "adaptive/main.py",
    ),
    "durability": ("Does a killed run resume with its very bits?", [], "durability/main.py"),
    "gpu_day": ("What does a GPU say?", [], "gpu_day/main.py"),
}


def measured(folder):
    """Figures by "benchmark/name" of all files in a folder. Values of several files of one benchmark come together."""
    found = {}
    for path in sorted(Path(folder).glob("*.json")):
        each = json.loads(path.read_text())
        for name, figure in each["figures"].items():
            name = f"{each['benchmark']}/{name}"
            before = found[name]["values"] if name in found else []
            found[name] = figure | {"values": before + figure["values"], "commit": each["commit"]}
    return found


def verdict(expected, figure):
    """What became of a figure, in a word. expected: None: it is new. figure: None: it was not measured."""
    if figure is None:
        return "MISSING"
    middle, sign = median(figure["values"]), 1 if figure["better"] == "more" else -1
    if figure["limit"] is not None and sign * middle < sign * figure["limit"]:
        return "BEYOND ITS LIMIT"
    if expected is None:
        return "new"
    if expected["low"] - SAME * abs(expected["low"]) <= middle <= expected["high"] + SAME * abs(expected["high"]):
        return "as before"
    return "better" if sign * middle > sign * expected["median"] else "WORSE"


def without_file(names, found):
    """Print a line for each benchmark that wrote no figures; True if there is none."""
    missing = [name for name in names if not any(figure.startswith(f"{name}/") for figure in found)]
    for name in missing:
        print(f"{'MISSING':17} {name}: it wrote no figures")
    return not missing


def compare(expected, found):
    """Print a line for each figure; True if none is worse, beyond its limit, or missing."""
    good = True
    for name in [*expected, *(name for name in found if name not in expected)]:
        before, now = expected.get(name), found.get(name)
        word = verdict(before, now)
        good &= word in ("as before", "better", "new")
        shown = "" if now is None else f"{median(now['values']):.4g}"
        if before is not None:
            spread = f"{before['low']:.4g} to {before['high']:.4g}"
            shown += f", before {before['median']:.4g} ({spread}, {before['commit']})"
        if now is not None and now["limit"] is not None:
            shown += f", at {'least' if now['better'] == 'more' else 'most'} {now['limit']:g}"
        print(f"{word:17} {name}: {shown.removeprefix(', ')}")
    return good


def stored(figure):
    """What is kept of a figure."""
    values = figure["values"]
    return {
        "median": float(f"{median(values):.5g}"),
        "low": float(f"{min(values):.5g}"),
        "high": float(f"{max(values):.5g}"),
        "better": figure["better"],
        "limit": figure["limit"],
        "commit": figure["commit"],
    }


def rows(expected):
    """The table that a reader wants."""
    for name, (question, shown, command) in ROWS.items():
        found = [(expected[f"{name}/{key}"]["median"], form) for key, form in shown if f"{name}/{key}" in expected]
        today = "; ".join(form.format(value) for value, form in found)
        link = f"[{name}]({name}/README.md)" if (HERE / name / "README.md").exists() else name
        yield link, question, today or (NOT_STORED if shown else "in its README"), f"`python benchmarks/{command}`"


def write(expected):
    """Put the table into README.md."""
    head = ("benchmark", "question", "today", "command")
    figures.put(HERE / "README.md", "table", figures.table(head, rows(expected)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="with files that benchmarks wrote with --json")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="benchmarks; default: all with stored figures")
    parser.add_argument("--store", action="store_true", help="keep these as what is expected, and write the table")
    parser.add_argument("--write", action="store_true", help="write the table of README.md")
    arguments = parser.parse_args()
    expected = json.loads(EXPECTED.read_text())
    if arguments.folder is None:
        if not arguments.write:
            parser.error("folder: none; give one with files of figures, or --write")
        write(expected)
        return
    found = measured(arguments.folder)
    if arguments.store:
        expected = dict(sorted((expected | {name: stored(each) for name, each in found.items()}).items()))
        EXPECTED.write_text(json.dumps(expected, indent=1) + "\n")
        write(expected)
        return
    only = arguments.only
    chosen = [{k: v for k, v in each.items() if not only or k.partition("/")[0] in only} for each in (expected, found)]
    good = compare(*chosen)
    sys.exit(0 if without_file(only or [], found) and good else 1)


if __name__ == "__main__":
    main()
