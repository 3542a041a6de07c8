"""A save that is cut off at any system call, by whatever, leaves the newest whole checkpoint, and the next succeeds."""

import contextlib
import errno
import os
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
from tests.covering import covering
from tests.refused import names


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill(tmp_path, kind):
    save, assert_holds = KINDS[kind]
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
    assert stopped == {"write", "sync", "rename", "remove_file"}


@covering(kind=list(KINDS), fails=[one_call, what_takes_room], strength=1)
def test_a_full_disk(tmp_path, kind, fails):
    save, assert_holds = KINDS[kind]
    errors = []
    for n in range(1, 1000):
        folder = tmp_path / str(n)
        with CheckpointDirectory(folder, keep=1, disk=(disk := FailingDisk(10**9, fails))) as store:
            save(store, 0)
            disk.num_left = n
            try:
                saved = save(store, 1)
                if disk.failed:
                    names(saved.messages[0], says=f"{errno.ENOSPC}]")
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
    for error in errors:
        names(error, says="checkpoint-00000002")
        assert os.strerror(errno.ENOSPC) in error


@pytest.mark.parametrize("kind", KINDS)
def test_a_power_failure(tmp_path, kind):
    save, assert_holds = KINDS[kind]
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


# For each byte the newest checkpoint is looked for, so `make test` alters every seventh.
@pytest.mark.parametrize(
    ("kind", "first", "step"),
    [
        ("all written", 0, 7),
        ("files taken over", 3, 7),
        *(pytest.param(kind, 0, 1, marks=pytest.mark.rest) for kind in KINDS),
    ],
)
def test_altered_bytes_of_a_manifest_are_noticed(tmp_path, kind, first, step):
    save, assert_holds = KINDS[kind]
    with CheckpointDirectory(tmp_path) as store:
        path = [save(store, k).path for k in range(2)][1]
    generator = random.Random(0)
    content = path.read_bytes()
    for offset in range(first, len(content), step):
        for mask in (0x20, generator.randrange(1, 256)):  # 0x20: of a hexadecimal digit, the other case
            path.write_bytes(content[:offset] + bytes([content[offset] ^ mask]) + content[offset + 1 :])
            found = load_newest(tmp_path)
            assert found.data == {"k": 0}, (offset, mask)
            names(found.messages[0], says="manifest")
    for text in (content + b"\n", b" " + content, b""):
        path.write_bytes(text)
        assert load_newest(tmp_path).data == {"k": 0}
    path.write_bytes(content)
    assert_holds(load_newest(tmp_path), 1)
