"""What a task's state is saved as comes back bit for bit, and training goes on from it as if nothing had happened."""

import functools
import math
import random
import struct

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from hydra_engine.checkpoints.nested import flatten, losses_to_state, unflatten
from hydra_engine.data.streams import Stream, capture, copied, installed, random_from_state
from hydra_engine.host.loss_scale import LossScale
from hydra_engine.host.optimizer import restore_optimizer
from tests.refused import refused


def through(state):
    """Flattened and back; the tensors in new memory, as a file gives them."""
    return unflatten({name: each.clone() for name, each in flatten(state).items()})


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


def step(net, optimizer, scheduler, k):
    def closure():
        optimizer.zero_grad()
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(k)).to(next(net.parameters()).dtype)
        loss = net(inputs).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    elif scheduler is not None:
        scheduler.step()


def raw(tensor):
    return (tensor.dtype, tuple(tensor.shape), tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def values(net, optimizer, scheduler):
    weights = [raw(each) for each in net.parameters()]
    tensors = flatten([optimizer.state_dict(), None if scheduler is None else scheduler.state_dict()])
    return weights, {name: raw(each) for name, each in tensors.items()}


def goes_on_alike(make_net, make_optimizer, make_scheduler=lambda optimizer: None):
    """A run of 8 steps, and one that is saved after 4 and goes on in other objects: the same at the end."""

    def after(steps, net, optimizer, scheduler):
        for k in steps:
            step(net, optimizer, scheduler, k)
        return values(net, optimizer, scheduler)

    def made():
        net = make_net()
        optimizer = make_optimizer(net)
        return net, optimizer, make_scheduler(optimizer)

    net, optimizer, scheduler = first = made()
    at_save = after(range(4), *first)
    saved_weights = copied(net.state_dict())
    saved = through(copied([optimizer.state_dict(), None if scheduler is None else scheduler.state_dict()]))
    expected = after(range(4, 8), *first)

    net, optimizer, scheduler = second = made()
    net.load_state_dict(saved_weights)
    restore_optimizer(optimizer, saved[0])
    if scheduler is not None:
        scheduler.load_state_dict(saved[1])
    assert values(*second) == at_save
    optimizer._opt_called = True
    assert after(range(4, 8), *second) == expected


OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "tensor lr": lambda parameters: torch.optim.SGD(parameters, lr=torch.tensor(0.1)),
    "amsgrad": functools.partial(torch.optim.AdamW, amsgrad=True),
    "LBFGS": functools.partial(torch.optim.LBFGS, max_iter=3, history_size=2),
    "centered": functools.partial(torch.optim.RMSprop, centered=True, momentum=0.5),
    **{
        name: getattr(torch.optim, name)
        for name in ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "Rprop")
    },
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_with_every_optimizer(name):
    goes_on_alike(model, lambda net: OPTIMIZERS[name](net.parameters()))


def test_training_goes_on_with_groups():
    def make(net):
        return torch.optim.Adam([{"params": net[0].parameters(), "lr": 0.1}, {"params": net[2].parameters()}])

    goes_on_alike(model, make)


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: 0.9**k),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.9),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5]),
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [1, 4])], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")
def test_training_goes_on_with_every_scheduler(name):
    goes_on_alike(model, lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), SCHEDULERS[name])


class WideStates(torch.optim.Optimizer):
    """Keeps float32 averages of bfloat16 weights, counts, names and arrays: all that torch would cast or rebuild."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure):
        closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                average = state.setdefault("average", torch.zeros(parameter.shape))
                state["count"] = state.get("count", torch.tensor([2**31 - 1])) + 1
                state["name"] = "wide"
                state["bytes"] = b"\x00\xff"
                state["array"] = np.arange(3)
                state["dtype"] = average.dtype
                state["shape"] = average.shape
                average.mul_(0.9).add_(parameter.grad.float())
                parameter.data.sub_(average.mul(group["lr"]).to(parameter.dtype))
        self.state["shared"]["steps"] = self.state["shared"].get("steps", 0) + 1


def test_state_of_another_type_than_its_parameter():
    goes_on_alike(lambda: model(torch.bfloat16), lambda net: WideStates(net.parameters()))


def test_the_saved_tensors_are_taken_over():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    step(net, optimizer, None, 0)
    saved = through(optimizer.state_dict())
    other = torch.optim.SGD(net.parameters(), momentum=0.9)
    restore_optimizer(other, saved)
    assert other.state[net[0].weight]["momentum_buffer"] is saved["state"][0]["momentum_buffer"]
    assert saved["state"].keys() == {0, 1, 2, 3}, "and the saved dict is as it was"


def test_an_optimizer_with_a_way_of_its_own_is_given_everything():
    class Own(torch.optim.SGD):
        def load_state_dict(self, state_dict):
            self.given = state_dict

    net = model()
    optimizer = Own(net.parameters(), momentum=0.9)
    step(net, optimizer, None, 0)
    saved = through(optimizer.state_dict())
    restore_optimizer(optimizer, saved)
    assert optimizer.given == saved


def test_another_model_is_refused():
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    step(net, optimizer, None, 0)
    saved = optimizer.state_dict()
    with refused(ValueError, says="[2] [4]"):
        restore_optimizer(torch.optim.Adam(net[0].parameters()), saved)
    turned = [*net[2].parameters(), *net[0].parameters()]
    with refused(ValueError, says="exp_avg") as caught:
        restore_optimizer(torch.optim.Adam(turned), saved)
    assert "(4, 8)" in str(caught.value)
    assert "(8, 4)" in str(caught.value)


def test_a_loss_scale_goes_on_as_grad_scaler_would():
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": 1})
    scale = LossScale(scaler)
    scale.update(True)
    scale.update(True)
    found = LossScale()
    found.restore(through(scale.state_dict()))
    state = {"scale": 2.0**17, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2, "_growth_tracker": 1}
    assert found.state_dict() == scale.state_dict() == state
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(scale.state_dict())
    assert scaler.state_dict() == scale.state_dict()
    found.update(True)
    assert found.scale == 2.0**18


@pytest.mark.parametrize("device", [0, 2**63 - 1, b"\x00\xff" * 8])
def test_a_random_stream_goes_on(device):
    def draw():
        return torch.randn(3).tolist(), [random.gauss(0, 1) for _ in range(3)], np.random.randn(3).tolist()

    stream = Stream(capture()._replace(device=device))
    with installed(stream):
        draw()  # an odd number from each, so that the half of a pair is kept
    saved = through(stream.state._asdict())
    with installed(stream):
        expected = draw()
    state = random_from_state(saved)
    assert state.device == device
    assert type(state.device) is type(device)
    assert type(state.python) is tuple
    assert type(state.python[1]) is tuple
    with installed(Stream(state)):
        assert draw() == expected
    with refused(ValueError, says="['torch'] 'numpy', 'device'"):
        random_from_state({"torch": state.torch})


def test_losses_keep_every_bit():
    losses = [0.1, -0.0, 5e-324, math.inf, -math.inf, math.nan, struct.unpack("d", b"\1\2\0\0\0\0\xf8\xff")[0]]
    found = through(losses_to_state(losses)).tolist()
    assert [struct.pack("d", each) for each in found] == [struct.pack("d", each) for each in losses]
    assert losses_to_state([]).tolist() == []


def test_a_copy_stays_as_it_is():
    tensor = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state = {"a": tensor, "again": [tensor, (np.ones(2), {1})], "random": capture()}
    found = copied(state)
    tensor.zero_()
    state["again"][1][0][:] = 0
    assert found["a"].eq(1).all()
    assert found["a"].is_contiguous(memory_format=torch.channels_last)
    assert found["again"][0] is found["a"]
    assert found["again"][1][0].tolist() == [1, 1]
    assert type(found["again"][1]) is tuple
    assert found["random"] is state["random"]
