"""Whatever a save raises, its task ends; and it comes after the callbacks of its step."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import Callback, CheckpointError, ModelTask, PauseTask
from hydra_engine.run.saves import Saves
from tests import exact
from tests.refused import refused

PATIENCE_S = 30


class Pauses(Callback):
    def on_step(self, report):
        raise PauseTask


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_task_whose_last_save_cannot_begin_ends(is_paused, tmp_path, monkeypatch):
    def raising(self, saver, task, over):
        raise MemoryError("no room for a snapshot")

    monkeypatch.setattr(Saves, "_snapshot", raising)
    generator = torch.Generator().manual_seed(1)
    loader = [(torch.randn(4, 3, generator=generator), torch.tensor([0, 1, 1, 0])) for _ in range(2)]
    callbacks = [Pauses()] if is_paused else []
    task = ModelTask(nn.Sequential(nn.Linear(3, 2)), F.cross_entropy, loader, 0.1, name="unsaved", callbacks=callbacks)
    orchestra = exact.silent([task], "1MiB", checkpoint_dir=tmp_path)
    if is_paused:
        with refused(CheckpointError, task="unsaved", says="snapshot"):
            orchestra.train_models()
    else:
        orchestra.train_models()
    report = orchestra.report
    assert (report.tasks["unsaved"].status, report.tasks["unsaved"].steps) == (
        ("failed", 1) if is_paused else ("finished", 2)
    )
    assert any("'unsaved'" in message and "no room for a snapshot" in message for message in report.messages)


class SetsRate(Callback):
    """Sets the learning rate at the second step, once it may."""

    def __init__(self, may):
        self.may, self.groups, self.is_done = may, None, False

    def optimizer(self, parameters, **options):
        found = torch.optim.SGD(parameters, **options)
        self.groups = found.param_groups
        return found

    def on_step(self, report):
        if report.steps == 2:
            assert self.may.wait(PATIENCE_S)
            self.groups[0]["lr"] = 0.05
            self.is_done = True


@pytest.mark.parametrize("blocks", [False, True])
def test_a_task_is_saved_with_what_callbacks_set_and_its_round_does_not_wait_for_ever(blocks, tmp_path, monkeypatch):
    capture, save, pass_over, seen, may = Saves.capture, Saves._save, Saves.pass_over, [], threading.Event()
    monkeypatch.setattr("hydra_engine.run.saves.CALLBACKS_S", 0.0 if blocks else PATIENCE_S)

    def captures(saves, task):
        capture(saves, task)
        if not blocks and task.report.steps == 2:
            may.set()

    def passes_over(saves, task):
        pass_over(saves, task)
        may.set()

    def saves_it(saves, task):
        if task.name in saves._saver.wanted:
            seen.append((task.report.steps, callback.is_done))
        save(saves, task)

    monkeypatch.setattr(Saves, "capture", captures)
    monkeypatch.setattr(Saves, "pass_over", passes_over)
    monkeypatch.setattr(Saves, "_save", saves_it)
    callback = SetsRate(may)
    loader = [(torch.ones(4, 3), torch.tensor([0, 1, 1, 0])) for _ in range(3)]
    options = {"name": "a", "callbacks": [callback], "optimizer": callback.optimizer}
    task = ModelTask(nn.Sequential(nn.Linear(3, 2)), F.cross_entropy, loader, 0.1, **options)
    orchestra = exact.silent([task], "1MiB", checkpoint_dir=tmp_path, checkpoint_every=2)
    assert orchestra.train_models().tasks["a"].status == "finished"
    assert all(is_done for _, is_done in seen)
    assert blocks or seen == [(2, True)]
