"""The directory that an orchestrator saves in, over all of its calls."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from hydra_engine.checkpoints.checkpoint import Checkpoint, newest_first
from hydra_engine.checkpoints.directory import CheckpointDirectory
from hydra_engine.checkpoints.saved_task import LOST, SavedTask
from hydra_engine.checkpoints.saver import Every, Saver
from hydra_engine.data import Beginning
from hydra_engine.errors import CheckpointError
from hydra_engine.system import process as restart
from hydra_engine.tasks import CheckpointReport
from hydra_engine.texts import warn
from partitioners.plain_numbers import plain

RESCUE = "hydra-rescue-"


class CheckpointStore:
    """A directory that is open while a call trains, or none, and the checkpoint that a call resumes."""

    def __init__(self, directory: str | os.PathLike[str] | None, every: object, keep: int) -> None:
        keep = plain(keep)
        if isinstance(keep, bool) or not isinstance(keep, int):
            raise TypeError(f"keep: {keep!r} is not an int; give a number of checkpoints")
        if keep < 1:
            raise ValueError(f"keep: {keep}, limit: at least 1 checkpoint; a run resumes from it")
        if directory is not None and not isinstance(directory, (str, os.PathLike)):
            raise TypeError(f"checkpoint_dir: {directory!r} is a {type(directory).__name__}; give a path")
        self._every = Every.parse(every)
        self._keep = keep
        self.directory = None if directory is None else Path(directory).absolute()
        self._open: CheckpointDirectory | None = None
        self._found: Checkpoint | None = None  # that is resumed
        self._is_own = False  # its checkpoints are of this object's calls
        self.paused: dict[str, Beginning] = {}  # tasks that were paused here: they go on in no resume, too
        self._forks: dict[str, str] = {}  # tasks that begin as others are saved, by name
        self._saver: Saver | None = None  # of the last run
        self.elsewhere: dict[str, Checkpoint] = {}  # of other runs, from which tasks go on, by task

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._open.close()
        self._open = self._found = self._saver = None

    @property
    def may_save(self) -> bool:
        """True if there is a directory, or `hydra-engine resume` asks for one."""
        return self.directory is not None or self._asked_for() is not None

    def _asked_for(self) -> Path | None:
        """Return the directory to resume, if it is this store's; for one without, if a run rescued into it."""
        found = restart.directory_asked_for()
        if found is None:
            return None
        real = Path(os.path.realpath(found))  # either may be named through a link
        if self.directory is None:
            return found if real.name.startswith(RESCUE) else None
        return self.directory if real == Path(os.path.realpath(self.directory)) else None

    @property
    def nothing_saved(self) -> CheckpointReport | None:
        """The report of a call that had nothing to train; None without a directory."""
        return None if self._open is None else CheckpointReport()

    def open(self, *, resume: bool) -> Checkpoint | None:
        """Lock the directory, and return the checkpoint to resume, if asked to; CheckpointError: another run's."""
        if (asked_for := self._asked_for()) is not None:
            self.directory, resume = asked_for, True
        if self.directory is None:
            if resume:
                raise ValueError("resume: there is no checkpoint_dir to go on from; give ModelOrchestrator one")
            return None
        self._open = CheckpointDirectory(self.directory, keep=self._keep)
        found = self._open.load_newest()
        if asked_for is not None:
            restart.forget()  # others in this process begin anew; not before, since the lock may be another run's
        self._found = found if resume else None
        if found is not None and not resume and not self._is_own:
            raise CheckpointError(
                f"{self.directory} holds checkpoints of another run, the newest {found.path.name}; go on from it with "
                f"`hydra-engine resume {self.directory}` or train_models(resume=True), or give another checkpoint_dir"
            )
        for message in () if found is None else found.messages:
            warn(f"hydra_engine: {message}")
        self._is_own = True
        if self._forks:
            about = {} if found is None else {key: each for key, each in found.data.items() if key != "tasks"}
            with closing(Saver(self._open, self._every, lambda: about)) as saver:
                self._write_forks(saver)
        return found if resume else None

    def goes_on(self, name: str) -> bool:
        """Return True if a task goes on from what was saved of it, if something was."""
        return self._found is not None or name in self.paused or name in self._forks or name in self.elsewhere

    @property
    def has_going_on(self) -> bool:
        """True if tasks go on in no resume, too."""
        return bool(self.paused or self._forks or self.elsewhere)

    def fork(self, source: str, task: str) -> None:
        """Let a task begin as another one is saved. That is on disk as this returns, or else before the next run.

        Raises ValueError for one that is not saved, and CheckpointError.
        """
        self._forks[task] = source
        try:
            if self._open is not None and self._saver is not None:
                self._write_forks(self._saver)
        except BaseException:
            self._forks.pop(task, None)
            raise

    def _write_forks(self, saver: Saver) -> None:
        for task, source in list(self._forks.items()):
            saved = {} if self._open is None else self._open.newest_tasks
            if task in saved:  # it goes on from there
                continue
            if source not in saved:
                del self._forks[task]
                known = ", ".join(map(repr, saved)) or "none"
                raise ValueError(f"fork_task: {source!r} is not saved, known: {known}; give one of these")
            saver.fork(source, task)  # where the disk does not take it, a later call tries again

    def saved(self, name: str, put_back: Callable[[SavedTask], None], *, while_training: bool) -> SavedTask | None:
        """Read a task as it was saved last, and call `put_back` with it; None if it was not saved, or in no resume.

        A task that was paused here, is a fork, or goes on from elsewhere, is read in no resume, too.
        while_training: from the next checkpoint if saves remove this one meanwhile, and its optimizer at once.
        """
        while (found := self._newest(name)) is not None and name in found.task_names:
            try:
                saved = SavedTask(found, name, self.over(name))
                put_back(saved)
                if while_training:
                    saved.read_optimizer()
            except CheckpointError:
                if found is self._newest(name):
                    raise
            else:
                return saved
        return None

    def _newest(self, name: str) -> Checkpoint | None:
        if name in self.elsewhere:
            return self.elsewhere[name]
        return self._open.newest if self._open is not None and self.goes_on(name) else None

    def over(self, name: str) -> str | None:
        """Return how a task ended, even if nothing was saved of it; None if it goes on, or is not known."""
        found = self._newest(name)
        over: str | None = None if found is None else found.data["tasks"].get(name, {}).get("over")
        return over if found is not None and (over == LOST or name in found.task_names) else None

    def saver(self, about: Callable[[], dict[str, Any]]) -> Saver | None:
        """Return the saver of one run; None without a directory."""
        self._saver = None if self._open is None else Saver(self._open, self._every, about)
        return self._saver

    def rescue(self, about: Callable[[], dict[str, Any]]) -> Saver:
        """Return a saver in a new directory, here or among temporary files, for a process that has to end."""
        self.directory = _new_directory((Path.cwd(), Path(tempfile.gettempdir())))
        self._open = CheckpointDirectory(self.directory, keep=self._keep)
        return Saver(self._open, self._every, about)

    def remedy(self) -> str:
        """Return text that tells how to go on after the process has ended."""
        if self.directory is None or not newest_first(self.directory):
            return "nothing could be saved; begin again without the task that struck the device, or correct its data"
        return (
            f"last commits are in {self.directory}; go on without the task that struck the device by "
            f"`hydra-engine resume {self.directory}`"
        )


def _new_directory(parents: Iterable[Path]) -> Path:
    stamp, refused = time.strftime(f"{RESCUE}%Y%m%d-%H%M%S"), []
    for parent in parents:
        try:
            return Path(tempfile.mkdtemp(prefix=f"{stamp}-", dir=parent))
        except OSError as error:
            refused.append(str(error))
    raise CheckpointError(f"no directory to save into: {'; '.join(refused)}; make one of them writable")
