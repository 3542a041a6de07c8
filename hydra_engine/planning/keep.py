"""What a task keeps on a device between its units: the graphs of forwards, or shards. Decided by predicted time."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple

from hydra_engine.host import Shard, TaskState
from hydra_engine.schedule import FORWARD


class Kept(NamedTuple):
    """What is kept of a step."""

    keeps_from: int  # the lowest shard whose forward's graph is kept for its backward; the number of shards: none is
    step_s: float  # of the device or its link, whichever takes longer


def choose_kept(state: TaskState, memory_bytes: int, link_bytes_per_s: float) -> Kept:
    """Which graphs are worth keeping on a device, and what a step then takes.

    Below the shard that the backward begins with, one after the other is needed again soonest. Of what the budget
    leaves beside two slabs and a unit's work, the first may keep graphs, which saves running their forwards again and
    loading them, and the next ones their slabs alone, which takes less and saves loads. A step takes as long as what
    the device computes or what its link carries, whichever is more; of equals the fewest graphs.
    """
    shards = state.cut.shards
    free = memory_bytes - max(state.shard_bytes(shard) for shard in shards) - max(shard.slab_bytes for shard in shards)
    compute_s = _compute_s(state)
    loaded = sum(shards[j].slab_bytes for _, j in state.cut.chains[True])
    below = [shard for shard in reversed(shards[:-1]) if shard.index >= state.cut.lowest_backward]
    best, lowest = Kept(len(shards), math.inf), len(shards)
    for k in range(len(below) + 1):
        others = _resident_bytes([each.slab_bytes for each in below[k:]], free)
        step_s = max(compute_s, (loaded - others) / link_bytes_per_s)
        if step_s < best.step_s:
            best = Kept(lowest, step_s)
        graph = _graph_bytes(state, below[k]) if k < len(below) and state.may_keep_graph(below[k]) else None
        if graph is None or below[k].slab_bytes + graph > free:
            break
        lowest = below[k].index
        free -= below[k].slab_bytes + graph
        compute_s -= state.measured.unit_s.get((FORWARD, lowest), 0.0)
        loaded -= below[k].slab_bytes
    return best


def least_step_s(state: TaskState) -> float:
    """Seconds of a step on a device of any memory: no forward is run twice that need not be, and nothing loaded."""
    again = sum(
        state.measured.unit_s.get((FORWARD, shard.index), 0.0)
        for shard in state.cut.shards
        if state.may_keep_graph(shard)
    )
    return _compute_s(state) - again


def _compute_s(state: TaskState) -> float:
    return sum(state.measured.unit_s.get(node, 0.0) for node in state.cut.chains[True])


def kept_bytes(state: TaskState, shard: Shard) -> int:
    """Bytes of a shard's graphs for a step; 0 where they are not kept."""
    is_kept = shard.index >= state.cut.keeps_from and state.may_keep_graph(shard)
    return (_graph_bytes(state, shard) or 0) if is_kept else 0


def _graph_bytes(state: TaskState, shard: Shard) -> int | None:
    """The most that it was seen to take."""
    return max(
        (num_bytes for (j, _), num_bytes in state.measured.graph_bytes.items() if j == shard.index), default=None
    )


def _resident_bytes(sizes: list[int], free: int) -> int:
    """Of slabs, in order, as many as there is room for."""
    return max((total for total in accumulate(sizes, initial=0) if total <= free), default=0)
