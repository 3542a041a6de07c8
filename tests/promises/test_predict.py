"""`orchestra.predict`: outputs of models larger than the device, one by one, with the bits of the model itself.

What it has in common with `evaluate` is in test_inference.py.
"""

import copy
import gc
import random
import signal
import threading
import weakref
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hydra_engine import Model, ModelTask
from hydra_engine.data.streams import capture, install
from hydra_engine.errors import ShardDoesNotFit
from partitioners import Balanced, Presharded, profile_evaluation, shard_bytes
from tests import exact, reference, zoo
from tests.covering import covering
from tests.promises.test_inference import (
    WIDTH,
    Noise,
    assert_same,
    assert_untouched,
    dense,
    everything,
    inputs_of,
    orchestra_of,
)
from tests.promises.test_skips import images, unet
from tests.refused import refused


def plain(model, loader, seed=0):
    """Its outputs, from a copy in eval()."""
    model = copy.deepcopy(model).eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        return [model(inputs) for inputs in loader]


# The outputs


class Fans(nn.Module):
    """Gives containers: one tensor twice, a view, an expanded one, integers, and what is no tensor."""

    def forward(self, x):
        return {"x": (x, x), "more": [x.t(), x[:1].expand(3, -1), x.argmax(1)], "text": "of the model", "none": None}


class Picks(nn.Module):
    def forward(self, value):
        first, second = value["x"]
        assert first is second
        return value | {"sum": first + second.relu(), "x": first}


@pytest.mark.parametrize("ends", [[4], [1, 2, 3, 4]])
def test_containers_cross_shards_and_come_out(ends):
    model = nn.Sequential(nn.Linear(WIDTH, 8), Fans(), Picks(), nn.Identity())
    inputs = inputs_of(4, 4, 2)
    assert_same(list(orchestra_of().predict(model, inputs, partitioner=Presharded(ends))), plain(model, inputs))


def test_inputs_may_be_containers_and_unpack_picks_them():
    class Adds(nn.Module):
        def forward(self, value):
            return value["a"] + value["b"][0]

    model = nn.Sequential(Adds(), nn.Linear(WIDTH, 3))
    batches = [({"a": x, "b": (x * 2, "text")}, torch.zeros(len(x))) for x in inputs_of(4, 3)]
    found = list(orchestra_of().predict(model, batches, unpack=lambda batch: batch[0]))
    assert_same(found, plain(model, [inputs for inputs, _ in batches]))


def test_a_model_that_gives_its_input_gives_a_copy_of_its_own():
    model, inputs = nn.Sequential(nn.Identity(), nn.Dropout(0.5)), inputs_of(4, 4)
    found = list(orchestra_of().predict(model, inputs))
    assert_same(found, inputs)
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(found, inputs, strict=True))


def test_layers_that_work_in_place_leave_the_batch_alone():
    model, inputs = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, 3), nn.ReLU(inplace=True)), inputs_of(4, 4)
    kept = copy.deepcopy(inputs)
    found = list(orchestra_of().predict(model, inputs))
    assert_same(inputs, kept)
    assert_same(found, plain(model, kept))


@pytest.mark.rest
def test_values_that_skip_layers_arrive():
    model, inputs = unet(), [x for x, _ in images()]
    orchestra = orchestra_of(memory="2MiB", num_devices=2, chaos=3)
    assert_same(
        list(orchestra.predict(model, inputs, partitioner=Presharded(list(range(1, 10))))), plain(model, inputs)
    )


def test_layers_and_loader_draw_from_the_stream_of_the_seed():
    model = nn.Sequential(nn.Linear(WIDTH, 8), Noise(), nn.Linear(8, 8), Noise())
    samples = TensorDataset(torch.cat(inputs_of(11)))

    def loader():
        return DataLoader(samples, batch_size=3, shuffle=True)

    def inputs():  # a generator expression would open the loader at once
        for (x,) in loader():
            yield x

    orchestra = orchestra_of(num_devices=2, chaos=2)
    for seed in (0, 5):
        found = list(orchestra.predict(model, loader(), unpack=lambda batch: batch[0], seed=seed))
        assert_same(found, plain(model, inputs(), seed))


@pytest.mark.parametrize("model", [[nn.Linear(WIDTH, 3)], Model([nn.Tanh()]), nn.Sequential(nn.Linear(WIDTH, 3))])
def test_anything_that_model_takes_is_taken(model):
    inputs = inputs_of(4)
    whole = model if isinstance(model, nn.Module) else nn.Sequential(*model)
    assert_same(list(orchestra_of().predict(model, inputs)), plain(whole, inputs))


def attention():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 2, 64, batch_first=True) for _ in range(3)))


MODELS = {  # each with its inputs, and how it is predicted
    "attention, whose fast path is that of eval": (attention(), [x[None] for x in inputs_of(5, 7)], {}),
    "narrow weights": (dense().bfloat16(), [x.bfloat16() for x in inputs_of(4, 3)], {}),
    "frozen weights": (dense().requires_grad_(False), inputs_of(4, 4), {}),
    "no weights": (nn.Sequential(nn.Tanh(), nn.Flatten()), inputs_of(4, 4), {}),
    "optimal partition": (dense(), inputs_of(6, 6), {"partitioner": "optimal"}),
    "balanced partition": (dense(), inputs_of(6, 6), {"partitioner": Balanced(3)}),
}


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_the_models_own(name):
    model, inputs, options = MODELS[name]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    options = {"partitioner": Presharded(list(range(1, len(model) + 1)))} | options
    assert_same(list(orchestra_of().predict(model, inputs, **options)), plain(model, inputs))
    assert [parameter.requires_grad for parameter in model.parameters()] == flags


def test_a_narrow_precision_may_be_asked_for():
    model, inputs = dense(norm=True), inputs_of(4, 3)
    narrow = reference.Narrow(copy.deepcopy(model).eval(), None, torch.bfloat16, None)
    with torch.no_grad():
        expected = [narrow.evaluated()(x) for x in inputs]
    assert_same(list(orchestra_of().predict(model, inputs, precision="bfloat16")), expected)


@pytest.mark.rest
def test_a_model_that_was_trained_predicts_with_its_weights():
    task, model = exact.task_of("dropout")
    orchestra = exact.orchestrator([task], num_devices=2)
    orchestra.train_models()
    inputs = [x for x, _ in DataLoader(zoo.dropout()[2].dataset, batch_size=7)]
    assert_same(list(orchestra.predict(model, inputs)), plain(model, inputs))
    exact.assert_same_state(zoo.state(model), exact.expected("dropout").state)


# Memory


def test_a_model_larger_than_the_device_predicts_within_it():
    model, inputs = dense(12), inputs_of(8, 8, 5)
    costs = profile_evaluation(model, inputs[0])
    memory = max(shard_bytes(costs, k, k + 1) for k in range(len(costs)))
    assert sum(parameter.nbytes for parameter in model.parameters()) > 7 * memory
    assert_same(list(orchestra_of(memory=memory).predict(model, inputs)), plain(model, inputs))
    with refused(ShardDoesNotFit, task="predict", layer="Linear", says="batches"):
        orchestra_of(memory=memory // 2).predict(model, inputs)


def test_a_batch_too_large_for_a_layer_alone_is_refused():
    model, inputs = dense(), inputs_of(8, 1000)
    before, outputs = everything(model), orchestra_of(memory="70KiB").predict(model, inputs)
    assert_same([next(outputs)], plain(model, inputs[:1]))
    with refused(ShardDoesNotFit, task="predict", says="smaller batches whole"):
        next(outputs)
    assert_untouched(model, before)


def test_a_task_s_batches_are_predicted_as_its_validation_takes_them():
    model, inputs = dense(), inputs_of(4, 3)
    batches = [{"x": x, "y": torch.zeros(len(x))} for x in inputs]
    task = ModelTask(model, F.mse_loss, batches, unpack=lambda batch: (batch["x"], batch["y"]), name="a", seed=0)
    orchestra = exact.silent([task], "1MiB")
    for which in (task, "a"):
        assert_same(list(orchestra.predict(which, batches)), plain(model, inputs))


# One by one


class Loader:
    """Counts what is asked of it."""

    def __init__(self, *sizes):
        self.sizes, self.num_read = sizes, 0

    def __iter__(self):
        for inputs in inputs_of(*self.sizes):
            self.num_read += 1
            yield inputs


class Watched(nn.Module):
    """Counts its calls, over all copies."""

    calls: ClassVar[list] = []

    def forward(self, x):
        self.calls.append(1)
        return x


def test_outputs_come_as_they_are_asked_for_and_the_loader_is_read_one_batch_ahead():
    model, loader = nn.Sequential(nn.Linear(WIDTH, 8), Watched(), nn.Linear(8, 3)), Loader(4, 4, 4, 4, 4)
    expected = plain(nn.Sequential(model[0], model[2]), inputs_of(*loader.sizes))
    outputs = orchestra_of(num_devices=2).predict(model, loader, partitioner=Presharded([1, 2, 3]))
    assert loader.num_read == 1  # it was planned for
    planned = len(Watched.calls)
    for k, output in enumerate(outputs):
        assert torch.equal(output, expected[k])
        assert loader.num_read == min(k + 2, 5)
        assert len(Watched.calls) == planned + k + 1  # nothing is computed while an output is held
    assert k == 4


def test_outputs_are_not_kept():
    seen = []
    for output in orchestra_of().predict(dense(), inputs_of(4, 4, 4, 4)):
        assert [ref() for ref in seen] == [None] * len(seen)
        seen.append(weakref.ref(output))
        del output
        assert seen[-1]() is None
    assert len(seen) == 4


class Draws:
    """A loader that draws from every generator for each batch."""

    def __iter__(self):
        for _ in range(6):
            yield torch.randn(3, WIDTH) + random.random() + np.random.rand()


class DrawsFromAll(nn.Module):
    """Takes the process-wide generators."""

    def forward(self, x):
        return x * random.random() + torch.randn_like(x) * np.random.rand()


@pytest.mark.parametrize("layer", [nn.Identity, DrawsFromAll])
def test_what_the_caller_draws_meanwhile_is_what_it_would_draw_alone(layer):
    def draw():
        return torch.rand(2).tolist(), random.random(), np.random.rand()

    model = nn.Sequential(nn.Linear(WIDTH, 8), layer(), nn.Linear(8, 3))
    orchestra = orchestra_of(num_devices=2, chaos=3)
    start = capture()
    alone = [draw() for _ in range(7)]
    install(start)
    predicted, drawn = [], [draw()]
    for output in orchestra.predict(model, Draws(), partitioner=Presharded([1, 2, 3])):
        predicted.append(output)
        drawn.append(draw())
    assert drawn == alone
    install(start)
    draw()
    assert_same(predicted, list(orchestra.predict(model, Draws())))


def test_two_predictions_may_take_turns():
    models = [dense(), dense(2, norm=True)]
    inputs = [inputs_of(4, 3, 2), inputs_of(5, 5, 5)]
    pairs = zip(*(orchestra_of().predict(m, x) for m, x in zip(models, inputs, strict=True)), strict=True)
    expected = zip(*(plain(m, x) for m, x in zip(models, inputs, strict=True)), strict=True)
    assert_same(list(pairs), list(expected))


def test_under_inference_mode_outputs_and_weights_are_ordinary():
    model, inputs = dense(), inputs_of(4, 4, 4)
    with torch.inference_mode():
        outputs = orchestra_of().predict(model, inputs)
        found = [next(outputs), next(outputs)]
        assert torch.is_inference_mode_enabled()
        outputs.close()
    assert_same(found, plain(model, inputs[:2]))
    assert not any(tensor.is_inference() for tensor in (*found, *zoo.state(model).values()))


# Ended early


@pytest.mark.rest
@covering(strength=1, how=["close", "del", "throw"], num_taken=[0, 1, 5])
def test_ended_early_it_gives_the_model_back_and_leaves_no_thread(num_taken, how):
    model = dense(norm=True)
    before, threads = everything(model), set(threading.enumerate())
    orchestra = orchestra_of(num_devices=2, chaos=num_taken)
    outputs = orchestra.predict(model, Loader(4, 4, 4, 4, 4))
    for _ in range(num_taken):
        next(outputs)
    if how == "close":
        outputs.close()
    elif how == "throw":
        with pytest.raises(ZeroDivisionError):
            outputs.throw(ZeroDivisionError)
    del outputs
    gc.collect()
    assert_untouched(model, before)
    assert set(threading.enumerate()) <= threads
    assert_same(list(orchestra.predict(model, inputs_of(4))), plain(model, inputs_of(4)))  # nothing is held


def test_the_loaders_iterator_is_closed():
    closed = []

    def loader():
        try:
            yield from inputs_of(4, 4, 4)
        finally:
            closed.append(True)

    outputs = orchestra_of().predict(dense(), loader())
    next(outputs)
    outputs.close()
    assert closed == [True]


def test_while_outputs_are_to_come_the_orchestrator_does_nothing_else():
    orchestra, model = orchestra_of(), dense()
    outputs = orchestra.predict(model, inputs_of(4, 4))
    next(outputs)
    calls = {"predict": lambda: orchestra.predict(model, inputs_of(4))}
    calls |= {name: getattr(orchestra, name) for name in ("train_models", "generate")}
    for name, call in calls.items():
        with refused(RuntimeError, says=name):
            call()
    outputs.close()
    orchestra.train_models()


@pytest.mark.parametrize("loader", [[], DataLoader(TensorDataset(torch.ones(2, 3)), 5, drop_last=True)])
def test_no_batches_give_no_outputs(loader):
    assert list(orchestra_of().predict(dense(), loader)) == []


# What goes wrong


def test_ctrl_c_between_outputs_is_the_callers():
    outputs = orchestra_of().predict(dense(), inputs_of(4, 4, 4))
    next(outputs)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert len(list(outputs)) == 2


class TakesIds(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, input_ids, mask=None):
        return self.linear(input_ids)


def test_a_task_of_batches_with_labels_predicts_those_without():
    (x,) = inputs_of(3)
    model = TakesIds()
    task = ModelTask(Model(model), F.mse_loss, [{"input_ids": x, "labels": torch.ones(3, 2)}])
    found = list(orchestra_of().predict(task, [{"input_ids": x}]))
    with torch.no_grad():
        assert torch.equal(found[0], model(x))
