"""A run at one moment, as values, and who is shown them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from hydra_engine.schedule import Unit


class Doing(Enum):
    """Things that a task does or waits for, in words for people."""

    SETTING_UP = "setting up"
    COMPUTING = "computing"
    VALIDATING = "validating"
    WEIGHTS = "waits for weights"  # which are on their way to its device
    MEMORY = "waits for memory"  # of its device
    DEVICE = "waits for a device"
    OUTPUTS = "waits for outputs"  # of its last unit, which are on their way to DRAM
    BATCH = "waits for a batch"  # from its loader
    UPDATES = "waits for updates"  # of its weights, by the optimizer
    CALLBACKS = "waits for callbacks"
    FITTING = "being fitted"  # its batch has a new shape, or was too large
    COMMITTING = "committing"
    ENDING = "ending"
    FINISHED = "finished"
    STOPPED = "stopped"
    PAUSED = "paused"
    FAILED = "failed"

    @property
    def computes(self) -> bool:
        """True while a unit of it is computed."""
        return self in (Doing.COMPUTING, Doing.VALIDATING)

    @property
    def is_over(self) -> bool:
        """True if it does nothing more in this run."""
        return self in (Doing.FINISHED, Doing.STOPPED, Doing.PAUSED, Doing.FAILED)


class AtWork(Enum):
    """Things that a device does or waits for, in words for people."""

    COMPUTES = "computes"
    WEIGHTS = "waits for weights"  # of the unit that it is to compute
    MEMORY = "waits for memory"  # for that unit
    LOADS = "loads"  # for the unit that comes next
    IDLE = "idle"
    LEAVES = "leaves"  # once what is on its way from it is in DRAM


class TaskProgress(NamedTuple):
    """One task."""

    name: str
    doing: Doing
    steps: int  # committed
    num_steps: int | None  # None: nobody knows
    loss: float | None = None  # the last one
    validation: float | None = None  # likewise
    batch: str = ""  # of a task whose batches adapt
    steps_per_s: float | None = None  # over the last 30 s, or two steps; None: unknown, or it is over
    is_active: bool = True  # it has computed in the last seconds

    @property
    def left_s(self) -> float | None:
        """Seconds that its training steps will take as things stand; None: unknown, or it is over."""
        if not self.steps_per_s or self.num_steps is None:
            return None
        return max(0, self.num_steps - self.steps) / self.steps_per_s


class DeviceProgress(NamedTuple):
    """One device; bytes and seconds since the run began, rates over the last seconds, at the end over the whole run."""

    name: str
    doing: AtWork
    unit: Unit | None  # that it does this with
    used_bytes: int
    memory_bytes: int
    loaded_bytes: int
    stored_bytes: int
    busy_s: float
    loaded_per_s: float = 0.0
    stored_per_s: float = 0.0
    busy_share: float = 0.0  # of the time, in which it computed


class RunProgress(NamedTuple):
    """A run at one moment."""

    now_s: float  # since it began
    tasks: Sequence[TaskProgress]
    devices: Sequence[DeviceProgress]

    def first(self, most: int) -> list[TaskProgress]:
        """Return at most so many tasks: those that compute every few seconds, then those that wait, then the others."""
        return sorted(self.tasks, key=lambda task: (task.doing.is_over, not task.is_active))[: max(0, most)]

    @staticmethod
    def counts(tasks: Iterable[TaskProgress]) -> str:
        """Return how many of these tasks do what: "2 computing, 3 waiting, 4 finished"."""
        doings = [task.doing for task in tasks]
        numbers = Counter(
            "computing" if each.computes else each.value if each.is_over else "waiting" for each in doings
        )
        order = ["computing", "waiting", *(doing.value for doing in Doing if doing.is_over)]
        return ", ".join(f"{numbers[word]} {word}" for word in order if numbers[word])


class Observer(ABC):
    """Is shown how a run stands, in a thread of its own.

    So what it waits for holds up nothing. What it raises ends it, with a line on stderr, and nothing else.
    """

    period_s: float = 1.0  # seconds between two looks at the run, at least

    @abstractmethod
    def show(self, run: RunProgress) -> None:
        """Show how things stand."""

    def close(self, run: RunProgress) -> None:
        """Show how all has ended."""
        self.show(run)

    def leave(self) -> None:  # noqa: B027  most have nothing to do
        """Undo what it did to the process; in any thread, and while `show` may be waiting for a terminal."""
