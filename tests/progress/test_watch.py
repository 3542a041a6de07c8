"""Observers are shown a run from a thread of their own, and nothing of that reaches the run."""

import io
import os
import sys
import threading
import time
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.progress import (
    AtWork,
    DeviceProgress,
    Doing,
    Observer,
    PlainLines,
    RunProgress,
    TaskProgress,
    Watch,
    usual_observer,
    watch,
)
from hydra_engine.progress.watch import _Rates
from tests.refused import names


def look(steps=3, doing=Doing.COMPUTING, name="a"):
    device = DeviceProgress("cpu:0", AtWork.IDLE, None, 1, 2, 3, 4, 5.0)
    return RunProgress(2.0, [TaskProgress(name, doing, steps, 10, 1.25)], [device])


class Notes(Observer):
    """Keeps what it is shown."""

    period_s = 0.001

    def __init__(self):
        self.shown, self.ended, self.has_left = [], [], False

    def show(self, run):
        self.shown.append(run)

    def close(self, run):
        self.ended.append(run)

    def leave(self):
        self.has_left = True


class Decider:
    """The thread that decides: does the jobs that it is asked for in its own thread, the caller's."""

    def __init__(self):
        self.jobs = []
        self.asked = threading.Semaphore(0)

    def ask(self, job):
        self.jobs.append(job)
        self.asked.release()

    def work(self):
        """Wait for a job, and do it."""
        assert self.asked.acquire(timeout=30)
        self.jobs.pop(0)()


def run_through(observer, look=look):
    decider = Decider()
    watching = Watch(observer, look, decider.ask)
    watching.open()
    decider.work()
    watching.close()


def no_thread_is_left():
    return all(thread.name != "hydra-observer" for thread in threading.enumerate())


def test_without_an_observer_nobody_looks():
    decider = Decider()
    watching = Watch(None, look, decider.ask)
    watching.open()
    assert no_thread_is_left()
    watching.close()
    assert decider.jobs == []


def test_looks_are_taken_by_the_thread_that_decides_and_the_last_one_tells_the_end():
    threads, looks, notes = [], iter([look(0), look(10, Doing.FINISHED)]), Notes()

    def looked():
        threads.append(threading.current_thread())
        return next(looks)

    run_through(notes, looked)
    assert threads == [threading.current_thread()] * 2
    [end] = notes.ended
    assert (end.tasks[0].steps, end.tasks[0].doing, end.now_s) == (10, Doing.FINISHED, 2.0)
    assert notes.has_left
    assert no_thread_is_left()


def fails(*_):
    raise ValueError("no look")


@pytest.mark.parametrize("of_the_observer", [True, False])
def test_an_error_ends_it_and_nothing_else(capsys, of_the_observer):
    notes = Notes()
    if of_the_observer:
        notes.show = notes.close = fails
    run_through(notes, look if of_the_observer else fails)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    names(err, says="hydra_engine: display ValueError:")
    assert notes.has_left
    assert no_thread_is_left()


def test_an_error_as_it_leaves_is_told(capsys):
    notes = Notes()
    notes.leave = fails
    run_through(notes)
    names(capsys.readouterr().err, says="hydra_engine: display ValueError:")
    assert len(notes.ended) == 1


def test_an_observer_that_does_not_return_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(watch, "STUCK_S", 0.1)
    free, is_stuck, notes = threading.Event(), threading.Event(), Notes()

    def show(_):
        is_stuck.set()
        free.wait(30)

    notes.show, begun_s, decider = show, time.monotonic(), Decider()
    watching = Watch(notes, look, decider.ask)
    watching.open()
    decider.work()
    assert is_stuck.wait(30)
    [thread] = [each for each in threading.enumerate() if each.name == "hydra-observer"]
    watching.close()
    assert notes.has_left
    assert time.monotonic() - begun_s < 20
    free.set()
    thread.join(30)


# -- rates


def seen(*looks):
    """The task of the last of looks, each of seconds and steps, with rates."""
    rates = _Rates()
    for now_s, steps, *doing in looks:
        found = rates.added(RunProgress(now_s, [TaskProgress("a", *(doing or [Doing.COMPUTING]), steps, 10)], []))
    return found.tasks[0]


def test_rate_and_time_left_are_those_of_the_steps_that_were_seen():
    found = seen((1.0, 0), (2.0, 2), (3.0, 4))
    assert (found.steps_per_s, found.left_s) == (2.0, 3.0)
    assert found._replace(num_steps=None).left_s is None
    assert seen(*((float(k), 100 * min(k, 10) + k) for k in range(100))).steps_per_s == 1.0  # of the last 30 seconds


def test_a_rate_sinks_while_a_step_is_overdue():
    assert seen((0.0, 0), (1.0, 1), (9.0, 1)).steps_per_s == 2 / 9


def test_nothing_is_said_of_one_step_nor_of_a_task_that_is_over_or_began_again():
    assert seen((0.0, 1)).steps_per_s is None
    assert seen((0.0, 1), (1.0, 2, Doing.PAUSED)).left_s is None
    assert seen((0.0, 5), (1.0, 0)).steps_per_s is None


def test_a_task_is_active_for_some_seconds_after_it_has_computed():
    waits = Doing.DEVICE
    assert [seen((0.0, 1), (end_s, 1, waits)).is_active for end_s in (10.0, 11.0)] == [True, False]
    assert seen((0.0, 1, waits), (20.0, 2, waits)).is_active
    assert not seen((0.0, 1, waits)).is_active


def test_flows_are_those_of_the_last_seconds_and_at_the_end_of_the_whole_run():
    rates = _Rates()
    for k in range(11):
        device = DeviceProgress("cpu:0", AtWork.IDLE, None, 0, 100, 100 * k * k, 50 * k, 0.5 * k)
        found = rates.added(RunProgress(float(k), [], [device])).devices[0]
    assert (found.loaded_per_s, found.stored_per_s, found.busy_share) == (1500.0, 50.0, 0.5)
    found = rates.added(RunProgress(20.0, [], [device]), is_last=True).devices[0]
    assert (found.loaded_per_s, found.stored_per_s, found.busy_share) == (500.0, 25.0, 0.25)


# -- of whole runs


def task(num_steps, name="a"):
    torch.manual_seed(0)
    layers = [nn.Linear(160, 160) for _ in range(6)]
    data = [(torch.randn(16, 160), torch.randn(16, 160)) for _ in range(num_steps)]
    return ModelTask(layers, nn.MSELoss(), data, 1e-3, name=name)


def orchestra_of(task):
    return ModelOrchestrator([task], devices=[EmulatedDevice(memory="900KiB")])


def test_an_observer_is_shown_a_run_and_no_bit_of_it_depends_on_that():
    found, notes = [], Notes()
    for observer, verbose in ((notes, 1), (None, 0)):
        made = task(20)
        orchestra = orchestra_of(made)
        orchestra.observer, orchestra.verbose = observer, verbose
        losses = orchestra.train_models().tasks[made.name].losses
        found.append((losses, [parameter.detach() for parameter in made.model.parameters()]))
    (losses, weights), (plain_losses, plain_weights) = found
    assert losses == plain_losses
    assert all(map(torch.equal, weights, plain_weights))
    [end] = notes.ended
    assert (end.tasks[0].name, end.tasks[0].doing, end.tasks[0].steps) == ("a", Doing.FINISHED, 20)
    assert end.tasks[0].loss == losses[-1]
    assert end.devices[0].memory_bytes == 900 * 1024
    assert all(run.tasks[0].steps <= 20 for run in notes.shown)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_without_the_display_a_terminal_gets_lines(monkeypatch, capsys):
    assert isinstance(usual_observer(), PlainLines)
    monkeypatch.setitem(sys.modules, "hydra_engine.display", None)
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    assert isinstance(usual_observer(), PlainLines)
    orchestra_of(task(2)).train_models()
    [last] = [line for line in stream.getvalue().splitlines() if line.endswith("finished")]
    assert " s  a 2/2 loss " in last


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", encoding="utf-8", buffering=1)


@pytest.mark.parametrize(
    "make", [closed_pipe, lambda: None, lambda: io.TextIOWrapper(io.BytesIO(), "ascii"), lambda: Mock(isatty=fails)]
)
def test_training_needs_no_stdout(make, monkeypatch):
    stream = make()
    orchestra = orchestra_of(task(2, "学"))
    monkeypatch.setattr(sys, "stdout", stream)
    report = orchestra.train_models()
    assert report.tasks["学"].status == "finished"
    assert sys.stdout is stream
    assert no_thread_is_left()
    if isinstance(stream, io.TextIOWrapper) and not isinstance(stream.buffer, io.BytesIO):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # its buffer is written as it is closed
        stream.close()
