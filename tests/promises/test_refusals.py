"""Bad input is refused before any training, with a message that names the value."""

import copy
import re
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hydra_engine import EmulatedDevice, Model, ModelOrchestrator, ModelTask
from partitioners import Presharded
from tests import exact, reference, zoo

REFUSALS = (ValueError, TypeError, RuntimeError)
SIZE = re.compile(r"\d[\d,_.]*\s?(?:[KMGT]i?B|B\b|bytes)")


def layers():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)]


def samples(num_samples=8, batch_size=4):
    dataset = TensorDataset(torch.ones(num_samples, 6), torch.zeros(num_samples, dtype=torch.long))
    return DataLoader(dataset, batch_size=batch_size)


def refused(match, *builds, **options):
    """ModelTask, ModelOrchestrator or generate() refuses, and no model has changed. Returns the message."""
    models = []

    def generate():
        tasks = [build(models) for build in builds]
        orchestra = ModelOrchestrator(tasks, **{"devices": [EmulatedDevice(memory="8MiB")], **options})
        orchestra.verbose = 0
        orchestra.generate()

    with pytest.raises(REFUSALS, match=match) as caught:
        generate()
    for model, before in models:
        exact.assert_same_state(zoo.state(model), before)
    return str(caught.value)


def task(model=None, loss_fn=F.cross_entropy, loader=None, lr=0.1, epochs=1, **options):
    """A build for `refused`: a small valid task, but for what is given."""

    def build(models):
        user_model = nn.Sequential(*layers()) if model is None else model
        if isinstance(user_model, nn.Module):
            models.append((user_model, {name: tensor.clone() for name, tensor in zoo.state(user_model).items()}))
        return ModelTask(user_model, loss_fn, samples() if loader is None else loader, lr, epochs, **options)

    return build


def test_the_task_that_the_refusals_start_from_is_accepted():
    orchestra = exact.orchestrator([task()([])])
    orchestra.generate()
    assert orchestra.train_models().tasks["task-0"].status == "finished"


# Tasks


def test_empty_task_list():
    refused("(?i)task")


def test_two_tasks_of_one_name():
    refused("twin", task(name="twin"), task(name="twin"))


def test_name_equal_to_another_tasks_default_name():
    """The second task would be "task-1" by default: refused or sorted out, never mixed up."""
    try:
        orchestra = exact.orchestrator([task(name="task-1")([]), task()([])])
    except ValueError:
        return
    assert len(orchestra.train_models().tasks) == 2


@pytest.mark.parametrize("epochs", [0, -1])
def test_epochs_below_one(epochs):
    refused(rf"(?i)epochs.*{epochs}", task(epochs=epochs))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("accumulation_steps", 0),
        ("accumulation_steps", -3),
        ("max_grad_norm", -0.5),
        ("precision", "float8"),
        ("loss_reduction", "median"),
        ("lr_scheduler_interval", "fortnight"),
    ],
)
def test_option_out_of_range(option, value):
    refused(rf"(?s){option}.*{re.escape(str(value))}", task(**{option: value}))


def test_unknown_option():
    with pytest.raises(TypeError, match="momentum"):
        task(momentum=0.9)([])


def test_trainable_parameter_in_two_tasks():
    shared = layers()
    refused("(?i)shar", task(nn.Sequential(*shared)), task(nn.Sequential(*shared[:3], nn.Linear(6, 3))))


def test_trainable_parameters_in_the_loss():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, outputs, target):
            return self.scale * F.cross_entropy(outputs, target)

    refused("(?i)loss", task(loss_fn=Scaled()))


def test_loader_object_in_two_tasks_with_a_generator():
    shared = DataLoader(samples().dataset, batch_size=4, shuffle=True, generator=torch.Generator())
    refused("(?i)loader", task(loader=shared), task(loader=shared))
    refused("(?i)loader", task(validation=shared), task(validation=shared))
    refused("(?i)loader", task(loader=shared), task(validation=shared))


def test_validation_loader_with_persistent_workers_in_two_tasks():
    shared = DataLoader(samples().dataset, batch_size=4, num_workers=1, persistent_workers=True)
    refused("persistent|workers", task(validation=shared), task(validation=shared))


# Data


def test_empty_loader():
    refused("(?i)loader", task(loader=[]))
    refused("(?i)loader", task(loader=DataLoader(samples().dataset, batch_size=20, drop_last=True)))


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param((torch.ones(4, 6), torch.zeros(4, dtype=torch.long), torch.ones(4)), id="triple"),
        pytest.param((torch.ones(4, 6),), id="single"),
        pytest.param(torch.ones(4, 6), id="tensor"),
        pytest.param(torch.ones(2, 6), id="tensor of two rows"),  # unpacks like a pair
        pytest.param({"inputs": torch.ones(4, 6), "target": torch.zeros(4)}, id="dict of two"),  # and so do its keys
        pytest.param(3, id="number"),
    ],
)
def test_loader_item_that_is_not_a_pair(batch):
    refused("(?i)unpack", task(loader=[batch, batch]))


# Models


class Net(nn.Module):
    """Children a, b, c, d, and a forward of its own."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.c, self.d = layers()
        self.own = forward

    def forward(self, x):
        return self.own(self, x)


def assert_trains_as_plain(made):
    """A module's own forward, whatever it is, becomes layers that train to the bits of plain PyTorch."""
    torch.manual_seed(3)
    net = made()
    plain = copy.deepcopy(net)
    expected = reference.train(plain, F.cross_entropy, samples(), seed=1, lr=0.1)
    run = ModelTask(net, F.cross_entropy, samples(), 0.1, seed=1)
    exact.assert_as_expected(exact.run([run]), "task-0", net, exact.Expected(expected.losses, [], zoo.state(plain)))


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(lambda net, x: net.d(net.c(F.relu(net.b(net.a(x))))), id="functional op between children"),
        pytest.param(lambda net, x: net.d(net.c(net.b(net.a(x / 3)))), id="functional op before the first"),
        pytest.param(lambda net, x: F.softmax(net.d(net.c(net.b(net.a(x)))), -1), id="functional op after the last"),
        pytest.param(lambda net, x: net.d(net.a(net.b(net.c(x)))), id="another order"),
        pytest.param(lambda net, x: net.d(net.b(net.a(x))), id="a child left out"),
        pytest.param(lambda net, x: net.d(net.c(net.c(net.b(net.a(x))))), id="a child used twice"),
        pytest.param(lambda net, x: net.d(x + net.c(net.b(net.a(x)))), id="a skip connection"),
        pytest.param(lambda net, x: net.d(net.c(net.b(net.a(x))).detach()), id="a detached output"),
    ],
)
def test_forward_that_is_not_its_children_in_order_becomes_layers(forward):
    assert_trains_as_plain(lambda: Net(forward))


def test_forward_that_is_a_closure_over_the_model():
    net = Net(None)
    net.forward = lambda x: net.d(F.relu(net.b(net.a(x))))
    refused("through a closure or a global", task(net))


def test_branch_on_a_value_that_the_model_computes():
    def forward(net, x):
        x = net.b(net.a(x))
        return net.d(net.c(x) if x.sum() > 0 else x)

    refused(r"test_refusals.py:\d+: return net.d\(net.c\(x\) if x.sum\(\) > 0 else x\)", task(Net(forward)))


class Staged(nn.Module):
    """A stem, stages, and a head; a forward of its own."""

    def __init__(self, forward, stages=None):
        super().__init__()
        self.stem, tanh, linear, head = layers()
        self.stages = nn.Sequential(tanh, nn.Sequential(linear, tanh)) if stages is None else stages
        self.head = head
        self.own = forward

    def forward(self, x):
        return self.own(self, x)


def each_stage(net, x):
    x = net.stem(x)
    for stage in net.stages:
        x = stage(x)
    return net.head(x)


def reversed_stages(net, x):
    x = net.stem(x)
    for stage in reversed(net.stages):
        x = stage(x)
    return net.head(x)


def residual_stages(net, x):
    x = net.stem(x)
    for stage in net.stages:
        x = x + stage(x)
    return net.head(x)


def first_parameters_type(net, x):
    return each_stage(net, x.to(next(net.parameters()).dtype))


class Backwards(nn.Sequential):
    def __iter__(self):
        return reversed(list(self._modules.values()))


def hooked():
    stages = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    stages.register_forward_hook(lambda module, args, output: 2 * output)
    return stages


@pytest.mark.parametrize(
    ("forward", "stages"),
    [
        pytest.param(reversed_stages, None, id="reversed"),
        pytest.param(residual_stages, None, id="skip connections"),
        pytest.param(lambda n, x: n.head(n.stages[0](n.stem(x))), None, id="left out"),
        pytest.param(each_stage, hooked(), id="hook that is not called"),
        pytest.param(each_stage, Backwards(nn.Tanh()), id="own iteration"),
        pytest.param(first_parameters_type, None, id="looks for parameters"),
        pytest.param(lambda n, x: n.head(n.stages(n.stem(x))) * n.head.in_features, None, id="attribute"),
    ],
)
def test_forward_that_runs_over_a_child_in_another_way_becomes_layers(forward, stages):
    assert_trains_as_plain(lambda: Staged(forward, stages))


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(each_stage, id="over the children"),
        pytest.param(lambda n, x: n.head(n.stages[1](n.stages[0](n.stem(x)))), id="by index"),
        pytest.param(lambda n, x: n.head(n.stages[1:](n.stages[:1](n.stem(x)))), id="by slices"),
        pytest.param(lambda n, x: n.head(n.stages(n.stem(x))), id="whole"),
    ],
)
def test_forward_that_runs_the_children_of_a_sequence_in_order_is_exact(forward):
    net, plain = Staged(forward), Staged(forward)
    expected = reference.train(plain, F.cross_entropy, samples(), seed=1, lr=0.1)
    run = ModelTask(net, F.cross_entropy, samples(), 0.1, seed=1, partitioner=Presharded([1, 2, 3]))
    exact.assert_as_expected(exact.run([run]), "task-0", net, exact.Expected(expected.losses, [], zoo.state(plain)))


def test_module_with_a_parameter_of_its_own():
    class Biased(Net):
        def __init__(self):
            super().__init__(lambda net, x: net.d(net.c(net.b(net.a(x + net.bias)))))
            self.bias = nn.Parameter(torch.zeros(6))  # the same output, and yet not its children alone

    assert_trains_as_plain(Biased)


def test_layer_that_closes_over_another_layers_weight():
    """A copy on a device would go on using the original."""
    first, *rest = layers()

    class Closure(nn.Module):
        def forward(self, x):
            return x @ first.weight

    refused("(?i)layer|closure|forward", task(nn.Sequential(first, Closure(), *rest)))


def test_what_is_not_a_model():
    for value in (3, "resnet", nn.Sequential(), [nn.Linear(2, 2), 3]):
        with pytest.raises(REFUSALS):
            Model(value)


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(reduction="none"), lambda outputs, target: outputs])
def test_loss_that_is_not_a_scalar(loss_fn):
    refused("(?i)scalar", task(loss_fn=loss_fn))


def test_model_without_trainable_parameters():
    refused("(?i)train|grad", task(nn.Sequential(*layers()).requires_grad_(False)))
    refused("(?i)train|parameters", task(nn.Sequential(nn.Flatten(), nn.Tanh())))


# Partitions


@pytest.mark.parametrize("end", [3, 5])
def test_presharded_that_does_not_end_at_the_number_of_layers(end):
    refused(rf"(?s)(?=.*\b{end}\b)(?=.*\b4\b)", task(partitioner=Presharded([2, end])))


@pytest.mark.parametrize("ends", [[2, 2, 4], [3, 2, 4], [0, 4], [-1, 4], [4, 4]])
def test_presharded_that_does_not_increase(ends):
    def build(models):
        return task(partitioner=Presharded(ends))(models)

    refused(re.escape(str(ends)), build)


def test_presharded_without_shards():
    refused(r"\[\]", lambda models: task(partitioner=Presharded([]))(models))


# Orchestrator and devices


def test_unknown_policy():
    refused(r"(?s)(?=.*longest)(?=.*round-robin)(?=.*sharded-lrtf)(?=.*fifo)", task(), policy="longest")


MALFORMED_SIZES = ["64 apples", "MiB", "", "-1MiB", "12QiB", "1e", "0x10", "nan", "infGiB"]


@pytest.mark.parametrize("size", MALFORMED_SIZES)
def test_malformed_size(size):
    with pytest.raises(ValueError, match=re.escape(size or "size")):
        EmulatedDevice(memory=size)


@pytest.mark.parametrize("size", [0, -1, 1.5])
def test_size_that_is_no_positive_int(size):
    with pytest.raises((ValueError, TypeError), match=re.escape(str(size))):
        EmulatedDevice(memory=size)


@pytest.mark.parametrize("size", ["lots", "12QiB", -1])
def test_malformed_buffer(size):
    def generate():
        orchestra = ModelOrchestrator([task()([])], devices=[EmulatedDevice(memory="8MiB")])
        orchestra.verbose = 0
        orchestra.buffer = size
        orchestra.generate()

    with pytest.raises((ValueError, TypeError), match=re.escape(str(size))):
        generate()


@pytest.mark.parametrize("bandwidth", [0, -1])
def test_bandwidth_below_one(bandwidth):
    with pytest.raises(ValueError, match=str(bandwidth)):
        EmulatedDevice(memory="8MiB", bandwidth=bandwidth)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has what is refused")
def test_cuda_device_without_cuda():
    refused("cuda:0", task(), devices=["cuda:0"])


@pytest.mark.parametrize("devices", [[], ["tpu:0"], [3]])
def test_what_is_not_a_device(devices):
    refused(re.escape(str(devices[0])) if devices else "(?i)device", task(), devices=devices)


# train_models()


class CallingLoader:
    """Calls back before its batch number 1; keeps what that raised."""

    def __init__(self):
        self.call, self.error = None, None

    def __len__(self):
        return 2

    def __iter__(self):
        for k, batch in enumerate(samples()):
            if k == 1:
                try:
                    self.call()
                except RuntimeError as error:
                    self.error = error
            yield batch


def test_train_models_twice_at_once():
    loader = CallingLoader()
    orchestra = exact.orchestrator([task(loader=loader)([])])
    loader.call = orchestra.train_models
    orchestra.generate()
    report = orchestra.train_models()
    assert isinstance(loader.error, RuntimeError)
    assert "train_models" in str(loader.error)
    assert report.tasks["task-0"].status == "finished"
    assert report.tasks["task-0"].steps == 2


def test_train_models_again_without_new_tasks():
    subject, model = exact.task_of("mlp", epochs=1)
    orchestra = exact.orchestrator([subject])
    orchestra.train_models()
    with pytest.raises(RuntimeError, match="task"):
        orchestra.train_models()
    exact.assert_same_state(zoo.state(model), exact.expected("mlp", epochs=1).state)


@pytest.mark.parametrize("method", ["generate", "train_models"])
def test_active_autocast(method):
    subject, model = exact.task_of("mlp", epochs=1)
    orchestra = exact.orchestrator([subject])
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
        getattr(orchestra, method)()
    if method == "train_models":
        exact.assert_same_state(zoo.state(model), zoo.state(zoo.mlp()[0]))


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_training_under_no_grad_works_or_is_refused(grad_mode):
    """Whatever the caller's grad mode, it never trains to other weights than plain PyTorch."""
    subject, model = exact.task_of("mlp", epochs=1)
    orchestra = exact.orchestrator([subject])
    with grad_mode():
        try:
            orchestra.train_models()
        except REFUSALS:
            exact.assert_same_state(zoo.state(model), zoo.state(zoo.mlp()[0]))
        else:
            exact.assert_same_state(zoo.state(model), exact.expected("mlp", epochs=1).state)


# Memory


def big_layer_in_the_middle():
    return nn.Sequential(nn.Linear(6, 512), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 3))  # the second: 1 MiB


@pytest.mark.parametrize("partitioner", [None, Presharded([1, 2, 3, 4])], ids=["Pilot", "Presharded"])
@pytest.mark.parametrize("memory", ["64KiB", "768KiB"])
def test_layer_that_cannot_fit_alone(partitioner, memory):
    """The largest shard's own need is above the budget: its weights alone take 1 MiB."""
    devices = [EmulatedDevice(memory=memory)]
    message = refused("(?i)fit|memory", task(big_layer_in_the_middle(), partitioner=partitioner), devices=devices)
    assert len(SIZE.findall(message)) >= 2, f"needed and available bytes: {message}"
    assert re.search("(?i)use |give |raise |reduce |smaller|more |larger|split", message), f"the remedy: {message}"


def test_model_that_needs_more_dram_than_the_machine_has(monkeypatch):
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "hydra_engine"]
    patched = [module for module in modules if hasattr(module, "available_dram_bytes")]
    assert patched, "hydra_engine.system.dram.available_dram_bytes says how much DRAM there is"
    for module in patched:
        monkeypatch.setattr(module, "available_dram_bytes", lambda: 200_000)
    message = refused("(?i)dram", task(big_layer_in_the_middle()))
    assert len(SIZE.findall(message)) >= 2, f"needed and available bytes: {message}"
    assert re.search("(?i)use |give |train |reduce |smaller|more |fewer|larger", message), f"the remedy: {message}"
