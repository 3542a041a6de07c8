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

from hydra_engine import (
    Callback,
    EmulatedDevice,
    LaneSeconds,
    ModelOrchestrator,
    ModelTask,
    PauseTask,
    StepChoice,
    split,
)
from hydra_engine.adaptive import Adaptation, AdaptiveDataLoader
from hydra_engine.checkpoints.checkpoint import load_newest
from hydra_engine.schedule.events import Spread
from hydra_engine.schedule.units import BACKWARD, FUSED
from partitioners import Presharded
from tests import adaptive_changes, exact, zoo
from tests.adaptive_changes import Noise, plain, record
from tests.promises.test_resumed import FailsAfter, orchestra_of
from tests.refused import refused

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
        mock.patch("hydra_engine.planning.planned.predict_spreads", predict),
        mock.patch.object(Adaptation, "speedups", speedups),
    ):
        yield


ENGINE_ONLY = ("partitioner", "early_release", "optimizer_scope", "read_ahead")


def both(
    build=zoo.mlp,
    *,
    sizes=SIZES,
    epochs=1,
    num_devices=1,
    partition="each",
    chaos=5,
    double_buffer=True,
    validation=False,
    **options,
):
    """Train by a record with the engine, and by what it reports with the plain loop; returns report and result."""
    options = {"lr": 0.05, "seed": SEED, "epochs": epochs, **options}
    model, loss_fn, loader = build()
    choices = record(sizes, initial=INITIAL, num_samples=len(loader.dataset), epochs=epochs)
    task = ModelTask(
        model,
        loss_fn,
        adaptive(loader, replay=choices),
        name="task",
        partitioner=Presharded(exact.ends(partition, len(model))) if partition else None,
        validation=DataLoader(loader.dataset, 8) if validation else None,
        **options,
    )
    with measured_by_engine() as found:
        report = exact.run([task], num_devices=num_devices, chaos=chaos, double_buffer=double_buffer)
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
    chosen_, given = (
        [(c.step, c.batch_size, c.micro_batches, c.gain, c.progress) for c in each] for each in (chosen, choices)
    )
    assert chosen_ == given
    # One micro-batch alone tells nothing. Narrow gradients are added, and rounded, in another order.
    skipped = report.tasks["task"].skipped_steps
    taken = [each for k, each in enumerate(result.measured) if k not in skipped]
    several = [[m for m in each if len(m.sizes) > 1] for each in (found, taken)]
    assert_measured(*several, rel=1e-4 if options.get("precision", "float32") == "float32" else 5e-3)
    return report, result


def net_has(cases, *names):
    """All cases, of which only these are in the net."""
    return [pytest.param(case, marks=() if case in names else pytest.mark.rest) for case in cases]


def fresh_scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=3)


# -- the plain loop


OPTIONS = {
    "sgd": {},
    "momentum": {"optimizer": partial(torch.optim.SGD, momentum=0.9, nesterov=True)},
    "adamw": {"optimizer": partial(torch.optim.AdamW, weight_decay=0.1), "lr": 0.01},
    "groups": {"param_groups": lambda name: {"lr": 0.01} if name.endswith("bias") else {"weight_decay": 0.01}},
    "clipped": {"max_grad_norm": 0.3},
    "early": {"early_release": True, "optimizer": torch.optim.Adam, "lr": 0.01},
    "task": {"optimizer_scope": "task", "max_grad_norm": 0.5, "optimizer": torch.optim.AdamW, "lr": 0.01},
    "step schedule": {"lr_scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)},
    "epoch schedule": {
        "lr_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        "lr_scheduler_interval": "epoch",
        "early_release": True,
        "epochs": 2,
    },
    "mid-epoch": {"validation": True, "validation_interval": 4, "epochs": 2},
    "late reads": {"read_ahead": False, "max_grad_norm": 1.0},
}


@pytest.mark.rest
@pytest.mark.parametrize("name", net_has(OPTIONS, "groups", "early"))
def test_a_record_means_the_plain_loop(name):
    report, result = both(**OPTIONS[name])
    chosen = report.tasks["task"].adaptive
    power = 0.5 if "adam" in repr(OPTIONS[name].get("optimizer", "")).lower() else 1.0
    assert_factors(chosen, result.measured, power=power)
    assert len(chosen[0].factors) == (2 if name == "groups" else 1)


@pytest.mark.rest
@pytest.mark.parametrize("name", net_has(sorted(zoo.MODELS), "branch"))
def test_every_kind_of_layer(name):
    both(zoo.MODELS[name], optimizer=torch.optim.AdamW, lr=0.01, max_grad_norm=1.0)


@pytest.mark.rest
@pytest.mark.parametrize("name", net_has(["tied", "cnn"], "cnn"))
@pytest.mark.parametrize("in_sums", net_has([True, False], True))
def test_steps_over_several_devices(name, in_sums):
    sizes = ((5, 3), (12, 3), (7, 7), (27, 4), (16, 6), (9, 5))
    with spread(in_sums=in_sums):
        report, _ = both(zoo.MODELS[name], sizes=sizes, num_devices=3, epochs=2)  # it takes steps to get there
    assert {placed.unit.part for placed in report.schedule} == {0, 1, 2}


@pytest.mark.rest
@pytest.mark.parametrize("in_sums", [True, False], ids=["sums", "pieces"])
def test_narrow_steps_over_several_devices(in_sums):
    scaler = {"precision": "float16", "grad_scaler": fresh_scaler(), "optimizer": torch.optim.AdamW, "lr": 0.01}
    scaler["epochs"] = 2
    with spread(in_sums=in_sums):
        report, result = both(zoo.tied, num_devices=3, **scaler)
    assert {placed.unit.part for placed in report.schedule} == {0, 1, 2}
    assert report.tasks["task"].loss_scales == result.loss_scales


def uneven(inputs, target, number):
    """Micro-batches as the engine has them, but for 27 samples: 8, 8, 8 and 3."""
    if len(inputs) != 27 or number != 4:
        return split(inputs, target, number)
    pairs = zip(inputs.split(8), target.split(8), strict=True)
    return [(x.clone(), y.clone(), len(x) / 27) for x, y in pairs]


@pytest.mark.rest
def test_micro_batches_that_are_not_of_one_size():
    _, result = both(zoo.mlp, split=uneven, epochs=2)
    assert (8.0, 8.0, 8.0, 3.0) in [each.sizes for each in result.measured]


@pytest.mark.rest
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
    assert any(
        len(each.sizes) < c.micro_batches
        for each, c in zip(result.measured, report.tasks["task"].adaptive, strict=True)
    )


@pytest.mark.rest
@pytest.mark.parametrize("name", net_has(["gpt", "cnn", "tied"], "cnn"))
@pytest.mark.parametrize("precision", net_has(["bfloat16", "float16"], "float16"))
def test_narrow_precisions(name, precision):
    scaler = {"grad_scaler": fresh_scaler()} if precision == "float16" else {}
    report, result = both(zoo.MODELS[name], precision=precision, epochs=2, **scaler)
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
    partition="three",
    company=(),
    limits=None,
    loader=None,
    **options,
):
    """Train with choices of the engine's own; returns model, loader and report."""
    options = {"lr": 0.02, "seed": SEED, "epochs": 2, **options}
    model, loss_fn, samples = build()
    loader = adaptive(samples, replay=replay, **(limits or {})) if loader is None else loader
    shards = Presharded(exact.ends(partition, len(model))) if partition else None
    task = ModelTask(model, loss_fn, loader, name="task", partitioner=shards, **options)
    orchestra = exact.orchestrator([task, *company], num_devices=num_devices, memory=memory, chaos=3)
    with timed_by(cost) if cost is not None else nullcontext():
        report = orchestra.train_models()
    exact.assert_within_budget(report, num_devices)
    report.raise_failures()
    return model, loader, report


def assert_plain(build, model, report, *, name="task", **options):
    """What the engine has chosen and done is what the plain loop does by its record."""
    options = {"lr": 0.02, "seed": SEED, "epochs": 2, **options}
    alone, loss_fn, samples = build()
    result = plain(alone, loss_fn, adaptive(samples), report.tasks[name].adaptive, **options)
    exact.assert_as_expected(report, name, model, exact.Expected(result.losses, [], zoo.state(alone)))
    return result


@pytest.mark.parametrize("num_devices", net_has([1, 3], 3))
@pytest.mark.parametrize("name", net_has(["dropout", "tied", "cnn"], "dropout"))
def test_chosen_batches_are_those_of_the_plain_loop(name, num_devices):
    build = zoo.MODELS[name]
    model, _, report = chosen(build, num_devices=num_devices, max_grad_norm=1.0)
    found = report.tasks["task"].adaptive
    assert max(each.batch_size for each in found) > INITIAL, "nothing was adapted"
    result = assert_plain(build, model, report, max_grad_norm=1.0)
    assert_factors(found, result.measured)


@pytest.mark.rest
def test_with_times_as_they_are_and_others_beside():
    company = [exact.task_of(name, epochs=1)[0] for name in ("cnn", "gpt")]
    model, _, report = chosen(zoo.dropout, cost=None, num_devices=2, company=company)
    assert_plain(zoo.dropout, model, report)


ELSEWHERE = {
    "one shard": {"partition": "one", "read_ahead": False},
    "three devices": {"num_devices": 3},
    "little memory": {"partition": None, "memory": "40KiB"},
    "beside others": {"company": ("cnn", "gpt"), "num_devices": 2},
    "no times": {"cost": lambda choice: LaneSeconds(1e9, choice.batch_size**3)},
}


@pytest.mark.parametrize("elsewhere", net_has(ELSEWHERE))
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


@pytest.mark.rest
@pytest.mark.parametrize("in_sums", [True, False], ids=["sums", "pieces"])
def test_replay_of_steps_that_were_spread(in_sums):
    """In bfloat16, which adds the gradients of parts in float32."""
    options = {"precision": "bfloat16", "epochs": 3}
    with spread(in_sums=in_sums):
        model, _, first = chosen(zoo.gpt, num_devices=3, **options)
    assert {placed.unit.part for placed in first.schedule} == {0, 1, 2}
    again, _, second = chosen(zoo.gpt, replay=first.tasks["task"].adaptive, partition="three", **options)
    assert second.tasks["task"].losses == first.tasks["task"].losses
    exact.assert_same_state(zoo.state(again), zoo.state(model))


@pytest.mark.rest
def test_a_record_that_ends_early_is_gone_on_from():
    _, _, first = chosen(epochs=1)
    record_ = first.tasks["task"].adaptive
    again, _, second = chosen(replay=record_[:4], epochs=1)
    assert second.tasks["task"].steps > 4
    assert second.tasks["task"].adaptive[:4] == record_[:4]
    assert_plain(zoo.mlp, again, second, epochs=1)


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
        if not self.batches or self.batches[-1] != inputs[:, 0].tolist():
            self.batches.append(inputs[:, 0].tolist())
        return split(inputs, target, number)


@pytest.mark.rest
@pytest.mark.parametrize("drop_last", net_has([False, True], False))
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
    worth = epochs * 53 / INITIAL
    last = found[-1]
    assert last.progress < worth <= last.progress + last.gain + 1e-6
    progress = 0.0
    for each in found:
        assert each.progress == pytest.approx(progress)
        progress += each.gain
        assert 0 < each.gain <= max(1.0, each.batch_size / INITIAL) + 1e-9
    assert all(each.gain == pytest.approx(each.batch_size / INITIAL) for each in found if each.batch_size < INITIAL)


@pytest.mark.rest
def test_data_without_a_length_is_read_once_in_an_epoch():
    seen = Seen()
    loader = AdaptiveDataLoader(Flow(numbered()[2].dataset), INITIAL)
    loader.autoscale_batch_size(20)
    chosen(numbered, loader=loader, split=seen, epochs=2)
    assert [int(x) for batch in seen.batches for x in batch] == 2 * list(range(50))


@pytest.mark.rest
def test_validation_comes_at_the_end_of_an_epoch_by_progress():
    _, _, report = chosen(numbered, validation=DataLoader(numbered()[2].dataset, 7))
    task = report.tasks["task"]
    per_epoch = 50 / INITIAL
    ends = [
        next(k + 1 for k, c in enumerate(task.adaptive) if c.progress + c.gain >= epoch * per_epoch - 1e-6)
        for epoch in (1, 2)
    ]
    assert task.validation_steps == ends
    assert len(task.validation_losses) == 2


# -- resumes, retries, out of memory


def resumed(directory, at, devices, build=zoo.dropout, *, loader=adaptive, **options):
    """Train with choices of its own, failing after each of these steps and resumed on so many devices."""
    options = {"lr": 0.02, "seed": SEED, "epochs": 2, **options}
    with timed_by(mostly_transfers):
        for step, number in zip((*at, None), devices, strict=True):
            model, loss_fn, samples = build()
            callbacks = [] if step is None else [FailsAfter(step)]
            shards = Presharded(exact.ends("each" if number < 3 else "one", len(model)))
            task = ModelTask(
                model, loss_fn, loader(samples), name="task", callbacks=callbacks, partitioner=shards, **options
            )
            orchestra = orchestra_of([task], directory, num_devices=number, memory="8MiB")
            if step is None:
                report = orchestra.train_models(resume=True)
            else:
                with pytest.raises(RuntimeError):
                    orchestra.train_models(resume=True)
    found = report.tasks["task"]
    assert [each.step for each in found.adaptive] == list(range(found.steps))
    alone, loss_fn, samples = build()
    options = {name: value for name, value in options.items() if name not in ENGINE_ONLY}
    result = plain(alone, loss_fn, loader(samples), found.adaptive, **options)
    exact.assert_as_expected(report, "task", model, exact.Expected(result.losses, [], zoo.state(alone)))
    assert found.validation_losses == result.validation_losses
    return found.adaptive, result


RESUMED = {
    "clipped": {"max_grad_norm": 0.4, "optimizer": torch.optim.AdamW},
    "early": {"early_release": True, "optimizer": torch.optim.Adam},
    "groups": {"param_groups": lambda name: {"lr": 0.01} if name.endswith("bias") else {}, "read_ahead": False},
    "validated": {
        "validation": DataLoader(zoo.mlp()[2].dataset, 7),
        "validation_interval": 3,
        "loader": lambda samples: adaptive(samples, generator=torch.Generator().manual_seed(3)),
    },
}


@pytest.mark.rest
@pytest.mark.parametrize("name", net_has(RESUMED, "clipped"))
def test_resumes_on_other_devices_leave_a_record_that_says_all(name, tmp_path):
    choices, result = resumed(tmp_path, (4, 10), (1, 3, 2), **RESUMED[name])
    assert max(each.batch_size for each in choices) > INITIAL
    assert_factors(choices, result.measured, power=0.5 if name in ("clipped", "early") else 1.0)


def flow_of(samples):
    loader = AdaptiveDataLoader(Flow(samples.dataset), INITIAL)
    loader.autoscale_batch_size(20)
    return loader


@pytest.mark.rest
def test_a_resume_reads_a_stream_on_from_where_it_was(tmp_path):
    choices, result = resumed(tmp_path, (4, 9), (1, 2, 1), numbered, loader=flow_of)
    read = [int(row[0]) for batch in result.samples for row in batch]
    assert read == 2 * list(range(50))
    assert max(each.batch_size for each in choices) > INITIAL


@pytest.mark.rest
def test_a_resume_after_the_last_step_of_all(tmp_path):
    """That step ended a pass, of which nothing is left to look at."""
    _, _, report = chosen(numbered, limits={"most": INITIAL}, epochs=1)
    last = report.tasks["task"].steps
    assert last == 10
    choices, _ = resumed(tmp_path, (last,), (1, 1), numbered, epochs=1, loader=partial(adaptive, most=INITIAL))
    assert len(choices) == last


@pytest.mark.rest
def test_batches_that_are_read_again_are_chosen_as_before():
    """A loader that fails and is asked again; what is measured meanwhile may change what is chosen."""

    class Failing(TensorDataset):
        num_reads = 0

        def __getitem__(self, index):
            self.num_reads += 1
            if self.num_reads in (33, 61, 90):
                raise OSError("gone for a moment")
            return super().__getitem__(index)

    build = zoo.dropout
    data = Failing(*build()[2].dataset.tensors)
    loader = AdaptiveDataLoader(data, INITIAL, shuffle=True)
    loader.autoscale_batch_size(20)
    model, _, report = chosen(build, loader=loader, max_retries=5)
    assert len(report.tasks["task"].retries) == 3
    assert_plain(build, model, report)


ROWS = [1]  # numbers that `Grows` takes for each sample


class Grows(nn.Module):
    """Takes memory that nobody can know before."""

    def forward(self, x):
        return x * torch.ones(len(x), ROWS[0]).mean()


class Demands(Callback):
    """From a step on, `Grows` takes more."""

    def __deepcopy__(self, memo):
        return self

    def on_step(self, report):
        ROWS[0] = 600 if report.steps >= 12 else 1


def growing():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), Grows(), nn.Tanh(), nn.Linear(8, 3))
        data = TensorDataset(torch.randn(400, 6), torch.randint(3, (400,)))
    return model, F.cross_entropy, DataLoader(data, 5)


@pytest.mark.parametrize(
    ("num_devices", "limits"),
    [
        (1, {}),
        pytest.param(2, {"local_bsz_bounds": (2, 100)}, marks=pytest.mark.rest),
        pytest.param(1, {"gradient_accumulation": False}, marks=pytest.mark.rest),
    ],
    ids=str,
)
def test_out_of_memory_makes_micro_batches_smaller_and_goes_on(num_devices, limits):
    limits = {"most": 200, **limits}
    ROWS[0] = 1
    options = {"memory": "64KiB", "num_devices": num_devices, "limits": limits, "epochs": 4}
    model, _, report = chosen(growing, callbacks=[Demands()], **options)
    found = report.tasks["task"].adaptive
    assert found[10].micro_batch > 27 >= max(each.micro_batch for each in found[14:]), "600 numbers a sample do not fit"
    alone, loss_fn, samples = growing()
    result = plain(alone, loss_fn, adaptive(samples, **limits), found, lr=0.02, seed=SEED, epochs=4)
    exact.assert_as_expected(report, "task", model, exact.Expected(result.losses, [], zoo.state(alone)))


# -- what is refused


def task_of(loader=None, build=zoo.mlp, *, replay=(), **options):
    model, loss_fn, samples = build()
    options = {"lr": 0.05, "seed": 1, "name": "adapts", **options}
    return ModelTask(model, loss_fn, adaptive(samples, replay=replay) if loader is None else loader, **options)


def assert_refused(words, *tasks):
    """The tasks are refused before any step, by words about a task of the name that all of them begin with."""
    before = [p.clone() for task in tasks for p in task.model.parameters()]
    with refused(task="adapts", says=words):
        exact.orchestrator(list(tasks)).train_models()
    assert all(map(torch.equal, before, (p for task in tasks for p in task.model.parameters())))


class NoRate(torch.optim.Optimizer):
    def __init__(self, params, lr=None):
        super().__init__(params, {})

    def step(self, closure=None):
        pass


def test_what_cannot_train_is_refused_before_any_step():
    """Options are in test_wrong_calls.py."""
    choices = record(SIZES, initial=INITIAL, num_samples=48, factors=lambda _: (1.0,))
    largest = max(each.batch_size for each in choices)
    samples = zoo.mlp()[2]
    two_groups = {"param_groups": lambda name: {"lr": 0.1} if name.endswith("bias") else {}}
    assert_refused("replay 1 2", task_of(replay=choices, **two_groups))
    for says, loader in (
        ("replay 5 6", adaptive(samples, initial=6, replay=choices)),
        (f"replay {largest} {largest - 1}", adaptive(samples, most=largest - 1, replay=choices)),
        ("replay 0", adaptive(samples, replay=choices[1:])),
    ):
        with refused(task="adapts", says=says):
            task_of(loader)
    assert_refused("NoRate 'lr'", task_of(optimizer=NoRate))
    shared = adaptive(samples)
    assert_refused("adapts-1 loader", *(task_of(shared, name=f"adapts-{k}") for k in range(2)))
    with refused(task="adapts", says="validation loader"):
        task_of(shared, validation=shared)
    late = AdaptiveDataLoader(samples.dataset, INITIAL, shuffle=True)
    task = task_of(late)
    late.autoscale_batch_size(MOST)
    assert_refused("autoscale_batch_size", task)


def test_a_record_of_more_data_is_refused_where_it_shows():
    choices = record(SIZES, initial=INITIAL, num_samples=48, factors=lambda _: (1.0,))
    data = TensorDataset(*(each[:30] for each in zoo.mlp()[2].dataset.tensors))
    loader = AdaptiveDataLoader(data, INITIAL, shuffle=True)
    loader.autoscale_batch_size(MOST, replay=choices)
    orchestra = exact.orchestrator([task_of(loader)])
    with refused(says="replay 24 6"):  # samples of a batch, and those that the data has left
        orchestra.train_models()
    assert orchestra.report.tasks["adapts"].steps <= 3


# -- what is told


def test_report_progress_and_checkpoint_tell_what_was_chosen(tmp_path, capsys):
    device = EmulatedDevice("8MiB")
    orchestra = ModelOrchestrator([task_of(epochs=2)], devices=[device], checkpoint_dir=tmp_path)
    with timed_by(mostly_transfers):
        report = orchestra.train_models()
    choices = report.tasks["adapts"].adaptive
    assert f"adapts: at the end {choices[-1]}" in str(report)
    assert f"batch {choices[-1].batch_size} lr x{choices[-1].factors[0]:.3g}" in capsys.readouterr().out
    found = StepChoice.from_columns(load_newest(tmp_path).read_nested("adapts", "state")["adaptive"]["choices"])
    assert found == choices
    assert [each.seconds for each in found] == [each.seconds for each in choices]
    assert all(each.seconds is not None and each.seconds.step_s > 0 for each in found)


def test_a_task_begins_on_one_device_and_more_are_desired():
    def shared(choice):
        rounds = -(-choice.micro_batches // choice.devices)
        return LaneSeconds(rounds * choice.micro_batch, rounds * choice.micro_batch)

    _, _, report = chosen(cost=shared, num_devices=4, epochs=6)
    found = report.tasks["task"].adaptive
    assert found[0].devices == 1
    first_step = {placed.device for placed in report.schedule if placed.unit.step == 0}
    assert len(first_step) == 1
    used = {}
    for placed in report.schedule:
        used.setdefault(placed.unit.step, set()).add(placed.device)
    most = 1
    for step in sorted(used):
        assert len(used[step]) <= 2 * most, "at most twice as many as it was measured on"
        most = max(most, len(used[step]))
    assert most >= 2
    assert max(each.desired_devices for each in found) == 4


@pytest.mark.rest
def test_a_step_that_is_left_out_has_its_choice_in_the_record():
    """Its loss is not finite; its gradients are no measurement."""

    def build():
        model, loss_fn, samples = zoo.mlp()
        samples.dataset.tensors[0][7] = math.inf
        return model, loss_fn, samples

    model, _, report = chosen(build, nonfinite="skip")
    found = report.tasks["task"]
    assert found.skipped_steps
    assert len(found.adaptive) == found.steps
    alone, loss_fn, samples = build()
    options = {"lr": 0.02, "seed": SEED, "epochs": 2}
    result = plain(alone, loss_fn, adaptive(samples), found.adaptive, nonfinite="skip", **options)
    assert [str(each) for each in result.losses] == [str(each) for each in found.losses]
    exact.assert_same_state(zoo.state(model), zoo.state(alone))
    assert_factors(found.adaptive, result.measured)
    assert all(each.noise is None or not math.isnan(each.noise) for each in found.adaptive)


@pytest.mark.rest
def test_several_adaptive_tasks_share_the_devices_and_none_changes_another():
    builds, tasks = (zoo.dropout, zoo.tied), []
    for seed, build in enumerate(builds):
        model, loss_fn, samples = build()
        shards = Presharded(exact.ends("each", len(model)))
        tasks.append(
            ModelTask(model, loss_fn, adaptive(samples), 0.02, 2, seed=seed, name=str(seed), partitioner=shards)
        )
    with timed_by(mostly_transfers):
        report = exact.silent(tasks, num_devices=3).train_models()
    for seed, build in enumerate(builds):
        assert_plain(build, tasks[seed].model, report, name=str(seed), seed=seed)


class Pauses(Callback):
    def on_step(self, report):
        if report.steps == 9:
            raise PauseTask


@pytest.mark.rest
def test_a_task_that_is_paused_goes_on_and_ends_with_more_epochs(tmp_path):
    def made(epochs, callbacks=(), **limits):
        model, loss_fn, samples = zoo.dropout()
        loader = adaptive(samples, **limits)
        return ModelTask(model, loss_fn, loader, 0.02, epochs, seed=SEED, name="task", callbacks=list(callbacks))

    with timed_by(mostly_transfers):
        paused = orchestra_of([made(2, [Pauses()])], tmp_path).train_models().tasks["task"]
        assert (paused.status, paused.steps) == ("paused", 9)
        ended = orchestra_of([made(2)], tmp_path, num_devices=2).train_models(resume=True).tasks["task"]
        task = made(4, most=20)  # of which what is chosen from here on is not above
        report = orchestra_of([task], tmp_path).train_models(resume=True)
    found = report.tasks["task"].adaptive
    assert found[: ended.steps] == ended.adaptive
    assert ended.adaptive[:9] == paused.adaptive
    assert max(each.batch_size for each in ended.adaptive) > 20
    assert all(each.batch_size <= 20 for each in found[ended.steps :])
    assert_plain(zoo.dropout, task.model, report, epochs=4)


@pytest.mark.rest
def test_a_record_is_replayed_through_a_resume(tmp_path):
    """On other devices; what is measured of it would choose otherwise."""
    model, _, first = chosen(zoo.dropout)
    record_ = first.tasks["task"].adaptive
    for number, callbacks in ((1, [FailsAfter(7)]), (2, [])):
        task = task_of(None, zoo.dropout, lr=0.02, seed=SEED, epochs=2, replay=record_, callbacks=callbacks)
        orchestra = orchestra_of([task], tmp_path, num_devices=number)
        if callbacks:
            with pytest.raises(RuntimeError):
                orchestra.train_models(resume=True)
        else:
            report = orchestra.train_models(resume=True)
    assert report.tasks["adapts"].adaptive == record_
    assert report.tasks["adapts"].losses == first.tasks["task"].losses
    exact.assert_same_state(zoo.state(task.model), zoo.state(model))


# -- disturbed runs


@pytest.mark.rest
def test_killed_runs_have_the_bits_of_their_record():
    adaptive_changes.run_kills(2, seed=1)


@pytest.mark.rest
def test_runs_whose_devices_come_and_go_have_the_bits_of_their_record():
    adaptive_changes.run_changes(5, seed=2, epochs=1)
