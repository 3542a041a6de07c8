"""Policies: which of several units a device should take. One method over a read-only view; no clock, no randomness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class Candidate(NamedTuple):
    """A unit that a device could take, as a policy sees it."""

    task: str
    order: int  # of the task in the orchestrator's list
    remaining_s: float  # predicted compute time that the task has left, this unit included
    ready_order: int  # counts up: the lower, the longer the unit has been waiting


class Policy(Protocol):
    """Chooses among candidates. Keeps settings at most, so one object may serve any number of runs."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        """One of the candidates (never empty). The same candidates give the same choice."""


class ShardedLRTF:
    """Sharded-LRTF (Hydra, arXiv 2110.08633, Algorithm 2): the task with the longest remaining time goes first."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        return max(candidates, key=lambda c: (c.remaining_s, -c.order))


class FIFO:
    """The unit that has been waiting longest goes first."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda c: (c.ready_order, c.order))


POLICIES: dict[str, Callable[[], Policy]] = {"fifo": FIFO, "sharded-lrtf": ShardedLRTF}


def resolve_policy(policy: str | Policy) -> Policy:
    """A policy by name, or the object itself."""
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"policy: {policy!r}, known: {', '.join(map(repr, sorted(POLICIES)))}")
        return POLICIES[policy]()
    if isinstance(policy, type) or not callable(getattr(policy, "choose", None)):
        raise TypeError(f"policy: {policy!r} has no method choose(candidates); see hydra_engine.policies.Policy")
    return policy
