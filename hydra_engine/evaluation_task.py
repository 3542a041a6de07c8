"""A task that trains nothing: a loader is evaluated, or predicted on, through the same shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from hydra_engine.task import ModelTask
from partitioners import Partitioner


class EvaluationTask(ModelTask):
    """Reads one loader once, as a task's validation, from a fresh random stream of the task's seed.

    Its weights are borrowed: nothing that the run leaves is kept. A model without a trainable parameter will do.
    """

    trains = False

    def __init__(self, model: Any, loss_fn: Callable[[Any, Any], Tensor], loader: Iterable[Any], **options: Any):
        if isinstance(loader, (Tensor, nn.Module)) or not (
            hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
        ):
            raise TypeError(
                f"loader: a {type(loader).__name__} is no iterable of batches; give a DataLoader, or a list of batches"
            )
        super().__init__(model, loss_fn, (), validation=loader, **options)

    @classmethod
    def of(
        cls,
        task: ModelTask,
        loader: Iterable[Any],
        metrics: Mapping[str, Callable[[Any, Any], float | Tensor]] | None = None,
    ) -> EvaluationTask:
        """A task's model and loss on another loader; `metrics`: other than the task's own."""
        return cls(
            task.model,
            task.loss_fn,
            loader,
            partitioner=task.partitioner,
            precision=task.precision,
            loss_reduction=task.loss_reduction,
            seed=task.seed,
            unpack=task.unpack,
            split=task.split,
            metrics=task.metrics if metrics is None else metrics,
            loader_timeout_s=task.loader_timeout_s,
            loader_alone=task.loader_alone,
        )

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
        """What gives a model's outputs; `unpack` picks the inputs of a batch."""
        if unpack is not None and not callable(unpack):
            raise TypeError(f"unpack: {unpack!r} is not callable; give a function")

        def inputs_alone(batch: Any) -> tuple[Any, None]:
            return batch if unpack is None else unpack(batch), None

        task = cls(
            model, _no_loss, loader, partitioner=partitioner, precision=precision, seed=seed, unpack=inputs_alone
        )
        task.predicts = True
        return task

    def _check_trainable(self) -> None:
        """Nothing has to be."""


def _no_loss(output: Any, target: Any) -> Tensor:
    raise AssertionError("a prediction has no loss")
