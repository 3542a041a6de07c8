"""Measures a machine's ceilings, through the lanes of a device as a run uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from threading import Barrier, Event
from typing import Any, TypeVar

import torch
from torch import Tensor

from hydra_engine.devices.device import DeviceSpec, OpenDevice
from hydra_engine.devices.lanes import COMPUTE, LOAD, STORE, Promise
from hydra_engine.devices.pool import host_memory
from hydra_engine.devices.rates import (
    LINK_RATES,
    SMALLEST_MATRIX,
    Ceilings,
    dram_bytes_per_s,
    matmul_flops,
    median_s,
    plain_host_bytes,
)
from hydra_engine.trace import Trace
from partitioners import format_bytes
from partitioners.precision import DTYPES

T = TypeVar("T")

# One copy over the link: long enough that starting and awaiting it is nothing beside.
COPY_BYTES = 2**26
# Of a device's memory, that one copy may take, and the matrices of a product.
SHARE = 4
LEAST_MEMORY_BYTES = SHARE * 3 * 4 * SMALLEST_MATRIX**2


def probe(spec: DeviceSpec, *, num_workers: int, num_threads: int) -> Ceilings:
    """Open a device, measure, close it; arguments as `measure` has them."""
    if spec.memory_bytes < LEAST_MEMORY_BYTES:
        raise ValueError(
            f"device: {format_bytes(spec.memory_bytes)}, limit: {format_bytes(LEAST_MEMORY_BYTES)} to measure on; give "
            f"it more memory"
        )
    opened, host = spec.open(0, Trace(), num_threads, spec.memory_bytes // SHARE), host_memory([spec])

    def new_host_bytes(num_bytes: int) -> Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(host.new(num_bytes)).fill_(1)

    try:
        return measure(
            opened, spec.ceilings_name, num_workers=num_workers, num_threads=num_threads, new_host_bytes=new_host_bytes
        )
    finally:
        opened.close()


def measure(
    opened: OpenDevice,
    name: str,
    *,
    num_workers: int,
    num_threads: int,
    new_host_bytes: Callable[[int], Tensor] = plain_host_bytes,
) -> Ceilings:
    """Measure everything, in a second or two. Nothing else may be at work, there or on the host.

    num_workers: threads that update weights on the host. num_threads: intra-op, of each of them and of a lane.
    new_host_bytes: makes DRAM as a run copies it from and to: a tensor of so many uint8.
    """
    link: dict[str, Any] = dict(zip(LINK_RATES, _link_rates(opened, new_host_bytes), strict=True))
    most_bytes = opened.ledger.memory_bytes // SHARE
    matmul = {
        precision: _in_lane(
            opened, COMPUTE, partial(matmul_flops, opened.torch_device, dtype, most_bytes, opened.finish)
        ).result()
        for precision, dtype in DTYPES.items()
    }
    return Ceilings(
        name=name,
        dram_bytes_per_s=dram_bytes_per_s(num_workers, num_threads),
        matmul_flops=matmul,
        measured=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        torch_version=torch.__version__,
        num_threads=num_threads,
        **link,
    )


def _link_rates(opened: OpenDevice, new_host_bytes: Callable[[int], Tensor]) -> list[float]:
    """Bytes per second, in the order of `LINK_RATES`."""
    num_bytes = min(COPY_BYTES, opened.ledger.memory_bytes // SHARE)
    slabs = [opened.take_slab(num_bytes) for _ in range(2)]
    try:
        on_device = [slab.bytes(0, num_bytes) for slab in slabs]
        up = partial(_copy, opened, LOAD, on_device[0], new_host_bytes(num_bytes))
        down = partial(_copy, opened, STORE, new_host_bytes(num_bytes), on_device[1])
        up_s = _in_lane(opened, LOAD, partial(median_s, up)).result()
        down_s = _in_lane(opened, STORE, partial(median_s, down)).result()
        both_up_s, both_down_s = _both_s(opened, [(LOAD, up), (STORE, down)])
    finally:
        for slab in slabs:
            opened.give_slab_back(slab)
    return [num_bytes / seconds for seconds in (up_s, down_s, both_up_s, both_down_s)]


def _copy(opened: OpenDevice, lane: str, target: Tensor, source: Tensor) -> None:
    opened.copy(lane, [(target, source)])
    opened.finish()


def _both_s(opened: OpenDevice, copies: Sequence[tuple[str, Callable[[], None]]]) -> list[float]:
    """Median seconds of copies in two lanes at once: each goes on until the other was timed often enough."""
    together, timed = Barrier(len(copies)), [Event() for _ in copies]

    def job(k: int, copy: Callable[[], None]) -> float:
        together.wait()
        try:
            seconds = median_s(copy)
        finally:
            timed[k].set()
        while not all(each.is_set() for each in timed):
            copy()
        return seconds

    promises = [_in_lane(opened, lane, partial(job, k, copy)) for k, (lane, copy) in enumerate(copies)]
    return [promise.result() for promise in promises]


def _in_lane(opened: OpenDevice, lane: str, work: Callable[[], T]) -> Promise[T]:
    promise: Promise[T] = Promise()
    opened.submit(lane, "probe", partial(promise.fulfil, work))
    return promise
