"""Processes that are signalled: what they finish, how they end as their parent sees it, and that nothing hangs."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A run that does not end by itself. What it prints, its parent waits for.
SCRIPT = """
import json, signal, sys, threading
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset
from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.schedule import StopRequested
from hydra_engine.run import signals
from hydra_engine.run.signals import Inbox

signals.ECHO_S = 0.0  # a second signal may come at once
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a job in the background
torch.set_num_threads(1)
never, put = threading.Event(), Inbox.put

def say(line):
    print(line, flush=True)

def told(inbox, event):
    put(inbox, event)
    if isinstance(event, StopRequested):
        say("told")

Inbox.put = told

class Says(Callback):
    def on_step(self, report):
        if report.steps == 3:
            say("stepping")
            if "callback blocks" in sys.argv:
                never.wait()

class Layer(nn.Linear):
    def forward(self, x):
        if "plan" in sys.argv:
            say("planning")
            never.wait()
        return super().forward(x)

def batches():
    for k in range(10**9):
        if k == 3 and "train" not in sys.argv:
            say("stepping")
        yield torch.ones(2, 4), torch.zeros(2, 1)

class Endless:
    def __iter__(self):
        return batches()

class Samples(IterableDataset):
    def __iter__(self):
        return ((torch.ones(4), torch.zeros(1)) for _ in range(10**9))

loader = DataLoader(Samples(), batch_size=2, num_workers=2) if "workers" in sys.argv else Endless()
task = ModelTask(nn.Sequential(Layer(4, 4), nn.Linear(4, 1)), F.mse_loss, loader, lr=0.1, epochs=1, name="endless",
                 seed=0, callbacks=[Says()])
orchestra = ModelOrchestrator([task], devices=[EmulatedDevice("1MiB")])
orchestra.verbose = 0
try:
    if "evaluate" in sys.argv:
        orchestra.evaluate(task, batches())
    elif "predict" in sys.argv:
        for _ in orchestra.predict(task.model, (inputs for inputs, _ in batches())):
            pass
    else:
        orchestra.train_models()
except BaseException as error:
    say(json.dumps({
        "error": type(error).__name__,
        "code": getattr(error, "code", None),
        "tasks": {name: [each.status, each.steps == len(each.losses) >= 3]
                  for name, each in (orchestra.report.tasks if orchestra.report else {}).items()},
        "threads": [each.name for each in threading.enumerate()
                    if each is not threading.main_thread() and each.name != "QueueFeederThread"],  # DataLoader's
        "handlers": [signal.getsignal(signal.SIGINT) is signal.default_int_handler,
                     signal.getsignal(signal.SIGTERM) is signal.SIG_DFL],
    }))
    raise
"""

# error, its code, and how the process ends: by the signal itself where Python ends for a KeyboardInterrupt.
ENDS = {signal.SIGINT: ("KeyboardInterrupt", None, -signal.SIGINT), signal.SIGTERM: ("SystemExit", 143, 143)}


@contextmanager
def running(*words):
    """The script at work."""
    command, pipe = [sys.executable, "-c", SCRIPT, *words], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def lines_until(process, line):
    for found in process.stdout:
        if found == f"{line}\n":
            return
    pytest.fail(f"{line!r} was not printed, but: {process.stderr.read()}")


def ended(process):
    """The lines it still prints, its error lines and its exit code, as `subprocess` has it."""
    out, err = process.communicate()
    return out.splitlines(), err, process.returncode


# By its words: the line at which the script is signalled, and what its report then says.
STOPPED = {"endless": ["stopped", True]}
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
def test_a_signal_ends_a_run_in_order(what, number):
    words, (line, tasks), (error, its_code, expected) = what.split(", "), RUNS[what], ENDS[number]
    with running(*words) as process:
        lines_until(process, line)
        (os.killpg if "workers" in words else os.kill)(process.pid, number)
        lines, _, code = ended(process)
    found = json.loads(lines[-1])
    assert (found["error"], found["code"], code) == (error, its_code, expected)
    assert (found["tasks"], found["threads"], found["handlers"]) == (tasks, [], [True, True])


@pytest.mark.parametrize("second", ENDS)
@pytest.mark.parametrize("first", ENDS)
def test_a_second_signal_ends_it_at_once_though_a_callback_blocks_for_ever(first, second):
    with running("train", "callback blocks") as process:
        lines_until(process, "stepping")
        process.send_signal(first)
        lines_until(process, "told")
        process.send_signal(second)
        lines, error, code = ended(process)
    assert lines == []
    assert [line.partition(";")[0] for line in error.splitlines()] == [
        f"hydra_engine: {signal.Signals(first).name}: what computes is finished, and what is to be saved is saved",
        f"hydra_engine: {signal.Signals(second).name}: the second signal, so nothing more is finished or saved",
    ]
    assert code == 128 + second


@pytest.mark.parametrize(("number", "expected"), [("INT", 130), ("TERM", 143)])
def test_a_shell_sees_130_or_143(number, expected):
    """Its `$?`: also of a process that a signal has ended."""
    line = f'"$0" -c "$1" & read -r _; kill -{number} $!; wait $!; echo $?'
    command = ["sh", "-c", line, sys.executable, SCRIPT]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        lines_until(shell, "stepping")
        out, _ = shell.communicate("now\n")
    assert out.splitlines()[-1] == str(expected)
