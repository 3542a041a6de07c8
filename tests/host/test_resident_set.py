"""The resident set of a process that trains one task is what the plan says."""

import json
import subprocess
import sys

import pytest

from hydra_engine.system.dram import TRIM_BYTES

# Freed blocks that the C library keeps, which depends on when threads come by.
KEPT_BYTES = 2**26


@pytest.mark.rest
@pytest.mark.skipif(sys.platform != "linux", reason="other systems count resident pages otherwise")
@pytest.mark.parametrize(
    ("case", "freed_bytes"),
    [
        ("half", KEPT_BYTES),
        ("split-half", KEPT_BYTES),
        ("large", KEPT_BYTES),
        ("rmsprop", TRIM_BYTES),
        ("coupled", TRIM_BYTES),
    ],
)
def test_a_fresh_process_grows_by_what_the_plan_says_and_is_left_with_the_model(case, freed_bytes):
    """freed_bytes: blocks that torch's own first step has made, and that are not given back yet."""
    run = [sys.executable, "-m", "tests.resident_set", case]
    figures = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    assert figures["plan"] >= 2**28
    assert 0.97 * figures["plan"] <= figures["growth"] <= 1.1 * (figures["plan"] + figures["device"]) + freed_bytes
    assert figures["left"] <= 2 * KEPT_BYTES
