"""Models of torchvision and timm, and a U-Net, train as layers to the bits of their own forward."""

import pytest
import torch
from torch import nn

try:
    from tests.any_model import vision
except ImportError as error:  # torchvision is in no project environment: its wheel for CUDA breaks transformers there
    pytest.skip(f"torchvision or timm is not installed: {error}", allow_module_level=True)

from hydra_engine import ModelTask
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.any_model import harness

pytestmark = pytest.mark.rest  # the kinds of test_huggingface.py are in `make test`

BY_NAME = {case.name: case for case in vision.CASES}


def test_names_of_the_table_are_unique():
    assert len(BY_NAME) == len(vision.CASES)


def test_twenty_architectures_of_timm():
    assert len(vision.TIMM) >= 20


@pytest.mark.parametrize("cut", [harness.one_shard, harness.each_layer], ids=["one shard", "each layer"])
@pytest.mark.parametrize("case", [case for case in vision.CASES if case.is_listed], ids=lambda case: case.name)
def test_layers_train_to_the_bits_of_the_module(case, cut):
    harness.check(case, cut)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean([2, 3])


def mnasnet():
    """Its layers as a chain, with activations in place each by itself."""
    torch.manual_seed(1)
    module = vision.models.mnasnet0_5(num_classes=vision.CLASSES)
    return nn.Sequential(*module.layers, Mean(), *module.classifier)


def test_the_layers_of_mnasnet_as_a_chain_train_at_each_cut():
    data = BY_NAME["MNASNet"].batches()
    plain = mnasnet()
    settings = {"lr": harness.LR, "optimizer": torch.optim.AdamW}
    expected = reference.train(plain, vision.class_loss, data, seed=harness.SEED, **settings)
    last = len(plain)
    cuts = [[last], list(range(1, last + 1)), *([k, last] for k in range(1, last))]
    networks = [mnasnet() for _ in cuts]
    tasks = [
        ModelTask(
            network,
            vision.class_loss,
            data,
            name=str(ends),
            seed=harness.SEED,
            partitioner=Presharded(ends),
            **settings,
        )
        for network, ends in zip(networks, cuts, strict=True)
    ]
    report = exact.run(tasks, memory=harness.MEMORY)
    for task, network in zip(tasks, networks, strict=True):
        assert report.tasks[task.name].status == "finished", report.tasks[task.name].error
        assert report.tasks[task.name].losses == expected.losses, task.name
        exact.assert_same_state(zoo.state(network), zoo.state(plain))
