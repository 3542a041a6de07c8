"""The noise of gradients: the numbers of a worked example, unbiased estimates, and steps that do not count."""

import json
import math

import numpy as np
import pytest
import torch

from hydra_engine.adaptive import AdaScale, GradientNoiseScale, NoiseLevel
from tests.refused import refused

FIRST = ((1, 0), (0, 1), (1, 2), (2, 1))
SECOND = ((3, 0), (0, 1), (1, 0), (0, 3))


def add(noise, gradients, sizes=None):
    """Add a step of micro-batches with these mean gradients."""
    sizes = sizes or [1] * len(gradients)
    gradients = np.asarray(gradients, dtype=float)
    mean = np.average(gradients, axis=0, weights=sizes)
    return noise.update(sizes, [[float(each @ each)] for each in gradients], [float(mean @ mean)])


def known():
    noise = GradientNoiseScale(1)
    assert add(noise, FIRST)
    return noise


def test_two_steps_give_the_numbers_of_the_worked_example():
    noise = known()
    assert noise.sqr == pytest.approx([5 / 3])
    assert noise.var == pytest.approx([4 / 3])
    assert noise.gain(4) == pytest.approx(1.5)
    assert noise.noise_scale == pytest.approx(0.8)
    assert add(noise, SECOND)
    assert noise.sqr == pytest.approx([1.33266633], abs=1e-8)
    assert noise.var == pytest.approx([2.66933466], abs=1e-8)
    assert noise.gain(4) == pytest.approx(2.001001, abs=1e-6)
    assert noise.gains(4) == pytest.approx([2.001001], abs=1e-6)


def test_there_is_no_noise_before_the_first_step():
    noise = GradientNoiseScale(32, num_groups=2)
    assert not noise.is_known
    assert noise.sqr == (1.0, 1.0)
    assert noise.var == (0.0, 0.0)
    assert [noise.gain(size) for size in (16, 32, 3200)] == [1.0, 1.0, 1.0]
    assert noise.noise_scale == 0.0
    assert known().is_known


@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (8, 8, 8, 3), (1, 31)], ids=str)
def test_estimates_are_unbiased_for_unequal_micro_batches(sizes):
    rng = np.random.default_rng(5)
    num_steps, initial, sigma = 40_000, 16, 4.0
    true = np.array([1.0, -2.0, 0.5, 1.5])
    spread = sigma / np.sqrt(np.array(sizes))
    gradients = true + rng.normal(size=(num_steps, len(sizes), 4)) * spread[:, None]
    weights = np.array(sizes) / sum(sizes)
    means = np.einsum("sng,n->sg", gradients, weights)
    # Estimates are linear in the norms: mean norms give the mean of all steps' estimates.
    micro, total = (gradients**2).sum(2).mean(0), (means**2).sum(1).mean()
    noise = GradientNoiseScale(initial)
    assert noise.update(list(sizes), micro[:, None].tolist(), [total])
    assert noise.sqr == pytest.approx([true @ true], rel=0.02)
    assert noise.var == pytest.approx([4 * sigma**2 / initial], rel=0.02)


def test_an_average_of_steps_is_unbiased_from_its_first_step_on():
    noise = GradientNoiseScale(2)
    for _ in range(3):
        assert noise.update([2, 2], [[3.0], [3.0]], [2.0])
        assert noise.sqr == pytest.approx([1.0])
        assert noise.var == pytest.approx([2.0])


def test_a_larger_batch_forgets_faster():
    slow, fast = GradientNoiseScale(4, smoothing=0.5), GradientNoiseScale(2, smoothing=0.5)
    for noise in (slow, fast):
        noise.update([2, 2], [[1.0], [1.0]], [1.0])
        noise.update([2, 2], [[4.0], [4.0]], [4.0])
    assert slow.sqr == pytest.approx([(0.5 * 1 + 4) / 1.5])
    assert fast.sqr == pytest.approx([(0.25 * 1 + 4) / 1.25])


def test_groups_are_averaged_apart_and_their_sums_make_the_gain():
    noise = GradientNoiseScale(1, num_groups=2)
    noise.update([1, 1], [[2.0, 8.0], [4.0, 8.0]], [2.0, 5.0])
    assert noise.sqr == pytest.approx([1.0, 2.0])
    assert noise.var == pytest.approx([2.0, 6.0])
    assert noise.gains(2) == pytest.approx([3 / 2, 8 / 5])
    assert noise.gain(2) == pytest.approx(11 / 7)
    assert noise.level == NoiseLevel(sqr=sum(noise.sqr), var=sum(noise.var), initial_batch_size=1)


@pytest.mark.parametrize(("number", "place"), [(math.nan, 0), (math.inf, 1), (-math.inf, 2), (math.nan, 2)])
def test_a_step_with_a_number_that_is_not_finite_changes_nothing(number, place):
    noise = known()
    before = noise.state_dict()
    norms = [1.0, 1.0, 1.0]
    norms[place] = number
    assert noise.update([4, 4], [[norms[0]], [norms[1]]], [norms[2]]) is False
    assert noise.update([4, 4], [[1e308], [1e308]], [0.0]) is False  # finite, but 8 times as much is not
    assert noise.state_dict() == before


def test_gains_lie_between_1_and_the_scale():
    rng = np.random.default_rng(3)
    for _ in range(500):
        noise = GradientNoiseScale(8)
        local, total = rng.gamma(1, 2, size=2)
        noise.update([4, 4], [[local], [local]], [total])
        gains = [noise.gain(8 * scale) for scale in (0.25, 1, 2, 64, 1e6)]
        assert gains == sorted(gains)
        assert 0.25 <= gains[0] <= 1 == gains[1] <= gains[2] <= 2
        assert gains[3] <= 64


def test_averages_are_clamped_when_they_are_read_only():
    noise = GradientNoiseScale(1)
    noise.update([1, 1], [[4.0], [4.0]], [1.0])
    assert noise.sqr == (0.0,)
    assert noise.noise_scale == math.inf
    assert noise.gain(10) == 10.0
    noise.update([1, 1], [[1.0], [1.0]], [8.0])
    assert noise.sqr[0] == pytest.approx((0.999**2 * -2 + 15) / (1 + 0.999**2))
    assert noise.var == (1e-6,)


def test_a_pair_of_steps_stands_in_for_two_micro_batches():
    noise, same = GradientNoiseScale(4), GradientNoiseScale(4)
    assert noise.update_from_pair(6, [5.0], [1.0], [2.0])
    assert same.update([6, 6], [[5.0], [1.0]], [2.0])
    assert noise.sqr == same.sqr == pytest.approx([1.0])
    assert noise.var == same.var == pytest.approx([3.0])
    assert noise.is_known


def test_pairs_are_dropped_when_a_step_of_several_micro_batches_arrives():
    noise, without = GradientNoiseScale(1), GradientNoiseScale(1)
    noise.update_from_pair(1, [9.0], [9.0], [9.0])
    for each in (noise, without):
        add(each, FIRST)
    assert noise.state_dict() == without.state_dict()
    noise.update_from_pair(1, [9.0], [9.0], [9.0])
    assert noise.sqr > without.sqr
    for each in (noise, without):
        add(each, SECOND)
    assert noise.state_dict() == without.state_dict()
    assert not noise.update_from_pair(1, [math.nan], [9.0], [9.0])
    assert noise.state_dict() == without.state_dict()


def test_a_saved_state_goes_on_with_the_same_bits():
    noise = known()
    noise.update_from_pair(1, [7.0], [0.3], [0.1])
    again = GradientNoiseScale(1)
    again.load_state_dict(json.loads(json.dumps(noise.state_dict())))
    assert again.state_dict() == noise.state_dict()
    for each in (noise, again):
        add(each, SECOND)
    assert (again.sqr, again.var, again.gain(3)) == (noise.sqr, noise.var, noise.gain(3))


def test_a_state_that_does_not_fit_is_refused():
    state = known().state_dict()
    with refused(says="1 2 num_groups"):
        GradientNoiseScale(1, num_groups=2).load_state_dict(state)
    with refused(says="initial_batch_size: 2 1"):
        GradientNoiseScale(2).load_state_dict(state)
    noise = GradientNoiseScale(1)
    with refused(says="'initial_batch_size'"):
        noise.load_state_dict({})
    assert not noise.is_known


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: GradientNoiseScale(0), ValueError, "initial_batch_size: 0"),
        (lambda: GradientNoiseScale(1.5), TypeError, "initial_batch_size: 1.5"),
        (lambda: GradientNoiseScale(1, num_groups=0), ValueError, "num_groups: 0"),
        (lambda: GradientNoiseScale(1, smoothing=1), ValueError, "smoothing: 1"),
        (lambda: known().update([4], [[1.0]], [1.0]), ValueError, "1 micro-batches 2"),
        (lambda: known().update([4, 4], [[1.0]], [1.0]), ValueError, "1 2 batch_sizes"),
        (lambda: known().update([4, 0], [[1.0]] * 2, [1.0]), ValueError, "batch_sizes: 0"),
        (lambda: known().update([4, 4], [[1.0]] * 2, []), ValueError, "total_square_norms: 0 1"),
        (lambda: known().update([4, 4], [[-1.0]] * 2, [1.0]), ValueError, "-1.0"),
        (lambda: known().gain(0), ValueError, "batch_size: 0"),
        (lambda: NoiseLevel(sqr=-1.0, var=1.0, initial_batch_size=1), ValueError, "sqr: -1.0"),
        (lambda: NoiseLevel(sqr="1", var=1.0, initial_batch_size=1), TypeError, "sqr: '1'"),
    ],
)
def test_bad_numbers_are_refused(call, error, says):
    with refused(error, says=says):
        call()


def rosenbrock(point, rng, num_samples, spread):
    """Mean gradient of (1 - x)^2 + 100 (y - x^2)^2 over samples that weigh each of the two terms at random."""
    first, second = rng.normal(1.0, spread, size=(2, num_samples)).mean(1)
    x, y = point
    valley = 200 * (y - x**2) * second
    return np.array([-2 * (1 - x) * first - 2 * x * valley, valley])


def train(num_samples):
    """Train with AdaScale from (1, 1.5) until both numbers are within 0.01 of the minimum at (1, 1)."""
    rng = np.random.default_rng(7)
    noise = GradientNoiseScale(2, num_groups=2)
    point, progress, factors = np.array([1.0, 1.5]), 0.0, []
    micro = num_samples // 2
    while np.abs(point - 1).max() > 0.01 and len(factors) < 20_000:
        gradients = [rosenbrock(point, rng, micro, spread=0.2) for _ in range(2)]
        mean = sum(gradients) / 2
        factors.append(AdaScale().factors(noise, num_samples, progress))
        progress += noise.gain(num_samples)
        point = point - 0.001 * np.array(factors[-1]) * mean
        noise.update([micro, micro], [(each**2).tolist() for each in gradients], (mean**2).tolist())
    assert np.abs(point - 1).max() <= 0.01
    return len(factors), progress, np.array(factors), noise


@pytest.mark.rest
def test_a_larger_batch_minimizes_the_rosenbrock_function_in_no_more_steps():
    """The initial batch trains as without a rule."""
    small_steps, progress, factors, noise = train(2)
    assert progress == small_steps
    assert (factors == 1).all()
    assert noise.is_known
    num_steps, progress, factors, noise = train(8)
    assert ((factors >= 1) & (factors <= 4)).all()
    assert num_steps <= small_steps
    assert num_steps <= progress <= 4 * num_steps
    assert 1 <= noise.gain(8) <= 4


def test_norms_may_be_tensors():
    noise = GradientNoiseScale(1)
    norm = torch.tensor(4.0, dtype=torch.float64)
    assert noise.update([1, 1], [[norm], [norm]], [norm])
    assert noise.sqr == (4.0,)
