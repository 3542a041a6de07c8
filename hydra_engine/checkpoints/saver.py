"""Writes a run's checkpoints: when one is due, in a thread of its own, and what came of it.

A round takes every task that trains; a task that is over is written once, at its end, before its memory is its user's
again. What did not change since, of tasks that are over too, is linked from the checkpoint before.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, NamedTuple

from hydra_engine.checkpoints.directory import CheckpointDirectory, NewCheckpoint
from hydra_engine.checkpoints.snapshot import FROZEN, SaveCost, Snapshot
from hydra_engine.tasks import FINISHED, STOPPED, CheckpointReport

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|sec|min|h|d)\s*")
_SECONDS = {"s": 1, "sec": 1, "min": 60, "h": 3600, "d": 86400}


class Every(NamedTuple):
    """How often to save: after so many steps of any task, or so many seconds."""

    steps: int | None
    seconds: float | None

    @classmethod
    def parse(cls, value: object) -> Every:
        """`checkpoint_every`, as the user gave it; raises TypeError or ValueError."""
        rule = "give a number of steps, or a time such as '10min', '30s' or '2h'"
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise TypeError(f"checkpoint_every: {value!r} is a {type(value).__name__}; {rule}")
        if isinstance(value, int):
            if value < 1:
                raise ValueError(f"checkpoint_every: {value}, limit: at least 1 step; {rule}")
            return cls(value, None)
        match = _DURATION.fullmatch(value)
        if match is None or float(match[1]) == 0:
            raise ValueError(f"checkpoint_every: {value!r}, limit: a time above 0; {rule}")
        return cls(None, float(match[1]) * _SECONDS[match[2]])


class _Round(NamedTuple):
    names: Collection[str]
    given: SimpleQueue[tuple[str, Snapshot | None]]


class Saver:
    """Where and when a run saves. For the thread that decides; `save_end`, `cost`, `report` and `tell` for any.

    about: what a checkpoint says of the run, asked for as one is written. tasks: what the newest one in the directory
    says of its tasks: {name: {"steps", "over", "loss"}}.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        every: Every,
        about: Callable[[], dict[str, Any]],
        tasks: dict[str, dict[str, Any]],
    ) -> None:
        self.directory = directory
        self._report = CheckpointReport()
        self._every = every
        self._about = about
        self._tasks = dict(tasks)
        self._given_steps: dict[str, int] = {}  # of each task's last turn, whatever came of it
        self._saved_steps: dict[str, int] = {}
        self._said: set[tuple[str, str]] = set()  # which task could not be saved, and why
        self._has_frozen: set[str] = set()  # tasks whose frozen weights this run has written
        self.cost = SaveCost()
        self._begun_s = time.monotonic()  # of the last round
        self._round: _Round | None = None
        self._wanted: set[str] = set()
        self._thread = ThreadPoolExecutor(1, "hydra-saver")
        self._lock = threading.Lock()  # of what the writing thread tells
        self._waited_s = 0.0  # of the save under way: for tasks to be captured
        self._num_waiting = 0  # saves that were asked for and are not through
        self._is_owed = False  # a round fell due meanwhile
        self.when_free: Callable[[], None] = lambda: None  # called, in some thread, once a round that is owed may begin

    @property
    def wanted(self) -> Collection[str]:
        """Tasks that the round under way still waits for."""
        return self._wanted

    def is_due(self, task: str, steps: int) -> bool:
        """Whether a round shall begin, now that a task has committed so many steps; none while one is under way."""
        if self._every.seconds is not None:
            is_due = time.monotonic() - self._begun_s >= self._every.seconds
        else:
            assert self._every.steps is not None
            is_due = steps - self._given_steps.get(task, 0) >= self._every.steps
        with self._lock:
            self._is_owed |= is_due and self._num_waiting > 0
            return is_due and not self._num_waiting

    def take_owed(self) -> bool:
        """Whether a round may begin that fell due while another was written."""
        with self._lock:
            is_owed = self._is_owed and not self._num_waiting
            self._is_owed &= not is_owed
            return is_owed

    def has(self, task: str, steps: int) -> bool:
        """Whether a task is saved, or being saved, as it is after so many steps."""
        return self._saved_steps.get(task) == steps

    def began_at(self, task: str, steps: int) -> None:
        """A task goes on from so many steps, which are saved."""
        self._given_steps[task] = self._saved_steps[task] = steps

    def begin(self, tasks: Collection[str]) -> None:
        """Begin a round of these tasks; each is given, or passed over, later."""
        self._begun_s = time.monotonic()
        self._is_owed = False
        self._wanted = set(tasks)
        self._round = _Round(list(tasks), SimpleQueue())
        self._submit(self._write_round, self._round)

    def give(self, name: str, snapshot: Snapshot | None) -> Callable[[], None]:
        """One of the round's tasks is at hand, or None of it is to be had.

        Returns what is to be called once it is captured: only then does the writing thread begin with it.
        """
        self._wanted.discard(name)
        assert self._round is not None
        if snapshot is not None:
            self._given_steps[name] = self._saved_steps[name] = snapshot.steps
        given = self._round.given
        return lambda: given.put((name, snapshot))

    def save_end(self, task: str, over: str | None, snapshot: Snapshot | None, then: Callable[[], None]) -> None:
        """Save that a task is over, and how it is, unless that is saved already; then call. From any thread.

        It is called whether that could be saved or not.
        """
        self._submit(self._write_end, task, over, snapshot, then)

    @property
    def report(self) -> CheckpointReport:
        """What was saved, and what it cost."""
        with self._lock:
            return replace(self._report, copied_bytes=self.cost.copied_bytes, held_s=self.cost.held_s)

    def give_up(self) -> None:
        """Wait for no task any more."""
        for name in list(self._wanted):
            self.give(name, None)()

    def close(self) -> None:
        """Wait until all is written that was asked for."""
        self.give_up()
        self._thread.shutdown()

    def _submit(self, job: Callable[..., None], *args: Any) -> None:
        with self._lock:
            self._num_waiting += 1
        self._thread.submit(self._run, job, *args)

    def _run(self, job: Callable[..., None], *args: Any) -> None:
        try:
            job(*args)
        finally:
            with self._lock:
                self._num_waiting -= 1
                is_free = self._is_owed and not self._num_waiting
            if is_free:
                self.when_free()

    def _write_round(self, it: _Round) -> None:
        snapshots: list[Snapshot] = []
        left = list(it.names)

        def next_one() -> Snapshot | None:
            start_s = time.perf_counter()
            name, snapshot = it.given.get()
            self._waited_s += time.perf_counter() - start_s
            left.remove(name)
            if snapshot is not None:
                snapshots.append(snapshot)
            return snapshot

        def add_all(new: NewCheckpoint) -> None:
            while left:
                snapshot = next_one()
                if snapshot is not None and self._is_whole(snapshot):
                    self._add(new, snapshot)

        is_saved = False
        try:
            is_saved = self._save(add_all, snapshots, is_full=True)
        finally:
            # Nobody shall wait for what is not written; or the tasks that are left might wait behind who does.
            for each in snapshots:
                each.done()
            while left:
                last = next_one()
                if last is not None:
                    last.done()
            for each in snapshots:
                if not is_saved or each.error is not None:
                    self._saved_steps.pop(each.name, None)

    def _write_end(self, task: str, over: str | None, snapshot: Snapshot | None, then: Callable[[], None]) -> None:
        try:
            saved = self._tasks.get(task)
            now = None if snapshot is None else (snapshot.steps, over)
            if over is None and saved is not None and (saved["steps"], saved["over"]) == now:
                return
            if snapshot is not None and self._is_whole(snapshot):
                self._save(lambda new: self._add(new, snapshot), [snapshot], is_full=False)
            elif over is not None and (snapshot is None or over not in (FINISHED, STOPPED)):
                # Of one that has ended well and cannot be saved, an older step stays, which is not its end.
                before = self._tasks.get(task, {"steps": 0, "loss": None})
                self._save(lambda _: None, [], {task: {**before, "over": over}}, is_full=False)
        finally:
            if snapshot is not None:
                snapshot.done()
            then()

    def _is_whole(self, snapshot: Snapshot) -> bool:
        said = (snapshot.name, str(snapshot.error))
        if snapshot.error is not None and said not in self._said:  # it may be so at every save
            self._said.add(said)
            self.tell(f"task {snapshot.name!r} could not be saved at step {snapshot.steps}: {snapshot.error}")
        return snapshot.error is None

    def _add(self, new: NewCheckpoint, snapshot: Snapshot) -> None:
        files, linked = dict(snapshot.files), tuple[str, ...]()
        if snapshot.name in self._has_frozen and FROZEN in self.directory.newest_files(snapshot.name):
            del files[FROZEN]
            linked = (FROZEN,)
        new.add(snapshot.name, files, linked=linked)
        snapshot.done()

    def _save(
        self,
        add: Callable[[NewCheckpoint], None],
        snapshots: list[Snapshot],
        ended: Mapping[str, dict[str, Any]] = MappingProxyType({}),
        *,
        is_full: bool,
    ) -> bool:
        """Save what `add` adds, and other tasks as they were; `snapshots` is filled meanwhile. Whether it is there."""
        start_s, self._waited_s = time.perf_counter(), 0.0
        try:
            with self.directory.begin() as new:
                add(new)
                whole = [each for each in snapshots if each.error is None]
                if not whole and not ended:
                    return False
                tasks = {**self._tasks, **ended}
                for name in tasks.keys() - {each.name for each in whole}:
                    if tasks[name]["over"] is not None and self._is_spoilt(name):
                        tasks[name] = {**tasks[name], "steps": 0, "loss": None}  # whose files are not there any more
                        self.tell(
                            f"what was saved of task {name!r} has been damaged since, and is left out: a resume trains "
                            f"it from the beginning, unless it is from an older checkpoint"
                        )
                    elif self.directory.newest_files(name):
                        new.keep(name)
                tasks |= {each.name: {"steps": each.steps, "over": each.over, "loss": each.loss} for each in whole}
                saved = new.commit({"tasks": tasks, **self._about()}, is_full=is_full)
        except Exception as error:
            with self._lock:
                self._report = replace(self._report, num_failed=self._report.num_failed + 1)
            self.tell(f"a checkpoint could not be saved, and training goes on without: {error}")
            return False
        self._tasks = tasks
        self._has_frozen |= {each.name for each in whole}
        with self._lock:
            report = self._report
            self._report = replace(
                report,
                num_saved=report.num_saved + 1,
                num_bytes=report.num_bytes + saved.num_bytes,
                write_s=report.write_s + time.perf_counter() - start_s - self._waited_s,
                path=str(saved.path),
            )
        for message in saved.messages:
            self.tell(message)
        return True

    def _is_spoilt(self, task: str) -> bool:
        """Whether a file of a task in the newest checkpoint is gone: nobody can write that anew once it is over."""
        newest = self.directory.newest
        is_there = newest is not None and task in newest.task_names
        return is_there and newest is not None and self.directory.newest_files(task) != newest.files(task)

    def tell(self, message: str) -> None:
        """Say something that the user has to know: at once, and in the report."""
        with self._lock:
            self._report = replace(self._report, messages=(*self._report.messages, message))
        with suppress(OSError, ValueError):  # nobody may read it any more, and what is saved goes before
            print(f"hydra_engine: {message}", file=sys.stderr)
