"""A task that is resumed, killed, paused or forked has each of its steps in its file once."""

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from hydra_engine import Callback, EmulatedDevice, PauseTask
from hydra_engine.checkpoints import load_newest
from hydra_engine.loggers import CsvLogger, JsonLinesLogger
from hydra_engine.sweep import Sweep
from tests import processes
from tests.loggers.support import KINDS, read_csv
from tests.run.test_loggers import EPOCHS, orchestra_of, task
from tests.sweep import space


@pytest.mark.rest
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.rest] * (kind == "csv")) for kind in KINDS])
def test_a_resumed_run_goes_on_in_the_same_files_with_each_step_once(tmp_path, kind):
    if kind == "tensorboard":
        pytest.importorskip("tensorboard")
    make, suffix, read = KINDS[kind]
    saved, kept, path = tmp_path / "saved", tmp_path / "kept", tmp_path / "logs" / f"a{suffix}"

    def train(epochs):
        # A logger of its own each time, as another process has it.
        options = {"checkpoint_dir": saved, "loggers": [make(tmp_path / "logs")]}
        return orchestra_of(task(epochs=epochs), **options).train_models(resume=True).tasks["a"]

    train(1)
    before = read(path)
    shutil.copytree(saved, kept)
    train(2)
    shutil.rmtree(saved)
    kept.rename(saved)  # as if that one had been killed before it saved anything
    report = train(EPOCHS)
    rows = read(path)
    assert rows[: len(before)] == before
    losses = [(step, row["loss"]) for step, row in rows if "loss" in row]
    assert losses == [(k + 1, pytest.approx(loss)) for k, loss in enumerate(report.losses)]
    validations = [(step, row["validation_loss"]) for step, row in rows if "validation_loss" in row]
    assert validations == list(zip(report.validation_steps, map(pytest.approx, report.validation_losses), strict=True))
    assert [each.name for each in path.parent.iterdir()] == [path.name]


class Kills(CsvLogger):
    """Kills its process once it has logged step 7, and something is saved."""

    def __init__(self, directory, saved):
        super().__init__(directory)
        self.saved = saved

    def log_step(self, step):
        super().log_step(step)
        while step.step == 7 and load_newest(self.saved) is None:
            pass
        if step.step == 7:
            os.kill(os.getpid(), signal.SIGKILL)


class Waits(Callback):
    """Holds its task at step 7, so that nothing later is saved."""

    def on_step(self, report):
        if report.steps == 7:
            threading.Event().wait()


def train_and_be_killed(folder):
    """In a process of its own."""
    saved = Path(folder, "saved")
    options = {"checkpoint_dir": saved, "checkpoint_every": 2, "loggers": [Kills(Path(folder, "logs"), saved)]}
    orchestra_of(task("a", Waits()), **options).train_models()


def test_a_run_whose_process_was_killed_goes_on_in_the_same_file_with_each_step_once(tmp_path):
    with pytest.raises(processes.ProcessEnded) as ended:
        processes.run(train_and_be_killed, tmp_path)
    assert ended.value.exitcode == -signal.SIGKILL
    killed = read_csv(tmp_path / "logs" / "a.csv")
    steps = load_newest(tmp_path / "saved").data["tasks"]["a"]["steps"]
    options = {"checkpoint_dir": tmp_path / "saved", "loggers": [CsvLogger(tmp_path / "logs")]}
    report = orchestra_of(task(), **options).train_models(resume=True).tasks["a"]
    assert [step for step, row in killed if "loss" in row] == list(range(1, 8))
    assert steps > 0
    rows = read_csv(tmp_path / "logs" / "a.csv")
    assert [(step, row["loss"]) for step, row in rows if "loss" in row] == list(enumerate(report.losses, 1))
    assert [step for step, row in rows if "loss" not in row] == report.validation_steps
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["a.csv"]


class Pauses(Callback):
    """Pauses its task once."""

    def __init__(self):
        self.is_done = False

    def on_step(self, report):
        if report.steps == 6 and not self.is_done:
            self.is_done = True
            raise PauseTask


def test_a_paused_task_and_a_fork_go_on_in_files_of_their_own(tmp_path):
    loggers = [CsvLogger(tmp_path / "logs")]
    orchestra = orchestra_of(task("a", Pauses()), checkpoint_dir=tmp_path / "saved", loggers=loggers)
    assert orchestra.train_models().tasks["a"].status == "paused"
    orchestra.fork_task("a", "fork")
    orchestra.add_task(task("fork"))
    orchestra.add_task(task("a"))
    reports = orchestra.train_models().tasks
    for name, begins in (("a", 0), ("fork", 6)):
        rows = [(step, row["loss"]) for step, row in read_csv(tmp_path / "logs" / f"{name}.csv") if "loss" in row]
        assert rows == list(enumerate(reports[name].losses, 1))[begins:]


@pytest.mark.rest
def test_trials_of_a_sweep_are_logged(tmp_path):
    pytest.importorskip("optuna").logging.set_verbosity(30)
    sweep = Sweep(space.build, num_trials=3, devices=[EmulatedDevice("1MiB")], loggers=[JsonLinesLogger(tmp_path)])
    sweep.verbose = 0
    study = sweep.run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trial-0.jsonl", "trial-1.jsonl", "trial-2.jsonl"]
    for trial in study.trials:
        rows = (tmp_path / f"trial-{trial.number}.jsonl").read_text().splitlines()
        assert len(rows) == space.STEPS * space.EPOCHS + space.EPOCHS
