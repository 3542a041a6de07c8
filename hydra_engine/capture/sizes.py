"""One recording for many sizes: the forward runs on symbols in place of sizes, and what it asks of them is noted.

torch's own symbols serve, as in `torch.export`; what the forward does with them and goes by is in their conditions. A
size that Python turns into a number, as `range(x.shape[1])` does, is a symbol no more: there is no such recording then.
https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_dynamic_shapes.html
"""

from __future__ import annotations

import builtins
import copy
import logging
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.utils import _pytree as pytree

from hydra_engine.capture.shadow import bytes_of
from hydra_engine.capture.tape import Asked, Call, Tape, is_machinery, name_of, replaced

# Once a forward was recorded for so many sizes, it is for all sizes. That takes as long as some 20 recordings.
NUM_RECORDED = 8
# For so many sets of conditions and answers at most.
MOST_CONDITIONS = 8
# Sizes of 0 and 1 are no symbols: much is otherwise for them.
LEAST_SIZE = 2


_MUTEX = threading.Lock()  # while symbols are watched
# Modules between a forward and its question for a symbol's class, and its arithmetic; torch's operations are in others.
_CLASSES = ("abc", "typing", "numbers", __name__)
_SYMBOLS = ("torch", "torch.fx.experimental.sym_node", "torch.fx.experimental.symbolic_shapes", __name__)

Shapes: TypeAlias = Sequence[Sequence[int]]  # of a batch's tensors


class Recorded(NamedTuple):
    """A run of the forward."""

    tape: Tape
    inputs: list[int]  # numbers of the values that enter it
    output: list[Any]
    spec: Any
    asked: Sequence[tuple[Asked, Any]]  # what it asked of the batch's values, in order, and what it was told

    def text(self) -> str:
        """Return what is run, to compare."""
        return repr((_texts(self.tape.calls), self.output, self.spec, list(map(bytes_of, self.tape.values.constants))))

    def questions(self) -> str:
        """Return what is asked, to compare."""
        return repr([(_texts(asked.calls), name_of(asked.func), asked.args, asked.kwargs) for asked, _ in self.asked])


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
        with _MUTEX, _quiet(), _watched(), FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment):
            self._recorded = run(sizes)
        self._conditions = list(dict.fromkeys(guard.expr for guard in environment.guards))
        if environment.deferred_runtime_asserts or any(each.is_number for each in environment.replacements.values()):
            raise ValueError("sizes that are no symbols any more")
        for each in self._conditions:
            _check_whole(each)
        calls = self._recorded.tape.calls
        self._with_symbols = [k for k, call in enumerate(calls) if _has_symbols((call.args, call.kwargs))]
        for asked, _ in self._recorded.asked:
            _has_symbols((asked.args, asked.kwargs, [(call.args, call.kwargs) for call in asked.calls]))

    def at(self, shapes: Shapes, is_told: Callable[[Asked, Any], bool] = lambda *_: True) -> Recorded | None:
        """Return the run for inputs of these shapes; None: it may be another one.

        is_told: is this the answer to a question for the inputs? Asked for one after the other, as by the forward.
        """
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

        def called(call: Call) -> Call:
            args, kwargs = replaced((call.args, call.kwargs), number)
            return replace(call, args=args, kwargs=kwargs)

        tape, inputs, output, spec, questions = self._recorded
        asked = []
        for each, answer in questions:
            args, kwargs = replaced((each.args, each.kwargs), number)
            asked.append((each._replace(calls=tuple(map(called, each.calls)), args=args, kwargs=kwargs), answer))
            if not is_told(*asked[-1]):
                return None
        tape, calls = copy.copy(tape), list[Call](tape.calls)
        for k in self._with_symbols:
            calls[k] = called(calls[k])
        tape.calls = calls
        return Recorded(tape, list(inputs), list(map(number, output)), spec, asked)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing what it raises."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _watched() -> Iterator[None]:
    """Refuse what a forward does with a symbol without leaving a condition: text or a float of it, or for its class.

    Raises ValueError at the end as well, since the forward may catch it. Class and device of tensors with symbols are
    told as they are of those without.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    mine, is_instance, plain = threading.get_ident(), builtins.isinstance, torch.empty(0)
    refused: list[str] = []

    def is_forward(between: tuple[str, ...] = _CLASSES) -> bool:
        """Return True if a forward asks, in this thread."""
        if threading.get_ident() != mine:
            return False
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_globals.get("__name__", "") in between:
            frame = frame.f_back
        return not is_machinery(frame.f_globals.get("__name__", ""))

    def refuse(what: str, between: tuple[str, ...] = _CLASSES) -> None:
        if is_forward(between):
            refused.append(what)
            raise ValueError(what)

    def checked(value: Any, classes: Any) -> bool:
        found = is_instance(value, classes)
        if is_instance(value, SymInt) and found != is_instance(0, classes):
            refuse("the class of a size")
        if is_instance(value, FakeTensor) and is_forward():
            return is_instance(plain, classes)
        return found

    def device(tensor: Any) -> Any:
        if threading.get_ident() != mine or torch._C._is_torch_function_all_disabled():
            return own_device.__get__(tensor)
        return Tensor.device.__get__(tensor)  # as of any tensor: the recording tells it

    def text(own: Callable[..., str]) -> Callable[..., str]:
        def of(symbol: Any, *args: Any) -> str:
            refuse("a size as text")
            return own(symbol, *args)

        return of

    def no_float(symbol: Any, *args: Any) -> None:
        refuse("a float made of sizes", _SYMBOLS)
        make_float(symbol, *args)

    floats: Any = SymFloat
    make_float, names = floats.__init__, ("__str__", "__repr__", "__format__")
    before = {name: vars(SymInt).get(name) for name in names}
    for name in names:
        setattr(SymInt, name, text(getattr(SymInt, name)))
    fakes: Any = FakeTensor
    own_device = fakes.device
    vars(builtins)["isinstance"], floats.__init__, fakes.device = checked, no_float, property(device)
    try:
        yield
    finally:
        vars(builtins)["isinstance"], floats.__init__, fakes.device = is_instance, make_float, own_device
        for name, own in before.items():
            if own is None:
                delattr(SymInt, name)
            else:
                setattr(SymInt, name, own)
    if refused:
        raise ValueError(refused[0])


class BySize:
    """What a forward was recorded as, for forms of batches that differ in their sizes alone."""

    def __init__(self) -> None:
        # By a form without its sizes, and by the answers to what the forward asks: those that were recorded, and what
        # was. By the form alone: that for all sizes, once it is known.
        self._seen: dict[Hashable, list[tuple[Shapes, str, str]]] = {}
        self._known: dict[Hashable, list[AnySize]] = {}
        self._for_each: set[Hashable] = set()  # that have to be recorded for each

    def find(self, kind: Hashable, shapes: Shapes, is_told: Callable[[Asked, Any], bool]) -> Recorded | None:
        """Return what would be recorded for these sizes and answers, as `AnySize.at` has them; None: it has to be."""
        return next(filter(None, (each.at(shapes, is_told) for each in self._known.get(kind, ()))), None)

    def note(
        self, kind: Hashable, answers: Hashable, shapes: Shapes, recorded: Recorded, run: Callable[[Any], Recorded]
    ) -> None:
        """Record the forward for all sizes once it was for many, if it is then the same for each of those.

        run: records it, for shapes with symbols in them, and with these answers.
        """
        if (kind, answers) in self._for_each:
            return
        seen = self._seen.setdefault((kind, answers), [])
        seen.append((shapes, recorded.text(), recorded.questions()))
        if len(seen) % NUM_RECORDED:
            return
        varies = _varying(shapes for shapes, *_ in seen)
        # Others are recorded for each anyway.
        seen[:] = [each for each in seen if all(map(_are_symbols, each[0], varies))]
        varies = _varying(shapes for shapes, *_ in seen)
        known = self._known.setdefault(kind, [])
        with suppress(Exception):  # what does not run on symbols is recorded for each size
            made = AnySize(seen[-1][0], varies, run)
            again = [made.at(shapes) for shapes, *_ in seen]  # None: under other conditions
            is_same = all(
                one is None or (one.text(), one.questions()) == (text, questions)
                for one, (_, text, questions) in zip(again, seen, strict=True)
            )
            if is_same and again[-1] is not None and len(known) < MOST_CONDITIONS:
                known.append(made)
                return
        self._for_each.add((kind, answers))


def _texts(calls: Iterable[Call]) -> list[Any]:
    return [(name_of(call.func), call.args, call.kwargs, call.result) for call in calls]


def _varying(shapes: Iterable[Shapes]) -> list[list[bool]]:
    """Return which sizes of tensors are not the same in all of these."""
    return [[len(set(sizes)) > 1 for sizes in zip(*tensor, strict=True)] for tensor in zip(*shapes, strict=True)]


def _are_symbols(shape: Sequence[int], varies: Sequence[bool]) -> bool:
    return all(size >= LEAST_SIZE for size, is_symbol in zip(shape, varies, strict=True) if is_symbol)


def _has_symbols(tree: Any) -> bool:
    """Return True if there are sizes in it that are symbols. Raises ValueError for what follows from them otherwise."""
    found = False

    def look(leaf: Any) -> Any:
        nonlocal found
        if isinstance(leaf, (SymFloat, SymBool)):
            raise ValueError("numbers that are no sizes")
        for each in leaf if isinstance(leaf, torch.Size) else (leaf,):
            if isinstance(each, SymInt):
                found = True
                _check_whole(each.node.expr)
        return leaf

    replaced(tree, look)
    return found


def _check_whole(term: Any) -> None:
    """Raise ValueError for a term that goes through floats, as torch's own operations may: sympy rounds otherwise."""
    if any(each.is_Float or "Float" in type(each).__name__ or "TrueDiv" in type(each).__name__ for each in term.args):
        raise ValueError("floats made of sizes")
    for each in term.args:
        _check_whole(each)


def stand_ins(inputs: Any, sizes: Sequence[Sequence[Any]]) -> Any:
    """Return inputs whose tensors, all contiguous, are on meta and have these sizes."""
    rest = iter(sizes)

    def stand_in(tensor: Tensor) -> Tensor:
        made = torch.empty(tuple(next(rest)), dtype=tensor.dtype, device="meta")
        return made.requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, stand_in, inputs)
