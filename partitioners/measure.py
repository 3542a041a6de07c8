"""Runs one layer forward and backward and writes down what it took."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from partitioners.boundary import Boundary
from partitioners.cost import ALIGNMENT_BYTES
from partitioners.meter import MemoryMeter


class Work:
    """A layer, and for the last layer the loss function after it."""

    def __init__(self, layer: nn.Module, loss_fn: Callable[[Any, Any], torch.Tensor] | None, target: Any) -> None:
        self.target = Boundary(target if loss_fn else None).detached()
        self._layer, self._loss_fn = layer, loss_fn
        self._modules = nn.ModuleList(part for part in (layer, loss_fn) if isinstance(part, nn.Module))

    def __call__(self, value: Any, target: Any) -> Any:
        output = self._layer(value)
        if self._loss_fn is not None:
            return _scalar(self._loss_fn(output, target))
        if not Boundary(output).tensors:
            raise TypeError(
                f"output: {type(output).__name__} without a tensor in it, limit: at least one; return a tensor, or "
                f"tuples, lists or dicts that hold tensors"
            )
        return output

    @property
    def ends_in_loss(self) -> bool:
        return self._loss_fn is not None

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._modules.named_parameters())

    def buffers(self) -> dict[str, torch.Tensor]:
        return dict(self._modules.named_buffers())


def measure(work: Work, boundary: Boundary) -> tuple[dict[str, Any], Boundary]:
    """Fields of the layer's LayerCost, and the boundary that leaves it."""
    sizes = _sizes(work.parameters(), work.buffers())
    parameters = {name: (parameter, parameter._version) for name, parameter in work.parameters().items()}
    buffers = {name: (buffer, buffer._version, buffer.clone()) for name, buffer in work.buffers().items()}
    handed, target, before = boundary.copied(), work.target.copied(), _host_generators()
    versions = [tensor._version for tensor in handed.tensors]
    with _Watch() as watch:
        metered = _run(work, handed, target, watch)
    again = _run(work, boundary.copied(), work.target.copied())
    _check_unchanged(parameters, work.parameters())
    fields = sizes | {
        "input_bytes": boundary.num_bytes,
        "output_bytes": metered.output.num_bytes,
        "target_bytes": work.target.num_bytes,
        "saved_bytes": watch.saved_bytes,
        "peak_bytes": watch.peak_bytes,
        "forward_s": min(metered.forward_s, again.forward_s),
        "backward_s": min(metered.backward_s, again.backward_s),
        "draws_random": watch.drew_in_forward,
        "draws_globally": watch.drew_in_backward or before != _host_generators(),
        "changes_input": versions != [tensor._version for tensor in handed.tensors],
        "changes_buffers": _changed(buffers, work.buffers()),
    }
    return fields, metered.output


@dataclass(frozen=True, kw_only=True)
class _Run:
    output: Boundary
    forward_s: float
    backward_s: float


def _run(work: Work, handed: Boundary, target: Boundary, watch: "_Watch | None" = None) -> _Run:
    """Forward and backward; the gradients and the graph are dropped."""
    arguments = handed.value(), target.value()
    begin_s = time.perf_counter()
    output = Boundary(work(*arguments))
    forward_s = time.perf_counter() - begin_s
    if watch is not None:
        watch.saved_bytes = watch.current_bytes
    leaving = output.detached()
    roots = [tensor for tensor in output.tensors if tensor.requires_grad]
    grads = [torch.ones_like(root) if work.ends_in_loss else _incoming_gradient(root) for root in roots]
    if watch is not None:
        watch.in_backward = True
    begin_s = time.perf_counter()
    if roots:
        torch.autograd.backward(roots, grads)
    backward_s = time.perf_counter() - begin_s
    for parameter in work.parameters().values():
        parameter.grad = None  # the copies outlive the run: the whole model's gradients would pile up
    return _Run(output=leaving, forward_s=forward_s, backward_s=backward_s)


def _incoming_gradient(root: torch.Tensor) -> torch.Tensor:
    """Ones in memory that no operation created: the meter leaves out what comes from the layer above."""
    strides = torch.empty_like(root, device="meta").stride()
    storage = torch.UntypedStorage(root.numel() * root.element_size())  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=root.dtype).set_(storage, 0, root.shape, strides).fill_(1)


class _Watch(MemoryMeter):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """A meter that also sees which half of a run draws from torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.saved_bytes = 0
        self.drew_in_forward = False
        self.drew_in_backward = False
        self.in_backward = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        draws = torch.Tag.nondeterministic_seeded in func.tags and (kwargs or {}).get("generator") is None
        if self.in_backward:
            # Grad mode in backward means a checkpointed layer runs its forward again. It winds the process-wide
            # generator back and forth for that, also if nothing is drawn: another thread's draws would be repeated.
            self.drew_in_backward |= draws or torch.is_grad_enabled()
        else:
            self.drew_in_forward |= draws
        return super().__torch_dispatch__(func, types, args, kwargs)


def _sizes(parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    held = [tensor.numel() * tensor.element_size() for tensor in (*parameters.values(), *buffers.values())]
    trainable = [parameter for parameter in parameters.values() if parameter.requires_grad]
    return {
        "param_bytes": sum(held[: len(parameters)]),
        "buffer_bytes": sum(held[len(parameters) :]),
        "grad_bytes": sum(parameter.numel() * parameter.element_size() for parameter in trainable),
        "padding_bytes": sum(-num_bytes % ALIGNMENT_BYTES for num_bytes in held),
    }


def _changed(before: Mapping[str, tuple[torch.Tensor, int, torch.Tensor]], after: Mapping[str, torch.Tensor]) -> bool:
    """Whether a buffer was added, rebound or written to, also behind autograd's back (``.data``)."""
    return before.keys() != after.keys() or any(
        after[name] is not buffer or buffer._version != version or not torch.equal(buffer, values)
        for name, (buffer, version, values) in before.items()
    )


def _check_unchanged(before: Mapping[str, tuple[torch.Tensor, int]], after: Mapping[str, torch.Tensor]) -> None:
    for name, (parameter, version) in before.items():
        if after.get(name) is not parameter or parameter._version != version:
            raise ValueError(
                f"parameter {name.partition('.')[2]}: changed while the layer ran, limit: only the optimizer changes "
                f"parameters; keep what forward changes in a buffer, and leave out options such as max_norm"
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
