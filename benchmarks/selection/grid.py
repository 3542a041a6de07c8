"""The models of a selection, their data and their settings, at three scales."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu_day"))  # whose peers train here as well
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import Block, gpt, token_batches

from hydra_engine import CudaDevice, EmulatedDevice

# Of the ancestor's examples/twelve-model-task.py and twelve-model-task-vit.py.
TEXT_BATCHES, TEXT_LRS = (8, 16, 32), (1e-3, 1e-4, 1e-5, 1e-6)
VISION_LR, NUM_CLASSES = 1e-3, 10


class Patches(nn.Module):
    """Cuts images into square patches and adds what tells them apart."""

    def __init__(self, width, image, patch):
        super().__init__()
        self.project = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.randn((image // patch) ** 2, width) * 0.02)

    def forward(self, images):
        return self.project(images).flatten(2).transpose(1, 2) + self.positions


class Classifier(nn.Module):
    """Classes of the mean of all patches."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.classes = nn.LayerNorm(width), nn.Linear(width, NUM_CLASSES)

    def forward(self, x):
        return self.classes(self.norm(x).mean(1))


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of a transformer."""

    width: int
    num_blocks: int
    num_heads: int


@dataclass(frozen=True, kw_only=True)
class Text:
    """GPTs on windows of random tokens."""

    length: int
    vocabulary: int

    @property
    def tokens(self):
        """Tokens of a sample."""
        return self.length

    def layers(self, size, seed):
        return gpt(size.width, size.num_blocks, size.num_heads, self.length, self.vocabulary, seed)

    def batches(self, number, batch_size, seed):
        found = token_batches(number, batch_size, self.length, self.vocabulary, seed)
        return [(inputs, target.view(batch_size, self.length)) for inputs, target in found]


@dataclass(frozen=True, kw_only=True)
class Images:
    """Vision transformers on random images."""

    image: int
    patch: int

    @property
    def tokens(self):
        """Tokens of a sample."""
        return (self.image // self.patch) ** 2

    def layers(self, size, seed):
        torch.manual_seed(seed)
        blocks = [Block(size.width, size.num_heads, is_causal=False) for _ in range(size.num_blocks)]
        return nn.Sequential(Patches(size.width, self.image, self.patch), *blocks, Classifier(size.width))

    def batches(self, number, batch_size, seed):
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(number, batch_size, 3, self.image, self.image, generator=generator)
        classes = torch.randint(0, NUM_CLASSES, (number, batch_size), generator=generator)
        return list(zip(images, classes, strict=True))


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model of a selection, with all that its training depends on."""

    name: str
    data: Text | Images
    size: Size
    batch_size: int
    micro_batch: int  # samples of a micro-batch at most
    lr: float
    num_steps: int
    seed: int = 0

    def model(self):
        """The untrained model, the same at every call."""
        return self.data.layers(self.size, self.seed)

    def batches(self):
        """All batches, the same at every call."""
        return self.data.batches(self.num_steps, self.batch_size, self.seed)

    @property
    def num_micro_batches(self):
        return -(-self.batch_size // self.micro_batch)

    @cached_property
    def param_bytes(self):
        """Bytes of the float32 weights."""
        with torch.device("meta"):
            return sum(parameter.nbytes for parameter in self.model().parameters())

    @property
    def work(self):
        """Work, in proportion to its seconds: weights times tokens."""
        return self.param_bytes * self.data.tokens * self.batch_size * self.num_steps


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes, devices and precision of all that is trained."""

    name: str
    text: Text
    text_size: Size
    images: Images
    image_sizes: Sequence[Size]
    image_batches: tuple[int, int]
    text_micro: int  # samples of a micro-batch
    image_micro: int
    num_steps: int
    precision: str
    num_devices: int
    cap: str | None  # of a GPU; None: emulated devices, whose memory each part of the benchmark chooses

    @property
    def is_emulated(self):
        return self.cap is None

    def selection(self):
        """Twelve models of one size: three batch sizes, four learning rates."""
        return [self.text_job(size, lr, seed=k) for k, (lr, size) in enumerate(pairs(TEXT_LRS, TEXT_BATCHES))]

    def vision(self):
        """Twelve models of six sizes, with two batch sizes each."""
        return [
            Job(
                name=f"{size.num_blocks} blocks, batch {batch}",
                data=self.images,
                size=size,
                batch_size=batch,
                micro_batch=self.image_micro,
                lr=VISION_LR,
                num_steps=self.num_steps,
                seed=k,
            )
            for k, (size, batch) in enumerate(pairs(self.image_sizes, self.image_batches))
        ]

    def equal(self, number, batch_size):
        """Models that take equally long, with seeds of their own."""
        return [self.text_job(batch_size, TEXT_LRS[0], seed=k) for k in range(number)]

    def text_job(self, batch_size, lr, *, seed):
        return Job(
            name=f"{seed}: batch {batch_size}, lr {lr:g}",
            data=self.text,
            size=self.text_size,
            batch_size=batch_size,
            micro_batch=self.text_micro,
            lr=lr,
            num_steps=self.num_steps,
            seed=seed,
        )

    def memory(self, jobs, share):
        """Memory of a device: the cap of a GPU, or a multiple of the weights of the largest model."""
        return self.cap or int(share * max(job.param_bytes for job in jobs))

    def devices(self, memory):
        if self.is_emulated:
            return [EmulatedDevice(memory) for _ in range(self.num_devices)]
        return [CudaDevice(index, memory=memory) for index in range(self.num_devices)]


def pairs(outer, inner):
    return [(a, b) for a in outer for b in inner]


def longest_first(jobs, number):
    """Shares of the jobs: the longest first, each to whoever has least to do (Graham 1969)."""
    shares = [[] for _ in range(number)]
    for job in sorted(jobs, key=lambda job: job.work, reverse=True):
        min(shares, key=lambda share: sum(each.work for each in share)).append(job)
    return shares


# 1.0 billion weights, 12 width^2 in a block, where the ancestor's 136 layers have feed-forwards as wide as the model.
LARGE = Size(width=1024, num_blocks=76, num_heads=16)
# The ancestor's widths and depths, of 300 million to 2 billion parameters.
VISION = (
    Size(width=1024, num_blocks=24, num_heads=16),
    *(Size(width=1280, num_blocks=depth, num_heads=16) for depth in (32, 38, 54, 80, 110)),
)
TINY = Scale(
    name="tiny",
    text=Text(length=96, vocabulary=256),
    text_size=Size(width=192, num_blocks=16, num_heads=4),
    images=Images(image=32, patch=8),
    image_sizes=[Size(width=128, num_blocks=depth, num_heads=4) for depth in (4, 8, 10, 13, 20, 26)],
    image_batches=(16, 32),
    text_micro=4,
    image_micro=8,
    num_steps=2,
    precision="float32",
    num_devices=2,
    cap=None,
)
H200 = Scale(
    name="h200",
    text=Text(length=128, vocabulary=28783),
    text_size=LARGE,
    images=Images(image=32, patch=8),
    image_sizes=VISION,
    image_batches=(128, 256),
    text_micro=16,
    image_micro=128,
    num_steps=8,
    precision="bfloat16",
    num_devices=1,
    cap="16GiB",
)
PAPER = Scale(
    name="paper",
    text=H200.text,
    text_size=LARGE,
    images=H200.images,
    image_sizes=VISION,
    image_batches=H200.image_batches,
    text_micro=H200.text_micro,
    image_micro=H200.image_micro,
    num_steps=64,
    precision="bfloat16",
    num_devices=8,
    cap="16GiB",
)
SCALES = {scale.name: scale for scale in (TINY, H200, PAPER)}
