"""Train many PyTorch models, each larger than the device, together on one machine.

Each name is imported when it is first used: `hydra-engine --help` needs neither torch nor the packages that train.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hydra_engine import _started_in as _started_in
from hydra_engine._version import __version__

if TYPE_CHECKING:
    from hydra_engine.checkpoints import Checkpoint, furthest, load_newest
    from hydra_engine.data import drawing_apart, stream_seed
    from hydra_engine.devices import CudaDevice, DeviceSpec, EmulatedDevice, FreeGpus, resolve_devices
    from hydra_engine.errors import (
        CallbackTimeout,
        CheckpointError,
        DeviceOutOfMemory,
        HostOutOfMemory,
        LoaderTimeout,
        NonFiniteLoss,
        PauseTask,
        SavedError,
        ShardDoesNotFit,
        StopTask,
    )
    from hydra_engine.host import square_norms
    from hydra_engine.planning import (
        AheadPlan,
        DeviceChange,
        DeviceCost,
        HostCost,
        Simulation,
        TaskCost,
        predict_training,
        simulate,
    )
    from hydra_engine.progress import AtWork, DeviceProgress, Doing, Observer, RunProgress, TaskProgress
    from hydra_engine.run import ModelOrchestrator
    from hydra_engine.schedule import Candidate, Placed, Policy, Unit
    from hydra_engine.system import FolderLock, HostThreads
    from hydra_engine.tasks import (
        BatchChooser,
        Callback,
        CheckpointReport,
        DeviceReport,
        Evaluation,
        GuidedLoader,
        KeepBest,
        LaneSeconds,
        Logger,
        Model,
        ModelTask,
        Plan,
        Report,
        Retry,
        Revision,
        StepChoice,
        StepMeasures,
        StepReport,
        TaskPlan,
        TaskReport,
        TaskStart,
        ValidationReport,
        split,
        split_batch,
    )
    from hydra_engine.trace import Span
    from partitioners import Skips

__all__ = [
    "AheadPlan",
    "AtWork",
    "BatchChooser",
    "Callback",
    "CallbackTimeout",
    "Candidate",
    "Checkpoint",
    "CheckpointError",
    "CheckpointReport",
    "CudaDevice",
    "DeviceChange",
    "DeviceCost",
    "DeviceOutOfMemory",
    "DeviceProgress",
    "DeviceReport",
    "DeviceSpec",
    "Doing",
    "EmulatedDevice",
    "Evaluation",
    "FolderLock",
    "FreeGpus",
    "GuidedLoader",
    "HostCost",
    "HostOutOfMemory",
    "HostThreads",
    "KeepBest",
    "LaneSeconds",
    "LoaderTimeout",
    "Logger",
    "Model",
    "ModelOrchestrator",
    "ModelTask",
    "NonFiniteLoss",
    "Observer",
    "PauseTask",
    "Placed",
    "Plan",
    "Policy",
    "Report",
    "Retry",
    "Revision",
    "RunProgress",
    "SavedError",
    "ShardDoesNotFit",
    "Simulation",
    "Skips",
    "Span",
    "StepChoice",
    "StepMeasures",
    "StepReport",
    "StopTask",
    "TaskCost",
    "TaskPlan",
    "TaskProgress",
    "TaskReport",
    "TaskStart",
    "Unit",
    "ValidationReport",
    "__version__",
    "drawing_apart",
    "furthest",
    "load_newest",
    "predict_training",
    "resolve_devices",
    "simulate",
    "split",
    "split_batch",
    "square_norms",
    "stream_seed",
]

# They define the public names, from the one that imports least to those that import it.
_HOMES = (
    *("errors", "trace", "system", "schedule", "tasks", "data", "devices", "host"),
    *("checkpoints", "planning", "progress", "run"),
)


def __getattr__(name: str) -> Any:
    """Import a public name from the room that defines it, once."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = (import_module(home) for home in (*(f"{__name__}.{home}" for home in _HOMES), "partitioners"))
    found = globals()[name] = next(getattr(home, name) for home in homes if hasattr(home, name))
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
