"""A step whose loss is not finite: taken as it is, left out, the task's end, or its failure."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import Callback, ModelTask, NonFiniteLoss
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.covering import covering
from tests.refused import names, refused

SEED = 5
NUM_BATCHES = 6
BAD = {2: math.nan, 4: math.inf}  # by batch: what is in it
ADAM = partial(torch.optim.AdamW, weight_decay=0.1)


class Loader(list):
    """Draws for every batch, as an augmentation would."""

    def __iter__(self):
        for inputs, target in super().__iter__():
            yield inputs + 0.1 * torch.rand_like(inputs), target


def build(bad=BAD):
    """A model with buffers and a layer that draws, on batches of which some are no numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
        )
        batches = [(torch.randn(6, 6), torch.randn(6, 2)) for _ in range(NUM_BATCHES)]
    for k, value in bad.items():
        batches[k][0][0, 0] = value
    return model, F.mse_loss, Loader(batches)


def task_of(bad=BAD, **options):
    options = {"optimizer": ADAM, "partitioner": Presharded([2, 4, 6]), "seed": SEED} | options
    return ModelTask(*build(bad), 0.05, 2, name="task", **options)


def plain(bad=BAD, **options):
    """The model after the plain loop, and the result."""
    model, loss_fn, loader = build(bad)
    options = {"seed": SEED, "lr": 0.05, "epochs": 2, "optimizer": ADAM, **options}
    return model, reference.train(model, loss_fn, loader, **options)


def same_losses(actual, expected):
    """Also where they are no numbers."""
    return torch.equal(
        torch.tensor(actual, dtype=torch.float64).view(torch.int64),
        torch.tensor(expected, dtype=torch.float64).view(torch.int64),
    )


CASES = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.5},
    "micro-batches": {"accumulation_steps": 3},
    "schedule by step": {"lr_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=2)},
    "schedule by epoch": {
        "lr_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1),
        "lr_scheduler_interval": "epoch",
    },
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16"},
    "all at once": {"optimizer_scope": "task"},
}


@covering(strength=1, case=list(CASES), num_devices=[1, 2])
def test_a_skipped_step_changes_nothing(case, num_devices):
    options = CASES[case]
    known = {name: value for name, value in options.items() if name != "optimizer_scope"}
    if case == "float16":
        known["grad_scaler"] = torch.amp.GradScaler("cpu")
    model, expected = plain(nonfinite="skip", **known)
    assert expected.skipped_steps == [2, 4, 8, 10]

    task = task_of(nonfinite="skip", **options)
    outcome = exact.run([task], num_devices=num_devices, chaos=num_devices).tasks["task"]
    assert outcome.status == "finished"
    assert outcome.skipped_steps == expected.skipped_steps
    assert same_losses(outcome.losses, expected.losses)
    assert outcome.loss_scales == expected.loss_scales
    assert all(tensor.isfinite().all() for tensor in zoo.state(task.model).values())
    exact.assert_same_state(zoo.state(task.model), zoo.state(model))


def test_averages_stay_too():
    """As if the step had not been: neither moved nor begun by it."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    bad = {0: math.nan, 3: math.inf}
    model, loss_fn, loader = build(bad)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    on_step = partial(averaged.update_parameters, model)
    reference.train(
        model, loss_fn, loader, seed=SEED, lr=0.05, epochs=2, optimizer=ADAM, nonfinite="skip", on_step=on_step
    )
    found = exact.run([task_of(bad, nonfinite="skip", ema_decay=0.5)]).tasks["task"].ema_state
    for name, parameter in averaged.module.named_parameters():
        assert torch.equal(found[name], parameter), name


def test_nobody_looks_unless_asked():
    _, expected = plain()
    outcome = exact.run([task_of()]).tasks["task"]
    assert outcome.status == "finished"
    assert outcome.skipped_steps == []
    assert outcome.losses[:2] == expected.losses[:2]
    assert all(map(math.isnan, outcome.losses[3:]))  # all that comes after the first one, as in plain PyTorch
    assert all(map(math.isnan, expected.losses[3:]))


class Told(Callback):
    def __init__(self):
        self.steps, self.ends = [], []

    def on_step(self, report):
        self.steps.append(report.steps)

    def on_task_end(self, report):
        self.ends.append(report.status)


@pytest.mark.parametrize("nonfinite", ["stop", "raise"])
def test_task_ends_at_the_step_before(nonfinite, capsys):
    model, expected = plain(max_steps=2)
    other, other_model = exact.task_of("dropout", epochs=1)
    task = task_of(nonfinite=nonfinite, callbacks=[told := Told()])
    report = exact.run([task, other], num_devices=2, chaos=4)
    outcome = report.tasks["task"]
    assert outcome.steps == 2
    assert outcome.losses == expected.losses
    exact.assert_same_state(zoo.state(task.model), zoo.state(model))
    assert told.steps == [1, 2]
    exact.assert_as_expected(report, "dropout", other_model, exact.expected("dropout", epochs=1))
    if nonfinite == "stop":
        assert outcome.status == "stopped"
        assert outcome.exception is None
        names(outcome.error, says="2 nan")
        report.raise_failures()
    else:
        assert outcome.status == "failed"
        assert told.ends == ["failed"]
        with refused(NonFiniteLoss, task="task", says="2 nan nonfinite='raise'"):
            report.raise_failures()


def test_a_task_that_raises_alone_raises_it():
    with refused(NonFiniteLoss, task="task", says="0"):
        exact.run([task_of({0: -math.inf}, nonfinite="raise", max_retries=3)])


def test_a_loss_that_is_skipped_does_not_count_as_a_retry():
    report = exact.run([task_of(nonfinite="skip", max_retries=1)])
    assert report.tasks["task"].retries == []


def test_refused_where_a_step_is_updated_before_its_loss_is_known():
    with refused(says="nonfinite early_release"):
        task_of(nonfinite="skip", early_release=True)


def test_unknown_choice_is_refused():
    with refused(says="nonfinite 'ignore' 'skip'"):
        task_of(nonfinite="ignore")
