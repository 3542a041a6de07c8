"""``hydra-engine simulate``: how long tasks would train on so many devices, by the scheduler of a real run."""

from __future__ import annotations

import argparse
from dataclasses import replace

from hydra_engine import DeviceCost, HostCost, TaskCost, simulate
from hydra_engine.cli.command import Mistake, mistakes
from hydra_engine.cli.plan import predicted
from hydra_engine.cli.sample import called_for_shapes
from hydra_engine.texts import duration, table


def run(options: argparse.Namespace) -> None:
    """Print a row of predicted figures for each number of devices."""
    costs, device = _costs(options)
    tasks = [replace(cost, name=f"{cost.name}-{k}") for cost in costs for k in range(options.copies)]
    rows: list[tuple[str, ...]] = [("devices", "makespan", "at least", "busy", "speedup")]
    first_s = 0.0
    for number in options.devices:
        with mistakes(ValueError):
            found = simulate(tasks, [device] * number, options.policy, host=HostCost())
        first_s = first_s or found.makespan_s
        speedup = first_s / found.makespan_s if found.makespan_s else 1.0
        shown = (duration(found.makespan_s), duration(found.bound_s), f"{found.busy_share:.0%}", f"{speedup:.2f}")
        rows.append((str(number), *shown))
    title = f"{options.function}: {len(tasks)} tasks, policy {options.policy}; predicted, not measured"
    print(title, "", *table(rows), sep="\n")
    print(f"at least: no schedule is faster; speedup: over {options.devices[0]} of these devices")


def _costs(options: argparse.Namespace) -> tuple[list[TaskCost], DeviceCost]:
    """Return the tasks' costs, and those of one device: of a model by arithmetic, or as the function returned them."""
    returned = called_for_shapes(
        options.function, "returns (model, (inputs, target), loss_fn), a TaskCost or a list of them"
    )
    costs = list(returned) if isinstance(returned, list) else [returned]
    if costs and all(isinstance(each, TaskCost) for each in costs):
        return costs, DeviceCost()
    if options.memory is None:
        raise Mistake("--memory: not given, expected a size, for a model; pass for example --memory 24GiB")
    plan = predicted(options, returned)
    link = plan.machine.link_bytes_per_s
    return [plan.task_cost("task", options.steps)], DeviceCost(load_bytes_per_s=link, store_bytes_per_s=link)
