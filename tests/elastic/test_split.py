"""The split of a global batch: the rule's own table, and its promises for random batches."""

import random

import pytest

from hydra_engine.elastic import split_batch

# (global batch, most per device, devices): micro-batches, and how many of them each device runs one after the other.
TABLE = {
    (256, 64, 1): ([64] * 4, 4),
    (256, 64, 2): ([64] * 4, 2),
    (256, 64, 4): ([64] * 4, 1),
    (256, 64, 3): ([43, 43, 43, 43, 42, 42], 2),
    (100, 30, 1): ([25] * 4, 4),
    (7, 2, 1): ([2, 2, 2, 1], 4),
    (3, 1, 8): ([1, 1, 1], 1),
    (1000, 64, 3): ([56] * 10 + [55] * 8, 6),
}


@pytest.mark.parametrize("given", TABLE, ids=str)
def test_a_batch_is_split_as_the_table_says(given):
    sizes, num_rounds = TABLE[given]
    assert split_batch(*given) == sizes
    assert -(-len(sizes) // given[2]) == num_rounds


def test_no_micro_batch_is_too_large_and_all_are_alike():
    rng = random.Random(23)
    for _ in range(10_000):
        size = rng.randint(1, 10 ** rng.randint(1, 4))
        most, num_devices = rng.randint(1, 10 ** rng.randint(1, 4)), rng.randint(1, 16)
        sizes = split_batch(size, most, num_devices)
        assert sum(sizes) == size
        assert most >= sizes[0]
        assert sizes[0] >= sizes[-1] >= max(1, sizes[0] - 1)
        assert sizes == sorted(sizes, reverse=True)
        # As few rounds as there can be, and every device has its share, unless there are too few samples.
        num_rounds = -(-len(sizes) // num_devices)
        assert num_devices * most * (num_rounds - 1) < size <= num_devices * most * num_rounds
        assert len(sizes) in (size, num_devices * num_rounds)


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize(
    ("value", "error", "why"),
    [
        (0, ValueError, "0, limit: at least 1; give more"),
        (-3, ValueError, "-3, limit: at least 1; give more"),
        (2.0, TypeError, "2.0 is not an int; give a whole number"),
        (True, TypeError, "True is not an int; give a whole number"),
        (None, TypeError, "None is not an int; give a whole number"),
        ("8", TypeError, "'8' is not an int; give a whole number"),
    ],
    ids=repr,
)
def test_what_cannot_be_split_is_refused(position, value, error, why):
    given = [256, 64, 4]
    given[position] = value
    with pytest.raises(error) as raised:
        split_batch(*given)
    assert str(raised.value) == f"{('global_batch', 'max_device_batch', 'num_devices')[position]}: {why}"
