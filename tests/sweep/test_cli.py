"""The command `hydra-engine sweep`: what it prints, what it leaves, and each refusal in one line."""

import pytest

from hydra_engine.cli import main
from tests.refused import names

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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no_such_module:build"], "module: 'no_such_module'"),
        ([f"{BUILD}er"], "function: 'builder' 'tests.sweep.space'"),
        ([BUILD, "--devices", "3lots"], "--devices: '3lots'"),
        ([BUILD, "--population", "lr", "lr"], "settings: ['lr', 'lr']"),
        ([BUILD, "--devices", "1MiB", "--study", "sqlite:////no/such/folder/a.db"], "study: 'sqlite:////no/such"),
        ([BUILD, "--devices", "1MiB", "--checkpoint-dir", "/dev/null/a"], "checkpoint_dir: /dev/null/a"),
    ],
)
def test_refused_in_one_line(capsys, arguments, says):
    """One of each kind of error; tests/cli/test_wrong_lines.py has more lines, and test_refusals.py more values."""
    assert main(["sweep", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("hydra-engine sweep: ")
    names(line, says=says)
