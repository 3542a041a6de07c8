"""The table of shards says of each what the functions of one shard say, and what follows from it for partitions."""

import itertools
import random
from dataclasses import replace

import pytest

from partitioners import LayerTooLarge, forward_unit_bytes, shard_bytes, slab_bytes
from partitioners.cost import ShardTable, fewest_shards, too_large
from tests.partitions import (
    PLENTY_BYTES,
    fitting_partitions,
    layers,
    partitions,
    random_device,
    random_layers,
    shard_fits,
    shards_of,
)


@pytest.mark.parametrize("seed", range(10))
def test_every_entry_is_what_the_functions_of_one_shard_say(seed):
    rng = random.Random(seed)
    for _ in range(10):
        costs = random_layers(rng, most=10)
        for num_micro_batches in (1, 2, 5):
            table = ShardTable.of(costs, num_micro_batches)
            for first, last in itertools.combinations(range(len(costs) + 1), 2):
                slab = slab_bytes(costs, first, last)
                assert table.slab[first, last] == slab
                assert table.forward[first, last] == slab + forward_unit_bytes(costs, first, last, num_micro_batches)
                assert table.full[first, last] == shard_bytes(costs, first, last, num_micro_batches)


@pytest.mark.parametrize("seed", range(5))
def test_where_nothing_trains_the_last_shard_runs_forward_only_too(seed):
    rng = random.Random(seed)
    costs = [replace(cost, grad_bytes=0) for cost in random_layers(rng, most=10)]
    for num_micro_batches in (1, 2, 5):
        table = ShardTable.of(costs, num_micro_batches)
        for first, last in itertools.combinations(range(len(costs) + 1), 2):
            assert table.full[first, last] == shard_bytes(costs, first, last, num_micro_batches)


def test_what_is_no_shard_fits_no_device():
    table = ShardTable.of(layers({}, {}, {}), 1)
    fits = table.fits(PLENTY_BYTES)
    assert fits.shape == (4, 4)
    assert [(first, last) for first in range(4) for last in range(4) if fits[first, last]] == [
        (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)
    ]  # fmt: skip
    for each in (table.slab, table.forward, table.full):
        assert (each[fits] == 0).all()
        assert (each[~fits] > PLENTY_BYTES).all()


def test_a_shard_of_exactly_the_devices_memory_fits():
    table = ShardTable.of(layers({"param_bytes": 64, "peak_bytes": 36}), 1)
    assert table.fits(100)[0, 1]
    assert not table.fits(99)[0, 1]


@pytest.mark.parametrize("seed", range(10))
def test_the_fewest_shards_are_those_of_brute_force_longest_from_the_front(seed):
    rng = random.Random(seed)
    for _ in range(30):
        costs = random_layers(rng)
        budget = random_device(rng, costs)
        fitting = fitting_partitions(costs, budget)
        found = fewest_shards(ShardTable.of(costs, budget.num_micro_batches).fits(budget.memory_bytes))
        if not fitting:
            assert found is None
            continue
        fewest = min(map(len, fitting))
        assert found == max(ends for ends in fitting if len(ends) == fewest)


@pytest.mark.parametrize("seed", range(10))
def test_the_fewest_of_any_shards_that_may_be_used(seed):
    rng = random.Random(seed)
    for _ in range(20):
        num = rng.randint(1, 8)
        fits = ShardTable.of(layers(*[{}] * num), 1).fits(PLENTY_BYTES)
        for first, last in itertools.combinations(range(num + 1), 2):
            fits[first, last] = rng.random() < 0.5
        allowed = [ends for ends in partitions(num) if all(fits[shard] for shard in shards_of(ends))]
        found = fewest_shards(fits)
        assert found == (max(allowed, key=lambda ends: (-len(ends), ends)) if allowed else None)


@pytest.mark.parametrize("seed", range(10))
def test_too_large_names_the_layer_where_the_furthest_partition_ends(seed):
    rng = random.Random(seed)
    for _ in range(30):
        costs = random_layers(rng)
        budget = random_device(rng, costs)
        n, memory_bytes = budget.num_micro_batches, budget.memory_bytes
        error = too_large(costs, ShardTable.of(costs, n), memory_bytes)
        if fitting_partitions(costs, budget):
            assert error is None
            continue
        reached = {0}
        for last in range(1, len(costs) + 1):
            if any(shard_fits(costs, first, last, budget) for first in reached):
                reached.add(last)
        stuck = max(reached)
        assert isinstance(error, LayerTooLarge)
        assert error.layer == f"layer-{stuck}"
        ends = range(stuck + 1, len(costs) + 1)
        assert error.needed_bytes == min(shard_bytes(costs, stuck, last, n) for last in ends) > memory_bytes
        assert error.available_bytes == memory_bytes


def test_too_large_by_hand():
    costs = layers({"param_bytes": 64}, {"param_bytes": 64}, {"param_bytes": 640}, {"param_bytes": 64})
    table = ShardTable.of(costs, 1)
    assert too_large(costs, table, 640) is None
    error = too_large(costs, table, 639)
    assert (error.layer, error.needed_bytes, error.available_bytes) == ("layer-2", 640, 639)
