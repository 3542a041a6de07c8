"""The best value of a figure so far: by it the best weights are kept, and training ends early."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

TRAINING_LOSS, VALIDATION_LOSS = "loss", "validation_loss"
MIN, MAX = "min", "max"


def is_better(value: float, than: float | None, direction: str) -> bool:
    """Return True for the first number, and for a number that is better; NaN is none."""
    if value != value or than is None:
        return value == value
    return value < than if direction == MIN else value > than


def best_index(values: Sequence[float], direction: str) -> int | None:
    """Return the place of the best number, the first of equal ones; None if there is none."""
    numbers = [k for k, value in enumerate(values) if value == value]
    return min(numbers, key=lambda k: values[k] if direction == MIN else -values[k], default=None)


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best value of a figure, and how many came after it."""

    by: str  # the figure: a metric, or one of the losses above
    direction: str
    step: int | None = None  # training steps committed before it; None: there was no number yet
    value: float | None = None
    num_worse: int = 0  # values since that were not better
    judged_step: int = 0  # that of the last value
    epoch_first: int = 0  # of the training loss: steps committed before the epoch in progress

    def after(self, value: float, step: int) -> Best:
        """Return the best once a figure has this value after so many steps; a validation may come again in a resume."""
        if step <= self.judged_step:
            return self
        if is_better(value, self.value, self.direction):
            return replace(self, step=step, value=value, num_worse=0, judged_step=step)
        return replace(self, num_worse=self.num_worse + 1, judged_step=step)

    def after_epoch(self, losses: Sequence[float], skipped: Collection[int]) -> Best:
        """Return the best once an epoch is over: its value is the mean of the losses of its steps that count."""
        counted = [k for k in range(self.epoch_first, len(losses)) if k not in skipped]
        total = 0.0  # added up one after the other: `sum` rounds otherwise in some versions of Python
        for k in counted:
            total += losses[k]
        found = self.after(total / len(counted) if counted else float("nan"), len(losses))
        return replace(found, epoch_first=len(losses))
