"""One pass over DRAM per host update: narrow gradient in, float32 master and state stepped, narrow weight out.

Written plainly, an update widens every gradient, steps the optimizer and narrows every weight: three passes. What steps
each element by itself may as well go a block at a time, and then the widened gradient never leaves the cache:

    gradient (DRAM) -> scratch (cache) -> factors -> step master and state (DRAM) -> narrow (DRAM)

That is one native call for the parameters of a shard where `hydra_engine.native` has torch's bits. Else it is torch's
own step, on a block after the other if there is one intra-op thread, and on all parameters together if there are more.
"""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim import optimizer as base

from hydra_engine.host.split import BLOCK, row_of
from hydra_engine.native import TORCHS, NarrowUpdate, Rule, is_dense, native
from hydra_engine.system import HostMemory

# Elements of a block: 4 MiB of widened gradient, of 16 that pass by in an AdamW step, for the last cache; what a block
# costs in Python is then below one in a hundred. See benchmarks/host_optimizer.
CHUNK = 2**20

# Elements of a piece where torch's fused kernel is called without the Python around it, which costs ten times as much:
# 256 KiB of widened gradient, and 768 that pass by, for the second-level cache of one core.
KERNEL_CHUNK = 2**16

# They step each element by itself, in all their implementations. Adafactor sums over rows, Muon multiplies matrices.
ELEMENTWISE = {ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop}

# Types of options that compute as Python's own numbers do.
PLAIN = {type(None), bool, int, float, np.float64, np.int64}

MOMENTS = torch.bfloat16
NOTHING = torch.empty(0)
ALIGNMENT = 64  # bytes, as of torch's own tensors
_OF_THREAD = threading.local()

Factors = Sequence["float | Tensor"]
StepPiece = Callable[[Tensor, Tensor, dict[str, Tensor]], None]  # of a master, given its gradient and state


def step_narrow(
    optimizer: Optimizer,
    updates: Sequence[NarrowUpdate],
    factors: Factors = (),
    step: Callable[[], object] | None = None,
    *,
    narrows_moments: bool = False,
    rule: Rule = TORCHS,
) -> None:
    """Step the parameters of `optimizer`, and no others, by gradients of any dtype; then write their narrow copies.

    Widened gradients are multiplied by `factors`, one after the other. Weights and state are bitwise those of the plain
    way, at the same number of intra-op threads: `p.grad = gradient.float()`, `p.grad.mul_(factor)` for each factor,
    `optimizer.step()`, `narrow.copy_(p)`. As there, a gradient that is float32 already may be overwritten.
    `step`: instead of the optimizer's own, where that goes over all parameters at once.
    narrows_moments: keep state of a parameter's shape in bfloat16 from one step to the next, which changes bits.
    rule: that of the host, as far as the native call makes them.
    """
    if not _is_elementwise(optimizer):
        with _moments_widened(optimizer, updates if narrows_moments else ()):
            step_whole(step or optimizer.step, updates, factors)
        return
    updates = native().step(optimizer, updates, factors, MOMENTS if narrows_moments else torch.float32, rule)
    if not updates:
        return
    part = part_of(optimizer, [])
    bare = _bare_step(part)
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    updates = [update for update in updates if id(update.parameter) in groups]  # its maker may have left some out
    size = min(CHUNK, sum(update.parameter.numel() for update in updates))
    # A block's gradients; a piece's weights; its moments, of which Adam has three at most.
    num_places = 5 if narrows_moments else 2 if any(update.master is not None for update in updates) else 1
    scratch = _scratch(num_places * size)
    with torch.no_grad():
        for block, is_cut in _blocks(updates, [_is_cut(optimizer, groups[id(u.parameter)], u) for u in updates]):
            if is_cut:
                places = [scratch[k * size :] for k in range(num_places)]
                _step_in_pieces(optimizer, groups[id(block[0].parameter)], block[0], factors, places)
            else:
                mine = {id(update.parameter) for update in block}
                part.param_groups = [
                    {**group, "params": [p for p in group["params"] if id(p) in mine]}
                    for group in optimizer.param_groups
                ]
                with _moments_widened(optimizer, block if narrows_moments else ()):
                    step_whole(bare, block, factors, scratch)


def step_natively(
    optimizer: Optimizer,
    updates: Sequence[NarrowUpdate],
    factors: Factors = (),
    moments: torch.dtype = torch.float32,
    rule: Rule = TORCHS,
) -> Sequence[NarrowUpdate]:
    """Make the updates that one native call can make, with the bits of `step_narrow`; return the others."""
    return native().step(optimizer, updates, factors, moments, rule) if _is_elementwise(optimizer) else updates


def make_states(
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
    dtype: torch.dtype | None,
    ahead: Mapping[nn.Parameter, dict[str, Tensor]] | None = None,
) -> None:
    """Make the states that torch's Adam, AdamW and SGD make in a parameter's first step, for parameters without any.

    That step is then one as any other, with the same bits: their averages begin at zero. SGD's momentum begins as the
    first gradient, and minus zero, however much is kept of it, changes no gradient that is added to it.
    dtype: of moments; None: the parameter's own.
    ahead: what `moments_ahead` has made for some of them.
    """
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for group in optimizer.param_groups:
        mine = [p for p in parameters if groups.get(id(p)) is group and p.is_floating_point()]
        names = moment_names(optimizer, group)
        if names is None:
            continue
        is_adam = type(optimizer) is not SGD
        fitting = {p: found for p in mine if (found := (ahead or {}).get(p)) and [*found] == names}
        others = [p for p in mine if p not in fitting]
        # As `is_moment` has it: those of numbers stay wide.
        kinds = [dtype if p.dim() and p.dtype == torch.float32 else None for p in others]
        like = [torch.empty_like(p, dtype=kind, device="meta") for p, kind in zip(others, kinds, strict=True)]
        places = iter(new_private(each for each in like for _ in names))
        counts_in_double = torch.get_default_dtype() == torch.float64 and not group.get("fused")
        for parameter in mine if names else ():
            moments = fitting.get(parameter) or {name: next(places) for name in names}
            if is_adam:
                count = torch.tensor(0.0, dtype=torch.float64 if counts_in_double else torch.float32)
                optimizer.state[parameter] = {"step": count, **moments}
            else:
                moments["momentum_buffer"].fill_(-0.0)
                optimizer.state[parameter] = moments


def moment_names(optimizer: Optimizer, group: Mapping[str, Any]) -> list[str] | None:
    """Return the moments that torch's Adam, AdamW and SGD keep by a group's options; None where others may be."""
    part = part_of(optimizer, [dict(group)])  # without the `step` that a schedule puts on it
    if type(optimizer) not in (Adam, AdamW, SGD) or not _is_elementwise(part):
        return None
    if type(optimizer) is not SGD:
        return ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
    if group["momentum"] and group["dampening"]:
        return None
    return ["momentum_buffer"] if group["momentum"] else []


def moments_ahead(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None
) -> dict[nn.Parameter, dict[str, Tensor]]:
    """Create the moments that `make_states` needs later, and write zeros to them.

    The system allocates a page at the first write to it, which takes longer than the update itself.
    """
    apart = part_of(optimizer, optimizer.param_groups)
    apart.state = defaultdict(dict)
    make_states(apart, parameters, dtype)
    made = [p for p in parameters if p in apart.state]
    moments = {p: {key: value for key, value in apart.state[p].items() if key != "step"} for p in made}
    for each in moments.values():
        for tensor in each.values():
            tensor.zero_()
    return moments


def new_private(like: Iterable[Tensor]) -> list[Tensor]:
    """Return zeros laid out as `torch.zeros_like` would, side by side in DRAM that the C library does not manage.

    It keeps freed blocks of up to 32 MiB, and gives small pages.
    """
    layouts = [torch.empty_like(each, device="meta") for each in like]
    starts = list(accumulate((-(-each.nbytes // ALIGNMENT) * ALIGNMENT for each in layouts), initial=0))
    storage = HostMemory().new(starts[-1])
    return [
        torch.empty(0, dtype=each.dtype).set_(storage, start // each.itemsize, each.shape, each.stride())
        for each, start in zip(layouts, starts, strict=False)
    ]


def part_of(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """The optimizer over some of its parameters, sharing its state and everything else.

    Not by `copy`, which goes through __setstate__ and its conversions; without the instance attribute `step`, which
    schedulers put on the whole optimizer.
    """
    part: Optimizer = object.__new__(type(optimizer))
    part.__dict__.update(optimizer.__dict__)
    part.__dict__.pop("step", None)
    part.param_groups = groups
    return part


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return True if something is called before or after each of its steps."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # which one around another may lack
    own = [getattr(optimizer, name, None) for name in names]
    return any((*own, base._global_optimizer_pre_hooks, base._global_optimizer_post_hooks))


def _scratch(num_elements: int) -> Tensor:
    """Scratch memory of the thread. Made anew for each update, it would leave gaps between the first ones' states."""
    held: Tensor | None = getattr(_OF_THREAD, "scratch", None)
    if held is None or len(held) < num_elements:
        held = _OF_THREAD.scratch = torch.empty(num_elements)
    return held[:num_elements]


def _is_elementwise(optimizer: Optimizer) -> bool:
    """Return True if a step may be taken piece by piece without anybody noticing."""
    instead = {"step", "grad_scale", "found_inf"}  # put on an instance by schedulers and by GradScaler
    return (
        type(optimizer) in ELEMENTWISE
        and not has_step_hooks(optimizer)
        and not instead & vars(optimizer).keys()
        and not any(_is_special(group) for group in optimizer.param_groups)
    )


def _is_special(group: Mapping[str, Any]) -> bool:
    """Options that reach beyond one step on plain numbers: graphs, and numbers that round in a way of their own.

    A learning rate that is a tensor or a `np.float32` rounds what torch's step computes from it.
    """
    values = [value for key, value in group.items() if key != "params"]
    values += [each for value in values if isinstance(value, (list, tuple)) for each in value]
    is_plain = all(isinstance(value, (str, list, tuple)) or type(value) in PLAIN for value in values)
    return bool(group.get("capturable") or group.get("differentiable") or not is_plain)


def _blocks(updates: Sequence[NarrowUpdate], cuts: Sequence[bool]) -> Iterator[tuple[list[NarrowUpdate], bool]]:
    """Neighbours that fit into a block together; what is cut, or larger than a block, alone."""
    block: list[NarrowUpdate] = []
    total = 0
    for update, is_cut in zip(updates, cuts, strict=True):
        num_elements = update.parameter.numel()
        if block and (is_cut or total + num_elements > CHUNK):
            yield block, False
            block, total = [], 0
        if is_cut:
            yield [update], True
        else:
            block.append(update)
            total += num_elements
    if block:
        yield block, False


def step_whole(
    step: Callable[[], object], updates: Sequence[NarrowUpdate], factors: Factors = (), scratch: Tensor = NOTHING
) -> None:
    """The plain way; gradients are widened into what there is of scratch."""
    split = [update.master for update in updates if update.master is not None]
    for master in split:
        master.show()
    try:
        for update in updates:
            gradient, dtype = update.gradient, update.parameter.dtype
            if gradient.dtype != dtype:
                if dtype == scratch.dtype and gradient.numel() <= len(scratch) and is_dense(gradient):
                    place = scratch.as_strided(gradient.shape, gradient.stride())
                    gradient, scratch = place.copy_(gradient), scratch[gradient.numel() :]
                else:
                    gradient = gradient.to(dtype)
            for factor in factors:
                gradient.mul_(factor)
            update.parameter.grad = gradient
        step()
    finally:
        for update in updates:
            update.parameter.grad = None
        for master in split:
            master.keep()
            master.hide()
    with torch.no_grad():
        for update in updates:
            if update.narrow is not None and update.master is None:
                update.narrow.copy_(update.parameter)


def _is_cut(optimizer: Optimizer, group: Mapping[str, Any], update: NarrowUpdate) -> bool:
    """Return True if pieces of this parameter are stepped as within the whole, and that is worth it."""
    parameter, state = update.parameter, optimizer.state.get(update.parameter, {})
    if torch.get_num_threads() > 1:
        return False  # they would meet at the end of every operation on a piece, and divide it elsewhere
    if parameter.dim() == 0 or (parameter.numel() <= CHUNK and not _has_kernel(optimizer, group)):
        return False  # state without dimensions is taken for counters
    if not state and not (type(optimizer) is SGD and group["momentum"] == 0):
        return False  # the first step, which makes the state
    if parameter.dtype != torch.float32 or not update.gradient.is_floating_point():
        return False
    tensors = [update.gradient, update.narrow, *state.values()]
    return all(
        tensor is None or (isinstance(tensor, Tensor) and (tensor.dim() == 0 or _lies_as(tensor, parameter)))
        for tensor in tensors
    )


def _has_kernel(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return True if a piece's step is one call of a kernel: even the smallest parameter is then sooner alone."""
    return type(optimizer) in (Adam, AdamW) and bool(group["fused"])


def _step_in_pieces(
    optimizer: Optimizer, group: Mapping[str, Any], update: NarrowUpdate, factors: Factors, places: Sequence[Tensor]
) -> None:
    """The plain way, on one piece of a parameter after the other; places: as long as a block, for what is widened."""
    state: dict[str, Tensor] = optimizer.state.get(update.parameter, {})
    chunk, make_step = (KERNEL_CHUNK, _kernel_step) if _has_kernel(optimizer, group) else (CHUNK, _piece_step)
    step_piece = make_step(optimizer, group, state)
    masters, gradients = _pieces(update.parameter, chunk), _pieces(update.gradient, chunk)
    narrows = _pieces(update.narrow, chunk) if update.narrow is not None else None
    states = {key: _pieces(value, chunk) for key, value in state.items() if value.dim() > 0}
    halves = None if update.master is None else update.master.split.pieces(chunk)
    place = places[0][:chunk]
    try:
        for k, gradient in enumerate(gradients):
            size = gradient.numel()
            if gradient.dtype != torch.float32:
                gradient = (place if size == chunk else place[:size]).copy_(gradient)
            for factor in factors:
                gradient.mul_(factor)
            master = masters[k] if halves is None else halves[k].load(places[1][:size])
            own = {key: pieces[k] for key, pieces in states.items()}
            narrow = [key for key, each in own.items() if each.dtype == MOMENTS]
            wide = {key: places[2 + j][:size].copy_(own[key]) for j, key in enumerate(narrow)}
            step_piece(master, gradient, own | wide)
            for key, each in wide.items():
                _narrow_moment(each, own[key], state)
            if halves is not None:
                halves[k].store(master)
            elif narrows is not None:
                narrows[k].copy_(master)
    finally:
        if halves is not None and update.master is not None:
            update.master.split.join(halves, chunk)


def _pieces(tensor: Tensor, chunk: int) -> Sequence[Tensor]:
    """Views of a dense tensor, in the order of its memory."""
    return torch.split(tensor.detach().as_strided((tensor.numel(),), (1,)), chunk)


def _kernel_step(optimizer: Optimizer, group: Mapping[str, Any], state: Mapping[str, Tensor]) -> StepPiece:
    """Steps the pieces of one parameter by the kernel of torch's fused Adam and AdamW alone, once its counter is ahead.

    The same call that `torch.optim.adam` makes at the end of its fused path, in all of torch's versions from 2.11 on.
    """
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    beta1, beta2 = group["betas"]
    options = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    state["step"].add_(1)

    def step_piece(master: Tensor, gradient: Tensor, own: dict[str, Tensor]) -> None:
        largest = [own["max_exp_avg_sq"]] if group["amsgrad"] else []
        averages = [own["exp_avg"]], [own["exp_avg_sq"]], largest
        kernel([master], [gradient], *averages, [state["step"]], beta1=beta1, beta2=beta2, **options)

    return step_piece


def _piece_step(optimizer: Optimizer, group: Mapping[str, Any], state: Mapping[str, Tensor]) -> StepPiece:
    """Steps the pieces of one parameter, each from the counters of before this step."""
    counters = {key: value for key, value in state.items() if value.dim() == 0}
    part = part_of(optimizer, [{**group}])
    step = _bare_step(part)
    before = {key: counter.clone() for key, counter in counters.items()}

    def step_piece(master: Tensor, gradient: Tensor, own: dict[str, Tensor]) -> None:
        master.grad = gradient
        for key, counter in counters.items():
            counter.copy_(before[key])
        part.param_groups[0]["params"] = [master]
        part.state = defaultdict(dict, {master: {**counters, **own}})
        step()

    return step_piece


def _bare_step(part: Optimizer) -> Callable[[], object]:
    """The step without what torch wraps around it for hooks and the profiler: twice as fast on next to nothing."""
    return partial(inspect.unwrap(type(part).step), part)


def _lies_as(tensor: Tensor, parameter: Tensor) -> bool:
    """Return True if both are dense, with their elements in the same order."""
    return is_dense(tensor) and tensor.shape == parameter.shape and tensor.stride() == parameter.stride()


# -- moments in bfloat16


@contextmanager
def _moments_widened(optimizer: Optimizer, updates: Sequence[NarrowUpdate]) -> Iterator[None]:
    """Let these parameters have their moments in float32 in the body, and in bfloat16 after it."""
    kept: dict[tuple[int, str], Tensor] = {}
    for update in updates:
        state = optimizer.state.get(update.parameter, {})
        for key, value in state.items():
            if is_moment(value, update.parameter) and value.dtype == MOMENTS:
                kept[id(update.parameter), key] = value
                state[key] = value.float()
    try:
        yield
    finally:
        for update in updates:
            state = optimizer.state.get(update.parameter, {})
            for key, value in state.items():
                if is_moment(value, update.parameter) and value.dtype == torch.float32:
                    place = kept.get((id(update.parameter), key))
                    place = torch.empty_like(value, dtype=MOMENTS) if place is None else place
                    _narrow_moment(value, place, state)
                    state[key] = place


def is_moment(value: object, parameter: Tensor) -> bool:
    """Return True if a state is an average of a float32 parameter's shape, in float32 or in bfloat16."""
    if not isinstance(value, Tensor) or parameter.dtype != torch.float32 or not value.dim():
        return False
    return value.dtype in (torch.float32, MOMENTS) and value.shape == parameter.shape and is_dense(value)


def _narrow_moment(wide: Tensor, place: Tensor, state: Mapping[str, Any]) -> None:
    """Round a moment, which is overwritten, by the step that its optimizer has counted."""
    counter = state.get("step")
    if counter is None:  # momentum, which forgets within a few steps
        place.copy_(wide)
    else:
        round_by_turns(row_of(wide), row_of(place), int(counter))


@lru_cache(maxsize=4)
def _below_one_unit(turn: int) -> Tensor:
    """What is added to a block at a turn: for all of a step, so it is kept."""
    return ((torch.arange(BLOCK) * 25717 + turn * 40503) % 2**16).to(torch.int32)


def round_by_turns(values: Tensor, out: Tensor, turn: int) -> None:
    """Round float32 values, which are overwritten, to bfloat16, up or down: over turns the mean is the value.

    Rounded to nearest, an average stays where it is if it moves by less than half a unit in its last place. AdamW's
    second moment falls by a thousandth of itself at most, and a unit is at least four: it would never fall again. So a
    number below one unit is added to each value, another one at each turn, and what exceeds a unit is cut off. In
    65,536 turns each such number comes once. So it does in 65,536 neighbours at one turn.
    """
    below = _below_one_unit(turn % 2**16)
    for source, target in zip(torch.split(values, BLOCK), torch.split(out, BLOCK), strict=True):
        bits = source.view(torch.int32)
        bits += below[: len(bits)]
        bits >>= 16
        target.view(torch.int16).copy_(bits)
