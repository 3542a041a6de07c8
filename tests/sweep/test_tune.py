"""A trainable for Ray Tune: its results are those of plain PyTorch, also where a trial goes on elsewhere."""

import sys

import pytest

from hydra_engine import EmulatedDevice, ModelTask
from hydra_engine.sweep import trainable

pytest.importorskip("optuna")
from tests.refused import refused
from tests.sweep.space import EPOCHS, STEPS, accuracy, build, plain


class Config(dict):
    """A trial for `build` and `plain`, with the values of a config."""

    number = 0

    def suggest_categorical(self, name, choices):
        assert self[name] in choices
        return self[name]

    def suggest_float(self, name, *limits, log):
        return self[name]


CONFIG = {"width": 8, "lr": 0.03}


def build_from(config):
    return build(Config(config), metrics={"accuracy": accuracy})


@pytest.fixture
def made():
    pytest.importorskip("ray.tune", reason="Ray Tune is not installed: pip install 'ray[tune]'")
    found = []

    def make(build_task=build_from, config=CONFIG):
        found.append(trainable(build_task, devices=[EmulatedDevice("1MiB")])(config=config))
        return found[-1]

    yield make
    for each in found:
        each.stop()


def test_a_step_is_a_validation_with_the_bits_of_plain_pytorch(made):
    trial = made()
    results = [trial.train() for _ in range(EPOCHS)]
    assert [result["validation_loss"] for result in results] == plain(Config(CONFIG))[0].validation_losses
    assert [result["done"] for result in results] == [False] * (EPOCHS - 1) + [True]
    assert [result["steps"] for result in results] == [STEPS + 1, 2 * STEPS + 1, EPOCHS * STEPS]
    assert all(0 <= result["accuracy"] <= 1 for result in results)


def test_a_trial_that_tune_has_saved_goes_on_with_its_bits(made, tmp_path):
    first, second = made(), made()
    first.train()
    first.save(str(tmp_path))
    expected = first.train()
    second.restore(str(tmp_path))
    found = second.train()
    assert found["validation_loss"] == expected["validation_loss"] == plain(Config(CONFIG))[0].validation_losses[1]


def test_a_task_that_tune_cannot_do_with(made):
    with refused(says="validation="):
        made(lambda config: ModelTask(build_from(config).model, print, [])).train()


def test_without_ray_the_error_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with refused(ImportError, says="hydra_engine[ray]"):
        trainable(build_from)
