"""A step's predicted seconds are the documented chain of units, part by part."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from partitioners import Budget, StepTime, predict_step
from partitioners.steptime import StepModel
from tests.partitions import (
    PLENTY_BYTES,
    layers,
    partitions,
    random_device,
    random_layers,
    seeds,
    slow_parts,
    slow_step_s,
)
from tests.refused import refused

# Every figure is its own power of two, so sums are exact, and one byte takes a second of the link.
TWO = layers(
    {"param_bytes": 64, "grad_bytes": 4, "output_bytes": 8, "forward_s": 1024.0, "backward_s": 2048.0},
    {"param_bytes": 128, "grad_bytes": 16, "input_bytes": 8, "forward_s": 4096.0, "backward_s": 8192.0},
)
SLOW = Budget(memory_bytes=PLENTY_BYTES, link_bytes_per_s=1.0, update_bytes_per_s=0.5)


def test_one_shard_computes_once_and_shows_its_load_gradients_and_update():
    step = predict_step(TWO, [2], SLOW)
    assert step.compute_s == 1024 + 2048 + 4096 + 8192  # fb0 alone: no forward runs twice
    assert step.exposed_load_s == 64 + 128
    assert step.exposed_boundary_s == 4 + 16
    assert step.exposed_update_s == step.update_s == 2 * (4 + 16)
    assert step.link_s == 64 + 128  # up; down are 20 bytes of gradients
    assert step.total_s == 15360 + 192 + 20 + 40


def test_two_shards_run_the_lower_forward_twice_and_hide_what_they_load():
    step = predict_step(TWO, [1, 2], SLOW)
    f0, fb1, b0 = 1024, 4096 + 8192, 1024 + 2048
    assert step.compute_s == f0 + fb1 + b0
    assert step.exposed_load_s == 64  # f0's; fb1's 128 and b0's 64 are loaded while f0 and fb1 compute
    f0_moves, fb1_moves, b0_moves = 8, 8 + 8 + 16, 8 + 4  # output; input, its gradient, gradients; gradient, gradients
    assert step.exposed_boundary_s == f0_moves + fb1_moves + b0_moves
    assert step.exposed_update_s == 2 * 4  # the lower shard's; the upper's runs under f0
    assert step.update_s == 2 * (4 + 16)
    assert step.link_s == (64 + 0) + (128 + 8) + (64 + 8)  # up: f0, fb1, b0
    assert step.total_s == f0 + fb1 + b0 + 64 + 52 + 8


def test_without_double_buffering_every_load_is_exposed():
    step = predict_step(TWO, [1, 2], replace(SLOW, double_buffer=False))
    assert step.exposed_load_s == 64 + 128 + 64
    assert step.total_s == predict_step(TWO, [1, 2], SLOW).total_s + 128 + 64


def test_a_load_is_hidden_only_where_it_fits_beside_the_unit_before():
    # f0 needs 64 + what a unit holds, 8 of incoming gradient, as no forward was measured alone; fb1 needs 128 + 8.
    beside_f0, beside_fb1 = 128 + (64 + 8 + 8), 64 + (128 + 8 + 4)
    costs = [replace(TWO[0], peak_bytes=8), replace(TWO[1], peak_bytes=4)]
    assert beside_fb1 < beside_f0
    for memory_bytes, exposed_s in (
        (beside_f0, 64),
        (beside_f0 - 1, 64 + 128),
        (beside_fb1, 64 + 128),
        (beside_fb1 - 1, 64 + 128 + 64),
    ):
        assert predict_step(costs, [1, 2], replace(SLOW, memory_bytes=memory_bytes)).exposed_load_s == exposed_s


def test_a_measured_forward_leaves_more_room_than_the_unit_that_runs_backward():
    costs = [replace(TWO[0], peak_bytes=800, forward_peak_bytes=24), TWO[1]]
    beside_f0, beside_fb1 = 128 + (64 + 24), 64 + (128 + 8)
    assert beside_fb1 < beside_f0
    for memory_bytes, exposed_s in ((beside_f0, 64), (beside_f0 - 1, 64 + 128)):
        assert predict_step(costs, [1, 2], replace(SLOW, memory_bytes=memory_bytes)).exposed_load_s == exposed_s


def test_what_takes_longer_than_the_unit_before_is_exposed():
    quick = [replace(TWO[0], forward_s=32.0), replace(TWO[1], forward_s=16.0, backward_s=0.0)]
    step = predict_step(quick, [1, 2], SLOW)
    f0_span, fb1_span = 32 + 8, 16 + 32  # with what f0 stores; with what fb1 loads, stores and its gradients
    assert step.exposed_load_s == 64 + (128 - f0_span) + (64 - fb1_span)


def test_micro_batches_pass_load_compute_and_store_like_a_pipeline():
    costs = layers(
        {"grad_bytes": 1, "output_bytes": 8, "forward_s": 3.0},
        {"grad_bytes": 1, "input_bytes": 8, "forward_s": 16.0, "backward_s": 16.0, "target_bytes": 2},
    )
    step = predict_step(costs, [1, 2], replace(SLOW, num_micro_batches=4, update_bytes_per_s=math.inf))
    f0 = 3 + 4 * 8  # the link is slower: four stores after the first compute
    fb1 = (8 + 2) + 4 * 32 + 8 + 1  # compute is slower: first load, four computes, last store; gradients
    b0 = 4 * 8 + 3 + 1  # nothing leaves the first shard but gradients
    assert step.compute_s == 4 * 3 + 4 * 32 + 4 * 3
    assert step.exposed_boundary_s == f0 + fb1 + b0 - step.compute_s
    assert step.total_s == f0 + fb1 + b0
    assert step.link_s == 4 * (8 + 2) + 4 * 8  # up: fb1, b0; down are as many of each but the targets
    assert step.update_s == step.exposed_update_s == step.exposed_load_s == 0


def test_each_unit_has_a_fixed_cost():
    for boundaries, num_units in (([2], 1), ([1, 2], 3)):
        free, paid = predict_step(TWO, boundaries, SLOW), predict_step(TWO, boundaries, replace(SLOW, unit_s=512.0))
        assert paid.compute_s == free.compute_s + 512 * num_units
        assert paid.total_s == free.total_s + 512 * num_units


def test_frozen_shards_below_run_no_backward():
    frozen = [replace(TWO[0], grad_bytes=0), TWO[1]]
    step = predict_step(frozen, [1, 2], SLOW)
    assert step.compute_s == 1024 + 4096 + 8192  # f0, fb1
    assert step.exposed_load_s == 64
    assert step.exposed_boundary_s == 8 + 8 + 16  # no gradient of fb1's input
    assert step.update_s == 2 * 16
    assert step.exposed_update_s == 0  # it runs under f0
    assert step.link_s == 64 + 128 + 8


def test_a_frozen_layer_above_a_trainable_one_passes_its_gradient_on():
    frozen = [TWO[0], replace(TWO[1], grad_bytes=0)]
    step = predict_step(frozen, [1, 2], SLOW)
    assert step.compute_s == 1024 + (4096 + 8192) + (1024 + 2048)
    assert step.exposed_boundary_s == 8 + (8 + 8) + (8 + 4)


def test_a_step_takes_no_less_than_the_whole_optimizer():
    step = predict_step(TWO, [1, 2], replace(SLOW, update_bytes_per_s=2**-12))
    assert step.update_s == step.total_s == 20 * 4096
    assert step.exposed_update_s == step.total_s - step.compute_s - step.exposed_load_s - step.exposed_boundary_s


def test_the_optimizer_steps_the_bytes_that_were_accumulated():
    wide = [replace(cost, accumulated_bytes=2 * cost.grad_bytes) for cost in TWO]
    assert predict_step(wide, [2], SLOW).update_s == 2 * predict_step(TWO, [2], SLOW).update_s


def test_bound_is_the_resource_that_is_busy_longest():
    assert predict_step(TWO, [1, 2], SLOW).bound == "compute"
    assert predict_step(TWO, [1, 2], replace(SLOW, link_bytes_per_s=2**-12)).bound == "link"
    assert predict_step(TWO, [1, 2], replace(SLOW, update_bytes_per_s=2**-12)).bound == "host optimizer"


def test_link_seconds_are_those_of_the_busier_direction():
    heavy = [replace(TWO[0], param_bytes=0, grad_bytes=0), replace(TWO[1], param_bytes=0, grad_bytes=1024)]
    assert predict_step(heavy, [1, 2], SLOW).link_s == 8 + 1024  # down: f0's output, fb1's gradients; up: 8


@seeds(10)
def test_steps_equal_a_walk_along_the_units_and_their_parts_add_up(seed):
    rng = random.Random(seed)
    for _ in range(15):
        costs = random_layers(rng)
        budget = random_device(rng, costs)
        boundaries = rng.choice(list(partitions(len(costs))))
        step = predict_step(costs, boundaries, budget)
        compute_s, load_s, boundary_s, _ = slow_parts(costs, boundaries, budget)
        near = {"rel": 1e-9, "abs": 1e-9}
        assert step.total_s == pytest.approx(slow_step_s(costs, boundaries, budget), **near)
        assert step.compute_s == pytest.approx(compute_s, **near)
        assert step.exposed_load_s == pytest.approx(load_s, **near)
        assert step.exposed_boundary_s == pytest.approx(boundary_s, **near)
        parts_s = (step.compute_s, step.exposed_load_s, step.exposed_boundary_s, step.exposed_update_s)
        assert sum(parts_s) == pytest.approx(step.total_s, **near)
        assert all(-1e-9 <= seconds <= step.total_s + 1e-9 for seconds in parts_s)


@seeds(5, net=2)
def test_shards_and_neighbours_add_up_to_the_chain(seed):
    rng = random.Random(seed)
    for _ in range(15):
        costs = random_layers(rng)
        budget = random_device(rng, costs)
        model = StepModel(costs, budget)
        assert model.num_layers == len(costs)
        for boundaries in partitions(len(costs)):
            starts = [0, *boundaries[:-1]]
            ends = np.array(boundaries)[:, None]
            chain_s = (model.starts_s(ends[0]) + sum(map(model.shards_s, starts, ends))).item()
            chain_s += sum(map(float, map(model.exposed_loads, starts, starts[1:], boundaries[1:])))
            step = model.predict(boundaries)
            assert step.total_s == pytest.approx(max(chain_s, step.update_s), rel=1e-9, abs=1e-9)


def test_a_free_link_and_optimizer_leave_compute():
    step = predict_step(TWO, [1, 2], Budget(memory_bytes=1))
    nothing = dict.fromkeys(("exposed_load_s", "exposed_boundary_s", "exposed_update_s", "link_s", "update_s"), 0.0)
    assert step == StepTime(total_s=16384.0, compute_s=16384.0, **nothing)


@pytest.mark.parametrize("boundaries", [[], [1], [2, 1], [1, 1, 2], [0, 2], [-1, 2], [1, 3], [3]])
def test_what_is_no_partition_is_refused(boundaries):
    with refused(ValueError, says="boundaries 2"):
        predict_step(TWO, boundaries, SLOW)


def test_no_layers_are_no_partition():
    with refused(ValueError, says="boundaries 0"):
        predict_step([], [], SLOW)
