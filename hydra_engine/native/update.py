"""The host update of a shard as one native call: each element read and written once, by torch's threads.

The arithmetic is that of torch's own kernels, which differs between torch's implementations of a step, processors and
libraries that torch calls. So nothing is assumed: before the first update with settings of a kind, a sample is stepped
by torch and by every candidate; the first one with torch's bits is used from then on, and none if no bits are the same.
Square roots are compared in all their digits: libraries round one in many otherwise.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer

from hydra_engine.native.kernel import Halves, Kernel
from hydra_engine.native.library import Library

SOURCE = Path(__file__).with_name("update.cpp")
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in element.h
ADAM, SGD = 0, 1
RULES: dict[type[Optimizer], int] = {torch.optim.Adam: ADAM, torch.optim.AdamW: ADAM, torch.optim.SGD: SGD}
MOST_FACTORS = 2  # the loss scale's and clipping's; a third place is for the sign of what is maximized
# Not zero, unless this thread takes such numbers for zeros (torch.set_flush_denormal), which torch's others may not.
TINY = 5e-324
_ALL = ("weight_decay", "maximize", "foreach", "fused")
OPTIONS = {
    ADAM: ("betas", "eps", "amsgrad", "decoupled_weight_decay", *_ALL),
    SGD: ("momentum", "dampening", "nesterov", *_ALL),
}
TO_NEAREST = -1  # in the place of a turn
# A row of the call, as struct Update of element.h: addresses of master, gradient, narrow weight, its remainder, places
# and bits of what is apart, and three moments; size, tail, and number of what is apart; the function that takes roots.
# The rest is the same for all parameters of a group at the same step, and packed once.
PLACES, REST = struct.Struct("9Q3qQ"), struct.Struct("7i12fi")
# As struct Found of update.cpp. A place of -1 says that there is NaN in the weight.
FOUND = np.dtype([("place", np.int64), ("bits", np.int32), ("update", np.int32)])


class Arithmetic(NamedTuple):
    """Roundings in which torch's kernels differ."""

    refines_roots: bool  # MKL estimates square roots and corrects them, on processors with AVX-512
    vector: int  # elements; torch's fused kernels contract otherwise where the rest of a tensor fills no vector
    roots_at: int = 0  # address of the function that torch calls for square roots; 0: they are taken here, sooner


SQUARE_ROOTS, SET_THREADS = "vmsSqrt", "MKL_Set_Num_Threads_Local"  # of MKL
PARALLEL = "GOMP_parallel"  # of GNU's OpenMP library, and of LLVM's: runs work by threads that it keeps for its caller
PLAIN = tuple(Arithmetic(refines, 1) for refines in (False, True))
FUSED = tuple(Arithmetic(False, vector) for vector in (8, 16, 4, 1))  # torch's own vectors take the processor's roots
# Sizes of a sample's tensors: many rests of a vector, and one that torch divides among its threads.
SAMPLE = [*[31] * 48, 2**15 + 13]
# From 1 to 4 as bits: each mantissa with an even and with an odd exponent, on which alone digits of a root depend.
ROOTS_OF, ROOTS_AT_ONCE = range(0x3F800000, 0x40800000), 2**20
SPECIAL = (0.0, -0.0, 1e-45, -1e-40, 1e-38, 1e-30, 1e-20, 1e-10)
# Those, a tie of bfloat16 that is rounded down, the largest, and what is no number: for each weight each gradient.
ALL_SPECIAL = torch.cartesian_prod(*[torch.tensor([*SPECIAL, 1.00390625, -3e38, torch.inf, -torch.inf, torch.nan])] * 2)
ADMISSION_STEPS = 3


class Rule(NamedTuple):
    """The roundings of a task's updates, and what makes them."""

    is_ieee: bool = False  # square roots are IEEE's, also where torch takes a library's that are not
    kernel: Kernel | None = None  # in a GPU's memory, with those roots; None: the host


TORCHS = Rule()  # every bit as torch on the host


@dataclass(frozen=True, eq=False)
class NarrowUpdate:
    """A parameter to be stepped."""

    parameter: nn.Parameter  # the float32 master
    gradient: Tensor  # as it came down the link
    narrow: Tensor | None  # what crosses the link next; None where that is the parameter itself
    master: Any = None  # the `SplitMaster` of a split weight (host/split.py), whose values are not there


class Work(NamedTuple):
    """An update with the options and the state that it goes by."""

    master: Tensor  # of a split weight: without values
    gradient: Tensor
    narrow: Tensor | None
    group: Mapping[str, Any]
    moments: Mapping[str, Tensor]  # by name: of the master's shape
    counter: Tensor | None  # of steps, this one not among them
    halves: Any = None  # a `SplitWeight` (host/split.py), or `Halves` in a GPU's memory

    @property
    def types(self) -> tuple[torch.dtype, torch.dtype | None]:
        """Types of the gradient and of the narrow weight."""
        return self.gradient.dtype, None if self.narrow is None else self.narrow.dtype

    @property
    def moments_type(self) -> torch.dtype:
        return next((each.dtype for each in self.moments.values()), torch.float32)  # all have the same

    def copied(self) -> Work:
        """Return it with copies of what a step changes."""
        moments = {name: value.clone() for name, value in self.moments.items()}
        counter = None if self.counter is None else self.counter.clone()
        return self._replace(master=self.master.clone(), moments=moments, counter=counter)

    def moved(self, device: torch.device, *, splits: bool) -> Work:
        """Return a copy on a device; splits: of the weight as halves."""
        moments = {name: value.to(device, copy=True) for name, value in self.moments.items()}
        own = self.copied()._replace(gradient=self.gradient.to(device, copy=True), moments=moments)
        if splits:
            halves = Halves(*(each.to(device) for each in Halves.of(self.master)))
            return own._replace(narrow=halves.narrow, halves=halves)
        narrow = None if self.narrow is None else self.narrow.to(device, copy=True)
        return own._replace(narrow=narrow, master=self.master.to(device, copy=True))


class Native:
    """The kernel of one process, and what is known of its bits."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._mutex = threading.Lock()
        self._agreed: dict[Hashable, Arithmetic | None] = {}
        self._admitted: dict[Hashable, bool] = {}

    def prepare(self, optimizer: Optimizer) -> None:
        """Begin to build the kernel if this optimizer may use it."""
        if type(optimizer) in RULES:
            self._library.load()

    def wait(self) -> bool:
        """Wait until a build that this process began has ended; return True if the kernel is there."""
        return self._library.wait() is not None

    @property
    def missing_because(self) -> str:
        """Say why there is no kernel; "": there is one, or it may come yet."""
        return self._library.missing_because

    def step(
        self,
        optimizer: Optimizer,
        updates: Sequence[NarrowUpdate],
        factors: Sequence[float | Tensor],
        moments: torch.dtype = torch.float32,
        rule: Rule = TORCHS,
    ) -> Sequence[NarrowUpdate]:
        """Make updates, with as many threads as the caller has intra-op ones; return those that it leaves to torch.

        Those are of parameters that have no state yet, of tensors that do not all lie in the same order, and those that
        would not get torch's bits. optimizer: it steps element by element, and nobody watches its steps. factors:
        each gradient is multiplied by them, one after the other. moments: the type that the state has to have; in
        bfloat16 they are rounded as `round_by_turns` of host/blocked.py does.
        """
        kind = type(optimizer)
        library = self._library.load() if kind in RULES and len(factors) <= MOST_FACTORS else None
        if library is None or (rule.kernel is None and TINY * 1.0 == 0):
            return updates
        values = [float(factor) for factor in factors]
        groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        known: dict[Hashable, Arithmetic | None] = {}
        rest, mine = [], []
        for update in updates:
            group = groups.get(id(update.parameter))  # None: the optimizer's maker left it out
            work = None if group is None else _work(optimizer, group, update, moments, rule)
            if group is None or work is None:
                rest.append(update)
                continue
            key = (id(group), *work.types, work.moments_type, work.halves is None)
            if key not in known:
                known[key] = self._arithmetic(library, kind, work, len(values), rule)
            if arithmetic := known[key]:
                mine.append((work, arithmetic))
            else:
                rest.append(update)
        if rule.kernel is None:
            _call(library, kind, mine, values)
        else:
            _launch(rule.kernel, kind, mine, values)
        increment_version([tensor for work, _ in mine for tensor in _written(work)])
        return rest

    def refusal(self, kernel: Kernel, kind: type[Optimizer], works: Sequence[Work], num_factors: int) -> str:
        """Return why a GPU cannot make such updates with the bits that the host has; nothing, if it can."""
        if kernel.missing_because:
            return f"no kernel for updates: {kernel.missing_because}"
        library = self._library.wait()
        if library is None:
            return f"no native code to compare updates with: {self.missing_because or 'it is turned off'}"
        rule = Rule(is_ieee=True, kernel=kernel)
        if all(self._arithmetic(library, kind, work, num_factors, rule) for work in works):
            return ""
        return f"a sample of {kind.__name__}'s updates has other bits on {kernel.kind} than on the host"

    def _arithmetic(
        self, library: ctypes.CDLL, kind: type[Optimizer], work: Work, num_factors: int, rule: Rule
    ) -> Arithmetic | None:
        """The arithmetic that has torch's bits with settings of this kind, but for roots by the rule; found once."""
        options = {name: _stand_in(work.group[name]) for name in OPTIONS[RULES[kind]]}
        key = (kind, *options.values(), *work.types, num_factors, torch.get_num_threads())
        like = work._replace(group={**options, "lr": 0.01})
        with self._mutex:
            if key not in self._agreed:
                self._agreed[key] = _agree(library, kind, like, num_factors)
            found = self._agreed[key]
            if found is None or not rule.is_ieee:
                return found
            found = found._replace(refines_roots=False, roots_at=0)
            if rule.kernel is None:
                return found
            key = (rule.kernel.kind, *key[:-1], work.moments_type, work.halves is None, found)
            if key not in self._admitted:
                self._admitted[key] = _admits(rule.kernel, library, kind, like, found, num_factors)
            return found if self._admitted[key] else None


@cache
def native() -> Native:
    """Return the process's kernel."""
    return Native(Library(SOURCE))


def _stand_in(value: Any) -> Any:
    """Replace a number by one for which torch runs the same instructions, since schedules change it with each step.

    It has digits enough that no two ways of rounding agree on it, as they do on a half. torch distinguishes zero, and
    beta1 above a half.
    """
    if isinstance(value, (tuple, list)):
        return tuple(map(_stand_in, value))
    if value is None or isinstance(value, bool) or value == 0:
        return value
    return 0.9 if value > 0.5 else 0.3


def _work(
    optimizer: Optimizer, group: Mapping[str, Any], update: NarrowUpdate, moments_type: torch.dtype, rule: Rule
) -> Work | None:
    """Return what the kernel needs; None: it cannot make this update."""
    master, gradient, narrow = update.parameter, update.gradient, update.narrow
    state, counter = optimizer.state.get(master, {}), None
    names: list[str] = []
    if RULES[type(optimizer)] == SGD:
        is_wide = gradient.dtype == torch.float32 and narrow is None
        if is_wide and not group["momentum"] and not group["weight_decay"] and rule.kernel is None:
            return None  # torch's step is one operation already
        names += ["momentum_buffer"] if group["momentum"] else []
    else:
        names += ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        counter = state.get("step")
        if not isinstance(counter, Tensor) or counter.dtype != torch.float32:
            return None
    is_number = master.dim() == 0
    if (is_number and not rule.is_ieee) or master.dtype != torch.float32 or not is_dense(master):
        return None
    moments_type = torch.float32 if is_number else moments_type
    moments: dict[str, Tensor] = {}
    for name in names:
        moments[name] = moment = state.get(name)
        if not isinstance(moment, Tensor) or moment.dtype != moments_type:
            return None
    shape, stride = master.shape, master.stride()
    for each in (gradient, *moments.values(), *(() if narrow is None else (narrow,))):
        if each.dtype not in TYPES or each.layout != torch.strided or each.shape != shape or each.stride() != stride:
            return None
    return Work(master, gradient, narrow, group, moments, counter, update.master and update.master.split)


def _call(
    library: ctypes.CDLL, kind: type[Optimizer], works: Sequence[tuple[Work, Arithmetic]], factors: Sequence[float]
) -> None:
    """Count the steps, and make the updates without the interpreter's lock."""
    if not works:
        return
    rows = _rows(kind, works, factors)
    set_threads = _of_torch(SET_THREADS) if any(arithmetic.roots_at for _, arithmetic in works) else 0
    found, num_found = ctypes.c_void_p(), ctypes.c_int64()
    library.hydra_update(
        *(rows, ctypes.c_int64(len(works)), ctypes.c_int64(torch.get_num_threads())),
        *(ctypes.c_void_p(_of_torch(PARALLEL)), ctypes.c_void_p(set_threads)),
        *(ctypes.byref(found), ctypes.byref(num_found)),
    )
    elements = np.empty(num_found.value, FOUND)
    if len(elements):
        library.hydra_take(found, ctypes.c_void_p(elements.ctypes.data))
    _keep_apart([work for work, _ in works], elements)


def _launch(
    kernel: Kernel, kind: type[Optimizer], works: Sequence[tuple[Work, Arithmetic]], factors: Sequence[float]
) -> None:
    """Count the steps, and queue the updates; where that raises, nothing has changed."""
    rows = _rows(kind, works, factors)
    try:
        kernel.launch(rows, [work.master.numel() for work, _ in works])
    except BaseException:
        _count([work for work, _ in works], -1)
        raise


def _count(works: Sequence[Work], number: int) -> None:
    counters = [work.counter for work in works if work.counter is not None]
    if counters:
        torch._foreach_add_(counters, number)


def _rows(kind: type[Optimizer], works: Sequence[tuple[Work, Arithmetic]], factors: Sequence[float]) -> bytes:
    """Count the steps, and pack the updates."""
    _count([work for work, _ in works], 1)
    rows, known = [], {}
    for work, arithmetic in works:
        step = None if work.counter is None else work.counter.item()
        key = (id(work.group), *work.types, work.moments_type, step)
        if key not in known:
            known[key] = _rest(kind, work, step, factors, arithmetic)
        rows += [_places(work, arithmetic), known[key]]
    return b"".join(rows)


def _places(work: Work, arithmetic: Arithmetic) -> bytes:
    """Pack what a parameter has of its own."""
    halves = work.halves
    if halves is None:
        weight, num_apart = [work.master, work.gradient, work.narrow, None, None, None], 0
    elif getattr(halves, "ties", None) is not None:  # in a GPU's memory
        weight, num_apart = [None, work.gradient, halves.narrow, halves.rest, halves.ties, None], 0
    else:
        apart = halves.apart
        weight = [None, work.gradient, halves.narrow, halves.rest, apart.places, apart.bits]
        num_apart = len(apart.places)
    places = [0 if each is None else each.data_ptr() for each in (*weight, *work.moments.values())]
    places += [0] * (3 - len(work.moments))
    size = work.master.numel()
    return PLACES.pack(*places, size, size % arithmetic.vector, num_apart, arithmetic.roots_at)


def _keep_apart(works: Sequence[Work], found: np.ndarray[Any, Any]) -> None:
    """Let split weights take over what their new halves do not tell, by update and place."""
    ends = np.searchsorted(found["update"], np.arange(len(works) + 1)) if len(found) else [0] * (len(works) + 1)
    for k, halves in enumerate(work.halves for work in works):
        if halves is not None:
            mine = found[ends[k] : ends[k + 1]]
            apart = mine[mine["place"] >= 0]
            places, bits = (torch.from_numpy(apart[name].copy()) for name in ("place", "bits"))
            halves.keep_apart(places, bits, has_nan=len(apart) < len(mine))


def _rest(
    kind: type[Optimizer], work: Work, step: float | None, factors: Sequence[float], arithmetic: Arithmetic
) -> bytes:
    """Pack what the parameters of a group have in common at a step, this one counted; None: nobody counts."""
    group, (gradient, narrow) = work.group, work.types
    factors = (*factors, -1.0) if group["maximize"] else factors
    lr, decay, keep, eps, nesterov = float(group["lr"]), group["weight_decay"], 1.0, 0.0, False
    if RULES[kind] == SGD:
        averages = group["momentum"], 1 - group["dampening"], 0.0, 0.0
        correction, step_size, nesterov = 1.0, lr, group["nesterov"]
    else:
        assert step is not None
        beta1, beta2 = group["betas"]
        averages = beta1, 1 - beta1, beta2, 1 - beta2
        corrected = 1 - beta2**step
        correction = math.sqrt(corrected) if group["fused"] else corrected**0.5  # each as its own path has it
        step_size, eps = lr / (1 - beta1**step), group["eps"]
        if group["decoupled_weight_decay"]:
            keep, decay = 1 - lr * decay, 0.0
    turn = TO_NEAREST if step is None else int(step)
    return REST.pack(
        *(TYPES[gradient], TYPES[narrow or torch.float32], TYPES[work.moments_type], turn),
        *(RULES[kind], arithmetic.refines_roots, len(factors)),
        *(*factors, *[1.0] * (MOST_FACTORS + 1 - len(factors))),
        *(decay, keep, *averages, correction, eps, -step_size),
        nesterov,
    )


def _agree(library: ctypes.CDLL, kind: type[Optimizer], like: Work, num_factors: int) -> Arithmetic | None:
    """Step a sample as torch does, and in each candidate's arithmetic; return the first that has torch's bits."""
    if torch.float16 in like.types and not library.hydra_has_float16():
        return None
    factors, sample = [0.7, 1.1][:num_factors], _sample(like)
    theirs = [each.copied() for each in sample]
    masters = [nn.Parameter(each.master) for each in theirs]
    make: Any = kind
    optimizer = make([{**like.group, "params": masters}])
    for master, each in zip(masters, theirs, strict=True):
        optimizer.state[master] = {**each.moments, **({} if each.counter is None else {"step": each.counter})}
        master.grad = each.gradient.to(torch.float32, copy=True)  # which is multiplied in place
        for factor in factors:
            master.grad.mul_(factor)
    optimizer.step()
    for each in theirs:
        if each.narrow is not None:
            each.narrow.copy_(each.master)
    for arithmetic in FUSED if like.group["fused"] else _unfused():
        ours = [each.copied() for each in sample]
        _call(library, kind, [(each, arithmetic) for each in ours], factors)
        pairs = [pair for works in zip(ours, theirs, strict=True) for pair in zip(*map(_written, works), strict=True)]
        if all(_same_bits(mine, plain) for mine, plain in pairs):
            # Roots that are one unit off in a million would pass a sample. torch's fused ones are the processor's.
            has_roots = RULES[kind] == ADAM and not like.group["fused"]
            if not has_roots or _same_roots(library, arithmetic):
                return arithmetic
    return None


@cache
def _of_torch(name: str) -> int:
    """Return the address of a function of torch's library, or of one that it is linked to; 0: they do not name it."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


def _unfused() -> tuple[Arithmetic, ...]:
    """Candidates where torch's step is not fused. MKL takes roots in another way on each kind of processor."""
    has_both = _of_torch(SQUARE_ROOTS) and _of_torch(SET_THREADS)
    return (*PLAIN, Arithmetic(False, 1, _of_torch(SQUARE_ROOTS))) if has_both else PLAIN


@cache
def _same_roots(library: ctypes.CDLL, arithmetic: Arithmetic) -> bool:
    """Compare all digits that a square root can have with torch's."""
    for first in ROOTS_OF[::ROOTS_AT_ONCE]:
        values = torch.arange(first, first + ROOTS_AT_ONCE, dtype=torch.int32).view(torch.float32)
        mine = torch.empty_like(values)
        library.hydra_roots(
            *(ctypes.c_void_p(each.data_ptr()) for each in (values, mine)),
            *(ctypes.c_int64(len(values)), int(arithmetic.refines_roots), ctypes.c_void_p(arithmetic.roots_at)),
        )
        if not _same_bits(mine, values.sqrt()):
            return False
    return True


def _admits(
    kernel: Kernel, library: ctypes.CDLL, kind: type[Optimizer], like: Work, arithmetic: Arithmetic, num_factors: int
) -> bool:
    """Step a sample on the host and on a GPU; return True if all bits are the same, but for those of NaN."""
    factors, splits = [0.7, 1.1][:num_factors], like.halves is not None
    hosts = _sample(like, has_all=True)
    theirs = [each.moved(kernel.torch_device, splits=splits) for each in hosts]
    for _ in range(ADMISSION_STEPS):
        _call(library, kind, [(each, arithmetic) for each in hosts], factors)
        _launch(kernel, kind, [(each, arithmetic) for each in theirs], factors)
        for host, gpu in zip(hosts, theirs, strict=True):
            if splits:
                gpu = gpu._replace(halves=Halves(*(each.cpu() for each in gpu.halves)))
                host = host._replace(halves=Halves.of(host.master))
            pairs = zip(_written(host), _written(gpu), strict=True)
            if not all(_same_numbers(mine, other.cpu()) for mine, other in pairs):
                return False
    return True


def _sample(like: Work, *, has_all: bool = False) -> list[Work]:
    """Return works of many sizes, always the same: digits, magnitudes and zeros of all kinds.

    has_all: what is no number, too, and moments of their own type.
    """
    generator, start = torch.Generator().manual_seed(0), sum(SAMPLE[:-1])

    def drawn(k: int) -> tuple[Tensor, ...]:
        values, spread = torch.empty(2, sum(SAMPLE)).normal_(generator=generator)
        values.mul_(spread.exp_())
        values[: len(SPECIAL)] = values[-len(SPECIAL) :] = torch.tensor(SPECIAL)
        if has_all:
            first = start + max(0, k - 1) * len(ALL_SPECIAL)  # moments of other elements, or all would be NaN
            values[first : first + len(ALL_SPECIAL)] = ALL_SPECIAL[:, k % 2]
        return torch.split(values, SAMPLE)

    masters, gradients = drawn(0), drawn(1)
    moments = {name: drawn(k) for k, name in enumerate(like.moments, 2)}
    found = []
    for k, (master, gradient) in enumerate(zip(masters, gradients, strict=True)):
        own = {name: values[k].abs_() if name.endswith("_sq") else values[k] for name, values in moments.items()}
        own = {name: value.to(like.moments_type) if has_all else value for name, value in own.items()}
        narrow = None if like.narrow is None else torch.empty_like(master, dtype=like.narrow.dtype)
        counter = None if like.counter is None else torch.tensor(3.0)
        found.append(Work(master, gradient.to(like.gradient.dtype), narrow, like.group, own, counter))
    return found


def _same_numbers(mine: Tensor, other: Tensor) -> bool:
    """Compare bits, but of NaN no more than that it is NaN."""
    if not mine.is_floating_point():
        return torch.equal(mine, other)
    kind = torch.int32 if mine.itemsize == 4 else torch.int16
    return torch.equal(*(torch.where(each.isnan(), -1, each.view(kind)) for each in (mine, other)))


def _written(work: Work) -> list[Tensor]:
    """Return all that a step writes; of halves, NaN's remainders without their digits."""
    weight = [work.master, *(() if work.narrow is None else (work.narrow,))]
    if isinstance(work.halves, Halves):
        narrow, rest, ties = work.halves
        weight = [narrow, rest.masked_fill(narrow.isnan(), 0), ties]
    return [*weight, *work.moments.values()]


def _same_bits(mine: Tensor, plain: Tensor) -> bool:
    """Compare numbers that are none of them NaN, zeros by their signs too."""
    kind = torch.int32 if mine.dtype == torch.float32 else torch.int16
    return torch.equal(mine.view(kind), plain.view(kind))


def is_dense(tensor: Tensor) -> bool:
    """Without gaps, in whatever order of dimensions: torch then lays a tensor like it out in the same way."""
    if tensor.layout != torch.strided:
        return False
    if tensor.is_contiguous() and 1 not in tensor.shape:
        return True  # the common case, without a call into the meta device for each tensor of each update
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
