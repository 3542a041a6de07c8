"""Callbacks are told in order, in a thread of their own, until one ends the task."""

import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from hydra_engine import Callback, StopTask, TaskReport
from hydra_engine.events import Failed, TaskStopped
from hydra_engine.notifier import Notifier


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


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def notifier_of(thread, *callbacks):
    events = SimpleQueue()
    return Notifier(callbacks, TaskReport(name="a", seed=0), thread, events.put), events


def tell_all(notifier):
    notifier.step()
    notifier.validation()
    notifier.epoch(2)
    notifier.end()
    notifier.wait()


def test_every_callback_is_told_everything_in_order(thread):
    calls = []
    notifier, events = notifier_of(thread, Log(calls, "x "), Log(calls, "y "))
    tell_all(notifier)
    assert calls == [f"{name} {what}" for what in ("step 0", "validation", "epoch 2", "end") for name in "xy"]
    assert events.empty()
    assert not notifier.is_stopped


@pytest.mark.parametrize("error", [StopTask(), RuntimeError("boom")], ids=repr)
def test_after_an_error_only_the_end_is_told(thread, error):
    calls = []
    notifier, events = notifier_of(thread, Log(calls, "x ", "validation", error), Log(calls, "y "))
    tell_all(notifier)
    assert calls == ["x step 0", "y step 0", "x validation", "x end", "y end"]
    event = events.get_nowait()
    assert event == (TaskStopped("a") if isinstance(error, StopTask) else Failed("a", error, "its callback"))
    assert events.empty()
    assert notifier.is_stopped


def test_a_job_waits_for_what_was_told_before(thread):
    calls, go = [], threading.Event()
    notifier, _ = notifier_of(thread, Log(calls, at="step 0", action=go.wait))
    notifier.step()
    notifier.when_told(lambda: calls.append("job"))
    go.set()
    notifier.wait()
    thread.submit(lambda: None).result()  # the job runs in the thread, after the call
    assert calls == ["step 0", "job"]


def test_without_callbacks_nothing_waits(thread):
    notifier, _ = notifier_of(thread)
    tell_all(notifier)
    calls = []
    notifier.when_told(lambda: calls.append(threading.current_thread()))
    assert calls == [threading.current_thread()]
