"""Whatever a layer gives to the next crosses between shards with the bits of plain PyTorch, or is refused by name."""

import copy
import dataclasses
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hydra_engine import ModelTask
from partitioners import Presharded
from tests import exact, reference
from tests.covering import covering
from tests.refused import refused

SEED, LR, EPOCHS, NUM_BATCHES = 7, 1e-2, 2, 2
WIDTH = 13  # odd, so that kernels have remainders
Pair = namedtuple("Pair", ["left", "right"])


class Fn(nn.Module):
    """A function as a layer."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


class Complex(nn.Module):
    """A product of complex matrices, whose kernels read the conj bit."""

    def __init__(self, by_matrix=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH**0.5)
        self.by_matrix = by_matrix

    def forward(self, x):
        return (self.weight @ x.mT).mT if self.by_matrix else x @ self.weight


def squared(output, target):
    """A real loss of whatever leaves the last layer."""
    output = output if isinstance(output, Tensor) else sum(output)
    output = torch.view_as_real(output.resolve_conj()) if output.is_complex() else output
    return (output * output).mean() + 0 * target.float().mean()


def train(layers, *, inputs=None, task_options=None, loss_fn=squared):
    """Train with the engine, a shard per layer, and in plain PyTorch: losses and models of both."""
    model = nn.Sequential(*layers)
    plain = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(2)
    if inputs is None:
        inputs = [torch.randn(9, WIDTH, generator=generator, dtype=torch.complex64) for _ in range(NUM_BATCHES)]
    loader = [(each, torch.zeros(9)) for each in inputs]
    options = {"seed": SEED, "lr": LR, "epochs": EPOCHS, **(task_options or {})}
    partitioner = Presharded(list(range(1, len(model) + 1)))
    task = ModelTask(model, loss_fn, loader, partitioner=partitioner, name="a", **options)
    report = exact.silent([task], "4MiB").train_models().tasks["a"]
    result = reference.train(plain, loss_fn, loader, **options)
    assert report.status == "finished", report.error
    return report, result, model, plain


def assert_plain(layers, **options):
    """Losses and parameters of both are the same, bit for bit."""
    report, result, model, plain = train(layers, **options)
    assert report.losses == result.losses
    exact.assert_same_state(dict(model.named_parameters()), dict(plain.named_parameters()))


def negated(z):
    """What has a neg bit: the imaginary part of a conjugate, with gaps between its numbers."""
    assert z.conj().imag.is_neg()
    return z.conj().imag


def pair_of(z):
    return z.conj(), z


VIEWS = {
    "conj": [torch.conj],
    "conj twice": [torch.conj, torch.conj],
    "conj of a transpose": [lambda z: z.mT.conj(), lambda z: z.mT],
    "imag": [lambda z: z.imag, lambda x: torch.complex(x, x)],
    "real": [lambda z: z.real, lambda x: torch.complex(x, x)],
    "negated": [negated, lambda x: torch.complex(x, x)],
    "negated, then conj": [negated, lambda x: torch.complex(x, x).conj(), torch.conj],
    "neg view": [torch._neg_view],
    "conj of a neg view": [lambda z: torch._neg_view(z).conj()],
    "resolved": [torch.conj, Tensor.resolve_conj],
    "resolved neg": [negated, Tensor.resolve_neg, lambda x: torch.complex(x, x)],
    "view as real": [torch.view_as_real, torch.view_as_complex],
    "a pair": [pair_of, lambda both: both[0] @ both[1].mT @ both[0]],
    "a named pair": [lambda z: Pair(z.conj(), z), lambda pair: pair.left + 2 * pair.right],
    "expanded": [lambda z: z[:1].conj().expand(9, WIDTH)],
    "windows": [lambda z: z.conj().unfold(1, 3, 1), lambda z: torch.cat([z[..., 0], z[..., 1][:, :2]], 1)],
    "sliced": [lambda z: z.conj()[:, ::2], lambda z: torch.cat([z, z], 1)[:, :WIDTH]],
    "zero-dim": [lambda z: (z, z.conj().sum()), lambda pair: pair[0] * pair[1]],
    "no gradient": [lambda z: (z, z.detach().conj()), lambda pair: pair[0] @ pair[1].mT @ pair[0]],
}


@covering(name=list(VIEWS), by_matrix=[False, True], strength=1)
def test_bits_of_a_boundary_that_is_read_as_another(name, by_matrix):
    views = [Fn(each) for each in VIEWS[name]]
    torch.manual_seed(1)
    assert_plain([Complex(), *views, Complex(by_matrix), Fn(torch.tanh), Complex()])


# -- other values


def real_inputs(change=lambda x: x):
    generator = torch.Generator().manual_seed(3)
    return [change(torch.randn(9, WIDTH, generator=generator)) for _ in range(NUM_BATCHES)]


def linears(*functions):
    """A layer, these functions as layers, and a layer."""
    torch.manual_seed(1)
    return [nn.Linear(WIDTH, WIDTH), *map(Fn, functions), nn.Linear(WIDTH, WIDTH)]


class Scaled(nn.Module):
    """Gives its own parameter on, beside a product with it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return x * self.scale, self.scale


CROSSING = {
    "a container with all that is no tensor": [
        lambda x: OrderedDict(a=x, b=None, c="text", d=2.5, e=(), f=np.arange(WIDTH, dtype=np.float32)),
        lambda d: d["a"] * d["d"] * torch.from_numpy(d["f"]),
    ],
    "an array in the tensor's memory": [lambda x: (x, x.detach().numpy()), lambda d: d[0] * torch.from_numpy(d[1])],
    "a number that depends on values": [lambda x: (x, x.mean().item()), lambda d: d[0] * d[1]],
    "nothing": [lambda x: (x, x[:0]), torch.cat],
    "flags and numbers": [lambda x: (x, x > 0, (x * 10).int(), [x.long()]), lambda d: d[0] * d[1] + d[2] + d[3][0]],
    "one column for all": [lambda x: x[:, :1].expand(9, WIDTH)],
    "a matrix turned over": [lambda x: x.t(), lambda x: x * 2, lambda x: x.t()],
    "double complex": [lambda x: x.to(torch.complex128), lambda z: (z * z.conj()).real.float()],
}


@pytest.mark.parametrize("name", CROSSING)
def test_what_crosses_is_exact(name):
    assert_plain(linears(*CROSSING[name]), inputs=real_inputs())


def test_a_parameter_crosses_as_what_it_is():
    assert_plain([nn.Linear(WIDTH, WIDTH), Scaled(), Fn(lambda d: d[0] + d[1])], inputs=real_inputs())


@pytest.mark.parametrize("name", ["conj", "negated", "conj of a neg view"])
def test_batches_and_targets_that_are_read_as_others(name):
    def change(x):
        return VIEWS[name][0](torch.complex(x, 2 * x))

    layers = [Fn(lambda z: torch.cat([z, z], 1)[:, :WIDTH] + 0j), Complex(), Complex(True)]
    torch.manual_seed(1)
    assert_plain(layers, inputs=real_inputs(change))


class Marked(torch.Tensor):
    """A class of its own."""


@dataclasses.dataclass
class Named:
    value: Tensor


def quantized(x):
    return torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)


UNFIT = {  # how a tensor is made that is no plain one, and what an error calls its kind
    "sparse": (lambda x: x.to_sparse(), "torch.sparse_coo"),
    "in a list": (lambda x: [x, x.detach().to_sparse()], "torch.sparse_coo"),
    "csr": (lambda x: x.detach().to_sparse_csr(), "torch.sparse_csr"),
    "nested": (lambda x: torch.nested.as_nested_tensor(list(x.split(3))), "nested"),
    "jagged": (lambda x: torch.nested.as_nested_tensor(list(x.split([2, 3, 4])), layout=torch.jagged), "nested"),
    "quantized": (quantized, "quantized"),
    "a class of its own": (lambda x: x.as_subclass(Marked), "Marked"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of nested and sparse tensors, which are prototypes
@pytest.mark.parametrize("name", UNFIT)
def test_what_is_more_than_memory_is_refused_by_name(name):
    make, kind = UNFIT[name]
    with refused(TypeError, task="a", layer="1 (", says=f"Fn {kind}"):
        train(linears(make, lambda x: x), inputs=real_inputs())
    with refused(TypeError, task="a", says=f"batch {kind}"):
        train(linears(), inputs=real_inputs(make))
    batch = real_inputs()[0]
    task = ModelTask(linears(), squared, [(batch, make(batch))], name="a")
    with refused(TypeError, task="a", says=f"target {kind}"):
        exact.silent([task]).generate()


def test_a_dataclass_is_refused_by_name():
    with refused(TypeError, task="a", layer="1 (", says="Fn Named"):
        train(linears(Named, lambda named: named.value), inputs=real_inputs())


@pytest.mark.filterwarnings("ignore::UserWarning")
@covering(name=["sparse", "csr", "nested", "quantized"], kind=["buffer", "parameter"], strength=1)
def test_parameters_and_buffers_are_plain_or_refused_by_name(name, kind):
    layer, tensor = nn.Linear(WIDTH, WIDTH), UNFIT[name][0](torch.eye(WIDTH)[:9])
    if kind == "buffer":
        layer.register_buffer("held", tensor)
    else:
        layer.held = nn.Parameter(tensor, requires_grad=False)
    with refused(TypeError, layer="0.held", says=f"{kind} {UNFIT[name][1]}"):
        ModelTask([layer], squared, real_inputs())


def test_a_last_layer_may_give_its_loss_what_it_likes():
    def loss(output, target):
        return torch.sparse.sum(output * output)

    assert_plain([*linears()[:1], Fn(Tensor.to_sparse)], inputs=real_inputs(), loss_fn=loss)


class SparseGradient(torch.autograd.Function):
    """A product whose gradients are sparse where it is told so."""

    @staticmethod
    def forward(ctx, x, weight, sparse):
        ctx.save_for_backward(x, weight)
        ctx.sparse = sparse
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        of_x, of_weight = gradient @ weight.t(), x.t() @ gradient
        return of_x.to_sparse() if ctx.sparse == "x" else of_x, of_weight.to_sparse(), None


class Product(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.sparse = sparse

    def forward(self, x):
        return SparseGradient.apply(x, self.weight, self.sparse)


@covering(place=[0, 1, 2], options=[{}, {"accumulation_steps": 3}, {"max_grad_norm": 1.0}], strength=1)
def test_sparse_gradients_are_refused_with_the_parameters_name(place, options):
    layers = linears(lambda x: x)
    layers[place] = Product("weight")
    with refused(TypeError, task="a", layer=f"{place}.weight", says="gradient torch.sparse"):
        train(layers, inputs=real_inputs(), task_options=options)


def test_sparse_gradients_of_a_boundary_are_refused_with_the_layers_name():
    with refused(TypeError, task="a", says="gradient 1 torch.sparse"):
        train([nn.Linear(WIDTH, WIDTH), Product("x"), nn.Linear(WIDTH, WIDTH)], inputs=real_inputs())


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_embeddings_are_refused_by_name_unless_they_are_frozen(kind):
    layers = [kind(20, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)]
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(20, (9, 3), generator=generator) for _ in range(NUM_BATCHES)]
    for optimizer in (torch.optim.SparseAdam, torch.optim.SGD):
        with refused(layer=f"0 ({kind.__name__})", says="sparse=False"):
            train(layers, inputs=ids, task_options={"optimizer": optimizer})
    layers[0].requires_grad_(False)
    assert_plain(layers, inputs=ids)
