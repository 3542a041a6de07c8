"""Saving checkpoints, as `checkpoint.py` draws them: a kill at any moment leaves the newest whole one.

Files are written one after the other: new ones, and links to those that an older checkpoint has already.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from hydra_engine.checkpoints import checkpoint, manifest
from hydra_engine.checkpoints.checkpoint import LATEST, Checkpoint, check_same, has_size
from hydra_engine.checkpoints.manifest import Damaged, Manifest
from hydra_engine.checkpoints.tensors import Tensors, check_tensors, write_tensors
from hydra_engine.errors import CheckpointError
from hydra_engine.system import Disk, Fingerprint, FolderLock, NewFile, OldFile, WriteBehind
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


LOCK = "LOCK"
_TEMPORARY = ".tmp-"
_LEFTOVER = re.compile(r"\.tmp-(checkpoint|LATEST|try)-.*")  # a user may have others


class CheckpointDirectory:
    """Where one run saves; locked from here to `close`, and what another run left unfinished is removed.

    directory: made if it is not there. keep: so many full checkpoints stay (see `NewCheckpoint.commit`). Raises
    CheckpointError where it cannot be written to, or another run does so.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3, disk: Disk | None = None) -> None:
        if keep < 1:
            raise ValueError(f"keep: {keep}, limit: at least 1 checkpoint; a run resumes from it")
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._disk = disk or Disk()
        self._run = secrets.token_hex(4)
        self._damaged: set[str] = set()
        self._newest: Checkpoint | None = None
        self._spoilt: set[Path] = set()  # files of it that cannot be taken over
        self._saving = threading.Lock()
        with disk_errors(self.directory, "cannot be used for checkpoints"):
            new = [each for each in (self.directory, *self.directory.parents) if not each.exists()]
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.directory / LOCK)
        try:
            with disk_errors(self.directory, "cannot be used for checkpoints"):
                for each in new or [self.directory]:  # or another run made it, a moment ago
                    with suppress(PermissionError):  # who may not list it still may write below it
                        self._disk.sync_folder(each.parent)
                self._disk.make_folder(self.directory / f"{_TEMPORARY}try-{self._run}")  # now, not after a day's work
                for path in self._leftovers():
                    self._disk.remove_tree(path)
                self._number = max(
                    (checkpoint.number(path) for path in checkpoint.newest_first(self.directory)), default=0
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> CheckpointDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other runs write here."""
        self._lock.release()

    def load_newest(self) -> Checkpoint | None:
        """As the function of that name; what it found damaged does not count among those to keep.

        New checkpoints may take over files of what it found.
        """
        found = checkpoint.load_newest(self.directory)
        if found is not None:
            newer = takewhile(lambda path: path != found.path, checkpoint.newest_first(self.directory))
            self._damaged.update(path.name for path in newer)
            self._newest = found
            self._spoilt.clear()
        return found

    @property
    def newest(self) -> Checkpoint | None:
        """The newest that was saved or loaded here; a later save may remove it while it is read."""
        return self._newest

    def newest_files(self, task: str) -> frozenset[str]:
        """Files of a task that a new checkpoint could take over from the newest saved or loaded here; none without."""
        base = self._newest
        if base is None or task not in base.task_names:
            return frozenset()
        folder = base.manifest.folders[task]
        return frozenset(
            name
            for name, expected in base.manifest.folder_files(folder).items()
            if base.path / folder / name not in self._spoilt and has_size(base.path / folder / name, expected)
        )

    @contextmanager
    def begin(self) -> Iterator[NewCheckpoint]:
        """A new checkpoint: it is there once it is committed, and nothing is left of it otherwise.

        One at a time: a second thread waits until the first has left the block. Raises CheckpointError where the disk
        does not take it; then nothing has changed, and the next may succeed.
        """
        with self._saving, WriteBehind() as behind:
            if not self._lock.is_held:
                raise ValueError(
                    f"{self.directory} was closed, or belongs to the process that this one was forked from"
                )
            self._number += 1
            path = self.directory / f"checkpoint-{self._number:08d}-{self._run}"
            try:
                new = NewCheckpoint(
                    path, self._temporary(path), self._newest, self._spoilt, self._disk, behind, self._publish
                )
                try:
                    yield new
                finally:
                    new.close()
            finally:
                if self._newest is None or self._newest.path != path:
                    self._undo(path)

    def _publish(self, path: Path, manifest: Manifest) -> tuple[str, ...]:
        """Make it the newest one; what of older ones could not be removed."""
        with disk_errors(self.directory, f"did not take {path.name}"):
            self._disk.rename(self._temporary(path), path)
            self._disk.sync_folder(self.directory)
            self._point_to(path.name)
        self._newest = Checkpoint(path=path, data=manifest.data, messages=(), manifest=manifest)
        self._spoilt.clear()
        with disk_errors(self.directory, f"took {path.name}, but cannot be cleared of older ones"):
            return tuple(self._remove_old(path))

    def _temporary(self, path: Path) -> Path:
        return self.directory / (_TEMPORARY + path.name)

    def _point_to(self, name: str) -> None:
        temporary = self.directory / f"{_TEMPORARY}{LATEST}-{name}"
        descriptor = self._disk.create(temporary)
        try:
            text = memoryview(f"{name}\n".encode())
            while text:
                text = text[self._disk.write(descriptor, text) :]
            self._disk.sync(descriptor)
        finally:
            self._disk.close(descriptor)
        self._disk.rename(temporary, self.directory / LATEST)
        self._disk.sync_folder(self.directory)

    def _undo(self, path: Path) -> None:
        """After a failure: nothing is left, unless LATEST names it already. What resists goes with the next save."""
        with suppress(OSError):
            if path.exists() and checkpoint.latest_name(self.directory) != path.name:
                self._disk.rename(path, self._temporary(path))
        for each in self._leftovers():
            with suppress(OSError):
                self._disk.remove_tree(each)

    def _remove_old(self, newest: Path) -> Iterator[str]:
        """Remove what is older than the last `keep` full ones, and what is older than the newest and not full.

        One that is damaged may have been full: it goes when it is old enough. Gives what resists, in words.
        """
        num_full, has_removed = 0, False
        for path in checkpoint.newest_first(self.directory):
            whole = None if path.name in self._damaged else checkpoint.manifest_if_whole(path)
            is_passing = whole is not None and not whole.is_full
            if path == newest or (num_full < self._keep and not is_passing):
                num_full += whole is not None and whole.is_full
                continue
            try:  # renamed first: one that is removed in part would be taken for a damaged one
                self._disk.rename(path, self._temporary(path))
                has_removed = True
            except OSError as error:
                yield f"{path} is not kept and could not be removed: {error}"
        if has_removed:
            try:
                self._disk.sync_folder(self.directory)
            except OSError as error:
                yield f"{self.directory}: what is not kept could not be removed: {error}"
                return
        for path in self._leftovers():
            try:
                self._disk.remove_tree(path)
            except OSError as error:
                yield f"{path} is left over and could not be removed: {error}"

    def _leftovers(self) -> list[Path]:
        return [path for path in self.directory.iterdir() if _LEFTOVER.fullmatch(path.name)]
