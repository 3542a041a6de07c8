"""Sizes in a step's batch, which decide the memory of its units."""

from __future__ import annotations

from collections.abc import Sequence
from operator import gt
from typing import Any, NamedTuple

from partitioners.boundary import Boundary, Form


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


NO_BATCH = Signature((), (), (), ())
