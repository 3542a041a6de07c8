"""Tasks saved on disk and read back."""

from hydra_engine.checkpoints.checkpoint import Checkpoint, furthest, load_newest
from hydra_engine.checkpoints.saved_task import LOST, SavedTask, never_committed
from hydra_engine.checkpoints.saver import Saver
from hydra_engine.checkpoints.snapshot import LastCommit, Snapshot
from hydra_engine.checkpoints.store import CheckpointStore
