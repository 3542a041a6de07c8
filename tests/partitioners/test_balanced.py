"""Balanced cuts into as many shards as asked for, the largest of which is as small as can be."""

import random
import sys

import pytest

from partitioners import Balanced, Budget, LayerTooLarge, shard_bytes
from tests.partitions import PLENTY_BYTES, fitting_partitions, layers, random_device, random_layers, shards_of

PLENTY = Budget(memory_bytes=PLENTY_BYTES)


def largest(costs, boundaries, budget, by):
    if by == "bytes":
        return max(shard_bytes(costs, *shard, budget.num_micro_batches) for shard in shards_of(boundaries))
    seconds = [2 * cost.forward_s + cost.backward_s for cost in costs]
    return max(sum(seconds[first:last]) for first, last in shards_of(boundaries))


@pytest.mark.parametrize("by", ["time", "bytes"])
@pytest.mark.parametrize("seed", range(10))
def test_the_largest_load_is_the_least_of_all_that_fit(seed, by):
    rng = random.Random(seed)
    for instance in range(20):
        costs = random_layers(rng)
        budget = random_device(rng, costs)
        fitting = fitting_partitions(costs, budget)
        num_shards = rng.randint(1, len(costs))
        partitioner = Balanced(num_shards, by=by)
        if not fitting:
            with pytest.raises(LayerTooLarge, match="give the device more memory"):
                partitioner.partition(costs, budget)
            continue
        candidates = [ends for ends in fitting if len(ends) == num_shards]
        if not candidates:
            with pytest.raises(ValueError, match=f"num_shards: {num_shards} shards do not fit"):
                partitioner.partition(costs, budget)
            continue
        found = partitioner.partition(costs, budget)
        assert found in candidates, instance
        least = min(largest(costs, ends, budget, by) for ends in candidates)
        assert largest(costs, found, budget, by) == pytest.approx(least, rel=1e-12, abs=1e-12), instance


def test_time_counts_the_forward_twice_because_it_is_recomputed():
    costs = layers({"forward_s": 4.0}, {"backward_s": 3.0}, {"backward_s": 5.0})
    assert Balanced(2).partition(costs, PLENTY) == [1, 3]  # 8 and 8; counted once, 7 and 5 were less than 4 and 8


def test_bytes_are_what_a_shard_needs_on_a_device_and_seconds_do_not_count():
    light, long, large = {"param_bytes": 64, "forward_s": 1.0}, {"forward_s": 9.0}, {"param_bytes": 640}
    costs = layers({**light, **long}, light, light, {**light, **large})
    assert Balanced(2, by="bytes").partition(costs, PLENTY) == [3, 4]
    assert Balanced(2, by="time").partition(costs, PLENTY) == [1, 4]


def test_a_partition_that_does_not_fit_is_passed_over_for_one_that_balances_worse():
    costs = layers(*[{"param_bytes": size, "forward_s": 1.0} for size in (64, 64, 64, 640)])
    assert Balanced(2).partition(costs, Budget(memory_bytes=704)) == [2, 4]
    assert Balanced(2).partition(costs, Budget(memory_bytes=703)) == [3, 4]


def test_one_shard_and_as_many_as_layers():
    costs = layers(*[{"forward_s": 1.0}] * 5)
    for by in ("time", "bytes"):
        assert Balanced(1, by=by).partition(costs, PLENTY) == [5]
        assert Balanced(5, by=by).partition(costs, PLENTY) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("memory_bytes", [PLENTY_BYTES, sys.maxsize, 2**70])
@pytest.mark.parametrize("by", ["time", "bytes"])
def test_no_shard_is_empty_however_cheap_its_layers_and_large_the_device(memory_bytes, by):
    costs = layers({"forward_s": 1.0}, {}, {})
    assert Balanced(3, by=by).partition(costs, Budget(memory_bytes=memory_bytes)) == [1, 2, 3]
    assert len(set(Balanced(2, by=by).partition(costs, Budget(memory_bytes=memory_bytes))) - {0}) == 2


def test_too_few_shards_name_the_least_that_fit():
    costs = layers(*[{"param_bytes": 64}] * 5)
    with pytest.raises(
        ValueError, match="num_shards: 2 shards do not fit 128 bytes, limit: at least 3 shards; ask for more, or give"
    ):
        Balanced(2).partition(costs, Budget(memory_bytes=128))
    assert len(Balanced(3).partition(costs, Budget(memory_bytes=128))) == 3


def test_too_many_shards_to_fit_are_not_asked_to_become_more():
    # Layer 0 fits only with the layer that consumes its huge output.
    costs = layers({"output_bytes": 1000}, {"input_bytes": 1000})
    budget = Budget(memory_bytes=shard_bytes(costs, 0, 2, 2), num_micro_batches=2)
    assert Balanced(1).partition(costs, budget) == [2]
    with pytest.raises(ValueError, match="num_shards: 2 shards do not fit") as caught:
        Balanced(2).partition(costs, budget)
    assert "ask for more" not in str(caught.value)


@pytest.mark.parametrize("num_layers", [0, 2])
def test_more_shards_than_layers_are_refused(num_layers):
    rule = f"num_shards: 3, limit: the model's {num_layers} layers; ask for fewer shards"
    with pytest.raises(ValueError, match=rule):
        Balanced(3).partition(layers(*[{}] * num_layers), PLENTY)


def test_a_layer_that_fits_no_shard_is_named():
    costs = layers({"param_bytes": 64}, {"param_bytes": 640})
    with pytest.raises(LayerTooLarge, match=r"layer 1 \(layer-1\): needs 640 B \(640 bytes\)") as caught:
        Balanced(2).partition(costs, Budget(memory_bytes=639))
    assert (caught.value.layer, caught.value.needed_bytes, caught.value.available_bytes) == ("layer-1", 640, 639)


@pytest.mark.parametrize("num_shards", [0, -1, 2.0, True, "2", None])
def test_a_number_of_shards_below_one_is_refused(num_shards):
    with pytest.raises(ValueError, match=r"num_shards: .*, limit: a whole number >= 1; pass such an int"):
        Balanced(num_shards)


@pytest.mark.parametrize("by", ["layers", "", None])
def test_an_unknown_load_names_the_known_ones(by):
    with pytest.raises(ValueError, match=f"by: {by!r}, known: 'time', 'bytes'"):
        Balanced(2, by=by)


def test_the_number_of_shards_is_not_revised():
    assert Balanced(2).revise([2, 4], 0) is None


def test_its_repr_makes_it_again():
    assert repr(Balanced(2)) == "Balanced(2, by='time')"
    assert repr(Balanced(4, by="bytes")) == "Balanced(4, by='bytes')"
