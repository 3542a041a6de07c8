"""What tests of checkpoints share: small contents, and disks that fail, end the process or lose power."""

import errno
import os
import struct
import threading
from typing import Any, NamedTuple

import numpy as np
import torch

from hydra_engine.checkpoints.checkpoint import load_newest, newest_first, place, read_manifest
from hydra_engine.checkpoints.directory import CheckpointDirectory
from hydra_engine.checkpoints.nested import flatten
from hydra_engine.checkpoints.tensors import MovingTensor
from hydra_engine.system.files import Disk

WEIGHTS, FROZEN, STATE = "weights", "frozen", "state"
TRIED = "00000000-"  # how the name begins of the file that a directory is tried with


class TaskContent(NamedTuple):
    weights: dict[str, torch.Tensor]
    state: Any = None


def save_tasks(store, tasks, data=None):
    with store.begin() as new:
        for name, content in tasks.items():
            new.add(name, {WEIGHTS: content.weights, STATE: flatten(content.state, f"task {name!r}: state")})
        return new.commit(data)


def read_task(found, name):
    return TaskContent(found.read_tensors(name, WEIGHTS), found.read_nested(name, STATE))


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
        if "notes" in store.newest_parts("gpt"):
            new.keep("gpt")
        else:
            new.add("gpt", {"notes": flatten("over"), STATE: flatten({"step": torch.ones(7)})})
        unchanged = store.newest_parts("bert") & {FROZEN}
        parts = {WEIGHTS: {"w": MovingTensor(torch.full((5,), float(k)))}}
        if not unchanged:
            parts[FROZEN] = {"f": torch.arange(9.0)}
        new.add("bert", parts, unchanged)
        return new.commit({"k": k})


def assert_round(found, k):
    assert found.data == {"k": k}
    assert found.parts("bert").keys() == {WEIGHTS, FROZEN}
    assert found.parts("gpt").keys() == {"notes", STATE}
    assert torch.equal(found.read_tensors("bert", WEIGHTS)["w"], torch.full((5,), float(k)))
    assert torch.equal(found.read_tensors("bert", FROZEN)["f"], torch.arange(9.0))
    assert found.read_nested("gpt", "notes") == "over"
    assert torch.equal(found.read_nested("gpt", STATE)["step"], torch.ones(7))


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


def path_of(found, task, part):
    """The file of a part in a checkpoint, which is given or saved."""
    [stored] = read_manifest(found.path).tasks[task][part]
    return place(found.path, stored)


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

    def call(self, path, *arguments):
        self.num_left -= 1
        if self.num_left <= 0 and self.fail(self, name):
            self.failed.append(name)
            if name == "write":
                method(self, path, *arguments)
                os.truncate(path, path.stat().st_size // 2)
                if isinstance(self.error, Killed):
                    path.with_name(".tmpAbC123").write_bytes(b"half")  # which safetensors' library would rename
            raise self.error
        return method(self, path, *arguments)

    return call


CALLS = ("write", "sync", "make_folder", "rename", "remove_file")
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
    return name in ("write", "make_folder", "sync")


class FullDisk(Disk):
    """Takes no file while it is full, but for the one that a directory is tried with."""

    is_full = True

    def __init__(self):
        self.has_refused = threading.Event()

    def write(self, path, put):
        if self.is_full and not path.name.startswith(TRIED):
            self.has_refused.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(path, put)


class LosingDisk(Disk):
    """Knows what would be there after a power failure: of a file or folder, what it was when it was last synced.

    The least that POSIX promises; numbers of its own stand for files, as a file system uses its own again.
    """

    def __init__(self, root):
        self.root = root
        self.ids = {root: 0}
        self.kept = {}  # by id: bytes, or entries
        self.moments = []

    def _new(self, path):
        self.ids[path] = len(self.ids) + len(self.moments) * 1000

    def _moment(self):
        self.moments.append(dict(self.kept))

    def write(self, path, put):
        self._new(path)
        super().write(path, put)
        self._moment()

    def make_folder(self, path):
        super().make_folder(path)
        self._new(path)
        self._moment()

    def sync(self, path):
        if path in self.ids:
            is_folder = path.is_dir()
            names = {each.name: self.ids[each] for each in path.iterdir() if each in self.ids} if is_folder else None
            self.kept[self.ids[path]] = names if is_folder else path.read_bytes()
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
