"""Saving checkpoints as `checkpoint.md` draws them: a kill at any moment leaves the newest whole one.

Files are written one after the other. A part that has not changed since the newest checkpoint is only named again.
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
from hydra_engine.checkpoints.checkpoint import FILES, Checkpoint, check_file
from hydra_engine.checkpoints.manifest import Damaged, Manifest, Parts, StoredFile
from hydra_engine.checkpoints.tensors import MovingTensor, Tensors, are_written, in_files, write_tensors
from hydra_engine.errors import CheckpointError
from hydra_engine.system import Disk, FolderLock
from partitioners import format_bytes

LOCK = "LOCK"
_MAX_TASK_LENGTH = 80  # of the 255 characters that file systems take
# A user may keep other files beside ours, and beside what safetensors' library was writing as it was killed.
_OURS = re.compile(r"\d{8,}-[0-9a-f]{8}([.-].*)?|\.tmp[A-Za-z0-9]{6}")


class Committed(NamedTuple):
    """A checkpoint that is on the medium."""

    path: Path
    messages: tuple[str, ...]  # older ones that could not be removed
    num_bytes: int  # that were written


class NewCheckpoint:
    """The checkpoint that `CheckpointDirectory.begin` gives; for one thread, within the block.

    stem: the beginning of its files' names. Parts of the newest checkpoint may be named again. Raises CheckpointError
    if the disk does not take it. Leave the block then: no earlier checkpoint has changed.
    """

    def __init__(self, directory: CheckpointDirectory, stem: str) -> None:
        self.path = directory.directory / f"checkpoint-{stem}.json"
        self.draft = directory.directory / FILES / f"{stem}.json"  # the manifest before it has its place
        self._base = directory.newest_tasks
        self._directory = directory
        self._tasks: dict[str, Parts] = {}
        self._num_bytes = 0

    def add(
        self, task: str, parts: Mapping[str, Tensors], unchanged: Iterable[str] = (), lasting: Container[str] = ()
    ) -> None:
        """Write a task's parts, tensors by name, which stay as they are until it returns, or move.

        unchanged: of `newest_parts`. lasting: parts that another task may have as well, or this
        one in an earlier run: files that have it already are named again.
        """
        num_bytes = sum(each.nbytes for tensors in parts.values() for each in tensors.values())
        cleaned = re.sub(r"[^A-Za-z0-9_.-]", "_", task)[:_MAX_TASK_LENGTH]
        prefix = f"{self.draft.stem}-{len(self._tasks)}-{cleaned}"
        with self._disk_errors(f", {format_bytes(num_bytes)} of task {task!r}"):
            written = {
                part: (self._found(part, tensors) if part in lasting else None)
                or self._write(f"{prefix}-{part}", tensors)
                for part, tensors in parts.items()
            }
        self.keep(task, unchanged)
        self._tasks[task] |= written

    def keep(self, task: str, parts: Iterable[str] | None = None, source: str | None = None) -> None:
        """Name parts again that the newest checkpoint has of a task, or of another one, `source`; None: all."""
        base = self._base.get(task if source is None else source, {})
        self._tasks[task] = {part: base[part] for part in (base if parts is None else parts)}
        for stored in (each for files in self._tasks[task].values() for each in files):
            if not _has_size(self.draft.parent, stored):
                raise CheckpointError(
                    f"{stored.file} cannot be taken over into {self.path.name}: it is not there with the "
                    f"{stored.num_bytes} bytes it had; earlier checkpoints are as they were. Write the file anew, or "
                    f"end the run and resume from the newest whole checkpoint"
                )

    def commit(self, data: Any = None) -> Committed:
        """Make it the newest checkpoint, with the caller's JSON data, and remove those not kept."""
        manifest, disk = Manifest(tasks=self._tasks, data=data), self._directory.disk
        content = manifest.encode()
        with self._disk_errors():
            disk.write(self.draft, lambda path: path.write_bytes(content))
            disk.sync(self.draft)
            disk.sync(self.draft.parent)
        return Committed(self.path, self._directory.publish(self.path, manifest), self._num_bytes + len(content))

    def _disk_errors(self, what: str = "") -> AbstractContextManager[None]:
        return disk_errors(self.path.parent, f"did not take {self.path.name}{what}")

    def _write(self, stem: str, tensors: Tensors) -> tuple[StoredFile, ...]:
        stored = []
        for k, each in enumerate(in_files(tensors)):
            path = self.draft.parent / f"{stem}{f'-{k}' if k else ''}.safetensors"
            crc32 = write_tensors(self._directory.disk, path, each)
            self._directory.disk.sync(path)
            stored.append(StoredFile(path.name, path.stat().st_size, crc32))
            self._num_bytes += stored[-1].num_bytes
        return tuple(stored)

    def _found(self, part: str, tensors: Any) -> tuple[StoredFile, ...] | None:
        """Return files of this part of any task that have these tensors, and are whole; None if there are none."""
        tasks = (*self._base.values(), *self._tasks.values())
        values = {name: each.now() if isinstance(each, MovingTensor) else each for name, each in tensors.items()}
        for stored in dict.fromkeys(parts[part] for parts in tasks if part in parts):
            with suppress(Exception):  # damaged, in whatever way
                if are_written([self.draft.parent / each.file for each in stored], values):
                    for each in stored:
                        check_file(self.path, each)
                    return stored
        return None


@contextmanager
def disk_errors(directory: Path, what: str) -> Iterator[None]:
    """Raise CheckpointError for each OSError: what the directory did, why, and what to do."""
    try:
        yield
    except OSError as error:
        room = ""
        with suppress(OSError):
            room = f" ({format_bytes(shutil.disk_usage(directory).free)} free now)"
        raise CheckpointError(
            f"{directory} {what}: {error}{room}; earlier checkpoints are as they were. Make room there, make it a "
            f"directory that can be written to, or give another one"
        ) from error


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
                self.disk.sync(each.parent)
        self._try()
        self._remove_unnamed()
        self._number = max((checkpoint.number(path) for path in checkpoint.newest_first(self.directory)), default=0)

    def _try(self) -> None:
        """Create a file, and rename it as a manifest is, so that it fails now, and not after a day's work."""
        attempt, renamed = (folder / self._stem(0) for folder in (self._files, self.directory))
        self.disk.write(attempt, lambda _: None)
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
    def newest_tasks(self) -> dict[str, Parts]:
        """The parts of each task in the newest checkpoint that was saved or loaded."""
        return {} if self.newest is None else self.newest.manifest.tasks

    def newest_parts(self, task: str) -> frozenset[str]:
        """Return the parts of a task that a new checkpoint could take over from the newest that was saved or loaded."""
        parts = self.newest_tasks.get(task, {})
        return frozenset(part for part, files in parts.items() if all(_has_size(self._files, each) for each in files))

    @contextmanager
    def begin(self) -> Iterator[NewCheckpoint]:
        """Begin a new checkpoint, one thread at a time: nothing stays of it unless it is committed.

        Raises CheckpointError if the disk does not take it; earlier ones have not changed then.
        """
        with self._saving:
            if not self._lock.is_held:
                raise ValueError(
                    f"{self.directory} was closed, or belongs to the process that this one was forked from"
                )
            self._number += 1
            new = NewCheckpoint(self, self._stem(self._number))
            try:
                yield new
            finally:
                with suppress(OSError):
                    if not new.path.exists():
                        self._remove(each for each in self._files.iterdir() if each.name.startswith(new.draft.stem))

    def _stem(self, number: int) -> str:
        return f"{number:08d}-{self._run}"

    def publish(self, path: Path, manifest: Manifest) -> tuple[str, ...]:
        """Make a checkpoint the newest one; returns, in words, which older ones could not be removed."""
        with disk_errors(self.directory, f"did not take {path.name}"):
            self.disk.rename(self._files / path.name.removeprefix("checkpoint-"), path)
            self.disk.sync(self.directory)
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
                self.disk.sync(self.directory)
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
