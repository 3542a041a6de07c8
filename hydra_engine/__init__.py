"""Train many PyTorch models, each larger than the device, together on one machine."""

from hydra_engine._version import __version__
from hydra_engine.data import stream_seed
from hydra_engine.devices import CudaDevice, EmulatedDevice
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
from hydra_engine.planning import DeviceCost, HostCost, Simulation, TaskCost, simulate
from hydra_engine.run import ModelOrchestrator
from hydra_engine.system import HostThreads
from hydra_engine.tasks import (
    Callback,
    CheckpointReport,
    DeviceReport,
    Evaluation,
    Model,
    ModelTask,
    Plan,
    Report,
    Retry,
    Revision,
    TaskPlan,
    TaskReport,
    split,
)
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
