"""Runs one layer forward and backward, counts its bytes and operations, and times it."""

from __future__ import annotations

import functools
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry

from partitioners.boundary import Boundary
from partitioners.cost import ALIGNMENT_BYTES
from partitioners.meter import MemoryMeter
from partitioners.reach import PLAIN
from partitioners.skips import Frame


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates that a device reaches in practice, not the peaks of its data sheet.

    ``flops_per_s``: matrix products, convolutions and attention, in the precision at hand; eager bfloat16 transformers
    reach about half of a GPU's peak. ``memory_bytes_per_s``: everything else is assumed to be bound by its own memory.
    """

    flops_per_s: float
    memory_bytes_per_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"Rates.{field.name}: {value!r}, limit: finite and above 0; pass a number per second")

    def seconds(self, flops: int, num_bytes: int) -> float:
        """Seconds of one operation: arithmetic or memory traffic, whichever takes longer."""
        return max(flops / self.flops_per_s, num_bytes / self.memory_bytes_per_s)


# The kind of device whose kernels `profile` has in mind for estimates.
GPU = "cuda"

# One core of a current server CPU; one current workstation GPU of 24 GB (its peaks: 83 TFLOP/s in float32, 165 in
# bfloat16 and float16 with float32 sums, 1,008 GB/s).
STATED_RATES = {
    ("cpu", "float32"): Rates(flops_per_s=50e9, memory_bytes_per_s=10e9),
    ("cpu", "bfloat16"): Rates(flops_per_s=50e9, memory_bytes_per_s=10e9),
    ("cpu", "float16"): Rates(flops_per_s=25e9, memory_bytes_per_s=10e9),
    ("cuda", "float32"): Rates(flops_per_s=45e12, memory_bytes_per_s=800e9),
    ("cuda", "bfloat16"): Rates(flops_per_s=80e12, memory_bytes_per_s=800e9),
    ("cuda", "float16"): Rates(flops_per_s=80e12, memory_bytes_per_s=800e9),
}


_ATEN = torch.ops.aten
_RNN, _RNN_BACKWARD = _ATEN.mkldnn_rnn_layer.default, _ATEN.mkldnn_rnn_layer_backward.default
# These write a loss per element first, and reduce it into the beginning of that very memory.
_LOSSES = (
    _ATEN.binary_cross_entropy.default,
    _ATEN.mse_loss.default,
    _ATEN.smooth_l1_loss.default,
    _ATEN.soft_margin_loss.default,
)
# Bytes of a recurrent kernel's workspace, by its arguments: a fact of the kernel, for as long as the process lives.
_workspaces: dict[Any, int] = {}


def _rnn(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Add the workspace for backward. Only the kernel knows its size, so it runs once on tensors of these shapes."""
    key = tuple((arg.shape, arg.stride(), arg.dtype) if isinstance(arg, Tensor) else str(arg) for arg in args)
    if key not in _workspaces:
        with _disable_current_modes():
            real = [torch.zeros(arg.shape, dtype=arg.dtype) if isinstance(arg, Tensor) else arg for arg in args]
            _workspaces[key] = _RNN(*real, **kwargs)[3].numel()
    output, hidden, cell, empty = _RNN(*args, **kwargs)
    return output, hidden, cell, empty.new_empty(_workspaces[key])


def _rnn_backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Give the second bias a gradient of its own."""
    found = list(_RNN_BACKWARD(*args, **kwargs))
    found[4] = torch.empty_like(found[3])
    return tuple(found)


def _loss(func: Any) -> Callable[..., Tensor]:
    def run(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = func(input, target, *args, **kwargs)
        if loss.dim() or input.numel() == 1:
            return loss
        shape = torch.broadcast_shapes(input.shape, target.shape)  # type: ignore[no-untyped-call]
        return loss.new_empty(shape).as_strided((), ())

    return run


# For fake tensors: the results have the memory that the CPU's kernel gives them.
_CORRECTED: dict[Any, Callable[..., Any]] = {_RNN: _rnn, _RNN_BACKWARD: _rnn_backward} | {f: _loss(f) for f in _LOSSES}


_DEVICE = torch.ops.prim.device.default  # fake tensors ask for it all the time
_ATTENTION_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_ATTENTION = {getattr(torch.ops.aten, f"_scaled_dot_product_{name}") for name in _ATTENTION_KERNELS}
_ATTENTION_BACKWARD = {getattr(torch.ops.aten, f"_scaled_dot_product_{name}_backward") for name in _ATTENTION_KERNELS}


def generator_key(generator: torch.Generator) -> int:
    """Return a key that is equal for equal generators: each operation is given new Python objects for them."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def given_generators(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, torch.Generator]:
    """Return the generators among an operation's arguments, by their keys."""
    return {generator_key(each): each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)}


def draws_random(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if an operation, as it was called, draws from the generator of its device.

    The operation's tag says only that it may draw: attention if it has dropout, some activations in training.
    """
    switches = _switches(func)
    if switches is None:
        return False
    given = given_generators(args, kwargs)
    if given and generator_key(torch.default_generator) not in given:
        return False
    for position, name, default in switches:
        value = args[position] if position < len(args) else kwargs.get(name, default)
        if value is not None and not value:  # a probability of 0, or not in training
            return False
    return True


@functools.cache  # asked for each operation that a layer runs
def _switches(func: Any) -> tuple[tuple[int, str, Any], ...] | None:
    """Names of a seeded operation's arguments that keep it from drawing if they are 0 or False; None: it never draws.

    The probability of `native_dropout` is not among them: it draws all the same.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    return tuple(
        (position, argument.name, argument.default_value)
        for position, argument in enumerate(func._schema.arguments)
        if argument.name in ("dropout_p", "dropout", "train", "training")
    )


class Work:
    """A layer to run; with the last layer, also the loss function after it."""

    def __init__(
        self,
        layer: nn.Module,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None,
        target: Any,
        arriving: Mapping[str, Boundary] | None = None,
    ) -> None:
        self._arriving = arriving or {}
        self.frame = Frame({})  # of the last run: the values that it put and got
        self.target = Boundary.of_layer(target if loss_fn else None).detached()
        self.layer, self.loss_fn = layer, loss_fn
        self.modules = nn.ModuleList(part for part in (layer, loss_fn) if isinstance(part, nn.Module))
        self.calls: tuple[Any, ...] = ()  # operations of the run that was counted, and their arguments but for values
        self._ran = 0  # of the layer and the loss, so many have returned in the last run

    @property
    def blamed(self) -> tuple[bool, bool]:
        """Whether what was raised last may come from the layer, and from the loss: from either in a backward."""
        return self._ran != 1, self.loss_fn is not None and self._ran > 0

    def arguments(self, handed: Boundary) -> tuple[Any, Any, dict[str, Any]]:
        """Return the arguments of one run on `handed`: the target and arriving values of `Skips` in new tensors."""
        arriving = {name: boundary.copied().value() for name, boundary in self._arriving.items()}
        return handed.value(), self.target.copied().value(), arriving

    def __call__(self, value: Any, target: Any, arriving: Mapping[str, Any]) -> Any:
        self._ran = 0
        with Frame(arriving) as self.frame:
            output = self.layer(value)
        if self.loss_fn is not None:
            self._ran = 1
            loss = _scalar(self.loss_fn(output, target))
            self._ran = 2
            return loss
        if not Boundary.of_layer(output).tensors:
            raise TypeError(
                f"output: {type(output).__name__} without a tensor in it, limit: at least one; return a tensor, or "
                f"tuples, lists or dicts that hold tensors"
            )
        return output

    @property
    def leaving(self) -> dict[str, Boundary]:
        """What the last run has put for layers further up."""
        return {name: Boundary.of_layer(value) for name, value in self.frame.values.items()}

    def forget(self) -> None:
        """Drop the values that the last run put."""
        self.frame = Frame({})

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.modules.named_parameters())

    def buffers(self) -> dict[str, torch.Tensor]:
        return dict(self.modules.named_buffers())


def _counted(
    work: Work, boundary: Boundary, rates: Rates, run: Callable[[Any, _Watch], Boundary]
) -> tuple[dict[str, Any], Boundary, _Watch]:
    """Run a layer, and return fields of a LayerCost that both kinds of runs have, what leaves it, and the watch.

    run: a function of the arguments of `work` and of the watch, which is on meanwhile.
    """
    buffers, sizes = _versions(work.buffers()), _sizes(work.parameters(), work.buffers())
    entered = boundary.copied()
    before, generators = [tensor._version for tensor in entered.tensors], _host_generators()
    arguments = work.arguments(entered)
    with _Watch(rates) as watch:
        output = run(arguments, watch)
    work.calls = tuple(watch.calls)
    fields = sizes | {
        "input_bytes": boundary.num_bytes,
        "output_bytes": output.num_bytes,
        "held_bytes": output.storage_bytes,
        "target_bytes": work.target.num_bytes,
        "forward_flops": watch.flops[0],
        "backward_flops": watch.flops[1],
        "forward_s": watch.seconds[0],
        "backward_s": watch.seconds[1],
        "timed": False,
        "draws_random": watch.drew_in_forward,
        "draws_globally": watch.drew_in_backward or generators != _host_generators(),
        "runs_backward": watch.ran_backward,
        "changes_input": before != [tensor._version for tensor in entered.tensors],
        "changes_buffers": _changed(buffers, work.buffers()),
        "puts": tuple((name, value.num_bytes) for name, value in work.leaving.items()),
        "gets": tuple(work.frame.gotten),
    }
    return fields, output, watch


def count(work: Work, boundary: Boundary, rates: Rates) -> tuple[dict[str, Any], Boundary]:
    """Return the layer's bytes, operations and flags, as fields of a LayerCost, and the boundary that leaves it.

    Works on fake tensors as on real ones. Seconds are estimates: operations divided by `rates`.
    """
    generators = _host_generators()
    fields, output, watch = _counted(work, boundary, rates, lambda given, watch: run_once(work, given, watch)[0])
    work.forget()
    arguments = work.arguments(boundary.copied())
    with _Watch(rates) as light, saved_tensors_hooks(_drop, _drop):
        try:
            work(*arguments)
            forward_peak_bytes: int | None = light.peak_bytes
        except (RuntimeError, TypeError):  # a layer that differentiates inside its forward keeps what it saves
            forward_peak_bytes = None
    fields |= {
        "saved_bytes": watch.saved_bytes,
        # Backward through a write to a view makes a copy of the whole gradient, but not on fake tensors, for which
        # autograd goes another way.
        "peak_bytes": watch.peak_bytes + watch.viewed_bytes,
        "forward_peak_bytes": forward_peak_bytes,
        "draws_globally": fields["draws_globally"] or generators != _host_generators(),
    }
    return fields, output


def count_evaluation(work: Work, boundary: Boundary, rates: Rates) -> tuple[dict[str, Any], Boundary]:
    """Return the same for an evaluation: a forward in eval() under no_grad, which saves nothing."""

    @torch.no_grad()
    def run(arguments: Any, _: _Watch) -> Boundary:
        return Boundary.of_layer(work(*arguments)).detached()

    work.modules.eval()  # which are copies
    fields, output, watch = _counted(work, boundary, rates, run)
    peak_bytes = {"saved_bytes": 0, "peak_bytes": watch.peak_bytes, "forward_peak_bytes": watch.peak_bytes}
    return fields | {"grad_bytes": 0, "accumulated_bytes": 0} | peak_bytes, output


def timed(work: Work, boundary: Boundary, synchronize: Callable[[], None]) -> tuple[dict[str, Any], Boundary]:
    """Return the layer's seconds after a first run, as fields of a LayerCost, and the boundary that leaves it."""
    buffers = _versions(work.buffers())
    before = _host_generators()
    for _ in range(2):
        output = None  # the run before this one
        work.forget()
        output, forward_s, backward_s = run_once(work, work.arguments(boundary.copied()), synchronize=synchronize)
    fields = {
        "forward_s": forward_s,
        "backward_s": backward_s,
        "timed": True,
        "changes_buffers": _changed(buffers, work.buffers()),
        "draws_globally": before != _host_generators(),
    }
    assert output is not None
    return fields, output


def run_once(
    work: Work,
    arguments: tuple[Any, Any, dict[str, Any]],
    watch: _Watch | None = None,
    synchronize: Callable[[], None] = lambda: None,
) -> tuple[Boundary, float, float]:
    """Run forward and backward; drop the gradients and the graph. Return the output, and the seconds of each."""
    begin_s = time.perf_counter()
    output = Boundary.of_layer(work(*arguments))
    synchronize()
    forward_s = time.perf_counter() - begin_s
    if watch is not None:
        watch.ran_backward = any(parameter.grad is not None for parameter in work.parameters().values())
        watch.saved_bytes = watch.current_bytes  # alive now: saved for backward, or the output
    leaving = output.detached()
    leaving_tensors = [tensor for boundary in work.leaving.values() for tensor in boundary.tensors]
    unique = {id(tensor): tensor for tensor in (*output.tensors, *leaving_tensors)}.values()
    roots = [tensor for tensor in unique if tensor.requires_grad]
    if watch is not None:
        watch.is_paused = work.loss_fn is None  # what comes from the layer above is left out
    grads = [torch.ones_like(root) for root in roots]
    if watch is not None:
        watch.is_paused, watch.is_in_backward = False, True
    synchronize()
    begin_s = time.perf_counter()
    if roots:
        with work.frame.replayed():
            torch.autograd.backward(roots, grads)
    synchronize()
    backward_s = time.perf_counter() - begin_s
    for parameter in work.parameters().values():
        parameter.grad = None  # the copies outlive the run: the whole model's gradients would pile up
    return leaving, forward_s, backward_s


class _Watch(MemoryMeter):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """A meter that also counts operations, and sees which half of a run draws from torch's generator."""

    def __init__(self, rates: Rates) -> None:
        super().__init__()
        self.saved_bytes = 0
        self.drew_in_forward = False
        self.drew_in_backward = False
        self.ran_backward = False  # a backward of the forward's own has left gradients
        self.flops = [0, 0]  # forward, backward
        self.seconds = [0.0, 0.0]
        self.calls: list[Any] = []
        self.viewed_bytes = 0  # of the largest storage of which a view was written to
        self._rates = rates
        self.is_in_backward = False
        self.is_paused = False  # what is created meanwhile is left out

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused or func is _DEVICE:
            return func(*args, **kwargs)
        draws = draws_random(func, args, kwargs)
        if self.is_in_backward:
            # Grad mode in backward means a checkpointed layer runs its forward again. It winds the process-wide
            # generator back and forth for that, also if nothing is drawn: another thread's draws would be repeated.
            self.drew_in_backward |= draws or torch.is_grad_enabled()
        else:
            self.drew_in_forward |= draws
            if func._schema.is_mutable and isinstance(args[0], FakeTensor) and args[0]._is_view():
                self.viewed_bytes = max(self.viewed_bytes, args[0].untyped_storage().nbytes())
        run = _CORRECTED[func] if func in _CORRECTED and isinstance(args[0], FakeTensor) else func
        self.calls.append((func, *map(_described, pytree.tree_leaves((args, kwargs)))))
        result = super().__torch_dispatch__(run, types, args, kwargs)
        flops = _flops(func, args, kwargs, result)
        self.flops[self.is_in_backward] += flops
        self.seconds[self.is_in_backward] += self._rates.seconds(flops, _traffic_bytes(func, args, kwargs, result))
        return result


def _described(argument: Any) -> Any:
    """Return an argument of an operation, of a tensor what is known without its values."""
    if isinstance(argument, Tensor) and argument.layout == torch.strided and not argument.is_nested:
        return argument.shape, argument.stride(), argument.dtype
    return argument if isinstance(argument, (*PLAIN, torch.dtype, torch.layout, torch.device)) else id(argument)


def _flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Floating-point operations of attention and, by torch's own formulas, of matrix products and convolutions."""
    packet = getattr(func, "overloadpacket", None)
    if packet in _ATTENTION:
        return _attention_flops(*args[:3])
    if packet in _ATTENTION_BACKWARD:
        return _attention_flops(*args[1:4]) * 5 // 2  # the scores are computed again
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Operations of both products. Heads of queries may share one of keys, which torch 2.11 would refuse to count."""
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _traffic_bytes(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Bytes read and written, each tensor once; a view moves none."""
    if func.is_view or torch.Tag.inplace_view in func.tags:
        return 0
    leaves = pytree.tree_leaves((args, kwargs, result))
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _drop(_: Any) -> Any:
    return None


def _sizes(parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    held = [tensor.numel() * tensor.element_size() for tensor in (*parameters.values(), *buffers.values())]
    trainable = [parameter for parameter in parameters.values() if parameter.requires_grad]
    return {
        "param_bytes": sum(held[: len(parameters)]),
        "buffer_bytes": sum(held[len(parameters) :]),
        "grad_bytes": sum(parameter.numel() * parameter.element_size() for parameter in trainable),
        # Narrow gradients add up over micro-batches in float32.
        "accumulated_bytes": sum(p.numel() * max(p.element_size(), 4) for p in trainable),
        "padding_bytes": sum(-num_bytes % ALIGNMENT_BYTES for num_bytes in held),
    }


def _versions(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, int]]:
    return {name: (tensor, tensor._version) for name, tensor in tensors.items()}


def _changed(before: Mapping[str, tuple[torch.Tensor, int]], after: Mapping[str, torch.Tensor]) -> bool:
    """Return True if a buffer was added, rebound or written to."""
    return before.keys() != after.keys() or any(
        after[name] is not buffer or buffer._version != version for name, (buffer, version) in before.items()
    )


def _scalar(loss: object) -> torch.Tensor:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise ValueError(
        f"loss: {found}, not a scalar, limit: a tensor of one element; reduce it, for example with .mean()"
    )


def _host_generators() -> tuple[Any, ...]:
    """States of `random` and `numpy.random`, to compare."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, np.asarray(keys).tobytes(), *rest
