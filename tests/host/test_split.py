import pytest
import torch

from hydra_engine.host.split import BLOCK, SplitWeight
from tests.host.updates import bits

UPPER = torch.arange(2**16, dtype=torch.int32)
LOWER = [0, 1, 2, 0x3FFF, 0x4000, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xC000, 0xFFFE, 0xFFFF]


def weights(upper, lower):
    """Every upper half with every lower one."""
    return ((upper[:, None] << 16) | torch.tensor(lower, dtype=torch.int32)).flatten().view(torch.float32)


def stored(values):
    split = SplitWeight(torch.empty_like(values, dtype=torch.bfloat16), torch.empty(len(values), dtype=torch.int16))
    split.store(values)
    return split


def assert_whole(split, values):
    assert torch.equal(bits(split.load(torch.empty_like(values))), bits(values))
    # Which NaN torch's rounding gives depends on the processor, and on the place in the tensor.
    is_number = ~values.isnan()
    assert torch.equal(bits(split.narrow)[is_number], bits(values.bfloat16())[is_number])
    assert torch.equal(split.narrow.isnan(), values.isnan())


def test_every_upper_half_comes_back_with_lower_halves_at_every_edge():
    values = weights(UPPER, LOWER)
    assert_whole(stored(values), values)


def test_only_ties_to_an_even_upper_half_are_kept_apart_of_numbers():
    numbers = UPPER[~(UPPER << 16).view(torch.float32).isnan() & (UPPER & 0x7FFF != 0x7F80)]
    for lower in LOWER:
        values = weights(numbers, [lower])
        split = stored(values)
        assert_whole(split, values)
        is_tie = (numbers % 2 == 0) if lower == 0x8000 else torch.zeros_like(numbers, dtype=torch.bool)
        assert torch.equal(split.apart.places, is_tie.nonzero().flatten()), lower


@pytest.mark.parametrize("size", [1, 63, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_random_bits_come_back_from_weights_of_any_size(size):
    values = torch.randint(-(2**31), 2**31, (size,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    assert_whole(stored(values), values)


def test_a_weight_that_is_all_NaN_as_arithmetic_gives_it_keeps_nothing_apart():
    zero = torch.zeros(2 * BLOCK)
    for values in (zero / 0, -(zero / 0), (zero / 0).bfloat16().float()):
        split = stored(values)
        assert_whole(split, values)
        assert split.apart.nbytes == 0
    split.store(zero)  # and nothing of it stays
    assert_whole(split, zero)
    assert not split.apart.has_nan


def test_infinities_are_numbers():
    values = torch.tensor([torch.inf, -torch.inf, torch.finfo(torch.float32).max, torch.finfo(torch.float32).min])
    split = stored(values)
    assert_whole(split, values)
    assert split.narrow.isinf().all()
    assert not split.apart.has_nan


def test_subnormal_weights_come_back_where_the_processor_takes_them_for_zero():
    values = weights(torch.arange(0x80, dtype=torch.int32), LOWER)
    expected = values.bfloat16()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        split = stored(values)
        loaded = split.load(torch.empty_like(values))
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(bits(loaded), bits(values))
    assert torch.equal(bits(split.narrow), bits(expected))


def test_a_weight_without_elements_is_one_piece_without_any():
    split = stored(torch.empty(0))
    (piece,) = split.pieces(BLOCK)
    piece.store(torch.empty(0))
    split.join([piece], BLOCK)
    assert len(piece.load(torch.empty(0))) == len(split.apart.places) == 0


@pytest.mark.parametrize("size", [4096, 5000, BLOCK])
def test_pieces_are_the_weight(size):
    values = weights(UPPER[::7], LOWER)
    split = stored(torch.zeros_like(values))
    pieces = split.pieces(size)
    for piece, source in zip(pieces, values.split(size), strict=True):
        piece.store(source)
    split.join(pieces, size)
    assert_whole(split, values)
    for piece, expected in zip(split.pieces(size), values.split(size), strict=True):
        assert torch.equal(bits(piece.load(torch.empty_like(expected))), bits(expected))
    assert torch.equal(split.apart.places, split.apart.places.sort().values)


def test_random_weights_keep_one_in_131072_apart():
    torch.manual_seed(0)
    split = stored(torch.randn(2**22))
    assert 10 < len(split.apart.places) < 64  # 32 expected; at most 12 bytes each
    assert split.apart.nbytes == 12 * len(split.apart.places)
