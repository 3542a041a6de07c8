"""A unit at work on a device: copies in, layers run, results out."""

from hydra_engine.worker.attributes import Attributes, Changed, Contents
from hydra_engine.worker.unit import Delay, MicroInput
from hydra_engine.worker.worker import Worker
