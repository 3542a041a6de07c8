"""Between two steps the model is its user's: whatever a callback changes, the task goes on as the plain loop would."""

import copy
import ctypes
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask, PauseTask, StopTask
from hydra_engine.tasks.model_watch import ModelWatch
from partitioners import Presharded
from tests import reference, zoo
from tests.refused import refused

STEPS, EPOCHS = 4, 2


@dataclass(slots=True)
class Slotted:
    alpha: float = 1.0


class Gated(nn.Module):
    """With all kinds of attributes."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.gate, self.options, self.history, self.extra = 1.0, {"slope": 0.5}, [], None
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("scale", torch.ones(8))
        self.table = torch.ones(8)
        self.config = SimpleNamespace(
            slotted=Slotted(), nested={"x": [{"y": 1.0}]}, many=dict.fromkeys(range(150), 1.0)
        )

    def forward(self, x):
        y = self.norm(self.linear(x)) * self.gate * self.frozen * self.scale * self.table * self.options["slope"]
        y = y * self.config.slotted.alpha * self.config.nested["x"][0]["y"] * self.config.many[3]
        return y if self.extra is None else y + self.extra


class Net(nn.Module):
    """With a forward of its own, which is recorded."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop, self.gate = nn.Linear(8, 8), nn.Linear(8, 3), nn.Dropout(0.2), 1.0
        self.config, self.bend = SimpleNamespace(alpha=1.0), torch.tanh

    def forward(self, x):
        return self.b(self.drop(self.bend(self.a(x)) * self.gate * self.config.alpha * scaled(FACTORS["all"])))


FACTORS, FACTOR = {"all": 1.0}, 1.0


def scaled(value):
    return value * FACTOR


def model_of():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), Gated(), nn.Sequential(nn.Tanh(), nn.Linear(8, 3)))


def net_of():
    torch.manual_seed(1)
    return Net()


def on_step(call):
    return type("Calls", (Callback,), {"on_step": lambda self, report: call()})()


def batches(num=STEPS):
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(5, 8, generator=generator), torch.randint(3, (5,), generator=generator)) for _ in range(num)]


def task_of(model, *callbacks, name="a", **options):
    options = {"partitioner": Presharded([1, 3, 4]), "seed": 0, "lr": 0.1, **options}
    return ModelTask(model, F.cross_entropy, batches(), epochs=EPOCHS, name=name, callbacks=callbacks, **options)


def train(*tasks, num_devices=1):
    orchestra = ModelOrchestrator(tasks, devices=[EmulatedDevice("1MiB") for _ in range(num_devices)])
    orchestra.verbose = 0
    return orchestra.train_models().tasks


def plainly(model, loss=F.cross_entropy, **options):
    with torch.random.fork_rng():
        return reference.train(model, loss, batches(), seed=0, **{"lr": 0.1, "epochs": EPOCHS, **options})


def assert_as_plain(report, model, change, made=model_of, **options):
    """The losses, weights and buffers are those of plain PyTorch with the same change after each step."""
    expected = made()
    assert report.losses == plainly(expected, on_step=lambda: change(expected), **options).losses, report.error
    assert all(torch.equal(value, zoo.state(model)[name]) for name, value in zoo.state(expected).items())


def set_data(parameter, value):
    parameter.data = value


@torch.no_grad()
def swap(model):
    """Put other weights in and back, as who evaluates an average of them."""
    kept = [each.data.clone() for each in model.parameters()]
    for each in model.parameters():
        each.data.copy_(torch.zeros_like(each))
    for each, before in zip(model.parameters(), kept, strict=True):
        each.data.copy_(before)


CHANGES = {
    "nothing": lambda m: None,
    "dropout": lambda m: setattr(m[1], "p", 0.5),
    "nested": lambda m: setattr(m[2].norm, "momentum", 0.5),
    "plain": lambda m: setattr(m[2], "gate", m[2].gate + 0.5),
    "new": lambda m: setattr(m[2], "other", 2.0),
    "none": lambda m: setattr(m[2], "extra", torch.ones(8)),
    "dict": lambda m: m[2].options.update(slope=0.2),
    "list": lambda m: m[2].history.append(1),
    "dict of many": lambda m: m[2].config.many.update({3: m[2].config.many[3] * 0.5}),
    "nested dict": lambda m: m[2].config.nested["x"][0].update(y=m[2].config.nested["x"][0]["y"] * 0.5),
    "slots": lambda m: setattr(m[2].config.slotted, "alpha", m[2].config.slotted.alpha * 0.5),
    "object": lambda m: setattr(m[2].config, "nested", {"x": [{"y": 2.0}]}),
    "tensor": lambda m: setattr(m[2], "table", torch.full((8,), 2.0)),
    "tensor in place": lambda m: m[2].table.mul_(2),
    "eval": lambda m: m.eval(),
    "eval of one": lambda m: m[2].norm.eval(),
    "evaluates": lambda m: (m.eval(), m(torch.ones(2, 8)), m.train()),
    "freeze": lambda m: m[0].requires_grad_(False),
    "freeze and thaw": lambda m: m[3].requires_grad_(not m[3][1].weight.requires_grad),
    "hook": lambda m: m[1].register_forward_hook(lambda module, args, output: output * 2),
    "class": lambda m: setattr(m[3][0], "__class__", nn.Sigmoid),
    "buffer": lambda m: setattr(m[2], "scale", m[2].scale * 2),
    "buffer in place": lambda m: m[2].scale.mul_(2),
    "buffer, .data": lambda m: m[2].scale.data.mul_(2),
    "buffer, by NumPy": lambda m: np.asarray(m[2].scale).put(1, 3),
    "buffer, by DLPack": lambda m: torch.from_dlpack(m[2].scale)[3:4].fill_(3),
    "buffer, by its address": lambda m: ctypes.memset(m[2].scale.data_ptr(), 0, 4),
    "forward in train()": lambda m: m(torch.ones(5, 8)),
    "weight": torch.no_grad()(lambda m: m[0].weight.mul_(0.5)),
    "last weight": torch.no_grad()(lambda m: m[3][1].bias.zero_()),
    "state dict": lambda m: m.load_state_dict(model_of().state_dict()),
    "clamps": lambda m: [each.data.clamp_(-0.05, 0.05) for each in m.parameters()],
    "swaps": swap,
    "one element": lambda m: m[3][1].weight.data.view(-1)[5].fill_(3),
    "out=": torch.no_grad()(lambda m: torch.add(m[0].bias, 1, out=m[0].bias.data)),
    "many at once": lambda m: torch._foreach_mul_([each.data for each in m.parameters()], 0.5),
    "new data": lambda m: set_data(m[0].weight, torch.ones(8, 8)),
    "by NumPy": lambda m: m[0].weight.detach().numpy().put(11, 3.0),
    "frozen": torch.no_grad()(lambda m: m[2].frozen.mul_(0.5)),
    "frozen, .data": lambda m: m[2].frozen.data.mul_(0.5),
    "new frozen": lambda m: set_data(m[2].frozen, torch.full((8,), 2.0)),
    "frozen, by NumPy": lambda m: m[2].frozen.data.numpy().put(1, 3),
    "teacher": lambda m: m[2].frozen.data.mul_(0.9).add_(m[3][1].weight.data[0], alpha=0.1),
    "draws": torch.no_grad()(lambda m: m[0].weight.add_(torch.randn(8, 8))),
    "zero_grad": lambda m: m.zero_grad(),
}
NET = (
    "dropout",
    "tensor in place",
    "eval",
    "freeze and thaw",
    "hook",
    "buffer",
    "clamps",
    "new data",
    "teacher",
    "draws",
)
WAYS = [{}, {"early_release": True}, {"optimizer_scope": "task"}]
WAYS += [{"accumulation_steps": 2}, {"max_retries": 1, "ema_decay": 0.9}]


@pytest.mark.parametrize("what", [pytest.param(each, marks=[pytest.mark.rest] * (each not in NET)) for each in CHANGES])
def test_what_a_callback_changes_counts_from_the_next_step_on(what):
    """Another task in its run, without any, is not disturbed."""
    model, other = model_of(), model_of()
    reports = train(task_of(model, on_step(lambda: CHANGES[what](model))), task_of(other, name="b"), num_devices=2)
    assert_as_plain(reports["a"], model, CHANGES[what])
    assert_as_plain(reports["b"], other, CHANGES["nothing"])


@pytest.mark.rest
@pytest.mark.parametrize("what", NET)
@pytest.mark.parametrize("options", WAYS[1:], ids=str)
def test_whatever_the_options(what, options):
    model = model_of()
    report = train(task_of(model, on_step(lambda: CHANGES[what](model)), **options))["a"]
    assert_as_plain(report, model, CHANGES[what], accumulation_steps=options.get("accumulation_steps", 1))


@pytest.mark.parametrize("split_weights", [False, pytest.param(True, marks=pytest.mark.rest)])
@pytest.mark.parametrize("what", ["weight", pytest.param("clamps", marks=pytest.mark.rest), "new data"])
def test_casts_follow(what, split_weights):
    def made():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8), nn.Linear(8, 3))

    model, options = made(), {"precision": "bfloat16"}
    task = task_of(model, on_step(lambda: CHANGES[what](model)), split_weights=split_weights, **options)
    assert_as_plain(train(task)["a"], model, CHANGES[what], made, **options)


OF_NET = {
    "dropout": lambda m: setattr(m.drop, "p", 0.5),
    "attribute": lambda m: setattr(m, "gate", m.gate + 0.5),
    "eval": lambda m: m.eval(),
    "freeze": lambda m: m.a.requires_grad_(False),
    "function": lambda m: setattr(m, "bend", torch.relu),
    "object": lambda m: setattr(m.config, "alpha", m.config.alpha * 0.5),
    "in a global": lambda m: FACTORS.update(all=FACTORS["all"] * 0.5),
    "global": lambda m: globals().update(FACTOR=FACTOR * 0.5),
}


@pytest.mark.parametrize("what", OF_NET)
def test_a_forward_that_was_recorded_is_recorded_again(what, monkeypatch):
    def made():
        monkeypatch.setitem(FACTORS, "all", 1.0)
        monkeypatch.setitem(globals(), "FACTOR", 1.0)
        return net_of()

    model = made()
    task = task_of(model, on_step(lambda: OF_NET[what](model)), partitioner=Presharded([1, 2]))
    assert_as_plain(train(task)["a"], model, OF_NET[what], made)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_loss_may_read_what_a_callback_sets(num_devices):
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = SimpleNamespace(weight=0.0)

        def forward(self, output, target):
            return F.cross_entropy(output, target) + self.config.weight * output.pow(2).mean()

    def anneal(loss):
        loss.config.weight += 0.1

    loss, plain, model = Weighted(), Weighted(), model_of()
    task = task_of(model, on_step(lambda: anneal(loss)))
    task.loss_fn = loss if num_devices == 1 else lambda output, target: loss(output, target)
    report = train(task, num_devices=num_devices)["a"]
    assert_as_plain(report, model, lambda _: anneal(plain), loss=plain)


@pytest.mark.parametrize("options", WAYS[:3], ids=str)
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_rate_that_a_callback_sets_holds_from_the_next_step_on(options, scheduled):
    """Through the optimizer that the factory made last, and after the schedule, as in the plain loop."""
    made = []

    def factory(params, lr):
        made.append(torch.optim.SGD(params, lr=lr, momentum=0.9))
        return made[-1]

    def halve(*_):
        made[-1].param_groups[0]["lr"] *= 0.5

    model, both = model_of(), {"optimizer": factory}
    if scheduled:
        both["lr_scheduler"] = lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9)
    task = task_of(model, on_step(halve), **both, **options)
    assert_as_plain(train(task, num_devices=2)["a"], model, halve, **both)


REFUSED = {
    "layer": (lambda m: setattr(m[2], "norm", nn.Identity()), "'norm' of the modules of 2 (Gated)"),
    "parameter": (lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(8, 8))), "'weight' of the parameters of 0"),
    "no parameter": (lambda m: setattr(m[0], "bias", None), "'bias' of the parameters of 0 (Linear)"),
    "more": (lambda m: m[1].register_parameter("w", nn.Parameter(torch.ones(1))), "'w' of the parameters of 1"),
    "shape": (lambda m: set_data(m[0].bias, torch.ones(4)), "gave parameter '0.bias' the shape (4,)"),
    "buffer": (lambda m: setattr(m[2], "scale", torch.ones(1)), "'scale' of the buffers of 2 (Gated)"),
    "thaw": (lambda m: m[2].frozen.requires_grad_(True), "requires_grad of parameter '2.frozen', which was frozen"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_taken_is_refused_by_name(what):
    change, text = REFUSED[what]
    model, other = model_of(), model_of()
    reports = train(task_of(model, on_step(lambda: change(model))), task_of(other, name="b"))
    assert (reports["a"].status, reports["a"].steps) == ("failed", 1)
    assert "a: its callback Calls, in on_step," in reports["a"].error
    assert text in reports["a"].error
    assert_as_plain(reports["b"], other, CHANGES["nothing"])


@pytest.mark.parametrize("is_written", [True, False])
def test_a_write_past_autograd_to_a_frozen_weight_of_two_tasks_is_refused_and_a_read_is_not(is_written):
    base = nn.Linear(8, 8).requires_grad_(False)
    call = (lambda: base.weight.data.mul_(0.5)) if is_written else (lambda: base.weight.mul(0.5))
    models = [nn.Sequential(base, nn.Linear(8, 3)) for _ in range(2)]
    tasks = [task_of(model, name=name, partitioner=Presharded([2])) for model, name in zip(models, "ab", strict=True)]
    tasks[0].callbacks = [on_step(call)]
    reports = train(*tasks)
    assert [reports[name].status for name in "ab"] == ["failed" if is_written else "finished", "finished"]
    assert (
        "wrote to parameter '0.weight', which is frozen and another task's" in str(reports["a"].error)
    ) == is_written


@pytest.mark.parametrize("hook", ["on_validation", "on_epoch", "on_epoch_begin"])
def test_in_every_call(hook):
    """Also before the first epoch: freezing there leaves the parameter in the optimizer, for a later call."""

    def change(report, epoch=None):
        model[0].requires_grad_(not model[0].weight.requires_grad)
        model[2].scale.mul_(2)
        model[3][1].weight.data.mul_(0.5)

    model, expected = model_of(), model_of()
    callback = type("Calls", (Callback,), {hook: lambda self, *arguments: change(*arguments)})()
    report = train(task_of(model, callback, validation=batches(1)))["a"]
    assert (report.status, report.steps) == ("finished", STEPS * EPOCHS)
    mine, model, losses = model, expected, []  # which `change` changes from now on
    if hook == "on_epoch_begin":
        change(None)
    with torch.random.fork_rng():
        for k in range(EPOCHS):
            seed = {"seed": 0} if k == 0 else {"seed": None}
            losses += _epoch(expected, **seed)
            if hook != "on_epoch_begin" or k + 1 < EPOCHS:
                change(None)
    assert report.losses == losses
    assert all(torch.equal(value, zoo.state(mine)[name]) for name, value in zoo.state(expected).items())


def _epoch(model, seed):
    """One epoch of the plain loop, which goes on with torch's stream where there is no seed."""
    if seed is not None:
        torch.manual_seed(seed)
    losses, parameters = [], list(model.parameters())
    for x, y in batches():
        for each in parameters:
            each.grad = None
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
        torch.optim.SGD([each for each in parameters if each.grad is not None], lr=0.1).step()
    return losses


def test_a_callback_that_reads_no_model_is_called_before_the_next_step():
    calls, model = [], model_of()

    class Counts(Callback):
        reads_model = False

        def on_step(self, report):
            calls.append((report.steps, loss_weight[0]))
            loss_weight[0] += 0.1

    def loss(output, target):
        return F.cross_entropy(output, target) + loss_weight[0] * output.pow(2).mean()

    loss_weight = [0.0]
    task = task_of(model, Counts())
    task.loss_fn = loss
    report = train(task, num_devices=2)["a"]
    assert [steps for steps, _ in calls] == list(range(1, STEPS * EPOCHS + 1))
    loss_weight[0] = 0.0

    def add(_):
        loss_weight[0] += 0.1

    assert_as_plain(report, model, add, loss=loss)


def exchange(a, b):
    a.data, b.data = b.data, a.data


def test_weights_that_are_exchanged_within_a_call_have_each_others_values():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    plain = copy.deepcopy(model)
    report = train(task_of(model, on_step(lambda: exchange(model[0].weight, model[2].weight))))["a"]
    result = plainly(plain, on_step=lambda: exchange(plain[0].weight, plain[2].weight))
    assert report.losses == result.losses
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())


def test_weights_that_a_callback_exchanges_for_others_and_keeps_are_refused():
    """What it keeps lies where the parameter is trained."""
    model = model_of()
    kept = [torch.zeros_like(each) for each in model.parameters()]

    def swap():
        for parameter, other in zip(model.parameters(), kept, strict=True):
            exchange(parameter, other)

    with refused(task="a", layer="0.weight", says="clone copy_"):
        train(task_of(model, on_step(swap)))


def test_gradients_of_a_callbacks_own_backward_are_dropped():
    model = model_of()
    loss = F.cross_entropy

    def backward(model):
        x, y = batches()[0]
        with torch.random.fork_rng():
            loss(model(x), y).backward()

    assert_as_plain(train(task_of(model, on_step(lambda: backward(model))))["a"], model, backward)


def test_buffers_and_weights_in_a_callback_are_those_of_its_step():
    model, plain, seen, found = model_of(), model_of(), [], []
    train(task_of(model, on_step(lambda: seen.append(copy.deepcopy(model.state_dict())))))
    plainly(plain, on_step=lambda: found.append(copy.deepcopy(plain.state_dict())))
    for mine, expected in zip(seen, found, strict=True):
        assert all(torch.equal(value, expected[name]) for name, value in mine.items())


class Binds(nn.Module):
    """Binds tensors of other shapes and strides to its buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, 8))
        self.register_buffer("table", torch.ones(8, 8))

    def forward(self, x):
        self.bank = torch.cat([self.bank, x.detach()])
        scale = 1.0 if self.table.is_contiguous() else 1.5
        self.table = self.table.T
        return (x - self.bank.mean(0)) * scale


def binding():
    model = model_of()
    return nn.Sequential(*model[:2], Binds(), model[3])


@pytest.mark.parametrize("options", [{}, {"read_ahead": False}], ids=str)
@pytest.mark.parametrize("change", [CHANGES["nothing"], lambda m: m[2].bank.mul_(0.5)], ids=["nothing", "in place"])
def test_what_a_forward_binds_to_a_buffer_is_no_change_of_a_callbacks(change, options):
    model = binding()
    reports = train(task_of(model, on_step(lambda: change(model)), **options))
    assert_as_plain(reports["a"], model, change, binding)
    assert model[2].bank.shape == (5 * STEPS * EPOCHS, 8)


def test_a_callback_may_call_what_it_has_compiled():
    model, seen = model_of(), []
    compiled = torch.compile(model, fullgraph=True, backend="eager")

    def look():
        model.eval()
        with torch.no_grad():
            seen.append(compiled(torch.ones(2, 8)))
        model.train()

    report = train(task_of(model, on_step(look)))["a"]
    assert (report.status, len(seen)) == ("finished", STEPS * EPOCHS)


def test_one_that_stops_the_task_may_change_the_model():
    model = model_of()

    def stop():
        model[1].p = 0.5
        model[0].weight.data.zero_()
        raise StopTask

    report = train(task_of(model, on_step(stop)))["a"]
    assert (report.status, model[1].p, model[0].weight.abs().sum()) == ("stopped", 0.5, 0)


def test_what_is_as_it_was_has_not_changed():
    model = model_of()
    watch = ModelWatch(model)
    model[2].options, model[2].history = {"slope": 0.5}, []
    assert not watch.has_changed()
    model[2].history.append(1)
    assert watch.has_changed()
    assert not watch.has_changed()


class Swaps(Callback):
    """Freezes and scales at its second call, and remembers how often it was called."""

    def __init__(self, model, is_kept=True):
        self.model, self.num_calls = model, 0
        if is_kept:
            self.state_dict = lambda: {"num_calls": self.num_calls}
            self.load_state_dict = lambda state: vars(self).update(state)

    def on_step(self, report):
        self.num_calls += 1
        self.model[1].p = 0.1 * self.num_calls
        if self.num_calls == 2:
            self.model[0].requires_grad_(False)
            self.model[2].frozen.data.mul_(0.5)
        if report.steps == self.stops_at:
            raise PauseTask

    stops_at = None


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_resume_goes_on_with_what_callbacks_have_changed(is_kept, tmp_path):
    whole = model_of()
    expected = train(task_of(whole, Swaps(whole)))["a"]
    first = model_of()
    callback = Swaps(first, is_kept)
    callback.stops_at = 3
    orchestra = ModelOrchestrator([task_of(first, callback)], devices=[EmulatedDevice("1MiB")], checkpoint_dir=tmp_path)
    orchestra.verbose = 0
    assert orchestra.train_models().tasks["a"].status == "paused"
    second = model_of()
    task = task_of(second, Swaps(second, is_kept))
    orchestra = ModelOrchestrator([task], devices=[EmulatedDevice("1MiB")], checkpoint_dir=tmp_path)
    orchestra.verbose = 0
    report = orchestra.train_models(resume=True)
    if is_kept:
        assert report.tasks["a"].losses == expected.losses
        assert all(torch.equal(value, zoo.state(second)[name]) for name, value in zoo.state(whole).items())
        assert not any("callback" in message for message in report.messages)
    else:
        start = "a: a callback has changed the model, and Swaps has no state_dict()"
        assert any(message.startswith(start) for message in report.messages)


class Reads(Callback):
    def on_step(self, report):
        pass


class ReadsNothing(Reads):
    reads_model = False


@pytest.mark.parametrize(("kind", "is_told"), [(Reads, True), (ReadsNothing, False)])
def test_a_lone_task_that_waits_for_updates_long_is_told_of_the_switch(monkeypatch, kind, is_told):
    monkeypatch.setattr("hydra_engine.run.host_work.LEAST_WAITED_S", 0.0)
    monkeypatch.setattr("hydra_engine.run.host_work.MOST_WAITED", 0.0)
    orchestra = ModelOrchestrator([task_of(model_of(), kind())], devices=[EmulatedDevice("1MiB")])
    orchestra.verbose = 0
    messages = orchestra.train_models().messages
    assert [kind.__name__ in each and "reads_model = False" in each for each in messages] == [True] * is_told
