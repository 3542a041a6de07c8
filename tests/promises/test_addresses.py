"""Weights, buffers and gradients begin at multiples of 64; other operands keep their addresses modulo 64.

The CPU's kernels choose by these. So whatever the CPU, the bits are those of a plain loop whose weights and buffers
begin at multiples of 64, as torch allocates them.
The layers, losses and optimizers here have results that depend on these addresses, by arithmetic of their own, so that
nothing depends on the kernels of the machine that runs the tests.
"""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from hydra_engine import Callback, EmulatedDevice, Model, ModelOrchestrator, ModelTask, Skips, split
from hydra_engine.data.memory import copy_in_dram, copy_of, place_for, residue
from hydra_engine.host.layout import ModelLayout
from partitioners import Presharded, profile
from partitioners.cost import slab_bytes
from tests import reference
from tests.promises.test_spread import parts_of, spread

# All of it is left to `make test-all`, apart from one test of each way that operands take.
pytestmark = pytest.mark.rest

RESIDUES = range(0, 64, 4)
SEED = 5
SIZE = 31  # odd, so that rows of a batch lie at all addresses


def at(value, start):
    """A view of a larger tensor that begins at this residue and has the value's elements and strides."""
    num = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
    first = start // value.element_size()
    whole = torch.zeros(first + num + 3, dtype=value.dtype)
    place = whole.as_strided(value.shape, value.stride(), first)
    # Not as a whole: several elements may lie in one place.
    whole[first : first + num] = value.detach().as_strided((num,), (1,))
    return place


def mapped(value, start):
    """The same in a storage that begins there itself, as one of a mapped file does; at any byte."""
    storage = torch.UntypedStorage(start + value.nbytes)[start:]
    return torch.empty(0, dtype=value.dtype).set_(storage, 0, value.shape).copy_(value)


def seen(*tensors):
    """A factor that tells the residues of these tensors apart."""
    found = 1.0
    for k, tensor in enumerate(tensors):
        if not isinstance(tensor, FakeTensor):
            found += (k + 1) * (tensor.data_ptr() % 64) / 8192
    return found


class _See(torch.autograd.Function):
    """Scales a tensor by what it sees of the addresses of others and itself, and its gradient by its own address."""

    @staticmethod
    def forward(ctx, tensor, *others):
        ctx.others = others
        return tensor * seen(tensor, *others)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * seen(gradient, *ctx.others), *[None for _ in ctx.others]


class _Move(torch.autograd.Function):
    """Gives on what it gets, and the gradient, at the next of some residues."""

    @staticmethod
    def forward(ctx, tensor, start, back):
        ctx.back = back
        return tensor if start is None else at(tensor.detach(), start)

    @staticmethod
    def backward(ctx, gradient):
        return gradient if ctx.back is None else at(gradient, ctx.back), None, None


class Sees(nn.Module):
    """A linear layer whose output and gradients depend on where all its operands lie."""

    def __init__(self, start=0, *, size=SIZE, updates=True):
        super().__init__()
        self.weight = nn.Parameter(at(torch.randn(size, size) / 8, start))
        self.bias = nn.Parameter(at(torch.zeros(size), (start + 20) % 64))
        self.register_buffer("calls", at(torch.ones(size), (start + 8) % 64))
        self.table = mapped(torch.ones(size), (start + 12) % 64)  # neither a parameter nor a buffer
        self.tables = [at(torch.ones(3), (start + 44) % 64), {"a": mapped(torch.ones(3), (start + 16) % 64)}]
        self.updates = updates

    def forward(self, x):
        x = _See.apply(x, self.weight, self.bias, self.calls, self.table, self.tables[0], self.tables[1]["a"])
        y = F.linear(x, self.weight, self.bias) * self.calls.clone() * self.table
        if self.training and self.updates:
            with torch.no_grad():
                self.calls.mul_(1.03125)
        return y


class Moves(nn.Module):
    """Gives a view of a larger tensor, and a gradient that is one."""

    def __init__(self, start, back):
        super().__init__()
        self.start, self.back = start, back

    def forward(self, x):
        return _Move.apply(x, self.start, self.back)


class Flattens(nn.Module):
    """As of a layer that gives a part of what it has computed."""

    def __init__(self, first=5):
        super().__init__()
        self.first = first
        self.linear = nn.Linear(SIZE, SIZE + 20)

    def forward(self, x):
        return self.linear(x).flatten()[self.first : self.first + x.numel()].view(x.shape)


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(1.5)


class Loss(nn.Module):
    """Sees its target, and a weight of its own."""

    def __init__(self, start=52):
        super().__init__()
        self.register_buffer("scale", at(torch.ones(SIZE), start))

    def forward(self, output, target):
        output = _See.apply(output, target, self.scale)
        return ((output - target).pow(2) * self.scale).mean()


class SeesSGD(torch.optim.SGD):
    """A step that depends on where parameters and gradients lie."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 + (seen(parameter, parameter.grad) - 1) / 16)
        return super().step(closure)


def build(seed=0, *, start=36, back=28, updates=True):
    torch.manual_seed(seed)
    return nn.Sequential(
        Sees(start, updates=updates),
        Moves((start + 20) % 64, back),
        Sees((start + 40) % 64, updates=updates),
        nn.Tanh(),
        Flattens(),
        InPlace(),
        Sees(0, updates=updates),
        nn.Dropout(0.1),
        Moves(None, (back + 16) % 64),
        Sees((start + 4) % 64, updates=updates),
    )


def slices(num=4, batch=3, shift=7):
    """Batches that are slices of larger tensors, each at another address."""
    torch.manual_seed(11)
    inputs, targets = (torch.randn(num * batch * SIZE + 64) for _ in range(2))
    pairs = []
    for k in range(num):
        first, size = k * batch * SIZE, batch * SIZE
        y = targets[first + k * shift :][:size].view(batch, SIZE)
        pairs.append((inputs[first + k :][:size].view(batch, SIZE), y))
    return pairs


def views(inputs, target, num, loss_reduction="mean"):
    """A split into views, which begin wherever they lie in the batch."""
    pairs = zip(torch.tensor_split(inputs, num), torch.tensor_split(target, num), strict=True)
    return [(x, y, len(x) / len(inputs)) for x, y in pairs]


ENDS = {"one": lambda n: [n], "three": lambda n: [n // 3, 2 * n // 3, n], "each": lambda n: [*range(1, n + 1)]}
EACH_IN_THE_NET = ["one", "three", pytest.param("each", marks=pytest.mark.net)]


def task_of(model, loader=None, loss=None, *, ends="each", **options):
    shards = Presharded(ENDS[ends](len(model)))
    options = {"name": "a", "optimizer": SeesSGD, "seed": SEED, "partitioner": shards} | options
    return ModelTask(model, loss or Loss(), slices() if loader is None else loader, 0.05, 2, **options)


def orchestra_of(*tasks, num_devices=1, chaos=None, has_arena=False, **options):
    settings = {"chaos": chaos, "has_arena": has_arena, "meter_every_unit": True}
    devices = [EmulatedDevice("8MiB", **settings) for _ in range(num_devices)]
    orchestra = ModelOrchestrator(tasks, devices=devices, **options)
    orchestra.verbose = 0
    return orchestra


def aligned(model):
    """The model, with its weights and buffers at multiples of 64."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = copy_of(tensor.data, 0)
    return model


def assert_same(model, plain):
    """Bits of all parameters and buffers."""
    for (name, own), (_, other) in zip(
        [*model.named_parameters(), *model.named_buffers()],
        [*plain.named_parameters(), *plain.named_buffers()],
        strict=True,
    ):
        assert torch.equal(own, other), name
        assert own.stride() == other.stride(), name


def train_plainly(plain):
    aligned(plain)
    return reference.train(plain, aligned(Loss()), slices(), seed=SEED, lr=0.05, epochs=2, optimizer=SeesSGD)


def assert_trained_as(report, name, model, plain):
    """Losses and bits are those of the plain loop, which trains `plain` now."""
    assert report.tasks[name].losses == train_plainly(plain).losses
    assert_same(model, plain)


def assert_trains_as_plain(make, *, num_devices=1, chaos=None, has_arena=False, loader=None, splitter=None, **options):
    """`make` builds the same model twice."""
    model, plain, loss, plain_loss = make(), aligned(make()), Loss(), aligned(Loss())
    loader = slices() if loader is None else loader
    task = task_of(model, loader, loss, split=splitter, **options)
    report = orchestra_of(task, num_devices=num_devices, chaos=chaos, has_arena=has_arena).train_models()
    report.raise_failures()
    known = ("optimizer", "accumulation_steps", "max_grad_norm", "validation")
    settings = {"optimizer": SeesSGD} | {name: options[name] for name in known if name in options}
    with mock.patch("tests.reference.split", splitter or split):
        expected = reference.train(plain, plain_loss, loader, seed=SEED, lr=0.05, epochs=2, **settings)
    own = report.tasks["a"]
    assert own.losses == expected.losses
    assert own.validation_losses == expected.validation_losses
    assert_same(model, plain)
    assert_same(loss, plain_loss)
    return report


class TestPlaces:
    @pytest.mark.parametrize("start", RESIDUES)
    def test_copies_keep_the_residue_and_take_no_more_bytes(self, start):
        for value in (
            torch.randn(3, SIZE),
            torch.randn(4, 6).t(),
            torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
            torch.randn(1, 7).expand(5, 7),
            torch.arange(9),
            torch.randn(()),
        ):
            source = at(value, start) if value.element_size() == 4 and 0 not in value.stride() else mapped(value, start)
            for copied in (copy_of(source), copy_in_dram(source)):
                assert residue(copied) == start == source.data_ptr() % 64
                assert torch.equal(copied, source)
                assert copied.stride() == source.stride()
                assert copied.storage_offset() == 0
                num = sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True)) + 1
                assert copied.untyped_storage().nbytes() == num * source.element_size()

    @pytest.mark.parametrize("start", [1, 3, 37, 63])
    def test_at_any_byte(self, start):
        source = mapped(torch.randn(3, SIZE), start)
        assert residue(copy_of(source)) == start
        assert torch.equal(copy_of(source), source)

    def test_nothing_has_no_address(self):
        assert place_for(torch.empty(0, 3)).shape == (0, 3)
        assert residue(torch.empty(3, device="meta")) == 0

    def test_memory_outlives_the_place_it_was_cut_from(self):
        copied = copy_of(at(torch.full((1000,), 7.0), 36))
        others = [torch.zeros(1000) for _ in range(100)]
        assert copied.eq(7).all()
        del others

    @pytest.mark.parametrize("start", [0, 36])
    def test_copies_are_saved_and_shared_as_others(self, start, tmp_path):
        copied = copy_of(at(torch.randn(SIZE), start))
        torch.save(copied, tmp_path / "saved")
        assert torch.equal(torch.load(tmp_path / "saved"), copied)
        expected = copied.clone()
        assert torch.equal(copied.share_memory_(), expected)


class TestLayout:
    @pytest.mark.parametrize("start", [pytest.param(k, marks=[pytest.mark.net] * (k == 36)) for k in RESIDUES])
    def test_every_parameter_begins_at_a_multiple_of_64_in_every_slab(self, start):
        model = build(start=start)
        model[9].weight = model[0].weight  # tied: borrowed by the upper shard
        model[2].weight.requires_grad_(False)
        layout = ModelLayout(Model(model), None)
        for ends in ([10], [3, 10], list(range(1, 11))):
            for shard in layout.shards(ends):
                assert shard.own_bytes % 64 == shard.slab_bytes % 64 == 0
                assert {offset % 64 for offset in shard.offsets.values()} <= {0}

    def test_places_of_other_devices_are_at_multiples_of_their_own_alignment(self):
        layout = ModelLayout(Model(build()), None, alignment_bytes=512)
        assert {slot.offset % 512 for slot in layout.slots} == {0}

    @pytest.mark.parametrize("start", RESIDUES)
    @pytest.mark.parametrize("time_layers", [True, False])
    def test_partitioners_know_the_bytes(self, start, time_layers):
        model, inputs = nn.Sequential(*(Sees((start + 4 * k) % 64) for k in range(6))), torch.randn(2, SIZE)
        costs = profile(model, inputs, inputs, lambda y, _: y.sum(), time_layers=time_layers)
        layout = ModelLayout(Model(model), None)
        for k, shard in enumerate(layout.shards(list(range(1, 7)))):
            assert slab_bytes(costs, k, k + 1) == shard.slab_bytes + shard.buffer_bytes


@pytest.mark.parametrize("start", RESIDUES)
def test_weights_buffers_and_attributes_at_all_residues(start):
    ends = list(ENDS)[start // 4 % len(ENDS)]
    assert_trains_as_plain(partial(build, start=start, back=(start + 28) % 64), ends=ends)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("ends", ENDS)
def test_devices_chaos_and_arenas(num_devices, ends):
    assert_trains_as_plain(build, ends=ends, num_devices=num_devices, chaos=3, has_arena=num_devices == 2)


@pytest.mark.parametrize(
    ("ends", "splitter"),
    [*[(ends, None) for ends in ENDS], ("one", views), pytest.param("each", views, marks=pytest.mark.net)],
)
def test_micro_batches(ends, splitter):
    # A function of the user's may split into views: each begins where it lies in the batch.
    options = {} if splitter is None else {"splitter": splitter}
    assert_trains_as_plain(build, ends=ends, accumulation_steps=3, max_grad_norm=0.5, **options)


def test_clipping_and_validation():
    assert_trains_as_plain(build, max_grad_norm=0.1, validation=slices(num=3, shift=3))


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("splitter", [None, views])
def test_batches_that_are_large_enough_to_stay_on_the_device(num_devices, splitter):
    loader = slices(num=2, batch=80)
    assert_trains_as_plain(build, num_devices=num_devices, loader=loader, accumulation_steps=2, splitter=splitter)


@pytest.mark.parametrize("ends", EACH_IN_THE_NET)
def test_tied_frozen_and_oddly_laid_out_parameters(ends):
    def make():
        model = build()
        model[9].weight = model[0].weight
        model[2].weight.requires_grad_(False)
        model[2].bias.requires_grad_(False)
        model[6].weight = nn.Parameter(at(torch.randn(SIZE, SIZE).t(), 60))
        model[6].bias = nn.Parameter(mapped(torch.zeros(SIZE), 37))  # as an old file has it: at any byte
        model[4].linear.bias = nn.Parameter(at(torch.zeros(1).expand(SIZE + 20), 24), requires_grad=False)
        return model

    assert_trains_as_plain(make, ends=ends)


def test_channels_last():
    class Convolution(nn.Conv2d):
        def forward(self, x):
            return _See.apply(super().forward(_See.apply(x, self.weight)), self.bias)

    def make():
        torch.manual_seed(1)
        layers = [Convolution(3, 3, 3, padding=1) for _ in range(3)]
        for k, layer in enumerate(layers):
            layer.to(memory_format=torch.channels_last)
            layer.weight = nn.Parameter(at(layer.weight.detach(), 20 + 8 * k))
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3 * 25, SIZE))

    x = [at(torch.randn(2, 3, 5, 5).contiguous(memory_format=torch.channels_last), 4 * k) for k in range(1, 4)]
    assert_trains_as_plain(make, loader=[(each, torch.randn(2, SIZE)) for each in x])


class Stacked(nn.Module):
    """Parameters whose gradients autograd leaves as views of one tensor."""

    def __init__(self, num=3):
        super().__init__()
        self.experts = nn.ParameterList([nn.Parameter(torch.randn(5, SIZE) / 8) for _ in range(num)])

    def forward(self, x):
        return x + torch.cat(list(self.experts)).tanh().sum(0) * x


def stacked():
    torch.manual_seed(2)
    return nn.Sequential(Stacked(), Sees(updates=False), Stacked(), Sees(12, updates=False))


@pytest.mark.parametrize("ends", ["one", "each"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulation_steps": 3, "max_grad_norm": 0.5},
        {"early_release": True},
        {"optimizer_scope": "task"},
    ],
    ids=str,
)
def test_gradients_that_are_views(ends, options):
    assert_trains_as_plain(stacked, ends=ends, optimizer=torch.optim.SGD, **options)


@pytest.mark.parametrize("in_sums", [True, False], ids=["sums", "pieces"])
@pytest.mark.parametrize("make", [stacked, partial(build, updates=False)], ids=["stacked", "all"])
def test_steps_spread_over_devices(make, in_sums):
    with spread(2, in_sums=in_sums):
        options = {"accumulation_steps": 4, "optimizer": torch.optim.SGD}
        report = assert_trains_as_plain(make, num_devices=2, loader=slices(batch=8), **options)
    assert parts_of(report) == {0, 1}


def test_narrow_precision_of_weights_at_other_addresses():
    def make():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE))
        for k, module in enumerate(model):
            module.weight = nn.Parameter(at(module.weight.detach(), 20 + 4 * k))
        return model

    model, plain = make(), aligned(make())
    loader = slices()
    task = task_of(model, loader, F.mse_loss, precision="bfloat16", optimizer=torch.optim.SGD)
    orchestra_of(task).train_models().raise_failures()
    reference.train(plain, F.mse_loss, loader, seed=SEED, lr=0.05, epochs=2, precision="bfloat16")
    for (name, own), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(own, other), name


def test_tasks_that_share_frozen_blocks():
    def pair():
        torch.manual_seed(4)
        base = [Sees(20), Sees(48)]
        for layer in base:
            layer.requires_grad_(False).eval()
            layer.train = lambda mode=True: None
        other = [nn.Linear(SIZE, SIZE) for _ in base]
        return [nn.Sequential(base[0], base[1], Sees(12)), nn.Sequential(Sees(4), base[1], Sees(28), base[0])], other

    (models, _), (plains, _) = pair(), pair()
    tasks = [task_of(model, name=f"t{k}") for k, model in enumerate(models)]
    report = orchestra_of(*tasks, num_devices=2).train_models()
    report.raise_failures()
    for k, plain in enumerate(plains):
        assert_trained_as(report, f"t{k}", models[k], plain)


@pytest.mark.parametrize("ends", EACH_IN_THE_NET)
def test_evaluations_and_predictions(ends):
    model, plain, loader = build(), aligned(build()), slices()
    assert_same(plain, model)
    task = task_of(model, ends=ends)
    orchestra = orchestra_of(task)
    found = orchestra.evaluate(task, loader)
    assert found.loss == reference.evaluate(plain, aligned(Loss()), loader)
    assert_same(model, plain)
    cut = Presharded(ENDS[ends](len(model)))
    outputs = orchestra.predict(model, loader, unpack=lambda batch: batch[0], partitioner=cut)
    plain.eval()
    for output, (inputs, _) in zip(outputs, loader, strict=True):
        with torch.no_grad():
            expected = plain(inputs)
        assert torch.equal(output, expected)
        assert residue(output) == residue(expected)
    assert_same(model, plain)


def test_training_goes_on_in_plain_pytorch_and_here():
    model, plain = build(), build()
    for number in range(3):
        if number == 1:
            train_plainly(model)
        else:
            orchestra_of(task_of(model)).train_models().raise_failures()
        train_plainly(plain)
        assert_same(model, plain)


class At(Callback):
    """Calls a function once at a step."""

    def __init__(self, step, call):
        self.step, self.call = step, call

    def on_step(self, report):
        if report.steps == self.step:
            self.call()


def test_tasks_that_are_added_while_another_trains():
    models, plains = [build(k, start=8 * k) for k in range(2)], [build(k, start=8 * k) for k in range(2)]
    added = []
    second = task_of(models[1], name="second")
    first = task_of(models[0], name="first", callbacks=[At(2, lambda: added.append(orchestra.add_task(second)))])
    orchestra = orchestra_of(first, num_devices=2)
    report = orchestra.train_models()
    report.raise_failures()
    assert added == ["second"]
    for name, model, plain in zip(("first", "second"), models, plains, strict=True):
        assert_trained_as(report, name, model, plain)


class Stop(RuntimeError):
    pass


def fail():
    raise Stop


def test_a_resumed_run(tmp_path):
    def orchestra(model, *callbacks):
        task = task_of(model, callbacks=callbacks)
        return orchestra_of(task, checkpoint_dir=tmp_path, checkpoint_every=1)

    model, plain = build(), build()
    for layer in (0, 2):  # it is built elsewhere in the process that goes on
        model[layer].weight = nn.Parameter(model[layer].weight.detach().clone())
    with pytest.raises(Stop):
        orchestra(build(), At(3, fail)).train_models()
    report = orchestra(model).train_models(resume=True)
    report.raise_failures()
    assert_trained_as(report, "a", model, plain)


# With torch's own kernels, whatever they do on this machine.


@pytest.mark.parametrize("start", RESIDUES)
def test_slices_of_a_larger_tensor_into_a_linear(start):
    torch.manual_seed(start)
    whole = torch.randn(4000)
    loader = [(whole[start // 4 + k * 97 :][:93].view(3, SIZE), torch.randn(3, 5)) for k in range(8)]

    def make():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(SIZE, 17), nn.Tanh(), nn.Linear(17, 5))

    for ends in ENDS:
        model, plain = make(), make()
        task = task_of(model, loader, F.mse_loss, ends=ends, optimizer=torch.optim.SGD)
        report = orchestra_of(task).train_models()
        expected = reference.train(plain, F.mse_loss, loader, seed=SEED, lr=0.05, epochs=2)
        assert report.tasks["a"].losses == expected.losses
        assert_same(model, plain)


@pytest.mark.parametrize("first", range(16))
def test_a_layer_that_gives_a_view_at_an_odd_offset(first):
    def make():
        torch.manual_seed(1)
        return nn.Sequential(Flattens(first), nn.Linear(SIZE, SIZE), Flattens(first), nn.Linear(SIZE, SIZE))

    for ends in ENDS:
        model, plain = make(), make()
        task = task_of(model, slices(), F.mse_loss, ends=ends, optimizer=torch.optim.Adam)
        report = orchestra_of(task).train_models()
        expected = reference.train(
            plain, F.mse_loss, slices(), seed=SEED, lr=0.05, epochs=2, optimizer=torch.optim.Adam
        )
        assert report.tasks["a"].losses == expected.losses
        assert_same(model, plain)


class Puts(nn.Module):
    def __init__(self, skips, name):
        super().__init__()
        self.skips, self.name = skips, name

    def forward(self, x):
        self.skips.put(self.name, x)
        return x


class Gets(nn.Module):
    """Beside what was put, as a U-Net has it: both gradients are views of one tensor."""

    def __init__(self, skips, name):
        super().__init__()
        self.skips, self.name = skips, name

    def forward(self, x):
        y = torch.cat([x, self.skips.get(self.name)])
        return torch.tanh(y).view(2, *x.shape).sum(0)


def skipping():
    torch.manual_seed(6)
    skips = Skips()
    return nn.Sequential(
        Sees(20),
        Puts(skips, "a"),
        Sees(40),
        Puts(skips, "b"),
        Moves(8, 28),
        Sees(4),
        Gets(skips, "b"),
        Sees(),
        Gets(skips, "a"),
    )


@pytest.mark.parametrize("ends", ENDS)
def test_values_that_skip_layers(ends):
    assert_trains_as_plain(skipping, ends=ends)


def test_tasks_with_parameters_of_their_own_on_one_frozen_memory():
    def pair():
        torch.manual_seed(4)
        models = []
        weights = [at(torch.randn(SIZE, SIZE) / 8, 36), mapped(torch.randn(SIZE, SIZE) / 8, 29)]
        for k in range(2):
            layers = [Sees(20), Sees(48), Sees(4 * k)]
            for layer, weight in zip(layers, weights, strict=False):
                layer.weight = nn.Parameter(weight, requires_grad=False)
            models.append(nn.Sequential(*layers))
        return models

    models, plains = pair(), pair()
    tasks = [task_of(model, name=f"t{k}") for k, model in enumerate(models)]
    report = orchestra_of(*tasks, num_devices=2).train_models()
    report.raise_failures()
    for k, plain in enumerate(plains):
        assert_trained_as(report, f"t{k}", models[k], plain)


class Elsewhere(torch.optim.SGD):
    """Gives each parameter other memory at each step."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad


@pytest.mark.parametrize("scope", [pytest.param("shard", marks=pytest.mark.net), "task"])
def test_an_optimizer_that_gives_weights_other_memory_is_exact(scope):
    def make():
        torch.manual_seed(SEED)
        return nn.Sequential(Sees(36), Sees(8))

    loader = [(torch.randn(3, SIZE), torch.randn(3, SIZE)) for _ in range(3)]
    model, plain = make(), aligned(make())
    task = ModelTask(model, F.mse_loss, loader, 0.01, seed=SEED, optimizer=Elsewhere, optimizer_scope=scope)
    report = orchestra_of(task).train_models()
    report.raise_failures()
    expected = reference.train(plain, F.mse_loss, loader, seed=SEED, lr=0.01, optimizer=Elsewhere)
    assert report.tasks["task-0"].losses == expected.losses
    assert_same(model, plain)
