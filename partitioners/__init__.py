"""Costs of layers, and partitioners that cut a model into shards that fit a device. Needs torch and numpy only."""

from partitioners.balanced import Balanced
from partitioners.cost import (
    Budget,
    LayerCost,
    LayerTooLarge,
    Partitioner,
    forward_unit_bytes,
    shard_bytes,
    slab_bytes,
    unit_bytes,
)
from partitioners.meter import MemoryMeter
from partitioners.optimal import Optimal
from partitioners.pilot import Pilot, halved
from partitioners.presharded import Presharded
from partitioners.profile import DependsOnValues, profile, profile_evaluation, profile_shapes
from partitioners.rates import GPU, STATED_RATES, Rates
from partitioners.registry import make_partitioner, register_partitioner
from partitioners.reserve import LayerPeak, layer_peaks
from partitioners.sizes import format_bytes, parse_bytes
from partitioners.skips import Skips
from partitioners.steptime import StepTime, predict_step

__all__ = [
    "GPU",
    "STATED_RATES",
    "Balanced",
    "Budget",
    "DependsOnValues",
    "LayerCost",
    "LayerPeak",
    "LayerTooLarge",
    "MemoryMeter",
    "Optimal",
    "Partitioner",
    "Pilot",
    "Presharded",
    "Rates",
    "Skips",
    "StepTime",
    "format_bytes",
    "forward_unit_bytes",
    "halved",
    "layer_peaks",
    "make_partitioner",
    "parse_bytes",
    "predict_step",
    "profile",
    "profile_evaluation",
    "profile_shapes",
    "register_partitioner",
    "shard_bytes",
    "slab_bytes",
    "unit_bytes",
]
