"""Units and the order they run in, as data: tuples that print and parse back, and a graph over them."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
