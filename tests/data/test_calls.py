"""A call that is late is left behind once, and nobody hears its answer."""

import pytest

from hydra_engine.data.calls import LeftBehind, UserCalls
from tests.refused import refused


def test_no_call_is_late_while_there_is_none():
    calls = UserCalls("a", 60.0)
    assert calls.leave_late() == 60.0
    with calls.timed():
        assert 0 < calls.leave_late() < 60.0
        calls.prepare()  # for a call inside, which waits for others
        assert calls.leave_late() == 60.0
    assert not calls.is_left


def test_answer_of_a_late_call_is_not_heard():
    calls, heard = UserCalls("a", 1e-9), []
    assert calls.answer(lambda: heard.append("in time"))

    def be_late():
        with calls.timed():
            while calls.leave_late() is not None:
                pass

    with refused(LeftBehind, task="a"):
        be_late()
    assert calls.is_left
    assert not calls.answer(lambda: heard.append("late"))
    assert heard == ["in time"]


def test_error_of_a_call_is_its_own():
    calls = UserCalls("a", 60.0)
    with pytest.raises(KeyError), calls.timed():
        raise KeyError("mine")
    assert calls.leave_late() == 60.0
