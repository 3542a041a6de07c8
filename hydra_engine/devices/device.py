"""A kind of device, as users name it, and a device during one run: the lanes, slabs and copies of every kind."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hydra_engine.data import place_in_dram
from hydra_engine.devices.arena import Arena, Slab
from hydra_engine.devices.budget import Ledger
from hydra_engine.devices.lanes import COMPUTE, INPUT, LOAD, QUEUES, Lane
from hydra_engine.devices.rates import Ceilings
from hydra_engine.native import Kernel
from hydra_engine.trace import Timing, Trace
from partitioners.reach import Opaque


class DeviceGenerator:
    """The generator that a device's kernels draw from where they are given none; one compute lane uses it."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._before = generator.get_state()

    def install(self, state: int | bytes) -> bytes:
        """Go on from a state, or from a seed where nothing was drawn yet. Return the state."""
        if isinstance(state, int):
            self._generator.manual_seed(state)
            return self.state()
        self._generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        return state

    def state(self) -> bytes:
        return bytes(self._generator.get_state().numpy())

    def same_seed(self, before: bytes, after: bytes) -> bool:
        """Return True if drawing alone led from one state to the other: 8 bytes of seed come before the offset."""
        return before[:8] == after[:8]

    def restore(self) -> None:
        """Leave it as it was found."""
        self._generator.set_state(self._before)


class Timer:
    """Times what is queued from here on, with two events of the device's."""

    def __init__(self, start: Any, end: Any) -> None:
        self._start, self._end = start, end
        self._launch_s = 0.0
        start.record()
        self._begun_s = time.thread_time()  # waiting for inputs is not launching

    def launched(self) -> None:
        """Note that all of it is queued."""
        self._launch_s = time.thread_time() - self._begun_s
        self._end.record()

    def timing(self) -> Timing:
        """Return what it took, once it is finished."""
        return Timing(self._launch_s, self._start.elapsed_time(self._end) / 1e3)


class OpenDevice(ABC):
    """A device during one run: its ledger, arena and lanes. Built for the run and thrown away after it.

    A job of a lane only queues copies and kernels: they may be on their way when it returns. So it calls `finish`
    before it keeps a promise, reports an event, reads what was copied or gives memory back; then all that is promised
    is there, for whoever asks, and no other module has to know how a device orders its work. Only within the compute
    lane does one kernel follow the other without that; and a job that the compute lane submits to another begins once
    everything that the compute lane had queued before is through.
    """

    has_link = True  # copies take longer than in memory, so that it pays to do something else meanwhile
    meter_every_unit = False
    random: DeviceGenerator | None = None  # what kernels draw from, where that is not the CPU's generator
    kernel: Kernel | None = None  # that makes updates in its memory; None: the host's code does

    def __init__(
        self,
        spec: DeviceSpec,
        name: str,
        trace: Trace,
        lanes: Mapping[str, Lane],
        storage: torch.UntypedStorage,
        arena_bytes: int | None,
    ) -> None:
        """`lanes`: by the names of `QUEUES`. `storage`: for slabs. `arena_bytes`: as its ledger has them."""
        self.name = name
        self.torch_device = spec.torch_device
        self.ledger = Ledger(name, spec.memory_bytes, arena_bytes)
        self.arena = Arena(storage, spec.alignment_bytes)
        self._lanes = lanes
        self.trace_in(trace)

    @property
    def is_here(self) -> bool:
        """The caller is one of the units that it computes."""
        return self._lanes[COMPUTE].is_here

    def trace_in(self, trace: Trace) -> None:
        """Have this trace told of copies and memory from here on."""
        self.trace = trace
        self.ledger.noted = partial(trace.note_memory, self.name)

    def submit(self, lane: str, label: str, job: Callable[[], None], *, at_once: bool = False) -> None:
        """Queue a job in a lane, or do it `at_once` in the caller's thread; traced as `label`, unless it computes."""
        if at_once:
            self._run(lane, label, job)
            return
        queued = self.queued() if lane != COMPUTE and self.is_here else None

        def run() -> None:
            if queued is not None:
                queued()
            self._run(lane, label, job)

        self._lanes[lane].submit(run)

    def copies_at_once(self, num_bytes: float) -> bool:
        """Return True if copying these bytes takes less time than waking a lane to do it."""
        return False

    def _run(self, lane: str, label: str, job: Callable[[], None]) -> None:
        if lane == COMPUTE:
            job()
            return
        start_s = self.trace.now_s()
        try:
            job()
        finally:
            self.trace.add(self.name, LOAD if lane == INPUT else lane, label, start_s)

    def copy(self, lane: str, pairs: Sequence[tuple[Tensor, Tensor]], *, urgent: bool = False) -> int:
        """Queue copies of each (target, source) across the link; urgent: before all others. Return their bytes."""
        num_bytes = sum([source.nbytes for _, source in pairs])
        self.trace.count_bytes(self.name, lane, num_bytes)
        self._copy(lane, pairs, num_bytes, urgent=urgent)
        return num_bytes

    @abstractmethod
    def _copy(self, lane: str, pairs: Sequence[tuple[Tensor, Tensor]], num_bytes: int, *, urgent: bool) -> None: ...

    @abstractmethod
    def finish(self) -> None:
        """Wait for all that the caller, a job of a lane, has queued. Raises what went wrong there."""

    def queued(self) -> Callable[[], None] | None:
        """Return a function that waits for what the calling compute lane has queued; None: nothing stays queued."""
        return None

    def copy_now(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy each (target, source) between the device and any DRAM, in any thread, and wait for it."""
        for target, source in pairs:
            target.copy_(source)

    def timer(self) -> Timer | None:
        """Begin to time what the compute lane queues. None: launching is computing."""
        return None

    def place(self, tensor: Tensor) -> Tensor:
        """Return DRAM for a device's tensor, laid out as that is."""
        return place_in_dram(tensor)

    def take_slab(self, num_bytes: int, make_room: Callable[[], bool] = lambda: False, *, lasts: bool = False) -> Slab:
        """Take a region of the arena, whose bytes are granted; where no piece is large enough, of units' own memory.

        make_room, lasts: as of `Arena.take`; what lasts lies nowhere else.
        """

        def beside(size: int) -> bool:
            return not lasts and (not self.ledger.is_split or self.ledger.take(size))

        return self.arena.take(num_bytes, make_room, beside, lasts=lasts)

    def give_slab_back(self, slab: Slab) -> None:
        """Free a region that nothing queued reads or writes."""
        elsewhere_bytes = self.arena.give_back(slab)
        if self.ledger.is_split and elsewhere_bytes:
            self.ledger.release(elsewhere_bytes)

    def explained(self, error: BaseException) -> BaseException:
        """Return the engine's error for one that something on the device raised."""
        return error

    def close(self) -> None:
        """Finish what is queued, end the lanes and free the arena."""
        for lane in QUEUES:
            self._lanes[lane].close()
        self.arena.close()


class DeviceSpec(Opaque, ABC):
    """A device as users name it, and the base class of every kind: its memory, its rates, and `open`."""

    memory_bytes: int  # all that a run's ledger gives out
    ceilings_name: str  # of its kind, whose rates are the same
    torch_device: torch.device  # where its tensors are
    alignment_bytes: int  # that places of parameters are a multiple of, in DRAM and in slabs
    has_arena: bool  # part of its memory is for slabs and nothing else
    has_room_for_planning: bool  # a rehearsal has memory of its own, so tasks can be planned while others train
    has_ieee_roots = False  # its tasks' updates take IEEE's square roots, wherever they are made (docs/homes.md)

    @abstractmethod
    def ceilings(self) -> Ceilings:
        """Return the rates of its link, as stated or measured."""

    @abstractmethod
    def open(self, index: int, trace: Trace, num_threads: int, arena_bytes: int | None = None) -> OpenDevice:
        """Start its lanes for one run, as the device of this number; `arena_bytes`: for slabs, where it has an arena.

        Raises RuntimeError where less memory is free than was asked for.
        """

    @abstractmethod
    def check_free(self) -> None:
        """Raise RuntimeError unless the memory that was asked for is free."""

    def name_at(self, index: int) -> str:
        """Return its name as the device of this number."""
        return f"{self.torch_device.type}:{index}"

    def kernel(self) -> Kernel | None:
        """Return what makes updates in its memory, or says why nothing can; None: the host's code does."""
        return None

    def for_rehearsal(self) -> DeviceSpec:
        """Return a device of the same memory to try units on: itself, where their time and bytes are its own."""
        return self
