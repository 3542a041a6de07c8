"""The split of a global batch: the rule's own table, and its promises for random batches."""

import random

from hydra_engine import split_batch
from tests.covering import covering
from tests.refused import refused

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


def test_a_batch_is_split_as_the_table_says():
    for given, (sizes, num_rounds) in TABLE.items():
        assert split_batch(*given) == sizes
        assert -(-len(sizes) // given[2]) == num_rounds


def test_no_micro_batch_is_too_large_and_all_are_alike():
    rng = random.Random(23)
    for _ in range(2_000):
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


@covering(name=["global_batch", "max_device_batch", "num_devices"], value=[0, -3, 2.0, True, None, "8"], strength=1)
def test_what_cannot_be_split_is_refused(name, value):
    given = {"global_batch": 256, "max_device_batch": 64, "num_devices": 4, name: value}
    with refused(ValueError if type(value) is int else TypeError, says=f"{name}: {value!r}"):
        split_batch(*given.values())
