"""What a task raises is tried again as often as it asks for, and then its bits are those of an undisturbed run."""

import threading
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hydra_engine import Retry, StopTask
from hydra_engine.errors import DeviceLost
from hydra_engine.host.optimizer import Averages, BeforeUpdate
from hydra_engine.run.running_task import Retries
from hydra_engine.tasks.report import AGAIN, Report, TaskReport
from hydra_engine.worker.spiller import Spiller
from partitioners import Presharded
from tests import exact, zoo
from tests.covering import covering
from tests.promises.test_faults import (
    Boom,
    Trap,
    assert_failed,
    committed,
    graphs,
    trapped_model,
    victim,
)
from tests.refused import names, refused
from tests.scenarios import Halfway

ADAM = torch.optim.AdamW
STEP = 4  # at which things go wrong


def undisturbed(build=trapped_model, **options):
    return committed(None, build, **options)


def run_with_other(task, *, num_devices=1, chaos=None, before=lambda: None):
    """Train the task beside another one, which must not notice; `before` training, after the plan."""
    other, other_model = exact.task_of("mlp", partition="one", epochs=1)
    orchestra = exact.orchestrator([task, other], num_devices=num_devices, chaos=chaos)
    with graphs(kept=False):
        orchestra.generate()
    before()
    report = orchestra.train_models()
    exact.assert_as_expected(report, "mlp", other_model, exact.expected("mlp", epochs=1))
    exact.assert_within_budget(report, num_devices)
    return report


def again(report):
    """The units that stopped a step that began again."""
    return [span.label for span in report.spans if span.lane == AGAIN]


# Units


def test_as_often_as_asked_and_then_it_fails():
    task, model = victim(max_retries=3)
    trap = model[2].in_forward

    def for_good():
        trap.touch = trap.fail
        raise Boom("for good")

    report = run_with_other(task, before=lambda: trap.arm(2 * STEP, for_good))
    assert_failed(report, "victim", model, committed(STEP), "Boom: ")
    assert [retry.step for retry in report.tasks["victim"].retries] == [STEP] * 3
    assert len(again(report)) == 3


def test_over_all_of_the_run():
    """Not for each step anew."""
    task, model = victim(max_retries=2)
    trap = model[0].in_backward
    steps = iter([1, 4, 5])

    def again_later():
        trap.arm(next(steps, 99), again_later)
        raise Boom("one of several")

    report = run_with_other(task, before=lambda: trap.arm(next(steps), again_later))
    # The call that raised is not counted, and the same step calls it anew.
    assert_failed(report, "victim", model, committed(1 + 4 + 5), "Boom: one of several")
    assert [retry.step for retry in report.tasks["victim"].retries] == [1, 5]


class Striking:
    """Raises in the place of a method's call number `at` for shards of the task `name`; before it or after it.

    Calls count from `arm`: how often a plan calls it is no matter here.
    """

    def __init__(self, cls, method, name, at, *, after=False, error=Boom):
        self.original, self.name, self.at, self.after, self.error = getattr(cls, method), name, at, after, error
        self.num_calls, self.is_armed = 0, False
        self.patch = mock.patch.object(cls, method, self.method)

    def arm(self):
        self.is_armed = True

    @property
    def method(self):
        def call(owner, state, *args, **kwargs):
            mine = state.name == self.name and self.is_armed
            self.num_calls += mine
            if mine and self.num_calls - 1 == self.at:
                if self.after:
                    self.original(owner, state, *args, **kwargs)
                raise self.error("from a lane")
            return self.original(owner, state, *args, **kwargs)

        return call


@pytest.mark.rest  # tests/promises/test_scenarios.py has it, if not with each of these options
@covering(
    strength=1,
    method=["store_micro", "store_buffers", "store_gradients"],
    after=[False, True],
    setting=[(1, None), (1, 4), (2, 3)],
)
def test_step_of_a_failing_store_begins_again(method, after, setting):
    num_devices, chaos = setting
    task, model = victim(max_retries=1, accumulation_steps=2, optimizer=ADAM)
    striking = Striking(Spiller, method, "victim", 20, after=after)
    with striking.patch:
        report = run_with_other(task, before=striking.arm, num_devices=num_devices, chaos=chaos)
    assert striking.num_calls > 20
    exact.assert_as_expected(report, "victim", model, undisturbed(optimizer=ADAM, accumulation_steps=2))
    assert len(report.tasks["victim"].retries) == len(again(report)) == 1


@pytest.mark.rest
@pytest.mark.parametrize("chaos", [1, *(pytest.param(k, marks=pytest.mark.rest) for k in (2, 3))])
def test_spread_step_begins_again(chaos):
    """One part fails while others compute; what those run into meanwhile is not counted."""
    options = {"accumulation_steps": 3}

    def build():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            traps = trapped_model()[0]
            model = nn.Sequential(traps[0], nn.ReLU(), traps[2], nn.ReLU(), traps[4])
            data = TensorDataset(torch.randn(60, 6), torch.randint(3, (60,)))
        return model, F.cross_entropy, DataLoader(data, batch_size=6, shuffle=True)

    task, model = victim(build, max_retries=1, **options)
    orchestra = exact.orchestrator([task], num_devices=3, chaos=chaos)
    with graphs(kept=False):
        orchestra.generate()
    model[2].in_backward.arm(3 * STEP + chaos % 3)
    report = orchestra.train_models()
    exact.assert_as_expected(report, "victim", model, undisturbed(build, **options))
    assert len(report.tasks["victim"].retries) == 1


@pytest.mark.rest  # tests/promises/test_scenarios.py has it, if not with each of these options
def test_evaluation_batch_is_computed_again():
    calls, is_training = [], threading.Event()

    def metric(output, target):
        if is_training.is_set():  # and not tried for a plan
            calls.append(len(calls))
        if len(calls) == 4:
            raise Boom("a metric")
        return (output.argmax(1) == target).float().mean()

    def build():
        model, loss_fn, loader = trapped_model()
        return model, loss_fn, loader

    validation = [(torch.randn(6, 6), torch.randint(3, (6,))) for _ in range(3)]
    expected = undisturbed(build, validation=validation)
    task, model = victim(build, validation=validation, metrics={"accuracy": metric}, max_retries=1)
    report = run_with_other(task, before=is_training.set)
    exact.assert_as_expected(report, "victim", model, expected)
    assert report.tasks["victim"].validation_losses == expected.validation_losses
    [retry] = report.tasks["victim"].retries
    assert ".e" in retry.where
    assert len(report.tasks["victim"].validation_metrics["accuracy"]) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, StopTask])
def test_what_is_no_mistake_is_not_tried_again(error):
    task, model = victim(max_retries=5)

    def stop():
        raise error("no mistake")

    report = run_with_other(task, before=lambda: model[2].in_backward.arm(STEP, stop))
    assert report.tasks["victim"].status == "failed"
    assert report.tasks["victim"].steps == STEP
    assert report.tasks["victim"].retries == []


def test_lost_device_is_not_tried_again():
    retries = Retries(5, report := TaskReport(name="task", seed=0))
    assert not retries.allow(DeviceLost("device", RuntimeError("x")), "task.f0@1", 1)
    assert report.retries == []


# Updates


@pytest.fixture
def halfway():
    Halfway.trap = Trap()
    return Halfway.trap


UPDATES = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.1},
    "micro-batches": {"accumulation_steps": 2},
    "bfloat16": {"precision": "bfloat16"},
    "float16, clipped": {"precision": "float16", "max_grad_norm": 0.1},
}


@pytest.mark.rest
@pytest.mark.parametrize(
    ("case", "call"),
    [
        pytest.param(
            case, call, marks=() if (case, call) in (("bfloat16", 0), ("float16, clipped", 7)) else pytest.mark.rest
        )
        for case in UPDATES
        for call in (0, 7)
    ],
)
def test_update_is_put_back_and_tried_again(case, call, halfway):
    options = UPDATES[case]
    task, model = victim(optimizer=Halfway, max_retries=1, **options)
    report = run_with_other(task, before=lambda: halfway.arm(call))
    assert halfway.fired.is_set()
    halfway.arm(None)
    scaler = {"grad_scaler": torch.amp.GradScaler("cpu")} if options.get("precision") == "float16" else {}
    exact.assert_as_expected(report, "victim", model, undisturbed(optimizer=Halfway, **options, **scaler))
    [retry] = report.tasks["victim"].retries
    assert retry.step == call // 3  # three shards
    assert retry.where == f"its optimizer, shard {call % 3},"
    assert again(report) == []  # the step is committed


@pytest.mark.rest
def test_averages_are_put_back(halfway):
    found = {}
    for call in (None, 8):
        task, model = victim(optimizer=Halfway, ema_decay=0.5, max_retries=1)
        with mock.patch.object(Averages, "move", striking_average(call)):
            report = run_with_other(task)
        found[call] = report.tasks["victim"].ema_state, zoo.state(model)
    exact.assert_same_state(found[8][0], found[None][0])
    exact.assert_same_state(found[8][1], found[None][1])


def striking_average(at):
    original, calls = Averages.move, []

    def average(self, slots, pool, *, is_first):
        original(self, slots, pool, is_first=is_first)
        calls.extend([slots] * (self.decay is not None))
        if self.decay is not None and len(calls) - 1 == at:
            raise Boom("after the average")

    return average


def test_update_that_fails_for_good_leaves_its_shard_as_it_was(halfway):
    task, model = victim(optimizer=Halfway, max_retries=1, partitioner=Presharded([5]))

    def strike_again():
        halfway.arm(0)
        raise Boom("first")

    report = run_with_other(task, before=lambda: halfway.arm(STEP, strike_again))
    outcome = report.tasks["victim"]
    assert outcome.status == "failed"
    names(outcome.error, says="0 update 4")
    halfway.arm(None)
    before = committed(STEP, optimizer=Halfway)
    parameters = {name for name, _ in model.named_parameters()}
    found = zoo.state(model)
    exact.assert_same_state({n: found[n] for n in parameters}, {n: before.state[n] for n in parameters})


@pytest.mark.rest
def test_nothing_is_copied_unless_asked_for():
    with mock.patch("hydra_engine.host.optimizer.BeforeUpdate") as copies:
        exact.run([victim()[0]])
        assert not copies.called
        exact.run([victim(max_retries=1)[0]])
        assert copies.called


def test_state_is_put_back_in_its_own_memory():
    """A checkpoint that is being written may refer to it."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter], 0.1)
    parameter.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state[parameter]
    state["history"] = [torch.zeros(2)]
    average, count = state["exp_avg"], state["step"].clone()
    values = average.clone()
    before = BeforeUpdate(optimizer.state, {0: parameter}, [parameter.grad])
    optimizer.step()
    state["history"][0].fill_(5)
    state["new"] = 1
    parameter.grad.zero_()
    before.put_back()
    found = optimizer.state[parameter]
    assert found["exp_avg"] is average
    assert torch.equal(average, values)
    assert torch.equal(found["step"], count)
    assert torch.equal(found["history"][0], torch.zeros(2))
    assert "new" not in found
    assert torch.equal(parameter.grad, torch.ones(3))


@pytest.mark.parametrize("states", [{}, {"empty": {}}], ids=["none", "empty"])
def test_what_had_no_state_has_none_again(states):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], 0.1)
    optimizer.state.update(zip([parameter], states.values(), strict=False))
    parameter.grad = torch.ones(2)
    before = BeforeUpdate(optimizer.state, {0: parameter}, [])
    optimizer.step()
    assert optimizer.state[parameter]
    before.put_back()
    assert list(optimizer.state.values()) == [{} for _ in states]
    assert torch.equal(parameter, torch.ones(2))


# Loaders


class Flaky:
    """Draws for every batch, and raises at one of its readings, counted over all epochs; None: at none."""

    def __init__(self, fires_at=None, *, opening=False):
        self.batches = list(trapped_model()[2].dataset)
        self.fires_at, self.opening = fires_at, opening
        self.num_calls = 0

    def __len__(self):
        return 10

    def touch(self):
        self.num_calls += 1
        if self.num_calls - 1 == self.fires_at:
            raise Boom("the share is away")

    def __iter__(self):
        order = torch.randperm(60).tolist()
        if self.opening:
            self.touch()
        for k in range(10):
            noise = torch.randn(6, 6)
            if not self.opening:
                self.touch()
            samples = [self.batches[index] for index in order[6 * k : 6 * k + 6]]
            yield torch.stack([x for x, _ in samples]) + noise, torch.stack([y for _, y in samples])


def flaky(**options):
    def build():
        model, loss_fn, _ = trapped_model()
        return model, loss_fn, Flaky(**options)

    return build


@pytest.mark.rest
@covering(
    strength=1,
    options=[{"fires_at": 4}, {"fires_at": 10}, {"fires_at": 13}, {"fires_at": 1, "opening": True}],
    accumulation_steps=[1, 3],
)
def test_loader_goes_on_after_the_last_batch_that_it_gave(options, accumulation_steps):
    task, model = victim(flaky(**options), max_retries=1, accumulation_steps=accumulation_steps)
    report = run_with_other(task)
    expected = undisturbed(flaky(), accumulation_steps=accumulation_steps)
    exact.assert_as_expected(report, "victim", model, expected)
    [retry] = report.tasks["victim"].retries
    assert retry.where == "its loader"
    assert retry.error == "Boom: the share is away"


@pytest.mark.rest
def test_loader_that_raises_again_on_its_way_back():
    task, model = victim(flaky(fires_at=13), max_retries=2)
    loader = task.dataloader
    struck = loader.touch

    def touch():
        if loader.num_calls == 15:  # the second batch that is read again
            loader.num_calls += 1
            raise Boom("away again")
        struck()

    loader.touch = touch
    report = run_with_other(task)
    exact.assert_as_expected(report, "victim", model, undisturbed(flaky()))
    assert [retry.error for retry in report.tasks["victim"].retries] == ["Boom: the share is away", "Boom: away again"]


@pytest.mark.rest
def test_data_set_that_raises_in_a_sampled_loader():
    class Samples(TensorDataset):
        trap = Trap()

        def __getitem__(self, index):
            self.trap.touch()
            return super().__getitem__(index)

    def build():
        model, loss_fn, loader = trapped_model()
        return model, loss_fn, DataLoader(Samples(*loader.dataset.tensors), batch_size=6, shuffle=True)

    expected = undisturbed(build)
    task, model = victim(build, max_retries=1)
    report = run_with_other(task, before=lambda: Samples.trap.arm(6 * 12 + 3))
    exact.assert_as_expected(report, "victim", model, expected)
    assert len(report.tasks["victim"].retries) == 1


@pytest.mark.parametrize("fires_at", [4, *(pytest.param(k, marks=pytest.mark.rest) for k in (6, 9))])
def test_validation_loader_goes_on_too(fires_at):
    expected = undisturbed(flaky(), validation=Flaky())
    task, model = victim(flaky(), validation=Flaky(fires_at), max_retries=1)
    report = run_with_other(task)
    exact.assert_as_expected(report, "victim", model, expected)
    assert report.tasks["victim"].validation_losses == expected.validation_losses
    assert len(report.tasks["victim"].retries) == 1


@pytest.mark.rest
def test_loader_that_fails_for_good_fails_the_task_after_the_batches_before():
    task, model = victim(flaky(fires_at=5), max_retries=0)
    report = run_with_other(task)
    assert_failed(report, "victim", model, committed(5, flaky()), "Boom: the share is away")


# What is refused, and what is not tried again


def test_hook_on_a_parameter_that_raises_in_the_commit_fails_the_task():
    task, model = victim(max_retries=5)
    trap = Trap()
    model[2].linear.weight.register_hook(lambda grad: trap.touch())
    report = run_with_other(task, before=lambda: trap.arm(STEP))
    assert_failed(report, "victim", model, committed(STEP), "its commit")
    assert report.tasks["victim"].retries == []


def test_refused_where_updates_come_in_the_middle_of_a_step():
    with refused(says="max_retries early_release"):
        victim(max_retries=1, early_release=True)
    victim(max_retries=0, early_release=True)


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (1.0, TypeError), (True, TypeError), ("1", TypeError)])
def test_numbers_that_are_none_are_refused(value, error):
    with refused(error, says="max_retries"):
        victim(max_retries=value)


def test_retries_are_counted_over_all_threads():
    report = TaskReport(name="task", seed=0)
    retries, allowed = Retries(50, report), []
    start = threading.Barrier(4)

    def work():
        start.wait(30)
        allowed.extend(retries.allow(ValueError("x"), "its optimizer", 1) for _ in range(25))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sum(allowed) == len(report.retries) == 50


def test_a_retry_keeps_text_alone():
    """An error refers to what its frames held."""
    report = TaskReport(name="task", seed=0)
    assert Retries(1, report).allow(ValueError("first line\nsecond"), "its loader", 3)
    assert report.retries == [Retry(step=3, where="its loader", error="ValueError: first line")]
    text = str(Report(makespan_s=1.0, tasks={"task": report}, devices=[]))
    names(text, task="task", says="3 loader ValueError")


# The host's memory


NO_MEMORY = "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
OUT = {"python": partial(MemoryError, "no room"), "torch": partial(RuntimeError, NO_MEMORY)}


@pytest.mark.parametrize("kind", OUT)
@pytest.mark.parametrize(
    "where", ["update", *(pytest.param(each, marks=pytest.mark.rest) for each in ("unit", "commit", "loader"))]
)
def test_host_out_of_memory_fails_its_task_alone_and_says_what_to_do(kind, where, halfway):
    def out():
        raise OUT[kind]()

    trap = Trap()

    def build():
        model, loss_fn, loader = trapped_model()
        if where == "commit":
            model[2].linear.weight.register_hook(lambda grad: trap.touch())
        if where == "loader":
            loader.collate_fn = lambda samples: trap.touch() or torch.utils.data.default_collate(samples)
        return model, loss_fn, loader

    task, model = victim(build, optimizer=Halfway)
    if where == "unit":
        trap = model[2].in_backward
    trap = halfway if where == "update" else trap
    report = run_with_other(task, before=lambda: trap.arm(STEP, out))
    outcome = report.tasks["victim"]
    assert trap.fired.is_set()
    assert outcome.status == "failed"
    names(outcome.error, says="DRAM")


@pytest.mark.rest
def test_host_out_of_memory_may_be_tried_again():
    task, model = victim(max_retries=1)

    def out():
        raise MemoryError

    report = run_with_other(task, before=lambda: model[2].in_forward.arm(2 * STEP, out))
    exact.assert_as_expected(report, "victim", model, undisturbed())
    assert report.tasks["victim"].retries[0].error == "MemoryError: no message"


@pytest.mark.rest  # tests/promises/test_scenarios.py has it, if not with each of these options
def test_other_errors_say_nothing_of_memory():
    task, model = victim()
    report = run_with_other(task, before=lambda: model[2].in_forward.arm(2 * STEP))
    assert "DRAM" not in report.tasks["victim"].error
