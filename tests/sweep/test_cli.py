"""The command `hydra-engine sweep`: what it prints and leaves; tests/cli/test_wrong_lines.py has its refusals."""

import pytest

from hydra_engine.cli import main

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)

BUILD = "tests.sweep.space:build"


def test_a_sweep(tmp_path, capsys):
    url = f"sqlite:///{tmp_path / 'sweep.db'}"
    command = ["sweep", BUILD, "--trials", "3", "--parallel", "2", "--devices", "1MiB", "1MiB", "--study", url]
    assert main(command) == 0
    study = optuna.load_study(study_name="sweep", storage=url)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 3
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split("; ")[1].split(":")[0] for line in lines[:3]) == ["trial 0", "trial 1", "trial 2"]
    assert [line.split(",")[0] for line in lines[:3]] == ["1/3 done", "2/3 done", "3/3 done"]
    best = study.best_trial
    assert lines[4].split() == ["best", "trial", "values", "parameters"]
    assert lines[6].split()[:2] == [str(best.number), f"{best.value:.6g}"]


@pytest.mark.parametrize(
    ("options", "states"),
    [
        (["--rungs", "1:2"], ["COMPLETE", "PRUNED", "PRUNED"]),
        pytest.param(
            ["--population", "lr", "--interval", "2"],
            ["COMPLETE", "COMPLETE", "COMPLETE", "PRUNED"],
            marks=pytest.mark.rest,
        ),
    ],
)
def test_trials_that_wait_on_disk(tmp_path, options, states):
    command = ["sweep", BUILD, "--trials", "3", "--devices", "1MiB", "--seed", "1", *options]
    assert main([*command, "--checkpoint-dir", str(tmp_path)]) == 0
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert sorted(trial.state.name for trial in study.trials) == states
