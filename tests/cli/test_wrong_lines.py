"""Wrong command lines, of every verb: each gives exit code 2 and one line that names the value and the remedy."""

import shlex
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import ModelTask, TaskCost

HERE = "tests.cli.test_wrong_lines"
pytest.importorskip("optuna")

# --- functions that the lines name ---


def sample():
    return nn.Linear(64, 1), (torch.randn(8, 64), torch.randn(8, 1)), F.mse_loss


def task(name="a"):
    batches = [(torch.zeros(2, 4), torch.zeros(2, 1))]
    return ModelTask(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), F.mse_loss, batches, 0.1, name=name)


def cost():
    return TaskCost(name="a", unit_s=[0.1, 0.2, 0.3])


# Short ones, which the test puts into this module by their names.
SHORT = {
    "twins": lambda: [task(), task()],
    "none_at_all": list,
    "numbers": lambda: [3],
    "costs": lambda: [cost(), cost()],
    "build": lambda trial: task(),
}

# A line, the value that its error names, and the remedy. {tmp}: an empty folder. {text}: a file that is no report.
LINES = [
    # The verb.
    ("", "the following arguments are required: VERB", "--help"),
    ("fly", "invalid choice: 'fly'", "demo"),
    ("--verbose", "required: VERB", "--help"),
    # demo
    ("demo --steps 0", "--steps: '0'", "a whole number >= 1"),
    ("demo --steps many", "--steps: 'many'", "a whole number >= 1"),
    ("demo --devices 12MB12", "'12MB12' is not a size", "a size such as 512MiB is an emulated device"),
    ("demo --devices tpu", "'tpu'", "a size such as 512MiB is an emulated device"),
    ("demo --memory 4GiB", "--memory: '4GiB' without a GPU", "give --devices 8MiB 8MiB"),
    ("demo --text {tmp}/none.txt", "none.txt", "leave it out"),
    ("demo --text {text}", "text: ", "name a file of more than"),
    ("demo --seed x", "--seed: invalid int value: 'x'", "--help"),
    # plan
    ("plan", "the following arguments are required: PACKAGE.MODULE:FUNCTION, --memory", "--help"),
    ("plan {here}:sample", "required: --memory", "--help"),
    # probe
    ("probe --device", "--device: expected at least one argument", "--help"),
    # train
    ("train", "required: PACKAGE.MODULE:FUNCTION", "--help"),
    ("train {here}:none_at_all", "returned an empty list", "at least one ModelTask"),
    ("train {here}:numbers", "returned a int in its list", "a ModelTask or a list of them"),
    ("train {here}:sample", "returned a Linear in its list", "a ModelTask or a list of them"),
    ("train {here}:cost", "returned a TaskCost", "a ModelTask or a list of them"),
    ("train {here}:build", "missing 1 required positional argument: 'trial'", "correct it"),
    ("train {here}:twins", "'a'", "name"),
    ("train {here}:task --devices 5lots", "'5lots' is not a size", "'16GiB'"),
    ("train {here}:task --devices 1MiB --policy best", "'best'", "sharded-lrtf"),
    ("train {here}:task --devices 1MiB --dram some", "dram: 'some' is not a size", "'16GiB'"),
    ("train {here}:task --devices 8B --quiet", "needs", "available: "),
    ("train {here}:task --devices 1MiB --checkpoint-dir {tmp} --checkpoint-every often", "'often'", "limit: a time"),
    ("train {here}:task --devices 1MiB --checkpoint-dir /dev/null/a --quiet", "/dev/null/a", "cannot be used"),
    # sweep
    ("sweep {here}:build --trials none", "--trials: 'none'", "a whole number >= 1"),
    ("sweep {here}:build --rungs 3", "--rungs: '3'", "pass for example 1:3"),
    ("sweep {here}:build --interval 2", "--interval: '2'", "with --population"),
    ("sweep {here}:build --metric accuracy", "'accuracy'", "direction"),
    # resume
    ("resume", "required: DIR", "--help"),
    ("resume {tmp}", "nothing is saved in", "give the checkpoint_dir of a run"),
    ("resume {tmp}/none", "/none", "give the checkpoint_dir of a run"),
    # devices
    ("devices stop runs/a", "invalid choice: 'stop'", "add"),
    ("devices add", "RUN: None with add", "name it"),
    ("devices remove runs/a", "NAME: None with remove", "add and remove take one"),
    ("devices list {tmp}", "RUN: no run takes orders in", "limit: the checkpoint_dir of a run of yours"),
    ("devices list {tmp} --grace 3", "--grace: '3' with list", "leave it out"),
    ("devices remove {tmp} gpu --grace soon", "--grace: 'soon', limit: seconds, 0 to ", "pass for example 30"),
    # report
    ("report", "required: FILE", "--help"),
    ("report {tmp}/none.json", "none.json' is not there", "report.save(FILE)"),
    ("report {text}", "cannot be read", "report.save(FILE)"),
    ("report {tmp}", "cannot be read", "report.save(FILE)"),
    # simulate
    ("simulate {here}:sample", "--memory: not given", "pass for example --memory 24GiB"),
    ("simulate {here}:cost --devices 0", "--devices: '0'", "a whole number >= 1"),
    ("simulate {here}:cost --copies x", "--copies: 'x'", "a whole number >= 1"),
    ("simulate {here}:cost --steps -1", "--steps: '-1'", "a whole number >= 1"),
    ("simulate {here}:cost --policy best", "'best'", "sharded-lrtf"),
    ("simulate {here}:numbers --memory 2GiB", "returned a list of 1", "return these"),
    ("simulate {here}:costs", "'a", "a name of its own"),
    # completion
    ("completion fish", "'fish'", "bash"),
]


def test_there_are_fifty_and_every_verb_is_among_them():
    assert len(LINES) >= 50
    verbs = {"demo", "plan", "probe", "train", "sweep", "resume", "devices", "report", "simulate", "completion"}
    assert {line.split(" ")[0] for line, _, _ in LINES} >= verbs


@pytest.mark.parametrize(("line", "value", "remedy"), LINES, ids=[line or "nothing" for line, _, _ in LINES])
def test_wrong_line(line, value, remedy, tmp_path, monkeypatch, refused):
    for name, function in SHORT.items():
        monkeypatch.setattr(sys.modules[__name__], name, function, raising=False)
    folder, text = tmp_path / "empty", tmp_path / "text"
    folder.mkdir()
    text.write_text("my thesis")
    told = refused(*shlex.split(line.format(here=HERE, tmp=folder, text=text)))
    assert value in told
    assert remedy in told
    assert "Traceback" not in told
    assert not list(folder.iterdir())
