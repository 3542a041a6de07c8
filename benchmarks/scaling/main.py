"""Strong scaling in devices, tasks and model size, and devices that come and go. All on the CPU; see README.md.

python benchmarks/scaling/main.py                   # every experiment; exit code 1 where a limit is missed
python benchmarks/scaling/main.py devices tail      # some of them
python benchmarks/scaling/main.py --write           # also put the tables into README.md

`measured` runs the engine. All others are simulated with the very scheduler, from costs that are measured here first.
"""

import argparse
import csv
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from hydra_engine import DeviceChange, DeviceCost, HostCost, TaskCost, simulate
from hydra_engine.adaptive import NoiseLevel
from hydra_engine.schedule.units import BACKWARD, FORWARD

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "simulator")]
import kinds  # noqa: E402
from figures import Figures, add_arguments, put, table  # noqa: E402
from kinds import Kind  # noqa: E402

GOAL = 0.95  # of the bound, for 64 tasks on 8 devices
LINK_BYTES_PER_S = 400_000_000
MEMORY_BYTES = 2**30
UNIT_S = 300e-6  # of each unit beside its own: benchmarks/overhead
NUM_MICRO = 6
KINDS = {
    "narrow": Kind(96, (2, 4, 6), 12, NUM_MICRO),
    "middle": Kind(192, (2, 4, 6), 12, NUM_MICRO),
    "wide": Kind(384, (2, 3, 4, 6), 12, NUM_MICRO),
}
STEPS = (10, 30)  # of a task, from and to
NUM_TASKS, NUM_DEVICES = 64, (1, 2, 4, 8, 16, 32, 64)
MANY_TASKS, MANY_DEVICES, MANY_STEPS = 2_000, 1_000, (4, 8)
TRACE = HERE / "trace.csv"
TRACE_DEVICES = 12  # most of the recording
TRACE_HOURS = 16  # of the recording that a run takes where all devices stay
FIGURES = Figures("scaling")


# -- costs


class Costs:
    """What tasks take, measured once: each kind alone for a few steps, on one emulated device."""

    def __init__(self):
        self._by_kind = {}

    def task(self, name, kind, num_steps, num_micro_batches=NUM_MICRO):
        """A task without what is paid once: its set-up, its end, and a slower first step."""
        if kind not in self._by_kind:
            if not self._by_kind:
                kinds.trained([KINDS[kind].task("warm", 2)], 1, None)
            self._by_kind[kind] = kinds.measured(KINDS[kind], LINK_BYTES_PER_S) | {"setup_s": 0.0, "end_s": 0.0}
        figures = self._by_kind[kind]
        return TaskCost(name=name, num_steps=num_steps, num_micro_batches=num_micro_batches, **figures)

    def mixed(self, number, steps=STEPS, num_micro_batches=NUM_MICRO):
        """Tasks of all kinds, of unequal numbers of steps; the longest come first in no order."""
        rng = random.Random(0)
        names = list(KINDS)
        return [self.task(str(k), names[k % len(names)], rng.randint(*steps), num_micro_batches) for k in range(number)]


COSTS = Costs()


def run(tasks, number, changes=(), *, threads=None, memory_bytes=None, record=False):
    """Simulate tasks on so many equal devices, each with a link of its own.

    threads: of the host's optimizer; None: one for each device. memory_bytes: as `DeviceCost`'s; None: nothing stays on
    a device, every unit's shard is loaded, and every backward runs its forward again.
    """
    device = DeviceCost(
        load_bytes_per_s=LINK_BYTES_PER_S,
        store_bytes_per_s=LINK_BYTES_PER_S,
        unit_s=UNIT_S,
        memory_bytes=memory_bytes,
    )
    host = HostCost(optimizer_threads=threads or number)
    return simulate(tasks, [device] * number, host=host, changes=changes, record=record)


def share(found):
    return found.bound_s / found.makespan_s


def num_used(found):
    return sum(device.num_units > 0 for device in found.devices)


def elsewhere(found):
    """Of the backwards of a recorded simulation, those on a device that did not run their forward."""
    forwards, away = {}, []
    for placed in found.schedule:
        task, step, kind, shard, part = (
            getattr(placed.unit, each) for each in ("task", "step", "kind", "shard", "part")
        )
        if kind == FORWARD:
            forwards[task, step, shard, part] = placed.device
        elif kind == BACKWARD:
            away.append(forwards[task, step, shard, part] != placed.device)
    return sum(away) / len(away)


def show(name, title, head, rows, *, writes):
    """Print a table, and put it into README.md where that is asked for."""
    text = table(head, rows)
    print(f"\n{title}\n{text}", flush=True)
    if writes:
        put(HERE / "README.md", name, text)


# -- experiments


def measured(arguments):
    """Runs of the engine: equal tasks, and one task alone, on as many devices as there are cores."""
    most = max(2, min(4, os.cpu_count() or 1))
    numbers = [number for number in (1, 2, 4) if number <= most]
    kind, seconds = KINDS["middle"], {}

    def once(num_tasks, num_devices):
        tasks = [kind.task(str(k), arguments.steps) for k in range(num_tasks)]
        report, _ = kinds.trained(tasks, num_devices, None)
        return report

    once(1, 1)  # what is loaded and touched for the first time
    for _ in range(arguments.repeats):
        for num_tasks in (4, 1):
            for number in numbers:
                seconds.setdefault((num_tasks, number), []).append(once(num_tasks, number).makespan_s)
    rows = []
    for (num_tasks, number), found in seconds.items():
        ratios = [one / many for one, many in zip(seconds[num_tasks, 1], found, strict=True)]
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append((num_tasks, number, f"{median(found):.2f} s", spread))
        if number == 2:
            name = "4 tasks" if num_tasks == 4 else f"one task of {NUM_MICRO} micro-batches"
            FIGURES.add(f"{name}, measured: times shorter on 2 devices", ratios, better="more")
    parts = {placed.unit.part for placed in once(1, 3).schedule}
    name = f"one task of {NUM_MICRO} micro-batches, measured: parts on 3 devices"
    FIGURES.add(name, len(parts), better="more", limit=3)
    title = f"runs of the engine, {os.cpu_count()} cores; a task of {NUM_MICRO} micro-batches, on 3: {len(parts)} parts"
    show("measured", title, ("tasks", "devices", "makespan", "times shorter"), rows, writes=arguments.write)
    return parts == {0, 1, 2}


def devices(arguments):
    """Makespans of the same tasks on more and more devices, and of many tasks on a thousand."""
    tasks, rows, one_s = COSTS.mixed(NUM_TASKS), [], None
    for number in NUM_DEVICES:
        found, few = run(tasks, number), run(tasks, number, threads=min(number, 8))
        kept = run(tasks, number, memory_bytes=MEMORY_BYTES, record=True)
        one_s = one_s or found.makespan_s
        rows.append(row(len(tasks), number, found, one_s, few, kept))
        if number == 8:
            name = f"{len(tasks)} tasks, 8 devices, simulated: share of the bound"
            FIGURES.add(name, share(found), better="more", limit=GOAL)
            good = share(found) >= GOAL
            name = f"{len(tasks)} tasks, 8 devices, simulated: backwards without their forward's device"
            FIGURES.add(name, elsewhere(kept), better="less")
    many = COSTS.mixed(MANY_TASKS, MANY_STEPS)
    found, few = run(many, MANY_DEVICES), run(many, MANY_DEVICES, threads=8)
    rows.append(row(MANY_TASKS, MANY_DEVICES, found, None, few, None))
    name = f"{MANY_TASKS:,} tasks, {MANY_DEVICES:,} devices, simulated: share of the bound"
    FIGURES.add(name, share(found), better="more")
    head = ("tasks", "devices", "makespan", "times shorter", "of the bound", "busy", "8 optimizer threads")
    head += ("graphs kept: makespan, of the bound", "backwards elsewhere")
    show("devices", "simulated, more devices", head, rows, writes=arguments.write)
    return good


def row(num_tasks, number, found, one_s, few, kept):
    """A row of `devices`. few: the same where the host has 8 optimizer threads. kept: where graphs may stay."""
    shorter = "" if one_s is None else f"{one_s / found.makespan_s:.2f}"
    return (
        f"{num_tasks:,}",
        f"{number:,}",
        f"{found.makespan_s:.2f} s",
        shorter,
        f"{share(found):.1%}",
        f"{found.busy_share:.0%}",
        f"{few.makespan_s:.2f} s",
        "" if kept is None else f"{kept.makespan_s:.2f} s, {share(kept):.1%}",
        "" if kept is None else f"{elsewhere(kept):.0%}",
    )


def tasks(arguments):
    """More and more tasks on eight devices: what of the devices' time they fill, with one micro-batch and with six."""
    rows = []
    for number in (1, 2, 4, 6, 8, 12, 16, 32, 64):
        whole, spread = (run(COSTS.mixed(number, num_micro_batches=micro), 8) for micro in (1, NUM_MICRO))
        rows.append((number, *(f"{each.makespan_s:.2f} s, {each.busy_share:.0%}" for each in (whole, spread))))
        if number == 4:
            ratio = whole.makespan_s / spread.makespan_s
            FIGURES.add("4 tasks, 8 devices, simulated: times shorter if steps are spread", ratio, better="more")
    head = ("tasks", "one micro-batch: makespan, busy", f"{NUM_MICRO} micro-batches: makespan, busy")
    show("tasks", "simulated, 8 devices, more tasks", head, rows, writes=arguments.write)
    return True


def tail(arguments):
    """Fewer tasks than devices: one task, and 64 on up to a thousand."""
    rows, used, one_s = [], {}, None
    for number in (1, 2, 3, 4, 6, 8):
        whole, spread = (run([COSTS.task("a", "middle", 20, micro)], number) for micro in (1, NUM_MICRO))
        one_s = one_s or whole.makespan_s
        used[number] = num_used(spread)
        rows.append(tail_row(1, number, one_s, whole, spread))
        if number == 3:
            name = f"one task of {NUM_MICRO} micro-batches, 3 devices, simulated: times shorter"
            FIGURES.add(name, one_s / spread.makespan_s, better="more")
            FIGURES.add("devices of 3 that one task uses", used[3], better="more", limit=3)
    number = MANY_DEVICES // 8
    one_s = run(COSTS.mixed(NUM_TASKS, num_micro_batches=1), 1).makespan_s
    for many in (NUM_TASKS, number, MANY_DEVICES):
        whole, spread = (run(COSTS.mixed(NUM_TASKS, num_micro_batches=micro), many) for micro in (1, NUM_MICRO))
        rows.append(tail_row(NUM_TASKS, many, one_s, whole, spread))
    head = ("tasks", "devices", "one micro-batch", f"{NUM_MICRO} micro-batches", "devices used")
    show("tail", "simulated, fewer tasks than devices: times shorter than on one", head, rows, writes=arguments.write)
    return used[3] == 3


def tail_row(num_tasks, number, one_s, whole, spread):
    shorter = [f"{one_s / each.makespan_s:.2f}" for each in (whole, spread)]
    return f"{num_tasks:,}", f"{number:,}", *shorter, f"{num_used(whole)} and {num_used(spread)}"


def sizes(arguments):
    """Equal tasks of each kind on eight devices."""
    rows = []
    for name, kind in KINDS.items():
        many = [COSTS.task(str(k), name, 20) for k in range(16)]
        one, found = run(many, 1), run(many, 8)
        unit_s = many[0].step_s / len(many[0].unit_s)
        shorter = f"{one.makespan_s / found.makespan_s:.2f}"
        rows.append((kind.width, f"{1e3 * unit_s:.1f} ms", f"{found.makespan_s:.2f} s", shorter, f"{share(found):.1%}"))
        figure = f"16 tasks of width {kind.width}, 8 devices, simulated: share of the bound"
        FIGURES.add(figure, share(found), better="more")
    head = ("width", "a unit, mean", "makespan", "times shorter than on one", "of the bound")
    show("sizes", "simulated, 16 equal tasks, 8 devices", head, rows, writes=arguments.write)
    return True


# -- a shared cluster


def changes(hour_s, path=TRACE):
    """The recording's changes, an hour of which takes so many seconds. The last device goes first."""
    with path.open() as lines:
        rows = [(int(row["second"]), int(row["devices"])) for row in csv.DictReader(lines)]
    found, before = [], TRACE_DEVICES
    for second, number in rows:
        who = range(min(before, number), max(before, number))
        found += [DeviceChange(hour_s * second / 3600, device, number > before) for device in who]
        before = number
    return found


def since(begun_s, all_changes):
    """The changes of what begins in the middle: who is out goes at once."""
    out = {}
    for change in all_changes:
        if change.at_s <= begun_s:
            out[change.device] = not change.is_in
    later = [change._replace(at_s=change.at_s - begun_s) for change in all_changes if change.at_s > begun_s]
    return [DeviceChange(0.0, device, False) for device, is_out in out.items() if is_out] + later


# Of gradients: the noise beside the signal in a batch of the initial size, which grows as a model learns; and steps of
# that size that each stretch needs.
NOISE = ((0.5, 8), (2.0, 8), (8.0, 8), (32.0, 8))
LARGER = (1, 2, 4, 8)  # times the initial batch


def adapted(name, kind, noise, num_steps, times):
    """A stretch of a task with batches so many times as large: longer steps, and fewer by what they are worth."""
    task = COSTS.task(name, kind, 1, NUM_MICRO * times)
    gain = NoiseLevel(sqr=1.0, var=noise, initial_batch_size=KINDS[kind].batch_size).gain(
        KINDS[kind].batch_size * times
    )
    boundaries = [times * each for each in task.boundary_bytes]
    return replace(
        task,
        unit_s=[times * each for each in task.unit_s],
        boundary_bytes=boundaries,
        graph_bytes=[times * each for each in task.graph_bytes],
        num_steps=max(1, round(num_steps / gain)),
    )


def stretch(number, noise, num_steps, times):
    return [adapted(str(k), "middle", noise, num_steps, times) for k in range(number)]


def adaptive_run(number, all_changes, *, adapts):
    """Seconds of a run, stretch after stretch, and the batch of each: the one that is predicted to be through first.

    What is predicted has all devices: nobody knows who will go.
    """
    at_s, chosen = 0.0, []
    for noise, num_steps in NOISE:
        sizes = LARGER if adapts else LARGER[:1]
        times = min(sizes, key=lambda times: run(stretch(number, noise, num_steps, times), TRACE_DEVICES).makespan_s)
        found = run(stretch(number, noise, num_steps, times), TRACE_DEVICES, since(at_s, all_changes))
        at_s, chosen = at_s + found.makespan_s, [*chosen, times]
    return at_s, chosen


WORKLOADS = {
    "64 tasks": (NUM_TASKS, NUM_MICRO),
    "64 tasks of one micro-batch": (NUM_TASKS, 1),
    "8 tasks": (8, NUM_MICRO),
    "4 tasks": (4, NUM_MICRO),
    "4 tasks of one micro-batch": (4, 1),
}


def shared(arguments):
    """Devices that come and go as recorded, shortened so that a run where all stay takes `TRACE_HOURS` of it."""
    rows = []
    for title, (number, micro) in WORKLOADS.items():
        many = COSTS.mixed(number, num_micro_batches=micro)
        stay = run(many, TRACE_DEVICES)
        come = run(many, TRACE_DEVICES, changes(stay.makespan_s / TRACE_HOURS))
        shown = [f"{each.makespan_s:.2f} s, {share(each):.1%}" for each in (stay, come)]
        rows.append((title, *shown, f"{come.busy_share:.0%}"))
        if title == "64 tasks":
            FIGURES.add("64 tasks, devices come and go as recorded, simulated: busy", come.busy_share, better="more")
    head = ("", "all stay: makespan, of the bound", "as recorded: makespan, of the bound", "busy while in")
    show("shared", f"simulated, {TRACE_DEVICES} devices of a shared cluster", head, rows, writes=arguments.write)
    return True


def adaptive(arguments):
    """The same with batches that grow as the noise does, beside fixed ones."""
    rows = []
    for number in (1, 4, NUM_TASKS):
        all_stay_s, _ = adaptive_run(number, [], adapts=False)
        seconds = []
        for some in ([], changes(all_stay_s / TRACE_HOURS)):
            for adapts in (False, True):
                found_s, chosen = adaptive_run(number, some, adapts=adapts)
                seconds.append(found_s)
        ratio = seconds[2] / seconds[3]
        rows.append((number, " ".join(map(str, chosen)), *(f"{each:.2f} s" for each in seconds), f"{ratio:.2f}"))
        name = f"{number} adaptive, devices come and go as recorded, simulated: times shorter than fixed"
        FIGURES.add(name, ratio, better="more")
    head = ("tasks", "batches, times the first", "fixed, all stay", "adaptive, all stay")
    head += ("fixed, as recorded", "adaptive, as recorded", "times shorter")
    show("adaptive", f"simulated, batches that adapt, {TRACE_DEVICES} devices", head, rows, writes=arguments.write)
    return True


EXPERIMENTS = {
    "measured": measured,
    "devices": devices,
    "tasks": tasks,
    "tail": tail,
    "sizes": sizes,
    "shared": shared,
    "adaptive": adaptive,
}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", help=f"of {', '.join(EXPERIMENTS)}; default: all")
    parser.add_argument("--repeats", type=int, default=5, help="of what is measured, in turns (default 5)")
    parser.add_argument("--steps", type=int, default=10, help="of a task that is measured (default 10)")
    parser.add_argument("--no-judge", action="store_true", help="exit code 0 whatever comes out")
    add_arguments(parser, writes=True)
    given = parser.parse_args(arguments)
    unknown = [name for name in given.experiments if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"experiments: {unknown[0]!r}, known: {', '.join(EXPERIMENTS)}")
    torch.set_num_threads(1)
    good = True
    for name in given.experiments or EXPERIMENTS:
        well = EXPERIMENTS[name](given)
        print(f"{name}: {'within its limit' if well else 'NOT within its limit'}", flush=True)
        good &= well
    FIGURES.save(given.json)
    return 0 if good or given.no_judge else 1


if __name__ == "__main__":
    sys.exit(main())
