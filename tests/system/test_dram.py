import sys
from pathlib import Path

import pytest
import torch

from hydra_engine.system import HostMemory, PrivateMemory


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
@pytest.mark.parametrize("memory", [HostMemory(), PrivateMemory()], ids=lambda memory: type(memory).__name__)
def test_memory_has_the_bytes_that_were_asked_for(memory, num_bytes):
    storage = memory.new(num_bytes)
    assert storage.nbytes() == num_bytes
    values = torch.empty(0, dtype=torch.uint8).set_(storage).fill_(7)
    memory.let_go(storage)
    memory.discard(storage, 0, num_bytes)
    del storage
    assert len(values) == num_bytes


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without large pages")
@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell it otherwise")
def test_private_memory_may_be_given_in_large_pages_and_is_not_locked():
    flags = flags_of(PrivateMemory().new(8 * 2**20))
    assert "hg" in flags
    assert "lo" not in flags
