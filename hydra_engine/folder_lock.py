"""A folder has one writer: a lock that ends with its process, however that ends."""

from __future__ import annotations

import fcntl
import os
import platform
import weakref
from functools import partial
from pathlib import Path

from hydra_engine.errors import CheckpointError


class FolderLock:
    """Held from here to `release`; raises CheckpointError, naming the holder, while another one is held."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        except BlockingIOError as error:
            holder = os.pread(self._descriptor, 1000, 0).decode(errors="replace") or "another process"
            self.release()
            raise CheckpointError(
                f"{path.parent} is in use by {holder}, and one run at a time writes there; end that one, or give this "
                f"one a directory of its own"
            ) from error
        except BaseException:
            self.release()
            raise
        # A forked child (a loader's worker) has the lock too, and would hold it after its parent was killed.
        os.register_at_fork(after_in_child=partial(_release_inherited, weakref.ref(self)))

    @property
    def is_held(self) -> bool:
        """Until `release`, and never in a forked child."""
        return self._descriptor >= 0

    def release(self) -> None:
        """Once or more often."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _release_inherited(reference: weakref.ref[FolderLock]) -> None:
    lock = reference()
    if lock is not None:
        lock.release()
