"""Policies: the order that each one is named for."""

import pytest

from hydra_engine.schedule.policies import (
    FIFO,
    NOT_YET,
    POLICIES,
    Candidate,
    FairShare,
    InStep,
    RandomOrder,
    RoundRobin,
    ShardedLRTF,
    ShortestRemaining,
    resolve_policy,
)
from tests.refused import refused


def first(policy, *candidates):
    return min(candidates, key=policy.key).task


def test_sharded_lrtf_takes_the_longest_remaining_time():
    short, long = Candidate("short", 0, 1.0, 1), Candidate("long", 1, 3.0, 2)
    assert first(ShardedLRTF(), short, long) == "long"


def test_of_about_equal_remaining_times_sharded_lrtf_takes_the_unit_that_waited_longest():
    behind, waited = Candidate("behind", 0, 99.0, 2), Candidate("waited", 1, 97.0, 1)
    assert first(ShardedLRTF(), behind, waited) == "waited"
    assert first(ShardedLRTF(), behind._replace(remaining_s=105.0), waited) == "behind"
    assert first(ShardedLRTF(), Candidate("over", 0, 0.0, 1), Candidate("least", 1, 5e-324, 2)) == "least"


def test_shortest_remaining_takes_the_shortest():
    assert first(ShortestRemaining(), Candidate("short", 1, 1.0, 2), Candidate("long", 0, 3.0, 1)) == "short"


def test_fifo_takes_the_unit_that_waited_longest_and_one_without_its_input_last():
    new, old, coming = Candidate("new", 0, 9.0, 8), Candidate("old", 1, 1.0, 7), Candidate("coming", 2, 1.0, NOT_YET)
    assert first(FIFO(), new, old, coming) == "old"
    assert first(FIFO(), new, coming) == "new"


def test_round_robin_takes_the_task_whose_turn_was_longest_ago():
    served = [Candidate("a", 0, 1.0, 1, served_order=5), Candidate("b", 1, 1.0, 2, served_order=2)]
    assert first(RoundRobin(), *served) == "b"
    assert first(RoundRobin(), *served, Candidate("never", 2, 1.0, 3)) == "never"


def test_in_step_takes_who_got_the_least_far():
    ahead, behind = Candidate("ahead", 0, 9.0, 1, passes=3.5), Candidate("behind", 1, 1.0, 2, passes=3.25)
    assert first(InStep(), ahead, behind) == "behind"


def test_fair_share_takes_who_had_least_of_its_share():
    heavy = Candidate("heavy", 0, 1.0, 1, used_s=5.0, weight=3.0)
    light = Candidate("light", 1, 1.0, 2, used_s=2.0, weight=1.0)
    assert first(FairShare(), heavy, light) == "heavy"


def test_random_order_is_another_for_another_seed_and_even():
    candidates = [Candidate(name, order, 1.0, order + 1) for order, name in enumerate("abc")]
    firsts = []
    for seed in range(600):
        firsts.append(first(RandomOrder(seed), *candidates))
        assert firsts[-1] == first(RandomOrder(seed), *candidates)
    assert all(150 < firsts.count(name) < 250 for name in "abc")


def test_random_order_gives_the_same_task_another_place_each_time():
    places = [
        first(RandomOrder(), Candidate("a", 0, 1.0, 2 * k), Candidate("b", 1, 1.0, 2 * k + 1)) for k in range(200)
    ]
    assert 70 < places.count("a") < 130


def test_object_with_key_is_a_policy():
    class Last:
        def key(self, candidate):
            return -candidate.order

    policy = Last()
    assert resolve_policy(policy) is policy


def test_unknown_name_lists_the_known_ones():
    with refused(ValueError, says="'longest'") as refusal:
        resolve_policy("longest")
    assert all(repr(name) in str(refusal.value) for name in POLICIES)


@pytest.mark.parametrize("policy", [None, 3, object(), FIFO.key])
def test_what_has_no_key_is_no_policy(policy):
    with refused(TypeError, says="key"):
        resolve_policy(policy)
