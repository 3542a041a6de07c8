"""Small models with their loss and loader, one per quality that a streaming engine gets wrong.

Every builder returns a fresh `(model, loss_fn, loader)`, the same bits at every call, whatever the global generator
holds. `width` is that of the hidden layers. Most loaders shuffle without a generator of their own, and some end with a
short batch.
"""

from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

NUM_BATCHES = 10
NUM_FEATURES = 12  # of a sample, where it is neither an image nor text
VOCABULARY = 256  # bytes
CONTEXT = 8


def mlp(width=8, num_batches=NUM_BATCHES):
    with _seeded(1):
        model = nn.Sequential(
            nn.Linear(NUM_FEATURES, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.ReLU(inplace=True),
            nn.Linear(width, 5),
        )
        return model, F.cross_entropy, _classes_loader(num_batches, batch_size=5, last=3)


def gpt(width=8, num_batches=NUM_BATCHES):
    with _seeded(2):
        model = nn.Sequential(
            Embed(width), Block(width), Block(width), nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        )
        return model, next_byte_loss, _bytes_loader(num_batches, batch_size=4)


def cnn(width=8, num_batches=NUM_BATCHES):
    """BatchNorm: buffers that change in every forward pass, and so in every recomputation."""
    narrow, wide = width // 2, width - 2
    with _seeded(3):
        model = nn.Sequential(
            nn.Conv2d(1, narrow, 3, padding=1, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(inplace=True),
            nn.Conv2d(narrow, wide, 3, stride=2),
            nn.BatchNorm2d(wide),
            nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(wide * 3 * 3, 5)),
        )
        num_samples = 6 * num_batches - 3  # the last batch has 3
        dataset = TensorDataset(torch.randn(num_samples, 1, 8, 8), torch.randint(5, (num_samples,)))
        return model, F.cross_entropy, DataLoader(dataset, batch_size=6, shuffle=True)


def dropout(width=8, num_batches=NUM_BATCHES):
    """Layers that draw: the recomputed mask must be the first one."""
    with _seeded(4):
        model = nn.Sequential(
            nn.Linear(NUM_FEATURES, width),
            nn.Dropout(0.3),
            nn.GELU(),
            nn.Linear(width, width),
            nn.Sequential(nn.ReLU(), nn.Dropout(0.2)),
            nn.Linear(width, 5),
        )
        return model, F.cross_entropy, _classes_loader(num_batches, batch_size=5, last=3)


def tied(width=8, num_batches=NUM_BATCHES):
    """The head's weight is the embedding's: one parameter in the first and the last shard."""
    with _seeded(5):
        embed = Embed(width)
        head = nn.Linear(width, VOCABULARY, bias=False)
        head.weight = embed.token.weight
        model = nn.Sequential(embed, Block(width), Block(width), head)
        return model, next_byte_loss, _bytes_loader(num_batches, batch_size=4)


def frozen(width=8, num_batches=NUM_BATCHES):
    """A frozen layer at the bottom, where no gradient has to arrive, and one in the middle, which gradients cross."""
    with _seeded(6):
        model = nn.Sequential(
            nn.Linear(NUM_FEATURES, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Linear(width, 5),
        )
        model[0].requires_grad_(False)
        model[4].requires_grad_(False)
        return model, F.cross_entropy, _classes_loader(num_batches, batch_size=4, last=4)


def lstm(width=8, num_batches=NUM_BATCHES):
    """A module that keeps a second list of its own weights, and whose kernel differs without grad mode."""
    with _seeded(7):
        model = nn.Sequential(
            nn.Embedding(VOCABULARY, width),
            Lstm(width, width + 2),
            nn.Tanh(),
            Lstm(width + 2, width - 2),
            nn.Linear(width - 2, VOCABULARY),
        )
        own = torch.Generator().manual_seed(70)
        return model, next_byte_loss, _bytes_loader(num_batches, batch_size=5, last=3, generator=own)


def branch(width=8, num_batches=NUM_BATCHES):
    """Weights that some steps do not use: their gradient is then absent, not zero (AdamW would decay them)."""
    with _seeded(10):  # of every three batches, in most orders, some take one branch and some the other
        model = nn.Sequential(nn.Linear(NUM_FEATURES, width), nn.Tanh(), Branch(width), nn.ReLU(), nn.Linear(width, 5))
        return model, F.cross_entropy, _classes_loader(num_batches, batch_size=5, last=3)


def odd(width=181, num_batches=NUM_BATCHES):
    """Sizes that are no multiples of 16, and a parameter of 33,123 elements: kernels choose by size, and by remainder.

    Beyond 32,768 elements torch divides the work of a kernel that goes through its elements one by one.
    """
    with _seeded(9):
        model = nn.Sequential(
            nn.Linear(NUM_FEATURES, width), nn.Tanh(), nn.Linear(width, width + 2), nn.GELU(), nn.Linear(width + 2, 5)
        )
        return model, F.cross_entropy, _classes_loader(num_batches, batch_size=5, last=3)


MODELS = {builder.__name__: builder for builder in (mlp, gpt, cnn, dropout, tied, frozen, lstm, branch, odd)}

NUM_SHORT = 3
SHORT_MODELS = {name: partial(builder, num_batches=NUM_SHORT) for name, builder in MODELS.items()}

# The same at other sizes, for `make test-all`.
LARGE_WIDTHS = (24, 16, 16, 24, 16, 24, 10, 16, 259)
LARGE_MODELS = {f"large-{name}": partial(MODELS[name], width) for name, width in zip(MODELS, LARGE_WIDTHS, strict=True)}
ALL_MODELS = MODELS | LARGE_MODELS


class Embed(nn.Module):
    """Byte and position embeddings."""

    def __init__(self, width):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.1 * torch.randn(CONTEXT, width))

    def forward(self, tokens):
        return self.token(tokens) + self.position


class Block(nn.Module):
    """A transformer block: causal attention with two heads, then a small MLP."""

    def __init__(self, width):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm_2(x))


class Lstm(nn.Module):
    """nn.LSTM that returns its outputs alone, as nn.Sequential needs."""

    def __init__(self, num_inputs, width, **options):
        super().__init__()
        self.lstm = nn.LSTM(num_inputs, width, batch_first=True, **options)

    def forward(self, x):
        outputs, _ = self.lstm(x)
        return outputs


class Branch(nn.Module):
    """One of two layers, chosen by the values of the batch."""

    def __init__(self, width):
        super().__init__()
        self.positive, self.negative = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.positive(x) if x.sum() > 0 else self.negative(x)


def next_byte_loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def state(model):
    """Every parameter and buffer by name, tied ones once."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _classes_loader(num_batches, *, batch_size, last):
    num_samples = batch_size * (num_batches - 1) + last
    samples, classes = torch.randn(num_samples, NUM_FEATURES), torch.randint(5, (num_samples,))
    return DataLoader(TensorDataset(samples, classes), batch_size=batch_size, shuffle=True)


def _bytes_loader(num_batches, *, batch_size, last=None, generator=None):
    num_samples = batch_size * (num_batches - 1) + (last or batch_size)
    text = torch.randint(VOCABULARY, (num_samples, CONTEXT + 1))
    dataset = TensorDataset(text[:, :-1], text[:, 1:])
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, generator=generator)


@contextmanager
def _seeded(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
