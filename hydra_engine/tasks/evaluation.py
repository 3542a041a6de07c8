"""Tasks that train nothing: a loader is evaluated, or predicted on, through the same shards; figures are means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hydra_engine.tasks.options import check_loader, naming_task
from hydra_engine.tasks.report import Evaluation
from hydra_engine.tasks.splitting import LABELS, unpack_batch
from hydra_engine.tasks.task import ModelTask, Purpose

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


def uneven(number: int, num_samples: int) -> int:
    """Return the least number of parts, from `number` on, whose sizes differ, so that `joined_outputs` has its proof.

    As many parts as samples where there is none.
    """
    while number < num_samples and num_samples % number == 0:
        number += 1
    return min(number, num_samples)


def joined_outputs(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The output of one batch that was predicted in parts of these sizes: tensors are joined by their dim of samples.

    That is the one dim which has a part's number of samples in every part. Parts of one size prove nothing: a mean that
    keeps its dim, or states by layer, may have that size by chance. What is equal in parts of several sizes is taken as
    it is. Raises ValueError for all else, such as a mean over a part's samples.
    """
    if len(set(sizes)) == 1:
        raise ValueError(
            f"it is too large for a layer alone, and {len(sizes)} parts of {sizes[0]} do not tell by which dim their "
            f"outputs are to be joined; give batches of {sizes[0]}, or use a device with more memory"
        )
    flat, specs = zip(*map(pytree.tree_flatten, parts), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise ValueError(_not_joined("outputs", "differ in their structure", len(sizes)))

    def join(column: Sequence[Any]) -> Any:
        shapes = [tuple(each.shape) if isinstance(each, Tensor) else () for each in column]
        dims = [d for d in range(min(map(len, shapes))) if [shape[d] for shape in shapes] == list(sizes)]
        if len(dims) == 1 and len({(*shape[: dims[0]], *shape[dims[0] + 1 :]) for shape in shapes}) == 1:
            return torch.cat(list(column), dims[0])
        if not dims and all(_equal(each, column[0]) for each in column):
            return column[0]
        kind = shapes[0] if isinstance(column[0], Tensor) else type(column[0]).__name__
        has = f"has {len(dims)} dims" if dims else "has no dim"
        raise ValueError(_not_joined(f"an output ({kind})", f"{has} of samples to join by", len(sizes)))

    return pytree.tree_unflatten([join(column) for column in zip(*flat, strict=True)], specs[0])


def _not_joined(what: str, why: str, number: int) -> str:
    return (
        f"it is too large for a layer alone, and {what} of its {number} parts {why}; give smaller batches, or use a "
        f"device with more memory"
    )


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return isinstance(value, Tensor) and isinstance(other, Tensor) and torch.equal(value, other)
    try:
        return bool(value == other)
    except (RuntimeError, TypeError, ValueError):  # of an array, or a type of the user's own
        return False


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
