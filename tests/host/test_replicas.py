"""Replicas compute what the user's modules would, whatever these hold, and leave those as they are."""

import copy
import functools
import gc
import io
import itertools
import threading
import types
import warnings
import weakref
from array import array
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from hydra_engine import EmulatedDevice, Model, ModelOrchestrator, ModelTask
from hydra_engine.data import TaskGenerator, seeded
from hydra_engine.data.memory import copy_of
from hydra_engine.host.layout import LayerFault, ModelLayout, Structure
from partitioners import Presharded
from partitioners.copies import copy_of_function
from partitioners.reach import reach
from tests import exact, reference, zoo
from tests.promises.test_spread import spread
from tests.refused import refused as refusal

# In `make test` are the tests that carry `net`.
pytestmark = pytest.mark.rest

SEED, LR = 3, 1e-2
CUTS = {"one shard": lambda n: [n], "each layer": lambda n: list(range(1, n + 1))}


def batches():
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(n, 8, generator=generator), torch.randint(3, (n,), generator=generator)) for n in (6, 6, 5)]


def built(make):
    """A model with one or several layers in the middle, or the model itself, and its loss."""
    torch.manual_seed(1)
    made = make()
    if isinstance(made, tuple):
        return made
    inner = made if isinstance(made, list) else [made]
    return nn.Sequential(nn.Linear(8, 8), *inner, nn.Tanh(), nn.Linear(8, 3)), F.cross_entropy


def orchestra_of(make, cut="each layer", **options):
    model, loss_fn = built(make)
    partitioner = Presharded(CUTS[cut](len(Model(model))))
    settings = {"seed": SEED, "optimizer": torch.optim.AdamW, "validation": batches(), "partitioner": partitioner}
    task = ModelTask(model, loss_fn, batches(), LR, 2, name="hidden", **settings, **options)
    orchestra = ModelOrchestrator([task], devices=[EmulatedDevice("4MiB", chaos=k) for k in range(2)])
    orchestra.verbose = 0
    return orchestra, model


def assert_exact(make, cut="each layer", **options):
    plain, plain_loss = built(make)
    settings = {"optimizer": torch.optim.AdamW, "validation": batches(), **options}
    expected = reference.train(plain, plain_loss, batches(), seed=SEED, lr=LR, epochs=2, **settings)
    orchestra, model = orchestra_of(make, cut, **options)
    report = orchestra.train_models()
    report.raise_failures()
    assert report.tasks["hidden"].losses == expected.losses
    assert report.tasks["hidden"].validation_losses == expected.validation_losses
    exact.assert_same_state(zoo.state(model), zoo.state(plain))


def refused(make, layer, cut="each layer", says=""):
    """`generate()` refuses, names the task and the layer, and has changed nothing."""
    orchestra, model = orchestra_of(make, cut)
    before = copy.deepcopy({name: tensor.detach().clone() for name, tensor in zoo.state(model).items()})
    with refusal(task="hidden", layer=layer, says=says):
        orchestra.generate()
    exact.assert_same_state(zoo.state(model), before)


class Around(nn.Module):
    """A linear layer, and something more that `more` keeps and `forward` uses."""

    def __init__(self, keep=lambda self: None, use=lambda self, x: self.linear(x)):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.use = use
        keep(self)

    def forward(self, x):
        return self.use(self, x)


# Each kind of module, by itself


class Hooked(nn.Module):
    """Layers, and what `keep` registers or sets; the forward returns what `use` makes of them."""

    def __init__(self, keep, use=lambda self, x: self.a(x)):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.use, self.kept = use, {}
        keep(self)

    def forward(self, x):
        return self.use(self, x)

    def sets_an_attribute(self, module, args, output):
        self.last = output

    def scaled(self, x):
        return self.b(x) * 2


def closes_over(self):
    self.a.register_forward_hook(lambda module, args, output: self.kept.update(seen=output))


def with_own_forward(self):
    """As accelerate sets one on an instance."""
    self.old_forward = self.a.forward
    forward = functools.partial(lambda module, x: module.old_forward(x).tanh() * self.b(x), self)
    self.a.forward = functools.update_wrapper(forward, self.old_forward)


def shared_buffer(self):
    self.register_buffer("seen", torch.zeros(8))
    self.a.register_buffer("seen", self.seen)


def adds(self, x):
    self.a.seen += x.detach().mean((0, 1))
    return self.a(x) + self.seen


def replaces(self, x):
    self.a.seen = self.a.seen * 0.9 + x.detach().mean((0, 1))
    return self.a(x) + self.a.seen


def checkpointed(self, x):
    return checkpoint(lambda y: F.dropout(self.a(y), 0.2).tanh(), x, use_reentrant=False) + self.b(x)


def holder(self, kind):
    self.held = kind()
    self.held.layer, self.held.seen = self.b, []


def holds(self, x):
    self.held.seen = self.held.layer(x)
    return self.a(self.held.seen)


class Slotted:
    __slots__ = ("layer", "seen")


class Holder:
    pass


def peft_model(**options):
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    config = peft.LoraConfig(target_modules=["0", "2"], r=4, lora_dropout=0.1, **options)
    return peft.get_peft_model(model, config).base_model.model


def transformer(name, **options):
    library = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 2}
    model = getattr(library, f"{name}Model")(getattr(library, f"{name}Config")(vocab_size=9, **sizes, **options))
    return Hooked(lambda self: setattr(self, "a", model), lambda self, x: self.a(inputs_embeds=x).last_hidden_state)


KINDS = {
    "LSTM": lambda: nn.LSTM(8, 4, 2, dropout=0.1, bidirectional=True, batch_first=True),
    "GRU": lambda: nn.GRU(8, 8, batch_first=True),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "old weight norm": lambda: weight_norm(nn.Linear(8, 8)),
    "old weight norm of an LSTM": lambda: weight_norm(nn.LSTM(8, 8, batch_first=True), "weight_hh_l0"),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(8, 8)),
    "pruned": lambda: prune.random_unstructured(nn.Linear(8, 8), "weight", 0.5),
    "batch norm": lambda: nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(8)),
    "LoRA": peft_model,
    "DoRA": lambda: peft_model(use_dora=True),
    "BERT": lambda: transformer("Bert"),
    "Llama": lambda: transformer("Llama", num_key_value_heads=1),
    "hook closes over the module": lambda: Hooked(closes_over, lambda self, x: self.a(x) + self.kept["seen"].tanh()),
    "hook is a bound method and sets an attribute": lambda: Hooked(
        lambda self: self.a.register_forward_hook(self.sets_an_attribute), lambda self, x: self.a(x) + self.last.tanh()
    ),
    "hook calls a layer": lambda: Hooked(
        lambda self: self.a.register_forward_hook(lambda module, args, output: output + self.b(*args))
    ),
    "hook is a partial with a layer": lambda: Hooked(
        lambda self: self.a.register_forward_pre_hook(functools.partial(lambda b, module, args: (b(*args),), self.b))
    ),
    "forward of the instance": lambda: Hooked(with_own_forward),
    "list of layers": lambda: Hooked(
        lambda self: vars(self).update(layers=[(self.a, [self.b])]), lambda self, x: self.layers[0][1][0](self.a(x))
    ),
    "dict by layers": lambda: Hooked(lambda self: self.kept.update({self.a: 3}), lambda s, x: s.a(x) * s.kept[s.a]),
    "function over the module": lambda: Hooked(
        lambda self: vars(self).update(f=lambda x, b=self.b: self.a(b(x))), lambda self, x: self.f(x)
    ),
    "bound method": lambda: Hooked(lambda self: vars(self).update(f=self.scaled), lambda self, x: self.f(x)),
    "weak reference to the module": lambda: Hooked(
        lambda self: vars(self.a).update(parent=weakref.ref(self)), lambda self, x: self.a.parent().scaled(x)
    ),
    "object that holds a layer": lambda: Hooked(lambda self: holder(self, Holder), holds),
    "object with slots that holds a layer": lambda: Hooked(lambda self: holder(self, Slotted), holds),
    "namespace that holds a layer": lambda: Hooked(lambda self: holder(self, types.SimpleNamespace), holds),
    "one buffer in two modules": lambda: Hooked(shared_buffer, adds),
    "buffer that a forward replaces": lambda: Hooked(
        lambda self: self.a.register_buffer("seen", torch.ones(8)), replaces
    ),
    "checkpointed segment": lambda: Hooked(lambda self: None, checkpointed),
}


def steps(run, parameters, draws, at_once=lambda: None):
    """Outputs of two steps, and the gradients that they add up."""
    generator, outputs = torch.Generator().manual_seed(0), []
    for seed in range(2):
        x = torch.randn(4, 6, 8, generator=generator)
        at_once()
        with draws(seed):
            output = run(x)
            output = output[0] if isinstance(output, tuple) else output
            output.square().mean().backward()
        outputs.append(output.detach())
    return outputs, [None if each.grad is None else each.grad.clone() for each in parameters]


def draws(seed):
    return TaskGenerator(seeded(seed))


@pytest.mark.net
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_replicas_of_two_devices_at_once_compute_what_the_module_does(name):
    torch.manual_seed(1)
    module = KINDS[name]()
    layout = ModelLayout(Model([module]), None)
    values = [copy_of(tensor.detach()) for _, tensor in layout.registered]
    before = {path: dict(vars(each)) for path, each in module.named_modules()}
    barrier = threading.Barrier(2)

    def on_a_device():
        structure, num = Structure(layout, torch.device("cpu")), len(layout.slots)
        mine = [copy_of(value) for value in values]
        structure.bind(dict(enumerate(mine[:num])), dict(enumerate(mine[num:])))
        found = steps(structure.layers[0], structure.parameters, draws, barrier.wait)
        assert type(structure.layers[0]) is type(module)
        return *found, [each.clone() for each in structure.take_buffers(0, 1).values()]

    with ThreadPoolExecutor(2) as threads:
        made = [each.result(timeout=30) for each in [threads.submit(on_a_device) for _ in range(2)]]
    for path, each in module.named_modules():  # nothing was set on the user's modules
        assert {name: id(value) for name, value in vars(each).items()} == {
            name: id(value) for name, value in before[path].items()
        }
    for (_, tensor), value in zip(layout.registered, values, strict=True):
        assert torch.equal(tensor, value)
    outputs, gradients = steps(module, [slot.parameter for slot in layout.slots], draws)
    buffers = [
        dict(module.named_buffers())[name.removeprefix("buffer 0.")] for name, _ in layout.registered[len(gradients) :]
    ]
    for found in made:
        for mine, plain in zip(found, (outputs, gradients, buffers), strict=True):
            assert len(mine) == len(plain)
            for a, b in zip(mine, plain, strict=True):
                assert a is b or torch.equal(a, b)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("hook closes over the module", marks=pytest.mark.net),
        "namespace that holds a layer",
        "hook calls a layer",
    ],
)
def test_steps_spread_over_replicas_are_exact(name):
    with spread(2, in_sums=False):
        assert_exact(KINDS[name], accumulation_steps=2)


@pytest.mark.net
def test_what_a_replica_changes_is_its_own():
    kept, taken = [torch.ones(2)], threading.Lock()

    def keep(self):
        self.held, self.lists, self.array, self.lock = Holder(), {"a": [kept]}, np.ones(2), taken

    module = Hooked(keep)
    replica, other = (Structure(ModelLayout(Model([module]), None), torch.device("cpu")).layers[0] for _ in range(2))
    replica.eval()
    replica.held.seen = replica.lists["a"][0][0]
    replica.lists["a"].append(1)
    replica.a.register_forward_hook(print)
    assert (module.training, vars(module.held), module.lists, len(module.a._forward_hooks)) == (
        True,
        {},
        {"a": [kept]},
        0,
    )
    assert (other.training, vars(other.held), other.lists, len(other.a._forward_hooks)) == (True, {}, {"a": [kept]}, 0)
    assert replica.lists["a"][0][0] is kept[0]
    assert replica.lists["a"][0] is not kept
    assert replica.array is module.array
    assert replica.lock is taken


# Layers that are shared by tasks, and that lead past their replicas


def test_layers_of_two_tasks_are_in_different_modes_at_once():
    """One has a validation after every step, while the other draws masks."""
    torch.manual_seed(1)
    base = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh()).requires_grad_(False)
    heads = [nn.Linear(8, 3) for _ in range(2)]
    both = [nn.Sequential(base, head) for head in heads]
    data = batches() * 3
    expected = []
    for model, epochs in zip(copy.deepcopy(both), (9, 3), strict=True):
        validation = batches()[:1] if epochs == 9 else None
        loader = data[:1] if epochs == 9 else data
        expected.append(
            reference.train(model, F.cross_entropy, loader, seed=SEED, lr=LR, epochs=epochs, validation=validation)
        )
    tasks = [
        ModelTask(both[0], F.cross_entropy, data[:1], LR, 9, seed=SEED, name="often", validation=batches()[:1]),
        ModelTask(both[1], F.cross_entropy, data, LR, 3, seed=SEED, name="never"),
    ]
    orchestra = ModelOrchestrator(tasks, devices=[EmulatedDevice("4MiB") for _ in range(2)])
    orchestra.verbose = 0
    report = orchestra.train_models()
    report.raise_failures()
    for name, plain in zip(("often", "never"), expected, strict=True):
        assert report.tasks[name].losses == plain.losses
        assert report.tasks[name].validation_losses == plain.validation_losses


class Aside:
    """Leads to a layer where no replica follows: it copies itself."""

    def __init__(self, layer):
        self.layer = layer

    def __deepcopy__(self, memo):
        return self


@pytest.mark.net
def test_a_gradient_of_the_users_own_parameter_is_refused_by_name():
    """Not seen in the rehearsal, whose batch is another."""

    def use(self, x):
        return self.linear(x) if len(x) == 6 else self.kept.layer(x)

    orchestra, model = orchestra_of(lambda: Around(keeps(lambda self: Aside(self.linear)), use))
    with refusal(LayerFault, task="hidden", says="1.linear.weight gradient replicas"):
        orchestra.train_models()
    assert all(parameter.grad is None for parameter in model.parameters())


# torch.jit


@pytest.mark.net
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "layer"),
    [
        pytest.param(lambda: torch.jit.script(scriptable()), "1 (RecursiveScriptModule)", id="script"),
        pytest.param(lambda: nn.Sequential(torch.jit.trace(scriptable(), torch.ones(2, 8))), "1.0", id="nested"),
        pytest.param(lambda: (nn.Sequential(nn.Linear(8, 3)), scripted_loss()), "loss_fn", id="loss"),
    ],
)
def test_torch_jit_is_refused(make, layer):
    refused(make, layer, says="torch.jit script")


def scriptable():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def scripted_loss():
    return torch.jit.script(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])))


def gelu(x):
    return x * torch.sigmoid(1.7 * x) + torch.tanh(x)


@functools.cache
def scripted():
    """`gelu` as TorchScript compiles it after two runs: from then on it rounds differently, in a plain loop, too."""
    with warnings.catch_warnings(action="ignore"):
        function = torch.jit.script(gelu)
    for n in [len(inputs) for inputs, _ in batches()] * 3:
        function(torch.ones(n, 8, requires_grad=True)).sum().backward()
        with torch.no_grad():
            function(torch.ones(n, 8))
    return function


# However they say that they are copied


class Itself(nn.Linear):
    def __deepcopy__(self, memo):
        return self


class Reduced(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    def __reduce__(self):
        return Reduced, ()


class ForgetsScale(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.scale = 3.0

    def __getstate__(self):
        return {**vars(self), "scale": 1.0}

    def forward(self, x):
        return super().forward(x) * self.scale


class Forwarding(nn.Module):
    """Answers for the module inside, also when it is asked how to be copied."""

    def __init__(self):
        super().__init__()
        self.inner = Itself(8, 8)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner(x)


class Proxy:
    """Answers for what is inside, also before it has it; no pickle takes it."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __getstate__(self):
        raise TypeError("not to be pickled")

    def __call__(self, *args):
        return self.inner(*args)


def keeps(make_value):
    return lambda self: vars(self).update(kept=make_value(self))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Itself(8, 8), id="deepcopy returns itself"),
        pytest.param(lambda: Reduced(), id="reduce makes a new one"),
        pytest.param(lambda: ForgetsScale(), id="getstate forgets"),
        pytest.param(lambda: Forwarding(), id="a module that answers for another"),
        pytest.param(lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), id="graph module"),
        pytest.param(
            lambda: Around(lambda self: vars(self).update(f=scripted()), lambda s, x: s.f(s.linear(x))), id="jit"
        ),
        pytest.param(lambda: Around(keeps(lambda _: {"a": [threading.Lock()]})), id="lock"),
        pytest.param(lambda: Around(keeps(lambda _: (k for k in range(3)))), id="generator"),
        pytest.param(lambda: Around(keeps(lambda _: Proxy(torch.tanh)), lambda s, x: s.kept(s.linear(x))), id="proxy"),
        pytest.param(
            lambda: Around(keeps(lambda self: [nn.Linear(8, 8)]), lambda self, x: self.linear(self.kept[0](x))),
            id="layer in a list only",
        ),
        pytest.param(
            lambda: Around(
                keeps(lambda self: functools.partial(F.linear, weight=self.linear.weight)), lambda self, x: self.kept(x)
            ),
            id="partial",
        ),
    ],
)
def test_layers_that_no_deepcopy_would_copy_are_exact(make, cut):
    assert_exact(make, cut)


def test_a_loss_that_no_pickle_takes_is_copied():
    loss = Proxy(nn.MSELoss())
    copied = copy_of_function(loss)
    assert copied is not loss
    assert copied(torch.ones(2), torch.zeros(2)) == 1


@pytest.mark.parametrize(
    ("keep", "use"),
    [
        (bytearray(), lambda kept: kept.append(1)),
        (array("d"), lambda kept: kept.append(1.0)),
        (itertools.count(), next),
    ],
)
def test_what_a_copied_loss_counts_in_is_its_own(keep, use):
    before = repr(keep)
    copy_of_function(lambda: use(keep))()
    assert repr(keep) == before


class Logs:
    """Closes a file at its end."""

    def __init__(self, file):
        self.file = file

    def __call__(self, output, target):
        self.file.write("called")
        return F.mse_loss(output, target)

    def __del__(self):
        self.file.close()


def test_the_end_of_a_copy_closes_no_file_of_the_original():
    loss = Logs(io.StringIO())
    copied = copy_of_function(lambda *args: loss(*args))
    del copied
    gc.collect()
    assert loss(torch.ones(2), torch.zeros(2)) == 1


# Memory in two places


def buffers(*views, persistent=True):
    def keep(self):
        big = torch.arange(8.0)
        for name, view in zip("abc", views, strict=False):
            self.register_buffer(name, view(big), persistent=persistent)

    return lambda: Around(keep, lambda self, x: self.linear(x) + self.a.sum())


VIEWS = {
    "of a parameter": lambda: Around(keeps(lambda self: self.linear.weight.data.t()), lambda self, x: x @ self.kept),
    "with a graph": lambda: Around(keeps(lambda self: self.linear.weight.t()), lambda self, x: x @ self.kept),
    "of another layer": lambda: [
        first := nn.Linear(8, 8),
        Around(keeps(lambda _: first.weight.data[:]), lambda s, x: x @ s.kept),
    ],
    "of a buffer": lambda: Around(
        lambda self: (self.register_buffer("b", torch.ones(8)), vars(self).update(kept=self.b[:])),
        lambda self, x: self.linear(x) + self.kept,
    ),
}


@pytest.mark.net
@pytest.mark.parametrize("name", VIEWS)
def test_an_attribute_that_is_a_view_is_missed_where_no_forward_has_set_it(name):
    refused(VIEWS[name], "Around", says="'kept' attribute")


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(buffers(lambda big: big[::2], lambda big: big[1::2]), id="interleaved buffers"),
        pytest.param(buffers(lambda big: big.expand(2, 8)), id="expanded by itself"),
        pytest.param(
            lambda: [Around(keeps(lambda _, t=t: t), lambda s, x: s.linear(x) + s.kept) for t in torch.ones(2, 8)],
            id="constants that share memory",
        ),
        pytest.param(
            lambda: Around(
                keeps(lambda self: self.linear.weight.detach()),
                lambda self, x: x @ (vars(self).update(kept=self.linear.weight.detach()) or self.kept),
            ),
            id="a view that each forward makes anew",
        ),
    ],
)
def test_memory_that_is_not_shared_with_a_weight_is_exact(make, cut):
    assert_exact(make, cut)


# Weights that a hook makes anew before each forward


def weight_norm(module, *args, **options):
    with pytest.warns(FutureWarning, match="weight_norm"):
        return torch.nn.utils.weight_norm(module, *args, **options)


def pruned():
    linear = nn.Linear(8, 8)
    prune.l1_unstructured(linear, "weight", 0.3)
    prune.random_unstructured(linear, "bias", 0.3)
    return prune.ln_structured(linear, "weight", 0.3, 2, 0)


MADE_ANEW = {
    "weight norm": lambda: weight_norm(nn.Linear(8, 8)),
    "weight norm of all": lambda: nn.Sequential(nn.ReLU(), weight_norm(nn.Linear(8, 8), dim=None)),
    "weight norm of two": lambda: weight_norm(weight_norm(nn.Linear(8, 8)), "bias", dim=None),
    "weight norm, frozen": lambda: weight_norm(nn.Linear(8, 8)).requires_grad_(False),
    "weight norm, last": lambda: (nn.Sequential(nn.Linear(8, 8), weight_norm(nn.Linear(8, 3))), F.cross_entropy),
    "weight norm, twice": lambda: [layer := weight_norm(nn.Linear(8, 8)), nn.ReLU(), layer],
    "weight norm, used beside": lambda: Around(
        lambda self: weight_norm(self.linear), lambda self, x: self.linear(x) + F.linear(x, self.linear.weight)
    ),
    "weight norm of an LSTM": lambda: Around(
        lambda self: setattr(self, "linear", weight_norm(nn.LSTM(8, 8, batch_first=True), "weight_hh_l0")),
        lambda self, x: self.linear(x[:, None])[0][:, 0],
    ),
    "prune": pruned,
    "old spectral norm": lambda: torch.nn.utils.spectral_norm(nn.Linear(8, 8)),
}


@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", MADE_ANEW)
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
def test_weights_that_a_hook_makes_are_exact(name, cut, accumulation_steps):
    assert_exact(MADE_ANEW[name], cut, accumulation_steps=accumulation_steps)


def test_a_made_weight_that_no_hook_renews_stays_as_in_the_plain_loop():
    assert_exact(
        lambda: Around(
            lambda self: setattr(self, "other", weight_norm(nn.Linear(8, 8))),
            lambda self, x: self.linear(x) + F.linear(x, self.other.weight.detach()),
        )
    )


@pytest.mark.net
def test_outputs_of_a_run_before_that_layers_keep_do_not_matter():
    class KeepsLast(nn.Linear):
        def forward(self, x):
            self.last = [super().forward(x)]
            return self.last[0] * 1

    def make():
        layer = KeepsLast(8, 8)
        layer(torch.ones(2, 8))
        return layer

    assert_exact(make)


# Weights of other layers


@pytest.mark.net
def test_a_weight_of_another_shard_that_is_not_registered_is_an_error():
    def make():
        first = nn.Linear(8, 8)
        return [first, nn.ReLU(), Around(keeps(lambda _: [first.weight]), lambda self, x: F.linear(x, self.kept[0]))]

    orchestra, _ = orchestra_of(make)
    with refusal(RuntimeError, says="mismatch vec (0)"):
        orchestra.generate()
    assert_exact(make, "one shard")


# Everything that a layer holds


@pytest.mark.net
def test_reach_goes_by_the_shortest_path_and_tells_what_a_copy_shares():
    class Slotted:
        __slots__ = ("value",)

    tensors = [torch.ones(k) for k in range(7)]
    slotted = Slotted()
    slotted.value = tensors[1]
    inner = nn.Linear(2, 2)
    root = {
        "list": [tensors[0], (tensors[0],)],
        "slots": slotted,
        "partial": functools.partial(print, tensors[2]),
        "closure": lambda value=tensors[3]: (tensors[4], value),
        "weak": weakref.ref(tensors[5]),
        "method": inner.forward,
        "array": np.ones(3)[1:],
    }
    found = {id(held.value): (held.path, held.is_copied) for held in reach(("root", root))}
    assert found[id(tensors[0])] == ("root['list'][0]", True)
    assert found[id(tensors[1])] == ("root['slots'].value", True)
    assert found[id(tensors[2])] == ("root['partial'].args[0]", True)
    assert found[id(tensors[3])] == ("root['closure'].__defaults__", False)
    assert found[id(tensors[4])] == ("root['closure'].tensors[4]", False)
    assert found[id(tensors[5])] == ("root['weak']()", False)
    assert found[id(inner.weight)] == ("root['method'].__self__.weight", True)
    assert found[id(root["array"].base)] == ("root['array'].base", True)


def twin(module, name):
    (twin,) = getattr(module, name).twin
    return twin.sum()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ["weight", "seen"])
def test_what_is_set_on_a_parameter_or_buffer_is_set_on_its_placeholder(name, cut):
    def keep(self):
        self.register_buffer("seen", torch.ones(8))
        self.weight = self.linear.weight
        vars(getattr(self, name)).update(scale=3.0, twin=[getattr(self, name)])

    assert_exact(lambda: Around(keep, lambda s, x: s.linear(x) * getattr(s, name).scale + twin(s, name)), cut)


@pytest.mark.net
@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda self, x: register(self, "linear_2", nn.Linear(8, 8))(self.linear(x)), "linear_2"),
        (lambda self, x: self.linear(x) * register(self, "scale", nn.Parameter(torch.ones(8))), "scale"),
        (lambda self, x: self.linear(x) + register(self, "shift", torch.zeros(8)), "shift"),
    ],
)
def test_what_a_forward_registers_is_refused(use, name):
    refused(lambda: Around(use=use), "1 (Around)", "one shard", says=f"'{name}'")


def deletes(bank, x):
    if hasattr(bank, "kept"):
        del bank.kept
    return bank.linear(x)


def moves(bank, x):
    kept = bank.kept
    del bank.kept
    bank.kept = kept  # an attribute like others now
    return bank.linear(x) + kept


@pytest.mark.parametrize("cut", ["each layer", "one shard"])
@pytest.mark.parametrize("use", [deletes, moves])
def test_a_buffer_that_a_forward_deletes_is_refused(use, cut):
    def make():
        return Around(lambda self: self.register_buffer("kept", torch.ones(8)), use)

    refused(make, "1 (Around)", cut, says="'kept' child")


def register(module, name, value):
    if not hasattr(module, name):
        if isinstance(value, (nn.Module, nn.Parameter)):
            setattr(module, name, value)
        else:
            module.register_buffer(name, value)
    return getattr(module, name)
