"""Files on disk: the system calls that change them, and their checksums.

All system calls that write are methods of one object, so that a test can pass one that fails.

A checksum is a CRC-32, as zlib's. It notices every error within 32 consecutive bits, and misses others once in 2**32.
It is there against decay, not against deceit. It takes half the processor time of SHA-256, which those who train would
miss.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of what can be made again, hydra_engine in the user's cache; it may not exist yet."""
    # https://specifications.freedesktop.org/basedir-spec/latest/
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):  # a relative one is not valid
        root = os.path.expanduser("~/.cache")
    return Path(root, "hydra_engine")


class Disk:
    """The system calls that write a checkpoint; every method raises the OSError of the call behind it."""

    def write(self, path: Path, put: Callable[[Path], object]) -> None:
        """Let a function write a file, or write it again, which it may do by renaming another one."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        mode = os.fstat(descriptor).st_mode
        os.close(descriptor)
        put(path)
        if path.stat().st_mode != mode:  # another one was temporary, and its user's alone
            path.chmod(mode)

    def sync(self, path: Path) -> None:
        """Wait until all bytes of a file, or names in a folder, are on the medium."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if not path.is_dir() or error.errno not in (errno.EBADF, errno.EINVAL):  # which not every file system can
                raise
        finally:
            os.close(descriptor)

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file, at once or not at all; a file that has the target's name is replaced."""
        os.replace(source, target)

    def remove_file(self, path: Path) -> None:
        path.unlink()


# Small enough for a processor's cache.
_READ_BYTES = 2**18


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    buffer, crc32 = memoryview(bytearray(_READ_BYTES)), 0
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            crc32 = zlib.crc32(buffer[:num_bytes], crc32)
    return crc32
