"""A model of 70 billion parameters in the shape of Llama 3, to plan on a machine that could never hold it.

    hydra-engine plan examples.llama_70b:llama_70b --memory 24GiB --precision bfloat16

Called under ``torch.device("meta")`` it takes no memory: 80 blocks, 70.6 billion parameters.
"""

import torch
from torch import nn
from torch.nn import functional as F

CONTEXT = 2048  # tokens the model sees
VOCABULARY = 128256
WIDTH = 8192
HEADS, KEY_HEADS = 64, 8  # eight heads of queries share one head of keys and values
HIDDEN = 28672  # of the feed-forward network
BLOCKS = 80
ROTARY_BASE = 500_000.0


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped queries."""

    def __init__(self):
        super().__init__()
        self.head_width = WIDTH // HEADS
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, KEY_HEADS * self.head_width, bias=False)
        self.value = nn.Linear(WIDTH, KEY_HEADS * self.head_width, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        query, key, value = (
            part(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        cos, sin = rotary(x, self.head_width)
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def rotary(x, head_width):
    """Cosine and sine of every position's angles, of shape (positions, head width), in the type of x."""
    exponents = torch.arange(0, head_width, 2, device=x.device, dtype=torch.float32) / head_width
    positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
    angles = torch.outer(positions, ROTARY_BASE**-exponents).repeat(1, 2)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotated(x, cos, sin):
    """Every pair of channels, half a head apart, turned by its position's angle."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One transformer block: what the engine cuts between."""

    def __init__(self):
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.attention = Attention()
        self.feed_forward_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.feed_forward = FeedForward()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Head(nn.Module):
    """Logits of the next token; its weights are not the embedding's."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x):
        return self.out(self.norm(x))


def next_token_loss(logits, tokens):
    """Mean cross entropy over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def llama_70b(num_blocks=BLOCKS):
    """The model, one sample batch and the loss, as `hydra-engine plan` takes them."""
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(num_blocks)), Head())
    tokens = torch.zeros(1, CONTEXT, dtype=torch.long)
    return model, (tokens, tokens.clone()), next_token_loss
