"""PartitionerContract: what every partitioner keeps, whatever the costs; a new one adds a subclass."""

import random
from itertools import product

import pytest

from partitioners import (
    Balanced,
    Budget,
    Fastest,
    LayerCost,
    LayerTooLarge,
    Optimal,
    Partitioner,
    Pilot,
    Presharded,
    shard_bytes,
)
from tests.partitions import shard_fits, shards_of
from tests.refused import refused


def random_costs(rng):
    return [
        LayerCost(
            index=index,
            name=f"layer-{index}",
            param_bytes=rng.choice([0, rng.randrange(10_000)]),
            grad_bytes=rng.choice([0, rng.randrange(10_000)]),
            buffer_bytes=rng.choice([0, rng.randrange(500)]),
            input_bytes=rng.randrange(5_000),
            output_bytes=rng.randrange(5_000),
            saved_bytes=rng.randrange(20_000),
            peak_bytes=rng.randrange(40_000),
            forward_s=rng.random(),
            backward_s=rng.random(),
            draws_random=rng.random() < 0.5,
            draws_globally=False,
            changes_input=rng.random() < 0.2,
            changes_buffers=False,
            shares_with=(),
            target_bytes=rng.randrange(100),
        )
        for index in range(rng.randint(1, 24))
    ]


def random_budget(rng, costs):
    """Enough for every layer alone, and up to three times as much."""
    num_micro_batches = rng.choice([1, 2, 5])
    largest = max(shard_bytes(costs, i, i + 1, num_micro_batches) for i in range(len(costs)))
    return Budget(
        memory_bytes=max(1, round(largest * rng.uniform(1, 3))),
        buffer_bytes=rng.choice([None, 0, rng.randrange(20_000)]),
        double_buffer=rng.random() < 0.7,
        num_micro_batches=num_micro_batches,
    )


class PartitionerContract:
    """Subclasses say which partitioner to try on which costs and budget."""

    def partitioner(self, rng, costs, budget) -> Partitioner:
        raise NotImplementedError

    @pytest.fixture(params=[range(10), pytest.param(range(10, 40), marks=pytest.mark.rest)], ids=str)
    def cases(self, request):
        """Partitioners, each with random costs and a budget, and the generator that drew them."""
        found = []
        for seed in request.param:
            rng = random.Random(seed)
            costs = random_costs(rng)
            budget = random_budget(rng, costs)
            found.append((self.partitioner(rng, costs, budget), costs, budget, rng))
        return found

    def test_every_layer_is_in_exactly_one_shard_in_order(self, cases):
        for partitioner, costs, budget, _ in cases:
            boundaries = partitioner.partition(costs, budget)
            layers = [i for first, last in shards_of(boundaries) for i in range(first, last)]
            assert layers == list(range(len(costs)))
            assert all(isinstance(end, int) for end in boundaries)
            assert len(set(boundaries)) == len(boundaries)

    def test_the_same_question_has_the_same_answer(self, cases):
        for partitioner, costs, budget, _ in cases:
            first = partitioner.partition(costs, budget)
            partitioner.revise(first, 0, costs)
            assert partitioner.partition(tuple(costs), budget) == first

    def test_a_revision_only_adds_ends_inside_the_shard_until_there_is_none(self, cases):
        for partitioner, costs, budget, _ in cases:
            boundaries = partitioner.partition(costs, budget)
            for with_costs, (shard, (first, last)) in product(((), (costs,)), enumerate(shards_of(boundaries))):
                asked = list(boundaries)
                revised = partitioner.revise(asked, shard, *with_costs)
                assert asked == boundaries
                if revised is not None:
                    assert set(boundaries) < set(revised)
                    assert revised == sorted(revised)
                    assert all(first < end < last for end in set(revised) - set(boundaries))

    def test_its_repr_names_it(self, cases):
        for partitioner, *_ in cases:
            assert repr(partitioner).startswith(f"{type(partitioner).__name__}(")


class KeepsBudget:
    """For partitioners that choose their shards by size."""

    def test_every_shard_fits_the_budget(self, cases):
        for partitioner, costs, budget, _ in cases:
            boundaries = partitioner.partition(costs, budget)
            assert all(shard_fits(costs, *shard, budget) for shard in shards_of(boundaries))

    def test_a_layer_that_does_not_fit_alone_is_named(self, cases):
        for _, costs, _, rng in cases:
            needs = [shard_bytes(costs, i, i + 1) for i in range(len(costs))]
            budget = Budget(memory_bytes=max(1, max(needs) - 1))
            partitioner = self.partitioner(rng, costs, budget)
            with refused(LayerTooLarge) as caught:
                partitioner.partition(costs, budget)
            assert caught.value.available_bytes == budget.memory_bytes < caught.value.needed_bytes
            assert caught.value.needed_bytes == needs[int(caught.value.layer.removeprefix("layer-"))]


class CutsFiner:
    """For partitioners that choose how many shards there are."""

    def test_revisions_end_with_lone_layers(self, cases):
        for partitioner, costs, _, rng in cases:
            boundaries = [len(costs)]
            while len(boundaries) < len(costs):
                shard = rng.randrange(len(boundaries))
                boundaries = partitioner.revise(boundaries, shard, costs) or boundaries
            assert [partitioner.revise(boundaries, shard) for shard in range(len(costs))] == [None] * len(costs)


def possible_numbers(costs, budget):
    """How many shards that each fit the budget a partition may have."""
    numbers = [{0}] + [set() for _ in costs]  # by last: of the partitions of layers [0, last)
    for last in range(1, len(costs) + 1):
        for first in range(last):
            if shard_fits(costs, first, last, budget):
                numbers[last] |= {number + 1 for number in numbers[first]}
    return sorted(numbers[-1])


class TestPilot(KeepsBudget, CutsFiner, PartitionerContract):
    def partitioner(self, rng, costs, budget):
        return Pilot()


class TestOptimal(KeepsBudget, CutsFiner, PartitionerContract):
    def partitioner(self, rng, costs, budget):
        return Optimal()


class TestFastest(KeepsBudget, CutsFiner, PartitionerContract):
    def partitioner(self, rng, costs, budget):
        return Fastest()

    def test_every_candidate_fits_the_budget(self, cases):
        for partitioner, costs, budget, _ in cases:
            candidates = partitioner.candidates(costs, budget)
            assert len({tuple(each) for each in candidates}) == len(candidates)
            assert partitioner.partition(costs, budget) in (*candidates, [len(costs)])
            for boundaries in candidates:
                assert all(shard_fits(costs, *shard, budget) for shard in shards_of(boundaries))


class TestBalanced(KeepsBudget, PartitionerContract):
    def partitioner(self, rng, costs, budget):
        numbers = possible_numbers(costs, budget) or range(1, len(costs) + 1)
        return Balanced(rng.choice(numbers), by=rng.choice(["time", "bytes"]))


class TestPresharded(PartitionerContract):
    def partitioner(self, rng, costs, budget):
        ends = rng.sample(range(1, len(costs)), rng.randrange(len(costs)))
        return Presharded([*sorted(ends), len(costs)])
