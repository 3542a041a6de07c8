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


SERVED = [Candidate("a", 0, 1.0, 1, served_order=5), Candidate("b", 1, 1.0, 2, served_order=2)]


@pytest.mark.parametrize(
    ("policy", "candidates", "expected"),
    [
        (ShardedLRTF, [Candidate("short", 0, 1.0, 1), Candidate("long", 1, 3.0, 2)], "long"),
        # Of about equal remaining times it takes the unit that waited longest.
        (ShardedLRTF, [Candidate("behind", 0, 99.0, 2), Candidate("waited", 1, 97.0, 1)], "waited"),
        (ShardedLRTF, [Candidate("behind", 0, 105.0, 2), Candidate("waited", 1, 97.0, 1)], "behind"),
        (ShardedLRTF, [Candidate("over", 0, 0.0, 1), Candidate("least", 1, 5e-324, 2)], "least"),
        (ShortestRemaining, [Candidate("short", 1, 1.0, 2), Candidate("long", 0, 3.0, 1)], "short"),
        # It takes the unit that waited longest, and one without its input last.
        (FIFO, [Candidate("new", 0, 9.0, 8), Candidate("old", 1, 1.0, 7), Candidate("coming", 2, 1.0, NOT_YET)], "old"),
        (FIFO, [Candidate("new", 0, 9.0, 8), Candidate("coming", 2, 1.0, NOT_YET)], "new"),
        # It takes the task whose turn was longest ago.
        (RoundRobin, SERVED, "b"),
        (RoundRobin, [*SERVED, Candidate("never", 2, 1.0, 3)], "never"),
        # It takes who got the least far.
        (InStep, [Candidate("ahead", 0, 9.0, 1, passes=3.5), Candidate("behind", 1, 1.0, 2, passes=3.25)], "behind"),
        # It takes who had least of its share.
        (
            FairShare,
            [Candidate("heavy", 0, 1.0, 1, used_s=5.0, weight=3.0), Candidate("light", 1, 1.0, 2, used_s=2.0)],
            "heavy",
        ),
    ],
)
def test_each_takes_what_it_is_named_for(policy, candidates, expected):
    assert first(policy(), *candidates) == expected


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
