"""Choices of batches: limits, records, and the batch that is best as the gradient shrinks."""

import json
import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from hydra_engine import LaneSeconds, StepChoice, StepMeasures
from hydra_engine.adaptive import Adaptation, Autoscale, LinearScale
from hydra_engine.tasks import from_json, to_json
from tests.refused import refused

INITIAL = 32


def sgd(num_groups):
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(num_groups)], lr=0.1)


def adaptation(most=1024, *, initial=INITIAL, replay=(), steps_per_epoch=None, num_groups=1, **limits):
    settings = Autoscale(max_batch_size=most, replay=tuple(replay), **limits)
    found = Adaptation(settings, initial, steps_per_epoch=steps_per_epoch)
    found.begin(sgd(num_groups))
    return found


def measures(choice, *, sqr=1.0, var=100.0):
    """Norms of a step as they are in the mean: `sqr` of the gradient, `var` of one sample's noise."""
    number, extra = divmod(choice.batch_size, choice.micro_batches)
    sizes = [float(number + (m < extra)) for m in range(choice.micro_batches)]
    return StepMeasures(tuple(sizes), tuple((sqr + var / size,) for size in sizes), (sqr + var / sum(sizes),))


def run(found, num_steps, seconds, *, after=None, devices=1, most_devices=1, **noise):
    """Let so many steps pass; returns their choices."""
    choices = []
    for _ in range(num_steps):
        after = found.factored(found.choose(after, devices, most_devices))
        choices.append(after)
        found.measured(measures(after, **noise))
        found.timed(after, seconds(after), devices)
    return choices


def passes(constant_s, sample_s, load_s=0.0):
    """Seconds of a step on k devices, in passes of equal micro-batches, while the model crosses the link."""

    def seconds(choice):
        rounds = -(-choice.micro_batches // choice.devices)
        compute_s = rounds * (constant_s + sample_s * choice.micro_batch)
        return LaneSeconds(max(compute_s, load_s), compute_s, load_s)

    return seconds


# -- the best batch


def best_batch(seconds, *, sqr, var, most, high=None):
    """The batch with the highest goodput, by trying all that there are nearly."""

    def goodput(batch):
        number = max(2, -(-batch // (high or most)))
        step = StepChoice(step=0, batch_size=batch, micro_batches=number)
        gain = (var / INITIAL + sqr) / (var / batch + sqr)
        return gain / seconds(step).step_s

    candidates = sorted({round(INITIAL * (most / INITIAL) ** (k / 500)) for k in range(501)})
    return max(candidates, key=goodput)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("times", "high"),
    [
        ((0.1, 0.002), None),
        ((0.01, 0.001, 0.3), None),  # bound by the link until the batch is large
        pytest.param((0.05, 0.0005), 256, marks=pytest.mark.rest),
        pytest.param((0.01, 0.001, 0.3), 64, marks=pytest.mark.rest),
    ],
    ids=str,
)
def test_the_batch_follows_the_best_one_as_the_gradient_shrinks(times, high):
    """A noisy quadratic: the noise stays, the gradient shrinks, so that the best batch grows from small to large."""
    var, most, seconds = 100.0, 4096, passes(*times)
    found = adaptation(most, local_bsz_bounds=None if high is None else (1, high))
    after, ratios = run(found, 20, seconds, sqr=20.0, var=var)[-1], []
    for k in range(10):
        sqr = 20.0 * 0.5**k
        for _ in range(60):  # the noise scale forgets in a thousand steps
            for _ in range(50):
                found.measured(measures(after, sqr=sqr, var=var))
            after = run(found, 1, seconds, after=after, sqr=sqr, var=var)[-1]
        ratios.append(after.batch_size / best_batch(seconds, sqr=sqr, var=var, most=most, high=high))
        assert after.noise == pytest.approx(var / sqr, rel=0.1)
    assert max(max(ratio, 1 / ratio) for ratio in ratios) <= 1.5, ratios


def test_without_noise_the_batch_stays():
    found = adaptation()
    choices = run(found, 40, passes(0.05, 0.0005), sqr=1.0, var=1e-9)
    assert {each.batch_size for each in choices} == {INITIAL}


def test_all_noise_makes_the_batch_as_large_as_pays():
    found = adaptation(500)
    choices = run(found, 40, passes(1.0, 0.0), sqr=0.0, var=100.0)
    assert choices[-1].batch_size == 500
    assert choices[-1].factors == (pytest.approx(500 / INITIAL),)


# -- limits


@pytest.mark.parametrize("seed", range(8))
def test_no_choice_is_above_its_limits_whatever_is_measured(seed):
    rng = random.Random(seed)
    initial = rng.choice([2, 5, 32])
    most = initial * rng.choice([1, 2, 7, 50])
    low = rng.randint(1, max(1, initial // 2))
    high = rng.randint(max(low, initial), max(low, most))
    accumulation = rng.random() < 0.7
    bounds = (low, high) if rng.random() < 0.6 else None
    found = adaptation(most, initial=initial, local_bsz_bounds=bounds, gradient_accumulation=accumulation)
    high = high if bounds else most
    after = None
    for _ in range(60):
        devices = rng.randint(1, 4)
        choice = found.choose(after, devices, 4)
        if rng.random() < 0.1:
            choice = found.smaller(choice)
            high = min(high, found.bounds[1])
        if rng.random() < 0.2:
            choice = found.given(choice, rng.randint(1, choice.batch_size))
        assert 1 <= choice.batch_size <= most
        assert 1 <= choice.micro_batches <= choice.batch_size
        assert choice.micro_batch <= max(high, 1)
        assert 1 <= choice.desired_devices <= 4
        assert 0 < choice.gain <= max(1.0, choice.batch_size / initial) * (1 + 1e-9)
        after = found.factored(choice)
        assert all(0 < each <= max(1.0, after.batch_size / initial) * (1 + 1e-9) for each in after.factors)
        if choice.micro_batches > 1:
            wild = rng.choice([1e-30, 1.0, 1e30])
            found.measured(measures(after, sqr=rng.random() * wild, var=rng.random() * wild))
        wild_s = rng.choice([0.0, -1.0, math.inf, math.nan, 1e-9, rng.random(), 1e9])
        found.timed(after, LaneSeconds(wild_s, wild_s * rng.random(), wild_s * rng.random()), devices)


def test_out_of_memory_makes_micro_batches_a_tenth_smaller_for_good():
    found = adaptation(400)
    choice = StepChoice(step=0, batch_size=400, micro_batches=2)
    smaller = found.smaller(choice)
    assert smaller.micro_batch <= 180
    assert smaller.batch_size == 400
    assert found.bounds == (2, 180)
    assert found.smaller(smaller).micro_batch <= 0.9 * smaller.micro_batch
    later = run(found, 30, passes(1.0, 0.0), sqr=0.0)
    assert max(each.micro_batch for each in later) <= found.bounds[1]


def test_a_limit_keeps_to_the_users_bounds_and_to_what_out_of_memory_taught():
    found = adaptation(400, local_bsz_bounds=(4, 100))
    found.limit(200)
    assert found.bounds == (4, 100)
    found.limit(50)
    assert found.bounds == (4, 50)
    found.limit(70)  # counted anew, on other devices
    assert found.bounds == (4, 70)
    batch = StepChoice(step=3, batch_size=100, micro_batches=2)
    assert found.smaller(found.smaller(batch)).micro_batch <= 30  # 50, at most 45, 34 by a whole number, at most 30
    assert found.bounds == (4, 30)
    assert found.smaller(replace(batch, step=4)).micro_batch <= 30, "it was read before the other did not fit"
    found.limit(70)
    assert found.bounds == (4, 30)
    again = adaptation(400, local_bsz_bounds=(4, 100))
    again.load_state_dict(found.state_dict())
    again.limit(90)
    assert again.bounds == (4, 30)
    found.limit(0)
    assert found.bounds == (1, 1)
    assert found.choose(None).micro_batch == 1


# -- devices


def test_a_task_begins_on_one_device_and_gets_at_most_twice_what_it_was_measured_on():
    found = adaptation(4096)
    assert found.speedups(8) == ()
    seconds = passes(0.001, 0.01)
    after = run(found, 10, seconds, sqr=0.0)[-1]
    assert len(found.speedups(8)) == 2
    after = run(found, 10, seconds, after=after, devices=2, sqr=0.0)[-1]
    assert len(found.speedups(8)) == 4
    assert len(found.speedups(3)) == 3
    after = run(found, 10, seconds, after=after, devices=3, sqr=0.0)[-1]
    assert len(found.speedups(8)) == 6
    speedups = found.speedups(8)
    assert speedups[0] == 1
    assert all(1 <= each <= k * 1.05 for k, each in enumerate(speedups, 1))


def test_devices_are_desired_while_each_is_worth_half_of_the_first():
    alike = adaptation(4096)
    run(alike, 20, passes(0.001, 0.01), sqr=0.0)
    assert alike.choose(None, 1, 8).desired_devices == 8
    fast = adaptation(INITIAL)
    run(fast, 20, passes(0.05, 1e-9), sqr=0.0)  # a pass takes as long for one sample
    assert fast.choose(None, 1, 8).desired_devices < 8
    assert adaptation().choose(None, 1, 8).desired_devices == 1


# -- records


CHOICES = [
    StepChoice(step=0, batch_size=32, micro_batches=2),
    StepChoice(
        step=1,
        batch_size=32,
        micro_batches=4,
        noise=math.inf,
        goodput=1 / 3,
        factors=(1.0, 0.1),
        seconds=LaneSeconds(0.5, 0.25, 1 / 3),
    ),
    StepChoice(
        step=2,
        batch_size=500,
        micro_batches=7,
        devices=3,
        desired_devices=2,
        noise=1e-300,
        gain=1.1,
        progress=1e9 + 1 / 3,
        goodput=math.inf,
        factors=(math.pi, 5e-324),
        seconds=LaneSeconds(1e-9, 0.0),
    ),
]


def test_a_choice_is_the_same_after_json():
    for choice in CHOICES:
        again = from_json(StepChoice, json.loads(json.dumps(to_json(choice))))
        assert again == choice
        assert again.seconds == choice.seconds


def test_choices_are_the_same_after_a_checkpoint():
    begun = [replace(CHOICES[0], factors=(1.0, 1.0)), *CHOICES[1:]]
    again = StepChoice.from_columns(StepChoice.to_columns(begun))
    assert again == begun
    assert [each.seconds for each in again] == [each.seconds for each in begun]
    assert all(type(each.step) is int and type(each.devices) is int for each in again)
    assert StepChoice.from_columns(StepChoice.to_columns([])) == []


def test_what_took_how_long_makes_no_other_choice():
    assert replace(CHOICES[1], seconds=LaneSeconds(9.0, 3.0)) == CHOICES[1]
    assert replace(CHOICES[1], noise=2.0) != CHOICES[1]


def test_a_choice_is_told_in_a_line():
    choice = replace(CHOICES[2], noise=12.345, goodput=678.9, factors=(1.2345, 2.0), progress=3.25)
    assert str(choice) == (
        "batch 500 in 7 micro-batches on 3 devices (2 desired), lr x 1.23 2, noise scale 12.3, gain 1.1, progress 3.2, "
        "goodput 679 samples/s"
    )
    assert choice.short == "batch 500 lr x1.23"
    assert CHOICES[0].short == "batch 32"
    assert choice.micro_batch == 72


def test_a_record_is_made_again_whatever_is_measured():
    first = adaptation()
    choices = run(first, 30, passes(0.05, 0.0005), var=1e4)
    again = adaptation(replay=choices)
    after = None
    for choice in choices:
        after = again.factored(again.choose(after, 7, 8))
        assert after == choice
        again.measured(measures(after, sqr=0.0))
        again.timed(after, LaneSeconds(1e9, 1e9))
    assert again.choose(after).step == 30


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c[1:], "replay: steps 0"),
        (lambda c: [c[1], c[0]], "replay: steps 0"),
        (lambda c: [replace(c[0], batch_size=31), *c[1:]], "replay: 31 32"),
        (lambda c: [*c[:2], replace(c[2], batch_size=1025)], "replay: 1025 max_batch_size"),
        (lambda c: [replace(c[0], factors=(1.0, 2.0)), *c[1:]], "replay: factors 2"),  # the optimizer has one group
    ],
)
def test_a_record_of_something_else_is_refused(change, says):
    choices = [StepChoice(step=k, batch_size=32 + k, micro_batches=2, progress=float(k)) for k in range(3)]
    with refused(says=says):
        adaptation(replay=change(choices))


@pytest.mark.parametrize(
    "change",
    [
        {"micro_batches": 0},
        {"micro_batches": 33},
        {"batch_size": 0},
        {"gain": 0.0},
        {"gain": math.nan},
        {"gain": math.inf},
        {"progress": -1.0},
        {"progress": math.nan},
        {"factors": (1.0, math.nan)},
        {"factors": (math.inf,)},
    ],
    ids=str,
)
def test_a_choice_that_makes_no_sense_is_refused(change):
    with refused(says="StepChoice TaskReport.adaptive"):
        replace(CHOICES[0], **change)


# -- progress


def test_an_epoch_is_over_by_progress():
    found = adaptation(steps_per_epoch=10.5)
    step = StepChoice(step=3, batch_size=64, micro_batches=2, progress=9.0, gain=1.4)
    assert found.is_over(step, 0) is False
    assert found.is_over(replace(step, gain=1.5), 0) is True
    assert found.is_over(replace(step, gain=1.5 - 1e-9), 0) is True, "not for a rounding error"
    assert found.is_over(replace(step, gain=1.5), 1) is False
    assert found.is_over(None, 0) is False
    assert adaptation().is_over(step, 0) is None


def test_a_smaller_batch_is_worth_its_samples():
    found = adaptation()
    choices = run(found, 10, passes(0.05, 0.0005))
    given = found.given(choices[-1], 8)
    assert given.gain == 8 / INITIAL
    assert given.batch_size == 8
    assert given.micro_batches <= 8
    assert found.given(choices[-1], choices[-1].batch_size) is choices[-1]


def test_factors_are_of_the_steps_before():
    found = adaptation()
    choice = replace(found.choose(None), batch_size=64)
    assert found.factored(choice).factors == (1.0,)
    found.measured(measures(choice, sqr=1.0, var=64.0))
    assert found.factored(choice).factors == (pytest.approx(3 / 2),)  # (2 + 1) / (1 + 1)


def test_a_state_goes_on_where_it_was_saved():
    first = adaptation()
    choices = run(first, 30, passes(0.05, 0.0005), var=1e4)
    second = adaptation()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for adapts in (first, second):
        adapts.limit(first.bounds[1])  # what is held is not saved
    assert second.choose(choices[-1]) == first.choose(choices[-1])
    assert second.factored(choices[-1]) == first.factored(choices[-1])
    assert second.speedups(4) == first.speedups(4)


def test_one_micro_batch_tells_nothing_and_nor_does_what_is_not_finite():
    found = adaptation()
    pair = CHOICES[0]
    assert not found.measured(measures(replace(pair, micro_batches=1)))
    for bad in (math.inf, math.nan):
        assert not found.measured(measures(pair)._replace(total=(bad,)))
    assert found.measured(measures(pair))


def test_a_rule_may_be_any():
    found = Adaptation(Autoscale(max_batch_size=64, scaling_rule=LinearScale()), INITIAL)
    found.begin(sgd(2))
    assert found.factored(replace(CHOICES[0], batch_size=64)).factors == (2.0, 2.0)
