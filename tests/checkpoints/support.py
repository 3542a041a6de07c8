"""What tests of checkpoints share: small contents, and disks that fail, end the process or lose power."""

import errno
import struct
from typing import Any, NamedTuple

import numpy as np
import torch

from hydra_engine.checkpoints.checkpoint import load_newest, newest_first, place, read_manifest
from hydra_engine.checkpoints.directory import CheckpointDirectory
from hydra_engine.checkpoints.nested import nested_files
from hydra_engine.checkpoints.tensors import MovingTensor
from hydra_engine.system.files import Disk

WEIGHTS, FROZEN = "weights.safetensors", "frozen.safetensors"


class TaskContent(NamedTuple):
    weights: dict[str, torch.Tensor]
    state: Any = None


def task_files(name, content):
    return {"weights.safetensors": content.weights, **nested_files("state", content.state, f"task {name!r}: state")}


def save_tasks(store, tasks, data=None):
    with store.begin() as new:
        for name, content in tasks.items():
            new.add(name, task_files(name, content))
        return new.commit(data)


def read_task(found, name):
    return TaskContent(found.read_tensors(name, "weights.safetensors"), found.read_nested(name, "state"))


def bits(value):
    """A nested value with types, and all that is in its tensors."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        return ("tensor", value.dtype, tuple(value.shape), value.stride() if value.numel() > 1 else (), raw)
    if isinstance(value, np.ndarray):
        return ("array", value.dtype, value.shape, value.tobytes())
    if type(value) is complex:
        return ("complex", struct.pack("dd", value.real, value.imag))
    if type(value) is float:
        return ("float", struct.pack("d", value))
    if isinstance(value, dict):
        return (type(value), [(bits(key), bits(each)) for key, each in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value), [bits(each) for each in value])
    return (type(value), value)


def content(k):
    """Small, and each number's own."""
    return {"bert": TaskContent(weights={"w": torch.full((5,), float(k))}, state={"step": k, "m": torch.arange(3) + k})}


def assert_holds(found, k):
    assert found.data == {"k": k}
    read = read_task(found, "bert")
    assert torch.equal(read.weights["w"], torch.full((5,), float(k)))
    assert read.state["step"] == k
    assert torch.equal(read.state["m"], torch.arange(3) + k)


def save(store, k):
    return save_tasks(store, content(k), {"k": k})


def save_round(store, k):
    """Task "bert" trains, above frozen weights; task "gpt" was over at the first save. Their order changes."""
    with store.begin() as new:
        if "notes" in store.newest_files("gpt"):
            new.keep("gpt")
        else:
            new.add("gpt", {"notes": b"over", **nested_files("state", {"step": torch.ones(7)})})
        unchanged = store.newest_files("bert") & {FROZEN}
        files = {WEIGHTS: {"w": MovingTensor(torch.full((5,), float(k)))}}
        if not unchanged:
            files[FROZEN] = {"f": torch.arange(9.0)}
        new.add("bert", files, unchanged)
        return new.commit({"k": k})


def assert_round(found, k):
    assert found.data == {"k": k}
    assert found.files("bert") == {WEIGHTS, FROZEN}
    assert found.files("gpt") == {"notes", "state.json", "state.safetensors"}
    assert torch.equal(found.read_tensors("bert", WEIGHTS)["w"], torch.full((5,), float(k)))
    assert torch.equal(found.read_tensors("bert", FROZEN)["f"], torch.arange(9.0))
    assert found.read_bytes("gpt", "notes") == b"over"
    assert torch.equal(found.read_nested("gpt", "state")["step"], torch.ones(7))


# Saves of one task that is written anew each time, and of two of which much is taken over.
KINDS = {"all written": (save, assert_holds), "files taken over": (save_round, assert_round)}


def assert_stopped_whole(folder, assert_holds, save, k):
    """After a save that was cut off: one of two is there, whole, and the next, of `k`, succeeds; which it was."""
    found = load_newest(folder)
    assert_holds(found, found.data["k"])
    assert found.messages == ()
    with CheckpointDirectory(folder, keep=1) as store:
        assert_nothing_unnamed(folder)
        assert_holds(store.load_newest(), found.data["k"])
        path = save(store, k).path
        assert_holds(store.load_newest(), k)
    assert sorted(each.name for each in folder.iterdir()) == ["LOCK", path.name, "files"]
    assert_nothing_unnamed(folder)
    return found.data["k"]


def assert_nothing_unnamed(folder):
    named = {file.file for path in newest_first(folder) for file in read_manifest(path).files}
    assert {path.name for path in (folder / "files").iterdir()} <= named


def path_of(found, task, name):
    """A file of a checkpoint, which is given or saved."""
    return place(found.path, read_manifest(found.path).tasks[task][name])


def flip(path, offset, mask=1):
    with path.open("r+b") as file:
        file.seek(offset)
        [byte] = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


class Killed(BaseException):
    pass


class FailingDisk(Disk):
    """Stops at its `n`-th call: `fail` is what it does instead, before or after a part of the call."""

    def __init__(self, n, fail):
        self.num_left = n
        self.fail = fail
        self.failed = []


def _failing(name):
    method = getattr(Disk, name)

    def call(self, *arguments):
        self.num_left -= 1
        if self.num_left <= 0 and self.fail(self, name):
            self.failed.append(name)
            if name == "write":
                method(self, arguments[0], arguments[1][: len(arguments[1]) // 2])
            raise self.error
        return method(self, *arguments)

    return call


CALLS = ("create", "write", "sync", "make_folder", "rename", "remove_file")
for _name in CALLS:
    setattr(FailingDisk, _name, _failing(_name))


def all_calls(self, name):
    """The process is gone: nothing works from here on, not even what clears up."""
    self.error = Killed()
    return True


def one_call(self, name):
    self.error = OSError(errno.ENOSPC, "No space left on device")
    return not self.failed


def what_takes_room(self, name):
    self.error = OSError(errno.ENOSPC, "No space left on device")
    return name in ("create", "write", "make_folder", "sync")


class LosingDisk(Disk):
    """Knows what would be there after a power failure: of a file or folder, what it was when it was last synced.

    The least that POSIX promises; numbers of its own stand for files, as a file system uses its own again.
    """

    def __init__(self, root):
        self.root = root
        self.ids = {root: 0}
        self.paths = {}  # by descriptor
        self.kept = {}  # by id: bytes, or entries
        self.moments = []

    def _new(self, path):
        self.ids[path] = len(self.ids) + len(self.moments) * 1000

    def _moment(self):
        self.moments.append(dict(self.kept))

    def set_direct(self, descriptor, is_direct):
        return False

    def create(self, path):
        self._new(path)
        descriptor = super().create(path)
        self.paths[descriptor] = path
        self._moment()
        return descriptor

    def make_folder(self, path):
        super().make_folder(path)
        self._new(path)
        self._moment()

    def sync(self, descriptor):
        if descriptor in self.paths:
            self.kept[self.ids[self.paths[descriptor]]] = self.paths[descriptor].read_bytes()
            self._moment()

    def close(self, descriptor):
        super().close(descriptor)
        del self.paths[descriptor]

    def sync_folder(self, path):
        if path in self.ids:
            self.kept[self.ids[path]] = {each.name: self.ids[each] for each in path.iterdir() if each in self.ids}
            self._moment()

    def rename(self, source, target):
        super().rename(source, target)
        self.ids[target] = self.ids.pop(source)
        self._moment()

    def remove_file(self, path):
        super().remove_file(path)
        self._moment()


def write_out(kept, number, path):
    if isinstance(kept.get(number), dict):
        path.mkdir(exist_ok=True)
        for name, each in kept[number].items():
            write_out(kept, each, path / name)
    elif number in kept:
        path.write_bytes(kept[number])
