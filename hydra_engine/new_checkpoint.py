"""A checkpoint while it is written: its files one after the other, new ones and those that an older one has already."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from hydra_engine import manifest
from hydra_engine.checkpoint import Checkpoint, check_same, has_size
from hydra_engine.disk import Disk
from hydra_engine.errors import CheckpointError
from hydra_engine.hashed_file import Fingerprint, NewFile, OldFile, WriteBehind
from hydra_engine.manifest import Damaged, Manifest
from hydra_engine.tensor_file import Tensors, check_tensors, write_tensors
from partitioners import format_bytes

Content = bytes | Tensors

_MAX_FOLDER_LENGTH = 80  # of the 255 that file systems take
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
# What a file system says that has no hard links, none for this file, or no more of them.
_NO_LINK = (
    errno.EPERM,
    errno.EACCES,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EINVAL,
    errno.EXDEV,
    errno.EMLINK,
)


class Saved(NamedTuple):
    """A checkpoint that is on the medium."""

    path: Path
    messages: tuple[str, ...]  # what of older ones could not be removed
    num_bytes: int  # written, without those that an older one had already


class NewCheckpoint:
    """What `CheckpointDirectory.begin` gives; for one thread, within the block.

    Raises CheckpointError where the disk does not take it; the block is to be left then, and nothing has changed.
    """

    def __init__(
        self,
        path: Path,
        temporary: Path,
        base: Checkpoint | None,
        spoilt: set[Path],
        disk: Disk,
        behind: WriteBehind,
        publish: Callable[[Path, Manifest], tuple[str, ...]],
    ) -> None:
        self._path = path
        self._temporary = temporary
        self._base = base
        self._spoilt = spoilt
        self._disk = disk
        self._behind = behind
        self._publish = publish
        self._folders: dict[str, str] = {}
        self._files: dict[str, Fingerprint] = {}
        self._num_bytes = 0
        self._is_open = True
        with disk_errors(path.parent, f"did not take {path.name}"):
            disk.make_folder(temporary)

    def add(self, task: str, files: Mapping[str, Content], linked: Iterable[str] = ()) -> None:
        """Write a task's files by name: bytes, or tensors by name, which stay as they are until it returns, or move.

        linked: files that are taken over from the newest checkpoint, of `CheckpointDirectory.newest_files`. Raises
        TypeError and ValueError, before anything of the task is written, where the content cannot be saved.
        """
        self._check_open()
        linked = tuple(linked)
        self._check(task, files, linked)
        self._is_open = False  # until the task is whole
        num_bytes = sum(map(_num_bytes, files.values()))
        with disk_errors(
            self._path.parent, f"did not take {self._path.name}, {format_bytes(num_bytes)} of task {task!r}"
        ):
            folder = self._folders[task] = _folder(len(self._folders), task)
            self._disk.make_folder(self._temporary / folder)
            for name, content in files.items():
                self._files[f"{folder}/{name}"] = self._write(self._temporary / folder / name, content)
            for name in linked:
                self._files[f"{folder}/{name}"] = self._take_over(task, name, self._temporary / folder / name)
            self._disk.sync_folder(self._temporary / folder)
        self._is_open = True

    def keep(self, task: str) -> None:
        """Take over a task as the newest checkpoint of this directory has it; raises ValueError where it has none."""
        if self._base is None or task not in self._base.manifest.folders:
            raise ValueError(f"task {task!r} is in no checkpoint that was saved here or loaded; add its files")
        self.add(task, {}, linked=sorted(self._base.files(task)))

    def commit(self, data: Any = None, *, is_full: bool = True) -> Saved:
        """Make it the newest one, with the caller's JSON data, and remove older ones.

        is_full: one of the last `keep`; another goes with the next commit. Raises TypeError where the data cannot be
        saved.
        """
        self._check_open()
        manifest.check_data(data)
        self._is_open = False
        content = Manifest(files=self._files, folders=self._folders, data=data, is_full=is_full)
        with disk_errors(self._path.parent, f"did not take {self._path.name}"):
            self._write(self._temporary / manifest.NAME, content.encode())
            self._disk.sync_folder(self._temporary)
        return Saved(self._path, self._publish(self._path, content), self._num_bytes)

    def close(self) -> None:
        """Nothing is added from here on."""
        self._is_open = False

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError(f"{self._path.name} was committed, left or failed; begin another checkpoint")

    def _check(self, task: str, files: Mapping[str, Content], linked: tuple[str, ...]) -> None:
        if task in self._folders:
            raise ValueError(f"task {task!r} is in {self._path.name} already; add all of its files at once")
        for name in (*files, *linked):
            if not _FILE_NAME.fullmatch(name):
                raise ValueError(
                    f"file {name!r} of task {task!r}, limit: 100 of letters, digits, '_', '-' and '.', not first; "
                    f"rename it"
                )
        if len({*files, *linked}) < len(files) + len(linked):
            raise ValueError(f"task {task!r}: {[*files, *linked]} names a file twice; write it or link it, once")
        base = self._base
        there = frozenset() if base is None or task not in base.task_names else base.files(task)
        if missing := sorted({*linked} - there):
            raise ValueError(f"task {task!r}: {missing} cannot be linked, the newest checkpoint has {sorted(there)}")
        for name, content in files.items():
            if not isinstance(content, bytes):
                check_tensors(f"task {task!r}: {name}", content)

    def _write(self, path: Path, content: Content) -> Fingerprint:
        with NewFile(self._disk, path, self._behind) as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                write_tensors(file, content)
            found = file.finish()
        self._num_bytes += found.num_bytes
        return found

    def _take_over(self, task: str, name: str, target: Path) -> Fingerprint:
        assert self._base is not None
        path = f"{self._base.manifest.folders[task]}/{name}"
        source, expected = self._base.path / path, self._base.manifest.files[path]
        try:
            if not has_size(source, expected):
                raise Damaged(f"it is not there with the {expected.num_bytes} bytes it had")
            try:
                self._disk.link(source, target)
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                self._copy(source, target, expected)
        except Damaged as damage:
            self._spoilt.add(source)
            raise CheckpointError(
                f"{source} cannot be taken over into {self._path.name}: {damage}; earlier checkpoints are as they "
                f"were. Write the file anew, or end the run and resume from the newest whole checkpoint"
            ) from damage
        return expected

    def _copy(self, source: Path, target: Path, expected: Fingerprint) -> None:
        with OldFile(source) as old, NewFile(self._disk, target, self._behind) as new:
            try:
                new.fill(expected.num_bytes, lambda part, _: old.read_into(part))
            except EOFError as error:
                raise Damaged(str(error)) from error
            check_same(source.name, expected, old.finish())
            check_same(source.name, expected, new.finish())
        self._num_bytes += expected.num_bytes


@contextmanager
def disk_errors(directory: Path, what: str) -> Iterator[None]:
    """Raises CheckpointError for each OSError: what the directory did, why, and what to do."""
    try:
        yield
    except OSError as error:
        room = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with suppress(OSError):
                room = f" ({format_bytes(shutil.disk_usage(directory).free)} free now)"
        raise CheckpointError(
            f"{directory} {what}: {error}{room}; earlier checkpoints are as they were. Make room there, make it a "
            f"directory that can be written to, or give another one"
        ) from error


def _num_bytes(content: Content) -> int:
    return len(content) if isinstance(content, bytes) else sum(tensor.nbytes for tensor in content.values())


def _folder(k: int, task: str) -> str:
    """A task's folder: its name as far as every file system takes it."""
    return f"{k}-{re.sub(r'[^A-Za-z0-9_.-]', '_', task)}"[:_MAX_FOLDER_LENGTH]
