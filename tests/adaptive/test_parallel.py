"""A loop of one's own with batches that adapt: the gradients of plain PyTorch, exact restarts, and clear refusals."""

import copy
import io
import itertools
import math
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hydra_engine import StepChoice
from hydra_engine.adaptive import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    AdaScale,
    GradientNoiseScale,
    LEGWScale,
    LinearScale,
    remaining_epochs_until,
)
from tests.covering import covering
from tests.refused import refused


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Vector(nn.Module):
    """The weights alone; its loss is a mean of `inputs @ weight`, so that its gradient is a mean of the inputs."""

    def __init__(self, *values):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values))

    def forward(self, inputs):
        return inputs @ self.weight


def loader_of(*tensors, batch_size=4, most=None, seed=0, **kwargs):
    """Whose batches adapt where `most` is given."""
    generator = torch.Generator().manual_seed(seed) if kwargs.get("shuffle") else None
    loader = AdaptiveDataLoader(TensorDataset(*tensors), batch_size, generator=generator, **kwargs)
    if most is not None:
        loader.autoscale_batch_size(most)
    return loader


def record(*splits):
    """A record to be replayed: (samples, micro-batches) of each step, each worth one."""
    return [
        StepChoice(step=k, batch_size=size, micro_batches=number, progress=float(k))
        for k, (size, number) in enumerate(splits)
    ]


def replaying(loader, choices):
    """The loader, which is to repeat these choices, if there are any."""
    if choices:
        loader.autoscale = replace(loader.autoscale, replay=tuple(choices))
    return loader


def noise_of(model):
    """The averages of (sqr, var) over the steps, per parameter group."""
    read = model.checkpoint()["adaptation"]["noise"]["read"]
    return [[each / read["weight"] for each in read[name]] for name in ("sqr", "var")]


def inputs(num=64, seed=0):
    return torch.randn(num, 3, generator=torch.Generator().manual_seed(seed))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def regression(num=64):
    found = inputs(num)
    return found, found.sum(dim=1, keepdim=True).sin()


def wrapped(network, loader=None, *, lr=0.1, splits=(), **options):
    """The network with plain SGD, in steps of these splits."""
    optimizer = torch.optim.SGD(network.parameters(), lr=lr)
    return AdaptiveDataParallel(network, optimizer, loader=replaying(loader, record(*splits)), **options)


def descend(model, loss):
    """What all training code does with a micro-batch's loss."""
    model.optimizer.zero_grad()
    loss.backward()
    model.optimizer.step()


def train(model, *, epochs=1, num_steps=math.inf, clock=None, seen=None):
    """The loop of all training code; a micro-batch lasts a second and a millisecond per sample by the clock."""
    for _ in remaining_epochs_until(epochs, model.loader):
        for x, y in model.loader:
            if seen is not None:
                seen.append(x)
            if clock is not None:
                clock.now += 1 + 0.001 * len(x)
            descend(model, F.mse_loss(model(x), y))
            if model.lr_scheduler is not None:
                model.lr_scheduler.step()
            if len(model.steps) >= num_steps:
                return


def plainly(model, optimizer, data, steps):
    """The same steps in plain PyTorch: gradients times b / B, one after the other; learning rates times factors."""
    position = 0
    for step in steps:
        whole = [each[position : position + step.batch_size] for each in data]
        position += step.batch_size
        total = None
        for x, y in zip(*(each.tensor_split(step.micro_batches) for each in whole), strict=True):
            gradients = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
            if step.micro_batches > 1:
                gradients = [each * (len(x) / step.batch_size) for each in gradients]
            total = gradients if total is None else [a + b for a, b in zip(total, gradients, strict=True)]
        for parameter, gradient in zip(model.parameters(), total, strict=True):
            parameter.grad = gradient
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, factor in zip(optimizer.param_groups, step.factors, strict=True):
            group["lr"] = group["lr"] * factor
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def weights(model):
    return torch.cat([each.detach().flatten() for each in model.parameters()])


SPLITS = ((4, 2), (16, 4), (7, 3), (8, 1), (8, 1), (5, 2), (16, 5))  # 64 samples
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "tensor lr": partial(torch.optim.AdamW, lr=torch.tensor(0.01)),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0),
}


# -- gradients and learning rates


@pytest.mark.parametrize("name", ["momentum", "tensor lr", "adadelta"])
def test_steps_of_any_sizes_are_those_of_plain_pytorch(name):
    data, models = regression(), [mlp(), mlp()]
    first, second = (OPTIMIZERS[name](each.parameters()) for each in models)
    loader = loader_of(*data, most=16)
    model = AdaptiveDataParallel(models[0], first, loader=replaying(loader, record(*SPLITS)))
    train(model, num_steps=len(SPLITS))
    assert [(each.batch_size, each.micro_batches) for each in model.steps] == list(SPLITS)
    assert any(factor != 1 for each in model.steps for factor in each.factors)
    plainly(models[1], second, data, model.steps)
    assert torch.equal(weights(models[0]), weights(models[1]))


def test_micro_batches_of_one_size_have_the_bits_of_weighed_losses():
    data, models = regression(16), [mlp(), mlp()]
    train(wrapped(models[0], loader_of(*data, batch_size=16, most=16), splits=[(16, 4)]), num_steps=1)
    for x, y in zip(*(each.chunk(4) for each in data), strict=True):
        (F.mse_loss(models[1](x), y) * 0.25).backward()
    torch.optim.SGD(models[1].parameters(), lr=0.1).step()
    assert torch.equal(weights(models[0]), weights(models[1]))


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=str)
def test_the_loader_gives_a_batch_in_even_micro_batches(options):
    loader = loader_of(torch.arange(32.0), most=16, **options)
    model = wrapped(Vector(1.0), loader, splits=((4, 2), (11, 4), (13, 1)))
    given = []
    for (x,) in itertools.islice(loader, 7):
        given.append(x.tolist())
        model(x[:, None]).mean().backward()
        model.optimizer.step()
    assert [len(each) for each in given] == [2, 2, 3, 3, 3, 2, 13]
    assert list(itertools.chain(*given)) == list(map(float, range(28)))


@pytest.mark.parametrize(("factory", "expected"), [(LinearScale, 4.0), (AdaScale, 1.0)])
def test_a_factor_is_there_for_one_step_and_the_schedule_never_sees_it(factory, expected):
    loader, network, seen = loader_of(*regression(40), most=16), mlp(), []
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    schedule = schedules.ExponentialLR(optimizer, 0.5)
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
    replay = record((4, 1), (16, 4), (4, 1))
    train(
        AdaptiveDataParallel(network, optimizer, schedule, loader=replaying(loader, replay), scaling_rule=factory()),
        num_steps=3,
    )
    assert seen == [1.0, 0.5 * expected, 0.25]
    assert optimizer.param_groups[0]["lr"] == 0.125 == schedule.get_last_lr()[0]


def test_each_parameter_group_has_its_own_factor():
    data = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 4.0], [1.0, -2.0], [1.0, 1.0], [1.0, 1.0]])
    still, noisy = Vector(0.0), Vector(0.0)
    both = nn.ModuleList([still, noisy])
    optimizer = torch.optim.SGD([{"params": each.parameters(), "lr": 0.1} for each in both])
    loader = loader_of(data, batch_size=1, most=2)
    model = AdaptiveDataParallel(both, optimizer, loader=replaying(loader, record((1, 1), (1, 1), (2, 2), (2, 2))))
    for (x,) in loader:
        descend(model, (still(x[:, :1]) + noisy(x[:, 1:])).mean())
        if len(model.steps) == 4:
            break
    quiet, loud = model.steps[3].factors
    assert quiet == pytest.approx(1.0, abs=1e-5)
    assert loud == 2.0  # 4 and -2: noise hides their gradient
    assert model.steps[2].factors == pytest.approx((1.0, 1.0), abs=1e-5)  # both were the same before


def test_a_learning_rate_is_as_it_was_if_the_step_raises():
    loader = loader_of(*regression(20), most=16)
    model = wrapped(mlp(), loader, lr=1.0, scaling_rule=LinearScale(), splits=((4, 1), (16, 1)))
    train(model, num_steps=1)
    model.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    before = weights(model)
    with pytest.raises(ZeroDivisionError):
        train(model, num_steps=2)
    assert model.optimizer.param_groups[0]["lr"] == 1.0
    assert torch.equal(weights(model), before)


def test_clipping_acts_on_the_gradient_of_the_whole_step():
    loader = loader_of(torch.tensor([[6.0, 0.0], [0.0, 8.0]]), batch_size=2, most=2)
    model = wrapped(Vector(0.0, 0.0), loader, lr=1.0)
    for (x,) in loader:
        model.optimizer.zero_grad()
        model(x).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        model.optimizer.step()
    assert torch.allclose(model.weight, -torch.tensor([0.6, 0.8]))
    (step,) = model.steps
    assert step.micro_batches == 2
    # Not those of clipped ones.
    assert noise_of(model) == [[pytest.approx(2 * 25 - 50, abs=1e-5)], [pytest.approx(25.0)]]


def test_a_parameter_that_few_micro_batches_reach_has_its_share():
    network = nn.ModuleList([Vector(0.0), Vector(0.0)])
    loader = loader_of(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), most=4)
    model = wrapped(network, loader, lr=1.0, splits=[(4, 4)])
    for k, (x,) in enumerate(itertools.islice(loader, 4)):
        descend(model, network[0 if k in (0, 1) else 1](x).mean())
    assert [each.weight.item() for each in network] == [-0.75, -1.75]


def test_sparse_gradients_add_up():
    embedding = nn.Embedding(4, 2, sparse=True)
    nn.init.zeros_(embedding.weight)
    loader = loader_of(torch.tensor([0, 1, 1, 2]), most=4)
    model = wrapped(embedding, loader, lr=1.0)
    for (x,) in loader:
        descend(model, model(x).sum(dim=1).mean())
    assert embedding.weight[:, 0].tolist() == [-0.25, -0.5, -0.25, 0.0]
    assert noise_of(model) == [[pytest.approx(0.5)], [pytest.approx(0.25)]]


# -- noise


def test_the_noise_has_the_golden_numbers():
    golden = [[1, 0], [0, 1], [1, 2], [2, 1]], [[3, 0], [0, 1], [1, 0], [0, 3]]
    data = torch.tensor([[1.0, 1.0], *itertools.chain(*golden), *golden[0]])
    loader = loader_of(data, batch_size=1, most=4)
    model = wrapped(Vector(0.0, 0.0), loader, lr=1.0, splits=((1, 1), (4, 4), (4, 4), (4, 4)))
    found = []
    for (x,) in loader:
        num_steps = len(model.steps)
        descend(model, model(x).mean())
        if len(model.steps) > num_steps:
            found.append(noise_of(model) if len(model.steps) > 1 else None)
        if len(model.steps) == 4:
            break
    assert found[1] == [[pytest.approx(5 / 3)], [pytest.approx(4 / 3)]]
    assert found[2] == [[pytest.approx(1.33266633)], [pytest.approx(2.66933466)]]
    assert [each.factors[0] for each in model.steps] == [1.0, 1.0, pytest.approx(1.5), pytest.approx(2.00100100)]


@pytest.mark.rest
def test_a_quadratic_with_noise_of_a_known_size_tells_it():
    num, size, sigma = 32, 8, 2.0
    data = torch.randn(4000, num, generator=torch.Generator().manual_seed(3)) * sigma
    loader = loader_of(data, batch_size=size, most=size)
    model = wrapped(Vector(*[1.0] * num), loader, lr=0.0)
    for (x,) in loader:
        descend(model, ((model.weight - x) ** 2 / 2).sum(dim=1).mean())
    assert model.noise_scale == pytest.approx(sigma**2, rel=0.05)  # num * sigma**2 / |w|**2
    ((sqr,), (var,)) = noise_of(model)
    assert sqr == pytest.approx(num, rel=0.03)
    assert var == pytest.approx(num * sigma**2 / size, rel=0.03)


@pytest.mark.parametrize("clips", [False, True], ids=["plain", "clipped"])
def test_a_step_of_one_micro_batch_takes_the_step_before_as_a_second_one(clips):
    """A pair of gradients as they are before they are clipped."""
    rows, expected = inputs(6), GradientNoiseScale(1)
    for now, before in zip(rows[1:], rows, strict=False):
        norms = ([each.square().sum().item()] for each in (now, before, (now + before) / 2))
        expected.update_from_pair(1, *norms)
    expected = expected.state_dict()["read"]
    model = wrapped(Vector(*rows[0].tolist()), loader_of(rows, batch_size=1), lr=0.0)
    for (x,) in model.loader:
        model.optimizer.zero_grad()
        model(x).mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        model.optimizer.step()
    read = model.checkpoint()["adaptation"]["noise"]["read"]
    assert read["weight"] == expected["weight"]
    assert read["sqr"] == pytest.approx(expected["sqr"])
    assert read["var"] == pytest.approx(expected["var"])
    assert [each.gain for each in model.steps] == [1.0] * 6


def test_steps_of_other_sizes_are_no_pair():
    loader = loader_of(inputs(14))  # 4, 4, 4, 2
    model = wrapped(Vector(0.0, 0.0, 0.0), loader, lr=0.0)
    known = []
    for (x,) in loader:
        descend(model, model(x).mean())
        known.append(model.checkpoint()["adaptation"]["num_measured"])
    assert known == [0, 1, 2, 2]


def test_a_step_of_several_micro_batches_is_no_half_of_a_pair():
    model = wrapped(mlp(), loader_of(*regression(20), most=16), splits=((4, 1), (4, 2), (4, 1), (4, 1)))
    known = []
    for num_steps in range(1, 5):
        train(model, num_steps=num_steps)
        known.append(model.checkpoint()["adaptation"]["num_measured"])
    assert known == [0, 1, 1, 2]


@covering(bad=[math.inf, math.nan], micro_batches=[1, 2], strength=1)
def test_gradients_that_are_not_finite_tell_nothing_of_the_noise(bad, micro_batches):
    rows = inputs(8)
    rows[3] = bad
    loader = loader_of(rows, batch_size=2, most=2)
    model = wrapped(Vector(0.0, 0.0, 0.0), loader, lr=0.0, splits=[(2, micro_batches)] * 4)
    num_micro_batches = 0
    for (x,) in loader:
        num_micro_batches += 1
        descend(model, model(x).mean())
    assert num_micro_batches == 4 * micro_batches
    assert model.checkpoint()["adaptation"]["num_measured"] == {1: 1, 2: 3}[micro_batches]
    assert math.isfinite(model.noise_scale) or model.noise_scale == math.inf


# -- loops that do not adapt


@covering(name=["momentum", "tensor lr"], has_loader=[True, False], strength=1)
def test_without_autoscaling_steps_are_those_of_the_plain_loop(name, has_loader):
    data, models = regression(22), [mlp(), mlp()]  # the last batch is short
    optimizers = [OPTIMIZERS[name](each.parameters()) for each in models]
    loader = loader_of(*data) if has_loader else DataLoader(TensorDataset(*data), 4)
    model = AdaptiveDataParallel(models[0], optimizers[0], loader=loader if has_loader else None)
    for x, y in itertools.chain(loader, loader):
        descend(model, F.mse_loss(model(x), y))
    for x, y in itertools.chain(*[DataLoader(TensorDataset(*data), 4)] * 2):
        optimizers[1].zero_grad()
        F.mse_loss(models[1](x), y).backward()
        optimizers[1].step()
    assert torch.equal(weights(models[0]), weights(models[1]))
    sizes = [4, 4, 4, 4, 4, 2] * 2 if has_loader else [1] * 12
    assert [each.batch_size for each in model.steps] == sizes
    assert {each.factors for each in model.steps} == {(1.0,)}
    assert model.noise_scale > 0
    assert model.progress == (11.0 if has_loader else 12.0)


def test_a_closure_is_evaluated_as_the_optimizer_wants_where_batches_do_not_adapt():
    data, models = regression(), [mlp(), mlp()]
    optimizers = [torch.optim.LBFGS(each.parameters(), lr=0.5) for each in models]
    model = AdaptiveDataParallel(models[0], optimizers[0])
    for network, optimizer in zip((model, models[1]), optimizers, strict=True):

        def closure(network=network, optimizer=optimizer):
            optimizer.zero_grad()
            loss = F.mse_loss(network(data[0]), data[1])
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    assert torch.equal(weights(models[0]), weights(models[1]))
    assert len(model.steps) == 2


def test_several_backward_passes_make_one_step_of_one_micro_batch():
    model, other = wrapped(Vector(0.0), lr=1.0), Vector(0.0)
    for network, optimizer in ((model, model.optimizer), (other, torch.optim.SGD(other.parameters(), lr=1.0))):
        for _ in range(2):
            for _ in range(2):
                network(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert model.weight.item() == other.weight.item() == -4.0
    assert len(model.steps) == 2


def test_a_warm_up_counts_without_autoscaling():
    model = wrapped(Vector(0.0), loader_of(torch.ones(16, 1)), lr=1.0, scaling_rule=LEGWScale(1.0, 16))
    for (x,) in model.loader:
        descend(model, model(x).mean())
    assert [each.factors[0] for each in model.steps] == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.rest
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_the_minimum_of_rosenbrocks_function_is_found(noise):
    """As AdaptDL tests its rules: from (1, 1.5) with a learning rate of 0.001; with momentum."""
    factors = torch.normal(1.0, noise, (4 + 8 * 999, 2), generator=torch.Generator().manual_seed(0))
    point = Vector(1.0, 1.5)
    optimizer = torch.optim.SGD(point.parameters(), lr=0.001, momentum=0.9)
    schedule = schedules.MultiStepLR(optimizer, [1000])
    loader = loader_of(factors, batch_size=4, most=8)
    replaying(loader, record((4, 2), *[(8, 2)] * 999))
    model = AdaptiveDataParallel(point, optimizer, schedule, loader=loader)
    for x, y in ((each[:, 0], each[:, 1]) for (each,) in loader):
        a, b = point.weight
        descend(model, (x * (1 - a) ** 2 + y * 100 * (b - a**2) ** 2).mean())
        schedule.step()
        if torch.allclose(point.weight, torch.ones(2), atol=0.01):
            break
    assert 100 < len(model.steps) < 950


# -- choices


def adapting(num=256, *, size=8, most=64, epochs=3, optimizer="sgd", replay=(), **kwargs):
    """A run whose batches are chosen by the seconds of a clock of the test."""
    loader = loader_of(*regression(num), batch_size=size, most=most, shuffle=True)
    clock, network = Clock(), mlp()
    optimizer = OPTIMIZERS[optimizer](network.parameters())
    model = AdaptiveDataParallel(network, optimizer, loader=replaying(loader, replay), clock=clock, **kwargs)
    train(model, epochs=epochs, clock=clock)
    return model, loader


def test_batches_grow_where_a_micro_batch_costs_more_than_its_samples():
    model, loader = adapting()
    sizes = [each.batch_size for each in model.steps]
    assert sizes[:8] == [8] * 8  # until noise and seconds are known
    assert max(sizes) > 16
    assert all(8 <= each <= 64 or k == len(sizes) - 1 for k, each in enumerate(sizes) if each >= 8)
    assert all(each.micro_batches >= 2 for each in model.steps)
    assert {each.goodput is None for each in model.steps[:8]} == {True}
    assert model.steps[-1].goodput > 0
    grown = next(each for each in model.steps if each.batch_size > 8)
    assert 1 < grown.factors[0] <= grown.batch_size / 8
    assert model.steps[3].seconds.step_s == pytest.approx(2 + 0.008)
    assert loader.epoch == 3


def test_epochs_end_by_progress():
    model, _ = adapting()
    assert model.progress >= 3 * 256 / 8 - 1e-6
    assert model.steps[-1].progress < 3 * 256 / 8
    assert model.progress == pytest.approx(math.fsum(each.gain for each in model.steps))
    assert len(model.steps) < 3 * 256 / 8
    last = model.steps[-1]
    assert (model.scale, model.gain) == (last.batch_size / 8, last.gain)


def test_bounds_of_a_micro_batch_are_kept():
    loader = loader_of(*regression(256), batch_size=8)
    loader.autoscale_batch_size(64, local_bsz_bounds=(2, 6))
    clock, seen = Clock(), []
    model = wrapped(mlp(), loader, lr=0.05, clock=clock)
    train(model, epochs=2, clock=clock, seen=seen)
    assert {2 <= len(each) <= 6 for each in seen} == {True}
    assert max(each.batch_size for each in model.steps) > 8


def test_an_iterable_without_a_length_is_read_once_per_epoch():
    class Flow(IterableDataset):
        def __iter__(self):
            return zip(*regression(100), strict=True)

    loader = AdaptiveDataLoader(Flow(), 8)
    loader.autoscale_batch_size(32)
    clock, seen = Clock(), []
    model = wrapped(mlp(), loader, lr=0.05, clock=clock)
    train(model, epochs=2, clock=clock, seen=seen)
    assert torch.equal(torch.cat(seen), regression(100)[0].repeat(2, 1))
    assert sum(each.batch_size for each in model.steps) == 200


# -- replay and restarts


@pytest.mark.parametrize("name", [pytest.param("momentum", marks=pytest.mark.rest), "adamw"])
def test_a_replay_has_the_bits_of_the_run_that_it_repeats(name):
    first, _ = adapting(optimizer=name)
    second, _ = adapting(optimizer=name, replay=first.steps)
    assert second.steps == first.steps
    assert torch.equal(weights(first), weights(second))


class Training:
    """All that a script makes anew when it starts."""

    def __init__(self, replay=(), *, optimizer="adamw", adapts=True):
        loader = loader_of(*regression(256), batch_size=8, most=64 if adapts else None, shuffle=True)
        network, self.clock = mlp(), Clock()
        optimizer = OPTIMIZERS[optimizer](network.parameters())
        schedule = schedules.OneCycleLR(optimizer, 0.05, total_steps=400, cycle_momentum=False)
        replaying(loader, replay)
        self.model = AdaptiveDataParallel(network, optimizer, schedule, loader=loader, clock=self.clock)

    def train(self, num_steps=math.inf):
        train(self.model, epochs=3, num_steps=num_steps, clock=self.clock)
        return self


def through_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file)


@covering(optimizer=["momentum", "adamw"], num_steps=[1, 7, 20], strength=1)
def test_an_interrupted_run_goes_on_exactly(optimizer, num_steps):
    whole = Training(optimizer=optimizer).train()
    assert len(whole.model.steps) > 20
    assert len({each.batch_size for each in whole.model.steps}) > 1
    begun = Training(whole.model.steps, optimizer=optimizer).train(num_steps)
    resumed = Training(whole.model.steps, optimizer=optimizer)
    resumed.model.restore(through_a_file(begun.model.checkpoint()))
    assert len(resumed.model.steps) == num_steps
    resumed.train()
    assert resumed.model.steps == whole.model.steps
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert resumed.model.lr_scheduler.state_dict() == whole.model.lr_scheduler.state_dict()
    assert resumed.model.noise_scale == whole.model.noise_scale


@pytest.mark.parametrize("num_steps", [pytest.param(1, marks=pytest.mark.rest), 33])
def test_an_interrupted_run_that_does_not_adapt_goes_on_exactly(num_steps):
    whole = Training(adapts=False).train()
    assert len(whole.model.steps) == 96
    resumed = Training(adapts=False)
    resumed.model.restore(through_a_file(Training(adapts=False).train(num_steps).model.checkpoint()))
    resumed.train()
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert resumed.model.noise_scale == whole.model.noise_scale  # the gradient of the step before was saved
    assert resumed.model.steps == whole.model.steps


def test_the_record_goes_on_in_other_batches_after_a_restart():
    begun = Training().train(20)
    resumed = Training()
    resumed.model.restore(begun.model.checkpoint())
    resumed.train()
    assert resumed.model.steps[:20] == begun.model.steps
    assert [each.step for each in resumed.model.steps] == list(range(len(resumed.model.steps)))
    assert resumed.model.progress >= 96 - 1e-6
    assert resumed.model.loader.epoch == 3


def test_there_is_no_checkpoint_within_a_step():
    model = Training().model
    x, y = next(iterator := iter(model.loader))
    with refused(RuntimeError, says="checkpoint() 1 2"):
        model.checkpoint()
    F.mse_loss(model(x), y).backward()
    model.optimizer.step()
    with refused(RuntimeError, says="checkpoint() 1 2"):
        model.checkpoint()
    x, y = next(iterator)
    F.mse_loss(model(x), y).backward()
    with refused(RuntimeError, says="restore() micro-batch 2"):
        model.restore({})
    model.optimizer.step()
    assert len(through_a_file(model.checkpoint())["steps"]["step"]) == 1


def test_a_checkpoint_of_something_else_is_refused():
    saved = Training().train(3).model.checkpoint()
    network = mlp()
    optimizer = torch.optim.AdamW(network.parameters())
    model = AdaptiveDataParallel(network, optimizer, loader=loader_of(*regression(256), batch_size=8, most=64))
    before = weights(network)
    groups = {**saved["optimizer"], "param_groups": saved["optimizer"]["param_groups"] * 2}
    noise = {**saved["adaptation"]["noise"], "initial_batch_size": 4}
    for other, says in (
        (saved, "lr_scheduler saved"),
        ({"model": {}}, "model adaptation"),
        ({**saved, "lr_scheduler": None, "optimizer": groups}, "optimizer: 1 2"),
        (
            {**saved, "lr_scheduler": None, "adaptation": {**saved["adaptation"], "noise": noise}},
            "initial_batch_size: 8 4",
        ),
    ):
        with refused(says=says):
            model.restore(other)
    assert torch.equal(weights(network), before)


# -- schedules and scalers


@covering(
    make=[partial(schedules.StepLR, step_size=1, gamma=0.5), schedules.ReduceLROnPlateau],
    before=[True, False],
    strength=1,
)
def test_a_schedule_in_the_loop_counts_steps_not_micro_batches(make, before):
    loader, network = loader_of(*regression(64), most=16), mlp()
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    schedule = make(optimizer) if before else None
    plain = type(schedule)
    replay = record((4, 2), *[(8, 4)] * 7)
    model = AdaptiveDataParallel(network, optimizer, schedule, loader=replaying(loader, replay))
    if not before:  # is stepped as the user says
        schedule = make(optimizer)
    count = 0
    for x, y in loader:
        count += 1
        descend(model, F.mse_loss(model(x), y))
        if before or len(model.steps) > 2:
            schedule.step(*([1.0] if isinstance(schedule, schedules.ReduceLROnPlateau) else []))
        if len(model.steps) == 3:
            break
    assert count == 10
    assert schedule.last_epoch == (3 if before else 1)
    assert not [each for each in schedule.state_dict().values() if callable(each)]
    model.close()
    assert not before or type(schedule) is plain


def test_a_schedule_after_the_epoch_is_stepped():
    loader, network = loader_of(*regression(64), most=8), mlp()
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    schedule = schedules.StepLR(optimizer, 1, gamma=0.5)
    model = AdaptiveDataParallel(network, optimizer, schedule, loader=loader)
    for num_rounds in range(1, 4):
        for k, (x, y) in enumerate(loader):
            descend(model, F.mse_loss(model(x), y))
            if num_rounds == 2 and k == 2:
                break  # within a step
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.5**num_rounds
    assert loader.epoch == 2


def scaled(scaler, rows, splits, *, clips=False):
    model = wrapped(Vector(0.0, 0.0, 0.0), loader_of(rows, most=16), lr=0.5, scaler=scaler, splits=splits)
    scales = []
    for (x,) in model.loader:
        if scaler is None:
            descend(model, model(x).mean())
        else:
            model.optimizer.zero_grad()
            scaler.scale(model(x).mean()).backward()
            if clips:
                scaler.unscale_(model.optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(model.optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        if len(model.steps) == len(splits):
            return model, scales


def scaler_of(**kwargs):
    return torch.amp.GradScaler("cpu", init_scale=256.0, **kwargs)


MIXED = ((4, 2), (8, 4), (4, 1), (4, 1), (8, 4))


def test_a_gradient_scaler_changes_nothing():
    rows = inputs(28)
    plain, _ = scaled(None, rows, MIXED)
    with_scaler, scales = scaled(scaler_of(growth_interval=2), rows, MIXED)
    assert torch.equal(weights(plain), weights(with_scaler))  # scales are powers of two
    assert noise_of(with_scaler) == noise_of(plain)
    # It grows with every second step, never between the micro-batches of one.
    assert scales == [256] * 2 + [256] * 3 + [512] + [512, 1024] + [1024] * 4
    assert with_scaler.steps == plain.steps


def test_unscaled_gradients_may_be_clipped():
    rows = inputs(28)
    found, _ = scaled(scaler_of(), rows, MIXED, clips=True)
    expected = torch.zeros(3)
    ends = list(itertools.accumulate(size for size, _ in MIXED))
    for step, end in zip(found.steps, ends, strict=True):
        gradient = rows[end - step.batch_size : end].mean(dim=0)
        expected -= 0.5 * step.factors[0] * gradient * min(1.0, 0.1 / gradient.norm())
    assert torch.allclose(weights(found), expected, rtol=1e-4)


@pytest.mark.parametrize("bad", [0, 3])
def test_a_step_that_overflows_is_left_out(bad):
    rows = inputs(16)
    rows[4 + bad] = math.inf
    model, scales = scaled(scaler_of(), rows, [(4, 4)] * 4)
    assert scales == [256] * 7 + [128] * 9
    steps = [rows[k : k + 4].mean(dim=0) for k in (0, 8, 12)]
    assert torch.allclose(weights(model), -0.5 * sum(steps))
    assert [each.batch_size for each in model.steps] == [4] * 4
    assert model.checkpoint()["adaptation"]["num_measured"] == 3
    assert model.checkpoint()["scaler"]["scale"] == 128


# -- loops that do otherwise


def three_micro_batches():
    """Steps of three micro-batches, read one by one."""
    return wrapped(mlp(), loader_of(*regression(12), batch_size=6, most=6), splits=((6, 3), (6, 3)))


def assert_as_plain(model):
    """Its weights are those of the same steps over `regression(12)` in plain PyTorch."""
    expected = mlp()
    plainly(expected, torch.optim.SGD(expected.parameters(), lr=0.1), regression(12), model.steps)
    assert torch.equal(weights(model), weights(expected))


def test_two_backward_passes_in_one_micro_batch_of_several_are_refused():
    model = three_micro_batches()
    x, y = next(_ := iter(model.loader))
    loss = F.mse_loss(model(x), y)
    loss.backward(retain_graph=True)
    with refused(RuntimeError, says="backward() 1 3"):
        loss.backward()


def test_a_step_is_left_out_with_a_micro_batch_without_a_gradient():
    model = three_micro_batches()
    before, seen = weights(model), []
    for k, (x, y) in enumerate(model.loader):
        model.optimizer.zero_grad()
        if k != 1:
            F.mse_loss(model(x), y).backward()
        model.optimizer.step()
        seen.append(torch.equal(weights(model), before))
    assert seen == [True, True, True, True, True, False]
    assert len(model.steps) == 2
    assert model.checkpoint()["adaptation"]["num_measured"] == 1


def test_a_step_is_left_out_where_the_loop_goes_on_without_stepping():
    model = three_micro_batches()
    before = weights(model)
    for k, (x, y) in enumerate(model.loader):
        loss = F.mse_loss(model(x), y)
        if k == 2:
            continue
        descend(model, loss)
        assert k > 4 or torch.equal(weights(model), before)
    assert not torch.equal(weights(model), before)
    assert [each.step for each in model.steps] == [0, 1]


def test_a_batch_is_read_again_if_the_loop_is_left_within_it():
    model, seen = three_micro_batches(), []
    for stop in (2, 1, 9):
        for k, (x, y) in enumerate(model.loader):
            seen.append(x)
            descend(model, F.mse_loss(model(x), y))
            if k + 1 == stop:
                break
        model.checkpoint()  # the step is not in progress any more
    data = regression(12)[0]
    assert torch.equal(torch.cat(seen), torch.cat([data[:4], data[:2], data]))
    assert_as_plain(model)


def test_an_iteration_that_was_left_may_end_at_any_time():
    model = three_micro_batches()
    next(left := iter(model.loader))
    for k, (x, y) in enumerate(model.loader):
        if k == 4:
            left.close()
        descend(model, F.mse_loss(model(x), y))
    assert [each.step for each in model.steps] == [0, 1]
    assert_as_plain(model)


def test_a_second_backward_pass_of_a_batch_that_does_not_adapt_ends_with_it():
    loader = loader_of(*regression(16))
    model = wrapped(mlp(), loader)
    for x, y in loader:
        descend(model, F.mse_loss(model(x), y))
        model(x).mean().backward()
    assert model.checkpoint()["loader"] == loader.state_dict()


def test_a_batch_is_read_again_if_the_loop_raises_within_it():
    model, seen = three_micro_batches(), []
    failing = model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(model)
    failing.remove()
    assert model.loader.place == (0, 0, 0)
    train(model, seen=seen)
    assert torch.equal(torch.cat(seen), regression(12)[0])


def test_gradients_need_not_be_cleared_between_micro_batches():
    first, second = three_micro_batches(), three_micro_batches()
    for model in (first, second):
        for k, (x, y) in enumerate(model.loader):
            if model is first or k % 3 == 0:
                model.optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            model.optimizer.step()
    assert torch.equal(weights(first), weights(second))


def test_gradients_may_be_set_by_hand_where_a_step_has_one_micro_batch():
    model = wrapped(Vector(0.0, 0.0), lr=1.0)
    for row in ([1.0, 0.0], [0.0, 1.0]):
        model.weight.grad = torch.tensor(row)
        model.optimizer.step()
    assert model.weight.tolist() == [-1.0, -1.0]
    assert noise_of(model) == [[pytest.approx(0.0, abs=1e-6)], [pytest.approx(1.0)]]


def test_what_is_done_with_the_model_outside_of_the_loop_counts_nothing():
    model = three_micro_batches()
    F.mse_loss(model(inputs(4)), torch.zeros(4, 1)).backward()
    with refused(RuntimeError, says="optimizer.step() loader"):
        model.optimizer.step()
    train(model)
    assert_as_plain(model)


def test_a_second_step_for_one_batch_is_refused():
    model = three_micro_batches()
    train(model, num_steps=1)
    with refused(RuntimeError, says="twice"):
        model.optimizer.step()


def test_a_backward_pass_that_failed_is_forgotten():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ZeroDivisionError

    weight = nn.ModuleList([Vector(1.0), Vector(1.0)])
    model = wrapped(weight, lr=1.0)
    one = torch.ones(1, 1)
    with pytest.raises(ZeroDivisionError):
        (weight[1](one) * 2 + weight[0](Fails.apply(one * weight[0].weight))).sum().backward()
    descend(model, weight[0](one).sum())
    assert [each.weight.item() for each in weight] == [0.0, 1.0]


# -- the module


def test_it_is_the_model_for_whoever_looks():
    network = mlp()
    network.width = 8
    model = wrapped(network)
    assert model.width == 8
    assert list(map(id, model.parameters())) == list(map(id, network.parameters()))
    assert list(model.state_dict()) == list(network.state_dict())
    other = {name: each + 1 for name, each in copy.deepcopy(network.state_dict()).items()}
    model.load_state_dict(other)
    assert torch.equal(network[0].bias, other["0.bias"])
    model.eval()
    assert not network.training
    assert (model.scale, model.gain, model.progress, model.noise_scale, model.steps) == (1.0, 1.0, 0.0, None, [])
    with refused(AttributeError, says="no_such"):
        _ = model.no_such


def test_closed_it_leaves_all_as_it_was():
    data, networks = regression(16), [mlp(), mlp()]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in networks]
    schedule = schedules.StepLR(optimizers[0], 1)
    step, scaler = optimizers[0].step, scaler_of()
    loader = loader_of(*data, most=8)
    for _ in range(2):
        model = AdaptiveDataParallel(networks[0], optimizers[0], schedule, scaler, loader=loader)
        model.close()
    assert optimizers[0].step == step
    assert (type(schedule), type(scaler)) == (schedules.StepLR, torch.amp.GradScaler)
    assert (loader.guide, loader.cut) == (None, None)
    for network, optimizer in zip(networks, optimizers, strict=True):
        for x, y in loader_of(*data, most=8):
            optimizer.zero_grad()
            F.mse_loss(network(x), y).backward()
            optimizer.step()
    assert torch.equal(weights(networks[0]), weights(networks[1]))
    assert model.steps == []


def test_no_warning_of_a_schedule_that_is_made_before_or_after():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for before in (True, False):
            network = mlp()
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
            schedule = schedules.StepLR(optimizer, 1) if before else None
            AdaptiveDataParallel(network, optimizer, schedule)
            schedule = schedule or schedules.StepLR(optimizer, 1)
            F.mse_loss(network(inputs(4)), torch.zeros(4, 1)).backward()
            optimizer.step()
            schedule.step()


# -- refusals


def refuses(error, says, model=None, optimizer=None, lr_scheduler=None, scaler=None, **kwargs):
    model = mlp() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    with refused(error, says=says):
        AdaptiveDataParallel(model, optimizer, lr_scheduler, scaler, **kwargs)


def test_what_does_not_belong_together_is_refused():
    network, other = mlp(), mlp()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    refuses(TypeError, "model: function", lambda: 0, optimizer)
    refuses(TypeError, "optimizer: float", network, 0.1)
    refuses(ValueError, "optimizer: 4", other, optimizer)
    refuses(ValueError, "lr_scheduler: optimizer", lr_scheduler=schedules.StepLR(optimizer, 1))
    refuses(TypeError, "lr_scheduler: float step()", lr_scheduler=0.1)
    refuses(TypeError, "scaler: float unscale_()", scaler=0.1)
    refuses(TypeError, "loader: DataLoader AdaptiveDataLoader", loader=DataLoader(inputs()))
    refuses(TypeError, "scaling_rule: ScalingRule", scaling_rule=AdaScale)
    del optimizer.param_groups[0]["lr"]
    refuses(ValueError, "optimizer: SGD 'lr'", network, optimizer)


def test_a_loader_and_an_optimizer_have_one_wrapper():
    model = wrapped(mlp(), loader_of(*regression(), most=16))
    refuses(ValueError, "loader:", loader=model.loader)
    refuses(ValueError, "optimizer: AdaptiveDataParallel", model.module, model.optimizer)
    refuses(ValueError, "model: AdaptiveDataParallel", model, model.optimizer)


def test_a_record_of_something_else_is_refused():
    loader = loader_of(*regression(), most=16)
    two = StepChoice(step=0, batch_size=4, micro_batches=2, factors=(1.0, 1.0))
    refuses(ValueError, "replay: factors 2", loader=replaying(loader, [two]))
    refuses(ValueError, "replay: 8 4", loader=replaying(loader, record((8, 2))))


def test_groups_that_were_added_are_refused():
    network = nn.ModuleList([Vector(0.0), Vector(0.0)])
    optimizer = torch.optim.SGD(network[0].parameters(), lr=0.1)
    AdaptiveDataParallel(network, optimizer)
    optimizer.add_param_group({"params": network[1].parameters()})
    with refused(says="optimizer: 2 1"):
        optimizer.step()


def test_a_closure_is_refused_where_batches_adapt():
    model = three_micro_batches()
    next(_ := iter(model.loader))
    with refused(says="closure"):
        model.optimizer.step(lambda: None)


def test_autoscaling_comes_first():
    loader = loader_of(*regression())
    wrapped(mlp(), loader)
    loader.autoscale_batch_size(16)
    with refused(RuntimeError, says="autoscale_batch_size()"):
        next(iter(loader))


def test_a_loader_in_a_later_epoch_needs_its_checkpoint():
    loader = loader_of(*regression(), most=16)
    list(loader)
    model = wrapped(mlp(), loader)
    with refused(RuntimeError, says="loader: 1 0"):
        next(iter(loader))
    assert model.steps == []
