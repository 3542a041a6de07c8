"""What each technique brings: spilling alone, then one more after the other, and all without each. See README.md.

python benchmarks/ablation/main.py                  # runs on an emulated device, and simulations of one H200
python benchmarks/ablation/main.py stated           # simulated with stated rates only
python benchmarks/ablation/main.py --write          # also put the tables into README.md
"""

import argparse
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from hydra_engine import simulate

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "simulator")]
import bound  # noqa: E402
import kinds  # noqa: E402
from figures import Figures, add_arguments, put, table  # noqa: E402

SHARP, DOUBLE, OVERLAP, RESIDENCY, EARLY = TECHNIQUES = (
    "SHARP",
    "double buffering",
    "overlapped optimizer",
    "residency",
    "early release",
)
# Early release is for a task that is alone (benchmarks/simulator): it is tried on top of all others.
ALL = frozenset(TECHNIQUES) - {EARLY}
FIGURES = Figures("ablation")


def stages():
    """(title, techniques): spilling alone, and one more after the other."""
    used = frozenset()
    yield "spilling alone", used
    for name in TECHNIQUES:
        used |= {name}
        yield f"+ {name}", used


def without():
    """(title, techniques): all of them without each."""
    for name in TECHNIQUES:
        if name in ALL:
            yield f"without {name}", ALL - {name}


def changes(seconds):
    """By stage: its share of the makespan of spilling alone that it saves, and how often shorter it is by then."""
    first = before = None
    for title, taken in seconds:
        first, before = first or taken, before or taken
        yield title, taken, (before - taken) / first, first / taken
        before = taken


def show(name, title, head, rows, *, writes):
    text = table(head, rows)
    print(f"\n{title}\n{text}", flush=True)
    if writes:
        put(HERE / "README.md", name, text)


# -- runs

# Room for two slabs and a micro-batch, and for no graph; and for all that may stay.
LITTLE, MUCH = "20MiB", "1GiB"
LINK_BYTES_PER_S = 40_000_000
KIND = kinds.Kind(192, (2, 4, 6), 6, 3)
NUM_TASKS = 3


def run_s(used, num_steps):
    """Seconds of a run with these techniques, planning aside, and the bytes that went up."""
    options = {"optimizer_scope": "shard" if OVERLAP in used else "task", "early_release": EARLY in used}
    tasks = [KIND.task(str(k), num_steps, **options) for k in range(NUM_TASKS)]
    seconds, loaded_bytes = 0.0, 0
    for group in [tasks] if SHARP in used else [[task] for task in tasks]:
        memory = MUCH if RESIDENCY in used else LITTLE
        how = {"memory": memory, "double_buffer": DOUBLE in used}
        report, _ = kinds.trained(group, 1, LINK_BYTES_PER_S, **how)
        seconds += report.makespan_s
        loaded_bytes += report.devices[0].loaded_bytes
    return seconds, loaded_bytes


def emulated(arguments):
    """One emulated device behind a slow link, in turns."""
    cases = dict([*stages(), *without()])
    seconds, loaded = defaultdict(list), {}
    kinds.trained([KIND.task("warm", 2)], 1, None)
    for _ in range(arguments.repeats):
        for title, used in cases.items():
            taken, loaded[title] = run_s(used, arguments.steps)
            seconds[title].append(taken)
    medians = {title: median(found) for title, found in seconds.items()}
    titles = [title for title, _ in stages()]
    rows = [
        (title, f"{taken:.2f} s", f"{share:+.0%}", f"{shorter:.2f}", f"{loaded[title] / 1e6:.0f} MB")
        for title, taken, share, shorter in changes([(title, medians[title]) for title in titles])
    ]
    full = f"+ {RESIDENCY}"
    for title, _ in without():
        longer = medians[title] / medians[full]
        rows.append(
            (f"all {title}", f"{medians[title]:.2f} s", "", f"{longer:.2f} times all", f"{loaded[title] / 1e6:.0f} MB")
        )
    ratios = [first / last for first, last in zip(seconds[titles[0]], seconds[full], strict=True)]
    FIGURES.add(f"{NUM_TASKS} models, emulated: times shorter than spilling alone", ratios, better="more")
    FIGURES.add(f"{NUM_TASKS} models, emulated: MB loaded with residency", loaded[full] / 1e6, better="less")
    head = ("", "makespan", "saves, of the first row", "times shorter", "loaded")
    title = f"{NUM_TASKS} GPTs, one emulated device, {arguments.steps} steps each"
    show("emulated", title, head, rows, writes=arguments.write)


# -- simulations

STATED = bound.Stage(update_bytes=bound.LEAST_UPDATE_BYTES, default_cut=True, one_update=True, unit_s=450e-6)
CELLS = ((4, 4096), (4, 8192), (4, 16384), (1, 8192))  # models, tokens per step


def stated_s(task, run, num_models, used):
    """Seconds of a simulated run with these techniques, of so many such tasks."""
    if OVERLAP not in used:  # all shards' updates are part of the commit
        whole_s = task.commit_s + sum(task.of_shard("update_s", j) for j in range(task.num_shards))
        task = replace(task, commit_s=whole_s, update_s=0.0)
    task = replace(task, early_release=EARLY in used, num_steps=bound.NUM_STEPS)
    device = run.device if RESIDENCY in used else replace(run.device, memory_bytes=None)
    groups = [range(num_models)] if SHARP in used else [[k] for k in range(num_models)]
    return sum(
        simulate(
            [replace(task, name=str(k)) for k in group], [device], host=run.host, double_buffer=DOUBLE in used
        ).makespan_s
        for group in groups
    )


def stated(arguments):
    """One H200 behind PCIe 5, as `benchmarks/simulator/main.py bound` states it; the same cut in all rows."""
    costs, columns = bound.layer_costs(), {}
    for num_models, tokens in CELLS:
        cell = bound.Cell(
            num_models=num_models,
            tokens=tokens,
            dram_bytes_per_s=200e9,
            link_bytes_per_s=50e9,
            transfers=True,
        )
        choice = cell.choice(costs, STATED)
        task = replace(choice.cost(choice.fastest().boundaries), num_micro_batches=1)
        cases = {title: stated_s(task, choice.run, num_models, used) for title, used in (*stages(), *without())}
        titles = [title for title, _ in stages()]
        shown = {
            title: f"{taken:.1f} s, {share:+.0%}, {shorter:.2f}"
            for title, taken, share, shorter in changes([(title, cases[title]) for title in titles])
        }
        full = cases[f"+ {RESIDENCY}"]
        shown |= {
            f"all {title}": f"{cases[title]:.1f} s, {cases[title] / full:.2f} times all" for title, _ in without()
        }
        model = "1 model" if num_models == 1 else f"{num_models} models"
        columns[f"{model}, {tokens:,} tokens, {task.num_shards} shards"] = shown
        if tokens == 8192:
            ratio = cases[titles[0]] / full
            name = f"{model}, one H200 stated: times shorter than spilling alone"
            FIGURES.add(name, ratio, better="more")
            for title, _ in without():
                name = f"{model}, one H200 stated: times longer {title}"
                FIGURES.add(name, cases[title] / full, better="more")
    rows = [(title, *(column[title] for column in columns.values())) for title in next(iter(columns.values()))]
    title = f"simulated with stated rates, {bound.NUM_STEPS} steps: makespan, saves of the first row, times shorter"
    show("stated", title, ("", *columns), rows, writes=arguments.write)


EXPERIMENTS = {"emulated": emulated, "stated": stated}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", help=f"of {', '.join(EXPERIMENTS)}; default: all")
    parser.add_argument("--repeats", type=int, default=3, help="of runs, in turns (default 3)")
    parser.add_argument("--steps", type=int, default=6, help="of a run's tasks (default 6)")
    add_arguments(parser, writes=True)
    given = parser.parse_args(arguments)
    unknown = [name for name in given.experiments if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"experiments: {unknown[0]!r}, known: {', '.join(EXPERIMENTS)}")
    torch.set_num_threads(1)
    for name in given.experiments or EXPERIMENTS:
        EXPERIMENTS[name](given)
    FIGURES.save(given.json)


if __name__ == "__main__":
    main()
