"""Updates in the middle of a step: the same bits, with the gradients of two shards in DRAM, or of all."""

import copy
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import ModelTask
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.covering import covering
from tests.refused import refused

SEED, LR, EPOCHS = 7, 1e-2, 2
orchestra_of = partial(exact.orchestrator, num_devices=2, chaos=4)


@covering(
    strength=1, name=["gpt", "tied", "odd"], settings=["plain", "schedules", "bfloat16"], early_release=[True, "all"]
)
def test_early_updates_give_the_bits_of_the_plain_loop(name, settings, early_release):
    options = {
        "plain": {"optimizer": torch.optim.AdamW},
        "schedules": {
            "optimizer": torch.optim.SGD,
            "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7),
            "lr_scheduler_interval": "epoch",
            "accumulation_steps": 3,
        },
        "bfloat16": {
            "optimizer": torch.optim.Adam,
            "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7),
            "precision": "bfloat16",
        },
    }[settings]
    epochs = EPOCHS if settings == "schedules" else 1
    plain, loss_fn, loader = zoo.MODELS[name]()
    expected = reference.train(plain, loss_fn, loader, seed=SEED, lr=LR, epochs=epochs, **options)
    network, loss_fn, loader = zoo.MODELS[name]()
    options |= {"seed": SEED, "early_release": early_release, "partitioner": Presharded([*range(1, len(network) + 1)])}
    task = ModelTask(network, loss_fn, loader, LR, epochs, name="early", **options)
    other = ModelTask(*zoo.mlp(), LR, 1, name="other", seed=1)
    report = orchestra_of([task, other]).train_models()
    report.raise_failures()
    assert report.tasks["early"].losses == expected.losses
    exact.assert_same_state(zoo.state(network), zoo.state(plain))


def stack(num=8, width=16):
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num)))


def vectors(num=4, width=16):
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(3, width, generator=generator), torch.randn(3, width, generator=generator))] * num


def plan_of(ends, early_release, model=None, loader=None):
    """The plan of the stack, cut there, with plain SGD."""
    model, loader = model or stack(), loader or vectors()
    task = ModelTask(model, F.mse_loss, loader, LR, partitioner=Presharded(ends), early_release=early_release)
    return orchestra_of([task]).generate().tasks["task-0"]


@pytest.mark.parametrize(("ends", "num_loans"), [([8], 1), ([4, 8], 2), (list(range(1, 9)), 2)])
def test_dram_holds_the_gradients_of_two_shards_as_planned(ends, num_loans):
    plan = plan_of(ends, True)
    layer_bytes = 16 * 16 * 4 + 64
    assert plan.dram["gradients"] == num_loans * (8 // len(ends)) * layer_bytes
    assert plan.dram["optimizer"] == 0


@pytest.mark.rest
def test_sgd_takes_at_most_4_4_bytes_per_parameter_in_20_shards():
    model = stack(20, 128)
    plan = plan_of([*range(1, 21)], True, model, vectors(1, 128))
    num_parameters = sum(p.numel() for p in model.parameters())
    pool_bytes = plan.dram_bytes - plan.dram["step"]  # which grows with the batch, not with the model
    assert pool_bytes <= 4.4 * num_parameters


def test_dram_holds_the_gradients_of_all_shards_where_it_is_told_to():
    assert plan_of([*range(1, 9)], "all").dram == plan_of([*range(1, 9)], False).dram


def test_backwards_wait_for_no_update_where_all_gradients_have_room(monkeypatch):
    """The first update is held until the lowest shard's backward: every backward above it went on without one."""
    first_update, events = threading.Event(), []
    step = torch.optim.SGD.step

    def slow(self, *args, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            assert first_update.wait(60)
            events.append("update")
        return step(self, *args, **kwargs)

    class Last(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if is_training:
                events.append("backward")
                first_update.set()
            return gradient

    class Lowest(nn.Linear):
        def forward(self, x):
            return Last.apply(super().forward(x))

    is_training = False
    network = nn.Sequential(Lowest(16, 16), *stack(7))
    task = ModelTask(network, F.mse_loss, vectors(1), LR, partitioner=Presharded([*range(1, 9)]), early_release="all")
    orchestra = orchestra_of([task], num_devices=1, chaos=0)
    orchestra.generate()
    is_training = True
    monkeypatch.setattr(torch.optim.SGD, "step", slow)
    orchestra.train_models().raise_failures()
    assert events == ["backward", *["update"] * 8]


@covering(strength=1, early_release=[False, True, "all"], precision=["float32", "bfloat16"])
def test_the_pool_takes_what_the_plan_says_to_the_byte(precision, early_release):
    seen = {}

    class Look(torch.optim.SGD):
        def step(self, *args, **kwargs):
            pool = orchestra._tasks.all[0].state.pool if "trained" in seen else None
            if pool is not None and pool.is_open:
                seen["pool"] = pool.num_bytes
            return super().step(*args, **kwargs)

    task = ModelTask(*zoo.tied(), LR, optimizer=Look, precision=precision, early_release=early_release)
    orchestra = orchestra_of([task])
    dram = orchestra.generate().tasks["task-0"].dram
    seen["trained"] = True
    orchestra.train_models().raise_failures()
    assert seen["pool"] == dram["weights"] + dram["casts"] + dram["gradients"]


class Fails(torch.autograd.Function):
    """Raises in the backward of the second batch."""

    @staticmethod
    def forward(ctx, x, is_bad):
        ctx.is_bad = is_bad
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.is_bad:
            raise RuntimeError("planted")
        return gradient, None


class Planted(nn.Linear):
    def forward(self, x):
        return Fails.apply(super().forward(x), bool(x.abs().max() > 1.01))


class Scaled(nn.Module):
    def forward(self, x):
        return x if x.abs().max() < 50 else x / 10


def test_a_failure_in_the_middle_of_a_step_leaves_the_shards_above_updated_and_nothing_hangs():
    torch.manual_seed(1)
    network = nn.Sequential(Scaled(), Planted(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 16))
    good = torch.rand(3, 16)
    loader = [(good, good), (100 * good, good), (good, good)]
    first = copy.deepcopy(network)
    reference.train(first, F.mse_loss, loader[:1], seed=SEED, lr=LR)
    options = {"seed": SEED, "early_release": True}
    shards = Presharded([1, 2, 3, 4, 5])
    task = ModelTask(network, F.mse_loss, loader, LR, name="fails", partitioner=shards, **options)
    other, alone = stack(), stack()
    reference.train(alone, F.mse_loss, vectors(), seed=SEED, lr=LR)
    beside = ModelTask(other, F.mse_loss, vectors(), LR, name="other", **options)
    report = orchestra_of([task, beside]).train_models()
    assert (report.tasks["fails"].status, report.tasks["fails"].steps) == ("failed", 1)
    assert torch.equal(network[1].weight, first[1].weight)  # below: the last commit
    assert not torch.equal(network[4].weight, first[4].weight)  # above: the step in progress
    assert report.tasks["other"].status == "finished"
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), alone.parameters(), strict=True))


def test_what_could_veto_the_step_is_refused():
    for options, words in (
        ({"max_grad_norm": 1.0}, "max_grad_norm"),
        ({"precision": "float16"}, "precision='float16'"),
        ({"optimizer_scope": "task"}, "optimizer_scope='task'"),
    ):
        with refused(says=f"early_release {words}"):
            ModelTask(stack(), F.mse_loss, vectors(), LR, early_release=True, **options)
