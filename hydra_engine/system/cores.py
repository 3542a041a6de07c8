"""The host's cores: those that this process may use, and the threads that get them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hydra_engine.texts import plural
from partitioners.plain_numbers import plain

# The root of the system's folders.
ROOT = Path("/")
# Not measured against other numbers. One thread already moves bytes at the rate of a plain pass over memory
# (benchmarks/host_optimizer), so more threads would mostly wait for memory.
MOST_OPTIMIZER_THREADS = 4
# Loaders draw from the process-wide generators, so they are read under one lock: one works at a time.
DATA_CORES = 1


@dataclass(frozen=True, kw_only=True)
class HostThreads:
    """The threads of a run that compute on the host, and their cores; prints as one line."""

    cores: int  # that the run may use
    optimizer_threads: int  # that commit and update
    intra_op_threads: int  # of each lane and reader: the caller's number, since bits depend on it
    optimizer_intra_op_threads: int  # of each optimizer thread: the same, where devices compute on these cores
    launch_cores: int  # wanted by the devices' lanes: one each
    data_cores: int  # wanted by the loaders

    @property
    def cores_left(self) -> int:
        """The number of cores that are free while every optimizer thread computes."""
        return max(0, self.cores - self.optimizer_threads * self.optimizer_intra_op_threads)

    def __str__(self) -> str:
        return (
            f"host: {plural(self.cores, 'core')}; {plural(self.optimizer_threads, 'optimizer thread')} x "
            f"{self.optimizer_intra_op_threads} intra-op; {plural(self.cores_left, 'core')} left, launches and data "
            f"want {self.launch_cores + self.data_cores}"
        )


def host_threads(
    *,
    intra_op_threads: int,
    num_devices: int,
    optimizer_threads: int | None = None,
    computes_here: bool = True,
) -> HostThreads:
    """Return the threads of a run on so many devices.

    optimizer_threads: None for 1 to 4, so that each device and the loaders have a core.
    computes_here: devices are emulated, so that an update has the caller's number of intra-op threads, by which its
        bits are chosen. Else it takes only as many as leave cores to devices and loaders.

    Raises TypeError or ValueError for a wrong number.
    """
    optimizer_threads = plain(optimizer_threads)
    if optimizer_threads is not None:
        _check_optimizer_threads(optimizer_threads)
    cores = num_cores(allowed_cores())
    spare = cores - num_devices - DATA_CORES
    if optimizer_threads is None:
        optimizer_threads = max(1, min(MOST_OPTIMIZER_THREADS, spare // intra_op_threads))
    own_threads = intra_op_threads if computes_here else max(1, min(intra_op_threads, spare // optimizer_threads))
    return HostThreads(
        cores=cores,
        optimizer_threads=optimizer_threads,
        intra_op_threads=intra_op_threads,
        optimizer_intra_op_threads=own_threads,
        launch_cores=num_devices,
        data_cores=DATA_CORES,
    )


def _check_optimizer_threads(number: object) -> None:
    remedy = "give the threads that commit and update, or None to leave cores to devices and loaders"
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"optimizer_threads: {number!r}, limit: an int of at least 1; {remedy}")
    if number < 1:
        raise ValueError(f"optimizer_threads: {number}, limit: at least 1; {remedy}")


def allowed_cores() -> frozenset[int]:
    """Return the numbers of the cores that the calling thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def num_cores(cores: frozenset[int]) -> int:
    """Return the number of these cores that the process's cgroups let it keep busy, rounded down; at least 1."""
    return max(1, int(min([len(cores), *_quotas()])))


def _quotas() -> Iterator[float]:
    """Yield the number of cores that each cgroup of this process grants, from the outermost one on."""
    # https://docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max) and https://docs.kernel.org/scheduler/sched-bwc.html
    for line in _read(ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        own = controllers.split(",")
        if own == [""]:
            bases, files = ["", "unified"], ["cpu.max"]
        elif "cpu" in own:
            bases, files = ["cpu"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        # In a container the path may be the host's, and only the outermost folder be there.
        names = [name for name in path.split("/") if name not in ("", "..")]
        for base in bases:
            for depth in range(len(names) + 1):
                folder = ROOT.joinpath("sys/fs/cgroup", base, *names[:depth])
                words = " ".join(_read(folder / name) for name in files).split()
                if len(words) == 2 and words[0] not in ("max", "-1"):
                    yield int(words[0]) / int(words[1])


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""
