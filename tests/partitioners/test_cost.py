"""Sizes, costs, and the bytes of shards: one by one, and in tables."""

import itertools
import pickle
import random
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from torch import nn

from partitioners import (
    Budget,
    LayerTooLarge,
    MemoryMeter,
    format_bytes,
    forward_unit_bytes,
    parse_bytes,
    profile,
    shard_bytes,
    slab_bytes,
    unit_bytes,
)
from partitioners.cost import ShardTable, fewest_shards, too_large
from tests.partitions import (
    PLENTY_BYTES,
    ZERO,
    fitting_partitions,
    layers,
    partitions,
    random_device,
    random_layers,
    seeds,
    shard_fits,
    shards_of,
)
from tests.refused import names, refused

SIZES = {
    1: 1,
    4096: 4096,
    "4096": 4096,
    "12 B": 12,
    "512 KiB": 512 * 2**10,
    "64MiB": 64 * 2**20,
    "64mib": 64 * 2**20,
    " 16GiB ": 16 * 2**30,
    "1.5GB": 1_500_000_000,
    "0.5KiB": 512,
    "2TiB": 2 * 2**40,
    "1PB": 10**15,
    "1.1PB": 11 * 10**14,
    "1.1KiB": 1126,
}


def test_a_size_is_an_int_or_a_number_with_a_unit():
    assert {written: parse_bytes(written, "memory") for written in SIZES} == SIZES


NO_TYPE = (True, False, 1.5, None)
NOT_POSITIVE = (0, -1, "0", "0MiB", "0.0001KB", "-1MiB")
MALFORMED = ("", "1.5", "1.5B", "16G", "512k", "MiB", "1 2MiB", "1e9", "٣", "1.MiB", ".5MiB", "64MiB!")


@pytest.mark.parametrize("written", [*NO_TYPE, *NOT_POSITIVE, *MALFORMED])
def test_anything_else_is_refused_with_field_value_and_examples(written):
    with refused(ValueError, says="memory '64MiB'") as caught:
        parse_bytes(written, "memory")
    assert repr(written) in str(caught.value)


PRINTED = {
    0: "0 B",
    1023: "1023 B",
    1024: "1 KiB",
    1536 * 2**20: "1.5 GiB",
    64 * 2**20: "64 MiB",
    2**20 - 1: "1 MiB",
    -(2**10): "-1 KiB",
    3 * 2**60: "3072 PiB",
}


def test_bytes_print_with_the_largest_unit_that_leaves_a_whole_part():
    assert {num_bytes: format_bytes(num_bytes) for num_bytes in PRINTED} == PRINTED


# Every figure is its own power of ten, so that a sum shows what was added. The last layer's output is the loss.
THREE = (
    replace(ZERO, index=0, grad_bytes=1, saved_bytes=10, peak_bytes=10_000, input_bytes=10**6, output_bytes=10**7),
    replace(ZERO, index=1, grad_bytes=2, saved_bytes=20, peak_bytes=20_000, input_bytes=10**7, output_bytes=10**8),
    replace(ZERO, index=2, grad_bytes=4, saved_bytes=40, peak_bytes=40_000, input_bytes=10**8, target_bytes=10**9),
)


def test_slab_rounds_each_layer_up_to_64_bytes():
    costs = [replace(ZERO, param_bytes=1), replace(ZERO, param_bytes=60, buffer_bytes=5), replace(ZERO, param_bytes=64)]
    assert [slab_bytes(costs, i, i + 1) for i in range(3)] == [64, 128, 64]
    assert slab_bytes(costs, 0, 3) == 256


def test_slab_has_room_for_every_tensor_at_its_own_boundary():
    assert slab_bytes([replace(ZERO, param_bytes=40, padding_bytes=88)], 0, 1) == 128


def test_unit_of_one_layer_is_its_peak_and_what_enters():
    assert unit_bytes(THREE, 1, 2) == 20_000 + 10**7 + 10**8  # peak, input, gradient of the output


def test_unit_is_the_worst_layer_with_what_layers_before_saved_and_gradients_of_those_after():
    last_runs = 20 + 40_000
    first_runs = 20_000 + 10**8 + 4  # with the gradient of its output, which the layer above made
    assert unit_bytes(THREE, 1, 3) == max(last_runs, first_runs) + 10**7 + 10**9
    heavy = (*THREE[:2], replace(THREE[2], peak_bytes=10**10))
    assert unit_bytes(heavy, 1, 3) == 20 + 10**10 + 10**7 + 10**9


def test_unit_with_a_boundary_at_its_end_holds_that_output_while_lower_layers_run():
    first_runs = 10_000 + 10**7 + 10**8 + 2
    assert unit_bytes(THREE, 0, 2) == first_runs + 10**6 + 10**8


def test_several_micro_batches_add_gradients_the_next_input_and_what_is_being_stored():
    one = unit_bytes(THREE, 0, 2, 1)
    entering, leaving = 10**6 + 10**8, 10**8
    assert unit_bytes(THREE, 0, 2, 2) == one + 3 + entering + leaving
    assert unit_bytes(THREE, 0, 2, 7) == unit_bytes(THREE, 0, 2, 2)
    assert unit_bytes(THREE, 2, 3, 2) == unit_bytes(THREE, 2, 3, 1) + 4 + (10**8 + 10**9) + 10**8


def test_shards_below_which_nothing_trains_run_forward_only():
    costs = [replace(cost, grad_bytes=0, forward_peak_bytes=5) for cost in THREE]
    assert unit_bytes(costs, 0, 2) == forward_unit_bytes(costs, 0, 2)
    trainable = [replace(costs[0], grad_bytes=1), *costs[1:]]
    assert unit_bytes(trainable, 1, 2) > forward_unit_bytes(trainable, 1, 2)
    # Where nothing trains at all, the last one too, with the target beside.
    for number in (1, 2, 5):
        target_bytes = min(number, 2) * costs[2].target_bytes
        assert unit_bytes(costs, 1, 3, number) == forward_unit_bytes(costs, 1, 3, number) + target_bytes
    assert target_bytes > 0
    ends_in_loss = [*costs[:2], replace(costs[2], grad_bytes=1)]
    assert unit_bytes(ends_in_loss, 2, 3) > unit_bytes(costs, 2, 3)


def test_forward_holds_a_layers_input_until_its_output_is_there():
    costs = [replace(cost, forward_peak_bytes=peak) for cost, peak in zip(THREE, (70, 20, 60), strict=True)]
    first, second, third = (cost.output_bytes for cost in costs)
    entering = costs[0].input_bytes
    assert forward_unit_bytes(costs, 0, 3) == entering + max(70, first + 20, second + 60)
    assert forward_unit_bytes(costs, 0, 3, 2) == 2 * entering + max(70, first + 20, second + 60) + third
    unknown = [replace(costs[0], forward_peak_bytes=None), *costs[1:]]
    assert forward_unit_bytes(unknown, 0, 3) == unit_bytes(unknown, 0, 3)


def test_a_parameter_that_a_shard_above_holds_too_brings_its_gradient():
    low, high = replace(THREE[0], shares_with=(2,), shared_bytes=7), replace(THREE[2], shares_with=(0,), shared_bytes=7)
    costs = [low, THREE[1], high]
    assert unit_bytes(costs, 0, 1) == unit_bytes(THREE, 0, 1) + 2 * 7  # it enters, and a sum is made
    assert unit_bytes(costs, 0, 1, 2) == unit_bytes(THREE, 0, 1, 2) + 3 * 7
    assert unit_bytes(costs, 2, 3) == unit_bytes(THREE, 2, 3)
    assert unit_bytes(costs, 2, 3, 2) == unit_bytes(THREE, 2, 3, 2) + 7  # one is being stored
    assert unit_bytes(costs, 0, 3, 2) == unit_bytes(THREE, 0, 3, 2)


def test_shard_is_slab_and_unit():
    costs = [replace(cost, param_bytes=128) for cost in THREE]
    assert shard_bytes(costs, 0, 2, 3) == 256 + unit_bytes(costs, 0, 2, 3)


@pytest.mark.parametrize("function", [slab_bytes, unit_bytes, shard_bytes])
def test_a_shard_outside_the_layers_is_refused(function):
    for first, last in ((0, 0), (2, 1), (-1, 2), (0, 4)):
        with refused(ValueError, says=f"shard [{first}, {last})"):
            function(THREE, first, last)


def test_a_number_of_micro_batches_below_one_is_refused():
    for number in (0, -1, 1.0, True):
        with refused(ValueError, says="num_micro_batches"):
            unit_bytes(THREE, 0, 1, number)
        with refused(ValueError, says="Budget.num_micro_batches"):
            Budget(memory_bytes=1, num_micro_batches=number)


BAD_COSTS = (
    *(("index", -1), ("param_bytes", -1), ("peak_bytes", 1.5), ("saved_bytes", True)),
    *(("forward_s", -0.1), ("backward_s", float("nan")), ("shares_with", (0, 1))),
)
BAD_BUDGETS = (
    *(("memory_bytes", value) for value in (0, -1, 1.5, True, "1GiB")),
    ("buffer_bytes", -1),
    *((rate, value) for rate in ("link_bytes_per_s", "update_bytes_per_s") for value in (0, -1.0, float("nan"))),
    *(("unit_s", value) for value in (-0.1, float("inf"), float("nan"))),
)


def test_costs_and_budgets_that_cannot_be_are_refused():
    for field, value in BAD_COSTS:
        with refused(ValueError, says=f"LayerCost.{field}"):
            replace(ZERO, **{field: value})
    for field, value in BAD_BUDGETS:
        with refused(ValueError, says=f"Budget.{field}"):
            Budget(**({"memory_bytes": 1} | {field: value}))


def test_values_are_frozen_and_keyword_only():
    with pytest.raises(FrozenInstanceError):
        ZERO.index = 1
    with pytest.raises(TypeError):
        Budget(1)


def test_layer_too_large_says_what_and_how_much_and_survives_pickling():
    error = LayerTooLarge.of(replace(ZERO, index=3, name="head"), 2048, 1024)
    again = pickle.loads(pickle.dumps(error))
    for each in (error, again):
        assert isinstance(each, ValueError)
        assert (each.layer, each.needed_bytes, each.available_bytes) == ("head", 2048, 1024)
        names(each, layer="head", says="2048 1024")


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


def zoo():
    """Layers whose costs add up in different ways: in place on a view, identity, saved masks, a big first gradient."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(50, 16),
        nn.Linear(16, 16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        Residual(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))),
        nn.Flatten(0, 1),
        nn.BatchNorm1d(16),
        nn.Identity(),
        nn.Linear(16, 50),
    )


def run_metered(model, first, last, inputs, target, num_micro_batches):
    """Peak of what layers [first, last) create in some passes, as an engine would run them."""
    x = inputs
    for layer in model[:first]:
        x = layer(x)
    incoming = None if last == len(model) else torch.ones_like(model[first:last](x.detach().clone()))
    model.zero_grad()
    # No leaves, which a layer could not work on in place; copied before, as what enters a device is.
    entering = [x.detach().requires_grad_(x.requires_grad).clone() for _ in range(num_micro_batches)]
    with MemoryMeter() as meter:
        while entering:
            output = model[first:last](entering.pop())
            if last == len(model):
                output = nn.functional.cross_entropy(output, target)
            if output.requires_grad:
                output.backward(incoming)
            del output
        return meter.peak_bytes


def made_outside(costs, first, last, num_micro_batches):
    """The part of `unit_bytes` that enters or leaves, which `run_metered` does not see."""
    entering = costs[first].input_bytes + costs[last - 1].target_bytes
    outgoing = costs[last - 1].output_bytes if last < len(costs) else 0
    leaving = max(costs[first].input_bytes, outgoing) if num_micro_batches > 1 else 0
    return min(num_micro_batches, 2) * (entering + outgoing) + leaving


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_unit_bytes_bounds_the_measured_peak_of_every_shard(num_micro_batches):
    model, inputs, target = zoo(), torch.randint(50, (3, 5)), torch.randint(50, (15,))
    costs = profile(model, inputs, target, nn.CrossEntropyLoss())
    for first, last in itertools.combinations(range(len(model) + 1), 2):
        peak_bytes = run_metered(model, first, last, inputs, target, num_micro_batches)
        inside_bytes = unit_bytes(costs, first, last, num_micro_batches)
        inside_bytes -= made_outside(costs, first, last, num_micro_batches)
        assert inside_bytes / 5 <= peak_bytes <= inside_bytes, (first, last)


def test_a_lone_layer_takes_exactly_its_peak():
    model, inputs, target = zoo(), torch.randint(50, (3, 5)), torch.randint(50, (15,))
    for cost in profile(model, inputs, target, nn.CrossEntropyLoss()):
        if not cost.changes_input:  # its copy of the input is no view here
            assert cost.peak_bytes == run_metered(model, cost.index, cost.index + 1, inputs, target, 1)


def assert_table_is_right(costs):
    for num_micro_batches in (1, 2, 5):
        table = ShardTable.of(costs, num_micro_batches)
        for first, last in itertools.combinations(range(len(costs) + 1), 2):
            slab = slab_bytes(costs, first, last)
            assert table.slab[first, last] == slab
            assert table.forward[first, last] == slab + forward_unit_bytes(costs, first, last, num_micro_batches)
            assert table.full[first, last] == shard_bytes(costs, first, last, num_micro_batches)


@seeds(10)
def test_every_entry_is_what_the_functions_of_one_shard_say(seed):
    rng = random.Random(seed)
    for _ in range(10):
        assert_table_is_right(random_layers(rng, most=10))


@seeds(5, net=2)
def test_where_nothing_trains_the_last_shard_runs_forward_only_too(seed):
    assert_table_is_right([replace(cost, grad_bytes=0) for cost in random_layers(random.Random(seed), most=10)])


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


@seeds(10)
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


@seeds(10)
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


@seeds(10)
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
