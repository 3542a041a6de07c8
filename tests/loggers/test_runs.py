"""A run tells its loggers every step and validation, and trains as if they were not there, whatever they do."""

import os
import random
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hydra_engine import Callback, EmulatedDevice, ModelTask, PauseTask, StepReport, ValidationReport
from hydra_engine.adaptive import AdaptiveDataLoader
from hydra_engine.checkpoints import load_newest
from hydra_engine.loggers import CsvLogger, JsonLinesLogger, Logger, TaskStart, threads
from hydra_engine.sweep import Sweep
from partitioners import Presharded
from tests import exact, processes
from tests.loggers.support import KINDS, Recorder, read_csv, start_of, step_of, validation_of
from tests.refused import names, refused
from tests.sweep import space

STEPS, EPOCHS, LR = 4, 3, 0.1
LIMIT = 0.05  # of gradients' norms, so that each step is clipped
PATIENCE_S = 30


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
    validation = {"validation": space.batches(2), "metrics": {"accuracy": accuracy}}
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
    for x, y in space.batches() * EPOCHS:
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
    mine = ModelTask(without_dropout(), F.cross_entropy, space.batches(), LR, EPOCHS, **options)
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


@pytest.mark.parametrize("bounds", [None, (4, 16)])
def test_batches_that_adapt_have_the_norm_that_they_measure(bounds):
    found = []
    for limit in (None, 1e6):  # which clips nothing, and computes the norm
        data = TensorDataset(*(torch.cat(each) for each in zip(*space.batches(8), strict=True)))
        loader = AdaptiveDataLoader(data, 10)
        if bounds:
            loader.autoscale_batch_size(20, local_bsz_bounds=bounds)
        mine = ModelTask(model()[:1], F.cross_entropy, loader, LR, 1, name="a", max_grad_norm=limit, seed=0)
        recorder = Recorder()
        orchestra_of(mine, loggers=[recorder]).train_models().raise_failures()
        found.append([each.grad_norm for each in recorder.of(StepReport)])
    measured, computed = found
    assert measured[:1] == [pytest.approx(computed[0], rel=1e-5) if bounds else None]


@pytest.mark.rest
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.rest] * (kind == "csv")) for kind in KINDS])
def test_a_resumed_run_goes_on_in_the_same_files_with_each_step_once(tmp_path, kind):
    if kind == "tensorboard":
        pytest.importorskip("tensorboard")
    make, suffix, read = KINDS[kind]
    saved, kept, path = tmp_path / "saved", tmp_path / "kept", tmp_path / "logs" / f"a{suffix}"

    def train(epochs):
        # A logger of its own each time, as another process has it.
        options = {"checkpoint_dir": saved, "loggers": [make(tmp_path / "logs")]}
        return orchestra_of(task(epochs=epochs), **options).train_models(resume=True).tasks["a"]

    train(1)
    before = read(path)
    shutil.copytree(saved, kept)
    train(2)
    shutil.rmtree(saved)
    kept.rename(saved)  # as if that one had been killed before it saved anything
    report = train(EPOCHS)
    rows = read(path)
    assert rows[: len(before)] == before
    losses = [(step, row["loss"]) for step, row in rows if "loss" in row]
    assert losses == [(k + 1, pytest.approx(loss)) for k, loss in enumerate(report.losses)]
    validations = [(step, row["validation_loss"]) for step, row in rows if "validation_loss" in row]
    assert validations == list(zip(report.validation_steps, map(pytest.approx, report.validation_losses), strict=True))
    assert [each.name for each in path.parent.iterdir()] == [path.name]


class Kills(CsvLogger):
    """Kills its process once it has logged step 7, and something is saved."""

    def __init__(self, directory, saved):
        super().__init__(directory)
        self.saved = saved

    def log_step(self, step):
        super().log_step(step)
        while step.step == 7 and load_newest(self.saved) is None:
            pass
        if step.step == 7:
            os.kill(os.getpid(), signal.SIGKILL)


def train_and_be_killed(folder):
    """In a process of its own."""
    saved = Path(folder, "saved")
    options = {"checkpoint_dir": saved, "checkpoint_every": 2, "loggers": [Kills(Path(folder, "logs"), saved)]}
    orchestra_of(task(), **options).train_models()


def test_a_run_whose_process_was_killed_goes_on_in_the_same_file_with_each_step_once(tmp_path):
    with pytest.raises(processes.ProcessEnded) as ended:
        processes.run(train_and_be_killed, tmp_path)
    assert ended.value.exitcode == -signal.SIGKILL
    killed = read_csv(tmp_path / "logs" / "a.csv")
    steps = load_newest(tmp_path / "saved").data["tasks"]["a"]["steps"]
    options = {"checkpoint_dir": tmp_path / "saved", "loggers": [CsvLogger(tmp_path / "logs")]}
    report = orchestra_of(task(), **options).train_models(resume=True).tasks["a"]
    assert [step for step, row in killed if "loss" in row] == list(range(1, 8))
    assert steps > 0
    rows = read_csv(tmp_path / "logs" / "a.csv")
    assert [(step, row["loss"]) for step, row in rows if "loss" in row] == list(enumerate(report.losses, 1))
    assert [step for step, row in rows if "loss" not in row] == report.validation_steps
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["a.csv"]


class Pauses(Callback):
    """Pauses its task once."""

    def __init__(self):
        self.is_done = False

    def on_step(self, report):
        if report.steps == 6 and not self.is_done:
            self.is_done = True
            raise PauseTask


def test_a_paused_task_and_a_fork_go_on_in_files_of_their_own(tmp_path):
    loggers = [CsvLogger(tmp_path / "logs")]
    orchestra = orchestra_of(task("a", Pauses()), checkpoint_dir=tmp_path / "saved", loggers=loggers)
    assert orchestra.train_models().tasks["a"].status == "paused"
    orchestra.fork_task("a", "fork")
    orchestra.add_task(task("fork"))
    orchestra.add_task(task("a"))
    reports = orchestra.train_models().tasks
    for name, begins in (("a", 0), ("fork", 6)):
        rows = [(step, row["loss"]) for step, row in read_csv(tmp_path / "logs" / f"{name}.csv") if "loss" in row]
        assert rows == list(enumerate(reports[name].losses, 1))[begins:]


@pytest.mark.rest
def test_trials_of_a_sweep_are_logged(tmp_path):
    pytest.importorskip("optuna").logging.set_verbosity(30)
    sweep = Sweep(space.build, num_trials=3, devices=[EmulatedDevice("1MiB")], loggers=[JsonLinesLogger(tmp_path)])
    sweep.verbose = 0
    study = sweep.run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trial-0.jsonl", "trial-1.jsonl", "trial-2.jsonl"]
    for trial in study.trials:
        rows = (tmp_path / f"trial-{trial.number}.jsonl").read_text().splitlines()
        assert len(rows) == space.STEPS * space.EPOCHS + space.EPOCHS


def test_evaluation_and_prediction_are_not_logged():
    recorder, mine = Recorder(), task()
    orchestra = orchestra_of(mine, loggers=[recorder])
    orchestra.evaluate(mine, space.batches(2))
    list(orchestra.predict(mine.model, [x for x, _ in space.batches(2)]))
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
