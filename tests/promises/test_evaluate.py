"""`orchestra.evaluate`: the figures of the plain loop, before training and after it.

What it has in common with `predict` is in test_inference.py.
"""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.errors import ShardDoesNotFit
from hydra_engine.planning import PlannedTask, Target, make_plan
from hydra_engine.tasks.evaluation import EvaluationTask
from partitioners import Budget, Presharded, profile, profile_evaluation, shard_bytes
from tests import exact, reference, zoo
from tests.promises import test_inference
from tests.promises.test_inference import (
    SEED,
    WIDTH,
    batches,
    boom,
    dense,
    left_as_it_was,
    of_classes,
    orchestra_of,
    outputs_until,
    task_of,
)
from tests.refused import refused


def plain(task, loader, model=None):
    return test_inference.plain("evaluate", task, loader, model)


# The figures


def test_metrics_are_the_tasks_or_those_that_are_given():
    def agreement(output, target):
        return (output.argmax(dim=1) == target).float().mean()

    def largest(output, target):
        return output.max().item()

    task = task_of(zoo.mlp, validation=[None], metrics={"agreement": agreement})
    orchestra, loader = exact.orchestrator([task]), DataLoader(zoo.mlp()[2].dataset, batch_size=20)
    model = copy.deepcopy(task.model).eval()
    parts = [(len(x), agreement(model(x), y).item(), largest(model(x), y)) for x, y in loader]
    num_samples = sum(size for size, *_ in parts)
    expected = sum(size * figure for size, figure, _ in parts) / num_samples
    assert orchestra.evaluate("subject", loader).metrics == {"agreement": expected}
    expected = sum(size * figure for size, _, figure in parts) / num_samples
    assert orchestra.evaluate("subject", loader, metrics={"largest": largest}).metrics == {"largest": expected}
    assert orchestra.evaluate("subject", loader, metrics={}).metrics == {}


@pytest.mark.parametrize("loss_reduction", ["sum", lambda target: (target > 1).sum()], ids=["sum", "function"])
def test_batches_are_weighted_as_in_validation(loss_reduction):
    class Weighted(nn.Module):
        """Has buffers, and a flag that matters."""

        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.linspace(0.5, 1.5, 5))

        def forward(self, output, target):
            loss = F.cross_entropy(output, target, self.weight, reduction="sum")
            return loss * 2 if self.training else loss

    def build():
        model, _, loader = zoo.dropout()
        return model, Weighted(), loader

    task = task_of(build, loss_reduction=loss_reduction)
    loader = DataLoader(zoo.dropout()[2].dataset, batch_size=20)  # the last one is short
    found = exact.orchestrator([task]).evaluate(task, loader).loss
    if loss_reduction == "sum":
        assert found == plain(task, loader)
        return
    model, loss_fn = copy.deepcopy(task.model).eval(), copy.deepcopy(task.loss_fn).eval()
    total = weight = 0.0
    for x, y in loader:
        total += loss_fn(model(x), y).item() * float(loss_reduction(y))
        weight += float(loss_reduction(y))
    assert found == total / weight


def test_batches_of_one_sample_through_a_batch_norm():
    task = of_classes(dense(norm=True))
    assert orchestra_of().evaluate(task, batches(1, 1)).loss == plain(task, batches(1, 1))


def test_a_module_with_a_forward_of_its_own_is_run_in_eval():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

        def forward(self, x):
            if self.training:
                raise AssertionError("in training")
            return self.b(self.norm(self.a(x)))

    task = of_classes(Net())
    found, source = orchestra_of().evaluate(task, batches(1, 3)).loss, task.model.__dict__["source"]
    assert source.training
    assert list(source._modules) == ["a", "norm", "b"]
    assert found == plain(task, batches(1, 3))


# Tasks, before and after training


@pytest.mark.rest
@pytest.mark.parametrize("name", [pytest.param("dropout", marks=pytest.mark.rest), "cnn"])
def test_evaluations_before_training_leave_it_its_bits_and_after_it_see_its_weights(name):
    class Counting:
        """Counts how often it is opened."""

        def __init__(self, loader):
            self.loader, self.num_opened = loader, 0

        def __len__(self):
            return len(self.loader)

        def __iter__(self):
            self.num_opened += 1
            return iter(self.loader)

    def build():
        model, loss_fn, loader = zoo.MODELS[name]()
        return model, loss_fn, Counting(loader)

    held_out = DataLoader(zoo.MODELS[name]()[2].dataset, batch_size=9, shuffle=True)
    task = task_of(build, epochs=2)
    orchestra = exact.orchestrator([task], num_devices=2)
    first = orchestra.evaluate(task, held_out)
    assert task.dataloader.num_opened == 0
    orchestra.generate()
    assert orchestra.evaluate("subject", held_out) == first
    assert task.dataloader.num_opened == 1
    report = orchestra.train_models()

    expected_model, loss_fn, loader = build()
    assert first.loss == plain(task, held_out, expected_model)
    expected = reference.train(expected_model, loss_fn, loader, seed=SEED, lr=0.1, epochs=2)
    exact.assert_as_expected(
        report, "subject", task.model, exact.Expected(expected.losses, [], zoo.state(expected_model))
    )
    assert orchestra.evaluate("subject", held_out).loss == plain(task, held_out, expected_model)
    assert orchestra.report is report


def test_a_task_of_no_orchestrator_is_planned_on_the_fly():
    task, other = of_classes(dense()), task_of(zoo.mlp)
    orchestra = orchestra_of(other, memory="24KiB")  # the model's weights alone take 20 KiB
    assert orchestra.evaluate(task, batches(9, 4)).loss == plain(task, batches(9, 4))
    assert orchestra.plan is None


def test_nothing_is_printed(capsys):
    task = task_of(zoo.mlp)
    orchestra = ModelOrchestrator([task], devices=[EmulatedDevice("1MiB")])
    orchestra.evaluate(task, zoo.mlp()[2])
    assert capsys.readouterr() == ("", "")


def test_under_inference_mode_weights_stay_trainable():
    task = task_of(zoo.mlp)
    orchestra = exact.orchestrator([task])
    with torch.inference_mode():
        orchestra.evaluate(task, zoo.mlp()[2])
    assert not any(tensor.is_inference() for tensor in zoo.state(task.model).values())
    orchestra.train_models()


def test_gradients_that_the_user_keeps_stay():
    task = task_of(zoo.mlp)
    for inputs, target in zoo.mlp()[2]:
        task.loss_fn(task.model(inputs), target).backward()
    assert all(parameter.grad is not None for parameter in task.model.parameters())
    with left_as_it_was(task.model):
        exact.orchestrator([task]).evaluate(task, zoo.mlp()[2])


def test_modules_keep_flags_of_their_own():
    task = task_of(zoo.cnn)
    task.model[1].eval()
    with left_as_it_was(task.model):
        exact.orchestrator([task]).evaluate(task, zoo.cnn()[2])
    assert not task.model[1].training
    assert task.model[4].training


# Memory


def one_layer_wider_than_the_rest():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 3))  # the second: 64 KiB


def test_a_model_that_cannot_train_on_the_device_is_evaluated_there():
    model, loader = one_layer_wider_than_the_rest(), batches(16, 16)
    task = of_classes(model, loader)
    costs = profile_evaluation(model, *loader[0], F.cross_entropy)
    memory = max(shard_bytes(costs, k, k + 1) for k in range(len(costs)))
    orchestra = orchestra_of(task, memory=memory)
    assert memory < shard_bytes(profile(model, *loader[0], F.cross_entropy, time_layers=False), 1, 2)
    with pytest.raises(ShardDoesNotFit):
        orchestra.generate()
    assert orchestra.evaluate(task, loader).loss == plain(task, loader)
    with refused(ShardDoesNotFit, task="subject", layer="Linear", says="65536"):
        orchestra_of(memory="64KiB").evaluate(of_classes(model), loader)


@pytest.mark.parametrize("ends", [[1, 2, 3, 4], [2, 4], [1, 4], [4]])
def test_what_a_shard_takes_is_what_the_profile_says(ends):
    model, loader = one_layer_wider_than_the_rest(), batches(16)
    costs = profile_evaluation(model, *loader[0], F.cross_entropy)
    task = EvaluationTask.of(of_classes(model, partitioner=Presharded(ends)), loader)
    target = Target(device=EmulatedDevice("1MiB"), budget=Budget(memory_bytes=2**20), num_threads=1)
    plan = make_plan(PlannedTask(task, "a"), target)
    bounds = [shard_bytes(costs, *shard) for shard in pairwise([0, *ends])]
    if len(ends) == 4:
        assert plan.shard_bytes == bounds
    # The loss runs when the last layer's input is gone, unless that is what entered the shard.
    assert all(0.98 * bound < taken <= bound for taken, bound in zip(plan.shard_bytes, bounds, strict=True))


def test_there_are_no_gradients_in_dram():
    layout = PlannedTask(EvaluationTask.of(task_of(zoo.tied), []), "a").layout
    assert layout.num_bytes[True] == layout.link_bytes[True] == 0
    assert layout.num_bytes[False] >= sum(parameter.nbytes for parameter in zoo.tied()[0].parameters())


@pytest.mark.parametrize("sizes", [(8, 1000, 8), (1000, 8)], ids=str)
def test_a_batch_too_large_for_a_layer_alone_is_refused(sizes):
    """Also the first one, which the plan is made for, and a validation's."""
    task = of_classes(dense(), batches(8), validation=batches(*sizes))
    orchestra = orchestra_of(task, memory="70KiB")
    with refused(ShardDoesNotFit, task="subject", says="smaller batches"):
        orchestra.evaluate(task, batches(*sizes))
    if sizes[0] == 8:
        with refused(ShardDoesNotFit, task="subject", says="smaller batches whole"):
            orchestra.train_models().raise_failures()


# What goes wrong


def test_a_metric_that_raises_gives_the_model_back():
    outputs_until(ZeroDivisionError, "evaluate", dense(), batches(4), metrics={"boom": lambda *_: boom()})


def test_a_loader_that_a_task_has_yet_to_read_through_is_refused():
    samples = TensorDataset(*batches(12)[0])
    own = torch.Generator().manual_seed(1)
    loader = DataLoader(samples, batch_size=4, shuffle=True, generator=own)
    task = ModelTask(dense(), F.cross_entropy, loader, 0.1, seed=SEED, name="subject")
    orchestra = orchestra_of(task)
    for shared in (loader, DataLoader(samples, shuffle=True, generator=own)):
        with refused(task="subject", says="evaluate loader"):
            orchestra.evaluate(task, shared)
    orchestra.evaluate(task, DataLoader(samples, batch_size=4))
    orchestra.train_models()
    orchestra.evaluate(task, loader)  # nobody reads it any more


def test_from_inside_training_it_is_refused():
    errors = []

    class Evaluates(Callback):
        def on_step(self, report):
            with refused(RuntimeError, says="evaluate") as caught:
                orchestra.evaluate("subject", batches(3))
            errors.append(caught.value)

    orchestra = orchestra_of(of_classes(dense(), batches(3), callbacks=[Evaluates()]))
    orchestra.train_models().raise_failures()
    assert len(errors) == 1
