"""The folder of a sweep: its lock, its identity, its study, and the checkpoints of its trials."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from hydra_engine import CheckpointError, FolderLock

# A node's directory is named so, and a number.
NODE = "node-"


class SweepFolder:
    """A folder that one sweep at a time works in. It knows its own trials again by an identity, wherever it is moved.

        DIR/sweep.lock      held while the sweep runs
        DIR/sweep.id        the identity, which its trials carry in the study
        DIR/study.db        the study, where the user gave none
        DIR/checkpoints/    of the trials, as `ModelOrchestrator(checkpoint_dir=...)` writes them; those of a
                            cluster's nodes in node-*/, one for each process that was at work

    Raises CheckpointError where the folder is in use or cannot be written to.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.path / "sweep.lock")
            try:
                self.sweep_id = self._identity()
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            raise CheckpointError(
                f"checkpoint_dir: {self.path} cannot be used: {error}; give a folder that can be written to"
            ) from error

    def _identity(self) -> str:
        file = self.path / "sweep.id"
        known = file.read_text(encoding="utf-8").strip() if file.exists() else ""
        if not known:
            known = uuid.uuid4().hex
            file.write_text(f"{known}\n", encoding="utf-8")
        return known

    @property
    def study_url(self) -> str:
        return f"sqlite:///{self.path / 'study.db'}"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @staticmethod
    def places(checkpoints: Path) -> list[Path]:
        """Return all directories of checkpoints: of sweeps on one machine, and of each node in a cluster."""
        return [checkpoints, *sorted(checkpoints.glob(f"{NODE}*"))]

    def check_is_of(self, num_trials: int) -> None:
        """Refuse a folder with checkpoints, where the study has `num_trials` = 0 trials of this folder."""
        if num_trials == 0 and self.checkpoints.exists() and any(self.checkpoints.glob("*-*")):
            raise CheckpointError(
                f"checkpoint_dir: {self.path} holds trials of another study, whose weights would be taken for this "
                f"one's; give the study that they belong to, or another folder"
            )

    def close(self) -> None:
        """Let another sweep have the folder."""
        self._lock.release()
