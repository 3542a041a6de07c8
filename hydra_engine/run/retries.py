"""How often a task has begun again after an error, and whether it may once more."""

from __future__ import annotations

import threading

from hydra_engine.errors import DeviceLost, LoaderTimeout, StopTask
from hydra_engine.tasks import Retry, TaskReport

# Trying again helps with none of these: the device is gone, the user has decided, the iterator is still in use.
FINAL = (DeviceLost, StopTask, LoaderTimeout)


class Retries:
    """Counts a task's retries in one run, and reports each. From any thread: shards are updated side by side."""

    def __init__(self, most: int, report: TaskReport) -> None:
        self._most = most
        self._num_before = len(report.retries)  # of a run that is resumed
        self._report = report
        self._lock = threading.Lock()

    @property
    def are_asked_for(self) -> bool:
        """Whether the task is ever to be tried again, so that something has to be kept for it."""
        return self._most > 0

    def allow(self, error: BaseException, where: str, step: int) -> bool:
        """Whether what raised this may be tried again; then it is counted and reported."""
        if not isinstance(error, Exception) or isinstance(error, FINAL):
            return False
        with self._lock:
            if len(self._report.retries) - self._num_before >= self._most:
                return False
            first_line = (str(error).strip() or "no message").splitlines()[0]
            text = f"{type(error).__name__}: {first_line}"
            self._report.retries.append(Retry(step=step, where=where, error=text))
            return True
