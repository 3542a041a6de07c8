"""The watcher of a machine that is shared with others: free GPUs join a pool, and leave it when somebody wants them.

`Watch` decides, without a clock or NVML; `GpuWatcher` looks, waits and acts, in a thread while a run is at work.
"""

from __future__ import annotations

import fcntl
import math
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hydra_engine.control import Pool
from hydra_engine.devices.cuda import CudaDevice
from partitioners import format_bytes, parse_bytes
from partitioners.plain_numbers import make_plain

AUTO = "auto"
# The end of a run waits so long for a look that is under way: NVML may hang with its driver.
PATIENCE_S = 10.0
# A GPU on which processes hold more than this, and none is shown, is not free: in a container, NVML leaves out those
# of other containers. The driver itself and a desktop take less.
UNSEEN_BYTES = 2**31


@dataclass(frozen=True, kw_only=True)
class SeenGpu:
    """A GPU as NVML shows it at one time.

    held_bytes: what this process holds of it. pids: of the processes that compute there; None: NVML does not tell.
    """

    total_bytes: int
    free_bytes: int
    held_bytes: int = 0
    pids: frozenset[int] | None = frozenset()


@dataclass(frozen=True, kw_only=True)
class FreeGpus:
    """Devices of `ModelOrchestrator(devices=FreeGpus())`: the GPUs that are free, at any time. "auto" is the same.

    Args:
        memory: a GPU is free where this process can have so much of it, in bytes or as text ("20GiB"), whoever else is
            there; of each GPU no more is used. None: a GPU is free where no other process computes, and all of it is
            used.
        poll_s: seconds between two looks.
        free_s: a GPU that was seen in use is taken once it has been free for so long. It is given up at once.
        grace_s: that the unit on a GPU which is given up has to finish; see `ModelOrchestrator.remove_device`.
        nvml: the module that asks NVML; None: pynvml, of nvidia-ml-py.
    """

    memory: int | str | None = None
    poll_s: float = 5.0
    free_s: float = 60.0
    grace_s: float | None = 30.0
    nvml: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        make_plain(self)
        if self.memory is not None:
            parse_bytes(self.memory, "memory")
        _check_seconds("poll_s", self.poll_s, "more than 0, a day at most", lambda value: 0 < value <= 86400)
        _check_seconds("free_s", self.free_s, "0 or more")
        if self.grace_s is not None:
            _check_seconds("grace_s", self.grace_s, "0 or more, or None")

    def occupant(self, gpu: SeenGpu, own_pid: int) -> str | None:
        """Return in words what keeps this GPU from being free; None: it is free."""
        if self.memory is not None:
            asked, room = parse_bytes(self.memory, "memory"), gpu.free_bytes + gpu.held_bytes
            return None if room >= asked else f"{format_bytes(room)} free, {format_bytes(asked)} asked for"
        if others := _others(gpu, own_pid):
            return others
        unseen = gpu.total_bytes - gpu.free_bytes - gpu.held_bytes
        return None if unseen <= UNSEEN_BYTES else f"{format_bytes(unseen)} held by processes that NVML does not show"


def _check_seconds(
    what: str, value: Any, limit: str, is_right: Callable[[float], bool] = lambda value: value >= 0
) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and value <= threading.TIMEOUT_MAX and is_right(value)):
        raise ValueError(f"{what}: {value!r}, limit: seconds, {limit}; give for example 5")


def _others(gpu: SeenGpu, own_pid: int) -> str | None:
    """Name the processes of others on a GPU.

    A driver may number processes as the host does, and not as our container: where this process holds memory and is
    not listed, it is one of those that are.
    """
    pids = gpu.pids or frozenset()
    others = pids - {own_pid}
    if gpu.held_bytes and others == pids:
        return f"{len(others) - 1} more processes than this one" if len(others) > 1 else None
    return f"process {min(others)}" + (f" and {len(others) - 1} more" if len(others) > 1 else "") if others else None


class Take(NamedTuple):
    """A GPU is free: let it join."""

    name: str


class GiveUp(NamedTuple):
    """Somebody else wants a GPU: let it go."""

    name: str
    occupant: str


class Watch:
    """Decides which GPUs join and leave a pool, over all runs of an orchestrator.

    A GPU is given up at the first look that shows it in use, and taken once it has been free for `free_s`: so it does
    not come and go with every short process. One that somebody else removed from the pool, or that failed, stays out
    until somebody adds it.
    """

    def __init__(self, settings: FreeGpus, max_devices: int | None = None) -> None:
        """`max_devices`: of the pool."""
        self._free_s = settings.free_s
        self._max_devices = max_devices
        self._free_since: dict[str, float] = {}  # GPUs that were free at every look since
        self._given_up: set[str] = set()  # and not back yet

    def begin(self) -> None:
        """Forget what was seen before a time without looks."""
        self._free_since.clear()

    def decide(self, now_s: float, occupants: Mapping[str, str | None], pool: Mapping[str, str]) -> list[Take | GiveUp]:
        """Return what is to change, given who is on each GPU, and its place in the pool: "in", "leaving" or "out".

        A GPU that is not in `occupants` was not seen, and nothing changes for it.
        """
        changes: list[Take | GiveUp] = []
        self._given_up -= {name for name, place in pool.items() if place == "in"}
        self._free_since = {
            name: self._free_since.get(name, now_s) for name, occupant in occupants.items() if occupant is None
        }
        num_in = sum(place != "out" for place in pool.values())
        for name, occupant in occupants.items():
            if occupant is not None and pool.get(name) == "in":
                self._given_up.add(name)
                changes.append(GiveUp(name, occupant))
            elif occupant is None and (name not in pool or (pool[name] == "out" and name in self._given_up)):
                has_room = self._max_devices is None or num_in < self._max_devices
                if has_room and now_s - self._free_since[name] >= self._free_s:
                    num_in += 1
                    self._given_up.discard(name)  # from now on, who takes it out means it
                    changes.append(Take(name))
        return changes

    def refused(self, name: str) -> None:
        """A GPU could not join: wait for `free_s` again."""
        self._free_since.pop(name, None)
        self._given_up.add(name)


class GpuWatcher:
    """Watches the GPUs of one orchestrator: `take` gives those to begin with, `watching` is for each run.

    Raises ImportError without nvidia-ml-py, RuntimeError where NVML does not work or there is no GPU.
    """

    def __init__(
        self,
        settings: FreeGpus,
        *,
        max_devices: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        """`wait` for so many seconds; True: the run is over."""
        self._uuids = CudaDevice.uuids()
        if not self._uuids:
            raise RuntimeError(
                f"devices: {AUTO!r}, limit: a process that sees CUDA devices; check the driver and "
                f"CUDA_VISIBLE_DEVICES, or leave devices= out to train on the CPU"
            )
        self._nvml = _begun(settings.nvml)
        self._settings = settings
        self._watch = Watch(settings, max_devices)
        self._max_devices = max_devices
        self._clock, self._wait = clock, wait
        self._told: Counter[str] = Counter()  # for the report of a run

    @classmethod
    def asked(cls, devices: Any, max_devices: int | None = None) -> GpuWatcher | None:
        """Return the watcher for devices="auto" or `FreeGpus`; None for all others."""
        settings = FreeGpus() if isinstance(devices, str) and devices == AUTO else devices
        return cls(settings, max_devices=max_devices) if isinstance(settings, FreeGpus) else None

    def take(self) -> list[CudaDevice]:
        """Return the GPUs that are free now; RuntimeError if none is."""
        specs: list[CudaDevice] = []
        refused = []
        for name, seen in self._look().items():
            if self._max_devices is not None and len(specs) == self._max_devices:
                break
            occupant = seen if isinstance(seen, str) else self._settings.occupant(seen, os.getpid())
            try:
                if occupant is None:
                    specs.append(self._spec(name))
            except RuntimeError as error:
                occupant = str(error)
            if occupant is not None:
                refused.append(f"{name}: {occupant}")
        if not specs:
            raise RuntimeError(
                f"devices: no GPU is free ({'; '.join(refused)}), limit: one to begin with; begin again when one is, "
                f"ask for less with FreeGpus(memory=...), or name the devices"
            )
        return specs

    @contextmanager
    def watching(self, pool: Pool, messages: list[str]) -> Iterator[None]:
        """Let GPUs join and leave a pool during the block, from a thread; `messages` says what happened."""
        over = threading.Event()

        def work() -> None:
            while not (self._wait or over.wait)(self._settings.poll_s):
                try:
                    self.poll(pool)
                except Exception as error:  # the next look may be better
                    self._told[f"{type(error).__name__}: {error}"] += 1

        self._watch.begin()
        self._told.clear()
        thread = threading.Thread(target=work, name="hydra-gpus", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(PATIENCE_S)
            messages += (f"{text} ({times} times)" if times > 1 else text for text, times in list(self._told.items()))
            if thread.is_alive():
                messages.append(f"NVML did not return; the thread {thread.name!r}, which asked, was left behind")

    def poll(self, pool: Pool) -> None:
        """Look once, and let GPUs join and leave."""
        occupants = {}
        for name, seen in self._look().items():
            if isinstance(seen, str):
                self._told[f"{name}: {seen}; it stays as it is"] += 1
            else:
                occupants[name] = self._settings.occupant(seen, os.getpid())
        for change in self._watch.decide(self._clock(), occupants, pool.devices):
            name = change.name
            try:
                if isinstance(change, GiveUp):
                    pool.remove_device(name, self._settings.grace_s)
                    self._told[f"{name}: given up, {change.occupant}"] += 1
                else:
                    pool.add_device(self._spec(name))
                    self._told[f"{name}: taken, since it was free"] += 1
            except (ValueError, RuntimeError) as error:
                self._watch.refused(name)
                self._told[f"{name}: {error}"] += 1

    def _look(self) -> dict[str, SeenGpu | str]:
        """Return what NVML shows of each GPU, or why it does not."""
        return {name: self._seen(name, uuid) for name, uuid in self._uuids.items()}

    def _seen(self, name: str, uuid: str) -> SeenGpu | str:
        nvml = self._nvml
        try:
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            except nvml.NVMLError:
                handle = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError as error:
            return f"NVML does not show it: {error}"
        try:
            shown = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except nvml.NVMLError:  # not supported, or not permitted: memory tells
            shown = None
        pids = None if shown is None else frozenset(int(each.pid) for each in shown)
        held_bytes = CudaDevice.held_bytes(int(name.partition(":")[2]))
        return SeenGpu(total_bytes=memory.total, free_bytes=memory.free, held_bytes=held_bytes, pids=pids)

    def _spec(self, name: str) -> CudaDevice:
        """Return the GPU with what is free of it now, which may be less than it was before."""
        memory = self._settings.memory
        if memory is None and not _claimed(self._uuids[name]):
            raise RuntimeError("another run of this user has claimed it")
        return CudaDevice(int(name.partition(":")[2]), memory)


def _begun(nvml: Any) -> Any:
    """Return the module that asks NVML, ready to be asked."""
    if nvml is None:
        try:
            import pynvml
        except ImportError as error:
            raise ImportError(
                f"devices: {AUTO!r} without nvidia-ml-py, limit: NVML tells which GPUs are free; "
                f"`pip install hydra_engine[nvml]` or `pip install nvidia-ml-py`, or name the devices"
            ) from error
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise RuntimeError(
            f"devices: {AUTO!r}, but NVML does not work here: {error}; see whether nvidia-smi does, or name the devices"
        ) from error
    return nvml


def _claimed(uuid: str) -> bool:
    """Claim a GPU for this process, until its end; False: another one of this user has claimed it.

    Two runs that begin at the same time would both take a GPU, see each other there and give it up; and since a context
    stays until its process ends, neither would take it back.
    """
    try:
        fcntl.lockf(_claim_file(uuid), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # or there is no folder for temporary files, so that nothing can be claimed
        return not isinstance(error, BlockingIOError)
    return True


@cache
def _claim_file(uuid: str) -> int:
    """Open the file that is locked. It stays open: whoever closes any descriptor of it gives this lock up."""
    path = Path(tempfile.gettempdir(), f"hydra-engine-{os.getuid()}-{uuid}.lock")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
