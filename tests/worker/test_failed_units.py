"""What is left of a unit that failed: its error, and none of its tensors."""

import gc
import mmap
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import ModelTask
from hydra_engine.devices.lanes import QUEUES, Lane, open_lanes
from hydra_engine.system.dram import discard
from hydra_engine.worker.unit import forget_frames
from tests import exact, reference

WIDTH, LARGE = 8, 100


class Mistaken(nn.Module):
    """Raises at the batch with large values, with an activation in its hands."""

    def __init__(self, held):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.hold = lambda tensor: held.append(weakref.ref(tensor.untyped_storage()))  # not put back, as a list is

    def forward(self, x):
        hidden = self.layer(x).relu()
        if x.max() > LARGE:
            self.hold(hidden)
            raise ValueError("a mistake of the layer")
        return hidden


def data(num_batches):
    torch.manual_seed(0)
    return [(torch.randn(4, WIDTH), torch.randn(4, WIDTH)) for _ in range(num_batches)]


def test_its_activations_are_gone_though_the_report_keeps_its_error():
    found, batches = [], data(9)
    batches[6][0].fill_(2 * LARGE)
    task = ModelTask([Mistaken(found), nn.Linear(WIDTH, WIDTH)], F.mse_loss, batches, 0.1)
    orchestra = exact.silent([task])
    gc.disable()
    try:
        with pytest.raises(ValueError, match="a mistake of the layer"):
            orchestra.train_models()
        assert orchestra.report.tasks["task-0"].exception is not None
        [held] = found
        assert held() is None
    finally:
        gc.enable()
    assert 'raise ValueError("a mistake of the layer")' in orchestra.report.tasks["task-0"].error


def test_frames_of_an_errors_causes_are_forgotten_too():
    def fail():
        tensor = torch.ones(3)
        held.append(weakref.ref(tensor.untyped_storage()))
        raise KeyError("cause")

    held = []
    try:
        try:
            fail()
        except KeyError as cause:
            raise RuntimeError("error") from cause
    except RuntimeError as raised:
        error = raised
    assert held[0]() is not None
    forget_frames(error)
    assert held[0]() is None
    assert isinstance(error.__cause__, KeyError)


class Pair(nn.Module):
    """Passes a scalar along beside its output, as a sum of auxiliary losses is."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        x, total = value if isinstance(value, tuple) else (value, value.new_zeros(()))
        y = torch.relu(self.layer(x))
        return y, total + y.mean()


class Joined(nn.Module):
    def forward(self, value):
        return value[0] + value[1]


def test_a_scalar_crosses_shards():
    def model_of():
        torch.manual_seed(2)
        return nn.Sequential(Pair(), Pair(), Pair(), Joined())

    losses = reference.train(model_of(), F.mse_loss, data(3), seed=0, lr=0.1).losses
    task = ModelTask(model_of(), F.mse_loss, data(3), 0.1)
    orchestra = exact.silent([task], 2500)
    assert len(orchestra.generate().tasks["task-0"].boundaries) > 1
    assert orchestra.train_models().tasks["task-0"].losses == losses


class TestLane:
    def test_a_job_that_raises_does_not_end_it(self, capsys):
        done = []

        def raises():
            raise RuntimeError("a job that does not handle its own")

        lane = Lane("lane", 1)
        lane.submit(raises)
        lane.submit(lambda: done.append(True))
        lane.close()
        assert done == [True]
        assert "a job that does not handle its own" in capsys.readouterr().err

    def test_where_one_cannot_begin_none_is_left(self):
        class Refusing:
            def __enter__(self):
                raise OSError("no stream")

            def __exit__(self, *_):
                raise AssertionError("it was not entered")

        class Counted:
            def __enter__(self):
                inside.append(1)

            def __exit__(self, *_):
                inside.append(-1)

        inside = []
        with pytest.raises(OSError, match="no stream"):
            open_lanes("device", 1, lambda lane: Refusing() if lane == QUEUES[2] else Counted())
        assert inside == [1, 1, -1, -1]


@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE], ids=["shared", "private"])
def test_discarded_pages_are_given_back_whatever_they_are_mapped_as(flags):
    num_bytes = 8 * mmap.PAGESIZE
    memory = mmap.mmap(-1, num_bytes, flags=flags | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(memory, dtype=torch.uint8).fill_(7)
    is_shared = flags == mmap.MAP_SHARED
    discard(flat.untyped_storage(), mmap.PAGESIZE, 2 * mmap.PAGESIZE, is_shared=is_shared)
    assert not flat[mmap.PAGESIZE : 3 * mmap.PAGESIZE].any()  # pages anew
    assert (flat[: mmap.PAGESIZE] == 7).all()
    assert (flat[3 * mmap.PAGESIZE :] == 7).all()
