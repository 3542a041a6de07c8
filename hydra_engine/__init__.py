"""Train many PyTorch models, each larger than the device, together on one machine.

Each name is imported when it is first used: `hydra-engine --help` needs neither torch nor the packages that train.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hydra_engine import _started_in as _started_in
from hydra_engine._version import __version__

if TYPE_CHECKING:
    from hydra_engine.data import stream_seed
    from hydra_engine.devices import CudaDevice, EmulatedDevice
    from hydra_engine.errors import (
        CallbackTimeout,
        CheckpointError,
        DeviceOutOfMemory,
        HostOutOfMemory,
        LoaderTimeout,
        NonFiniteLoss,
        PauseTask,
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
    "PauseTask",
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

_HOMES = {
    "hydra_engine.data": ("stream_seed",),
    "hydra_engine.devices": ("CudaDevice", "EmulatedDevice"),
    "hydra_engine.errors": (
        "CallbackTimeout",
        "CheckpointError",
        "DeviceOutOfMemory",
        "HostOutOfMemory",
        "LoaderTimeout",
        "NonFiniteLoss",
        "PauseTask",
        "ShardDoesNotFit",
        "StopTask",
    ),
    "hydra_engine.planning": ("DeviceCost", "HostCost", "Simulation", "TaskCost", "simulate"),
    "hydra_engine.run": ("ModelOrchestrator",),
    "hydra_engine.system": ("HostThreads",),
    "hydra_engine.tasks": (
        "Callback",
        "CheckpointReport",
        "DeviceReport",
        "Evaluation",
        "Model",
        "ModelTask",
        "Plan",
        "Report",
        "Retry",
        "Revision",
        "TaskPlan",
        "TaskReport",
        "split",
    ),
    "partitioners": ("Skips",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name from the room that defines it, once."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOME[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
