"""Copies keep every bit and every stride; and which memory the workers of a loader have."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from hydra_engine import ModelTask
from hydra_engine.data.memory import copy_of, flat, memory_of, place_for, same_bits
from partitioners.boundary import Boundary, extent, extent_bytes
from tests import exact

BASE = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5)

TENSORS = {
    "contiguous": BASE,
    "transposed": BASE.transpose(1, 3),
    "permuted": BASE.permute(3, 0, 2, 1),
    "channels last": BASE.contiguous(memory_format=torch.channels_last),
    "channels last, one channel": torch.rand(2, 1, 4, 5).contiguous(memory_format=torch.channels_last),
    "channels last, one pixel": torch.rand(2, 3, 1, 1).contiguous(memory_format=torch.channels_last),
    "size 1 with an odd stride": torch.rand(3, 1, 4).as_strided((3, 1, 4), (4, 7, 1)),
    "expanded": torch.rand(3, 1).expand(3, 4),
    "expanded from one number": torch.tensor(2.5).expand(2, 3),
    "sliced with gaps": BASE[:, ::2, 1:3],
    "sliced with an offset": BASE.view(-1)[7:19],
    "every other column": BASE.view(24, 5)[:, ::2],
    "overlapping windows": torch.rand(10).unfold(0, 4, 1),
    "scalar": torch.tensor(1.5),
    "empty": torch.empty(0, 3),
    "empty slice": BASE[:, 3:],
    "integers": torch.arange(6).view(2, 3).t(),
    "booleans": torch.rand(4, 3).t() > 0.5,
    "bfloat16": BASE.bfloat16().transpose(0, 1),
    "complex": torch.rand(3, 2, dtype=torch.complex64).t(),
    "NaN and infinities": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]),
}


def bits(tensor):
    """The elements' bytes, so that NaN equals NaN and 0.0 does not equal -0.0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_copy_has_the_bits_and_the_strides_and_a_storage_of_its_own_that_is_no_larger(tensor):
    copied = copy_of(tensor)
    assert torch.equal(bits(copied), bits(tensor))
    assert copied.stride() == tensor.stride()
    assert (copied.shape, copied.dtype) == (tensor.shape, tensor.dtype)
    assert copied.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or tensor.numel() == 0
    assert copied.untyped_storage().nbytes() == extent_bytes(tensor)
    assert copied.storage_offset() == 0


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_place_has_the_strides_that_kernels_choose_by_and_is_no_view(tensor):
    place = place_for(tensor, torch.device("cpu"))
    assert place.stride() == tensor.stride()
    for memory_format in (torch.contiguous_format, torch.channels_last):
        if tensor.dim() == 4 or memory_format == torch.contiguous_format:
            same = tensor.is_contiguous(memory_format=memory_format)
            assert place.is_contiguous(memory_format=memory_format) == same
    assert not place_for(tensor)._is_view(), "autograd lets nothing work in place on a view of a leaf"


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_flat_covers_the_memory_from_the_first_to_the_last_element(tensor):
    memory = flat(tensor)
    assert memory.numel() == extent(tensor.shape, tensor.stride())
    assert memory.nbytes == extent_bytes(tensor)
    assert memory.data_ptr() == tensor.data_ptr()


def test_copies_of_conjugated_and_negated_views_are_read_as_they_are():
    conjugated = torch.rand(2, dtype=torch.complex64).conj()
    negated = torch.rand(2, dtype=torch.complex64).conj().imag
    both = torch._neg_view(conjugated)
    for tensor in Boundary.of([conjugated, negated, both], "a value").tensors:
        copied = copy_of(tensor)
        assert torch.equal(copied, tensor)
        assert torch.equal(memory_of(copied), memory_of(tensor))
        assert same_bits(copied, tensor)
        assert copied.stride() == tensor.stride()


class Scored(Dataset):
    """A data set whose samples depend on a model's weights, frozen ones or not."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.ones(8) * self.model.weight.sum().item(), torch.ones(8)


class Wrapped:
    """A loader around another one, whose workers begin with the first batch."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        yield from self.loader


@pytest.mark.skipif(sys.platform != "linux", reason="other systems fork otherwise")
@pytest.mark.parametrize("whose", ["in training", "in training, wrapped", "copied", "frozen"])
def test_worker_that_reads_weights_of_a_model_in_training_ends_with_a_note(whose, monkeypatch):
    # How often torch looks whether workers live, in seconds: 5.
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))
    model = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 8))
    model[0].requires_grad_(whose != "frozen")
    layer = copy.deepcopy(model)[0] if whose == "copied" else model[0]
    loader = DataLoader(Scored(layer), 2, num_workers=1)
    loader = Wrapped(loader) if whose.endswith("wrapped") else loader
    orchestra = exact.silent([ModelTask(model, F.mse_loss, loader, 0.1, epochs=2)])
    if whose.startswith("in training"):
        with pytest.raises(RuntimeError, match="DataLoader worker") as caught:
            orchestra.train_models()
        assert "copy.deepcopy" in caught.value.__notes__[0]
    else:
        orchestra.train_models().raise_failures()
