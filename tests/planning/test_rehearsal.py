"""A model that hides something from a copy of itself is trained exactly, or refused by `generate()` with its name."""

import copy
import functools
import random
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask
from partitioners import Presharded
from tests import reference, zoo

pytestmark = pytest.mark.rest

SEED, LR = 3, 0.05


def data(num=3):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 8, generator=generator), torch.randint(4, (4,), generator=generator)) for _ in range(num)]


def model_with(*layers):
    """The layers between others, in the middle of five or more."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), *layers, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def task_for(model, loss_fn=F.cross_entropy, shards="each", **options):
    number = len(model)
    ends = {"one": [number], "each": list(range(1, number + 1)), "two": [2, number], "late": [number - 1, number]}
    options = {"seed": SEED, "partitioner": Presharded(ends[shards]), **options}
    return ModelTask(model, loss_fn, data(), LR, 2, name="net", **options)


def orchestrator(*tasks, num_devices=1, memory="1MiB"):
    devices = [EmulatedDevice(memory, meter_every_unit=True) for _ in range(num_devices)]
    orchestra = ModelOrchestrator(tasks, devices=devices)
    orchestra.verbose = 0
    return orchestra


def assert_exact(build, loss_of=lambda model: F.cross_entropy, **options):
    """Trained as by the plain loop: in one shard, in one for each layer, and on two devices."""
    validation, records = options.pop("validation", None), options.pop("records", ())
    torch.manual_seed(0)
    expected = build()
    result = reference.train(
        expected, loss_of(expected), data(), seed=SEED, lr=LR, epochs=2, validation=validation, **options
    )
    for shards, num_devices in (("one", 1), ("one", 2), ("each", 1), ("each", 2)):
        torch.manual_seed(0)
        model = build()
        task = task_for(model, loss_of(model), shards, validation=validation, records=records, **options)
        report = orchestrator(task, num_devices=num_devices).train_models()
        report.raise_failures()
        assert report.tasks["net"].losses == result.losses
        assert report.tasks["net"].validation_losses == result.validation_losses
        pairs = zip(zoo.state(model).values(), zoo.state(expected).values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@contextmanager
def unchanged(model):
    """What a model and the process had before is there after, too."""
    state, rest = _state_and_rest(model)
    yield
    state_now, rest_now = _state_and_rest(model)
    assert state_now.keys() == state.keys()
    assert all(torch.equal(state_now[name], state[name]) for name in state)
    assert rest_now == rest


def _state_and_rest(model):
    """Copies of tensors, and all else: attributes, flags, and the generators of the process."""
    attributes = {
        name: {key: _frozen(value) for key, value in vars(module).items()} for name, module in model.named_modules()
    }
    flags = [module.training for module in model.modules()]
    generators = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tobytes()
    return {name: value.clone() for name, value in zoo.state(model).items()}, (attributes, flags, generators)


def _frozen(value):
    """To be compared: containers by what is in them, all else by what it is."""
    if isinstance(value, dict):
        return tuple((key, _frozen(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    return id(value)


def assert_refused(match, build, loss_of=lambda model: F.cross_entropy, shards=("one", "each"), **options):
    """Refused with task and reason, in every partition; nothing of the user's is changed by it."""
    for each in shards:
        model = build()
        loss_fn = loss_of(model)
        for _ in range(2):
            with unchanged(model), pytest.raises((ValueError, TypeError), match=f"net.*{match}"):
                orchestrator(task_for(model, loss_fn, each, **options)).generate()


class Counts(nn.Module):
    """Its n-th call differs from the others."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


class OwnGenerator(nn.Module):
    def __init__(self, source="torch"):
        super().__init__()
        make = {"torch": lambda: torch.Generator().manual_seed(1), "numpy": lambda: np.random.default_rng(1)}
        self.generator = make.get(source, lambda: random.Random(1))()

    def forward(self, x):
        if isinstance(self.generator, torch.Generator):
            return x + torch.randn(x.shape, generator=self.generator)
        return x + self.generator.random()


HIDDEN = {
    "counter": Counts,
    "torch": OwnGenerator,
    "numpy": lambda: OwnGenerator("numpy"),
    "random": lambda: OwnGenerator("random"),
}


@pytest.mark.parametrize("layer", HIDDEN)
def test_layer_with_a_state_of_its_own_is_refused(layer):
    assert_refused("forward changes", lambda: model_with(HIDDEN[layer](), nn.Dropout(0.3)))


class Loss:
    """A loss that weighs its calls, each otherwise."""

    def __init__(self, kind):
        self.kind, self.calls = kind, 0
        self.generator = np.random.default_rng(0)
        self.seen = []

    def __call__(self, output, target):
        if self.kind == "counter":
            self.calls += 1
            weight = self.calls
        elif self.kind == "numpy":
            weight = float(self.generator.random())
        elif self.kind == "list":
            self.seen.append(1)
            weight = len(self.seen)
        else:
            self.seen.append(output.detach().mean().item())  # which it never looks at
            weight = 1.0
        return F.cross_entropy(output, target) * weight

    def call(self, output, target):
        return self(output, target)


class ModuleLoss(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.loss = Loss(kind)

    def forward(self, output, target):
        return self.loss(output, target)


def closure(kind):
    calls, loss = 0, Loss(kind)

    def loss_fn(output, target):
        nonlocal calls
        calls += 1
        return loss(output, target) * (calls if kind == "counter" else 1)

    return loss_fn


LOSSES = {
    "object": Loss,
    "module": ModuleLoss,
    "method": lambda kind: Loss(kind).call,
    "partial": lambda kind: functools.partial(Loss.call, Loss(kind)),
    "closure": closure,
}


def state_of(loss_fn):
    """Everything that a loss of these may have kept."""
    if isinstance(loss_fn, functools.partial):
        return state_of(loss_fn.args[0])
    if hasattr(loss_fn, "__self__"):
        return state_of(loss_fn.__self__)
    if hasattr(loss_fn, "__closure__"):
        return [state_of(cell.cell_contents) for cell in loss_fn.__closure__]
    if isinstance(loss_fn, ModuleLoss):
        return state_of(loss_fn.loss)
    if isinstance(loss_fn, Loss):
        return loss_fn.calls, list(loss_fn.seen), str(loss_fn.generator.bit_generator.state)
    return loss_fn


@pytest.mark.parametrize("shape", LOSSES)
@pytest.mark.parametrize("kind", ["counter", "numpy", "list"])
def test_loss_with_a_state_that_matters_is_refused_and_not_advanced(shape, kind):
    losses = []

    def loss_of(model):
        losses.append((LOSSES[shape](kind),))
        losses[-1] += (copy.deepcopy(state_of(losses[-1][0])),)
        return losses[-1][0]

    assert_refused("loss_fn.*(another|forward changes)", model_with, loss_of, shards=("one", "each", "two"))
    assert all(state_of(loss_fn) == before for loss_fn, before in losses)


@pytest.mark.parametrize("shape", LOSSES)
def test_loss_that_keeps_a_record_is_refused(shape):
    loss_fn = LOSSES[shape]("record")
    before = copy.deepcopy(state_of(loss_fn))
    assert_refused(r"loss_fn.*(seen|calls).*records=\('loss_fn\.", model_with, lambda model: loss_fn)
    assert state_of(loss_fn) == before


def test_record_that_is_named_is_exact():
    assert_exact(model_with, lambda model: Loss("record"), records=["loss_fn.seen"])
    for kind, named in (("list", "history"), ("average", "average"), ("tensor", "calls")):
        assert_exact(lambda kind=kind: model_with(Statistics(kind, [])), records=(f"2.{named}",))
    assert_refused("'history", lambda: model_with(Statistics("list", [])), records=("2.hist", "2.historyy"))


def test_loss_that_reads_the_orchestrator_and_a_layer_that_holds_it_are_exact():
    held = {}
    model, loss = model_with(), lambda output, target: F.cross_entropy(output, target) / len(held["orchestra"].devices)
    task = task_for(model, loss)
    held["orchestra"] = model[0].held = orchestrator(task)
    model[0].task = task
    result = reference.train(model_with(), F.cross_entropy, data(), seed=SEED, lr=LR, epochs=2)
    assert held["orchestra"].train_models().tasks["net"].losses == result.losses


@pytest.mark.net
def test_metric_with_a_state_is_not_advanced_by_generate():
    metric = Loss("record")
    task = task_for(model_with(), validation=data(1), metrics={"loss": metric})
    orchestrator(task).generate()
    assert metric.seen == []


class Adapter(nn.Module):
    """Merges what it learns into its frozen weight on eval(), as LoRA layers did."""

    def __init__(self, base, delta):
        super().__init__()
        self.base, self.merged = base, False
        base.requires_grad_(False)
        self.delta = nn.Parameter(torch.full_like(base.weight, delta))

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            self.base.weight.data += self.delta.data * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x):
        return self.base(x) if self.merged else F.linear(x, self.base.weight + self.delta, self.base.bias)


@pytest.mark.parametrize("delta", [0.0, 0.1])
def test_layer_that_merges_on_eval_is_refused_where_that_is_called(delta):
    def build():
        return model_with(Adapter(nn.Linear(8, 8), delta))

    assert_refused("writes to its parameter.*eval", build, validation=data(1))
    assert_exact(build)
    model = build()
    orchestra = orchestrator(task_for(model))
    with unchanged(model), pytest.raises(ValueError, match=r"net.*writes to its parameter"):
        orchestra.evaluate("net", data(1))
    with unchanged(model), pytest.raises(ValueError, match=r"predict.*writes to its parameter"):
        orchestra.predict(model, [x for x, _ in data(1)])


@pytest.mark.net
def test_base_that_another_task_shares_is_not_changed():
    torch.manual_seed(0)
    base = nn.Linear(8, 8)
    plain = nn.Sequential(base, nn.Linear(8, 4))
    adapted = nn.Sequential(Adapter(base, 0.1), nn.Linear(8, 4))
    tasks = [
        ModelTask(plain, F.cross_entropy, data(), LR, name="plain", seed=1),
        ModelTask(adapted, F.cross_entropy, data(), LR, name="adapted", seed=1, validation=data(1)),
    ]
    refused = pytest.raises(ValueError, match=r"adapted.*writes to its parameter")
    with unchanged(nn.Sequential(plain, adapted)), refused:
        orchestrator(*tasks).generate()


class Writes(nn.Module):
    """Changes its weight in its forward, or in a hook."""

    def __init__(self, how):
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 0.5))
        self.how = how
        if how == "backward hook":
            self.register_full_backward_hook(lambda module, *_: module._write())
        if how == "forward hook":
            self.register_forward_hook(lambda module, *_: module._write())
        if how == "tensor hook":
            self.register_forward_hook(lambda m, _, out: out.register_hook(lambda g: m._write()) and None)

    def _write(self):
        self.weight.data.mul_(0.9)

    def forward(self, x):
        if self.how == "clamp that changes nothing":
            self.weight.data.clamp_(-10, 10)
        elif self.how == "no_grad":
            with torch.no_grad():
                self.weight.mul_(0.9)
        elif self.how == "normalize":
            self.weight.data = F.normalize(self.weight.data, dim=0)
        elif self.how == "rebinds to the same":
            self.weight.data = self.weight.data.clamp(-10, 10)
        elif self.how == "new parameter":
            self.weight = nn.Parameter(self.weight.detach() * 0.9)
        elif "hook" not in self.how:
            self._write()
        return x * self.weight


WRITES = [
    "mul", "clamp that changes nothing", "no_grad", "normalize", "rebinds to the same", "new parameter",
    "backward hook", "forward hook", "tensor hook",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("how", WRITES)
def test_layer_that_writes_to_its_parameters_is_refused(how):
    assert_refused("parameter", lambda: model_with(Writes(how)))
    assert_refused("parameter", lambda: nn.Sequential(Writes(how), *model_with()), shards=("each",))


@pytest.mark.net
def test_frozen_parameter_that_a_forward_writes_to_is_refused():
    assert_refused("parameter", lambda: model_with(Writes("mul").requires_grad_(False)))


class LateBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x):
        x = x * 1.0
        x.register_hook(lambda grad: setattr(self, "mean", grad.mean(0)))
        return x * 1.0


def test_buffer_that_comes_in_a_backward_is_refused():
    assert_refused("mean", lambda: model_with(LateBuffer()))


def test_buffer_that_stays_none_is_exact():
    assert_exact(lambda: model_with(nn.BatchNorm1d(8, track_running_stats=False)))


class Statistics(nn.Module):
    """Keeps what it sees for a look at it, outside of itself where that grows."""

    def __init__(self, kind, history):
        super().__init__()
        self.kind, self.mean, self.attn, self.seen = kind, 0.0, None, []
        self.history = [] if kind == "list" else Outside(history)
        self.calls = torch.tensor(0)

    def forward(self, x):
        self.mean = float(x.detach().mean())
        self.seen = [self.mean]
        self.attn = x.detach()
        self.history.append(self.mean)
        if self.kind == "average":
            self.average = 0.9 * getattr(self, "average", 0.0) + 0.1 * self.mean
        elif self.kind == "tensor":
            self.calls += 1
        return torch.tanh(x)


class Outside:
    """Appends to a list that no copy has for itself."""

    def __init__(self, history):
        self.append = lambda value: history.append(value)


def test_layer_that_keeps_what_it_has_seen_last_is_exact():
    assert_exact(lambda: model_with(Statistics("", []), nn.Dropout(0.1)))
    assert_exact(lambda: model_with(Statistics("", []), nn.Dropout(0.1)), accumulation_steps=3, validation=data(1))


@pytest.mark.parametrize(("kind", "named"), [("list", "history"), ("average", "average"), ("tensor", "calls")])
def test_layer_that_goes_on_changing_an_attribute_is_refused_by_name(kind, named):
    for options in ({}, {"accumulation_steps": 3}):
        assert_refused(rf"2 \(Statistics\): forward.*'{named}", lambda: model_with(Statistics(kind, [])), **options)
    assert_refused(rf"2.0.1 \(Statistics\): forward.*'{named}", lambda: model_with(nested(Statistics(kind, []))))


def nested(layer):
    return nn.Sequential(nn.Sequential(nn.Tanh(), layer), nn.Tanh())


class Cached(nn.Module):
    """Makes a mask once for each length, as many attention layers do."""

    def __init__(self):
        super().__init__()
        self.mask, self.length, self.masks = None, 0, {}

    def forward(self, x):
        if self.mask is None or self.length != x.shape[0]:
            self.length = x.shape[0]
            self.mask = torch.ones(x.shape[0], 1)
        if x.shape[0] not in self.masks:
            self.masks[x.shape[0]] = torch.ones(x.shape[0], 1)
        return x * self.mask * self.masks[x.shape[0]]


class CachesByContent(nn.Module):
    """Makes anew what depends on its input, unless that is the one of the last call."""

    key = table = None

    def forward(self, x):
        if self.key is None or not torch.equal(self.key, x):
            self.key, self.table = x.detach().clone(), x.detach().mean(1, keepdim=True) * 1.0
        return x - self.table


@pytest.mark.parametrize("layer", [Cached, CachesByContent], ids=["shapes", "content"])
def test_layer_that_caches_what_depends_on_its_input_is_exact(layer):
    assert_exact(lambda: model_with(layer()))
    assert_exact(lambda: model_with(layer()), accumulation_steps=3)


KEPT = []  # weak references to all that was made


class Bag:
    pass


class KeepsActivations(nn.Module):
    """Leaves activations on itself, in its attributes' depths."""

    def __init__(self, where):
        super().__init__()
        self.where, self.inner = where, nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.kept, self.store, self.bag = [None], {}, Bag()

    def forward(self, x):
        wide = torch.tanh(x[:, :, None].expand(*x.shape, 64) * 1.0)
        KEPT.append(weakref.ref(wide))
        if self.where == "attribute":
            self.attn = wide
        elif self.where == "list":
            self.kept[0] = wide
        elif self.where == "new list":
            self.kept = [*self.kept[:1], wide]
        elif self.where == "dict":
            self.store["all"] = [wide]
        elif self.where == "child":
            self.inner[0].attn = wide
        else:
            self.bag.attn = wide
        return self.inner(x) + wide.mean(-1)


@pytest.mark.parametrize("where", ["attribute", "list", "new list", "dict", "child", "object"])
def test_activations_that_a_layer_keeps_do_not_stay_on_the_device(where):
    def build():
        return model_with(*(KeepsActivations(where) for _ in range(6)))

    assert_exact(build)
    most = []

    class Counting(nn.Module):
        def forward(self, x):
            most.append(sum(each() is not None for each in KEPT))
            return x * 1.0

    orchestra = orchestrator(task_for(model_with(*(KeepsActivations(where) for _ in range(6)), Counting())))
    orchestra.generate()
    KEPT.clear()
    most.clear()
    orchestra.train_models().raise_failures()
    assert len(KEPT) > 12
    assert max(most) == 0


class OwnForward(nn.Module):
    """Runs its children in order, one of which writes to its weight in eval()."""

    def __init__(self):
        super().__init__()
        self.first, self.adapter, self.last = nn.Linear(8, 8), Adapter(nn.Linear(8, 8), 0.1), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.adapter(self.first(x)))


@pytest.mark.net
def test_check_of_an_own_forward_changes_nothing():
    torch.manual_seed(0)
    model = OwnForward()
    orchestra = orchestrator(task_for(nn.Sequential(nn.Linear(8, 4))))
    with unchanged(model):
        orchestra.predict(model, [x for x, _ in data(1)])
    with unchanged(model):
        orchestrator(ModelTask(model, F.cross_entropy, data(), LR, seed=SEED)).generate()
