"""A device on the CPU: a memory budget, lanes, and a link as slow as asked for."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hydra_engine.devices.arena import Slab
from hydra_engine.devices.device import DeviceSpec, OpenDevice
from hydra_engine.devices.lanes import LOAD, STORE, EmulatedLink, open_lanes
from hydra_engine.devices.rates import MEASURED_NOW, STATED, Ceilings
from hydra_engine.system import dram
from hydra_engine.trace import Trace
from partitioners import format_bytes, parse_bytes
from partitioners.plain_numbers import plain

# Where torch's own CPU allocator would start a tensor.
ALIGNMENT_BYTES = 64
# The test mode delays this share of jobs, by at most so long: enough to put any two lanes in either order.
CHAOS_SHARE = 0.3
CHAOS_MAX_S = 0.0005
# It puts this share of copies off until their job finishes.
LATE_SHARE = 0.5
# As many bytes are copied in the time that it takes to wake a thread which waits.
HANDOFF_BYTES = 2**17
# Copies that tell the speed of memory.
PROBE_BYTES, NUM_PROBES = 2**22, 5


class EmulatedDevice(DeviceSpec):
    """A device on the CPU with a hard memory budget and, if asked for, an emulated link.

    Args:
        memory: its budget, in bytes or as a string ("64MiB"); "auto": half of the DRAM that is free when this is made.
            A unit that needs more raises DeviceOutOfMemory.
        bandwidth: of the link to DRAM in bytes per second, each direction on its own; None: as fast as memory copies.
        chaos: a seed turns on the test mode: lanes are delayed at random, copies are put off until somebody waits for
            them, and freed slabs are filled with NaN.
        meter_every_unit: count the bytes of every unit as it runs (up to twice as slow on small steps), not only of
            the first one with inputs of a shape.
        has_arena: part of the memory is for slabs and nothing else, as on a GPU.
    """

    def __init__(
        self,
        memory: int | str = "64MiB",
        bandwidth: int | str | None = None,
        *,
        chaos: int | None = None,
        meter_every_unit: bool = False,
        has_arena: bool = False,
    ) -> None:
        if memory == "auto":  # the other half is for the tasks, whose weights and states live there
            memory = max(1, dram.available_dram_bytes() // 2)
        self.memory_bytes = parse_bytes(memory, "memory")
        self.bandwidth = None if bandwidth is None else parse_bytes(bandwidth, "bandwidth")
        self.ceilings_name = "cpu" if self.bandwidth is None else "emulated"
        self.chaos = plain(chaos)
        self.meter_every_unit = meter_every_unit
        self.has_arena = has_arena
        self.alignment_bytes = ALIGNMENT_BYTES
        self.torch_device = torch.device("cpu")
        self.has_room_for_planning = True  # a rehearsal has memory of its own

    def __repr__(self) -> str:
        return f"EmulatedDevice({format_bytes(self.memory_bytes)})"

    def ceilings(self) -> Ceilings:
        """Return the rates of its link; where none is emulated, of copies in memory, as measured now."""
        if self.bandwidth is not None:
            return Ceilings.of_link(self.ceilings_name, float(self.bandwidth), STATED)
        return Ceilings.of_link(self.ceilings_name, _copy_bytes_per_s(), MEASURED_NOW)

    def check_free(self) -> None:
        pass  # nobody else has its memory

    def name_at(self, index: int) -> str:
        return f"emulated:{index}"

    def for_rehearsal(self) -> EmulatedDevice:
        """Return a device of the same memory, with nothing that slows it down."""
        return EmulatedDevice(self.memory_bytes, has_arena=self.has_arena)

    def open(self, index: int, trace: Trace, num_threads: int, arena_bytes: int | None = None) -> OpenEmulatedDevice:
        return OpenEmulatedDevice(self, self.name_at(index), trace, num_threads, arena_bytes)


def _copy_bytes_per_s() -> float:
    source, target = torch.zeros(PROBE_BYTES, dtype=torch.uint8), torch.zeros(PROBE_BYTES, dtype=torch.uint8)
    start_s = time.perf_counter()
    for _ in range(NUM_PROBES):
        target.copy_(source)
    return NUM_PROBES * PROBE_BYTES / (time.perf_counter() - start_s)


class OpenEmulatedDevice(OpenDevice):
    """An emulated device during one run."""

    def __init__(
        self, spec: EmulatedDevice, name: str, trace: Trace, num_threads: int, arena_bytes: int | None = None
    ) -> None:
        arena_bytes = arena_bytes if spec.has_arena else None
        size = spec.memory_bytes if arena_bytes is None else arena_bytes
        storage = torch.UntypedStorage(size)  # type: ignore[no-untyped-call]
        super().__init__(spec, name, trace, open_lanes(name, num_threads), storage, arena_bytes)
        self.meter_every_unit = spec.meter_every_unit
        self.has_link = spec.bandwidth is not None or spec.chaos is not None
        self._chaos = None if spec.chaos is None else random.Random(spec.chaos)
        self._links = None if spec.bandwidth is None else {lane: EmulatedLink(spec.bandwidth) for lane in (LOAD, STORE)}
        self._late = threading.local()

    def copies_at_once(self, num_bytes: float) -> bool:
        return self._chaos is None and num_bytes <= (HANDOFF_BYTES if self._links is None else 0)

    def take_slab(self, num_bytes: int, make_room: Callable[[], bool] = lambda: False, *, lasts: bool = False) -> Slab:
        # Elsewhere is the same memory: nothing is given up for lying in one piece, but where that is to be tested.
        if self.ledger.is_split:
            return super().take_slab(num_bytes, make_room, lasts=lasts)
        return self.arena.take(num_bytes, lasts=lasts)

    def _run(self, lane: str, label: str, job: Callable[[], None]) -> None:
        if self._chaos is not None and self._chaos.random() < CHAOS_SHARE:
            time.sleep(self._chaos.uniform(0, CHAOS_MAX_S))
        super()._run(lane, label, job)

    def _copy(self, lane: str, pairs: Sequence[tuple[Tensor, Tensor]], num_bytes: int, *, urgent: bool) -> None:
        start_s = time.perf_counter()
        now = pairs if self._chaos is None else [each for each in pairs if not self._is_put_off(*each)]
        if len(now) > 1 and not any(each.is_neg() or each.is_conj() for pair in now for each in pair):
            targets, sources = zip(*now, strict=True)
            torch._foreach_copy_(targets, sources)  # which gives the interpreter up once, and refuses such bits
        else:
            for target, source in now:
                target.copy_(source)
        if self._links is not None:
            self._links[lane].spend(num_bytes, time.perf_counter() - start_s, urgent=urgent)

    def _is_put_off(self, target: Tensor, source: Tensor) -> bool:
        """Return True if a copy is put off until `finish`, in the test mode. Whoever reads before, reads NaN."""
        if self._chaos is None:
            return False
        queue = self._late.__dict__.setdefault("queue", [])
        if not queue and self._chaos.random() >= LATE_SHARE:
            return False
        if target.is_floating_point():
            target.fill_(float("nan"))
        elif target.dtype == torch.uint8:  # of a slab
            target.fill_(255)
        queue.append((target, source))
        return True

    def finish(self) -> None:
        queue = self._late.__dict__.get("queue")  # of the test mode
        while queue:
            target, source = queue.pop(0)
            target.copy_(source)

    def give_slab_back(self, slab: Slab) -> None:
        """Free a region; in the test mode whoever still reads it reads NaN."""
        if self._chaos is not None:
            slab.bytes(0, slab.num_bytes).view(torch.float32).fill_(float("nan"))
        super().give_slab_back(slab)
