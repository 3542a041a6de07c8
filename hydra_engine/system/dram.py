"""DRAM of this process: what there is, and giving back what was freed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil
import torch
from torch import nn

# Freed weights are given back to the system in portions of so many bytes: that much DRAM is taken twice.
TRIM_BYTES = 2**28
# What torch's allocator says of it, on Linux and elsewhere.
_NO_DRAM = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
DRAM_REMEDY = (
    "the machine's DRAM is used up, or the limit of this process's cgroup reached: train fewer tasks at once, give "
    "smaller batches or loaders with fewer workers, freeze layers, choose an optimizer with less state (SGD), or use "
    "a machine with more DRAM"
)


def available_dram_bytes() -> int:
    """DRAM that can still be taken: the smaller of what the machine and the process's cgroup have left."""
    available = int(psutil.virtual_memory().available)
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, usage = int(Path(limit_file).read_text()), int(Path(usage_file).read_text())
        except (OSError, ValueError):  # no such cgroup here, or "max"
            continue
        available = min(available, max(0, limit - usage))
    return available


def new_storage(num_bytes: int) -> torch.UntypedStorage:
    """DRAM, not initialised."""
    return torch.UntypedStorage(num_bytes)  # type: ignore[no-untyped-call]


class HostMemory:
    """Where weights, gradients and casts lie in DRAM; devices that copy faster from memory of a kind have their own."""

    def new(self, num_bytes: int) -> torch.UntypedStorage:
        """DRAM, not initialised; free once nobody holds it."""
        return new_storage(num_bytes)

    def let_go(self, storage: torch.UntypedStorage) -> None:
        """No device copies from it or to it any more, so that its pages can be given back one by one."""

    def discard(self, storage: torch.UntypedStorage, start: int, num_bytes: int) -> None:
        """Give the pages of a part of it back to the system, where they are not held; that loses what they hold."""
        discard(storage, start, num_bytes)


def return_free_memory() -> None:
    """Give what was freed back to the system: glibc keeps blocks of up to 32 MiB, and weights are such blocks.

    https://man7.org/linux/man-pages/man3/malloc_trim.3.html
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class Freed:
    """Counts what is freed, and gives it back portion by portion."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """So many bytes more."""
        self._num_bytes += num_bytes
        if self._num_bytes >= TRIM_BYTES:
            return_free_memory()
            self._num_bytes = 0


def discard(storage: torch.UntypedStorage, start: int, num_bytes: int, *, is_shared: bool = False) -> None:
    """Give the pages of a part of a storage back to the system, and lose what they hold.

    is_shared: it lies in a mapping that processes may share, which keeps its pages when one of them needs them no more.

    https://man7.org/linux/man-pages/man2/madvise.2.html
    """
    page = mmap.PAGESIZE
    begin = -(-(storage.data_ptr() + start) // page) * page
    end = (storage.data_ptr() + start + num_bytes) // page * page
    if sys.platform == "linux" and end > begin:
        advice = mmap.MADV_REMOVE if is_shared else mmap.MADV_DONTNEED
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


def is_alone(storage: torch.UntypedStorage, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether nobody but these holds a tensor in a storage: a callback may have kept a state dict."""
    first, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    num_own = 1 + sum(first <= parameter.data_ptr() < end for parameter in parameters)
    num_users: int = torch._C._storage_Use_Count(storage._cdata)
    return num_users <= num_own


def is_out_of_dram(error: BaseException) -> bool:
    """Whether an error, or what it came from, says that the host gave no memory: Python's, torch's or the system's."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        is_torch = isinstance(cause, RuntimeError) and any(text in str(cause) for text in _NO_DRAM)
        if is_torch or isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
