"""Measured seconds of one task's steps, by how they were split, and the model of throughput that follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from hydra_engine.adaptive.throughput import StepTime, ThroughputModel

# The share that older measurements of a configuration keep as one more comes.
OLDER_KEPT = 0.9
# Configurations that are remembered; those not measured for longest are forgotten.
MOST_KNOWN = 64
# The share of a step from which on transfers decide how long it takes.
LINK_BOUND = 0.75

# Devices, samples of a micro-batch, micro-batches of a device.
Configuration: TypeAlias = "tuple[int, int, int]"


class _Seconds(NamedTuple):
    """Sums over the steps of one configuration, in which older ones count less."""

    step_s: float = 0.0
    link_s: float = 0.0
    weight: float = 0.0
    is_first: bool = True  # of one step alone, which may have been metered, or compiled

    def plus(self, step_s: float, link_s: float) -> _Seconds:
        kept = 0.0 if self.is_first else OLDER_KEPT
        is_first = self.weight == 0
        return _Seconds(kept * self.step_s + step_s, kept * self.link_s + link_s, kept * self.weight + 1, is_first)


class StepTimes:
    """Means of step times. The first step of a configuration counts until there is another."""

    def __init__(self) -> None:
        self._known: dict[Configuration, _Seconds] = {}
        self.most_devices = 1  # that a step was measured on

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(self, devices: int, micro_batch: int, rounds: int, step_s: float, link_s: float) -> bool:
        """Add a step; `link_s`: seconds of its loads. Return True if it is the first of its configuration."""
        key = devices, micro_batch, rounds
        found = self._known.pop(key, _Seconds())
        self._known[key] = found.plus(step_s, link_s)  # the last to be forgotten
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self.most_devices = max(self.most_devices, devices)
        return found.weight == 0

    def fitted(self) -> ThroughputModel:
        """Return the model that is nearest to what was measured; there is at least one step."""
        times = [
            StepTime(devices=k, micro_batch=m, accumulation_steps=n - 1, seconds=each.step_s / each.weight)
            for (k, m, n), each in self._known.items()
        ]
        load_s, sample_s = self._link()
        return ThroughputModel.fit(times, load_s=load_s, sample_s=sample_s)

    def _link(self) -> tuple[float, float]:
        """Seconds of transfers, of a step and of each sample of a device.

        Loads are traced. Where they are most of a step, they wait for one another as well: the step itself counts then.
        """
        points = [
            (m * n, each.link_s / each.weight, each.step_s / each.weight) for (_, m, n), each in self._known.items()
        ]
        bound = [(samples, step_s) for samples, link_s, step_s in points if link_s >= LINK_BOUND * step_s]
        if len({samples for samples, _ in bound}) > 1:
            return _line(bound)
        load_s, sample_s = _line([(samples, link_s) for samples, link_s, _ in points])
        if not bound:
            return load_s, sample_s
        samples, step_s = bound[0]
        longer = step_s / (load_s + sample_s * samples)
        return longer * load_s, longer * sample_s

    def state_dict(self) -> dict[str, Any]:
        """Return all sums, as plain values."""
        return {"known": [[list(key), list(each)] for key, each in self._known.items()], "most": self.most_devices}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._known = {(key[0], key[1], key[2]): _Seconds(*each) for key, each in saved["known"]}
        self.most_devices = saved["most"]


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Least squares of seconds = a + b * samples, neither below 0."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    slope = min(max(0.0, slope), mean_y / mean_x)
    return max(0.0, mean_y - slope * mean_x), slope
