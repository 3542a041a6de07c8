"""Defects that were found and mended: each test failed before its mend."""

import gc
import random
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from hydra_engine import Callback, EmulatedDevice, ModelTask, ShardDoesNotFit, Skips
from hydra_engine.worker.unit import MicroInput
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.refused import names, refused


def data(num=24, batch_size=4, **options):
    generator = torch.Generator().manual_seed(0)
    inputs, target = torch.randn(num, 8, generator=generator), torch.randint(4, (num,), generator=generator)
    return DataLoader(TensorDataset(inputs, target), batch_size=batch_size, **options)


def model_with(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def orchestrator(*tasks, memory="1MiB", **options):
    return exact.silent(tasks, devices=[EmulatedDevice(memory, meter_every_unit=True)], **options)


def task_for(model, loader=None, **options):
    """A task with one layer per shard."""
    each = Presharded(list(range(1, len(list(model)) + 1)))
    options = {"seed": 3, "partitioner": each, **options}
    return ModelTask(model, nn.CrossEntropyLoss(), data() if loader is None else loader, 0.05, 2, **options)


def assert_exact(build, *, make_loader=data, **options):
    expected, model = build(), build()
    result = reference.train(expected, nn.CrossEntropyLoss(), make_loader(), seed=3, lr=0.05, epochs=2, **options)
    report = orchestrator(task_for(model, make_loader(), **options)).train_models()
    report.raise_failures()
    assert report.tasks["task-0"].losses == result.losses
    assert all(torch.equal(a, b) for a, b in zip(zoo.state(model).values(), zoo.state(expected).values(), strict=True))


def assert_refused(match, model, **options):
    with pytest.raises((ValueError, TypeError), match=match):
        orchestrator(task_for(model, **options)).generate()


@pytest.mark.rest
def test_inputs_of_units_are_freed_without_the_cyclic_collector():
    alive = []
    gc.collect()
    gc.disable()
    try:

        class Watch(nn.Module):
            def forward(self, x):
                alive.append(sum(type(each) is MicroInput for each in gc.get_objects()))
                return x * 1.0

        orchestrator(task_for(model_with(Watch()), data(8))).train_models()
    finally:
        gc.enable()
    assert max(alive) <= 2


@pytest.mark.parametrize("call", [1, *(pytest.param(call, marks=pytest.mark.rest) for call in (13, 25)), 37])
def test_policy_that_raises_ends_the_run(call):
    class Policy:
        num_calls = 0

        def key(self, candidate):
            self.num_calls += 1
            if self.num_calls == call:
                raise ZeroDivisionError
            return 0

    tasks = [task_for(model_with(), name=name, accumulation_steps=3) for name in "ab"]
    before = set(threading.enumerate())  # what torch has compiled may leave threads of its own, and end them meanwhile
    with pytest.raises(ZeroDivisionError):
        orchestrator(*tasks, policy=Policy()).train_models()
    assert set(threading.enumerate()) <= before


CALLS_LEFT = {}  # by layer: shared by all its copies, and counted once training starts


class Raises(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        if self.name in CALLS_LEFT:
            CALLS_LEFT[self.name] -= 1
            if CALLS_LEFT[self.name] < 0:
                raise ZeroDivisionError
        return x * 1.0


@pytest.mark.rest
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.rest) for seed in range(1, 4))])
def test_failing_tasks_take_no_memory_from_others(seed):
    names = ["bad-0", "bad-1", "bad-2"]
    failing = [task_for(model_with(Raises(name)), name=name) for name in names]
    sound = [task_for(model_with(), name=f"good-{k}") for k in range(2)]
    devices = [EmulatedDevice("16KiB", chaos=seed + k) for k in range(3)]
    orchestra = exact.silent([*failing, *sound], devices=devices)
    orchestra.generate()
    rng = random.Random(seed)
    CALLS_LEFT.update({name: rng.randrange(20) for name in names})
    try:
        report = orchestra.train_models()
    finally:
        CALLS_LEFT.clear()
    assert [task.status for task in report.tasks.values()] == ["failed"] * 3 + ["finished"] * 2


class GroupStep(torch.optim.Optimizer):
    """Counts its steps in its groups, where stepping shard by shard would lose the count."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "k": 0})

    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"] / group["k"])


def test_optimizer_with_state_in_its_groups_is_refused():
    assert_refused("GroupStep keeps state", model_with(), optimizer=GroupStep)


def test_fused_optimizer_is_not_taken_for_one_with_state_beside():
    assert_exact(model_with, optimizer=lambda params, lr: torch.optim.SGD(params, lr=lr, fused=True))


def test_loader_may_read_every_batch_into_the_same_memory():
    class Reuse:
        def __iter__(self):
            x, y = torch.empty(4, 8), torch.empty(4, dtype=torch.long)
            for inputs, target in data():
                x.copy_(inputs)
                y.copy_(target)
                yield x, y

    assert_exact(model_with, make_loader=Reuse)


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x):
        return x + torch.randn(x.shape, generator=self.generator)


class Counts(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


@pytest.mark.parametrize("layer", [OwnGenerator, Counts])
def test_layer_that_does_not_repeat_is_refused(layer):
    assert_refused("gave another output|forward changes its attribute", model_with(layer()))


class Seeds(nn.Module):
    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            return x + torch.randn(x.shape)


class Differentiates(nn.Module):
    def forward(self, x):
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            return x + torch.autograd.grad((y**3).sum(), y)[0]


class Hands(nn.Module):
    """Returns its buffer, which the next micro-batch changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x):
        self.calls += 1
        return {"x": x, "calls": self.calls}


class Takes(nn.Module):
    def forward(self, value):
        return value["x"] * value["calls"][:1]


class Expanded(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(1, 8).expand(4, 8))

    def forward(self, x):
        return x * self.scale


class PutsItsOutput(nn.Module):
    def __init__(self, skips):
        super().__init__()
        self.skips = skips

    def forward(self, x):
        x = x * 2
        self.skips.put("x", x)
        return x


class Checkpointed(nn.Module):
    def __init__(self, skips):
        super().__init__()
        self.skips, self.linear = skips, nn.Linear(8, 8)

    def forward(self, x):
        return checkpoint(lambda each: self.linear(each + self.skips.get("x")), x, use_reentrant=False)


def skips_in_a_checkpoint():
    torch.manual_seed(1)  # of a layer that is made before the others
    skips = Skips()
    return model_with(PutsItsOutput(skips), Checkpointed(skips))


EXACT = {
    "a layer that seeds the global generator": lambda: model_with(Seeds(), nn.Dropout(0.2)),
    "a layer that differentiates in its forward": lambda: model_with(Differentiates()),
    "a buffer that crosses a boundary": lambda: model_with(Hands(), Takes()),
    "an expanded buffer": lambda: model_with(Expanded()),
    "skips that are gotten inside a checkpoint": skips_in_a_checkpoint,
}


@pytest.mark.parametrize("name", EXACT)
def test_model_trains_to_the_bits_of_the_plain_loop(name):
    assert_exact(EXACT[name], accumulation_steps=3 if name == "a buffer that crosses a boundary" else 1)


class Repeats(nn.Module):
    def forward(self, value):
        return value["x"] + sum(torch.relu(value["x"].repeat(value["n"], 1)).chunk(value["n"])) * 1e-3


@pytest.mark.rest
def test_unit_is_metered_again_for_another_number_in_the_batch():
    class Numbers:
        def __iter__(self):
            for n, (x, y) in zip([1, 80, 1], data(12), strict=True):
                yield {"x": x, "n": n}, y

    torch.manual_seed(0)
    model = nn.Sequential(Repeats(), nn.Linear(8, 4))
    report = orchestrator(task_for(model, Numbers()), memory="256KiB").train_models()
    report.raise_failures()
    assert report.devices[0].peak_bytes > 80 * 4 * 8 * 4


def test_generate_leaves_a_model_alone_whose_factory_ignores_its_argument():
    model = model_with()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.randn(4, 8)).sum().backward()
    orchestrator(task_for(model, optimizer=lambda params, lr: torch.optim.SGD(model.parameters(), lr=lr))).generate()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_optimizer_that_raises_names_the_shard_left_behind():
    class Raises(torch.optim.SGD):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + (parameter.grad is not None)
                if state["step"] == 12:  # a trial takes fewer
                    raise ZeroDivisionError
            return super().step(closure)

    report_of = orchestrator(task_for(model_with(), name="bad", optimizer=Raises), task_for(model_with(), name="good"))
    report = report_of.train_models()
    assert report.tasks["bad"].status == "failed"
    names(report.tasks["bad"].error, task="bad", says="update step")
    assert report.tasks["good"].status == "finished"


@pytest.mark.rest
def test_validation_is_rehearsed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 4))
    options = {"accumulation_steps": 16, "validation": data(256, 64)}
    orchestrator(task_for(model, data(256, 64), accumulation_steps=16), memory="100KiB").generate()
    validated = orchestrator(task_for(model, data(256, 64), **options), memory="100KiB")
    with refused(ShardDoesNotFit):
        validated.generate()


def test_scheduler_that_wants_a_metric_is_refused():
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    assert_refused("ReduceLROnPlateau wants metrics", model_with(), lr_scheduler=plateau)


def test_length_that_is_not_implemented_counts_as_none():
    class Unsized:
        def __len__(self):
            raise NotImplementedError

        def __iter__(self):
            return iter(data())

    assert_exact(model_with, make_loader=Unsized)


def test_hooks_that_copies_would_not_call_are_refused():
    model = model_with()
    model.register_forward_pre_hook(lambda module, inputs: None)
    with pytest.raises(ValueError, match="hooks of its own"):
        task_for(model)


def test_loaders_that_share_a_generator_are_refused():
    generator = torch.Generator()
    dataset = data().dataset
    loaders = [DataLoader(dataset, 4, sampler=RandomSampler(dataset, generator=generator)) for _ in range(2)]
    with refused(says="generator 0 1"):
        orchestrator(*(task_for(model_with(), loader, name=str(k)) for k, loader in enumerate(loaders)))


def test_tasks_that_share_a_batchnorm_in_training_are_refused():
    shared = nn.BatchNorm1d(8)
    shared.requires_grad_(False)
    tasks = [task_for(model_with(shared), name=name) for name in "ab"]
    with refused(says="buffers"):
        orchestrator(*tasks).generate()


def test_loader_that_raised_raises_again_in_a_second_generate():
    class Broken:
        def __iter__(self):
            raise ZeroDivisionError
            yield

    orchestra = orchestrator(task_for(model_with(), Broken()))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            orchestra.generate()


def test_reads_run_ahead_of_micro_batches_with_dropout():
    task = task_for(model_with(nn.Dropout(0.2)), accumulation_steps=2)
    orchestra = orchestrator(task)
    orchestra.generate()
    assert not orchestra._tasks.all[0].state.observed.draws


class Split(nn.Module):
    def forward(self, x):
        return x, x[:, :4]


class WorksInPlace(nn.Module):
    def forward(self, value):
        x, part = value
        x.mul_(2)
        return x + part.sum()


def test_work_in_place_on_inputs_that_share_memory_is_refused():
    assert_refused("shares memory", model_with(Split(), WorksInPlace()))


class Box:
    def __init__(self, tensor):
        self.tensor = tensor


class Boxes(nn.Module):
    def forward(self, x):
        return x, Box(x)


class Unboxes(nn.Module):
    def forward(self, value):
        return value[1].tensor


def test_object_with_tensors_inside_is_refused_at_a_boundary():
    assert_refused("Box with tensors inside", model_with(Boxes(), Unboxes()))


@pytest.mark.rest
def test_frozen_weights_of_two_tasks_survive_both_ends():
    shared = nn.Linear(8, 8).requires_grad_(False)
    before = shared.weight.clone()
    models = [model_with(shared), model_with(shared)]
    orchestrator(*(task_for(model, name=name) for model, name in zip(models, "ab", strict=True))).train_models()
    assert torch.equal(shared.weight, before)


def test_a_state_dict_that_a_callback_kept_goes_on_holding_weights():
    kept = {}

    class Keeps(Callback):
        def on_step(self, report):
            kept.update(model.state_dict())

    model = model_with()
    orchestrator(task_for(model, callbacks=[Keeps()])).train_models()
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.rest)])
def test_devices_see_what_a_hook_s_own_optimizer_stepped(precision):
    losses = []
    for lr in (0.0, 0.5):
        model = model_with()
        own = torch.optim.SGD([model[0].weight], lr=lr)

        def step(parameter, own=own):
            own.step()
            parameter.grad = None

        model[0].weight.register_post_accumulate_grad_hook(step)
        losses.append(orchestrator(task_for(model, precision=precision)).train_models().tasks["task-0"].losses)
    assert losses[0] != losses[1]


class GetsAndAdds(nn.Module):
    def __init__(self, skips, *, in_place=False):
        super().__init__()
        self.skips, self.in_place = skips, in_place

    def forward(self, x):
        value = self.skips.get("x")
        return x + (value.relu_() if self.in_place else value)


def test_work_in_place_on_what_skips_layers_is_refused_where_shards_would_not_share_it():
    for build in (
        lambda skips: [PutsItsOutput(skips), nn.ReLU(inplace=True), GetsAndAdds(skips)],
        lambda skips: [PutsItsOutput(skips), GetsAndAdds(skips, in_place=True), GetsAndAdds(skips)],
    ):
        orchestra = orchestrator(task_for(model_with(*build(Skips()))))
        with pytest.raises(ValueError, match="work in place"):
            orchestra.generate()


class OwnForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


class PreNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.inner(self.norm(input=x))


@pytest.mark.rest
def test_own_forwards_and_norms_by_keyword_in_a_narrow_precision():
    task = ModelTask(OwnForward(), nn.CrossEntropyLoss(), data(), 0.05, precision="bfloat16")
    orchestrator(task).train_models().raise_failures()
    task = task_for(model_with(PreNorm()), precision="bfloat16")
    orchestra = orchestrator(task)
    orchestra.train_models().raise_failures()
    narrow = {slot.name: slot.link_dtype for slot in orchestra._tasks.all[0].layout.slots}
    assert narrow["1.inner.weight"] == torch.bfloat16
    assert narrow["1.norm.weight"] == torch.float32


def test_masters_that_are_not_float32_are_refused_in_a_narrow_precision():
    model = model_with().bfloat16()
    with refused(says="0.weight torch.bfloat16"):
        task_for(model, precision="bfloat16")
