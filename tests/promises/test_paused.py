"""A task that is paused, and goes on from disk, has the bits of one that was never paused."""

import random
import threading
from functools import lru_cache, partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from hydra_engine import Callback, CheckpointError, PauseTask
from hydra_engine.checkpoints.checkpoint import load_newest
from hydra_engine.run.loop import EngineRun
from hydra_engine.schedule.graph import validate
from hydra_engine.schedule.units import training_chain
from tests import exact, reference, zoo
from tests.checkpoints.support import FullDisk
from tests.covering import covering
from tests.promises.test_resumed import (
    CASES,
    LOADERS,
    NUM_STEPS,
    PATIENCE_S,
    model,
    of_case,
    orchestra_of,
    plain,
    saved_of,
    shuffled,
    task_of,
    uninterrupted,
)
from tests.refused import names, refused


class Pauses(Callback):
    """Pauses its task at these steps, each once, and tells what it was told."""

    def __init__(self, *steps, then=lambda: None):
        self.steps, self.then, self.told, self.errors = list(steps), then, [], []

    def on_step(self, report):
        self.told.append(report.steps)
        if report.steps in self.steps:
            self.steps.remove(report.steps)
            raise PauseTask

    def on_task_pause(self, report):
        self.told.append(f"paused at {report.steps}")
        try:
            self.then()
        except Exception as error:
            self.errors.append(error)

    def on_task_end(self, report):
        self.told.append(report.status)


def schedule(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)


def drawing(name="task", **options):
    """Dropout, a loader that shuffles, AdamW, a schedule."""
    return task_of(name=name, draws=True, lr_scheduler=schedule, **options)


@lru_cache
def expected(max_steps=None):
    """Losses and state of `drawing`, of plain PyTorch."""
    layers, adamw = model(draws=True), partial(torch.optim.AdamW, weight_decay=0.1)
    options = {"epochs": 2, "optimizer": adamw, "lr_scheduler": schedule, "max_steps": max_steps}
    found = reference.train(layers, F.mse_loss, shuffled(), seed=7, lr=0.01, **options)
    return found.losses, zoo.state(layers)


def assert_as_expected(report, task):
    losses, state = expected()
    assert (report.status, report.losses) == ("finished", losses)
    exact.assert_same_state(zoo.state(task.model), state)


@pytest.mark.parametrize(
    "step", [pytest.param(k, marks=() if k in (1, 6, NUM_STEPS) else pytest.mark.rest) for k in range(1, NUM_STEPS + 1)]
)
def test_paused_at_any_step_it_goes_on_with_the_same_bits(tmp_path, step):
    again = drawing(callbacks=[after := Pauses()], ends=[1, 3])
    before = Pauses(step, then=lambda: orchestra.add_task(again))
    orchestra = orchestra_of([drawing(callbacks=[before])], tmp_path, every=100)
    report = orchestra.train_models()
    assert before.errors == []
    assert before.told == [*range(1, step + 1), f"paused at {step}"]
    assert after.told == [*range(step + 1, NUM_STEPS + 1), "finished"]
    assert list(report.tasks) == ["task"]
    assert_as_expected(report.tasks["task"], again)


# What a pause saves is what a resume reads, in every case; here are those that a pause treats in a way of its own.
OWN_WAY = ("early release", "validated by step", "draws outside torch")


@pytest.mark.rest
@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in OWN_WAY else pytest.mark.rest) for c in CASES])
def test_paused_in_any_case_it_is_saved_as_one_that_was_not(tmp_path, case):
    found, state, saved = uninterrupted(case)
    again = of_case(case)
    pauses = Pauses(4, then=lambda: orchestra.add_task(again))
    orchestra = orchestra_of([of_case(case, callbacks=[pauses])], tmp_path / "paused")
    report = orchestra.train_models().tasks["task"]
    assert pauses.errors == []
    assert pauses.told[-1] in ("paused at 4", "paused at 5")  # early release: a step that has begun is committed
    assert report.status == "finished"
    assert plain(report.losses) == plain(found.losses)
    assert report.validation_losses == found.validation_losses
    assert (report.skipped_steps, report.loss_scales) == (found.skipped_steps, found.loss_scales)
    exact.assert_same_state(zoo.state(again.model), state)
    assert plain(report.ema_state or {}) == plain(found.ema_state or {})
    assert saved_of(tmp_path / "paused") == saved


@pytest.mark.rest
@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.rest), 2])
def test_tasks_that_pause_again_and_again_beside_others(tmp_path, num_devices):
    """The very same tasks are added again, as soon as they may be."""

    def pausing(name, *steps):
        pauses = Pauses(*steps, then=lambda: orchestra.add_task(tasks[name]))
        return drawing(name, callbacks=[pauses])

    tasks = {"a": pausing("a", 1, 2, 7), "b": drawing("b"), "c": pausing("c", 3, 6, 11)}
    orchestra = orchestra_of(list(tasks.values()), tmp_path, num_devices=num_devices, every=2, keep=1)
    report = orchestra.train_models()
    assert list(report.tasks) == ["a", "b", "c"]
    validate(report.schedule, dict.fromkeys("abc", training_chain(3, 0)))
    for name, task in tasks.items():
        assert [callback.errors for callback in task.callbacks if callback.errors] == []
        assert_as_expected(report.tasks[name], task)
    [at_a] = tasks["a"].callbacks
    assert [each for each in at_a.told if isinstance(each, int)] == list(range(1, NUM_STEPS + 1))


def test_paused_from_another_thread_its_callbacks_are_told_every_step_once(tmp_path):
    reached, asked = threading.Event(), threading.Event()

    class Waits(Pauses):
        def on_step(self, report):
            super().on_step(report)
            if report.steps == 3:
                reached.set()
                assert asked.wait(PATIENCE_S)

    def pause():
        assert reached.wait(PATIENCE_S)
        orchestra.pause_task("task")
        asked.set()

    again = drawing(callbacks=[after := Pauses()])
    before = Waits(then=lambda: orchestra.add_task(again))
    orchestra = orchestra_of([drawing(callbacks=[before])], tmp_path, every=100)
    thread = threading.Thread(target=pause)
    thread.start()
    report = orchestra.train_models()
    thread.join()
    assert before.errors == []
    steps = [each for each in (*before.told, *after.told) if isinstance(each, int)]
    assert steps == list(range(1, NUM_STEPS + 1))
    assert before.told[-1] in (f"paused at {step}" for step in (3, 4, 5))
    assert_as_expected(report.tasks["task"], again)


class Noisy(Dataset):
    """Draws in its loader's workers."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.randn(6), torch.full((3,), float(index))


def persistent():
    own = torch.Generator().manual_seed(6)
    return DataLoader(Noisy(), 4, shuffle=True, generator=own, num_workers=1, persistent_workers=True)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("is_retried", [False, pytest.param(True, marks=pytest.mark.rest)])
def test_persistent_workers_begin_anew_where_a_task_goes_on_with_its_loader(tmp_path, monkeypatch, is_retried):
    monkeypatch.setitem(LOADERS, "persistent", persistent)
    whole = task_of("persistent", epochs=1)
    found = orchestra_of([whole]).train_models().tasks["task"]
    seen = []

    def fails_once(batch):
        seen.append(batch)
        if len(seen) == 4:
            raise OSError
        return batch

    pauses = Pauses(3, then=lambda: orchestra.add_task(task))
    options = {"unpack": fails_once, "max_retries": 1} if is_retried else {"callbacks": [pauses]}
    task = task_of("persistent", epochs=1, **options)
    orchestra = orchestra_of([task], tmp_path)
    report = orchestra.train_models().tasks["task"]
    assert pauses.errors == []
    assert (report.status, report.losses) == ("finished", found.losses)
    assert (pauses.told != [], len(report.retries)) == (not is_retried, int(is_retried))
    exact.assert_same_state(zoo.state(task.model), zoo.state(whole.model))


@pytest.mark.parametrize("is_new", [False, True])
def test_a_generator_that_was_read_is_refused_where_a_task_goes_on(tmp_path, monkeypatch, is_new):
    monkeypatch.setitem(LOADERS, "generator", lambda: (batch for batch in list(LOADERS["own generator"]())))
    whole = task_of("generator", epochs=1)
    found = orchestra_of([whole]).train_models().tasks["task"]
    task = task_of("generator", epochs=1, callbacks=[pauses := Pauses(2, then=lambda: orchestra.add_task(again))])
    again = task_of("generator", epochs=1)
    if not is_new:
        again.dataloader = task.dataloader
    orchestra = orchestra_of([task], tmp_path)
    report = orchestra.train_models().tasks["task"]
    if is_new:
        assert pauses.errors == []
        assert (report.status, report.losses) == ("finished", found.losses)
        exact.assert_same_state(zoo.state(again.model), zoo.state(whole.model))
    else:
        [error] = pauses.errors
        names(error, says="generator")
        assert (report.status, report.steps) == ("paused", 2)


@pytest.mark.parametrize("is_validation", [False, True])
def test_a_generator_is_not_asked_again(tmp_path, is_validation):
    seen, batches = [], list(LOADERS["own generator"]())

    def fails_once(batch):
        seen.append(batch)
        if len(seen) == 3 + is_validation * len(batches):
            raise OSError
        return batch

    once = (batch for batch in batches)
    options = {"validation": once} if is_validation else {}
    task = task_of("list", epochs=1, unpack=fails_once, max_retries=1, **options)
    if not is_validation:
        task.dataloader = once
    with refused(says="generator"):
        orchestra_of([task], tmp_path).train_models()


def test_a_task_that_waits_on_disk_goes_on_in_a_later_call_without_resume(tmp_path):
    first, other = drawing(callbacks=[Pauses(5)]), drawing("other")
    orchestra = orchestra_of([first, other], tmp_path)
    report = orchestra.train_models()
    assert (report.tasks["task"].status, report.tasks["task"].steps) == ("paused", 5)
    assert_as_expected(report.tasks["other"], other)
    assert load_newest(tmp_path).data["tasks"]["task"]["over"] is None
    assert "paused" in str(report)
    again = drawing()
    orchestra.add_task(again)
    orchestra.generate()  # reads a batch, which is not the one that comes next
    report = orchestra.train_models()
    assert list(report.tasks) == ["task"]
    assert_as_expected(report.tasks["task"], again)


@pytest.mark.rest
def test_a_task_that_waits_on_disk_goes_on_in_another_orchestrator_with_resume(tmp_path):
    orchestra_of([drawing(callbacks=[Pauses(5)]), drawing("other")], tmp_path).train_models()
    again = [drawing(), drawing("other")]
    report = orchestra_of(again, tmp_path).train_models(resume=True)
    for task in again:
        assert_as_expected(report.tasks[task.name], task)


def test_paused_before_its_first_step_it_begins_with_the_seed_that_it_had(tmp_path):
    again, asked = drawing("late", seed=None), threading.Event()

    class Held(Pauses):
        def on_step(self, report):
            assert asked.wait(PATIENCE_S)  # or it might be over before it is paused
            super().on_step(report)

    late = drawing("late", seed=None, callbacks=[pauses := Held(then=lambda: orchestra.add_task(again))])

    class Adds(Callback):
        def on_step(self, report):
            if report.steps == 2:
                orchestra.add_task(late)
                orchestra.pause_task("late")
                asked.set()

    seed = late.seed
    assert seed != again.seed
    orchestra = orchestra_of([drawing(callbacks=[Adds()])], tmp_path)
    report = orchestra.train_models()
    assert pauses.errors == []
    assert pauses.told[-1].startswith("paused at")
    whole = drawing("late", seed=seed)
    found = orchestra_of([whole]).train_models().tasks["late"]
    assert (report.tasks["late"].status, report.tasks["late"].losses) == ("finished", found.losses)
    exact.assert_same_state(zoo.state(again.model), zoo.state(whole.model))


class PausesAtOnce(Callback):
    """Pauses its task as the first epoch is about to be opened, each time but the last."""

    def __init__(self, num_times):
        self.num_times, self.num_pauses = num_times, 0

    def on_epoch_begin(self, report, epoch):
        if self.num_times > 0:
            self.num_times -= 1
            raise PauseTask

    def on_task_pause(self, report):
        self.num_pauses += 1


@covering(strength=1, loader=[name for name in LOADERS if name != "holes"], num_pauses=[0, 2])  # whose numbers are none
def test_paused_before_its_first_commit_it_begins_where_its_loader_began(tmp_path, loader, num_pauses):
    """Its loader was read for the plan, or was not; in a run, or before."""
    whole = task_of(loader, draws=True)
    expected = orchestra_of([whole]).train_models().tasks["task"]
    task = task_of(loader, draws=True, callbacks=[pauses := PausesAtOnce(num_pauses)])
    orchestra = orchestra_of([task], tmp_path)
    if not num_pauses:
        orchestra.pause_task("task")  # before anything was read
        random.seed(9)
        orchestra.add_task(task)
        orchestra.generate()
        orchestra.pause_task("task")
        orchestra.add_task(task)
    for _ in range(num_pauses):
        assert orchestra.train_models().tasks["task"].status == "paused"
        random.seed(9)
        orchestra.add_task(task)
    found = orchestra.train_models().tasks["task"]
    assert pauses.num_pauses == num_pauses
    assert found.status == "finished"
    assert plain(found.losses) == plain(expected.losses)
    exact.assert_same_state(zoo.state(task.model), zoo.state(whole.model))


@pytest.mark.rest
def test_paused_before_training_it_is_not_begun(tmp_path):
    orchestra = orchestra_of([drawing(), drawing("other")], tmp_path)
    orchestra.pause_task("task")
    assert list(orchestra.train_models().tasks) == ["other"]
    again = drawing()
    orchestra.add_task(again)
    assert_as_expected(orchestra.train_models().tasks["task"], again)


def test_what_is_asked_of_a_task_right_after_it_was_added_again_is_done(tmp_path):
    def go_on():
        orchestra.add_task(drawing())
        orchestra.stop_task("task")

    orchestra = orchestra_of([drawing(callbacks=[pauses := Pauses(5, then=go_on)])], tmp_path)
    report = orchestra.train_models().tasks["task"]
    assert pauses.errors == []
    assert report.status == "stopped"
    assert report.losses == expected()[0][: report.steps]
    assert 5 <= report.steps < NUM_STEPS


def marked():
    batches = LOADERS["list"]()
    batches[3][1].fill_(99.0)
    return batches


@pytest.mark.parametrize("early_release", [False, True])
def test_an_error_in_a_step_that_a_pause_drops_fails_nothing(tmp_path, monkeypatch, early_release):
    """With early release a pause drops no step: shards of it may be updated already."""
    monkeypatch.setitem(LOADERS, "marked", marked)

    is_reached, is_paused = threading.Event(), threading.Event()

    def fails_if_marked(output, target):
        if bool((target == 99.0).any()):
            is_reached.set()
            assert is_paused.wait(PATIENCE_S)
            raise OSError("a loss's")
        return F.mse_loss(output, target)

    def pause():
        assert is_reached.wait(PATIENCE_S)
        orchestra.pause_task("task")
        is_paused.set()

    whole, again = (task_of("marked", early_release=early_release) for _ in range(2))
    found = orchestra_of([whole]).train_models().tasks["task"]
    pauses = Pauses(then=lambda: orchestra.add_task(again))
    first = task_of("marked", loss=fails_if_marked, early_release=early_release, callbacks=[pauses])
    orchestra = orchestra_of([first], tmp_path)
    pauser = threading.Thread(target=pause)
    pauser.start()
    if early_release:
        with pytest.raises(OSError, match="a loss's"):
            orchestra.train_models()
        pauser.join()
        return
    report = orchestra.train_models().tasks["task"]
    pauser.join()
    assert pauses.errors == []
    assert pauses.told == [1, 2, 3, "paused at 3"]
    assert (report.status, report.losses) == ("finished", found.losses)
    exact.assert_same_state(zoo.state(again.model), zoo.state(whole.model))


def test_what_a_call_draws_and_writes_before_another_callback_pauses_is_saved(tmp_path):
    class Noisy(Callback):
        def on_step(self, report):
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(1e-2 * torch.randn_like(parameter))

    def noisy(*callbacks):
        task = drawing(callbacks=[first := Noisy(), *callbacks])
        first.model = task.model
        return task

    whole, again = noisy(), noisy()
    found = orchestra_of([whole]).train_models().tasks["task"]
    orchestra = orchestra_of([noisy(pauses := Pauses(5, then=lambda: orchestra.add_task(again)))], tmp_path)
    report = orchestra.train_models().tasks["task"]
    assert pauses.errors == []
    assert (report.status, report.losses) == ("finished", found.losses)
    exact.assert_same_state(zoo.state(again.model), zoo.state(whole.model))


def test_a_name_is_free_once_the_pause_is_told(tmp_path):
    errors = []

    class Early(Callback):
        def on_step(self, report):
            if report.steps == 3:
                orchestra.pause_task("task")
                with refused(task="task", says="on_task_pause") as raised:
                    orchestra.add_task(drawing())
                errors.append(raised)

    orchestra = orchestra_of([drawing(callbacks=[Early()])], tmp_path)
    assert orchestra.train_models().tasks["task"].status == "paused"
    assert len(errors) == 1


def test_another_model_under_the_name_of_a_paused_task_is_refused(tmp_path):
    orchestra = orchestra_of([drawing(callbacks=[Pauses(5)])], tmp_path)
    orchestra.train_models()
    orchestra.add_task(task_of(batch_norm=True))
    with refused(task="task", says="model"):
        orchestra.train_models()


def test_a_task_that_is_refused_under_the_name_of_a_paused_one_leaves_that_as_it_is(tmp_path):
    again = drawing()

    def go_on():
        with refused(task="task", says="model"):
            orchestra.add_task(task_of(batch_norm=True))
        orchestra.add_task(again)

    orchestra = orchestra_of([drawing(callbacks=[pauses := Pauses(5, then=go_on)])], tmp_path)
    report = orchestra.train_models()
    assert pauses.errors == []
    assert_as_expected(report.tasks["task"], again)


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_in_its_place_another_is_refused_and_a_paused_task_is_told_of_and_let_go(tmp_path, monkeypatch, is_forgotten):
    let_go = []
    monkeypatch.setattr(EngineRun, "forget", lambda run, name: let_go.append(name))

    def go_on():
        orchestra._tasks.named("task", "here").doubts.append("a doubt")
        with refused(task="task", says="model"):
            orchestra.add_task(task_of(batch_norm=True))
        if is_forgotten:
            orchestra.forget_task("task")

    orchestra = orchestra_of([drawing(callbacks=[pauses := Pauses(5, then=go_on)])], tmp_path)
    report = orchestra.train_models()
    assert pauses.errors == []
    assert "a doubt" in report.messages
    assert let_go == (["task"] if is_forgotten else [])


def test_a_task_that_the_disk_does_not_take_fails_and_keeps_its_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("hydra_engine.checkpoints.directory.Disk", FullDisk)
    task, other = drawing(callbacks=[pauses := Pauses(5)]), drawing("other")
    orchestra = orchestra_of([task, other], tmp_path, every=100)
    report = orchestra.train_models()
    found = report.tasks["task"]
    assert (found.status, found.steps) == ("failed", 5)
    assert isinstance(found.exception, CheckpointError)
    names(found.exception, task="task")
    assert pauses.told == [1, 2, 3, 4, 5, "failed"]
    exact.assert_same_state(zoo.state(task.model), expected(max_steps=5)[1])
    assert_as_expected(report.tasks["other"], other)
    with refused(task="task"):
        orchestra.add_task(drawing())


def test_without_a_directory_nothing_is_paused():
    orchestra = orchestra_of([drawing(callbacks=[Pauses(5)])])
    with refused(task="task", says="pause_task checkpoint_dir"):
        orchestra.pause_task("task")
    with refused(says="PauseTask checkpoint_dir"):
        orchestra.train_models()
    assert (orchestra.report.tasks["task"].status, orchestra.report.tasks["task"].steps) == ("failed", 5)


def test_an_unknown_task_is_not_paused(tmp_path):
    with refused(task="'other'", says="pause_task 'task'"):
        orchestra_of([drawing()], tmp_path).pause_task("other")


@pytest.mark.rest
def test_a_pause_at_the_last_validation_comes_too_late(tmp_path):
    class AtTheLast(Callback):
        def on_validation(self, report):
            if report.steps == NUM_STEPS:
                raise PauseTask

    orchestra = orchestra_of([drawing(validation=shuffled(), callbacks=[AtTheLast()])], tmp_path)
    assert orchestra.train_models().tasks["task"].status == "finished"


@pytest.mark.rest
def test_a_pause_at_a_validation_has_it_told_again(tmp_path):
    told = []

    class AtTheFirst(Callback):
        def on_validation(self, report):
            told.append((report.steps, list(report.validation_losses)))
            if len(told) == 1:
                raise PauseTask

        def on_task_pause(self, report):
            orchestra.add_task(again)

    whole = drawing(validation=shuffled())
    found = orchestra_of([whole]).train_models().tasks["task"]
    again = drawing(validation=shuffled(), callbacks=[AtTheFirst()])
    orchestra = orchestra_of([again], tmp_path)
    report = orchestra.train_models().tasks["task"]
    assert_as_expected(report, again)
    assert report.validation_losses == found.validation_losses
    assert told[0] == told[1]
    assert [steps for steps, _ in told] == [6, 6, 12]


def test_a_pause_waits_for_a_loader_that_reads_ahead_and_others_train_on(tmp_path, monkeypatch):
    """Who goes on with the task may read through the same loader."""
    reached, goes_on, paused = threading.Event(), threading.Event(), []

    class Slow:
        def __init__(self):
            self.batches = list(shuffled(torch.Generator().manual_seed(2)))

        def __len__(self):
            return 6

        def __iter__(self):
            yield from self.batches[:4]
            reached.set()
            assert goes_on.wait(PATIENCE_S)
            yield from self.batches[4:]

    class Paused(Callback):
        def on_task_pause(self, report):
            paused.append(report.steps)
            orchestra.add_task(task)

    class LetsGo(Callback):
        def on_task_end(self, report):
            assert reached.wait(PATIENCE_S)
            orchestra.pause_task("task")
            assert paused == []
            goes_on.set()

    monkeypatch.setitem(LOADERS, "slow", Slow)
    task = task_of("slow", callbacks=[Paused()])
    other = drawing("other", callbacks=[LetsGo()])
    orchestra = orchestra_of([task, other], tmp_path)
    report = orchestra.train_models()
    assert paused in ([3], [4])
    assert_as_expected(report.tasks["other"], other)
    whole = task_of("slow")
    found = orchestra_of([whole]).train_models().tasks["task"]
    assert (report.tasks["task"].status, report.tasks["task"].losses) == ("finished", found.losses)
    exact.assert_same_state(zoo.state(task.model), zoo.state(whole.model))
