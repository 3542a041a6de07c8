"""Means over batches, added up one after the other."""

from hydra_engine import Evaluation
from hydra_engine.tasks.evaluation import EvaluationMeans

BATCHES = [(0.1, 3.0, {"a": 0.3}, 3), (0.2, 7.0, {"a": 0.7}, 7), (0.7, 2.0, {"a": 0.1}, 2)]


def means_of(batches, *, sums_losses=False):
    means = EvaluationMeans(sums_losses=sums_losses)
    for batch in batches:
        means.add(*batch)
    return means.result()


def test_losses_are_weighted_and_metrics_go_by_samples():
    expected = (0.1 * 3 + 0.2 * 7 + 0.7 * 2) / 12
    metric = (0.3 * 3 + 0.7 * 7 + 0.1 * 2) / 12
    assert means_of(BATCHES) == Evaluation(loss=expected, metrics={"a": metric}, num_samples=12)


def test_losses_that_sum_are_summed():
    found = means_of(BATCHES, sums_losses=True)
    assert found.loss == 0.1 + 0.2 + 0.7
    assert found.metrics == means_of(BATCHES).metrics


def test_they_are_added_one_after_the_other():
    """A sum that keeps what rounding drops would be 0.1 (Python 3.12's `sum`, `math.fsum`)."""
    assert means_of([(0.1, 1.0, {}, 0), (1e100, 1.0, {}, 0), (-1e100, 1.0, {}, 1)], sums_losses=True).loss == 0.0


def test_weights_of_zero_give_zero():
    assert means_of([(0.5, 0.0, {"a": 1.0}, 0)]) == Evaluation(loss=0.0, metrics={"a": 0.0}, num_samples=0)
