"""Loggers: write the values of tasks as they train, to files, TensorBoard or Weights & Biases."""

from hydra_engine.loggers.files import CsvLogger, JsonLinesLogger
from hydra_engine.loggers.logger import Logger, TaskStart, checked_loggers
from hydra_engine.loggers.tensorboard import TensorBoardLogger
from hydra_engine.loggers.threads import RunLoggers
from hydra_engine.loggers.wandb import WandbLogger

__all__ = [
    "CsvLogger",
    "JsonLinesLogger",
    "Logger",
    "RunLoggers",
    "TaskStart",
    "TensorBoardLogger",
    "WandbLogger",
    "checked_loggers",
]
