"""Measured seconds of one task's steps, by how they were split, and the model of throughput that follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any, NamedTuple, TypeAlias

from hydra_engine import LaneSeconds
from hydra_engine.adaptive.throughput import StepTime, ThroughputModel, ThroughputParameters

# The share that older measurements of a configuration keep as one more comes.
OLDER_KEPT = 0.9
# Configurations that are remembered; those not measured for longest are forgotten.
MOST_KNOWN = 64

# Devices, samples of a micro-batch, micro-batches of a device.
Configuration: TypeAlias = "tuple[int, int, int]"


class _Sums(NamedTuple):
    """Sums over the steps of one configuration, in which older ones count less."""

    step_s: float = 0.0
    compute_s: float = 0.0
    link_s: float = 0.0
    weight: float = 0.0
    is_first: bool = True  # of one step alone, which may have been metered, or compiled

    def plus(self, seconds: LaneSeconds) -> _Sums:
        kept = 0.0 if self.is_first else OLDER_KEPT
        return _Sums(
            kept * self.step_s + seconds.step_s,
            kept * self.compute_s + seconds.compute_s,
            kept * self.link_s + seconds.link_s,
            kept * self.weight + 1,
            self.weight == 0,
        )

    @property
    def mean(self) -> LaneSeconds:
        return LaneSeconds(self.step_s / self.weight, self.compute_s / self.weight, self.link_s / self.weight)


class StepTimes:
    """Means of step times. The first step of a configuration counts until there is another."""

    def __init__(self) -> None:
        self._known: dict[Configuration, _Sums] = {}
        self.most_devices = 1  # that a step was measured on

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(self, devices: int, micro_batch: int, rounds: int, seconds: LaneSeconds) -> bool:
        """Add a step, with the seconds of one of its devices. Return True if it is the first of its configuration."""
        key = devices, micro_batch, rounds
        found = self._known.pop(key, _Sums())
        self._known[key] = found.plus(seconds)  # the last to be forgotten
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self.most_devices = max(self.most_devices, devices)
        return found.weight == 0

    def fitted(self) -> ThroughputModel:
        """Return the model that is nearest to what was measured; there is at least one step.

        Lanes tell computing and transfers apart, which a step's seconds alone do not: passes are fitted to the compute
        lane, transfers to the load lane. What they overlap, and what comes beside them, follows from whole steps.
        """
        means = {key: each.mean for key, each in self._known.items()}
        passes = [
            StepTime(devices=1, micro_batch=m, accumulation_steps=n - 1, seconds=each.compute_s)
            for (_, m, n), each in means.items()
        ]
        load_s, sample_s = _line([(m * n, each.link_s) for (_, m, n), each in means.items()])
        found = replace(ThroughputModel.fit(passes).parameters, load_s=load_s, sample_s=sample_s)
        found = _with_overlap(found, {key: each for key, each in means.items() if key[0] == 1} or means)
        return ThroughputModel(_with_exchange(found, means))

    def state_dict(self) -> dict[str, Any]:
        """Return all sums, as plain values."""
        return {"known": [[list(key), list(each)] for key, each in self._known.items()], "most": self.most_devices}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._known = {(key[0], key[1], key[2]): _Sums(*each) for key, each in saved["known"]}
        self.most_devices = saved["most"]


def _with_overlap(found: ThroughputParameters, means: Mapping[Configuration, LaneSeconds]) -> ThroughputParameters:
    """Parameters with what is not hidden of the shorter one of computing and transfers, and what comes beside both.

    What one configuration leaves open comes beside both: then a larger batch looks better, and is tried.
    """
    shorter = [min(each.compute_s, each.link_s) for each in means.values()]
    rest = [each.step_s - max(each.compute_s, each.link_s) for each in means.values()]
    mean_shorter, mean_rest = fmean(shorter), max(0.0, fmean(rest))
    spread = sum((x - mean_shorter) ** 2 for x in shorter)
    slope = 0.0
    if spread > 0:
        slope = sum((x - mean_shorter) * y for x, y in zip(shorter, rest, strict=True)) / spread
        slope = min(max(0.0, slope), 1.0, mean_rest / mean_shorter)
    return replace(found, exposed=slope, other_s=max(0.0, mean_rest - slope * mean_shorter))


def _with_exchange(found: ThroughputParameters, means: Mapping[Configuration, LaneSeconds]) -> ThroughputParameters:
    """Parameters with the seconds that steps on several devices take beyond what they would without an exchange."""
    model = ThroughputModel(found)
    excess = [
        (k - 2, each.step_s - model.seconds(devices=k, micro_batch=m, accumulation_steps=n - 1))
        for (k, m, n), each in means.items()
        if k > 1
    ]
    if not excess:
        return found
    if len({others for others, _ in excess}) == 1:
        return replace(found, a_r=max(0.0, median(each for _, each in excess)))
    a_r, b_r = _line([(others + 1, each) for others, each in excess])
    return replace(found, a_r=a_r + b_r, b_r=b_r)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Least squares of seconds = a + b * samples, neither below 0."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    slope = min(max(0.0, slope), max(0.0, mean_y) / mean_x)
    return max(0.0, mean_y - slope * mean_x), slope
