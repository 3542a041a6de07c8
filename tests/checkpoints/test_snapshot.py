"""A task taken down at a step boundary."""

from types import SimpleNamespace

import torch
from torch import Tensor

from hydra_engine.checkpoints.snapshot import LastCommit, Snapshot
from hydra_engine.host.home import TaskHomes
from hydra_engine.tasks.report import TaskReport


def snapshot_of(**optimizer):
    """Of a task without weights, whose optimizer gives these."""
    layout = SimpleNamespace(named_slots=list, persistent_buffers=dict, trainable_slots=list)
    state = SimpleNamespace(
        layout=layout,
        cut=SimpleNamespace(num_micro_batches=1),
        max_devices=None,
        homes=TaskHomes(),
        pool=SimpleNamespace(frozen_version=0),
    )
    return Snapshot(
        SimpleNamespace(state=state, report=TaskReport(name="task", seed=0), chooser=None),
        SimpleNamespace(schedule=dict, **optimizer),
        LastCommit(SimpleNamespace(to_state=dict), []),
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
    for tensor in [found.parts["optimizer"][name] for name in parts]:
        assert isinstance(tensor, Tensor)
        assert torch.equal(tensor, torch.zeros(2))
