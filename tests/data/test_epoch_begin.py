"""`on_epoch_begin` is called once per epoch, before its iterator is opened: shuffles are those of the plain loop."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hydra_engine import Callback, CallbackTimeout, ModelTask, StopTask
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.covering import covering
from tests.refused import names

EPOCHS, STEPS, SEED = 3, 4, 7
PATIENCE_S = 30


class Boom(RuntimeError):
    """What interrupts a task here."""


def fail():
    raise Boom


def model_of(draws):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        middle = [nn.Dropout(0.3)] if draws else []
        return nn.Sequential(nn.Linear(6, 8), *middle, nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def loader_of(num_workers=0, *, fails=(), seed=11):
    data = torch.Generator().manual_seed(1)
    samples = TensorDataset(torch.randn(4 * STEPS, 6, generator=data), torch.randn(4 * STEPS, 3, generator=data))
    sampler = DistributedSampler(samples, num_replicas=1, rank=0, shuffle=True, seed=seed)
    return Counts(samples, 4, sampler=sampler, num_workers=num_workers, fails=set(fails))


class Counts(DataLoader):
    """Notes with which epoch of its sampler each iterator was opened, and fails at some of these."""

    def __init__(self, *arguments, fails, **options):
        super().__init__(*arguments, **options)
        self.opened, self.fails = [], fails

    def __iter__(self):
        self.opened.append(self.sampler.epoch)
        if len(self.opened) in self.fails:
            raise Boom
        return super().__iter__()


class SetsEpoch(Callback):
    """What DistributedSampler asks for; and writes down all calls."""

    def __init__(self, loader, at, action):
        self.loader, self.at, self.action, self.calls = loader, at, action, []

    def on_epoch_begin(self, report, epoch):
        self.note("begin", epoch)
        self.loader.sampler.set_epoch(epoch)

    def on_step(self, report):
        self.note("step", report.steps)

    def on_validation(self, report):
        self.note("validation", len(report.validation_losses))

    def on_epoch(self, report, epoch):
        self.note("epoch", epoch)

    def on_task_end(self, report):
        self.note("end", report.status)

    def note(self, *call):
        self.calls.append(call)
        if call == self.at:
            self.action()


class PlainEpochs:
    """The loader of the plain loop, with `set_epoch` before each `iter`."""

    def __init__(self, loader):
        self.loader, self.epoch = loader, 0

    def __iter__(self):
        self.loader.sampler.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self.loader)


def validation_of():
    data = torch.Generator().manual_seed(2)
    return [(torch.randn(4, 6, generator=data), torch.randn(4, 3, generator=data)) for _ in range(2)]


def expected_of(*, draws=False, **options):
    model = model_of(draws)
    with torch.random.fork_rng():
        options = {"validation": validation_of(), "lr": 0.1, "epochs": EPOCHS, "seed": SEED, **options}
        result = reference.train(model, F.mse_loss, PlainEpochs(loader_of()), **options)
    return result, zoo.state(model)


def task_of(*, draws=False, loader=None, callback=None, at=None, action=None, **options):
    """A task, and its callback: one that calls `action` at its call `at`."""
    layers, loader = model_of(draws), loader_of() if loader is None else loader
    callback = SetsEpoch(loader, at, action) if callback is None else callback
    options = {"name": "task", "validation": validation_of(), "callbacks": [callback], **options}
    shards = Presharded([1, 3, len(layers)])
    return ModelTask(layers, F.mse_loss, loader, 0.1, EPOCHS, partitioner=shards, seed=SEED, **options), callback


def orchestra_of(*tasks, num_devices=1, **options):
    return exact.silent(tasks, "1MiB", num_devices=num_devices, **options)


def calls_of():
    """Of a whole training."""
    calls = []
    for epoch in range(EPOCHS):
        calls += [("begin", epoch), *(("step", k + 1) for k in range(STEPS * epoch, STEPS * (epoch + 1)))]
        calls += [("validation", epoch + 1), ("epoch", epoch)]
    return [*calls, ("end", "finished")]


def without_validation(calls):
    return [call for call in calls if call[0] != "validation"]


def assert_exact(task, report, *, draws=False, **options):
    expected, state = expected_of(draws=draws, **options)
    assert report.status == "finished"
    assert report.losses == expected.losses
    assert report.validation_losses == expected.validation_losses
    exact.assert_same_state(zoo.state(task.model), state)


@covering(draws=[False, True], num_plans=[0, 2], num_devices=[1, 2])
def test_shuffles_are_those_of_the_plain_loop(draws, num_plans, num_devices):
    task, callback = task_of(draws=draws)
    orchestra = orchestra_of(task, num_devices=num_devices)
    for _ in range(num_plans):
        orchestra.generate()
    assert_exact(task, orchestra.train_models().tasks["task"], draws=draws)
    assert callback.calls == calls_of()
    assert callback.loader.opened == list(range(EPOCHS))


@pytest.mark.rest
@pytest.mark.parametrize(
    "options",
    [
        {"accumulation_steps": 2},
        pytest.param({"early_release": True}, marks=pytest.mark.rest),
        pytest.param({"optimizer_scope": "task"}, marks=pytest.mark.rest),
    ],
    ids=str,
)
def test_however_steps_are_taken(options):
    task, callback = task_of(**options)
    report = orchestra_of(task, num_devices=2).train_models().tasks["task"]
    assert_exact(task, report, accumulation_steps=options.get("accumulation_steps", 1))
    assert callback.calls == calls_of()


def test_workers_open_their_iterator_after_it():
    loader = loader_of(num_workers=1)
    task, callback = task_of(draws=True, loader=loader)
    report = orchestra_of(task).train_models().tasks["task"]
    assert report.status == "finished"
    assert callback.calls == calls_of()
    assert loader.opened == list(range(EPOCHS))


def test_callbacks_that_come_once_the_orchestrator_is_made_are_waited_for():
    task, callback = task_of(draws=True)
    task.callbacks = ()
    orchestra = orchestra_of(task)
    task.callbacks = (callback,)
    assert_exact(task, orchestra.train_models().tasks["task"], draws=True)
    assert callback.calls == calls_of()
    assert callback.loader.opened == list(range(EPOCHS))


def test_the_first_epoch_begins_where_its_first_batch_is_read():
    task, callback = task_of()
    orchestra = orchestra_of(task)
    assert callback.calls == []
    orchestra.generate()
    assert callback.calls == [("begin", 0)]


@pytest.mark.rest
def test_without_validation_and_beside_others():
    tasks = [task_of(name=name, draws=name == "b", validation=None) for name in "abc"]
    reports = orchestra_of(*(task for task, _ in tasks), num_devices=2).train_models().tasks
    for task, callback in tasks:
        assert_exact(task, reports[task.name], draws=task.name == "b", validation=None)
        assert callback.calls == without_validation(calls_of())


def test_validation_in_the_middle_of_epochs():
    task, callback = task_of(validation_interval=3)
    report = orchestra_of(task).train_models().tasks["task"]
    expected, _ = expected_of(validation=None)
    assert report.losses == expected.losses
    assert len(report.validation_losses) == EPOCHS * STEPS // 3
    assert without_validation(callback.calls) == without_validation(calls_of())


@pytest.mark.parametrize("fails", [{2, 3}, pytest.param({3}, marks=pytest.mark.rest)])
def test_a_retry_calls_it_no_second_time(fails):
    """A loader that fails to open an epoch's iterator is brought back to that epoch's begin."""
    loader = loader_of(fails=fails)
    task, callback = task_of(draws=True, loader=loader, max_retries=3)
    report = orchestra_of(task).train_models().tasks["task"]
    assert_exact(task, report, draws=True)
    assert callback.calls == calls_of()
    assert len(report.retries) == len(fails)


@covering(strength=1, draws=[False, True], steps=[2, STEPS, STEPS + 1])
def test_a_resumed_run_begins_its_epoch_again(tmp_path, draws, steps):
    first, _ = task_of(draws=draws, at=("step", steps), action=fail)
    with pytest.raises(Boom):
        orchestra_of(first, checkpoint_dir=tmp_path, checkpoint_every=1).train_models()
    task, callback = task_of(draws=draws)
    report = orchestra_of(task, checkpoint_dir=tmp_path, checkpoint_every=1).train_models(resume=True).tasks["task"]
    assert_exact(task, report, draws=draws)
    begun = [call for call in callback.calls if call[0] == "begin"]
    assert begun == [("begin", epoch) for epoch in range((steps - 1) // STEPS, EPOCHS)]


@pytest.mark.rest
def test_a_task_that_joins_has_it_too():
    later, callback = task_of(name="later", draws=True)

    class Adds(Callback):
        def on_step(self, report):
            if report.steps == 2:
                orchestra.add_task(later)

    first, _ = task_of(callback=Adds())
    orchestra = orchestra_of(first, num_devices=2)
    assert_exact(later, orchestra.train_models().tasks["later"], draws=True)
    assert callback.calls == calls_of()


@pytest.mark.parametrize(("epoch", "error"), [(0, StopTask), (1, StopTask), (1, Boom)])
def test_it_may_stop_the_task_and_what_else_it_raises_fails_it(epoch, error):
    def raises():
        raise error

    task, callback = task_of(at=("begin", epoch), action=raises)
    other, _ = task_of(name="other")
    reports = orchestra_of(task, other).train_models().tasks
    assert reports["task"].steps == epoch * STEPS
    if error is StopTask:
        assert reports["task"].status == "stopped"
        assert callback.calls[-1] == ("end", "stopped")
    else:
        assert reports["task"].status == "failed"
        names(reports["task"].error, task="task", says="callback")
    assert_exact(other, reports["other"])


def test_what_it_raises_in_planning_is_raised_there():
    task, callback = task_of(at=("begin", 0), action=fail)
    with pytest.raises(Boom):
        orchestra_of(task).generate()
    assert callback.loader.opened == []


@pytest.mark.rest
def test_one_that_does_not_return_fails_the_task(hangs):
    go_on = threading.Event()
    hangs.append(threading.Event())
    block = lambda: (hangs[0].set(), go_on.wait(PATIENCE_S))  # noqa: E731
    task, _ = task_of(at=("begin", 2), action=block, timeout_s=0.2)
    other, _ = task_of(name="other")
    reports = orchestra_of(task, other).train_models().tasks
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "task-callbacks":
            thread.join(PATIENCE_S)
    assert isinstance(reports["task"].exception, CallbackTimeout)
    assert reports["task"].steps == 2 * STEPS
    assert_exact(other, reports["other"])
