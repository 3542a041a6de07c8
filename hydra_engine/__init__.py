"""Train many PyTorch models, each larger than the device, together on one machine."""

from hydra_engine._version import __version__
from hydra_engine.batches import split
from hydra_engine.callbacks import Callback
from hydra_engine.costs import DeviceCost, HostCost, TaskCost
from hydra_engine.device import CudaDevice, EmulatedDevice
from hydra_engine.errors import (
    CallbackTimeout,
    CheckpointError,
    DeviceOutOfMemory,
    HostOutOfMemory,
    LoaderTimeout,
    NonFiniteLoss,
    ShardDoesNotFit,
    StopTask,
)
from hydra_engine.host import HostThreads
from hydra_engine.orchestrator import ModelOrchestrator
from hydra_engine.randomness import stream_seed
from hydra_engine.report import (
    CheckpointReport,
    DeviceReport,
    Evaluation,
    Plan,
    Report,
    Retry,
    Revision,
    TaskPlan,
    TaskReport,
)
from hydra_engine.simulated import Simulation
from hydra_engine.simulator import simulate
from hydra_engine.task import Model, ModelTask
from partitioners import Skips

__all__ = [
    "Callback",
    "CallbackTimeout",
    "CheckpointError",
    "CheckpointReport",
    "CudaDevice",
    "DeviceCost",
    "DeviceOutOfMemory",
    "DeviceReport",
    "EmulatedDevice",
    "Evaluation",
    "HostCost",
    "HostOutOfMemory",
    "HostThreads",
    "LoaderTimeout",
    "Model",
    "ModelOrchestrator",
    "ModelTask",
    "NonFiniteLoss",
    "Plan",
    "Report",
    "Retry",
    "Revision",
    "ShardDoesNotFit",
    "Simulation",
    "Skips",
    "StopTask",
    "TaskCost",
    "TaskPlan",
    "TaskReport",
    "__version__",
    "simulate",
    "split",
    "stream_seed",
]
