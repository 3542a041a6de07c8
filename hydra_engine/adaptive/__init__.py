"""Adaptive batch sizes: loaders whose batches change their size, and sums over them."""

from hydra_engine.adaptive.accumulator import Accumulator
from hydra_engine.adaptive.loader import AdaptiveDataLoader, Autoscale, remaining_epochs_until

__all__ = ["Accumulator", "AdaptiveDataLoader", "Autoscale", "remaining_epochs_until"]
