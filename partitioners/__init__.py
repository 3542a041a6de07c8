"""Costs of layers, and partitioners that cut a model into shards that fit a device. Needs torch and numpy only."""

from partitioners.cost import Budget, LayerCost, LayerTooLarge, Partitioner, shard_bytes, slab_bytes, unit_bytes
from partitioners.meter import MemoryMeter
from partitioners.pilot import Pilot
from partitioners.presharded import Presharded
from partitioners.profile import profile
from partitioners.sizes import format_bytes, parse_bytes

__all__ = [
    "Budget",
    "LayerCost",
    "LayerTooLarge",
    "MemoryMeter",
    "Partitioner",
    "Pilot",
    "Presharded",
    "format_bytes",
    "parse_bytes",
    "profile",
    "shard_bytes",
    "slab_bytes",
    "unit_bytes",
]
