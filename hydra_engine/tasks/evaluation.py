"""Tasks that train nothing: a loader is evaluated, or predicted on, through the same shards.

Its figures are means over batches, kept as sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hydra_engine.tasks.options import check_loader, naming_task
from hydra_engine.tasks.report import Evaluation
from hydra_engine.tasks.task import ModelTask, Purpose
from partitioners import Partitioner

# Options of a task that hold of its evaluations too.
_SHARED = ("partitioner", "precision", "loss_reduction", "seed", "unpack", "split", "loader_timeout_s", "loader_alone")


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


class EvaluationTask(ModelTask):
    """Reads one loader once, with a fresh random stream and borrowed weights, of which none needs to be trainable."""

    def __init__(
        self,
        model: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        loader: Iterable[Any],
        *,
        purpose: Purpose = Purpose.EVALUATE,
        **options: Any,
    ) -> None:
        with naming_task(options.get("name")):
            check_loader("loader", loader)
        self.purpose = purpose
        super().__init__(model, loss_fn, (), validation=loader, **options)

    @classmethod
    def of(
        cls,
        task: ModelTask,
        loader: Iterable[Any],
        metrics: Mapping[str, Callable[[Any, Any], float | Tensor]] | None = None,
    ) -> EvaluationTask:
        """A task's model and loss on another loader; `metrics`: other than the task's own."""
        shared = {name: getattr(task, name) for name in _SHARED}
        return cls(task.model, task.loss_fn, loader, metrics=task.metrics if metrics is None else metrics, **shared)

    @classmethod
    def predicting(
        cls,
        model: nn.Module | Iterable[nn.Module],
        loader: Iterable[Any],
        *,
        unpack: Callable[[Any], Any] | None,
        partitioner: Partitioner | str | None,
        precision: str,
        seed: int,
    ) -> EvaluationTask:
        """A task that gives a model's outputs; `unpack` picks the inputs of a batch."""
        if unpack is not None and not callable(unpack):
            raise TypeError(f"unpack: {unpack!r} is not callable; give a function")

        def inputs_alone(batch: Any) -> tuple[Any, None]:
            return batch if unpack is None else unpack(batch), None

        options = {"partitioner": partitioner, "precision": precision, "seed": seed, "unpack": inputs_alone}
        return cls(model, _no_loss, loader, purpose=Purpose.PREDICT, **options)


def _no_loss(output: Any, target: Any) -> Tensor:
    raise AssertionError("a prediction has no loss")
