"""Copies of layers hold none of the user's tensors: layers that hide one are trained exactly, or refused by name."""

import copy
import functools
import threading
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from hydra_engine import EmulatedDevice, Model, ModelOrchestrator, ModelTask
from hydra_engine.host.bound_copy import LayerFault
from hydra_engine.host.layout import ModelLayout, Structure
from partitioners import Presharded
from partitioners.reach import reach
from tests import exact, reference, zoo

# The check of copies: in `make test` are the tests that carry `net`.
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


def refused(make, match, cut="each layer"):
    """`generate()` refuses, names the task, and has changed nothing."""
    orchestra, model = orchestra_of(make, cut)
    before = copy.deepcopy({name: tensor.detach().clone() for name, tensor in zoo.state(model).items()})
    with pytest.raises(ValueError, match=match) as caught:
        orchestra.generate()
    assert str(caught.value).startswith("hidden: ")
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


# torch.jit


def scriptable():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def scripted_loss():
    return torch.jit.script(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])))


def gelu(x):
    return x * torch.sigmoid(1.7 * x) + torch.tanh(x)


with warnings.catch_warnings(action="ignore"):
    scripted = torch.jit.script(gelu)


class CallsScripted(nn.Linear):
    def forward(self, x):
        return scripted(super().forward(x))


JITTED = {
    "script": (lambda: torch.jit.script(scriptable()), r"1 \(RecursiveScriptModule\): 1 is compiled"),
    "trace": (lambda: torch.jit.trace(scriptable(), torch.ones(2, 8)), r"1 .*: 1 is compiled"),
    "nested": (
        lambda: nn.Sequential(nn.Sequential(torch.jit.script(scriptable()))),
        r"1 .*: 1\.0\.0 is compiled",
    ),
    "without parameters": (lambda: torch.jit.script(nn.Sequential(nn.Tanh())), "1 .*: 1 is compiled"),
    "last": (lambda: (nn.Sequential(nn.Linear(8, 3), torch.jit.script(nn.ReLU())), F.cross_entropy), "1 is compiled"),
    "loss": (lambda: (nn.Sequential(nn.Linear(8, 3)), scripted_loss()), "loss_fn is compiled"),
    "function": (lambda: Around(lambda self: vars(self).update(f=scripted)), r"1\.f is compiled by torch\.jit"),
    "function of the module": (lambda: CallsScripted(8, 8), r"1\.forward\.scripted is compiled by torch\.jit"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", JITTED)
def test_torch_jit_is_refused(name):
    refused(*JITTED[name])


# Ways to be copied


class Itself(nn.Linear):
    def __deepcopy__(self, memo):
        return self


class Fresh(nn.Linear):
    def __deepcopy__(self, memo):
        new = Fresh(8, 8)
        new.load_state_dict(self.state_dict())
        return new


class Reduced(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    def __reduce__(self):
        return Reduced, ()


class KeepsBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        self.seen += x.detach().mean(0)
        return x + self.seen

    def __deepcopy__(self, memo):
        new = KeepsBuffer()
        new.seen = self.seen
        return new


class ForgetsScale(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.scale = 3.0

    def __getstate__(self):
        return {**vars(self), "scale": 1.0}

    def forward(self, x):
        return super().forward(x) * self.scale


class Shared:
    """Keeps what it is given, also in copies."""

    def __init__(self, value):
        self.value = value

    def __deepcopy__(self, memo):
        return self


class Forwarding(nn.Module):
    """Answers for the module inside, also when it is asked how to be copied."""

    def __init__(self):
        super().__init__()
        self.inner = Fresh(8, 8)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner(x)


def keeps(make_value):
    return lambda self: vars(self).update(kept=make_value(self))


COPIED_WRONGLY = {
    "itself": (lambda: Itself(8, 8), r"1 \(Itself\): the 1\.weight of its copy is another"),
    "a new one": (lambda: Fresh(8, 8), r"1 \(Fresh\): the 1\.weight of its copy is another"),
    "nested": (lambda: nn.Sequential(nn.ModuleDict({"a": Fresh(8, 8)})["a"]), r"the 1\.0\.weight of its copy"),
    "first": (lambda: (nn.Sequential(Fresh(8, 8), nn.Linear(8, 3)), F.cross_entropy), r"the 0\.weight of its copy"),
    "by reduce": (lambda: Reduced(), r"1 \(Reduced\): the 1\.weight of its copy"),
    "a buffer": (lambda: KeepsBuffer(), r"the 1\.seen of its copy is another"),
    "a number": (lambda: ForgetsScale(), r"the 1\.scale of its copy is 1\.0, instead of 3\.0"),
    "by a module inside": (lambda: Forwarding(), r"1 \(Forwarding\): its copy has no 1"),
    "an object with a parameter": (
        lambda: Around(keeps(lambda self: Shared(self.linear.weight)), lambda self, x: F.linear(x, self.kept.value)),
        r"the 1\.kept\.value of its copy is still parameter 1\.linear\.weight",
    ),
    "an object with a view": (
        lambda: Around(keeps(lambda self: Shared(self.linear.weight.detach())), lambda self, x: x @ self.kept.value),
        r"the 1\.kept\.value of its copy is still parameter 1\.linear\.weight",
    ),
}


@pytest.mark.net
@pytest.mark.parametrize("name", COPIED_WRONGLY)
def test_a_copy_that_is_not_bound_is_refused(name):
    refused(*COPIED_WRONGLY[name])


class Careful(nn.Linear):
    def __deepcopy__(self, memo):
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__ = copy.deepcopy(vars(self), memo)
        return new


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Careful(8, 8), id="deepcopy with the memo"),
        pytest.param(lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), id="graph module"),
        pytest.param(
            lambda: Around(keeps(lambda self: [nn.Linear(8, 8)]), lambda self, x: self.linear(self.kept[0](x))),
            id="modules in a list",
        ),
        pytest.param(
            lambda: Around(
                keeps(lambda self: functools.partial(F.linear, weight=self.linear.weight)), lambda self, x: self.kept(x)
            ),
            id="partial",
        ),
        pytest.param(
            lambda: Around(
                keeps(lambda self: types.MethodType(nn.Linear.forward, self.linear)), lambda s, x: s.kept(x)
            ),
            id="bound method",
        ),
    ],
)
def test_layers_that_a_copy_is_bound_in_are_exact(make, cut):
    assert_exact(make, cut)


@pytest.mark.net
@pytest.mark.parametrize(
    ("make_value", "path"),
    [
        pytest.param(threading.Lock, r"1\.0\.kept", id="lock"),
        pytest.param(lambda: {"a": [threading.Lock()]}, r"1\.0\.kept", id="lock in a dict"),
        pytest.param(lambda: (k for k in range(3)), r"1\.0\.kept", id="generator"),
        pytest.param(
            lambda: nn.Sequential(Around(keeps(lambda _: threading.Lock()))), r"1\.0\.kept\.0\.kept", id="deep"
        ),
    ],
)
def test_what_cannot_be_copied_is_named(make_value, path):
    make = lambda: nn.Sequential(Around(lambda self: setattr(self, "kept", make_value())))  # noqa: E731
    refused(make, rf"1 \(Sequential\): {path} cannot be copied for a device: TypeError: cannot pickle")


# Memory in two places


def buffers(*views, persistent=True):
    def keep(self):
        big = torch.arange(8.0)
        for name, view in zip("abc", views, strict=False):
            self.register_buffer(name, view(big), persistent=persistent)

    return lambda: Around(keep, lambda self, x: self.linear(x) + self.a.sum())


def product_with(weight):
    return lambda x: x @ weight


SHARED = {
    "view of a parameter": (
        lambda: Around(keeps(lambda self: self.linear.weight.data.t()), lambda self, x: x @ self.kept),
        r"1 \(Around\): forward computes with 1\.kept, but that shares the memory of parameter 1\.linear\.weight",
    ),
    "view with a graph": (
        lambda: Around(keeps(lambda self: self.linear.weight.t()), lambda self, x: x @ self.kept),
        r"forward computes with 1\.kept, .*parameter 1\.linear\.weight",
    ),
    "in a dict of lists": (
        lambda: Around(keeps(lambda s: {"a": [s.linear.bias.detach()]}), lambda s, x: s.linear(x) + s.kept["a"][0]),
        r"forward computes with 1\.kept\['a'\]\[0\], .*parameter 1\.linear\.bias",
    ),
    "iterator": (
        lambda: Around(keeps(lambda s: iter([s.linear.weight.data] * 99)), lambda s, x: s.linear(x) + x @ next(s.kept)),
        r"1\.kept.*parameter 1\.linear\.weight",
    ),
    "attribute of a parameter": (
        lambda: Around(
            lambda self: vars(self.linear.weight).update(old=self.linear.weight.data),
            lambda self, x: self.linear(x) + x @ self.linear.weight.old,
        ),
        r"forward computes with 1\.linear\.weight\.old, .*parameter 1\.linear\.weight",
    ),
    "expanded": (
        lambda: Around(keeps(lambda self: self.linear.bias.data.expand(8, 8)), lambda self, x: x @ self.kept),
        r"1\.kept, .*parameter 1\.linear\.bias",
    ),
    "of another layer": (
        lambda: [first := nn.Linear(8, 8), Around(keeps(lambda _: first.weight.data[:]), lambda s, x: x @ s.kept)],
        r"2 \(Around\): forward computes with 2\.kept, .*parameter 1\.weight",
    ),
    "NumPy array": (
        lambda: Around(keeps(lambda self: self.linear.bias.detach().numpy()), lambda s, x: x + torch.tensor(s.kept)),
        r"1\.kept shares the memory of parameter 1\.linear\.bias",
    ),
    "closure": (
        lambda: Around(keeps(lambda self: product_with(self.linear.weight.detach())), lambda s, x: s.kept(x)),
        r"1\.kept\.weight shares the memory of parameter",
    ),
    "buffer of a parameter": (
        lambda: Around(lambda self: self.register_buffer("v", self.linear.weight.data[:2])),
        r"parameter 1\.linear\.weight and buffer 1\.v share memory",
    ),
    "buffer of a buffer": (buffers(lambda big: big, lambda big: big[:3]), "buffer 1.a and buffer 1.b share memory"),
    "expanded buffer": (buffers(lambda big: big, lambda big: big[:1].expand(4)), "buffer 1.a and buffer 1.b share"),
    "non-persistent": (buffers(lambda b: b[:4], lambda b: b[3:], persistent=False), "buffer 1.a and buffer 1.b share"),
    "attribute of a buffer": (
        lambda: Around(
            lambda self: (self.register_buffer("b", torch.ones(8)), vars(self).update(kept=self.b[:])),
            lambda self, x: self.linear(x) + self.kept,
        ),
        r"forward computes with 1\.kept, .*buffer 1\.b",
    ),
    "two parameters": (
        lambda: [Around(lambda self, w=w: setattr(self.linear, "weight", nn.Parameter(w))) for w in overlapping()],
        r"parameter 1\.linear\.weight and parameter 2\.linear\.weight share memory",
    ),
}


def overlapping():
    big = torch.randn(12, 8)
    return big[:8], big[4:]


@pytest.mark.parametrize("cut", ["one shard", pytest.param("each layer", marks=pytest.mark.net)])
@pytest.mark.parametrize("name", SHARED)
def test_views_of_what_training_changes_are_refused(name, cut):
    refused(*SHARED[name], cut)


@pytest.mark.net
def test_a_loss_that_keeps_a_view_of_a_weight_is_refused():
    class Penalised(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.weight = model[0].weight.data

        def forward(self, output, target):
            return F.cross_entropy(output, target) + self.weight.pow(2).sum()

    def make():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
        return model, Penalised(model)

    refused(make, r"loss_fn: forward computes with loss_fn\.weight, .*parameter 0\.weight")


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


@pytest.mark.net
def test_a_view_that_is_read_for_a_later_batch_fails_the_task_there():
    """Not seen in the rehearsal: the task fails by name, and does not go on with old values."""

    def use(self, x):
        return self.linear(x) + (x @ self.kept if len(x) == 5 else 0)

    orchestra, _ = orchestra_of(lambda: Around(keeps(lambda self: self.linear.weight.data.t()), use), "one shard")
    with pytest.raises(LayerFault, match=r"forward computes with 1\.kept, .*parameter 1\.linear\.weight"):
        orchestra.train_models()


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


@pytest.mark.net
def test_a_made_weight_that_no_hook_renews_is_refused():
    make = lambda: Around(  # noqa: E731
        lambda self: setattr(self, "other", weight_norm(nn.Linear(8, 8))),
        lambda self, x: self.linear(x) + F.linear(x, self.other.weight.detach()),
    )
    refused(make, r"forward computes with 1\.other\.weight, but that was made by an earlier forward")


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


@pytest.mark.parametrize(
    ("held", "use", "name"),
    [
        (lambda first: [first.weight], lambda self, x: F.linear(x, self.kept[0]), r"parameter 1\.weight"),
        (lambda first: [first], lambda self, x: x * self.kept[0].weight.detach().norm(), r"parameter 1\.weight"),
        (lambda first: {"norm": first}, lambda self, x: x + self.kept["norm"].running_mean.sum(), r"buffer 1\.running"),
    ],
)
def test_a_weight_of_another_shard_that_is_not_registered_is_refused(held, use, name):
    first = nn.BatchNorm1d if "running" in name else functools.partial(nn.Linear, 8)
    make = lambda: [layer := first(8), nn.ReLU(), Around(keeps(lambda _: held(layer)), use)]  # noqa: E731
    refused(make, rf"3 \(\w+\) computes with {name}.* of a layer in another shard")
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


@pytest.mark.net
@pytest.mark.parametrize(
    ("make_value", "match"),
    [
        pytest.param(lambda self: {id(self.linear.weight): 2.0}, "is keyed by the ids", id="ids of parameters"),
        pytest.param(lambda self: {id(self.linear): 2.0}, "is keyed by the ids", id="ids of layers"),
        pytest.param(lambda self: weakref.WeakKeyDictionary({self.linear: 2.0}), "by weak references", id="weak keys"),
        pytest.param(lambda self: weakref.WeakSet([self]), "by weak references", id="weak set"),
    ],
)
def test_tables_that_find_nothing_in_a_copy_are_refused(make_value, match):
    refused(lambda: Around(keeps(make_value)), rf"1 \(Around\): 1\.kept .*{match}")


def twin(module, name):
    (twin,) = getattr(module, name).twin
    return twin.sum()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ["weight", "seen"])
def test_what_is_set_on_a_parameter_or_buffer_is_in_the_copy(name, cut):
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
    refused(lambda: Around(use=use), rf"1 \(\w+\): its parameter, buffer or child '{name}' came", "one shard")


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

    refused(make, r"1 \(\w+\): its parameter, buffer or child 'kept' came, went", cut)


def register(module, name, value):
    if not hasattr(module, name):
        if isinstance(value, (nn.Module, nn.Parameter)):
            setattr(module, name, value)
        else:
            module.register_buffer(name, value)
    return getattr(module, name)


@pytest.mark.net
def test_a_stale_tensor_can_be_replaced_and_not_computed_with():
    layer = weight_norm(nn.Linear(8, 8))
    structure = Structure(ModelLayout([layer], ["0"], None), torch.device("cpu"))
    stale = structure.layers[0].weight
    assert isinstance(stale, torch.Tensor)
    for use in (lambda: stale + 1, lambda: stale.shape, lambda: torch.stack([stale]), lambda: bool(stale)):
        with pytest.raises(LayerFault, match=r"0: forward computes with 0\.weight"):
            use()
