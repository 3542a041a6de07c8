"""`ModelTask(compile=True)`: one graph for layers that are built alike, and results within rounding."""

import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import EmulatedDevice, ModelTask, Skips
from hydra_engine.worker import compiled
from partitioners import Presharded
from tests import exact
from tests.reference import train as train_plain
from tests.refused import refused

# What torch says while it traces on an input that is no leaf: it hides that itself, but for warnings that are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

WIDTH, WORDS = 16, 20
# Of losses, relative: float32 sums in another order, and bfloat16 values that are not rounded between operations.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


class Counting:
    """A backend that compiles for autograd and runs operations as they are, and counts graphs."""

    def __init__(self, fails=False):
        self.num_graphs = 0
        self._compile = torch._dynamo.lookup_backend("aot_eager")
        self._fails = fails

    def __call__(self, graph, inputs):
        if self._fails:
            raise NotImplementedError("no kernel for this")
        self.num_graphs += 1
        return self._compile(graph, inputs)


@pytest.fixture
def backend(monkeypatch):
    """Forms are kept by backend: a new one has none."""
    backend = Counting()
    monkeypatch.setattr(compiled, "BACKEND", backend)
    return backend


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout))

    def forward(self, x):
        q, k, v = self.mix(self.norm(x)).unsqueeze(1).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))


def words(num_batches=3, sizes=(4,)):
    torch.manual_seed(1)
    return [torch.randint(0, WORDS, (2, sizes[k % len(sizes)], 6)) for k in range(num_batches)]


def loss_of(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def language_model(blocks):
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))


def task_of(make=Block, num_blocks=4, data=None, **options):
    torch.manual_seed(0)
    model = language_model([make() for _ in range(num_blocks)])
    cut = Presharded([2, 4, num_blocks + 2] if num_blocks > 2 else [2, 4])
    options = {"seed": 3, "partitioner": cut, "compile": True, **options}
    data = words() if data is None else data
    return ModelTask(model, loss_of, [(x, y) for x, y in data], 0.1, **options)


def train(*tasks, devices=None):
    orchestra = exact.silent(tasks, "4MiB", devices=devices)
    report = orchestra.train_models()
    report.raise_failures()
    return orchestra, report


def losses_of(*tasks, devices=None):
    found = [each.losses for each in train(*tasks, devices=devices)[1].tasks.values()]
    return found[0] if len(tasks) == 1 else found


def close(losses, expected, precision="float32"):
    return losses == pytest.approx(expected, rel=TOLERANCE[precision])


def test_off_by_default_and_then_as_plain_pytorch(backend):
    task = task_of(compile=False)
    assert ModelTask([nn.Linear(2, 2)], F.mse_loss, []).compile is False
    model = language_model([Block() for _ in range(4)])
    model.load_state_dict(task.model.state_dict())
    data = [(x, y) for x, y in words()]
    expected = train_plain(model, loss_of, data, seed=3, lr=0.1)
    assert losses_of(task) == expected.losses
    assert backend.num_graphs == 0


@pytest.mark.parametrize("value", [1, "inductor", None])
def test_anything_but_a_bool_is_refused(value):
    with refused(TypeError, says=f"compile {value} bool"):
        task_of(compile=value)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulation_steps": 2},
        pytest.param({}, marks=pytest.mark.rest),
        pytest.param({"precision": "bfloat16"}, marks=pytest.mark.rest),
    ],
    ids=str,
)
def test_losses_are_those_of_the_uncompiled_task(backend, options):
    expected = losses_of(task_of(compile=False, **options))
    assert close(losses_of(task_of(**options)), expected, options.get("precision", "float32"))
    assert backend.num_graphs == 3  # an embedding, a block, a linear layer


@pytest.mark.rest
def test_kept_graphs_and_recomputed_forwards_give_the_same_bits(backend):
    roomy, report = train(task_of(), devices=[EmulatedDevice("4MiB")])
    assert any(roomy.plan.tasks["task-0"].graph_bytes)
    tight, other = train(task_of(), devices=[EmulatedDevice("44KiB")])
    assert not any(tight.plan.tasks["task-0"].graph_bytes)
    assert report.tasks["task-0"].losses == other.tasks["task-0"].losses


@pytest.mark.rest
def test_tasks_and_devices_share_graphs(backend):
    tasks = [task_of(name=name) for name in ("a", "b")]
    a, b = losses_of(*tasks, devices=[EmulatedDevice("4MiB"), EmulatedDevice("4MiB")])
    assert a == b
    assert close(a, losses_of(task_of(compile=False)))
    assert backend.num_graphs == 3


@pytest.mark.rest
def test_tasks_of_other_layers_compile_and_train_at_the_same_time(backend):
    def tasks(compiles):
        data = words(num_batches=9, sizes=(4, 3, 2))
        return [
            task_of(data=data, compile=compiles, name="a"),
            task_of(lambda: nn.Sequential(Block(), nn.Tanh()), data=data, compile=compiles, name="b"),
        ]

    devices = [EmulatedDevice("4MiB", chaos=1), EmulatedDevice("4MiB", chaos=2)]
    for found, expected in zip(losses_of(*tasks(True), devices=devices), losses_of(*tasks(False)), strict=True):
        assert close(found, expected)
    assert backend.num_graphs == 3 * 4  # of batches of 4, 3 and 2: the other block, too


class Kinds(nn.Module):
    """Equal in all but a plain attribute."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.factor * self.linear(x)


@pytest.mark.rest
def test_layers_that_differ_in_an_attribute_have_graphs_of_their_own(backend):
    def task(compiles):
        factors = iter((0.5, 0.25, 0.5, 0.25))
        return task_of(lambda: Kinds(next(factors)), compile=compiles)

    assert close(losses_of(task(True)), losses_of(task(False)))
    assert backend.num_graphs == 4


def test_layers_that_draw_run_uncompiled_and_repeat(backend):
    with pytest.warns(UserWarning, match=r"compile: 1 \(\w+\) "):
        first = losses_of(task_of(lambda: Block(0.5)))
    assert backend.num_graphs == 2  # an embedding and a linear layer
    assert losses_of(task_of(lambda: Block(0.5)), devices=[EmulatedDevice("44KiB")]) == first
    assert close(first, losses_of(task_of(lambda: Block(0.5), compile=False)))


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Flatten(0, 1), nn.BatchNorm1d(WIDTH), nn.Unflatten(0, (-1, 6)))


@pytest.mark.rest
@pytest.mark.parametrize("memory", ["44KiB", pytest.param("4MiB", marks=pytest.mark.rest)])
def test_buffers_are_those_of_the_uncompiled_task(backend, memory):
    tasks = [task_of(Normed, compile=compiles) for compiles in (True, False)]
    for task in tasks:
        train(task, devices=[EmulatedDevice(memory)])
    for (name, found), expected in zip(tasks[0].model.named_buffers(), tasks[1].model.buffers(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=name)
    assert backend.num_graphs == 3


class Printing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x) if x.sum().item() else x


class LeftOut(Printing):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


def test_a_layer_that_dynamo_cannot_trace_is_refused_before_training(backend):
    with refused(layer="1 (", says="compile: torch.compiler.disable"):
        exact.silent([task_of(Printing)], "4MiB").generate()


def test_what_the_backend_raises_is_told_with_the_layer(monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", Counting(fails=True))
    with refused(layer="0 (", says="compile: no kernel"):
        exact.silent([task_of()], "4MiB").generate()


def test_a_layer_that_is_left_out_runs_uncompiled(backend):
    left_out = [task_of(LeftOut, num_blocks=2, compile=compiles) for compiles in (True, False)]
    assert close(*map(losses_of, left_out))
    assert backend.num_graphs == 2


class Put(nn.Linear):
    def __init__(self, skips):
        super().__init__(WIDTH, WIDTH)
        self.skips = skips

    def forward(self, x):
        self.skips.put("x", x)
        return super().forward(x)


class Get(Put):
    def forward(self, x):
        return nn.Linear.forward(self, x) + self.skips.get("x")


def test_layers_with_skips_run_uncompiled(backend):
    def task(compiles):
        skips = Skips()
        makes = iter((Put, Block, Get, Block))

        def make():
            kind = next(makes)
            return Block() if kind is Block else kind(skips)

        return task_of(make, compile=compiles)

    assert close(losses_of(task(True)), losses_of(task(False)))
    assert backend.num_graphs == 3


@pytest.mark.rest
def test_past_the_limit_of_forms_a_layer_runs_uncompiled(backend, monkeypatch):
    assert compiled.MAX_FORMS == 8
    monkeypatch.setattr(compiled, "MAX_FORMS", 2)
    data = words(num_batches=6, sizes=(2, 3, 4))
    with pytest.warns(UserWarning, match="compile: .* 2 "):
        found = losses_of(task_of(num_blocks=2, data=data))
    assert close(found, losses_of(task_of(num_blocks=2, data=data, compile=False)))
    assert backend.num_graphs <= 3 * compiled.MAX_FORMS


@pytest.mark.rest
def test_evaluation_and_validation_run_uncompiled(backend):
    data = [(x, y) for x, y in words()]
    tasks = [task_of(num_blocks=2, compile=compiles, validation=data[:1]) for compiles in (True, False)]
    (orchestra, report), (_, expected) = map(train, tasks)
    losses = report.tasks["task-0"].validation_losses
    assert close(losses, expected.tasks["task-0"].validation_losses)
    orchestra.evaluate(tasks[0], data)
    assert backend.num_graphs == 3  # those of training


@pytest.mark.rest
def test_metered_units_run_uncompiled_and_have_the_same_bits(backend):
    metered = [EmulatedDevice("4MiB", meter_every_unit=True)]
    assert losses_of(task_of(num_blocks=2), devices=metered) == losses_of(task_of(num_blocks=2, compile=False))


def test_a_compilation_runs_alone():
    turns, log = compiled.Turns(), []
    calling, compiling = threading.Event(), threading.Event()

    def compilation():
        calling.wait()
        compiling.set()
        with turns.compilation():
            log.append("compiled")

    thread = threading.Thread(target=compilation)
    thread.start()
    with turns.call(), turns.call():  # calls run beside each other
        calling.set()
        compiling.wait()
        log.append("called")
    thread.join()
    with turns.call():
        log.append("called")
    assert log == ["called", "compiled", "called"]


# -- models that the user has compiled


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def fails(graph, inputs):
    raise AssertionError("it compiles")


def wrapped(module):
    return torch.compile(module, backend=fails)


def in_place(module):
    module.compile(backend=fails)
    return module


def forward_alone(module):
    module.forward = torch.compile(module.forward, backend=fails)
    return module


class Decorated(Net):
    @torch.compile(backend=fails)
    def forward(self, x):
        return super().forward(x)


def decorated(module):
    made = Decorated()
    made.load_state_dict(module.state_dict())
    return made


def with_child(compile):
    def change(model):
        model.body = compile(model.body)
        return model

    return change


OWN = ["body.weight", "body.bias", "head.weight", "head.bias"]
OF_CHILD = ["body._orig_mod.weight", "body._orig_mod.bias", "head.weight", "head.bias"]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (wrapped, OWN),
        pytest.param(in_place, OWN, marks=pytest.mark.rest),
        (forward_alone, OWN),
        (decorated, OWN),
        (with_child(wrapped), OF_CHILD),
        pytest.param(with_child(in_place), OWN, marks=pytest.mark.rest),
        (lambda model: [wrapped(model.body), nn.ReLU(), model.head], ["0.weight", "0.bias", "2.weight", "2.bias"]),
    ],
    ids=["wrapped", "in place", "forward", "decorated", "child", "child in place", "layers"],
)
def test_a_compiled_model_trains_uncompiled_and_a_warning_says_so(change, names):
    def trained(model, warns):
        x = torch.linspace(-1, 1, 16).reshape(4, 4)
        with warns:
            task = ModelTask(model, F.mse_loss, [(x, x)] * 3, 0.1, name="t", seed=0)
        losses = exact.silent([task]).train_models().tasks["t"].losses
        return losses, task

    def net():
        torch.manual_seed(0)
        return Net()

    losses, _ = trained(net(), nullcontext())
    with_compile, task = trained(change(net()), pytest.warns(UserWarning, match="compile=True"))
    assert with_compile == losses
    assert [name for name, _ in task.model.named_parameters()] == names


def test_a_compiled_loss_is_the_one_inside():
    loss = nn.MSELoss()
    with pytest.warns(UserWarning, match="MSELoss"):
        task = ModelTask(nn.Sequential(nn.Linear(2, 2)), wrapped(loss), [(torch.ones(2, 2), torch.ones(2, 2))])
    assert task.loss_fn is loss


def test_a_compiled_function_as_loss_runs_uncompiled():
    x = torch.ones(2, 2)
    tasks = [ModelTask(nn.Sequential(nn.Linear(2, 2)), wrapped(F.mse_loss), [(x, x)] * 3, name="t", seed=0)]
    assert exact.silent(tasks).train_models().tasks["t"].status == "finished"
