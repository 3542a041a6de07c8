"""Batches and devices that change: plain functions, with which a run need not be there."""

from hydra_engine.elastic.split import split_batch

__all__ = ["split_batch"]
