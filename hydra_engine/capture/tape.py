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

import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors

from hydra_engine.capture.shadow import Shadow, on_meta
from partitioners.precision import is_norm
from partitioners.profile import noted

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


HERE = object()  # stands for the device that the model runs on


class Site(NamedTuple):
    """The place of a call in the model's code: a stretch of a module's forward between two calls of its children."""

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
    is_kept: bool  # a module of the user's own that is called as a whole, on values that recording does not know
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
    constants: Sequence[Tensor] = ()  # what each `Constant` stands for


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


def _ctc_loss(*args: Any, **kwargs: Any) -> Tensor:
    given = inspect.signature(functional.ctc_loss).bind(*args, **kwargs).arguments
    log_probs: Tensor = given["log_probs"]
    return log_probs.sum((0, 2)) if given.get("reduction") == "none" else log_probs.sum()


# By function that does not run on meta: one that gives a result of the same size.
_STAND_INS: dict[Any, Callable[..., Any]] = {functional.ctc_loss: _ctc_loss}
# Whose hooks of saved tensors may be left out: it computes what was not saved again, and the engine does so by itself.
_CHECKPOINT = "torch.utils.checkpoint"
_CONSTRUCTORS = frozenset(_device_constructors())
_DRAWING = (
    *("dropout", "rand", "bernoulli", "multinomial", "normal", "uniform", "exponential", "poisson", "cauchy"),
    *("geometric", "rrelu", "attention", "gamma", "dirichlet", "binomial", "fractional", "gumbel"),
)


class _Facts(NamedTuple):
    """Facts of a value."""

    num_bytes: int
    shape: tuple[int, ...]
    storage: int  # views of one tensor lie in the same
    maker: tuple[str, str] | None  # frame and line that made it; None: it is an input
    is_custom: bool  # made by an autograd.Function, within a call that is kept whole


class Values:
    """The tensors of one run, and what stands for each of them in the record."""

    def __init__(self, model: nn.Module) -> None:
        """`model`: on meta, whose parameters and buffers are called by their names."""
        self.constants: list[Tensor] = []
        self._refs: dict[int, Value | Held | Constant] = {}  # by id of a tensor
        self._kept_in: dict[int, frozenset[int]] = {}  # by number: what kept modules gave that its sizes may come from
        self.told: dict[int, tuple[tuple[int, ...], str]] = {}  # by number of such a value: its sizes, and who asked
        self._alive: list[Tensor] = []  # so that ids stay theirs
        self._facts: list[_Facts] = []  # by number of a value
        self.of_model: set[int] = set()  # storages of parameters and buffers
        self._of_inputs: set[int] = set()  # the same of inputs
        self.parameters = {_storage(each): name for name, each in model.named_parameters()}
        for kind in (model.named_parameters, model.named_buffers):
            for name, tensor in kind(remove_duplicate=False):
                self._refs.setdefault(id(tensor), Held(name))
                self._alive.append(tensor)
                self.of_model.add(_storage(tensor))

    def __len__(self) -> int:
        return len(self._facts)

    def ref(self, tensor: Tensor) -> Value | Held | Constant | None:
        """Return what stands for a tensor; None: it was not seen yet."""
        return self._refs.get(id(tensor))

    def are_held_by(self, module: nn.Module) -> bool:
        """Return True if a module has the model's parameters and buffers, and no others for now (functional_call)."""
        return all(isinstance(self.ref(each), Held) for each in (*module.parameters(), *module.buffers()))

    def is_parameter(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) and isinstance(self.ref(tensor), Held)

    def constant(self, tensor: Tensor) -> Constant:
        """Add a tensor that the forward brings along."""
        self._alive.append(tensor)
        found = self._refs[id(tensor)] = Constant(len(self.constants))
        self.constants.append(tensor)
        return found

    def input(self, tensor: Tensor) -> Tensor:
        """Return a tensor on meta that stands for one of the inputs."""
        with torch._C.DisableTorchFunction():
            stand_in = _on_meta(tensor)
        self.add(stand_in, None)
        self._of_inputs.add(_storage(stand_in))
        return stand_in

    def add(self, tensor: Tensor, maker: tuple[str, str] | None) -> int:
        """Add a tensor that a call has made or written to, and return its number."""
        self._refs[id(tensor)] = Value(len(self))
        self._alive.append(tensor)
        is_custom = maker is not None and isinstance(tensor.grad_fn, BackwardCFunction)
        num_bytes = tensor.numel() * tensor.element_size()
        self._facts.append(_Facts(num_bytes, tuple(tensor.shape), _storage(tensor), maker, is_custom))
        return len(self) - 1

    def come_from(self, entering: Iterable[int], makes: Iterable[int], *, is_kept: bool) -> None:
        """Note of which kept modules the sizes of values may come."""
        found = frozenset[int]().union(*(self._kept_in.get(number, ()) for number in entering))
        for number in makes:
            if among := found | {number} if is_kept else found:
                self._kept_in[number] = among

    def tell(self, found: Any, entering: Iterable[Tensor]) -> None:
        """Note that Python gets sizes of tensors, or what follows from them: in numbers, or in how many it finds."""
        if isinstance(found, (Tensor, bool, str, torch.dtype, torch.device, torch.layout, type(None))):
            return
        for ref in map(self.ref, entering):
            for number in self._kept_in.get(ref.number, ()) if isinstance(ref, Value) else ():
                self.told.setdefault(number, (self._facts[number].shape, _line()))

    def num_bytes(self, number: int) -> int:
        return self._facts[number].num_bytes

    def storage(self, number: int) -> int:
        return self._facts[number].storage

    def maker_in_function(self, number: int, tensor: Tensor) -> tuple[str, str] | None:
        """Return who made a value in an autograd.Function of which no call was recorded; None: nobody did."""
        facts = self._facts[number]
        return None if facts.is_custom or not isinstance(tensor.grad_fn, BackwardCFunction) else facts.maker

    def origin(self, calls: Sequence[Call], numbers: Iterable[int]) -> list[Call]:
        """Return those of the calls that values come from, and that write to what they are made of."""
        needed = set(numbers)
        return self._used(calls, needed, set(map(self.storage, needed)), lambda _: False)

    def used(self, calls: Sequence[Call], outputs: Iterable[int]) -> list[Call]:
        """Return the calls without those that nothing comes of: what fills a cache that is dropped, say."""
        needed = set(outputs)
        storages = self.of_model | self._of_inputs | set(map(self.storage, needed))
        # A module may draw, and change its buffers.
        return self._used(calls, needed, storages, lambda call: call.draws or isinstance(call.func, Held))

    def _used(
        self, calls: Sequence[Call], needed: set[int], storages: set[int], is_kept: Callable[[Call], bool]
    ) -> list[Call]:
        found = []
        for call in reversed(calls):
            if is_kept(call) or not (needed.isdisjoint(call.makes) and storages.isdisjoint(call.writes)):
                found.append(call)
                needed |= call.reads
                storages |= set(map(self.storage, call.reads))
        return found[::-1]


class Tape(TorchFunctionMode):
    """Records a run of a model's forward."""

    def __init__(
        self,
        shadow: Shadow,
        here: torch.device,
        kept: frozenset[str],
        answer: Callable[[Asked], Any],
        run_kept: Callable[[Tape, nn.Module, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        """Make one for a copy of the model on meta, which runs its modules.

        kept: paths of modules to call as a whole, which `run_kept` runs to return what they give, on meta. answer:
        tells what Python asks for, or raises `Unknown`.
        """
        super().__init__()
        self.here = here
        self.calls: list[Call] = []
        self.values = Values(shadow.model)
        self._answer = answer
        self._kept = kept
        self._run_kept = run_kept
        self._frames: list[_Frame] = [_Frame("", "")]
        self._occurrences: dict[str, int] = {}
        self._originals = shadow.originals
        self.modules = {id(module): path for path, module in shadow.model.named_modules()}
        self._is_whole = False
        self._hooks = saved_hooks()
        self._settings: dict[str, Any] = {}
        self.raised: Unknown | None = None  # the first; the forward may have caught it

    def described(self, tensor: Tensor) -> Value | Held | Constant:
        """Return what stands for a tensor in the record."""
        found = self.values.ref(tensor)
        if found is None:
            if tensor.is_meta:
                raise self._unknown("uses a tensor that no call of torch's Python functions made")
            if id(tensor) in self._originals:
                raise self._unknown(
                    f"uses {self._originals[id(tensor)]} of the model past its attributes, through a closure or a "
                    f"global, which copies of the model do not follow"
                )
            return self.values.constant(tensor)
        maker = self.values.maker_in_function(found.number, tensor) if isinstance(found, Value) else None
        if maker is not None:
            raise Unknown(*maker, "calls an autograd.Function, whose backward its recorded calls do not show")
        return found

    # Calls

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what the body runs."""
        with torch.enable_grad(), torch.autocast(self.here.type, enabled=False), self:
            self._settings = settings(self.here)
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
        if func is Tensor.requires_grad_ and self.values.is_parameter(args[0]):
            raise self._unknown("switches requires_grad of a parameter, which its recorded calls do not show")
        if func is Tensor.__iter__:
            return iter(self._called(torch.unbind, (args[0], 0), {}))
        if func in _ASKS:
            return self._ask(func, args, kwargs)
        if func in (Tensor.__repr__, Tensor.__str__, Tensor.__format__):
            return func(*args, **kwargs)
        return self._record(func, args, kwargs)

    def _attribute(self, func: Any, args: tuple[Any, ...]) -> Any:
        attribute, tensor = func.__self__.__name__, args[0]
        if tensor.is_meta:
            if attribute == "device":
                return self.here
            if attribute in ("is_meta", "is_cpu", "is_cuda"):
                return attribute == f"is_{self.here.type}"
        found = func(*args)
        if attribute == "grad_fn" and found is not None and tensor.is_meta:
            raise self._unknown("takes the grad_fn of a tensor, whose hooks its recorded calls would not have")
        if not isinstance(found, Tensor) or not tensor.is_meta:
            self.values.tell(found, [tensor])
            return found
        if attribute == "data":
            return self._noted(Tensor.detach, (tensor,), {}, tensor.detach())
        return self._noted(getattr, (tensor, attribute), {}, found)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call on meta and note it."""
        tensors = _tensors((args, kwargs))
        has_values = bool(tensors) and not any(each.is_meta for each in tensors)
        makes_nothing = not tensors and func not in _CONSTRUCTORS and kwargs.get("device") is None
        if has_values or makes_nothing:
            return func(*args, **kwargs)  # of tensors that have values: the result is a constant
        refs = [self.described(each) for each in tensors]
        if any(isinstance(each, torch.Generator) for each in pytree.tree_leaves((args, kwargs))):
            raise self._unknown("draws from a generator of its own")
        before = [(each, each._version) for each in tensors if not each.is_inference()]
        moved, options = _moved((args, kwargs), self.here)
        if func in _CONSTRUCTORS and options.get("device") is None:
            options["device"] = META
        try:
            found = _STAND_INS.get(func, func)(*moved, **options)
        except Unknown:
            raise
        except Exception as error:
            found = self._with_values(func, args, kwargs, error)
        for ref, each in zip(refs, _tensors((moved, options)), strict=True):
            if isinstance(ref, Constant) and each._version:  # just made
                raise self._unknown("writes to a tensor that is no buffer; keep it in one (register_buffer)")
        written = [_storage(each) for each, version in before if each._version != version]
        if names := [self.values.parameters[each] for each in written if each in self.values.parameters]:
            raise self._unknown(
                f"changes parameter {names[0]}, which only the optimizer may; keep what a forward changes in a "
                f"buffer (register_buffer, as for the weights of a mean teacher)"
            )
        if not self.values.of_model.isdisjoint(written) or _moves_averages(func, args, kwargs):
            self._check_runs_once()
        return self._noted(func, args, kwargs, found, written)

    def _noted(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any, written: Collection[int] = ()
    ) -> Any:
        made, entering = _tensors(found), _tensors((args, kwargs))
        if not isinstance(func, Held):
            self.values.tell(found, entering)
        if not made and not written:
            return found
        if (now := settings(self.here)) != self._settings:
            changed = next(name for name, value in now.items() if value != self._settings[name])
            raise self._unknown(f"runs with {changed} set otherwise than around the model")
        inner = saved_hooks()
        if any(getattr(pack, "__module__", "") != _CHECKPOINT for pack, _ in inner[: len(inner) - len(self._hooks)]):
            raise self._unknown("runs under saved_tensors_hooks, which its recorded calls would not")
        described_args, described_kwargs = replaced((args, kwargs), self._describe)
        refs = [self.described(each) for each in entering]
        for each in made:
            if not each.is_meta:
                raise self._unknown(f"mixes tensors with values and without in {name_of(func)}")
        frame, line = self._frames[-1], _line()
        numbers = [self.values.add(each, (frame.path, line)) for each in made]
        names = frozenset(ref.name for ref in refs if isinstance(ref, Held))
        reads = frozenset(ref.number for ref in refs if isinstance(ref, Value))
        is_kept = isinstance(func, Held) and func.name in self._kept
        self.values.come_from(reads, numbers, is_kept=is_kept)
        self.calls.append(
            Call(
                func=func,
                args=described_args,
                kwargs=described_kwargs,
                result=replaced(found, self._describe),
                reads=reads,
                makes=tuple(numbers),
                writes=frozenset(written),
                held=names | ({func.name} if isinstance(func, Held) else set()),
                with_grad=torch.is_grad_enabled(),
                is_kept=is_kept,
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
        if path and (path in self._kept or (is_leaf(module) and self.values.are_held_by(module))):
            with torch._C.DisableTorchFunction(), self._noting():
                return self._whole(module, path, call, args, kwargs, name)
        with self._in_frame(path, name):
            try:
                return call(*args, **kwargs)
            except Exception as error:
                if path and not isinstance(error, Unknown) and not getattr(error, "__notes__", ()):  # the innermost
                    noted(error, f"in {path} ({type(module).__name__})")
                raise

    @contextmanager
    def _in_frame(self, path: str, name: str) -> Iterator[None]:
        self._frames.append(_Frame(path, name))
        try:
            yield
        finally:
            self._frames.pop()
            self._frames[-1].called(name)

    def _whole(
        self, module: nn.Module, path: str, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str
    ) -> Any:
        own = path in self._kept
        moved, options = _moved((args, kwargs), self.here)
        # Where a run within needs another module to be kept, that one is this.
        with self._in_frame(path, name):
            self._is_whole = True
            try:
                found = self._run_kept(self, module, name, call, moved, options) if own else call(*moved, **options)
            except Unknown:
                raise
            except Exception as error:
                if own:
                    raise
                raise self._unknown(f"runs on values ({type(error).__name__}: {error})") from error
            finally:
                self._is_whole = False
        if module.training and next(module.buffers(), None) is not None:
            self._check_runs_once()
        return self._noted(Held(path), args, kwargs, found)

    def _check_runs_once(self) -> None:
        """Raise `Unknown` under `torch.utils.checkpoint`, which runs its part of a forward again before the backward.

        What such a part does to buffers, it does twice. Recorded calls are not under it, and would do that once.
        """
        if saved_hooks() != self._hooks:
            raise self._unknown("may change a buffer in a part of the forward that torch.utils.checkpoint runs twice")

    # Values that Python asks for

    def _ask(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(each.is_meta for each in _tensors((args, kwargs))):
            return func(*args, **kwargs)
        return self._answered(self._asked(func, args, kwargs))

    def _answered(self, asked: Asked) -> Any:
        try:
            return self._answer(asked)
        except Unknown as unknown:
            raise Unknown(self._frames[-1].path, unknown.line, unknown.why) from None

    def _with_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
        """Return the result of a call whose sizes depend on values, on meta, if they are those of the batch."""
        if isinstance(func, Held):
            raise error
        spec, leaves = self._answered(self._asked(partial(_sizes, func), args, kwargs, error))
        made = [
            torch.empty_strided(*each[1:3], dtype=each[3], device=META) if isinstance(each, tuple) else each
            for each in leaves
        ]
        return pytree.tree_unflatten(made, spec)

    def _asked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception | None = None) -> Asked:
        """Return what to compute for it, if the values that go in come from the batch alone."""
        wanted = [self.described(each) for each in _tensors((args, kwargs))]
        why = f"asks for the value of a tensor ({name_of(func)})"
        if error is not None:
            why = f"makes a tensor whose size depends on values, or fails ({type(error).__name__}: {error})"
        calls = self.values.origin(self.calls, [each.number for each in wanted if isinstance(each, Value)])
        held = {each.name for each in wanted if isinstance(each, Held)}.union(*(call.held for call in calls))
        if held:
            raise self._unknown(f"{why} that depends on the model's own ({', '.join(sorted(held)[:2])})")
        described = replaced((args, kwargs), self._describe)
        return Asked(tuple(calls), func, described[0], described[1], _line(), self.values.constants)

    def _unknown(self, why: str) -> Unknown:
        return Unknown(self._frames[-1].path, _line(), why)

    def _describe(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.described(leaf)
        is_here = leaf.type == self.here.type if isinstance(leaf, torch.device) else _is_device(leaf, self.here.type)
        return HERE if is_here else leaf


def _sizes(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function and return the sizes of its result."""
    leaves, spec = pytree.tree_flatten(func(*args, **kwargs))
    return spec, tuple(
        ("tensor", tuple(each.shape), each.stride(), each.dtype) if isinstance(each, Tensor) else each
        for each in leaves
    )


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


def settings(here: torch.device) -> dict[str, Any]:
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


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(tree) if isinstance(each, Tensor)]


def replaced(tree: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a tree with other leaves; slices are looked into as well."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, slice):
            return slice(*(replace(each) for each in (leaf.start, leaf.stop, leaf.step)))
        return replace(leaf)

    return pytree.tree_map(of, tree)


def _moved(tree: Any, here: torch.device) -> Any:
    """Return a tree with its tensors and devices on meta."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf if leaf.is_meta else _on_meta(leaf)
        return META if isinstance(leaf, torch.device) or _is_device(leaf, "cpu", here.type) else leaf

    return replaced(tree, of)


def _is_device(leaf: Any, *types: str) -> bool:
    return isinstance(leaf, str) and leaf.partition(":")[0] in types


def _line() -> str:
    """Return the line of the model's code that runs: 'modeling.py:12: if x.sum() > 0:'."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        if not is_machinery(frame.f_globals.get("__name__", "")):
            break
        frame = frame.f_back
    summary = traceback.extract_stack(frame, limit=1)[0]
    return f"{Path(summary.filename).name}:{summary.lineno}: {(summary.line or '').strip()}"


def _on_meta(tensor: Tensor) -> Tensor:
    return on_meta(tensor).requires_grad_(tensor.requires_grad)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def name_of(func: Any) -> str:
    return func.name if isinstance(func, Held) else getattr(func, "__name__", str(func))


def saved_hooks() -> list[Any]:
    """Return the hooks of what autograd saves, the innermost first, for which torch has no public function."""
    own, found = torch._C._autograd, []
    while (hooks := own._top_saved_tensors_default_hooks(False)) is not None:
        own._pop_saved_tensors_default_hooks()
        found.append(hooks)
    for hooks in reversed(found):
        own._push_saved_tensors_default_hooks(*hooks)
    return found


def _moves_averages(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True for a batch norm in training, which writes to its averages without counting that as a write."""
    if func not in (functional.batch_norm, torch.batch_norm):
        return False
    return bool(kwargs.get("training", args[5] if len(args) > 5 else False))


def is_machinery(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "contextlib", "functools") or module.startswith("hydra_engine.capture")
