"""Models as users write them train to the bits of plain PyTorch, or are refused; and calls at the wrong time.

What is refused by one line of an error is in test_wrong_calls.py.
"""

import copy
import re
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from hydra_engine import EmulatedDevice, ModelTask
from hydra_engine.errors import HostOutOfMemory, ShardDoesNotFit
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.refused import refused

SIZE = re.compile(r"\d[\d,_.]*\s?(?:[KMGT]i?B|B\b|bytes)")


def layers():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)]


def samples():
    return DataLoader(TensorDataset(torch.ones(8, 6), torch.zeros(8, dtype=torch.long)), batch_size=4)


def task(model=None, loader=None, **options):
    model = nn.Sequential(*layers()) if model is None else model
    return ModelTask(model, F.cross_entropy, samples() if loader is None else loader, 0.1, **options)


def assert_refused(model, error=ValueError, *, devices=None, says="", **options):
    """Planning refuses the model, and leaves it as it was. Returns the message."""
    before = copy.deepcopy(zoo.state(model))
    with refused(error, says=says) as caught:
        exact.silent([task(model, **options)], "8MiB", devices=devices).generate()
    exact.assert_same_state(zoo.state(model), before)
    return str(caught.value)


def test_name_equal_to_another_tasks_default_name():
    """The second task would be "task-1" by default: refused or sorted out, never mixed up."""
    try:
        orchestra = exact.orchestrator([task(name="task-1"), task()])
    except ValueError:
        return
    assert len(orchestra.train_models().tasks) == 2


# Models


class Net(nn.Module):
    """Children a, b, c, d, and a forward of its own."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.c, self.d = layers()
        self.own = forward

    def forward(self, x):
        return self.own(self, x)


class Biased(Net):
    """A parameter beside its children, which changes no output at first."""

    def __init__(self):
        super().__init__(lambda net, x: net.d(net.c(net.b(net.a(x + net.bias)))))
        self.bias = nn.Parameter(torch.zeros(6))


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


IN_NET = ("a child used twice", "a skip connection", "own parameter", "residual stages", "hooked stages", "by slices")
MODELS = {
    "functional op between children": lambda: Net(lambda net, x: net.d(net.c(F.relu(net.b(net.a(x)))))),
    "functional op before the first": lambda: Net(lambda net, x: net.d(net.c(net.b(net.a(x / 3))))),
    "functional op after the last": lambda: Net(lambda net, x: F.softmax(net.d(net.c(net.b(net.a(x)))), -1)),
    "another order": lambda: Net(lambda net, x: net.d(net.a(net.b(net.c(x))))),
    "a child left out": lambda: Net(lambda net, x: net.d(net.b(net.a(x)))),
    "a child used twice": lambda: Net(lambda net, x: net.d(net.c(net.c(net.b(net.a(x)))))),
    "a skip connection": lambda: Net(lambda net, x: net.d(x + net.c(net.b(net.a(x))))),
    "a detached output": lambda: Net(lambda net, x: net.d(net.c(net.b(net.a(x))).detach())),
    "own parameter": Biased,
    "reversed stages": lambda: Staged(reversed_stages),
    "residual stages": lambda: Staged(residual_stages),
    "stages left out": lambda: Staged(lambda n, x: n.head(n.stages[0](n.stem(x)))),
    "hooked stages": lambda: Staged(each_stage, hooked()),
    "stages with their own iteration": lambda: Staged(each_stage, Backwards(nn.Tanh())),
    "looks for parameters": lambda: Staged(first_parameters_type),
    "attribute": lambda: Staged(lambda n, x: n.head(n.stages(n.stem(x))) * n.head.in_features),
}
# Forwards that run children in order, so that each is a layer.
IN_ORDER = {
    "over the children": lambda: Staged(each_stage),
    "by index": lambda: Staged(lambda n, x: n.head(n.stages[1](n.stages[0](n.stem(x))))),
    "by slices": lambda: Staged(lambda n, x: n.head(n.stages[1:](n.stages[:1](n.stem(x))))),
    "whole": lambda: Staged(lambda n, x: n.head(n.stages(n.stem(x)))),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_NET else pytest.mark.rest) for name in MODELS | IN_ORDER]
)
def test_a_modules_own_forward_becomes_layers_that_train_as_it_does(name):
    made = (MODELS | IN_ORDER)[name]
    torch.manual_seed(3)
    net = made()
    plain = copy.deepcopy(net)
    expected = reference.train(plain, F.cross_entropy, samples(), seed=1, lr=0.1)
    run = task(net, seed=1, partitioner=Presharded([1, 2, 3]) if name in IN_ORDER else None)
    exact.assert_as_expected(exact.run([run]), "task-0", net, exact.Expected(expected.losses, [], zoo.state(plain)))


def test_forward_that_is_a_closure_over_the_model_trains_as_it_does():
    def made():
        torch.manual_seed(3)
        net = Net(None)
        net.forward = lambda x: net.d(F.relu(net.b(net.a(x))))
        return net

    plain, net = made(), made()
    expected = reference.train(plain, F.cross_entropy, samples(), seed=1, lr=0.1)
    run = exact.run([task(net, seed=1)])
    exact.assert_as_expected(run, "task-0", net, exact.Expected(expected.losses, [], zoo.state(plain)))


def test_branch_on_a_value_that_the_model_computes_where_one_layer_does_not_fit():
    def forward(net, x):
        x = net.b(net.a(x))
        return net.d(net.c(x) if x.sum() > 0 else x)

    line = forward.__code__.co_firstlineno + 2
    devices = [EmulatedDevice("1KiB")]
    assert_refused(Net(forward), devices=devices, says=f"test_refusals.py:{line} net.c(x) torch.where")


def test_layer_that_closes_over_another_layers_weight():
    """A copy on a device would go on using the original."""
    first, *rest = layers()

    class Closure(nn.Module):
        def forward(self, x):
            return x @ first.weight

    assert_refused(nn.Sequential(first, Closure(), *rest), says="task-0 1 closure")


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
    orchestra = exact.orchestrator([task(loader=loader)])
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
    with refused(RuntimeError, says="train_models"):
        orchestra.train_models()
    exact.assert_same_state(zoo.state(model), exact.expected("mlp", epochs=1).state)


@pytest.mark.parametrize("method", ["generate", "train_models"])
def test_active_autocast(method):
    subject, model = exact.task_of("mlp", epochs=1)
    orchestra = exact.orchestrator([subject])
    with torch.autocast("cpu", dtype=torch.bfloat16), refused(RuntimeError, says=f"{method} autocast"):
        getattr(orchestra, method)()
    if method == "train_models":
        exact.assert_same_state(zoo.state(model), zoo.state(zoo.mlp()[0]))


def trained_in(memory, width=200, **options):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 4))
    task = ModelTask(layers, F.mse_loss, [(torch.ones(32, 16), torch.ones(32, 4))], 0.1, name="a", **options)
    exact.silent([task], devices=[EmulatedDevice(memory)]).train_models().raise_failures()


def least_of(**options):
    with refused(ShardDoesNotFit, task="a", says="least memory") as caught:
        trained_in("50KiB", **options)
    needed, available, least = map(int, re.findall(r"\((\d+) bytes\)", str(caught.value)))
    assert least > available < needed
    return re.search(r"memory that works for it is ([\d.]+ \w+)", str(caught.value))[1].replace(" ", "")


@pytest.mark.parametrize(
    "options",
    [
        {"width": 200},
        {"width": 233},
        {"width": 263},
        {"precision": "bfloat16", "accumulation_steps": 4},
    ],
    ids=["200", "233", "263", "narrow"],
)
def test_the_least_memory_that_is_named_is_enough(options):
    trained_in(least_of(**options), **options)


def watches_functions():
    class Watches(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    return Watches()


MODES = {
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "saved_tensors_hooks (save_on_cpu)": torch.autograd.graph.save_on_cpu,
    "Watches": watches_functions,
    "DeviceContext": lambda: torch.device("meta"),
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ["generate", "train_models"])
def test_what_watches_or_changes_operations_of_the_calling_thread(method, mode):
    subject, model = exact.task_of("mlp", epochs=1)
    orchestra = exact.orchestrator([subject])
    with MODES[mode](), refused(RuntimeError, says=f"{method} {mode.partition(' ')[0]}"):
        getattr(orchestra, method)()
    exact.assert_same_state(zoo.state(model), zoo.state(zoo.mlp()[0]))


def test_a_default_device_that_is_the_cpu_changes_nothing():
    subject, model = exact.task_of("mlp", epochs=1)
    with torch.device("cpu"):
        exact.orchestrator([subject]).train_models()
    exact.assert_same_state(zoo.state(model), exact.expected("mlp", epochs=1).state)


def test_training_under_no_grad_has_its_bits():
    subject, model = exact.task_of("mlp", epochs=1)
    with torch.no_grad():
        exact.orchestrator([subject]).train_models()
    exact.assert_same_state(zoo.state(model), exact.expected("mlp", epochs=1).state)


def test_training_under_inference_mode_is_refused():
    subject, model = exact.task_of("mlp", epochs=1)
    with torch.inference_mode(), pytest.raises(RuntimeError):
        exact.orchestrator([subject]).train_models()
    exact.assert_same_state(zoo.state(model), zoo.state(zoo.mlp()[0]))


# Memory


def big_layer_in_the_middle():
    return nn.Sequential(nn.Linear(6, 512), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 3))  # the second: 1 MiB


@pytest.mark.parametrize(("partitioner", "memory"), [(None, "64KiB"), (Presharded([1, 2, 3, 4]), "768KiB")], ids=str)
def test_layer_that_cannot_fit_alone(partitioner, memory):
    """The largest shard's own need is above the budget: its weights alone take 1 MiB."""
    devices = [EmulatedDevice(memory=memory)]
    message = assert_refused(big_layer_in_the_middle(), ShardDoesNotFit, partitioner=partitioner, devices=devices)
    assert len(SIZE.findall(message)) >= 2, f"needed and available bytes: {message}"


def test_model_that_needs_more_dram_than_the_machine_has(monkeypatch):
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "hydra_engine"]
    patched = [module for module in modules if hasattr(module, "available_dram_bytes")]
    assert patched, "hydra_engine.system.dram.available_dram_bytes says how much DRAM there is"
    for module in patched:
        monkeypatch.setattr(module, "available_dram_bytes", lambda: 200_000)
    message = assert_refused(big_layer_in_the_middle(), HostOutOfMemory, says="DRAM")
    assert len(SIZE.findall(message)) >= 2, f"needed and available bytes: {message}"


# Names of layers


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return x + self.linear(x)


class Blocks(nn.Module):
    """A forward of its own; `middle` runs between two blocks."""

    def __init__(self, middle):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), middle, Block()])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


class Numbers(Block):
    """Each run gives another value."""

    runs = 0

    def forward(self, x):
        self.runs += 1
        return super().forward(x) * self.runs


class Wrong(Block):
    """Raises at once, whatever it gets."""

    def forward(self, x):
        raise ArithmeticError("no such thing")


class WrongInEval(Block):
    def forward(self, x):
        if not self.training:
            raise ArithmeticError("no such thing")
        return super().forward(x)


@pytest.mark.parametrize(
    ("middle", "memory", "error", "name"),
    [
        (Wrong, "8MiB", ArithmeticError, "in blocks.1 (Wrong)"),
        (WrongInEval, "8MiB", ArithmeticError, "task t, as its own forward was tried in eval()"),
        (Block, "500B", ShardDoesNotFit, "t: blocks.0 (Block) needs "),
        (Block, "990B", ShardDoesNotFit, "for blocks.1 (Block) of t"),
        (Numbers, "8MiB", ValueError, "t: blocks.1 (Numbers): forward changes its attribute 'runs' "),
    ],
)
def test_errors_name_layers_of_an_own_forward_by_its_modules(middle, memory, error, name):
    validation = [(torch.zeros(4, 6), torch.zeros(4, dtype=torch.long))]
    refused_task = task(Blocks(middle()), name="t", partitioner="pilot", validation=validation)
    with pytest.raises(error) as caught:
        exact.silent([refused_task], memory).generate()
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert name in text
    assert not re.search(r"Segment|Holder|\blayers? \d", text)


class Counts(nn.Module):
    """Raises at the second batch."""

    def forward(self, x):
        if (x.abs().max() > 1e6).item():
            raise LookupError("no such row")
        return x


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (lambda: nn.Sequential(Counts(), *layers()), "0 (Counts)"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Sequential(Counts()), *layers()), "1 (Sequential)"),
        (lambda: Counting(), "a to count"),
    ],
)
def test_a_task_that_fails_names_the_module_that_ran(model, name):
    loader = [(torch.full((4, 6), value), torch.zeros(4, dtype=torch.long)) for value in (1.0, 1e9)]
    tasks = [task(model(), loader, name="t"), task(name="other")]
    error = exact.silent(tasks, "8MiB").train_models().tasks["t"].error
    assert str(error).startswith(f"t failed in t.fb0@1, {name}\n")


class Counting(nn.Module):
    """A forward of its own around a module that raises at the second batch."""

    def __init__(self):
        super().__init__()
        self.count, (self.a, _, _, self.b) = Counts(), layers()

    def forward(self, x):
        return self.b(torch.tanh(self.count(self.a(x))))
