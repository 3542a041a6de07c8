"""A callback that changes the model is refused by name: devices compute with copies, which would not follow."""

import copy
import ctypes
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask, StopTask
from hydra_engine.tasks.model_watch import ModelWatch
from partitioners import Presharded
from tests import reference, zoo

# The check of what callbacks do: in `make test` are the tests that carry `net`.
pytestmark = pytest.mark.rest

STEPS, EPOCHS = 4, 2


class Gated(nn.Module):
    """With all kinds of attributes."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.gate, self.options, self.history, self.names = 1.0, {"slope": 0.1}, [], {"a"}
        self.extra = None
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("late", None)
        self.table = torch.ones(3)

    def forward(self, x):
        return self.norm(self.linear(x)) * self.gate * self.frozen * self.scale


def model_of():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), Gated(), nn.Sequential(nn.Tanh(), nn.Linear(8, 3)))


class Calls(Callback):
    """Calls a function after the second step, or in another call: as the first epoch or the second begins."""

    def __init__(self, call, hook="on_step", epoch=0):
        self.call, self.hook, self.epoch = call, hook, epoch

    def _call(self, hook):
        if self.hook == hook:
            self.call()

    def on_step(self, report):
        if report.steps == 2:
            self._call("on_step")

    def on_epoch_begin(self, report, epoch):
        if epoch == self.epoch:
            self._call("on_epoch_begin")

    def on_validation(self, report):
        self._call("on_validation")

    def on_epoch(self, report, epoch):
        self._call("on_epoch")

    def on_task_end(self, report):
        self._call("on_task_end")


def batches(num=STEPS):
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(5, 8, generator=generator), torch.randint(3, (5,), generator=generator)) for _ in range(num)]


def task_of(model, *callbacks, name="a", **options):
    options = {"partitioner": Presharded([1, 3, 4]), "seed": 0, "validation": batches(1), **options}
    return ModelTask(model, F.cross_entropy, batches(), 0.1, EPOCHS, name=name, callbacks=callbacks, **options)


def train(*tasks, num_devices=1):
    orchestra = ModelOrchestrator(tasks, devices=[EmulatedDevice("1MiB") for _ in range(num_devices)])
    orchestra.verbose = 0
    return orchestra.train_models().tasks


def trained_beside_another(model, *callbacks, **options):
    """The report of a task with these callbacks; another task in its run, without any, is not disturbed."""
    reports = train(task_of(model, *callbacks, **options), task_of(other := model_of(), name="b"))
    assert_as_plain(reports["b"], other)
    return reports["a"]


def plainly(model, **options):
    with torch.random.fork_rng():
        return reference.train(model, F.cross_entropy, batches(), seed=0, **{"lr": 0.1, "epochs": EPOCHS, **options})


def assert_as_plain(report, model, **options):
    """The losses, weights and buffers are those of plain PyTorch."""
    expected = model_of()
    assert report.losses == plainly(expected, **options).losses, report.error
    assert_equal(model, expected)


def assert_equal(model, expected):
    assert all(torch.equal(value, zoo.state(model)[name]) for name, value in zoo.state(expected).items())


def set_data(parameter, value):
    parameter.data = value


def no_grad(write):
    with torch.no_grad():
        write()


# What a callback does to the model, and what is said of it.
CHANGES = {
    "dropout": (lambda m: setattr(m[1], "p", 0.5), "set p of 1 (Dropout) from 0.2 to 0.5"),
    "nested": (lambda m: setattr(m[2].norm, "momentum", 0.5), "set momentum of 2.norm (BatchNorm1d)"),
    "plain": (lambda m: setattr(m[2], "gate", 2.0), "set gate of 2 (Gated) from 1.0 to 2.0"),
    "new": (lambda m: setattr(m[2], "other", 2.0), "set other of 2 (Gated) from 'nothing' to 2.0"),
    "gone": (lambda m: delattr(m[2], "gate"), "set gate of 2 (Gated) from 1.0 to 'nothing'"),
    "none": (lambda m: setattr(m[2], "extra", torch.ones(2)), "set extra of 2 (Gated) from None to tensor"),
    "dict": (lambda m: m[2].options.update(slope=0.2), "set options of 2 (Gated) from {'slope': 0.1} to"),
    "list": (lambda m: m[2].history.append(1), "set history of 2 (Gated)"),
    "set": (lambda m: m[2].names.add("b"), "set names of 2 (Gated)"),
    "tensor": (lambda m: setattr(m[2], "table", torch.zeros(3)), "set table of 2 (Gated)"),
    "eval": (lambda m: m.eval(), "set training of "),
    "eval of one": (lambda m: m[2].norm.eval(), "set training of 2.norm (BatchNorm1d) from True to False"),
    "freeze": (lambda m: m[0].requires_grad_(False), "set requires_grad of parameter '0.weight' from True to False"),
    "thaw": (lambda m: m[2].frozen.requires_grad_(True), "set requires_grad of parameter '2.frozen' from False"),
    "hook": (lambda m: m[1].register_forward_hook(print), "a hook (_forward_hooks) of 1 (Dropout)"),
    "layer": (lambda m: setattr(m[2], "norm", nn.Identity()), "changed which modules 2 (Gated) has"),
    "first layer": (lambda m: m.__setitem__(1, nn.Dropout(0.5)), "changed which modules the model (Sequential) has"),
    "class": (lambda m: setattr(m[3][0], "__class__", nn.ReLU), "made 3.0 (Tanh) a ReLU"),
    "parameter": (lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(8, 8))), "replaced parameter '0.weight'"),
    "no parameter": (lambda m: setattr(m[0], "bias", None), "took a parameter or buffer away"),
    "more": (lambda m: m[1].register_parameter("w", nn.Parameter(torch.ones(1))), "which parameters 1 (Dropout)"),
    "buffer": (lambda m: setattr(m[2], "scale", torch.zeros(8)), "replaced buffer '2.scale'"),
    "late buffer": (lambda m: setattr(m[2], "late", torch.zeros(8)), "replaced buffer '2.late'"),
    "buffer in place": (lambda m: m[2].scale.zero_(), "wrote to buffer '2.scale'"),
    "forward in train()": (lambda m: m(torch.ones(5, 8)), "wrote to buffer '2.norm."),
    "weight": (lambda m: no_grad(lambda: m[0].weight.mul_(0.5)), "wrote to parameter '0.weight'"),
    "last weight": (lambda m: no_grad(lambda: m[3][1].bias.zero_()), "wrote to parameter '3.1.bias'"),
    "frozen weight": (lambda m: no_grad(lambda: m[2].frozen.mul_(0.5)), "wrote to parameter '2.frozen'"),
    "state dict": (lambda m: m.load_state_dict(model_of().state_dict()), "wrote to parameter '0.weight'"),
    "data": (lambda m: m[0].weight.data.mul_(0.5), "wrote to parameter '0.weight' (aten.mul_.Tensor)"),
    "data of all": (lambda m: [p.data.clamp_(-0.01, 0.01) for p in m.parameters()], "wrote to parameter"),
    "new data": (lambda m: set_data(m[0].weight, torch.ones(8, 8)), "gave parameter '0.weight' other memory (.data)"),
}  # fmt: skip


NET = ("dropout", "hook", "buffer", "data", "new data")


@pytest.mark.parametrize("what", [pytest.param(each, marks=[pytest.mark.net] * (each in NET)) for each in CHANGES])
def test_what_a_callback_changes_is_refused_by_name(what):
    change, text = CHANGES[what]
    model = model_of()
    report = trained_beside_another(model, Calls(lambda: change(model)))
    assert (report.status, report.steps) == ("failed", 2)
    assert "a: its callback Calls, in on_step," in report.error
    assert text in report.error
    assert "end the task there (raise StopTask) and go on with a new ModelTask" in report.error
    assert isinstance(report.exception, ValueError)


@pytest.mark.parametrize(
    ("hook", "what"), [("on_validation", "dropout"), ("on_epoch", "dropout"), ("on_epoch_begin", "freeze")]
)
def test_in_every_call(hook, what):
    change, text = CHANGES[what]
    model = model_of()
    report = trained_beside_another(model, Calls(lambda: change(model), hook, epoch=1))
    assert (report.status, report.steps) == ("failed", STEPS)
    assert f"in {hook}, {text}" in report.error


@pytest.mark.net
def test_at_the_first_epochs_begin_it_is_refused_before_any_work():
    model = model_of()
    change = Calls(lambda: model[0].requires_grad_(False), "on_epoch_begin")
    text = r"its callback, in on_epoch_begin, set requires_grad of parameter '0\.weight'"
    with pytest.raises(ValueError, match=text):
        train(task_of(model, change))


@pytest.mark.net
def test_weights_may_be_written_before_the_first_epoch():
    model = model_of()
    with torch.no_grad():
        model[0].weight.zero_()
    load = Calls(lambda: model.load_state_dict(model_of().state_dict()), "on_epoch_begin")
    assert_as_plain(train(task_of(model, load))["a"], model)


def test_a_module_that_is_no_sequential_is_watched_itself():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.b(self.a(x))

    model = Net()
    change = Calls(lambda: setattr(model, "b", nn.Linear(8, 3)))
    report = trained_beside_another(model, change, partitioner=Presharded([1, 2]))
    assert "changed which modules the model (Net) has" in report.error


def test_a_loss_is_watched():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = 1.0

        def forward(self, output, target):
            return self.weight * F.cross_entropy(output, target)

    loss = Weighted()
    task = task_of(model_of(), Calls(lambda: setattr(loss, "weight", 2.0)))
    task.loss_fn = loss
    report = train(task, task_of(model_of(), name="b"))["a"]
    assert "set weight of the model (Weighted) from 1.0 to 2.0" in report.error


def clamps(model):
    for each in model.parameters():
        each.data.clamp_(-100, 100)  # which changes nothing yet


def swaps(model):
    """Put other weights in and back, as who evaluates an average of them."""
    kept = [each.data.clone() for each in model.parameters()]
    for each in model.parameters():
        each.data.copy_(torch.zeros_like(each))
    for each, before in zip(model.parameters(), kept, strict=True):
        each.data.copy_(before)


# Writes that autograd's counters do not see, or that are over before anybody compares.
WRITES = {
    "clamps": (clamps, "wrote to parameter '0.weight' (aten.clamp_.default)"),
    "swaps": (swaps, "wrote to parameter '0.weight' (aten.copy_.default)"),
    "one element": (lambda m: m[3][1].weight.data.view(-1)[5].fill_(3), "wrote to parameter '3.1.weight'"),
    "out=": (lambda m: torch.add(m[0].bias, 1, out=m[0].bias.data), "wrote to parameter '0.bias' (aten.add.out)"),
    "many at once": (lambda m: torch._foreach_mul_([p.data for p in m.parameters()], 0.5), "parameter '0.weight'"),
    "plain": (lambda m: no_grad(m[0].weight.zero_), "wrote to parameter '0.weight'"),
    "frozen": (lambda m: m[2].frozen.data.fill_(2), "wrote to parameter '2.frozen'"),
    "buffer": (lambda m: m[2].scale.data.fill_(2), "wrote to buffer '2.scale'"),
    "statistics": (lambda m: m[2].norm.running_mean.data.fill_(1), "wrote to buffer '2.norm.running_mean'"),
    "new data": (lambda m: set_data(m[0].weight, torch.ones(8, 8)), "gave parameter '0.weight' other memory (.data)"),
    "new frozen": (lambda m: set_data(m[2].frozen, torch.ones(8)), "gave parameter '2.frozen' other memory (.data)"),
    "new buffer": (lambda m: set_data(m[2].scale, torch.ones(8)), "gave buffer '2.scale' other memory (.data)"),
    "attribute": (lambda m: setattr(m[1], "p", 0.5), "set p of 1 (Dropout)"),
    "frozen, by NumPy": (lambda m: m[2].frozen.data.numpy().put(1, 3), "the memory of parameter '2.frozen'"),
    "buffer, by NumPy": (lambda m: np.asarray(m[2].scale).put(1, 3), "wrote to the memory of buffer '2.scale'"),
    "buffer, by DLPack": (lambda m: torch.from_dlpack(m[2].scale)[3:4].fill_(3), "wrote to buffer '2.scale'"),
    "buffer, by its address": (lambda m: ctypes.memset(m[2].scale.data_ptr(), 1, 4), "the memory of buffer '2.scale'"),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"early_release": True}, {"optimizer_device": "device"}], ids=str)
@pytest.mark.parametrize("what", WRITES)
def test_writes_are_seen_whatever_goes_on(what, options):
    change, text = WRITES[what]
    model = model_of()
    report = trained_beside_another(model, Calls(lambda: change(model)), **options)
    assert report.status == "failed"
    assert text in report.error


@pytest.mark.net
def test_writes_through_numpy_are_seen_in_small_models():
    model = model_of()
    report = trained_beside_another(model, Calls(lambda: model[0].weight.detach().numpy().put(11, 3.0)))
    assert "wrote to the memory of parameter '0.weight'" in report.error


def test_writes_through_numpy_are_seen_wherever_they_are():
    model = nn.Sequential(nn.Linear(8, 4000), nn.Tanh(), nn.Linear(4000, 8), nn.Linear(8, 3))
    change = Calls(lambda: model[2].weight.detach().numpy()[:, 3999].__setitem__(6, 3.0))
    report = trained_beside_another(model, change)
    assert "wrote to the memory of parameter '2.weight'" in report.error


def test_new_memory_is_seen_while_an_optimizer_may_give_others():
    class Own(torch.optim.SGD):
        pass

    model = model_of()
    change = Calls(lambda: set_data(model[0].weight, torch.ones(8, 8)))
    report = trained_beside_another(model, change, optimizer=Own, early_release=True)
    assert "gave parameter '0.weight' other memory (.data)" in report.error


def test_a_callback_may_call_what_it_has_compiled():
    model, seen = model_of(), []
    compiled = torch.compile(model, fullgraph=True, backend="eager")

    def look():
        model.eval()
        with torch.no_grad():
            seen.append(compiled(torch.ones(2, 8)))
        model.train()

    report = train(task_of(model, Calls(look)))["a"]
    assert (report.status, len(seen)) == ("finished", 1)


def test_a_callback_may_write_to_all_else():
    """A model of its own, gradients, copies of weights; and add a task, whose planning is not watched."""
    model, mine = model_of(), model_of()
    added = task_of(model_of(), name="b")

    class Averages(Callback):
        def on_step(self, report):
            if report.steps == 1:
                orchestra.add_task(added)
            for own, each in zip(mine.parameters(), model.parameters(), strict=True):
                own.data.mul_(0.9).add_(each.data, alpha=0.1)
            F.cross_entropy(mine(batches(1)[0][0]), batches(1)[0][1]).backward()

    orchestra = ModelOrchestrator([task_of(model, Averages())], devices=[EmulatedDevice("1MiB")])
    orchestra.verbose = 0
    report = orchestra.train_models()
    for name, trained in (("a", model), ("b", added.model)):
        assert_as_plain(report.tasks[name], trained)


LOOKS = {
    "nothing": lambda m, x: None,
    "state dict": lambda m, x: {name: value.clone() for name, value in m.state_dict().items()},
    "evaluates": lambda m, x: (m.eval(), m(x), m.train()),
    "norms": lambda m, x: [p.norm().item() for p in m.parameters()],
    "same again": lambda m, x: (m.requires_grad_(False), m[0].requires_grad_(True), setattr(m[1], "p", 0.2),
                                [p.requires_grad_(p is not m[2].frozen) for p in m.parameters()]),
    "zero_grad": lambda m, x: m.zero_grad(),
    "arrays": lambda m, x: [np.histogram(p.detach().numpy()) for p in (*m.parameters(), *m.buffers())],
}  # fmt: skip


WAYS = [
    {},
    {"early_release": True},
    {"optimizer_device": "device"},
    {"optimizer_scope": "task"},
    {"accumulation_steps": 2},
    {"max_retries": 1, "ema_decay": 0.9},
]


@pytest.mark.parametrize("what", LOOKS)
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_what_only_looks_changes_nothing(what, options):
    model = model_of()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

    class Looks(Callback):
        def on_step(self, report):
            LOOKS[what](model, x)

        on_validation = on_step

        def on_epoch(self, report, epoch):
            LOOKS[what](model, x)

    report = train(task_of(model, Looks(), **options), num_devices=2)["a"]
    assert (report.status, report.error) == ("finished", None)
    assert_as_plain(report, model, accumulation_steps=options.get("accumulation_steps", 1))


@pytest.mark.net
def test_buffers_in_a_callback_are_those_of_its_step():
    model, plain, seen, found = model_of(), model_of(), [], []

    class Keeps(Callback):
        def on_step(self, report):
            seen.append(copy.deepcopy(model.state_dict()))

    train(task_of(model, Keeps()))
    plainly(plain, on_step=lambda: found.append(copy.deepcopy(plain.state_dict())))
    for mine, expected in zip(seen, found, strict=True):
        assert all(torch.equal(value, expected[name]) for name, value in mine.items())


def test_after_its_end_the_model_is_its_users():
    model = model_of()

    def change():
        for act, _ in CHANGES.values():
            act(model_of())
        model.eval()
        with torch.no_grad():
            model[0].weight.zero_()

    report = train(task_of(model, Calls(change, "on_task_end")))["a"]
    assert report.status == "finished"
    assert not model[0].weight.any()


@pytest.mark.net
def test_one_that_stops_the_task_may_change_the_model():
    model = model_of()

    def stop():
        model[1].p = 0.5
        raise StopTask

    report = train(task_of(model, Calls(stop)))["a"]
    assert (report.status, model[1].p) == ("stopped", 0.5)


@pytest.mark.net
def test_a_rate_that_a_callback_sets_holds_from_the_next_step_on():
    """Through the optimizer that the factory made last, as in the plain loop."""
    made = []

    def factory(params, lr):
        made.append(torch.optim.SGD(params, lr=lr, momentum=0.9))
        return made[-1]

    def halve(*_):
        made[-1].param_groups[0]["lr"] *= 0.5

    class Sets(Callback):
        on_step = halve

    model = model_of()
    report = train(task_of(model, Sets(), optimizer=factory), num_devices=2)["a"]
    assert_as_plain(report, model, optimizer=factory, on_step=halve)


@pytest.mark.net
class TestModelWatch:
    def test_what_is_as_it_was_is_not_refused(self):
        model = model_of()
        watch = ModelWatch(model)
        with watch.calling():
            model[2].options = {"slope": 0.1}
            model[2].names = {"a"}
        watch.check("a")

    def test_large_containers_are_taken_as_they_are(self):
        model = model_of()
        model[2].vocabulary = list(range(1000))
        watch = ModelWatch(model)
        with watch.calling():
            model[2].vocabulary.append(1)
        watch.check("a")

    def test_elements_of_every_weight_are_looked_at(self):
        memory = torch.zeros(100).untyped_storage()
        places = [(0, (1,), (1,)), (1, (4, 3), (1, 4)), (20, (7, 5), (10, 1)), (95, (0,), (1,))]
        weights = [torch.empty(0).set_(memory, *place) for place in places]
        model = nn.Module()
        model._parameters = OrderedDict((str(k), nn.Parameter(torch.empty(0))) for k in range(len(weights)))
        for each, weight in zip(model._parameters.values(), weights, strict=True):
            each.data = weight
        watch = ModelWatch(model)
        watch.follow(list(model._parameters.values()))
        for k, weight in enumerate(weights[:3]):
            with watch.calling():
                pass
            watch.check("a")
            weight.add_(1)
            with pytest.raises(ValueError, match=f"a wrote to the memory of parameter '{k}'"):
                watch.check("a")
