"""Checkpoints on disk: each one whole or not there at all, whatever ends the process, and never believed unverified.

    directory/
        LATEST                              the newest checkpoint's name
        LOCK                                held by the run that writes here
        checkpoint-00000012-4f1c9a2e/       its number, and the run that wrote it: no name is ever used twice
            manifest.json                   every file's size and digest, and its own SHA-256
            0-bert/weights.safetensors      a task's files: its weights by name,
            0-bert/state.json               its other state, which names the tensors in
            0-bert/state.safetensors
        .tmp-...                            of a save or a removal that was cut off; gone with the next one

A save writes into .tmp-..., renames it, replaces LATEST, and only then removes older ones; each is on the medium before
the next begins. A reader goes by the numbers, so that it needs no LATEST. A file that has not changed since the last
checkpoint is one on the medium with a name in both. `checkpoint.md` has the format.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hydra_engine.checkpoints import manifest as manifests
from hydra_engine.checkpoints.manifest import Damaged, Manifest
from hydra_engine.checkpoints.nested import unflatten
from hydra_engine.checkpoints.tensors import read_tensors
from hydra_engine.errors import CheckpointError
from hydra_engine.system import NUM_THREADS, Fingerprint, OldFile, fingerprint

LATEST = "LATEST"

_NUM_TRIES = 10  # at finding one that a run does not remove just then
_NAME = re.compile(r"checkpoint-(\d{8,})-([0-9a-f]{8})")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was whole when it was opened.

    path: its folder. data: the caller's. messages: what is wrong with newer ones, and what lies there unasked.
    """

    path: Path
    data: Any
    messages: tuple[str, ...]
    manifest: Manifest

    @property
    def task_names(self) -> tuple[str, ...]:
        """In the order they were given in."""
        return tuple(self.manifest.folders)

    def files(self, task: str) -> frozenset[str]:
        """The names of a task's files; raises CheckpointError where it holds no such task."""
        return frozenset(self._files(task))

    def read_tensors(
        self, task: str, file_name: str, into: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """A file of tensors by name, in new memory; verified again while it is read.

        into: tensors in DRAM that take them, so that no second copy is there; raises ValueError, before one is written
        to, where names, types or shapes differ. Raises CheckpointError if it changed, was removed by a later save, or
        was never there; after that they hold anything.
        """
        with self._opened(task, file_name) as file:
            found = read_tensors(file, into)
        return found

    def read_bytes(self, task: str, file_name: str) -> bytes:
        """The same, of any file, as it is."""
        with self._opened(task, file_name) as file:
            found = file.read()
        return found

    def read_nested(self, task: str, stem: str) -> Any:
        """The same, of what `hydra_engine.nested.nested_files` gave."""
        tensors = self.read_tensors(task, f"{stem}.safetensors")
        return unflatten(json.loads(self.read_bytes(task, f"{stem}.json")), tensors)

    def _files(self, task: str) -> dict[str, Fingerprint]:
        if task not in self.manifest.folders:
            raise CheckpointError(
                f"{self.path} holds no task {task!r}, but {', '.join(map(repr, self.task_names)) or 'none'}; name the "
                f"task as it was when it was saved"
            )
        return self.manifest.folder_files(self.manifest.folders[task])

    @contextmanager
    def _opened(self, task: str, file_name: str) -> Iterator[OldFile]:
        files = self._files(task)
        if file_name not in files:
            raise CheckpointError(
                f"{self.path} holds no file {file_name!r} of task {task!r}, but "
                f"{', '.join(map(repr, files)) or 'none'}; read one of those"
            )
        path = f"{self.manifest.folders[task]}/{file_name}"
        try:
            with OldFile(self.path / path) as file:
                try:
                    yield file
                except Exception:  # nobody can make sense of it: was it as it had been written?
                    check_same(path, files[file_name], file.finish())
                    raise
                check_same(path, files[file_name], file.finish())
        except (OSError, EOFError, Damaged) as error:
            raise CheckpointError(f"{self.path} changed after it was opened: {error}; open the newest again") from error


class _Removed(Exception):
    """By a run that has saved a newer one."""


def load_newest(directory: str | os.PathLike[str]) -> Checkpoint | None:
    """The newest checkpoint that is whole, every byte of it verified; None where nothing was saved yet.

    Raises CheckpointError where there are checkpoints and none is whole, or the newest is of a newer format. A run may
    save there meanwhile.
    """
    directory = Path(directory).absolute()
    for _ in range(_NUM_TRIES):
        with suppress(_Removed):
            return _load_newest(directory)
    raise CheckpointError(f"{directory}: checkpoints are removed faster than they can be read; end the run that saves")


def _load_newest(directory: Path) -> Checkpoint | None:
    messages = []
    try:
        found = newest_first(directory)
        latest = latest_name(directory)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}; give the directory of a run") from error
    if latest is not None and latest not in [path.name for path in found]:
        messages.append(f"{directory / LATEST} names {latest!r}, which is not there")
    for path in found:
        try:
            manifest = _read_manifest(path)
            _verify(path, manifest)
        except Damaged as damage:
            if not path.exists():
                raise _Removed from damage
            messages.append(f"{path} is damaged, and not used: {damage}")
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        else:
            messages += [f"{path / each} is no part of the checkpoint" for each in _unexpected(path, manifest)]
            return Checkpoint(path=path, data=manifest.data, messages=tuple(messages), manifest=manifest)
    if found:
        raise CheckpointError(
            f"no checkpoint is whole, of {len(found)} in {directory}:\n  "
            + "\n  ".join(messages)
            + "\nrestore one from a backup, or train from the beginning in another directory"
        )
    return None


def _read_manifest(path: Path) -> Manifest:
    try:
        return Manifest.decode((path / manifests.NAME).read_bytes())
    except OSError as error:
        raise Damaged(f"{manifests.NAME}: {error}") from error


def _verify(path: Path, manifest: Manifest) -> None:
    """Raises Damaged, at the first file that is not as it was written."""
    _check_sizes(path, manifest)  # before gigabytes are read
    with ThreadPoolExecutor(NUM_THREADS, "checkpoint-verify") as threads:
        for name, expected in manifest.files.items():
            try:
                found = fingerprint(path / name, threads)
            except OSError as error:
                raise Damaged(f"{name}: {error}") from error
            check_same(name, expected, found)


def _check_sizes(path: Path, manifest: Manifest) -> None:
    for name, expected in manifest.files.items():
        try:
            num_bytes = (path / name).stat().st_size
        except OSError as error:
            raise Damaged(f"{name}: {error}") from error
        if num_bytes != expected.num_bytes:
            raise Damaged(f"{name}: found {num_bytes} bytes, expected {expected.num_bytes}")


def check_same(name: str, expected: Fingerprint, found: Fingerprint) -> None:
    """Raises Damaged where a file is not as it was written."""
    if found != expected:
        raise Damaged(
            f"{name}: found {found.num_bytes} bytes of digest {found.digest}, expected {expected.num_bytes} of "
            f"{expected.digest}"
        )


def has_size(path: Path, expected: Fingerprint) -> bool:
    """Whether a file is there as far as its size tells: for what is asked at every save."""
    try:
        return path.stat().st_size == expected.num_bytes
    except OSError:
        return False


def manifest_if_whole(path: Path) -> Manifest | None:
    """A checkpoint's, where all of it is there by sizes alone."""
    try:
        manifest = _read_manifest(path)
        _check_sizes(path, manifest)
    except (Damaged, CheckpointError):
        return None
    return manifest


def _unexpected(path: Path, manifest: Manifest) -> list[str]:
    expected = {manifests.NAME, *manifest.files, *manifest.folders.values()}
    return sorted(
        str(each.relative_to(path)) for each in path.rglob("*") if str(each.relative_to(path)) not in expected
    )


def newest_first(directory: Path) -> list[Path]:
    """The checkpoints of a directory, whole or not; none where there is no such directory."""
    try:
        found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda path: (number(path), path.name), reverse=True)


def number(path: Path) -> int:
    """A checkpoint's."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def latest_name(directory: Path) -> str | None:
    """What LATEST names; None without it."""
    try:
        return (directory / LATEST).read_text(encoding="utf-8", errors="replace").rstrip("\n")
    except FileNotFoundError:
        return None
