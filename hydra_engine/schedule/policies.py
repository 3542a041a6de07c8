"""Policies: which of several units a device should take. A key for each unit, the lowest first; no clock, no state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

# In `Candidate.ready_order`: the unit waits for its input.
NOT_YET = 2**62


class Candidate(NamedTuple):
    """A unit that a device could take, as a policy sees it: one at most for each task, or each part of its step."""

    task: str
    order: int  # of the task: they count up as tasks are added
    remaining_s: float  # predicted compute time that the task has left, this unit included
    ready_order: int  # counts up: the lower, the longer the unit has been waiting; NOT_YET while its input is made
    served_order: int = 0  # counts up: the lower, the longer ago a unit of the task was begun; 0: never
    used_s: float = 0.0  # compute time that the task has had, and what it was given for coming later
    weight: float = 1.0  # of the task, `ModelTask(weight=)`


class Policy(Protocol):
    """Orders units. Keeps settings at most, so one object may serve any number of runs.

    Attributes:
        longest_first: a unit that is claimed and loaded stands back for a task on the critical path (False where the
            policy does not have it).
        prefers_resident: a unit whose shard is on the device goes before others (False where it does not have it).
    """

    def key(self, candidate: Candidate) -> Any:
        """Return the key that the unit is ordered by, the lowest first; equal keys go by the order of tasks.

        Asked whenever something that a candidate holds has changed, and not again until something changes: it must
        depend on the candidate alone. `ModelTask(priority=)` goes before it.
        """


class ShardedLRTF:
    """Sharded-LRTF (Hydra, arXiv 2110.08633, Algorithm 2): the task with the longest remaining time goes first."""

    longest_first = True

    def key(self, candidate: Candidate) -> float:
        """Remaining time, the longest first."""
        return -candidate.remaining_s


class Locality(ShardedLRTF):
    """Sharded-LRTF among units whose shard is on the device already; who goes first otherwise waits for a few at most.

    What tasks share, a frozen base say, is then loaded once for all that need it.
    """

    prefers_resident = True


class ShortestRemaining:
    """The task with the shortest remaining time goes first: most tasks are through early, the longest last."""

    def key(self, candidate: Candidate) -> float:
        """Remaining time, the shortest first."""
        return candidate.remaining_s


class FIFO:
    """The unit that has been waiting longest goes first."""

    def key(self, candidate: Candidate) -> int:
        """When the unit became ready."""
        return candidate.ready_order


class RoundRobin:
    """The task whose turn was longest ago goes first."""

    def key(self, candidate: Candidate) -> int:
        """When the task was served last."""
        return candidate.served_order


class FairShare:
    """Tasks get compute time in proportion to their weights: who has had least of its share goes first.

    Stride scheduling (Waldspurger and Weihl, 1995), with measured seconds for quanta. Who comes later shares from then
    on; it gets nothing for the time before.
    """

    def key(self, candidate: Candidate) -> float:
        """Compute time had per weight."""
        return candidate.used_s / candidate.weight


class RandomOrder:
    """Any unit goes first. The order follows from the seed and what happens, not from the process's generators.

    Args:
        seed: of the order.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = int(seed)

    def key(self, candidate: Candidate) -> int:
        """A number as good as random, another for each unit (the finalizer of SplitMix64, Steele et al. 2014)."""
        mask = 2**64 - 1
        z = (self.seed * 0x9E3779B97F4A7C15 + candidate.ready_order * 0xBF58476D1CE4E5B9 + candidate.order) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)


POLICIES: dict[str, Callable[[], Policy]] = {
    "fair-share": FairShare,
    "fifo": FIFO,
    "locality": Locality,
    "random": RandomOrder,
    "round-robin": RoundRobin,
    "sharded-lrtf": ShardedLRTF,
    "shortest-remaining": ShortestRemaining,
}


def resolve_policy(policy: str | Policy) -> Policy:
    """A policy by name, or the object itself."""
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"policy: {policy!r}, known: {', '.join(map(repr, sorted(POLICIES)))}")
        return POLICIES[policy]()
    if isinstance(policy, type) or not callable(getattr(policy, "key", None)):
        raise TypeError(f"policy: {policy!r} has no method key(candidate); see hydra_engine.policies.Policy")
    return policy
