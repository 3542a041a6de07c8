"""Model selection as Hydra's authors ran it, beside what people would use instead. See README.md.

python benchmarks/selection/main.py                                   # tiny, on emulated devices: every part
python benchmarks/selection/main.py selection vision                  # 12 models of one size; of six sizes
python benchmarks/selection/main.py three                             # three equal models on two devices
python benchmarks/selection/main.py processes                         # against a plain process for each device
python benchmarks/selection/main.py peers                             # against pipelines and FSDP2
python benchmarks/selection/main.py selection --scale h200            # one GPU under a cap of 16 GiB
python benchmarks/selection/main.py selection vision peers --scale paper    # 8 GPUs
"""

import argparse
import os
import platform
import sys
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import grid
from figures import Figures, add_arguments, put, table
from sides import SIDES, Refused, Setting, run

from hydra_engine import TaskCost, simulate
from hydra_engine.schedule.units import FUSED, training_chain

README = Path(__file__).resolve().parent / "README.md"
EXACT = ("b", "c", "f")  # have the bits of plain PyTorch in float32, as the engine has
QUARTER = 0.25 * 2  # of the largest model's weights and as many bytes of gradients; activations have to fit as well
WHOLE = 8.0  # its weights, its gradients, what autograd saves of a micro-batch, and the weights of the next one
NUM_EQUAL, LONG_BATCH = 4, 32  # so many samples that copies and updates take few of the seconds


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What the makespan of one side may be, or has to be, as a multiple of another's."""

    title: str
    over: str  # a side, "bound" or "bound of b"
    under: str
    least: float | None = None  # the median of the multiples is at least so much
    most: float | None = None

    def values(self, found):
        return [over / under for over, under in zip(found[self.over], found[self.under], strict=True)]

    @property
    def text(self):
        if self.least is None and self.most is None:
            return "not judged"
        return f"at most {self.most}" if self.least is None else f"at least {self.least}"

    @property
    def better(self):
        return "less" if self.over == "ours" else "more"

    def holds(self, values):
        middle = median(values)
        return (self.least is None or middle >= self.least) and (self.most is None or middle <= self.most)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Jobs on devices of some memory, and the sides that train them."""

    title: str
    make_jobs: object  # of a scale
    sides: tuple[str, ...]
    share: float = QUARTER
    limits: tuple[Limit, ...] = ()
    has_bound: bool = False
    repetitions: int = 1  # of each side, by default
    times_steps: int = 1  # of emulated devices: the first step of a model touches memory that nobody has used before

    def jobs(self, scale):
        """Models, data and settings at a scale."""
        if scale.is_emulated:
            scale = replace(scale, num_steps=self.times_steps * scale.num_steps)
        return self.make_jobs(scale)


def longer(title, side, least=None):
    return Limit(title=title, over=side, under="ours", least=least)


def beside_processes(title, most=None):
    return Limit(title=title, over="ours", under="f", most=most)


SHORTER = (
    longer("shorter than (c), times", "c", 1.6),
    longer("shorter than (b), times", "b", 1.0),
    Limit(title="over the simulator's bound, times", over="ours", under="bound", most=1.10),
    Limit(title="over the bound with the units of (b), times", over="ours", under="bound of b"),
)
GRID = ("a", "ours", "b", "c")
PARTS = {
    "selection": Part(
        title="12 models of one size",
        make_jobs=lambda s: s.selection(),
        sides=GRID,
        limits=SHORTER,
        has_bound=True,
        repetitions=2,
        times_steps=4,
    ),
    "vision": Part(
        title="12 vision transformers of six sizes",
        make_jobs=lambda s: s.vision(),
        sides=GRID,
        limits=tuple(Limit(title=each.title, over=each.over, under=each.under) for each in SHORTER),
        has_bound=True,
        times_steps=4,
    ),
    "three": Part(
        title="three equal models",
        make_jobs=lambda s: s.equal(3, LONG_BATCH),
        sides=("a", "ours", "b"),
        limits=(longer("shorter than (b), times", "b", 1.2),),
        repetitions=2,
    ),
    "processes": Part(
        title=f"{NUM_EQUAL} equal models, devices that hold one each",
        make_jobs=lambda s: s.equal(NUM_EQUAL, LONG_BATCH),
        sides=("a", "ours", "f"),
        share=WHOLE,
        limits=(beside_processes("over the slower process of (f), times", 1.05),),
        repetitions=2,
    ),
    "quarter": Part(
        title=f"{NUM_EQUAL} equal models, devices that hold a quarter of one",
        make_jobs=lambda s: s.equal(NUM_EQUAL, LONG_BATCH),
        sides=("a", "ours", "f"),
        limits=(beside_processes("over the slower process of (f), times"),),
    ),
    "peers": Part(
        title="the same 12 models, beside pipelines and FSDP2",
        make_jobs=lambda s: s.selection(),
        sides=("a", "ours", "gpipe", "1f1b", "e"),
        limits=tuple(longer(f"shorter than {name}, times", name) for name in ("gpipe", "1f1b", "e")),
    ),
}


@dataclass(kw_only=True)
class Found:
    """The outcomes of a part: by side, one for each repetition; and why a side has none."""

    outcomes: dict = field(default_factory=lambda: defaultdict(list))
    refusals: dict = field(default_factory=dict)

    def seconds(self):
        """Seconds by side and repetition: of a side with several processes, those of the slowest."""
        return {name: [each.makespan_s for each in outcomes] for name, outcomes in self.outcomes.items()}

    def differing(self):
        """Sides and jobs whose losses have other bits than plain PyTorch's."""
        [plain, *_] = self.outcomes["a"]
        return [
            (name, job)
            for name in ("ours", *EXACT)
            for outcome in self.outcomes[name]
            for job, losses in plain.losses.items()
            if outcome.losses[job] != losses
        ]

    def difference(self, name):
        """The largest difference of a final loss from plain PyTorch's, as a share of it."""
        [plain, *_] = self.outcomes["a"]
        final = {job: losses[-1] for job, losses in plain.losses.items()}
        others = [(job, losses[-1]) for each in self.outcomes[name] for job, losses in each.losses.items()]
        return max(abs(loss - final[job]) / abs(final[job]) for job, loss in others)


def measure(part, scale, repetitions, say):
    """Train by each side in turn, in the other order every second time."""
    jobs, found = part.jobs(scale), Found()
    setting = Setting(scale=scale, jobs=jobs, memory=scale.memory(jobs, part.share))
    for repetition in range(repetitions):
        for name in part.sides if repetition % 2 == 0 else reversed(part.sides):
            if name in found.refusals:
                continue
            try:
                outcome = run(name, setting)
            except Refused as refusal:
                found.refusals[name] = str(refusal)
                say(f"  {SIDES[name].title}: {refusal}")
                continue
            found.outcomes[name].append(outcome)
            say(f"  {SIDES[name].title}: {outcome.makespan_s:.2f} s, of processors {outcome.processor_s:.2f} s")
    return found


def cost_of(job, seconds):
    """What a job takes in the simulator, by the means of its units where it trained alone."""
    num_shards = 1 + next(shard for kind, shard in seconds if kind == FUSED)
    return TaskCost(
        name=job.name,
        unit_s=[seconds[unit] for unit in training_chain(num_shards, 0)],
        num_steps=job.num_steps,
        update_s=[seconds["update", shard] for shard in range(num_shards)],
        commit_s=seconds["commit"],
        num_micro_batches=job.num_micro_batches,
    )


def bounds(jobs, outcomes, num_devices):
    """The simulator's bound for each repetition of a side, with the units that it had."""
    return [simulate([cost_of(job, each.costs[job.name]) for job in jobs], num_devices).bound_s for each in outcomes]


def spread(values, pattern="{:.3f}"):
    """Median and range."""
    low, middle, high = (pattern.format(each) for each in (min(values), median(values), max(values)))
    return middle if low == high else f"**{middle}** ({low} to {high})"


def mib(outcomes, name):
    """Bytes that crossed the links, in MiB."""
    found = outcomes[0].crossed_bytes(name)
    return "-" if found is None else f"{found / 2**20:.0f}"


def losses_text(found, name):
    if name == "a":
        return "bits compared with"
    if name in ("ours", *EXACT) and not any(side == name for side, _ in found.differing()):
        return "equal, bit for bit"
    return f"within {found.difference(name):.1e}"


def tables(part, scale, found):
    """The part's tables in Markdown, and whether its limits hold."""
    rows, judged, good = [], [], True
    titled = part.title if scale.is_emulated else f"{scale.name}, {part.title}"
    for name in part.sides:
        if name in found.refusals:
            rows.append([SIDES[name].title, found.refusals[name], *["-"] * 4])
            continue
        outcomes = found.outcomes[name]
        makespans = spread([each.makespan_s for each in outcomes], "{:.2f}")
        busy = f"{median([each.busy_share for each in outcomes]):.0%}"
        crossed = [mib(outcomes, f"{way}_bytes") for way in ("loaded", "stored")]
        rows.append([SIDES[name].title, f"{makespans} s", busy, *crossed, losses_text(found, name)])
    seconds = found.seconds()
    # In (c) nobody disturbs a unit, in (b) all devices compute, as in the engine's run.
    titles = {"c": ("bound", "the simulator's lower bound"), "b": ("bound of b", "the same with the units of (b)")}
    for name, (key, title) in titles.items():
        if part.has_bound and found.outcomes[name]:
            seconds[key] = bounds(part.jobs(scale), found.outcomes[name], scale.num_devices)
            rows.append([title, f"{spread(seconds[key], '{:.2f}')} s", *["-"] * 4])
    for limit in part.limits:
        if not seconds.get(limit.over) or not seconds.get(limit.under):
            continue
        values = limit.values(seconds)
        is_judged = scale.is_emulated and limit.text != "not judged"
        holds = not is_judged or limit.holds(values)
        good &= holds
        judged.append([limit.title, spread(values), limit.text if is_judged else "not judged", "" if holds else "NO"])
        worst = (limit.most if limit.least is None else limit.least) if is_judged else None
        FIGURES.add(f"{titled}: {limit.title}", values, better=limit.better, limit=worst)
    text = table(["", "makespan", "devices busy", "MiB loaded", "MiB stored", "final losses to (a)"], rows)
    if judged:
        text += "\n\n" + table(["the engine's makespan", "median (range)", "limit", ""], judged)
    if scale.is_emulated:  # elsewhere precision is narrow
        differing = found.differing()
        good &= not differing
        FIGURES.add(f"{titled}: losses of other bits", len(differing), better="less", limit=0)
        text += f"\n\nBits differ: {differing}" if differing else "\n\nAll losses that have to be: bitwise equal."
    return text, good


FIGURES = Figures("selection")


def about(part, scale, repetitions):
    """Who trained what on what."""
    jobs = part.jobs(scale)
    largest = max(job.param_bytes for job in jobs)
    memory = scale.memory(jobs, part.share)
    held = memory if isinstance(memory, str) else f"{memory / 2**20:.1f} MiB"
    where = platform.processor() or platform.machine()
    return (
        f"{len(jobs)} models of up to {largest / 2**20:.1f} MiB of weights, {jobs[0].num_steps} steps each; "
        f"{scale.num_devices} devices of {held}; {repetitions} repetitions in turn; {os.cpu_count()} cores ({where}), "
        f"Python {platform.python_version()}, torch {torch.__version__}."
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--scale", choices=sorted(grid.SCALES), default="tiny", help="default: tiny")
    parser.add_argument("--pairs", type=int, help="repetitions of each side (default: 2 of what is judged, else 1)")
    parser.add_argument("--no-judge", action="store_true", help="exit code 0 whatever comes out")
    add_arguments(parser, writes=True)
    given = parser.parse_args(arguments)
    unknown = [each for each in given.parts if each not in PARTS]
    if unknown or (given.pairs is not None and given.pairs < 1):
        parser.error(f"PART: {' '.join(unknown)}, known: {', '.join(PARTS)}; --pairs {given.pairs}, limit: at least 1")
    scale, good = grid.SCALES[given.scale], True
    for name in given.parts or PARTS:
        part = PARTS[name]
        repetitions = given.pairs or part.repetitions
        print(f"{name}: {part.title}", flush=True)
        found = measure(part, scale, repetitions, lambda line: print(line, flush=True))
        text, well = tables(part, scale, found) if found.outcomes["a"] else ("Nobody can train it here.", False)
        text = f"{about(part, scale, repetitions)}\n\n{text}"
        print(f"\n{text}\n\n{name}: {'within its limits' if well else 'NOT within its limits'}\n", flush=True)
        if given.write:
            put(README, f"{scale.name} {name}", text)
        good &= well
    FIGURES.save(given.json)
    return 0 if good or given.no_judge else 1


if __name__ == "__main__":
    sys.exit(main())
