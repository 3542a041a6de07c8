"""What the experiments train: byte-level GPTs on this repository's own documentation, and the plain loop over them."""

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import Block, Embed, Head

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 32  # bytes that a model sees
BYTES = 256


class Data(NamedTuple):
    """Windows of the text, and the bytes that follow each of theirs."""

    train: TensorDataset
    validation: list  # of batches: whoever reads it draws nothing


def text():
    """README.md and docs/*.md."""
    return b"".join(path.read_bytes() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])


def data(num_windows, num_validation=32):
    """So many windows of the first nine tenths of the text, evenly spaced, and others of the rest."""
    bytes_, cut = torch.frombuffer(bytearray(text()), dtype=torch.uint8).long(), len(text()) * 9 // 10
    inputs, target = windows(bytes_[cut:], num_validation)
    batches = list(zip(inputs.split(16), target.split(16), strict=True))
    return Data(TensorDataset(*windows(bytes_[:cut], num_windows)), batches)


def windows(bytes_, number):
    starts = torch.arange(number) * ((len(bytes_) - LENGTH - 1) // number)
    each = bytes_[starts[:, None] + torch.arange(LENGTH + 1)]
    return each[:, :-1].contiguous(), each[:, 1:].contiguous()


def batches_of(found, batch_size):
    """A loader that shuffles by torch's random stream."""
    return DataLoader(found.train, batch_size=batch_size, shuffle=True)


def gpt(width, num_blocks):
    """A GPT with weights from torch's random stream."""
    blocks = [Block(width, width // 32) for _ in range(num_blocks)]
    return nn.Sequential(Embed(width, LENGTH, BYTES), *blocks, Head(width, BYTES))


def next_byte_loss(logits, target):
    return F.cross_entropy(logits, target.flatten())


def plain_epochs(model, loader, validation, lr, seed, loss_fn=next_byte_loss):
    """Train in plain PyTorch with AdamW; after each epoch, yield its losses and the validation loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    torch.manual_seed(seed)
    while True:
        losses = []
        for inputs, target in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_fn(model(inputs), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        yield losses, evaluate(model, validation, loss_fn)


def evaluate(model, validation, loss_fn=next_byte_loss):
    """Mean loss of the samples."""
    model.eval()
    with torch.no_grad():
        total = sum(loss_fn(model(inputs), target).item() * len(inputs) for inputs, target in validation)
    model.train()
    return total / sum(len(inputs) for inputs, _ in validation)
