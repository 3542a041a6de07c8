"""Random faults, a few of them; `python -m tests.fault_injection` makes 200, HYDRA_FAULT_RUNS another number here.

Single faults are in `tests/promises/test_scenarios.py`; these have several at once, and budgets that are short.
"""

import os

import pytest

from tests import fault_injection

NUM_RUNS = int(os.environ.get("HYDRA_FAULT_RUNS", "12"))
KINDS = sorted(fault_injection.INJECTORS)


@pytest.mark.rest
@pytest.mark.parametrize("seed", [pytest.param(k, marks=pytest.mark.rest if k > 1 else ()) for k in range(NUM_RUNS)])
def test_struck_task_fails_or_goes_on_as_asked_and_the_others_do_not_notice(seed):
    fault_injection.run(10_000 + seed, KINDS[seed % len(KINDS)])
