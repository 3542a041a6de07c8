"""A boundary keeps structure, identity, strides and gradients' flow while its tensors are replaced."""

from collections import OrderedDict, namedtuple

import pytest
import torch

from partitioners.boundary import Boundary, extent
from tests.refused import refused

Pair = namedtuple("Pair", "left right")


def test_containers_and_other_values_survive():
    tensor = torch.arange(3)
    value = Pair({"a": [tensor, 3], "b": None}, (OrderedDict(c=tensor), "text"))
    again = Boundary.of_layer(value).copied().value()
    assert type(again) is Pair
    assert type(again.right[0]) is OrderedDict
    assert again.left["a"][1] == 3
    assert again.left["b"] is None
    assert again.right[1] == "text"
    assert torch.equal(again.left["a"][0], tensor)


def test_a_tensor_that_appears_twice_is_one():
    tensor = torch.ones(4, requires_grad=True)
    boundary = Boundary.of_layer([tensor, {"same": tensor}])
    assert boundary.num_bytes == 16
    for other in (boundary.detached(), boundary.copied()):
        first, again = other.value()
        assert first is again["same"]
        assert first is not tensor


def test_bytes_are_the_extent_in_storage():
    base = torch.zeros(4, 8)
    assert Boundary.of_layer(base).num_bytes == 128
    assert Boundary.of_layer(base.t()).num_bytes == 128
    assert Boundary.of_layer(base[:, :2]).num_bytes == (3 * 8 + 2) * 4
    assert Boundary.of_layer(torch.zeros(1).expand(1000)).num_bytes == 4
    assert Boundary.of_layer((base, torch.zeros(0), torch.zeros(3, dtype=torch.int64), 7)).num_bytes == 128 + 24
    assert Boundary.of_layer("no tensor").num_bytes == 0


def test_detached_requires_grad_where_the_producer_did():
    made = torch.ones(2, requires_grad=True) * 2
    boundary = Boundary.of_layer((made, torch.ones(2), torch.ones(2).long())).detached()
    assert [tensor.requires_grad for tensor in boundary.tensors] == [True, False, False]
    assert all(tensor.is_leaf for tensor in boundary.tensors)
    assert boundary.tensors[0].data_ptr() == made.data_ptr()


def test_copies_may_be_worked_on_in_place_and_pass_gradients_out():
    boundary = Boundary.of_layer((torch.ones(2, requires_grad=True), torch.ones(2))).detached()
    for _ in range(2):
        one, two = boundary.copied().value()
        one.mul_(3).add_(two.mul_(5))
        one.sum().backward()
        # A second run starts without the gradient of the first.
        assert boundary.tensors[0].grad.tolist() == [3, 3]
    assert [tensor.tolist() for tensor in boundary.tensors] == [[1, 1], [1, 1]]


def test_an_unused_copy_gets_no_gradient():
    boundary = Boundary.of_layer((torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)))
    used, _ = boundary.copied().value()
    used.sum().backward()
    assert boundary.tensors[0].grad is not None
    assert boundary.tensors[1].grad is None


def test_a_view_stays_a_view_and_a_fresh_tensor_stays_none():
    made = torch.ones(4, requires_grad=True) * 2
    boundary = Boundary.of_layer((made, made.view(2, 2))).detached()
    assert [tensor._is_view() for tensor in boundary.copied().tensors] == [False, True]


def test_strides_are_kept():
    value = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert Boundary.of_layer(value).copied().value().stride() == value.stride()


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [((), (), 1), ((4,), (1,), 4), ((4,), (3,), 10), ((2, 3), (3, 1), 6), ((3, 4), (1, 0), 3), ((0, 5), (5, 1), 0)],
)
def test_extent_counts_from_the_first_to_the_last_element(shape, stride, expected):
    assert extent(shape, stride) == expected


class TestBoundary:
    def test_value_is_built_again_as_it_was(self):
        t = torch.arange(3.0)
        for value in (
            t,
            (t,),
            [t, t],
            {"x": t, "mask": None},
            OrderedDict(b=t, a=t * 2),
            Pair(t, [t + 1, {"deep": (t,)}]),
            (t, 3, "text", None, True, 2.5),
            [],
            None,
            ((), {}, [t]),
        ):
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
        with refused(TypeError, says="layer 3 sparse"):
            Boundary.of([torch.eye(2).to_sparse()], "the output of layer 3")
