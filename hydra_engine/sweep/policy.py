"""The policy of a sweep whose user names none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from hydra_engine.schedule import Candidate, Policy, resolve_policy
from hydra_engine.tasks import ModelTask


class SweepPolicy:
    """ "in-step" where trials share frozen weights, which are then loaded once for all, else "sharded-lrtf"."""

    def __init__(self) -> None:
        self.is_in_step = False
        self._policy: Policy = resolve_policy("sharded-lrtf")

    def choose(self, tasks: Sequence[ModelTask]) -> None:
        """Choose for the run that these tasks begin, which others may join; what was seen to be shared stays so."""
        weights = [weight for task in tasks for weight in frozen(task)]
        if len(set(weights)) < len(weights):
            self.is_in_step, self._policy = True, resolve_policy("in-step")

    @property
    def longest_first(self) -> bool:
        return getattr(self._policy, "longest_first", False)

    @property
    def has_affinity(self) -> bool:
        return getattr(self._policy, "has_affinity", False)

    def key(self, candidate: Candidate) -> Any:
        return self._policy.key(candidate)


def frozen(task: ModelTask) -> set[nn.Parameter]:
    """Return the weights that a task does not train."""
    return {parameter for parameter in task.model.parameters() if not parameter.requires_grad}
