"""A global batch in micro-batches of limited size: the bits of a plain loop with that split, on any devices."""

from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import ModelTask, ShardDoesNotFit, split, split_batch
from hydra_engine.run.task_list import TaskList
from partitioners import Balanced, Presharded
from tests import exact, reference, zoo
from tests.covering import covering
from tests.promises.test_resumed import FailsAfter, orchestra_of
from tests.promises.test_spread import parts_of, spread
from tests.refused import names, refused


def for_at_most(num_devices):
    """Split batches for so many devices, whatever devices are given."""

    def made(*args, max_devices, **options):
        return TaskList(*args, max_devices=num_devices, **options)

    return mock.patch("hydra_engine.run.orchestrator.TaskList", made)


def both(build, most, max_devices, *, num_devices=None, seed=11, chaos=7, lr=0.05, unpack=None, **options):
    """Train with the engine, and compare with the plain loop."""
    original, expected_loss_fn, loader = build()
    options = {"lr": lr, "max_device_batch": most, "seed": seed, **options}
    found = reference.train(original, expected_loss_fn, loader, max_devices=max_devices, **options)
    model, loss_fn, loader = build()
    shards = Presharded(exact.ends("each", len(model)))
    task = ModelTask(model, loss_fn, loader, name="task", partitioner=shards, **options)
    with for_at_most(max_devices):
        report = exact.run([task], num_devices=num_devices or max_devices, chaos=chaos)
    exact.assert_as_expected(
        report, "task", model, exact.Expected(found.losses, found.validation_losses, zoo.state(original))
    )
    assert report.tasks["task"].validation_losses == found.validation_losses
    return report


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "num_devices"),
    [("cnn", 2), ("dropout", 3), *(pytest.param(name, 1, marks=pytest.mark.rest) for name in sorted(zoo.MODELS))],
)
def test_bits_are_those_of_the_plain_loop_with_the_same_split(name, num_devices):
    """Batches of 4 to 6 samples, most with a smaller last one, in micro-batches of at most 2."""
    with spread(num_devices, in_sums=num_devices == 2):
        report = both(zoo.MODELS[name], 2, num_devices, optimizer=torch.optim.AdamW, max_grad_norm=0.5)
    assert parts_of(report) == set(range(num_devices))


@pytest.mark.rest
@pytest.mark.parametrize("num_devices", [1, *(pytest.param(number, marks=pytest.mark.rest) for number in (2, 3))])
@pytest.mark.parametrize("name", ["dropout", pytest.param("cnn", marks=pytest.mark.rest)])
def test_bits_do_not_depend_on_how_many_of_the_most_devices_there_are(name, num_devices):
    """All three are equal to one plain loop: that for three devices."""
    with spread(num_devices, in_sums=False):
        report = both(zoo.MODELS[name], 3, 3, num_devices=num_devices, optimizer=torch.optim.Adam)
    assert parts_of(report) == set(range(num_devices))


def sized(*sizes, draws=True):
    """A model that draws, and batches of these sizes, whose order is drawn, too."""

    class Loader:
        def __iter__(self):
            for size in sizes:
                yield torch.randn(size, 12), torch.randint(5, (size,))

    return lambda: (*(zoo.dropout() if draws else zoo.mlp())[:2], Loader())


SIZES = [  # of batches, the most of a micro-batch, and devices
    ((8, 8, 8, 3), 4, 1),  # the last one is one micro-batch
    ((3, 8, 1, 5), 4, 1),  # the first one is
    ((8, 5), 64, 1),  # each one is
    ((2, 1, 7), 1, 3),  # fewer samples than devices
    ((13, 11), 4, 3),  # the smaller one has larger micro-batches: 6 of at most 3 samples, 3 of at most 4
]


@covering(strength=1, split_of=SIZES, options=[{}, {"read_ahead": False}, {"early_release": True}], ids=str)
def test_each_batch_is_split_by_its_own_size(split_of, options):
    sizes, most, max_devices = split_of
    if "early_release" not in options:
        options = {"max_grad_norm": 1.0, **options}
    original, loss_fn, loader = sized(*sizes)()
    plain = {name: value for name, value in options.items() if name == "max_grad_norm"}
    plain |= {"lr": 0.1, "epochs": 2, "seed": 3, "max_device_batch": most}
    expected = reference.train(original, loss_fn, loader, max_devices=max_devices, **plain)
    model, loss_fn, loader = sized(*sizes)()
    numbers = []

    def counted(inputs, target, number):
        parts = split(inputs, target, number)
        numbers.append([len(x) for x, _, _ in parts])
        return parts

    task = ModelTask(
        model, loss_fn, loader, name="task", split=counted, partitioner=Presharded([2, 4, 6]), **plain | options
    )
    with for_at_most(max_devices):
        orchestra = exact.orchestrator([task], num_devices=max_devices, chaos=2)
    plan = orchestra.generate()
    report = orchestra.train_models()
    exact.assert_as_expected(report, "task", model, exact.Expected(expected.losses, [], zoo.state(original)))
    splits = [split_batch(size, most, max_devices) for size in sizes]
    assert plan.tasks["task"].accumulation_steps == len(splits[0])
    assert [each for k, each in enumerate(numbers) if k == 0 or each != numbers[k - 1]] == [
        each for k, each in enumerate(splits * 2) if k == 0 or each != (splits * 2)[k - 1]
    ]


@pytest.mark.rest
@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.rest), 2])
def test_later_batches_of_more_and_larger_micro_batches_keep_to_the_budget(num_devices):
    """The plan saw one micro-batch of 8 samples (two of 4); the last ones are of 32, which take a finer cut."""

    def build():
        torch.manual_seed(1)
        model = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.Dropout(0.2))))
        return model, F.mse_loss, [(torch.randn(size, 32), torch.randn(size, 32)) for size in (8, 64, 8, 128, 9)]

    original, loss_fn, batches = build()
    options = {"lr": 0.05, "seed": 2, "max_device_batch": 32}
    expected = reference.train(original, loss_fn, batches, max_devices=num_devices, **options)
    model, loss_fn, batches = build()
    report = exact.run(
        [ModelTask(model, loss_fn, batches, name="task", **options)], num_devices=num_devices, memory="48KiB"
    )
    exact.assert_as_expected(report, "task", model, exact.Expected(expected.losses, [], zoo.state(original)))
    assert report.tasks["task"].revisions


@pytest.mark.parametrize("precision", [pytest.param("bfloat16", marks=pytest.mark.rest), "float16"])
def test_in_a_narrow_precision(precision):
    scaler = {"grad_scaler": torch.amp.GradScaler("cpu", init_scale=256.0)} if precision == "float16" else {}
    both(sized(7, 7, 2), 4, 1, precision=precision, optimizer=torch.optim.AdamW, **scaler)


@pytest.mark.rest
def test_validation_batches_are_whole():
    both(zoo.MODELS["dropout"], 2, 2, validation=zoo.mlp()[2])


OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}


def doubles(loss_reduction):
    """A model in float64, so that sums in another order differ by less than steps do, and batches of 7."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    batches = [(torch.randn(7, 6).double(), torch.randn(7, 3).double()) for _ in range(4)]
    return model, partial(F.mse_loss, reduction=loss_reduction), batches


@covering(strength=1, optimizer=list(OPTIMIZERS), loss_reduction=["mean", "sum"])
def test_split_batches_train_as_whole_ones(optimizer, loss_reduction):
    """Up to rounding: uneven micro-batches, of which a mean counts by its samples and a sum as it is."""
    original, loss_fn, batches = doubles(loss_reduction)
    expected = reference.train(original, loss_fn, batches, seed=1, optimizer=OPTIMIZERS[optimizer])
    model, loss_fn, batches = doubles(loss_reduction)
    options = {"optimizer": OPTIMIZERS[optimizer], "loss_reduction": loss_reduction, "max_device_batch": 2}
    task = ModelTask(model, loss_fn, batches, seed=1, name="task", **options)
    report = exact.run([task], num_devices=1)
    assert report.tasks["task"].losses == pytest.approx(expected.losses, rel=1e-12)
    for name, value in original.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-7, atol=1e-9)


def test_weights_may_be_the_users_own():
    """Micro-batches are weighed by their targets that count, not by samples."""

    def mean_of_counted(output, target):
        return F.cross_entropy(output, target, ignore_index=2, reduction="sum") / (target != 2).sum().clamp(min=1)

    def build():
        model, _, loader = sized(7, 5, draws=False)()
        return model, mean_of_counted, loader

    both(build, 2, 1, loss_reduction=lambda target: (target != 2).sum().item())


# -- a resume


@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.rest), 2])
@pytest.mark.rest
def test_a_resume_on_fewer_devices_keeps_the_split(tmp_path, num_devices):
    options = {"optimizer": torch.optim.AdamW, "lr": 0.05, "seed": 11, "max_device_batch": 2, "epochs": 2}
    original, loss_fn, loader = zoo.dropout()
    expected = reference.train(original, loss_fn, loader, max_devices=3, **options)

    def task_of(**more):
        model, loss_fn, loader = zoo.dropout()
        return ModelTask(model, loss_fn, loader, name="task", partitioner=Presharded([2, 4, 6]), **options, **more)

    for after, number in ((4, 3), (13, num_devices)):
        orchestra = orchestra_of([task_of(callbacks=[FailsAfter(after)])], tmp_path, num_devices=number)
        with pytest.raises(RuntimeError):
            orchestra.train_models(resume=True)
        assert orchestra.report.tasks["task"].steps == after
    orchestra = orchestra_of([task := task_of()], tmp_path, num_devices=1)
    report = orchestra.train_models(resume=True)
    exact.assert_as_expected(report, "task", task.model, exact.Expected(expected.losses, [], zoo.state(original)))


# -- plans


def test_another_limit_is_another_structure():
    def tasks_of(*limits):
        return [
            ModelTask(
                nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)), F.mse_loss, batches, name=str(k), **each
            )
            for k, each in enumerate(limits)
        ]

    batches = [(torch.randn(7, 6), torch.randn(7, 3))]
    tasks = tasks_of({}, {"max_device_batch": 7}, {"max_device_batch": 7}, {"max_device_batch": 3})
    plan = exact.orchestrator(tasks).generate().tasks
    assert [each.adopted_from for each in plan.values()] == [None, None, "1", None]
    assert [each.accumulation_steps for each in plan.values()] == [1, 1, 1, 3]


def test_a_task_added_to_a_run_is_split_for_as_many_devices():
    orchestra = exact.orchestrator([ModelTask(*zoo.mlp(), name="first")], num_devices=2)
    orchestra.add_task(ModelTask(*zoo.mlp(), name="second", max_device_batch=5))
    assert orchestra.generate().tasks["second"].accumulation_steps == len(split_batch(5, 5, 2)) == 2


# -- refused


class DrawsOutside(nn.Module):
    def forward(self, x):
        return x * np.random.rand()


def test_a_layer_that_draws_in_another_order_than_a_plain_loop_is_told():
    batches = [(torch.randn(size, 6), torch.randn(size, 6)) for size in (8, 128)]
    task = ModelTask([nn.Linear(6, 6), DrawsOutside()], F.mse_loss, batches, name="a", max_device_batch=64)
    [message] = exact.run([task]).messages
    names(message, task="a", says="layer `numpy.random` max_device_batch")


def dense(sizes, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    batches = [(torch.randn(size, 32), torch.randint(3, (size,))) for size in sizes]
    return ModelTask(model, F.cross_entropy, batches, name="a", **options)


@pytest.mark.parametrize("partitioner", [None, Balanced(1), Presharded([1, 2, 3])], ids=repr)
def test_a_micro_batch_that_does_not_fit_says_what_to_lower(partitioner):
    task = dense([4096], max_device_batch=2048, partitioner=partitioner)
    with refused(ShardDoesNotFit, says="max_device_batch") as raised:
        exact.orchestrator([task], memory="80KiB").generate()
    assert "accumulation_steps" not in str(raised.value)  # which is not the one to change


def test_a_later_micro_batch_that_does_not_fit_says_what_to_lower():
    task = dense([32, 4096], max_device_batch=2048)
    with refused(ShardDoesNotFit, says="max_device_batch=2048"):
        exact.orchestrator([task], memory="80KiB").train_models()
