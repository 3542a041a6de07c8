"""Seconds of a step: published numbers, transfers, and a pass found again from timed ones."""

import itertools
import random
from dataclasses import replace

import pytest

from hydra_engine.adaptive import ThroughputModel
from hydra_engine.adaptive.throughput import fitted_pass

PUBLISHED = ThroughputModel(a_c=0.121, b_c=0.00568, a_r=0.0118, b_r=0.00317)
SIZES = (8, 32, 128)


def throughput(model, devices, micro_batch, extra):
    seconds = model.seconds(devices=devices, micro_batch=micro_batch, accumulation_steps=extra)
    return devices * micro_batch * (extra + 1) / seconds


def timed(model, sizes):
    return [(micro, model.seconds(devices=1, micro_batch=micro)) for micro in sizes]


def predicted(found, micro):
    a_c, b_c = found
    return a_c + b_c * micro


def test_devices_exchange_after_their_last_pass():
    pass_s = 0.121 + 0.00568 * 64
    assert PUBLISHED.seconds(devices=1, micro_batch=64) == pytest.approx(pass_s)
    assert PUBLISHED.seconds(devices=2, micro_batch=64) == pytest.approx(pass_s + 0.0118)
    assert PUBLISHED.seconds(devices=4, micro_batch=64) == pytest.approx(pass_s + 0.0118 + 2 * 0.00317)
    assert PUBLISHED.seconds(devices=4, micro_batch=64, accumulation_steps=3) == pytest.approx(4 * pass_s + 0.01814)


def test_throughput_grows_with_samples_and_devices_and_less_than_in_proportion():
    for devices, extra in itertools.product((1, 2, 4, 8), (0, 1, 4)):
        found = [throughput(PUBLISHED, devices, micro, extra) for micro in (8, 16, 24, 32, 40)]
        rises = [after - before for before, after in itertools.pairwise(found)]
        assert min(rises) > 0
        assert rises == sorted(rises, reverse=True)
        of_one = throughput(PUBLISHED, 1, 32, extra)
        assert throughput(PUBLISHED, devices, 32, extra) <= devices * of_one * (1 + 1e-12)


def test_a_step_takes_at_least_as_long_as_its_transfers():
    linked = replace(PUBLISHED, load_s=2.0, sample_s=0.001)
    assert linked.seconds(devices=1, micro_batch=10) == pytest.approx(2.01)
    assert linked.seconds(devices=2, micro_batch=10, accumulation_steps=4) == pytest.approx(2.05)
    # Computing takes longer than the link again.
    long = {"devices": 1, "micro_batch": 128, "accumulation_steps": 9}
    assert linked.seconds(**long) == PUBLISHED.seconds(**long)


def test_accumulation_pays_for_transfers():
    linked = replace(PUBLISHED, load_s=2.0)
    assert throughput(linked, 1, 16, 5) == pytest.approx(6 * throughput(linked, 1, 16, 0))
    assert throughput(PUBLISHED, 1, 16, 5) == pytest.approx(throughput(PUBLISHED, 1, 16, 0))


def test_a_fit_finds_the_seconds_of_passes_that_it_has_not_seen():
    a_c, b_c = found = fitted_pass(timed(PUBLISHED, SIZES))
    for micro, seconds in timed(PUBLISHED, (16, 64, 256)):
        assert predicted(found, micro) == pytest.approx(seconds, rel=0.02)
    assert a_c == pytest.approx(PUBLISHED.a_c, rel=0.05)
    assert b_c == pytest.approx(PUBLISHED.b_c, rel=0.02)


def test_a_fit_of_noisy_times_is_near():
    rng = random.Random(4)
    found = fitted_pass([(micro, seconds * rng.gauss(1, 0.03)) for micro, seconds in 16 * timed(PUBLISHED, SIZES)])
    for micro, seconds in timed(PUBLISHED, SIZES):
        assert predicted(found, micro) == pytest.approx(seconds, rel=0.05)


def test_equal_observations_give_equal_figures():
    assert fitted_pass(timed(PUBLISHED, SIZES)) == fitted_pass(timed(PUBLISHED, SIZES))


def test_one_observation_is_met_and_half_of_a_pass_is_constant():
    a_c, b_c = found = fitted_pass([(64, 0.5)])
    assert predicted(found, 64) == pytest.approx(0.5)
    assert a_c == pytest.approx(64 * b_c)


def test_two_sizes_of_micro_batch_tell_a_pass():
    assert fitted_pass(timed(PUBLISHED, (8, 64))) == pytest.approx((0.121, 0.00568), rel=1e-3)


@pytest.mark.parametrize("count", range(1, 7))
def test_few_random_observations_give_finite_seconds_of_the_right_size(count):
    rng = random.Random(count)
    for _ in range(4):
        observed = [
            (micro, seconds * rng.gauss(1, 0.1)) for micro, seconds in timed(PUBLISHED, rng.choices(SIZES, k=count))
        ]
        found = fitted_pass(observed)
        assert min(found) >= 0
        for micro, seconds in observed:
            assert predicted(found, micro) == pytest.approx(seconds, rel=0.5)


@pytest.mark.parametrize(
    ("call", "error", "why"),
    [
        (lambda: replace(PUBLISHED, a_c=-1.0), ValueError, "a_c: -1.0, limit: finite and at least 0"),
        (lambda: replace(PUBLISHED, b_r=float("nan")), ValueError, "b_r: nan, limit: finite and at least 0"),
        (lambda: replace(PUBLISHED, a_c=0.0, b_c=0.0), ValueError, "a_c, b_c: 0.0, 0.0, limit: one above 0"),
        (lambda: throughput(PUBLISHED, 0, 1, 0), ValueError, "devices: 0, limit: at least 1; give more"),
        (lambda: throughput(PUBLISHED, 1, 0, 0), ValueError, "micro_batch: 0, limit: at least 1; give more"),
        (lambda: throughput(PUBLISHED, 1, 1, -1), ValueError, "accumulation_steps: -1, limit: at least 0; give more"),
        (lambda: replace(PUBLISHED, exposed=1.5), ValueError, "exposed: 1.5, limit: from 0 to 1"),
        (lambda: fitted_pass([]), ValueError, "observations: none, limit: at least 1; time a step first"),
    ],
)
def test_bad_numbers_are_refused(call, error, why):
    with pytest.raises(error, match=why):
        call()
