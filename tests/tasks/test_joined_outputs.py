"""Outputs of parts of a batch are joined by a dim that two sizes prove, or refused by what they lack."""

import pytest
import torch
from torch.utils import _pytree as pytree

from hydra_engine.tasks import joined_outputs, uneven
from tests.refused import refused


def parts_of(function, sizes):
    whole = torch.arange(float(sum(sizes) * 3)).reshape(-1, 3)
    return function(whole), [function(part) for part in whole.split(sizes)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x,
        lambda x: x[:, 0],
        lambda x: x.T,
        lambda x: torch.stack([x, x]),
        lambda x: (x, {"a": x.T, "b": [x + 1]}, None, "text", torch.ones(1, 2), torch.tensor(3.0), 5),
    ],
)
def test_a_dim_of_samples_is_joined_and_what_is_the_same_is_kept(function):
    for sizes in ([2, 1], [3, 3, 2], [2, 2, 2, 1, 1]):
        whole, parts = parts_of(function, sizes)
        (found, same), (expected, other) = pytree.tree_flatten(joined_outputs(parts, sizes)), pytree.tree_flatten(whole)
        assert same == other
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: x.mean(), "no dim"),
        (lambda x: x.mean(0, keepdim=True), "no dim"),
        (lambda x: x @ x.T, "2 dims"),  # of each sample with each other one
        (lambda x: x.reshape(-1), "no dim"),
        (lambda x: len(x), "no dim int"),
        (lambda x: x.numpy().sum(0), "ndarray"),
        (lambda x: torch.ones(1, len(x), 2 * len(x)), "1 dims"),
        (lambda x: [*x], "structure"),  # a list with an item for each sample
    ],
)
def test_what_cannot_be_joined_is_refused(function, says):
    _, parts = parts_of(function, [3, 2])
    with refused(says=says):
        joined_outputs(parts, [3, 2])


@pytest.mark.parametrize("sizes", [[1, 1], [2, 2, 2]])
def test_parts_of_one_size_prove_nothing(sizes):
    for function in (lambda x: x, lambda x: x.sum(0, keepdim=True)):
        with refused(says=f"parts {sizes[0]}"):
            joined_outputs(parts_of(function, sizes)[1], sizes)


def test_parts_are_of_two_sizes_wherever_they_can_be():
    for num_samples in range(1, 60):
        for number in range(2, num_samples):
            found = uneven(number, num_samples)
            assert number <= found < num_samples
            assert num_samples % found
        assert uneven(2 * num_samples, num_samples) == uneven(num_samples, num_samples) == num_samples
