"""Writing a run's checkpoints: it decides when a save is due, and writes it in a thread of its own.

A round takes every task that trains. A task that has ended is written once, before its memory is its user's again.
What did not change since then, and tasks that have ended, are taken over from the checkpoint before.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from hydra_engine.checkpoints.directory import CheckpointDirectory, NewCheckpoint
from hydra_engine.checkpoints.snapshot import FROZEN, Snapshot
from hydra_engine.errors import CheckpointError
from hydra_engine.tasks import FINISHED, STOPPED, CheckpointReport
from hydra_engine.texts import warn
from partitioners.plain_numbers import plain

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|sec|min|h|d)\s*")
_SECONDS = {"s": 1, "sec": 1, "min": 60, "h": 3600, "d": 86400}


class Every(NamedTuple):
    """The interval between two saves: steps of any task, or seconds. The other one is None."""

    steps: int | None
    seconds: float | None

    @classmethod
    def parse(cls, value: object) -> Every:
        """Read `checkpoint_every` as the user gave it; raises TypeError or ValueError."""
        rule = "give a number of steps, or a time such as '10min', '30s' or '2h'"
        value = plain(value)
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


class _LastSave(NamedTuple):
    """A task's last turn in a round, or the step that it was resumed at."""

    steps: int
    is_saved: bool  # or will be, once the writing thread is through with it


class _Round:
    """One save. The thread that decides puts tasks in, and the writing thread takes them out as they come."""

    def __init__(self, tasks: Collection[str] = ()) -> None:
        self.begun_s = time.monotonic()
        self.wanted = set(tasks)  # neither given nor passed over; for the thread that decides
        self.snapshots: list[Snapshot] = []  # that came; this and all below: for the writing thread
        self.waited_s = 0.0
        self.error: BaseException | None = None  # why it was not saved
        self._num_missing = len(tasks)
        self.given: SimpleQueue[Snapshot | None] = SimpleQueue()  # captured, to be written; None: one is passed over

    def come(self) -> Iterator[Snapshot]:
        """Wait for each task that did not come yet; another call goes on where one was left."""
        while self._num_missing:
            start_s = time.perf_counter()
            snapshot = self.given.get()
            self.waited_s += time.perf_counter() - start_s
            self._num_missing -= 1
            if snapshot is not None:
                self.snapshots.append(snapshot)
                yield snapshot


class Saver:
    """Saves of one run. For the thread that decides; `save_end`, `fork`, `count`, `report`, `tell` for any thread.

    about: what a checkpoint says of the run, as one is written.
    """

    def __init__(self, directory: CheckpointDirectory, every: Every, about: Callable[[], dict[str, Any]]) -> None:
        self.when_free: Callable[[], None] = lambda: None  # called, in some thread, once an owed round may begin
        self._directory = directory
        self._every = every
        self._about = about
        newest = directory.newest
        self._tasks: dict[str, dict[str, Any]] = {} if newest is None else dict(newest.data["tasks"])
        self._turns: dict[str, _LastSave] = {}
        self._round = _Round()  # the last one
        self._has_frozen: dict[str, int] = {}  # versions of frozen weights that this run has written, by task
        self._paused: set[str] = set()  # tasks that go on some other time
        self._errors_told: set[tuple[str, str]] = set()  # task, and why it could not be saved
        self._thread = ThreadPoolExecutor(1, "hydra-saver")
        self._lock = threading.RLock()  # guards the attributes below, which the writing thread changes too
        self._report = CheckpointReport()
        self._num_waiting = 0  # saves that were asked for and are not written yet
        self._is_owed = False  # a round fell due meanwhile

    @property
    def wanted(self) -> Collection[str]:
        """Tasks that the round under way still waits for."""
        return self._round.wanted

    def is_due(self, task: str, steps: int) -> bool:
        """Return True if a round shall begin, as a task commits this step; never while one is being written."""
        if self._every.seconds is not None:
            is_due = time.monotonic() - self._round.begun_s >= self._every.seconds
        else:
            assert self._every.steps is not None
            turn = self._turns.get(task)
            is_due = steps - (0 if turn is None else turn.steps) >= self._every.steps
        with self._lock:
            self._is_owed |= is_due and self._num_waiting > 0
            return is_due and not self._num_waiting

    def take_owed(self) -> bool:
        """Return True, once, if a round may begin that fell due while another was written."""
        with self._lock:
            is_owed = self._is_owed and not self._num_waiting
            self._is_owed &= not is_owed
            return is_owed

    def owe(self) -> bool:
        """Return True if a round may begin now; else one begins once what is asked for is written."""
        with self._lock:
            self._is_owed |= self._num_waiting > 0
            return not self._num_waiting

    def has(self, task: str, steps: int) -> bool:
        """Return True if a task is saved, or being saved, as it is after these steps."""
        return self._turns.get(task) == _LastSave(steps, is_saved=True)

    def has_steps(self, task: str) -> bool:
        """Return True if a step of a task is on disk. In the writing thread."""
        saved = self._tasks.get(task)
        return saved is not None and saved["steps"] > 0

    def began_at(self, task: str, steps: int) -> None:
        """Note that a task goes on from this step, which is saved."""
        self._paused.discard(task)
        self._turns[task] = _LastSave(steps, is_saved=True)

    def begin(self, tasks: Collection[str]) -> None:
        """Begin a round of these tasks; each is given, or passed over, later."""
        self._is_owed = False
        self._round = _Round(tasks)
        self._submit(self._write_round, self._round)

    def give(self, name: str, snapshot: Snapshot | None) -> Callable[[], None]:
        """Give one of the round's tasks, or None to pass it over. Returns a function to call once it is captured."""
        self._round.wanted.discard(name)
        if snapshot is not None:
            self._turns[name] = _LastSave(snapshot.steps, is_saved=True)
            self._paused.discard(name)
        return partial(self._round.given.put, snapshot)

    def save_end(
        self, task: str, over: str | None, snapshot: Snapshot | None, then: Callable[[BaseException | None], None]
    ) -> None:
        """Save that a task has ended, and how; then call `then`, with None or why it is not saved. For any thread."""
        self._submit(self._write_end, task, over, snapshot, then)

    def fork(self, source: str, task: str) -> bool:
        """Save that a task begins as another is saved, and wait for the disk. False: closed. Raises CheckpointError."""
        answers: SimpleQueue[BaseException | None] = SimpleQueue()
        try:
            self._submit(self._write_fork, source, task, answers.put)
        except RuntimeError:
            return False
        error = answers.get()
        if error is not None:
            raise CheckpointError(f"task {task!r} cannot begin as {source!r} is saved: {error}") from error
        return True

    @property
    def report(self) -> CheckpointReport:
        """Checkpoints that were saved, and what they cost."""
        with self._lock:
            return self._report

    def count(self, **more: Any) -> None:
        """Add to the report's figures and messages, by name."""
        with self._lock:
            sums = {name: getattr(self._report, name) + each for name, each in more.items()}
            self._report = replace(self._report, **sums)

    def give_up(self) -> None:
        """Pass over all tasks that the round still waits for."""
        for name in list(self.wanted):
            self.give(name, None)()

    def close(self) -> None:
        """Wait until every save that was asked for is written."""
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
        is_saved = False
        try:
            is_saved = self._save(it)
        finally:
            # Updates may wait for tensors that will not be written, and tasks that are still to come wait behind them.
            for each in it.snapshots:
                each.done()
            for each in it.come():
                each.done()
            for each in it.snapshots:
                if not is_saved or each.error is not None:
                    self._turns[each.name] = _LastSave(each.steps, is_saved=False)
            it.snapshots.clear()  # which hold the states of their tasks

    def _write_end(
        self, task: str, over: str | None, snapshot: Snapshot | None, then: Callable[[BaseException | None], None]
    ) -> None:
        error: BaseException | None = CheckpointError(f"task {task!r} could not be saved")
        try:
            if over is None:
                self._paused.add(task)
            error = self._written_end(task, over, snapshot)
        finally:
            if snapshot is not None:
                snapshot.done()
            then(error)

    def _written_end(self, task: str, over: str | None, snapshot: Snapshot | None) -> BaseException | None:
        """Save a task's end, or return why that was not possible."""
        saved = self._tasks.get(task)
        now = None if snapshot is None else (snapshot.steps, over)
        if (
            over is None
            and saved is not None
            and (saved["steps"], saved["over"]) == now
            and "fork_of" not in saved  # whose seed is its own
            and not self._lacks_files(task)
        ):
            return None
        if snapshot is not None and self._is_whole(snapshot):
            it = _Round([task])
            it.given.put(snapshot)
            if self._save(it):
                return None
            if snapshot.error is None:
                return it.error
        if over is not None and (snapshot is None or over not in (FINISHED, STOPPED)):
            # A task that ended well and cannot be saved keeps an older step, which is not its end.
            self._save(_Round(), {task: {**(saved or {"steps": 0, "loss": None}), "over": over}})
        return None if snapshot is None else snapshot.error

    def _write_fork(self, source: str, task: str, then: Callable[[BaseException | None], None]) -> None:
        it, is_saved = _Round(), False
        try:
            entry = {**self._tasks[source], "over": None, "fork_of": source}
            self._paused.add(task)
            is_saved = self._save(it, {task: entry}, {task: source})
        finally:
            then(None if is_saved else it.error or CheckpointError("it could not be saved"))

    def _is_whole(self, snapshot: Snapshot) -> bool:
        told = (snapshot.name, str(snapshot.error))
        if snapshot.error is not None and told not in self._errors_told:  # each save may meet it again
            self._errors_told.add(told)
            self.tell(f"task {snapshot.name!r} could not be saved at step {snapshot.steps}: {snapshot.error}")
        return snapshot.error is None

    def _save(
        self, it: _Round, noted: Mapping[str, dict[str, Any]] | None = None, sources: Mapping[str, str] | None = None
    ) -> bool:
        """Save a round's tasks as they come, others as they were; returns True once that is there.

        noted: what a checkpoint says of tasks whose files stay. sources: whose files tasks have that are new.
        """
        start_s = time.perf_counter()
        try:
            with self._directory.begin() as new:
                for snapshot in it.come():
                    if self._is_whole(snapshot):
                        try:
                            self._add(new, snapshot)
                        except (TypeError, ValueError) as error:  # of this task's tensors
                            snapshot.error = error
                            self._is_whole(snapshot)
                whole = [each for each in it.snapshots if each.error is None]
                if not whole and not noted:
                    return False
                tasks = {**self._tasks, **(noted or {})}
                for name in tasks.keys() - {each.name for each in whole}:
                    is_idle = tasks[name]["over"] is not None or name in self._paused
                    if is_idle and self._lacks_files(name):
                        tasks[name] = {**tasks[name], "steps": 0, "loss": None}  # nobody can write its files anew
                        self.tell(
                            f"what was saved of task {name!r} has been damaged since, and is left out: a resume trains "
                            f"it from the beginning, unless it is from an older checkpoint"
                        )
                    elif self._directory.newest_parts(name):
                        new.keep(name)
                for name, source in (sources or {}).items():
                    new.keep(name, source=source)
                tasks |= {each.name: {"steps": each.steps, "over": each.over, "loss": each.loss} for each in whole}
                saved = new.commit({"tasks": tasks, **self._about()})
        except Exception as error:
            self.count(num_failed=1)
            self.tell(f"a checkpoint could not be saved, and training goes on without: {error}")
            it.error = error
            return False
        self._tasks = tasks
        self._has_frozen |= {each.name: each.frozen_version for each in whole}
        write_s = time.perf_counter() - start_s - it.waited_s
        with self._lock:  # a report in between must not have one without the other
            self.count(num_saved=1, num_bytes=saved.num_bytes, write_s=write_s)
            self._report = replace(self._report, path=str(saved.path))
        for message in saved.messages:
            self.tell(message)
        return True

    def _add(self, new: NewCheckpoint, snapshot: Snapshot) -> None:
        known = {FROZEN} if self._has_frozen.get(snapshot.name) == snapshot.frozen_version else set[str]()
        unchanged = self._directory.newest_parts(snapshot.name) & known
        parts = {part: each for part, each in snapshot.parts.items() if part not in unchanged}
        new.add(snapshot.name, parts, unchanged, lasting={FROZEN})
        snapshot.done()

    def _lacks_files(self, task: str) -> bool:
        """Return True if a file of a task in the newest checkpoint is gone."""
        return self._directory.newest_parts(task) != self._directory.newest_tasks.get(task, {}).keys()

    def tell(self, message: str) -> None:
        """Say something that the user has to know: at once, and in the report."""
        self.count(messages=(message,))
        warn(f"hydra_engine: {message}")
