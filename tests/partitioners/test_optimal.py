"""Optimal's partition is the fastest of all that fit, and there is one whenever any fits."""

import random
from dataclasses import replace

import pytest

from partitioners import Budget, LayerTooLarge, Optimal, predict_step, shard_bytes
from partitioners.steptime import StepModel
from tests.partitions import (
    PLENTY_BYTES,
    ZERO,
    fitting_partitions,
    layers,
    partitions,
    random_device,
    random_layers,
    shards_of,
    slow_step_s,
)


def least_s(costs, budget, candidates):
    model = StepModel(costs, budget)
    return min(model.predict(ends).total_s for ends in candidates)


def leaves_buffer(costs, boundaries, budget):
    """Whether every shard of several layers keeps the user's buffer free; a lone layer has no smaller shard."""
    shards = (shard for shard in shards_of(boundaries) if shard[1] - shard[0] > 1)
    room_bytes = budget.memory_bytes - budget.buffer_bytes
    return all(shard_bytes(costs, *shard, budget.num_micro_batches) <= room_bytes for shard in shards)


@pytest.mark.parametrize("seed", range(20))
def test_30_random_models_and_budgets_equal_brute_force(seed):
    rng = random.Random(seed)
    num_refused = num_cut = 0
    for instance in range(30):
        costs = random_layers(rng)
        budget = random_device(rng, costs)
        fitting = fitting_partitions(costs, budget)
        if not fitting:
            num_refused += 1
            with pytest.raises(LayerTooLarge, match="give the device more memory") as caught:
                Optimal().partition(costs, budget)
            assert caught.value.available_bytes == budget.memory_bytes < caught.value.needed_bytes
            continue
        found = Optimal().partition(costs, budget)
        assert found in fitting, instance  # every layer once, in order, in shards that fit
        num_cut += 1 < len(found) < len(costs)
        found_s = predict_step(costs, found, budget).total_s
        assert found_s == pytest.approx(least_s(costs, budget, fitting), rel=1e-9, abs=1e-12), instance
    assert num_refused >= 2
    assert num_cut >= 2  # neither whole nor layer by layer


@pytest.mark.parametrize("seed", range(10))
def test_no_partition_is_faster_by_a_walk_along_the_units(seed):
    rng = random.Random(1000 + seed)
    for _ in range(10):
        costs = random_layers(rng, most=6)
        budget = random_device(rng, costs)
        fitting = fitting_partitions(costs, budget)
        if fitting:
            found_s = slow_step_s(costs, Optimal().partition(costs, budget), budget)
            least = min(slow_step_s(costs, ends, budget) for ends in fitting)
            assert found_s == pytest.approx(least, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_the_users_buffer_stays_free_in_shards_of_several_layers_where_a_partition_can(seed):
    rng = random.Random(2000 + seed)
    for _ in range(20):
        costs = random_layers(rng, most=6)
        budget = replace(random_device(rng, costs), buffer_bytes=rng.randrange(10_000))
        fitting = fitting_partitions(costs, budget)
        if not fitting:
            with pytest.raises(LayerTooLarge):
                Optimal().partition(costs, budget)
            continue
        roomy = [ends for ends in fitting if leaves_buffer(costs, ends, budget)]
        candidates = roomy if roomy and budget.double_buffer else fitting
        found = Optimal().partition(costs, budget)
        assert found in candidates
        found_s = predict_step(costs, found, budget).total_s
        assert found_s == pytest.approx(least_s(costs, budget, candidates), rel=1e-9, abs=1e-12)


# What each layer of the models below has, unless a test says else.
LAYER = {"param_bytes": 64, "grad_bytes": 64, "forward_s": 1.0, "backward_s": 1.0}


def test_with_plenty_of_memory_and_a_slow_link_there_is_one_shard():
    costs = layers(*[LAYER] * 6)
    assert Optimal().partition(costs, Budget(memory_bytes=PLENTY_BYTES, link_bytes_per_s=1.0)) == [6]


def test_with_a_free_link_there_is_one_shard_because_no_forward_runs_twice():
    assert Optimal().partition(layers(*[LAYER] * 6), Budget(memory_bytes=PLENTY_BYTES)) == [6]


def test_where_only_one_layer_fits_at_a_time_every_layer_is_a_shard():
    costs = layers(*[LAYER] * 4)
    budget = Budget(memory_bytes=shard_bytes(costs, 0, 2) - 1, link_bytes_per_s=1.0)
    assert Optimal().partition(costs, budget) == [1, 2, 3, 4]


def test_a_model_of_one_layer_is_one_shard_or_refused():
    costs = layers(LAYER)
    assert Optimal().partition(costs, Budget(memory_bytes=64)) == [1]
    with pytest.raises(LayerTooLarge, match=r"layer 0 \(layer-0\): needs 64 B \(64 bytes\) alone .* 63 B \(63 bytes\)"):
        Optimal().partition(costs, Budget(memory_bytes=63))


def test_the_last_shard_is_large_because_its_forward_runs_once():
    costs = layers(*[LAYER] * 3)
    two = Budget(memory_bytes=shard_bytes(costs, 0, 2))
    assert Optimal().partition(costs, two) == [1, 3]
    assert [predict_step(costs, ends, two).total_s for ends in ([1, 3], [2, 3])] == [7, 8]


def test_it_cuts_where_little_leaves():
    costs = layers(*[{**LAYER, "forward_s": 0.0, "input_bytes": size} for size in (0, 1000, 10, 1000)])
    costs = [replace(cost, output_bytes=size) for cost, size in zip(costs, (1000, 10, 1000, 0), strict=True)]
    budget = Budget(memory_bytes=shard_bytes(costs, 0, 4) - 1, link_bytes_per_s=1000.0)
    assert Optimal().partition(costs, budget) == [2, 4]


def tight_and_slow(costs):
    """Two layers at a time, and a layer's parameters take as long as its forward."""
    return Budget(memory_bytes=shard_bytes(costs, 0, 2) + 64, link_bytes_per_s=64.0, unit_s=0.125)


def test_double_buffering_takes_smaller_shards_whose_neighbours_load_meanwhile():
    costs = layers(*[{**LAYER, "forward_peak_bytes": 1}] * 4)
    doubled = tight_and_slow(costs)
    assert Optimal().partition(costs, doubled) == [1, 2, 4]
    assert [predict_step(costs, ends, doubled).total_s for ends in ([1, 2, 4], [2, 4])] == [16.625, 20.375]
    single = replace(doubled, double_buffer=False)
    assert Optimal().partition(costs, single) == [2, 4]
    assert [predict_step(costs, ends, single).total_s for ends in ([1, 2, 4], [2, 4])] == [20.625, 20.375]


def test_a_fixed_cost_of_units_makes_fewer_shards():
    costs = layers(*[{**LAYER, "forward_peak_bytes": 1}] * 4)
    assert Optimal().partition(costs, replace(tight_and_slow(costs), unit_s=1.75)) == [1, 2, 4]
    assert Optimal().partition(costs, replace(tight_and_slow(costs), unit_s=2.25)) == [2, 4]


def test_an_explicit_buffer_stays_free():
    costs = layers(*[LAYER] * 4)
    budget = Budget(memory_bytes=shard_bytes(costs, 0, 4))
    assert Optimal().partition(costs, budget) == [4]
    assert Optimal().partition(costs, replace(budget, buffer_bytes=1)) == [1, 4]
    assert Optimal().partition(costs, replace(budget, buffer_bytes=budget.memory_bytes)) == [1, 2, 3, 4]
    assert Optimal().partition(costs, replace(budget, buffer_bytes=1, double_buffer=False)) == [4]


def test_a_layer_that_fits_only_without_the_buffer_is_a_shard_of_its_own():
    costs = layers(LAYER, {**LAYER, "param_bytes": 640}, LAYER)
    assert Optimal().partition(costs, Budget(memory_bytes=640 + 64, buffer_bytes=100)) == [1, 2, 3]


def test_a_buffer_that_no_partition_can_leave_free_is_given_up():
    # Layer 0 fits only with the layer that consumes its huge output; both leave 100 bytes less than the buffer.
    costs = layers({**LAYER, "output_bytes": 1000}, {**LAYER, "input_bytes": 1000})
    budget = Budget(memory_bytes=shard_bytes(costs, 0, 2, 2), num_micro_batches=2)
    assert shard_bytes(costs, 0, 1, 2) > budget.memory_bytes
    assert Optimal().partition(costs, replace(budget, buffer_bytes=100)) == [2]


def test_models_deeper_than_brute_force_reaches_are_cut_to_fit():
    rng = random.Random(0)
    costs = layers(*[{**LAYER, "forward_s": rng.random(), "input_bytes": 8, "output_bytes": 8} for _ in range(80)])
    budget = Budget(memory_bytes=shard_bytes(costs, 0, 10), link_bytes_per_s=100.0)
    found = Optimal().partition(costs, budget)
    assert all(shard_bytes(costs, *shard) <= budget.memory_bytes for shard in shards_of(found))
    fewest = [*range(10, 80, 10), 80]
    assert predict_step(costs, found, budget).total_s <= predict_step(costs, fewest, budget).total_s


def test_no_layers_are_refused():
    with pytest.raises(ValueError, match="layers"):
        Optimal().partition([], Budget(memory_bytes=1))


def asked(costs_of):
    """The same, and the list of numbers that it was asked for."""
    numbers = []

    def noting(number):
        numbers.append(number)
        return costs_of(number)

    return noting, numbers


def sized(seconds_of, bytes_of=lambda number: 0):
    """A model of one layer, given seconds and bytes of a micro-batch by their number."""
    return lambda number: [replace(ZERO, grad_bytes=1, forward_s=seconds_of(number), peak_bytes=bytes_of(number))]


def test_choose_takes_the_number_of_micro_batches_with_the_shortest_step_and_asks_no_further():
    step_s = {1: 8.0, 2: 6.0, 4: 5.0, 8: 7.0, 16: 1.0}
    costs_of, numbers = asked(sized(lambda number: step_s[number] / number))
    assert Optimal().choose(costs_of, step_s, Budget(memory_bytes=100)) == (4, [1])
    assert numbers == [1, 2, 4, 8]


def test_choose_passes_over_numbers_whose_micro_batches_do_not_fit():
    costs_of, numbers = asked(sized(lambda number: 1.0, lambda number: 400 // number))
    assert Optimal().choose(costs_of, [1, 2, 4, 8], Budget(memory_bytes=101)) == (4, [1])
    assert numbers == [1, 2, 4, 8]


def test_choose_replaces_the_budgets_own_number():
    costs_of = sized(lambda number: 1.0)
    budget = Budget(memory_bytes=100, num_micro_batches=64)
    assert Optimal().choose(costs_of, [2, 3], budget) == (2, [1])


def test_choose_refuses_when_no_number_fits_and_without_numbers():
    costs_of = sized(lambda number: 1.0, lambda number: 400 // number)
    with pytest.raises(LayerTooLarge, match=r"needs 1\d\d B") as caught:
        Optimal().choose(costs_of, [1, 2, 4], Budget(memory_bytes=99))
    assert caught.value.available_bytes == 99
    with pytest.raises(ValueError, match="numbers: none, limit: at least one; pass numbers of micro-batches to try"):
        Optimal().choose(costs_of, [], Budget(memory_bytes=99))


@pytest.mark.parametrize("number", [0, -1, 1.5])
def test_choose_refuses_a_number_below_one(number):
    with pytest.raises(ValueError, match="num_micro_batches: "):
        Optimal().choose(sized(lambda number: 1.0), [number], Budget(memory_bytes=100))


@pytest.mark.parametrize("seed", range(10))
def test_choose_equals_asking_for_every_number_until_the_step_grows(seed):
    rng = random.Random(3000 + seed)
    for _ in range(10):
        whole = random_layers(rng, most=6)
        budget = random_device(rng, whole)

        def costs_of(number, whole=whole):
            names = ("input_bytes", "output_bytes", "saved_bytes", "peak_bytes", "forward_peak_bytes", "target_bytes")
            return [
                replace(
                    cost,
                    forward_s=cost.forward_s / number,
                    backward_s=cost.backward_s / number,
                    **{name: (getattr(cost, name) or 0) // number for name in names},
                )
                for cost in whole
            ]

        fastest = {}
        for number in (1, 2, 3, 5):
            costs, each = costs_of(number), replace(budget, num_micro_batches=number)
            fitting = fitting_partitions(costs, each)
            if not fitting:
                continue
            seconds = least_s(costs, each, fitting)
            if fastest and seconds > min(fastest.values()) * (1 - 1e-12):
                break
            fastest[number] = seconds
        if not fastest:
            with pytest.raises(LayerTooLarge):
                Optimal().choose(costs_of, (1, 2, 3, 5), budget)
            continue
        number, found = Optimal().choose(costs_of, (1, 2, 3, 5), budget)
        found_s = predict_step(costs_of(number), found, replace(budget, num_micro_batches=number)).total_s
        assert found_s == pytest.approx(min(fastest.values()), rel=1e-9, abs=1e-12)
        assert found in list(partitions(len(whole)))


def test_a_revision_cuts_the_shard_where_the_bytes_of_its_halves_differ_least():
    costs = layers(*[{"param_bytes": size} for size in (64, 64, 64, 640, 64)])
    assert Optimal().revise([5], 0, costs) == [3, 5]
    assert Optimal().revise([1, 5], 1) == [1, 3, 5]
    assert Optimal().revise([1, 5], 0, costs) is None
