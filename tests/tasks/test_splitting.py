"""A batch is split into the sizes of the table, and nothing of it is lost or shared."""

import pytest
import torch

from hydra_engine import split
from hydra_engine.tasks.splitting import batch_size, unpack_batch
from tests.refused import refused

# Global batch, number of micro-batches, their sizes.
SIZES = [
    (256, 1, [256]),
    (256, 4, [64, 64, 64, 64]),
    (256, 6, [43, 43, 43, 43, 42, 42]),
    (100, 4, [25, 25, 25, 25]),
    (7, 4, [2, 2, 2, 1]),
    (3, 8, [1, 1, 1]),
    (1, 4, [1]),
    (5, 5, [1, 1, 1, 1, 1]),
]


@pytest.mark.parametrize(("size", "num", "expected"), SIZES)
def test_sizes_are_the_tables_with_their_shares_of_a_mean_and_one_each_of_a_sum(size, num, expected):
    inputs, target = torch.arange(size * 2).view(size, 2), torch.arange(size)
    pieces = split(inputs, target, num)
    assert [len(x) for x, _, _ in pieces] == expected
    assert [len(y) for _, y, _ in pieces] == expected
    assert torch.equal(torch.cat([x for x, _, _ in pieces]), inputs)
    assert torch.equal(torch.cat([y for _, y, _ in pieces]), target)
    shares = [each / size for each in expected]
    assert [weight for *_, weight in pieces] == weights_of(target, num, "mean") == shares
    assert weights_of(target, num, "sum") == [1.0] * len(expected)


def weights_of(target, num, *loss_reduction):
    return [weight for _, _, weight in split(torch.zeros(len(target)), target, num, *loss_reduction)]


def test_weights_of_a_function_are_shares_of_its_sum():
    target = torch.tensor([1, -100, -100, 4, 5, 6, 7, 8])
    assert weights_of(target, 4, lambda y: (y != -100).sum()) == [1 / 6, 1 / 6, 2 / 6, 2 / 6]
    assert weights_of(target, 2, lambda y: 0) == [0.0, 0.0]  # it counts nothing


@pytest.mark.parametrize(("size", "num"), [(5, 1), (1, 3)])
def test_single_micro_batch_has_weight_one(size, num):
    for loss_reduction in ("mean", "sum", lambda y: 0, lambda y: 3):
        assert weights_of(torch.zeros(size), num, loss_reduction) == [1.0]


def test_nested_inputs_are_split_leaf_by_leaf():
    tokens, mask, scale = torch.arange(10).view(5, 2), torch.rand(5, 1, 3) > 0.5, torch.tensor(0.5)
    inputs = {"tokens": tokens, "more": (mask, [tokens + 1]), "scale": scale, "name": "text", "none": None}
    pieces = split(inputs, (torch.arange(5), {"weights": torch.ones(5)}), 2)
    assert [len(x["tokens"]) for x, _, _ in pieces] == [3, 2]
    for x, y, _ in pieces:
        assert list(x) == ["tokens", "more", "scale", "name", "none"]
        assert len(x["more"][0]) == len(x["more"][1][0]) == len(x["tokens"]) == len(y[0]) == len(y[1]["weights"])
        assert x["scale"] is scale
        assert x["name"] == "text"
        assert x["none"] is None
    assert torch.equal(torch.cat([x["more"][1][0] for x, _, _ in pieces]), tokens + 1)


def test_tensors_of_another_length_and_targets_that_are_none_are_passed_whole():
    table = torch.rand(9, 2)
    for x, y, _ in split((torch.zeros(6), table), ["a", "b"], 3):
        assert type(x) is tuple
        assert x[1] is table
        assert y == ["a", "b"]


def test_micro_batches_have_storage_of_their_own():
    # Kernels choose by alignment: where in the batch a sample lay must not decide the bits of its result.
    inputs = torch.rand(7, 3)
    for x, _, _ in split(inputs, torch.zeros(7), 3):
        assert x.untyped_storage().nbytes() == x.nbytes
        assert x.data_ptr() % 64 == 0


def test_single_micro_batch_is_the_batch_itself():
    inputs, target = torch.rand(4), torch.rand(4)
    [(x, y, _)] = split(inputs, target, 1)
    assert x is inputs
    assert y is target


def test_batch_size_is_the_first_dimension_of_the_first_tensor_that_has_one():
    assert batch_size(torch.zeros(3, 2)) == 3
    assert batch_size({"scale": torch.tensor(1.0), "x": [torch.zeros(4), torch.zeros(9)]}) == 4
    assert batch_size("no tensor") == 1
    assert batch_size(torch.tensor(1.0)) == 1


def test_pair_is_unpacked():
    assert unpack_batch(("x", "y")) == unpack_batch(["x", "y"]) == ("x", "y")


@pytest.mark.parametrize("batch", [("x",), ("x", "y", "z"), "xy", {"x": 1, "y": 2}, torch.zeros(2, 3), None])
def test_batch_that_is_not_a_pair_is_refused(batch):
    with refused(says=f"inputs target {type(batch).__name__}"):
        unpack_batch(batch)
