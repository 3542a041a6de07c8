"""Loggers that write to files, TensorBoard or Weights & Biases."""

from hydra_engine.loggers.files import CsvLogger, JsonLinesLogger
from hydra_engine.loggers.tensorboard import TensorBoardLogger
from hydra_engine.loggers.wandb import WandbLogger

__all__ = ["CsvLogger", "JsonLinesLogger", "TensorBoardLogger", "WandbLogger"]
