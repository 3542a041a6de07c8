"""Devices: a memory budget, an arena for slabs, three lanes. The only module that knows CUDA, streams or pinning.

ledger   bytes granted in the order they were asked for; nobody waits inside a lane for memory
arena    one storage; a slab is a region of it, handed out from both ends
lanes    load, compute, store: three queues worked off at the same time
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from queue import SimpleQueue
from typing import TypeAlias

import torch
from torch import Tensor

from hydra_engine.errors import DeviceOutOfMemory
from hydra_engine.ledger import Ledger
from hydra_engine.trace import Trace
from partitioners import format_bytes, parse_bytes

LOAD, COMPUTE, STORE = LANES = ("load", "compute", "store")

# The test mode delays this share of jobs, by at most so long: enough to put any two lanes in either order.
CHAOS_SHARE = 0.3
CHAOS_MAX_S = 0.0005
# A copy over an emulated link is in the way of an urgent one for so long at most.
PIECE_S = 0.002
# As many bytes are copied in the time that it takes to wake a thread which waits.
HANDOFF_BYTES = 2**17
# Copies that tell the speed of memory.
PROBE_BYTES, NUM_PROBES = 2**22, 5


@dataclass(frozen=True, kw_only=True)
class Slab:
    """A region of a device's arena."""

    storage: torch.UntypedStorage
    offset: int
    num_bytes: int

    def bytes(self, start: int, num_bytes: int) -> Tensor:
        """Its bytes from `start` on, sharing no version counter with any other view."""
        flat = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return flat.set_(self.storage, self.offset + start, (num_bytes,), (1,))


class Arena:
    """Hands out regions of one storage: of the tightest gap, from the bottom and the top in turn.

    With two slabs alive at a time, one lies at each end and everything between is in one piece, whatever their sizes
    and whichever goes first:

        |AAAA|................|BBBBBB|   free A   |....................|BBBBBB|   take C   |CCCCCCCC|...........|BBBBBB|
    """

    def __init__(self, storage: torch.UntypedStorage, alignment: int) -> None:
        self._storage = storage
        self._alignment = alignment
        self._taken: list[tuple[int, int]] = []
        self._elsewhere_bytes = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Slab:
        """A free region; the ledger has granted its bytes already."""
        with self._lock:
            end = len(self._storage) // self._alignment * self._alignment
            size = -(-num_bytes // self._alignment) * self._alignment
            stops = [(0, 0), *sorted(self._taken), (end, end)]
            gaps = [(low, high) for (_, low), (high, _) in pairwise(stops) if high - low >= size]
            gaps.sort(key=lambda gap: gap[1] - gap[0])  # the tightest
            if not gaps:
                taken = self._elsewhere_bytes + sum(high - low for low, high in self._taken)
                if taken + size > end:
                    raise DeviceOutOfMemory("arena", num_bytes, end - taken, end)
                # With three slabs and more the room that is left may be in pieces. It is granted, so it lies elsewhere.
                self._elsewhere_bytes += size
                storage = torch.UntypedStorage(size)  # type: ignore[no-untyped-call]
                return Slab(storage=storage, offset=0, num_bytes=size)
            low, high = gaps[0]
            start = low if low == 0 else high - size
            if size:
                self._taken.append((start, start + size))
            return Slab(storage=self._storage, offset=start, num_bytes=size)

    def close(self) -> None:
        """Free the storage; nothing can be taken any more."""
        self._storage = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]

    def give_back(self, slab: Slab) -> None:
        """Free a region."""
        if not slab.num_bytes:
            return
        with self._lock:
            if slab.storage is self._storage:
                self._taken.remove((slab.offset, slab.offset + slab.num_bytes))
            else:
                self._elsewhere_bytes -= slab.num_bytes


class Lane:
    """A thread that works off a queue of jobs in order. Jobs handle their own errors."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._num_threads = num_threads
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        # A new thread inherits the last value that any thread set, and bits depend on it.
        torch.set_num_threads(self._num_threads)
        while (job := self._jobs.get()) is not None:
            job()
            del job  # or the last job of a queue would keep its unit's tensors alive until the next one comes


class Link:
    """One direction of an emulated link: one copy at a time, urgent ones between the pieces of others.

    What a unit starts from holds the device up; the shard of the unit after it does not.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._changed = threading.Condition()
        self._is_busy = False
        self._num_urgent = 0

    def spend(self, num_bytes: int, spent_s: float, *, urgent: bool) -> None:
        """Take as long as so many bytes take, less what was spent on them."""
        left_s = num_bytes / self._bytes_per_s - spent_s
        with self._changed:
            self._num_urgent += urgent
        while left_s > 0:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_busy and (urgent or not self._num_urgent))
                self._is_busy = True
            start_s = time.perf_counter()
            time.sleep(left_s if urgent else min(left_s, PIECE_S))
            left_s -= time.perf_counter() - start_s
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
        with self._changed:
            self._num_urgent -= urgent
            self._changed.notify_all()


class EmulatedDevice:
    """A device on the CPU with a hard memory budget and, if asked for, an emulated link.

    Args:
        memory: its budget, in bytes or as a string ("64MiB"). A unit that needs more raises DeviceOutOfMemory.
        bandwidth: of the link to DRAM in bytes per second, each direction on its own; None: as fast as memory copies.
        chaos: a seed turns on the test mode: lanes are delayed at random, and freed slabs are filled with NaN.
        meter_every_unit: count the bytes of every unit as it runs (up to twice as slow on small steps), not only of
            the first one with inputs of a shape.
    """

    def __init__(
        self,
        memory: int | str = "64MiB",
        bandwidth: int | str | None = None,
        *,
        chaos: int | None = None,
        meter_every_unit: bool = False,
    ) -> None:
        self.memory_bytes = parse_bytes(memory, "memory")
        self.bandwidth = None if bandwidth is None else parse_bytes(bandwidth, "bandwidth")
        self.chaos = chaos
        self.meter_every_unit = meter_every_unit

    def __repr__(self) -> str:
        return f"EmulatedDevice({format_bytes(self.memory_bytes)})"

    def link_bytes_per_s(self) -> float:
        """Speed of its link, or of copies in memory, measured now, where none is emulated."""
        if self.bandwidth is not None:
            return float(self.bandwidth)
        source, target = torch.zeros(PROBE_BYTES, dtype=torch.uint8), torch.zeros(PROBE_BYTES, dtype=torch.uint8)
        start_s = time.perf_counter()
        for _ in range(NUM_PROBES):
            target.copy_(source)
        return NUM_PROBES * PROBE_BYTES / (time.perf_counter() - start_s)

    def numa_node(self) -> int | None:
        """The NUMA node it is attached to, if it is attached to one and the system says so."""
        return None

    def open(self, index: int, trace: Trace, num_threads: int) -> OpenDevice:
        """Start its lanes for one run."""
        return OpenDevice(self, f"emulated:{index}", trace, num_threads)


class CudaDevice:
    """One CUDA device, its budget capped at `memory` bytes. This version refuses it: it streams to the CPU only."""

    def __init__(self, index: int = 0, memory: int | str | None = None) -> None:
        if memory is not None:
            parse_bytes(memory, "memory")
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"device 'cuda:{index}': this process sees no CUDA device; check the driver and CUDA_VISIBLE_DEVICES, "
                f"or train on EmulatedDevice(memory=...)"
            )
        raise RuntimeError(
            f"device 'cuda:{index}': this version of hydra_engine streams to emulated devices only; "
            f"use EmulatedDevice(memory=...)"
        )


DeviceSpec: TypeAlias = EmulatedDevice


class OpenDevice:
    """A device during one run: its ledger, arena and lanes. Built for the run and thrown away after it."""

    def __init__(self, spec: EmulatedDevice, name: str, trace: Trace, num_threads: int) -> None:
        self.name = name
        self.torch_device = torch.device("cpu")
        self.meter_every_unit = spec.meter_every_unit
        self.ledger = Ledger(name, spec.memory_bytes)
        self.arena = Arena(torch.UntypedStorage(spec.memory_bytes), alignment=64)  # type: ignore[no-untyped-call]
        self._chaos = None if spec.chaos is None else random.Random(spec.chaos)
        self.has_link = spec.bandwidth is not None or spec.chaos is not None  # apart from memory's own speed
        self._trace = trace
        self._links = None if spec.bandwidth is None else {lane: Link(spec.bandwidth) for lane in (LOAD, STORE)}
        self._lanes = {lane: Lane(f"{name}-{lane}", num_threads) for lane in LANES}

    def submit(self, lane: str, label: str, job: Callable[[], None], *, at_once: bool = False) -> None:
        """Queue a job in a lane, or do it `at_once` in the caller's thread.

        It is traced as a span named `label`; what computes traces itself, since it waits.
        """
        if at_once:
            self._run(lane, label, job)
        else:
            self._lanes[lane].submit(lambda: self._run(lane, label, job))

    def copies_at_once(self, num_bytes: float) -> bool:
        """Whether whoever needs so many bytes copies them sooner than it wakes a lane to do it."""
        return not self.has_link and num_bytes <= HANDOFF_BYTES

    def _run(self, lane: str, label: str, job: Callable[[], None]) -> None:
        if self._chaos is not None and self._chaos.random() < CHAOS_SHARE:
            time.sleep(self._chaos.uniform(0, CHAOS_MAX_S))
        if lane == COMPUTE:
            job()
            return
        start_s = self._trace.now_s()
        try:
            job()
        finally:
            self._trace.add(self.name, lane, label, start_s)

    def copy(self, lane: str, pairs: Sequence[tuple[Tensor, Tensor]], *, urgent: bool = False) -> None:
        """Copy each (target, source) across the link, at its speed; `urgent` before what else is on its way."""
        num_bytes = sum(source.nbytes for _, source in pairs)
        self._trace.count_bytes(self.name, lane, num_bytes)
        start_s = time.perf_counter()
        for target, source in pairs:
            target.copy_(source)
        if self._links is not None:
            self._links[lane].spend(num_bytes, time.perf_counter() - start_s, urgent=urgent)

    def take_slab(self, num_bytes: int) -> Slab:
        """A region of the arena, whose bytes the ledger has granted."""
        return self.arena.take(num_bytes)

    def give_slab_back(self, slab: Slab) -> None:
        """Free a region; in the test mode whoever still reads it reads NaN."""
        if self._chaos is not None:
            whole = slab.bytes(0, slab.num_bytes)
            whole.view(torch.float32).fill_(float("nan"))
        self.arena.give_back(slab)

    def close(self) -> None:
        """Finish what is queued, end the lanes and free the arena."""
        for lane in LANES:
            self._lanes[lane].close()
        self.arena.close()


def active_autocast() -> str | None:
    """The kind of device that an autocast is active for in this thread, if any."""
    return next((kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)), None)


def resolve_devices(devices: Sequence[DeviceSpec | str] | None, default_bytes: int) -> list[DeviceSpec]:
    """The devices a run uses: those named, or else one emulated device of `default_bytes`."""
    if devices is None:
        return [EmulatedDevice(default_bytes)]
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise TypeError(f"devices: {devices!r} is not a list; give a list such as [EmulatedDevice(memory='64MiB')]")
    if not devices:
        raise ValueError("devices: empty list; give at least one device, or leave it out")
    return [_resolve(device) for device in devices]


def _resolve(device: DeviceSpec | str) -> DeviceSpec:
    if isinstance(device, EmulatedDevice):
        return device
    if isinstance(device, str):
        kind, _, index = device.partition(":")
        if kind == "cuda" and (index.isdecimal() or not index):
            CudaDevice(int(index or 0))
        raise ValueError(f"devices: {device!r}, known: 'cuda:0', 'cuda:1', ... and EmulatedDevice(memory=...)")
    raise TypeError(f"devices: {device!r} is a {type(device).__name__}, not an EmulatedDevice or a string")
