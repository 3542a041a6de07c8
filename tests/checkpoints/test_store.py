"""Which directory is resumed, and a resume that is refused or interrupted: it leaves all as it was."""

import os
import signal

import pytest

from hydra_engine.checkpoints import SavedTask, checkpoint
from hydra_engine.checkpoints.checkpoint import load_newest
from hydra_engine.checkpoints.directory import CheckpointDirectory
from hydra_engine.errors import CheckpointError
from hydra_engine.system import process as restart
from tests.promises.test_resumed import Boom, FailsAfter, orchestra_of, task_of
from tests.refused import refused


@pytest.fixture
def saved(tmp_path):
    """A directory from which a task goes on."""
    with pytest.raises(Boom):
        orchestra_of([task_of(callbacks=[FailsAfter(5)])], tmp_path / "runs").train_models()
    return tmp_path / "runs"


@pytest.fixture
def usual_ctrl_c():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a job in the background
    yield
    signal.signal(signal.SIGINT, before)


def resumed(orchestra, **options):
    return any("resumed from" in message for message in orchestra.train_models(**options).messages)


@pytest.mark.parametrize(
    ("asked_for", "given"),
    [
        ("runs", "link"),
        ("other/../link", "runs"),
        *(pytest.param(*each, marks=pytest.mark.rest) for each in (("link", "runs"), ("runs", "link/../runs"))),
    ],
)
def test_a_directory_is_known_by_any_of_its_names(saved, monkeypatch, asked_for, given):
    monkeypatch.chdir(saved.parent)
    os.mkdir("other")
    os.symlink("runs", "link")
    monkeypatch.setenv(restart.VARIABLE, os.path.abspath("other"))
    with refused(CheckpointError, says="checkpoints"):
        orchestra_of([task_of()], given).train_models()
    monkeypatch.setenv(restart.VARIABLE, f"{saved.parent}/{asked_for}")
    assert resumed(orchestra_of([task_of()], given))


def test_a_rescue_is_known_through_a_link(tmp_path, monkeypatch):
    with pytest.raises(Boom):
        orchestra_of([task_of(callbacks=[FailsAfter(5)])], tmp_path / "hydra-rescue-7").train_models()
    os.symlink(tmp_path / "hydra-rescue-7", tmp_path / "newest")
    monkeypatch.setenv(restart.VARIABLE, str(tmp_path / "newest"))
    assert resumed(orchestra_of([task_of()]))


def test_a_resume_that_was_refused_is_still_asked_for(saved, monkeypatch):
    """Or who waits until the other run has ended would begin anew then."""
    monkeypatch.setenv(restart.VARIABLE, str(saved))
    orchestra = orchestra_of([task_of()], saved)
    with CheckpointDirectory(saved), refused(CheckpointError, says=f"process {os.getpid()}"):
        orchestra.train_models()
    assert resumed(orchestra)


@pytest.mark.usefixtures("usual_ctrl_c")
def test_ctrl_c_while_a_checkpoint_is_read_is_raised_at_once_and_loses_nothing(saved, monkeypatch):
    expected = orchestra_of([task_of()]).train_models().tasks["task"].losses
    checksum, newest = checkpoint.checksum, load_newest(saved).path
    first = iter([True])

    def interrupted(file):
        if next(first, False):  # threads check files side by side, and go on when the call is over
            signal.raise_signal(signal.SIGINT)
        return checksum(file)

    orchestra = orchestra_of([task_of()], saved)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "checksum", interrupted)
        with pytest.raises(KeyboardInterrupt):
            orchestra.train_models(resume=True)
    assert not next(first, False)
    with CheckpointDirectory(saved) as directory:  # it is free
        assert directory.load_newest().path == newest
        assert directory.newest.messages == ()
    assert orchestra.train_models(resume=True).tasks["task"].losses == expected


def test_ctrl_c_as_a_directory_is_locked_leaves_it_free(tmp_path, monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "register_at_fork", interrupted)
        with pytest.raises(KeyboardInterrupt) as kept:  # as a prompt keeps the last one
            CheckpointDirectory(tmp_path)
    CheckpointDirectory(tmp_path).close()
    assert kept.type is KeyboardInterrupt


@pytest.mark.usefixtures("usual_ctrl_c")
def test_ctrl_c_while_a_model_is_put_back_is_raised_once_it_is_whole(saved, monkeypatch):
    expected = orchestra_of([task_of()]).train_models().tasks["task"].losses
    done, put_weights = [], SavedTask.put_weights

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        put_weights(*arguments)
        done.append("put back")

    orchestra = orchestra_of([task_of()], saved)
    with monkeypatch.context() as patched:
        patched.setattr(SavedTask, "put_weights", interrupted)
        patched.setattr("hydra_engine.run.task_list.Site.plan_all", lambda *_: done.append("planned"))
        with pytest.raises(KeyboardInterrupt):
            orchestra.train_models(resume=True)
    assert done == ["put back"]
    assert orchestra.train_models(resume=True).tasks["task"].losses == expected
