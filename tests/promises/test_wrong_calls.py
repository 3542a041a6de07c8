"""Two hundred wrong calls of the API: one line names the task and the value, and no model is changed."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hydra_engine import Callback, CudaDevice, EmulatedDevice, KeepBest, Model, ModelOrchestrator, ModelTask
from hydra_engine.adaptive import AdaptiveDataLoader
from hydra_engine.errors import ShardDoesNotFit
from partitioners import Presharded
from tests import exact, zoo
from tests.refused import names, refused

WIDTH = 4
DATA = TensorDataset(torch.ones(8, WIDTH), torch.ones(8, WIDTH))
BATCH = (torch.ones(3, WIDTH), torch.ones(3, WIDTH))
LOADER = [BATCH, BATCH]
CULPRIT = "culprit"  # the name of the task that is refused
GIVEN = []  # models of the present call's tasks, each with the state in which it was given


def net(**settings):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, **settings), nn.Linear(WIDTH, WIDTH, **settings))


def task(model=None, loss_fn=F.mse_loss, loader=LOADER, name=CULPRIT, seed=0, **options):
    model = net() if model is None else model
    if isinstance(model, nn.Module):
        GIVEN.append((model, copy.deepcopy(zoo.state(model))))
    return ModelTask(model, loss_fn, loader, name=name, seed=seed, **options)


def orchestra(*tasks, memory="1MiB", **options):
    return exact.silent(list(tasks) or [task()], memory, **options)


def train(*args, memory="1MiB", **options):
    return orchestra(task(*args, **options), memory=memory).train_models()


def trained():
    made = orchestra()
    made.train_models()
    GIVEN.clear()
    return made


# -- what the calls give


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        return self.inner(x) * mask


class Adds(nn.Module):
    def forward(self, x, y):
        return x + y


class GivesText(nn.Module):
    def forward(self, x):
        return "text"


class Raises(nn.Module):
    def forward(self, x):
        raise LookupError("troubled")


class Scaled(nn.Linear):
    """A loss with a weight of its own."""

    def forward(self, output, target):
        return F.mse_loss(super().forward(output), target)


class Once:
    """Gives the same batches, but only to the first who asks."""

    def __init__(self):
        self.batches = iter(LOADER)

    def __iter__(self):
        return self.batches


class Stops(Callback):
    def on_step(self, report):
        raise KeyError("troubled")


def bad_loss(output, target):
    raise LookupError("troubled")


def bad_loader():
    raise LookupError("troubled")
    yield


def bad_optimizer(params, lr=None):
    raise LookupError("troubled")


def tied():
    model = net()
    model[1].weight = nn.Parameter(model[0].weight.data)
    return model


def adaptive(batch_size=4, **limits):
    loader = AdaptiveDataLoader(DATA, batch_size, shuffle=True)
    loader.autoscale_batch_size(8, **limits)
    return loader


def shared_by_two(**options):
    """Two tasks that share a loader; `options`: in how many of them it is which option."""
    shared = DataLoader(DATA, batch_size=4, shuffle=True, generator=torch.Generator())
    chosen = [option for option, count in options.items() for _ in range(count)]
    return orchestra(*(task(name=f"{CULPRIT}-{k}", **{option: shared}) for k, option in enumerate(chosen)))


def shared_workers():
    shared = DataLoader(DATA, batch_size=4, num_workers=1, persistent_workers=True)
    return orchestra(*(task(name=f"{CULPRIT}-{k}", validation=shared) for k in range(2)))


def shared_layer():
    layer = nn.Linear(WIDTH, WIDTH)
    return orchestra(*(task(nn.Sequential(layer, nn.Linear(WIDTH, WIDTH)), name=f"{CULPRIT}-{k}") for k in range(2)))


def with_buffer(size):
    made = orchestra()
    made.buffer = size
    made.generate()


def evaluate(*args, **options):
    return orchestra().evaluate(*args, **options)


def predict(*args, **options):
    return orchestra().predict(*args, **options)


def in_group(quotas, **options):
    """A task in group g, beside quotas, on four devices."""
    return orchestra(task(group="g", **options), quotas=quotas, num_devices=4)


NET = net()
SGD = torch.optim.SGD(NET.parameters())
VALIDATED = {"validation": LOADER}

# Options of a task: (options, error, words besides the first option's name).
OPTIONS = [
    ({"lr": "0.1"}, TypeError, "0.1"),
    ({"lr": -1.0}, ValueError, "-1.0"),
    ({"lr": math.nan}, ValueError, "nan"),
    ({"epochs": 1.5}, TypeError, "1.5"),
    ({"epochs": 0}, ValueError, "0"),
    ({"epochs": "3"}, TypeError, "'3'"),
    ({"optimizer": "adamv"}, ValueError, "adamv 'adamw'"),
    ({"optimizer": "lbfgs"}, ValueError, "lbfgs 'sgd'"),
    ({"optimizer": torch.optim.AdamW(NET.parameters())}, TypeError, "AdamW"),
    ({"optimizer": 3}, TypeError, "3"),
    ({"lr_scheduler": torch.optim.lr_scheduler.StepLR(SGD, 1)}, TypeError, "StepLR"),
    ({"lr_scheduler": "cosine"}, TypeError, "cosine"),
    ({"lr_scheduler_interval": "batch"}, ValueError, "batch 'epoch'"),
    ({"param_groups": [{"lr": 0.1}]}, TypeError, "0.1"),
    ({"optimizer_scope": "layer"}, ValueError, "layer 'shard'"),
    ({"ema_decay": 1.0}, ValueError, "1.0"),
    ({"partitioner": "best"}, ValueError, "best 'presharded'"),
    ({"partitioner": Presharded}, TypeError, "Presharded"),
    ({"precision": "fp16"}, ValueError, "fp16 'float16'"),
    ({"precision": torch.bfloat16}, ValueError, "torch.bfloat16 'bfloat16'"),
    ({"grad_scaler": torch.amp.GradScaler("cpu")}, ValueError, "precision 'float32'"),
    ({"grad_scaler": True, "precision": "float16"}, TypeError, "True GradScaler"),
    ({"accumulation_steps": 0}, ValueError, "0"),
    ({"accumulation_steps": "many"}, TypeError, "many 'auto'"),
    ({"accumulation_steps": 2, "max_device_batch": 4}, ValueError, "max_device_batch 4"),
    ({"accumulation_steps": "auto", "max_device_batch": 4}, ValueError, "max_device_batch 'auto'"),
    ({"accumulation_steps": 2, "loader": adaptive()}, ValueError, "2"),
    ({"accumulation_steps": "auto", "loader": adaptive()}, ValueError, "'auto'"),
    ({"max_device_batch": 0}, ValueError, "0 None"),
    ({"max_device_batch": True}, TypeError, "True"),
    ({"max_device_batch": 2.0}, TypeError, "2.0"),
    ({"max_device_batch": 4, "loader": adaptive()}, ValueError, "4"),
    ({"loss_reduction": "average"}, ValueError, "average 'mean'"),
    ({"max_grad_norm": 0.0}, ValueError, "0.0"),
    ({"max_grad_norm": "1"}, TypeError, "'1'"),
    ({"seed": 1.0}, TypeError, "1.0"),
    ({"seed": 2**70}, ValueError, str(2**70)),
    ({"unpack": 0}, TypeError, "0"),
    ({"split": 2}, TypeError, "2"),
    ({"validation_interval": 0, **VALIDATED}, ValueError, "0"),
    ({"validation_interval": 1.5, **VALIDATED}, TypeError, "1.5"),
    ({"validation_interval": True, **VALIDATED}, TypeError, "True"),
    ({"validation_interval": None, **VALIDATED}, TypeError, "None"),
    ({"validation_interval": "step", **VALIDATED}, ValueError, "'step' 'epoch'"),
    ({"validation_interval": 5}, ValueError, "5 validation="),
    ({"metrics": F.mse_loss, **VALIDATED}, TypeError, "mse_loss"),
    ({"metrics": {1: F.mse_loss}, **VALIDATED}, TypeError, "1"),
    ({"metrics": {"mse": F.mse_loss}}, ValueError, "mse validation="),
    ({"keep_best": "validation_loss"}, ValueError, "validation_loss validation="),
    ({"keep_best": "accuracy", **VALIDATED}, ValueError, "accuracy metrics="),
    ({"keep_best": True}, TypeError, "True"),
    ({"keep_best": "loss", "ema_decay": 0.9}, ValueError, "ema_decay"),
    ({"keep_best": "loss", "metrics": {"loss": F.mse_loss}, **VALIDATED}, ValueError, "'loss'"),
    ({"hparams": ["lr"]}, TypeError, "'lr'"),
    ({"records": "loss_fn.history"}, TypeError, "loss_fn.history"),
    ({"records": [1]}, TypeError, "1"),
    ({"hparams": {1: 2}}, TypeError, "1"),
    ({"hparams": {"lr": torch.ones(1)}}, TypeError, "JSON"),
    ({"hparams": {"lr": math.nan}}, TypeError, "JSON"),
    ({"callbacks": Stops()}, TypeError, "Stops list"),
    ({"callbacks": [print]}, TypeError, "print Callback"),
    ({"timeout_s": math.inf}, ValueError, "inf"),
    ({"timeout_s": "1"}, TypeError, "'1'"),
    ({"priority": "high"}, TypeError, "high"),
    ({"group": 1}, TypeError, "1"),
    ({"min_devices": 0}, ValueError, "0"),
    ({"min_devices": "2"}, TypeError, "'2'"),
    ({"min_devices": 3, "max_devices": 2}, ValueError, "3 max_devices=2"),
    ({"max_devices": 0}, ValueError, "0"),
    ({"max_devices": 1.5}, TypeError, "1.5"),
    ({"weight": 0}, ValueError, "0"),
    ({"max_retries": -1}, ValueError, "-1"),
    ({"nonfinite": "ignore"}, ValueError, "ignore 'skip'"),
    ({"timeout_s": 0}, ValueError, "0 None"),
    ({"compile": "max-autotune"}, TypeError, "max-autotune"),
    ({"early_release": "some"}, ValueError, "some 'all'"),
    ({"early_release": True, "max_grad_norm": 1.0}, ValueError, "max_grad_norm"),
]

# Other calls about one task, or about two of that name: (call, error, words).
CALLS_OF_A_TASK = {
    # the loss
    "loss class": (lambda: task(loss_fn=nn.MSELoss), TypeError, "MSELoss"),
    "loss None": (lambda: task(loss_fn=None), TypeError, "loss_fn None"),
    "loss name": (lambda: task(loss_fn="mse"), TypeError, "loss_fn 'mse'"),
    "loss trainable": (lambda: task(loss_fn=Scaled(WIDTH, WIDTH)), ValueError, "weight loss"),
    "loss of many": (lambda: train(loss_fn=partial(F.mse_loss, reduction="none")), ValueError, "loss_fn (3, scalar"),
    "loss of all": (lambda: train(loss_fn=lambda output, target: output), ValueError, "loss_fn (3, scalar"),
    "loss float": (lambda: train(loss_fn=lambda output, target: 1.0), ValueError, "loss_fn float scalar"),
    "loss raises": (lambda: train(loss_fn=bad_loss), LookupError, "troubled loss_fn"),
    "loss detached": (
        lambda: train(loss_fn=lambda output, target: F.mse_loss(output.detach(), target)),
        RuntimeError,
        "grad_fn loss_fn",
    ),
    # the loader
    "generator": (lambda: task(loader=(batch for batch in LOADER), epochs=2), ValueError, "dataloader generator 2"),
    "generator as validation": (
        lambda: task(validation=(batch for batch in LOADER), epochs=2),
        ValueError,
        "validation generator",
    ),
    "data set": (lambda: task(loader=DATA), TypeError, "dataloader TensorDataset DataLoader"),
    "data set as validation": (lambda: task(validation=DATA), TypeError, "validation TensorDataset DataLoader"),
    "loader None": (lambda: task(loader=None), TypeError, "dataloader NoneType"),
    "loader function": (lambda: task(loader=lambda: LOADER), TypeError, "dataloader function"),
    "loader tensor": (lambda: task(loader=torch.ones(3, 4)), TypeError, "dataloader Tensor"),
    "loader dict": (lambda: task(loader={"x": BATCH[0], "y": BATCH[1]}), TypeError, "dataloader dict"),
    "loader empty": (lambda: train(loader=[]), ValueError, "loader empty"),
    "loader drops all": (
        lambda: train(loader=DataLoader(DATA, batch_size=20, drop_last=True)),
        ValueError,
        "loader empty drop_last",
    ),
    "loader of inputs": (lambda: train(loader=DataLoader(torch.ones(8, WIDTH))), ValueError, "Tensor unpack="),
    "loader of two rows": (lambda: train(loader=[torch.ones(2, WIDTH)]), ValueError, "Tensor unpack="),
    "loader of singles": (lambda: train(loader=[BATCH[:1]]), ValueError, "tuple unpack="),
    "loader of triples": (lambda: train(loader=[(*BATCH, 1)]), ValueError, "tuple 3 unpack="),
    "loader of dicts": (lambda: train(loader=[{"x": BATCH[0], "y": BATCH[1]}]), ValueError, "dict x, unpack="),
    "loader of numbers": (lambda: train(loader=[3]), ValueError, "int unpack="),
    "loader raises": (lambda: train(loader=bad_loader()), LookupError, "troubled loader"),
    "loader shared": (lambda: shared_by_two(loader=2), ValueError, "loader generator"),
    "loader shared by validations": (lambda: shared_by_two(validation=2), ValueError, "loader generator"),
    "loader shared with a validation": (lambda: shared_by_two(loader=1, validation=1), ValueError, "loader generator"),
    "workers shared": (shared_workers, ValueError, "loader workers"),
    "adaptive batch of one": (lambda: task(loader=adaptive(1)), ValueError, "batch_size"),
    "adaptive batch of one micro-batch": (
        lambda: task(loader=adaptive(4, local_bsz_bounds=(4, 8), gradient_accumulation=False)),
        ValueError,
        "batch_size",
    ),
    # the model
    "model class": (lambda: task(nn.Linear), TypeError, "Linear"),
    "model number": (lambda: task(3), TypeError, "int"),
    "model name": (lambda: task("resnet"), TypeError, "str"),
    "model empty": (lambda: task([]), ValueError, "layers"),
    "model of functions": (lambda: task([nn.Linear(4, 4), F.relu]), TypeError, "1 function"),
    "model list": (lambda: task([nn.ModuleList([nn.Linear(4, 4)])]), TypeError, "0 ModuleList"),
    "model half": (lambda: task(net().half()), ValueError, "0.weight float16 precision="),
    "model frozen": (lambda: task(net().requires_grad_(False)), ValueError, "requires_grad"),
    "model without parameters": (lambda: task(nn.Sequential(nn.Flatten(), nn.Tanh())), ValueError, "requires_grad"),
    "model meta": (lambda: task([nn.Linear(4, 4, device="meta")]), ValueError, "0.weight meta"),
    "model bfloat16 masters": (lambda: task(net().bfloat16(), precision="bfloat16"), ValueError, "0.weight bfloat16"),
    "model tied apart": (lambda: task(tied()), ValueError, "0.weight 1.weight"),
    "model lazy": (lambda: task([nn.LazyLinear(4)]), ValueError, "0.weight"),
    "model width": (lambda: train(nn.Sequential(nn.Linear(9, 9))), RuntimeError, "0 Linear 9x9"),
    "model of two arguments": (lambda: train(Two()), TypeError, "Two mask"),
    "model of other names": (
        lambda: train(Two(), loader=[({"x": BATCH[0], "m": BATCH[0]}, BATCH[1])]),
        TypeError,
        "Two m: mask",
    ),
    "layer of two arguments": (lambda: train([nn.Linear(4, 4), Adds()]), TypeError, "1 Adds 'y'"),
    "layer raises": (lambda: train([nn.Linear(4, 4), Raises()]), LookupError, "troubled 1 Raises"),
    # the run
    "optimizer raises": (lambda: train(optimizer=bad_optimizer), LookupError, "troubled optimizer"),
    "memory": (lambda: train(memory=100), ShardDoesNotFit, "Linear 352 452"),
    "boundaries above": (lambda: train(partitioner=Presharded([1, 3])), ValueError, "3] 3 2"),
    "boundaries below": (lambda: train(partitioner=Presharded([1])), ValueError, "[1] 1 2"),
    "tasks of one model": (lambda: orchestra(task(NET), task(NET, name="b")), ValueError, "0.weight"),
    "tasks of one layer": (shared_layer, ValueError, "0.weight"),
    "tasks of one name": (lambda: orchestra(task(), task()), ValueError, "2"),
    "evaluate data set": (lambda: evaluate(CULPRIT, DATA), TypeError, "loader TensorDataset DataLoader"),
    "evaluate empty": (lambda: evaluate(CULPRIT, []), ValueError, "loader empty"),
    "evaluate unknown": (lambda: evaluate("b", LOADER), ValueError, "evaluate 'b'"),
    "evaluate None": (lambda: evaluate(None, LOADER), ValueError, "evaluate None"),
    "evaluate model": (lambda: evaluate(net(), LOADER), ValueError, "evaluate Sequential"),
    "stop unknown": (lambda: orchestra().stop_task("b"), ValueError, "stop_task 'b'"),
    "pause unsaved": (lambda: orchestra().pause_task(CULPRIT), ValueError, "pause_task checkpoint_dir"),
    "forget waiting": (lambda: orchestra().forget_task(CULPRIT), RuntimeError, "forget_task stop_task"),
    "group without quota": (lambda: in_group({"b": 1}), ValueError, "'g' 'b'"),
    "group without quotas": (lambda: in_group({}), ValueError, "'g'"),
    "more devices than there are": (
        lambda: in_group({"g": 1}, min_devices=5),
        ValueError,
        "min_devices=5 4",
    ),
}

# About no task that has a name, or about all of them: (call, error, words).
OTHER_CALLS = {
    "option unknown": (lambda: task(momentum=0.9), TypeError, "momentum"),
    "name int": (lambda: task(name=3), TypeError, "name 3"),
    "name empty": (lambda: task(name=""), ValueError, "name ''"),
    "example of one argument": (lambda: Model(Two(), example=BATCH[0]), TypeError, "Two mask"),
    "trained twice": (lambda: trained().train_models(), RuntimeError, "train_models"),
    "tasks one": (lambda: ModelOrchestrator(task()), TypeError, "tasks ModelTask list"),
    "tasks none": (lambda: ModelOrchestrator([]).train_models(), RuntimeError, "train_models add_task"),
    "tasks models": (lambda: ModelOrchestrator([net()]), TypeError, "tasks Sequential ModelTask"),
    "devices number": (lambda: orchestra(devices=2), TypeError, "devices 2 list"),
    "devices cpu": (lambda: orchestra(devices=["cpu"]), ValueError, "devices 'cpu' 'cuda:0'"),
    "devices empty": (lambda: orchestra(devices=[]), ValueError, "devices empty"),
    "device number": (lambda: orchestra(devices=[0]), TypeError, "devices 0 int"),
    "policy": (lambda: orchestra(policy="fastest"), ValueError, "policy fastest 'sharded-lrtf'"),
    "checkpoint_every": (lambda: orchestra(checkpoint_every="sometimes"), ValueError, "checkpoint_every sometimes"),
    "bandwidth 0": (lambda: EmulatedDevice("8MiB", bandwidth=0), ValueError, "bandwidth 0"),
    "bandwidth negative": (lambda: EmulatedDevice("8MiB", bandwidth=-1), ValueError, "bandwidth -1"),
    "buffer text": (lambda: with_buffer("lots"), ValueError, "buffer lots"),
    "buffer unit": (lambda: with_buffer("12QiB"), ValueError, "buffer 12QiB"),
    "buffer negative": (lambda: with_buffer(-1), ValueError, "buffer -1"),
    "gpu that is not there": (lambda: CudaDevice(99), RuntimeError, "cuda:99 CUDA_VISIBLE_DEVICES"),
    "gpu among devices": (lambda: orchestra(devices=["cuda:99"]), RuntimeError, "cuda:99"),
    "metrics of an evaluation": (lambda: evaluate(CULPRIT, LOADER, metrics={"a": 1.0}), TypeError, "metrics 1.0"),
    "loader of an evaluation": (lambda: evaluate(CULPRIT, 3), TypeError, "loader int"),
    "predict data set": (lambda: predict(net(), DATA), TypeError, "loader TensorDataset DataLoader"),
    "predict tensor": (lambda: predict(net(), BATCH[0]), TypeError, "loader Tensor"),
    "predict pairs": (lambda: predict(net(), LOADER), TypeError, "predict Linear unpack="),
    "predict unpack": (lambda: predict(net(), LOADER, unpack=0), TypeError, "unpack 0"),
    "predict precision": (lambda: predict(net(), [BATCH[0]], precision="float8"), ValueError, "precision float8"),
    "predict number": (lambda: predict([3], [BATCH[0]]), TypeError, "0 int"),
    "predict text": (lambda: predict([nn.Linear(4, 4), GivesText()], [BATCH[0]]), TypeError, "output str"),
    "predict width": (lambda: predict(net(), [torch.ones(3, 9)]), RuntimeError, "predict Linear 3x9"),
    "predict raises": (lambda: predict([nn.Linear(4, 4), Raises()], [BATCH[0]]), LookupError, "troubled Raises"),
    "compare": (lambda: trained().report.compare("accuracy"), ValueError, "accuracy 'loss'"),
}
MALFORMED = ("lots", "MiB", "", "-1MiB", "12QiB", "1e", "0x10", "nan", "infGiB", 0, -1, 1e9)
# What one option refuses: (how it is given, error, values).
VALUES = {
    "memory": (EmulatedDevice, ValueError, MALFORMED),
    "dram": (lambda value: orchestra(dram=value), ValueError, (0, -1, "16G", 1.5, True)),
    "direction": (partial(KeepBest, "loss"), ValueError, ("lowest",)),
    "patience": (partial(KeepBest, "loss", "min"), ValueError, (0,)),
    "patience:": (partial(KeepBest, "loss", "min"), TypeError, (1.5,)),
}
OTHER_CALLS |= {
    f"{name} {value!r}": (partial(call, value), error, f"{name} {value}")
    for name, (call, error, values) in VALUES.items()
    for value in values
}

# Quotas of groups, on four devices, of which the task is in group g: (quotas, error, words).
QUOTAS = [
    ([2, 2], TypeError, "[2,"),
    ({"g": "2"}, TypeError, "'2' 'g'"),
    ({"g": True}, TypeError, "True 'g'"),
    ({"g": 1.0}, TypeError, "1.0 'g'"),
    ({0: 1}, TypeError, "0"),
    ({"": 1}, TypeError, "''"),
    ({"g": -1}, ValueError, "-1 'g'"),
    ({"g": 3, "b": 2}, ValueError, "5 'b'"),
    ({"g": 2, "b": 1}, ValueError, "'b'"),
]
OTHER_CALLS |= {
    f"quotas {quotas!r}": (partial(in_group, quotas), error, f"quotas {words}") for quotas, error, words in QUOTAS
}


@pytest.fixture(autouse=True)
def _no_model_is_changed():
    GIVEN.clear()
    yield
    for model, state in GIVEN:
        exact.assert_same_state(zoo.state(model), state)


def check(call, error, words, *, task=None):
    """The call is refused in one line, which names the task and the words."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    line = " | ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "\n" not in line
    names(line, task=task, says=words)
    if task is not None:  # what was raised before is not shown
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize(("options", "error", "words"), OPTIONS)
def test_a_wrong_option_names_task_option_and_value(options, error, words):
    for each in (next(iter(options)), words):
        check(partial(task, **options), error, each, task=CULPRIT)


@pytest.mark.parametrize("name", CALLS_OF_A_TASK)
def test_a_wrong_call_names_task_and_value(name):
    check(*CALLS_OF_A_TASK[name], task=CULPRIT)


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_a_wrong_call_about_no_task_names_the_value(name):
    check(*OTHER_CALLS[name])


# -- calls that are refused once training has begun


def test_an_error_of_a_callback_names_the_task():
    with pytest.raises(KeyError, match="troubled") as caught:
        train(callbacks=[Stops()])
    names(" ".join(caught.value.__notes__), task=CULPRIT, says="callback")
    GIVEN.clear()


def test_a_loader_that_gives_its_batches_once_is_refused_in_the_second_epoch():
    with refused(task=CULPRIT, says="loader 1 epochs") as caught:
        train(loader=Once(), epochs=2)
    assert "\n" not in str(caught.value)
    GIVEN.clear()
