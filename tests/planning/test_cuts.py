"""Cuts by predicted time: none of those compared is faster, and what is not simulated could not be."""

import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import DeviceCost, EmulatedDevice, HostCost, ModelOrchestrator, ModelTask, simulate
from hydra_engine.planning import cuts
from hydra_engine.planning.cuts import LEAST_GAIN, MOST_HOMES, CutChoice, RunAtHand, least_round_s, load_of, round_s
from hydra_engine.planning.planner import in_round_figures
from hydra_engine.texts import duration
from partitioners import Balanced, Budget, Fastest, LayerTooLarge, Optimal, Pilot, Presharded, shard_bytes
from tests.partitions import layers, random_layers, seeds
from tests.refused import refused

# A block of a transformer that takes 1 s forward and 2 s backward, and 8 s to load.
BLOCK = {
    "param_bytes": 64,
    "grad_bytes": 64,
    "saved_bytes": 64,
    "peak_bytes": 128,
    "forward_peak_bytes": 64,
    "forward_s": 1.0,
    "backward_s": 2.0,
}


def choice(costs, memory_bytes, *, link=8.0, update=16.0, number=1, num_tasks=1, **run):
    budget = Budget(
        memory_bytes=memory_bytes, num_micro_batches=number, link_bytes_per_s=link or 1e15, update_bytes_per_s=update
    )
    device = DeviceCost(load_bytes_per_s=link, store_bytes_per_s=link, memory_bytes=memory_bytes)
    return CutChoice(
        costs=costs,
        candidates=Fastest().candidates(costs, budget),
        budget=budget,
        run=RunAtHand(device=device, num_tasks=num_tasks, **run),
    )


def random_choice(seed):
    rng = random.Random(seed)
    costs = random_layers(rng, most=10)
    number = rng.choice((1, 2))
    least = max(shard_bytes(costs, k, k + 1, number) for k in range(len(costs)))
    return choice(
        costs,
        int(max(1, least) * rng.uniform(1, 6)),
        link=rng.choice((None, 1e3, 1e4)),
        update=rng.choice((1e3, 1e4, 1e9)),
        number=number,
        num_tasks=rng.choice((1, 2, 5)),
        num_devices=rng.choice((1, 2)),
        host=HostCost(optimizer_threads=rng.choice((1, 2)), cores=rng.choice((None, 2.0))),
        home_times=4.0,
        home_update_bytes_per_s=1e5,
    )


@seeds(15, net=5)
def test_no_cut_is_predicted_to_be_faster(seed):
    found = random_choice(seed)
    best = found.fastest()
    others = [Pilot(), Optimal(), *(Balanced(number) for number in range(1, 17))]
    for partitioner in others:
        try:
            boundaries = partitioner.partition(found.costs, found.budget)
        except (LayerTooLarge, ValueError):  # not in so many shards
            continue
        assert best.step_s <= 1.001 * found.predicted(boundaries).step_s
    assert best.step_s == found.predicted(best.boundaries).step_s
    assert min(found.predicted(each).step_s for each in found.candidates) >= best.step_s / 1.001


@seeds(15, net=5)
def test_no_run_is_faster_than_the_bound(seed):
    found = random_choice(seed)
    run = replace(found.run, num_devices=1, num_tasks=found.run.tasks_per_device)
    for boundaries in found.candidates:
        task = found.cost(boundaries, "t", 12, homes=seed % 3 * len(found.costs) // 2)
        tasks = [replace(task, name=str(k), num_micro_batches=1) for k in range(run.num_tasks)]
        makespan_s = simulate(tasks, [run.device], host=run.host).makespan_s
        # Of the last step, gradients and updates leave after it; of the first, nothing came before.
        assert makespan_s >= 0.999 * 11 * least_round_s(task, run)


def test_one_task_is_cut_where_copies_and_updates_hide():
    """All of 8 blocks takes 24 s; loaded twice, but for the last shard, and updated at half of a load's rate."""
    costs = layers(*([BLOCK] * 8))
    alone = choice(costs, 4096, link=64.0, update=64.0)
    best = alone.fastest()
    assert len(best.boundaries) > 2
    assert alone.predicted([8]).step_s == 24 + 8 + 8 + 8  # load, then compute, gradients, update
    assert best.step_s < 40
    assert best.fewest == (1, 48.0)
    assert str(best).startswith(
        f"{len(best.boundaries)} shards: a step takes {best.step_s:.3g} s by prediction (device "
    )
    assert str(best).endswith(f"the least of {len(alone.candidates)} cuts; cut into 1, 48 s")


@pytest.mark.parametrize("num_tasks", [2, 4, 9])
def test_tasks_that_hide_one_another_keep_their_models_whole(num_tasks):
    found = choice(layers(*([BLOCK] * 8)), 4096, link=64.0, update=64.0, num_tasks=num_tasks)
    best = found.fastest()
    assert best.boundaries == (8,)
    assert best.step_s == pytest.approx(24 * min(num_tasks, 4), rel=0.2)


def test_a_model_that_fits_stays_whole_where_all_share_one_core():
    costs = layers(*([BLOCK] * 8))
    found = choice(costs, 4096, link=1e4, update=64.0, host=HostCost(cores=1))
    shared = replace(found, run=replace(found.run, device=replace(found.run.device, copies_compute=True)))
    assert shared.fastest().boundaries == (8,)


def test_devices_share_the_host():
    """Two tasks on two devices have half of the host each."""
    costs = layers(*([BLOCK] * 8))
    one = choice(costs, 4096, update=8.0)
    two = choice(costs, 4096, update=4.0, num_tasks=2, num_devices=2)
    [alone, beside] = (round_s(found.cost([8]), found.run) for found in (one, two))
    assert two.run.tasks_per_device == 1
    assert beside == pytest.approx(alone + 3 * 512 / 8)  # its own, at half of the rate, and the other's


def test_layers_at_home_take_bytes_of_graphs_and_slabs_and_nothing_of_the_link():
    costs = layers(*([BLOCK] * 4))
    found = choice(costs, 1000, link=64.0, home_times=4.0, home_update_bytes_per_s=64.0)
    task = found.cost([1, 2, 3, 4], homes=3)
    assert (task.homes, task.home_bytes, task.home_update_s) == (3, (256.0,) * 4, (1.0,) * 4)
    assert task.frozen_bytes == (0,) * 4
    assert [*map(sorted, found.run.at_home(task))] == [[0, 1]]  # beside work of 128 and two slabs
    assert found.cost([2, 4], homes=3).homes == 1, "the shard of the third layer has one that is to have none"
    load = load_of(task, found.run)
    assert (load.up_s, load.down_s, load.update_s) == (2 * 64 / 64.0, 2 * 64 / 64.0, 2 * 64 / 16.0)
    # Beside homes, work and two slabs, 232 are free: for a graph and its slab, and for one of a shard at home.
    assert task.graph_bytes == (0, 64, 64, 0)
    assert load.device_s == 4 * 3 + 1 + 2 * 1.0
    assert found.cost([1, 2, 3, 4]).graph_bytes == (64, 64, 64, 0)


def test_a_layer_that_shares_a_weight_with_another_shards_has_no_home():
    tied = BLOCK | {"shared_bytes": 8}
    costs = layers(tied | {"shares_with": (1,)}, tied | {"shares_with": (0,)}, BLOCK)
    found = choice(costs, 4096, home_times=4.0)
    assert found.cost([1, 3], homes=3).home_bytes == (0, 0)
    assert found.cost([2, 3], homes=3).home_bytes == (512, 256)


HOMES = {"home_times": 4.0, "home_update_bytes_per_s": 1024.0}


def test_a_model_with_room_for_its_homes_is_whole_and_all_of_it_stays():
    found = choice(layers(*([BLOCK] * 8)), 8192, update=8.0, **HOMES)
    in_dram = found.fastest()
    best = found.with_homes(in_dram)
    assert (best.boundaries, best.homes, best.step_s) == ((8,), 8, 24 + 0.5)  # it computes, and updates 1,024 a second
    assert best.in_dram_s == in_dram.step_s > 64
    assert best == found.predicted([8], 8)._replace(num_cuts=in_dram.num_cuts, in_dram_s=in_dram.step_s)
    assert str(best).startswith(
        "1 shard, 8 layers to be at home on devices: a step takes 24.5 s by prediction (device "
    )
    assert str(best).endswith(f"; with all homes in DRAM, {duration(in_dram.step_s)}")


def test_no_layer_is_at_home_where_that_gains_little():
    quick = choice(layers(*([BLOCK] * 8)), 8192, link=1e6, update=1e6, home_times=4.0, home_update_bytes_per_s=1e6)
    small = choice(layers(*([BLOCK] * 8)), 512, link=64.0, update=64.0, **HOMES)
    for found in (quick, small):
        in_dram = found.fastest()
        assert found.with_homes(in_dram) is in_dram


@seeds(15, net=5)
def test_homes_are_chosen_by_few_simulations_the_same_each_time_and_are_never_slower(seed, monkeypatch):
    found, simulated = random_choice(seed), []
    in_dram, simulate = found.fastest(), cuts._round_s

    def counted(task, *options):
        simulated.append(task)
        return simulate(task, *options)

    monkeypatch.setattr(cuts, "_round_s", counted)
    best = found.with_homes(in_dram)
    assert len(simulated) <= MOST_HOMES
    assert best == found.with_homes(in_dram)
    assert best is in_dram or best.step_s * LEAST_GAIN <= best.in_dram_s <= in_dram.step_s
    assert best.step_s == found.predicted(best.boundaries, best.homes).step_s


def test_more_homes_are_chosen_the_more_room_there_is():
    """From none of eight blocks to all."""
    found = [choice(layers(*([BLOCK] * 8)), most, update=8.0, **HOMES) for most in range(512, 3072, 256)]
    best = [each.with_homes(each.fastest()) for each in found]
    assert [each.homes for each in best] == sorted(each.homes for each in best)
    assert (best[0].homes, best[-1].homes) == (0, 8)
    assert [each.step_s for each in best] == sorted((each.step_s for each in best), reverse=True)


def test_the_lowest_layer_alone_may_be_worth_its_home():
    """Compute hides all other loads and updates."""
    found = choice(layers(*([BLOCK] * 8)), 1536, link=64.0, update=64.0, **HOMES)
    best = found.with_homes(found.fastest())
    assert (best.homes, best.step_s, best.in_dram_s) == (1, 25.0, 27.0)


def test_homes_on_two_devices_are_compared_with_steps_that_are_spread():
    settings = {"link": 64.0, "update": 64.0, "num_devices": 2, **HOMES}
    spread = choice(layers(*([BLOCK] * 4)), 1000, number=4, **settings)
    assert spread.with_homes(spread.fastest()).homes == 0, "a step takes half as long on both"
    whole = choice(layers(*([BLOCK] * 4)), 1000, **settings)
    best = whole.with_homes(whole.fastest())
    [there] = whole.run.at_home(whole.cost(best.boundaries, homes=best.homes))
    assert {*there.values()} == {0, 1}


def test_figures_that_differ_by_little_choose_alike():
    budget = Budget(memory_bytes=1024, link_bytes_per_s=63.6, update_bytes_per_s=7.96)
    one, other = (layers(*([BLOCK | {"forward_s": seconds}] * 8)) for seconds in (1.01, 1.04))
    found = in_round_figures(one, budget)
    assert found == in_round_figures(other, replace(budget, link_bytes_per_s=64.4, update_bytes_per_s=8.04))
    assert (found[0][0].forward_s, found[1].link_bytes_per_s, found[1].update_bytes_per_s) == (1.0, 64.0, 8.0)


def test_seconds_are_of_all_micro_batches():
    costs = layers(*([BLOCK | {"input_bytes": 4, "output_bytes": 4}] * 3))
    found = choice(costs, 2048, number=4).cost([1, 3], "a", 7)
    assert found.unit_s == (4.0, 24.0, 12.0)
    assert found.boundary_bytes == (16, 16)
    assert (found.num_steps, found.num_micro_batches, found.load_bytes) == (7, 4, (64, 128))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())))


def planned(*names, memory="1MiB", bandwidth=10**9, of_all="auto", **options):
    batches = [(torch.ones(4, 32), torch.ones(4, 32))]
    tasks = [ModelTask(mlp(), F.mse_loss, batches, 0.1, name=name, seed=0, **options) for name in names]
    orchestra = ModelOrchestrator(tasks, devices=[EmulatedDevice(memory, bandwidth=bandwidth)], homes=of_all)
    orchestra.verbose = 0
    return orchestra.generate()


def test_a_plan_tells_what_was_predicted_and_tasks_alike_share_it():
    plan = planned("a", "b")
    one, two = plan.tasks.values()
    assert two.adopted_from == "a"
    assert one.boundaries == two.boundaries == [12]
    assert one.predicted_s == two.predicted_s > 0
    assert one.cut_because == two.cut_because
    assert f"a, b: {one.cut_because}" in str(plan).splitlines()
    assert "a step of 2 such tasks on a device takes" in one.cut_because


def test_a_plan_gives_layers_homes_where_a_slow_link_makes_that_gain():
    plan = planned("a", "b", bandwidth=10**6)
    for each in plan.tasks.values():
        assert each.homed_layers == {"emulated:0": 12}
        assert "12 layers to be at home on devices: a step of 2 such tasks" in each.cut_because
    assert "a: 12 layers at home on emulated:0" in str(plan).splitlines()
    assert plan.tasks["b"].adopted_from == "a"


@pytest.mark.parametrize("homes", [4, "device"])
def test_a_cut_with_layers_at_home_by_the_tasks_option_is_predicted_with_them(homes):
    slow = 10**4  # so that what layers were seen to take on a busy machine is next to nothing
    plan = planned("a", bandwidth=slow, homes=homes).tasks["a"]
    found = int(plan.cut_because.partition(" layers to be at home")[0].rpartition(" ")[2])
    assert plan.homed_layers == {"emulated:0": found}
    assert found == 12 if homes == "device" else 0 < found <= 4
    assert plan.predicted_s < planned("a", bandwidth=slow, homes="host").tasks["a"].predicted_s


@pytest.mark.parametrize(
    "options",
    [
        {"of_all": "host"},
        {"homes": "host"},
        {"bandwidth": None},
        {"ema_decay": 0.9},
        {"partitioner": Presharded([6, 12])},
        {"memory": "16KiB"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_all_homes_stay_in_dram(options):
    plan = planned("a", **{"bandwidth": 10**6, **options}).tasks["a"]
    assert (plan.homed_layers, plan.no_homes_because) == ({}, "")
    assert "at home" not in plan.cut_because


def test_what_a_task_asks_for_goes_before_the_orchestrators_homes():
    assert planned("a", of_all="host", homes=4, partitioner=Presharded([4, 12])).tasks["a"].homed_layers
    with refused(ValueError, says="homes 'device' 'auto'"):
        planned("a", of_all="device")


def test_a_cut_that_the_user_made_is_not_predicted():
    plan = planned("a", partitioner=Presharded([6, 12]))
    assert (plan.tasks["a"].predicted_s, plan.tasks["a"].cut_because) == (None, "")


def test_evaluations_are_cut_by_what_a_forward_takes():
    """Nothing is updated: a device that holds the model keeps it whole."""
    costs = [replace(cost, grad_bytes=0) for cost in layers(*([BLOCK] * 4))]
    assert Fastest().partition(costs, Budget(memory_bytes=4096, link_bytes_per_s=64.0, unit_s=0.1)) == [4]
