"""100 and more wrong calls of the API: each is refused in one line that names the task, the value and a remedy."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hydra_engine import Callback, CudaDevice, EmulatedDevice, Model, ModelOrchestrator, ModelTask
from hydra_engine.adaptive import AdaptiveDataLoader
from hydra_engine.schedule import POLICIES
from partitioners import Presharded
from tests import exact

WIDTH = 4
DATA = TensorDataset(torch.ones(8, WIDTH), torch.ones(8, WIDTH))
BATCH = (torch.ones(3, WIDTH), torch.ones(3, WIDTH))
LOADER = [BATCH, BATCH]


def net(**settings):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, **settings), nn.Linear(WIDTH, WIDTH, **settings))


def task(model=None, loss_fn=F.mse_loss, loader=LOADER, name="a", **options):
    return ModelTask(net() if model is None else model, loss_fn, loader, name=name, seed=0, **options)


def orchestra(*tasks, memory="1MiB", **options):
    return exact.silent(list(tasks) or [task()], memory, **options)


def train(*args, memory="1MiB", **options):
    return orchestra(task(*args, **options), memory=memory).train_models()


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        return self.inner(x) * mask


class Adds(nn.Module):
    def forward(self, x, y):
        return x + y


class Raises(nn.Module):
    def forward(self, x):
        raise LookupError("a layer's own trouble")


class Once:
    """Gives the same batches, but only to the first who asks."""

    def __init__(self):
        self.batches = iter(LOADER)

    def __iter__(self):
        return self.batches


class Stops(Callback):
    def on_step(self, report):
        raise KeyError("a callback's own trouble")


def bad_loss(output, target):
    raise LookupError("a loss's own trouble")


def bad_loader():
    raise LookupError("a loader's own trouble")
    yield


def trained():
    made = orchestra()
    made.train_models()
    return made


def tied():
    model = net()
    model[1].weight = nn.Parameter(model[0].weight.data)
    return model


def option(**options):
    return partial(task, **options)


def late_optimizer(params, lr=None):
    raise LookupError("an optimizer's own trouble")


NET = net()
CALLS_OF_A_TASK = {
    # options of a task
    "lr text": option(lr="0.1"),
    "lr negative": option(lr=-1.0),
    "lr nan": option(lr=float("nan")),
    "epochs float": option(epochs=1.5),
    "epochs 0": option(epochs=0),
    "epochs text": option(epochs="3"),
    "optimizer unknown": option(optimizer="adamv"),
    "optimizer closure": option(optimizer="lbfgs"),
    "optimizer instance": lambda: task(NET, optimizer=torch.optim.AdamW(NET.parameters())),
    "optimizer number": option(optimizer=3),
    "schedule instance": lambda: task(
        lr_scheduler=torch.optim.lr_scheduler.StepLR(torch.optim.SGD(net().parameters()), 1)
    ),
    "schedule name": option(lr_scheduler="cosine"),
    "schedule interval": option(lr_scheduler_interval="batch"),
    "param_groups list": option(param_groups=[{"lr": 0.1}]),
    "optimizer_scope": option(optimizer_scope="layer"),
    "optimizer_device": option(optimizer_device="cuda"),
    "ema_decay 1": option(ema_decay=1.0),
    "partitioner name": option(partitioner="best"),
    "partitioner class": option(partitioner=Presharded),
    "precision fp16": option(precision="fp16"),
    "precision dtype": option(precision=torch.bfloat16),
    "grad_scaler unused": option(grad_scaler=torch.amp.GradScaler("cpu")),
    "grad_scaler true": option(grad_scaler=True, precision="float16"),
    "accumulation 0": option(accumulation_steps=0),
    "accumulation text": option(accumulation_steps="many"),
    "accumulation and batch": option(accumulation_steps=2, max_device_batch=4),
    "max_device_batch 0": option(max_device_batch=0),
    "max_device_batch float": option(max_device_batch=2.0),
    "loss_reduction": option(loss_reduction="average"),
    "max_grad_norm 0": option(max_grad_norm=0.0),
    "max_grad_norm text": option(max_grad_norm="1"),
    "seed float": lambda: ModelTask(net(), F.mse_loss, LOADER, name="a", seed=1.0),
    "seed large": lambda: ModelTask(net(), F.mse_loss, LOADER, name="a", seed=2**70),
    "unpack": option(unpack=0),
    "split": option(split=2),
    "validation interval 0": option(validation=LOADER, validation_interval=0),
    "validation interval text": option(validation=LOADER, validation_interval="step"),
    "validation interval alone": option(validation_interval=5),
    "metrics function": option(validation=LOADER, metrics=F.mse_loss),
    "metrics numbers": option(validation=LOADER, metrics={1: F.mse_loss}),
    "metrics alone": option(metrics={"mse": F.mse_loss}),
    "keep_best alone": option(keep_best="validation_loss"),
    "keep_best unknown": option(validation=LOADER, keep_best="accuracy"),
    "best": option(keep_best="loss", best="lowest"),
    "patience alone": option(patience=3),
    "patience 0": option(keep_best="loss", patience=0),
    "hparams list": option(hparams=["lr"]),
    "hparams tensor": option(hparams={"lr": torch.ones(1)}),
    "callback alone": option(callbacks=Stops()),
    "callback function": option(callbacks=[print]),
    "priority": option(priority="high"),
    "group": option(group=1),
    "min_devices 0": option(min_devices=0),
    "min over max": option(min_devices=3, max_devices=2),
    "weight 0": option(weight=0),
    "max_retries": option(max_retries=-1),
    "nonfinite": option(nonfinite="ignore"),
    "loader_timeout": option(loader_timeout_s=0),
    "compile": option(compile="max-autotune"),
    "early release": option(early_release="some"),
    "early release with clip": option(early_release=True, max_grad_norm=1.0),
    "scaling rule": option(scaling_rule="linear"),
    # the loss
    "loss class": lambda: task(loss_fn=nn.MSELoss),
    "loss None": lambda: task(loss_fn=None),
    "loss name": lambda: task(loss_fn="mse"),
    "loss trainable": lambda: task(loss_fn=nn.PReLU()),
    "loss of many": lambda: train(loss_fn=partial(F.mse_loss, reduction="none")),
    "loss float": lambda: train(loss_fn=lambda output, target: 1.0),
    "loss raises": lambda: train(loss_fn=bad_loss),
    "loss detached": lambda: train(loss_fn=lambda output, target: F.mse_loss(output.detach(), target)),
    # the loader
    "generator": lambda: task(loader=(batch for batch in LOADER), epochs=2),
    "generator as validation": lambda: task(validation=(batch for batch in LOADER), epochs=2),
    "given once": lambda: train(loader=Once(), epochs=2),
    "data set": lambda: task(loader=DATA),
    "data set as validation": lambda: task(validation=DATA),
    "loader None": lambda: task(loader=None),
    "loader function": lambda: task(loader=lambda: LOADER),
    "loader tensor": lambda: task(loader=torch.ones(3, 4)),
    "loader dict": lambda: task(loader={"x": BATCH[0], "y": BATCH[1]}),
    "loader empty": lambda: train(loader=[]),
    "loader of inputs": lambda: train(loader=DataLoader(torch.ones(8, WIDTH))),
    "loader of triples": lambda: train(loader=[(*BATCH, 1)]),
    "loader of dicts": lambda: train(loader=[{"x": BATCH[0], "y": BATCH[1]}]),
    "loader raises": lambda: train(loader=bad_loader()),
    "adaptive both": lambda: task(loader=AdaptiveDataLoader(DATA, batch_size=4), replay=[1]),
    # the model
    "model class": lambda: task(nn.Linear),
    "model number": lambda: task(3),
    "model empty": lambda: task([]),
    "model of functions": lambda: task([nn.Linear(4, 4), F.relu]),
    "model list": lambda: task([nn.ModuleList([nn.Linear(4, 4)])]),
    "model half": lambda: task(net().half()),
    "model frozen": lambda: task(net().requires_grad_(False)),
    "model meta": lambda: task(net(device="meta")),
    "model bfloat16 masters": lambda: task(net().bfloat16(), precision="bfloat16"),
    "model tied apart": lambda: task(tied()),
    "model lazy": lambda: task([nn.LazyLinear(4)]),
    "model width": lambda: train(nn.Sequential(nn.Linear(9, 9))),
    "model of two arguments": lambda: train(Two()),
    "model of other names": lambda: train(Two(), loader=[({"x": BATCH[0], "m": BATCH[0]}, BATCH[1])]),
    "layer of two arguments": lambda: train([nn.Linear(4, 4), Adds()]),
    "layer raises": lambda: train([nn.Linear(4, 4), Raises()]),
    # the run
    "optimizer raises": lambda: train(optimizer=late_optimizer),
    "callback raises": lambda: train(callbacks=[Stops()]),
    "memory": lambda: train(memory=100),
    "boundaries": lambda: train(partitioner=Presharded([1, 3])),
    "tasks of one model": lambda: orchestra(task(NET), task(NET, name="b")),
    "evaluate data set": lambda: orchestra().evaluate("a", DATA),
    "evaluate empty": lambda: orchestra().evaluate("a", []),
}
# About no task that has a name, or about all of them.
OTHER_CALLS = {
    "name int": option(name=3),
    "name empty": option(name=""),
    "example of one argument": lambda: Model(Two(), example=BATCH[0]),
    "trained twice": lambda: trained().train_models(),
    "tasks one": lambda: ModelOrchestrator(task()),
    "tasks none": lambda: ModelOrchestrator([]),
    "tasks models": lambda: ModelOrchestrator([net()]),
    "tasks of one name": lambda: orchestra(task(), task()),
    "devices number": lambda: orchestra(devices=2),
    "devices cpu": lambda: orchestra(devices=["cpu"]),
    "devices empty": lambda: orchestra(devices=[]),
    "device number": lambda: orchestra(devices=[0]),
    "policy": lambda: orchestra(policy="fastest"),
    "checkpoint_every": lambda: orchestra(checkpoint_every="sometimes"),
    "memory text": lambda: EmulatedDevice("lots"),
    "memory negative": lambda: EmulatedDevice(-1),
    "memory float": lambda: EmulatedDevice(1e9),
    "dram": lambda: orchestra(dram="16G"),
    "gpu that is not there": lambda: CudaDevice(99),
    "stop unknown": lambda: orchestra().stop_task("b"),
    "pause unsaved": lambda: orchestra().pause_task("a"),
    "forget waiting": lambda: orchestra().forget_task("a"),
    "evaluate unknown": lambda: orchestra().evaluate("b", LOADER),
    "evaluate model": lambda: orchestra().evaluate(net(), LOADER),
    "predict data set": lambda: orchestra().predict(net(), DATA),
    "predict pairs": lambda: orchestra().predict(net(), LOADER),
    "predict unpack": lambda: orchestra().predict(net(), LOADER, unpack=0),
    "compare": lambda: trained().report.compare("accuracy"),
}
CALLS = CALLS_OF_A_TASK | OTHER_CALLS

# What a user reads; "..." stands for any text. First what several calls have in common.
DATA_SET = (
    "a TensorDataset is a data set, whose items are single samples, limit: batches; give DataLoader(data_set, "
    "batch_size=32, shuffle=True), or batch_size=None where its items are batches"
)
ANEW = "starts anew at each iter() (a list, a DataLoader, an object whose __iter__ is a generator)"
A_PAIR = (
    "limit: a pair (inputs, target), or a mapping with 'labels'; give ModelTask an unpack= function that turns a "
    "batch into that pair | task a, as the first batch of its loader was read"
)
SIZES = "write whole bytes (4096) or a number with a unit: '512 KiB', '64MiB', '16GiB', '1.5GB' (10^9)"
NO_LOSS = "is not callable; give a function (output, target) -> scalar tensor, such as torch.nn.functional.mse_loss"
NO_SCHEDULE = (
    "is not callable; give a function optimizer -> scheduler, such as partial(torch.optim.lr_scheduler.StepLR, "
    "step_size=10); the engine makes the optimizer"
)
NO_SCALAR = "not a scalar, limit: a tensor of one element; reduce it, for example with .mean()"
PROFILED = "while it was profiled | task a: a plain loss_fn(model(inputs), target) on its first batch shows the same"
NO_MASK = (
    "missing a required argument: 'mask'; give its arguments as a tuple (x, mask) or a dict with these names, in the "
    "batch or by unpack= of the task"
)
IN_LAYERS = "task a, as its model was made into layers by its first batch"
LINES = {
    "lr text": "a: lr: '0.1' is not a number; give a learning rate such as 1e-3",
    "lr negative": "a: lr: -1.0, limit: finite, at least 0; 1e-3 is common",
    "lr nan": "a: lr: nan, limit: finite, at least 0; 1e-3 is common",
    "epochs float": "a: epochs: 1.5 is not an int; give a number of passes over the loader",
    "epochs 0": "a: epochs: 0, limit: at least 1; to train nothing, call evaluate() or predict()",
    "epochs text": "a: epochs: '3' is not an int; give a number of passes over the loader",
    "name int": "name: 3 is not a str; give a name, or leave it out",
    "name empty": "name: '', limit: at least one character; give a name, or leave it out",
    "optimizer unknown": "a: optimizer: 'adamv', known: 'adadelta', ... 'adam', ... 'adamw', ... 'sgd'",
    "optimizer closure": "a: optimizer: 'lbfgs', known: 'adadelta', ... 'adam', ... 'adamw', ... 'sgd'",
    "optimizer instance": (
        "a: optimizer: an optimizer (AdamW) that is made already, limit: what makes one, since the engine"
        " steps each shard by itself; give optimizer=torch.optim.AdamW and lr=, or "
        "partial(torch.optim.AdamW, weight_decay=0.01) for other options"
    ),
    "optimizer number": (
        "a: optimizer: 3 is not callable; give a name ('adamw'), a class (torch.optim.AdamW), or a "
        "function (params, lr=...)"
    ),
    "schedule instance": f"a: lr_scheduler: <torch.optim.lr_scheduler.StepLR object at ...> {NO_SCHEDULE}",
    "schedule name": f"a: lr_scheduler: 'cosine' {NO_SCHEDULE}",
    "schedule interval": "a: lr_scheduler_interval: 'batch', known: 'step', 'epoch'",
    "param_groups list": (
        "a: param_groups: [{'lr': 0.1}] is not callable; give a function name -> options, such as lambda "
        "name: {'weight_decay': 0.0}"
    ),
    "optimizer_scope": "a: optimizer_scope: 'layer', known: 'shard', 'task'",
    "optimizer_device": "a: optimizer_device: 'cuda', known: 'host', 'device', 'auto'",
    "ema_decay 1": "a: ema_decay: 1.0, limit: 0 <= ema_decay < 1; 0.999 is common",
    "partitioner name": "a: partitioner: 'best', known: 'balanced', 'fastest', 'optimal', 'pilot', 'presharded'",
    "partitioner class": (
        "a: partitioner: <class 'partitioners.partitioner.Presharded'> is not a partitioner; give Fastest()"
        " or Presharded([...])"
    ),
    "precision fp16": "a: precision: 'fp16', known: 'float32', 'bfloat16', 'float16'",
    "precision dtype": "a: precision: torch.bfloat16, known: 'float32', 'bfloat16', 'float16'",
    "grad_scaler unused": "a: grad_scaler: given with precision 'float32'; only 'float16' scales its loss",
    "grad_scaler true": (
        "a: grad_scaler: True is not a torch.amp.GradScaler; give GradScaler('cpu', init_scale=...), or leave it out"
    ),
    "accumulation 0": "a: accumulation_steps: 0, limit: at least 1; or 'auto'",
    "accumulation text": "a: accumulation_steps: 'many' is not an int; give a number of micro-batches, or 'auto'",
    "accumulation and batch": (
        "a: max_device_batch: 4 with accumulation_steps 2, limit: one of them, since each decides the "
        "number of micro-batches; leave out one"
    ),
    "max_device_batch 0": "a: max_device_batch: 0, limit: at least 1; None for no limit",
    "max_device_batch float": "a: max_device_batch: 2.0 is not an int; give a number of samples, None for no limit",
    "loss_reduction": "a: loss_reduction: 'average', known: 'mean', 'sum'",
    "max_grad_norm 0": "a: max_grad_norm: 0.0, limit: above 0; leave it out to clip nothing",
    "max_grad_norm text": "a: max_grad_norm: '1' is not a number; give a norm such as 1.0, or leave it out",
    "seed float": "a: seed: 1.0 is not an int; give a number, or leave it out to have one drawn",
    "seed large": "a: seed: 1180591620717411303424, limit: 64 bits, as torch.manual_seed takes; give a smaller one",
    "unpack": "a: unpack: 0 is not callable; give a function batch -> (inputs, target)",
    "split": ("a: split: 2 is not callable; give a function (inputs, target, n) -> list of (inputs, target, weight)"),
    "validation interval 0": "a: validation_interval: 0, limit: at least 1; or 'epoch'",
    "validation interval text": "a: validation_interval: 'step', known: 'epoch', or a number of training steps",
    "validation interval alone": "a: validation_interval: 5 without a validation loader; give validation=",
    "metrics function": (
        "a: metrics: <function mse_loss at ...> does not map names to functions; give {'accuracy': accuracy}"
    ),
    "metrics numbers": (
        "a: metrics: {1: <function mse_loss at ...>} does not map names to functions; give {'accuracy': accuracy}"
    ),
    "metrics alone": "a: metrics: mse without a validation loader; give validation=",
    "keep_best alone": "a: keep_best: 'validation_loss', known: 'loss'; name one of these, or give validation=",
    "keep_best unknown": (
        "a: keep_best: 'accuracy', known: 'loss', 'validation_loss'; name one of these, or add it to metrics="
    ),
    "best": "a: best: 'lowest', known: 'min', 'max'",
    "patience alone": "a: patience: 3 without keep_best; name the figure that is to get better",
    "patience 0": "a: patience: 0, limit: at least 1; None for no end",
    "hparams list": "a: hparams: ['lr'] does not map names to values; give {'lr': 0.1}",
    "hparams tensor": (
        "a: hparams: {'lr': tensor([1.])} holds what JSON does not; give None, bools, finite numbers, "
        "strings, and lists and dicts of them"
    ),
    "callback alone": (
        "a: callbacks: <tests.promises.test_wrong_calls.Stops object at ...> is not a list; give a list "
        "of Callback objects"
    ),
    "callback function": (
        "a: callbacks: <built-in function print> is not a Callback; give objects of a class derived from it"
    ),
    "priority": "a: priority: 'high' is not an int; 0 is every task's, higher goes first",
    "group": "a: group: 1 is not a str; give a name in quotas=",
    "min_devices 0": "a: min_devices: 0, limit: at least 1; leave it out to take what there is",
    "min over max": "a: min_devices: 3, limit: max_devices=2; lower it, or raise the maximum",
    "weight 0": "a: weight: 0, limit: finite, above 0; 1 is every task's",
    "max_retries": "a: max_retries: -1, limit: at least 0, which fails the task at its first error",
    "nonfinite": "a: nonfinite: 'ignore', known: 'skip', 'stop', 'raise'",
    "loader_timeout": "a: loader_timeout_s: 0, limit: finite, above 0; None waits for ever",
    "compile": "a: compile: 'max-autotune' is not a bool; give True for torch.compile of each layer, or False",
    "early release": "a: early_release: 'some', known: False, True, 'all'",
    "early release with clip": "a: early_release: with max_grad_norm a step waits until all gradients are there; ...",
    "scaling rule": (
        "a: scaling_rule: 'linear' is not a ScalingRule; give AdaScale(), AdamScale(), LinearScale(), "
        "SqrtScale() or LEGWScale(...)"
    ),
    "loss class": "a: loss_fn: MSELoss is a class; give an instance of it",
    "loss None": f"a: loss_fn: None {NO_LOSS}",
    "loss name": f"a: loss_fn: 'mse' {NO_LOSS}",
    "loss trainable": "a: parameter weight of the loss is trainable; make it a layer of the model, or freeze it",
    "loss of many": f"loss: shape (3, 4), {NO_SCALAR} | in loss_fn, {PROFILED}",
    "loss float": f"loss: float, {NO_SCALAR} | in loss_fn, {PROFILED}",
    "loss raises": f"a loss's own trouble | in loss_fn, {PROFILED}",
    "loss detached": (
        "element 0 of tensors does not require grad and does not have a grad_fn | in loss_fn of task a, "
        "while a step of it was tried; a plain one shows the same"
    ),
    "generator": (
        f"a: dataloader: a generator gives its batches once, and is to be read in 2 epochs; give a loader that {ANEW}"
    ),
    "generator as validation": (
        "a: validation: a generator gives its batches once, and is to be read at every validation; give a loader that "
        f"{ANEW}"
    ),
    "given once": (
        f"a: its loader gave no batch in epoch 1, and did in those before; give one that {ANEW}, or fewer epochs"
    ),
    "data set": f"a: dataloader: {DATA_SET}",
    "data set as validation": f"a: validation: {DATA_SET}",
    "loader None": "a: dataloader: a NoneType is no iterable of batches; give a DataLoader, or a list of batches",
    "loader function": "a: dataloader: a function is no iterable of batches; give a DataLoader, or a list of batches",
    "loader tensor": "a: dataloader: a Tensor is no iterable of batches; give a DataLoader, or a list of batches",
    "loader dict": "a: dataloader: a dict is no iterable of batches; give a DataLoader, or a list of batches",
    "loader empty": (
        "a: the loader is empty; training needs at least one batch: look at drop_last, the sampler, and "
        "the length of the data"
    ),
    "loader of inputs": f"a batch of the loader is a Tensor, {A_PAIR}",
    "loader of triples": f"a batch of the loader is a tuple of 3 items, {A_PAIR}",
    "loader of dicts": f"a batch of the loader is a dict with x, y, {A_PAIR}",
    "loader raises": "a loader's own trouble | task a, as the first batch of its loader was read",
    "adaptive both": "a: replay: [1] is not a list of StepChoice; give another run's report.tasks[name].adaptive",
    "model class": (
        "a: model: the class Linear is no model; give an nn.Module, or a list of layers in the order they run"
    ),
    "model number": (
        "a: model: a value of type int is no model; give an nn.Module, or a list of layers in the order they run"
    ),
    "model empty": "a: the model (list) has no layers; give it at least one",
    "model of functions": (
        "a: layer 1 of the model is a function, not an nn.Module; put what it does into the forward of one"
    ),
    "model list": (
        "a: layer 0 of the model is a ModuleList, which has no forward and cannot be called; give Model "
        "the list of layers in the order they run"
    ),
    "model half": (
        "a: parameter 0.weight is float16 and to be trained, limit: float32, since updates and optimizer "
        "states overflow in it, or vanish; convert the model with model.float(), and compute narrow with "
        "precision='float16' or 'bfloat16'"
    ),
    "model frozen": "a: the model has no trainable parameter; set requires_grad on at least one",
    "model meta": "a: parameter 0.weight is on the meta device and has no values; materialise it first",
    "model bfloat16 masters": (
        "a: parameter 0.weight is torch.bfloat16, limit with precision 'bfloat16': float32, the masters' "
        "type; convert the model with model.float()"
    ),
    "model tied apart": (
        "a: parameters 0.weight and 1.weight are two Parameter objects over the same memory; tie them by "
        "assigning the same object to both"
    ),
    "model lazy": "a: parameter 0.weight is not initialised yet; run the lazy module once before",
    "model width": f"mat1 and mat2 shapes cannot be multiplied (3x4 and 9x9) | in layer 0 (Linear), {PROFILED}",
    "model of two arguments": (
        f"the forward of the model (Two) takes (x, mask), and the inputs of a batch are a Tensor: {NO_MASK} | "
        f"{IN_LAYERS}"
    ),
    "model of other names": (
        f"the forward of the model (Two) takes (x, mask), and the inputs of a batch are a dict with x, m: {NO_MASK} | "
        f"{IN_LAYERS}"
    ),
    "example of one argument": (
        f"the forward of the model (Two) takes (x, mask), and the inputs of a batch are a Tensor: {NO_MASK}"
    ),
    "layer of two arguments": (
        "Adds.forward() missing 1 required positional argument: 'y' | in layer 1 (Adds), while it was "
        "profiled | task a: layers take one argument, what the one before returned; a module whose own "
        "forward passes them several is given whole: Model(module)"
    ),
    "layer raises": f"a layer's own trouble | in layer 1 (Raises), {PROFILED}",
    "optimizer raises": "an optimizer's own trouble | task a, as a step of its optimizer was tried",
    "callback raises": "a callback's own trouble | a failed in its callback",
    "memory": (
        "a: layer 0 (Linear): needs 352 B (352 bytes) alone on a device, available: 100 B (100 bytes); give the "
        "device more memory, make micro-batches smaller (raise accumulation_steps), or split the layer into several; "
        "the least memory that works for it is 452 B (452 bytes), for layer 1 (Linear) of a"
    ),
    "boundaries": (
        "boundaries: [1, 3] end at layer 3, limit: the model's 2 layers; make 2 the last end | task a, as"
        " its plan was made"
    ),
    "trained twice": "train_models: these tasks are trained already; make new tasks to train further",
    "tasks one": "tasks: ModelTask(a: 2 layers, 1 epochs) is not a list; give a list of ModelTask",
    "tasks none": "tasks: empty list; give at least one ModelTask",
    "tasks models": (
        "tasks: Sequential( (0): Linear(in_features=4, out_features=4, bias=True) (1): Linear(in_features=4, "
        "out_features=4, bias=True) ) is a Sequential, not a ModelTask; make one of it"
    ),
    "tasks of one name": "tasks: 2 tasks are named 'a'; give each a name of its own",
    "tasks of one model": (
        "tasks a and b share the trainable parameter 0.weight; freeze it in both, or give each task its "
        "own copy (of adapters: by hydra_engine.integrations.huggingface.adapters)"
    ),
    "devices number": "devices: 2 is not a list; give a list such as [EmulatedDevice(memory='64MiB')]",
    "devices cpu": "devices: 'cpu', known: 'cuda:0', 'cuda:1', ... and EmulatedDevice(memory=...)",
    "devices empty": "devices: empty list; give at least one device, or leave it out",
    "device number": (
        "devices: 0 is a int, not an EmulatedDevice, a CudaDevice or a string; give "
        "EmulatedDevice(memory='64MiB'), or CudaDevice(0)"
    ),
    "policy": f"policy: 'fastest', known: {', '.join(map(repr, sorted(POLICIES)))}",
    "checkpoint_every": (
        "checkpoint_every: 'sometimes', limit: a time above 0; give a number of steps, or a time such as "
        "'10min', '30s' or '2h'"
    ),
    "memory text": f"memory: 'lots' is not a size; {SIZES}",
    "memory negative": f"memory: -1 is -1 bytes, a size is at least 1 byte; {SIZES}",
    "memory float": f"memory: 1000000000.0 is not a size; {SIZES}",
    "dram": f"dram: '16G' is not a size; {SIZES}",
    "gpu that is not there": (
        "device 'cuda:99': this process sees no CUDA device; check the driver and CUDA_VISIBLE_DEVICES, "
        "or train on EmulatedDevice(memory=...)"
    ),
    "stop unknown": "stop_task: task 'b', known: 'a'",
    "pause unsaved": (
        "pause_task: 'a', limit: an orchestrator with a checkpoint_dir, since a task is saved while it is"
        " paused; give ModelOrchestrator one, or end the task with stop_task"
    ),
    "forget waiting": (
        "forget_task: 'a' waits to train, limit: a task that is over; end it with stop_task('a'), and "
        "call this in its callbacks' on_task_end, or after train_models()"
    ),
    "evaluate unknown": "evaluate: task 'b', known: 'a'; give one of these names, or a ModelTask",
    "evaluate model": "evaluate: task Sequential( ... ), known: 'a'; give one of these names, or a ModelTask",
    "evaluate data set": f"a: loader: {DATA_SET}",
    "evaluate empty": (
        "a: the loader is empty; evaluation needs at least one batch: look at drop_last, the sampler, and"
        " the length of the data"
    ),
    "predict data set": f"loader: {DATA_SET}",
    "predict pairs": (
        "linear(): argument 'input' (position 1) must be Tensor, not tuple | in layer 0 (Linear), while "
        "it was profiled | task predict: a batch is what the first layer takes; of pairs (inputs, "
        "target), unpack=lambda batch: batch[0] gives that, or predict(task, ...) as the task does"
    ),
    "predict unpack": "unpack: 0 is not callable; give a function",
    "compare": "by: 'accuracy', known: 'validation_loss', 'loss'; name one of these",
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_gives_one_line_that_names_task_value_and_remedy(name):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        CALLS[name]()
    error = caught.value
    text = error.args[0] if isinstance(error, KeyError) else str(error)
    line = " | ".join([text, *getattr(error, "__notes__", ())])  # what was raised before it is not shown
    assert "\n" not in line
    assert re.fullmatch(re.escape(LINES[name]).replace(re.escape("..."), ".*"), line), line


def test_there_are_a_hundred_and_those_of_a_task_name_it():
    assert len(CALLS) == len(LINES) > 130
    of_no_task = {
        name for name, line in LINES.items() if not re.search(r"^a:|\b(task a|tasks a and b|a failed|'a')", line)
    }
    assert of_no_task == OTHER_CALLS.keys()


@pytest.mark.parametrize("name", ["memory", "loss raises", "data set", "model of two arguments"])
def test_no_traceback_of_another_error_is_shown_before_it(name):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        CALLS[name]()
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
