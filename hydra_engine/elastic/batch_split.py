"""The split of a job's global batch over the GPUs that it has."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from hydra_engine import split_batch
from partitioners.plain_numbers import whole_number


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """A global batch on `gpus` GPUs, in `steps` rounds of at most `batch_size` samples per GPU.

    Where these do not divide, gpus * steps * batch_size is more than `global_batch_size`. `Tensor.tensor_split(steps)`
    cuts a global batch (or a process's share of it) into rounds that lose no sample and keep to the maximum.
    """

    steps: int
    batch_size: int
    global_batch_size: int
    gpus: int
    master: bool  # this is the process that prints and saves


def init(global_batch_size: int, max_gpu_batch_size: int, gpus: int | None = None) -> BatchSplit:
    """Return how a batch is trained on GPUs that take `max_gpu_batch_size` samples each. Nothing is started.

    gpus: of the whole job. Left out, it is the number of processes under torchrun, which has one GPU for each, else the
    number of visible GPUs, and 1 on a machine without any.

    Raises TypeError for what is no int, ValueError for what is below 1.
    """
    if gpus is None:
        gpus = int(os.environ.get("WORLD_SIZE", 0)) or max(1, torch.accelerator.device_count())
    max_gpu_batch_size = whole_number("max_gpu_batch_size", max_gpu_batch_size)
    gpus = whole_number("gpus", gpus)
    global_batch_size = whole_number("global_batch_size", global_batch_size)
    sizes = split_batch(global_batch_size, max_gpu_batch_size, gpus)
    return BatchSplit(
        steps=-(-len(sizes) // gpus),
        batch_size=sizes[0],
        global_batch_size=global_batch_size,
        gpus=gpus,
        master=os.environ.get("RANK", "0") == "0",
    )
