"""A task taken down at a step boundary."""

import threading
from types import SimpleNamespace

import torch
from torch import Tensor

from hydra_engine.checkpoints.snapshot import Snapshot
from hydra_engine.host.optimizer import TaskOptimizer
from hydra_engine.tasks.report import TaskReport
from tests.promises.test_resumed import NUM_STEPS, PATIENCE_S, orchestra_of, task_of


def snapshot_of(**optimizer):
    """Of a task without weights, whose optimizer gives these."""
    layout = SimpleNamespace(named_slots=list, persistent_buffers=dict, trainable_slots=list)
    return Snapshot(
        SimpleNamespace(layout=layout, cut=SimpleNamespace(num_micro_batches=1), max_devices=None),
        SimpleNamespace(schedule=dict, **optimizer),
        TaskReport(name="task", seed=0),
        SimpleNamespace(to_state=dict),
        [],
        lambda **_: None,
    )


def test_states_of_several_parameters_in_one_piece_of_memory_are_taken_at_once():
    """Whoever updates one of these parameters secures it alone."""
    memory = torch.zeros(4)
    parts = {"a": memory[:2], "b": memory[2:]}
    found = snapshot_of(state=lambda: parts, moving_tensors=lambda: enumerate(parts.values()))
    found.capture()
    found.secure([0])
    parts["a"].fill_(9)
    for tensor in found.files["optimizer.safetensors"].values():
        assert isinstance(tensor, Tensor)
        assert torch.equal(tensor, torch.zeros(2))


def test_an_update_in_the_middle_of_a_step_begins_once_the_schedule_is_taken_down(tmp_path, monkeypatch):
    """That of its first shard may move the schedule to another epoch."""
    updating, seen = [threading.Event() for _ in range(NUM_STEPS + 1)], []
    capture, release, record = Snapshot.capture, TaskOptimizer.release, TaskOptimizer._record_released
    last = []

    def slow_capture(snapshot):
        last.append(snapshot)
        if snapshot.over is None and snapshot.steps < NUM_STEPS:
            assert updating[snapshot.steps].wait(PATIENCE_S)
        capture(snapshot)

    def noted_release(optimizer, *args):
        updating[optimizer.num_steps].set()
        return release(optimizer, *args)

    def checked_record(optimizer, epoch):
        seen.extend(snapshot._captured.is_set() for snapshot in last)
        return record(optimizer, epoch)

    monkeypatch.setattr(Snapshot, "capture", slow_capture)
    monkeypatch.setattr(TaskOptimizer, "release", noted_release)
    monkeypatch.setattr(TaskOptimizer, "_record_released", checked_record)
    report = orchestra_of([task_of(early_release=True)], tmp_path).train_models()
    assert report.tasks["task"].status == "finished"
    assert report.checkpoints.num_failed == 0
    assert len(seen) >= NUM_STEPS
    assert all(seen)
