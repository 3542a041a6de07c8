import sys
from pathlib import Path

import pytest
import torch

from hydra_engine.system import HostMemory, begin_workers
from hydra_engine.system.dram import available_dram_bytes


def flags_of(storage):
    """What the system says of the mapping that a storage lies in."""
    found = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, last = line.partition(" ")[0].partition("-")
        if last:
            is_here = int(first, 16) <= storage.data_ptr() < int(last, 16)
        elif is_here and first == "VmFlags:":
            found = line.split()[1:]
    return found


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 5 * 2**20 + 3])
def test_memory_has_the_bytes_that_were_asked_for(num_bytes):
    memory = HostMemory()
    storage = memory.new(num_bytes)
    assert storage.nbytes() == num_bytes
    values = torch.empty(0, dtype=torch.uint8).set_(storage).fill_(7)
    memory.let_go(storage)
    memory.discard(storage, 0, num_bytes)
    del storage
    assert len(values) == num_bytes


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without large pages")
@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell it otherwise")
def test_memory_of_the_host_may_be_given_in_large_pages_and_is_not_locked():
    flags = flags_of(HostMemory().new(8 * 2**20))
    assert "hg" in flags
    assert "lo" not in flags


@pytest.mark.skipif(sys.platform != "linux", reason="other systems fork otherwise")
@pytest.mark.parametrize(("num_workers", "is_hidden"), [(2, True), (0, False)])
def test_workers_are_forked_without_the_memory_that_is_written_to(num_workers, is_hidden):
    written, read = HostMemory().new(2**22), HostMemory().new(2**22, is_written=False)
    with begin_workers(num_workers):
        found = [flags_of(storage) for storage in (written, read)]
    assert ["dc" in flags for flags in found] == [is_hidden, False]
    assert "dc" not in flags_of(written)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems fork otherwise")
def test_processes_are_forked_with_all_memory_again_after_a_loader_that_raises():
    written = HostMemory().new(2**22)
    with pytest.raises(KeyError), begin_workers(1):
        raise KeyError
    assert "dc" not in flags_of(written)


V2 = {
    "memory.max": 1000,
    "memory.current": 900,
    "memory.stat": "anon 300\nfile 500\nactive_file 100\ninactive_file 350\n",
}
V1 = {
    "memory/memory.limit_in_bytes": 1000,
    "memory/memory.usage_in_bytes": 900,
    "memory/memory.stat": "inactive_file 1\ntotal_active_file 100\ntotal_inactive_file 350\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (V2, 550),
        (V1, 550),
        (V2 | {"memory.stat": "anon 900\n"}, 100),
        (V2 | {"memory.current": 4000}, 0),
        ({name: value for name, value in V2.items() if name != "memory.stat"}, 100),
        (V2 | {"memory.max": "max"}, None),
        ({}, None),
    ],
)
def test_files_that_a_cgroup_has_read_do_not_count_as_used(tmp_path, files, expected):
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    available = available_dram_bytes(tmp_path)
    assert available == expected if expected is not None else available > 1000
