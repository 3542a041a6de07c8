"""Records the calls that a module's own forward makes, without computing any of them.

The forward runs on tensors of the `meta` device, which have shapes and no memory, under a mode that sees every call of
torch's Python functions. What a run is recorded as:

    a call of torch's                          a `Call`, with a `Value` for each tensor that goes in or comes out
    a call of a module of torch.nn, or a norm  one `Call` of that module, hooks included
    a number that Python asks for              read from the batch where it depends on the batch alone: a `Guard`
    anything else that has to be known         `Unknown`, raised at the line that asks

The recorded calls are the same Python functions in the same order, so that running them again draws the same random
numbers and builds the same graph.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors

from hydra_engine.capture.shadow import Shadow, with_zeros
from partitioners.precision import is_norm

META = torch.device("meta")


@dataclass(frozen=True)
class Value:
    """Stands in a recorded call for a tensor: what an input is, or what a call gave."""

    number: int


@dataclass(frozen=True)
class Held:
    """Stands for a parameter or buffer of the model, or for a module that is called as a whole."""

    name: str


@dataclass(frozen=True)
class Constant:
    """Stands for a tensor that the forward brought along, from an attribute or from NumPy."""

    number: int


class Here:
    """Stands for the device that the model runs on."""

    def __repr__(self) -> str:
        return "here"


HERE = Here()


class Site(NamedTuple):
    """Where in the model's code a call stands: a stretch of a module's forward between two calls of its children."""

    frame: str  # the module that runs, and for which time
    after: str  # the child that it has called last, and for which time
    number: int  # of the calls in this stretch


@dataclass(frozen=True, kw_only=True)
class Call:
    """One recorded call."""

    func: Any  # a function of torch's, or `Held` for a module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any  # what it gave, with a `Value` for each tensor
    reads: frozenset[int]  # numbers of values
    makes: tuple[int, ...]
    writes: frozenset[int]  # storages that it writes to
    held: frozenset[str]  # parameters, buffers and modules of the model
    with_grad: bool
    site: Site
    frame: str  # path of the module whose forward makes it
    line: str  # of the model's code
    draws: bool


class Asked(NamedTuple):
    """A value that Python has asked for: what to compute from the batch to know it."""

    calls: tuple[Call, ...]
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    line: str


class Unknown(Exception):
    """The forward needs to know what only computing with the weights, or drawing, would tell."""

    def __init__(self, frame: str, line: str, why: str) -> None:
        super().__init__(f"{line} {why}")
        self.frame = frame  # path of the module that asks
        self.line = line
        self.why = why


# Functions that give Python a number, a list or an array in place of a tensor.
_ASKS = {
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.__complex__,
    Tensor.__contains__,
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.is_nonzero,
    Tensor.equal,
    Tensor.allclose,
    torch.equal,
    torch.allclose,
    torch.is_nonzero,
}
# What a recorded run cannot follow.
_REFUSED = {
    Tensor.backward: "calls backward() in the forward",
    Tensor.register_hook: "registers a hook on a tensor",
    Tensor.register_post_accumulate_grad_hook: "registers a hook on a tensor",
    Tensor.retain_grad: "asks for the gradient of a tensor (retain_grad)",
    Tensor.data_ptr: "asks for a tensor's address",
    Tensor.untyped_storage: "takes a tensor's storage",
    Tensor.storage: "takes a tensor's storage",
    torch.autograd.grad: "computes gradients in the forward",
    torch.autograd.backward: "calls backward() in the forward",
}


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    return log_probs.sum((0, 2)) if reduction == "none" else log_probs.sum()


# By function that does not run on meta: one that gives a result of the same size.
_STAND_INS: dict[Any, Callable[..., Any]] = {functional.ctc_loss: _ctc_loss}
_CONSTRUCTORS = frozenset(_device_constructors())
_DRAWING = (
    *("dropout", "rand", "bernoulli", "multinomial", "normal", "uniform", "exponential", "poisson", "cauchy"),
    *("geometric", "rrelu", "attention", "gamma", "dirichlet", "binomial", "fractional", "gumbel"),
)


class Tape(TorchFunctionMode):
    """Records a run of a model's forward."""

    def __init__(self, shadow: Shadow, here: torch.device, kept: frozenset[str], answers: Answers) -> None:
        """`shadow`: a copy of the model on meta. kept: paths of modules to call as a whole. answers: to questions."""
        super().__init__()
        self.here = here
        self.calls: list[Call] = []
        self.constants: list[Tensor] = []
        self._values: dict[int, Value | Held | Constant] = {}  # by id of a tensor on meta
        self._alive: list[Any] = []  # so that ids stay theirs
        self._bytes: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._num_values = 0
        self._answers = answers
        self._kept = kept
        self._made_in: dict[int, tuple[str, str]] = {}  # by number of a value: frame and line, to say who made it
        self._custom: set[int] = set()
        self._frames: list[_Frame] = [_Frame("", "")]
        self._occurrences: dict[str, int] = {}
        self._of_model: set[int] = set()  # storages of parameters and buffers
        self._originals = shadow.originals
        model = shadow.model
        for kind in (model.named_parameters, model.named_buffers):
            for name, tensor in kind(remove_duplicate=False):
                self._values.setdefault(id(tensor), Held(name))
                self._alive.append(tensor)
                self._of_model.add(_storage(tensor))
        self.modules = {id(module): path for path, module in model.named_modules()}
        self._is_whole = False
        self._hooks = _hooks_of_saved()
        self._settings: dict[str, Any] = {}
        self._of_inputs: set[int] = set()
        self._parameters = {_storage(each): name for name, each in model.named_parameters()}
        self.raised: Unknown | None = None  # the first; the forward may have caught it

    # Inputs and outputs

    def input(self, tensor: Tensor) -> Tensor:
        """Return a tensor on meta that stands for one of the inputs."""
        with torch._C.DisableTorchFunction():
            stand_in = _on_meta(tensor)
        self._of_inputs.add(self._storages[self._name(stand_in)])
        return stand_in

    def described(self, tensor: Tensor) -> Value | Held | Constant:
        """Return what stands for a tensor in the record."""
        found = self._values.get(id(tensor))
        if found is None:
            if tensor.device.type == "meta":
                raise self._unknown("uses a tensor that no call of torch's Python functions made")
            if id(tensor) in self._originals:
                raise self._unknown(
                    f"uses {self._originals[id(tensor)]} of the model past its attributes, through a closure or a "
                    f"global, which copies of the model do not follow"
                )
            self._alive.append(tensor)
            found = self._values[id(tensor)] = Constant(len(self.constants))
            self.constants.append(tensor)
        elif isinstance(found, Value) and self._is_of_function(found.number, tensor):
            frame, line = self._made_in[found.number]
            raise Unknown(frame, line, "calls an autograd.Function, whose backward its recorded calls do not show")
        return found

    def _is_of_function(self, number: int, tensor: Tensor) -> bool:
        is_known = number in self._custom or number not in self._made_in
        return not is_known and isinstance(tensor.grad_fn, BackwardCFunction)

    def num_bytes(self, number: int) -> int:
        return self._bytes[number]

    def storage(self, number: int) -> int:
        """Return which memory a value lies in: views of one tensor lie in the same."""
        return self._storages[number]

    def drop_unused(self, outputs: Sequence[int]) -> None:
        """Leave out calls that nothing comes of: what fills a cache that is dropped, say."""
        needed = set(outputs)
        storages = self._of_model | self._of_inputs | {self._storages[number] for number in needed}
        kept = []
        for call in reversed(self.calls):
            is_module = isinstance(call.func, Held)  # which may draw, and change its buffers
            is_used = not (needed.isdisjoint(call.makes) and storages.isdisjoint(call.writes))
            if is_used or is_module or call.draws:
                kept.append(call)
                needed |= call.reads
                storages |= {self._storages[number] for number in call.reads}
        self.calls = kept[::-1]

    # Calls

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what the body runs."""
        with torch.enable_grad(), torch.autocast(self.here.type, enabled=False), self:
            self._settings = _settings(self.here)
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction(), self._noting():
            return self._called(func, tuple(args), kwargs or {})

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note what is raised: `except Exception` in the model's code would hide it."""
        try:
            yield
        except Unknown as unknown:
            self.raised = self.raised or unknown
            raise

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._attribute(func, args)
        if name == "__set__":
            raise self._unknown(f"sets .{func.__self__.__name__} of a tensor")
        if func in _REFUSED:
            raise self._unknown(_REFUSED[func])
        if func is Tensor.__iter__:
            return iter(self._called(torch.unbind, (args[0], 0), {}))
        if func in _ASKS:
            return self._ask(func, args, kwargs)
        if func in (Tensor.__repr__, Tensor.__str__, Tensor.__format__):
            return func(*args, **kwargs)
        return self.record(func, func, args, kwargs)

    def _attribute(self, func: Any, args: tuple[Any, ...]) -> Any:
        attribute, tensor = func.__self__.__name__, args[0]
        if tensor.device.type == "meta":
            if attribute == "device":
                return self.here
            if attribute in ("is_meta", "is_cpu", "is_cuda"):
                return attribute == f"is_{self.here.type}"
        found = func(*args)
        if not isinstance(found, Tensor) or tensor.device.type != "meta":
            return found
        if attribute == "data":
            found = tensor.detach()
            return self._noted(Tensor.detach, (tensor,), {}, found)
        return self._noted(getattr, (tensor, attribute), {}, found)

    def record(self, func: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call on meta and note it."""
        tensors = [each for each in _leaves((args, kwargs)) if isinstance(each, Tensor)]
        has_values = bool(tensors) and not any(each.device.type == "meta" for each in tensors)
        makes_nothing = not tensors and func not in _CONSTRUCTORS and not _takes_device(kwargs)
        if has_values or makes_nothing:
            return run(*args, **kwargs)  # of tensors that have values: the result is a constant
        refs = [self.described(each) for each in tensors]
        if any(isinstance(each, torch.Generator) for each in _leaves((args, kwargs))):
            raise self._unknown("draws from a generator of its own")
        before = {id(each): each._version for each in tensors if not each.is_inference()}
        on_meta = _replaced((args, kwargs), self._to_meta)
        options = on_meta[1]
        if func in _CONSTRUCTORS and options.get("device") is None:
            options = {**options, "device": META}
        try:
            found = _STAND_INS.get(func, run)(*on_meta[0], **options)
        except Unknown:
            raise
        except Exception as error:
            found = self._with_values(func, args, kwargs, error)
        on_meta_tensors = [each for each in _leaves(on_meta) if isinstance(each, Tensor)]
        for ref, each in zip(refs, on_meta_tensors, strict=False):
            if isinstance(ref, Constant) and each._version:  # just made
                raise self._unknown("writes to a tensor that is no buffer; keep it in one (register_buffer)")
        writes = {id(each) for each in tensors if not each.is_inference() and each._version != before.get(id(each))}
        written = [_storage(each) for each in tensors if id(each) in writes]
        if changed := [self._parameters[each] for each in written if each in self._parameters]:
            raise self._unknown(
                f"changes parameter {changed[0]}, which only the optimizer may; keep what a forward changes in a buffer"
            )
        if not self._of_model.isdisjoint(written) or _moves_averages(func, args, kwargs):
            self._check_runs_once()
        return self._noted(func, args, kwargs, found, writes)

    def _noted(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: Any,
        writes: Collection[int] = (),
    ) -> Any:
        made = [each for each in _leaves(found) if isinstance(each, Tensor)]
        if not made and not writes:
            return found
        if (now := _settings(self.here)) != self._settings:
            changed = next(name for name, value in now.items() if value != self._settings[name])
            raise self._unknown(f"runs with {changed} set otherwise than around the model")
        entering = [each for each in _leaves((args, kwargs)) if isinstance(each, Tensor)]
        written = frozenset(_storage(each) for each in entering if id(each) in writes)
        described = _replaced((args, kwargs), self._describe)
        refs = [self.described(each) for each in entering]
        for each in made:
            if each.device.type != "meta":
                raise self._unknown(f"mixes tensors with values and without in {name_of(func)}")
        frame, line = self._frames[-1], self.line()
        numbers = []
        for each in made:
            numbers.append(self._name(each))
            self._made_in[numbers[-1]] = (frame.path, line)
            if isinstance(each.grad_fn, BackwardCFunction):
                self._custom.add(numbers[-1])  # within a call that is kept whole
        names = frozenset(ref.name for ref in refs if isinstance(ref, Held))
        self.calls.append(
            Call(
                func=func,
                args=described[0],
                kwargs=described[1],
                result=_replaced(found, self._describe),
                reads=frozenset(ref.number for ref in refs if isinstance(ref, Value)),
                makes=tuple(numbers),
                writes=written,
                held=names | ({func.name} if isinstance(func, Held) else set()),
                with_grad=torch.is_grad_enabled(),
                site=frame.site(),
                frame=frame.path,
                line=line,
                draws=any(word in name_of(func) for word in _DRAWING),
            )
        )
        return found

    # Modules

    def module(self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module of the shadow: as one call, or through its own forward."""
        if self._is_whole:
            return call(*args, **kwargs)
        path = self.modules.get(id(module), "")
        times = self._occurrences[path] = self._occurrences.get(path, 0) + 1
        name = f"{path}#{times}"
        if path and (path in self._kept or (is_leaf(module) and self._has_own(module))):
            with torch._C.DisableTorchFunction(), self._noting():
                return self._whole(module, path, call, args, kwargs, name)
        self._frames.append(_Frame(path, name))
        try:
            return call(*args, **kwargs)
        finally:
            self._frames.pop()
            self._frames[-1].called(name)

    def _has_own(self, module: nn.Module) -> bool:
        """Return True if a module has the model's parameters and buffers, and no others for now (functional_call)."""
        tensors = (*module.parameters(), *module.buffers())
        return all(isinstance(self._values.get(id(each)), Held) for each in tensors)

    def _whole(
        self, module: nn.Module, path: str, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str
    ) -> Any:
        own = path in self._kept

        def run(*args: Any, **kwargs: Any) -> Any:
            if not own:
                return call(*args, **kwargs)
            return _with_zeros(module, call, args, kwargs)

        # Where a run within needs another module to be kept, that one is this.
        self._frames.append(_Frame(path, name))
        self._is_whole = True
        try:
            found = run(*_replaced(args, self._to_meta), **_replaced(kwargs, self._to_meta))
        except Unknown:
            raise
        except Exception as error:
            if own:
                raise
            raise self._unknown(f"runs on values ({type(error).__name__}: {error})") from error
        finally:
            self._is_whole = False
            self._frames.pop()
        if module.training and next(module.buffers(), None) is not None:
            self._check_runs_once()
        self._frames[-1].called(name)
        return self._noted(Held(path), args, kwargs, found)

    def _check_runs_once(self) -> None:
        """Raise `Unknown` under `torch.utils.checkpoint`, which runs its part of a forward again before the backward.

        What such a part does to buffers, it does twice. Recorded calls are not under it, and would do that once.
        """
        if _hooks_of_saved() != self._hooks:
            raise self._unknown("may change a buffer in a part of the forward that torch.utils.checkpoint runs twice")

    # Values that Python asks for

    def _ask(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [each for each in _leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not any(each.device.type == "meta" for each in tensors):
            return func(*args, **kwargs)
        asked = self._asked(func, args, kwargs)
        return self._answers.recorded(asked)

    def _with_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
        """Return the result of a call whose sizes depend on values, on meta, if they are those of the batch."""
        if isinstance(func, Held):
            raise error
        asked = self._asked(_Sizes(func), args, kwargs, error)
        sizes = self._answers.recorded(asked)
        spec, leaves = sizes
        made = [
            torch.empty_strided(*each[1:3], dtype=each[3], device=META) if isinstance(each, tuple) else each
            for each in leaves
        ]
        return pytree.tree_unflatten(made, spec.spec)

    def _asked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception | None = None) -> Asked:
        wanted = [self.described(each) for each in _leaves((args, kwargs)) if isinstance(each, Tensor)]
        why = f"asks for the value of a tensor ({name_of(func)})"
        if error is not None:
            why = f"makes a tensor whose size depends on values, or fails ({type(error).__name__}: {error})"
        calls = self._slice(wanted, why)
        described = _replaced((args, kwargs), self._describe)
        return Asked(tuple(calls), func, described[0], described[1], self.line())

    def _slice(self, wanted: Sequence[Value | Held | Constant], why: str) -> list[Call]:
        """Return the calls that some values come from, if these take nothing but the batch."""
        needed = {each.number for each in wanted if isinstance(each, Value)}
        storages = {self._storages[number] for number in needed}
        held = {each.name for each in wanted if isinstance(each, Held)}
        found: list[Call] = []
        for call in reversed(self.calls):
            if needed.isdisjoint(call.makes) and storages.isdisjoint(call.writes):
                continue
            found.append(call)
            needed |= call.reads
            storages |= {self._storages[number] for number in call.reads}
            held |= call.held
        if held:
            of = ", ".join(sorted(held)[:2])
            raise self._unknown(f"{why} that depends on the model's own ({of})")
        return found[::-1]

    # Helpers

    def line(self) -> str:
        """Return the line of the model's code that runs: 'modeling.py:12: if x.sum() > 0:'."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_back is not None:
            if not _is_machinery(frame.f_globals.get("__name__", "")):
                break
            frame = frame.f_back
        summary = traceback.extract_stack(frame, limit=1)[0]
        return f"{Path(summary.filename).name}:{summary.lineno}: {(summary.line or '').strip()}"

    def _unknown(self, why: str) -> Unknown:
        return Unknown(self._frames[-1].path, self.line(), why)

    def _name(self, tensor: Tensor) -> int:
        number = self._num_values
        self._num_values += 1
        self._values[id(tensor)] = Value(number)
        self._alive.append(tensor)
        self.num_values = self._num_values
        self._bytes[number] = tensor.numel() * tensor.element_size()
        self._storages[number] = _storage(tensor)
        return number

    def _describe(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.described(leaf)
        if self._is_here(leaf):
            return HERE
        return leaf

    def _to_meta(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf if leaf.device.type == "meta" else _on_meta(leaf)
        if isinstance(leaf, torch.device) or (isinstance(leaf, str) and _is_device(leaf, self.here)):
            return META
        return leaf

    def _is_here(self, leaf: Any) -> bool:
        if isinstance(leaf, torch.device):
            return leaf.type == self.here.type
        return isinstance(leaf, str) and leaf.partition(":")[0] == self.here.type


def _is_device(name: str, here: torch.device) -> bool:
    return name.partition(":")[0] in ("cpu", here.type)


class _Sizes:
    """Calls a function and returns the sizes of its result."""

    def __init__(self, func: Any) -> None:
        self.func = func
        self.__name__ = name_of(func)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.func(*args, **kwargs)
        leaves, spec = pytree.tree_flatten(found)
        return _Spec(spec), tuple(
            ("tensor", tuple(each.shape), each.stride(), each.dtype) if isinstance(each, Tensor) else each
            for each in leaves
        )


class _Spec:
    """A tree's shape as a key."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Spec) and self.spec == other.spec

    def __hash__(self) -> int:
        return hash(str(self.spec))


class Answers:
    """Answers what Python asks for while a forward is recorded; see `programs`."""

    def recorded(self, asked: Asked) -> Any:
        """Return the answer; raises `Unknown` where chance decides."""
        raise NotImplementedError


@dataclass
class _Frame:
    """A module whose forward runs."""

    path: str
    name: str
    after: str = ""
    number: int = 0

    def called(self, child: str) -> None:
        self.after, self.number = child, 0

    def site(self) -> Site:
        self.number += 1
        return Site(self.name, self.after, self.number)


def is_leaf(module: nn.Module) -> bool:
    """Return True for a module that is called as a whole."""
    if isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder)):
        return False
    own = type(module).__mro__[1] if getattr(type(module), "is_shadow", False) else type(module)
    return own.__module__.startswith("torch.nn.") or is_norm(module)


def _settings(here: torch.device) -> dict[str, Any]:
    """Return what decides how torch computes and a forward may change around some of its calls."""
    return {
        "autocast": (torch.is_autocast_enabled(here.type), torch.get_autocast_dtype(here.type)),
        "the default dtype": torch.get_default_dtype(),
        "the kernels of attention": [
            getattr(torch._C, f"_get_{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math", "cudnn")
        ],
        "the precision of products": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "mkldnn": torch._C._get_mkldnn_enabled(),
    }


def _leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree)


def _replaced(tree: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a tree with other leaves; slices are looked into as well."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, slice):
            return slice(*(replace(each) for each in (leaf.start, leaf.stop, leaf.step)))
        return replace(leaf)

    return pytree.tree_map(of, tree)


def _takes_device(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("device") is not None


def _on_meta(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
    return made.requires_grad_(tensor.requires_grad) if tensor.requires_grad else made


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def name_of(func: Any) -> str:
    return func.name if isinstance(func, Held) else getattr(func, "__name__", str(func))


def _hooks_of_saved() -> Any:
    """Return the innermost hooks of what autograd saves, which no public function tells."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _moves_averages(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True for a batch norm in training, which writes to its averages without counting that as a write."""
    if func not in (functional.batch_norm, torch.batch_norm):
        return False
    return bool(kwargs.get("training", args[5] if len(args) > 5 else False))


def _is_machinery(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "contextlib", "functools") or module.startswith("hydra_engine.capture")


def _with_zeros(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a module of the shadow, on meta or, where values are asked for, on zeros; what it gives, on meta."""
    try:
        return call(*args, **kwargs)
    except Exception:  # it asks for values
        pass
    with with_zeros(module), torch.random.fork_rng(devices=[]):
        zeros = _replaced((args, kwargs), _zeros)
        found = call(*zeros[0], **zeros[1])
    return pytree.tree_map_only(Tensor, _on_meta, found)


def _zeros(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
    made = torch.zeros(leaf.shape, dtype=leaf.dtype)
    return made.requires_grad_() if leaf.requires_grad else made
