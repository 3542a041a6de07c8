"""Boundaries come apart and together again, and copies keep every bit and every stride."""

from collections import OrderedDict, namedtuple

import pytest
import torch

from hydra_engine.data.memory import copy_of, flat, memory_of, place_for, same_bits
from partitioners.boundary import Boundary, extent, extent_bytes

Pair = namedtuple("Pair", ["left", "right"])

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


@pytest.fixture(params=TENSORS.values(), ids=TENSORS)
def tensor(request):
    return request.param


def bits(tensor):
    """The elements' bytes, so that NaN equals NaN and 0.0 does not equal -0.0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class TestCopies:
    def test_copy_has_the_bits_and_the_strides(self, tensor):
        copied = copy_of(tensor)
        assert torch.equal(bits(copied), bits(tensor))
        assert copied.stride() == tensor.stride()
        assert (copied.shape, copied.dtype) == (tensor.shape, tensor.dtype)

    def test_copy_is_in_storage_of_its_own_and_no_larger(self, tensor):
        copied = copy_of(tensor)
        assert copied.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or tensor.numel() == 0
        assert copied.untyped_storage().nbytes() == extent_bytes(tensor)
        assert copied.storage_offset() == 0

    def test_place_has_the_strides_that_kernels_choose_by(self, tensor):
        place = place_for(tensor, torch.device("cpu"))
        assert place.stride() == tensor.stride()
        for memory_format in (torch.contiguous_format, torch.channels_last):
            if tensor.dim() == 4 or memory_format == torch.contiguous_format:
                same = tensor.is_contiguous(memory_format=memory_format)
                assert place.is_contiguous(memory_format=memory_format) == same

    def test_flat_covers_the_memory_from_the_first_to_the_last_element(self, tensor):
        memory = flat(tensor)
        assert memory.numel() == extent(tensor.shape, tensor.stride())
        assert memory.nbytes == extent_bytes(tensor)
        assert memory.data_ptr() == tensor.data_ptr()

    def test_place_is_no_view(self, tensor):
        assert not place_for(tensor)._is_view(), "autograd lets nobody work in place on a view of a leaf"


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [((), (), 1), ((4,), (1,), 4), ((4,), (3,), 10), ((2, 3), (3, 1), 6), ((3, 4), (1, 0), 3), ((0, 5), (5, 1), 0)],
)
def test_extent_counts_from_the_first_to_the_last_element(shape, stride, expected):
    assert extent(shape, stride) == expected


class TestBoundary:
    @pytest.mark.parametrize(
        "wrap",
        [
            lambda t: t,
            lambda t: (t,),
            lambda t: [t, t],
            lambda t: {"x": t, "mask": None},
            lambda t: OrderedDict(b=t, a=t * 2),
            lambda t: Pair(t, [t + 1, {"deep": (t,)}]),
            lambda t: (t, 3, "text", None, True, 2.5),
            lambda t: [],
            lambda t: None,
            lambda t: ((), {}, [t]),
        ],
    )
    def test_value_is_built_again_as_it_was(self, wrap):
        value = wrap(torch.arange(3.0))
        boundary = Boundary.of(value, "a value")
        built = boundary.build(boundary.tensors)
        assert type(built) is type(value)
        assert repr(built) == repr(value)

    def test_tensors_are_the_very_same_objects(self):
        a, b = torch.rand(2), torch.rand(3)
        boundary = Boundary.of({"a": a, "rest": [b, a]}, "a value")
        assert [id(tensor) for tensor in boundary.tensors] == [id(a), id(b)]
        built = boundary.build(boundary.tensors)
        assert built["a"] is a
        assert built["rest"][0] is b

    def test_one_tensor_twice_is_one_leaf(self):
        shared, other = torch.rand(2), torch.rand(2)
        boundary = Boundary.of((shared, [other, shared]), "a value")
        assert len(boundary.tensors) == 2
        x, y = torch.rand(2), torch.rand(2)
        first, (second, third) = boundary.build([x, y])
        assert first is x
        assert second is y
        assert third is x

    def test_one_conjugated_tensor_twice_is_one_leaf(self):
        shared = torch.rand(2, dtype=torch.complex64).conj()
        boundary = Boundary.of((shared, shared), "a value")
        assert len(boundary.tensors) == 1

    def test_copies_of_conjugated_and_negated_views_are_read_as_they_are(self):
        conjugated = torch.rand(2, dtype=torch.complex64).conj()
        negated = torch.rand(2, dtype=torch.complex64).conj().imag
        both = torch._neg_view(conjugated)
        for tensor in Boundary.of([conjugated, negated, both], "a value").tensors:
            copied = copy_of(tensor)
            assert torch.equal(copied, tensor)
            assert torch.equal(memory_of(copied), memory_of(tensor))
            assert same_bits(copied, tensor)
            assert copied.stride() == tensor.stride()

    def test_equal_views_are_two_leaves(self):
        base = torch.rand(4)
        assert len(Boundary.of((base[:2], base[:2]), "a value").tensors) == 2

    def test_containers_are_new_at_every_build(self):
        boundary = Boundary.of({"list": [torch.rand(1)]}, "a value")
        first = boundary.build(boundary.tensors)
        first["list"].append("changed by a layer")
        first["new"] = 1
        second = boundary.build(boundary.tensors)
        assert len(second["list"]) == 1
        assert list(second) == ["list"]

    def test_which_tensors_require_gradients_is_kept(self):
        leaf = torch.rand(2, requires_grad=True)
        boundary = Boundary.of((leaf, torch.rand(2), leaf * 2, torch.arange(2)), "a value")
        assert boundary.requires_grad == (True, False, True, False)
        moved = boundary.around([tensor.detach().clone() for tensor in boundary.tensors])
        assert moved.requires_grad == boundary.requires_grad

    def test_bytes_are_those_of_the_copies(self):
        shared = torch.rand(3, 4)
        value = (shared, shared, torch.rand(8, 2)[:, :1], torch.tensor(1.0).expand(100))
        assert Boundary.of(value, "a value").num_bytes == 12 * 4 + 15 * 4 + 4

    def test_signature_is_that_of_shapes_strides_and_dtypes(self):
        def signature(*tensors):
            return Boundary.of(tensors, "a value").signature

        base = torch.rand(2, 3)
        assert signature(base) == signature(torch.zeros(2, 3))
        others = [base.double(), base.t().contiguous().t(), base[:1], base.view(3, 2), base.view(1, 2, 3)]
        assert len({signature(base), *map(signature, others), signature(base, base.clone())}) == 7

    def test_sparse_tensor_is_refused_with_its_origin(self):
        with pytest.raises(TypeError, match=r"the output of layer 3 .*sparse"):
            Boundary.of([torch.eye(2).to_sparse()], "the output of layer 3")
