"""Callbacks see each committed step, in order, and may stop their task."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask, StopTask
from partitioners import Presharded

STEPS, EPOCHS = 4, 3


class Log(Callback):
    """Writes down every call, and acts at one of them."""

    def __init__(self, at=None, action=None):
        self.calls, self.losses, self.threads = [], [], set()
        self._at, self._action = at, action

    def on_step(self, report):
        self._note(("step", report.steps - 1))
        self.losses.append(list(report.losses))

    def on_epoch(self, report, epoch):
        self._note(("epoch", epoch))
        assert len(report.validation_losses) == epoch + 1

    def on_task_end(self, report):
        self._note(("end", report.status))

    def _note(self, call):
        self.calls.append(call)
        self.threads.add(threading.current_thread().name)
        if call == self._at:
            raise self._action


def batches(num=STEPS):
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(5, 8, generator=generator), torch.randint(3, (5,), generator=generator)) for _ in range(num)]


def task(name, *callbacks):
    torch.manual_seed(1)
    return ModelTask(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
        F.cross_entropy,
        batches(),
        1e-2,
        EPOCHS,
        name=name,
        partitioner=Presharded([1, 3]),
        seed=0,
        validation=batches(2),
        callbacks=callbacks,
    )


def train(*tasks):
    orchestra = ModelOrchestrator(tasks, devices=[EmulatedDevice("1MiB"), EmulatedDevice("1MiB")])
    orchestra.verbose = 0
    return orchestra.train_models().tasks


def test_every_step_epoch_and_end_is_told_once_in_order():
    log = Log()
    train(task("a", log), task("b"))
    expected = []
    for epoch in range(EPOCHS):
        expected += [("step", epoch * STEPS + k) for k in range(STEPS)] + [("epoch", epoch)]
    assert log.calls == [*expected, ("end", "finished")]
    assert log.threads == {"a-callbacks"}


def test_a_step_is_told_before_the_next_is_committed():
    log = Log()
    report = train(task("a", log))["a"]
    assert log.losses == [report.losses[: k + 1] for k in range(STEPS * EPOCHS)]


def test_callbacks_change_no_bit():
    logged, plain = task("a", Log()), task("b")
    train(logged, plain)
    assert all(map(torch.equal, logged.model.parameters(), plain.model.parameters()))


@pytest.mark.parametrize(("at", "steps"), [(("step", 5), 6), (("epoch", 1), 8)])
def test_a_callback_stops_its_task_and_no_other(at, steps):
    log, other = Log(at, StopTask()), Log()
    reports = train(task("a", log), task("b", other))
    # An epoch is known to be over when the batch after it is there: a step of that may be under way, not committed.
    assert (reports["a"].status, reports["a"].steps) == ("stopped", steps)
    assert log.calls[-2:] == [at, ("end", "stopped")]
    assert reports["b"].status == "finished"
    assert other.calls[-1] == ("end", "finished")


def test_what_else_is_raised_fails_the_task_and_no_other():
    log = Log(("step", 2), RuntimeError("of the callback"))
    reports = train(task("a", log), task("b"))
    assert reports["a"].status == "failed"
    assert "a failed in its callback" in reports["a"].error
    assert reports["b"].status == "finished"
    assert log.calls[-1] == ("end", "failed")


def test_a_failing_end_is_reported():
    reports = train(task("a", Log(("end", "finished"), RuntimeError("at the end"))), task("b"))
    assert reports["a"].status == "failed"
    assert reports["a"].steps == STEPS * EPOCHS


def test_what_is_no_callback_is_refused():
    with pytest.raises(TypeError, match=r"callbacks: <function .* is not a Callback"):
        task("a", train)
