"""Seconds of a step, predicted from its devices and micro-batches, and fitted to steps that were timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from partitioners.plain_numbers import finite_number, make_plain, whole_number

MOST_GAMMA = 10.0  # beyond it a sum of powers is a maximum
NEVER = -80.0  # logarithm of seconds that are 0
# A step that takes at most this many times as long as its transfers says of its computing only that it is no longer.
NEAR_LINK = 1.1
MAX_ITERATIONS = 60
PRIOR = 1e-6  # weight of the starting point: it decides only what the observations leave open


@dataclass(frozen=True, kw_only=True)
class ThroughputParameters:
    """The parts of a step's seconds. All are at least 0, and gamma at least 1.

    a_c, b_c: seconds of one pass (forward and backward of a micro-batch), and seconds more per sample.
    a_n, b_n: seconds to exchange gradients between nodes, and seconds more per device after the second.
    a_r, b_r: the same between devices of one node.
    gamma: how far the last pass and the exchange overlap: not at all for 1, wholly for large values.
    load_s: seconds in which a device loads the whole model twice, once for the forward and once for the backward of all
        micro-batches of a step. It is 0 for a model that stays on the device.
    sample_s: seconds in which a device moves the boundaries of one sample between DRAM and the device.
    exposed: the share of the shorter one of computing and transfers that the longer one does not hide, from 0 to 1.
    other_s: seconds of a step beside both, such as the last update of its optimizer.

    The last four are measured or follow from the plan. The others are fitted.
    """

    a_c: float
    b_c: float
    a_n: float
    b_n: float
    a_r: float
    b_r: float
    gamma: float
    load_s: float = 0.0
    sample_s: float = 0.0
    exposed: float = 0.0
    other_s: float = 0.0

    def __post_init__(self) -> None:
        make_plain(self)
        for name, value in vars(self).items():
            finite_number(name, value)
        if self.gamma < 1:
            raise ValueError(f"gamma: {self.gamma}, limit: at least 1; give 1 for no overlap")
        if self.exposed > 1:
            raise ValueError(f"exposed: {self.exposed}, limit: from 0 to 1; give 1 where nothing is hidden")
        if self.a_c + self.b_c == 0:
            raise ValueError(f"a_c, b_c: {self.a_c}, {self.b_c}, limit: one above 0; give the seconds of a pass")


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The measured seconds of a step.

    micro_batch: samples of a device's largest micro-batch.
    accumulation_steps: micro-batches that a device runs before the last one, so 0 for one micro-batch per device.
    weight: how much the step counts among others, such as the number of steps that `seconds` is the mean of.
    """

    devices: int
    micro_batch: int
    accumulation_steps: int
    seconds: float
    weight: float = 1.0

    def __post_init__(self) -> None:
        make_plain(self)
        whole_number("devices", self.devices)
        whole_number("micro_batch", self.micro_batch)
        whole_number("accumulation_steps", self.accumulation_steps, least=0)
        for name in ("seconds", "weight"):
            if finite_number(name, getattr(self, name)) == 0:
                raise ValueError(f"{name}: 0, limit: more than 0; leave the step out")


class ThroughputModel:
    """Predicts the seconds of a step (Qiao et al. 2021, Pollux), with the transfers of a model that lives in DRAM.

    With m samples per micro-batch, s accumulation steps and k devices:

    pass     = a_c + b_c m
    exchange = 0 for one device, else a_r + b_r max(k - 2, 0), with a_n and b_n for several nodes
    compute  = s pass + (pass^gamma + exchange^gamma)^(1 / gamma)
    link     = load_s + sample_s m (s + 1)
    seconds  = max(compute, link) + exposed min(compute, link) + other_s

    Shards are loaded once for all micro-batches of a step, while others compute, so the longer of the two counts, and
    as much of the shorter one as is not hidden. That is why accumulation pays: more passes do not load more shards.
    """

    def __init__(self, parameters: ThroughputParameters) -> None:
        self.parameters = parameters

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.parameters})"

    def link_s(self, num_samples: int) -> float:
        """Return the seconds that a device's transfers take in a step of which it has `num_samples` samples."""
        return self.parameters.load_s + self.parameters.sample_s * num_samples

    def seconds(self, *, devices: int, micro_batch: int, accumulation_steps: int = 0, nodes: int = 1) -> float:
        """Return the seconds of a step in which each device runs accumulation_steps + 1 micro-batches."""
        devices = whole_number("devices", devices)
        micro_batch = whole_number("micro_batch", micro_batch)
        accumulation_steps = whole_number("accumulation_steps", accumulation_steps, least=0)
        if whole_number("nodes", nodes) > devices:
            raise ValueError(f"nodes: {nodes}, limit: {devices}, as many as devices; give fewer")
        p = self.parameters
        pass_s = p.a_c + p.b_c * micro_batch
        exchange_s = 0.0
        if devices > 1:
            a, b = (p.a_n, p.b_n) if nodes > 1 else (p.a_r, p.b_r)
            exchange_s = a + b * (devices - 2)
        # As a ratio to the longer one, so that powers of very short times stay above 0.
        longer = max(pass_s, exchange_s)
        powers = math.pow(pass_s / longer, p.gamma) + math.pow(exchange_s / longer, p.gamma)
        last_s = longer * math.pow(powers, 1 / p.gamma)
        compute_s = accumulation_steps * pass_s + last_s
        link_s = self.link_s(micro_batch * (accumulation_steps + 1))
        return max(compute_s, link_s) + p.exposed * min(compute_s, link_s) + p.other_s

    def throughput(self, *, devices: int, micro_batch: int, accumulation_steps: int = 0, nodes: int = 1) -> float:
        """Return samples per second of a step whose micro-batches all have `micro_batch` samples."""
        seconds = self.seconds(
            devices=devices, micro_batch=micro_batch, accumulation_steps=accumulation_steps, nodes=nodes
        )
        return devices * micro_batch * (accumulation_steps + 1) / seconds

    @classmethod
    def fit(cls, observations: Sequence[StepTime], *, load_s: float = 0.0, sample_s: float = 0.0) -> ThroughputModel:
        """Return the model whose logarithms of seconds are nearest to those of steps on one node.

        Equal observations give equal models. One observation is enough. For what the observations leave open:

        - one size of micro-batch: half of a pass's seconds are constant, half are in proportion to its samples;
        - no steps to compare several devices with: the exchange takes no time;
        - one number of devices above 1: it takes as long with more devices;
        - fewer observations than parameters: gamma is 1, so that nothing overlaps;
        - steps that take as long as their transfers: computing takes half as long.

        load_s, sample_s: seconds of transfers, as in ThroughputParameters. They are not fitted.
        """
        if not observations:
            raise ValueError("observations: none, limit: at least 1; time a step first")
        finite_number("load_s", load_s)
        finite_number("sample_s", sample_s)
        a_c, b_c, a_r, b_r, gamma = _Fit(observations, load_s, sample_s).solve()
        parameters = ThroughputParameters(
            a_c=a_c, b_c=b_c, a_n=0.0, b_n=0.0, a_r=a_r, b_r=b_r, gamma=gamma, load_s=load_s, sample_s=sample_s
        )
        return cls(parameters)


class _Fit:
    """Weighted least squares of log seconds over the logarithms of parameters, so that none is negative."""

    def __init__(self, observations: Sequence[StepTime], load_s: float, sample_s: float) -> None:
        table = torch.tensor([astuple(each) for each in observations], dtype=torch.float64)
        self.devices, self.micro, self.extra, self.seconds, weights = table.unbind(1)
        self.weights = weights / weights.sum()
        link = load_s + sample_s * self.micro * (self.extra + 1)
        self.near_link = self.seconds <= NEAR_LINK * link
        # A bound on what computing must explain. Near the link it is the measured time: shorter computing fits as well.
        self.log_floor = torch.where(self.near_link, self.seconds, link).clamp(min=1e-30).log()
        self.log_seconds = self.seconds.log()
        self.log_micro = self.micro.log()
        self.log_extra = _log(self.extra)
        self.log_others = _log(self.devices - 2)
        self.alone = self.devices == 1
        self.start = self._start()

    def _start(self) -> Tensor:
        """Return logarithms of a_c, b_c, a_r and b_r, and gamma's, where the search begins. NEVER stays as it is."""
        passes = self.seconds / (self.extra + 1)
        passes = torch.where(self.near_link, passes / 2, passes)
        # Observations that say most of a pass: of one device, and not near the link, if there are such.
        told = torch.ones_like(self.alone)
        for better in (~self.near_link, self.alone):
            if (told & better).any():
                told = told & better
        mean = (self.weights * passes)[told].sum() / self.weights[told].sum()
        m = (self.weights * self.micro)[told].sum() / self.weights[told].sum()
        a_c, b_c = mean / 2, mean / 2 / m
        spread = (self.weights * (self.micro - m) ** 2)[told].sum()
        if spread > 0:
            slope = (self.weights * (self.micro - m) * passes)[told].sum() / spread
            # Not too near 0, from which logarithms hardly move.
            b_c = slope.clamp(0.02 * mean / m, 0.98 * mean / m)
            a_c = mean - b_c * m
        start = torch.tensor([float(a_c.log()), float(b_c.log()), NEVER, NEVER, NEVER], dtype=torch.float64)
        several = ~self.alone
        counts = len(set(self.devices[several].tolist()))
        if counts == 0 or not (self.alone.any() or len(set(self.extra[several].tolist())) > 1):
            return start
        excess = (self.seconds - (self.extra + 1) * (a_c + b_c * self.micro))[several]
        exchange = max(float(excess.median()), 0.05 * float(mean))
        start[2] = math.log(exchange)
        if counts > 1:
            start[3] = math.log(0.1 * exchange)
        if len(self.seconds) > 2 + min(counts, 2):
            start[4] = math.log(0.2)
        return start

    def _gamma(self, x: Tensor) -> Tensor:
        return 1 + (MOST_GAMMA - 1) * x[4].exp() / (MOST_GAMMA - 1 + x[4].exp())

    def _loss(self, x: Tensor) -> Tensor:
        log_pass = torch.logaddexp(x[0].expand_as(self.log_micro), x[1] + self.log_micro)
        log_exchange = torch.logaddexp(x[2].expand_as(self.log_micro), x[3] + self.log_others)
        log_exchange = torch.where(self.alone, NEVER, log_exchange)
        gamma = self._gamma(x)
        log_last = torch.logaddexp(gamma * log_pass, gamma * log_exchange) / gamma
        log_compute = torch.logaddexp(self.log_extra + log_pass, log_last)
        misses = torch.maximum(log_compute, self.log_floor) - self.log_seconds
        return (self.weights * misses.square()).sum() + PRIOR * (x - self.start).square().sum()

    def solve(self) -> tuple[float, ...]:
        """Return a_c, b_c, a_r, b_r and gamma."""
        x = self.start.clone().requires_grad_(True)
        is_free = (self.start > NEVER).double()
        search = torch.optim.LBFGS(
            [x],
            max_iter=MAX_ITERATIONS,
            max_eval=2 * MAX_ITERATIONS,
            tolerance_grad=1e-9,
            tolerance_change=1e-12,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            loss = self._loss(x)
            (gradient,) = torch.autograd.grad(loss, x)
            x.grad = gradient * is_free
            return loss.detach()

        search.step(closure)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            found = x if self._loss(x) < self._loss(self.start) else self.start  # also if a number is not finite
            values = torch.where(found > NEVER, found.exp(), 0.0)
            return (*values[:4].tolist(), float(self._gamma(found)))


def _log(values: Tensor) -> Tensor:
    """Return logarithms, and NEVER for what is not above 0."""
    return torch.where(values > 0, values.clamp(min=1e-30).log(), NEVER)
