"""Sizes in a step's batch, which decide the memory of its units: compared with others, and rounded up."""

from __future__ import annotations

from collections.abc import Sequence
from operator import gt
from typing import Any, NamedTuple

import torch

from partitioners.boundary import Boundary, Form

# Sizes between a power of two and the next that others are rounded up to: the number of times that a batch is measured
# while it grows to the double.
SIZES_PER_DOUBLING = 8


class Signature(NamedTuple):
    """A step's sizes, by micro-batch. Two that are equal take the same memory; one that is no larger takes no more."""

    forms: tuple[tuple[Form, Form], ...]  # of inputs and target
    sizes: tuple[tuple[int, ...], ...]  # every dimension of their tensors
    numbers: tuple[tuple[int, ...], ...]  # whole numbers among their values, which a layer may cut a tensor by
    values: tuple[tuple[Any, ...], ...]  # other plain values: names, switches
    role: tuple[Any, ...] = ()  # of units that do more or less than others of their kind

    @classmethod
    def of(cls, pairs: Sequence[tuple[Boundary, Boundary]]) -> Signature:
        """The signature of a step on micro-batches (inputs, target)."""
        parts = [(inputs.signature, target.signature) for inputs, target in pairs]
        return cls(
            forms=tuple((x.form, y.form) for x, y in parts),
            sizes=tuple(x.sizes + y.sizes for x, y in parts),
            numbers=tuple(x.numbers + y.numbers for x, y in parts),
            values=tuple(x.values + y.values for x, y in parts),
        )

    def part(self, first: int, end: int, role: tuple[Any, ...]) -> Signature:
        """Its micro-batches `[first, end)`, in a role."""
        parts = {name: getattr(self, name)[first:end] for name in ("forms", "sizes", "numbers", "values")}
        return Signature(**parts, role=(*self.role, *role))

    def in_role(self, role: str) -> Signature:
        return self._replace(role=(*self.role, role))

    @property
    def of_batch(self) -> Signature:
        """Sizes of the batch alone: without plain values and role."""
        return self._replace(values=(), role=())

    @property
    def num_micro_batches(self) -> int:
        return len(self.sizes)

    def no_larger(self, known: Signature, *, numbers: bool = True) -> bool:
        """Return True if no micro-batch is more or larger, of the same forms and role; `numbers` are sizes, too."""
        if self.role != known.role or self.num_micro_batches > known.num_micro_batches:
            return False
        for m, form in enumerate(self.forms):
            if form != known.forms[m] or any(map(gt, self.sizes[m], known.sizes[m])):
                return False
            if numbers and any(map(gt, self.numbers[m], known.numbers[m])):
                return False
        return True

    def wider(self, like: Signature) -> Signature:
        """Round up the sizes in which it differs from another signature of the same forms.

        Whole numbers that are also a tensor's size are rounded as that is. Others are rounded up to a power of two,
        since ids may count up for ever, and are no less than the other's: of lists of lengths hardly one is the largest
        in all.
        """
        sizes = [
            tuple(size if size == other else rounded_up(size) for size, other in zip(each, others, strict=True))
            for each, others in zip(self.sizes, like.sizes, strict=True)
        ]
        numbers = []
        for each, others, own in zip(self.numbers, like.numbers, self.sizes, strict=True):
            powers = [max(1 << number.bit_length(), other) for number, other in zip(each, others, strict=True)]
            rounded = [rounded_up(n) if n in own else power for n, power in zip(each, powers, strict=True)]
            numbers.append(tuple(n if n == other else r for n, other, r in zip(each, others, rounded, strict=True)))
        return self._replace(sizes=tuple(sizes), numbers=tuple(numbers))

    def narrower(self, like: Signature) -> Signature:
        """Take one off each size in which it differs from another signature of the same forms."""

        def less(each: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
            return tuple(size - (size != other) for size, other in zip(each, others, strict=True))

        return self._replace(
            sizes=tuple(map(less, self.sizes, like.sizes)), numbers=tuple(map(less, self.numbers, like.numbers))
        )


NO_BATCH = Signature((), (), (), ())


def rounded_up(size: int) -> int:
    """The next of a few sizes between a power of two and its double."""
    step = max(1, (1 << max(0, size.bit_length() - 1)) // SIZES_PER_DOUBLING)
    return -(-size // step) * step


def resized(value: Any, sizes: Sequence[int], numbers: Sequence[int]) -> Any:
    """A value with untouched tensors of these sizes, and these numbers, in the order of `Boundary.signature`."""
    boundary = Boundary.of(value, "a batch")
    dims, tensors = iter(sizes), []
    for tensor in boundary.tensors:
        shape = [next(dims) for _ in range(tensor.dim())]
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)  # of its dimensions in memory
        empty = torch.empty_permuted(shape, order, dtype=tensor.dtype)
        tensors.append(empty.requires_grad_(tensor.requires_grad))
    return boundary.with_numbers(numbers).build(tensors)
