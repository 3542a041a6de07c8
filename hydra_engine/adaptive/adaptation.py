"""The choices of one adaptive task: the batch of each step, its micro-batches, the factors of its learning rates."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hydra_engine import BatchChooser, LaneSeconds, StepChoice, StepMeasures
from hydra_engine.adaptive.goodput import Choice, Goodput
from hydra_engine.adaptive.noise import GradientNoiseScale
from hydra_engine.adaptive.rules import AdaScale, ScalingRule, rule_for
from hydra_engine.adaptive.step_times import StepTimes
from hydra_engine.adaptive.throughput import ThroughputModel

# One micro-batch alone says nothing of the gradient's noise.
LEAST_MICRO_BATCHES = 2
# A choice is made anew after so many steps, or as devices come and go. Noise is averaged over a thousand steps.
STEPS_BETWEEN = 8
# A batch that is this many times as large or small as the best one is left for a goodput that is 1 % higher.
FAR, WORTH_GOING = 1.25, 1.01
# The share of its size that a micro-batch keeps after a device ran out of memory.
KEPT_OUT_OF_MEMORY = 0.9
# Progress is a sum of gains: an epoch must not last a step longer for a rounding error.
ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Autoscale:
    """How batches adapt: limits, in samples, within which a batch may change its size, and what goes with that."""

    max_batch_size: int
    local_bsz_bounds: tuple[int, int] | None = None  # of a micro-batch
    gradient_accumulation: bool = True
    scaling_rule: ScalingRule | None = None  # of learning rates; None: the one that is usual for the optimizer
    replay: tuple[StepChoice, ...] = ()  # of another run, whose choices are made again


class _Held(NamedTuple):
    """A choice that goes on until the next one is made."""

    step: int  # for which it was made
    devices: int
    choice: Choice  # of goodput 0 where it is not known
    desired_devices: int = 1


class _Bounds:
    """Limits of batches and micro-batches, in samples: those of the user, and what there is room for."""

    def __init__(self, settings: Autoscale, initial: int) -> None:
        self.most_batch = settings.max_batch_size  # for which DRAM has room
        self.room: float = math.inf  # of a micro-batch, by what was counted
        self.taught: float = math.inf  # the same by what did not fit
        self.accumulates = settings.gradient_accumulation
        self.max_batch_size = settings.max_batch_size
        self.initial = initial
        # Of one sample alone, BatchNorm has no statistics.
        self._bounds = settings.local_bsz_bounds or (max(1, min(2, initial // 2)), settings.max_batch_size)

    @property
    def low(self) -> int:
        """The least samples of a micro-batch."""
        return min(self._bounds[0], self.high)

    @property
    def high(self) -> int:
        """The most samples of a micro-batch."""
        return int(max(1, min(self._bounds[1], self.room, self.taught)))

    @property
    def most(self) -> int:
        return min(self._bounds[1], self.max_batch_size)

    def number(self, batch: int, micro_batch: int, devices: int) -> int:
        """Micro-batches of a batch, as many for each device, none of them larger than `micro_batch`."""
        rounds = -(-batch // (micro_batch * devices)) if self.accumulates else 1
        number = max(LEAST_MICRO_BATCHES, devices * rounds)
        number = min(number, max(LEAST_MICRO_BATCHES, batch // self.low))
        return min(batch, max(number, -(-batch // self.high)))  # what fits the memory wins

    def first(self, devices: int, step: int) -> Choice:
        """The choice while little was measured, or where bounds leave no other: the fewest micro-batches.

        Half of the first steps have twice as many, which tells the time of a pass from that of its samples.
        """
        number = max(LEAST_MICRO_BATCHES, devices)
        if step >= STEPS_BETWEEN // 2 and self.accumulates:
            number *= 2
        micro = max(1, min(self.high, max(self.low, -(-self.initial // number))))
        return Choice(batch_size=self.initial, micro_batch=micro, accumulation_steps=0, goodput=0.0)

    def optimized(self, goodput: Goodput, devices: int, current: Choice | None = None) -> Choice | None:
        """The best choice on so many devices; None: no batch keeps to the bounds there."""
        accumulates, most = self.accumulates, self.most_batch
        if not accumulates and devices < LEAST_MICRO_BATCHES:  # alone, it has several whatever the user says of that
            accumulates, most = True, max(self.initial, min(most, LEAST_MICRO_BATCHES * self.high))
        optimize = partial(
            goodput.optimize,
            devices,
            max_batch_size=most,
            bounds=(self.low, self.high),
            accumulation=accumulates,
            least_micro_batches=LEAST_MICRO_BATCHES,
        )
        try:
            best = optimize()
            if current is None:
                return best
            kept = optimize(current=current)
        except ValueError:
            return None
        # Near its maximum goodput is flat: a batch that is kept for being nearly as good may be far from the best one.
        ratio = max(best.batch_size / kept.batch_size, kept.batch_size / best.batch_size)
        return best if ratio > FAR and best.goodput > WORTH_GOING * kept.goodput else kept

    def desired(self, goodput: Goodput, max_devices: int) -> int:
        """The most devices of which each is worth at least half of the first."""
        if max_devices == 1 or (first := self.optimized(goodput, 1)) is None:
            return 1
        for devices in range(max_devices, 1, -1):
            best = self.optimized(goodput, devices)
            if best is not None and best.goodput >= first.goodput * devices / 2:
                return devices
        return 1


class Adaptation(BatchChooser):
    """Chooses a task's batches for goodput, from what was measured of its steps. From any thread.

    `choose` depends on nothing but measurements and the choice before it: whoever reads batches knows that one, and
    may go back to it.
    """

    def __init__(
        self,
        settings: Autoscale,
        initial_batch_size: int,
        *,
        steps_per_epoch: float | None = None,
    ) -> None:
        """Begin without measurements.

        steps_per_epoch: of the initial batch, that a pass over the data takes; None: not known.

        Raises ValueError for a record of another task.
        """
        self._limits = _Bounds(settings, initial_batch_size)
        self.most = self._limits.most
        self._initial = initial_batch_size
        self._steps_per_epoch = steps_per_epoch
        self._replay = settings.replay
        self._check_replay()
        self._lock = threading.RLock()
        self._noise = GradientNoiseScale(initial_batch_size)
        self._rule = settings.scaling_rule
        self._gradients_grow = False
        self._times = StepTimes()
        self._num_timed = self._num_measured = 0  # steps whose seconds, and norms, were taken in
        self._model: ThroughputModel | None = None  # fitted; None: to be fitted anew
        self._held: _Held | None = None

    def _check_replay(self) -> None:
        if not self._replay:
            return
        first, most = self._replay[0], max(each.batch_size for each in self._replay)
        if [each.step for each in self._replay] != list(range(len(self._replay))):
            raise ValueError("replay: its steps do not count up from 0; give the whole of another run's record")
        if first.batch_size != self._initial:
            raise ValueError(
                f"replay: it begins with a batch of {first.batch_size}, limit: the loader's batch_size "
                f"{self._initial}; give the record of a run with the same loader"
            )
        if most > self._limits.max_batch_size:
            raise ValueError(
                f"replay: it has a batch of {most}, limit: max_batch_size {self._limits.max_batch_size}; raise that "
                f"maximum to the one of the run that was recorded"
            )

    def begin(self, optimizer: torch.optim.Optimizer, *, sums_losses: bool = False) -> None:
        """Scale the optimizer's learning rates from now on, by the rule that was given or the usual one.

        Raises ValueError for an optimizer without them, and where a record to be replayed has another number of groups.
        """
        num_groups, usual = len(optimizer.param_groups), rule_for(optimizer)
        rates = [group.get("lr") for group in optimizer.param_groups]
        if any(isinstance(each, bool) or not isinstance(each, (Real, Tensor)) for each in rates):
            raise ValueError(
                f"optimizer: the parameter groups of {type(optimizer).__name__} have {rates} as 'lr', limit: numbers, "
                f"which are scaled; choose another optimizer, or leave autoscale_batch_size out"
            )
        for each in self._replay:
            if each.factors and len(each.factors) != num_groups:
                raise ValueError(
                    f"replay: step {each.step} has factors for {len(each.factors)} parameter groups, limit: the "
                    f"optimizer's {num_groups}; give the record of a run with the same groups"
                )
        with self._lock:
            self._rule = self._rule or usual
            # A step of SGD grows with its batch by itself, where the loss is a sum over samples.
            self._gradients_grow = sums_losses and isinstance(usual, AdaScale)
            if not self._noise.is_known:
                self._noise = GradientNoiseScale(self._initial, num_groups=num_groups)
            elif self._noise.num_groups != num_groups:
                raise ValueError(
                    f"optimizer: {num_groups} parameter groups, limit: {self._noise.num_groups}, whose noise was "
                    f"measured before; resume with the groups that were saved"
                )

    # -- limits

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the most samples of a micro-batch."""
        with self._lock:
            return self._limits.low, self._limits.high

    def fixed_because(self, step: int) -> str | None:
        return "replay= fixes the number of micro-batches" if step < len(self._replay) else None

    def limit(self, micro_batch: int, batch: int | None = None) -> None:
        """Keep to these from now on, within the user's bounds; the initial batch stays."""
        with self._lock:
            self._limits.room, self._held = micro_batch, None
            if batch is not None:
                self._limits.most_batch = max(self._initial, min(self._limits.max_batch_size, batch))

    def steps_left(self, choice: StepChoice, epochs: int) -> int | None:
        """Predict how many steps there are from this one on, if all are worth as much; None: only the data says so."""
        if self._steps_per_epoch is None:
            return None
        return max(1, math.ceil((epochs * self._steps_per_epoch - choice.progress - ROUNDING) / choice.gain))

    def smaller(self, choice: StepChoice) -> StepChoice:
        """Return a choice in smaller micro-batches, and make none larger from now on: a device had no room."""
        with self._lock:
            size = max(1, int(choice.micro_batch * KEPT_OUT_OF_MEMORY))
            self._limits.taught = size = int(min(self._limits.taught, size))
            self._held = None
            return replace(choice, micro_batches=min(choice.batch_size, -(-choice.batch_size // size)))

    # -- choices

    def is_over(self, after: StepChoice | None, epoch: int) -> bool | None:
        """Return True if an epoch is over after this choice; None: only the data says so."""
        if self._steps_per_epoch is None:
            return None
        return self._progress(after) >= (epoch + 1) * self._steps_per_epoch - ROUNDING

    @staticmethod
    def _progress(after: StepChoice | None) -> float:
        return 0.0 if after is None else after.progress + after.gain

    def choose(self, after: StepChoice | None, devices: int = 1, max_devices: int = 1) -> StepChoice:
        """Choose the step that follows `after`; None: the first.

        devices: that it is spread over. max_devices: that there may ever be.
        """
        step, devices = 0 if after is None else after.step + 1, max(1, devices)
        if step < len(self._replay):
            return self._replay[step]
        with self._lock:
            held = self._chosen(step, devices, max_devices)
            batch = min(held.choice.batch_size, self._limits.most_batch)
            return self._worth(
                StepChoice(
                    step=step,
                    batch_size=batch,
                    micro_batches=self._limits.number(batch, held.choice.micro_batch, devices),
                    devices=devices,
                    desired_devices=held.desired_devices,
                    noise=self.noise_scale,
                    progress=self._progress(after),
                    goodput=held.choice.goodput if held.choice.goodput > 0 else None,
                )
            )

    def given(self, choice: StepChoice, batch_size: int) -> StepChoice:
        """Return the choice as a batch of this size makes it: at the end of the data there may be less."""
        if batch_size != choice.batch_size and choice.step < len(self._replay):
            raise ValueError(
                f"replay: step {choice.step} has a batch of {choice.batch_size} samples, limit: the {batch_size} that "
                f"the data has left; give the record of a run over the same data"
            )
        return self.sized(choice, batch_size)

    def sized(self, choice: StepChoice, batch_size: int) -> StepChoice:
        """Return the choice for a batch of this size, whatever a record says."""
        if batch_size == choice.batch_size:
            return choice
        with self._lock:
            number = self._limits.number(batch_size, choice.micro_batch, choice.devices)
            return self._worth(replace(choice, batch_size=batch_size, micro_batches=number))

    def factored(self, choice: StepChoice) -> StepChoice:
        """Return the choice with factors of the learning rates, by the statistics of all steps before this one."""
        if choice.step < len(self._replay) and choice.factors:
            return choice
        with self._lock:
            assert self._rule is not None, "begin() comes first"
            factors = self._rule.factors(self._noise, choice.batch_size, choice.progress)
            grown = choice.batch_size / self._initial if self._gradients_grow else 1.0
            return replace(choice, factors=tuple(float(each) / grown for each in factors))

    def _worth(self, choice: StepChoice) -> StepChoice:
        """A choice with its gain. Less than the initial batch is worth its samples."""
        scale = choice.batch_size / self._initial
        return replace(choice, gain=self._noise.gain(choice.batch_size) if scale > 1 else scale)

    def _chosen(self, step: int, devices: int, max_devices: int) -> _Held:
        """Return the choice that goes on, or make another where it is time for that."""
        held = self._held
        if held is not None and held.step <= step < held.step + STEPS_BETWEEN and held.devices == devices:
            return held
        goodput = self._goodput()
        if goodput is None:
            return _Held(step, devices, self._limits.first(devices, step))
        current = held.choice if held is not None and held.devices == devices else None
        found = self._limits.optimized(goodput, devices, current) or self._limits.first(devices, 0)
        desired = self._limits.desired(goodput, max(devices, max_devices))
        self._held = _Held(step, devices, found, desired)
        return self._held

    # -- devices

    def _goodput(self) -> Goodput | None:
        """The goodput as far as it is known; None: fewer steps were measured than tell noise from the gradient."""
        if self._num_timed < STEPS_BETWEEN or not self._noise.is_known:
            return None
        if self._model is None:
            self._model = self._times.fitted()
        return Goodput(self._model, self._noise)

    def speedups(self, max_devices: int) -> tuple[float, ...]:
        """Predict how many times its goodput on one device it has on 1, 2, ... devices.

        At most twice as many as it was measured on. Empty: nothing is known yet.
        """
        with self._lock:
            goodput = self._goodput()
            if goodput is None:
                return ()
            found = []
            for devices in range(1, min(max_devices, 2 * self._times.most_devices) + 1):
                best = self._limits.optimized(goodput, devices)
                if best is None:
                    break
                found.append(best.goodput)
            return tuple(each / found[0] for each in found) if found and found[0] > 0 else ()

    # -- measurements

    @property
    def noise_scale(self) -> float | None:
        """The gradient noise scale in samples; None: not known yet."""
        with self._lock:
            return self._noise.noise_scale if self._noise.is_known else None

    def learn(self, choice: StepChoice, seconds: LaneSeconds, devices: int, measures: StepMeasures | None) -> bool:
        if measures is not None:
            self.measured(measures)
        self.timed(choice, seconds, devices)
        return choice.step % STEPS_BETWEEN == 0

    def measured(self, measures: StepMeasures) -> bool:
        """Take in the norms of a committed step. Return False where they say nothing: not finite, or one alone."""
        if len(measures.sizes) < LEAST_MICRO_BATCHES:
            return False
        with self._lock:
            is_taken = self._noise.update(measures.sizes, measures.micro, measures.total)
            self._num_measured += is_taken
            return is_taken

    def measured_alone(
        self, batch_size: int, now: Sequence[float], before: Sequence[float], mean: Sequence[float]
    ) -> bool:
        """Take in a step of one micro-batch: the gradient of the step before stands in for a second one."""
        with self._lock:
            is_taken = self._noise.update_from_pair(batch_size, now, before, mean)
            self._num_measured += is_taken
            return is_taken

    def timed(self, choice: StepChoice, seconds: LaneSeconds, devices: int | None = None) -> None:
        """Take in the seconds of a step on one of its devices; `devices`: that it was on."""
        if not (0 < seconds.step_s < math.inf and 0 < seconds.compute_s < math.inf):
            return
        devices = choice.devices if devices is None else devices
        with self._lock:
            self._num_timed += 1
            is_new = self._times.add(devices, choice.micro_batch, -(-choice.micro_batches // devices), seconds)
            if is_new or choice.step % STEPS_BETWEEN == 0:
                self._model = None

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Return all measurements, as plain values."""
        with self._lock:
            return {
                "noise": self._noise.state_dict(),
                "num_timed": self._num_timed,
                "num_measured": self._num_measured,
                "room": self._limits.room,
                "taught": self._limits.taught,
                "times": self._times.state_dict(),
            }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        with self._lock:
            self._limits.room, self._limits.taught = saved["room"], saved["taught"]
            num_groups = len(saved["noise"]["read"]["sqr"])
            self._noise = GradientNoiseScale(self._initial, num_groups=num_groups)
            self._noise.load_state_dict(saved["noise"])
            self._num_timed, self._num_measured = saved["num_timed"], saved["num_measured"]
            self._times.load_state_dict(saved["times"])
            self._model = self._held = None
