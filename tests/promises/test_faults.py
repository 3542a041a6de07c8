"""The first failure of a task is reported, its weights are those of its last committed step, all others finish."""

import traceback
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.planning.cuts import Kept
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.refused import names
from tests.scenarios import Boom, Trap, TrapBackward

SHARDS = [2, 4, 5]  # of `trapped_model`: each has one layer that can be made to fail
FAILING_STEP = 4
LATE_STEP = 12  # after the ten of an optimizer's trial
SEED = 21


class Trapped(nn.Module):
    """A linear layer that can be made to fail in its forward or its backward pass."""

    def __init__(self, num_inputs, num_outputs):
        super().__init__()
        self.linear = nn.Linear(num_inputs, num_outputs)
        self.in_forward, self.in_backward = Trap(), Trap()

    def forward(self, x):
        self.in_forward.touch()
        return TrapBackward.apply(self.linear(x), self.in_backward)


def trapped_model():
    """Buffers in every shard but the last (they must roll back too), and a layer that draws."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        model = nn.Sequential(
            Trapped(6, 8),
            nn.BatchNorm1d(8),
            Trapped(8, 8),
            nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)),
            Trapped(8, 3),
        )
        samples, classes = torch.randn(60, 6), torch.randint(3, (60,))
    return model, F.cross_entropy, DataLoader(TensorDataset(samples, classes), batch_size=6, shuffle=True)


def committed(max_steps, build=trapped_model, **options):
    """Plain PyTorch's losses and state after so many steps."""
    model, loss_fn, loader = build()
    result = reference.train(model, loss_fn, loader, seed=SEED, lr=0.1, epochs=2, max_steps=max_steps, **options)
    return exact.Expected(result.losses, result.validation_losses, zoo.state(model))


def victim(build=trapped_model, *, name="victim", **options):
    """A task over a fresh `build()`, its model, and the loader."""
    model, loss_fn, loader = build()
    options = {"optimizer": torch.optim.SGD, "partitioner": Presharded(SHARDS), "seed": SEED} | options
    return ModelTask(model, loss_fn, loader, 0.1, 2, name=name, **options), model


def assert_failed(report, name, model, expected, text):
    """Failed with its traceback, at its last committed step."""
    outcome = report.tasks[name]
    assert outcome.status == "failed"
    assert "Traceback (most recent call last)" in outcome.error
    assert text in outcome.error
    assert outcome.steps == len(expected.losses)
    assert outcome.losses == expected.losses
    exact.assert_same_state(zoo.state(model), expected.state)


def graphs(*, kept):
    """Backwards go on from their forward's graph where it is on the device, or never."""
    keeps_from = 0 if kept else len(trapped_model()[0])
    return mock.patch("hydra_engine.planning.planner.choose_kept", return_value=Kept(keeps_from, 1.0))


def test_failing_unit_of_a_model_in_one_shard():
    task, model = victim(partitioner=Presharded([5]))
    other, _ = exact.task_of("mlp", epochs=1)
    orchestra = exact.orchestrator([task, other])
    orchestra.generate()
    model[2].in_backward.arm(FAILING_STEP)
    report = orchestra.train_models()
    assert_failed(report, "victim", model, committed(FAILING_STEP), "Boom: trap at call")


# Loaders


class RaisingLoader:
    """Raises instead of its batch number `at`."""

    def __init__(self, loader, at, action):
        self.loader, self.at, self.action = loader, at, action

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for k, batch in enumerate(self.loader):
            if k == self.at:
                self.action()
            yield batch


def test_loader_that_ends_early_in_a_later_epoch_is_no_failure():
    """The loader decides: an epoch is what it yields."""
    lengths = iter([4, 2, 4, 2])

    def build():
        model, loss_fn, loader = trapped_model()
        return model, loss_fn, Shrinking(loader, lengths)

    expected = committed(None, build)
    task, model = victim(build)
    report = exact.run([task])
    exact.assert_as_expected(report, "victim", model, expected)
    assert report.tasks["victim"].steps == 6


class Shrinking:
    """Yields so many batches, then fewer; no length."""

    def __init__(self, loader, lengths):
        self.loader, self.lengths = loader, lengths

    def __iter__(self):
        for _, batch in zip(range(next(self.lengths)), self.loader, strict=False):
            yield batch


# Every task fails


@pytest.mark.rest
def test_first_failure_is_raised_when_every_task_failed():
    first, first_model = victim(name="first")
    second, second_model = victim(name="second")
    first_trap, second_trap = first_model[4].in_forward, second_model[4].in_forward
    orchestra = exact.orchestrator([first, second])  # one device: one unit after the other
    orchestra.generate()

    def fail_second():
        assert first_trap.fired.is_set(), "the policy ran 15 steps of one task before the second step of its equal"
        raise Boom("the second one")

    first_trap.arm(1)
    second_trap.arm(15, fail_second)
    with pytest.raises(Boom, match="trap at call 1"):
        orchestra.train_models()
    report = orchestra.report
    assert_failed(report, "first", first_model, committed(1), "Boom: trap at call 1")
    assert_failed(report, "second", second_model, committed(15), "Boom: the second one")


def test_failure_of_the_only_task_is_raised_with_its_traceback():
    task, model = victim()
    orchestra = exact.orchestrator([task], num_devices=2, chaos=4)
    orchestra.generate()
    model[0].in_backward.arm(0)  # the very first step
    with pytest.raises(Boom, match="trap at call 0") as caught:
        orchestra.train_models()
    assert "touch" in [entry.name for entry in caught.traceback]  # the user's own line is in it
    assert_failed(orchestra.report, "victim", model, committed(0), "in touch")


def test_nothing_failed_nothing_raised():
    task, _ = exact.task_of("mlp", epochs=1)
    report = exact.run([task])
    report.raise_failures()
    assert not report.tasks["mlp"].error


# A schedule or an optimizer that raises: the report's steps and the weights are of the same step


class Schedule(torch.optim.lr_scheduler.StepLR):
    """Halves the rate at each step, and raises at one of them; which one, no state dict says."""

    at = None

    def __init__(self, optimizer):
        super().__init__(optimizer, 1, 0.5)

    def step(self, epoch=None):
        if self.last_epoch == self.at:
            raise Boom("the schedule")
        super().step()


def raising(at):
    return type("Raises", (Schedule,), {"at": at})


ORDERS = [
    {"optimizer_scope": "task"},
    {"optimizer_scope": "task", "max_grad_norm": 0.5},
    {"optimizer_scope": "shard"},
    {"early_release": True},
    {"early_release": "all"},
    {"max_grad_norm": 0.5, "accumulation_steps": 2},
    {"max_retries": 1},
    {"ema_decay": 0.9},
]


@pytest.mark.rest
@pytest.mark.parametrize(
    "options", [pytest.param(each, marks=pytest.mark.rest if k % 2 else ()) for k, each in enumerate(ORDERS)], ids=str
)
def test_a_schedule_that_raises_does_so_after_its_step(options):
    """As in the plain loop: the step is committed, with its loss and all its updates."""
    task, model = victim(lr_scheduler=raising(FAILING_STEP), **options)
    other, other_model = exact.task_of("dropout", epochs=1)
    report = exact.run([task, other], num_devices=2)
    plain = {name: options[name] for name in ("max_grad_norm", "accumulation_steps") if name in options}
    expected = committed(FAILING_STEP + 1, lr_scheduler=Schedule, **plain)
    assert_failed(report, "victim", model, expected, f"its lr_scheduler, after step {FAILING_STEP}")
    exact.assert_as_expected(report, "dropout", other_model, exact.expected("dropout", epochs=1))


@pytest.mark.rest
@pytest.mark.parametrize(
    ("at", "options"),
    [
        pytest.param(at, each, marks=() if (k, at) in ((1, 0), (3, 1), (7, 1)) else pytest.mark.rest)
        for k, each in enumerate(ORDERS)
        for at in (0, 1)
    ],
    ids=str,
)
def test_a_schedule_of_epochs_that_raises_does_so_between_them(options, at):
    task, model = victim(lr_scheduler=raising(at), lr_scheduler_interval="epoch", **options)
    other, _ = exact.task_of("mlp", epochs=1)
    report = exact.run([task, other])
    plain = {name: options[name] for name in ("max_grad_norm", "accumulation_steps") if name in options}
    expected = committed(10 * (at + 1), lr_scheduler=Schedule, lr_scheduler_interval="epoch", **plain)
    where = "lr_scheduler" if at else "schedule"
    assert_failed(report, "victim", model, expected, where)


@pytest.mark.parametrize("num_loans", [1, pytest.param(2, marks=pytest.mark.rest)])
def test_backwards_do_not_wait_for_the_room_of_gradients_that_nobody_takes(num_loans, monkeypatch):
    """Neither where a shard's update raises at its first line, nor where no update follows a task's end."""
    monkeypatch.setattr("hydra_engine.host.pool.NUM_LOANS", num_loans)
    for _ in range(2):
        task, model = victim(lr_scheduler=raising(0), lr_scheduler_interval="epoch", early_release=True)
        other, _ = exact.task_of("mlp", epochs=1)
        report = exact.run([task, other])
        expected = committed(10, lr_scheduler=Schedule, lr_scheduler_interval="epoch")
        assert_failed(report, "victim", model, expected, "the schedule")


def test_a_schedule_that_raised_is_not_saved(tmp_path):
    """A resume repeats its step."""
    task, _ = victim(lr_scheduler=raising(FAILING_STEP))
    with pytest.raises(Boom):
        saving([task], tmp_path).train_models()
    again, model = victim(lr_scheduler=Schedule)
    report = saving([again], tmp_path).train_models(resume=True)
    exact.assert_as_expected(report, "victim", model, committed(None, lr_scheduler=Schedule))


def saving(tasks, directory):
    orchestra = ModelOrchestrator(tasks, devices=[EmulatedDevice("8MiB")], checkpoint_dir=directory, checkpoint_every=1)
    orchestra.verbose = 0
    return orchestra


class RaisingSGD(torch.optim.SGD):
    """Raises at one of its steps, before it or after."""

    def __init__(self, params, lr, at, after):
        super().__init__(params, lr)
        self.at, self.after, self.num_steps = at, after, 0

    def step(self, closure=None):
        self.num_steps += 1
        if self.num_steps == self.at + 1 and not self.after:
            raise Boom("the optimizer")
        super().step()
        if self.num_steps == self.at + 1:
            raise Boom("the optimizer")


@pytest.mark.parametrize("after", [False, True])
def test_an_optimizer_that_raises_at_the_commit_says_of_which_step_weights_may_be(after):
    task, model = victim(optimizer=partial(RaisingSGD, at=LATE_STEP, after=after), optimizer_scope="task")
    other, _ = exact.task_of("mlp", epochs=1)
    report = exact.run([task, other])
    outcome = report.tasks["victim"]
    assert (outcome.status, outcome.steps) == ("failed", LATE_STEP)
    names(outcome.error, says=f"optimizer {LATE_STEP}")
    expected = committed(LATE_STEP + after)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected.state[name]), name


def test_an_error_of_a_loader_while_planning_names_the_task():
    model, loss_fn, loader = trapped_model()

    def boom():
        raise OSError("no such file")

    task = ModelTask(model, loss_fn, RaisingLoader(loader, 0, boom), 0.1, 1, name="victim")
    with pytest.raises(OSError, match="no such file") as caught:
        exact.orchestrator([task]).generate()
    names("".join(traceback.format_exception(caught.value)), task="victim", says="batch")


class Mute(Exception):
    """Cannot say what it is: an attribute that its text needs is not there."""

    def __str__(self):
        return self.detail


class Raises(Callback):
    def on_step(self, report):
        raise Mute


class MuteBatches:
    def __iter__(self):
        yield from [(torch.ones(2, 6), torch.zeros(2, dtype=torch.long))] * 3
        raise Mute


@pytest.mark.parametrize("max_retries", [0, 1])
@pytest.mark.parametrize("culprit", ["loader", "callback"])
def test_an_error_that_cannot_say_its_text_fails_its_task_alone(culprit, max_retries, tmp_path):
    options = {"callbacks": [Raises()]} if culprit == "callback" else {}
    loader = MuteBatches() if culprit == "loader" else [(torch.ones(2, 6), torch.zeros(2, dtype=torch.long))]
    task = ModelTask([nn.Linear(6, 3)], F.cross_entropy, loader, name="a", max_retries=max_retries, **options)
    other, model = victim(name="b")
    orchestra = ModelOrchestrator([task, other], devices=[EmulatedDevice("1MiB")])
    report = orchestra.train_models()
    assert report.tasks["a"].status == "failed"
    assert str(report.tasks["a"].exception).splitlines()[0].startswith("Mute")
    assert "Traceback (most recent call last)" in report.tasks["a"].error
    assert "raise Mute" in report.tasks["a"].error
    exact.assert_same_state(zoo.state(model), committed(None).state)
    report.save(tmp_path / "run.json")
    assert "Mute, which cannot say more" in report.summary()
