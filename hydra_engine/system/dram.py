"""DRAM of this process: bytes that are available, and giving freed memory back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from weakref import WeakSet

import psutil
import torch
from torch import nn

# Freed memory is given back to the system once it is this much, and until then it is in use twice.
TRIM_BYTES = 2**28
# What `HostMemory` has given that is written to, as long as somebody holds it.
_WRITTEN: WeakSet[torch.UntypedStorage] = WeakSet()
_MUTEX = threading.Lock()
# Texts of torch's allocator, on Linux and elsewhere.
_NO_DRAM = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
DRAM_REMEDY = (
    "the machine's DRAM is used up, or the limit of this process's cgroup reached: train fewer tasks at once, give "
    "smaller batches or loaders with fewer workers, freeze layers, choose an optimizer with less state (SGD), or use "
    "a machine with more DRAM"
)


# A cgroup's limit, its usage, its statistics, and what there comes before the names, of version 2 and of version 1.
# https://docs.kernel.org/admin-guide/cgroup-v2.html#memory, https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", ""),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
)


def available_dram_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of DRAM that this process can still have, by the machine and by its cgroup.

    Files that were read stay in a cgroup's memory until it is needed: they count as available, as the machine's do.
    """
    available = int(psutil.virtual_memory().available)
    for limit_file, usage_file, statistics_file, prefix in _CGROUPS:
        try:
            limit, usage = (int((cgroup / file).read_text()) for file in (limit_file, usage_file))
        except (OSError, ValueError):  # no such cgroup here, or "max"
            continue
        available = min(available, max(0, limit - usage + _cached_bytes(cgroup / statistics_file, prefix)))
    return available


def _cached_bytes(statistics: Path, prefix: str) -> int:
    """Return the bytes of files that the system drops where memory is short."""
    with contextlib.suppress(OSError, ValueError):
        lines = map(str.split, statistics.read_text().splitlines())
        found = dict(each for each in lines if len(each) == 2)
        return sum(int(found.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    return 0


class HostMemory:
    """DRAM for weights, gradients and states. A device that copies faster from memory of another kind has its own.

    It is in large pages where the system gives them: a pass over many tensors then misses the processor's table of
    pages less often, and first writes are faster. https://docs.kernel.org/admin-guide/mm/transhuge.html
    """

    def new(self, num_bytes: int, *, is_written: bool = True) -> torch.UntypedStorage:
        """Return DRAM, all zeros; free once nobody holds it. is_written: again and again, see `begin_workers`."""
        if sys.platform != "linux" or not num_bytes:
            return torch.zeros(num_bytes, dtype=torch.uint8).untyped_storage()
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a system without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        if is_written:
            with _MUTEX:
                _WRITTEN.add(storage)
        return storage

    def let_go(self, storage: torch.UntypedStorage) -> None:
        """Note that nobody here writes to it any more, and no device copies, so that pages can be given back singly."""
        with _MUTEX:
            _WRITTEN.discard(storage)

    def take_again(self, storage: torch.UntypedStorage) -> None:
        """Note that it is written to again, after `let_go`."""
        with _MUTEX:
            _WRITTEN.add(storage)

    def discard(self, storage: torch.UntypedStorage, start: int, num_bytes: int) -> None:
        """Give a range's pages back to the system, unless they are locked; their content is lost."""
        discard(storage, start, num_bytes)


@contextlib.contextmanager
def begin_workers(num_workers: int) -> Iterator[None]:
    """Fork workers of a loader in the body without the DRAM that updates write to. num_workers: 0: it has none.

    Two processes share a page until one of them writes to it, which then copies it: every weight, gradient and state
    once an epoch, from large pages into small ones. Processes that anything else forks have all memory, as usual.
    """
    with _MUTEX:
        written = list(_WRITTEN) if num_workers else []
    try:
        for storage in written:
            _advise(storage, 0, storage.nbytes(), "MADV_DONTFORK")
        yield
    finally:
        for storage in written:
            _advise(storage, 0, storage.nbytes(), "MADV_DOFORK")


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def return_free_memory() -> None:
    """Give freed memory back to the system: glibc keeps blocks of up to 32 MiB, and weights are such blocks."""
    # https://man7.org/linux/man-pages/man3/malloc_trim.3.html
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        _libc().malloc_trim(0)


class Freed:
    """Counts freed bytes, and gives them back portion by portion."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes >= TRIM_BYTES:
            return_free_memory()
            self._num_bytes = 0


def discard(storage: torch.UntypedStorage, start: int, num_bytes: int, *, is_shared: bool = False) -> None:
    """Give a range's pages back to the system, and lose their content; is_shared: of a mapping that processes share."""
    _advise(storage, start, num_bytes, "MADV_REMOVE" if is_shared else "MADV_DONTNEED")


def keep_small_pages(storage: torch.UntypedStorage) -> None:
    """Let the system give this memory in small pages, wherever it can give large ones: parts are given back."""
    _advise(storage, 0, storage.nbytes(), "MADV_NOHUGEPAGE")


def _advise(storage: torch.UntypedStorage, start: int, num_bytes: int, advice: str) -> None:
    """Advise Linux of a range's whole pages. https://man7.org/linux/man-pages/man2/madvise.2.html"""
    page = mmap.PAGESIZE
    begin = -(-(storage.data_ptr() + start) // page) * page
    end = (storage.data_ptr() + start + num_bytes) // page * page
    if sys.platform == "linux" and end > begin:
        _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), getattr(mmap, advice))


def is_alone(storage: torch.UntypedStorage, parameters: Iterable[nn.Parameter]) -> bool:
    """Return True if no tensor but these lies in a storage: a callback may have kept a state dict."""
    first, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    num_own = 1 + sum(first <= parameter.data_ptr() < end for parameter in parameters)
    return num_users(storage) <= num_own


def num_users(storage: torch.UntypedStorage) -> int:
    """Return how many tensors, and other objects of torch's, hold a storage."""
    number: int = torch._C._storage_Use_Count(storage._cdata)
    return number


def is_out_of_dram(error: BaseException) -> bool:
    """Return True if an error, or a cause of it, says that there is no DRAM: Python's, torch's or the system's."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        is_torch = isinstance(cause, RuntimeError) and any(text in str(cause) for text in _NO_DRAM)
        if is_torch or isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
