"""Whatever a save raises, its task ends."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import Callback, CheckpointError, EmulatedDevice, ModelOrchestrator, ModelTask, PauseTask
from hydra_engine.run.saves import Saves


class Pauses(Callback):
    def on_step(self, report):
        raise PauseTask


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_task_whose_last_save_cannot_begin_ends(is_paused, tmp_path, monkeypatch, capsys):
    def raising(self, saver, task, over):
        raise MemoryError("no room for a snapshot")

    monkeypatch.setattr(Saves, "_snapshot", raising)
    generator = torch.Generator().manual_seed(1)
    loader = [(torch.randn(4, 3, generator=generator), torch.tensor([0, 1, 1, 0])) for _ in range(2)]
    callbacks = [Pauses()] if is_paused else []
    task = ModelTask(nn.Sequential(nn.Linear(3, 2)), F.cross_entropy, loader, 0.1, name="a", callbacks=callbacks)
    orchestra = ModelOrchestrator([task], devices=[EmulatedDevice("1MiB")], checkpoint_dir=tmp_path)
    orchestra.verbose = 0
    if is_paused:
        with pytest.raises(CheckpointError, match=r"a cannot be paused, .* no room for a snapshot"):
            orchestra.train_models()
    else:
        orchestra.train_models()
    report = orchestra.report
    assert (report.tasks["a"].status, report.tasks["a"].steps) == (("failed", 1) if is_paused else ("finished", 2))
    assert "task 'a' could not be saved as it has ended: no room for a snapshot" in report.messages
