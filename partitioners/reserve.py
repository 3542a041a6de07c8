"""Memory that the meter cannot see: kernels allocate and free it within one operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from partitioners.boundary import Boundary
from partitioners.copies import Copies
from partitioners.measure import Work, run_once
from partitioners.meter import MemoryMeter
from partitioners.profile import named_layers

_MEMORY_EVENT = "[memory]"  # the profiler's name for a change of allocated memory


@dataclass(frozen=True, kw_only=True)
class LayerPeak:
    """Most bytes at once of one layer's forward and backward, measured in two ways."""

    index: int
    name: str
    metered_bytes: int  # storages that operations create, and the gradient that comes in
    allocated_bytes: int  # bytes that the allocator handed out, kernels' own scratch memory included

    @property
    def reserve_bytes(self) -> int:
        """The difference: bytes to keep free on a device beside the metered ones."""
        return max(0, self.allocated_bytes - self.metered_bytes)


def layer_peaks(
    model: nn.Module | Iterable[nn.Module], inputs: Any, target: Any, loss_fn: Callable[[Any, Any], torch.Tensor]
) -> list[LayerPeak]:
    """Run every layer on the CPU, metered and under `torch.profiler`; the figures of the last include the loss."""
    layers = named_layers(model)
    copies, peaks = Copies(), []
    skips: dict[str, Boundary] = {}
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        boundary = Boundary.of_layer(copies.inputs(inputs)).detached()
        for index, (name, layer) in enumerate(layers):
            is_last = index == len(layers) - 1
            work = Work(copies.layer(layer), copies.loss(loss_fn) if is_last else None, copies.target(target), skips)
            handed, target_copy, arriving = boundary.copied(), work.target.copied(), work.prepare()
            with MemoryMeter() as meter:
                run_once(work, handed, target_copy, arriving)
            allocated_bytes, boundary = _allocated(work, boundary)
            skips |= {name: value.detached() for name, value in work.leaving.items()}
            peaks.append(
                LayerPeak(index=index, name=name, metered_bytes=meter.peak_bytes, allocated_bytes=allocated_bytes)
            )
    return peaks


def _allocated(work: Work, boundary: Boundary) -> tuple[int, Boundary]:
    """Return the allocator's peak while the layer runs, and the boundary that leaves it."""
    work.forget()
    handed, target, arriving = boundary.copied(), work.target.copied(), work.prepare()
    # There is one cycle of events. torch 2.11 warns that it keeps no others, unless it is asked to.
    with profiler(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
        output = run_once(work, handed, target, arriving).output
    events = trace.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == _MEMORY_EVENT)
    current = most = 0
    for _, num_bytes in changes:
        current += num_bytes
        most = max(most, current)
    return most, output
