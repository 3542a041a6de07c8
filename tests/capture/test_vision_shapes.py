"""What networks for images do: activations in place at every cut, and blocks that are computed twice."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from hydra_engine import Model, ModelTask
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.covering import cover
from tests.refused import refused

SEED, LR = 7, 1e-3


def batches():
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(n, 3, side, side, generator=generator), torch.randint(3, (n,), generator=generator))
        for n, side in ((4, 6), (4, 6), (3, 8))
    ]


def task_of(model, name, ends):
    return ModelTask(
        model,
        F.cross_entropy,
        batches(),
        LR,
        name=name,
        optimizer=torch.optim.AdamW,
        partitioner=Presharded(ends),
        seed=SEED,
        validation=batches()[1:],
    )


def assert_trains_as(make, tasks, networks):
    """Train the tasks together; each gives what plain PyTorch does."""
    plain = make()
    expected = reference.train(
        plain, F.cross_entropy, batches(), seed=SEED, lr=LR, optimizer=torch.optim.AdamW, validation=batches()[1:]
    )
    report = exact.run(tasks, memory="64MiB")
    for task, network in zip(tasks, networks, strict=True):
        found = report.tasks[task.name]
        assert found.status == "finished", found.error
        assert (found.losses, found.validation_losses) == (expected.losses, expected.validation_losses), task.name
        exact.assert_same_state(zoo.state(network), zoo.state(plain))


class Residual(nn.Module):
    """As MNASNet's: its input is added to what it computes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 1)
        )

    def forward(self, x):
        return self.layers(x) + x


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x.mean([2, 3]))


def chain():
    torch.manual_seed(1)
    stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
    return nn.Sequential(stem, nn.ReLU(inplace=True), Residual(), nn.ReLU(inplace=True), Pooled())


class Whole(nn.Module):
    """The same with a forward of its own."""

    def __init__(self):
        super().__init__()
        self.body = chain()

    def forward(self, x):
        return self.body(x)


def cuts_of(num_layers):
    """Cuts of a chain, by the ends of their shards, in which every two places are cut, or not, in every way."""
    cases = cover(dict.fromkeys(range(1, num_layers), (False, True)))
    return [[*(k for k, is_cut in sorted(case.items()) if is_cut), num_layers] for case in cases]


@pytest.mark.rest
@pytest.mark.parametrize("make", [Whole, pytest.param(chain, marks=pytest.mark.rest)])
def test_activations_in_place_train_however_a_model_is_cut(make):
    def model_of(network):
        return network if make is chain else Model(network, example=batches()[0][0])

    cuts = cuts_of(len(model_of(make())))
    assert len(cuts) >= 4
    networks = [make() for _ in cuts]
    tasks = [task_of(model_of(network), str(ends), ends) for network, ends in zip(networks, cuts, strict=True)]
    assert_trains_as(make, tasks, networks)


class Functional(nn.Module):
    """Calls a batch norm by its function, and counts in a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        return F.relu_(F.batch_norm(self.conv(x), self.mean, self.var, training=self.training))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += 1
        return self.conv(x)


class Again(nn.Module):
    """As a memory-efficient DenseNet's: computed again in the backward pass."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Checkpointed(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList(Again(make()) for _ in range(2))
        self.pooled = Pooled()

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.pooled(x)


INNER = {
    "a module": lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
    "a function": Functional,
    "a buffer": Counting,
    "no buffer": lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Dropout(0.3), nn.Conv2d(4, 4, 1)),
}


@pytest.mark.parametrize(
    "name",
    ["a module", *(pytest.param(name, marks=pytest.mark.rest) for name in ("a function", "a buffer", "no buffer"))],
)
def test_a_block_that_is_computed_twice_changes_its_buffers_twice(name):
    """As the plain loop's does: `torch.utils.checkpoint` runs batch norms again in the backward pass."""

    def make():
        torch.manual_seed(1)
        return Checkpointed(INNER[name])

    networks = [make(), make()]
    models = [Model(network, example=batches()[0][0]) for network in networks]
    num_layers = len(models[0])
    cuts = [num_layers], list(range(1, num_layers + 1))
    tasks = [task_of(model, str(ends), ends) for model, ends in zip(models, cuts, strict=True)]
    assert_trains_as(make, tasks, networks)


def test_a_model_that_is_computed_twice_itself_is_refused_with_its_line():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = INNER["a module"](), Pooled()
            self.stem = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            return self.b(checkpoint(self.a, self.stem(x), use_reentrant=False))

    # torch 2.11 asks for a tensor's grad_fn before it computes anything twice.
    is_old = TorchVersion(torch.__version__) < "2.12"
    with refused(says=f"test_vision_shapes.py {'grad_fn' if is_old else 'torch.utils.checkpoint twice'}"):
        Model(Net(), example=batches()[0][0])
