"""The pilot packs front to back, keeps room for the next slab, and cuts in two what did not fit."""

import random
from dataclasses import replace

import pytest

from partitioners import Budget, LayerCost, LayerTooLarge, Pilot, shard_bytes
from tests.partitions import ZERO, fitting_partitions, random_device, random_layers


def layer(index, param_bytes, work_bytes=0):
    """A layer whose shard costs add up: parameters in the slab, work at its peak only."""
    return replace(ZERO, index=index, name=f"layer-{index}", param_bytes=param_bytes, peak_bytes=work_bytes)


def layers(*param_bytes, work_bytes=0):
    return [layer(index, each, work_bytes) for index, each in enumerate(param_bytes)]


def test_a_shard_and_as_much_again_for_the_next_slab_fit_the_device():
    costs = layers(64, 64, 64, 64, 64)
    assert Pilot().partition(costs, Budget(memory_bytes=256)) == [2, 4, 5]
    assert Pilot().partition(costs, Budget(memory_bytes=255)) == [1, 2, 3, 4, 5]


def test_the_users_buffer_replaces_the_automatic_one():
    costs = layers(64, 64, 64, 64, 64)
    assert Pilot().partition(costs, Budget(memory_bytes=256, buffer_bytes=0)) == [4, 5]
    assert Pilot().partition(costs, Budget(memory_bytes=256, buffer_bytes=64)) == [3, 5]


def test_without_double_buffering_nothing_is_kept_free():
    costs = layers(64, 64, 64, 64, 64)
    for buffer_bytes in (None, 0, 128):
        budget = Budget(memory_bytes=256, buffer_bytes=buffer_bytes, double_buffer=False)
        assert Pilot().partition(costs, budget) == [4, 5]


def test_work_counts_once_where_it_is_worst():
    assert Pilot().partition(layers(64, 64, 64, work_bytes=100), Budget(memory_bytes=356)) == [2, 3]
    assert Pilot().partition(layers(64, 64, 64, work_bytes=101), Budget(memory_bytes=356)) == [1, 2, 3]


def test_a_layer_that_fits_only_without_a_second_slab_is_a_shard_of_its_own():
    assert Pilot().partition(layers(64, 640, 64, 64), Budget(memory_bytes=640)) == [1, 2, 4]


def test_a_model_that_fits_is_one_shard():
    assert Pilot().partition(layers(64, 64, 64), Budget(memory_bytes=2**20)) == [3]


def test_micro_batches_take_room():
    costs = [layer(0, 64), layer(1, 64)]
    costs = [LayerCost(**{**vars(cost), "grad_bytes": 64}) for cost in costs]
    assert Pilot().partition(costs, Budget(memory_bytes=320)) == [2]
    assert Pilot().partition(costs, Budget(memory_bytes=320, num_micro_batches=2)) == [1, 2]


def test_the_layer_that_does_not_fit_is_named_with_its_bytes():
    with pytest.raises(LayerTooLarge, match=r"layer 1 \(layer-1\): needs 750 B \(750 bytes\)") as caught:
        Pilot().partition(layers(64, 640, work_bytes=110), Budget(memory_bytes=749))
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (750, 749)


def with_a_huge_output_after_layer_2():
    costs = layers(64, 64, 64, 64, 64)
    costs[2] = LayerCost(**{**vars(costs[2]), "output_bytes": 1000})
    costs[3] = LayerCost(**{**vars(costs[3]), "input_bytes": 1000})
    return costs


def test_a_layer_that_fits_only_with_the_next_one_is_packed_with_it():
    costs = with_a_huge_output_after_layer_2()
    for memory_bytes, boundaries in ((1128, [2, 4, 5]), (1192, [2, 5])):  # two or three slabs, and the output once
        assert shard_bytes(costs, 2, 3, 2) > memory_bytes >= shard_bytes(costs, 2, 4, 2)
        assert Pilot().partition(costs, Budget(memory_bytes=memory_bytes, num_micro_batches=2)) == boundaries


def test_where_no_larger_shard_fits_either_the_layer_is_named():
    costs = with_a_huge_output_after_layer_2()
    with pytest.raises(LayerTooLarge, match=r"layer 2 \(layer-2\): needs .* \(1128 bytes\)") as caught:
        Pilot().partition(costs, Budget(memory_bytes=1127, num_micro_batches=2))
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (1128, 1127)


@pytest.mark.parametrize("seed", range(10))
def test_it_refuses_only_what_no_partition_fits(seed):
    rng = random.Random(seed)
    for _ in range(30):
        costs = random_layers(rng)
        budget = random_device(rng, costs)
        fitting = fitting_partitions(costs, budget)
        if fitting:
            assert Pilot().partition(costs, budget) in fitting
        else:
            with pytest.raises(LayerTooLarge):
                Pilot().partition(costs, budget)


def test_a_revision_cuts_where_the_bytes_differ_least():
    costs = layers(64, 64, 64, 640, 64)
    assert Pilot().revise([5], 0, costs) == [3, 5]
    assert shard_bytes(costs, 0, 3) < shard_bytes(costs, 3, 5)
    assert Pilot().revise([1, 5], 1, costs) == [1, 3, 5]


def test_a_revision_without_costs_halves_the_layers():
    assert Pilot().revise([4], 0) == [2, 4]
    assert Pilot().revise([1, 6, 8], 1) == [1, 3, 6, 8]
    assert Pilot().revise([1, 6, 8], 0) is None


@pytest.mark.parametrize("shard", [-1, 3])
def test_a_shard_that_is_not_there_is_refused(shard):
    with pytest.raises(ValueError, match=rf"shard: {shard}, limit: 0 <= shard < 3"):
        Pilot().revise([1, 6, 8], shard)
