"""The model that all train, and its data: the same for the engine and for every peer."""

import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from partitioners.precision import compute_norms_in_float32, kept_parameters

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import gpt, token_batches

LR = 1e-4
NARROW = torch.bfloat16
NOISE = 2**22  # elements drawn; weights are cut from them, since drawing billions takes minutes
# The same for all: one pass over parameters, gradients and moments, on the CPU and on a GPU.
ADAMW = partial(torch.optim.AdamW, fused=True)


def loss_fn(output, target):
    """Cross-entropy of all tokens."""
    return F.cross_entropy(output, target.flatten())


def make_model(scale, size, device):
    """A GPT with float32 weights on a device."""
    shape = scale.sizes[size]
    with torch.device("meta"):
        model = gpt(shape.width, shape.num_blocks, shape.num_heads, scale.length, scale.vocabulary)
    model.to_empty(device=device)
    noise = torch.empty(NOISE + 2**16).normal_(0, 0.02).to(device)  # the same on every device
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:
                parameter.zero_()
                continue
            for piece in parameter.view(-1).split(NOISE):
                start = 4097 * k % 2**16
                piece.copy_(noise[start : start + piece.numel()])
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
    return model


def narrowed(model):
    """The model as a device computes it: weights in bfloat16, norms kept and computed in float32."""
    kept = kept_parameters(model)
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.to(NARROW)
    compute_norms_in_float32(model, NARROW)
    return model


def batches(scale, num_batches, tokens):
    """One batch of so many tokens, again and again: learned by heart, so that losses tell who trains otherwise.

    Inputs and targets are sequences, so that micro-batches can be cut from both.
    """
    num_sequences = tokens // scale.length
    [(inputs, target)] = token_batches(1, num_sequences, scale.length, scale.vocabulary)
    return [(inputs, target.view(num_sequences, scale.length))] * num_batches
