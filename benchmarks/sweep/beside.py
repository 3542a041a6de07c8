"""The 12 trials that the programs `beside_*.py` train, in words that all of them use."""

import json
from itertools import product

import optuna
import space

WIDTH, NUM_BLOCKS, EPOCHS, NUM_WINDOWS = 192, 4, 2, 192
CONFIGS = [{"batch_size": size, "lr": lr} for size, lr in product((16, 8), (3e-4, 1e-4, 5e-5, 6e-5, 1e-5, 2e-5))]

optuna.logging.set_verbosity(optuna.logging.WARNING)


def ask(trial):
    """Batch size and learning rate."""
    batch_size = trial.suggest_categorical("batch_size", (16, 8))
    return batch_size, trial.suggest_float("lr", 1e-6, 1e-2, log=True)


def new_study(storage=None):
    """A study in which the trials wait, in order."""
    study = optuna.create_study(study_name="beside", storage=storage, pruner=optuna.pruners.NopPruner())
    for config in CONFIGS:
        study.enqueue_trial(config)
    return study


def gpt():
    return space.gpt(WIDTH, NUM_BLOCKS)


def loaders(batch_size):
    """For training and for validation."""
    found = space.data(NUM_WINDOWS)
    return space.batches_of(found, batch_size), found.validation


def tell(values):
    """Print the trials' values in their order, for `main.py`."""
    print(json.dumps(list(values)))
