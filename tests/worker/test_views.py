"""What a unit of many parameters does once for all: views in its slabs, made once for each place, and copies."""

import weakref
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn

from hydra_engine import EmulatedDevice, ModelTask
from hydra_engine.devices import STORE, OpenDevice, Residents, Slab
from hydra_engine.host.layout import Slot
from hydra_engine.trace import Trace
from hydra_engine.worker import spiller as spiller_module
from hydra_engine.worker.spiller import Spiller
from hydra_engine.worker.worker import Worker
from partitioners import Presharded
from tests import exact, reference


def task_of(num_steps, num_layers=4):
    torch.manual_seed(0)
    batches = [(torch.randn(2, 8), torch.randn(2, 8)) for _ in range(num_steps)]
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(num_layers)]
    ends = Presharded(list(range(1, num_layers + 1)))
    return ModelTask(nn.Sequential(*layers), nn.MSELoss(), batches, 1e-2, partitioner=ends, seed=0)


def made_in(num_steps, memory="2KiB"):
    """Return how many views are made in a run, and its task."""
    made, original = Counter(), Slot.link_view

    def link_view(slot, storage, offset):
        made[slot.name] += 1
        return original(slot, storage, offset)

    task = task_of(num_steps)
    orchestra = exact.silent([task], devices=[EmulatedDevice(memory)])
    orchestra.generate()
    with mock.patch.object(Slot, "link_view", link_view):
        orchestra.train_models().raise_failures()
    return sum(made.values()), task


@pytest.mark.rest
def test_no_step_makes_views_anew():
    assert made_in(8)[0] == made_in(4)[0]


@pytest.mark.parametrize("most", [0, 3])
def test_with_room_for_few_they_are_made_anew_with_the_same_bits(most):
    plenty, kept = made_in(8)
    with mock.patch.object(spiller_module, "MOST_VIEWS", most):
        few, anew = made_in(8)
    assert few > plenty
    exact.assert_same_state(anew.model.state_dict(), kept.model.state_dict())


def test_gradients_of_a_shard_are_one_copy():
    copied, original = Counter(), OpenDevice.copy

    def copy(device, lane, pairs, *, urgent=False):
        copied[lane, len(pairs)] += 1
        return original(device, lane, pairs, urgent=urgent)

    orchestra = exact.silent([task_of(3, num_layers=2)], devices=[EmulatedDevice("64KiB")])
    orchestra.generate()
    with mock.patch.object(OpenDevice, "copy", copy):
        orchestra.train_models().raise_failures()
    # In each step, of both layers a weight and a bias. One by one: the boundary, and its gradient.
    assert {number: times for (lane, number), times in copied.items() if lane == STORE} == {2: 3 * 2, 1: 3 * 2}


class Bench:
    """A spiller, and a task's only shard."""

    def __init__(self):
        spec = EmulatedDevice("64KiB")
        self.device = spec.open(0, Trace(), 1)
        self.spiller = Spiller(self.device, Residents(self.device.ledger))
        orchestra = exact.silent([task_of(1, num_layers=1)], devices=[spec])
        orchestra.generate()
        self.state = orchestra._tasks.all[0].state
        self.shard = self.state.cut.shards[0]

    def slab(self):
        return self.device.take_slab(self.shard.slab_bytes)

    def views(self, slab):
        return self.spiller.views.of(self.state, self.shard, {True: slab})


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.device.close()


def starts(views):
    return [view.untyped_storage().data_ptr() + view.storage_offset() * view.itemsize for view in views.values()]


def test_the_same_place_has_the_same_views_and_another_one_others(bench):
    low, high = bench.slab(), bench.slab()
    assert bench.views(low) is bench.views(low)
    assert set(starts(bench.views(low))).isdisjoint(starts(bench.views(high)))
    bench.device.give_slab_back(low)
    again = bench.slab()
    assert again.offset == low.offset
    assert bench.views(again) is bench.views(low)


def test_a_slab_beside_the_arena_is_not_taken_for_one_at_the_same_offset_and_not_held(bench):
    slab = bench.slab()
    assert slab.offset == 0
    inside, memory = bench.views(slab), torch.UntypedStorage(slab.num_bytes)
    beside = Slab(storage=memory, offset=0, num_bytes=slab.num_bytes)
    assert min(starts(bench.views(beside))) == memory.data_ptr()
    assert bench.views(slab) is inside
    gone = weakref.ref(memory)
    del memory, beside
    assert gone() is None


def test_a_task_that_goes_takes_its_views_with_it(bench):
    slab = bench.slab()
    before = bench.views(slab)
    bench.spiller.views.forget("another")
    assert bench.views(slab) is before
    bench.spiller.views.forget(bench.state.name)
    assert bench.views(slab) is not before


class Joined(nn.Module):
    """Two numbers as one complex one: the gradient of the second is a view with a bit that negates it."""

    def __init__(self):
        super().__init__()
        self.real, self.imaginary = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return (x * torch.complex(self.real, self.imaginary).conj()).abs()


class Stacked(nn.Module):
    """Complex matrices in one: gradients are views beside multiples of 64, with a bit that conjugates them."""

    def __init__(self):
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.experts = nn.ParameterList(
            nn.Parameter(torch.randn(5, 5, dtype=torch.complex64, generator=made)) for _ in range(3)
        )

    def forward(self, x):
        return (x.to(torch.complex64) @ torch.cat(list(self.experts)).conj().mT).abs()


@pytest.mark.parametrize(("layer", "shapes"), [(Joined, (3, 3)), (Stacked, (5, 15))])
def test_gradients_that_are_negated_or_conjugated_go_down_too(layer, shapes):
    made = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randn(4, size, generator=made) for size in shapes) for _ in range(3)]
    plain, ours = nn.Sequential(layer(), nn.Tanh()), nn.Sequential(layer(), nn.Tanh())
    reference.train(plain, nn.MSELoss(), batches, seed=0, lr=0.1)
    task = ModelTask(ours, nn.MSELoss(), batches, 0.1, partitioner=Presharded([1, 2]), seed=0)
    orchestra = exact.silent([task], devices=[EmulatedDevice("64KiB")])
    orchestra.train_models().raise_failures()
    exact.assert_same_state(ours.state_dict(), plain.state_dict())


def test_a_closed_worker_holds_nothing_of_the_arena(bench):
    spec = EmulatedDevice("64KiB")
    worker = Worker(0, spec.open(0, Trace(), 1), Trace(), lambda _: None, lambda: None)
    slab = worker.device.take_slab(bench.shard.slab_bytes)
    worker._spiller.views.of(bench.state, bench.shard, {True: slab})
    gone = weakref.ref(slab.storage)
    worker.device.give_slab_back(slab)
    del slab
    worker.close()
    assert gone() is None
