"""A stand-in for CUDA that runs on the CPU and judges how it is used by hydra_engine/devices/cuda.py as it is.

    cuda = FakeCuda(num_devices=2)
    with cuda.installed():
        ...                              # train on CudaDevice(0) and CudaDevice(1)
    cuda.check_all_left_as_found()

Tensors are the CPU's. What is put off, as on a device, are copies with `non_blocking=True`: until somebody waits for
the stream that they are queued on, their target holds -1 or NaN. Kernels run at once, but whoever looks on counts them
as queued until somebody waits for their stream: memory belongs to the stream that it was allocated on, and whoever
drops it gives it to that stream at once, so that nobody may while another stream has work on it that nobody awaited.
Kernels of our own are the exception, which the host's compiler understands (tests/update_kernel.py): they run as
somebody waits for their stream, or as it is given another kernel.
A wrong use raises `Misuse`, and is kept in `misuses` as well, since a lane may take the error for a task's. What a
stand-in cannot tell: whether a kernel follows what it needs, whether anything is quick, and all that this file has got
wrong about CUDA.
"""

import ctypes
import gc
import mmap
import re
import sys
import threading
import time
import weakref
from collections import Counter, deque
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hydra_engine.data import memory
from hydra_engine.devices import arena, page_locked
from hydra_engine.devices import cuda as device
from hydra_engine.system import dram
from tests.update_kernel import compiled, launch, spoil

MIB = 2**20
NUM_STREAMS = 32  # of a device and a priority; torch then begins again with the first
ASSERT_CODE, INVALID_CODE, NO_MEMORY_CODE, REGISTERED_CODE, NOT_REGISTERED_CODE = 710, 1, 2, 712, 713
COPY, CPU = torch.Tensor.copy_, torch.Tensor.cpu
aten = torch.ops.aten
# Operations beside views that touch no memory.
NO_KERNELS = {aten.detach, aten.alias, aten.set_, aten.empty, aten.empty_strided, aten.empty_like, aten.resize_}
# Kernels that come with a library of their own, or are many and large.
LIBRARIES = {
    **dict.fromkeys((aten.mm, aten.addmm, aten.bmm, aten.baddbmm), "cuBLAS"),
    **dict.fromkeys((aten.convolution, aten.convolution_overrideable), "cuDNN"),
    aten.convolution_backward: "cuDNN, backward",
    aten._scaled_dot_product_flash_attention_for_cpu: "attention",
    aten._scaled_dot_product_flash_attention_for_cpu_backward: "attention, backward",
    aten.native_layer_norm: "layer norm",
    aten.native_layer_norm_backward: "layer norm, backward",
    aten.embedding_dense_backward: "embedding, backward",
    aten.sort: "sort",
}
CACHED = (device._streams, device._library_bytes, device._kernel, device._compiled)
DEFAULT_SETTINGS = {"expandable_segments": "False"}


class Misuse(AssertionError):
    """Something that CUDA or torch forbids, or that would go wrong at times."""


class FakeCuda:
    """The CUDA of one process.

    Args:
        num_devices: equal cards.
        total_bytes: of each card's memory. context_bytes: of these, that this process's context takes once there is
            one. other_bytes: that other processes have.
        settings: of torch's allocator, as they are found. settings_told: by a call of their own, as by torch 2.13, or
            in a "snapshot", as by torch 2.11, or not at all.
        kernels: of our own are "right"; are "wrong" by a bit; or are "missing", since torch cannot compile them.
        library_bytes: that each kind of kernel takes beside the context, from its first use in a precision on.
    """

    def __deepcopy__(self, memo):
        return self  # one for all copies of a layer that knows it

    def __init__(
        self,
        num_devices=1,
        total_bytes=256 * MIB,
        context_bytes=4 * MIB,
        other_bytes=0,
        settings="",
        settings_told="call",
        library_bytes=0,
        kernels="right",
        has_ieee_roots=False,  # as those of `CudaDevice`. False: tasks have plain PyTorch's bits on any CPU
    ):
        self.cards = [_Card(self, index, total_bytes, context_bytes, other_bytes) for index in range(num_devices)]
        self.library_bytes = library_bytes
        self.settings_told = settings_told
        self.kernels = kernels
        self.has_ieee_roots = has_ieee_roots
        self.num_launches = 0
        self.context_bytes = context_bytes
        self.misuses = []
        self.settings = self.settings_before = settings
        self.registered = {}  # address: (bytes, device)
        self.num_registered_bytes = self.num_registers = 0  # ever
        self.refused_registers = 0  # so many calls from now on fail for want of memory
        self.num_checks = 0  # checked calls so far
        self.strike_at = None  # the device is struck at this one
        self.fail_at = None  # this one fails, and nothing else
        self.num_copies = Counter()  # by kind
        self.here = _Thread()
        self._holders = Counter()  # by address of a storage: queued copies that refer to it
        self._lock = threading.RLock()
        self.is_initialised = False
        self.generators = [torch.Generator().manual_seed(100 + index) for index in range(num_devices)]
        self._states_before = [generator.get_state() for generator in self.generators]
        self.torch = _Torch(self)

    # -- for tests

    @contextmanager
    def installed(self, **constants):
        """Let hydra_engine/devices/cuda.py work on it; its `constants` are replaced, some are made smaller."""
        small = {"PAGE_BYTES": 2**12, "PROBE_BYTES": 2**12, "PIECE_BYTES": 2**11, "LEAST_RESERVED_BYTES": 0}
        small |= {"PLACES_BYTES": 2**13, "MOST_LOCKED_BYTES": 2**14}
        patch = pytest.MonkeyPatch()
        for each in CACHED:
            each.cache_clear()
        device._CONTEXT_BYTES.clear()
        for name, value in (small | constants).items():
            patch.setattr(page_locked if hasattr(page_locked, name) else device, name, value)
        patch.setattr(device, "torch", self.torch)
        patch.setattr(device.CudaDevice, "has_ieee_roots", self.has_ieee_roots)
        patch.setattr(device, "SEEDING", device.Seeding())  # a device that was lost may never have been closed
        for name in (*device.SEEDS, *device.STATES):
            patch.setattr(torch.cuda, name, getattr(torch.cuda, name))
        patch.setattr(page_locked, "torch", self.torch)
        patch.setattr(memory, "torch", self.torch)
        patch.setattr(arena, "torch", _TorchOfArena(self))
        patch.setattr(page_locked, "Mapping", self._map)
        patch.setattr(torch.Tensor, "copy_", lambda target, *args, **kwargs: self._copy_(target, *args, **kwargs))
        patch.setattr(torch.Tensor, "cpu", lambda found: self._cpu(found))
        patch.setattr(dram, "discard", self._discard(dram.discard))
        patch.setattr(page_locked, "discard", dram.discard)
        try:
            yield self
        finally:
            if self._holders or self.registered or any(card.allocated_bytes for card in self.cards):
                gc.collect()  # what lies in cycles goes while there is somebody to unlock it
            patch.undo()
            for each in CACHED:
                each.cache_clear()
            device._CONTEXT_BYTES.clear()

    def check_all_left_as_found(self):
        """What holds once everything that used it is closed."""
        assert not self.misuses, self.misuses
        assert not self._holders, "copies that nobody has waited for"
        if all(card.lost is None for card in self.cards):  # or the process is about to end
            for card in self.cards:
                assert card.allocated_bytes == 0, f"cuda:{card.index}: {card.allocated_bytes} bytes are still allocated"
                assert card.fraction == 1.0, f"memory fraction of cuda:{card.index} is left at {card.fraction}"
                assert card.reserved_bytes == 0, f"cuda:{card.index}: {card.reserved_bytes} bytes are still cached"
            assert not self.registered, f"page-locked for ever: {self.registered}"
            assert _parsed(self.settings) == _parsed(self.settings_before), "settings of the allocator"
            for index, (generator, before) in enumerate(zip(self.generators, self._states_before, strict=True)):
                assert torch.equal(generator.get_state(), before), f"generator of cuda:{index}"

    def strike(self):
        """A kernel on the current device fails for good, as by an index out of range; noticed at the next call."""
        card = self.cards[self.here.device]
        if card.lost is None:
            card.lost = "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later"
            for stream in (card.default_stream, *card.streams):
                stream.abandon()

    def generator_here(self):
        """What a kernel of the current device draws from."""
        return self.generators[self.here.device]

    # -- judging

    def misuse(self, text):
        error = Misuse(f"{text} (thread {threading.current_thread().name})")
        self.misuses.append(str(error))
        raise error

    def check(self, index=None):
        """What every checked call begins with: errors of the device, or left by this thread, come up."""
        here = self.here
        self.is_initialised = True
        index = here.device if index is None else index
        if index not in range(len(self.cards)):
            raise _error("CUDA error: invalid device ordinal", 101)
        self.cards[index].has_context = True
        self.num_checks += 1
        if self.num_checks == self.strike_at:
            self.strike()
        if self.num_checks == self.fail_at:
            raise _error("CUDA error: the call that was to fail", INVALID_CODE)
        if self.cards[index].lost is not None:
            raise _error(self.cards[index].lost, ASSERT_CODE)
        if here.pending is not None:
            pending, here.pending = here.pending, None
            raise _error(f"CUDA error: left by an earlier call, code {pending}", pending)

    def index_of(self, which):
        """Of a device, however it is named; None: the current one."""
        if which is None:
            return self.here.device
        if isinstance(which, torch.device):
            return self.here.device if which.index is None else which.index
        return which

    def stream_here(self):
        index = self.here.device
        return self.here.streams.get(index, self.cards[index].default_stream)

    # -- whose memory is whose

    def allocated_here(self, storage):
        """A storage's memory came from the current stream's pool, and goes back there once nobody holds it.

        Kernels' results are not followed: they are the compute lane's, and other lanes only copy them, see `_late`.
        """
        address = storage.data_ptr()
        if address and self.is_in_lane:
            block = _Block(self.stream_here(), address)
            block.stream.blocks[address] = block
            weakref.finalize(storage, self._dropped, block).atexit = False

    @property
    def is_in_lane(self):
        """Whether a stream of its own is current, and not a device's default one."""
        stream = self.stream_here()
        return stream is not stream.card.default_stream

    def queued_here(self, tensors, what):
        """The current stream has work on these from here on, that nobody has awaited."""
        stream = self.stream_here()
        stream.num_queued += 1
        others = [each.blocks for each in stream.card.streams if each is not stream and each.blocks]
        if not others:
            return
        for tensor in _tensors(tensors):
            address = tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else None
            for blocks in others:
                block = blocks.get(address)
                if block is not None:
                    block.last_use[stream] = (stream.num_queued, what)

    def _dropped(self, block):
        if block.stream.blocks.get(block.address) is block:
            del block.stream.blocks[block.address]
        for stream, (at, what) in list(block.last_use.items()):
            if at > stream.num_awaited and stream.card.lost is None:
                text = (
                    f"a block of {block.stream} is dropped while {stream} has work on it that nobody awaited: {what} "
                    f"(thread {threading.current_thread().name})"
                )
                if text not in self.misuses:  # in a finalizer, where nothing can be raised
                    self.misuses.append(text)

    # -- copies

    def _copy_(self, target, source, non_blocking=None):
        if non_blocking is None:
            return COPY(target, source)
        self.check()
        stream = self.stream_here()
        for tensor in (target, source):
            owner = self._owner(tensor)
            if owner not in (None, self.here.device):
                self.misuse(f"a copy with memory of cuda:{owner} while cuda:{self.here.device} is current")
        if not non_blocking:
            self.num_copies["waited for"] += 1
            stream.drain()
            return COPY(target, source)
        dense = _is_dense(target) and _is_dense(source)
        if (target.dtype, target.shape, target.stride()) != (source.dtype, source.shape, source.stride()) or not dense:
            self.misuse(f"not a plain copy, and nobody waits: {_kind(source)} to {_kind(target)}")
        self.num_copies["put off"] += 1
        self.queued_here([target, source], "a copy")
        if target.numel():
            with _disable_current_modes():
                target.fill_(float("nan") if target.is_floating_point() else 255 if target.dtype == torch.uint8 else -1)
            stream.put(self._late(_alias(target), _alias(source)))
        return target

    def _cpu(self, found):
        """Wait for the stream. What comes from a device has no gaps between its elements, whatever its strides were."""
        # Outside of lanes nobody knows of which device it is: the tensor has its own one current.
        for stream in [self.stream_here()] if self.is_in_lane else [card.default_stream for card in self.cards]:
            if stream.has_launched:
                stream.drain()
        return CPU(found) if _is_dense(found) else found.clone()

    def _late(self, target, source):
        """A copy that is put off; not `done` where its device was lost."""
        with self._lock:
            for tensor in (target, source):
                self._holders[tensor.untyped_storage().data_ptr()] += 1

        def copy(done=True):
            with self._lock:
                for what, tensor in (("target", target), ("source", source)):
                    if done and _num_others(tensor, self._holders[tensor.untyped_storage().data_ptr()]) <= 0:
                        self.misuse(f"the {what} of a copy was freed before anybody waited for the copy")
                for tensor in (target, source):
                    address = tensor.untyped_storage().data_ptr()
                    self._holders[address] -= 1
                    if not self._holders[address]:
                        del self._holders[address]
            if done:
                with _disable_current_modes():  # it was seen as it was queued
                    COPY(target, source)

        return copy

    def _owner(self, tensor):
        """The device whose memory a tensor lies in, where that is known."""
        address = tensor.untyped_storage().data_ptr()
        return next((card.index for card in self.cards if address in card.blocks), None)

    # -- kernels of our own

    def launch(self, kernel, grid, block, args):
        """Queue a kernel on the current stream: `kernel(*args)`, whose tensors stay there until it is through."""
        self.check()
        if grid[1:] != (1, 1) or not 0 < grid[0] < 2**31 or block != (256, 1, 1):
            self.misuse(f"a launch of {grid} blocks of {block} threads")
        self.num_launches += 1
        stream = self.stream_here()
        stream.num_queued += 1
        stream.has_launched = True

        def run(done=True):
            if done:
                with _disable_current_modes():
                    kernel(*args)
                    if self.kernels == "wrong":
                        spoil(*args)

        stream.put(run)

    # -- memory

    def _allocated(self, num_bytes, which):
        index = self.index_of(which)
        self.check(index)
        card = self.cards[index]
        with self._lock:
            reserved = max(card.reserved_bytes, card.allocated_bytes + num_bytes)
            if reserved > card.fraction * card.total_bytes or reserved > card.most_bytes:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes")
            storage = torch.UntypedStorage(num_bytes)
            if num_bytes:
                card.num_device_allocs += reserved > card.reserved_bytes
                card.allocated_bytes += num_bytes
                card.reserved_bytes = reserved
                card.most_reserved_bytes = max(card.most_reserved_bytes, reserved)
                card.blocks.add(storage.data_ptr())
                weakref.finalize(storage, card.freed, storage.data_ptr(), num_bytes).atexit = False
        return storage

    def register(self, address, num_bytes, flags):
        """cudaHostRegister: gives a code, and leaves an error to the next call where that is not 0."""
        if self.cards[self.here.device].lost is not None:
            return ASSERT_CODE
        if address % mmap.PAGESIZE:
            self.misuse(f"cudaHostRegister: {address:#x} is not the start of a page")
        if flags != 1:
            self.misuse(f"cudaHostRegister: flags {flags}; 1 makes it locked for every device")
        if not self.cards[self.here.device].has_context:
            self.misuse(f"cudaHostRegister makes a context on cuda:{self.here.device}, which nobody uses")
        with self._lock:
            if self.refused_registers:
                self.refused_registers -= 1
                self.here.pending = NO_MEMORY_CODE
                return NO_MEMORY_CODE
            if num_bytes <= 0:
                self.here.pending = INVALID_CODE
                return INVALID_CODE
            if self._locked_in(address, num_bytes):
                self.here.pending = REGISTERED_CODE
                if any(card.lost is not None for card in self.cards):
                    return REGISTERED_CODE  # memory of a lost card stays locked, and what is mapped next may lie there
                self.misuse(f"cudaHostRegister: a page of {num_bytes} bytes from {address:#x} on is registered already")
            self.registered[address] = (num_bytes, self.here.device)
            self.num_registered_bytes += num_bytes
            self.num_registers += 1
        return 0

    def unregister(self, address):
        """cudaHostUnregister."""
        if self.cards[self.here.device].lost is not None:
            return ASSERT_CODE
        with self._lock:
            if address not in self.registered:
                self.here.pending = NOT_REGISTERED_CODE
                self.misuse(f"cudaHostUnregister: {address:#x} is not registered")
            num_bytes, index = self.registered.pop(address)
        if index != self.here.device:
            self.misuse(f"cudaHostUnregister: registered for cuda:{index}, and cuda:{self.here.device} is current")
        if any(address <= each < address + num_bytes for each in list(self._holders)):
            self.misuse("cudaHostUnregister: a copy of it is on its way")
        return 0

    def _locked_in(self, address, num_bytes):
        """Whether a page of a region is registered."""
        first, end = address // mmap.PAGESIZE, -(-(address + num_bytes) // mmap.PAGESIZE)
        return any(
            start // mmap.PAGESIZE < end and first < -(-(start + size) // mmap.PAGESIZE)
            for start, (size, _) in list(self.registered.items())  # a finalizer, in any thread, may change it meanwhile
        )

    def _map(self, fileno, num_bytes):
        mapping = _Mapping(fileno, num_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        mapping.unmapped = partial(self._unmapped, address, num_bytes)
        return mapping

    def _unmapped(self, address, num_bytes):
        if self._locked_in(address, num_bytes) and all(card.lost is None for card in self.cards):
            self.misuses.append(f"{num_bytes} bytes at {address:#x} were unmapped while they were page-locked")

    def _discard(self, original):
        def discard(storage, start, num_bytes, **options):
            if self._locked_in(storage.data_ptr() + start, num_bytes) and all(c.lost is None for c in self.cards):
                self.misuse("pages are given back while they are page-locked")
            original(storage, start, num_bytes, **options)

        return discard


class _Thread(threading.local):
    """What CUDA and torch keep for each thread apart."""

    def __init__(self):
        self.device = 0
        self.streams = {}  # by device; else its default stream
        self.pending = None  # the code of a call that failed unseen


class _Card:
    """One device."""

    def __init__(self, cuda, index, total_bytes, context_bytes, other_bytes):
        self.cuda, self.index, self.total_bytes = cuda, index, total_bytes
        self.context_bytes, self.other_bytes = context_bytes, other_bytes
        self.has_context = False
        self.lost = None
        self.fraction = 1.0
        self.allocated_bytes = self.reserved_bytes = self.most_reserved_bytes = self.num_device_allocs = 0
        self.blocks = set()  # addresses
        self.streams = []
        self.default_stream = _Stream(self)
        self.libraries = set()  # kinds of kernels that were used, each with a precision

    @property
    def most_bytes(self):
        """That the allocator could take."""
        libraries = self.cuda.library_bytes * len(self.libraries)
        return self.total_bytes - self.context_bytes - self.other_bytes - libraries

    def freed(self, address, num_bytes):
        self.blocks.discard(address)
        self.allocated_bytes -= num_bytes

    def new_stream(self):
        if len(self.streams) == NUM_STREAMS:
            self.cuda.misuse(f"more than {NUM_STREAMS} streams: from here on two of them are the same")
        self.streams.append(_Stream(self))
        return self.streams[-1]


class _Block:
    """Memory that a stream has allocated."""

    def __init__(self, stream, address):
        self.stream, self.address = stream, address
        self.last_use = {}  # by other stream: how much it had queued then, and what that was


class _OnLooker(TorchDispatchMode):
    """Sees the kernels that a lane's thread queues, its backwards' too."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # which takes longer than all that is done here; nothing is compiled on a stand-in

    def __init__(self, cuda):
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, cuda = kwargs or {}, self._cuda
        if cuda.stream_here().has_launched and _touches_memory(func):
            cuda.stream_here()._drain(None)
        result = func(*args, **kwargs)
        if cuda.library_bytes and func.overloadpacket in LIBRARIES:
            dtype = next(_tensors(args)).dtype
            cuda.cards[cuda.here.device].libraries.add((LIBRARIES[func.overloadpacket], dtype))
        if _touches_memory(func):
            cuda.queued_here((args, tuple(kwargs.values()), result), func)
        if func is aten._local_scalar_dense.default:  # a number: torch waits for it
            cuda.stream_here().num_awaited = cuda.stream_here().num_queued
        return result


@cache
def _touches_memory(func):
    return not func.is_view and func.overloadpacket not in NO_KERNELS


def _tensors(values):
    """Those among an operation's arguments, which nest lists at most."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


class _Stream:
    """Copies in order, which happen as somebody waits for them."""

    def __init__(self, card):
        self.card = card
        self.device = torch.device("cpu", card.index)
        self._jobs, self.num_put, self._num_done = deque(), 0, 0
        self.num_queued = self.num_awaited = 0  # kernels and copies
        self.has_launched = False  # kernels of our own, that did not run yet
        self.blocks = {}  # that it has allocated, by address
        self._lock = threading.RLock()

    def __repr__(self):
        if self is self.card.default_stream:
            return f"the default stream of cuda:{self.card.index}"
        return f"stream {self.card.streams.index(self)} of cuda:{self.card.index}"

    def put(self, job):
        with self._lock:
            self._jobs.append(job)
            self.num_put += 1
        if self.card.lost is not None:
            self.abandon()

    def abandon(self):
        """The device is lost: nothing that was put off will be done."""
        with self._lock:
            while self._jobs:
                self._num_done += 1
                self._jobs.popleft()(done=False)

    def drain(self, end=None, num_queued=None):
        """Do what was put before so many, and know that so much of what was queued is through."""
        queued = self.num_queued if num_queued is None else num_queued
        self._drain(end)
        with self._lock:  # of two threads that wait for it, the one that waited for less may come last
            self.num_awaited = max(self.num_awaited, queued)

    def _drain(self, end):
        with self._lock:
            while self._num_done < (self.num_put if end is None else end):
                self._num_done += 1
                self._jobs.popleft()()
            self.has_launched &= bool(self._jobs)


class _Event:
    """A place in a stream."""

    def __init__(self, cuda, enable_timing=False, blocking=False):
        self._cuda, self._enable_timing, self._blocking = cuda, enable_timing, blocking
        self._card = self._stream = None
        self._end = self._num_queued = 0
        self._time_s = None
        self._num_waiting = 0

    def record(self, stream=None):
        cuda = self._cuda
        stream = cuda.stream_here() if stream is None else stream
        cuda.check(stream.card.index)
        if self._card not in (None, stream.card):
            cuda.misuse(f"an event of cuda:{self._card.index} is recorded on cuda:{stream.card.index}")
        if stream.card.index != cuda.here.device:
            cuda.misuse(f"an event is recorded on cuda:{stream.card.index} while cuda:{cuda.here.device} is current")
        if self._num_waiting:
            cuda.misuse("an event is recorded again that somebody waits for")
        self._card, self._stream, self._end, self._time_s = stream.card, stream, stream.num_put, time.perf_counter()
        self._num_queued = stream.num_queued

    def synchronize(self):
        cuda = self._cuda
        if self._stream is None:
            return  # as CUDA does; who relies on it is wrong
        cuda.check(self._card.index)
        if not self._blocking:
            cuda.misuse("a thread waits for an event in a loop; blocking=True lets it sleep")
        self._num_waiting += 1
        try:
            self._stream.drain(self._end, self._num_queued)
        finally:
            self._num_waiting -= 1
        cuda.check(self._card.index)

    def query(self):
        return self._stream is None or self._stream._num_done >= self._end

    def elapsed_time(self, end):
        if not (self._enable_timing and end._enable_timing) or None in (self._time_s, end._time_s):
            raise ValueError("Both events must be created with argument 'enable_timing=True', and recorded")
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        if self._card is not end._card:
            self._cuda.misuse("time between events of two devices")
        self._cuda.check(self._card.index)
        return (end._time_s - self._time_s) * 1e3


class _Mapping(page_locked.Mapping):
    """Says that it is about to go: a weak reference would say so once another thread may have mapped the same pages."""

    unmapped = staticmethod(lambda: None)

    def __del__(self):
        super().__del__()
        self.unmapped()


class _CudaModule:
    """torch.cuda; what is not here is not stood in for."""

    def __init__(self, cuda):
        self._cuda = cuda

    def is_available(self):
        return True

    def device_count(self):
        return len(self._cuda.cards)

    def init(self):
        self._cuda.check()

    @property
    def _compile_kernel(self):
        if self._cuda.kernels == "missing":
            raise AttributeError
        return self._compiled

    def _compiled(self, source, name, compute_capability=None, cuda_include_dirs=None, nvcc_options=None):
        assert nvcc_options == ["--fmad=false", "--ftz=false"]
        assert not re.findall('#include "', source), "NVRTC would not find it"
        return partial(self._cuda.launch, partial(launch, compiled(source)))

    @property
    def default_generators(self):
        return tuple(self._cuda.generators) if self._cuda.is_initialised else ()

    def get_device_properties(self, which):
        card = self._cuda.cards[self._cuda.index_of(which)]
        name = "Fake" if self._cuda.kernels == "right" else f"Fake with {self._cuda.kernels} kernels"
        return SimpleNamespace(name=name, total_memory=card.total_bytes, uuid=f"fake-{card.index}")

    def current_device(self):
        return self._cuda.here.device

    def current_stream(self):
        return self._cuda.stream_here()

    @contextmanager
    def device(self, which):
        here, index = self._cuda.here, self._cuda.index_of(which)
        before, thread = here.device, threading.current_thread()
        if index not in range(len(self._cuda.cards)):
            raise _error("CUDA error: invalid device ordinal", 101)
        here.device, self._cuda.cards[index].has_context = index, True
        try:
            # What a lane does is looked on already.
            with nullcontext() if self._cuda.is_in_lane else _OnLooker(self._cuda):
                yield
        finally:
            if threading.current_thread() is not thread:
                self._cuda.misuse("a thread leaves what another one has entered")
            here.device = before

    @contextmanager
    def stream(self, stream):
        here = self._cuda.here
        device_before, before = here.device, here.streams.get(stream.card.index)
        here.device = stream.card.index
        here.streams[here.device] = stream
        try:
            with _OnLooker(self._cuda):
                yield
        finally:
            here.streams[stream.card.index] = stream.card.default_stream if before is None else before
            here.device = device_before

    def Stream(self, which=None):
        index = self._cuda.index_of(which)
        self._cuda.check(index)
        return self._cuda.cards[index].new_stream()

    def Event(self, enable_timing=False, blocking=False):
        return _Event(self._cuda, enable_timing, blocking)

    def synchronize(self, which=None):
        index = self._cuda.index_of(which)
        self._cuda.check(index)
        for stream in (self._cuda.cards[index].default_stream, *self._cuda.cards[index].streams):
            stream.drain()

    def empty_cache(self):
        for card in self._cuda.cards:
            if card.has_context:
                self._cuda.check(card.index)
                card.reserved_bytes = card.allocated_bytes

    def mem_get_info(self, which=None):
        card = self._cuda.cards[self._cuda.index_of(which)]
        self._cuda.check(card.index)
        return card.most_bytes - card.reserved_bytes, card.total_bytes

    def memory_allocated(self, which=None):
        return self._cuda.cards[self._cuda.index_of(which)].allocated_bytes

    def memory_reserved(self, which=None):
        return self._cuda.cards[self._cuda.index_of(which)].reserved_bytes

    def max_memory_reserved(self, which=None):
        return self._cuda.cards[self._cuda.index_of(which)].most_reserved_bytes

    def reset_peak_memory_stats(self, which=None):
        card = self._cuda.cards[self._cuda.index_of(which)]
        card.most_reserved_bytes = card.reserved_bytes

    def memory_stats(self, which=None):
        card = self._cuda.cards[self._cuda.index_of(which)]
        return {"num_device_alloc": card.num_device_allocs, "num_alloc_retries": 0, "num_ooms": 0}

    def get_per_process_memory_fraction(self, which=None):
        return self._cuda.cards[self._cuda.index_of(which)].fraction

    def set_per_process_memory_fraction(self, fraction, which=None):
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        self._cuda.cards[self._cuda.index_of(which)].fraction = fraction

    def manual_seed_all(self, seed):
        for generator in self._cuda.generators:
            generator.manual_seed(seed)

    @property
    def memory(self):
        return SimpleNamespace(_snapshot=self._snapshot)

    def _snapshot(self):
        self._cuda.check()
        told = {"PYTORCH_CUDA_ALLOC_CONF": self._cuda.settings} if self._cuda.settings_told == "snapshot" else {}
        return {"segments": [], "allocator_settings": {"expandable_segments": False, **told}}

    def cudart(self):
        self._cuda.is_initialised = True  # it raises nothing that was left
        return SimpleNamespace(cudaHostRegister=self._cuda.register, cudaHostUnregister=self._cuda.unregister)


class _C:
    """torch._C, as a build with CUDA has it."""

    def __init__(self, cuda):
        self._cuda = cuda

    def __getattr__(self, name):
        if name == "_accelerator_getAllocatorSettings":
            if self._cuda.settings_told == "call":
                return lambda: self._cuda.settings
            raise AttributeError(f"module 'torch._C' has no attribute {name!r}")
        return getattr(torch._C, name)

    def _cuda_clearCublasWorkspaces(self):
        pass

    def _accelerator_setAllocatorSettings(self, settings):
        _parsed(settings)
        self._cuda.settings = settings


class _Torch:
    """torch, whose CUDA devices are the stand-in's: "cpu:1" there is cuda:1."""

    def __init__(self, cuda):
        self._cuda = cuda
        self.cuda = _CudaModule(cuda)
        self._C = _C(cuda)

    def __getattr__(self, name):
        return getattr(torch, name)

    def device(self, kind, index=None):
        kind, _, number = kind.partition(":")
        return torch.device("cpu" if kind == "cuda" else kind, int(number) if number else index)

    def UntypedStorage(self, num_bytes, device=None):
        """On a device where that has a number, and else in DRAM."""
        if device is None or device.index is None:
            return torch.UntypedStorage(num_bytes)
        found = self._cuda._allocated(num_bytes, device)
        self._cuda.allocated_here(found)
        return found

    def empty(self, *args, pin_memory=False, device=None, **kwargs):
        if pin_memory:
            self._cuda.misuse("page-locked memory of torch's, whose destructor raises once the device is lost")
        return self._here(torch.empty(*args, device=device, **kwargs), device)

    def empty_strided(self, size, stride, *, dtype, device):
        return self._here(torch.empty_strided(size, stride, dtype=dtype, device=device), device)

    def empty_like(self, tensor, *, device, requires_grad):
        return self._here(torch.empty_like(tensor, device=device, requires_grad=requires_grad), device)

    def _here(self, found, device):
        if isinstance(device, torch.device) and device.index is not None:
            self._cuda.allocated_here(found.untyped_storage())
        return found

    def ones(self, *args, device=None, **kwargs):
        with nullcontext() if device is None else self.cuda.device(device):
            self._cuda.check()
            return torch.ones(*args, **kwargs)

    def mm(self, *args):
        self._cuda.check()
        return torch.mm(*args)


class _TorchOfArena:
    """torch for hydra_engine/devices/arena.py: its storages are the device's, unlike the CPU's own."""

    def __init__(self, cuda):
        self._cuda = cuda

    def __getattr__(self, name):
        return getattr(torch, name)

    def UntypedStorage(self, num_bytes, device=None):
        found = torch.UntypedStorage(num_bytes)
        self._cuda.allocated_here(found)
        return found


def _error(text, code):
    error = torch.AcceleratorError(text)
    error.error_code = code
    return error


def _parsed(settings):
    """Settings of the allocator; raises ValueError for text that is none."""
    pairs = (pair.split(":") for pair in settings.split(",") if pair)
    return DEFAULT_SETTINGS | {name.strip(): value.strip() for name, value in pairs}


def _extent_bytes(tensor):
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + last) * tensor.element_size()


def _is_dense(tensor):
    return tensor.layout != torch.strided or tensor.nbytes == _extent_bytes(tensor)


def _kind(tensor):
    return f"{tensor.dtype} {tuple(tensor.shape)} in strides {tensor.stride()}"


def _alias(tensor):
    """The same memory, without its version counter."""
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _num_holders(tensor):
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


# Of a tensor that nobody else knows.
ALONE = _num_holders(torch.empty(1))


def _num_others(tensor, num_aliases):
    """How many hold a tensor's memory beside so many aliases."""
    return _num_holders(tensor) - ALONE - (num_aliases - 1)
