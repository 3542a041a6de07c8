"""How well step times are predicted, and what memory nobody meters. All on the CPU; see README.md.

python benchmarks/predictions/main.py                 # predict in one process, then measure in later ones, and reserve
python benchmarks/predictions/main.py predict FILE    # costs measured now, step times written to FILE
python benchmarks/predictions/main.py measure FILE    # one run per budget of FILE, seconds per step to standard output
python benchmarks/predictions/main.py reserve         # metered bytes beside the allocator's
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import nn

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.planning.planned import UNIT_S
from hydra_engine.planning.trial import update_bytes_per_s
from partitioners import Budget, Optimal, Presharded, format_bytes, predict_step, profile, shard_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from clocked import Clocked
from figures import Figures, add_arguments
from gpt import gpt, token_batches

from tests.architectures import ARCHITECTURES, layer_peaks

LR = 1e-3
BATCH_SIZE, LENGTH = 4, 128
LINK_BYTES_PER_S = 400_000_000  # emulated; slow enough to matter beside one CPU core
NUM_BUDGETS, NUM_RUNS, NUM_STEPS = 12, 5, 6


def model():
    return gpt(width=256, num_blocks=8, num_heads=8, length=LENGTH)


def task(batches, boundaries):
    options = {"optimizer": torch.optim.AdamW, "partitioner": Presharded(boundaries), "seed": 0}
    return ModelTask(model(), nn.CrossEntropyLoss(), batches, LR, **options)


def measured_costs():
    """Costs of the layers, their seconds the median of five profiles."""
    layers, (inputs, target) = model(), token_batches(1, BATCH_SIZE, LENGTH)[0]
    profiles = [profile(layers, inputs, target, nn.CrossEntropyLoss()) for _ in range(5)]
    return [
        replace(
            layer[0],
            forward_s=median(cost.forward_s for cost in layer),
            backward_s=median(cost.backward_s for cost in layer),
        )
        for layer in zip(*profiles, strict=True)
    ]


def predict(path):
    """Partitions and step times for budgets from one layer at a time to all resident."""
    costs = measured_costs()
    least = max(shard_bytes(costs, k, k + 1) for k in range(len(costs)))
    most = shard_bytes(costs, 0, len(costs))
    update = update_bytes_per_s(task([], [len(costs)]))
    rows = []
    for k in range(NUM_BUDGETS):
        budget = Budget(
            memory_bytes=least + (most - least) * k // (NUM_BUDGETS - 1),
            link_bytes_per_s=LINK_BYTES_PER_S,
            update_bytes_per_s=update,
            unit_s=UNIT_S,
        )
        boundaries = Optimal().partition(costs, budget)
        step = predict_step(costs, boundaries, budget)
        rows.append(
            {
                "memory_bytes": budget.memory_bytes,
                "boundaries": boundaries,
                "predicted_s": step.total_s,
                "parts_s": [step.compute_s, step.exposed_load_s, step.exposed_boundary_s, step.exposed_update_s],
            }
        )
    Path(path).write_text(json.dumps(rows))


def measure(path):
    """Seconds per step of one run for each row of a prediction."""
    batches = token_batches(NUM_STEPS, BATCH_SIZE, LENGTH)
    seconds = []
    for row in json.loads(Path(path).read_text()):
        loader = Clocked(batches)
        device = EmulatedDevice(row["memory_bytes"], bandwidth=LINK_BYTES_PER_S)
        orchestra = ModelOrchestrator([task(loader, row["boundaries"])], devices=[device])
        orchestra.verbose = 0
        orchestra.train_models().raise_failures()
        # The engine asks for a batch when it begins the one before, so its steps are one later.
        seconds.append((loader.asked_s[-1] - loader.asked_s[2]) / (NUM_STEPS - 2))
    print(json.dumps(seconds))


def compare(figures):
    """Predict in one process, measure in later ones, print both."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "prediction.json")
        again = [sys.executable, __file__]
        subprocess.run([*again, "predict", path], check=True)
        runs = [
            json.loads(subprocess.run([*again, "measure", path], check=True, stdout=subprocess.PIPE).stdout)
            for _ in range(NUM_RUNS)
        ]
        rows = json.loads(Path(path).read_text())
    print("device      shards  predicted  of it compute, load, boundary, update   measured (median, range)   off by")
    errors = []
    for row, *seconds in zip(rows, *runs, strict=True):
        predicted, found = row["predicted_s"], median(seconds)
        parts = ", ".join(f"{part * 1e3:.0f}" for part in row["parts_s"])
        print(
            f"{format_bytes(row['memory_bytes']):10}  {len(row['boundaries']):6}  {predicted * 1e3:6.0f} ms  "
            f"{parts:38}  {found * 1e3:4.0f} ms ({min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f})"
            f"  {predicted / found - 1:+9.1%}",
            flush=True,
        )
        errors.append([abs(predicted / each - 1) for each in seconds])
    # By run, the middle one of all budgets.
    figures.add("step times, off by", [median(each) for each in zip(*errors, strict=True)], better="less")


def reserve():
    """What kernels allocate within one operation, the worst layer of each model."""
    print("model        metered  allocated  reserve  (the layer that needs the largest reserve)")
    for name, make in ARCHITECTURES.items():
        torch.manual_seed(0)
        worst = max(layer_peaks(*make()), key=lambda peak: peak.reserve_bytes)
        print(f"{name:12} {worst.metered_bytes:7}  {worst.allocated_bytes:9}  {worst.reserve_bytes:7}  {worst.name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=("predict", "measure", "reserve"))
    parser.add_argument("file", nargs="?")
    add_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.command == "predict":
        predict(arguments.file)
    elif arguments.command == "measure":
        measure(arguments.file)
    else:
        figures = Figures("predictions")
        if arguments.command is None:
            compare(figures)
        reserve()
        figures.save(arguments.json)


if __name__ == "__main__":
    main()
