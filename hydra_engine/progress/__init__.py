"""The progress of a run: what an observer is shown of it and loggers are told, and the threads that do that."""

from hydra_engine.progress.lines import PlainLines
from hydra_engine.progress.loggers import RunLoggers
from hydra_engine.progress.state import AtWork, DeviceProgress, Doing, Observer, RunProgress, TaskProgress
from hydra_engine.progress.watch import Watch, usual_observer

__all__ = [
    "AtWork",
    "DeviceProgress",
    "Doing",
    "Observer",
    "PlainLines",
    "RunLoggers",
    "RunProgress",
    "TaskProgress",
    "Watch",
    "usual_observer",
]
