"""Processes that are signalled: what they finish, how they end as their parent sees it, and that nothing hangs."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.run import signals
from hydra_engine.run.signals import Inbox
from hydra_engine.schedule import StopRequested
from tests import processes

ROOT = Path(__file__).parents[2]
PATIENCE_S = 100
NEVER = threading.Event()


class Says(Callback):
    """Tells the parent that the third step is over; may then block for ever."""

    def __init__(self, say, blocks):
        self.say, self.blocks = say, blocks

    def on_step(self, report):
        if report.steps == 3:
            self.say("stepping")
            if self.blocks:
                NEVER.wait()


def blocks_in_the_plan(say):
    """A linear layer whose first forward tells the parent, and never returns."""

    class Layer(nn.Linear):
        def forward(self, x):
            say("planning")
            NEVER.wait()

    return Layer(4, 4)


class Endless:
    """Batches without end; the fourth is told to the parent where a callback does not tell it."""

    def __init__(self, say):
        self.say = say

    def __iter__(self):
        for k in itertools.count():
            if k == 3 and self.say is not None:
                self.say("stepping")
            yield torch.ones(2, 4), torch.zeros(2, 1)


class Samples(IterableDataset):
    def __iter__(self):
        return ((torch.ones(4), torch.zeros(1)) for _ in range(10**9))


def endless(what, say):
    """Train, evaluate, predict or plan what does not end by itself. `say` tells the parent a value."""
    os.setsid()  # a group of its own, which the parent may signal
    signals.ECHO_S = 0.0  # a second signal may come at once
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    put = Inbox.put

    def told(inbox, event):
        put(inbox, event)
        if isinstance(event, StopRequested):
            say("told")

    Inbox.put = told
    trains = what.startswith("train")
    loader = Endless(None if trains else say)
    if what == "train, workers":
        loader = DataLoader(Samples(), batch_size=2, num_workers=2)
    first = blocks_in_the_plan(say) if what == "plan" else nn.Linear(4, 4)
    callbacks = [Says(say, blocks=what == "train, blocked")]
    options = {"lr": 0.1, "epochs": 1, "name": "endless", "seed": 0, "callbacks": callbacks}
    task = ModelTask(nn.Sequential(first, nn.Linear(4, 1)), F.mse_loss, loader, **options)
    orchestra = ModelOrchestrator([task], devices=[EmulatedDevice("1MiB")])
    orchestra.verbose = 0
    try:
        if what == "evaluate":
            orchestra.evaluate(task, Endless(say))
        elif what == "predict":
            for _ in orchestra.predict(task.model, (inputs for inputs, _ in Endless(say))):
                pass
        else:
            orchestra.train_models()
    except BaseException as error:
        tasks = orchestra.report.tasks if orchestra.report else {}
        found = {
            "error": type(error).__name__,
            "code": getattr(error, "code", None),
            "tasks": {name: (each.status, each.steps == len(each.losses) >= 3) for name, each in tasks.items()},
            "threads": [
                each.name
                for each in threading.enumerate()
                if each is not threading.main_thread() and each.name != "QueueFeederThread"  # DataLoader's
            ],
            "handlers": signal.getsignal(signal.SIGINT) is signal.default_int_handler
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        }
        say(found)
        raise


def in_a_process(what, sender, stderr):
    with open(stderr, "w") as file:
        os.dup2(file.fileno(), 2)
        endless(what, sender.send)


@contextmanager
def running(what, tmp_path):
    """The process at work, and where it says what it does."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = processes.start(in_a_process, what, sender, tmp_path / "stderr")
    sender.close()
    try:
        yield process, receiver
    finally:
        process.kill()
        process.join()
        receiver.close()


def wait_for(receiver, word):
    while receiver.poll(PATIENCE_S):
        if receiver.recv() == word:
            return
    pytest.fail(f"{word!r} was not said")


def rest_of(receiver):
    """What it still says until it ends."""
    found = []
    with suppress(EOFError):
        while receiver.poll(PATIENCE_S):
            found.append(receiver.recv())
    return found


# The error, and its code.
ENDS = {signal.SIGINT: ("KeyboardInterrupt", None), signal.SIGTERM: ("SystemExit", 143)}

# What runs, the word at which it is signalled, and what its report then says.
STOPPED = {"endless": ("stopped", True)}
RUNS = {
    "train": ("stepping", STOPPED),
    # Its loader's have the signal too: a terminal, `timeout` and torchrun do so.
    "train, workers": ("stepping", STOPPED),
    "evaluate": ("stepping", {}),
    "predict": ("stepping", {}),
    "plan": ("planning", {}),
}


@pytest.mark.parametrize("number", ENDS)
@pytest.mark.parametrize("what", RUNS)
def test_a_signal_ends_a_run_in_order(what, number, tmp_path):
    (word, tasks), (error, its_code) = RUNS[what], ENDS[number]
    with running(what, tmp_path) as (process, receiver):
        wait_for(receiver, word)
        (os.killpg if "workers" in what else os.kill)(process.pid, number)
        found = rest_of(receiver)[-1]
        process.join(PATIENCE_S)
    assert (found["error"], found["code"], process.exitcode) == (error, its_code, its_code or 1)
    assert (found["tasks"], found["threads"], found["handlers"]) == (tasks, [], True)


@pytest.mark.parametrize("second", ENDS)
@pytest.mark.parametrize("first", ENDS)
def test_a_second_signal_ends_it_at_once_though_a_callback_blocks_for_ever(first, second, tmp_path):
    with running("train, blocked", tmp_path) as (process, receiver):
        wait_for(receiver, "stepping")
        os.kill(process.pid, first)
        wait_for(receiver, "told")
        os.kill(process.pid, second)
        assert rest_of(receiver) == []
        process.join(PATIENCE_S)
    assert process.exitcode == 128 + second
    lines = (tmp_path / "stderr").read_text().splitlines()
    for line, number in zip(lines, (first, second), strict=True):
        assert signal.Signals(number).name in line


@pytest.mark.rest
@pytest.mark.parametrize(("number", "expected"), [("INT", 130), pytest.param("TERM", 143, marks=pytest.mark.rest)])
def test_a_shell_sees_130_or_143(number, expected):
    """Its `$?`: also of a process that a signal has ended, as Python ends for a KeyboardInterrupt."""
    script = "from tests.promises.test_signals import endless; endless('train', lambda line: print(line, flush=True))"
    line = f'"$0" -c "$1" & read -r _; kill -{number} $!; wait $!; echo $?'
    command = ["sh", "-c", line, sys.executable, script]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        for printed in shell.stdout:
            if printed == "stepping\n":
                break
        out, _ = shell.communicate("now\n")
    assert out.splitlines()[-1] == str(expected)
