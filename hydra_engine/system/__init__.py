"""This machine: cores, DRAM, files and locks on disk, and the command that started the process."""

from hydra_engine.system import dram, process
from hydra_engine.system.cores import HostThreads, bound, host_threads
from hydra_engine.system.dram import (
    DRAM_REMEDY,
    Freed,
    HostMemory,
    discard,
    is_alone,
    is_out_of_dram,
    return_free_memory,
)
from hydra_engine.system.files import (
    NUM_THREADS,
    PORTION_BYTES,
    Disk,
    Fingerprint,
    NewFile,
    OldFile,
    WriteBehind,
    fingerprint,
)
from hydra_engine.system.locks import Beside, FolderLock, Hold, RevocableLock, TakenAway
from hydra_engine.system.process import is_interactive

__all__ = [
    "DRAM_REMEDY",
    "NUM_THREADS",
    "PORTION_BYTES",
    "Beside",
    "Disk",
    "Fingerprint",
    "FolderLock",
    "Freed",
    "Hold",
    "HostMemory",
    "HostThreads",
    "NewFile",
    "OldFile",
    "RevocableLock",
    "TakenAway",
    "WriteBehind",
    "bound",
    "discard",
    "dram",
    "fingerprint",
    "host_threads",
    "is_alone",
    "is_interactive",
    "is_out_of_dram",
    "process",
    "return_free_memory",
]
