"""Every optimizer and LR schedule that people train with gives, shard by shard, the bits of the plain loop."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hydra_engine import ModelTask
from partitioners import Presharded
from tests import exact, reference
from tests.covering import covering
from tests.refused import refused

SEED, LR, EPOCHS, NUM_BATCHES = 7, 1e-2, 2, 3

PER_PARAMETER = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adafactor")
PER_PARAMETER += ("ASGD", "Rprop")
VARIANTS = {
    "SGD with momentum": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=True),
    "Adam with amsgrad": lambda params, lr: torch.optim.Adam(params, lr=lr, amsgrad=True, weight_decay=0.1),
    "RMSprop centered": lambda params, lr: torch.optim.RMSprop(params, lr=lr, momentum=0.9, centered=True),
    "SGD fused": lambda params, lr: torch.optim.SGD(params, lr=lr, fused=True),
    "Adam fused": lambda params, lr: torch.optim.Adam(params, lr=lr, fused=True),
    "AdamW fused": lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True),
    "Adagrad fused": lambda params, lr: torch.optim.Adagrad(params, lr=lr, fused=True),
    "AdamW foreach": lambda params, lr: torch.optim.AdamW(params, lr=lr, foreach=True),
}
SCHEDULES = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * NUM_BATCHES),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=EPOCHS * NUM_BATCHES),
    "warm-up": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4)),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-1, step_size_up=2, cycle_momentum=False),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[2],
    ),
}


NUMBERS = {
    "lr of NumPy, 32 bits": (torch.optim.AdamW, np.float32(LR), None),
    "lr of NumPy, 16 bits": (torch.optim.AdamW, np.float16(LR), None),
    "lr of NumPy, 64 bits": (torch.optim.AdamW, np.float64(LR), None),
    "lr, a tensor": (torch.optim.Adam, torch.tensor(LR), None),
    "SGD, an int": (torch.optim.SGD, 1, None),
    "SGD": (partial(torch.optim.SGD, momentum=np.float32(0.9), weight_decay=np.float32(0.1)), np.float32(LR), None),
    "decay": (partial(torch.optim.AdamW, weight_decay=np.float32(0.01)), LR, None),
    "decay, a tensor": (partial(torch.optim.AdamW, weight_decay=torch.tensor(0.01)), LR, None),
    "betas": (partial(torch.optim.Adam, betas=(np.float64(0.9), np.float64(0.99))), LR, None),
    "eps": (partial(torch.optim.Adam, eps=np.float32(1e-8)), LR, None),
    "fused": (partial(torch.optim.AdamW, fused=True), np.float32(LR), None),
    "a table": (torch.optim.AdamW, LR, lambda k: np.linspace(1, 0.1, 9, dtype=np.float32)[k]),
    "a schedule of tensors": (torch.optim.AdamW, LR, lambda k: torch.tensor(1 - k / 9)),
    "lr, an array": (torch.optim.AdamW, np.array(LR), None),
    "lr, a tensor that a schedule fills": (torch.optim.AdamW, torch.tensor(LR), lambda k: 1 / (1 + k)),
}


def model(*, bias=True):
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(8, 8, bias=bias), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(8, 3, bias=bias))


def loader():
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(6, 8, generator=generator), torch.randint(3, (6,), generator=generator))
        for _ in range(NUM_BATCHES)
    ]


def plain_groups(network, param_groups):
    """What a plain loop passes to its optimizer for the same groups."""
    if param_groups is None:
        return list(network.parameters())
    groups = []
    for name, parameter in network.named_parameters():
        options = param_groups(name)
        for group in groups:
            if {key: value for key, value in group.items() if key != "params"} == options:
                group["params"].append(parameter)
                break
        else:
            groups.append({**options, "params": [parameter]})
    return groups


def trained(task):
    return exact.silent([task], "1MiB").train_models().tasks["a"]


def assert_bits_are_plain(network, optimizer, *, param_groups=None, prepare=lambda network: None, **options):
    plain = copy.deepcopy(network)
    for each in (network, plain):
        prepare(each)
    own = {"optimizer": optimizer, "param_groups": param_groups, "partitioner": Presharded([2, 4, len(network)])}
    own["optimizer_scope"] = options.pop("optimizer_scope", "shard")
    options |= {"seed": SEED, "lr": LR, "epochs": EPOCHS}
    report = trained(ModelTask(network, F.cross_entropy, loader(), name="a", **own, **options))

    def of_groups(_, lr):
        return optimizer(plain_groups(plain, param_groups), lr=lr)

    result = reference.train(plain, F.cross_entropy, loader(), optimizer=of_groups, **options)
    assert report.losses == result.losses
    exact.assert_same_state(dict(network.named_parameters()), dict(plain.named_parameters()))


@covering(name=PER_PARAMETER, max_grad_norm=[None, 0.1], strength=1)
def test_optimizers_that_step_per_parameter(name, max_grad_norm):
    assert_bits_are_plain(model(), getattr(torch.optim, name), max_grad_norm=max_grad_norm)


@pytest.mark.parametrize("name", VARIANTS)
def test_their_variants(name):
    assert_bits_are_plain(model(), VARIANTS[name], max_grad_norm=0.5)


def test_muon_which_takes_matrices_only():
    assert_bits_are_plain(model(bias=False), torch.optim.Muon)


@covering(name=list(SCHEDULES), interval=["step", "epoch"], strength=1)
def test_schedules(name, interval):
    options = {"lr_scheduler": SCHEDULES[name], "lr_scheduler_interval": interval}
    assert_bits_are_plain(model(), torch.optim.AdamW, **options)


def no_decay_on_biases(name):
    return {"weight_decay": 0.0} if name.endswith("bias") else {"weight_decay": 0.5}


def slower_at_the_bottom(name):
    return {"lr": LR / 10} if name.startswith(("0.", "1.")) else {}


@covering(param_groups=[no_decay_on_biases, slower_at_the_bottom], optimizer_scope=["shard", "task"], strength=1)
def test_parameter_groups_by_name(param_groups, optimizer_scope):
    options = {"lr_scheduler": SCHEDULES["cosine"], "max_grad_norm": 0.5, "optimizer_scope": optimizer_scope}
    assert_bits_are_plain(model(), torch.optim.AdamW, param_groups=param_groups, **options)


class Tied(nn.Module):
    """A layer that may hold another's parameter."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return F.linear(x, self.weight)


@covering(decay=[0.9, 0.0], optimizer_scope=["shard", "task"], strength=1)
def test_a_moving_average_is_that_of_torchs_averaged_model(decay, optimizer_scope):
    network = model()
    network = nn.Sequential(*network[:4], nn.BatchNorm1d(8), Tied(network[0][0].weight), network[4])
    network[1].requires_grad_(False)
    plain = copy.deepcopy(network)
    averaged = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(decay))
    options = {"optimizer": torch.optim.AdamW, "lr": LR, "epochs": EPOCHS, "seed": SEED}
    reference.train(plain, F.cross_entropy, loader(), on_step=lambda: averaged.update_parameters(plain), **options)
    own = {"ema_decay": decay, "optimizer_scope": optimizer_scope, "partitioner": Presharded([2, 4, 7])}
    state = trained(ModelTask(network, F.cross_entropy, loader(), name="a", **own, **options)).ema_state
    plain.load_state_dict(state)
    exact.assert_same_state(dict(plain.named_parameters()), dict(averaged.module.named_parameters()))
    assert state.keys() == network.state_dict().keys()
    assert torch.equal(state["4.running_mean"], network[4].running_mean)


def halve(gradient):
    return gradient * 0.5


def clip_in_place(gradient):
    gradient.clamp_(-0.01, 0.01)


def forget(parameter):
    """As one that steps an optimizer of its own, and takes the gradient away."""
    parameter.sub_(parameter.grad, alpha=0.1)
    parameter.grad = None


def double(parameter):
    parameter.grad = parameter.grad * 2


@covering(num_micro_batches=[1, 2], optimizer_scope=["shard", "task"], strength=1)
def test_gradient_hooks_act_on_the_finished_gradient(num_micro_batches, optimizer_scope):
    """Halving and doubling are exact, so a hook per micro-batch, as in the plain loop, gives the same bits."""
    network = model()
    network = nn.Sequential(*network[:4], Tied(network[0][0].weight), network[4])

    def prepare(each):
        for parameter in each.parameters():
            parameter.register_hook(halve)
        each[1][0].weight.register_post_accumulate_grad_hook(lambda parameter: None)

    options = {"accumulation_steps": num_micro_batches, "max_grad_norm": 0.1, "optimizer_scope": optimizer_scope}
    assert_bits_are_plain(network, torch.optim.AdamW, prepare=prepare, **options)


def test_hooks_may_change_replace_and_take_the_gradient():

    def prepare(network):
        network[0][0].weight.register_hook(clip_in_place)
        network[1][0].weight.register_post_accumulate_grad_hook(forget)
        network[2][0].weight.register_post_accumulate_grad_hook(double)
        for hook in (halve, clip_in_place):  # in the order of their registration
            network[3][0].bias.register_hook(hook)

    assert_bits_are_plain(model(), torch.optim.AdamW, prepare=prepare)


class Coupled(torch.optim.Optimizer):
    """Steps every parameter by what all gradients together say, and keeps that in its group, as Prodigy does."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "scale": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["scale"] += sum(p.grad.abs().sum().item() for p in group["params"])
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] / group["scale"])


def test_an_optimizer_that_couples_parameters_steps_the_whole_task():
    assert_bits_are_plain(model(), Coupled, optimizer_scope="task", max_grad_norm=1.0)


def test_an_optimizer_that_couples_parameters_is_refused_shard_by_shard():
    with refused(task="a", says="Coupled optimizer_scope='task'"):
        assert_bits_are_plain(model(), Coupled)


@pytest.mark.parametrize("returned", [None, {"params": []}, 0.1])
def test_groups_that_are_no_options_are_refused(returned):
    with refused(TypeError, layer="0.0.weight", says="param_groups dict"):
        assert_bits_are_plain(model(), torch.optim.SGD, param_groups=lambda name: returned)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *[({"ema_decay": decay}, f"ema_decay {decay}") for decay in (1, -0.1, "0.9")],
        ({"optimizer_scope": "model"}, "optimizer_scope: 'model' 'task'"),
    ],
    ids=str,
)
def test_values_that_an_option_cannot_have_are_refused(options, words):
    with refused(says=words):
        ModelTask(model(), F.cross_entropy, loader(), **options)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", NUMBERS)
def test_hyperparameters_of_any_type_compute_as_in_torch(case, precision):
    optimizer, lr, factors = NUMBERS[case]
    schedule = None if factors is None else partial(lr_scheduler.LambdaLR, lr_lambda=factors)
    network, plain = model(), model()
    options = {"optimizer": optimizer, "lr": lr, "lr_scheduler": schedule, "seed": SEED, "epochs": EPOCHS}
    options |= {"precision": precision, "partitioner": Presharded([2, 5])}
    report = trained(ModelTask(network, F.cross_entropy, loader(), name="a", **options))
    del options["partitioner"]
    expected = reference.train(plain, F.cross_entropy, loader(), **options)
    assert report.losses == expected.losses
    exact.assert_same_state(network.state_dict(), plain.state_dict())
