"""The example for torchrun in this process: how it divides tasks, where they go on, and whether it sees who is gone.

`benchmarks/elasticity` runs it under torchrun itself.
"""

import pytest
import torch
from torch.nn import functional as F

from hydra_engine import Callback, PauseTask
from tests import reference
from tests.test_examples import module_of

STEPS = 40  # of an epoch


@pytest.fixture
def example():
    return module_of("under_torchrun")


class EndsAt(Callback):
    """Ends a process as SIGTERM does, after these steps of its tasks: they are saved as ones that go on."""

    def __init__(self, steps):
        self.steps, self.first = steps, {}

    def on_step(self, report):
        self.first.setdefault(report.name, report.steps)
        if report.steps == self.steps.get(report.name):
            raise PauseTask


@pytest.mark.rest
def test_tasks_go_on_wherever_they_are_after_a_change_of_membership(example, tmp_path):
    def train(rank, num_ranks, **steps):
        callback = EndsAt(steps)
        return example.train(tmp_path, rank, num_ranks, 1, [callback]), callback.first

    assert train(0, 1, a=5, b=6, c=7, d=8) == ({}, {"a": 1, "b": 1, "c": 1, "d": 1})
    assert train(1, 2, b=15, d=20) == ({}, {"b": 7, "d": 9})  # an agent has joined
    assert train(0, 2, a=16, c=17) == ({}, {"a": 6, "c": 8})
    assert train(0, 3, a=18, d=22) == ({}, {"a": 17, "d": 21})  # another one
    models, first = train(0, 1)  # the others have left
    assert first == {"a": 19, "b": 16, "c": 18, "d": 23}
    for name, model in models.items():
        task = example.make_task(name, 1)
        options = {"seed": task.seed, "lr": task.lr, "optimizer": torch.optim.AdamW}
        reference.train(plain := task.model, F.cross_entropy, task.dataloader, **options)
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(ours, expected) for ours, expected in pairs), name
    assert example.train(tmp_path, 0, 2, 1, [again := EndsAt({})]).keys() == {"a", "c"}  # which are through
    assert again.first == {}


def test_more_ranks_than_tasks_leave_one_without(example, tmp_path):
    assert example.train(tmp_path, 4, 5) == {}


def test_who_was_there_and_is_gone_is_noticed(example, tmp_path):
    first, second = (example.Others(tmp_path, rank, 3) for rank in (0, 1))
    first.look()  # nobody waits for the third, which has not begun
    second.look()
    third = example.Others(tmp_path, 2, 3)
    first.look()
    assert not first.is_one_gone
    assert not second.is_one_gone
    third._own.close()  # as the end of its process does
    first.look()
    second.look()
    assert first.is_one_gone
    assert not second.is_one_gone  # it has not seen the third
    with pytest.raises(PauseTask):
        first.on_step(None)
    first._own.close()
    second._own.close()


def test_a_process_without_its_agent_ends(example, tmp_path, monkeypatch):
    others = example.Others(tmp_path, 0, 1)
    others.look()
    assert not others.is_one_gone
    monkeypatch.setattr(example.os, "getppid", lambda: 1 - others._agent)
    others.look()
    assert others.is_one_gone
    others._own.close()


def test_run_waits_for_all_tasks_and_tells_whether_they_are_through(example, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(example, "LRS", {"a": 1e-3})
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert example.run(tmp_path / "new", 1)
    assert capsys.readouterr().out.startswith("a: weights ")
