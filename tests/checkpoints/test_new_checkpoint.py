"""Checkpoints built file by file: what moves is saved as it was, and what has not changed is named again."""

import contextlib
import json
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hydra_engine import _version
from hydra_engine.checkpoints import manifest, nested
from hydra_engine.checkpoints.checkpoint import load_newest, newest_first, read_manifest
from hydra_engine.checkpoints.directory import CheckpointDirectory
from hydra_engine.checkpoints.nested import flatten
from hydra_engine.checkpoints.tensors import MovingTensor
from hydra_engine.errors import CheckpointError
from hydra_engine.system.files import Disk
from tests.checkpoints.support import (
    FROZEN,
    STATE,
    WEIGHTS,
    FailingDisk,
    assert_nothing_unnamed,
    assert_round,
    bits,
    flip,
    path_of,
    save_round,
    what_takes_room,
)
from tests.refused import names, refused

# -- files taken over


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def test_what_has_not_changed_is_named_again(tmp_path):
    with CheckpointDirectory(tmp_path, keep=1) as store:
        first = save_round(store, 0)
        files = [path_of(first, "bert", FROZEN), path_of(first, "gpt", "notes")]
        num_files = len(list((tmp_path / "files").iterdir()))
        written_bytes = sum(path.stat().st_size for path in (tmp_path / "files").iterdir())
        assert first.num_bytes == written_bytes + first.path.stat().st_size
        second = save_round(store, 1)
    with CheckpointDirectory(tmp_path, keep=1) as store:
        assert_round(store.load_newest(), 1)
        third = save_round(store, 2)
        assert_round(store.load_newest(), 2)
    assert newest_first(tmp_path) == [third.path]
    assert [path_of(third, "bert", FROZEN), path_of(third, "gpt", "notes")] == files
    assert len(list((tmp_path / "files").iterdir())) == num_files
    assert_nothing_unnamed(tmp_path)
    sizes = [path.stat().st_size for path in (third.path, path_of(third, "bert", WEIGHTS))]
    assert third.num_bytes == second.num_bytes == sum(sizes)


def add_frozen(new, task, frozen):
    new.add(task, {FROZEN: {"f": frozen}, "notes": flatten(task)}, lasting={FROZEN})


def test_what_another_task_has_as_well_is_written_once(tmp_path):
    big = torch.arange(1000.0)
    values = {
        "a": big,
        "b": big.clone(),
        "c": big.view(-1, 4).t().contiguous().t(),
        "d": big.index_fill(0, big[-1:].long(), 7),
    }
    values["e"] = big.view(torch.int32)
    for _ in range(2):  # another run
        with CheckpointDirectory(tmp_path) as store:
            store.load_newest()
            with store.begin() as new:
                for task, value in values.items():
                    add_frozen(new, task, value)
                saved = new.commit()
        written = {task: path_of(saved, task, FROZEN).name for task in values}
        assert written["a"] == written["b"]
        assert len({*written.values()}) == len(list((tmp_path / "files").glob("*frozen*"))) == 4
        assert written["a"].startswith("00000001-")
        found = load_newest(tmp_path)
        assert {task: bits(found.read_tensors(task, FROZEN)["f"]) for task in values} == {
            task: bits(value.contiguous()) for task, value in values.items()
        }
        assert found.read_nested("b", "notes") == "b"


@pytest.mark.parametrize(
    "damage", [cut, Path.unlink, lambda path: flip(path, 5), lambda path: flip(path, path.stat().st_size - 1)]
)
def test_what_was_damaged_since_is_written_anew(tmp_path, damage):
    with CheckpointDirectory(tmp_path) as store:
        for k in range(2):
            with store.begin() as new:
                add_frozen(new, "a", torch.arange(9.0))
                saved = new.commit()
            if k == 0:
                damage(path_of(saved, "a", FROZEN))
        assert path_of(saved, "a", FROZEN).name.startswith("00000002-")
        assert torch.equal(store.load_newest().read_tensors("a", FROZEN)["f"], torch.arange(9.0))


def test_tasks_may_come_in_another_order(tmp_path):
    with CheckpointDirectory(tmp_path) as store:
        with store.begin() as new:
            for name in ("a", "b", "c"):
                new.add(name, {"name": flatten(name)})
            new.commit()
        with store.begin() as new:
            new.keep("c")
            new.add("d", {"name": flatten("d")})
            new.keep("a")
            new.commit()
        found = store.load_newest()
        assert found.task_names == ("c", "d", "a")
        assert [found.read_nested(name, "name") for name in found.task_names] == ["c", "d", "a"]


def test_what_can_be_taken_over(tmp_path):
    with CheckpointDirectory(tmp_path) as store:
        assert store.newest_parts("bert") == frozenset()
        saved = save_round(store, 0)
        assert store.newest_parts("bert") == {WEIGHTS, FROZEN}
        assert store.newest_parts("other") == frozenset()
    with CheckpointDirectory(tmp_path) as store:
        assert store.newest_parts("bert") == frozenset(), "nothing was verified yet"
        store.load_newest()
        assert store.newest_parts("bert") == {WEIGHTS, FROZEN}
        path_of(saved, "bert", FROZEN).write_bytes(b"cut")
        path_of(saved, "gpt", "notes").unlink()
        assert store.newest_parts("bert") == {WEIGHTS}
        assert store.newest_parts("gpt") == {STATE}


def test_only_the_newest_whole_one_is_taken_over(tmp_path):
    with CheckpointDirectory(tmp_path) as store:
        save_round(store, 0)
        with store.begin() as new:
            new.add("bert", {WEIGHTS: {"w": torch.zeros(1)}})
            saved = new.commit()
        assert store.newest_parts("gpt") == frozenset()
        flip(path_of(saved, "bert", WEIGHTS), 3)
        assert_round(store.load_newest(), 0)
        assert store.newest_parts("bert") == {WEIGHTS, FROZEN}
        save_round(store, 1)
        assert_round(store.load_newest(), 1)


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_what_is_gone_or_cut_is_not_taken_over(tmp_path, damage):
    with CheckpointDirectory(tmp_path) as store:
        damage(path_of(save_round(store, 0), "bert", FROZEN))
        with refused(CheckpointError, says="frozen"), store.begin() as new:
            new.keep("bert")
        assert_nothing_unnamed(tmp_path)
        save_round(store, 1)
        assert_round(store.load_newest(), 1)


# -- which ones stay


@pytest.mark.parametrize(
    ("keep", "saves", "kept"),
    [
        (1, "W", "1"),
        (1, "WW", "2"),
        (2, "WWW", "23"),
        (1, "WDW", "3"),  # D: damaged once it was saved
        (2, "WDW", "123"),
        (2, "WDDW", "1234"),
        (2, "WDWW", "34"),
        (2, "WWDW", "234"),
        (3, "WDWDWD", "3456"),
        (3, "WDWDWDWW", "5678"),
    ],
)
def test_the_last_whole_ones_stay_and_damaged_ones_between_them(tmp_path, keep, saves, kept):
    with CheckpointDirectory(tmp_path, keep=keep) as store:
        for k, letter in enumerate(saves):
            saved = save_round(store, k)
            if letter == "D":
                cut(path_of(saved, "bert", WEIGHTS))
    assert "".join(str(int(path.name[11:19])) for path in reversed(newest_first(tmp_path))) == kept
    assert_round(load_newest(tmp_path), saves.rindex("W"))
    assert_nothing_unnamed(tmp_path)


@pytest.mark.parametrize("damage", ["altered", "of a newer version"])
def test_while_a_manifest_cannot_be_read_nothing_is_removed_that_it_may_name(tmp_path, monkeypatch, damage):
    with CheckpointDirectory(tmp_path, keep=1) as store:
        if damage == "altered":
            path = save_round(store, 0).path
            flip(path, 100)
        else:
            with monkeypatch.context() as patched:
                patched.setattr(manifest, "VERSION", 3)
                path = save_round(store, 0).path
        own = set(path.parent.glob("files/00000001-*"))
        with contextlib.suppress(KeyError), store.begin() as new:
            new.add("bert", {"a": flatten(1)})
            raise KeyError  # what was written goes all the same
        assert {*(tmp_path / "files").iterdir()} == own
    with CheckpointDirectory(tmp_path, keep=1) as store:
        assert {*(tmp_path / "files").iterdir()} == own
        save_round(store, 1)
        assert newest_first(tmp_path)[1:] == []
        assert_nothing_unnamed(tmp_path)


def test_the_manifest_says_who_wrote_it(tmp_path):
    with CheckpointDirectory(tmp_path) as store:
        found = json.loads(save_round(store, 0).path.read_bytes())
    assert found["version"] == 2
    assert found["written_by"] == {"hydra_engine": _version.__version__, "torch": torch.__version__}


def test_every_field_of_a_manifest_and_every_kind_of_nested_state_is_documented(tmp_path):
    text = (Path(manifest.__file__).parent / "checkpoint.md").read_text()
    with CheckpointDirectory(tmp_path) as store:
        found = json.loads(save_round(store, 0).path.read_bytes())
    fields = text.partition("## A manifest\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", fields, re.MULTILINE) == list(found)
    assert f"version {manifest.VERSION}\n" in text
    rows = "".join(re.findall(r"^\| `\{\".*", text, re.MULTILINE))
    assert set(re.findall(r"[\"`](\w+)[\"`]", rows)) == {*nested._READ, "tensor", "order"}


# -- saves that are left, and several threads


def test_a_block_that_is_left_without_a_commit_leaves_nothing(tmp_path):
    with CheckpointDirectory(tmp_path) as store:
        save_round(store, 0)
        before = sorted(tmp_path.rglob("*"))
        with store.begin() as new:
            new.add("bert", {"a": flatten(1)})
            assert len(sorted(tmp_path.rglob("*"))) == len(before) + 1
        assert sorted(tmp_path.rglob("*")) == before
        with contextlib.suppress(KeyboardInterrupt), store.begin() as new:
            new.add("bert", {"a": flatten(1)})
            raise KeyboardInterrupt
        assert sorted(tmp_path.rglob("*")) == before
        with contextlib.suppress(KeyError), store.begin() as new:
            new.add("bert", {"a": flatten(1)})
            new.commit({"k": 1})
            raise KeyError
        assert load_newest(tmp_path).data == {"k": 1}, "what is committed stays"


def test_a_second_thread_waits_its_turn(tmp_path):
    with CheckpointDirectory(tmp_path, keep=10) as store:

        def save_some():
            for _ in range(5):
                with store.begin() as new:
                    inside.append(1)
                    assert len(inside) == 1
                    new.add("a", {"x": flatten(1)})
                    inside.pop()
                    saved.append(new.commit().path)

        inside, saved = [], []
        with ThreadPoolExecutor(2) as pool:
            for each in [pool.submit(save_some) for _ in range(2)]:
                each.result()
        assert newest_first(tmp_path) == saved[::-1]
        assert len(saved) == 10


# -- tensors that move


def test_after_a_failure_what_was_not_written_is_its_owners(tmp_path, monkeypatch):
    monkeypatch.setattr("hydra_engine.checkpoints.tensors.FILE_BYTES", 8)
    moving = {f"w{k}": MovingTensor(torch.zeros(9)) for k in range(4)}
    with CheckpointDirectory(tmp_path, disk=(disk := FailingDisk(10**9, what_takes_room))) as store:
        disk.num_left = 5  # two files take two calls each
        with refused(CheckpointError, task="'a'", says="00000001- B space"), store.begin() as new:
            new.add("a", {WEIGHTS: moving})
        assert [each.is_done for each in moving.values()] == [True, True, False, False]
        assert [each.secure() for each in moving.values()] == [0, 0, 36, 36]
        assert newest_first(tmp_path) == []
        assert_nothing_unnamed(tmp_path)


class StandingDisk(Disk):
    """Its first write goes on when it is told to."""

    def __init__(self):
        self.stands, self.goes_on = threading.Event(), threading.Event()

    def write(self, path, put):
        self.stands.set()
        assert self.goes_on.wait(60), "somebody waits for the disk who should not"
        return super().write(path, put)


def test_who_updates_does_not_wait_for_a_disk_that_stands_still(tmp_path, monkeypatch):
    monkeypatch.setattr("hydra_engine.checkpoints.tensors.FILE_BYTES", 30)
    tensors = [torch.full((9,), float(k)) for k in range(6)]
    moving = [MovingTensor(each) for each in tensors]
    disk, copied = StandingDisk(), []

    def update():
        disk.stands.wait(60)
        copied.extend(each.secure() for each in moving)
        for each in tensors:
            each.fill_(255)
        disk.goes_on.set()

    with CheckpointDirectory(tmp_path) as store:
        store.disk = disk
        with store.begin() as new:
            updater = threading.Thread(target=update)
            updater.start()
            new.add("a", {WEIGHTS: {f"w{k}": each for k, each in enumerate(moving)}})
            updater.join()
            new.commit()
        found = load_newest(tmp_path).read_tensors("a", WEIGHTS)
    assert [found[f"w{k}"].tolist() for k in range(6)] == [[float(k)] * 9 for k in range(6)]
    assert copied == [36] * 6


def test_saves_while_another_thread_updates_in_any_order(tmp_path, monkeypatch):
    monkeypatch.setattr("hydra_engine.checkpoints.tensors.FILE_BYTES", 2**15)
    generator = random.Random(0)
    tensors = [torch.zeros(1 + k * 700) for k in range(40)] + [torch.zeros(90, 70).t()]
    with CheckpointDirectory(tmp_path, keep=1) as store:
        for k in range(20):
            moving = [MovingTensor(each) for each in tensors]
            order = generator.sample(range(len(tensors)), len(tensors))

            def update(moving=moving, order=order):
                for j in order:
                    moving[j].secure()
                    tensors[j].add_(1)

            updater = threading.Thread(target=update)
            with store.begin() as new:
                updater.start()
                new.add("a", {WEIGHTS: {f"w{j}": each for j, each in enumerate(moving)}})
                updater.join()
                new.commit()
            found = store.load_newest().read_tensors("a", WEIGHTS)
            assert all(torch.equal(found[f"w{j}"], torch.full_like(each, k)) for j, each in enumerate(tensors))
            assert all(each.is_done for each in moving)


# -- bytes that change


@pytest.mark.parametrize("num", [100, pytest.param(1000, marks=pytest.mark.rest)])
def test_altered_bytes_are_noticed_also_where_two_share_them(tmp_path, num):
    with CheckpointDirectory(tmp_path) as store:
        first, second = save_round(store, 0).path, save_round(store, 1).path
    named = [{each.file for each in read_manifest(path).files} for path in (first, second)]
    paths = [tmp_path / "files" / name for name in sorted(named[1])]
    places = [(path, offset) for path in paths for offset in range(path.stat().st_size)]
    generator = random.Random(0)
    num_shared = 0
    for _ in range(num):
        path, offset = generator.choice(places)
        mask = generator.randrange(1, 256)
        flip(path, offset, mask)
        if path.name in named[0]:
            num_shared += 1
            with refused(CheckpointError, says="2") as caught:
                load_newest(tmp_path)
            assert str(caught.value).count(path.name) == 2
        else:
            found = load_newest(tmp_path)
            assert found.path == first
            [message] = found.messages
            names(message, says=f"{path.name} {second.name}")
        flip(path, offset, mask)
    assert num / 5 < num_shared < num
    assert_round(load_newest(tmp_path), 1)
