"""The contract of optimizers: `OPTIMIZERS` has those of torch, in all their implementations, and one of a user's own.

An optimizer owes the engine one thing: it steps each parameter by that parameter's gradient, state and group, and by
nothing else. The engine tries that before any work (tests/planning/test_trial.py); who needs more has
`ModelTask(optimizer_scope="task")`. Below is what the engine owes in turn, shard by shard. Whole runs are held against
the plain loop by tests/promises/test_exact_optimizers.py, and updates in 16 bits by tests/host/test_blocked.py.
"""

import copy
import random
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from hydra_engine import Model, ModelTask
from hydra_engine.host.layout import ModelLayout
from hydra_engine.host.optimizer import TaskOptimizer
from hydra_engine.host.pool import HostPool
from hydra_engine.host.staging import StepStaging
from hydra_engine.native.library import VARIABLE
from tests.refused import refused


class Lion(torch.optim.Optimizer):
    """A user's own (Chen et al., 2023). Unlike torch's, it also decays parameters that have no gradient."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                if parameter.grad is None:
                    continue
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                parameter.sub_(mean.lerp(parameter.grad, 1 - group["betas"][0]).sign(), alpha=group["lr"])
                mean.lerp_(parameter.grad, 1 - group["betas"][1])


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, 0.1),
    "momentum": (partial(torch.optim.SGD, momentum=0.9, nesterov=True), 0.1),
    "momentum with decay": (partial(torch.optim.SGD, momentum=0.9, dampening=0.1, weight_decay=0.1), 0.1),
    "sgd, foreach": (partial(torch.optim.SGD, momentum=0.9, foreach=True), 0.1),
    "sgd, fused": (partial(torch.optim.SGD, momentum=0.9, fused=True), 0.1),
    "adam": (torch.optim.Adam, 0.01),
    "amsgrad": (partial(torch.optim.Adam, amsgrad=True), 0.01),
    "adam, foreach": (partial(torch.optim.Adam, foreach=True), 0.01),
    "adam, fused": (partial(torch.optim.Adam, fused=True), 0.01),
    "adam, a tensor as lr": (lambda params: torch.optim.Adam(params, lr=torch.tensor(0.02)), None),
    "adamw": (partial(torch.optim.AdamW, weight_decay=0.2), 0.01),
    "adamw, foreach": (partial(torch.optim.AdamW, foreach=True), 0.01),
    "adamw, fused": (partial(torch.optim.AdamW, fused=True), 0.01),
    "rmsprop": (partial(torch.optim.RMSprop, momentum=0.5), 0.01),
    "adagrad": (torch.optim.Adagrad, 0.05),
    "adagrad, fused": (partial(torch.optim.Adagrad, fused=True), 0.05),
    "adadelta": (torch.optim.Adadelta, 0.5),
    "adamax": (torch.optim.Adamax, 0.01),
    "asgd": (torch.optim.ASGD, 0.01),
    "nadam": (torch.optim.NAdam, 0.01),
    "radam": (torch.optim.RAdam, 0.01),
    "rprop": (torch.optim.Rprop, 0.01),
    "adafactor": (torch.optim.Adafactor, 0.01),
    "a user's own": (Lion, 0.01),
}

SCHEDULERS = {
    "none": None,
    "decay": partial(lr_scheduler.ExponentialLR, gamma=0.7),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=20),  # moves momentum or betas too
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=5),
}

NUM_STEPS = 6

every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)
# One of each kind of state, and of each of torch's implementations.
some_optimizers = pytest.mark.parametrize(
    "optimizer",
    [
        "momentum",
        "sgd, foreach",
        "amsgrad",
        "adam, a tensor as lr",
        "adamw, fused",
        "asgd",
        "adafactor",
        "a user's own",
    ],
)


def build():
    """Tied, frozen and odd-shaped parameters; two copies have the same bits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 4, bias=False), nn.Linear(4, 6)]
    layers[4].weight = layers[0].weight
    layers[2].weight.requires_grad_(False)
    layers[3].weight = nn.Parameter(layers[3].weight.detach().t().contiguous().t())
    return layers


def gradients_of(step, params):
    """The same gradients for both sides, laid out like their parameters; now and then a parameter receives none."""
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.empty_like(p).normal_(0, 3, generator=generator) for p in params]
    return [None if step % 3 == 2 and k % 2 == 1 else gradient for k, gradient in enumerate(drawn)]


def trainable(layers):
    return [parameter for parameter in nn.ModuleList(layers).parameters() if parameter.requires_grad]


def biases_apart(name):
    return {"lr": 0.002, "weight_decay": 0.05} if name.endswith("bias") else {}


class Plain:
    """The plain loop's part after backward()."""

    def __init__(self, optimizer, lr, *, lr_scheduler=None, max_grad_norm=None, param_groups=None):
        self.layers = build()
        self.params = trainable(self.layers)
        self.max_grad_norm = max_grad_norm
        params = self.params
        if param_groups is not None:
            named = nn.ModuleList(self.layers).named_parameters()
            options = [(param_groups(name), each) for name, each in named if each.requires_grad]
            params = [
                {**group, "params": [each for its, each in options if its == group]} for group in ({}, options[1][0])
            ]
        self.optimizer = optimizer(params) if lr is None else optimizer(params, lr=lr)
        self.scheduler = lr_scheduler(self.optimizer) if lr_scheduler else None

    def step(self, gradients):
        for parameter, gradient in zip(self.params, gradients, strict=True):
            parameter.grad = gradient
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.params, self.max_grad_norm)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()


class ByShard:
    """The engine's: gradients in the pool, a record at the commit, then the shards in any order."""

    def __init__(self, optimizer, lr, ends, seed=0, **options):
        self.layers = build()
        self.layout = ModelLayout(Model(self.layers), None)
        self.pool, self.staging = HostPool(self.layout), StepStaging()
        self.pool.open()
        self.task = ModelTask(self.layers, F.cross_entropy, [], lr, optimizer=optimizer, **options)
        self.optimizer = TaskOptimizer(self.task, self.layout)
        self.shards = self.layout.shards(ends)
        self.rng = random.Random(seed)

    def commit(self, gradients):
        for slot, gradient in zip(self.layout.trainable_slots(), gradients, strict=True):
            self.staging.has_gradient[slot.index] = gradient is not None
            if gradient is not None:
                self.pool.gradients.places[slot.index].copy_(gradient)
        record = self.optimizer.commit(self.staging, self.pool, epoch=0)
        self.optimizer.end_step(record)
        self.staging.clear()  # the next step may have begun before the updates are through
        return record

    def update(self, shard, record):
        self.optimizer.update(shard, self.pool, record)

    def step(self, gradients):
        record = self.commit(gradients)
        for shard in self.rng.sample(self.shards, len(self.shards)):
            self.update(shard, record)

    @property
    def state(self):
        return self.optimizer.optimizer.state_dict()


def step_both(plain, engine, steps):
    for step in steps:
        gradients = gradients_of(step, plain.params)
        engine.step(gradients)
        plain.step([gradient if gradient is None else gradient.clone() for gradient in gradients])
        assert_same_bits(engine.layers, plain.layers)


def assert_same_bits(actual, expected):
    for (name, a), (_, b) in zip(
        nn.ModuleList(actual).named_parameters(), nn.ModuleList(expected).named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name


def assert_same_state(actual, expected):
    """Of two optimizers' state dicts."""
    assert actual["state"].keys() == expected["state"].keys()
    for index, values in expected["state"].items():
        assert actual["state"][index].keys() == values.keys()
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(actual["state"][index][name]), torch.as_tensor(value)), name


# -- bits


@every_optimizer
def test_shards_in_any_order_give_the_bits_of_one_plain_step(optimizer):
    for seed, (ends, max_grad_norm) in enumerate((([1, 2, 3, 4, 5], 0.5), ([2, 5], None), ([5], 0.5))):
        plain = Plain(*OPTIMIZERS[optimizer], max_grad_norm=max_grad_norm)
        engine = ByShard(*OPTIMIZERS[optimizer], ends, seed, max_grad_norm=max_grad_norm)
        step_both(plain, engine, range(NUM_STEPS))
        assert_same_state(engine.state, plain.optimizer.state_dict())
        engine.pool.close()
        assert_same_bits(engine.layers, plain.layers)


@some_optimizers
def test_each_parameter_has_the_options_of_its_group(optimizer):
    factory, lr = OPTIMIZERS[optimizer]
    options = {"param_groups": biases_apart, "lr_scheduler": SCHEDULERS["decay"], "max_grad_norm": 0.5}
    plain, engine = Plain(factory, lr, **options), ByShard(factory, lr, [1, 3, 5], **options)
    assert len(plain.optimizer.param_groups) == 2
    step_both(plain, engine, range(NUM_STEPS))
    for own, its in zip(engine.optimizer.optimizer.param_groups, plain.optimizer.param_groups, strict=True):
        assert {**own, "params": None} == {**its, "params": None}
    engine.pool.close()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "a user's own"])
def test_schedules_are_the_plain_ones(optimizer, scheduler):
    factory, lr = OPTIMIZERS[optimizer]
    if scheduler == "one cycle" and optimizer == "sgd":
        factory = partial(torch.optim.SGD, momentum=0.5)
    options = {"lr_scheduler": SCHEDULERS[scheduler], "max_grad_norm": 0.5}
    plain, engine = Plain(factory, lr, **options), ByShard(factory, lr, [1, 3, 5], seed=1, **options)
    for step in range(NUM_STEPS):
        step_both(plain, engine, [step])
        assert engine.optimizer.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]
    engine.pool.close()


# -- calls


@some_optimizers
def test_a_step_is_called_once_for_each_shard_with_the_parameters_that_it_owns(optimizer, monkeypatch):
    """But for those that the native kernel makes, which is turned off here."""
    monkeypatch.setenv(VARIABLE, "0")
    engine = ByShard(*OPTIMIZERS[optimizer], [1, 2, 3, 5])
    cls = type(engine.optimizer.optimizer)
    calls, original = [], cls.step

    def step(self, closure=None):
        parameters = [each for group in self.param_groups for each in group["params"]]
        calls.append([(each, each.grad is not None) for each in parameters])
        assert closure is None
        return original(self)

    monkeypatch.setattr(cls, "step", step)
    names = {parameter: name for name, parameter in nn.ModuleList(engine.layers).named_parameters()}
    record = engine.commit(gradients_of(2, trainable(engine.layers)))  # every second parameter receives none
    found = []
    for shard in engine.shards:
        engine.update(shard, record)
        found.append([{names[parameter]: has_gradient for parameter, has_gradient in call} for call in calls])
        calls.clear()
    # torch's pass over a parameter without a gradient; another is shown it, as in the plain loop.
    owned = (
        {"0.weight": True, "0.bias": False},
        {"1.weight": True, "1.bias": False},
        {"2.bias": True},  # 2.weight is frozen
        {"3.weight": False, "4.bias": True},  # 4.weight is tied to layer 0
    )
    is_shown = optimizer == "a user's own"
    assert found == [[{name: has for name, has in each.items() if has or is_shown}] for each in owned]
    assert all(parameter.grad is None for parameter in names)
    engine.pool.close()


# -- state


@every_optimizer
def test_an_update_is_put_back_whole_and_made_again_with_the_same_bits(optimizer):
    """It leaves parameters of other shards alone; its state lies in DRAM, in memory of its own."""
    plain = Plain(*OPTIMIZERS[optimizer], max_grad_norm=0.5)
    engine = ByShard(*OPTIMIZERS[optimizer], [2, 5], max_grad_norm=0.5)
    for step in range(3):  # at the first there is no state
        gradients = gradients_of(step, plain.params)
        record = engine.commit(gradients)
        for shard in engine.shards:
            before = engine.optimizer.before(shard, engine.pool, record)
            weights = copy.deepcopy(nn.ModuleList(engine.layers).state_dict())
            state = copy.deepcopy(engine.state)
            engine.update(shard, record)
            before.put_back()
            assert_same_state(engine.state, state)
            assert all(torch.equal(v, weights[k]) for k, v in nn.ModuleList(engine.layers).state_dict().items())
            engine.update(shard, record)
            now = nn.ModuleList(engine.layers).state_dict()
            changed = {name for name, value in now.items() if not torch.equal(value, weights[name])}
            if step == shard.index == 0:
                assert changed == {
                    "0.weight",
                    "0.bias",
                    "1.weight",
                    "1.bias",
                    "4.weight",
                }  # 4.weight is tied to layer 0
            elif step == 0:
                assert changed == {"2.bias", "3.weight", "4.bias"}  # 2.weight is frozen
        plain.step([gradient if gradient is None else gradient.clone() for gradient in gradients])
        assert_same_bits(engine.layers, plain.layers)
        assert_same_state(engine.state, plain.optimizer.state_dict())
    others = [*trainable(engine.layers), *filter(torch.is_tensor, engine.pool.gradients.places)]
    taken = {each.untyped_storage().data_ptr() for each in others}
    for _, tensor in engine.optimizer.moving_tensors():
        assert tensor.device.type == "cpu"
        assert tensor.untyped_storage().data_ptr() not in taken
    engine.pool.close()


@some_optimizers
def test_a_state_dict_loads_into_a_plain_optimizer_which_goes_on_with_the_same_bits(optimizer):
    plain, engine = Plain(*OPTIMIZERS[optimizer]), ByShard(*OPTIMIZERS[optimizer], [2, 5], seed=1)
    for step in range(2):
        engine.step(gradients_of(step, plain.params))
    plain.optimizer.load_state_dict(copy.deepcopy(engine.state))
    for own, trained in zip(plain.layers, engine.layers, strict=True):
        own.load_state_dict(trained.state_dict())
    step_both(plain, engine, range(2, 4))
    engine.pool.close()


@some_optimizers
def test_what_is_saved_of_a_task_goes_on_in_another_with_the_same_bits(optimizer):
    factory, lr = OPTIMIZERS[optimizer]
    options = {"lr_scheduler": SCHEDULERS["decay"], "max_grad_norm": 0.5}
    plain, engine = Plain(factory, lr, **options), ByShard(factory, lr, [2, 5], **options)
    step_both(plain, engine, range(2))
    other = ByShard(factory, lr, [1, 3, 5], **options)
    for own, trained in zip(other.layers, engine.layers, strict=True):
        own.load_state_dict(trained.state_dict())
    other.optimizer.restore(copy.deepcopy(engine.optimizer.state()), copy.deepcopy(engine.optimizer.schedule()))
    step_both(plain, other, range(2, 4))
    for each in (engine, other):
        each.pool.close()


# -- refusals; what only a trial shows is refused in tests/planning/test_trial.py


def test_optimizer_that_runs_the_model_again_is_refused():
    with refused(says="LBFGS closure"):
        ByShard(torch.optim.LBFGS, 0.1, [5])


@pytest.mark.parametrize("result", [None, [], nn.Linear(1, 1)])
def test_factory_that_returns_no_optimizer_is_refused(result):
    with refused(TypeError, says=type(result).__name__):
        ByShard(lambda params: result, None, [5])
