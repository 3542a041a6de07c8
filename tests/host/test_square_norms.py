"""Squared norms of gradients of all kinds."""

import pytest
import torch

from hydra_engine import square_norms
from hydra_engine.host.staging import CPU_BLOCK


def test_squares_of_all_tensors_are_added():
    found = square_norms([torch.tensor([3.0, 4.0]), torch.tensor([[1.0], [2.0]]), torch.tensor(2.0)])
    assert (found.shape, found.dtype) == ((), torch.float64)
    assert found.item() == pytest.approx(34, rel=1e-6)


def test_no_tensors_have_norm_0():
    assert square_norms([]).item() == 0
    assert square_norms([torch.zeros(0)]).item() == 0
    assert square_norms([]).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_16_bits_do_not_overflow(dtype):
    assert square_norms([torch.full((1000,), 1024.0, dtype=dtype)]).item() == pytest.approx(1000 * 1024**2, rel=1e-6)


def test_dtypes_may_be_mixed():
    tensors = [torch.tensor([2.0], dtype=dtype) for dtype in (torch.float16, torch.float32, torch.float64)]
    assert square_norms([*tensors, torch.tensor([3 + 4j])]).item() == pytest.approx(37, rel=1e-6)


def test_sparse_duplicates_are_added_before_they_are_squared():
    sparse = torch.sparse_coo_tensor([[0, 2, 2]], [[1.0, 1.0], [1.0, 0.0], [2.0, 0.0]], (4, 2))
    assert square_norms([sparse, torch.ones(1)]).item() == pytest.approx(12, rel=1e-6)
    assert square_norms([sparse]).item() == pytest.approx(sparse.to_dense().square().sum().item(), rel=1e-6)


def test_a_float64_tensor_keeps_its_digits():
    tensor = torch.tensor([1.0, 1e-5], dtype=torch.float64)
    assert square_norms([tensor]).item() == pytest.approx(1 + 1e-10, rel=1e-15)


def test_a_large_tensor_keeps_four_digits():
    tensor = torch.full((8 * CPU_BLOCK + 7,), 0.1)
    exact = tensor.double().square().sum().item()
    assert square_norms([tensor]).item() == pytest.approx(exact, rel=3e-5)
    turned = torch.full((3, CPU_BLOCK), 0.5).t()
    assert square_norms([turned]).item() == pytest.approx(0.75 * CPU_BLOCK, rel=3e-5)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stay_so(number):
    assert not square_norms([torch.ones(3), torch.tensor([1.0, number])]).isfinite()


def test_norms_have_no_graph():
    assert not square_norms([torch.ones(2, requires_grad=True)]).requires_grad


def test_nothing_is_read_from_a_device():
    assert square_norms([torch.ones(3, device="meta"), torch.ones(2, device="meta")]).device.type == "meta"
