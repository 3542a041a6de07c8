"""`hydra-engine resume`: what it says of a run, what it starts, and every refusal with its remedy."""

import sys

import pytest
import torch

from hydra_engine.checkpoints.directory import CheckpointDirectory
from hydra_engine.cli import main
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


@pytest.fixture
def said(capsys, started):
    """Runs `resume`, and returns what it printed; with its one line on stderr where it refuses."""

    def said(*arguments):
        code = main(["resume", *map(str, arguments)])
        printed = capsys.readouterr()
        if code == 0:
            assert printed.err == ""
            return printed.out
        assert (code, started) == (2, [])
        assert printed.err.startswith("hydra-engine resume: ")
        assert printed.err.count("\n") == 1, printed.err
        return printed.out, printed.err

    return said


def test_it_says_what_was_saved_and_runs_the_stored_command_in_its_place(tmp_path, said, started):
    place = tmp_path / "project"
    place.mkdir()
    path = saved(tmp_path / "runs", tasks=TASKS, command={"argv": ARGV, "cwd": str(place)})
    assert said("runs").splitlines() == [
        str(path),
        "task  status    steps  last loss",
        "----  --------  -----  ---------",
        "bert  goes on   120    0.693",
        "gpt   finished  40     2.500",
        "new   failed    0      -",
        f"in {place}: {sys.executable} train.py --name 'two words'",
    ]
    assert started == [(sys.executable, ARGV, str(tmp_path / "runs"), str(place))]


def test_a_command_given_goes_before_the_stored_one_and_runs_here(tmp_path, said, started):
    saved(tmp_path / "runs", tasks=TASKS, command={"argv": ARGV, "cwd": "/gone"})
    out = said(tmp_path / "runs", "--", "torchrun", "--standalone", "--", "train.py")
    assert out.endswith(f"in {tmp_path}: torchrun --standalone -- train.py\n")
    argv = ["torchrun", "--standalone", "--", "train.py"]
    assert started == [("torchrun", argv, str(tmp_path / "runs"), str(tmp_path))]


def test_it_says_what_is_wrong_with_a_newer_one(tmp_path, said):
    older = saved(tmp_path / "runs", tasks=TASKS, command={"argv": ARGV, "cwd": str(tmp_path)})
    newer = saved(tmp_path / "runs", tasks=TASKS, command={"argv": ARGV, "cwd": str(tmp_path)})
    [weights] = (tmp_path / "runs/files").glob("00000002-*-0-bert-weights.safetensors")
    weights.write_bytes(b"")
    first, second, *_ = said("runs").splitlines()
    assert first == str(older)
    assert second.startswith(f"{newer} is damaged, and not used: {weights.name}: found 0 bytes of ")


def test_nothing_saved(tmp_path, said):
    says = f"DIR: {tmp_path / 'runs'}, checkpoint_dir"
    names(said("runs")[1], says=says)
    (tmp_path / "runs").mkdir()
    names(said("runs")[1], says=says)


def test_none_is_whole(tmp_path, said):
    saved(tmp_path / "runs").write_bytes(b"{}")
    out, line = said("runs")
    assert out == ""
    names(line, says="whole 1 backup")


def test_no_command_is_stored(tmp_path, said):
    saved(tmp_path / "runs", tasks=TASKS, command=None)
    out, line = said("runs")
    assert "bert  goes on   120    0.693" in out
    names(line, says="train_models(resume=True) DIR --")


@pytest.mark.parametrize("command", ["rm -rf", {"argv": [], "cwd": "/"}, {"argv": [3], "cwd": "/"}, {"argv": ["ls"]}])
def test_what_is_stored_is_no_command(tmp_path, said, command):
    saved(tmp_path / "runs", tasks=TASKS, command=command)
    line = said("runs")[1]
    assert repr(command) in line
    names(line, says="argv cwd")


def test_its_place_is_gone(tmp_path, said):
    saved(tmp_path / "runs", tasks=TASKS, command={"argv": ARGV, "cwd": str(tmp_path / "gone")})
    names(said("runs")[1], says=f"{tmp_path / 'gone'}: command")


def test_nothing_behind_the_dashes(tmp_path, said):
    saved(tmp_path / "runs", tasks=TASKS, command={"argv": ARGV, "cwd": str(tmp_path)})
    names(said("runs", "--")[1], says="COMMAND: --")


def test_help_says_whose_command_it_runs(capsys):
    with pytest.raises(SystemExit):
        main(["resume", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "usage: hydra-engine resume [-h] DIR [-- COMMAND...]" in text
    assert "The command is read from DIR, so DIR must be from someone you trust." in text
