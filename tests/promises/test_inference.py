"""What `orchestra.evaluate` and `orchestra.predict` have in common: the plain loop's bits, and nothing is changed."""

import _thread
import copy
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from hydra_engine import EmulatedDevice, ModelTask
from hydra_engine.data.streams import capture
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.covering import covering
from tests.refused import refused

SEED = 31
WIDTH = 32
HOW = ["evaluate", "predict"]
either = pytest.mark.parametrize("how", HOW)


def task_of(build, *, partition="three", **options):
    model, loss_fn, loader = build()
    shards = Presharded(exact.ends(partition, len(model)))
    return ModelTask(model, loss_fn, loader, 0.1, **{"name": "subject", "seed": SEED, "partitioner": shards} | options)


def of_classes(model, loader=(), **options):
    """A task that trains nothing, of a model that gives three classes."""
    return ModelTask(model, F.cross_entropy, list(loader), **{"name": "subject", "seed": SEED} | options)


def dense(num_layers=5, *, norm=False):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = []
        for _ in range(num_layers):
            layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh(), *([nn.BatchNorm1d(WIDTH)] if norm else [])]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def batches(*sizes):
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(n, WIDTH, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes]


def inputs_of(*sizes):
    return [inputs for inputs, _ in batches(*sizes)]


def orchestra_of(*tasks, memory="1MiB", num_devices=1, chaos=None):
    """Whatever its tasks: at least one there has to be."""
    tasks = tasks or [ModelTask(nn.Sequential(nn.Linear(2, 2)), F.mse_loss, [(torch.ones(3, 2),) * 2], seed=0)]
    devices = [EmulatedDevice(memory, chaos=chaos, meter_every_unit=True) for _ in range(num_devices)]
    return exact.silent(tasks, devices=devices)


def outcome(how, orchestra, task, loader):
    """The loss, or all outputs, by the engine."""
    return orchestra.evaluate(task, loader).loss if how == "evaluate" else list(orchestra.predict(task, loader))


def plain(how, task, loader, model=None):
    """The loss by tests/reference.py, or the outputs in eval(), of the task's model or of one that is equal to it."""
    model = task.model if model is None else model
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(task.seed)
        if how == "evaluate":
            return reference.evaluate(model, task.loss_fn, loader, task.loss_reduction, task.unpack)
        model = copy.deepcopy(model)
        model.eval()
        return [model(inputs) for inputs, _ in loader]


def assert_same(ours, theirs):
    """Equal containers of equal tensors, strides too, and of equal numbers."""
    ours, spec = pytree.tree_flatten(ours)
    theirs, expected = pytree.tree_flatten(theirs)
    assert spec == expected
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a, b)
        assert not a.requires_grad


def everything(model):
    """What must be left as it was."""
    tensors = {name: (tensor.clone(), tensor.stride()) for name, tensor in zoo.state(model).items()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return tensors, gradients, {name: module.training for name, module in model.named_modules()}


def assert_untouched(model, before):
    tensors, gradients, flags = everything(model)
    assert tensors.keys() == before[0].keys()
    for name, (tensor, stride) in tensors.items():
        assert torch.equal(tensor, before[0][name][0]), name
        assert stride == before[0][name][1]
    assert all(gradients[name] is gradient for name, gradient in before[1].items())
    assert flags == before[2]
    for name, parameter in model.named_parameters():  # in ordinary storage
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, name


@contextmanager
def left_as_it_was(model):
    before = everything(model)
    yield
    assert_untouched(model, before)


WAYS = [("one", 1), ("three", 1), ("each", 3)]


@pytest.mark.parametrize(
    ("how", "name", "way"),
    [
        pytest.param(how, name, WAYS[(i + j) % 3], marks=pytest.mark.rest if (i + j) % 2 else ())
        for i, how in enumerate(HOW)
        for j, name in enumerate(zoo.MODELS)
    ],
)
def test_bits_are_the_plain_loops_and_nothing_is_changed(how, name, way):
    partition, num_devices = way
    task = task_of(zoo.MODELS[name], partition=partition)
    orchestra = orchestra_of(memory="8MiB", num_devices=num_devices, chaos=4)
    generators = capture()
    with left_as_it_was(task.model):
        found = outcome(how, orchestra, task, zoo.MODELS[name]()[2])  # most of the loaders shuffle
        assert capture().same_as(generators)
    assert_same(found, plain(how, task, zoo.MODELS[name]()[2]))


@covering(strength=1, how=HOW, precision=["bfloat16", "float16"])
def test_a_narrow_precision_is_the_tasks(how, precision):
    task = task_of(zoo.dropout, precision=precision)
    narrow = reference.Narrow(copy.deepcopy(task.model).eval(), task.loss_fn, reference.DTYPES[precision], None)
    expected = plain(how, task, zoo.dropout()[2], narrow.evaluated())
    assert_same(outcome(how, exact.orchestrator([task]), task, zoo.dropout()[2]), expected)


class Noise(nn.Module):
    """Draws in evaluation too, from torch and, if asked, from numpy."""

    def __init__(self, of_numpy=False):
        super().__init__()
        self.of_numpy = of_numpy

    def forward(self, x):
        return x + 0.1 * torch.randn_like(x) * (float(np.random.rand()) if self.of_numpy else 1.0)


@covering(strength=1, how=HOW, of_numpy=[True, False])
def test_layers_and_loader_draw_from_a_fresh_stream_of_the_tasks_seed(how, of_numpy):
    def build():
        model, loss_fn, loader = zoo.dropout()
        return nn.Sequential(*model[:3], Noise(of_numpy), *model[3:]), loss_fn, loader

    task = task_of(build)
    orchestra = exact.orchestrator([task], num_devices=2, chaos=1)
    np.random.seed(3)
    found = [outcome(how, orchestra, task, zoo.dropout()[2]) for _ in range(2)]
    generators = capture()
    assert_same(found[0], plain(how, task, zoo.dropout()[2]))
    np.random.set_state(generators.numpy)
    assert_same(found[1], found[0])


class Counter(nn.Module):
    """Writes to its buffer in evaluation too, and binds it anew at each second call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.calls % 2:
            self.calls = self.calls + 1
        else:
            self.calls += 1
        return x * self.calls


@either
def test_what_layers_write_to_buffers_is_seen_by_later_batches_and_dropped(how):
    model = nn.Sequential(nn.Linear(WIDTH, 8), Counter(), nn.Linear(8, 3))
    task = of_classes(model, partitioner=Presharded([1, 2, 3]))
    buffer = model[1].calls
    with left_as_it_was(model):
        found = outcome(how, orchestra_of(), task, batches(3, 3, 3))
    assert model[1].calls is buffer
    assert_same(found, plain(how, task, batches(3, 3, 3), copy.deepcopy(model)))


@either
def test_a_larger_batch_later_on_is_computed_on_finer_shards(how):
    task = of_classes(dense(norm=True))
    found = outcome(how, orchestra_of(memory="70KiB"), task, batches(8, 200, 8))
    assert_same(found, plain(how, task, batches(8, 200, 8)))


# What goes wrong: the model is given back as it was


class Picky(nn.Module):
    """Calls back for batches of five samples."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        if len(x) == 5:
            self.call()
        return x


def boom():
    raise ZeroDivisionError("boom")


def outputs_until(error, how, model, loader, *, num_devices=1, **options):
    """The call raises and gives the model back; the outputs that a prediction gave before."""
    task, orchestra, found = of_classes(model), orchestra_of(num_devices=num_devices), []

    def call():
        if how == "evaluate":
            orchestra.evaluate(task, loader, **options)
        else:
            found.extend(orchestra.predict(task, loader))

    with left_as_it_was(model), pytest.raises(error):
        call()
    return found


def picky(call):
    model = dense()
    model.insert(4, Picky(call))
    return model


@either
def test_a_layer_that_raises_at_a_later_batch(how):
    found = outputs_until(ZeroDivisionError, how, picky(boom), batches(4, 4, 5, 4), num_devices=2)
    assert_same(found, plain(how, of_classes(dense()), batches(4, 4)) if how == "predict" else [])


@covering(strength=1, how=HOW, num_read=[0, 1, 3])
def test_a_loader_that_raises(how, num_read):
    def loader():
        yield from batches(*[4] * num_read)
        boom()

    found = outputs_until(ZeroDivisionError, how, dense(), loader())
    assert len(found) == (num_read if how == "predict" else 0)


@either
def test_ctrl_c_gives_the_model_back(how):
    pressed = []

    def press():
        if not pressed:  # a second one would end the process
            pressed.append(True)
            _thread.interrupt_main()

    found = outputs_until(KeyboardInterrupt, how, picky(press), batches(4, 5, 4, 4), num_devices=2)
    assert len(found) == (how == "predict")


@either
def test_active_autocast_is_refused(how):
    task = task_of(zoo.mlp)
    orchestra = exact.orchestrator([task])
    with torch.autocast("cpu", dtype=torch.bfloat16), refused(RuntimeError, says=f"{how} autocast"):
        outcome(how, orchestra, task, zoo.mlp()[2])
