"""A moving tensor's value is what the tensor held when it was made, whatever becomes of the tensor meanwhile."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from hydra_engine.checkpoints.tensors import MovingTensor
from tests.checkpoints.support import bits

pytestmark = pytest.mark.rest


def value_of(moving, part_bytes=7):
    target = bytearray(moving.nbytes)
    for start in range(0, moving.nbytes, part_bytes):
        moving.copy_to(memoryview(target)[start : start + part_bytes], start)
    return bytes(target)


def c_order(tensor):
    return bytes(bits(tensor.detach().resolve_conj().contiguous())[-1])


BASE = torch.arange(24.0)
TENSORS = {
    "flat": BASE,
    "part": BASE[3:9],
    "scalar": torch.tensor(1.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "bfloat16": BASE.bfloat16(),
    "parameter": torch.nn.Parameter(BASE.clone()),
    "turned": BASE.view(4, 6).t(),
    "every other": BASE[::2],
    "expanded": torch.tensor([1.0]).expand(4),
    "channels last": BASE.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "conjugate": torch.complex(BASE, BASE).conj(),
    "nan": torch.tensor([0x7FC00001, 0x7F800001], dtype=torch.int32).view(torch.float32),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("is_secured", [False, True])
def test_the_values_in_c_order_part_by_part(name, is_secured):
    tensor = TENSORS[name]
    moving = MovingTensor(tensor)
    if is_secured:
        assert moving.secure() == moving.nbytes
    assert (moving.dtype, moving.shape, moving.strides) == (tensor.dtype, tuple(tensor.shape), tensor.stride())
    assert value_of(moving) == c_order(tensor)
    assert moving.nbytes == len(c_order(tensor))


@pytest.mark.net
@pytest.mark.parametrize("tensor", [BASE.clone(), torch.arange(24.0).view(4, 6).t()], ids=["contiguous", "turned"])
def test_what_is_secured_stays(tensor):
    before = c_order(tensor)
    moving = MovingTensor(tensor)
    assert moving.secure() == 96
    assert moving.secure() == 0
    tensor.fill_(-1)
    assert value_of(moving) == before


@pytest.mark.net
def test_what_is_strided_secures_itself_when_it_is_written():
    tensor = torch.arange(24.0).view(4, 6).t()
    before = c_order(tensor)
    moving = MovingTensor(tensor)
    first = bytearray(8)
    moving.copy_to(memoryview(first), 0)
    assert moving.secure() == 0
    tensor.fill_(-1)
    assert value_of(moving) == before


@pytest.mark.net
@pytest.mark.parametrize("is_secured", [False, True])
def test_once_done_nothing_is_held(is_secured):
    memory = np.zeros(1000, np.float32)
    owner = weakref.ref(memory)
    moving = MovingTensor(torch.from_numpy(memory))
    del memory
    assert owner() is not None
    if is_secured:
        moving.secure()
        assert owner() is None, "it has a copy of its own"
    assert not moving.is_done
    moving.done()
    moving.done()
    assert moving.is_done
    assert owner() is None
    assert moving.secure() == 0
    with pytest.raises(ValueError, match="given up before all of it was written"):
        moving.copy_to(memoryview(bytearray(4)), 0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1, "the tensor is a int, not a tensor"),
        (torch.ones(1, device="meta"), "is on meta"),
        (torch.eye(2).to_sparse(), "only dense tensors"),
    ],
)
def test_what_cannot_be_saved_is_refused(value, message):
    with pytest.raises(TypeError, match=message):
        MovingTensor(value)


@pytest.mark.net
def test_no_memory_for_a_copy_leaves_it_as_it_was(monkeypatch):
    def full(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    moving = MovingTensor(BASE)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full)
        with pytest.raises(RuntimeError, match="can't allocate"):
            moving.secure()
    assert value_of(moving) == c_order(BASE)


def test_a_default_device_does_not_matter():
    moving = MovingTensor(BASE)
    with torch.device("meta"):
        assert moving.secure() == BASE.nbytes
    assert value_of(moving) == c_order(BASE)


def test_threads_that_secure_and_change_while_another_writes():
    for k in range(200):
        tensor = torch.full((5000,), float(k))
        moving = MovingTensor(tensor)
        go = threading.Barrier(3)

        def change(tensor=tensor, moving=moving, go=go):
            go.wait()
            moving.secure()
            tensor.add_(1)

        with ThreadPoolExecutor(2) as pool:
            changes = [pool.submit(change) for _ in range(2)]
            go.wait()
            found = value_of(moving, 512)
        assert [each.result() for each in changes] == [None, None]
        assert found == c_order(torch.full((5000,), float(k)))
