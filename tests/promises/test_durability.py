"""Killed at any moment, a run that is started again ends with the bits of one that was not killed.

A few moments; `benchmarks/durability` has a hundred.
"""

import pytest

from tests.durability import in_own_process


@pytest.mark.rest
@pytest.mark.parametrize("options", [("--seed", 1), ("--seed", 2, "--other-settings")], ids=["same", "other settings"])
def test_killed_runs_end_with_every_bit_of_the_uninterrupted_one(options, tmp_path):
    plain, *runs = in_own_process("--kills", 2, "--aimed", 1, "--folder", tmp_path, *options)
    assert plain.num_saves >= 2
    assert plain.saving["copied_bytes"] > 0, "no save met an update, so that these kills prove little"
    assert sorted(kill.aimed for run in runs for kill in run.kills) == [False, True]
    assert any(run.homed_bytes for run in runs)
    assert [run.error for run in runs if run.error] == []
    assert [run.different for run in runs if run.different] == []
    assert list(tmp_path.iterdir()) == []
