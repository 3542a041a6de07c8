"""Devices are shared out among tasks; the queue of ready parts."""

import itertools
import random

import pytest

from hydra_engine.schedule.state import MAX_STALE, ReadyQueue, allocate
from tests.refused import refused


def by_brute_force(remaining_s, speedups, num_devices):
    choices = itertools.product(*(range(1, len(each) + 1) for each in speedups))
    found = []
    for numbers in choices:
        if sum(numbers) <= num_devices:
            seconds = [s / f[n - 1] for s, f, n in zip(remaining_s, speedups, numbers, strict=True)]
            found.append((max(seconds), sum(seconds), list(numbers)))
    return min(found)


def random_tasks(rng):
    """Seconds left, speedups, and devices. Speedups are quarters: their sums come out the same in any order."""
    num_tasks = rng.randint(1, 4)
    remaining_s = [rng.choice((1.0, 2.0, 5.0, rng.uniform(0.1, 9))) for _ in range(num_tasks)]
    speedups = [tuple(rng.randint(2, 12) / 4 for _ in range(rng.randint(1, 5))) for _ in range(num_tasks)]
    return remaining_s, speedups, num_tasks + rng.randint(0, 5)


SEEDS = [range(40), pytest.param(range(40, 200), marks=pytest.mark.rest)]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_equals_brute_force(seeds):
    for seed in seeds:
        remaining_s, speedups, num_devices = random_tasks(random.Random(seed))
        found = allocate(remaining_s, speedups, num_devices)
        seconds = [s / f[n - 1] for s, f, n in zip(remaining_s, speedups, found, strict=True)]
        last_s, sum_s, _ = by_brute_force(remaining_s, speedups, num_devices)
        assert sum(found) <= num_devices, seed
        assert max(seconds) == last_s, seed
        assert sum(seconds) == pytest.approx(sum_s, rel=1e-12), seed


def test_64_devices_are_shared_out_among_16_tasks():
    """Where one way after the other would take years."""
    rng = random.Random(0)
    speedups = [tuple(1 + k * rng.uniform(0.1, 1.0) for k in range(64)) for _ in range(16)]
    numbers = allocate([rng.uniform(1, 9) for _ in range(16)], speedups, 64)
    assert sum(numbers) <= 64
    assert min(numbers) >= 1


@pytest.mark.parametrize(
    ("remaining_s", "speedups", "num_devices", "expected"),
    [
        ([10.0], [(1.0, 1.9, 2.7)], 3, [3]),
        ([10.0], [(1.0, 1.9, 1.9)], 3, [2]),  # every device that helps
        ([10.0], [(1.0,)], 3, [1]),
        ([10.0, 6.0], [(1.0, 1.8, 2.5)] * 2, 3, [2, 1]),
        ([6.0, 10.0], [(1.0, 1.8, 2.5)] * 2, 3, [1, 2]),
        ([1.0, 2.0, 3.0], [(1.0, 2.0, 3.0)] * 3, 3, [1, 1, 1]),
        ([], [], 2, []),
    ],
)
def test_by_hand(remaining_s, speedups, num_devices, expected):
    assert allocate(remaining_s, speedups, num_devices) == expected


def test_fewer_devices_than_tasks_and_no_speedups_are_refused():
    with refused(ValueError, says="devices 1 2"):
        allocate([1.0, 1.0], [(1.0,), (1.0,)], 1)
    with refused(ValueError, says="speedups"):
        allocate([1.0], [()], 1)


def test_best_is_the_lowest_key_and_among_equals_the_first():
    queue = ReadyQueue()
    for member, key in (("a", 2), ("b", 1), ("c", 1), ("d", 3)):
        queue.put(member, key)
    found = []
    while (member := queue.best()) is not None:
        found.append(member)
        queue.discard(member)
    assert found == ["b", "c", "a", "d"]


def test_another_key_takes_the_place_of_the_first():
    queue = ReadyQueue()
    queue.put("a", 1)
    queue.put("b", 2)
    queue.put("a", 3)
    assert queue.best() == "b"
    queue.discard("b")
    assert queue.best() == "a"
    assert len(queue) == 1


def test_members_need_not_be_ordered_themselves():
    queue = ReadyQueue()
    members = [object(), object()]
    for member in members:
        queue.put(member, 0)
    assert queue.best() is members[0]


def test_queue_is_a_sorted_list_in_any_order_of_changes():
    rng = random.Random(0)
    queue, keys = ReadyQueue(), {}
    for _ in range(3000):
        member = rng.randrange(30)
        if rng.random() < 0.6:
            keys.pop(member, None)
            keys[member] = rng.randrange(10)
            queue.put(member, keys[member])
        else:
            keys.pop(member, None)
            queue.discard(member)
        assert len(queue) == len(keys)
        assert bool(queue) == bool(keys)
        assert queue.best() == (min(keys, key=lambda each: keys[each]) if keys else None)


def test_memory_is_that_of_the_members():
    queue = ReadyQueue()
    for k in range(10):
        queue.put(k, k)
    for k in range(2000):
        queue.put(k % 10, k)
        assert len(queue._heap) <= 2 * 10 + MAX_STALE


def test_keys_that_cannot_be_compared_are_forgotten_with_their_members():
    queue = ReadyQueue()
    queue.put("a", 1)
    queue.put("b", 2)
    with pytest.raises(TypeError):
        queue.put("c", None)
    for member in "abc":
        queue.discard(member)
    assert queue.best() is None
    queue.put("d", 1)
    assert queue.best() == "d"


def test_first_are_the_lowest_in_order():
    rng = random.Random(1)
    queue, keys = ReadyQueue(), {}
    for k in range(200):
        keys[k] = rng.randrange(1000)
        queue.put(k, keys[k])
    for k in rng.sample(range(200), 90):
        queue.discard(k)
        del keys[k]
    for num in (0, 1, 7, 110, 500):
        assert [keys[k] for k in queue.first(num)] == sorted(keys.values())[:num]
    assert ReadyQueue().first(3) == []
