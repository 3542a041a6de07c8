"""Batch sizes and learning rates that adapt while a task trains: the arithmetic of noise, throughput and goodput."""

from hydra_engine.adaptive.goodput import Choice, Goodput
from hydra_engine.adaptive.noise import GradientNoiseScale, NoiseLevel
from hydra_engine.adaptive.norms import square_norms
from hydra_engine.adaptive.rules import (
    AdamScale,
    AdaScale,
    LEGWScale,
    LinearScale,
    ScalingRule,
    SqrtScale,
    rule_for,
)
from hydra_engine.adaptive.throughput import StepTime, ThroughputModel, ThroughputParameters

__all__ = [
    "AdaScale",
    "AdamScale",
    "Choice",
    "Goodput",
    "GradientNoiseScale",
    "LEGWScale",
    "LinearScale",
    "NoiseLevel",
    "ScalingRule",
    "SqrtScale",
    "StepTime",
    "ThroughputModel",
    "ThroughputParameters",
    "rule_for",
    "square_norms",
]
