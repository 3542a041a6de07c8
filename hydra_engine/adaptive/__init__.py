"""Batch sizes and learning rates that adapt while a task trains: the arithmetic, the loader, and the choices."""

from hydra_engine.adaptive.accumulator import Accumulator
from hydra_engine.adaptive.adaptation import STEPS_BETWEEN, Adaptation, Autoscale
from hydra_engine.adaptive.goodput import Choice, Goodput
from hydra_engine.adaptive.loader import AdaptiveDataLoader, remaining_epochs_until
from hydra_engine.adaptive.noise import GradientNoiseScale, NoiseLevel
from hydra_engine.adaptive.parallel import AdaptiveDataParallel
from hydra_engine.adaptive.rules import AdamScale, AdaScale, LEGWScale, LinearScale, ScalingRule, SqrtScale, rule_for
from hydra_engine.adaptive.step_times import StepTimes
from hydra_engine.adaptive.throughput import StepTime, ThroughputModel, ThroughputParameters

__all__ = [
    "STEPS_BETWEEN",
    "Accumulator",
    "AdaScale",
    "AdamScale",
    "Adaptation",
    "AdaptiveDataLoader",
    "AdaptiveDataParallel",
    "Autoscale",
    "Choice",
    "Goodput",
    "GradientNoiseScale",
    "LEGWScale",
    "LinearScale",
    "NoiseLevel",
    "ScalingRule",
    "SqrtScale",
    "StepTime",
    "StepTimes",
    "ThroughputModel",
    "ThroughputParameters",
    "remaining_epochs_until",
    "rule_for",
]
