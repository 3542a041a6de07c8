"""The byte-level GPT that the benchmarks train."""

import torch
from torch import nn
from torch.nn import functional as F


class Embed(nn.Module):
    def __init__(self, width, length, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, tokens):
        return self.tokens(tokens) + self.positions[: tokens.shape[1]]


class Block(nn.Module):
    def __init__(self, width, num_heads, is_causal=True):
        super().__init__()
        self.num_heads, self.is_causal = num_heads, is_causal
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Head(nn.Module):
    def __init__(self, width, vocabulary):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocabulary)

    def forward(self, x):
        return self.logits(self.norm(x)).flatten(0, 1)


def gpt(width=384, num_blocks=4, num_heads=6, length=128, vocabulary=256, seed=0):
    """Layers of a GPT: embedding, blocks, head."""
    torch.manual_seed(seed)
    blocks = [Block(width, num_heads) for _ in range(num_blocks)]
    return nn.Sequential(Embed(width, length, vocabulary), *blocks, Head(width, vocabulary))


def token_batches(num_batches, batch_size, length, vocabulary=256, seed=0):
    """A list of batches (tokens, next tokens)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_batches, batch_size, length + 1)
    tokens = torch.randint(0, vocabulary, shape, generator=generator)
    return [(batch[:, :-1].contiguous(), batch[:, 1:].flatten()) for batch in tokens]
