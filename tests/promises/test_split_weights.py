"""Split weights give the bits of whole ones, are seen where those are promised, and take the DRAM that a plan says."""

import copy
import io
import pickle
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import Callback, HostOutOfMemory, KeepBest, ModelTask
from partitioners import Presharded
from tests import exact, zoo
from tests.covering import covering
from tests.promises.test_precision import both
from tests.refused import refused

SPLIT = {"precision": "bfloat16", "own": {"split_weights": True}}


@pytest.mark.parametrize("name", zoo.MODELS)
def test_every_model_of_the_zoo_gives_the_bits_of_the_plain_casts(name):
    both(name, optimizer=torch.optim.AdamW, **SPLIT)


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        partial(torch.optim.SGD, momentum=0.9),
        partial(torch.optim.Adam, fused=True, amsgrad=True),
        torch.optim.Adafactor,
        torch.optim.RMSprop,
    ],
    ids=["sgd", "momentum", "fused", "adafactor", "rmsprop"],
)
def test_every_way_of_an_update_gives_them(optimizer):
    both("tied", optimizer=optimizer, max_grad_norm=0.5, accumulation_steps=2, **SPLIT)


@pytest.mark.rest
def test_an_update_of_several_threads_gives_them():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        both("tied", optimizer=partial(torch.optim.AdamW, fused=True), num_devices=1, chaos=None, **SPLIT)
    finally:
        torch.set_num_threads(before)


class Rebinding(torch.optim.SGD):
    """Gives parameters other memory in a step, decays those without a gradient, and raises once."""

    raises = 0

    @torch.no_grad()
    def step(self):
        weights = []
        for group in self.param_groups:
            for parameter in group["params"]:
                change = 0.1 * parameter if parameter.grad is None else parameter.grad
                parameter.data = parameter.data - group["lr"] * change
                weights.append(parameter)
        # In training, not as it is tried on small ones.
        if Rebinding.raises and any(each.numel() == 500 * 5 for each in weights):
            Rebinding.raises -= 1
            raise OSError("once")


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(37, 301), nn.LayerNorm(301), nn.GELU(), nn.Linear(301, 500), nn.Linear(500, 5))


def trained(split_weights, *callbacks, dram=None, saved=None, epochs=2, **settings):
    """Train a model for three steps an epoch; the model, the report and the callbacks."""
    network = model()
    torch.manual_seed(5)
    batches = [(torch.randn(4, 37), torch.randint(0, 5, (4,))) for _ in range(3)]
    settings = {"optimizer": torch.optim.AdamW, "partitioner": Presharded([1, 3, 5]), **settings}
    settings |= {"precision": "bfloat16", "split_weights": split_weights}
    made = [make(network) for make in callbacks]
    task = ModelTask(network, F.cross_entropy, batches, 1e-2, epochs, seed=1, callbacks=made, **settings)
    orchestra = exact.silent([task], "64MiB", dram=dram, checkpoint_dir=saved)
    report = orchestra.train_models(resume=saved is not None and any(saved.iterdir()))
    report.raise_failures()
    return network, report, made


def assert_same(actual, expected):
    exact.assert_same_state(actual[0].state_dict(), expected[0].state_dict())
    first, second = actual[1].tasks["task-0"], expected[1].tasks["task-0"]
    assert first.losses == second.losses
    assert (first.ema_state is None) == (second.ema_state is None)
    exact.assert_same_state(first.ema_state or {}, second.ema_state or {})


OPTIONS = {
    "early release": {"early_release": True},
    "early release, room for all": {"early_release": "all"},
    "averages": {"ema_decay": 0.9},
    "best": {"keep_best": KeepBest("loss", "max")},
    "own optimizer": {"optimizer": Rebinding},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_that_read_weights_give_them(options):
    assert_same(trained(True, **options), trained(False, **options))


def test_an_update_that_raises_and_is_tried_again_starts_from_the_weights_before():
    options = {"optimizer": Rebinding, "max_retries": 1}
    expected = trained(False, **options)
    Rebinding.raises = 1
    actual = trained(True, **options)
    assert len(actual[1].tasks["task-0"].retries) == 1
    assert_same(actual, expected)


@covering(
    first_and_second=[(True, False), (False, True), (True, True)],
    options=[{"ema_decay": 0.9}, {"keep_best": KeepBest("loss", "max")}],
    strength=1,
)
def test_a_task_that_is_saved_goes_on_with_or_without(tmp_path, first_and_second, options):
    first, second = first_and_second
    trained(first, saved=tmp_path, epochs=1, **options)
    assert_same(trained(second, saved=tmp_path, **options), trained(False, **options))


class Reads(Callback):
    """Reads weights in every way that it knows."""

    def __init__(self, network):
        self.network, self.seen, self.alias = network, [], network.state_dict()

    def on_step(self, report):
        network, weight = self.network, self.network[3].weight
        saved = io.BytesIO()
        torch.save(network.state_dict(), saved)
        self.seen += [
            [parameter.detach().norm() for parameter in network.parameters()],
            network(torch.ones(1, 37)),
            network[4].weight.tolist(),
            torch.from_numpy(weight.detach().numpy().copy()),
            copy.deepcopy(network)[0].weight,
            pickle.loads(pickle.dumps(network[0].weight)),
            torch.load(io.BytesIO(saved.getvalue()))["4.bias"],
            network[0].weight.data[3:5].T.clone(),
            network.state_dict()["3.weight"].clone(),
            self.network[0].weight.untyped_storage().nbytes() > 0,
        ]


class ReadsSome(Reads):
    def on_step(self, report):
        if report.steps % 3 == 0:
            self.seen.append(self.network[3].weight.detach().clone())
        self.alias = self.network.state_dict()

    def on_epoch_begin(self, report, epoch):
        self.seen.append(self.network[0].weight.detach().clone())

    def on_task_end(self, report):
        self.seen += [value.clone() for value in self.network.state_dict().values()]


@pytest.mark.rest
@pytest.mark.parametrize("kind", [Reads, ReadsSome])
def test_callbacks_see_the_weights_of_the_last_step(kind):
    actual, expected = trained(True, kind), trained(False, kind)
    assert_same(actual, expected)
    torch.testing.assert_close(actual[2][0].seen, expected[2][0].seen, rtol=0, atol=0)


def test_tensors_that_a_callback_has_kept_are_the_trained_weights_in_the_end():
    network, _, (callback,) = trained(True, ReadsSome)
    assert all(torch.equal(callback.alias[name], value) for name, value in network.state_dict().items())


class Writes(Callback):
    def __init__(self, network, write):
        self.network, self.write = network, write

    def on_step(self, report):
        self.write(self.network[3].weight)


def by_numpy(weight):
    weight.detach().numpy()[7, 3] += 1


@pytest.mark.parametrize(
    "write", [by_numpy, lambda weight: weight.data.mul_(2), lambda weight: weight.detach().zero_()]
)
def test_what_a_callback_writes_to_weights_is_taken_over(write):
    found = [trained(is_split, partial(Writes, write=write)) for is_split in (True, False)]
    assert_same(*found)
    assert found[0][1].tasks["task-0"].losses != trained(True)[1].tasks["task-0"].losses


def test_another_thread_reads_zeros():
    seen = []

    class Asks(Callback):
        def __init__(self, network):
            self.network = network

        def on_step(self, report):
            thread = threading.Thread(target=lambda: seen.append(self.network[3].weight.detach().clone()))
            thread.start()
            thread.join()

    trained(True, Asks)
    row = seen[-1].flatten()[4096:-4096]  # pages at its ends are its neighbours', too
    assert not row.any()


def linear(num_layers, width=256):
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))


@pytest.mark.rest
@pytest.mark.parametrize(("options", "per_parameter"), [({}, 14), ({"early_release": True}, 12)])
def test_the_plan_says_the_bytes_of_each_parameter(options, per_parameter):
    num_layers, size = 8, 256**2
    batch = torch.ones(2, 256)
    for split, more in ((True, 0), (False, 2)):
        task = ModelTask(
            linear(num_layers), F.mse_loss, [(batch, batch)], 1e-3, optimizer=torch.optim.AdamW,
            precision="bfloat16", split_weights=split, partitioner=Presharded(list(range(1, num_layers + 1))), **options
        )  # fmt: skip
        orchestra = exact.silent([task], "16MiB")
        dram = orchestra.generate().tasks["task-0"].dram
        loans = 2 * 2 * size if options else 0  # gradients of two shards
        steps = 4 * num_layers  # AdamW counts them for each parameter
        expected = (per_parameter + more) * num_layers * size + loans + steps
        assert sum(dram[part] for part in ("weights", "casts", "gradients", "optimizer")) == expected
        orchestra.train_models().raise_failures()


def test_weights_are_split_where_dram_is_too_small_otherwise():
    _, whole, _ = expected = trained(False)
    assert not any("split" in message for message in whole.messages)
    num_bytes = [bytes_of(split) for split in (True, False)]
    limit = sum(num_bytes) // 2
    assert_same(trained(None, dram=num_bytes[1]), expected)
    actual = trained(None, dram=limit)
    assert any("DRAM" in message and "float32" in message for message in actual[1].messages)
    assert_same(actual, expected)
    with pytest.raises(HostOutOfMemory):
        trained(False, dram=limit)
    with pytest.raises(HostOutOfMemory):
        trained(None, dram=limit, read_ahead=False)  # its loader may read weights


def bytes_of(split_weights):
    task = ModelTask(
        model(), F.cross_entropy, [(torch.randn(4, 37), torch.randint(0, 5, (4,)))], 1e-2, precision="bfloat16",
        split_weights=split_weights, optimizer=torch.optim.AdamW, partitioner=Presharded([1, 3, 5])
    )  # fmt: skip
    return exact.silent([task], "64MiB").generate().tasks["task-0"].dram_bytes


@pytest.mark.parametrize(
    "options",
    [{"precision": "float16"}, {"optimizer_scope": "task"}, {"read_ahead": False}],
    ids=str,
)
def test_options_that_need_float32_weights_are_refused(options):
    with refused(says=f"split_weights {next(iter(options))}="):
        ModelTask(model(), F.cross_entropy, [], split_weights=True, **{"precision": "bfloat16", **options})


def test_hooks_on_parameters_are_refused():
    network = model()
    network[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    batch = (torch.randn(4, 37), torch.randint(0, 5, (4,)))
    task = ModelTask(network, F.cross_entropy, [batch], precision="bfloat16", split_weights=True)
    with refused(task="task-0", says="split_weights hooks"):
        exact.silent([task]).generate()
