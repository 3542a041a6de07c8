"""What belongs to a checkpoint: every file's size and hash, and the manifest's own, so that no byte changes unseen."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import torch

from hydra_engine._version import __version__
from hydra_engine.errors import CheckpointError
from hydra_engine.system import Fingerprint

NAME = "manifest.json"
FORMAT = "hydra_engine checkpoint"
VERSION = 1

# A manifest of any version begins with the hash of all that follows it, in so many characters.
_HEAD = b'{"sha256": "'
_NUM_DIGITS = hashlib.sha256().digest_size * 2
_DATA_RULE = (
    "give None, bool, int, finite float, str, lists, and dicts with str keys, and put all else into a task's state"
)


class Damaged(Exception):
    """What is wrong with a checkpoint, of which an older one may take the place."""


def _versions() -> dict[str, str]:
    return {"hydra_engine": __version__, "torch": str(torch.__version__)}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """files: by path within the checkpoint. folders: each task's, by its name. data: the caller's, JSON.

    is_full: whether it is one of the last that are kept. written_by: versions by what has them.
    """

    files: dict[str, Fingerprint]
    folders: dict[str, str]
    data: Any
    is_full: bool = True
    written_by: dict[str, str] = field(default_factory=_versions)

    def folder_files(self, folder: str) -> dict[str, Fingerprint]:
        """The files of a folder, by their names in it."""
        paths = {path.partition("/"): fingerprint for path, fingerprint in self.files.items()}
        return {name: fingerprint for (head, _, name), fingerprint in paths.items() if head == folder}

    def encode(self) -> bytes:
        """A JSON object."""
        files = {path: fingerprint._asdict() for path, fingerprint in self.files.items()}
        content = {
            "format": FORMAT,
            "version": VERSION,
            "written_by": self.written_by,
            "is_full": self.is_full,
            "tasks": self.folders,
            "data": self.data,
            "files": files,
        }
        body = b'",\n' + json.dumps(content, indent=1).removeprefix("{\n").encode() + b"\n"
        return _HEAD + hashlib.sha256(body).hexdigest().encode() + body

    @classmethod
    def decode(cls, text: bytes) -> Manifest:
        """Raises Damaged where any byte is not as it was written, and CheckpointError at a version not known here."""
        start = len(_HEAD) + _NUM_DIGITS
        expected, found = text[len(_HEAD) : start], hashlib.sha256(text[start:]).hexdigest().encode()
        if not text.startswith(_HEAD) or expected != found:
            written = expected.decode("ascii", "replace")
            raise Damaged(f"{NAME}: found {len(text)} bytes of SHA-256 {found.decode()}, expected {written}")
        content = json.loads(text)
        if content["format"] != FORMAT or content["version"] > VERSION:
            raise CheckpointError(
                f"format {content['format']!r} of version {content['version']}, limit: {FORMAT!r} up to version "
                f"{VERSION}; read it with the hydra_engine that wrote it, or a newer one"
            )
        files = {path: Fingerprint(**fields) for path, fields in content["files"].items()}
        return cls(
            files=files,
            folders=content["tasks"],
            data=content["data"],
            is_full=content["is_full"],
            written_by=content["written_by"],
        )


def check_data(data: Any) -> None:
    """Raises TypeError where a caller's data would come back as something else."""
    try:
        is_same = json.loads(json.dumps(data, allow_nan=False)) == data
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"data: {error}; {_DATA_RULE}") from error
    if not is_same:
        raise TypeError(f"data changes on its way through JSON; {_DATA_RULE}")
