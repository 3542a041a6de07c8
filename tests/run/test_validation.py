"""Validation every N steps: what a plain loop with an evaluation in its middle computes, bit for bit."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hydra_engine import Callback, ModelTask, StopTask
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.covering import covering
from tests.refused import refused

SEED, LR, EPOCHS, NUM_STEPS = 21, 0.05, 2, 20


def agreement(output, target):
    return (output.argmax(dim=1) == target).float().mean()


def largest(output, target):
    return output.max().item()


METRICS = {"agreement": agreement, "largest": largest}


class Noise(nn.Module):
    """Draws in evaluation too."""

    def forward(self, x):
        return x + 0.1 * torch.randn_like(x)


def test_a_plain_loop_has_these_bits_if_its_validation_draws_elsewhere():
    """As docs/errors.md says: a DataLoader draws a seed from torch's generator whenever its iterator is made."""
    data = TensorDataset(torch.randn(16, 4), torch.arange(16) % 3)

    def parts(generator):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
        return model, DataLoader(data, 4, shuffle=True), DataLoader(data, 8, generator=generator)

    def plain(*, fork=False, generator=None):
        model, loader, validation = parts(generator)
        optimizer, losses = torch.optim.SGD(model.parameters(), LR), []
        torch.manual_seed(SEED)
        for _ in range(2):
            model.train()
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            model.eval()
            with torch.random.fork_rng(devices=[], enabled=fork), torch.no_grad():
                assert [F.cross_entropy(model(x), y).item() for x, y in validation]
        return losses

    model, loader, validation = parts(None)
    task = ModelTask(model, F.cross_entropy, loader, LR, 2, seed=SEED, validation=validation)
    found = exact.silent([task]).train_models().tasks["task-0"].losses
    assert plain(fork=True) == plain(generator=torch.Generator()) == found
    other = plain()
    assert other[:4] == found[:4]
    assert other[4:] != found[4:]


@pytest.mark.parametrize(
    ("returned", "says"), [(lambda output: output.argmax(1), "(4,)"), (lambda output: "good", "'good'")]
)
def test_a_metric_that_is_no_number_is_refused_by_name(returned, says):
    batches = [(torch.randn(4, 3), torch.arange(4) % 3)]
    metrics = {"hits": lambda output, target: returned(output)}
    task = ModelTask(nn.Linear(3, 3), F.cross_entropy, batches, validation=batches, metrics=metrics)
    with refused(task="task-0", says=f"metric 'hits' {says}") as error:
        exact.silent([task]).generate()
    assert not hasattr(error.value, "__notes__")  # on what layers cannot do


def noisy():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 16), Noise(), nn.Dropout(0.3), nn.Tanh(), Noise(), nn.Linear(16, 5))
    return model, F.cross_entropy, zoo.dropout()[2]


BUILDS = {"dropout": zoo.dropout, "cnn": zoo.cnn, "noisy": noisy}


class Draws:
    """A validation loader that draws from every generator, at its start and for each batch."""

    def __init__(self, loader):
        self.dataset = loader.dataset

    def __iter__(self):
        samples, classes = self.dataset.tensors
        offset = random.random() + np.random.rand()
        for _ in range(3):
            chosen = torch.randperm(len(samples))[: 4 + int(3 * random.random())]
            yield samples[chosen] + 0.01 * offset * np.random.rand(), classes[chosen]


def held_out(name, loader):
    if name == "draws":
        return Draws(loader)
    return DataLoader(TensorDataset(*loader.dataset.tensors), batch_size=20, shuffle=name == "shuffled")


class Plain:
    """tests/reference.py's loop with an evaluation after every so many steps."""

    def __init__(self, model, loss_fn, loader, validation, *, interval, max_grad_norm=1.0, **options):
        self.model, self.loss_fn, self.validation, self.interval = model, loss_fn, validation, interval
        self.num_steps, self.validation_losses, self.validation_steps = 0, [], []
        self.metrics = {name: [] for name in METRICS}
        self.states = []  # at each evaluation
        options |= {"max_grad_norm": max_grad_norm, "lr_scheduler_interval": "epoch", "on_step": self.on_step}
        options |= {"seed": SEED, "lr": LR, "epochs": EPOCHS, "optimizer": torch.optim.AdamW}
        self.losses = reference.train(model, loss_fn, loader, **options).losses

    def on_step(self):
        self.num_steps += 1
        if self.num_steps % self.interval == 0:
            self.evaluate()

    def evaluate(self):
        flags = [(module, module.training) for module in self.model.modules()]
        total, num_samples, metrics = 0.0, 0, dict.fromkeys(METRICS, 0.0)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            self.model.eval()
            for inputs, target in self.validation:
                output = self.model(inputs)
                total += self.loss_fn(output, target).item() * len(inputs)
                num_samples += len(inputs)
                for name, metric in METRICS.items():
                    metrics[name] += float(metric(output, target)) * len(inputs)
        for module, training in flags:
            module.training = training
        self.validation_losses.append(total / num_samples)
        self.validation_steps.append(self.num_steps)
        for name, figure in metrics.items():
            self.metrics[name].append(figure / num_samples)
        self.states.append({name: tensor.clone() for name, tensor in zoo.state(self.model).items()})


def task_of(model, loss_fn, loader, **options):
    """A task as `Plain` trains it."""
    options |= {"optimizer": torch.optim.AdamW, "lr_scheduler_interval": "epoch", "seed": SEED}
    partitioner = Presharded(exact.ends("three", len(model)))
    return ModelTask(model, loss_fn, loader, LR, EPOCHS, name="a", partitioner=partitioner, **options)


def assert_as_plain(build, validation, *, interval, num_devices=2, max_grad_norm=1.0, early_release=False, **options):
    options["max_grad_norm"] = max_grad_norm
    random.seed(0)
    np.random.seed(0)
    outside = random.getstate(), np.random.get_state()
    expected_model, loss_fn, loader = build()
    expected = Plain(expected_model, loss_fn, loader, held_out(validation, loader), interval=interval, **options)
    random.setstate(outside[0])
    np.random.set_state(outside[1])
    model, loss_fn, loader = build()
    options |= {"validation": held_out(validation, loader), "validation_interval": interval, "metrics": METRICS}
    task = task_of(model, loss_fn, loader, early_release=early_release, **options)
    report = exact.run([task], num_devices=num_devices, chaos=3).tasks["a"]
    assert report.losses == expected.losses
    assert report.validation_losses == expected.validation_losses
    assert report.validation_steps == expected.validation_steps
    assert {name: report.validation_metrics.get(name, []) for name in METRICS} == expected.metrics
    exact.assert_same_state(zoo.state(model), zoo.state(expected_model))
    assert all(module.training for module in model.modules())
    return report


@pytest.mark.rest
@covering(strength=1, name=list(BUILDS), accumulation_steps=[1, 3], interval=[2, 7, NUM_STEPS + 1])
def test_validation_in_the_middle_of_epochs_is_the_plain_loops(name, accumulation_steps, interval):
    options = {"interval": interval, "accumulation_steps": accumulation_steps}
    report = assert_as_plain(BUILDS[name], "shuffled", **options)
    assert report.validation_steps == list(range(interval, NUM_STEPS + 1, interval))  # none at the end of step 20


@pytest.mark.rest
@covering(strength=1, name=list(BUILDS), validation=["in order", "draws"], num_devices=[1, 3])
def test_a_validation_loader_that_draws_leaves_torchs_stream_alone(name, validation, num_devices):
    assert_as_plain(BUILDS[name], validation, interval=3, num_devices=num_devices)


@pytest.mark.rest
@pytest.mark.parametrize("interval", [1, 3])
def test_updates_in_the_middle_of_a_step_are_through_before_its_validation(interval):
    assert_as_plain(zoo.dropout, "shuffled", interval=interval, max_grad_norm=None, early_release=True)


@pytest.mark.rest
def test_an_epochs_schedule_moves_at_its_end_whenever_validation_comes():
    def halving(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    assert_as_plain(zoo.dropout, "shuffled", interval=5, lr_scheduler=halving)  # also with an epoch's last step


@pytest.mark.rest
def test_more_steps_than_the_interval_across_epochs_without_a_length():
    class Unsized:
        def __init__(self, loader):
            self.loader, self.dataset = loader, loader.dataset

        def __iter__(self):
            return iter(self.loader)

    def build():
        model, loss_fn, loader = zoo.dropout()
        return model, loss_fn, Unsized(loader)

    assert_as_plain(build, "shuffled", interval=7)


@pytest.mark.rest
def test_company_changes_nothing():
    def tasks(names):
        for name in names:
            model, loss_fn, loader = zoo.dropout()
            options = {"seed": SEED, "validation": held_out("shuffled", loader), "validation_interval": 3}
            yield ModelTask(model, loss_fn, loader, LR, EPOCHS, name=name, **options)

    alone = exact.run(list(tasks("a"))).tasks["a"]
    together = exact.run(list(tasks("ab")), num_devices=2, chaos=5).tasks
    for report in together.values():
        assert (report.losses, report.validation_losses) == (alone.losses, alone.validation_losses)


# By epoch


def test_by_epoch_the_steps_are_those_of_its_end():
    model, loss_fn, loader = zoo.mlp()
    task = ModelTask(model, loss_fn, loader, LR, 2, name="a", validation=held_out("in order", loader))
    assert exact.run([task]).tasks["a"].validation_steps == [10, 20]


class Empty:
    """Has no length, and gives nothing."""

    def __iter__(self):
        return iter(())


def test_a_validation_without_batches_is_refused():
    model, loss_fn, loader = zoo.mlp()
    few = DataLoader(TensorDataset(torch.zeros(3)), 4, drop_last=True)
    for validation in ([], few):
        with refused(task="a", says="validation drop_last"):
            ModelTask(model, loss_fn, loader, LR, 3, name="a", validation=validation)
    task = ModelTask(model, loss_fn, loader, LR, 3, name="a", validation=Empty(), keep_best="validation_loss")
    with refused(task="a", says="validation drop_last"):
        exact.run([task]).raise_failures()


def test_an_epoch_without_validation_batches_has_no_figure():
    class Every2nd:
        """Empty at every other reading."""

        def __init__(self, loader):
            self.loader, self.num_readings = loader, 0

        def __iter__(self):
            self.num_readings += 1
            return iter(self.loader if self.num_readings % 2 else [])

    model, loss_fn, loader = zoo.mlp()
    validation = Every2nd(held_out("in order", loader))
    report = exact.run([ModelTask(model, loss_fn, loader, LR, 3, name="a", validation=validation)]).tasks["a"]
    assert report.validation_steps == [10, 30]
    assert len(report.validation_losses) == 2


# Callbacks


class Log(Callback):
    """Writes down what it is told, and stops the task at one of the validations."""

    def __init__(self, stop_at=None):
        self.calls, self.stop_at = [], stop_at

    def on_step(self, report):
        self.calls.append(("step", report.steps, len(report.validation_losses)))

    def on_validation(self, report):
        self.calls.append(("validation", report.steps, len(report.validation_losses)))
        assert report.validation_steps[-1] == report.steps
        if len(report.validation_losses) == self.stop_at:
            raise StopTask

    def on_epoch(self, report, epoch):
        self.calls.append(("epoch", report.steps, len(report.validation_losses)))


def logged(log, *, interval):
    model, loss_fn, loader = zoo.dropout()
    options = {"validation": held_out("shuffled", loader), "validation_interval": interval, "max_grad_norm": 1.0}
    task = task_of(model, loss_fn, loader, callbacks=[log], **options)
    return model, exact.run([task], num_devices=2, chaos=3).tasks["a"]


@pytest.mark.rest
def test_a_validation_is_told_after_its_step_and_before_the_next():
    log = Log()
    logged(log, interval=5)
    expected = []
    for step in range(1, NUM_STEPS + 1):
        expected.append(("step", step, (step - 1) // 5))
        expected += [("validation", step, step // 5)] if step % 5 == 0 else []
        expected += [("epoch", step, step // 5)] if step % 10 == 0 else []
    assert log.calls == expected


@pytest.mark.rest
@pytest.mark.parametrize("stop_at", [pytest.param(1, marks=pytest.mark.rest), 3])
def test_a_task_that_is_stopped_at_a_validation_holds_the_weights_that_were_validated(stop_at):
    log = Log(stop_at=stop_at)
    model, report = logged(log, interval=3)
    expected_model, loss_fn, loader = zoo.dropout()
    expected = Plain(expected_model, loss_fn, loader, held_out("shuffled", loader), interval=3)
    assert (report.status, report.steps) == ("stopped", 3 * stop_at)
    assert report.validation_losses == expected.validation_losses[:stop_at]
    exact.assert_same_state(zoo.state(model), expected.states[stop_at - 1])
    assert log.calls[-1] == ("validation", 3 * stop_at, stop_at)


def test_a_validation_that_is_not_through_has_no_figure():
    """It fails at its second batch."""

    class Fails:
        def __init__(self, loader):
            self.loader = loader

        def __iter__(self):
            yield next(iter(self.loader))
            raise ZeroDivisionError("of the loader")

    model, loss_fn, loader = zoo.mlp()
    validation = Fails(held_out("in order", loader))
    task = ModelTask(model, loss_fn, loader, LR, name="a", validation=validation, validation_interval=4)
    orchestra = exact.orchestrator([task])
    with pytest.raises(ZeroDivisionError):
        orchestra.train_models()
    report = orchestra.report.tasks["a"]
    assert (report.steps, report.validation_losses, report.validation_steps) == (4, [], [])
