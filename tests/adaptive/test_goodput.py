"""Goodput, and the batch with the highest one: limits hold, and small gains change nothing."""

import itertools
import random
from dataclasses import replace

import pytest

from hydra_engine import split_batch
from hydra_engine.adaptive import Choice, Goodput, GradientNoiseScale, NoiseLevel, ThroughputModel, ThroughputParameters
from tests.refused import refused

RESIDENT = ThroughputParameters(a_c=0.121, b_c=0.00568, a_n=0.0236, b_n=0.00634, a_r=0.0118, b_r=0.00317, gamma=1.14)
INITIAL = 128


def goodput(sqr=1.0, var=10.0, parameters=RESIDENT, initial=INITIAL):
    return Goodput(ThroughputModel(parameters), NoiseLevel(sqr=sqr, var=var, initial_batch_size=initial))


def random_goodput(rng):
    a_c, b_c, a_n, b_n, a_r, b_r, gamma = (rng.gammavariate(2, 2) for _ in range(7))
    parameters = ThroughputParameters(a_c=a_c, b_c=b_c, a_n=a_n, b_n=b_n, a_r=a_r, b_r=b_r, gamma=1 + gamma)
    return goodput(rng.gammavariate(2, 2), rng.gammavariate(2, 2), parameters)


def split_of(choice):
    return choice.batch_size, choice.micro_batch, choice.accumulation_steps


def test_goodput_is_throughput_times_efficiency():
    each = goodput(sqr=1.0, var=2.0)
    assert each.efficiency(INITIAL) == 1
    assert each.efficiency(4 * INITIAL) == pytest.approx(2 / 4)
    assert each.evaluate(4, 128, 1) == pytest.approx(600.4591 * (3 / 1.25) / 8, abs=1e-4)
    assert each.evaluate(1, 128) == pytest.approx(150.9363, abs=1e-4)


def test_efficiency_falls_with_the_batch_and_rises_with_noise():
    sizes = (128, 200, 512, 4096, 10**6)
    for noise in (0.1, 1.0, 100.0):
        found = [goodput(var=noise).efficiency(size) for size in sizes]
        assert found == sorted(found, reverse=True)
        assert 0 < found[-1] < found[0] == 1
    for size in sizes[1:]:
        found = [goodput(var=noise).efficiency(size) for noise in (0.1, 1.0, 100.0)]
        assert found == sorted(found)


def test_noise_as_measured_and_as_a_value_are_the_same():
    noise = GradientNoiseScale(16)
    unknown = Goodput(ThroughputModel(RESIDENT), noise)
    assert unknown.efficiency(64) == 16 / 64
    assert unknown.optimize(2, max_batch_size=512).batch_size == 16  # the initial batch, until the noise is known
    noise.update([16, 16], [[2.0], [4.0]], [2.0])
    known = Goodput(ThroughputModel(RESIDENT), noise)
    assert known.efficiency(64) == noise.gain(64) / 4
    assert unknown.efficiency(64) == 16 / 64


@pytest.mark.parametrize("seed", range(4))
def test_choices_keep_all_limits(seed):
    rng = random.Random(seed)
    each = random_goodput(rng)
    num_refused = 0
    for _ in range(30):
        devices, low = rng.randint(1, 20), rng.choice((1, 8, 64))
        limits = {
            "max_batch_size": rng.choice((128, 129, 1280, 5000)),
            "bounds": (low, low * rng.choice((2, 4, 9))),
            "accumulation": rng.random() < 0.7,
            "least_micro_batches": rng.choice((1, 2, 5)),
        }
        try:
            choice = each.optimize(devices, **limits)
        except ValueError:
            num_refused += 1
            continue
        size, micro, extra = split_of(choice)
        assert 128 <= size <= limits["max_batch_size"]
        sizes = split_batch(size, micro, devices)
        assert len(sizes) == devices * (extra + 1) >= limits["least_micro_batches"]
        assert limits["bounds"][0] <= min(sizes) <= max(sizes) == micro <= limits["bounds"][1]
        assert limits["accumulation"] or extra == 0
        assert choice.goodput > 0
    assert num_refused < 20


@pytest.mark.parametrize("devices", [1, 3, 5])
def test_only_the_initial_batch_is_left_where_it_is_the_largest(devices):
    choice = goodput().optimize(devices, max_batch_size=INITIAL)
    assert split_of(choice) == (128, -(-128 // devices), 0)


def test_bounds_make_a_batch_larger_than_the_initial_one():
    assert split_of(goodput().optimize(1, max_batch_size=1280, bounds=(256, 256))) == (256, 256, 0)


def test_one_device_accumulates_what_it_has_no_memory_for():
    # 128 samples are 2 micro-batches of 64, and 192 are 2 of 96. More of them are no faster on one device.
    choice = goodput(var=1e4).optimize(1, max_batch_size=1280, bounds=(1, 96))
    assert split_of(choice) == (192, 96, 1)
    with refused(says="accumulation bounds devices"):
        goodput().optimize(1, max_batch_size=1280, bounds=(1, 64), accumulation=False)
    choice = goodput(var=1e4).optimize(2, max_batch_size=1280, bounds=(1, 64), accumulation=False)
    assert split_of(choice) == (128, 64, 0)


def test_more_noise_never_chooses_a_smaller_batch():
    found = [goodput(var=var).optimize(2, max_batch_size=4096).batch_size for var in (0.01, 1, 10, 100, 1e4)]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_transfers_are_paid_for_by_accumulation():
    loaded = replace(RESIDENT, load_s=10.0)
    limits = {"max_batch_size": 4096, "bounds": (1, 64)}
    resident, moved = (goodput(10, 50, each).optimize(1, **limits) for each in (RESIDENT, loaded))
    assert moved.accumulation_steps > resident.accumulation_steps
    assert moved.micro_batch <= 64


def test_the_best_of_all_splits_is_found_to_within_a_step_of_the_candidates():
    rng = random.Random(11)
    for _ in range(4):
        each, devices = random_goodput(rng), rng.randint(1, 4)
        choice = each.optimize(devices, max_batch_size=1280, bounds=(1, 96))
        best = max(
            each.evaluate(devices, micro, extra)
            for micro, extra in itertools.product(range(1, 97), range(12))
            if 128 <= devices * micro * (extra + 1) <= 1280
        )
        assert choice.goodput >= 0.97 * best


def test_the_current_batch_stays_until_another_is_5_percent_better():
    each, limits = goodput(), {"max_batch_size": 2048, "bounds": (1, 256)}
    best = each.optimize(2, **limits)
    size = best.batch_size + 8
    near = Choice(batch_size=size, micro_batch=(size + 1) // 2, accumulation_steps=0, goodput=0)
    kept = each.optimize(2, **limits, current=near)
    assert split_of(kept) == split_of(near)
    assert best.goodput / 1.05 <= kept.goodput <= best.goodput
    far = Choice(batch_size=2048, micro_batch=256, accumulation_steps=3, goodput=1e9)
    assert each.optimize(2, **limits, current=far) == best


def test_a_current_choice_that_breaks_a_limit_is_dropped():
    each = goodput()
    current = each.optimize(2, max_batch_size=2048)
    for limits in (
        {"max_batch_size": current.batch_size - 1},
        {"max_batch_size": 2048, "bounds": (1, current.micro_batch - 1)},
        {"max_batch_size": 2048, "bounds": (current.micro_batch + 1, 2048)},
    ):
        assert each.optimize(2, **limits, current=current) == each.optimize(2, **limits)
    accumulated = Choice(batch_size=256, micro_batch=64, accumulation_steps=1, goodput=0)
    found = each.optimize(2, max_batch_size=256, bounds=(1, 128), accumulation=False, current=accumulated)
    assert found.accumulation_steps == 0


def test_the_current_batch_is_split_anew_for_other_devices():
    each = goodput()
    current = each.optimize(2, max_batch_size=INITIAL)
    found = each.optimize(4, max_batch_size=INITIAL, current=current)
    assert split_of(current) == (128, 64, 0)
    assert split_of(found) == (128, 32, 0)


@pytest.mark.parametrize("parameters", [RESIDENT, replace(RESIDENT, load_s=2.0)], ids=["resident", "moved"])
def test_more_devices_have_more_goodput_and_each_of_them_less(parameters):
    each = goodput(var=100.0, parameters=parameters)
    found = each.goodputs(8, max_batch_size=4096, bounds=(1, 256))
    assert list(found) == sorted(found)
    shares = [value / k for k, value in enumerate(found, 1)]
    assert shares == sorted(shares, reverse=True)
    assert found[2] == each.optimize(3, max_batch_size=4096, bounds=(1, 256)).goodput


def test_devices_that_cannot_all_be_used_are_idle():
    each = goodput(initial=2)
    found = each.goodputs(8, max_batch_size=4)
    assert found[3:] == (found[3],) * 5
    found = each.goodputs(4, max_batch_size=8, accumulation=False, least_micro_batches=2)
    assert found[0] == 0 < found[1]


def test_devices_are_wanted_while_each_does_half_of_one():
    noisy, quiet = goodput(var=1e5), goodput(var=1e-6)
    limits = {"max_batch_size": 8192, "bounds": (1, 256)}
    assert noisy.desired_devices(8, **limits) == 8
    wanted = quiet.desired_devices(8, **limits)
    found = quiet.goodputs(8, **limits)
    assert 1 <= wanted < 8
    assert found[wanted - 1] >= 0.5 * wanted * found[0]
    assert all(found[k - 1] < 0.5 * k * found[0] for k in range(wanted + 1, 9))
    assert quiet.desired_devices(8, **limits, least_share=0.0) == 8
    assert quiet.desired_devices(8, **limits, least_share=1.0) == 1


@pytest.mark.parametrize(
    ("method", "arguments", "options", "error", "says"),
    [
        ("optimize", [1], {"max_batch_size": 64}, ValueError, "max_batch_size: 64 128"),
        ("optimize", [0], {}, ValueError, "devices: 0"),
        ("optimize", [1.0], {}, TypeError, "devices: 1.0"),
        ("optimize", [1], {"bounds": (0, 4)}, ValueError, "bounds: 0"),
        ("optimize", [1], {"bounds": (8, 4)}, ValueError, "bounds: 4 8"),
        ("optimize", [1], {"least_micro_batches": 0}, ValueError, "least_micro_batches: 0"),
        ("optimize", [4], {"max_batch_size": 200, "bounds": (64, 96)}, ValueError, "devices: 4 200"),
        ("goodputs", [0], {}, ValueError, "max_devices: 0"),
        ("desired_devices", [2], {"bounds": (129, 200)}, ValueError, "max_devices: 2 128"),
        ("desired_devices", [2], {"least_share": 2.0}, ValueError, "least_share: 2.0"),
    ],
)
def test_bad_arguments_are_refused(method, arguments, options, error, says):
    with refused(error, says=says):
        getattr(goodput(), method)(*arguments, **{"max_batch_size": 128, **options})


def test_a_batch_of_no_samples_has_no_efficiency():
    with refused(says="batch_size: 0"):
        goodput().efficiency(0)
