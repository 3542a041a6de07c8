"""Plans ahead: bytes in DRAM, rates, micro-batches, what bounds several tasks."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import DeviceCost, HostOutOfMemory, predict_training, simulate
from hydra_engine.planning.ahead import Machine, Sample, plan_ahead, resized
from partitioners import (
    GPU,
    STATED_RATES,
    Balanced,
    LayerTooLarge,
    Optimal,
    Pilot,
    predict_step,
    profile,
    shard_bytes,
    slab_bytes,
)
from tests.refused import refused

KIB, MIB = 2**10, 2**20


def machine(**changes):
    settings = {
        "memory_bytes": 64 * MIB,
        "reserve_bytes": 0,
        "device": "cpu",
        "precision": "float32",
        "rates": STATED_RATES["cpu", "float32"],
        "link_bytes_per_s": 25e9,
        "dram_bytes_per_s": 50e9,
        "optimizer": "adamw",
    }
    return Machine(**(settings | changes))


def mlp(*, width=64, depth=4):
    """On meta: `depth` layers of width * (width + 1) parameters, and a batch of 8."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        return model, torch.randn(8, width), torch.randn(8, width), F.mse_loss


def ahead(sample=None, partitioner=None, options=None, **changes):
    return plan_ahead(Sample(*(sample or mlp())), machine(**changes), partitioner or Balanced(2), **(options or {}))


PARAMETERS = 4 * 64 * 65
BATCH_BYTES = 8 * 64 * 4


def test_shards_are_the_partition_with_the_bytes_of_the_costs():
    plan = ahead()
    assert [(shard.first, shard.last) for shard in plan.shards] == [(0, 2), (2, 4)]
    for shard in plan.shards:
        assert shard.slab_bytes == slab_bytes(plan.costs, shard.first, shard.last)
        assert shard.needed_bytes == shard_bytes(plan.costs, shard.first, shard.last)
    assert plan.step == predict_step(plan.costs, [2, 4], plan.machine.budget())


@pytest.mark.parametrize(("optimizer", "state_bytes"), [("adamw", 8), ("sgd", 0), ("sgd-momentum", 4)])
def test_float32_takes_weight_gradient_and_state(optimizer, state_bytes):
    dram = ahead(optimizer=optimizer).dram
    assert dram.num_parameters == PARAMETERS
    assert (dram.weight_bytes, dram.gradient_bytes) == (4 * PARAMETERS, 4 * PARAMETERS)
    assert dram.state_bytes == state_bytes * PARAMETERS
    assert dram.total_bytes == (8 + state_bytes) * PARAMETERS + dram.boundary_bytes


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_narrow_precision_takes_master_copy_gradient_and_state(precision):
    dram = ahead(precision=precision).dram
    assert dram.weight_bytes == (4 + 2) * PARAMETERS
    assert dram.gradient_bytes == 2 * PARAMETERS
    assert dram.parameter_bytes == 16 * PARAMETERS


def test_norms_and_the_loss_stay_in_float32():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(10))

        def forward(self, output, target):
            return (F.mse_loss(output, target) * self.scale).sum()

    with torch.device("meta"):
        sample = nn.Sequential(nn.LayerNorm(64)), torch.randn(8, 64), torch.randn(8, 64), Loss()
    dram = ahead(sample, Pilot(), precision="bfloat16").dram
    assert (dram.num_parameters, dram.weight_bytes, dram.gradient_bytes) == (138, 4 * 138, 4 * 138)


def test_frozen_parameters_take_their_streamed_bytes_only():
    model, *rest = mlp()
    model[0].requires_grad_(False)
    frozen, trained = PARAMETERS // 4, PARAMETERS * 3 // 4
    assert ahead((model, *rest)).dram.parameter_bytes == 4 * frozen + 16 * trained
    assert ahead((model, *rest), precision="bfloat16").dram.parameter_bytes == 2 * frozen + 16 * trained


def test_shared_parameters_and_repeated_layers_count_once():
    model, *rest = mlp()
    model[3].weight = model[0].weight
    assert ahead((model, *rest)).dram.num_parameters == PARAMETERS - 64 * 64
    layer = nn.Linear(64, 64, device="meta")
    assert ahead(([layer, layer], *rest)).dram.num_parameters == PARAMETERS // 4


def test_buffers_count_with_their_bytes():
    model, *rest = mlp()
    model.append(nn.BatchNorm1d(64, device="meta"))
    assert ahead((model, *rest)).dram.buffer_bytes == 2 * 64 * 4 + 8


def test_boundaries_are_what_enters_the_shards_and_its_gradients():
    # Two shards: the batch, the target, one boundary and its gradient.
    assert ahead().dram.boundary_bytes == 4 * BATCH_BYTES
    assert ahead(options={"num_micro_batches": 2}).dram.boundary_bytes == 4 * BATCH_BYTES
    assert ahead(options={"num_samples": 16}).dram.boundary_bytes == 8 * BATCH_BYTES


def test_host_optimizer_moves_its_state_and_what_is_streamed():
    assert machine().update_traffic_bytes == 28
    assert machine(precision="bfloat16").update_traffic_bytes == 28  # a narrow gradient read, a narrow copy written
    assert machine(optimizer="sgd").update_traffic_bytes == 12
    for precision in ("float32", "bfloat16"):  # both in terms of float32 gradients
        plan = ahead(precision=precision, dram_bytes_per_s=1e9)
        assert plan.step.update_s == pytest.approx(PARAMETERS * plan.machine.update_traffic_bytes / 1e9)


def test_reserved_memory_is_not_planned_with():
    largest = max(shard.needed_bytes for shard in ahead().shards)
    assert len(ahead(memory_bytes=largest + MIB, reserve_bytes=MIB).shards) == 2
    with refused(ValueError, says="num_shards 2"):
        ahead(memory_bytes=largest + MIB, reserve_bytes=MIB + 1)
    with pytest.raises(LayerTooLarge):
        ahead(memory_bytes=MIB + KIB, reserve_bytes=MIB)


def test_a_batch_of_another_size_costs_what_such_a_batch_costs():
    model, inputs, target, loss_fn = mlp()
    of_32 = profile(model, inputs.repeat(4, 1), target.repeat(4, 1), loss_fn, time_layers=False)
    plan = ahead(options={"num_samples": 32})
    assert (plan.num_samples, plan.costs) == (32, of_32)
    assert ahead(options={"num_samples": 32, "num_micro_batches": 4}).costs == ahead().costs
    # Of 9, 9, 9 and 5 samples the largest counts.
    assert ahead(options={"num_samples": 33, "num_micro_batches": 4}).costs[0].input_bytes == 9 * 64 * 4


def test_resized_changes_tensors_whose_dim_0_is_the_batch():
    value = {
        "x": torch.ones(8, 3),
        "n": 8,
        "scalar": torch.tensor(8),
        "other": torch.ones(3, 8),
        "k": torch.ones(8).long(),
    }
    new = resized(value, 8, 2)
    assert [tuple(new[key].shape) for key in ("x", "scalar", "other", "k")] == [(2, 3), (), (3, 8), (2,)]
    assert (new["n"], new["x"].device.type, new["k"].dtype) == (8, "meta", torch.int64)
    assert new["other"] is value["other"]
    assert resized(value, 8, 8)["x"] is value["x"]


def test_auto_takes_the_power_of_two_with_the_least_predicted_step():
    options = {"num_samples": 64}
    best = ahead(partitioner=Optimal(), options=options | {"num_micro_batches": None})
    each = [ahead(partitioner=Optimal(), options=options | {"num_micro_batches": 2**k}) for k in range(7)]
    assert best.step == min((plan.step for plan in each), key=lambda step: step.total_s)
    assert best.num_micro_batches in [plan.num_micro_batches for plan in each]


def test_auto_splits_a_batch_that_does_not_fit_whole():
    options = {"num_samples": 1024}
    memory_bytes = 512 * KIB
    with pytest.raises(LayerTooLarge):
        ahead(partitioner=Optimal(), options=options, memory_bytes=memory_bytes)
    plan = ahead(partitioner=Optimal(), options=options | {"num_micro_batches": None}, memory_bytes=memory_bytes)
    assert plan.num_micro_batches > 1
    assert max(shard.needed_bytes for shard in plan.shards) <= memory_bytes


def test_micro_batches_are_refused_by_value():
    with refused(ValueError, says="micro-batches 9 8"):
        ahead(options={"num_micro_batches": 9})


def test_a_batch_that_no_tensor_holds_cannot_be_resized():
    with refused(ValueError, says="batch 4 inputs"):
        ahead(([nn.Flatten(0)], torch.tensor(1.0), torch.zeros(1), F.mse_loss), options={"num_samples": 4})


def test_seconds_of_shards_add_up_to_the_layers():
    plan = ahead(options={"num_micro_batches": 2})
    forward = sum(shard.forward_s for shard in plan.shards)
    backward = sum(shard.backward_s for shard in plan.shards)
    assert forward == pytest.approx(2 * sum(cost.forward_s for cost in plan.costs))
    assert backward == pytest.approx(2 * sum(cost.backward_s for cost in plan.costs))
    repeated = forward - plan.shards[-1].forward_s  # the last shard runs forward and backward at once
    assert plan.step.compute_s == pytest.approx(forward + repeated + backward)


def test_devices_and_links_count_as_often_as_they_are_there_the_host_once():
    plan = ahead()
    step = plan.step
    for number in (1, 2, 4, 1000):
        several = replace(plan, machine=machine(num_devices=number)).limits()
        assert [limit.steps_per_s for limit in several] == sorted(limit.steps_per_s for limit in several)
        assert {limit.resource: limit.steps_per_s for limit in several} == pytest.approx(
            {"devices": number / step.compute_s, "links": number / step.link_s, "host optimizer": 1 / step.update_s}
        )
    assert several[0].resource == "host optimizer"


def test_a_frozen_model_has_no_host_optimizer_to_wait_for():
    model, *rest = mlp()
    model.requires_grad_(False)
    plan = ahead((model, *rest))
    assert plan.limits()[-1] == ("host optimizer", float("inf"))
    assert plan.dram.parameter_bytes == 4 * PARAMETERS


@pytest.mark.parametrize(
    ("inputs", "num_tokens"),
    [(torch.zeros(8, 16, dtype=torch.long), 128), (torch.zeros(8, 16), None), (torch.zeros(8, dtype=torch.long), None)],
)
def test_tokens_are_integers_in_two_dimensions(inputs, num_tokens):
    class Any(nn.Module):
        def forward(self, x):
            return x.float()

    assert ahead(([Any()], inputs, inputs.float(), F.mse_loss), Pilot()).num_tokens == num_tokens


def test_a_gpu_is_estimated_with_its_kernels():
    with torch.device("meta"):
        sample = [nn.Linear(64, 64), nn.Dropout(0.5)], torch.randn(8, 64), torch.randn(8, 64), F.mse_loss
    cpu, gpu = (ahead(sample, Pilot(), device=device).costs[1].saved_bytes for device in ("cpu", GPU))
    assert cpu - gpu == 8 * 64 * 3  # a mask of booleans


def test_shards_follow_one_another():
    shards = ahead(partitioner=Optimal(), memory_bytes=128 * KIB).shards
    assert len(shards) > 1
    assert all(a.last == b.first for a, b in pairwise(shards))


class TestPredictTraining:
    """The one call from Python."""

    def plan(self, model=None, inputs=None, **options):
        made, *batch, loss_fn = mlp()
        settings = {"memory": "64MiB", "device": "cpu", "partitioner": "pilot"} | options
        return predict_training(
            model or made, (inputs if inputs is not None else batch[0], batch[1]), loss_fn, **settings
        )

    @pytest.mark.parametrize(
        ("batch", "loss_fn", "says"),
        [
            ([(1, 2)] * 3, F.mse_loss, "batch: list next(iter(loader))"),
            ((torch.ones(8, 64), torch.ones(8, 64)), nn.MSELoss, "loss_fn: MSELoss instance"),
        ],
    )
    def test_what_is_no_batch_or_no_loss_is_refused(self, batch, loss_fn, says):
        with refused(TypeError, says=says):
            predict_training(mlp()[0], batch, loss_fn, memory="64MiB")

    def test_is_the_plan_of_the_command(self):
        plan = self.plan()
        assert plan == ahead(partitioner=Pilot())
        assert plan.step == predict_step(plan.costs, [4], plan.machine.budget())

    @pytest.mark.parametrize(("devices", "num_tasks"), [(1, 1), (1, 3), (2, 3)])
    def test_predicts_a_step_and_a_run(self, devices, num_tasks):
        plan = self.plan(devices=devices, link_bytes_per_s=1e6)
        found = plan.simulate(num_tasks, 10)
        assert found.makespan_s >= found.bound_s > 0
        assert plan.step_s == pytest.approx(plan.simulate(num_steps=12).makespan_s / 12, rel=0.3)
        costs = [plan.task_cost(str(k), 10) for k in range(num_tasks)]
        link = DeviceCost(load_bytes_per_s=1e6, store_bytes_per_s=1e6)
        assert found.makespan_s == simulate(costs, [link] * devices).makespan_s

    def test_early_release_shortens_a_step_that_the_host_bounds(self):
        options = {"partitioner": Balanced(4), "dram_bytes_per_s": 1e7}
        late, early = self.plan(**options), self.plan(early_release="all", **options)
        assert early.step_s < late.step_s
        assert early.dram == late.dram

    def test_a_forward_of_its_own_becomes_layers(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

            def forward(self, x):
                return self.b(torch.relu(self.a(x)))

        for make in (torch.device("meta"), torch.device("cpu")):
            with make:
                net = Net()
                found = self.plan(net, torch.ones(8, 64))
            assert [cost.name for cost in found.costs] == ["a (Linear)", "b (Linear)"]
            assert found.own_forward == "Net"
            assert list(net.state_dict()) == ["a.weight", "a.bias", "b.weight", "b.bias"]
            assert next(net.parameters()).device == make

    @pytest.mark.parametrize(
        ("options", "error", "says"),
        [
            ({"memory": "1KiB"}, LayerTooLarge, "0 (Linear)"),
            ({"dram": "100KiB"}, HostOutOfMemory, "dram=100"),
            ({"optimizer": "lion"}, ValueError, "'lion' adamw"),
            ({"device": "tpu"}, ValueError, "'tpu' cuda"),
            ({"precision": "int8"}, ValueError, "'int8' bfloat16"),
            ({"early_release": "late"}, ValueError, "early_release 'late'"),
            ({"devices": 0}, ValueError, "devices: 0"),
        ],
    )
    def test_refuses_what_cannot_be(self, options, error, says):
        with refused(error, says=says):
            self.plan(**options)


@pytest.mark.parametrize(("precision", "home_bytes"), [("float32", 16), ("bfloat16", 16)])
def test_layers_at_home_are_told_where_they_make_steps_shorter(precision, home_bytes):
    slow = {"link_bytes_per_s": 1e6, "dram_bytes_per_s": 1e8, "precision": precision}
    plan = ahead(**slow)
    found = plan.with_homes
    assert (found.homes, found.boundaries) == (4, (4,))
    assert found.step_s < found.in_dram_s
    run, width = plan.machine.run_at_hand(), 4 if precision == "float32" else 2
    assert run.home_times == home_bytes / width
    assert run.home_update_bytes_per_s == pytest.approx(1e8 * 4 / 28), "the host's own rate"


def test_homes_of_plans_ahead_take_the_rate_of_a_gpus_memory():
    run = machine(device=GPU, rates=STATED_RATES[GPU, "float32"]).run_at_hand()
    assert run.home_update_bytes_per_s == pytest.approx(0.75 * STATED_RATES[GPU, "float32"].memory_bytes_per_s / 7)


@pytest.mark.parametrize(
    "changes",
    [{"early_release": True, "link_bytes_per_s": 1e6}, {"link_bytes_per_s": 1e15, "dram_bytes_per_s": 1e15}],
)
def test_no_layers_at_home_are_told_where_there_are_none_or_they_gain_nothing(changes):
    assert ahead(**changes).with_homes is None
