"""Batches of a loader: unpacked, and split into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from partitioners.plain_numbers import plain, whole_number

LossReduction: TypeAlias = "str | Callable[[Any], float]"
MicroBatch: TypeAlias = "tuple[Any, Any, float]"
Split: TypeAlias = "Callable[[Any, Any, int], Sequence[MicroBatch]]"

LABELS = "labels"  # of a batch, by the data collators of `transformers`


def unpack_batch(batch: Any, *, with_labels: bool = False) -> tuple[Any, Any]:
    """Unpack a pair (inputs, target), or a mapping of inputs and `labels`, the target; with_labels: also an input."""
    if isinstance(batch, Mapping) and LABELS in batch:
        inputs = {name: value for name, value in batch.items() if with_labels or name != LABELS}
        return inputs, batch[LABELS]
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        size = f" of {len(batch)} items" if isinstance(batch, (tuple, list)) else ""
        size = f" with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else size
        raise ValueError(
            f"a batch of the loader is a {type(batch).__name__}{size}, limit: a pair (inputs, target), or a mapping "
            f"with {LABELS!r}; give ModelTask an unpack= function that turns a batch into that pair"
        )
    return batch[0], batch[1]


def batch_size(inputs: Any) -> int:
    """Samples in a batch: dim 0 of the first tensor that has one; 1 where none has."""
    sizes = (leaf.shape[0] for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > 0)
    return next(sizes, 1)


def split(inputs: Any, target: Any, num_micro_batches: int, loss_reduction: LossReduction = "mean") -> list[MicroBatch]:
    """Split a batch of B samples into min(num_micro_batches, B) micro-batches whose sizes differ by at most 1.

    Tensors whose dim 0 is the batch are split, larger pieces first, each into storage of its own, so that its bits do
    not depend on where in the batch it lay; everything else is passed whole. Returns triples (inputs, target, weight):
    weight is b_m / B for "mean", 1 for "sum", and for a function (target) -> number its share of the sum over the
    micro-batches. A single micro-batch has weight 1.
    """
    size = batch_size(inputs)
    num = max(1, min(plain(num_micro_batches), size))
    xs, ys = _pieces(inputs, size, num), _pieces(target, size, num)
    if loss_reduction == "sum" or num == 1:
        weights = [1.0] * num
    elif loss_reduction == "mean":
        weights = [(size // num + (m < size % num)) / max(size, 1) for m in range(num)]
    else:
        assert callable(loss_reduction)
        counts = [float(loss_reduction(y)) for y in ys]
        total = sum(counts)
        weights = [count / total if total else 0.0 for count in counts]
    return list(zip(xs, ys, weights, strict=True))


def _pieces(value: Any, size: int, num: int) -> list[Any]:
    leaves, spec = pytree.tree_flatten(value)

    def cut(leaf: Any) -> Iterator[Any]:
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size and num > 1:
            return (piece.clone() for piece in torch.tensor_split(leaf, num))
        return iter([leaf] * num)

    columns = [list(cut(leaf)) for leaf in leaves]
    return [pytree.tree_unflatten([column[m] for column in columns], spec) for m in range(num)]


def split_batch(global_batch: int, max_device_batch: int, num_devices: int) -> list[int]:
    """Return the sizes, in samples, of the micro-batches that a global batch is split into.

    There are min(global_batch, num_devices * ceil(global_batch / (max_device_batch * num_devices))): each device has as
    many as the others, and no micro-batch is larger than `max_device_batch`. Sizes differ by at most 1, larger ones
    come first. A batch of fewer samples than devices leaves devices idle.

    Raises TypeError for what is no int, ValueError for what is below 1.
    """
    global_batch = whole_number("global_batch", global_batch)
    max_device_batch = whole_number("max_device_batch", max_device_batch)
    num_devices = whole_number("num_devices", num_devices)
    number = min(global_batch, num_devices * -(-global_batch // (max_device_batch * num_devices)))
    size, num_larger = divmod(global_batch, number)
    return [size + 1] * num_larger + [size] * (number - num_larger)
