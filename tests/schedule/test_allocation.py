"""The number of devices for each task is the best there is, by brute force."""

import itertools
import random

import pytest

from hydra_engine.schedule.state import allocate


def by_brute_force(remaining_s, speedups, num_devices):
    choices = itertools.product(*(range(1, len(each) + 1) for each in speedups))
    found = []
    for numbers in choices:
        if sum(numbers) <= num_devices:
            seconds = [s / f[n - 1] for s, f, n in zip(remaining_s, speedups, numbers, strict=True)]
            found.append((max(seconds), sum(seconds), list(numbers)))
    return min(found)


@pytest.mark.parametrize("seed", range(200))
def test_equals_brute_force(seed):
    rng = random.Random(seed)
    num_tasks = rng.randint(1, 4)
    num_devices = num_tasks + rng.randint(0, 4)
    remaining_s = [rng.choice((1.0, 2.0, 5.0, rng.uniform(0.1, 9))) for _ in range(num_tasks)]
    # Quarters: sums come out the same in any order.
    speedups = [tuple(rng.randint(2, 12) / 4 for _ in range(rng.randint(1, 5))) for _ in range(num_tasks)]
    found = allocate(remaining_s, speedups, num_devices)
    seconds = [s / f[n - 1] for s, f, n in zip(remaining_s, speedups, found, strict=True)]
    last_s, sum_s, _ = by_brute_force(remaining_s, speedups, num_devices)
    assert sum(found) <= num_devices
    assert max(seconds) == last_s
    assert sum(seconds) == pytest.approx(sum_s, rel=1e-12)


def test_the_last_task_gets_every_device_that_helps():
    assert allocate([10.0], [(1.0, 1.9, 2.7)], 3) == [3]
    assert allocate([10.0], [(1.0, 1.9, 1.9)], 3) == [2]
    assert allocate([10.0], [(1.0,)], 3) == [1]


def test_two_tasks_on_three_devices():
    assert allocate([10.0, 6.0], [(1.0, 1.8, 2.5)] * 2, 3) == [2, 1]
    assert allocate([6.0, 10.0], [(1.0, 1.8, 2.5)] * 2, 3) == [1, 2]


def test_as_many_tasks_as_devices_get_one_each():
    assert allocate([1.0, 2.0, 3.0], [(1.0, 2.0, 3.0)] * 3, 3) == [1, 1, 1]


def test_no_tasks():
    assert allocate([], [], 2) == []


def test_refused():
    with pytest.raises(ValueError, match=r"devices: 1 for 2 tasks"):
        allocate([1.0, 1.0], [(1.0,), (1.0,)], 1)
    with pytest.raises(ValueError, match=r"speedups"):
        allocate([1.0], [()], 1)
