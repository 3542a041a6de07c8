"""`init`: the numbers that a training loop asks for, and the promise that no micro-batch is too large."""

import dataclasses
import random

import pytest
import torch

from hydra_engine import split_batch
from hydra_engine.elastic import BatchSplit, init
from tests.refused import refused


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """As a process that was started by hand."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("given", "steps", "batch_size"),
    [
        ((256, 64, 1), 4, 64),
        ((256, 64, 4), 1, 64),
        ((256, 64, 3), 2, 43),
        ((256, 100, 1), 3, 86),
        ((3, 1, 8), 1, 1),
    ],
)
def test_rounds_and_the_most_samples_of_a_gpu(given, steps, batch_size):
    assert init(*given) == BatchSplit(
        steps=steps, batch_size=batch_size, global_batch_size=given[0], gpus=given[2], master=True
    )


def test_rounds_lose_no_sample_and_no_gpu_has_more_than_it_takes():
    rng = random.Random(23)
    for _ in range(500):
        size, most, gpus = rng.randint(1, 500), rng.randint(1, 80), rng.randint(1, 9)
        split = init(size, most, gpus)
        rounds = [len(part) for part in torch.zeros(size).tensor_split(split.steps)]
        assert sum(rounds) == size
        assert min(rounds) >= 1
        assert -(-rounds[0] // gpus) <= split.batch_size <= most  # nn.DataParallel chunks as torch.chunk does
        share = -(-size // gpus)  # of a process, one per GPU
        assert -(-share // split.steps) <= split.batch_size
        assert split.steps * split.batch_size * gpus >= size
        if gpus == 1:
            assert rounds == split_batch(size, most, 1)


@pytest.mark.parametrize(("visible", "gpus"), [(0, 1), (1, 1), (4, 4)])
def test_without_a_number_all_visible_gpus_count(monkeypatch, visible, gpus):
    monkeypatch.setattr("torch.accelerator.device_count", lambda: visible)
    assert init(256, 64).gpus == gpus


def test_under_torchrun_each_process_has_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 8)
    monkeypatch.setenv("WORLD_SIZE", "2")
    masters = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        split = init(256, 64)
        assert (split.gpus, split.steps, split.batch_size) == (2, 2, 64)
        masters.append(split.master)
    assert masters == [True, False]
    assert init(256, 64, gpus=4).gpus == 4


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ((256, 64, 0), ValueError, "gpus: 0"),
        ((256, 0, 1), ValueError, "max_gpu_batch_size: 0"),
        ((0, 64, 1), ValueError, "global_batch_size: 0"),
        ((256, 0.5, 1), TypeError, "max_gpu_batch_size: 0.5"),
        ((256, 64, True), TypeError, "gpus: True"),
    ],
)
def test_what_is_below_one_is_refused(given, error, says):
    with refused(error, says=says):
        init(*given)


def test_the_split_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        init(256, 64, 1).steps = 2
