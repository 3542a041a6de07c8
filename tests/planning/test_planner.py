"""Plans: from a device on which a layer just fits to one that holds the model, by any partitioner, the same bits."""

import copy
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.errors import ShardDoesNotFit
from hydra_engine.planning.cuts import Kept
from hydra_engine.planning.planner import Planner
from hydra_engine.schedule.events import Spread
from partitioners import Balanced, Presharded, profile, shard_bytes, unit_bytes
from tests import reference
from tests.zoo import Block, Embed, next_byte_loss

SEED = 3
NUM_BUDGETS = 12


def gpt():
    torch.manual_seed(1)
    return nn.Sequential(Embed(16), *(Block(16) for _ in range(4)), nn.LayerNorm(16), nn.Linear(16, 256, bias=False))


def loader(num_batches=3):
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(256, (2, 4, 8), generator=generator)) for _ in range(num_batches)]


def orchestra_of(*tasks, memory, num_devices=1):
    devices = [EmulatedDevice(memory, meter_every_unit=True) for _ in range(num_devices)]
    orchestra = ModelOrchestrator(tasks, devices=devices)
    orchestra.verbose = 0
    return orchestra


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
@pytest.mark.parametrize("k", range(NUM_BUDGETS))
def test_every_budget_trains_to_the_same_bits_within_it(plain, costs, k, partitioner):
    model, memory = gpt(), budgets(costs)[k]
    orchestra = orchestra_of(task_of(model, partitioner=partitioner), memory=memory)
    plan = orchestra.generate().tasks["gpt"]
    report = orchestra.train_models()
    assert report.tasks["gpt"].losses == plain[0]
    assert all(torch.equal(ours, plain[1][name]) for name, ours in model.state_dict().items())
    assert max(plan.shard_bytes) <= report.devices[0].peak_bytes <= memory
    if k == NUM_BUDGETS - 1 and partitioner == "pilot":  # the other weighs seconds as it measures them
        assert plan.boundaries == [len(model)]


def test_a_byte_less_than_the_largest_layer_is_refused_by_name(costs):
    memory = budgets(costs)[0] - 1
    with pytest.raises(ShardDoesNotFit, match=rf"gpt: layer 6 \(Linear\): needs .* \({memory + 1} bytes\) alone"):
        orchestra_of(task_of(gpt()), memory=memory).generate()


def test_what_the_plan_says_of_a_lone_layer_is_what_the_profile_says(costs):
    memory = budgets(costs)[0]
    plan = orchestra_of(task_of(gpt(), partitioner=Balanced(7)), memory=memory).generate().tasks["gpt"]
    assert plan.shard_bytes == [shard_bytes(costs, k, k + 1) for k in range(7)]


@pytest.mark.parametrize("partitioner", ["pilot", "optimal"])
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
    assert all(map(torch.equal, model.parameters(), same.parameters()))


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


def test_auto_gives_a_device_that_would_idle_a_part_of_each_step():
    def spreads(task, devices, *, host=None):
        return tuple(Spread(float(k)) for k in range(1, min(len(devices), task.num_micro_batches) + 1))

    kept = mock.patch(
        "hydra_engine.planning.planner.choose_kept", return_value=Kept(4, 1.0)
    )  # however long a step takes here
    with mock.patch("hydra_engine.planning.planner.predict_spreads", spreads), kept:
        assert orchestra_of(wide(), memory="8MiB", num_devices=3).generate().tasks["task-0"].accumulation_steps == 3
        tasks = [wide(), wide()]
        plan = orchestra_of(*tasks, memory="8MiB", num_devices=3).generate()
        assert [task.accumulation_steps for task in plan.tasks.values()] == [1, 1]


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


def lengths_loader(generator=None):
    return DataLoader(Lengths(8, 9, 40, 17, 8, 30), batch_size=1, shuffle=True, generator=generator)


@pytest.mark.parametrize("own_generator", [False, True])
def test_a_scan_plans_for_the_largest_batch_and_changes_no_bit(own_generator):
    def make():
        return lengths_loader(torch.Generator().manual_seed(9) if own_generator else None)

    model, original = model_of_any_length(), model_of_any_length()
    task = task_of(model, make(), epochs=2, scan_batches=True)
    orchestra = orchestra_of(task, memory="160KiB")
    plan = orchestra.generate().tasks["gpt"]
    report = orchestra.train_models().tasks["gpt"]
    assert report.revisions == []
    result = reference.train(
        original, next_byte_loss, make(), lr=1e-3, epochs=2, optimizer=torch.optim.AdamW, seed=SEED
    )
    assert report.losses == result.losses
    assert all(map(torch.equal, model.parameters(), original.parameters()))
    longest = next(batch for batch in make() if batch[0].shape[1] == 40)
    costs = profile(original, *longest, next_byte_loss, time_layers=False)
    first = plan.boundaries[0]
    assert plan.shard_bytes[0] <= shard_bytes(costs, 0, first)
    assert plan.shard_bytes[-1] == shard_bytes(costs, 5, 6)


class NumpySampler(Sampler):
    """Shuffles with a generator of its own."""

    def __init__(self, size):
        self.size, self.generator_of_numpy = size, np.random.default_rng(6)

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(self.generator_of_numpy.permutation(self.size).tolist())


def loader_with_a_generator_deep_inside():
    lengths = Lengths(8, 9, 40, 17, 8, 30)
    inner = RandomSampler(lengths, generator=torch.Generator().manual_seed(9))
    return DataLoader(lengths, batch_sampler=BatchSampler(inner, 1, False))


def loader_with_a_numpy_sampler():
    lengths = Lengths(8, 9, 40, 17, 8, 30)
    return DataLoader(lengths, batch_size=1, sampler=NumpySampler(len(lengths)))


@pytest.mark.parametrize("make", [loader_with_a_generator_deep_inside, loader_with_a_numpy_sampler])
def test_a_scan_puts_the_loaders_own_generators_back(make):
    model, original = model_of_any_length(), model_of_any_length()
    report = orchestra_of(task_of(model, make(), epochs=2, scan_batches=True), memory="160KiB").train_models()
    result = reference.train(
        original, next_byte_loss, make(), lr=1e-3, epochs=2, optimizer=torch.optim.AdamW, seed=SEED
    )
    assert report.tasks["gpt"].losses == result.losses
    assert all(map(torch.equal, model.parameters(), original.parameters()))


def test_a_loader_with_persistent_workers_is_not_scanned():
    batches = DataLoader(Lengths(8, 9), batch_size=1, num_workers=1, persistent_workers=True)
    with pytest.raises(ValueError, match="scan_batches: the loader has persistent workers"):
        task_of(gpt(), batches, scan_batches=True)


def test_without_a_scan_longer_batches_are_made_room_for_as_they_come():
    model, original = model_of_any_length(), model_of_any_length()
    batches = list(DataLoader(Lengths(8, 9, 40, 17, 8, 30), batch_size=1))
    report = orchestra_of(task_of(model, batches, epochs=2), memory="160KiB").train_models().tasks["gpt"]
    assert [revision.accumulation_steps for revision in report.revisions] == [1]
    assert report.revisions[0].reason == "a batch of a larger shape came"
    reference.train(original, next_byte_loss, batches, lr=1e-3, epochs=2, optimizer=torch.optim.AdamW, seed=SEED)
    assert all(map(torch.equal, model.parameters(), original.parameters()))


def test_a_loader_that_can_be_read_only_once_is_not_scanned():
    with pytest.raises(ValueError, match="scan_batches: the loader is a list_iterator, which can be read only once"):
        task_of(gpt(), iter(loader()), scan_batches=True)


def test_an_unknown_partitioner_is_refused_with_the_known_ones():
    known = "'balanced', 'fastest', 'optimal', 'pilot', 'presharded'"
    with pytest.raises(ValueError, match=f"partitioner: 'greedy', known: {known}"):
        task_of(gpt(), partitioner="greedy")
    with pytest.raises(ValueError, match=r"partitioner: 'balanced' does not take .*Balanced\(4\)"):
        task_of(gpt(), partitioner="balanced")


@pytest.mark.parametrize("memory", [0, -1, "0MiB"])
def test_a_budget_of_nothing_is_refused(memory):
    with pytest.raises(ValueError, match=r"memory: .* a size is at least 1 byte"):
        EmulatedDevice(memory)


def test_a_layer_that_returns_no_tensors_is_refused_by_name():
    class Text(nn.Module):
        def forward(self, x):
            return "text"

    model = nn.Sequential(nn.Linear(4, 4), Text(), nn.Linear(4, 4))
    task = ModelTask(model, F.mse_loss, [(torch.randn(2, 4), torch.randn(2, 4))], name="a")
    with pytest.raises(TypeError, match="output: str without a tensor in it") as error:
        orchestra_of(task, memory="1MiB").generate()
    assert "layer 1 (Text)" in error.value.__notes__[0]


def test_a_loss_that_needs_other_shapes_is_refused_by_name():
    task = ModelTask(nn.Sequential(nn.Linear(4, 4)), F.cross_entropy, [(torch.randn(2, 4), torch.randint(4, (3,)))])
    with pytest.raises(ValueError, match="batch_size") as error:
        orchestra_of(task, memory="1MiB").generate()
    assert "in loss_fn" in error.value.__notes__[0]


def test_models_are_copied_for_nothing_but_their_structure():
    """What a profile shares with the model is as it was."""
    model = gpt()
    before = copy.deepcopy(model.state_dict())
    orchestra_of(task_of(model, partitioner="optimal", accumulation_steps="auto"), memory="1MiB").generate()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
