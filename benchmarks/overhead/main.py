"""What the engine costs beside the plain loop, and what interleaving brings. All on the CPU; see README.md.

python benchmarks/overhead/main.py                  # every experiment
python benchmarks/overhead/main.py shards units     # some of them
python benchmarks/overhead/main.py --pairs 5        # fewer repetitions
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask
from partitioners import Presharded

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from clocked import Clocked
from gpt import gpt, token_batches

LR = 1e-3
# Room for two slabs and a unit, and for no forward's graph: all shards but the last are then computed twice.
LITTLE = "64MiB"


def plain_s(batches):
    """Seconds per step of the plain loop, from the second step on."""
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loss_fn = nn.CrossEntropyLoss()
    losses = []
    loader = Clocked(batches)
    for inputs, target in loader:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model(inputs), target)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return (loader.asked_s[-2] - loader.asked_s[1]) / (len(batches) - 2)


def streamed_s(batches, boundaries, memory="1GiB"):
    """The same through the engine: it asks for a batch when it begins the one before, so its steps are one later."""
    loader = Clocked(batches)
    engine_s([task(loader, boundaries)], memory=memory)
    return (loader.asked_s[-1] - loader.asked_s[2]) / (len(batches) - 2)


def task(batches, boundaries, seed=0):
    """The same training as a task."""
    return ModelTask(
        gpt(),
        nn.CrossEntropyLoss(),
        batches,
        LR,
        optimizer=torch.optim.AdamW,
        partitioner=Presharded(boundaries),
        seed=seed,
    )


def engine_s(tasks, num_devices=1, memory="1GiB"):
    """Seconds of train_models() from call to return, planning aside, and its report."""
    orchestra = ModelOrchestrator(tasks, devices=[EmulatedDevice(memory) for _ in range(num_devices)])
    orchestra.verbose = 0
    orchestra.generate()
    start_s = time.perf_counter()
    report = orchestra.train_models()
    seconds = time.perf_counter() - start_s
    report.raise_failures()
    return seconds, report


def spread(ratios):
    """Median and range of ratios."""
    return f"{median(ratios):.3f}  ({min(ratios):.3f} to {max(ratios):.3f})"


def shards(pairs):
    """Ratio to the plain loop, one task on one device, alternating."""
    for num_tokens, batch_size, length in ((1024, 8, 128), (64, 1, 64)):
        num_steps = 7 if num_tokens == 1024 else 42
        batches = token_batches(num_steps, batch_size, length)
        limits = (" at most 1.06", " at most 1.40") if num_tokens == 1024 else (" not judged", " not judged")
        rows = {
            "plain against plain": (lambda batches=batches: plain_s(batches), ""),
            "one shard": (lambda batches=batches: streamed_s(batches, [6]), limits[0]),
            "four shards": (lambda batches=batches: streamed_s(batches, [2, 3, 4, 6]), limits[1]),
            f"four, {LITTLE}": (lambda batches=batches: streamed_s(batches, [2, 3, 4, 6], LITTLE), limits[1]),
        }
        plain_s(batches)
        for name, (measure, limit) in rows.items():
            ratios = []
            for _ in range(pairs):
                before = plain_s(batches)
                ratios.append(measure() / before)
            print(f"{num_tokens:5} tokens per step  {name:20} {spread(ratios)} {limit}", flush=True)


class Nothing(nn.Module):
    """An empty layer."""

    def forward(self, x):
        return x


def units(pairs):
    """Seconds per unit where there is nothing to compute."""
    num_layers, num_steps = 10, 100
    batches = [(torch.zeros(4, 4), torch.zeros(4, 4))] * num_steps
    costs = []
    for _ in range(pairs):
        first = nn.Linear(4, 4)
        empty = ModelTask(
            [first, *(Nothing() for _ in range(num_layers - 1))],
            nn.MSELoss(),
            batches,
            partitioner=Presharded(list(range(1, num_layers + 1))),
            seed=0,
        )
        costs.append(engine_s([empty])[0] / (num_steps * (2 * num_layers - 1)))
    low, middle, high = (each * 1e6 for each in (min(costs), median(costs), max(costs)))
    print(f"fixed cost per unit  {middle:.0f} us  ({low:.0f} to {high:.0f})  at most 500", flush=True)


def together(pairs):
    """Four tasks on two devices against the same four one after the other, where each fits a device."""
    interleave("each fits", [6], "1GiB", "at least 1.6", max(1, pairs // 3))


def spilled(pairs):
    """The same, where none fits."""
    interleave("none fits", [1, 2, 3, 4, 5, 6], "48MiB", "not judged", max(1, pairs // 3))


def interleave(name, boundaries, memory, limit, pairs):
    """How much shorter four tasks together are, and how busy they keep two devices."""
    batches = token_batches(4, 8, 128)
    ratios, busy = [], []
    for _ in range(pairs):
        alone = sum(engine_s([task(batches, boundaries, seed)], 1, memory)[0] for seed in range(4))
        seconds, report = engine_s([task(batches, boundaries, seed) for seed in range(4)], 2, memory)
        ratios.append(alone / seconds)
        busy.append(sum(device.busy_s for device in report.devices) / 2 / report.makespan_s)
    shares = f"devices busy {median(busy):.0%}"
    print(f"4 tasks, 2 devices, {name}: {spread(ratios)} times shorter, {limit}; {shares}", flush=True)


EXPERIMENTS = {"shards": shards, "units": units, "together": together, "spilled": spilled}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", help=f"of {', '.join(EXPERIMENTS)}; default: all")
    parser.add_argument("--pairs", type=int, default=15, help="alternating repetitions (default 15)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.experiments or EXPERIMENTS:
        EXPERIMENTS[name](arguments.pairs)


if __name__ == "__main__":
    main()
