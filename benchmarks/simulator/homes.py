"""Rounds of models whose layers have their homes in DRAM or on devices, simulated with the rates of an H200.

python benchmarks/simulator/main.py homes              # exit code 1 where a goal is missed
python benchmarks/simulator/main.py homes --write      # also puts the table into README.md

The scheduler is that of a run, and so are the cuts, and what devices keep. See README.md.
"""

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from hydra_engine import DeviceCost, HostCost, simulate
from hydra_engine.planning.cuts import CutChoice, RunAtHand
from partitioners import GPU, STATED_RATES, Budget, Fastest, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from figures import Figures, add_arguments, put, table
from gpt import gpt

WIDTH, LENGTH, VOCABULARY, MICRO_TOKENS = 2048, 2048, 32768, 4096
# Seconds of a forward and of a backward of so many tokens, of layers of this width. Blocks take them in proportion to
# its square, the others to itself.
EMBEDDING_S, BLOCK_S, HEAD_S = (0.33e-3, 0.40e-3), (0.855e-3, 2.03e-3), (1.62e-3, 2.48e-3)
UP, DOWN = 42.35e9, 41.37e9  # of the link, in bytes per second
# Bytes per second, and those that the update of a parameter moves.
DRAM, DRAM_UPDATE_BYTES = 92e9, 28
MEMORY, MEMORY_UPDATE_BYTES = 3.8e12, 30
HOME_BYTES, GRADIENT_BYTES = 16, 2  # of a parameter in bfloat16, with AdamW
UNIT_S = 0.45e-3
WARM_STEPS, NUM_STEPS = 4, 14
# A round is at most so much longer than with all models resident; else so many times shorter than with homes in DRAM,
# or devices are busy for such a share of it.
MOST_OVER, LEAST_TIMES, LEAST_BUSY = 1.02, 1.4, 0.95


@dataclass(frozen=True, kw_only=True)
class Row:
    """Equal models, and the devices that they have together."""

    size: str
    memory_bytes: float  # that is usable, of each device
    num_models: int = 1
    num_devices: int = 1
    num_micro_batches: int = 2

    def __str__(self):
        models = f"{'one' if self.num_models == 1 else 'four'} {self.size}"
        devices = f"{self.num_devices} of " if self.num_devices > 1 else ""
        memory = "80 GB" if self.memory_bytes == WHOLE else "16 GiB"
        return f"{models}, {devices}{memory}, {self.num_micro_batches * MICRO_TOKENS:,} tokens"


WHOLE, CAPPED = 79e9, 15.3e9
MODELS = {"1.5B": (2048, 27), "7B": (4096, 32)}  # width and number of blocks
ROWS = [
    Row(size="1.5B", memory_bytes=WHOLE),
    Row(size="1.5B", memory_bytes=CAPPED),
    *(Row(size="1.5B", memory_bytes=WHOLE, num_models=4, num_devices=number) for number in (1, 2, 4)),
    *(Row(size="7B", memory_bytes=WHOLE, num_micro_batches=number) for number in (2, 4, 8)),
    Row(size="7B", memory_bytes=WHOLE, num_devices=2),
]


def layer_costs(width, num_blocks):
    """Costs of a GPT's layers for one micro-batch: bytes counted on the meta device, and stated seconds."""
    with torch.device("meta"):
        model = gpt(width, num_blocks, width // 128, LENGTH, VOCABULARY)
        tokens = torch.zeros(MICRO_TOKENS // LENGTH, LENGTH, dtype=torch.long)
    options = {"device": GPU, "precision": "bfloat16", "rates": STATED_RATES[GPU, "bfloat16"], "time_layers": False}
    costs = profile(model, tokens, tokens.flatten(), nn.CrossEntropyLoss(), **options)
    times = width / WIDTH
    seconds = [[times * each for each in EMBEDDING_S], *[[times**2 * each for each in BLOCK_S]] * num_blocks]
    seconds.append([times * each for each in HEAD_S])
    return [
        replace(cost, forward_s=forward_s, backward_s=backward_s)
        for cost, (forward_s, backward_s) in zip(costs, seconds, strict=True)
    ]


def choice(row, costs):
    """What chooses the cut of a model among equal ones."""
    budget = Budget(
        memory_bytes=int(row.memory_bytes),
        num_micro_batches=row.num_micro_batches,
        link_bytes_per_s=DOWN,
        update_bytes_per_s=4 * DRAM / DRAM_UPDATE_BYTES,  # of float32 parameters
        unit_s=UNIT_S,
    )
    run = RunAtHand(
        device=DeviceCost(load_bytes_per_s=UP, store_bytes_per_s=DOWN, unit_s=UNIT_S, memory_bytes=row.memory_bytes),
        host=HostCost(shares_dram=True),
        num_tasks=row.num_models,
        num_devices=row.num_devices,
        home_times=HOME_BYTES / GRADIENT_BYTES,
        home_update_bytes_per_s=4 * MEMORY / MEMORY_UPDATE_BYTES,
    )
    return CutChoice(costs=costs, candidates=Fastest().candidates(costs, budget), budget=budget, run=run)


def resident_s(row, costs):
    """Seconds of a round of models that are resident one after the other, on each device; None: one does not fit."""
    number = sum(cost.grad_bytes for cost in costs) / GRADIENT_BYTES
    if number * HOME_BYTES > row.memory_bytes:
        return None
    seconds = row.num_micro_batches * sum(cost.forward_s + cost.backward_s for cost in costs)
    return row.num_models * (seconds + number * MEMORY_UPDATE_BYTES / MEMORY) / row.num_devices


def simulated(row, task, run):
    """Seconds of a round, and the share in which devices are busy: of more rounds less those of fewer."""
    tasks = [replace(task, name=str(k), num_micro_batches=1) for k in range(row.num_models)]
    runs = [
        simulate([replace(each, num_steps=number) for each in tasks], [run.device] * row.num_devices, host=run.host)
        for number in (WARM_STEPS, NUM_STEPS)
    ]
    round_s, busy_s = (
        (of(runs[1]) - of(runs[0])) / (NUM_STEPS - WARM_STEPS)
        for of in (lambda each: each.makespan_s, lambda each: each.makespan_s * each.busy_share)
    )
    return round_s, busy_s / round_s


def at_home(task, run):
    """Layers are not known to a task's cost: the share of its gradients' bytes that stay, of tasks on average."""
    homes = run.at_home(task)
    gradients = [task.of_shard("gradient_bytes", j) for j in range(task.num_shards)]
    return sum(gradients[j] for there in homes for j in there) / len(homes) / sum(gradients)


def main(arguments):
    parser = argparse.ArgumentParser(prog="main.py homes", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--like", default="", help="only rows with these words")
    parser.add_argument("--no-judge", action="store_true", help="exit code 0 whatever comes out")
    add_arguments(parser, writes=True)
    given = parser.parse_args(arguments)
    costs = {size: layer_costs(*shape) for size, shape in MODELS.items()}
    good, figures, rows = True, Figures("simulator"), []
    for row in (row for row in ROWS if given.like in str(row)):
        found, least_s = choice(row, costs[row.size]), resident_s(row, costs[row.size])
        in_dram = found.fastest()
        start_s = time.perf_counter()
        chosen = found.with_homes(in_dram)
        choice_s = time.perf_counter() - start_s
        in_dram_s, _ = simulated(row, found.cost(in_dram.boundaries), found.run)
        task = found.cost(chosen.boundaries, homes=chosen.homes)
        chosen_s, busy = simulated(row, task, found.run)
        is_good = least_s is not None and chosen_s <= MOST_OVER * least_s
        good &= is_good or in_dram_s >= LEAST_TIMES * chosen_s or busy >= LEAST_BUSY
        figures.add(f"homes, {row}: times shorter than in DRAM", in_dram_s / chosen_s, better="more")
        resident = "does not fit" if least_s is None else f"{least_s:.3f} s"
        seconds = [resident, f"{in_dram_s:.3f} s", f"{chosen_s:.3f} s", f"{in_dram_s / chosen_s:.2f}"]
        rows.append([row, *seconds, f"{at_home(task, found.run):.0%}", task.num_shards, f"{busy:.0%}"])
        print(*rows[-1], f"chosen in {choice_s:.2f} s", sep=" | ", flush=True)
    head = ["models and devices", "resident", "homes in DRAM", "homes chosen", "times shorter"]
    text = table([*head, "of the weights at home", "shards", "devices busy"], rows)
    if given.write:
        put(Path(__file__).with_name("README.md"), "homes", text)
    figures.save(given.json)
    sys.exit(0 if good or given.no_judge else 1)
