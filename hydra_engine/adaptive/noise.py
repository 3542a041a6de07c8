"""The noise of gradients: how much more one step learns from a larger batch.

A step's gradient is the true gradient plus noise, and the noise shrinks with the batch. Both sizes are estimated from
the micro-batches of a step: their gradients differ by noise alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from partitioners.plain_numbers import finite_number, make_plain, plain, whole_number

LEAST_VAR = 1e-6  # keeps a gain defined for gradients without noise

Numbers = Sequence[float]


def gain_of(sqr: float, var: float, scale: float) -> float:
    """Return how many steps of the initial batch one step of a `scale` times larger batch is worth.

    It lies between 1 and `scale`. sqr: the true gradient's squared norm. var: that of the noise at the initial batch.
    """
    gain = (var + sqr) / (var / scale + sqr) if var + sqr > 0 else 1.0
    return min(max(gain, min(1.0, scale)), max(1.0, scale))


@dataclass(frozen=True, kw_only=True)
class NoiseLevel:
    """The noise of gradients at one time, of all parameter groups together.

    sqr: squared norm of the true gradient.
    var: squared norm of the noise of a batch of `initial_batch_size` samples.
    """

    sqr: float
    var: float
    initial_batch_size: int

    def __post_init__(self) -> None:
        make_plain(self)
        finite_number("sqr", self.sqr)
        finite_number("var", self.var)
        whole_number("initial_batch_size", self.initial_batch_size)

    def gain(self, batch_size: float) -> float:
        """Return how many steps of the initial batch one step of `batch_size` samples is worth."""
        return gain_of(self.sqr, self.var, batch_size / self.initial_batch_size)


class _Average(NamedTuple):
    """Running averages per parameter group. Each is divided by `weight`, the sum of the weights so far."""

    sqr: tuple[float, ...]
    var: tuple[float, ...]
    weight: float


class GradientNoiseScale:
    """The noise of a task's gradients, averaged over its steps.

    With micro-batches of b_i samples, B in all, mean gradients g_i and weights w_i = b_i / B, a step tells
    G = sum w_i g_i, L = sum w_i |g_i|^2 and T = |G|^2. Then sqr = (n T - L) / (n - 1) and
    var = (L - T) / (n - 1) * B / initial_batch_size have the true sizes as their means, for equal and unequal b_i.
    (McCandlish et al. 2018, arXiv 1812.06162; Johnson et al. 2020, arXiv 2007.05105.)

    initial_batch_size: samples of the batch that the learning rate was chosen for.
    num_groups: parameter groups, whose norms are averaged apart.
    smoothing: weight of the past after a step of the initial batch; S times that batch forgets S times as fast.

    Before the first update there is no noise: sqr is 1 and var is 0, so every gain is 1.
    """

    def __init__(self, initial_batch_size: int, *, num_groups: int = 1, smoothing: float = 0.999) -> None:
        self.initial_batch_size = whole_number("initial_batch_size", initial_batch_size)
        self.num_groups = whole_number("num_groups", num_groups)
        smoothing = plain(smoothing)
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing: {smoothing}, limit: from 0 to below 1; give such a number")
        self.smoothing = smoothing
        zeros = (0.0,) * self.num_groups
        nothing = _Average(zeros, zeros, 0.0)
        # `_of_steps` has the steps of several micro-batches alone. `_read` has pairs of steps too, until the next step
        # of several micro-batches: between two steps the weights change, which counts as noise.
        self._of_steps = self._read = nothing

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__} (initial_batch_size: {self.initial_batch_size}, num_groups: {self.num_groups}, "
            f"noise_scale: {self.noise_scale:.6g})"
        )

    @property
    def is_known(self) -> bool:
        """True after the first update."""
        return self._read.weight > 0

    @property
    def sqr(self) -> tuple[float, ...]:
        """Squared norm of the true gradient, per parameter group. 0 where noise hides it."""
        if not self.is_known:
            return (1.0,) * self.num_groups
        return tuple(max(each / self._read.weight, 0.0) for each in self._read.sqr)

    @property
    def var(self) -> tuple[float, ...]:
        """Squared norm of the noise of a batch of `initial_batch_size` samples, per parameter group."""
        if not self.is_known:
            return (0.0,) * self.num_groups
        return tuple(max(each / self._read.weight, LEAST_VAR) for each in self._read.var)

    @property
    def level(self) -> NoiseLevel:
        """The sums over parameter groups, as a value that later updates do not change."""
        return NoiseLevel(sqr=sum(self.sqr), var=sum(self.var), initial_batch_size=self.initial_batch_size)

    @property
    def noise_scale(self) -> float:
        """The batch, in samples, in which noise and true gradient are equally large: var * initial_batch_size / sqr.

        A batch much larger wastes samples, a batch much smaller wastes steps. It is inf where noise hides the gradient,
        and 0 before the first update.
        """
        level = self.level
        return level.var * self.initial_batch_size / level.sqr if level.sqr > 0 else math.inf

    def gain(self, batch_size: float) -> float:
        """Return how many steps of the initial batch one step of `batch_size` samples is worth, over all groups."""
        self._check_batch(batch_size)
        return self.level.gain(batch_size)

    def gains(self, batch_size: float) -> tuple[float, ...]:
        """Return the gain of each parameter group."""
        self._check_batch(batch_size)
        scale = batch_size / self.initial_batch_size
        return tuple(gain_of(sqr, var, scale) for sqr, var in zip(self.sqr, self.var, strict=True))

    def update(
        self, batch_sizes: Sequence[float], micro_square_norms: Sequence[Numbers], total_square_norms: Numbers
    ) -> bool:
        """Add one step of two or more micro-batches. Return False, and change nothing, if a number is not finite.

        batch_sizes: samples of each micro-batch; with a loss that weighs samples, the share of the batch that it has.
        micro_square_norms: squared norms of each micro-batch's mean gradient, one per parameter group.
        total_square_norms: squared norms of the step's gradient, which weighs each of them by its samples.
        """
        if len(batch_sizes) < 2:
            raise ValueError(
                f"batch_sizes: {len(batch_sizes)} micro-batches, limit: at least 2; use update_from_pair for one"
            )
        if len(micro_square_norms) != len(batch_sizes):
            raise ValueError(
                f"micro_square_norms: of {len(micro_square_norms)} micro-batches, limit: {len(batch_sizes)}, as in "
                "batch_sizes; give one entry per micro-batch"
            )
        batch_sizes = [finite_number("batch_sizes", size) for size in batch_sizes]
        if 0 in batch_sizes:
            raise ValueError("batch_sizes: 0, limit: more than 0; leave micro-batches without samples out")
        rows = [self._norms("micro_square_norms", row) for row in micro_square_norms]
        samples = sum(batch_sizes)
        locals_ = [
            math.fsum(size / samples * row[group] for size, row in zip(batch_sizes, rows, strict=True))
            for group in range(self.num_groups)
        ]
        scale = samples / self.initial_batch_size
        totals = self._norms("total_square_norms", total_square_norms)
        added = self._added(self._of_steps, len(rows), scale, locals_, totals)
        if added is None:
            return False
        self._of_steps = self._read = added
        return True

    def update_from_pair(self, batch_size: int, now: Numbers, before: Numbers, mean: Numbers) -> bool:
        """Add a step of one micro-batch, for which the step before stands in as a second one.

        It counts until the next step of several micro-batches. Return False, and change nothing, if a number is not
        finite. All norms are squared, one per parameter group.

        batch_size: samples of the step, and of the step before.
        now, before: norms of the two gradients.
        mean: norm of their mean, (now + before) / 2.
        """
        batch_size = whole_number("batch_size", batch_size)
        pair = zip(self._norms("now", now), self._norms("before", before), strict=True)
        locals_ = [(one + other) / 2 for one, other in pair]
        scale = 2 * batch_size / self.initial_batch_size
        added = self._added(self._read, 2, scale, locals_, self._norms("mean", mean))
        if added is None:
            return False
        self._read = added
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the averages as plain numbers. Settings are not among them."""
        return {
            "initial_batch_size": self.initial_batch_size,
            "of_steps": _plain(self._of_steps),
            "read": _plain(self._read),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the averages of `state`. Raise ValueError if they are of other groups or another initial batch."""
        for key in ("initial_batch_size", "of_steps", "read"):
            if key not in state:
                raise ValueError(f"state: no {key!r}, keys: {sorted(state)}; give what state_dict() returned")
        if state["initial_batch_size"] != self.initial_batch_size:
            raise ValueError(
                f"initial_batch_size: {self.initial_batch_size}, saved: {state['initial_batch_size']}; give the one "
                "that was saved, since the noise is that of such a batch"
            )
        self._of_steps, self._read = (self._average(state[key]) for key in ("of_steps", "read"))

    def _average(self, saved: Mapping[str, Any]) -> _Average:
        average = _Average(tuple(saved["sqr"]), tuple(saved["var"]), saved["weight"])
        for values in average[:2]:
            if len(values) != self.num_groups:
                raise ValueError(
                    f"state: averages of {len(values)} parameter groups, limit: {self.num_groups}, as in num_groups; "
                    "give the optimizer the groups that it had when the state was saved"
                )
        return average

    def _norms(self, name: str, values: Numbers) -> list[float]:
        if len(values) != self.num_groups:
            raise ValueError(
                f"{name}: {len(values)} squared norms, limit: {self.num_groups}, one per parameter group; give as many"
            )
        norms = [float(each) for each in values]
        for each in norms:
            if -math.inf < each < 0:
                raise ValueError(f"{name}: {each}, limit: at least 0; give squared norms")
        return norms

    def _added(self, average: _Average, num: int, scale: float, locals_: Numbers, totals: Numbers) -> _Average | None:
        """Return an average with one more step of `num` micro-batches, or None if a number is not finite."""
        pairs = list(zip(locals_, totals, strict=True))
        sqr = [(num * total - local) / (num - 1) for local, total in pairs]
        var = [(local - total) * scale / (num - 1) for local, total in pairs]
        if not all(map(math.isfinite, (*sqr, *var))):
            return None
        theta = self.smoothing**scale
        return _Average(
            tuple(theta * old + (1 - theta) * new for old, new in zip(average.sqr, sqr, strict=True)),
            tuple(theta * old + (1 - theta) * new for old, new in zip(average.var, var, strict=True)),
            theta * average.weight + (1 - theta),
        )

    def _check_batch(self, batch_size: float) -> None:
        if not 0 < batch_size < math.inf:
            raise ValueError(f"batch_size: {batch_size}, limit: more than 0 and finite; give the samples of a step")


def _plain(average: _Average) -> dict[str, Any]:
    return {"sqr": list(average.sqr), "var": list(average.var), "weight": average.weight}
