"""Whatever a layer gives to the next crosses between shards with the bits of plain PyTorch, or is refused by name."""

import copy
from collections import namedtuple

import pytest
import torch
from torch import Tensor, nn

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask
from partitioners import Presharded
from tests import reference

SEED, LR, EPOCHS = 7, 1e-2, 2
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


def train(layers, *, ends=None, inputs=None, task_options=None, loss_fn=squared, memory="4MiB", num_devices=1):
    """Train with the engine and in plain PyTorch: losses and models of both."""
    model = nn.Sequential(*layers)
    plain = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(2)
    if inputs is None:
        inputs = [torch.randn(9, WIDTH, generator=generator, dtype=torch.complex64) for _ in range(3)]
    loader = [(each, torch.zeros(9)) for each in inputs]
    options = {"seed": SEED, "lr": LR, "epochs": EPOCHS, **(task_options or {})}
    ends = ends or range(1, len(model) + 1)
    task = ModelTask(model, loss_fn, loader, partitioner=Presharded(list(ends)), name="a", **options)
    orchestra = ModelOrchestrator([task], devices=[EmulatedDevice(memory) for _ in range(num_devices)])
    orchestra.verbose = 0
    report = orchestra.train_models().tasks["a"]
    result = reference.train(plain, loss_fn, loader, **options)
    assert report.status == "finished", report.error
    return report, result, model, plain


def assert_plain(layers, **options):
    """Losses and parameters of both are the same, bit for bit."""
    report, result, model, plain = train(layers, **options)
    assert report.losses == result.losses
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


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


@pytest.mark.parametrize("ends", ["each", "one"])
@pytest.mark.parametrize("by_matrix", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_bits_of_a_boundary_that_is_read_as_another(name, by_matrix, ends):
    views = [Fn(each) for each in VIEWS[name]]
    layers = [Complex(), *views, Complex(by_matrix), Fn(torch.tanh), Complex()]
    torch.manual_seed(1)
    assert_plain(layers, ends=[len(layers)] if ends == "one" else None)
