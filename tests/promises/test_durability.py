"""Killed at any moment, a run that is started again ends with the bits of one that was not killed.

A few moments; `benchmarks/durability` has a hundred.
"""

import math

import pytest
import torch

from tests import durable
from tests.durability import in_own_process


@pytest.mark.rest
@pytest.mark.parametrize("options", [("--seed", 1), ("--seed", 2, "--other-settings")], ids=["same", "other settings"])
def test_killed_runs_end_with_every_bit_of_the_uninterrupted_one(options, tmp_path):
    plain, *runs = in_own_process("--kills", 2, "--aimed", 1, "--folder", tmp_path, *options)
    assert plain.num_saves >= 2
    assert plain.saving["copied_bytes"] > 0, "no save met an update, so that these kills prove little"
    assert sorted(kill.aimed for run in runs for kill in run.kills) == [False, True]
    assert [run.error for run in runs if run.error] == []
    assert [run.different for run in runs if run.different] == []
    assert list(tmp_path.iterdir()) == []


def test_harness_notices_every_bit():
    nan, other_nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    state = {"losses": [0.1, math.nan], "weights": {"a": torch.zeros(2), "nan": nan.clone()}, "empty": [], "step": 3}
    expected = durable.leaves(state, "task")
    assert durable.differences(durable.leaves(state, "task"), expected) == []
    for place, value in (
        ("losses", [0.1, 0.2]),
        ("losses", [0.1, math.nan, math.nan]),
        ("empty", [[]]),
        ("step", True),
        ("step", 3.0),
    ):
        assert durable.differences(durable.leaves({**state, place: value}, "task"), expected)[0].startswith("task.")
    for weights in (
        {"a": torch.tensor([0.0, -0.0])},
        {"a": torch.zeros(2, dtype=torch.float64)},
        {"a": torch.zeros(2, 1)},
        {"a": torch.zeros(2), "nan": other_nan},
    ):
        changed = {"nan": nan, **weights}
        assert len(durable.differences(durable.leaves({**state, "weights": changed}, "task"), expected)) == 1
    del state["weights"]["a"]
    assert durable.differences(durable.leaves(state, "task"), expected) == ["task.weights.a"]
