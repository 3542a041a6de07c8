"""`hydra-engine resume`: what it says of a run, what it starts, and every refusal with its remedy."""

import sys

import pytest
import torch

from hydra_engine.checkpoints.directory import CheckpointDirectory
from hydra_engine.system import process as restart
from tests.checkpoints.support import TaskContent, save_tasks
from tests.refused import names

TASKS = {
    "bert": {"steps": 120, "over": None, "loss": 0.6931},
    "gpt": {"steps": 40, "over": "finished", "loss": 2.5},
    "new": {"steps": 0, "over": "failed", "loss": None},
}
ARGV = [sys.executable, "train.py", "--name", "two words"]


def saved(directory, **data):
    """Save a checkpoint with that data; its path."""
    with CheckpointDirectory(directory) as store:
        return save_tasks(store, {"bert": TaskContent(weights={"weight": torch.ones(2)})}, data).path


@pytest.fixture
def started(monkeypatch, tmp_path):
    """What was started, in place of this process."""
    found = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        restart.os,
        "execvpe",
        lambda file, argv, env: found.append((file, argv, env[restart.VARIABLE], restart.os.getcwd())),
    )
    return found


def test_it_says_what_was_saved_and_runs_the_stored_command_in_its_place(tmp_path, said, started):
    place = tmp_path / "project"
    place.mkdir()
    path = saved(tmp_path / "runs", tasks=TASKS, command={"argv": ARGV, "cwd": str(place)})
    assert said("resume runs")[:2] == (
        0,
        [
            str(path),
            "task  status    steps  last loss",
            "----  --------  -----  ---------",
            "bert  goes on   120    0.693",
            "gpt   finished  40     2.500",
            "new   failed    0      -",
            f"in {place}: {sys.executable} train.py --name 'two words'",
        ],
    )
    assert started == [(sys.executable, ARGV, str(tmp_path / "runs"), str(place))]


def test_a_command_given_goes_before_the_stored_one_and_runs_here(tmp_path, said, started):
    saved(tmp_path / "runs", tasks=TASKS, command={"argv": ARGV, "cwd": "/gone"})
    command = "torchrun --standalone -- train.py"
    code, lines, _ = said(f"resume {tmp_path / 'runs'} -- {command}")
    assert (code, lines[-1]) == (0, f"in {tmp_path}: {command}")
    assert started == [("torchrun", command.split(), str(tmp_path / "runs"), str(tmp_path))]


def test_it_says_what_is_wrong_with_a_newer_one(tmp_path, said, started):
    older = saved(tmp_path / "runs", tasks=TASKS, command={"argv": ARGV, "cwd": str(tmp_path)})
    newer = saved(tmp_path / "runs", tasks=TASKS, command={"argv": ARGV, "cwd": str(tmp_path)})
    [weights] = (tmp_path / "runs/files").glob("00000002-*-0-bert-weights.safetensors")
    weights.write_bytes(b"")
    first, second, *_ = said("resume runs")[1]
    assert first == str(older)
    assert second.startswith(f"{newer} is damaged, and not used: {weights.name}: found 0 bytes of ")


def test_nothing_whole_is_saved(tmp_path, refused, started):
    for make in (lambda: None, (tmp_path / "runs").mkdir):
        make()
        refused(f"resume {tmp_path / 'runs'}", f"DIR: {tmp_path / 'runs'}, checkpoint_dir")
    saved(tmp_path / "runs").write_bytes(b"{}")
    refused(f"resume {tmp_path / 'runs'}", "whole 1 backup")
    assert started == []


@pytest.mark.parametrize(
    ("command", "line", "says"),
    [
        (None, "resume runs", "train_models(resume=True) DIR --"),
        ("rm -rf", "resume runs", "argv cwd 'rm"),
        ({"argv": [], "cwd": "/"}, "resume runs", "argv cwd {'argv':"),
        ({"argv": [3], "cwd": "/"}, "resume runs", "argv cwd [3],"),
        ({"argv": ["ls"]}, "resume runs", "argv cwd ['ls']}"),
        ({"argv": ARGV, "cwd": "/no/such/place"}, "resume runs", "/no/such/place: command"),
        ({"argv": ARGV, "cwd": "/"}, "resume runs --", "COMMAND: --"),
    ],
)
def test_no_command_can_be_run(tmp_path, said, started, command, line, says):
    saved(tmp_path / "runs", tasks=TASKS, command=command)
    code, lines, errors = said(line)
    assert (code, started, len(errors)) == (2, [], 1)
    assert "bert  goes on   120    0.693" in lines
    assert errors[0].startswith("hydra-engine resume: ")
    names(errors[0], says=says)


def test_help_says_whose_command_it_runs(said):
    text = " ".join(" ".join(said("resume --help")[1]).split())
    assert "usage: hydra-engine resume [-h] DIR [-- COMMAND...]" in text
    assert "The command is read from DIR, so DIR must be from someone you trust." in text
