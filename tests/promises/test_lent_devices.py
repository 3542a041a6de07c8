"""Tasks join while others train on devices that have no room beside them: these lend the device for the rehearsal."""

import _thread
import queue
import threading
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import Callback, CudaDevice, EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.devices.lanes import Promise
from hydra_engine.errors import DeviceLost, ShardDoesNotFit
from hydra_engine.run.feeds import Loans
from hydra_engine.run.workers import Workers
from partitioners import Presharded
from tests import exact, reference
from tests.covering import covering
from tests.fake_cuda import MIB, FakeCuda
from tests.refused import names

STEPS, EPOCHS, LR = 4, 3, 1e-2


class At(Callback):
    """Calls functions once each, at steps of its task."""

    def __init__(self, calls):
        self.calls, self.errors = dict(calls), []

    def on_step(self, report):
        call = self.calls.pop(report.steps, None)
        if call is not None:
            try:
                call()
            except Exception as error:
                self.errors.append((type(error), str(error)))  # without its frames, which hold the run


def batches(num=STEPS, size=5):
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(size, 8, generator=generator), torch.randint(3, (size,), generator=generator)) for _ in range(num)
    ]


def model_of(seed, width=8, extra=None):
    with torch.random.fork_rng(devices=[]):  # of the task whose callback makes it
        torch.manual_seed(seed + 1)
        layers = [nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Tanh(), nn.Linear(width, 3)]
    return nn.Sequential(*layers[:3], *([] if extra is None else [extra]), *layers[3:])


def task_of(name, *callbacks, seed=0, width=8, extra=None, loader=None, **options):
    options = {"optimizer": torch.optim.AdamW, "partitioner": Presharded([1, 4, 5 + (extra is not None)]), **options}
    loader = batches() if loader is None else loader
    model = model_of(seed, width, extra)
    return ModelTask(model, F.cross_entropy, loader, LR, EPOCHS, name=name, seed=seed, callbacks=callbacks, **options)


def assert_as_alone(task, report, seed, width=8, loader=None):
    model = model_of(seed, width)
    options = {"epochs": EPOCHS, "lr": LR, "optimizer": torch.optim.AdamW, "seed": seed}
    result = reference.train(model, F.cross_entropy, batches() if loader is None else loader, **options)
    found = report.tasks[task.name]
    assert found.status == "finished", found.error
    assert found.losses == result.losses
    expected = model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in task.model.state_dict().items())


OTHER_KINDS = [pytest.param(kind, marks=pytest.mark.rest) for kind in ("stand-in", "delayed")]


@pytest.fixture(params=["emulated", *OTHER_KINDS])
def devices_of(request):
    """A function that gives so many devices of a kind that lends itself, of so many bytes each."""
    if request.param == "stand-in":
        cuda, asked = FakeCuda(num_devices=2), []

        def found(num, num_bytes=MIB):
            asked.append(-(-num_bytes * 16 // 15) + cuda.context_bytes)
            return [CudaDevice(index, asked[0]) for index in range(num)]

        with cuda.installed():
            yield found
        assert all(card.most_reserved_bytes <= asked[0] for card in cuda.cards)
        cuda.check_all_left_as_found()
        return

    def emulated(num, num_bytes=MIB):
        options = {"chaos": 5, "has_arena": True} if request.param == "delayed" else {}
        devices = [EmulatedDevice(num_bytes, meter_every_unit=True, **options) for _ in range(num)]
        for device in devices:
            device.has_room_for_planning = False
        return devices

    yield emulated


def orchestra_of(tasks, devices, **options):
    orchestra = ModelOrchestrator(tasks, devices=devices, **options)
    orchestra.verbose = 0
    return orchestra


@pytest.fixture
def loans(monkeypatch):
    """Devices that were lent, by name."""
    found, borrowed = [], Loans.borrowed

    @contextmanager
    def noted(joining, spec):
        with borrowed(joining, spec) as device:
            found.append(device.name)
            yield device

    monkeypatch.setattr(Loans, "borrowed", noted)
    return found


@pytest.mark.rest
@pytest.mark.net  # on all kinds of device
def test_what_a_rehearsal_takes_of_a_lent_device_is_not_in_the_runs_curve(devices_of, monkeypatch):
    seen, vacated = [], Workers.vacated

    @contextmanager
    def noted(workers, index):
        trace = workers._open[index].device.trace
        with vacated(workers, index) as device:
            before = trace.memory()
            yield device
            seen.append((before, trace.memory(), device.trace.memory()))

    monkeypatch.setattr(Workers, "vacated", noted)
    first = task_of("first", at := At({2: lambda: orchestra.add_task(task_of("second", seed=5, width=16))}))
    orchestra = orchestra_of([first], devices_of(1))
    orchestra.train_models().raise_failures()
    assert at.errors == []
    ((before, after, of_rehearsal),) = seen
    assert before == after
    assert of_rehearsal


@pytest.mark.rest
@covering(strength=1, num_devices=[1, 2], step=[1, STEPS * EPOCHS - 1])
def test_a_task_of_another_structure_joins_with_the_bits_of_it_alone(devices_of, num_devices, step, loans):
    devices = devices_of(num_devices)
    second, third = task_of("second", seed=5, width=16), task_of("third", seed=6, width=16)
    first = task_of("first", at := At({step: lambda: [orchestra.add_task(task) for task in (second, third)]}))
    other = task_of("other", seed=1)
    orchestra = orchestra_of([first, other], devices)
    report = orchestra.train_models()
    assert at.errors == []
    assert [plan.adopted_from for plan in orchestra.plan.tasks.values()] == [None, "first", None, "second"]
    assert len(loans) == 1
    exact.assert_within_budget(report, num_devices)
    for task, seed, width in ((first, 0, 8), (other, 1, 8), (second, 5, 16), (third, 6, 16)):
        assert_as_alone(task, report, seed, width)


@pytest.mark.rest
def test_where_memory_is_short_the_rehearsal_stays_within_the_budget(devices_of, loans):
    """What trains fills the device: of its own and of the new task's shards, one is there at a time."""
    budget_bytes = 12 * 1024
    devices = devices_of(1, budget_bytes)
    second = task_of("second", seed=5, width=12)
    first = task_of("first", at := At({2: lambda: orchestra.add_task(second)}), width=16)
    orchestra = orchestra_of([first, task_of("other", seed=1, width=16)], devices)
    report = orchestra.train_models()
    assert at.errors == []
    assert loans
    exact.assert_within_budget(report)
    assert_as_alone(first, report, 0, 16)
    assert_as_alone(second, report, 5, 12)


@pytest.mark.rest
def test_tasks_that_come_from_several_threads_take_turns(devices_of, loans):
    devices = devices_of(2)
    tasks = [task_of(str(width), seed=width, width=width) for width in (9, 10, 11, 12)]
    added, errors, threads = threading.Semaphore(0), [], []

    def add(task):
        try:
            orchestra.add_task(task)
        except Exception as error:
            errors.append(error)
        added.release()

    def begin():
        for task in tasks:
            threads.append(threading.Thread(target=add, args=(task,)))
            threads[-1].start()
        for _ in tasks:
            assert added.acquire(timeout=60)

    first = task_of("first", at := At({1: begin}))
    orchestra = orchestra_of([first], devices)
    report = orchestra.train_models()
    for thread in threads:
        thread.join()
    assert (at.errors, errors) == ([], [])
    assert len(loans) == len(tasks)
    assert_as_alone(first, report, 0)
    for task in tasks:
        assert_as_alone(task, report, task.seed, task.seed)


class Raises(nn.Module):
    def forward(self, x):
        raise ArithmeticError("of the layer")


class Counts(nn.Module):
    """Refused: its forward counts."""

    num = 0

    def forward(self, x):
        self.num += 1
        return x


class Huge(nn.Module):
    """Takes more than a device has."""

    def forward(self, x):
        return x + (x.new_zeros(4 * MIB // 4).sum() * 0)


@pytest.mark.parametrize(
    ("layer", "error", "text"),
    [
        (Raises, ArithmeticError, "of the layer"),
        pytest.param(Counts, ValueError, "num", marks=pytest.mark.rest),
        (Huge, ShardDoesNotFit, "second"),
    ],
)
def test_a_rehearsal_that_fails_harms_nobody(devices_of, layer, error, text):
    devices = devices_of(1)
    third = task_of("third", seed=5, width=16)
    calls = {
        2: lambda: orchestra.add_task(task_of("second", extra=layer())),
        3: lambda: orchestra.add_task(third),
    }
    first, other = task_of("first", at := At(calls)), task_of("other", seed=1)
    orchestra = orchestra_of([first, other], devices)
    report = orchestra.train_models()
    [(kind, said)] = at.errors
    assert issubclass(kind, error)
    assert text in said
    assert list(report.tasks) == ["first", "other", "third"]
    exact.assert_within_budget(report)
    assert_as_alone(first, report, 0)
    assert_as_alone(other, report, 1)
    assert_as_alone(third, report, 5, 16)


class Loan(Promise):
    """Nobody waits for it for ever."""

    def result(self):
        assert self._lock.acquire(timeout=60)
        self._lock.release()
        return super().result()


@pytest.mark.parametrize("mode", ["training", pytest.param("validation", marks=pytest.mark.rest)])
def test_a_layer_that_adds_a_task_is_refused_by_name(devices_of, mode, loans, monkeypatch):
    """The rehearsal would wait for the very unit that asks for it; in training it would be in that one's graph."""
    monkeypatch.setattr("hydra_engine.run.feeds.Promise", Loan)
    devices = devices_of(1)
    calls, errors = queue.SimpleQueue(), []

    class Calls(nn.Module):
        def forward(self, x):
            if self.training == (mode == "training") and not calls.empty():
                calls.get()()
            return x

    def add():
        try:
            orchestra.add_task(task_of("second", seed=5, width=16))
        except RuntimeError as error:
            errors.append(str(error))  # without its frames, which hold the run

    class Begins(Callback):
        def on_epoch_begin(self, report, epoch):
            if epoch == 1:  # until this returns, nothing of the epoch is read
                calls.put(add)

    first = task_of("first", Begins(), extra=Calls(), validation=batches(2))
    orchestra = orchestra_of([first, other := task_of("other", seed=1)], devices)
    report = orchestra.train_models()
    [error] = errors
    names(error, says="add_task layer loss")
    assert loans == []
    assert {name: each.status for name, each in report.tasks.items()} == {"first": "finished", "other": "finished"}
    assert_as_alone(other, report, 1)


def test_a_task_that_is_planned_too_late_waits_for_the_next_call(devices_of):
    over, reading = threading.Event(), threading.Event()

    class Late(list):
        def __iter__(self):
            reading.set()
            assert over.wait(60)
            return super().__iter__()

    devices = devices_of(1)
    second = task_of("second", seed=5, width=16, loader=Late(batches()))
    errors = []

    def add():
        try:
            orchestra.add_task(second)
        except Exception as error:
            errors.append(error)

    def begin():
        thread.start()
        assert reading.wait(60)

    thread = threading.Thread(target=add)
    first = task_of("first", At({1: begin}))
    orchestra = orchestra_of([first], devices)
    report = orchestra.train_models()
    over.set()
    thread.join()
    assert errors == []
    assert_as_alone(first, report, 0)
    assert_as_alone(second, orchestra.train_models(), 5, 16)


def test_an_interrupt_ends_the_run_once_the_device_is_returned(devices_of):
    class Interrupts(nn.Module):
        has = False

        def forward(self, x):
            if not Interrupts.has:
                Interrupts.has = True
                is_planned.set()
                _thread.interrupt_main()
            return x

    Interrupts.has = False
    devices = devices_of(1)
    added, is_planned = threading.Event(), threading.Event()

    def add():
        orchestra.add_task(task_of("second", extra=Interrupts()))
        added.set()

    thread = threading.Thread(target=add)
    calls = {1: thread.start, 100: partial(is_planned.wait, 60)}  # however slow the thread is
    first = task_of("first", At(calls), loader=batches(200))
    orchestra = orchestra_of([first], devices)
    with pytest.raises(KeyboardInterrupt):
        orchestra.train_models()
    thread.join(60)
    assert added.is_set()
    assert orchestra.report.tasks["first"].status == "stopped"
    report = orchestra.train_models()  # it waits for the next call
    assert (list(report.tasks), report.tasks["second"].steps) == (["second"], STEPS * EPOCHS)


def test_a_rehearsal_that_strikes_the_device_ends_the_run_with_the_others_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cuda = FakeCuda()

    class Strikes(nn.Module):
        def forward(self, x):
            if threading.current_thread().name.endswith("-compute"):
                cuda.strike()
            return x

    with cuda.installed():
        asked = -(-MIB * 16 // 15) + cuda.context_bytes
        first = task_of("first", at := At({2: lambda: orchestra.add_task(task_of("second", extra=Strikes()))}))
        orchestra = orchestra_of([first], [CudaDevice(0, asked)])
        with pytest.raises(SystemExit) as ended:
            orchestra.train_models()
        assert ended.value.code == 75
        assert isinstance(ended.value.__cause__, DeviceLost)
        assert [kind for kind, _ in at.errors] == [DeviceLost]
        assert orchestra.report.tasks["first"].status == "stopped"
        assert len(list(tmp_path.glob("hydra-rescue-*"))) == 1
        orchestra.report = None
        del ended
    assert not cuda.misuses
