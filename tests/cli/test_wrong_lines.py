"""Wrong command lines, of every verb: each gives exit code 2 and one line that names the value and the remedy."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import ModelTask, TaskCost
from tests.cli.test_verbs import VERBS

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


# Short ones, by their names.
SHORT = {
    "twins": lambda: [task(), task()],
    "none_at_all": list,
    "numbers": lambda: [3],
    "nested": lambda: [[task()]],
    "a_text": str,
    "costs": lambda: [cost(), cost()],
    "build": lambda trial: task(),
}
globals().update(SHORT)

# A line, and what its error names: the option, the value, the remedy. {tmp}: an empty folder. {text}: no report.
LINES = {
    # The verb.
    "": "VERB --help",
    "fly": "'fly' demo",
    "--verbose": "VERB --help",
    "verfy": "'verfy' mean verify?",
    # demo
    "demo --steps 0": "--steps: '0'",
    "demo --steps many": "--steps: 'many'",
    "demo --devices 12MB12": "'12MB12' 512MiB",
    "demo --devices tpu": "'tpu' 512MiB",
    "demo --memory 4GiB": "--memory: '4GiB' --devices",
    "demo --text {tmp}/none.txt": "none.txt",
    "demo --text {text}": "text: bytes",
    "demo --seed x": "--seed: 'x' --help",
    # plan
    "plan": "PACKAGE.MODULE:FUNCTION, --memory --help",
    "plan {here}:sample": "--memory --help",
    # train
    "train": "PACKAGE.MODULE:FUNCTION --help",
    "train {here}:task --devises 1MiB": "--devises mean --devices?",
    "train {here}:none_at_all": "list ModelTask",
    "train {here}:numbers": "int list, ModelTask",
    "train {here}:nested": "list, ModelTask",
    "train {here}:a_text": "str, ModelTask",
    "train {here}:sample": "Linear ModelTask",
    "train {here}:cost": "TaskCost ModelTask",
    "train {here}:build": "'trial'",
    "train {here}:twins": "'a' name",
    "train {here}:task --devices 5lots": "'5lots' '16GiB'",
    "train {here}:task --devices 1MiB --policy best": "'best' sharded-lrtf",
    "train {here}:task --devices 1MiB --dram some": "dram: 'some' '16GiB'",
    "train {here}:task --devices 8B --quiet": "needs available:",
    "train {here}:task --devices 1MiB --checkpoint-dir {tmp} --checkpoint-every often": "'often' time",
    "train {here}:task --devices 1MiB --checkpoint-dir /dev/null/a --quiet": "/dev/null/a",
    # verify
    "verify": "PACKAGE.MODULE:FUNCTION --help",
    "verify {here}:numbers": "int ModelTask",
    "verify {here}:task --steps 0": "--steps: '0'",
    "verify {here}:task --devices two": "--devices: 'two'",
    "verify {here}:task --memory 5lots": "'5lots' '16GiB'",
    # sweep
    "sweep {here}:build --trials none": "--trials: 'none'",
    "sweep {here}:build --parallel 0": "--parallel: '0'",
    "sweep {here}:build --timeout soon": "--timeout: 'soon'",
    "sweep {here}:build --rungs 3": "--rungs: '3' 1:3",
    "sweep {here}:build --interval 2": "--interval: 2 --population",
    "sweep {here}:build --metric accuracy": "'accuracy' direction",
    "sweep no_such_module:build": "module: 'no_such_module'",
    "sweep {here}:builder": "function: 'builder' '{here}'",
    "sweep {here}:build --devices 3lots": "--devices: '3lots'",
    "sweep {here}:build --population lr lr": "settings: ['lr', 'lr']",
    "sweep {here}:build --devices 1MiB --study sqlite:////no/such/folder/a.db": "study: 'sqlite:////no/such",
    "sweep {here}:build --devices 1MiB --checkpoint-dir /dev/null/a": "checkpoint_dir: /dev/null/a",
    # resume
    "resume": "DIR --help",
    "resume {tmp}": "checkpoint_dir",
    "resume {tmp}/none": "/none checkpoint_dir",
    # devices
    "devices stop runs/a": "'stop' add",
    "devices add": "RUN: add",
    "devices remove runs/a": "NAME: remove",
    "devices list {tmp}": "RUN: checkpoint_dir",
    "devices list {tmp} --grace 3": "--grace: 3 list",
    "devices remove {tmp} gpu --grace soon": "--grace: 'soon' 30",
    # report
    "report": "FILE --help",
    "report {tmp}/none.json": "none.json' report.save(FILE)",
    "report {text}": "{text} report.save(FILE)",
    "report {tmp}": "{tmp} report.save(FILE)",
    # simulate
    "simulate {here}:sample": "--memory: 24GiB",
    "simulate {here}:cost --devices 0": "--devices: '0'",
    "simulate {here}:cost --copies x": "--copies: 'x'",
    "simulate {here}:cost --steps -1": "--steps: '-1'",
    "simulate {here}:cost --policy best": "'best' sharded-lrtf",
    "simulate {here}:numbers --memory 2GiB": "list 1",
    "simulate {here}:costs": "'a name",
}


def test_every_verb_is_among_them():
    assert {line.split(" ")[0] for line in LINES} >= set(VERBS)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line or "nothing")
def test_wrong_line(line, tmp_path, refused):
    folder, text = tmp_path / "empty", tmp_path / "text"
    folder.mkdir()
    text.write_text("my thesis")
    words = {"here": HERE, "tmp": folder, "text": text}
    error = refused(line.format(**words), LINES[line].format(**words))
    assert "Traceback" not in error
    assert not list(folder.iterdir())
