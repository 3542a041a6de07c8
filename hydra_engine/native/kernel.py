"""The update on a GPU: the text of update.cu, and what launches it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("update.cu")
NAME = "hydra_update"
OPTIONS = ("--fmad=false", "--ftz=false")
THREADS, ELEMENTS_OF_BLOCK = 256, 8192  # of a block, as update.cu has them
WORD_BITS = 32


def source() -> str:
    """Return update.cu with its header inlined: NVRTC knows no folder that it could be in."""
    header = SOURCE.with_name("element.h").read_text(encoding="utf-8").replace("#pragma once", "")
    return SOURCE.read_text(encoding="utf-8").replace('#include "element.h"', header)


def block_ends(sizes: Sequence[int]) -> list[int]:
    """Return where each parameter's blocks end, counted over all."""
    return [*accumulate(-(-size // ELEMENTS_OF_BLOCK) for size in sizes)]


class Kernel(Protocol):
    """Makes updates in one device's memory."""

    kind: str  # of device: one admitted is all of a kind
    torch_device: torch.device
    missing_because: str  # "": it can be launched

    def launch(self, rows: bytes, sizes: Sequence[int]) -> None:
        """Queue the updates of parameters of these sizes; `rows`: a struct Update of element.h for each."""


class Halves(NamedTuple):
    """A split weight (host/split.py) in a GPU's memory, with a bit for each element: a tie that was rounded down."""

    narrow: Tensor
    rest: Tensor
    ties: Tensor  # int32: whole words

    @classmethod
    def of(cls, values: Tensor) -> Halves:
        """Split float32 values in DRAM."""
        bits, is_nan = values.view(torch.int32), values.isnan()
        is_tie = (bits & 0x1FFFF == 0x8000) & ~is_nan
        rest = torch.where(is_nan, bits >> 16, bits).to(torch.int16)
        return cls(values.bfloat16(), rest, tie_words(is_tie.nonzero().flatten(), len(values)))


def tie_bytes(size: int) -> int:
    """Bytes that `tie_words` of so many elements takes."""
    return 4 * -(-size // WORD_BITS)


def tie_words(places: Tensor, size: int) -> Tensor:
    """Return a bit for each of `size` elements, set at these places, in words."""
    is_tie = np.zeros(8 * tie_bytes(size), bool)
    is_tie[places.numpy()] = True
    return torch.from_numpy(np.packbits(is_tie, bitorder="little").view(np.int32))


def tie_places(words: Tensor) -> Tensor:
    """Return the places of the bits that are set, ascending."""
    return torch.from_numpy(np.flatnonzero(np.unpackbits(words.numpy().view(np.uint8), bitorder="little")))
