"""Random models on random budgets: what a partition promises holds when its shards are run."""

import random

import torch
from torch import nn
from torch.nn import functional as F

from partitioners import Budget, LayerTooLarge, MemoryMeter, Optimal, Pilot, profile, shard_bytes
from partitioners.boundary import Boundary
from tests.partitions import seeds, shards_of

NUM_BUDGETS = 8


class Halves(nn.Module):
    """A tuple for the next layers, and back."""

    def forward(self, value):
        return torch.cat(value, dim=-1) if isinstance(value, tuple) else value.chunk(2, dim=-1)


def random_model(rng):
    """1 to 8 layers between a first one and a head, over sequences of vectors."""
    width = rng.choice([8, 16, 24])
    makers = (
        lambda: nn.Linear(width, width, bias=rng.random() < 0.5),
        lambda: nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
        lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True)),
        lambda: nn.Tanh(),
        lambda: nn.Dropout(0.1),
        lambda: nn.LayerNorm(width),
        lambda: nn.Sequential(Halves(), Halves(), nn.Linear(width, width)),
        lambda: nn.Identity(),
    )
    layers = [rng.choice(makers)() for _ in range(rng.randint(1, 8))]
    for layer in layers[: rng.choice([0, 0, 1, 3])]:
        layer.requires_grad_(False)
    model = nn.Sequential(nn.Linear(6, width), *layers, nn.Linear(width, 3))
    batch = rng.choice([1, 4, 9])
    return model, torch.randn(batch, 5, 6), torch.randn(batch, 5, 3)


def peak_of_shard(model, first, last, inputs, target):
    """Bytes on a device while a shard runs forward and backward once: slab, what enters, what is created."""
    x = inputs
    for layer in model[:first]:
        x = layer(x)
    shard, is_last = model[first:last], last == len(model)
    entering = Boundary.of_layer(x).detached()
    handed = entering.copied()
    held = [*shard.parameters(), *handed.tensors, *([target] if is_last else [])]
    roots = (
        [] if is_last else [t for t in Boundary.of_layer(shard(entering.copied().value())).tensors if t.requires_grad]
    )
    gradients = [torch.ones_like(root) for root in roots]
    num_bytes = sum(tensor.nbytes for tensor in (*held, *gradients))
    with MemoryMeter() as meter:
        output = shard(handed.value())
        if is_last:
            output = F.mse_loss(output, target)
            if output.requires_grad:
                output.backward()
        else:
            outputs = [t for t in Boundary.of_layer(output).tensors if t.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, gradients)
    model.zero_grad()
    return num_bytes + meter.peak_bytes


@seeds(40, net=8)
def test_shards_stay_within_the_budget_when_run(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model, inputs, target = random_model(rng)
    costs = profile(model, inputs, target, F.mse_loss, time_layers=False)
    least = max(shard_bytes(costs, k, k + 1) for k in range(len(costs)))
    most = shard_bytes(costs, 0, len(costs))
    peaks = {}
    for _ in range(NUM_BUDGETS):
        memory_bytes = round(rng.uniform(0.8 * least, 1.2 * most))
        budget = Budget(memory_bytes=memory_bytes, link_bytes_per_s=rng.choice([1e9, float("inf")]))
        for partitioner in (Pilot(), Optimal()):
            try:
                ends = partitioner.partition(costs, budget)
            except LayerTooLarge:
                assert memory_bytes < least
                continue
            spans = shards_of(ends)
            assert [k for first, last in spans for k in range(first, last)] == list(range(len(costs)))
            for span in spans:
                if span not in peaks:
                    peaks[span] = peak_of_shard(model, *span, inputs, target)
                assert peaks[span] <= memory_bytes, span
