"""Tasks with layers, for plans that are made for each of them or for all together; and the ways to plan them."""

import heapq
import random
from dataclasses import dataclass, replace

from hydra_engine import DeviceCost, HostCost, simulate
from hydra_engine.planning.cuts import CutChoice, RunAtHand, WholeRun
from partitioners import Budget, Fastest, LayerCost


@dataclass(frozen=True, kw_only=True)
class Layers:
    """A model of equal layers with its steps: bytes of a layer's parameters in bfloat16, seconds of its forward."""

    num_layers: int
    param_bytes: int
    forward_s: float
    num_steps: int

    def costs(self):
        boundary, saved = self.param_bytes // 16, self.param_bytes
        return [
            LayerCost(
                index=k,
                name="layer",
                param_bytes=self.param_bytes,
                grad_bytes=self.param_bytes,
                buffer_bytes=0,
                input_bytes=boundary,
                output_bytes=boundary,
                saved_bytes=saved,
                peak_bytes=saved + self.param_bytes,
                forward_s=self.forward_s,
                backward_s=2 * self.forward_s,
                draws_random=False,
                draws_globally=False,
                changes_input=False,
                changes_buffers=False,
                shares_with=(),
                forward_peak_bytes=2 * boundary,
            )
            for k in range(self.num_layers)
        ]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Equal devices, and what a host does for all of them."""

    num_devices: int
    memory_bytes: int
    link_bytes_per_s: float
    update_bytes_per_s: float  # of bfloat16 parameters
    unit_s: float = 450e-6

    @property
    def host(self):
        return HostCost(optimizer_threads=1, shares_dram=True)

    @property
    def device(self):
        link = self.link_bytes_per_s
        return DeviceCost(
            load_bytes_per_s=link, store_bytes_per_s=link, unit_s=self.unit_s, memory_bytes=self.memory_bytes
        )

    def choice(self, model, num_tasks, num_devices):
        """What chooses a model's cut, beside so many that are like it."""
        budget = Budget(
            memory_bytes=self.memory_bytes,
            link_bytes_per_s=self.link_bytes_per_s,
            update_bytes_per_s=self.update_bytes_per_s,
            unit_s=self.unit_s,
        )
        run = RunAtHand(device=self.device, host=self.host, num_devices=num_devices, num_tasks=num_tasks)
        return CutChoice(
            costs=model.costs(), candidates=Fastest().candidates(model.costs(), budget), budget=budget, run=run
        )


def random_model(rng, num_steps):
    """A model of any proportion between compute, link and host."""
    num_bytes = int(rng.uniform(2e7, 2e8))
    # From as long as its update takes to a fourth of that, for the three passes of a step.
    return Layers(
        num_layers=rng.choice((6, 8, 12, 16)),
        param_bytes=num_bytes,
        forward_s=num_bytes / 14e9 * rng.uniform(0.25, 1.5) / 3,
        num_steps=num_steps,
    )


def machine(num_devices, models):
    """Devices that hold two thirds of the largest model, and a host that keeps up with them as it does with one."""
    largest = max(model.num_layers * model.param_bytes for model in models)
    return Machine(
        num_devices=num_devices,
        memory_bytes=int(1.3 * largest),
        link_bytes_per_s=50e9,
        update_bytes_per_s=14e9 * num_devices,  # 28 bytes of DRAM per parameter at 200 GB/s, for each device
    )


def makespans(models, where):
    """Makespans: whole tasks by LPT, tasks that are each planned alone, each beside others like it, and together.

    Together twice: the cuts alone, and the cuts with as many micro-batches as let steps be spread over more devices.
    With LPT each device has its share of the host.
    """
    alone = {model: where.choice(model, 1, 1) for model in dict.fromkeys(models)}
    cuts = {model: choice.fastest().boundaries for model, choice in alone.items()}
    at_once = min(where.num_devices, len(models))
    single = replace(where, num_devices=1, update_bytes_per_s=where.update_bytes_per_s / at_once)
    own = {model: single.choice(model, 1, 1) for model in dict.fromkeys(models)}
    own = {model: choice.cost(choice.fastest().boundaries) for model, choice in own.items()}
    own_s = [simulated([own[model]], [model], single) for model in models]
    free_s = [0.0] * where.num_devices
    for seconds in sorted(own_s, reverse=True):  # the longest first (Graham 1969)
        heapq.heappush(free_s, heapq.heappop(free_s) + seconds)
    lpt_s = max(free_s)
    by_itself = simulated([alone[model].cost(cuts[model], str(k)) for k, model in enumerate(models)], models, where)
    choices = {model: where.choice(model, len(models), where.num_devices) for model in alone}
    options = []
    for k, model in enumerate(models):
        own = choices[model].fastest().boundaries
        ends = [own, *(each for each in choices[model].candidates if tuple(each) != tuple(own))]
        options.append([replace(choices[model].cost(each, str(k)), num_steps=model.num_steps) for each in ends])
    before_s = simulated([each[0] for each in options], models, where)
    run = choices[models[0]].run
    # Where all are equal, so is the choice of each.
    cuts_s = before_s if len(set(models)) == 1 else together_s(run, options, models, where, before_s)
    if where.num_devices == 1:
        return lpt_s, by_itself, before_s, cuts_s, cuts_s
    for k, model in enumerate(models):
        for number in numbers(where.num_devices):
            likeliest = choices[model].in_micro_batches(number).likeliest()
            options[k] += [replace(cost, name=str(k), num_steps=model.num_steps) for _, cost in likeliest]
    return lpt_s, by_itself, before_s, cuts_s, together_s(run, options, models, where, before_s)


def numbers(num_devices):
    """Numbers of micro-batches that a plan tries where a step has one."""
    return sorted({*(2**k for k in range(1, num_devices.bit_length())), num_devices})


def together_s(run, options, models, where, before_s):
    """Makespan with the best options for all; before_s: with the first of each."""
    found = WholeRun.of(run, options).best()
    chosen = [each[k] for each, k in zip(options, found.chosen, strict=True)]
    return simulated(chosen, models, where) if any(found.chosen) else before_s


LONGER = 4  # times as many steps, of which those that begin again are a smaller share


def anew(models, where):
    """Makespans with the cuts of the beginning, and with cuts that are chosen anew as each task ends.

    Steps in progress then begin again, in both; the change of a cut takes no time.
    """
    choices = [where.choice(model, len(models), where.num_devices) for model in models]
    steps = [LONGER * model.num_steps for model in models]
    cuts = _chosen(choices, [tuple(choice.fastest().boundaries) for choice in choices], steps)
    return tuple(_with_ends(choices, cuts, steps, where, is_anew=is_anew) for is_anew in (False, True))


def _chosen(choices, own, steps):
    """The cuts that are best for all; `own`: those that they have."""
    cuts = [
        [ends, *(each for each in map(tuple, choice.candidates) if each != ends)]
        for choice, ends in zip(choices, own, strict=True)
    ]
    options = [
        [choice.cost(ends, str(k), num_steps) for ends in cuts[k]]
        for k, (choice, num_steps) in enumerate(zip(choices, steps, strict=True))
    ]
    found = WholeRun.of(choices[0].run, options).best().chosen
    return [each[i] for each, i in zip(cuts, found, strict=True)]


def _with_ends(choices, cuts, steps, where, *, is_anew):
    """Makespan in pieces, each from the end of one task to that of the next."""
    seconds = 0.0
    while True:
        costs = [choices[k].cost(cuts[k], str(k), steps[k]) for k in range(len(steps))]
        found = simulate(costs, [where.device] * where.num_devices, host=where.host, record=True)
        at_s = min(found.finished_s.values())
        left = [k for k in range(len(steps)) if found.finished_s[str(k)] > at_s]
        if not left:
            return seconds + at_s
        seconds += at_s
        ends = [(int(each.unit.task), each) for each in found.schedule if each.end_s <= at_s]
        # The last unit of a step is the first shard's backward, or its only one.
        done = {k: each.unit.step + 1 for k, each in ends if each.unit.shard == 0 and each.unit.kind != "f"}
        steps = [max(1, steps[k] - done.get(k, 0)) for k in left]
        choices, cuts = [choices[k] for k in left], [cuts[k] for k in left]
        if is_anew:
            cuts = _chosen(choices, cuts, steps)


def simulated(costs, models, where):
    """Makespan of the whole run."""
    tasks = [replace(cost, num_steps=model.num_steps) for cost, model in zip(costs, models, strict=True)]
    return simulate(tasks, [where.device] * where.num_devices, host=where.host).makespan_s


def settings():
    """The paper's: 8, 12 and 64 tasks on 4 and 8 devices, equal and unequal."""
    rng = random.Random(0)
    for num_devices in (4, 8):
        for num_tasks in (8, 12, 64):
            equal = random_model(rng, 12)
            for kind in ("equal", "unequal"):
                models = [equal if kind == "equal" else random_model(rng, rng.randint(4, 24)) for _ in range(num_tasks)]
                yield f"{num_tasks} {kind}, {num_devices} devices", models, machine(num_devices, models)


def instance(rng):
    """A random one."""
    models = [random_model(rng, rng.randint(4, 24)) for _ in range(rng.randint(2, 6))]
    return models, machine(rng.choice((1, 1, 2, 3)), models)
