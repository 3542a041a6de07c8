"""The programs of a model: what its forward runs as, for each form of its inputs."""

from __future__ import annotations

import copy
import inspect
import itertools
import threading
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from hydra_engine.capture.cuts import Cuts, Lives, num_bytes
from hydra_engine.capture.outputs import carried
from hydra_engine.capture.piece import Piece
from hydra_engine.capture.shadow import Caches, Shadow, is_opaque, state_of
from hydra_engine.capture.sizes import BySize, Recorded, stand_ins
from hydra_engine.capture.tape import (
    HERE,
    Asked,
    Call,
    Constant,
    Held,
    Tape,
    Unknown,
    Value,
    is_leaf,
    replaced,
)
from hydra_engine.capture.whole import WholeModules, apart_from_draws
from partitioners.reach import PLAIN, Shared

# A number that the forward draws and compares: what holds for both ends of its range holds for it.
_ENDS_OF_RANGE = (0.0, 1.0 - 2.0**-24)
_RANDOM_NUMBERS = (torch.rand, torch.rand_like)
# Classes of what may be in a batch beside tensors: their `repr` tells all that is in them. (Arrays are told by bytes.)
_TOLD = (*PLAIN, np.ndarray, range, slice, Enum)
# A module with more of the model's weights than this, and modules with weights in it, is not kept whole without a word.
MOST_KEPT = 0.8


class Uncut(ValueError):
    """The model's own forward cannot be cut into layers: it would have to be one.

    why: the line that stands in the way, and what it does. Raised from what the forward raises without values, if that
    is why.
    """

    def __init__(self, model: nn.Module, why: str) -> None:
        super().__init__(
            f"the model's own forward ({type(model).__name__}) cannot be made layers: {why}; compute it with tensors "
            f"alone (torch.where), take it from the batch, put that part into a module of its own, which is then one "
            f"layer, or keep all of it as one: Model(module, whole=[''])"
        )
        self.why = why


class _OfTensor(NamedTuple):
    """All of a tensor that decides what a forward runs, but for values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Form(NamedTuple):
    """All that decides what a forward runs, but for values."""

    spec: str
    leaves: tuple[Any, ...]
    flags: tuple[bool, ...]  # of each module: is it in training mode?
    place: str
    narrow: torch.dtype | None  # what parameters are cast to

    def without_sizes(self) -> tuple[Form, Sequence[Sequence[int]]]:
        """Return the form of batches with other sizes, and the shapes of tensors, if these are contiguous."""
        tensors = [each for each in self.leaves if isinstance(each, _OfTensor)]
        if any(each.stride != torch.empty(each.shape, device="meta").stride() for each in tensors):
            return self, ()
        bare = [
            each._replace(shape=(0,) * len(each.shape), stride=()) if isinstance(each, _OfTensor) else each
            for each in self.leaves
        ]
        return self._replace(leaves=tuple(bare)), [each.shape for each in tensors]


# Parameters of a forward that take any number of arguments.
_GATHERING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, eq=False)
class Program:
    """The calls that a forward makes on inputs of one form, cut into pieces."""

    name: str
    pieces: Sequence[Piece]
    output: Sequence[Any]  # leaves of what the forward returns
    spec: Any

    def build(self, values: Sequence[Any]) -> Any:
        """Return what the forward returns, around the values that the last piece gave."""
        leaves = [values[leaf.number] if isinstance(leaf, Value) else leaf for leaf in self.output]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass
class _Node:
    """The next question about batches of one form, and the program or question that each answer leads to."""

    asked: Asked | None = None
    program: Program | None = None
    children: dict[Hashable, _Node] = field(default_factory=dict)


class Programs(Shared):
    """Records a model's forward, once for each form of inputs, and finds the program for a batch. From any thread."""

    def __init__(self, model: nn.Module, whole: Collection[str] = ()) -> None:
        """`whole`: paths of modules to keep as one call. Raises TypeError for a model of torch.jit."""
        self.model = model
        self._lock = threading.RLock()
        self._named = dict(model.named_modules())
        self._kept: set[str] = set(whole)
        self._ran_on: dict[str, list[Tensor | None]] = {}  # values that kept modules ran on, for batches without
        self._roots: dict[Form, _Node] = {}
        self._sizes = BySize()
        self.by_name: dict[str, Program] = {}
        self.kept_message = ""  # of a module that is one layer, and most of the model
        self._usual: list[Any] = []  # answers for the first batch: also where values are not to be had
        self._dtypes = {name: each.dtype for name, each in model.named_parameters(remove_duplicate=False)}
        self._state = _state(model)
        self.cuts = Cuts()

    def of(self, model: nn.Module) -> Programs:
        """Return these programs for a copy of the model."""
        made = copy.copy(self)
        made.model, made._named = model, dict(model.named_modules())
        return made

    def are_of_now(self) -> bool:
        """Return False if an attribute of the model, which a forward may read, was changed since it was recorded."""
        return _state(self.model) == self._state

    def record_anew(self) -> None:
        """Forget what was recorded, since an attribute was changed: forwards are recorded again, and cut as before."""
        if not self.are_of_now():
            self._state = _state(self.model)
            self._roots.clear()
            self._sizes = BySize()

    def flags(self, forced: bool | None) -> tuple[bool, ...]:
        """Return which modules are in training mode; `forced`: all, or none."""
        flags = tuple([module.training for module in self._named.values()])
        return flags if forced is None or forced == flags[0] else (forced,) * len(flags)

    def find(
        self, inputs: Any, flags: tuple[bool, ...], narrow: torch.dtype | None = None
    ) -> tuple[Program, list[Tensor]]:
        """Return the program for a batch, which is recorded if it is the first of its form, and the batch's tensors.

        Raises ValueError for a batch for which the forward cannot be cut as it was for the first one.
        """
        form, batch = self._look(inputs, flags, narrow)
        node = self._roots.get(form)
        while node is not None and node.program is None:
            assert node.asked is not None
            answer = batch.answer(node.asked)
            node = node.children.get(_told(answer)) if answer is not _ANY else next(iter(node.children.values()), None)
        if node is not None and node.program is not None:
            return node.program, batch.tensors
        # In a unit that keeps or counts what autograd saves, which here is on meta.
        with self._lock, _disable_current_modes(), saved_tensors_hooks(_as_it_is, _as_it_is), apart_from_draws():
            try:
                return self._made(form, batch), batch.tensors
            except Uncut as error:
                if self.cuts.is_settled and error.__cause__ is not None:
                    raise error.__cause__ from None  # what a plain loop raises, most likely
                raise

    def _look(self, inputs: Any, flags: tuple[bool, ...], narrow: torch.dtype | None = None) -> tuple[Form, _Batch]:
        leaves, spec = pytree.tree_flatten(inputs)
        batch = _Batch(inputs, [each for each in leaves if isinstance(each, Tensor)], self._usual)
        return Form(str(spec), tuple(map(_form, leaves)), flags, batch.here.type, narrow), batch

    def narrow(self, held: nn.Module) -> torch.dtype | None:
        """Return what the parameters of a device's copy of a layer were cast to."""
        for name, parameter in held.named_parameters():
            if parameter.dtype != self._dtypes.get(name, parameter.dtype):
                return parameter.dtype
        return None

    def foresee(self, inputs: Any, flags: tuple[bool, ...]) -> None:
        """Note where the forward may be cut in another mode than the first batch's: there it is cut as well."""
        tape, numbers, output, *_ = self._record(*self._look(inputs, flags))
        lives = Lives(tape.calls, numbers, [leaf.number for leaf in output if isinstance(leaf, Value)])
        entangled = lives.entangled(tape.calls, tape.values.storage)
        self.cuts.allowed = {call.site for p, call in enumerate(tape.calls) if p not in entangled}

    def _made(self, form: Form, batch: _Batch) -> Program:
        kind, shapes = form.without_sizes()
        recorded = self._sizes.find(kind, shapes, batch.is_told)
        if recorded is None:
            recorded = self._record(form, batch)
            answers = tuple(_told(answer) for _, answer in recorded.asked)
            if shapes and not self._kept:
                self._sizes.note(kind, answers, shapes, recorded, partial(self._run_on, form, batch))
        program = self._cut(recorded)
        node = self._roots.setdefault(form, _Node())
        for asked, answer in recorded.asked:
            node.asked = asked
            node = node.children.setdefault(_told(answer), _Node())
        node.program = program
        if not self._usual:
            self._usual.extend(answer for _, answer in recorded.asked)
        return program

    def _run_on(self, form: Form, batch: _Batch, sizes: Sequence[Sequence[Any]]) -> Recorded:
        """Record the forward for tensors of other sizes, which may be symbols, with the answers for this batch."""
        shadow, bare = Shadow(self.model, form.narrow), batch.of_sizes(sizes)
        with shadow.apart():
            before = shadow.left(lambda _: False, has_kinds=True)
            found = self._run(shadow, form, bare, Caches())
            after = shadow.left(lambda _: False, has_kinds=True)
        if any(told != before.get(where) and is_opaque(told) for where, told in after.items()):
            raise ValueError("a forward that leaves what may depend on sizes")
        return found

    def _record(self, form: Form, batch: _Batch) -> Recorded:
        caches = Caches()
        while True:
            # A new one each time: the first forward of a model may add hooks to it.
            shadow = Shadow(self.model, form.narrow)
            try:
                with shadow.apart():
                    return self._settled(shadow, form, batch, caches)
            except Unknown as unknown:
                self._keep(unknown)

    def _settled(self, shadow: Shadow, form: Form, batch: _Batch, caches: Caches) -> Recorded:
        """Record the forward, and see that no call of it depends on what those before have left."""

        def left() -> dict[str, str]:
            return shadow.left(lambda path: path in self._kept or is_leaf(self._named[path]))

        before = left()
        recorded = self._run(shadow, form, batch, caches)
        for path in shadow.rebound():
            if not any(each == path or path.startswith(f"{each}.") for each in self._kept):
                raise self._depends(path, "replaces a parameter or a buffer (write into it: copy_)")
        if changed := _difference(before, after := left()):
            owner, named = shadow.owner(changed), _shown(changed)
            text = self._run(shadow, form, batch, caches).text()
            if text != recorded.text():
                raise self._depends(owner, f"changes {named}, which its next call depends on")
            # A hook may record tensors, which the same forward reads.
            if again := _difference(
                *(
                    {k: v for k, v in each.items() if not (is_opaque(v) and shadow.is_record(k))}
                    for each in (after, left())
                )
            ):
                raise self._depends(
                    shadow.owner(again), f"changes {_shown(again)} with each call, which its layers would not"
                )
        batch.asked[:] = recorded.asked
        return recorded

    def _depends(self, path: str, why: str) -> Unknown:
        forward = type(self._named[path]).forward
        code = getattr(inspect.unwrap(forward), "__code__", None)
        where = "" if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}: "
        return Unknown(path, f"{where}{type(self._named[path]).__name__}.forward", why)

    def _run(self, shadow: Shadow, form: Form, batch: _Batch, caches: Caches) -> Recorded:
        """Run the shadow's forward, and record it."""
        batch.asked.clear()
        whole = WholeModules(shadow, batch.tensors if batch.has_values else None, self._ran_on)
        tape = Tape(shadow, batch.here, frozenset(self._kept), batch.recorded, whole.run)
        check_call(self.model, batch.inputs)
        try:
            args, kwargs = called_with(pytree.tree_map_only(Tensor, tape.values.input, batch.inputs))
        except ValueError as error:  # a PackedSequence, say, has one of its tensors on the CPU
            raise Uncut(self.model, f"what it is given needs values ({error})") from None
        numbers = list(range(len(tape.values)))
        shadow.set_modes(dict(zip(self._named, form.flags, strict=True)))
        shadow.recorder = tape.module
        try:
            try:
                with caches.apart(), tape.recording():
                    out = carried(shadow.model(*args, **kwargs))
            except Unknown:
                raise
            except Exception as error:
                raise tape.raised or Uncut(self.model, f"it raises {type(error).__name__}: {error}") from error
            if tape.raised is not None:
                raise tape.raised
            leaves, spec = pytree.tree_flatten(out)
            output = [tape.described(each) if isinstance(each, Tensor) else each for each in leaves]
            tape.calls = tape.values.used(tape.calls, [each.number for each in output if isinstance(each, Value)])
            return Recorded(tape, numbers, output, spec, list(batch.asked))
        finally:
            shadow.recorder = None

    def _keep(self, unknown: Unknown) -> None:
        """Keep the module that asks as one call, or refuse the model."""
        path = unknown.frame
        while path and path in self._kept:
            path = path.rpartition(".")[0]
        if not path:
            raise Uncut(self.model, f"{unknown.line} {unknown.why}")
        if self.cuts.sites is not None and not self.cuts.are_around(path):
            raise ValueError(
                f"the model's own forward ({type(self.model).__name__}) cannot be made layers: {unknown.line} "
                f"{unknown.why}; compute it with tensors alone (torch.where), take it from the batch, or keep {path} "
                f"as one layer: Model(module, whole=[{path!r}])"
            )
        module = self._named[path]
        is_split = any(next(child.parameters(), None) is not None for child in module.children())
        if is_split and (own := num_bytes(module)) > MOST_KEPT * (every := num_bytes(self.model)):
            self.kept_message = (
                f"{path} ({type(module).__name__}), with {own / every:.0%} of the model's weights, is one layer: "
                f"{unknown.line} {unknown.why}; for more layers, put that part into a module of its own, or switch it "
                f"off"
            )
        self._kept.add(path)

    def _cut(self, recorded: Recorded) -> Program:
        tape, inputs, output, spec, _ = recorded
        calls, returned = tape.calls, list[int]()
        for k, leaf in enumerate(output):
            if isinstance(leaf, Value):
                output[k] = Value(len(returned))
                returned.append(leaf.number)
            elif isinstance(leaf, (Held, Constant)):
                raise ValueError(
                    "the model's own forward returns a parameter, a buffer or a constant as it is, limit: what it "
                    "computes; clone it"
                )
        lives = Lives(calls, inputs, returned)
        positions = self.cuts.places(calls, lives, tape.values, self._named)
        pieces = []
        entering = inputs
        crossing = lives.crossing(0, len(calls))
        for k, (first, last) in enumerate(itertools.pairwise([0, *positions, len(calls)])):
            leaving = returned if last == len(calls) else sorted(crossing[last])
            pieces.append(Piece(calls[first:last], entering, leaving, tape.values))
            entering = leaving
            self.cuts.holdings[k].update(map(".".join, pieces[k].held))
        program = Program(f"p{len(self.by_name)}", pieces, output, spec)
        self.by_name[program.name] = program
        return program


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _difference(before: Mapping[str, str], after: Mapping[str, str]) -> str | None:
    """Return a path at which something else is."""
    return next((each for each in {**after, **before} if before.get(each) != after.get(each)), None)


def _shown(where: str) -> str:
    return where.replace("__globals__.", "").replace("__class__.", "")


_ANY = object()  # stands for an answer that nobody has


class _Batch:
    """Answers what a forward asks from the values of a batch; where it has none, as for the first batch."""

    def __init__(self, inputs: Any, tensors: list[Tensor], usual: Sequence[Any]) -> None:
        """`tensors`: of `inputs`. usual: answers for the first batch."""
        self.inputs, self.tensors, self._usual = inputs, tensors, usual
        has_place = tensors and not tensors[0].is_meta
        self.here = tensors[0].device if has_place else torch.device("cpu")
        self.has_values = not any(isinstance(each, FakeTensor) or each.is_meta for each in tensors)
        self.can_compute = True  # anything; without: it answers as it is told to
        self.asked: list[tuple[Asked, Any]] = []

    def of_sizes(self, sizes: Sequence[Sequence[Any]]) -> _Batch:
        """Return a batch of other sizes, which may be symbols, that answers what was asked so far as this one did."""
        inputs = stand_ins(self.inputs, sizes)
        answers = [answer for _, answer in self.asked]
        found = _Batch(inputs, [each for each in pytree.tree_leaves(inputs) if isinstance(each, Tensor)], answers)
        found.here, found.has_values, found.can_compute = self.here, False, False
        return found

    def is_told(self, asked: Asked, answer: Any) -> bool:
        """Return True if this is the answer for the batch; False as well where it has to be recorded to tell."""
        try:
            found = self.answer(asked)
        except Exception:  # which the forward raises, or catches, when it is recorded
            return False
        return found is not _ANY and _told(found) == _told(answer)

    def answer(self, asked: Asked) -> Any:
        """Return the answer, or `_ANY` if it is not known and any may do, as long as none is recorded."""
        extremes = _ENDS_OF_RANGE if any(call.draws for call in asked.calls) else _ENDS_OF_RANGE[:1]
        answers = [self._computed(asked, extreme) for extreme in extremes]
        # Where it asks for sizes, there may be others between those of both ends.
        are_sizes = len(answers) > 1 and isinstance(answers[0], tuple)
        if are_sizes or any(_told(each) != _told(answers[0]) for each in answers):
            raise Unknown("", asked.line, "asks for a number that it draws, so that chance decides what it runs")
        return answers[0]

    def recorded(self, asked: Asked) -> Any:
        """Return the answer for a forward that is being recorded, and note it."""
        answer = self.answer(asked) if self.can_compute else _ANY
        if answer is _ANY:
            k = len(self.asked)
            answer = self._usual[k] if k < len(self._usual) else False
        self.asked.append((asked, answer))
        return copy.deepcopy(answer) if isinstance(answer, (list, np.ndarray)) else answer  # the forward may change it

    def _computed(self, asked: Asked, extreme: float) -> Any:
        asks = pytree.tree_leaves((asked.args, asked.kwargs))
        needs_values = any(call.reads for call in asked.calls) or any(isinstance(each, Value) for each in asks)
        if needs_values and not self.has_values:
            return _ANY
        known: dict[int, Any] = dict(enumerate(self.tensors))

        def resolved(leaf: Any) -> Any:
            if isinstance(leaf, Constant):
                return asked.constants[leaf.number].to(self.here)
            return known[leaf.number] if isinstance(leaf, Value) else self.here if leaf is HERE else leaf

        def run(call: Call | Asked) -> Any:
            args, kwargs = replaced((call.args, call.kwargs), resolved)
            return call.func(*args, **kwargs)

        with torch.no_grad(), apart_from_draws():
            for call in asked.calls:
                found = run(call)
                if call.draws:
                    if call.func not in _RANDOM_NUMBERS:
                        raise Unknown("", call.line, "draws what a decision depends on")
                    found = torch.full_like(found, extreme)
                for ref, value in zip(pytree.tree_leaves(call.result), pytree.tree_leaves(found), strict=True):
                    if isinstance(ref, Value):
                        known[ref.number] = value
            return run(asked)


def _state(model: nn.Module) -> dict[str, str]:
    """Return all that a forward may read of the model beside its inputs, modes and weights."""
    tensors = [*model.parameters(), *model.buffers()]
    state = state_of(model, set(map(id, tensors)))
    names = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    held = {f"{name} held": f"{tuple(each.shape)} {each.dtype} {each.requires_grad}" for name, each in names}
    return {where: told for where, told in state.items() if where.rpartition(".")[2] != "training"} | held


def called_with(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a module's forward: a tuple's in order, a dict's by name, anything else alone."""
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs, {}) if isinstance(inputs, tuple) and not hasattr(inputs, "_fields") else ((inputs,), {})


def check_call(model: nn.Module, inputs: Any) -> None:
    """Raise TypeError where a module's own forward does not take the inputs of a batch, saying what it takes."""
    args, kwargs = called_with(inputs)
    # A decorator with functools.wraps may take other arguments than what it wraps.
    signature = inspect.signature(model.forward, follow_wrapped=False)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = [name for name, each in signature.parameters.items() if each.kind not in _GATHERING]
        needed = [name for name in names if signature.parameters[name].default is inspect.Parameter.empty]
        given = f"a {type(inputs).__name__}"
        if args != (inputs,):
            given += f" with {', '.join(map(str, kwargs))}" if kwargs else f" of {len(args)}"
        example = ", ".join(needed or names[:2])
        raise TypeError(
            f"the forward of the model ({type(model).__name__}) takes ({', '.join(names)}), and the inputs of a batch "
            f"are {given}: {error}; give its arguments as a tuple ({example}) or a dict with these names, in the batch "
            f"or by unpack= of the task"
        ) from None


def _form(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _OfTensor(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)
    if not isinstance(leaf, _TOLD):
        raise _opaque(leaf)
    return type(leaf), _told(leaf)


def _told(value: Any) -> Hashable:
    """Return what tells a plain value from others: of an array all elements, of which its `repr` shows some."""
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            if (other := next((each for each in value.flat if not isinstance(each, PLAIN)), None)) is not None:
                raise _opaque(other)
            return value.dtype.str, value.shape, repr(value.tolist())
        return value.dtype.str, value.shape, value.tobytes()
    return repr(value)


def _opaque(value: Any) -> TypeError:
    return TypeError(
        f"the inputs of a batch hold a {type(value).__module__}.{type(value).__qualname__}, limit: tensors, arrays, "
        f"numbers, strings, and tuples, lists and dicts of them, which tell whether the model's own forward does the "
        f"same as for another batch; pass its tensors, and make it of them in the forward"
    )
