"""Callbacks see each committed step, in order, and may stop their task."""

import _thread
import gc
import os
import signal
import threading
from functools import cache

import pytest
import torch
from torch.nn import functional as F

from hydra_engine import Callback, CallbackTimeout, ModelTask, StopTask
from hydra_engine.checkpoints.checkpoint import load_newest
from hydra_engine.checkpoints.directory import CheckpointDirectory
from tests import exact, reference
from tests.covering import covering
from tests.refused import names, refused
from tests.run.test_forget import EPOCHS, STEPS, At, Held, batches, model_of, raises
from tests.run.test_forget import task as plain_task
from tests.run.test_notifier import join_threads

PATIENCE_S = 30
SHORT_S = 0.4


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


def test_a_report_with_what_a_callback_raised_keeps_no_model():
    failing, other = Held(), Held()
    orchestra = orchestra_of(failing.made("a", Log(("step", 0), ValueError("stopped"))), other.made("b"))
    report = orchestra.train_models()
    del orchestra
    gc.collect()
    assert {name: each.status for name, each in report.tasks.items()} == {"a": "failed", "b": "finished"}
    assert (failing.alive, other.alive) == (set(), set())


def task(name, *callbacks, **options):
    return plain_task(name, *callbacks, **{"validation": batches(2), **options})


def orchestra_of(*tasks, num_devices=2, **options):
    return exact.silent(tasks, "1MiB", num_devices=num_devices, **options)


def train(*tasks, **options):
    return orchestra_of(*tasks, **options).train_models().tasks


@cache
def plain_weights():
    """Of the plain loop, after each of its steps."""
    model, found = model_of(0), []

    def keep():
        found.append([parameter.detach().clone() for parameter in model.parameters()])

    reference.train(model, F.cross_entropy, batches(), seed=0, lr=1e-2, epochs=EPOCHS, on_step=keep)
    return found


def assert_finished(report, trained):
    assert (report.status, report.steps, report.error) == ("finished", STEPS * EPOCHS, None)
    assert all(map(torch.equal, trained.model.parameters(), plain_weights()[-1]))


@pytest.mark.rest
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


@pytest.mark.parametrize(("at", "steps"), [(("step", 5), 6), (("epoch", 1), 8)])
def test_a_callback_stops_its_task_and_no_other(at, steps):
    log, other = Log(at, StopTask()), Log()
    reports = train(task("a", log), task("b", other))
    # An epoch is known to be over when the batch after it is there: a step of that may be under way, not committed.
    assert (reports["a"].status, reports["a"].steps) == ("stopped", steps)
    assert log.calls[-2:] == [at, ("end", "stopped")]
    assert reports["b"].status == "finished"
    assert other.calls[-1] == ("end", "finished")


@pytest.mark.rest
def test_a_failing_end_is_reported():
    reports = train(task("a", Log(("end", "finished"), RuntimeError("at the end"))), task("b"))
    assert reports["a"].status == "failed"
    assert reports["a"].steps == STEPS * EPOCHS


class Blocks(Callback):
    """Waits at a step, or at the end, until it is let go of."""

    def __init__(self, at, then=None):
        self.at, self.then, self.inside, self.go_on, self.steps = at, then, threading.Event(), threading.Event(), []

    def block(self):
        self.inside.set()
        assert self.go_on.wait(PATIENCE_S)
        if self.then is not None:
            raise self.then

    def on_step(self, report):
        self.steps.append(report.steps)
        if report.steps == self.at:
            self.block()

    def on_task_end(self, report):
        if self.at == "end":
            self.block()


@pytest.fixture
def blocks(hangs):
    """Callbacks that are let go of in the end, with their threads."""
    made = []

    def make(*arguments):
        made.append(Blocks(*arguments))
        hangs.append(made[-1].inside)
        return made[-1]

    yield make
    for each in made:
        each.go_on.set()
    join_threads()


@covering(strength=1, at=[1, 6, STEPS * EPOCHS], num_devices=[1, 2])
def test_one_that_does_not_return_fails_its_task_alone(at, num_devices, blocks):
    """With the weights of its last committed step; also where its end was to come next."""
    blocked = blocks(at)
    mine, other = task("a", blocked, timeout_s=SHORT_S), task("b", Log())
    reports = train(mine, other, num_devices=num_devices)
    assert_finished(reports["b"], other)
    failed = reports["a"]
    assert (failed.status, failed.steps, len(failed.losses)) == ("failed", at, at)
    assert isinstance(failed.exception, CallbackTimeout)
    assert all(map(torch.equal, mine.model.parameters(), plain_weights()[at - 1]))
    names(failed.error, task="'a-callbacks'", says=f"Blocks.on_step {SHORT_S}")


@pytest.mark.rest
def test_one_that_does_not_return_at_the_end_does_not_hold_up_the_runs(blocks):
    reports = train(task("a", blocks("end"), timeout_s=SHORT_S), other := task("b"))
    assert isinstance(reports["a"].exception, CallbackTimeout)
    assert reports["a"].steps == STEPS * EPOCHS
    assert_finished(reports["b"], other)


def test_what_a_late_one_raises_changes_nothing(blocks):
    blocked = blocks(2, StopTask())
    mine = task("a", blocked, timeout_s=SHORT_S)
    report = train(mine, task("b"))["a"]
    error, weights = report.error, [parameter.detach().clone() for parameter in mine.model.parameters()]
    blocked.go_on.set()
    join_threads()
    assert (report.status, report.error) == ("failed", error)
    assert blocked.steps == [1, 2]
    assert all(map(torch.equal, mine.model.parameters(), weights))


@pytest.mark.rest
def test_tasks_meet_at_a_barrier_in_their_callbacks():
    """As in population-based training."""
    barrier, met = threading.Barrier(3), []

    def meet(report):
        met.append(barrier.wait(PATIENCE_S))

    tasks = [task(name, At(STEPS, meet), At(2 * STEPS, meet)) for name in "abc"]
    reports = train(*tasks)
    for each in tasks:
        assert_finished(reports[each.name], each)
    assert sorted(met) == [0, 0, 1, 1, 2, 2]


def test_one_waits_for_all_of_another_task():
    """And what takes long in one task costs the others nothing."""
    ended = threading.Event()
    waits = At(1, lambda report: ended.wait(PATIENCE_S) or pytest.fail("it was held up"))
    first, second = task("a", waits), task("b", Log(), At("end", lambda report: ended.set()))
    reports = train(first, second, num_devices=1)
    assert_finished(reports["a"], first)
    assert_finished(reports["b"], second)


@pytest.mark.rest
def test_tasks_come_and_go_while_one_blocks(blocks):
    blocked, added = blocks(2), task("added", Log())
    stopped = task("stopped", At(1, lambda report: orchestra.stop_task("stopped")))

    def act(report):
        assert blocked.inside.wait(PATIENCE_S)
        orchestra.add_task(added)

    orchestra = orchestra_of(task("a", blocked, timeout_s=SHORT_S), stopped, task("b", At(3, act)))
    reports = orchestra.train_models().tasks
    assert [reports[name].status for name in ("a", "b", "stopped")] == ["failed", "finished", "stopped"]
    assert_finished(reports["added"], added)


class HangsOnce:
    """A loader that gives no first batch until it is let go of."""

    def __init__(self):
        self.inside, self.go_on = threading.Event(), threading.Event()

    def __iter__(self):
        self.inside.set()
        assert self.go_on.wait(PATIENCE_S)
        return iter(batches())


def test_one_whose_new_task_hangs_as_it_is_planned_holds_up_nobody(blocks, hangs):
    """Neither another task that comes or goes, nor the run's end."""
    loader, added = HangsOnce(), task("added")
    hangs.append(loader.inside)
    hangs = ModelTask(model_of(0), F.cross_entropy, loader, name="hangs", seed=0)

    def act(report):
        assert loader.inside.wait(PATIENCE_S)
        orchestra.add_task(added)
        orchestra.stop_task("hangs")

    first = task("a", At(1, lambda report: orchestra.add_task(hangs)), timeout_s=SHORT_S)
    orchestra = orchestra_of(first, second := task("b", At(1, act), timeout_s=None))
    reports = orchestra.train_models().tasks
    loader.go_on.set()
    blocks("never")  # whose fixture waits for the thread
    assert isinstance(reports["a"].exception, CallbackTimeout)
    assert_finished(reports["b"], second)
    assert_finished(reports["added"], added)
    assert "hangs" not in reports


@pytest.mark.rest
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"early_release": True}, marks=pytest.mark.rest)], ids=["late", "early"]
)
def test_others_are_saved_while_one_blocks(tmp_path, blocks, monkeypatch, options):
    blocked, saved, publish = blocks(2), threading.Semaphore(0), CheckpointDirectory.publish

    def published(directory, path, manifest):
        found = publish(directory, path, manifest)
        if "b" in manifest.tasks:
            saved.release()
        return found

    monkeypatch.setattr(CheckpointDirectory, "publish", published)

    def wait(report):
        assert saved.acquire(timeout=PATIENCE_S)

    begins = At(1, lambda report: blocked.inside.wait(PATIENCE_S) or pytest.fail("it does not block"))
    ends = At("end", lambda report: blocked.go_on.set())
    first, second = task("a", blocked, **options), task("b", begins, At(5, wait), At(10, wait), ends)
    orchestra = orchestra_of(first, second, checkpoint_dir=tmp_path, checkpoint_every=3)
    reports = orchestra.train_models().tasks
    assert_finished(reports["a"], first)
    assert_finished(reports["b"], second)
    over = {name: (each["steps"], each["over"]) for name, each in load_newest(tmp_path).data["tasks"].items()}
    assert over == dict.fromkeys("ab", (STEPS * EPOCHS, "finished"))


@pytest.mark.parametrize("timeout_s", [None, 1800])
def test_ctrl_c_does_not_wait_for_it_for_ever(monkeypatch, blocks, timeout_s):
    monkeypatch.setattr("hydra_engine.run.notifier.INTERRUPTED_S", SHORT_S)
    blocked = blocks(3)
    mine = task("a", blocked, timeout_s=timeout_s)

    def interrupt(report):
        assert blocked.inside.wait(PATIENCE_S)
        _thread.interrupt_main()

    orchestra = orchestra_of(mine, task("b", At(2, interrupt)))
    with pytest.raises(KeyboardInterrupt):
        orchestra.train_models()
    report = orchestra.report.tasks["a"]
    assert (report.status, report.exception) == ("stopped", None)
    assert report.steps in (3, 4)  # what is computed is committed
    names(report.error, task="'a-callbacks'", says="Blocks.on_step")
    assert all(map(torch.equal, mine.model.parameters(), plain_weights()[report.steps - 1]))


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_what_else_is_raised_fails_the_task_and_no_other(error):
    """Also what would end the process."""
    log = Log(("step", 2), error)
    mine, other = task("a", log), task("b", Log())
    reports = train(mine, other)
    assert (reports["a"].status, reports["a"].steps) == ("failed", 3)
    assert reports["a"].exception is error
    names(reports["a"].error, says=f"callback {type(error).__name__}")
    assert log.calls[-1] == ("end", "failed")
    assert all(map(torch.equal, mine.model.parameters(), plain_weights()[2]))
    assert_finished(reports["b"], other)


@pytest.mark.rest
@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.rest), 2])
def test_weights_in_a_callback_are_those_of_its_step(num_devices):
    seen = []

    class Keeps(Callback):
        def on_step(self, report):
            seen.append([parameter.detach().clone() for parameter in mine.model.parameters()])

        def on_epoch(self, report, epoch):
            self.on_step(report)

    mine = task("a", Keeps())
    train(mine, task("b"), num_devices=num_devices)
    expected = list(plain_weights())
    for k in range(EPOCHS):  # an epoch's end is told with the weights of its last step
        expected.insert((k + 1) * (STEPS + 1) - 1, expected[(k + 1) * (STEPS + 1) - 2])
    for weights, plain in zip(seen, expected, strict=True):
        assert all(map(torch.equal, weights, plain))


class Factories:
    """Raises, or blocks, as training begins: the plan has been made by then."""

    def __init__(self, action):
        self.action, self.is_armed = action, False

    def __call__(self, parameters, **options):
        if self.is_armed:
            self.action()
        return torch.optim.SGD(parameters, **options)


@pytest.mark.rest
def test_the_end_of_a_task_whose_set_up_fails_is_told_and_its_memory_given_back(tmp_path):
    factory, log, other = Factories(raises(ZeroDivisionError())), Log(("end", "failed"), ValueError("end")), Log()
    bad = task("bad", log, optimizer=factory)
    orchestra = orchestra_of(bad, task("good", other), checkpoint_dir=tmp_path, checkpoint_every=1)
    own = [parameter.untyped_storage().nbytes() for parameter in bad.model.parameters()]
    orchestra.generate()
    factory.is_armed = True
    report = orchestra.train_models()
    assert log.calls == [("end", "failed")]
    names(report.tasks["bad"].error, says="set-up ZeroDivisionError")
    assert report.tasks["good"].status == "finished"
    assert other.calls[-1] == ("end", "finished")
    assert [parameter.untyped_storage().nbytes() for parameter in bad.model.parameters()] == own
    assert load_newest(tmp_path).data["tasks"]["bad"]["over"] == "failed"
    torch.manual_seed(1)
    again = orchestra_of(task("bad"), task("good"), checkpoint_dir=tmp_path)
    assert again.train_models(resume=True).tasks["bad"].status == "finished"


def test_the_end_of_a_task_that_is_interrupted_as_it_is_set_up_is_told():
    goes_on = threading.Event()

    def block():
        os.kill(os.getpid(), signal.SIGINT)
        assert goes_on.wait(PATIENCE_S)

    factory, log = Factories(block), Log()
    orchestra = orchestra_of(task("a", log, At("end", lambda report: goes_on.set()), optimizer=factory))
    orchestra.generate()
    factory.is_armed = True
    with pytest.raises(KeyboardInterrupt):
        orchestra.train_models()
    assert log.calls == [("end", "stopped")]
    assert orchestra.report.tasks["a"].error is None


@pytest.mark.parametrize("call", ["add_task", "stop_task"])
def test_what_changes_the_tasks_while_they_are_planned_is_refused(call):
    class Changes(Callback):
        def on_epoch_begin(self, report, epoch):
            if call == "add_task":
                orchestra.add_task(task("b"))
            else:
                orchestra.stop_task("a")

    orchestra = orchestra_of(task("a", Changes()))
    with refused(RuntimeError, says=f"{call} on_epoch_begin"):
        orchestra.generate()
