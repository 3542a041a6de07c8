"""Training on devices that come and go: which are in, which are free, whose they are, and how batches are split."""

from hydra_engine.elastic.accumulation import GradientAccumulation
from hydra_engine.elastic.batch_split import BatchSplit, init
from hydra_engine.elastic.free_gpus import FreeGpus, GiveUp, SeenGpu, Watch
from hydra_engine.elastic.pool import DevicePool, Place, PoolLimits
from hydra_engine.elastic.quotas import Quota, Quotas
from hydra_engine.elastic.split import split_batch

__all__ = [
    "BatchSplit",
    "DevicePool",
    "FreeGpus",
    "GiveUp",
    "GradientAccumulation",
    "Place",
    "PoolLimits",
    "Quota",
    "Quotas",
    "SeenGpu",
    "Watch",
    "init",
    "split_batch",
]
