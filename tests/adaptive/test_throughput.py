"""Seconds of a step: published numbers, transfers, and parameters found again from timed steps."""

import itertools
import random
from dataclasses import replace

import pytest

from hydra_engine.adaptive import StepTime, ThroughputModel, ThroughputParameters
from tests.refused import refused

PUBLISHED = ThroughputParameters(a_c=0.121, b_c=0.00568, a_n=0.0236, b_n=0.00634, a_r=0.0118, b_r=0.00317, gamma=1.14)
SLOW_EXCHANGE = replace(PUBLISHED, a_r=0.118, b_r=0.0317, gamma=1.6)


def throughput(parameters, devices, micro_batch, extra, nodes=1):
    return ThroughputModel(parameters).throughput(
        devices=devices, micro_batch=micro_batch, accumulation_steps=extra, nodes=nodes
    )


ALL_SHAPES = list(itertools.product((1, 2, 3, 4), (8, 32, 128), (0, 2)))


def step_of(devices, micro_batch, accumulation_steps, seconds=1.0, **options):
    shape = {"devices": devices, "micro_batch": micro_batch, "accumulation_steps": accumulation_steps}
    return StepTime(**shape, seconds=seconds, **options)


def predicted(model, step):
    return model.seconds(devices=step.devices, micro_batch=step.micro_batch, accumulation_steps=step.accumulation_steps)


def timed(parameters, shapes):
    model = ThroughputModel(parameters)
    return [replace(step, seconds=predicted(model, step)) for step in itertools.starmap(step_of, shapes)]


def assert_meets(model, steps, **tolerance):
    for step in steps:
        assert predicted(model, step) == pytest.approx(step.seconds, **tolerance)


def test_throughput_is_that_of_the_published_numbers():
    assert throughput(PUBLISHED, 1, 128, 0) == pytest.approx(150.9363, abs=1e-4)
    assert throughput(PUBLISHED, 2, 64, 0) == pytest.approx(260.8690, abs=1e-4)
    assert throughput(PUBLISHED, 4, 128, 1) == pytest.approx(600.4591, abs=1e-4)


def test_nodes_exchange_at_their_own_pace():
    plain = replace(PUBLISHED, gamma=1.0)
    model = ThroughputModel(plain)
    pass_s = 0.121 + 0.00568 * 64
    assert model.seconds(devices=4, micro_batch=64) == pytest.approx(pass_s + 0.0118 + 2 * 0.00317)
    assert model.seconds(devices=4, micro_batch=64, nodes=2) == pytest.approx(pass_s + 0.0236 + 2 * 0.00634)
    assert model.seconds(devices=4, micro_batch=64, accumulation_steps=3) == pytest.approx(4 * pass_s + 0.01814)


def test_throughput_grows_with_samples_and_devices_and_less_than_in_proportion():
    for devices, extra in itertools.product((1, 2, 4, 8), (0, 1, 4)):
        found = [throughput(PUBLISHED, devices, micro, extra) for micro in (8, 16, 24, 32, 40)]
        rises = [after - before for before, after in itertools.pairwise(found)]
        assert min(rises) > 0
        assert rises == sorted(rises, reverse=True)
        of_one = throughput(PUBLISHED, 1, 32, extra)
        assert throughput(PUBLISHED, devices, 32, extra) <= devices * of_one * (1 + 1e-12)


def test_a_step_takes_at_least_as_long_as_its_transfers():
    linked = ThroughputModel(replace(PUBLISHED, load_s=2.0, sample_s=0.001))
    assert linked.link_s(100) == pytest.approx(2.1)
    assert linked.seconds(devices=1, micro_batch=10) == pytest.approx(2.01)
    assert linked.seconds(devices=2, micro_batch=10, accumulation_steps=4) == pytest.approx(2.05)
    # Computing takes longer than the link again.
    long = {"devices": 1, "micro_batch": 128, "accumulation_steps": 9}
    assert linked.seconds(**long) == ThroughputModel(PUBLISHED).seconds(**long)


def test_accumulation_pays_for_transfers():
    linked = replace(PUBLISHED, load_s=2.0)
    assert throughput(linked, 1, 16, 5) == pytest.approx(6 * throughput(linked, 1, 16, 0))
    assert throughput(PUBLISHED, 1, 16, 5) == pytest.approx(throughput(PUBLISHED, 1, 16, 0))


def test_very_short_exchanges_do_not_underflow():
    tiny = replace(PUBLISHED, a_c=1e-200, b_c=0.0, a_r=1e-200, b_r=0.0, gamma=10.0)
    assert ThroughputModel(tiny).seconds(devices=2, micro_batch=1) == pytest.approx(2**0.1 * 1e-200, abs=0)


@pytest.mark.parametrize("parameters", [PUBLISHED, SLOW_EXCHANGE], ids=["fast", "slow"])
def test_a_fit_finds_the_seconds_of_steps_that_it_has_not_seen(parameters):
    model = ThroughputModel.fit(timed(parameters, ALL_SHAPES))
    unseen = itertools.product((1, 2, 3, 4), (16, 64, 256), (0, 1, 5))
    assert_meets(model, timed(parameters, unseen), rel=0.02)
    assert model.parameters.a_c == pytest.approx(parameters.a_c, rel=0.05)
    assert model.parameters.b_c == pytest.approx(parameters.b_c, rel=0.02)


def test_a_fit_of_noisy_times_is_near():
    rng, steps = random.Random(4), timed(SLOW_EXCHANGE, ALL_SHAPES)
    noisy = [replace(step, seconds=step.seconds * rng.gauss(1, 0.03)) for step in 4 * steps]
    assert_meets(ThroughputModel.fit(noisy), steps, rel=0.05)


def test_equal_observations_give_equal_models():
    steps = timed(SLOW_EXCHANGE, ALL_SHAPES)
    assert ThroughputModel.fit(steps).parameters == ThroughputModel.fit(steps).parameters


def test_one_observation_is_met_and_half_of_a_pass_is_constant():
    (step,) = timed(PUBLISHED, [(1, 64, 1)])
    model = ThroughputModel.fit([step])
    assert predicted(model, step) == pytest.approx(step.seconds)
    p = model.parameters
    assert p.a_c == pytest.approx(64 * p.b_c)
    assert (p.a_n, p.b_n, p.a_r, p.b_r, p.gamma) == (0, 0, 0, 0, 1)


def test_two_sizes_of_micro_batch_tell_a_pass():
    p = ThroughputModel.fit(timed(PUBLISHED, [(1, 8, 0), (1, 64, 0)])).parameters
    assert (p.a_c, p.b_c) == pytest.approx((0.121, 0.00568), rel=1e-3)
    assert (p.a_r, p.b_r, p.gamma) == (0, 0, 1)


def test_steps_on_one_number_of_devices_say_nothing_of_the_exchange():
    p = ThroughputModel.fit(timed(SLOW_EXCHANGE, [(2, 8, 0), (2, 64, 0)])).parameters
    assert (p.a_r, p.b_r) == (0, 0)
    assert min(p.a_c, p.b_c) > 0


def test_three_observations_tell_the_exchange_of_two_devices():
    steps = timed(SLOW_EXCHANGE, [(1, 8, 0), (1, 64, 0), (2, 64, 0)])
    model = ThroughputModel.fit(steps)
    assert_meets(model, steps, rel=2e-3)
    assert model.parameters.a_r > 0
    assert (model.parameters.b_r, model.parameters.gamma) == (0, 1)


@pytest.mark.parametrize("count", range(1, 7))
def test_few_random_observations_give_finite_seconds_of_the_right_size(count):
    rng = random.Random(count)
    for _ in range(2):
        steps = timed(SLOW_EXCHANGE, rng.sample(ALL_SHAPES, count))
        model = ThroughputModel.fit(steps)
        assert min(vars(model.parameters).values()) >= 0
        assert_meets(model, steps, rel=0.3)


def test_a_heavier_observation_counts_more():
    light, heavy = step_of(1, 8, 0, seconds=1.0), step_of(1, 8, 0, seconds=2.0, weight=99.0)
    assert predicted(ThroughputModel.fit([light, heavy]), light) == pytest.approx(2**0.99, rel=1e-3)


def test_steps_that_wait_for_transfers_leave_room_for_accumulation():
    steps = timed(replace(PUBLISHED, load_s=2.0), [(1, 8, 0), (1, 16, 0)])
    model = ThroughputModel.fit(steps, load_s=2.0)
    for step in steps:
        assert predicted(model, step) == pytest.approx(2.0)
    # Nothing shows yet that computing takes more than half of the link: a second pass is predicted to be free.
    assert model.seconds(devices=1, micro_batch=8, accumulation_steps=1) == pytest.approx(2.0, rel=0.05)
    steps += timed(replace(PUBLISHED, load_s=2.0), [(1, 128, 4), (1, 64, 9)])
    again = ThroughputModel.fit(steps, load_s=2.0)
    assert again.parameters.b_c == pytest.approx(PUBLISHED.b_c, rel=0.01)
    assert again.parameters.load_s == 2.0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: replace(PUBLISHED, a_c=-1.0), "a_c: -1.0"),
        (lambda: replace(PUBLISHED, b_r=float("nan")), "b_r: nan"),
        (lambda: replace(PUBLISHED, gamma=0.5), "gamma: 0.5"),
        (lambda: replace(PUBLISHED, a_c=0.0, b_c=0.0), "a_c, b_c: 0.0"),
        (lambda: throughput(PUBLISHED, 0, 1, 0), "devices: 0"),
        (lambda: throughput(PUBLISHED, 1, 0, 0), "micro_batch: 0"),
        (lambda: throughput(PUBLISHED, 1, 1, -1), "accumulation_steps: -1"),
        (lambda: throughput(PUBLISHED, 1, 1, 0, 2), "nodes: 2 1"),
        (lambda: ThroughputModel.fit([]), "observations: none"),
        (lambda: ThroughputModel.fit(timed(PUBLISHED, [(1, 1, 0)]), load_s=-1.0), "load_s: -1.0"),
        (lambda: step_of(1, 1, 0, seconds=0.0), "seconds: 0"),
        (lambda: step_of(1, 1, 0, seconds=float("inf")), "seconds: inf"),
    ],
)
def test_bad_numbers_are_refused(call, says):
    with refused(says=says):
        call()
