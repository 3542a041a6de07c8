"""A float32 weight kept as two halves: its bfloat16 rounding, which crosses the link, and a signed 16-bit remainder.

    bits of the weight = (bits of the rounding << 16) + remainder        remainder = lower half of the bits, signed

Where the rounding goes down, the remainder is what it lost; where it goes up, what it gained, negated. So the sum is
the weight again, also for subnormal numbers, and where the rounding overflows to infinity. Two kinds of weights are
not told by their halves, and are kept apart with their place:

    ties to an even upper half   the lower half is 0x8000, and the rounding went down. With the same two halves a weight
                                 whose rounding went up is meant. One in 131,072 of random bits
    NaN with a payload below     of NaN torch's rounding keeps nothing, so the remainder is the upper half instead
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hydra_engine.native import kernel
from hydra_engine.system import discard
from partitioners.boundary import extent

# Elements that are put together or taken apart at a time: what they need beside is in the second-level cache.
BLOCK = 2**16
_TIE = -(2**15)


class Apart(NamedTuple):
    """Elements of a weight that its halves do not tell."""

    places: Tensor  # int64, ascending
    bits: Tensor  # int32, of the weight there
    has_nan: bool  # remainders of NaN are upper halves

    @property
    def nbytes(self) -> int:
        return self.places.nbytes + self.bits.nbytes


NOTHING_APART = Apart(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32), has_nan=False)


class SplitWeight:
    """A weight of which its halves are in DRAM: both flat, in the order of the weight's memory.

    narrow: bfloat16, as torch rounds to it. rest: int16. ties: in a GPU's memory, instead of what is apart; there NaN
    has no payload below (`Halves` of native/kernel.py).
    """

    def __init__(self, narrow: Tensor, rest: Tensor, apart: Apart = NOTHING_APART, ties: Tensor | None = None) -> None:
        self.narrow = narrow
        self.rest = rest
        self.apart = apart
        self.ties = ties

    def load(self, out: Tensor) -> Tensor:
        """Fill `out`, float32, flat and as long, with the weight; return it."""
        if len(out) > BLOCK:
            for each, target in zip(self.pieces(BLOCK), torch.split(out, BLOCK), strict=True):
                each.load(target)
            return out
        bits = out.copy_(self.narrow).view(torch.int32)
        bits += self.rest
        if self.apart.has_nan:
            is_nan = self.narrow.isnan()
            bits[is_nan] = self.rest[is_nan].to(torch.int32) << 16
        if len(self.apart.places):
            bits[self.apart.places] = self.apart.bits
        return out

    def store(self, values: Tensor) -> None:
        """Take over these values, float32, flat and as long."""
        if len(values) > BLOCK:
            pieces = self.pieces(BLOCK)
            for each, source in zip(pieces, torch.split(values, BLOCK), strict=True):
                each.store(source)
            self.join(pieces, BLOCK)
            return
        bits = values.view(torch.int32)
        self.narrow.copy_(values)
        self.rest.copy_(bits)
        # A sum is one pass, and NaN if a term is; or of two infinities, then nothing is found.
        if not math.isnan(float(values.sum())):
            self.apart = self._ties(bits)
            return
        is_nan = values.isnan()
        self.rest[is_nan] = (bits[is_nan] >> 16).to(torch.int16)
        self.apart = NOTHING_APART._replace(has_nan=bool(is_nan.any()))
        again = self.load(torch.empty_like(values)).view(torch.int32)
        places = (again != bits).nonzero().flatten()
        self.apart = self.apart._replace(places=places, bits=bits[places])

    def pieces(self, size: int) -> list[SplitWeight]:
        """Return views of so many elements each; `join` takes over what was stored into them."""
        halves = list(zip(torch.split(self.narrow, size), torch.split(self.rest, size), strict=True))
        ends = torch.searchsorted(self.apart.places, size * torch.arange(len(halves) + 1)).tolist()
        pieces = []
        for k, (narrow, rest) in enumerate(halves):
            apart = NOTHING_APART
            if self.apart.has_nan or ends[k] < ends[k + 1]:
                mine = slice(ends[k], ends[k + 1])
                apart = Apart(self.apart.places[mine] - k * size, self.apart.bits[mine], self.apart.has_nan)
            pieces.append(SplitWeight(narrow, rest, apart))
        return pieces

    def join(self, pieces: Sequence[SplitWeight], size: int) -> None:
        """Take over what is apart in pieces of so many elements."""
        found = [(k, each.apart) for k, each in enumerate(pieces) if each.apart.has_nan or len(each.apart.places)]
        if not found:
            self.apart = NOTHING_APART
            return
        self.apart = Apart(
            torch.cat([apart.places + k * size for k, apart in found]),
            torch.cat([apart.bits for _, apart in found]),
            any(apart.has_nan for _, apart in found),
        )

    def keep_apart(self, places: Tensor, bits: Tensor, *, has_nan: bool) -> None:
        """Take over what halves do not tell that somebody else has written."""
        self.apart = Apart(places, bits, has_nan) if has_nan or len(places) else NOTHING_APART

    def copy_to(self, other: SplitWeight, copy: Callable[..., None]) -> SplitWeight:
        """Copy the weight to halves in DRAM, or in a GPU's memory, and return those; copy: of (target, source)."""
        pairs = [(other.narrow, self.narrow), (other.rest, self.rest)]
        if self.ties is None and other.ties is None:
            copy(*pairs)
            other.apart = self.apart
        elif other.ties is not None:
            is_tie = ~self.apart.bits.view(torch.float32).isnan()
            copy(*pairs, (other.ties, kernel.tie_words(self.apart.places[is_tie], len(self.narrow))))
        elif self.ties is not None:
            words = torch.empty_like(self.ties, device="cpu")
            copy(*pairs, (words, self.ties))
            places = kernel.tie_places(words)
            bits = other.narrow.view(torch.int16)[places].to(torch.int32) * 2**16 + 0x8000
            other.keep_apart(places, bits, has_nan=bool(other.narrow.isnan().any()))
        return other

    def _ties(self, bits: Tensor) -> Apart:
        """Return the ties that were rounded down; there is no NaN."""
        # By NumPy, which takes a fifth of torch's time for this.
        found = np.flatnonzero(self.rest.numpy() == _TIE)
        values = bits.numpy()[found]
        places = found[self.narrow.view(torch.int16).numpy()[found] == values >> 16]
        if not len(places):
            return NOTHING_APART
        return Apart(torch.from_numpy(places), bits[torch.from_numpy(places)], has_nan=False)

    def copy(self) -> SplitWeight:
        """Return the weight as it is now, in memory of its own."""
        return SplitWeight(self.narrow.clone(), self.rest.clone(), self.apart)

    def put_back(self, before: SplitWeight) -> None:
        """Be as a copy was made."""
        self.narrow.copy_(before.narrow)
        self.rest.copy_(before.rest)
        self.apart = before.apart


def row_of(tensor: Tensor) -> Tensor:
    """Return the memory that a tensor lies in, as one row; with its gaps, if it has any."""
    detached = tensor.detach()
    return detached.as_strided((extent(detached.shape, detached.stride()),), (1,))


class SplitMaster:
    """A parameter whose weight is split, and which has its float32 values only while they are needed.

    The parameter keeps a place in DRAM, at one address for good. Shown, the values are there. Hidden, the place has no
    pages: it takes no DRAM, and reads as zeros.

        show()   the values are there
        keep()   they are taken over from there: what updates wrote
        hide()   they are gone, once as many have hidden it as have shown it

    Updates and callbacks may show it at the same time, in several threads.
    """

    def __init__(self, parameter: nn.Parameter, place: Tensor, split: SplitWeight) -> None:
        self.split = split
        self._parameter = parameter
        self._place = place
        self._lock = threading.Lock()
        self._num_shown = 0

    def show(self) -> None:
        with self._lock:
            self._num_shown += 1
            self.split.load(row_of(self._place))

    def keep(self) -> None:
        now = self._parameter.data
        if now.data_ptr() != self._place.data_ptr() or now.stride() != self._place.stride():
            self._place.copy_(now)  # an optimizer gave it other memory
            self._parameter.data = self._place
        self.split.store(row_of(self._place))

    def hide(self) -> None:
        with self._lock:
            self._num_shown -= 1
            if not self._num_shown:
                discard_values(self._place)

    def load(self, out: Tensor) -> Tensor:
        """Fill a tensor, which is laid out as the parameter, with the values; return it."""
        self.split.load(row_of(out))
        return out


def discard_values(tensor: Tensor) -> None:
    """Give a tensor's pages back to the system."""
    row = row_of(tensor)
    discard(row.untyped_storage(), int(row.storage_offset()) * row.element_size(), row.nbytes)
