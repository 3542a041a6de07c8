"""Batches that adapt: the record of a run says all that it did, and the plain loop that does the same has its bits."""

import math
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.adaptive import Adaptation, AdaptiveDataLoader, LaneSeconds
from hydra_engine.schedule.events import Spread
from hydra_engine.schedule.units import BACKWARD, FUSED
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.adaptive_changes import Noise, plain, record

SEED = 11
# (batch, micro-batches) over and over: even and uneven ones, one alone, and as many as there are samples.
SIZES = ((5, 2), (12, 3), (7, 1), (27, 4), (16, 2), (9, 5))
INITIAL, MOST = 5, 64


def adaptive(loader, initial=INITIAL, most=MOST, *, generator=None, **limits):
    """The samples of a loader, in batches that adapt."""
    found = AdaptiveDataLoader(loader.dataset, initial, shuffle=True, generator=generator)
    found.autoscale_batch_size(most, **limits)
    return found


@contextmanager
def measured_by_engine():
    """What the engine measured of each step, in order."""
    found, original = [], Adaptation.measured

    def measured(self, measures):
        found.append(measures)
        return original(self, measures)

    with mock.patch.object(Adaptation, "measured", measured):
        yield found


def assert_measured(found, expected, *, rel=1e-4):
    """All norms are those taken by hand in float64."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.sizes == pytest.approx(theirs.sizes, rel=1e-9)
        least = 1e-9 * max(theirs.total)
        for row, other in zip((*ours.micro, ours.total), (*theirs.micro, theirs.total), strict=True):
            assert row == pytest.approx(other, rel=rel, abs=least)


def assert_factors(choices, measured, *, initial=INITIAL, power=1.0, rel=1e-3):
    """Each step's factors follow from the gradients of all steps before it."""
    noise = Noise(initial, len(choices[0].factors))
    for choice, each in zip(choices, measured, strict=True):
        expected = [gain**power for gain in noise.gains(choice.batch_size)]
        assert choice.factors == pytest.approx(expected, rel=rel)
        noise.add(each)
    assert any(choice.factors != choices[0].factors for choice in choices)


@contextmanager
def spread(*, in_sums):
    """Spread every step over all devices, but for a task's first one, whatever is predicted and measured."""

    def predict(task, devices, *, host=None):
        backward = {node for node in task.chain if node[0] in (FUSED, BACKWARD)}
        ordered = frozenset(task.ordered | backward if in_sums else task.ordered)
        return (Spread(), *(Spread(1.0 + k, ordered, in_sums) for k in range(1, len(devices))))

    def speedups(adaptation, most):
        return tuple(1.0 + k for k in range(most))

    with (
        mock.patch("hydra_engine.planning.planner.predict_spreads", predict),
        mock.patch.object(Adaptation, "speedups", speedups),
    ):
        yield


ENGINE_ONLY = ("partitioner", "early_release", "optimizer_device", "optimizer_scope", "read_ahead", "scaling_rule")


def both(
    build=zoo.mlp,
    *,
    choices=None,
    sizes=SIZES,
    epochs=2,
    num_devices=1,
    memory=exact.MEMORY,
    partition="each",
    chaos=5,
    company=(),
    double_buffer=True,
    is_measured=True,
    validation=False,
    **options,
):
    """Train by a record with the engine, and by what it reports with the plain loop; returns report and result."""
    options = {"lr": 0.05, "seed": SEED, "epochs": epochs, **options}
    model, loss_fn, loader = build()
    num_samples = len(loader.dataset)
    if choices is None:
        choices = record(sizes, initial=INITIAL, num_samples=num_samples, epochs=epochs)
    task = ModelTask(
        model,
        loss_fn,
        adaptive(loader),
        name="task",
        replay=choices,
        partitioner=Presharded(exact.ends(partition, len(model))) if partition else None,
        validation=DataLoader(loader.dataset, 8) if validation else None,
        **options,
    )
    orchestra = exact.orchestrator(
        [task, *company], num_devices=num_devices, memory=memory, chaos=chaos, double_buffer=double_buffer
    )
    with measured_by_engine() if not company else nullcontext([]) as found:
        report = orchestra.train_models()
    exact.assert_within_budget(report, num_devices)
    report.raise_failures()
    chosen = report.tasks["task"].adaptive
    alone, loss_fn, loader = build()
    for name in ENGINE_ONLY:
        options.pop(name, None)
    if options.get("grad_scaler") is not None:
        options["grad_scaler"] = fresh_scaler()
    result = plain(
        alone,
        loss_fn,
        adaptive(loader),
        chosen,
        validation=DataLoader(loader.dataset, 8) if validation else None,
        **options,
    )
    exact.assert_as_expected(report, "task", model, exact.Expected(result.losses, [], zoo.state(alone)))
    assert report.tasks["task"].validation_losses == result.validation_losses
    assert [(c.step, c.batch_size, c.micro_batches, c.gain, c.progress) for c in chosen] == [
        (c.step, c.batch_size, c.micro_batches, c.gain, c.progress) for c in choices
    ]
    if is_measured and not company and options.get("precision", "float32") == "float32":
        # One micro-batch alone tells nothing.
        assert_measured([m for m in found if len(m.sizes) > 1], [m for m in result.measured if len(m.sizes) > 1])
    return report, result


def fresh_scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=3)


# -- the plain loop


OPTIONS = {
    "sgd": {},
    "momentum": {"optimizer": partial(torch.optim.SGD, momentum=0.9, nesterov=True)},
    "adamw": {"optimizer": partial(torch.optim.AdamW, weight_decay=0.1), "lr": 0.01},
    "adagrad": {"optimizer": torch.optim.Adagrad},
    "groups": {"param_groups": lambda name: {"lr": 0.01} if name.endswith("bias") else {"weight_decay": 0.01}},
    "clipped": {"max_grad_norm": 0.3},
    "early": {"early_release": True, "optimizer": torch.optim.Adam, "lr": 0.01},
    "device": {"optimizer_device": "device", "optimizer": torch.optim.AdamW, "lr": 0.01},
    "task": {"optimizer_scope": "task", "max_grad_norm": 0.5, "optimizer": torch.optim.AdamW, "lr": 0.01},
    "step schedule": {"lr_scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)},
    "epoch schedule": {
        "lr_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        "lr_scheduler_interval": "epoch",
        "early_release": True,
    },
    "validated": {"validation": True},
    "mid-epoch": {"validation": True, "validation_interval": 4},
    "late reads": {"read_ahead": False, "max_grad_norm": 1.0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_record_means_the_plain_loop(name):
    report, result = both(**OPTIONS[name])
    chosen = report.tasks["task"].adaptive
    power = 0.5 if "adam" in repr(OPTIONS[name].get("optimizer", "")).lower() else 1.0
    assert_factors(chosen, result.measured, power=power)
    assert len(chosen[0].factors) == (2 if name == "groups" else 1)


@pytest.mark.parametrize("name", sorted(zoo.MODELS))
def test_every_kind_of_layer(name):
    both(zoo.MODELS[name], optimizer=torch.optim.AdamW, lr=0.01, max_grad_norm=1.0)


@pytest.mark.parametrize("name", ["tied", "dropout", "cnn", "frozen"])
@pytest.mark.parametrize("in_sums", [True, False], ids=["sums", "pieces"])
def test_steps_over_several_devices(name, in_sums):
    sizes = ((5, 3), (12, 3), (7, 7), (27, 4), (16, 6), (9, 5))
    with spread(in_sums=in_sums):
        report, _ = both(zoo.MODELS[name], sizes=sizes, num_devices=3)
    assert {placed.unit.part for placed in report.schedule} == {0, 1, 2}


@pytest.mark.parametrize("options", [{"double_buffer": False}, {"partition": "one"}, {"chaos": None}], ids=str)
def test_other_ways_through_the_engine(options):
    both(zoo.dropout, **options)


def sum_loss():
    model, _, loader = zoo.mlp()
    return model, partial(F.cross_entropy, reduction="sum"), loader


def counted_loss():
    """The classes 0 and 1 do not count; a micro-batch may have nothing else."""

    def mean_of_counted(output, target):
        losses = F.cross_entropy(output, target, reduction="none") * (target > 1)
        return losses.sum() / (target > 1).sum().clamp(min=1)

    model, _, loader = zoo.mlp()
    return model, mean_of_counted, loader


def test_a_loss_that_is_a_sum():
    both(sum_loss, loss_reduction="sum", lr=0.005, validation=True)


def test_a_loss_whose_weights_are_the_users_own():
    sizes = ((5, 5), (12, 3), (7, 7), (27, 4))  # micro-batches of one sample, some without weight
    report, result = both(counted_loss, sizes=sizes, loss_reduction=lambda target: (target > 1).sum().item())
    assert any(len(each.sizes) < c.micro_batches for each, c in zip(result.measured, report.tasks["task"].adaptive))


@pytest.mark.parametrize("name", ["mlp", "gpt", "cnn", "tied"])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_narrow_precisions(name, precision):
    scaler = {"grad_scaler": fresh_scaler()} if precision == "float16" else {}
    report, result = both(zoo.MODELS[name], precision=precision, **scaler)
    if scaler:
        assert report.tasks["task"].loss_scales == result.loss_scales
        assert len(set(result.loss_scales)) > 1


# -- chosen batches


@contextmanager
def timed_by(cost):
    """Have steps take the seconds that `cost` gives for a choice: what is chosen then depends on no clock."""
    original = Adaptation.timed

    def timed(self, choice, seconds, devices=None):
        return original(self, choice, cost(choice), devices)

    with mock.patch.object(Adaptation, "timed", timed):
        yield


def mostly_transfers(choice):
    compute_s = 0.01 * choice.micro_batches + 0.002 * choice.batch_size
    return LaneSeconds(1.0 + compute_s, compute_s, 1.0)


def chosen(
    build=zoo.mlp,
    *,
    cost=mostly_transfers,
    replay=(),
    num_devices=1,
    memory=exact.MEMORY,
    partition="each",
    company=(),
    limits=None,
    loader=None,
    **options,
):
    """Train with choices of the engine's own; returns model, loader and report."""
    options = {"lr": 0.02, "seed": SEED, "epochs": 3, **options}
    model, loss_fn, samples = build()
    loader = adaptive(samples, **(limits or {})) if loader is None else loader
    shards = Presharded(exact.ends(partition, len(model))) if partition else None
    task = ModelTask(model, loss_fn, loader, name="task", replay=replay, partitioner=shards, **options)
    orchestra = exact.orchestrator([task, *company], num_devices=num_devices, memory=memory, chaos=3)
    with timed_by(cost) if cost is not None else nullcontext():
        report = orchestra.train_models()
    exact.assert_within_budget(report, num_devices)
    report.raise_failures()
    return model, loader, report


def assert_plain(build, model, report, **options):
    """What the engine has chosen and done is what the plain loop does by its record."""
    options = {"lr": 0.02, "seed": SEED, "epochs": 3, **options}
    alone, loss_fn, samples = build()
    result = plain(alone, loss_fn, adaptive(samples), report.tasks["task"].adaptive, **options)
    exact.assert_as_expected(report, "task", model, exact.Expected(result.losses, [], zoo.state(alone)))
    return result


@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("name", ["mlp", "dropout", "tied", "cnn"])
def test_chosen_batches_are_those_of_the_plain_loop(name, num_devices):
    build = zoo.MODELS[name]
    model, _, report = chosen(build, num_devices=num_devices, max_grad_norm=1.0)
    found = report.tasks["task"].adaptive
    assert max(each.batch_size for each in found) > INITIAL, "nothing was adapted"
    result = assert_plain(build, model, report, max_grad_norm=1.0)
    assert_factors(found, result.measured)


def test_with_times_as_they_are_and_others_beside():
    company = [exact.task_of(name, epochs=1)[0] for name in ("cnn", "gpt")]
    model, _, report = chosen(zoo.dropout, cost=None, num_devices=2, company=company)
    assert_plain(zoo.dropout, model, report)


ELSEWHERE = {
    "one shard": {"partition": "one"},
    "three devices": {"num_devices": 3},
    "little memory": {"partition": None, "memory": "40KiB"},
    "beside others": {"company": ("cnn", "gpt"), "num_devices": 2},
    "no times": {"cost": lambda choice: LaneSeconds(1e9, choice.batch_size**3)},
    "late reads": {"read_ahead": False},
}


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_replay_has_the_bits_anywhere(elsewhere):
    options = {"optimizer": torch.optim.AdamW, "validation": DataLoader(zoo.mlp()[2].dataset, 8)}
    where = dict(ELSEWHERE[elsewhere])
    where["company"] = [exact.task_of(name, epochs=1)[0] for name in where.get("company", ())]
    model, _, first = chosen(zoo.dropout, num_devices=2, **options)
    again, _, second = chosen(zoo.dropout, replay=first.tasks["task"].adaptive, **options, **where)
    ours, theirs = second.tasks["task"], first.tasks["task"]
    assert ours.adaptive == theirs.adaptive
    assert (ours.losses, ours.validation_losses) == (theirs.losses, theirs.validation_losses)
    exact.assert_same_state(zoo.state(again), zoo.state(model))


@pytest.mark.parametrize("in_sums", [True, False], ids=["sums", "pieces"])
def test_replay_of_steps_that_were_spread(in_sums):
    """In bfloat16, which adds the gradients of parts in float32."""
    with spread(in_sums=in_sums):
        model, _, first = chosen(zoo.gpt, num_devices=3, precision="bfloat16")
    assert {placed.unit.part for placed in first.schedule} == {0, 1, 2}
    again, _, second = chosen(zoo.gpt, replay=first.tasks["task"].adaptive, precision="bfloat16", partition="three")
    assert second.tasks["task"].losses == first.tasks["task"].losses
    exact.assert_same_state(zoo.state(again), zoo.state(model))


def test_a_record_that_ends_early_is_gone_on_from():
    model, _, first = chosen()
    record_ = first.tasks["task"].adaptive
    again, _, second = chosen(replay=record_[:4])
    assert second.tasks["task"].adaptive[:4] == record_[:4]
    assert_plain(zoo.mlp, again, second)


# -- epochs and samples


def numbered(num_samples=50):
    """Samples that are told apart by their first number."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        samples = torch.randn(num_samples, 6)
        samples[:, 0] = torch.arange(num_samples)
        model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        data = TensorDataset(samples, torch.randint(3, (num_samples,)))
    return model, F.cross_entropy, DataLoader(data, 5)


class Flow(IterableDataset):
    """Samples without a length."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return iter([self.dataset[k] for k in range(len(self.dataset))])


class Seen:
    """Notes the samples of each batch that is split."""

    def __init__(self):
        self.batches = []

    def __call__(self, inputs, target, number):
        from hydra_engine import split

        if not self.batches or self.batches[-1] != inputs[:, 0].tolist():
            self.batches.append(inputs[:, 0].tolist())
        return split(inputs, target, number)


@pytest.mark.parametrize("drop_last", [False, True])
def test_each_sample_comes_once_in_a_pass_whatever_the_batch_does(drop_last):
    seen, epochs = Seen(), 4
    _, _, samples = numbered(53)
    loader = AdaptiveDataLoader(samples.dataset, INITIAL, shuffle=True, drop_last=drop_last)
    loader.autoscale_batch_size(20)
    _, _, report = chosen(numbered, loader=loader, split=seen, epochs=epochs)
    found = report.tasks["task"].adaptive
    assert [len(each) for each in seen.batches] == [each.batch_size for each in found]
    passes, now = [], []
    for batch in seen.batches:
        if set(batch) & set(now):
            passes.append(now)
            now = []
        now = now + batch
        assert len(set(now)) == len(now), "a sample came twice in a pass"
    for each in passes:
        assert len(each) == 53 if not drop_last else len(each) > 53 - INITIAL
    worth = epochs * (53 // INITIAL if drop_last else 53 / INITIAL)
    last = found[-1]
    assert last.progress < worth <= last.progress + last.gain + 1e-6
    progress = 0.0
    for each in found:
        assert each.progress == pytest.approx(progress)
        progress += each.gain
        assert 0 < each.gain <= max(1.0, each.batch_size / INITIAL) + 1e-9
    assert all(each.gain == pytest.approx(each.batch_size / INITIAL) for each in found if each.batch_size < INITIAL)


def test_data_without_a_length_is_read_once_in_an_epoch():
    seen = Seen()
    loader = AdaptiveDataLoader(Flow(numbered()[2].dataset), INITIAL)
    loader.autoscale_batch_size(20)
    chosen(numbered, loader=loader, split=seen, epochs=2)
    assert [int(x) for batch in seen.batches for x in batch] == 2 * list(range(50))


def test_validation_comes_at_the_end_of_an_epoch_by_progress():
    _, _, report = chosen(numbered, validation=DataLoader(numbered()[2].dataset, 7))
    task = report.tasks["task"]
    per_epoch = 50 / INITIAL
    ends = [
        next(k + 1 for k, c in enumerate(task.adaptive) if c.progress + c.gain >= epoch * per_epoch - 1e-6)
        for epoch in (1, 2, 3)
    ]
    assert task.validation_steps == ends
    assert len(task.validation_losses) == 3
