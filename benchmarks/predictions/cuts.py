"""The default cut beside balanced ones: predicted for stated rates; on emulated devices, predicted, then measured.

python benchmarks/predictions/cuts.py                 # all of it; exit code 1 if the default is slower than the limit
python benchmarks/predictions/cuts.py stated          # 1.5 billion parameters on a device of stated rates, not run
python benchmarks/predictions/cuts.py planning        # seconds that the choice takes, for 30 and for 300 layers
python benchmarks/predictions/cuts.py measured        # small models on emulated devices
python benchmarks/predictions/cuts.py predict CASE    # what that does first: the cuts of a case, and their predictions
python benchmarks/predictions/cuts.py measure CASE FILE    # one run of every cut of FILE, likewise
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from hydra_engine import Callback, DeviceCost, EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.planning.cuts import CutChoice, RunAtHand
from partitioners import GPU, Balanced, Budget, Fastest, Pilot, Presharded, Rates, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import gpt, token_batches

# Of the default: beyond the best of the balanced cuts, as a share of it. Runs of one cut differ by more.
LIMIT = 0.05
BALANCED = range(2, 17)
# One H200 behind PCIe 5.
FLOPS_PER_S, DEVICE_BYTES_PER_S, LINK_BYTES_PER_S, DRAM_BYTES_PER_S = 450e12, 4e12, 50e9, 200e9
UPDATE_BYTES = 28  # of DRAM per parameter: AdamW of float32 masters
UNIT_S = 450e-6
LENGTH, MICRO_TOKENS, VOCABULARY = 1024, 4096, 50257
NUM_RUNS, NUM_STEPS, WARM_STEPS = 2, 6, 2


# -- a device of stated rates


def stated_costs(num_micro_batches, num_blocks=27, width=2048):
    """Costs of a GPT on the meta device, for one micro-batch; in bfloat16."""
    with torch.device("meta"):
        model = gpt(width=width, num_blocks=num_blocks, num_heads=16, length=LENGTH, vocabulary=VOCABULARY)
        tokens = torch.zeros(MICRO_TOKENS // LENGTH, LENGTH, dtype=torch.long)
    rates = Rates(flops_per_s=FLOPS_PER_S, memory_bytes_per_s=DEVICE_BYTES_PER_S)
    options = {"device": GPU, "precision": "bfloat16", "rates": rates, "time_layers": False}
    return profile(model, tokens, tokens.flatten(), nn.CrossEntropyLoss(), **options)


def stated_choice(costs, memory_gib, num_micro_batches, num_tasks):
    """Cuts for such a device, of which 1 GiB is for context and libraries."""
    budget = Budget(
        memory_bytes=(memory_gib - 1) * 2**30,
        num_micro_batches=num_micro_batches,
        link_bytes_per_s=LINK_BYTES_PER_S,
        update_bytes_per_s=4 * DRAM_BYTES_PER_S / UPDATE_BYTES,
        unit_s=UNIT_S,
    )
    device = DeviceCost(
        load_bytes_per_s=LINK_BYTES_PER_S,
        store_bytes_per_s=LINK_BYTES_PER_S,
        unit_s=UNIT_S,
        memory_bytes=budget.memory_bytes,
    )
    run = RunAtHand(device=device, num_tasks=num_tasks)
    return CutChoice(costs=costs, candidates=Fastest().candidates(costs, budget), budget=budget, run=run)


def others(choice):
    """Cuts by name: Pilot's, and balanced ones as far as they fit."""
    found = {"Pilot": Pilot().partition(choice.costs, choice.budget)}
    for number in BALANCED:
        with suppress(ValueError):  # so many do not fit
            found[f"Balanced({number})"] = Balanced(number).partition(choice.costs, choice.budget)
    return found


def stated():
    """Print a table; True if no balanced cut is predicted to be faster than the default."""
    costs, is_best = stated_costs(1), True
    print("predicted seconds per step: 1.5 billion parameters, bfloat16, AdamW on the host, 4,096 tokens a micro-batch")
    print("tasks  device   tokens  default  shards  largest  Pilot  balanced 2 ... 16")
    for num_tasks in (4, 1):
        for memory_gib in (16, 24):
            for tokens in (4096, 8192, 16384, 32768):
                choice = stated_choice(costs, memory_gib, tokens // MICRO_TOKENS, num_tasks)
                best = choice.fastest()
                pilot_s, *seconds = (choice.predicted(cut).step_s for cut in others(choice).values())
                is_best &= best.step_s <= min(seconds)
                params = [sum(c.param_bytes for c in costs[a:b]) for a, b in pairwise([0, *best.boundaries])]
                print(
                    f"{num_tasks:5}  {memory_gib} GiB  {tokens:7}  {best.step_s:7.3f}  {len(best.boundaries):6}  "
                    f"{max(params) / sum(params):7.0%}  {pilot_s:5.3f}  {' '.join(f'{s:.3f}' for s in seconds)}",
                    flush=True,
                )
    return is_best


def planning():
    """Seconds of processor time of the choice, and of the profile before it."""
    print("layers  tasks  profile  candidates  choice")
    for num_blocks in (28, 298):
        begin_s = time.process_time()
        costs = stated_costs(2, num_blocks, 2048 if num_blocks == 28 else 640)
        profile_s = time.process_time() - begin_s
        for num_tasks in (1, 4):
            begin_s = time.process_time()
            choice = stated_choice(costs, 16, 2, num_tasks)
            found_s = time.process_time() - begin_s
            choice.fastest()
            chosen_s = time.process_time() - begin_s
            print(f"{len(costs):6}  {num_tasks:5}  {profile_s:5.2f} s  {found_s:8.3f} s  {chosen_s:4.2f} s", flush=True)


# -- emulated devices


@dataclass(frozen=True)
class Case:
    """Equal tasks on one emulated device of some of the model's bytes, with a link of so many bytes per second."""

    num_tasks: int
    memory_bytes: int
    bandwidth: int | None
    width: int = 160
    num_blocks: int = 14
    batch_size: int = 4
    length: int = 64

    def task(self, name, partitioner, num_steps, ends=None):
        model = gpt(width=self.width, num_blocks=self.num_blocks, num_heads=4, length=self.length)
        batches = token_batches(num_steps, self.batch_size, self.length)
        options = {"optimizer": torch.optim.AdamW, "partitioner": partitioner, "seed": 0, "name": name}
        options["callbacks"] = [] if ends is None else [Ends(ends)]
        return ModelTask(model, nn.CrossEntropyLoss(), batches, 1e-3, **options)

    def orchestra(self, partitioner, num_steps, ends):
        torch.set_num_threads(1)
        tasks = [self.task(f"t{k}", partitioner, num_steps, each) for k, each in enumerate(ends)]
        device = EmulatedDevice(self.memory_bytes, bandwidth=self.bandwidth)
        orchestra = ModelOrchestrator(tasks, devices=[device], homes="host")
        orchestra.verbose = 0
        return orchestra


CASES = {
    "one task, slow link": Case(1, 32 * 2**20, 60_000_000),
    "two tasks, slow link": Case(2, 32 * 2**20, 60_000_000),
    "two tasks, slow link, large device": Case(2, 128 * 2**20, 60_000_000),
    "one task, no link, large device": Case(1, 128 * 2**20, None),
}


def predict(name):
    """Let the engine choose, and write its predictions of the default and all other cuts to standard output."""
    case = CASES[name]
    orchestra = case.orchestra(None, 1, [None] * case.num_tasks)
    orchestra.generate()
    planned = orchestra._tasks.all[0]
    cuts = {"default": planned.predicted.boundaries, **others(planned.choice)}
    rows = [(cut, list(ends), planned.choice.predicted(ends).step_s) for cut, ends in cuts.items()]
    print(json.dumps({"chosen": str(planned.predicted), "rows": rows}))


def measure(name, path):
    """Seconds in which each task takes a step, of one run for each cut of a prediction; equal cuts are run once."""
    cuts = {tuple(ends): None for _, ends, _ in json.loads(Path(path).read_text())["rows"]}
    print(json.dumps([[ends, measured_s(CASES[name], ends)] for ends in cuts]))


def measured_s(case, boundaries):
    """Seconds between steps in the middle of a run."""
    ends_s = [[] for _ in range(case.num_tasks)]
    orchestra = case.orchestra(Presharded(boundaries), NUM_STEPS, ends_s)
    orchestra.generate()
    orchestra.train_models().raise_failures()
    through_s = [max(times) for times in zip(*ends_s, strict=True)]
    return (through_s[-1] - through_s[WARM_STEPS - 1]) / (NUM_STEPS - WARM_STEPS)


class Ends(Callback):
    """Notes when each step was through."""

    def __init__(self, ends):
        self.ends = ends

    def on_step(self, _):
        self.ends.append(time.perf_counter())


def compare():
    """Predict in one process, measure in later ones; True if the default is as fast as the best balanced cut."""
    is_best = True
    for case in CASES:
        seconds = defaultdict(list)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "prediction.json"
            path.write_text(_printed("predict", case))
            for _ in range(NUM_RUNS):
                for ends, found in json.loads(_printed("measure", case, str(path))):
                    seconds[tuple(ends)].append(found)
            prediction = json.loads(path.read_text())
        print(f"\n{case}: {prediction['chosen']}\ncut           shards  predicted  measured (all runs)   off by")
        measured = {}
        for cut, ends, predicted_s in prediction["rows"]:
            found = seconds[tuple(ends)]
            measured[cut] = min(found)  # what else is at work on the machine only adds
            print(
                f"{cut:12}  {len(ends):6}  {predicted_s * 1e3:6.0f} ms  {min(found) * 1e3:5.0f} ms "
                f"({min(found) * 1e3:.0f} to {max(found) * 1e3:.0f})  {predicted_s / min(found) - 1:+7.1%}"
            )
        best = min(number for cut, number in measured.items() if cut.startswith("Balanced"))
        print(f"default beside the best balanced cut: {measured['default'] / best - 1:+.1%}", flush=True)
        is_best &= measured["default"] <= best * (1 + LIMIT)
    return is_best


def _printed(*command):
    """Standard output of this script in a process of its own."""
    return subprocess.run([sys.executable, __file__, *command], check=True, stdout=subprocess.PIPE, text=True).stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=("stated", "planning", "measured", "predict", "measure"))
    parser.add_argument("of", nargs="*")
    arguments = parser.parse_args()
    if arguments.command == "predict":
        predict(*arguments.of)
    elif arguments.command == "measure":
        measure(*arguments.of)
    else:
        parts = {"stated": stated, "planning": planning, "measured": compare}
        wanted = [arguments.command] if arguments.command else list(parts)
        if False in [parts[name]() for name in wanted]:
            sys.exit(1)


if __name__ == "__main__":
    main()
