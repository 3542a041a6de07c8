"""When a batch does not fit: finer shards, then more micro-batches under "auto", and plain PyTorch's bits all along."""

import copy
import functools
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hydra_engine.planning.fit
from hydra_engine import EmulatedDevice, ModelTask, ShardDoesNotFit
from hydra_engine.host.measured import KnownUnits
from partitioners import Balanced, Presharded
from tests import reference
from tests.covering import covering
from tests.exact import assert_same_state, assert_within_budget, silent
from tests.refused import names, refused

SEED = 5
WIDTH = 32
SETTINGS = {"lr": 1e-3, "optimizer": torch.optim.AdamW, "seed": SEED}


def dense(*, draws=False, norm=False):
    """Ten layers, or more with those that draw or have buffers; activations weigh as much as weights at 32 samples."""
    torch.manual_seed(1)
    layers = []
    for _ in range(5):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2) if draws else nn.Tanh()]
        if norm:
            layers.append(nn.BatchNorm1d(WIDTH))
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def batches(*sizes):
    """A loader: batches of these sizes."""
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(n, WIDTH, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes]


def orchestra_of(devices, *tasks):
    return silent(tasks, devices=devices)


def train(model, loader, memory, *, num_devices=1, **options):
    """The task's report; its devices never held more than their budget."""
    devices = [EmulatedDevice(memory, meter_every_unit=True) for _ in range(num_devices)]
    task = ModelTask(model, F.cross_entropy, loader, epochs=2, name="a", **SETTINGS, **options)
    orchestra = orchestra_of(devices, task)
    start = orchestra.generate().tasks["a"].accumulation_steps
    report = orchestra.train_models()
    assert_within_budget(report, num_devices)
    report.tasks["a"].start = start
    return report.tasks["a"]


def number_at(report):
    """The micro-batches of a step, as plan and report tell them."""
    start = getattr(report, "start", 1)

    def number(step):
        return next((r.accumulation_steps for r in reversed(report.revisions) if r.step <= step), start)

    return number


def assert_as_plain(model, original, loader, report, **options):
    """Trains `original` by the plain loop."""
    assert report.status == "finished", report.error
    number = number_at(report)
    result = reference.train(
        original, F.cross_entropy, loader, epochs=2, accumulation_steps=number, **SETTINGS, **options
    )
    assert report.losses == result.losses
    assert report.validation_losses == result.validation_losses
    assert_same_state(model.state_dict(), original.state_dict())


def train_as_plain(loader, memory, *, draws=False, norm=False, validation=None, **options):
    """Train a dense model; its report, once all is as in the plain loop."""
    model, original = dense(draws=draws, norm=norm), dense(draws=draws, norm=norm)
    report = train(model, loader, memory, validation=validation, **options)
    assert_as_plain(model, original, loader, report, validation=validation)
    return report


# Who finds that a batch does not fit: the measurement before its step, or a device that runs out in it.
WARNED_BY = ["fake tensors", "the device alone"]
any_warning = pytest.mark.parametrize("warned_by", [WARNED_BY[0], pytest.param(WARNED_BY[1], marks=pytest.mark.rest)])
OPTIONS = [{}, {"draws": True}, {"norm": True}]


@pytest.fixture(autouse=True)
def _warn(request, monkeypatch):
    """Measure nothing in advance in cases with `warned_by="the device alone"`."""
    if hasattr(request.node, "callspec") and request.node.callspec.params.get("warned_by") == WARNED_BY[1]:
        monkeypatch.setattr(hydra_engine.planning.fit, "_count", lambda *_: None)


@pytest.mark.rest
@covering(warned_by=WARNED_BY, options=OPTIONS, num_devices=[1, 2], strength=1, ids=str)
def test_a_batch_four_times_larger_in_mid_epoch_is_trained_on_finer_shards(warned_by, options, num_devices):
    report = train_as_plain(batches(32, 32, 128, 32, 32, 32), "80KiB", num_devices=num_devices, **options)
    assert report.revisions
    assert {revision.accumulation_steps for revision in report.revisions} == {1}
    assert report.revisions[0].step == 2
    ends = [revision.boundaries for revision in report.revisions]
    assert all(set(few) < set(more) for few, more in pairwise(ends))


@covering(warned_by=WARNED_BY, options=[{}, {"norm": True}], num_devices=[1, 2], strength=1, ids=str)
def test_where_one_layer_is_too_large_there_are_more_micro_batches(warned_by, options, num_devices):
    options = {"num_devices": num_devices, "accumulation_steps": "auto", **options}
    report = train_as_plain(batches(32, 64, 512, 32, 500, 64), "120KiB", **options)
    assert report.revisions[-1].accumulation_steps > 1


@pytest.mark.rest
def test_layers_that_draw_get_the_streams_of_their_micro_batches():
    report = train_as_plain(batches(32, 64, 512, 32, 500, 64), "120KiB", draws=True, accumulation_steps="auto")
    assert report.revisions[-1].accumulation_steps > 1


@covering(warned_by=WARNED_BY, options=OPTIONS, number=[1, 3], num_devices=[1, 2], strength=1, ids=str)
def test_a_fixed_number_is_kept_or_the_task_fails_by_name(warned_by, options, number, num_devices):
    """Other micro-batches would be another loop than the one that was asked for."""
    models = [dense(**options), dense()]
    originals = copy.deepcopy(models)
    large, small = batches(32, 64, 512, 32), batches(32, 32)
    tasks = [
        ModelTask(model, F.cross_entropy, loader, epochs=2, name=name, accumulation_steps=steps, **SETTINGS)
        for model, loader, name, steps in zip(models, (large, small), "ab", (number, 1), strict=True)
    ]
    report = orchestra_of([EmulatedDevice(80 * 1024) for _ in range(num_devices)], *tasks).train_models()
    failed = report.tasks["a"]
    assert (failed.status, failed.steps) == ("failed", 2)
    assert isinstance(failed.exception, ShardDoesNotFit)
    names(failed.exception, task="a: ", layer="0 (Linear)", says=f"2 accumulation_steps={number} 81920")
    assert {revision.accumulation_steps for revision in failed.revisions} <= {number}
    cases = ("a", large[:2], 1, number), ("b", small, 2, 1)
    for model, original, (name, loader, epochs, steps) in zip(models, originals, cases, strict=True):
        settings = {"epochs": epochs, "accumulation_steps": steps, **SETTINGS}
        assert report.tasks[name].losses == reference.train(original, F.cross_entropy, loader, **settings).losses
        assert_same_state(model.state_dict(), original.state_dict())


@pytest.mark.parametrize("options", [{}, {"max_retries": 2}], ids=str)
def test_a_fixed_number_is_no_other_whatever_else_is_asked_for(options):
    with refused(ShardDoesNotFit, task="a", says="accumulation_steps"):
        train(dense(), batches(32, 64, 512, 32), "80KiB", **options)


@covering(warned_by=WARNED_BY, partitioner=[Presharded([5, 11]), Balanced(2)], strength=1, ids=str)
def test_a_partition_that_the_user_fixed_is_cut_all_the_same(warned_by, partitioner):
    assert train_as_plain(batches(32, 128, 32), "110KiB", partitioner=partitioner).revisions


@pytest.mark.rest
@any_warning
def test_a_larger_validation_batch_is_evaluated_on_finer_shards(warned_by):
    assert train_as_plain(batches(32, 32), "70KiB", norm=True, validation=batches(32, 256)).revisions


@pytest.mark.rest
@any_warning
def test_a_validation_batch_too_large_for_a_layer_is_refused(warned_by):
    validation = batches(32, 2048, 31)
    with refused(ShardDoesNotFit, task="a", says="evaluation whole smaller"):
        train(dense(norm=True), batches(32, 32), "70KiB", validation=validation)


@any_warning
def test_batches_of_any_size_are_split_as_far_as_they_go(warned_by):
    """1, 1 and 3 samples: 2 micro-batches are not enough, and 4 are more than there are samples."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    generator = torch.Generator().manual_seed(2)
    loader = [
        (torch.randn(n, 64, 64, generator=generator), torch.randint(3, (n, 64), generator=generator)) for n in (1, 1, 3)
    ]
    original = copy.deepcopy(model)

    def loss_fn(output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    task = ModelTask(model, loss_fn, loader, seed=SEED, accumulation_steps="auto")
    report = orchestra_of([EmulatedDevice("190KiB")], task).train_models().tasks["task-0"]
    assert report.revisions[-1].accumulation_steps == 3
    reference.train(original, loss_fn, loader, seed=SEED, accumulation_steps=number_at(report))
    assert all(map(torch.equal, model.parameters(), original.parameters()))


@pytest.mark.rest
def test_an_evaluation_that_fits_says_nothing_of_a_training_batch():
    loader, validation = batches(32, 32, 512, 32), batches(512)
    report = train(dense(draws=True), loader, "160KiB", validation=validation, accumulation_steps="auto")
    assert report.revisions[-1].accumulation_steps > 1
    options = {"epochs": 2, "validation": validation, "accumulation_steps": number_at(report), **SETTINGS}
    assert report.losses == reference.train(dense(draws=True), F.cross_entropy, loader, **options).losses


def test_a_model_that_cannot_be_in_micro_batches_says_why():
    class Noise(nn.Module):
        def forward(self, x):
            return x * float(np.random.random())

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Noise(), nn.Linear(WIDTH, 3))
    with refused(ValueError, task="a", layer="layer", says="draws random"):
        train(model, batches(32, 1024), "100KiB")


def test_a_mask_that_a_function_caches_stays_real():
    """What layers make from nothing and keep is used again in real runs."""

    @functools.lru_cache
    def mask(length):
        return torch.ones(length, length).tril()

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return mask(x.shape[0]) @ self.linear(x)

    torch.manual_seed(1)
    model = nn.Sequential(Mixed(), nn.Tanh(), Mixed(), nn.Linear(WIDTH, 3))
    original, loader = copy.deepcopy(model), batches(32, 96, 40)
    report = train(model, loader, "80KiB")
    assert report.revisions
    assert_as_plain(model, original, loader, report)
    assert type(mask(96)) is torch.Tensor


def test_a_batch_of_one_sample_that_does_not_fit_fails_the_task_with_its_last_commit():
    model, plain, loader = dense(), dense(), batches(32, 32)
    large = (torch.randn(1, 4096, WIDTH), torch.randint(3, (1, 4096)))
    task = ModelTask(
        model, lambda output, y: F.cross_entropy(output.flatten(0, -2), y.flatten()), [*loader, large], seed=SEED
    )
    orchestra = orchestra_of([EmulatedDevice("80KiB")], task)
    with refused(ValueError, task="task-0", layer="0 (Linear)", says="step 2 1"):
        orchestra.train_models()
    report = orchestra.report.tasks["task-0"]
    assert (report.status, report.steps) == ("failed", 2)
    reference.train(plain, F.cross_entropy, loader, seed=SEED)
    assert_same_state(model.state_dict(), plain.state_dict())


@pytest.mark.rest
def test_a_backward_that_does_not_fit_is_found_before_the_next_batch_is_read(monkeypatch):
    """The loader reads on from where layers that draw have left the random stream, which micro-batches would not."""
    monkeypatch.setattr(hydra_engine.planning.fit, "_count", lambda *_: None)
    # Forward takes three activations of 75 KiB, backward of a lone Linear four.
    tensors = batches(600)[0]
    loader = DataLoader(TensorDataset(*tensors), batch_sampler=[range(32), range(600), range(32), range(8, 20)])
    report = train_as_plain(loader, "260KiB", draws=True, accumulation_steps="auto")
    assert report.revisions[-1].accumulation_steps > 1


def test_layers_that_draw_cannot_be_split_once_the_next_batch_is_read(monkeypatch):
    monkeypatch.setattr(hydra_engine.planning.fit, "_count", lambda *_: None)
    monkeypatch.setattr(KnownUnits, "fits", lambda *_: True)
    with refused(ValueError, task="a", says="next batch read"):
        train(dense(draws=True), batches(32, 600, 32), "260KiB", accumulation_steps="auto")


@pytest.mark.parametrize("memory", [2_000_000, pytest.param(2_400_000, marks=pytest.mark.rest)])
@pytest.mark.parametrize("options", [{"early_release": True}, {"early_release": "all"}])
def test_a_larger_batch_is_fitted_before_shards_above_are_updated(memory, options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 128), *(nn.Linear(128, 128) for _ in range(4)), nn.Linear(128, 3))
    original, loader = copy.deepcopy(model), batches(16, 16, 16, 600, 16)
    report = train(model, loader, memory, partitioner=Presharded([4, 6]), **options)
    assert report.status == "finished"
    assert_as_plain(model, original, loader, report)


def test_larger_shapes_are_not_measured_before_they_begin(monkeypatch):
    measured = []
    count = hydra_engine.planning.fit._count
    monkeypatch.setattr(hydra_engine.planning.fit, "_count", lambda *args: measured.append(1) or count(*args))
    train(dense(), batches(32, 31, 1, 32, 33, 33, 36, 20), "1MiB")
    assert not measured


def test_a_layer_that_does_not_repeat_is_found_in_a_shard_that_was_never_recomputed():
    """It was in the last shard, which runs forward and backward as one; cut, it would be recomputed."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    model = dense()
    model = nn.Sequential(*model[:6], Counting(), *model[6:])
    with refused(ValueError, task="a", says="'calls'"):
        train(model, batches(32, 128), "110KiB", partitioner=Presharded([5, 12]))


@pytest.mark.rest
def test_other_tasks_go_on_as_if_alone():
    models = [dense(), dense(norm=True)]
    originals = copy.deepcopy(models)
    loaders = [batches(32, 128, 32, 512, 32), batches(32, 32, 32)]
    tasks = [
        ModelTask(model, F.cross_entropy, loader, epochs=2, accumulation_steps=n, **SETTINGS)
        for model, loader, n in zip(models, loaders, ("auto", 1), strict=True)
    ]
    orchestra = orchestra_of([EmulatedDevice("120KiB", chaos=1) for _ in range(2)], *tasks)
    start = orchestra.generate().tasks["task-0"].accumulation_steps
    report = orchestra.train_models()
    report.tasks["task-0"].start = start
    assert report.tasks["task-0"].revisions
    assert not report.tasks["task-1"].revisions
    names(report, task="task-0", says="step 1")
    for name, model, original, loader in zip(report.tasks, models, originals, loaders, strict=True):
        assert_as_plain(model, original, loader, report.tasks[name])
