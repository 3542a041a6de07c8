"""A device goes on while what it has computed is on its way to DRAM; whatever becomes of that."""

import threading
from contextlib import contextmanager, suppress
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import EmulatedDevice, ModelTask
from hydra_engine.errors import DeviceOutOfMemory
from hydra_engine.run.loop import EngineRun
from hydra_engine.schedule.events import Computed
from hydra_engine.worker.executor import Executor
from hydra_engine.worker.spiller import Spiller
from hydra_engine.worker.worker import Worker
from partitioners import Presharded
from tests import exact, reference, zoo

WIDTH, TIMEOUT_S = 16, 60.0


def batches(num):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, WIDTH, generator=generator), torch.randint(5, (8,), generator=generator)) for _ in range(num)
    ]


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def task_of(model, num_steps, name="a", **options):
    options = {"partitioner": Presharded([1, 2, 3, 4]), "seed": 0, "optimizer": torch.optim.AdamW} | options
    return ModelTask(model, F.cross_entropy, batches(num_steps), 1e-2, name=name, **options)


def orchestrator(tasks):
    # With a link, nothing is stored by the thread that computes.
    orchestra = exact.silent(tasks, devices=[EmulatedDevice("1MiB", bandwidth="1GiB")])
    orchestra.generate()
    return orchestra


def plain(num_steps):
    model = model_of()
    result = reference.train(model, F.cross_entropy, batches(num_steps), seed=0, lr=1e-2, optimizer=torch.optim.AdamW)
    return model, result.losses


def test_backwards_do_not_wait_for_gradients_on_their_way_down():
    model, all_computed, waited = model_of(), threading.Event(), []
    orchestra = orchestrator([task_of(model, 1)])
    store, run = Spiller.store_gradients, Executor.run

    def store_late(spiller, state, unit, shard, out):
        if unit.kind == "fb":  # those behind it in its lane wait as well
            waited.append(all_computed.wait(TIMEOUT_S))
        store(spiller, state, unit, shard, out)

    @contextmanager
    def running(executor, spec, *args):
        with run(executor, spec, *args) as unit:
            yield unit
        if (spec.kind, spec.shard.index) == ("b", 2):
            all_computed.set()

    with mock.patch.object(Spiller, "store_gradients", store_late), mock.patch.object(Executor, "run", running):
        report = orchestra.train_models()
    assert waited == [True], "the backward of shard 2 was computed meanwhile"
    same, losses = plain(1)
    assert report.tasks["a"].losses == losses
    exact.assert_same_state(zoo.state(model), zoo.state(same))


def test_a_boundary_is_in_dram_before_the_next_unit_begins():
    orchestra, order = orchestrator([task_of(model_of(), 1)]), []
    store, load = Spiller.store_micro, Spiller.load_input

    def storing(spiller, state, kind, shard, m, out):
        store(spiller, state, kind, shard, m, out)
        order.append(f"stored {kind}{shard.index}")

    def loading(spiller, state, kind, shard, m, arriving):
        order.append(f"begun {kind}{shard.index}")
        return load(spiller, state, kind, shard, m, arriving)

    with mock.patch.object(Spiller, "store_micro", storing), mock.patch.object(Spiller, "load_input", loading):
        orchestra.train_models()
    chain = ["f0", "f1", "f2", "fb3", "b2", "b1", "b0"]
    assert order == [f"{what} {unit}" for unit in chain for what in ("begun", "stored")]


def failing_in(kind, shard, step, *, of="a", once=lambda: None):
    """Patches: gradients of a unit raise on their way to DRAM."""
    store = Spiller.store_gradients

    def failing(spiller, state, unit, shard_, out):
        if unit == (of, kind, shard, step, 0):
            once()
            raise RuntimeError("injected")
        store(spiller, state, unit, shard_, out)

    return mock.patch.object(Spiller, "store_gradients", failing)


def test_gradients_that_fail_on_their_way_down_end_their_task_alone():
    models = [model_of() for _ in range(2)]
    orchestra = orchestrator([task_of(model, 3, name) for model, name in zip(models, "ab", strict=True)])
    close, left = Worker.close, []

    def closing(worker):
        worker.settle()
        worker._residents.forget()
        left.append((worker.device.ledger.used_bytes, worker.device.arena._taken, worker.device.arena._elsewhere_bytes))
        close(worker)

    with failing_in("b", 2, 1), mock.patch.object(Worker, "close", closing):
        report = orchestra.train_models()
    assert [report.tasks[name].status for name in "ab"] == ["failed", "finished"]
    assert str(report.tasks["a"].exception) == "injected"
    for model, num_steps in zip(models, (1, 3), strict=True):
        same, _ = plain(num_steps)
        assert all(map(torch.equal, model.parameters(), same.parameters())), "the last commit"
    assert left == [(0, [], 0)]


def test_gradients_that_fail_after_the_next_unit_was_computed_end_their_task():
    model, runs, computed, waited = model_of(), [], threading.Event(), []
    orchestra = orchestrator([task_of(model, 3)])
    run = Executor.run

    @contextmanager
    def running(executor, spec, *args):
        with run(executor, spec, *args) as unit:
            yield unit
        runs.append((spec.kind, spec.shard.index))
        if runs.count(("b", 1)) == 2:
            computed.set()

    failing = failing_in("b", 2, 1, once=lambda: waited.append(computed.wait(TIMEOUT_S)))
    with failing, mock.patch.object(Executor, "run", running), pytest.raises(RuntimeError, match="injected"):
        orchestra.train_models()
    assert waited == [True]
    same, _ = plain(1)
    assert all(map(torch.equal, model.parameters(), same.parameters())), "the last commit"


def test_a_unit_whose_input_failed_on_its_way_down_begins_again_with_it():
    """The store has failed, the deciding thread has not heard of it yet, and begins the next unit."""
    stored, heard = [], threading.Event()
    store_micro, handle = Spiller.store_micro, EngineRun._handle

    def fails_once(self, state, kind, shard, m, out):
        stored.append((kind, shard.index))
        if stored.count(("f", 1)) == 1 and stored[-1] == ("f", 1):
            raise DeviceOutOfMemory("device", 1, 0, 0)
        store_micro(self, state, kind, shard, m, out)

    def hears_late(self, event):
        if isinstance(event, Computed) and (event.unit.kind, event.unit.shard) == ("f", 1) and not heard.is_set():
            heard.set()
            passage = self.workers.all[0]._passages["a", 0]
            with suppress(DeviceOutOfMemory):
                passage.stored.result()  # given up by now
        handle(self, event)

    orchestra = orchestrator([task_of(model_of(), 2, accumulation_steps="auto")])
    orchestra.generate()
    with mock.patch.object(Spiller, "store_micro", fails_once), mock.patch.object(EngineRun, "_handle", hears_late):
        report = orchestra.train_models().tasks["a"]
    assert heard.is_set()
    assert report.status == "finished", report.error
    assert len(report.losses) == 2
