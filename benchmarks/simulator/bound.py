"""Shares of the bound, simulated with stated rates: the engine as it is, then with one improvement after the other.

python benchmarks/simulator/main.py bound                          # four models, and one; every rate
python benchmarks/simulator/main.py bound --models 4 --tokens 8192 --dram 200 --link 50     # exit code 1 below 90 %
python benchmarks/simulator/main.py bound --no-transfers           # updates have DRAM to themselves

The scheduler is that of a run, and so are the cuts. What a step takes is stated: 450 TFLOP/s, a link, DRAM, and a fixed
cost for each unit. See README.md.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from hydra_engine import DeviceCost, HostCost, simulate
from hydra_engine.planning.cuts import CutChoice, RunAtHand, WholeRun
from partitioners import GPU, Budget, Fastest, Pilot, Rates, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from figures import Figures, add_arguments
from gpt import gpt

GOAL = 0.90  # of the bound, with four models, 8,192 tokens, W = 200 GB/s and a link of 50
FLOPS_PER_S = 450e12
MEMORY_BYTES = 15 * 2**30  # a device of 16 GiB, of which 1 GiB is for context and libraries
WIDTH, NUM_BLOCKS, NUM_HEADS, LENGTH, VOCABULARY = 2048, 27, 16, 2048, 32768  # 1.5 billion parameters
MICRO_TOKENS = 4096
NUM_STEPS, WARM_STEPS = 14, 4
# Of DRAM per parameter. An update reads a gradient of 2 bytes, and reads and writes the weight and its remainder, of 2
# each, and two moments of 4. Weights go up twice, and a gradient down.
LEAST_UPDATE_BYTES, TRANSFER_BYTES = 26.0, 6.0
HOST_THREADS = 4  # optimizer threads of the engine on 16 cores


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What the engine does and takes."""

    update_bytes: float = 46.0  # of DRAM, for the update of a parameter
    default_cut: bool = False  # the one of the least predicted time; else that of Pilot
    one_update: bool = False  # at a time, so that the lowest shard is through first; else four that share DRAM
    early_release: bool | str = False  # of a task that is alone: shards are updated as their gradients arrive
    unit_s: float = 1000e-6  # fixed cost of a unit
    together: bool = False  # cuts, and what stays on the device, by a simulation of the whole run


def stages(is_alone):
    """Stages by name, each with all improvements of those before it."""
    stage = Stage()
    yield "today", stage
    stage = replace(stage, update_bytes=28.0)
    yield "1 update in one call", stage
    stage = replace(stage, update_bytes=LEAST_UPDATE_BYTES)
    yield "2 split masters", stage
    stage = replace(stage, default_cut=True)
    yield "3 default cut", stage
    stage = replace(stage, one_update=True, early_release=is_alone and "all")
    yield "4 no barrier", stage
    stage = replace(stage, unit_s=450e-6)
    yield "5 turnaround", stage
    yield "6 together", replace(stage, together=True)


def layer_costs():
    """Costs of the layers for one micro-batch: bytes counted on the meta device, 2 + 4 operations per parameter."""
    with torch.device("meta"):
        model = gpt(WIDTH, NUM_BLOCKS, NUM_HEADS, LENGTH, VOCABULARY)
        tokens = torch.zeros(MICRO_TOKENS // LENGTH, LENGTH, dtype=torch.long)
    rates = Rates(flops_per_s=FLOPS_PER_S, memory_bytes_per_s=1e18)
    options = {"device": GPU, "precision": "bfloat16", "rates": rates, "time_layers": False}
    costs = profile(model, tokens, tokens.flatten(), nn.CrossEntropyLoss(), **options)

    def seconds(cost, operations):  # an embedding looks up
        return 0.0 if cost is costs[0] else operations * cost.param_bytes / 2 * MICRO_TOKENS / FLOPS_PER_S

    return [replace(cost, forward_s=seconds(cost, 2), backward_s=seconds(cost, 4)) for cost in costs]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run with stated rates."""

    num_models: int
    tokens: int
    dram_bytes_per_s: float
    link_bytes_per_s: float
    transfers: bool  # take their share of DRAM

    def run(self, stage):
        link = self.link_bytes_per_s
        threads = 1 if stage.one_update else HOST_THREADS
        return RunAtHand(
            device=DeviceCost(
                load_bytes_per_s=link, store_bytes_per_s=link, unit_s=stage.unit_s, memory_bytes=MEMORY_BYTES
            ),
            host=HostCost(optimizer_threads=threads, shares_dram=True),
            num_tasks=self.num_models,
            early_release=stage.early_release,
        )

    def choice(self, costs, stage):
        """What chooses the cut of a model among equal ones."""
        number = max(1, self.tokens // MICRO_TOKENS)
        budget = Budget(
            memory_bytes=MEMORY_BYTES,
            num_micro_batches=number,
            link_bytes_per_s=self.link_bytes_per_s,
            update_bytes_per_s=4 * self.dram_bytes_per_s / self.update_bytes(stage),
            unit_s=stage.unit_s,
        )
        return CutChoice(
            costs=costs, candidates=Fastest().candidates(costs, budget), budget=budget, run=self.run(stage)
        )

    def update_bytes(self, stage):
        """Of DRAM per parameter."""
        return stage.update_bytes + (TRANSFER_BYTES if self.transfers else 0.0)

    def bound(self, task):
        """Seconds for which a round keeps each resource busy: compute as this cut has it, link, host at its best."""
        num = self.num_models
        params = sum(task.of_shard("gradient_bytes", j) for j in range(task.num_shards)) / 2
        host_bytes = LEAST_UPDATE_BYTES + (TRANSFER_BYTES if self.transfers else 0.0)
        return {
            "compute": num * task.least_step_s,
            "link": num * 2 * params / self.link_bytes_per_s,  # up at least once, and down
            "host": num * host_bytes * params / self.dram_bytes_per_s,
        }


def round_s(tasks, run):
    """Seconds of a round, a step of each task and what it leaves to the host: of more rounds less those of fewer."""
    short_s, long_s = (
        simulate([replace(task, num_steps=number) for task in tasks], [run.device], host=run.host).makespan_s
        for number in (WARM_STEPS, NUM_STEPS)
    )
    return (long_s - short_s) / (NUM_STEPS - WARM_STEPS)


def rows(cell, costs):
    """(stage, seconds of a round, number of shards, bound by resource) of a cell."""
    for name, stage in stages(cell.num_models == 1):
        choice = cell.choice(costs, stage)

        def cost(ends, choice=choice):
            return replace(choice.cost(ends), num_micro_batches=1)

        task = cost(choice.fastest().boundaries if stage.default_cut else Pilot().partition(costs, choice.budget))
        if stage.together:
            options = [task, *map(cost, choice.candidates)]
            options += [replace(each, graph_bytes=0) for each in options if any(each.graph_bytes)]
            tasks = [
                [replace(each, name=str(k), num_steps=NUM_STEPS) for each in options] for k in range(cell.num_models)
            ]
            run = WholeRun(options=tasks, devices=[choice.run.device], host=choice.run.host)
            task = options[run.best().chosen[0]]
        tasks = [replace(task, name=str(k)) for k in range(cell.num_models)]
        yield name, round_s(tasks, choice.run), task.num_shards, cell.bound(task)


def main(arguments):
    parser = argparse.ArgumentParser(prog="main.py bound", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768], help="per step")
    parser.add_argument("--dram", type=float, nargs="+", default=[100, 200, 300], metavar="GB/s")
    parser.add_argument("--link", type=float, nargs="+", default=[25, 50], metavar="GB/s")
    parser.add_argument("--no-transfers", action="store_true", help="they take nothing of DRAM's rate")
    parser.add_argument("--no-judge", action="store_true", help="exit code 0 whatever comes out")
    add_arguments(parser)
    given = parser.parse_args(arguments)
    costs, good, figures = layer_costs(), True, Figures("simulator")
    names = [name for name, _ in stages(True)]
    print("share of max(compute, link, host) that a round of all models reaches, simulated with stated rates")
    print("models  tokens  DRAM  link    bound (of)         " + "  ".join(f"{name:>20}" for name in names))
    for num in given.models:
        for tokens in given.tokens:
            for dram in given.dram:
                for link in given.link:
                    cell = Cell(
                        num_models=num,
                        tokens=tokens,
                        dram_bytes_per_s=dram * 1e9,
                        link_bytes_per_s=link * 1e9,
                        transfers=not given.no_transfers,
                    )
                    found = [*rows(cell, costs)]
                    # One bound for all stages: that of the plan that could be fastest.
                    least = min((bound for *_, bound in found), key=lambda bound: max(bound.values()))
                    bound_s = max(least.values())
                    shown = [f"{s:7.3f} s {bound_s / s:5.1%} {number:2}" for _, s, number, _ in found]
                    busiest = max(least, key=least.get)
                    print(
                        f"{num:6}  {tokens:6}  {dram:4.0f}  {link:4.0f}  {bound_s:6.3f} s ({busiest:7})  "
                        + "  ".join(f"{each:>20}" for each in shown),
                        flush=True,
                    )
                    if (num, tokens, dram, link) == (4, 8192, 200, 50):
                        share = bound_s / found[-1][1]
                        good &= share >= GOAL
                        name = "share of the bound, 4 models, 8,192 tokens"
                        figures.add(name, share, better="more", limit=GOAL)
    print("beside each share, the number of shards")
    figures.save(given.json)
    sys.exit(0 if good or given.no_judge else 1)
