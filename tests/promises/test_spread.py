"""One task's step over several devices: the same bits as on one, whichever way the gradients are added."""

import re
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import EmulatedDevice, ModelTask
from hydra_engine.host.staging import StepParts
from hydra_engine.host.state import TaskState
from hydra_engine.planning.simulate import NEVER
from hydra_engine.schedule.events import Spread
from hydra_engine.schedule.graph import validate
from hydra_engine.schedule.units import BACKWARD, FUSED, training_chain
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.covering import chosen, covering
from tests.promises.test_exact import assert_engine_equals_plain
from tests.promises.test_precision import both
from tests.refused import names


def spread(num_parts, *, in_sums):
    """Spread every step over so many devices, whatever is predicted."""

    def predict(task, devices, *, host=None):
        backward = {node for node in task.chain if node[0] in (FUSED, BACKWARD)}
        ordered = task.ordered | backward if in_sums else task.ordered
        return (*[Spread(NEVER)] * (num_parts - 1), Spread(1.0, frozenset(ordered), in_sums))

    return mock.patch("hydra_engine.planning.planned.predict_spreads", predict)


def parts_of(report):
    """Devices by part of a step: every part was somewhere."""
    return {placed.unit.part for placed in report.schedule}


@pytest.mark.parametrize("name", chosen(sorted(zoo.MODELS), ("gpt", "tied", "cnn", "branch")))
@pytest.mark.parametrize("in_sums", chosen([True, False], [True]))
def test_parts_of_a_step_give_the_bits_of_one(name, in_sums):
    with spread(3, in_sums=in_sums):
        _, report = assert_engine_equals_plain(
            zoo.SHORT_MODELS[name],
            num_devices=3,
            accumulation_steps=4,
            lr=0.05,
            optimizer=torch.optim.AdamW,
            max_grad_norm=0.5,
        )
    assert parts_of(report) == {0, 1, 2}
    validate(report.schedule)


@pytest.mark.rest
@covering(name=["gpt", "cnn", "tied", "branch"], precision=["bfloat16", "float16"], in_sums=[True, False], strength=1)
def test_narrow_parts_are_added_in_float32(name, precision, in_sums):
    with spread(2, in_sums=in_sums):
        both(name, accumulation_steps=4, optimizer=torch.optim.AdamW, precision=precision)


class WakesUp(nn.Module):
    """A buffer that its forward begins to change in the third step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("num_calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        if x.abs().max() > 2:
            self.mean.mul_(0.9).add_(x.detach().mean())
        return x + self.mean


def waking():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), WakesUp(), nn.Tanh(), nn.Linear(8, 3))
        batches = [(torch.rand(8, 6) * (0.1 if k < 2 else 20.0), torch.randint(3, (8,))) for k in range(6)]
    return model, F.cross_entropy, batches


@pytest.mark.parametrize("in_sums", [True, False], ids=["sums", "pieces"])
def test_a_step_whose_buffers_change_unexpectedly_begins_again(in_sums):
    with spread(2, in_sums=in_sums):
        _, report = assert_engine_equals_plain(waking, num_devices=2, accumulation_steps=4, lr=0.01)
    assert {p.unit.part for p in report.schedule if p.unit.step == 5} == {0, 1}  # in order, from then on
    assert report.tasks["task"].revisions == []
    chain = training_chain(max(placed.unit.shard for placed in report.schedule) + 1, 0)
    validate(report.schedule, {"task": chain})


def long_loop(num_steps=3, seed=0):
    """A model large enough for a step to be worth spreading: batches of 6 micro-batches."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())]
        model = nn.Sequential(*layers, nn.Linear(256, 4))
        batches = [(torch.randn(768, 256), torch.randint(4, (768,))) for _ in range(num_steps)]
    return model, batches


def long_task(name="task", num_steps=3, seed=0, **options):
    model, batches = long_loop(num_steps, seed)
    options = {"accumulation_steps": 6, "seed": seed, "partitioner": Presharded([4, 8, 13])} | options
    return ModelTask(model, F.cross_entropy, batches, 0.1, name=name, **options), model


def plain(num_steps=3, seed=0, accumulation_steps=6):
    model, batches = long_loop(num_steps, seed)
    result = reference.train(model, F.cross_entropy, batches, seed=seed, lr=0.1, accumulation_steps=accumulation_steps)
    return exact.Expected(result.losses, [], zoo.state(model))


@pytest.mark.rest
@pytest.mark.parametrize("num_devices", [3, pytest.param(2, marks=pytest.mark.rest)])
def test_one_task_uses_all_devices_and_gives_the_same_bits(num_devices):
    task, model = long_task()
    report = exact.run([task], num_devices=num_devices, memory="32MiB", chaos=5)
    exact.assert_as_expected(report, "task", model, plain())
    assert parts_of(report) == set(range(num_devices))
    validate(report.schedule)


@pytest.mark.rest
def test_two_tasks_on_three_devices():
    lengths = [2, 6]  # or both might end together, of which none would then have three to itself
    tasks, models = zip(*(long_task(f"task-{k}", n, seed=k) for k, n in enumerate(lengths)), strict=True)
    report = exact.run(list(tasks), num_devices=3, memory="32MiB", chaos=5)
    for k, model in enumerate(models):
        exact.assert_as_expected(report, f"task-{k}", model, plain(lengths[k], seed=k))
    assert parts_of(report) == {0, 1, 2}


@pytest.mark.rest
def test_the_last_task_of_a_sweep_uses_every_device():
    lengths = [1, 2, 2, 8]
    tasks, models = zip(*(long_task(f"task-{k}", n, seed=k) for k, n in enumerate(lengths)), strict=True)
    report = exact.run(list(tasks), num_devices=3, memory="32MiB")
    for k, model in enumerate(models):
        exact.assert_as_expected(report, f"task-{k}", model, plain(lengths[k], seed=k))
    last = [placed for placed in report.schedule if placed.unit.step == 7]
    assert {placed.unit.task for placed in last} == {"task-3"}
    assert {placed.unit.part for placed in last} == {placed.device for placed in last} == {0, 1, 2}


def planned(num_devices, **options):
    task, _ = long_task(**options)
    return exact.silent([task], "32MiB", num_devices=num_devices).generate()


def test_plan_says_how_far_a_step_is_spread():
    plan = planned(3)
    assert len(plan.tasks["task"].speedups) == 3
    assert plan.tasks["task"].speedups[0] == 1.0
    assert plan.tasks["task"].speedups[2] > 1.5
    assert re.search(r"task: .* up to 3\b.* [\d.]+ times", str(plan))


@pytest.mark.parametrize(
    ("options", "why"), [({"accumulation_steps": 1}, "accumulation_steps"), ({"early_release": True}, "updated")]
)
def test_plan_says_why_a_step_uses_one_device(options, why):
    plans = planned(3, **options), planned(1, **options)
    assert plans[0].tasks["task"].speedups == [1.0]
    [told], untold = ([line for line in str(plan).splitlines() if "one device" in line] for plan in plans)
    names(told, task="task: ", says=why)
    assert untold == []


def test_a_plan_counts_the_micro_batches_that_there_are():
    model, _ = long_loop()
    batches = [(torch.randn(1, 256), torch.randint(4, (1,)))] * 2
    task = ModelTask(model, F.cross_entropy, batches, 0.1, accumulation_steps=4)
    plan = exact.silent([task], "32MiB", num_devices=3).generate()
    assert plan.tasks["task-0"].speedups == [1.0]
    names(plan, task="task-0", says="one micro-batch larger")


@pytest.mark.rest
def test_parts_whose_gradients_would_not_fit_dram_are_no_parts():
    with (
        mock.patch("hydra_engine.planning.planner.dram.available_dram_bytes", return_value=30 * 2**20),
        spread(3, in_sums=False),
    ):
        plan = planned(3)
        assert plan.tasks["task"].speedups == [1e-9, 1e-9, 1.0]
        assert 0 < plan.tasks["task"].dram["parts"] < 6 * plan.tasks["task"].dram["gradients"]
    with (
        mock.patch("hydra_engine.planning.planner.dram.available_dram_bytes", return_value=8 * 2**20),
        spread(3, in_sums=False),
    ):
        plan = planned(3)
    assert plan.tasks["task"].speedups == [1e-9, 1e-9]  # two parts add sums, which takes nothing more


@pytest.mark.rest
def test_gradients_that_wait_for_their_turn_are_as_few_as_planned():
    most, add = [], StepParts.add

    def added(parts, shard, m, gradients):
        add(parts, shard, m, gradients)
        waiting = [each for of_shard in parts._waiting.values() for each in of_shard.values()]
        most.append(sum(t.nbytes for each in waiting for t in each.values() if t is not None))

    with mock.patch.object(StepParts, "add", added), spread(3, in_sums=False):
        task, model = long_task(num_steps=5)
        orchestra = exact.silent([task], devices=[EmulatedDevice("32MiB", chaos=k) for k in range(3)])
        plan = orchestra.generate()
        report = orchestra.train_models()
    exact.assert_as_expected(report, "task", model, plain(5))
    assert 0 < max(most) <= plan.tasks["task"].dram["parts"]


def test_all_buffers_of_a_step_change_at_once_and_it_begins_again_once():
    class Several(WakesUp):
        """More buffers that begin to change."""

        def __init__(self):
            super().__init__()
            for k in range(4):
                self.register_buffer(f"more_{k}", torch.zeros(()))

        def forward(self, x):
            if x.abs().max() > 2:
                for k in range(4):
                    getattr(self, f"more_{k}").add_(1)
            return super().forward(x)

    def build():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 8), Several(), nn.Tanh(), Several(), nn.Linear(8, 3))
        return model, F.cross_entropy, waking()[2]

    with spread(2, in_sums=True):
        _, report = assert_engine_equals_plain(build, num_devices=2, accumulation_steps=4, lr=0.01)
    assert len([span for span in report.spans if span.lane == "again"]) == 1


@pytest.mark.rest
def test_tasks_of_one_reason_share_a_line():
    tasks = [long_task(name, accumulation_steps=1)[0] for name in "abc"] + [long_task("d")[0]]
    lines = str(exact.silent(tasks, "32MiB", num_devices=2).generate()).splitlines()[-3:-1]
    assert [line.partition(":")[0] for line in lines] == ["a, b, c", "d"]
    names(lines[0], says="one device micro-batch")
    names(lines[1], says="up to 2")


def test_a_part_that_does_not_fit_goes_on_undivided():
    task, model = long_task()
    with mock.patch.object(TaskState, "sum_bytes", return_value=2**30), spread(2, in_sums=True):
        report = exact.run([task], num_devices=2, memory="32MiB")
    exact.assert_as_expected(report, "task", model, plain())
    assert {placed.unit.part for placed in report.schedule} == {0}
    validate(report.schedule, {"task": training_chain(3, 0)})
    [revision] = report.tasks["task"].revisions
    assert revision.boundaries == [4, 8, 13]
    names(revision.reason, says="part spread")
