"""Cuts of a task, and what stays on a device between its units. Both are chosen by predicted time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from hydra_engine.host import Wanted, share_out
from hydra_engine.planning.costs import DeviceCost, HostCost, TaskCost
from hydra_engine.planning.simulate import alike, bound_s, num_spread_units, predict_spreads, simulate
from hydra_engine.planning.world import wanted_homes
from hydra_engine.schedule import BACKWARD, FORWARD, FUSED, training_chain
from hydra_engine.texts import duration
from partitioners import Budget, LayerCost, forward_unit_bytes, shard_bytes, slab_bytes
from partitioners.cost import accumulated_bytes

# Steps of a simulation that predicts a cut. The first ones, in which nothing is loaded ahead, do not count.
CUT_STEPS, CUT_WARM_STEPS = 4, 2
# More tasks on a device than this wait for each other in the same way.
MOST_TASKS = 4
# Of cuts whose predictions differ by less, the one with fewest shards is taken.
SAME = 1.001
# So much of a device's memory a cut is predicted with, too: one that just fits may load a shard once more than the
# simulation has it, since boundaries and values that are kept stay a little longer than their units.
TIGHT = 0.95

# The cuts of all tasks together are chosen by simulations of so many units in all, which bounds the seconds that they
# take: about three. One simulation has so many: of a longer run, fewer steps of each task, in proportion.
MOST_UNITS, RUN_UNITS = 24_000, 800
# For each second that a run takes at least, so many units are simulated at most: a hundredth of its time.
UNITS_PER_S = 100
# A task is cut anew where the whole run is predicted to be so many times shorter: another cut has to be rehearsed.
LEAST_GAIN = 1.02
# Bytes of a layer that grow with the samples of a micro-batch.
_BY_SAMPLES = (
    *("input_bytes", "output_bytes", "saved_bytes", "peak_bytes", "forward_peak_bytes", "held_bytes", "target_bytes"),
)
# Of another number of micro-batches, so many cuts are tried.
MOST_OTHERS = 4
# Layers at home are chosen by so many simulations of a step, of about so many units in all: a third of a second. Tried
# are such shares of the shards for which devices have room, and one: the step waits for the lowest one's update.
MOST_HOMES, HOME_UNITS, HOME_SHARES = 40, 2_000, (1.0, 0.75, 0.5, 0.0)


@dataclass(frozen=True, kw_only=True)
class RunAtHand:
    """What a cut is chosen for: the tasks that share the devices, and what these and the host take."""

    device: DeviceCost  # each of them
    host: HostCost = field(default_factory=HostCost)
    num_devices: int = 1
    num_tasks: int = 1  # all taken to be like the one that is cut
    double_buffer: bool = True
    early_release: bool | str = False
    home_times: float = 0.0  # bytes of a home for each byte of gradients; 0: there are none
    home_update_bytes_per_s: float = math.inf  # as the budget's `update_bytes_per_s`, on the device of the home

    @property
    def num_busy(self) -> int:
        """Devices that have a task."""
        return min(self.num_devices, self.num_tasks)

    @property
    def tasks_per_device(self) -> int:
        return min(-(-self.num_tasks // self.num_busy), MOST_TASKS)

    @property
    def devices_per_task(self) -> int:
        """Devices that one task's homes may be on."""
        return self.num_devices // self.num_busy

    def at_home(self, task: TaskCost | Wanted) -> list[Collection[int]]:
        """Return, for each task of a device, the shards that find a home; all are taken to be like this one."""
        wanted = wanted_homes(task) if isinstance(task, TaskCost) else task
        if not wanted.shards or self.device.memory_bytes is None:
            return [()] * self.tasks_per_device
        return _at_home(wanted, self.tasks_per_device, self.devices_per_task, int(self.device.memory_bytes))


@lru_cache(maxsize=1024)
def _at_home(wanted: Wanted, num_tasks: int, num_devices: int, memory_bytes: int) -> list[Collection[int]]:
    names = [str(k) for k in range(num_tasks)]
    found = share_out([wanted._replace(task=name) for name in names], dict.fromkeys(range(num_devices), memory_bytes))
    return [found[name] for name in names]


class Load(NamedTuple):
    """Seconds for which one step of a task keeps each resource busy, at least."""

    device_s: float
    up_s: float
    down_s: float
    update_s: float

    def __str__(self) -> str:
        link_s = max(self.up_s, self.down_s)
        return f"device {duration(self.device_s)}, link {duration(link_s)}, host optimizer {duration(self.update_s)}"


class Way(NamedTuple):
    """What is chosen of a task for all tasks together."""

    boundaries: tuple[int, ...]  # cumulative end indices of the shards
    num_micro_batches: int  # of a step
    homes: int = 0  # lowest layers that are to be at home on devices


class PredictedCut(NamedTuple):
    """A cut, and what is predicted of it."""

    boundaries: tuple[int, ...]  # cumulative end indices of the shards
    step_s: float  # in which each of the tasks of a device takes a step, in the middle of a run
    load: Load  # of these steps
    num_tasks: int  # of a device
    num_cuts: int = 1  # that were compared
    fewest: tuple[int, float] | None = None  # shards of the cut with fewest, and its seconds; None: it is that one
    is_together: bool = False  # it was chosen for all tasks together, by the whole run
    homes: int = 0  # lowest layers that are to be at home on devices
    in_dram_s: float | None = None  # of a step with all homes in DRAM; None: they are there

    def __str__(self) -> str:
        """Say what is predicted, and why this cut was chosen."""
        shards = "1 shard" if len(self.boundaries) == 1 else f"{len(self.boundaries)} shards"
        shards += f", {self.homes} layers to be at home on devices" if self.homes else ""
        tasks = "" if self.num_tasks == 1 else f" of {self.num_tasks} such tasks on a device"
        text = f"{shards}: a step{tasks} takes {duration(self.step_s)} by prediction ({self.load})"
        if self.is_together:
            text += "; chosen for all tasks together: the last one is predicted to end sooner"
        if self.num_cuts > 1:
            text += f", the least of {self.num_cuts} cuts"
        if self.fewest is not None:
            text += f"; cut into {self.fewest[0]}, {duration(self.fewest[1])}"
        if self.in_dram_s is not None:
            text += f"; with all homes in DRAM, {duration(self.in_dram_s)}"
        return text


@dataclass(frozen=True, kw_only=True)
class CutChoice:
    """The cuts that a task may have in a run, and what predicts each of them."""

    costs: Sequence[LayerCost]  # of the layers, for one micro-batch
    candidates: Sequence[Sequence[int]]  # cumulative end indices of shards that fit; at least one cut
    budget: Budget  # with the micro-batches of a step and the rates of the host
    run: RunAtHand

    def cost(self, boundaries: Sequence[int], name: str = "", num_steps: int = 1, homes: int = 0) -> TaskCost:
        """Return what the task takes in a simulation, cut like this; `homes`: lowest layers that are to have some."""
        return cut_cost(name, self.costs, boundaries, self.budget, self.run, num_steps, homes)

    def in_micro_batches(self, number: int) -> CutChoice:
        """Return the same for steps of so many micro-batches, which take seconds and bytes in proportion."""
        share = self.budget.num_micro_batches / number
        costs = [_in_proportion(cost, share) for cost in self.costs]
        return replace(self, costs=costs, budget=self.budget.with_micro_batches(number))

    def likeliest(self) -> list[tuple[tuple[int, ...], TaskCost]]:
        """Return the few candidates with the lowest bounds that fit, and what the task takes with each."""
        tasks = [(tuple(ends), self.cost(ends)) for ends in self.candidates]
        most = self.run.device.memory_bytes
        fitting = [each for each in tasks if most is None or _most_bytes(each[1]) <= most]
        return sorted(fitting, key=lambda each: (least_round_s(each[1], self.run), len(each[0])))[:MOST_OTHERS]

    def predicted(self, boundaries: Sequence[int], homes: int = 0) -> PredictedCut:
        """Return what is predicted of a cut, be it a candidate or not."""
        task = self.cost(boundaries, homes=homes)
        return self._predicted(task, boundaries, max(round_s(task, self.run), least_round_s(task, self.run)))

    def fastest(self, homes: int = 0) -> PredictedCut:
        """Return the candidate whose steps take least time in a simulation, of equals the one with fewest shards.

        homes: so many of the lowest layers are to have homes on devices.
        """
        tasks = [self.cost(ends, homes=homes) for ends in self.candidates]
        found: dict[int, float] = {}
        bounds = [least_round_s(task, self.run) for task in tasks]
        for k in sorted(range(len(tasks)), key=lambda k: (bounds[k], tasks[k].num_shards)):
            if found and bounds[k] >= min(found.values()):
                break  # no schedule makes it, or those after it, better than one that was simulated
            enough_s = SAME * min(found.values(), default=math.inf)
            # A few steps may be through before what they leave to a slow host is.
            found[k] = max(round_s(tasks[k], self.run, enough_s), bounds[k])
        least_s = min(found.values())
        equals = [k for k, seconds in found.items() if seconds <= SAME * least_s]
        best = min(equals, key=lambda k: (len(self.candidates[k]), found[k]))
        few = min(range(len(tasks)), key=lambda k: (tasks[k].num_shards, bounds[k]))
        fewest = None
        if tasks[few].num_shards < tasks[best].num_shards:
            fewest = tasks[few].num_shards, self.predicted(self.candidates[few], homes).step_s
        chosen = self._predicted(tasks[best], self.candidates[best], found[best])
        return chosen._replace(num_cuts=len(tasks), fewest=fewest)

    def with_homes(self, own: PredictedCut) -> PredictedCut:
        """Return the candidate, with some of its lowest layers at home, whose steps take least time in a simulation.

        `own`: the best of those with all homes in DRAM, which is returned where none is much better. Those that promise
        most are simulated first, as many as the limits say: the same ones for the same figures.
        """
        run, tried = self.run, []
        for ends in map(tuple, self.candidates):
            there, *_ = run.at_home(self.cost(ends, homes=ends[-1]))
            room = sorted(there)
            for number in {max(1, math.ceil(share * len(room))) for share in HOME_SHARES if room}:
                task = self.cost(ends, homes=ends[room[number - 1]])
                tried.append((expected_round_s(task, run), len(ends), ends, -number, task))
        devices = [run.device] * run.devices_per_task
        spreads = predict_spreads(self.cost(own.boundaries), devices, host=run.host)
        in_dram_s = own.step_s / max(spread.speedup for spread in spreads)
        best, best_s, num_left = own, in_dram_s / LEAST_GAIN, HOME_UNITS
        for *_, ends, _, task in sorted(tried, key=lambda each: each[:4])[: MOST_HOMES // 2]:  # each one twice at most
            if num_left <= 0:
                break
            least_s = least_round_s(task, run)
            if least_s < best_s:
                num_left -= 2 * CUT_STEPS * run.tasks_per_device * len(task.unit_s)
                step_s = max(least_s, round_s(task, run, best_s))
                if step_s * SAME < best_s:
                    best, best_s = self._predicted(task, ends, step_s), step_s
                    best = best._replace(num_cuts=own.num_cuts, in_dram_s=in_dram_s)
        return best

    def beside(self, own: PredictedCut, name: str, num_steps: int, others: Sequence[TaskCost]) -> PredictedCut:
        """Return the candidate with which a task and these others end soonest; `own` where none is much better."""
        cuts = [own.boundaries, *(ends for ends in map(tuple, self.candidates) if ends != own.boundaries)]
        options = [[self.cost(ends, name, num_steps, own.homes) for ends in cuts], *([each] for each in others)]
        [k, *_] = WholeRun.of(self.run, options).worth_searching().best().chosen
        return own if k == 0 else self.predicted(cuts[k], own.homes)._replace(is_together=True)

    def _predicted(self, task: TaskCost, boundaries: Sequence[int], step_s: float) -> PredictedCut:
        number = self.run.tasks_per_device
        load = Load(*(number * seconds for seconds in load_of(task, self.run)))
        there, *_ = self.run.at_home(task)
        homes = boundaries[max(there)] if there else 0
        return PredictedCut(tuple(boundaries), step_s, load, number, homes=homes)


def cut_cost(
    name: str,
    costs: Sequence[LayerCost],
    boundaries: Sequence[int],
    budget: Budget,
    run: RunAtHand | None,
    num_steps: int,
    homes: int = 0,
) -> TaskCost:
    """Return what a task takes in a simulation, cut at these cumulative end indices.

    costs: of the layers, for one micro-batch. budget: with the micro-batches of a step and the rates of the host. run:
    a device's memory and link, by which is decided what forwards keep for their backwards; None: they keep nothing.
    homes: of so many of the lowest layers, shards are to have homes.
    """
    number, num = budget.num_micro_batches, len(boundaries)
    shards = [*pairwise([0, *boundaries])]
    layers = [costs[first:last] for first, last in shards]
    lowest = next((j for j, held in enumerate(layers) if any(cost.grad_bytes for cost in held)), num - 1)
    forward_s = [number * sum(cost.forward_s for cost in held) for held in layers]
    both_s = [own + number * sum(cost.backward_s for cost in held) for own, held in zip(forward_s, layers, strict=True)]
    seconds = {FORWARD: forward_s, FUSED: both_s, BACKWARD: both_s}
    chain = training_chain(num, lowest)
    changed = {j for j, held in enumerate(layers) if any(cost.changes_buffers for cost in held)}
    slabs = [slab_bytes(costs, *shard) for shard in shards]
    works = [shard_bytes(costs, *shard, number) - slab for shard, slab in zip(shards, slabs, strict=True)]
    gradients = [sum(cost.grad_bytes for cost in held) for held in layers]
    stepped = [sum(map(accumulated_bytes, held)) for held in layers]
    task = TaskCost(
        name=name,
        num_steps=num_steps,
        num_shards=num,
        unit_s=[seconds[kind][j] for kind, j in chain],
        load_bytes=slabs,
        boundary_bytes=[number * costs[first].input_bytes for first, _ in shards],
        gradient_bytes=gradients,
        update_s=[num_bytes / budget.update_bytes_per_s for num_bytes in stepped],
        work_bytes=works,
        forward_bytes=[forward_unit_bytes(costs, *shard, number) for shard in shards],
        num_micro_batches=number,
        ordered=frozenset((kind, j) for kind, j in chain if kind != BACKWARD and j in changed),
        early_release=run is not None and run.early_release,
    )
    if run is None or run.device.memory_bytes is None:
        return task
    at_home: Collection[int] = ()
    if homes:
        alone = [all(first <= k < last for c in costs[first:last] for k in c.shares_with) for first, last in shards]
        task = replace(
            task,
            homes=bisect_right(boundaries, homes),
            home_bytes=[run.home_times * gradients[j] * alone[j] for j in range(num)],
            move_bytes=[max(0.0, run.home_times - 1) * gradients[j] * alone[j] for j in range(num)],
            home_update_s=[num_bytes / run.home_update_bytes_per_s for num_bytes in stepped],
            frozen_bytes=[sum(max(0, cost.param_bytes - cost.grad_bytes) for cost in held) for held in layers],
        )
        at_home, *_ = run.at_home(task)
        slabs = [int(task.of_shard("frozen_bytes", j)) if j in at_home else slab for j, slab in enumerate(slabs)]
    graphs = [number * sum(c.saved_bytes for c in held) if _may_keep(held, number) else None for held in layers]
    graphs[-1] = None
    free = run.device.memory_bytes - _most_bytes(task, at_home) - max(slabs)
    free -= sum(task.of_shard("home_bytes", j) for j in at_home) / run.devices_per_task
    rate = run.device.load_bytes_per_s or math.inf
    kept = kept_within(slabs, graphs, forward_s, lowest, sum(task.unit_s), free, rate)
    return replace(task, graph_bytes=[(graphs[j] or 0) if j >= kept.keeps_from else 0 for j in range(num)])


def _in_proportion(cost: LayerCost, share: float) -> LayerCost:
    """Return a layer's cost for such a share of a micro-batch's samples; its parameters stay."""
    scaled = {name: math.ceil(share * getattr(cost, name)) for name in _BY_SAMPLES if getattr(cost, name) is not None}
    puts = tuple((name, math.ceil(share * num_bytes)) for name, num_bytes in cost.puts)
    return replace(cost, **scaled, puts=puts, forward_s=share * cost.forward_s, backward_s=share * cost.backward_s)


def _may_keep(layers: Sequence[LayerCost], number: int) -> bool:
    """As `TaskState.may_keep_graph`, from the layers' costs."""
    return not any(
        cost.draws_globally or cost.shares_with or cost.puts or cost.gets or (number > 1 and cost.changes_buffers)
        for cost in layers
    )


def _most_bytes(task: TaskCost, at_home: Collection[int] = ()) -> float:
    """Bytes of a device that a task's largest shard takes with its work."""
    names = ["frozen_bytes" if j in at_home else "load_bytes" for j in range(task.num_shards)]
    return max(task.of_shard(name, j) + task.of_shard("work_bytes", j) for j, name in enumerate(names))


def load_of(task: TaskCost, run: RunAtHand) -> Load:
    """Return the seconds for which a step keeps each resource busy, at least.

    Forwards that are kept are not run again. Shards that train are new after each update, and loaded at least once,
    but for those at home.
    """
    device, at_home = run.device, run.at_home(task)

    def in_dram(name: str, lowest: int = 0) -> float:
        """Add up a figure of the shards whose home is DRAM, of the device's tasks on average."""
        shards = [j for there in at_home for j in range(lowest, task.num_shards) if j not in there]
        return sum(task.of_shard(name, j) for j in shards) / len(at_home)

    up, down, update_s = in_dram("load_bytes", task.lowest_backward), in_dram("gradient_bytes"), in_dram("update_s")
    compute_s = task.least_step_s
    if task.homes:
        updates_s = sum(task.of_shard("home_update_s", j) for there in at_home for j in there) / len(at_home)
        compute_s += updates_s / run.devices_per_task
    return Load(
        device_s=compute_s / device.speed + len(task.unit_s) * device.unit_s,
        up_s=up / device.load_bytes_per_s if device.load_bytes_per_s else 0.0,
        down_s=down / device.store_bytes_per_s if device.store_bytes_per_s else 0.0,
        update_s=run.num_busy * update_s / run.host.optimizer_threads,
    )


def least_round_s(task: TaskCost, run: RunAtHand) -> float:
    """Return seconds in which no schedule lets every task of a device take a step.

    No resource is busy for less. A step waits for the first shard's update, then its load, and its units are one chain,
    after which the first shard's gradients leave.
    """
    load, number, device = load_of(task, run), run.tasks_per_device, run.device
    chain_s = load.device_s
    if task.lowest_backward == 0 and not any(0 in there for there in run.at_home(task)):
        chain_s += task.of_shard("update_s", 0)
        chain_s += task.of_shard("load_bytes", 0) / (device.load_bytes_per_s or math.inf)
        chain_s += task.of_shard("gradient_bytes", 0) / (device.store_bytes_per_s or math.inf)
    bounds = [chain_s, *(number * seconds for seconds in load)]
    if run.host.cores is not None:
        copies_s = load.up_s + load.down_s if device.copies_compute else 0.0
        on_cores_s = load.device_s + copies_s + load.update_s * run.host.optimizer_threads / run.num_busy
        bounds.append(number * run.num_busy * on_cores_s / run.host.cores)
    return float(f"{max(bounds):.9g}")  # equal sums of other shards differ in their last bits


def expected_round_s(task: TaskCost, run: RunAtHand) -> float:
    """Return about the seconds in which every task of a device takes a step, with layers at home.

    Of a task alone, what the host updates is hidden under the next forwards of layers at home, and nothing else.
    """
    least_s = least_round_s(task, run)
    if run.tasks_per_device > 1:
        return least_s
    [there], load = run.at_home(task), load_of(task, run)
    hidden_s = sum(s for (kind, j), s in zip(task.chain, task.unit_s, strict=True) if kind == FORWARD and j in there)
    return max(least_s, load.device_s + load.update_s - hidden_s)


def round_s(task: TaskCost, run: RunAtHand, enough_s: float = math.inf) -> float:
    """Simulate one device, with its share of the host: seconds in which each of its tasks takes a step, amid a run.

    With all of its memory and with `TIGHT` of it, whichever takes longer. Beyond `enough_s`, one of the two will do.
    """
    most = run.device.memory_bytes
    if most is None:
        return _round_s(task, run, None)
    # What is counted is an upper bound, which a rehearsal may have found to fit.
    all_of_it, tight = (max(share * most, _most_bytes(task)) for share in (1.0, TIGHT))
    seconds = _round_s(task, run, all_of_it)
    if tight < all_of_it and seconds <= enough_s:
        seconds = max(seconds, _round_s(task, run, tight))
    return seconds


def _round_s(task: TaskCost, run: RunAtHand, memory_bytes: float | None) -> float:
    task = replace(task, num_steps=CUT_STEPS, first_step_times=1.0, num_micro_batches=1)
    if run.num_busy > 1:
        task = replace(task, update_s=[run.num_busy * task.of_shard("update_s", j) for j in range(task.num_shards)])
    device = replace(run.device, memory_bytes=memory_bytes)
    tasks = [replace(task, name=str(k)) for k in range(run.tasks_per_device)]
    host = replace(run.host, cores=None if run.host.cores is None else run.host.cores / run.num_busy)
    devices = [device] * (run.devices_per_task if task.homes else 1)
    found = simulate(tasks, devices, host=host, double_buffer=run.double_buffer, record=True)
    ends_s = {placed.unit.step: placed.end_s for placed in found.schedule}  # of each step, the last one's
    return (ends_s[CUT_STEPS - 1] - ends_s[CUT_WARM_STEPS - 1]) / (CUT_STEPS - CUT_WARM_STEPS)


class PredictedRun(NamedTuple):
    """Cuts of all tasks, and what is predicted of the run."""

    chosen: tuple[int, ...]  # by task, the index of its cut
    makespan_s: float
    before_s: float  # with the first cut of each task
    num_simulated: int  # runs


@dataclass(frozen=True, kw_only=True)
class WholeRun:
    """Tasks that train together from now on, each with the cuts, and other ways, that it may have.

    Seconds of `best` are bounded by the number of units that it simulates, so that the same tasks get the same cuts.
    """

    options: Sequence[Sequence[TaskCost]]  # by task, of each cut that it may have; the first is the one it has
    devices: Sequence[DeviceCost]
    host: HostCost = field(default_factory=HostCost)
    double_buffer: bool = True
    most_units: int = MOST_UNITS  # that `best` simulates

    @classmethod
    def of(cls, run: RunAtHand, options: Sequence[Sequence[TaskCost]]) -> WholeRun:
        """Return the run of several tasks on the devices that each was planned for."""
        device = run.device
        if device.memory_bytes is not None:  # as `round_s`
            needed = max(_most_bytes(task) for cuts in options for task in cuts)
            device = replace(device, memory_bytes=max(device.memory_bytes, needed))
        return cls(options=options, devices=[device] * run.num_devices, host=run.host, double_buffer=run.double_buffer)

    def worth_searching(self) -> WholeRun:
        """Return the same, with no more units to simulate than the time that the run takes is worth."""
        least_s = bound_s([options[0] for options in self.options], self.devices)
        return replace(self, most_units=min(MOST_UNITS, int(UNITS_PER_S * least_s)))

    def makespan_s(self, chosen: Sequence[int]) -> float:
        """Predict the makespan under these cuts, of a run with as many steps as are simulated."""
        tasks = [options[k] for options, k in zip(self._shortened, chosen, strict=True)]
        return simulate(tasks, self.devices, host=self.host, double_buffer=self.double_buffer).makespan_s

    @cached_property
    def _shortened(self) -> list[list[TaskCost]]:
        """Options with fewer steps, by which one simulation has about `RUN_UNITS`."""
        num_units = sum(options[0].num_steps * len(options[0].unit_s) for options in self.options)
        share = min(1.0, RUN_UNITS / num_units)
        return [[_shortened_to(share, each) for each in options] for options in self.options]

    def best(self) -> PredictedRun:
        """Search for cuts with which the last task ends soonest, from the first ones on.

        Tasks that are alike get the same cut. First all tasks try their cuts of one number of shards after the other.
        Then, in turn, those with most to compute first, tasks try each of their cuts; one whose lower bound is no less
        than the makespan so far is not simulated. The search ends when a whole turn has changed nothing, or when
        `most_units` are simulated. Where one simulation has more, there is none, and the makespan is a lower bound.
        """
        first = [0] * len(self.options)
        if self.num_units(first) > self.most_units:
            least_s = self.least_s(first)
            return PredictedRun(tuple(first), least_s, least_s, 0)
        equal: dict[tuple[TaskCost, ...], list[int]] = {}
        for i, options in enumerate(self._shortened):
            equal.setdefault(tuple(replace(each, name="") for each in options), []).append(i)
        groups = sorted(equal.values(), key=self._compute_s, reverse=True)
        search = _Search(self, first)
        before_s = search.least_s
        numbers = {task.num_shards for options in self.options for task in options}
        search.turn([self._nearest(number) for number in sorted(numbers)])
        is_better = True
        while is_better:
            turns = [search.turn(self._changed(search.chosen, group)) for group in groups]
            is_better = any(turns)
        if search.least_s * LEAST_GAIN > before_s:
            return PredictedRun(tuple(first), before_s, before_s, search.num_simulated)
        return PredictedRun(tuple(search.chosen), search.least_s, before_s, search.num_simulated)

    def _nearest(self, number: int) -> list[int]:
        """For each task the first cut whose number of shards is nearest to this one."""
        return [
            min(range(len(options)), key=lambda k, options=options: abs(options[k].num_shards - number))  # type: ignore[misc]
            for options in self.options
        ]

    def _changed(self, chosen: Sequence[int], group: Sequence[int]) -> list[list[int]]:
        """The same cuts, but for a group of tasks, which has each of its own."""
        own = range(len(self.options[group[0]]))
        return [[k if i in group else each for i, each in enumerate(chosen)] for k in own]

    def _compute_s(self, group: Sequence[int]) -> float:
        return sum(each.num_steps * each.step_s for each in (self._shortened[i][0] for i in group))

    def num_units(self, chosen: Sequence[int]) -> int:
        """Count the units of a simulation."""
        tasks = [options[k] for options, k in zip(self._shortened, chosen, strict=True)]
        return sum(task.num_steps * len(task.unit_s) for task in tasks)

    def spread_units(self, chosen: Sequence[int]) -> dict[TaskCost, int]:
        """Count the units of simulations that predict how steps are spread, by a step's cost."""
        costs = {alike(options[k]) for options, k in zip(self.options, chosen, strict=True)}
        return {cost: num_spread_units(cost, len(self.devices)) for cost in costs}

    def least_s(self, chosen: Sequence[int]) -> float:
        """Seconds that no schedule is faster than: those for which the devices, or the host, are busy."""
        tasks = [options[k] for options, k in zip(self._shortened, chosen, strict=True)]
        host_s = sum(t.num_steps * t.of_shard("update_s", j) for t in tasks for j in range(t.num_shards))
        at_once = 1 if self.host.shares_dram else self.host.optimizer_threads
        return max(bound_s(tasks, self.devices), host_s / at_once)


def _shortened_to(share: float, task: TaskCost) -> TaskCost:
    """Return a task with a share of its steps, and of the bytes with which its homes come and go."""
    moves = [share * task.of_shard("move_bytes", j) for j in range(task.num_shards)] if task.homes else 0
    return replace(task, num_steps=max(2, round(share * task.num_steps)), move_bytes=moves)


class _Search:
    """The best cuts of a run so far, and what may still be simulated."""

    def __init__(self, run: WholeRun, chosen: list[int]) -> None:
        self._run, self.chosen = run, chosen
        self.least_s = run.makespan_s(chosen)
        self.num_simulated = 1
        self._spread = run.spread_units(chosen)  # known by now
        self._num_left = run.most_units - run.num_units(chosen) - sum(self._spread.values())

    def turn(self, tried: Sequence[list[int]]) -> bool:
        """Simulate cuts, the ones with the lowest bound first, and take the best; True if there is a better one."""
        before_s = self.least_s
        for least_s, chosen in sorted((self._run.least_s(each), each) for each in tried if each != self.chosen):
            spread = self._run.spread_units(chosen)
            num_units = self._run.num_units(chosen) + sum(spread[cost] for cost in spread.keys() - self._spread.keys())
            if least_s >= self.least_s or num_units > self._num_left:
                break
            self._num_left, self.num_simulated = self._num_left - num_units, self.num_simulated + 1
            self._spread |= spread
            makespan_s = self._run.makespan_s(chosen)
            if makespan_s * SAME < self.least_s:
                self.least_s, self.chosen = makespan_s, chosen
        return self.least_s < before_s


class Kept(NamedTuple):
    """What is kept of a step."""

    keeps_from: int  # the lowest shard whose forward's graph is kept for its backward; the number of shards: none is
    step_s: float  # of the device or its link, whichever takes longer


def kept_within(
    slabs: Sequence[int],
    graphs: Sequence[int | None],
    forward_s: Sequence[float],
    lowest: int,
    compute_s: float,
    free: float,
    rate: float,
) -> Kept:
    """Choose which graphs are worth keeping on a device, from figures by shard, and what a step then takes.

    Below the shard that the backward begins with, one after the other is needed again soonest. Of what is free, the
    first may keep graphs, which saves running their forwards again and loading them, and the next ones their slabs
    alone, which takes less and saves loads. A step takes as long as what the device computes or what its link carries,
    whichever is more; of equals the fewest graphs.

    graphs: None where a backward needs a forward of its own. lowest: that has a backward. compute_s: of a step that
    keeps nothing. free: bytes beside two slabs and a unit's work. rate: of the link.
    """
    below, keeps_from = range(len(slabs) - 2, lowest - 1, -1), len(slabs)
    best, loaded = Kept(keeps_from, math.inf), sum(slabs[j] for _, j in training_chain(len(slabs), lowest))
    for k in range(len(below) + 1):
        held = accumulate((slabs[j] for j in below[k:]), initial=0)  # in order, as far as there is room
        others = max((total for total in held if total <= free), default=0)
        step_s = max(compute_s, (loaded - others) / rate)
        if step_s < best.step_s:
            best = Kept(keeps_from, step_s)
        graph_bytes = graphs[below[k]] if k < len(below) else None
        if graph_bytes is None or slabs[below[k]] + graph_bytes > free:
            break
        keeps_from = below[k]
        free -= slabs[keeps_from] + graph_bytes
        compute_s -= forward_s[keeps_from]
        loaded -= slabs[keeps_from]
    return best
