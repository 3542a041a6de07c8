"""The command `hydra-engine sweep`: what it prints, what it leaves, and each refusal in one line."""

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
    assert [line.split(":")[0] for line in sorted(lines[:3])] == ["trial 0", "trial 1", "trial 2"]
    best = study.best_trial
    assert lines[4].split() == ["best", "trial", "values", "parameters"]
    assert lines[6].split()[:2] == [str(best.number), f"{best.value:.6g}"]


@pytest.mark.parametrize(
    ("options", "states"),
    [
        (["--rungs", "1:2"], ["COMPLETE", "PRUNED", "PRUNED"]),
        (["--population", "lr", "--interval", "2"], ["COMPLETE", "COMPLETE", "COMPLETE", "PRUNED"]),
    ],
)
def test_trials_that_wait_on_disk(tmp_path, options, states):
    command = ["sweep", BUILD, "--trials", "3", "--devices", "1MiB", "--seed", "1", *options]
    assert main([*command, "--checkpoint-dir", str(tmp_path)]) == 0
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert sorted(trial.state.name for trial in study.trials) == states


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no_such_module:build"], "module: 'no_such_module' is not there"),
        ([f"{BUILD}er"], "function: 'builder' of module 'tests.sweep.space' is not there"),
        ([BUILD, "--trials", "none"], "--trials: 'none', limit: a whole number >= 1"),
        ([BUILD, "--parallel", "0"], "--parallel: '0', limit: a whole number >= 1"),
        ([BUILD, "--devices", "3lots"], "--devices: memory: '3lots'"),
        ([BUILD, "--rungs", "3"], "--rungs: '3', limit: MIN:FACTOR; pass for example 1:3"),
        ([BUILD, "--rungs", "1:1", "--checkpoint-dir", "unused"], "reduction_factor: 1, limit: at least 2"),
        ([BUILD, "--rungs", "1:3"], "rungs: no checkpoint_dir, limit: a folder"),
        ([BUILD, "--population", "lr", "--interval", "no"], "--interval: 'no', limit: a whole number >= 1"),
        ([BUILD, "--interval", "2"], "--interval: '2', limit: with --population"),
        ([BUILD, "--population", "lr", "lr"], "settings: ['lr', 'lr'], limit: at least one name, each once"),
        ([BUILD, "--dram", "much"], "dram: 'much' is not a size"),
        ([BUILD, "--metric", "accuracy"], "direction: not given, and metric 'accuracy' may be any"),
        ([BUILD, "--checkpoint-every", "often"], "checkpoint_every: 'often', limit: a time above 0"),
        ([BUILD, "--devices", "1MiB", "--study", "sqlite:////no/such/folder/a.db"], "study: 'sqlite:////no/such"),
        ([BUILD, "--devices", "1MiB", "--checkpoint-dir", "/dev/null/a"], "checkpoint_dir: /dev/null/a cannot be used"),
    ],
)
def test_refused_in_one_line(capsys, arguments, text):
    assert main(["sweep", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hydra-engine sweep: {text}")
