"""With read_ahead=False a loader may read the model: it is asked when the step before is in all of its weights."""

import pytest
import torch
from torch import nn

from hydra_engine import ModelTask
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.covering import covering
from tests.refused import refused

NUM_LAYERS = 6


def build():
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
        )


class ReadsWeights:
    """Its inputs depend on every parameter and buffer of the model, as they are when a batch is asked for."""

    def __init__(self, model, num_batches=3):
        self.model, self.num_batches = model, num_batches

    def __len__(self):
        return self.num_batches

    def __iter__(self):
        for _ in range(self.num_batches):
            with torch.no_grad():
                state = self.model.state_dict().values()
                seen = sum(tensor.double().mean() for tensor in state).float()
            yield torch.randn(6, 4) + seen, torch.randn(6, 3)


CASES = {
    "plain": {},
    "adam": {"optimizer": torch.optim.AdamW},
    "clipped": {"max_grad_norm": 0.1},
    "micro-batches": {"accumulation_steps": 3},
    "narrow": {"precision": "bfloat16"},
}
OWN = {
    "one step for all": {"optimizer_scope": "task"},
    "released early": {"early_release": True},
}


def plain(loader, validates=False, **options):
    """A model that the plain loop trained, and its result."""
    model, before = build(), torch.get_rng_state()
    options |= {"validation": loader(model, 2) if validates else None}
    result = reference.train(model, nn.MSELoss(), loader(model), seed=3, lr=0.05, epochs=2, **options)
    torch.set_rng_state(before)
    return model, result


def task_of(loader, validates=False, **options):
    """A model, and the task that trains it."""
    model = build()
    options |= {"name": "reads", "seed": 3, "validation": loader(model, 2) if validates else None}
    return model, ModelTask(model, nn.MSELoss(), loader(model), 0.05, 2, read_ahead=False, **options)


def trained(*tasks, num_devices=1):
    return exact.silent(tasks, num_devices=num_devices).train_models().tasks["reads"]


@covering(strength=1, case=[*CASES, *OWN], num_devices=[1, 2])
def test_loader_sees_every_step(case, num_devices):
    ends, validates = ([NUM_LAYERS], False) if num_devices == 1 else ([1, 4, NUM_LAYERS], True)
    options = CASES.get(case, {})
    expected, result = plain(ReadsWeights, validates, **options)
    model, task = task_of(ReadsWeights, validates, partitioner=Presharded(ends), **options, **OWN.get(case, {}))
    other = ModelTask(build(), nn.MSELoss(), ReadsWeights(build(), 2), seed=4)
    outcome = trained(task, other, num_devices=num_devices)
    assert outcome.status == "finished", outcome.error
    assert outcome.losses == result.losses
    assert outcome.validation_losses == result.validation_losses
    exact.assert_same_state(zoo.state(model), zoo.state(expected))


@pytest.mark.rest
def test_batches_that_grow_are_fitted_and_read_last():
    class Grows(ReadsWeights):
        def __iter__(self):
            for k, (x, y) in enumerate(super().__iter__(), 1):
                yield x.repeat(k, 1), y.repeat(k, 1)

    _, result = plain(Grows)
    _, task = task_of(Grows)
    assert trained(task).losses == result.losses


@pytest.mark.parametrize("field", ["read_ahead", "loader_alone"])
def test_flags_are_flags(field):
    with refused(TypeError, says=f"{field} 1 bool"):
        ModelTask(build(), nn.MSELoss(), [], **{field: 1})
