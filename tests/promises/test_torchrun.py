"""Under torchrun, which starts it again, a run that is killed goes on by itself."""

import pytest

from tests.durability import TORCHRUN_KILLS, under_torchrun


@pytest.mark.rest
def test_two_kills_under_torchrun_leave_the_bits_of_the_uninterrupted_run(tmp_path):
    different, struck, begun = under_torchrun(tmp_path)
    assert different == []
    assert tuple(struck) == TORCHRUN_KILLS
    assert any(begun.values()), begun
