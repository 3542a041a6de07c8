"""The system calls that change what is on disk: all in one object, so that a test can put in one that fails."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class Disk:
    """What a checkpoint is written with; every method raises OSError as the call behind it does."""

    def create(self, path: Path) -> int:
        """Open a new file for writing; its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def set_direct(self, descriptor: int, is_direct: bool) -> bool:
        """Whether writes go past the page cache from here on: in whole blocks, from whole pages.

        https://man7.org/linux/man-pages/man2/open.2.html: O_DIRECT, which not every file system has.
        """
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        direct = getattr(os, "O_DIRECT", 0)
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | direct if is_direct else flags & ~direct)
        except OSError:
            return False
        return is_direct

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some of the bytes; how many."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Wait until what was written is on the medium."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """The other end of `create`."""
        os.close(descriptor)

    def make_folder(self, path: Path) -> None:
        """A new folder."""
        path.mkdir()

    def link(self, source: Path, target: Path) -> None:
        """One more name for a file."""
        os.link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        """At once or not at all; a file that has the target's name is replaced."""
        os.replace(source, target)

    def remove_file(self, path: Path) -> None:
        """A file or a link."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """An empty folder."""
        path.rmdir()

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

    def remove_tree(self, path: Path) -> None:
        """A file, or a folder with all that is in it; links are not followed."""
        for each in _bottom_up(path):
            if each.is_dir() and not each.is_symlink():
                self.remove_folder(each)
            else:
                self.remove_file(each)


def _bottom_up(path: Path) -> Iterator[Path]:
    if path.is_dir() and not path.is_symlink():
        for each in list(path.iterdir()):
            yield from _bottom_up(each)
    yield path
