"""bfloat16 and float16 give the bits of a plain loop with the same casts written out (tests/reference.py, `Narrow`)."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import EmulatedDevice, ModelTask
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.covering import covering
from tests.refused import refused

SEED, LR, EPOCHS = 7, 1e-2, 1
ENDS = {"one shard": lambda num: [num], "each layer": lambda num: list(range(1, num + 1))}


def trained(network, loss_fn, loader, *, ends, num_devices=1, chaos=None, **settings):
    """Train a model on emulated devices; its report."""
    cut = ends if isinstance(ends, list) else ENDS[ends](len(network))
    task = ModelTask(
        network, loss_fn, loader, LR, EPOCHS, name="net", seed=SEED, partitioner=Presharded(cut), **settings
    )
    devices = [EmulatedDevice("16MiB", chaos=chaos, meter_every_unit=True) for _ in range(num_devices)]
    report = exact.silent([task], devices=devices).train_models()
    report.raise_failures()
    assert all(device.peak_bytes <= device.memory_bytes for device in report.devices)
    return report.tasks["net"]


def both(name, *, ends="each layer", num_devices=2, chaos=3, scaler=None, own=None, models=None, **settings):
    """Train a model of the zoo, for few batches, in plain PyTorch and with the engine; compare all they leave."""
    build = (models or zoo.SHORT_MODELS)[name]
    if settings["precision"] == "float16":
        scaler = scaler or partial(torch.amp.GradScaler, "cpu")
    plain, loss_fn, loader = build()
    expected = reference.train(
        plain, loss_fn, loader, seed=SEED, lr=LR, epochs=EPOCHS, grad_scaler=scaler and scaler(), **settings
    )
    network, loss_fn, loader = build()
    settings |= {"grad_scaler": scaler()} if scaler else {}
    settings |= own or {}  # which plain PyTorch does not have
    report = trained(network, loss_fn, loader, ends=ends, num_devices=num_devices, chaos=chaos, **settings)
    assert all(map(math.isfinite, report.losses))
    assert report.losses == expected.losses
    assert report.validation_losses == expected.validation_losses
    assert report.loss_scales == expected.loss_scales
    exact.assert_same_state(zoo.state(network), zoo.state(plain))
    return report


@covering(name=list(zoo.MODELS), precision=["bfloat16", "float16"], ends=list(ENDS), strength=1)
def test_every_model_of_the_zoo_gives_the_bits_of_the_plain_casts(name, ends, precision):
    both(name, ends=ends, optimizer=torch.optim.AdamW, precision=precision)


@covering(name=["cnn", "tied", "branch"], precision=["bfloat16", "float16"], strength=1)
def test_micro_batches_add_up_in_float32_and_are_rounded_once(name, precision):
    settings = {"accumulation_steps": 3, "max_grad_norm": 0.5, "lr_scheduler": halving, "precision": precision}
    both(name, optimizer=torch.optim.Adam, **settings)


@covering(precision=["bfloat16", "float16"], scope=["shard", "task"], strength=1)
def test_validation_and_both_scopes_of_the_optimizer(precision, scope):
    network, loss_fn, loader = zoo.SHORT_MODELS["cnn"]()
    plain = copy.deepcopy(network)
    settings = {"optimizer": torch.optim.SGD, "precision": precision, "validation": loader, "max_grad_norm": 0.3}
    scaler = torch.amp.GradScaler("cpu") if precision == "float16" else None
    expected = reference.train(plain, loss_fn, loader, seed=SEED, lr=LR, epochs=EPOCHS, grad_scaler=scaler, **settings)
    report = trained(network, loss_fn, loader, ends="each layer", optimizer_scope=scope, **settings)
    assert (report.losses, report.validation_losses) == (expected.losses, expected.validation_losses)
    exact.assert_same_state(zoo.state(network), zoo.state(plain))


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


class Planted(torch.autograd.Function):
    """Passes values through; multiplies the gradient by what it is given."""

    @staticmethod
    def forward(ctx, value, factor):
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class Plant(nn.Module):
    """Makes the gradient of a batch infinite where its first input is above a limit."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return Planted.apply(self.linear(x), math.inf if x.max() > self.limit else 1.0)


def planted(limit=100.0):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), Plant(limit), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2))


def batches(*, bad=(), num=6):
    """Six batches of six samples; in those of `bad` one sample, of the second micro-batch of three, is far out."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for k in range(num):
        inputs = torch.randn(6, 4, generator=generator)
        if k in bad:
            inputs[2, 0] = 5000.0  # the first layer keeps it far from the others
        found.append((inputs, torch.randint(2, (6,), generator=generator)))
    return found


@pytest.mark.rest
@covering(scope=["shard", "task"], accumulation_steps=[1, 3], strength=1)
def test_an_infinity_in_one_micro_batch_skips_exactly_that_step_of_exactly_that_task(scope, accumulation_steps):
    loader = batches(bad=(2,))
    networks = [planted(), planted()]
    plains = copy.deepcopy(networks)
    settings = {"accumulation_steps": accumulation_steps, "max_grad_norm": 1.0, "lr_scheduler": halving}
    settings |= {"optimizer": torch.optim.AdamW, "precision": "float16"}
    loaders = [loader, batches()]
    scaler = partial(torch.amp.GradScaler, "cpu", init_scale=256.0)
    own = {"partitioner": Presharded([1, 3, 5]), "optimizer_scope": scope}
    expected, tasks = [], []
    for name, network, plain, data in zip(("struck", "other"), networks, plains, loaders, strict=True):
        options = {"seed": SEED, "lr": LR, "epochs": 2, **settings}
        expected.append(reference.train(plain, F.cross_entropy, data, grad_scaler=scaler(), **options))
        tasks.append(ModelTask(network, F.cross_entropy, data, name=name, grad_scaler=scaler(), **options, **own))
    report = exact.silent(tasks, devices=[EmulatedDevice("4MiB", chaos=k) for k in (1, 2)]).train_models()
    report.raise_failures()
    assert report.tasks["struck"].skipped_steps == [2, 8]
    assert report.tasks["other"].skipped_steps == []
    assert report.tasks["struck"].loss_scales == [256.0] * 3 + [128.0] * 6 + [64.0] * 3
    for task, result, network, plain in zip(report.tasks.values(), expected, networks, plains, strict=True):
        assert task.losses == result.losses
        assert task.loss_scales == result.loss_scales
        exact.assert_same_state(network.state_dict(), plain.state_dict())


def test_the_scale_grows_and_shrinks_as_the_grad_scaler_s():
    scaler = partial(torch.amp.GradScaler, "cpu", init_scale=2.0**20, growth_interval=2, growth_factor=1.7)
    report = both("mlp", precision="float16", optimizer=torch.optim.SGD, scaler=scaler, models=zoo.MODELS)
    assert report.skipped_steps  # 2 ** 20 is too much for float16
    assert len(set(report.loss_scales)) > 3
    assert any(after > before for before, after in zip(report.loss_scales, report.loss_scales[1:], strict=False))


def test_a_scaler_that_was_used_goes_on_where_it_stood_and_is_left_alone():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
    state = scaler.state_dict() | {"_growth_tracker": 4}
    scaler.load_state_dict(state)
    network = planted()
    report = trained(network, F.cross_entropy, batches(), ends=[5], precision="float16", grad_scaler=scaler)
    assert report.loss_scales == [8.0] + [16.0] * 5
    assert scaler.state_dict() == state


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_hooks_see_the_finished_gradient_in_float32_without_its_scale(precision):
    network = planted()
    plain = copy.deepcopy(network)
    seen = []

    def hook(gradient):
        seen.append((gradient.dtype, float(gradient.abs().max())))
        return gradient / 3

    network[0].weight.register_hook(hook)
    report = trained(network, F.cross_entropy, batches(), ends=[2, 5], optimizer=torch.optim.Adam, precision=precision)
    settings = {"optimizer": torch.optim.Adam, "precision": precision}
    scaler = torch.amp.GradScaler("cpu") if precision == "float16" else None
    expected = reference.train(
        plain, F.cross_entropy, batches(), seed=SEED, lr=LR, epochs=EPOCHS, grad_scaler=scaler, **settings
    )
    assert len(seen) == len(report.losses) - len(report.skipped_steps)
    assert all(dtype == torch.float32 and most < 10 for dtype, most in seen)
    assert report.losses[0] == expected.losses[0]
    assert not torch.equal(network[0].weight, plain[0].weight)


def test_averages_are_of_the_float32_weights():
    network = planted()
    report = trained(network, F.cross_entropy, batches(), ends=[2, 5], precision="bfloat16", ema_decay=0.0)
    assert all(torch.equal(report.ema_state[name], value) for name, value in network.state_dict().items())
    assert report.ema_state["0.weight"].dtype == torch.float32


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_a_narrow_shard_crosses_the_link_in_half_the_bytes(name):
    loaded = {}
    for precision in ("float32", "bfloat16"):
        network, loss_fn, loader = zoo.SHORT_MODELS[name]()
        task = ModelTask(
            network, loss_fn, loader, LR, 1, seed=1, precision=precision, partitioner=Presharded([len(network)])
        )
        orchestra = exact.silent([task])
        plan = orchestra.generate().tasks["task-0"]
        state = orchestra._tasks.all[0].state
        loaded[precision] = state.cut.shards[0].slab_bytes
        assert plan.shard_bytes[0] > 0
    norms = sum(p.nbytes for m in network.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters())
    weights = sum(p.nbytes for p in network.parameters()) - norms
    assert abs(loaded["bfloat16"] - weights // 2 - norms) <= 64 * 2 * len(list(network.parameters()))
    assert loaded["float32"] >= weights + norms


def test_what_layers_see_is_narrow_and_what_norms_and_the_loss_see_is_float32():
    seen = {}

    class Spy(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            weight = self.inner.weight
            seen[type(self.inner).__name__] = (x.dtype, weight.dtype, self.inner(x).dtype)
            return self.inner(x)

    def loss_fn(output, target):
        seen["loss"] = (output.dtype, target.dtype)
        return F.l1_loss(output, target)  # mse_loss of two types has no gradient under torch 2.11

    network = nn.Sequential(Spy(nn.Linear(4, 4)), Spy(nn.LayerNorm(4)), Spy(nn.Linear(4, 1, bias=False)))
    loader = [(torch.randn(3, 4), torch.randn(3, 1, dtype=torch.float64))]
    trained(network, loss_fn, loader, ends=[1, 2, 3], precision="bfloat16")
    narrow, wide = torch.bfloat16, torch.float32
    assert seen["Linear"] == (narrow, narrow, narrow)
    assert seen["LayerNorm"] == (narrow, wide, narrow)
    assert seen["loss"] == (wide, torch.float64)
    assert all(parameter.dtype == wide for parameter in network.parameters())


@pytest.mark.parametrize(
    ("error", "precision", "options", "words"),
    [
        (ValueError, "bfloat16", {"grad_scaler": torch.amp.GradScaler("cpu")}, "grad_scaler bfloat16"),
        (ValueError, "float16", {"grad_scaler": torch.amp.GradScaler("cpu", enabled=False)}, "grad_scaler disabled"),
        (TypeError, "float16", {"grad_scaler": 3}, "grad_scaler torch.amp.GradScaler"),
        (ValueError, "float8", {}, "precision float8"),
    ],
)
def test_a_scaler_is_refused_where_it_would_do_nothing(error, precision, options, words):
    network, loss_fn, loader = zoo.SHORT_MODELS["mlp"]()
    with refused(error, says=words):
        ModelTask(network, loss_fn, loader, LR, precision=precision, **options)
