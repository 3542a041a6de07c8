"""A save that is cut off at any system call, by whatever, leaves the newest whole checkpoint, and the next succeeds."""

import contextlib
import random

import pytest

from hydra_engine.checkpoints.checkpoint import load_newest, newest_first
from hydra_engine.checkpoints.directory import CheckpointDirectory
from hydra_engine.errors import CheckpointError
from tests.checkpoints.support import (
    KINDS,
    FailingDisk,
    Killed,
    LosingDisk,
    all_calls,
    assert_nothing_unnamed,
    assert_stopped_whole,
    one_call,
    what_takes_room,
    write_out,
)


@pytest.fixture(params=KINDS)
def kind(request):
    """A function that saves, and one that asserts that a checkpoint holds it."""
    return KINDS[request.param]


def test_a_kill(tmp_path, kind):
    save, assert_holds = kind
    outcomes, stopped = [], set()
    for n in range(1, 1000):
        folder = tmp_path / str(n)
        with CheckpointDirectory(folder) as store:
            save(store, 0)
            save(store, 1)
        with CheckpointDirectory(folder, keep=1, disk=(disk := FailingDisk(10**9, all_calls))) as store:
            store.load_newest()
            disk.num_left = n
            with contextlib.suppress(Killed):
                save(store, 2)
        stopped.update(disk.failed[:1])
        outcomes.append(assert_stopped_whole(folder, assert_holds, save, 3))
        if not disk.failed:
            break
    else:
        pytest.fail("the save never came to an end")
    assert outcomes == sorted(outcomes), "once there, it stays there"
    assert set(outcomes) == {1, 2}
    assert stopped == {"create", "write", "sync", "rename", "remove_file"}


@pytest.mark.parametrize("fails", [one_call, what_takes_room])
def test_a_full_disk(tmp_path, kind, fails):
    save, assert_holds = kind
    errors = []
    for n in range(1, 1000):
        folder = tmp_path / str(n)
        with CheckpointDirectory(folder, keep=1, disk=(disk := FailingDisk(10**9, fails))) as store:
            save(store, 0)
            disk.num_left = n
            try:
                saved = save(store, 1)
                assert not disk.failed or "could not be removed: [Errno 28]" in saved.messages[0]
                expected = 1
            except CheckpointError as error:
                errors.append(str(error))
                assert_nothing_unnamed(folder)
                expected = len(newest_first(folder)) - 1  # it may have its place already
            assert_holds(load_newest(folder), expected)
            disk.num_left = 10**9
            assert save(store, 2).messages == ()
            assert_holds(store.load_newest(), 2)
            assert len(newest_first(folder)) == 1
            assert_nothing_unnamed(folder)
        if not disk.failed:
            break
    else:
        pytest.fail("the save never came to an end")
    assert len(errors) > 5
    for text in ("did not take checkpoint-00000002", "No space left on device (", " free now)", "Make room there"):
        assert all(text in error for error in errors)


def test_a_power_failure(tmp_path, kind):
    save, assert_holds = kind
    disk = LosingDisk(tmp_path / "real")
    with CheckpointDirectory(tmp_path / "real", keep=1, disk=disk) as store:
        returned = [(save(store, k), len(disk.moments))[1] for k in range(5)]
    seen = []
    for n, kept in enumerate(disk.moments, 1):
        (folder := tmp_path / str(n)).mkdir()
        write_out(kept, 0, folder)
        found = load_newest(folder)
        k = -1 if found is None else found.data["k"]
        assert k >= sum(n >= each for each in returned) - 1, "what a save has returned for stays"
        assert found is None or (assert_holds(found, k), found.messages)[1] == ()
        seen.append(k)
    assert seen == sorted(seen)
    assert set(seen) == {-1, 0, 1, 2, 3, 4}


def test_every_altered_byte_of_a_manifest_is_noticed(tmp_path, kind):
    save, assert_holds = kind
    with CheckpointDirectory(tmp_path) as store:
        path = [save(store, k).path for k in range(2)][1]
    generator = random.Random(0)
    content = path.read_bytes()
    for offset in range(len(content)):
        for mask in (0x20, generator.randrange(1, 256)):  # 0x20: of a hexadecimal digit, the other case
            path.write_bytes(content[:offset] + bytes([content[offset] ^ mask]) + content[offset + 1 :])
            found = load_newest(tmp_path)
            assert found.data == {"k": 0}, (offset, mask)
            assert "manifest: found" in found.messages[0]
    for text in (content + b"\n", b" " + content, b""):
        path.write_bytes(text)
        assert load_newest(tmp_path).data == {"k": 0}
    path.write_bytes(content)
    assert_holds(load_newest(tmp_path), 1)
