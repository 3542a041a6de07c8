"""Models of the kinds that people bring, small, each with a batch and a loss: what profiles and plans are tried on."""

import itertools
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from partitioners import MemoryMeter
from partitioners.boundary import Boundary
from partitioners.copies import Copies
from partitioners.measure import Work, run_once
from partitioners.profile import named_layers
from tests.zoo import Block, Embed, Lstm, next_byte_loss


class Down(nn.Module):
    """A stage of a U-Net on the way down: hands on a smaller image and all skips so far."""

    def __init__(self, channels, following):
        super().__init__()
        self.convolve = nn.Sequential(
            nn.Conv2d(channels, following, 3, padding=1), nn.BatchNorm2d(following), nn.ReLU(inplace=True)
        )
        self.pool = nn.MaxPool2d(2)

    def forward(self, value):
        image, *skips = value if isinstance(value, tuple) else (value,)
        image = self.convolve(image)
        return self.pool(image), *skips, image


class Up(nn.Module):
    """A stage on the way up, which takes the last skip."""

    def __init__(self, channels, following):
        super().__init__()
        self.enlarge = nn.ConvTranspose2d(channels, following, 2, stride=2)
        self.convolve = nn.Sequential(nn.Conv2d(2 * following, following, 3, padding=1), nn.GELU())

    def forward(self, value):
        image, *skips = value
        image = self.convolve(torch.cat([self.enlarge(image), skips.pop()], dim=1))
        return (image, *skips) if skips else image


def classes(batch, width):
    return torch.randn(batch, width), torch.randint(5, (batch,))


def mlp():
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.ReLU(inplace=True), nn.Linear(24, 5))
    return model, *classes(6, 12), F.cross_entropy


def cnn():
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    stages = [nn.Sequential(nn.Conv2d(a, b, 3), nn.BatchNorm2d(b), nn.ReLU(inplace=True)) for a, b in ((3, 8), (8, 8))]
    return nn.Sequential(*stages, head), torch.randn(4, 3, 9, 9), torch.randint(5, (4,)), F.cross_entropy


def gpt():
    tokens = torch.randint(256, (4, 8))
    model = nn.Sequential(Embed(16), Block(16), Block(16), nn.LayerNorm(16), nn.Linear(16, 256, bias=False))
    return model, tokens, torch.randint(256, (4, 8)), next_byte_loss


def lstm():
    model = nn.Sequential(nn.Linear(5, 16), Lstm(16, 16), Lstm(16, 16, num_layers=2, dropout=0.2), nn.Linear(16, 3))
    return model, *sequences(5), F.mse_loss


def sequences(width):
    return torch.randn(4, 7, width), torch.randn(4, 7, 3)


def unet():
    model = nn.Sequential(Down(1, 8), Down(8, 16), nn.Sequential(Up(16, 16)), Up(16, 8), nn.Conv2d(8, 1, 1))
    return model, torch.randn(2, 1, 16, 16), torch.randn(2, 1, 16, 16), F.binary_cross_entropy_with_logits


def transformer():
    """With dropout, whose masks are saved, and whose attention is not flash on the CPU."""
    blocks = [nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True) for _ in range(2)]
    return nn.Sequential(nn.Linear(5, 16), *blocks, nn.Linear(16, 3)), *sequences(5), F.smooth_l1_loss


ARCHITECTURES = {make.__name__: make for make in (mlp, cnn, gpt, lstm, unet, transformer)}


class LayerPeak(NamedTuple):
    """Most bytes at once of one layer's forward and backward, measured in two ways."""

    name: str
    metered_bytes: int  # storages that operations create, and the gradient that comes in
    allocated_bytes: int  # bytes that the allocator handed out, kernels' own scratch memory included

    @property
    def reserve_bytes(self):
        """The difference: bytes to keep free on a device in addition to the metered ones."""
        return max(0, self.allocated_bytes - self.metered_bytes)


def layer_peaks(model, inputs, target, loss_fn):
    """Run every layer on the CPU, metered and under `torch.profiler`; the figures of the last include the loss."""
    layers = named_layers(model)
    copies, peaks, skips = Copies(), [], {}
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        boundary = Boundary.of_layer(copies.inputs(inputs)).detached()
        for index, (name, layer) in enumerate(layers):
            is_last = index == len(layers) - 1
            work = Work(copies.layer(layer), copies.loss(loss_fn) if is_last else None, copies.target(target), skips)
            arguments = work.arguments(boundary.copied())
            with MemoryMeter() as meter:
                run_once(work, arguments)
            allocated_bytes, boundary = _allocated(work, boundary)
            skips |= {name: value.detached() for name, value in work.leaving.items()}
            peaks.append(LayerPeak(name, meter.peak_bytes, allocated_bytes))
    return peaks


def _allocated(work, boundary):
    """Return the allocator's peak while the layer runs, and the boundary that leaves it."""
    work.forget()
    arguments = work.arguments(boundary.copied())
    # There is one cycle of events. torch 2.11 warns that it keeps no others, unless it is asked to.
    with profiler(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
        output, *_ = run_once(work, arguments)
    events = trace.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate((num_bytes for _, num_bytes in changes), initial=0)), output
