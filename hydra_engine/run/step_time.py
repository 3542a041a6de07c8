"""Seconds of an adaptive task's steps, as its goodput is counted by."""

from __future__ import annotations

from typing import NamedTuple

from hydra_engine.devices import COMPUTE, LOAD
from hydra_engine.trace import Trace

# Others that work for a smaller share of an interval than this do not count.
ALONE = 0.02
# A step counts for at least this share of its own work, also if others' work hides all of it.
LEAST_CHARGE = 0.1


class Work(NamedTuple):
    """Seconds that lanes have worked."""

    compute_s: float = 0.0
    load_s: float = 0.0

    def __sub__(self, other: Work) -> Work:
        return Work(self.compute_s - other.compute_s, self.load_s - other.load_s)

    @property
    def longest_s(self) -> float:
        """Seconds of the lane that takes longest, while the other works as well."""
        return max(self)


class StepSeconds(NamedTuple):
    """Seconds of a step, and of its loads."""

    step_s: float
    link_s: float


def charged_s(own: Work, of_all: Work, elapsed_s: float) -> float:
    """Return the seconds that a step costs.

    A task alone is charged what elapsed. Beside others, it is charged by how much longer it makes a round of the steps
    of all: their loads cross one link, and their units are computed one after the other, both at the same time.

        compute   |##own##|####others####|
        load      |#own#|########others########|       costs what `own` adds to the longer one
    """
    others = of_all - own
    if others.longest_s <= ALONE * elapsed_s:
        return elapsed_s
    return max(of_all.longest_s - others.longest_s, LEAST_CHARGE * own.longest_s)


class StepClock:
    """Times the steps of one task; touched by whoever commits them, one after the other."""

    def __init__(self, trace: Trace, task: str) -> None:
        self._trace, self._task = trace, task
        self._last: tuple[float, Work, Work] | None = None  # when a batch was through, and the work until then

    def begin(self) -> None:
        """A batch begins: the first one."""
        if self._last is None:
            self._last = self._now()

    def end(self, *, num_devices: int = 1) -> StepSeconds:
        """Return the seconds since the batch before was through; `num_devices`: that this one was spread over."""
        now = self._now()
        (then_s, own_then, all_then), (now_s, own_now, all_now) = self._last or now, now
        self._last = now
        own, of_all, elapsed_s = own_now - own_then, all_now - all_then, now_s - then_s
        step_s = charged_s(own, of_all, elapsed_s)
        return StepSeconds(step_s if step_s == elapsed_s else step_s / num_devices, own.load_s / num_devices)

    def _now(self) -> tuple[float, Work, Work]:
        trace = self._trace
        own = Work(trace.task_s(self._task, COMPUTE), trace.task_s(self._task, LOAD))
        return trace.now_s(), own, Work(trace.task_s(None, COMPUTE), trace.task_s(None, LOAD))
