"""The figures of an evaluation: means over its batches, kept as sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hydra_engine.report import Evaluation


class EvaluationMeans:
    """Takes in an evaluation's batches one by one, in their order.

    The loss is the mean of the batches' losses weighted by their samples, or by what the user's own reduction counts,
    or, where losses are sums, their sum; metrics are weighted by samples. Added up in the plain loop's order, one after
    the other: `sum` would round otherwise in some versions of Python.
    """

    def __init__(self, *, sums_losses: bool) -> None:
        self._sums_losses = sums_losses
        self._loss = 0.0
        self._weight = 0.0
        self._metrics: dict[str, float] = {}
        self._num_samples = 0
        self._num_parts = 1

    def add(
        self, loss: float, weight: float, metrics: Mapping[str, float], num_samples: int, num_parts: int = 1
    ) -> None:
        """Take in a batch; `weight` is that of its loss."""
        self._num_parts = max(self._num_parts, num_parts)
        self._loss += loss if self._sums_losses else loss * weight
        self._weight += weight
        for name, value in metrics.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + value * num_samples
        self._num_samples += num_samples

    def result(self) -> Evaluation:
        """The figures of what was taken in."""
        loss = self._loss if self._sums_losses else self._loss / (self._weight or 1.0)
        metrics = {name: total / (self._num_samples or 1) for name, total in self._metrics.items()}
        return Evaluation(loss=loss, metrics=metrics, num_samples=self._num_samples, num_parts=self._num_parts)


def joined(parts: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """The metrics of one batch that was evaluated in parts, each with its number of samples."""
    if len(parts) == 1:
        return dict(parts[0][1])
    num_samples = sum(size for size, _ in parts) or 1
    return {name: sum(size * part[name] for size, part in parts) / num_samples for name in parts[0][1]}
