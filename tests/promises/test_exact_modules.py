"""Modules that people write give the bits of the plain loop, one layer per shard: odd state, backwards of their own."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from hydra_engine import EmulatedDevice, ModelTask
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.covering import covering

SEED, LR, EPOCHS = 3, 1e-2, 2


class Clamp(torch.autograd.Function):
    """A straight-through estimator: rounds forward, passes gradients within limits."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 2)


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return Clamp.apply(self.linear(x))


class Recurrent(nn.Module):
    """LSTM, GRU and their states in one layer."""

    def __init__(self):
        super().__init__()
        self.lstm, self.gru = nn.LSTM(4, 6, batch_first=True), nn.GRU(6, 8, batch_first=True)

    def forward(self, x):
        hidden, _ = self.lstm(x.view(len(x), 2, 4))
        return self.gru(hidden)[0][:, -1]


class Nest(nn.Module):
    """A dict of tuples, with an integer tensor and one that needs no gradient."""

    def forward(self, x):
        return {"pair": (x, x.detach() * 2), "index": x.argmax(dim=1), "again": [x]}


class Unnest(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 8)

    def forward(self, value):
        (x, scaled), index, (again,) = value["pair"], value["index"], value["again"]
        return x * scaled + self.table(index) + again


class Averages(nn.Module):
    """A buffer that a forward moves, and one that is bound anew."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("last", torch.zeros(8))
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.last = x.detach()[0].clone()
        return (x - self.mean) * self.weight


class WithBuffer(nn.Module):
    """A loss that keeps count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5]))

    def forward(self, output, target):
        if self.training:
            self.seen += len(target)
        return F.cross_entropy(output, target, weight=self.weights)


class DenseBlock(nn.ModuleDict):
    """As DenseNet's: a dict of modules with a forward, over a list that grows; in place behind a concatenation."""

    def __init__(self):
        super().__init__()
        for k in range(2):
            width = 8 + 4 * k
            self[str(k)] = nn.Sequential(nn.BatchNorm1d(width), nn.ReLU(inplace=True), nn.Linear(width, 4))

    def forward(self, x):
        features = [x]
        for layer in self.values():
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)[:, -8:]


class InvertedResidual(nn.Module):
    """As MNASNet's: pointwise, depthwise, pointwise; activations in place, and its input added."""

    def __init__(self, width, stride=1):
        super().__init__()
        wide = 3 * width
        self.layers = nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False),
            nn.BatchNorm2d(wide, momentum=3e-4),
            nn.ReLU(inplace=True),
            nn.Conv2d(wide, wide, 3, padding=1, stride=stride, groups=wide, bias=False),
            nn.BatchNorm2d(wide, momentum=3e-4),
            nn.ReLU(inplace=True),
            nn.Conv2d(wide, width, 1, bias=False),
            nn.BatchNorm2d(width, momentum=3e-4),
        )
        self.adds_input = stride == 1

    def forward(self, x):
        return self.layers(x) + x if self.adds_input else self.layers(x)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean([2, 3])


def mnasnet():
    """Its stem, two stacks and its classifier, each layer by itself."""
    stem = [nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)]
    stacks = [nn.Sequential(InvertedResidual(4, stride=2), InvertedResidual(4)), InvertedResidual(4)]
    end = [nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), Mean()]
    return [nn.Unflatten(1, (1, 2, 4)), *stem, *stacks, *end, nn.Dropout(0.2, inplace=True)]


LAYERS = {
    "dense block": DenseBlock,
    "mnasnet": mnasnet,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="cayley"),
    "custom function": Quantized,
    "recurrent": Recurrent,
    "in place": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.3)),
    "in place on its input": lambda: nn.Sequential(nn.LeakyReLU(0.1, inplace=True), nn.Linear(8, 8)),
    "nested boundaries": lambda: nn.Sequential(Nest(), Unnest()),
    "buffers": Averages,
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
    "frozen": lambda: nn.Linear(8, 8).requires_grad_(False),
}


def model(name):
    torch.manual_seed(1)
    layer = LAYERS[name]()
    inner = list(layer) if name in ("nested boundaries", "mnasnet") else [layer]
    return nn.Sequential(nn.Linear(8, 8), *inner, nn.Tanh(), nn.Linear(8, 3))


def batches():
    """Uneven: the last one is smaller."""
    generator = torch.Generator().manual_seed(2)
    sizes = [8, 8, 7]
    return [(torch.randn(n, 8, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes]


@covering(name=list(LAYERS), accumulation_steps=[1, 3], strength=1)
def test_a_layer_across_shards_gives_the_bits_of_the_plain_loop(name, accumulation_steps):
    network, plain = model(name), model(name)
    loss_fn, plain_loss = WithBuffer(), WithBuffer()
    settings = {"optimizer": torch.optim.AdamW, "accumulation_steps": accumulation_steps, "max_grad_norm": 0.9}
    expected = reference.train(plain, plain_loss, batches(), seed=SEED, lr=LR, epochs=EPOCHS, **settings)
    partitioner = Presharded(list(range(1, len(network) + 1)))
    task = ModelTask(network, loss_fn, batches(), LR, EPOCHS, seed=SEED, partitioner=partitioner, **settings)
    report = exact.silent([task], devices=[EmulatedDevice("4MiB", chaos=k) for k in range(2)]).train_models()
    report.raise_failures()
    assert report.tasks["task-0"].losses == expected.losses
    exact.assert_same_state(zoo.state(network), zoo.state(plain))
    assert torch.equal(loss_fn.seen, plain_loss.seen)


def test_batches_of_dicts_are_unpacked_and_split_with_shares_of_their_tokens():
    generator = torch.Generator().manual_seed(2)

    def batch():
        target = torch.randint(3, (5,), generator=generator)
        target[0] = -100
        return {"x": torch.randn(5, 8, generator=generator), "extra": "kept whole", "labels": target}

    loader = [batch() for _ in range(3)]

    class Take(nn.Linear):
        def forward(self, value):
            return super().forward(value["x"])

    torch.manual_seed(1)
    network = nn.Sequential(Take(8, 8), nn.Tanh(), nn.Linear(8, 3))
    plain = copy.deepcopy(network)
    settings = {
        "unpack": lambda found: ({"x": found["x"], "extra": found["extra"]}, found["labels"]),
        "loss_reduction": lambda target: int((target != -100).sum()),
        "accumulation_steps": 2,
        "optimizer": torch.optim.SGD,
    }
    expected = reference.train(plain, F.cross_entropy, loader, seed=SEED, lr=LR, epochs=EPOCHS, **settings)
    task = ModelTask(
        network, F.cross_entropy, loader, LR, EPOCHS, seed=SEED, partitioner=Presharded([1, 2, 3]), **settings
    )
    assert exact.silent([task]).train_models().tasks["task-0"].losses == expected.losses
    exact.assert_same_state(zoo.state(network), zoo.state(plain))
