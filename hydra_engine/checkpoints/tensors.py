"""Tensors by name in a safetensors file, written from where they lie in memory and hashed on the way.

The format is https://github.com/huggingface/safetensors#format, and any of its readers reads these files. Its library
writes a file in one call from memory of its own, so the bytes would have to be read again to be hashed.

Training goes on changing tensors while they are written:

    thread that writes      copy_to(portion 0)   copy_to(portion 1)   ...   done()
    thread that updates                       secure()  then changes the tensor

Values are copied only where an update comes before the writer. Neither waits for the disk: the lock is held for a copy
in memory, at most a portion's or a tensor's.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from hydra_engine.system import PORTION_BYTES, NewFile, OldFile


def check_tensor(where: str, value: Any) -> None:
    """Raises TypeError unless it is a tensor whose values lie in DRAM, one after the other or strided.

    A moving one was checked as it was made; raises ValueError where it is done.
    """
    if isinstance(value, MovingTensor):
        if value.is_done:
            raise ValueError(f"{where} was written or given up; make one for each checkpoint, of what is there now")
        return
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{where} is a {type(value).__name__}, not a tensor")
    if value.device.type != "cpu":
        raise TypeError(f"{where} is on {value.device}; checkpoints are written from DRAM, give its .cpu()")
    if type(value) not in (torch.Tensor, torch.nn.Parameter):  # one that has other memory than its own, or meaning
        raise TypeError(
            f"{where} is a {type(value).__qualname__}; only plain tensors are saved, give what it consists of"
        )
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        kind = "quantized" if value.is_quantized else "nested" if value.is_nested else value.layout
        raise TypeError(f"{where} is {kind}; only dense tensors are saved, give the tensors it consists of")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory is its values, in C order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Of a plain tensor: its memory, not a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class MovingTensor:
    """A tensor that goes on changing; its value is what it held when this was made.

    Whoever changes the tensor calls `secure` first, and whoever writes it calls `done` in the end; any thread may call
    anything. Raises TypeError as `check_tensor`. dtype, shape, strides, nbytes: the tensor's.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        check_tensor("the tensor", tensor)
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)
        self.strides = tuple(tensor.stride())
        self.nbytes = tensor.numel() * tensor.element_size()
        self._lock = threading.Lock()
        self._values: torch.Tensor | None = tensor.detach()
        self._is_own = False  # in memory that nobody else changes

    def copy_to(self, target: memoryview, start_byte: int) -> None:
        """Copy the values' bytes from `start_byte` on, in C order, as many as the target takes.

        One that is not contiguous is secured first. Raises ValueError after `done`.
        """
        with self._lock:
            if self._values is None:
                raise ValueError("a tensor was given up before all of it was written; save what is there now")
            if not is_plain(self._values):
                self._secure()
            source = bytes_of(self._values)[start_byte : start_byte + len(target)]
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

    def secure(self) -> int:
        """Call before the tensor is changed; how many bytes had to be copied.

        Raises what torch raises where there is no memory for them: leave the tensor as it is, or give up with `done`.
        """
        with self._lock:
            if self._values is None or self._is_own:
                return 0
            return self._secure()

    def done(self) -> None:
        """It was written, or nobody will write it; once or more often."""
        with self._lock:
            self._values = None

    @property
    def is_done(self) -> bool:
        """Whether its value is gone."""
        return self._values is None

    def _secure(self) -> int:
        assert self._values is not None
        self._values = torch.empty(self.shape, dtype=self.dtype, device="cpu").copy_(self._values)
        self._is_own = True
        return self.nbytes


Tensors = Mapping[str, torch.Tensor | MovingTensor]

_CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
METADATA = "__metadata__"  # no tensor's name
_OWN_DTYPES = "dtypes"  # in it: JSON of those that the format lacks, by tensor
_HEADER_ALIGNMENT = 8  # of the data behind it, for who maps the file


def check_tensors(where: str, tensors: Mapping[Any, Any]) -> None:
    """Raises TypeError where `write_tensors` would not take them, and ValueError at a name that the format keeps."""
    for name, value in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"{where}: {name!r}: its name is a {type(name).__name__}, not a str")
        if name == METADATA:
            raise ValueError(f"{where}: {name!r} is a name that the safetensors format keeps for itself; rename it")
        check_tensor(f"{where}: {name!r}", value)


def write_tensors(file: NewFile, tensors: Tensors) -> None:
    """Write tensors, each in full, also if they share memory. One that is not contiguous is copied piece by piece.

    A moving one is done as soon as all of it is in buffers, on its way to the disk. A dtype that the format lacks is
    written as bytes, one dimension more, and named in the file's metadata.
    """
    # Widest first, so that each begins at a multiple of its element's size without holes, which the format forbids.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        code, shape = _CODES.get(tensor.dtype), list(tensor.shape)
        if code is None:
            code, shape = "U8", [*shape, tensor.dtype.itemsize]
            dtypes[name] = str(tensor.dtype).removeprefix("torch.")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    assert METADATA not in header
    metadata = {"format": "pt", **({_OWN_DTYPES: json.dumps(dtypes)} if dtypes else {})}
    text = json.dumps({METADATA: metadata, **header}).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    scratch = torch.empty(PORTION_BYTES, dtype=torch.uint8, device="cpu")  # takes memory where it is written to
    num_left = Counter(map(id, tensors.values()))  # one may have several names
    for name in names:
        tensor = tensors[name]
        if isinstance(tensor, MovingTensor):
            file.fill(tensor.nbytes, tensor.copy_to)
            num_left[id(tensor)] -= 1
            if not num_left[id(tensor)]:
                tensor.done()
        elif tensor.numel():
            for piece in _pieces(tensor.detach(), scratch):
                file.write(bytes_of(piece))


def read_tensors(file: OldFile, into: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """What `write_tensors` wrote, each tensor in memory of its own, in the file's order.

    into: tensors of the same names, types and shapes, in DRAM, that take the values instead; raises ValueError, before
    one is written to, where they are others.
    """
    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    dtypes = json.loads(header.pop(METADATA).get(_OWN_DTYPES, "{}"))
    kinds = {}
    for name, entry in header.items():
        kinds[name] = (_DTYPES[entry["dtype"]], tuple(entry["shape"]))
        if name in dtypes:
            kinds[name] = (getattr(torch, dtypes[name]), tuple(entry["shape"][:-1]))
    if into is not None:
        _check_same(kinds, {name: (each.dtype, tuple(each.shape)) for name, each in into.items()})
    tensors = {}
    for name, (dtype, shape) in kinds.items():
        target = tensors[name] = torch.empty(shape, dtype=dtype, device="cpu") if into is None else into[name].detach()
        if target.numel():
            place = target if target.is_contiguous() else torch.empty(shape, dtype=dtype, device="cpu")
            file.read_into(bytes_of(place))
            if place is not target:
                target.copy_(place)
    return tensors


def _check_same(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            kinds = [f"of {kind[0]} {kind[1]}" if kind else "missing" for kind in (wanted.get(name), saved.get(name))]
            raise ValueError(
                f"{name!r} is {kinds[0]} here, and was {kinds[1]} as it was saved; resume with the model that was saved"
            )


def _pieces(tensor: torch.Tensor, scratch: torch.Tensor) -> Iterator[torch.Tensor]:
    """Contiguous ones that follow each other: the tensor itself, or one copy after the other in the same memory."""
    if is_plain(tensor):
        yield tensor
    elif tensor.nbytes <= scratch.nbytes:
        yield scratch[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    else:
        row_bytes = tensor.nbytes // len(tensor)
        num_rows = max(1, scratch.nbytes // row_bytes)
        for start in range(0, len(tensor), num_rows):
            rows = tensor[start : start + num_rows]
            yield from _pieces(rows[0] if len(rows) == 1 else rows, scratch)
