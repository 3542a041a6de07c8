"""A moving tensor is saved with what the tensor held when it was made, whatever becomes of the tensor meanwhile."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from hydra_engine.checkpoints import tensors
from hydra_engine.checkpoints.tensors import MovingTensor, read_tensors, write_tensors
from hydra_engine.system.files import Disk
from tests.checkpoints.support import bits
from tests.refused import refused

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


def c_order(tensor):
    return bits(tensor.detach().resolve_conj().contiguous())


def written(path, disk=None, **values):
    write_tensors(disk or Disk(), path, values)
    return {name: bits(each) for name, each in read_tensors([path])[0].items()}


class Changes(Disk):
    """Does something as a file is written for the first time, before or after it took the bytes."""

    def __init__(self, change, *, after):
        self.change, self.after, self.num_writes = change, after, 0

    def write(self, path, put):
        self.num_writes += 1
        if self.num_writes == 1 and not self.after:
            self.change()
        super().write(path, put)
        if self.num_writes == 1 and self.after:
            self.change()


@pytest.mark.parametrize("is_secured", [False, True])
def test_the_values_in_c_order(tmp_path, is_secured):
    moving = {name: MovingTensor(each) for name, each in TENSORS.items()}
    if is_secured:
        assert {name: each.secure() for name, each in moving.items()} == {n: t.nbytes for n, t in TENSORS.items()}
        assert {each.secure() for each in moving.values()} == {0}
    assert written(tmp_path / "a", **moving) == {name: c_order(each) for name, each in TENSORS.items()}
    assert all(each.is_done for each in moving.values())


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("tensor", [BASE, BASE.view(4, 6).t()], ids=["contiguous", "turned"])
def test_one_that_changes_while_it_is_written_is_written_as_it_was(tmp_path, tensor, after):
    tensor, other = tensor.clone(), torch.ones(9)
    before = c_order(tensor)
    moving = MovingTensor(tensor)

    def change():
        moving.secure()
        tensor.fill_(-1)

    disk = Changes(change, after=after)
    found = written(tmp_path / "a", disk, moving=moving, other=MovingTensor(other), fixed=other)
    assert found == {"moving": before, "other": bits(other), "fixed": bits(other)}
    assert disk.num_writes == 1 + tensor.is_contiguous(), "one with gaps was copied before"


def test_a_file_is_written_once_more_at_most_however_many_of_its_tensors_change(tmp_path):
    tensors = [torch.full((9,), float(k)) for k in range(4)]
    moving = {f"t{k}": MovingTensor(each) for k, each in enumerate(tensors)}

    class ChangesOneEachTime(Disk):
        num_writes = 0

        def write(self, path, put):
            super().write(path, put)
            moving[f"t{self.num_writes}"].secure()
            tensors[self.num_writes].fill_(-1)
            self.num_writes += 1

    disk = ChangesOneEachTime()
    assert written(tmp_path / "a", disk, **moving) == {f"t{k}": bits(torch.full((9,), float(k))) for k in range(4)}
    assert disk.num_writes == 2


def test_a_name_that_the_format_does_not_take_is_refused(tmp_path):
    for name in ("__metadata__", "\ud800"):
        with refused(ValueError, says=f"{name!r} rename"):
            written(tmp_path / "a", **{name: torch.ones(1)})
    assert not (tmp_path / "a").exists()


def test_values_that_are_elsewhere_are_put_together_as_it_is_written(tmp_path):
    place = torch.zeros(4, 6).t()
    moving = MovingTensor(place, lambda out: out.copy_(BASE.view(6, 4)))
    assert written(tmp_path / "a", moving=moving) == {"moving": c_order(BASE.view(6, 4))}


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


def test_one_that_is_given_up_while_it_is_written_fails_the_save(tmp_path):
    moving = MovingTensor(BASE)
    with pytest.raises(ValueError, match="given up before it was written"):
        written(tmp_path / "a", Changes(moving.done, after=False), moving=moving)


def test_no_memory_for_a_copy_leaves_it_as_it_was(tmp_path, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    moving = MovingTensor(BASE)
    with monkeypatch.context() as patch:
        patch.setattr(tensors, "_copy", full)
        with pytest.raises(RuntimeError, match="can't allocate"):
            moving.secure()
    assert written(tmp_path / "a", moving=moving) == {"moving": bits(BASE)}


def test_a_default_device_does_not_matter(tmp_path):
    moving = MovingTensor(BASE)
    with torch.device("meta"):
        assert moving.secure() == BASE.nbytes
        assert written(tmp_path / "a", moving=moving) == {"moving": bits(BASE)}


@pytest.mark.rest
def test_threads_that_secure_and_change_while_another_writes(tmp_path):
    for k in range(100):
        changing = [torch.full((5000,), float(k)) for _ in range(5)]
        moving = {str(j): MovingTensor(each) for j, each in enumerate(changing)}
        go = threading.Barrier(3)

        def change(order, changing=changing, moving=moving, go=go):
            go.wait()
            for j in order:
                moving[str(j)].secure()
                changing[j].add_(1)

        with ThreadPoolExecutor(2) as pool:
            changes = [pool.submit(change, order) for order in (range(5), range(4, -1, -1))]
            go.wait()
            found = written(tmp_path / "a", **moving)
        assert [each.result() for each in changes] == [None, None]
        assert found == {name: bits(torch.full((5000,), float(k))) for name in moving}
