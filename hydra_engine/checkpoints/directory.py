"""Saving checkpoints as `checkpoint.md` draws them: a kill at any moment leaves the newest whole one.

Files are written one after the other. A file that has not changed since the newest checkpoint is only named again.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import threading
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from hydra_engine.checkpoints import checkpoint
from hydra_engine.checkpoints.checkpoint import FILES, Checkpoint
from hydra_engine.checkpoints.manifest import Damaged, Manifest, StoredFile, check_data
from hydra_engine.checkpoints.tensors import Tensors, are_written, check_tensors, write_tensors
from hydra_engine.errors import CheckpointError
from hydra_engine.system import Disk, FolderLock, NewFile, OldFile, WriteBehind
from partitioners import format_bytes

Content = bytes | Tensors

LOCK = "LOCK"
_MAX_TASK_LENGTH = 80  # of the 255 characters that file systems take
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
_OURS = re.compile(r"\d{8,}-[0-9a-f]{8}([.-].*)?")  # a user may keep other files beside ours


class Committed(NamedTuple):
    """A checkpoint that is on the medium."""

    path: Path
    messages: tuple[str, ...]  # older ones that could not be removed
    num_bytes: int  # that were written


class NewCheckpoint:
    """The checkpoint that `CheckpointDirectory.begin` gives; for one thread, within the block.

    stem: the beginning of its files' names. Files of the newest checkpoint may be named again. Raises CheckpointError
    if the disk does not take it. Leave the block then: no earlier checkpoint has changed.
    """

    def __init__(self, directory: CheckpointDirectory, stem: str, behind: WriteBehind) -> None:
        self.path = directory.directory / f"checkpoint-{stem}.json"
        self.draft = directory.directory / FILES / f"{stem}.json"  # the manifest before it has its place
        self._base = directory.newest_tasks
        self._directory = directory
        self._behind = behind
        self._tasks: dict[str, dict[str, StoredFile]] = {}
        self._num_bytes = 0
        self._is_open = True

    def add(
        self,
        task: str,
        files: Mapping[str, Content],
        unchanged: Iterable[str] = (),
        lasting: Container[str] = (),
    ) -> None:
        """Write a task's files by name: bytes, or tensors by name, which stay as they are until it returns, or move.

        unchanged: of `newest_files`. lasting: names of tensors that do not move, and that another task may have as
        well, or this one in an earlier run: a file that has them already is named again. Raises TypeError or
        ValueError, before a byte is written, if it cannot be saved.
        """
        self._check_open()
        unchanged = tuple(unchanged)
        self._check(task, files, unchanged)
        self._is_open = False  # until the task is whole
        num_bytes = sum(map(_num_bytes, files.values()))
        with self._disk_errors(f", {format_bytes(num_bytes)} of task {task!r}"):
            cleaned = re.sub(r"[^A-Za-z0-9_.-]", "_", task)[:_MAX_TASK_LENGTH]
            prefix = f"{self.draft.stem}-{len(self._tasks)}-{cleaned}"
            stored = {
                name: (self._found(name, content) if name in lasting else None)
                or self._write(f"{prefix}-{name}", content)
                for name, content in files.items()
            }
            stored |= {name: self._named_again(task, name) for name in unchanged}
        self._tasks[task] = stored
        self._is_open = True

    def keep(self, task: str) -> None:
        """Take a task over as the newest checkpoint of this directory has it; raises ValueError if it has none."""
        if task not in self._base:
            raise ValueError(f"task {task!r} is in no checkpoint that was saved here or loaded; add its files")
        self.add(task, {}, sorted(self._base[task]))

    def copy(self, task: str, source: str) -> None:
        """Name the files that the newest checkpoint has of one task as those of another too, which is not in it."""
        self._check_open()
        self._tasks[task] = {name: self._named_again(source, name) for name in sorted(self._base[source])}

    def commit(self, data: Any = None) -> Committed:
        """Make it the newest checkpoint, with the caller's JSON data (else TypeError), and remove those not kept."""
        self._check_open()
        check_data(data)
        self._is_open = False
        manifest = Manifest(tasks=self._tasks, data=data)
        with self._disk_errors():
            self._write(self.draft.name, manifest.encode())
            self._directory.disk.sync_folder(self.draft.parent)
        return Committed(self.path, self._directory.publish(self.path, manifest), self._num_bytes)

    def close(self) -> None:
        self._is_open = False

    def _disk_errors(self, what: str = "") -> AbstractContextManager[None]:
        return disk_errors(self.path.parent, f"did not take {self.path.name}{what}")

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError(f"{self.path.name} was committed, left or failed; begin another checkpoint")

    def _check(self, task: str, files: Mapping[str, Content], unchanged: tuple[str, ...]) -> None:
        if task in self._tasks:
            raise ValueError(f"task {task!r} is in {self.path.name} already; add all of its files at once")
        for name in (*files, *unchanged):
            if not _FILE_NAME.fullmatch(name):
                raise ValueError(
                    f"file {name!r} of task {task!r}, limit: 100 of letters, digits, '_', '-' and '.', not first; "
                    f"rename it"
                )
        if len({*files, *unchanged}) < len(files) + len(unchanged):
            raise ValueError(
                f"task {task!r}: {[*files, *unchanged]} names a file twice; write it or take it over, once"
            )
        there = self._base.get(task, {})
        if missing := sorted({*unchanged} - there.keys()):
            raise ValueError(
                f"task {task!r}: {missing} cannot be taken over, the newest checkpoint has {sorted(there)}"
            )
        for name, content in files.items():
            if not isinstance(content, bytes):
                check_tensors(f"task {task!r}: {name}", content)

    def _write(self, name: str, content: Content) -> StoredFile:
        with NewFile(self._directory.disk, self.draft.parent / name, self._behind) as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                write_tensors(file, content)
            found = file.finish()
        self._num_bytes += found.num_bytes
        return StoredFile(name, *found)

    def _found(self, name: str, content: Any) -> StoredFile | None:
        """Return a file of this name of any task that has these tensors, and is whole; None if there is none."""
        tasks = (*self._base.values(), *self._tasks.values())
        for stored in dict.fromkeys(files[name] for files in tasks if name in files):
            with suppress(OSError, EOFError), OldFile(self.draft.parent / stored.file) as file:
                if are_written(file, content) and file.finish() == (stored.num_bytes, stored.digest):
                    return stored
        return None

    def _named_again(self, task: str, name: str) -> StoredFile:
        stored = self._base[task][name]
        if not _has_size(self.draft.parent, stored):
            raise CheckpointError(
                f"{stored.file} cannot be taken over into {self.path.name}: it is not there with the "
                f"{stored.num_bytes} bytes it had; earlier checkpoints are as they were. Write the file anew, or end "
                f"the run and resume from the newest whole checkpoint"
            )
        return stored


@contextmanager
def disk_errors(directory: Path, what: str) -> Iterator[None]:
    """Raise CheckpointError for each OSError: what the directory did, why, and what to do."""
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


def _has_size(folder: Path, stored: StoredFile) -> bool:
    """Return True if a file that a manifest names is there with its size: a check that each save can afford."""
    try:
        return (folder / stored.file).stat().st_size == stored.num_bytes
    except OSError:
        return False


class CheckpointDirectory:
    """The directory that one run saves in. It is locked until `close`, and the leavings of other runs are removed.

    directory: made if it is not there. keep: the number of newest checkpoints that stay. Raises CheckpointError if the
    directory cannot be written to, or another run writes to it.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3, disk: Disk | None = None) -> None:
        if keep < 1:
            raise ValueError(f"keep: {keep}, limit: at least 1 checkpoint; a run resumes from it")
        self.directory = Path(directory).absolute()
        self._files = self.directory / FILES
        self._keep = keep
        self.disk = disk or Disk()
        self._run = secrets.token_hex(4)
        self._damaged: set[Path] = set()
        self.newest: Checkpoint | None = None  # saved or loaded here; a later save may remove it while it is read
        self._saving = threading.Lock()
        with disk_errors(self.directory, "cannot be used for checkpoints"):
            new = [each for each in (self._files, self.directory, *self.directory.parents) if not each.exists()]
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.directory / LOCK)
            try:
                self._open(new)
            except BaseException:
                self.close()
                raise

    def _open(self, new: list[Path]) -> None:
        """Put folders that are new on the medium, try to write, and remove the leavings of other runs."""
        if not self._files.exists():
            self.disk.make_folder(self._files)
        for each in new or [self.directory]:  # or another run made it, a moment ago
            with suppress(PermissionError):  # a user who may not list it still may write below it
                self.disk.sync_folder(each.parent)
        self._try()
        self._remove_unnamed()
        self._number = max((checkpoint.number(path) for path in checkpoint.newest_first(self.directory)), default=0)

    def _try(self) -> None:
        """Create a file, and rename it as a manifest is, so that it fails now, and not after a day's work."""
        attempt, renamed = (folder / self._stem(0) for folder in (self._files, self.directory))
        self.disk.close(self.disk.create(attempt))
        try:
            self.disk.rename(attempt, renamed)
        except OSError as error:
            self.disk.remove_file(attempt)
            if error.errno != errno.EXDEV:
                raise
            raise CheckpointError(
                f"{self.directory} cannot be used for checkpoints: {error}; {FILES}/ is on another file system than "
                f"the directory, into which each manifest is renamed; move it there, or give another directory"
            ) from error
        self.disk.remove_file(renamed)

    def __enter__(self) -> CheckpointDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._lock.release()

    def load_newest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint, whose files new ones may name again; newer ones do not count as kept."""
        found = checkpoint.load_newest(self.directory)
        if found is not None:
            self._damaged.update(takewhile(lambda path: path != found.path, checkpoint.newest_first(self.directory)))
            self.newest = found
        return found

    @property
    def newest_tasks(self) -> dict[str, dict[str, StoredFile]]:
        """The files of each task in the newest checkpoint that was saved or loaded, by name."""
        return {} if self.newest is None else self.newest.manifest.tasks

    def newest_files(self, task: str) -> frozenset[str]:
        """Return the files of a task that a new checkpoint could take over from the newest that was saved or loaded."""
        stored = self.newest_tasks.get(task, {})
        return frozenset(name for name, each in stored.items() if _has_size(self._files, each))

    @contextmanager
    def begin(self) -> Iterator[NewCheckpoint]:
        """Begin a new checkpoint, one thread at a time: nothing stays of it unless it is committed.

        Raises CheckpointError if the disk does not take it; earlier ones have not changed then.
        """
        with self._saving, WriteBehind() as behind:
            if not self._lock.is_held:
                raise ValueError(
                    f"{self.directory} was closed, or belongs to the process that this one was forked from"
                )
            self._number += 1
            stem = self._stem(self._number)
            new = NewCheckpoint(self, stem, behind)
            try:
                yield new
            finally:
                new.close()
                with suppress(OSError):
                    if not new.path.exists():
                        self._remove(each for each in self._files.iterdir() if each.name.startswith(stem))

    def _stem(self, number: int) -> str:
        return f"{number:08d}-{self._run}"

    def publish(self, path: Path, manifest: Manifest) -> tuple[str, ...]:
        """Make a checkpoint the newest one; returns, in words, which older ones could not be removed."""
        with disk_errors(self.directory, f"did not take {path.name}"):
            self.disk.rename(self._files / path.name.removeprefix("checkpoint-"), path)
            self.disk.sync_folder(self.directory)
        self.newest = Checkpoint(path=path, manifest=manifest)
        with disk_errors(self.directory, f"took {path.name}, but cannot be cleared of older ones"):
            return tuple(self._remove_old())

    def _remove_old(self) -> list[str]:
        """Remove checkpoints that are older than the last `keep` whole ones; returns what resists, in words."""
        num_whole, old = 0, []
        for path in checkpoint.newest_first(self.directory):
            if num_whole == self._keep:
                old.append(path)
            elif path not in self._damaged:
                with suppress(Damaged, CheckpointError):
                    num_whole += all(_has_size(self._files, each) for each in checkpoint.read_manifest(path).files)
        messages = self._remove(old)
        if old:
            try:  # a manifest that came back after a loss of power would name files that are gone
                self.disk.sync_folder(self.directory)
            except OSError as error:
                return [*messages, f"{self.directory}: files that are not needed could not be removed: {error}"]
        return messages + self._remove_unnamed()

    def _remove_unnamed(self) -> list[str]:
        """Remove files that no manifest names; returns what resists, in words."""
        try:
            manifests = [checkpoint.read_manifest(path) for path in checkpoint.newest_first(self.directory)]
        except (Damaged, CheckpointError):
            return []  # nobody can tell what it names: its files stay as long as it does
        named = {stored.file for manifest in manifests for stored in manifest.files}
        return self._remove(
            path for path in self._files.iterdir() if _OURS.fullmatch(path.name) and path.name not in named
        )

    def _remove(self, paths: Iterable[Path]) -> list[str]:
        messages = []
        for path in list(paths):
            try:
                self.disk.remove_file(path)
            except OSError as error:
                messages.append(f"{path} is not needed and could not be removed: {error}")
        return messages
