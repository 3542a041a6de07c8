"""What training loops of one's own need on GPUs that come and go: the split of a batch, and gradient accumulation."""

from hydra_engine.elastic.accumulation import GradientAccumulation
from hydra_engine.elastic.batch_split import BatchSplit, init

__all__ = ["BatchSplit", "GradientAccumulation", "init"]
