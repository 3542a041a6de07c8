"""Makespans predicted by simulation, to a file, against later runs of the engine. See README.md.

python benchmarks/simulator/main.py                       # all of it; exit code 1 beyond the limit
python benchmarks/simulator/main.py --like "and goes"     # workloads with these words
python benchmarks/simulator/main.py predict costs.json    # what it does first, in a process of its own
python benchmarks/simulator/main.py together NUM          # first steps of tasks on so many devices, likewise
python benchmarks/simulator/main.py run NAME              # one run of a workload, likewise
python benchmarks/simulator/main.py bound                 # shares of the bound with stated rates: bound.py
python benchmarks/simulator/main.py homes                 # homes on devices, with those of an H200: homes.py
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev

import torch

from hydra_engine import (
    DeviceChange,
    DeviceCost,
    EmulatedDevice,
    HostCost,
    TaskCost,
    simulate,
)
from hydra_engine.schedule.units import Unit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import bound
import homes
from figures import Figures, add_arguments
from kinds import MEASURED_STEPS, MEMORY_BYTES, WARM_STEPS, Kind, measured, trained

LIMIT, MOST_BEYOND = 0.10, 2
CORES = 2
NUM_DRAWN = 9  # simulations, of which the middle one is the prediction
HANDOFF_S = 300e-6  # of a unit: threads that wake one another (benchmarks/overhead)

SMALL = Kind(192, (2, 4, 6), 8)
WIDE = Kind(384, (2, 3, 4, 6), 4)
WHOLE = Kind(192, (6,), 8)


@dataclass(frozen=True)
class Workload:
    """Tasks as (kind, steps), on so many devices with a link of so many bytes per second, or none.

    changes: of the devices, at fixed times.
    """

    tasks: tuple[tuple[Kind, int], ...]
    num_devices: int
    bandwidth: int | None
    policy: str = "sharded-lrtf"
    changes: tuple[DeviceChange, ...] = ()


WORKLOADS = {
    "one task, slow link": Workload(((WIDE, 12),), 1, 40_000_000),
    "two tasks, one device": Workload(((SMALL, 20), (SMALL, 20)), 1, 40_000_000),
    "three unequal tasks, two devices": Workload(((WIDE, 14), (SMALL, 20), (SMALL, 10)), 2, 100_000_000),
    "four equal tasks, two devices": Workload(((SMALL, 14),) * 4, 2, 100_000_000),
    "four tasks in one shard, two devices": Workload(((WHOLE, 16),) * 4, 2, 100_000_000),
    "very slow link, three tasks": Workload(((WIDE, 6), (WIDE, 6), (SMALL, 12)), 2, 20_000_000),
    "no link, four tasks, two devices": Workload(((SMALL, 16),) * 4, 2, None),
    "four tasks, first come first served": Workload(
        ((WIDE, 8), (SMALL, 14), (SMALL, 14), (WHOLE, 14)), 2, 100_000_000, "fifo"
    ),
    "two slow links, one device comes and goes": Workload(
        ((WIDE, 8), (WIDE, 8)), 2, 40_000_000, changes=(DeviceChange(4.0, 1, False), DeviceChange(12.0, 1, True))
    ),
    "three tasks, each device comes and goes": Workload(
        ((WIDE, 10), (SMALL, 20), (SMALL, 10)),
        2,
        40_000_000,
        changes=(
            DeviceChange(0.0, 1, False),
            DeviceChange(5.0, 1, True),
            DeviceChange(9.0, 0, False),
            DeviceChange(13.0, 0, True),
            DeviceChange(15.0, 0, False),
            DeviceChange(15.0, 1, False),
            DeviceChange(18.0, 1, True),
        ),
    ),
}


def seconds_of(num_tasks, num_devices):
    """Seconds of units by step, of steady units, and of updates, of tasks in one shard that keep their devices busy."""
    report, _ = trained([WHOLE.task(str(k), MEASURED_STEPS) for k in range(num_tasks)], num_devices, None)
    units, updates = defaultdict(list), []
    for span in report.spans:
        if span.lane == "compute":
            units[Unit.parse(span.label).step].append(span.end_s - span.start_s)
        elif span.lane == "update":
            updates.append(span.end_s - span.start_s)
    return units, [each for step in range(WARM_STEPS, MEASURED_STEPS) for each in units[step]], updates


def together(num_devices):
    """How long units take where devices work side by side, to stdout: two tasks for each, in a process of its own."""
    torch.set_num_threads(1)
    trained([SMALL.task("warm", 2)], 1, None)
    units, steady, _ = seconds_of(2 * num_devices, num_devices)
    steady_s = median(steady)
    excess_s = sum(mean(units[step]) - steady_s for step in range(WARM_STEPS))
    found = {"variation": stdev(map(math.log, steady)), "first_step_times": 1 + max(0.0, excess_s) / steady_s}
    print(json.dumps(found | {"steady_s": steady_s}))


def in_own_process(*arguments):
    """What this program prints with other arguments."""
    done = subprocess.run([sys.executable, __file__, *map(str, arguments)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def shared(num_devices):
    """What devices that work side by side do to units: how much they vary, the first step, and the cores there are.

    Cores are fewer than the machine's where devices wait for one memory and interpreter: of what a unit and an update
    take by themselves, what is done in the time that a unit takes beside another.
    """
    beside = in_own_process("together", num_devices)
    steady_s, cores = beside.pop("steady_s"), CORES
    if num_devices > 1:
        _, steady, updates = seconds_of(1, 1)
        cores = min(CORES, num_devices * (median(steady) + median(updates)) / steady_s)
    return beside | {"cores": cores}


def predict(path, like=""):
    """Predict the makespans of workloads with these words from measured costs, to a file."""
    torch.set_num_threads(1)
    trained([SMALL.task("warm", 2)], 1, None)
    workloads = {name: workload for name, workload in WORKLOADS.items() if like in name}
    beside = {number: shared(number) for number in sorted({each.num_devices for each in workloads.values()})}
    costs, predictions = {}, {"beside": beside}
    for name, workload in workloads.items():
        found = beside[workload.num_devices]
        tasks = []
        for k, (kind, num_steps) in enumerate(workload.tasks):
            key = (kind, workload.bandwidth)
            if key not in costs:
                costs[key] = measured(*key)
            first = found["first_step_times"]
            tasks.append(TaskCost(name=str(k), num_steps=num_steps, first_step_times=first, **costs[key]))
        speed = EmulatedDevice(MEMORY_BYTES, bandwidth=workload.bandwidth).ceilings().link_bytes_per_s
        device = DeviceCost(
            load_bytes_per_s=speed,
            store_bytes_per_s=speed,
            unit_s=HANDOFF_S,
            variation=found["variation"],
            memory_bytes=MEMORY_BYTES,
            copies_compute=workload.bandwidth is None,
        )
        host = HostCost(optimizer_threads=max(1, CORES - workload.num_devices), cores=found["cores"])
        devices = [device] * workload.num_devices
        drawn = [
            simulate(tasks, devices, workload.policy, host=host, changes=workload.changes, seed=seed)
            for seed in range(NUM_DRAWN)
        ]
        drawn.sort(key=lambda each: each.makespan_s)
        middle = drawn[NUM_DRAWN // 2]
        predictions[name] = {"makespan_s": middle.makespan_s, "bound_s": middle.bound_s, "busy": middle.busy_share}
    Path(path).write_text(json.dumps(predictions, indent=1))


def run(name):
    """Print the makespan of one run of a workload."""
    workload = WORKLOADS[name]
    torch.set_num_threads(1)
    trained([SMALL.task("warm", 2)], 1, None)
    tasks = [kind.task(str(k), num_steps) for k, (kind, num_steps) in enumerate(workload.tasks)]
    report, _ = trained(tasks, workload.num_devices, workload.bandwidth, workload.policy, workload.changes)
    print(json.dumps(report.makespan_s))


def main():
    if sys.argv[1:2] == ["bound"]:
        bound.main(sys.argv[2:])
    if sys.argv[1:2] == ["homes"]:
        homes.main(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=("all", "predict", "together", "run"))
    parser.add_argument("argument", nargs="?", help="the file to write, or the workload to run")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each workload (default 5)")
    parser.add_argument("--like", default="", help="only workloads with these words in their name")
    parser.add_argument("--no-judge", action="store_true", help="exit code 0 whatever comes out")
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.what == "predict":
        predict(arguments.argument, arguments.like)
        return
    if arguments.what == "together":
        together(int(arguments.argument))
        return
    if arguments.what == "run":
        run(arguments.argument)
        return
    path = Path(tempfile.mkdtemp()) / "predictions.json"
    subprocess.run([sys.executable, __file__, "predict", str(path), "--like", arguments.like], check=True)
    predictions = json.loads(path.read_text())
    print(f"predictions: {path}")
    for num_devices, found in predictions.pop("beside").items():
        print(
            f"{num_devices} at a time: {found['cores']:.2f} cores, units vary by {found['variation']:.1%}, "
            f"a first step takes {found['first_step_times']:.2f} times as long"
        )
    print(f"{'workload':38} predicted  median of {arguments.repeats} runs (range)    error   bound  busy", flush=True)
    errors, found = [], Figures("simulator")
    for name, predicted in predictions.items():
        made = []
        for _ in range(arguments.repeats):
            made.append(in_own_process("run", name))
        error = predicted["makespan_s"] / median(made) - 1
        errors.append(error)
        each = [abs(predicted["makespan_s"] / seconds - 1) for seconds in made]
        found.add(f"{name}: off by", each, better="less")
        print(
            f"{name:38} {predicted['makespan_s']:7.2f} s  {median(made):7.2f} s ({min(made):.2f} to {max(made):.2f})  "
            f"{error:+8.1%}  {predicted['bound_s']:5.2f}  {predicted['busy']:4.0%}",
            flush=True,
        )
    found.add("off by, worst workload", max(map(abs, errors)), better="less")
    found.save(arguments.json)
    good = sum(abs(error) <= LIMIT for error in errors)
    print(f"{good} of {len(errors)} workloads within {LIMIT:.0%}; all but {MOST_BEYOND} at least")
    sys.exit(0 if good >= len(errors) - MOST_BEYOND or arguments.no_judge else 1)


if __name__ == "__main__":
    main()
