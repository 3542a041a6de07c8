"""Things that the departments of a run share: the inbox, the trace, the tasks by name, the host's threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from hydra_engine.errors import DeviceLost
from hydra_engine.run.running_task import RunningTask
from hydra_engine.run.signals import Inbox
from hydra_engine.schedule import Event
from hydra_engine.system import HostThreads
from hydra_engine.trace import Trace


class Job(NamedTuple):
    """Something that another thread leaves to the one that decides."""

    run: Callable[[], None]


class Common:
    """Touched by the thread that decides; `events`, `trace`, `pool` and `later` by any."""

    def __init__(self, host: HostThreads) -> None:
        self.host = host
        self.events: Inbox[Any] = Inbox()
        self.due: deque[Event] = deque()  # to be decided upon before the event in hand is
        self.trace = Trace()
        self.tasks: dict[str, RunningTask] = {}
        self.pool = ThreadPoolExecutor(
            host.optimizer_threads,
            thread_name_prefix="hydra-optimizer",
            initializer=torch.set_num_threads,
            initargs=(host.optimizer_intra_op_threads,),
        )
        self.opening = threading.Lock()  # tasks take their memory, and give it back, one at a time
        self.is_interrupted = False  # nothing new begins
        self.lost: DeviceLost | None = None  # the first

    def later(self, job: Callable[[], None]) -> None:
        """Leave a job to the thread that decides."""
        self.events.put(Job(job))

    def when_told(self, task: RunningTask, job: Callable[[], None]) -> None:
        """Run a job in the thread that decides, once the task's callbacks have returned; at once if they have."""
        if task.notifier.is_told:
            job()
        else:
            task.notifier.when_told(lambda: self.later(job))
