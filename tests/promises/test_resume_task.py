"""A task that goes on from another run's directory has the bits of one that stayed where it was."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import Callback, HostOutOfMemory, ModelTask, StopTask
from hydra_engine.checkpoints.checkpoint import furthest, load_newest
from tests.promises.test_paused import Pauses, assert_as_expected, drawing
from tests.promises.test_resumed import NUM_STEPS, orchestra_of
from tests.refused import names, refused


def paused_in(directory, step):
    orchestra = orchestra_of([drawing(callbacks=[Pauses(step)])], directory)
    assert orchestra.train_models().tasks["task"].status == "paused"
    return orchestra


@pytest.mark.parametrize("resume", [False, pytest.param(True, marks=pytest.mark.rest)])
def test_a_task_of_the_constructor(tmp_path, resume):
    paused_in(tmp_path / "a", 4)
    task = drawing(callbacks=[told := Pauses()])
    there = orchestra_of([task], tmp_path / "b")
    there.resume_task("task", tmp_path / "a")
    assert_as_expected(there.train_models(resume=resume).tasks["task"], task)
    assert told.told == [*range(5, NUM_STEPS + 1), "finished"]
    assert load_newest(tmp_path / "b").data["tasks"]["task"]["over"] == "finished"


@pytest.mark.rest
def test_a_task_that_joins_others(tmp_path):
    paused_in(tmp_path / "a", 4)
    task, beside = drawing(callbacks=[told := Pauses()]), drawing("beside")

    class Adds(Callback):
        def on_step(self, report):
            if report.steps == 2:
                there.resume_task("task", tmp_path / "a")
                there.add_task(task)

    beside.callbacks = (Adds(),)
    there = orchestra_of([beside], tmp_path / "b")
    report = there.train_models()
    if not told.told:  # it came too late to join
        report = there.train_models(resume=True)
    assert told.told == [*range(5, NUM_STEPS + 1), "finished"]
    assert_as_expected(report.tasks["task"], task)


@pytest.mark.rest
def test_there_and_back_again(tmp_path):
    """The directory that has most of it counts, and not what is in the run's own."""
    here = paused_in(tmp_path / "a", 3)
    there = orchestra_of([drawing(callbacks=[Pauses(7)])], tmp_path / "b")
    there.resume_task("task", tmp_path / "a")
    assert there.train_models().tasks["task"].status == "paused"
    places = [tmp_path / "a", tmp_path / "b", tmp_path / "nowhere"]
    assert furthest(places, "task") == tmp_path / "b"
    assert furthest(places, "other") is None
    here.resume_task("task", tmp_path / "b")
    here.add_task(task := drawing(callbacks=[told := Pauses()]))
    assert_as_expected(here.train_models().tasks["task"], task)
    assert told.told == [*range(8, NUM_STEPS + 1), "finished"]
    assert furthest(places, "task") == tmp_path / "a"


@pytest.mark.parametrize("is_other", [False, True])
def test_a_frozen_base_that_another_task_trains_on_is_not_written_to(tmp_path, is_other):
    def task_of(base, name, *callbacks):
        head = nn.Linear(8, 3)
        return ModelTask(nn.Sequential(base, head), F.cross_entropy, data, 0.1, name=name, seed=0, callbacks=callbacks)

    torch.manual_seed(0)
    data = [(torch.randn(4, 8), torch.arange(4) % 3) for _ in range(6)]
    base, other = (nn.Linear(8, 8).requires_grad_(False) for _ in range(2))
    before = base.weight.clone()
    saved = orchestra_of([task_of(other if is_other else base, "b", Pauses(2))], tmp_path / "b")
    assert saved.train_models().tasks["b"].status == "paused"
    errors = []

    class Adds(Callback):
        def on_step(self, report):
            if report.steps == 2:
                there.resume_task("b", tmp_path / "b")
                try:
                    there.add_task(task_of(base, "b"))
                except ValueError as error:
                    names(error, says="0.weight")
                    errors.append(str(error))

    there = orchestra_of([task_of(base, "a", Adds())], tmp_path / "a")
    assert there.train_models().tasks["a"].status == "finished"
    assert torch.equal(base.weight, before)
    assert len(errors) == is_other


def test_a_directory_that_knows_nothing_of_the_task(tmp_path):
    task = drawing()
    there = orchestra_of([task], tmp_path / "b")
    there.resume_task("task", tmp_path / "a")
    assert_as_expected(there.train_models().tasks["task"], task)


@pytest.mark.rest
def test_a_task_that_was_refused_goes_on_from_there_as_it_is_added_again(tmp_path, monkeypatch):
    paused_in(tmp_path / "a", 4)
    task = drawing(callbacks=[told := Pauses()])

    class Adds(Callback):
        def on_step(self, report):
            if report.steps == 1:
                there.resume_task("task", tmp_path / "a")
                monkeypatch.setattr(there._settings.limit, "_limit_bytes", 1)
                with refused(HostOutOfMemory, task="task"):
                    there.add_task(drawing())
                monkeypatch.undo()
                there.add_task(task)

    there = orchestra_of([drawing("beside", callbacks=[Adds()])], tmp_path / "b")
    report = there.train_models()
    if not told.told:  # it came too late to join
        report = there.train_models()
    assert told.told == [*range(5, NUM_STEPS + 1), "finished"]
    assert_as_expected(report.tasks["task"], task)


def test_one_that_has_begun_does_not_go_on_from_elsewhere(tmp_path):
    paused_in(tmp_path / "a", 4)
    errors = []

    class Late(Callback):
        def on_step(self, report):
            with refused(task="'task'", says="resume_task name"):
                there.resume_task("task", tmp_path / "a")
            errors.append(report.steps)

    task = drawing(callbacks=[Late()])
    there = orchestra_of([task], tmp_path / "b")
    assert_as_expected(there.train_models().tasks["task"], task)
    assert errors == list(range(1, NUM_STEPS + 1))
    with refused(task="'task'", says="resume_task name"):
        there.resume_task("task", tmp_path / "a")


@pytest.mark.rest
def test_of_two_directories_with_as_many_steps_the_one_in_which_it_is_over_counts(tmp_path):
    class Stops(Callback):
        def on_step(self, report):
            if report.steps == 4:
                raise StopTask

    paused_in(tmp_path / "a", 4)
    orchestra_of([drawing(callbacks=[Stops()])], tmp_path / "b").train_models()
    saved = [load_newest(tmp_path / name).data["tasks"]["task"] for name in "ab"]
    assert [(each["steps"], each["over"]) for each in saved] == [(4, None), (4, "stopped")]
    for order in ("ab", "ba"):
        assert furthest([tmp_path / name for name in order], "task") == tmp_path / "b"
