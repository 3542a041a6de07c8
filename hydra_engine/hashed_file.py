"""Files whose checksum is taken while they are written or read: no byte is fetched again just for that.

A file's digest is the SHA-256 of the CRC-32s of its portions, four bytes each, the lowest first. A CRC notices every
error within 32 consecutive bits, and misses others once in 2**32. It is there against decay, not against deceit, and
takes half the processor time of SHA-256, which those who train would miss (2.3 against 1.2 GB/s where this was tried,
on a processor with instructions for SHA-256, and beside a disk of 1.2 GB/s).
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import NamedTuple

from hydra_engine.disk import Disk

# Part of the format. Large enough for full speed, small enough for a processor's cache.
PORTION_BYTES = 2**22
# What is smaller is gathered: a system call for each bias would cost more than its bytes.
SMALL_BYTES = 2**16
# Enough for a good disk; more would only take processors from those who train.
NUM_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))


class Fingerprint(NamedTuple):
    """What a file is known by."""

    num_bytes: int
    digest: str  # in hexadecimal


def fingerprint(path: Path, threads: Executor) -> Fingerprint:
    """Of a whole file, which nobody wants to read just now."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        num_bytes = os.fstat(descriptor).st_size
        starts = range(0, num_bytes, PORTION_BYTES)
        checksums = threads.map(lambda start: zlib.crc32(os.pread(descriptor, PORTION_BYTES, start)), starts)
        return Fingerprint(num_bytes, _digest(checksums))
    finally:
        os.close(descriptor)


class NewFile:
    """A file being written, whose checksums are taken in threads: they may lag behind, while the disk syncs."""

    def __init__(self, disk: Disk, path: Path, threads: Executor) -> None:
        self._disk = disk
        self._threads = threads
        self._checksums: list[Future[int]] = []
        self._portion: list[memoryview | bytearray] = []
        self._room_bytes = PORTION_BYTES  # in this portion
        self._descriptor = disk.create(path)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._disk.close(self._descriptor)

    def write(self, data: memoryview | bytes, *, is_copy: bool = False) -> None:
        """Append bytes, which stay as they are until `finish`.

        is_copy: nobody else holds them, so the checksum is waited for: copies must not pile up before a slow one.
        """
        left = memoryview(data)
        while left:
            part, left = left[: self._room_bytes], left[self._room_bytes :]
            self._add(part)
            self._room_bytes -= len(part)
            if self._room_bytes == 0:
                self._put()
        if is_copy and self._checksums:
            self._checksums[-1].result()

    def finish(self) -> Fingerprint:
        """Wait until everything is on the medium, with its checksum taken."""
        num_bytes = (len(self._checksums) + 1) * PORTION_BYTES - self._room_bytes
        if self._portion:
            self._put()
        self._disk.sync(self._descriptor)
        return Fingerprint(num_bytes, _digest(each.result() for each in self._checksums))

    def _add(self, part: memoryview) -> None:
        if len(part) >= SMALL_BYTES:
            self._portion.append(part)
            return
        gathered = self._portion[-1] if self._portion else None
        if not isinstance(gathered, bytearray):
            gathered = bytearray()
            self._portion.append(gathered)
        gathered += part

    def _put(self) -> None:
        portion, self._portion, self._room_bytes = self._portion, [], PORTION_BYTES
        self._checksums.append(self._threads.submit(_crc, portion))
        for part in portion:
            left = memoryview(part)
            while left:
                left = left[self._disk.write(self._descriptor, left) :]


class OldFile:
    """A file being read, from its beginning to its end."""

    def __init__(self, path: Path) -> None:
        self._checksums: list[int] = []
        self._checksum = 0  # of the portion that has begun
        self._num_bytes = 0
        self._file = path.open("rb")

    def __enter__(self) -> OldFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, num_bytes: int | None = None) -> bytes:
        """The next bytes, or all that are left; raises EOFError where there are not so many."""
        left_bytes = os.fstat(self._file.fileno()).st_size - self._num_bytes
        data = bytearray(left_bytes if num_bytes is None else min(num_bytes, left_bytes + 1))
        self.read_into(memoryview(data))
        return bytes(data)

    def read_into(self, target: memoryview) -> None:
        """Fill memory with the next bytes; raises EOFError where there are not so many."""
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
        """Of the whole file: what nobody wanted is read as well."""
        self.read()
        if self._num_bytes % PORTION_BYTES:
            self._checksums.append(self._checksum)
        return Fingerprint(self._num_bytes, _digest(self._checksums))


def _crc(parts: Iterable[bytes | bytearray | memoryview]) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _digest(checksums: Iterable[int]) -> str:
    return hashlib.sha256(b"".join(each.to_bytes(4, "little") for each in checksums)).hexdigest()
