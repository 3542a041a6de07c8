"""Model selection: trials of an Optuna study, trained together on the devices of this machine."""

from hydra_engine.sweep.population import Population
from hydra_engine.sweep.rungs import Rungs
from hydra_engine.sweep.study import StudyMismatch
from hydra_engine.sweep.sweep import Sweep
from hydra_engine.sweep.tune import trainable

__all__ = ["Population", "Rungs", "StudyMismatch", "Sweep", "trainable"]
