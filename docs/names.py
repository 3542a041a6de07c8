"""Small stand-ins for the names that the pages use for things of yours: paste this first, then any block of a page."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hydra_engine import CudaDevice, EmulatedDevice, KeepBest, Model, ModelOrchestrator, ModelTask  # noqa: F401 - for the pages

torch.manual_seed(0)
inputs = torch.randn(64, 16)
target = inputs[:, :4].argmax(dim=1)
dataset = TensorDataset(inputs, target)
lr, epochs, seed = 1e-2, 2, 7
loss_fn = nn.CrossEntropyLoss()


def my_model(width=64, depth=3):
    """A small classifier."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(nn.Linear(16, width), *blocks, nn.Linear(width, 4))


def train_loader(batch_size=16):
    """Batches of (inputs, target), in a new order each epoch."""
    return DataLoader(dataset, batch_size=batch_size, shuffle=True)


def validation_loader():
    """The same samples, in order."""
    return DataLoader(dataset, batch_size=32)


def accuracy(output, target):
    """The share of samples whose largest output is the target's."""
    return (output.argmax(dim=1) == target).float().mean()


def make_tasks(number=3):
    """A few tasks that differ in their learning rate."""
    return [ModelTask(my_model(), loss_fn, train_loader(), lr * k, epochs, seed=k) for k in range(1, number + 1)]


model, loader = my_model(), train_loader()
tasks = make_tasks()
