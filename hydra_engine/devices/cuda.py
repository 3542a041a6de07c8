"""CUDA devices: with `page_locked`, the only module that knows CUDA, streams or pinning.

A lane of a CUDA device is a thread with a stream of its own. What a job has queued on it is waited for on the host, by
a blocking event (`finish`), before anybody else may count on it. So no memory is ever freed, overwritten or read while
a copy or kernel that needs it is on its way, whichever stream it came from, and neither `record_stream` nor any wait
of one stream for another is needed. The compute lane alone runs ahead: kernels of a unit follow each other on its
stream, and what it hands to another lane is waited for there (`queued`). All that kernels work on is memory of its
stream: whoever drops a tensor, autograd say while a backward is being queued, gives it to kernels that come later.

`cuda.md` has the places of all memory, and what is relied on; benchmarks/gpu_day/README.md says what ran on which GPU.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import cuda as functions

from hydra_engine.data import with_bits_of
from hydra_engine.devices.arena import HostRegions
from hydra_engine.devices.device import DeviceGenerator, DeviceSpec, OpenDevice, Timer
from hydra_engine.devices.lanes import COMPUTE, QUEUES, open_lanes
from hydra_engine.devices.libraries import load_libraries
from hydra_engine.devices.page_locked import PageLocked
from hydra_engine.devices.rates import Ceilings, dram_bytes_per_s, matmul_flops
from hydra_engine.errors import DeviceFailed, DeviceLost, DeviceOutOfMemory
from hydra_engine.native import kernel as updates
from hydra_engine.system import host_threads
from hydra_engine.trace import Trace
from partitioners import format_bytes, parse_bytes
from partitioners.boundary import extent_bytes
from partitioners.plain_numbers import plain
from partitioners.precision import DTYPES

# Kernels choose by alignment, and torch's own CUDA allocator starts tensors at such addresses.
# https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management
ALIGNMENT_BYTES = 512
# Of the cap less the context, so much is kept free: the caching allocator rounds up, and leaves holes.
RESERVED_SHARE = 1 / 16
# And so much at least: cuBLAS takes 32 MiB for the lane that computes, and each stream up to 22 MiB of what is cached.
LEAST_RESERVED_BYTES = 2**27
# What is in use on the card before anything is allocated is the context's, up to so much; more is other processes'.
MOST_CONTEXT_BYTES = 2**30
# Budgets are whole pages of the device's memory.
PAGE_BYTES = 2**21
# A copy is cut into pieces of so many bytes, so that an urgent one waits for one of them at most.
PIECE_BYTES = 2**25
# Copies that tell the speed of the link.
PROBE_BYTES, NUM_PROBES = 2**26, 5
# Matrices whose products are measured take this part of a device's memory.
PRODUCT_SHARE = 4
_MEASURED: dict[str, Ceilings] = {}  # by kind of device
# Places in DRAM for what units leave are cut from page-locked regions of about so many bytes.
PLACES_BYTES = 2**25
# cudaErrorMemoryAllocation.
OUT_OF_MEMORY = 2
# For messages.
KNOWN_NAMES = "'cuda:0', 'cuda:1', ..."

_CONTEXT_BYTES: dict[int, int] = {}  # of cards on which this process has its context, whoever has named them


class CudaDevice(DeviceSpec):
    """One CUDA device, its budget capped at `memory` bytes.

    Args:
        index: of the device among those that this process sees.
        memory: the most that the process takes of the card, in bytes or as a string ("16GiB"), context and libraries
            included; None or "auto": all that is free when this is made. Of that, a sixteenth, and 128 MiB at least,
            stays unused: torch's allocator rounds up and leaves holes.

    Raises ValueError where the card has less than `memory`, RuntimeError where there is no such device. That so much is
    free is checked when a plan is made, and again as training begins.
    """

    has_arena = True
    has_ieee_roots = True
    alignment_bytes = ALIGNMENT_BYTES
    has_room_for_planning = False  # while others train, they lend the device for a rehearsal

    def __init__(self, index: int = 0, memory: int | str | None = None) -> None:
        index = plain(index)
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise ValueError(f"index: {index!r}, limit: a whole number, at least 0")
        asked = None if memory in (None, "auto") else parse_bytes(memory, "memory")
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"device 'cuda:{index}': this process sees no CUDA device; check the driver and CUDA_VISIBLE_DEVICES, "
                f"or train on EmulatedDevice(memory=...)"
            )
        if index >= torch.cuda.device_count():
            raise RuntimeError(
                f"device 'cuda:{index}': this process sees {torch.cuda.device_count()} CUDA devices, numbered from 0; "
                f"check CUDA_VISIBLE_DEVICES"
            )
        self.index = index
        self.torch_device = torch.device("cuda", index)
        self.ceilings_name = str(torch.cuda.get_device_properties(index).name)
        library_bytes = _library_bytes(index)
        free, self.total_bytes = torch.cuda.mem_get_info(index)
        used = self.total_bytes - free - torch.cuda.memory_reserved(index)
        self.context_bytes = min(max(0, used - library_bytes), MOST_CONTEXT_BYTES) + library_bytes
        context = _CONTEXT_BYTES[index] = self.context_bytes
        if asked is not None and asked > self.total_bytes:
            raise ValueError(
                f"memory: {format_bytes(asked)} ({asked} bytes) for 'cuda:{index}', limit: "
                f"{format_bytes(self.total_bytes)} ({self.total_bytes} bytes), which is all that the card has; ask for "
                f"less, or leave it out"
            )
        # What torch's allocator may take, and what of that the ledger gives out.
        available = _available_bytes(index)
        self.allowed_bytes = available if asked is None else asked - context
        reserved = max(int(self.allowed_bytes * RESERVED_SHARE), LEAST_RESERVED_BYTES)
        self.memory_bytes = (self.allowed_bytes - reserved) // PAGE_BYTES * PAGE_BYTES
        if self.memory_bytes <= 0:
            if asked is None:
                raise RuntimeError(
                    f"device 'cuda:{index}': {format_bytes(available)} ({available} bytes) free, limit: more "
                    f"than the {format_bytes(reserved)} that stay so; end what else uses the card"
                )
            raise ValueError(
                f"memory: {format_bytes(asked)} ({asked} bytes) for 'cuda:{index}', limit: more than the "
                f"{format_bytes(context)} ({context} bytes) of its context and libraries and the "
                f"{format_bytes(reserved)} that stay free; ask for more"
            )

    @classmethod
    def every(cls) -> list[CudaDevice]:
        """Return every device that this process sees."""
        return [cls(index) for index in range(torch.cuda.device_count())]

    @classmethod
    def named(cls, name: str) -> CudaDevice | None:
        """Return the device of a name such as "cuda:1"; "cuda" is the first. None: not the name of one."""
        kind, _, index = name.partition(":")
        return cls(int(index or 0)) if kind == "cuda" and (index.isdecimal() or not index) else None

    @classmethod
    def uuids(cls) -> dict[str, str]:
        """Return the UUID of every device that this process sees, by name: CUDA_VISIBLE_DEVICES numbers them anew."""
        if not torch.cuda.is_available():
            return {}
        found = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
        return {f"cuda:{index}": str(each.uuid) for index, each in enumerate(found)}

    @staticmethod
    def held_bytes(index: int) -> int:
        """Return the bytes of a card that this process holds: torch's allocator, and the context and libraries."""
        return torch.cuda.memory_reserved(index) + _CONTEXT_BYTES[index] if index in _CONTEXT_BYTES else 0

    @property
    def name(self) -> str:
        return f"cuda:{self.index}"

    def name_at(self, index: int) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"CudaDevice({self.index}, {format_bytes(self.memory_bytes)})"

    def check_free(self) -> None:
        # Beside what this process holds already.
        available = _available_bytes(self.index)
        if available < self.memory_bytes:  # beside the reserve, which kernels that are loaded later may take
            raise RuntimeError(
                f"device 'cuda:{self.index}': {format_bytes(self.memory_bytes)} ({self.memory_bytes} bytes) asked "
                f"for, {format_bytes(available)} ({available} bytes) free; end what else uses the card, free "
                f"this process's own tensors on it, or give CudaDevice({self.index}, memory=...) less"
            )

    def ceilings(self) -> Ceilings:
        """Return the rates of its kind, measured once in a process: that keeps a device busy."""
        if self.ceilings_name not in _MEASURED:
            _MEASURED[self.ceilings_name] = self._measured()
        return _MEASURED[self.ceilings_name]

    def _measured(self) -> Ceilings:
        """Return the link's rates each direction alone, those of products, and that of a pass over DRAM."""
        host = host_threads(intra_op_threads=torch.get_num_threads(), num_devices=1, computes_here=False)
        workers = host.optimizer_threads, host.optimizer_intra_op_threads
        synchronize, most_bytes = partial(torch.cuda.synchronize, self.index), self.memory_bytes // PRODUCT_SHARE
        with torch.cuda.device(self.index):
            there = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=self.torch_device)
            here = torch.empty(0, dtype=torch.uint8).set_(PageLocked(self.index).new(PROBE_BYTES))
            up, down = _copy_bytes_per_s(there, here), _copy_bytes_per_s(here, there)
            del there, here
            products = {
                precision: matmul_flops(self.torch_device, dtype, most_bytes, synchronize)
                for precision, dtype in DTYPES.items()
            }
        _forget_workspaces()
        return Ceilings(
            name=self.ceilings_name,
            up_bytes_per_s=up,
            down_bytes_per_s=down,
            dram_bytes_per_s=dram_bytes_per_s(*workers),
            matmul_flops=products,
        )

    def kernel(self) -> UpdateKernel:
        return _kernel(self.index)

    def open(self, index: int, trace: Trace, num_threads: int, arena_bytes: int | None = None) -> OpenCudaDevice:
        self.check_free()
        return OpenCudaDevice(self, trace, num_threads, 0 if arena_bytes is None else arena_bytes)


def _available_bytes(index: int) -> int:
    """Return the bytes that this process could still allocate: free ones, and those that torch keeps for later."""
    free, _ = torch.cuda.mem_get_info(index)
    return free + torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)


@cache
def _library_bytes(index: int) -> int:
    """Make a context on a device and load there what training uses. Return the bytes that this took beside the context.

    What is loaded only once a unit needs it goes past a budget that was measured before.
    """
    free, _ = torch.cuda.mem_get_info(index)
    before = free + torch.cuda.memory_reserved(index)
    # In a thread of its own: nothing that the caller has switched on counts there, and libraries' handles, which are
    # one thread's, are free for the compute lane's once it has ended.
    loading = threading.Thread(target=_load_libraries, args=(torch.device("cuda", index),), name="hydra-load")
    loading.start()
    loading.join()
    torch.cuda.synchronize(index)
    _forget_workspaces()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(index)
    return max(0, before - free - torch.cuda.memory_reserved(index))


def _load_libraries(device: torch.device) -> None:
    with suppress(Exception), torch.cuda.device(device), torch.autograd.set_multithreading_enabled(False):
        load_libraries(device)


def _forget_workspaces() -> None:
    """Free what cuBLAS keeps for every thread and stream that has multiplied, 32 MiB each on an H100."""
    forget = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if forget is not None:
        forget()


@cache
def _streams(index: int) -> dict[str, torch.cuda.Stream]:
    """Return a device's streams, by lane. torch has 32 and begins again, so they are asked for once."""
    return {lane: torch.cuda.Stream(index) for lane in QUEUES}  # type: ignore[no-untyped-call]


class UpdateKernel:
    """Launches update.cu on one device."""

    def __init__(self, index: int, place: Callable[[int], torch.UntypedStorage]) -> None:
        """`place`: gives DRAM of so many bytes, page-locked for as long as it is held."""
        self._index, self._place = index, place
        self.torch_device = torch.device("cuda", index)
        self.kind = str(torch.cuda.get_device_properties(index).name)
        self._function, self.missing_because = _compiled(index)
        self._under_way: deque[tuple[torch.cuda.Event, Tensor]] = deque()  # tables that may still be copied
        self._lock = threading.Lock()  # of those

    def launch(self, rows: bytes, sizes: Sequence[int]) -> None:
        ends = updates.block_ends(sizes)
        if not ends or not ends[-1]:
            return
        assert self._function is not None
        # The table is what `hydra_update` takes, one after the other: updates, and where their blocks end.
        table = torch.cat([torch.frombuffer(bytearray(rows), dtype=torch.int64), torch.tensor(ends)])
        with torch.cuda.device(self._index), self._lock:
            while self._under_way and self._under_way[0][0].query():  # type: ignore[no-untyped-call]
                self._under_way.popleft()
            here = torch.empty(0, dtype=torch.int64).set_(self._place(table.nbytes), 0, table.shape, (1,))
            here.copy_(table)
            there = torch.empty(len(table), dtype=torch.int64, device=self.torch_device)
            there.copy_(here, non_blocking=True)
            arguments = [there, there[-len(ends) :], len(ends)]
            self._function(grid=(ends[-1], 1, 1), block=(updates.THREADS, 1, 1), args=arguments)
            event = _blocking_event()
            event.record()
            self._under_way.append((event, here))

    def close(self) -> None:
        """Wait for what was launched."""
        while self._under_way:
            event, _ = self._under_way.popleft()
            with suppress(RuntimeError):  # lost
                event.synchronize()


@cache
def _kernel(index: int) -> UpdateKernel:
    """Return a device's kernel for samples, which are compared before it has memory of its own."""
    return UpdateKernel(index, torch.UntypedStorage)


@cache
def _compiled(index: int) -> tuple[Callable[..., None] | None, str]:
    """Compile update.cu, once for each device: a module belongs to one context. None: why it cannot be launched."""
    # Not public. It is the way to NVRTC, which comes with torch: no compiler has to be installed, nor one for torch's
    # CUDA. It takes these arguments in torch 2.11 and 2.13 (tests/devices/test_cuda_homes.py).
    compile_kernel = getattr(torch.cuda, "_compile_kernel", None)
    if compile_kernel is None:
        return None, f"torch {torch.__version__} has no torch.cuda._compile_kernel"
    try:
        with torch.cuda.device(index), _toolkit_named():
            torch.cuda.synchronize(index)  # a thread's first call of the runtime gives it the context
            return compile_kernel(updates.source(), updates.NAME, nvcc_options=[*updates.OPTIONS]), ""
    except Exception as error:  # of whatever is missing or differs
        return None, f"torch.cuda._compile_kernel: {(str(error).strip() or repr(error)).splitlines()[0]}"


@contextmanager
def _toolkit_named() -> Iterator[None]:
    """Let torch name NVRTC a folder of CUDA's headers, which update.cu includes none of: it insists on one."""
    extensions: Any = importlib.import_module("torch.utils.cpp_extension")
    before = extensions.CUDA_HOME
    if before is None:
        extensions.CUDA_HOME = str(Path(updates.__file__).parent)
    try:
        yield
    finally:
        extensions.CUDA_HOME = before


def _copy_bytes_per_s(target: Tensor, source: Tensor) -> float:
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(target.device if target.is_cuda else source.device)
    start_s = time.perf_counter()
    for _ in range(NUM_PROBES):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(target.device if target.is_cuda else source.device)
    return NUM_PROBES * source.nbytes / (time.perf_counter() - start_s)


SEEDS = ("manual_seed", "manual_seed_all", "seed", "seed_all")
STATES = ("set_rng_state", "set_rng_state_all")


class Seeding:
    """Keeps what other threads seed away from the generators that compute lanes draw from.

    `torch.manual_seed` seeds those of all devices, from any thread: a callback, a loader, a builder of trials. While
    devices are open, it and the functions of `torch.cuda` reach them from compute lanes alone. The seeds that others
    ask for are set once the last device is closed; the states are not, since `fork_rng` sets those that it finds here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._originals: dict[str, Callable[..., Any]] = {}
        self._num_open = 0
        self._lanes: set[int] = set()  # their threads
        self._asked: dict[str, Callable[[], Any]] = {}  # by function: the seed that was asked for last

    def enter(self) -> None:
        """Open a device."""
        with self._lock:
            self._num_open += 1
            if self._num_open == 1:
                self._originals = {name: getattr(functions, name) for name in (*SEEDS, *STATES)}
                for name, function in self._originals.items():
                    setattr(functions, name, partial(self._call, name, function))

    def enter_lane(self) -> None:
        """Note that this thread is a compute lane."""
        self._lanes.add(threading.get_ident())

    def leave(self) -> None:
        """Close a device, whose generator is as it was found again."""
        with self._lock:
            self._num_open -= 1
            if self._num_open:
                return
            for name, function in self._originals.items():
                setattr(functions, name, function)
            asked, self._asked = self._asked, {}
            self._lanes.clear()
        for job in asked.values():
            job()

    def _call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() in self._lanes:
            return function(*args, **kwargs)
        with self._lock:
            if self._num_open:
                if name in SEEDS:
                    self._asked.pop(name, None)
                    self._asked[name] = partial(function, *args, **kwargs)
                return None
        return function(*args, **kwargs)


SEEDING = Seeding()


class OpenCudaDevice(OpenDevice):
    """A CUDA device during one run."""

    random: DeviceGenerator

    def __init__(self, spec: CudaDevice, trace: Trace, num_threads: int, arena_bytes: int) -> None:
        self._index = index = spec.index
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.random = DeviceGenerator(torch.cuda.default_generators[index])
        SEEDING.enter()
        self._places = HostRegions(PageLocked(index).new, PLACES_BYTES, ALIGNMENT_BYTES)
        self._events = threading.local()  # one for each thread, which waits for it before it records it again
        torch.cuda.empty_cache()  # what is cached counts towards the limit
        self._fraction_before = torch.cuda.get_per_process_memory_fraction(index)
        self._is_expandable = False
        try:
            limit = torch.cuda.memory_reserved(index) + spec.allowed_bytes
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / spec.total_bytes), index)
            storage = torch.UntypedStorage(arena_bytes, device=spec.torch_device)  # type: ignore[no-untyped-call]
            # Units of many tasks take turns, whose tensors have all sizes: in segments that cannot grow, holes stay.
            self._is_expandable = _EXPANDABLE.enter()
            lanes = open_lanes(spec.name, num_threads, self._inside)
            super().__init__(spec, spec.name, trace, lanes, storage, arena_bytes)
            self._kernel: UpdateKernel | None = None
        except BaseException:
            self._places.close()
            self._restore()
            SEEDING.leave()
            raise

    @contextmanager
    def _inside(self, lane: str) -> Iterator[None]:
        """Make the device and the lane's stream current in the lane's thread, for as long as it lives."""
        with torch.cuda.device(self._index), torch.cuda.stream(_streams(self._index)[lane]), ExitStack() as stack:
            if lane == COMPUTE:  # a backward runs here, not in autograd's thread for a device: no hand-over, one lane
                SEEDING.enter_lane()
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield

    def _copy(self, lane: str, pairs: Sequence[tuple[Tensor, Tensor]], num_bytes: int, *, urgent: bool) -> None:
        try:
            for target, source in pairs:
                # Otherwise torch converts on the way, and the host would go on with what is not there yet.
                is_dense = extent_bytes(source) == source.nbytes
                is_plain = target.dtype == source.dtype and target.stride() == source.stride() and is_dense
                if not is_plain or target.dim() != 1 or source.nbytes <= PIECE_BYTES:
                    target.copy_(source, non_blocking=is_plain)
                    continue
                step = PIECE_BYTES // source.element_size()
                for start in range(0, len(source), step):
                    target[start : start + step].copy_(source[start : start + step], non_blocking=True)
        except RuntimeError as error:
            if _is_out_of_memory(error) or "CUDA error" not in str(error):
                raise
            raise DeviceFailed(self.name, error) from error

    def finish(self) -> None:
        event = self._events.__dict__.get("event")
        if event is None:
            event = self._events.event = _blocking_event()
        event.record()
        event.synchronize()

    @property
    def kernel(self) -> UpdateKernel:  # type: ignore[override]
        if self._kernel is None:  # it is compiled once there are homes
            self._kernel = UpdateKernel(self._index, self._places.take)
        return self._kernel

    def copy_now(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        # Masters and moments are not page-locked: copied by CUDA itself, they would go at a few GB/s.
        try:
            with torch.cuda.device(self._index):
                staged = torch.empty(0, dtype=torch.uint8).set_(self._places.take(PIECE_BYTES))
                for target, source in pairs:
                    is_plain = target.dtype == source.dtype and target.stride() == source.stride()
                    if not is_plain or extent_bytes(source) != source.nbytes:
                        target.copy_(source)
                        continue
                    rows = (torch.split(_bytes_of(each), PIECE_BYTES) for each in (target, source))
                    for there, here in zip(*rows, strict=True):
                        place = staged[: len(here)]
                        for to, of in ((place, here), (there, place)):  # one of them is within DRAM, and at once
                            to.copy_(of, non_blocking=True)
                            self.finish()
        except RuntimeError as error:
            raise self.explained(error) from error

    def queued(self) -> Callable[[], None] | None:
        try:
            with torch.cuda.device(self._index):
                event = _blocking_event()
                event.record()
        except RuntimeError:  # lost: whatever the job then does says so
            return None

        def wait() -> None:
            with suppress(RuntimeError):
                event.synchronize()

        return wait

    def timer(self) -> Timer:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        return Timer(start, end)

    def place(self, tensor: Tensor) -> Tensor:
        storage = self._places.take(extent_bytes(tensor))
        place = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())
        return with_bits_of(tensor, place)

    def explained(self, error: BaseException) -> BaseException:
        if not isinstance(error, RuntimeError) or isinstance(error, DeviceOutOfMemory):
            return error
        if _is_out_of_memory(error):
            return DeviceOutOfMemory(self.name, 0, self.ledger.free_bytes(), self.ledger.limit_bytes())
        try:
            torch.cuda.synchronize(self._index)
        except RuntimeError:  # nothing can be done on the device any more: its error comes back with every call
            return DeviceLost(self.name, error)
        return error

    def close(self) -> None:
        try:
            super().close()
            if self._kernel is not None:
                self._kernel.close()
            self._places.close()
            with suppress(RuntimeError):  # it is lost, and the process ends for that
                self.random.restore()
                self._restore()
        finally:
            SEEDING.leave()

    def _restore(self) -> None:
        """Give back what was taken, and leave torch's settings as they were found."""
        if self._is_expandable:
            self._is_expandable = False
            _EXPANDABLE.leave()
        _forget_workspaces()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(self._fraction_before, self._index)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a dense tensor's memory, in its own order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class _ExpandableSegments:
    """Lets torch's segments grow, as PYTORCH_ALLOC_CONF would, while any device of this process is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._before = ""

    def enter(self) -> bool:
        """Begin to use them. Return False where this torch has no such call."""
        if not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
            return False
        with self._lock:
            if self._num_users == 0:
                self._before = _allocator_settings()
                self._set(True)
            self._num_users += 1
            return True

    def leave(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                self._set(False)

    def _set(self, expandable: bool) -> None:
        # https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
        before = [each for each in self._before.split(",") if each.strip()]
        own = [each for each in before if "expandable_segments" in each]
        others = [each for each in before if each not in own]
        if expandable or not own:
            own = [f"expandable_segments:{expandable}"]
        torch._C._accelerator_setAllocatorSettings(",".join([*others, *own]))


def _allocator_settings() -> str:
    """Return the settings of torch's allocator: whoever sets one gives all anew."""
    get = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if get is not None:
        return str(get())
    with suppress(AttributeError, KeyError, StopIteration):  # torch 2.11 has no such call, but tells them here
        told = torch.cuda.memory._snapshot()["allocator_settings"]
        return str(next(text for name, text in told.items() if name.endswith("ALLOC_CONF")))
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


_EXPANDABLE = _ExpandableSegments()


def _blocking_event() -> torch.cuda.Event:
    """Return an event whose waiters sleep, and hold no lock."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Return True if the allocator, a library or the loading of a kernel found no room."""
    if isinstance(error, torch.OutOfMemoryError) or getattr(error, "error_code", None) == OUT_OF_MEMORY:
        return True
    return any(each in str(error) for each in ("STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED"))


AUTOCAST_KINDS = ("cpu", "cuda")  # of devices, which threads have a mode of each for


def active_autocast() -> str | None:
    """Return the kind of device that an autocast is active for in this thread, if any."""
    return next(filter(torch.is_autocast_enabled, AUTOCAST_KINDS), None)
