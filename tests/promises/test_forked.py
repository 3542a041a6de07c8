"""A task that begins as another is saved has the bits of a plain loop that takes over weights and optimizer state."""

import copy
import threading
from functools import lru_cache, partial

import pytest
import torch
from torch.nn import functional as F

from hydra_engine import Callback, CheckpointError, PauseTask
from hydra_engine.checkpoints.checkpoint import load_newest
from tests import exact, reference, zoo
from tests.checkpoints.support import FullDisk
from tests.promises.test_paused import Pauses, assert_as_expected, drawing, schedule
from tests.promises.test_resumed import NUM_STEPS, PATIENCE_S, model, orchestra_of, shuffled, task_of
from tests.refused import names, refused

LR, DECAY, SEED = 0.02, 0.3, 11  # of the fork; the other's: 0.01, 0.1 and 7
EPOCH = NUM_STEPS // 2


def fork(name="fork", **options):
    adamw = partial(torch.optim.AdamW, weight_decay=DECAY)
    task = task_of(name=name, draws=True, **{"optimizer": adamw, "lr_scheduler": schedule, "seed": SEED, **options})
    task.lr = LR
    return task


@lru_cache
def expected():
    """Losses and state of `fork` from the end of the first epoch of `drawing` on, of plain PyTorch."""
    layers, made = model(draws=True), []

    def first(params, lr):
        made.append(torch.optim.AdamW(params, lr=lr, weight_decay=0.1))
        return made[0]

    def taken_over(params, lr):
        optimizer = torch.optim.AdamW(params, lr=lr, weight_decay=DECAY)
        state = optimizer.state_dict()
        optimizer.load_state_dict({**state, "state": copy.deepcopy(made[0].state_dict()["state"])})
        return optimizer

    def stepped(optimizer):
        scheduler = schedule(optimizer)
        optimizer._opt_called = True  # or torch warns
        for _ in range(EPOCH):
            scheduler.step()
        return scheduler

    train = partial(reference.train, layers, F.mse_loss, shuffled())
    before = train(seed=7, lr=0.01, optimizer=first, lr_scheduler=schedule, max_steps=EPOCH)
    after = train(seed=SEED, lr=LR, optimizer=taken_over, lr_scheduler=stepped)
    return before.losses + after.losses, zoo.state(layers)


def assert_forked(report, task):
    losses, state = expected()
    assert (report.status, report.seed, report.losses) == ("finished", SEED, losses)
    exact.assert_same_state(zoo.state(task.model), state)


@pytest.mark.rest
@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.rest), 2])
def test_it_takes_over_weights_and_optimizer_state_and_has_its_own_settings(tmp_path, num_devices):
    forked, again = fork(), drawing()

    def go_on():
        orchestra.fork_task("task", "fork")
        for each in (forked, again):
            orchestra.add_task(each)

    orchestra = orchestra_of([drawing(callbacks=[p := Pauses(EPOCH, then=go_on)])], tmp_path, num_devices=num_devices)
    report = orchestra.train_models()
    assert p.errors == []
    assert_forked(report.tasks["fork"], forked)
    assert_as_expected(report.tasks["task"], again)


@pytest.mark.parametrize("step", [4, *(pytest.param(k, marks=pytest.mark.rest) for k in (1, EPOCH, NUM_STEPS - 1))])
def test_at_any_step(tmp_path, step):
    layers, made, num = model(draws=True), [], 0

    def adamw(params, lr):
        made.append(torch.optim.AdamW(params, lr=lr, weight_decay=0.1))
        return made[0]

    def turn():
        nonlocal num
        num += 1
        if num == step:
            torch.manual_seed(SEED)
            made[0].param_groups[0].update(lr=LR, weight_decay=DECAY)

    found = reference.train(layers, F.mse_loss, shuffled(), seed=7, lr=0.01, epochs=2, optimizer=adamw, on_step=turn)
    paused = task_of(draws=True, callbacks=[p := Pauses(step, then=lambda: orchestra.fork_task("task", "fork"))])
    orchestra = orchestra_of([paused], tmp_path)
    orchestra.train_models()
    assert p.errors == []
    orchestra.add_task(forked := fork(lr_scheduler=None))
    report = orchestra.train_models().tasks["fork"]
    assert (report.status, report.losses) == ("finished", found.losses)
    exact.assert_same_state(zoo.state(forked.model), zoo.state(layers))


@pytest.mark.rest
def test_killed_at_once_it_begins_where_the_other_was_although_that_has_gone_on(tmp_path):
    def go_on():
        orchestra.fork_task("task", "fork")
        orchestra.add_task(drawing())

    orchestra = orchestra_of([drawing(callbacks=[p := Pauses(EPOCH, then=go_on)])], tmp_path, keep=1)
    assert list(orchestra.train_models().tasks) == ["task"]
    assert p.errors == []
    assert load_newest(tmp_path).data["tasks"]["fork"]["steps"] == EPOCH
    forked = fork()
    assert_forked(orchestra_of([forked], tmp_path).train_models(resume=True).tasks["fork"], forked)
    assert "fork_of" not in load_newest(tmp_path).data["tasks"]["fork"]


@pytest.mark.rest
def test_forked_in_another_process_before_training(tmp_path):
    orchestra_of([drawing(callbacks=[Pauses(EPOCH)])], tmp_path).train_models()
    forked, again = fork(), drawing()
    orchestra = orchestra_of([forked], tmp_path)
    orchestra.fork_task("task", "fork")
    orchestra.add_task(again)
    report = orchestra.train_models(resume=True)
    assert_forked(report.tasks["fork"], forked)
    assert_as_expected(report.tasks["task"], again)


@pytest.mark.rest
@pytest.mark.parametrize("step", [EPOCH, EPOCH + 3])
def test_paused_and_asked_for_again_it_goes_on(tmp_path, step):
    """At its own first steps; what was saved under its own name counts more than where it began."""
    orchestra_of([drawing(callbacks=[Pauses(EPOCH)])], tmp_path).train_models()
    orchestra = orchestra_of([first := fork()], tmp_path)
    first.callbacks = (Pauses(step),) if step > EPOCH else ()
    orchestra.fork_task("task", "fork")
    if step == EPOCH:
        orchestra.pause_task("fork")
        orchestra.add_task(drawing("other"))
    orchestra.train_models(resume=True)
    orchestra.add_task(forked := fork())
    assert_forked(orchestra.train_models().tasks["fork"], forked)
    again = orchestra_of([fork(), later := drawing("later")], tmp_path)
    again.fork_task("task", "fork")
    report = again.train_models(resume=True)
    assert report.tasks["fork"].losses == expected()[0]
    assert_as_expected(report.tasks["later"], later)


def test_averages_and_a_loss_scale_are_taken_over(tmp_path):
    """The same settings and the same seed: only the random stream begins anew, and nothing here draws."""
    options = {"precision": "float16", "ema_decay": 0.9, "epochs": 2}
    whole = task_of("list", **options)
    found = orchestra_of([whole]).train_models().tasks["task"]
    orchestra = orchestra_of([task_of("list", callbacks=[Pauses(5)], **options)], tmp_path)
    orchestra.train_models()
    orchestra.fork_task("task", "fork")
    orchestra.add_task(forked := task_of("list", name="fork", **options))
    report = orchestra.train_models().tasks["fork"]
    assert (report.losses, report.loss_scales) == (found.losses, found.loss_scales)
    exact.assert_same_state(zoo.state(forked.model), zoo.state(whole.model))
    exact.assert_same_state(report.ema_state, found.ema_state)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"optimizer": partial(torch.optim.SGD, momentum=0.9)},
            "SGD Adam",
        ),
        ({"optimizer": torch.optim.RAdam}, "RAdam"),  # which keeps states of the same names
        ({"optimizer": partial(torch.optim.AdamW, amsgrad=True)}, "'max_exp_avg_sq'"),
        ({"optimizer_scope": "task"}, "optimizer_scope 'task' 'shard'"),
    ],
)
def test_an_optimizer_that_cannot_go_on_fails(tmp_path, options, words):
    orchestra = orchestra_of([drawing(callbacks=[Pauses(EPOCH)])], tmp_path)
    orchestra.train_models()
    orchestra.fork_task("task", "fork")
    orchestra.add_task(fork(**options))
    with refused(says=words):
        orchestra.train_models()


def test_another_model_is_refused(tmp_path):
    orchestra = orchestra_of([drawing(callbacks=[Pauses(EPOCH)])], tmp_path)
    orchestra.train_models()
    orchestra.fork_task("task", "fork")
    orchestra.add_task(task_of(batch_norm=True, name="fork"))
    with refused(task="fork", says="model"):
        orchestra.train_models()


def test_refused_at_once(tmp_path):
    errors = []

    class Early(Pauses):
        def on_step(self, report):
            for source, task in (("task", "fork"), ("other", "task"), ("no one", "fork")):
                with refused(says="fork_task") as raised:
                    orchestra.fork_task(source, task)
                errors.append(str(raised.value))
            super().on_step(report)

    orchestra_of([drawing("other")], tmp_path).train_models()
    orchestra = orchestra_of([drawing(callbacks=[Early(1)])], tmp_path)
    orchestra.train_models(resume=True)
    names(errors[0], task="'task'", says="pause")
    names(errors[1], task="'task'", says="name")
    names(errors[2], task="'no one'", says="'other'")
    with refused(says="fork_task checkpoint_dir"):
        orchestra_of([drawing()]).fork_task("task", "fork")
    late = orchestra_of([fork()], tmp_path)
    late.fork_task("no one", "fork")
    with refused(task="'no one'"):
        late.train_models(resume=True)
    report = late.train_models(resume=True).tasks["fork"]  # from the beginning
    assert report.losses[:EPOCH] != expected()[0][:EPOCH]


def test_a_disk_that_does_not_take_it(tmp_path, monkeypatch):
    def go_on():
        disk.is_full = True
        with refused(CheckpointError, task="'fork'", says="'task'"):
            orchestra.fork_task("task", "fork")
        disk.is_full = False
        orchestra.add_task(again)

    disk = FullDisk()
    disk.is_full = False
    monkeypatch.setattr("hydra_engine.checkpoints.directory.Disk", lambda: disk)
    again = drawing()
    orchestra = orchestra_of([drawing(callbacks=[p := Pauses(EPOCH, then=go_on)])], tmp_path)
    report = orchestra.train_models()
    assert p.errors == []
    assert list(report.tasks) == ["task"]
    assert_as_expected(report.tasks["task"], again)


def test_a_disk_that_does_not_take_it_before_training_is_asked_again(tmp_path, monkeypatch):
    orchestra_of([drawing(callbacks=[Pauses(EPOCH)])], tmp_path).train_models()
    orchestra = orchestra_of([forked := fork()], tmp_path)
    orchestra.fork_task("task", "fork")

    with monkeypatch.context() as patch:
        patch.setattr("hydra_engine.checkpoints.directory.Disk", FullDisk)
        with refused(CheckpointError, task="'fork'", says="'task'"):
            orchestra.train_models(resume=True)
    assert_forked(orchestra.train_models(resume=True).tasks["fork"], forked)


@pytest.mark.rest
def test_of_a_task_that_is_over_as_its_end_is_told(tmp_path):
    ended, done = [], threading.Event()

    class Ends(Callback):
        def on_task_end(self, report):
            try:
                orchestra.fork_task("task", "fork")
            except Exception as error:
                ended.append(error)
            finally:
                done.set()

    class Waits(Callback):
        def on_step(self, report):
            if report.steps == NUM_STEPS:
                assert done.wait(PATIENCE_S)

    orchestra = orchestra_of([drawing(callbacks=[Ends()]), drawing("other", callbacks=[Waits()])], tmp_path)
    assert list(orchestra.train_models().tasks) == ["task", "other"]
    assert ended == []
    assert load_newest(tmp_path).data["tasks"]["fork"]["steps"] == NUM_STEPS


def test_the_name_of_one_that_was_trained_and_forgotten_is_refused(tmp_path):
    orchestra = orchestra_of([drawing(), drawing("other")], tmp_path)
    report = orchestra.train_models().tasks["other"]
    assert orchestra.forget_task("other") is report
    with refused(task="'other'", says="fork_task name"):
        orchestra.fork_task("task", "other")


def test_paused_before_its_first_commit_it_has_its_own_seed_again(tmp_path):
    orchestra_of([drawing(callbacks=[Pauses(EPOCH)])], tmp_path).train_models()

    class AtOnce(Callback):
        def on_epoch_begin(self, report, epoch):
            raise PauseTask

    orchestra = orchestra_of([fork(callbacks=[AtOnce()])], tmp_path)
    orchestra.fork_task("task", "fork")
    report = orchestra.train_models(resume=True).tasks["fork"]
    assert (report.status, report.steps) == ("paused", EPOCH)
    assert "fork_of" not in load_newest(tmp_path).data["tasks"]["fork"]
    forked = fork(seed=None)
    assert_forked(orchestra_of([forked], tmp_path).train_models(resume=True).tasks["fork"], forked)
