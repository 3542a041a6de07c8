"""What the engine asks a chooser of batches and its loader, and what it tells them: both are a few lines here."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import BatchChooser, Callback, GuidedLoader, ModelTask, PauseTask, StepChoice, split, square_norms
from partitioners import Presharded
from tests import exact, zoo
from tests.refused import refused

SAMPLES, USUAL, LR = 40, 4, 0.1


class Growing(BatchChooser):
    """Each step has two samples more, and a learning rate that grows with them; it keeps what it is told."""

    most = 16

    def __init__(self):
        self.learned, self.limits, self.sums_losses = [], [], None

    def choose(self, after, devices=1, max_devices=1):
        size = USUAL if after is None else after.batch_size + 2
        return StepChoice(step=0 if after is None else after.step + 1, batch_size=size, micro_batches=2)

    def begin(self, optimizer, *, sums_losses):
        if len(optimizer.param_groups) > 1:
            raise ValueError("optimizer: 2 groups, limit: 1")
        self.sums_losses = sums_losses

    def factored(self, choice):
        return replace(choice, factors=(choice.batch_size / USUAL,))

    def learn(self, choice, seconds, devices, measures):
        assert seconds.step_s > 0
        self.learned.append((choice.step, measures))
        return False

    def limit(self, micro_batch, batch=None):
        self.limits.append((micro_batch, batch))

    def state_dict(self):
        return {"steps": [step for step, _ in self.learned]}

    def load_state_dict(self, saved):
        self.learned = [(step, None) for step in saved["steps"]]


class Guided(GuidedLoader):
    """Samples in order, in batches of the size that is asked for."""

    def __init__(self):
        self.plain = [samples()]
        self.made, self.at = [], 0

    def chooser(self):
        self.made.append(Growing())
        return self.made[-1]

    def __iter__(self):
        return self.batches(self.guide)

    def batches(self, guide):
        inputs, targets = samples()
        while (size := USUAL if guide is None else guide()) is not None:
            at, self.at = self.at, min(SAMPLES, self.at + size)
            self.last_size = self.at - at
            if self.at == SAMPLES:
                self.begin_anew()
                self.num_passes += 1
            yield inputs[at : at + self.last_size], targets[at : at + self.last_size]

    def begin_anew(self):
        self.at = 0

    def state_dict(self):
        return {"at": self.at, "passes": self.num_passes}

    def load_state_dict(self, state):
        self.at, self.num_passes = state["at"], state["passes"]


def samples():
    drawn = torch.Generator().manual_seed(3)
    return torch.randn(SAMPLES, 8, generator=drawn), torch.randint(3, (SAMPLES,), generator=drawn)


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def task(loader, **options):
    return ModelTask(model(), F.cross_entropy, loader, LR, 2, name="a", partitioner=Presharded([1, 3]), **options)


def plainly(num_epochs=2):
    """The plain loop over batches of 4, 6, 8 samples and so on: its model, sizes, and squared norms of each step."""
    network, (inputs, targets), sizes, norms, size = model(), samples(), [], [], USUAL
    optimizer = torch.optim.SGD(network.parameters(), lr=LR)
    for _ in range(num_epochs):
        at = 0
        while at < SAMPLES:
            given = min(size, SAMPLES - at)
            optimizer.zero_grad()
            micro = []
            for x, y, weight in split(inputs[at : at + given], targets[at : at + given], 2):
                before = [0.0 if each.grad is None else each.grad.clone() for each in network.parameters()]
                (F.cross_entropy(network(x), y) * weight).backward()
                own = [(each.grad - old) / weight for each, old in zip(network.parameters(), before, strict=True)]
                micro.append(square_norms(own).item())
            norms.append((micro, square_norms([each.grad for each in network.parameters()]).item()))
            optimizer.param_groups[0]["lr"] = LR * (given / USUAL)
            optimizer.step()
            sizes.append(given)
            at, size = at + given, given + 2
    return network, sizes, norms


def test_steps_are_as_they_were_chosen_and_their_norms_are_told():
    loader = Guided()
    mine = task(loader)
    report = exact.silent([mine], "1MiB").train_models()
    report.raise_failures()
    network, sizes, norms = plainly()
    choices, chooser = report.tasks["a"].adaptive, loader.made[-1]
    assert [each.batch_size for each in choices] == sizes
    assert [each.factors for each in choices] == [(size / USUAL,) for size in sizes]
    exact.assert_same_state(zoo.state(mine.model), zoo.state(network))
    assert chooser.sums_losses is False
    [(micro_batch, batch)] = chooser.limits
    assert batch > micro_batch == 16, "as many as it asks for, where memory has room"
    assert [step for step, _ in chooser.learned] == list(range(len(sizes)))
    for (_, measures), (micro, total), size in zip(chooser.learned, norms, sizes, strict=True):
        assert measures.sizes == pytest.approx((size - size // 2, size // 2))
        assert [each for (each,) in measures.micro] == pytest.approx(micro, rel=1e-4)
        assert measures.total == (pytest.approx(total, rel=1e-5),)


class PausesAt(Callback):
    """Pauses its task after a step."""

    def __init__(self, step):
        self.step = step

    def on_step(self, report):
        if report.steps == self.step:
            raise PauseTask


def test_what_a_chooser_has_learned_is_saved_with_its_task(tmp_path):
    report, network = None, plainly()[0]
    for callbacks in ([PausesAt(3)], []):
        loader = Guided()
        mine = task(loader, callbacks=callbacks)
        orchestra = exact.silent([mine], "1MiB", checkpoint_dir=tmp_path)
        report = orchestra.train_models(resume=True).tasks["a"]
    assert report.status == "finished"
    assert [step for step, _ in loader.made[-1].learned] == list(range(report.steps))
    exact.assert_same_state(zoo.state(mine.model), zoo.state(network))


def test_an_optimizer_that_a_chooser_refuses_fails_its_task():
    mine = task(Guided(), param_groups=lambda name: {"lr": 0.2} if name.endswith("bias") else {})
    with refused(task="a", says="optimizer 2"):
        exact.silent([mine], "1MiB").train_models()
