"""Devices that come and go while a run trains."""

from hydra_engine.elastic.free_gpus import FreeGpus, GiveUp, SeenGpu, Watch

__all__ = ["FreeGpus", "GiveUp", "SeenGpu", "Watch"]
