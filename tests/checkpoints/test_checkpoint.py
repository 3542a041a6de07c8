"""A checkpoint comes back bit for bit or not at all, and the newest whole one survives whatever ends a save."""

import errno
import functools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import threading
import time
import zlib
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from hydra_engine.checkpoints import checkpoint, manifest
from hydra_engine.checkpoints.checkpoint import furthest, load_newest, newest_first, place, read_manifest
from hydra_engine.checkpoints.directory import CheckpointDirectory
from hydra_engine.checkpoints.nested import flatten
from hydra_engine.checkpoints.tensors import MovingTensor
from hydra_engine.errors import CheckpointError
from hydra_engine.system.files import Disk
from tests import processes
from tests.checkpoints.support import (
    STATE,
    WEIGHTS,
    TaskContent,
    assert_holds,
    assert_nothing_unnamed,
    bits,
    flip,
    path_of,
    read_task,
    save,
    save_tasks,
)
from tests.refused import names, refused


def tensors():
    generator = torch.Generator().manual_seed(0)
    floats = torch.randn(4, 3, generator=generator)
    return {
        "float32": floats,
        "float64": floats.double(),
        "float16": floats.half(),
        "bfloat16": floats.bfloat16(),
        "float8": floats.to(torch.float8_e4m3fn),
        "complex64": torch.complex(floats, -floats),
        "complex128": torch.complex(floats.double(), -floats.double()),
        "int64": torch.tensor([2**63 - 1, -(2**63)]),
        "uint8": torch.get_rng_state(),
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(0.1, dtype=torch.float64),
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        "nan": torch.tensor([math.nan, -math.inf, -0.0]),
        "parameter": torch.nn.Parameter(floats[0].clone()),
    }


def nested():
    return {
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 2)}, 1: {}}, "lr": 0.1},
        "tensors": tensors(),
        "losses": [0.1, 5e-324, 1.7976931348623157e308, -0.0, math.inf, -math.inf, math.nan],
        "numpy": np.random.RandomState(1).get_state(),
        "random": random.Random(1).getstate(),
        "numbers": [np.float64(0.1), np.float32(-0.0), np.int64(-1), np.bool_(True)],
        "big": [10**5000, -(2**200), 2**63 - 1, -(2**63), 2**64],
        "torch": [torch.Size([2, 3]), torch.Size([]), torch.bfloat16, torch.device("cpu"), torch.device("meta:0")],
        "complex": [1j, complex(math.nan, -0.0), complex(-math.inf, 5e-324)],
        "kinds": (None, True, 1, 1.0, "é\ud800\x00", b"\x00\xff", (), [], {}, {"a"}, frozenset({1})),
        "milestones": Counter({30: 1, 60: 2}),
        "ordered": OrderedDict(b=1, a=2),
        1: {True: "bool", None: "none", (1, "a"): "tuple", 2.5: "float"},
        "tensor": {"tensor": "a key that looks like what the format uses"},
    }


def save_and_read(folder, content, name="bert", data=None):
    with CheckpointDirectory(folder) as store:
        save_tasks(store, {name: content}, data)
        found = store.load_newest()
    assert found.messages == ()
    assert found.task_names == (name,)
    return read_task(found, name)


# -- what comes back


def test_everything_comes_back_bit_for_bit(tmp_path):
    found = save_and_read(tmp_path / "a", TaskContent(weights=tensors(), state=nested()))
    assert bits(found.state) == bits(nested())
    assert {name: bits(each) for name, each in found.weights.items()} == {n: bits(t) for n, t in tensors().items()}
    for value in (None, 1.5, [], torch.tensor(1), "text"):
        shutil.rmtree(tmp_path / "a")
        assert bits(save_and_read(tmp_path / "a", TaskContent(weights={}, state=value)).state) == bits(value)


@pytest.mark.rest
def test_tensors_that_share_memory_or_are_strided(tmp_path):
    base = torch.arange(48.0)
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state = {
        "whole": base,
        "again": base,
        "part": base[3:9],
        "every other": base[::2],
        "turned": base.view(6, 8).t(),
        "expanded": torch.tensor([1.0]).expand(4),
        "conjugate": torch.complex(base, base).conj(),
        "image": image,
        "a.b": torch.zeros(1),
        "a": {"b": torch.ones(1)},
        "__metadata__": torch.zeros(2),
        "format": torch.ones(3),
        "dtypes": torch.ones(3, dtype=torch.complex128),
    }
    weights = {name: each for name, each in state.items() if isinstance(each, torch.Tensor) and name[0] != "_"}
    found = save_and_read(tmp_path, TaskContent(weights=weights, state=state))
    for name, value in weights.items():
        assert torch.equal(found.weights[name], value), name
        assert found.weights[name].is_contiguous()
        assert torch.equal(found.state[name], value), name
    assert found.state["again"] is found.state["whole"]
    assert found.weights["again"].data_ptr() != found.weights["whole"].data_ptr()
    assert bits(found.weights["dtypes"]) == bits(found.state["dtypes"]) == bits(state["dtypes"])
    assert found.state["image"].is_contiguous(memory_format=torch.channels_last)
    assert found.state["turned"].stride() == (1, 8)
    assert found.state["a"]["b"] == 1
    assert found.state["a.b"] == 0
    assert found.state["__metadata__"].shape == (2,)


NO_VALUES = r"torch\.(q?u?int[1-7](x\d)?|quint.*|qint.*|complex32)"  # no kernel copies them; a warning comes with it
DTYPES = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}


@pytest.mark.rest
@pytest.mark.parametrize("dtype", sorted((d for d in DTYPES if not re.fullmatch(NO_VALUES, str(d))), key=str), ids=str)
def test_every_dtype(tmp_path, dtype):
    raw = torch.randint(2 if dtype == torch.bool else 256, (96,), dtype=torch.uint8)
    values = {"flat": raw.view(dtype), "0-d": raw.view(dtype)[1], "empty": torch.empty(3, 0, dtype=dtype)}
    values["turned"] = raw.view(dtype).reshape(2, -1).t()
    found = save_and_read(tmp_path, TaskContent(weights=values, state=values))
    for name, value in values.items():
        assert bits(found.weights[name]) == bits(value.contiguous()), name
        assert bits(found.state[name].contiguous()) == bits(value.contiguous()), name


def test_weights_are_read_by_the_safetensors_library(tmp_path):
    weights = {name: each for name, each in tensors().items() if name != "complex128"}  # which it lacks
    weights["turned"] = torch.arange(6.0).view(2, 3).t()
    with CheckpointDirectory(tmp_path) as store:
        content = TaskContent(weights=weights | {"c": torch.ones(2, dtype=torch.complex128)})
        path = path_of(save_tasks(store, {"bert": content}), "bert", WEIGHTS)
    found = safetensors.torch.load_file(path)
    assert found.pop("c").dtype == torch.uint8
    assert {name: bits(each) for name, each in found.items()} == {n: bits(t.contiguous()) for n, t in weights.items()}
    assert path.stat().st_mode == (tmp_path / "LOCK").stat().st_mode, "not its user's alone"


def test_a_file_is_listed_as_documented(tmp_path):
    with CheckpointDirectory(tmp_path) as store:
        saved = save_tasks(store, {"bert": TaskContent(weights=tensors())})
    content = path_of(saved, "bert", WEIGHTS).read_bytes()
    listed = json.loads(saved.path.read_bytes())["tasks"]["bert"][WEIGHTS]
    name = f"{saved.path.stem.removeprefix('checkpoint-')}-0-bert-weights.safetensors"
    assert listed == [{"file": name, "num_bytes": len(content), "crc32": zlib.crc32(content)}]


@pytest.mark.parametrize("kind", [lambda tensor: tensor, MovingTensor], ids=["fixed", "moving"])
def test_a_part_of_several_files(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("hydra_engine.checkpoints.tensors.FILE_BYTES", 100)
    values = tensors() | {f"w{k}": torch.full((size,), float(k)) for k, size in enumerate((9, 25, 26, 1, 0, 3))}
    with CheckpointDirectory(tmp_path) as store:
        with store.begin() as new:
            new.add("bert", {WEIGHTS: {name: kind(each) for name, each in values.items()}})
            new.commit()
        found = store.load_newest()
    files = [safetensors.torch.load_file(place(found.path, each)) for each in found.parts("bert")[WEIGHTS]]
    assert len(files) > 5
    assert all(len(each) == 1 or sum(t.nbytes for t in each.values()) <= 100 for each in files)
    assert {name: bits(each) for name, each in found.read_tensors("bert", WEIGHTS).items()} == {
        name: bits(each) for name, each in values.items()
    }


def test_tasks_of_any_name_and_data(tmp_path):
    tasks = ("a/b", "..", "x" * 300, "é", "", "A", "a", "0-a")
    data = {"step": 3, "losses": [0.1, None, True], "plan": {"a": "b\n"}}
    with CheckpointDirectory(tmp_path) as store:
        save_tasks(store, {name: TaskContent(weights={}, state=name) for name in tasks}, data)
        found = store.load_newest()
    assert found.data == data
    assert found.task_names == tasks
    assert [read_task(found, name).state for name in tasks] == list(tasks)


class Own(dict):
    pass


class OwnTensor(torch.Tensor):
    pass


def deep(levels):
    return functools.reduce(lambda found, _: [found], range(levels), [])


def endless():
    found = {}
    found["a"] = found
    return found


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, len]}, r"state\['a'\]\['1'\] is a builtins.builtin_function"),
        (Own(), "Own, which cannot be saved; give dicts"),
        (np.array([None]), "ndarray, which cannot be saved"),
        (np.ones(1, np.longdouble), "state is a numpy array that torch does not"),
        (deep(101), "is nested 101 levels deep, limit: 100"),
        (endless(), "let nothing contain itself"),
        (torch.ones(1, device="meta"), "is on meta"),
        (torch.eye(2).to_sparse(), "only dense tensors"),
        (torch.ones(1).as_subclass(OwnTensor), "is a OwnTensor; only plain tensors"),
    ],
)
def test_what_cannot_be_saved_is_refused(state, message):
    with pytest.raises(TypeError, match=message):
        flatten(state)


@pytest.mark.rest
def test_as_deep_as_may_be(tmp_path):
    found = save_and_read(tmp_path / "list", TaskContent(weights={}, state=deep(100)))
    assert found.state == deep(100)
    value = functools.reduce(lambda found, _: OrderedDict(a=found), range(99), {})
    assert save_and_read(tmp_path / "dict", TaskContent(weights={}, state=value)).state == value


def test_one_task_of_several_is_read_alone(tmp_path):
    with CheckpointDirectory(tmp_path) as store:
        save_tasks(store, {name: TaskContent(weights={name: torch.ones(2)}, state=name) for name in ("a", "b")})
    found = load_newest(tmp_path)
    for name in found.parts("b"):
        path_of(found, "b", name).unlink()
    path_of(found, "a", WEIGHTS).unlink()
    assert found.read_nested("a", "state") == "a"
    with refused(CheckpointError, says=WEIGHTS):
        found.read_tensors("a", WEIGHTS)
    with refused(CheckpointError, task="'c'", says="'a' 'b'"):
        read_task(found, "c")


def test_weights_are_read_into_memory_that_is_there(tmp_path):
    weights = tensors() | {"turned": torch.arange(6.0).view(2, 3).t(), "tied": tensors()["float32"]}
    with CheckpointDirectory(tmp_path) as store:
        save_tasks(store, {"bert": TaskContent(weights=weights)})
    found = load_newest(tmp_path)
    into = {name: torch.zeros_like(each) for name, each in weights.items()}
    into["parameter"] = torch.nn.Parameter(into["parameter"])
    into["tied"] = into["float32"]
    assert into["turned"].stride() == (1, 3)
    read = found.read_tensors("bert", WEIGHTS, into)
    assert {name: bits(each) for name, each in into.items()} == {name: bits(each) for name, each in weights.items()}
    assert all(read[name].data_ptr() == into[name].data_ptr() for name in weights)
    one = torch.ones(1)
    for others, message in (
        (into | {"scalar": one}, r"'scalar' is of torch.float32 \(1,\) here, and was of torch.float64 \(\) as"),
        (into | {"more": one}, r"'more' is of torch.float32 \(1,\) here, and was missing as it was saved"),
        ({"uint8": into["uint8"]}, "'bfloat16' is missing here, and was of torch.bfloat16"),
    ):
        others = {name: torch.zeros_like(each) for name, each in others.items()}
        with pytest.raises(ValueError, match=message):
            found.read_tensors("bert", WEIGHTS, others)
        assert not any(any(bits(each)[-1]) for each in others.values())


# -- which one comes back


def saved_twice(folder):
    with CheckpointDirectory(folder) as store:
        save(store, 0)
        return save(store, 1).path


def written_by(path):
    """The files in which a checkpoint, by its manifest, holds its task."""
    return [place(path, stored) for stored in read_manifest(path).files]


def test_nothing_saved_yet(tmp_path):
    assert load_newest(tmp_path / "not there") is None
    assert load_newest(tmp_path) is None
    with CheckpointDirectory(tmp_path / "a" / "b") as store:
        assert store.load_newest() is None


def test_the_last_are_kept(tmp_path):
    (tmp_path / "mine.txt").write_text("a user's")
    with CheckpointDirectory(tmp_path, keep=2) as store:
        (tmp_path / "files/mine.txt").write_text("a user's")
        paths = [save(store, k).path for k in range(5)]
        assert newest_first(tmp_path) == [paths[4], paths[3]]
        assert_holds(store.load_newest(), 4)
    with CheckpointDirectory(tmp_path, keep=1) as store:
        assert_holds(store.load_newest(), 4)
        path = save(store, 5).path
    assert path.name.startswith("checkpoint-00000006-")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["LOCK", path.name, "files", "mine.txt"]
    (tmp_path / "files/mine.txt").unlink()
    assert_nothing_unnamed(tmp_path)
    with refused(ValueError, says="keep 0"):
        CheckpointDirectory(tmp_path, keep=0)


def test_damaged_ones_do_not_count_among_those_kept(tmp_path):
    newest = saved_twice(tmp_path)
    flip(path_of(load_newest(tmp_path), "bert", STATE), 3)
    assert newest_first(tmp_path)[0] == newest
    with CheckpointDirectory(tmp_path, keep=2) as store:
        assert_holds(store.load_newest(), 0)
        save(store, 2)
        assert len(newest_first(tmp_path)) == 3
        save(store, 3)
        assert [path.name[:19] for path in newest_first(tmp_path)] == ["checkpoint-00000004", "checkpoint-00000003"]


@pytest.mark.parametrize("name", ["manifest", WEIGHTS, STATE])
def test_a_file_that_is_cut_is_noticed(tmp_path, name):
    manifest = saved_twice(tmp_path)
    path = manifest if name == "manifest" else path_of(load_newest(tmp_path), "bert", name)
    content = path.read_bytes()
    for length in [*range(0, len(content), 3), len(content) - 1]:
        path.write_bytes(content[:length])
        found = load_newest(tmp_path)
        assert found.data == {"k": 0}
        names(found.messages[0], says=f"{'manifest' if path == manifest else path.name} {length}")
    path.write_bytes(content + b" ")
    assert load_newest(tmp_path).data == {"k": 0}
    path.unlink()
    if path != manifest:
        names(load_newest(tmp_path).messages[0], says=path.name)
    path.mkdir()
    assert load_newest(tmp_path).data == {"k": 0}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("name", ["manifest", WEIGHTS, STATE])
def test_a_file_that_cannot_be_read_is_refused_and_not_passed_over(tmp_path, monkeypatch, number, name):
    """It may be whole: who went on from an older checkpoint would lose, without need, what this one has."""
    manifest = saved_twice(tmp_path)
    path = manifest if name == "manifest" else path_of(load_newest(tmp_path), "bert", name)

    def but_that(real):
        def fails(it, *arguments, **options):
            if os.fspath(it) == os.fspath(path):
                raise OSError(number, os.strerror(number), os.fspath(it))
            return real(it, *arguments, **options)

        return fails

    found = load_newest(tmp_path)
    monkeypatch.setattr(Path, "open", but_that(Path.open))
    monkeypatch.setattr(Path, "read_bytes", but_that(Path.read_bytes))
    reads = [lambda: load_newest(tmp_path)]
    if name == "manifest":
        reads.append(lambda: furthest([tmp_path], "bert"))
    else:
        reads.append(lambda: found.read_tensors("bert", name))
    with CheckpointDirectory(tmp_path) as store:  # and nothing that it may name is removed
        assert path.exists()
        for read in (*reads, store.load_newest):
            with refused(CheckpointError, says=path.name) as caught:
                read()
            assert os.strerror(number) in str(caught.value)


def test_parts_that_are_not_there(tmp_path):
    found = load_newest(saved_twice(tmp_path).parent)
    with refused(CheckpointError, says="'bert' 'other'"):
        found.read_tensors("bert", "other")
    with refused(CheckpointError, says="no 'gpt9'"):
        found.parts("gpt9")


def test_none_is_whole(tmp_path):
    saved_twice(tmp_path)
    for path in (tmp_path / "files").glob(f"*{WEIGHTS}.safetensors"):
        flip(path, 20)
    with refused(CheckpointError) as caught:
        load_newest(tmp_path)
    assert all(path.name in str(caught.value) for path in (tmp_path / "files").glob(f"*{WEIGHTS}.safetensors"))


def test_a_newer_version_is_refused_by_name(tmp_path, monkeypatch):
    with CheckpointDirectory(tmp_path) as store:
        save(store, 0)
        monkeypatch.setattr(manifest, "VERSION", 3)
        save(store, 1)
    monkeypatch.undo()
    with refused(CheckpointError, says="version 3 2"):
        load_newest(tmp_path)


def test_a_checkpoint_that_changes_while_it_is_read(tmp_path):
    saved_twice(tmp_path)
    found = load_newest(tmp_path)
    weights = path_of(found, "bert", WEIGHTS)
    for change in (
        lambda: flip(weights, -1 + weights.stat().st_size),
        lambda: os.truncate(weights, 150),
        weights.unlink,
    ):
        change()
        with refused(CheckpointError, says=weights.name):
            read_task(found, "bert")


def test_every_byte_that_changes_before_it_is_read_is_noticed(tmp_path):
    found = load_newest(saved_twice(tmp_path).parent)
    generator = random.Random(0)
    for path in written_by(found.path):
        for offset in range(path.stat().st_size):
            mask = generator.randrange(1, 256)
            flip(path, offset, mask)
            with refused(CheckpointError, says=path.name):
                read_task(found, "bert")
            flip(path, offset, mask)
    assert_holds(found, 1)


def test_a_run_may_save_while_another_process_looks_for_the_newest(tmp_path, monkeypatch):
    listings = []

    def slow(directory):
        """Every other listing is old by the time it is used."""
        listings.append(newest_first(directory))
        if len(listings) % 2:
            with monkeypatch.context() as patched:
                patched.setattr(checkpoint, "newest_first", newest_first)  # which the save needs too
                save(store, len(listings))
        return listings[-1]

    with CheckpointDirectory(tmp_path, keep=1) as store:
        save(store, 0)
        monkeypatch.setattr(checkpoint, "newest_first", slow)
        found = load_newest(tmp_path)
        assert_holds(found, 1)
        assert found.messages == ()


def test_who_is_interrupted_while_a_checkpoint_is_checked_waits_for_no_more_of_it(tmp_path, monkeypatch):
    begun, goes_on, real = [], threading.Event(), checkpoint.checksum

    class Watched(ThreadPoolExecutor):
        """Its threads stand still until it is ended, with what waits or without."""

        def shutdown(self, wait=True, *, cancel_futures=False):
            if cancel_futures:
                super().shutdown(wait=False, cancel_futures=True)
            goes_on.set()
            super().shutdown(wait=wait)

        def map(self, *arguments):
            super().map(*arguments)
            raise KeyboardInterrupt

    def checksum(path):
        begun.append(path)
        assert goes_on.wait(60)
        return real(path)

    with CheckpointDirectory(tmp_path) as store:
        save_tasks(store, {name: TaskContent(weights={"w": torch.zeros(10)}) for name in "abcd"})
    monkeypatch.setattr(checkpoint, "ThreadPoolExecutor", Watched)
    monkeypatch.setattr(checkpoint, "_NUM_THREADS", 2)
    monkeypatch.setattr(checkpoint, "checksum", checksum)
    with pytest.raises(KeyboardInterrupt):
        load_newest(tmp_path)
    assert len(begun) <= 2


# -- saves that are cut off, and what they cost


def growth_of_a_save(folder):
    """Bytes by which the peak of this process's memory grows as 64 MiB are saved."""
    w = torch.zeros(2**24).fill_(1)
    with CheckpointDirectory(folder) as store:
        save_tasks(store, {"small": TaskContent(weights={"w": torch.zeros(3)})})
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        save_tasks(
            store, {"large": TaskContent(weights={"w": w, "moving": MovingTensor(w)}, state=w.view(4096, -1).t())}
        )
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.mark.rest
def test_no_second_copy_in_memory(tmp_path):
    assert processes.run(growth_of_a_save, tmp_path) < 2**24


def save_on(folder, progress):
    """Save without end; a line of `progress` for each save that has returned."""
    with CheckpointDirectory(folder, keep=2) as store, open(progress, "w") as told:
        for k in range(10**6):
            save_tasks(store, {"bert": TaskContent(weights={"w": torch.full((300_000,), float(k))}, state=k)}, {"k": k})
            print(k, file=told, flush=True)


def begin_in_a_child_and_die(folder, child):
    """Fork, and be killed; the child tells by file `child` why it may not save, and waits until that file is gone."""
    store = CheckpointDirectory(folder)
    if os.fork() == 0:
        with pytest.raises(ValueError) as error, store.begin():  # noqa: PT011
            pass
        child.with_suffix(".tmp").write_text(f"{os.getpid()} {error.value}")
        child.with_suffix(".tmp").rename(child)
        while child.exists():
            time.sleep(0.01)
        os._exit(0)
    wait_for(child.exists)
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(condition):
    """Until it holds; two minutes at most."""
    end_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_kill_9_while_saving(tmp_path):
    last, folder, progress = -1, tmp_path / "saved", tmp_path / "progress"
    for num_saves in (1, 4):
        process = processes.start(save_on, folder, progress)
        wait_for(lambda num=num_saves: progress.exists() and progress.read_text().count("\n") >= num)
        process.kill()
        process.join()
        saved = int(progress.read_text().split()[-1])
        progress.unlink()
        found = load_newest(folder)
        assert found.messages == ()
        k = found.data["k"]
        assert k in (saved, saved + 1)
        content = read_task(found, "bert")
        assert content.state == k
        assert torch.equal(content.weights["w"], torch.full((300_000,), float(k)))
        number = int(found.path.name.split("-")[1])
        assert number > last
        last = number
    with CheckpointDirectory(folder, keep=1):
        assert_nothing_unnamed(folder)


# -- directories that are of no use


def test_one_run_at_a_time(tmp_path):
    with CheckpointDirectory(tmp_path) as store:
        save(store, 0)
        with refused(CheckpointError, says=f"process {os.getpid()}"):
            CheckpointDirectory(tmp_path)
        assert_holds(load_newest(tmp_path), 0)  # reading is free
        save(store, 1)
    store.close()
    with CheckpointDirectory(tmp_path) as other:
        with refused(ValueError, says="closed"):
            save(store, 2)
        save(other, 2)


def test_children_of_a_killed_run_do_not_hold_its_lock(tmp_path):
    child = tmp_path / "child"
    process = processes.start(begin_in_a_child_and_die, tmp_path / "saved", child)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    pid, told = child.read_text().split(maxsplit=1)
    names(told, says="process")
    with CheckpointDirectory(tmp_path / "saved") as store:  # its child is still there
        os.kill(int(pid), 0)
        save(store, 0)
    child.unlink()


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("")
    for use in (CheckpointDirectory, load_newest):
        for path in (tmp_path / "file", tmp_path / "file" / "below"):
            with refused(CheckpointError, says=path):
                use(path)


@pytest.mark.parametrize(
    ("call", "number", "says"),
    [
        ("write", errno.EROFS, "Read-only"),
        ("sync", errno.EIO, "Input/output"),
        ("rename", errno.EXDEV, "cross-device files/"),
    ],
)
def test_a_directory_that_is_refused_at_once_is_not_locked(tmp_path, call, number, says):
    def fails(disk, *paths):
        raise OSError(number, os.strerror(number), str(paths[0]))

    with refused(CheckpointError, says=says):
        CheckpointDirectory(tmp_path, disk=type("Failing", (Disk,), {call: fails})())
    CheckpointDirectory(tmp_path).close()


def test_every_new_folder_above_is_synced(tmp_path):
    class Watched(Disk):
        def sync(self, path):
            synced.append(path)
            super().sync(path)

    synced = []
    CheckpointDirectory(tmp_path / "a" / "b" / "c", disk=Watched()).close()
    assert synced == [tmp_path / "a" / "b" / "c", tmp_path / "a" / "b", tmp_path / "a", tmp_path]


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not hold for root")
def test_a_directory_without_permission_is_refused_at_once(tmp_path):
    saved_twice(tmp_path)
    tmp_path.chmod(0o555)
    try:
        with refused(CheckpointError, says=tmp_path):
            CheckpointDirectory(tmp_path)
        assert_holds(load_newest(tmp_path), 1)
    finally:
        tmp_path.chmod(0o755)
