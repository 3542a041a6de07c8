"""A loader that hangs fails its task when its time is up; the others go on, with their bits."""

import random
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

import hydra_engine
from hydra_engine import Callback, LoaderTimeout, ModelTask
from hydra_engine.data.reader import Reader
from hydra_engine.data.streams import GLOBAL_GENERATORS, GlobalGenerators, Stream, capture, installed
from hydra_engine.run.signals import Deadlines, Inbox, Overdue
from hydra_engine.schedule.events import DataEnded, StopRequested
from tests import exact, zoo
from tests.covering import covering
from tests.data.test_streams import draws_of, everything, state_of
from tests.promises.test_faults import committed, trapped_model, victim
from tests.refused import names, refused

PATIENCE_S = 30
SHORT_S = 0.2


class Hanging:
    """A loader whose batch number `at`, counted over all epochs, waits for `go_on`; -1: opening it does."""

    def __init__(self, at, *, draws=False):
        self.loader, self.at, self.draws = trapped_model()[2], at, draws
        self.go_on, self.hangs, self.num_read, self.num_opened = threading.Event(), threading.Event(), 0, 0

    def __len__(self):
        return len(self.loader)

    def hang(self):
        self.hangs.set()
        assert self.go_on.wait(PATIENCE_S)
        if self.draws:
            torch.rand(1)

    def __iter__(self):
        self.num_opened += 1
        if self.at == -1 and self.num_opened == 2:
            self.hang()
        return self.batches()

    def batches(self):
        for batch in self.loader:
            if self.num_read == self.at:
                self.hang()
            self.num_read += 1
            yield batch


@pytest.fixture
def hanging(hangs):
    """Loaders that are let go of in the end, with their threads."""
    made = []

    def make(at, **options):
        made.append(Hanging(at, **options))
        hangs.append(made[-1].hangs)
        return made[-1]

    yield make
    for each in made:
        each.go_on.set()
    for thread in threading.enumerate():
        if thread.name.endswith("-reader"):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def build(loader):
    model, loss_fn, _ = trapped_model()
    return lambda: (model, loss_fn, loader)


def run_beside(task, name="mlp"):
    """The report of a task whose loader is too late, while another one trains to its bits."""
    other, model = exact.task_of(name, epochs=1)
    report = exact.run([task, other])
    exact.assert_as_expected(report, name, model, exact.expected(name, epochs=1))
    assert isinstance(report.tasks["victim"].exception, LoaderTimeout)
    return report.tasks["victim"]


def draws_outside():
    """The process-wide generators are what they were: a run must not leave anything in them."""
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


@pytest.mark.rest
@covering(strength=1, at=[-1, 4], num_devices=[1, 2])
def test_others_go_on_with_their_bits_and_no_retry_helps(at, num_devices, hanging):
    loader = hanging(at)
    task, model = victim(build(loader), timeout_s=SHORT_S, max_retries=3)
    other, other_model = exact.task_of("dropout")
    before = draws_outside()
    report = exact.run([other, task], num_devices=num_devices)
    assert draws_outside() == before
    assert loader.hangs.is_set()
    outcome = report.tasks["victim"]
    expected = committed(10 if at == -1 else at)
    assert outcome.status == "failed"
    assert isinstance(outcome.exception, LoaderTimeout)
    assert outcome.retries == []
    assert outcome.losses == expected.losses  # what was read before is trained on
    exact.assert_same_state(zoo.state(model), expected.state)
    exact.assert_as_expected(report, "dropout", other_model, exact.expected("dropout"))
    names(outcome.error, task="victim", says="0.2 timeout_s victim-reader")


@pytest.mark.rest
def test_validation_batch_counts_too(hanging):
    task, _ = victim(timeout_s=SHORT_S, validation=hanging(3))
    assert run_beside(task).steps == 10


@pytest.mark.rest
def test_split_counts_too(hanging):
    loader, calls = hanging(None), []

    def split(inputs, target, number):
        calls.append(number)
        if len(calls) == 8:
            loader.hang()
        return hydra_engine.split(inputs, target, number)

    task, _ = victim(accumulation_steps=2, split=split, timeout_s=SHORT_S)
    run_beside(task)


@pytest.mark.rest
def test_close_does_not_wait_for_it_again_and_a_thread_that_wakes_up_late_changes_nothing(hanging, monkeypatch):
    """But what it draws itself before it comes back, which nobody can prevent."""
    monkeypatch.setattr("hydra_engine.data.reader.JOIN_S", 3 * PATIENCE_S)
    loader = hanging(4)
    task, model = victim(build(loader), timeout_s=SHORT_S)
    start_s = time.monotonic()
    outcome = run_beside(task)
    assert time.monotonic() - start_s < 3 * PATIENCE_S
    state, before = zoo.state(model), draws_outside()
    loader.go_on.set()
    [thread] = [each for each in threading.enumerate() if each.name == "victim-reader"]
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert draws_outside() == before
    exact.assert_same_state(zoo.state(model), state)
    assert outcome.steps == 4
    assert GLOBAL_GENERATORS.is_free


@pytest.mark.rest
def test_it_is_a_timeout_of_the_builtin_kind_and_another_run_in_the_same_process_is_undisturbed(hanging):
    task, _ = victim(build(hanging(4)), timeout_s=SHORT_S)
    with refused(TimeoutError, task="victim", says="loader 0.2") as caught:
        exact.run([task])
    assert isinstance(caught.value, LoaderTimeout)
    again, model = victim()
    exact.assert_as_expected(exact.run([again]), "victim", model, committed(None))


@pytest.mark.rest
def test_waiting_for_anothers_loader_does_not_count(hanging, monkeypatch):
    """A task of a shorter time-out stands behind one that takes long, and is not to blame."""
    slow, wait = hanging(1), GlobalGenerators._wait

    def waits(generators, patience_s):
        if slow.hangs.is_set() and threading.current_thread().name.startswith("dropout-"):
            slow.go_on.set()
        return wait(generators, patience_s)

    class Meets(Callback):
        def on_step(self, report):
            assert slow.hangs.wait(PATIENCE_S)

    monkeypatch.setattr(GlobalGenerators, "_wait", waits)
    task, model = victim(build(slow), timeout_s=None, loader_alone=True)
    other, other_model = exact.task_of("dropout", timeout_s=10 * SHORT_S, loader_alone=True, callbacks=[Meets()])
    report = exact.run([task, other])
    assert slow.go_on.is_set()
    exact.assert_as_expected(report, "dropout", other_model, exact.expected("dropout"))
    exact.assert_as_expected(report, "victim", model, committed(None))


def test_evaluation_has_it_too(hanging):
    model, loss_fn, _ = trapped_model()
    task = ModelTask(model, loss_fn, [], timeout_s=SHORT_S, name="victim")
    other, _ = exact.task_of("mlp")
    orchestra = exact.orchestrator([other])
    with refused(LoaderTimeout, task="victim"):
        orchestra.evaluate(task, hanging(2))


def test_the_default_is_half_an_hour_and_times_that_are_none_are_refused():
    assert victim()[0].timeout_s == 1800
    for value, error in (
        *((number, ValueError) for number in (0, -1, float("inf"))),
        *((other, TypeError) for other in ("1", True)),
    ):
        with refused(error, says="timeout_s"):
            victim(timeout_s=value)


class TestInbox:
    def test_a_deadline_that_has_passed_is_an_event_and_what_is_there_comes_first(self):
        ended, stop = DataEnded("task"), StopRequested()
        for in_s, there, expected in ((-1, [], Overdue()), (-1, [ended], ended), (1e12, [stop], stop)):
            inbox = Inbox()
            inbox.deadline_s = time.monotonic() + in_s
            for each in there:
                inbox.put(each)
            with inbox as event:
                assert event == expected

    def test_it_sleeps_until_then(self):
        inbox = Inbox()
        begin_s = time.monotonic()
        inbox.deadline_s = begin_s + SHORT_S
        with inbox as event:
            assert event == Overdue()
        assert time.monotonic() - begin_s >= 0.9 * SHORT_S


class TestDeadlines:
    def test_only_those_whose_time_is_up(self):
        deadlines = Deadlines()
        deadlines.set("late", -1)
        deadlines.set("early", 1000)
        deadlines.set("came", -1)
        deadlines.drop("came")
        assert deadlines.next_s < time.monotonic()
        assert deadlines.take_due() == ["late"]
        assert time.monotonic() + 900 < deadlines.next_s < time.monotonic() + 1000
        assert deadlines.take_due() == []
        deadlines.drop("early")
        assert deadlines.take_due() == []
        assert deadlines.next_s == float("inf")


def test_states_of_a_thread_that_hangs_are_put_back():
    before, inside, go_on = draws_outside(), threading.Event(), threading.Event()
    stream = Stream(state_of(7))

    def hang():
        with installed(stream), installed(Stream(state_of(9))):
            everything()
            inside.set()
            assert go_on.wait(PATIENCE_S)
            everything()

    thread = threading.Thread(target=hang)
    thread.start()
    assert inside.wait(PATIENCE_S)
    GLOBAL_GENERATORS.take_from(None)
    GLOBAL_GENERATORS.take_from(threading.get_ident())
    assert not GLOBAL_GENERATORS.is_free
    GLOBAL_GENERATORS.take_from(thread.ident)
    assert GLOBAL_GENERATORS.is_free
    assert draws_outside() == before
    other = Stream(state_of(8))
    with installed(other):
        assert everything() == draws_of(8)[0]
    outside = capture()
    with installed(other):
        go_on.set()
        thread.join(PATIENCE_S)
        assert not GLOBAL_GENERATORS.is_free  # it is another thread's
    assert capture().same_as(outside)
    assert stream.state.same_as(state_of(7))


def test_thread_that_is_left_behind_at_the_end_loses_the_lock_too(hanging, monkeypatch):
    """After a Ctrl-C, say, without any time-out: the next run must not stand still for it."""
    monkeypatch.setattr("hydra_engine.data.reader.JOIN_S", 0.01)
    before = draws_outside()
    loader = hanging(0)
    reader = Reader(victim(build(loader), timeout_s=None)[0], "victim")
    reader.start(lambda _: None, 1)
    reader.request(None)
    assert loader.hangs.wait(PATIENCE_S)
    assert not GLOBAL_GENERATORS.is_free
    assert not reader.close()
    assert GLOBAL_GENERATORS.is_free
    assert draws_outside() == before


def test_answer_that_came_in_time_is_not_lost():
    events = []
    task = ModelTask([nn.Linear(2, 2)], nn.MSELoss(), [(torch.ones(1, 2), torch.ones(1, 2))], timeout_s=1e-6)
    reader = Reader(task, "task")
    came = threading.Event()
    reader.start(lambda event: (events.append(event), came.set()), 1)
    reader.request(None)
    assert came.wait(PATIENCE_S)
    assert reader.leave_behind() is not None
    assert reader.close()
    assert len(events) == 1
