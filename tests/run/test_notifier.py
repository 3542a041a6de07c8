"""A task's callbacks are told in order, in a thread of their own, until one ends the task or does not return."""

import threading
from contextlib import nullcontext
from queue import SimpleQueue

import pytest

from hydra_engine import Callback, CallbackTimeout, StopTask, TaskReport
from hydra_engine.data import GLOBAL_GENERATORS, Stream, UserDraws, capture
from hydra_engine.run.ending import TaskEnd
from hydra_engine.run.notifier import Notifier, Recipients
from hydra_engine.schedule.events import Failed, TaskStopped
from tests.refused import names
from tests.run.test_forget import raises


class Log(Callback):
    """Writes down its calls into a list that others share, and acts at one of them."""

    def __init__(self, calls, name="", at=None, action=None):
        self.calls, self.name, self.at, self.action = calls, name, at, action

    def note(self, call):
        self.calls.append(self.name + call)
        if call == self.at:
            if isinstance(self.action, BaseException):
                raise self.action
            self.action()

    def on_step(self, report):
        self.note(f"step {report.steps}")

    def on_validation(self, report):
        self.note("validation")

    def on_epoch(self, report, epoch):
        self.note(f"epoch {epoch}")

    def on_task_end(self, report):
        self.note("end")


PATIENCE_S = 30


@pytest.fixture
def notifier_of():
    """Makes notifiers, whose threads are joined in the end: tests let go of what they hold up."""
    made = []

    def make(*callbacks, **options):
        events = SimpleQueue()
        report, stream = TaskReport(name="late", seed=0), Stream(capture())
        recipients = Recipients(callbacks, report, UserDraws("late"), stream)
        made.append(Notifier(recipients, TaskEnd(), events.put, **options))
        return made[-1], events

    yield make
    for each in made:
        each.close()
    join_threads()


def join_threads():
    for thread in threading.enumerate():
        if thread.name.endswith("-callbacks"):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.fixture
def hung(notifier_of):
    """Makes a notifier whose callback hangs in its first step; its events, and what lets the callback go on."""

    def make(*others, calls=None, within=nullcontext, then=lambda: None, **options):
        inside, go = threading.Event(), threading.Event()

        def hang():
            with within():
                inside.set()
                assert go.wait(PATIENCE_S)
            then()

        notifier, events = notifier_of(
            Log([] if calls is None else calls, at="step 0", action=hang), *others, **options
        )
        notifier.step()
        assert inside.wait(PATIENCE_S)
        return notifier, events, go

    return make


def wait_for(notifier):
    told = threading.Event()
    notifier.when_told(told.set)
    assert told.wait(PATIENCE_S)


def tell_all(notifier):
    notifier.step()
    notifier.validation()
    notifier.epoch(2)
    notifier.end()
    wait_for(notifier)


def test_every_callback_is_told_everything_in_order(notifier_of):
    calls = []
    notifier, events = notifier_of(Log(calls, "x "), Log(calls, "y "))
    tell_all(notifier)
    assert calls == [f"{name} {what}" for what in ("step 0", "validation", "epoch 2", "end") for name in "xy"]
    assert events.empty()
    assert not notifier._end.is_stopped
    assert notifier.close() is None


ERRORS = [StopTask(), RuntimeError("boom"), SystemExit(3), KeyboardInterrupt()]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_after_an_error_only_the_end_is_told(error, notifier_of):
    calls = []
    notifier, events = notifier_of(Log(calls, "x ", "validation", error), Log(calls, "y "))
    tell_all(notifier)
    assert calls == ["x step 0", "y step 0", "x validation", "x end", "y end"]
    event = events.get_nowait()
    assert event == (TaskStopped("late") if isinstance(error, StopTask) else Failed("late", error, "its callback"))
    assert events.empty()
    assert notifier._end.is_stopped
    assert notifier.close() is None


def test_a_job_waits_for_what_was_told_before(notifier_of):
    calls, go, done = [], threading.Event(), threading.Event()
    notifier, _ = notifier_of(Log(calls, at="step 0", action=go.wait))
    notifier.step()
    assert not notifier.is_told
    notifier.when_told(lambda: (calls.append("job"), done.set()))
    go.set()
    assert done.wait(PATIENCE_S)
    assert calls == ["step 0", "job"]
    assert notifier.is_told


def test_what_is_held_is_told_once_updates_are_through(notifier_of):
    calls = []
    notifier, _ = notifier_of(Log(calls))
    notifier.step(is_updated=False)
    notifier.epoch(1)
    assert not notifier.is_told
    assert calls == []
    notifier.let_go()
    wait_for(notifier)
    assert calls == ["step 0", "epoch 1"]


def test_without_callbacks_nothing_waits_and_no_thread_is_made(notifier_of):
    before = threading.active_count()
    notifier, _ = notifier_of(timeout_s=1.0)
    tell_all(notifier)
    calls = []
    notifier.when_told(lambda: calls.append(threading.current_thread()))
    assert calls == [threading.current_thread()]
    assert threading.active_count() == before
    assert notifier.timeout_s is None


def test_a_call_that_does_not_return_is_left_behind_and_what_waited_goes_on(hung):
    calls = []
    notifier, events, go = hung(Log(calls, "y "), calls=calls, timeout_s=1e-9)
    notifier.when_told(lambda: calls.append("job"))
    assert notifier.leave_behind() is None
    assert calls == ["step 0", "job"]
    failed = events.get_nowait()
    assert isinstance(failed.error, CallbackTimeout)
    names(failed.error, task="late", says="Log.on_step 1e-09 timeout_s")
    assert notifier._end.ending.error is failed.error
    assert notifier._end.is_stopped
    notifier.end()  # nobody is there to be told
    assert notifier.is_told
    assert notifier.close() == "Log.on_step"
    go.set()
    join_threads()
    assert calls == ["step 0", "job"]
    assert events.empty()
    assert notifier.close() is None


def test_a_late_error_is_nobodys(hung):
    notifier, events, go = hung(then=raises(StopTask), timeout_s=1e-9)
    notifier.leave_behind()
    events.get_nowait()
    go.set()
    join_threads()
    assert events.empty()


def test_nobody_is_late_between_calls(notifier_of):
    notifier, _ = notifier_of(Log([]), timeout_s=1e-9)
    assert notifier.leave_behind() == 1e-9
    tell_all(notifier)
    assert notifier.leave_behind() == 1e-9
    assert notifier.close() is None


def test_an_interrupt_leaves_a_call_no_more_than_seconds_and_fails_nothing(monkeypatch, hung):
    monkeypatch.setattr("hydra_engine.run.notifier.INTERRUPTED_S", 1e-9)
    notifier, events, go = hung(timeout_s=None)
    notifier.hurry()
    assert notifier.leave_behind(fails=False) is None
    assert events.empty()
    assert not notifier._end.is_stopped
    assert notifier.close() == "Log.on_step"
    go.set()


def test_a_lock_on_the_generators_that_a_late_thread_holds_is_taken_away(hung):
    notifier, _, go = hung(within=GLOBAL_GENERATORS.turn, timeout_s=1e-9)
    assert not GLOBAL_GENERATORS.is_free
    notifier.leave_behind()
    assert GLOBAL_GENERATORS.is_free
    go.set()
