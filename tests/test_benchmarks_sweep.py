"""The benchmark of sweeps, with searches of few small trials, in this process."""

import json

import pytest
import torch

from tests.test_benchmarks import loaded, main_of

pytest.importorskip("optuna")


@pytest.fixture
def sweep(monkeypatch):
    """The benchmark as a module."""
    monkeypatch.syspath_prepend(main_of("sweep").parent)
    module = loaded(main_of("sweep"), monkeypatch)
    small = {"widths": (32,), "num_blocks": (1, 2), "num_windows": 32}
    monkeypatch.setattr(module, "HALVING", module.HALVING._replace(num_trials=5, epochs=3, **small))
    monkeypatch.setattr(module, "MEMORY", module.MEMORY._replace(num_trials=5, parallel=2, **small))
    num_threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(num_threads)


def test_halving_compares_with_one_by_one(sweep, capsys):
    assert sweep.main(["halving", "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    assert "bits of one by one: 5 of 5 trials; best configuration equal: yes" in printed


def test_halving_says_no_where_bits_differ(sweep, capsys, monkeypatch):
    one_by_one = sweep.one_by_one

    def other(found, trial):
        losses, validation_losses = one_by_one(found, trial)
        return [loss + (trial.number == 1 and step == 2) for step, loss in enumerate(losses)], validation_losses

    monkeypatch.setattr(sweep, "one_by_one", other)
    assert sweep.main(["halving", "--rounds", "1"]) == 1
    assert "bits of one by one: 4 of 5 trials" in capsys.readouterr().out


def test_memory_counts_trials_and_models(sweep, capsys, monkeypatch):
    def in_this_process(name, number, dram):
        sweep.CHILDREN[name](number, dram)
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        return {**found, "grown_bytes": max(1, found["grown_bytes"])}  # this process may have been larger before

    monkeypatch.setattr(sweep, "in_own_process", in_this_process)
    assert sweep.main(["memory"]) == 0
    printed = capsys.readouterr().out
    assert "memory: 5 trials, 5 complete, 5 trained once; planned at most" in printed


def test_lines_of_user_code_leave_out_what_is_no_code(sweep):
    found = {name: program.num_lines for name, program in sweep.PROGRAMS.items()}
    text = main_of("sweep").with_name("beside_hydra.py").read_text().splitlines()
    assert found["the engine"] == len([line for line in text[1:] if line])
