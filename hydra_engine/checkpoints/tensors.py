"""Tensors by name in a safetensors file, written from where they lie in memory and hashed on the way.

The format is https://github.com/huggingface/safetensors#format, and any of its readers reads these files. Its library
writes a file in one call from memory of its own, so the bytes would have to be read again to be hashed, and no tensor
could change meanwhile. But training goes on changing tensors while they are written:

    thread that writes      copy_to(portion 0)   copy_to(portion 1)   ...   done()
    thread that updates                       secure()  then changes the tensor

Values are copied only if an update comes before the writer. Neither waits for the disk: the lock is held for a copy in
memory, of one portion or one tensor at most.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch

from hydra_engine.system import PORTION_BYTES, NewFile, OldFile


def check_tensor(where: str, value: Any) -> None:
    """Raise TypeError unless it is a plain, dense tensor in DRAM, and ValueError at a moving tensor that is done."""
    if isinstance(value, MovingTensor):
        if value.is_done:
            raise ValueError(f"{where} was written or given up; make one for each checkpoint, of what is there now")
        return
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{where} is a {type(value).__name__}, not a tensor")
    if value.device.type != "cpu":
        raise TypeError(f"{where} is on {value.device}; checkpoints are written from DRAM, give its .cpu()")
    if type(value) not in (torch.Tensor, torch.nn.Parameter):  # a subclass may have other memory, or another meaning
        raise TypeError(
            f"{where} is a {type(value).__qualname__}; only plain tensors are saved, give what it consists of"
        )
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        kind = "quantized" if value.is_quantized else "nested" if value.is_nested else value.layout
        raise TypeError(f"{where} is {kind}; only dense tensors are saved, give the tensors it consists of")


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if the tensor's memory is its values in C order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a plain tensor, not a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class MovingTensor:
    """A tensor that goes on changing, to be saved with the values that it has as this object is made.

    Whoever changes the tensor calls `secure` first, and whoever writes it calls `done` in the end. All methods are for
    any thread. Raises TypeError as `check_tensor` does. dtype, shape, strides, nbytes: the tensor's.
    load: of a tensor whose values are elsewhere: fills one that is laid out as it is with them, and returns that.
    """

    def __init__(self, tensor: torch.Tensor, load: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        check_tensor("the tensor", tensor)
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)
        self.strides = tuple(tensor.stride())
        self.nbytes = tensor.numel() * tensor.element_size()
        self._lock = threading.RLock()
        self._values: torch.Tensor | None = tensor.detach()
        self._load = load
        self._is_own = False  # the values lie in memory that nobody else changes

    def copy_to(self, target: memoryview, start_byte: int) -> None:
        """Fill the target with the values' bytes in C order, from `start_byte` on; raises ValueError after `done`."""
        with self._lock:
            if self._values is None:
                raise ValueError("a tensor was given up before all of it was written; save what is there now")
            if self._load is not None or not is_plain(self._values):
                self.secure()
            source = bytes_of(self._values)[start_byte : start_byte + len(target)]
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

    def secure(self) -> int:
        """Copy the values before they change, if still needed; returns the bytes. Raises torch's error for no DRAM."""
        with self._lock:
            if self._values is None or self._is_own:
                return 0
            values = self._values
            if self._load is not None:
                values = self._load(torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="cpu"))
            if self._load is None or not is_plain(values):
                values = torch.empty(self.shape, dtype=self.dtype, device="cpu").copy_(values)
            self._values, self._load, self._is_own = values, None, True
            return self.nbytes

    def done(self) -> None:
        """Let go of the values: they are written, or nobody will write them. May be called again."""
        with self._lock:
            self._values = None

    @property
    def is_done(self) -> bool:
        return self._values is None


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
METADATA = "__metadata__"  # in a file's header, beside the tensors
_OWN_DTYPES = "dtypes"  # in the metadata: JSON of dtypes that the format lacks, by tensor
_HEADER_ALIGNMENT = 8  # so that readers may map the data behind the header


def check_tensors(where: str, tensors: Mapping[Any, Any]) -> None:
    """Raise TypeError if `write_tensors` would not take them, and ValueError at a name that the format keeps."""
    for name, value in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"{where}: {name!r}: its name is a {type(name).__name__}, not a str")
        if name == METADATA:
            raise ValueError(f"{where}: {name!r} is a name that the safetensors format keeps for itself; rename it")
        check_tensor(f"{where}: {name!r}", value)


def write_tensors(file: NewFile, tensors: Tensors) -> None:
    """Write tensors, each in full, even if they share memory. A tensor that is not contiguous is copied in rows.

    A moving tensor is done as soon as all of it is in buffers, on its way to the disk. A dtype that the format lacks is
    written as bytes, with one dimension more, and named in the file's metadata.
    """
    names, head = _head(tensors)
    file.write(head)
    scratch = torch.empty(PORTION_BYTES, dtype=torch.uint8, device="cpu")  # takes memory where it is written to
    num_left = Counter(map(id, tensors.values()))  # a tensor may have several names
    for name in names:
        tensor = tensors[name]
        if isinstance(tensor, MovingTensor):
            file.fill(tensor.nbytes, tensor.copy_to)
            num_left[id(tensor)] -= 1
            if not num_left[id(tensor)]:
                tensor.done()
        else:
            for piece in _pieces(tensor.detach(), scratch):
                file.write(bytes_of(piece))


def are_written(file: OldFile, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return True if a file begins, byte by byte, with what `write_tensors` writes of them; EOFError: it is shorter."""
    names, head = _head(tensors)
    scratch, found = (torch.empty(PORTION_BYTES, dtype=torch.uint8, device="cpu") for _ in range(2))
    pieces = (bytes_of(piece) for name in names for piece in _pieces(tensors[name].detach(), scratch))
    for expected in chain([memoryview(head)], pieces):
        for start in range(0, len(expected), PORTION_BYTES):
            part = np.frombuffer(expected[start : start + PORTION_BYTES], np.uint8)
            file.read_into(bytes_of(found[: len(part)]))
            if not np.array_equal(part, found[: len(part)].numpy()):
                return False
    return True


def _head(tensors: Tensors) -> tuple[list[str], bytes]:
    """Return the names in the order in which their tensors are written, and the bytes of a file before them."""
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
    return names, len(text).to_bytes(8, "little") + text


def read_tensors(file: OldFile, into: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Read the file of `write_tensors`, in its order; `into` as of `Checkpoint.read_tensors`."""
    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    dtypes = json.loads(header.pop(METADATA).get(_OWN_DTYPES, "{}"))
    kinds = {name: (_DTYPES[entry["dtype"]], tuple(entry["shape"])) for name, entry in header.items()}
    kinds |= {name: (getattr(torch, dtype), kinds[name][1][:-1]) for name, dtype in dtypes.items()}
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
    """Yield a tensor in contiguous pieces: the tensor itself, or copies of its rows, one after the other in scratch."""
    if not tensor.numel():
        return
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
