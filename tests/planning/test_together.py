"""One plan for all tasks: the cuts with which the last of them is predicted to end soonest, and never other bits."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from hydra_engine import Callback, DeviceCost, HostCost, ModelTask, TaskCost
from hydra_engine.planning import cuts, planner
from hydra_engine.planning.cuts import LEAST_GAIN, PredictedRun, WholeRun
from hydra_engine.planning.simulate import PREDICTED_STEPS
from partitioners import Presharded
from tests import reference
from tests.exact import silent
from tests.partitions import seeds
from tests.refused import names
from tests.zoo import Block, Embed, next_byte_loss

SEED = 3


def cut_into(number, name, num_steps, update_s, load_bytes):
    """A task of six seconds a step, and as much again for recomputation below its last shard."""
    forward_s = 2.0 / number
    unit_s = [*[forward_s] * (number - 1), 3 * forward_s, *[3 * forward_s] * (number - 1)]
    return TaskCost(
        name=name,
        unit_s=unit_s,
        num_steps=num_steps,
        update_s=update_s / number,
        load_bytes=load_bytes / number,
        gradient_bytes=load_bytes / number,
    )


def run_of(rng, num_tasks):
    """Tasks that may be cut into one to four shards, the first cut being any of them."""
    options = []
    for k in range(num_tasks):
        figures = str(k), rng.randint(2, 5), rng.uniform(0.0, 8.0), rng.uniform(0.0, 4.0)
        options.append([cut_into(number, *figures) for number in rng.sample(range(1, 5), 4)])
    device = DeviceCost(load_bytes_per_s=1.0, store_bytes_per_s=1.0, unit_s=rng.uniform(0.0, 0.3))
    return WholeRun(options=options, devices=[device], host=HostCost(shares_dram=True))


@pytest.mark.rest
@seeds(12, net=2)
def test_the_search_is_near_the_best_of_all_cuts_and_never_worse_than_what_there_was(seed):
    run = run_of(random.Random(seed), 3)
    every = {chosen: run.makespan_s(chosen) for chosen in itertools.product(range(4), repeat=3)}
    found = run.best()
    assert found.makespan_s == every[found.chosen]
    assert found.before_s == every[0, 0, 0]
    assert found.makespan_s <= found.before_s
    least_s = min(every.values())
    assert found.makespan_s <= 1.05 * least_s  # tasks change their cuts one after the other
    if not any(found.chosen):
        assert found.before_s <= LEAST_GAIN * 1.05 * least_s
    assert run.best() == found


def test_tasks_that_are_alike_get_the_same_cut():
    options = [[cut_into(number, name, 3, 6.0, 1.0) for number in (1, 2, 4)] for name in "abc"]
    device = DeviceCost(load_bytes_per_s=1.0, store_bytes_per_s=1.0)
    found = WholeRun(options=options, devices=[device], host=HostCost()).best()
    assert len(set(found.chosen)) == 1


def test_what_may_be_simulated_is_bounded():
    run = run_of(random.Random(0), 3)
    first = (0, 0, 0)
    assert replace(run, most_units=0).best() == PredictedRun(first, run.least_s(first), run.least_s(first), 0)
    found = replace(run, most_units=run.num_units(first)).best()
    assert found == PredictedRun(first, run.makespan_s(first), run.makespan_s(first), 1)


def test_a_long_run_is_predicted_by_fewer_steps():
    options = [[cut_into(2, name, num_steps, 1.0, 1.0)] for name, num_steps in (("a", 10_000), ("b", 5_000))]
    run = WholeRun(options=options, devices=[DeviceCost()])
    assert run.num_units((0, 0)) == pytest.approx(cuts.RUN_UNITS, abs=6)


def spread_task(name, num_steps, numbers):
    """A task of one shard and four seconds a step, in each of these numbers of micro-batches."""
    return [TaskCost(name=name, unit_s=(4.0,), num_steps=num_steps, num_micro_batches=number) for number in numbers]


def test_micro_batches_are_chosen_where_another_task_ends_and_leaves_its_device():
    options = [spread_task("long", 8, (1, 2)), spread_task("short", 4, (1, 2))]
    found = WholeRun(options=options, devices=[DeviceCost()] * 2).best()
    # The short one ends after 16 s. A step of the long one has begun by then, and two devices share the other three.
    assert (found.before_s, found.makespan_s, found.chosen) == (32.0, 26.0, (1, 0))


def test_what_early_release_updates_is_not_spread():
    options = [
        [replace(each, early_release=True) for each in spread_task("long", 8, (1, 2))],
        spread_task("b", 4, (1,)),
    ]
    assert WholeRun(options=options, devices=[DeviceCost()] * 2).best().chosen == (0, 0)


def test_simulations_that_predict_a_spread_count():
    options = [spread_task("long", 8, (1, 2)), spread_task("short", 4, (1,))]
    run = WholeRun(options=options, devices=[DeviceCost()] * 2)
    first, second = run.num_units((0, 0)), run.num_units((1, 0))
    spread = sum(run.spread_units((1, 0)).values())
    assert spread == PREDICTED_STEPS * 3  # on one device, and on two, with sums and one by one
    assert replace(run, most_units=first + second + spread).best().num_simulated == 2
    assert replace(run, most_units=first + second + spread - 1).best().num_simulated == 1


def gpt():
    torch.manual_seed(1)
    return nn.Sequential(Embed(16), *(Block(16) for _ in range(4)), nn.LayerNorm(16), nn.Linear(16, 256, bias=False))


def batches(number):
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(256, (2, 4, 8), generator=generator)) for _ in range(number)]


def task_of(name, num_batches, **options):
    return ModelTask(gpt(), next_byte_loss, batches(num_batches), 1e-3, seed=SEED, name=name, **options)


def orchestra_of(*tasks, num_devices=1):
    return silent(tasks, 2**20, num_devices=num_devices)


def pair(num_devices=2, **options):
    """A long task with these options, and a short one."""
    long = task_of("long", 4, optimizer=torch.optim.AdamW, **options)
    return orchestra_of(long, task_of("short", 2), num_devices=num_devices)


def choose(monkeypatch, wanted, *, rehearsed_s=(2.0, 1.0)):
    """Let the search choose, for the long task, the first way that is wanted; and rehearsals predict these seconds."""
    seen = []

    def options(planned):
        ways = all_options(planned)
        if planned.name == "long":
            seen.append([way for way, _ in ways])
        return ways

    def best(self):
        [index, *_] = [k for k, way in enumerate(seen[-1]) if wanted(way, seen[-1][0])]
        return PredictedRun((index, 0), 1.0, 2.0, 2)

    all_options, seconds = planner.options_of, iter(rehearsed_s)
    monkeypatch.setattr(planner, "options_of", options)
    monkeypatch.setattr(WholeRun, "best", best)
    monkeypatch.setattr(WholeRun, "makespan_s", lambda *_: next(seconds))
    return seen


def plain(number=1):
    return reference.train(
        gpt(), next_byte_loss, batches(4), lr=1e-3, optimizer=torch.optim.AdamW, seed=SEED, accumulation_steps=number
    )


class TestOfARun:
    def test_a_cut_that_is_chosen_together_is_in_the_plan_and_trains_with_the_same_bits(self, monkeypatch):
        seen = []

        def second(self):
            seen.append(self.options)
            return PredictedRun((1, *[0] * (len(self.options) - 1)), 1.0, 2.0, 2)

        monkeypatch.setattr(WholeRun, "best", second)
        long, short = (task_of(name, num, optimizer=torch.optim.AdamW) for name, num in (("long", 4), ("short", 2)))
        orchestra = orchestra_of(long, short, task_of("other", 2, partitioner=Presharded([3, 7])))
        plan = orchestra.generate()
        [options] = seen
        assert [each[0].name for each in options] == ["long", "short", "other"]
        assert [each[0].num_steps for each in options] == [4, 2, 2]
        assert len(options[0]) > 1
        assert len(options[2]) == 1  # the user's
        assert len(plan.tasks["long"].boundaries) == options[0][1].num_shards
        assert "together" in plan.tasks["long"].cut_because
        assert "together" not in plan.tasks["short"].cut_because
        report = orchestra.train_models()
        assert report.tasks["long"].losses == plain().losses

    def test_equal_tasks_are_planned_as_each_beside_its_like(self, monkeypatch):
        monkeypatch.setattr(WholeRun, "best", lambda _: pytest.fail("nothing to choose"))
        orchestra_of(*(task_of(name, 2) for name in "ab")).generate()

    def test_micro_batches_under_auto_are_chosen_with_the_cut_and_train_as_that_number_does(self, monkeypatch):
        choose(monkeypatch, lambda way, _: way.num_micro_batches == 2)
        orchestra = pair(accumulation_steps="auto")
        plan = orchestra.generate()
        assert (plan.tasks["long"].accumulation_steps, plan.tasks["short"].accumulation_steps) == (2, 1)
        assert "together" in plan.tasks["long"].cut_because
        assert orchestra.train_models().tasks["long"].losses == plain(2).losses

    def test_micro_batches_with_which_the_rehearsals_are_no_faster_are_not_taken(self, monkeypatch):
        choose(monkeypatch, lambda way, _: way.num_micro_batches == 2, rehearsed_s=(1.0, 1.0))
        orchestra = pair(accumulation_steps="auto")
        plan = orchestra.generate().tasks["long"]
        assert plan.accumulation_steps == 1
        assert "was rehearsed, and is predicted to be no faster" in plan.cut_because
        assert orchestra.train_models().tasks["long"].losses == plain().losses

    @pytest.mark.rest
    @pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.rest), 2])
    def test_a_number_of_micro_batches_is_the_users(self, monkeypatch, number):
        seen = choose(monkeypatch, lambda way, own: way.boundaries != own.boundaries)
        orchestra = pair(accumulation_steps=number)
        assert orchestra.generate().tasks["long"].accumulation_steps == number
        assert {way.num_micro_batches for way in seen[0]} == {number}
        assert orchestra.train_models().tasks["long"].losses == plain(number).losses

    @pytest.mark.rest
    def test_more_micro_batches_than_devices_or_samples_are_not_tried(self, monkeypatch):
        seen = choose(monkeypatch, lambda *_: True)
        pair(num_devices=1, accumulation_steps="auto").generate()
        pair(num_devices=3, accumulation_steps="auto").generate()
        pair(num_devices=6, accumulation_steps="auto").generate()  # a batch has four samples
        assert [max(way.num_micro_batches for way in ways) for ways in seen] == [1, 3, 4]

    @pytest.mark.rest
    def test_a_task_that_is_added_is_cut_beside_what_is_left_of_the_others(self, monkeypatch):
        seen, cut = [], []

        def best(run):
            seen.append([[(each.name, each.num_steps) for each in options] for options in run.options])
            return PredictedRun((1, *[0] * (len(run.options) - 1)), 1.0, 2.0, 2)

        class Add(Callback):
            def on_step(self, report):
                if report.steps == 1:
                    new = nn.Sequential(*gpt(), nn.Identity())
                    others = {"optimizer": torch.optim.AdamW, "seed": SEED, "name": "new"}
                    orchestra.add_task(ModelTask(new, next_byte_loss, batches(4), 1e-3, **others))
                    cut.append(orchestra.plan.tasks["new"])

        orchestra = pair(callbacks=[Add()])
        orchestra.stop_task("short")
        orchestra.generate()
        monkeypatch.setattr(WholeRun, "best", best)
        report = orchestra.train_models()
        [(new, long)] = seen
        assert set(new) == {("new", 4)}
        assert long == [("long", 3)]
        assert "together" in cut[0].cut_because
        assert report.tasks["new"].losses == report.tasks["long"].losses == plain().losses

    def test_a_way_that_a_rehearsal_refuses_changes_nothing(self, monkeypatch):
        def rehearse(state, *rest):
            if (state.name, state.cut.num_micro_batches) == ("long", 2):
                raise ValueError("long: layer 2 is not to be split\nnor here")
            return own_rehearse(state, *rest)

        own_rehearse = planner.rehearse
        monkeypatch.setattr(planner, "rehearse", rehearse)
        choose(monkeypatch, lambda way, _: way.num_micro_batches == 2)
        orchestra = pair(accumulation_steps="auto")
        plan = orchestra.generate().tasks["long"]
        assert plan.accumulation_steps == 1
        names(plan.cut_because, task="long", layer="layer 2", says="refused")
        assert "nor here" not in plan.cut_because  # the first line alone
        assert orchestra.train_models().tasks["long"].losses == plain().losses
