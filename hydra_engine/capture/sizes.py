"""One recording for many sizes: the forward runs on symbols in place of sizes, and what it asks of them is noted.

torch's own symbols serve, as in `torch.export`; what the forward does with them and goes by is in their conditions. A
size that Python turns into a number, as `range(x.shape[1])` does, is a symbol no more: there is no such recording then.
https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_dynamic_shapes.html
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.utils import _pytree as pytree

from hydra_engine.capture.shadow import bytes_of
from hydra_engine.capture.tape import Call, Tape, Value, name_of, replaced

# Once a forward was recorded for so many sizes, it is for all sizes. That takes as long as some 20 recordings.
NUM_RECORDED = 8
# Sizes of 0 and 1 are no symbols: much is otherwise for them.
LEAST_SIZE = 2


Shapes: TypeAlias = Sequence[Sequence[int]]  # of a batch's tensors


class Recorded(NamedTuple):
    """A run of the forward."""

    tape: Tape
    inputs: list[int]  # numbers of the values that enter it
    output: list[Any]
    spec: Any

    def text(self) -> str:
        """Return what is run, to compare."""
        calls = [(name_of(call.func), call.args, call.kwargs, call.result) for call in self.tape.calls]
        plain = [leaf for leaf in self.output if not isinstance(leaf, Value)]
        return repr((calls, plain, list(map(bytes_of, self.tape.values.constants))))


class AnySize:
    """A run of the forward with symbols for some sizes of its inputs: what it runs as for all that meet its conditions.

    Raises whatever torch does for a forward that it cannot run on symbols, and ValueError if some are none any more.
    """

    def __init__(self, shapes: Shapes, varies: Sequence[Sequence[bool]], run: Callable[[Any], Recorded]) -> None:
        """Run it on shapes of which some sizes vary. run: records the forward, for inputs with these symbols."""
        # torch has no public way to symbols. Importing these takes a second, which most runs do without.
        from torch._dynamo.source import ConstantSource
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        environment = ShapeEnv(duck_shape=False)
        self._shapes = shapes
        self._symbols: dict[tuple[int, int], Any] = {}  # by tensor and dimension

        def symbol(place: tuple[int, int], size: int) -> Any:
            source = ConstantSource(f"size_{place[0]}_{place[1]}")
            self._symbols[place] = found = environment.create_symbol(size, source, DimDynamic.DYNAMIC)
            return environment.create_symintnode(found, hint=size, source=source)

        sizes = [
            [symbol((k, d), size) if varies[k][d] else size for d, size in enumerate(shape)]
            for k, shape in enumerate(shapes)
        ]
        with _quiet(), FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment):
            self._recorded = run(sizes)
        self._conditions = list(dict.fromkeys(guard.expr for guard in environment.guards))
        if environment.deferred_runtime_asserts or any(each.is_number for each in environment.replacements.values()):
            raise ValueError("sizes that are no symbols any more")
        calls = self._recorded.tape.calls
        self._with_symbols = [k for k, call in enumerate(calls) if _has_symbols((call.args, call.kwargs))]

    def at(self, shapes: Shapes) -> Recorded | None:
        """Return the run for inputs of these shapes; None: it may be another one."""
        known: dict[Any, int] = {}
        for k, shape in enumerate(shapes):
            for d, size in enumerate(shape):
                symbol = self._symbols.get((k, d))
                if symbol is None and size != self._shapes[k][d]:
                    return None
                if symbol is not None and size < LEAST_SIZE:
                    return None
                if symbol is not None:
                    known[symbol] = size
        if not all(each.xreplace(known) == True for each in self._conditions):  # noqa: E712 - not of sympy's classes
            return None
        numbers: dict[Any, int] = {}

        def number(leaf: Any) -> Any:
            if isinstance(leaf, torch.Size):
                return torch.Size(map(number, leaf))
            if not isinstance(leaf, SymInt):
                return leaf
            term = leaf.node.expr
            if term not in numbers:
                numbers[term] = int(term.xreplace(known))
            return numbers[term]

        tape, inputs, output, spec = self._recorded
        tape, calls = copy.copy(tape), list[Call](tape.calls)
        for k in self._with_symbols:
            args, kwargs = replaced((calls[k].args, calls[k].kwargs), number)
            calls[k] = replace(calls[k], args=args, kwargs=kwargs)
        tape.calls = calls
        return Recorded(tape, list(inputs), list(map(number, output)), spec)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing what it raises."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class BySize:
    """What a forward was recorded as, for forms of batches that differ in their sizes alone."""

    def __init__(self) -> None:
        # By a form without its sizes: those that were recorded, and what was; and that for all sizes, once it is known.
        self._seen: dict[Hashable, list[tuple[Shapes, str]]] = {}
        self._known: dict[Hashable, AnySize] = {}
        self._for_each: set[Hashable] = set()  # that have to be recorded for each

    def find(self, kind: Hashable, shapes: Shapes) -> Recorded | None:
        """Return what would be recorded for these sizes; None: it has to be."""
        known = self._known.get(kind)
        return None if known is None else known.at(shapes)

    def note(self, kind: Hashable, shapes: Shapes, recorded: Recorded, run: Callable[[Any], Recorded]) -> None:
        """Record the forward for all sizes once it was for many, if it is then the same for each of those.

        run: records it, for shapes with symbols in them.
        """
        if kind in self._for_each:
            return
        seen = self._seen.setdefault(kind, [])
        seen.append((shapes, recorded.text()))
        if len(seen) % NUM_RECORDED:
            return
        per_tensor = [list(zip(*column, strict=True)) for column in zip(*(each for each, _ in seen), strict=True)]
        varies = [[len(set(sizes)) > 1 for sizes in dims] for dims in per_tensor]
        with suppress(Exception):  # what does not run on symbols is recorded for each size
            made = AnySize(shapes, varies, run)
            again = [made.at(each) for each, _ in seen]
            if all(one is not None and one.text() == text for one, (_, text) in zip(again, seen, strict=True)):
                self._known[kind] = made
                return
        self._for_each.add(kind)


def _has_symbols(tree: Any) -> bool:
    """Return True if there are sizes in it that are symbols. Raises ValueError for what follows from them otherwise."""
    found = False

    def look(leaf: Any) -> Any:
        nonlocal found
        if isinstance(leaf, (SymFloat, SymBool)):
            raise ValueError("numbers that are no sizes")
        found |= any(isinstance(each, SymInt) for each in (leaf if isinstance(leaf, torch.Size) else (leaf,)))
        return leaf

    replaced(tree, look)
    return found


def stand_ins(inputs: Any, sizes: Sequence[Sequence[Any]]) -> Any:
    """Return inputs whose tensors, all contiguous, are on meta and have these sizes."""
    rest = iter(sizes)

    def stand_in(tensor: Tensor) -> Tensor:
        made = torch.empty(tuple(next(rest)), dtype=tensor.dtype, device="meta")
        return made.requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, stand_in, inputs)
