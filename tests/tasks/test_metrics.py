"""Metrics of validation batches, weighted by samples, computed where the last shard is."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import ModelTask
from partitioners import Presharded
from tests import exact
from tests.refused import refused


def accuracy(output, target):
    return (output.argmax(dim=1) == target).float().mean()


def largest(output, target):
    return output.abs().max().item()


def batches(*sizes):
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(n, 8, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes]


def trained(metrics, *, epochs=2):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    options = {"partitioner": Presharded([1, 3]), "seed": 0, "validation": batches(5, 7), "metrics": metrics}
    task = ModelTask(model, F.cross_entropy, batches(6, 6, 2), 1e-2, epochs, **options)
    return model, exact.silent([task]).train_models().tasks["task-0"]


def test_an_epochs_metric_is_the_mean_over_its_samples():
    model, report = trained({"accuracy": accuracy, "largest": largest}, epochs=1)
    model.eval()
    parts = [(len(x), accuracy(model(x), y).item(), largest(model(x), y)) for x, y in batches(5, 7)]
    assert report.validation_metrics == {
        "accuracy": [sum(n * found for n, found, _ in parts) / 12],
        "largest": [sum(n * found for n, _, found in parts) / 12],
    }


@pytest.mark.rest
def test_there_is_one_figure_per_epoch_and_metrics_change_no_bit():
    with_metrics, without = trained({"accuracy": accuracy}), trained(None)
    assert len(with_metrics[1].validation_metrics["accuracy"]) == len(with_metrics[1].validation_losses) == 2
    assert with_metrics[1].losses == without[1].losses
    assert all(map(torch.equal, with_metrics[0].parameters(), without[0].parameters()))


def test_a_metric_that_raises_fails_the_task_by_name_before_it_trains():
    def wrong(output, target):
        raise ZeroDivisionError("of the metric")

    with pytest.raises(ZeroDivisionError, match="of the metric"):
        trained({"wrong": wrong})


@pytest.mark.parametrize("metrics", [[accuracy], {"accuracy": 1.0}])
def test_what_does_not_map_names_to_functions_is_refused(metrics):
    with refused(TypeError, says="metrics"):
        trained(metrics)


def test_metrics_without_a_validation_loader_are_refused():
    with refused(says="metrics accuracy validation"):
        ModelTask(nn.Sequential(nn.Linear(2, 2)), F.mse_loss, [], metrics={"accuracy": accuracy})
