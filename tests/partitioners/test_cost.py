"""A shard's bytes are the documented sums, and bound what a shard was measured to take."""

import itertools
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from torch import nn

from partitioners import (
    Budget,
    LayerTooLarge,
    MemoryMeter,
    forward_unit_bytes,
    profile,
    shard_bytes,
    slab_bytes,
    unit_bytes,
)
from tests.partitions import ZERO

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


@pytest.mark.parametrize(("first", "last"), [(0, 0), (2, 1), (-1, 2), (0, 4)])
@pytest.mark.parametrize("function", [slab_bytes, unit_bytes, shard_bytes])
def test_a_shard_outside_the_layers_is_refused(function, first, last):
    with pytest.raises(ValueError, match=rf"shard: \[{first}, {last}\), limit: 0 <= first < last <= 3 layers"):
        function(THREE, first, last)


@pytest.mark.parametrize("num_micro_batches", [0, -1, 1.0, True])
def test_a_number_of_micro_batches_below_one_is_refused(num_micro_batches):
    with pytest.raises(ValueError, match="num_micro_batches: "):
        unit_bytes(THREE, 0, 1, num_micro_batches)
    with pytest.raises(ValueError, match=r"Budget\.num_micro_batches: "):
        Budget(memory_bytes=1, num_micro_batches=num_micro_batches)


BAD_COUNTS = (("index", -1), ("param_bytes", -1), ("peak_bytes", 1.5), ("saved_bytes", True))
BAD_TIMES = (("forward_s", -0.1), ("backward_s", float("nan")))


@pytest.mark.parametrize(("field", "value"), [*BAD_COUNTS, *BAD_TIMES, ("shares_with", (0, 1))])
def test_a_cost_that_cannot_be_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"LayerCost\.{field}: "):
        replace(ZERO, **{field: value})


BAD_BUDGETS = (
    *(("memory_bytes", value) for value in (0, -1, 1.5, True, "1GiB")),
    ("buffer_bytes", -1),
    *((rate, value) for rate in ("link_bytes_per_s", "update_bytes_per_s") for value in (0, -1.0, float("nan"))),
    *(("unit_s", value) for value in (-0.1, float("inf"), float("nan"))),
)


@pytest.mark.parametrize(("field", "value"), BAD_BUDGETS)
def test_a_budget_that_cannot_be_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"Budget\.{field}: "):
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
        assert "layer 3 (head): needs 2 KiB (2048 bytes)" in str(each)
        assert "available: 1 KiB (1024 bytes); give the device more memory" in str(each)


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
    costs = profile(model, inputs, target, nn.CrossEntropyLoss())
    for cost in costs:
        if not cost.changes_input:  # its copy of the input is no view here
            assert cost.peak_bytes == run_metered(model, cost.index, cost.index + 1, inputs, target, 1)
