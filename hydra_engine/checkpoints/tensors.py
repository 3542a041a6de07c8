"""Tensors by name in files of the safetensors format, written from where they lie in memory.

Training goes on changing tensors while they are written:

    thread that writes      writes a file of them; once more, if one was secured meanwhile; done()
    thread that updates                  secure()  copies a tensor, and then changes it

So a tensor is copied only if an update comes before its file is written, and nobody who updates waits for the disk.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from hydra_engine.system import Disk, checksum

# Where another file begins. Short, since one is written twice if its tensors change, and copies are held until it is.
FILE_BYTES = 2**26
METADATA = "__metadata__"  # what the format itself names so, beside the tensors
_DTYPES = "dtypes"  # in a file's metadata: JSON of dtypes that the format lacks, by tensor


class MovingTensor:
    """A tensor that goes on changing, to be saved with the values that it has as this object is made.

    Whoever changes the tensor calls `secure` first, and whoever writes it calls `done` in the end. All methods are for
    any thread. nbytes: the tensor's.
    load: of a tensor whose values are elsewhere: fills one that is laid out as it is with them, and returns that.
    """

    def __init__(self, tensor: Tensor, load: Callable[[Tensor], Tensor] | None = None) -> None:
        self.nbytes = tensor.nbytes
        self._lock = threading.RLock()
        self._values: Tensor | None = tensor.detach()
        self._load = load
        self._is_own = False  # the values lie in memory that nobody else changes

    def now(self) -> Tensor:
        """Return the values in C order: where they lie, or another tensor once they are secured. ValueError: done."""
        with self._lock:
            if self._values is None:
                raise ValueError("a tensor was given up before it was written; save what is there now")
            if self._load is not None or not _is_plain(self._values):
                self.secure()
            return self._values

    def secure(self) -> int:
        """Copy the values before they change, if still needed; returns the bytes. Raises torch's error for no DRAM."""
        with self._lock:
            if self._values is None or self._is_own:
                return 0
            values = self._values
            if self._load is not None:
                place = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device="cpu")
                self._values = _in_rows(self._load(place))
            else:
                self._values = _copy(values)
            self._load, self._is_own = None, True
            return self.nbytes

    def done(self) -> None:
        """Let go of the values: they are written, or nobody will write them. May be called again."""
        with self._lock:
            self._values = None

    @property
    def is_done(self) -> bool:
        return self._values is None


Tensors: TypeAlias = "Mapping[str, Tensor | MovingTensor]"
Kinds: TypeAlias = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # dtypes and shapes by name


def in_files(tensors: Tensors) -> Iterator[Tensors]:
    """Yield tensors file by file, at least one."""
    file: dict[str, Tensor | MovingTensor] = {}
    num_bytes = 0
    for name, each in tensors.items():
        if file and num_bytes + each.nbytes > FILE_BYTES:
            yield file
            file, num_bytes = {}, 0
        file[name] = each
        num_bytes += each.nbytes
    yield file


def write_tensors(disk: Disk, path: Path, tensors: Tensors) -> int:
    """Write a file of tensors, each in full and in C order, even if they share memory; returns its checksum.

    Moving tensors are done then; others stay as they are until it returns. A dtype that the format lacks is written as
    bytes, with one dimension more, and named in the file's metadata.
    """
    moving = {name: each for name, each in tensors.items() if isinstance(each, MovingTensor)}
    fixed = {name: _in_rows(each) for name, each in tensors.items() if not isinstance(each, MovingTensor)}
    for name in tensors:
        if name == METADATA or name != plain_text(name):
            raise ValueError(f"{name!r} is no name of a tensor in safetensors files; rename it")
    while True:
        values = {**fixed, **{name: each.now() for name, each in moving.items()}}
        disk.write(path, partial(_serialize, values))
        if all(each.now() is values[name] for name, each in moving.items()):
            break
        with suppress(MemoryError, RuntimeError):  # without DRAM for copies, it is written as often as updates come
            for each in moving.values():
                each.secure()
    for each in moving.values():
        each.done()
    return checksum(path)


def plain_text(text: str) -> str:
    """Return a text as UTF-8 has it: lone surrogates, as of file names that are none, become escapes."""
    return text.encode(errors="backslashreplace").decode()


def _serialize(values: Mapping[str, Tensor], path: Path) -> None:
    specs, lacking = {}, {}
    for name, each in values.items():
        dtype, shape = str(each.dtype).removeprefix("torch."), list(each.shape)
        if not _has(dtype):
            lacking[name] = dtype
            dtype, shape = "uint8", [*shape, each.dtype.itemsize]
        # Without elements a tensor may have no address, which no reference of Rust's may be.
        specs[name] = TensorSpec(dtype=dtype, shape=shape, data_ptr=each.data_ptr() or 1, data_len=each.nbytes)
    metadata = {"format": "pt", **({_DTYPES: json.dumps(lacking)} if lacking else {})}
    try:
        serialize_file(specs, path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error


@cache
def _has(dtype: str) -> bool:
    """Return True if the format has a dtype, also of tensors with no dimension: it counts both halves of a byte."""
    try:
        return TensorSpec(dtype=dtype, shape=[1], data_ptr=1, data_len=0).shape == [1]
    except SafetensorError:
        return False


def _kinds_in(path: Path) -> Kinds:
    """Return what a file's tensors are, in the order of their bytes. Only its header is read."""
    with safe_open(path, "pt") as opened:
        kinds = _kinds({name: opened.get_tensor(name) for name in opened.offset_keys()})
        lacking = json.loads(opened.metadata().get(_DTYPES, "{}"))
    return kinds | {name: (getattr(torch, dtype), kinds[name][1][:-1]) for name, dtype in lacking.items()}


def read_tensors(
    paths: Sequence[Path], into: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], list[int]]:
    """Read tensors from files, and return the checksums of these as well; `into` as of `Checkpoint.read_tensors`."""
    files = [_kinds_in(path) for path in paths]
    if into is not None:
        _check_same({name: kind for kinds in files for name, kind in kinds.items()}, _kinds(into))
    checksums: list[int] = []
    return dict(_values(paths, files, checksums, into)), checksums


def _values(
    paths: Sequence[Path], files: Sequence[Kinds], checksums: list[int], into: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of files one by one, and add the checksum of each file that was read to its end.

    The library would map a file, and an error of the disk would end the process.
    """
    for path, kinds in zip(paths, files, strict=True):
        with path.open("rb") as file:
            size = file.read(8)
            crc32 = zlib.crc32(size + file.read(int.from_bytes(size, "little")))
            for name, (dtype, shape) in kinds.items():
                tensor = torch.empty(shape, dtype=dtype, device="cpu") if into is None else into[name].detach()
                place = tensor if _is_plain(tensor) else torch.empty(shape, dtype=dtype, device="cpu")
                if file.readinto(_bytes_of(place)) < place.nbytes:
                    raise EOFError
                crc32 = zlib.crc32(_bytes_of(place), crc32)
                yield name, tensor if place is tensor else tensor.copy_(place)
        checksums.append(crc32)


def are_written(paths: Sequence[Path], tensors: Mapping[str, Tensor]) -> bool:
    """Return True if these files hold these tensors, byte by byte."""
    files = [_kinds_in(path) for path in paths]
    if {name: kind for kinds in files for name, kind in kinds.items()} != _kinds(tensors):
        return False
    values = _values(paths, files, [])
    return all(np.array_equal(_bytes_of(each), _bytes_of(_in_rows(tensors[name]))) for name, each in values)


def _kinds(tensors: Mapping[str, Tensor]) -> Kinds:
    return {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}


def _check_same(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            kinds = [f"of {kind[0]} {kind[1]}" if kind else "missing" for kind in (wanted.get(name), saved.get(name))]
            raise ValueError(
                f"{name!r} is {kinds[0]} here, and was {kinds[1]} as it was saved; resume with the model that was saved"
            )


def _in_rows(tensor: Tensor) -> Tensor:
    """Return a tensor in C order: itself, or a copy."""
    return tensor.detach() if _is_plain(tensor) else _copy(tensor)


def _is_plain(tensor: Tensor) -> bool:
    """Return True if the tensor's memory is its values in C order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor in C order, not a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
