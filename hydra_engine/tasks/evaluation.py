"""Tasks that train nothing: a loader is evaluated, or predicted on, through the same shards; figures are means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from hydra_engine.tasks.options import check_loader, naming_task
from hydra_engine.tasks.report import Evaluation
from hydra_engine.tasks.splitting import LABELS, unpack_batch
from hydra_engine.tasks.task import ModelTask, Purpose

# Options of a task that hold of its evaluations too.
_SHARED = ("partitioner", "precision", "loss_reduction", "seed", "unpack", "split", "timeout_s", "loader_alone")


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

    def add(self, loss: float, weight: float, metrics: Mapping[str, float], num_samples: int) -> None:
        """Take in a batch; `weight` is that of its loss."""
        self._loss += loss if self._sums_losses else loss * weight
        self._weight += weight
        for name, value in metrics.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + value * num_samples
        self._num_samples += num_samples

    def result(self) -> Evaluation:
        """The figures of what was taken in."""
        loss = self._loss if self._sums_losses else self._loss / (self._weight or 1.0)
        metrics = {name: total / (self._num_samples or 1) for name, total in self._metrics.items()}
        return Evaluation(loss=loss, metrics=metrics, num_samples=self._num_samples)


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
        shared["name"] = task.name
        return cls(task.model, task.loss_fn, loader, metrics=task.metrics if metrics is None else metrics, **shared)

    @classmethod
    def predicting(
        cls,
        model: ModelTask | nn.Module | Iterable[nn.Module],
        loader: Iterable[Any],
        *,
        unpack: Callable[[Any], Any] | None,
        **options: Any,
    ) -> EvaluationTask:
        """A task that gives outputs of a model, or of a task's; `unpack` picks the inputs of a batch.

        options: None where they are the task's own, or the usual ones.
        """
        if unpack is not None and not callable(unpack):
            raise TypeError(f"unpack: {unpack!r} is not callable; give a function")

        given = {name: value for name, value in options.items() if value is not None}
        if isinstance(model, ModelTask):
            pair, shared = model.unpack, {name: getattr(model, name) for name in _SHARED}
            alone = {"name": model.name, "split": None, "loss_reduction": "mean"}  # those take a target
            model, options = model.model, {**shared, **alone, **given}
        else:
            pair, options = None, {"precision": "float32", "seed": 0, **given}

        is_default = getattr(pair, "func", None) is unpack_batch

        def inputs_alone(batch: Any) -> tuple[Any, None]:
            has_no_labels = is_default and isinstance(batch, Mapping) and LABELS not in batch
            if unpack is None and pair is not None and not has_no_labels:
                return pair(batch)[0], None
            found = batch if unpack is None else unpack(batch)
            # Of a data collator of `transformers`, say.
            return dict(found) if isinstance(found, Mapping) and not isinstance(found, dict) else found, None

        options["unpack"] = inputs_alone
        return cls(model, _no_loss, loader, purpose=Purpose.PREDICT, **options)


def _no_loss(output: Any, target: Any) -> Tensor:
    raise AssertionError("a prediction has no loss")
