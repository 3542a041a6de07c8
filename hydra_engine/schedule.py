"""Units, the order they run in and where they ran, as data: tuples that print and parse back, and graphs over them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import networkx as nx

FORWARD = "f"  # one shard's forward; its saved tensors are dropped
FUSED = "fb"  # the last shard's forward, loss and backward in one residency: nothing is recomputed
BACKWARD = "b"  # recomputed forward and backward of a lower shard
EVALUATE = "e"  # one shard's forward in eval mode under no_grad
KINDS = (FORWARD, FUSED, BACKWARD, EVALUATE)

_PATTERN = re.compile(r"(?P<task>.+)\.(?P<kind>fb|f|b|e)(?P<shard>\d+)@(?P<step>\d+)")


class Unit(NamedTuple):
    """One shard's forward or backward for one whole step of one task: the thing that is scheduled.

    Prints as `bert.f2@5`: task bert, forward of shard 2, step 5. An evaluation batch counts as a step of kind `e`.
    """

    task: str
    kind: str
    shard: int
    step: int

    def __str__(self) -> str:
        return f"{self.task}.{self.kind}{self.shard}@{self.step}"

    @classmethod
    def parse(cls, text: str) -> Unit:
        """The unit that prints as `text`."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"unit: {text!r} is not of the form task.kind+shard@step, such as 'bert.f2@5'")
        return cls(match["task"], match["kind"], int(match["shard"]), int(match["step"]))


def training_chain(num_shards: int, lowest_backward: int) -> tuple[tuple[str, int], ...]:
    """(kind, shard) of one training step, in order: f0 ... f(n-2), fb(n-1), b(n-2) ... b(lowest).

    `lowest_backward` is the lowest shard with a trainable parameter: below it no gradient flows.
    """
    last = num_shards - 1
    forward = [(FORWARD, shard) for shard in range(last)]
    backward = [(BACKWARD, shard) for shard in range(last - 1, lowest_backward - 1, -1)]
    return (*forward, (FUSED, last), *backward)


def evaluation_chain(num_shards: int) -> tuple[tuple[str, int], ...]:
    """(kind, shard) of one evaluation batch, in order."""
    return tuple((EVALUATE, shard) for shard in range(num_shards))


def step_graph(chain: Sequence[tuple[str, int]], unit_s: dict[tuple[str, int], float]) -> nx.DiGraph:
    """One step of one task as a graph: nodes are (kind, shard), with `seconds`.

    A unit's cost also stands on its out-edges as `weight`, since networkx measures paths along edges; a node "end"
    closes them, so that `networkx.dag_longest_path_length` is the critical path in seconds.
    """
    graph = nx.DiGraph()
    for node in chain:
        graph.add_node(node, seconds=unit_s[node])
    for node, following in zip(chain, [*chain[1:], "end"], strict=True):
        graph.add_edge(node, following, weight=unit_s[node])
    return graph


def critical_path_s(graph: nx.DiGraph) -> float:
    """Seconds of the longest path through a step's graph: no number of devices makes the step shorter."""
    return float(nx.dag_longest_path_length(graph))


# Of the seconds of a schedule that was printed and parsed, or added up, no more is asked.
TOLERANCE_S = 1e-9


class Placed(NamedTuple):
    """A unit where and when it was computed. Prints as `bert.f2@5 on 1 from 0.25 to 0.5`; times in seconds."""

    unit: Unit
    device: int
    start_s: float
    end_s: float

    def __str__(self) -> str:
        return f"{self.unit} on {self.device} from {self.start_s!r} to {self.end_s!r}"

    @classmethod
    def parse(cls, text: str) -> Placed:
        """The placed unit that prints as `text`."""
        match = _PLACED.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"schedule: {text!r} is not of the form 'bert.f2@5 on 1 from 0.25 to 0.5'")
        return cls(Unit.parse(match["unit"]), int(match["device"]), float(match["start"]), float(match["end"]))


_PLACED = re.compile(r"(?P<unit>\S.*) on (?P<device>\d+) from (?P<start>\S+) to (?P<end>\S+)")


def format_schedule(schedule: Iterable[Placed]) -> str:
    """A line for each unit."""
    return "".join(f"{placed}\n" for placed in schedule)


def parse_schedule(text: str) -> list[Placed]:
    """The schedule that prints as `text`."""
    return [Placed.parse(line) for line in text.splitlines() if line.strip()]


def schedule_graph(schedule: Iterable[Placed]) -> nx.DiGraph:
    """What waited for what: nodes are units, with `seconds`, `device`, `start_s` and `end_s`.

    An edge goes from each unit to the next of its task, `of="task"`, and to the next on its device, `of="device"`
    (`of="both"` where that is the same), with the first one's seconds as `weight`. Raises ValueError where a unit is
    there twice.
    """
    graph = nx.DiGraph()
    by_task, by_device = defaultdict(list), defaultdict(list)
    for placed in sorted(schedule, key=lambda each: (each.start_s, each.end_s)):
        if placed.unit in graph:
            raise ValueError(f"schedule: {placed.unit} is in it twice")
        seconds = placed.end_s - placed.start_s
        graph.add_node(placed.unit, seconds=seconds, device=placed.device, start_s=placed.start_s, end_s=placed.end_s)
        by_task[placed.unit.task].append(placed)
        by_device[placed.device].append(placed)
    for of, groups in (("task", by_task), ("device", by_device)):
        for group in groups.values():
            for before, after in pairwise(group):
                known = graph.get_edge_data(before.unit, after.unit)
                graph.add_edge(
                    before.unit, after.unit, of="both" if known else of, weight=before.end_s - before.start_s
                )
    return graph


def validate(schedule: Sequence[Placed], chains: dict[str, Sequence[tuple[str, int]]] | None = None) -> None:
    """Raise ValueError, with the step drawn, where a schedule could not have been.

    A unit ends no earlier than it starts; a task's units, and a device's, do not overlap; with `chains`, by task, each
    step of a task is its chain, in order.
    """
    for placed in schedule:
        if not placed.end_s >= placed.start_s >= 0:
            raise ValueError(f"schedule: {placed} ends before it starts, or starts before 0")
    schedule_graph(schedule)  # nothing twice
    for what in ("task", "device"):
        groups = defaultdict(list)
        for placed in sorted(schedule, key=lambda each: (each.start_s, each.end_s)):
            groups[placed.unit.task if what == "task" else placed.device].append(placed)
        for group in groups.values():
            for before, after in pairwise(group):
                if after.start_s < before.end_s - TOLERANCE_S:
                    raise ValueError(f"schedule: of one {what} at the same time:\n  {before}\n  {after}")
    for task, chain in (chains or {}).items():
        found = [each.unit for each in sorted(schedule, key=lambda each: each.start_s) if each.unit.task == task]
        for k, unit in enumerate(found):
            expected = Unit(task, *chain[k % len(chain)], found[k - k % len(chain)].step)
            if unit != expected:
                line = " ".join(f"[{each}]" if each is unit else str(each) for each in found[max(0, k - 3) : k + 2])
                raise ValueError(f"schedule: {unit} where {expected} comes next: {line}")
        if len(found) % len(chain):
            raise ValueError(f"schedule: {task} ends in the middle of a step, after {found[-1]}")


def critical_path(schedule: Iterable[Placed]) -> list[Unit]:
    """The units that the last one waited for, back to the first: each began as the one before it ended, or soonest.

    Where a unit waited for a copy or for the host, the path goes over whichever ended last before it.
    """
    graph = schedule_graph(schedule)
    if not graph:
        return []
    ends = graph.nodes(data="end_s")
    path = [max(graph, key=lambda unit: ends[unit])]
    while before := list(graph.predecessors(path[-1])):
        path.append(max(before, key=lambda unit: ends[unit]))
    return path[::-1]
