"""Page-locked DRAM, which CUDA devices copy from and to without staging."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch

from hydra_engine.system import HostMemory, discard
from hydra_engine.texts import warn
from partitioners import format_bytes

# cudaHostRegisterPortable: locked for every device.
# https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html
PORTABLE = 1
# One call fails for 512 GiB, however much is free.
MOST_LOCKED_BYTES = 2**38


class Mapping(mmap.mmap):
    """Pages that are unlocked before they go, whoever is the last to hold them.

    A weak reference to a storage may tell so later: where torch itself is the last one, as for a tensor in a cycle.
    """

    unlock: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.unlock is not None and not sys.is_finalizing():
            self.unlock()


class PageLocked(HostMemory):
    """DRAM of exact size, locked in place, so that copies to and from CUDA devices need no staging."""

    def __init__(self, index: int) -> None:
        """`index`: of a device; locked memory is so for all of them, but the call is made for one."""
        self._index = index
        self._unlocks: dict[int, Callable[[], None]] = {}  # by address
        self._has_told = False

    def new(self, num_bytes: int, *, is_written: bool = True) -> torch.UntypedStorage:
        if num_bytes == 0:
            return super().new(0)
        # Pages of its own: two locked regions must not share one. They are shared with processes that are forked off,
        # a loader's workers: private ones might be copied as they are written to, and devices go on with the old ones.
        # Touched here, by several threads; locking would touch them one by one.
        mapping = Mapping(-1, num_bytes)
        flat = torch.frombuffer(mapping, dtype=torch.uint8).zero_()
        address = flat.data_ptr()
        locked = self._lock(address, num_bytes)
        if locked:
            mapping.unlock = self._unlocks[address] = partial(self._unlock_once, address, locked)
        return flat.untyped_storage()

    def _lock(self, address: int, num_bytes: int) -> list[int]:
        """Lock a region. Return the starts of its pieces: all or none, since a copy may cross from one to the next."""
        locked: list[int] = []
        with torch.cuda.device(self._index):  # or it would make a context on the first device
            for start in range(address, address + num_bytes, MOST_LOCKED_BYTES):
                size = min(MOST_LOCKED_BYTES, address + num_bytes - start)
                # CUDA's own function, which gives a code and raises nothing.
                code = int(torch.cuda.cudart().cudaHostRegister(start, size, PORTABLE))  # type: ignore[no-untyped-call]
                if code == 0:
                    locked.append(start)
                    continue
                # Or the error that the call has left to this thread's next kernel would seem to be that one's.
                with suppress(torch.AcceleratorError):
                    torch.ones(1, device=torch.device("cuda", self._index))
                self._unlock(locked)
                if not self._has_told:
                    self._has_told = True
                    warn(
                        f"hydra_engine: {format_bytes(num_bytes)} ({num_bytes} bytes) of DRAM could not be page-locked "
                        f"(CUDA error {code}), and copies of it are slower; raise the limit of locked memory "
                        f"(ulimit -l), or train fewer tasks at once"
                    )
                return []
        return locked

    def let_go(self, storage: torch.UntypedStorage) -> None:
        unlock = self._unlocks.get(storage.data_ptr())
        if unlock is not None:
            unlock()

    def _unlock_once(self, address: int, pieces: Sequence[int]) -> None:
        """Unlock a region before its pages go: whoever held the storage has waited for every copy."""
        if self._unlocks.pop(address, None) is not None:
            self._unlock(pieces)

    def _unlock(self, pieces: Sequence[int]) -> None:
        with suppress(RuntimeError), torch.cuda.device(self._index):  # where it is lost, the process ends anyway
            for piece in pieces:
                torch.cuda.cudart().cudaHostUnregister(piece)  # type: ignore[no-untyped-call]

    def discard(self, storage: torch.UntypedStorage, start: int, num_bytes: int) -> None:
        if storage.data_ptr() not in self._unlocks:  # locked pages are not given back, and devices may still copy them
            discard(storage, start, num_bytes, is_shared=True)
