"""Stated rates, for a device that is not here to be measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates that a device reaches in practice, not the peaks of its data sheet.

    ``flops_per_s``: matrix products, convolutions and attention, in the precision at hand; eager bfloat16 transformers
    reach about half of a GPU's peak. ``memory_bytes_per_s``: everything else is assumed to be bound by its own memory.
    """

    flops_per_s: float
    memory_bytes_per_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"Rates.{field.name}: {value!r}, limit: finite and above 0; pass a number per second")

    def seconds(self, flops: int, num_bytes: int) -> float:
        """Seconds of one operation: arithmetic or memory traffic, whichever takes longer."""
        return max(flops / self.flops_per_s, num_bytes / self.memory_bytes_per_s)


# The kind of device whose kernels `profile` has in mind for estimates.
GPU = "cuda"

# One core of a current server CPU; one current workstation GPU of 24 GB (its peaks: 83 TFLOP/s in float32, 165 in
# bfloat16 and float16 with float32 sums, 1,008 GB/s).
STATED_RATES = {
    ("cpu", "float32"): Rates(flops_per_s=50e9, memory_bytes_per_s=10e9),
    ("cpu", "bfloat16"): Rates(flops_per_s=50e9, memory_bytes_per_s=10e9),
    ("cpu", "float16"): Rates(flops_per_s=25e9, memory_bytes_per_s=10e9),
    ("cuda", "float32"): Rates(flops_per_s=45e12, memory_bytes_per_s=800e9),
    ("cuda", "bfloat16"): Rates(flops_per_s=80e12, memory_bytes_per_s=800e9),
    ("cuda", "float16"): Rates(flops_per_s=80e12, memory_bytes_per_s=800e9),
}
