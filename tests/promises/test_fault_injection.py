"""Random faults, a few of them; `python -m tests.fault_injection` makes 200, HYDRA_FAULT_RUNS another number here."""

import os

import pytest

from tests import fault_injection

NUM_RUNS = int(os.environ.get("HYDRA_FAULT_RUNS", "12"))
KINDS = sorted(fault_injection.INJECTORS)


@pytest.mark.parametrize("seed", range(NUM_RUNS))
def test_struck_task_fails_or_goes_on_as_asked_and_the_others_do_not_notice(seed):
    fault_injection.run(10_000 + seed, KINDS[seed % len(KINDS)])


def test_harness_notices_what_is_wrong(monkeypatch):
    """A retry that was not allowed, for one."""
    monkeypatch.setattr("hydra_engine.run.running_task.Retries.allow", lambda *_: False)
    with pytest.raises(AssertionError, match="Struck: forward"):
        fault_injection.run(7, "forward")


def test_command_counts(capsys):
    assert fault_injection.main(["--runs", "1", "--seed", "10"]) == 0
    assert "1 runs, 0 failures" in capsys.readouterr().out
    assert fault_injection.main(["--runs", "0"]) == 1
