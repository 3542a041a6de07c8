"""A program that is changed between two runs: each setting takes effect, or a message has both values."""

import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from hydra_engine import Callback, ModelTask, PauseTask
from tests import exact
from tests.refused import names, refused

LR, STEPS, EPOCHS = 1e-2, 8, 2  # steps of an epoch


class Pause(Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, report):
        if report.steps == self.step:
            raise PauseTask


class Rates(Callback):
    """The learning rate of each step."""

    def __init__(self):
        self.rates = []

    def on_step(self, report):
        self.rates.append(report.last_step.learning_rates[0])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def data(num_samples=32):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(num_samples, 6, generator=generator), torch.randint(3, (num_samples,), generator=generator)
    return TensorDataset(x, y)


def task_of(*, num_samples=32, batch_size=4, **options):
    options = {"lr": LR, "epochs": EPOCHS, "seed": 7, "name": "t", "optimizer": torch.optim.AdamW} | options
    return ModelTask(net(), F.cross_entropy, DataLoader(data(num_samples), batch_size, shuffle=True), **options)


def trained(directory, task, *, resume=False):
    report = exact.silent([task], checkpoint_dir=directory).train_models(resume=resume)
    report.raise_failures()
    return report


def resumed(directory, *, step=5, before=(), **options):
    """The report of a task that was paused and goes on with other options, its messages, and its learning rates."""
    trained(directory, task_of(callbacks=[Pause(step)], **dict(before)))
    rates = Rates()
    report = trained(directory, task_of(callbacks=[rates], **options), resume=True)
    return report, [each for each in report.messages if "resumed from" not in each], rates.rates


def adamw(**options):
    return partial(torch.optim.AdamW, **options)


def first(name):
    """Groups of which one has a parameter of its own."""
    return lambda each: {"lr": 1e-3} if each == name else {}


IGNORED = {
    "lr": ({"lr": 1e-3}, "lr: 0.001 0.01"),
    "weight decay": ({"optimizer": adamw(weight_decay=0.5)}, "weight_decay: 0.5 0.01"),
    "betas": ({"optimizer": adamw(betas=(0.5, 0.9))}, "betas: 0.5 0.999"),
    "fused": ({"optimizer": adamw(fused=True)}, "fused: True None"),
    "Adam for AdamW": ({"optimizer": torch.optim.Adam}, "optimizer: Adam AdamW"),
    "seed": ({"seed": 8}, "seed: 8 7"),
}


@pytest.mark.parametrize("case", IGNORED)
def test_what_does_not_count_is_named_with_both_values_and_nothing_else_changes(tmp_path, case):
    options, says = IGNORED[case]
    _, messages, rates = resumed(tmp_path, **options)
    assert any(all(word in message for word in says.split()) for message in messages), messages
    assert all(message.startswith("t: ") for message in messages)
    assert rates == [LR] * (EPOCHS * STEPS - 5)


def test_an_unchanged_program_has_no_message(tmp_path):
    schedule = partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=17)
    options = {"lr_scheduler": schedule, "precision": "float16", "param_groups": lambda name: {}}
    assert resumed(tmp_path, before=options, **options)[1] == []


@pytest.mark.parametrize("lr", [np.float32(1e-2), np.array(1e-2), torch.tensor(1e-2)], ids=["NumPy", "array", "tensor"])
def test_numbers_of_any_type_are_compared_by_value(tmp_path, lr):
    assert resumed(tmp_path, before={"lr": lr}, lr=lr)[1] == []


def test_a_later_resume_is_compared_with_what_was_in_effect(tmp_path):
    trained(tmp_path, task_of(callbacks=[Pause(3)]))
    for step, lr in ((5, 1e-3), (7, 1e-3), (9, LR)):
        report = trained(tmp_path, task_of(lr=lr, callbacks=[Pause(step)]), resume=True)
        found = [each for each in report.messages if "lr:" in each]
        assert len(found) == (lr != LR)
        assert all("0.001 in the program, 0.01 in the checkpoint" in each for each in found)


class Table(lr_scheduler.LRScheduler):
    """Keeps its rates in an array, and something that cannot be copied elsewhere."""

    def __init__(self, optimizer):
        self.table, self.lock = np.linspace(1, 0.1, 17), threading.Lock()
        super().__init__(optimizer)

    def get_lr(self):
        return [base * self.table[self.last_epoch] for base in self.base_lrs]

    def state_dict(self):
        return {name: value for name, value in super().state_dict().items() if name != "lock"}


def test_a_schedule_may_keep_arrays_and_what_cannot_be_copied(tmp_path):
    _, messages, rates = resumed(tmp_path, before={"lr_scheduler": Table}, lr_scheduler=Table)
    assert messages == []
    assert rates == rates_of(Table, 16)[5:]


FUNCTIONS = {
    "lambda": lambda n: partial(lr_scheduler.LambdaLR, lr_lambda=lambda k: 1 / (1 + k / n)),
    "factors": lambda n: partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda k: 1 - 1 / n),
    "chain": lambda n: (
        lambda optimizer: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(optimizer, 0.5, 3), lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k / n))]
        )
    ),
}


@pytest.mark.parametrize("num_steps", [8, 32])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_function_of_the_program_counts_at_once(tmp_path, kind, num_steps):
    first, second = map(FUNCTIONS[kind], (16, num_steps))
    _, messages, rates = resumed(tmp_path, before={"lr_scheduler": first}, lr_scheduler=second)
    assert rates == rates_of(second, 16)[5:]
    names(messages[0], task="t", says="lr_scheduler program checkpoint")


def test_a_schedule_that_ends_before_the_place_is_refused(tmp_path):
    cycle = partial(lr_scheduler.OneCycleLR, max_lr=0.1)
    with refused(task="t", says="OneCycleLR 12 8"):
        before = {"lr_scheduler": partial(cycle, total_steps=17)}
        resumed(tmp_path, step=12, before=before, lr_scheduler=partial(cycle, total_steps=8))


def test_the_programs_options_count_where_it_asks_for_them(tmp_path):
    _, messages, rates = resumed(tmp_path, lr=1e-3, resume_options="program")
    assert (messages, set(rates)) == ([], {1e-3})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"param_groups": first("0.weight")}, {"param_groups": first("0.bias")}),
        ({"param_groups": first("0.weight")}, {}),
        ({}, {"optimizer": lambda parameters, lr: torch.optim.AdamW(list(parameters)[::-1], lr=lr)}),
    ],
    ids=["other members", "one group", "other order"],
)
def test_groups_of_other_parameters_are_refused_by_a_parameters_name(tmp_path, before, after):
    with refused(task="t", says="parameter group param_groups="):
        resumed(tmp_path, before=before, **after)


def test_another_kind_of_optimizer_is_refused_by_both_names(tmp_path):
    with refused(task="t", says="SGD AdamW optimizer"):
        resumed(tmp_path, optimizer=torch.optim.SGD)


def test_unknown_resume_options_are_refused():
    with refused(task="t", says="resume_options program checkpoint"):
        task_of(resume_options="mine")


TAKEN = {
    "clip": {"max_grad_norm": 0.1},
    "micro-batches": {"accumulation_steps": 2},
    "precision": {"precision": "bfloat16"},
    "fewer epochs": {"epochs": 1},
    "more epochs": {"epochs": 3},
}


@pytest.mark.parametrize("case", TAKEN)
def test_what_takes_effect_needs_no_message(tmp_path, case):
    options = TAKEN[case]
    report, messages, _ = resumed(tmp_path, **options)
    assert messages == []
    assert report.tasks["t"].steps == STEPS * options.get("epochs", EPOCHS)


# The loader


@pytest.mark.parametrize(
    ("options", "says"),
    [({"batch_size": 2}, "batch_size: 2 4"), ({"num_samples": 40}, "samples: 40 32"), ({"num_samples": 28}, "28 32")],
)
def test_a_loader_with_other_places_is_named_with_both_values(tmp_path, options, says):
    _, messages, _ = resumed(tmp_path, **options)
    assert any(all(word in message for word in ("the loader's", *says.split())) for message in messages), messages


def test_a_loader_that_is_too_short_is_refused_with_both_values(tmp_path):
    with refused(task="t", says="batch_size: 8 4"):
        resumed(tmp_path, batch_size=8)


# Names


def test_a_forgotten_name_is_told_and_not_said_to_be_resumed(tmp_path):
    trained(tmp_path, task_of(callbacks=[Pause(5)]))
    report = trained(tmp_path, task_of(name=None), resume=True)
    [message] = report.messages
    names(message, says="'task-0' 't' name=")
    assert "resumed" not in message


def test_a_saved_task_that_no_task_goes_on_with_is_told(tmp_path):
    """The second stage of a chain, which the first's `on_task_end` would add, and which is over."""
    exact.silent([task_of(name="first"), task_of(callbacks=[Pause(5)])], checkpoint_dir=tmp_path).train_models()
    orchestra = exact.silent([task_of(name="first")], checkpoint_dir=tmp_path)
    names(orchestra.train_models(resume=True).messages[-1], task="'t'", says="saved name=")
    orchestra.add_task(task_of())
    assert not any("'t'" in text for text in orchestra.train_models(resume=True).messages)


# Schedules, which count as the program gives them


SCHEDULES = {
    "one cycle": lambda steps: partial(lr_scheduler.OneCycleLR, max_lr=1e-2, total_steps=steps + 1),
    "cosine": lambda steps: partial(lr_scheduler.CosineAnnealingLR, T_max=steps),
    "linear": lambda steps: partial(lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.01, total_iters=steps),
    "lambda": lambda steps: partial(lr_scheduler.LambdaLR, lr_lambda=lambda k: max(0.0, 1 - k / steps)),
    "polynomial": lambda steps: partial(lr_scheduler.PolynomialLR, total_iters=steps),
    "sequence": lambda steps: (
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.ConstantLR(optimizer, 0.5, 3), lr_scheduler.CosineAnnealingLR(optimizer, steps - 3)],
            milestones=[3],
        )
    ),
}


def rates_of(schedule, num_steps, interval=1):
    optimizer = torch.optim.AdamW(net().parameters(), lr=LR)
    scheduler, found = schedule(optimizer), []
    for k in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if (k + 1) % interval == 0:
            scheduler.step()
    return found


@pytest.mark.parametrize("is_over", [True, False], ids=["finished", "paused"])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_more_epochs_have_the_rates_of_the_schedule_that_is_made_for_them(tmp_path, kind, is_over):
    before, after = (SCHEDULES[kind](epochs * STEPS) for epochs in (2, 4))
    step = EPOCHS * STEPS if is_over else 5
    callbacks = [] if is_over else [Pause(step)]
    trained(tmp_path, task_of(lr_scheduler=before, callbacks=callbacks))
    rates = Rates()
    report = trained(tmp_path, task_of(lr_scheduler=after, epochs=4, callbacks=[rates]), resume=True)
    assert rates.rates == rates_of(after, 4 * STEPS)[step:]
    names(report.messages[-1], task="t", says="lr_scheduler program checkpoint")


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False), (True, True)])
def test_a_schedule_that_comes_goes_or_is_another_one_takes_effect(tmp_path, before, after, interval):
    first = partial(lr_scheduler.StepLR, step_size=3, gamma=0.1) if before else None
    second = partial(lr_scheduler.ExponentialLR, gamma=0.5) if after else None
    both = {"lr_scheduler_interval": interval}
    options = {"before": {"lr_scheduler": first, **both}, "lr_scheduler": second, **both}
    _, messages, rates = resumed(tmp_path, step=10, **options)
    expected = rates_of(second, 16, 1 if interval == "step" else STEPS)[10:] if after else [LR] * 6
    assert rates == expected
    names(messages[0], task="t", says="lr_scheduler program checkpoint")


def test_a_scheduler_of_more_epochs_that_changes_nothing_has_no_message(tmp_path):
    schedule = partial(lr_scheduler.StepLR, step_size=4, gamma=0.5)
    _, messages, rates = resumed(tmp_path, before={"lr_scheduler": schedule}, lr_scheduler=schedule, epochs=3)
    assert messages == []
    assert rates == rates_of(schedule, 3 * STEPS)[5:]
