"""Saving checkpoints, as `hydra_engine.checkpoint` draws them: a kill at any moment leaves the newest whole one."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hydra_engine import checkpoint, manifest
from hydra_engine.checkpoint import LATEST, STATE, STATE_TENSORS, WEIGHTS, Checkpoint, TaskContent
from hydra_engine.disk import Disk
from hydra_engine.errors import CheckpointError
from hydra_engine.folder_lock import FolderLock
from hydra_engine.hashed_file import Fingerprint, NewFile, WriteBehind
from hydra_engine.manifest import Manifest
from hydra_engine.nested import flatten
from hydra_engine.tensor_file import METADATA, check_tensor, write_tensors
from partitioners import format_bytes

LOCK = "LOCK"
_Content = Mapping[str, torch.Tensor] | bytes

_TEMPORARY = ".tmp-"
_LEFTOVER = re.compile(r"\.tmp-(checkpoint|LATEST|try)-.*")  # a user may have others
_MAX_FOLDER_LENGTH = 80  # of the 255 that file systems take


class Saved(NamedTuple):
    """A checkpoint that is on the medium."""

    path: Path
    messages: tuple[str, ...]  # what of older ones could not be removed


class CheckpointDirectory:
    """Where one run saves; locked from here to `close`, and what another run left unfinished is removed.

    directory: made if it is not there. keep: so many whole checkpoints stay. Raises CheckpointError where it cannot be
    written to, or another run does so.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3, disk: Disk | None = None) -> None:
        if keep < 1:
            raise ValueError(f"keep: {keep}, limit: at least 1 checkpoint; a run resumes from it")
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._disk = disk or Disk()
        self._run = secrets.token_hex(4)
        self._damaged: set[str] = set()
        self._saving = threading.Lock()
        with self._explained("cannot be used for checkpoints"):
            new = [each for each in (self.directory, *self.directory.parents) if not each.exists()]
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.directory / LOCK)
        try:
            with self._explained("cannot be used for checkpoints"):
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
        """As the function of that name; what it found damaged does not count among those to keep."""
        found = checkpoint.load_newest(self.directory)
        if found is not None:
            newer = takewhile(lambda path: path != found.path, checkpoint.newest_first(self.directory))
            self._damaged.update(path.name for path in newer)
        return found

    def save(self, tasks: Mapping[str, TaskContent], data: Any = None) -> Saved:
        """Write a checkpoint of some tasks and the caller's JSON data, and remove older ones.

        Tensors stay as they are until it returns. Raises CheckpointError where the disk does not take it, and TypeError
        where the content cannot be saved; then nothing has changed, and the next save may succeed. One at a time: a
        second thread waits.
        """
        contents = self._contents(tasks)
        manifest.check_data(data)
        with self._saving:
            return self._save(contents, data)

    def _save(self, contents: Mapping[str, Mapping[str, _Content]], data: Any) -> Saved:
        if not self._lock.is_held:
            raise ValueError(f"{self.directory} was closed, or belongs to the process that this one was forked from")
        self._number += 1
        path = self.directory / f"checkpoint-{self._number:08d}-{self._run}"
        temporary = self.directory / (_TEMPORARY + path.name)
        num_bytes = sum(map(_num_bytes, (each for parts in contents.values() for each in parts.values())))
        with self._explained(f"did not take {path.name} of {format_bytes(num_bytes)}"):
            try:
                self._write(temporary, contents, data)
                self._disk.rename(temporary, path)
                self._disk.sync_folder(self.directory)
                self._point_to(path.name)
            except BaseException:
                self._undo(path)
                raise
        with self._explained(f"took {path.name}, but cannot be cleared of older ones"):
            return Saved(path, tuple(self._remove_old()))

    def _contents(self, tasks: Mapping[str, TaskContent]) -> dict[str, dict[str, _Content]]:
        """What is in each file of each task; raises TypeError before anything is written."""
        contents: dict[str, dict[str, _Content]] = {}
        for name, task in tasks.items():
            for key, value in task.weights.items():
                if not isinstance(key, str):
                    raise TypeError(f"weight {key!r} of task {name!r}: its name is a {type(key).__name__}, not a str")
                if key == METADATA:
                    raise ValueError(
                        f"a weight of task {name!r} is named {key!r}, which the safetensors format keeps for itself; "
                        f"rename it"
                    )
                check_tensor(f"weight {key!r} of task {name!r}", value)
            tree, tensors = flatten(task.state, f"task {name!r}: state")
            text = json.dumps(tree, allow_nan=False).encode()
            contents[name] = {WEIGHTS: task.weights, STATE_TENSORS: tensors, STATE: text}
        return contents

    def _write(self, folder: Path, contents: Mapping[str, Mapping[str, _Content]], data: Any) -> None:
        folders = {name: _folder(k, name) for k, name in enumerate(contents)}
        files: dict[str, Fingerprint] = {}
        with WriteBehind() as behind:
            self._disk.make_folder(folder)
            for name, parts in contents.items():
                self._disk.make_folder(folder / folders[name])
                for file_name, content in parts.items():
                    path = f"{folders[name]}/{file_name}"
                    files[path] = self._write_file(folder / path, content, behind)
                self._disk.sync_folder(folder / folders[name])
            text = Manifest(files=files, folders=folders, data=data).encode()
            self._write_file(folder / manifest.NAME, text, behind)
            self._disk.sync_folder(folder)

    def _write_file(self, path: Path, content: _Content, behind: WriteBehind) -> Fingerprint:
        with NewFile(self._disk, path, behind) as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                write_tensors(file, content)
            return file.finish()

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
                self._disk.rename(path, self.directory / (_TEMPORARY + path.name))
        for each in self._leftovers():
            with suppress(OSError):
                self._disk.remove_tree(each)

    def _remove_old(self) -> Iterator[str]:
        """Remove what is older than the last `keep` whole ones; what could not be, in words."""
        num_whole, has_removed = 0, False
        for path in checkpoint.newest_first(self.directory):
            if num_whole < self._keep:
                num_whole += path.name not in self._damaged and checkpoint.looks_whole(path)
                continue
            try:  # renamed first: one that is removed in part would be taken for a damaged one
                self._disk.rename(path, self.directory / (_TEMPORARY + path.name))
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

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            room = ""
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                with suppress(OSError):
                    room = f" ({format_bytes(shutil.disk_usage(self.directory).free)} free now)"
            raise CheckpointError(
                f"{self.directory} {what}: {error}{room}; earlier checkpoints are as they were. Make room there, make "
                f"it a directory that can be written to, or give another one"
            ) from error


def _num_bytes(content: _Content) -> int:
    if isinstance(content, bytes):
        return len(content)
    return sum(tensor.numel() * tensor.element_size() for tensor in content.values())


def _folder(k: int, task: str) -> str:
    """A task's folder: its name as far as every file system takes it."""
    return f"{k}-{re.sub(r'[^A-Za-z0-9_.-]', '_', task)}"[:_MAX_FOLDER_LENGTH]
