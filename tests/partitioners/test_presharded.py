"""The user's own partition is taken as it is, or refused."""

import numpy as np
import pytest

from partitioners import Budget, Presharded

BUDGET = Budget(memory_bytes=1)


def test_the_ends_come_back_whatever_the_budget():
    assert Presharded([3, 6, 8]).partition([None] * 8, BUDGET) == [3, 6, 8]
    assert Presharded((1,)).partition([None], BUDGET) == [1]


def test_callers_own_their_lists():
    ends = [3, 6, 8]
    partitioner = Presharded(ends)
    ends.append(9)
    partitioner.partition([None] * 8, BUDGET).append(9)
    assert partitioner.partition([None] * 8, BUDGET) == [3, 6, 8]


def test_its_repr_makes_it_again():
    assert repr(Presharded((3, 6, 8))) == "Presharded([3, 6, 8])"


@pytest.mark.parametrize(
    "boundaries", [[], [0, 3], [-1], [3, 3], [6, 3], [1.0, 2], [True, 2], ["3"], [None], np.array([1.5])]
)
def test_ends_that_do_not_rise_from_one_are_refused(boundaries):
    with pytest.raises(ValueError, match=r"boundaries: .*, limit: whole numbers that rise from at least 1; pass"):
        Presharded(boundaries)


@pytest.mark.parametrize("num_layers", [7, 9])
def test_ends_of_another_model_are_refused(num_layers):
    with pytest.raises(ValueError, match=rf"end at layer 8, limit: the model's {num_layers} layers; make {num_layers}"):
        Presharded([3, 6, 8]).partition([None] * num_layers, BUDGET)


def test_what_the_user_fixed_is_not_revised():
    assert Presharded([3, 6, 8]).revise([3, 6, 8], 1) is None
