"""Where slabs have an arena of their own, memory does not go from them to what units work with."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import Callback, EmulatedDevice, ModelTask
from hydra_engine.devices.budget import SLABS, WORK, Ledger, Residents, Ticket
from hydra_engine.errors import DeviceOutOfMemory, ShardDoesNotFit
from hydra_engine.planning.planner import arena_bytes
from hydra_engine.tasks.model import Model
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.refused import names, refused

WIDTH, NUM_LAYERS = 64, 6
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def asked(ledger, num_bytes, kind):
    """What is granted at once, or the refusal."""
    found = []
    ledger.request(Ticket(num_bytes=num_bytes, granted=found.append, refused=found.append, kind=kind))
    [answer] = found
    return answer


class TestLedger:
    def test_each_kind_has_its_own_limit(self):
        ledger = Ledger("device", 100, arena_bytes=60)
        assert (ledger.limit_bytes(SLABS), ledger.limit_bytes(WORK)) == (60, 40)
        assert asked(ledger, 60, SLABS) == 60
        assert (ledger.free_bytes(SLABS), ledger.free_bytes(WORK)) == (0, 40)
        assert asked(ledger, 40, WORK) == 40
        assert ledger.used_bytes == ledger.peak_bytes == 100

    @pytest.mark.parametrize(("kind", "limit"), [(SLABS, 60), (WORK, 40)])
    def test_more_than_the_kind_may_have_is_refused_though_the_rest_is_free(self, kind, limit):
        ledger = Ledger("device", 100, arena_bytes=60)
        error = asked(ledger, limit + 1, kind)
        assert isinstance(error, DeviceOutOfMemory)
        assert (error.needed_bytes, error.free_bytes) == (limit + 1, limit)
        assert not ledger.take(limit + 1, kind)

    def test_all_that_is_free_is_all_of_its_kind(self):
        ledger = Ledger("device", 100, arena_bytes=60)
        assert asked(ledger, None, WORK) == 40

    def test_what_fits_together(self):
        split, whole = Ledger("device", 100, arena_bytes=60), Ledger("device", 100)
        assert split.can_hold(40, 60)
        assert not split.can_hold(41, 10)
        assert whole.can_hold(41, 59)
        assert not whole.can_hold(41, 60)


class Kept:
    """Slabs and what units work with, on a device with an arena."""

    def __init__(self, memory_bytes, arena_bytes):
        self.ledger = Ledger("device", memory_bytes, arena_bytes)
        self.residents = Residents(self.ledger)
        self.disposed = []

    def slab(self, key, num_bytes, next_use_s):
        assert asked(self.ledger, num_bytes, SLABS) == num_bytes
        self.residents.add(key, key, num_bytes, "task", lambda: next_use_s, lambda: self.disposed.append(key))
        self.residents.unpin(key)

    def graph_over(self, key, slab, num_bytes):
        """What is kept beside a slab and pins it."""
        assert self.residents.pin(slab, "task", lambda: 1.0) == slab
        assert asked(self.ledger, num_bytes, WORK) == num_bytes

        def dispose():
            self.disposed.append(key)
            self.residents.unpin(slab)

        assert self.residents.keep(key, key, num_bytes, "task", lambda: 9.0, dispose)


class TestResidents:
    def test_work_gives_no_slab_up_and_slabs_no_work(self):
        kept = Kept(100, 60)
        kept.slab("slab", 50, 9.0)
        assert kept.residents.offer("boundary", "boundary", 30, "task", lambda: 1.0)
        assert not kept.residents.offer(
            "larger", "larger", 20, "task", lambda: 2.0
        )  # 10 are free, and 30 needed before
        assert kept.disposed == []

    def test_a_slab_makes_room_for_a_slab_by_next_use(self):
        kept = Kept(100, 60)
        kept.slab("soon", 30, 1.0)
        kept.slab("late", 30, 2.0)
        assert asked(kept.ledger, 30, SLABS) == 30
        assert kept.disposed == ["late"]

    def test_graphs_go_once_nothing_else_frees_a_slab(self):
        kept = Kept(100, 60)
        kept.slab("slab", 60, 1.0)
        kept.graph_over("graph", "slab", 20)
        assert asked(kept.ledger, 60, SLABS) == 60
        assert kept.disposed == ["graph", "slab"]
        assert kept.ledger.free_bytes(WORK) == 40

    def test_a_place_is_made_by_one_slab_at_a_time(self):
        kept = Kept(100, 60)
        kept.slab("soon", 20, 1.0)
        kept.slab("late", 20, 2.0)
        assert kept.residents.evict_slab()
        assert kept.disposed == ["late"]
        assert kept.residents.evict_slab()
        assert not kept.residents.evict_slab()
        assert kept.ledger.used_bytes == 0


def data(num_samples, seed=0):
    torch.manual_seed(seed)
    return [(torch.randn(num_samples, WIDTH), torch.randn(num_samples, WIDTH)) for _ in range(3)]


def model_of(num_layers=NUM_LAYERS):
    torch.manual_seed(1)
    return nn.Sequential(*(layer for _ in range(num_layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def task_of(name, num_samples, partition=None, model=None, **options):
    model = model_of() if model is None else model
    partitioner = None if partition is None else Presharded(partition)
    return ModelTask(model, F.mse_loss, data(num_samples), 0.1, name=name, seed=1, partitioner=partitioner, **options)


def orchestra_of(tasks, memory, num_devices=1, **options):
    return exact.silent(tasks, devices=[EmulatedDevice(memory, has_arena=True, **options) for _ in range(num_devices)])


def plain(num_samples):
    model = model_of()
    return model, reference.train(model, F.mse_loss, data(num_samples), seed=1, lr=0.1).losses


def test_slabs_get_all_they_need_and_the_rest_is_for_work():
    orchestra = orchestra_of([task_of("a", 4, [4, 8, 12]), task_of("b", 4, [12])], "8MiB")
    orchestra.generate()
    assert arena_bytes(orchestra._tasks.all, 2**23) == 2 * NUM_LAYERS * LAYER_BYTES
    work = max(each.work_bytes for each in orchestra._tasks.all)
    assert arena_bytes(orchestra._tasks.all, work + 1000) == 1000


@pytest.mark.parametrize("chaos", [None, 3])
def test_bits_are_the_plain_loops_in_an_arena_that_holds_two_shards(chaos):
    tasks = [task_of("a", 4, list(range(2, 13, 2))), task_of("b", 4, [4, 8, 12])]
    report = orchestra_of(tasks, 5 * LAYER_BYTES, chaos=chaos).train_models()
    report.raise_failures()
    model, losses = plain(4)
    for task in tasks:
        assert report.tasks[task.name].losses == losses
        exact.assert_same_state(zoo.state(task.model), zoo.state(model))
    assert report.devices[0].peak_bytes <= report.devices[0].memory_bytes


def test_a_task_is_cut_finer_where_anothers_work_needs_the_room():
    heavy = task_of("heavy", 2)  # its slabs are large, its work is small
    busy = task_of("busy", 256, model=model_of(2))  # the other way round
    orchestra = orchestra_of([heavy, busy], 28 * LAYER_BYTES)
    alone = orchestra_of([task_of("heavy", 2)], 28 * LAYER_BYTES).generate().tasks["heavy"]
    together = orchestra.generate().tasks["heavy"]
    assert len(together.boundaries) > len(alone.boundaries)
    report = orchestra.train_models()
    report.raise_failures()
    assert report.tasks["heavy"].losses == plain(2)[1]


def test_what_cannot_be_cut_finer_is_refused_with_both_names():
    heavy, busy = task_of("heavy", 2, [12]), task_of("busy", 256, model=Model(model_of(2)))
    with refused(ShardDoesNotFit, task="heavy"):
        orchestra_of([heavy, busy], 28 * LAYER_BYTES).generate()


class Adds(Callback):
    """Adds a task after the first step, and keeps what that raised."""

    def __init__(self, task):
        self.task, self.error = task, None

    def on_step(self, report):
        if report.steps == 1:
            with pytest.raises(ShardDoesNotFit) as raised:
                self.orchestra.add_task(self.task)
            self.error = raised.value


def test_a_task_that_arenas_were_not_made_for_is_refused_as_it_comes():
    torch.manual_seed(0)
    large = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH))
    adds = Adds(task_of("large", 4, model=large))
    small = task_of("small", 4, model=model_of(1))
    small.callbacks = [adds]
    adds.orchestra = orchestra_of([small], "1MiB")
    report = adds.orchestra.train_models()
    names(adds.error, task="'large'", says="arenas")
    assert list(report.tasks) == ["small"]
    assert report.tasks["small"].status == "finished"


def test_sums_of_parts_refuse_no_plan():
    for num_devices in (1, 3):
        task = task_of("summed", 6, [12], accumulation_steps=3)
        orchestra = orchestra_of([task], int(14.5 * LAYER_BYTES), num_devices)
        assert orchestra.generate().tasks["summed"].boundaries == [12]
