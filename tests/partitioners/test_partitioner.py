"""Partitioners, and their names."""

import random
import sys
from dataclasses import replace

import numpy as np
import pytest

from partitioners import (
    Balanced,
    Budget,
    LayerTooLarge,
    Optimal,
    Pilot,
    Presharded,
    make_partitioner,
    partitioner,
    predict_step,
    register_partitioner,
    shard_bytes,
)
from partitioners.steptime import StepModel
from tests.covering import covering
from tests.partitions import (
    PLENTY_BYTES,
    fitting_partitions,
    layers,
    random_device,
    random_layers,
    seeds,
    shards_of,
    slow_step_s,
)
from tests.refused import refused

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


@pytest.mark.parametrize("num_layers", [7, 9])
def test_ends_of_another_model_are_refused(num_layers):
    with refused(ValueError, says=f"8 {num_layers}"):
        Presharded([3, 6, 8]).partition([None] * num_layers, BUDGET)


def of_bytes(*param_bytes, work_bytes=0):
    """Layers whose shard costs add up: parameters in the slab, work at its peak only."""
    return layers(*[{"param_bytes": each, "peak_bytes": work_bytes} for each in param_bytes])


FIVE = (64, 64, 64, 64, 64)


@pytest.mark.parametrize(
    ("param_bytes", "work_bytes", "budget", "expected"),
    [
        # A shard, and as much again for the next slab, fit the device.
        (FIVE, 0, {"memory_bytes": 256}, [2, 4, 5]),
        (FIVE, 0, {"memory_bytes": 255}, [1, 2, 3, 4, 5]),
        # The user's buffer replaces the automatic one.
        (FIVE, 0, {"memory_bytes": 256, "buffer_bytes": 0}, [4, 5]),
        (FIVE, 0, {"memory_bytes": 256, "buffer_bytes": 64}, [3, 5]),
        # Without double buffering nothing is kept free.
        *((FIVE, 0, {"memory_bytes": 256, "buffer_bytes": n, "double_buffer": False}, [4, 5]) for n in (None, 0, 128)),
        # Work counts once, where it is worst.
        ((64, 64, 64), 100, {"memory_bytes": 356}, [2, 3]),
        ((64, 64, 64), 101, {"memory_bytes": 356}, [1, 2, 3]),
        # A layer that fits only without a second slab is a shard of its own.
        ((64, 640, 64, 64), 0, {"memory_bytes": 640}, [1, 2, 4]),
        # A model that fits is one shard.
        ((64, 64, 64), 0, {"memory_bytes": 2**20}, [3]),
    ],
)
def test_pilot_fills_shards_from_the_front(param_bytes, work_bytes, budget, expected):
    assert Pilot().partition(of_bytes(*param_bytes, work_bytes=work_bytes), Budget(**budget)) == expected


def test_micro_batches_take_room():
    costs = [replace(cost, grad_bytes=64) for cost in of_bytes(64, 64)]
    assert Pilot().partition(costs, Budget(memory_bytes=320)) == [2]
    assert Pilot().partition(costs, Budget(memory_bytes=320, num_micro_batches=2)) == [1, 2]


def test_the_layer_that_does_not_fit_is_named_with_its_bytes():
    with refused(LayerTooLarge, layer="layer-1", says="750 749") as caught:
        Pilot().partition(of_bytes(64, 640, work_bytes=110), Budget(memory_bytes=749))
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (750, 749)


def with_a_huge_output_after_layer_2():
    costs = of_bytes(64, 64, 64, 64, 64)
    costs[2:4] = replace(costs[2], output_bytes=1000), replace(costs[3], input_bytes=1000)
    return costs


def test_a_layer_that_fits_only_with_the_next_one_is_packed_with_it():
    costs = with_a_huge_output_after_layer_2()
    for memory_bytes, boundaries in ((1128, [2, 4, 5]), (1192, [2, 5])):  # two or three slabs, and the output once
        assert shard_bytes(costs, 2, 3, 2) > memory_bytes >= shard_bytes(costs, 2, 4, 2)
        assert Pilot().partition(costs, Budget(memory_bytes=memory_bytes, num_micro_batches=2)) == boundaries


def test_where_no_larger_shard_fits_either_the_layer_is_named():
    costs = with_a_huge_output_after_layer_2()
    with refused(LayerTooLarge, layer="layer-2", says="1128 1127") as caught:
        Pilot().partition(costs, Budget(memory_bytes=1127, num_micro_batches=2))
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (1128, 1127)


def instances(rng, number, most=8):
    """Random models of up to `most` layers, each with a device and the partitions that fit it."""
    for _ in range(number):
        costs = random_layers(rng, most)
        budget = random_device(rng, costs)
        yield costs, budget, fitting_partitions(costs, budget)


@seeds(10)
def test_it_refuses_only_what_no_partition_fits(seed):
    for costs, budget, fitting in instances(random.Random(seed), 30):
        if fitting:
            assert Pilot().partition(costs, budget) in fitting
        else:
            with pytest.raises(LayerTooLarge):
                Pilot().partition(costs, budget)


@pytest.mark.parametrize("partitioner", [Pilot(), Optimal()], ids=repr)
def test_a_revision_cuts_where_the_bytes_differ_least(partitioner):
    costs = of_bytes(64, 64, 64, 640, 64)
    assert partitioner.revise([5], 0, costs) == [3, 5]
    assert shard_bytes(costs, 0, 3) < shard_bytes(costs, 3, 5)
    assert partitioner.revise([1, 5], 1, costs) == [1, 3, 5]
    assert partitioner.revise([1, 5], 0, costs) is None


def test_a_revision_without_costs_halves_the_layers_that_were_not_fixed():
    assert Optimal().revise([1, 5], 1) == [1, 3, 5]
    assert Pilot().revise([4], 0) == [2, 4]
    assert Pilot().revise([1, 6, 8], 1) == [1, 3, 6, 8]
    assert Pilot().revise([1, 6, 8], 0) is None
    assert Presharded([3, 6, 8]).revise([3, 6, 8], 1) is None
    assert Balanced(2).revise([2, 4], 0) is None


PLENTY = Budget(memory_bytes=PLENTY_BYTES)


def largest(costs, boundaries, budget, by):
    if by == "bytes":
        return max(shard_bytes(costs, *shard, budget.num_micro_batches) for shard in shards_of(boundaries))
    seconds = [2 * cost.forward_s + cost.backward_s for cost in costs]
    return max(sum(seconds[first:last]) for first, last in shards_of(boundaries))


@pytest.mark.parametrize("by", ["time", "bytes"])
@seeds(10)
def test_the_largest_load_is_the_least_of_all_that_fit(seed, by):
    rng = random.Random(seed)
    for costs, budget, fitting in instances(rng, 20):
        num_shards = rng.randint(1, len(costs))
        partitioner = Balanced(num_shards, by=by)
        if not fitting:
            with refused(LayerTooLarge):
                partitioner.partition(costs, budget)
            continue
        candidates = [ends for ends in fitting if len(ends) == num_shards]
        if not candidates:
            with refused(ValueError, says=f"num_shards {num_shards}"):
                partitioner.partition(costs, budget)
            continue
        found = partitioner.partition(costs, budget)
        assert found in candidates
        least = min(largest(costs, ends, budget, by) for ends in candidates)
        assert largest(costs, found, budget, by) == pytest.approx(least, rel=1e-12, abs=1e-12), (costs, budget)


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


@covering(memory_bytes=[PLENTY_BYTES, sys.maxsize, 2**70], by=["time", "bytes"], strength=1)
def test_no_shard_is_empty_however_cheap_its_layers_and_large_the_device(memory_bytes, by):
    costs = layers({"forward_s": 1.0}, {}, {})
    assert Balanced(3, by=by).partition(costs, Budget(memory_bytes=memory_bytes)) == [1, 2, 3]
    assert len(set(Balanced(2, by=by).partition(costs, Budget(memory_bytes=memory_bytes))) - {0}) == 2


def test_too_few_shards_name_the_least_that_fit():
    costs = layers(*[{"param_bytes": 64}] * 5)
    with refused(ValueError, says="num_shards 128 3"):
        Balanced(2).partition(costs, Budget(memory_bytes=128))
    assert len(Balanced(3).partition(costs, Budget(memory_bytes=128))) == 3


def test_too_many_shards_to_fit_are_not_asked_to_become_more():
    # Layer 0 fits only with the layer that consumes its huge output.
    costs = layers({"output_bytes": 1000}, {"input_bytes": 1000})
    budget = Budget(memory_bytes=shard_bytes(costs, 0, 2, 2), num_micro_batches=2)
    assert Balanced(1).partition(costs, budget) == [2]
    with refused(ValueError, says="num_shards 2") as caught:
        Balanced(2).partition(costs, budget)
    assert "ask for more" not in str(caught.value)


@pytest.mark.parametrize("num_layers", [0, 2])
def test_more_shards_than_layers_are_refused(num_layers):
    with refused(ValueError, says=f"num_shards 3 {num_layers}"):
        Balanced(3).partition(layers(*[{}] * num_layers), PLENTY)


def test_a_layer_that_fits_no_shard_is_named():
    costs = layers({"param_bytes": 64}, {"param_bytes": 640})
    with refused(LayerTooLarge, layer="layer-1", says="640 639") as caught:
        Balanced(2).partition(costs, Budget(memory_bytes=639))
    assert (caught.value.layer, caught.value.needed_bytes, caught.value.available_bytes) == ("layer-1", 640, 639)


def least_s(costs, budget, candidates):
    model = StepModel(costs, budget)
    return min(model.predict(ends).total_s for ends in candidates)


def leaves_buffer(costs, boundaries, budget):
    """Whether every shard of several layers keeps the user's buffer free; a lone layer has no smaller shard."""
    shards = (shard for shard in shards_of(boundaries) if shard[1] - shard[0] > 1)
    room_bytes = budget.memory_bytes - budget.buffer_bytes
    return all(shard_bytes(costs, *shard, budget.num_micro_batches) <= room_bytes for shard in shards)


@seeds(20, net=5)
def test_30_random_models_and_budgets_equal_brute_force(seed):
    num_refused = num_cut = 0
    for costs, budget, fitting in instances(random.Random(seed), 30):
        if not fitting:
            num_refused += 1
            with refused(LayerTooLarge) as caught:
                Optimal().partition(costs, budget)
            assert caught.value.available_bytes == budget.memory_bytes < caught.value.needed_bytes
            continue
        found = Optimal().partition(costs, budget)
        assert found in fitting  # every layer once, in order, in shards that fit
        num_cut += 1 < len(found) < len(costs)
        found_s = predict_step(costs, found, budget).total_s
        assert found_s == pytest.approx(least_s(costs, budget, fitting), rel=1e-9, abs=1e-12), (costs, budget)
    assert num_refused >= 2
    assert num_cut >= 2  # neither whole nor layer by layer


@seeds(10)
def test_no_partition_is_faster_by_a_walk_along_the_units(seed):
    for costs, budget, fitting in instances(random.Random(1000 + seed), 10, most=6):
        if fitting:
            found_s = slow_step_s(costs, Optimal().partition(costs, budget), budget)
            least = min(slow_step_s(costs, ends, budget) for ends in fitting)
            assert found_s == pytest.approx(least, rel=1e-9, abs=1e-12)


@seeds(10)
def test_the_users_buffer_stays_free_in_shards_of_several_layers_where_a_partition_can(seed):
    rng = random.Random(2000 + seed)
    for costs, device, fitting in instances(rng, 20, most=6):
        budget = replace(device, buffer_bytes=rng.randrange(10_000))
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


@pytest.mark.parametrize("budget", [replace(PLENTY, link_bytes_per_s=1.0), PLENTY], ids=["slow link", "free link"])
def test_with_plenty_of_memory_there_is_one_shard_because_no_forward_runs_twice(budget):
    assert Optimal().partition(layers(*[LAYER] * 6), budget) == [6]


def test_where_only_one_layer_fits_at_a_time_every_layer_is_a_shard():
    costs = layers(*[LAYER] * 4)
    budget = Budget(memory_bytes=shard_bytes(costs, 0, 2) - 1, link_bytes_per_s=1.0)
    assert Optimal().partition(costs, budget) == [1, 2, 3, 4]


def test_a_model_of_one_layer_is_one_shard_or_refused():
    costs = layers(LAYER)
    assert Optimal().partition(costs, Budget(memory_bytes=64)) == [1]
    with refused(LayerTooLarge, layer="layer-0", says="64 63"):
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


@pytest.fixture
def own_names(monkeypatch):
    """Names that a test registers are forgotten after it."""
    monkeypatch.setattr(partitioner, "_KNOWN", dict(partitioner._KNOWN))


@pytest.mark.parametrize(
    ("name", "settings", "kind", "representation"),
    [
        ("pilot", {}, Pilot, "Pilot()"),
        ("optimal", {}, Optimal, "Optimal()"),
        ("balanced", {"num_shards": 4}, Balanced, "Balanced(4, by='time')"),
        ("balanced", {"num_shards": 2, "by": "bytes"}, Balanced, "Balanced(2, by='bytes')"),
        ("presharded", {"boundaries": [3, 6, 8]}, Presharded, "Presharded([3, 6, 8])"),
        ("presharded", {"boundaries": (3, 6, 8)}, Presharded, "Presharded([3, 6, 8])"),
    ],
)
def test_each_is_known_by_name_takes_its_settings_and_prints_what_makes_it_again(name, settings, kind, representation):
    partitioner = make_partitioner(name, **settings)
    assert type(partitioner) is kind
    assert repr(partitioner) == representation


def test_each_call_makes_its_own():
    assert make_partitioner("pilot") is not make_partitioner("pilot")


NO_ENDS = ([], [0, 3], [-1], [3, 3], [6, 3], [1.0, 2], [True, 2], ["3"], [None], np.array([1.5]))


@pytest.mark.parametrize(
    ("call", "values", "words"),
    [
        (Presharded, NO_ENDS, "boundaries"),
        (lambda shard: Pilot().revise([1, 6, 8], shard), (-1, 3), "shard {} 3"),
        (Balanced, (0, -1, 2.0, True, "2", None), "num_shards {}"),
        (lambda by: Balanced(2, by=by), ("layers", "", None), "{!r} 'time' 'bytes'"),
        (lambda layers: Optimal().partition(layers, BUDGET), ([],), "layers"),
        (make_partitioner, ("Pilot", "best", ""), "{!r} 'balanced' 'presharded'"),
        (lambda number: make_partitioner("balanced", num_shards=number), (0,), "num_shards 0"),
        (lambda ends: make_partitioner("presharded", boundaries=ends), ([3, 3],), "boundaries"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_their_value(call, values, words):
    for value in values:
        with refused(ValueError, says=words.format(value)):
            call(value)


@pytest.mark.parametrize(
    ("name", "settings", "example"),
    [
        ("pilot", {"num_shards": 2}, "Pilot()"),
        ("optimal", {"num_shards": 2}, ""),
        ("balanced", {}, "Balanced(4)"),
        ("balanced", {"num_shards": 2, "boundaries": [2]}, "Balanced(4)"),
        ("presharded", {}, "Presharded(["),
    ],
)
def test_settings_that_it_does_not_take_are_named_with_an_example(name, settings, example):
    with refused(ValueError, says=f"'{name}' {example}") as caught:
        make_partitioner(name, **settings)
    assert repr(settings) in str(caught.value)


class Halves:
    def __init__(self, *, at=1):
        self.at = at

    def partition(self, costs, budget):
        return [self.at, len(costs)]

    def revise(self, boundaries, shard, costs=()):
        return None


@pytest.mark.usefixtures("own_names")
def test_a_users_partitioner_is_made_by_the_name_it_registers():
    register_partitioner("halves", Halves)
    made = make_partitioner("halves", at=2)
    assert made.partition(layers({}, {}, {}), Budget(memory_bytes=1)) == [2, 3]
    with refused(ValueError, says="'thirds' 'halves' 'pilot'"):
        make_partitioner("thirds")


@pytest.mark.usefixtures("own_names")
def test_a_users_partitioner_names_the_settings_that_it_does_not_take():
    register_partitioner("halves", Halves)
    with refused(ValueError, says="'halves' 'where'") as caught:
        make_partitioner("halves", where=2)
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.usefixtures("own_names")
def test_a_name_is_taken_once():
    register_partitioner("halves", Halves)
    for name in ("halves", "pilot"):
        with refused(ValueError, says=f"'{name}'"):
            register_partitioner(name, Pilot)
    assert isinstance(make_partitioner("halves"), Halves)
