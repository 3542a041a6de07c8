"""The manifest of a checkpoint: size and digest of each of its files, and its own hash. No byte changes unseen."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hydra_engine._version import __version__
from hydra_engine.errors import CheckpointError

FORMAT = "hydra_engine checkpoint"
VERSION = 1

# A manifest of any version begins with the hash of everything after it, written in this many characters.
_HEAD = b'{"sha256": "'
_NUM_DIGITS = hashlib.sha256().digest_size * 2
_DATA_RULE = (
    "give None, bool, int, finite float, str, lists, and dicts with str keys, and put all else into a task's state"
)


class Damaged(Exception):
    """The error of a checkpoint that is not as it was written: an older one may take its place."""


class StoredFile(NamedTuple):
    """A file of a task: its name in the folder of all files, and the size and digest that it was written with."""

    file: str
    num_bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """tasks: the files of each task by name. data: the caller's JSON."""

    tasks: dict[str, dict[str, StoredFile]]
    data: Any

    @property
    def files(self) -> list[StoredFile]:
        """Each file once, also where several tasks have it."""
        return list(dict.fromkeys(each for files in self.tasks.values() for each in files.values()))

    def encode(self) -> bytes:
        """Return a JSON object as text."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "written_by": {"hydra_engine": __version__, "torch": str(torch.__version__)},
            "tasks": {
                task: {name: each._asdict() for name, each in files.items()} for task, files in self.tasks.items()
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
        if content["format"] != FORMAT or content["version"] > VERSION:
            raise CheckpointError(
                f"format {content['format']!r} of version {content['version']}, limit: {FORMAT!r} up to version "
                f"{VERSION}; read it with the hydra_engine that wrote it, or a newer one"
            )
        tasks = {
            task: {name: StoredFile(**each) for name, each in files.items()} for task, files in content["tasks"].items()
        }
        return cls(tasks=tasks, data=content["data"])


def check_data(data: Any) -> None:
    """Raise TypeError if a caller's data would come back as something else."""
    try:
        is_same = json.loads(json.dumps(data, allow_nan=False)) == data
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"data: {error}; {_DATA_RULE}") from error
    if not is_same:
        raise TypeError(f"data changes on its way through JSON; {_DATA_RULE}")
