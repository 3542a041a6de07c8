"""Models as people write them: each trains to the bits of plain PyTorch, or is refused by what may be done about it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hydra_engine import ModelTask
from hydra_engine.capture import called_with
from tests import exact, zoo

# The check of a forward's code: in `make test` are the tests that carry `net`.
pytestmark = pytest.mark.rest


def batches(count=3):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)) for _ in range(count)]


def task_of(module, data, loss_fn=F.mse_loss):
    return ModelTask(module, loss_fn, data, 0.1, name="t", seed=7)


def assert_trains(make, data=None, loss_fn=F.mse_loss):
    """Train the module as it comes; returns the report."""
    data, nets = data or batches(), []
    for _ in range(2):
        torch.manual_seed(3)
        nets.append(make())
    optimizer, losses = torch.optim.SGD(nets[0].parameters(), lr=0.1), []
    torch.manual_seed(7)
    for inputs, target in data:
        args, kwargs = called_with(inputs)
        loss = loss_fn(nets[0](*args, **kwargs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    report = exact.run([task_of(nets[1], data, loss_fn)])
    report.raise_failures()
    assert report.tasks["t"].losses == losses
    exact.assert_same_state(zoo.state(nets[1]), zoo.state(nets[0]))
    return report.tasks["t"]


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.more()

    def more(self):
        pass

    def forward(self, x):
        return self.b(self.a(x).relu())


class OnlyTrains(Two):
    def forward(self, x):
        if not self.training:
            raise NotImplementedError("use .export() to infer")
        return super().forward(x)


class Detector(Two):
    """Takes targets in training and gives a loss; without them, it gives what it finds in each sample."""

    def forward(self, x, targets=None):
        assert self.training == (targets is not None)
        found = super().forward(x)
        return {"loss": F.mse_loss(found, targets)} if self.training else [{"boxes": each} for each in found]


class Exports(Two):
    """Looks up in evaluation what is there after an export only."""

    def forward(self, x):
        return super().forward(x) * (1 if self.training else self.scales["exported"])


def the_loss(output, target):
    return output["loss"]


@pytest.mark.net
@pytest.mark.parametrize(
    ("make", "pack", "loss_fn"),
    [
        (OnlyTrains, lambda x, y: (x, y), F.mse_loss),
        (Detector, lambda x, y: ((x, y), y), the_loss),
        (Exports, lambda x, y: (x, y), F.mse_loss),
    ],
)
def test_what_the_forward_raises_in_eval_is_no_matter_for_training(make, pack, loss_fn):
    assert_trains(make, [pack(*batch) for batch in batches()], loss_fn)


def test_what_the_forward_raises_in_training_is_no_matter_for_predictions():
    module, data = Detector(), [x for x, _ in batches()]
    found = list(exact.orchestrator([task_of(Two(), batches())]).predict(module, data))
    module.eval()
    for outputs, x in zip(found, data, strict=True):
        assert all(torch.equal(a["boxes"], b["boxes"]) for a, b in zip(outputs, module(x), strict=True))


def test_a_mode_that_the_forward_raises_in_is_recorded_where_it_is_asked_for():
    with pytest.raises(NotImplementedError, match="use .export"):
        list(exact.orchestrator([task_of(Two(), batches())]).predict(OnlyTrains(), [x for x, _ in batches()]))
