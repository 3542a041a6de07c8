"""Where a task stands in its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hydra_engine.loader_position import LoaderPosition
from hydra_engine.randomness import RandomState


@dataclass(frozen=True, kw_only=True)
class TaskPosition:
    """Right after a training batch was read, or an epoch has begun.

    num_steps: training batches that were read. validation: states of the generators that its loader holds.
    num_evaluations, num_evaluated: evaluations that ended, and all their batches. is_evaluated: the evaluation that is
    due after so many steps, if one is, lies before this.
    """

    num_steps: int
    epoch: int
    loader: LoaderPosition
    validation: tuple[Any, ...]
    num_evaluations: int
    num_evaluated: int
    is_evaluated: bool = False

    def with_random(self, random: RandomState) -> TaskPosition:
        """The same where others drew from the task's stream since."""
        return replace(self, loader=replace(self.loader, random=random))

    def to_state(self) -> dict[str, Any]:
        """As `hydra_engine.nested.flatten` takes it."""
        return {**vars(self), "loader": self.loader.to_state()}

    @classmethod
    def from_state(cls, saved: Mapping[str, Any]) -> TaskPosition:
        """The other way round."""
        return cls(**{**saved, "loader": LoaderPosition.from_state(saved["loader"])})
