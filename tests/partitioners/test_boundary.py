"""A boundary keeps structure, identity, strides and gradients' flow while its tensors are replaced."""

from collections import OrderedDict, namedtuple

import torch

from partitioners.boundary import Boundary

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
