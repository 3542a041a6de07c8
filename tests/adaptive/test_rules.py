"""Rules for the learning rate: a table of factors, and which rule an optimizer gets."""

import math

import pytest
import torch

from hydra_engine.adaptive import (
    AdamScale,
    AdaScale,
    GradientNoiseScale,
    LEGWScale,
    LinearScale,
    ScalingRule,
    SqrtScale,
    rule_for,
)
from hydra_engine.elastic import GradientAccumulation
from tests.refused import refused

SCALES = (0.5, 1, 2, 4, 10)
GAINS = {
    0.5: (0.5, 0.5, 0.5, 0.6),
    1: (1, 1, 1, 1),
    2: (2, 2, 2, 1.5),
    4: (4, 4, 4, 2),
    10: (10, 10, 10, 2.5),
}
EPOCH = 1000  # samples


def noise_of_four_groups():
    """Averages with var 1, 0, 0, 2 and sqr -1, 0, -1, 1, at an initial batch of 10 samples."""
    noise = GradientNoiseScale(10, num_groups=4)
    average = {"sqr": [-1.0, 0.0, -1.0, 1.0], "var": [1.0, 0.0, 0.0, 2.0], "weight": 1.0}
    noise.load_state_dict({"initial_batch_size": 10, "of_steps": average, "read": average})
    return noise


def factors(rule, scale, progress=0.0):
    return rule.factors(noise_of_four_groups(), round(10 * scale), progress)


@pytest.mark.parametrize("scale", SCALES)
def test_factors_are_those_of_the_table(scale):
    assert factors(AdaScale(), scale) == pytest.approx(GAINS[scale])
    assert factors(AdamScale(), scale) == pytest.approx([math.sqrt(gain) for gain in GAINS[scale]])
    assert factors(LinearScale(), scale) == (scale,) * 4
    assert factors(SqrtScale(), scale) == (math.sqrt(scale),) * 4


@pytest.mark.parametrize("scale", SCALES)
def test_a_warm_up_takes_as_many_epochs_more_as_the_batch_is_larger(scale):
    rule = LEGWScale(2, EPOCH)
    warmup = 2 * scale * EPOCH / 10  # steps of the initial batch
    for share, factor in ((0, 0), (0.25, 0.25), (1, 1), (3, 1)):
        expected = (math.sqrt(scale) * factor,) * 4
        assert factors(rule, scale, share * warmup) == pytest.approx(expected)
    assert factors(LEGWScale(0, EPOCH), scale) == (math.sqrt(scale),) * 4


@pytest.mark.parametrize("rule", [AdaScale(), AdamScale()], ids=repr)
def test_gains_are_1_while_the_noise_is_not_known(rule):
    for scale in SCALES:
        assert rule.factors(GradientNoiseScale(10, num_groups=2), round(10 * scale), 0.0) == (1.0, 1.0)


def test_rules_are_values():
    assert AdaScale() == AdaScale() != AdamScale()
    assert LEGWScale(2, 100) == LEGWScale(2, 100) != LEGWScale(3, 100)
    assert repr(LEGWScale(2, 100)) == "LEGWScale(warmup_epochs=2, data_size=100)"
    assert all(issubclass(each, ScalingRule) for each in (AdaScale, AdamScale, LEGWScale, LinearScale, SqrtScale))


def parameters():
    return [torch.nn.Parameter(torch.ones(1))]


def test_variants_of_adam_get_the_square_root_and_other_optimizers_the_gain():
    for name in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam"):
        assert rule_for(getattr(torch.optim, name)(parameters())) == AdamScale(), name
    for name in ("SGD", "RMSprop", "Adagrad", "Adadelta", "ASGD"):
        assert rule_for(getattr(torch.optim, name)(parameters(), lr=0.1)) == AdaScale(), name


def test_a_variant_of_another_library_is_known_by_its_name():
    class FusedAdam8bit(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

    assert rule_for(FusedAdam8bit(parameters())) == AdamScale()


def test_a_wrapped_optimizer_decides():
    assert rule_for(GradientAccumulation(torch.optim.AdamW(parameters()), 2)) == AdamScale()
    assert rule_for(GradientAccumulation(torch.optim.SGD(parameters()), 2)) == AdaScale()


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: rule_for(3), TypeError, "optimizer: int"),
        (lambda: LEGWScale(-1, 10), ValueError, "warmup_epochs: -1"),
        (lambda: LEGWScale("1", 10), TypeError, "warmup_epochs: '1'"),
        (lambda: LEGWScale(1, 0), ValueError, "data_size: 0"),
        (lambda: LinearScale().factors(noise_of_four_groups(), 0, 0.0), ValueError, "batch_size: 0"),
        (lambda: AdaScale().factors(noise_of_four_groups(), 0, 0.0), ValueError, "batch_size: 0"),
    ],
)
def test_bad_arguments_are_refused(call, error, says):
    with refused(error, says=says):
        call()
