"""Policies: one contract for all, and the choice that each one is named for."""

import itertools
import random

import pytest

from hydra_engine.policies import FIFO, POLICIES, Candidate, ShardedLRTF, resolve_policy


def candidates_of(rng, count):
    """Candidates as the scheduler makes them: tasks and orders are unique, times and waiting need not be."""
    return [
        Candidate(task=f"task-{k}", order=k, remaining_s=rng.choice([0.0, 1.0, 2.5]), ready_order=rng.randrange(1, 4))
        for k in rng.sample(range(10), count)
    ]


@pytest.fixture(params=sorted(POLICIES))
def policy(request):
    return POLICIES[request.param]()


class TestPolicyContract:
    def test_choice_is_one_of_the_candidates(self, policy):
        rng = random.Random(1)
        for _ in range(50):
            candidates = candidates_of(rng, rng.randint(1, 5))
            assert policy.choose(candidates) in candidates

    def test_single_candidate_is_chosen(self, policy):
        [only] = candidates_of(random.Random(2), 1)
        assert policy.choose([only]) == only

    def test_choice_does_not_depend_on_the_order_of_the_candidates(self, policy):
        rng = random.Random(3)
        for _ in range(20):
            candidates = candidates_of(rng, 4)
            assert len({policy.choose(list(order)) for order in itertools.permutations(candidates)}) == 1

    def test_choice_does_not_depend_on_what_was_chosen_before(self, policy):
        rng = random.Random(4)
        rounds = [candidates_of(rng, 3) for _ in range(20)]
        first = [policy.choose(candidates) for candidates in rounds]
        assert [policy.choose(candidates) for candidates in rounds] == first

    def test_candidates_are_left_alone(self, policy):
        candidates = candidates_of(random.Random(5), 4)
        before = list(candidates)
        policy.choose(candidates)
        assert candidates == before

    def test_is_known_by_its_name(self, policy):
        [name] = [name for name, factory in POLICIES.items() if factory is type(policy)]
        assert type(resolve_policy(name)) is type(policy)


def test_sharded_lrtf_takes_the_longest_remaining_time():
    short, long = Candidate("a", 0, 1.0, 1), Candidate("b", 1, 3.0, 2)
    assert ShardedLRTF().choose([short, long]) == long


def test_sharded_lrtf_takes_the_first_of_equal_tasks():
    later, first = Candidate("b", 1, 3.0, 1), Candidate("a", 0, 3.0, 2)
    assert ShardedLRTF().choose([later, first]) == first


def test_fifo_takes_the_unit_that_waited_longest():
    new, old = Candidate("a", 0, 9.0, 8), Candidate("b", 1, 1.0, 7)
    assert FIFO().choose([new, old]) == old


def test_object_with_choose_is_a_policy():
    class Last:
        def choose(self, candidates):
            return candidates[-1]

    policy = Last()
    assert resolve_policy(policy) is policy


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="'longest'") as refusal:
        resolve_policy("longest")
    assert all(repr(name) in str(refusal.value) for name in POLICIES)


@pytest.mark.parametrize("policy", [None, 3, object(), FIFO.choose])
def test_what_cannot_choose_is_no_policy(policy):
    with pytest.raises(TypeError, match="choose"):
        resolve_policy(policy)
