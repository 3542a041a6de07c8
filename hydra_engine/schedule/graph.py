"""Graphs over units: the critical path of a schedule, and schedules that could not have been.

Apart from `units.py`, and not named by the room's face, since networkx takes a quarter of the time that torch takes to
import and nothing that trains needs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import networkx as nx

from hydra_engine.schedule.units import EVALUATE, Placed, Unit

# Of the seconds of a schedule that was printed and parsed, or added up, no more is asked.
TOLERANCE_S = 1e-9


def schedule_graph(schedule: Iterable[Placed]) -> nx.DiGraph:
    """What waited for what: nodes are units, with `seconds`, `device`, `start_s` and `end_s`.

    An edge goes from each unit to the next of its task, `of="task"`, and to the next on its device, `of="device"`
    (`of="both"` where that is the same), with the first one's seconds as `weight`. Where a step is spread over several
    devices, the next unit is that of the same part; from a step's last units edges go to all of the next step's first.
    Raises ValueError where a unit is there twice.
    """
    graph = nx.DiGraph()
    chains, by_device = defaultdict(list), defaultdict(list)
    for placed in sorted(schedule, key=lambda each: (each.start_s, each.end_s)):
        unit = placed.unit
        if unit in graph:
            raise ValueError(f"schedule: {unit} is in it twice")
        seconds = placed.end_s - placed.start_s
        graph.add_node(unit, seconds=seconds, device=placed.device, start_s=placed.start_s, end_s=placed.end_s)
        chains[unit.task, unit.kind == EVALUATE, unit.step, unit.part].append(placed)
        by_device[placed.device].append(placed)
    edges = [("task", pair) for chain in chains.values() for pair in pairwise(chain)]
    edges += [("task", pair) for pair in _between_steps(list(chains.values()))]
    edges += [("device", pair) for group in by_device.values() for pair in pairwise(group)]
    for of, (before, after) in edges:
        known = graph.get_edge_data(before.unit, after.unit)
        weight = before.end_s - before.start_s
        graph.add_edge(before.unit, after.unit, of="both" if known and known["of"] != of else of, weight=weight)
    return graph


def _between_steps(chains: Sequence[list[Placed]]) -> Iterator[tuple[Placed, Placed]]:
    """The last unit of each part of a step, and the first of each part of the task's next step."""
    steps: dict[str, dict[tuple[bool, int], list[list[Placed]]]] = defaultdict(lambda: defaultdict(list))
    for chain in sorted(chains, key=lambda each: each[0].start_s):
        unit = chain[0].unit
        steps[unit.task][unit.kind == EVALUATE, unit.step].append(chain)
    for of_task in steps.values():
        for before, after in pairwise(of_task.values()):
            yield from ((last[-1], first[0]) for last in before for first in after)


def validate(schedule: Sequence[Placed], chains: dict[str, Sequence[tuple[str, int]]] | None = None) -> None:
    """Raise ValueError, with the step drawn, where a schedule could not have been.

    A unit ends no earlier than it starts; a task's units, of each part of a step, and a device's do not overlap; a step
    begins when the one before it is over; with `chains`, by task, each step of a task is its chain, in order.
    """
    for placed in schedule:
        if not placed.end_s >= placed.start_s >= 0:
            raise ValueError(f"schedule: {placed} ends before it starts, or starts before 0")
    graph = schedule_graph(schedule)  # nothing twice
    placed_by_unit = {placed.unit: placed for placed in schedule}
    for before, after, of in graph.edges(data="of"):
        one, other = placed_by_unit[before], placed_by_unit[after]
        if other.start_s < one.end_s - TOLERANCE_S:
            what = "device" if of == "device" else "task"
            raise ValueError(f"schedule: of one {what} at the same time:\n  {one}\n  {other}")
    for task, chain in (chains or {}).items():
        by_part = defaultdict(list)
        for each in sorted(schedule, key=lambda each: each.start_s):
            if each.unit.task == task:
                by_part[each.unit.part].append(each.unit)
        for part, found in by_part.items():
            for k, unit in enumerate(found):
                expected = Unit(task, *chain[k % len(chain)], found[k - k % len(chain)].step, part)
                if unit != expected:
                    line = " ".join(f"[{each}]" if each is unit else str(each) for each in found[max(0, k - 3) : k + 2])
                    raise ValueError(f"schedule: {unit} where {expected} comes next: {line}")
            if len(found) % len(chain):
                raise ValueError(f"schedule: {task} ends in the middle of a step, after {found[-1]}")


def critical_path(schedule: Iterable[Placed]) -> list[Unit]:
    """The units that the last one waited for, back to the first: each began as the one before it ended, or soonest.

    Where a unit waited for a copy or for the host, the path goes over whichever ended last before it.
    """
    if not (graph := schedule_graph(schedule)):
        return []
    ends = graph.nodes(data="end_s")
    path = [max(graph, key=lambda unit: ends[unit])]
    while before := list(graph.predecessors(path[-1])):
        path.append(max(before, key=lambda unit: ends[unit]))
    return path[::-1]
