"""Goodput: samples per second, counted by how much a step learns from them. And the batch with the highest one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hydra_engine.adaptive.noise import GradientNoiseScale, NoiseLevel
from hydra_engine.adaptive.throughput import ThroughputModel
from partitioners.plain_numbers import whole_number

NUM_CANDIDATES = 50
WORTH_A_CHANGE = 1.05  # of the current goodput: below it, noise in the estimates would change the batch all the time


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A batch and its split.

    micro_batch: samples of the largest micro-batch. Sizes differ by at most 1, as those of `split_batch` do.
    accumulation_steps: micro-batches that a device runs before the last one, so 0 for one micro-batch per device.
    goodput: samples per second, of the worth that samples have at the initial batch.
    """

    batch_size: int
    micro_batch: int
    accumulation_steps: int
    goodput: float


class _Limits(NamedTuple):
    """Splits that are allowed."""

    max_batch_size: int
    least_micro: int
    most_micro: int
    accumulation: bool
    least_micro_batches: int

    def split(self, batch_size: int, devices: int) -> tuple[int, int] | None:
        """Return the micro-batch and the accumulation steps of the fewest passes, or None if no split is allowed.

        More passes than needed are never faster: each has a constant time, and only the last overlaps the exchange.
        """
        passes = max(_ceil(batch_size, devices * self.most_micro), _ceil(self.least_micro_batches, devices))
        while devices * passes <= batch_size:
            micro = _ceil(batch_size, devices * passes)
            if _ceil(batch_size, devices * micro) == passes:  # else `split_batch` would make fewer of them
                return (micro, passes - 1) if self.allows(batch_size, devices, passes) else None
            passes += 1
        return None

    def allows(self, batch_size: int, devices: int, passes: int) -> bool:
        """Return True if `passes` micro-batches per device keep all limits."""
        num_micro_batches = devices * passes
        return (
            batch_size <= self.max_batch_size
            and (self.accumulation or passes == 1)
            and num_micro_batches >= self.least_micro_batches
            and self.least_micro <= batch_size // num_micro_batches
            and _ceil(batch_size, num_micro_batches) <= self.most_micro
        )

    def candidates(self, initial_batch_size: int, devices: int) -> list[int]:
        """Return batch sizes in geometric steps, and below each one the largest that fills all micro-batches."""
        low = max(initial_batch_size, devices * self.least_micro, self.least_micro_batches)
        high = self.max_batch_size if self.accumulation else min(self.max_batch_size, devices * self.most_micro)
        if low > high:
            return []
        steps = NUM_CANDIDATES - 1
        sizes = {round(low * (high / low) ** (step / steps)) for step in range(NUM_CANDIDATES)} | {low, high}
        full = devices * self.most_micro
        sizes |= {size // full * full for size in sizes}
        return sorted(size for size in sizes if low <= size <= high)


class Goodput:
    """Goodput of a task: throughput times efficiency (Qiao et al. 2021, Pollux).

    The limits of a choice, wherever a method takes them:

    max_batch_size: the largest batch, in samples. The smallest is the initial batch.
    bounds: least and most samples of a device's micro-batch.
    accumulation: False allows one micro-batch per device and step only.
    least_micro_batches: micro-batches of a step on all devices together. 2 are needed to measure the noise.
    """

    def __init__(self, throughput: ThroughputModel, noise: GradientNoiseScale | NoiseLevel) -> None:
        self.throughput = throughput
        self.noise = noise.level if isinstance(noise, GradientNoiseScale) else noise

    def efficiency(self, batch_size: float) -> float:
        """Return what a sample is worth in a batch of `batch_size`, as a share of its worth in the initial batch."""
        if not batch_size > 0:
            raise ValueError(f"batch_size: {batch_size}, limit: more than 0; give the samples of a step")
        return self.noise.gain(batch_size) * self.noise.initial_batch_size / batch_size

    def evaluate(self, devices: int, micro_batch: int, accumulation_steps: int = 0) -> float:
        """Return the goodput of a step whose micro-batches all have `micro_batch` samples."""
        throughput = self.throughput.throughput(
            devices=devices, micro_batch=micro_batch, accumulation_steps=accumulation_steps
        )
        return throughput * self.efficiency(devices * micro_batch * (accumulation_steps + 1))

    def optimize(
        self,
        devices: int,
        *,
        max_batch_size: int,
        bounds: tuple[int, int] | None = None,
        accumulation: bool = True,
        least_micro_batches: int = 1,
        current: Choice | None = None,
    ) -> Choice:
        """Return the choice with the highest goodput on `devices` devices.

        The current batch stays unless another one has a goodput more than 5 % higher. Its split stays as well, if it is
        one for these devices. A current choice that breaks a limit is not considered.

        Raises ValueError if no batch between the initial one and the largest can be split within the limits.
        """
        devices = whole_number("devices", devices)
        limits = self._limits(max_batch_size, bounds, accumulation, least_micro_batches)
        best = self._best(devices, limits)
        if best is None:
            raise ValueError(
                f"devices: {devices}, no batch of {self.noise.initial_batch_size} to {max_batch_size} samples has at "
                f"least {least_micro_batches} micro-batches of {limits.least_micro} to {limits.most_micro} samples "
                f"{'with' if accumulation else 'without'} accumulation; give more bounds or fewer devices"
            )
        kept = self._kept(devices, limits, current) if current is not None else None
        return kept if kept is not None and best.goodput <= WORTH_A_CHANGE * kept.goodput else best

    def goodputs(
        self,
        max_devices: int,
        *,
        max_batch_size: int,
        bounds: tuple[int, int] | None = None,
        accumulation: bool = True,
        least_micro_batches: int = 1,
    ) -> tuple[float, ...]:
        """Return the highest goodput on 1 to `max_devices` devices.

        A number of devices for which no batch can be split has the goodput of the number below: one is idle. It is 0 if
        there is none below.
        """
        max_devices = whole_number("max_devices", max_devices)
        limits = self._limits(max_batch_size, bounds, accumulation, least_micro_batches)
        found = [0.0]
        for devices in range(1, max_devices + 1):
            best = self._best(devices, limits)
            found.append(found[-1] if best is None else best.goodput)
        return tuple(found[1:])

    def desired_devices(
        self,
        max_devices: int,
        *,
        max_batch_size: int,
        bounds: tuple[int, int] | None = None,
        accumulation: bool = True,
        least_micro_batches: int = 1,
        least_share: float = 0.5,
    ) -> int:
        """Return the largest number of devices, of which each still does `least_share` of what one alone does.

        That is the largest k with goodput(k) >= least_share * k * goodput(1). If one device alone can do nothing, the
        fewest that can are compared with. Raises ValueError if `max_devices` can do nothing either.
        """
        if not 0 <= least_share <= 1:
            raise ValueError(f"least_share: {least_share}, limit: from 0 to 1; give such a share")
        found = self.goodputs(
            max_devices,
            max_batch_size=max_batch_size,
            bounds=bounds,
            accumulation=accumulation,
            least_micro_batches=least_micro_batches,
        )
        first = next((k for k, goodput in enumerate(found, 1) if goodput > 0), None)
        if first is None:
            raise ValueError(
                f"max_devices: {max_devices}, no batch of up to {max_batch_size} samples can be split for them; give a "
                "larger max_batch_size, wider bounds or fewer least_micro_batches"
            )
        of_one = found[first - 1] / first
        return max(k for k in range(first, max_devices + 1) if found[k - 1] >= least_share * k * of_one)

    def _limits(
        self, max_batch_size: int, bounds: tuple[int, int] | None, accumulation: bool, least_micro_batches: int
    ) -> _Limits:
        initial = self.noise.initial_batch_size
        max_batch_size = whole_number("max_batch_size", max_batch_size)
        if max_batch_size < initial:
            raise ValueError(
                f"max_batch_size: {max_batch_size}, limit: at least {initial}, the initial batch; give more"
            )
        least_micro_batches = whole_number("least_micro_batches", least_micro_batches)
        low, high = (1, max_batch_size) if bounds is None else bounds
        low = whole_number("bounds", low)
        high = whole_number("bounds", high, least=low)
        return _Limits(max_batch_size, low, high, accumulation, least_micro_batches)

    def _choice(self, devices: int, batch_size: int, split: tuple[int, int]) -> Choice:
        micro, extra = split
        seconds = self.throughput.seconds(devices=devices, micro_batch=micro, accumulation_steps=extra)
        goodput = batch_size / seconds * self.efficiency(batch_size)
        return Choice(batch_size=batch_size, micro_batch=micro, accumulation_steps=extra, goodput=goodput)

    def _best(self, devices: int, limits: _Limits) -> Choice | None:
        """Return the choice with the highest goodput, the smallest batch of equals, or None."""
        sizes = limits.candidates(self.noise.initial_batch_size, devices)
        splits = ((size, limits.split(size, devices)) for size in sizes)
        choices = [self._choice(devices, size, split) for size, split in splits if split is not None]
        return max(choices, key=lambda each: each.goodput, default=None)

    def _kept(self, devices: int, limits: _Limits, current: Choice) -> Choice | None:
        """Return the current choice with its goodput on these devices, split anew if need be, or None."""
        size, micro = current.batch_size, current.micro_batch
        if size < self.noise.initial_batch_size or not limits.least_micro <= micro <= limits.most_micro:
            return None
        passes = current.accumulation_steps + 1
        is_split = micro == _ceil(size, devices * passes) and limits.allows(size, devices, passes)
        split = (micro, passes - 1) if is_split else limits.split(size, devices)
        return None if split is None else self._choice(devices, size, split)


def _ceil(value: int, by: int) -> int:
    return -(-value // by)
