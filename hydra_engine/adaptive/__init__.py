"""Batch sizes and learning rates that adapt while a task trains: the arithmetic, the loader, and the choices."""

from hydra_engine.adaptive.accumulator import Accumulator
from hydra_engine.adaptive.adaptation import (
    STEPS_BETWEEN,
    Adaptation,
    StepChoice,
    StepMeasures,
    choices_from_state,
    choices_to_state,
)
from hydra_engine.adaptive.goodput import Choice, Goodput
from hydra_engine.adaptive.loader import AdaptiveDataLoader, Autoscale, remaining_epochs_until
from hydra_engine.adaptive.noise import GradientNoiseScale, NoiseLevel
from hydra_engine.adaptive.norms import square_norms
from hydra_engine.adaptive.parallel import AdaptiveDataParallel
from hydra_engine.adaptive.rules import AdamScale, AdaScale, LEGWScale, LinearScale, ScalingRule, SqrtScale, rule_for
from hydra_engine.adaptive.step_times import LaneSeconds, StepTimes
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
    "LaneSeconds",
    "LinearScale",
    "NoiseLevel",
    "ScalingRule",
    "SqrtScale",
    "StepChoice",
    "StepMeasures",
    "StepTime",
    "StepTimes",
    "ThroughputModel",
    "ThroughputParameters",
    "choices_from_state",
    "choices_to_state",
    "remaining_epochs_until",
    "rule_for",
    "square_norms",
]
