"""What every peer is asked to do, and what their adapters share."""

from typing import Protocol

import torch
from models import ADAMW, LR, make_model, narrowed
from torch import nn
from torch.utils.checkpoint import checkpoint


class Trainer(Protocol):
    """A model and its optimizer, with the weights of `make_model` and the settings of `models.ADAMW`."""

    def __init__(self, scale, size, *, device, cap_bytes: int | None, micro_tokens: int): ...

    def step(self, inputs, target):
        """Train one step on all its sequences, on the CPU, in micro-batches; return the mean loss."""

    def close(self):
        """Give back what a next trainer in this process needs."""


def micro_batches(inputs, target, micro_tokens):
    """Micro-batches of at most so many tokens and at least one sequence: inputs, target, share of the step's mean."""
    num_sequences, length = inputs.shape
    size = max(1, micro_tokens // length)
    parts = zip(inputs.split(size), target.split(size), strict=True)
    return [(x, y, len(x) / num_sequences) for x, y in parts]


def narrowed_with_masters(scale, size):
    """The model in bfloat16 on the CPU, norms in float32, and the float32 weights that it was made with, in order."""
    return with_masters(make_model(scale, size, "cpu"))


def with_masters(model):
    """A model made narrow in place, and the float32 weights that it had, in order."""
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    return narrowed(model), masters


def adamw_settings():
    """The learning rate and the defaults of `models.ADAMW`, for optimizers of other makers."""
    defaults = ADAMW([nn.Parameter(torch.zeros(1))], lr=LR).defaults
    return {name: defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}


class Checkpointed(nn.Module):
    """A layer that keeps its input alone and runs again in the backward."""

    def __init__(self, layer, *, use_reentrant=False):
        super().__init__()
        self.layer, self.use_reentrant = layer, use_reentrant

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=self.use_reentrant)


def checkpointed(model, **options):
    """A GPT whose blocks are checkpointed."""
    last = len(model) - 1
    layers = [layer if k in (0, last) else Checkpointed(layer, **options) for k, layer in enumerate(model)]
    return nn.Sequential(*layers)
