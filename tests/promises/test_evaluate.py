"""`orchestra.evaluate`: the figures of the plain loop, on models larger than the device, and nothing is changed."""

import _thread
import copy
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.data.streams import capture
from hydra_engine.errors import ShardDoesNotFit
from hydra_engine.planning import PlannedTask, Target
from hydra_engine.tasks.evaluation import EvaluationTask
from partitioners import Budget, Presharded, profile, profile_evaluation, shard_bytes
from tests import exact, reference, zoo

SEED = 31
WIDTH = 32


def task_of(build, *, partition="three", **options):
    model, loss_fn, loader = build()
    shards = Presharded(exact.ends(partition, len(model)))
    options = {"name": "a", "seed": SEED, "partitioner": shards} | options
    return ModelTask(model, loss_fn, loader, 0.1, **options)


def plain(task, loader, model=None):
    """The loss by tests/reference.py, of the task's model or one that is equal to it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        model = task.model if model is None else model
        return reference.evaluate(model, task.loss_fn, loader, task.loss_reduction, task.unpack)


def everything(model):
    """What an evaluation must leave as it was."""
    tensors = {name: (tensor.clone(), tensor.stride()) for name, tensor in zoo.state(model).items()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return tensors, gradients, {name: module.training for name, module in model.named_modules()}


def assert_untouched(model, before):
    tensors, gradients, flags = everything(model)
    assert tensors.keys() == before[0].keys()
    for name, (tensor, stride) in tensors.items():
        assert torch.equal(tensor, before[0][name][0]), name
        assert stride == before[0][name][1]
    assert all(gradients[name] is gradient for name, gradient in before[1].items())
    assert flags == before[2]
    for name, parameter in model.named_parameters():  # in ordinary storage
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, name


@contextmanager
def left_as_it_was(model):
    before = everything(model)
    yield
    assert_untouched(model, before)


def dense(num_layers=5, *, norm=False):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = []
        for _ in range(num_layers):
            layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh(), *([nn.BatchNorm1d(WIDTH)] if norm else [])]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def batches(*sizes, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, WIDTH, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes]


def orchestra_of(*tasks, memory="1MiB", num_devices=1):
    """Whatever its tasks: at least one there has to be."""
    tasks = tasks or [ModelTask(nn.Sequential(nn.Linear(2, 2)), F.mse_loss, [], seed=0)]
    devices = [EmulatedDevice(memory, meter_every_unit=True) for _ in range(num_devices)]
    orchestra = ModelOrchestrator(tasks, devices=devices)
    orchestra.verbose = 0
    return orchestra


# The figures


@pytest.mark.parametrize("name", zoo.MODELS)
@pytest.mark.parametrize("num_devices", [1, 3])
def test_the_loss_is_the_plain_loops_and_nothing_is_changed(name, num_devices):
    task = task_of(zoo.MODELS[name])
    orchestra = exact.orchestrator([task], num_devices=num_devices, chaos=4)
    loader = zoo.MODELS[name]()[2]  # most of them shuffle
    generators = capture()
    with left_as_it_was(task.model):
        found = orchestra.evaluate(task, loader)
        assert capture().same_as(generators)
    assert found.loss == plain(task, zoo.MODELS[name]()[2])
    assert found.num_samples == len(loader.dataset)
    assert found.metrics == {}


def test_metrics_are_the_tasks_or_those_that_are_given():
    def agreement(output, target):
        return (output.argmax(dim=1) == target).float().mean()

    def largest(output, target):
        return output.max().item()

    task = task_of(zoo.mlp, validation=[], metrics={"agreement": agreement})
    orchestra, loader = exact.orchestrator([task]), DataLoader(zoo.mlp()[2].dataset, batch_size=20)
    model = copy.deepcopy(task.model).eval()
    parts = [(len(x), agreement(model(x), y).item(), largest(model(x), y)) for x, y in loader]
    num_samples = sum(size for size, *_ in parts)
    expected = sum(size * figure for size, figure, _ in parts) / num_samples
    assert orchestra.evaluate("a", loader).metrics == {"agreement": expected}
    expected = sum(size * figure for size, _, figure in parts) / num_samples
    assert orchestra.evaluate("a", loader, metrics={"largest": largest}).metrics == {"largest": expected}
    assert orchestra.evaluate("a", loader, metrics={}).metrics == {}


@pytest.mark.parametrize("loss_reduction", ["sum", lambda target: (target > 1).sum()], ids=["sum", "function"])
def test_batches_are_weighted_as_in_validation(loss_reduction):
    class Weighted(nn.Module):
        """Has buffers, and a flag that matters."""

        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.linspace(0.5, 1.5, 5))

        def forward(self, output, target):
            loss = F.cross_entropy(output, target, self.weight, reduction="sum")
            return loss * 2 if self.training else loss

    def build():
        model, _, loader = zoo.dropout()
        return model, Weighted(), loader

    task = task_of(build, loss_reduction=loss_reduction)
    loader = DataLoader(zoo.dropout()[2].dataset, batch_size=20)  # the last one is short
    found = exact.orchestrator([task]).evaluate(task, loader).loss
    if loss_reduction == "sum":
        assert found == plain(task, loader)
        return
    model, loss_fn = copy.deepcopy(task.model).eval(), copy.deepcopy(task.loss_fn).eval()
    total = weight = 0.0
    for x, y in loader:
        total += loss_fn(model(x), y).item() * float(loss_reduction(y))
        weight += float(loss_reduction(y))
    assert found == total / weight


class Noise(nn.Module):
    """Draws in evaluation too, from torch and, if asked, from numpy."""

    def __init__(self, of_numpy=False):
        super().__init__()
        self.of_numpy = of_numpy

    def forward(self, x):
        return x + 0.1 * torch.randn_like(x) * (float(np.random.rand()) if self.of_numpy else 1.0)


@pytest.mark.parametrize("of_numpy", [False, True])
def test_layers_and_loader_draw_from_a_fresh_stream_of_the_tasks_seed(of_numpy):
    def build():
        model, loss_fn, loader = zoo.dropout()
        return nn.Sequential(*model[:3], Noise(of_numpy), *model[3:]), loss_fn, loader

    task = task_of(build)
    orchestra = exact.orchestrator([task], num_devices=2, chaos=1)
    np.random.seed(3)
    found = [orchestra.evaluate(task, zoo.dropout()[2]).loss for _ in range(2)]
    generators = capture()
    assert found == [plain(task, zoo.dropout()[2])] * 2
    np.random.set_state(generators.numpy)


def test_batches_of_one_sample_through_a_batch_norm():
    task = ModelTask(dense(norm=True), F.cross_entropy, [], seed=SEED)
    assert orchestra_of().evaluate(task, batches(1, 1)).loss == plain(task, batches(1, 1))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_narrow_precision_is_the_tasks(precision):
    task = task_of(zoo.dropout, precision=precision)
    narrow = reference.Narrow(copy.deepcopy(task.model), task.loss_fn, reference.DTYPES[precision], None)
    assert exact.orchestrator([task]).evaluate("a", zoo.dropout()[2]).loss == plain(
        task, zoo.dropout()[2], narrow.evaluated()
    )


def test_a_module_with_a_forward_of_its_own_is_run_in_eval():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

        def forward(self, x):
            if self.training:
                raise AssertionError("in training")
            return self.b(self.norm(self.a(x)))

    task = ModelTask(Net(), F.cross_entropy, [], seed=SEED)
    assert orchestra_of().evaluate(task, batches(1, 3)).loss == plain(task, batches(1, 3))
    source = task.model.__dict__["source"]
    assert source.training
    assert list(source._modules) == ["a", "norm", "b"]


# Tasks, before and after training


@pytest.mark.parametrize("name", ["dropout", "cnn"])
def test_evaluations_before_training_leave_it_its_bits_and_after_it_see_its_weights(name):
    class Counting:
        """Counts how often it is opened."""

        def __init__(self, loader):
            self.loader, self.num_opened = loader, 0

        def __len__(self):
            return len(self.loader)

        def __iter__(self):
            self.num_opened += 1
            return iter(self.loader)

    def build():
        model, loss_fn, loader = zoo.MODELS[name]()
        return model, loss_fn, Counting(loader)

    held_out = DataLoader(zoo.MODELS[name]()[2].dataset, batch_size=9, shuffle=True)
    task = task_of(build, epochs=2)
    orchestra = exact.orchestrator([task], num_devices=2)
    first = orchestra.evaluate(task, held_out)
    assert task.dataloader.num_opened == 0
    orchestra.generate()
    assert orchestra.evaluate("a", held_out) == first
    assert task.dataloader.num_opened == 1
    report = orchestra.train_models()

    expected_model, loss_fn, loader = build()
    assert first.loss == plain(task, held_out, expected_model)
    expected = reference.train(expected_model, loss_fn, loader, seed=SEED, lr=0.1, epochs=2)
    exact.assert_as_expected(report, "a", task.model, exact.Expected(expected.losses, [], zoo.state(expected_model)))
    assert orchestra.evaluate("a", held_out).loss == plain(task, held_out, expected_model)
    assert orchestra.report is report


def test_a_task_of_no_orchestrator_is_planned_on_the_fly():
    task, other = ModelTask(dense(), F.cross_entropy, [], seed=SEED), task_of(zoo.mlp)
    orchestra = orchestra_of(other, memory="24KiB")  # the model's weights alone take 20 KiB
    assert orchestra.evaluate(task, batches(9, 4)).loss == plain(task, batches(9, 4))
    assert orchestra.plan is None


def test_nothing_is_printed(capsys):
    task = task_of(zoo.mlp)
    orchestra = ModelOrchestrator([task], devices=[EmulatedDevice("1MiB")])
    orchestra.evaluate(task, zoo.mlp()[2])
    assert capsys.readouterr() == ("", "")


def test_under_inference_mode_weights_stay_trainable():
    task = task_of(zoo.mlp)
    orchestra = exact.orchestrator([task])
    with torch.inference_mode():
        orchestra.evaluate(task, zoo.mlp()[2])
    assert not any(tensor.is_inference() for tensor in zoo.state(task.model).values())
    orchestra.train_models()


def test_gradients_that_the_user_keeps_stay():
    task = task_of(zoo.mlp)
    for inputs, target in zoo.mlp()[2]:
        task.loss_fn(task.model(inputs), target).backward()
    assert all(parameter.grad is not None for parameter in task.model.parameters())
    with left_as_it_was(task.model):
        exact.orchestrator([task]).evaluate(task, zoo.mlp()[2])


def test_modules_keep_flags_of_their_own():
    task = task_of(zoo.cnn)
    task.model[1].eval()
    with left_as_it_was(task.model):
        exact.orchestrator([task]).evaluate(task, zoo.cnn()[2])
    assert not task.model[1].training
    assert task.model[4].training


class Counter(nn.Module):
    """Writes to its buffer in evaluation too, and binds it anew at each second call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.calls % 2:
            self.calls = self.calls + 1
        else:
            self.calls += 1
        return x * self.calls


def test_what_layers_write_to_buffers_is_seen_by_later_batches_and_dropped():
    model = nn.Sequential(nn.Linear(WIDTH, 8), Counter(), nn.Linear(8, 3))
    task = ModelTask(model, F.cross_entropy, [], seed=SEED, partitioner=Presharded([1, 2, 3]))
    buffer = model[1].calls
    with left_as_it_was(model):
        found = orchestra_of().evaluate(task, batches(3, 3, 3))
    assert model[1].calls is buffer
    assert found.loss == plain(task, batches(3, 3, 3), copy.deepcopy(model))


# Memory


def one_layer_wider_than_the_rest():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 3))  # the second: 64 KiB


def test_a_model_that_cannot_train_on_the_device_is_evaluated_there():
    model, loader = one_layer_wider_than_the_rest(), batches(16, 16)
    task = ModelTask(model, F.cross_entropy, loader, seed=SEED)
    costs = profile_evaluation(model, *loader[0], F.cross_entropy)
    memory = max(shard_bytes(costs, k, k + 1) for k in range(len(costs)))
    orchestra = orchestra_of(task, memory=memory)
    assert memory < shard_bytes(profile(model, *loader[0], F.cross_entropy, time_layers=False), 1, 2)
    with pytest.raises(ShardDoesNotFit):
        orchestra.generate()
    assert orchestra.evaluate(task, loader).loss == plain(task, loader)
    found = orchestra_of(memory=memory - 1).evaluate(task, loader)
    assert found.num_parts > 1
    assert found.loss == pytest.approx(plain(task, loader), rel=1e-6)
    with pytest.raises(ShardDoesNotFit, match=r"a: layer Linear needs .* alone .* 64 KiB \(65536 bytes\)"):
        orchestra_of(memory="64KiB").evaluate(ModelTask(model, F.cross_entropy, [], name="a"), loader)


@pytest.mark.parametrize("ends", [[1, 2, 3, 4], [2, 4], [1, 4], [4]])
def test_what_a_shard_takes_is_what_the_profile_says(ends):
    model, loader = one_layer_wider_than_the_rest(), batches(16)
    costs = profile_evaluation(model, *loader[0], F.cross_entropy)
    task = EvaluationTask.of(ModelTask(model, F.cross_entropy, [], partitioner=Presharded(ends)), loader)
    target = Target(device=EmulatedDevice("1MiB"), budget=Budget(memory_bytes=2**20), num_threads=1)
    plan = PlannedTask(task, "a").make_plan(target)
    bounds = [shard_bytes(costs, *shard) for shard in pairwise([0, *ends])]
    if len(ends) == 4:
        assert plan.shard_bytes == bounds
    # The loss runs when the last layer's input is gone, unless that is what entered the shard.
    assert all(0.98 * bound < taken <= bound for taken, bound in zip(plan.shard_bytes, bounds, strict=True))


def test_there_are_no_gradients_in_dram():
    layout = PlannedTask(EvaluationTask.of(task_of(zoo.tied), []), "a").layout
    assert layout.num_bytes[True] == layout.link_bytes[True] == 0
    assert layout.num_bytes[False] >= sum(parameter.nbytes for parameter in zoo.tied()[0].parameters())


def test_a_larger_batch_later_on_is_evaluated_on_finer_shards():
    task = ModelTask(dense(norm=True), F.cross_entropy, [], seed=SEED)
    loader = batches(8, 200, 8)
    assert orchestra_of(memory="70KiB").evaluate(task, loader).loss == plain(task, loader)


@pytest.mark.parametrize("sizes", [(8, 1000, 8), (1000, 8), (1000, 1000, 999)])
def test_a_batch_too_large_for_a_layer_alone_is_split(sizes):
    """Also the first one, which the plan is made for, as a validation takes it on the same device."""
    task = ModelTask(dense(), F.cross_entropy, batches(8), seed=SEED, validation=batches(*sizes))
    loader = batches(*sizes)
    orchestra = orchestra_of(task, memory="70KiB")
    found = orchestra.evaluate(task, loader)
    assert found.loss == pytest.approx(plain(task, loader), rel=1e-6)
    assert (found.num_samples, found.num_parts) == (sum(sizes), 8)
    report = orchestra.train_models().tasks["task-0"]
    assert report.validation_losses == [orchestra.evaluate(task, loader).loss]
    told = [each.reason for each in report.revisions if "parts" in each.reason]
    assert len(told) == len(set(sizes) - {8})
    text = "evaluation batches of 1000 samples are too large for a layer alone, and are computed in 8 parts"
    assert text in told[0]
    assert text in str(orchestra.report)


def test_evaluations_of_whole_batches_say_so():
    task = ModelTask(dense(), F.cross_entropy, [], seed=SEED)
    assert orchestra_of().evaluate(task, batches(8, 9)).num_parts == 1


@pytest.mark.parametrize(("layer", "does"), [(Noise, "draws random numbers"), (Counter, "changes a buffer")])
def test_parts_that_would_differ_by_more_are_refused(layer, does):
    model = dense()
    model.insert(4, layer())
    match = rf"a: evaluation batch 0 of 1000 samples .* a layer that {does} in eval\(\)"
    with left_as_it_was(model), pytest.raises(ValueError, match=match):
        orchestra_of(memory="70KiB").evaluate(ModelTask(model, F.cross_entropy, [], name="a"), batches(1000))


def test_predictions_are_in_parts_as_well_and_warn():
    with pytest.warns(UserWarning, match="in 9 parts"):
        list(orchestra_of(memory="70KiB").predict(dense(), [x for x, _ in batches(1000)]))


# What goes wrong: the model is given back as it was


def boom(*_):
    raise ZeroDivisionError("boom")


def assert_raises(loader, *, model=None, error=ZeroDivisionError, match="boom", num_devices=1, **options):
    """The evaluation raises, and the model is given back."""
    model = dense() if model is None else model
    task = ModelTask(model, F.cross_entropy, [], seed=SEED)
    with left_as_it_was(model), pytest.raises(error, match=match):
        orchestra_of(num_devices=num_devices).evaluate(task, loader, **options)


def test_a_layer_that_raises_at_a_later_batch():
    class Picky(nn.Module):
        def forward(self, x):
            return x if len(x) != 5 else boom()

    model = dense()
    model.insert(4, Picky())
    assert_raises(batches(6, 6, 5, 6), model=model, num_devices=2)


@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_a_loader_that_raises(num_read):
    def loader():
        yield from batches(*[4] * num_read)
        boom()

    assert_raises(loader())


def test_a_metric_that_raises():
    assert_raises(batches(4), metrics={"boom": boom})


def test_ctrl_c_gives_the_model_back():
    def loader():
        for k, batch in enumerate(batches(4, 4, 4, 4)):
            if k == 2:
                _thread.interrupt_main()
            yield batch

    assert_raises(loader(), error=KeyboardInterrupt, match=None)


# Refused


def test_an_empty_loader_is_refused():
    with pytest.raises(ValueError, match="a: the loader is empty; evaluation needs at least one batch"):
        exact.orchestrator([task_of(zoo.mlp)]).evaluate("a", [])


@pytest.mark.parametrize("loader", [3, None, torch.ones(2, 3), nn.Linear(2, 2)])
def test_what_is_no_loader_is_refused(loader):
    with pytest.raises(TypeError, match=f"loader: a {type(loader).__name__} is no iterable of batches"):
        exact.orchestrator([task_of(zoo.mlp)]).evaluate("a", loader)


@pytest.mark.parametrize("task", ["b", None, 3])
def test_an_unknown_task_is_refused(task):
    with pytest.raises(ValueError, match=f"evaluate: task {task!r}, known: 'a'; give one of these names"):
        exact.orchestrator([task_of(zoo.mlp)]).evaluate(task, [])


def test_metrics_that_are_no_functions_are_refused():
    with pytest.raises(TypeError, match=r"metrics: .* does not map names to functions"):
        exact.orchestrator([task_of(zoo.mlp)]).evaluate("a", batches(3), metrics={"a": 1.0})


def test_a_loader_that_a_task_has_yet_to_read_through_is_refused():
    samples = TensorDataset(*batches(12)[0])
    own = torch.Generator().manual_seed(1)
    loader = DataLoader(samples, batch_size=4, shuffle=True, generator=own)
    task = ModelTask(dense(), F.cross_entropy, loader, 0.1, seed=SEED, name="a")
    orchestra = orchestra_of(task)
    message = "evaluate: the loader shares .* with a loader of task a, which has yet to train"
    for shared in (loader, DataLoader(samples, shuffle=True, generator=own)):
        with pytest.raises(ValueError, match=message):
            orchestra.evaluate(task, shared)
    orchestra.evaluate(task, DataLoader(samples, batch_size=4))
    orchestra.train_models()
    orchestra.evaluate(task, loader)  # nobody reads it any more


def test_from_inside_training_it_is_refused():
    errors = []

    class Evaluates(Callback):
        def on_step(self, report):
            try:
                orchestra.evaluate("a", batches(3))
            except RuntimeError as error:
                errors.append(str(error))

    task = ModelTask(dense(), F.cross_entropy, batches(3), 0.1, seed=SEED, name="a", callbacks=[Evaluates()])
    orchestra = orchestra_of(task)
    orchestra.train_models()
    assert errors == ["evaluate: this orchestrator is working already; wait for its call to return"]


def test_active_autocast_is_refused():
    orchestra = exact.orchestrator([task_of(zoo.mlp)])
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="evaluate: autocast"):
        orchestra.evaluate("a", zoo.mlp()[2])
