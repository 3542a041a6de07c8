"""What a decision costs, how good schedules are without swaps and with them, and one plan for all tasks. See README.md.

python benchmarks/scheduler/main.py                  # every experiment; exit code 1 where a limit is missed
python benchmarks/scheduler/main.py bound swaps      # some of them
"""

import argparse
import gc
import heapq
import random
import sys
import time
from pathlib import Path
from statistics import mean, median, quantiles

import psutil
import together as cuts
from search import at_random, best_s, in_proportion

from hydra_engine import TaskCost, simulate
from hydra_engine.schedule import TaskAdded
from hydra_engine.schedule.policies import POLICIES, resolve_policy
from hydra_engine.schedule.scheduler import Scheduler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from figures import Figures, add_arguments

LIMIT_US = 30.0
LIMIT_SWAPS = 1.05
SAME = 0.99  # of a makespan: the search simulates fewer steps than the run has
NUM_DEVICES, NUM_TASKS, NUM_UNITS = 1_000, 10_000, 1_000_000
FIGURES = Figures("scheduler")


class Measured(Scheduler):
    """Counts its own calls and seconds, and the process's memory as units go by."""

    def __init__(self, policy, num_units, num_groups):
        super().__init__(policy, has_groups=num_groups > 0)
        self.num_groups = num_groups
        self.seconds, self.num_calls, self.num_units = 0.0, 0, 0
        self.resident = {}  # by share of the units run
        self._marks = {round(num_units * share): share for share in (0.1, 0.5, 0.9)}

    def take(self, event):
        if self.num_groups and isinstance(event, TaskAdded):
            group, quota = int(event.task) % self.num_groups, NUM_DEVICES // self.num_groups
            event = event._replace(group=str(group), quota=quota)
        start_s = time.perf_counter()
        out = super().take(event)
        self.seconds += time.perf_counter() - start_s
        self.num_calls += 1
        if type(event).__name__ == "Computed":
            self.num_units += 1
            if self.num_units in self._marks:
                self.resident[self._marks[self.num_units]] = psutil.Process().memory_info().rss
        return out

    def dispatch(self):
        start_s = time.perf_counter()
        out = super().dispatch()
        self.seconds += time.perf_counter() - start_s
        return out


def decisions(arguments):
    """Seconds of the scheduler per event and per unit, for tasks of three units a step."""
    good = True
    print("policy              tasks  groups  devices      units  us per decision  us per unit  MiB at 10, 50, 90 %")
    sizes = [NUM_TASKS // 10, NUM_TASKS, NUM_TASKS * 10]
    cases = [("sharded-lrtf", size, 0) for size in sizes] + [(n, NUM_TASKS, 0) for n in sorted(POLICIES)]
    cases += [("sharded-lrtf", NUM_TASKS, num_groups) for num_groups in (2, 100, 1000)]
    for name, num_tasks, num_groups in cases:
        units = NUM_UNITS if name == "sharded-lrtf" and not num_groups else NUM_UNITS // 5
        rng = random.Random(0)
        tasks = [
            TaskCost(
                name=str(k), unit_s=[rng.uniform(0.1, 1.0) for _ in range(3)], num_steps=-(-units // num_tasks // 3)
            )
            for k in range(num_tasks)
        ]
        scheduler = Measured(resolve_policy(name), sum(3 * task.num_steps for task in tasks), num_groups)
        gc.collect()
        found = simulate(tasks, NUM_DEVICES, scheduler=scheduler)
        decision_us = 1e6 * scheduler.seconds / scheduler.num_calls
        resident = ", ".join(f"{each / 2**20:.0f}" for each in scheduler.resident.values())
        print(
            f"{name:18} {num_tasks:6} {num_groups:7} {NUM_DEVICES:8} {found.num_units:10}  {decision_us:15.1f}  "
            f"{1e6 * scheduler.seconds / found.num_units:11.1f}  {resident}",
            flush=True,
        )
        if name == "sharded-lrtf" and num_tasks == NUM_TASKS:
            good &= decision_us < LIMIT_US
            if not num_groups:
                FIGURES.add("us per decision, 10,000 tasks", decision_us, better="less", limit=LIMIT_US)
        del scheduler, found
    return good


def lpt_s(tasks, num_devices):
    """Makespan of whole tasks on devices, each on the device that is free first, the longest first (Graham 1969)."""
    free_s = [0.0] * num_devices
    for seconds in sorted((task.num_steps * task.step_s for task in tasks), reverse=True):
        heapq.heappush(free_s, heapq.heappop(free_s) + seconds)
    return max(free_s)


def settings():
    """The paper's: 8, 12 and 64 tasks on 4 and 8 devices, equal and unequal; five shards each."""
    rng = random.Random(0)
    for num_devices in (4, 8):
        for num_tasks in (8, 12, 64):
            for kind in ("equal", "unequal"):
                equal = [0.4] * 9
                yield (
                    kind,
                    num_devices,
                    [
                        TaskCost(
                            name=str(k),
                            unit_s=equal if kind == "equal" else [rng.uniform(0.1, 1.0) for _ in range(9)],
                            num_steps=100 if kind == "equal" else rng.randint(20, 400),
                        )
                        for k in range(num_tasks)
                    ],
                )


def bound(arguments):
    """Makespans over the bound, without swap costs."""
    good, worst = True, 0.0
    names = sorted(POLICIES)
    print("makespan over the bound     " + "  ".join(f"{name:>18}" for name in [*names, "whole tasks, LPT"]))
    for kind, num_devices, tasks in settings():
        ratios = []
        for name in names:
            found = simulate(tasks, num_devices, name)
            ratios.append(found.makespan_s / found.bound_s)
            unit_s = max(max(task.unit_s) for task in tasks)
            if name == "sharded-lrtf":
                worst = max(worst, ratios[-1])
                good &= found.makespan_s <= 1.001 * found.bound_s + unit_s
        ratios.append(lpt_s(tasks, num_devices) / found.bound_s)
        title = f"{len(tasks)} {kind}, {num_devices} devices"
        print(f"{title:27} " + "  ".join(f"{ratio:18.4f}" for ratio in ratios), flush=True)
    FIGURES.add("makespan over the bound, worst of 12", worst, better="less")
    worst = -float("inf")
    for seed in range(1000):
        rng = random.Random(seed)
        tasks = [
            TaskCost(
                name=str(k),
                unit_s=[rng.uniform(0.1, 1.0) for _ in range(rng.choice((1, 2, 3, 5, 6, 9)))],
                num_steps=rng.randint(1, 40),
            )
            for k in range(rng.randint(1, 12))
        ]
        found = simulate(tasks, rng.choice((1, 2, 3, 4, 8)))
        worst = max(worst, (found.makespan_s - 1.001 * found.bound_s) / max(max(task.unit_s) for task in tasks))
    print(f"1,000 random instances: at most {worst:.2f} units above 1.001 times the bound; limit 1", flush=True)
    FIGURES.add("units above 1.001 times the bound, worst of 1,000", worst, better="less", limit=1.0)
    return good and worst <= 1.0


def swaps(arguments):
    """Makespans over the best that exhaustive search finds, with swap costs."""
    ratio = _swaps("costs in proportion, judged", in_proportion, arguments.instances)
    FIGURES.add("makespan over the best there is, mean", ratio, better="less", limit=LIMIT_SWAPS)
    _swaps("costs at random, not judged", at_random, arguments.instances)
    return ratio <= LIMIT_SWAPS


def _swaps(title, instance, num_instances):
    """Sharded-LRTF's mean ratio."""
    ratios = {name: [] for name in sorted(POLICIES)}
    start_s = time.perf_counter()
    for seed in range(num_instances):
        tasks, devices = instance(random.Random(seed))
        best = best_s(tasks, devices)
        for name in ratios:
            found = simulate(tasks, devices, name).makespan_s
            assert found >= best - 1e-9, (
                f"instance {seed}: {name} takes {found} s, and the search found no less than {best}"
            )
            ratios[name].append(found / best)
    print(f"{num_instances} instances with swaps, {title}; searched in {time.perf_counter() - start_s:.0f} s")
    print("makespan over the best there is     mean   median      95 %      most")
    for name, found in ratios.items():
        print(f"{name:30} {mean(found):9.4f} {median(found):8.4f} {quantiles(found, n=20)[-1]:9.4f} {max(found):9.4f}")
    return mean(ratios["sharded-lrtf"])


WAYS = ("whole tasks, LPT", "each planned alone", "beside its like", "cuts alone")


def together(arguments):
    """Makespans of other plans over that of the plan for all tasks together, with links, memory and a host."""
    print("makespan over that of one plan for all tasks    " + "  ".join(f"{name:>18}" for name in WAYS))
    for title, models, where in cuts.settings():
        *others, own = cuts.makespans(models, where)
        print(f"{title:46}  " + "  ".join(f"{each / own:18.4f}" for each in others), flush=True)
    ratios = []
    for seed in range(arguments.instances):
        *others, own = cuts.makespans(*cuts.instance(random.Random(seed)))
        ratios.append([each / own for each in others])
    for name, found in zip(WAYS, zip(*ratios, strict=True), strict=True):
        FIGURES.add(f"one plan for all: times shorter than {name}, mean", mean(found), better="more", limit=1.0)
        most, least = max(found), min(found)
        print(
            f"{len(found)} random instances, {name:18}  mean {mean(found):.4f}  median {median(found):.4f}  "
            f"{least:.4f} to {most:.4f}",
            flush=True,
        )
    return all(mean(found) >= 1 for found in zip(*ratios, strict=True)) and min(each[2] for each in ratios) >= SAME


def ends(arguments):
    """Makespans with the cuts of the beginning over those with cuts that are chosen anew as each task ends."""
    found = []
    for seed in range(arguments.instances):
        kept_s, anew_s = cuts.anew(*cuts.instance(random.Random(seed)))
        found.append(kept_s / anew_s)
    print(
        f"{len(found)} random instances, cuts kept over cuts anew: mean {mean(found):.4f}  median {median(found):.4f}  "
        f"{min(found):.4f} to {max(found):.4f}; not judged",
        flush=True,
    )
    return True


EXPERIMENTS = {"bound": bound, "swaps": swaps, "together": together, "ends": ends, "decisions": decisions}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", help=f"of {', '.join(EXPERIMENTS)}; default: all")
    parser.add_argument("--instances", type=int, default=200, help="random ones (default 200)")
    parser.add_argument("--no-judge", action="store_true", help="exit code 0 whatever comes out")
    add_arguments(parser)
    arguments = parser.parse_args()
    unknown = set(arguments.experiments) - set(EXPERIMENTS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(EXPERIMENTS)}")
    good = True
    for name in arguments.experiments or EXPERIMENTS:
        well = EXPERIMENTS[name](arguments)
        print(f"{name}: {'within its limit' if well else 'NOT within its limit'}\n", flush=True)
        good &= well
    FIGURES.save(arguments.json)
    sys.exit(0 if good or arguments.no_judge else 1)


if __name__ == "__main__":
    main()
