"""Errors that a user can correct: at once, with the value, its limit and the remedy."""

import sys
import threading
from functools import partial

import pytest
from torch import nn
from torch.nn import functional as F

from hydra_engine import EmulatedDevice, ModelTask
from hydra_engine.errors import CheckpointError
from hydra_engine.sweep import Rungs, Sweep, study
from hydra_engine.sweep.folder import SweepFolder
from tests.refused import refused
from tests.sweep.space import accuracy, batches, build

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)


def run(build_task=build, **options):
    sweep = Sweep(build_task, **{"num_trials": 2, "devices": [EmulatedDevice("1MiB")], **options})
    sweep.verbose = 0
    return sweep.run()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"build_task": 3}, TypeError, "build_task: 3"),
        ({"num_trials": 0}, ValueError, "num_trials: 0"),
        ({"num_trials": 1.5}, TypeError, "num_trials: 1.5"),
        ({"timeout": "10min"}, TypeError, "timeout: '10min'"),
        ({"timeout": True}, TypeError, "timeout: True"),
        ({"timeout": -1}, ValueError, "timeout: -1"),
        ({"timeout": float("nan")}, ValueError, "timeout: nan"),
        ({"policy": "best"}, ValueError, "policy: 'best'"),
        ({"checkpoint_every": "often"}, ValueError, "checkpoint_every: 'often'"),
        ({"parallel": 0}, ValueError, "parallel: 0"),
        ({"dram": 0}, ValueError, "dram: 0"),
        ({"dram": "much"}, ValueError, "dram: 'much'"),
        ({"dram": True}, ValueError, "dram: True"),
        ({"metric": "accuracy"}, ValueError, "direction: 'accuracy' 'minimize'"),
        ({"metric": []}, ValueError, "metric: []"),
        ({"metric": ["a", "a"], "direction": ["minimize"] * 2}, ValueError, "metric: 'a'"),
        ({"direction": ["minimize"] * 2}, ValueError, "direction: 2 1"),
        ({"direction": "down"}, ValueError, "direction: 'down' 'maximize'"),
        ({"study": 7}, TypeError, "study: 7 optuna.Study"),
        ({"study": "sqlite:////no/such/folder/sweep.db"}, ConnectionError, "sqlite:////no/such/folder/sweep.db"),
        ({"study": "nowhere"}, ConnectionError, "study: 'nowhere' sqlite:///FILE"),
        ({"metric": "accuracy", "direction": "maximize"}, ValueError, "metric: 'accuracy' trial-0"),
        ({"rungs": Rungs()}, ValueError, "rungs: checkpoint_dir"),
        ({"rungs": 3, "checkpoint_dir": "unused"}, TypeError, "rungs: 3 Rungs"),
        (
            {"rungs": Rungs(), "checkpoint_dir": "unused", "metric": ["a", "b"], "direction": ["minimize"] * 2},
            ValueError,
            "rungs: 2",
        ),
    ],
)
def test_refused(options, error, says):
    with refused(error, says=says):
        run(**options)


def test_rungs_that_cannot_be():
    with refused(says="reduction_factor: 1 2"):
        Rungs(reduction_factor=1)
    with refused(TypeError, says="min_resource: 1.5"):
        Rungs(min_resource=1.5)


@pytest.mark.parametrize(
    ("build_task", "error", "says"),
    [
        (lambda trial: nn.Linear(1, 1), TypeError, "trial-0 Linear ModelTask"),
        (lambda trial: build(trial, name="mine"), ValueError, "'mine' name="),
        (
            lambda trial: ModelTask(nn.Sequential(nn.Linear(8, 3)), F.cross_entropy, batches()),
            ValueError,
            "trial-0 validation=",
        ),
        (lambda trial: trial.suggest_float("lr", 2.0, 1.0), ValueError, "low"),
        (lambda trial: trial.suggest_int("n", 0, 4, log=True), ValueError, "log"),
    ],
)
def test_a_build_task_that_no_trial_could_do_with(build_task, error, says):
    found = optuna.create_study()
    with refused(error, says=says):
        run(build_task, study=found, num_trials=5)
    assert [trial.state.name for trial in found.trials] == ["FAIL"]


def test_a_model_that_two_trials_train():
    model = nn.Sequential(nn.Linear(8, 3))

    def build_shared(trial):
        return ModelTask(model, F.cross_entropy, batches(), validation=batches(1))

    with refused(task="trial-1", layer="0.weight"):
        run(build_shared)


def test_a_storage_that_does_not_answer(monkeypatch):
    free = threading.Event()
    monkeypatch.setattr(study, "STORAGE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(optuna.storages, "RDBStorage", lambda url: free.wait(30))
    try:
        with refused(ConnectionError, says="'postgresql://...@far/db' 0.05") as error:
            run(study="postgresql://me:secret@far/db")
        assert "secret" not in str(error.value)
    finally:
        free.set()
        for thread in threading.enumerate():
            if thread.name == "sweep-storage":
                thread.join()


def test_a_study_of_other_directions(tmp_path):
    url = f"sqlite:///{tmp_path / 'sweep.db'}"
    optuna.create_study(storage=url, study_name="sweep", direction="maximize")
    with refused(says="direction: ['minimize'] ['maximize']"):
        run(study=url)
    own = optuna.create_study(study_name="own", directions=["minimize", "maximize"])
    with refused(study.StudyMismatch, says="direction: ['maximize', 'own'"):
        run(study=own, metric=["validation_loss", "accuracy"], direction=["maximize"] * 2)
    with refused(study.StudyMismatch, says="direction: ['maximize'] ['minimize']"):
        run(study=optuna.create_study(), direction="maximize")
    for direction in ("down", 1):
        with refused(says=f"direction: {direction!r} 'maximize'"):
            run(study=optuna.create_study(), direction=direction)
    with refused(says="metric: 1 2"):
        run(study=optuna.create_study(directions=["minimize"] * 2))


def test_the_direction_that_a_study_has_is_accepted(tmp_path):
    build_two = partial(build, metrics={"accuracy": accuracy})
    for direction in ("minimize", "maximize"):
        own = optuna.create_study(direction=direction)
        assert run(study=own, direction=direction, num_trials=1) is own
        assert run(study=own, direction=own.direction, num_trials=1) is own  # Optuna's StudyDirection
    url, name = f"sqlite:///{tmp_path / 'sweep.db'}", "sweep"
    optuna.create_study(storage=url, study_name=name, direction="maximize")
    assert len(run(study=url, direction="maximize", num_trials=1).trials) == 1
    own = optuna.create_study(directions=["minimize", "maximize"])
    both = ["minimize", "maximize"]
    assert len(run(build_two, study=own, metric=["validation_loss", "accuracy"], direction=both).trials) == 2


def test_a_folder_in_use(tmp_path):
    other = SweepFolder(tmp_path)
    try:
        with refused(CheckpointError, says="process"):
            run(checkpoint_dir=tmp_path)
    finally:
        other.close()


def test_a_folder_of_another_study(tmp_path):
    run(checkpoint_dir=tmp_path)
    with refused(CheckpointError, says="another study"):
        run(checkpoint_dir=tmp_path, study=optuna.create_study())


def test_a_folder_that_is_a_file(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with refused(CheckpointError, says=f"checkpoint_dir: {file}"):
        run(checkpoint_dir=file)


def test_without_optuna_the_error_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with refused(ImportError, says="hydra_engine[sweep]"):
        Sweep(build)
