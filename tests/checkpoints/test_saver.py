"""When a run saves, and what it does where it cannot."""

import errno
import gc
import os
import signal
import threading
import weakref

import pytest
import torch
from torch.nn import functional as F

from hydra_engine import Callback, ModelTask
from hydra_engine.checkpoints import snapshot
from hydra_engine.checkpoints.checkpoint import load_newest
from hydra_engine.checkpoints.directory import CheckpointDirectory
from hydra_engine.run.loop import EngineRun
from hydra_engine.system.files import Disk
from tests.checkpoints.support import FullDisk
from tests.promises.test_resumed import LOADERS, NUM_STEPS, PATIENCE_S, orchestra_of, shuffled, task_of
from tests.refused import names


@pytest.fixture
def disk(monkeypatch):
    found = FullDisk()
    found.is_full = False
    monkeypatch.setattr("hydra_engine.checkpoints.directory.Disk", lambda: found)
    return found


class Stalls:
    """A loader that gives four batches, and no more before it is let go on."""

    def __init__(self):
        self.batches, self.goes_on, self.then = list(shuffled()), threading.Event(), lambda: None

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        yield from self.batches[:4]
        self.then()
        assert self.goes_on.wait(PATIENCE_S)
        yield from self.batches[4:]


def test_a_step_that_the_disk_refused_is_saved_as_the_run_is_interrupted(tmp_path, disk, monkeypatch):
    loader, failed = Stalls(), threading.Event()
    monkeypatch.setattr("hydra_engine.checkpoints.saver.Saver.tell", lambda *_: failed.set())
    monkeypatch.setitem(LOADERS, "stalls", lambda: loader)

    class Interrupts(Callback):
        def on_step(self, report):
            if report.steps == 3:
                disk.is_full = True

        def on_task_end(self, report):
            loader.goes_on.set()

    def interrupt():
        assert failed.wait(PATIENCE_S)
        disk.is_full = False
        os.kill(os.getpid(), signal.SIGTERM)

    loader.then = interrupt
    with pytest.raises(SystemExit):
        orchestra_of([task_of("stalls", callbacks=[Interrupts()])], tmp_path, every=4).train_models()
    assert load_newest(tmp_path).data["tasks"]["task"]["steps"] == 4


def test_updates_that_wait_for_room_go_on_where_the_disk_refuses(tmp_path, disk, monkeypatch):
    """Nothing may be copied, so that they wait until what they change is written, or given up."""
    monkeypatch.setattr(snapshot, "_has_room", lambda _: False)
    expected = orchestra_of([task_of(name="b")]).train_models().tasks["b"].losses
    disk.is_full = True
    tasks = [task_of(name=name, early_release=True) for name in "abcd"]
    orchestra = orchestra_of(tasks, tmp_path / "full", num_devices=2)
    orchestra.optimizer_threads = 1
    report = orchestra.train_models()
    assert report.tasks["b"].losses == expected
    assert report.checkpoints.num_failed >= 2
    assert report.checkpoints.num_saved == 0


def test_a_disk_that_refuses_is_asked_again_when_the_next_save_is_due(tmp_path, disk, capsys):
    disk.is_full = True
    report = orchestra_of([task_of()], tmp_path, every=4).train_models()
    assert report.checkpoints.num_failed == 1 + NUM_STEPS // 4  # and the task's end
    assert capsys.readouterr().err.count(os.strerror(errno.ENOSPC)) == 1 + NUM_STEPS // 4


@pytest.mark.rest
def test_a_run_that_saved_is_freed_as_its_call_returns(tmp_path, monkeypatch):
    """With every arena it has, and the workers of loaders, which torch ends only from a loader that is let go.

    Not by the collector of cycles, some time later.
    """
    runs = []
    begun = EngineRun.train

    def train(run):
        runs.append(weakref.ref(run))
        return begun(run)

    monkeypatch.setattr(EngineRun, "train", train)
    orchestra = orchestra_of([task_of()], tmp_path)
    gc.collect()
    gc.disable()
    try:
        orchestra.train_models()
        [run] = runs
        assert run() is None
    finally:
        gc.enable()


class Unsavable(torch.optim.SGD):
    """Keeps something beside that is no value, from the fourth step on."""

    def step(self):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                count = self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
                if count >= 4:
                    self.state[parameter]["handle"] = threading.Lock()


def test_a_task_that_cannot_be_saved_any_more_does_not_end_where_it_was_saved_last(tmp_path, monkeypatch, capsys):
    """And others are saved."""
    is_saved, publish = threading.Event(), CheckpointDirectory.publish

    def published(directory, path, manifest):
        found = publish(directory, path, manifest)
        if "a" in manifest.tasks:
            is_saved.set()
        return found

    monkeypatch.setattr(CheckpointDirectory, "publish", published)

    class Waits(list):
        def __iter__(self):
            for k in range(len(self)):
                assert k != 3 or is_saved.wait(PATIENCE_S)
                yield self[k]

    monkeypatch.setitem(LOADERS, "waits", lambda: Waits(LOADERS["list"]()))

    def tasks(loader="waits"):
        return [task_of(loader, name="a", epochs=1, optimizer=Unsavable), task_of(name="b", epochs=1)]

    expected = orchestra_of(tasks("list")).train_models().tasks["a"].losses
    report = orchestra_of(tasks(), tmp_path).train_models()
    assert report.checkpoints.num_failed == 0
    found = load_newest(tmp_path).data["tasks"]
    assert found["a"]["steps"] <= 3
    assert found["a"]["over"] is None
    assert (found["b"]["steps"], found["b"]["over"]) == (6, "finished")
    names(capsys.readouterr().err, task="'a'", says="saved")
    report = orchestra_of(tasks(), tmp_path).train_models(resume=True)
    assert (report.tasks["a"].status, report.tasks["a"].losses) == ("finished", expected)


def test_a_damaged_file_of_a_task_that_is_over_stops_no_save_of_others(tmp_path, monkeypatch, capsys):
    publish, damaged = CheckpointDirectory.publish, []

    def published(directory, path, manifest):
        found = publish(directory, path, manifest)
        if manifest.data["tasks"].get("a", {}).get("over") == "finished" and not damaged:
            damaged.extend(tmp_path.glob("files/*-a-optimizer.safetensors"))
            for each in damaged:
                each.unlink()
        return found

    def tasks():
        return [task_of(name="a", epochs=1), task_of(name="b", epochs=10)]

    monkeypatch.setattr(CheckpointDirectory, "publish", published)
    report = orchestra_of(tasks(), tmp_path).train_models()
    assert report.checkpoints.num_failed == 0
    assert capsys.readouterr().err.count("task 'a'") == 1
    assert load_newest(tmp_path).data["tasks"]["b"]["steps"] == report.tasks["b"].steps
    resumed = orchestra_of(tasks(), tmp_path).train_models(resume=True)
    assert all(resumed.tasks[name].losses == report.tasks[name].losses for name in "ab")


class WritesAsItIsSaved(Callback):
    """Writes to a parameter while the first file of a part is written, after the step that is saved."""

    def __init__(self, parameter, part, monkeypatch):
        self.parameter, self.part, self.write = parameter, f"-{part}", Disk.write
        self.begun, self.through = threading.Event(), threading.Event()
        monkeypatch.setattr(Disk, "write", lambda disk, *args: self._written(disk, *args))

    def _written(self, disk, path, put):
        self.write(disk, path, put)
        if self.part in path.name and not self.begun.is_set():
            self.begun.set()
            assert self.through.wait(PATIENCE_S)

    def on_step(self, report):
        if report.steps == 2:
            assert self.begun.wait(PATIENCE_S)
            with torch.no_grad():
                self.parameter.fill_(2)
            self.through.set()


class ScaledLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, output, target):
        return (self.scale * (output - target) ** 2).mean()


@pytest.mark.parametrize("part", ["frozen", "state"])
def test_a_frozen_weight_that_a_callback_writes_as_it_is_saved_is_saved_as_it_was(tmp_path, monkeypatch, part):
    loss, net = ScaledLoss(), torch.nn.Sequential(torch.nn.Linear(6, 6).requires_grad_(False), torch.nn.Linear(6, 3))
    parameter = {"frozen": net[0].weight, "state": loss.scale}[part]
    before, found = parameter.clone(), []
    writes = WritesAsItIsSaved(parameter, part, monkeypatch)
    task = ModelTask(net, loss, list(shuffled()), 0.1, 1, name="a", seed=7, callbacks=[writes])
    publish = CheckpointDirectory.publish

    def published(store, path, manifest):
        told = publish(store, path, manifest)
        first = load_newest(tmp_path)
        found.append({"frozen": first.read_tensors("a", "frozen"), **first.read_nested("a", "state")})
        return told

    monkeypatch.setattr(CheckpointDirectory, "publish", published)
    orchestra_of([task], tmp_path).train_models().raise_failures()
    names = {"frozen": "0.weight", "state": next(iter(found[0]["loss_parameters"]))}
    saved = [each["frozen" if part == "frozen" else "loss_parameters"][names[part]] for each in found]
    assert torch.equal(saved[0], before)
    assert torch.equal(saved[-1], torch.full_like(before, 2))


class KeepsOddNames(Callback):
    def state_dict(self):
        return {os.fsdecode(b"caf\xe9"): torch.ones(1)}

    def load_state_dict(self, state):
        self.loaded = state


def test_state_under_a_name_that_is_no_text_is_saved(tmp_path):
    orchestra_of([task_of(callbacks=[KeepsOddNames()], epochs=1)], tmp_path).train_models().raise_failures()
    resumed = task_of(callbacks=[KeepsOddNames()])
    orchestra_of([resumed], tmp_path).train_models(resume=True).raise_failures()
    assert resumed.callbacks[0].loaded == {os.fsdecode(b"caf\xe9"): torch.ones(1)}


def test_a_frozen_base_that_tasks_share_is_written_once_per_directory(tmp_path):
    base = torch.nn.Linear(6, 6).requires_grad_(False)

    def task(name, epochs):
        layers = torch.nn.Sequential(base, torch.nn.Linear(6, 3))
        return ModelTask(layers, F.mse_loss, list(shuffled()), 0.1, epochs, name=name, seed=7)

    def frozen_files():
        return [path.name for path in (tmp_path / "files").glob("*frozen*")]

    orchestra_of([task("a", 1), task("b", 1)], tmp_path).train_models().raise_failures()
    [first] = frozen_files()
    orchestra_of([task(name, 2) for name in "abc"], tmp_path).train_models(resume=True).raise_failures()
    assert frozen_files() == [first]
    found = load_newest(tmp_path)
    assert {*found.task_names} == {"a", "b", "c"}
    for name in found.task_names:
        assert torch.equal(found.read_tensors(name, "frozen")["0.weight"], base.weight)
