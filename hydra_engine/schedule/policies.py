"""Policies: a key for each unit that a device could run. The lowest key goes first. No clock, no state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

# Value of `Candidate.ready_order` for a unit that waits for its input.
NOT_YET = 2**62


class Candidate(NamedTuple):
    """A unit that a device could run, as a policy sees it. Each task has at most one, or one per part of its step."""

    task: str
    order: int  # number of the task: tasks are numbered as they are added
    remaining_s: float  # predicted compute seconds until the task ends, this unit included
    ready_order: int  # lower: the unit has waited longer; NOT_YET while its input is computed
    served_order: int = 0  # lower: a unit of the task was begun longer ago; 0: never
    used_s: float = 0.0  # compute seconds of the task, plus its credit for having come later
    weight: float = 1.0  # of the task, `ModelTask(weight=)`
    passes: float = 0.0  # of the task through its shards, with those that others made before it came


class Policy(Protocol):
    """Orders units. A policy keeps only its settings, so one object may serve any number of runs.

    Attributes:
        longest_first: a task on the critical path goes before a unit that is claimed and loaded already. A policy
            without this attribute has False.
        has_affinity: a device goes on with the tasks that it computed last; where those wait it begins one that no
            device has, and takes another device's only if it would be idle. A policy without it has False.
        prefers_resident: a unit whose shard is on the device goes before others. A policy without it has False.
    """

    def key(self, candidate: Candidate) -> Any:
        """Return the key of a unit: the lowest goes first. Equal keys go by the order of tasks.

        The key must depend on the candidate alone: it is asked for again only when a value of the candidate has
        changed. `ModelTask(priority=)` counts before the key.
        """


# Remaining times that agree in so many binary digits are equal: they differ by an eighth at most.
SAME_DIGITS = 4


class ShardedLRTF:
    """Sharded-LRTF (Hydra, arXiv 2110.08633, Algorithm 2): the task with the longest remaining time goes first.

    A device keeps to the tasks that it has begun, two or three, and begins the longest of the others where these wait.
    So a backward finds the graph of its forward on its device, and shards are loaded less often. A task near the
    critical path goes first everywhere.

    Of tasks that have about as long to go, the unit that has waited longest goes first. By exact times whoever is
    behind goes first: equal tasks then compute side by side and commit together, and devices wait for all their
    optimizers at once, which are idle else. The times come nearer as the tasks end, so the last one is not later.
    """

    longest_first = True
    has_affinity = True

    def key(self, candidate: Candidate) -> Any:
        digits, exponent = math.frexp(candidate.remaining_s)
        remaining_s = math.ldexp(math.ceil(math.ldexp(digits, SAME_DIGITS)), exponent - SAME_DIGITS)
        return -remaining_s, candidate.ready_order


class Locality(ShardedLRTF):
    """Sharded-LRTF among units whose shard is on the device already; the others wait for eight units at most."""

    has_affinity = False
    prefers_resident = True


class ShortestRemaining:
    """The task with the shortest remaining time goes first: most tasks end early, the longest last."""

    def key(self, candidate: Candidate) -> float:
        return candidate.remaining_s


class FIFO:
    """The unit that has been waiting longest goes first."""

    def key(self, candidate: Candidate) -> int:
        return candidate.ready_order


class InStep:
    """The task that has got the least far goes first, so tasks pass through their shards side by side.

    A shard that they share, of a frozen base for example, is then loaded once for all of them. A task that comes while
    others train, or that had to wait, begins the pass that the others are in, and catches up with them.
    """

    def key(self, candidate: Candidate) -> float:
        return candidate.passes


class RoundRobin:
    """The task whose turn was longest ago goes first."""

    def key(self, candidate: Candidate) -> int:
        return candidate.served_order


class FairShare:
    """Tasks get compute time in proportion to their weights: the task that has had least of its share goes first.

    Stride scheduling (Waldspurger and Weihl, 1995), with measured seconds as quanta. A task that comes later has its
    share from then on, and nothing for the time before.
    """

    def key(self, candidate: Candidate) -> float:
        return candidate.used_s / candidate.weight


class RandomOrder:
    """Any unit goes first. The order depends on `seed` and on the run's events, not on the process's generators."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = int(seed)

    def key(self, candidate: Candidate) -> int:
        """Pseudorandom number of the unit (the finalizer of SplitMix64, Steele et al. 2014)."""
        mask = 2**64 - 1
        z = (self.seed * 0x9E3779B97F4A7C15 + candidate.ready_order * 0xBF58476D1CE4E5B9 + candidate.order) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)


POLICIES: dict[str, Callable[[], Policy]] = {
    "fair-share": FairShare,
    "fifo": FIFO,
    "in-step": InStep,
    "locality": Locality,
    "random": RandomOrder,
    "round-robin": RoundRobin,
    "sharded-lrtf": ShardedLRTF,
    "shortest-remaining": ShortestRemaining,
}


def resolve_policy(policy: str | Policy) -> Policy:
    """Return a policy by its name, or the object itself."""
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"policy: {policy!r}, known: {', '.join(map(repr, sorted(POLICIES)))}")
        return POLICIES[policy]()
    if isinstance(policy, type) or not callable(getattr(policy, "key", None)):
        raise TypeError(f"policy: {policy!r} has no method key(candidate); see hydra_engine.schedule.Policy")
    return policy
