"""Tensors whose values a checkpoint takes while training goes on changing them.

    thread that writes      copy_to(portion 0)   copy_to(portion 1)   ...   done()
    thread that updates                       secure()  then changes the tensor

Values are copied only where an update comes before the writer. Neither waits for the disk: the lock is held for a copy
in memory, at most a portion's or a tensor's.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch


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
