"""Rules that say by how much a larger batch multiplies the learning rate."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from hydra_engine.adaptive.noise import GradientNoiseScale
from partitioners.plain_numbers import finite_number, make_plain, whole_number


class ScalingRule(ABC):
    """A rule for the learning rate of a step whose batch is not the initial one.

    A rule keeps settings only. The noise that it is given is that of the steps before: a factor never depends on the
    gradients of the step that it multiplies.
    """

    @abstractmethod
    def factors(self, noise: GradientNoiseScale, batch_size: int, progress: float) -> tuple[float, ...]:
        """Return what multiplies the learning rate of each parameter group, for one step.

        batch_size: samples of the step.
        progress: steps of the initial batch that the task has done so far: the sum of the gains of its steps.
        """


@dataclass(frozen=True)
class AdaScale(ScalingRule):
    """The gain of each parameter group, for SGD (arXiv 2007.05105), from 1 to batch_size / initial_batch_size.

    It is 1 until the noise is known: the learning rate of the initial batch is safe for a larger one.
    """

    def factors(self, noise: GradientNoiseScale, batch_size: int, progress: float) -> tuple[float, ...]:
        return noise.gains(batch_size)


@dataclass(frozen=True)
class AdamScale(ScalingRule):
    """The square root of each parameter group's gain, for optimizers that divide by the gradient's size, such as Adam.

    It is 1 until the noise is known.
    """

    def factors(self, noise: GradientNoiseScale, batch_size: int, progress: float) -> tuple[float, ...]:
        return tuple(map(math.sqrt, noise.gains(batch_size)))


@dataclass(frozen=True)
class LinearScale(ScalingRule):
    """The batch's size as a multiple of the initial batch, for all parameter groups."""

    def factors(self, noise: GradientNoiseScale, batch_size: int, progress: float) -> tuple[float, ...]:
        return (_scale(noise, batch_size),) * noise.num_groups


@dataclass(frozen=True)
class SqrtScale(ScalingRule):
    """The square root of the batch's size as a multiple of the initial batch, for all parameter groups."""

    def factors(self, noise: GradientNoiseScale, batch_size: int, progress: float) -> tuple[float, ...]:
        return (math.sqrt(_scale(noise, batch_size)),) * noise.num_groups


@dataclass(frozen=True)
class LEGWScale(ScalingRule):
    """The square root rule with a warm-up that is S times as long for an S times larger batch (arXiv 1901.08256).

    warmup_epochs: epochs of warm-up at the initial batch.
    data_size: samples of an epoch.
    """

    warmup_epochs: float
    data_size: int

    def __post_init__(self) -> None:
        make_plain(self)
        finite_number("warmup_epochs", self.warmup_epochs)
        whole_number("data_size", self.data_size)

    def factors(self, noise: GradientNoiseScale, batch_size: int, progress: float) -> tuple[float, ...]:
        """Return sqrt(S) * min(1, progress / (warmup_epochs * S * data_size / initial_batch_size)) for each group."""
        scale = _scale(noise, batch_size)
        warmup = self.warmup_epochs * scale * self.data_size / noise.initial_batch_size
        warmed = min(1.0, progress / warmup) if warmup > 0 else 1.0
        return (math.sqrt(scale) * warmed,) * noise.num_groups


def _scale(noise: GradientNoiseScale, batch_size: int) -> float:
    return whole_number("batch_size", batch_size) / noise.initial_batch_size


def rule_for(optimizer: torch.optim.Optimizer) -> ScalingRule:
    """Return AdamScale for Adam and its variants, and AdaScale for other optimizers.

    A variant is known by "Adam" in the name of its class, or of one that it derives from; so are those of other
    libraries. For an optimizer that wraps another as its attribute `optimizer`, the wrapped one decides.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: {type(optimizer).__name__} is not a torch.optim.Optimizer; give one")
    wrapped = getattr(optimizer, "optimizer", None)
    if isinstance(wrapped, torch.optim.Optimizer) and wrapped is not optimizer:
        return rule_for(wrapped)
    is_adam = any("adam" in each.__name__.lower() for each in type(optimizer).__mro__)
    return AdamScale() if is_adam else AdaScale()
