"""The manifest of a checkpoint: size and checksum of each of its files, and its own hash. No byte changes unseen."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from hydra_engine._version import __version__
from hydra_engine.errors import CheckpointError

FORMAT = "hydra_engine checkpoint"
VERSION = 2

# A manifest of any version begins with the hash of everything after it, written in this many characters.
_HEAD = b'{"sha256": "'
_NUM_DIGITS = hashlib.sha256().digest_size * 2


class Damaged(Exception):
    """The error of a checkpoint that is not as it was written: an older one may take its place."""


class StoredFile(NamedTuple):
    """A file of a task: its name in the folder of all files, and the size and CRC-32 that it was written with."""

    file: str
    num_bytes: int
    crc32: int


Parts: TypeAlias = "dict[str, tuple[StoredFile, ...]]"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """tasks: the files of each task by the part that they hold. data: the caller's JSON."""

    tasks: dict[str, Parts]
    data: Any

    @property
    def files(self) -> list[StoredFile]:
        """Each file once, also where several tasks have it."""
        return list(dict.fromkeys(each for parts in self.tasks.values() for files in parts.values() for each in files))

    def encode(self) -> bytes:
        """Return a JSON object as text."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "written_by": {"hydra_engine": __version__, "torch": str(torch.__version__)},
            "tasks": {
                task: {part: [each._asdict() for each in files] for part, files in parts.items()}
                for task, parts in self.tasks.items()
            },
            "data": self.data,
        }
        body = b'",\n' + json.dumps(content, indent=1).removeprefix("{\n").encode() + b"\n"
        return _HEAD + hashlib.sha256(body).hexdigest().encode() + body

    @classmethod
    def decode(cls, text: bytes) -> Manifest:
        """Raise Damaged if any byte is not as it was written, and CheckpointError at a version not known here."""
        start = len(_HEAD) + _NUM_DIGITS
        expected, found = text[len(_HEAD) : start], hashlib.sha256(text[start:]).hexdigest().encode()
        if not text.startswith(_HEAD) or expected != found:
            written = expected.decode("ascii", "replace")
            raise Damaged(f"manifest: found {len(text)} bytes of SHA-256 {found.decode()}, expected {written}")
        content = json.loads(text)
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise CheckpointError(
                f"format {content['format']!r} of version {content['version']}, limit: {FORMAT!r} of version "
                f"{VERSION}; read it with the hydra_engine that wrote it"
            )
        tasks = {
            task: {part: tuple(StoredFile(**each) for each in files) for part, files in parts.items()}
            for task, parts in content["tasks"].items()
        }
        return cls(tasks=tasks, data=content["data"])
