"""Files on disk: the system calls that change them, and checksums taken while files are written or read.

All system calls that write are methods of one object, so that a test can pass one that fails.

A file's digest is the SHA-256 of the CRC-32s of its portions, four bytes each, the lowest first. A CRC notices every
error within 32 consecutive bits, and misses others once in 2**32. It is there against decay, not against deceit. It
takes half the processor time of SHA-256, which those who train would miss (2.3 against 1.2 GB/s when this was tried,
on a processor with instructions for SHA-256, and beside a disk of 1.2 GB/s).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import numpy as np


def cache_folder() -> Path:
    """Return the folder of what can be made again, hydra_engine in the user's cache; it may not exist yet."""
    # https://specifications.freedesktop.org/basedir-spec/latest/
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):  # a relative one is not valid
        root = os.path.expanduser("~/.cache")
    return Path(root, "hydra_engine")


class Disk:
    """The system calls that write a checkpoint; every method raises the OSError of the call behind it."""

    def create(self, path: Path) -> int:
        """Open a new file for writing; returns its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def set_direct(self, descriptor: int, is_direct: bool) -> bool:
        """Let writes go past the page cache, in whole blocks from whole pages, or not; returns True if they do now."""
        # O_DIRECT, which not every file system has: https://man7.org/linux/man-pages/man2/open.2.html
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        direct = getattr(os, "O_DIRECT", 0)
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | direct if is_direct else flags & ~direct)
        except OSError:
            return False
        return is_direct

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some of the bytes; returns their number."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Wait until all written bytes are on the medium."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file, at once or not at all; a file that has the target's name is replaced."""
        os.replace(source, target)

    def remove_file(self, path: Path) -> None:
        path.unlink()

    def sync_folder(self, path: Path) -> None:
        """Wait until the names in a folder are on the medium."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.EINVAL):  # not every file system can sync a folder
                raise
        finally:
            os.close(descriptor)


# Bytes of a portion: part of the format. Large enough for full speed, small enough for a processor's cache.
PORTION_BYTES = 2**22
# One is filled, one is written, and one stands ready.
_NUM_BUFFERS = 3
# Threads that read files only for their checksums.
NUM_THREADS = min(4, os.cpu_count() or 1)


class Fingerprint(NamedTuple):
    """The size and digest of a file."""

    num_bytes: int
    digest: str  # in hexadecimal


def fingerprint(path: Path, threads: Executor) -> Fingerprint:
    """Return the fingerprint of a whole file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        num_bytes = os.fstat(descriptor).st_size
        starts = range(0, num_bytes, PORTION_BYTES)
        checksums = threads.map(lambda start: _checksum(descriptor, start), starts)
        return Fingerprint(num_bytes, _digest(checksums))
    finally:
        os.close(descriptor)


class WriteBehind(AbstractContextManager["WriteBehind"]):
    """A thread that writes one portion while the next is filled, for one file after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint-write")
        self._buffers: deque[memoryview] = deque()
        self._writes: deque[Future[None]] = deque()

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def buffer(self) -> memoryview:
        """Return memory for a portion that no write uses; raises the error of a write that it waited for."""
        if len(self._buffers) < _NUM_BUFFERS:
            # Whole pages, as the disk wants them; shared, since a fork during a write of private ones may corrupt it
            # (https://man7.org/linux/man-pages/man2/open.2.html, O_DIRECT).
            self._buffers.append(memoryview(mmap.mmap(-1, PORTION_BYTES, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)))
            return self._buffers[-1]
        if len(self._writes) == _NUM_BUFFERS:
            self._writes.popleft().result()
        self._buffers.rotate(-1)
        return self._buffers[-1]

    def start(self, write: Callable[[memoryview], None], portion: memoryview) -> None:
        self._writes.append(self._thread.submit(write, portion))

    def wait(self) -> None:
        """Wait until all is written; raises the error of a write."""
        for each in self.settle():
            each.result()

    def settle(self) -> Iterable[Future[None]]:
        """Wait until nothing is being written; returns all writes, of which some may have failed."""
        writes, self._writes = self._writes, deque()
        futures.wait(writes)
        return writes


class NewFile(AbstractContextManager["NewFile"]):
    """A file being written. Its checksums are of the very bytes that the disk is given."""

    def __init__(self, disk: Disk, path: Path, behind: WriteBehind) -> None:
        self._disk = disk
        self._behind = behind
        self._checksums: list[int] = []
        self._buffer = behind.buffer()
        self._filled_bytes = 0  # of the buffer
        self._descriptor = disk.create(path)

    def __exit__(self, *_: object) -> None:
        self._behind.settle()  # a descriptor that is closed in use may be another file's by then
        self._disk.close(self._descriptor)

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes, which may change from then on."""
        source = memoryview(data)

        def copy_to(target: memoryview, start: int) -> None:
            part = source[start : start + len(target)]
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(part, np.uint8))

        self.fill(len(source), copy_to)

    def fill(self, num_bytes: int, copy_to: Callable[[memoryview, int], None]) -> None:
        """Append bytes: `copy_to(buffer, start)` fills a buffer from `start` on, and waits for no disk."""
        start = 0
        while start < num_bytes:
            end = min(PORTION_BYTES, self._filled_bytes + num_bytes - start)
            copy_to(self._buffer[self._filled_bytes : end], start)
            start += end - self._filled_bytes
            self._filled_bytes = end
            if end == PORTION_BYTES:
                self._put()
                self._buffer = self._behind.buffer()

    def finish(self) -> Fingerprint:
        """Wait until everything is on the medium; returns the file's fingerprint."""
        num_bytes = len(self._checksums) * PORTION_BYTES + self._filled_bytes
        if self._filled_bytes:
            self._put()
        self._behind.wait()
        self._disk.sync(self._descriptor)
        return Fingerprint(num_bytes, _digest(self._checksums))

    def _put(self) -> None:
        portion, self._filled_bytes = self._buffer[: self._filled_bytes], 0
        self._checksums.append(zlib.crc32(portion))
        self._behind.start(self._write_out, portion)

    def _write_out(self, portion: memoryview) -> None:
        # A whole portion goes past the page cache: faster, and it takes no memory from those who train.
        is_direct = len(portion) == PORTION_BYTES and self._disk.set_direct(self._descriptor, True)
        left = portion
        while left:
            try:
                left = left[self._disk.write(self._descriptor, left) :]
            except OSError as error:
                if not is_direct or error.errno != errno.EINVAL:
                    raise
                is_direct = self._disk.set_direct(self._descriptor, False)  # no whole block, after a short write
        if is_direct:
            self._disk.set_direct(self._descriptor, False)


class OldFile(AbstractContextManager["OldFile"]):
    """A file being read, from its beginning to its end."""

    def __init__(self, path: Path) -> None:
        self._checksums: list[int] = []
        self._checksum = 0  # of the portion that has begun
        self._num_bytes = 0
        self._file = path.open("rb")

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, num_bytes: int | None = None) -> bytes:
        """Read the next bytes, or all to the end of the file; raises EOFError if there are fewer."""
        left_bytes = os.fstat(self._file.fileno()).st_size - self._num_bytes
        data = bytearray(left_bytes if num_bytes is None else min(num_bytes, left_bytes + 1))
        self.read_into(memoryview(data))
        return bytes(data)

    def read_into(self, target: memoryview) -> None:
        """Fill memory with the next bytes; raises EOFError if there are fewer."""
        while target:
            part = target[: PORTION_BYTES - self._num_bytes % PORTION_BYTES]
            if self._file.readinto(part) < len(part):
                raise EOFError(f"{self._file.name} ends before {self._num_bytes + len(part)} bytes")
            self._checksum = zlib.crc32(part, self._checksum)
            self._num_bytes += len(part)
            if self._num_bytes % PORTION_BYTES == 0:
                self._checksums.append(self._checksum)
                self._checksum = 0
            target = target[len(part) :]

    def finish(self) -> Fingerprint:
        """Read the rest, and return the fingerprint of the whole file."""
        self.read()
        if self._num_bytes % PORTION_BYTES:
            self._checksums.append(self._checksum)
        return Fingerprint(self._num_bytes, _digest(self._checksums))


def _checksum(descriptor: int, start: int) -> int:
    """Return the checksum of the portion that begins there; a read may be short before the end of a file."""
    checksum, left_bytes = 0, PORTION_BYTES
    while left_bytes and (data := os.pread(descriptor, left_bytes, start)):
        checksum = zlib.crc32(data, checksum)
        left_bytes -= len(data)
        start += len(data)
    return checksum


def _digest(checksums: Iterable[int]) -> str:
    return hashlib.sha256(b"".join(each.to_bytes(4, "little") for each in checksums)).hexdigest()
