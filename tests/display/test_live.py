"""The display of a run: where it shows what, and that nothing of it reaches the run."""

import io
import os
import sys
import threading
import time
from unittest.mock import Mock

import pytest
import torch

from hydra_engine import EmulatedDevice, ModelOrchestrator
from hydra_engine.display import live
from hydra_engine.display.live import LiveDisplay, LogScreen, NotebookScreen, TerminalScreen, screen_for
from hydra_engine.display.progress import AtWork, DeviceProgress, Doing, RunProgress, TaskProgress
from tests.refused import names
from tests.screens import run_notebook, task


def look(steps=3, doing=Doing.COMPUTING, name="a"):
    device = DeviceProgress("cpu:0", AtWork.IDLE, None, 1, 2, 3, 4, 5.0)
    return RunProgress(2.0, [TaskProgress(name, doing, steps, 10, 1.25)], [device])


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


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


def run_through(display, decider, num_looks=1):
    display.open()
    for _ in range(num_looks):
        decider.work()
    display.close()


def no_thread_is_left():
    return all(thread.name != "hydra-display" for thread in threading.enumerate())


def test_silent_when_not_verbose():
    stream, decider = io.StringIO(), Decider()
    display = LiveDisplay(0, look, decider.ask, stream)
    display.open()
    assert no_thread_is_left()
    display.close()
    assert (stream.getvalue(), decider.jobs) == ("", [])


def test_a_log_has_lines_and_the_last_one_tells_the_end():
    stream, decider = io.StringIO(), Decider()
    looks = iter([look(0), look(10, Doing.FINISHED)])
    run_through(LiveDisplay(1, lambda: next(looks), decider.ask, stream), decider)
    lines = stream.getvalue().splitlines()
    assert lines[-1] == "   2.0 s  a 10/10 loss 1.250 finished"
    assert all(line.lstrip()[0].isdigit() for line in lines)
    assert no_thread_is_left()


def test_lines_of_a_log_become_rarer():
    screen, periods = LogScreen(io.StringIO()), []
    for now_s in (0.0, 100.0, 200.0, 1000.0, 10_000.0):
        history = live.History()
        run = look()._replace(now_s=now_s)
        history.add(run)
        screen.show(run, history)
        periods.append(screen.period_s)
    assert periods == [5.0, 5.0, 10.0, 50.0, 60.0]


def test_what_a_stream_cannot_show_is_a_question_mark():
    stream, decider = io.TextIOWrapper(io.BytesIO(), "ascii"), Decider()
    run_through(LiveDisplay(1, lambda: look(name="学"), decider.ask, stream), decider)
    assert stream.buffer.getvalue().splitlines()[-1] == b"   2.0 s  ? 3/10 loss 1.250"


def test_looks_are_taken_by_the_thread_that_decides_alone():
    seen, decider = [], Decider()

    def looked():
        seen.append(threading.current_thread())
        return look()

    run_through(LiveDisplay(1, looked, decider.ask, io.StringIO()), decider)
    assert seen == [threading.current_thread()] * 2


def test_where_it_is_shown(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(screen_for(Terminal()), TerminalScreen)
    assert isinstance(screen_for(io.StringIO()), LogScreen)
    monkeypatch.setattr(live, "_in_notebook", lambda: True)
    assert isinstance(screen_for(io.StringIO()), NotebookScreen)
    monkeypatch.setattr(live.importlib.util, "find_spec", lambda _: None)  # without rich
    assert isinstance(screen_for(io.StringIO()), LogScreen)
    assert isinstance(screen_for(Terminal()), LogScreen)


def fails(*_):
    raise ValueError("no look")


@pytest.mark.parametrize("is_verbose_terminal", [True, False])
def test_an_error_of_the_display_ends_it_and_nothing_else(capsys, monkeypatch, is_verbose_terminal):
    monkeypatch.setenv("TERM", "xterm")
    stdout = sys.stdout
    decider, stream = Decider(), Terminal() if is_verbose_terminal else io.StringIO()
    run_through(LiveDisplay(1, fails, decider.ask, stream), decider)
    assert sys.stdout is stdout
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    names(err, says="hydra_engine: display ValueError:")
    assert no_thread_is_left()


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", encoding="utf-8", buffering=1)


def test_a_stream_that_is_gone_ends_it_and_nothing_else(capsys):
    decider = Decider()
    with closed_pipe() as stream:
        run_through(LiveDisplay(1, look, decider.ask, stream), decider)
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # its buffer is written as it is closed
    names(capsys.readouterr().err, says="display BrokenPipeError")


def test_a_terminal_that_takes_nothing_holds_up_nobody(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(live, "STUCK_S", 0.1)
    free, is_stuck = threading.Event(), threading.Event()

    class Stopped(Terminal):
        def write(self, text):
            is_stuck.set()
            free.wait(30)
            return len(text)

    decider, begun_s = Decider(), time.monotonic()
    display = LiveDisplay(1, look, decider.ask, Stopped())
    display.open()
    decider.work()
    assert is_stuck.wait(30)
    [thread] = [each for each in threading.enumerate() if each.name == "hydra-display"]
    display.close()
    assert time.monotonic() - begun_s < 20
    free.set()
    thread.join(30)


def trained(verbose, stream, monkeypatch):
    """Losses and weights of a task that trains while this is `sys.stdout`."""
    monkeypatch.setattr(sys, "stdout", stream)
    made = task(0, 20)
    orchestra = ModelOrchestrator([made], devices=[EmulatedDevice(memory="900KiB")])
    orchestra.verbose = verbose
    losses = orchestra.train_models().tasks[made.name].losses
    assert sys.stdout is stream
    return losses, [parameter.detach() for parameter in made.model.parameters()]


def test_no_bit_of_training_depends_on_the_display(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(TerminalScreen, "period_s", 0.001)
    monkeypatch.setattr(live, "MOST_SHARE", 1.0)
    terminal, silent = Terminal(), Terminal()
    losses, weights = trained(1, terminal, monkeypatch)
    plain_losses, plain_weights = trained(0, silent, monkeypatch)
    assert losses == plain_losses
    assert all(map(torch.equal, weights, plain_weights))
    assert "1 task: 1 finished" in terminal.getvalue()
    assert silent.getvalue() == ""


def test_a_terminal_of_no_known_encoding_is_shown_ascii(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream, decider = Terminal(), Decider()
    stream.encoding = "no such encoding"
    run_through(LiveDisplay(1, lambda: look(name="学"), decider.ask, stream), decider)
    assert "1.250" in stream.getvalue()
    assert stream.getvalue().isascii()


@pytest.mark.parametrize(
    "make", [closed_pipe, lambda: None, lambda: io.TextIOWrapper(io.BytesIO(), "ascii"), lambda: Mock(isatty=fails)]
)
def test_training_needs_no_stdout(make, monkeypatch):
    stream = make()
    made = task(0, 2)
    made.name = "学"
    orchestra = ModelOrchestrator([made], devices=[EmulatedDevice(memory="900KiB")])
    monkeypatch.setattr(sys, "stdout", stream)
    report = orchestra.train_models()
    assert report.tasks["学"].status == "finished"
    assert sys.stdout is stream
    assert no_thread_is_left()
    if isinstance(stream, io.TextIOWrapper) and not isinstance(stream.buffer, io.BytesIO):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # its buffer is written as it is closed
        stream.close()


@pytest.mark.rest
def test_a_notebooks_cell_is_redrawn():
    outputs = run_notebook()
    shown = [each for each in outputs if each.output_type == "display_data"]
    assert len(shown) == 1  # the client keeps one output for each display, as a notebook does
    text = shown[0].data["text/plain"].splitlines()
    assert text[0].endswith(" 4 tasks: 4 finished")
    assert [row.split()[0] for row in text[2:6]] == ["bert-large-0", "gpt2-1", "t5-small-2", "vit-b16-3"]
    assert "4 tasks: 4 finished" in shown[0].data["text/html"]
    assert [each for each in outputs if each.output_type == "error"] == []
