"""Ceilings of a machine: the rates that nothing on it goes beyond, stated or measured once in a process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from hydra_engine.system import dram
from partitioners.plain_numbers import make_plain

# A median of so many; what is measured was done once before.
NUM_REPEATS = 3
# One copy in DRAM, of all threads together: more than any cache holds.
DRAM_BYTES = 2**29
# A product takes so long at least: its matrices are grown until it does.
MATMUL_S = 4e-3
SMALLEST_MATRIX = 64
# Where figures come from.
STATED, MEASURED_NOW = "stated", "measured now"


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Highest rates of one kind of device, and of the host's memory."""

    name: str  # of the kind of device: "cpu", or an accelerator's product name
    up_bytes_per_s: float  # of a copy from DRAM to the device
    down_bytes_per_s: float  # of a copy from the device to DRAM
    dram_bytes_per_s: float | None = None  # read and written by all threads that update weights; None: unknown
    matmul_flops: Mapping[str, float] = field(default_factory=dict)  # of a product of matrices, by dtype ("float32")
    origin: str = MEASURED_NOW  # or STATED

    def __post_init__(self) -> None:
        make_plain(self)
        rates = {"up_bytes_per_s": self.up_bytes_per_s, "down_bytes_per_s": self.down_bytes_per_s}
        rates |= {f"matmul_flops of {dtype}": rate for dtype, rate in self.matmul_flops.items()}
        if self.dram_bytes_per_s is not None:
            rates["dram_bytes_per_s"] = self.dram_bytes_per_s
        for name, rate in rates.items():
            is_number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
            if not is_number or not 0 < rate < math.inf:
                raise ValueError(f"{name}: {rate!r}, limit: finite, above 0")

    @classmethod
    def of_link(cls, name: str, bytes_per_s: float, origin: str) -> Ceilings:
        """A link that is as fast each way; nothing else is known."""
        return cls(name=name, origin=origin, up_bytes_per_s=bytes_per_s, down_bytes_per_s=bytes_per_s)

    @property
    def link_bytes_per_s(self) -> float:
        """Return the rate of a pipeline that loads and stores all the time: of the slower way."""
        return min(self.up_bytes_per_s, self.down_bytes_per_s)

    @property
    def source(self) -> str:
        """Return the figures' origin, in words."""
        return f"rates of {self.name}: {self.origin}"


def dram_bytes_per_s(num_workers: int, num_threads: int, repeats: int = NUM_REPEATS) -> float:
    """Bytes read and written in a second by copies in DRAM, one in each of so many threads."""
    num_bytes = max(1, min(DRAM_BYTES, dram.available_dram_bytes() // 8) // num_workers)
    pairs = [torch.ones(2, num_bytes, dtype=torch.uint8).unbind() for _ in range(num_workers)]  # each page is written
    with ThreadPoolExecutor(num_workers, "hydra-rates", torch.set_num_threads, (num_threads,)) as pool:

        def copy_all() -> None:
            for copied in [pool.submit(target.copy_, source) for source, target in pairs]:
                copied.result()

        seconds = median_s(copy_all, repeats)
    return 2 * num_bytes * num_workers / seconds


def matmul_flops(
    device: torch.device, dtype: torch.dtype, most_bytes: int, finish: Callable[[], None], repeats: int = NUM_REPEATS
) -> float:
    """Operations per second of a product of square matrices, as large as takes MATMUL_S or fits."""
    generator = torch.Generator(device).manual_seed(0)
    size = SMALLEST_MATRIX
    while True:
        shape = (size, size)
        left, right, product = (torch.empty(shape, dtype=dtype, device=device) for _ in range(3))
        for factor in (left, right):  # of zeros, some devices make more in a second
            factor.uniform_(-1, 1, generator=generator)

        def multiply(factors: tuple[Tensor, Tensor] = (left, right), out: Tensor = product) -> None:
            torch.mm(*factors, out=out)
            finish()

        seconds = median_s(multiply, repeats)
        if seconds >= MATMUL_S or 3 * (2 * size) ** 2 * dtype.itemsize > most_bytes:
            return 2 * size**3 / seconds
        size *= 2


def median_s(work: Callable[[], None], repeats: int = NUM_REPEATS) -> float:
    """Median seconds, after a first time that is not counted."""
    seconds = []
    for _ in range(1 + repeats):
        start_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start_s)
    return median(seconds[1:])
