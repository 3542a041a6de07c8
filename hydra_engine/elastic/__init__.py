"""Training on devices that come and go: which are in, which are free, whose they are, and how batches are split.

What training loops use is imported with its first use, since it needs torch: decisions are made without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hydra_engine.elastic.pool import DevicePool, Place, PoolLimits
from hydra_engine.elastic.quotas import Quota, Quotas
from hydra_engine.elastic.split import split_batch

if TYPE_CHECKING:
    from hydra_engine.elastic.accumulation import GradientAccumulation
    from hydra_engine.elastic.batch_split import BatchSplit, init
    from hydra_engine.elastic.free_gpus import FreeGpus, GiveUp, SeenGpu, Watch

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

_WITH_TORCH = {
    "BatchSplit": "batch_split",
    "GradientAccumulation": "accumulation",
    "init": "batch_split",
    **dict.fromkeys(("FreeGpus", "GiveUp", "SeenGpu", "Watch"), "free_gpus"),
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
