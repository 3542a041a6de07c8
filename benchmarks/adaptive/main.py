"""What adaptive batches predict, cost and bring. All on the CPU; see README.md.

python benchmarks/adaptive/main.py                  # all three
python benchmarks/adaptive/main.py predict          # seconds of steps that were not measured before
python benchmarks/adaptive/main.py cost             # of the gradients' norms
python benchmarks/adaptive/main.py loss --seeds 3   # time to a validation loss, beside fixed batches
"""

import argparse
import math
import sys
import time
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask, StepChoice, StopTask
from hydra_engine.adaptive import AdaptiveDataLoader, StepTimes

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]
from figures import Figures, add_arguments  # noqa: E402
from gpt import gpt, token_batches  # noqa: E402

FIGURES = Figures("adaptive")
PREDICTED_WITHIN = 0.10
MOST_COST = 0.15
WARM_UP = 3  # steps of a configuration that are not counted: the first are metered

# -- predictions


class Workload(NamedTuple):
    """A model, samples, a device, and splits of its batches as (batch, micro-batches)."""

    layers: object
    loss_fn: object
    samples: TensorDataset
    device: dict
    measured: tuple
    predicted: tuple


def mlp(width=512, depth=6):
    torch.manual_seed(0)
    layers = [nn.Linear(64, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def vectors(number=16384):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(number, 64, generator=generator)
    return TensorDataset(inputs, inputs[:, :10].argmax(1))


def texts(number=4096, length=64):
    [(tokens, following)] = token_batches(1, number, length)
    return TensorDataset(tokens, following.view(number, length))


def text_loss(logits, target):
    return F.cross_entropy(logits, target.flatten())


SMALL_GPT = partial(gpt, 128, 4, 4, 64)
WORKLOADS = {
    "MLP, 32 MiB/s": Workload(
        mlp, F.cross_entropy, vectors(), {"memory": "6MiB", "bandwidth": "32MiB"},
        ((32, 2), (64, 2), (128, 4)), ((96, 3), (128, 2), (256, 4), (256, 8)),
    ),
    "GPT, 32 MiB/s": Workload(
        SMALL_GPT, text_loss, texts(), {"memory": "10MiB", "bandwidth": "32MiB"},
        ((8, 2), (16, 2), (16, 4)), ((24, 3), (32, 4), (32, 8), (48, 6)),
    ),
    "GPT, 96 MiB/s": Workload(
        SMALL_GPT, text_loss, texts(), {"memory": "10MiB", "bandwidth": "96MiB"},
        ((8, 2), (16, 2), (16, 4)), ((24, 3), (32, 4), (32, 8), (48, 6)),
    ),
    "GPT, no link": Workload(
        SMALL_GPT, text_loss, texts(), {"memory": "64MiB"},
        ((8, 2), (16, 2), (16, 4)), ((24, 3), (32, 4), (32, 8), (48, 6)),
    ),
}  # fmt: skip


def record(splits, steps):
    """Choices of `steps` steps of each split, one after the other: a run that replays them is timed."""
    each = [split for split in splits for _ in range(steps)]
    return [StepChoice(step=k, batch_size=batch, micro_batches=number) for k, (batch, number) in enumerate(each)]


def timed(workload, splits, steps):
    """Seconds of steps by split: (batch, micro-batches) -> medians of whole steps and of lanes."""
    choices = record(splits, steps)
    loader = AdaptiveDataLoader(workload.samples, choices[0].batch_size)
    loader.autoscale_batch_size(max(batch for batch, _ in splits), replay=choices)
    task = ModelTask(
        workload.layers(),
        workload.loss_fn,
        loader,
        lr=1e-4,
        epochs=10**6,
        name="task",
        callbacks=[Stamps(len(choices))],
    )
    orchestra = ModelOrchestrator([task], devices=[EmulatedDevice(**workload.device)])
    orchestra.verbose = 0
    found = orchestra.train_models().tasks["task"].adaptive
    times = {}
    for split, group in groupby(found, key=lambda choice: (choice.batch_size, choice.micro_batches)):
        lanes = [choice.seconds for choice in group][WARM_UP:]
        times[split] = type(lanes[0])(*(median(column) for column in zip(*lanes, strict=True)))
    return times


def predict(args):
    """Predict steps of other splits from three that were measured, and measure them as well."""
    worst = {}
    print(f"{'workload':16} {'batch':>6} {'in':>3} {'measured':>10} {'predicted':>10} {'off by':>7}")
    for name, workload in WORKLOADS.items():
        times = StepTimes()
        splits = (*workload.measured, *workload.predicted)
        rounds = [timed(workload, splits, args.steps) for _ in range(args.rounds)]
        means = {
            split: type(rounds[0][split])(*map(median, zip(*(r[split] for r in rounds), strict=True)))
            for split in splits
        }
        for batch, number in workload.measured:
            times.add(1, -(-batch // number), number, means[batch, number])
        model = times.fitted()
        for batch, number in workload.predicted:
            step_s = means[batch, number].step_s
            predicted_s = model.seconds(devices=1, micro_batch=-(-batch // number), accumulation_steps=number - 1)
            off = predicted_s / step_s - 1
            worst[name] = max(worst.get(name, 0.0), abs(off))
            print(f"{name:16} {batch:6} {number:3} {step_s * 1e3:7.1f} ms {predicted_s * 1e3:7.1f} ms {off:+7.1%}")
    for name, off in worst.items():
        print(f"{name}: off by at most {off:.1%}, limit {PREDICTED_WITHIN:.0%}")
    worst_off = max(worst.values())
    FIGURES.add("steps not measured before: off by, worst", worst_off, better="less", limit=PREDICTED_WITHIN)
    return all(off <= PREDICTED_WITHIN for off in worst.values())


# -- costs


def cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10)),
    )


COSTS = {
    "GPT, spilled": (SMALL_GPT, text_loss, texts, (16, 4), {"memory": "10MiB", "bandwidth": "256MiB"}),
    "GPT, resident": (SMALL_GPT, text_loss, texts, (16, 4), {"memory": "64MiB"}),
    "CNN, spilled": (cnn, F.cross_entropy, vectors, (64, 4), {"memory": "5MiB", "bandwidth": "256MiB"}),
    "CNN, resident": (cnn, F.cross_entropy, vectors, (64, 4), {"memory": "64MiB"}),
}


class Stamps(Callback):
    """Ends a task after so many steps, and notes when each was committed."""

    def __init__(self, steps):
        self.steps = steps
        self.at_s = []

    def on_step(self, report):
        self.at_s.append(time.perf_counter())
        if report.steps == self.steps:
            raise StopTask


def step_s(layers, loss_fn, samples, split, device, *, measures, steps):
    """Median seconds of a step with, or without, norms; all else is the same."""
    batch, number = split
    loader = AdaptiveDataLoader(samples, batch)
    options = {"accumulation_steps": number}
    if measures:
        loader.autoscale_batch_size(batch)
        options = {"replay": record([split], steps)}
    stamps = Stamps(steps)
    task = ModelTask(layers(), loss_fn, loader, lr=1e-4, epochs=10**6, name="task", callbacks=[stamps], **options)
    orchestra = ModelOrchestrator([task], devices=[EmulatedDevice(**device)])
    orchestra.verbose = 0
    orchestra.train_models()
    return median(after - before for before, after in pairwise(stamps.at_s[WARM_UP:]))


def cost(args):
    """Time steps with and without norms in turn, and without beside without: that is the noise."""
    worst = 0.0
    print(f"{'workload':14} {'plain':>9} {'with norms':>10} {'cost':>7}   plain beside plain")
    for name, (layers, loss_fn, samples, split, device) in COSTS.items():
        data = samples()
        run = partial(step_s, layers, loss_fn, data, split, device, steps=args.steps * 4)
        rows = [(run(measures=False), run(measures=True), run(measures=False)) for _ in range(args.rounds)]
        ratios, noise = [norms / plain - 1 for plain, norms, _ in rows], [again / plain - 1 for plain, _, again in rows]
        plain_s, norms_s = (median(column) for column in list(zip(*rows, strict=True))[:2])
        spread = f"{min(noise):+.0%} to {max(noise):+.0%}"
        print(f"{name:14} {plain_s * 1e3:6.1f} ms {norms_s * 1e3:7.1f} ms {median(ratios):+7.1%}   {spread}")
        worst = max(worst, median(ratios))
    print(f"norms cost at most {worst:.1%} of a step, limit {MOST_COST:.0%}")
    FIGURES.add("norms: share of a step, worst", worst, better="less", limit=MOST_COST)
    return worst <= MOST_COST


# -- time to a loss


def loss(args):
    """Train to a validation loss with fixed batches and with batches that adapt, in turn."""
    import adaptive_digits
    import adaptive_text

    workloads = {
        "digits": adaptive_digits.workload(),
        "digits, no link": adaptive_digits.workload()._replace(bandwidth=None, memory="64MiB"),
        "text": adaptive_text.workload(),
    }
    print(f"{'workload':16} {'':8} {'seconds':>8} {'steps':>6}   by seed")
    for name, workload in workloads.items():
        races = {False: [], True: []}
        for seed in range(args.seeds):
            for adapts in (False, True):
                races[adapts].append(adaptive_digits.race(workload, adapts=adapts, seed=seed))
        for adapts, found in races.items():
            seconds = [each.seconds or math.inf for each in found]
            by_seed = " ".join(f"{each:.1f}" for each in seconds)
            steps = int(median(each.num_steps for each in found))
            print(f"{name:16} {'adaptive' if adapts else 'fixed':8} {median(seconds):6.1f} s {steps:6}   {by_seed}")
        # A seed that never gets there counts as infinitely slow, whichever way it was trained.
        times = [[each.seconds or math.inf for each in found] for found in races.values()]
        ratios = [0.0 if ours == math.inf else fixed / ours for fixed, ours in zip(*times, strict=True)]
        sizes = [choice.batch_size for each in races[True] for choice in each.choices]
        FIGURES.add(f"{name}: fixed / adaptive", ratios, better="more")
        print(f"{name:16} fixed / adaptive {median(ratios):.2f}; batches from {min(sizes)} to {max(sizes)}")
    return True


EXPERIMENTS = {"predict": predict, "cost": cost, "loss": loss}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", metavar="experiment", help=f"of {', '.join(EXPERIMENTS)}")
    parser.add_argument("--rounds", type=int, default=3, help="of predict and cost")
    parser.add_argument("--steps", type=int, default=12, help="of each split")
    parser.add_argument("--seeds", type=int, default=3, help="of loss")
    parser.add_argument("--no-judge", action="store_true", help="exit with 0 whatever the figures are")
    add_arguments(parser)
    args = parser.parse_args()
    unknown = [name for name in args.experiments if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"experiments: {unknown[0]!r}, known: {', '.join(EXPERIMENTS)}")
    torch.set_num_threads(1)
    are_met = [EXPERIMENTS[name](args) for name in args.experiments or EXPERIMENTS]
    FIGURES.save(args.json)
    sys.exit(0 if all(are_met) or args.no_judge else 1)


if __name__ == "__main__":
    main()
