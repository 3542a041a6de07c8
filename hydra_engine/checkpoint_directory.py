"""Saving checkpoints, as `hydra_engine.checkpoint` draws them: a kill at any moment leaves the newest whole one."""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from hydra_engine import checkpoint
from hydra_engine.checkpoint import LATEST, Checkpoint, has_size
from hydra_engine.disk import Disk
from hydra_engine.folder_lock import FolderLock
from hydra_engine.hashed_file import WriteBehind
from hydra_engine.manifest import Manifest
from hydra_engine.new_checkpoint import NewCheckpoint, disk_errors

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
