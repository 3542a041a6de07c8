"""Checkpoints on disk. Each is whole or not there at all, whatever ends the process, and no byte is used unchecked.

A save writes new files and a manifest into files/, and then renames the manifest into its place. Only then are older
manifests removed, and then the files that no manifest names. Each of these is on the medium before the next begins. No
name is ever used twice. `checkpoint.md` has the format, and draws the directory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hydra_engine.checkpoints.manifest import Damaged, Manifest, Parts, StoredFile
from hydra_engine.checkpoints.nested import unflatten
from hydra_engine.checkpoints.tensors import read_tensors
from hydra_engine.errors import CheckpointError
from hydra_engine.system import checksum

FILES = "files"  # the folder of all content

_NUM_THREADS = min(4, os.cpu_count() or 1)  # that check files
_NUM_TRIES = 10  # to find a checkpoint that a run does not remove at the same moment
_NAME = re.compile(r"checkpoint-(\d{8,})-([0-9a-f]{8})\.json")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was whole when it was opened; messages: the reasons why newer ones are not used."""

    path: Path
    manifest: Manifest
    messages: tuple[str, ...] = ()

    @property
    def data(self) -> Any:
        return self.manifest.data

    @property
    def task_names(self) -> tuple[str, ...]:
        """The tasks in the order in which they were saved."""
        return tuple(self.manifest.tasks)

    def read_tensors(
        self, task: str, part: str, into: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Read the tensors of a part by name into new memory, and check them again meanwhile.

        into: tensors in DRAM that take the values, so that there is no second copy. Raises ValueError, before one is
        written to, if names, types or shapes differ. Raises CheckpointError if a file changed, was removed by a later
        save, or was never there; the tensors hold any values then.
        """
        parts = self.parts(task)
        if part not in parts:
            raise CheckpointError(
                f"{self.path} holds no part {part!r} of task {task!r}, but {', '.join(map(repr, parts)) or 'none'}; "
                f"read one of those"
            )
        files = parts[part]
        try:
            try:
                tensors, found = read_tensors([place(self.path, each) for each in files], into)
            except Exception:  # the content makes no sense: was it altered?
                for each in files:
                    check_file(self.path, each)
                raise
            for each, crc32 in zip(files, found, strict=True):
                check_file(self.path, each, crc32)
        except Damaged as error:
            raise CheckpointError(f"{self.path} changed after it was opened: {error}; open the newest again") from error
        return tensors

    def read_nested(self, task: str, part: str) -> Any:
        """Read the state that was saved as `hydra_engine.checkpoints.nested.flatten` gave it."""
        return unflatten(self.read_tensors(task, part))

    def parts(self, task: str) -> Parts:
        """Return the files of a task by part; raises CheckpointError if the checkpoint holds no such task."""
        if task not in self.manifest.tasks:
            raise CheckpointError(
                f"{self.path} holds no task {task!r}, but {', '.join(map(repr, self.task_names)) or 'none'}; name the "
                f"task as it was when it was saved"
            )
        return self.manifest.tasks[task]


class _Removed(Exception):
    """A run has saved a newer checkpoint and removed this one."""


def load_newest(directory: str | os.PathLike[str]) -> Checkpoint | None:
    """Return the newest checkpoint that is whole, with every byte checked; None if nothing was saved yet.

    Raises CheckpointError if none is whole, or the newest is of a newer format or cannot be read. A run may save there
    meanwhile.
    """
    directory = Path(directory).absolute()
    try:
        for _ in range(_NUM_TRIES):
            with suppress(_Removed):
                return _load_newest(directory)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}; give the directory of a run") from error
    raise CheckpointError(f"{directory}: checkpoints are removed faster than they can be read; end the run that saves")


def _load_newest(directory: Path) -> Checkpoint | None:
    messages: list[str] = []
    found = newest_first(directory)
    for path in found:
        try:
            manifest = read_manifest(path)
            _check_content(path, manifest)
        except (Damaged, CheckpointError) as error:
            if not path.exists():
                raise _Removed from error
            if isinstance(error, CheckpointError):  # it may be whole, and an older one would lose what it has
                raise CheckpointError(f"{path}: {error}") from error
            messages.append(f"{path} is damaged, and not used: {error}")
        else:
            return Checkpoint(path=path, manifest=manifest, messages=tuple(messages))
    if found:
        raise CheckpointError(
            f"no checkpoint is whole, of {len(found)} in {directory}:\n  "
            + "\n  ".join(messages)
            + "\nrestore one from a backup, or train from the beginning in another directory"
        )
    return None


def furthest(directories: Iterable[Path], task: str) -> Path | None:
    """Return which of these directories has the most steps of a task, by their newest manifests; None: none knows it.

    Runs may save there meanwhile. Contents are checked by who reads them. Raises CheckpointError as `read_manifest`.
    """
    steps: dict[Path, tuple[int, bool]] = {}
    for directory in directories:
        for path in newest_first(directory):
            with suppress(Damaged):
                tasks = read_manifest(path).data["tasks"]
                if task in tasks:
                    steps[directory] = tasks[task]["steps"], tasks[task]["over"] is not None
                break
    return max(steps, key=lambda directory: steps[directory], default=None)


def read_manifest(path: Path) -> Manifest:
    """Raise Damaged if it is not as it was written, and CheckpointError if it cannot be read or its format is newer."""
    with _reading(path):
        return Manifest.decode(path.read_bytes())


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise Damaged if there is no such file, and CheckpointError if the system does not give what may be whole."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise Damaged(str(error)) from error
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}; it may be whole, so no older checkpoint is used in its place: make it "
            f"readable, or give its checkpoint up by moving the manifest away"
        ) from error


def place(path: Path, stored: StoredFile) -> Path:
    return path.parent / FILES / stored.file


def _check_content(path: Path, manifest: Manifest) -> None:
    """Raise Damaged or CheckpointError as `check_file`, for all files."""
    with ThreadPoolExecutor(_NUM_THREADS, "checkpoint-verify") as threads:
        try:
            for _ in threads.map(partial(check_file, path), manifest.files):
                pass
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)  # or Ctrl-C would wait for all files
            raise


def check_file(path: Path, stored: StoredFile, crc32: int | None = None) -> None:
    """Raise Damaged if a file is not as it was written, CheckpointError if it cannot be read; crc32: of what was."""
    file = place(path, stored)
    with _reading(file):
        found = StoredFile(file.name, file.stat().st_size, checksum(file) if crc32 is None else crc32)
    if found != stored:
        raise Damaged(
            f"{file.name}: found {found.num_bytes} bytes of CRC-32 {found.crc32:08x}, expected {stored.num_bytes} of "
            f"{stored.crc32:08x}"
        )


def newest_first(directory: Path) -> list[Path]:
    """Return the manifests of a directory, of whole checkpoints or not; none if there is no such directory."""
    try:
        found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda path: (number(path), path.name), reverse=True)


def number(path: Path) -> int:
    """Return the number of a manifest's checkpoint."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])
