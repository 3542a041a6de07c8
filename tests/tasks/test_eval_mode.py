"""A model in eval() trains so, as in a plain loop, and the plan, a warning and the report say it."""

import pytest
import torch
from torch import nn

from hydra_engine import Model, ModelTask
from tests import exact
from tests.refused import names


def block():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = block(), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.inner(x)) * 2


def loss(output, target):
    return output.float().pow(2).mean()


def task_of(model):
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(8, 4, generator=generator), torch.zeros(8)) for _ in range(2)]
    return ModelTask(model, loss, batches, 1e-2, name="a", seed=1)


@pytest.mark.parametrize("build", [lambda: nn.Sequential(block(), nn.Linear(4, 2)), Own])
def test_it_is_said_before_and_after_training(build):
    orchestra = exact.silent([task_of(build().eval())])
    with pytest.warns(UserWarning, match="eval") as caught:
        plan = orchestra.generate()
    assert len(caught) == 1
    report = orchestra.train_models()
    for text in (str(caught[0].message), str(plan), *report.messages, str(report)):
        names(text, task="a", says="eval() Dropout model.train()")
    assert len(report.messages) == 1


@pytest.mark.parametrize("build", [lambda: nn.Sequential(block(), nn.Linear(4, 2)), Own])
def test_a_model_that_is_in_train_by_the_time_of_the_plan_has_no_message(build):
    model = build().eval()
    orchestra = exact.silent([task_of(model)])
    model.train()
    assert "eval()" not in str(orchestra.generate())
    assert orchestra.train_models().messages == ()


def modules(*in_eval):
    """Four of which two do the same in both modes, the others in eval() as asked."""
    layers = [nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Dropout(0.0), nn.BatchNorm1d(4, track_running_stats=False)]
    for k in in_eval:
        layers[k].eval()
    return Model([nn.Linear(4, 4), *layers])


@pytest.mark.parametrize(
    ("in_eval", "is_told"), [((), False), ((0,), False), ((0, 1), True), ((2, 3), False), ((0, 2, 3), False)]
)
def test_more_than_half_of_what_depends_on_the_mode_is_told(in_eval, is_told):
    assert bool(modules(*in_eval).eval_message) == is_told


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", [lambda p: nn.LSTM(4, 4, 2, dropout=p), lambda p: nn.MultiheadAttention(4, 2, p)])
def test_layers_with_dropout_of_their_own_depend_on_it(kind, dropout):
    layer = kind(dropout).eval()
    assert bool(Model([nn.Linear(4, 4), layer]).eval_message) == (dropout > 0)
