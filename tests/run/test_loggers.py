"""A run tells its loggers every step and validation, and trains as if they were not there, whatever they do."""

import random
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import Callback, Logger, ModelTask, StepReport, TaskStart, ValidationReport
from hydra_engine.progress import loggers as threads
from partitioners import Presharded
from tests import exact
from tests.refused import names, refused

STEPS, EPOCHS, LR = 4, 3, 0.1
LIMIT = 0.05  # of gradients' norms, so that each step is clipped
PATIENCE_S = 30


class Recorder(Logger):
    """Keeps every call."""

    def __init__(self):
        self.calls, self.is_closed = [], 0

    def begin_task(self, told):
        self.calls.append(told)

    log_step = log_validation = begin_task

    def end_task(self, task, status):
        self.calls.append((task, status))

    def close(self):
        self.is_closed += 1

    def of(self, kind, task=None):
        """The calls with a value of this type."""
        return [each for each in self.calls if isinstance(each, kind) and (task is None or each.task == task)]


def start_of(task="a", steps=0, validated_at=None, *, is_new=None):
    is_new = steps == 0 if is_new is None else is_new
    return TaskStart(task=task, seed=0, hparams={}, steps=steps, validated_at=validated_at, is_new=is_new)


def step_of(step, task="a", *, loss=None, rates=(0.5,), norm=None):
    return StepReport(
        task=task,
        step=step,
        epoch=0,
        loss=1 / step if loss is None else loss,
        learning_rates=rates,
        grad_norm=norm,
        num_samples=8,
        samples_per_s=4.0,
        time_s=1e9 + step,
    )


def validation_of(step, task="a", **metrics):
    return ValidationReport(task=task, step=step, epoch=0, loss=2 / step, metrics=metrics, time_s=1e9 + step)


class Draws:
    """A loader that draws from every process-wide generator."""

    def __init__(self, num=STEPS):
        self._num = num

    def __len__(self):
        return self._num

    def __iter__(self):
        for _ in range(self._num):
            x = torch.randn(6, 8) + random.random() + float(np.random.rand())
            yield x, torch.randint(3, (6,))


def batches(num=STEPS):
    drawn = torch.Generator().manual_seed(3)
    return [(torch.randn(5, 8, generator=drawn), torch.randint(3, (5,), generator=drawn)) for _ in range(num)]


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 3))


def without_dropout():
    return nn.Sequential(*(layer for layer in model() if not isinstance(layer, nn.Dropout)))


def accuracy(output, target):
    return (output.argmax(1) == target).double().mean()


def schedule(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def task(name="a", *callbacks, epochs=EPOCHS, **options):
    options = {"max_grad_norm": LIMIT, "lr_scheduler": schedule, "partitioner": Presharded([1, 4]), **options}
    validation = {"validation": batches(2), "metrics": {"accuracy": accuracy}}
    return ModelTask(
        model(), F.cross_entropy, Draws(), LR, epochs, name=name, seed=3, callbacks=callbacks, **validation, **options
    )


def orchestra_of(*tasks, **options):
    return exact.silent(tasks, "1MiB", num_devices=2, **options)


def weights_of(each):
    return [value.clone() for value in each.model.state_dict().values()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def alone():
    """Losses, and weights, of the task without loggers."""
    mine = task()
    report = orchestra_of(mine).train_models()
    return report.tasks["a"].losses, weights_of(mine)


class Sees(Callback):
    """Keeps what the report says of the last step and validation."""

    def __init__(self):
        self.seen = []

    def on_step(self, report):
        self.seen.append(report.last_step)

    def on_validation(self, report):
        self.seen.append(report.last_validation)


def plain():
    """(loss, learning rate, norm) of each step of the plain loop."""
    random.seed(0)  # a task draws from streams of its own; without dropout and draws, the losses are the loop's
    network = without_dropout()
    optimizer = torch.optim.SGD(network.parameters(), lr=LR)
    scheduler, found = schedule(optimizer), []
    for x, y in batches() * EPOCHS:
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(network.parameters(), LIMIT)
        found.append((loss.item(), (optimizer.param_groups[0]["lr"],), norm.item()))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("scope", ["shard", "task"])
def test_values_are_those_of_the_plain_loop(scope):
    options = {"max_grad_norm": LIMIT, "lr_scheduler": schedule, "partitioner": Presharded([1, 3]), "seed": 0}
    options |= {"name": "a", "optimizer_scope": scope}
    mine = ModelTask(without_dropout(), F.cross_entropy, batches(), LR, EPOCHS, **options)
    recorder = Recorder()
    orchestra_of(mine, loggers=[recorder]).train_models()
    steps = recorder.of(StepReport)
    assert [(each.loss, each.learning_rates, each.grad_norm) for each in steps] == plain()
    assert [each.num_samples for each in steps] == [5] * STEPS * EPOCHS
    assert all(each.samples_per_s > 0 for each in steps)
    assert [each.time_s for each in steps] == sorted(each.time_s for each in steps)


@pytest.mark.rest
def test_a_run_tells_every_step_and_validation_in_order_and_callbacks_the_same():
    sees, recorder = Sees(), Recorder()
    groups = {"param_groups": lambda name: {"lr": 0.01} if name.endswith("bias") else {}}
    tasks = [task("a", sees, hparams={"lr": LR}), task("b", max_grad_norm=None, **groups)]
    reports = orchestra_of(*tasks, loggers=[recorder]).train_models().tasks
    for name, norms in (("a", 1), ("b", 0)):
        report, steps, validations = reports[name], recorder.of(StepReport, name), recorder.of(ValidationReport, name)
        assert [each.step for each in steps] == list(range(1, STEPS * EPOCHS + 1))
        assert [each.epoch for each in steps] == [k // STEPS for k in range(STEPS * EPOCHS)]
        assert [each.loss for each in steps] == report.losses
        assert [each.grad_norm is not None for each in steps] == [bool(norms)] * len(steps)
        assert [len(each.learning_rates) for each in steps] == [1 + (name == "b")] * len(steps)
        assert [(each.step, each.epoch, each.loss) for each in validations] == [
            (STEPS * (k + 1), k, loss) for k, loss in enumerate(report.validation_losses)
        ]
        assert [each.metrics["accuracy"] for each in validations] == report.validation_metrics["accuracy"]
        assert report.last_step is steps[-1]
        assert report.last_validation is validations[-1]
    of_a = [each for each in recorder.calls if (each[0] if type(each) is tuple else each.task) == "a"]
    assert of_a[0] == TaskStart(task="a", seed=3, hparams={"lr": LR}, steps=0, validated_at=None, is_new=True)
    assert of_a[1:-1] == sees.seen
    assert of_a[-1] == ("a", "finished")
    assert recorder.is_closed == 1


class Raises(Logger):
    """Raises at steps."""

    def __init__(self, *at):
        self.at, self.steps, self.is_closed = at, [], False

    def log_step(self, step):
        self.steps.append(step.step)
        if not self.at or step.step in self.at:
            raise SystemExit("no room\nleft")

    def close(self):
        self.is_closed = True


class RaisesAgain(Raises):
    """Another, since what two say alike is said once."""


def test_a_logger_that_raises_three_times_is_dropped_and_training_is_as_if_alone(alone, capsys):
    raises, now_and_then, recorder, mine = Raises(), RaisesAgain(2, 5), Recorder(), task()
    report = orchestra_of(mine, loggers=[raises, now_and_then, recorder]).train_models()
    assert (report.tasks["a"].losses, report.tasks["a"].status) == (alone[0], "finished")
    assert equal(weights_of(mine), alone[1])
    assert raises.steps == [1, 2, 3]
    assert now_and_then.steps == list(range(1, STEPS * EPOCHS + 1))
    assert raises.is_closed
    assert now_and_then.is_closed
    assert len(recorder.of(StepReport)) == STEPS * EPOCHS
    for message, step in zip(report.messages, (1, 2, 3, 2, 5), strict=True):
        names(message, task=" a,", says=f"Raises {step} SystemExit")
        assert message.endswith("no room")
    assert "dropped" in report.messages[2]
    assert sorted(capsys.readouterr().err.splitlines()) == sorted(f"hydra_engine: {each}" for each in report.messages)


class NoRoomFor(Recorder):
    """Raises as one of the tasks begins, the first time; then at whatever it is told of that one."""

    def __init__(self, task):
        super().__init__()
        self.task, self.begun = task, set()

    def begin_task(self, start):
        if start.task == self.task and start.steps == 0:
            raise OSError("no room")
        self.begun.add(start.task)
        super().begin_task(start)

    def log_step(self, step):
        assert step.task in self.begun
        self.calls.append(step)

    log_validation = log_step

    def end_task(self, task, status):
        assert task in self.begun
        super().end_task(task, status)


def test_a_task_that_a_logger_cannot_begin_is_not_logged_there_and_the_others_are(capsys):
    logger, recorder = NoRoomFor("b"), Recorder()
    report = orchestra_of(*map(task, "abc"), loggers=[logger, recorder]).train_models()
    [message] = report.messages
    names(message, task=" b,", says="NoRoomFor OSError")
    assert message.endswith("no room")
    assert capsys.readouterr().err == f"hydra_engine: {message}\n"
    num = [STEPS * EPOCHS] * 3
    assert [len(recorder.of(StepReport, name)) for name in "abc"] == num
    assert [len(logger.of(StepReport, name)) for name in "abc"] == [num[0], 0, num[2]]
    assert {each for each in logger.calls if type(each) is tuple} == {("a", "finished"), ("c", "finished")}


def test_a_task_that_begins_again_is_logged_again():
    logger = NoRoomFor("b")
    loggers = threads.RunLoggers([logger])
    for start in (start_of("b"), start_of("b", steps=1)):
        loggers.begin(start)
        loggers.step(step_of(start.steps + 1, "b"))
        loggers.end("b", "paused")
    assert len(loggers.close()) == 1
    assert logger.calls == [start_of("b", steps=1), step_of(2, "b"), ("b", "paused")]


class Hangs(Logger):
    """Does not return from its first step until it is let go."""

    def __init__(self):
        self.go_on, self.is_in, self.steps = threading.Event(), threading.Event(), []

    def log_step(self, step):
        self.steps.append(step.step)
        self.is_in.set()
        assert self.go_on.wait(PATIENCE_S)


@pytest.fixture
def hangs():
    made = Hangs()
    yield made
    made.go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("hydra-logger"):
            thread.join(PATIENCE_S)


def test_a_logger_that_hangs_holds_nothing_up_and_is_left_behind(hangs, alone, monkeypatch):
    monkeypatch.setattr(threads, "CLOSE_S", 0.05)
    monkeypatch.setattr(threads, "MOST_WAITING", 5)
    first, second, recorder = task(), task("b"), Recorder()
    orchestra = orchestra_of(first, loggers=[hangs, recorder])
    report = orchestra.train_models()
    assert report.tasks["a"].losses == alone[0]
    assert equal(weights_of(first), alone[1])
    assert hangs.steps == [1]
    left, lost = [message for message in report.messages if "Hangs" in message]
    names(left, says="Hangs 0.05 'hydra-logger-0'")
    # At most 5 of its 12 steps and 3 validations wait, besides the first step.
    num_lost = next(int(word) for word in lost.split() if word.isdigit())  # the limit comes after it
    assert STEPS * EPOCHS + EPOCHS - 1 - 5 <= num_lost <= STEPS * EPOCHS + EPOCHS - 1
    # It is not called in the next run, while its thread may be in a call.
    monkeypatch.setattr(threads, "MOST_WAITING", 10_000)
    orchestra.add_task(second)
    assert list(orchestra.train_models().messages) == []
    assert hangs.steps == [1]
    assert [each.step for each in recorder.of(StepReport, "b")] == list(range(1, STEPS * EPOCHS + 1))


def test_a_logger_has_what_waits_at_once_where_it_is_hurried_or_ended(monkeypatch):
    monkeypatch.setattr(threads, "GATHER_S", 10 * PATIENCE_S)
    recorder, met = Recorder(), threading.Event()
    monkeypatch.setattr(recorder, "log_validation", lambda _: met.set())
    loggers = threads.RunLoggers([recorder])
    loggers.step(step_of(1))
    loggers.validation(validation_of(1))
    loggers.hurry()
    assert met.wait(PATIENCE_S)
    loggers.step(step_of(2))
    assert loggers.close() == []
    assert recorder.calls == [step_of(1), step_of(2)]


def test_evaluation_and_prediction_are_not_logged():
    recorder, mine = Recorder(), task()
    orchestra = orchestra_of(mine, loggers=[recorder])
    orchestra.evaluate(mine, batches(2))
    list(orchestra.predict(mine.model, [x for x, _ in batches(2)]))
    assert recorder.calls == []


@pytest.mark.parametrize(
    ("loggers", "error", "says"),
    [
        (Recorder(), TypeError, "loggers Recorder list"),
        ("csv", TypeError, "loggers 'csv' list"),
        ([Recorder], TypeError, "loggers type Logger"),
        ([None], TypeError, "loggers None Logger"),
        ([Recorder()] * 2, ValueError, "loggers twice"),
    ],
)
def test_what_is_no_logger_or_given_twice_is_refused(loggers, error, says):
    with refused(error, says=says):
        orchestra_of(task(), loggers=loggers)


class Copies(Callback):
    """Copies the weights where that is safe, by the number of steps in them."""

    def __init__(self):
        self.model, self.copies = None, {}

    def on_epoch_begin(self, report, epoch):
        self.copies[report.steps] = {name: value.clone() for name, value in self.model.state_dict().items()}

    def on_task_end(self, report):
        self.on_epoch_begin(report, None)


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.rest), {"early_release": True}], ids=str)
def test_weights_that_on_epoch_begin_copies_are_those_of_the_epochs_last_step(options):
    copies = Copies()
    options = {"max_grad_norm": None, **options}
    mine = task("a", copies, **options)
    copies.model = mine.model
    orchestra_of(mine, task("b", **options)).train_models().raise_failures()
    assert list(copies.copies) == [0, STEPS, 2 * STEPS, 3 * STEPS]
    for epochs in (1, 2, 3):
        other = task("a", epochs=epochs, **options)
        orchestra_of(other).train_models().raise_failures()
        assert equal(copies.copies[epochs * STEPS].values(), weights_of(other))
