"""Norms of gradients come with the gradients: a commit that clips looks at none of these again, and has plain bits."""

import threading
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import ModelTask, NonFiniteLoss
from hydra_engine.host import TaskOptimizer
from hydra_engine.host.pool import Gradients
from partitioners import Presharded
from tests import exact, reference
from tests.covering import covering
from tests.promises.test_spread import spread

SEED, LR, STEPS = 3, 0.02, 3
LIMIT = 0.05  # each step is clipped
ADAMW = partial(torch.optim.AdamW, weight_decay=0.1)


class Scales(nn.Module):
    """A parameter that receives gradients, and one that receives none."""

    def __init__(self):
        super().__init__()
        self.used = nn.Parameter(torch.rand(16))
        self.unused = nn.Parameter(torch.rand(4))

    def forward(self, x):
        return x * self.used


class Tied(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return F.linear(x, self.weight)


def build():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        first = nn.Linear(16, 16)
        layers = [first, nn.Tanh(), Scales(), nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), Tied(first.weight)]
        batches = [(torch.randn(6, 16), torch.randn(6, 3)) for _ in range(STEPS)]
        return nn.Sequential(*layers, nn.Linear(16, 3)), batches


def halves(model):
    model[4].weight.register_hook(lambda gradient: gradient / 2)


CASES = {
    "float32": {},
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16"},
    "float16, not clipped": {"precision": "float16", "max_grad_norm": None},
    "micro-batches": {"accumulation_steps": 3},
    "bfloat16 in micro-batches": {"accumulation_steps": 3, "precision": "bfloat16"},
    "not clipped": {"max_grad_norm": None},
}
HOMES = {"none": "host", "half": 4, "all": "device"}


class Reads:
    """Names of the gradients in DRAM, or in homes, that commits look at."""

    def __init__(self):
        self.names = []
        self._here = threading.local()

    @contextmanager
    def counted(self):
        commit, of = TaskOptimizer.commit, Gradients.of

        def committing(*args, **options):
            self._here.commits = True
            try:
                return commit(*args, **options)
            finally:
                self._here.commits = False

        def reading(gradients, slot):
            if getattr(self._here, "commits", False):
                self.names.append(slot.name)
            return of(gradients, slot)

        with mock.patch.object(TaskOptimizer, "commit", committing), mock.patch.object(Gradients, "of", reading):
            yield


# More than seven parameters: each is another one's.
def assert_is_plain(
    *, loss_fn=F.mse_loss, prepare=lambda model: None, num_devices=1, built=build, init_scale=2.0**16, **options
):
    """Train both ways, a shard for each layer; the gradients that commits have looked at, and the task's report."""
    options = {"max_grad_norm": LIMIT, "optimizer": ADAMW, **options}
    (mine, batches), (own, _) = built(), built()
    plainly = {name: value for name, value in options.items() if name not in ("optimizer_scope", "homes")}
    if options.get("precision") == "float16":
        for each in (options, plainly):
            each["grad_scaler"] = torch.amp.GradScaler("cpu", init_scale)
    for model in (mine, own):
        prepare(model)
    ends = Presharded([*range(1, len(mine) + 1)])
    task = ModelTask(mine, loss_fn, batches, LR, 2, name="a", seed=SEED, partitioner=ends, **options)
    with (reads := Reads()).counted():
        report = exact.run([task], num_devices=num_devices, chaos=1).tasks["a"]
    result = reference.train(own, loss_fn, batches, seed=SEED, lr=LR, epochs=2, **plainly)
    assert report.status == "finished", report.error
    assert list(map(str, report.losses)) == list(map(str, result.losses))
    assert report.loss_scales == result.loss_scales
    for (name, a), (_, b) in zip(mine.named_parameters(), own.named_parameters(), strict=True):
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7)), name
    return reads.names, report


@covering(case=list(CASES), homes=list(HOMES), strength=1)
def test_a_commit_reads_no_gradient(case, homes):
    names, _ = assert_is_plain(homes=HOMES[homes], **CASES[case])
    assert names == []


@covering(in_sums=[True, False], precision=["float32", "bfloat16"])
def test_the_host_takes_norms_of_what_it_adds_up(in_sums, precision):
    """Each once."""
    options = {"accumulation_steps": 3, "precision": precision, "num_devices": 3}
    with spread(3, in_sums=in_sums):
        names, _ = assert_is_plain(**options)
    received = [name for name, _ in build()[0].named_parameters() if name != "2.unused"]
    assert sorted(names) == sorted([] if in_sums else received * 2 * STEPS)


def test_the_host_takes_norms_of_what_hooks_leave():
    names, _ = assert_is_plain(prepare=halves)
    assert names == ["4.weight"] * 2 * STEPS, "as the hook gets it"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_optimizer_of_the_whole_task_gets_clipped_gradients(precision):
    assert_is_plain(precision=precision, optimizer_scope="task")


class Turned(nn.Module):
    """A parameter with gaps, in columns, whose gradient is in rows."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64, 32)[:, ::2].t())

    def forward(self, x):
        return x @ self.weight


def turned():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(Turned()), [(torch.randn(6, 16), torch.randn(6, 64)) for _ in range(STEPS)]


@pytest.mark.parametrize("in_sums", [True, False])
def test_squares_are_added_in_the_order_of_the_gradient(in_sums):
    with spread(3, in_sums=in_sums):
        assert_is_plain(built=turned, accumulation_steps=3, num_devices=3)


class Root(nn.Module):
    """Its gradient is not finite where nothing reaches it; its output is."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return (x * self.weight).abs().sqrt()


def rooted():
    _, batches = build()
    batches[1] = (torch.zeros(6, 16), torch.zeros(6, 3))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(16, 16, bias=False), Root(), nn.Linear(16, 3)), batches


@covering(precision=["float32", "bfloat16", "float16"], homes=list(HOMES), nonfinite=[None, "skip"], strength=1)
def test_gradients_that_are_not_finite(precision, homes, nonfinite):
    _, report = assert_is_plain(built=rooted, precision=precision, homes=HOMES[homes], nonfinite=nonfinite)
    if precision == "float16":
        assert report.skipped_steps[:1] == [1], "by its scale"
    else:
        assert report.skipped_steps == ([2, 3, 4, 5] if nonfinite else []), "its own loss is finite"


def test_the_task_fails_at_the_step_whose_loss_is_not_finite():
    model, batches = rooted()
    task = ModelTask(model, F.mse_loss, batches, LR, 2, name="a", nonfinite="raise", max_grad_norm=LIMIT)
    with pytest.raises(NonFiniteLoss, match="step 2"):
        exact.run([task], chaos=1)


def far(output, target):
    """Its gradients are finite, and their squares beyond float32."""
    return F.mse_loss(1e12 * output, target)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_norm_may_be_infinite_though_gradients_are_finite(precision):
    names, report = assert_is_plain(loss_fn=far, precision=precision, init_scale=2.0**-70)
    assert report.skipped_steps == []
    assert names == []
