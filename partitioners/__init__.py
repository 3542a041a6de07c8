"""Costs of layers, and partitioners that cut a model into shards that fit a device. Needs torch and numpy only."""

from partitioners.cost import (
    Budget,
    LayerCost,
    LayerTooLarge,
    Partitioner,
    format_bytes,
    forward_unit_bytes,
    parse_bytes,
    shard_bytes,
    slab_bytes,
    unit_bytes,
)
from partitioners.measure import GPU, STATED_RATES, Rates
from partitioners.meter import MemoryMeter
from partitioners.partitioner import (
    Balanced,
    Fastest,
    Optimal,
    Pilot,
    Presharded,
    halved,
    make_partitioner,
    register_partitioner,
)
from partitioners.profile import DependsOnValues, profile, profile_evaluation, profile_shapes, spanned
from partitioners.skips import Skips
from partitioners.steptime import StepTime, predict_step

__all__ = [
    "GPU",
    "STATED_RATES",
    "Balanced",
    "Budget",
    "DependsOnValues",
    "Fastest",
    "LayerCost",
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
    "make_partitioner",
    "parse_bytes",
    "predict_step",
    "profile",
    "profile_evaluation",
    "profile_shapes",
    "register_partitioner",
    "shard_bytes",
    "slab_bytes",
    "spanned",
    "unit_bytes",
]
