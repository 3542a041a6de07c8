"""Batches and devices that change: plain functions, with which a run need not be there."""

from hydra_engine.elastic.accumulation import GradientAccumulation
from hydra_engine.elastic.batch_split import BatchSplit, init
from hydra_engine.elastic.split import split_batch

__all__ = ["BatchSplit", "GradientAccumulation", "init", "split_batch"]
