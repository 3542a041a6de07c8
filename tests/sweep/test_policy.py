"""A sweep chooses a policy by itself: "in-step" where its trials share a frozen base."""

import copy

import pytest
from torch import nn
from torch.nn import functional as F

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.sweep import Sweep
from tests.sweep.space import batches, build

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)


def heads_over(base):
    """Each trial trains a head over frozen layers, whose weights are the base's, or with None its own."""

    def build_head(trial):
        layers = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Tanh())
        if base is not None:
            layers = copy.deepcopy(base, {id(each): each for each in base.parameters()})
        lr = trial.suggest_float("lr", 1e-3, 1e-1)
        return ModelTask(nn.Sequential(*layers, nn.Linear(8, 3)), F.cross_entropy, batches(), lr, validation=batches(2))

    return build_head


def frozen_base():
    return nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Tanh())


@pytest.fixture
def policies(monkeypatch):
    """Policies of orchestrators that train."""
    found, train = [], ModelOrchestrator.train_models

    def noted(orchestra, **options):
        found.append(orchestra.policy)
        return train(orchestra, **options)

    monkeypatch.setattr(ModelOrchestrator, "train_models", noted)
    return found


def run(build_task, **options):
    options = {"num_trials": 3, "parallel": 3, **options}
    sweep = Sweep(build_task, devices=[EmulatedDevice("1MiB")], **options)
    sweep.verbose = 0
    assert {trial.state.name for trial in sweep.run().trials} == {"COMPLETE"}


@pytest.mark.parametrize(
    ("build_task", "options", "policy"),
    [
        (heads_over(frozen_base()), {}, "in-step"),
        (heads_over(frozen_base()), {"parallel": 1}, "sharded-lrtf"),
        (heads_over(None), {}, "sharded-lrtf"),
        (build, {}, "sharded-lrtf"),
        (heads_over(frozen_base()), {"policy": "fifo"}, "fifo"),
    ],
)
def test_it_is_chosen_by_what_trials_share_unless_it_is_named(policies, build_task, options, policy):
    run(build_task, **options)
    assert set(policies) == {policy}


def test_losses_are_those_of_any_other_policy():
    base = frozen_base()
    values = []
    for policy in (None, "sharded-lrtf"):
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
        devices = [EmulatedDevice("1MiB")]
        sweep = Sweep(heads_over(base), study=study, num_trials=3, parallel=2, devices=devices, policy=policy)
        sweep.verbose = 0
        values.append([trial.value for trial in sweep.run().trials])
    assert values[0] == values[1]
