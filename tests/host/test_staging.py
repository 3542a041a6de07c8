"""Where the parts of a step meet: gradients are added in the order of micro-batches, whoever comes first."""

from itertools import permutations

import pytest
import torch

from hydra_engine.host.staging import StepParts

SLOT = 7


def parts_of(num_micro_batches, num_parts, places, **options):
    has_gradient = {}
    settings = {"in_sums": False, "is_narrow": False, "place": places.__getitem__, "has_gradient": has_gradient}
    return StepParts(num_micro_batches, num_parts, **(settings | options)), has_gradient


def copy(target, source):
    target.copy_(source)


def summed(gradients):
    """((g0 + g1) + g2) + ..."""
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    return total


def uneven(num):
    """Gradients whose sum has other bits in any other order."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(50, generator=generator) * 10.0**k for k in range(num)]


def test_ranges_differ_by_one_micro_batch_at_most():
    assert parts_of(6, 3, {})[0].ranges == ((0, 2), (2, 4), (4, 6))
    assert parts_of(5, 3, {})[0].ranges == ((0, 1), (1, 3), (3, 5))


def test_pieces_are_added_in_the_order_of_micro_batches():
    gradients = uneven(6)
    for order in permutations(range(4)):
        places = {SLOT: torch.full((50,), torch.nan)}
        parts, has_gradient = parts_of(6, 3, places)
        for k in order:  # the first part's two micro-batches are added on its device
            if k == 0:
                parts.put(0, 2, {SLOT: summed(gradients[:2])}, copy)
            else:
                parts.add(0, 1 + k, {SLOT: gradients[1 + k].clone()})
        parts.add(0, 5, {SLOT: gradients[5].clone()})
        assert torch.equal(places[SLOT], summed(gradients)), order
        assert has_gradient == {SLOT: True}


def test_sums_of_a_unit_that_is_computed_again_stay():
    """Pieces of later parts may have been added to them; and one that goes on began with what it had added itself."""
    gradients = uneven(4)
    places = {SLOT: torch.full((50,), torch.nan)}
    parts, _ = parts_of(4, 2, places)
    parts.add(0, 2, {SLOT: gradients[2].clone()})
    assert [parts.put(0, 2, {SLOT: summed(gradients[:2])}, copy) for _ in range(2)] == [True, False]
    parts.add(0, 3, {SLOT: gradients[3].clone()})
    assert torch.equal(places[SLOT], summed(gradients))

    parts, _ = parts_of(4, 2, places, in_sums=True)
    assert parts.so_far([SLOT]) == {}
    parts.put(0, 2, {SLOT: summed(gradients[:2])}, copy)
    for _ in range(2):
        so_far = parts.so_far([SLOT])[SLOT].clone()
        parts.put(0, 4, {SLOT: so_far + gradients[2] + gradients[3]}, copy)
    assert torch.equal(places[SLOT], summed(gradients))


def test_what_received_none_is_none_and_the_first_received_is_taken_as_it_is():
    places = {0: torch.full((1,), torch.nan), 1: torch.full((1,), torch.nan)}
    parts, has_gradient = parts_of(3, 3, places)
    parts.add(0, 2, {0: None, 1: torch.tensor([-0.0])})
    parts.add(0, 1, {0: None, 1: None})
    parts.put(0, 1, {0: None, 1: None}, copy)
    assert has_gradient == {0: False, 1: True}
    assert torch.signbit(places[1]).item()  # 0 + -0 would be 0


@pytest.mark.parametrize("in_sums", [True, False])
def test_narrow_gradients_are_added_in_float32_and_rounded_once(in_sums):
    gradients = [each.bfloat16() for each in uneven(3)]
    places = {SLOT: torch.zeros(50, dtype=torch.bfloat16)}
    parts, _ = parts_of(3, 2, places, in_sums=in_sums, is_narrow=True)
    wide = [each.float() for each in gradients]
    parts.put(0, 1, {SLOT: gradients[0]}, copy)
    if in_sums:
        total = parts.so_far([SLOT])[SLOT].clone()
        assert total.dtype == torch.float32
        parts.put(0, 3, {SLOT: (total + wide[1] + wide[2]).bfloat16()}, copy)
    else:
        parts.add(0, 1, {SLOT: gradients[1]})
        parts.add(0, 2, {SLOT: gradients[2]})
    assert torch.equal(places[SLOT], summed(wide).bfloat16())


def test_shards_are_added_on_their_own():
    places = {0: torch.zeros(1), 1: torch.zeros(1)}
    parts, has_gradient = parts_of(2, 2, places)
    parts.add(1, 1, {1: torch.tensor([2.0])})
    parts.put(0, 1, {0: torch.tensor([3.0])}, copy)
    parts.put(1, 1, {1: torch.tensor([5.0])}, copy)
    assert (places[0].item(), places[1].item()) == (3.0, 7.0)
    parts.add(0, 1, {0: torch.tensor([4.0])})
    assert places[0].item() == 7.0
    assert has_gradient == {0: True, 1: True}
