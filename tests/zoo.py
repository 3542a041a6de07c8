"""Small models with their loss and loader, one per quality that a streaming engine gets wrong.

Every builder returns a fresh `(model, loss_fn, loader)`, the same bits at every call, whatever the global generator
holds. Each loader has 10 batches; most shuffle without a generator of their own, and some end with a short batch.
"""

from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

NUM_BATCHES = 10
VOCABULARY = 256  # bytes
CONTEXT = 8


def mlp():
    with _seeded(1):
        model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.ReLU(inplace=True), nn.Linear(24, 5))
        return model, F.cross_entropy, _classes_loader(12, num_samples=48, batch_size=5)  # last batch: 3


def gpt():
    with _seeded(2):
        model = nn.Sequential(Embed(16), Block(16), Block(16), nn.LayerNorm(16), nn.Linear(16, VOCABULARY, bias=False))
        return model, next_byte_loss, _bytes_loader(num_samples=40, batch_size=4)


def cnn():
    """BatchNorm: buffers that change in every forward pass, and so in every recomputation."""
    with _seeded(3):
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 6, 3, stride=2),
            nn.BatchNorm2d(6),
            nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(6 * 3 * 3, 5)),
        )
        images, classes = torch.randn(57, 1, 8, 8), torch.randint(5, (57,))
        return model, F.cross_entropy, DataLoader(TensorDataset(images, classes), batch_size=6, shuffle=True)  # last: 3


def dropout():
    """Layers that draw: the recomputed mask must be the first one."""
    with _seeded(4):
        model = nn.Sequential(
            nn.Linear(12, 24),
            nn.Dropout(0.3),
            nn.GELU(),
            nn.Linear(24, 24),
            nn.Sequential(nn.ReLU(), nn.Dropout(0.2)),
            nn.Linear(24, 5),
        )
        return model, F.cross_entropy, _classes_loader(12, num_samples=48, batch_size=5)


def tied():
    """The head's weight is the embedding's: one parameter in the first and the last shard."""
    with _seeded(5):
        embed = Embed(16)
        head = nn.Linear(16, VOCABULARY, bias=False)
        head.weight = embed.token.weight
        model = nn.Sequential(embed, Block(16), Block(16), head)
        return model, next_byte_loss, _bytes_loader(num_samples=40, batch_size=4)


def frozen():
    """A frozen layer at the bottom, where no gradient has to arrive, and one in the middle, which gradients cross."""
    with _seeded(6):
        model = nn.Sequential(
            nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24), nn.Linear(24, 5)
        )
        model[0].requires_grad_(False)
        model[4].requires_grad_(False)
        return model, F.cross_entropy, _classes_loader(12, num_samples=40, batch_size=4)


def lstm():
    """A module that keeps a second list of its own weights, and whose kernel differs without grad mode."""
    with _seeded(7):
        model = nn.Sequential(
            nn.Embedding(VOCABULARY, 10), Lstm(10, 12), nn.Tanh(), Lstm(12, 8), nn.Linear(8, VOCABULARY)
        )
        own = torch.Generator().manual_seed(70)
        return model, next_byte_loss, _bytes_loader(num_samples=48, batch_size=5, generator=own)


def branch():
    """Weights that some steps do not use: their gradient is then absent, not zero (AdamW would decay them)."""
    with _seeded(8):
        model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), Branch(16), nn.ReLU(), nn.Linear(16, 5))
        return model, F.cross_entropy, _classes_loader(12, num_samples=48, batch_size=5)


MODELS = {builder.__name__: builder for builder in (mlp, gpt, cnn, dropout, tied, frozen, lstm, branch)}


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


def _classes_loader(width, *, num_samples, batch_size):
    samples, classes = torch.randn(num_samples, width), torch.randint(5, (num_samples,))
    return DataLoader(TensorDataset(samples, classes), batch_size=batch_size, shuffle=True)


def _bytes_loader(*, num_samples, batch_size, generator=None):
    text = torch.randint(VOCABULARY, (num_samples, CONTEXT + 1))
    dataset = TensorDataset(text[:, :-1], text[:, 1:])
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, generator=generator)


@contextmanager
def _seeded(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
