"""Tasks come and go while others train, and nobody's bits depend on it."""

import copy
import itertools
import threading
from functools import lru_cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hydra_engine import Callback, ModelTask, StopTask
from hydra_engine.run.feeds import Joining
from hydra_engine.run.task_list import Site
from hydra_engine.schedule import Scheduler, TaskAdded
from hydra_engine.schedule.graph import validate
from hydra_engine.schedule.units import training_chain
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.covering import covering
from tests.refused import names, refused

STEPS, EPOCHS = 4, 3


class At(Callback):
    """Calls a function once, at a step or at the end."""

    def __init__(self, step, call):
        self.step, self.call, self.errors = step, call, []

    def _at(self, step):
        if step == self.step:
            try:
                self.call()
            except Exception as error:
                self.errors.append(error)

    def on_step(self, report):
        self._at(report.steps)

    def on_task_end(self, report):
        self._at("end")


def batches(num=STEPS):
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(5, 8, generator=generator), torch.randint(3, (5,), generator=generator)) for _ in range(num)]


def task(name, *callbacks, seed=0, **options):
    with torch.random.fork_rng(devices=[]):  # of the task whose callback makes it
        torch.manual_seed(seed + 1)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))
    options = {"partitioner": Presharded([1, 3, 4]), "seed": seed, **options}
    return ModelTask(model, F.cross_entropy, batches(), 1e-2, EPOCHS, name=name, callbacks=callbacks, **options)


def orchestra_of(*tasks, num_devices=2):
    return exact.silent(tasks, "1MiB", num_devices=num_devices)


@lru_cache
def alone(seed):
    """What plain PyTorch leaves of a task."""
    model = task("alone", seed=seed).model
    result = reference.train(model, F.cross_entropy, batches(), seed=seed, lr=1e-2, epochs=EPOCHS)
    return result.losses, zoo.state(model)


def assert_as_alone(trained, report):
    losses, state = alone(trained.seed)
    assert report.status == "finished"
    assert report.losses == losses
    assert len(report.losses) == STEPS * EPOCHS
    exact.assert_same_state(zoo.state(trained.model), state)


@covering(strength=1, step=[1, STEPS * EPOCHS, "end"], num_devices=[1, 2])
def test_task_joins_while_another_trains(step, num_devices):
    second = task("second", seed=5)
    first = task("first", at := At(step, lambda: orchestra.add_task(second)))
    orchestra = orchestra_of(first, num_devices=num_devices)
    report = orchestra.train_models()
    assert at.errors == []
    assert list(report.tasks) == ["first", "second"]
    assert list(orchestra.plan.tasks) == ["first", "second"]
    assert_as_alone(first, report.tasks["first"])
    assert_as_alone(second, report.tasks["second"])
    with refused(RuntimeError):
        orchestra.train_models()


@pytest.mark.rest
def test_each_task_may_add_the_next():
    tasks = [task(str(k), seed=k) for k in range(4)]
    for mine, following in itertools.pairwise(tasks):
        mine.callbacks = (At("end", lambda following=following: orchestra.add_task(following)),)
    orchestra = orchestra_of(tasks[0])
    report = orchestra.train_models()
    for each in tasks:
        assert_as_alone(each, report.tasks[each.name])


def test_task_joins_from_another_thread():
    begun, added = threading.Event(), threading.Event()
    second = task("second", seed=5)

    def wait():
        begun.set()
        assert added.wait(30)

    def add():
        orchestra.add_task(second)
        added.set()

    first = task("first", at := At(2, wait))
    orchestra = orchestra_of(first)
    thread, errors = in_background(add, after=begun)
    report = orchestra.train_models()
    thread.join()
    assert at.errors == errors == []
    assert_as_alone(first, report.tasks["first"])
    assert_as_alone(second, report.tasks["second"])


def test_task_added_after_training_is_trained_by_the_next_call():
    first, second = task("first"), task("second", seed=5)
    orchestra = orchestra_of(first)
    assert_as_alone(first, orchestra.train_models().tasks["first"])
    assert orchestra.add_task(second) == "second"
    assert orchestra.plan is None
    report = orchestra.train_models()
    assert list(report.tasks) == ["second"]
    assert_as_alone(second, report.tasks["second"])


def test_task_added_before_training_is_planned_with_the_others():
    orchestra = orchestra_of(task("first"))
    orchestra.generate()
    assert orchestra.add_task(task(None, seed=5)) == "task-1"
    assert list(orchestra.generate().tasks) == ["first", "task-1"]
    report = orchestra.train_models()
    assert {each.status for each in report.tasks.values()} == {"finished"}


def test_stopped_task_keeps_its_last_committed_step():
    second = task("second", seed=5)
    stopped = task("stopped", at := At(3, lambda: orchestra.stop_task("stopped")))
    orchestra = orchestra_of(stopped, second)
    report = orchestra.train_models()
    assert at.errors == []
    mine = report.tasks["stopped"]
    assert mine.status == "stopped"
    assert mine.error is None
    assert 3 <= mine.steps < STEPS * EPOCHS
    assert len(mine.losses) == mine.steps
    assert_as_alone(second, report.tasks["second"])
    plain = task("plain").model
    reference.train(plain, F.cross_entropy, batches(), seed=0, lr=1e-2, epochs=EPOCHS, max_steps=mine.steps)
    exact.assert_same_state(zoo.state(stopped.model), zoo.state(plain))


def test_task_that_is_stopped_before_training_is_not_begun():
    first, second = task("first"), task("second", seed=5)
    before = copy.deepcopy(first.model)
    orchestra = orchestra_of(first, second)
    orchestra.generate()
    orchestra.stop_task("first")
    assert list(orchestra.train_models().tasks) == ["second"]
    exact.assert_same_state(zoo.state(first.model), zoo.state(before))
    orchestra.stop_task("second")  # it is over
    with refused(RuntimeError):
        orchestra.train_models()


def test_one_task_may_take_anothers_place():
    """As a sweep does."""
    better = task("better", seed=5)

    def replace():
        orchestra.stop_task("worse")
        orchestra.add_task(better)

    orchestra = orchestra_of(task("worse", at := At(2, replace)))
    report = orchestra.train_models()
    assert at.errors == []
    assert report.tasks["worse"].status == "stopped"
    assert_as_alone(better, report.tasks["better"])


def test_unknown_task_cannot_be_stopped():
    with refused(task="'other'", says="stop_task 'first'"):
        orchestra_of(task("first")).stop_task("other")


def test_name_is_taken_once():
    orchestra = orchestra_of(task("first"))
    with refused(task="'first'"):
        orchestra.add_task(task("first", seed=5))
    with refused(TypeError, says="ModelTask"):
        orchestra.add_task("task")
    assert list(orchestra.generate().tasks) == ["first"]


def test_trainable_parameter_is_not_shared_with_a_task_that_trains():
    first = task("first")

    def add():
        orchestra.add_task(ModelTask(first.model, F.cross_entropy, batches(), 1e-2, name="second"))

    first.callbacks = (at := At(2, add),)
    orchestra = orchestra_of(first)
    report = orchestra.train_models()
    names(at.errors[0], says="parameter first second")
    assert list(report.tasks) == ["first"]
    add()  # now it may
    assert orchestra.train_models().tasks["second"].status == "finished"


def test_task_that_cannot_be_planned_leaves_the_others_alone():
    class Fails(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    model = nn.Sequential(nn.Linear(8, 3), Fails())

    def add():
        orchestra.add_task(ModelTask(model, F.cross_entropy, batches(), 1e-2, seed=5, name="second"))

    first = task("first", at := At(2, add))
    orchestra = orchestra_of(first)
    report = orchestra.train_models()
    assert [type(error) for error in at.errors] == [ZeroDivisionError]
    assert_as_alone(first, report.tasks["first"])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"priority": 1.5}, TypeError, "priority 1.5 int"),
        ({"weight": "much"}, TypeError, "weight"),
        ({"weight": 0}, ValueError, "weight 0"),
        ({"weight": float("inf")}, ValueError, "weight inf"),
    ],
)
def test_malformed_priority_or_weight_is_refused(options, error, words):
    with refused(error, says=words):
        task("task", **options)


@pytest.mark.rest
def test_scheduler_of_a_run_has_the_priority_and_the_weight_of_each_task(monkeypatch):
    """The order that follows is asserted in tests/schedule: in a run, it also depends on when loaders deliver."""
    received, handle = {}, Scheduler.handle

    def spied(scheduler, event):
        if isinstance(event, TaskAdded):
            received[event.task] = event.priority, event.weight
        return handle(scheduler, event)

    monkeypatch.setattr(Scheduler, "handle", spied)
    last = task("last", priority=-2, weight=0.5)
    first = task("first", At(1, lambda: orchestra.add_task(last)), priority=3, weight=2.0)
    orchestra = orchestra_of(first, task("plain"))
    orchestra.train_models()
    assert received == {"first": (3, 2.0), "plain": (0, 1.0), "last": (-2, 0.5)}


def test_frozen_parameter_is_shared_with_a_task_that_joins_later():
    base = nn.Linear(8, 8).requires_grad_(False)
    heads = {}

    def on_base(name, *callbacks):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            heads[name] = nn.Linear(8, 3)
        model = nn.Sequential(base, heads[name])
        return ModelTask(model, F.cross_entropy, batches(), 1e-2, name=name, seed=0, callbacks=callbacks)

    before = base.weight.clone()
    first = on_base("first", at := At(2, lambda: orchestra.add_task(on_base("second"))))
    orchestra = orchestra_of(first)
    report = orchestra.train_models()
    assert at.errors == []
    assert torch.equal(base.weight, before)
    assert base.weight.untyped_storage().nbytes() == base.weight.nbytes
    assert report.tasks["second"].losses == report.tasks["first"].losses
    assert torch.equal(heads["second"].weight, heads["first"].weight)
    assert orchestra.plan.tasks["second"].dram["weights"] < orchestra.plan.tasks["first"].dram["weights"]
    orchestra.add_task(on_base("third"))
    assert orchestra.train_models().tasks["third"].losses == report.tasks["first"].losses


def test_stopping_a_task_of_an_earlier_run_leaves_this_one_alone():
    first, second = task("first"), task("second", seed=5)
    orchestra = orchestra_of(first)
    orchestra.train_models()
    second.callbacks = (at := At(2, lambda: orchestra.stop_task("first")),)
    orchestra.add_task(second)
    report = orchestra.train_models()
    assert at.errors == []
    assert_as_alone(second, report.tasks["second"])


def test_stop_at_the_very_end_comes_too_late():
    first = task("first", at := At("end", lambda: orchestra.stop_task("first")))
    orchestra = orchestra_of(first)
    report = orchestra.train_models()
    assert at.errors == []
    assert_as_alone(first, report.tasks["first"])


def test_autocast_around_it_is_refused():
    orchestra = orchestra_of(task("first"))
    with torch.autocast("cpu"), refused(RuntimeError, says="add_task autocast"):
        orchestra.add_task(task("second"))


def test_report_has_the_schedule_that_was():
    tasks = [task("a"), task("b", seed=5)]
    report = orchestra_of(*tasks).train_models()
    schedule = report.schedule
    assert len(schedule) == 2 * STEPS * EPOCHS * 5
    validate(schedule, dict.fromkeys("ab", training_chain(3, 0)))
    assert {span.lane for span in report.spans} == {"compute", "load", "store", "commit", "update"}


# -- user code that hangs, or takes its time


class Gate:
    """A loader whose batch number `at` waits until it is let go of."""

    def __init__(self, at):
        self.at, self.hangs, self.go_on, self.num_read = at, threading.Event(), threading.Event(), 0

    def __len__(self):
        return STEPS

    def __iter__(self):
        for batch in batches():
            if self.num_read == self.at:
                self.hangs.set()
                assert self.go_on.wait(30)
            self.num_read += 1
            yield batch


def in_background(job, *, after):
    """Run a job in a thread of its own once an event has happened; its errors are collected."""
    errors = []

    def run():
        try:
            assert after.wait(30)
            job()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("is_alone", [False, pytest.param(True, marks=pytest.mark.rest)])
def test_loader_that_hangs_while_a_task_joins_is_timed_out(is_alone, hangs):
    hanging, first, second = Gate(3), task("first", seed=1), task("second", seed=5)
    hangs.append(hanging.hangs)
    victim = task("victim", seed=2, timeout_s=0.2, loader_alone=is_alone)
    victim.dataloader = hanging
    orchestra = orchestra_of(first, victim)
    first.callbacks = (At(1, lambda: hanging.hangs.wait(30)),)  # is still at work then
    thread, errors = in_background(lambda: orchestra.add_task(second), after=hanging.hangs)
    report = orchestra.train_models()
    hanging.go_on.set()
    thread.join(30)
    if "second" not in report.tasks:  # its plan was made too late
        report.tasks.update(orchestra.train_models().tasks)
    assert errors == []
    assert isinstance(report.tasks["victim"].exception, TimeoutError)
    assert report.tasks["victim"].steps == 3
    assert_as_alone(first, report.tasks["first"])
    assert_as_alone(second, report.tasks["second"])


class HangsOnceTold(Gate):
    """A loader that goes on and on, and hangs as soon as that is wanted."""

    def __init__(self):
        super().__init__(None)
        self.is_wanted = threading.Event()

    def __iter__(self):
        for batch in itertools.cycle(batches()):
            if self.is_wanted.is_set():
                self.hangs.set()
                assert self.go_on.wait(30)
            yield batch


def test_loader_that_hangs_as_a_planned_task_is_set_up_is_timed_out(monkeypatch, hangs):
    """The plan is made by then, so that only the set-up in the run is left, which must not wait for that loader."""
    hanging, begun, first, second = HangsOnceTold(), threading.Event(), task("first", seed=1), task("second", seed=5)
    hangs.append(hanging.hangs)
    joined, add = threading.Event(), Joining.add
    monkeypatch.setattr(Joining, "add", lambda *args: (add(*args), joined.set())[0])
    victim = task("victim", At(1, begun.set), seed=2, timeout_s=0.2)
    victim.dataloader = hanging
    orchestra = orchestra_of(first, victim)
    orchestra.generate()
    first.callbacks = (At(1, lambda: joined.wait(30)),)
    plan = Site.plan_one

    def then_hang(*args):
        planned = plan(*args)
        hanging.is_wanted.set()
        assert hanging.hangs.wait(30)
        return planned

    monkeypatch.setattr(Site, "plan_one", then_hang)
    thread, errors = in_background(lambda: orchestra.add_task(second), after=begun)
    report = orchestra.train_models()
    hanging.go_on.set()
    thread.join(30)
    assert errors == []
    assert isinstance(report.tasks["victim"].exception, TimeoutError)
    assert_as_alone(first, report.tasks["first"])
    assert_as_alone(second, report.tasks["second"])


class Factories:
    """Of an optimizer and a schedule, which wait in the run until they are let go of."""

    def __init__(self):
        self.is_armed, self.hangs, self.go_on = False, threading.Event(), threading.Event()

    def wait(self):
        if self.is_armed:
            self.hangs.set()
            assert self.go_on.wait(30)

    def optimizer(self, parameters, lr):
        self.wait()
        return torch.optim.SGD(parameters, lr=lr)

    def scheduler(self, optimizer):
        self.wait()
        return torch.optim.lr_scheduler.StepLR(optimizer, 1000)


def test_factory_that_hangs_fails_its_task_alone(hangs):
    factories = Factories()
    hangs.append(factories.hangs)
    victim = task("victim", seed=2, optimizer=factories.optimizer, timeout_s=0.2)
    first = task("first", seed=1)
    orchestra = orchestra_of(victim, first)
    orchestra.generate()
    factories.is_armed = True
    before = threading.enumerate()
    report = orchestra.train_models()
    factories.go_on.set()
    for thread in set(threading.enumerate()) - set(before):
        thread.join(30)  # the one that hung ends now
    assert isinstance(report.tasks["victim"].exception, TimeoutError)
    names(report.tasks["victim"].error, says="set-up factory 0.2")
    assert_as_alone(first, report.tasks["first"])


@pytest.mark.parametrize("what", ["optimizer", "length", pytest.param("lr_scheduler", marks=pytest.mark.rest)])
def test_others_train_while_user_code_of_a_set_up_takes_its_time(what):
    """It waits for the end of the other one, which the deciding thread has to see to."""
    factories = Factories()
    options = {"optimizer": {"optimizer": factories.optimizer}, "lr_scheduler": {"lr_scheduler": factories.scheduler}}
    slow = task("slow", seed=2, **options.get(what, {}))

    class Slow(list):
        def __len__(self):
            factories.wait()
            return super().__len__()

    if what == "length":
        slow.dataloader = Slow(batches())
    first = task("first", At("end", factories.go_on.set), seed=1)
    orchestra = orchestra_of(slow, first)
    orchestra.generate()
    factories.is_armed = True
    report = orchestra.train_models()
    assert_as_alone(first, report.tasks["first"])
    assert_as_alone(slow, report.tasks["slow"])


def test_task_may_be_stopped_while_it_is_set_up():
    factories = Factories()
    slow = task("slow", seed=2, optimizer=factories.optimizer)
    first = task("first", At(2, lambda: (orchestra.stop_task("slow"), factories.go_on.set())), seed=1)
    orchestra = orchestra_of(slow, first)
    orchestra.generate()
    factories.is_armed = True
    report = orchestra.train_models()
    assert_as_alone(first, report.tasks["first"])
    assert report.tasks["slow"].status == "stopped"
    assert report.tasks["slow"].steps == 0


def test_run_ends_while_a_task_that_would_join_hangs_in_its_loader(hangs):
    """The validation of the one that trains is opened meanwhile, for the first time, for which it has to be alone."""
    hanging, joining = Gate(0), task("joining", seed=5, timeout_s=0.2)
    hangs.append(hanging.hangs)
    joining.dataloader = hanging
    begun = threading.Event()
    first = task("first", At(1, lambda: (begun.set(), hanging.hangs.wait(30))), seed=1, validation=batches())
    orchestra = orchestra_of(first)
    thread, errors = in_background(lambda: orchestra.add_task(joining), after=begun)
    report = orchestra.train_models()
    assert_as_alone(first, report.tasks["first"])
    assert list(report.tasks) == ["first"]
    hanging.go_on.set()
    thread.join(30)
    [error] = errors
    assert isinstance(error, TimeoutError)
    names(error, task="joining", says="timeout_s 0.2")
    orchestra.stop_task("first")  # nobody holds what it needs


class Stops(Callback):
    def on_step(self, report):
        if report.steps == 3:
            raise StopTask


def head_of(model, *callbacks, loader=None):
    return ModelTask(model, F.cross_entropy, loader or batches(), 1e-2, name="head", seed=0, callbacks=callbacks)


def whole_of(model, loader=None):
    model.requires_grad_(True)
    return ModelTask(model, F.cross_entropy, loader or batches(), 1e-2, 2, name="whole", seed=5)


def half_frozen():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


def loader_of(seed):
    pairs = [(x, y) for xs, ys in batches() for x, y in zip(xs, ys, strict=True)]
    return DataLoader(pairs, 5, shuffle=True, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("callbacks", [(), (Stops(),)], ids=["finished", "stopped"])
def test_model_is_trained_on_by_another_task_from_the_end_of_its_own(callbacks):
    expected, model = half_frozen(), half_frozen()
    orchestra_of(head_of(expected, *callbacks)).train_models()
    losses = orchestra_of(whole_of(expected)).train_models().tasks["whole"].losses
    head = head_of(model, *callbacks, at := At("end", lambda: orchestra.add_task(whole_of(model))))
    orchestra = orchestra_of(head, task("other", seed=7))
    report = orchestra.train_models()
    assert at.errors == []
    assert report.tasks["whole"].losses == losses
    exact.assert_same_state(zoo.state(model), zoo.state(expected))


class OwnForward(nn.Module):
    """Not made of layers until its loader's first batch is there."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


@pytest.mark.parametrize("step", [1, "end"])
def test_a_loader_that_is_read_where_a_callback_adds_its_task_draws_from_the_tasks_stream(step):
    def make():
        torch.manual_seed(1)
        data = [(x, y) for xs, ys in batches() for x, y in zip(xs, ys, strict=True)]
        return OwnForward(), F.cross_entropy, DataLoader(data, 5, shuffle=True)

    orchestra = orchestra_of(
        task("first", at := At(step, lambda: orchestra.add_task(ModelTask(*make(), 1e-2, 2, name="second", seed=5))))
    )
    report = orchestra.train_models()
    assert at.errors == []
    assert report.tasks["second"].losses == reference.train(*make(), seed=5, lr=1e-2, epochs=2).losses


def test_a_loader_that_was_read_to_its_end_is_read_on():
    model, loader = half_frozen(), loader_of(3)
    head = head_of(model, at := At("end", lambda: orchestra.add_task(whole_of(model, loader))), loader=loader)
    orchestra = orchestra_of(head)
    report = orchestra.train_models()
    expected, loader = half_frozen(), loader_of(3)
    orchestra_of(head_of(expected, loader=loader)).train_models()
    orchestra_of(whole_of(expected, loader)).train_models()
    assert (at.errors, report.tasks["whole"].status) == ([], "finished")
    exact.assert_same_state(zoo.state(model), zoo.state(expected))


def test_a_loader_whose_reading_was_broken_off_is_not_shared():
    model, loader = half_frozen(), loader_of(3)
    head = head_of(model, Stops(), at := At("end", lambda: orchestra.add_task(whole_of(model, loader))), loader=loader)
    orchestra = orchestra_of(head)
    assert list(orchestra.train_models().tasks) == ["head"]
    names(at.errors[0], says="generator head whole")


def test_weights_that_another_task_reads_frozen_are_not_trained():
    model = half_frozen()
    other = head_of(nn.Sequential(model[0], nn.Linear(8, 3)))
    other.name, other.epochs = "other", 9
    head = head_of(model, at := At("end", lambda: orchestra.add_task(whole_of(model))))
    orchestra = orchestra_of(head, other, num_devices=1)
    assert set(orchestra.train_models().tasks) == {"head", "other"}
    names(at.errors[0], says="parameter other whole")


def test_all_tasks_may_come_later_and_the_policy_may_be_another():
    orchestra = orchestra_of()
    orchestra.policy = "fifo"
    orchestra.add_task(task("a"))
    assert orchestra.train_models().tasks["a"].steps == STEPS * EPOCHS
    orchestra.policy = "best"
    orchestra.add_task(task("b"))
    with refused(says="policy: 'best'"):
        orchestra.train_models()
