"""Training on devices that come and go: which are in, which are free, and how a global batch is split over them."""

from hydra_engine.elastic.free_gpus import FreeGpus, GiveUp, SeenGpu, Watch
from hydra_engine.elastic.pool import DevicePool, Place, PoolLimits

__all__ = ["DevicePool", "FreeGpus", "GiveUp", "Place", "PoolLimits", "SeenGpu", "Watch"]
