"""Plans: from a device on which a layer just fits to one that holds the model, by any partitioner, the same bits."""

import copy
import gc
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from hydra_engine import Callback, EmulatedDevice, ModelTask
from hydra_engine.errors import HostOutOfMemory, ShardDoesNotFit
from hydra_engine.host import kept_pools
from hydra_engine.planning.cuts import Kept
from hydra_engine.planning.planned import Estimate, check_dram
from hydra_engine.planning.planner import Planner
from hydra_engine.schedule.events import Spread
from partitioners import Balanced, Presharded, profile, shard_bytes, unit_bytes
from tests import reference
from tests.covering import chosen
from tests.exact import assert_same_state, silent
from tests.refused import names, refused
from tests.zoo import Block, Embed, next_byte_loss

SEED = 3
NUM_BUDGETS = 8


def gpt():
    torch.manual_seed(1)
    return nn.Sequential(Embed(16), *(Block(16) for _ in range(4)), nn.LayerNorm(16), nn.Linear(16, 256, bias=False))


def loader(num_batches=3):
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(256, (2, 4, 8), generator=generator)) for _ in range(num_batches)]


def orchestra_of(*tasks, memory, num_devices=1):
    return silent(tasks, devices=[EmulatedDevice(memory, meter_every_unit=True) for _ in range(num_devices)])


def task_of(model, batches=None, **options):
    options = {"optimizer": torch.optim.AdamW, "seed": SEED, "name": "gpt"} | options
    return ModelTask(model, next_byte_loss, batches or loader(), 1e-3, **options)


@pytest.fixture(scope="module")
def plain():
    """Losses and weights of plain PyTorch."""
    model = gpt()
    result = reference.train(model, next_byte_loss, loader(), lr=1e-3, optimizer=torch.optim.AdamW, seed=SEED)
    return result.losses, model.state_dict()


@pytest.fixture(scope="module")
def costs():
    return profile(gpt(), *loader()[0], next_byte_loss, time_layers=False)


def budgets(costs):
    """From what the largest layer takes alone to what the whole model takes, evenly."""
    least = max(shard_bytes(costs, k, k + 1) for k in range(len(costs)))
    most = 2 * shard_bytes(costs, 0, len(costs))
    return [least + (most - least) * k // (NUM_BUDGETS - 1) for k in range(NUM_BUDGETS)]


@pytest.mark.parametrize("partitioner", ["pilot", "optimal"])
@pytest.mark.parametrize("k", chosen(range(NUM_BUDGETS), (0, 5)))
def test_every_budget_trains_to_the_same_bits_within_it(plain, costs, k, partitioner):
    model, memory = gpt(), budgets(costs)[k]
    orchestra = orchestra_of(task_of(model, partitioner=partitioner), memory=memory)
    plan = orchestra.generate().tasks["gpt"]
    report = orchestra.train_models()
    assert report.tasks["gpt"].losses == plain[0]
    assert_same_state(model.state_dict(), plain[1])
    assert max(plan.shard_bytes) <= report.devices[0].peak_bytes <= memory
    if k == NUM_BUDGETS - 1 and partitioner == "pilot":  # the other weighs seconds as it measures them
        assert plan.boundaries == [len(model)]


@pytest.mark.rest
def test_a_byte_less_than_the_largest_layer_is_refused_by_name(costs):
    memory = budgets(costs)[0] - 1
    with refused(ShardDoesNotFit, task="gpt", layer="6 (Linear)", says=memory + 1):
        orchestra_of(task_of(gpt()), memory=memory).generate()


def test_a_slab_that_is_larger_than_the_whole_device_is_refused_where_slabs_have_an_arena():
    """Of an arena that was larger than its device, units were granted less than nothing, and waited for ever."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 400), nn.Linear(400, 1))
    batches = [(torch.ones(2, 4), torch.ones(2, 1))]
    task = ModelTask(model, F.mse_loss, batches, 0.1, name="wide", partitioner=Presharded([1, 2, 3]))
    with refused(ShardDoesNotFit, task="wide", layer="1 (Linear)", says="shard 1"):
        silent([task], devices=[EmulatedDevice("4KiB", has_arena=True)]).generate()


@pytest.mark.rest
def test_what_the_plan_says_of_a_lone_layer_is_what_the_profile_says(costs):
    memory = budgets(costs)[0]
    plan = orchestra_of(task_of(gpt(), partitioner=Balanced(7)), memory=memory).generate().tasks["gpt"]
    assert plan.shard_bytes == [shard_bytes(costs, k, k + 1) for k in range(7)]


@pytest.mark.rest
@pytest.mark.parametrize("partitioner", ["pilot", pytest.param("optimal", marks=pytest.mark.rest)])
def test_auto_takes_more_micro_batches_where_one_does_not_fit(costs, partitioner):
    memory = budgets(costs)[0] - 1
    model = gpt()
    orchestra = orchestra_of(task_of(model, partitioner=partitioner, accumulation_steps="auto"), memory=memory)
    number = orchestra.generate().tasks["gpt"].accumulation_steps
    assert number in (2, 4)
    orchestra.train_models()
    same = gpt()
    reference.train(
        same, next_byte_loss, loader(), lr=1e-3, optimizer=torch.optim.AdamW, seed=SEED, accumulation_steps=number
    )
    assert_same_state(model.state_dict(), same.state_dict())


def wide(num_layers=4, num_samples=96):
    """Layers whose outputs are larger than their weights: what memory holds decides how much runs twice."""
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(num_layers)]
    batches = [(torch.randn(num_samples, 64), torch.randint(64, (num_samples,)))]
    partitioner = Presharded(list(range(1, num_layers + 1)))
    return ModelTask(layers, F.cross_entropy, batches, 0.1, accumulation_steps="auto", partitioner=partitioner, seed=0)


def predicted(step_s):
    """Predict such seconds for a step by its number of micro-batches; twice as long a step on any memory: none."""

    def decide(planner):
        return step_s[planner.state.cut.num_micro_batches]

    least = mock.patch("hydra_engine.planning.planner.least_step_s", return_value=min(step_s.values()))
    return mock.patch.object(Planner, "decide", decide), least


@pytest.mark.parametrize(
    ("step_s", "number"),
    [
        ({1: 1.0}, 1),  # nothing to be gained
        ({1: 1.0, 2: 0.8, 4: 0.7, 8: 0.69, 16: 0.1}, 4),
        ({1: 1.0, 2: 0.96, 4: 0.1}, 1),
    ],
)
def test_auto_takes_more_micro_batches_while_a_step_is_predicted_to_be_shorter(step_s, number):
    decide, least = predicted(step_s)
    orchestra = orchestra_of(wide(), memory="8MiB")
    with decide, least:
        plan = orchestra.generate()
    [planned] = orchestra._tasks.all
    assert plan.tasks["task-0"].accumulation_steps == planned.state.cut.num_micro_batches == number
    assert planned.state.measured.staging_bytes > 0


def test_auto_takes_no_more_than_fit():
    decide, least = predicted({1: 1.0, 2: 0.8, 4: 0.1})
    orchestra = orchestra_of(wide(), memory="8MiB")
    cut = Planner.cut

    def limited(planner, number):
        if number == 4:
            raise ShardDoesNotFit("no")
        cut(planner, number)

    with decide, least, mock.patch.object(Planner, "cut", limited):
        assert orchestra.generate().tasks["task-0"].accumulation_steps == 2


@pytest.mark.rest
def test_auto_gives_a_device_that_would_idle_a_part_of_each_step():
    def spreads(task, devices, *, host=None):
        return tuple(Spread(float(k)) for k in range(1, min(len(devices), task.num_micro_batches) + 1))

    kept = mock.patch(
        "hydra_engine.planning.planner.choose_kept", return_value=Kept(4, 1.0)
    )  # however long a step takes here
    with mock.patch("hydra_engine.planning.planned.predict_spreads", spreads), kept:
        assert orchestra_of(wide(), memory="8MiB", num_devices=3).generate().tasks["task-0"].accumulation_steps == 3
        tasks = [wide(), wide()]
        plan = orchestra_of(*tasks, memory="8MiB", num_devices=3).generate()
        assert [task.accumulation_steps for task in plan.tasks.values()] == [1, 1]


@pytest.mark.parametrize(("place", "limit", "adds"), [("cuda", 1.0, True), ("cuda", None, False), ("cpu", 1.0, False)])
def test_gpus_add_up_the_gradients_that_are_clipped(place, limit, adds):
    """Their norms have other bits than the host's."""
    cost, found = Estimate.cost, set()

    def costing(estimate, number):
        with mock.patch.object(estimate._state, "place", torch.device(place)):
            found.add((figures := cost(estimate, number)).adds_on_devices)
        return figures

    with mock.patch.object(Estimate, "cost", costing):
        task = task_of(gpt(), max_grad_norm=limit, accumulation_steps=2)
        orchestra_of(task, memory="8MiB", num_devices=2).generate()
    assert found == {adds}


def test_a_layer_that_creates_nothing_takes_nothing():
    """An in-place ReLU below all that trains runs forward only, on the memory that it is given."""
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(True), nn.Conv2d(8, 8, 3), nn.Sequential(nn.Flatten(), nn.Linear(8 * 144, 3))]
    layers[0].requires_grad_(False)
    inputs, target = torch.randn(4, 3, 16, 16), torch.randint(3, (4,))
    costs = profile(layers, inputs, target, F.cross_entropy)
    assert unit_bytes(costs, 1, 2) == costs[1].input_bytes
    memory = max(shard_bytes(costs, k, k + 1) for k in range(4))
    for partitioner in ("pilot", "optimal"):
        task = ModelTask(layers, F.cross_entropy, [(inputs, target)], partitioner=partitioner, seed=0)
        orchestra_of(task, memory=memory).train_models()


@pytest.mark.rest
def test_two_tasks_may_name_different_partitioners():
    tasks = [
        task_of(gpt(), name=name, partitioner=partitioner) for name, partitioner in (("a", "pilot"), ("b", "optimal"))
    ]
    report = orchestra_of(*tasks, memory="200KiB", num_devices=2).train_models()
    assert report.tasks["a"].losses == report.tasks["b"].losses


# Batches of several lengths.


class Lengths(Dataset):
    """Sequences of growing and falling length."""

    def __init__(self, *lengths):
        generator = torch.Generator().manual_seed(4)
        self.items = [torch.randint(256, (n + 1,), generator=generator) for n in lengths]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index][:-1], self.items[index][1:]


def model_of_any_length():
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(256, 16), *(Block(16) for _ in range(4)), nn.Linear(16, 256))


@pytest.mark.rest
def test_longer_batches_are_made_room_for_as_they_come():
    model, original = model_of_any_length(), model_of_any_length()
    batches = list(DataLoader(Lengths(8, 9, 40, 17, 8, 30), batch_size=1))
    report = orchestra_of(task_of(model, batches, epochs=2), memory="160KiB").train_models().tasks["gpt"]
    assert [revision.accumulation_steps for revision in report.revisions] == [1]
    assert "is out of memory" in report.revisions[0].reason
    reference.train(original, next_byte_loss, batches, lr=1e-3, epochs=2, optimizer=torch.optim.AdamW, seed=SEED)
    assert_same_state(model.state_dict(), original.state_dict())


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("partitioner 'greedy' 'pilot'", lambda: task_of(gpt(), partitioner="greedy")),
        ("partitioner 'balanced' Balanced(4)", lambda: task_of(gpt(), partitioner="balanced")),
        *((f"memory {memory}", lambda memory=memory: EmulatedDevice(memory)) for memory in (0, -1, "0MiB")),
    ],
)
def test_what_cannot_be_planned_is_refused(words, call):
    with refused(ValueError, says=words):
        call()


class Text(nn.Module):
    def forward(self, x):
        return "text"


@pytest.mark.parametrize(
    ("layers", "target", "error", "words", "place"),
    [
        ([nn.Linear(4, 4), Text(), nn.Linear(4, 4)], torch.randn(2, 4), TypeError, "output str", "1 (Text)"),
        ([nn.Linear(4, 4)], torch.randint(4, (3,)), ValueError, "batch_size", "loss_fn"),
    ],
)
def test_a_layer_or_a_loss_that_fails_is_named(layers, target, error, words, place):
    task = ModelTask(nn.Sequential(*layers), F.cross_entropy, [(torch.randn(2, 4), target)], name="a")
    with refused(error, says=words) as caught:
        orchestra_of(task, memory="1MiB").generate()
    names(caught.value.__notes__[0], says=place)


def said(loss_fn, *layers, **options):
    """Return what the last note of a failed plan says, and see that planning has left the model as it was."""
    model = nn.Sequential(nn.Linear(4, 4), *layers)
    before = copy.deepcopy(model.state_dict())
    task = ModelTask(model, loss_fn, [(torch.ones(4, 4), torch.ones(4, 4))], lr=0.1, name="a", **options)
    with pytest.raises(RuntimeError) as caught:
        orchestra_of(task, memory="1MiB").generate()
    assert_same_state(model.state_dict(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    return caught.value.__notes__[-1]


def of_four(output, target):
    return F.mse_loss(output.view(4, 4), target)


def of_three(output, target):
    return F.mse_loss(output.view(3, 4), target)


def of_three_without_gradients(output, target):
    return (F.mse_loss if torch.is_grad_enabled() else of_three)(output, target)


def of_gradients(output, target):
    [gradient] = torch.autograd.grad(output[1].sum(), output[0], create_graph=True)
    return F.mse_loss(gradient, target)


class Twice(nn.Module):
    def forward(self, h):
        return h, h.square()


class Later(nn.Module):
    def forward(self, both):
        return both[0], both[1].square()


class Inverts(nn.Module):
    def forward(self, h):
        return torch.linalg.inv(h + torch.eye(4, dtype=h.dtype) * 9)


VALIDATION = [(torch.ones(4, 4), torch.ones(4, 4))]


@pytest.mark.parametrize(
    ("loss_fn", "layers", "options", "words"),
    [
        (of_three, [], {}, "task a: plain same"),
        (of_three_without_gradients, [], {"validation": VALIDATION}, "task a: plain same"),
        (of_four, [], {"accumulation_steps": 2}, "works micro-batches accumulation_steps"),
        (F.mse_loss, [Inverts()], {"precision": "bfloat16"}, "works float32 precision"),
        (of_gradients, [Twice(), Later()], {}, "works differentiated nn.Sequential(nn.Sequential(*layers))"),
    ],
)
def test_of_a_plain_step_is_said_what_was_tried(loss_fn, layers, options, words):
    note = said(loss_fn, *layers, **options)
    assert all(word in note for word in words.split()), note
    assert ("the same" in note) is ("works" not in words), note


def test_a_loss_that_differentiates_across_layers_trains_as_one_layer():
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), Twice(), Later())

    data = [(torch.ones(4, 4) * k, torch.ones(4, 4)) for k in range(3)]
    expected = reference.train(model(), of_gradients, data, seed=7, lr=0.1)
    task = ModelTask(nn.Sequential(model()), of_gradients, data, lr=0.1, name="a", seed=7)
    assert orchestra_of(task, memory="1MiB").train_models().tasks["a"].losses == expected.losses


def test_models_are_copied_for_nothing_but_their_structure():
    """What a profile shares with the model is as it was."""
    model = gpt()
    before = copy.deepcopy(model.state_dict())
    orchestra_of(task_of(model, partitioner="optimal", accumulation_steps="auto"), memory="1MiB").generate()
    assert_same_state(model.state_dict(), before)


def planned_pool(orchestra):
    """The pool of an orchestrator's one task, once it is planned."""
    orchestra.generate()
    [planned] = orchestra._tasks.all
    return planned.state.pool


class TestKeptMemory:
    """What planning has moved the weights into, and its gradients' memory, is there until training."""

    @pytest.mark.parametrize("precision", ["float32", "bfloat16"])
    def test_training_goes_on_in_it_with_what_was_changed_since(self, precision):
        class Looks(Callback):
            def on_step(self, report):
                addresses.append(model[1].qkv.weight.data_ptr())

        model, addresses = gpt(), []
        orchestra = orchestra_of(task_of(model, precision=precision, callbacks=[Looks()]), memory="1MiB")
        pool = planned_pool(orchestra)
        assert pool.kept_bytes == (1 + (precision != "float32")) * pool.layout.link_bytes[True]
        addresses.append(model[1].qkv.weight.data_ptr())
        with torch.no_grad():
            model[1].qkv.weight.mul_(0.5)
        model[2].qkv.weight.data = model[2].qkv.weight.data * 2
        report = orchestra.train_models().tasks["gpt"]
        plain = gpt()
        with torch.no_grad():
            plain[1].qkv.weight.mul_(0.5)
            plain[2].qkv.weight.mul_(2)
        settings = {"lr": 1e-3, "optimizer": torch.optim.AdamW, "seed": SEED, "precision": precision}
        assert report.losses == reference.train(plain, next_byte_loss, loader(), **settings).losses
        assert_same_state(model.state_dict(), plain.state_dict())
        assert len(set(addresses)) == 1
        assert pool not in kept_pools()

    @pytest.mark.parametrize("end", ["stopped", "dropped", "evaluated"])
    def test_a_task_that_is_not_trained_gives_it_back(self, end):
        model = gpt()
        before = copy.deepcopy(model.state_dict())
        orchestra = orchestra_of(task_of(model), memory="1MiB")
        pool = weakref.ref(planned_pool(orchestra))
        assert pool() in kept_pools()
        if end == "stopped":
            orchestra.stop_task("gpt")
        elif end == "evaluated":
            orchestra.evaluate("gpt", loader())
        else:
            del orchestra
            gc.collect()
        assert pool() not in kept_pools()
        assert (pool() is None) == (end == "dropped")
        assert_same_state(model.state_dict(), before)
        if end != "dropped":
            assert all(each.untyped_storage().nbytes() == each.nbytes for each in model.parameters())

    def test_it_is_counted_once_and_given_up_where_others_need_it(self, monkeypatch):
        orchestra, other = orchestra_of(task_of(gpt()), memory="1MiB"), orchestra_of(task_of(gpt()), memory="1MiB")
        others = planned_pool(other)
        planned_pool(orchestra)
        [planned] = orchestra._tasks.all
        kept, others_kept = planned.state.pool.kept_bytes, others.kept_bytes

        def check(available):
            monkeypatch.setattr("hydra_engine.system.dram.available_dram_bytes", lambda: available - others.kept_bytes)
            check_dram([planned])

        check(planned.training_bytes - kept + others_kept)
        assert others in kept_pools()
        check(planned.training_bytes - kept)
        assert others not in kept_pools()
        assert planned.state.pool in kept_pools()
        with pytest.raises(HostOutOfMemory):
            check(planned.training_bytes - kept - 1)
