"""NumPy's numbers wherever Python's are taken: made Python's at the door, so that JSON and seeds see no others."""

import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hydra_engine import (
    DeviceCost,
    EmulatedDevice,
    FreeGpus,
    HostCost,
    ModelTask,
    TaskCost,
    simulate,
    split,
    split_batch,
)
from hydra_engine.adaptive import AdaptiveDataLoader, GradientNoiseScale, LEGWScale, NoiseLevel, ThroughputParameters
from hydra_engine.elastic import GradientAccumulation, init
from hydra_engine.sweep import Population, Rungs, Sweep
from hydra_engine.system.cores import host_threads
from partitioners import Balanced, Budget, Presharded, parse_bytes
from partitioners.plain_numbers import plain
from tests import exact
from tests.refused import refused

DATA = TensorDataset(torch.ones(16, 4), torch.ones(16, 4))
INT, FLOAT = np.int64, np.float32

OPTIONS = {
    "epochs": 2,
    "seed": 7,
    "accumulation_steps": 2,
    "validation_interval": 3,
    "priority": -1,
    "min_devices": 1,
    "max_devices": 1,
    "max_retries": 1,
    "weight": 0.5,
    "max_grad_norm": 1.5,
    "ema_decay": 0.5,
    "timeout_s": 60.5,
}


def of_numpy(value):
    return INT(value) if isinstance(value, int) else FLOAT(value)


def task(**options):
    given = {"validation": DataLoader(DATA, 4), "keep_best": "loss"} | options
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    return ModelTask(model, F.mse_loss, DataLoader(DATA, 4, shuffle=True), name="t", **given)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int32(3), 3),
        (np.uint8(3), 3),
        (np.float16(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.array(3), 3),
        (np.array(0.5), 0.5),
        (Fraction(1, 2), 0.5),
    ],
)
def test_a_number_of_any_kind_is_pythons_own(value, expected):
    assert (plain(value), type(plain(value))) == (expected, type(expected))


@pytest.mark.parametrize("value", [True, np.True_, np.array(True), np.array([3]), "3", 1j, None, torch.tensor(3)])
def test_a_bool_and_what_is_no_number_stay_what_they_are(value):
    assert plain(value) is value or plain(value) is np.True_


@pytest.mark.parametrize("field", OPTIONS)
def test_an_option_of_a_task_is_pythons_own(field):
    options = {"ema_decay": 0.5, "keep_best": None} if field == "ema_decay" else {}
    found = getattr(task(**(options | {field: of_numpy(OPTIONS[field])})), field)
    assert (found, type(found)) == (OPTIONS[field], float if field == "weight" else type(OPTIONS[field]))


@pytest.mark.parametrize("field", ["epochs", "seed", "priority", "max_grad_norm", "weight"])
@pytest.mark.parametrize("value", [np.True_, True])
def test_a_bool_is_no_number(field, value):
    with refused(TypeError, task="t", says=f"{field} True"):
        task(**{field: value})


def test_a_numpy_float_is_no_number_of_epochs():
    with refused(TypeError, task="t", says="epochs 2.0"):
        task(epochs=np.float32(2))


def test_lr_stays_the_object_that_was_given():
    rate = np.float32(0.1)
    assert task(lr=rate).lr is rate


def test_hparams_are_pythons_own_at_any_depth():
    hparams = {"lr": np.float32(0.5), "sizes": [np.int64(3), {"deep": np.array(4)}], "name": "x"}
    found = task(hparams=hparams).hparams
    assert json.dumps(found) == '{"lr": 0.5, "sizes": [3, {"deep": 4}], "name": "x"}'


def test_what_is_no_json_is_refused_in_hparams():
    with refused(TypeError, task="t", says="hparams"):
        task(hparams={"on": np.True_})


def test_a_micro_batchs_weight_is_pythons_own():
    assert {type(weight) for _, _, weight in split(torch.ones(5, 2), torch.ones(5), INT(2))} == {float}


PARAMETERS = ("a_c", "b_c", "a_n", "b_n", "a_r", "b_r", "gamma")
# What each object says of itself, or holds, made of NumPy's numbers and of Python's.
DOORS = {
    "parse_bytes": lambda i, f: parse_bytes(i(4096), "memory"),
    "EmulatedDevice": lambda i, f: vars(EmulatedDevice(i(2**20), i(2**30), chaos=i(3))),
    "Presharded": lambda i, f: Presharded([i(1), i(3)]),
    "Balanced": lambda i, f: Balanced(i(2)),
    "Budget": lambda i, f: Budget(memory_bytes=i(64), num_micro_batches=i(2), unit_s=f(0.5)),
    "FreeGpus": lambda i, f: FreeGpus(memory=i(2**30), poll_s=i(5), free_s=f(0.5), grace_s=f(1.5)),
    "split_batch": lambda i, f: split_batch(i(10), i(3), i(2)),
    "init": lambda i, f: init(i(10), i(3), i(2)),
    "GradientAccumulation": lambda i, f: GradientAccumulation(torch.optim.SGD([torch.ones(1)]), i(2)).steps,
    "Rungs": lambda i, f: Rungs(min_resource=i(2), reduction_factor=i(3)),
    "Population": lambda i, f: Population(settings=["lr"], interval=i(2), quantile=f(0.25), factors=(f(0.5), i(2))),
    "LEGWScale": lambda i, f: LEGWScale(f(0.5), i(100)),
    "NoiseLevel": lambda i, f: NoiseLevel(sqr=f(0.5), var=i(1), initial_batch_size=i(4)),
    "GradientNoiseScale": lambda i, f: vars(GradientNoiseScale(i(4), num_groups=i(2), smoothing=f(0.5))),
    "ThroughputParameters": lambda i, f: ThroughputParameters(**dict.fromkeys(PARAMETERS, f(1.5))),
    "host_threads": lambda i, f: host_threads(intra_op_threads=1, num_devices=0, optimizer_threads=i(2)),
    "AdaptiveDataLoader": lambda i, f: adaptive(i).autoscale,
    "TaskCost": lambda i, f: TaskCost(name="t", unit_s=[f(0.5)] * 3, num_steps=i(2), load_bytes=i(4), weight=f(0.5)),
    "DeviceCost": lambda i, f: DeviceCost(speed=f(0.5), memory_bytes=i(4)),
    "HostCost": lambda i, f: HostCost(optimizer_threads=i(2), cores=f(1.5)),
    "Sweep": lambda i, f: sweep(num_trials=i(3), parallel=i(2), seed=i(4), dram=i(2**30), checkpoint_every=i(5)),
    "simulate": lambda i, f: simulate([TaskCost(name="t", unit_s=[1.0], num_steps=2)], i(2), seed=i(3)),
}


def adaptive(i):
    loader = AdaptiveDataLoader(DATA, i(4))
    loader.autoscale_batch_size(i(8), (i(1), i(4)))
    return loader


def sweep(**options):
    made = Sweep(task, **options)
    settings = made._settings
    return made._num_trials, settings.parallel, settings.seed  # the rest goes to a ModelOrchestrator


@pytest.mark.parametrize("door", DOORS)
def test_numpys_numbers_are_taken_where_pythons_are(door):
    assert repr(DOORS[door](INT, FLOAT)) == repr(DOORS[door](int, float))


def run(directory, kind, *, resume=False, epochs=2):
    options = {"epochs": epochs, "seed": 7, "accumulation_steps": 2, "priority": 1, "validation_interval": 3}
    given = {name: kind(value) for name, value in options.items()}
    made = task(keep_best=None, hparams={"width": kind(8)}, **given)
    numbers = {"keep": 2, "checkpoint_every": 3, "dram": 2**30, "min_devices": 1, "max_devices": 2, "max_failures": 0}
    conductor = exact.silent([made], checkpoint_dir=directory, **{name: kind(each) for name, each in numbers.items()})
    conductor.optimizer_threads, conductor.buffer = kind(1), kind(2**12)
    return conductor.train_models(resume=resume).tasks["t"]


@pytest.mark.rest
def test_a_run_and_its_resume_have_the_bits_of_pythons_numbers(tmp_path):
    run(tmp_path / "a", np.int32)
    resumed, whole = run(tmp_path / "a", np.int64, resume=True, epochs=3), run(tmp_path / "b", int, epochs=3)
    assert (resumed.losses, resumed.hparams) == (whole.losses, whole.hparams)
    assert resumed.validation_losses == whole.validation_losses


def test_a_partitioner_may_return_an_array():
    class ByArray(Presharded):
        def partition(self, costs, budget):
            return np.cumsum([1, len(costs) - 1])

    plan = exact.silent([task(keep_best=None, partitioner=ByArray([3]))]).generate()
    assert json.dumps(plan.tasks["t"].boundaries) == "[1, 3]"
