"""Units, the order they run in and where they ran, as data: tuples that print and parse back, and graphs over them."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import networkx as nx

FORWARD = "f"  # one shard's forward; what autograd saves is dropped, or kept where there is room
FUSED = "fb"  # the last shard's forward, loss and backward in one residency: nothing is recomputed
BACKWARD = "b"  # backward of a lower shard, after its forward again where its graph was not kept
EVALUATE = "e"  # one shard's forward in eval mode under no_grad
KINDS = (FORWARD, FUSED, BACKWARD, EVALUATE)

_PATTERN = re.compile(r"(?P<task>.+)\.(?P<kind>fb|f|b|e)(?P<shard>\d+)@(?P<step>\d+)(\+(?P<part>\d+))?")


class Unit(NamedTuple):
    """One shard's forward or backward for one whole step of one task: the thing that is scheduled.

    Prints as `bert.f2@5`: task bert, forward of shard 2, step 5. An evaluation batch counts as a step of kind `e`.
    Where a step is spread over several devices, a unit is that of one part of the step's micro-batches; of those from
    the second part on it prints as `bert.f2@5+1`.
    """

    task: str
    kind: str
    shard: int
    step: int
    part: int = 0

    def __str__(self) -> str:
        return f"{self.task}.{self.kind}{self.shard}@{self.step}" + (f"+{self.part}" if self.part else "")

    @classmethod
    def parse(cls, text: str) -> Unit:
        """The unit that prints as `text`."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"unit: {text!r} is not of the form task.kind+shard@step, such as 'bert.f2@5'")
        return cls(match["task"], match["kind"], int(match["shard"]), int(match["step"]), int(match["part"] or 0))


def part_ranges(num_micro_batches: int, num_parts: int) -> list[tuple[int, int]]:
    """The micro-batches [first, end) of each part of a step, whose numbers differ by at most 1."""
    ends = [num_micro_batches * k // num_parts for k in range(num_parts + 1)]
    return list(pairwise(ends))


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


# A unit whose time nobody knows takes this, so that one after another is later.
LEAST_S = 1e-6


class Flow(NamedTuple):
    """A batch's units in order, and when each is needed."""

    order: dict[tuple[str, int], int]
    left_s: list[float]  # of the chain, from each position on
    uses: list[list[int]]  # by shard: positions

    @classmethod
    def of(cls, chain: Sequence[tuple[str, int]], unit_s: Mapping[tuple[str, int], float], num_shards: int) -> Flow:
        """Make the flow of units that take these seconds."""
        left_s = list(accumulate((unit_s.get(node, 0.0) or LEAST_S for node in reversed(chain)), initial=0.0))[::-1]
        uses = [[k for k, (_, shard) in enumerate(chain) if shard == j] for j in range(num_shards)]
        return cls({node: k for k, node in enumerate(chain)}, left_s, uses)

    def next_use_s(self, shard: int, position: int, *, beyond_step: bool) -> float:
        """Seconds from a position to the next unit of a shard, also of the next batch; infinite if there is none."""
        for k in self.uses[shard]:
            if k >= position:
                return self.left_s[position] - self.left_s[k]
        if beyond_step and self.uses[shard]:
            return self.left_s[position] + self.left_s[0] - self.left_s[self.uses[shard][0]]
        return math.inf


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
    """Make the graph of waits: nodes are units, with `seconds`, `device`, `start_s` and `end_s`.

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
    starts, ends = graph.nodes(data="start_s"), graph.nodes(data="end_s")
    placed_by_unit = {placed.unit: placed for placed in schedule}
    for before, after, of in graph.edges(data="of"):
        if starts[after] < ends[before] - TOLERANCE_S:
            what = "device" if of == "device" else "task"
            one, other = placed_by_unit[before], placed_by_unit[after]
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
    graph = schedule_graph(schedule)
    if not graph:
        return []
    ends = graph.nodes(data="end_s")
    path = [max(graph, key=lambda unit: ends[unit])]
    while before := list(graph.predecessors(path[-1])):
        path.append(max(before, key=lambda unit: ends[unit]))
    return path[::-1]
