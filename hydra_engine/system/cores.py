"""The host's cores: those that this process may use, their NUMA nodes, and the threads that get them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

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

    cores: int  # that the run may use; if it is bound to a node, that node's
    num_nodes: int  # NUMA nodes with cores that this process may use
    optimizer_threads: int  # that commit and update
    intra_op_threads: int  # of each lane and reader: the caller's number, since bits depend on it
    optimizer_intra_op_threads: int  # of each optimizer thread: the same, where devices compute on these cores
    launch_cores: int  # wanted by the devices' lanes: one each
    data_cores: int  # wanted by the loaders
    numa_node: int | None = None  # all threads are bound to it
    bound_cores: frozenset[int] | None = None  # the numbers of its cores
    device_nodes: tuple[int | None, ...] = ()  # by device: the node it is attached to, if known

    @property
    def cores_left(self) -> int:
        """The number of cores that are free while every optimizer thread computes."""
        return max(0, self.cores - self.optimizer_threads * self.optimizer_intra_op_threads)

    def __str__(self) -> str:
        nodes = _plural(self.num_nodes, "NUMA node")
        where = f", {nodes}" if self.numa_node is None else f" of NUMA node {self.numa_node}, {nodes}"
        parts = [
            f"host: {_plural(self.cores, 'core')}{where}",
            f"{_plural(self.optimizer_threads, 'optimizer thread')} x {self.optimizer_intra_op_threads} intra-op",
            f"{_plural(self.cores_left, 'core')} left, launches and data want {self.launch_cores + self.data_cores}",
            *(f"device {k} is attached to node {node}" for k, node in enumerate(self.device_nodes) if node is not None),
        ]
        return "; ".join(parts)


def host_threads(
    *,
    intra_op_threads: int,
    device_nodes: Sequence[int | None],
    optimizer_threads: int | None = None,
    numa_node: int | None = None,
    computes_here: bool = True,
) -> HostThreads:
    """Return the threads of a run on devices that are attached to these nodes.

    optimizer_threads: None for 1 to 4, so that each device and the loaders have a core. numa_node: to bind the run to.
    computes_here: devices are emulated, so that an update has the caller's number of intra-op threads, by which its
        bits are chosen. Else it takes only as many as leave cores to devices and loaders.

    Raises TypeError or ValueError for wrong settings, RuntimeError if this system binds no threads.
    """
    optimizer_threads, numa_node = plain(optimizer_threads), plain(numa_node)
    allowed = allowed_cores()
    nodes = numa_nodes(allowed)
    if optimizer_threads is not None:
        _check_optimizer_threads(optimizer_threads)
    if numa_node is not None:
        _check_numa_node(numa_node, nodes)
    bound_cores = None if numa_node is None else nodes[numa_node]
    cores = num_cores(allowed if bound_cores is None else bound_cores)
    spare = cores - len(device_nodes) - DATA_CORES
    if optimizer_threads is None:
        optimizer_threads = max(1, min(MOST_OPTIMIZER_THREADS, spare // intra_op_threads))
    own_threads = intra_op_threads if computes_here else max(1, min(intra_op_threads, spare // optimizer_threads))
    return HostThreads(
        cores=cores,
        num_nodes=len(nodes),
        optimizer_threads=optimizer_threads,
        intra_op_threads=intra_op_threads,
        optimizer_intra_op_threads=own_threads,
        launch_cores=len(device_nodes),
        data_cores=DATA_CORES,
        numa_node=numa_node,
        bound_cores=bound_cores,
        device_nodes=tuple(device_nodes),
    )


def _check_optimizer_threads(number: object) -> None:
    remedy = "give the threads that commit and update, or None to leave cores to devices and loaders"
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"optimizer_threads: {number!r}, limit: an int of at least 1; {remedy}")
    if number < 1:
        raise ValueError(f"optimizer_threads: {number}, limit: at least 1; {remedy}")


def _check_numa_node(node: object, nodes: dict[int, frozenset[int]]) -> None:
    known = ", ".join(map(str, nodes))
    remedy = "give one of these, or None to leave the threads to the system"
    if not hasattr(os, "sched_setaffinity"):
        raise RuntimeError(f"numa_node: {node!r}, limit: None, since this system cannot bind threads; leave it None")
    if not isinstance(node, int) or isinstance(node, bool):
        raise TypeError(f"numa_node: {node!r}, limit: an int, of the nodes this process may use: {known}; {remedy}")
    if node not in nodes:
        raise ValueError(f"numa_node: {node}, limit: the nodes whose cores this process may use: {known}; {remedy}")


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


def numa_nodes(cores: frozenset[int]) -> dict[int, frozenset[int]]:
    """Return the cores of each NUMA node, among these cores; a node with none of them is left out.

    If the system names no nodes, all cores are node 0's. https://docs.kernel.org/admin-guide/mm/numaperf.html
    """
    nodes = {}
    for folder in ROOT.glob("sys/devices/system/node/node[0-9]*"):
        own = cores & _numbers(_read(folder / "cpulist"))
        if own:
            nodes[int(folder.name.removeprefix("node"))] = own
    return dict(sorted(nodes.items())) or {0: cores}


def _numbers(text: str) -> frozenset[int]:
    """Return the numbers of a list: 0, 1, 2 and 8 for "0-2,8"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


@contextmanager
def bound(cores: frozenset[int] | None, *, with_helpers: bool = True) -> Iterator[None]:
    """Bind the calling thread, and all threads that it begins, to these cores; None: bind nothing.

    Memory that these threads are the first to touch lies on their node. Afterwards the calling thread has its own cores
    again. With `with_helpers`, so have the threads that it began meanwhile and that still run: torch's intra-op threads
    stay with the thread they were begun for. https://man7.org/linux/man-pages/man2/sched_setaffinity.2.html
    """
    if cores is None or (before := os.sched_getaffinity(0)) == cores:
        yield
        return
    threads = _thread_ids() if with_helpers else set()
    try:
        os.sched_setaffinity(0, cores)
        yield
    finally:
        os.sched_setaffinity(0, before)
        for thread in _thread_ids() - threads if with_helpers else ():
            with suppress(OSError):  # it has ended
                if os.sched_getaffinity(thread) == cores:
                    os.sched_setaffinity(thread, before)


def _thread_ids() -> set[int]:
    with suppress(OSError):
        return {int(name) for name in os.listdir("/proc/self/task")}
    return set()


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
