"""Errors that a user can correct: at once, with the value, its limit and the remedy."""

import sys
import threading

import pytest
from torch import nn
from torch.nn import functional as F

from hydra_engine import EmulatedDevice, ModelTask
from hydra_engine.errors import CheckpointError
from hydra_engine.sweep import Sweep, study
from hydra_engine.sweep.folder import SweepFolder
from tests.sweep.space import batches, build

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)


def run(build_task=build, **options):
    sweep = Sweep(build_task, **{"num_trials": 2, "devices": [EmulatedDevice("1MiB")], **options})
    sweep.verbose = 0
    return sweep.run()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"build_task": 3}, TypeError, "build_task: 3 is not callable; give a function"),
        ({"num_trials": 0}, ValueError, "num_trials: 0, limit: at least 1"),
        ({"num_trials": 1.5}, TypeError, "num_trials: 1.5 is a float; give an int"),
        ({"policy": "best"}, ValueError, "policy: 'best'"),
        ({"checkpoint_every": "often"}, ValueError, "checkpoint_every: 'often', limit: a time above 0"),
        ({"parallel": 0}, ValueError, "parallel: 0, limit: at least 1; None is 2 per device"),
        ({"metric": "accuracy"}, ValueError, "direction: not given, and metric 'accuracy' may be any; give"),
        ({"metric": []}, ValueError, "metric: .*limit: at least one name"),
        ({"metric": ["a", "a"], "direction": ["minimize"] * 2}, ValueError, "metric: .*each once"),
        ({"direction": ["minimize"] * 2}, ValueError, "direction: 2, limit: one for each of 1 metrics"),
        ({"direction": "down"}, ValueError, "direction: 'down', known: 'minimize', 'maximize'"),
        ({"study": 7}, TypeError, "study: 7 is a int; give an optuna.Study, or a storage's URL"),
        ({"study": "sqlite:////no/such/folder/sweep.db"}, ConnectionError, "cannot be opened: .*; give sqlite:///FILE"),
        ({"study": "nowhere"}, ConnectionError, "study: 'nowhere' cannot be opened"),
        (
            {"metric": "accuracy", "direction": "maximize"},
            ValueError,
            "metric: 'accuracy', known of trial-0's task: 'v",
        ),
    ],
)
def test_refused(options, error, text):
    with pytest.raises(error, match=text):
        run(**options)


@pytest.mark.parametrize(
    ("build_task", "error", "text"),
    [
        (lambda trial: nn.Linear(1, 1), TypeError, "build_task: trial-0 got a Linear, limit: a ModelTask"),
        (lambda trial: build(trial, name="mine"), ValueError, "a task named 'mine', and two trials may not have one"),
        (
            lambda trial: ModelTask(nn.Sequential(nn.Linear(8, 3)), F.cross_entropy, batches()),
            ValueError,
            "trial-0 got a task without validation=",
        ),
        (lambda trial: trial.suggest_float("lr", 2.0, 1.0), ValueError, "low"),
        (lambda trial: trial.suggest_int("n", 0, 4, log=True), ValueError, "log"),
    ],
)
def test_a_build_task_that_no_trial_could_do_with(build_task, error, text):
    found = optuna.create_study()
    with pytest.raises(error, match=text):
        run(build_task, study=found, num_trials=5)
    assert [trial.state.name for trial in found.trials] == ["FAIL"]


def test_a_model_that_two_trials_train():
    model = nn.Sequential(nn.Linear(8, 3))

    def build_shared(trial):
        return ModelTask(model, F.cross_entropy, batches(), validation=batches(1))

    with pytest.raises(ValueError, match=r"trial-1 got a model whose parameter 0.weight another trial trains"):
        run(build_shared)


def test_a_storage_that_does_not_answer(monkeypatch):
    free = threading.Event()
    monkeypatch.setattr(study, "STORAGE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(optuna.storages, "RDBStorage", lambda url: free.wait(30))
    try:
        with pytest.raises(ConnectionError, match=r"'postgresql://...@far/db' cannot be opened: no answer in 0.05 s"):
            run(study="postgresql://me:secret@far/db")
    finally:
        free.set()
        for thread in threading.enumerate():
            if thread.name == "sweep-storage":
                thread.join()


def test_a_study_of_other_directions(tmp_path):
    url = f"sqlite:///{tmp_path / 'sweep.db'}"
    optuna.create_study(storage=url, study_name="sweep", direction="maximize")
    with pytest.raises(ValueError, match=r"direction: \['minimize'\], limit: \['maximize'\]"):
        run(study=url)
    with pytest.raises(ValueError, match="beside a study, which has its own"):
        run(study=optuna.create_study(), direction="minimize")
    with pytest.raises(ValueError, match="metric: 1 figures, limit: 2, the number of the study's directions"):
        run(study=optuna.create_study(directions=["minimize"] * 2))


def test_a_folder_in_use(tmp_path):
    other = SweepFolder(tmp_path)
    try:
        with pytest.raises(CheckpointError, match="in use by process"):
            run(checkpoint_dir=tmp_path)
    finally:
        other.close()


def test_a_folder_of_another_study(tmp_path):
    run(checkpoint_dir=tmp_path)
    with pytest.raises(CheckpointError, match="holds trials of another study"):
        run(checkpoint_dir=tmp_path, study=optuna.create_study())


def test_a_folder_that_is_a_file(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(CheckpointError, match=r"checkpoint_dir: .* cannot be used"):
        run(checkpoint_dir=file)


def test_without_optuna_the_error_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"pip install hydra_engine\[sweep\]"):
        Sweep(build)
