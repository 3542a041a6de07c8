"""A task that is over is forgotten: what it held is freed while others train, and nobody's bits depend on it."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import Callback, HostOutOfMemory, ModelTask, PauseTask, StopTask
from hydra_engine.data.reader import Reader
from partitioners import Presharded
from tests import exact, reference
from tests.covering import covering
from tests.refused import names, refused

STEPS, EPOCHS = 4, 3
WAIT_S = 100  # a failure; what is waited for has no clock


class At(Callback):
    """Calls a function with the report, once, at a step or at the end."""

    def __init__(self, step, call):
        self.step, self.call = step, call

    def on_step(self, report):
        if report.steps == self.step:
            self.call(report)

    def on_task_end(self, report):
        if self.step == "end":
            self.call(report)

    def on_task_pause(self, report):
        if self.step == "pause":
            self.call(report)


def raises(error):
    def act(*_):
        raise error

    return act


class Batches(list):
    """A loader that can be referred to weakly."""


def batches(num=STEPS):
    generator = torch.Generator().manual_seed(3)
    return Batches(
        (torch.randn(5, 8, generator=generator), torch.randint(3, (5,), generator=generator)) for _ in range(num)
    )


def model_of(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))


def task(name, *callbacks, seed=0, target=None, **options):
    """`target`: of the fourth batch."""
    options = {"partitioner": Presharded([1, 3, 4]), "seed": seed, **options}
    loader = batches()
    if target is not None:
        loader[3][1].fill_(target)
    return ModelTask(model_of(seed), F.cross_entropy, loader, 1e-2, EPOCHS, name=name, callbacks=callbacks, **options)


def orchestra_of(*tasks, **options):
    return exact.silent(tasks, "1MiB", **options)


def assert_as_plain(trained, report, optimizer=torch.optim.SGD):
    model = model_of(trained.seed)
    expected = reference.train(
        model, F.cross_entropy, batches(), seed=trained.seed, epochs=EPOCHS, lr=1e-2, optimizer=optimizer
    )
    assert report.losses == expected.losses
    assert all(map(torch.equal, trained.model.parameters(), model.parameters()))


class Held:
    """Weak references to all that is large of a task; `gone` is set as the last of them dies."""

    def __init__(self):
        self.gone = threading.Event()
        self.alive = set()

    def see(self, what, thing):
        self.alive.add(what)

        def died():
            self.alive.discard(what)
            if not self.alive:
                self.gone.set()

        weakref.finalize(thing, died).atexit = False

    def see_parameters(self, model):
        for k, parameter in enumerate(model.parameters()):
            self.see(f"parameter {k}", parameter)

    def made(self, name, *callbacks, **options):
        def optimizer(params, lr):
            found = torch.optim.Adam(params, lr=lr)
            if threading.current_thread().name == f"{name}-reader":  # and not one for a plan
                self.see("optimizer", found)
            return found

        found = task(name, *callbacks, seed=5, optimizer=optimizer, **options)
        self.see("task", found)
        self.see("model", found.model)
        self.see("loader", found.dataloader)
        self.see_parameters(found.model)
        return found


@pytest.fixture
def by_counting():
    """References are counted, and no cycle is looked for: memory is free at once."""
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])  # the first imports torch._dynamo, which leaves frames in cycles
    gc.collect()
    gc.disable()
    yield
    gc.enable()


stop, pause = raises(StopTask), raises(PauseTask)  # classes: an error that is raised again holds frames

ENDS = {
    "finished": {},
    "validated": {"validation": batches(2), "ema_decay": 0.9},
    "stopped": {"callbacks": (At(3, stop),)},
    "failed": {"target": 9},
    "spread": {"accumulation_steps": 2},
    "narrow": {"precision": "bfloat16"},
    "early": {"early_release": True},
}


@pytest.mark.rest
@pytest.mark.usefixtures("by_counting")
@pytest.mark.parametrize(
    ("end", "num_devices"),
    [
        ("validated", 1),
        ("stopped", 2),
        ("failed", 1),
        *(pytest.param(end, 2, marks=pytest.mark.rest) for end in ("finished", "spread", "narrow", "early")),
    ],
)
def test_a_forgotten_task_is_freed_while_another_trains(end, num_devices, tmp_path):
    options = dict(ENDS[end])
    callbacks = options.pop("callbacks", ())
    held, is_over = Held(), threading.Event()

    def forget(report):
        assert is_over.wait(WAIT_S)
        assert "model" in held.alive
        orchestra.forget_task("first")
        assert held.gone.wait(WAIT_S), held.alive

    second = task("second", At(2, forget))
    orchestra = orchestra_of(
        held.made("first", *callbacks, At("end", lambda report: is_over.set()), **options),
        second,
        num_devices=num_devices,
        checkpoint_dir=tmp_path,
        checkpoint_every=2,
    )
    report = orchestra.train_models()
    assert report.tasks["second"].status == "finished", report.tasks["second"].error
    assert_as_plain(second, report.tasks["second"])
    mine = report.tasks["first"]
    assert list(report.tasks) == ["first", "second"]
    assert mine.status == (end if end in ("failed", "stopped") else "finished")
    assert len(mine.losses) == mine.steps >= 3
    assert mine.ema_state is None
    assert list(orchestra.plan.tasks) == ["second"]
    if end == "failed":
        assert isinstance(mine.exception, IndexError)


@pytest.mark.rest
@pytest.mark.usefixtures("by_counting")
def test_in_its_own_end_and_then_another_joins():
    """As a sweep does, with each task the next one's."""
    helds = [Held() for _ in range(4)]
    seen = []

    def made(number):
        def follow(report):
            orchestra.forget_task(report.name)
            seen.append([held.gone.is_set() for held in helds[:number]])
            if number + 1 < len(helds):
                orchestra.add_task(made(number + 1))

        return helds[number].made(str(number), At("end", follow))

    def wait(report):
        assert all(held.gone.wait(WAIT_S) for held in helds)

    last = task("last", At(1, wait))
    orchestra = orchestra_of(made(0), last)
    report = orchestra.train_models()
    assert list(report.tasks) == ["0", "last", "1", "2", "3"]
    assert {each.status for each in report.tasks.values()} == {"finished"}
    assert len({tuple(report.tasks[str(k)].losses) for k in range(4)}) == 1
    assert_as_plain(last, report.tasks["last"])


@pytest.mark.rest
@pytest.mark.usefixtures("by_counting")
@covering(strength=1, step=[1, STEPS, STEPS + 1], by_itself=[False, True])
def test_one_that_is_paused_goes_on_from_disk(step, by_itself, tmp_path):
    held, is_over = Held(), threading.Event()
    again = task("first", seed=5, optimizer=torch.optim.Adam)

    def end(report):
        if by_itself:
            orchestra.forget_task("first")
        is_over.set()

    def go_on(report):
        assert is_over.wait(WAIT_S)
        if not by_itself:
            orchestra.forget_task("first")
        assert held.gone.wait(WAIT_S), held.alive
        with refused(task="'first'", says="'second'"):
            orchestra.forget_task("first")
        orchestra.add_task(again)

    second = task("second", At(2, go_on))
    first = held.made("first", At(step, pause), At("pause", end))
    orchestra = orchestra_of(first, second, checkpoint_dir=tmp_path)
    del first
    report = orchestra.train_models()
    assert [(name, each.status) for name, each in report.tasks.items()] == [
        ("second", "finished"),
        ("first", "finished"),
    ]
    assert_as_plain(second, report.tasks["second"])
    assert_as_plain(again, report.tasks["first"], optimizer=torch.optim.Adam)
    schedule = [placed.unit for placed in report.schedule if placed.unit.task == "first"]
    assert len(schedule) == len(set(schedule)) == EPOCHS * STEPS * 5  # the last of three shards has one unit


@pytest.mark.rest
def test_one_that_is_paused_is_reported_so_and_goes_on_in_a_later_call(tmp_path):
    orchestra = orchestra_of(
        task("first", At(5, pause), At("pause", lambda report: orchestra.forget_task("first"))),
        task("second"),
        checkpoint_dir=tmp_path,
    )
    report = orchestra.train_models()
    assert (report.tasks["first"].status, report.tasks["first"].steps) == ("paused", 5)
    orchestra.add_task(again := task("first"))
    report = orchestra.train_models()
    assert list(report.tasks) == ["first"]
    assert_as_plain(again, report.tasks["first"])
    orchestra.forget_task("first")
    with refused(task="'first'"):
        orchestra.add_task(task("first"))


def test_one_that_a_resume_found_to_be_over_has_its_saved_report(tmp_path):
    orchestra_of(task("first"), checkpoint_dir=tmp_path).train_models()
    orchestra = orchestra_of(task("first"), checkpoint_dir=tmp_path)
    report = orchestra.train_models(resume=True).tasks["first"]
    assert (report.status, report.steps) == ("finished", EPOCHS * STEPS)
    assert orchestra.forget_task("first") is report


def test_paused_before_it_is_begun_and_forgotten_it_has_its_seed_again(tmp_path):
    orchestra = orchestra_of(task("first"), task("second"), checkpoint_dir=tmp_path)
    orchestra.pause_task("first")
    orchestra.forget_task("first")
    orchestra.add_task(again := task("first", seed=9))
    report = orchestra.train_models()
    assert again.seed == report.tasks["first"].seed == 0


def test_an_unnamed_task_has_no_name_of_one_that_is_paused_and_forgotten(tmp_path):
    orchestra = orchestra_of(task(None), task(None, At(2, pause), seed=2), checkpoint_dir=tmp_path)
    assert orchestra.train_models().tasks["task-1"].status == "paused"
    orchestra.forget_task("task-1")
    name = orchestra.add_task(third := task(None, seed=7))
    assert name == "task-2"
    report = orchestra.train_models().tasks[name]
    assert report.seed == 7
    assert_as_plain(third, report)


@pytest.mark.rest
@pytest.mark.usefixtures("by_counting")
def test_after_training():
    held = Held()
    orchestra = orchestra_of(held.made("first"), task("second"))
    report = orchestra.train_models()
    assert not held.gone.is_set()
    orchestra.forget_task("first")
    assert held.gone.is_set(), held.alive
    assert orchestra.report is report
    assert report.tasks["first"].status == "finished"
    with refused(task="'first'", says="evaluate 'second'"):
        orchestra.evaluate("first", batches())
    with refused(task="'first'", says="forget_task 'second'"):
        orchestra.forget_task("first")
    with refused(task="'first'"):
        orchestra.add_task(task("first"))  # reports, and checkpoints, have it
    orchestra.add_task(third := task("third"))
    assert_as_plain(third, orchestra.train_models().tasks["third"])


def test_only_what_is_over_is_forgotten():
    errors = []

    def forget(report):
        for name in ("first", "nobody"):
            with pytest.raises((RuntimeError, ValueError)) as raised:
                orchestra.forget_task(name)
            errors.append(raised.value)

    first = task("first", At(2, forget))
    orchestra = orchestra_of(first)
    with refused(RuntimeError, task="'first'", says="forget_task stop_task"):
        orchestra.forget_task("first")
    assert_as_plain(first, orchestra.train_models().tasks["first"])
    assert [type(error) for error in errors] == [RuntimeError, ValueError]
    names(errors[0], task="'first'", says="forget_task")
    names(errors[1], task="'nobody'", says="forget_task 'first'")


def test_the_name_of_a_task_that_was_not_begun_is_free():
    orchestra = orchestra_of(task("first"), task(None))
    for name in ("first", "task-1"):
        orchestra.stop_task(name)
        orchestra.forget_task(name)
    orchestra.add_task(task(None))
    orchestra.add_task(again := task("first", seed=5))
    assert_as_plain(again, orchestra.train_models().tasks["first"])


def test_a_loader_that_has_not_returned_is_waited_for():
    """What it gives then is nobody's; until it has, its task is kept."""
    asked, may_go_on = threading.Event(), threading.Event()
    held = Held()

    class Slow:
        def __iter__(self):
            for k, batch in enumerate(batches()):
                if k == 2:
                    asked.set()
                    assert may_go_on.wait(WAIT_S)
                yield batch

    def forget(report):
        orchestra.forget_task("slow")
        may_go_on.set()

    def end(report):
        assert asked.wait(WAIT_S)
        orchestra.stop_task("slow")

    def wait(report):
        assert held.gone.wait(WAIT_S)

    callbacks = (At("end", forget),)
    slow = ModelTask(model_of(0), F.cross_entropy, Slow(), 1e-2, name="slow", callbacks=callbacks)
    held.see("task", slow)
    second = task("second", At(1, end), At(2, wait))
    orchestra = orchestra_of(slow, second)
    del slow
    report = orchestra.train_models()
    assert report.tasks["slow"].status == "stopped"
    assert report.tasks["second"].error is None
    assert_as_plain(second, report.tasks["second"])


# -- a limit of DRAM


def bytes_of(**options):
    """DRAM that one task takes, by its plan."""
    return orchestra_of(task("one", **options)).generate().tasks["one"].dram_bytes


def test_tasks_keep_to_the_limit_of_dram():
    each = bytes_of()
    orchestra_of(task("first"), task("second"), dram=2 * each).train_models()
    with refused(HostOutOfMemory, says=f"dram {2 * each} {2 * each - 1}"):
        orchestra_of(task("first"), task("second"), dram=2 * each - 1).generate()


@pytest.mark.rest
def test_a_task_that_joins_keeps_to_the_limit():
    each, left, is_over = bytes_of(), [], threading.Event()

    def replace(report):
        let_go = Held()
        let_go.see_parameters(late[0].model)
        with pytest.raises(HostOutOfMemory, match=r"third.*dram="):  # `refused` would hold it in a cycle
            orchestra.add_task(late.pop())
        assert let_go.gone.wait(WAIT_S)  # its reader's thread may have it for a moment
        left.append(orchestra.dram_left_bytes)
        may_end.set()
        assert is_over.wait(WAIT_S)
        left.append(orchestra.dram_left_bytes)
        orchestra.forget_task("first")
        assert held.gone.wait(WAIT_S)
        left.append(orchestra.dram_left_bytes)
        orchestra.add_task(third)

    def wait(report):
        assert may_end.wait(WAIT_S)

    # Made here: a seed in a callback would be that of the steps after it.
    late, held, third, may_end = [task("third", seed=7)], Held(), task("third", seed=7), threading.Event()
    first = task("first", At(1, wait), At("end", lambda report: is_over.set()))
    weights = sum(parameter.nbytes for parameter in first.model.parameters())
    held.see_parameters(first.model)
    second = task("second", At(1, replace))
    orchestra = orchestra_of(first, second, dram=2 * each)
    del first
    report = orchestra.train_models()
    assert report.tasks["second"].error is None
    assert left == [0, each - weights, each]
    assert_as_plain(second, report.tasks["second"])
    assert_as_plain(third, report.tasks["third"])


@pytest.mark.rest
@pytest.mark.parametrize("missing", [pytest.param(0, marks=pytest.mark.rest), 1])
def test_frozen_weights_count_while_they_are_here(missing):
    """A plan that is refused before training is refused beside the same task that trains, too; byte by byte."""

    def over_base(*callbacks):
        base = nn.Linear(8, 64).requires_grad_(False)
        return ModelTask(nn.Sequential(base, nn.Linear(64, 3)), F.cross_entropy, batches(), 1e-2, callbacks=callbacks)

    base_bytes = orchestra_of(over_base()).generate().tasks["task-0"].dram_bytes
    limit, left, too_much = base_bytes + bytes_of() - missing, [], []

    def add(report):
        left.append(orchestra.dram_left_bytes)
        try:
            orchestra.add_task(task("other", seed=7))
        except HostOutOfMemory:
            too_much.append("joining")

    orchestra = orchestra_of(over_base(At(2, add)), dram=limit)
    report = orchestra.train_models()
    assert left == [limit - base_bytes]
    try:
        orchestra_of(over_base(), task("other", seed=7), dram=limit).generate()
    except HostOutOfMemory:
        too_much.append("before")
    assert too_much == ["joining", "before"] * missing
    assert [each.status for each in report.tasks.values()] == ["finished"] * (2 - missing)


def test_a_reader_that_raises_as_it_is_closed_keeps_no_dram(tmp_path, monkeypatch):
    first = task("first", At(2, pause))
    orchestra = orchestra_of(first, checkpoint_dir=tmp_path, dram="1MiB")
    weights = sum(parameter.nbytes for parameter in first.model.parameters())
    close = Reader.close

    def raises(reader):
        monkeypatch.setattr(Reader, "close", close)
        raise ArithmeticError

    def begin(report):
        monkeypatch.setattr(Reader, "close", raises)

    first.callbacks = (At(1, begin), *first.callbacks)
    with pytest.raises(ArithmeticError):
        orchestra.train_models()
    assert orchestra._settings.limit.held_bytes == weights
