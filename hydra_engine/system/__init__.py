"""This machine: cores, DRAM, files and locks on disk, and the command that started the process."""

from hydra_engine.system import dram, process
from hydra_engine.system.cores import HostThreads, host_threads
from hydra_engine.system.dram import (
    DRAM_REMEDY,
    Freed,
    HostMemory,
    begin_workers,
    discard,
    is_alone,
    is_out_of_dram,
    keep_small_pages,
    num_users,
    return_free_memory,
)
from hydra_engine.system.files import Disk, cache_folder, checksum
from hydra_engine.system.locks import FolderLock
from hydra_engine.system.process import is_interactive
