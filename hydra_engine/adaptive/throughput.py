"""Seconds of a step, predicted from its devices and micro-batches, and fitted to passes that were timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hydra_engine.adaptive.noise import finite_number, whole_number

MAX_ITERATIONS = 60
PRIOR = 1e-6  # weight of the starting point: it decides only what the observations leave open


@dataclass(frozen=True, kw_only=True)
class ThroughputModel:
    """Predicts the seconds of a step (Qiao et al. 2021, Pollux), with the transfers of a model that lives in DRAM.

    With m samples per micro-batch, s accumulation steps and k devices:

    pass     = a_c + b_c m
    exchange = 0 for one device, else a_r + b_r (k - 2)
    compute  = (s + 1) pass + exchange
    link     = load_s + sample_s m (s + 1)
    seconds  = max(compute, link) + exposed min(compute, link) + other_s

    Shards are loaded once for all micro-batches of a step, while others compute, so the longer of the two counts, and
    as much of the shorter one as is not hidden. That is why accumulation pays: more passes do not load more shards.

    a_c, b_c: seconds of one pass (forward and backward of a micro-batch), and seconds more per sample.
    a_r, b_r: seconds to exchange gradients between devices, and seconds more per device after the second.
    load_s: seconds in which a device loads the whole model twice, once for the forward and once for the backward of all
        micro-batches of a step. It is 0 for a model that stays on the device.
    sample_s: seconds in which a device moves the boundaries of one sample between DRAM and the device.
    exposed: the share of the shorter one of computing and transfers that the longer one does not hide, from 0 to 1.
    other_s: seconds of a step beside both, such as the last update of its optimizer.
    """

    a_c: float
    b_c: float
    a_r: float = 0.0
    b_r: float = 0.0
    load_s: float = 0.0
    sample_s: float = 0.0
    exposed: float = 0.0
    other_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            finite_number(name, value)
        if self.exposed > 1:
            raise ValueError(f"exposed: {self.exposed}, limit: from 0 to 1; give 1 where nothing is hidden")
        if self.a_c + self.b_c == 0:
            raise ValueError(f"a_c, b_c: {self.a_c}, {self.b_c}, limit: one above 0; give the seconds of a pass")

    def seconds(self, *, devices: int, micro_batch: int, accumulation_steps: int = 0) -> float:
        """Return the seconds of a step in which each device runs accumulation_steps + 1 micro-batches."""
        whole_number("devices", devices)
        whole_number("micro_batch", micro_batch)
        passes = whole_number("accumulation_steps", accumulation_steps, least=0) + 1
        exchange_s = self.a_r + self.b_r * (devices - 2) if devices > 1 else 0.0
        compute_s = passes * (self.a_c + self.b_c * micro_batch) + exchange_s
        link_s = self.load_s + self.sample_s * micro_batch * passes
        return max(compute_s, link_s) + self.exposed * min(compute_s, link_s) + self.other_s


def fitted_pass(observations: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return a_c and b_c with which the logarithms of a pass's seconds are nearest to those observed.

    observations: samples of the micro-batch, and the seconds of its pass. Of one size of micro-batch, half of the
    seconds are constant, and half are in proportion to its samples. Equal observations give equal figures.
    """
    if not observations:
        raise ValueError("observations: none, limit: at least 1; time a step first")
    micro, seconds = torch.tensor(observations, dtype=torch.float64).unbind(1)
    log_micro, log_seconds, start = micro.log(), seconds.log(), _start(micro, seconds)
    x = start.clone().requires_grad_(True)
    search = torch.optim.LBFGS(
        [x],
        max_iter=MAX_ITERATIONS,
        max_eval=2 * MAX_ITERATIONS,
        tolerance_grad=1e-9,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def loss(x: Tensor) -> Tensor:
        misses = torch.logaddexp(x[0].expand_as(log_micro), x[1] + log_micro) - log_seconds
        return misses.square().mean() + PRIOR * (x - start).square().sum()

    def closure() -> Tensor:
        found = loss(x)
        (x.grad,) = torch.autograd.grad(found, x)
        return found.detach()

    search.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        found = x if loss(x) < loss(start) else start  # also if a number is not finite
        a_c, b_c = found.exp().tolist()
    return a_c, b_c


def _start(micro: Tensor, seconds: Tensor) -> Tensor:
    """Return logarithms of a_c and b_c where the search begins: so that neither may be negative."""
    mean, m = seconds.mean(), micro.mean()
    a_c, b_c = mean / 2, mean / 2 / m
    spread = (micro - m).square().mean()
    if spread > 0:
        slope = ((micro - m) * seconds).mean() / spread
        # Not too near 0, from which logarithms hardly move.
        b_c = slope.clamp(0.02 * mean / m, 0.98 * mean / m)
        a_c = mean - b_c * m
    return torch.stack((a_c, b_c)).log()
