"""Training on devices that come and go: which are in, and how a global batch is split over them."""

from hydra_engine.elastic.pool import DevicePool, Place, PoolLimits
from hydra_engine.elastic.quotas import Quota, Quotas

__all__ = ["DevicePool", "Place", "PoolLimits", "Quota", "Quotas"]
